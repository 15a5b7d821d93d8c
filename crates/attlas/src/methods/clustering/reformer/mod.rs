//! Reformer: attention inside chunks of tokens sorted by an angular hash.
//!
//! **Idea.** Sort tokens by the bucket of a random angular hash, cut the order into chunks, and let each token attend
//! to its own and the previous chunk; repeat over several hash rounds. In the paper queries double as keys
//! (`keys = shared`).
//!
//! **Math.** Round $r$ gives token $i$ the bucket $h_r(x_i) = \arg\max[W_r x_i; -W_r x_i]$ with Gaussian rows (argmax; argmin
//! only renames buckets), sorts by (bucket, position), and defines the chunk as rank$/m$; $S_i^{(r)}$ are the keys of
//! the chunks $c_i - \mathrm{before} \dots c_i + \mathrm{after}$. `union` is the softmax over $\bigcup_r S_i^{(r)}$,
//! unlike a plain sum over rounds: a key counts only in the first round that finds it; `multiset` counts it once per
//! round. With `keys = shared`, pass the shared vectors as queries and as keys: keys are normalised,
//! $s_{ij} = \mathrm{logit\_scale}\, \langle q_i, k_j/|k_j| \rangle$ without a further $1/\sqrt d$ (the survey keeps
//! both, which makes logits smaller than in the official code by $\sqrt d$), and a token does not attend to itself
//! unless it sees nothing else; then $o_i = v_i$ and the log-sum-exp is −∞, so that the row has no weight in a later
//! merge. With `keys = separate` (an extension, and the default because it works for any model) queries and keys are
//! hashed by the same $W_r$, sorted apart, and cut into the same number of balanced chunks; logits carry the problem's
//! scale and nothing is excluded.
//!
//! **Causal form.** Ranks in the whole order depend on later tokens. To prevent leaks, each bucket is a list of
//! positions that only grows, cut into chunks of $m$ as it fills. Query $i$ sees the chunk that contains its rank in
//! the bucket's list of older keys, up to itself, and the `before` chunks ahead of it, all of its own bucket. In place
//! of neighbours from other buckets it sees the last `window` tokens (the public decoder also fills up with recent
//! tokens). Decoding does the same from the lists.
//!
//! **Reference.** kitaev2020, and the trax code for the factored hash, the bucket count $2n/m$ and `wrap`. The published near
//! perfect figures are for models trained with the hash.
//!
//! **Cost.** Hash $2 R n d \sum f/2$ for factors $f$ of the bucket count, $R$ sorts, $2 R n\,(1 + \mathrm{before} +
//! \mathrm{after}) m (d + d_v)$; scratch $O(n(d + d_v))$ and a few integers per token and round.
//!
//! **Guarantees.** Separate keys: exact when `block` covers all keys. Shared keys: then full shared-QK attention. With
//! `union`, the error is at most the lost mass times the spread of the values, and mass does not fall with rounds.
//! Strictly causal. Tested.
//!
//! **When to use.** Models trained with it. For other models `smyrf` or `hyper` pair queries and keys better.

mod buckets;

use crate::engine::moments::mean_of;
use crate::engine::{Buckets, Join, PerGroup, attend_buckets, attend_subset, exact_group, exact_rows};
use crate::group::{Group, GroupIndex, GroupPlan, GroupStream};
use crate::method::{
    Accepted, Budget, Claims, Cost, Family, Law, Method, Needs, Promise, RunInfo, Spec, Status, Support,
    Tunable, Withdrawn,
};
use crate::workspace::Context;
use crate::{Error, Mask, MatRef, Problem, Real, Result, Spread};
use attlas_num::hash::{CrossPolytope, Lsh};
use attlas_num::kernels::{Band, dot};
use attlas_num::par::*;
use buckets::{Chunks, KeyRound, QueryRound};

/// Registry entry.
pub static METHOD: Method = Method {
    id: "reformer",
    family: Family::Clustering,
    title: "Reformer: chunks of tokens sorted by an angular hash",
    reference: "kitaev2020",
    claims: Claims {
        decode: true,
        exact_at: &[("block", Budget::NumKeys)],
        row_stochastic: true,
        deterministic: false,
        drops: true,
        exponent: 1.0,
        needs: Needs::Training,
        except: &[
            (Law::QueriesAlone, "without a mask, a query's chunk is its rank among the queries"),
            (Law::KeyOrder, "inside a bucket, chunks are cut by position"),
        ],
        withdrawn: &[
            Withdrawn {
                param: "keys",
                value: "shared",
                promise: Promise::ExactAt,
                reason: "shared keys are normalised, and no token attends to itself",
            },
            Withdrawn {
                param: "keys",
                value: "shared",
                promise: Promise::Softmax,
                reason: "shared queries and keys are a model of their own",
            },
            Withdrawn {
                param: "across_buckets",
                value: "false",
                promise: Promise::RowStochastic,
                reason: "a query whose bucket holds no key is answered by zero",
            },
            Withdrawn {
                param: "window",
                value: "0",
                promise: Promise::RowStochastic,
                reason: "a causal query whose bucket holds no older key is answered by zero",
            },
            Withdrawn {
                param: "centre",
                value: "true",
                promise: Promise::Law(Law::DecodeIsPrefill),
                reason: "a stream is not given the queries of its prompt, so their mean is another one",
            },
        ],
        spread: Spread::RING,
        ..Claims::BASE
    },
    probes: &[
        &[("rounds", "3"), ("block", "7")],
        &[("rounds", "2"), ("block", "8"), ("merge", "multiset"), ("window", "3")],
        &[("rounds", "2"), ("block", "9"), ("after", "1"), ("before", "2"), ("across_buckets", "false")],
        &[("keys", "shared"), ("rounds", "3"), ("block", "8"), ("window", "0")],
        &[("keys", "shared"), ("rounds", "2"), ("block", "6"), ("across_buckets", "false"), ("buckets", "4")],
        &[("keys", "shared"), ("rounds", "2"), ("block", "8"), ("merge", "multiset"), ("wrap", "true")],
        &[("rounds", "3"), ("block", "8"), ("wrap", "true"), ("buckets", "12")],
        &[("rounds", "2"), ("block", "8"), ("centre", "true")],
        &[("keys", "shared"), ("rounds", "2"), ("block", "8"), ("centre", "true")],
    ],
    subsets: &[
        &[("rounds", "2"), ("block", "6")],
        &[("rounds", "1"), ("block", "5"), ("before", "0"), ("across_buckets", "false")],
    ],
    tunable: &[Tunable::budget("block")],
    ..Method::of::<Params>()
};

crate::choices! {
    /// Source of the keys.
    pub enum Keys {
        /// Separate vectors.
        Separate = "separate",
        /// The queries, passed again as keys: they are normalised, and no token attends to itself.
        Shared = "shared",
    }
}

crate::choices! {
    /// Weight of a key found in several rounds.
    pub enum Merge {
        /// Once: the softmax over the union of the rounds.
        Union = "union",
        /// Once for each round that finds it, as in the public code by default.
        Multiset = "multiset",
    }
}

crate::params! {
    /// Parameters of [`Reformer`].
    pub struct Params {
        /// Source of the keys.
        keys: Keys = Keys::Separate;
        /// Number of independent hash functions.
        rounds: usize = 4, in 1..=64;
        /// Tokens in a chunk.
        block: usize = 64, in 1..=1 << 30;
        /// Buckets per hash function; auto takes two per chunk. Large numbers are factored, which may leave a few less.
        buckets: Option<usize> = None, in 2..=1 << 24;
        /// Chunks before its own that a token sees.
        before: usize = 1, in 0..=1024;
        /// Chunks after its own that a token sees; unused with a causal mask.
        after: usize = 0, in 0..=1024;
        /// Let tokens see neighbours in other buckets; auto is true without a mask and false with a causal one, which
        /// has no such form.
        across_buckets: Option<bool> = None;
        /// Let the first chunk of a round see the last chunk of the round before, as public code does.
        wrap: bool = false;
        /// Subtract the mean of the queries and that of the keys before hashing; with a causal mask, the mean of the
        /// rows so far. Otherwise queries and keys of trained models, which lie in cones around different directions,
        /// seldom share a bucket.
        centre: bool = false;
        /// Weight of a key found in several rounds.
        merge: Merge = Merge::Union;
        /// Factor of the inner products with normalised, shared keys.
        logit_scale: f64 = 1.0, in 0.0..=1e6;
        /// Causal problems: recent tokens that every query also sees; auto for one chunk.
        window: Option<usize> = None, in 0..=1 << 30;
        /// Seed of the hash functions.
        seed: u64 = 0, in 0..=u64::MAX;
    }
}

impl Spec for Params {
    const METHOD: &'static Method = &METHOD;

    fn supports(&self, p: &Problem) -> Support {
        let (causal, shared) = (p.mask == Mask::Causal, self.keys == Keys::Shared);
        Support::yes()
            .and_unless(
                shared && p.n_heads != p.n_kv_heads,
                "keys = shared needs a key head for every query head: a query is its own key",
            )
            .and_unless(
                shared && (p.n_q > p.n_k || !causal && p.n_q != p.n_k),
                "keys = shared needs as many keys as queries, or more with a causal mask",
            )
            .and_unless(
                causal && self.across_buckets == Some(true),
                "which keys of other buckets are neighbours depends on later tokens; set across_buckets = auto or false for a \
                 causal mask",
            )
            .and_unless(
                shared && !p.near.is_none(),
                "keys = shared takes a query for the key at its own place, which is near; set keys = separate for a near field",
            )
            .and_unless(
                causal && self.wrap,
                "wrap looks into a chunk of other buckets, which depends on later tokens; set wrap = false for a causal mask",
            )
    }

    fn build(self, x: Accepted<'_>) -> Result<impl GroupPlan> {
        Reformer::new(x.problem, self)
    }
}

impl Params {
    /// Draws the hash functions for `n` keys; a single chunk needs none.
    fn hash<T: Real>(&self, index: GroupIndex, d: usize, n: usize) -> Option<CrossPolytope<T>> {
        let key = index.stream_key(self.seed).named("reformer");
        let buckets = self.buckets.unwrap_or(2 * (n / self.block).max(1));
        (n > self.block).then(|| CrossPolytope::new(key, d, buckets, self.rounds))
    }
}

/// The plan: rounds, chunks, merging, and the hash functions.
#[derive(Clone, Debug)]
pub struct Reformer {
    params: Params,
    /// Hash functions for the planned number of keys.
    hashes: PerGroup<Option<CrossPolytope<f64>>>,
    planned: usize,
}

impl Reformer {
    /// Creates a plan with these parameters; draws the hash functions.
    pub(crate) fn new(p: &Problem, params: Params) -> Result<Self> {
        let hashes = PerGroup::draw(p, |index| Ok(params.hash(index, p.d, p.n_k)))?;
        Ok(Self { params, hashes, planned: p.n_k })
    }

    fn shared(&self) -> bool {
        self.params.keys == Keys::Shared
    }

    /// Returns the hash functions for `n` keys; a single chunk needs one round and no hash.
    fn hash<T: Real>(&self, index: GroupIndex, d: usize, n: usize) -> Option<CrossPolytope<T>> {
        if n == self.planned {
            return self.hashes.of(index).as_ref().map(CrossPolytope::cast);
        }
        // The number of buckets depends on the number of keys, which is not the planned one here.
        self.params.hash(index, d, n)
    }

    fn window(&self) -> usize {
        self.params.window.unwrap_or(self.params.block)
    }

    /// Counts the keys older than the window of a query that sees `visible` keys: those it finds by hash.
    fn older(&self, visible: usize) -> usize {
        visible.saturating_sub(self.window() + usize::from(self.shared()))
    }

    /// Returns the rows to hash: `x` itself or, in `out`, its rows minus the mean of all rows or of the rows so far.
    fn centre_into<'a, T: Real>(&self, x: MatRef<'a, T>, causal: bool, out: &'a mut [T]) -> MatRef<'a, T> {
        if !self.params.centre {
            return x;
        }
        let all = if causal { Vec::new() } else { mean_of(x) };
        let mut so_far = Running::new(x.cols());
        for (row, out) in x.iter_rows().zip(out.chunks_exact_mut(x.cols())) {
            match causal {
                true => so_far.centre_into(row, out),
                false => subtract(row, &all, out),
            }
        }
        MatRef::new(out, x.rows(), x.cols())
    }

    fn scale<T: Real>(&self, scale: T) -> T {
        if self.shared() { T::from_f64(self.params.logit_scale) } else { scale }
    }
}

/// Rows of the window per task.
const WINDOW_ROWS: usize = 192;

impl GroupPlan for Reformer {
    fn cost(&self, p: &Problem) -> Cost {
        let Params { rounds, block, before, after, .. } = self.params;
        let (heads, groups) = ((p.batch * p.n_heads * p.n_q) as u64, (p.batch * p.n_kv_heads * p.n_k) as u64);
        let hash: CrossPolytope<f64> = CrossPolytope::new(
            GroupIndex { batch: 0, kv_head: 0 }.stream_key(0),
            0,
            self.params.buckets.unwrap_or(2 * (p.n_k / block).max(1)),
            0,
        );
        let directions = hash.factors().iter().sum::<usize>() / 2;
        let recent = if p.mask == Mask::Causal { self.window() } else { 0 };
        let chunks = 1u64.saturating_add((before + after) as u64);
        let seen = (chunks.saturating_mul((rounds * block) as u64)).saturating_add(recent as u64);
        let pairs = (heads * seen.min(p.n_k as u64 * rounds as u64)).max(1);
        Cost {
            setup_flops: 2 * (heads + groups) * (rounds * directions * p.d) as u64,
            run_flops: 2 * pairs * (p.d + p.d_v) as u64,
            bytes: 4 * rounds as u64 * (heads + chunks * groups) * (p.d + p.d_v) as u64,
        }
    }

    fn run<T: Real>(&self, mut g: Group<'_, T>) -> Result<RunInfo> {
        let block = self.params.block;
        let causal = g.mask == Mask::Causal;
        if self.shared() && (g.n_q() > g.n_k() || !causal && g.n_q() != g.n_k()) {
            return Err(Error::Unsupported {
                method: METHOD.id.into(),
                reasons: vec!["keys = shared cannot leave out padded keys: a query is its own key".into()],
            });
        }
        if !self.shared() && g.n_k() <= block || g.n_q() == 0 || g.n_k() == 0 {
            return Ok(RunInfo { status: Status::Exact, ..exact_group(&mut g)? });
        }
        let (n_k, d, cx) = (g.n_k(), g.k.cols(), g.cx);
        let mut unit = cx.scratch.take::<T>(if self.shared() { n_k * d } else { 0 });
        if self.shared() {
            g.k.gather_into(0..n_k, &mut unit);
            unit.par_chunks_mut(d).for_each(normalise);
        }
        let k = if self.shared() { MatRef::new(&unit, n_k, d) } else { g.k };
        let hash = self.hash::<T>(g.index, d, n_k);
        let mut centred = cx.scratch.take::<T>(if self.params.centre { n_k * d } else { 0 });
        let hashed_k = self.centre_into(g.k, causal, &mut centred);
        let rounds = hash.as_ref().map_or(1, |h| h.rounds());
        let keys: Vec<KeyRound> = (0..rounds)
            .into_par_iter()
            .map(|r| {
                let codes = hash.as_ref().map_or(vec![0; n_k], |h| h.codes(hashed_k, r));
                KeyRound::new(codes, if causal { Chunks::PerBucket(block) } else { self.chunks(n_k) })
            })
            .collect();
        let mut visited = self.start(&mut g, k);
        let (n_q, d_v, scale) = (g.n_q(), g.d_v(), self.scale(g.scale));
        let older: Option<Vec<usize>> = causal.then(|| (0..n_q).map(|i| self.older(g.visible(i))).collect());
        let mut centred = cx.scratch.take::<T>(if self.params.centre { n_q * d } else { 0 });
        for h in 0..g.q.heads() {
            let q = g.q.head(h);
            let hashed_q = self.centre_into(q, causal, &mut centred);
            let (queries, in_chunks): (Vec<QueryRound>, Vec<Buckets>) = keys
                .par_iter()
                .enumerate()
                .map(|(r, keys)| {
                    let codes = match (&hash, self.shared()) {
                        (None, _) => vec![0; n_q],
                        (Some(_), true) => keys.codes()[n_k - n_q..].to_vec(),
                        (Some(hash), false) => hash.codes(hashed_q, r),
                    };
                    let queries = match &older {
                        Some(older) => QueryRound::causal(codes, keys, older, block),
                        None if self.shared() => QueryRound::shared(codes, keys),
                        None => QueryRound::balanced(codes, keys),
                    };
                    let round = Buckets::from_blocks(queries.chunks(), keys.chunks());
                    (queries, round)
                })
                .collect();
            let rows = h * n_q..(h + 1) * n_q;
            for (r, round) in in_chunks.iter().enumerate() {
                let block_mask = buckets::Sorted {
                    round: r,
                    keys: &keys,
                    queries: &queries,
                    params: &self.params,
                    self_key: self.shared().then(|| n_k - n_q),
                };
                let out = &mut g.out[rows.start * d_v..rows.end * d_v];
                let lse = &mut g.lse[rows.clone()];
                visited +=
                    attend_buckets(&block_mask, round, q, k, g.v, scale, Join::LogSumExp, cx, out, lse);
            }
        }
        Ok(self.finish(g, visited))
    }

    fn stream<T: Real>(&self, p: &Problem, index: GroupIndex) -> Option<Box<dyn GroupStream<T>>> {
        let hash = self.hash(index, p.d, p.n_k);
        let (rounds, count) = hash.as_ref().map_or((1, 1), |h: &CrossPolytope<T>| (h.rounds(), h.buckets()));
        Some(Box::new(BucketStream {
            plan: self.clone(),
            hash,
            buckets: vec![vec![Vec::new(); count]; rounds],
            codes: vec![0; rounds],
            k: Vec::new(),
            v: Vec::new(),
            d: p.d,
            d_v: p.d_v,
            index,
            key_mean: Running::new(p.d),
            query_means: vec![Running::new(p.d); p.group_size()],
        }))
    }
}

/// The mean of the rows so far.
#[derive(Clone, Debug)]
struct Running {
    count: f64,
    mean: Vec<f64>,
}

impl Running {
    fn new(d: usize) -> Self {
        Self { count: 0.0, mean: vec![0.0; d] }
    }

    /// Subtracts the mean of the rows so far, including this one, which gives the same direction as subtracting the
    /// mean of the earlier rows.
    fn centre_into<T: Real>(&mut self, row: &[T], out: &mut [T]) {
        self.count += 1.0;
        self.mean.iter_mut().zip(row).for_each(|(m, x)| *m += (x.to_f64() - *m) / self.count);
        subtract(row, &self.mean, out);
    }
}

fn subtract<T: Real>(row: &[T], mean: &[f64], out: &mut [T]) {
    out.iter_mut().zip(row).zip(mean).for_each(|((o, x), m)| *o = T::from_f64(x.to_f64() - m));
}

fn normalise<T: Real>(row: &mut [T]) {
    let length = dot(row, row).sqrt();
    if length > T::ZERO {
        row.iter_mut().for_each(|x| *x /= length);
    }
}

impl Reformer {
    /// Cuts of the sorted keys without a mask: at every `block` ranks, or balanced so that queries fit.
    fn chunks(&self, n: usize) -> Chunks {
        let block = self.params.block;
        if self.shared() { Chunks::Ragged(block) } else { Chunks::Balanced(n.div_ceil(block)) }
    }

    /// Starts every row with its window, or with nothing.
    fn start<T: Real>(&self, g: &mut Group<'_, T>, k: MatRef<'_, T>) -> u64 {
        let causal = g.mask == Mask::Causal;
        let (v, scale, cx, n_k) = (g.v, self.scale(g.scale), g.cx, g.n_k());
        let (d_v, n_q, band) = (v.cols(), g.n_q(), g.band());
        let mut visited = 0;
        for h in 0..g.q.heads() {
            let q = g.q.head(h);
            let rows = h * n_q..(h + 1) * n_q;
            visited += g.out[rows.start * d_v..rows.end * d_v]
                .par_chunks_mut(WINDOW_ROWS * d_v)
                .zip(g.lse[rows].par_chunks_mut(WINDOW_ROWS))
                .enumerate()
                .map(|(t, (out, lse))| {
                    let first = t * WINDOW_ROWS;
                    let Some(upper) = band.upper.filter(|_| causal && self.window() > 0) else {
                        out.fill(T::ZERO);
                        lse.fill(T::NEG_INFINITY);
                        return 0;
                    };
                    let upper = upper - isize::from(self.shared());
                    let lower = upper.saturating_sub_unsigned(self.window() - 1);
                    let recent = Band { lower: Some(lower), upper: Some(upper) }.from_row(first);
                    let q = q.sub_rows(first..first + lse.len());
                    exact_rows(q, k, v, None, scale, recent, cx, out, lse);
                    (0..lse.len()).map(|i| recent.range(i, n_k).len() as u64).sum::<u64>()
                })
                .sum::<u64>();
        }
        visited
    }

    /// Gives shared tokens that saw nothing else their own value.
    fn finish<T: Real>(&self, g: Group<'_, T>, visited: u64) -> RunInfo {
        let mut info = RunInfo::visited(visited);
        let (n_k, n_q, d_v) = (g.n_k(), g.n_q(), g.d_v());
        for (row, out) in g.out.chunks_exact_mut(d_v).enumerate() {
            if g.lse[row] == T::NEG_INFINITY {
                if self.shared() {
                    out.copy_from_slice(g.v.row(row % n_q + n_k - n_q));
                    info.fallback_rows += 1;
                } else {
                    info.empty_rows += 1;
                }
            }
        }
        info
    }
}

/// Decoding state: positions of every bucket, and keys and values as given (shared keys normalised).
#[derive(Debug)]
struct BucketStream<T> {
    plan: Reformer,
    hash: Option<CrossPolytope<T>>,
    /// Positions by round and bucket.
    buckets: Vec<Vec<Vec<u32>>>,
    /// Buckets of the last key.
    codes: Vec<u32>,
    k: Vec<T>,
    v: Vec<T>,
    d: usize,
    d_v: usize,
    index: GroupIndex,
    /// Means of the keys and of each head's queries so far, if hashing subtracts them.
    key_mean: Running,
    query_means: Vec<Running>,
}

impl<T: Real> GroupStream<T> for BucketStream<T> {
    fn push(&mut self, k: MatRef<'_, T>, v: MatRef<'_, T>, _: Context<'_>) -> Result<()> {
        let first = self.k.len() / self.d;
        let mut centred = vec![T::ZERO; if self.plan.params.centre { k.rows() * self.d } else { 0 }];
        for (row, out) in k.iter_rows().zip(centred.chunks_exact_mut(self.d)) {
            self.key_mean.centre_into(row, out);
        }
        let hashed = if self.plan.params.centre { MatRef::new(&centred, k.rows(), self.d) } else { k };
        for (r, buckets) in self.buckets.iter_mut().enumerate() {
            let codes = self.hash.as_ref().map_or(vec![0; k.rows()], |h| h.codes(hashed, r));
            for (j, &code) in (first..).zip(&codes) {
                buckets[code as usize].push(j as u32);
                self.codes[r] = code;
            }
        }
        for (k, v) in k.iter_rows().zip(v.iter_rows()) {
            let start = self.k.len();
            self.k.extend_from_slice(k);
            self.v.extend_from_slice(v);
            if self.plan.shared() {
                normalise(&mut self.k[start..]);
            }
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
        let n = self.k.len() / self.d;
        let (k, v) = (MatRef::new(&self.k, n, self.d), MatRef::new(&self.v, n, self.d_v));
        let Params { block, before, merge, .. } = self.plan.params;
        let shared = self.plan.shared();
        if !shared && self.hash.is_none() {
            return exact_group(&mut Group::decode(q, k, v, scale, out, lse, self.index, cx)?);
        }
        let older = self.plan.older(n);
        let end = n - usize::from(shared && n > 0);
        let mut info = RunInfo::default();
        let mut centred = vec![T::ZERO; if self.plan.params.centre { q.rows() * self.d } else { 0 }];
        for ((row, mean), out) in
            q.iter_rows().zip(&mut self.query_means).zip(centred.chunks_exact_mut(self.d))
        {
            mean.centre_into(row, out);
        }
        let hashed = if self.plan.params.centre { MatRef::new(&centred, q.rows(), self.d) } else { q };
        for (h, (out, lse)) in out.chunks_exact_mut(self.d_v).zip(lse).enumerate() {
            let mut met: Vec<usize> = Vec::new();
            for (r, buckets) in self.buckets.iter().enumerate() {
                let code = match &self.hash {
                    Some(hash) if !shared => hash.codes(hashed.sub_rows(h..h + 1), r)[0],
                    _ => self.codes[r],
                };
                let list = &buckets[code as usize];
                let seen = list.partition_point(|&j| (j as usize) < older);
                let start = (seen / block).saturating_sub(before) * block;
                met.extend(list[start..seen].iter().map(|&j| j as usize));
            }
            if merge == Merge::Union {
                met.sort_unstable();
                met.dedup();
            }
            met.extend(older.min(end)..end);
            let mut weights = cx.scratch.take::<T>(met.len());
            let scale = self.plan.scale(scale);
            *lse = attend_subset(q.row(h), k, v, &met, scale, &mut weights, out);
            info.keys_visited += met.len() as u64;
            if *lse == T::NEG_INFINITY && n > 0 {
                if shared {
                    out.copy_from_slice(v.row(n - 1));
                    info.fallback_rows += 1;
                } else {
                    info.empty_rows += 1;
                }
            }
        }
        Ok(info)
    }

    fn state_bytes(&self) -> usize {
        let positions: usize = self.buckets.iter().flatten().map(Vec::len).sum();
        (self.k.len() + self.v.len()) * size_of::<T>() + 4 * positions
    }
}

#[cfg(test)]
mod tests;
