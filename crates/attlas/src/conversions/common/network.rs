//! A whole network as conversions see it: matrices by place, and their replacements.

use super::moments::Moments;
use super::product::Product;
use crate::layer::{Dense, LayerShape};
use crate::{Error, Mat, Options, Result};
use attlas_num::rope::Rope;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Role of a matrix in its layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Role {
    /// Projection to queries.
    Query,
    /// Projection to keys.
    Key,
    /// Projection to values.
    Value,
    /// Projection from concatenated heads back to the residual stream.
    Output,
    /// Projection to the gate of the feed-forward layer.
    Gate,
    /// Projection into the feed-forward layer.
    Up,
    /// Projection out of the feed-forward layer.
    Down,
}

impl Role {
    /// Every role, in the order in which a layer uses them.
    pub const ALL: [Role; 7] =
        [Self::Query, Self::Key, Self::Value, Self::Output, Self::Gate, Self::Up, Self::Down];

    /// Returns its short name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Query => "q",
            Self::Key => "k",
            Self::Value => "v",
            Self::Output => "o",
            Self::Gate => "gate",
            Self::Up => "up",
            Self::Down => "down",
        }
    }

    /// True if it belongs to attention.
    pub fn in_attention(self) -> bool {
        matches!(self, Self::Query | Self::Key | Self::Value | Self::Output)
    }

    /// Parses a list of roles such as `q,k` or `attention`; `attention`, `ffn` and `all` stand for several.
    pub fn parse_list(text: &str) -> Result<Vec<Role>> {
        let mut roles = Vec::new();
        for word in text.split(',').map(str::trim) {
            let before = roles.len();
            roles.extend(Self::ALL.into_iter().filter(|r| match word {
                "all" => true,
                "attention" => r.in_attention(),
                "ffn" => !r.in_attention(),
                _ => r.name() == word,
            }));
            if roles.len() == before {
                return Err(Error::param(
                    "matrices",
                    word,
                    "q, k, v, o, gate, up, down, attention, ffn or all, joined by commas",
                ));
            }
        }
        roles.sort_unstable();
        roles.dedup();
        Ok(roles)
    }
}

/// The place of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Slot {
    /// Layer, counted from 0.
    pub layer: usize,
    /// Its role there.
    pub role: Role,
}

impl std::fmt::Display for Slot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "layer {} {}", self.layer, self.role.name())
    }
}

/// The matrices of a network. They are read one at a time, so that a network stored in a compact form need never be
/// expanded as a whole.
pub trait Network: Sync {
    /// Returns the sizes of its attention layers.
    fn shape(&self) -> LayerShape;
    /// Returns the number of layers.
    fn n_layers(&self) -> usize;
    /// Returns the outputs and inputs of a matrix; `None` if there is no matrix in this place.
    fn size(&self, slot: Slot) -> Option<(usize, usize)>;
    /// Returns the matrix with its bias.
    fn map(&self, slot: Slot) -> Result<Dense>;
    /// Returns the rotary positions of queries and keys, if there are any.
    fn rope(&self) -> Option<Rope>;
    /// Names the features of its attention beyond projections, rotary positions, a softmax over all tokens, and values,
    /// such as "sliding windows".
    fn obstacles(&self) -> Vec<String>;
    /// Returns moments of the inputs of a matrix on calibration text, if there was any.
    fn moments(&self, slot: Slot) -> Option<Arc<Moments>> {
        let _ = slot;
        None
    }
    /// Returns the loss of the network's predictions, in nats per token, for each unit of relative squared error in the
    /// outputs of a matrix, if it was measured.
    fn sensitivity(&self, slot: Slot) -> Option<f64> {
        let _ = slot;
        None
    }
}

/// The work of a conversion: a network, layers and roles.
#[derive(Clone, Copy)]
pub struct Request<'a> {
    /// The network.
    pub network: &'a dyn Network,
    /// The layers to convert; if absent, the conversion's own choice.
    pub layers: Option<&'a [usize]>,
    /// The matrices to convert; if absent, the conversion's own choice.
    pub roles: Option<&'a [Role]>,
    /// Its parameters.
    pub options: &'a Options,
    /// Callback for progress: parts done, and parts in total.
    pub progress: &'a (dyn Fn(usize, usize) + Sync),
}

impl std::fmt::Debug for Request<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { layers, roles, options, .. } = self;
        f.debug_struct("Request")
            .field("layers", layers)
            .field("roles", roles)
            .field("options", options)
            .finish_non_exhaustive()
    }
}

impl Request<'_> {
    /// Returns the named layers, or `default`; an error if the network has fewer, or there are none.
    pub fn layers_or(&self, default: impl FnOnce(usize) -> Vec<usize>) -> Result<Vec<usize>> {
        let n = self.network.n_layers();
        let mut layers = self.layers.map_or_else(|| default(n), <[usize]>::to_vec);
        layers.sort_unstable();
        layers.dedup();
        match layers.last() {
            None => Err(Error::param("layers", "none", "at least one")),
            Some(&last) if last >= n => Err(Error::param("layers", last, format!("0 to {}", n - 1))),
            Some(_) => Ok(layers),
        }
    }

    /// Returns the named places, or those of all roles that `default` accepts; an error if there are none.
    pub fn slots(&self, layers: &[usize], default: impl Fn(Role) -> bool) -> Result<Vec<Slot>> {
        let wanted = |r: Role| self.roles.map_or_else(|| default(r), |roles| roles.contains(&r));
        let slots: Vec<Slot> = layers
            .iter()
            .flat_map(|&layer| {
                Role::ALL.into_iter().filter(|r| wanted(*r)).map(move |role| Slot { layer, role })
            })
            .filter(|s| self.network.size(*s).is_some())
            .collect();
        if slots.is_empty() {
            return Err(Error::param("matrices", "none that the model has", "at least one"));
        }
        Ok(slots)
    }

    /// Returns an error if a request names parts of attention layers: they are replaced as a whole.
    pub fn whole_attention(&self, id: &str) -> Result<()> {
        match self.roles {
            Some(roles) if roles.iter().any(|r| !r.in_attention()) || roles.len() != 4 => {
                Err(Error::Unsupported {
                    method: id.into(),
                    reasons: vec![
                        "it replaces attention layers as a whole: matrices can only be attention".into(),
                    ],
                })
            }
            _ => Ok(()),
        }
    }
}

/// A weight of a new attention layer.
#[derive(Clone, Debug)]
pub enum Weight {
    /// The old matrix with its bias.
    Kept(Role),
    /// A new matrix.
    New(Dense),
}

/// An attention layer that replaces another.
#[derive(Clone, Debug)]
pub struct Attention {
    /// Its sizes.
    pub shape: LayerShape,
    /// Its parameters.
    pub options: Options,
    /// Its weights by name.
    pub weights: BTreeMap<&'static str, Weight>,
}

/// Loss of a matrix, or of several that were decomposed together.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Loss {
    /// Name of the matrix or matrices.
    pub what: String,
    /// The rank that was kept.
    pub rank: usize,
    /// Relative Frobenius error.
    pub rel_error: f64,
    /// Relative root mean square error of the outputs on calibration text, if there was any.
    pub seen_error: Option<f64>,
    /// Numbers stored before.
    pub before: usize,
    /// Numbers stored after.
    pub after: usize,
}

/// Result of a conversion: the maps and layers that change; everything else stays.
#[derive(Clone, Debug, Default)]
pub struct Rewritten {
    /// Maps that become products. Biases stay.
    pub maps: BTreeMap<Slot, Product>,
    /// New attention by layer; its kind is the conversion's `to`.
    pub attention: BTreeMap<usize, Attention>,
    /// The losses.
    pub losses: Vec<Loss>,
}

impl Rewritten {
    /// Adds the results for other matrices of the same network.
    pub fn extend(&mut self, other: Rewritten) {
        self.maps.extend(other.maps);
        self.attention.extend(other.attention);
        self.losses.extend(other.losses);
    }

    /// Computes the root mean square of the relative errors, weighted by the original sizes.
    pub fn rel_error(&self) -> f64 {
        let total: usize = self.losses.iter().map(|l| l.before).sum();
        let sum: f64 = self.losses.iter().map(|l| l.rel_error.powi(2) * l.before as f64).sum();
        if total == 0 { 0.0 } else { (sum / total as f64).sqrt() }
    }
}

/// Makes a weight from a matrix without bias.
pub(crate) fn new_weight(m: Mat<f32>) -> Weight {
    Weight::New(Dense::new(m))
}

#[cfg(test)]
mod tests {
    use super::super::tests::{Toy, request};
    use super::*;

    #[test]
    fn lists_of_matrices_are_read_or_explained() {
        assert_eq!(Role::parse_list("k,q").unwrap(), [Role::Query, Role::Key]);
        assert_eq!(Role::parse_list("ffn").unwrap(), [Role::Gate, Role::Up, Role::Down]);
        assert_eq!(Role::parse_list("all").unwrap(), Role::ALL);
        assert!(Role::parse_list("q,w").unwrap_err().to_string().contains("attention"));
    }

    #[test]
    fn layers_and_matrices_that_are_not_there_are_refused() {
        let (toy, options) = (Toy::default(), Options::new());
        let all = request(&toy, &options);
        assert_eq!(all.layers_or(|n| (0..n).collect()).unwrap(), [0, 1]);
        assert_eq!(all.slots(&[1], |_| true).unwrap().len(), 6, "there is no gate");
        assert!(Request { layers: Some(&[2]), ..all }.layers_or(|_| vec![]).is_err());
        assert!(Request { layers: Some(&[]), ..all }.layers_or(|_| vec![]).is_err());
        assert!(Request { roles: Some(&[Role::Gate]), ..all }.slots(&[0], |_| true).is_err());
        assert!(Request { roles: Some(&[Role::Gate]), ..all }.whole_attention("x").is_err());
        assert!(Request { roles: Some(&Role::ALL[..4]), ..all }.whole_attention("x").is_ok());
    }
}
