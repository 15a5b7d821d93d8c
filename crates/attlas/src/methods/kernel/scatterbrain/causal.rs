//! Causal form: exact attention in a window, and the features of all keys before it.
//!
//! The window of a block of rows begins at a key that all its rows see, so the far sum is a separate state: nothing is
//! subtracted, and no scale depends on a later token. Near and far merge by log-sum-exp.

use super::Scatterbrain;
use crate::engine::exact_rows;
use crate::engine::linear::{
    Accumulator, Initial, Outcome, Piece, Positive, causal_piece, causal_pieces, sub_block,
};
use crate::group::{Group, RowBlock};
use crate::workspace::Context;
use crate::{MatRef, Real};
use attlas_num::kernels::{Band, merge_lse};

/// Keys added to a state at a time.
const ABSORBED: usize = 256;

impl Scatterbrain {
    /// Attends with a causal mask: to the state of all keys before a block's window, and exactly to the window.
    pub(super) fn run_causal<T: Real>(&self, g: &mut Group<'_, T>, acc: &Positive<T>) -> u64 {
        let (k, v, scale, cx, block) = (g.k, g.v, g.scale, g.cx, self.params.block());
        let piece = causal_piece(k.rows()).next_multiple_of(block);
        let near_from = |start| self.params.near_from(start);
        let visited = causal_pieces(acc, g, piece, Initial::default(), near_from, |state, piece| {
            let Piece { tokens, first, mut rows } = piece;
            let (mut cached, mut visited) = (near_from(tokens.start), 0);
            for start in tokens.clone().step_by(block) {
                let end = (start + block).min(tokens.end);
                if end <= first {
                    continue;
                }
                let (low, from) = (near_from(start), start.max(first));
                absorb(acc, state, k.sub_rows(cached..low), v.sub_rows(cached..low), cx);
                cached = low;
                let near = (k.sub_rows(low..end), v.sub_rows(low..end));
                for head in &mut rows {
                    let rows = sub_block(head, from - first..end - first);
                    let band = Band::causal((from - low) as isize);
                    visited += (rows.lse.len() * (self.features() + end - low)) as u64;
                    attend_near(acc, state, cached, near, scale, band, rows, cx);
                }
            }
            visited
        });
        visited.into_iter().sum()
    }
}

/// Adds keys to a state.
pub(super) fn absorb<T: Real>(
    acc: &Positive<T>,
    state: &mut [T],
    k: MatRef<'_, T>,
    v: MatRef<'_, T>,
    cx: Context<'_>,
) {
    for start in (0..k.rows()).step_by(ABSORBED) {
        let rows = start..(start + ABSORBED).min(k.rows());
        acc.absorb(state, k.sub_rows(rows.clone()), v.sub_rows(rows), cx);
    }
}

/// Attends with rows exactly to near keys, and by features to the `cached` keys of a state.
#[allow(clippy::too_many_arguments)]
pub(super) fn attend_near<T: Real>(
    acc: &Positive<T>,
    state: &[T],
    cached: usize,
    (k, v): (MatRef<'_, T>, MatRef<'_, T>),
    scale: T,
    band: Band,
    rows: RowBlock<'_, T>,
    cx: Context<'_>,
) {
    exact_rows(rows.q, k, v, None, scale, band, cx, rows.out, rows.lse);
    if cached == 0 {
        return;
    }
    let d_v = v.cols();
    let mut out = cx.scratch.take::<T>(rows.out.len());
    let mut lse = cx.scratch.take::<T>(rows.lse.len());
    let far = RowBlock { out: &mut out, lse: &mut lse, ..rows };
    acc.read(state, cached, far, cx, &mut Outcome::default());
    for ((near, near_lse), (far, far_lse)) in
        rows.out.chunks_exact_mut(d_v).zip(rows.lse).zip(out.chunks_exact(d_v).zip(lse.iter()))
    {
        merge_lse(near, near_lse, far, *far_lse);
    }
}
