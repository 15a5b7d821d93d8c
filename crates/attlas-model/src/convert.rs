//! A grouped-query model as one with latent attention: calibration on text, every layer converted, a checkpoint written.
//!
//! The mathematics is that of [`attlas::conversions::mla`]; this module runs a model over calibration text, collects
//! second moments layer by layer, and puts the new layers in place of the old ones. A converted model runs like any
//! other, at every stage, so that what a stage costs can be measured in perplexity.

use crate::config::{Architecture, LatentConfig, ModelConfig};
use crate::decoder::{CHUNK, Decoder, Observer, Rows};
use crate::error::{Error, Result};
use crate::linear::Linear;
use crate::model::Model;
use crate::recipe::Recipe;
use crate::tensor::Tensor;
use crate::weights::{DecoderWeights, Weights};
use attlas::conversions::mla::{self, Calibration, Converted, Params, Stage};
use attlas::layer::{Dense, LayerShape};
use attlas::{Mat, Workspace};
use attlas_num::rope::Scaling;
use safetensors::tensor::{Dtype, TensorView};
use std::path::Path;
use std::sync::Arc;

/// The decoder's weights, if its layers can be converted: grouped-query attention over all tokens without norms between
/// projections and rotation.
fn convertible(model: &Model) -> Result<&DecoderWeights> {
    let c = &model.config;
    let refuse =
        |what: String| Err(Error::Unsupported { what: format!("converting {what} to latent attention") });
    let Weights::Decoder(weights) = &model.weights else {
        return refuse("an encoder".into());
    };
    if c.latent.is_some() {
        return refuse("a model that has latent attention".into());
    }
    if weights.layers.iter().any(|l| l.q_norm.is_some() || l.k_norm.is_some()) {
        return refuse("a model with norms of query and key heads".into());
    }
    if c.windows.iter().any(Option::is_some) {
        return refuse("a model with sliding windows".into());
    }
    Ok(weights)
}

fn layer_shape(c: &ModelConfig) -> LayerShape {
    LayerShape {
        d_model: c.hidden,
        n_heads: c.n_heads,
        n_kv_heads: c.n_kv_heads,
        d: c.head_dim,
        d_v: c.head_dim,
    }
}

/// Collects moments of every layer.
struct Collector {
    layers: Vec<Calibration>,
    /// Queries and keys of the layer at hand, before rotation.
    q: Vec<f32>,
    k: Vec<f32>,
    failed: Option<attlas::Error>,
}

impl Observer for Collector {
    fn before_rotation(&mut self, _: usize, _: usize, q: &[f32], k: &[f32]) {
        self.q.clear();
        self.q.extend_from_slice(q);
        self.k.clear();
        self.k.extend_from_slice(k);
    }

    fn projected(&mut self, layer: usize, _: usize, _: &[f32], _: &[f32], v: &[f32]) {
        if let Err(e) = self.layers[layer].add(&self.q, &self.k, v) {
            self.failed = Some(e);
        }
    }
}

/// Moments of queries, keys and values of every layer over `tokens`, run as sequences of `window` tokens; the last may
/// be shorter. `progress` is told how many tokens of how many are done.
pub fn calibrate(
    model: &Arc<Model>,
    tokens: &[u32],
    window: usize,
    between_queries: bool,
    threads: &Workspace,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Vec<Calibration>> {
    convertible(model)?;
    let c = &model.config;
    let window = window.clamp(1, c.max_positions.min(CHUNK));
    let mut decoder = Decoder::on(model.clone(), &Recipe::default(), threads)?;
    let layers = vec![Calibration::new(layer_shape(c), between_queries); c.n_layers];
    let mut collector = Collector { layers, q: Vec::new(), k: Vec::new(), failed: None };
    let mut hidden = Vec::new();
    for (i, part) in tokens.chunks(window).enumerate() {
        decoder.reset();
        decoder.forward_observed(part, Rows::None, &mut hidden, &mut collector)?;
        if let Some(e) = collector.failed.take() {
            return Err(e.into());
        }
        progress((i * window + part.len()).min(tokens.len()), tokens.len());
    }
    Ok(collector.layers)
}

/// A model with latent attention and the layers it was made of.
#[derive(Clone, Debug)]
pub struct Latents {
    /// The model, ready to run.
    pub model: Model,
    /// Its layers, with what each kept and lost.
    pub layers: Vec<Converted>,
}

/// The model with every layer converted as far as `stage`; `again` as in [`mla::convert`]. `neutral` adds norms that do
/// nothing, which programs that always apply them need.
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
    let mut layers = Vec::with_capacity(c.n_layers);
    let mut new = weights.clone();
    for (l, layer) in new.layers.iter_mut().enumerate() {
        let [q, k, v, o] = [&layer.q, &layer.k, &layer.v, &layer.o].map(dense);
        let source = mla::Source { shape: layer_shape(c), q: &q, k: &k, v: &v, o: &o, rope: c.rope.as_ref() };
        let second = again.map(|a| &a[l]);
        let mut converted = mla::convert(&source, params, stage, &calibration[l], second)?;
        if neutral {
            converted = converted.with_neutral_norms();
        }
        layer.latent = Some(Arc::new(converted.layer()?));
        layer.q = stored(&converted.q)?;
        layer.k = stored(&converted.kv_a)?;
        layer.v = stored(&Dense::new(converted.kv_b.clone()))?;
        layer.o = stored(&converted.o)?;
        layers.push(converted);
    }
    let Some(first) = layers.first() else {
        return Err(Error::invalid("the number of layers", 0, "at least 1"));
    };
    let config = ModelConfig {
        architecture: Architecture::DeepseekV3,
        n_kv_heads: c.n_heads,
        head_dim: first.shape.d,
        latent: Some(LatentConfig {
            rank: first.params.rank,
            rank_q: first.params.rank_q,
            nope: first.shape.d - first.params.rope_dim,
            v_dim: first.shape.d_v,
        }),
        rope: first.rope.clone(),
        ..c.clone()
    };
    let model = Model { config, weights: Weights::Decoder(new), ..model.clone() };
    Ok(Latents { model, layers })
}

/// The map in single precision.
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

impl Latents {
    /// Writes `config.json` and `model.safetensors` in the form of DeepSeek-V3 into a folder that does not exist yet.
    /// The layers must have norms ([`convert`] with `neutral`). Files are complete or not there.
    pub fn write(&self, folder: &Path) -> Result<()> {
        let config = self.config_json()?;
        let io = |path: &Path| {
            let path = path.to_path_buf();
            move |source| Error::Io { path, source }
        };
        if folder.exists() {
            return Err(io(folder)(std::io::ErrorKind::AlreadyExists.into()));
        }
        let name = folder.file_name().map_or_else(Default::default, |n| n.to_string_lossy().into_owned());
        let part = folder.with_file_name(format!("{name}.part"));
        std::fs::create_dir_all(&part).map_err(io(&part))?;
        let written = self.write_tensors(&part.join("model.safetensors")).and_then(|()| {
            let path = part.join("config.json");
            let text = serde_json::to_string_pretty(&config)?;
            std::fs::write(&path, text + "\n").map_err(io(&path))?;
            std::fs::rename(&part, folder).map_err(io(folder))
        });
        if written.is_err() {
            // What was begun is of no use; that it cannot be removed either is not the first thing to say.
            let _ = std::fs::remove_dir_all(&part);
        }
        written
    }

    fn write_tensors(&self, path: &Path) -> Result<()> {
        let Weights::Decoder(weights) = &self.model.weights else {
            unreachable!("only decoders are converted")
        };
        let c = &self.model.config;
        let mut list: Vec<(String, Vec<usize>, Vec<f32>)> = vec![
            ("model.embed_tokens.weight".into(), vec![c.vocab, c.hidden], weights.embedding.to_f32()),
            ("model.norm.weight".into(), vec![c.hidden], weights.final_norm.clone()),
        ];
        if !self.tied() {
            let output = weights.output.weight().to_f32();
            list.push(("lm_head.weight".into(), vec![c.vocab, c.hidden], output));
        }
        for (l, (layer, converted)) in weights.layers.iter().zip(&self.layers).enumerate() {
            let mut add = |name: &str, shape: Vec<usize>, data: Vec<f32>| {
                list.push((format!("model.layers.{l}.{name}"), shape, data));
            };
            let vector = |v: &[f32]| (vec![v.len()], v.to_vec());
            for (name, norm) in
                [("input_layernorm", &layer.attention_norm), ("post_attention_layernorm", &layer.ffn_norm)]
            {
                let (shape, data) = vector(norm);
                add(&format!("{name}.weight"), shape, data);
            }
            for (name, map) in [("gate", &layer.gate), ("up", &layer.up), ("down", &layer.down)] {
                let shape = vec![map.outputs(), map.inputs()];
                add(&format!("mlp.{name}_proj.weight"), shape, map.weight().to_f32());
            }
            let mut map = |name: &str, map: &Dense, biased: bool| {
                let shape = vec![map.weight.rows(), map.weight.cols()];
                add(&format!("self_attn.{name}.weight"), shape, map.weight.data().to_vec());
                if biased {
                    let bias = map.bias.clone().unwrap_or_else(|| vec![0.0; map.weight.rows()]);
                    add(&format!("self_attn.{name}.bias"), vec![bias.len()], bias);
                }
            };
            let query = if converted.q_a.is_some() { "q_b_proj" } else { "q_proj" };
            map(query, &converted.q, false);
            map("kv_a_proj_with_mqa", &converted.kv_a, true);
            map("kv_b_proj", &Dense::new(converted.kv_b.clone()), false);
            map("o_proj", &converted.o, true);
            if let Some((q_a, norm)) = &converted.q_a {
                map("q_a_proj", q_a, true);
                let (shape, data) = vector(norm.as_deref().unwrap_or_default());
                add("self_attn.q_a_layernorm.weight", shape, data);
            }
            let (shape, data) = vector(converted.kv_a_norm.as_deref().unwrap_or_default());
            add("self_attn.kv_a_layernorm.weight", shape, data);
        }
        let bytes: Vec<Vec<u8>> =
            list.iter().map(|(_, _, data)| data.iter().flat_map(|x| x.to_le_bytes()).collect()).collect();
        let views = list
            .iter()
            .zip(&bytes)
            .map(|((name, shape, _), bytes)| Ok((name, TensorView::new(Dtype::F32, shape.clone(), bytes)?)))
            .collect::<std::result::Result<Vec<_>, safetensors::SafeTensorError>>()?;
        let about = std::collections::HashMap::from([("format".to_owned(), "pt".to_owned())]);
        Ok(safetensors::tensor::serialize_to_file(views, Some(about), path)?)
    }

    fn tied(&self) -> bool {
        let Weights::Decoder(w) = &self.model.weights else { return false };
        w.output.weight().bytes().as_ptr() == w.embedding.bytes().as_ptr()
    }

    /// The configuration; an error if the stock class has no place for something.
    fn config_json(&self) -> Result<serde_json::Value> {
        let c = &self.model.config;
        let (Some(l), Some(rope)) = (c.latent, &c.rope) else {
            return Err(Error::Unsupported { what: "writing a model without rotary positions".into() });
        };
        let refuse =
            |what: &str| Err(Error::Unsupported { what: format!("writing {what} in the DeepSeek format") });
        if self.layers.iter().any(|x| x.kv_a_norm.is_none()) {
            return refuse("layers without norms of their latents");
        }
        if self.layers.iter().any(|x| x.q.bias.is_some()) {
            return refuse("biases of queries");
        }
        let mut parameters = serde_json::json!({"rope_type": "default", "rope_theta": rope.base});
        match &rope.scaling {
            Scaling::None => {}
            Scaling::Linear { factor } => {
                parameters["rope_type"] = "linear".into();
                parameters["factor"] = (*factor).into();
            }
            Scaling::Llama3 { factor, low_freq, high_freq, original } => {
                parameters["rope_type"] = "llama3".into();
                parameters["factor"] = (*factor).into();
                parameters["low_freq_factor"] = (*low_freq).into();
                parameters["high_freq_factor"] = (*high_freq).into();
                parameters["original_max_position_embeddings"] = (*original).into();
            }
            _ => return refuse("this context extension"),
        }
        Ok(serde_json::json!({
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "dtype": "float32",
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
            "rope_theta": rope.base,
            "rope_parameters": parameters,
            "first_k_dense_replace": c.n_layers,
            "max_position_embeddings": c.max_positions,
            "rms_norm_eps": c.norm_eps,
            "tie_word_embeddings": self.tied(),
            "vocab_size": c.vocab,
            "eos_token_id": c.eos,
        }))
    }
}
