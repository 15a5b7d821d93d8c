//! Helpers for tests of commands on real models.

// Each test program uses a part of this module.
#![allow(dead_code, unreachable_pub, unused_imports)]

#[path = "../../../attlas-model/tests/common/mod.rs"]
mod models;

use attlas_model::save::{Folder as Saved, NamedTensor};
pub use models::{minilm, repository, smollm2};
use serde_json::Value;
use std::path::PathBuf;
use std::process::Command;

/// Separate folder for each test, removed at the end.
pub struct Folder(pub PathBuf);

impl Folder {
    pub fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("attlas-cli-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub fn file(&self, name: &str) -> String {
        self.0.join(name).display().to_string()
    }

    /// Writes a model with four query heads and two key heads per layer, whose tokens are letters.
    pub fn model(&self, family: &str, layers: usize) -> String {
        let path = self.0.join(family);
        let folder = Saved::create(&path).unwrap();
        let config = serde_json::json!({"model_type": family, "hidden_size": 16, "intermediate_size": 16,
            "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
            "rms_norm_eps": 1e-6, "vocab_size": 26, "max_position_embeddings": 64, "tie_word_embeddings": true});
        folder.json("config.json", &config).unwrap();
        let letters: serde_json::Map<String, Value> =
            ('a'..='z').enumerate().map(|(i, c)| (c.to_string(), i.into())).collect();
        let tokenizer = serde_json::json!({"version": "1.0", "added_tokens": [], "normalizer": null,
            "post_processor": null, "decoder": null,
            "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": false},
            "model": {"type": "WordLevel", "vocab": letters, "unk_token": "a"}});
        folder.json("tokenizer.json", &tokenizer).unwrap();
        let tensor = |name: &str, shape: &[usize]| {
            let mut x = name.len() as u32;
            let mut next = || {
                x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (x >> 8) as f32 / (1 << 23) as f32 - 1.0
            };
            let n = shape.iter().product::<usize>();
            let values: Vec<f32> = (0..n).map(|_| next() + f32::from(u8::from(shape.len() == 1))).collect();
            NamedTensor::dense(name, shape.to_vec(), values)
        };
        let mut list =
            vec![tensor("model.embed_tokens.weight", &[26, 16]), tensor("model.norm.weight", &[16])];
        let parts: [(&str, &[usize]); 11] = [
            ("input_layernorm", &[16]),
            ("post_attention_layernorm", &[16]),
            ("self_attn.q_proj", &[32, 16]),
            ("self_attn.k_proj", &[16, 16]),
            ("self_attn.v_proj", &[16, 16]),
            ("self_attn.o_proj", &[16, 32]),
            ("self_attn.q_norm", &[8]),
            ("self_attn.k_norm", &[8]),
            ("mlp.gate_proj", &[16, 16]),
            ("mlp.up_proj", &[16, 16]),
            ("mlp.down_proj", &[16, 16]),
        ];
        let known = |part: &str| family == "qwen3" || !part.ends_with("q_norm") && !part.ends_with("k_norm");
        for l in 0..layers {
            let parts = parts.iter().filter(|(part, _)| known(part));
            list.extend(parts.map(|(part, shape)| tensor(&format!("model.layers.{l}.{part}.weight"), shape)));
        }
        folder.tensors("model.safetensors", &list).unwrap();
        folder.finish().unwrap();
        path.display().to_string()
    }

    /// Writes a text of letters.
    pub fn text(&self, letters: usize) -> String {
        let path = self.0.join(format!("{letters}.txt"));
        let text: String = (0..letters).map(|i| char::from(b'a' + (i * i % 26 + i / 7) as u8 % 26)).collect();
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Runs a command and returns status, standard output and standard error.
pub fn attlas(args: &[&str]) -> (i32, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_attlas")).args(args).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap_or(-1), text(output.stdout), text(output.stderr))
}

pub fn json(args: &[&str]) -> Value {
    let (status, out, err) = attlas(args);
    assert_eq!(status, 0, "{err}");
    serde_json::from_str(&out).unwrap()
}

pub fn model() -> String {
    smollm2().display().to_string()
}

pub fn alice() -> String {
    repository().join("data/alice29.txt").display().to_string()
}
