//! The gradient of linear attention with positive features.
//!
//! With log-features $b_{il}$ of queries and $a_{jl}$ of keys, $w_{il} = e^{b_{il} + \rho_l - \mathrm{lse}_i}$ and
//! $f_{jl} = e^{a_{jl} - \rho_l}$, a weight is $p_{ij} = \sum_l w_{il} f_{jl}$. Let $\bar o$ be the gradient of the
//! outputs and $\delta_i$ be as in [`GroupBackward`](crate::gradient::GroupBackward). Then
//! $$\bar b_{il} = w_{il} \big(\langle \bar o_i, S_l \rangle - \delta_i z_l\big), \qquad S_l = \sum_j f_{jl} v_j,\; z_l = \sum_j f_{jl},$$
//! $$\bar a_{jl} = f_{jl} \big(\langle G_l, v_j \rangle - g_l\big), \quad \bar v_j = \sum_l f_{jl} G_l, \qquad
//! G_l = \sum_i w_{il} \bar o_i,\; g_l = \sum_i w_{il} \delta_i,$$
//! and the map takes $\bar b$ and $\bar a$ back to queries and keys
//! ([`LogFeatures::pull_back`](attlas_num::sketch::LogFeatures::pull_back)). References $\rho_l$ are the largest log-features
//! of the keys that a row sees, so that neither $w$ nor $f$ exceeds 1. Under a causal mask, sums over keys run forwards and
//! sums over rows backwards, each token by token, side by side; the references of the backward sums only fall.
//!
//! Time is that of two more runs; memory is that of a run and one row of references for every `CHUNK` tokens.

use super::{Accumulator, BLOCK, CHUNK, PIECE, Positive, ROWS, product, whole_state};
use crate::gradient::GroupBackward;
use crate::group::Queries;
use crate::workspace::Context;
use crate::{Mask, MatRef, Real};
use attlas_num::kernels::{self, Op, axpy, dot, matvec};
use attlas_num::par::*;
use attlas_num::sketch::{LogFeatures, Side};

/// Writes the gradients of a group that has keys.
pub(super) fn backward<T: Real>(acc: &Positive<T>, map: &dyn LogFeatures<T>, g: GroupBackward<'_, T>) {
    match g.mask {
        Mask::None => plain(acc, map, g),
        Mask::Causal => causal(acc, map, g),
    }
}

/// Rescales row `i` of features, which is relative to $e^{\text{shift}_i}$, to the log-sum-exp; a row without one gets
/// 0.
fn relate<T: Real>(w: &mut [T], shift: &[T], lse: &[T]) {
    let m = w.len() / shift.len().max(1);
    for ((w, &shift), &lse) in w.chunks_exact_mut(m).zip(shift).zip(lse) {
        if lse == T::NEG_INFINITY || shift == T::NEG_INFINITY {
            w.fill(T::ZERO);
        } else {
            kernels::scale((shift - lse).exp(), w);
        }
    }
}

fn plain<T: Real>(acc: &Positive<T>, map: &dyn LogFeatures<T>, g: GroupBackward<'_, T>) {
    let (m, d, d_v, n_q, cx) = (map.num_features(), g.k.cols(), g.v.cols(), g.n_q(), g.cx);
    let states = whole_state(acc, g.k, g.v, cx);
    let state = &states[..acc.state_len()];
    let (z, s) = acc.sums_of(state);

    // Pieces of rows, each with its own sums: the gradients and their δ.
    let pieces: Vec<(usize, usize)> =
        (0..g.q.heads()).flat_map(|h| (0..n_q).step_by(PIECE).map(move |first| (h, first))).collect();
    let mut sums = cx.scratch.take_zeroed::<T>(pieces.len() * m * (d_v + 1));
    let mut work = Vec::with_capacity(pieces.len());
    let (mut dq, mut rest) = (g.dq, &mut sums[..]);
    for &(head, first) in &pieces {
        let rows = first..(first + PIECE).min(n_q);
        let (own, tail) = std::mem::take(&mut dq).split_at_mut(rows.len() * d);
        let (sum, sums_tail) = std::mem::take(&mut rest).split_at_mut(m * (d_v + 1));
        (dq, rest) = (tail, sums_tail);
        work.push((head, rows, own, sum));
    }
    work.into_par_iter().with_max_len(1).for_each(|(head, rows, dq, sums)| {
        let mut w = cx.scratch.take::<T>(ROWS * m);
        let mut up = cx.scratch.take::<T>(ROWS * m);
        let mut shift = cx.scratch.take::<T>(ROWS);
        let (big, small) = sums.split_at_mut(m * d_v);
        for (block, dq) in rows.clone().step_by(ROWS).zip(dq.chunks_mut(ROWS * d)) {
            let n = dq.len() / d;
            let q = g.q.head(head).sub_rows(block..block + n);
            let d_o = g.d_o.head(head).sub_rows(block..block + n);
            let at = head * n_q + block..head * n_q + block + n;
            let (w, up, shift) = (&mut w[..n * m], &mut up[..n * m], &mut shift[..n]);
            acc.weights(state, q, w, shift);
            relate(w, shift, &g.lse[at.clone()]);
            product(Op::N(d_o), Op::T(MatRef::new(s, m, d_v)), T::ZERO, up, m, cx);
            for ((up, w), &delta) in up.chunks_exact_mut(m).zip(w.chunks_exact(m)).zip(&g.delta[at]) {
                axpy(-delta, z, up);
                up.iter_mut().zip(w).for_each(|(u, &w)| *u *= w);
                axpy(delta, w, small);
            }
            map.pull_back(q, Side::Query, up, dq);
            product(Op::T(MatRef::new(w, n, m)), Op::N(d_o), T::ONE, big, d_v, cx);
        }
    });
    let (total, others) = sums.split_at_mut(m * (d_v + 1));
    others.chunks_exact(m * (d_v + 1)).for_each(|other| axpy(T::ONE, other, total));
    let (big, small) = total.split_at(m * d_v);

    g.dk.par_chunks_mut(BLOCK * d)
        .zip(g.dv.par_chunks_mut(BLOCK * d_v))
        .with_max_len(1)
        .enumerate()
        .for_each(|(b, (dk, dv))| {
            let n = dk.len() / d;
            let (k, v) = (g.k.sub_rows(b * BLOCK..b * BLOCK + n), g.v.sub_rows(b * BLOCK..b * BLOCK + n));
            let mut f = cx.scratch.take::<T>(n * m);
            let mut up = cx.scratch.take::<T>(n * m);
            acc.features_of_held(state, k, &mut f, cx);
            let sums = MatRef::new(big, m, d_v);
            product(Op::N(MatRef::new(&f, n, m)), Op::N(sums), T::ZERO, dv, d_v, cx);
            product(Op::N(v), Op::T(sums), T::ZERO, &mut up, m, cx);
            for (up, f) in up.chunks_exact_mut(m).zip(f.chunks_exact(m)) {
                axpy(-T::ONE, small, up);
                up.iter_mut().zip(f).for_each(|(u, &f)| *u *= f);
            }
            map.pull_back(k, Side::Key, &up, dk);
        });
}

/// Input of both directions of a causal pass.
#[derive(Clone, Copy)]
struct Tokens<'a, T> {
    q: Queries<'a, T>,
    k: MatRef<'a, T>,
    v: MatRef<'a, T>,
    d_o: Queries<'a, T>,
    lse: &'a [T],
    delta: &'a [T],
    cx: Context<'a>,
}

impl<T: Real> Tokens<'_, T> {
    /// Returns the row of each head at token `j`: the last row is at the last token.
    fn row(&self, j: usize) -> Option<usize> {
        (j + self.q.n_q()).checked_sub(self.k.rows())
    }
}

fn causal<T: Real>(acc: &Positive<T>, map: &dyn LogFeatures<T>, g: GroupBackward<'_, T>) {
    let x = Tokens { q: g.q, k: g.k, v: g.v, d_o: g.d_o, lse: g.lse, delta: g.delta, cx: g.cx };
    let (dq, dk, dv) = (g.dq, g.dk, g.dv);
    join(|| forwards(acc, map, &x, dq), || backwards(map, &x, dk, dv));
}

/// Computes the gradients of queries, from sums over the keys so far.
fn forwards<T: Real>(acc: &Positive<T>, map: &dyn LogFeatures<T>, x: &Tokens<'_, T>, dq: &mut [T]) {
    let (m, d, d_v, n_q) = (map.num_features(), x.k.cols(), x.v.cols(), x.q.n_q());
    let mut state = x.cx.scratch.take::<T>(acc.state_len());
    let mut w = x.cx.scratch.take::<T>(m);
    let mut up = x.cx.scratch.take::<T>(m);
    acc.clear(&mut state);
    dq.fill(T::ZERO);
    for j in 0..x.k.rows() {
        acc.absorb(&mut state, x.k.sub_rows(j..j + 1), x.v.sub_rows(j..j + 1), x.cx);
        let Some(i) = x.row(j) else { continue };
        for h in 0..x.q.heads() {
            let (q, at) = (x.q.head(h).sub_rows(i..i + 1), h * n_q + i);
            let mut shift = [T::ZERO];
            acc.weights(&state, q, &mut w, &mut shift);
            relate(&mut w, &shift, &x.lse[at..=at]);
            let (z, s) = acc.sums_of(&state);
            matvec(MatRef::new(s, m, d_v), x.d_o.head(h).row(i), &mut up);
            axpy(-x.delta[at], z, &mut up);
            up.iter_mut().zip(&*w).for_each(|(u, &w)| *u *= w);
            map.pull_back(q, Side::Query, &up, &mut dq[at * d..(at + 1) * d]);
        }
    }
}

/// Computes the gradients of keys and values, from sums over the remaining rows.
fn backwards<T: Real>(map: &dyn LogFeatures<T>, x: &Tokens<'_, T>, dk: &mut [T], dv: &mut [T]) {
    let (m, d, d_v) = (map.num_features(), x.k.cols(), x.v.cols());
    let (n_k, n_q) = (x.k.rows(), x.q.n_q());
    let chunks = n_k.div_ceil(CHUNK);
    let scratch = x.cx.scratch;
    // The largest log-features before each chunk, then those up to each token of one.
    let mut before = scratch.take::<T>((chunks + 1) * m);
    let mut tops = scratch.take::<T>(CHUNK * m);
    let mut a = scratch.take::<T>(CHUNK * m);
    let features = |chunk: usize, a: &mut [T]| -> usize {
        let tokens = chunk * CHUNK..((chunk + 1) * CHUNK).min(n_k);
        map.log_features(x.k.sub_rows(tokens.clone()), Side::Key, &mut a[..tokens.len() * m]);
        tokens.len()
    };
    // A comparison with NaN is false.
    let raise = |top: &mut [T], row: &[T]| {
        top.iter_mut().zip(row).for_each(|(t, &x)| *t = if x > *t { x } else { *t });
    };
    before[..m].fill(T::NEG_INFINITY);
    for chunk in 0..chunks {
        let n = features(chunk, &mut a);
        let (from, to) = before[chunk * m..].split_at_mut(m);
        to[..m].copy_from_slice(from);
        a[..n * m].chunks_exact(m).for_each(|row| raise(&mut to[..m], row));
    }

    let mut rho = scratch.take_copy::<T>(&before[chunks * m..]);
    let mut big = scratch.take_zeroed::<T>(m * d_v);
    let mut small = scratch.take_zeroed::<T>(m);
    let mut w = scratch.take::<T>(m);
    let mut up = scratch.take::<T>(CHUNK * m);
    for chunk in (0..chunks).rev() {
        let n = features(chunk, &mut a);
        let first = chunk * CHUNK;
        for t in 0..n {
            let (done, new) = tops.split_at_mut(t * m);
            let last = if t == 0 { &before[chunk * m..(chunk + 1) * m] } else { &done[(t - 1) * m..] };
            new[..m].copy_from_slice(last);
            raise(&mut new[..m], &a[t * m..(t + 1) * m]);
        }
        for t in (0..n).rev() {
            let j = first + t;
            for (l, &top) in tops[t * m..(t + 1) * m].iter().enumerate() {
                if top != rho[l] {
                    let factor = (top - rho[l]).exp();
                    kernels::scale(factor, &mut big[l * d_v..(l + 1) * d_v]);
                    small[l] *= factor;
                    rho[l] = top;
                }
            }
            for h in 0..if x.row(j).is_some() { x.q.heads() } else { 0 } {
                let i = x.row(j).unwrap_or(0);
                let at = h * n_q + i;
                if x.lse[at] == T::NEG_INFINITY {
                    continue;
                }
                map.log_features(x.q.head(h).sub_rows(i..i + 1), Side::Query, &mut w);
                for (l, w) in w.iter_mut().enumerate() {
                    *w = if rho[l] == T::NEG_INFINITY { T::ZERO } else { (*w + rho[l] - x.lse[at]).exp() };
                    axpy(*w, x.d_o.head(h).row(i), &mut big[l * d_v..(l + 1) * d_v]);
                }
                axpy(x.delta[at], &w, &mut small);
            }
            let (v, dv) = (x.v.row(j), &mut dv[j * d_v..(j + 1) * d_v]);
            for l in 0..m {
                let f = if rho[l] == T::NEG_INFINITY { T::ZERO } else { (a[t * m + l] - rho[l]).exp() };
                let row = &big[l * d_v..(l + 1) * d_v];
                axpy(f, row, dv);
                up[t * m + l] = f * (dot(row, v) - small[l]);
            }
        }
        let k = x.k.sub_rows(first..first + n);
        map.pull_back(k, Side::Key, &up[..n * m], &mut dk[first * d..(first + n) * d]);
    }
}
