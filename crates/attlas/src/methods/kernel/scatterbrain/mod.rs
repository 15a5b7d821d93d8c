//! Scatterbrain: exact scores on a sparse support, random features everywhere else.
//!
//! **Idea.** Random features are poor where scores are large, and a sparse set of keys misses the mass of the many
//! small ones. Use the features for all keys, subtract their estimate on a support that holds the large scores, and add
//! the exact scores there.
//!
//! **Math.** With features $\varphi$ of $e^{\langle x, y\rangle}$, $\hat\kappa_{ij} = \langle \varphi(q_i),
//! \varphi(k_j)\rangle$ with all constants kept, and the support $S_i$ of row $i$: the unnormalised row is
//! $\sum_{j \in S_i} e^{s_{ij}} v_j + R_i$, $R_i = \sum_j \hat\kappa_{ij} v_j - \sum_{j \in S_i} \hat\kappa_{ij} v_j$, and
//! its normaliser is the same with ones, $\rho_i$ in place of $R_i$. A $\rho_i$ below $10^{-4}$ of the full sum is
//! cancellation and dropped; otherwise $R_i$ is kept inside $\rho_i$ times the hull of the values. Supports:
//! * `lsh`: `rounds` of projections of lifted queries and keys on one line, sorted and cut into clusters of `keys` keys,
//!   cluster $t$ of the queries attends to cluster $t$ of the keys; repeated pairs count once;
//! * `window`: the `keys` nearest keys to either side;
//! * `top_k`: the `keys` largest scores, found by computing all of them: quadratic, for comparison.
//!
//! *With a causal mask* the support is a window shared by a block of rows: every row sees at least its `keys` nearest
//! keys. The features of all earlier keys are summed separately, which gives $\rho_i$ and $R_i$ without a difference,
//! and no scale depends on a later token.
//!
//! **Reference.** chen2021. Its features are hyperbolic (`hyp`), not the positive ones that the survey names; the
//! survey also omits the subtraction and the fact that constants no longer cancel. `oprf` features are those of
//! likhosherstov2022 with both signs, an addition of this project; their parameter is fitted to the lengths of the keys
//! or, with a causal mask, to unit variance.
//!
//! **Cost.** $4 n m (d + d_v)$ for features and sums, $n |S| (2d + 2m + 4 d_v)$ for the support; a stream stores
//! $m (d_v + 3)$ numbers and the near keys and values.
//!
//! **Guarantees.** Exact when the support covers everything. Entries on the support are exact, others unbiased with the
//! variance of the map: tested. Weights are non-negative and sum to one. Clamped outputs are not linear in the values.
//!
//! **When to use.** On models without retraining, where a few large scores stand out from a flat rest.

mod causal;
mod decode;
mod residual;
mod support;
#[cfg(test)]
mod tests;

use crate::engine::linear::{self, Directions, ErrorModel, Positive};
use crate::engine::{PerGroup, exact_group};
use crate::group::{Group, GroupIndex, GroupPlan, GroupStream};
use crate::method::{
    Accepted, Budget, Claims, Cost, Family, Law, Method, Promise, RunInfo, Spec, Status, Support, Tunable,
    Withdrawn,
};
use crate::{Mask, MatRef, Problem, Real, Result};
use attlas_num::Mat;
use attlas_num::hash::lift::LiftedLines;
use attlas_num::sketch::features::{ExpFeatures, Exponent, optimal_a};
use attlas_num::sketch::{MapOptions, draw_directions};
use decode::NearFarStream;

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
    probes: &[
        &[("keys", "8"), ("features", "192")],
        &[("keys", "5"), ("support", "window"), ("features", "129"), ("map", "oprf")],
        &[("keys", "6"), ("support", "top_k"), ("features", "192"), ("map", "oprf"), ("directions", "iid")],
        &[("keys", "7"), ("support", "lsh"), ("rounds", "3"), ("features", "128"), ("map", "oprf")],
        &[("keys", "0"), ("directions", "hadamard")],
        &[("keys", "3"), ("directions", "orthogonal_regularised")],
    ],
    tunable: &[Tunable::budget("keys")],
    ..Method::of::<Params>()
};

crate::choices! {
    /// Support on which scores are exact.
    pub enum Sparse {
        /// A window with a causal mask, clusters without one.
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
        /// Support on which scores are exact.
        support: Sparse = Sparse::Auto;
        /// Keys of the support: per cluster in each round, per side of the window (the row's own key counts), or with
        /// the largest scores. The method is exact if this reaches the number of tokens.
        keys: usize = 32, in 0..=1 << 30;
        /// Rounds of hashing.
        rounds: usize = 2, in 1..=64;
        /// Random features, two for each direction; rounded up to an even number.
        features: usize = 32, in 1..=1 << 16;
        /// The feature map.
        map: Map = Map::Hyp;
        /// Coupling of the random directions.
        directions: Directions = Directions::Orthogonal;
        /// Relative standard deviation of an estimate that the figure `features_needed` aims at.
        target_error: f64 = 0.1, in 1e-6..=10.0;
        /// Seed of the directions and of the hashes.
        seed: u64 = 0, in 0..=u64::MAX;
    }
}

impl Spec for Params {
    const METHOD: &'static Method = &METHOD;

    fn supports(&self, p: &Problem) -> Support {
        self.directions.supports(p).and_unless(
            p.mask == Mask::Causal && self.sparse(p.mask) != Sparse::Window,
            "clusters and largest scores are those of all keys, which a causal row may not see: use support = window",
        )
    }

    fn build(self, x: Accepted<'_>) -> Result<impl GroupPlan> {
        Scatterbrain::new(x.problem, self)
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

    fn num_directions(&self) -> usize {
        self.features.div_ceil(2)
    }

    /// Returns the number of rows per causal block.
    fn block(&self) -> usize {
        self.keys.clamp(MIN_BLOCK, ROWS)
    }

    /// Returns the first key that the rows of the causal block at `start` see exactly.
    fn near_from(&self, start: usize) -> usize {
        (start + 1).saturating_sub(self.keys.max(1))
    }
}

/// Maximum number of query rows in a tile.
const ROWS: usize = 128;

/// Minimum number of rows in a causal block.
const MIN_BLOCK: usize = 32;

/// The plan.
#[derive(Clone, Debug)]
pub struct Scatterbrain {
    params: Params,
    scale: f64,
    d: usize,
    /// Directions of the features, and lines along which rows are sorted.
    draws: PerGroup<(Mat<f64>, LiftedLines<f64>)>,
}

/// The sums of features, and the data that predict their error.
struct Estimate<T> {
    acc: Positive<T>,
    error: ErrorModel,
}

impl Scatterbrain {
    /// Creates a plan with these parameters.
    pub(crate) fn new(p: &Problem, params: Params) -> Result<Self> {
        let draws = PerGroup::draw(p, |index| {
            let key = index.stream_key(params.seed);
            let (coupling, count) = (params.directions.coupling(), params.num_directions());
            let directions = draw_directions(coupling, count, p.d, key.named("directions"))?;
            Ok((directions, LiftedLines::new(key.named("hashes"), p.d, params.rounds)))
        })?;
        Ok(Self { params, scale: p.scale, d: p.d, draws })
    }

    fn features(&self) -> usize {
        2 * self.params.num_directions()
    }

    fn state_len(&self, d_v: usize) -> usize {
        self.features() * (d_v + 3)
    }

    /// Builds the feature map; `k` is present if it may depend on the keys.
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
        let (omega, _) = self.draws.of(index);
        let options = MapOptions { scale: self.scale, ..MapOptions::default() };
        let acc = Positive::new(ExpFeatures::new(&exponent, omega, true, options)?, d_v);
        let error =
            ErrorModel::Exponential { exponent, antithetic: true, directions: self.params.num_directions() };
        Ok(Estimate { acc, error })
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
        let mut info = linear::run_predicted(&mut g, m, Some(&error), self.params.target_error, |g| {
            Ok(if causal {
                let empty_rows = (g.n_q().saturating_sub(g.n_k()) * g.q.heads()) as u64;
                RunInfo { empty_rows, ..RunInfo::visited(self.run_causal(g, &acc)) }
            } else {
                RunInfo::visited((n_q * m) as u64 + self.run_plain(g, &acc))
            })
        })?;
        let near = self.params.keys.max(1) + self.params.block() - 1;
        let cached = self.state_len(g.d_v()).saturating_add(near.saturating_mul(self.d + g.d_v()));
        info.figures.insert("decode_bytes", (cached as f64) * size_of::<T>() as f64);
        Ok(info)
    }

    fn stream<T: Real>(&self, p: &Problem, index: GroupIndex) -> Option<Box<dyn GroupStream<T>>> {
        let acc = self.estimate::<T>(None, p.d_v, index).ok()?.acc;
        Some(Box::new(NearFarStream::new(self, acc, p.d_v)))
    }
}
