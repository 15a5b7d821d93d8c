//! Tests of the stages against the original layer, on small random layers.

use super::*;
use crate::layer::{Layer, Linear};
use crate::layers::grouped_query::GroupedQuery;
use crate::layers::latent;
use crate::layers::testing::{assert_close, forward, random};
use crate::{Options, registry};
use attlas_num::linalg::matmul;

/// Two query heads per key head.
const SHAPE: LayerShape = LayerShape { d_model: 30, n_heads: 6, n_kv_heads: 3, d: 8, d_v: 5 };

fn rope(layout: Layout) -> Rope {
    Rope { dim: 8, base: 1e4, layout, scaling: Scaling::None }
}

/// A grouped-query layer and hidden states to calibrate it on.
struct Model {
    shape: LayerShape,
    maps: [Dense; 4],
    rope: Option<Rope>,
}

impl Model {
    fn new(shape: LayerShape, rope: Option<Rope>, biased: bool) -> Self {
        let s = &shape;
        let sizes = [
            ("q", s.n_heads * s.d, s.d_model),
            ("k", s.n_kv_heads * s.d, s.d_model),
            ("v", s.n_kv_heads * s.d_v, s.d_model),
            ("o", s.d_model, s.n_heads * s.d_v),
        ];
        let maps = sizes.map(|(name, n_out, n_in)| Dense {
            weight: random(name, n_out, n_in),
            bias: biased.then(|| random(&format!("{name} bias"), n_out, 1).into_vec()),
        });
        Self { shape, maps, rope }
    }

    fn source(&self) -> Source<'_> {
        let [q, k, v, o] = &self.maps;
        Source { shape: self.shape, q, k, v, o, rope: self.rope.as_ref() }
    }

    fn layer(&self) -> GroupedQuery {
        let boxed = |(name, map): (&str, &Dense)| {
            (name.to_string(), Box::new(map.clone()) as Box<dyn crate::layer::Linear>)
        };
        let weights = ["q", "k", "v", "o"].into_iter().zip(&self.maps).map(boxed).collect();
        let exact = registry::method("exact").unwrap();
        GroupedQuery::new(self.shape, weights, self.rope.clone(), exact, Options::new()).unwrap()
    }

    /// Hidden states in few directions, so that a low rank pays off.
    fn hidden(&self, name: &str, n: usize) -> Mat<f32> {
        let (few, noise) = (random(name, n, 6), random(&format!("{name} noise"), n, self.shape.d_model));
        let mut x = matmul(few.as_ref(), random("directions", 6, self.shape.d_model).as_ref());
        x.data_mut().iter_mut().zip(noise.data()).for_each(|(x, n)| *x = 3.0 * *x + 0.3 * n);
        x
    }

    fn project(&self, x: &Mat<f32>) -> [Vec<f32>; 3] {
        let ws = crate::Workspace::single().unwrap();
        [0, 1, 2].map(|i| {
            let mut out = vec![0.0; x.rows() * self.maps[i].n_out()];
            self.maps[i].apply(x.as_ref(), &mut out, ws.context());
            out
        })
    }

    fn calibration(&self, x: &Mat<f32>) -> Calibration {
        let mut calibration = Calibration::new(self.shape, true);
        let [q, k, v] = self.project(x);
        // In two parts, as a model provides them.
        let s = &self.shape;
        let at = x.rows() / 3;
        let (wq, wk, wv) = (at * s.n_heads * s.d, at * s.n_kv_heads * s.d, at * s.n_kv_heads * s.d_v);
        calibration.add(&q[..wq], &k[..wk], &v[..wv]).unwrap();
        calibration.add(&q[wq..], &k[wk..], &v[wv..]).unwrap();
        assert_eq!(calibration.tokens(), x.rows());
        calibration
    }

    fn convert(&self, params: &Params, stage: Stage) -> Converted {
        let x = self.hidden("calibration", 200);
        convert(&self.source(), params, stage, &self.calibration(&x), None).unwrap()
    }
}

fn both_layouts() -> [Model; 2] {
    [Layout::Half, Layout::Interleaved].map(|l| Model::new(SHAPE, Some(rope(l)), l == Layout::Half))
}

/// Largest difference of the outputs on text outside the calibration, as a share of the largest output.
fn distance(model: &Model, converted: &Converted) -> f32 {
    let x = model.hidden("text", 40);
    let want = forward(&model.layer(), &x, &[40]);
    let got = forward(&converted.layer().unwrap(), &x, &[40]);
    let size = want.iter().fold(0f32, |m, w| m.max(w.abs()));
    got.iter().zip(&want).fold(0f32, |m, (g, w)| m.max((g - w).abs())) / size
}

fn assert_same(model: &Model, converted: &Converted) {
    let x = model.hidden("text", 40);
    let want = forward(&model.layer(), &x, &[40]);
    let layer = converted.layer().unwrap();
    assert_close(&forward(&layer, &x, &[40]), &want);
    assert_close(&forward(&layer, &x, &[1; 40]), &want);
}

#[test]
fn without_rotations_the_merge_is_exact_and_the_cache_is_the_same() {
    for (shape, biased) in [
        (SHAPE, true),
        (LayerShape { n_kv_heads: 6, ..SHAPE }, false),
        (LayerShape { n_kv_heads: 1, ..SHAPE }, true),
    ] {
        let model = Model::new(shape, None, biased);
        for stage in [Stage::Merged, Stage::Rotated, Stage::PartialRope, Stage::Balanced] {
            let converted = model.convert(&Params::default(), stage);
            assert_same(&model, &converted);
            assert_eq!(converted.layer().unwrap().cache_elements(), model.layer().cache_elements());
        }
        let low = model.convert(&Params { rank: Some(6), ..Params::default() }, Stage::LowRank);
        assert_eq!(low.layer().unwrap().cache_elements(), 6);
        assert!(low.figures.rel_error > 0.0);
    }
}

#[test]
fn the_merge_and_the_rotation_alone_are_exact() {
    for model in both_layouts() {
        assert_same(&model, &model.convert(&Params::default(), Stage::Merged));
        for rotate in [Rotate::None, Rotate::Real, Rotate::Complex] {
            let params = Params { rotate, fold: Some(1), ..Params::default() };
            let converted = model.convert(&params, Stage::Rotated);
            assert_same(&model, &converted);
            // Nothing is saved yet.
            assert_eq!(converted.layer().unwrap().cache_elements(), model.layer().cache_elements());
            // A fold mixes different frequencies: the price of the energy it concentrates.
            let folded = model.convert(&Params { fold: Some(2), ..params }, Stage::Rotated);
            assert_eq!(distance(&model, &folded) > 1e-4, rotate != Rotate::None);
        }
    }
}

#[test]
fn full_rank_is_the_partially_rotated_layer_whatever_the_balance() {
    for model in both_layouts() {
        for (rope_dim, fold) in [(8, 1), (8, 2), (4, 2), (2, 4)] {
            for rotate in [Rotate::Real, Rotate::Complex] {
                let params =
                    Params { rope_dim: Some(rope_dim), fold: Some(fold), rotate, ..Params::default() };
                let partial = model.convert(&params, Stage::PartialRope);
                let x = model.hidden("text", 40);
                let want = forward(&partial.layer().unwrap(), &x, &[40]);
                for pca in [Metric::Functional, Metric::Activation, Metric::Weight] {
                    for balance in [0.0, 0.5, 1.0] {
                        let params = Params { pca, balance, ..params.clone() };
                        let full = model.convert(&params, Stage::Balanced);
                        assert_close(&forward(&full.layer().unwrap(), &x, &[40]), &want);
                        assert!(full.figures.rel_error == 0.0);
                        assert!((balance == 0.0) == (full.figures.alpha == 1.0));
                        assert_eq!(full.params.rank, 3 * 13 - rope_dim);
                    }
                }
                // The whole loss comes from the dropped rotations.
                assert!(distance(&model, &partial) > 1e-4);
            }
        }
    }
}

#[test]
fn converted_layers_absorb_and_decode_like_their_expanded_form() {
    let model = &both_layouts()[0];
    let params = Params { rank: Some(12), rank_q: Some(20), rope_dim: Some(4), ..Params::default() };
    for stage in Stage::ALL {
        let mut converted = model.convert(&params, stage);
        let x = model.hidden("text", 40);
        converted.params.form = latent::Form::Expanded;
        let want = forward(&converted.layer().unwrap(), &x, &[40]);
        converted.params.form = latent::Form::Absorbed;
        assert_close(&forward(&converted.layer().unwrap(), &x, &[40]), &want);
        assert_close(&forward(&converted.layer().unwrap(), &x, &[17, 1, 1, 1, 20]), &want);
    }
}

#[test]
fn one_key_head_loses_nothing_by_the_rotation() {
    let model = Model::new(LayerShape { n_kv_heads: 1, ..SHAPE }, Some(rope(Layout::Half)), true);
    for rotate in [Rotate::Real, Rotate::Complex] {
        let params = Params { rotate, fold: Some(1), ..Params::default() };
        for stage in [Stage::PartialRope, Stage::Balanced] {
            let converted = model.convert(&params, stage);
            assert!((converted.figures.kept_energy - 1.0).abs() < 1e-12);
            assert_same(&model, &converted);
        }
    }
}

#[test]
fn multi_head_layers_convert() {
    let model = Model::new(LayerShape { n_kv_heads: 6, ..SHAPE }, Some(rope(Layout::Interleaved)), false);
    let params = Params { fold: Some(1), ..Params::default() };
    assert_same(&model, &model.convert(&params, Stage::Rotated));
    let low = model.convert(&Params { rank: Some(20), ..params }, Stage::LowRank);
    assert_eq!(low.layer().unwrap().cache_elements(), 28);
    assert!(distance(&model, &low).is_finite());
}

#[test]
fn errors_grow_as_the_rank_falls_and_are_those_of_the_activations() {
    let model = &both_layouts()[0];
    let x = model.hidden("calibration", 200);
    let [_, k, v] = model.project(&x);
    let mut last = -1.0;
    for rank in [31, 20, 10, 5, 1] {
        let params = Params { rank: Some(rank), pca: Metric::Activation, fold: Some(1), ..Params::default() };
        let c = model.convert(&params, Stage::LowRank);
        assert!(c.figures.rel_error > last, "rank {rank}");
        last = c.figures.rel_error;
        // Rebuilt keys and values of every group against their own, keys divided by alpha; rotated features are exact.
        let rotation = Rotation::new(
            Widths { groups: 3, d: 8, fold: 1, collapse: 1 },
            Rotate::Complex,
            Layout::Half,
            &model.calibration(&x).kv,
        )
        .unwrap();
        let mut latents = vec![0.0; 200 * (rank + 8)];
        c.kv_a.apply(x.as_ref(), &mut latents, crate::Workspace::single().unwrap().context());
        let (mut gap, mut norm) = (0.0, 0.0);
        for t in 0..200 {
            let row = &latents[t * (rank + 8)..][..rank];
            let rebuilt = |i: usize| (0..rank).map(|j| f64::from(c.kv_b[(i, j)] * row[j])).sum::<f64>();
            let mut add = |got: f64, want: f64, weight: f64| {
                gap += ((got - want) / weight).powi(2);
                norm += (want / weight).powi(2);
            };
            for g in 0..3 {
                // Query head 2g is the first of its group; its key without the rotated part.
                for e in 0..8 {
                    let unrotated: f64 = (8..24)
                        .map(|col| {
                            let along: f64 =
                                (0..24).map(|i| rotation.basis[(i, col)] * f64::from(k[t * 24 + i])).sum();
                            rotation.basis[(g * 8 + e, col)] * along
                        })
                        .sum();
                    add(rebuilt(2 * g * 13 + e), unrotated, c.figures.alpha);
                }
                for e in 0..5 {
                    add(rebuilt(2 * g * 13 + 8 + e), f64::from(v[t * 15 + g * 5 + e]), 1.0);
                }
            }
        }
        let error = (gap / norm).sqrt();
        assert!((error - c.figures.rel_error).abs() < 1e-4, "{error} against {}", c.figures.rel_error);
    }
}

#[test]
fn the_functional_metric_makes_smaller_errors_in_scores_and_outputs() {
    // The objective: squared errors of scores over all pairs plus those of projected values, with the same weights.
    let model = Model::new(SHAPE, None, false);
    let x = model.hidden("calibration", 200);
    let calibration = model.calibration(&x);
    let [q, k, v] = model.project(&x);
    let errors = |pca: Metric| {
        let params = Params { rank: Some(10), pca, balance: 0.0, ..Params::default() };
        let c = convert(&model.source(), &params, Stage::LowRank, &calibration, None).unwrap();
        let mut latents = vec![0.0; 200 * 10];
        c.kv_a.apply(x.as_ref(), &mut latents, crate::Workspace::single().unwrap().context());
        let (mut scores, mut outputs) = (0.0, 0.0);
        for m in 0..200 {
            for h in 0..6 {
                let rebuilt = |i: usize| {
                    (0..10).map(|j| f64::from(c.kv_b[(h * 13 + i, j)] * latents[m * 10 + j])).sum::<f64>()
                };
                let key: Vec<f64> =
                    (0..8).map(|e| rebuilt(e) - f64::from(k[m * 24 + h / 2 * 8 + e])).collect();
                for n in 0..200 {
                    let dot: f64 = (0..8).map(|e| key[e] * f64::from(q[n * 48 + h * 8 + e])).sum();
                    scores += dot * dot;
                }
                let value: Vec<f64> =
                    (0..5).map(|e| rebuilt(8 + e) - f64::from(v[m * 15 + h / 2 * 5 + e])).collect();
                for i in 0..30 {
                    let o: f64 =
                        (0..5).map(|e| value[e] * f64::from(model.maps[3].weight[(i, h * 5 + e)])).sum();
                    outputs += o * o;
                }
            }
        }
        scores + outputs
    };
    assert!(errors(Metric::Functional) < errors(Metric::Activation));
}

#[test]
fn without_the_factor_of_the_scale_outputs_are_wrong() {
    let model = &both_layouts()[0];
    let params = Params { fold: Some(1), ..Params::default() };
    let mut converted = model.convert(&params, Stage::Rotated);
    let gamma = 3f32.sqrt();
    converted.q.weight.data_mut().iter_mut().for_each(|w| *w /= gamma);
    converted.q.bias.iter_mut().flatten().for_each(|b| *b /= gamma);
    assert!(distance(model, &converted) > 1e-2);
}

#[test]
fn a_latent_of_queries_is_exact_at_full_rank_and_loses_what_it_says() {
    for biased in [false, true] {
        let model = Model::new(SHAPE, Some(rope(Layout::Half)), biased);
        let of = |rank_q| {
            let params = Params { rank_q: Some(rank_q), ..Params::default() };
            model.convert(&params, Stage::LowRankQueries)
        };
        let x = model.hidden("text", 40);
        let want = forward(&model.convert(&Params::default(), Stage::LowRank).layer().unwrap(), &x, &[40]);
        // 30 inputs: the queries have no larger rank, except for a bias, which is not in the latent.
        assert_close(&forward(&of(30).layer().unwrap(), &x, &[40]), &want);
        let (some, fewer) = (of(20).figures.query_error, of(10).figures.query_error);
        assert!(fewer > some && some > 0.0);
    }
}

#[test]
fn neutral_norms_change_nothing() {
    for model in both_layouts() {
        let params = Params { rank: Some(14), rank_q: Some(20), ..Params::default() };
        for stage in [Stage::PartialRope, Stage::LowRank, Stage::LowRankQueries] {
            let plain = model.convert(&params, stage);
            let normed = plain.clone().with_neutral_norms();
            // No map after a latent has a bias left.
            assert!(normed.q_a.is_none() || normed.q.bias.is_none());
            assert_eq!(normed.params.rank, plain.params.rank + 1);
            let x = model.hidden("text", 40);
            let want = forward(&plain.layer().unwrap(), &x, &[40]);
            let got = forward(&normed.layer().unwrap(), &x, &[20, 20]);
            assert_close(&got, &want);
            assert_eq!(normed.clone().with_neutral_norms().params.rank, normed.params.rank);
        }
    }
}

#[test]
fn context_extensions_keep_their_frequencies_or_are_refused() {
    let llama3 = Scaling::Llama3 { factor: 8.0, low_freq: 1.0, high_freq: 4.0, original: 64.0 };
    let divisors = Scaling::Divisors(vec![1.0, 1.5, 2.0, 8.0]);
    for scaling in [Scaling::None, Scaling::Linear { factor: 2.0 }, llama3, divisors] {
        let rope = Rope { scaling, ..rope(Layout::Half) };
        for collapse in [1, 2, 4] {
            let narrow = narrow_rope(&rope, collapse).unwrap();
            let want: Vec<f64> = rope.frequencies(1).into_iter().step_by(collapse).collect();
            for (a, b) in narrow.frequencies(1).iter().zip(&want) {
                assert!((a / b - 1.0).abs() < 1e-14);
            }
            assert_eq!(narrow.frequencies(1).len(), want.len());
        }
        let model = Model::new(SHAPE, Some(rope), true);
        assert_same(&model, &model.convert(&Params { fold: Some(1), ..Params::default() }, Stage::Rotated));
    }
    let yarn = Scaling::Yarn(attlas_num::rope::Yarn::new(4.0, 64.0));
    assert!(narrow_rope(&Rope { scaling: yarn, ..rope(Layout::Half) }, 1).is_err());
}

#[test]
fn calibrating_again_changes_the_low_rank_alone() {
    let model = &both_layouts()[0];
    let first = model.calibration(&model.hidden("calibration", 200));
    let second = model.calibration(&model.hidden("other", 200));
    let params = Params { rank: Some(10), ..Params::default() };
    let of = |again| convert(&model.source(), &params, Stage::LowRank, &first, again).unwrap();
    let (once, twice) = (of(None), of(Some(&second)));
    assert_eq!(once.figures.kept_energy, twice.figures.kept_energy);
    assert!(once.figures.alpha != twice.figures.alpha);
    assert_eq!(of(Some(&first)).kv_a.weight, once.kv_a.weight);
}

#[test]
fn resolved_parameters_are_those_that_are_used() {
    let model = &both_layouts()[0];
    let open = Params { rank_q: Some(20), ..Params::default() };
    let resolved = open.resolved(&SHAPE, model.rope.as_ref()).unwrap();
    // Three quarters of 39 cached numbers, less the rotated ones and the constant of normalised latents.
    assert_eq!((resolved.rope_dim, resolved.fold, resolved.rank), (Some(8), Some(2), Some(20)));
    let [a, b] = [&open, &resolved].map(|p| model.convert(p, Stage::LowRankQueries));
    assert_eq!((a.kv_a.weight, a.params), (b.kv_a.weight, b.params));
    let unrotated = open.resolved(&SHAPE, None).unwrap();
    assert_eq!((unrotated.rope_dim, unrotated.rank), (None, Some(28)));
}

#[test]
fn what_cannot_be_converted_is_refused_with_its_name() {
    let model = &both_layouts()[0];
    let x = model.hidden("calibration", 200);
    let calibration = model.calibration(&x);
    let refused = |params: Params, word: &str| {
        let error = convert(&model.source(), &params, Stage::LowRankQueries, &calibration, None).unwrap_err();
        assert!(error.to_string().contains(word), "{error}");
        let early = params.resolved(&SHAPE, model.rope.as_ref()).unwrap_err();
        assert_eq!(early.to_string(), error.to_string());
    };
    let d = Params::default;
    refused(Params { rope_dim: Some(6), ..d() }, "rope_dim");
    refused(Params { rope_dim: Some(16), ..d() }, "rope_dim");
    refused(Params { fold: Some(3), ..d() }, "fold");
    refused(Params { rope_dim: Some(2), fold: Some(2), ..d() }, "fold");
    refused(Params { rank: Some(32), ..d() }, "31");
    refused(Params { rank_q: Some(31), ..d() }, "rank_q");
    let short = model.calibration(&model.hidden("calibration", 30));
    let error = convert(&model.source(), &d(), Stage::LowRank, &short, None).unwrap_err();
    assert!(error.to_string().contains("too few"), "{error}");
    let plain = Calibration { q: None, ..calibration.clone() };
    let params = Params { rank_q: Some(3), ..d() };
    assert!(convert(&model.source(), &params, Stage::LowRankQueries, &plain, None).is_err());
    let partial = Rope { dim: 4, ..rope(Layout::Half) };
    let source = Source { rope: Some(&partial), ..model.source() };
    assert!(convert(&source, &d(), Stage::LowRank, &calibration, None).is_err());
    let source = Source { k: &model.maps[0], ..model.source() };
    assert!(convert(&source, &d(), Stage::LowRank, &calibration, None).is_err());
    assert!(Calibration::new(SHAPE, false).add(&[0.0; 48], &[0.0; 24], &[0.0; 14]).is_err());
}
