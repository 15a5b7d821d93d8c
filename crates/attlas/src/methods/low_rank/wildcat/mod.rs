//! WILDCAT: attention to a weighted coreset of the keys.
//!
//! **Idea.** Choose a few keys by randomly pivoted Cholesky on the exponential kernel of the keys, give them Nyström
//! weights so that they stand for all keys, and attend to them alone.
//!
//! **Math.** Keys are centred, which leaves softmax unchanged. With $\beta$ the factor on inner products and a
//! temperature $\tau$, let $x_j = k_j \sqrt\beta / \tau$, $h_j = \|x_j\|^2/2$ and
//! $K_0 = (e^{x_i^\top x_j - h_i - h_j})$, a Gaussian kernel in which nothing overflows. Pivoted Cholesky of
//! $D K_0 D$, $D = \mathrm{diag}(e^h)$, the exponential kernel itself, gives pivots $S$, the factor $G$ of $K_0$,
//! $L = G_{:,S}^\top$, and with $c = \max h$
//! $$[V_S \mid w] = \mathrm{diag}(e^{c - h_S})\, L^{-\top} G\, \mathrm{diag}(e^{h - c})\, [V \mid 1],$$
//! whence $o = \sum_s e^{\beta q^\top k_s} V_s / \sum_s e^{\beta q^\top k_s} w_s$. Neither the weights of all keys nor
//! an inverse is formed. $\tau = \sqrt{R_K/R_Q}\,\sqrt{b_0/(2 W_0(b_0/(2\rho_0)))}$ with
//! $b_0 = \ln n/(\beta R_Q R_K) + 2$, $\rho_0 = \sqrt{1 + e^{W_0(2/e^2) + 2}}$, $R_Q$ and $R_K$ the largest norms of
//! queries and centred keys. (A comment in the authors' code has $2 W_0$ inside $\rho_0$; the constant used there,
//! and the paper, have one.) The method works on $\kappa(K, K)$ and $\kappa(Q, K_S)$ only, not on the lifted
//! kernel of queries and keys together, and compresses without the queries if $R_Q$ is given.
//!
//! **Reference.** schroder2026; pivots: chen2024, epperly2024. Departures from the authors' code: a triangular
//! factor instead of an explicit inverse; the Lambert rule by default; the denominator test and its fallback.
//!
//! **Cost.** $2nr(d + d_v + 1)/b + 2nr^2/b^2$ to compress with $b$ bins, $2 n_q r (d + d_v + 1)$ per query head;
//! memory $nr/b^2$ per active bin. Causal: block by block, see below.
//!
//! **Guarantees.** Exact when `rank` covers all keys. With $p$ the residual diagonal of $K_0$, entrywise
//! $|A_{ij} - \hat A_{ij}| \le e^{\beta\tau^2\|q_i\|^2/2} \sqrt{p_j}\, e^{h_j}$, hence with `centre`
//! $|o - \hat o|_c \le \mathrm{range}_c \min(1, e^{\beta\tau^2\|q_i\|^2/2} \sum_j \sqrt{p_j}\, e^{h_j} / n)$ on every
//! input: a run reports the largest such factor as `certified_error`, with an allowance for the rounding of $p$: a
//! residual that seems to vanish is known only to a few roundoffs, and a score to their root. This allowance is an
//! estimate, tested but not proved. The bound is loose, by factors of hundreds on structureless data. Quoted: coresets
//! of size $n^{o(1)}$ reach errors $O(n^{-\sqrt{\log\log n}})$ for bounded $\beta R_Q R_K / \ln n$ (reported as
//! `gamma`). All keys equal: one pivot, the mean of the values.
//!
//! **When to use.** Unmasked attention over many keys, or as a compressed cache: long prompts, cross-attention.
//! The published method has no causal prefill; here blocks of queries see their own keys exactly and coresets
//! of earlier blocks. Hard for large `gamma`: structureless peaked heads need many pivots.

mod compress;

use crate::engine::coreset::{
    BlockCausal, Cache, CacheMode, CompressKeys, CoresetStream, Fallback, Finish, Prefix, attend_coreset,
    attend_stand_ins, stand_ins,
};
use crate::engine::exact_group;
use crate::group::{Group, GroupIndex, GroupPlan, GroupStream, StandIns};
use crate::method::{Accepted, Budget, Claims, Cost, Family, Law, Method, RunInfo, Spec, Status, Tunable};
use crate::{Mask, Problem, Real, Result, Spread};
use attlas_num::randla::rpcholesky;
pub use compress::Compressor;

/// Registry entry.
pub static METHOD: Method = Method {
    id: "wildcat",
    family: Family::LowRank,
    title: "Weighted coreset of keys by randomly pivoted Cholesky (WILDCAT)",
    reference: "schroder2026",
    claims: Claims {
        decode: true,
        exact_at: &[("rank", Budget::NumKeys)],
        row_stochastic: false,
        deterministic: false,
        exponent: 1.0,
        except: &[
            (Law::LinearInValues, "outputs are clipped to the range of the values"),
            (Law::KeyOrder, "pivots are drawn by position; another order is another draw"),
            (Law::HeadsAlone, "the temperature follows the largest query of all heads that share the keys"),
            (Law::QueriesAlone, "the temperature follows the largest query"),
            (Law::DecodeIsPrefill, "with cache = prefix a stream compresses its first tokens at once"),
        ],
        spread: Spread::Gather,
        ..Claims::BASE
    },
    exact_below: Some("block"),
    probes: &[
        &[("rank", "24"), ("block", "16"), ("sinks", "2"), ("window", "5"), ("cache", "prefix")],
        &[("rank", "20"), ("bins", "3"), ("block", "32"), ("temperature", "const"), ("pivoting", "block")],
        &[
            ("rank", "6"),
            ("block", "11"),
            ("tree", "true"),
            ("tau", "1.5"),
            ("centre", "false"),
            ("power", "2"),
        ],
        &[("rank", "1"), ("ratio", "0.3"), ("block", "20"), ("clip", "false"), ("query_norm", "4")],
        &[("rank", "7"), ("fallback", "zero_clip"), ("pivoting", "accelerated"), ("pivot_block", "4")],
    ],
    tunable: &[Tunable::budget("rank")],
    ..Method::of::<Params>()
};

crate::params! {
    /// Parameters of [`Wildcat`].
    pub struct Params {
        /// Number of keys kept; with a causal mask, per block.
        rank: usize = 128, in 1..=1 << 30;
        /// Share of the keys kept, if that is more than `rank`; in a compressed prefix the share kept, where auto is a
        /// quarter.
        ratio: Option<f64> = None, in 0.0..=1.0;
        /// Number of contiguous parts that are compressed separately, each to its share of the rank.
        bins: usize = 1, in 1..=1 << 30;
        /// Rule for the temperature.
        temperature: Temperature = Temperature::Lambert;
        /// The temperature itself; with auto, the rule `temperature` decides. It is raised if weights would underflow.
        tau: Option<f64> = None, in 1e-6..=1e6;
        /// Largest norm of a query; auto takes that of the queries or, if these must stay unseen, of the keys.
        query_norm: Option<f64> = None, in 0.0..=1e30;
        /// Subtract the mean of the keys first.
        centre: bool = true;
        /// Clip outputs to the range of the values.
        clip: bool = true;
        /// Output of a row whose denominator cancels.
        fallback: Fallback = Fallback::Exact;
        /// Queries per block, with a causal mask.
        block: usize = 1024, in 1..=1 << 30;
        /// With a causal mask, join coresets of equal numbers of blocks and compress them again.
        tree: bool = false;
        /// Keys that a stream compresses.
        cache: CacheMode = CacheMode::Blocks;
        /// With `cache = prefix`, number of first tokens kept uncompressed.
        sinks: usize = 32, in 0..=1 << 30;
        /// With `cache = prefix`, number of last tokens of the prefix kept uncompressed.
        window: usize = 32, in 0..=1 << 30;
        /// With `cache = prefix`, keys kept per bin; `ratio` determines the number of bins.
        bin_rank: usize = 12, in 1..=1 << 20;
        /// Drawing of the pivots.
        pivoting: Pivoting = Pivoting::Auto;
        /// Pivots drawn per round; auto is a tenth of the rank, from 10 to 128.
        pivot_block: Option<usize> = None, in 1..=1 << 16;
        /// Pivots are drawn in proportion to this power of the residual.
        power: f64 = 1.0, in 0.1..=100.0;
        /// Relative residual at which drawing stops; auto is 1e-13, or 1e-6 in single precision.
        tol: Option<f64> = None, in 0.0..=1.0;
        /// Seed of the pivots.
        seed: u64 = 0, in 0..=u64::MAX;
    }
}

impl Spec for Params {
    const METHOD: &'static Method = &METHOD;

    fn build(self, _: Accepted<'_>) -> Result<impl GroupPlan> {
        Ok(Wildcat::new(self))
    }
}

crate::choices! {
    /// Rule for the temperature.
    pub enum Temperature {
        /// The paper's formula with the Lambert function.
        Lambert = "lambert",
        /// $\sqrt{3.94582\, R_K/R_Q}$, as in later versions of the authors' code; 2 to 11 % smaller.
        Const = "const",
    }
}

crate::choices! {
    /// Drawing of the pivots.
    pub enum Pivoting {
        /// Accelerated from rank 64 on, otherwise simple.
        Auto = "auto",
        /// One at a time.
        Simple = "simple",
        /// In blocks, thinned to the distribution of `simple`.
        Accelerated = "accelerated",
        /// In blocks, all kept: cheaper, worse on clustered keys.
        Block = "block",
    }
}

impl Params {
    fn finish(&self) -> Finish {
        Finish { clip: self.clip, fallback: self.fallback }
    }

    fn pivots(&self, rank: usize) -> rpcholesky::Options {
        let variant = match self.pivoting {
            Pivoting::Auto => None,
            Pivoting::Simple => Some(rpcholesky::Variant::Simple),
            Pivoting::Accelerated => Some(rpcholesky::Variant::Accelerated),
            Pivoting::Block => Some(rpcholesky::Variant::Block),
        };
        rpcholesky::Options { rank, variant, block: self.pivot_block, stop_tol: self.tol, power: self.power }
    }
}

/// The plan.
#[derive(Clone, Debug)]
pub struct Wildcat {
    compressor: Compressor,
}

impl Wildcat {
    /// Creates a plan with these parameters.
    pub(crate) fn new(params: Params) -> Self {
        Self { compressor: Compressor { params } }
    }

    fn params(&self) -> &Params {
        &self.compressor.params
    }

    fn causal(&self) -> BlockCausal<Compressor> {
        let Params { block, tree, .. } = *self.params();
        BlockCausal { compressor: self.compressor.clone(), block, tree, finish: self.params().finish() }
    }

    /// True if nothing is compressed.
    fn covers(&self, n_k: usize, mask: Mask) -> bool {
        let block = self.params().block;
        match mask {
            Mask::None => self.compressor.size(n_k).rank >= n_k,
            Mask::Causal => self.params().rank >= n_k || block.max(1) >= n_k,
        }
    }
}

impl GroupPlan for Wildcat {
    fn cost(&self, p: &Problem) -> Cost {
        let groups = (p.batch * p.n_kv_heads) as u64;
        let rows = (p.batch * p.n_heads * p.n_q) as u64;
        let bytes = 4 * (groups * (p.n_k * (p.d + p.d_v)) as u64 + rows * (p.d + p.d_v) as u64);
        if self.covers(p.n_k, p.mask) {
            let run_flops = 2 * p.visible_pairs() * (p.d + p.d_v) as u64;
            return Cost { setup_flops: 0, run_flops, bytes };
        }
        let n = match p.mask {
            Mask::None => p.n_k,
            Mask::Causal => self.params().block,
        };
        let size = self.compressor.size(n);
        let (r, per_bin) = (size.rank.min(n) as u64, size.rank.div_ceil(size.bins) as u64);
        let wide = (p.d + p.d_v + 1) as u64;
        let one = 2 * n as u64 * per_bin * (wide + per_bin) + r * per_bin * wide;
        let (parts, run_flops) = match p.mask {
            Mask::None => (1, 2 * rows * r * wide),
            Mask::Causal => ((p.n_k / n) as u64, self.causal().run_flops(p)),
        };
        let again = if self.params().tree { 2 } else { 1 };
        Cost { setup_flops: groups * parts * one * again, run_flops, bytes }
    }

    fn run<T: Real>(&self, mut g: Group<'_, T>) -> Result<RunInfo> {
        if self.covers(g.n_k(), g.mask) {
            return Ok(RunInfo { status: Status::Exact, ..exact_group(&mut g)? });
        }
        let stream = g.index.stream_key(self.params().seed);
        if g.mask == Mask::Causal {
            return self.causal().run(&mut g, stream);
        }
        let largest = (0..g.q.heads()).map(|h| compress::largest_norm(g.q.head(h))).fold(0.0, f64::max);
        let size = self.compressor.size(g.n_k());
        let made = self.compressor.coreset(&g, size, largest, stream);
        let info = attend_coreset(&mut g, &made.coreset, self.params().finish())?;
        Ok(RunInfo { rank: Some(made.coreset.len()), figures: made.figures, ..info })
    }

    fn stand_ins<T: Real>(&self, piece: StandIns<'_, T>) -> Option<Vec<T>> {
        Some(stand_ins(&self.compressor, self.params().seed, piece))
    }

    fn attend_stand_ins<T: Real>(&self, g: Group<'_, T>, numbers: &[T]) -> Result<RunInfo> {
        attend_stand_ins(g, numbers)
    }

    fn stream<T: Real>(&self, p: &Problem, index: GroupIndex) -> Option<Box<dyn GroupStream<T>>> {
        let &Params { sinks, window, ratio, bin_rank, seed, .. } = self.params();
        let cache = match self.params().cache {
            CacheMode::Blocks => Cache::Blocks,
            CacheMode::Prefix => {
                Cache::Prefix(Prefix { sinks, window, ratio: ratio.unwrap_or(0.25), bin_rank })
            }
        };
        Some(Box::new(CoresetStream::new(self.causal(), cache, p, index, seed)))
    }
}

#[cfg(test)]
mod tests;
