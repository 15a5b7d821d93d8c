//! The plan of a method that is a feature map: cost, memory, predicted error, decoding.

use super::{Accumulator, CHUNK, LinearStream, run_linear, scratch_bytes};
use crate::group::{Group, GroupIndex, GroupPlan, GroupStream};
use crate::method::{Cost, RunInfo};
use crate::{Error, Mask, MatRef, Problem, Real, Result};
use attlas_num::sketch::SketchError;
use attlas_num::sketch::features::{Moments, SideMoments};
use attlas_num::sketch::variance::Diagnostic;
use std::fmt::Debug;

/// What a feature map is made for.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Width of queries and keys.
    pub d: usize,
    /// Width of values.
    pub d_v: usize,
    /// Factor on the inner products.
    pub scale: f64,
    /// Whose random streams it draws from.
    pub index: GroupIndex,
}

/// Where the feature maps of a method come from.
pub trait Source: Debug + Clone + Send + Sync + 'static {
    /// Features of one token of width `d`.
    fn num_features(&self, d: usize) -> usize;

    /// Operations that the features of one token take.
    fn feature_flops(&self, d: usize) -> u64;

    /// The sums of one group; `data` is there when a whole group is run, and not for a stream.
    fn accumulator<T: Real>(
        &self,
        shape: &Shape,
        data: Option<&Group<'_, T>>,
    ) -> Result<Box<dyn Accumulator<T>>>;

    /// The predicted error on data with these moments, and the number of directions it is for.
    fn diagnose(&self, moments: &Moments) -> Option<(Diagnostic, usize)> {
        let _ = moments;
        None
    }

    /// Whether the moments that [`diagnose`](Self::diagnose) sees must be dense.
    fn needs_dense_moments(&self) -> bool {
        false
    }

    /// Whether denominators are sums of exponentials.
    fn has_lse(&self) -> bool {
        true
    }
}

/// Rows of each head and of the keys that the predicted error is estimated from.
const SAMPLE: usize = 512;

/// The relative error that the figure `features_needed` is for.
const TARGET: f64 = 0.1;

/// Linear attention with the feature maps of `S`.
#[derive(Clone, Debug)]
pub struct Linear<S> {
    source: S,
}

impl<S: Source> Linear<S> {
    /// A plan.
    pub fn new(source: S) -> Self {
        Self { source }
    }

    /// Largest predicted relative standard deviation over the heads, and the features that [`TARGET`] takes.
    fn predict<T: Real>(&self, g: &Group<'_, T>) -> Option<(f64, f64)> {
        let features = self.source.num_features(g.k.cols()) as f64;
        let collect = |rows: MatRef<'_, T>| {
            let mut side = if self.source.needs_dense_moments() {
                SideMoments::dense(rows.cols())
            } else {
                SideMoments::diagonal(rows.cols())
            };
            let step = rows.rows().div_ceil(SAMPLE).max(1);
            (0..rows.rows()).step_by(step).for_each(|i| side.add(rows.sub_rows(i..i + 1)));
            side
        };
        let keys = collect(g.k);
        let mut worst: Option<(f64, f64)> = None;
        for h in 0..g.q.heads() {
            let moments = Moments::new(&collect(g.q.head(h)), &keys, g.scale.to_f64()).ok()?;
            let (diagnostic, directions) = self.source.diagnose(&moments)?;
            let needed = diagnostic.directions_needed(TARGET) * features / directions as f64;
            let (sd, old) = (diagnostic.relative_sd(directions), worst.unwrap_or((0.0, 0.0)));
            worst = Some((old.0.max(sd), old.1.max(needed)));
        }
        worst
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

    fn scratch_bytes(&self, p: &Problem, threads: usize, size: usize) -> usize {
        scratch_bytes(p, self.source.num_features(p.d), threads, size)
    }

    fn run<T: Real>(&self, mut g: Group<'_, T>) -> Result<RunInfo> {
        let shape = Shape { d: g.k.cols(), d_v: g.d_v(), scale: g.scale.to_f64(), index: g.index };
        let features = self.source.num_features(shape.d);
        let predicted = self.predict(&g);
        let acc = self.source.accumulator(&shape, Some(&g))?;
        let mut info = run_linear(&*acc, &mut g)?;
        info.keys_visited = ((g.lse.len() as u64) - info.empty_rows) * features as u64;
        info.rank = Some(features);
        info.figures.insert("features", features as f64);
        if let Some((sd, needed)) = predicted {
            info.figures.insert("predicted_rel_sd", sd);
            info.figures.insert("features_needed", needed);
        }
        Ok(info)
    }

    fn has_lse(&self) -> bool {
        self.source.has_lse()
    }

    fn stream<T: Real>(&self, p: &Problem, index: GroupIndex) -> Option<Box<dyn GroupStream<T>>> {
        // The scale in the element's precision, as a whole group sees it.
        let shape = Shape { d: p.d, d_v: p.d_v, scale: T::from_f64(p.scale).to_f64(), index };
        let acc = self.source.accumulator::<T>(&shape, None).ok()?;
        Some(Box::new(LinearStream::new(acc, p.d, p.d_v)))
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
