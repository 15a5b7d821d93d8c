//! Attention with powers of inner products: exact tiles, and states of products of sketches.
//!
//! Two kinds of sums appear. *Exact*: $\sum_j |\tau \langle q, k_j\rangle + \sigma|^p [v_j, 1]$ over tiles of keys, with
//! a running maximum per row in place of the running maximum of softmax ([`PowerKernel`]). *State*: where
//! $\kappa(q, k) = e^{e_q + e_k} \langle a, b\rangle^2$ (or $\langle a, b\rangle$) for short rows $a$, $b$
//! ([`HalfSketch`]), the sum over keys is $\varphi(a)^\top S$ with $S = \sum_j e^{e_j - e} \varphi(b_j) [v_j, 1]^\top$,
//! $\varphi$ being the symmetric square (or the identity), of a size that does not depend on the number of keys
//! ([`SketchAttention`]).
//!
//! Every sum is a row of numbers with a logarithmic scale, so that high powers do not overflow, and the last
//! number of a row is the normaliser (values carry a column of ones). A scale that a row uses depends on keys
//! that the row sees and on nothing else: results are causal bit by bit. Values that are not finite are taken
//! out of the products of diagonal tiles, where zero weights would spread them, and added to the rows that see
//! them.

use crate::group::{Group, GroupStream};
use crate::workspace::Context;
use crate::{Mask, MatRef, Real, Result, RunInfo};
use attlas_num::kernels::{self, Op, axpy, exp_in_place, gemm};
use attlas_num::sketch::features::{Side, SignedFeatures};
use attlas_num::sketch::polynomial::{symmetric_square_into, symmetric_square_len};
use rayon::prelude::*;
use std::ops::Range;

/// What one product takes from scratch on one thread, at most.
pub const GEMM_SCRATCH_BYTES: usize = 2 << 20;

/// Query rows of one task, and key rows of one update of a state.
pub const ROWS: usize = 96;

/// Keys of one exact tile.
const TILE: usize = 256;

/// Blocks of one piece of a causal sequence: pieces run in parallel, the blocks of a piece one after another.
/// Fixed, so that the number of threads cannot change a bit.
const PIECE_BLOCKS: usize = 4;

/// Keys of one piece without a mask.
const PIECE_KEYS: usize = 2048;

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
    /// Values as they are.
    pub v: MatRef<'a, T>,
    /// Values from [`augment_into`]: with a column of ones, and zero where they are not finite.
    pub augmented: MatRef<'a, T>,
    /// Rows of `v` that are not finite.
    pub spoiled: &'a [usize],
}

impl<'a, T: Real> KeyTile<'a, T> {
    /// The keys of a range that holds all of the spoiled rows, or none where `spoiled` is empty.
    fn sub(&self, range: Range<usize>) -> KeyTile<'a, T> {
        KeyTile {
            k: self.k.sub_rows(range.clone()),
            v: self.v.sub_rows(range.clone()),
            augmented: self.augmented.sub_rows(range),
            spoiled: self.spoiled,
        }
    }
}

/// Copies `v` with a column of ones behind it. Rows that are not finite become zero (their one stays) and are
/// returned.
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

/// $x \leftarrow x^p$ for $x \ge 0$.
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
        }
        let scores_ref = MatRef::new(&scores, rows, n);
        gemm(isa, T::ONE, Op::N(scores_ref), Op::N(tile.augmented), T::ONE, acc, cols, cx.scratch);
        add_spoiled(scores_ref, tile, visible, acc);
    }

    /// The logarithmic scale of a row of sums with this maximum; −∞ where nothing was added.
    pub fn log_scale<T: Real>(&self, acc: &[T], top: T) -> f64 {
        if top > T::ZERO {
            self.power * top.to_f64().ln()
        } else if acc.last().is_some_and(|x| x.is_nan()) {
            0.0
        } else {
            f64::NEG_INFINITY
        }
    }

    /// Exact attention of a group, divided by `c0` plus the sum of the weights. Takes the augmented values and
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

    /// Upper bound on the scratch of [`attend_group`](Self::attend_group).
    pub fn scratch_bytes(p: &crate::Problem, threads: usize, size: usize) -> usize {
        let rows = ROWS.min(p.n_q.max(1));
        let per_thread = rows * (p.d + p.d_v + 2 + TILE) * size + GEMM_SCRATCH_BYTES + 1024;
        p.n_k * (p.d_v + 1) * size + threads * per_thread + 256
    }
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

/// Writes $\mathrm{num} / (c_0 + \mathrm{den})$ for a row of sums with a logarithmic scale; zero where that is 0/0.
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

/// What is done to rows of queries and keys before their products are taken.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Prepare {
    /// Nothing.
    Copy,
    /// Layer normalisation with this $\varepsilon$ and no gain: mean 0, mean square 1.
    LayerNorm(f64),
}

impl Prepare {
    /// Writes the prepared rows.
    pub fn apply_into<T: Real>(self, x: MatRef<'_, T>, out: &mut [T]) {
        let d = x.cols();
        for (row, out) in x.iter_rows().zip(out.chunks_exact_mut(d)) {
            match self {
                Prepare::Copy => out.copy_from_slice(row),
                Prepare::LayerNorm(eps) => layer_norm_into(row, eps, out),
            }
        }
    }
}

fn layer_norm_into<T: Real>(row: &[T], eps: f64, out: &mut [T]) {
    let d = row.len() as f64;
    let mean = row.iter().map(|x| x.to_f64()).sum::<f64>() / d;
    // A row so large that its squares overflow is divided by its largest entry first; ε is nothing then.
    let top = row.iter().fold(0.0f64, |m, x| m.max((x.to_f64() - mean).abs()));
    let (unit, eps) = if top > 1e150 { (top, 0.0) } else { (1.0, eps) };
    let variance = row.iter().map(|x| ((x.to_f64() - mean) / unit).powi(2)).sum::<f64>() / d;
    let inverse = 1.0 / (variance + eps).sqrt();
    for (o, x) in out.iter_mut().zip(row) {
        let centred = (x.to_f64() - mean) / unit;
        *o = T::from_f64(if centred == 0.0 { 0.0 } else { centred * inverse });
    }
}

/// A map to short rows whose inner product, or its square, is a kernel.
pub trait HalfSketch<T: Real>: Send + Sync + std::fmt::Debug {
    /// Length of the rows.
    fn width(&self) -> usize;

    /// Writes the short rows of `x`, of length about 1, and the logarithm of the factor that the kernel has for
    /// each of them.
    fn sketch_into(&self, x: MatRef<'_, T>, cx: Context<'_>, out: &mut [T], log: &mut [f64]);
}

/// Rows divided by their lengths, with a constant behind them: the kernel $(\tau\langle q, k\rangle + \sigma)^{2}$ as a
/// square of inner products without any error.
#[derive(Clone, Debug)]
pub struct UnitRows {
    /// Length of the rows.
    pub d: usize,
    /// $\tau$.
    pub scale: f64,
    /// $\sigma \ge 0$.
    pub shift: f64,
    /// The power $p$ of the kernel.
    pub power: f64,
}

impl<T: Real> HalfSketch<T> for UnitRows {
    fn width(&self) -> usize {
        self.d + usize::from(self.shift > 0.0)
    }

    fn sketch_into(&self, x: MatRef<'_, T>, _: Context<'_>, out: &mut [T], log: &mut [f64]) {
        let width = HalfSketch::<T>::width(self);
        let (root, extra) = (self.scale.sqrt(), self.shift.sqrt());
        for ((row, out), log) in x.iter_rows().zip(out.chunks_exact_mut(width)).zip(log) {
            *log = self.power * unit_into(row, root, extra, out);
        }
    }
}

/// Writes `[root · x, extra]` divided by its length and returns the logarithm of the length; `extra` only where
/// `out` has room for it. A zero row stays zero with logarithm 0.
pub fn unit_into<T: Real>(x: &[T], root: f64, extra: f64, out: &mut [T]) -> f64 {
    let room = out.len() > x.len();
    let extra = if room { extra } else { 0.0 };
    let top = x.iter().fold(extra, |m, v| m.max(root * v.to_f64().abs()));
    if top == 0.0 {
        out.iter_mut().zip(x).for_each(|(o, &v)| *o = v);
        if room {
            out[x.len()] = T::ZERO;
        }
        return 0.0;
    }
    let sum: f64 = x.iter().map(|v| (root * v.to_f64() / top).powi(2)).sum::<f64>() + (extra / top).powi(2);
    let length = top * sum.sqrt();
    out.iter_mut().zip(x).for_each(|(o, v)| *o = T::from_f64(root * v.to_f64() / length));
    if room {
        out[x.len()] = T::from_f64(extra / length);
    }
    length.ln()
}

/// A map of signed features with one logarithmic scale per row.
#[derive(Clone, Debug)]
pub struct Signed<M>(pub M);

impl<T: Real, M: SignedFeatures<T>> HalfSketch<T> for Signed<M> {
    fn width(&self) -> usize {
        self.0.num_features()
    }

    fn sketch_into(&self, x: MatRef<'_, T>, cx: Context<'_>, out: &mut [T], log: &mut [f64]) {
        let mut scales = cx.scratch.take::<T>(x.rows());
        // The key side on both sides: constants must not be dropped where parts are merged.
        self.0.signed_features(x, Side::Key, out, &mut scales);
        log.iter_mut().zip(scales.iter()).for_each(|(l, s)| *l = s.to_f64());
    }
}

/// How short rows become features.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// They are the features: the kernel is their inner product, of either sign.
    Direct,
    /// Symmetric square: the kernel is the square of their inner product.
    Squared,
}

impl Form {
    /// Features for short rows of this length.
    pub fn features(self, width: usize) -> usize {
        match self {
            Form::Direct => width,
            Form::Squared => symmetric_square_len(width),
        }
    }

    fn expand<T: Real>(self, short: &[T], out: &mut [T]) {
        match self {
            Form::Direct => out.copy_from_slice(short),
            Form::Squared => symmetric_square_into(short, out),
        }
    }

    /// Multiplies a short row so that its features are multiplied by $e^{\log}$.
    fn scale_row<T: Real>(self, short: &mut [T], log: f64) {
        let log = if self == Form::Squared { 0.5 * log } else { log };
        kernels::scale(T::from_f64(log.exp()), short);
    }
}

/// What a row whose normaliser cannot be trusted gets, where kernels have either sign.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Guard {
    /// What comes out.
    Strict,
    /// The normaliser is raised to this share of $D^+ = \sum_l |\varphi_l(q)| \sum_j |\varphi_l(k_j)|$.
    Clamp(f64),
    /// Rows below this share of $D^+$ become zero.
    Zero(f64),
    /// Rows below this share of $D^+$ are computed again with the kernel itself; streams keep keys and values for it.
    Exact(f64, PowerKernel),
}

impl Guard {
    /// The kernel that guarded rows are computed with.
    fn kernel(self) -> Option<PowerKernel> {
        match self {
            Guard::Exact(_, kernel) => Some(kernel),
            _ => None,
        }
    }
}

/// Attention through a state of sketches, causally with an exact or sketched block around each query.
#[derive(Debug)]
pub struct SketchAttention<'a, T: Real> {
    /// The map.
    pub map: &'a dyn HalfSketch<T>,
    /// How its rows become features.
    pub form: Form,
    /// The kernel inside a causal block; the sketched one where `None`.
    pub near: Option<PowerKernel>,
    /// Added to the normaliser.
    pub c0: f64,
    /// Keys of a causal block.
    pub block: usize,
    /// What is done to queries first; keys come prepared.
    pub prepare: Prepare,
    /// What vanishing normalisers lead to; [`Form::Squared`] has none.
    pub guard: Guard,
}

/// A state: `features × (d_v + 2)` sums, the last column that of absolute features, and their scale.
#[derive(Debug)]
struct State<'a, T> {
    sums: &'a mut [T],
    log: f64,
}

/// Near keys: their sketches and logarithms besides, where the kernel inside a block is sketched.
#[derive(Clone, Copy)]
struct Near<'a, T> {
    tile: KeyTile<'a, T>,
    short: &'a [T],
    logs: &'a [f64],
}

/// Places for the rows of one block of queries.
struct Target<'a, T> {
    head: usize,
    /// Number of the first row.
    first: usize,
    q: MatRef<'a, T>,
    /// Key position of the first row.
    position: usize,
    out: &'a mut [T],
}

impl<T: Real> SketchAttention<'_, T> {
    fn features(&self) -> usize {
        self.form.features(self.map.width())
    }

    /// Elements of a state for values of width `d_v`.
    pub fn state_len(&self, d_v: usize) -> usize {
        self.features() * (d_v + 2)
    }

    /// Adds keys to a state.
    fn absorb(&self, k: MatRef<'_, T>, v: MatRef<'_, T>, state: &mut State<'_, T>, cx: Context<'_>) {
        let (r, m, d_v) = (self.map.width(), self.features(), v.cols());
        let cols = d_v + 2;
        let scratch = cx.scratch;
        let rows = ROWS.min(k.rows());
        let mut short = scratch.take::<T>(rows * r);
        let mut wide = scratch.take::<T>(rows * m);
        let mut values = scratch.take::<T>(rows * (d_v + 1));
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
            for (row, out) in v.iter_rows().zip(values.chunks_exact_mut(d_v + 1)) {
                out[..d_v].copy_from_slice(row);
                out[d_v] = T::ONE;
            }
            let (features, values) =
                (MatRef::new(wide, n, m), MatRef::new(&values[..n * (d_v + 1)], n, d_v + 1));
            let isa = cx.schedule.isa;
            gemm(isa, T::ONE, Op::T(features), Op::N(values), T::ONE, state.sums, cols, scratch);
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

    /// `into ← into + from`.
    fn combine(into: &mut State<'_, T>, from: &[T], log: f64) {
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

    /// The outputs of some rows: the state, and `near` keys of which row `i` sees the first `seen(i)`. Returns the
    /// guarded rows.
    fn attend(
        &self,
        q: MatRef<'_, T>,
        state: &State<'_, T>,
        near: Option<(Near<'_, T>, &dyn Fn(usize) -> usize)>,
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
            let width = d_v + 1;
            let narrow = MatRef::with_stride(state.sums, m, width, cols).unwrap_or(sums);
            gemm(isa, T::ONE, Op::N(features), Op::N(narrow), T::ZERO, &mut far, cols, scratch);
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

    /// Applies the guard; true where it acted.
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

    /// The sketched kernel inside a block. The scale of a row is the largest among the keys it sees.
    #[allow(clippy::too_many_arguments)]
    fn near_sketched(
        &self,
        short: &[T],
        near: Near<'_, T>,
        seen: &dyn Fn(usize) -> usize,
        sums: &mut [T],
        logs: &mut [f64],
        own_logs: &[f64],
        cx: Context<'_>,
    ) {
        let Near { tile, short: keys, logs: key_logs } = near;
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
                // No key, or none but NaN.
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

    /// A group whose keys `k` are prepared. Writes outputs; log-sum-exp is set to −∞.
    pub fn run(&self, g: &mut Group<'_, T>, k: MatRef<'_, T>) -> Result<RunInfo> {
        g.lse.fill(T::NEG_INFINITY);
        if g.n_q() == 0 || g.q.heads() == 0 {
            return Ok(RunInfo::default());
        }
        if k.rows() == 0 {
            return Ok(g.fill_empty());
        }
        let info = match g.mask {
            Mask::None => self.run_all(g, k)?,
            Mask::Causal => self.run_causal(g, k)?,
        };
        Ok(RunInfo { rank: Some(self.features()), ..info })
    }

    fn run_all(&self, g: &mut Group<'_, T>, k: MatRef<'_, T>) -> Result<RunInfo> {
        let (v, cx, len) = (g.v, g.cx, self.state_len(g.d_v()));
        let pieces = k.rows().div_ceil(PIECE_KEYS);
        let mut sums = cx.scratch.take_zeroed::<T>(pieces * len);
        let logs: Vec<f64> = sums
            .par_chunks_mut(len)
            .with_max_len(1)
            .enumerate()
            .map(|(i, sums)| {
                let range = i * PIECE_KEYS..((i + 1) * PIECE_KEYS).min(k.rows());
                let mut state = State { sums, log: f64::NEG_INFINITY };
                self.absorb(k.sub_rows(range.clone()), v.sub_rows(range), &mut state, cx);
                state.log
            })
            .collect();
        let (first, rest) = sums.split_at_mut(len);
        let mut state = State { sums: first, log: logs[0] };
        rest.chunks_exact(len).zip(&logs[1..]).for_each(|(s, &log)| Self::combine(&mut state, s, log));
        let state = &state;
        let rows = (g.n_q() * g.q.heads()) as u64;
        let guarded = g.par_row_blocks(ROWS, |block| {
            let rows = self.attend(block.q, state, None, block.out, cx);
            Ok(rows.into_iter().map(|i| (block.head, block.first + i)).collect::<Vec<_>>())
        })?;
        let guarded = guarded.concat();
        self.mend(g, k, &guarded);
        let visited = rows * self.features() as u64;
        Ok(RunInfo { keys_visited: visited, fallback_rows: guarded.len() as u64, ..RunInfo::default() })
    }

    fn run_causal(&self, g: &mut Group<'_, T>, k: MatRef<'_, T>) -> Result<RunInfo> {
        let (v, cx, len) = (g.v, g.cx, self.state_len(g.d_v()));
        let (n_q, n_k, d_v, heads) = (g.n_q(), k.rows(), g.d_v(), g.q.heads());
        // Rows before the first key see nothing; the others stand at key positions from `first` on.
        let blind = n_q.saturating_sub(n_k);
        let first = n_k.saturating_sub(n_q);
        let piece_len = self.block * PIECE_BLOCKS;
        let pieces = n_k.div_ceil(piece_len);
        let keys_of = |i: usize| i * piece_len..((i + 1) * piece_len).min(n_k);

        // The state before each piece: own sums in parallel, then running sums in order.
        let mut sums = cx.scratch.take_zeroed::<T>(pieces * len);
        let mut logs: Vec<f64> = sums
            .par_chunks_mut(len)
            .with_max_len(1)
            .enumerate()
            .map(|(i, sums)| {
                let mut state = State { sums, log: f64::NEG_INFINITY };
                if i > 0 {
                    let range = keys_of(i - 1);
                    self.absorb(k.sub_rows(range.clone()), v.sub_rows(range), &mut state, cx);
                }
                state.log
            })
            .collect();
        for i in 1..pieces {
            let (before, own) = sums.split_at_mut(i * len);
            let mut state = State { sums: &mut own[..len], log: logs[i] };
            Self::combine(&mut state, &before[(i - 1) * len..], logs[i - 1]);
            logs[i] = state.log;
        }

        let mut targets: Vec<Vec<Target<'_, T>>> = (0..pieces).map(|_| Vec::new()).collect();
        for (h, out) in g.out.chunks_exact_mut(n_q * d_v).enumerate() {
            let (zero, mut rest) = out.split_at_mut(blind * d_v);
            zero.fill(T::ZERO);
            let q = g.q.head(h);
            let mut position = first;
            while position < n_k {
                let piece = position / piece_len;
                let rows = keys_of(piece).end - position;
                let row = position - first + blind;
                let (own, tail) = std::mem::take(&mut rest).split_at_mut(rows * d_v);
                rest = tail;
                let q = q.sub_rows(row..row + rows);
                targets[piece].push(Target { head: h, first: row, q, position, out: own });
                position += rows;
            }
        }
        let work: Vec<_> = sums.chunks_exact_mut(len).zip(logs).zip(targets).enumerate().collect();
        let guarded: Vec<Vec<(usize, usize)>> = work
            .into_par_iter()
            .with_max_len(1)
            .filter(|(_, (_, targets))| !targets.is_empty())
            .map(|(i, ((sums, log), targets))| {
                self.run_piece(keys_of(i), k, v, State { sums, log }, targets, cx)
            })
            .collect();
        let guarded = guarded.concat();
        self.mend(g, k, &guarded);
        let rows = ((n_q - blind) * heads) as u64;
        let visited = rows * (self.features() + self.block.min(n_k) / 2) as u64;
        Ok(RunInfo {
            keys_visited: visited,
            empty_rows: (blind * heads) as u64,
            fallback_rows: guarded.len() as u64,
            ..RunInfo::default()
        })
    }

    fn run_piece(
        &self,
        keys: Range<usize>,
        k: MatRef<'_, T>,
        v: MatRef<'_, T>,
        mut state: State<'_, T>,
        mut targets: Vec<Target<'_, T>>,
        cx: Context<'_>,
    ) -> Vec<(usize, usize)> {
        let d_v = v.cols();
        let (longest, r) = (self.block.min(keys.len()), self.map.width());
        let mut augmented = cx.scratch.take::<T>(longest * (d_v + 1));
        let sketched = if self.near.is_none() { longest } else { 0 };
        let mut short = cx.scratch.take::<T>(sketched * r);
        let mut logs = cx.scratch.take::<f64>(sketched);
        let mut guarded = Vec::new();
        for start in keys.clone().step_by(self.block) {
            let end = (start + self.block).min(keys.end);
            let (k_own, v_own) = (k.sub_rows(start..end), v.sub_rows(start..end));
            let values = &mut augmented[..(end - start) * (d_v + 1)];
            let spoiled = augment_into(v_own, values);
            let values = MatRef::new(values, end - start, d_v + 1);
            let whole = KeyTile { k: k_own, v: v_own, augmented: values, spoiled: &spoiled };
            if self.near.is_none() {
                let n = end - start;
                self.map.sketch_into(k_own, cx, &mut short[..n * r], &mut logs[..n]);
            }
            for target in &mut targets {
                let mut row = target.position.max(start);
                while row < end {
                    let rows = ROWS.min(end - row);
                    let from = row - target.position;
                    let q = target.q.sub_rows(from..from + rows);
                    let out = &mut target.out[from * d_v..(from + rows) * d_v];
                    // Keys behind the last row of the tile are not read at all.
                    let near = Near { tile: whole.sub(0..row + rows - start), short: &short, logs: &logs };
                    let seen = |i: usize| row - start + i + 1;
                    let rows_guarded = self.attend(q, &state, Some((near, &seen)), out, cx);
                    let first = target.first + from;
                    guarded.extend(rows_guarded.into_iter().map(|i| (target.head, first + i)));
                    row += rows;
                }
            }
            if end < keys.end {
                self.absorb(k_own, v_own, &mut state, cx);
            }
        }
        guarded
    }

    /// Computes guarded rows again, where the guard asks for it.
    fn mend(&self, g: &mut Group<'_, T>, k: MatRef<'_, T>, rows: &[(usize, usize)]) {
        let Some(kernel) = self.guard.kernel() else { return };
        let (n_q, d_v, v, cx) = (g.n_q(), g.d_v(), g.v, g.cx);
        let mended: Vec<Vec<T>> = rows
            .par_iter()
            .map(|&(head, row)| {
                let (seen, q) = (g.visible(row), g.q.head(head).sub_rows(row..row + 1));
                self.exact_row(kernel, q, k.sub_rows(0..seen), v.sub_rows(0..seen), cx)
            })
            .collect();
        for (&(head, row), mended) in rows.iter().zip(&mended) {
            let at = (head * n_q + row) * d_v;
            g.out[at..at + d_v].copy_from_slice(mended);
        }
    }

    /// One row over prepared keys with the kernel itself.
    fn exact_row(
        &self,
        kernel: PowerKernel,
        q: MatRef<'_, T>,
        k: MatRef<'_, T>,
        v: MatRef<'_, T>,
        cx: Context<'_>,
    ) -> Vec<T> {
        let cols = v.cols() + 1;
        let mut prepared = cx.scratch.take::<T>(q.cols());
        self.prepare.apply_into(q, &mut prepared);
        let q = MatRef::new(&prepared, 1, q.cols());
        let (mut acc, mut top, mut out) = (vec![T::ZERO; cols], [T::ZERO], vec![T::ZERO; cols - 1]);
        let mut augmented = cx.scratch.take::<T>(TILE.min(k.rows()) * cols);
        for start in (0..k.rows()).step_by(TILE) {
            let keys = start..(start + TILE).min(k.rows());
            let (k, v) = (k.sub_rows(keys.clone()), v.sub_rows(keys));
            let values = &mut augmented[..v.rows() * cols];
            let spoiled = augment_into(v, values);
            let tile = KeyTile { k, v, augmented: MatRef::new(values, v.rows(), cols), spoiled: &spoiled };
            kernel.add_tile(q, tile, |_| 0..k.rows(), &mut acc, &mut top, cx);
        }
        finish_row(&acc, kernel.log_scale(&acc, top[0]), self.c0, &mut out);
        out
    }

    /// Upper bound on the scratch of [`run`](Self::run).
    pub fn scratch_bytes(
        p: &crate::Problem,
        width: usize,
        form: Form,
        block: usize,
        threads: usize,
        size: usize,
    ) -> usize {
        let (m, block) = (form.features(width), block.min(p.n_k.max(1)));
        let pieces = match p.mask {
            Mask::None => p.n_k.div_ceil(PIECE_KEYS),
            Mask::Causal => p.n_k.div_ceil(block * PIECE_BLOCKS),
        };
        let per_row = 4 * (p.d_v + 2) + 2 * p.d + 10 * width + m + 2 * block + 8;
        let per_block = p.d_v + 2 * p.d + 10 * width + 8;
        let mended = p.d + TILE * (p.d_v + 2);
        let per_thread =
            (ROWS * per_row + block * per_block + mended) * size.max(8) + 2 * GEMM_SCRATCH_BYTES + 4096;
        pieces * m * (p.d_v + 2) * size + 256 + threads * per_thread
    }
}

/// Adds one row of sums to another, each with its logarithmic scale.
fn merge_rows<T: Real>(row: &mut [T], log: &mut f64, other: &[T], other_log: f64) {
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

/// Decoding with a state: keys of the current block are kept as they are and folded into the state when the
/// next block begins.
#[derive(Debug)]
pub struct SketchStream<T: Real, M> {
    map: M,
    form: Form,
    near: Option<PowerKernel>,
    c0: f64,
    block: usize,
    prepare: Prepare,
    guard: Guard,
    d: usize,
    d_v: usize,
    sums: Vec<T>,
    log: f64,
    k: Vec<T>,
    v: Vec<T>,
    /// All keys and values, where rows may have to be computed again.
    kept: [Vec<T>; 2],
}

impl<T: Real, M: HalfSketch<T>> SketchStream<T, M> {
    /// An empty stream of the attention that `like` does, with a map of its own.
    pub fn new(like: &SketchAttention<'_, T>, map: M, d: usize, d_v: usize) -> Self {
        let sums = vec![T::ZERO; like.state_len(d_v)];
        let SketchAttention { form, near, c0, block, prepare, guard, .. } = *like;
        let (log, [k, v], kept) = (f64::NEG_INFINITY, [Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
        Self { map, form, near, c0, block, prepare, guard, d, d_v, sums, log, k, v, kept }
    }
}

impl<T: Real, M: HalfSketch<T> + 'static> GroupStream<T> for SketchStream<T, M> {
    fn push(&mut self, k: MatRef<'_, T>, v: MatRef<'_, T>, cx: Context<'_>) -> Result<()> {
        for (k, v) in k.iter_rows().zip(v.iter_rows()) {
            if self.v.len() == self.block * self.d_v {
                let Self { map, form, near, c0, block, prepare, guard, .. } = self;
                let like = SketchAttention {
                    map,
                    form: *form,
                    near: *near,
                    c0: *c0,
                    block: *block,
                    prepare: *prepare,
                    guard: *guard,
                };
                let mut state = State { sums: &mut self.sums, log: self.log };
                let (k, v) =
                    (MatRef::new(&self.k, like.block, self.d), MatRef::new(&self.v, like.block, self.d_v));
                like.absorb(k, v, &mut state, cx);
                self.log = state.log;
                self.k.clear();
                self.v.clear();
            }
            let start = self.k.len();
            self.k.resize(start + self.d, T::ZERO);
            self.prepare.apply_into(MatRef::new(k, 1, self.d), &mut self.k[start..]);
            self.v.extend_from_slice(v);
            if self.guard.kernel().is_some() {
                self.kept[0].extend_from_slice(&self.k[start..]);
                self.kept[1].extend_from_slice(v);
            }
        }
        Ok(())
    }

    fn attend(
        &mut self,
        q: MatRef<'_, T>,
        _: T,
        out: &mut [T],
        lse: &mut [T],
        cx: Context<'_>,
    ) -> Result<RunInfo> {
        lse.fill(T::NEG_INFINITY);
        let n = self.v.len() / self.d_v;
        if n == 0 {
            out.fill(T::ZERO);
            return Ok(RunInfo { empty_rows: lse.len() as u64, ..RunInfo::default() });
        }
        let like = SketchAttention {
            map: &self.map,
            form: self.form,
            near: self.near,
            c0: self.c0,
            block: self.block,
            prepare: self.prepare,
            guard: self.guard,
        };
        let (k, v) = (MatRef::new(&self.k, n, self.d), MatRef::new(&self.v, n, self.d_v));
        let mut augmented = cx.scratch.take::<T>(n * (self.d_v + 1));
        let spoiled = augment_into(v, &mut augmented);
        let tile = KeyTile { k, v, augmented: MatRef::new(&augmented, n, self.d_v + 1), spoiled: &spoiled };
        let sketched = if self.near.is_none() { n } else { 0 };
        let mut short = cx.scratch.take::<T>(sketched * like.map.width());
        let mut logs = cx.scratch.take::<f64>(sketched);
        if sketched > 0 {
            like.map.sketch_into(k, cx, &mut short, &mut logs);
        }
        let near = Near { tile, short: &short, logs: &logs };
        let state = State { sums: &mut self.sums, log: self.log };
        let guarded = like.attend(q, &state, Some((near, &|_| n)), out, cx);
        if let Some(kernel) = self.guard.kernel() {
            let all = self.kept[1].len() / self.d_v;
            let k = MatRef::new(&self.kept[0], all, self.d);
            let v = MatRef::new(&self.kept[1], all, self.d_v);
            for &i in &guarded {
                let row = like.exact_row(kernel, q.sub_rows(i..i + 1), k, v, cx);
                out[i * self.d_v..(i + 1) * self.d_v].copy_from_slice(&row);
            }
        }
        let visited = (q.rows() * (like.features() + n)) as u64;
        Ok(RunInfo { keys_visited: visited, fallback_rows: guarded.len() as u64, ..RunInfo::default() })
    }

    fn state_bytes(&self) -> usize {
        let kept: usize = self.kept.iter().map(Vec::len).sum();
        (self.sums.len() + self.k.len() + self.v.len() + kept) * size_of::<T>()
    }
}
