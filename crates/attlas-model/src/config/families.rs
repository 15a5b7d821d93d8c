//! The families of models and their differences, as data.

use crate::error::{Error, Result};
use attlas_num::rope::Layout;

/// The supported families of models.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    /// Llama 2 and 3, SmolLM2, and other models of that name.
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
    /// SmolLM 3: Llama with some layers without rotation.
    SmolLm3,
    /// GLM 4: norms before and after, partial rotation of neighbouring pairs.
    Glm4,
    /// Gemma 2: norms before and after, capped logits, every other layer with a window.
    Gemma2,
    /// Gemma 3, text: norms of heads, two rotary bases, most layers with a window.
    Gemma3,
    /// gpt-oss: experts of four bits, an extra logit per head, every other layer with a window.
    GptOss,
    /// Encoders with learned positions.
    Bert,
    /// Latent attention, with or without experts.
    DeepseekV2,
    /// Latent attention, with or without experts.
    DeepseekV3,
}

/// `model_type` of a DeepSeek-V3 whose feed-forward layers have biases: a separate name, because the class of
/// transformers would ignore them.
pub(crate) const MLP_BIAS_NAME: &str = "deepseek_v3_mlp_bias";

/// Gate of the feed-forward layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    /// $z / (1 + e^{-z})$.
    Silu,
    /// $z\,\Phi(z)$, by its usual approximation with a hyperbolic tangent.
    Gelu,
    /// $\min(z, l) / (1 + e^{-\alpha \min(z, l)})$, which gates $1 + u$ with $u$ clamped to $\pm l$.
    Clamped {
        /// Slope of the sigmoid.
        alpha: f32,
        /// Clamping limit of both parts.
        limit: f32,
    },
}

/// The traits of an architecture, as data.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Traits {
    /// `model_type` in `config.json`.
    pub(crate) name: &'static str,
    /// `general.architecture` in GGUF files; `None` if llama.cpp has no name of its own for it.
    pub(crate) gguf: Option<&'static str>,
    /// True if queries, keys and values must have biases.
    pub(crate) biased: bool,
    pub(crate) head_norm: HeadNorm,
    pub(crate) norms: Norms,
    /// True if queries, keys and values are rows of one matrix; the next field says the same of gate and up.
    pub(crate) fused_qkv: bool,
    pub(crate) fused_gate_up: bool,
    /// Layout of rotated pairs in a Hugging Face folder, and in a GGUF file.
    pub(crate) layouts: [Layout; 2],
    pub(crate) windows: Windows,
    /// Period of the layers that do not rotate; 0 if all do.
    pub(crate) unrotated_step: usize,
    pub(crate) experts: Option<ExpertNames>,
    /// Activation of feed-forward layers.
    pub(crate) activation: Activation,
    /// True if Hugging Face folders store the weights of norms minus one.
    pub(crate) norms_beyond_one: bool,
    /// True if embeddings are multiplied by the root of the width.
    pub(crate) scaled_embedding: bool,
    /// True if every head has an extra logit beside those of the keys.
    pub(crate) sinks: bool,
}

/// Norms of queries and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HeadNorm {
    None,
    /// Of each head separately.
    EachHead,
    /// Of all heads together.
    AllHeads,
}

/// Positions of a layer's norms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Norms {
    /// Before attention and before the feed-forward layer.
    Before,
    /// After each of them.
    After,
    /// Before and after each of them.
    Around,
    /// As `Around`, with the names of Gemma.
    Sandwich,
    /// As `Before`, with the names of gpt-oss.
    BeforeEach,
}

/// Conditions under which the key `sliding_window` applies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Windows {
    Never,
    Always,
    /// If `use_sliding_window` is set.
    Switched,
    /// In all layers but every n-th.
    Alternating(usize),
}

/// A family's names for its experts in a Hugging Face folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ExpertNames {
    /// Prefix of the experts.
    pub(crate) prefix: &'static str,
    /// The router.
    pub(crate) router: &'static str,
    /// Gate, up and down of an expert.
    pub(crate) parts: [&'static str; 3],
    /// The expert of every token.
    pub(crate) shared: &'static str,
}

const MLP_EXPERTS: ExpertNames = ExpertNames {
    prefix: "mlp",
    router: "mlp.gate",
    parts: ["gate_proj", "up_proj", "down_proj"],
    shared: "mlp.shared_experts",
};

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
        activation: Activation::Silu,
        norms_beyond_one: false,
        scaled_embedding: false,
        sinks: false,
    };
    /// As Llama, without permuted rows.
    const IN_PLACE: Self = Self { layouts: [Layout::Half, Layout::Half], ..Self::LLAMA };
}

impl Architecture {
    /// Every architecture.
    pub const ALL: [Architecture; 18] = [
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
        Self::Gemma2,
        Self::Gemma3,
        Self::GptOss,
        Self::Bert,
        Self::DeepseekV2,
        Self::DeepseekV3,
    ];

    /// Returns its traits.
    pub(crate) const fn traits(self) -> Traits {
        let llama = Traits::LLAMA;
        let in_place = Traits::IN_PLACE;
        match self {
            Self::Llama => llama,
            Self::Mistral => {
                Traits { name: "mistral", gguf: Some("mistral"), windows: Windows::Always, ..llama }
            }
            // In GGUF files it is a Llama with experts.
            Self::Mixtral => Traits {
                name: "mixtral",
                gguf: None,
                windows: Windows::Always,
                experts: Some(ExpertNames {
                    prefix: "block_sparse_moe",
                    router: "block_sparse_moe.gate",
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
            Self::Gemma2 => Traits {
                name: "gemma2",
                gguf: Some("gemma2"),
                norms: Norms::Sandwich,
                windows: Windows::Alternating(2),
                activation: Activation::Gelu,
                norms_beyond_one: true,
                scaled_embedding: true,
                ..in_place
            },
            Self::Gemma3 => Traits {
                name: "gemma3_text",
                gguf: Some("gemma3"),
                head_norm: HeadNorm::EachHead,
                norms: Norms::Sandwich,
                windows: Windows::Alternating(6),
                activation: Activation::Gelu,
                norms_beyond_one: true,
                scaled_embedding: true,
                ..in_place
            },
            Self::GptOss => Traits {
                name: "gpt_oss",
                gguf: Some("gpt-oss"),
                biased: true,
                norms: Norms::BeforeEach,
                windows: Windows::Alternating(2),
                experts: Some(ExpertNames { router: "mlp.router", ..MLP_EXPERTS }),
                activation: Activation::Clamped { alpha: 1.702, limit: 7.0 },
                sinks: true,
                ..in_place
            },
            Self::Bert => Traits { name: "bert", gguf: Some("bert"), biased: true, ..in_place },
            Self::DeepseekV2 => Traits {
                name: "deepseek_v2",
                gguf: Some("deepseek2"),
                experts: Some(MLP_EXPERTS),
                ..in_place
            },
            Self::DeepseekV3 => {
                Traits { name: "deepseek_v3", gguf: None, experts: Some(MLP_EXPERTS), ..in_place }
            }
        }
    }

    /// Returns its name in `config.json`, which most GGUF files use, too.
    pub fn name(self) -> &'static str {
        self.traits().name
    }

    /// Returns the architecture called `name` in `config.json`.
    pub fn find(name: &str) -> Result<Self> {
        if name == MLP_BIAS_NAME {
            return Ok(Self::DeepseekV3);
        }
        Self::ALL.into_iter().find(|a| a.name() == name).ok_or_else(|| {
            if name == "gemma3" {
                let what = "a Gemma 3 folder with a vision tower (gemma3)".into();
                let instead = "a folder of its text model (gemma3_text), or a GGUF file".into();
                return Error::UseInstead { what, instead };
            }
            Error::UnknownArchitecture { found: name.to_owned(), known: Self::ALL.map(Self::name).join(", ") }
        })
    }

    /// Returns the architecture called `name` in a GGUF file.
    pub fn find_gguf(name: &str) -> Result<Self> {
        let named = |a: &Self| a.traits().gguf;
        Self::ALL.into_iter().find(|a| named(a) == Some(name)).ok_or_else(|| {
            let known: Vec<&str> = Self::ALL.iter().filter_map(named).collect();
            Error::UnknownArchitecture { found: name.to_owned(), known: known.join(", ") }
        })
    }

    /// Returns true if it is an encoder: no causal mask, no rotary embedding.
    pub fn is_encoder(self) -> bool {
        self == Self::Bert
    }

    /// Returns true if its layers attend through a latent.
    pub fn is_latent(self) -> bool {
        matches!(self, Self::DeepseekV2 | Self::DeepseekV3)
    }
}
