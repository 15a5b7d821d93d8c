//! Support without a mask: the keys that a row sees exactly.
//!
//! A support is a list of rounds. In each round a row belongs to one tile, a few rows with the same keys: clusters of
//! sorted projections (cluster $t$ of the queries with cluster $t$ of the keys, pairs of earlier rounds hidden), the
//! keys within reach of a row's position, or the largest scores of each row. No pair counts twice, so exact scores and
//! subtracted estimates cover the same pairs.

use super::{ROWS, Scatterbrain, Sparse};
use crate::group::GroupIndex;
use crate::workspace::Context;
use crate::{Mask, MatRef, Real};
use attlas_num::cluster::buckets::{Balanced, Membership, RoundTable, order_by};
use attlas_num::cluster::select_top;
use attlas_num::hash::lift::{Lift, LiftedLines, Side, max_norm};
use attlas_num::kernels::{Op, gemm};
use attlas_num::par::*;
use std::ops::Range;

impl Scatterbrain {
    /// Computes the support of the rows of one head, round by round; no pair is in two rounds.
    pub(super) fn rounds<T: Real>(
        &self,
        q: MatRef<'_, T>,
        k: MatRef<'_, T>,
        key_norm: f64,
        index: GroupIndex,
        cx: Context<'_>,
    ) -> Vec<Buckets> {
        match self.params.sparse(Mask::None) {
            _ if self.params.keys == 0 => Vec::new(),
            Sparse::Window => vec![Buckets::window(q.rows(), k.rows(), self.params.keys)],
            Sparse::TopK => vec![Buckets::largest(q, k, self.params.keys, cx)],
            Sparse::Lsh | Sparse::Auto => {
                let lines = self.draws.of(index).1.cast::<T>();
                Buckets::clusters(q, k, Lift::from_max_norms(max_norm(q), key_norm), &lines, self.params.keys)
            }
        }
    }
}

/// A part of the support that contains every row at most once: tiles of rows with lists of keys.
pub(super) struct Buckets {
    pub(super) rows: Vec<u32>,
    pub(super) keys: Vec<u32>,
    /// Rows and keys of each tile.
    pub(super) tiles: Vec<(Range<usize>, Range<usize>)>,
    pub(super) see: See,
}

/// Visibility of a tile's keys to its rows.
pub(super) enum See {
    /// All.
    All,
    /// Those within `reach` of the row's position, which is `offset` more than its number.
    Near { reach: isize, offset: isize },
    /// Those not paired with the row in an earlier round.
    New { queries: RoundTable, keys: RoundTable, round: usize },
}

impl See {
    /// Sets logits of keys that the row does not see to −∞.
    pub(super) fn hide<T: Real>(&self, row: u32, keys: &[u32], logits: &mut [T]) {
        let pairs = keys.iter().zip(logits);
        match self {
            See::All => {}
            See::Near { reach, offset } => pairs.for_each(|(&j, x)| {
                if (j as isize - row as isize - offset).abs() >= *reach {
                    *x = T::NEG_INFINITY;
                }
            }),
            See::New { queries, keys, round } => {
                let met = Membership::new(queries, keys);
                pairs.for_each(|(&j, x)| {
                    if met.met_before(row as usize, j as usize, *round) {
                        *x = T::NEG_INFINITY;
                    }
                });
            }
        }
    }
}

/// Splits `range` into steps of at most [`ROWS`].
fn in_steps(range: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    range.clone().step_by(ROWS).map(move |start| start..(start + ROWS).min(range.end))
}

impl Buckets {
    fn window(n_q: usize, n_k: usize, reach: usize) -> Self {
        let (reach, offset) = (reach.min(n_q + n_k) as isize, n_k as isize - n_q as isize);
        let clip = |x: isize| x.clamp(0, n_k as isize) as usize;
        let tiles = in_steps(0..n_q).map(|rows| {
            let at = |i: usize| i as isize + offset;
            let keys = clip(at(rows.start) - reach + 1)..clip(at(rows.end - 1) + reach);
            (rows, keys.start..keys.end.max(keys.start))
        });
        let tiles = tiles.collect();
        Self {
            rows: (0..n_q as u32).collect(),
            keys: (0..n_k as u32).collect(),
            tiles,
            see: See::Near { reach, offset },
        }
    }

    fn largest<T: Real>(q: MatRef<'_, T>, k: MatRef<'_, T>, count: usize, cx: Context<'_>) -> Self {
        let (n_q, n_k, count) = (q.rows(), k.rows(), count.min(k.rows()));
        let steps: Vec<Range<usize>> = in_steps(0..n_q).collect();
        let keys: Vec<Vec<u32>> = steps
            .into_par_iter()
            .map(|rows| {
                let mut scores = cx.scratch.take::<T>(rows.len() * n_k);
                let some = Op::N(q.sub_rows(rows.clone()));
                gemm(cx.schedule.isa, T::ONE, some, Op::T(k), T::ZERO, &mut scores, n_k, cx.scratch);
                let (mut index, mut found) = (Vec::new(), Vec::with_capacity(rows.len() * count));
                for scores in scores.chunks_exact(n_k) {
                    select_top(scores, count, &mut index);
                    found.extend(index.iter().map(|&j| j as u32));
                }
                found
            })
            .collect();
        let tiles = (0..n_q).map(|i| (i..i + 1, i * count..(i + 1) * count)).collect();
        Self { rows: (0..n_q as u32).collect(), keys: keys.concat(), tiles, see: See::All }
    }

    fn clusters<T: Real>(
        q: MatRef<'_, T>,
        k: MatRef<'_, T>,
        lift: Lift,
        lines: &LiftedLines<T>,
        size: usize,
    ) -> Vec<Self> {
        let (q_heights, k_heights) = (lift.heights(q), lift.heights(k));
        let count = k.rows().div_ceil(size);
        let (q_cut, k_cut) = (Balanced::new(q.rows(), count), Balanced::new(k.rows(), count));
        let sorted = |side, x: MatRef<'_, T>, heights: &[T], round| {
            let along: Vec<f64> =
                lines.project(side, x, heights, round).into_iter().map(Real::to_f64).collect();
            order_by(&along)
        };
        let orders: Vec<(Vec<u32>, Vec<u32>)> = (0..lines.rounds())
            .into_par_iter()
            .map(|r| (sorted(Side::Query, q, &q_heights, r), sorted(Side::Key, k, &k_heights, r)))
            .collect();
        let mut queries = RoundTable::new(q.rows(), lines.rounds());
        let mut keys = RoundTable::new(k.rows(), lines.rounds());
        for (r, (rows, columns)) in orders.iter().enumerate() {
            queries.set_ranked(r, rows, |rank| q_cut.block_of(rank) as u32);
            keys.set_ranked(r, columns, |rank| k_cut.block_of(rank) as u32);
        }
        let tiles = || {
            let tiles =
                (0..count).flat_map(|c| in_steps(q_cut.range(c)).map(move |rows| (rows, k_cut.range(c))));
            tiles.collect()
        };
        let round = |(r, (rows, columns))| {
            let see = match r {
                0 => See::All,
                _ => See::New { queries: queries.clone(), keys: keys.clone(), round: r },
            };
            Self { rows, keys: columns, tiles: tiles(), see }
        };
        orders.into_iter().enumerate().map(round).collect()
    }
}
