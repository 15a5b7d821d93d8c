//! all-MiniLM-L6-v2 against `goldens/model/minilm.json`, which transformers computed in double precision.

mod common;

use attlas::{Options, Problem, Qkv, Workspace, registry};
use attlas_model::bert::{Batch, mean_pool};
use attlas_model::{Encoder, Error, Model};
use common::{golden, minilm, numbers, smollm2};

fn workspace() -> Workspace {
    Workspace::new(attlas::Schedule { threads: 2, ..Default::default() }).unwrap()
}

/// One minus the cosine of two vectors.
fn distance(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum::<f64>();
    1.0 - dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

/// Returns ids and reference embeddings of the golden texts, and checks that the tokeniser gives these ids.
fn texts(model: &Model) -> Vec<(Vec<u32>, Vec<f32>)> {
    let golden = golden("minilm.json");
    let texts = golden["texts"].as_array().unwrap().iter();
    texts
        .map(|entry| {
            let ids: Vec<u32> = serde_json::from_value(entry["ids"].clone()).unwrap();
            assert_eq!(model.tokenizer.encode(entry["text"].as_str().unwrap(), true).unwrap(), ids);
            (ids, numbers(&entry["embedding"]))
        })
        .collect()
}

#[test]
fn sentence_embeddings_equal_those_of_transformers() {
    let model = Model::open(&minilm()).unwrap();
    let encoder = Encoder::new(&model).unwrap();
    let texts = texts(&model);
    let ids: Vec<&[u32]> = texts.iter().map(|(ids, _)| &ids[..]).collect();
    let exact = registry::method("exact").unwrap();
    let mut ws = workspace();
    let batch = Batch::new(&ids).unwrap();
    let together = encoder.embed(&batch, exact, &Options::new(), &mut ws).unwrap();
    for ((ids, want), got) in texts.iter().zip(&together) {
        let off = distance(got, want);
        assert!(off < 1e-6, "cosine distance {off} for {} tokens", ids.len());
        let worst = got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst < 2e-5, "{worst}");
        // Padding must change nothing.
        let alone = encoder.embed(&Batch::new(&[ids]).unwrap(), exact, &Options::new(), &mut ws).unwrap();
        let moved = alone[0].iter().zip(got).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(moved < 1e-5, "{moved}");
    }
    let similarity = 1.0 - distance(&together[0], &together[1]);
    assert!((similarity - 0.404559).abs() < 1e-5, "{similarity}");
}

#[test]
fn queries_keys_and_values_equal_those_of_transformers() {
    let model = Model::open(&minilm()).unwrap();
    let encoder = Encoder::new(&model).unwrap();
    let golden = golden("minilm.json");
    let heads: Vec<usize> = serde_json::from_value(golden["heads"].clone()).unwrap();
    let batch = Batch::new(&[&texts(&model)[0].0]).unwrap();
    let plans = encoder.plans(&batch, registry::method("exact").unwrap(), &Options::new()).unwrap();
    let mut checked = 0;
    let look = |layer: usize, x: &Qkv<'_, f32>| {
        let stored = &golden["layers"][layer.to_string()];
        for (part, tensor) in [("q", x.q), ("k", x.k), ("v", x.v)] {
            if stored.is_null() {
                return;
            }
            let want = numbers(&stored[part]);
            let size = want.iter().map(|w| w.abs()).fold(0.0, f32::max);
            for (want, &head) in want.chunks_exact(want.len() / heads.len()).zip(&heads) {
                let got = tensor.head(0, head);
                for (i, row) in want.chunks_exact(got.cols()).enumerate() {
                    for (g, w) in got.row(i).iter().zip(row) {
                        assert!(
                            (g - w).abs() < 1e-5 * size,
                            "layer {layer} {part} head {head} row {i}: {g} {w}"
                        );
                        checked += 1;
                    }
                }
            }
        }
    };
    encoder.forward(&batch, &plans, &mut workspace(), look).unwrap();
    assert_eq!(checked, 2 * 3 * 2 * 7 * 32);
}

#[test]
fn every_method_without_a_mask_gives_embeddings_or_reasons() {
    let model = Model::open(&minilm()).unwrap();
    let encoder = Encoder::new(&model).unwrap();
    let texts = texts(&model);
    let batch = Batch::new(&[&texts[0].0, &texts[4].0]).unwrap();
    let mut ws = workspace();
    let exact = encoder.embed(&batch, registry::method("exact").unwrap(), &Options::new(), &mut ws).unwrap();
    let mut embedded = 0;
    for method in registry::METHODS {
        match encoder.embed(&batch, method, &Options::new(), &mut ws) {
            Ok(got) => {
                embedded += 1;
                for (got, exact) in got.iter().zip(&exact) {
                    assert!(got.iter().all(|x| x.is_finite()), "{}", method.id);
                    if method.claims.exact_at.is_empty() {
                        continue;
                    }
                    // Short texts: most budgets cover all keys, and the others stay close.
                    assert!(distance(got, exact) < 0.5, "{}: {}", method.id, distance(got, exact));
                }
            }
            Err(Error::Attention(attlas::Error::Unsupported { reasons, .. })) => assert!(!reasons.is_empty()),
            Err(other) => panic!("{}: {other}", method.id),
        }
    }
    assert!(embedded > registry::METHODS.len() / 2, "{embedded}");
}

#[test]
fn layers_may_differ_in_their_method() {
    let model = Model::open(&minilm()).unwrap();
    let encoder = Encoder::new(&model).unwrap();
    let batch = Batch::new(&[&texts(&model)[5].0]).unwrap();
    let (exact, window) = (registry::method("exact").unwrap(), registry::method("sink_window").unwrap());
    let mut ws = workspace();
    let plans = encoder.plans(&batch, exact, &Options::new()).unwrap();
    let reference = encoder.forward(&batch, &plans, &mut ws, |_, _| ()).unwrap();
    let reference = mean_pool(&reference.states, &batch, encoder.width());
    let mut off = Vec::new();
    for swapped in [0, 1, 6] {
        let mut plans = encoder.plans(&batch, exact, &Options::new()).unwrap();
        for plan in plans.iter_mut().take(swapped) {
            let options = Options::new().with("sinks", 1usize).with("window", 16usize);
            *plan = window.plan(&encoder.problem(&batch), &options).unwrap();
        }
        let hidden = encoder.forward(&batch, &plans, &mut ws, |_, _| ()).unwrap();
        off.push(distance(&mean_pool(&hidden.states, &batch, encoder.width())[0], &reference[0]));
    }
    assert!(off[0] < 1e-6 && off[1] > 1e-5 && off[2] > off[1], "{off:?}");
}

#[test]
fn what_does_not_fit_is_refused() {
    let model = Model::open(&minilm()).unwrap();
    let encoder = Encoder::new(&model).unwrap();
    let exact = registry::method("exact").unwrap();
    let mut ws = workspace();
    let long = Batch::new(&[vec![7; 513]]).unwrap();
    let error = encoder.embed(&long, exact, &Options::new(), &mut ws).unwrap_err();
    assert!(matches!(error, Error::ContextTooShort { tokens: 513, context: 512 }));
    let unknown = Batch::new(&[[30_522]]).unwrap();
    assert!(matches!(encoder.embed(&unknown, exact, &Options::new(), &mut ws), Err(Error::Invalid { .. })));
    let batch = Batch::new(&[[101, 102]]).unwrap();
    let mut plans = encoder.plans(&batch, exact, &Options::new()).unwrap();
    plans[2] = exact.plan(&Problem::new(12, 2, 32).causal(), &Options::new()).unwrap();
    assert!(matches!(encoder.forward(&batch, &plans, &mut ws, |_, _| ()), Err(Error::Invalid { .. })));
    assert!(encoder.forward(&batch, &plans[..5], &mut ws, |_, _| ()).is_err());
    let decoder = Model::open(&smollm2()).unwrap();
    assert!(matches!(Encoder::new(&decoder), Err(Error::Unsupported { .. })));
}
