//! Linear attention with positive features: by segments, and decoding with a state.

use crate::driver::{Arg, Kernel, Sizes, View};
use crate::prims::features::{Features, Rows};
use crate::prims::{number, sizes};
use crate::workspace::padded;
use crate::{Device, DeviceRef, DeviceWorkspace, Element, Result, programs};
use attlas::{Mask, Problem};
use std::ops::Range;

/// Tokens of a segment, and output rows of a block.
pub(crate) const SEGMENT: usize = 64;
pub(crate) const ROWS: usize = 8;
/// Partial sums per block of rows.
pub(crate) const PARTS: usize = 32 * ROWS;

/// Most features for the kernels.
pub(crate) const MOST_FEATURES: usize = 1024;

/// Most scratch memory of key heads that run together.
const TOGETHER: usize = 1 << 31;

/// A constant added to denominators.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Eps {
    pub(crate) value: f64,
    /// True if it is multiplied by the row's number of keys.
    pub(crate) per_key: bool,
}

/// Linear attention of a problem with a feature map.
#[derive(Clone, Debug)]
pub(crate) struct Positive {
    device: Device,
    problem: Problem,
    element: Element,
    features: Features,
    eps: Eps,
    /// Maps of queries, each for some columns of the values.
    streams: Vec<(Rows, Range<usize>)>,
    clear: Kernel,
    absorb: Kernel,
    sums: Kernel,
    prefix: Kernel,
    answer: Kernel,
}

/// Key heads that run together: sequences and key heads.
pub(crate) struct Piece {
    pub(crate) batch: Range<usize>,
    pub(crate) heads: Range<usize>,
}

impl Piece {
    /// Splits a problem whose key heads take `one` bytes of scratch memory each into pieces.
    pub(crate) fn all(p: &Problem, one: usize) -> Vec<Self> {
        let one = one.max(1);
        if p.batch * p.n_kv_heads <= TOGETHER / one {
            return vec![Self { batch: 0..p.batch, heads: 0..p.n_kv_heads }];
        }
        let (count, all) = ((TOGETHER / one).clamp(1, p.n_kv_heads), p.n_kv_heads);
        let heads = |b: usize| {
            (0..all).step_by(count).map(move |h| Self { batch: b..b + 1, heads: h..(h + count).min(all) })
        };
        (0..p.batch).flat_map(heads).collect()
    }

    /// Returns the problem of the piece.
    pub(crate) fn problem(&self, p: &Problem) -> Problem {
        let heads = self.heads.len();
        Problem { batch: self.batch.len(), n_kv_heads: heads, n_heads: heads * p.group_size(), ..*p }
    }

    /// Returns the piece's heads of a tensor with `group` heads per key head.
    pub(crate) fn cut(&self, t: &DeviceRef<'_>, group: usize) -> View {
        let mut view = t.view();
        let ahead =
            self.batch.start as i64 * view.strides[0] + (self.heads.start * group) as i64 * view.strides[1];
        view.address += (ahead as usize * t.element().bytes()) as u64;
        view
    }

    /// Returns the index of the first key head.
    pub(crate) fn first(&self, p: &Problem) -> usize {
        self.batch.start * p.n_kv_heads + self.heads.start
    }

    /// Returns the address of the piece's part of the log-sum-exp, `bytes` per row; 0 stays 0.
    pub(crate) fn lse(&self, lse: u64, p: &Problem, bytes: usize) -> u64 {
        if lse == 0 { 0 } else { lse + (self.first(p) * p.group_size() * p.n_q * bytes) as u64 }
    }
}

impl Positive {
    pub(crate) fn new(
        device: &Device,
        problem: &Problem,
        element: Element,
        features: Features,
        eps: Eps,
        streams: Vec<(Rows, Range<usize>)>,
    ) -> Result<Self> {
        let (scan, program) = (programs::scan(element), programs::positive(element));
        let (m, size) = (features.count(), element.sum().bytes());
        Ok(Self {
            device: device.clone(),
            problem: *problem,
            element,
            features,
            eps,
            streams,
            clear: device.kernel(&scan, "clear_state", 0)?,
            absorb: device.kernel(&scan, "absorb_tokens", 2 * m * size)?,
            sums: device.kernel(&program, "segment_sums", 0)?,
            prefix: device.kernel(&program, "prefix_sums", 0)?,
            answer: device.kernel(&program, "answer_rows", ROWS * (m + SEGMENT + 1 + PARTS) * size)?,
        })
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    pub(crate) fn problem(&self) -> &Problem {
        &self.problem
    }

    pub(crate) fn element(&self) -> Element {
        self.element
    }

    /// Returns true if the map depends on a whole run, which excludes decoding.
    pub(crate) fn is_fitted(&self) -> bool {
        self.features.is_fitted()
    }

    /// Returns the bytes of the states of all key heads.
    pub(crate) fn state_bytes(&self) -> usize {
        let p = &self.problem;
        p.batch * p.n_kv_heads * self.state_len() * self.element.sum().bytes()
    }

    fn state_len(&self) -> usize {
        self.features.count() * (self.problem.d_v + 2)
    }

    fn segments(&self) -> usize {
        self.problem.n_k.div_ceil(SEGMENT).max(1)
    }

    /// Returns the scratch memory of some key heads: features of keys, of queries, states.
    fn head_bytes(&self, heads: usize) -> [usize; 3] {
        let (p, size) = (&self.problem, self.element.sum().bytes());
        let m = self.features.count();
        [heads * p.n_k * m, heads * p.group_size() * p.n_q * m, heads * self.segments() * self.state_len()]
            .map(|numbers| numbers * size)
    }

    fn pieces(&self) -> Vec<Piece> {
        Piece::all(&self.problem, self.head_bytes(1).iter().sum())
    }

    pub(crate) fn workspace_bytes(&self) -> usize {
        let most = self.pieces().iter().map(|x| x.batch.len() * x.heads.len()).max().unwrap_or(0);
        self.head_bytes(most).map(padded).iter().sum::<usize>() + self.features.fit_bytes(most)
    }

    pub(crate) fn run(
        &self,
        [q, k, v]: [&DeviceRef<'_>; 3],
        out: &DeviceRef<'_>,
        lse: u64,
        ws: &mut DeviceWorkspace,
    ) -> Result<()> {
        let (p, group) = (&self.problem, self.problem.group_size());
        if p.n_q == 0 {
            return Ok(());
        }
        let sum = self.element.sum().bytes();
        for piece in self.pieces() {
            let mark = ws.mark();
            let part = piece.problem(p);
            let (batch, heads) = (part.batch, part.n_kv_heads);
            let (q, o) = (piece.cut(q, group), piece.cut(out, group));
            let (k, v) = (piece.cut(k, 1), piece.cut(v, 1));
            let (lse, map) = (piece.lse(lse, p, sum), piece.first(p));
            let [keys, queries, states] = self.head_bytes(batch * heads);
            let (keys, queries, states) = (ws.take(keys)?, ws.take(queries)?, ws.take(states)?);
            let n = sizes(&part);
            let fitted = self.features.fit([q, k], n, batch, p.scale, ws)?;
            self.features.run(k, [batch, heads, p.n_k], 1, map, Rows::Keys, fitted, keys, ws)?;
            self.sum_up(keys, v, states, &part, ws)?;
            for (rows, columns) in &self.streams {
                let dims = [batch, part.n_heads, p.n_q];
                self.features.run(q, dims, group, map, *rows, fitted, queries, ws)?;
                let segments = self.segments();
                self.answer([states, keys, queries], [v, o], lse, n, batch, segments, columns, p.mask, ws)?;
            }
            ws.rewind(mark);
        }
        Ok(())
    }

    /// Computes the sums of the keys before each segment, or without a mask those of all keys.
    fn sum_up(&self, keys: u64, v: View, states: u64, p: &Problem, ws: &DeviceWorkspace) -> Result<()> {
        let (m, segments) = (self.features.count(), self.segments());
        let int = |x: usize| Arg::Int(x as i32);
        let args = [
            Arg::Address(keys),
            Arg::View(v),
            Arg::Address(states),
            Arg::Sizes(sizes(p)),
            int(p.n_kv_heads),
            int(m),
        ];
        let tiles = m.div_ceil(64) * p.d_v.div_ceil(64).max(1);
        self.sums.launch(ws.stream(), [segments, tiles, p.batch * p.n_kv_heads], 256, 0, &args)?;
        let whole = Arg::Int(i32::from(p.mask == Mask::None));
        let args = [Arg::Address(states), int(segments), int(m), int(p.d_v), whole];
        self.prefix.launch(ws.stream(), [m, p.batch * p.n_kv_heads, 1], 128, 0, &args)
    }

    #[allow(clippy::too_many_arguments)]
    fn answer(
        &self,
        [states, keys, queries]: [u64; 3],
        [v, out]: [View; 2],
        lse: u64,
        n: Sizes,
        batch: usize,
        segments: usize,
        columns: &Range<usize>,
        mask: Mask,
        ws: &DeviceWorkspace,
    ) -> Result<()> {
        let int = |x: usize| Arg::Int(x as i32);
        let causal = mask == Mask::Causal;
        let args = [
            Arg::Address(states),
            Arg::Address(keys),
            Arg::Address(queries),
            Arg::View(v),
            Arg::View(out),
            Arg::Address(lse),
            Arg::Sizes(n),
            Arg::Int(n.heads / n.group),
            int(segments),
            int(self.features.count()),
            Arg::Int(i32::from(causal)),
            int(columns.start),
            int(columns.end),
            number(self.element, self.eps.value),
            Arg::Int(i32::from(self.eps.per_key)),
        ];
        let rows = if causal { blocks(n.nq as i64, n.nk as i64) } else { (n.nq as usize).div_ceil(ROWS) };
        let grid = [rows, n.heads as usize, batch];
        self.answer.launch(ws.stream(), grid, 32 * ROWS, self.answer.shared, &args)
    }

    /// Returns the scratch memory of some tokens or rows of decoding.
    pub(crate) fn step_bytes(&self, heads: usize, rows: usize) -> usize {
        padded(self.problem.batch * heads * rows * self.features.count() * self.element.sum().bytes())
    }

    pub(crate) fn clear_state(&self, state: u64, ws: &DeviceWorkspace) -> Result<()> {
        let (p, m) = (&self.problem, self.features.count());
        let args = [Arg::Address(state), Arg::Int(m as i32), Arg::Int(p.d_v as i32)];
        self.clear.launch(ws.stream(), [p.batch * p.n_kv_heads, 1, 1], 256, 0, &args)
    }

    /// Adds tokens to the states.
    pub(crate) fn push(
        &self,
        state: u64,
        k: &DeviceRef<'_>,
        v: &DeviceRef<'_>,
        ws: &mut DeviceWorkspace,
    ) -> Result<()> {
        let [batch, heads, n, _] = k.dims();
        let m = self.features.count();
        let keys = ws.take(batch * heads * n * m * self.element.sum().bytes())?;
        self.features.run(k.view(), [batch, heads, n], 1, 0, Rows::Keys, 0, keys, ws)?;
        let int = |x: usize| Arg::Int(x as i32);
        let args = [
            Arg::Address(state),
            Arg::Address(keys),
            Arg::View(v.view()),
            int(n),
            int(m),
            int(self.problem.d_v),
        ];
        self.absorb.launch(ws.stream(), [heads, batch, 1], 256, self.absorb.shared, &args)
    }

    /// Computes one row of each head from states of `seen` tokens.
    pub(crate) fn attend(
        &self,
        state: u64,
        seen: usize,
        q: &DeviceRef<'_>,
        out: &DeviceRef<'_>,
        lse: u64,
        ws: &mut DeviceWorkspace,
    ) -> Result<()> {
        let p = Problem { n_q: 1, n_k: seen, mask: Mask::None, ..self.problem };
        let m = self.features.count();
        let queries = ws.take(p.batch * p.n_heads * m * self.element.sum().bytes())?;
        for (rows, columns) in &self.streams {
            let dims = [p.batch, p.n_heads, 1];
            self.features.run(q.view(), dims, p.group_size(), 0, *rows, 0, queries, ws)?;
            let (n, views) = (sizes(&p), [out.view(), out.view()]);
            self.answer([state, 0, queries], views, lse, n, p.batch, 1, columns, Mask::None, ws)?;
        }
        Ok(())
    }
}

/// Returns the number of blocks of the causal form: rows are grouped by the positions of their keys.
pub(crate) fn blocks(n_q: i64, n_k: i64) -> usize {
    let (offset, rows) = (n_k - n_q, ROWS as i64);
    let base = offset.div_euclid(rows) * rows;
    usize::try_from((n_k - base + rows - 1) / rows).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_hold_every_row() {
        for n_q in 1..40i64 {
            for n_k in 0..40i64 {
                let base = (n_k - n_q).div_euclid(8) * 8;
                let last = base + 8 * blocks(n_q, n_k) as i64;
                assert!(base <= n_k - n_q && last >= n_k && last - 8 < n_k, "{n_q} {n_k}");
                assert_eq!(SEGMENT % ROWS, 0);
            }
        }
    }
}
