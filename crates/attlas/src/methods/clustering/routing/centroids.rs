//! Centroids by spherical k-means on layer-normed rows.
//!
//! $\hat x = (x - \bar x)/\sigma(x)$ over the $d$ entries of a row, zero for a constant one. Centroids are unit vectors that
//! maximise $\sum_i \max_c \langle \mu_c, \hat x_i\rangle$ to the extent that Lloyd's iteration from random rows does;
//! with many rows, on a random subset.

use super::{METHOD, Params, ROWS, Routing};
use crate::engine::lane_sum;
use crate::group::GroupIndex;
use crate::method::Calibration;
use crate::{Inputs, Mat, MatRef, Problem, Qkv, Real, Result};
use attlas_num::cluster::{Init, Metric, Options as KmeansOptions, kmeans};
use attlas_num::par::*;
use attlas_num::rng::StreamKey;

/// Default number of rows per centroid in k-means: more move the centroids very little.
pub(super) const ROWS_PER_CENTROID: usize = 128;

pub(super) fn find_centroids<T: Real>(
    rows: MatRef<'_, T>,
    clusters: usize,
    params: &Params,
    key: StreamKey,
) -> Mat<T> {
    let options = KmeansOptions { clusters, iters: params.iters, metric: Metric::Spherical };
    let most = params.samples.unwrap_or(clusters.saturating_mul(ROWS_PER_CENTROID));
    if rows.rows() <= most {
        return kmeans(rows, None, options, Init::Rows, key).centroids;
    }
    let mut drawn = Mat::zeros(most, rows.cols());
    rows.gather_into(key.named("samples").rng().subset(rows.rows(), most), drawn.data_mut());
    kmeans(drawn.as_ref(), None, options, Init::Rows, key).centroids
}

/// Counts the inner products with centroids that [`find_centroids`] computes.
pub(super) fn centroid_scores(rows: usize, clusters: usize, params: &Params) -> u64 {
    let rows = rows.min(params.samples.unwrap_or(clusters.saturating_mul(ROWS_PER_CENTROID)));
    (rows * clusters * (params.iters + 1)) as u64
}

/// Subtracts the mean and divides by the standard deviation; a constant row becomes zero.
pub(super) fn layer_norm<T: Real>(row: &mut [T]) {
    let n = row.len() as f64;
    let mean = lane_sum(row, |x| x) / n;
    let variance = lane_sum(row, |x| (x - mean) * (x - mean)) / n;
    let factor = if variance > 0.0 { 1.0 / variance.sqrt() } else { 0.0 };
    row.iter_mut().for_each(|x| *x = T::from_f64((x.to_f64() - mean) * factor));
}

pub(super) fn norm_into<T: Real>(x: MatRef<'_, T>, out: &mut [T]) {
    let d = x.cols();
    out.par_chunks_mut(ROWS * d).enumerate().for_each(|(t, out)| {
        x.gather_into(t * ROWS.., out);
        out.chunks_exact_mut(d).for_each(layer_norm);
    });
}

/// Learns unit centroids of every key head from the queries and keys of samples.
pub(super) fn calibrate(params: &Params, p: &Problem, samples: &[Inputs<'_>]) -> Result<Calibration> {
    let mut calibration = Calibration::new(METHOD.id, p);
    for kv_head in 0..p.n_kv_heads {
        let mut rows: Vec<f64> = Vec::new();
        for sample in samples {
            match sample {
                Inputs::F32(x) => collect_rows(x, p, kv_head, &mut rows),
                Inputs::F64(x) => collect_rows(x, p, kv_head, &mut rows),
            }
        }
        rows.chunks_exact_mut(p.d).for_each(layer_norm);
        let rows = MatRef::new(&rows, rows.len() / p.d, p.d);
        let plan = Routing { params: params.clone(), given: None };
        let clusters = plan.sizes(p.n_k, kv_head).clusters;
        let key = GroupIndex { batch: 0, kv_head }.stream_key(params.seed).named("routing calibration");
        calibration.insert(format!("centroids.{kv_head}"), &find_centroids(rows, clusters, params, key));
    }
    Ok(calibration)
}

/// Appends the queries and keys of one group.
fn collect_rows<T: Real>(x: &Qkv<'_, T>, p: &Problem, kv_head: usize, rows: &mut Vec<f64>) {
    let [batch, ..] = x.q.dims();
    let size = p.group_size();
    for b in 0..batch {
        let queries = (kv_head * size..(kv_head + 1) * size).map(|h| x.q.head(b, h));
        for matrix in queries.chain([x.k.head(b, kv_head)]) {
            matrix.iter_rows().for_each(|row| rows.extend(row.iter().map(|v| v.to_f64())));
        }
    }
}
