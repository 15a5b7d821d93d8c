//! Attention of every row to the keys of its largest scores.

use crate::driver::{Arg, Kernel, View};
use crate::prims::{number, sizes, view_aligned};
use crate::workspace::padded;
use crate::{Device, DeviceBuffer, DeviceRef, DeviceWorkspace, Element, Result, programs};
use attlas::{Mask, Problem};

/// Choice of keys by rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Choice {
    /// Keys kept by their scores; none for a share of the visible ones.
    pub(crate) keys: Option<usize>,
    pub(crate) fraction: f64,
    /// Rows with fewer visible keys keep all.
    pub(crate) min_len: usize,
    /// True if the heads of a group choose together, by the largest of their scores.
    pub(crate) together: bool,
}

impl Choice {
    fn budget(&self, n: usize) -> usize {
        let share = || ((self.fraction * n as f64).ceil() as usize).max(1);
        self.keys.unwrap_or_else(share).min(n)
    }

    /// Returns true if a row with `n` visible keys keeps all.
    pub(crate) fn keeps_all(&self, n: usize) -> bool {
        n < self.min_len || self.budget(n) >= n
    }
}

/// Most bytes of scores of a batch of rows.
const SCORES: usize = 1 << 28;

/// Rows per block of the scoring kernel.
const PAIRS: usize = 8;

/// Attention by ranks of a problem; scores are products of `width` columns.
#[derive(Clone, Debug)]
pub(crate) struct Ranked {
    problem: Problem,
    element: Element,
    width: usize,
    choice: Choice,
    score: Kernel,
    select: Kernel,
    attend: Kernel,
}

impl Ranked {
    pub(crate) fn new(
        device: &Device,
        problem: &Problem,
        element: Element,
        width: usize,
        choice: Choice,
    ) -> Result<Self> {
        let (program, size) = (programs::ranked(element), element.sum().bytes());
        Ok(Self {
            problem: *problem,
            element,
            width,
            choice,
            score: device.kernel(&program, "rank_scores", PAIRS * width * size)?,
            select: device.kernel(&program, "rank_select", 0)?,
            attend: device.kernel(&program, "attend_lists", (problem.d + 8 * 256 + 16) * size)?,
        })
    }

    /// Returns the form for single rows with all keys.
    pub(crate) fn decoding(&self) -> Self {
        Self { problem: Problem { n_q: 1, mask: Mask::None, ..self.problem }, ..self.clone() }
    }

    /// Returns the rows of a batch, and the slots of a row's list.
    fn batch(&self, n_q: usize, n_k: usize) -> (usize, usize) {
        let p = &self.problem;
        let row = (p.batch * p.n_heads * n_k * self.element.sum().bytes()).max(1);
        let rows = (SCORES / row).clamp(1, (65535 * PAIRS / p.group_size()).max(1)).min(n_q.max(1));
        (rows, self.choice.budget(n_k))
    }

    pub(crate) fn workspace_bytes(&self, n_q: usize, n_k: usize) -> usize {
        let (rows, room) = self.batch(n_q, n_k);
        let slots = self.problem.batch * self.problem.n_heads * rows;
        padded(slots * n_k * self.element.sum().bytes()) + padded(slots * room * 4) + padded(slots * 4)
    }

    /// Ranks the first `n_k` keys by the products of `ranks` (of queries, of keys) and attends to the chosen ones.
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn run(
        &self,
        q: View,
        [k, v]: [View; 2],
        ranks: [View; 2],
        n_q: usize,
        n_k: usize,
        out: View,
        lse: u64,
        ws: &mut DeviceWorkspace,
    ) -> Result<()> {
        let p = Problem { n_q, n_k, ..self.problem };
        let (batch, room) = self.batch(n_q, n_k);
        let slots = p.batch * p.n_heads * batch;
        let scores = Arg::Address(ws.take(slots * n_k * self.element.sum().bytes())?);
        let lists = Arg::Address(ws.take(slots * room * 4)?);
        let counts = Arg::Address(ws.take(slots * 4)?);
        let int = |x: usize| Arg::Int(x.min(1 << 30) as i32);
        let (n, causal) = (Arg::Sizes(sizes(&p)), Arg::Int(i32::from(p.mask == Mask::Causal)));
        let wide = self.element.is_half() && self.width.is_multiple_of(8) && view_aligned(&ranks[1]);
        let how = self.choice;
        for first in (0..n_q).step_by(batch) {
            let rows = batch.min(n_q - first);
            let args = [
                Arg::View(ranks[0]),
                Arg::View(ranks[1]),
                scores,
                n,
                int(self.width),
                int(first),
                int(rows),
                Arg::Int(i32::from(wide)),
            ];
            let pairs = (rows * p.group_size()).div_ceil(PAIRS);
            let grid = [n_k.div_ceil(128), pairs, p.batch * p.n_kv_heads];
            self.score.launch(ws.stream(), grid, 128, self.score.shared, &args)?;
            let args = [
                scores,
                lists,
                counts,
                n,
                int(first),
                int(rows),
                causal,
                int(room),
                Arg::Double(how.fraction),
                int(how.keys.unwrap_or(0)),
                int(how.min_len),
                Arg::Int(i32::from(how.together)),
            ];
            let grid = [rows, p.n_heads, p.batch];
            self.select.launch(ws.stream(), grid, 512, 0, &args)?;
            let args = [
                Arg::View(q),
                Arg::View(k),
                Arg::View(v),
                Arg::View(out),
                Arg::Address(lse),
                lists,
                counts,
                n,
                int(first),
                int(rows),
                causal,
                int(room),
                number(self.element, p.scale),
            ];
            self.attend.launch(ws.stream(), grid, 256, self.attend.shared, &args)?;
        }
        Ok(())
    }
}

/// Projection of rows to fewer columns, one map per key head.
#[derive(Clone, Debug)]
pub(crate) struct Projection {
    kernel: Kernel,
    /// `[key heads][d][columns]`.
    map: DeviceBuffer,
    columns: usize,
}

impl Projection {
    pub(crate) fn new(device: &Device, element: Element, map: &[f64], columns: usize) -> Result<Self> {
        let kernel = device.kernel(&programs::ranked(element), "project_rows", 0)?;
        Ok(Self { kernel, map: DeviceBuffer::from_host(device, element.sum(), map)?, columns })
    }

    /// Maps the rows of `x`; `group` heads share a map.
    pub(crate) fn run(&self, x: &DeviceRef<'_>, group: usize, to: View, ws: &DeviceWorkspace) -> Result<()> {
        let [batch, heads, n, d] = x.dims();
        let int = |x: usize| Arg::Int(x as i32);
        let args = [
            Arg::View(x.view()),
            Arg::Address(self.map.address()),
            Arg::View(to),
            int(n),
            int(d),
            int(self.columns),
            int(group),
        ];
        let grid = [(n * self.columns).div_ceil(256), heads, batch];
        self.kernel.launch(ws.stream(), grid, 256, 0, &args)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_that_see_few_keys_keep_all() {
        let choice = Choice { keys: None, fraction: 0.25, min_len: 4, together: false };
        assert_eq!(
            [0, 1, 3, 4, 5, 6, 8].map(|n| choice.keeps_all(n)),
            [true, true, true, false, false, false, false]
        );
        assert_eq!([1, 4, 5, 8, 9].map(|n| choice.budget(n)), [1, 1, 2, 2, 3]);
        let few = Choice { keys: Some(9), ..choice };
        assert!(few.keeps_all(9) && !few.keeps_all(10));
    }
}
