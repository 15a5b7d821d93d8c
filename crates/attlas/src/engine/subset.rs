//! Attention of one row over chosen keys.

use attlas_num::cluster::select_top;
use attlas_num::kernels::{axpy, dot};
use attlas_num::{MatRef, Real};

/// Computes softmax attention of the row `q` over the keys named by `index`, in two plain passes. Returns the
/// log-sum-exp, −∞ (and zeros) if `index` is empty. `weights` has room for at least `index.len()` elements.
pub fn attend_subset<T: Real>(
    q: &[T],
    k: MatRef<'_, T>,
    v: MatRef<'_, T>,
    index: &[usize],
    scale: T,
    weights: &mut [T],
    out: &mut [T],
) -> T {
    out.fill(T::ZERO);
    let weights = &mut weights[..index.len()];
    let mut max = T::NEG_INFINITY;
    for (w, &j) in weights.iter_mut().zip(index) {
        *w = scale * dot(q, k.row(j));
        max = max.max(*w);
    }
    if index.is_empty() || max == T::NEG_INFINITY && weights.iter().all(|w| !w.is_nan()) {
        return T::NEG_INFINITY;
    }
    let mut sum = T::ZERO;
    for w in weights.iter_mut() {
        *w = (*w - max).exp();
        sum += *w;
    }
    for (&w, &j) in weights.iter().zip(index) {
        axpy(w / sum, v.row(j), out);
    }
    max + sum.ln()
}

/// Returns the indices of the `count` largest of `scores` in increasing order; the smaller index wins a tie. NaN counts
/// as the largest, so it is never dropped silently.
pub fn top_indices<T: Real>(scores: &[T], count: usize) -> Vec<usize> {
    let mut index = Vec::with_capacity(count.min(scores.len()));
    select_top(scores, count, &mut index);
    index
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ties_go_to_the_smaller_index_and_nan_is_kept() {
        assert_eq!(top_indices(&[1.0, 3.0, 3.0, 2.0], 2), [1, 2]);
        assert_eq!(top_indices(&[3.0, 1.0, 3.0, 3.0], 2), [0, 2]);
        assert_eq!(top_indices(&[1.0, f64::NAN, 3.0], 1), [1]);
        assert_eq!(top_indices(&[1.0, 2.0], 5), [0, 1]);
        assert!(top_indices(&[1.0], 0).is_empty());
    }

    #[test]
    fn one_key_gives_its_value() {
        let (k, v) = ([1.0f64, 2.0], [5.0, 6.0, 7.0, 8.0]);
        let mut out = [0.0; 2];
        let (k, v) = (MatRef::new(&k, 2, 1), MatRef::new(&v, 2, 2));
        let lse = attend_subset(&[3.0], k, v, &[1], 0.5, &mut [0.0], &mut out);
        assert_eq!((out, lse), ([7.0, 8.0], 3.0));
        assert_eq!(attend_subset(&[3.0], k, v, &[], 0.5, &mut [0.0], &mut out), f64::NEG_INFINITY);
        assert_eq!(out, [0.0; 2]);
    }
}
