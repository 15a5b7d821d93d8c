//! Attention with powers of inner products: exact tiles, and states of products of sketches.
//!
//! Two kinds of sums appear. *Exact*: $\sum_j |\tau \langle q, k_j\rangle + \sigma|^p [v_j, 1]$ over tiles of keys, with
//! a running maximum per row in place of the running maximum of softmax ([`PowerKernel`]). *State*: where
//! $\kappa(q, k) = e^{e_q + e_k} \langle a, b\rangle^2$ (or $\langle a, b\rangle$) for short rows $a$, $b$
//! ([`HalfSketch`]), the sum over keys is $\varphi(a)^\top S$ with $S = \sum_j e^{e_j - e} \varphi(b_j) [v_j, 1]^\top$,
//! $\varphi$ being the symmetric square (or the identity), of a size that does not depend on the number of keys
//! ([`SketchAttention`]).
//!
//! Every sum is a row of numbers with a logarithmic scale, so high powers do not overflow, and the last number of a row
//! is the normaliser (values carry a column of ones). A row's scale depends only on keys that the row sees: results are
//! causal bit by bit. Values that are not finite are taken out of the products of diagonal tiles, where zero weights
//! would spread them, and added to the rows that see them.
//!
//! | file | contents |
//! | --- | --- |
//! | `power` | the kernel of a power, exactly, over tiles of keys |
//! | `prepare` | preparation of rows before their products |
//! | `sketch` | maps to short rows, and their features |
//! | `state` | sums over keys: adding keys, adding sums |
//! | `rows` | the sums of a query row over a state and over near keys |
//! | `run` | a whole group, with and without a mask |
//! | `stream` | token by token |

mod power;
mod prepare;
mod rows;
mod run;
mod sketch;
mod state;
mod stream;

pub use power::{KeyTile, PowerKernel, augment_into, finish_row, raise_in_place};
pub use prepare::Prepare;
pub use rows::Guard;
pub use sketch::{Form, HalfSketch, Signed, UnitRows, unit_into};
pub use stream::SketchStream;

use crate::Real;

/// Query rows of one task, and key rows of one update of a state.
pub const ROWS: usize = 96;

/// Attention through a state of sketches; causally, with an exact or sketched block around each query.
#[derive(Debug)]
pub struct SketchAttention<'a, T: Real> {
    /// The map.
    pub map: &'a dyn HalfSketch<T>,
    /// Construction of features from its rows.
    pub form: Form,
    /// The kernel inside a causal block; the sketched one where `None`.
    pub near: Option<PowerKernel>,
    /// Added to the normaliser.
    pub c0: f64,
    /// Keys of a causal block.
    pub block: usize,
    /// Preparation of the queries; keys are already prepared.
    pub prepare: Prepare,
    /// Treatment of vanishing normalisers; [`Form::Squared`] has none.
    pub guard: Guard,
}

impl<T: Real> SketchAttention<'_, T> {
    fn features(&self) -> usize {
        self.form.features(self.map.width())
    }

    /// Returns the number of elements of a state for values of width `d_v`.
    pub fn state_len(&self, d_v: usize) -> usize {
        self.features() * (d_v + 2)
    }
}
