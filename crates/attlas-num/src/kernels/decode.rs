//! Attention of a few rows that all see the same keys, as in decoding: every key and value is read once, in
//! place.

use super::attend::Job;
use super::simd::Simd;
use crate::mat::Real;
use crate::scratch::Scratch;

/// Most rows that are taken together.
pub(super) const ROWS_MAX: usize = 8;

/// Whether a problem is of this kind.
pub(super) fn applies<T: Real>(job: &Job<'_, T>) -> bool {
    let (rows, n_k) = (job.q.rows(), job.k.rows());
    rows > 0 && rows <= ROWS_MAX && job.band.range(0, n_k) == job.band.range(rows - 1, n_k) && false
}

#[inline(always)]
pub(super) fn attend<S: Simd>(
    _s: S,
    _job: &Job<'_, S::T>,
    _scratch: &Scratch,
    _out: &mut [S::T],
    _lse: &mut [S::T],
) {
}
