//! Conversion to latent attention on a small random model: exact stages are exact, and the written model reopens.

use attlas::conversions::mla::{Calibration, Params, Stage};
use attlas::{Schedule, Workspace};
use attlas_model::checkpoint::Tensors;
use attlas_model::compress::Elements;
use attlas_model::convert::{calibrate, check, convert, stored_as, write};
use attlas_model::save::{Folder, NamedTensor};
use attlas_model::tensor::Source;
use attlas_model::{Decoder, Error, Model, Recipe, Rows};
use attlas_num::rng::StreamKey;
use attlas_num::rope::{Rope, Scaling};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

const VOCAB: usize = 20;
const TOKENIZER: &str = r#"{"version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": null,
    "post_processor": null, "decoder": null, "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}}"#;

fn folder(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&path);
    path
}

/// A model of two layers with four query heads and two key heads of width 8.
fn write_source(name: &str, family: &str) -> Arc<Model> {
    let path = folder(name);
    let folder = Folder::create(&path).unwrap();
    let config = serde_json::json!({"model_type": family, "hidden_size": 24, "intermediate_size": 32,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "rms_norm_eps": 1e-6, "vocab_size": VOCAB, "max_position_embeddings": 64, "tie_word_embeddings": true,
        "eos_token_id": 3});
    folder.json("config.json", &config).unwrap();
    folder.file("tokenizer.json", TOKENIZER.as_bytes()).unwrap();
    let mut shapes = vec![
        ("model.embed_tokens.weight".to_owned(), vec![VOCAB, 24]),
        ("model.norm.weight".to_owned(), vec![24]),
    ];
    for l in 0..2 {
        for (part, shape) in [
            ("input_layernorm.weight", vec![24]),
            ("post_attention_layernorm.weight", vec![24]),
            ("self_attn.q_proj.weight", vec![32, 24]),
            ("self_attn.k_proj.weight", vec![16, 24]),
            ("self_attn.v_proj.weight", vec![16, 24]),
            ("self_attn.o_proj.weight", vec![24, 32]),
            ("mlp.gate_proj.weight", vec![32, 24]),
            ("mlp.up_proj.weight", vec![32, 24]),
            ("mlp.down_proj.weight", vec![24, 32]),
        ] {
            shapes.push((format!("model.layers.{l}.{part}"), shape));
        }
        let own = match family {
            "qwen2" => vec![("q_proj.bias", 32), ("k_proj.bias", 16), ("v_proj.bias", 16)],
            "qwen3" => vec![("q_norm.weight", 8), ("k_norm.weight", 8)],
            _ => vec![],
        };
        if name.ends_with("mlp-bias") {
            for (part, n) in [("gate", 32), ("up", 32), ("down", 24)] {
                shapes.push((format!("model.layers.{l}.mlp.{part}_proj.bias"), vec![n]));
            }
        }
        let named = |(part, n)| (format!("model.layers.{l}.self_attn.{part}"), vec![n]);
        shapes.extend(own.into_iter().map(named));
    }
    let list: Vec<NamedTensor<'_>> = shapes
        .into_iter()
        .map(|(name, shape)| {
            let mut rng = StreamKey::new(3).named(&name).rng();
            let (size, shift) = match shape[..] {
                [_] if name.ends_with("bias") => (0.5, 0.0),
                [_] => (0.1, 1.0),
                [.., width] => (1.5 / (width as f64).sqrt(), 0.0),
                [] => (0.0, 0.0),
            };
            let n = shape.iter().product::<usize>();
            let values: Vec<f32> = (0..n).map(|_| (shift + size * rng.normal()) as f32).collect();
            NamedTensor::dense(name, shape, values)
        })
        .collect();
    folder.tensors("model.safetensors", &list).unwrap();
    folder.finish().unwrap();
    Arc::new(Model::open(&path).unwrap())
}

fn tokens(n: usize, name: &str) -> Vec<u32> {
    let mut rng = StreamKey::new(4).named(name).rng();
    (0..n).map(|_| (rng.normal().abs() * 7.0) as u32 % VOCAB as u32).collect()
}

fn calibrated(model: &Arc<Model>, hidden_of: &Arc<Model>, n: usize) -> Vec<Calibration> {
    let threads = Workspace::new(Schedule { threads: 2, ..Schedule::default() }).unwrap();
    let tokens = tokens(n, "calibration");
    let go_on = AtomicBool::new(false);
    calibrate(model, hidden_of, &tokens, 32, true, &threads, &mut |_, _| {}, &go_on).unwrap()
}

/// Returns the logits of every position.
fn logits(model: &Arc<Model>) -> Vec<f32> {
    let schedule = Schedule { threads: 1, ..Schedule::default() };
    let mut decoder = Decoder::new(model.clone(), &Recipe::default(), schedule).unwrap();
    let mut hidden = Vec::new();
    decoder.forward(&tokens(50, "text"), Rows::All, &mut hidden).unwrap();
    let mut out = vec![f32::NAN; 50 * VOCAB];
    decoder.logits_into(&hidden, &mut out);
    out
}

fn gap(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(x, y)| (x - y).abs()).fold(0.0, f32::max)
}

#[test]
fn stages_lose_nothing_until_rotations_are_dropped() {
    let source = write_source("convert-stages", "llama");
    let calibration = calibrated(&source, &source, 200);
    let want = logits(&source);
    let at = |params: &Params, stage| {
        logits(&Arc::new(convert(&source, params, stage, &calibration, None, false).unwrap().model))
    };
    let params = Params { fold: Some(1), ..Params::default() };
    assert!(gap(&at(&params, Stage::Merged), &want) < 1e-4);
    assert!(gap(&at(&params, Stage::Rotated), &want) < 1e-4);
    let partial = at(&params, Stage::PartialRope);
    assert!(gap(&partial, &want) > 1e-3);
    assert!(gap(&at(&params, Stage::Balanced), &partial) < 1e-4);
    let low = Params { rank: Some(8), ..params };
    assert!(gap(&at(&low, Stage::LowRank), &partial) > 1e-3);
}

/// Writes a model and reopens it.
fn rewritten(model: &Model, name: &str) -> Arc<Model> {
    let path = folder(name);
    let folder = Folder::create(&path).unwrap();
    write(model, &folder).unwrap();
    folder.finish().unwrap();
    Arc::new(Model::open(&path).unwrap())
}

#[test]
fn a_written_checkpoint_opens_and_gives_the_same_logits() {
    for (family, rank_q) in [("llama", None), ("llama", Some(20)), ("qwen2", None)] {
        let source = write_source(&format!("convert-source-{family}"), family);
        let calibration = calibrated(&source, &source, 200);
        let params = Params { rank: Some(12), rank_q, rope_dim: Some(4), ..Params::default() };
        let params = check(&source, &params).unwrap();
        let last = Stage::LowRankQueries;
        let plain = convert(&source, &params, last, &calibration, None, false).unwrap();
        let refused = Folder::create(&folder("convert-unwritten")).unwrap();
        let error = write(&plain.model, &refused).unwrap_err().to_string();
        assert!(error.contains("norms") || error.contains("a bias of queries"), "{error}");
        let latents = convert(&source, &params, last, &calibration, None, true).unwrap();
        let want = logits(&Arc::new(latents.model.clone()));
        assert!(gap(&logits(&Arc::new(plain.model)), &want) < 1e-4, "norms that do nothing");
        let model = rewritten(&latents.model, &format!("convert-written-{family}"));
        assert_eq!(model.config.latent, latents.model.config.latent);
        assert_eq!((&model.config.eos, model.config.tied), (&source.config.eos, true));
        assert!(gap(&logits(&model), &want) < 1e-5);
        // Queries lose only through the narrow latent.
        let without = convert(&source, &params, Stage::LowRank, &calibration, None, false).unwrap();
        let without = logits(&Arc::new(without.model));
        assert_eq!(gap(&without, &want) < 1e-4, rank_q.is_none(), "{family}");
        let error = convert(&model, &params, Stage::Merged, &calibration, None, true).unwrap_err();
        assert!(error.to_string().contains("already"), "{error}");
    }
}

#[test]
fn a_written_checkpoint_is_the_model_rounded_to_the_elements_it_is_stored_in() {
    let inside = |name: &str, file: &str| Path::new(env!("CARGO_TARGET_TMPDIR")).join(name).join(file);
    for (family, rank_q) in [("llama", None), ("llama", Some(20)), ("qwen2", None)] {
        let source = write_source(&format!("convert-narrow-{family}"), family);
        let calibration = calibrated(&source, &source, 200);
        let params = Params { rank: Some(12), rank_q, rope_dim: Some(4), ..Params::default() };
        let params = check(&source, &params).unwrap();
        let of = |neutral| convert(&source, &params, Stage::LowRankQueries, &calibration, None, neutral);
        let (plain, neutral) = (of(false).unwrap().model, of(true).unwrap().model);
        let exact = logits(&Arc::new(plain.clone()));
        let mut sizes = Vec::new();
        for (elements, dtype) in
            [(Elements::F32, "float32"), (Elements::F16, "float32"), (Elements::Bf16, "bfloat16")]
        {
            let want = logits(&Arc::new(stored_as(&plain, elements, false).unwrap()));
            let name = format!("convert-narrow-{family}-{}", elements.name());
            let written = rewritten(&stored_as(&neutral, elements, false).unwrap(), &name);
            assert!(gap(&logits(&written), &want) < 1e-4, "{name}: {}", gap(&logits(&written), &want));
            assert_eq!(gap(&want, &exact) > 0.0, elements != Elements::F32, "{name}");
            let config = std::fs::read(inside(&name, "config.json")).unwrap();
            let config: serde_json::Value = serde_json::from_slice(&config).unwrap();
            assert_eq!(config["dtype"], dtype);
            sizes.push(std::fs::metadata(inside(&name, "model.safetensors")).unwrap().len());
        }
        assert!(sizes[1..].iter().all(|s| 3 * s < 2 * sizes[0]), "{sizes:?}");
        assert!(stored_as(&plain, Elements::Q8, false).unwrap_err().to_string().contains("8 bits"));
    }
}

#[test]
fn biases_of_feed_forward_layers_are_written_under_a_name_that_no_other_class_has() {
    let source = write_source("convert-mlp-bias", "llama");
    let calibration = calibrated(&source, &source, 200);
    let params = check(&source, &Params { rank: Some(12), ..Params::default() }).unwrap();
    let latents = convert(&source, &params, Stage::LowRank, &calibration, None, true).unwrap();
    let want = logits(&Arc::new(latents.model.clone()));
    let model = rewritten(&latents.model, "convert-written-mlp-bias");
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("convert-written-mlp-bias");
    assert!(gap(&logits(&model), &want) < 1e-5);
    let config: serde_json::Value =
        serde_json::from_slice(&std::fs::read(path.join("config.json")).unwrap()).unwrap();
    assert_eq!(config["model_type"], "deepseek_v3_mlp_bias");
    let module = config["auto_map"]["AutoModelForCausalLM"].as_str().unwrap().split_once('.').unwrap();
    let code = std::fs::read_to_string(path.join(format!("{}.py", module.0))).unwrap();
    assert!(code.contains(&format!("class {}(", module.1)), "{code}");
    // Without the biases it is another model.
    let tensors =
        Tensors::from_safetensors(&Arc::new(Source::open(&path.join("model.safetensors")).unwrap()));
    let tensors = tensors.unwrap();
    for part in ["gate", "up", "down"] {
        let name = |l: usize| format!("model.layers.{l}.mlp.{part}_proj.bias");
        assert!((0..2).all(|l| tensors.get(&name(l)).unwrap().to_f32().iter().any(|b| b.abs() > 0.1)));
    }
}

#[test]
fn moments_are_those_of_the_projections_on_whichever_hidden_states_enter() {
    let source = write_source("convert-again", "llama");
    let first = calibrated(&source, &source, 200);
    // Merging changes nothing: the moments on its hidden states are the same up to rounding.
    let params = Params { rank: Some(8), fold: Some(1), ..Params::default() };
    let at = |stage| Arc::new(convert(&source, &params, stage, &first, None, false).unwrap().model);
    let logits_with = |again: &[Calibration]| {
        let low = convert(&source, &params, Stage::LowRank, &first, Some(again), false).unwrap();
        logits(&Arc::new(low.model))
    };
    let once = logits_with(&first);
    assert!(gap(&logits_with(&calibrated(&source, &at(Stage::Merged), 200)), &once) < 1e-3);
    assert!(gap(&logits_with(&calibrated(&source, &at(Stage::PartialRope), 200)), &once) > 1e-3);
}

#[test]
fn rotations_that_the_format_has_no_place_for_are_refused() {
    let source = write_source("convert-rotations", "llama");
    let calibration = calibrated(&source, &source, 200);
    let of = |stage| convert(&source, &Params::default(), stage, &calibration, None, true).unwrap().model;
    let attempt = |model: &Model| {
        let folder = Folder::create(&folder("convert-refused")).unwrap();
        write(model, &folder).map_err(|e| e.to_string())
    };
    assert!(attempt(&of(Stage::Rotated)).unwrap_err().contains("rotated"));
    let mut model = of(Stage::PartialRope);
    attempt(&model).unwrap();
    // The divisors that GGUF files of Llama 3 hold are recognised; others are not.
    let rope = model.config.rope.as_mut().unwrap();
    let llama3 = Scaling::Llama3 { factor: 8.0, low_freq: 1.0, high_freq: 4.0, original: 8192.0 };
    let (plain, scaled) =
        (rope.frequencies(1), Rope { scaling: llama3.clone(), base: 5e5, ..rope.clone() }.frequencies(1));
    rope.base = 5e5;
    let base = rope.frequencies(1);
    assert!(plain != base);
    let divisors: Vec<f64> = base.iter().zip(&scaled).map(|(a, b)| a / b).collect();
    rope.scaling = Scaling::Divisors(divisors.clone());
    let again = rewritten(&model, "convert-llama3");
    assert_eq!(again.config.rope.as_ref().unwrap().scaling, llama3);
    model.config.rope.as_mut().unwrap().scaling = Scaling::Divisors(vec![1.5; divisors.len()]);
    assert!(attempt(&model).unwrap_err().contains("frequencies"));
}

#[test]
fn what_cannot_be_converted_is_refused() {
    let refused = |model: &Model, params: &Params, word: &str| {
        let error = check(model, params).unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    };
    let qwen3 = write_source("convert-qwen3", "qwen3");
    refused(&qwen3, &Params::default(), "norms");
    let threads = Workspace::new(Schedule { threads: 1, ..Schedule::default() }).unwrap();
    let go_on = AtomicBool::new(false);
    let ran = calibrate(&qwen3, &qwen3, &[0; 9], 4, false, &threads, &mut |_, _| {}, &go_on);
    assert!(matches!(ran, Err(Error::Unsupported { .. })));

    let source = write_source("convert-short", "llama");
    refused(&source, &Params { rank: Some(25), ..Params::default() }, "24");
    refused(&source, &Params { rope_dim: Some(16), ..Params::default() }, "rope_dim");
    refused(&source, &Params { rank_q: Some(25), ..Params::default() }, "rank_q");
    let short = calibrated(&source, &source, 20);
    let error = convert(&source, &Params::default(), Stage::LowRank, &short, None, true).unwrap_err();
    assert!(error.to_string().contains("too few"), "{error}");
    assert!(convert(&source, &Params::default(), Stage::LowRank, &short[..1], None, true).is_err());
    let stopped = AtomicBool::new(true);
    let ran = calibrate(&source, &source, &[0; 9], 4, false, &threads, &mut |_, _| {}, &stopped);
    assert!(matches!(ran, Err(Error::Interrupted)));
}
