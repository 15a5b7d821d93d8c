//! The plan of a method that is a feature map: cost, memory, predicted error, decoding.

use super::super::PerGroup;
use super::{Accumulator, CHUNK, LinearStream, run_linear};
use crate::gradient::GroupBackward;
use crate::group::{Group, GroupIndex, GroupPlan, GroupStream, Queries};
use crate::method::{Cost, RunInfo};
use crate::{Error, Mask, MatRef, Problem, Real, Result};
use attlas_num::par::join;
use attlas_num::sketch::SketchError;
use attlas_num::sketch::features::{Exponent, Moments, SideMoments};
use attlas_num::sketch::variance::Diagnostic;
use std::fmt::Debug;
use std::sync::Arc;

/// Sizes, sequence and key head of a feature map.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Width of queries and keys.
    pub d: usize,
    /// Width of values.
    pub d_v: usize,
    /// Factor on the inner products.
    pub scale: f64,
    /// Sequence and key head of the map.
    pub index: GroupIndex,
}

/// Source of a method's feature maps.
pub trait Source: Debug + Clone + Send + Sync + 'static {
    /// Random numbers of one sequence and key head; `()` if there are none.
    type Draws: Debug + Send + Sync + 'static;

    /// Draws them for width `d` when a plan is made.
    fn draw(&self, d: usize, index: GroupIndex) -> Result<Self::Draws>;

    /// Returns the number of features of one token of width `d`.
    fn num_features(&self, d: usize) -> usize;

    /// Counts the operations for the features of one token.
    fn feature_flops(&self, d: usize) -> u64;

    /// Prepares the sums of one group; `data` is `None` for a stream.
    fn prepare<T: Real>(
        &self,
        shape: &Shape,
        draws: &Self::Draws,
        data: Option<&Group<'_, T>>,
    ) -> Result<Prepared<T>>;

    /// Returns true if denominators are sums of exponentials.
    fn has_lse(&self) -> bool {
        true
    }

    /// Returns true if the sums do not depend on data and their map has a gradient.
    fn has_gradient(&self) -> bool {
        false
    }

    /// Returns true if the map of a group depends on all its keys, so that sums over parts of them do not add up.
    fn fits_keys(&self) -> bool {
        false
    }

    /// Returns the relative error for which `features_needed` is stated.
    fn target_error(&self) -> f64 {
        0.1
    }
}

/// The sums of one group, with a model of their error.
#[derive(Debug)]
pub struct Prepared<T> {
    /// The sums.
    pub acc: Box<dyn Accumulator<T>>,
    /// Model of the error, if it can be predicted.
    pub error: Option<ErrorModel>,
}

impl<T: Real> Prepared<T> {
    /// Wraps sums without a prediction.
    pub fn new(acc: impl Accumulator<T> + 'static) -> Self {
        Self { acc: Box::new(acc), error: None }
    }

    /// Adds a prediction of the error.
    #[must_use]
    pub fn with_error(self, error: ErrorModel) -> Self {
        Self { error: Some(error), ..self }
    }
}

/// Model of the error of random features.
#[derive(Clone, Debug)]
pub enum ErrorModel {
    /// Exponential features.
    Exponential {
        /// Their parameters.
        exponent: Exponent,
        /// True if each direction comes with its opposite.
        antithetic: bool,
        /// Directions.
        directions: usize,
    },
    /// Trigonometric features.
    Trig {
        /// Directions.
        directions: usize,
    },
    /// Any features whose variance is known pair by pair.
    Pairs {
        /// The variance.
        variance: Arc<dyn PairVariance>,
        /// Number of directions; the variance is inversely proportional to it.
        directions: usize,
    },
}

/// A variance that is known pair by pair.
pub trait PairVariance: Debug + Send + Sync {
    /// Returns the variance of the estimate for the scaled rows `x`, `y`, relative to the squared kernel.
    fn relative_variance(&self, x: &[f64], y: &[f64]) -> f64;
}

/// Rows of each head and of the keys from which the error is predicted.
const SAMPLE: usize = 512;

/// Rows of each side whose pairs are evaluated one by one.
const PAIRS: usize = 16;

/// Predicted error for an input.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Prediction {
    /// Relative standard deviation of a typical entry.
    relative_sd: f64,
    /// Features needed for the target, as a multiple of the present number.
    needed: f64,
}

impl ErrorModel {
    /// Predicts for the worst head of a group; `None` if data are not finite.
    fn predict<T: Real>(
        &self,
        q: Queries<'_, T>,
        k: MatRef<'_, T>,
        scale: T,
        target: f64,
    ) -> Option<Prediction> {
        let mut worst = Prediction { relative_sd: 0.0, needed: 0.0 };
        let keys = moments_of(k)?;
        for h in 0..q.heads() {
            let moments = || Moments::new(&moments_of(q.head(h))?, &keys, scale.to_f64()).ok();
            let (diagnostic, directions) = match self {
                Self::Exponential { exponent, antithetic, directions } => {
                    (Diagnostic::of_exponent(exponent, &moments()?, *antithetic)?, *directions)
                }
                Self::Trig { directions } => (Diagnostic::of_trig(&moments()?), *directions),
                Self::Pairs { variance, directions } => {
                    (of_pairs(&**variance, *directions, q.head(h), k, scale), *directions)
                }
            };
            worst.relative_sd = worst.relative_sd.max(diagnostic.relative_sd(directions));
            worst.needed = worst.needed.max(diagnostic.directions_needed(target) / directions as f64);
        }
        (worst.relative_sd.is_finite() || worst.relative_sd == f64::INFINITY).then_some(worst)
    }
}

/// Computes the moments of evenly spaced rows.
fn moments_of<T: Real>(rows: MatRef<'_, T>) -> Option<SideMoments> {
    let mut side = SideMoments::dense(rows.cols());
    let step = rows.rows().div_ceil(SAMPLE).max(1);
    side.add(MatRef::with_stride(
        rows.data(),
        rows.rows().div_ceil(step),
        rows.cols(),
        step * rows.stride(),
    )?);
    Some(side)
}

/// Estimates the second moment of one direction, as a logarithmic mean over some pairs.
fn of_pairs<T: Real>(
    variance: &dyn PairVariance,
    directions: usize,
    q: MatRef<'_, T>,
    k: MatRef<'_, T>,
    scale: T,
) -> Diagnostic {
    let root = scale.to_f64().sqrt();
    let pick = |x: MatRef<'_, T>| -> Vec<Vec<f64>> {
        let step = x.rows().div_ceil(PAIRS).max(1);
        let rows = (0..x.rows()).step_by(step);
        rows.map(|i| x.row(i).iter().map(|x| root * x.to_f64()).collect()).collect()
    };
    let (q, k) = (pick(q), pick(k));
    let logs = q
        .iter()
        .flat_map(|x| k.iter().map(move |y| (directions as f64 * variance.relative_variance(x, y)).ln_1p()));
    Diagnostic { log_rel2: logs.sum::<f64>() / (q.len() * k.len()).max(1) as f64 }
}

/// Runs a group with `run` and adds the number of features to the figures of the run. If the error can be predicted, it
/// also adds that error (`predicted_rel_sd`, for a typical entry of the worst head) and the features needed for
/// `target` (`features_needed`). One thread predicts while the others run.
pub fn run_predicted<T: Real>(
    g: &mut Group<'_, T>,
    features: usize,
    model: Option<&ErrorModel>,
    target: f64,
    run: impl FnOnce(&mut Group<'_, T>) -> Result<RunInfo> + Send,
) -> Result<RunInfo> {
    let (q, k, scale) = (g.q, g.k, g.scale);
    let predict = || model.and_then(|m| m.predict(q, k, scale, target));
    let (prediction, info) = join(predict, || run(g));
    let mut info = RunInfo { rank: Some(features), ..info? };
    info.figures.insert("features", features as f64);
    if let Some(Prediction { relative_sd, needed }) = prediction {
        info.figures.insert("predicted_rel_sd", relative_sd);
        info.figures.insert("features_needed", needed * features as f64);
    }
    Ok(info)
}

/// Linear attention with the feature maps of `S`.
#[derive(Clone, Debug)]
pub struct Linear<S: Source> {
    source: S,
    draws: PerGroup<S::Draws>,
}

impl<S: Source> Linear<S> {
    /// Makes a plan, with the random numbers of every sequence and key head.
    pub fn new(problem: &Problem, source: S) -> Result<Self> {
        let draws = PerGroup::draw(problem, |index| source.draw(problem.d, index))?;
        Ok(Self { source, draws })
    }
}

impl<S: Source> GroupPlan for Linear<S> {
    fn cost(&self, p: &Problem) -> Cost {
        let (m, d_v) = (self.source.num_features(p.d) as u64, p.d_v as u64);
        let features = self.source.feature_flops(p.d);
        let keys = (p.batch * p.n_kv_heads * p.n_k) as u64;
        let rows = (p.batch * p.n_heads * p.n_q) as u64;
        let absorb = keys * (features + 2 * m * (d_v + 1));
        let chunk = 2 * CHUNK as u64 * (m + d_v);
        let inside = if p.mask == Mask::Causal { rows * chunk } else { 0 };
        Cost {
            // Causal pieces are absorbed once before the rows and once with them.
            setup_flops: absorb,
            run_flops: if rows == 0 {
                0
            } else {
                rows * (features + 2 * m * (d_v + 1)) + inside + if inside > 0 { absorb } else { 0 }
            },
            bytes: 4 * (rows + keys) * (p.d + p.d_v) as u64,
        }
    }

    fn run<T: Real>(&self, mut g: Group<'_, T>) -> Result<RunInfo> {
        if g.n_k() == 0 || g.n_q() == 0 {
            return Ok(g.fill_empty());
        }
        let shape = Shape { d: g.k.cols(), d_v: g.d_v(), scale: g.scale.to_f64(), index: g.index };
        let features = self.source.num_features(shape.d);
        let Prepared { acc, error } = self.source.prepare(&shape, self.draws.of(g.index), Some(&g))?;
        let target = self.source.target_error();
        let mut info = run_predicted(&mut g, features, error.as_ref(), target, |g| run_linear(&*acc, g))?;
        info.keys_visited = ((g.lse.len() as u64) - info.empty_rows) * features as u64;
        if !acc.recomputes_rows() {
            info.figures.insert("decode_bytes", (acc.state_len() * size_of::<T>()) as f64);
        }
        Ok(info)
    }

    fn has_lse(&self) -> bool {
        self.source.has_lse()
    }

    fn has_gradient(&self) -> bool {
        self.source.has_gradient()
    }

    fn backward<T: Real>(&self, g: GroupBackward<'_, T>) -> Result<()> {
        if g.k.rows() == 0 {
            g.dq.fill(T::ZERO);
            return Ok(());
        }
        let shape = Shape { d: g.k.cols(), d_v: g.v.cols(), scale: g.scale.to_f64(), index: g.index };
        if self.source.prepare::<T>(&shape, self.draws.of(g.index), None)?.acc.backward(g) {
            return Ok(());
        }
        Err(Error::param("map", "one without a gradient", "a map whose features are positive and smooth"))
    }

    fn stream<T: Real>(&self, p: &Problem, index: GroupIndex) -> Option<Box<dyn GroupStream<T>>> {
        // The scale in the element's precision, as a whole group sees it.
        let shape = Shape { d: p.d, d_v: p.d_v, scale: T::from_f64(p.scale).to_f64(), index };
        let prepared = self.source.prepare::<T>(&shape, self.draws.of(index), None).ok()?;
        let whole = !self.source.fits_keys();
        Some(Box::new(LinearStream::new(prepared.acc, self.source.num_features(p.d), whole, p.d, p.d_v)))
    }
}

impl From<SketchError> for Error {
    fn from(error: SketchError) -> Self {
        match error {
            SketchError::InvalidParam { name, value, expected } => Error::param(name, value, expected),
            SketchError::Shape { what, expected, found } => Error::shape(what, expected, found),
            other => Error::param("sketch", &other, "sizes that can be sketched"),
        }
    }
}
