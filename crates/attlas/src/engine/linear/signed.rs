//! Sums of features of either sign, from values and one logarithmic scale per token.
//!
//! Keys enter as $e^{e_j - r} f_j$ with one reference $r$ for all features. The denominator
//! $D_i = \langle f_i, z \rangle$ may vanish or be negative. Its size without cancellation is $D_i^+ = \sum_l |f_{il}|
//! \sum_j |\varphi_{jl}|$, and a row is unstable where $D_i \le \delta D_i^+$. The [`DenominatorPolicy`] then decides.
//!
//! Causal chunks are cut as for positive features, here by the scale of tokens.

use super::{Accumulator, BLOCK, Outcome, headroom, product, sub_block};
use crate::group::RowBlock;
use crate::workspace::Context;
use crate::{MatRef, Real};
use attlas_num::kernels::{self, Op, axpy, dot};
use attlas_num::sketch::{Side, SignedFeatures};
use std::fmt::Debug;

crate::choices! {
    /// Treatment of a row whose denominator nearly cancels.
    pub enum DenominatorPolicy {
        /// Divides by it all the same; the row is counted.
        Strict = "strict",
        /// Divides by the fraction δ of the denominator without cancellation instead, if that is larger.
        Clamp = "clamp",
        /// Computes the row by exact attention; streams keep keys and values for it.
        ExactRow = "exact_row",
        /// Writes zeros.
        ZeroRow = "zero_row",
    }
}

/// Running sums of signed features. State: largest scale, reference, $z$, $\sum |\varphi|$, $S$.
#[derive(Debug)]
pub struct Signed<T> {
    map: Box<dyn SignedFeatures<T>>,
    d_v: usize,
    policy: DenominatorPolicy,
    floor: f64,
}

/// The parts of a state.
struct Parts<'a, T> {
    top: &'a mut T,
    reference: &'a mut T,
    z: &'a mut [T],
    size: &'a mut [T],
    s: &'a mut [T],
}

/// Denominator of one row, and its size without cancellation.
struct Denominator<T> {
    value: T,
    size: T,
}

impl<T: Real> Signed<T> {
    /// Sums for one map and values of width `d_v`; a row is unstable if its denominator is at most `floor` times its
    /// size without cancellation.
    pub fn new(
        map: impl SignedFeatures<T> + 'static,
        d_v: usize,
        policy: DenominatorPolicy,
        floor: f64,
    ) -> Self {
        Self { map: Box::new(map), d_v, policy, floor }
    }

    fn features(&self) -> usize {
        self.map.num_features()
    }

    fn parts<'a>(&self, state: &'a mut [T]) -> Parts<'a, T> {
        let m = self.features();
        let [top, reference, rest @ ..] = state else { unreachable!("a state has two scales") };
        let (z, rest) = rest.split_at_mut(m);
        let (size, s) = rest.split_at_mut(m);
        Parts { top, reference, z, size, s }
    }

    /// Moves the reference of a state.
    fn refer_to(&self, p: &mut Parts<'_, T>, new: T) {
        if new != *p.reference {
            let factor = (*p.reference - new).exp();
            [&mut *p.z, &mut *p.size, &mut *p.s].into_iter().for_each(|x| kernels::scale(factor, x));
            *p.reference = new;
        }
    }

    /// Multiplies features of keys by their scales relative to the reference.
    fn weigh_keys(&self, f: &mut [T], scales: &[T], p: &mut Parts<'_, T>) {
        let reference = if *p.reference == T::NEG_INFINITY { T::ZERO } else { *p.reference };
        for (row, &e) in f.chunks_exact_mut(self.features()).zip(scales) {
            kernels::scale((e - reference).exp(), row);
            *p.top = if e > *p.top { e } else { *p.top };
        }
    }

    /// Adds weighted keys to the sums.
    fn add_keys(&self, p: &mut Parts<'_, T>, f: &[T], v: MatRef<'_, T>, cx: Context<'_>) {
        let m = self.features();
        for row in f.chunks_exact(m) {
            axpy(T::ONE, row, p.z);
            add_sizes(p.size, row);
        }
        product(Op::T(MatRef::new(f, v.rows(), m)), Op::N(v), T::ONE, p.s, self.d_v, cx);
    }

    /// Divides a row by its denominator, whose logarithm lacks `scale`. Returns the log-sum-exp and whether the row is
    /// unstable.
    fn finish_row(&self, out: &mut [T], den: Denominator<T>, scale: T) -> (T, bool) {
        let floor = T::from_f64(self.floor) * den.size;
        let unstable = den.value <= floor;
        let value = if unstable && self.policy == DenominatorPolicy::Clamp { floor } else { den.value };
        // Zero features give zero rows; NaN passes through.
        if value == T::ZERO || unstable && self.policy == DenominatorPolicy::ZeroRow {
            out.fill(T::ZERO);
            return (T::NEG_INFINITY, true);
        }
        // Division, not the reciprocal, which overflows for a tiny denominator.
        out.iter_mut().for_each(|o| *o /= value);
        if unstable && out.iter().any(|o| !o.is_finite()) {
            out.fill(T::ZERO);
        }
        // A negative sum has no logarithm; the row is counted.
        let lse = if value < T::ZERO { T::NEG_INFINITY } else { scale + value.ln() };
        (lse, unstable)
    }

    /// Returns how many keys can share a chunk.
    fn chunk_len(&self, f: &[T], scales: &[T], v: MatRef<'_, T>, reference: T) -> usize {
        let limit = reference + headroom();
        let finite = |x: &[T]| x.iter().fold(true, |ok, x| ok & x.is_finite());
        let rows = f.chunks_exact(self.features()).zip(scales).zip(v.iter_rows()).skip(1);
        1 + rows.take_while(|((f, e), v)| **e <= limit && finite(f) && finite(v)).count()
    }
}

/// Computes `size += |row|`.
fn add_sizes<T: Real>(size: &mut [T], row: &[T]) {
    size.iter_mut().zip(row).for_each(|(s, x)| *s += x.abs());
}

impl<T: Real> Accumulator<T> for Signed<T> {
    fn state_len(&self) -> usize {
        self.features() * (self.d_v + 2) + 2
    }

    fn clear(&self, state: &mut [T]) {
        state.fill(T::ZERO);
        let p = self.parts(state);
        (*p.top, *p.reference) = (T::NEG_INFINITY, T::NEG_INFINITY);
    }

    fn absorb(&self, state: &mut [T], k: MatRef<'_, T>, v: MatRef<'_, T>, cx: Context<'_>) {
        debug_assert!(k.rows() <= BLOCK);
        let mut p = self.parts(state);
        let mut f = cx.scratch.take::<T>(k.rows() * self.features());
        let mut scales = cx.scratch.take::<T>(k.rows());
        self.map.signed_features(k, Side::Key, &mut f, &mut scales);
        let top = p.top.max(kernels::max(&scales));
        self.refer_to(&mut p, top);
        self.weigh_keys(&mut f, &scales, &mut p);
        self.add_keys(&mut p, &f, v, cx);
    }

    fn combine(&self, state: &mut [T], other: &[T]) {
        let [other_top, other_reference, sums @ ..] = other else { unreachable!("a state has two scales") };
        let mut p = self.parts(state);
        let top = p.top.max(*other_top);
        *p.top = top;
        self.refer_to(&mut p, top);
        if *other_reference == T::NEG_INFINITY && sums.iter().all(|&x| x == T::ZERO) {
            return;
        }
        let factor = if *other_reference == top { T::ONE } else { (*other_reference - top).exp() };
        axpy(factor, sums, &mut state[2..]);
    }

    fn read(&self, state: &[T], _: usize, rows: RowBlock<'_, T>, cx: Context<'_>, outcome: &mut Outcome) {
        let (m, n, d_v) = (self.features(), rows.lse.len(), self.d_v);
        let (reference, sums) = (state[1], &state[2..]);
        let (z, rest) = sums.split_at(m);
        let (size, s) = rest.split_at(m);
        let mut f = cx.scratch.take::<T>(n * m);
        let mut scales = cx.scratch.take::<T>(n);
        self.map.signed_features(rows.q, Side::Query, &mut f, &mut scales);
        product(Op::N(MatRef::new(&f, n, m)), Op::N(MatRef::new(s, m, d_v)), T::ZERO, rows.out, d_v, cx);
        for (i, f) in f.chunks_exact_mut(m).enumerate() {
            let value = dot(f, z);
            f.iter_mut().for_each(|x| *x = x.abs());
            let den = Denominator { value, size: dot(f, size) };
            let out = &mut rows.out[i * d_v..(i + 1) * d_v];
            let (lse, unstable) = self.finish_row(out, den, scales[i] + reference);
            rows.lse[i] = lse;
            if unstable {
                outcome.unstable.push((rows.head, rows.first + i));
            }
        }
    }

    fn chunk(
        &self,
        state: &mut [T],
        _: usize,
        k: MatRef<'_, T>,
        v: MatRef<'_, T>,
        heads: &mut [RowBlock<'_, T>],
        cx: Context<'_>,
        outcome: &mut Outcome,
    ) {
        let m = self.features();
        let mut keys = cx.scratch.take::<T>(k.rows() * m);
        let mut scales = cx.scratch.take::<T>(k.rows());
        let mut sizes = cx.scratch.take::<T>(k.rows() * m);
        self.map.signed_features(k, Side::Key, &mut keys, &mut scales);
        let mut start = 0;
        while start < k.rows() {
            let mut p = self.parts(state);
            let first = scales[start];
            let reference = if first > *p.top { first } else { *p.top };
            self.refer_to(&mut p, reference);
            let (f, e) = (&mut keys[start * m..], &scales[start..]);
            let n = self.chunk_len(f, e, v.sub_rows(start..v.rows()), reference);
            let f = &mut f[..n * m];
            self.weigh_keys(f, &e[..n], &mut p);
            // Row i: the sizes of all keys it sees.
            let mut total = &*p.size;
            for (row, sizes) in f.chunks_exact(m).zip(sizes.chunks_exact_mut(m)) {
                sizes.copy_from_slice(total);
                add_sizes(sizes, row);
                total = sizes;
            }
            let values = v.sub_rows(start..start + n);
            for head in heads.iter_mut() {
                self.chunk_rows(&p, f, values, &sizes, sub_block(head, start..start + n), cx, outcome);
            }
            self.add_keys(&mut p, f, values, cx);
            start += n;
        }
    }

    fn recomputes_rows(&self) -> bool {
        self.policy == DenominatorPolicy::ExactRow
    }
}

impl<T: Real> Signed<T> {
    /// Computes the rows of one head: the contribution of the state, and the triangular product over the chunk itself.
    #[allow(clippy::too_many_arguments)]
    fn chunk_rows(
        &self,
        p: &Parts<'_, T>,
        keys: &[T],
        values: MatRef<'_, T>,
        sizes: &[T],
        rows: RowBlock<'_, T>,
        cx: Context<'_>,
        outcome: &mut Outcome,
    ) {
        let (m, n, d_v) = (self.features(), rows.lse.len(), self.d_v);
        let mut f = cx.scratch.take::<T>(n * m);
        let mut scores = cx.scratch.take::<T>(n * n);
        let mut scales = cx.scratch.take::<T>(n);
        self.map.signed_features(rows.q, Side::Query, &mut f, &mut scales);
        let queries = Op::N(MatRef::new(&f, n, m));
        product(queries, Op::N(MatRef::new(&*p.s, m, d_v)), T::ZERO, rows.out, d_v, cx);
        product(queries, Op::T(MatRef::new(keys, n, m)), T::ZERO, &mut scores, n, cx);
        // Hidden keys are finite, so zeros hide them.
        scores.chunks_exact_mut(n).enumerate().for_each(|(i, row)| row[i + 1..].fill(T::ZERO));
        product(Op::N(MatRef::new(&scores, n, n)), Op::N(values), T::ONE, rows.out, d_v, cx);
        for (i, f) in f.chunks_exact_mut(m).enumerate() {
            let value = dot(f, p.z) + kernels::sum(&scores[i * n..i * n + i + 1]);
            f.iter_mut().for_each(|x| *x = x.abs());
            let den = Denominator { value, size: dot(f, &sizes[i * m..(i + 1) * m]) };
            let out = &mut rows.out[i * d_v..(i + 1) * d_v];
            let (lse, unstable) = self.finish_row(out, den, scales[i] + *p.reference);
            rows.lse[i] = lse;
            if unstable {
                outcome.unstable.push((rows.head, rows.first + i));
            }
        }
    }
}
