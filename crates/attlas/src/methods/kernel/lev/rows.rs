//! Outputs of rows from kept and near keys.
//!
//! Numerator and normaliser of row $i$ are sums over the same keys, $\sum_j f_{ij} [v_j, 1]$, in units of the largest
//! $|\tau\langle q_i, k_j\rangle|^p$ of the row; [`Extra`] then adds to the normaliser or replaces it. With softmax
//! weights, the two parts are ordinary attention, merged by log-sum-exp.

use super::{Lev, Weights};
use crate::engine::exact_rows;
use crate::engine::poly_state::{KeyTile, augment_into};
use crate::workspace::Context;
use crate::{MatRef, Real};
use attlas_num::kernels::{Band, merge_lse};

/// Gathered kept keys that the rows of one block see beside near keys.
#[derive(Debug)]
pub(super) struct KeptRows<T> {
    pub(super) k: Vec<T>,
    pub(super) v: Vec<T>,
    pub(super) len: usize,
}

impl<T: Real> KeptRows<T> {
    pub(super) fn empty() -> Self {
        Self { k: Vec::new(), v: Vec::new(), len: 0 }
    }

    pub(super) fn gather(k: MatRef<'_, T>, v: MatRef<'_, T>, index: impl Iterator<Item = usize>) -> Self {
        let mut kept = Self::empty();
        for j in index {
            kept.push(k.row(j), v.row(j));
        }
        kept
    }

    pub(super) fn push(&mut self, k: &[T], v: &[T]) {
        self.k.extend_from_slice(k);
        self.v.extend_from_slice(v);
        self.len += 1;
    }
}

/// Contribution to the normaliser of row `i`: `extra(i, q, top)` in units of $\mathrm{top}^p$, either added to the sum
/// over visited keys or replacing it.
pub(super) type Extra<'a, T> = &'a (dyn Fn(usize, &[T], f64) -> (f64, bool) + Sync);

impl Lev {
    /// Attends with some rows to kept keys and to near keys; row `i` sees near keys up to index `near_upper + i`, or
    /// all.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn attend<T: Real>(
        &self,
        q: MatRef<'_, T>,
        kept: &KeptRows<T>,
        near: (MatRef<'_, T>, MatRef<'_, T>),
        near_upper: Option<isize>,
        extra: Extra<'_, T>,
        out: &mut [T],
        cx: Context<'_>,
    ) {
        let (rows, d, d_v) = (q.rows(), q.cols(), near.1.cols());
        let (k, v) = (MatRef::new(&kept.k, kept.len, d), MatRef::new(&kept.v, kept.len, d_v));
        let band = Band { lower: None, upper: near_upper };
        if self.params.weights == Weights::Softmax {
            let scale = T::from_f64(self.kernel.scale);
            let mut lse = cx.scratch.take::<T>(rows);
            exact_rows(q, k, v, None, scale, Band::ALL, cx, out, &mut lse);
            if near.0.rows() > 0 {
                let mut other = cx.scratch.take::<T>(rows * d_v);
                let mut other_lse = cx.scratch.take::<T>(rows);
                exact_rows(q, near.0, near.1, None, scale, band, cx, &mut other, &mut other_lse);
                for (i, (o, other)) in out.chunks_exact_mut(d_v).zip(other.chunks_exact(d_v)).enumerate() {
                    merge_lse(o, &mut lse[i], other, other_lse[i]);
                }
            }
            return;
        }
        let cols = d_v + 1;
        let mut acc = cx.scratch.take_zeroed::<T>(rows * cols);
        let mut top = cx.scratch.take_zeroed::<T>(rows);
        for (k, v, band) in [(k, v, Band::ALL), (near.0, near.1, band)] {
            let n = k.rows();
            let mut augmented = cx.scratch.take::<T>(n * cols);
            let spoiled = augment_into(v, &mut augmented);
            let tile = KeyTile { k, v, augmented: MatRef::new(&augmented, n, cols), spoiled: &spoiled };
            self.kernel.add_tile(q, tile, |i| band.range(i, n), &mut acc, &mut top, cx);
        }
        for (i, (acc, out)) in acc.chunks_exact(cols).zip(out.chunks_exact_mut(d_v)).enumerate() {
            let unit = top[i].to_f64();
            let (more, whole) = extra(i, q.row(i), unit);
            let visited = acc[d_v].to_f64();
            let total = if whole { more } else { visited + more };
            if total == 0.0 || visited == 0.0 {
                out.fill(T::ZERO);
            } else {
                let inverse = T::from_f64(1.0 / total);
                out.iter_mut().zip(acc).for_each(|(o, &x)| *o = x * inverse);
            }
        }
    }
}
