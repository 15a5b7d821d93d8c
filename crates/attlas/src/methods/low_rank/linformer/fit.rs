//! Mixing of values fitted to sample inputs, with pooled keys.
//!
//! With $S$ the softmax weights of the queries over the pooled keys and $P$ those over all keys, $F$ minimises
//! $\sum \|S F - P\|_F^2 + \lambda \frac{\operatorname{tr} G}{k} \|F\|_F^2$ over the samples: $F = (G + \lambda \frac{\operatorname{tr} G}{k} I)^{-1} R$,
//! $G = \sum S^\top S$, $R = \sum S^\top P$. $P$ is never formed: both sums take a block of rows at a time.

use super::projections::wrong;
use super::{METHOD, Params};
use crate::engine::pool::{Segments, landmark_weights, log_lens, pool_rows};
use crate::method::Calibration;
use crate::{Inputs, MatRef, Problem, Qkv, Real, Result, Workspace};
use attlas_num::Mat;
use attlas_num::linalg::{self, Op, psd_factor};

/// Learns $F$ of every key head from inputs of the problem's length.
pub(super) fn calibrate(params: &Params, p: &Problem, samples: &[Inputs<'_>]) -> Result<Calibration> {
    if samples.is_empty() || p.n_k == 0 {
        return Err(wrong("at least one sample with at least one key", "none"));
    }
    let mut calibration = Calibration::new(METHOD.id, p);
    let segments = Segments::new(p.n_k, params.rank);
    let k = params.rank.min(p.n_k);
    for kv in 0..p.n_kv_heads {
        let (mut gram, mut cross) = (Mat::zeros(k, k), Mat::zeros(k, p.n_k));
        for sample in samples {
            match sample {
                Inputs::F32(x) => accumulate(p, x, kv, &segments, &mut gram, &mut cross)?,
                Inputs::F64(x) => accumulate(p, x, kv, &segments, &mut gram, &mut cross)?,
            }
        }
        let ridge = params.ridge * (0..k).map(|i| gram[(i, i)]).sum::<f64>() / k as f64;
        (0..k).for_each(|i| gram[(i, i)] += ridge);
        let fitted = psd_factor(gram.as_ref())
            .and_then(|f| f.solve(cross.as_ref()))
            .map_err(|e| wrong("finite samples", e))?;
        calibration.insert(format!("fitted.{kv}"), &fitted);
    }
    Ok(calibration)
}

/// Adds $S^\top S$ and $S^\top P$ of one sample, a block of rows at a time.
fn accumulate<T: Real>(
    p: &Problem,
    x: &Qkv<'_, T>,
    kv: usize,
    segments: &Segments,
    gram: &mut Mat<f64>,
    cross: &mut Mat<f64>,
) -> Result<()> {
    let [batch, ..] = x.k.dims();
    x.validate(&Problem { batch, ..*p })?;
    let ws = Workspace::single()?;
    let (k, n) = (gram.rows(), p.n_k);
    let mut pooled = vec![T::ZERO; k * p.d];
    for b in 0..batch {
        let keys = x.k.head(b, kv);
        ws.install(|cx| pool_rows(keys, segments, cx, &mut pooled));
        let bias: Vec<T> = log_lens(segments);
        for h in kv * p.group_size()..(kv + 1) * p.group_size() {
            let q = x.q.head(b, h);
            for first in (0..p.n_q).step_by(64) {
                let rows = q.sub_rows(first..(first + 64).min(p.n_q));
                let scale = T::from_f64(p.scale);
                let s = landmark_weights(rows, MatRef::new(&pooled, k, p.d), Some(&bias), scale);
                let exact = landmark_weights(rows, keys, None, scale);
                linalg::gemm(1.0, Op::T(s.as_ref()), Op::N(s.as_ref()), gram.data_mut(), k, true);
                linalg::gemm(1.0, Op::T(s.as_ref()), Op::N(exact.as_ref()), cross.data_mut(), n, true);
            }
        }
    }
    Ok(())
}
