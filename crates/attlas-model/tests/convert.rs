//! Conversion to latent attention on a small random model: what is exact is exact, and what is written opens again.

use attlas::conversions::mla::{Calibration, Params, Stage};
use attlas::{Schedule, Workspace};
use attlas_model::convert::{calibrate, convert};
use attlas_model::{Decoder, Model, Recipe, Rows};
use attlas_num::rng::StreamKey;
use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use std::path::{Path, PathBuf};
use std::sync::Arc;

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
    let folder = folder(name);
    std::fs::create_dir_all(&folder).unwrap();
    let config = format!(
        r#"{{"model_type": "{family}", "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6,
        "vocab_size": {VOCAB}, "max_position_embeddings": 64, "tie_word_embeddings": true}}"#
    );
    std::fs::write(folder.join("config.json"), config).unwrap();
    std::fs::write(folder.join("tokenizer.json"), TOKENIZER).unwrap();
    let mut shapes = vec![
        ("model.embed_tokens.weight".to_owned(), vec![VOCAB, 24]),
        ("model.norm.weight".to_owned(), vec![24]),
    ];
    for l in 0..2 {
        for (part, shape) in [
            ("input_layernorm", vec![24]),
            ("post_attention_layernorm", vec![24]),
            ("self_attn.q_proj", vec![32, 24]),
            ("self_attn.k_proj", vec![16, 24]),
            ("self_attn.v_proj", vec![16, 24]),
            ("self_attn.o_proj", vec![24, 32]),
            ("self_attn.q_norm", vec![8]),
            ("self_attn.k_norm", vec![8]),
            ("mlp.gate_proj", vec![32, 24]),
            ("mlp.up_proj", vec![32, 24]),
            ("mlp.down_proj", vec![24, 32]),
        ] {
            shapes.push((format!("model.layers.{l}.{part}.weight"), shape));
        }
    }
    let data: Vec<Vec<u8>> = shapes
        .iter()
        .map(|(name, shape)| {
            let mut rng = StreamKey::new(3).named(name).rng();
            let (size, shift) =
                if shape.len() == 1 { (0.1, 1.0) } else { (1.5 / (shape[1] as f64).sqrt(), 0.0) };
            let number = |_| ((shift + size * rng.normal()) as f32).to_le_bytes();
            (0..shape.iter().product::<usize>()).flat_map(number).collect()
        })
        .collect();
    let views: Vec<_> = shapes
        .iter()
        .zip(&data)
        .map(|((name, shape), data)| (name, TensorView::new(Dtype::F32, shape.clone(), data).unwrap()))
        .collect();
    serialize_to_file(views, None, &folder.join("model.safetensors")).unwrap();
    Arc::new(Model::open(&folder).unwrap())
}

fn tokens(n: usize, name: &str) -> Vec<u32> {
    let mut rng = StreamKey::new(4).named(name).rng();
    (0..n).map(|_| (rng.normal().abs() * 7.0) as u32 % VOCAB as u32).collect()
}

fn calibrated(model: &Arc<Model>, n: usize) -> Vec<Calibration> {
    let threads = Workspace::new(Schedule { threads: 2, ..Schedule::default() }).unwrap();
    calibrate(model, &tokens(n, "calibration"), 32, true, &threads, &mut |_, _| {}).unwrap()
}

/// The logits of every position.
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
    let calibration = calibrated(&source, 200);
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

#[test]
fn a_written_checkpoint_opens_and_gives_the_same_logits() {
    let source = write_source("convert-source", "llama");
    let calibration = calibrated(&source, 200);
    for rank_q in [None, Some(20)] {
        let params = Params { rank: Some(12), rank_q, rope_dim: Some(4), ..Params::default() };
        let plain = convert(&source, &params, Stage::LowRankQueries, &calibration, None, false).unwrap();
        assert!(plain.write(&folder("convert-unwritten")).unwrap_err().to_string().contains("norms"));
        let latents = convert(&source, &params, Stage::LowRankQueries, &calibration, None, true).unwrap();
        let want = logits(&Arc::new(latents.model.clone()));
        assert!(gap(&logits(&Arc::new(plain.model)), &want) < 1e-4, "norms that do nothing");
        let written = folder("convert-written");
        latents.write(&written).unwrap();
        std::fs::write(written.join("tokenizer.json"), TOKENIZER).unwrap();
        let model = Arc::new(Model::open(&written).unwrap());
        assert_eq!(model.config.latent, latents.model.config.latent);
        assert!(gap(&logits(&model), &want) < 1e-5);
        // Not twice, and not over what is there.
        assert!(latents.write(&written).is_err());
        assert!(convert(&model, &params, Stage::Merged, &calibration, None, true).is_err());
    }
}

#[test]
fn what_cannot_be_converted_is_refused() {
    let qwen3 = write_source("convert-qwen3", "qwen3");
    let threads = Workspace::new(Schedule { threads: 1, ..Schedule::default() }).unwrap();
    let error = calibrate(&qwen3, &[0; 9], 4, false, &threads, &mut |_, _| {}).unwrap_err().to_string();
    assert!(error.contains("norms"), "{error}");
    let source = write_source("convert-short", "llama");
    let short = calibrated(&source, 20);
    let error = convert(&source, &Params::default(), Stage::LowRank, &short, None, true).unwrap_err();
    assert!(error.to_string().contains("too few"), "{error}");
    assert!(convert(&source, &Params::default(), Stage::LowRank, &short[..1], None, true).is_err());
}
