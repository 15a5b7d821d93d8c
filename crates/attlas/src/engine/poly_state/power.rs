//! The exact kernel of a power, over tiles of keys.
//!
//! A row of sums is $\sum_j (|s_j| / t)^p [v_j, 1]$ with $s_j = \tau \langle q, k_j\rangle + \sigma$ and $t = \max_j |s_j|$ over the
//! keys so far, so that no weight exceeds 1; a tile with a larger $|s_j|$ multiplies the earlier sums by
//! $(t / t')^p$. The logarithmic scale of the row is $p \ln t$.

use super::{Prepare, ROWS};
use crate::group::Group;
use crate::workspace::Context;
use crate::{Mask, MatRef, Real, Result, RunInfo};
use attlas_num::kernels::{self, Op, axpy, gemm};
use std::ops::Range;

/// Keys of one exact tile.
pub(super) const TILE: usize = 256;

/// $\kappa(q, k) = |\tau \langle q, k\rangle + \sigma|^p$.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PowerKernel {
    /// $\tau$.
    pub scale: f64,
    /// $\sigma$.
    pub shift: f64,
    /// $p \ge 1$.
    pub power: f64,
}

/// Keys and values that rows attend to exactly.
#[derive(Clone, Copy, Debug)]
pub struct KeyTile<'a, T> {
    /// Keys.
    pub k: MatRef<'a, T>,
    /// Values as given.
    pub v: MatRef<'a, T>,
    /// Values from [`augment_into`]: with a column of ones, and zero where they are not finite.
    pub augmented: MatRef<'a, T>,
    /// Rows of `v` that are not finite.
    pub spoiled: &'a [usize],
}

impl<'a, T: Real> KeyTile<'a, T> {
    /// Returns the keys of a range that includes all spoiled rows, or any range if `spoiled` is empty.
    pub(super) fn sub(&self, range: Range<usize>) -> KeyTile<'a, T> {
        KeyTile {
            k: self.k.sub_rows(range.clone()),
            v: self.v.sub_rows(range.clone()),
            augmented: self.augmented.sub_rows(range),
            spoiled: self.spoiled,
        }
    }
}

/// Copies `v` and appends a column of ones. Rows that are not finite become zero (but keep their one) and are returned.
pub fn augment_into<T: Real>(v: MatRef<'_, T>, out: &mut [T]) -> Vec<usize> {
    let d_v = v.cols();
    let mut spoiled = Vec::new();
    for (j, (row, out)) in v.iter_rows().zip(out.chunks_exact_mut(d_v + 1)).enumerate() {
        out[..d_v].copy_from_slice(row);
        out[d_v] = T::ONE;
        if !row.iter().all(|x| x.is_finite()) {
            out[..d_v].fill(T::ZERO);
            spoiled.push(j);
        }
    }
    spoiled
}

/// Computes $x \leftarrow x^p$ for $x \ge 0$.
pub fn raise_in_place<T: Real>(x: &mut [T], power: f64) {
    if power.fract() != 0.0 || power > 1024.0 {
        x.iter_mut().for_each(|x| *x = T::from_f64(x.to_f64().powf(power)));
        return;
    }
    let power = power as u32;
    match power {
        1 => {}
        2 => x.iter_mut().for_each(|x| *x *= *x),
        4 => x.iter_mut().for_each(|x| {
            let s = *x * *x;
            *x = s * s;
        }),
        _ => x.iter_mut().for_each(|x| *x = integer_power(*x, power)),
    }
}

fn integer_power<T: Real>(mut base: T, mut power: u32) -> T {
    let mut result = T::ONE;
    while power > 0 {
        if power & 1 == 1 {
            result *= base;
        }
        base *= base;
        power >>= 1;
    }
    result
}

impl PowerKernel {
    /// Adds the keys of a tile to rows of sums. `acc` is `rows × (d_v + 1)` in units of $\mathrm{top}^p$, `top` the
    /// largest $|\tau\langle q, k\rangle + \sigma|$ of each row so far, 0 at first. Row `i` sees `visible(i)` of the
    /// tile's keys.
    pub fn add_tile<T: Real>(
        &self,
        q: MatRef<'_, T>,
        tile: KeyTile<'_, T>,
        visible: impl Fn(usize) -> Range<usize>,
        acc: &mut [T],
        top: &mut [T],
        cx: Context<'_>,
    ) {
        let (rows, n, cols) = (q.rows(), tile.k.rows(), tile.augmented.cols());
        if rows == 0 || n == 0 {
            return;
        }
        let mut scores = cx.scratch.take::<T>(rows * n);
        let isa = cx.schedule.isa;
        gemm(isa, T::from_f64(self.scale), Op::N(q), Op::T(tile.k), T::ZERO, &mut scores, n, cx.scratch);
        let shift = T::from_f64(self.shift);
        for (i, (row, (acc, top))) in
            scores.chunks_exact_mut(n).zip(acc.chunks_exact_mut(cols).zip(top.iter_mut())).enumerate()
        {
            let seen = visible(i);
            row[..seen.start].fill(T::ZERO);
            row[seen.end..].fill(T::ZERO);
            let row = &mut row[seen];
            row.iter_mut().for_each(|x| *x = (*x + shift).abs());
            let largest = kernels::max(row);
            if largest > *top {
                if *top > T::ZERO {
                    let factor = (*top / largest).to_f64().powf(self.power);
                    kernels::scale(T::from_f64(factor), acc);
                }
                *top = largest;
            }
            if *top > T::ZERO {
                let unit = *top;
                row.iter_mut().for_each(|x| *x /= unit);
            }
            raise_in_place(row, self.power);
            // Outside the product, in which the column of ones would take as long as a register full of columns.
            acc[cols - 1] += kernels::sum(row);
        }
        let scores_ref = MatRef::new(&scores, rows, n);
        let values = first_columns(tile.augmented, cols - 1);
        gemm(isa, T::ONE, Op::N(scores_ref), Op::N(values), T::ONE, acc, cols, cx.scratch);
        add_spoiled(scores_ref, tile, visible, acc);
    }

    /// Returns the logarithmic scale of a row of sums with this maximum; −∞ if nothing was added.
    pub fn log_scale<T: Real>(&self, acc: &[T], top: T) -> f64 {
        if top > T::ZERO {
            self.power * top.to_f64().ln()
        } else if acc.last().is_some_and(|x| x.is_nan()) {
            0.0
        } else {
            f64::NEG_INFINITY
        }
    }

    /// Computes exact attention of a group, divided by `c0` plus the sum of the weights. Takes the augmented values and
    /// one block of rows per thread from scratch.
    pub fn attend_group<T: Real>(
        &self,
        g: &mut Group<'_, T>,
        k: MatRef<'_, T>,
        c0: f64,
        prepare: Prepare,
    ) -> Result<RunInfo> {
        let (v, cx, d) = (g.v, g.cx, k.cols());
        let (n_k, cols) = (k.rows(), v.cols() + 1);
        let mut augmented = cx.scratch.take::<T>(n_k * cols);
        let spoiled = augment_into(v, &mut augmented);
        let all = KeyTile { k, v, augmented: MatRef::new(&augmented, n_k, cols), spoiled: &spoiled };
        let offset = n_k as isize - g.n_q() as isize;
        let causal = g.mask == Mask::Causal;
        let kernel = *self;
        let visited = g.visible_pairs();
        let empty = g.par_row_blocks(ROWS, |block| {
            let rows = block.q.rows();
            let mut q = cx.scratch.take::<T>(rows * d);
            prepare.apply_into(block.q, &mut q);
            let q = MatRef::new(&q, rows, d);
            let mut acc = cx.scratch.take_zeroed::<T>(rows * cols);
            let mut top = cx.scratch.take_zeroed::<T>(rows);
            let seen = |i: usize| match causal {
                true => (block.first as isize + i as isize + offset + 1).clamp(0, n_k as isize) as usize,
                false => n_k,
            };
            let mut start = 0;
            while start < seen(rows - 1) {
                let end = (start + TILE).min(n_k);
                let bad: Vec<usize> =
                    spoiled.iter().filter(|j| (start..end).contains(j)).map(|j| j - start).collect();
                let tile = KeyTile { spoiled: &bad, ..all.sub(start..end) };
                let visible = |i| 0..seen(i).clamp(start, end) - start;
                kernel.add_tile(q, tile, visible, &mut acc, &mut top, cx);
                start = end;
            }
            let mut empty = 0;
            for (i, (acc, out)) in
                acc.chunks_exact(cols).zip(block.out.chunks_exact_mut(cols - 1)).enumerate()
            {
                empty += u64::from(seen(i) == 0);
                finish_row(acc, kernel.log_scale(acc, top[i]), c0, out);
            }
            block.lse.fill(T::NEG_INFINITY);
            Ok(empty)
        })?;
        Ok(RunInfo { keys_visited: visited, empty_rows: empty.into_iter().sum(), ..RunInfo::default() })
    }
}

/// Returns the first columns of a matrix.
pub(super) fn first_columns<T: Real>(m: MatRef<'_, T>, cols: usize) -> MatRef<'_, T> {
    MatRef::with_stride(m.data(), m.rows(), cols, m.stride()).unwrap_or(m)
}

/// Adds the values that are not finite to the rows that see them.
fn add_spoiled<T: Real>(
    weights: MatRef<'_, T>,
    tile: KeyTile<'_, T>,
    visible: impl Fn(usize) -> Range<usize>,
    acc: &mut [T],
) {
    if tile.spoiled.is_empty() {
        return;
    }
    let cols = tile.augmented.cols();
    for (i, acc) in acc.chunks_exact_mut(cols).enumerate() {
        let seen = visible(i);
        for &j in tile.spoiled.iter().filter(|j| seen.contains(j)) {
            axpy(weights.at(i, j), tile.v.row(j), &mut acc[..cols - 1]);
        }
    }
}

/// Writes $\mathrm{num} / (c_0 + \mathrm{den})$ for a row of sums with a logarithmic scale; zero for 0/0.
pub fn finish_row<T: Real>(acc: &[T], log: f64, c0: f64, out: &mut [T]) {
    let (num, den) = acc.split_at(acc.len() - 1);
    let extra = if c0 > 0.0 { T::from_f64((c0.ln() - log).exp()) } else { T::ZERO };
    let total = den[0] + extra;
    if log == f64::NEG_INFINITY || total == T::ZERO {
        out.fill(T::ZERO);
    } else {
        out.iter_mut().zip(num).for_each(|(o, &x)| *o = x / total);
    }
}
