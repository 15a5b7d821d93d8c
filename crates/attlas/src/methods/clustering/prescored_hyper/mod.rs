//! Pre-scored HyperAttention: keys are ranked once, and HyperAttention runs on the best of them.
//!
//! **Idea.** Score the keys without looking at the queries, keep the best, and spend hashing and sampling on
//! those alone.
//!
//! **Math.** $S$ holds the `keys` keys of the largest score, ties to the smaller index; a query of block $c$ of
//! the hashed and sorted $S$ sees
//! $$\hat Z_i = \sum_{j \in c} e^{s_{ij}} + \tfrac{|S| - |c|}{|T \setminus c|} \sum_{j \in T \setminus c} e^{s_{ij}}
//!   {} + \tfrac{n_k - |S|}{|R|} \sum_{j \in R} e^{s_{ij}},$$
//! with $T \subset S$ drawn uniformly (none by default, as in the paper) and $R$ drawn uniformly from the keys
//! outside $S$ with `residual = all_keys`, which makes the normaliser unbiased; outputs accordingly. Scores:
//!
//! | `score` | of key $j$ |
//! |---|---|
//! | `leverage` | $k_j^\top (K^\top K)^{-1} k_j$, by Cholesky with as little added to the diagonal as is needed |
//! | `kmeans_outlier` | $u_j / (\sum u + 10^{-6})$, $u_j$ the distance to the own centroid, the sum over its cluster |
//! | `kmedian_outlier` | the same with coordinate-wise medians as centres |
//! | `kernel_kmeans` | $e^{-u_j^2 / 2\sigma^2}$, $\sigma = 1.3$ times the mean of $u$ |
//! | `norm2` | $\lvert k_j\rvert^2$ |
//! | `mean_query` | $\langle \bar q, k_j\rangle$, $\bar q$ the mean of the queries of the group |
//!
//! With `select = drawn` the keys are instead drawn without replacement by their score (by $u_j$ for the outlier
//! scores), the authors' variant for vision models. With `block` at least `keys` it is plain softmax over the kept
//! keys.
//!
//! Token by token, the last `n_min` keys are exact and older ones are scored again every 256 tokens: a query sees all
//! kept keys, all keys since then and, with `residual = all_keys`, the samples of the others. Nothing is hashed.
//!
//! **Reference.** li2025; han2024; survey, clustering and sampling. Keys that are not kept are *removed*; the
//! authors' code zeroes them, which leaves each with weight one in every row. Their "leverage" multiplies the keys by a
//! random orthogonal matrix and takes norms, which is `norm2`; here it is the leverage itself. k-means runs for each
//! key head on its own keys, from distinct random keys, or from the authors' k-means++ with `seeding`. Causally, each
//! part of the recursion scores its own past keys: a choice over the whole sequence would leak. The default score is
//! leverage: k-means with the authors' 256 clusters costs as much as attending to 2560 keys.
//!
//! **Cost.** Scores $2 n_k d^2$ (leverage) or $2\,\mathrm{iters}\; n_k\, d\,\mathrm{clusters}$, then HyperAttention on
//! `keys` keys: $2 n_q (b + m)(d + d_v)$.
//!
//! **Guarantees.** Rows are convex combinations of values; without samples the error is at most the lost mass
//! times the diameter of the values. With `keys` covering all keys it is HyperAttention. Exact when `block` or
//! `samples` cover all keys, or `n_min` all tokens. Choices are nested in `keys`. All tested here.
//!
//! **When to use.** Where a few keys matter to all queries. On heads of trained models `score = mean_query` finds them;
//! scores from the keys alone do not. On clustered inputs no score beats a random subset of the same size; report the
//! exact result beside it.

mod decode;

use crate::engine::moments::mean_of;
use crate::engine::{
    Assign, Ranks, Rectangle, SortHashes, SortedBlocks, UniformSamples, attend_blocks, causal_pairs,
    causalize, draw_sort_hashes, exact_group, top_indices,
};
use crate::group::{Group, GroupIndex, GroupPlan, GroupStream, Queries};
use crate::method::{
    Accepted, Budget, Claims, Cost, Family, Law, Method, Promise, RunInfo, Spec, Status, Tunable, Withdrawn,
};
use crate::{Mask, MatRef, Problem, Real, Result, Spread};
use attlas_num::Mat;
use attlas_num::cluster::{self, Init, Metric, kmeans};
use attlas_num::hash::sample::Reservoir;
use attlas_num::kernels::{axpy, dot, sq_dist};
use attlas_num::linalg::{matmul_nt, matmul_tn, psd_factor};
use attlas_num::par::*;
use attlas_num::rng::StreamKey;

/// Registry entry.
pub static METHOD: Method = Method {
    id: "prescored_hyper",
    family: Family::Clustering,
    title: "Pre-scored HyperAttention: hashing and sampling on the best keys alone",
    reference: "li2025",
    claims: Claims {
        decode: true,
        exact_at: &[("block", Budget::NumKeys), ("samples", Budget::NumKeys), ("n_min", Budget::NumTokens)],
        unbiased: true,
        deterministic: false,
        drops: true,
        exponent: 1.0,
        except: &[
            (Law::KeyOrder, "keys are sampled and clustered by their place"),
            (Law::QueriesAlone, "without a mask, queries are cut into blocks by their rank among each other"),
            (
                Law::DecodeIsPrefill,
                "parts of a prompt are scored and hashed on their own; decoding sees all keys that were kept",
            ),
        ],
        withdrawn: &[
            Withdrawn {
                param: "residual",
                value: "none",
                promise: Promise::Unbiased,
                reason: "nothing stands for the keys that are not kept",
            },
            Withdrawn {
                param: "samples",
                value: "0",
                promise: Promise::Unbiased,
                reason: "kept keys outside the block are left out",
            },
            Withdrawn {
                param: "score",
                value: "mean_query",
                promise: Promise::Law(Law::HeadsAlone),
                reason: "the mean is that of the queries of all heads of a group",
            },
        ],
        spread: Spread::RING,
        ..Claims::BASE
    },
    probes: &[
        &[("keys", "40"), ("block", "8"), ("n_min", "8"), ("hashes", "4")],
        &[("keys", "30"), ("block", "8"), ("n_min", "4"), ("score", "kmeans_outlier"), ("samples", "9")],
        &[("keys", "30"), ("block", "7"), ("n_min", "9"), ("score", "kmedian_outlier")],
        &[
            ("keys", "25"),
            ("block", "8"),
            ("n_min", "1"),
            ("score", "kernel_kmeans"),
            ("residual", "all_keys"),
            ("residual_samples", "16"),
        ],
        &[
            ("keys", "30"),
            ("block", "8"),
            ("n_min", "8"),
            ("samples", "12"),
            ("residual", "all_keys"),
            ("residual_samples", "24"),
        ],
        &[
            ("keys", "30"),
            ("block", "8"),
            ("n_min", "8"),
            ("score", "kmeans_outlier"),
            ("seeding", "plus_plus"),
        ],
        &[("keys", "30"), ("block", "8"), ("n_min", "4"), ("score", "mean_query")],
        &[("keys", "30"), ("block", "8"), ("n_min", "8"), ("score", "mean_query"), ("select", "drawn")],
        &[("keys", "30"), ("block", "30"), ("n_min", "5"), ("score", "norm2"), ("select", "drawn")],
    ],
    subsets: &[
        &[("keys", "9"), ("block", "9"), ("n_min", "4")],
        &[("keys", "12"), ("block", "5"), ("n_min", "4"), ("score", "norm2")],
    ],
    exact_below: Some("n_min"),
    tunable: &[Tunable::budget("block"), Tunable::budget("samples")],
    ..Method::of::<Params>()
};

crate::choices! {
    /// Score that ranks keys.
    pub enum Score {
        /// Leverage in the row space of the keys.
        Leverage = "leverage",
        /// Distance to the centroid, as a share of the cluster's sum.
        KMeansOutlier = "kmeans_outlier",
        /// The same with coordinate-wise medians.
        KMedianOutlier = "kmedian_outlier",
        /// Nearness to the centroid.
        KernelKMeans = "kernel_kmeans",
        /// Squared length.
        Norm2 = "norm2",
        /// Product with the mean of the queries; with a causal mask, of the last 256 queries before the rows that
        /// attend.
        MeanQuery = "mean_query",
    }
}

crate::choices! {
    /// Initialisation of the clusterings.
    pub enum Seeding {
        /// Distinct random keys.
        Rows = "rows",
        /// Keys drawn by their squared distance to those already drawn (k-means++), as the authors do.
        PlusPlus = "plus_plus",
    }
}

crate::choices! {
    /// Rule for keeping keys.
    pub enum Select {
        /// The keys with the best scores.
        Top = "top",
        /// Keys drawn without replacement by their score.
        Drawn = "drawn",
    }
}

crate::choices! {
    /// Stand-in for the keys that are not kept.
    pub enum Residual {
        /// Nothing, as in the paper.
        None = "none",
        /// Uniform samples of them.
        AllKeys = "all_keys",
    }
}

crate::choices! {
    /// Sampling of the kept keys.
    pub enum Sampling {
        /// Every key at most once.
        WithoutReplacement = "without_replacement",
        /// Independently.
        WithReplacement = "with_replacement",
    }
}

crate::params! {
    /// Parameters of [`PrescoredHyper`].
    pub struct Params {
        /// Number of keys kept; all if there are no more.
        keys: usize = 1024, in 1..=1 << 30;
        /// Score that ranks keys.
        score: Score = Score::Leverage;
        /// Keep the keys with the best scores, or keys drawn by their score.
        select: Select = Select::Top;
        /// Clusters of the k-means scores; auto takes a quarter of the kept keys, at most 256.
        clusters: Option<usize> = None, in 1..=1 << 20;
        /// Initialisation of the clusterings.
        seeding: Seeding = Seeding::Rows;
        /// Iterations of the clusterings; auto takes 10, or 3 with medians.
        iters: Option<usize> = None, in 0..=1000;
        /// Stand-in for the keys that are not kept.
        residual: Residual = Residual::None;
        /// Keys drawn outside the kept ones, with residual = all_keys.
        residual_samples: usize = 256, in 1..=1 << 30;
        /// Maximum number of keys in a block.
        block: usize = 256, in 1..=1 << 30;
        /// Kept keys drawn to estimate those outside a query's block; 0 leaves them out.
        samples: usize = 0, in 0..=1 << 30;
        /// Sampling with or without replacement.
        sampling: Sampling = Sampling::WithoutReplacement;
        /// Bits of the hash; 0 keeps the order of tokens.
        hashes: usize = 7, in 0..=31;
        /// Attention is exact below this number of queries; the base of the causal recursion.
        n_min: usize = 4096, in 0..=1 << 30;
        /// Seed of clusterings, directions and samples.
        seed: u64 = 0, in 0..=u64::MAX;
    }
}

impl Spec for Params {
    const METHOD: &'static Method = &METHOD;

    fn build(self, x: Accepted<'_>) -> Result<impl GroupPlan> {
        PrescoredHyper::new(x.problem, self)
    }
}

/// The plan: the parameters.
#[derive(Clone, Debug)]
pub struct PrescoredHyper {
    params: Params,
    hashes: SortHashes,
}

impl PrescoredHyper {
    /// Creates a plan with these parameters.
    pub(crate) fn new(p: &Problem, params: Params) -> Result<Self> {
        params.validate()?;
        let hashes = draw_sort_hashes(p, params.seed, params.hashes)?;
        Ok(Self { params, hashes })
    }

    /// True if a part without a mask is computed exactly.
    fn is_exact(&self, n_q: usize, n_k: usize) -> bool {
        let Params { block, samples, n_min, .. } = self.params;
        n_k <= block.max(samples) || n_q < n_min
    }

    /// True if the whole problem is computed exactly.
    fn covers(&self, n_q: usize, n_k: usize) -> bool {
        let Params { block, samples, n_min, .. } = self.params;
        n_k <= block.max(samples) || n_q.max(n_k) <= n_min
    }

    /// Maximum number of samples beside a block.
    fn extra(&self, n_k: usize) -> usize {
        let Params { samples, residual, residual_samples, .. } = self.params;
        let residual = if residual == Residual::AllKeys { residual_samples.min(n_k) } else { 0 };
        samples.min(n_k) + residual
    }

    fn clusters(&self) -> usize {
        self.params.clusters.unwrap_or((self.params.keys / 4).clamp(1, 256))
    }

    fn iters(&self) -> usize {
        self.params.iters.unwrap_or(if self.params.score == Score::KMedianOutlier { 3 } else { 10 })
    }

    /// Number of distances to centroids computed per key.
    fn scores_per_key(&self) -> u64 {
        match self.params.score {
            Score::Leverage | Score::Norm2 | Score::MeanQuery => 0,
            _ => (self.clusters() * (self.iters() + 1)) as u64,
        }
    }

    /// Returns the kept keys in increasing order; `None` if all are kept.
    fn kept<T: Real>(&self, k: MatRef<'_, T>, mean: Option<&MeanQuery>, key: StreamKey) -> Option<Vec<u32>> {
        let keys = self.params.keys;
        if keys >= k.rows() {
            return None;
        }
        let chosen = match self.params.select {
            Select::Top => top_indices(&self.scores(k, mean, key, true), keys),
            Select::Drawn => {
                let mut drawn = Reservoir::new(keys);
                let mut rng = key.named("drawn").rng();
                let scores = self.scores(k, mean, key, false);
                // Keys without weight enter only if there are too few with weight.
                let floor = f64::MIN_POSITIVE.ln();
                let log = |s: f64| if s > 0.0 { s.ln().max(floor) } else { 2.0 * floor };
                scores.iter().enumerate().for_each(|(j, &s)| drawn.push(log(s), j, &mut rng));
                let mut chosen = drawn.into_items();
                chosen.sort_unstable();
                chosen
            }
        };
        Some(chosen.into_iter().map(|j| j as u32).collect())
    }

    /// Computes scores for ranking the keys, or weights for drawing them: outlier scores as shares of their cluster or
    /// as plain distances, products with the mean query as they are or as exponentials.
    fn scores<T: Real>(
        &self,
        k: MatRef<'_, T>,
        mean: Option<&MeanQuery>,
        key: StreamKey,
        ranking: bool,
    ) -> Vec<f64> {
        let metric = match self.params.score {
            // Before the first query only the keys are known.
            Score::MeanQuery => return mean.map_or_else(|| squared_norms(k), |mean| mean.scores(k, ranking)),
            Score::Norm2 => return squared_norms(k),
            // Keys that are not finite have no leverage; their norms keep them from being dropped unseen.
            Score::Leverage => return leverage(k).unwrap_or_else(|| squared_norms(k)),
            Score::KMedianOutlier => Metric::Median,
            Score::KMeansOutlier | Score::KernelKMeans => Metric::Euclidean,
        };
        let options = cluster::Options { clusters: self.clusters(), iters: self.iters(), metric };
        let init = match self.params.seeding {
            Seeding::Rows => Init::Rows,
            Seeding::PlusPlus => Init::PlusPlus,
        };
        let found = kmeans(k, None, options, init, key.named("clusters"));
        let own = |j: usize| found.centroids.row(found.labels[j] as usize);
        let far = |j: usize| sq_dist(k.row(j), own(j)).to_f64().sqrt();
        let distance: Vec<f64> = (0..k.rows()).into_par_iter().with_min_len(PIECE).map(far).collect();
        match self.params.score {
            Score::KernelKMeans => {
                let sigma = 1.3 * distance.iter().sum::<f64>() / distance.len().max(1) as f64;
                let nearness = |u: &f64| if *u == 0.0 { 1.0 } else { (-(u / sigma).powi(2) / 2.0).exp() };
                distance.iter().map(nearness).collect()
            }
            _ if !ranking => distance,
            _ => {
                let mut totals = vec![0.0; found.centroids.rows()];
                distance.iter().zip(&found.labels).for_each(|(u, &c)| totals[c as usize] += u);
                distance.iter().zip(&found.labels).map(|(u, &c)| u / (totals[c as usize] + 1e-6)).collect()
            }
        }
    }

    /// Computes attention without a mask in a part of a group.
    fn part<T: Real>(
        &self,
        mut group: Group<'_, T>,
        part: &Rectangle,
        ranks: &Ranks,
        assign: Assign,
        mean: Option<&MeanQuery>,
    ) -> Result<RunInfo> {
        let Params { block, samples, residual, residual_samples, seed, .. } = self.params;
        let n_k = group.n_k();
        if self.is_exact(group.n_q(), n_k) {
            return exact_group(&mut group);
        }
        let of_part = part.stream(group.index.stream_key(seed));
        let kept = self.kept(group.k, mean, of_part);
        let blocks = SortedBlocks::new(ranks, part, kept.as_deref(), block, assign);
        let count = blocks.keys().len();
        let replacement = self.params.sampling == Sampling::WithReplacement;
        let inside = UniformSamples::new(count, samples, replacement, of_part.named("samples"));
        let outside: Vec<(u32, T)> = match &kept {
            Some(kept) if residual == Residual::AllKeys => {
                let drawn = of_part.named("residual").rng().subset(n_k - count, residual_samples);
                let weight = T::from_f64(((n_k - count) as f64 / drawn.len() as f64).ln());
                complement(n_k, kept, &drawn).into_iter().map(|j| (j, weight)).collect()
            }
            _ => Vec::new(),
        };
        let info = attend_blocks(&mut group, &blocks, |c| {
            let mut extra = inside.outside(&blocks, c);
            extra.extend_from_slice(&outside);
            extra
        })?;
        let scored = if kept.is_some() { self.scores_per_key() * n_k as u64 } else { 0 };
        let by_queries = if kept.is_some() && mean.is_some() { n_k as u64 } else { 0 };
        let keys_visited = info.keys_visited + by_queries;
        Ok(RunInfo { keys_visited, rank: Some(count), setup_scores: scored, ..info })
    }
}

/// Mean of some queries, times the scale.
struct MeanQuery(Vec<f64>);

impl MeanQuery {
    /// Averages the rows `rows` of all heads; `None` if there are none.
    fn new<T: Real>(q: Queries<'_, T>, rows: std::ops::Range<usize>, scale: T) -> Option<Self> {
        if rows.is_empty() || q.heads() == 0 {
            return None;
        }
        let factor = scale.to_f64() / q.heads() as f64;
        let mut mean = vec![0.0; q.head(0).cols()];
        for h in 0..q.heads() {
            axpy(factor, &mean_of(q.head(h).sub_rows(rows.clone())), &mut mean);
        }
        Some(Self(mean))
    }

    /// Computes products with the keys, or their exponentials relative to the largest.
    fn scores<T: Real>(&self, k: MatRef<'_, T>, ranking: bool) -> Vec<f64> {
        let product = |j: usize| k.row(j).iter().zip(&self.0).map(|(k, q)| k.to_f64() * q).sum::<f64>();
        let products: Vec<f64> = (0..k.rows()).into_par_iter().with_min_len(PIECE).map(product).collect();
        if ranking {
            return products;
        }
        let top = products.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        products.iter().map(|s| (s - top).exp()).collect()
    }
}

/// Maximum number of queries whose mean ranks the keys of a causal part.
const RECENT_QUERIES: usize = 256;

/// Lists the numbers of `0..n` outside `kept` and returns those at the places `chosen`.
fn complement(n: usize, kept: &[u32], chosen: &[usize]) -> Vec<u32> {
    let mut kept = kept.iter().copied().peekable();
    let outside = (0..n as u32).filter(|j| kept.next_if_eq(j).is_none());
    let mut chosen = chosen.iter().copied().peekable();
    outside.enumerate().filter(|(place, _)| chosen.next_if_eq(place).is_some()).map(|(_, j)| j).collect()
}

fn squared_norms<T: Real>(k: MatRef<'_, T>) -> Vec<f64> {
    let mut squares = vec![0.0; k.rows()];
    squares.par_chunks_mut(PIECE).enumerate().for_each(|(t, squares)| {
        let rows = k.sub_rows(t * PIECE..t * PIECE + squares.len());
        for (square, row) in squares.iter_mut().zip(rows.iter_rows()) {
            *square = row.iter().map(|x| x.to_f64() * x.to_f64()).sum();
        }
    });
    squares
}

/// Keys per task; fixed, so that results do not depend on the number of threads.
const PIECE: usize = 1024;

/// Computes $k_j^\top (K^\top K)^{-1} k_j$ of every key without copying all keys; `None` if a key is not finite.
fn leverage<T: Real>(k: MatRef<'_, T>) -> Option<Vec<f64>> {
    let pieces = k.rows().div_ceil(PIECE);
    let rows = |t: usize| k.sub_rows(t * PIECE..k.rows().min((t + 1) * PIECE));
    let largest = |t: usize| rows(t).iter_rows().flatten().fold(0.0, |a: f64, x| larger(a, x.to_f64().abs()));
    let largest = (0..pieces).into_par_iter().map(largest).reduce(|| 0.0, larger);
    if !largest.is_finite() {
        return None;
    }
    // Leverage does not change with the scale of the keys: take one whose squares are in range.
    let factor = if (1e-100..1e100).contains(&largest) || largest == 0.0 { 1.0 } else { 1.0 / largest };
    let scaled = |t: usize| {
        let data = rows(t).iter_rows().flatten().map(|x| factor * x.to_f64()).collect();
        Mat::from_vec(data, rows(t).rows(), k.cols())
    };
    let gram = |t: usize| {
        let rows = scaled(t);
        matmul_tn(rows.as_ref(), rows.as_ref())
    };
    let parts: Vec<Mat<f64>> = (0..pieces).into_par_iter().map(gram).collect();
    let mut sum = Mat::zeros(k.cols(), k.cols());
    parts.iter().for_each(|part| axpy(1.0, part.data(), sum.data_mut()));
    // |W k|², where W has one row per rank.
    let whitening =
        psd_factor(sum.as_ref()).ok()?.half_solve(Mat::<f64>::identity(k.cols()).as_ref()).ok()?;
    let mut scores = vec![0.0; k.rows()];
    scores.par_chunks_mut(PIECE).enumerate().for_each(|(t, scores)| {
        let white = matmul_nt(scaled(t).as_ref(), whitening.as_ref());
        for (j, score) in scores.iter_mut().enumerate() {
            *score = dot(white.row(j), white.row(j)).clamp(0.0, 1.0);
        }
    });
    Some(scores)
}

/// Returns the larger one; NaN if either is NaN.
fn larger(a: f64, b: f64) -> f64 {
    if b > a || b.is_nan() { b } else { a }
}

impl GroupPlan for PrescoredHyper {
    fn cost(&self, p: &Problem) -> Cost {
        let Params { block, n_min, hashes, keys, .. } = self.params;
        let (d, d_v, heads) = (p.d as u64, p.d_v as u64, (p.batch * p.n_heads) as u64);
        let (rows, all) = (heads * p.n_q as u64, (p.batch * p.n_kv_heads * p.n_k) as u64);
        if self.covers(p.n_q, p.n_k) {
            let bytes = 4 * (rows + all) * (d + d_v);
            return Cost { setup_flops: 0, run_flops: 2 * p.visible_pairs() * (d + d_v), bytes };
        }
        let part = |rows: usize, n_k: usize| {
            let seen =
                if self.is_exact(rows, n_k) { n_k } else { (block.min(keys) + self.extra(n_k)).min(n_k) };
            rows as u64 * seen as u64
        };
        let (pairs, levels) = match p.mask {
            Mask::None => (part(p.n_q, p.n_k), 1),
            Mask::Causal => {
                let levels = (p.n_q / n_min.max(1)).max(1).ilog2().max(1);
                (causal_pairs(p.n_q, p.n_k, n_min, &part), u64::from(levels))
            }
        };
        let per_key = match self.params.score {
            Score::Leverage => 2 * d * d,
            Score::Norm2 | Score::MeanQuery => 2 * d,
            _ => 2 * d * self.scores_per_key(),
        };
        Cost {
            setup_flops: 2 * (rows + all) * d * hashes as u64 + levels * all * per_key,
            run_flops: 2 * heads * pairs * (d + d_v),
            bytes: 4 * levels * (rows + all) * (d + d_v),
        }
    }

    fn run<T: Real>(&self, mut group: Group<'_, T>) -> Result<RunInfo> {
        if self.covers(group.n_q(), group.n_k()) {
            return Ok(RunInfo { status: Status::Exact, ..exact_group(&mut group)? });
        }
        let ranks = Ranks::new(group.q, group.k, self.hashes.of(group.index).as_ref());
        let (q, scale) = (group.q, group.scale);
        let mean = |rows: std::ops::Range<usize>| match self.params.score {
            Score::MeanQuery => MeanQuery::new(q, rows, scale),
            _ => None,
        };
        match group.mask {
            Mask::None => {
                let (whole, mean) = (Rectangle::whole(&group), mean(0..q.n_q()));
                self.part(group, &whole, &ranks, Assign::Balanced, mean.as_ref())
            }
            Mask::Causal => causalize(&mut group, self.params.n_min, &|part_rows, part| {
                // Queries earlier than any that attends here: they carry no information about later tokens.
                let first = part.rows.start;
                let mean = mean(first.saturating_sub(RECENT_QUERIES)..first);
                part_rows.run(|group| self.part(group, &part, &ranks, Assign::Alone, mean.as_ref()))
            }),
        }
    }

    fn stream<T: Real>(&self, p: &Problem, index: GroupIndex) -> Option<Box<dyn GroupStream<T>>> {
        Some(Box::new(decode::BestKeys::new(self.clone(), (p.d, p.d_v), index)))
    }
}

#[cfg(test)]
mod tests;
