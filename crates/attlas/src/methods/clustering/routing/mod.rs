//! Routing Transformer: attention inside groups around shared centroids.
//!
//! **Idea.** Route queries and keys to common centroids and attend inside the groups, of about $\sqrt n$ members each.
//!
//! **Math.** $\hat x$ is $x$ without its mean, divided by its standard deviation over $d$ (layer norm without weights);
//! $\mu_1, \dots, \mu_k$ are unit centroids, given by a calibration or found by spherical k-means on $[\hat Q; \hat K]$.
//! `top_w`: centroid $c$ takes the $w$ queries and the $w$ keys with the largest $\langle \mu_c, \hat x \rangle$, and inside
//! each group queries attend to keys; keys outside have logit −∞, not 0. A token may be in several groups or in none:
//! `union` is the softmax over all keys in these groups, `multiset` counts a key once per group, `mean` averages the
//! outputs of the groups as the reference code does (its log-sum-exp is that of the multiset). A query in no group
//! attends to the keys of its best centroid. `nearest_recent`: every token belongs to its best centroid alone, and
//! query $i$ attends to the $w$ most recent keys $j \le i$ of its cluster, itself included.
//!
//! **Causal form.** The best $w$ tokens depend on later tokens, and so do centroids of the whole sequence: masking
//! inside these groups, as public code does, still leaks. A causal problem therefore takes `nearest_recent`, with
//! centroids from a calibration, or from the keys of the first `prefix` tokens, which attend exactly. Decoding appends
//! to one list per centroid.
//!
//! **Reference.** roy2021; survey, clustering ($w = n/k$ members, not $k$). The published models route in a few heads of the
//! last layers, beside local attention, with $K := Q$ when causal, and their logits are $\langle \hat q, \hat k \rangle$ without
//! $1/\sqrt d$: `logits = layer_norm`. The default computes logits from the unchanged queries and keys.
//!
//! **Cost.** Routing $2(n_q + n_k) k d$, attention $2 k w^2 (d + d_v)$; k-means on the fly adds `iters` times
//! $2 \cdot \mathrm{samples} \cdot k d$. $O(n^{1.5} d)$ at $k = \sqrt n$. Scratch $O((n + kw)(d + d_v))$.
//!
//! **Guarantees.** Exact when `window` covers all tokens (raw logits). With `union`, the error is at most the lost mass times
//! the spread of the values. Strictly causal. Tested.
//!
//! **When to use.** Models trained with it, or heads whose queries and keys share clusters.

mod centroids;
mod decode;
mod groups;
#[cfg(test)]
mod tests;

use crate::engine::{Buckets, Fallback, Join, attend_buckets, exact_group, exact_rows};
use crate::group::{Group, GroupIndex, GroupPlan, GroupStream};
use crate::method::{
    Accepted, Budget, Calibration, Claims, Cost, Family, Law, Learn, Method, Needs, Promise, RunInfo, Spec,
    Status, Support, Tunable, Withdrawn,
};
use crate::{Mask, Mat, MatRef, Problem, Real, Result, Spread};
use attlas_num::cluster::Metric;
use attlas_num::cluster::kmeans::assign_into;
use attlas_num::kernels::Band;
use attlas_num::par::*;
use centroids::{ROWS_PER_CENTROID, centroid_scores, norm_into};
use decode::CentroidStream;
use groups::{Recent, Routed, best_members};

/// Registry entry.
pub static METHOD: Method = Method {
    id: "routing",
    family: Family::Clustering,
    title: "Routing Transformer: groups around shared centroids",
    reference: "roy2021",
    claims: Claims {
        decode: true,
        exact_at: &[("window", Budget::NumTokens)],
        deterministic: false,
        drops: true,
        exponent: 1.5,
        needs: Needs::Training,
        except: &[
            (Law::QueriesAlone, "queries compete for places in the groups and move the centroids"),
            (Law::HeadsAlone, "centroids are found on the queries of all heads of a group"),
            (Law::KeyOrder, "k-means starts from random rows by number"),
        ],
        withdrawn: &[
            Withdrawn {
                param: "fallback",
                value: "zero",
                promise: Promise::RowStochastic,
                reason: "a query without a key is answered by zero",
            },
            Withdrawn {
                param: "logits",
                value: "layer_norm",
                promise: Promise::ExactAt,
                reason: "exact attention takes its logits from queries and keys as they are",
            },
            Withdrawn {
                param: "logits",
                value: "layer_norm",
                promise: Promise::Softmax,
                reason: "layer-normed queries and keys are a model of their own",
            },
        ],
        spread: Spread::RING,
        ..Claims::BASE
    },
    probes: &[
        &[("clusters", "7"), ("window", "12"), ("prefix", "20"), ("samples", "50")],
        &[("clusters", "6"), ("window", "15"), ("merge", "mean"), ("fallback", "zero"), ("prefix", "9")],
        &[("clusters", "9"), ("window", "9"), ("merge", "multiset"), ("assignment", "top_w")],
        &[("clusters", "9"), ("window", "4"), ("fallback", "sink_window"), ("prefix", "5"), ("iters", "2")],
        &[("clusters", "7"), ("window", "12"), ("logits", "layer_norm"), ("prefix", "9")],
    ],
    subsets: &[&[("clusters", "5"), ("window", "6"), ("prefix", "8")]],
    tunable: &[Tunable::budget("window")],
    ..Method::of::<Params>()
};

crate::choices! {
    /// Membership of a centroid's group.
    pub enum Assignment {
        /// The `window` best queries and keys of each centroid; no mask.
        TopW = "top_w",
        /// Every token belongs to its best centroid, and sees the `window` most recent keys there; causal.
        NearestRecent = "nearest_recent",
    }
}

crate::choices! {
    /// Weight of a key that is in several groups of a query.
    pub enum Merge {
        /// Once: the softmax over the union of the groups.
        Union = "union",
        /// The outputs of the groups are averaged, as in the reference code.
        Mean = "mean",
        /// Once for each group.
        Multiset = "multiset",
    }
}

crate::choices! {
    /// Vectors that logits are computed from.
    pub enum Logits {
        /// Unchanged queries and keys, with the problem's scale.
        Raw = "raw",
        /// Layer-normed queries and keys, without a scale, as in the official code.
        LayerNorm = "layer_norm",
    }
}

crate::choices! {
    /// Output of a query without keys.
    pub enum Unrouted {
        /// The keys of its best centroid; `top_w` only.
        NearestCentroid = "nearest_centroid",
        /// Zero, with log-sum-exp −∞.
        Zero = "zero",
        /// The value of its own token; `nearest_recent` only.
        SelfKey = "self_key",
        /// Attention to the first 4 and the last 64 keys it sees; `nearest_recent` only.
        SinkWindow = "sink_window",
    }
}

crate::params! {
    /// Parameters of [`Routing`].
    pub struct Params {
        /// Centroids; auto takes the square root of the number of keys. A calibration brings its own.
        clusters: Option<usize> = None, in 1..=1 << 20;
        /// Members of a group, at most all queries and all keys; auto shares the keys evenly among the centroids.
        window: Option<usize> = None, in 1..=1 << 30;
        /// Membership of a centroid's group; auto takes top_w without a mask and nearest_recent with one.
        assignment: Option<Assignment> = None;
        /// Weight of a key that is in several groups of a query.
        merge: Merge = Merge::Union;
        /// Vectors that logits are computed from.
        logits: Logits = Logits::Raw;
        /// Output of a query without keys; auto: nearest_centroid without a mask, self_key with one.
        fallback: Option<Unrouted> = None;
        /// Causal problems without a calibration: number of first tokens, which attend exactly and whose keys give the
        /// centroids; auto takes the larger of a group and four tokens per centroid.
        prefix: Option<usize> = None, in 1..=1 << 30;
        /// Iterations of k-means.
        iters: usize = 10, in 0..=1000;
        /// Maximum number of rows for k-means, drawn at random; auto for 128 per centroid.
        samples: Option<usize> = None, in 1..=1 << 30;
        /// Seed of the initial centroids and samples.
        seed: u64 = 0, in 0..=u64::MAX;
    }
}

impl Spec for Params {
    const METHOD: &'static Method = &METHOD;
    const CALIBRATE: Option<Learn<Self>> = Some(centroids::calibrate);

    fn supports(&self, p: &Problem) -> Support {
        let causal = p.mask == Mask::Causal;
        let Params { assignment, fallback, .. } = self;
        Support::yes()
            .and_unless(
                causal && *assignment == Some(Assignment::TopW),
                "top_w over a sequence depends on later tokens; use assignment = nearest_recent for a causal mask",
            )
            .and_unless(
                !causal && *assignment == Some(Assignment::NearestRecent),
                "nearest_recent needs a causal mask; use assignment = top_w",
            )
            .and_unless(
                causal && *fallback == Some(Unrouted::NearestCentroid),
                "with a causal mask a query is at its best centroid already; use fallback = self_key, sink_window or zero",
            )
            .and_unless(
                !causal && matches!(fallback, Some(Unrouted::SelfKey | Unrouted::SinkWindow)),
                "self_key and sink_window need a causal mask; use fallback = nearest_centroid or zero",
            )
    }

    fn build(self, x: Accepted<'_>) -> Result<impl GroupPlan> {
        Routing::new(self, x.problem, x.calibration)
    }
}

/// The plan: parameters, and the centroids of a calibration if there is one.
#[derive(Clone, Debug)]
pub struct Routing {
    params: Params,
    /// Unit centroids of every key head.
    given: Option<Vec<Mat<f64>>>,
}

/// Sizes that depend on the number of keys.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    clusters: usize,
    window: usize,
    prefix: usize,
}

impl Routing {
    /// Creates a plan with these parameters and the centroids of a calibration, if there is one.
    pub(crate) fn new(params: Params, p: &Problem, calibration: Option<&Calibration>) -> Result<Self> {
        let load = |c: &Calibration| (0..p.n_kv_heads).map(|h| c.matrix(&format!("centroids.{h}"))).collect();
        Ok(Self { params, given: calibration.map(load).transpose()? })
    }

    fn sizes(&self, n_k: usize, kv_head: usize) -> Sizes {
        let auto = ((n_k as f64).sqrt().round() as usize).max(1);
        let given = self.given.as_ref().map(|g| g[kv_head].rows());
        let clusters = given.or(self.params.clusters).unwrap_or(auto).clamp(1, n_k.max(1));
        let window = self.params.window.unwrap_or(n_k.div_ceil(clusters)).max(1);
        let prefix = match given {
            Some(_) => 0,
            None => self.params.prefix.unwrap_or(window.max(4 * clusters)),
        };
        Sizes { clusters, window, prefix }
    }

    /// Returns the given centroids, or runs spherical k-means on `rows`, `n × d`.
    fn centroids<T: Real>(&self, rows: MatRef<'_, T>, sizes: Sizes, index: GroupIndex) -> Mat<T> {
        if let Some(given) = &self.given {
            return given[index.kv_head].cast();
        }
        let key = index.stream_key(self.params.seed).named("routing");
        centroids::find_centroids(rows, sizes.clusters, &self.params, key)
    }

    fn fallback(&self) -> Fallback {
        match self.params.fallback {
            Some(Unrouted::Zero) => Fallback::Zero,
            Some(Unrouted::SinkWindow) => Fallback::SinkWindow,
            _ => Fallback::SelfKey,
        }
    }

    fn raw(&self) -> bool {
        self.params.logits == Logits::Raw
    }

    fn scale<T: Real>(&self, scale: T) -> T {
        if self.raw() { scale } else { T::ONE }
    }

    fn join(&self) -> Join {
        if self.params.merge == Merge::Mean { Join::Mean } else { Join::LogSumExp }
    }
}

/// Rows per task.
const ROWS: usize = 512;

impl GroupPlan for Routing {
    fn cost(&self, p: &Problem) -> Cost {
        let Sizes { clusters, window, prefix } = self.sizes(p.n_k, 0);
        let heads = (p.batch * p.n_heads) as u64;
        let tokens = heads * p.n_q as u64 + (p.batch * p.n_kv_heads * p.n_k) as u64;
        let causal = p.mask == Mask::Causal;
        let most = (p.batch * p.n_kv_heads) * self.params.samples.unwrap_or(clusters * ROWS_PER_CENTROID);
        let fitted = if causal { (p.batch * p.n_kv_heads * prefix.min(p.n_k)) as u64 } else { tokens };
        let fitted = fitted.min(most as u64);
        let passes = if self.given.is_some() { 0 } else { self.params.iters as u64 + 1 };
        let route = 2 * (clusters * p.d) as u64;
        let w = window.min(p.n_k) as u64;
        let pairs = match causal {
            true => heads * p.n_q as u64 * (2 * w + prefix.min(p.n_k) as u64),
            false => heads * clusters as u64 * w.min(p.n_q as u64) * w,
        };
        Cost {
            setup_flops: route * (tokens + passes * fitted),
            run_flops: 2 * pairs.max(1) * (p.d + p.d_v) as u64,
            bytes: 4 * (tokens * (passes + 2) * p.d as u64 + pairs / w.max(1) * (p.d + p.d_v) as u64),
        }
    }

    fn run<T: Real>(&self, mut g: Group<'_, T>) -> Result<RunInfo> {
        let sizes = self.sizes(g.n_k(), g.index.kv_head);
        let causal = g.mask == Mask::Causal;
        let covered = sizes.window >= g.n_k().max(g.n_q()) || causal && sizes.prefix >= g.n_k();
        if g.n_k() == 0 || g.n_q() == 0 || self.raw() && covered {
            return Ok(RunInfo { status: Status::Exact, ..exact_group(&mut g)? });
        }
        let (n_q, n_k, d, heads, cx) = (g.n_q(), g.n_k(), g.k.cols(), g.q.heads(), g.cx);
        // Layer-normed queries, head after head, then keys.
        let mut normed = cx.scratch.take::<T>((heads * n_q + n_k) * d);
        let (norm_q, norm_k) = normed.split_at_mut(heads * n_q * d);
        norm_q.chunks_exact_mut(n_q * d).enumerate().for_each(|(h, out)| norm_into(g.q.head(h), out));
        norm_into(g.k, norm_k);
        let normed = MatRef::new(&normed, heads * n_q + n_k, d);
        let fitted = if causal { sizes.prefix.min(n_k) } else { heads * n_q + n_k };
        let found =
            if self.given.is_none() { centroid_scores(fitted, sizes.clusters, &self.params) } else { 0 };
        g.out.fill(T::ZERO);
        g.lse.fill(T::NEG_INFINITY);
        let info = if causal {
            let keys = heads * n_q..heads * n_q + sizes.prefix.min(n_k);
            let centroids = self.centroids(normed.sub_rows(keys), sizes, g.index);
            self.nearest_recent(&mut g, normed, &centroids, sizes)?
        } else {
            let centroids = self.centroids(normed, sizes, g.index);
            self.top_w(&mut g, normed, &centroids, sizes)
        };
        let empty_rows = g.lse.iter().filter(|l| **l == T::NEG_INFINITY).count() as u64;
        let setup_scores = found + (n_k * sizes.clusters) as u64;
        Ok(RunInfo { empty_rows, rank: Some(sizes.clusters), setup_scores, ..info })
    }

    fn stream<T: Real>(&self, p: &Problem, index: GroupIndex) -> Option<Box<dyn GroupStream<T>>> {
        Some(Box::new(CentroidStream::new(self, p, index)))
    }
}

impl Routing {
    /// Attends within the groups of each centroid's best queries and keys.
    fn top_w<T: Real>(
        &self,
        g: &mut Group<'_, T>,
        normed: MatRef<'_, T>,
        centroids: &Mat<T>,
        sizes: Sizes,
    ) -> RunInfo {
        let (n_q, n_k, d_v, heads, cx) = (g.n_q(), g.n_k(), g.d_v(), g.q.heads(), g.cx);
        let w = sizes.window.min(n_q).min(n_k);
        let norm_k = normed.sub_rows(heads * n_q..heads * n_q + n_k);
        let keys = best_members(norm_k, centroids.as_ref(), w, cx);
        let k = if self.raw() { g.k } else { norm_k };
        let mut info = RunInfo::default();
        for h in 0..heads {
            let norm_q = normed.sub_rows(h * n_q..(h + 1) * n_q);
            let q = if self.raw() { g.q.head(h) } else { norm_q };
            let queries = best_members(norm_q, centroids.as_ref(), w, cx);
            info.keys_visited += (n_q * centroids.rows()) as u64;
            let routed = Routed::new(&queries, &keys, n_q, n_k, self.params.merge == Merge::Union);
            let round = Buckets::new(queries.concat(), (0..=queries.len()).map(|c| c * w).collect());
            let rows = h * n_q..(h + 1) * n_q;
            let (out, lse) = (&mut g.out[rows.start * d_v..rows.end * d_v], &mut g.lse[rows]);
            let scale = self.scale(g.scale);
            info.keys_visited += attend_buckets(&routed, &round, q, k, g.v, scale, self.join(), cx, out, lse);
            let lost: Vec<u32> = routed.unrouted();
            if lost.is_empty() || self.params.fallback == Some(Unrouted::Zero) {
                continue;
            }
            let mut labels = vec![0; n_q];
            assign_into(norm_q, centroids.as_ref(), Metric::Spherical, &mut labels);
            info.keys_visited += (n_q * centroids.rows()) as u64;
            let mut blocks = vec![u32::MAX; n_q];
            lost.iter().for_each(|&i| blocks[i as usize] = labels[i as usize]);
            let round = Buckets::from_blocks(&blocks, keys.len());
            let alone = Routed::new(&[], &keys, n_q, n_k, false);
            let join = Join::LogSumExp;
            info.keys_visited += attend_buckets(&alone, &round, q, k, g.v, scale, join, cx, out, lse);
            info.fallback_rows += lost.len() as u64;
        }
        info
    }

    /// Attends with every query to the most recent keys of its cluster; with the first tokens exactly.
    fn nearest_recent<T: Real>(
        &self,
        g: &mut Group<'_, T>,
        normed: MatRef<'_, T>,
        centroids: &Mat<T>,
        sizes: Sizes,
    ) -> Result<RunInfo> {
        let (n_q, n_k, d_v, heads, cx) = (g.n_q(), g.n_k(), g.d_v(), g.q.heads(), g.cx);
        let norm_k = normed.sub_rows(heads * n_q..heads * n_q + n_k);
        let k = if self.raw() { g.k } else { norm_k };
        let mut labels = vec![0; n_k];
        assign_into(norm_k, centroids.as_ref(), Metric::Spherical, &mut labels);
        let recent = Recent::new(&labels, centroids.rows(), sizes.window);
        let visible: Vec<usize> = (0..n_q).map(|i| g.visible(i)).collect();
        let exact = visible.partition_point(|&n| n <= sizes.prefix);
        let scale = self.scale(g.scale);
        let mut info = RunInfo::default();
        for h in 0..heads {
            let norm_q = normed.sub_rows(h * n_q..(h + 1) * n_q);
            let q = if self.raw() { g.q.head(h) } else { norm_q };
            let mut labels = vec![0; n_q];
            assign_into(norm_q, centroids.as_ref(), Metric::Spherical, &mut labels);
            info.keys_visited += (n_q * centroids.rows()) as u64;
            let queries = recent.place(&labels, &visible, exact);
            let round = Buckets::from_blocks(&queries.blocks, recent.blocks());
            let rows = h * n_q..(h + 1) * n_q;
            let (out, lse) = (&mut g.out[rows.start * d_v..rows.end * d_v], &mut g.lse[rows]);
            let join = Join::LogSumExp;
            info.keys_visited += attend_buckets(&queries, &round, q, k, g.v, scale, join, cx, out, lse);
            let band = Band::causal(n_k as isize - n_q as isize);
            out[..exact * d_v]
                .par_chunks_mut(ROWS * d_v)
                .zip(lse[..exact].par_chunks_mut(ROWS))
                .enumerate()
                .for_each(|(t, (out, lse))| {
                    let q = q.sub_rows(t * ROWS..t * ROWS + lse.len());
                    exact_rows(q, k, g.v, None, scale, band.from_row(t * ROWS), cx, out, lse);
                });
            info.keys_visited += visible[..exact].iter().map(|&n| n as u64).sum::<u64>();
            for (i, (out, lse)) in out.chunks_exact_mut(d_v).zip(lse.iter_mut()).enumerate() {
                if *lse == T::NEG_INFINITY && visible[i] > 0 {
                    *lse = self.fallback().answer(q.row(i), k, g.v, visible[i], scale, out);
                    info.fallback_rows += u64::from(*lse != T::NEG_INFINITY);
                }
            }
        }
        Ok(info)
    }
}
