//! Checkpoints with latent attention against transformers: `goldens/model/make_latent_goldens.py`.

use attlas::Schedule;
use attlas_model::config::LatentConfig;
use attlas_model::{Architecture, Decoder, Model, ModelConfig, Recipe, Rows};
use std::path::{Path, PathBuf};
use std::sync::Arc;

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../goldens/model/latent").join(name)
}

struct Golden {
    model: Arc<Model>,
    tokens: Vec<u32>,
    /// One after another, for every position.
    logits: Vec<f32>,
}

fn golden(name: &str) -> Golden {
    let json: serde_json::Value =
        serde_json::from_slice(&std::fs::read(folder(name).join("logits.json")).unwrap()).unwrap();
    let tokens = json["tokens"].as_array().unwrap().iter().map(|t| t.as_u64().unwrap() as u32).collect();
    let text: String = json["logits"].as_array().unwrap().iter().map(|r| r.as_str().unwrap()).collect();
    let number = |hex: &str| f32::from_bits(u32::from_str_radix(hex, 16).unwrap().swap_bytes());
    let logits = (0..text.len() / 8).map(|i| number(&text[8 * i..8 * i + 8])).collect();
    Golden { model: Arc::new(Model::open(&folder(name)).unwrap()), tokens, logits }
}

fn decoder(g: &Golden) -> Decoder {
    Decoder::new(g.model.clone(), &Recipe::default(), Schedule { threads: 2, ..Schedule::default() }).unwrap()
}

/// The logits of every position, fed in chunks.
fn logits(decoder: &mut Decoder, tokens: &[u32], chunks: &[usize]) -> Vec<f32> {
    let (mut all, mut hidden, mut start) = (Vec::new(), Vec::new(), 0);
    for &n in chunks {
        decoder.forward(&tokens[start..start + n], Rows::All, &mut hidden).unwrap();
        let mut out = vec![f32::NAN; n * decoder.model().config.vocab];
        decoder.logits_into(&hidden, &mut out);
        all.extend(out);
        start += n;
    }
    all
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(x, y)| (x - y).abs()).fold(0.0, f32::max)
}

#[test]
fn logits_are_those_of_transformers_in_prompts_and_decoding() {
    for name in ["v2", "v3"] {
        let g = golden(name);
        for chunks in [&[24usize][..], &[1; 24], &[10, 1, 1, 12]] {
            let mut decoder = decoder(&g);
            let gap = largest_difference(&logits(&mut decoder, &g.tokens, chunks), &g.logits);
            assert!(gap < 1e-4, "{name} {chunks:?}: {gap}");
            // Ten numbers of latent and four of the shared key, two layers.
            assert_eq!(decoder.cache_bytes(), 24 * 2 * 14 * 4);
        }
    }
}

#[test]
fn tokens_can_be_taken_back() {
    let g = golden("v3");
    let mut decoder = decoder(&g);
    logits(&mut decoder, &g.tokens, &[24]);
    decoder.truncate(20);
    let again = logits(&mut decoder, &g.tokens[20..], &[4]);
    assert!(largest_difference(&again, &g.logits[20 * 40..]) < 1e-4);
    decoder.reset();
    assert_eq!((decoder.len(), decoder.cache_bytes()), (0, 0));
}

#[test]
fn prompts_whose_states_are_not_wanted_are_remembered() {
    let g = golden("v2");
    let mut decoder = decoder(&g);
    decoder.forward(&g.tokens[..23], Rows::None, &mut Vec::new()).unwrap();
    let last = logits(&mut decoder, &g.tokens[23..], &[1]);
    assert!(largest_difference(&last, &g.logits[23 * 40..]) < 1e-4);
}

#[test]
fn sizes_are_read_and_what_is_not_run_is_refused() {
    let text = std::fs::read_to_string(folder("v3").join("config.json")).unwrap();
    let config = ModelConfig::from_json(text.as_bytes()).unwrap();
    assert_eq!(config.architecture, Architecture::DeepseekV3);
    assert_eq!(config.latent, Some(LatentConfig { rank: 10, rank_q: Some(12), nope: 8, v_dim: 6 }));
    assert_eq!((config.head_dim, config.rope.as_ref().unwrap().dim), (12, 4));
    let refused = |from: &str, to: &str, word: &str| {
        assert!(text.contains(from));
        let error = ModelConfig::from_json(text.replace(from, to).as_bytes()).unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    };
    assert!(config.experts.is_none(), "no layer has any");
    let sparse = text.replace("\"first_k_dense_replace\": 2", "\"first_k_dense_replace\": 1");
    let experts = ModelConfig::from_json(sparse.as_bytes()).unwrap().experts.unwrap();
    assert_eq!((experts.count, experts.groups, experts.layers), (256, 8, vec![false, true]));
    refused("\"kv_lora_rank\": 10", "\"kv_lora_rank\": 0", "latent");
    refused("\"kv_lora_rank\": 10", "\"kv_lora_rank\": null", "kv_lora_rank");
    refused("\"qk_rope_head_dim\": 4", "\"qk_rope_head_dim\": 3", "rotary");
    refused("\"num_key_value_heads\": 2", "\"num_key_value_heads\": 1", "key heads");
    let recipe = Recipe::uniform("sink_window", attlas::Options::new());
    let error = Decoder::new(golden("v2").model, &recipe, Schedule::default()).unwrap_err().to_string();
    assert!(error.contains("attend exactly"), "{error}");
}
