//! What is done to rows of queries and keys before their products are taken.
//!
//! Layer normalisation here has no gain: $\hat x = (x - \bar x) / \sqrt{\frac1d \sum_c (x_c - \bar x)^2 + \varepsilon}$.

use crate::{MatRef, Real};

/// What is done to rows of queries and keys before their products are taken.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Prepare {
    /// Nothing.
    Copy,
    /// Layer normalisation with this $\varepsilon$ and no gain: mean 0, mean square 1.
    LayerNorm(f64),
}

impl Prepare {
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
    let mean = row.iter().map(|x| x.to_f64()).sum::<f64>() / d;
    // A row so large that its squares overflow is divided by its largest entry first; ε is nothing then.
    let top = row.iter().fold(0.0f64, |m, x| m.max((x.to_f64() - mean).abs()));
    let (unit, eps) = if top > 1e150 { (top, 0.0) } else { (1.0, eps) };
    let variance = row.iter().map(|x| ((x.to_f64() - mean) / unit).powi(2)).sum::<f64>() / d;
    let inverse = 1.0 / (variance + eps).sqrt();
    for (o, x) in out.iter_mut().zip(row) {
        let centred = (x.to_f64() - mean) / unit;
        *o = T::from_f64(if centred == 0.0 { 0.0 } else { centred * inverse });
    }
}
