//! Shared by conversions: a network as a list of matrices, maps that are products of matrices, and stacks of matrices
//! of one shape, by blocks or with a mode for heads.

pub mod fill;
pub mod heads;
pub mod moments;
pub mod network;
pub mod product;
pub mod stack;

use crate::{Error, Mat};

/// Converts a failure of the numerical tools into an error of this crate.
pub(crate) fn refused(id: &str, e: impl std::fmt::Display) -> Error {
    Error::Unsupported { method: id.into(), reasons: vec![e.to_string()] }
}

/// Computes $\lVert A - B \rVert_F / \lVert A \rVert_F$; 0 if both vanish.
pub fn relative_error(a: &Mat<f32>, b: &Mat<f32>) -> f64 {
    let gap: f64 = a.data().iter().zip(b.data()).map(|(x, y)| f64::from(x - y).powi(2)).sum();
    let norm = a.frobenius();
    if norm == 0.0 { gap.sqrt() } else { gap.sqrt() / norm }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::moments::Moments;
    use super::moments::tests::moments_of;
    use super::network::{Network, Request, Role, Slot};
    use crate::layer::{Dense, LayerShape};
    use crate::layers::testing::random;
    use crate::{Mat, Options, Result};
    use attlas_num::rope::Rope;
    use std::sync::Arc;

    /// A network of random matrices: width 8, four query heads, a feed-forward layer of the given width.
    pub(crate) struct Toy {
        pub(crate) layers: usize,
        pub(crate) kv_heads: usize,
        pub(crate) ffn: usize,
        pub(crate) gated: bool,
        pub(crate) biased: bool,
        pub(crate) rope: Option<Rope>,
        /// Gives the inputs of every matrix their own moments.
        pub(crate) seen: bool,
    }

    impl Default for Toy {
        fn default() -> Self {
            Self { layers: 2, kv_heads: 4, ffn: 16, gated: false, biased: false, rope: None, seen: false }
        }
    }

    impl Network for Toy {
        fn shape(&self) -> LayerShape {
            LayerShape { d_model: 8, n_heads: 4, n_kv_heads: self.kv_heads, d: 2, d_v: 2 }
        }

        fn n_layers(&self) -> usize {
            self.layers
        }

        fn size(&self, slot: Slot) -> Option<(usize, usize)> {
            let kv = self.kv_heads * 2;
            Some(match slot.role {
                Role::Query | Role::Output => (8, 8),
                Role::Key | Role::Value => (kv, 8),
                Role::Gate if !self.gated => return None,
                Role::Gate | Role::Up => (self.ffn, 8),
                Role::Down => (8, self.ffn),
            })
        }

        fn map(&self, slot: Slot) -> Result<Dense> {
            let (n_out, n_in) = self.size(slot).unwrap();
            let name = format!("{} {:?}", slot.layer, slot.role);
            let bias = self.biased.then(|| random(&format!("bias {name}"), n_out, 1).into_vec());
            Ok(Dense { weight: random(&name, n_out, n_in), bias })
        }

        fn rope(&self) -> Option<Rope> {
            self.rope.clone()
        }

        fn obstacles(&self) -> Vec<String> {
            Vec::new()
        }

        fn moments(&self, slot: Slot) -> Option<Arc<Moments>> {
            let width = self.size(slot)?.1;
            let inputs = match slot.role {
                Role::Query | Role::Key | Role::Value => "attention",
                Role::Output => "heads",
                Role::Gate | Role::Up => "ffn",
                Role::Down => "inner",
            };
            self.seen.then(|| Arc::new(moments_of(&inputs_of(&format!("{inputs} {}", slot.layer), width))))
        }
    }

    /// Inputs with large variance in some directions and small in others.
    pub(crate) fn inputs_of(name: &str, width: usize) -> Mat<f32> {
        let flat = random(name, 60, width);
        let stretched = Mat::from_fn(60, width, |i, j| flat[(i, j)] * 0.6f32.powi(j as i32));
        let mixed = random(&format!("mixed {name}"), width, width);
        attlas_num::linalg::matmul(stretched.as_ref(), mixed.as_ref())
    }

    /// A request for the whole network with these settings.
    pub(crate) fn request<'a>(network: &'a dyn Network, options: &'a Options) -> Request<'a> {
        Request { network, layers: None, roles: None, options, progress: &|_, _| () }
    }
}
