//! Scatterbrain: exact scores on a sparse support, random features everywhere else.
//!
//! **Idea.** Random features are poor where scores are large, and a sparse set of keys misses the mass of the many
//! small ones. Take the features for all keys, take their estimate back on a support that holds the large scores, and
//! put the exact scores there.
//!
//! **Math.** With features $\varphi$ of $e^{\langle x, y\rangle}$, $\hat\kappa_{ij} = \langle \varphi(q_i),
//! \varphi(k_j)\rangle$ with all constants kept, and the support $S_i$ of row $i$: the unnormalised row is
//! $\sum_{j \in S_i} e^{s_{ij}} v_j + R_i$, $R_i = \sum_j \hat\kappa_{ij} v_j - \sum_{j \in S_i} \hat\kappa_{ij} v_j$, and
//! its normaliser is the same with ones, $\rho_i$ in place of $R_i$. Where $\rho_i$ is below $10^{-4}$ of the sum it is a
//! difference of, it is cancellation and dropped; otherwise $R_i$ is kept inside $\rho_i$ times the hull of the values.
//! Supports:
//! * `lsh`: `rounds` of projections of lifted queries and keys on one line, sorted and cut into clusters of `keys` keys,
//!   cluster $t$ of the queries meeting cluster $t$ of the keys; pairs that meet again count once;
//! * `window`: the `keys` nearest keys to either side;
//! * `top_k`: the `keys` largest scores, found by computing all of them: quadratic, for comparison.
//!
//! *Causally* the support is a window that begins with a block of rows: every row sees its `keys` nearest keys at
//! least. The features of all keys before it are then summed by themselves, which is $\rho_i$ and $R_i$ without a
//! difference, and no scale depends on a later token.
//!
//! **Reference.** chen2021. Its features are hyperbolic (`hyp`), not the positive ones that the survey names, which also
//! omits the subtraction and that constants no longer cancel. `oprf` are those of likhosherstov2022 with both signs, an
//! addition of this project; its parameter is fitted to the lengths of the keys, causally to unit variance.
//!
//! **Cost.** $4 n m (d + d_v)$ for features and sums, $n |S| (2d + 2m + 4 d_v)$ for the support; a stream holds
//! $m (d_v + 3)$ numbers and the near keys and values.
//!
//! **Guarantees.** Exact when the support is everything. Entries on the support are exact, others unbiased with the
//! variance of the map: tested. Weights are non-negative and sum to one. Outputs are not linear in the values where
//! they are clamped.
//!
//! **When to use.** On models as they are, where few large scores stand out of a flat rest.

use crate::group::{Group, GroupIndex, GroupPlan, GroupStream, RowBlock};
use crate::method::{
    Budget, Claims, Cost, Family, Law, Method, Promise, RunInfo, Status, Support, Withdrawn,
};
use crate::methods::common::linear::{
    self, Accumulator, Directions, ErrorModel, Outcome, Piece, Positive, causal_pieces, sub_block,
    whole_state,
};
use crate::methods::common::{
    attend_tile, exact_group, exact_rows, exact_scratch_bytes, select_top, tile_logits_len,
};
use crate::workspace::Context;
use crate::{Mask, MatRef, Problem, Real, Result};
use attlas_num::cluster::buckets::{Balanced, Membership, RoundTable, order_by};
use attlas_num::hash::lift::{Lift, LiftedLines, Side, max_norm};
use attlas_num::kernels::{Band, Op, gemm, merge_lse};
use attlas_num::sketch::features::{ExpFeatures, Exponent, optimal_a};
use attlas_num::sketch::{MapOptions, draw_directions};
use rayon::prelude::*;
use std::ops::Range;

/// Registry entry.
pub static METHOD: Method = Method {
    id: "scatterbrain",
    family: Family::Kernel,
    title: "Scatterbrain: a sparse support and random features for the rest",
    reference: "chen2021",
    claims: Claims {
        decode: true,
        unbiased: true,
        exact_at: &[("keys", Budget::NumTokens)],
        deterministic: false,
        exponent: 1.0,
        except: &[(Law::LinearInValues, "the residual is clamped to the hull of the values")],
        withdrawn: &[
            Withdrawn {
                param: "support",
                value: "auto",
                promise: Promise::Law(Law::QueriesAlone),
                reason: "without a mask queries are sorted together into clusters",
            },
            Withdrawn {
                param: "support",
                value: "lsh",
                promise: Promise::Law(Law::QueriesAlone),
                reason: "queries are sorted together into clusters",
            },
            Withdrawn {
                param: "support",
                value: "window",
                promise: Promise::Law(Law::KeyOrder),
                reason: "windows go by position",
            },
            Withdrawn {
                param: "directions",
                value: "orthogonal_regularised",
                promise: Promise::Unbiased,
                reason: "constant lengths change the mean of the features",
            },
            Withdrawn {
                param: "directions",
                value: "hadamard",
                promise: Promise::Unbiased,
                reason: "Hadamard blocks are only nearly uniform",
            },
        ],
        ..Claims::BASE
    },
    params: Params::SPECS,
    probes: &[
        &[("keys", "8"), ("features", "192")],
        &[("keys", "5"), ("support", "window"), ("features", "129"), ("map", "oprf")],
        &[("keys", "6"), ("support", "top_k"), ("features", "192"), ("map", "oprf"), ("directions", "iid")],
        &[("keys", "7"), ("support", "lsh"), ("rounds", "3"), ("features", "128"), ("map", "oprf")],
        &[("keys", "0"), ("directions", "hadamard")],
        &[("keys", "3"), ("directions", "orthogonal_regularised")],
    ],
    supports: |p, options| {
        match Params::from_options(options) {
        Ok(params) => params.directions.supports(p).and_unless(
            p.mask == Mask::Causal && params.sparse(p.mask) != Sparse::Window,
            "clusters and largest scores are those of all keys, which a causal row may not see: use support = window",
        ),
        Err(_) => Support::yes(),
    }
    },
    calibrate: None,
    build: |p, options, _| Ok(Scatterbrain::new(p, Params::from_options(options)?).boxed(p)),
};

crate::choices! {
    /// Where scores are exact.
    pub enum Sparse {
        /// A window with a causal mask, clusters without.
        Auto = "auto",
        /// Clusters of sorted projections.
        Lsh = "lsh",
        /// The nearest keys.
        Window = "window",
        /// The largest scores, found by computing all of them.
        TopK = "top_k",
    }
}

crate::choices! {
    /// The feature map.
    pub enum Map {
        /// Both signs of each direction.
        Hyp = "hyp",
        /// The same with a quadratic term fitted to the lengths of the keys.
        Oprf = "oprf",
    }
}

crate::params! {
    /// Parameters of [`Scatterbrain`].
    pub struct Params {
        /// Where scores are exact.
        support: Sparse = Sparse::Auto;
        /// Keys of the support: of a cluster in each round, of the window to either side (the row's own key counts), or of
        /// the largest scores. As many as there are tokens make the method exact.
        keys: usize = 32, in 0..=1 << 30;
        /// Rounds of hashing.
        rounds: usize = 2, in 1..=64;
        /// Random features, two for each direction; rounded up to an even number.
        features: usize = 32, in 1..=1 << 16;
        /// The feature map.
        map: Map = Map::Hyp;
        /// How the random directions depend on each other.
        directions: Directions = Directions::Orthogonal;
        /// The relative standard deviation of an estimate that the figure `features_needed` is for.
        target_error: f64 = 0.1, in 1e-6..=10.0;
        /// Stream of the directions and of the hashes.
        seed: u64 = 0, in 0..=u64::MAX;
    }
}

impl Params {
    fn sparse(&self, mask: Mask) -> Sparse {
        match (self.support, mask) {
            (Sparse::Auto, Mask::Causal) => Sparse::Window,
            (Sparse::Auto, Mask::None) => Sparse::Lsh,
            (other, _) => other,
        }
    }

    /// Rows of a causal block.
    fn block(&self) -> usize {
        self.keys.clamp(MIN_BLOCK, ROWS)
    }

    /// First key that the rows of the causal block which begins at `start` see exactly.
    fn near_from(&self, start: usize) -> usize {
        (start + 1).saturating_sub(self.keys.max(1))
    }
}

/// Share of the whole below which a residual mass is cancellation.
const CANCELLATION: f64 = 1e-4;

/// Most query rows of a tile.
const ROWS: usize = 128;

/// Fewest rows of a causal block.
const MIN_BLOCK: usize = 32;

/// Keys that are added to a state at one time.
const ABSORBED: usize = 256;

/// The plan.
#[derive(Clone, Debug)]
pub struct Scatterbrain {
    params: Params,
    scale: f64,
    d: usize,
}

/// The sums of features, and what their error is predicted from.
struct Estimate<T> {
    acc: Positive<T>,
    error: ErrorModel,
}

impl Scatterbrain {
    /// With these parameters.
    pub fn new(p: &Problem, params: Params) -> Self {
        Self { params, scale: p.scale, d: p.d }
    }

    fn num_directions(&self) -> usize {
        self.params.features.div_ceil(2)
    }

    fn features(&self) -> usize {
        2 * self.num_directions()
    }

    fn state_len(&self, d_v: usize) -> usize {
        self.features() * (d_v + 3)
    }

    /// The feature map; `k` where the keys may be looked at.
    fn estimate<T: Real>(
        &self,
        k: Option<MatRef<'_, T>>,
        d_v: usize,
        index: GroupIndex,
    ) -> Result<Estimate<T>> {
        let exponent = match self.params.map {
            Map::Hyp => Exponent::favor(self.d),
            Map::Oprf => {
                let squares = |k: MatRef<'_, T>| {
                    let sum: f64 = k.iter_rows().flatten().map(|x| x.to_f64().powi(2)).sum();
                    sum / k.rows().max(1) as f64
                };
                let mean = self.scale * k.map_or(self.d as f64, squares);
                Exponent::oprf(self.d, if mean.is_finite() { optimal_a(2.0 * mean, self.d) } else { 0.0 })?
            }
        };
        let key = index.stream_key(self.params.seed).named("directions");
        let omega = draw_directions(self.params.directions.coupling(), self.num_directions(), self.d, key)?;
        let options = MapOptions { scale: self.scale, ..MapOptions::default() };
        let acc = Positive::new(ExpFeatures::new(&exponent, &omega, true, options)?, d_v);
        let error = ErrorModel::Exponential { exponent, antithetic: true, directions: self.num_directions() };
        Ok(Estimate { acc, error })
    }

    /// Without a mask: the sums over all keys, less the estimate on the support, plus the exact scores there.
    fn run_plain<T: Real>(&self, g: &mut Group<'_, T>, acc: &Positive<T>) -> u64 {
        let (k, v, cx, n_q, d_v) = (g.k, g.v, g.cx, g.n_q(), g.d_v());
        let states = whole_state(acc, k, v, cx);
        let state = &states[..acc.state_len()];
        let (hull, key_norm) = (Hull::of(v), max_norm(k));
        let mut visited = 0;
        for (h, (out, lse)) in g.out.chunks_mut(n_q * d_v).zip(g.lse.chunks_mut(n_q)).enumerate() {
            let q = g.q.head(h);
            let mut residual = cx.scratch.take::<T>(n_q * (d_v + 1));
            let mut whole = cx.scratch.take::<T>(n_q);
            let mut shift = cx.scratch.take::<T>(n_q);
            residual
                .par_chunks_mut(ROWS * (d_v + 1))
                .zip(whole.par_chunks_mut(ROWS).zip(shift.par_chunks_mut(ROWS)))
                .enumerate()
                .for_each(|(b, (sums, (whole, shift)))| {
                    let mut w = cx.scratch.take::<T>(shift.len() * self.features());
                    let rows = q.sub_rows(b * ROWS..b * ROWS + shift.len());
                    acc.sums(state, rows, &mut w, shift, sums, cx);
                    whole.iter_mut().zip(sums.chunks_exact(d_v + 1)).for_each(|(w, s)| *w = s[d_v]);
                });
            out.fill(T::ZERO);
            lse.fill(T::NEG_INFINITY);
            let held = Held { acc, state, q, k, v, scale: g.scale, cx };
            for round in self.rounds(q, k, key_norm, g.index, cx) {
                visited += held.exchange(&round, out, lse, &mut residual);
            }
            out.par_chunks_mut(ROWS * d_v)
                .zip(lse.par_chunks_mut(ROWS))
                .zip(residual.par_chunks_mut(ROWS * (d_v + 1)))
                .enumerate()
                .for_each(|(b, ((out, lse), residual))| {
                    let rows = out.chunks_exact_mut(d_v).zip(lse).zip(residual.chunks_exact_mut(d_v + 1));
                    for (i, ((out, lse), residual)) in rows.enumerate() {
                        let i = b * ROWS + i;
                        if let Some(rho) = hull.settle(residual, whole[i]) {
                            merge_lse(out, lse, &residual[..d_v], shift[i] + rho.ln());
                        }
                    }
                });
        }
        visited
    }

    /// The support of the rows of one head, round by round; no pair stands in two rounds.
    fn rounds<T: Real>(
        &self,
        q: MatRef<'_, T>,
        k: MatRef<'_, T>,
        key_norm: f64,
        index: GroupIndex,
        cx: Context<'_>,
    ) -> Vec<Round> {
        match self.params.sparse(Mask::None) {
            _ if self.params.keys == 0 => Vec::new(),
            Sparse::Window => vec![Round::window(q.rows(), k.rows(), self.params.keys)],
            Sparse::TopK => vec![Round::largest(q, k, self.params.keys, cx)],
            Sparse::Lsh | Sparse::Auto => {
                let key = index.stream_key(self.params.seed).named("hashes");
                let lines = LiftedLines::<T>::new(key, self.d, self.params.rounds);
                Round::clusters(q, k, Lift::from_max_norms(max_norm(q), key_norm), &lines, self.params.keys)
            }
        }
    }

    /// With a causal mask: the state of all keys before a block's window, and the window exactly.
    fn run_causal<T: Real>(&self, g: &mut Group<'_, T>, acc: &Positive<T>) -> u64 {
        let (k, v, scale, cx, block) = (g.k, g.v, g.scale, g.cx, self.params.block());
        let piece = linear::causal_piece(k.rows()).next_multiple_of(block);
        let near_from = |start| self.params.near_from(start);
        let visited = causal_pieces(acc, g, piece, near_from, |state, piece| {
            let Piece { tokens, first, mut rows } = piece;
            let (mut held, mut visited) = (near_from(tokens.start), 0);
            for start in tokens.clone().step_by(block) {
                let end = (start + block).min(tokens.end);
                if end <= first {
                    continue;
                }
                let (low, from) = (near_from(start), start.max(first));
                absorb(acc, state, k.sub_rows(held..low), v.sub_rows(held..low), cx);
                held = low;
                let near = (k.sub_rows(low..end), v.sub_rows(low..end));
                for head in &mut rows {
                    let rows = sub_block(head, from - first..end - first);
                    let band = Band::causal((from - low) as isize);
                    visited += (rows.lse.len() * (self.features() + end - low)) as u64;
                    attend_near(acc, state, held, near, scale, band, rows, cx);
                }
            }
            visited
        });
        visited.into_iter().sum()
    }
}

/// Adds keys to a state.
fn absorb<T: Real>(acc: &Positive<T>, state: &mut [T], k: MatRef<'_, T>, v: MatRef<'_, T>, cx: Context<'_>) {
    for start in (0..k.rows()).step_by(ABSORBED) {
        let rows = start..(start + ABSORBED).min(k.rows());
        acc.absorb(state, k.sub_rows(rows.clone()), v.sub_rows(rows), cx);
    }
}

/// Rows over near keys exactly, and over the `held` keys of a state by their features.
#[allow(clippy::too_many_arguments)]
fn attend_near<T: Real>(
    acc: &Positive<T>,
    state: &[T],
    held: usize,
    (k, v): (MatRef<'_, T>, MatRef<'_, T>),
    scale: T,
    band: Band,
    rows: RowBlock<'_, T>,
    cx: Context<'_>,
) {
    exact_rows(rows.q, k, v, None, scale, band, cx, rows.out, rows.lse);
    if held == 0 {
        return;
    }
    let d_v = v.cols();
    let mut out = cx.scratch.take::<T>(rows.out.len());
    let mut lse = cx.scratch.take::<T>(rows.lse.len());
    let far = RowBlock { out: &mut out, lse: &mut lse, ..rows };
    acc.read(state, held, far, cx, &mut Outcome::default());
    for ((near, near_lse), (far, far_lse)) in
        rows.out.chunks_exact_mut(d_v).zip(rows.lse).zip(out.chunks_exact(d_v).zip(lse.iter()))
    {
        merge_lse(near, near_lse, far, *far_lse);
    }
}

/// The least and greatest value of every column.
struct Hull<T> {
    low: Vec<T>,
    high: Vec<T>,
}

impl<T: Real> Hull<T> {
    fn of(v: MatRef<'_, T>) -> Self {
        let mut hull = Self { low: vec![T::INFINITY; v.cols()], high: vec![T::NEG_INFINITY; v.cols()] };
        for row in v.iter_rows() {
            hull.low.iter_mut().zip(row).for_each(|(l, x)| *l = l.min(*x));
            hull.high.iter_mut().zip(row).for_each(|(h, x)| *h = h.max(*x));
        }
        hull
    }

    /// Divides the residual vector by the residual mass, which it returns, and keeps it in the hull; `None` where the
    /// mass is no more than cancellation.
    fn settle(&self, residual: &mut [T], whole: T) -> Option<T> {
        let (vector, rho) = residual.split_at_mut(self.low.len());
        let rho = rho[0];
        if rho <= T::from_f64(CANCELLATION) * whole {
            return None;
        }
        for (x, (&low, &high)) in vector.iter_mut().zip(self.low.iter().zip(&self.high)) {
            *x /= rho;
            // Not `clamp`: NaN stays.
            if *x < low {
                *x = low;
            } else if *x > high {
                *x = high;
            }
        }
        Some(rho)
    }
}

/// A part of the support in which every row stands at most once: tiles of rows that meet lists of keys.
struct Round {
    rows: Vec<u32>,
    keys: Vec<u32>,
    /// Which rows and which keys a tile has.
    tiles: Vec<(Range<usize>, Range<usize>)>,
    see: See,
}

/// What rows see of the keys of their tile.
enum See {
    /// All.
    All,
    /// Those within `reach` of the row's position, which is `offset` more than its number.
    Near { reach: isize, offset: isize },
    /// Those that it did not meet in a round before.
    New { queries: RoundTable, keys: RoundTable, round: usize },
}

impl See {
    /// Sets what the row does not see to −∞.
    fn hide<T: Real>(&self, row: u32, keys: &[u32], logits: &mut [T]) {
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

/// `range` in steps of at most [`ROWS`].
fn in_steps(range: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    range.clone().step_by(ROWS).map(move |start| start..(start + ROWS).min(range.end))
}

impl Round {
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

/// Everything that the support of one head is computed from.
struct Held<'a, T> {
    acc: &'a Positive<T>,
    state: &'a [T],
    q: MatRef<'a, T>,
    k: MatRef<'a, T>,
    v: MatRef<'a, T>,
    scale: T,
    cx: Context<'a>,
}

impl<T: Real> Held<'_, T> {
    /// Takes the estimate on a round's pairs out of `residual` (rows of `[num, den]`) and merges the exact scores into
    /// `out` and `lse`. Returns the number of pairs.
    fn exchange(&self, round: &Round, out: &mut [T], lse: &mut [T], residual: &mut [T]) -> u64 {
        let (cx, d_v, n) = (self.cx, self.v.cols(), round.rows.len());
        let mut exact = cx.scratch.take::<T>(n * d_v);
        let mut logs = cx.scratch.take::<T>(n);
        let mut taken = cx.scratch.take::<T>(n * (d_v + 1));
        // Tiles lie in the order of their rows, without gaps.
        let mut rest = (&mut exact[..], &mut logs[..], &mut taken[..]);
        let mut tasks = Vec::with_capacity(round.tiles.len());
        for tile in &round.tiles {
            let rows = tile.0.len();
            let (exact, tail) = rest.0.split_at_mut(rows * d_v);
            let (logs, log_tail) = rest.1.split_at_mut(rows);
            let (taken, taken_tail) = rest.2.split_at_mut(rows * (d_v + 1));
            rest = (tail, log_tail, taken_tail);
            tasks.push((tile, exact, logs, taken));
        }
        let visited = tasks
            .into_par_iter()
            .map(|((rows, keys), exact, logs, taken)| {
                self.tile(
                    &round.rows[rows.clone()],
                    &round.keys[keys.clone()],
                    &round.see,
                    exact,
                    logs,
                    taken,
                );
                (rows.len() * keys.len()) as u64
            })
            .sum();
        let mut place = vec![0u32; n];
        round.rows.iter().zip(0..).for_each(|(&i, p)| place[i as usize] = p);
        let (exact, logs, taken) = (&exact, &logs, &taken);
        out.par_chunks_mut(ROWS * d_v)
            .zip(lse.par_chunks_mut(ROWS))
            .zip(residual.par_chunks_mut(ROWS * (d_v + 1)))
            .zip(place.par_chunks(ROWS))
            .for_each(|(((out, lse), residual), place)| {
                let rows = out.chunks_exact_mut(d_v).zip(lse).zip(residual.chunks_exact_mut(d_v + 1));
                for (((out, lse), residual), &p) in rows.zip(place) {
                    let p = p as usize;
                    merge_lse(out, lse, &exact[p * d_v..(p + 1) * d_v], logs[p]);
                    let taken = &taken[p * (d_v + 1)..(p + 1) * (d_v + 1)];
                    residual.iter_mut().zip(taken).for_each(|(r, t)| *r -= *t);
                }
            });
        visited
    }

    /// Some rows over some keys: exactly, and by their features.
    fn tile(&self, rows: &[u32], keys: &[u32], see: &See, exact: &mut [T], logs: &mut [T], taken: &mut [T]) {
        let (cx, isa, scratch) = (self.cx, self.cx.schedule.isa, self.cx.scratch);
        let (n, n_k, d, d_v) = (rows.len(), keys.len(), self.q.cols(), self.v.cols());
        if n_k == 0 {
            logs.fill(T::NEG_INFINITY);
            taken.fill(T::ZERO);
            return;
        }
        let mut q = scratch.take::<T>(n * d);
        let mut k = scratch.take::<T>(n_k * d);
        let mut v = scratch.take::<T>(n_k * d_v);
        self.q.gather_into(rows.iter().map(|&i| i as usize), &mut q);
        self.k.gather_into(keys.iter().map(|&j| j as usize), &mut k);
        self.v.gather_into(keys.iter().map(|&j| j as usize), &mut v);
        let (q, k, v) = (MatRef::new(&q, n, d), MatRef::new(&k, n_k, d), MatRef::new(&v, n_k, d_v));
        let hide = |i: usize, logits: &mut [T]| {
            see.hide(rows[i], keys, logits);
            0..n_k
        };
        attend_tile(q, k, v, self.scale, cx, hide, exact, logs);

        let m = self.state.len() / (d_v + 3);
        let mut a = scratch.take::<T>(n_k * m);
        self.acc.features_of_held(self.state, k, &mut a, cx);
        let mut w = scratch.take::<T>(n * m);
        let mut shift = scratch.take::<T>(n);
        self.acc.weights(self.state, q, &mut w, &mut shift);
        let mut kernel = scratch.take::<T>(n * n_k);
        let (w, a) = (Op::N(MatRef::new(&w, n, m)), Op::T(MatRef::new(&a, n_k, m)));
        gemm(isa, T::ONE, w, a, T::ZERO, &mut kernel, n_k, scratch);
        if !matches!(see, See::All) {
            let mut seen = scratch.take::<T>(n_k);
            for (&row, kernel) in rows.iter().zip(kernel.chunks_exact_mut(n_k)) {
                seen.fill(T::ZERO);
                see.hide(row, keys, &mut seen);
                let hidden = kernel.iter_mut().zip(seen.iter()).filter(|(_, s)| **s == T::NEG_INFINITY);
                hidden.for_each(|(x, _)| *x = T::ZERO);
            }
        }
        for (kernel, taken) in kernel.chunks_exact(n_k).zip(taken.chunks_exact_mut(d_v + 1)) {
            taken[d_v] = attlas_num::kernels::sum(kernel);
        }
        let kernel = Op::N(MatRef::new(&kernel, n, n_k));
        gemm(isa, T::ONE, kernel, Op::N(v), T::ZERO, taken, d_v + 1, scratch);
    }
}

impl GroupPlan for Scatterbrain {
    fn cost(&self, p: &Problem) -> Cost {
        let rows = (p.batch * p.n_heads * p.n_q) as u64;
        let keys = (p.batch * p.n_kv_heads * p.n_k) as u64;
        let m = self.features();
        let sparse = match (self.params.sparse(p.mask), p.mask) {
            (Sparse::Lsh | Sparse::Auto, _) => self.params.rounds.saturating_mul(self.params.keys),
            (Sparse::Window, Mask::None) => self.params.keys.saturating_mul(2),
            (Sparse::Window, Mask::Causal) => self.params.keys.saturating_add(self.params.block() / 2),
            (Sparse::TopK, _) => self.params.keys,
        }
        .min(p.n_k);
        let search = match self.params.sparse(p.mask) {
            Sparse::TopK => 2 * p.n_k * p.d,
            Sparse::Lsh | Sparse::Auto => 2 * self.params.rounds * p.d,
            Sparse::Window => 0,
        };
        let far = m * p.d + 2 * m * (p.d_v + 1);
        let near = if p.mask == Mask::Causal { 2 * (p.d + p.d_v) } else { 2 * p.d + 2 * m + 4 * p.d_v };
        Cost {
            setup_flops: keys * far as u64,
            run_flops: rows * (far + search + sparse * near) as u64,
            bytes: 4 * (rows + keys) * (p.d + p.d_v) as u64,
        }
    }

    fn scratch_bytes(&self, p: &Problem, threads: usize, size: usize) -> usize {
        let m = self.features();
        let engine = linear::scratch_bytes(p, m, threads, size);
        if p.mask == Mask::Causal {
            let rows = threads * (ROWS * (p.d_v + 2) * size + 256);
            return engine + rows + exact_scratch_bytes(p, threads, size);
        }
        let seen = match self.params.sparse(p.mask) {
            Sparse::Window => self.params.keys.saturating_mul(2).saturating_add(ROWS),
            Sparse::TopK => p.n_k,
            Sparse::Lsh | Sparse::Auto => self.params.keys,
        }
        .min(p.n_k);
        let per_row = p.d + m + seen + 2;
        let per_tile = ROWS * per_row + seen * (p.d + p.d_v + m + 1) + m + tile_logits_len(seen) + 1024;
        let rows = p.n_q * (3 * (p.d_v + 1) + 3);
        engine + (rows + threads * per_tile) * size + exact_scratch_bytes(p, threads, size) + 1024
    }

    fn run<T: Real>(&self, mut g: Group<'_, T>) -> Result<RunInfo> {
        if g.n_k() == 0 || g.n_q() == 0 {
            return Ok(g.fill_empty());
        }
        if self.params.keys >= g.n_k().max(g.n_q()) {
            return Ok(RunInfo { status: Status::Exact, ..exact_group(&mut g)? });
        }
        let causal = g.mask == Mask::Causal;
        let Estimate { acc, error } = self.estimate((!causal).then_some(g.k), g.d_v(), g.index)?;
        let (n_q, m) = (g.n_q() * g.q.heads(), self.features());
        let mut info = RunInfo { rank: Some(m), ..RunInfo::default() };
        linear::report_features(&mut info, &g, m, Some(&error), self.params.target_error);
        if causal {
            info.empty_rows = (g.n_q().saturating_sub(g.n_k()) * g.q.heads()) as u64;
            info.keys_visited = self.run_causal(&mut g, &acc);
        } else {
            info.keys_visited = (n_q * m) as u64 + self.run_plain(&mut g, &acc);
        }
        let near = self.params.keys.max(1) + self.params.block() - 1;
        let held = self.state_len(g.d_v()).saturating_add(near.saturating_mul(self.d + g.d_v()));
        info.figures.insert("decode_bytes", (held as f64) * size_of::<T>() as f64);
        Ok(info)
    }

    fn stream<T: Real>(&self, p: &Problem, index: GroupIndex) -> Option<Box<dyn GroupStream<T>>> {
        let plan = self.clone();
        let acc = plan.estimate::<T>(None, p.d_v, index).ok()?.acc;
        let mut state = vec![T::ZERO; acc.state_len()];
        acc.clear(&mut state);
        Some(Box::new(Decoder { plan, acc, state, held: 0, k: Vec::new(), v: Vec::new(), d_v: p.d_v }))
    }
}

/// The state of far keys, and the near keys and values.
#[derive(Debug)]
struct Decoder<T> {
    plan: Scatterbrain,
    acc: Positive<T>,
    state: Vec<T>,
    held: usize,
    k: Vec<T>,
    v: Vec<T>,
    d_v: usize,
}

impl<T: Real> GroupStream<T> for Decoder<T> {
    fn push(&mut self, k: MatRef<'_, T>, v: MatRef<'_, T>, cx: Context<'_>) -> Result<()> {
        let (d, d_v) = (self.plan.d, self.d_v);
        for (k, v) in k.iter_rows().zip(v.iter_rows()) {
            let len = self.held + self.v.len() / d_v;
            if len.is_multiple_of(self.plan.params.block()) {
                let old = self.plan.params.near_from(len) - self.held;
                let (old_k, old_v) =
                    (MatRef::new(&self.k[..old * d], old, d), MatRef::new(&self.v[..old * d_v], old, d_v));
                absorb(&self.acc, &mut self.state, old_k, old_v, cx);
                self.k.drain(..old * d);
                self.v.drain(..old * d_v);
                self.held += old;
            }
            self.k.extend_from_slice(k);
            self.v.extend_from_slice(v);
        }
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
        let n = self.v.len() / self.d_v;
        let near = (MatRef::new(&self.k, n, self.plan.d), MatRef::new(&self.v, n, self.d_v));
        let rows = RowBlock { head: 0, first: 0, q, out, lse };
        attend_near(&self.acc, &self.state, self.held, near, scale, Band::ALL, rows, cx);
        Ok(RunInfo::visited((q.rows() * (n + self.plan.features())) as u64))
    }

    fn state_bytes(&self) -> usize {
        (self.state.len() + self.k.len() + self.v.len()) * size_of::<T>()
    }
}

#[cfg(test)]
mod tests;
