//! Linformer: a few mixed keys and values stand for the whole sequence.
//!
//! **Idea.** Compress the sequence axis: multiply keys and values from the left by a matrix with few rows and attend
//! to the result.
//!
//! **Math.** With $E, F \in \mathbb R^{k \times n_k}$: $O = \operatorname{attn}(Q, EK, FV)$. Sources of $E$ and $F$:
//! - `pool`: means over $k$ segments of lengths $n_s$, with $\ln n_s$ added to the logits. With a causal mask segments
//!   have $c = \lceil n_k / k \rceil$ tokens, and a query sees the means of all complete segments before its own, each with
//!   bias $\ln c$, and the keys of its own segment up to itself.
//! - `learned`: trained matrices from a calibration made by [`with_projections`]; shorter sequences use the first
//!   columns.
//! - `fitted`: $E$ pools, $F = (G + \lambda \frac{\operatorname{tr} G}{k} I)^{-1} R$ from sample inputs of the same length, with
//!   $G = \sum S^\top S$, $R = \sum S^\top P$, $S$ the weights of the pooled keys and $P$ the exact ones: the least-squares
//!   fit of $S F$ to $P$, one per key head.
//! - `gaussian`: $E = F$ with independent $N(0, 1/k)$ entries; for study only, it does not approximate attention.
//!
//! **Reference.** wang2020. $E$ and $F$ are $k \times n$, because they multiply from the left; the paper and the survey
//! state the transpose. The normaliser divides rows: $D^{-1} \exp$, not $\exp D^{-1}$. The paper's existence proof
//! takes $E = \delta R$, $F = e^{-\delta} R$ with $\delta \to 0$, which is of no practical use. Masking the upper
//! triangle of the $n \times k$ weights, as some code does, is not causal: $EK$ already contains the future.
//!
//! **Cost.** $n_k (d + d_v)$ to pool or $2 k n_k (d + d_v)$ to multiply, then $2 n_q k (d + d_v)$; causal
//! $2 n_q (k/2 + c/2)(d + d_v)$. Memory $k (d + d_v)$.
//!
//! **Guarantees.** `pool` is exact when keys are constant inside each segment, for any values and lengths, and when $k$
//! reaches the number of keys; its weights are non-negative and sum to one; its causal form never sees a later token.
//! At $\lambda = 0$ the rows of the fitted $F$ sum to one.
//!
//! **When to use.** `pool` where neighbouring keys are alike; `learned` with models trained with it.

mod causal;
mod fit;
mod projections;
#[cfg(test)]
mod tests;

pub use projections::{Sharing, with_projections};

use crate::engine::pool::{Segments, log_lens, pool_rows};
use crate::engine::{exact_group, exact_rows};
use crate::group::{Group, GroupIndex, GroupPlan, GroupStream};
use crate::method::{
    Accepted, Budget, Calibration, Claims, Cost, Family, Law, Learn, Method, Promise, RunInfo, Spec, Status,
    Support, Tunable, Withdrawn,
};
use crate::{Error, Mask, MatRef, Problem, Real, Result};
use attlas_num::kernels::Band;
use causal::Pooled;
use projections::{Mix, copy_row, gaussian_row, multiply};

/// Registry entry.
pub static METHOD: Method = Method {
    id: "linformer",
    family: Family::LowRank,
    title: "Linformer: keys and values compressed along the sequence",
    reference: "wang2020",
    claims: Claims {
        decode: true,
        exact_at: &[("rank", Budget::NumKeys)],
        deterministic: false,
        exponent: 1.0,
        except: &[(Law::KeyOrder, "keys are mixed according to their positions")],
        withdrawn: &[
            Withdrawn {
                param: "source",
                value: "*",
                promise: Promise::RowStochastic,
                reason: "matrices that mix values may have entries of either sign",
            },
            Withdrawn {
                param: "source",
                value: "learned",
                promise: Promise::ExactAt,
                reason: "trained matrices have the rank that they were trained with",
            },
        ],
        ..Claims::BASE
    },
    probes: &[
        &[("rank", "8")],
        &[("rank", "31")],
        &[("rank", "1")],
        &[("rank", "12"), ("source", "gaussian")],
    ],
    tunable: &[Tunable::budget("rank")],
    ..Method::of::<Params>()
};

crate::choices! {
    /// Source of the projections.
    pub enum Source {
        /// Means over segments, without learning.
        Pool = "pool",
        /// Trained matrices, from a calibration.
        Learned = "learned",
        /// Mixing of values fitted to sample inputs, with pooled keys; from a calibration.
        Fitted = "fitted",
        /// Random matrices.
        Gaussian = "gaussian",
    }
}

crate::params! {
    /// Parameters of [`Linformer`].
    pub struct Params {
        /// Number of mixed keys and values; attention is exact if it reaches the number of keys. Learned matrices
        /// define their own; a fit must have been made for the same number.
        rank: usize = 256, in 1..=1 << 20;
        /// Source of the projections: pool (means over segments), learned, fitted or gaussian.
        source: Source = Source::Pool;
        /// Ridge of the fit, relative to the mean diagonal of its normal equations. Used by fitted only.
        ridge: f64 = 1e-6, in 0.0..=1.0;
        /// Seed of the random projection. Used by gaussian only.
        seed: u64 = 0, in 0..=u64::MAX;
    }
}

impl Spec for Params {
    const METHOD: &'static Method = &METHOD;
    const CALIBRATE: Option<Learn<Self>> = Some(fit::calibrate);

    fn supports(&self, p: &Problem) -> Support {
        Support::unless(
            p.mask == Mask::Causal && self.source != Source::Pool,
            "the projection mixes later keys into all of its rows, so a causal mask cannot be honoured: use source = pool",
        )
    }

    fn build(self, x: Accepted<'_>) -> Result<impl GroupPlan> {
        Linformer::new(x.problem, self, x.calibration)
    }
}

/// The plan: the mixing of keys and values.
#[derive(Debug)]
pub struct Linformer {
    params: Params,
    mix: Mix,
    /// Segment length of the causal form, from the planned number of keys.
    segment_len: usize,
}

/// Query rows per task.
const BLOCK_ROWS: usize = 256;

impl Linformer {
    /// Creates a plan with these parameters and, for learned and fitted sources, the calibration.
    pub(crate) fn new(problem: &Problem, params: Params, calibration: Option<&Calibration>) -> Result<Self> {
        params.validate()?;
        let need = |what: &str| Error::Unsupported {
            method: METHOD.id.into(),
            reasons: vec![format!("source = {what} takes its matrices from a calibration: pass one")],
        };
        let mix = match params.source {
            Source::Pool => Mix::Pool,
            Source::Gaussian => Mix::Gaussian,
            Source::Learned => Mix::learned(problem, calibration.ok_or_else(|| need("learned"))?)?,
            Source::Fitted => Mix::fitted(problem, params.rank, calibration.ok_or_else(|| need("fitted"))?)?,
        };
        let segment_len = problem.n_k.div_ceil(params.rank).max(1);
        Ok(Self { params, mix, segment_len })
    }

    /// Returns the number of mixed rows for `n` keys of a key head.
    fn rank(&self, n: usize, kv_head: usize) -> usize {
        match &self.mix {
            Mix::Pool | Mix::Gaussian => self.params.rank.min(n),
            Mix::Learned(heads) => heads[kv_head].0.rows(),
            Mix::Fitted(heads) => heads[kv_head].rows().min(n),
        }
    }

    /// Attends with every query to every mixed key.
    fn run_full<T: Real>(&self, g: &mut Group<'_, T>) -> Result<RunInfo> {
        let (k, v, scale, cx, index) = (g.k, g.v, g.scale, g.cx, g.index);
        let (n, rank) = (k.rows(), self.rank(k.rows(), index.kv_head));
        let mut k_mixed = cx.scratch.take::<T>(rank * k.cols());
        let mut v_mixed = cx.scratch.take::<T>(rank * v.cols());
        let segments = Segments::new(n, rank);
        let mut bias = None;
        let mut fallback = false;
        match &self.mix {
            Mix::Fitted(heads) if heads[index.kv_head].cols() == n => {
                pool_rows(k, &segments, cx, &mut k_mixed);
                multiply(|r, row| copy_row(&heads[index.kv_head], r, row), v, cx, &mut v_mixed);
                bias = Some(log_lens::<T>(&segments));
            }
            Mix::Pool | Mix::Fitted(_) => {
                // A fit for another length does not apply to a padded sequence: pool instead.
                fallback = matches!(self.mix, Mix::Fitted(_));
                pool_rows(k, &segments, cx, &mut k_mixed);
                pool_rows(v, &segments, cx, &mut v_mixed);
                bias = Some(log_lens::<T>(&segments));
            }
            Mix::Gaussian => {
                let key = index.stream_key(self.params.seed).named("projection");
                multiply(|r, row| gaussian_row(key, rank, r, row), k, cx, &mut k_mixed);
                multiply(|r, row| gaussian_row(key, rank, r, row), v, cx, &mut v_mixed);
            }
            Mix::Learned(heads) => {
                let (e, f) = &heads[index.kv_head];
                multiply(|r, row| copy_row(e, r, row), k, cx, &mut k_mixed);
                multiply(|r, row| copy_row(f.as_ref().unwrap_or(e), r, row), v, cx, &mut v_mixed);
            }
        }
        let (k_mixed, v_mixed) =
            (MatRef::new(&k_mixed, rank, k.cols()), MatRef::new(&v_mixed, rank, v.cols()));
        g.par_row_blocks(BLOCK_ROWS, |block| {
            let bias = bias.as_deref();
            exact_rows(block.q, k_mixed, v_mixed, bias, scale, Band::ALL, cx, block.out, block.lse);
            Ok(())
        })?;
        let rows = (g.n_q() * g.q.heads()) as u64;
        let fallback_rows = if fallback { rows } else { 0 };
        let visited = rows * rank as u64;
        Ok(RunInfo { rank: Some(rank), fallback_rows, ..RunInfo::visited(visited) })
    }
}

impl GroupPlan for Linformer {
    fn cost(&self, p: &Problem) -> Cost {
        let heads = (p.batch * p.n_heads) as u64;
        let (width, keys) = ((p.d + p.d_v) as u64, (p.batch * p.n_kv_heads * p.n_k) as u64);
        let rank = self.rank(p.n_k, 0) as u64;
        let bytes = 4 * ((p.batch * p.n_heads * p.n_q) as u64 + keys) * width;
        let pairs = match (&self.mix, p.mask) {
            (Mix::Pool | Mix::Gaussian | Mix::Fitted(_), _) if self.params.rank >= p.n_k => p.visible_pairs(),
            (_, Mask::Causal) => heads * p.n_q as u64 * (rank + self.segment_len as u64).div_ceil(2),
            _ => heads * p.n_q as u64 * rank,
        };
        let setup = match self.mix {
            Mix::Pool => keys * width,
            Mix::Fitted(_) => keys * (p.d as u64 + 2 * rank * p.d_v as u64),
            Mix::Gaussian | Mix::Learned(_) => 2 * rank * keys * width,
        };
        Cost { setup_flops: setup, run_flops: 2 * pairs * width, bytes }
    }

    fn run<T: Real>(&self, mut g: Group<'_, T>) -> Result<RunInfo> {
        if g.n_k() == 0 {
            return Ok(g.fill_empty());
        }
        let own_model = matches!(self.mix, Mix::Learned(_));
        if !own_model && self.params.rank >= g.n_k() {
            return Ok(RunInfo { status: Status::Exact, ..exact_group(&mut g)? });
        }
        match g.mask {
            Mask::None => self.run_full(&mut g),
            Mask::Causal => self.run_causal(&mut g),
        }
    }

    fn stream<T: Real>(&self, p: &Problem, _: GroupIndex) -> Option<Box<dyn GroupStream<T>>> {
        let offered = p.mask == Mask::Causal && matches!(self.mix, Mix::Pool);
        offered.then(|| Box::new(Pooled::<T>::new(self.segment_len, p.d, p.d_v)) as Box<dyn GroupStream<T>>)
    }
}
