//! Sums of one row in double precision.

use crate::Real;

/// Sums `f` over a row, in eight independent partial sums.
pub fn lane_sum<T: Real>(row: &[T], f: impl Fn(f64) -> f64) -> f64 {
    let mut sums = [0.0; 8];
    let mut chunks = row.chunks_exact(8);
    for chunk in &mut chunks {
        sums.iter_mut().zip(chunk).for_each(|(s, x)| *s += f(x.to_f64()));
    }
    sums.iter_mut().zip(chunks.remainder()).for_each(|(s, x)| *s += f(x.to_f64()));
    sums.iter().sum()
}
