//! Conversion of a grouped-query model to latent attention: calibrates on text, converts every layer, writes a
//! checkpoint.
//!
//! The mathematics is that of [`attlas::conversions::mla`]; this module runs a model over calibration text, collects
//! second moments layer by layer, and replaces the old layers by the new ones. A converted model runs like any other at
//! every stage: the loss of a stage can be measured in perplexity. [`write()`] gives a folder that the DeepSeek-V3
//! class of transformers loads without custom code. That class always normalises latents, hence the norms that act as
//! identities ([`Converted::with_neutral_norms`]). It has no biases in feed-forward layers: if the model has some, the
//! folder contains a class that adds them, under a separate name, which prevents loading without them.

use crate::compress::Elements;
use crate::config::{Architecture, LatentConfig, ModelConfig};
use crate::decoder::{CHUNK, Decoder, Observer, Rows};
use crate::error::{Error, Result};
use crate::export;
use crate::linear::{Linear, apply_all};
use crate::model::Model;
use crate::recipe::Recipe;
use crate::save::{Folder, NamedTensor};
use crate::tensor::Tensor;
use crate::weights::{DecoderLayer, DecoderWeights, LatentAttention, LatentMaps, Weights};
use attlas::conversions::mla::{self, Calibration, Converted, Figures, Params, Stage};
use attlas::layer::Dense;
use attlas::{Mat, MatRef, Workspace};
use attlas_num::Scratch;
use attlas_num::kernels::quant::Format;
use attlas_num::par::*;
use attlas_num::rope::{Rope, Scaling};
use serde_json::json;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Returns the decoder's weights if its layers can be converted: grouped-query attention over all tokens without norms
/// between projections and rotation.
fn convertible(model: &Model) -> Result<&DecoderWeights> {
    let c = &model.config;
    let refuse =
        |what: &str| Err(Error::Unsupported { what: format!("converting {what} to latent attention") });
    let Weights::Decoder(weights) = &model.weights else {
        return refuse("an encoder");
    };
    if c.latent.is_some() {
        return refuse("a model that has latent attention already");
    }
    if model.weights.has_products() || model.weights.has_other_attention() {
        return refuse("a model in factored form");
    }
    if weights.layers.iter().any(|l| l.q_norm.is_some() || l.k_norm.is_some()) {
        return refuse("a model with norms of query and key heads, through which no rotation passes,");
    }
    if c.windows.iter().any(Option::is_some) {
        return refuse("a model with sliding windows");
    }
    // The written class has no place for these.
    if !c.is_plain() {
        return refuse(&format!("a {} model", c.architecture.name()));
    }
    Ok(weights)
}

/// Completes the parameters for this model by setting open widths; an error if it cannot be converted with them.
///
/// The stock class has a bias for queries only on their latent: models with such biases get a latent of queries of full
/// width.
pub fn check(model: &Model, params: &Params) -> Result<Params> {
    let weights = convertible(model)?;
    let shape = model.config.layer_shape();
    let mut params = params.clone();
    if params.rank_q.is_none() && weights.layers.iter().any(|l| l.q.bias().is_some()) {
        params.rank_q = Some((shape.n_heads * shape.d).min(shape.d_model));
    }
    Ok(params.resolved(&shape, model.config.rope.as_ref())?)
}

/// Collects moments of every layer.
struct Collector<'a> {
    layers: Vec<Calibration>,
    /// Projections to apply to a layer's input, if the running model has others.
    source: Option<(&'a DecoderWeights, Scratch)>,
    /// Queries, keys and values of the current layer, before rotation.
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    failed: Option<attlas::Error>,
    stop: &'a AtomicBool,
}

impl Collector<'_> {
    fn add(&mut self, layer: usize) {
        if let Err(e) = self.layers[layer].add(&self.q, &self.k, &self.v) {
            self.failed = Some(e);
        }
    }
}

impl Observer for Collector<'_> {
    fn interrupted(&self) -> bool {
        self.failed.is_some() || self.stop.load(Ordering::Relaxed)
    }

    fn entering(&mut self, layer: usize, _: usize, x: &[f32]) {
        let Some((source, scratch)) = &self.source else { return };
        let own = &source.layers[layer];
        let x = MatRef::new(x, x.len() / own.q.inputs(), own.q.inputs());
        for (out, map) in [(&mut self.q, &own.q), (&mut self.k, &own.k), (&mut self.v, &own.v)] {
            out.resize(x.rows() * map.outputs(), 0.0);
        }
        let mut jobs: [(&Linear, &mut [f32]); 3] =
            [(&own.q, &mut self.q), (&own.k, &mut self.k), (&own.v, &mut self.v)];
        apply_all(&mut jobs, x, scratch);
        self.add(layer);
    }

    fn before_rotation(&mut self, _: usize, _: usize, q: &[f32], k: &[f32]) {
        self.q.clear();
        self.q.extend_from_slice(q);
        self.k.clear();
        self.k.extend_from_slice(k);
    }

    fn projected(&mut self, layer: usize, _: usize, _: &[f32], _: &[f32], v: &[f32]) {
        if self.source.is_none() {
            self.v.clear();
            self.v.extend_from_slice(v);
            self.add(layer);
        }
    }
}

/// Collects moments of queries, keys and values of every layer of `model` over `tokens`, run as sequences of `window`
/// tokens; the last may be shorter. Moments between query heads are kept if `between_queries`. `hidden_of` is another
/// model of the same sizes that runs instead and whose hidden states enter the projections: the model at
/// [`Stage::PartialRope`], if moments are taken again for the low rank. `progress` receives tokens done and tokens in
/// all.
pub fn calibrate(
    model: &Model,
    hidden_of: &Arc<Model>,
    tokens: &[u32],
    window: usize,
    between_queries: bool,
    threads: &Workspace,
    progress: &mut dyn FnMut(usize, usize),
    stop: &AtomicBool,
) -> Result<Vec<Calibration>> {
    let weights = convertible(model)?;
    let c = &model.config;
    let window = window.clamp(1, c.max_positions.min(CHUNK));
    let mut decoder = Decoder::on(hidden_of.clone(), &Recipe::default(), threads)?;
    let another = hidden_of.config.latent.is_some();
    let mut collector = Collector {
        layers: vec![Calibration::new(c.layer_shape(), between_queries); c.n_layers],
        source: another.then(|| (weights, Scratch::new())),
        q: Vec::new(),
        k: Vec::new(),
        v: Vec::new(),
        failed: None,
        stop,
    };
    let mut hidden = Vec::new();
    for (i, part) in tokens.chunks(window).enumerate() {
        decoder.reset();
        let run = decoder.forward_observed(part, Rows::None, &mut hidden, &mut collector);
        if let Some(e) = collector.failed.take() {
            return Err(e.into());
        }
        run?;
        progress((i * window + part.len()).min(tokens.len()), tokens.len());
    }
    Ok(collector.layers)
}

/// A model with latent attention and the figures of its layers.
#[derive(Clone, Debug)]
pub struct Latents {
    /// The model, ready to run.
    pub model: Model,
    /// Figures of every layer.
    pub figures: Vec<Figures>,
}

/// Converts every layer up to `stage`; `again` as in [`mla::convert`]. `neutral` adds norms that act as identities,
/// which [`write()`] needs. Layers are converted in parallel on the current rayon pool.
pub fn convert(
    model: &Model,
    params: &Params,
    stage: Stage,
    calibration: &[Calibration],
    again: Option<&[Calibration]>,
    neutral: bool,
) -> Result<Latents> {
    let weights = convertible(model)?;
    let c = &model.config;
    for found in [calibration.len(), again.map_or(c.n_layers, <[_]>::len)] {
        if found != c.n_layers {
            return Err(Error::invalid("the number of calibrated layers", found, c.n_layers.to_string()));
        }
    }
    let one = |(l, layer): (usize, &DecoderLayer)| {
        let [q, k, v, o] = [&layer.q, &layer.k, &layer.v, &layer.o].map(dense);
        let source =
            mla::Source { shape: c.layer_shape(), q: &q, k: &k, v: &v, o: &o, rope: c.rope.as_ref() };
        let second = again.map(|a| &a[l]);
        let converted = mla::convert(&source, params, stage, &calibration[l], second)?;
        let converted = if neutral { converted.with_neutral_norms() } else { converted };
        let figures = converted.figures;
        let config = latent_config(c, &converted);
        Ok::<_, Error>((with_latents(layer, converted)?, config, figures))
    };
    let converted: Vec<_> = weights.layers.par_iter().enumerate().map(one).collect::<Result<_>>()?;
    let config = converted.first().map(|(_, config, _)| config.clone());
    let config = config.ok_or_else(|| Error::invalid("the number of layers", 0, "at least 1"))?;
    let figures = converted.iter().map(|(_, _, figures)| *figures).collect();
    let layers = converted.into_iter().map(|(layer, _, _)| layer).collect();
    let weights = Weights::Decoder(DecoderWeights { layers, ..weights.clone() });
    Ok(Latents { model: Model { config, weights, ..model.clone() }, figures })
}

/// Returns the model's configuration with layers like this one.
fn latent_config(c: &ModelConfig, converted: &Converted) -> ModelConfig {
    ModelConfig {
        architecture: Architecture::DeepseekV3,
        n_kv_heads: c.n_heads,
        head_dim: converted.shape.d,
        latent: Some(LatentConfig {
            rank: converted.params.rank,
            rank_q: converted.params.rank_q,
            nope: converted.shape.d - converted.params.rope_dim,
            v_dim: converted.shape.d_v,
        }),
        rope: converted.rope.clone(),
        ..c.clone()
    }
}

/// Returns the layer with its attention converted.
fn with_latents(layer: &DecoderLayer, converted: Converted) -> Result<DecoderLayer> {
    let (q_a, q_a_norm) = match converted.q_a {
        Some((map, norm)) => (Some(stored(&map)?), norm),
        None => (None, None),
    };
    let maps = LatentMaps {
        q_a,
        q_a_norm,
        q: stored(&converted.q)?,
        kv_a: stored(&converted.kv_a)?,
        kv_a_norm: converted.kv_a_norm,
        kv_b: stored(&Dense::new(converted.kv_b))?,
        o: layer.o.clone(),
    };
    let [q, k, v] = [&maps.q, &maps.kv_a, &maps.kv_b].map(Clone::clone);
    let latent = LatentAttention::new(converted.shape, converted.params, converted.rope, maps)?;
    Ok(DecoderLayer { q, k, v, latent: Some(Arc::new(latent)), ..layer.clone() })
}

/// Returns the map in single precision.
fn dense(map: &Linear) -> Dense {
    let weight = Mat::from_vec(map.weight().to_f32(), map.outputs(), map.inputs());
    Dense { weight, bias: map.bias().map(<[f32]>::to_vec) }
}

fn stored(map: &Dense) -> Result<Linear> {
    let shape = vec![map.weight.rows(), map.weight.cols()];
    Tensor::from_f32(map.weight.data(), shape)
        .and_then(|weight| Linear::new(weight, map.bias.clone()))
        .ok_or_else(|| Error::invalid("a converted weight", "another shape", "a matrix"))
}

/// Returns the model with its matrices as a checkpoint stores them: new matrices and those in wider types become
/// `elements`, in a folder, which cannot store blocks, also quantised ones. The checkpoint of it, or of the same model
/// with identity norms, gives the same predictions up to single-precision rounding. 8 bits are only for GGUF files.
pub fn stored_as(model: &Model, elements: Elements, gguf: bool) -> Result<Model> {
    let Weights::Decoder(weights) = &model.weights else { return refuse("an encoder") };
    if elements == Elements::Q8 && !gguf {
        return refuse("matrices of 8 bits");
    }
    let tensor = |name: &str, t: &Tensor, elements: Elements| {
        let blocks = !gguf && t.format().block_len() > 1;
        if blocks || elements.narrower_than(t.format()) {
            elements.encode(name, &t.to_f32(), t.shape().to_vec())
        } else {
            Ok(t.clone())
        }
    };
    let linear = |name: &str, map: &Linear, elements: Elements| {
        let missing = || Error::MissingTensor { name: name.into() };
        let weight = tensor(name, map.weight(), elements)?;
        Linear::new(weight, map.bias().map(<[f32]>::to_vec)).ok_or_else(missing)
    };
    let layer = |(i, layer): (usize, &DecoderLayer)| {
        let part = |name: &str, map: &Linear| linear(&format!("{name} of layer {i}"), map, elements);
        let (gate, up, down) =
            (part("gate", &layer.gate)?, part("up", &layer.up)?, part("down", &layer.down)?);
        let Some(latent) = &layer.latent else { return refuse("layers without latents") };
        let maps = latent.maps();
        let to_latent = |name: &str, map: &Linear, norm: &Option<Vec<f32>>| {
            let own = if gguf && norm.is_none() { export::latent_elements(elements) } else { elements };
            linear(&format!("{name} of layer {i}"), map, own)
        };
        let q_a = maps.q_a.as_ref().map(|map| to_latent("q_a", map, &maps.q_a_norm)).transpose()?;
        let mut q = part("q", &maps.q)?;
        if let (Some(bias), false) = (q.bias(), gguf) {
            // A column of the matrix carries the bias there.
            let rounded = elements.encode("a bias of queries", bias, vec![bias.len()])?.to_f32();
            q = Linear::new(q.weight().clone(), Some(rounded)).unwrap_or(q);
        }
        let kv_b = match model.config.latent.filter(|_| gguf) {
            Some(l) => {
                let rounded = export::rounded_kv_b(&maps.kv_b.multiplied_out(), l, elements)?;
                stored(&Dense::new(Mat::from_vec(rounded, maps.kv_b.outputs(), maps.kv_b.inputs())))?
            }
            None => part("kv_b", &maps.kv_b)?,
        };
        let kv_a = to_latent("kv_a", &maps.kv_a, &maps.kv_a_norm)?;
        let maps = LatentMaps { q_a, q, kv_a, kv_b, o: part("o", &maps.o)?, ..maps.clone() };
        let [q, k, v, o] = [&maps.q, &maps.kv_a, &maps.kv_b, &maps.o].map(Clone::clone);
        let latent = Some(Arc::new(latent.with_maps(maps)?));
        Ok(DecoderLayer { q, k, v, o, latent, gate, up, down, ..layer.clone() })
    };
    let layers = weights.layers.par_iter().enumerate().map(layer).collect::<Result<_>>()?;
    let embedding = tensor("the embedding", &weights.embedding, elements)?;
    let output = if weights.is_tied() {
        let missing = || Error::MissingTensor { name: "the output".into() };
        let bias = weights.output.bias().map(<[f32]>::to_vec);
        Linear::new(embedding.clone(), bias).ok_or_else(missing)?
    } else {
        linear("the output", &weights.output, elements)?
    };
    let weights = Weights::Decoder(DecoderWeights { layers, embedding, output, ..weights.clone() });
    Ok(Model { weights, ..model.clone() })
}

/// Writes `config.json`, `model.safetensors` and the tokeniser of a model with latent attention, in the form of
/// DeepSeek-V3. Its layers must have norms of their latents: [`convert`] with `neutral`.
pub fn write(model: &Model, folder: &Folder) -> Result<()> {
    let config = config_json(model)?;
    folder.json("config.json", &config)?;
    folder.tokenizer(model)?;
    if has_mlp_biases(model) {
        folder.file(&format!("{MLP_BIAS_MODULE}.py"), MLP_BIAS_CLASS.as_bytes())?;
    }
    folder.tensors("model.safetensors", &tensors(model)?)
}

fn refuse<T>(what: &str) -> Result<T> {
    Err(Error::Unsupported { what: format!("writing {what} in the DeepSeek format") })
}

/// Python class for a folder whose feed-forward layers have biases, and the name of its file.
const MLP_BIAS_CLASS: &str = include_str!("../assets/modeling_mlp_bias.py");
const MLP_BIAS_MODULE: &str = "modeling_mlp_bias";

/// Returns true if a feed-forward layer has biases, which need a custom class in transformers.
pub fn has_mlp_biases(model: &Model) -> bool {
    let Weights::Decoder(weights) = &model.weights else { return false };
    weights.layers.iter().any(|l| [&l.gate, &l.up, &l.down].iter().any(|m| m.bias().is_some()))
}

fn stores_bf16(w: &DecoderWeights) -> bool {
    w.layers.iter().all(|l| l.k.weight().format() == Format::BF16)
}

fn tensors(model: &Model) -> Result<Vec<NamedTensor<'_>>> {
    let Weights::Decoder(weights) = &model.weights else { return refuse("an encoder") };
    let vector =
        |name: String, values: &'_ [f32]| NamedTensor::dense(name, vec![values.len()], values.to_vec());
    let mut list = vec![
        NamedTensor::stored("model.embed_tokens.weight", &weights.embedding),
        vector("model.norm.weight".into(), &weights.final_norm),
    ];
    if !weights.is_tied() {
        list.push(NamedTensor::stored("lm_head.weight", weights.output.weight()));
    }
    let mlp_biases = has_mlp_biases(model);
    let bias_of = |map: &Linear| map.bias().map_or_else(|| vec![0.0; map.outputs()], <[f32]>::to_vec);
    for (l, layer) in weights.layers.iter().enumerate() {
        let name = |part: &str| format!("model.layers.{l}.{part}");
        let Some(latent) = &layer.latent else { return refuse("layers without latents") };
        let maps = latent.maps();
        let norms =
            [("input_layernorm", &layer.attention_norm), ("post_attention_layernorm", &layer.ffn_norm)];
        for (part, norm) in norms {
            let Some(norm) = norm else { return refuse("layers without norms") };
            list.push(vector(name(&format!("{part}.weight")), norm));
        }
        for (part, map) in [("gate", &layer.gate), ("up", &layer.up), ("down", &layer.down)] {
            list.push(NamedTensor::stored(name(&format!("mlp.{part}_proj.weight")), map.weight()));
            if mlp_biases {
                list.push(vector(name(&format!("mlp.{part}_proj.bias")), &bias_of(map)));
            }
        }
        let query = if maps.q_a.is_some() { "q_b_proj" } else { "q_proj" };
        // The last item is true if the class has a bias there.
        let attention = [
            (query, Some(&maps.q), false),
            ("q_a_proj", maps.q_a.as_ref(), true),
            ("kv_a_proj_with_mqa", Some(&maps.kv_a), true),
            ("kv_b_proj", Some(&maps.kv_b), false),
            ("o_proj", Some(&maps.o), true),
        ];
        for (part, map, biased) in attention {
            let Some(map) = map else { continue };
            list.push(NamedTensor::stored(name(&format!("self_attn.{part}.weight")), map.weight()));
            if biased {
                list.push(vector(name(&format!("self_attn.{part}.bias")), &bias_of(map)));
            } else if map.bias().is_some() {
                return refuse("a bias of queries without a latent that carries it");
            }
        }
        let Some(norm) = &maps.kv_a_norm else { return refuse("layers without norms of their latents") };
        list.push(vector(name("self_attn.kv_a_layernorm.weight"), norm));
        match (&maps.q_a, &maps.q_a_norm) {
            (Some(_), Some(norm)) => list.push(vector(name("self_attn.q_a_layernorm.weight"), norm)),
            (Some(_), None) => return refuse("layers without norms of their latents"),
            (None, _) => {}
        }
    }
    Ok(list)
}

/// Returns the configuration; an error if the stock class cannot express some property.
fn config_json(model: &Model) -> Result<serde_json::Value> {
    let c = &model.config;
    let Weights::Decoder(weights) = &model.weights else { return refuse("an encoder") };
    let (Some(l), Some(rope)) = (c.latent, &c.rope) else {
        return refuse("a model without latents or without rotary positions");
    };
    if l.nope == 0 {
        return refuse("a model all of whose features are rotated");
    }
    let scaling = scaling_json(rope)?;
    let mut parameters = scaling.clone().unwrap_or_else(|| json!({"rope_type": "default"}));
    parameters["rope_theta"] = rope.base.into();
    let mut config = json!({
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": Architecture::DeepseekV3.name(),
        // Half precision lacks the range that norms of latents need.
        "dtype": if stores_bf16(weights) { "bfloat16" } else { "float32" },
        "hidden_act": "silu",
        "hidden_size": c.hidden,
        "intermediate_size": c.intermediate,
        "num_hidden_layers": c.n_layers,
        "num_attention_heads": c.n_heads,
        "num_key_value_heads": c.n_heads,
        "kv_lora_rank": l.rank,
        "q_lora_rank": l.rank_q,
        "qk_nope_head_dim": l.nope,
        "qk_rope_head_dim": rope.dim,
        "qk_head_dim": c.head_dim,
        "head_dim": rope.dim,
        "v_head_dim": l.v_dim,
        "attention_bias": true,
        "rope_interleave": true,
        // Both keys: earlier and later versions of transformers read different ones.
        "rope_theta": rope.base,
        "rope_scaling": scaling,
        "rope_parameters": parameters,
        "first_k_dense_replace": c.n_layers,
        "max_position_embeddings": c.max_positions,
        "rms_norm_eps": c.norm_eps,
        "tie_word_embeddings": weights.is_tied(),
        "vocab_size": c.vocab,
        "bos_token_id": model.tokenizer.bos(),
        "eos_token_id": if c.eos.len() == 1 { json!(c.eos[0]) } else { json!(c.eos) },
    });
    if has_mlp_biases(model) {
        config["model_type"] = crate::config::MLP_BIAS_NAME.into();
        config["architectures"] = json!(["DeepseekV3MlpBiasForCausalLM"]);
        let class = |name: &str| format!("{MLP_BIAS_MODULE}.{name}");
        config["auto_map"] = json!({"AutoConfig": class("DeepseekV3MlpBiasConfig"),
            "AutoModel": class("DeepseekV3MlpBiasModel"),
            "AutoModelForCausalLM": class("DeepseekV3MlpBiasForCausalLM")});
    }
    Ok(config)
}

/// Returns the context extension in the form of `config.json`, if there is one.
fn scaling_json(rope: &Rope) -> Result<Option<serde_json::Value>> {
    let llama3 = |factor: f64, low: f64, high: f64, original: f64| {
        Ok(Some(json!({"rope_type": "llama3", "factor": factor, "low_freq_factor": low,
            "high_freq_factor": high, "original_max_position_embeddings": original as u64})))
    };
    match &rope.scaling {
        Scaling::None => Ok(None),
        Scaling::Linear { factor } => Ok(Some(json!({"rope_type": "linear", "factor": factor}))),
        Scaling::Llama3 { factor, low_freq, high_freq, original } => {
            llama3(*factor, *low_freq, *high_freq, *original)
        }
        Scaling::Divisors(divisors) => {
            // GGUF files of Llama 3 store the divisors instead of the rule; its other constants never varied.
            let factor = divisors.iter().copied().fold(1.0, f64::max).round();
            let rule = Scaling::Llama3 { factor, low_freq: 1.0, high_freq: 4.0, original: 8192.0 };
            let (own, theirs) = (rope.frequencies(1), Rope { scaling: rule, ..rope.clone() }.frequencies(1));
            if own.iter().zip(&theirs).all(|(a, b)| (a / b - 1.0).abs() < 1e-5) {
                return llama3(factor, 1.0, 4.0, 8192.0);
            }
            refuse("rotary frequencies that no rule gives")
        }
        _ => refuse("this context extension"),
    }
}
