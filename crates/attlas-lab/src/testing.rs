//! Small models for tests.

use attlas_model::Model;
use attlas_model::save::{Folder, NamedTensor};
use serde_json::json;
use std::sync::Arc;

/// Builds a model with two query heads and one key head of width 4 per layer. Number `i` of a tensor is
/// `value(its name, i)`.
pub(crate) fn model(
    name: &str,
    layers: usize,
    intermediate: usize,
    value: impl Fn(&str, usize) -> f32,
) -> Arc<Model> {
    let path = std::env::temp_dir().join(format!("attlas-{}-{name}", std::process::id()));
    let folder = Folder::create(&path).unwrap();
    let config = json!({"model_type": "llama", "hidden_size": 8, "intermediate_size": intermediate,
        "num_hidden_layers": layers, "num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-6,
        "vocab_size": 11, "max_position_embeddings": 64, "tie_word_embeddings": true});
    folder.json("config.json", &config).unwrap();
    let words = json!({"version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": null,
        "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}});
    folder.json("tokenizer.json", &words).unwrap();
    let tensor = |name: String, shape: Vec<usize>| {
        let values: Vec<f32> = (0..shape.iter().product()).map(|i| value(&name, i)).collect();
        NamedTensor::dense(name, shape, values)
    };
    let mut list = vec![
        tensor("model.embed_tokens.weight".into(), vec![11, 8]),
        tensor("model.norm.weight".into(), vec![8]),
    ];
    for l in 0..layers {
        for (part, shape) in [
            ("input_layernorm", vec![8]),
            ("post_attention_layernorm", vec![8]),
            ("self_attn.q_proj", vec![8, 8]),
            ("self_attn.k_proj", vec![4, 8]),
            ("self_attn.v_proj", vec![4, 8]),
            ("self_attn.o_proj", vec![8, 8]),
            ("mlp.gate_proj", vec![intermediate, 8]),
            ("mlp.up_proj", vec![intermediate, 8]),
            ("mlp.down_proj", vec![8, intermediate]),
        ] {
            list.push(tensor(format!("model.layers.{l}.{part}.weight"), shape));
        }
    }
    folder.tensors("model.safetensors", &list).unwrap();
    folder.finish().unwrap();
    let model = Arc::new(Model::open(&path).unwrap());
    std::fs::remove_dir_all(&path).unwrap();
    model
}
