//! Outputs of query rows from a state and from near keys.
//!
//! The sum of a row is $\varphi(a)^\top S$ at the scale $e_q + e$, plus the sum over near keys at its own scale, merged
//! at the larger of the two. The kernel itself weights near keys, or the sketched one if it is used everywhere. Kernels
//! of either sign may cancel: a normaliser below a share of $D^+ = \sum_l |\varphi_l(q)| \sum_j |\varphi_l(k_j)|$ goes
//! to the [`Guard`].

use super::power::{KeyTile, PowerKernel, finish_row, first_columns};
use super::state::{SketchSums, merge_rows};
use super::{Form, SketchAttention};
use crate::workspace::Context;
use crate::{MatRef, Real};
use attlas_num::kernels::{self, Op, axpy, exp_in_place, gemm};

/// Treatment of rows whose normaliser is unreliable, for kernels of either sign.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Guard {
    /// Keeps the result.
    Strict,
    /// Raises the normaliser to this share of $D^+ = \sum_l |\varphi_l(q)| \sum_j |\varphi_l(k_j)|$.
    Clamp(f64),
    /// Sets rows below this share of $D^+$ to zero.
    Zero(f64),
    /// Recomputes rows below this share of $D^+$ with the kernel itself; streams keep keys and values for it.
    Exact(f64, PowerKernel),
}

impl Guard {
    /// Returns the kernel with which guarded rows are computed.
    pub(super) fn kernel(self) -> Option<PowerKernel> {
        match self {
            Guard::Exact(_, kernel) => Some(kernel),
            _ => None,
        }
    }
}

/// Near keys, with their sketches and logarithms if the kernel inside a block is sketched.
#[derive(Clone, Copy)]
pub(super) struct NearTile<'a, T> {
    pub(super) tile: KeyTile<'a, T>,
    pub(super) short: &'a [T],
    pub(super) logs: &'a [f64],
}

impl<T: Real> SketchAttention<'_, T> {
    /// Computes the outputs of some rows from the state and from `near` keys, of which row `i` sees the first
    /// `seen(i)`. Returns the guarded rows.
    pub(super) fn attend(
        &self,
        q: MatRef<'_, T>,
        state: &SketchSums<'_, T>,
        near: Option<(NearTile<'_, T>, &dyn Fn(usize) -> usize)>,
        out: &mut [T],
        cx: Context<'_>,
    ) -> Vec<usize> {
        let (rows, r, m, d_v) = (q.rows(), self.map.width(), self.features(), out.len() / q.rows().max(1));
        let (cols, scratch, isa) = (d_v + 2, cx.scratch, cx.schedule.isa);
        let mut prepared = scratch.take::<T>(rows * q.cols());
        self.prepare.apply_into(q, &mut prepared);
        let q = MatRef::new(&prepared, rows, q.cols());
        let mut short = scratch.take::<T>(rows * r);
        let mut logs = scratch.take::<f64>(rows);
        self.map.sketch_into(q, cx, &mut short, &mut logs);
        let mut far = scratch.take_zeroed::<T>(rows * cols);
        if state.log > f64::NEG_INFINITY {
            let mut wide = scratch.take::<T>(rows * m);
            short.chunks_exact(r).zip(wide.chunks_exact_mut(m)).for_each(|(s, w)| self.form.expand(s, w));
            let sums = MatRef::new(state.sums, m, cols);
            let features = MatRef::new(&wide, rows, m);
            gemm(
                isa,
                T::ONE,
                Op::N(features),
                Op::N(first_columns(sums, d_v)),
                T::ZERO,
                &mut far,
                cols,
                scratch,
            );
            // Outside the product, in which one more column would take as long as a register full of them.
            let mut ones = scratch.take::<T>(m);
            ones.iter_mut().enumerate().for_each(|(l, x)| *x = sums.at(l, d_v));
            for (far, features) in far.chunks_exact_mut(cols).zip(features.iter_rows()) {
                far[d_v] = kernels::dot(features, &ones);
            }
            if self.form == Form::Direct {
                for (far, wide) in far.chunks_exact_mut(cols).zip(wide.chunks_exact(m)) {
                    far[cols - 1] =
                        wide.iter().enumerate().map(|(l, w)| w.abs() * state.sums[l * cols + cols - 1]).sum();
                }
            }
        }
        let mut near_sums = scratch.take_zeroed::<T>(rows * cols);
        let mut near_logs = scratch.take::<f64>(rows);
        near_logs.fill(f64::NEG_INFINITY);
        if let Some((near, seen)) = near {
            match self.near {
                Some(kernel) => {
                    self.near_exact(kernel, q, near.tile, seen, &mut near_sums, &mut near_logs, cx)
                }
                None => self.near_sketched(&short, near, seen, &mut near_sums, &mut near_logs, &logs, cx),
            }
        }
        let mut guarded = Vec::new();
        for (i, out) in out.chunks_exact_mut(d_v).enumerate() {
            let row = &mut far[i * cols..(i + 1) * cols];
            let mut log = if state.log > f64::NEG_INFINITY { state.log + logs[i] } else { f64::NEG_INFINITY };
            merge_rows(row, &mut log, &near_sums[i * cols..(i + 1) * cols], near_logs[i]);
            let (magnitude, row) = (row[cols - 1], &mut row[..cols - 1]);
            if self.guard_row(row, magnitude) {
                guarded.push(i);
            }
            finish_row(row, log, self.c0, out);
        }
        guarded
    }

    /// Applies the guard; returns true if it acted.
    fn guard_row(&self, row: &mut [T], magnitude: T) -> bool {
        if self.form == Form::Squared {
            return false;
        }
        let den = row.len() - 1;
        let share = match self.guard {
            Guard::Strict => 1e-3,
            Guard::Clamp(share) | Guard::Zero(share) | Guard::Exact(share, _) => share,
        };
        let floor = T::from_f64(share) * magnitude;
        if row[den] > floor || row[den].is_nan() || magnitude == T::ZERO {
            return false;
        }
        match self.guard {
            Guard::Strict => {}
            Guard::Clamp(_) => row[den] = floor,
            Guard::Zero(_) | Guard::Exact(..) => row.fill(T::ZERO),
        }
        true
    }

    #[allow(clippy::too_many_arguments)]
    fn near_exact(
        &self,
        kernel: PowerKernel,
        q: MatRef<'_, T>,
        tile: KeyTile<'_, T>,
        seen: &dyn Fn(usize) -> usize,
        sums: &mut [T],
        logs: &mut [f64],
        cx: Context<'_>,
    ) {
        let (rows, width) = (q.rows(), tile.augmented.cols());
        let mut acc = cx.scratch.take_zeroed::<T>(rows * width);
        let mut top = cx.scratch.take_zeroed::<T>(rows);
        kernel.add_tile(q, tile, |i| 0..seen(i), &mut acc, &mut top, cx);
        for (i, (acc, sums)) in acc.chunks_exact(width).zip(sums.chunks_exact_mut(width + 1)).enumerate() {
            sums[..width].copy_from_slice(acc);
            sums[width] = acc[width - 1];
            logs[i] = kernel.log_scale(acc, top[i]);
        }
    }

    /// Adds the sketched kernel inside a block. The scale of a row is the largest among the keys it sees.
    #[allow(clippy::too_many_arguments)]
    fn near_sketched(
        &self,
        short: &[T],
        near: NearTile<'_, T>,
        seen: &dyn Fn(usize) -> usize,
        sums: &mut [T],
        logs: &mut [f64],
        own_logs: &[f64],
        cx: Context<'_>,
    ) {
        let NearTile { tile, short: keys, logs: key_logs } = near;
        let (rows, r, n, width) = (logs.len(), self.map.width(), tile.k.rows(), tile.augmented.cols());
        let mut weights = cx.scratch.take::<T>(rows * n);
        let mut factors = cx.scratch.take::<T>(n);
        let isa = cx.schedule.isa;
        let (short, keys) = (MatRef::new(short, rows, r), MatRef::new(&keys[..n * r], n, r));
        gemm(isa, T::ONE, Op::N(short), Op::T(keys), T::ZERO, &mut weights, n, cx.scratch);
        let signed = self.form == Form::Direct;
        let mut bounds = cx.scratch.take::<T>(if signed { rows * n } else { 0 });
        if signed {
            let mut positive = cx.scratch.take::<T>((rows + n) * r);
            let entries = short.data()[..rows * r].iter().chain(&keys.data()[..n * r]);
            positive.iter_mut().zip(entries).for_each(|(p, x)| *p = x.abs());
            let (short, keys) = positive.split_at(rows * r);
            let (short, keys) = (MatRef::new(short, rows, r), MatRef::new(keys, n, r));
            gemm(isa, T::ONE, Op::N(short), Op::T(keys), T::ZERO, &mut bounds, n, cx.scratch);
        }
        for (i, row) in weights.chunks_exact_mut(n).enumerate() {
            let seen = seen(i);
            row[seen..].fill(T::ZERO);
            let row = &mut row[..seen];
            let log = key_logs[..seen].iter().fold(f64::NEG_INFINITY, |m, &l| m.max(l));
            if log == f64::NEG_INFINITY {
                // No key, or only NaN.
                logs[i] = if seen > 0 { 0.0 } else { log };
                continue;
            }
            logs[i] = log + own_logs[i];
            let factors = &mut factors[..seen];
            factors.iter_mut().zip(key_logs.iter()).for_each(|(f, l)| *f = T::from_f64(l - log));
            exp_in_place(factors);
            match self.form {
                Form::Squared => row.iter_mut().zip(factors.iter()).for_each(|(x, &f)| *x = *x * *x * f),
                Form::Direct => row.iter_mut().zip(factors.iter()).for_each(|(x, &f)| *x *= f),
            }
            if signed {
                sums[i * (width + 1) + width] = kernels::dot(&bounds[i * n..i * n + seen], factors);
            }
        }
        let weights = MatRef::new(&weights, rows, n);
        gemm(isa, T::ONE, Op::N(weights), Op::N(tile.augmented), T::ONE, sums, width + 1, cx.scratch);
        if !tile.spoiled.is_empty() {
            for (i, sums) in sums.chunks_exact_mut(width + 1).enumerate() {
                for &j in tile.spoiled.iter().filter(|j| **j < seen(i)) {
                    axpy(weights.at(i, j), tile.v.row(j), &mut sums[..width - 1]);
                }
            }
        }
    }
}
