//! Multi-head layers in collaborative form: one set of query and key features for all heads.
//!
//! **Idea.** The products $W_Q^h W_K^{h\top}$ of all heads form a tensor; its CP decomposition gives a mixing matrix
//! and one shared query and key projection.
//!
//! **Math.** $(xW_Q + b_Q)(yW_K + b_K)^\top = xW_QW_K^\top y^\top + b_QW_K^\top y^\top +$ terms constant in $y$, which softmax
//! removes: $b_K$ disappears and $V_c^h = W_K^h b_Q^h$, exactly. With $R \ge Hd$ features, the heads' own projections
//! and a one-hot mixing matrix are exact. With fewer,
//! $T_h = W_Q^h W_K^{h\top} \approx \sum_r M_{hr}\, \tilde w^Q_r \tilde w^{K\top}_r$ by alternating least squares on
//! the factors of $T$ ($H \times D \times D$ is never formed), starting from the $R$ largest singular triples of all
//! heads with the update of $M$: the first update is already as good as truncating each head separately.
//!
//! **Reference.** cordonnier2020.
//!
//! **Cost.** About $12 D H d R$ operations per sweep.
//!
//! **Guarantees.** Exact with all biases at $R = Hd$; never worse than pruning singular triples; tested here.
//!
//! **When to use.** BERT, ViT, GPT-2. **Not with anything between $W_Q$ and $W_K^\top$**: rotary positions, norms of
//! queries and keys, relative positions inside the product.

use super::common::network::{Attention, Loss, Request, Rewritten, Role, Slot, Weight, new_weight};
use super::common::refused;
use crate::conversions::{Conversion, Run};
use crate::layer::{Dense, LayerShape};
use crate::params::ParamValue;
use crate::{Error, Mat, Options, Result, layers};
use attlas_num::linalg::{matmul, matmul_nt, matmul_tn, svd, thin_qr};
use attlas_num::par::*;
use attlas_num::tensor::cp;

/// Registry entry.
pub static CONVERSION: Conversion = Conversion {
    id: "collaborative",
    title: "Multi-head attention with shared query and key features",
    reference: "cordonnier2020",
    params: Params::SPECS,
    from: "grouped_query",
    to: "collaborative",
    reads_text: false,
    run: Run::Matrices(run),
};

crate::choices! {
    /// Starting point of alternating least squares.
    pub enum Init {
        /// The largest singular triples of all heads.
        SvdPrune = "svd_prune",
        /// Leading singular vectors of the unfoldings, a little perturbed.
        Hosvd = "hosvd",
        /// Random factors.
        Random = "random",
    }
}

crate::params! {
    /// Parameters of [`convert`].
    pub struct Params {
        /// Shared features R; auto is H·d / 2.
        rank: Option<usize> = None, in 1..=1 << 20;
        /// Width whose root divides the logits after the conversion.
        temperature: layers::collaborative::Temperature = layers::collaborative::Temperature::Original;
        /// Starting point of alternating least squares.
        init: Init = Init::SvdPrune;
        /// Maximum number of sweeps. 0 keeps the singular triples of svd_prune unchanged, each belonging to one head.
        iters: usize = 100, in 0..=100_000;
        /// Stop when the relative error changes by less than this.
        tol: f64 = 1e-8, in 0.0..=1.0;
        /// Tikhonov weight.
        ridge: f64 = 1e-10, in 0.0..=1.0;
        /// Seed of a random start.
        seed: u64 = 0, in 0..=u64::MAX;
    }
}

/// Weights of the collaborative layer; values and output do not change.
#[derive(Clone, Debug)]
pub struct Converted {
    /// `R × d_model`.
    pub q: Mat<f32>,
    /// `R × d_model`.
    pub k: Mat<f32>,
    /// `H · R` numbers as a column: the weight `mix`.
    pub mix: Mat<f32>,
    /// `H × d_model`; `None` if queries have no bias.
    pub content: Option<Mat<f32>>,
    /// Relative Frobenius error of the products $W_Q W_K^\top$ of all heads together.
    pub rel_error: f64,
    /// Error after each sweep; empty without iterations.
    pub history: Vec<f64>,
}

/// Converts the query and key projections of a multi-head layer. `between` names any operation between the two
/// projections, which rules out this form.
pub fn convert(
    shape: &LayerShape,
    params: &Params,
    q: &Dense,
    k: &Dense,
    between: Option<&str>,
) -> Result<Converted> {
    params.validate()?;
    let (h, d) = (shape.n_heads, shape.d);
    let mut reasons = Vec::new();
    if let Some(what) = between {
        reasons.push(format!(
            "{what} between the query and key projections leaves no fixed product to decompose"
        ));
    }
    if shape.n_kv_heads != h {
        reasons.push("it is for multi-head attention: every query head needs keys of its own".into());
    }
    if !reasons.is_empty() {
        return Err(Error::Unsupported { method: CONVERSION.id.into(), reasons });
    }
    for w in [q, k] {
        if (w.weight.rows(), w.weight.cols()) != (h * d, shape.d_model) {
            let found = format!("{} × {}", w.weight.rows(), w.weight.cols());
            return Err(Error::shape("projection", format!("{} × {}", h * d, shape.d_model), found));
        }
    }
    let content = q.bias.as_ref().map(|b| {
        Mat::from_fn(h, shape.d_model, |head, i| {
            (0..d).map(|e| k.weight[(head * d + e, i)] * b[head * d + e]).sum()
        })
    });
    let rank = params.rank.unwrap_or((h * d / 2).max(1));
    if rank >= h * d {
        let padded =
            |w: &Mat<f32>| Mat::from_fn(rank, w.cols(), |r, i| if r < h * d { w[(r, i)] } else { 0.0 });
        let mix =
            Mat::from_fn(
                h * rank,
                1,
                |i, _| if i % rank / d == i / rank && i % rank < h * d { 1.0 } else { 0.0 },
            );
        return Ok(Converted {
            q: padded(&q.weight),
            k: padded(&k.weight),
            mix,
            content,
            rel_error: 0.0,
            history: Vec::new(),
        });
    }
    // Head by head, d_model × d, in double precision.
    let heads = |w: &Mat<f32>| -> Vec<Mat<f64>> {
        (0..h).map(|head| Mat::from_fn(w.cols(), d, |i, e| f64::from(w[(head * d + e, i)]))).collect()
    };
    let mut target = Products { q: heads(&q.weight), k: heads(&k.weight) };
    let converted = |cp: &cp::Cp<f64>, rel_error, history| {
        let balanced = cp.absorb_weights();
        let [m, wq, wk] = [0, 1, 2].map(|i: usize| &balanced.factors[i]);
        Converted {
            q: wq.transpose().cast(),
            k: wk.transpose().cast(),
            mix: Mat::from_fn(h * rank, 1, |i, _| m[(i / rank, i % rank)] as f32),
            content: content.clone(),
            rel_error,
            history,
        }
    };
    if params.iters == 0 {
        if params.init != Init::SvdPrune {
            return Err(Error::param("iters", 0, "at least 1 from any start but svd_prune"));
        }
        let mut start = target.prune(rank)?;
        // Singular values move to the weights, which are shared among the three factors.
        start.weights = (0..rank).map(|r| (0..h).map(|head| start.factors[0][(head, r)]).sum()).collect();
        start.factors[0].data_mut().iter_mut().for_each(|m| *m = f64::from(u8::from(*m > 0.0)));
        let kept: f64 = start.weights.iter().map(|s| s * s).sum();
        let norm = cp::Target::norm_squared(&target);
        let rel_error = if norm > 0.0 { (1.0 - kept / norm).max(0.0).sqrt() } else { 0.0 };
        return Ok(converted(&start, rel_error, Vec::new()));
    }
    let init = match params.init {
        Init::SvdPrune => cp::Init::Given(target.prune(rank)?),
        Init::Hosvd => cp::Init::Hosvd,
        Init::Random => cp::Init::Random,
    };
    let options = cp::Options {
        init,
        iters: params.iters,
        tol: Some(params.tol),
        ridge: params.ridge,
        seed: params.seed,
        ..Default::default()
    };
    let fit = cp::decompose_target(&mut target, rank, &options).map_err(|e| refused(CONVERSION.id, e))?;
    Ok(converted(&fit.cp, fit.rel_error, fit.history))
}

/// Converts the attention of the requested layers, by default all.
fn run(request: &Request<'_>) -> Result<Rewritten> {
    let params = Params::from_options(request.options)?;
    request.whole_attention(CONVERSION.id)?;
    let network = request.network;
    let rotated = network.rope().map(|_| "rotary positions".to_string());
    let between: Vec<String> = rotated.into_iter().chain(network.obstacles()).collect();
    let between = (!between.is_empty()).then(|| between.join(" and "));
    let layers = request.layers_or(|n| (0..n).collect())?;
    let shape = network.shape();
    let mut out = Rewritten::default();
    for (i, &layer) in layers.iter().enumerate() {
        let map = |role| network.map(Slot { layer, role });
        let (q, k) = (map(Role::Query)?, map(Role::Key)?);
        let c = convert(&shape, &params, &q, &k, between.as_deref())?;
        let rank = c.q.rows();
        let count = |m: &Mat<f32>| m.data().len();
        let after = count(&c.q) + count(&c.k) + count(&c.mix) + c.content.as_ref().map_or(0, count);
        let bias = |d: &Dense| d.bias.as_ref().map_or(0, Vec::len);
        out.losses.push(Loss {
            what: format!("layer {layer} q and k"),
            rank,
            rel_error: c.rel_error,
            seen_error: None,
            before: count(&q.weight) + count(&k.weight) + bias(&q) + bias(&k),
            after,
        });
        let mut weights = std::collections::BTreeMap::from([
            ("q", new_weight(c.q)),
            ("k", new_weight(c.k)),
            ("mix", new_weight(c.mix)),
            ("v", Weight::Kept(Role::Value)),
            ("o", Weight::Kept(Role::Output)),
        ]);
        weights.extend(c.content.map(|m| ("content", new_weight(m))));
        let options = Options::new().with("rank", rank).with("temperature", params.temperature.to_value());
        out.attention.insert(layer, Attention { shape, options, weights });
        (request.progress)(i + 1, layers.len());
    }
    Ok(out)
}

/// The tensor of the products $W_Q^h W_K^{h\top}$, given by its factors.
struct Products {
    /// `d_model × d` for each head.
    q: Vec<Mat<f64>>,
    k: Vec<Mat<f64>>,
}

impl Products {
    /// Returns the `rank` largest singular triples of all heads; each belongs to one head.
    fn prune(&self, rank: usize) -> Result<cp::Cp<f64>> {
        let fail = |e: attlas_num::linalg::LinalgError| refused(CONVERSION.id, e);
        let mut triples = Vec::new();
        for (h, (q, k)) in self.q.iter().zip(&self.k).enumerate() {
            let (a, b) = (thin_qr(q.as_ref()).map_err(fail)?, thin_qr(k.as_ref()).map_err(fail)?);
            let small = svd(matmul_nt(a.r.as_ref(), b.r.as_ref()).as_ref()).map_err(fail)?;
            let (u, v) = (matmul(a.q.as_ref(), small.u.as_ref()), matmul(b.q.as_ref(), small.v.as_ref()));
            for (i, &s) in small.sigma.iter().enumerate() {
                let column = |m: &Mat<f64>| (0..m.rows()).map(|r| m[(r, i)]).collect::<Vec<f64>>();
                triples.push((s, h, column(&u), column(&v)));
            }
        }
        triples.sort_by(|a, b| b.0.total_cmp(&a.0));
        triples.truncate(rank);
        let (n, d_model) = (triples.len(), self.q[0].rows());
        // There are fewer than `rank` triples only if heads are wider than the model: the rest are unit vectors.
        let at = |r: usize, i: usize, side: usize| match triples.get(r) {
            Some(t) => [&t.2, &t.3][side][i],
            None => f64::from(u8::from(i == r % d_model)),
        };
        Ok(cp::Cp {
            weights: vec![1.0; rank],
            factors: vec![
                Mat::from_fn(
                    self.q.len(),
                    rank,
                    |h, r| if r < n && triples[r].1 == h { triples[r].0 } else { 0.0 },
                ),
                Mat::from_fn(d_model, rank, |i, r| at(r, i, 0)),
                Mat::from_fn(d_model, rank, |i, r| at(r, i, 1)),
            ],
        })
    }
}

impl cp::Target for Products {
    fn shape(&self) -> Vec<usize> {
        vec![self.q.len(), self.q[0].rows(), self.k[0].rows()]
    }

    fn norm_squared(&self) -> f64 {
        let of = |(q, k): (&Mat<f64>, &Mat<f64>)| {
            let (a, b) = (matmul_tn(q.as_ref(), q.as_ref()), matmul_tn(k.as_ref(), k.as_ref()));
            a.data().iter().zip(b.data()).map(|(a, b)| a * b).sum::<f64>()
        };
        self.q.iter().zip(&self.k).map(of).sum()
    }

    fn mttkrp(&mut self, factors: &[Mat<f64>], mode: usize) -> Mat<f64> {
        let (m, wq, wk) = (&factors[0], &factors[1], &factors[2]);
        let rank = m.cols();
        let mut out = Mat::zeros(factors[mode].rows(), rank);
        if mode == 0 {
            out.data_mut().par_chunks_mut(rank).enumerate().for_each(|(h, out)| {
                let (a, b) =
                    (matmul_tn(self.q[h].as_ref(), wq.as_ref()), matmul_tn(self.k[h].as_ref(), wk.as_ref()));
                for e in 0..a.rows() {
                    out.iter_mut().zip(a.row(e).iter().zip(b.row(e))).for_each(|(o, (a, b))| *o += a * b);
                }
            });
            return out;
        }
        let (own, other, w) = if mode == 1 { (&self.q, &self.k, wk) } else { (&self.k, &self.q, wq) };
        let parts: Vec<Mat<f64>> = (0..own.len())
            .into_par_iter()
            .map(|h| {
                let mut p = matmul_tn(other[h].as_ref(), w.as_ref());
                for e in 0..p.rows() {
                    p.row_mut(e).iter_mut().zip(m.row(h)).for_each(|(p, m)| *p *= m);
                }
                matmul(own[h].as_ref(), p.as_ref())
            })
            .collect();
        // Add in the order of heads, whatever the number of threads.
        for part in parts {
            out.data_mut().iter_mut().zip(part.data()).for_each(|(o, p)| *o += p);
        }
        out
    }

    fn gram(&mut self, mode: usize) -> Option<Mat<f64>> {
        if mode == 0 {
            let heads = self.q.len();
            return Some(Mat::from_fn(heads, heads, |g, h| {
                let a = matmul_tn(self.q[g].as_ref(), self.q[h].as_ref());
                let b = matmul_tn(self.k[g].as_ref(), self.k[h].as_ref());
                a.data().iter().zip(b.data()).map(|(a, b)| a * b).sum()
            }));
        }
        let (own, other) = if mode == 1 { (&self.q, &self.k) } else { (&self.k, &self.q) };
        let n = own[0].rows();
        let mut out = Mat::zeros(n, n);
        for (a, b) in own.iter().zip(other) {
            let scaled = matmul(a.as_ref(), matmul_tn(b.as_ref(), b.as_ref()).as_ref());
            let part = matmul_nt(scaled.as_ref(), a.as_ref());
            out.data_mut().iter_mut().zip(part.data()).for_each(|(o, p)| *o += p);
        }
        Some(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layer::Linear;
    use crate::layers::testing::{assert_close, forward, random, weights_from};
    use crate::layers::{collaborative, mode_wise};
    use crate::{Options, layer::Weights};
    use attlas_num::tensor::Tensor;
    use attlas_num::tensor::cp::Target;

    const SHAPE: LayerShape = LayerShape { d_model: 14, n_heads: 3, n_kv_heads: 3, d: 4, d_v: 5 };

    fn projections() -> (Dense, Dense) {
        let bias = |name: &str| Some(random(name, 12, 1).into_vec());
        let q = Dense { weight: random("q", 12, 14), bias: bias("bq") };
        (q, Dense { weight: random("k", 12, 14), bias: bias("bk") })
    }

    fn plain() -> Box<dyn crate::layer::Layer> {
        let (q, k) = projections();
        let mut weights: Weights = weights_from([("v", random("v", 15, 14)), ("o", random("o", 14, 15))]);
        weights.insert("q".into(), Box::new(q));
        weights.insert("k".into(), Box::new(k));
        mode_wise::LAYER.layer(&SHAPE, &Options::new().with("modes", "64"), weights).unwrap()
    }

    fn converted(rank: usize) -> (Box<dyn crate::layer::Layer>, f64) {
        let (q, k) = projections();
        let c = convert(&SHAPE, &Params { rank: Some(rank), ..Params::default() }, &q, &k, None).unwrap();
        let weights = weights_from([
            ("q", c.q),
            ("k", c.k),
            ("mix", c.mix),
            ("content", c.content.unwrap()),
            ("v", random("v", 15, 14)),
            ("o", random("o", 14, 15)),
        ]);
        let layer = collaborative::LAYER.layer(&SHAPE, &Options::new().with("rank", rank), weights).unwrap();
        (layer, c.rel_error)
    }

    #[test]
    fn full_rank_is_the_same_layer_with_all_biases() {
        let x = random("x", 20, 14);
        let want = forward(&*plain(), &x, &[20]);
        for rank in [12, 15] {
            let (layer, error) = converted(rank);
            assert_eq!(error, 0.0);
            assert_close(&forward(&*layer, &x, &[20]), &want);
        }
    }

    #[test]
    fn lower_ranks_lose_what_they_say() {
        let (q, k) = projections();
        let norm: f64 = (0..3)
            .map(|h| {
                let cut = |w: &Mat<f32>| w.as_ref().sub_rows(4 * h..4 * h + 4).to_mat();
                matmul_tn(cut(&q.weight).as_ref(), cut(&k.weight).as_ref()).frobenius().powi(2)
            })
            .sum();
        let mut last = 0.0;
        for rank in [11, 8, 5, 2] {
            let c = convert(&SHAPE, &Params { rank: Some(rank), ..Params::default() }, &q, &k, None).unwrap();
            let gap: f64 = (0..3)
                .map(|h| {
                    let cut = |w: &Mat<f32>| w.as_ref().sub_rows(4 * h..4 * h + 4).to_mat();
                    let exact = matmul_tn(cut(&q.weight).as_ref(), cut(&k.weight).as_ref());
                    let mixed = Mat::from_fn(rank, 14, |r, i| c.mix[(h * rank + r, 0)] * c.q[(r, i)]);
                    let model = matmul_tn(mixed.as_ref(), c.k.as_ref());
                    let square = |(a, b): (&f32, &f32)| f64::from(a - b).powi(2);
                    exact.data().iter().zip(model.data()).map(square).sum::<f64>()
                })
                .sum();
            let error = (gap / norm).sqrt();
            assert!((error - c.rel_error).abs() < 1e-5, "rank {rank}: {error} against {}", c.rel_error);
            assert!(error >= last);
            last = error;
            // Never worse than its starting point, the pruned triples.
            let heads = |w: &Mat<f32>| {
                (0..3).map(|h| Mat::from_fn(14, 4, |i, e| f64::from(w[(h * 4 + e, i)]))).collect()
            };
            let start = Products { q: heads(&q.weight), k: heads(&k.weight) }.prune(rank).unwrap();
            let kept: f64 = start.factors[0].data().iter().map(|s| s * s).sum();
            assert!(error <= (1.0 - kept / norm).max(0.0).sqrt() + 1e-6);
        }
    }

    #[test]
    fn without_a_sweep_every_head_keeps_its_largest_triples() {
        let (q, k) = projections();
        for rank in [3, 7, 11] {
            let c =
                convert(&SHAPE, &Params { rank: Some(rank), iters: 0, ..Params::default() }, &q, &k, None)
                    .unwrap();
            assert!(c.history.is_empty());
            let part = |w: &Mat<f32>, head: usize| Mat::from_fn(4, 14, |e, i| w[(head * 4 + e, i)]);
            let products: Vec<Mat<f32>> = (0..3)
                .map(|head| matmul_tn(part(&q.weight, head).as_ref(), part(&k.weight, head).as_ref()))
                .collect();
            let mut sigma: Vec<f64> =
                products.iter().flat_map(|t| svd(t.as_ref()).unwrap().sigma).filter(|s| *s > 1e-5).collect();
            sigma.sort_by(|a, b| b.total_cmp(a));
            let square = |s: &[f64]| s.iter().map(|s| s * s).sum::<f64>();
            let want = (square(&sigma[rank..]) / square(&sigma)).sqrt();
            assert!((c.rel_error - want).abs() < 1e-5, "rank {rank}: {} against {want}", c.rel_error);
            // Each feature belongs to one head, and the layer's output has this error.
            let mut lost = 0.0;
            for (head, exact) in products.iter().enumerate() {
                let mixed = Mat::from_fn(rank, 14, |r, i| c.mix[(head * rank + r, 0)] * c.q[(r, i)]);
                let model = matmul_tn(mixed.as_ref(), c.k.as_ref());
                lost +=
                    exact.data().iter().zip(model.data()).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>();
            }
            assert!(((lost / square(&sigma)).sqrt() - want).abs() < 1e-5);
            let heads = |r: usize| (0..3).filter(|head| c.mix[(head * rank + r, 0)] != 0.0).count();
            assert!((0..rank).all(|r| heads(r) == 1));
        }
        let random = Params { rank: Some(5), iters: 0, init: Init::Random, ..Params::default() };
        assert!(convert(&SHAPE, &random, &q, &k, None).is_err());
    }

    #[test]
    fn every_start_lands_about_as_low_as_the_pruned_one() {
        let (q, k) = projections();
        let error = |init| {
            let params = Params { rank: Some(6), init, iters: 300, ..Params::default() };
            convert(&SHAPE, &params, &q, &k, None).unwrap().rel_error
        };
        let pruned = error(Init::SvdPrune);
        for init in [Init::Hosvd, Init::Random] {
            // Local minima differ by a few per cent; a start that stalls stays near 1.
            assert!(error(init) < 1.2 * pruned, "{init:?}: {} against {pruned}", error(init));
        }
    }

    #[test]
    fn the_structured_products_are_those_of_the_dense_tensor() {
        let (q, k) = projections();
        let heads = |w: &Mat<f32>| -> Vec<Mat<f64>> {
            (0..3).map(|h| Mat::from_fn(14, 4, |i, e| f64::from(w[(h * 4 + e, i)]))).collect()
        };
        let mut target = Products { q: heads(&q.weight), k: heads(&k.weight) };
        let dense: Vec<Mat<f64>> =
            target.q.iter().zip(&target.k).map(|(q, k)| matmul_nt(q.as_ref(), k.as_ref())).collect();
        let t = Tensor::stack(&dense).unwrap();
        assert!((target.norm_squared().sqrt() - t.norm()).abs() < 1e-12);
        let factors = [random("m", 3, 5).cast(), random("a", 14, 5).cast(), random("b", 14, 5).cast()];
        for mode in 0..3 {
            let want = attlas_num::tensor::mttkrp(&t, &factors, mode).unwrap();
            let got = target.mttkrp(&factors, mode);
            assert!(got.data().iter().zip(want.data()).all(|(a, b)| (a - b).abs() < 1e-12));
            let unfolded = t.unfold(mode).unwrap();
            let want = matmul_nt(unfolded.as_ref(), unfolded.as_ref());
            let got = target.gram(mode).unwrap();
            assert!(got.data().iter().zip(want.data()).all(|(a, b)| (a - b).abs() < 1e-12));
        }
    }

    #[test]
    fn a_network_is_rewritten_unless_positions_are_rotated() {
        use super::super::common::tests::{Toy, request};
        let toy = Toy { biased: true, ..Toy::default() };
        let options = Options::new().with("rank", 8).with("temperature", "from_rank");
        let all = run(&request(&toy, &options)).unwrap();
        assert_eq!((all.attention.len(), all.maps.len(), all.rel_error()), (2, 0, 0.0));
        let attention = &all.attention[&1];
        let weights = attention.weights.iter().map(|(name, w)| {
            let dense = match w {
                Weight::Kept(role) => {
                    super::super::common::network::Network::map(&toy, Slot { layer: 1, role: *role }).unwrap()
                }
                Weight::New(dense) => dense.clone(),
            };
            (name.to_string(), Box::new(dense) as Box<dyn Linear>)
        });
        let built =
            collaborative::LAYER.layer(&attention.shape, &attention.options, weights.collect()).unwrap();
        assert_eq!(built.parameters(), all.losses[1].after + 2 * (64 + 8));
        let rope = attlas_num::rope::Rope {
            dim: 2,
            base: 10_000.0,
            layout: attlas_num::rope::Layout::Half,
            scaling: attlas_num::rope::Scaling::None,
        };
        let rotated = Toy { rope: Some(rope), kv_heads: 2, ..Toy::default() };
        let error = run(&request(&rotated, &Options::new())).unwrap_err().to_string();
        assert!(error.contains("rotary positions") && error.contains("keys of its own"), "{error}");
    }

    #[test]
    fn what_has_no_fixed_product_is_refused() {
        let (q, k) = projections();
        let error = convert(&SHAPE, &Params::default(), &q, &k, Some("rotary positions")).unwrap_err();
        assert!(error.to_string().contains("rotary positions between"));
        assert!(convert(&LayerShape { n_kv_heads: 1, ..SHAPE }, &Params::default(), &q, &k, None).is_err());
        assert!(convert(&LayerShape { d: 5, ..SHAPE }, &Params::default(), &q, &k, None).is_err());
        assert_eq!(k.parameters(), 12 * 15);
    }
}
