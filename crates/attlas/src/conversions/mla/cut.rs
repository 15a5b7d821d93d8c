//! The low rank of keys and values: the maps to and from the latent, in the chosen metric.

use super::assemble::stacked;
use super::plan::Plan;
use super::{CONVERSION, Calibration, Metric, Params, Source, Stage};
use crate::conversions::common::refused;
use crate::layer::{Dense, LayerShape};
use crate::{Mat, Result};
use attlas_num::linalg::{matmul, matmul_nt, matmul_tn, symmetric_eigen};

/// The maps to and from the latent.
#[derive(Debug)]
pub(super) struct Cut {
    /// Map to the latent: latent × all keys and values.
    pub(super) down: Mat<f64>,
    /// Map to keys: all keys × latent.
    pub(super) up_k: Mat<f64>,
    /// Map to values: all values × latent.
    pub(super) up_v: Mat<f64>,
    pub(super) alpha: f64,
    pub(super) rel_error: f64,
}

impl Cut {
    /// Cuts nothing: the latent holds the unrotated features, `rest` (all keys × features), and the values.
    pub(super) fn whole(rest: &Mat<f64>, wv: usize) -> Self {
        let (wk, w) = (rest.rows(), rest.cols());
        let unit = |i: usize, j: usize| f64::from(u8::from(i == j));
        Self {
            down: Mat::from_fn(w + wv, wk + wv, |i, j| match (i < w, j < wk) {
                (true, true) => rest[(j, i)],
                (false, false) => unit(i - w, j - wk),
                _ => 0.0,
            }),
            up_k: Mat::from_fn(wk, w + wv, |i, j| if j < w { rest[(i, j)] } else { 0.0 }),
            up_v: Mat::from_fn(wv, w + wv, |i, j| if j < w { 0.0 } else { unit(i, j - w) }),
            alpha: 1.0,
            rel_error: 0.0,
        }
    }

    pub(super) fn new(
        source: &Source<'_>,
        plan: &Plan,
        p: &Params,
        stage: Stage,
        rest: &Mat<f64>,
        calibration: &Calibration,
    ) -> Result<Self> {
        let s = source.shape;
        let (wk, wv, w) = (rest.rows(), s.n_kv_heads * s.d_v, rest.cols());
        let weights;
        let gram = if p.pca == Metric::Weight {
            let all = stacked(source.k, source.v);
            let all = Mat::from_fn(wk + wv, s.d_model, |i, j| all[(i, j)]);
            weights = matmul_nt(all.as_ref(), all.as_ref());
            &weights
        } else {
            &calibration.kv
        };
        let ((root_k, inverse_k), (root_v, inverse_v)) = if p.pca == Metric::Functional {
            (roots(&score_metric(&s, rest, calibration))?, roots(&output_metric(&s, source.o))?)
        } else {
            let same = |n: usize| (Mat::identity(n), Mat::identity(n));
            (same(w), same(wv))
        };
        let from_keys = matmul(root_k.as_ref(), rest.transpose().as_ref());
        let mut left = Mat::from_fn(w + wv, wk + wv, |i, j| match (i < w, j < wk) {
            (true, true) => from_keys[(i, j)],
            (false, false) => root_v[(i - w, j - wk)],
            _ => 0.0,
        });
        let moments =
            |left: &Mat<f64>| matmul_nt(matmul(left.as_ref(), gram.as_ref()).as_ref(), left.as_ref());
        let mut moved = moments(&left);
        let mean_norm = |range: std::ops::Range<usize>| {
            let n = range.len().max(1) as f64;
            range.map(|i| moved[(i, i)].max(0.0).sqrt()).sum::<f64>() / n
        };
        let (keys, values) = (mean_norm(0..w), mean_norm(w..w + wv));
        let alpha =
            if p.balance > 0.0 && keys > 0.0 && values > 0.0 { keys / (values * p.balance) } else { 1.0 };
        left.data_mut()[..w * (wk + wv)].iter_mut().for_each(|x| *x /= alpha);
        for i in 0..w + wv {
            for j in 0..w + wv {
                let factor = if i < w { alpha } else { 1.0 } * if j < w { alpha } else { 1.0 };
                moved[(i, j)] /= factor;
            }
        }
        let eigen = symmetric_eigen(moved.as_ref()).map_err(|e| refused(CONVERSION.id, e))?;
        let rank = if stage >= Stage::LowRank { plan.rank } else { w + wv };
        let kept = |rows: std::ops::Range<usize>, factor: f64| {
            Mat::from_fn(rows.len(), rank, |i, j| factor * eigen.vectors[(rows.start + i, j)])
        };
        let back_k = matmul(inverse_k.as_ref(), kept(0..w, alpha).as_ref());
        Ok(Self {
            down: matmul_tn(kept(0..w + wv, 1.0).as_ref(), left.as_ref()),
            up_k: matmul(rest.as_ref(), back_k.as_ref()),
            up_v: matmul(inverse_v.as_ref(), kept(w..w + wv, 1.0).as_ref()),
            alpha,
            rel_error: lost(&eigen.values, rank),
        })
    }
}

/// Computes $\sqrt{\sum_{j \ge r} \lambda_j / \sum \lambda_j}$.
pub(super) fn lost(values: &[f64], rank: usize) -> f64 {
    let sum = |v: &[f64]| v.iter().map(|x| x.max(0.0)).sum::<f64>();
    let total = sum(values);
    if total > 0.0 { (sum(&values[rank..]) / total).sqrt() } else { 0.0 }
}

/// Computes the metric of unrotated keys: squared errors of scores, summed over heads and pairs of calibration tokens.
fn score_metric(s: &LayerShape, rest: &Mat<f64>, calibration: &Calibration) -> Mat<f64> {
    let group = s.n_heads / s.n_kv_heads;
    let mut sum = Mat::zeros(rest.cols(), rest.cols());
    for g in 0..s.n_kv_heads {
        let mut queries = Mat::zeros(s.d, s.d);
        for gram in &calibration.heads[g * group..(g + 1) * group] {
            queries.data_mut().iter_mut().zip(gram.data()).for_each(|(s, x)| *s += x);
        }
        let own = rest.as_ref().sub_rows(g * s.d..(g + 1) * s.d);
        let part = matmul_tn(own, matmul(queries.as_ref(), own).as_ref());
        sum.data_mut().iter_mut().zip(part.data()).for_each(|(s, x)| *s += x);
    }
    sum
}

/// Computes the metric of values: errors after the output projection, if every head passed them on in full.
fn output_metric(s: &LayerShape, o: &Dense) -> Mat<f64> {
    let group = s.n_heads / s.n_kv_heads;
    let o = o.weight.cast::<f64>();
    let mut metric = Mat::zeros(s.n_kv_heads * s.d_v, s.n_kv_heads * s.d_v);
    for h in 0..s.n_heads {
        let own = Mat::from_fn(s.d_model, s.d_v, |i, j| o[(i, h * s.d_v + j)]);
        let part = matmul_tn(own.as_ref(), own.as_ref());
        let at = h / group * s.d_v;
        for i in 0..s.d_v {
            for j in 0..s.d_v {
                metric[(at + i, at + j)] += part[(i, j)];
            }
        }
    }
    metric
}

/// Computes the symmetric square root and its inverse, with eigenvalues raised to at least 1e-6 of the largest.
fn roots(a: &Mat<f64>) -> Result<(Mat<f64>, Mat<f64>)> {
    let n = a.rows();
    if n == 0 {
        return Ok((Mat::zeros(0, 0), Mat::zeros(0, 0)));
    }
    let eigen = symmetric_eigen(a.as_ref()).map_err(|e| refused(CONVERSION.id, e))?;
    let largest = eigen.values.first().copied().unwrap_or(0.0);
    if largest <= 0.0 {
        return Ok((Mat::identity(n), Mat::identity(n)));
    }
    let root: Vec<f64> = eigen.values.iter().map(|v| v.max(1e-6 * largest).sqrt()).collect();
    let power = |f: &dyn Fn(f64) -> f64| {
        let scaled = Mat::from_fn(n, n, |i, j| eigen.vectors[(i, j)] * f(root[j]));
        matmul_nt(scaled.as_ref(), eigen.vectors.as_ref())
    };
    Ok((power(&|r| r), power(&|r| 1.0 / r)))
}
