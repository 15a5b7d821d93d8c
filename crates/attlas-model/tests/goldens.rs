//! Small checkpoints of every family against transformers, from folders and from GGUF files:
//! `goldens/model/make_family_goldens.py`.

mod common;

use attlas::Schedule;
use attlas_model::{Architecture, Decoder, Error, Model, Recipe, Rows};
use common::{numbers, repository};
use std::path::{Path, PathBuf};
use std::sync::Arc;

const FAMILIES: [(&str, Architecture); 14] = [
    ("phi3", Architecture::Phi3),
    ("olmo2", Architecture::Olmo2),
    ("granite", Architecture::Granite),
    ("smollm3", Architecture::SmolLm3),
    ("glm4", Architecture::Glm4),
    ("mixtral", Architecture::Mixtral),
    ("qwen2_moe", Architecture::Qwen2Moe),
    ("qwen3_moe", Architecture::Qwen3Moe),
    ("deepseek_v2", Architecture::DeepseekV2),
    ("deepseek_v3", Architecture::DeepseekV3),
    ("gemma2", Architecture::Gemma2),
    ("gemma3", Architecture::Gemma3),
    ("gpt_oss", Architecture::GptOss),
    // The same model, experts in blocks of four bits as they are published.
    ("gpt_oss_mxfp4", Architecture::GptOss),
];

fn folder(name: &str) -> PathBuf {
    repository().join("goldens/model/families").join(name)
}

/// The logits of every position, fed in chunks.
fn logits(model: &Arc<Model>, tokens: &[u32], chunks: &[usize]) -> Vec<f32> {
    let schedule = Schedule { threads: 2, ..Schedule::default() };
    let mut decoder = Decoder::new(model.clone(), &Recipe::default(), schedule).unwrap();
    let (mut all, mut hidden, mut start) = (Vec::new(), Vec::new(), 0);
    for &n in chunks {
        decoder.forward(&tokens[start..start + n], Rows::All, &mut hidden).unwrap();
        let mut out = vec![f32::NAN; n * model.config.vocab];
        decoder.logits_into(&hidden, &mut out);
        all.extend(out);
        start += n;
    }
    all
}

#[test]
fn logits_are_those_of_transformers_in_prompts_and_decoding() {
    for (name, architecture) in FAMILIES {
        let golden = folder(name.trim_end_matches("_mxfp4")).join("logits.json");
        let json: serde_json::Value = serde_json::from_slice(&std::fs::read(golden).unwrap()).unwrap();
        let tokens: Vec<u32> =
            json["tokens"].as_array().unwrap().iter().map(|t| t.as_u64().unwrap() as u32).collect();
        let want: Vec<f32> = json["logits"].as_array().unwrap().iter().flat_map(numbers).collect();
        let file = folder(name).join("model.gguf");
        for path in [Some(folder(name)), file.is_file().then_some(file)].into_iter().flatten() {
            let model = Arc::new(Model::open(&path).unwrap_or_else(|e| panic!("{e}")));
            assert_eq!(model.config.architecture, architecture);
            for chunks in [&[20usize][..], &[1; 20], &[9, 1, 1, 9]] {
                let got = logits(&model, &tokens, chunks);
                assert_eq!(got.len(), want.len());
                let gap = got.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(gap < 1e-4, "{} {chunks:?}: {gap}", path.display());
            }
        }
    }
}

#[test]
fn contexts_grow_past_the_trained_one_where_positions_are_extrapolated() {
    let read = |name: &str| -> serde_json::Value {
        serde_json::from_slice(&std::fs::read(folder(name).join("logits.json")).unwrap()).unwrap()
    };
    for name in ["dynamic", "yarn"] {
        let json = read(name);
        let model = Arc::new(Model::open(&folder(name)).unwrap());
        assert_eq!((model.config.max_positions, model.config.longest_context()), (12, 12 * 64));
        let tokens: Vec<u32> =
            json["tokens"].as_array().unwrap().iter().map(|t| t.as_u64().unwrap() as u32).collect();
        for (key, chunks) in [("logits", &[20usize][..]), ("decoded", &[1; 20])] {
            // If frequencies do not follow the length, decoding equals the prompt.
            let rows = json[key].as_array().or(json["logits"].as_array()).unwrap();
            let want: Vec<f32> = rows.iter().flat_map(numbers).collect();
            let got = logits(&model, &tokens, chunks);
            let gap = got.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(gap < 1e-4, "{name} {key}: {gap}");
        }
    }
    let model = Arc::new(Model::open(&folder("dynamic")).unwrap());
    let mut decoder = Decoder::new(model, &Recipe::default(), Schedule::default()).unwrap();
    let mut hidden = Vec::new();
    assert!(matches!(
        decoder.forward(&[1; 12 * 64 + 1], Rows::None, &mut hidden),
        Err(Error::ContextTooShort { .. })
    ));
}

#[test]
fn a_plain_rotation_is_stretched_past_the_trained_context() {
    let mut model = Model::open(&folder("olmo2")).unwrap();
    let (trained, rope) = (model.config.max_positions, model.config.rope.clone().unwrap());
    model.config.stretch_context(trained).unwrap();
    assert_eq!(model.config.rope.as_ref().unwrap().base, rope.base, "nothing to stretch");
    model.config.stretch_context(2 * trained).unwrap();
    // The slowest pair turns as far over the longer context as it did over the trained one.
    let slowest = |base: f64, n: usize| n as f64 * base.powf(2.0 / rope.dim as f64 - 1.0);
    let stretched = model.config.rope.as_ref().unwrap().base;
    assert!((slowest(stretched, 2 * trained) / slowest(rope.base, trained) - 1.0).abs() < 1e-12);
    let mut decoder = Decoder::new(Arc::new(model), &Recipe::default(), Schedule::default()).unwrap();
    let mut hidden = Vec::new();
    decoder.forward(&vec![1; 2 * trained], Rows::Last, &mut hidden).unwrap();
    assert!(hidden.iter().all(|x| x.is_finite()) && !hidden.is_empty());

    let mut far = Model::open(&folder("olmo2")).unwrap();
    assert!(matches!(far.config.stretch_context(65 * trained), Err(Error::Invalid { .. })));
    let mut scaled = Model::open(&folder("yarn")).unwrap();
    assert!(
        matches!(scaled.config.stretch_context(12 * 64 + 1), Err(Error::Invalid { .. })),
        "it has a rule of its own"
    );
}

/// Two sets of frequencies: a prompt uses those of its length, a token those of the context that it ends.
#[test]
fn long_rope_changes_its_frequencies_with_the_length() {
    let folder = folder("phi3_long");
    let json: serde_json::Value =
        serde_json::from_slice(&std::fs::read(folder.join("logits.json")).unwrap()).unwrap();
    let tokens: Vec<u32> =
        json["tokens"].as_array().unwrap().iter().map(|t| t.as_u64().unwrap() as u32).collect();
    for path in [folder.clone(), folder.join("model.gguf")] {
        let model = Arc::new(Model::open(&path).unwrap_or_else(|e| panic!("{e}")));
        for (key, chunks) in [("logits", &[20usize][..]), ("decoded", &[1; 20])] {
            let want: Vec<f32> = json[key].as_array().unwrap().iter().flat_map(numbers).collect();
            let got = logits(&model, &tokens, chunks);
            let gap = got.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(gap < 1e-4, "{} {key}: {gap}", path.display());
        }
    }
}

/// If a family caps its logits, methods that cannot are refused; every method with a log-sum-exp includes an extra
/// logit.
#[test]
fn caps_are_never_dropped_and_sinks_are_honoured_by_other_methods() {
    let tokens: Vec<u32> = (0..5).collect();
    let run = |name: &str, method: &str, options: &[(&str, &str)]| {
        let model = Arc::new(Model::open(&folder(name)).unwrap());
        let options = options.iter().fold(attlas::Options::new(), |o, (k, v)| o.with(k, *v));
        let recipe = Recipe::uniform(method, options);
        let mut decoder = Decoder::new(model, &recipe, Schedule::default())?;
        let mut logits = Vec::new();
        decoder.next_logits(&tokens, &mut logits)?;
        Ok::<_, Error>(logits)
    };
    let error = run("gemma2", "performer", &[]).unwrap_err().to_string();
    assert!(error.contains("capped at 2"), "{error}");
    // Within the window, a method that keeps every key equals exact attention, including sinks.
    let want = run("gpt_oss", "exact", &[]).unwrap();
    for (method, options) in [("top_k", &[("keys", "5")][..]), ("naive", &[]), ("quest", &[])] {
        let got = run("gpt_oss", method, options).unwrap();
        let gap = got.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(gap < 1e-5, "{method}: {gap}");
    }
    let error = run("gpt_oss", "polynomial", &[]).unwrap_err().to_string();
    assert!(error.contains("log-sum-exp"), "{error}");
}

/// A folder with the files of another, `config.json` changed.
fn copied(name: &str, from: &Path, change: impl Fn(&mut serde_json::Value)) -> PathBuf {
    let to = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&to);
    std::fs::create_dir_all(&to).unwrap();
    for file in ["model.safetensors", "tokenizer.json"] {
        std::fs::copy(from.join(file), to.join(file)).unwrap();
    }
    let mut config = serde_json::from_slice(&std::fs::read(from.join("config.json")).unwrap()).unwrap();
    change(&mut config);
    std::fs::write(to.join("config.json"), config.to_string()).unwrap();
    to
}

#[test]
fn a_tensor_that_nothing_reads_is_named() {
    // With norms of heads, it is no Mistral.
    let renamed = copied("renamed", &folder("olmo2"), |c| c["model_type"] = "qwen3".into());
    assert!(Model::open(&renamed).is_err());
    let shorter = copied("shorter", &folder("qwen3_moe"), |c| c["num_hidden_layers"] = 1.into());
    let error = Model::open(&shorter).unwrap_err();
    let Error::InFile { source, .. } = &error else { panic!("{error}") };
    assert!(
        matches!(&**source, Error::UnreadTensor { name, more: 26, .. } if name.starts_with("model.layers.1.")),
        "{error}"
    );
}

#[test]
fn what_cannot_be_read_says_what_can() {
    let quantised = copied("quantised", &folder("granite"), |c| {
        c["quantization_config"] = serde_json::json!({"quant_method": "awq", "bits": 4});
    });
    let error = Model::open(&quantised).unwrap_err().to_string();
    assert!(error.contains("\"awq\"") && error.contains("GGUF"), "{error}");
    let pickled = copied("pickled", &folder("granite"), |_| {});
    std::fs::rename(pickled.join("model.safetensors"), pickled.join("pytorch_model.bin")).unwrap();
    let error = Model::open(&pickled).unwrap_err().to_string();
    assert!(error.contains("pytorch_model.bin") && error.contains("save_pretrained"), "{error}");
    let seen = copied("seen", &folder("granite"), |c| c["model_type"] = "gemma3".into());
    let error = Model::open(&seen).unwrap_err().to_string();
    assert!(error.contains("vision") && error.contains("gemma3_text"), "{error}");
}
