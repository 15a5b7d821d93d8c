//! Sums over keys: $S = \sum_j e^{e_j - e} \varphi(b_j) [v_j, 1, \ast]^\top$ with the scale $e = \max_j e_j$.
//!
//! The starred column is $\sum_j e^{e_j - e} |\varphi(b_j)|$, the reference for sums of either sign; squares leave it
//! zero. Two states add after both are brought to the larger scale.

use super::{Form, ROWS, SketchAttention};
use crate::workspace::Context;
use crate::{MatRef, Real};
use attlas_num::kernels::{self, Op, axpy, gemm};

/// A state: `features × (d_v + 2)` sums, with those of absolute features in the last column, and their scale.
#[derive(Debug)]
pub(super) struct SketchSums<'a, T> {
    pub(super) sums: &'a mut [T],
    pub(super) log: f64,
}

impl<T: Real> SketchAttention<'_, T> {
    /// Adds keys to a state.
    pub(super) fn absorb(
        &self,
        k: MatRef<'_, T>,
        v: MatRef<'_, T>,
        state: &mut SketchSums<'_, T>,
        cx: Context<'_>,
    ) {
        let (r, m, d_v) = (self.map.width(), self.features(), v.cols());
        let cols = d_v + 2;
        let scratch = cx.scratch;
        let rows = ROWS.min(k.rows());
        let mut short = scratch.take::<T>(rows * r);
        let mut wide = scratch.take::<T>(rows * m);
        let mut ones = scratch.take::<T>(m);
        let mut logs = scratch.take::<f64>(rows);
        let mut start = 0;
        while start < k.rows() {
            let n = rows.min(k.rows() - start);
            let (k, v) = (k.sub_rows(start..start + n), v.sub_rows(start..start + n));
            let (short, wide, logs) = (&mut short[..n * r], &mut wide[..n * m], &mut logs[..n]);
            self.map.sketch_into(k, cx, short, logs);
            let log = logs.iter().fold(state.log, |m, &l| m.max(l));
            if log > state.log && state.log > f64::NEG_INFINITY {
                kernels::scale(T::from_f64((state.log - log).exp()), state.sums);
            }
            state.log = log;
            for ((short, wide), own) in
                short.chunks_exact_mut(r).zip(wide.chunks_exact_mut(m)).zip(logs.iter())
            {
                self.form.scale_row(short, own - log);
                self.form.expand(short, wide);
            }
            let features = MatRef::new(wide, n, m);
            gemm(cx.schedule.isa, T::ONE, Op::T(features), Op::N(v), T::ONE, state.sums, cols, scratch);
            // Outside the product, in which one more column would take as long as a register full of them.
            ones.fill(T::ZERO);
            features.iter_rows().for_each(|row| axpy(T::ONE, row, &mut ones));
            state.sums.chunks_exact_mut(cols).zip(ones.iter()).for_each(|(sums, &x)| sums[d_v] += x);
            if self.form == Form::Direct {
                for row in features.iter_rows() {
                    for (sums, x) in state.sums.chunks_exact_mut(cols).zip(row) {
                        sums[cols - 1] += x.abs();
                    }
                }
            }
            start += n;
        }
    }

    /// Computes `into ← into + from`.
    pub(super) fn combine(into: &mut SketchSums<'_, T>, from: &[T], log: f64) {
        if log == f64::NEG_INFINITY {
            return;
        }
        let top = into.log.max(log);
        if into.log > f64::NEG_INFINITY && top > into.log {
            kernels::scale(T::from_f64((into.log - top).exp()), into.sums);
        }
        axpy(T::from_f64((log - top).exp()), from, into.sums);
        into.log = top;
    }
}

/// Adds one row of sums to another, each with its logarithmic scale.
pub(super) fn merge_rows<T: Real>(row: &mut [T], log: &mut f64, other: &[T], other_log: f64) {
    if other_log == f64::NEG_INFINITY {
        return;
    }
    let top = log.max(other_log);
    if *log > f64::NEG_INFINITY {
        kernels::scale(T::from_f64((*log - top).exp()), row);
    } else {
        row.fill(T::ZERO);
    }
    axpy(T::from_f64((other_log - top).exp()), other, row);
    *log = top;
}
