//! The coreset itself: temperature, pivots, weights, certificate.

use super::{Params, Temperature};
use crate::Real;
use crate::engine::coreset::{CompressKeys, Coreset, Size, Values};
use crate::engine::moments::mean_of;
use crate::group::Group;
use crate::workspace::Context;
use attlas_num::MatRef;
use attlas_num::kernels::{dot, scale};
use attlas_num::linalg::{self, lambert_w0_exp};
use attlas_num::par::*;
use attlas_num::randla::{GaussianKernel, PartialCholesky, rp_cholesky};
use attlas_num::rng::StreamKey;
use std::collections::BTreeMap;

/// Compresses keys to a coreset.
#[derive(Clone, Debug)]
pub struct Compressor {
    pub(super) params: Params,
}

/// Computes $\rho_0 = \sqrt{1 + e^{W_0(2/e^2) + 2}}$.
pub(super) fn rho() -> f64 {
    (1.0 + (lambert_w0_exp(2f64.ln() - 2.0) + 2.0).exp()).sqrt()
}

/// A coreset and figures on its error.
pub(super) struct Made<T> {
    pub(super) coreset: Coreset<T>,
    pub(super) figures: BTreeMap<&'static str, f64>,
}

/// A coreset of one bin.
pub(super) struct Bin<T> {
    pub(super) coreset: Coreset<T>,
    /// `None` if the keys are kept uncompressed.
    pub(super) error: Option<BinError>,
}

/// Error estimate of one bin.
#[derive(Clone, Copy, Debug)]
pub(super) struct BinError {
    pub(super) tau: f64,
    /// Trace of the residual over the trace of the kernel.
    pub(super) residual: f64,
    /// $\ln \sum_j \sqrt{p_j} e^{h_j}$, with an allowance for the rounding of $p_j$.
    pub(super) log_sum: f64,
    pub(super) key_norm: f64,
}

/// Values shared by the bins of one set of keys.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shared<'a> {
    /// $|\beta|$: a negative factor is equivalent to negated queries.
    pub(super) beta: f64,
    /// Vector subtracted from every key.
    pub(super) mean: &'a [f64],
    /// $R_Q$; 0 stands for the norm of the keys.
    pub(super) query_norm: f64,
}

/// Rows per task in passes that read every row once; fixed, so that results do not depend on the number of threads.
const ROWS: usize = 2048;

/// Returns the largest norm of the rows; infinite if one is not finite.
pub(super) fn largest_norm<T: Real>(x: MatRef<'_, T>) -> f64 {
    let square = |i: usize| {
        let square = dot(x.row(i), x.row(i)).to_f64();
        if square.is_nan() { f64::INFINITY } else { square }
    };
    (0..x.rows()).into_par_iter().with_min_len(ROWS).map(square).reduce(|| 0.0, f64::max).sqrt()
}

/// Subtracts `mean` from every key; returns the largest and the least squared norm, the largest infinite if one is not
/// finite.
fn centre_into<T: Real>(k: MatRef<'_, T>, mean: &[f64], x: &mut [T]) -> (f64, f64) {
    let d = k.cols();
    x.par_chunks_mut(ROWS * d)
        .with_max_len(1)
        .enumerate()
        .map(|(p, x)| {
            let keys = k.sub_rows(p * ROWS..p * ROWS + x.len() / d);
            let (mut most, mut least) = (0.0f64, f64::INFINITY);
            for (x, key) in x.chunks_exact_mut(d).zip(keys.iter_rows()) {
                for (x, (key, mean)) in x.iter_mut().zip(key.iter().zip(mean)) {
                    *x = T::from_f64(key.to_f64() - mean);
                }
                let square = x.iter().map(|x| x.to_f64() * x.to_f64()).sum::<f64>();
                most = if square.is_nan() { f64::INFINITY } else { most.max(square) };
                least = least.min(square);
            }
            (most, least)
        })
        .reduce(|| (0.0, f64::INFINITY), |a, b| (a.0.max(b.0), a.1.min(b.1)))
}

/// Computes $\tau$ for `n` keys.
pub(super) fn temperature(rule: Temperature, beta: f64, query_norm: f64, key_norm: f64, n: usize) -> f64 {
    let ratio = key_norm / query_norm;
    match rule {
        Temperature::Const => (3.945_82 * ratio).sqrt(),
        Temperature::Lambert => {
            let b0 = (n as f64).ln() / (beta * query_norm * key_norm) + 2.0;
            let w = lambert_w0_exp((b0 / (2.0 * rho())).ln());
            ratio.sqrt() * (b0 / (2.0 * w)).sqrt()
        }
    }
}

/// Returns the largest spread of $h$ at which $e^{h}$ keeps its digits: beyond it, weights underflow.
pub(super) fn spread_limit<T: Real>() -> f64 {
    if T::ROUNDOFF < 1e-10 { 600.0 } else { 60.0 }
}

/// Bounds the part of a residual of $K_0$, at a key with $h$, that rounding may hide: residuals below eight roundoffs
/// count as zero, each of `rank` steps rounds once, and so does each of `d` products in an exponent of the size of $h$.
/// (For $t = \|x_i - x_j\|/\sqrt2$ the terms of the exponent sum to at most $(2\sqrt h + t)^2$, and
/// $(2\sqrt h + t)^2 e^{-t^2} \le 8h + 1$.)
pub(super) fn hidden_residual<T: Real>(rank: usize, d: usize, h: f64) -> f64 {
    T::ROUNDOFF * ((8 + rank) as f64 + (d + 2) as f64 * (8.0 * h + 1.0))
}

impl Compressor {
    /// Builds the coreset of a group's keys and the figures of a run; `query_norm` is that of its queries.
    pub(super) fn coreset<T: Real>(
        &self,
        g: &Group<'_, T>,
        size: Size,
        query_norm: f64,
        stream: StreamKey,
    ) -> Made<T> {
        let (n, scale) = (g.n_k(), g.scale.to_f64());
        let mean = self.mean(g.k);
        let given = self.params.query_norm.unwrap_or(query_norm);
        let shared = Shared { beta: scale.abs(), mean: &mean, query_norm: given };
        let bins = self.bins(g.k, Values::Plain(g.v), size, shared, stream, g.cx);
        let mut coreset = Coreset::empty(g.k.cols(), g.d_v());
        let mut figures = BTreeMap::new();
        let beta = scale.abs();
        // Jensen: Z ≥ n for centred keys, and n e^{βq·mean} at least otherwise.
        let offset = if self.params.centre { 0.0 } else { mean_norm(g.k) * query_norm * beta };
        let mut certified = 0.0;
        for bin in &bins {
            coreset.append(&bin.coreset);
            if let Some(e) = bin.error {
                let growth = beta * e.tau * e.tau * query_norm * query_norm / 2.0;
                certified += (growth + e.log_sum + offset - (n as f64).ln()).exp();
                let mut keep = |name, value: f64| {
                    let entry = figures.entry(name).or_insert(value);
                    *entry = entry.max(value);
                };
                keep("tau", e.tau);
                keep("residual", e.residual);
                keep("gamma", beta * query_norm * e.key_norm / (n as f64).ln());
            }
        }
        figures.insert("certified_error", if certified < 1.0 { certified } else { 1.0 });
        Made { coreset, figures }
    }

    /// Vector subtracted from every key.
    pub(super) fn mean<T: Real>(&self, k: MatRef<'_, T>) -> Vec<f64> {
        if self.params.centre { mean_of(k) } else { vec![0.0; k.cols()] }
    }

    /// Compresses bin by bin: parts of equal length, and the rest as one more.
    pub(super) fn bins<T: Real>(
        &self,
        k: MatRef<'_, T>,
        values: Values<'_, T>,
        size: Size,
        shared: Shared<'_>,
        stream: StreamKey,
        cx: Context<'_>,
    ) -> Vec<Bin<T>> {
        let n = k.rows();
        let bins = size.bins.clamp(1, n.max(1));
        let (len, rank) = ((n / bins).max(1), size.rank.div_ceil(bins));
        let stream = stream.named("pivots");
        // All remaining keys form one part, however many they are.
        let parts = bins + usize::from(n > bins * len);
        (0..parts)
            .into_par_iter()
            .with_max_len(1)
            .map(|b| {
                let range = b * len..if b < bins { (b + 1) * len } else { n };
                let (k, values) = (k.sub_rows(range.clone()), values.rows(range));
                self.bin(k, values, rank, shared, cx, |kernel, log_scale| {
                    let options = self.params.pivots(rank);
                    rp_cholesky(kernel, Some(log_scale), options, stream.with(b as u64), cx.scratch)
                })
            })
            .collect()
    }

    /// Builds the coreset of one bin with the pivots that `factor` finds.
    pub(super) fn bin<'s, T: Real>(
        &self,
        k: MatRef<'_, T>,
        values: Values<'_, T>,
        rank: usize,
        shared: Shared<'_>,
        cx: Context<'s>,
        factor: impl FnOnce(&GaussianKernel<'_, T>, &[f64]) -> linalg::Result<PartialCholesky<'s, T>>,
    ) -> Bin<T> {
        let verbatim = || Bin { coreset: Coreset::verbatim(k, values), error: None };
        let (n, d, beta) = (k.rows(), k.cols(), shared.beta);
        if n <= rank {
            return verbatim();
        }
        let mut x = cx.scratch.take::<T>(n * d);
        let (most, least) = centre_into(k, shared.mean, &mut x);
        let key_norm = most.sqrt();
        let query_norm = if shared.query_norm > 0.0 { shared.query_norm } else { key_norm };
        if !(key_norm.is_finite() && query_norm.is_finite()) {
            return verbatim();
        }
        if beta * query_norm * key_norm <= 1e-290 {
            // Indistinguishable keys, or only zero queries.
            let error = BinError { tau: 1.0, residual: 0.0, log_sum: f64::NEG_INFINITY, key_norm };
            return Bin { coreset: sum_at_first(k, values), error: Some(error) };
        }
        let rule = self.params.temperature;
        let wanted = self.params.tau.unwrap_or_else(|| temperature(rule, beta, query_norm, key_norm, n));
        let spread = beta * (most - least) / (2.0 * wanted * wanted);
        let tau = wanted * (spread / spread_limit::<T>()).max(1.0).sqrt();
        let factor_x = T::from_f64(beta.sqrt() / tau);
        x.par_chunks_mut(ROWS * d).for_each(|x| scale(factor_x, x));
        let kernel = GaussianKernel::new(MatRef::new(&x, n, d));
        let h = kernel.half_norms();
        let log_scale: Vec<f64> = h.iter().map(|h| h.to_f64()).collect();
        let Ok(cholesky) = factor(&kernel, &log_scale) else { return verbatim() };
        let top = log_scale.iter().copied().fold(0.0, f64::max);
        let columns = values.d_v() + 1;
        let weighted = cholesky.apply_weights_with(columns, cx.scratch, |j, row| {
            values.scaled_into(j, T::from_f64((log_scale[j] - top).exp()), row);
        });
        let mut coreset = Coreset::empty(d, columns - 1);
        let mut row = vec![T::ZERO; columns];
        for (t, &s) in cholesky.pivots.iter().enumerate() {
            let back = (top - log_scale[s]).exp();
            row.iter_mut().zip(weighted.row(t)).for_each(|(r, y)| *r = T::from_f64(back * y));
            coreset.push(k.row(s), &row[..columns - 1], row[columns - 1]);
        }
        if coreset.is_empty() || !coreset.is_finite() {
            return verbatim();
        }
        let hidden = |h: f64| hidden_residual::<T>(cholesky.rank(), d, h);
        let roots = cholesky.residual.par_chunks(ROWS).zip(log_scale.par_chunks(ROWS)).map(|(p, h)| {
            p.iter().zip(h).map(|(p, h)| (p + hidden(*h)).sqrt() * (h - top).exp()).sum::<f64>()
        });
        // Weights come from a solve with the factor of the pivots, which rounding moves relative to its least singular
        // value; the least pivot stands for that.
        let moved = 1.0 + hidden(top) / cholesky.least_pivot();
        let log_sum = top + roots.collect::<Vec<_>>().iter().sum::<f64>().ln() + moved.ln();
        let error = BinError { tau, residual: cholesky.relative_residual, log_sum, key_norm };
        Bin { coreset, error: Some(error) }
    }
}

/// Returns the first key with the sum of all values and weights.
fn sum_at_first<T: Real>(k: MatRef<'_, T>, values: Values<'_, T>) -> Coreset<T> {
    let mut sum = vec![0.0; values.d_v()];
    let mut weight = 0.0;
    for j in 0..k.rows() {
        let (v, w) = values.row(j);
        sum.iter_mut().zip(v).for_each(|(s, v)| *s += v.to_f64());
        weight += w.to_f64();
    }
    let mut coreset = Coreset::empty(k.cols(), sum.len());
    let sum: Vec<T> = sum.into_iter().map(T::from_f64).collect();
    coreset.push(k.row(0), &sum, T::from_f64(weight));
    coreset
}

/// Returns the norm of the mean of the keys.
fn mean_norm<T: Real>(k: MatRef<'_, T>) -> f64 {
    mean_of(k).iter().map(|m| m * m).sum::<f64>().sqrt()
}

impl CompressKeys for Compressor {
    fn compress<T: Real>(
        &self,
        keys: MatRef<'_, T>,
        values: Values<'_, T>,
        size: Size,
        scale: f64,
        stream: StreamKey,
        cx: Context<'_>,
    ) -> Coreset<T> {
        let mean = self.mean(keys);
        // Queries must not be used: those of later tokens would leak into earlier rows.
        let query_norm = self.params.query_norm.unwrap_or(0.0);
        let shared = Shared { beta: scale.abs(), mean: &mean, query_norm };
        let mut all = Coreset::empty(keys.cols(), values.d_v());
        for bin in self.bins(keys, values, size, shared, stream, cx) {
            all.append(&bin.coreset);
        }
        all
    }

    fn size(&self, n: usize) -> Size {
        let share = self.params.ratio.map_or(0, |r| (r * n as f64) as usize);
        Size { rank: self.params.rank.max(share), bins: self.params.bins }
    }
}
