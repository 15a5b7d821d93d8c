//! Multipole attention: exact for the best clusters of cached keys, one pseudo-token for each other cluster.
//!
//! **Idea.** While decoding, the cache is `[sinks | clustered | recent]`. Cached keys are clustered by k-means, and
//! their centroids score them. Attention is exact over the members of the best clusters, up to a token budget; every
//! other cluster counts as one token at its mean, weighted by its size: a monopole far field.
//!
//! **Math.** Cluster $c$ holds $n_c$ keys with means $\bar k_c$, $\bar v_c$. For query head $h$ of a group,
//! $s_c^h = \tau \langle q^h, \bar k_c \rangle$, $D^h = \ln \sum_c n_c e^{s_c^h}$ over *all* clusters, score
//! $S_c = \mathrm{mean}_h\, e^{s_c^h - D^h}$. Clusters are taken in order of $S_c$ (ties by number) until one no longer
//! fits into `budget`. The output is the softmax over the logits $\tau \langle q^h, k_j \rangle$ of sinks, recent and
//! taken keys, with values $v_j$, and $s_c^h + \ln n_c$ of all other clusters, with values $\bar v_c$. The heads of a
//! group choose together or, with `per_head`, separately. With `hierarchy`, clusters of fine centroids are scored
//! first, and then only the children of those taken; at every level $n_c$ counts keys. Scored and attended are
//! $n_\mathrm{coarse} + |\mathrm{children}| + \mathrm{budget}$ per query.
//!
//! **State.** The prompt is clustered in consecutive blocks of `window` keys; the last one has a length in
//! $[\mathrm{window}/2, 3\,\mathrm{window}/2)$. Every `interval` tokens, `interval` keys leave the recent buffer (which
//! holds between `interval` and $2\,\mathrm{interval} - 1$): random ones among them become seeds, the others join the
//! nearest centroid as running means, `update_iters` Lloyd iterations run over the last block, and counts and means are
//! recomputed from its final labels. When the last block reaches $3\,\mathrm{window}/2$, its first `window` tokens
//! become a separate block.
//!
//! **Whole sequences.** A causal problem is computed as in teacher forcing: the first $n_k - n_q$ tokens are the
//! prompt, and each query uses the state built from strictly earlier tokens. Without a mask all keys are the prompt.
//! With `prompt = blocks` a causal problem is computed in blocks of 64 rows instead: the keys after the sinks are
//! clustered in consecutive chunks of `chunk` keys; a block attends to the clusters of the chunks that end at least
//! `interval` keys before its first row, and exactly to the keys after these; four scout rows, none later than the
//! first, choose its clusters by the sum of their $e^{s_c^h - D^h}$. This is dense work, many times faster than a
//! choice for every row.
//!
//! **Rotary positions.** Keys arrive rotated. With `rope_base` set, clusters are formed on keys rotated back to
//! position 0 and scored by the query rotated to position `rope_offset` (windowed RoPE), while exact parts use keys and
//! queries as given. This is exact for plain rotary embeddings at positions $0, 1, \dots$ with frequencies
//! $b^{-2l/\mathrm{dim}}$; for stretched frequencies (YaRN, llama3) leave it off: clusters are then formed on rotated
//! keys.
//!
//! **Reference.** hooper2025; survey, clustering. Corrected: the denominator of the score runs over all clusters; logits
//! carry $\tau$; the mass of the far field enters the normaliser; clusters change every `interval` tokens, not with every
//! query. Differences from the authors' code: counts are those of the final labels; a seed counts itself; a budget that
//! covers all keys takes all clusters; coarse counts are keys. `window` is smaller than the authors' 8192, because on a
//! CPU the update of such a block costs as much as exact decoding over 65 thousand keys.
//!
//! **Cost.** Per token and head $2 C d$ to score $C = \mathrm{ratio} \cdot n$ clusters, $2(\mathrm{sinks} + \mathrm{recent} +
//! \mathrm{budget})(d + d_v)$, $2 C d_v$; reads $\mathrm{ratio}\, n (d + d_v)$ instead of $n(d + d_v)$. Prompt
//! $2 \cdot \mathrm{iters} \cdot n\, \mathrm{window}\, \mathrm{ratio}\, d$; an update costs `update_iters + 1` passes
//! over the last block.
//!
//! **Guarantees.** Exact when `budget` covers all keys; for any budget with `ratio = 1` or equal keys in every cluster. By
//! Jensen, without `rope_base`, $\hat\ell \le \ell$, and $\hat\ell$ does not fall as the budget grows. Tested.
//!
//! **When to use.** Decoding over long contexts, where memory traffic is the cost.

mod attend;
mod blocks;
mod state;

use crate::engine::{Turn, exact_group};
use crate::group::{Group, GroupIndex, GroupPlan, GroupStream};
use crate::method::{
    Accepted, Budget, Claims, Cost, Family, Law, Method, Promise, RunInfo, Spec, Status, Support, Tunable,
    Withdrawn,
};
use crate::workspace::Context;
use crate::{Error, Mask, MatRef, Problem, Real, Result, Spread};
use attend::ClusteredKeys;
use attlas_num::kernels::pages;
use attlas_num::par::*;
use state::KeyClusters;

pub use crate::engine::RopeLayout;

/// Registry entry.
pub static METHOD: Method = Method {
    id: "multipole",
    family: Family::Clustering,
    title: "Multipole attention: exact near clusters, monopole far field",
    reference: "hooper2025",
    claims: Claims {
        decode: true,
        exact_at: &[("budget", Budget::NumKeys)],
        deterministic: false,
        except: &[
            (Law::KeyOrder, "sinks, recent keys and blocks are taken by position"),
            (Law::HeadsAlone, "the heads of a group choose their clusters together"),
            (Law::DecodeIsPrefill, "a prompt is clustered at once, later tokens as they come (tested here)"),
        ],
        withdrawn: &[Withdrawn {
            param: "prompt",
            value: "blocks",
            promise: Promise::Law(Law::QueriesAlone),
            reason: "clusters are chosen by scout rows, once for a block of rows",
        }],
        spread: Spread::RING,
        ..Claims::BASE
    },
    probes: &[
        &[("ratio", "0.25"), ("budget", "12"), ("sinks", "3"), ("interval", "8"), ("window", "32")],
        &[
            ("ratio", "0.5"),
            ("hierarchy", "true"),
            ("coarse_ratio", "0.1"),
            ("budget", "6"),
            ("sinks", "0"),
            ("interval", "5"),
            ("window", "20"),
            ("per_head", "true"),
        ],
        &[
            ("rope_base", "10000"),
            ("rope_dim", "4"),
            ("rope_layout", "interleaved"),
            ("far", "drop"),
            ("budget", "9"),
            ("interval", "8"),
            ("window", "16"),
        ],
        &[
            ("prompt", "blocks"),
            ("ratio", "0.25"),
            ("budget", "12"),
            ("interval", "8"),
            ("window", "32"),
            ("chunk", "16"),
        ],
        &[("rope_base", "500"), ("rope_dim", "4"), ("budget", "0"), ("interval", "8"), ("window", "4096")],
    ],
    subsets: &[&[("budget", "7"), ("interval", "4"), ("window", "16"), ("sinks", "1"), ("far", "drop")]],
    tunable: &[Tunable::budget("budget"), Tunable::values("prompt", &["blocks"])],
    ..Method::of::<Params>()
};

crate::choices! {
    /// Treatment of clusters outside the exact part.
    pub enum Far {
        /// Each counts as one token, weighted by its size.
        Monopole = "monopole",
        /// They are left out.
        Drop = "drop",
    }
}

crate::choices! {
    /// Computation of the rows of a whole causal sequence.
    pub enum Prompt {
        /// As in teacher forcing: every row uses the clusters that decoding would have, and makes its own choice.
        Tokens = "tokens",
        /// In blocks of rows, over clusters of chunks of keys, chosen once per block for all heads of a group.
        Blocks = "blocks",
    }
}

crate::params! {
    /// Parameters of [`Multipole`].
    pub struct Params {
        /// Clusters per key.
        ratio: f64 = 0.0625, in 1e-6..=1.0;
        /// Maximum number of clustered keys attended exactly for each query.
        budget: usize = 128, in 0..=1 << 30;
        /// Keys at the start that are always attended exactly.
        sinks: usize = 10, in 0..=1 << 30;
        /// Tokens between updates of the clusters; the recent buffer holds one to two times this number.
        interval: usize = 128, in 1..=1 << 30;
        /// Keys that are clustered together; at least twice the interval.
        window: usize = 2048, in 2..=1 << 30;
        /// Lloyd iterations over a block of the prompt.
        iters: usize = 10, in 0..=1000;
        /// Lloyd iterations of an update.
        update_iters: usize = 3, in 0..=1000;
        /// Score clusters of centroids first.
        hierarchy: bool = false;
        /// Coarse clusters per key, with a hierarchy.
        coarse_ratio: f64 = 0.015625, in 1e-6..=1.0;
        /// Keys in the coarse clusters whose children are scored, in multiples of the budget.
        coarse_factor: f64 = 8.0, in 1.0..=1e6;
        /// Treatment of clusters outside the exact part.
        far: Far = Far::Monopole;
        /// Let each query head choose its own clusters.
        per_head: bool = false;
        /// Base of the keys' rotary embedding, to cluster them unrotated; auto clusters them as given. In a model,
        /// `model` means the model's own base.
        rope_base: Option<f64> = None, in 1.0..=1e12;
        /// Number of rotated features; auto for all.
        rope_dim: Option<usize> = None, in 2..=1 << 20;
        /// Layout of the rotated pairs.
        rope_layout: RopeLayout = RopeLayout::Half;
        /// Position of the query when it scores unrotated centroids.
        rope_offset: usize = 2048, in 0..=1 << 30;
        /// Computation of the rows of a whole causal sequence; blocks are many times faster.
        prompt: Prompt = Prompt::Tokens;
        /// Keys that are clustered together, with prompt = blocks.
        chunk: usize = 256, in 1..=1 << 30;
        /// Seed of the initial centroids and of later ones.
        seed: u64 = 0, in 0..=u64::MAX;
    }
}

impl Spec for Params {
    const METHOD: &'static Method = &METHOD;

    fn supports(&self, p: &Problem) -> Support {
        let dim = self.rope_dim.unwrap_or(p.d);
        Support::yes()
            .and_unless(
                self.rope_base.is_some() && !p.near.is_none(),
                "keys are turned back by their place, which a near field shifts; leave rope_base unset",
            )
            .and_unless(
                self.prompt == Prompt::Blocks && (self.rope_base.is_some() || self.hierarchy || self.per_head),
                "blocks of rows choose flat clusters of keys as they are, together; set prompt = tokens, or leave out \
                 rope_base, hierarchy and per_head",
            )
            .and_unless(
                self.rope_base.is_some() && (dim > p.d || !dim.is_multiple_of(2)),
                format!(
                    "rope_dim = {dim} rotates whole pairs of the {} features; give an even number up to it",
                    p.d
                ),
            )
    }

    fn build(self, _: Accepted<'_>) -> Result<impl GroupPlan> {
        Multipole::new(self)
    }
}

/// The plan: sizes of clusters, buffers and budgets.
#[derive(Clone, Debug)]
pub struct Multipole {
    params: Params,
}

impl Multipole {
    /// Creates a plan with these parameters; an error unless the window is at least twice the interval.
    pub(crate) fn new(params: Params) -> Result<Self> {
        if params.window < params.interval.saturating_mul(2) {
            let least = params.interval.saturating_mul(2);
            return Err(Error::param(
                "window",
                params.window,
                format!("at least twice the interval, {least}"),
            ));
        }
        Ok(Self { params })
    }

    /// Counts the keys that are clustered among `n` tokens.
    fn clustered(&self, n: usize) -> usize {
        let Params { sinks, interval, .. } = self.params;
        interval * (n.saturating_sub(sinks) / interval).saturating_sub(1)
    }

    fn turn(&self, d: usize) -> Option<Turn> {
        let Params { rope_base, rope_dim, rope_layout, .. } = self.params;
        rope_base.map(|base| Turn::new(base, rope_dim.unwrap_or(d), rope_layout == RopeLayout::Half))
    }
}

/// Positions per task.
const POSITIONS: usize = 16;

impl GroupPlan for Multipole {
    fn cost(&self, p: &Problem) -> Cost {
        let Params { ratio, budget, sinks, interval, window, iters, update_iters, .. } = self.params;
        let (n, d, d_v) = (p.n_k as f64, p.d as f64, p.d_v as f64);
        let pairs = p.visible_pairs() as f64;
        let rows = (p.batch * p.n_heads * p.n_q) as f64;
        let exact = rows * ((sinks + 2 * interval + budget) as f64).min(n);
        let block = (window as f64).min(n) * ratio;
        let passes = match p.mask {
            Mask::None => (iters + 1) as f64,
            Mask::Causal => (iters + 1) as f64 + (update_iters + 1) as f64 * window as f64 / interval as f64,
        };
        let clustering = (p.batch * p.n_kv_heads) as f64 * passes * n * block * d;
        Cost {
            setup_flops: 2 * clustering as u64,
            run_flops: 2 * ((exact.min(pairs) + ratio * pairs).max(1.0) * (d + d_v)) as u64,
            bytes: (4.0 * (exact + ratio * pairs) * (d + d_v)) as u64,
        }
    }

    fn run<T: Real>(&self, mut g: Group<'_, T>) -> Result<RunInfo> {
        if self.params.budget >= g.n_k() || g.n_q() == 0 {
            return Ok(RunInfo { status: Status::Exact, ..exact_group(&mut g)? });
        }
        if self.params.prompt == Prompt::Blocks && g.mask == Mask::Causal && g.n_q() > 1 {
            return self.run_blocks(&mut g);
        }
        let (n_k, n_q, d, d_v, heads, cx) = (g.n_k(), g.n_q(), g.k.cols(), g.d_v(), g.q.heads(), g.cx);
        let turn = self.turn(d);
        let mut turned = cx.scratch.take::<T>(if turn.is_some() { n_k * d } else { 0 });
        if let Some(turn) = &turn {
            g.k.gather_into(0..n_k, &mut turned);
            turned.par_chunks_mut(d).enumerate().for_each(|(j, row)| turn.apply(-(j as f64), row));
        }
        let flat = if turn.is_some() { MatRef::new(&turned, n_k, d) } else { g.k };
        let key = g.index.stream_key(self.params.seed).named("multipole");
        let mut state = KeyClusters::new(self.params.clone(), d, d_v, key);
        let prompt = match g.mask {
            Mask::None => n_k,
            Mask::Causal => n_k.saturating_sub(n_q),
        };
        state.prefill(flat, g.v, self.clustered(prompt));

        let mut staged = cx.scratch.take::<T>(n_q * heads * d_v);
        let mut staged_lse = cx.scratch.take::<T>(n_q * heads);
        let (mut visited, mut first) = (0, 0);
        while first < n_q {
            // All queries up to the next update use the same clusters.
            let target = self.clustered(g.visible(first));
            state.update(flat, g.v, target.max(state.clustered()));
            let last = (first..n_q).find(|&i| self.clustered(g.visible(i)) > target).unwrap_or(n_q);
            let rows = first * heads..last * heads;
            visited += staged[rows.start * d_v..rows.end * d_v]
                .par_chunks_mut(POSITIONS * heads * d_v)
                .zip(staged_lse[rows].par_chunks_mut(POSITIONS * heads))
                .enumerate()
                .map(|(t, (out, lse))| {
                    let mut q = cx.scratch.take::<T>(heads * d);
                    let mut visited = 0;
                    for (i, (out, lse)) in (first + t * POSITIONS..)
                        .zip(out.chunks_exact_mut(heads * d_v).zip(lse.chunks_exact_mut(heads)))
                    {
                        (0..heads)
                            .zip(q.chunks_exact_mut(d))
                            .for_each(|(h, row)| row.copy_from_slice(g.q.head(h).row(i)));
                        let position = (i + n_k) as f64 - n_q as f64;
                        let cache = ClusteredKeys { k: g.k, v: g.v, len: g.visible(i), state: &state };
                        let q = MatRef::new(&q, heads, d);
                        visited += self.attend(cache, q, turn.as_ref(), position, g.scale, cx, out, lse);
                    }
                    visited
                })
                .sum::<u64>();
            first = last;
        }
        for h in 0..heads {
            for i in 0..n_q {
                let (from, to) = (i * heads + h, h * n_q + i);
                g.out[to * d_v..(to + 1) * d_v].copy_from_slice(&staged[from * d_v..(from + 1) * d_v]);
                g.lse[to] = staged_lse[from];
            }
        }
        let empty_rows = g.lse.iter().filter(|l| **l == T::NEG_INFINITY).count() as u64;
        let rank = Some(state.fine().len());
        Ok(RunInfo { keys_visited: visited, empty_rows, rank, ..RunInfo::default() })
    }

    fn stream<T: Real>(&self, p: &Problem, index: GroupIndex) -> Option<Box<dyn GroupStream<T>>> {
        let key = index.stream_key(self.params.seed).named("multipole");
        Some(Box::new(ClusterStream {
            plan: self.clone(),
            turn: self.turn(p.d),
            state: KeyClusters::new(self.params.clone(), p.d, p.d_v, key),
            rows: Vec::new(),
            turned: Vec::new(),
            d: p.d,
            d_v: p.d_v,
            index,
        }))
    }
}

/// Decoding state of one group: the cache, with closed blocks in the order of their clusters, and the clusters.
#[derive(Debug)]
struct ClusterStream<T> {
    plan: Multipole,
    turn: Option<Turn>,
    state: KeyClusters<T>,
    /// Every key followed by its value, so that a cluster is contiguous in memory.
    rows: Vec<T>,
    /// Keys rotated back to position 0, if the plan unrotates keys.
    turned: Vec<T>,
    d: usize,
    d_v: usize,
    index: GroupIndex,
}

/// Splits a cache whose rows hold a key and its value into keys and values.
fn split<T: Real>(rows: &[T], d: usize, d_v: usize) -> (MatRef<'_, T>, MatRef<'_, T>) {
    let n = rows.len() / (d + d_v);
    let values = &rows[if n > 0 { d } else { 0 }..];
    let view = |x, cols| MatRef::with_stride(x, n, cols, d + d_v).expect("rows of the cache are whole");
    (view(rows, d), view(values, d_v))
}

impl<T: Real> GroupStream<T> for ClusterStream<T> {
    fn push(&mut self, k: MatRef<'_, T>, v: MatRef<'_, T>, _: Context<'_>) -> Result<()> {
        let first = self.rows.len() / (self.d + self.d_v);
        pages::reserve(&mut self.rows, k.rows() * (self.d + self.d_v));
        for (j, (k, v)) in (first..).zip(k.iter_rows().zip(v.iter_rows())) {
            self.rows.extend_from_slice(k);
            self.rows.extend_from_slice(v);
            if let Some(turn) = &self.turn {
                let start = self.turned.len();
                self.turned.extend_from_slice(k);
                turn.apply(-(j as f64), &mut self.turned[start..]);
            }
        }
        let n = first + k.rows();
        let target = self.plan.clustered(n);
        let (k, v) = split(&self.rows, self.d, self.d_v);
        let flat = if self.turn.is_some() { MatRef::new(&self.turned, n, self.d) } else { k };
        if first == 0 {
            self.state.prefill(flat, v, target);
        } else {
            self.state.update(flat, v, target);
        }
        // While the budget covers all keys, attention is bit-exact; reordering the keys would change it.
        if n > self.plan.params.budget {
            self.state.arrange(&mut self.rows);
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
        let (k, v) = split(&self.rows, self.d, self.d_v);
        let n = k.rows();
        if self.plan.params.budget >= n {
            return exact_group(&mut Group::decode(q, k, v, scale, out, lse, self.index, cx)?);
        }
        let cache = ClusteredKeys { k, v, len: n, state: &self.state };
        let position = n as f64 - 1.0;
        let visited = self.plan.attend(cache, q, self.turn.as_ref(), position, scale, cx, out, lse);
        Ok(RunInfo { rank: Some(self.state.fine().len()), ..RunInfo::visited(visited) })
    }

    fn state_bytes(&self) -> usize {
        (self.rows.len() + self.turned.len()) * size_of::<T>() + self.state.bytes()
    }
}

#[cfg(test)]
mod tests;
