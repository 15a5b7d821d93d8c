//! Grouped-query layers as tensor product attention with fixed head factors.
//!
//! **Idea.** Keys of all heads are fixed mixtures of a few feature factors. With one factor per key head this is the
//! layer itself; with fewer, the best mixture in the Frobenius norm is a truncated singular value decomposition.
//!
//! **Math.** View the key weights as $H_{kv} \times (d D)$; its rank-$R$ approximation $\sum_r \sigma_r u_r v_r^\top$ gives
//! $a_r = R\,u_r$ (repeated for the query heads of a group) and $W^b_r = \sigma_r v_r$. With calibration inputs the
//! decomposition is that of $W L$, $LL^\top = X^\top X / n$, and $L^{-1}$ is applied afterwards; a bias is one more input,
//! always 1. Rotary positions act on $b$ and need no change.
//!
//! **Reference.** zhang2025tpa for the form; the fit is this project's.
//!
//! **Cost.** One singular value decomposition of an $H_{kv} \times dD$ matrix each for keys and values.
//!
//! **Guarantees.** $R = H_{kv}$ is exact. At lower ranks the relative error is reported: trained heads share almost
//! nothing along this mode (0.76 at $R = 1$, 0.51 at $R = 2$ of 3 for SmolLM2-135M, where unrelated heads would give
//! 0.82 and 0.58).
//!
//! **When to use.** The exact form to run a model with this layer; the lossy form as a diagnosis.

use super::common::moments::{Moments, RIDGE};
use super::common::network::{Attention, Loss, Request, Rewritten, Role, Slot, Weight, new_weight};
use super::common::refused;
use crate::conversions::{Conversion, Run};
use crate::layer::{Dense, LayerShape};
use crate::{Error, Mat, Options, Result};
use attlas_num::linalg::{Triangle, solve_triangular_in_place, svd};
use attlas_num::rope::{Layout, Scaling};

/// Registry entry.
pub static CONVERSION: Conversion = Conversion {
    id: "tensor_product",
    title: "Grouped-query attention with fixed head factors",
    reference: "zhang2025tpa",
    params: Params::SPECS,
    from: "grouped_query",
    to: "tensor_product",
    reads_text: true,
    run: Run::Matrices(run),
};

crate::params! {
    /// Parameters of [`convert`].
    pub struct Params {
        /// Number of terms of keys; auto is the number of key heads, which is exact.
        rank_k: Option<usize> = None, in 1..=4096;
        /// Number of terms of values; auto is the number of key heads, which is exact.
        rank_v: Option<usize> = None, in 1..=4096;
    }
}

/// Factors of keys or values: weights of a layer with `contextual = b_only` and `kv_only = true`.
#[derive(Clone, Debug)]
pub struct Factors {
    /// `rank · n_heads` numbers as a column: the weight `a_k` or `a_v`.
    pub a: Mat<f32>,
    /// `rank · width × d_model`: the weight `b_k` or `b_v`.
    pub b: Mat<f32>,
    /// Number of terms.
    pub rank: usize,
    /// Relative Frobenius error of the weights.
    pub rel_error: f64,
    /// Relative root mean square error of keys or values, if moments of the inputs are known.
    pub seen_error: Option<f64>,
}

/// Computes factors of keys and of values from their projections (`n_kv_heads · width × d_model`). Queries and output
/// do not change. `seen` holds moments of calibration inputs, if there are any.
pub fn convert(
    shape: &LayerShape,
    params: &Params,
    k: &Mat<f32>,
    v: &Mat<f32>,
    seen: Option<&Moments>,
) -> Result<(Factors, Factors)> {
    params.validate()?;
    let rank = |r: Option<usize>| r.unwrap_or(shape.n_kv_heads).min(shape.n_kv_heads);
    Ok((
        factors(shape, k, shape.d, rank(params.rank_k), seen)?,
        factors(shape, v, shape.d_v, rank(params.rank_v), seen)?,
    ))
}

/// Converts the attention of the requested layers, by default all. Biases of keys and values are one more input, always
/// 1.
fn run(request: &Request<'_>) -> Result<Rewritten> {
    let params = Params::from_options(request.options)?;
    request.whole_attention(CONVERSION.id)?;
    let network = request.network;
    let mut reasons: Vec<String> =
        network.obstacles().into_iter().map(|what| format!("the layer has no place for {what}")).collect();
    let mut options = Options::new().with("contextual", "b_only").with("kv_only", true);
    match network.rope() {
        None => options.set("rope", "none"),
        Some(rope) => {
            if rope.scaling != Scaling::None {
                reasons.push("the layer rotates without a context extension".into());
            }
            let pairs = if rope.layout == Layout::Half { "half" } else { "interleaved" };
            options = options.with("rope", pairs).with("rope_base", rope.base).with("rope_dim", rope.dim);
        }
    }
    if !reasons.is_empty() {
        return Err(Error::Unsupported { method: CONVERSION.id.into(), reasons });
    }
    let layers = request.layers_or(|n| (0..n).collect())?;
    let shape = network.shape();
    let mut out = Rewritten::default();
    for (i, &layer) in layers.iter().enumerate() {
        let map = |role| network.map(Slot { layer, role });
        let (k, v) = (map(Role::Key)?, map(Role::Value)?);
        let biased = [&k, &v].map(|w| w.bias.is_some());
        let inputs = shape.d_model + usize::from(biased[0] || biased[1]);
        let wider = |w: &Dense| {
            Mat::from_fn(w.weight.rows(), inputs, |o, j| match &w.bias {
                _ if j < shape.d_model => w.weight[(o, j)],
                Some(bias) => bias[o],
                None => 0.0,
            })
        };
        // Keys and values have the same inputs.
        let seen = network.moments(Slot { layer, role: Role::Key });
        let seen = seen.map(|m| if inputs > shape.d_model { m.with_one() } else { m.as_ref().clone() });
        let wide = LayerShape { d_model: inputs, ..shape };
        let (fk, fv) = convert(&wide, &params, &wider(&k), &wider(&v), seen.as_ref())?;
        let mut weights = std::collections::BTreeMap::from([
            ("q", Weight::Kept(Role::Query)),
            ("o", Weight::Kept(Role::Output)),
        ]);
        let options = options.clone().with("rank_k", fk.rank).with("rank_v", fv.rank);
        let sides = [("k", "a_k", "b_k", fk, &k), ("v", "a_v", "b_v", fv, &v)];
        for (side, a_name, b_name, f, before) in sides {
            let b = Dense {
                weight: Mat::from_fn(f.b.rows(), shape.d_model, |o, j| f.b[(o, j)]),
                bias: before
                    .bias
                    .as_ref()
                    .map(|_| (0..f.b.rows()).map(|o| f.b[(o, shape.d_model)]).collect()),
            };
            let bias = |b: &Dense| b.bias.as_ref().map_or(0, Vec::len);
            out.losses.push(Loss {
                what: format!("layer {layer} {side}"),
                rank: f.rank,
                rel_error: f.rel_error,
                seen_error: f.seen_error,
                before: before.weight.data().len() + bias(before),
                after: f.a.data().len() + b.weight.data().len() + bias(&b),
            });
            weights.insert(a_name, new_weight(f.a));
            weights.insert(b_name, Weight::New(b));
        }
        // Ranks replace groups.
        let shape = LayerShape { n_kv_heads: shape.n_heads, ..shape };
        out.attention.insert(layer, Attention { shape, options, weights });
        (request.progress)(i + 1, layers.len());
    }
    Ok(out)
}

fn factors(
    s: &LayerShape,
    w: &Mat<f32>,
    width: usize,
    rank: usize,
    seen: Option<&Moments>,
) -> Result<Factors> {
    let (groups, d) = (s.n_kv_heads, s.d_model);
    if (w.rows(), w.cols()) != (groups * width, d) {
        let found = format!("{} × {}", w.rows(), w.cols());
        return Err(Error::shape("projection", format!("{} × {d}", groups * width), found));
    }
    let group = |h: usize| h * groups / s.n_heads;
    if rank == groups {
        let a = Mat::from_fn(groups * s.n_heads, 1, |i, _| {
            if group(i % s.n_heads) == i / s.n_heads { groups as f32 } else { 0.0 }
        });
        return Ok(Factors { a, b: w.clone(), rank, rel_error: 0.0, seen_error: seen.map(|_| 0.0) });
    }
    let fail = |e: attlas_num::linalg::LinalgError| refused(CONVERSION.id, e);
    if let Some(m) = seen.filter(|m| m.width() != d) {
        return Err(Error::shape("calibration moments", format!("{d} inputs"), m.width()));
    }
    let factor = seen.map(|m| m.root(RIDGE)).transpose()?;
    let wide = w.cast::<f64>();
    let weighted = match &factor {
        Some(l) => attlas_num::linalg::matmul(wide.as_ref(), l.as_ref()),
        None => wide.clone(),
    };
    // Row g of the unfolding holds the weights of key head g.
    let unfolded = Mat::from_vec(weighted.into_vec(), groups, width * d);
    let svd = svd(unfolded.as_ref()).map_err(fail)?.truncated(rank);
    let mut b = Mat::from_fn(rank * width, d, |i, j| {
        let r = i / width;
        svd.sigma[r] * svd.v[(i % width * d + j, r)]
    });
    if let Some(l) = &factor {
        // Rows of B L⁻¹: solve Lᵀ x = b for each row.
        let mut columns = b.transpose();
        let cols = columns.cols();
        solve_triangular_in_place(Triangle::LowerTransposed, l.as_ref(), columns.data_mut(), cols);
        b = columns.transpose();
    }
    let residual = Mat::from_fn(groups * width, d, |i, j| {
        let terms = (0..rank).map(|r| svd.u[(i / width, r)] * b[(r * width + i % width, j)]);
        wide[(i, j)] - terms.sum::<f64>()
    });
    let gap = residual.frobenius();
    let norm = wide.frobenius();
    Ok(Factors {
        a: Mat::from_fn(rank * s.n_heads, 1, |i, _| {
            (rank as f64 * svd.u[(group(i % s.n_heads), i / s.n_heads)]) as f32
        }),
        b: b.cast(),
        rank,
        rel_error: if norm > 0.0 { gap / norm } else { 0.0 },
        seen_error: seen.map(|m| {
            let all = m.energy(&wide);
            if all > 0.0 { (m.energy(&residual) / all).sqrt() } else { 0.0 }
        }),
    })
}

#[cfg(test)]
mod tests {
    use super::super::common::moments::tests::moments_of;
    use super::*;
    use crate::Options;
    use crate::layers::testing::{assert_close, forward, random, random_layer, weights_from};
    use crate::layers::{grouped_query, tensor_product};

    const SHAPE: LayerShape = LayerShape { d_model: 20, n_heads: 6, n_kv_heads: 3, d: 8, d_v: 4 };

    fn layer(k: Factors, v: Factors) -> Box<dyn crate::layer::Layer> {
        let options = Options::new()
            .with("contextual", "b_only")
            .with("kv_only", true)
            .with("rank_k", k.rank)
            .with("rank_v", v.rank);
        let weights = weights_from([
            ("q", random("q", 48, 20)),
            ("a_k", k.a),
            ("b_k", k.b),
            ("a_v", v.a),
            ("b_v", v.b),
            ("o", random("o", 20, 24)),
        ]);
        let shape = LayerShape { n_kv_heads: 6, ..SHAPE };
        tensor_product::LAYER.layer(&shape, &options, weights).unwrap()
    }

    #[test]
    fn the_exact_form_is_the_same_layer() {
        let x = random("x", 25, 20);
        let plain = random_layer(&grouped_query::LAYER, &SHAPE, &Options::new());
        let (k, v) = (random("k", 24, 20), random("v", 12, 20));
        let (fk, fv) = convert(&SHAPE, &Params::default(), &k, &v, None).unwrap();
        assert_eq!((fk.rank, fk.rel_error, fv.rel_error), (3, 0.0, 0.0));
        let same = layer(fk, fv);
        assert_close(&forward(&*same, &x, &[25]), &forward(&*plain, &x, &[25]));
        assert_eq!(same.cache_elements(), plain.cache_elements());
    }

    #[test]
    fn a_network_keeps_its_attention_in_the_exact_form_biases_included() {
        use super::super::common::network::Network;
        use super::super::common::tests::{Toy, request};
        use crate::layer::Linear;
        let rope =
            attlas_num::rope::Rope { dim: 2, base: 100.0, layout: Layout::Half, scaling: Scaling::None };
        let toy = Toy { kv_heads: 2, biased: true, rope: Some(rope.clone()), ..Toy::default() };
        let dense = |role| toy.map(Slot { layer: 0, role }).unwrap();
        let of = |list: Vec<(&str, Dense)>| {
            let boxed = |(n, d): (&str, Dense)| (n.to_string(), Box::new(d) as Box<dyn Linear>);
            list.into_iter().map(boxed).collect::<crate::layer::Weights>()
        };
        let roles = [("q", Role::Query), ("k", Role::Key), ("v", Role::Value), ("o", Role::Output)];
        let plain = of(roles.map(|(n, r)| (n, dense(r))).to_vec());
        let plain = grouped_query::LAYER
            .layer(&toy.shape(), &Options::new().with("rope_base", 100.0), plain)
            .unwrap();
        let x = random("x", 12, 8);
        let want = forward(&*plain, &x, &[12]);
        let all = run(&request(&toy, &Options::new())).unwrap();
        assert_eq!(all.rel_error(), 0.0);
        let attention = &all.attention[&0];
        let weights = attention.weights.iter().map(|(name, w)| {
            (
                *name,
                match w {
                    Weight::Kept(role) => dense(*role),
                    Weight::New(dense) => dense.clone(),
                },
            )
        });
        let layer =
            tensor_product::LAYER.layer(&attention.shape, &attention.options, of(weights.collect())).unwrap();
        assert_close(&forward(&*layer, &x, &[12]), &want);
        let extended = Toy {
            rope: Some(attlas_num::rope::Rope { scaling: Scaling::Linear { factor: 2.0 }, ..rope }),
            ..toy
        };
        assert!(run(&request(&extended, &Options::new())).is_err());
    }

    #[test]
    fn fewer_terms_lose_the_discarded_singular_values() {
        let (k, v) = (random("k", 24, 20), random("v", 12, 20));
        let unfolded = Mat::from_vec(k.data().to_vec(), 3, 160);
        let sigma = attlas_num::linalg::singular_values(unfolded.as_ref()).unwrap();
        let total: f64 = sigma.iter().map(|s| s * s).sum();
        for rank in [1, 2] {
            let params = Params { rank_k: Some(rank), rank_v: Some(rank) };
            let (fk, fv) = convert(&SHAPE, &params, &k, &v, None).unwrap();
            let want = (sigma[rank..].iter().map(|s| s * s).sum::<f64>() / total).sqrt();
            assert!((fk.rel_error - want).abs() < 1e-9 && fv.rel_error > 0.0);
            assert_eq!(layer(fk, fv).cache_elements(), rank * 12);
        }
        // Heads that are multiples of one another need one term.
        let one = random("one", 8, 20);
        let multiples = Mat::from_fn(24, 20, |i, j| [1.0, -0.5, 2.0][i / 8] * one[(i % 8, j)]);
        let (fk, _) =
            convert(&SHAPE, &Params { rank_k: Some(1), rank_v: None }, &multiples, &v, None).unwrap();
        assert!(fk.rel_error < 1e-6);
    }

    #[test]
    fn calibration_lowers_the_error_on_the_inputs() {
        let (k, v) = (random("k", 24, 20), random("v", 12, 20));
        // Inputs that hardly use half of the coordinates.
        let flat = random("x", 200, 20);
        let x = Mat::from_fn(200, 20, |i, j| flat[(i, j)] * if j < 10 { 1.0 } else { 0.01 });
        let seen = moments_of(&x);
        let x = x.cast::<f64>();
        let error = |seen: Option<&Moments>| {
            let (f, _) = convert(&SHAPE, &Params { rank_k: Some(1), rank_v: None }, &k, &v, seen).unwrap();
            let mut total = 0.0;
            for row in 0..200 {
                for g in 0..3 {
                    for e in 0..8 {
                        let exact: f64 = (0..20).map(|j| f64::from(k[(g * 8 + e, j)]) * x[(row, j)]).sum();
                        let model: f64 =
                            (0..20).map(|j| f64::from(f.a[(2 * g, 0)] * f.b[(e, j)]) * x[(row, j)]).sum();
                        total += (exact - model).powi(2);
                    }
                }
            }
            let energy = 200.0 * seen.map_or(1.0, |m| m.energy(&k.cast()));
            if let Some(reported) = f.seen_error {
                assert!((reported - (total / energy).sqrt()).abs() < 1e-4, "{reported}");
            }
            total
        };
        assert!(error(Some(&seen)) < error(None));
        let narrow = moments_of(&random("x", 9, 3));
        assert!(convert(&SHAPE, &Params { rank_k: Some(1), rank_v: None }, &k, &v, Some(&narrow)).is_err());
        assert!(convert(&SHAPE, &Params::default(), &v, &k, None).is_err());
    }

    #[test]
    fn a_network_is_fitted_to_its_inputs() {
        use super::super::common::network::Network;
        use super::super::common::tests::{Toy, request};
        let options = Options::new().with("rank_k", 2).with("rank_v", 2);
        for biased in [false, true] {
            let toy = Toy { biased, ..Toy::default() };
            let seen = Toy { biased, seen: true, ..Toy::default() };
            let (plain, better) =
                (run(&request(&toy, &options)).unwrap(), run(&request(&seen, &options)).unwrap());
            assert!(plain.losses.iter().all(|l| l.seen_error.is_none()));
            for (a, b) in plain.losses.iter().zip(&better.losses) {
                assert!(a.rel_error <= b.rel_error && b.seen_error.unwrap() < 1.0, "{}", b.what);
            }
            // Keys of layer 0 by hand: heads mix terms of the layer, and biases are outputs for the input 1.
            let error = |r: &Rewritten| {
                let weights = &r.attention[&0].weights;
                let (Weight::New(a), Weight::New(b)) = (&weights["a_k"], &weights["b_k"]) else { panic!() };
                let exact = toy.map(Slot { layer: 0, role: Role::Key }).unwrap();
                let with_bias = |d: &Dense| {
                    Mat::from_fn(d.weight.rows(), 9, |i, j| match &d.bias {
                        _ if j < 8 => d.weight[(i, j)],
                        Some(bias) => bias[i],
                        None => 0.0,
                    })
                };
                let terms = with_bias(b);
                let model = Mat::from_fn(8, 9, |i, j| {
                    (0..2)
                        .map(|t| a.weight[(t * 4 + i / 2, 0)] / 2.0 * terms[(t * 2 + i % 2, j)])
                        .sum::<f32>()
                });
                let m = seen.moments(Slot { layer: 0, role: Role::Key }).unwrap().with_one();
                m.relative_error(&with_bias(&exact), &model)
            };
            assert!(error(&better) < error(&plain), "{} {}", error(&better), error(&plain));
            assert!((error(&better) - better.losses[0].seen_error.unwrap()).abs() < 1e-4);
        }
    }
}
