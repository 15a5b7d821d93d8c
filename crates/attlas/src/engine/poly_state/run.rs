//! A whole group through states of sketches.
//!
//! **Without a mask**, pieces of keys are summed in parallel and added in order; then every row reads the sum.
//! **Causally**, the sequence is cut into pieces of a few blocks. The state before a piece is the sum of the earlier
//! pieces. Pieces then run in parallel: the rows of each block read the piece's state and the block's own keys as near
//! ones, and then the block is added to the state. Both cuts depend on sizes alone, so threads change no bit.

use super::power::{KeyTile, PowerKernel, TILE, augment_into, finish_row};
use super::rows::NearTile;
use super::state::SketchSums;
use super::{ROWS, SketchAttention};
use crate::group::Group;
use crate::workspace::Context;
use crate::{Mask, MatRef, Real, Result, RunInfo};
use attlas_num::par::*;
use std::ops::Range;

/// Blocks of one piece of a causal sequence. Pieces run in parallel, the blocks of a piece one after another. The
/// number is fixed, so threads cannot change a bit.
const PIECE_BLOCKS: usize = 4;

/// Keys of one piece without a mask.
const PIECE_KEYS: usize = 2048;

/// Slots for the rows of one block of queries.
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
    /// Computes a group whose keys `k` are prepared. Writes outputs; log-sum-exp is set to −∞.
    pub fn run(&self, g: &mut Group<'_, T>, k: MatRef<'_, T>) -> Result<RunInfo> {
        self.run_after(g, k, None)
    }

    /// Computes a group after the keys of a state; without a mask, rows see only those.
    pub(super) fn run_after(
        &self,
        g: &mut Group<'_, T>,
        k: MatRef<'_, T>,
        initial: Option<SketchSums<'_, T>>,
    ) -> Result<RunInfo> {
        g.lse.fill(T::NEG_INFINITY);
        if g.n_q() == 0 || g.q.heads() == 0 {
            return Ok(RunInfo::default());
        }
        let sees_state = g.mask == Mask::None && initial.as_ref().is_some_and(|s| s.log > f64::NEG_INFINITY);
        if k.rows() == 0 && !sees_state {
            return Ok(g.fill_empty());
        }
        let info = match g.mask {
            Mask::None => match initial {
                Some(state) => self.read_all(g, k, &state)?,
                None => self.run_all(g, k)?,
            },
            Mask::Causal => self.run_causal(g, k, initial)?,
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
                let mut state = SketchSums { sums, log: f64::NEG_INFINITY };
                self.absorb(k.sub_rows(range.clone()), v.sub_rows(range), &mut state, cx);
                state.log
            })
            .collect();
        let (first, rest) = sums.split_at_mut(len);
        let mut state = SketchSums { sums: first, log: logs[0] };
        rest.chunks_exact(len).zip(&logs[1..]).for_each(|(s, &log)| Self::combine(&mut state, s, log));
        self.read_all(g, k, &state)
    }

    /// Computes every row from `state`, which holds the keys `k`.
    fn read_all(&self, g: &mut Group<'_, T>, k: MatRef<'_, T>, state: &SketchSums<'_, T>) -> Result<RunInfo> {
        let cx = g.cx;
        let rows = (g.n_q() * g.q.heads()) as u64;
        let guarded = g.par_row_blocks(ROWS, |block| {
            let rows = self.attend(block.q, state, None, block.out, cx);
            Ok(rows.into_iter().map(|i| (block.head, block.first + i)).collect::<Vec<_>>())
        })?;
        let guarded = guarded.concat();
        self.recompute(g, k, &guarded);
        let visited = rows * self.features() as u64;
        Ok(RunInfo { keys_visited: visited, fallback_rows: guarded.len() as u64, ..RunInfo::default() })
    }

    fn run_causal(
        &self,
        g: &mut Group<'_, T>,
        k: MatRef<'_, T>,
        initial: Option<SketchSums<'_, T>>,
    ) -> Result<RunInfo> {
        let (v, cx, len) = (g.v, g.cx, self.state_len(g.d_v()));
        let (n_q, n_k, d_v, heads) = (g.n_q(), k.rows(), g.d_v(), g.q.heads());
        // Rows before the first key see nothing; the others are at key positions from `first` on.
        let unseen_rows = n_q.saturating_sub(n_k);
        let first = n_k.saturating_sub(n_q);
        let piece_len = self.block * PIECE_BLOCKS;
        let pieces = n_k.div_ceil(piece_len);
        let keys_of = |i: usize| i * piece_len..((i + 1) * piece_len).min(n_k);

        // The state before each piece: separate sums in parallel, then running sums in order.
        let mut sums = cx.scratch.take_zeroed::<T>(pieces * len);
        let mut logs: Vec<f64> = sums
            .par_chunks_mut(len)
            .with_max_len(1)
            .enumerate()
            .map(|(i, sums)| {
                let mut state = SketchSums { sums, log: f64::NEG_INFINITY };
                if i > 0 {
                    let range = keys_of(i - 1);
                    self.absorb(k.sub_rows(range.clone()), v.sub_rows(range), &mut state, cx);
                }
                state.log
            })
            .collect();
        if let Some(initial) = initial {
            sums[..len].copy_from_slice(initial.sums);
            logs[0] = initial.log;
        }
        for i in 1..pieces {
            let (before, own) = sums.split_at_mut(i * len);
            let mut state = SketchSums { sums: &mut own[..len], log: logs[i] };
            Self::combine(&mut state, &before[(i - 1) * len..], logs[i - 1]);
            logs[i] = state.log;
        }

        let mut targets: Vec<Vec<Target<'_, T>>> = (0..pieces).map(|_| Vec::new()).collect();
        for (h, out) in g.out.chunks_exact_mut(n_q * d_v).enumerate() {
            let (zero, mut rest) = out.split_at_mut(unseen_rows * d_v);
            zero.fill(T::ZERO);
            let q = g.q.head(h);
            let mut position = first;
            while position < n_k {
                let piece = position / piece_len;
                let rows = keys_of(piece).end - position;
                let row = position - first + unseen_rows;
                let (own, tail) = std::mem::take(&mut rest).split_at_mut(rows * d_v);
                rest = tail;
                let q = q.sub_rows(row..row + rows);
                targets[piece].push(Target { head: h, first: row, q, position, out: own });
                position += rows;
            }
        }
        let work = sums.chunks_exact_mut(len).zip(logs).zip(targets).enumerate();
        let work: Vec<_> = work.filter(|(_, (_, targets))| !targets.is_empty()).collect();
        let guarded: Vec<Vec<(usize, usize)>> = work
            .into_par_iter()
            .with_max_len(1)
            .map(|(i, ((sums, log), targets))| {
                self.run_piece(keys_of(i), k, v, SketchSums { sums, log }, targets, cx)
            })
            .collect();
        let guarded = guarded.concat();
        self.recompute(g, k, &guarded);
        let rows = ((n_q - unseen_rows) * heads) as u64;
        let visited = rows * (self.features() + self.block.min(n_k) / 2) as u64;
        Ok(RunInfo {
            keys_visited: visited,
            empty_rows: (unseen_rows * heads) as u64,
            fallback_rows: guarded.len() as u64,
            ..RunInfo::default()
        })
    }

    fn run_piece(
        &self,
        keys: Range<usize>,
        k: MatRef<'_, T>,
        v: MatRef<'_, T>,
        mut state: SketchSums<'_, T>,
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
                    // Keys after the last row of the tile are not read at all.
                    let near =
                        NearTile { tile: whole.sub(0..row + rows - start), short: &short, logs: &logs };
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

    /// Recomputes guarded rows if the guard requires it.
    fn recompute(&self, g: &mut Group<'_, T>, k: MatRef<'_, T>, rows: &[(usize, usize)]) {
        let Some(kernel) = self.guard.kernel() else { return };
        let (n_q, d_v, v, cx) = (g.n_q(), g.d_v(), g.v, g.cx);
        let recomputed: Vec<Vec<T>> = rows
            .par_iter()
            .map(|&(head, row)| {
                let (seen, q) = (g.visible(row), g.q.head(head).sub_rows(row..row + 1));
                self.exact_row(kernel, q, k.sub_rows(0..seen), v.sub_rows(0..seen), cx)
            })
            .collect();
        for (&(head, row), recomputed) in rows.iter().zip(&recomputed) {
            let at = (head * n_q + row) * d_v;
            g.out[at..at + d_v].copy_from_slice(recomputed);
        }
    }

    /// Computes one row over prepared keys with the kernel itself.
    pub(super) fn exact_row(
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
}
