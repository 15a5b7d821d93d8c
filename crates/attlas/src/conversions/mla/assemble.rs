//! Assembly of the latent layer's weights.

use super::cut::{Cut, lost};
use super::plan::Plan;
use super::{CONVERSION, Calibration, Converted, Figures, Params, Source, Stage};
use crate::conversions::common::refused;
use crate::layer::{Dense, LayerShape, Linear};
use crate::layers::latent;
use crate::{Mat, Result};
use attlas_num::linalg::{matmul, matmul_nt, matmul_tn, symmetric_eigen};
use attlas_num::rope::Rope;

/// Computes second moments of queries minus their bias, which the latent does not compress: $\sum (q-b)(q-b)^\top$ plus
/// a billionth of $W W^\top$, so that directions without data are kept if there is room.
fn query_moments(gram: &Mat<f64>, calibration: &Calibration, q: &Dense) -> Mat<f64> {
    let (n, sum) = (calibration.tokens as f64, &calibration.q_sum);
    let b = |i: usize| q.bias.as_ref().map_or(0.0, |b| f64::from(b[i]));
    let weight = q.weight.cast::<f64>();
    let mut moments = matmul_nt(weight.as_ref(), weight.as_ref());
    let trace = |a: &Mat<f64>| (0..a.rows()).map(|i| a[(i, i)]).sum::<f64>();
    let small = 1e-9 * trace(gram) / trace(&moments).max(f64::MIN_POSITIVE);
    for i in 0..gram.rows() {
        for j in 0..gram.cols() {
            let shifted = gram[(i, j)] - sum[i] * b(j) - b(i) * sum[j] + n * b(i) * b(j);
            moments[(i, j)] = shifted + small * moments[(i, j)];
        }
    }
    moments
}

/// Joins weight and bias, the bias as one more column.
fn affine(map: &Dense) -> Mat<f64> {
    let n_in = map.n_in();
    Mat::from_fn(map.n_out(), n_in + 1, |i, j| {
        f64::from(if j < n_in { map.weight[(i, j)] } else { map.bias.as_ref().map_or(0.0, |b| b[i]) })
    })
}

/// Inverts [`affine`], without a bias if it is zero.
fn to_dense(map: &Mat<f64>) -> Dense {
    let n_in = map.cols() - 1;
    let bias: Vec<f32> = (0..map.rows()).map(|i| map[(i, n_in)] as f32).collect();
    Dense {
        weight: Mat::from_fn(map.rows(), n_in, |i, j| map[(i, j)] as f32),
        bias: bias.iter().any(|&b| b != 0.0).then_some(bias),
    }
}

pub(super) fn stacked(a: &Dense, b: &Dense) -> Mat<f64> {
    let (mut rows, n) = (affine(a).into_vec(), a.n_in() + 1);
    rows.extend(affine(b).into_vec());
    Mat::from_vec(rows, a.n_out() + b.n_out(), n)
}

/// Assembles the layer. `kept` are the rotated features (all keys × features); without a `cut` they include every key,
/// and the latent is the values.
#[allow(clippy::too_many_arguments)]
pub(super) fn assemble(
    source: &Source<'_>,
    plan: &Plan,
    p: &Params,
    stage: Stage,
    kept: &Mat<f64>,
    cut: Option<Cut>,
    rope: Option<Rope>,
    kept_energy: f64,
    calibration: &Calibration,
) -> Result<Converted> {
    let s = source.shape;
    let (wk, wv, dr) = (s.n_kv_heads * s.d, s.n_kv_heads * s.d_v, kept.cols());
    let group = plan.widths.groups.max(1);
    let group_of = |h: usize| h / (s.n_heads / group);
    let nope = if cut.is_some() { s.d } else { 0 };
    let cut = cut.unwrap_or_else(|| Cut {
        down: Mat::from_fn(wv, wk + wv, |i, j| f64::from(u8::from(i + wk == j))),
        up_k: Mat::zeros(wk, wv),
        up_v: Mat::identity(wv),
        alpha: 1.0,
        rel_error: 0.0,
    });
    let rank = cut.down.rows();

    let kv = stacked(source.k, source.v);
    let latent = matmul(cut.down.as_ref(), kv.as_ref());
    let shared = matmul_tn(kept.as_ref(), kv.as_ref().sub_rows(0..wk));
    let kv_a =
        Mat::from_fn(
            rank + dr,
            s.d_model + 1,
            |i, j| {
                if i < rank { latent[(i, j)] } else { shared[(i - rank, j)] }
            },
        );
    let each = nope + s.d_v;
    let kv_b = Mat::from_fn(s.n_heads * each, rank, |i, j| {
        let (g, e) = (group_of(i / each), i % each);
        (if e < nope { cut.up_k[(g * s.d + e, j)] } else { cut.up_v[(g * s.d_v + e - nope, j)] }) as f32
    });

    let gamma = ((nope + dr) as f64 / s.d as f64).sqrt();
    let mut queries = affine(source.q);
    let (mut q_a, mut query_error) = (None, 0.0);
    let rank_q = p.rank_q.filter(|_| stage == Stage::LowRankQueries);
    if let Some(rq) = rank_q {
        let Some(gram) = &calibration.q else {
            return Err(refused(
                CONVERSION.id,
                "rank_q needs a calibration with moments between query heads",
            ));
        };
        let gram = query_moments(gram, calibration, source.q);
        let eigen = symmetric_eigen(gram.as_ref()).map_err(|e| refused(CONVERSION.id, e))?;
        query_error = lost(&eigen.values, rq);
        let wide = source.q.weight.cast::<f64>();
        let basis = Mat::from_fn(wide.rows(), rq, |i, j| eigen.vectors[(i, j)]);
        let down = matmul_tn(basis.as_ref(), wide.as_ref());
        q_a = Some((Dense::new(down.cast()), None));
        // The bias is not compressed: it acts after the latent.
        let bias = wide.cols();
        queries =
            Mat::from_fn(wide.rows(), rq + 1, |i, j| if j < rq { basis[(i, j)] } else { queries[(i, bias)] });
    }
    let n_in = queries.cols();
    let mut q = Mat::zeros(s.n_heads * (nope + dr), n_in);
    for h in 0..s.n_heads {
        let own = queries.as_ref().sub_rows(h * s.d..(h + 1) * s.d);
        let g = group_of(h);
        let rotated = matmul_tn(kept.as_ref().sub_rows(g * s.d..(g + 1) * s.d), own);
        for i in 0..nope + dr {
            let from = if i < nope { own.row(i) } else { rotated.row(i - nope) };
            let to = q.row_mut(h * (nope + dr) + i).iter_mut();
            to.zip(from).for_each(|(q, x)| *q = gamma * x);
        }
    }
    let norm = cut.down.frobenius();
    let query_bias = source.q.bias.iter().flatten().map(|&b| f64::from(b).powi(2)).sum::<f64>().sqrt();
    Ok(Converted {
        shape: LayerShape { n_kv_heads: s.n_heads, d: nope + dr, ..s },
        params: latent::Params {
            rank,
            rank_q,
            rope_dim: dr,
            rope_base: rope.as_ref().map_or(10_000.0, |r| r.base),
            ..latent::Params::default()
        },
        rope,
        q_a,
        q: to_dense(&q),
        kv_a: to_dense(&kv_a),
        kv_a_norm: None,
        kv_b,
        o: source.o.clone(),
        figures: Figures { kept_energy, alpha: cut.alpha, rel_error: cut.rel_error, query_error },
        longest: [norm * calibration.longest[0], calibration.longest[1] + query_bias],
    })
}
