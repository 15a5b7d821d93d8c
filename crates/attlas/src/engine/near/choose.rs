//! Selection of the far keys that a block of queries sees exactly.

use crate::engine::top_indices;
use crate::group::Queries;
use crate::workspace::Context;
use crate::{MatRef, Real};
use attlas_num::kernels::{Op, gemm, softmax_in_place};
use std::ops::Range;

/// Returns the `count` keys among `keys` (in order) to which the mean of the queries `recent` gives the most weight,
/// summed over the heads of the group. The earlier key wins a tie; the result is in order.
pub(super) fn choose<T: Real>(
    q: Queries<'_, T>,
    recent: Range<usize>,
    k: MatRef<'_, T>,
    keys: &[usize],
    count: usize,
    scale: T,
    cx: Context<'_>,
) -> Vec<usize> {
    let (heads, d) = (q.heads(), k.cols());
    let mut means = vec![T::ZERO; heads * d];
    for (h, mean) in means.chunks_exact_mut(d).enumerate() {
        super::rows::mean_into(q.head(h).sub_rows(recent.clone()), mean);
    }
    heaviest(MatRef::new(&means, heads, d), k, keys, count, scale, cx)
}

/// Returns the `count` of `keys` with the largest sum of softmax weights over the rows of `means`.
pub(super) fn heaviest<T: Real>(
    means: MatRef<'_, T>,
    k: MatRef<'_, T>,
    keys: &[usize],
    count: usize,
    scale: T,
    cx: Context<'_>,
) -> Vec<usize> {
    if keys.len() <= count {
        return keys.to_vec();
    }
    let (first, last) = (keys[0], keys[keys.len() - 1]);
    let span = k.sub_rows(first..last + 1);
    let n = span.rows();
    let mut logits = vec![T::ZERO; means.rows() * n];
    gemm(cx.schedule.isa, scale, Op::N(means), Op::T(span), T::ZERO, &mut logits, n, cx.scratch);
    let mut mass = vec![T::ZERO; keys.len()];
    let mut row = vec![T::ZERO; keys.len()];
    for logits in logits.chunks_exact(n) {
        row.iter_mut().zip(keys).for_each(|(x, &j)| *x = logits[j - first]);
        softmax_in_place(&mut row);
        mass.iter_mut().zip(&row).for_each(|(m, &x)| *m += x);
    }
    top_indices(&mass, count).into_iter().map(|at| keys[at]).collect()
}
