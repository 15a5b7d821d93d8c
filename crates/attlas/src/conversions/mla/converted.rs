//! A layer in latent form: its weights, and a variant with norms that do nothing.

use super::Figures;
use crate::layer::{Dense, LayerShape, Linear, Weights};
use crate::layers::latent::{self, Latent};
use crate::{Mat, Result};
use attlas_num::rope::Rope;

/// A latent layer.
#[derive(Clone, Debug)]
pub struct Converted {
    /// Its sizes.
    pub shape: LayerShape,
    /// Its parameters.
    pub params: latent::Params,
    /// Rotation of the shared key.
    pub rope: Option<Rope>,
    /// Map from hidden states to the latent of queries, and its norm, if there is one.
    pub q_a: Option<(Dense, Option<Vec<f32>>)>,
    /// Map to queries, from hidden states or their latent.
    pub q: Dense,
    /// Map to the latent and the shared key.
    pub kv_a: Dense,
    /// Weight of the latent's norm, if there is one.
    pub kv_a_norm: Option<Vec<f32>>,
    /// Map from the latent to keys and values of each head.
    pub kv_b: Mat<f32>,
    /// Output projection.
    pub o: Dense,
    /// Energy kept and lost.
    pub figures: Figures,
    /// Largest norms of a calibration token's latents: of keys and values, and of queries.
    pub(super) longest: [f64; 2],
}

impl Converted {
    /// Returns the weights under the names of [`latent::LAYER`].
    pub fn weights(&self) -> Weights {
        let column = |v: &[f32]| Dense::new(Mat::from_vec(v.to_vec(), v.len(), 1));
        let mut list =
            vec![("kv_a", self.kv_a.clone()), ("kv_b", Dense::new(self.kv_b.clone())), ("o", self.o.clone())];
        list.extend(self.kv_a_norm.as_ref().map(|n| ("kv_a_norm", column(n))));
        match &self.q_a {
            None => list.push(("q", self.q.clone())),
            Some((a, norm)) => {
                list.extend([("q_a", a.clone()), ("q_b", self.q.clone())]);
                list.extend(norm.as_ref().map(|n| ("q_a_norm", column(n))));
            }
        }
        let boxed = |(name, w): (&str, Dense)| (name.to_string(), Box::new(w) as Box<dyn Linear>);
        list.into_iter().map(boxed).collect()
    }

    /// Builds the layer.
    pub fn layer(&self) -> Result<Latent> {
        Latent::new(self.shape, self.params.clone(), self.rope.clone(), self.weights())
    }

    /// Returns the same layer with norms that do nothing, for programs that always apply them: each latent gets one
    /// more coordinate, a large constant $\beta$, so that its root mean square hardly changes, and the norm's weight
    /// undoes it. The norm multiplies by $(1 + \lVert c \rVert^2/\beta^2)^{-1/2}$, at most $5 \cdot 10^{-7}$ from 1 on
    /// calibration tokens. If queries have a latent and a bias, the constant becomes 1 and carries the bias, for
    /// programs without a bias after the latent.
    #[must_use]
    pub fn with_neutral_norms(mut self) -> Self {
        let neutral = |map: &Dense, rank: usize, longest: f64| {
            let beta = 1e3 * longest.max(1e-3);
            let (rows, cols) = (map.weight.rows(), map.weight.cols());
            let weight = Mat::from_fn(rows + 1, cols, |i, j| match i.cmp(&rank) {
                std::cmp::Ordering::Less => map.weight[(i, j)],
                std::cmp::Ordering::Equal => 0.0,
                std::cmp::Ordering::Greater => map.weight[(i - 1, j)],
            });
            let mut bias = map.bias.clone().unwrap_or_else(|| vec![0.0; rows]);
            bias.insert(rank, beta as f32);
            let mut norm = vec![(beta / ((rank + 1) as f64).sqrt()) as f32; rank];
            norm.push(0.0);
            (Dense { weight, bias: Some(bias) }, norm)
        };
        let widen = |w: &Mat<f32>| {
            Mat::from_fn(w.rows(), w.cols() + 1, |i, j| if j < w.cols() { w[(i, j)] } else { 0.0 })
        };
        if self.kv_a_norm.is_none() {
            let (kv_a, norm) = neutral(&self.kv_a, self.params.rank, self.longest[0]);
            (self.kv_a, self.kv_a_norm) = (kv_a, Some(norm));
            self.kv_b = widen(&self.kv_b);
            self.params.rank += 1;
        }
        if let (Some((a, None)), Some(rank)) = (&self.q_a, self.params.rank_q) {
            let (a, mut norm) = neutral(a, rank, self.longest[1]);
            self.q.weight = widen(&self.q.weight);
            if let Some(bias) = self.q.bias.take() {
                norm[rank] = (1.0 / ((rank + 1) as f64).sqrt()) as f32;
                bias.iter().enumerate().for_each(|(i, &b)| self.q.weight[(i, rank)] = b);
            }
            self.q_a = Some((a, Some(norm)));
            self.params.rank_q = Some(rank + 1);
        }
        self
    }
}
