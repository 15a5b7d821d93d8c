//! Products in narrow types: their error, and the formats without them.

mod common;

use attlas::Schedule;
use attlas_model::{Compute, Decoder, Model, Recipe, Rows};
use std::sync::Arc;

fn decoder(model: &Arc<Model>, compute: Compute) -> Decoder {
    let schedule = Schedule { threads: 2, ..Schedule::default() };
    let mut decoder = Decoder::new(model.clone(), &Recipe::default(), schedule).unwrap();
    decoder.compute_in(compute);
    decoder
}

/// Returns the logits of every position, fed in chunks.
fn logits(decoder: &mut Decoder, tokens: &[u32], chunk: usize) -> Vec<f32> {
    let (mut all, mut hidden) = (Vec::new(), Vec::new());
    for part in tokens.chunks(chunk) {
        decoder.forward(part, Rows::All, &mut hidden).unwrap();
        let mut out = vec![f32::NAN; part.len() * decoder.model().config.vocab];
        decoder.logits_into(&hidden, &mut out);
        all.extend(out);
    }
    all
}

/// Returns the norm of the difference over the norm of the reference.
fn relative(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let squares = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    let gap = squares(&mut a.iter().zip(b).map(|(a, b)| f64::from(a - b)));
    gap / squares(&mut b.iter().map(|b| f64::from(*b)))
}

#[test]
fn narrow_products_move_logits_by_their_rounding() {
    let model = Arc::new(Model::open(&common::smollm2()).unwrap());
    let text = common::alice();
    let tokens = &model.tokenizer.encode(&text[..4000], false).unwrap()[..60];
    let exact = logits(&mut decoder(&model, Compute::F32), tokens, 60);
    // A layer adds twice to the residual stream, each time by two products in a row, so a logit sees `4 · n_layers` roundings
    // of independent sign. Of a product, eight bits with the scale of a block (about 2.1 standard deviations over 127, uniform)
    // move 0.48 % of its norm, and bfloat16 in both operands less.
    let most = 0.0048 * (4.0 * model.config.n_layers as f64).sqrt();
    for compute in [Compute::Int8, Compute::Bf16] {
        let mut narrow = decoder(&model, compute);
        assert_eq!((narrow.compute(), narrow.in_single().len()), (compute, 0));
        let whole = logits(&mut narrow, tokens, 60);
        let cost = relative(&whole, &exact);
        assert!(cost > 0.0 && cost < most, "{compute}: {cost}");
        // One token, a few and many use three kernels that add in different orders. A sum near the middle of two
        // integers may round differently, and thirty layers amplify that to the size of the rounding itself: the three
        // results are no closer to each other than to exact products, and equally far from those.
        for chunk in [1, 7] {
            let other = logits(&mut decoder(&model, compute), tokens, chunk);
            let far = relative(&other, &exact);
            assert!(far > 0.7 * cost && far < 1.4 * cost, "{compute} by {chunk}: {far} beside {cost}");
            let apart = relative(&other, &whole);
            assert!(apart < 1.5 * cost, "{compute} by {chunk}: {apart} beside {cost}");
        }
    }
}

#[test]
fn weights_without_whole_numbers_stay_in_single_precision_and_are_named() {
    let folder = common::repository().join("goldens/model/families/granite");
    let model = Arc::new(Model::open(&folder).unwrap());
    let tokens: Vec<u32> = (0..30).map(|i| (i * i + i / 3) % 32).collect();
    let exact = logits(&mut decoder(&model, Compute::F32), &tokens, 30);
    let mut narrow = decoder(&model, Compute::Int8);
    assert_eq!(logits(&mut narrow, &tokens, 30), exact);
    let maps = 7 * model.config.n_layers + 1;
    assert_eq!(narrow.in_single().into_iter().collect::<Vec<_>>(), [("F32", maps)]);
    assert!(decoder(&model, Compute::F32).in_single().is_empty());
    let mut rounded = decoder(&model, Compute::Bf16);
    assert!(rounded.in_single().is_empty());
    let cost = relative(&logits(&mut rounded, &tokens, 30), &exact);
    assert!(cost > 0.0 && cost < 0.03, "{cost}");
}

#[test]
fn latent_attention_stays_in_single_precision_and_is_named() {
    let folder = common::repository().join("goldens/model/families/deepseek_v2");
    let model = Arc::new(Model::open(&folder).unwrap());
    let named = decoder(&model, Compute::Bf16).in_single();
    assert!(named["F32"] >= 4 * model.config.n_layers, "{named:?}");
}
