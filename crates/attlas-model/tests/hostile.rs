//! Malformed files: every corruption gives an error or a model, never a panic.

mod common;

use attlas_model::checkpoint::{Tensors, shard_names};
use attlas_model::gguf::Gguf;
use attlas_model::tensor::Source;
use attlas_model::{Error, Model, ModelConfig, Tokenizer, Weights};
use attlas_num::rng::{Rng, StreamKey};
use attlas_num::{MatRef, Scratch};
use common::{Writer, tiny_llama};
use std::sync::Arc;

/// Applies one to four random corruptions to a copy of `bytes`.
fn corrupt(bytes: &[u8], rng: &mut Rng) -> Vec<u8> {
    let mut out = bytes.to_vec();
    for _ in 0..1 + rng.below(4) {
        if out.is_empty() {
            break;
        }
        let at = rng.below(out.len());
        match rng.below(7) {
            0 => out[at] ^= 1 << rng.below(8),
            1 => out[at] = rng.next_u32() as u8,
            2 => out.truncate(at),
            3 => {
                // A field of eight bytes with an extreme value.
                let extreme =
                    [0, 1, u64::MAX, 1 << 63, u64::from(u32::MAX), 1 << 40, (1 << 61) - 1][rng.below(7)];
                for (b, e) in out[at..].iter_mut().zip(extreme.to_le_bytes()) {
                    *b = e;
                }
            }
            4 => {
                let end = (at + 1 + rng.below(16)).min(out.len());
                out.drain(at..end);
            }
            5 => {
                let piece: Vec<u8> = (0..1 + rng.below(16)).map(|_| rng.next_u32() as u8).collect();
                out.splice(at..at, piece);
            }
            _ => {
                let other = rng.below(out.len());
                let len = (1 + rng.below(32)).min(out.len() - at.max(other));
                out.copy_within(other..other + len, at);
            }
        }
    }
    out
}

/// Uses every part of a model that a caller can use.
fn exercise(model: &Model) {
    let ids = model.tokenizer.encode("ab a <s>c\u{e9}", true).unwrap_or_default();
    let _ = model.tokenizer.decode(&ids, false);
    let _ = model.tokenizer.decode(&[0, 5, u32::MAX], true);
    let Weights::Decoder(w) = &model.weights else { return };
    let mut row = vec![0.0; model.config.hidden];
    w.embedding.row_into(0, &mut row);
    if let Some(layer) = w.layers.first() {
        let mut out = vec![0.0; layer.q.outputs()];
        layer.q.apply(MatRef::new(&row, 1, row.len()), &mut out, &Scratch::new());
    }
    if let Some(rope) = &model.config.rope {
        assert!(rope.frequencies(10).iter().all(|f| f.is_finite()));
    }
}

#[test]
fn the_uncorrupted_model_opens() {
    let model = Model::from_gguf_bytes(tiny_llama().bytes()).unwrap();
    assert_eq!((model.config.head_dim, model.config.vocab), (8, 8));
    assert_eq!(model.tokenizer.encode("ab a</s>", true).unwrap(), [4, 6, 7]);
    exercise(&model);
}

#[test]
fn thousands_of_corrupted_gguf_files_open_or_fail_without_panic() {
    let bytes = tiny_llama().bytes();
    let mut rng = StreamKey::new(1).named("gguf").rng();
    let (mut opened, mut failed) = (0, 0);
    for _ in 0..6000 {
        match Model::from_gguf_bytes(corrupt(&bytes, &mut rng)) {
            Ok(model) => {
                exercise(&model);
                opened += 1;
            }
            Err(error) => {
                assert!(!error.to_string().is_empty());
                failed += 1;
            }
        }
    }
    assert!(
        opened > 100 && failed > 1000,
        "{opened} opened, {failed} failed: the corruption is too weak or too strong"
    );
}

#[test]
fn every_truncation_of_a_gguf_header_is_an_error() {
    let bytes = tiny_llama().bytes();
    for len in 0..bytes.len() {
        match Gguf::parse(&bytes[..len]) {
            Err(_) => {}
            // Only padding after the last tensor may be missing.
            Ok(gguf) => assert!(gguf.tensors().iter().all(|t| t.range.end <= len)),
        }
    }
}

#[test]
fn counts_that_exceed_the_file_fail_before_memory_is_set_aside() {
    let truncated = |bytes: &[u8]| assert!(matches!(Gguf::parse(bytes), Err(Error::Truncated { .. })));
    let header = |tensors: u64, metadata: u64| {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend(tensors.to_le_bytes());
        bytes.extend(metadata.to_le_bytes());
        bytes.extend([0; 64]);
        bytes
    };
    for n in [6, 1 << 40, u64::MAX / 24, u64::MAX / 13 + 1, u64::MAX] {
        truncated(&header(n, 0));
        truncated(&header(0, n));
    }
    for kind in 0..13u32 {
        let mut array = kind.to_le_bytes().to_vec();
        array.extend((1u64 << 60).to_le_bytes());
        truncated(&Writer::default().raw("key", 9, &array).bytes());
    }
    truncated(&Writer::default().raw("key", 8, &u64::MAX.to_le_bytes()).bytes());
}

#[test]
fn deep_nesting_is_refused() {
    let mut value = 0u32.to_le_bytes().to_vec();
    value.extend(0u64.to_le_bytes());
    for _ in 0..20_000 {
        let mut outer = 9u32.to_le_bytes().to_vec();
        outer.extend(1u64.to_le_bytes());
        outer.extend(&value);
        value = outer;
        if value.len() > 100_000 {
            break;
        }
    }
    assert!(matches!(
        Gguf::parse(&Writer::default().raw("key", 9, &value).bytes()),
        Err(Error::Invalid { .. })
    ));
}

#[test]
fn lies_about_tensors_are_named() {
    let message = |w: Writer| Gguf::parse(&w.bytes()).unwrap_err().to_string();
    let one = |shape: &[u64], kind, data: usize| Writer::default().tensor("t", shape, kind, vec![0; data]);
    assert!(message(one(&[1, 33], 3, 20)).contains("multiple of 32"));
    assert!(message(one(&[0], 0, 0)).contains("dimension of t"));
    assert!(message(one(&[1 << 40, 1 << 40], 0, 4)).contains("address space"));
    assert!(message(one(&[1 << 62, 2], 1, 4)).contains("address space"));
    let refused = message(one(&[8], 16, 4));
    assert!(refused.contains("IQ2_XXS") && refused.contains("IQ4_XS") && refused.contains("llama-quantize"));
    assert!(message(one(&[8], 4, 4)).contains("number 4"));
    assert!(message(one(&[1000], 0, 4)).contains("ends at byte"));
    assert!(message(one(&[1, 1, 1, 1, 1], 0, 4)).contains("dimension count"));
    assert!(message(one(&[1], 0, 4).tensor("t", &[1], 0, vec![0; 4])).contains("twice"));
    let long = "x".repeat(64);
    assert!(message(Writer::default().tensor(&long, &[1], 0, vec![0; 4])).contains("tensor name"));
    assert!(message(one(&[1], 0, 4).u32("general.alignment", 24)).contains("alignment"));
    assert!(message(one(&[1], 0, 4).u32("a", 1).u32("a", 2)).contains("twice"));
    assert!(message(one(&[1], 0, 4).raw("b", 7, &[2])).contains("boolean"));
    assert!(message(one(&[1], 0, 4).raw("b", 13, &[2])).contains("0 to 12"));
}

#[test]
fn other_files_and_versions_are_named() {
    let message = |bytes: &[u8]| Gguf::parse(bytes).unwrap_err().to_string();
    assert!(message(b"PK\x03\x04 and more").contains("GGUF"));
    assert!(message(b"").contains("ends at byte 0"));
    let version = |v: u32| [&b"GGUF"[..], &v.to_le_bytes(), &[0; 16]].concat();
    assert!(message(&version(1)).contains("2 or 3"));
    assert!(message(&version(3u32.swap_bytes())).contains("big-endian"));
    assert!(Gguf::parse(&version(2)).is_ok());
}

#[test]
fn overlapping_tensors_are_refused() {
    let w = Writer::default().tensor("a", &[16], 0, vec![0; 64]).tensor("b", &[16], 0, vec![0; 64]);
    let mut bytes = w.bytes();
    // The second offset, 64, is the last field of the last tensor info.
    let infos_end = 4 + 4 + 16 + 2 * (8 + 1 + 4 + 8 + 4 + 8);
    assert_eq!(bytes[infos_end - 8], 64);
    bytes[infos_end - 8] = 32;
    assert!(Gguf::parse(&bytes).unwrap_err().to_string().contains("disjoint"));
    bytes[infos_end - 8] = 65;
    assert!(Gguf::parse(&bytes).unwrap_err().to_string().contains("multiple of the alignment"));
}

#[test]
fn tensors_that_contradict_the_configuration_are_refused() {
    let error = |w: Writer| Model::from_gguf_bytes(w.bytes()).unwrap_err();
    let unknown = Writer::default().text("general.architecture", "mamba");
    assert!(matches!(error(unknown), Error::UnknownArchitecture { .. }));
    let mut bytes = tiny_llama().bytes();
    let at = bytes.windows(5).position(|w| w == b"ffn_u").unwrap();
    bytes[at] = b'g';
    assert!(
        matches!(Model::from_gguf_bytes(bytes), Err(Error::MissingTensor { name }) if name == "blk.0.ffn_up.weight")
    );
    let extra = tiny_llama().tensor_f32("rope_freqs.weight", &[3], |_| 1.0);
    assert!(matches!(error(extra), Error::Shape { .. }));
    let zero = tiny_llama().tensor_f32("rope_freqs.weight", &[4], |_| 0.0);
    assert!(matches!(error(zero), Error::Invalid { .. }));
    let scaled = tiny_llama().tensor_f32("rope_freqs.weight", &[4], |i| 1.0 + i as f32);
    let rope = Model::from_gguf_bytes(scaled.bytes()).unwrap().config.rope.unwrap();
    assert!((rope.frequencies(1)[1] - 0.1 / 2.0).abs() < 1e-15);
    let wrong = tiny_llama().tensor_f32("output.weight", &[8, 31], |_| 0.0);
    assert!(matches!(error(wrong), Error::Shape { .. }));
}

fn small_safetensors() -> Vec<u8> {
    use safetensors::tensor::{Dtype, TensorView, serialize};
    let data: Vec<u8> = (0..96).collect();
    let view =
        |dtype, shape: &[usize], len: usize| TensorView::new(dtype, shape.to_vec(), &data[..len]).unwrap();
    let tensors = [
        ("a", view(Dtype::F32, &[4, 6], 96)),
        ("b", view(Dtype::BF16, &[3], 6)),
        ("c", view(Dtype::F64, &[2, 2], 32)),
        ("d", view(Dtype::I64, &[1, 2], 16)),
        ("e", view(Dtype::F16, &[], 2)),
    ];
    serialize(tensors, None).unwrap()
}

#[test]
fn safetensors_of_every_float_width_are_read() {
    let tensors = Tensors::from_safetensors(&Arc::new(Source::Owned(small_safetensors()))).unwrap();
    assert_eq!(tensors.len(), 4);
    assert_eq!(tensors.get("a").unwrap().shape(), [4, 6]);
    assert_eq!(tensors.get("e").unwrap().shape(), [1]);
    let bytes: [u8; 8] = std::array::from_fn(|i| i as u8);
    assert_eq!(tensors.get("c").unwrap().to_f32()[0], f64::from_le_bytes(bytes) as f32);
    assert_eq!(tensors.get("b").unwrap().to_f32()[1], f32::from_bits(0x0302_0000));
}

#[test]
fn thousands_of_corrupted_safetensors_open_or_fail_without_panic() {
    let bytes = small_safetensors();
    let mut rng = StreamKey::new(2).named("safetensors").rng();
    let mut opened = 0;
    for _ in 0..5000 {
        let source = Arc::new(Source::Owned(corrupt(&bytes, &mut rng)));
        if let Ok(tensors) = Tensors::from_safetensors(&source) {
            opened += 1;
            let names: Vec<String> = tensors.names().map(str::to_owned).collect();
            names.iter().filter_map(|n| tensors.get(n)).for_each(|t| drop(t.to_f32()));
        }
    }
    assert!((50..4950).contains(&opened), "{opened}");
}

#[test]
fn thousands_of_corrupted_configurations_are_read_or_refused_without_panic() {
    let config =
        br#"{"model_type": "mistral", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
        "max_position_embeddings": 4096, "vocab_size": 1000, "sliding_window": 100, "eos_token_id": [1, 2],
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32, "beta_slow": 1}}"#;
    let index = br#"{"metadata": {"total_size": 12}, "weight_map": {"a": "model-00001-of-00002.safetensors",
        "b": "model-00002-of-00002.safetensors"}}"#;
    let mut rng = StreamKey::new(3).named("config").rng();
    let mut read = 0;
    for _ in 0..5000 {
        if let Ok(config) = ModelConfig::from_json(&corrupt(config, &mut rng)) {
            assert_eq!(config.windows.len(), config.n_layers);
            assert!(config.rope.is_some_and(|r| r.frequencies(100).iter().all(|f| f.is_finite())));
            read += 1;
        }
        let _ = shard_names(&corrupt(index, &mut rng));
    }
    assert!(read > 50, "{read}");
}

#[test]
fn an_index_cannot_name_files_outside_its_folder() {
    for name in ["../secret", "/etc/passwd", "..", "a\\\\b", ""] {
        let index = format!(r#"{{"weight_map": {{"a": "{name}"}}}}"#);
        assert!(shard_names(index.as_bytes()).is_err(), "{name}");
    }
    assert!(shard_names(br#"{"weight_map": {"a": 3}}"#).is_err());
    let two = br#"{"weight_map": {"a": "y", "b": "x", "c": "y"}}"#;
    assert_eq!(shard_names(two).unwrap(), ["x", "y"]);
}

#[test]
fn corrupted_tokeniser_files_are_read_or_refused_without_panic() {
    let json = br###"{"version": "1.0", "truncation": {"max_length": 4, "strategy": "LongestFirst", "stride": 0},
        "padding": null, "added_tokens": [{"id": 3, "special": true, "content": "[X]", "single_word": false,
        "lstrip": false, "rstrip": false, "normalized": false}], "normalizer": {"type": "BertNormalizer",
        "clean_text": true, "handle_chinese_chars": true, "strip_accents": null, "lowercase": true},
        "pre_tokenizer": {"type": "BertPreTokenizer"}, "post_processor": null, "decoder": {"type": "WordPiece",
        "prefix": "##", "cleanup": true}, "model": {"type": "WordPiece", "unk_token": "[U]",
        "continuing_subword_prefix": "##", "max_input_chars_per_word": 100,
        "vocab": {"[U]": 0, "a": 1, "##b": 2, "[X]": 3}}}"###;
    let tokenizer = Tokenizer::from_json(json).unwrap();
    assert_eq!(tokenizer.encode("ab a [X] c abb a a a", false).unwrap(), [1, 2, 1, 3, 0, 1, 2, 2, 1, 1, 1]);
    let mut rng = StreamKey::new(4).named("tokenizer").rng();
    for _ in 0..3000 {
        if let Ok(t) = Tokenizer::from_json(&corrupt(json, &mut rng)) {
            let ids = t.encode("ab a [X] c", true).unwrap_or_default();
            let _ = t.decode(&ids, true);
        }
    }
}

#[test]
fn tokenisers_that_multiply_texts_are_refused() {
    let read = |normalizer: String, after: String| {
        let json = format!(
            r#"{{"version": "1.0", "added_tokens": [], "normalizer": {normalizer}, "pre_tokenizer": null,
            "post_processor": {after}, "decoder": null, "model": {{"type": "WordLevel", "vocab": {{"a": 0}}, "unk_token": "a"}}}}"#
        );
        Tokenizer::from_json(json.as_bytes()).map(|t| t.encode("aaaa", false))
    };
    let open = |normalizer: String| read(normalizer, "null".to_owned());
    let replace = |pattern: &str, content: &str| {
        format!(r#"{{"type": "Replace", "pattern": {pattern}, "content": "{content}"}}"#)
    };
    let sequence =
        |steps: &[String]| format!(r#"{{"type": "Sequence", "normalizers": [{}]}}"#, steps.join(","));
    let (letter, long) = (r#"{"String": "a"}"#, "a".repeat(1000));
    for bomb in [
        sequence(&vec![replace(letter, &long); 4]),
        sequence(&vec![replace(letter, "aa"); 40]),
        sequence(&[sequence(&vec![replace(r#"{"Regex": ""}"#, "aaa"); 8])]),
        // Before every piece between two added tokens.
        format!(r#"{{"type": "Prepend", "prepend": "{long}"}}"#),
        // A table of 4 GiB behind four bytes.
        r#"{"type": "Precompiled", "precompiled_charsmap": "/////w=="}"#.to_owned(),
    ] {
        let error = open(bomb).unwrap_err().to_string();
        assert!(error.contains("at most"), "{error}");
    }
    // The text itself, again and again.
    let text = vec![r#"{"Sequence": {"id": "A", "type_id": 0}}"#; 100].join(",");
    let template = format!(
        r#"{{"type": "TemplateProcessing", "single": [{text}], "pair": [{text}], "special_tokens": {{}}}}"#
    );
    let error = read("null".to_owned(), template).unwrap_err().to_string();
    assert!(error.contains("at most"), "{error}");
    let spaces = [replace(r#"{"String": " "}"#, "\u{2581}"), replace(r#"{"Regex": " {2,}"}"#, "\u{2581}")];
    assert!(open(sequence(&spaces)).is_ok());
}
