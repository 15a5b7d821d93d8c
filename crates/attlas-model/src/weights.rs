//! The tensors of a model by role, whatever file they came from and whatever that file calls them.

use crate::checkpoint::Tensors;
use crate::config::{Architecture, ModelConfig};
use crate::error::{Error, Result};
use crate::factored::Attention;
use crate::linear::Linear;
use crate::tensor::Tensor;
use attlas::Mat;
use attlas::layer::{Dense, Layer, LayerShape};
use attlas::layers::latent::{self, Latent};
use attlas_num::rope::{Rope, Scaling};
use std::sync::Arc;

/// Whose tensor names a checkpoint uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Naming {
    /// llama.cpp's.
    Gguf,
    /// Hugging Face's.
    HuggingFace,
}

/// The weights of a model.
#[derive(Clone, Debug)]
pub enum Weights {
    /// Llama and its relatives.
    Decoder(DecoderWeights),
    /// BERT.
    Encoder(EncoderWeights),
}

/// The weights of a causal language model.
#[derive(Clone, Debug)]
pub struct DecoderWeights {
    /// `[vocab, hidden]`.
    pub embedding: Tensor,
    /// One after another.
    pub layers: Vec<DecoderLayer>,
    /// Weight of the last norm.
    pub final_norm: Vec<f32>,
    /// From hidden states to logits; shares the embedding's storage where the model is tied.
    pub output: Linear,
}

/// One layer of a [`DecoderWeights`].
#[derive(Clone, Debug)]
pub struct DecoderLayer {
    /// Norm before attention.
    pub attention_norm: Vec<f32>,
    /// Queries: `n_heads · head_dim` outputs. With a latent of queries, from that.
    pub q: Linear,
    /// Keys: `n_kv_heads · head_dim` outputs. In latent attention, the latent and the shared key.
    pub k: Linear,
    /// Values: `n_kv_heads · head_dim` outputs. In latent attention, keys and values from the latent.
    pub v: Linear,
    /// From concatenated heads back to the residual stream.
    pub o: Linear,
    /// Norm of each query head, where the family has one.
    pub q_norm: Option<Vec<f32>>,
    /// Norm of each key head, where the family has one.
    pub k_norm: Option<Vec<f32>>,
    /// Latent attention made of the maps above, where the family has it.
    pub latent: Option<Arc<LatentAttention>>,
    /// Attention of another kind, where the checkpoint has it; the maps above are its own then, as far as it has them.
    pub attention: Option<Attention>,
    /// Norm before the feed-forward layer.
    pub ffn_norm: Vec<f32>,
    /// Gate of the feed-forward layer.
    pub gate: Linear,
    /// What is gated.
    pub up: Linear,
    /// Back to the residual stream.
    pub down: Linear,
}

impl DecoderLayer {
    /// The layer that attends as a whole, where attention is not made of methods.
    pub fn whole(&self) -> Option<&dyn Layer> {
        let latent = self.latent.as_deref().map(|l| l.layer() as &dyn Layer);
        latent.or_else(|| self.attention.as_ref().map(|a| &*a.layer))
    }
}

/// The weights of an encoder.
#[derive(Clone, Debug)]
pub struct EncoderWeights {
    /// `[vocab, hidden]`.
    pub word_embedding: Tensor,
    /// `[max_positions, hidden]`.
    pub position_embedding: Tensor,
    /// `[token_types, hidden]`.
    pub type_embedding: Tensor,
    /// Norm of the summed embeddings.
    pub embedding_norm: LayerNorm,
    /// One after another.
    pub layers: Vec<EncoderLayer>,
}

/// One layer of an [`EncoderWeights`].
#[derive(Clone, Debug)]
pub struct EncoderLayer {
    /// Queries.
    pub q: Linear,
    /// Keys.
    pub k: Linear,
    /// Values.
    pub v: Linear,
    /// From concatenated heads back to the residual stream.
    pub o: Linear,
    /// Norm after attention.
    pub attention_norm: LayerNorm,
    /// Into the feed-forward layer.
    pub up: Linear,
    /// Out of it.
    pub down: Linear,
    /// Norm after the feed-forward layer.
    pub output_norm: LayerNorm,
    /// Attention of another kind, where the checkpoint has it; the maps above are its own then, as far as it has them.
    pub attention: Option<Attention>,
}

/// Weight and bias of a layer norm.
#[derive(Clone, Debug)]
pub struct LayerNorm {
    /// Multiplied with the normalised value.
    pub weight: Vec<f32>,
    /// Added to it.
    pub bias: Vec<f32>,
}

impl Weights {
    /// Finds and checks every tensor that `config` asks for.
    pub fn collect(config: &ModelConfig, tensors: &Tensors, naming: Naming) -> Result<Self> {
        let finder = Finder { tensors, prefix: prefix(tensors, config, naming) };
        if config.architecture.is_encoder() {
            Ok(Self::Encoder(encoder(config, &finder, naming)?))
        } else {
            Ok(Self::Decoder(decoder(config, &finder, naming)?))
        }
    }
}

impl Weights {
    /// Whether a layer attends in another way than by the heads that the configuration describes.
    pub fn has_other_attention(&self) -> bool {
        match self {
            Self::Decoder(w) => w.layers.iter().any(|l| l.whole().is_some()),
            Self::Encoder(w) => w.layers.iter().any(|l| l.attention.is_some()),
        }
    }

    /// Whether a map of a layer is a product of factors.
    pub fn has_products(&self) -> bool {
        match self {
            Self::Decoder(w) => w.layers.iter().any(|l| {
                [&l.q, &l.k, &l.v, &l.o, &l.gate, &l.up, &l.down].into_iter().any(Linear::is_product)
            }),
            Self::Encoder(w) => w
                .layers
                .iter()
                .any(|l| [&l.q, &l.k, &l.v, &l.o, &l.up, &l.down].into_iter().any(Linear::is_product)),
        }
    }
}

/// What stands before every name: checkpoints of the bare body leave it out.
fn prefix(tensors: &Tensors, config: &ModelConfig, naming: Naming) -> &'static str {
    let full = match (naming, config.architecture) {
        (Naming::Gguf, _) => return "",
        (_, Architecture::Bert) => "bert.",
        _ => "model.",
    };
    if tensors.names().any(|n| n.starts_with(full)) { full } else { "" }
}

struct Finder<'a> {
    tensors: &'a Tensors,
    prefix: &'static str,
}

impl Finder<'_> {
    fn tensor(&self, name: &str, expected: &[usize]) -> Result<Tensor> {
        self.optional(name, expected)?
            .ok_or_else(|| Error::MissingTensor { name: format!("{}{name}", self.prefix) })
    }

    fn optional(&self, name: &str, expected: &[usize]) -> Result<Option<Tensor>> {
        let name = format!("{}{name}", self.prefix);
        match self.tensors.get(&name) {
            None => Ok(None),
            Some(t) if t.shape() == expected => Ok(Some(t.clone())),
            Some(t) => Err(Error::Shape { name, found: t.shape().to_vec(), expected: expected.to_vec() }),
        }
    }

    fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>> {
        Ok(self.tensor(name, &[len])?.to_f32())
    }

    /// `name.weight` and, if the file has it, `name.bias`.
    fn linear(&self, name: &str, outputs: usize, inputs: usize) -> Result<Linear> {
        let full = format!("{}{name}", self.prefix);
        if let Some(map) = self.tensors.map(&full) {
            let (found, expected) = (vec![map.outputs(), map.inputs()], vec![outputs, inputs]);
            if found != expected {
                return Err(Error::Shape { name: full, found, expected });
            }
            return Ok(map.clone());
        }
        let weight = self.tensor(&format!("{name}.weight"), &[outputs, inputs])?;
        let bias = self.optional(&format!("{name}.bias"), &[outputs])?.map(|b| b.to_f32());
        Linear::new(weight, bias).ok_or_else(|| Error::MissingTensor { name: name.to_owned() })
    }

    fn biased(&self, name: &str, outputs: usize, inputs: usize) -> Result<Linear> {
        let layer = self.linear(name, outputs, inputs)?;
        if layer.bias().is_none() {
            return Err(Error::MissingTensor { name: format!("{}{name}.bias", self.prefix) });
        }
        Ok(layer)
    }

    /// The attention of a layer, where the checkpoint says that it is of another kind.
    fn attention(&self, layer: usize, width: usize) -> Result<Option<Attention>> {
        let Some(attention) = self.tensors.attention(layer) else { return Ok(None) };
        let found = attention.layer.shape().d_model;
        if found != width {
            let what = format!("the width of the attention of layer {layer}");
            return Err(Error::invalid(what, found, width.to_string()));
        }
        Ok(Some(attention.clone()))
    }

    fn layer_norm(&self, name: &str, len: usize) -> Result<LayerNorm> {
        Ok(LayerNorm {
            weight: self.vector(&format!("{name}.weight"), len)?,
            bias: self.vector(&format!("{name}.bias"), len)?,
        })
    }
}

/// The names of a decoder's tensors; those of a layer follow its prefix.
pub(crate) struct DecoderNames {
    pub(crate) embedding: &'static str,
    pub(crate) final_norm: &'static str,
    pub(crate) layer: fn(usize) -> String,
    pub(crate) attention_norm: &'static str,
    pub(crate) q: &'static str,
    pub(crate) k: &'static str,
    pub(crate) v: &'static str,
    pub(crate) o: &'static str,
    pub(crate) q_norm: &'static str,
    pub(crate) k_norm: &'static str,
    pub(crate) ffn_norm: &'static str,
    pub(crate) gate: &'static str,
    pub(crate) up: &'static str,
    pub(crate) down: &'static str,
}

const GGUF_DECODER: DecoderNames = DecoderNames {
    embedding: "token_embd.weight",
    final_norm: "output_norm.weight",
    layer: |i| format!("blk.{i}"),
    attention_norm: "attn_norm.weight",
    q: "attn_q",
    k: "attn_k",
    v: "attn_v",
    o: "attn_output",
    q_norm: "attn_q_norm.weight",
    k_norm: "attn_k_norm.weight",
    ffn_norm: "ffn_norm.weight",
    gate: "ffn_gate",
    up: "ffn_up",
    down: "ffn_down",
};

pub(crate) const HF_DECODER: DecoderNames = DecoderNames {
    embedding: "embed_tokens.weight",
    final_norm: "norm.weight",
    layer: |i| format!("layers.{i}"),
    attention_norm: "input_layernorm.weight",
    q: "self_attn.q_proj",
    k: "self_attn.k_proj",
    v: "self_attn.v_proj",
    o: "self_attn.o_proj",
    q_norm: "self_attn.q_norm.weight",
    k_norm: "self_attn.k_norm.weight",
    ffn_norm: "post_attention_layernorm.weight",
    gate: "mlp.gate_proj",
    up: "mlp.up_proj",
    down: "mlp.down_proj",
};

fn decoder(c: &ModelConfig, finder: &Finder<'_>, naming: Naming) -> Result<DecoderWeights> {
    let names = if naming == Naming::Gguf { &GGUF_DECODER } else { &HF_DECODER };
    let (d, q_width, kv_width) = (c.hidden, c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim);
    let embedding = finder.tensor(names.embedding, &[c.vocab, d])?;
    let mut layers = Vec::new();
    for i in 0..c.n_layers {
        let layer = (names.layer)(i);
        let name = |part: &str| format!("{layer}.{part}");
        let qkv = |part: &str, width: usize| {
            if c.architecture == Architecture::Qwen2 {
                finder.biased(&name(part), width, d)
            } else {
                finder.linear(&name(part), width, d)
            }
        };
        let head_norm = |part: &str| {
            if c.architecture == Architecture::Qwen3 {
                finder.vector(&name(part), c.head_dim).map(Some)
            } else {
                Ok(None)
            }
        };
        let attention = finder.attention(i, d)?;
        let ([q, k, v, o], latent) = match (&attention, c.latent) {
            (Some(a), _) => (a.projections()?, None),
            (None, Some(_)) => {
                let latent = latent_attention(c, finder, &layer)?;
                let m = latent.maps();
                ([&m.q, &m.kv_a, &m.kv_b, &m.o].map(Clone::clone), Some(Arc::new(latent)))
            }
            (None, None) => {
                let o = finder.linear(&name(names.o), d, q_width)?;
                ([qkv(names.q, q_width)?, qkv(names.k, kv_width)?, qkv(names.v, kv_width)?, o], None)
            }
        };
        layers.push(DecoderLayer {
            attention_norm: finder.vector(&name(names.attention_norm), d)?,
            q,
            k,
            v,
            o,
            q_norm: head_norm(names.q_norm)?,
            k_norm: head_norm(names.k_norm)?,
            latent,
            attention,
            ffn_norm: finder.vector(&name(names.ffn_norm), d)?,
            gate: finder.linear(&name(names.gate), c.intermediate, d)?,
            up: finder.linear(&name(names.up), c.intermediate, d)?,
            down: finder.linear(&name(names.down), d, c.intermediate)?,
        });
    }
    // The output projection never stands behind the prefix of the body.
    let bare = Finder { prefix: "", ..*finder };
    let output = match naming {
        _ if c.tied => None,
        Naming::Gguf => bare.optional("output.weight", &[c.vocab, d])?,
        Naming::HuggingFace => bare.optional("lm_head.weight", &[c.vocab, d])?,
    };
    let output = Linear::new(output.unwrap_or_else(|| embedding.clone()), None)
        .ok_or_else(|| Error::MissingTensor { name: "lm_head.weight".into() })?;
    Ok(DecoderWeights { final_norm: finder.vector(names.final_norm, d)?, embedding, layers, output })
}

/// Latent attention with the maps it is made of.
#[derive(Debug)]
pub struct LatentAttention {
    layer: Latent,
    maps: LatentMaps,
}

/// The maps of latent attention and the weights of its norms.
#[derive(Clone, Debug)]
pub struct LatentMaps {
    /// To the latent of queries, where there is one.
    pub q_a: Option<Linear>,
    /// Norm of that latent.
    pub q_a_norm: Option<Vec<f32>>,
    /// To queries, from hidden states or from their latent.
    pub q: Linear,
    /// To latent and shared key.
    pub kv_a: Linear,
    /// Norm of the latent.
    pub kv_a_norm: Option<Vec<f32>>,
    /// To keys and values of the heads.
    pub kv_b: Linear,
    /// From concatenated heads back to the residual stream.
    pub o: Linear,
}

impl LatentAttention {
    /// The layer that the maps make; an error if their shapes do not belong together.
    pub fn new(
        shape: LayerShape,
        params: latent::Params,
        rope: Option<Rope>,
        maps: LatentMaps,
    ) -> Result<Self> {
        let mut weights = attlas::layer::Weights::new();
        let query = if maps.q_a.is_some() { "q_b" } else { "q" };
        for (name, map) in [(query, &maps.q), ("kv_a", &maps.kv_a), ("kv_b", &maps.kv_b), ("o", &maps.o)] {
            weights.insert(name.into(), Box::new(map.clone()));
        }
        if let Some(q_a) = &maps.q_a {
            weights.insert("q_a".into(), Box::new(q_a.clone()));
        }
        for (name, norm) in [("q_a_norm", &maps.q_a_norm), ("kv_a_norm", &maps.kv_a_norm)] {
            if let Some(norm) = norm {
                let column = Dense::new(Mat::from_vec(norm.clone(), norm.len(), 1));
                weights.insert(name.into(), Box::new(column));
            }
        }
        Ok(Self { layer: Latent::new(shape, params, rope, weights)?, maps })
    }

    /// The layer.
    pub fn layer(&self) -> &Latent {
        &self.layer
    }

    /// The maps.
    pub fn maps(&self) -> &LatentMaps {
        &self.maps
    }
}

/// Latent attention of a layer. Latents are normalised with an epsilon of their own.
fn latent_attention(c: &ModelConfig, finder: &Finder<'_>, layer: &str) -> Result<LatentAttention> {
    let (Some(l), Some(rope)) = (c.latent, &c.rope) else { unreachable!("read from the same configuration") };
    let name = |part: &str| format!("{layer}.self_attn.{part}");
    let norm = |part: &str, width: usize| finder.vector(&name(&format!("{part}.weight")), width);
    let queries = c.n_heads * c.head_dim;
    let (q_a, q_a_norm, q) = match l.rank_q {
        None => (None, None, finder.linear(&name("q_proj"), queries, c.hidden)?),
        Some(rank) => (
            Some(finder.linear(&name("q_a_proj"), rank, c.hidden)?),
            Some(norm("q_a_layernorm", rank)?),
            finder.linear(&name("q_b_proj"), queries, rank)?,
        ),
    };
    let maps = LatentMaps {
        q_a,
        q_a_norm,
        q,
        kv_a: finder.linear(&name("kv_a_proj_with_mqa"), l.rank + rope.dim, c.hidden)?,
        kv_a_norm: Some(norm("kv_a_layernorm", l.rank)?),
        kv_b: finder.linear(&name("kv_b_proj"), c.n_heads * (l.nope + l.v_dim), l.rank)?,
        o: finder.linear(&name("o_proj"), c.hidden, c.n_heads * l.v_dim)?,
    };
    let shape = LayerShape {
        d_model: c.hidden,
        n_heads: c.n_heads,
        n_kv_heads: c.n_heads,
        d: c.head_dim,
        d_v: l.v_dim,
    };
    let scale_factor = if let Scaling::Yarn(yarn) = &rope.scaling { yarn.softmax_factor() } else { 1.0 };
    let params = latent::Params {
        rank: l.rank,
        rank_q: l.rank_q,
        rope_dim: rope.dim,
        rope_base: rope.base,
        scale_factor,
        ..latent::Params::default()
    };
    LatentAttention::new(shape, params, Some(rope.clone()), maps)
}

/// The names of an encoder's tensors; those of a layer follow its prefix.
pub(crate) struct EncoderNames {
    pub(crate) word: &'static str,
    pub(crate) position: &'static str,
    pub(crate) kind: &'static str,
    pub(crate) embedding_norm: &'static str,
    pub(crate) layer: fn(usize) -> String,
    pub(crate) q: &'static str,
    pub(crate) k: &'static str,
    pub(crate) v: &'static str,
    pub(crate) o: &'static str,
    pub(crate) attention_norm: &'static str,
    pub(crate) up: &'static str,
    pub(crate) down: &'static str,
    pub(crate) output_norm: &'static str,
}

const GGUF_ENCODER: EncoderNames = EncoderNames {
    word: "token_embd.weight",
    position: "position_embd.weight",
    kind: "token_types.weight",
    embedding_norm: "token_embd_norm",
    layer: |i| format!("blk.{i}"),
    q: "attn_q",
    k: "attn_k",
    v: "attn_v",
    o: "attn_output",
    attention_norm: "attn_output_norm",
    up: "ffn_up",
    down: "ffn_down",
    output_norm: "layer_output_norm",
};

pub(crate) const HF_ENCODER: EncoderNames = EncoderNames {
    word: "embeddings.word_embeddings.weight",
    position: "embeddings.position_embeddings.weight",
    kind: "embeddings.token_type_embeddings.weight",
    embedding_norm: "embeddings.LayerNorm",
    layer: |i| format!("encoder.layer.{i}"),
    q: "attention.self.query",
    k: "attention.self.key",
    v: "attention.self.value",
    o: "attention.output.dense",
    attention_norm: "attention.output.LayerNorm",
    up: "intermediate.dense",
    down: "output.dense",
    output_norm: "output.LayerNorm",
};

fn encoder(c: &ModelConfig, finder: &Finder<'_>, naming: Naming) -> Result<EncoderWeights> {
    let names = if naming == Naming::Gguf { &GGUF_ENCODER } else { &HF_ENCODER };
    let (d, width) = (c.hidden, c.n_heads * c.head_dim);
    let mut layers = Vec::new();
    for i in 0..c.n_layers {
        let layer = (names.layer)(i);
        let name = |part: &str| format!("{layer}.{part}");
        let attention = finder.attention(i, d)?;
        let [q, k, v, o] = match &attention {
            Some(a) => a.projections()?,
            None => {
                let qkv = |part: &str| finder.biased(&name(part), width, d);
                [qkv(names.q)?, qkv(names.k)?, qkv(names.v)?, finder.biased(&name(names.o), d, width)?]
            }
        };
        layers.push(EncoderLayer {
            q,
            k,
            v,
            o,
            attention,
            attention_norm: finder.layer_norm(&name(names.attention_norm), d)?,
            up: finder.biased(&name(names.up), c.intermediate, d)?,
            down: finder.biased(&name(names.down), d, c.intermediate)?,
            output_norm: finder.layer_norm(&name(names.output_norm), d)?,
        });
    }
    Ok(EncoderWeights {
        word_embedding: finder.tensor(names.word, &[c.vocab, d])?,
        position_embedding: finder.tensor(names.position, &[c.max_positions, d])?,
        type_embedding: finder.tensor(names.kind, &[c.token_types, d])?,
        embedding_norm: finder.layer_norm(names.embedding_norm, d)?,
        layers,
    })
}
