//! SMYRF: asymmetric lifts, random lines, and equal runs of sorted queries and keys.
//!
//! **Idea.** Lift queries and keys so that a large inner product becomes a small distance, project both on a random
//! line, sort, cut both orders into the same number of runs, and let each run of queries attend to the run of keys
//! of the same rank. Several rounds with independent lines are merged.
//!
//! **Math.** With $M_Q = \max |q_i|$, $M_K = \max |k_j|$ (norms, not squared), $M^2 = M_Q^2 + M_K^2$,
//! $F(q) = [q; 0; \sqrt{M^2 - |q|^2}]$ and $G(k) = [k; \sqrt{M^2 - |k|^2}; 0]$,
//! $|F(q) - G(k)|^2 = 2M^2 - 2\langle q, k\rangle$: the order is *reversed*, not kept. Round $h$ sorts
//! $\langle a_h, F(q_i)\rangle$ and $\langle a_h, G(k_j)\rangle$, $a_h \sim N(0, I_{d+2})$, and cuts both into
//! $L = \lceil n_k / \mathrm{block} \rceil$ balanced runs; query $i$ sees the keys of its run, $S_i^{(h)}$, with logits
//! $\tau \langle q_i, k_j \rangle$. `union` is the softmax over $\bigcup_h S_i^{(h)}$: a key counts only in the first
//! round that finds it. `multiset` counts a key once for each round: $o_i = \sum_h a_h(i)\, o_i^{(h)}$ with
//! $a_h(i) = e^{\ell_i^{(h)}} / \sum_t e^{\ell_i^{(t)}}$, where $\ell$ is a *log*-sum-exp; the weights depend on $i$.
//!
//! **Causal form.** Not in the paper. Sequences are halved: each half attends to itself recursively, exactly from
//! `min_len` tokens down, and the later half attends to the earlier one without a mask. A query's rank among the
//! queries of its own half would depend on later tokens, so it is taken among the queries of the *earlier* half (for a
//! chunk of queries with none before it, among the earlier keys, lifted as queries), and $M_Q$ likewise. No later token
//! then has an effect.
//!
//! **Reference.** daras2020; survey, clustering. The offsets and bucket widths of the paper's hash do not affect the
//! order and do not exist here. The authors merge as a multiset and leave out $\tau$ for their images.
//!
//! **Cost.** $2H(n_q + n_k)d$ for the projections, two sorts a round, $2 H n_q\, \mathrm{block}\,(d + d_v)$; scratch
//! $O(n(d + d_v + H))$. Causal: $n\, \mathrm{min\_len}/2 + (n/2) \log_2(n/\mathrm{min\_len})\, H\, \mathrm{block}$ pairs.
//!
//! **Guarantees.** Exact when `block` covers all keys. With `union`, $|o - \hat o| \le (1 - e^{\hat\ell - \ell})$ times
//! the spread of the values, and $\hat\ell$ does not fall as rounds are added; tested.
//!
//! **When to use.** Unmasked attention with clustered keys. The two added coordinates are noise of size $M$, so each
//! round finds few of the heavy keys when norms are large; no decoding, since one query has no rank.

use crate::engine::{
    BlockMask, BlockRow, Buckets, CodeIndex, Join, PerGroup, attend_buckets, exact_group, exact_rows,
};
use crate::group::{Group, GroupPlan};
use crate::method::{Accepted, Budget, Claims, Cost, Family, Law, Method, RunInfo, Spec, Status, Tunable};
use crate::workspace::Context;
use crate::{DType, Mask, MatRef, Problem, Real, Result, Spread};
use attlas_num::cluster::{Balanced, SortKey, order_by};
use attlas_num::hash::lift::{Lift, LiftedLines, Side, max_norm};
use attlas_num::kernels::{Band, merge_lse};
use attlas_num::par::*;
use std::ops::Range;

/// Registry entry.
pub static METHOD: Method = Method {
    id: "smyrf",
    family: Family::Clustering,
    title: "SMYRF: runs of queries and keys sorted by asymmetric hashing",
    reference: "daras2020",
    claims: Claims {
        exact_at: &[("block", Budget::NumKeys)],
        deterministic: false,
        drops: true,
        exponent: 1.0,
        except: &[
            (Law::QueriesAlone, "a query is paired with keys by its rank among the queries"),
            (Law::HeadsAlone, "the lift is taken over the queries of all heads of a group"),
        ],
        spread: Spread::RING,
        ..Claims::BASE
    },
    probes: &[
        &[("rounds", "3"), ("block", "9"), ("min_len", "16")],
        &[("rounds", "2"), ("block", "8"), ("merge", "multiset"), ("min_len", "24")],
    ],
    subsets: &[&[("rounds", "2"), ("block", "6"), ("min_len", "9")]],
    exact_below: Some("min_len"),
    tunable: &[Tunable::budget("block")],
    ..Method::of::<Params>()
};

crate::choices! {
    /// Weight of a key found in several rounds.
    pub enum Merge {
        /// Once: the softmax over the union of the rounds.
        Union = "union",
        /// Once for each round that finds it, as in the paper.
        Multiset = "multiset",
    }
}

crate::params! {
    /// Parameters of [`Smyrf`].
    pub struct Params {
        /// Number of independent lines.
        rounds: usize = 4, in 1..=64;
        /// Maximum number of keys in a run; queries are cut into the same number of runs.
        block: usize = 64, in 1..=1 << 30;
        /// Weight of a key found in several rounds.
        merge: Merge = Merge::Union;
        /// Causal problems: sequences of at most this length are not halved but attended exactly.
        min_len: usize = 1024, in 1..=1 << 30;
        /// Seed of the random lines.
        seed: u64 = 0, in 0..=u64::MAX;
    }
}

impl Spec for Params {
    const METHOD: &'static Method = &METHOD;

    fn build(self, x: Accepted<'_>) -> Result<impl GroupPlan> {
        Smyrf::new(x.problem, self)
    }
}

/// The plan: rounds, length of runs, merging, and the lines.
#[derive(Clone, Debug)]
pub struct Smyrf {
    params: Params,
    lines: PerGroup<LiftedLines<f64>>,
}

impl Smyrf {
    /// Creates a plan with these parameters; draws the lines.
    pub(crate) fn new(p: &Problem, params: Params) -> Result<Self> {
        let lines = PerGroup::draw(p, |index| {
            let key = index.stream_key(params.seed).named("smyrf");
            Ok(LiftedLines::new(key, p.d, params.rounds))
        })?;
        Ok(Self { params, lines })
    }

    fn runs(&self, keys: usize) -> usize {
        keys.div_ceil(self.params.block)
    }
}

impl GroupPlan for Smyrf {
    fn cost(&self, p: &Problem) -> Cost {
        let Params { rounds, block, min_len, .. } = self.params;
        let (heads, groups) = ((p.batch * p.n_heads) as u64, (p.batch * p.n_kv_heads) as u64);
        let seen = (rounds * block.min(p.n_k)) as u64;
        let levels = match p.mask {
            Mask::None => 1,
            Mask::Causal => u64::from((p.n_k.max(1) / min_len).max(1).ilog2()) + 1,
        };
        let exact = match p.mask {
            Mask::None => 0,
            Mask::Causal => heads * (p.n_q * min_len.min(p.n_k) / 2) as u64,
        };
        let lines = (rounds * p.d) as u64;
        let setup = 2 * lines * (heads * p.n_q as u64 + groups * p.n_k as u64) * levels;
        let pairs = heads * p.n_q as u64 * seen * levels + exact;
        Cost {
            setup_flops: setup,
            run_flops: 2 * pairs.min(p.visible_pairs().max(1) * rounds as u64) * (p.d + p.d_v) as u64,
            bytes: 4 * rounds as u64 * heads * (p.n_q + p.n_k) as u64 * (p.d + p.d_v) as u64,
        }
    }

    fn run<T: Real>(&self, mut g: Group<'_, T>) -> Result<RunInfo> {
        let one_run = self.runs(g.n_k()) <= 1;
        let short = g.mask == Mask::Causal && g.n_k() <= self.params.min_len;
        if one_run || short || g.n_q() == 0 {
            return Ok(RunInfo { status: Status::Exact, ..exact_group(&mut g)? });
        }
        let lines = self.lines.of(g.index).cast::<T>();
        g.out.fill(T::ZERO);
        g.lse.fill(T::NEG_INFINITY);
        let mut visited = 0;
        let heads: Vec<MatRef<'_, T>> = (0..g.q.heads()).map(|h| g.q.head(h)).collect();
        let n_q = g.n_q();
        match g.mask {
            Mask::None => {
                let keys = KeySide::new(self, &lines, g.k, g.v, 0..g.n_k(), &heads, g.cx);
                visited += self.attend_all(&mut g, &keys, &heads, None, 0..n_q);
            }
            Mask::Causal => {
                // Query i is at position i + shift; positions before `first` have keys but no queries.
                let shift = g.n_k() as isize - n_q as isize;
                let first = shift.max(0) as usize;
                let row = |position: usize| (position as isize - shift) as usize;
                if first > 0 {
                    let past = g.k.sub_rows(0..first);
                    let keys = KeySide::new(self, &lines, g.k, g.v, 0..first, &[past], g.cx);
                    let likeness = vec![past; heads.len()];
                    visited += self.attend_all(&mut g, &keys, &heads, Some(&likeness), row(first)..n_q);
                }
                for part in halve(first..g.n_k(), self.params.min_len) {
                    match part {
                        CausalPiece::Square(range) => {
                            let rows = row(range.start)..row(range.end);
                            visited += exact_part(&mut g, rows, range);
                        }
                        CausalPiece::Later { keys, queries } => {
                            let rows = row(queries.start)..row(queries.end);
                            let past = row(keys.start)..row(keys.end);
                            let earlier: Vec<_> = heads.iter().map(|q| q.sub_rows(past.clone())).collect();
                            let keys = KeySide::new(self, &lines, g.k, g.v, keys, &earlier, g.cx);
                            visited += self.attend_all(&mut g, &keys, &heads, Some(&earlier), rows);
                        }
                    }
                }
            }
        }
        let empty_rows = g.lse.iter().filter(|l| **l == T::NEG_INFINITY).count() as u64;
        Ok(RunInfo { keys_visited: visited, empty_rows, ..RunInfo::default() })
    }
}

/// A piece of causal attention over positions.
#[derive(Debug, PartialEq)]
enum CausalPiece {
    /// Exact causal attention of these positions to themselves.
    Square(Range<usize>),
    /// Later positions attend to all of the earlier ones.
    Later { keys: Range<usize>, queries: Range<usize> },
}

/// Splits causal attention over `range` into pieces, halved down to `min_len`.
fn halve(range: Range<usize>, min_len: usize) -> Vec<CausalPiece> {
    if range.len() <= min_len {
        return vec![CausalPiece::Square(range)];
    }
    let middle = range.start + range.len() / 2;
    let mut parts = halve(range.start..middle, min_len);
    parts.extend(halve(middle..range.end, min_len));
    parts.push(CausalPiece::Later { keys: range.start..middle, queries: middle..range.end });
    parts
}

/// Rows of exact attention per task.
const EXACT_ROWS: usize = 192;

/// Merges exact causal attention of `rows` to the keys `range`, whose last key is at the position of the last row.
fn exact_part<T: Real>(g: &mut Group<'_, T>, rows: Range<usize>, range: Range<usize>) -> u64 {
    let (n_q, d_v, heads) = (g.n_q(), g.d_v(), g.q.heads());
    let (k, v, scale, cx) = (g.k.sub_rows(range.clone()), g.v.sub_rows(range.clone()), g.scale, g.cx);
    let band = Band::causal(0);
    let mut visited = 0;
    for h in 0..heads {
        let q = g.q.head(h);
        let at = h * n_q + rows.start..h * n_q + rows.end;
        g.out[at.start * d_v..at.end * d_v]
            .par_chunks_mut(EXACT_ROWS * d_v)
            .zip(g.lse[at].par_chunks_mut(EXACT_ROWS))
            .enumerate()
            .for_each(|(t, (out, lse))| {
                let first = t * EXACT_ROWS;
                let q = q.sub_rows(rows.start + first..rows.start + first + lse.len());
                let band = band.from_row(first);
                let mut o = cx.scratch.take::<T>(out.len());
                let mut l = cx.scratch.take::<T>(lse.len());
                exact_rows(q, k, v, None, scale, band, cx, &mut o, &mut l);
                for (((out, lse), o), &l) in
                    out.chunks_exact_mut(d_v).zip(lse).zip(o.chunks_exact(d_v)).zip(l.iter())
                {
                    merge_lse(out, lse, o, l);
                }
            });
        visited += (0..rows.len()).map(|i| band.range(i, range.len()).len() as u64).sum::<u64>();
    }
    visited
}

/// The keys of one unmasked part, sorted for every round.
struct KeySide<'a, T> {
    k: MatRef<'a, T>,
    v: MatRef<'a, T>,
    lines: &'a LiftedLines<T>,
    lift: Lift,
    runs: Balanced,
    /// Positions in `k`, one order for each round.
    orders: Vec<Vec<u32>>,
    /// Run of every key, `n × rounds`.
    cells: Vec<u32>,
}

impl<'a, T: Real> KeySide<'a, T> {
    /// Sorts the keys `range` for queries whose norms are at most those of `like`.
    fn new(
        plan: &Smyrf,
        lines: &'a LiftedLines<T>,
        k: MatRef<'a, T>,
        v: MatRef<'a, T>,
        range: Range<usize>,
        like: &[MatRef<'_, T>],
        cx: Context<'_>,
    ) -> Self {
        let (k, v) = (k.sub_rows(range.clone()), v.sub_rows(range));
        let max_q = like.iter().map(|q| max_norm(*q)).fold(0.0, f64::max);
        let lift = Lift::from_max_norms(max_q, max_norm(k));
        let runs = Balanced::new(k.rows(), plan.runs(k.rows()));
        let projections = project(lines, lift, Side::Key, k, cx);
        let rounds = lines.rounds();
        let orders: Vec<Vec<u32>> =
            (0..rounds).into_par_iter().map(|r| order_by(&column(&projections, rounds, r))).collect();
        let of_key: Vec<Vec<u32>> = orders
            .par_iter()
            .map(|order| {
                let mut of_key = vec![0; order.len()];
                for (c, range) in runs.iter().enumerate() {
                    order[range].iter().for_each(|&j| of_key[j as usize] = c as u32);
                }
                of_key
            })
            .collect();
        Self { k, v, lines, lift, runs, orders, cells: by_row(&of_key) }
    }
}

/// Transposes per-round lists for `n` rows into one table, `n × rounds`, with the entries of a row contiguous.
fn by_row(rounds: &[Vec<u32>]) -> Vec<u32> {
    let (n, width) = (rounds.first().map_or(0, Vec::len), rounds.len());
    let mut table = vec![0; n * width];
    table.par_chunks_mut(PROJECT_ROWS * width.max(1)).enumerate().for_each(|(t, table)| {
        for (i, row) in (t * PROJECT_ROWS..).zip(table.chunks_exact_mut(width)) {
            row.iter_mut().zip(rounds).for_each(|(cell, round)| *cell = round[i]);
        }
    });
    table
}

/// Maps the projections of one round to integers in the same order.
fn column<T: Real>(table: &[T], rounds: usize, r: usize) -> Vec<u64> {
    let bits = |x: &T| match T::DTYPE {
        DType::F32 => (x.to_f64() as f32).sort_bits(),
        DType::F64 => x.to_f64().sort_bits(),
    };
    table.iter().skip(r).step_by(rounds).map(bits).collect()
}

/// Projects the lifted rows, `n × rounds`.
fn project<'s, T: Real>(
    lines: &LiftedLines<T>,
    lift: Lift,
    side: Side,
    x: MatRef<'_, T>,
    cx: Context<'s>,
) -> attlas_num::scratch::Buf<'s, T> {
    let rounds = lines.rounds();
    let mut out = cx.scratch.take::<T>(x.rows() * rounds);
    out.par_chunks_mut(PROJECT_ROWS * rounds).enumerate().for_each(|(t, out)| {
        let x = x.sub_rows(t * PROJECT_ROWS..t * PROJECT_ROWS + out.len() / rounds);
        lines.project_rounds_into(side, x, &lift.heights(x), out);
    });
    out
}

/// Rows that a task projects.
const PROJECT_ROWS: usize = 2048;

impl Smyrf {
    /// Merges the attention of `rows` of every head to sorted keys; `like` holds, per head, the queries that define
    /// ranks if these are not the rows themselves.
    fn attend_all<T: Real>(
        &self,
        g: &mut Group<'_, T>,
        keys: &KeySide<'_, T>,
        heads: &[MatRef<'_, T>],
        like: Option<&[MatRef<'_, T>]>,
        rows: Range<usize>,
    ) -> u64 {
        let (n_q, d_v, scale, cx) = (g.n_q(), g.d_v(), g.scale, g.cx);
        let mut visited = 0;
        for (h, q) in heads.iter().enumerate() {
            let at = h * n_q + rows.start..h * n_q + rows.end;
            let out = &mut g.out[at.start * d_v..at.end * d_v];
            let like = like.map(|like| like[h]);
            visited += self.attend(q.sub_rows(rows.clone()), like, keys, scale, cx, out, &mut g.lse[at]);
        }
        visited
    }

    /// Merges the attention of the rows `q` to sorted keys into `out` and `lse`.
    #[allow(clippy::too_many_arguments)]
    fn attend<T: Real>(
        &self,
        q: MatRef<'_, T>,
        like: Option<MatRef<'_, T>>,
        keys: &KeySide<'_, T>,
        scale: T,
        cx: Context<'_>,
        out: &mut [T],
        lse: &mut [T],
    ) -> u64 {
        let rounds = keys.lines.rounds();
        let count = keys.runs.blocks();
        let projections = project(keys.lines, keys.lift, Side::Query, q, cx);
        let ranks = like.map(|like| project(keys.lines, keys.lift, Side::Query, like, cx));
        let (blocks, in_blocks): (Vec<Vec<u32>>, Vec<Buckets>) = (0..rounds)
            .into_par_iter()
            .map(|r| {
                let own = column(&projections, rounds, r);
                let blocks = match &ranks {
                    None => runs_by_rank(&own, count),
                    Some(ranks) => runs_among(&own, &column(ranks, rounds, r), count),
                };
                let round = Buckets::from_blocks(&blocks, count);
                (blocks, round)
            })
            .collect();
        let cells = by_row(&blocks);
        drop(blocks);
        let mut visited = 0;
        for (r, round) in in_blocks.iter().enumerate() {
            let union = self.params.merge == Merge::Union;
            let block_mask = Runs { keys, cells: &cells, round: r, union };
            visited +=
                attend_buckets(&block_mask, round, q, keys.k, keys.v, scale, Join::LogSumExp, cx, out, lse);
        }
        visited
    }
}

/// Sorts the elements, cuts them into `count` balanced runs and returns each element's run.
fn runs_by_rank<T: SortKey>(x: &[T], count: usize) -> Vec<u32> {
    let runs = Balanced::new(x.len(), count);
    let mut cells = vec![0; x.len()];
    let order = order_by(x);
    for (c, range) in runs.iter().enumerate() {
        order[range].iter().for_each(|&i| cells[i as usize] = c as u32);
    }
    cells
}

/// Returns the run of `like` that each element would fall into.
fn runs_among<T: SortKey>(x: &[T], like: &[T], count: usize) -> Vec<u32> {
    let mut sorted: Vec<u64> = like.iter().map(|y| y.sort_bits()).collect();
    sorted.sort_unstable();
    let runs = Balanced::new(sorted.len(), count);
    let cell = |x: &T| {
        let rank = sorted.partition_point(|&y| y < x.sort_bits()).min(sorted.len() - 1);
        runs.block_of(rank) as u32
    };
    x.iter().map(cell).collect()
}

/// A round: each run of queries attends to the run of keys with the same index.
struct Runs<'a, T> {
    keys: &'a KeySide<'a, T>,
    /// Run of every query, `n × rounds`.
    cells: &'a [u32],
    round: usize,
    union: bool,
}

/// Runs of a block's keys and of its queries in earlier rounds.
struct Earlier {
    of_keys: CodeIndex,
    /// `queries × rounds before`.
    of_queries: Vec<u32>,
}

impl<T: Real> BlockMask<T> for Runs<'_, T> {
    type Block = Earlier;

    fn keys(&self, b: usize) -> Vec<u32> {
        self.keys.orders[self.round][self.keys.runs.range(b)].to_vec()
    }

    fn enter(&self, _: usize, queries: &[u32], keys: &[u32]) -> Option<Earlier> {
        if !self.union || self.round == 0 {
            return None;
        }
        let codes = self.earlier(&self.keys.cells, keys);
        let mut of_keys = CodeIndex::new(codes.len());
        for (place, codes) in codes.chunks_exact(self.round).enumerate() {
            codes.iter().for_each(|&code| of_keys.insert(code, place));
        }
        Some(Earlier { of_keys, of_queries: self.earlier(self.cells, queries) })
    }

    fn see(&self, block: &Earlier, row: BlockRow, keys: &[u32], logits: &mut [T]) -> Range<usize> {
        for &code in &block.of_queries[row.place * self.round..(row.place + 1) * self.round] {
            block.of_keys.for_each(code, |place| logits[place] = T::NEG_INFINITY);
        }
        0..keys.len()
    }
}

impl<T: Real> Runs<'_, T> {
    /// Returns the codes of the runs of some rows of a table before this round, read in one loop: the table exceeds the
    /// nearest cache, and no load has to wait for another.
    fn earlier(&self, table: &[u32], rows: &[u32]) -> Vec<u32> {
        let (rounds, runs) = (self.keys.lines.rounds(), self.keys.runs.blocks() as u32);
        let mut codes = Vec::with_capacity(rows.len() * self.round);
        for &i in rows {
            let cells = &table[i as usize * rounds..][..self.round];
            codes.extend(cells.iter().zip(0..).map(|(cell, t)| t * runs + cell));
        }
        codes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testkit::workloads::{assert_within, clustered, measure};
    use crate::testkit::{Case, assert_rows_close, check_method, reference, reference_masked, run_method};
    use crate::{Mat, Options, Workspace};
    use attlas_num::rng::StreamKey;

    #[test]
    fn honours_the_contract() {
        check_method(&METHOD);
    }

    /// The runs of every query and key, by the definition: sorted lifted projections.
    fn runs_of(case: &Case, rounds: usize, block: usize) -> Vec<(Vec<u32>, Vec<u32>)> {
        let p = &case.problem;
        let (q, k) = (MatRef::new(&case.q, p.n_q, p.d), MatRef::new(&case.k, p.n_k, p.d));
        let key = StreamKey::new(0).with(0).with(0).named("smyrf");
        let lines = LiftedLines::<f64>::new(key, p.d, rounds);
        let lift = Lift::new(q, k);
        let count = p.n_k.div_ceil(block);
        (0..rounds)
            .map(|r| {
                let x = lines.project(Side::Query, q, &lift.heights(q), r);
                let y = lines.project(Side::Key, k, &lift.heights(k), r);
                (runs_by_rank(&x, count), runs_by_rank(&y, count))
            })
            .collect()
    }

    #[test]
    fn a_union_is_the_softmax_over_all_keys_met() {
        let p = Problem { d_v: 3, ..Problem::new(1, 1, 6).with_lens(90, 131) };
        let case = Case::gaussian(p, 1);
        for rounds in [1, 2, 5] {
            let runs = runs_of(&case, rounds, 16);
            let met = |i: usize, j: usize| runs.iter().filter(|(q, k)| q[i] == k[j]).count();
            let options = Options::new().with("rounds", rounds).with("block", 16);
            let (o, lse) = run_method(&METHOD, &options, &case);
            let (want, want_lse) = reference_masked(&case, |i, j| met(i, j) > 0);
            assert_rows_close(&o, &want, 1e-12, "union");
            assert_rows_close(&lse, &want_lse, 1e-12, "union");
            // A multiset adds to a logit the logarithm of the number of rounds that find the pair.
            let (o, lse) = run_method(&METHOD, &options.with("merge", "multiset"), &case);
            let (want, want_lse) =
                crate::testkit::reference_weights(&case, |i, j, s| s + (met(i, j) as f64).ln());
            assert_rows_close(&o, &want, 1e-12, "multiset");
            assert_rows_close(&lse, &want_lse, 1e-12, "multiset");
        }
    }

    #[test]
    fn the_error_is_bounded_by_the_lost_mass_which_falls_with_rounds() {
        let case = Case::gaussian(Problem::new(1, 300, 8), 2);
        let (exact, exact_lse) = reference(&case);
        let spread = 2.0 * case.v.iter().fold(0.0f64, |a, v| a.max(v.abs())) * 8f64.sqrt();
        let mut last = vec![f64::NEG_INFINITY; 300];
        for rounds in [1usize, 2, 4, 8] {
            let options = Options::new().with("rounds", rounds).with("block", 32);
            let (o, lse) = run_method(&METHOD, &options, &case);
            for i in 0..300 {
                assert!(lse[i] >= last[i] - 1e-12 && lse[i] <= exact_lse[i] + 1e-12);
                let lost = 1.0 - (lse[i] - exact_lse[i]).exp();
                let gap: f64 = (0..8).map(|c| (o[i * 8 + c] - exact[i * 8 + c]).powi(2)).sum::<f64>().sqrt();
                assert!(gap <= lost * spread + 1e-12);
            }
            last = lse;
        }
    }

    /// Runs one head on given lines.
    fn with_lines(
        q: &Mat<f64>,
        k: &Mat<f64>,
        v: &Mat<f64>,
        lines: &Mat<f64>,
        merge: Merge,
    ) -> (Vec<f64>, Vec<f64>) {
        let lines = LiftedLines::from_directions(lines.as_ref()).unwrap();
        let params = Params { block: 10, merge, ..Params::default() };
        let plan = Smyrf::new(&Problem::new(1, q.rows(), q.cols()), params).unwrap();
        let ws = Workspace::single().unwrap();
        let n = q.rows();
        let (mut out, mut lse) = (vec![0.0; n * v.cols()], vec![f64::NEG_INFINITY; n]);
        let keys =
            KeySide::new(&plan, &lines, k.as_ref(), v.as_ref(), 0..k.rows(), &[q.as_ref()], ws.context());
        plan.attend(q.as_ref(), None, &keys, 0.5, ws.context(), &mut out, &mut lse);
        (out, lse)
    }

    fn gaussian(seed: u64, rows: usize, cols: usize) -> Mat<f64> {
        let mut m = Mat::zeros(rows, cols);
        StreamKey::new(seed).rng().fill_normal(m.data_mut());
        m
    }

    #[test]
    fn equal_rounds_give_one_round() {
        let (q, k, v, a) = (gaussian(1, 60, 5), gaussian(2, 60, 5), gaussian(3, 60, 4), gaussian(4, 1, 7));
        let thrice = Mat::from_fn(3, 7, |_, c| a[(0, c)]);
        let (one, one_lse) = with_lines(&q, &k, &v, &a, Merge::Union);
        let (union, union_lse) = with_lines(&q, &k, &v, &thrice, Merge::Union);
        let (multiset, multiset_lse) = with_lines(&q, &k, &v, &thrice, Merge::Multiset);
        assert_rows_close(&union, &one, 0.0, "union");
        assert_rows_close(&union_lse, &one_lse, 0.0, "union");
        assert_rows_close(&multiset, &one, 1e-14, "multiset");
        let shifted: Vec<f64> = one_lse.iter().map(|l| l + 3f64.ln()).collect();
        assert_rows_close(&multiset_lse, &shifted, 1e-14, "multiset");
    }

    #[test]
    fn a_common_rotation_of_everything_changes_nothing() {
        let (q, k, v, a) = (gaussian(5, 60, 5), gaussian(6, 70, 5), gaussian(7, 70, 4), gaussian(8, 3, 7));
        // A reflection in the plane orthogonal to u acts on the first five coordinates.
        let u = [0.5, -0.5, 0.1, 0.7, 0.0];
        let size: f64 = u.iter().map(|x| x * x).sum();
        let turn = |m: &Mat<f64>| {
            let along: Vec<f64> =
                (0..m.rows()).map(|i| (0..5).map(|c| u[c] * m[(i, c)]).sum::<f64>() * 2.0 / size).collect();
            Mat::from_fn(m.rows(), m.cols(), |i, c| m[(i, c)] - if c < 5 { along[i] * u[c] } else { 0.0 })
        };
        let (o, lse) = with_lines(&q, &k, &v, &a, Merge::Union);
        let (turned, turned_lse) = with_lines(&turn(&q), &turn(&k), &v, &turn(&a), Merge::Union);
        assert_rows_close(&turned, &o, 1e-12, "outputs");
        assert_rows_close(&turned_lse, &lse, 1e-12, "log-sum-exp");
    }

    #[test]
    fn the_order_of_the_keys_does_not_matter() {
        let p = Problem::new(1, 97, 16);
        let case = Case::gaussian(p, 10);
        let reverse = |x: &[f64]| x.chunks(16).rev().flatten().copied().collect::<Vec<f64>>();
        let turned = Case { k: reverse(&case.k), v: reverse(&case.v), ..case.clone() };
        for merge in ["union", "multiset"] {
            let options = Options::new().with("block", 9).with("merge", merge);
            let (a, b) = (run_method(&METHOD, &options, &case), run_method(&METHOD, &options, &turned));
            assert_rows_close(&b.0, &a.0, 1e-12, merge);
        }
    }

    #[test]
    fn halving_covers_every_pair_once() {
        for (n, min_len) in [(1, 1), (7, 2), (64, 8), (100, 9)] {
            let mut seen = vec![0; n * n];
            for part in halve(0..n, min_len) {
                match part {
                    CausalPiece::Square(r) => {
                        assert!(r.len() <= min_len);
                        r.clone().for_each(|i| (r.start..=i).for_each(|j| seen[i * n + j] += 1));
                    }
                    CausalPiece::Later { keys, queries } => {
                        queries.for_each(|i| keys.clone().for_each(|j| seen[i * n + j] += 1));
                    }
                }
            }
            assert!((0..n).all(|i| (0..n).all(|j| seen[i * n + j] == usize::from(j <= i))));
        }
    }

    #[test]
    fn clustered_tokens_give_the_reference_figures() {
        let options = |h: usize, c: usize, merge: &str| {
            Options::new().with("rounds", h).with("block", c).with("merge", merge)
        };
        for (h, c, merge, error, mass) in
            [(4, 64, "multiset", 0.206, 0.39), (4, 64, "union", 0.200, 0.33), (8, 128, "union", 0.072, 0.78)]
        {
            let q = measure(&METHOD, &options(h, c, merge), clustered, 3);
            assert_within(q.error, error, 0.15, &format!("error, {h} × {c} {merge}"));
            assert_within(q.mass, mass, 0.15, &format!("mass, {h} × {c} {merge}"));
        }
    }
}
