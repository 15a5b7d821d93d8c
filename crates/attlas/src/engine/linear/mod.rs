//! Linear attention: everything that computes $o_i = \varphi_q(q_i)^\top S / \varphi_q(q_i)^\top z$ with
//! $S = \sum_j \varphi_k(k_j) v_j^\top$, $z = \sum_j \varphi_k(k_j)$, for any feature map.
//!
//! A method brings a [`Source`] of feature maps, and [`Linear`] makes a plan of it. An [`Accumulator`] holds the sums
//! and keeps them from overflowing: [`Positive`] for maps with positive features, [`Signed`] for the others. This file
//! holds the schedule, which is the same for both.
//!
//! **Without a mask**, keys are cut into pieces of fixed length whose states are computed in parallel, block by
//! block, and combined in order; then query rows read the state in parallel.
//!
//! **Causal**, tokens are cut into at most `MAX_PIECES` pieces, a number that depends on the number of keys
//! alone. Phase one computes the state of every piece in parallel, phase two the exclusive prefixes, phase three
//! the rows of every piece in parallel, in chunks of `CHUNK` tokens: a row adds the contribution of the state, for
//! earlier chunks, and a triangular product over its own chunk. No bit of a row depends on a later token: a chunk's
//! references come from the keys that its first row sees, and a chunk ends before the first key that would need another
//! reference or is not finite.
//!
//! Both orders are fixed by the sizes, so threads cannot change a bit; keys are read once for all query heads.

mod backward;
mod directions;
mod plan;
mod positive;
mod signed;
#[cfg(test)]
pub(crate) mod testing;

pub use directions::Directions;
pub use plan::{ErrorModel, Linear, PairVariance, Prepared, Shape, Source, run_predicted};
pub use positive::{DenominatorEps, Positive};
pub use signed::{DenominatorPolicy, Signed};

use crate::engine::exact_rows;
use crate::gradient::GroupBackward;
use crate::group::{Group, GroupStream, RowBlock};
use crate::workspace::Context;
use crate::{Error, Mask, MatRef, Real, Result, RunInfo};
use attlas_num::kernels::{Band, Op, gemm};
use attlas_num::par::*;
use attlas_num::scratch::Buf;
use std::fmt::Debug;
use std::ops::Range;

/// Keys of one piece without a mask.
const PIECE: usize = 4096;
/// Keys whose features are computed together.
const BLOCK: usize = 256;
/// Query rows that read a finished state together.
const ROWS: usize = 128;
/// Tokens of a causal chunk.
const CHUNK: usize = 64;
/// Maximum pieces of a causal sequence.
const MAX_PIECES: usize = 32;
/// Minimum tokens of a causal piece.
const MIN_PIECE: usize = 1024;

/// A running sum over keys, with its evaluation for query rows. The state is a plain slice of `state_len` elements,
/// which can be copied, stored and combined.
pub trait Accumulator<T: Real>: Debug + Send + Sync {
    /// Returns the number of elements of a state.
    fn state_len(&self) -> usize;

    /// Sets the state to that of no keys.
    fn clear(&self, state: &mut [T]);

    /// Adds at most `BLOCK` keys and their values.
    fn absorb(&self, state: &mut [T], k: MatRef<'_, T>, v: MatRef<'_, T>, cx: Context<'_>);

    /// Adds the keys of another state.
    fn combine(&self, state: &mut [T], other: &[T]);

    /// Computes rows that see all `seen` keys of the state and no other key.
    fn read(&self, state: &[T], seen: usize, rows: RowBlock<'_, T>, cx: Context<'_>, outcome: &mut Outcome);

    /// Computes one row for every key of `k` and each head, row `i` seeing the `seen` keys of the state and keys
    /// `0..=i`; then adds the keys.
    #[allow(clippy::too_many_arguments)]
    fn chunk(
        &self,
        state: &mut [T],
        seen: usize,
        k: MatRef<'_, T>,
        v: MatRef<'_, T>,
        heads: &mut [RowBlock<'_, T>],
        cx: Context<'_>,
        outcome: &mut Outcome,
    );

    /// Returns true if unstable rows must be recomputed by exact attention.
    fn recomputes_rows(&self) -> bool {
        false
    }

    /// Writes the gradients of a group that has keys; returns false if it cannot.
    fn backward(&self, g: GroupBackward<'_, T>) -> bool {
        let _ = g;
        false
    }
}

/// Rows that need special treatment after a run.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Rows whose denominator vanished or cannot be trusted: head and row.
    pub unstable: Vec<(usize, usize)>,
}

/// Runs an accumulator over a group that has keys and queries.
fn run_linear<T: Real>(acc: &dyn Accumulator<T>, g: &mut Group<'_, T>) -> Result<RunInfo> {
    let (outcome, empty) = match g.mask {
        Mask::None => (run_plain(acc, g)?, 0),
        Mask::Causal => {
            (run_causal(acc, g, Initial::default(), 0), g.n_q().saturating_sub(g.n_k()) * g.q.heads())
        }
    };
    if acc.recomputes_rows() {
        mend_rows(g, &outcome.unstable);
    }
    let fallback_rows = outcome.unstable.len() as u64;
    Ok(RunInfo { empty_rows: empty as u64, fallback_rows, ..RunInfo::default() })
}

fn run_plain<T: Real>(acc: &dyn Accumulator<T>, g: &mut Group<'_, T>) -> Result<Outcome> {
    let (n_k, cx) = (g.n_k(), g.cx);
    let states = whole_state(acc, g.k, g.v, cx);
    let state = &states[..acc.state_len()];
    let parts = g.par_row_blocks(ROWS, |rows| {
        let mut outcome = Outcome::default();
        acc.read(state, n_k, rows, cx, &mut outcome);
        Ok(outcome.unstable)
    })?;
    Ok(Outcome { unstable: parts.concat() })
}

/// Returns the state of all keys as the first of the returned states: pieces in parallel, combined in order.
pub fn whole_state<'a, T: Real>(
    acc: &dyn Accumulator<T>,
    k: MatRef<'_, T>,
    v: MatRef<'_, T>,
    cx: Context<'a>,
) -> Buf<'a, T> {
    let (n_k, len) = (k.rows(), acc.state_len());
    let mut states = cx.scratch.take::<T>(n_k.div_ceil(PIECE).max(1) * len);
    states.par_chunks_mut(len).with_max_len(1).enumerate().for_each(|(p, state)| {
        absorb_range(acc, state, k, v, p * PIECE..((p + 1) * PIECE).min(n_k), cx);
    });
    let (state, others) = states.split_at_mut(len);
    others.chunks_exact(len).for_each(|other| acc.combine(state, other));
    states
}

/// Adds some keys to an empty state.
fn absorb_range<T: Real>(
    acc: &dyn Accumulator<T>,
    state: &mut [T],
    k: MatRef<'_, T>,
    v: MatRef<'_, T>,
    keys: Range<usize>,
    cx: Context<'_>,
) {
    acc.clear(state);
    for start in keys.clone().step_by(BLOCK) {
        let block = start..(start + BLOCK).min(keys.end);
        acc.absorb(state, k.sub_rows(block.clone()), v.sub_rows(block), cx);
    }
}

/// Tokens of a causal piece.
pub fn causal_piece(n_k: usize) -> usize {
    n_k.div_ceil(MAX_PIECES).next_multiple_of(CHUNK).max(MIN_PIECE)
}

/// Runs a causal group; `initial` may hold the state of `before` keys that precede the group's.
fn run_causal<T: Real>(
    acc: &dyn Accumulator<T>,
    g: &mut Group<'_, T>,
    initial: Initial<'_, T>,
    before: usize,
) -> Outcome {
    let (k, v, cx) = (g.k, g.v, g.cx);
    let parts = causal_pieces(
        acc,
        g,
        causal_piece(k.rows()),
        initial,
        |start| start,
        |state, piece| run_piece(acc, state, piece, before, k, v, cx).unstable,
    );
    Outcome { unstable: parts.concat() }
}

/// Some tokens of a causal group and the rows at these tokens, grouped by head.
#[derive(Debug)]
pub struct Piece<'a, T> {
    /// The tokens.
    pub tokens: Range<usize>,
    /// The first token that has a query, or the end of the tokens if none has.
    pub first: usize,
    /// The rows.
    pub rows: Vec<RowBlock<'a, T>>,
}

/// States known before a causal group is run.
#[derive(Clone, Copy, Debug)]
pub struct Initial<'a, T> {
    /// The state of the keys before those of the group.
    before: Option<&'a [T]>,
    /// The states of all pieces but the last, each of its own keys alone, if already computed.
    pieces: Option<&'a [T]>,
}

impl<T> Default for Initial<'_, T> {
    fn default() -> Self {
        Self { before: None, pieces: None }
    }
}

/// Cuts a causal group into pieces of `piece` tokens and runs `work` on each in parallel. Each piece has its own state
/// of the keys before the group and those before `cached(start)`, where `start` is the piece's first token and
/// `cached(start) ≤ start` does not decrease. Rows that see no key are written here.
pub fn causal_pieces<T: Real, R: Send>(
    acc: &dyn Accumulator<T>,
    g: &mut Group<'_, T>,
    piece: usize,
    initial: Initial<'_, T>,
    cached: impl Fn(usize) -> usize + Sync,
    work: impl Fn(&mut [T], Piece<'_, T>) -> R + Sync,
) -> Vec<R> {
    let (k, v, n_q, n_k, d_v, cx) = (g.k, g.v, g.n_q(), g.n_k(), g.d_v(), g.cx);
    let (len, pieces) = (acc.state_len(), n_k.div_ceil(piece));
    let tokens = |p: usize| p * piece..((p + 1) * piece).min(n_k);
    // The first token that has a query, and the first query that sees a token.
    let (first, unseen_rows) = (n_k.saturating_sub(n_q), n_q.saturating_sub(n_k));

    // Slot p first holds the keys that piece p has beyond the piece before, then the running sum.
    let mut states = cx.scratch.take::<T>(pieces * len);
    states.par_chunks_mut(len).with_max_len(1).enumerate().for_each(|(p, state)| {
        let before = if p == 0 { 0 } else { cached((p - 1) * piece) };
        match initial.pieces.filter(|_| p > 0) {
            Some(known) => state.copy_from_slice(&known[(p - 1) * len..p * len]),
            None => absorb_range(acc, state, k, v, before..cached(p * piece), cx),
        }
    });
    if let (Some(before), true) = (initial.before, pieces > 0) {
        acc.combine(&mut states[..len], before);
    }
    for p in 1..pieces {
        let (before, state) = states[(p - 1) * len..].split_at_mut(len);
        acc.combine(&mut state[..len], before);
    }

    let mut rows: Vec<Vec<RowBlock<'_, T>>> = (0..pieces).map(|_| Vec::new()).collect();
    for (head, (mut out, mut lse)) in g.out.chunks_mut(n_q * d_v).zip(g.lse.chunks_mut(n_q)).enumerate() {
        let mut done = 0;
        let mut take = |count: usize| {
            let (o, rest) = std::mem::take(&mut out).split_at_mut(count * d_v);
            let (l, lse_rest) = std::mem::take(&mut lse).split_at_mut(count);
            (out, lse) = (rest, lse_rest);
            done += count;
            (done - count, o, l)
        };
        let (_, o, l) = take(unseen_rows);
        o.fill(T::ZERO);
        l.fill(T::NEG_INFINITY);
        for (p, rows) in rows.iter_mut().enumerate() {
            let Range { start, end } = tokens(p);
            let (first, out, lse) = take(end.saturating_sub(start.max(first)));
            let q = g.q.head(head).sub_rows(first..first + lse.len());
            rows.push(RowBlock { head, first, q, out, lse });
        }
    }
    states
        .par_chunks_mut(len)
        .zip(rows)
        .with_max_len(1)
        .enumerate()
        .map(|(p, (state, rows))| {
            let tokens = tokens(p);
            work(state, Piece { first: first.clamp(tokens.start, tokens.end), tokens, rows })
        })
        .collect()
}

/// Computes the rows of one piece; `state` holds all tokens before it, including `before` that precede the group.
fn run_piece<T: Real>(
    acc: &dyn Accumulator<T>,
    state: &mut [T],
    piece: Piece<'_, T>,
    before: usize,
    k: MatRef<'_, T>,
    v: MatRef<'_, T>,
    cx: Context<'_>,
) -> Outcome {
    let Piece { tokens, first, mut rows } = piece;
    let mut outcome = Outcome::default();
    if first == tokens.end {
        return outcome;
    }
    for start in tokens.clone().step_by(CHUNK) {
        let end = (start + CHUNK).min(tokens.end);
        let split = first.clamp(start, end);
        if split > start {
            acc.absorb(state, k.sub_rows(start..split), v.sub_rows(start..split), cx);
        }
        if end > split {
            let mut heads: Vec<RowBlock<'_, T>> =
                rows.iter_mut().map(|r| sub_block(r, split - first..end - first)).collect();
            let (k, v) = (k.sub_rows(split..end), v.sub_rows(split..end));
            acc.chunk(state, before + split, k, v, &mut heads, cx, &mut outcome);
        }
    }
    outcome
}

/// Some rows of a block.
pub fn sub_block<'b, T: Real>(block: &'b mut RowBlock<'_, T>, rows: Range<usize>) -> RowBlock<'b, T> {
    let d_v = block.out.len() / block.lse.len().max(1);
    RowBlock {
        head: block.head,
        first: block.first + rows.start,
        q: block.q.sub_rows(rows.clone()),
        out: &mut block.out[rows.start * d_v..rows.end * d_v],
        lse: &mut block.lse[rows],
    }
}

/// Recomputes single rows by exact attention.
fn mend_rows<T: Real>(g: &mut Group<'_, T>, unstable: &[(usize, usize)]) {
    let (k, v, scale, cx, n_q, d_v) = (g.k, g.v, g.scale, g.cx, g.n_q(), g.d_v());
    let recomputed: Vec<(Vec<T>, [T; 1])> = unstable
        .par_iter()
        .map(|&(head, row)| {
            let (q, seen) = (g.q.head(head).sub_rows(row..row + 1), g.visible(row));
            let (k, v) = (k.sub_rows(0..seen), v.sub_rows(0..seen));
            let (mut out, mut lse) = (vec![T::ZERO; d_v], [T::ZERO]);
            exact_rows(q, k, v, None, scale, Band::ALL, cx, &mut out, &mut lse);
            (out, lse)
        })
        .collect();
    for (&(head, row), (out, lse)) in unstable.iter().zip(&recomputed) {
        let at = head * n_q + row;
        g.out[at * d_v..(at + 1) * d_v].copy_from_slice(out);
        g.lse[at] = lse[0];
    }
}

/// Computes `c = a · b + beta · c`, with rows of `c` `stride` apart.
fn product<T: Real>(
    a: Op<MatRef<'_, T>>,
    b: Op<MatRef<'_, T>>,
    beta: T,
    c: &mut [T],
    stride: usize,
    cx: Context<'_>,
) {
    gemm(cx.schedule.isa, T::ONE, a, b, beta, c, stride, cx.scratch);
}

/// Columns `range` of a matrix.
fn columns<'a, T>(m: MatRef<'a, T>, range: &Range<usize>) -> MatRef<'a, T> {
    let data = m.data().get(range.start..).unwrap_or(&[]);
    MatRef::with_stride(data, m.rows(), range.len(), m.stride())
        .unwrap_or_else(|| unreachable!("columns of a view are inside it"))
}

/// Returns how far the logarithm of a key's feature may exceed the reference of its chunk: its exponential, times the
/// number of features and keys and a large value, stays far from overflow, and anything that then underflows is far
/// below rounding.
fn headroom<T: Real>() -> T {
    T::from_f64(if T::DTYPE == attlas_num::DType::F32 { 30.0 } else { 300.0 })
}

/// Decoding stream: one state, whatever the number of tokens. Keys and values are kept only if unstable rows must be
/// recomputed.
#[derive(Debug)]
struct LinearStream<T> {
    acc: Box<dyn Accumulator<T>>,
    features: usize,
    /// A row depends on sums over keys and nothing else.
    whole: bool,
    state: Vec<T>,
    seen: usize,
    kept: [Vec<T>; 2],
    widths: [usize; 2],
    /// The number of keys in the next causal rows, and the states of the pieces into which these are cut.
    prepared: Option<(usize, Vec<T>)>,
}

impl<T: Real> LinearStream<T> {
    fn new(acc: Box<dyn Accumulator<T>>, features: usize, whole: bool, d: usize, d_v: usize) -> Self {
        let whole = whole && !acc.recomputes_rows();
        let mut state = vec![T::ZERO; acc.state_len()];
        acc.clear(&mut state);
        let kept = [Vec::new(), Vec::new()];
        Self { acc, features, whole, state, seen: 0, kept, widths: [d, d_v], prepared: None }
    }
}

impl<T: Real> GroupStream<T> for LinearStream<T> {
    fn push(&mut self, k: MatRef<'_, T>, v: MatRef<'_, T>, cx: Context<'_>) -> Result<()> {
        for start in (0..k.rows()).step_by(BLOCK) {
            let block = start..(start + BLOCK).min(k.rows());
            self.acc.absorb(&mut self.state, k.sub_rows(block.clone()), v.sub_rows(block), cx);
        }
        if self.acc.recomputes_rows() {
            for (kept, new) in self.kept.iter_mut().zip([k, v]) {
                new.iter_rows().for_each(|row| kept.extend_from_slice(row));
            }
        }
        self.seen += k.rows();
        Ok(())
    }

    fn attend(
        &mut self,
        q: MatRef<'_, T>,
        scale: T,
        out: &mut [T],
        lse: &mut [T],
        cx: Context<'_>,
    ) -> Result<RunInfo> {
        if self.seen == 0 {
            out.fill(T::ZERO);
            lse.fill(T::NEG_INFINITY);
            return Ok(RunInfo { empty_rows: lse.len() as u64, ..RunInfo::default() });
        }
        let mut outcome = Outcome::default();
        let rows = RowBlock { head: 0, first: 0, q, out: &mut *out, lse: &mut *lse };
        self.acc.read(&self.state, self.seen, rows, cx, &mut outcome);
        if self.acc.recomputes_rows() {
            let [k, v] = [0, 1].map(|i| MatRef::new(&self.kept[i], self.seen, self.widths[i]));
            for &(_, row) in &outcome.unstable {
                let out = &mut out[row * self.widths[1]..(row + 1) * self.widths[1]];
                let (q, lse) = (q.sub_rows(row..row + 1), &mut lse[row..row + 1]);
                exact_rows(q, k, v, None, scale, Band::ALL, cx, out, lse);
            }
        }
        let exact = if self.acc.recomputes_rows() { outcome.unstable.len() * self.seen } else { 0 };
        let visited = (q.rows() * self.features + exact) as u64;
        Ok(RunInfo { fallback_rows: outcome.unstable.len() as u64, ..RunInfo::visited(visited) })
    }

    fn state_bytes(&self) -> usize {
        (self.state.len() + self.kept.iter().map(Vec::len).sum::<usize>()) * size_of::<T>()
    }

    fn sums(&self, _: Context<'_>) -> Option<Vec<T>> {
        self.whole.then(|| self.state.clone())
    }

    fn add_sums(&mut self, sums: &[T], tokens: usize) -> Result<()> {
        if !self.whole || sums.len() != self.state.len() {
            return Err(Error::shape("sums", self.state.len(), sums.len()));
        }
        self.acc.combine(&mut self.state, sums);
        self.seen += tokens;
        Ok(())
    }

    fn prepare(&mut self, k: MatRef<'_, T>, v: MatRef<'_, T>, cx: Context<'_>) -> Option<Vec<T>> {
        if !self.whole {
            return None;
        }
        let (acc, n, len) = (&*self.acc, k.rows(), self.state.len());
        let piece = causal_piece(n);
        let mut states = vec![T::ZERO; n.div_ceil(piece) * len];
        states.par_chunks_mut(len).with_max_len(1).enumerate().for_each(|(p, state)| {
            absorb_range(acc, state, k, v, p * piece..((p + 1) * piece).min(n), cx);
        });
        let mut sum = vec![T::ZERO; len];
        acc.clear(&mut sum);
        states.chunks_exact(len).for_each(|state| acc.combine(&mut sum, state));
        self.prepared = Some((n, states));
        Some(sum)
    }

    fn rows(&mut self, mut x: Group<'_, T>) -> Result<RunInfo> {
        let prepared = self.prepared.take().filter(|(n, _)| *n == x.n_k());
        let sees_nothing = self.seen == 0 && (x.mask == Mask::None || x.n_k() == 0);
        if x.n_q() == 0 || sees_nothing {
            return Ok(x.fill_empty());
        }
        let (acc, state, seen, cx) = (&*self.acc, &self.state[..], self.seen, x.cx);
        let unstable: usize = match x.mask {
            Mask::None => {
                let parts = x.par_row_blocks(ROWS, |rows| {
                    let mut outcome = Outcome::default();
                    acc.read(state, seen, rows, cx, &mut outcome);
                    Ok(outcome.unstable.len())
                })?;
                parts.into_iter().sum()
            }
            Mask::Causal => {
                if x.n_q() > x.n_k() {
                    return Err(Error::shape("queries", format!("at most {} keys", x.n_k()), x.n_q()));
                }
                let pieces = prepared.as_ref().map(|(_, states)| &states[..]);
                run_causal(acc, &mut x, Initial { before: Some(state), pieces }, seen).unstable.len()
            }
        };
        let visited = (x.lse.len() * self.features) as u64;
        Ok(RunInfo { fallback_rows: unstable as u64, ..RunInfo::visited(visited) })
    }
}

#[cfg(test)]
mod tests {
    use super::testing::{naive_positive, naive_signed, scaled_case};
    use super::*;
    use crate::Problem;
    use crate::Workspace;
    use crate::testkit::{Case, assert_rows_close, assert_same_bits};
    use attlas_num::rng::StreamKey;
    use attlas_num::sketch::features::{Elementwise, ElementwiseFeatures, ExpFeatures, Exponent, Trig};
    use attlas_num::sketch::{Coupling, MapOptions, draw_directions};

    /// Feeds one head of keys and queries through an accumulator, in chunks of the given length.
    fn in_chunks(acc: &dyn Accumulator<f64>, x: &Case, chunk: usize) -> Vec<f64> {
        let (n, d, d_v) = (x.problem.n_k, x.problem.d, x.problem.d_v);
        let ws = Workspace::single().unwrap();
        let mut state = vec![f64::NAN; acc.state_len()];
        acc.clear(&mut state);
        let (mut out, mut lse) = (vec![f64::NAN; n * d_v], vec![f64::NAN; n]);
        let (q, k, v) = (MatRef::new(&x.q, n, d), MatRef::new(&x.k, n, d), MatRef::new(&x.v, n, d_v));
        let rows = RowBlock { head: 0, first: 0, q, out: &mut out, lse: &mut lse };
        let mut outcome = Outcome::default();
        let mut rows = [rows];
        for start in (0..n).step_by(chunk) {
            let range = start..(start + chunk).min(n);
            let mut heads = [sub_block(&mut rows[0], range.clone())];
            let (k, v) = (k.sub_rows(range.clone()), v.sub_rows(range));
            acc.chunk(&mut state, start, k, v, &mut heads, ws.context(), &mut outcome);
        }
        out
    }

    fn exponential(p: &Problem) -> ExpFeatures<f64> {
        let omega = draw_directions(Coupling::Orthogonal, 7, p.d, StreamKey::new(1)).unwrap();
        let options = MapOptions { scale: p.scale, ..MapOptions::default() };
        ExpFeatures::new(&Exponent::favor(p.d), &omega, true, options).unwrap()
    }

    #[test]
    fn prepared_states_give_the_same_rows_and_the_sums_of_what_was_pushed() {
        use crate::{DType, Numbers, Out, Qkv, Stream, TensorMut, TensorRef};
        // Three pieces, the last of them short.
        let p = Problem { d_v: 3, ..Problem::new(2, 2500, 4).with_kv_heads(1).causal() };
        let x = Case::gaussian(p, 5);
        let [q, k, v] = [(&x.q, 2, 4), (&x.k, 1, 4), (&x.v, 1, 3)]
            .map(|(data, heads, cols)| TensorRef::bhnd(data, [1, heads, 2500, cols]).unwrap());
        let plan = crate::registry::method("linear").unwrap().plan(&p, &crate::Options::new()).unwrap();
        let mut ws = Workspace::single().unwrap();
        let mut streams = [0; 3].map(|_| plan.stream(DType::F64).unwrap());
        let prepared = streams[1].prepare(k.into(), v.into(), &mut ws).unwrap().unwrap();
        let mut rows = |stream: &mut dyn Stream| {
            let mut o = vec![f64::NAN; 2 * 2500 * 3];
            let out = Out::new(TensorMut::bhnd(&mut o, [1, 2, 2500, 3]).unwrap());
            stream.rows(&Qkv::new(q, k, v).into(), true, &mut out.into(), &mut ws).unwrap();
            o.into_iter().map(f64::to_bits).collect::<Vec<u64>>()
        };
        let (plain, again) = (rows(&mut *streams[0]), rows(&mut *streams[1]));
        assert_eq!(plain, again);
        streams[2].push(k.into(), v.into(), &mut ws).unwrap();
        let (Some(Numbers::F64(pushed)), Numbers::F64(prepared)) = (streams[2].sums(&mut ws), prepared)
        else {
            panic!("sums of double precision")
        };
        assert!(pushed.iter().zip(&prepared).all(|(a, b)| (a - b).abs() <= 1e-9 * a.abs()));
    }

    #[test]
    fn rows_do_not_depend_on_the_length_of_chunks() {
        for n in [1, 2, 63, 64, 65, 203] {
            let p = Problem { d_v: 3, ..Problem::new(1, n, 4).causal() };
            // Log-features of about 1, and of about 500, where chunks end early.
            for size in [1.0, 22.0] {
                let x = scaled_case(p, 3, size);
                let relu =
                    || ElementwiseFeatures::new(Elementwise::Relu { eps: 0.0 }, 4, MapOptions::default());
                let omega = draw_directions(Coupling::Iid, 300, 4, StreamKey::new(2)).unwrap();
                let trig = || Trig::new(&omega, MapOptions { scale: 1e-3, ..MapOptions::default() }).unwrap();
                let strict = DenominatorPolicy::Strict;
                let relu_rows = naive_positive(&relu().unwrap(), &x).0;
                let cases: [(&str, Box<dyn Accumulator<f64>>, Vec<f64>); 3] = [
                    (
                        "exp",
                        Box::new(Positive::new(exponential(&p), 3)),
                        naive_positive(&exponential(&p), &x).0,
                    ),
                    ("relu", Box::new(Positive::new(relu().unwrap(), 3)), relu_rows),
                    ("trig", Box::new(Signed::new(trig(), 3, strict, 1e-3)), naive_signed(&trig(), &x).0),
                ];
                for (map, acc, want) in &cases {
                    for chunk in [1, 7, 64, n, 2 * n] {
                        let got = in_chunks(&**acc, &x, chunk);
                        let name = format!("{map}: {n} tokens times {size} in chunks of {chunk}");
                        assert_rows_close(&got, want, 1e-9, &name);
                    }
                }
            }
        }
    }

    #[test]
    fn a_longer_chunk_leaves_the_rows_of_its_beginning_as_they_were() {
        let p = Problem { d_v: 5, ..Problem::new(1, 64, 4).causal() };
        let x = scaled_case(p, 4, 3.0);
        let acc = Positive::new(exponential(&p), 5);
        let whole = in_chunks(&acc, &x, 64);
        for n in [1, 13, 32, 63] {
            let head = Case {
                problem: Problem { n_q: n, n_k: n, ..p },
                q: x.q[..n * 4].to_vec(),
                k: x.k[..n * 4].to_vec(),
                v: x.v[..n * 5].to_vec(),
                single: false,
            };
            assert_same_bits(&in_chunks(&acc, &head, 64), &whole[..n * 5], "the first rows");
        }
    }

    #[test]
    fn denominators_are_at_least_one_relative_to_their_shift() {
        // lse − max_l (b_l + s_l) = ln den ≥ 0, up to rounding.
        let p = Problem { d_v: 2, ..Problem::new(1, 120, 4) };
        let x = scaled_case(p, 5, 12.0);
        let map = exponential(&p);
        let ws = Workspace::single().unwrap();
        let acc = Positive::new(map.clone(), 2);
        let mut state = vec![f64::NAN; acc.state_len()];
        let (k, v) = (MatRef::new(&x.k, 120, 4), MatRef::new(&x.v, 120, 2));
        absorb_range(&acc, &mut state, k, v, 0..120, ws.context());
        let m = attlas_num::sketch::LogFeatures::<f64>::num_features(&map);
        let (mut out, mut lse, mut b) = (vec![0.0; 240], vec![0.0; 120], vec![0.0; 120 * m]);
        let q = MatRef::new(&x.q, 120, 4);
        let rows = RowBlock { head: 0, first: 0, q, out: &mut out, lse: &mut lse };
        acc.read(&state, 120, rows, ws.context(), &mut Outcome::default());
        attlas_num::sketch::LogFeatures::log_features(&map, q, attlas_num::sketch::Side::Query, &mut b);
        for (b, lse) in b.chunks(m).zip(&lse) {
            let shift = b.iter().zip(&state[..m]).fold(f64::MIN, |t, (b, s)| t.max(b + s));
            let den = lse - shift;
            assert!(den > -1e-9 && den < ((120 * m) as f64).ln() + 1e-9, "{den}");
        }
    }
}
