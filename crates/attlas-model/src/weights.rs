//! The tensors of a model by role, independent of the file format and its names.

use crate::checkpoint::Tensors;
use crate::config::{Architecture, ExpertConfig, HeadNorm, LatentConfig, ModelConfig, Norms};
use crate::error::{Error, Result};
use crate::experts::{Experts, Mlp};
use crate::factored::Attention;
use crate::linear::Linear;
use crate::tensor::Tensor;
use attlas::Mat;
use attlas::layer::{Dense, Layer, LayerShape};
use attlas::layers::latent::{self, Latent};
use attlas_num::kernels::quant::Format;
use attlas_num::rope::{Rope, Scaling};
use std::cell::RefCell;
use std::collections::HashSet;
use std::sync::Arc;

/// Convention of tensor names in a checkpoint.
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
    /// Map from hidden states to logits; shares the embedding's storage if the model is tied.
    pub output: Linear,
}

impl DecoderWeights {
    /// Returns true if the embedding is also the output projection.
    pub(crate) fn is_tied(&self) -> bool {
        std::ptr::eq(self.output.weight().bytes(), self.embedding.bytes())
    }
}

/// One layer of a [`DecoderWeights`].
#[derive(Clone, Debug)]
pub struct DecoderLayer {
    /// Norm before attention, if the family has one.
    pub attention_norm: Option<Vec<f32>>,
    /// Norm of attention's contribution to the residual stream, if the family has one.
    pub attention_post_norm: Option<Vec<f32>>,
    /// Queries: `n_heads · head_dim` outputs. With a latent of queries, its input is that latent.
    pub q: Linear,
    /// Keys: `n_kv_heads · head_dim` outputs. In latent attention, the latent and the shared key.
    pub k: Linear,
    /// Values: `n_kv_heads · head_dim` outputs. In latent attention, keys and values from the latent.
    pub v: Linear,
    /// Map from concatenated heads back to the residual stream.
    pub o: Linear,
    /// Norm of each query head or of all together, by its length, if the family has one.
    pub q_norm: Option<Vec<f32>>,
    /// Norm of each key head or of all together, if the family has one.
    pub k_norm: Option<Vec<f32>>,
    /// Extra logit per head beside those of the keys, without a value, if the family has it.
    pub sinks: Option<Vec<f32>>,
    /// Latent attention made of the maps above, if the family has it.
    pub latent: Option<Arc<LatentAttention>>,
    /// Attention of another kind, where the checkpoint has it; the maps above are its own then, as far as it has them.
    pub attention: Option<Attention>,
    /// Norm before the feed-forward layer, if the family has one.
    pub ffn_norm: Option<Vec<f32>>,
    /// Norm of the feed-forward layer's contribution to the residual stream, if the family has one.
    pub ffn_post_norm: Option<Vec<f32>>,
    /// Experts, if the layer has them. The next fields are then the expert of every token, of width zero if there is
    /// none.
    pub experts: Option<Arc<Experts>>,
    /// Gate of the feed-forward layer.
    pub gate: Linear,
    /// The gated map.
    pub up: Linear,
    /// Map back to the residual stream.
    pub down: Linear,
}

impl DecoderLayer {
    /// Returns the layer that attends as a whole, if attention is not made of methods.
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
    /// Map from concatenated heads back to the residual stream.
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
    /// Finds and checks every tensor that `config` requires.
    pub fn collect(config: &ModelConfig, tensors: &Tensors, naming: Naming) -> Result<Self> {
        let seen = RefCell::new(HashSet::new());
        let beyond_one = config.architecture.traits().norms_beyond_one && naming == Naming::HuggingFace;
        let finder = Finder { tensors, prefix: prefix(tensors, config, naming), beyond_one, seen: &seen };
        let weights = if config.architecture.is_encoder() {
            Self::Encoder(encoder(config, &finder, naming)?)
        } else {
            Self::Decoder(decoder(config, &finder, naming)?)
        };
        all_read(config, tensors, &seen.borrow())?;
        Ok(weights)
    }
}

/// Fails if the file has an unused tensor. Tensors known to be irrelevant to inference are ignored: copies of
/// constants, heads of other tasks, and layers that predict further tokens.
fn all_read(c: &ModelConfig, tensors: &Tensors, seen: &HashSet<String>) -> Result<()> {
    if tensors.is_factored() {
        return Ok(());
    }
    const IDLE: [&str; 5] = ["rope_freqs.weight", "rope_factors_", "pooler.", "bert.pooler.", "cls."];
    let beyond = |name: &str| {
        let number = name.strip_prefix("model.layers.").or_else(|| name.strip_prefix("blk."));
        let number = number.and_then(|rest| rest.split('.').next()?.parse::<usize>().ok());
        c.architecture == Architecture::DeepseekV3 && number.is_some_and(|n| n >= c.n_layers)
    };
    let idle = |name: &str| {
        IDLE.iter().any(|i| name.starts_with(i))
            || name.ends_with("rotary_emb.inv_freq")
            || name == "lm_head.weight"
            || beyond(name)
    };
    let mut unread: Vec<&str> = tensors.names().filter(|n| !seen.contains(*n) && !idle(n)).collect();
    unread.sort_unstable();
    match unread.split_first() {
        None => Ok(()),
        Some((name, more)) => Err(Error::UnreadTensor {
            name: (*name).to_owned(),
            more: more.len(),
            architecture: c.architecture.name(),
        }),
    }
}

impl Weights {
    /// Returns true if a layer's attention differs from the configuration's heads.
    pub fn has_other_attention(&self) -> bool {
        match self {
            Self::Decoder(w) => w.layers.iter().any(|l| l.whole().is_some()),
            Self::Encoder(w) => w.layers.iter().any(|l| l.attention.is_some()),
        }
    }

    /// Returns true if a map of a layer is a product of factors.
    pub fn has_products(&self) -> bool {
        self.maps().any(Linear::is_product)
    }

    /// The maps of a layer in the order of [`Role::ALL`](attlas::conversions::common::network::Role::ALL); encoders have no gate.
    pub(crate) fn maps_of(&self, layer: usize) -> Option<[Option<&Linear>; 7]> {
        Some(match self {
            Self::Decoder(w) => {
                let l = w.layers.get(layer)?;
                [&l.q, &l.k, &l.v, &l.o, &l.gate, &l.up, &l.down].map(Some)
            }
            Self::Encoder(w) => {
                let l = w.layers.get(layer)?;
                [Some(&l.q), Some(&l.k), Some(&l.v), Some(&l.o), None, Some(&l.up), Some(&l.down)]
            }
        })
    }

    /// The maps of all layers.
    pub(crate) fn maps(&self) -> impl Iterator<Item = &Linear> {
        (0..).map_while(|layer| self.maps_of(layer)).flatten().flatten()
    }
}

/// Prefix of every tensor name: checkpoints of the bare body leave it out.
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
    /// True if norms are stored minus one.
    beyond_one: bool,
    /// The names requested so far.
    seen: &'a RefCell<HashSet<String>>,
}

impl Finder<'_> {
    fn tensor(&self, name: &str, expected: &[usize]) -> Result<Tensor> {
        self.optional(name, expected)?
            .ok_or_else(|| Error::MissingTensor { name: format!("{}{name}", self.prefix) })
    }

    fn optional(&self, name: &str, expected: &[usize]) -> Result<Option<Tensor>> {
        let name = format!("{}{name}", self.prefix);
        self.seen.borrow_mut().insert(name.clone());
        match self.tensors.get(&name) {
            None => Ok(None),
            Some(t) if t.shape() == expected => Ok(Some(t.clone())),
            Some(t) => Err(Error::Shape { name, found: t.shape().to_vec(), expected: expected.to_vec() }),
        }
    }

    fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>> {
        Ok(self.tensor(name, &[len])?.to_f32())
    }

    /// Reads the weight of a norm, which some files store minus one.
    fn norm(&self, name: &str, len: usize) -> Result<Vec<f32>> {
        let mut weight = self.vector(name, len)?;
        if self.beyond_one {
            weight.iter_mut().for_each(|w| *w += 1.0);
        }
        Ok(weight)
    }

    /// Reads `name.weight` and, if the file has it, `name.bias`.
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

    /// The bytes of that name.
    fn bytes(&self, name: &str) -> Option<(&[u8], &[usize])> {
        let name = format!("{}{name}", self.prefix);
        self.seen.borrow_mut().insert(name.clone());
        self.tensors.bytes(&name)
    }

    /// `count` matrices of `rows × cols` numbers of four bits, from blocks `[count, rows, cols / 32, 16]` of two numbers
    /// a byte and scales `[count, rows, cols / 32]`, as ggml stores them.
    fn mxfp4(&self, name: &str, count: usize, rows: usize, cols: usize) -> Result<Tensor> {
        let part = |tail: &str, expected: Vec<usize>| {
            let name = format!("{name}_{tail}");
            match self.bytes(&name) {
                Some((bytes, shape)) if shape == expected => Ok(bytes),
                Some((_, shape)) => Err(Error::Shape { name, found: shape.to_vec(), expected }),
                None => Err(Error::MissingTensor { name }),
            }
        };
        let blocks = part("blocks", vec![count, rows, cols / 32, 16])?;
        let scales = part("scales", vec![count, rows, cols / 32])?;
        let mut bytes = Vec::with_capacity(scales.len() * 17);
        for (scale, block) in scales.iter().zip(blocks.as_chunks::<16>().0) {
            // Neighbours share a byte here; in ggml, number j shares one with number j + 16.
            let number = |t: usize| block[t / 2] >> (4 * (t % 2)) & 15;
            bytes.push(*scale);
            bytes.extend((0..16).map(|t| number(t) | number(t + 16) << 4));
        }
        let wrong = || Error::MissingTensor { name: format!("{}{name}_blocks", self.prefix) };
        Tensor::owned(bytes, Format::Mxfp4, vec![count, rows, cols]).ok_or_else(wrong)
    }

    /// Splits the rows of one matrix into several maps.
    fn fused(&self, name: &str, outputs: &[usize], inputs: usize) -> Result<Vec<Linear>> {
        let all = self.linear(name, outputs.iter().sum(), inputs)?;
        let mut end = 0;
        let part = |&n: &usize| {
            let start = end;
            end += n;
            let bias = all.bias().map(|b| b[start..end].to_vec());
            all.weight().row_range(start..end).and_then(|rows| Linear::new(rows, bias))
        };
        let parts: Option<Vec<Linear>> = outputs.iter().map(part).collect();
        parts.ok_or_else(|| Error::MissingTensor { name: format!("{}{name}.weight", self.prefix) })
    }

    fn mlp(&self, names: [String; 3], width: usize, d: usize, fused: bool) -> Result<Mlp> {
        let [gate, up, down] = names;
        let (gate, up) = if fused {
            let mut both = self.fused(&up, &[width, width], d)?.into_iter();
            let missing = || Error::MissingTensor { name: up.clone() };
            (both.next().ok_or_else(missing)?, both.next().ok_or_else(missing)?)
        } else {
            (self.linear(&gate, width, d)?, self.linear(&up, width, d)?)
        };
        Ok(Mlp { gate, up, down: self.linear(&down, d, width)? })
    }

    fn biased(&self, name: &str, outputs: usize, inputs: usize) -> Result<Linear> {
        let layer = self.linear(name, outputs, inputs)?;
        if layer.bias().is_none() {
            return Err(Error::MissingTensor { name: format!("{}{name}.bias", self.prefix) });
        }
        Ok(layer)
    }

    /// Returns the attention of a layer, if the checkpoint has another kind for it.
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
    /// Queries, keys and values in one matrix, and gate and up in one.
    qkv: &'static str,
    gate_up: &'static str,
}

/// Norms of a layer by name: before and after attention, before and after the feed-forward layer.
type NormNames = [Option<&'static str>; 4];

fn norm_names(norms: Norms, naming: Naming) -> NormNames {
    match (naming, norms) {
        (Naming::Gguf, Norms::Before) => [Some("attn_norm"), None, Some("ffn_norm"), None],
        (Naming::Gguf, Norms::BeforeEach) => [Some("attn_norm"), None, Some("post_attention_norm"), None],
        (Naming::Gguf, Norms::After) => [None, Some("post_attention_norm"), None, Some("post_ffw_norm")],
        (Naming::Gguf, Norms::Around | Norms::Sandwich) => {
            [Some("attn_norm"), Some("post_attention_norm"), Some("ffn_norm"), Some("post_ffw_norm")]
        }
        (Naming::HuggingFace, Norms::Sandwich) => [
            Some("input_layernorm"),
            Some("post_attention_layernorm"),
            Some("pre_feedforward_layernorm"),
            Some("post_feedforward_layernorm"),
        ],
        (Naming::HuggingFace, Norms::Before | Norms::BeforeEach) => {
            [Some("input_layernorm"), None, Some("post_attention_layernorm"), None]
        }
        (Naming::HuggingFace, Norms::After) => {
            [None, Some("post_attention_layernorm"), None, Some("post_feedforward_layernorm")]
        }
        (Naming::HuggingFace, Norms::Around) => [
            Some("input_layernorm"),
            Some("post_self_attn_layernorm"),
            Some("post_attention_layernorm"),
            Some("post_mlp_layernorm"),
        ],
    }
}

pub(crate) const GGUF_DECODER: DecoderNames = DecoderNames {
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
    qkv: "attn_qkv",
    gate_up: "ffn_up",
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
    qkv: "self_attn.qkv_proj",
    gate_up: "mlp.gate_up_proj",
};

fn decoder(c: &ModelConfig, finder: &Finder<'_>, naming: Naming) -> Result<DecoderWeights> {
    let names = if naming == Naming::Gguf { &GGUF_DECODER } else { &HF_DECODER };
    let (d, q_width, kv_width) = (c.hidden, c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim);
    let traits = c.architecture.traits();
    let norm_names = norm_names(traits.norms, naming);
    let embedding = finder.tensor(names.embedding, &[c.vocab, d])?;
    let mut layers = Vec::new();
    for i in 0..c.n_layers {
        let layer = (names.layer)(i);
        let name = |part: &str| format!("{layer}.{part}");
        let qkv = |part: &str, width: usize| {
            if traits.biased {
                finder.biased(&name(part), width, d)
            } else {
                finder.linear(&name(part), width, d)
            }
        };
        let head_norm = |part: &str, heads: usize| match traits.head_norm {
            HeadNorm::None => Ok(None),
            HeadNorm::EachHead => finder.norm(&name(part), c.head_dim).map(Some),
            HeadNorm::AllHeads => finder.norm(&name(part), heads * c.head_dim).map(Some),
        };
        let norm =
            |i: usize| norm_names[i].map(|part| finder.norm(&name(&format!("{part}.weight")), d)).transpose();
        let attention = finder.attention(i, d)?;
        attention.iter().try_for_each(|a| a.check_causal(i))?;
        let ([q, k, v, o], latent) = match (&attention, c.latent) {
            (Some(a), _) => (a.projections()?, None),
            (None, Some(_)) => {
                let latent = latent_attention(c, finder, &layer, naming)?;
                let m = latent.maps();
                ([&m.q, &m.kv_a, &m.kv_b, &m.o].map(Clone::clone), Some(Arc::new(latent)))
            }
            (None, None) if traits.fused_qkv => {
                let parts = finder.fused(&name(names.qkv), &[q_width, kv_width, kv_width], d)?;
                let o = finder.linear(&name(names.o), d, q_width)?;
                let [q, k, v] = <[Linear; 3]>::try_from(parts)
                    .map_err(|_| Error::MissingTensor { name: name(names.qkv) })?;
                ([q, k, v, o], None)
            }
            (None, None) => {
                let o = finder.linear(&name(names.o), d, q_width)?;
                ([qkv(names.q, q_width)?, qkv(names.k, kv_width)?, qkv(names.v, kv_width)?, o], None)
            }
        };
        let (experts, mlp) = match &c.experts {
            Some(e) if e.layers.get(i) == Some(&true) => {
                let (experts, shared) = mixture(c, e, finder, &layer, naming)?;
                (Some(Arc::new(experts)), shared)
            }
            _ => {
                let up = if traits.fused_gate_up { names.gate_up } else { names.up };
                let names = [name(names.gate), name(up), name(names.down)];
                (None, finder.mlp(names, c.intermediate, d, traits.fused_gate_up)?)
            }
        };
        layers.push(DecoderLayer {
            attention_norm: norm(0)?,
            attention_post_norm: norm(1)?,
            q,
            k,
            v,
            o,
            q_norm: head_norm(names.q_norm, c.n_heads)?,
            k_norm: head_norm(names.k_norm, c.n_kv_heads)?,
            sinks: match (traits.sinks, naming) {
                (false, _) => None,
                (true, Naming::Gguf) => Some(finder.vector(&name("attn_sinks.weight"), c.n_heads)?),
                (true, Naming::HuggingFace) => Some(finder.vector(&name("self_attn.sinks"), c.n_heads)?),
            },
            latent,
            attention,
            ffn_norm: norm(2)?,
            ffn_post_norm: norm(3)?,
            experts,
            gate: mlp.gate,
            up: mlp.up,
            down: mlp.down,
        });
    }
    // The output projection never has the prefix of the body.
    let bare = Finder { prefix: "", ..*finder };
    let output = match naming {
        _ if c.tied => None,
        Naming::Gguf => bare.optional("output.weight", &[c.vocab, d])?,
        Naming::HuggingFace => bare.optional("lm_head.weight", &[c.vocab, d])?,
    };
    let output = Linear::new(output.unwrap_or_else(|| embedding.clone()), None)
        .ok_or_else(|| Error::MissingTensor { name: "lm_head.weight".into() })?;
    Ok(DecoderWeights { final_norm: finder.norm(names.final_norm, d)?, embedding, layers, output })
}

/// Reads the experts of a layer, and the expert of every token, of width zero if there is none.
fn mixture(
    c: &ModelConfig,
    e: &ExpertConfig,
    finder: &Finder<'_>,
    layer: &str,
    naming: Naming,
) -> Result<(Experts, Mlp)> {
    let Some(names) = c.architecture.traits().experts else { unreachable!("read with the configuration") };
    let d = c.hidden;
    let name = |part: &str| format!("{layer}.{part}");
    let (router, bias, shared_gate) = match naming {
        Naming::Gguf => ("ffn_gate_inp".to_owned(), "exp_probs_b.bias".to_owned(), "ffn_gate_inp_shexp"),
        Naming::HuggingFace => (
            names.router.to_owned(),
            format!("{}.e_score_correction_bias", names.router),
            "mlp.shared_expert_gate",
        ),
    };
    let mut experts = Vec::with_capacity(e.count);
    match naming {
        Naming::HuggingFace if c.architecture == Architecture::GptOss => {
            experts = alternating(e, d, finder, &name(&format!("{}.experts", names.prefix)))?;
        }
        Naming::HuggingFace => {
            for i in 0..e.count {
                let part = |p: &str| name(&format!("{}.experts.{i}.{p}", names.prefix));
                experts.push(finder.mlp(names.parts.map(part), e.width, d, false)?);
            }
        }
        Naming::Gguf => {
            let stack = |part: &str, rows: usize, cols: usize| {
                let weight = finder.tensor(&name(&format!("{part}.weight")), &[e.count, rows, cols])?;
                let bias = finder.optional(&name(&format!("{part}.bias")), &[e.count, rows])?;
                Ok::<_, Error>((weight, bias.map(|b| b.to_f32())))
            };
            let gate = stack("ffn_gate_exps", e.width, d)?;
            let up = stack("ffn_up_exps", e.width, d)?;
            let down = stack("ffn_down_exps", d, e.width)?;
            for i in 0..e.count {
                let part = |(stack, bias): &(Tensor, Option<Vec<f32>>), rows: usize| {
                    let own = stack.row_range(i * rows..(i + 1) * rows);
                    let bias = bias.as_ref().map(|b| b[i * rows..(i + 1) * rows].to_vec());
                    own.and_then(|t| Linear::new(t, bias))
                        .ok_or_else(|| Error::MissingTensor { name: name("ffn_gate_exps.weight") })
                };
                let (gate, up) = (part(&gate, e.width)?, part(&up, e.width)?);
                experts.push(Mlp { gate, up, down: part(&down, d)? });
            }
        }
    }
    let shared = if e.shared_width == 0 {
        let empty = |shape: Vec<usize>| Tensor::from_f32(&[], shape).and_then(|t| Linear::new(t, None));
        match (empty(vec![0, d]), empty(vec![d, 0])) {
            (Some(none), Some(down)) => Mlp { gate: none.clone(), up: none, down },
            _ => unreachable!("a matrix without numbers"),
        }
    } else {
        let parts = match naming {
            Naming::Gguf => ["ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"].map(name),
            Naming::HuggingFace => {
                ["gate_proj", "up_proj", "down_proj"].map(|p| name(&format!("{}.{p}", names.shared)))
            }
        };
        finder.mlp(parts, e.shared_width, d, false)?
    };
    let shared_gate = if c.architecture != Architecture::Qwen2Moe {
        None
    } else if naming == Naming::Gguf {
        // llama.cpp stores it as a vector.
        let row = finder.vector(&name(&format!("{shared_gate}.weight")), d)?;
        Tensor::from_f32(&row, vec![1, d]).and_then(|t| Linear::new(t, None))
    } else {
        Some(finder.linear(&name(shared_gate), 1, d)?)
    };
    let experts = Experts {
        router: finder.linear(&name(&router), e.count, d)?,
        bias: finder.optional(&name(&bias), &[e.count])?.map(|b| b.to_f32()),
        experts,
        shared_gate,
    };
    Ok((experts, shared))
}

/// Reads the experts of gpt-oss from a Hugging Face folder: gate and up alternate in one map, and all experts are in
/// one tensor, either of numbers with inputs before outputs, or of four-bit blocks row by row.
fn alternating(e: &ExpertConfig, d: usize, finder: &Finder<'_>, name: &str) -> Result<Vec<Mlp>> {
    let width = e.width;
    let bias = |part: &str, rows: usize| {
        Ok::<_, Error>(finder.tensor(&format!("{name}.{part}_bias"), &[e.count, rows])?.to_f32())
    };
    let (both_bias, down_bias) = (bias("gate_up_proj", 2 * width)?, bias("down_proj", d)?);
    let missing = || Error::MissingTensor { name: format!("{name}.gate_up_proj") };
    let four = finder.bytes(&format!("{name}.gate_up_proj_blocks")).is_some();
    let read = |part: &str, rows: usize, cols: usize| {
        if four {
            finder.mxfp4(&format!("{name}.{part}"), e.count, rows, cols)
        } else {
            let stored = finder.tensor(&format!("{name}.{part}"), &[e.count, cols, rows])?;
            transposed(&stored).ok_or_else(missing)
        }
    };
    let (both, down) = (read("gate_up_proj", 2 * width, d)?, read("down_proj", d, width)?);
    let part = |stack: &Tensor, bias: &[f32], first: usize, step: usize, rows: usize| {
        let rows_of = |i: usize| first + i * step;
        let own = stack.some_rows((0..rows).map(rows_of)).ok_or_else(missing)?;
        Linear::new(own, Some((0..rows).map(|i| bias[rows_of(i)]).collect())).ok_or_else(missing)
    };
    (0..e.count)
        .map(|i| {
            Ok(Mlp {
                gate: part(&both, &both_bias, 2 * width * i, 2, width)?,
                up: part(&both, &both_bias, 2 * width * i + 1, 2, width)?,
                down: part(&down, &down_bias, d * i, 1, d)?,
            })
        })
        .collect()
}

/// Transposes every matrix of a stack `[n, cols, rows]` to `[n, rows, cols]`, elements as stored; `None` if they are in
/// blocks.
fn transposed(stack: &Tensor) -> Option<Tensor> {
    let &[n, cols, rows] = stack.shape() else { return None };
    let format = stack.format();
    let size = format.block_bytes();
    if format.block_len() != 1 {
        return None;
    }
    let from = stack.bytes();
    let mut bytes = Vec::with_capacity(from.len());
    for m in 0..n {
        for r in 0..rows {
            for c in 0..cols {
                bytes.extend_from_slice(&from[((m * cols + c) * rows + r) * size..][..size]);
            }
        }
    }
    Tensor::owned(bytes, format, vec![n, rows, cols])
}

/// Latent attention with its maps.
#[derive(Debug)]
pub struct LatentAttention {
    layer: Latent,
    maps: LatentMaps,
    /// The other settings of the layer.
    settings: (LayerShape, latent::Params, Option<Rope>),
}

/// The maps of latent attention and the weights of its norms.
#[derive(Clone, Debug)]
pub struct LatentMaps {
    /// Map to the latent of queries, if there is one.
    pub q_a: Option<Linear>,
    /// Norm of that latent.
    pub q_a_norm: Option<Vec<f32>>,
    /// Map to queries, from hidden states or from their latent.
    pub q: Linear,
    /// Map to latent and shared key.
    pub kv_a: Linear,
    /// Norm of the latent.
    pub kv_a_norm: Option<Vec<f32>>,
    /// Map to keys and values of the heads.
    pub kv_b: Linear,
    /// Map from concatenated heads back to the residual stream.
    pub o: Linear,
}

impl LatentAttention {
    /// Builds the layer from its maps; an error if their shapes do not match.
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
        let settings = (shape, params.clone(), rope.clone());
        Ok(Self { layer: Latent::new(shape, params, rope, weights)?, maps, settings })
    }

    /// Returns the same layer with other maps.
    pub fn with_maps(&self, maps: LatentMaps) -> Result<Self> {
        let (shape, params, rope) = self.settings.clone();
        Self::new(shape, params, rope, maps)
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

/// Reads the latent attention of a layer.
fn latent_attention(
    c: &ModelConfig,
    finder: &Finder<'_>,
    layer: &str,
    naming: Naming,
) -> Result<LatentAttention> {
    let (Some(l), Some(rope)) = (c.latent, &c.rope) else { unreachable!("read from the same configuration") };
    let name = |part: &str| match naming {
        Naming::HuggingFace => format!("{layer}.self_attn.{part}"),
        Naming::Gguf => {
            let own = match part {
                "q_proj" => "attn_q",
                "q_a_proj" => "attn_q_a",
                "q_a_layernorm" => "attn_q_a_norm",
                "q_b_proj" => "attn_q_b",
                "kv_a_proj_with_mqa" => "attn_kv_a_mqa",
                "kv_a_layernorm" => "attn_kv_a_norm",
                "kv_b_proj" => "attn_kv_b",
                "o_proj" => "attn_output",
                other => unreachable!("latent attention has no part {other}"),
            };
            format!("{layer}.{own}")
        }
    };
    let norm = |part: &str, width: usize| finder.vector(&format!("{}.weight", name(part)), width);
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
        kv_b: match split_kv_b(c, l, finder, layer)? {
            Some(map) => map,
            None => finder.linear(&name("kv_b_proj"), c.n_heads * (l.nope + l.v_dim), l.rank)?,
        },
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
        norm_eps: match naming {
            // The class of transformers has a separate constant here, llama.cpp one for all norms.
            Naming::HuggingFace => latent::Params::default().norm_eps,
            Naming::Gguf => c.norm_eps,
        },
        ..latent::Params::default()
    };
    LatentAttention::new(shape, params, Some(rope.clone()), maps)
}

/// Reads the maps to keys and values that a GGUF file stores separately, keys transposed; `None` if it does not.
fn split_kv_b(c: &ModelConfig, l: LatentConfig, finder: &Finder<'_>, layer: &str) -> Result<Option<Linear>> {
    let name = |part: &str| format!("{layer}.{part}.weight");
    let Some(keys) = finder.optional(&name("attn_k_b"), &[c.n_heads, l.rank, l.nope])? else {
        return Ok(None);
    };
    let values = finder.tensor(&name("attn_v_b"), &[c.n_heads, l.v_dim, l.rank])?;
    let rows = join_kv_b(&keys.to_f32(), &values.to_f32(), l);
    let map = Tensor::from_f32(&rows, vec![c.n_heads * (l.nope + l.v_dim), l.rank]);
    let map = map.and_then(|t| Linear::new(t, None));
    map.map(Some).ok_or_else(|| Error::MissingTensor { name: name("attn_k_b") })
}

/// Joins keys, transposed, and values into one map for all heads.
pub(crate) fn join_kv_b(keys: &[f32], values: &[f32], l: LatentConfig) -> Vec<f32> {
    let mut rows = Vec::with_capacity(keys.len() + values.len());
    for (keys, values) in keys.chunks_exact(l.rank * l.nope).zip(values.chunks_exact(l.v_dim * l.rank)) {
        for i in 0..l.nope {
            rows.extend((0..l.rank).map(|r| keys[r * l.nope + i]));
        }
        rows.extend_from_slice(values);
    }
    rows
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
