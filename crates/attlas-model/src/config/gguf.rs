//! Configurations from the metadata of GGUF files.

use super::*;
use crate::checkpoint::Tensors;
use crate::gguf::{Gguf, Value};
use attlas_num::rope::{LongRope, Yarn};

impl ModelConfig {
    /// Reads the configuration from the metadata of a GGUF file.
    pub fn from_gguf(gguf: &Gguf) -> Result<Self> {
        let missing = |key: &str| Error::MissingKey { key: key.to_owned() };
        let name = gguf.text("general.architecture")?.ok_or_else(|| missing("general.architecture"))?;
        let mut architecture = Architecture::find_gguf(name)?;
        let key = |suffix: &str| format!("{name}.{suffix}");
        let need = |suffix: &str| gguf.integer(&key(suffix))?.ok_or_else(|| missing(&key(suffix)));

        let n_experts = gguf.integer(&key("expert_count"))?.unwrap_or(0);
        if n_experts > 0 && architecture == Architecture::Llama {
            architecture = Architecture::Mixtral;
        }
        if n_experts > 0 && architecture.traits().experts.is_none() {
            return Err(Error::Unsupported { what: format!("a mixture of experts in a {name} model") });
        }
        let gating = gguf.integer(&key("expert_gating_func"))?;
        if architecture == Architecture::DeepseekV2 && gating == Some(2) {
            architecture = Architecture::DeepseekV3;
        }
        let traits = architecture.traits();
        let hidden = need("embedding_length")?;
        let n_heads = per_layer(gguf, &key("attention.head_count"))?
            .ok_or_else(|| missing(&key("attention.head_count")))?;
        let n_kv_heads = match per_layer(gguf, &key("attention.head_count_kv"))? {
            // Counted as one in latent attention, whose heads share what is cached.
            Some(n) if !architecture.is_latent() => n,
            _ => n_heads,
        };
        // Newer files with latent attention store the widths of heads under separate names.
        let width = |suffix: &str| match gguf.integer(&key(&format!("attention.{suffix}_mla")))? {
            Some(d) if architecture.is_latent() => Ok(Some(d)),
            _ => gguf.integer(&key(&format!("attention.{suffix}"))),
        };
        let head_dim = match width("key_length")? {
            Some(d) => d,
            None => divide(hidden, n_heads)?,
        };
        let v_dim = width("value_length")?;
        if let Some(v) = v_dim
            && v != head_dim
            && !architecture.is_latent()
        {
            return Err(Error::Unsupported {
                what: format!("values of width {v} with keys of width {head_dim}"),
            });
        }
        let vocab = match gguf.integer(&key("vocab_size"))? {
            Some(v) => v,
            None => {
                gguf.texts("tokenizer.ggml.tokens")?.ok_or_else(|| missing("tokenizer.ggml.tokens"))?.len()
            }
        };
        let n_layers = need("block_count")?;
        let eps_key = if architecture.is_encoder() { "layer_norm_epsilon" } else { "layer_norm_rms_epsilon" };
        let eps_key = key(&format!("attention.{eps_key}"));
        let rope = if architecture.is_encoder() {
            None
        } else {
            Some(Rope {
                dim: gguf.integer(&key("rope.dimension_count"))?.unwrap_or(head_dim),
                base: gguf.number(&key("rope.freq_base"))?.unwrap_or(10000.0),
                layout: if architecture.is_latent() { Layout::Interleaved } else { traits.layouts[1] },
                scaling: gguf_scaling(gguf, &key, architecture)?,
            })
        };
        let local_rope = match &rope {
            Some(rope) if architecture == Architecture::Gemma3 => {
                let base = gguf.number(&key("rope.freq_base_swa"))?.unwrap_or(10000.0);
                Some(Rope { base, scaling: Scaling::None, ..rope.clone() })
            }
            _ => None,
        };
        let latent = if architecture.is_latent() {
            let rotated = rope.as_ref().map_or(0, |r| r.dim);
            let nope = head_dim.checked_sub(rotated).ok_or_else(|| {
                Error::invalid(key("rope.dimension_count"), rotated, format!("at most {head_dim}"))
            })?;
            Some(LatentConfig {
                rank: need("attention.kv_lora_rank")?,
                rank_q: gguf.integer(&key("attention.q_lora_rank"))?.filter(|&r| r > 0),
                nope,
                v_dim: v_dim.ok_or_else(|| missing(&key("attention.value_length")))?,
            })
        } else {
            None
        };
        let window = gguf.integer(&key("attention.sliding_window"))?.filter(|&w| w > 0);
        let eos = gguf.integer("tokenizer.ggml.eos_token_id")?;
        let intermediate = need("feed_forward_length")?;
        let experts = if n_experts == 0 {
            None
        } else {
            let number = |suffix: &str| gguf.integer(&key(suffix));
            let width = number("expert_feed_forward_length")?.unwrap_or(intermediate);
            let shared = match architecture {
                Architecture::Qwen2Moe => intermediate,
                _ if architecture.is_latent() => {
                    number("expert_shared_count")?.unwrap_or(0).saturating_mul(width)
                }
                _ => 0,
            };
            let dense = number("leading_dense_block_count")?.unwrap_or(0);
            let normalised = gguf.boolean(&key("expert_weights_norm"))?;
            Some(ExpertConfig {
                count: n_experts,
                per_token: need("expert_used_count")?,
                width,
                shared_width: number("expert_shared_feed_forward_length")?.unwrap_or(shared),
                scores: if architecture == Architecture::DeepseekV3 {
                    Scores::Sigmoid
                } else {
                    Scores::Softmax
                },
                // llama.cpp has no key for these families.
                normalised: match normalised {
                    Some(normalised) if architecture.is_latent() => normalised,
                    _ => !architecture.is_latent() && architecture != Architecture::Qwen2Moe,
                },
                factor: gguf.number(&key("expert_weights_scale"))?.filter(|&f| f != 0.0).unwrap_or(1.0),
                groups: number("expert_group_count")?.unwrap_or(1).max(1),
                groups_per_token: number("expert_group_used_count")?.unwrap_or(1).max(1),
                layers: (0..n_layers.min(MAX_LAYERS)).map(|l| l >= dense).collect(),
            })
        };
        let number = |suffix: &str| Ok::<f64, Error>(gguf.number(&key(suffix))?.unwrap_or(1.0));
        let granite = architecture == Architecture::Granite;
        let multipliers = if granite {
            let scale = gguf.number(&key("attention.scale"))?;
            Multipliers {
                embedding: number("embedding_scale")? as f32,
                residual: number("residual_scale")? as f32,
                query: scale.map_or(1.0, |s| s * (head_dim as f64).sqrt()) as f32,
                logit: (1.0 / number("logit_scale")?) as f32,
            }
        } else {
            let gemma = traits.scaled_embedding;
            let query = match gguf.number(&key("attention.scale"))? {
                Some(scale) if gemma => scale * (head_dim as f64).sqrt(),
                // The two models with 27 billion parameters use the width of the residual stream over the number of
                // heads.
                None if gemma
                    && matches!(
                        (architecture, n_layers),
                        (Architecture::Gemma2, 46) | (Architecture::Gemma3, 62)
                    ) =>
                {
                    (head_dim as f64 / (hidden as f64 / n_heads as f64)).sqrt()
                }
                _ => 1.0,
            };
            Multipliers {
                embedding: if gemma { (hidden as f64).sqrt() as f32 } else { 1.0 },
                query: query as f32,
                ..Multipliers::default()
            }
        };
        let windows = match traits.windows {
            Windows::Alternating(step) => {
                let width = window.ok_or_else(|| missing(&key("attention.sliding_window")))?;
                let windowed =
                    window_pattern(gguf, &key("attention.sliding_window_pattern"), step, n_layers)?;
                windowed.into_iter().map(|w| w.then_some(width)).collect()
            }
            _ => vec![window; n_layers.min(MAX_LAYERS)],
        };
        let gemma2 = architecture == Architecture::Gemma2;
        let cap = |name: &str, usual: f64| {
            let found = gguf.number(&key(&format!("{name}_logit_softcapping")))?;
            Ok::<_, Error>(found.or(gemma2.then_some(usual)).filter(|&c| c != 0.0))
        };
        let config = Self {
            architecture,
            hidden,
            intermediate,
            n_layers,
            n_heads,
            n_kv_heads,
            head_dim,
            latent,
            vocab,
            max_positions: need("context_length")?,
            norm_eps: gguf.number(&eps_key)?.ok_or_else(|| missing(&eps_key))?,
            rope,
            local_rope,
            unrotated: unrotated(traits.unrotated_step, n_layers.min(MAX_LAYERS)),
            experts,
            multipliers,
            windows,
            activation: traits.activation,
            attention_softcap: cap("attn", 50.0)?,
            logit_softcap: cap("final", 30.0)?.map(|c| c as f32),
            tied: false,
            token_types: if architecture.is_encoder() {
                gguf.integer("tokenizer.ggml.token_type_count")?.unwrap_or(2)
            } else {
                0
            },
            eos: eos.and_then(|id| u32::try_from(id).ok()).into_iter().collect(),
        };
        config.validate()?;
        Ok(config)
    }
}

impl ModelConfig {
    /// Reads the two sets of LongRoPE divisors from their tensors, if there are any.
    pub(crate) fn set_long_rope(&mut self, gguf: &Gguf, tensors: &Tensors) -> Result<()> {
        let Some(rope) = &mut self.rope else { return Ok(()) };
        let list = |name: &str| -> Option<Vec<f64>> {
            Some(tensors.get(name)?.to_f32().into_iter().map(f64::from).collect())
        };
        let names = ["rope_factors_short.weight", "rope_factors_long.weight"];
        let (short, long) = match (list(names[0]), list(names[1])) {
            (None, None) => return Ok(()),
            (Some(short), Some(long)) => (short, long),
            (short, _) => {
                let name = names[usize::from(short.is_some())].to_owned();
                return Err(Error::MissingTensor { name });
            }
        };
        let name = gguf.text("general.architecture")?.unwrap_or_default();
        let key = format!("{name}.rope.scaling.original_context_length");
        let original = gguf.number(&key)?.ok_or(Error::MissingKey { key })?;
        let usual = LongRope::usual_magnitude(original, self.max_positions as f64);
        let magnitude = gguf.number(&format!("{name}.rope.scaling.attn_factor"))?.unwrap_or(usual);
        rope.scaling = Scaling::LongRope(LongRope { short, long, original, magnitude });
        self.validate()
    }
}

/// Reads a number that a file gives once or per layer.
fn per_layer(gguf: &Gguf, key: &str) -> Result<Option<usize>> {
    let Some(Value::Array(array)) = gguf.get(key) else { return gguf.integer(key) };
    let all = array.to_integers().unwrap_or_default();
    match all.split_first() {
        Some((first, rest)) if rest.iter().all(|n| n == first) => match usize::try_from(*first) {
            Ok(n) => Ok(Some(n)),
            Err(_) => Err(Error::invalid(key, first, "a non-negative integer")),
        },
        Some(_) => Err(Error::Unsupported { what: format!("{key} that differs between layers") }),
        None => Err(Error::invalid(key, "an empty or mistyped array", "integers")),
    }
}

/// Returns for each layer true if it has a window: all but every n-th, unless the file lists them.
fn window_pattern(gguf: &Gguf, key: &str, step: usize, n_layers: usize) -> Result<Vec<bool>> {
    let n_layers = n_layers.min(MAX_LAYERS);
    let every = |step: usize| (1..=n_layers).map(|l| step == 0 || !l.is_multiple_of(step)).collect();
    let Some(Value::Array(array)) = gguf.get(key) else {
        return Ok(every(gguf.integer(key)?.unwrap_or(step)));
    };
    let list: Vec<bool> = array.to_integers().unwrap_or_default().into_iter().map(|n| n != 0).collect();
    if list.len() != n_layers {
        return Err(Error::invalid(format!("the length of {key}"), list.len(), n_layers.to_string()));
    }
    Ok(list)
}

fn gguf_scaling(gguf: &Gguf, key: &impl Fn(&str) -> String, architecture: Architecture) -> Result<Scaling> {
    let number = |suffix: &str| gguf.number(&key(&format!("rope.scaling.{suffix}")));
    let factor = number("factor")?;
    let need = || factor.ok_or_else(|| Error::MissingKey { key: key("rope.scaling.factor") });
    match gguf.text(&key("rope.scaling.type"))? {
        None if factor.is_some_and(|f| f != 1.0) => Ok(Scaling::Linear { factor: need()? }),
        // The two sets of divisors of LongRoPE are tensors, read with the model.
        None | Some("none" | "longrope") => Ok(Scaling::None),
        Some("linear") => Ok(Scaling::Linear { factor: need()? }),
        Some("yarn") => {
            let original = number("original_context_length")?
                .ok_or_else(|| Error::MissingKey { key: key("rope.scaling.original_context_length") })?;
            let mut yarn = Yarn::new(need()?, original);
            yarn.beta_fast = number("yarn_beta_fast")?.unwrap_or(yarn.beta_fast);
            yarn.beta_slow = number("yarn_beta_slow")?.unwrap_or(yarn.beta_slow);
            yarn.attention_factor =
                number("attn_factor")?.map(|f| f * Yarn::new(yarn.factor, original).magnitude());
            if architecture.is_latent() {
                // DeepSeek applies the magnitude only in the scale of the softmax.
                let slope = number("yarn_log_multiplier")?.map_or(0.0, |m| 10.0 * m);
                (yarn.mscale, yarn.mscale_all_dim) = (Some(slope), Some(slope));
                yarn.attention_factor = None;
            }
            // As in the original model; llama.cpp rounds.
            yarn.truncate = architecture != Architecture::GptOss;
            Ok(Scaling::Yarn(yarn))
        }
        Some(other) => Err(Error::invalid(key("rope.scaling.type"), other, "none, linear or yarn")),
    }
}
