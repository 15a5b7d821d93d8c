//! Preparation of query and key rows before their products.
//!
//! Layer normalisation here has no gain: $\hat x = (x - \bar x) / \sqrt{\frac1d \sum_c (x_c - \bar x)^2 + \varepsilon}$.

use crate::engine::lane_sum;
use crate::{MatRef, Real};
use attlas_num::par::*;

/// Rows that one task prepares.
const ROWS_PER_TASK: usize = 1024;

/// Preparation of query and key rows before their products.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Prepare {
    /// No change.
    Copy,
    /// Layer normalisation with this $\varepsilon$ and no gain: mean 0, mean square 1.
    LayerNorm(f64),
}

impl Prepare {
    /// Writes the prepared rows of a long matrix, in parallel.
    pub fn par_apply_into<T: Real>(self, x: MatRef<'_, T>, out: &mut [T]) {
        out.par_chunks_mut(ROWS_PER_TASK * x.cols()).enumerate().for_each(|(p, out)| {
            let first = p * ROWS_PER_TASK;
            self.apply_into(x.sub_rows(first..first + out.len() / x.cols()), out);
        });
    }

    /// Writes the prepared rows.
    pub fn apply_into<T: Real>(self, x: MatRef<'_, T>, out: &mut [T]) {
        let d = x.cols();
        for (row, out) in x.iter_rows().zip(out.chunks_exact_mut(d)) {
            match self {
                Prepare::Copy => out.copy_from_slice(row),
                Prepare::LayerNorm(eps) => layer_norm_into(row, eps, out),
            }
        }
    }
}

fn layer_norm_into<T: Real>(row: &[T], eps: f64, out: &mut [T]) {
    let d = row.len() as f64;
    let mean = lane_sum(row, |x| x) / d;
    // A row so large that its squares overflow is first divided by its largest entry; ε is then negligible.
    let top = row.iter().fold(T::ZERO, |m, &x| m.max(x.abs())).to_f64();
    let (unit, eps) = if top > 1e150 { (1.0 / top, 0.0) } else { (1.0, eps) };
    let variance = lane_sum(row, |x| ((x - mean) * unit) * ((x - mean) * unit)) / d;
    let inverse = 1.0 / (variance + eps).sqrt();
    for (o, x) in out.iter_mut().zip(row) {
        let centred = (x.to_f64() - mean) * unit;
        *o = T::from_f64(if centred == 0.0 { 0.0 } else { centred * inverse });
    }
}
