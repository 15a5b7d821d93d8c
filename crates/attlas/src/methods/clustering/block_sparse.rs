//! Block-sparse attention: blocks of rows choose blocks of keys by a cheap score, until a share of it is reached.
//!
//! **Idea.** A block of rows attends to whole blocks of keys. It chooses them by an estimate of their weight: from
//! means, from sums along antidiagonals, which cross every vertical and every slanted line of the matrix, or from the
//! exact weights of a few scout rows. Sinks and a window are exact; blocks that are not taken count as their means.
//!
//! **Math.** A block begins at row $i_0$; its far keys are $[s, i_0 - w)$, cut into aligned blocks $C$. For each query head
//! of the group a score gives shares $a_C$ of the weight, the rest belonging to sinks and near keys; shares are summed over
//! heads. `means`: $a_C \propto |C| e^{\tau \langle \bar q, \bar k_C \rangle}$ for the mean $\bar q$ of the last $B$ queries up to
//! row $i_0$, beside the exact weights of $\bar q$ for near keys. `antidiagonal` (stride $S$): of the last $B$ rows up to $i_0$,
//! each group $g$ of $S$ rows scores each aligned group $t$ of $S$ keys by
//! $\tfrac{\tau}{S} \sum_{l<S} \langle q_{g, S-1-l}, k_{t,l} \rangle$; softmax over $t$, summed over $g$ and over the groups in
//! $C$. `scouts`: $a_C = \sum_{j \in C} p_j$ over the scouts of `sampled_columns`. Blocks are taken in order of $a_C$ until sinks,
//! near keys and taken blocks hold `threshold` of the total.
//!
//! **Decoding.** Each token scores blocks by their means and takes them by the same rule.
//!
//! **Reference.** xu2025 (XAttention: antidiagonal scores, threshold on their cumulative sum); jiang2024 (block
//! patterns by means). Departures: the choice uses no row later than the block's first, whereas the paper scores the
//! block itself; a group shares the choice; blocks that are not taken keep their mass as means (`far = none` drops them
//! as published).
//!
//! **Cost.** Scores, as a share of exact ones: $1/B$ (`means`), $1/S$ (`antidiagonal`), `scouts`$/B$; then
//! $2 (d + d_v)$ for each taken key and each mean.
//!
//! **Guarantees.** Exact at `threshold` = 1. Weights are non-negative and sum to one. A row depends only on queries up
//! to the first row of its block and on keys up to itself. `error_estimate` as in `sampled_columns`.
//!
//! **When to use.** As the yardstick of `sampled_columns`: whole blocks are simpler to read but need two to three times
//! the keys for the same error.

use crate::engine::{
    KeyPages, NearField, Operands, PackedKeys, PageRule, PageScore, QueryBlock, RunMeans, Scored,
    add_sampled_error, attend_chosen_blocks, exact_group_with,
};
use crate::group::{Group, GroupIndex, GroupPlan, GroupStream};
use crate::method::{Accepted, Budget, Claims, Cost, Family, Law, Method, RunInfo, Spec, Status, Tunable};
use crate::{Mask, MatRef, Problem, Real, Result, Spread};
use attlas_num::kernels::{Op, axpy, dot, exp_sum, gemm, max, sum};

/// Registry entry.
pub static METHOD: Method = Method {
    id: "block_sparse",
    family: Family::Clustering,
    title: "Block-sparse attention by means, antidiagonals or scouts (XAttention)",
    reference: "xu2025, jiang2024",
    claims: Claims {
        decode: true,
        exact_at: &[("threshold", Budget::Value(1.0))],
        except: &[
            (Law::KeyOrder, "sinks, window and blocks are taken by position"),
            (Law::HeadsAlone, "the heads of a group choose their blocks together"),
            (Law::QueriesAlone, "blocks are chosen by earlier rows, once for a block of rows"),
            (Law::DecodeIsPrefill, "a decoded token chooses for itself, by means"),
        ],
        spread: Spread::RANKS_KEYS,
        ..Claims::BASE
    },
    probes: &[
        &[("block", "8"), ("window", "8"), ("stride", "4"), ("threshold", "0.5"), ("sinks", "2")],
        &[("block", "6"), ("window", "0"), ("score", "means"), ("threshold", "0.7"), ("far", "none")],
        &[("block", "8"), ("window", "3"), ("score", "scouts"), ("threshold", "0.8"), ("sinks", "0")],
    ],
    tunable: &[Tunable::values("threshold", &["0.5", "0.7", "0.95", "0.99"])],
    ..Method::of::<Params>()
};

impl Spec for Params {
    const METHOD: &'static Method = &METHOD;

    fn build(self, _: Accepted<'_>) -> Result<impl GroupPlan> {
        Ok(BlockSparse::new(self))
    }
}

crate::choices! {
    /// Score of the blocks of keys.
    pub enum Score {
        /// Mean query with mean key.
        Means = "means",
        /// Sums along antidiagonals.
        Antidiagonal = "antidiagonal",
        /// Exact weights of scout rows.
        Scouts = "scouts",
    }
}

crate::choices! {
    /// Treatment of blocks that are not taken.
    pub enum Far {
        /// They are left out, as published.
        None = "none",
        /// Each is one pseudo key at its mean.
        Mean = "mean",
    }
}

crate::params! {
    /// Parameters of [`BlockSparse`].
    pub struct Params {
        /// Share of the scored weight that is attended exactly.
        threshold: f64 = 0.9, in 0.0..=1.0;
        /// Score of the blocks of keys.
        score: Score = Score::Antidiagonal;
        /// Rows and keys per group along an antidiagonal.
        stride: usize = 16, in 1..=1 << 16;
        /// Scout rows per block, with score = scouts.
        scouts: usize = 4, in 1..=1 << 20;
        /// Rows that share a choice, and keys per block.
        block: usize = 64, in 1..=1 << 20;
        /// Keys at the start that every row sees exactly.
        sinks: usize = 4, in 0..=1 << 30;
        /// Keys before the first row of a block that its rows see exactly.
        window: usize = 64, in 0..=1 << 30;
        /// Treatment of blocks that are not taken.
        far: Far = Far::Mean;
        /// Rows of each head on which the error of a run is measured; 0 for none.
        check_rows: usize = 8, in 0..=1 << 20;
        /// Precision of the operands: full, or bf16 with sums in single precision; scores and decoding are in full
        /// precision.
        precision: Operands = Operands::Full;
    }
}

/// The plan: sizes of blocks, near field and choice.
#[derive(Clone, Debug)]
pub struct BlockSparse {
    params: Params,
}

impl BlockSparse {
    /// Creates a plan with these parameters.
    pub(crate) fn new(params: Params) -> Self {
        Self { params }
    }

    fn field(&self) -> NearField {
        let Params { block, sinks, window, .. } = self.params;
        NearField { block, sinks, window }
    }
}

impl GroupPlan for BlockSparse {
    fn cost(&self, p: &Problem) -> Cost {
        let Params { block, stride, scouts, score, .. } = self.params;
        let pairs = p.visible_pairs() as f64;
        let share = match score {
            Score::Means => 1.0 / block as f64,
            Score::Antidiagonal => 1.0 / stride as f64,
            Score::Scouts => (scouts as f64 / block as f64).min(1.0),
        };
        // The number of blocks taken depends on the data; a tenth is typical.
        let taken = (0.1 * pairs).max(1.0);
        Cost {
            setup_flops: 2 * (share * pairs * p.d as f64) as u64,
            run_flops: 2 * (taken * (p.d + p.d_v) as f64) as u64,
            bytes: (4.0 * taken / block as f64 * (p.d + p.d_v) as f64) as u64,
        }
    }

    fn run<T: Real>(&self, mut g: Group<'_, T>) -> Result<RunInfo> {
        let precision = self.params.precision.precision();
        let most = self.field().most_far(g.mask, g.n_q(), g.n_k());
        if most == 0 || self.params.threshold >= 1.0 {
            return Ok(RunInfo { status: Status::Exact, ..exact_group_with(&mut g, precision)? });
        }
        let mut means = RunMeans::new(self.params.block, 1, g.k.cols(), g.d_v());
        means.extend(g.k, g.v);
        let used = (self.params.far == Far::Mean).then_some(&means);
        let packed = (self.params.score == Score::Scouts).then(|| PackedKeys::new(g.k, g.cx));
        let scored = Scored { q: g.q, k: g.k, packed: packed.as_ref(), scale: g.scale, cx: g.cx };
        let choice = Choice { params: &self.params, mask: g.mask, scored, n_q: g.n_q() };
        let mut info = attend_chosen_blocks(&mut g, self.field(), used, precision, |query_block| {
            choice.choose(query_block)
        })?;
        add_sampled_error(&g, self.params.check_rows, &mut info);
        Ok(info)
    }

    fn stream<T: Real>(&self, p: &Problem, _: GroupIndex) -> Option<Box<dyn GroupStream<T>>> {
        let Params { block, sinks, window, threshold, far, .. } = self.params;
        let rule = PageRule {
            score: PageScore::Mean,
            page: block,
            run: block,
            keys: usize::MAX,
            share: threshold,
            sinks,
            window,
            means: far == Far::Mean,
        };
        Some(KeyPages::stream(rule, p.d, p.d_v))
    }
}

/// Chooses keys by the parameters of a plan.
#[derive(Clone, Copy, Debug)]
struct Choice<'a, T> {
    params: &'a Params,
    mask: Mask,
    scored: Scored<'a, T>,
    n_q: usize,
}

impl<T: Real> Choice<'_, T> {
    /// Returns the keys of the chosen blocks in increasing order, and the number of scores computed.
    fn choose(&self, query_block: &QueryBlock) -> (Vec<u32>, u64) {
        let block = self.params.block;
        // Only far keys count towards the shares of the blocks; the rest of the total is near.
        let mut shares = vec![0.0f64; query_block.end.div_ceil(block)];
        let (total, scored) = match self.params.score {
            Score::Means => self.by_means(query_block, &mut shares),
            Score::Antidiagonal => self.by_antidiagonals(query_block, &mut shares),
            Score::Scouts => self.by_scouts(query_block, &mut shares),
        };
        let far = |c: usize| {
            let keys = c * block..(c + 1) * block;
            query_block.far().map(|far| keys.start.max(far.start)..keys.end.min(far.end))
        };
        let mut order: Vec<usize> =
            (0..shares.len()).filter(|&c| far(c).iter().any(|r| !r.is_empty())).collect();
        let mut covered = total - order.iter().map(|&c| shares[c]).sum::<f64>();
        // NaN scores come first, so that nothing is left out silently.
        let key = |c: usize| if shares[c].is_nan() { f64::INFINITY } else { shares[c] };
        order.sort_by(|&a, &b| key(b).total_cmp(&key(a)).then(a.cmp(&b)));
        let wanted = self.params.threshold * total;
        let enough = order.iter().take_while(|&&c| {
            let short = covered.partial_cmp(&wanted).is_none_or(|order| order.is_lt());
            covered += shares[c];
            short
        });
        let enough = enough.count();
        order.truncate(enough);
        order.sort_unstable();
        (order.into_iter().flat_map(|c| far(c).into_iter().flatten()).map(|j| j as u32).collect(), scored)
    }

    /// Rows that score: the last ones up to the block's first row; without a mask, the block's own.
    fn rows(&self, query_block: &QueryBlock) -> std::ops::Range<usize> {
        match self.mask {
            Mask::Causal => (query_block.first + 1).saturating_sub(self.params.block)..query_block.first + 1,
            Mask::None => query_block.first..(query_block.first + query_block.rows).min(self.n_q),
        }
    }

    fn by_scouts(&self, query_block: &QueryBlock, shares: &mut [f64]) -> (f64, u64) {
        let block = self.params.block;
        let scouts = query_block.scouts(self.params.scouts, block);
        let mut total = 0.0;
        let visited = self.scored.weights(query_block, &scouts, |_, start, weights, share| {
            let end = start + weights.len();
            for c in start / block..end.div_ceil(block) {
                let keys = (c * block).max(start)..((c + 1) * block).min(end);
                let mass = (sum(&weights[keys.start - start..keys.end - start]) * share).to_f64();
                shares[c] += mass;
                total += mass;
            }
        });
        // Sinks and near keys are no part of a far block.
        (total, visited)
    }

    fn by_means(&self, query_block: &QueryBlock, shares: &mut [f64]) -> (f64, u64) {
        let Self { params, scored: Scored { q, k, scale, .. }, .. } = *self;
        let (rows, block) = (self.rows(query_block), params.block);
        let share = T::ONE / T::from_usize(rows.len());
        let seen = query_block.sees(query_block.first);
        let mut visited = 0;
        for h in 0..q.heads() {
            let (head, mut mean) = (q.head(h), vec![T::ZERO; k.cols()]);
            rows.clone().for_each(|r| axpy(share * scale, head.row(r), &mut mean));
            let near = query_block.near.start..query_block.near.end.min(seen);
            let exact = (0..query_block.sinks).chain(near).map(|j| dot(&mean, k.row(j)));
            let mut logits: Vec<T> = exact.collect();
            let always = logits.len();
            let blocks: Vec<usize> = (0..shares.len()).collect();
            for &c in &blocks {
                // The mean over far keys only: the block may also hold sinks or near keys.
                let far = query_block.far().map(|far| far.start.max(c * block)..far.end.min((c + 1) * block));
                let count: usize = far.iter().map(std::ops::Range::len).sum();
                let sum = far.into_iter().flatten().map(|j| dot(&mean, k.row(j))).fold(T::ZERO, |a, b| a + b);
                let logit = sum / T::from_usize(count) + T::from_usize(count).ln();
                logits.push(if count == 0 { T::NEG_INFINITY } else { logit });
            }
            visited += logits.len() as u64;
            let top = max(&logits);
            let total = exp_sum(&mut logits, top).to_f64();
            shares.iter_mut().zip(&logits[always..]).for_each(|(s, x)| *s += x.to_f64() / total);
        }
        (q.heads() as f64, visited)
    }

    fn by_antidiagonals(&self, query_block: &QueryBlock, shares: &mut [f64]) -> (f64, u64) {
        let Self { params, scored: Scored { q, k, scale, cx, .. }, .. } = *self;
        let (rows, stride, d) = (self.rows(query_block), params.stride, k.cols());
        // Groups of rows from the last one backwards, and whole groups of keys that the first row sees.
        let counts = (rows.len() / stride, query_block.sees(query_block.first) / stride);
        if counts.0 == 0 || counts.1 == 0 {
            return self.by_means(query_block, shares);
        }
        let width = stride * d;
        let mut left = cx.scratch.take::<T>(counts.0 * q.heads() * width);
        for (t, group) in left.chunks_exact_mut(width).enumerate() {
            let (h, g) = (t / counts.0, t % counts.0);
            let last = rows.end - 1 - g * stride;
            for (l, x) in group.chunks_exact_mut(d).enumerate() {
                x.copy_from_slice(q.head(h).row(last - l));
            }
        }
        let copied = (k.stride() != d).then(|| {
            let mut copy = cx.scratch.take::<T>(counts.1 * width);
            k.gather_into(0..counts.1 * stride, &mut copy);
            copy
        });
        let keys = copied.as_ref().map_or(k.data(), |copy| &copy[..]);
        let right = MatRef::new(&keys[..counts.1 * width], counts.1, width);
        let groups = counts.0 * q.heads();
        let mut logits = cx.scratch.take::<T>(groups * counts.1);
        let factor = scale / T::from_usize(stride);
        let left = MatRef::new(&left, groups, width);
        gemm(cx.schedule.isa, factor, Op::N(left), Op::T(right), T::ZERO, &mut logits, counts.1, cx.scratch);
        // A group of keys that straddles blocks counts for the block it begins in.
        for row in logits.chunks_exact_mut(counts.1) {
            let top = max(row);
            let total = exp_sum(row, top).to_f64();
            for (t, x) in row.iter().enumerate() {
                let first = t * stride;
                if query_block.far().iter().any(|far| far.contains(&first)) || first < query_block.sinks {
                    shares[first / params.block] += x.to_f64() / total;
                }
            }
        }
        (groups as f64, (groups * counts.1) as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Options;
    use crate::testkit::{
        Case, assert_rows_close, assert_same_bits, check_method, reference_masked, run_method,
    };

    #[test]
    fn honours_the_contract() {
        check_method(&METHOD);
    }

    /// Block 3 of the keys lies along every query; the others are small.
    fn one_heavy_block(mask: Mask) -> Case {
        let (n, d) = (128, 8);
        let mut case = Case::gaussian(Problem { mask, ..Problem::new(1, n, d) }, 1);
        case.q.chunks_exact_mut(d).for_each(|q| q[0] = 4.0);
        for (j, k) in case.k.chunks_exact_mut(d).enumerate() {
            k.iter_mut().for_each(|x| *x *= 0.1);
            k[0] = if (24..32).contains(&j) { 6.0 } else { 0.0 };
        }
        case
    }

    #[test]
    fn every_score_finds_the_heavy_block() {
        for score in ["means", "antidiagonal", "scouts"] {
            let options =
                Options::new().with("block", 8).with("window", 8).with("stride", 4).with("score", score);
            let options = options.with("sinks", 0).with("far", "none").with("threshold", 0.9);
            let case = one_heavy_block(Mask::Causal);
            let (o, _) = run_method(&METHOD, &options, &case);
            let sees = |i: usize, j: usize| (24..32).contains(&j) || j + 8 >= i / 8 * 8;
            let (want, _) = reference_masked(&case, sees);
            assert_rows_close(&o[48 * 8..], &want[48 * 8..], 1e-12, score);
        }
    }

    #[test]
    fn later_queries_cannot_change_a_row_not_even_as_nan() {
        let p = Problem::new(2, 96, 8).with_kv_heads(1).causal();
        let case = Case::gaussian(p, 3);
        for score in ["means", "antidiagonal", "scouts"] {
            let options =
                Options::new().with("block", 8).with("window", 4).with("stride", 4).with("score", score);
            let options = options.with("threshold", 0.5);
            let (first, first_lse) = run_method(&METHOD, &options, &case);
            for t in [17, 40, 41, 95] {
                let mut changed = case.clone();
                for h in 0..2 {
                    changed.q[(h * 96 + t) * 8..(h + 1) * 96 * 8].fill(f64::NAN);
                }
                let (o, lse) = run_method(&METHOD, &options, &changed);
                for h in 0..2 {
                    let rows = h * 96..h * 96 + t;
                    let what = format!("{score}, token {t}");
                    assert_same_bits(&lse[rows.clone()], &first_lse[rows.clone()], &what);
                    assert_same_bits(
                        &o[rows.start * 8..rows.end * 8],
                        &first[rows.start * 8..rows.end * 8],
                        &what,
                    );
                }
            }
        }
    }
}
