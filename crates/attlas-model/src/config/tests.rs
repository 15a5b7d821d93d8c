//! Configurations that are read, and others that are refused.

use super::*;
use attlas_num::rope::Yarn;

fn with(json: &str, changes: &[(&str, &str)]) -> Vec<u8> {
    let mut value: Json = serde_json::from_str(json).unwrap();
    for (key, new) in changes {
        value[*key] = serde_json::from_str(new).unwrap();
    }
    value.to_string().into_bytes()
}

const LLAMA: &str = r#"{"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "max_position_embeddings": 131072, "vocab_size": 128256,
    "tie_word_embeddings": true, "hidden_act": "silu", "eos_token_id": [128001, 128008, 128009],
    "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192, "rope_type": "llama3"}}"#;

#[test]
fn the_configuration_of_llama_3_2_1b_is_read() {
    let c = ModelConfig::from_json(LLAMA.as_bytes()).unwrap();
    assert_eq!((c.n_heads, c.n_kv_heads, c.head_dim, c.group(), c.tied), (32, 8, 64, 4, true));
    assert_eq!(c.eos, [128001, 128008, 128009]);
    let rope = c.rope.unwrap();
    assert_eq!((rope.dim, rope.base, rope.layout), (64, 5e5, Layout::Half));
    assert!((rope.frequencies(1)[15] - 1.29054793e-3).abs() < 1e-11);
    assert!(c.windows.iter().all(Option::is_none));
}

#[test]
fn absent_keys_take_their_documented_defaults() {
    let json = with(
        LLAMA,
        &[
            ("rope_scaling", "null"),
            ("rope_theta", "null"),
            ("num_key_value_heads", "null"),
            ("head_dim", "null"),
            ("eos_token_id", "2"),
            ("tie_word_embeddings", "null"),
        ],
    );
    let c = ModelConfig::from_json(&json).unwrap();
    assert_eq!((c.n_kv_heads, c.head_dim, c.tied, c.eos), (32, 64, false, vec![2]));
    assert_eq!(c.rope.map(|r| (r.base, r.scaling)), Some((1e4, Scaling::None)));
}

#[test]
fn windows_follow_each_family_s_rule() {
    let mistral = with(LLAMA, &[("model_type", "\"mistral\""), ("sliding_window", "4096")]);
    assert_eq!(ModelConfig::from_json(&mistral).unwrap().windows, vec![Some(4096); 16]);
    let off = with(
        LLAMA,
        &[("model_type", "\"qwen2\""), ("sliding_window", "32768"), ("use_sliding_window", "false")],
    );
    assert_eq!(ModelConfig::from_json(&off).unwrap().windows, vec![None; 16]);
    let on = with(
        LLAMA,
        &[
            ("model_type", "\"qwen3\""),
            ("sliding_window", "512"),
            ("use_sliding_window", "true"),
            ("max_window_layers", "10"),
        ],
    );
    let windows = ModelConfig::from_json(&on).unwrap().windows;
    assert_eq!((windows[9], windows[10]), (None, Some(512)));
}

#[test]
fn rope_parameters_of_newer_files_are_read() {
    let json = with(
        LLAMA,
        &[
            ("rope_scaling", "null"),
            ("rope_theta", "null"),
            (
                "rope_parameters",
                r#"{"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0,
            "original_max_position_embeddings": 32768}"#,
            ),
        ],
    );
    let rope = ModelConfig::from_json(&json).unwrap().rope.unwrap();
    assert_eq!(
        rope,
        Rope { dim: 64, base: 1e6, layout: Layout::Half, scaling: Scaling::Yarn(Yarn::new(4.0, 32768.0)) }
    );
}

#[test]
fn what_cannot_be_honoured_is_refused_with_its_name() {
    let refused = |changes: &[(&str, &str)], word: &str| {
        let error = ModelConfig::from_json(&with(LLAMA, changes)).unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    };
    refused(&[("model_type", "\"mamba\"")], "llama, mistral, mixtral, qwen2, qwen2_moe, qwen3");
    refused(&[("hidden_size", "null")], "hidden_size");
    refused(&[("hidden_size", "-3")], "hidden_size");
    refused(&[("hidden_size", "\"many\"")], "hidden_size");
    refused(&[("num_key_value_heads", "7")], "key heads");
    refused(&[("num_key_value_heads", "0")], "key heads");
    refused(&[("num_hidden_layers", "4294967296000")], "layers");
    refused(&[("head_dim", "65")], "rotary");
    refused(&[("hidden_act", "\"gelu\"")], "gelu");
    refused(&[("rope_scaling", r#"{"rope_type": "longrope"}"#)], "original_max_position_embeddings");
    refused(
        &[(
            "rope_scaling",
            r#"{"rope_type": "longrope", "original_max_position_embeddings": 64,
            "short_factor": [1.0], "long_factor": [1.0]}"#,
        )],
        "short_factor",
    );
    refused(&[("rope_scaling", r#"{"rope_type": "spiral"}"#)], "spiral");
    refused(&[("rope_scaling", r#"{"rope_type": "linear", "factor": 0}"#)], "factor");
    refused(&[("eos_token_id", "\"</s>\"")], "eos_token_id");
    refused(&[("quantization_config", r#"{"quant_method": "gptq", "bits": 4}"#)], "gptq");
    assert!(ModelConfig::from_json(b"[]").is_err());
    assert!(ModelConfig::from_json(b"").is_err());
}
