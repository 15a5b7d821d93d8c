//! Folders and split files written for the purpose.

mod common;

use attlas_model::checkpoint::open_gguf;
use attlas_model::{Architecture, Error, Model, Weights};
use common::{Writer, tiny_llama};
use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

fn folder(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&path);
    std::fs::create_dir_all(&path).unwrap();
    path
}

const TOKENIZER: &str = r#"{"version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": null,
    "post_processor": null, "decoder": null, "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}}"#;

/// Writes a decoder of the given family in two shards and returns its folder.
fn write_decoder(name: &str, family: &str, leave_out: &str) -> PathBuf {
    let folder = folder(name);
    let config = format!(
        r#"{{"model_type": "{family}", "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "rms_norm_eps": 1e-6, "vocab_size": 5,
        "max_position_embeddings": 64, "eos_token_id": 1}}"#
    );
    std::fs::write(folder.join("config.json"), config).unwrap();
    std::fs::write(folder.join("generation_config.json"), r#"{"eos_token_id": [1, 4]}"#).unwrap();
    std::fs::write(folder.join("tokenizer.json"), TOKENIZER).unwrap();
    std::fs::write(folder.join("tokenizer_config.json"), r#"{"chat_template": "{{ x }}"}"#).unwrap();

    let mut shapes = BTreeMap::new();
    let mut add = |name: &str, shape: &[usize]| shapes.insert(name.to_owned(), shape.to_vec());
    add("model.embed_tokens.weight", &[5, 8]);
    add("model.norm.weight", &[8]);
    add("lm_head.weight", &[5, 8]);
    for i in 0..2 {
        let mut add = |name: &str, shape: &[usize]| add(&format!("model.layers.{i}.{name}"), shape);
        add("input_layernorm.weight", &[8]);
        add("post_attention_layernorm.weight", &[8]);
        for (part, width) in [("q", 24), ("k", 12), ("v", 12)] {
            add(&format!("self_attn.{part}_proj.weight"), &[width, 8]);
            if family == "qwen2" {
                add(&format!("self_attn.{part}_proj.bias"), &[width]);
            }
        }
        add("self_attn.o_proj.weight", &[8, 24]);
        if family == "qwen3" {
            add("self_attn.q_norm.weight", &[6]);
            add("self_attn.k_norm.weight", &[6]);
        }
        add("mlp.gate_proj.weight", &[12, 8]);
        add("mlp.up_proj.weight", &[12, 8]);
        add("mlp.down_proj.weight", &[8, 12]);
    }
    shapes.retain(|name, _| leave_out.is_empty() || !name.ends_with(leave_out));

    let data: Vec<u8> = (0..192).flat_map(|i| half::bf16::from_f32(i as f32).to_le_bytes()).collect();
    let mut map = serde_json::Map::new();
    for shard in 0..2 {
        let file = format!("model-{:05}-of-00002.safetensors", shard + 1);
        let part: Vec<(&String, TensorView<'_>)> = shapes
            .iter()
            .enumerate()
            .filter(|(i, _)| i % 2 == shard)
            .map(|(_, (name, shape))| {
                let len = 2 * shape.iter().product::<usize>();
                (name, TensorView::new(Dtype::BF16, shape.clone(), &data[..len]).unwrap())
            })
            .collect();
        part.iter().for_each(|(name, _)| drop(map.insert((*name).clone(), file.clone().into())));
        serialize_to_file(part, None, &folder.join(&file)).unwrap();
    }
    let index = serde_json::json!({ "metadata": {}, "weight_map": map });
    std::fs::write(folder.join("model.safetensors.index.json"), index.to_string()).unwrap();
    folder
}

#[test]
fn a_folder_of_two_shards_opens() {
    let model = Model::open(&write_decoder("qwen3", "qwen3", "")).unwrap();
    assert_eq!((model.config.architecture, model.config.group()), (Architecture::Qwen3, 2));
    assert_eq!(model.config.eos, [1, 4], "generation_config.json has the last word");
    assert_eq!(model.chat_template.as_deref(), Some("{{ x }}"));
    let Weights::Decoder(w) = &model.weights else { panic!("a decoder") };
    assert_eq!(w.layers[1].q_norm.as_ref().unwrap()[..3], [0.0, 1.0, 2.0]);
    assert_eq!((w.layers[0].q.outputs(), w.layers[0].o.inputs(), w.layers[0].q.bias()), (24, 24, None));
    assert_ne!(w.output.weight().bytes().as_ptr(), w.embedding.bytes().as_ptr());
    assert_eq!(w.layers[0].k.weight().to_f32()[95], 95.0);
}

#[test]
fn biases_are_needed_where_the_family_has_them() {
    let model = Model::open(&write_decoder("qwen2", "qwen2", "")).unwrap();
    let Weights::Decoder(w) = &model.weights else { panic!("a decoder") };
    assert_eq!(w.layers[0].v.bias().unwrap()[11], 11.0);
    assert!(w.layers[0].q_norm.is_none());
    let error =
        Model::open(&write_decoder("qwen2-unbiased", "qwen2", "k_proj.bias")).unwrap_err().to_string();
    assert!(error.contains("model.layers.0.self_attn.k_proj.bias"), "{error}");
}

#[test]
fn a_checkpoint_without_an_output_tensor_is_tied() {
    let model = Model::open(&write_decoder("tied", "llama", "lm_head.weight")).unwrap();
    let Weights::Decoder(w) = &model.weights else { panic!("a decoder") };
    assert_eq!(w.output.weight().bytes().as_ptr(), w.embedding.bytes().as_ptr());
}

#[test]
fn a_missing_tensor_and_a_missing_shard_are_named() {
    let error =
        Model::open(&write_decoder("gap", "llama", "layers.1.mlp.up_proj.weight")).unwrap_err().to_string();
    assert!(error.contains("model.layers.1.mlp.up_proj.weight"), "{error}");
    let folder = write_decoder("shardless", "llama", "");
    std::fs::remove_file(folder.join("model-00002-of-00002.safetensors")).unwrap();
    assert!(
        matches!(Model::open(&folder), Err(Error::Io { path, .. }) if path.ends_with("model-00002-of-00002.safetensors"))
    );
}

#[test]
fn what_is_no_model_is_said_to_be_none() {
    let folder = folder("empty");
    assert!(matches!(Model::open(&folder), Err(Error::NotAModel { .. })));
    assert!(matches!(Model::open(&folder.join("nowhere")), Err(Error::Io { .. })));
    std::fs::write(folder.join("empty.gguf"), "").unwrap();
    assert!(matches!(Model::open(&folder.join("empty.gguf")), Err(Error::InFile { .. })));
}

#[test]
fn a_split_gguf_file_opens_from_its_first_part() {
    let folder = folder("split");
    let part =
        |no: u32| Writer::default().u32("split.count", 2).u32("split.no", no).u32("split.tensors.count", 3);
    let first = part(0).tensor_f32("a", &[2], |i| i as f32).tensor_f32("b", &[1], |_| 7.0);
    let second = part(1).tensor_f32("c", &[3], |i| 10.0 + i as f32);
    std::fs::write(folder.join("m-00001-of-00002.gguf"), first.bytes()).unwrap();
    std::fs::write(folder.join("m-00002-of-00002.gguf"), second.bytes()).unwrap();
    let (_, tensors) = open_gguf(&folder.join("m-00001-of-00002.gguf")).unwrap();
    assert_eq!(tensors.get("c").unwrap().to_f32(), [10.0, 11.0, 12.0]);
    assert_eq!(tensors.len(), 3);

    std::fs::write(folder.join("renamed.gguf"), first.bytes()).unwrap();
    assert!(open_gguf(&folder.join("renamed.gguf")).unwrap_err().to_string().contains("00001-of-00002"));
    std::fs::write(folder.join("m-00002-of-00002.gguf"), tiny_llama().bytes()).unwrap();
    assert!(open_gguf(&folder.join("m-00001-of-00002.gguf")).unwrap_err().to_string().contains("split.no"));
}
