//! The `config.json` of a model in factored form, without the section on factors.

use crate::config::{Architecture, ModelConfig};
use crate::error::{Error, Result};
use crate::model::Model;
use crate::weights::Weights;
use attlas_num::rope::{Rope, Scaling};
use serde_json::{Value as Json, json};

/// Returns a `config.json` that describes the model; an error if it cannot express some property.
pub(super) fn config_json(model: &Model) -> Result<Json> {
    let c = &model.config;
    let mut json = json!({
        "model_type": c.architecture.name(),
        "hidden_size": c.hidden,
        "intermediate_size": c.intermediate,
        "num_hidden_layers": c.n_layers,
        "num_attention_heads": c.n_heads,
        "num_key_value_heads": c.n_kv_heads,
        "head_dim": c.head_dim,
        "vocab_size": c.vocab,
        "max_position_embeddings": c.max_positions,
        "eos_token_id": c.eos,
    });
    match &model.weights {
        Weights::Encoder(_) => {
            json["hidden_act"] = "gelu".into();
            json["layer_norm_eps"] = c.norm_eps.into();
            json["type_vocab_size"] = c.token_types.into();
        }
        Weights::Decoder(w) => {
            json["hidden_act"] = "silu".into();
            json["rms_norm_eps"] = c.norm_eps.into();
            json["tie_word_embeddings"] = w.is_tied().into();
        }
    }
    if let Some(rope) = &c.rope {
        json["rope_theta"] = rope.base.into();
        json["rope_parameters"] = rope_json(rope, c.head_dim)?;
    }
    windows_json(c, &mut json)?;
    Ok(json)
}

fn rope_json(rope: &Rope, head_dim: usize) -> Result<Json> {
    let mut json = json!({"rope_type": "default", "rope_theta": rope.base});
    if rope.dim != head_dim {
        json["partial_rotary_factor"] = (rope.dim as f64 / head_dim as f64).into();
    }
    let mut set = |kind: &str, list: &[(&str, Json)]| {
        json["rope_type"] = kind.into();
        list.iter().filter(|(_, v)| !v.is_null()).for_each(|(k, v)| json[*k] = v.clone());
    };
    match &rope.scaling {
        Scaling::None => {}
        Scaling::Linear { factor } => set("linear", &[("factor", json!(factor))]),
        Scaling::Dynamic { factor, .. } => set("dynamic", &[("factor", json!(factor))]),
        Scaling::Llama3 { factor, low_freq, high_freq, original } => set(
            "llama3",
            &[
                ("factor", json!(factor)),
                ("low_freq_factor", json!(low_freq)),
                ("high_freq_factor", json!(high_freq)),
                ("original_max_position_embeddings", json!(original)),
            ],
        ),
        Scaling::Yarn(y) => set(
            "yarn",
            &[
                ("factor", json!(y.factor)),
                ("original_max_position_embeddings", json!(y.original)),
                ("beta_fast", json!(y.beta_fast)),
                ("beta_slow", json!(y.beta_slow)),
                ("mscale", json!(y.mscale)),
                ("mscale_all_dim", json!(y.mscale_all_dim)),
                ("attention_factor", json!(y.attention_factor)),
                ("truncate", json!(y.truncate)),
            ],
        ),
        Scaling::LongRope(long) => set(
            "longrope",
            &[
                ("short_factor", json!(long.short)),
                ("long_factor", json!(long.long)),
                ("original_max_position_embeddings", json!(long.original)),
                ("attention_factor", json!(long.magnitude)),
            ],
        ),
        Scaling::Divisors(_) => {
            return Err(Error::Unsupported { what: "writing rotary frequencies given one by one".into() });
        }
    }
    Ok(json)
}

fn windows_json(c: &ModelConfig, json: &mut Json) -> Result<()> {
    let mut widths = c.windows.iter().flatten();
    let Some(&width) = widths.next() else { return Ok(()) };
    let known = matches!(c.architecture, Architecture::Mistral | Architecture::Qwen2 | Architecture::Qwen3);
    if !known || widths.any(|w| *w != width) {
        return Err(Error::Unsupported { what: "writing windows of different widths".into() });
    }
    let kind = |w: &Option<usize>| if w.is_some() { "sliding_attention" } else { "full_attention" };
    json["sliding_window"] = width.into();
    json["use_sliding_window"] = true.into();
    json["layer_types"] = c.windows.iter().map(kind).collect::<Vec<_>>().into();
    Ok(())
}
