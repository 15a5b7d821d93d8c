//! Attention on factors: keys and values of a run of tokens as sums of outer products that are never formed.

use crate::workspace::Context;
use crate::{MatRef, Real};
use attlas_num::kernels::{Op, exp_in_place, gemm, merge_lse};
use attlas_num::par::*;
use std::borrow::Cow;
use std::ops::Range;

/// Factors of a run of tokens.
#[derive(Clone, Debug)]
pub struct Side<'a, T: Clone> {
    /// Terms of the sum.
    pub rank: usize,
    /// Head factors, `[token, rank, heads]`.
    pub a: &'a [T],
    /// True if `a` holds one `[rank, heads]` for all tokens.
    pub a_fixed: bool,
    /// Feature factors, `[token, rank, width]`.
    pub b: Cow<'a, [T]>,
}

impl<T: Real> Side<'_, T> {
    fn head_factors(&self, token: usize, heads: usize) -> &[T] {
        let at = if self.a_fixed { 0 } else { token * self.rank * heads };
        &self.a[at..at + self.rank * heads]
    }
}

/// Returns the heads of every token, $\frac1R \sum_r a_r \otimes b_r$, as `[token, heads, width]`.
pub fn combine<T: Real>(side: &Side<'_, T>, heads: usize, width: usize) -> Vec<T> {
    let one = heads * width;
    let tokens = side.b.len() / (side.rank * width).max(1);
    let mut out = vec![T::ZERO; tokens * one];
    let inverse = T::ONE / T::from_usize(side.rank);
    out.par_chunks_mut(one.max(1)).enumerate().for_each(|(t, out)| {
        let a = side.head_factors(t, heads);
        for (r, b) in side.b[t * side.rank * width..].chunks_exact(width).take(side.rank).enumerate() {
            for (h, row) in out.chunks_exact_mut(width).enumerate() {
                let weight = a[r * heads + h] * inverse;
                row.iter_mut().zip(b).for_each(|(x, &b)| *x += weight * b);
            }
        }
    });
    out
}

/// One token's queries.
#[derive(Clone, Debug)]
pub enum Query<'a, T: Clone> {
    /// Head factors `[rank, heads]` and feature factors `[rank, d]`.
    Factors {
        /// Head factors.
        a: &'a [T],
        /// Feature factors.
        b: &'a [T],
        /// Terms.
        rank: usize,
    },
    /// `[heads, d]`.
    Formed(Cow<'a, [T]>),
}

/// Sizes of [`attend_factors`].
#[derive(Clone, Copy, Debug)]
pub struct Sizes<T> {
    /// Heads.
    pub heads: usize,
    /// Width of queries and keys.
    pub d: usize,
    /// Width of values.
    pub d_v: usize,
    /// Factor of the scores.
    pub scale: T,
}

/// Tokens scored together: enough to amortise laying out the query in every block.
pub(super) const BLOCK: usize = 256;
/// Columns that a product computes at once, used or not.
const TILE: usize = 32;
/// Tokens of one task; fixed, so that results do not depend on threads.
pub(super) const CHUNK: usize = 2048;

/// Computes attention of one token over the first `n` tokens of a cache of factors, without forming keys or values.
/// `load` returns the factors of keys and values of a range. The result is `heads × d_v`.
pub fn attend_factors<'c, T: Real>(
    sizes: &Sizes<T>,
    query: &Query<'_, T>,
    n: usize,
    load: &(dyn Fn(Range<usize>) -> (Side<'c, T>, Side<'c, T>) + Sync),
    cx: Context<'_>,
) -> Vec<T> {
    let Sizes { heads, d, d_v, .. } = *sizes;
    // The cheaper of (B_K B_Qᵀ) A_Q and B_K (A_Qᵀ B_Q)ᵀ, counted as products compute them: in whole tiles of columns.
    let tiles = |n: usize| n.next_multiple_of(TILE);
    let query = match query {
        Query::Factors { a, b, rank } if d * tiles(*rank) + rank * tiles(heads) >= d * tiles(heads) => {
            let side = Side { rank: *rank, a, a_fixed: true, b: Cow::Borrowed(*b) };
            Query::Formed(Cow::Owned(combine(&side, heads, d)))
        }
        other => other.clone(),
    };
    let starts: Vec<usize> = (0..n).step_by(CHUNK).collect();
    let parts: Vec<(Vec<T>, Vec<T>)> = starts
        .into_par_iter()
        .map(|start| chunk(sizes, &query, start..(start + CHUNK).min(n), load, cx))
        .collect();
    let mut parts = parts.into_iter();
    let (mut out, mut lse) =
        parts.next().unwrap_or_else(|| (vec![T::ZERO; heads * d_v], vec![T::NEG_INFINITY; heads]));
    for (o2, lse2) in parts {
        for ((o, lse), (o2, lse2)) in
            out.chunks_exact_mut(d_v).zip(&mut lse).zip(o2.chunks_exact(d_v).zip(lse2))
        {
            merge_lse(o, lse, o2, lse2);
        }
    }
    out
}

fn chunk<'c, T: Real>(
    sizes: &Sizes<T>,
    query: &Query<'_, T>,
    tokens: Range<usize>,
    load: &(dyn Fn(Range<usize>) -> (Side<'c, T>, Side<'c, T>) + Sync),
    cx: Context<'_>,
) -> (Vec<T>, Vec<T>) {
    let Sizes { heads, d, d_v, scale } = *sizes;
    let isa = cx.schedule.isa;
    let mut acc = vec![T::ZERO; heads * d_v];
    let (mut m, mut l) = (vec![T::NEG_INFINITY; heads], vec![T::ZERO; heads]);
    let mut logits = vec![T::ZERO; BLOCK * heads];
    let (mut scores, mut shared, mut weights) = (Vec::new(), Vec::new(), Vec::new());
    let mut rank_v = 1;
    for start in tokens.clone().step_by(BLOCK) {
        let range = start..(start + BLOCK).min(tokens.end);
        let n = range.len();
        let (keys, values) = load(range);
        rank_v = values.rank;
        let rows = n * keys.rank;
        let b_k = MatRef::new(&keys.b, rows, d);
        scores.resize(rows * heads, T::ZERO);
        let norm = match query {
            Query::Formed(q) => {
                let q = Op::T(MatRef::new(q, heads, d));
                gemm(isa, T::ONE, Op::N(b_k), q, T::ZERO, &mut scores, heads, cx.scratch);
                T::ONE
            }
            Query::Factors { a, b, rank } => {
                shared.resize(rows * rank, T::ZERO);
                let b = Op::T(MatRef::new(b, *rank, d));
                gemm(isa, T::ONE, Op::N(b_k), b, T::ZERO, &mut shared, *rank, cx.scratch);
                let p = Op::N(MatRef::new(&shared[..], rows, *rank));
                gemm(
                    isa,
                    T::ONE,
                    p,
                    Op::N(MatRef::new(a, *rank, heads)),
                    T::ZERO,
                    &mut scores,
                    heads,
                    cx.scratch,
                );
                T::from_usize(*rank)
            }
        };
        let factor = scale / (norm * T::from_usize(keys.rank));
        let logits = &mut logits[..n * heads];
        logits.fill(T::ZERO);
        let mut top = m.clone();
        for (t, row) in logits.chunks_exact_mut(heads).enumerate() {
            let a = keys.head_factors(t, heads).chunks_exact(heads);
            for (a, s) in a.zip(scores[t * keys.rank * heads..].chunks_exact(heads)) {
                row.iter_mut().zip(a.iter().zip(s)).for_each(|(x, (&a, &s))| *x += a * s);
            }
            for (x, top) in row.iter_mut().zip(&mut top) {
                *x *= factor;
                *top = if *x > *top { *x } else { *top };
            }
        }
        // A head whose logits are all −∞ or NaN so far keeps a shift of 0.
        let shift: Vec<T> = top.iter().map(|&x| if x == T::NEG_INFINITY { T::ZERO } else { x }).collect();
        for row in logits.chunks_exact_mut(heads) {
            row.iter_mut().zip(&shift).for_each(|(x, &s)| *x -= s);
        }
        exp_in_place(logits);
        for h in 0..heads {
            let c = (m[h] - shift[h]).exp();
            l[h] *= c;
            acc[h * d_v..(h + 1) * d_v].iter_mut().for_each(|x| *x *= c);
        }
        m = top;
        weights.clear();
        for (t, p) in logits.chunks_exact(heads).enumerate() {
            l.iter_mut().zip(p).for_each(|(l, &p)| *l += p);
            for a in values.head_factors(t, heads).chunks_exact(heads) {
                weights.extend(a.iter().zip(p).map(|(&a, &p)| a * p));
            }
        }
        let w = MatRef::new(&weights[..], n * values.rank, heads);
        let b_v = MatRef::new(&values.b, n * values.rank, d_v);
        gemm(isa, T::ONE, Op::T(w), Op::N(b_v), T::ONE, &mut acc, d_v, cx.scratch);
    }
    for (o, &l) in acc.chunks_exact_mut(d_v).zip(&l) {
        let total = T::from_usize(rank_v) * l;
        o.iter_mut().for_each(|x| *x = if l == T::ZERO { T::ZERO } else { *x / total });
    }
    let lse =
        m.iter().zip(&l).map(|(&m, &l)| if l == T::ZERO { T::NEG_INFINITY } else { m + l.ln() }).collect();
    (acc, lse)
}
