//! HyperAttention: a block diagonal of hashed queries and keys, and sampled columns for the rest.
//!
//! **Idea.** Large entries of the attention matrix are caught by sorting queries and keys by a hash and
//! attending within blocks; the rest of each row is estimated from a few random columns. Causal problems
//! are halved recursively into parts without a mask.
//!
//! **Math.** Bit $t$ of a row's code is $[\langle w_t, x\rangle > 0]$; rows are sorted by the Gray rank of their
//! codes and cut into $L = \lceil n_k/b \rceil$ blocks. With $s_{ij} = \beta\, q_i^\top k_j$, a query of block $c$
//! and the sampled keys $T$ of the group:
//! $$\hat Z_i = \sum_{j \in c} e^{s_{ij}} + \omega_c \sum_{j \in T \setminus c} e^{s_{ij}}, \qquad
//!   \hat o_i = \hat Z_i^{-1} \Big( \sum_{j \in c} e^{s_{ij}} v_j + \omega_c \sum_{j \in T \setminus c} e^{s_{ij}} v_j \Big),$$
//! where $\omega_c = (n_k - |c|) / |T \setminus c|$ without replacement and $n_k/m$ with. With a causal mask, the
//! second half of the rows attends to the first half of the keys in this way, then each half is divided again; at
//! `n_min` rows the exact kernel takes over.
//!
//! Token by token, the last `n_min` keys are exact, as they are at the end of that recursion; among the others a query
//! sees the `block` keys around its Gray rank, and `samples` draws stand for the rest (`engine::hashed_stream`). The
//! paper has no decoding.
//!
//! The variant `theory` is the algorithm that the paper analyses. With $B_i$ the block's sum and $r$ the largest
//! sum outside the block over `samples` random rows:
//! $D_i = \frac{n}{m} \sum_{j \in T \setminus c} \min(e^{s_{ij}}, C_i)$,
//! $C_i = c_0 \frac{\epsilon^2 m}{n \ln n} (B_i + r/\kappa)$, $\hat Z_i = B_i + \max(D_i, r/\kappa)$, and
//! $\hat o_i = \hat Z_i^{-1} \sum_t e^{s_{i l_t}} v_{l_t} / (m\, p_{l_t})$ over columns drawn by
//! $p_l = |v_l|^2 / |V|_F^2$.
//!
//! **Reference.** han2024; survey, clustering and sampling. Departures, with their reasons:
//! - Samples are drawn without replacement by default: the same mean, less variance, exact at $m = n_k$.
//! - The survey adds sampled columns with weight one. They must stand for all columns outside the block, or the
//!   normaliser is far too small, and columns inside the block must not count twice (as they do in public code, in
//!   single precision).
//! - The survey's table says leverage scores: the paper draws by squared norms of the values (here `theory`), the
//!   authors' code uniformly (here `practical`), and the code uses the block for the output too. The code also omits
//!   the cap $C_i$ and the floor $r/\kappa$.
//! - Codes are ordered by the inverse Gray code, so that neighbouring codes differ in one bit; public code indexes the
//!   table in reverse. Block numbers come from zero-based ranks.
//! - Nothing is padded: a zero key would still weigh $e^0$. Odd lengths are halved unevenly.
//! - In causal parts a query finds its block by its own rank among the keys instead of its rank among the
//!   queries: otherwise later queries would move earlier ones across the edges of blocks. `theory` is
//!   refused there, since $r$ is a maximum over rows.
//! - In `theory`, $\hat Z_i$ is at least the largest exponential that was sampled for the output, a lower bound of
//!   $Z_i$; without it, one large column outside the block overflows.
//!
//! **Cost.** Hashing $2(n_q + n_k)\, d\, r$, then $2 n_q (b + m)(d + d_v)$; causally
//! $n\,n_{\min}/2 + \frac n2 \log_2(n/n_{\min}) (b + m)$ keys per row. Memory $O(n)$ indices and one block per
//! thread. A decoded token visits $n_{\min} + b + m$ keys; all are kept.
//!
//! **Guarantees.** `practical`: $E\, e^{\hat\ell_i} = e^{\ell_i}$ over seeds, rows are convex combinations of
//! values, the error falls as $m^{-1/2}$; all tested here. Exact when `block` or `samples` cover all keys, or
//! `n_min` all tokens. No causal leak.
//!
//! **When to use.** Long prompts without a mask whose heads attend to similar tokens. It misses heavy keys outside the
//! block (attention sinks): cover them with a near field.

mod theory;

use crate::engine::{
    Assign, CausalPart, HashedRule, HashedStream, PerGroup, Ranks, Rectangle, SortHashes, SortedBlocks,
    SortedRule, UniformSamples, attend_blocks, causal_pairs, causal_rectangles, causalize, draw_sort_hashes,
    exact_group, join_blocks,
};
use crate::group::{Group, GroupIndex, GroupPlan, GroupStream};
use crate::method::{
    Accepted, Budget, Claims, Cost, Family, Law, Method, Promise, RunInfo, Spec, Status, Support, Tunable,
    Withdrawn,
};
use crate::{Error, Mask, Problem, Real, Result, Spread};
use std::borrow::Cow;
use std::collections::BTreeMap;

/// Registry entry.
pub static METHOD: Method = Method {
    id: "hyper",
    family: Family::Clustering,
    title: "HyperAttention: hashed block diagonal and sampled columns",
    reference: "han2024",
    claims: Claims {
        decode: true,
        exact_at: &[("block", Budget::NumKeys), ("samples", Budget::NumKeys), ("n_min", Budget::NumTokens)],
        unbiased: true,
        deterministic: false,
        exponent: 1.0,
        except: &[
            (Law::KeyOrder, "keys are sampled by their place in the sorted order"),
            (Law::QueriesAlone, "without a mask, queries are cut into blocks by their rank among each other"),
            (
                Law::DecodeIsPrefill,
                "a prompt is halved recursively, and each part has blocks and samples of its own",
            ),
        ],
        withdrawn: &[
            Withdrawn {
                param: "variant",
                value: "theory",
                promise: Promise::RowStochastic,
                reason: "numerator and normaliser come from different samples",
            },
            Withdrawn {
                param: "variant",
                value: "theory",
                promise: Promise::Unbiased,
                reason: "the normaliser is capped and floored",
            },
            Withdrawn {
                param: "variant",
                value: "theory",
                promise: Promise::Law(Law::LinearInValues),
                reason: "columns are drawn by the norms of their values",
            },
            Withdrawn {
                param: "samples",
                value: "0",
                promise: Promise::Unbiased,
                reason: "what lies outside the block is left out",
            },
        ],
        spread: Spread::Ring { window: None, shared: &["block", "samples"] },
        ..Claims::BASE
    },
    probes: &[
        &[("block", "8"), ("samples", "24"), ("hashes", "4"), ("n_min", "8")],
        &[("block", "7"), ("samples", "20"), ("n_min", "1"), ("sampling", "with_replacement")],
        &[("block", "16"), ("samples", "0"), ("n_min", "5"), ("hashes", "0")],
        &[("block", "8"), ("samples", "24"), ("n_min", "8"), ("variant", "theory")],
    ],
    subsets: &[&[("block", "6"), ("samples", "0"), ("n_min", "4")]],
    exact_below: Some("n_min"),
    tunable: &[Tunable::budget("block"), Tunable::budget("samples")],
    ..Method::of::<Params>()
};

crate::choices! {
    /// Sampling of the columns.
    pub enum Sampling {
        /// Every key at most once.
        WithoutReplacement = "without_replacement",
        /// Independently, as in the authors' code.
        WithReplacement = "with_replacement",
    }
}

crate::choices! {
    /// The algorithm.
    pub enum Variant {
        /// The authors' implementation: block and uniform samples, normalised together.
        Practical = "practical",
        /// The paper's analysis: a capped and floored normaliser, columns drawn by the norms of values.
        Theory = "theory",
    }
}

crate::params! {
    /// Parameters of [`Hyper`].
    pub struct Params {
        /// Maximum number of keys in a block.
        block: usize = 256, in 1..=1 << 30;
        /// Keys drawn to estimate the rest of every row; 0 leaves the rest out.
        samples: usize = 256, in 0..=1 << 30;
        /// Bits of the hash; 0 keeps the order of tokens.
        hashes: usize = 7, in 0..=31;
        /// Attention is exact below this number of queries; the base of the causal recursion.
        n_min: usize = 4096, in 0..=1 << 30;
        /// Sampling with or without replacement; the theory variant always draws independently.
        sampling: Sampling = Sampling::WithoutReplacement;
        /// practical or theory; theory works without a mask only.
        variant: Variant = Variant::Practical;
        /// Theory: the floor of the normaliser is the largest residual divided by this.
        kappa: f64 = 16.0, in 1.0..=f64::INFINITY;
        /// Theory: accuracy for which the cap on sampled exponentials is set.
        tol: f64 = 0.5, in 1e-6..=1.0;
        /// Theory: factor of the cap; infinity for none.
        cap: f64 = 1.0, in 1e-6..=f64::INFINITY;
        /// Seed of directions and samples.
        seed: u64 = 0, in 0..=u64::MAX;
    }
}

impl Spec for Params {
    const METHOD: &'static Method = &METHOD;

    fn supports(&self, p: &Problem) -> Support {
        Support::unless(
            self.variant == Variant::Theory && p.mask == Mask::Causal,
            "variant = theory takes a maximum over all rows, which would leak later tokens: use \
             variant = practical for causal problems",
        )
    }

    fn build(self, x: Accepted<'_>) -> Result<impl GroupPlan> {
        Hyper::new(x.problem, self)
    }
}

impl Params {
    /// True if a part without a mask is computed exactly.
    fn is_exact(&self, n_q: usize, n_k: usize) -> bool {
        n_k <= self.block || n_k <= self.samples || n_q < self.n_min
    }

    /// Draws keys for the rows of a part, from the part's own random stream; directions are those of the whole group.
    fn samples_of(&self, part: &Rectangle, index: GroupIndex) -> UniformSamples {
        let replacement = self.sampling == Sampling::WithReplacement;
        let key = part.stream(index.stream_key(self.seed)).named("samples");
        UniformSamples::new(part.keys.len(), self.samples, replacement, key)
    }

    /// Draws samples for all parts of a problem that are not exact.
    fn samples_of_parts(&self, p: &Problem, index: GroupIndex) -> BTreeMap<(usize, usize), UniformSamples> {
        let parts = match p.mask {
            Mask::None => vec![Rectangle { rows: 0..p.n_q, keys: 0..p.n_k }],
            Mask::Causal => causal_rectangles(p.n_q, p.n_k, self.n_min),
        };
        let sampled = parts.iter().filter(|part| !self.is_exact(part.rows.len(), part.keys.len()));
        sampled.map(|part| ((part.keys.start, part.keys.end), self.samples_of(part, index))).collect()
    }
}

/// The plan: the parameters, hash directions and samples.
#[derive(Clone, Debug)]
pub struct Hyper {
    params: Params,
    hashes: SortHashes,
    /// Samples of the parts of the planned lengths, by the key range of a part.
    samples: PerGroup<BTreeMap<(usize, usize), UniformSamples>>,
}

impl Hyper {
    /// Creates a plan with these parameters.
    pub(crate) fn new(p: &Problem, params: Params) -> Result<Self> {
        params.validate()?;
        if params.variant == Variant::Theory && params.samples == 0 {
            return Err(Error::param("samples", 0, "at least 1 with variant = theory"));
        }
        let hashes = draw_sort_hashes(p, params.seed, params.hashes)?;
        let samples = PerGroup::draw(p, |index| Ok(params.samples_of_parts(p, index)))?;
        Ok(Self { params, hashes, samples })
    }

    /// True if the whole problem is computed exactly.
    fn covers(&self, n_q: usize, n_k: usize) -> bool {
        let Params { block, samples, n_min, .. } = self.params;
        n_k <= block.max(samples) || n_q.max(n_k) <= n_min
    }

    /// Counts the pairs that each head visits.
    fn pairs(&self, p: &Problem) -> u64 {
        if self.covers(p.n_q, p.n_k) {
            return p.visible_pairs() / (p.batch * p.n_heads).max(1) as u64;
        }
        let part = |rows: usize, keys: usize| {
            let seen =
                if self.params.is_exact(rows, keys) { keys } else { self.params.block + self.params.samples };
            rows as u64 * seen.min(keys) as u64
        };
        match p.mask {
            Mask::None => part(p.n_q, p.n_k),
            Mask::Causal => causal_pairs(p.n_q, p.n_k, self.params.n_min, &part),
        }
    }

    /// Computes a whole group without a mask.
    fn whole<T: Real>(&self, group: &mut Group<'_, T>, ranks: &Ranks) -> Result<RunInfo> {
        if self.params.is_exact(group.n_q(), group.n_k()) {
            return exact_group(group);
        }
        let part = Rectangle::whole(group);
        let blocks = SortedBlocks::new(ranks, &part, None, self.params.block, Assign::Balanced);
        if self.params.variant == Variant::Theory {
            let key = part.stream(group.index.stream_key(self.params.seed));
            return theory::run(&self.params, group, &blocks, key);
        }
        let drawn = self.samples(&part, group.index);
        let info = attend_blocks(group, &blocks, |c| drawn.outside(&blocks, c))?;
        Ok(count_dropped(info, &drawn, &blocks))
    }

    /// Computes a part of a causal problem.
    fn part<T: Real>(
        &self,
        part_rows: CausalPart<'_, T>,
        part: &Rectangle,
        ranks: &Ranks,
    ) -> Result<RunInfo> {
        if self.params.is_exact(part.rows.len(), part.keys.len()) {
            return part_rows.run(|mut group| exact_group(&mut group));
        }
        let blocks = SortedBlocks::new(ranks, part, None, self.params.block, Assign::Alone);
        let drawn = self.samples(part, part_rows.index);
        let info = join_blocks(part_rows, &blocks, |c| drawn.outside(&blocks, c))?;
        Ok(count_dropped(info, &drawn, &blocks))
    }

    /// Returns the keys drawn for the rows of a part: the plan's or, for a part that only a shorter call has, new ones
    /// from the same random stream.
    fn samples(&self, part: &Rectangle, index: GroupIndex) -> Cow<'_, UniformSamples> {
        match self.samples.of(index).get(&(part.keys.start, part.keys.end)) {
            Some(planned) => Cow::Borrowed(planned),
            None => Cow::Owned(self.params.samples_of(part, index)),
        }
    }
}

/// Records the number of rows without samples outside their block.
fn count_dropped(mut info: RunInfo, drawn: &UniformSamples, blocks: &SortedBlocks) -> RunInfo {
    let dropped = drawn.dropped_rows(blocks);
    if dropped > 0 {
        info.figures.insert("rows_without_samples", dropped as f64);
    }
    info
}

impl GroupPlan for Hyper {
    fn cost(&self, p: &Problem) -> Cost {
        let (d, d_v) = (p.d as u64, p.d_v as u64);
        let rows = (p.batch * p.n_heads * p.n_q) as u64;
        let keys = (p.batch * p.n_kv_heads * p.n_k) as u64;
        let levels = match p.mask {
            Mask::None => 1,
            Mask::Causal => (p.n_q / self.params.n_min.max(1)).max(1).ilog2() as u64,
        };
        let hashed = if self.covers(p.n_q, p.n_k) { 0 } else { rows + keys };
        Cost {
            setup_flops: 2 * hashed * d * self.params.hashes as u64,
            run_flops: 2 * (p.batch * p.n_heads) as u64 * self.pairs(p) * (d + d_v),
            bytes: 4 * (rows + keys) * (d + d_v) * levels.max(1),
        }
    }

    fn run<T: Real>(&self, mut group: Group<'_, T>) -> Result<RunInfo> {
        if self.covers(group.n_q(), group.n_k()) {
            return Ok(RunInfo { status: Status::Exact, ..exact_group(&mut group)? });
        }
        let ranks = Ranks::new(group.q, group.k, self.hashes.of(group.index).as_ref());
        match group.mask {
            Mask::None => self.whole(&mut group, &ranks),
            Mask::Causal => causalize(&mut group, self.params.n_min, &|part_rows, part| {
                self.part(part_rows, &part, &ranks)
            }),
        }
    }

    fn sorted_rule(&self, p: &Problem) -> Option<SortedRule<'_>> {
        let sorted = p.mask == Mask::None && self.params.variant == Variant::Practical;
        if !sorted || self.covers(p.n_q, p.n_k) || self.params.is_exact(p.n_q, p.n_k) {
            return None;
        }
        let whole = Rectangle { rows: 0..p.n_q, keys: 0..p.n_k };
        SortedRule::new(p, &self.hashes, self.params.block, |index| self.samples(&whole, index).into_owned())
            .ok()
    }

    fn stream<T: Real>(&self, p: &Problem, index: GroupIndex) -> Option<Box<dyn GroupStream<T>>> {
        let Params { block, samples, n_min, seed, .. } = self.params;
        let replacement = self.params.sampling == Sampling::WithReplacement;
        let key = index.stream_key(seed);
        let rule = HashedRule { block, samples, replacement, recent: n_min, key };
        let practical = self.params.variant == Variant::Practical;
        let hash = self.hashes.of(index).as_ref();
        practical
            .then(|| Box::new(HashedStream::new(rule, hash, (p.d, p.d_v), index)) as Box<dyn GroupStream<T>>)
    }
}

#[cfg(test)]
mod tests;
