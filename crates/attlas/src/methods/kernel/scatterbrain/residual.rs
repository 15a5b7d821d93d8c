//! Unmasked form: sums of features over all keys, corrected on the support.
//!
//! For row $i$ with support $S_i$: $\sum_{j \in S_i} e^{s_{ij}} [v_j, 1] + [R_i, \rho_i]$ with
//! $[R_i, \rho_i] = \sum_j \hat\kappa_{ij} [v_j, 1] - \sum_{j \in S_i} \hat\kappa_{ij} [v_j, 1]$. The first sum and the last are taken
//! tile by tile; at the end $R_i / \rho_i$, kept in the hull of the values, is merged at the logarithmic scale of
//! $\rho_i$, or dropped if $\rho_i$ is mere cancellation.

use super::support::{Buckets, See};
use super::{ROWS, Scatterbrain};
use crate::engine::attend_tile;
use crate::engine::linear::{Accumulator, Positive, whole_state};
use crate::group::Group;
use crate::workspace::Context;
use crate::{MatRef, Real};
use attlas_num::hash::lift::max_norm;
use attlas_num::kernels::{Op, gemm, merge_lse, sum};
use attlas_num::par::*;

/// Share of the whole below which a residual mass is cancellation.
const CANCELLATION: f64 = 1e-4;

impl Scatterbrain {
    /// Attends without a mask: the sums over all keys, minus the estimate on the support, plus the exact scores there.
    pub(super) fn run_plain<T: Real>(&self, g: &mut Group<'_, T>, acc: &Positive<T>) -> u64 {
        let (k, v, cx, n_q, d_v) = (g.k, g.v, g.cx, g.n_q(), g.d_v());
        let states = whole_state(acc, k, v, cx);
        let state = &states[..acc.state_len()];
        let (hull, key_norm) = (Hull::of(v), max_norm(k));
        let mut visited = 0;
        for (h, (out, lse)) in g.out.chunks_mut(n_q * d_v).zip(g.lse.chunks_mut(n_q)).enumerate() {
            let q = g.q.head(h);
            let mut residual = cx.scratch.take::<T>(n_q * (d_v + 1));
            let mut whole = cx.scratch.take::<T>(n_q);
            let mut shift = cx.scratch.take::<T>(n_q);
            residual
                .par_chunks_mut(ROWS * (d_v + 1))
                .zip(whole.par_chunks_mut(ROWS).zip(shift.par_chunks_mut(ROWS)))
                .enumerate()
                .for_each(|(b, (sums, (whole, shift)))| {
                    let mut w = cx.scratch.take::<T>(shift.len() * self.features());
                    let rows = q.sub_rows(b * ROWS..b * ROWS + shift.len());
                    acc.sums(state, rows, &mut w, shift, sums, cx);
                    whole.iter_mut().zip(sums.chunks_exact(d_v + 1)).for_each(|(w, s)| *w = s[d_v]);
                });
            out.fill(T::ZERO);
            lse.fill(T::NEG_INFINITY);
            let cached = CachedTokens { acc, state, q, k, v, scale: g.scale, cx };
            for round in self.rounds(q, k, key_norm, g.index, cx) {
                visited += cached.exchange(&round, out, lse, &mut residual);
            }
            out.par_chunks_mut(ROWS * d_v)
                .zip(lse.par_chunks_mut(ROWS))
                .zip(residual.par_chunks_mut(ROWS * (d_v + 1)))
                .enumerate()
                .for_each(|(b, ((out, lse), residual))| {
                    let rows = out.chunks_exact_mut(d_v).zip(lse).zip(residual.chunks_exact_mut(d_v + 1));
                    for (i, ((out, lse), residual)) in rows.enumerate() {
                        let i = b * ROWS + i;
                        if let Some(rho) = hull.settle(residual, whole[i]) {
                            merge_lse(out, lse, &residual[..d_v], shift[i] + rho.ln());
                        }
                    }
                });
        }
        visited
    }
}

/// The least and greatest value of every column.
pub(super) struct Hull<T> {
    low: Vec<T>,
    high: Vec<T>,
}

impl<T: Real> Hull<T> {
    pub(super) fn of(v: MatRef<'_, T>) -> Self {
        let mut hull = Self { low: vec![T::INFINITY; v.cols()], high: vec![T::NEG_INFINITY; v.cols()] };
        for row in v.iter_rows() {
            hull.low.iter_mut().zip(row).for_each(|(l, x)| *l = l.min(*x));
            hull.high.iter_mut().zip(row).for_each(|(h, x)| *h = h.max(*x));
        }
        hull
    }

    /// Divides the residual vector by the residual mass, which it returns, and keeps it in the hull; `None` if the mass
    /// is mere cancellation.
    pub(super) fn settle(&self, residual: &mut [T], whole: T) -> Option<T> {
        let (vector, rho) = residual.split_at_mut(self.low.len());
        let rho = rho[0];
        if rho <= T::from_f64(CANCELLATION) * whole {
            return None;
        }
        for (x, (&low, &high)) in vector.iter_mut().zip(self.low.iter().zip(&self.high)) {
            *x /= rho;
            // Not `clamp`, so that NaN stays.
            if *x < low {
                *x = low;
            } else if *x > high {
                *x = high;
            }
        }
        Some(rho)
    }
}

/// Inputs of the support computation of one head.
struct CachedTokens<'a, T> {
    acc: &'a Positive<T>,
    state: &'a [T],
    q: MatRef<'a, T>,
    k: MatRef<'a, T>,
    v: MatRef<'a, T>,
    scale: T,
    cx: Context<'a>,
}

impl<T: Real> CachedTokens<'_, T> {
    /// Subtracts the estimate on a round's pairs from `residual` (rows of `[num, den]`) and merges the exact scores
    /// into `out` and `lse`. Returns the number of pairs.
    fn exchange(&self, round: &Buckets, out: &mut [T], lse: &mut [T], residual: &mut [T]) -> u64 {
        let (cx, d_v, n) = (self.cx, self.v.cols(), round.rows.len());
        let mut exact = cx.scratch.take::<T>(n * d_v);
        let mut logs = cx.scratch.take::<T>(n);
        let mut taken = cx.scratch.take::<T>(n * (d_v + 1));
        // Tiles lie in the order of their rows, without gaps.
        let mut rest = (&mut exact[..], &mut logs[..], &mut taken[..]);
        let mut tasks = Vec::with_capacity(round.tiles.len());
        for tile in &round.tiles {
            let rows = tile.0.len();
            let (exact, tail) = rest.0.split_at_mut(rows * d_v);
            let (logs, log_tail) = rest.1.split_at_mut(rows);
            let (taken, taken_tail) = rest.2.split_at_mut(rows * (d_v + 1));
            rest = (tail, log_tail, taken_tail);
            tasks.push((tile, exact, logs, taken));
        }
        let visited = tasks
            .into_par_iter()
            .map(|((rows, keys), exact, logs, taken)| {
                self.tile(
                    &round.rows[rows.clone()],
                    &round.keys[keys.clone()],
                    &round.see,
                    exact,
                    logs,
                    taken,
                );
                (rows.len() * keys.len()) as u64
            })
            .sum();
        let mut place = vec![0u32; n];
        round.rows.iter().zip(0..).for_each(|(&i, p)| place[i as usize] = p);
        let (exact, logs, taken) = (&exact, &logs, &taken);
        out.par_chunks_mut(ROWS * d_v)
            .zip(lse.par_chunks_mut(ROWS))
            .zip(residual.par_chunks_mut(ROWS * (d_v + 1)))
            .zip(place.par_chunks(ROWS))
            .for_each(|(((out, lse), residual), place)| {
                let rows = out.chunks_exact_mut(d_v).zip(lse).zip(residual.chunks_exact_mut(d_v + 1));
                for (((out, lse), residual), &p) in rows.zip(place) {
                    let p = p as usize;
                    merge_lse(out, lse, &exact[p * d_v..(p + 1) * d_v], logs[p]);
                    let taken = &taken[p * (d_v + 1)..(p + 1) * (d_v + 1)];
                    residual.iter_mut().zip(taken).for_each(|(r, t)| *r -= *t);
                }
            });
        visited
    }

    /// Computes some rows over some keys: exactly, and by features.
    fn tile(&self, rows: &[u32], keys: &[u32], see: &See, exact: &mut [T], logs: &mut [T], taken: &mut [T]) {
        let (cx, isa, scratch) = (self.cx, self.cx.schedule.isa, self.cx.scratch);
        let (n, n_k, d, d_v) = (rows.len(), keys.len(), self.q.cols(), self.v.cols());
        if n_k == 0 {
            logs.fill(T::NEG_INFINITY);
            taken.fill(T::ZERO);
            return;
        }
        let mut q = scratch.take::<T>(n * d);
        let mut k = scratch.take::<T>(n_k * d);
        let mut v = scratch.take::<T>(n_k * d_v);
        self.q.gather_into(rows.iter().map(|&i| i as usize), &mut q);
        self.k.gather_into(keys.iter().map(|&j| j as usize), &mut k);
        self.v.gather_into(keys.iter().map(|&j| j as usize), &mut v);
        let (q, k, v) = (MatRef::new(&q, n, d), MatRef::new(&k, n_k, d), MatRef::new(&v, n_k, d_v));
        let hide = |i: usize, logits: &mut [T]| {
            see.hide(rows[i], keys, logits);
            0..n_k
        };
        attend_tile(q, k, v, self.scale, cx, hide, exact, logs);

        let m = self.state.len() / (d_v + 3);
        let mut a = scratch.take::<T>(n_k * m);
        self.acc.features_of_held(self.state, k, &mut a, cx);
        let mut w = scratch.take::<T>(n * m);
        let mut shift = scratch.take::<T>(n);
        self.acc.weights(self.state, q, &mut w, &mut shift);
        let mut kernel = scratch.take::<T>(n * n_k);
        let (w, a) = (Op::N(MatRef::new(&w, n, m)), Op::T(MatRef::new(&a, n_k, m)));
        gemm(isa, T::ONE, w, a, T::ZERO, &mut kernel, n_k, scratch);
        if !matches!(see, See::All) {
            let mut seen = scratch.take::<T>(n_k);
            for (&row, kernel) in rows.iter().zip(kernel.chunks_exact_mut(n_k)) {
                seen.fill(T::ZERO);
                see.hide(row, keys, &mut seen);
                let hidden = kernel.iter_mut().zip(seen.iter()).filter(|(_, s)| **s == T::NEG_INFINITY);
                hidden.for_each(|(x, _)| *x = T::ZERO);
            }
        }
        for (kernel, taken) in kernel.chunks_exact(n_k).zip(taken.chunks_exact_mut(d_v + 1)) {
            taken[d_v] = sum(kernel);
        }
        let kernel = Op::N(MatRef::new(&kernel, n, n_k));
        gemm(isa, T::ONE, kernel, Op::N(v), T::ZERO, taken, d_v + 1, scratch);
    }
}
