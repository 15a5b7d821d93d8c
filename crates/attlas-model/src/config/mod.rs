//! What a model is made of: sizes, norms, rotary embedding, windows; from GGUF metadata or `config.json`.

use crate::error::{Error, Result};
use crate::gguf::{Gguf, Value};
use attlas_num::rope::{Layout, Rope, Scaling, Yarn};
use serde_json::Value as Json;

/// The families of models that are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    /// Llama 2 and 3, SmolLM2, and everything else that calls itself so.
    Llama,
    /// Llama with a sliding window.
    Mistral,
    /// Llama whose feed-forward layers are experts.
    Mixtral,
    /// Llama with biases on queries, keys and values.
    Qwen2,
    /// Qwen 2 with experts, one of them for every token.
    Qwen2Moe,
    /// Llama with a norm on each query and key head.
    Qwen3,
    /// Qwen 3 with experts.
    Qwen3Moe,
    /// Phi 3 and 4: projections in one matrix, partial rotation.
    Phi3,
    /// OLMo 2: norms after attention and feed-forward layer, and over all queries and all keys.
    Olmo2,
    /// Granite 3: Llama with four multipliers.
    Granite,
    /// SmolLM 3: Llama with layers that do not rotate.
    SmolLm3,
    /// GLM 4: norms before and after, partial rotation of neighbouring pairs.
    Glm4,
    /// Encoders with learned positions.
    Bert,
    /// Latent attention, with or without experts.
    DeepseekV2,
    /// Latent attention, with or without experts.
    DeepseekV3,
}

/// What distinguishes an architecture, as data.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Traits {
    /// `model_type` in `config.json`.
    pub(crate) name: &'static str,
    /// `general.architecture` in GGUF files; `None` where llama.cpp has no name of its own for it.
    pub(crate) gguf: Option<&'static str>,
    /// Whether queries, keys and values must have biases.
    pub(crate) biased: bool,
    pub(crate) head_norm: HeadNorm,
    pub(crate) norms: Norms,
    /// Queries, keys and values are rows of one matrix, and so are gate and up.
    pub(crate) fused_qkv: bool,
    pub(crate) fused_gate_up: bool,
    /// Where the parts of a rotated pair lie in a Hugging Face folder, and in a GGUF file.
    pub(crate) layouts: [Layout; 2],
    pub(crate) windows: Windows,
    /// Every so many layers one does not rotate; 0 if all do.
    pub(crate) unrotated_step: usize,
    pub(crate) experts: Option<ExpertNames>,
}

/// Norms of queries and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HeadNorm {
    None,
    /// Of each head by itself.
    EachHead,
    /// Of all heads together.
    AllHeads,
}

/// Where a layer has norms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Norms {
    /// Before attention and before the feed-forward layer.
    Before,
    /// After each of them.
    After,
    /// Before and after each of them.
    Around,
}

/// When the key `sliding_window` counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Windows {
    Never,
    Always,
    /// If `use_sliding_window` is set.
    Switched,
}

/// What a family calls its experts in a Hugging Face folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ExpertNames {
    /// What stands before the router and the experts.
    pub(crate) prefix: &'static str,
    /// Gate, up and down of an expert.
    pub(crate) parts: [&'static str; 3],
    /// The expert of every token.
    pub(crate) shared: &'static str,
}

const MLP_EXPERTS: ExpertNames =
    ExpertNames { prefix: "mlp", parts: ["gate_proj", "up_proj", "down_proj"], shared: "mlp.shared_experts" };

impl Traits {
    const LLAMA: Self = Self {
        name: "llama",
        gguf: Some("llama"),
        biased: false,
        head_norm: HeadNorm::None,
        norms: Norms::Before,
        fused_qkv: false,
        fused_gate_up: false,
        // llama.cpp permutes the rows of queries and keys when it writes a file.
        layouts: [Layout::Half, Layout::Interleaved],
        windows: Windows::Never,
        unrotated_step: 0,
        experts: None,
    };
    /// As Llama, with rows as they are.
    const IN_PLACE: Self = Self { layouts: [Layout::Half, Layout::Half], ..Self::LLAMA };
}

impl Architecture {
    /// Every architecture.
    pub const ALL: [Architecture; 15] = [
        Self::Llama,
        Self::Mistral,
        Self::Mixtral,
        Self::Qwen2,
        Self::Qwen2Moe,
        Self::Qwen3,
        Self::Qwen3Moe,
        Self::Phi3,
        Self::Olmo2,
        Self::Granite,
        Self::SmolLm3,
        Self::Glm4,
        Self::Bert,
        Self::DeepseekV2,
        Self::DeepseekV3,
    ];

    /// What distinguishes it.
    pub(crate) const fn traits(self) -> Traits {
        let llama = Traits::LLAMA;
        let in_place = Traits::IN_PLACE;
        match self {
            Self::Llama => llama,
            Self::Mistral => {
                Traits { name: "mistral", gguf: Some("mistral"), windows: Windows::Always, ..llama }
            }
            // In GGUF files it is a Llama that has experts.
            Self::Mixtral => Traits {
                name: "mixtral",
                gguf: None,
                windows: Windows::Always,
                experts: Some(ExpertNames {
                    prefix: "block_sparse_moe",
                    parts: ["w1", "w3", "w2"],
                    ..MLP_EXPERTS
                }),
                ..llama
            },
            Self::Qwen2 => Traits {
                name: "qwen2",
                gguf: Some("qwen2"),
                biased: true,
                windows: Windows::Switched,
                ..in_place
            },
            Self::Qwen2Moe => Traits {
                name: "qwen2_moe",
                gguf: Some("qwen2moe"),
                biased: true,
                windows: Windows::Switched,
                experts: Some(ExpertNames { shared: "mlp.shared_expert", ..MLP_EXPERTS }),
                ..in_place
            },
            Self::Qwen3 => Traits {
                name: "qwen3",
                gguf: Some("qwen3"),
                head_norm: HeadNorm::EachHead,
                windows: Windows::Switched,
                ..in_place
            },
            Self::Qwen3Moe => Traits {
                name: "qwen3_moe",
                gguf: Some("qwen3moe"),
                head_norm: HeadNorm::EachHead,
                windows: Windows::Switched,
                experts: Some(MLP_EXPERTS),
                ..in_place
            },
            Self::Phi3 => Traits {
                name: "phi3",
                gguf: Some("phi3"),
                fused_qkv: true,
                fused_gate_up: true,
                windows: Windows::Always,
                ..in_place
            },
            Self::Olmo2 => Traits {
                name: "olmo2",
                gguf: Some("olmo2"),
                head_norm: HeadNorm::AllHeads,
                norms: Norms::After,
                ..in_place
            },
            Self::Granite => Traits { name: "granite", gguf: Some("granite"), ..llama },
            Self::SmolLm3 => Traits {
                name: "smollm3",
                gguf: Some("smollm3"),
                windows: Windows::Switched,
                unrotated_step: 4,
                ..llama
            },
            Self::Glm4 => Traits {
                name: "glm4",
                gguf: Some("glm4"),
                norms: Norms::Around,
                fused_gate_up: true,
                layouts: [Layout::Interleaved, Layout::Interleaved],
                ..llama
            },
            Self::Bert => Traits { name: "bert", gguf: Some("bert"), biased: true, ..in_place },
            Self::DeepseekV2 => {
                Traits { name: "deepseek_v2", gguf: None, experts: Some(MLP_EXPERTS), ..in_place }
            }
            Self::DeepseekV3 => {
                Traits { name: "deepseek_v3", gguf: None, experts: Some(MLP_EXPERTS), ..in_place }
            }
        }
    }

    /// Its name in `config.json`, which most GGUF files use, too.
    pub fn name(self) -> &'static str {
        self.traits().name
    }

    /// The architecture of that name in `config.json`.
    pub fn find(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|a| a.name() == name).ok_or_else(|| Error::UnknownArchitecture {
            found: name.to_owned(),
            known: Self::ALL.map(Self::name).join(", "),
        })
    }

    /// The architecture of that name in a GGUF file.
    pub fn find_gguf(name: &str) -> Result<Self> {
        let named = |a: &Self| a.traits().gguf;
        Self::ALL.into_iter().find(|a| named(a) == Some(name)).ok_or_else(|| {
            if name == "deepseek2" {
                let what = "latent attention in a GGUF file (deepseek2)".into();
                return Error::UseInstead { what, instead: "the model's Hugging Face folder".into() };
            }
            let known: Vec<&str> = Self::ALL.iter().filter_map(named).collect();
            Error::UnknownArchitecture { found: name.to_owned(), known: known.join(", ") }
        })
    }

    /// Whether it is an encoder: no causal mask, no rotary embedding.
    pub fn is_encoder(self) -> bool {
        self == Self::Bert
    }

    /// Whether its layers attend through a latent.
    pub fn is_latent(self) -> bool {
        matches!(self, Self::DeepseekV2 | Self::DeepseekV3)
    }
}

/// How tokens choose experts, and how wide these are.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertConfig {
    /// Experts of a layer.
    pub count: usize,
    /// How many of them each token passes through.
    pub per_token: usize,
    /// Width of each.
    pub width: usize,
    /// Width of the expert of every token; 0 if there is none.
    pub shared_width: usize,
    /// From the router's logits to scores.
    pub scores: Scores,
    /// Whether the weights of the chosen experts are divided by their sum.
    pub normalised: bool,
    /// What the weights are multiplied with.
    pub factor: f64,
    /// Experts are in so many groups,
    pub groups: usize,
    /// of which a token chooses among these many.
    pub groups_per_token: usize,
    /// For each layer, whether it has experts.
    pub layers: Vec<bool>,
}

/// From the logits of a router to the scores of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scores {
    /// They sum to one. A group is as good as its best expert.
    Softmax,
    /// Each by itself. A group is as good as its two best experts together.
    Sigmoid,
}

/// Constants that some families multiply with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Multipliers {
    /// Of embeddings.
    pub embedding: f32,
    /// Of what a layer adds to the residual stream.
    pub residual: f32,
    /// Of queries: what the scale of the softmax has beyond one over the root of the head's width.
    pub query: f32,
    /// Of logits.
    pub logit: f32,
}

impl Default for Multipliers {
    fn default() -> Self {
        Self { embedding: 1.0, residual: 1.0, query: 1.0, logit: 1.0 }
    }
}

/// Sizes of latent attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LatentConfig {
    /// Width of the latent of keys and values.
    pub rank: usize,
    /// Width of the latent of queries, where there is one.
    pub rank_q: Option<usize>,
    /// Features of a head that are not rotated; the rotated ones follow them.
    pub nope: usize,
    /// Width of a head's values.
    pub v_dim: usize,
}

/// The description of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Which family.
    pub architecture: Architecture,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the feed-forward layer.
    pub intermediate: usize,
    /// Number of layers.
    pub n_layers: usize,
    /// Query heads.
    pub n_heads: usize,
    /// Key and value heads; divides `n_heads`.
    pub n_kv_heads: usize,
    /// Width of a head: of its queries and keys.
    pub head_dim: usize,
    /// Sizes of latent attention, where the family has it.
    pub latent: Option<LatentConfig>,
    /// Number of tokens known.
    pub vocab: usize,
    /// Longest context the model was made for.
    pub max_positions: usize,
    /// Added under the root of every norm.
    pub norm_eps: f64,
    /// Rotary embedding of queries and keys; encoders have none.
    pub rope: Option<Rope>,
    /// Layers whose queries and keys are not rotated, in order.
    pub unrotated: Vec<usize>,
    /// How experts are chosen, where there are any.
    pub experts: Option<ExpertConfig>,
    /// Constants of the family.
    pub multipliers: Multipliers,
    /// For each layer, how many keys back a query sees, itself included; `None` is all.
    pub windows: Vec<Option<usize>>,
    /// Whether the output projection is the embedding, as the configuration says; a checkpoint without an
    /// output tensor is tied in any case.
    pub tied: bool,
    /// Token types of an encoder; 0 for decoders.
    pub token_types: usize,
    /// Tokens that end a text.
    pub eos: Vec<u32>,
}

/// Sizes above this are refused: products of any three still fit in 64 bits.
const MAX_SIZE: usize = 1 << 21;
/// Contexts more times longer than what a model was made for are refused.
const MAX_EXTENSION: usize = 64;
/// More layers than this are refused before anything is set aside for each of them.
const MAX_LAYERS: usize = 1 << 12;

impl ModelConfig {
    /// From the metadata of a GGUF file.
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
        let traits = architecture.traits();
        let hidden = need("embedding_length")?;
        let n_heads = per_layer(gguf, &key("attention.head_count"))?
            .ok_or_else(|| missing(&key("attention.head_count")))?;
        let n_kv_heads = per_layer(gguf, &key("attention.head_count_kv"))?.unwrap_or(n_heads);
        let head_dim = match gguf.integer(&key("attention.key_length"))? {
            Some(d) => d,
            None => divide(hidden, n_heads)?,
        };
        if let Some(v) = gguf.integer(&key("attention.value_length"))?
            && v != head_dim
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
                layout: traits.layouts[1],
                scaling: gguf_scaling(gguf, &key)?,
            })
        };
        let window = gguf.integer(&key("attention.sliding_window"))?.filter(|&w| w > 0);
        let eos = gguf.integer("tokenizer.ggml.eos_token_id")?;
        let intermediate = need("feed_forward_length")?;
        let experts = if n_experts == 0 {
            None
        } else {
            let number = |suffix: &str| gguf.integer(&key(suffix));
            let width = number("expert_feed_forward_length")?.unwrap_or(intermediate);
            let shared = if architecture == Architecture::Qwen2Moe { intermediate } else { 0 };
            Some(ExpertConfig {
                count: n_experts,
                per_token: need("expert_used_count")?,
                width,
                shared_width: number("expert_shared_feed_forward_length")?.unwrap_or(shared),
                scores: Scores::Softmax,
                // llama.cpp has no key for these families.
                normalised: architecture != Architecture::Qwen2Moe,
                factor: gguf.number(&key("expert_weights_scale"))?.filter(|&f| f != 0.0).unwrap_or(1.0),
                groups: 1,
                groups_per_token: 1,
                layers: vec![true; n_layers.min(MAX_LAYERS)],
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
            Multipliers::default()
        };
        let config = Self {
            architecture,
            hidden,
            intermediate,
            n_layers,
            n_heads,
            n_kv_heads,
            head_dim,
            latent: None,
            vocab,
            max_positions: need("context_length")?,
            norm_eps: gguf.number(&eps_key)?.ok_or_else(|| missing(&eps_key))?,
            rope,
            unrotated: unrotated(traits.unrotated_step, n_layers.min(MAX_LAYERS)),
            experts,
            multipliers,
            windows: vec![window; n_layers.min(MAX_LAYERS)],
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

    /// From the text of a `config.json`.
    pub fn from_json(text: &[u8]) -> Result<Self> {
        let json: Json = serde_json::from_slice(text)?;
        let keys = Keys(&json);
        let name = keys.text("model_type")?.ok_or_else(|| Error::MissingKey { key: "model_type".into() })?;
        let architecture = Architecture::find(name)?;
        let traits = architecture.traits();
        if let Some(quantised) = keys.get("quantization_config") {
            let method = quantised["quant_method"].as_str().unwrap_or("of an unknown kind");
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
        let activation = keys.text("hidden_act")?;
        let expected = if architecture.is_encoder() { "gelu" } else { "silu" };
        if let Some(found) = activation.filter(|&a| a != expected) {
            return Err(Error::Unsupported { what: format!("the activation {found:?} in a {name} model") });
        }
        if let Some(kind) = keys.text("position_embedding_type")?.filter(|&k| k != "absolute") {
            return Err(Error::Unsupported { what: format!("position_embedding_type {kind:?}") });
        }
        let mut rope = if architecture.is_encoder() {
            None
        } else {
            Some(json_rope(&keys, rotated.unwrap_or(head_dim), max_positions)?)
        };
        if let Some(rope) = &mut rope {
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
            unrotated: json_unrotated(&keys, traits.unrotated_step, n_layers.min(MAX_LAYERS))?,
            experts: json_experts(&keys, architecture, n_layers.min(MAX_LAYERS))?,
            multipliers: json_multipliers(&keys, architecture, head_dim)?,
            windows: json_windows(&keys, architecture, n_layers.min(MAX_LAYERS))?,
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

    /// Longest context that can be run. Where frequencies follow the length (dynamic NTK, YaRN), that is beyond the one
    /// the model was made for.
    pub fn longest_context(&self) -> usize {
        let extends = match self.rope.as_ref().map(|r| &r.scaling) {
            Some(Scaling::Yarn(_)) => true,
            // Latent attention rotates by a table of its own, which is made once.
            Some(Scaling::Dynamic { .. }) => self.latent.is_none(),
            _ => false,
        };
        if extends { self.max_positions.saturating_mul(MAX_EXTENSION) } else { self.max_positions }
    }

    /// Whether layers are those of Llama: norms before attention and before one feed-forward layer, nothing multiplied,
    /// every layer rotated.
    pub fn is_plain(&self) -> bool {
        let t = self.architecture.traits();
        let multiplied = self.multipliers != Multipliers::default();
        t.norms == Norms::Before && self.experts.is_none() && self.unrotated.is_empty() && !multiplied
    }

    /// Query heads per key head.
    pub fn group(&self) -> usize {
        self.n_heads / self.n_kv_heads
    }

    /// Replaces the end tokens by those of a `generation_config.json`, if it names any.
    pub fn set_eos_from_json(&mut self, text: &[u8]) -> Result<()> {
        let ids = eos_ids(&serde_json::from_slice(text)?)?;
        if !ids.is_empty() {
            self.eos = ids;
        }
        Ok(())
    }

    fn validate(&self) -> Result<()> {
        let sizes = [
            ("the hidden size", self.hidden),
            ("the feed-forward size", self.intermediate),
            ("the number of layers", self.n_layers),
            ("the number of heads", self.n_heads),
            ("the number of key heads", self.n_kv_heads),
            ("the head dimension", self.head_dim),
            ("the vocabulary size", self.vocab),
            ("the context length", self.max_positions),
        ];
        for (what, size) in sizes {
            let limit = match what {
                "the context length" => 1 << 32,
                "the number of layers" => MAX_LAYERS,
                _ => MAX_SIZE,
            };
            if size == 0 || size > limit {
                return Err(Error::invalid(what, size, format!("1 to {limit}")));
            }
        }
        if let Some(l) = &self.latent {
            let sizes = [
                ("the rank of the latent", l.rank),
                ("the rank of the queries", l.rank_q.unwrap_or(1)),
                ("the width of values", l.v_dim),
            ];
            for (what, size) in sizes {
                if size == 0 || size > MAX_SIZE {
                    return Err(Error::invalid(what, size, format!("1 to {MAX_SIZE}")));
                }
            }
            if self.n_kv_heads != self.n_heads {
                let expected = format!("{}, as latent attention has no groups", self.n_heads);
                return Err(Error::invalid("the number of key heads", self.n_kv_heads, expected));
            }
        }
        if let Some(e) = &self.experts {
            let sizes = [
                ("the number of experts", e.count, 1..=1 << 16),
                ("the number of experts of a token", e.per_token, 1..=e.count),
                ("the width of an expert", e.width, 1..=MAX_SIZE),
                ("the width of the expert of every token", e.shared_width, 0..=MAX_SIZE),
                ("the number of groups of experts", e.groups, 1..=e.count),
                ("the number of groups of a token", e.groups_per_token, 1..=e.groups),
            ];
            for (what, found, expected) in sizes {
                if !expected.contains(&found) {
                    let expected = format!("{} to {}", expected.start(), expected.end());
                    return Err(Error::invalid(what, found, expected));
                }
            }
            let room = e.groups_per_token * (e.count / e.groups);
            if !e.count.is_multiple_of(e.groups) || e.per_token > room {
                let expected = format!("groups of equal size that hold {} experts", e.per_token);
                return Err(Error::invalid("the number of groups of experts", e.groups, expected));
            }
            if !(e.factor.is_finite() && e.factor > 0.0) {
                return Err(Error::invalid("the factor of experts", e.factor, "a positive number"));
            }
        }
        let m = &self.multipliers;
        for (what, x) in [
            ("the multiplier of embeddings", m.embedding),
            ("the multiplier of the residual stream", m.residual),
            ("the multiplier of attention", m.query),
            ("the multiplier of logits", m.logit),
        ] {
            if !(x.is_finite() && x > 0.0) {
                return Err(Error::invalid(what, x, "a positive number"));
            }
        }
        if !self.n_heads.is_multiple_of(self.n_kv_heads) {
            return Err(Error::invalid(
                "the number of key heads",
                self.n_kv_heads,
                format!("a divisor of {}", self.n_heads),
            ));
        }
        if !(self.norm_eps > 0.0 && self.norm_eps < 1.0) {
            return Err(Error::invalid("the norm epsilon", self.norm_eps, "between 0 and 1"));
        }
        if let Some(rope) = &self.rope {
            if rope.dim == 0 || rope.dim > self.head_dim || !rope.dim.is_multiple_of(2) {
                return Err(Error::invalid(
                    "the rotary dimension",
                    rope.dim,
                    format!("even, at most {}", self.head_dim),
                ));
            }
            if !(rope.base > 1.0 && rope.base.is_finite()) {
                return Err(Error::invalid("the rotary base", rope.base, "more than 1"));
            }
            validate_scaling(&rope.scaling)?;
        }
        Ok(())
    }
}

fn validate_scaling(scaling: &Scaling) -> Result<()> {
    let positive = |what: &str, x: f64| {
        if x > 0.0 && x.is_finite() {
            Ok(())
        } else {
            Err(Error::invalid(format!("rope scaling: {what}"), x, "a positive number"))
        }
    };
    match scaling {
        Scaling::None => Ok(()),
        Scaling::Linear { factor } => positive("factor", *factor),
        Scaling::Dynamic { factor, max_positions } => {
            positive("factor", *factor)?;
            positive("max_position_embeddings", *max_positions)
        }
        Scaling::Llama3 { factor, low_freq, high_freq, original } => {
            positive("factor", *factor)?;
            positive("low_freq_factor", *low_freq)?;
            positive("original_max_position_embeddings", *original)?;
            positive("high_freq_factor − low_freq_factor", high_freq - low_freq)
        }
        Scaling::Yarn(yarn) => {
            positive("factor", yarn.factor)?;
            positive("beta_slow", yarn.beta_slow)?;
            positive("beta_fast − beta_slow", yarn.beta_fast - yarn.beta_slow)?;
            positive("original_max_position_embeddings", yarn.original)?;
            positive("the magnitude", yarn.magnitude())
        }
        Scaling::Divisors(divisors) => divisors.iter().try_for_each(|&d| positive("a frequency divisor", d)),
    }
}

fn divide(hidden: usize, n_heads: usize) -> Result<usize> {
    if n_heads == 0 || !hidden.is_multiple_of(n_heads) {
        return Err(Error::invalid("the number of heads", n_heads, format!("a divisor of {hidden}")));
    }
    Ok(hidden / n_heads)
}

/// A number that a file gives once or for each layer.
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

fn gguf_scaling(gguf: &Gguf, key: &impl Fn(&str) -> String) -> Result<Scaling> {
    let number = |suffix: &str| gguf.number(&key(&format!("rope.scaling.{suffix}")));
    let factor = number("factor")?;
    let need = || factor.ok_or_else(|| Error::MissingKey { key: key("rope.scaling.factor") });
    match gguf.text(&key("rope.scaling.type"))? {
        None if factor.is_some_and(|f| f != 1.0) => Ok(Scaling::Linear { factor: need()? }),
        None | Some("none") => Ok(Scaling::None),
        Some("linear") => Ok(Scaling::Linear { factor: need()? }),
        Some("yarn") => {
            let original = number("original_context_length")?
                .ok_or_else(|| Error::MissingKey { key: key("rope.scaling.original_context_length") })?;
            let mut yarn = Yarn::new(need()?, original);
            yarn.beta_fast = number("yarn_beta_fast")?.unwrap_or(yarn.beta_fast);
            yarn.beta_slow = number("yarn_beta_slow")?.unwrap_or(yarn.beta_slow);
            yarn.attention_factor =
                number("attn_factor")?.map(|f| f * Yarn::new(yarn.factor, original).magnitude());
            Ok(Scaling::Yarn(yarn))
        }
        Some(other) => Err(Error::invalid(key("rope.scaling.type"), other, "none, linear or yarn")),
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

/// Newer files keep everything rotary under `rope_parameters`, older ones the base beside `rope_scaling`.
fn json_rope(keys: &Keys<'_>, head_dim: usize, max_positions: usize) -> Result<Rope> {
    let nested = keys.get("rope_parameters").or_else(|| keys.get("rope_scaling"));
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
            return Err(Error::invalid("rope_type", other, "default, linear, dynamic, llama3 or yarn"));
        }
    };
    Ok(Rope { dim: (head_dim as f64 * partial) as usize, base, layout: Layout::Half, scaling })
}

/// Sizes of latent attention.
fn json_latent(keys: &Keys<'_>) -> Result<LatentConfig> {
    Ok(LatentConfig {
        rank: keys.need("kv_lora_rank")?,
        rank_q: keys.integer("q_lora_rank")?,
        nope: keys.need("qk_nope_head_dim")?,
        v_dim: keys.need("v_head_dim")?,
    })
}

/// How experts are chosen, where a layer has any.
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
            // Earlier files leave it out where every layer has experts.
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

fn json_multipliers(keys: &Keys<'_>, architecture: Architecture, head_dim: usize) -> Result<Multipliers> {
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

/// Every layer whose number, counted from one, is a multiple of `step`; none if that is 0.
fn unrotated(step: usize, n_layers: usize) -> Vec<usize> {
    (0..n_layers).filter(|l| step > 0 && (l + 1).is_multiple_of(step)).collect()
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

/// Which layers look through a window.
fn json_windows(keys: &Keys<'_>, architecture: Architecture, n_layers: usize) -> Result<Vec<Option<usize>>> {
    let width = keys.integer("sliding_window")?.filter(|&w| w > 0);
    let always = architecture.traits().windows == Windows::Always;
    let used = match architecture.traits().windows {
        Windows::Never => false,
        Windows::Always => true,
        // These have a width even where it is switched off.
        Windows::Switched => keys.boolean("use_sliding_window")?.unwrap_or(false),
    };
    let Some(width) = width.filter(|_| used) else { return Ok(vec![None; n_layers]) };
    if let Some(types) = keys.get("layer_types").and_then(Json::as_array) {
        if types.len() != n_layers {
            return Err(Error::invalid("the length of layer_types", types.len(), n_layers.to_string()));
        }
        return Ok(types.iter().map(|t| (t == "sliding_attention").then_some(width)).collect());
    }
    let first = if always { 0 } else { keys.integer("max_window_layers")?.unwrap_or(28) };
    Ok((0..n_layers).map(|i| (i >= first).then_some(width)).collect())
}

/// One end token or several.
fn eos_ids(json: &Json) -> Result<Vec<u32>> {
    let Some(value) = json.get("eos_token_id").filter(|v| !v.is_null()) else { return Ok(Vec::new()) };
    let list = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
    list.iter()
        .map(|v| {
            v.as_u64()
                .and_then(|n| u32::try_from(n).ok())
                .ok_or_else(|| Error::invalid("eos_token_id", v, "a token id or a list of them"))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

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
            Rope {
                dim: 64,
                base: 1e6,
                layout: Layout::Half,
                scaling: Scaling::Yarn(Yarn::new(4.0, 32768.0))
            }
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
        refused(&[("rope_scaling", r#"{"rope_type": "longrope"}"#)], "longrope");
        refused(&[("rope_scaling", r#"{"rope_type": "linear", "factor": 0}"#)], "factor");
        refused(&[("eos_token_id", "\"</s>\"")], "eos_token_id");
        refused(&[("quantization_config", r#"{"quant_method": "gptq", "bits": 4}"#)], "gptq");
        assert!(ModelConfig::from_json(b"[]").is_err());
        assert!(ModelConfig::from_json(b"").is_err());
    }
}
