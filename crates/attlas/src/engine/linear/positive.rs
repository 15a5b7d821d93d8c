//! Sums of positive features, from their logarithms.
//!
//! The product $\varphi_{q,l}(q_i)\,\varphi_{k,l}(k_j)$ does not change when $b_{il} = \log \varphi_{q,l}(q_i)$
//! grows by $s_l - c_i$ and $a_{jl} = \log \varphi_{k,l}(k_j)$ falls by $s_l$, up to the factor $e^{-c_i}$ of the
//! whole row. With $s_l = \max_j a_{jl}$ and $c_i = \max_l (b_{il} + s_l)$ every factor is at most 1 and the
//! denominator at least 1: it can never vanish, and no $\varepsilon$ is needed. A shift per key would re-weight keys.
//!
//! In a causal chunk the reference is $\rho_l = \max(s_l, a_{1l})$ with the chunk's first key, which all of its rows
//! see; the denominator is again at least 1, and later keys of the chunk may exceed the reference by
//! [`headroom`] before a new chunk begins.

use super::{Accumulator, BLOCK, Outcome, columns, headroom, product, sub_block};
use crate::gradient::GroupBackward;
use crate::group::RowBlock;
use crate::workspace::Context;
use crate::{MatRef, Real};
use attlas_num::kernels::{self, Op, axpy, dot, exp_in_place};
use attlas_num::sketch::{LogFeatures, Side};
use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

/// Constant added to every denominator, in units of the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DenominatorEps {
    /// The number.
    pub value: f64,
    /// Multiplies `value` by the number of keys that the row sees.
    pub per_key: bool,
}

/// Running sums of positive features. State: largest log-features, references, $z$, $S$.
#[derive(Debug)]
pub struct Positive<T> {
    keys: Arc<dyn LogFeatures<T>>,
    /// Maps of queries, each for some columns of the values and with its own denominator.
    queries: Vec<(Arc<dyn LogFeatures<T>>, Range<usize>)>,
    d_v: usize,
    eps: DenominatorEps,
}

/// The parts of a state.
struct Parts<'a, T> {
    top: &'a mut [T],
    reference: &'a mut [T],
    z: &'a mut [T],
    s: &'a mut [T],
}

impl<T: Real> Positive<T> {
    /// Sums for one map and values of width `d_v`.
    pub fn new(map: impl LogFeatures<T> + 'static, d_v: usize) -> Self {
        let keys: Arc<dyn LogFeatures<T>> = Arc::new(map);
        Self { queries: vec![(keys.clone(), 0..d_v)], keys, d_v, eps: DenominatorEps::default() }
    }

    /// Sums for one map of keys and several of queries, each for some columns of the values.
    pub fn with_queries(
        keys: Arc<dyn LogFeatures<T>>,
        queries: Vec<(Arc<dyn LogFeatures<T>>, Range<usize>)>,
        d_v: usize,
    ) -> Self {
        Self { keys, queries, d_v, eps: DenominatorEps::default() }
    }

    /// Adds `eps` to the denominators.
    #[must_use]
    pub fn with_eps(self, eps: DenominatorEps) -> Self {
        Self { eps, ..self }
    }

    fn features(&self) -> usize {
        self.keys.num_features()
    }

    fn parts<'a>(&self, state: &'a mut [T]) -> Parts<'a, T> {
        let m = self.features();
        let (top, rest) = state.split_at_mut(m);
        let (reference, rest) = rest.split_at_mut(m);
        let (z, s) = rest.split_at_mut(m);
        Parts { top, reference, z, s }
    }

    /// Moves the references of a state to `rho`.
    fn refer_to(&self, p: &mut Parts<'_, T>, rho: impl Fn(usize, T) -> T) {
        for (l, row) in p.s.chunks_exact_mut(self.d_v).enumerate() {
            let new = rho(l, p.top[l]);
            if new != p.reference[l] {
                let factor = (p.reference[l] - new).exp();
                kernels::scale(factor, row);
                p.z[l] *= factor;
                p.reference[l] = new;
            }
        }
    }

    /// Raises the maxima to those of some log-features; NaN raises nothing.
    fn raise(&self, top: &mut [T], a: &[T]) {
        for row in a.chunks_exact(top.len()) {
            top.iter_mut().zip(row).for_each(|(t, &x)| *t = if x > *t { x } else { *t });
        }
    }

    /// Turns log-features of keys into features relative to the references.
    fn weigh_keys(&self, a: &mut [T], reference: &[T], shift: &mut [T]) {
        // A feature that no key has had is zero, whatever is subtracted.
        let finite = |&r: &T| if r == T::NEG_INFINITY { T::ZERO } else { r };
        shift.iter_mut().zip(reference).for_each(|(s, r)| *s = finite(r));
        for row in a.chunks_exact_mut(reference.len()) {
            axpy(-T::ONE, shift, row);
            exp_in_place(row);
        }
    }

    /// Adds weighted keys to $z$ and $S$.
    fn add_keys(&self, p: &mut Parts<'_, T>, a: &[T], v: MatRef<'_, T>, cx: Context<'_>) {
        let m = self.features();
        a.chunks_exact(m).for_each(|row| axpy(T::ONE, row, p.z));
        product(Op::T(MatRef::new(a, v.rows(), m)), Op::N(v), T::ONE, p.s, self.d_v, cx);
    }

    /// Turns log-features of queries into weights of the features, at most 1, and one shift per row.
    fn weigh_queries(&self, w: &mut [T], reference: &[T], shift: &mut [T]) {
        for (row, shift) in w.chunks_exact_mut(reference.len()).zip(shift.iter_mut()) {
            axpy(T::ONE, reference, row);
            let top = kernels::max(row);
            *shift = top;
            if top == T::NEG_INFINITY && row.iter().any(|w| w.is_nan()) {
                *shift = T::NAN;
            }
            kernels::exp_sum(row, if top == T::NEG_INFINITY { T::ZERO } else { top });
        }
    }

    /// Computes the features of queries in one stream, relative to the references of a state and to their own largest.
    fn query_features(
        &self,
        (map, _): &(Arc<dyn LogFeatures<T>>, Range<usize>),
        state: &[T],
        q: MatRef<'_, T>,
        w: &mut [T],
        shift: &mut [T],
    ) {
        let m = self.features();
        map.log_features(q, Side::Query, w);
        self.weigh_queries(w, &state[m..2 * m], shift);
    }

    /// Computes the features of [`sums`](Self::sums) alone.
    pub fn weights(&self, state: &[T], q: MatRef<'_, T>, w: &mut [T], shift: &mut [T]) {
        self.query_features(&self.queries[0], state, q, w, shift);
    }

    /// Computes the sums of some rows over a finished state, before any division: their features $w_{il} = e^{b_{il} +
    /// s_l - c_i}$, the $c_i$, and the sums `[num, den]` over all keys in units of $e^{c_i}$. For one map of queries
    /// and no constant in denominators.
    pub fn sums(
        &self,
        state: &[T],
        q: MatRef<'_, T>,
        w: &mut [T],
        shift: &mut [T],
        sums: &mut [T],
        cx: Context<'_>,
    ) {
        let (m, d_v) = (self.features(), self.d_v);
        self.weights(state, q, w, shift);
        let (z, s) = state[2 * m..].split_at(m);
        let (weights, s) = (Op::N(MatRef::new(w, q.rows(), m)), Op::N(MatRef::new(s, m, d_v)));
        product(weights, s, T::ZERO, sums, d_v + 1, cx);
        w.chunks_exact(m).zip(sums.chunks_exact_mut(d_v + 1)).for_each(|(w, sums)| sums[d_v] = dot(w, z));
    }

    /// Computes the features $e^{a_{jl} - s_l}$ of keys in a finished state: their products with the `w` of
    /// [`sums`](Self::sums) are the kernel in units of $e^{c_i}$.
    pub fn features_of_held(&self, state: &[T], k: MatRef<'_, T>, a: &mut [T], cx: Context<'_>) {
        let m = self.features();
        self.keys.log_features(k, Side::Key, a);
        let mut shift = cx.scratch.take::<T>(m);
        self.weigh_keys(a, &state[m..2 * m], &mut shift);
    }

    /// Divides a row by its denominator, which is relative to $e^{\text{shift}}$.
    fn finish_row(&self, out: &mut [T], shift: T, den: T, seen: usize) -> Option<T> {
        if shift == T::NEG_INFINITY {
            out.fill(T::ZERO);
            return None;
        }
        let eps = self.eps.value * if self.eps.per_key { seen as f64 } else { 1.0 };
        let mut lse = shift + den.ln();
        let mut factor = T::ONE / den;
        if eps > 0.0 {
            // ln(e^lse + eps), arranged so that neither term overflows.
            let (a, b) = (lse.to_f64(), eps.ln());
            let total = a.max(b) + (-(a - b).abs()).exp().ln_1p();
            (lse, factor) = (T::from_f64(total), T::from_f64((shift.to_f64() - total).exp()));
        }
        kernels::scale(factor, out);
        Some(lse)
    }

    /// Returns the sums $z$ and $S$ of a state, in units of its references.
    pub(super) fn sums_of<'a>(&self, state: &'a [T]) -> (&'a [T], &'a [T]) {
        state[2 * self.features()..].split_at(self.features())
    }

    /// Returns how many keys, counted from the first, can share a chunk: up to the first one that exceeds a reference
    /// by too much or is not finite. The first key may have any value.
    fn chunk_len(&self, a: &[T], v: MatRef<'_, T>, reference: &[T], limit: &mut [T]) -> usize {
        limit.iter_mut().zip(reference).for_each(|(l, &r)| *l = r + headroom());
        let rows = a.chunks_exact(reference.len()).zip(v.iter_rows()).skip(1);
        // A comparison with NaN is false; there is no early exit, so whole registers are compared.
        let fits = |(a, v): (&[T], &[T])| {
            let small = a.iter().zip(&*limit).fold(true, |ok, (a, l)| ok & (a <= l));
            small && v.iter().fold(true, |ok, v| ok & v.is_finite())
        };
        1 + rows.take_while(|&row| fits(row)).count()
    }
}

impl<T: Real> Accumulator<T> for Positive<T> {
    fn backward(&self, g: GroupBackward<'_, T>) -> bool {
        let one_map = matches!(&self.queries[..], [(map, _)] if Arc::ptr_eq(map, &self.keys));
        let known = one_map && self.keys.has_gradient();
        if known {
            super::backward::backward(self, &*self.keys, g);
        }
        known
    }

    fn state_len(&self) -> usize {
        self.features() * (self.d_v + 3)
    }

    fn clear(&self, state: &mut [T]) {
        let Parts { top, reference, z, s } = self.parts(state);
        top.fill(T::NEG_INFINITY);
        reference.fill(T::NEG_INFINITY);
        z.fill(T::ZERO);
        s.fill(T::ZERO);
    }

    fn absorb(&self, state: &mut [T], k: MatRef<'_, T>, v: MatRef<'_, T>, cx: Context<'_>) {
        debug_assert!(k.rows() <= BLOCK);
        let m = self.features();
        let mut p = self.parts(state);
        let mut a = cx.scratch.take::<T>(k.rows() * m);
        let mut shift = cx.scratch.take::<T>(m);
        self.keys.log_features(k, Side::Key, &mut a);
        self.raise(p.top, &a);
        self.refer_to(&mut p, |_, top| top);
        self.weigh_keys(&mut a, p.reference, &mut shift);
        self.add_keys(&mut p, &a, v, cx);
    }

    fn combine(&self, state: &mut [T], other: &[T]) {
        let m = self.features();
        let (other_top, rest) = other.split_at(m);
        let (other_reference, rest) = rest.split_at(m);
        let (other_z, other_s) = rest.split_at(m);
        let mut p = self.parts(state);
        p.top.iter_mut().zip(other_top).for_each(|(t, &x)| *t = t.max(x));
        self.refer_to(&mut p, |_, top| top);
        for (l, row) in p.s.chunks_exact_mut(self.d_v).enumerate() {
            if other_reference[l] == T::NEG_INFINITY && other_z[l] == T::ZERO {
                continue;
            }
            let factor = if other_reference[l] == p.reference[l] {
                T::ONE
            } else {
                (other_reference[l] - p.reference[l]).exp()
            };
            axpy(factor, &other_s[l * self.d_v..(l + 1) * self.d_v], row);
            p.z[l] = other_z[l].mul_add(factor, p.z[l]);
        }
    }

    fn read(&self, state: &[T], seen: usize, rows: RowBlock<'_, T>, cx: Context<'_>, outcome: &mut Outcome) {
        let (m, n, d_v) = (self.features(), rows.lse.len(), self.d_v);
        let mut w = cx.scratch.take::<T>(n * m);
        let mut shift = cx.scratch.take::<T>(n);
        for stream in &self.queries {
            let cols = &stream.1;
            self.query_features(stream, state, rows.q, &mut w, &mut shift);
            let (z, s) = state[2 * m..].split_at(m);
            let s = columns(MatRef::new(s, m, d_v), cols);
            product(Op::N(MatRef::new(&w, n, m)), Op::N(s), T::ZERO, &mut rows.out[cols.start..], d_v, cx);
            for (i, w) in w.chunks_exact(m).enumerate() {
                let out = &mut rows.out[i * d_v + cols.start..i * d_v + cols.end];
                let lse = self.finish_row(out, shift[i], dot(w, z), seen);
                rows.lse[i] = lse.unwrap_or(T::NEG_INFINITY);
                if lse.is_none() {
                    outcome.unstable.push((rows.head, rows.first + i));
                }
            }
        }
    }

    fn chunk(
        &self,
        state: &mut [T],
        seen: usize,
        k: MatRef<'_, T>,
        v: MatRef<'_, T>,
        heads: &mut [RowBlock<'_, T>],
        cx: Context<'_>,
        outcome: &mut Outcome,
    ) {
        let m = self.features();
        let mut a = cx.scratch.take::<T>(k.rows() * m);
        let mut w = cx.scratch.take::<T>(k.rows() * m);
        let mut scores = cx.scratch.take::<T>(k.rows() * k.rows());
        let mut spare = cx.scratch.take::<T>(m.max(k.rows()));
        self.keys.log_features(k, Side::Key, &mut a);
        let mut start = 0;
        while start < k.rows() {
            let mut p = self.parts(state);
            let rest = &mut a[start * m..];
            // Written so that a NaN in the first key leaves the reference unchanged.
            self.refer_to(&mut p, |l, top| if rest[l] > top { rest[l] } else { top });
            let n = self.chunk_len(rest, v.sub_rows(start..v.rows()), p.reference, &mut spare[..m]);
            let keys = &mut rest[..n * m];
            self.raise(p.top, keys);
            self.weigh_keys(keys, p.reference, &mut spare[..m]);
            let values = v.sub_rows(start..start + n);
            for head in heads.iter_mut() {
                let rows = sub_block(head, start..start + n);
                let sub = ChunkRows { keys, values, seen: seen + start, w: &mut w, scores: &mut scores };
                self.chunk_rows(&p, sub, rows, &mut spare, cx, outcome);
            }
            self.add_keys(&mut p, keys, values, cx);
            start += n;
        }
    }
}

/// Data of a chunk that the rows of one head need.
struct ChunkRows<'a, T> {
    keys: &'a [T],
    values: MatRef<'a, T>,
    seen: usize,
    w: &'a mut [T],
    scores: &'a mut [T],
}

impl<T: Real> Positive<T> {
    /// Computes the rows of one head: the contribution of the state, and the triangular product over the chunk itself.
    fn chunk_rows(
        &self,
        p: &Parts<'_, T>,
        chunk: ChunkRows<'_, T>,
        rows: RowBlock<'_, T>,
        shift: &mut [T],
        cx: Context<'_>,
        outcome: &mut Outcome,
    ) {
        let (m, n, d_v) = (self.features(), rows.lse.len(), self.d_v);
        let (w, scores) = (&mut chunk.w[..n * m], &mut chunk.scores[..n * n]);
        for (map, cols) in &self.queries {
            map.log_features(rows.q, Side::Query, w);
            self.weigh_queries(w, p.reference, &mut shift[..n]);
            let weights = Op::N(MatRef::new(&*w, n, m));
            let out = &mut rows.out[cols.start..];
            let s = columns(MatRef::new(&*p.s, m, d_v), cols);
            product(weights, Op::N(s), T::ZERO, out, d_v, cx);
            product(weights, Op::T(MatRef::new(chunk.keys, n, m)), T::ZERO, scores, n, cx);
            // Hidden keys are finite, so zeros hide them.
            scores.chunks_exact_mut(n).enumerate().for_each(|(i, row)| row[i + 1..].fill(T::ZERO));
            let values = columns(chunk.values, cols);
            product(Op::N(MatRef::new(&*scores, n, n)), Op::N(values), T::ONE, out, d_v, cx);
            for (i, w) in w.chunks_exact(m).enumerate() {
                let den = dot(w, p.z) + kernels::sum(&scores[i * n..i * n + i + 1]);
                let out = &mut rows.out[i * d_v + cols.start..i * d_v + cols.end];
                let lse = self.finish_row(out, shift[i], den, chunk.seen + i + 1);
                rows.lse[i] = lse.unwrap_or(T::NEG_INFINITY);
                if lse.is_none() {
                    outcome.unstable.push((rows.head, rows.first + i));
                }
            }
        }
    }
}
