//! Configurations from `config.json`.

use super::*;
use attlas_num::rope::{LongRope, Yarn};
use serde_json::Value as Json;

impl ModelConfig {
    /// Parses the text of a `config.json`.
    pub fn from_json(text: &[u8]) -> Result<Self> {
        let json: Json = serde_json::from_slice(text)?;
        let keys = Keys(&json);
        let name = keys.text("model_type")?.ok_or_else(|| Error::MissingKey { key: "model_type".into() })?;
        let architecture = Architecture::find(name)?;
        let traits = architecture.traits();
        let quantised = keys.get("quantization_config").map(|q| q["quant_method"].as_str());
        let read = architecture == Architecture::GptOss && quantised == Some(Some("mxfp4"));
        if let Some(method) = quantised.filter(|_| !read) {
            let method = method.unwrap_or("of an unknown kind");
            let what = format!("weights quantised with {method:?}");
            let instead = "the folder before quantisation, or a GGUF file of the model".into();
            return Err(Error::UseInstead { what, instead });
        }
        let hidden = keys.need("hidden_size")?;
        let n_heads = keys.need("num_attention_heads")?;
        let n_layers = keys.need("num_hidden_layers")?;
        let latent = if architecture.is_latent() { Some(json_latent(&keys)?) } else { None };
        let rotated = keys.integer("qk_rope_head_dim")?.filter(|_| latent.is_some());
        let head_dim = match (latent, rotated, keys.integer("head_dim")?) {
            (Some(l), rotated, _) => {
                let missing = || Error::MissingKey { key: "qk_rope_head_dim".into() };
                l.nope.saturating_add(rotated.ok_or_else(missing)?)
            }
            (None, _, Some(d)) => d,
            (None, _, None) => divide(hidden, n_heads)?,
        };
        let max_positions = keys.need("max_position_embeddings")?;
        let activation = match keys.text("hidden_activation")? {
            Some(name) => Some(name),
            None => keys.text("hidden_act")?,
        };
        let expected = match traits.activation {
            _ if architecture.is_encoder() => "gelu",
            Activation::Gelu => "gelu_pytorch_tanh",
            _ => "silu",
        };
        if keys.boolean("use_bidirectional_attention")? == Some(true) {
            return Err(Error::Unsupported { what: "use_bidirectional_attention".into() });
        }
        if let Some(found) = activation.filter(|&a| a != expected) {
            return Err(Error::Unsupported { what: format!("the activation {found:?} in a {name} model") });
        }
        if let Some(kind) = keys.text("position_embedding_type")?.filter(|&k| k != "absolute") {
            return Err(Error::Unsupported { what: format!("position_embedding_type {kind:?}") });
        }
        let mut rope = if architecture.is_encoder() {
            None
        } else {
            Some(json_rope(&keys, rotated.unwrap_or(head_dim), max_positions, "full_attention")?)
        };
        let mut local_rope = match architecture {
            Architecture::Gemma3 => Some(json_rope(&keys, head_dim, max_positions, "sliding_attention")?),
            _ => None,
        };
        for rope in rope.iter_mut().chain(&mut local_rope) {
            let interleaved = latent.is_some() && keys.boolean("rope_interleave")?.unwrap_or(true);
            rope.layout = if interleaved { Layout::Interleaved } else { traits.layouts[0] };
        }
        let eps_key = if architecture.is_encoder() { "layer_norm_eps" } else { "rms_norm_eps" };
        let config = Self {
            architecture,
            hidden,
            intermediate: keys.need("intermediate_size")?,
            n_layers,
            n_heads,
            n_kv_heads: keys.integer("num_key_value_heads")?.unwrap_or(n_heads),
            head_dim,
            latent,
            vocab: keys.need("vocab_size")?,
            max_positions,
            norm_eps: keys.number(eps_key)?.ok_or_else(|| Error::MissingKey { key: eps_key.into() })?,
            rope,
            local_rope,
            unrotated: json_unrotated(&keys, traits.unrotated_step, n_layers.min(MAX_LAYERS))?,
            experts: json_experts(&keys, architecture, n_layers.min(MAX_LAYERS))?,
            multipliers: json_multipliers(&keys, architecture, head_dim, hidden)?,
            windows: json_windows(&keys, architecture, n_layers.min(MAX_LAYERS))?,
            activation: json_activation(&keys, traits.activation)?,
            attention_softcap: keys.number("attn_logit_softcapping")?,
            logit_softcap: keys.number("final_logit_softcapping")?.map(|c| c as f32),
            tied: keys.boolean("tie_word_embeddings")?.unwrap_or(false),
            token_types: if architecture.is_encoder() {
                keys.integer("type_vocab_size")?.unwrap_or(2)
            } else {
                0
            },
            eos: eos_ids(&json)?,
        };
        config.validate()?;
        Ok(config)
    }
}

/// A JSON object whose absent and null keys are the same.
struct Keys<'a>(&'a Json);

impl<'a> Keys<'a> {
    fn get(&self, key: &str) -> Option<&'a Json> {
        self.0.get(key).filter(|v| !v.is_null())
    }

    fn read<T>(&self, key: &str, expected: &str, f: impl Fn(&'a Json) -> Option<T>) -> Result<Option<T>> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => f(value).map(Some).ok_or_else(|| {
                let mut found = value.to_string();
                if found.len() > 60 {
                    found = format!("{} …", found.chars().take(60).collect::<String>());
                }
                Error::invalid(key, found, expected)
            }),
        }
    }

    fn integer(&self, key: &str) -> Result<Option<usize>> {
        self.read(key, "a non-negative integer", |v| v.as_u64().and_then(|n| usize::try_from(n).ok()))
    }

    fn need(&self, key: &str) -> Result<usize> {
        self.integer(key)?.ok_or_else(|| Error::MissingKey { key: key.to_owned() })
    }

    fn number(&self, key: &str) -> Result<Option<f64>> {
        self.read(key, "a finite number", |v| v.as_f64().filter(|x| x.is_finite()))
    }

    fn need_number(&self, key: &str) -> Result<f64> {
        self.number(key)?.ok_or_else(|| Error::MissingKey { key: key.to_owned() })
    }

    fn boolean(&self, key: &str) -> Result<Option<bool>> {
        self.read(key, "true or false", Json::as_bool)
    }

    fn text(&self, key: &str) -> Result<Option<&'a str>> {
        self.read(key, "a text", Json::as_str)
    }
}

fn json_activation(keys: &Keys<'_>, usual: Activation) -> Result<Activation> {
    let Activation::Clamped { alpha, limit } = usual else { return Ok(usual) };
    let read = |name: &str, usual: f32| {
        let x = keys.number(name)?.unwrap_or(usual.into());
        if x > 0.0 { Ok(x as f32) } else { Err(Error::invalid(name, x, "a positive number")) }
    };
    Ok(Activation::Clamped { alpha: read("swiglu_alpha", alpha)?, limit: read("swiglu_limit", limit)? })
}

/// Reads the rotary embedding. Newer files have all of it under `rope_parameters`, per kind of layer if kinds differ;
/// older ones have the base beside `rope_scaling`, which does not apply to layers with a window.
fn json_rope(keys: &Keys<'_>, head_dim: usize, max_positions: usize, kind: &str) -> Result<Rope> {
    let nested = keys.get("rope_parameters").or_else(|| keys.get("rope_scaling"));
    let nested = match nested.and_then(|n| n.get(kind)) {
        Some(own) => Some(own),
        None if kind == "sliding_attention" => {
            let base = keys.number("rope_local_base_freq")?.unwrap_or(10000.0);
            return Ok(Rope { dim: head_dim, base, layout: Layout::Half, scaling: Scaling::None });
        }
        None => nested,
    };
    let empty = Json::Null;
    let nested = Keys(nested.unwrap_or(&empty));
    let base = match nested.number("rope_theta")? {
        Some(base) => base,
        None => keys.number("rope_theta")?.unwrap_or(10000.0),
    };
    let partial = match nested.number("partial_rotary_factor")? {
        Some(f) => f,
        None => keys.number("partial_rotary_factor")?.unwrap_or(1.0),
    };
    if !(partial > 0.0 && partial <= 1.0) {
        return Err(Error::invalid("partial_rotary_factor", partial, "more than 0, at most 1"));
    }
    let kind = match nested.text("rope_type")? {
        Some(kind) => Some(kind),
        None => nested.text("type")?,
    };
    let original = || nested.number("original_max_position_embeddings");
    let scaling = match kind {
        None | Some("default") => Scaling::None,
        Some("linear") => Scaling::Linear { factor: nested.need_number("factor")? },
        Some("dynamic") => {
            Scaling::Dynamic { factor: nested.need_number("factor")?, max_positions: max_positions as f64 }
        }
        Some("llama3") => Scaling::Llama3 {
            factor: nested.need_number("factor")?,
            low_freq: nested.need_number("low_freq_factor")?,
            high_freq: nested.need_number("high_freq_factor")?,
            original: nested.need_number("original_max_position_embeddings")?,
        },
        Some("longrope" | "su") => {
            let list = |name: &str| {
                let found = nested.get(name).ok_or_else(|| Error::MissingKey { key: name.to_owned() })?;
                let numbers: Option<Vec<f64>> =
                    found.as_array().and_then(|a| a.iter().map(Json::as_f64).collect());
                numbers.ok_or_else(|| Error::invalid(name, "something else", "a list of numbers"))
            };
            let key = "original_max_position_embeddings";
            let original = match keys.number(key)? {
                Some(original) => Some(original),
                None => original()?,
            };
            let original = original.ok_or_else(|| Error::MissingKey { key: key.into() })?;
            let usual = LongRope::usual_magnitude(original, max_positions as f64);
            Scaling::LongRope(LongRope {
                short: list("short_factor")?,
                long: list("long_factor")?,
                original,
                magnitude: nested.number("attention_factor")?.unwrap_or(usual),
            })
        }
        Some("yarn") => {
            let usual = Yarn::new(nested.need_number("factor")?, original()?.unwrap_or(max_positions as f64));
            Scaling::Yarn(Yarn {
                beta_fast: nested.number("beta_fast")?.unwrap_or(usual.beta_fast),
                beta_slow: nested.number("beta_slow")?.unwrap_or(usual.beta_slow),
                mscale: nested.number("mscale")?,
                mscale_all_dim: nested.number("mscale_all_dim")?,
                attention_factor: nested.number("attention_factor")?,
                truncate: nested.boolean("truncate")?.unwrap_or(true),
                ..usual
            })
        }
        Some(other) => {
            let expected = "default, linear, dynamic, llama3, longrope or yarn";
            return Err(Error::invalid("rope_type", other, expected));
        }
    };
    Ok(Rope { dim: (head_dim as f64 * partial) as usize, base, layout: Layout::Half, scaling })
}

/// Reads the sizes of latent attention.
fn json_latent(keys: &Keys<'_>) -> Result<LatentConfig> {
    Ok(LatentConfig {
        rank: keys.need("kv_lora_rank")?,
        rank_q: keys.integer("q_lora_rank")?,
        nope: keys.need("qk_nope_head_dim")?,
        v_dim: keys.need("v_head_dim")?,
    })
}

/// Reads the choice of experts, if layers have any.
fn json_experts(
    keys: &Keys<'_>,
    architecture: Architecture,
    n_layers: usize,
) -> Result<Option<ExpertConfig>> {
    if architecture.traits().experts.is_none() {
        return Ok(None);
    }
    let names = ["num_local_experts", "num_experts", "n_routed_experts"];
    let mut count = None;
    for name in names {
        count = count.or(keys.integer(name)?);
    }
    let Some(count) = count.filter(|&n| n > 0) else { return Ok(None) };
    let flag = |name: &str, usual: bool| Ok::<bool, Error>(keys.boolean(name)?.unwrap_or(usual));
    let width = match keys.integer("moe_intermediate_size")? {
        Some(width) => width,
        None => keys.need("intermediate_size")?,
    };
    let mut e = ExpertConfig {
        count,
        per_token: keys.integer("num_experts_per_tok")?.unwrap_or(0),
        width,
        shared_width: 0,
        scores: Scores::Softmax,
        normalised: true,
        factor: 1.0,
        groups: 1,
        groups_per_token: 1,
        layers: vec![true; n_layers],
    };
    match architecture {
        Architecture::Qwen2Moe | Architecture::Qwen3Moe => {
            e.normalised = flag("norm_topk_prob", false)?;
            if architecture == Architecture::Qwen2Moe {
                e.shared_width = keys.need("shared_expert_intermediate_size")?;
            }
            let step = keys.integer("decoder_sparse_step")?.unwrap_or(1).max(1);
            e.layers = (1..=n_layers).map(|i| i.is_multiple_of(step)).collect();
            for dense in keys.get("mlp_only_layers").and_then(Json::as_array).into_iter().flatten() {
                let layer = dense.as_u64().and_then(|l| e.layers.get_mut(l as usize));
                *layer.ok_or_else(|| Error::invalid("mlp_only_layers", dense, "numbers of layers"))? = false;
            }
        }
        Architecture::DeepseekV2 | Architecture::DeepseekV3 => {
            let shared = keys.integer("n_shared_experts")?.unwrap_or(0);
            e.shared_width = shared.saturating_mul(width);
            e.factor = keys.number("routed_scaling_factor")?.unwrap_or(1.0);
            // Earlier files omit it if every layer has experts.
            let dense = keys.integer("first_k_dense_replace")?.unwrap_or(0);
            let step = keys.integer("moe_layer_freq")?.unwrap_or(1).max(1);
            e.layers = (0..n_layers).map(|i| i >= dense && i.is_multiple_of(step)).collect();
            let grouped = if architecture == Architecture::DeepseekV3 {
                (e.scores, e.normalised) = (Scores::Sigmoid, flag("norm_topk_prob", true)?);
                true
            } else {
                e.normalised = flag("norm_topk_prob", false)?;
                match keys.text("topk_method")?.unwrap_or("greedy") {
                    "greedy" => false,
                    "group_limited_greedy" => true,
                    other => {
                        let expected = "greedy or group_limited_greedy";
                        return Err(Error::invalid("topk_method", format!("{other:?}"), expected));
                    }
                }
            };
            if grouped {
                e.groups = keys.integer("n_group")?.unwrap_or(1);
                e.groups_per_token = keys.integer("topk_group")?.unwrap_or(1);
            }
        }
        _ => {}
    }
    Ok(e.layers.contains(&true).then_some(e))
}

fn json_multipliers(
    keys: &Keys<'_>,
    architecture: Architecture,
    head_dim: usize,
    hidden: usize,
) -> Result<Multipliers> {
    if architecture.traits().scaled_embedding {
        let divisor = keys.number("query_pre_attn_scalar")?.unwrap_or(head_dim as f64);
        return Ok(Multipliers {
            embedding: (hidden as f64).sqrt() as f32,
            query: (head_dim as f64 / divisor).sqrt() as f32,
            ..Multipliers::default()
        });
    }
    if architecture != Architecture::Granite {
        return Ok(Multipliers::default());
    }
    let number = |name: &str| Ok::<f64, Error>(keys.number(name)?.unwrap_or(1.0));
    Ok(Multipliers {
        embedding: number("embedding_multiplier")? as f32,
        residual: number("residual_multiplier")? as f32,
        query: (number("attention_multiplier")? * (head_dim as f64).sqrt()) as f32,
        logit: (1.0 / number("logits_scaling")?) as f32,
    })
}

fn json_unrotated(keys: &Keys<'_>, usual: usize, n_layers: usize) -> Result<Vec<usize>> {
    if usual == 0 {
        return Ok(Vec::new());
    }
    let Some(list) = keys.get("no_rope_layers").and_then(Json::as_array) else {
        return Ok(unrotated(keys.integer("no_rope_layer_interval")?.unwrap_or(usual), n_layers));
    };
    if list.len() < n_layers {
        return Err(Error::invalid("the length of no_rope_layers", list.len(), n_layers.to_string()));
    }
    // Despite its name, a one stands for a layer that rotates.
    Ok((0..n_layers).filter(|&l| list[l] == 0).collect())
}

/// Returns the window of each layer.
fn json_windows(keys: &Keys<'_>, architecture: Architecture, n_layers: usize) -> Result<Vec<Option<usize>>> {
    let width = keys.integer("sliding_window")?.filter(|&w| w > 0);
    let always = architecture.traits().windows == Windows::Always;
    let used = match architecture.traits().windows {
        Windows::Never => false,
        Windows::Always => true,
        // These have a width even if windows are switched off.
        Windows::Switched => keys.boolean("use_sliding_window")?.unwrap_or(false),
        Windows::Alternating(_) => true,
    };
    let Some(width) = width.filter(|_| used) else { return Ok(vec![None; n_layers]) };
    if let Some(types) = keys.get("layer_types").and_then(Json::as_array) {
        if types.len() != n_layers {
            return Err(Error::invalid("the length of layer_types", types.len(), n_layers.to_string()));
        }
        return Ok(types.iter().map(|t| (t == "sliding_attention").then_some(width)).collect());
    }
    if let Windows::Alternating(step) = architecture.traits().windows {
        let step = keys.integer("sliding_window_pattern")?.unwrap_or(step).max(1);
        return Ok((1..=n_layers).map(|l| (!l.is_multiple_of(step)).then_some(width)).collect());
    }
    let first = if always { 0 } else { keys.integer("max_window_layers")?.unwrap_or(28) };
    Ok((0..n_layers).map(|i| (i >= first).then_some(width)).collect())
}
