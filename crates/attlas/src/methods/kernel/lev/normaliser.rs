//! Normalisers beyond the sum of weights over the visited keys.
//!
//! * `exact2`: $\sum_j (\tau\langle q, k_j\rangle)^2 = \tau^2 q^\top G q$ with $G = K^\top K$, over all keys; with a
//!   causal mask $G$ covers the keys before the block, and keys of the block are added one by one.
//! * `sampled`: $\sum_{j \in U} f_j + \frac1s \sum_{t=1}^s f_{j_t} / \pi_{j_t}$, the $j_t$ drawn from outside $U$ with $\pi$ proportional to the
//!   bounds on sensitivities: unbiased, and its relative variance is at most their sum over $s$.

use super::Lev;
use crate::group::GroupIndex;
use crate::{MatRef, Real};
use attlas_num::kernels::{axpy, dot};
use attlas_num::par::*;
use std::ops::Range;

/// Keys drawn for a sampled normaliser, each with $1/(s\pi)$.
#[derive(Debug, Default)]
pub(super) struct Draws {
    pub(super) drawn: Vec<(usize, f64)>,
}

impl Lev {
    /// Draws from the complement of `kept`, in proportion to the bounds.
    pub(super) fn draw(&self, bounds: &[f64], kept: &[usize], index: GroupIndex) -> Draws {
        let mut rest: Vec<f64> = bounds.to_vec();
        kept.iter().for_each(|&j| rest[j] = 0.0);
        let total: f64 = rest.iter().sum();
        if total <= 0.0 {
            return Draws::default();
        }
        let mut sums = rest.clone();
        (1..sums.len()).for_each(|j| sums[j] += sums[j - 1]);
        let mut rng = index.stream_key(self.params.seed).named("lev normaliser").rng();
        let s = self.params.draws;
        let drawn = (0..s)
            .map(|_| {
                let target = rng.uniform() * sums[sums.len() - 1];
                let j = sums.partition_point(|&c| c <= target).min(sums.len() - 1);
                (j, total / (rest[j] * s as f64))
            })
            .collect();
        Draws { drawn }
    }
}

/// Computes $\tau^2 (q^\top G q + \sum_j \langle q, k_j\rangle^2)$ over keys of the current block, in units of
/// $\mathrm{top}^2$.
pub(super) fn full_form<T: Real>(
    gram: &[f64],
    q: &[T],
    k: MatRef<'_, T>,
    own: Range<usize>,
    scale: f64,
    top: f64,
) -> f64 {
    let own: f64 = own.map(|j| dot(q, k.row(j)).to_f64().powi(2)).sum();
    (quadratic(gram, q) + own) * scale * scale / (top * top)
}

/// Rows whose outer products a task sums; fixed, so that results do not depend on the number of threads.
const PIECE: usize = 1024;

/// Computes $K^\top K$: pieces of rows in parallel, added in order.
pub(super) fn gram_of<T: Real>(k: MatRef<'_, T>) -> Vec<f64> {
    let piece = |t: usize| {
        let mut gram = vec![0.0; k.cols() * k.cols()];
        let rows = k.sub_rows(t * PIECE..((t + 1) * PIECE).min(k.rows()));
        rows.iter_rows().for_each(|row| add_outer(&mut gram, row));
        gram
    };
    let pieces: Vec<Vec<f64>> =
        (0..k.rows().div_ceil(PIECE)).into_par_iter().with_max_len(1).map(piece).collect();
    let mut gram = vec![0.0; k.cols() * k.cols()];
    pieces.iter().for_each(|piece| axpy(1.0, piece, &mut gram));
    gram
}

pub(super) fn add_outer<T: Real>(gram: &mut [f64], row: &[T]) {
    for (gram, &a) in gram.chunks_exact_mut(row.len()).zip(row) {
        gram.iter_mut().zip(row).for_each(|(g, &b)| *g += a.to_f64() * b.to_f64());
    }
}

/// Computes $q^\top G q$, never below 0.
pub(super) fn quadratic<T: Real>(gram: &[f64], q: &[T]) -> f64 {
    let form =
        |(row, &a): (&[f64], &T)| a.to_f64() * row.iter().zip(q).map(|(g, &b)| g * b.to_f64()).sum::<f64>();
    let sum: f64 = gram.chunks_exact(q.len()).zip(q).map(form).sum();
    // Not `max`, which would turn NaN into 0.
    if sum < 0.0 { 0.0 } else { sum }
}
