//! SmolLM2's queries, keys, values and logits against `goldens/model/smollm2.json`: hooks in transformers, in double
//! precision on the dequantised weights.

mod common;

use attlas::Schedule;
use attlas_model::decoder::Observer;
use attlas_model::{Decoder, Model, Recipe, Rows};
use common::{golden, numbers, smollm2};
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Everything that was projected, `[tokens, heads · d]` by layer and part.
#[derive(Default)]
struct Seen(BTreeMap<(usize, &'static str), Vec<f32>>);

impl Observer for Seen {
    fn before_rotation(&mut self, layer: usize, _: usize, q: &[f32], k: &[f32]) {
        self.0.insert((layer, "q_pre"), q.to_vec());
        self.0.insert((layer, "k_pre"), k.to_vec());
    }

    fn projected(&mut self, layer: usize, _: usize, q: &[f32], k: &[f32], v: &[f32]) {
        for (part, data) in [("q", q), ("k", k), ("v", v)] {
            self.0.insert((layer, part), data.to_vec());
        }
    }
}

fn list(value: &Value) -> Vec<usize> {
    serde_json::from_value(value.clone()).unwrap()
}

#[test]
fn projections_and_logits_equal_those_of_transformers() {
    let golden = golden("smollm2.json");
    let model = Arc::new(Model::open(&smollm2()).unwrap());
    let c = &model.config;
    let ids: Vec<u32> = serde_json::from_value(golden["ids"].clone()).unwrap();
    let text = golden["text"].as_str().unwrap();
    assert_eq!(model.tokenizer.encode(text, false).unwrap()[..ids.len()], ids);

    let schedule = Schedule { threads: 2, ..Schedule::default() };
    let mut decoder = Decoder::new(model.clone(), &Recipe::default(), schedule).unwrap();
    let (mut seen, mut hidden) = (Seen::default(), Vec::new());
    decoder.forward_observed(&ids, Rows::All, &mut hidden, &mut seen).unwrap();

    let positions = list(&golden["positions"]);
    let (q_heads, kv_heads) = (list(&golden["q_heads"]), list(&golden["kv_heads"]));
    let d = c.head_dim;
    let mut compared = 0;
    for (layer, parts) in golden["layers"].as_object().unwrap() {
        let layer: usize = layer.parse().unwrap();
        for (part, want) in parts.as_object().unwrap() {
            let (heads, chosen) =
                if part.starts_with('q') { (c.n_heads, &q_heads) } else { (c.n_kv_heads, &kv_heads) };
            let got = &seen.0.iter().find(|((l, p), _)| *l == layer && *p == part).unwrap().1;
            let want = numbers(want);
            let mut rows = want.chunks_exact(d);
            for &head in chosen {
                for &position in &positions {
                    let got = &got[(position * heads + head) * d..][..d];
                    let want = rows.next().unwrap();
                    // The file keeps rotary pairs side by side, transformers half a head apart.
                    let twin = |i: usize| if part == "v" { i } else { i % 2 * (d / 2) + i / 2 };
                    let norm = |x: &mut dyn Iterator<Item = f32>| {
                        x.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt()
                    };
                    let off = norm(&mut (0..d).map(|i| got[i] - want[twin(i)]));
                    let size = norm(&mut want.iter().copied());
                    assert!(
                        off <= 1e-4 * size,
                        "layer {layer} {part} head {head} at {position}: {}",
                        off / size
                    );
                    compared += 1;
                }
            }
            assert!(rows.next().is_none());
        }
    }
    assert_eq!(compared, 3 * 5 * 2 * 3);

    let mut logits = vec![0.0; ids.len() * c.vocab];
    decoder.logits_into(&hidden, &mut logits);
    let (chosen, want) = (list(&golden["logit_ids"]), numbers(&golden["logits"]));
    for (i, &position) in positions.iter().enumerate() {
        let row = &logits[position * c.vocab..][..c.vocab];
        for (j, &id) in chosen.iter().enumerate() {
            let want = want[i * chosen.len() + j];
            // Single against double precision moves logits of this model by up to 1e-4.
            assert!((row[id] - want).abs() < 2e-4, "position {position} id {id}: {} against {want}", row[id]);
        }
        let top = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = row.iter().map(|x| f64::from(x - top).exp()).sum();
        let found = f64::from(top) + sum.ln();
        let want = golden["log_sum_exp"][i].as_f64().unwrap();
        assert!((found - want).abs() < 2e-4, "position {position}: {found} against {want}");
    }
}
