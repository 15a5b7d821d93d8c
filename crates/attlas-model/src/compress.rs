//! A model with its matrices in factored form: conversions of the registry applied to a checkpoint, and what they make of
//! it written as a folder that [`Model::open`] reads and runs on the factors.
//!
//! The mathematics is that of [`attlas::conversions`]; this module shows a model to it as a list of matrices, writes the
//! result in the form of [`factored`](crate::factored), and counts. Tensors that a conversion leaves alone are written as
//! they are, quantised blocks included, so that a comparison shows the conversion and nothing else.

use crate::config::{Architecture, ModelConfig};
use crate::error::{Error, Result};
use crate::factored::{Part, Replaced, Section, Stored, VERSION};
use crate::linear::{Linear, flops};
use crate::model::Model;
use crate::save::{Folder, NamedTensor};
use crate::tensor::{Source, Tensor};
use crate::weights::{DecoderWeights, EncoderWeights, HF_DECODER, HF_ENCODER, Weights};
use attlas::conversions::common::network::{Network, Request, Rewritten, Role, Slot, Weight};
use attlas::conversions::common::product::{Factor, Values};
use attlas::layer::{Conversion, Dense, LayerShape};
use attlas::{Mask, Mat, Options};
use attlas_num::kernels::quant::Format;
use attlas_num::rope::{Layout, Rope, Scaling};
use serde_json::{Value as Json, json};
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;

/// A model as a list of matrices, in the orientation and order of rows of Hugging Face checkpoints.
#[derive(Clone, Copy, Debug)]
struct Matrices<'a> {
    model: &'a Model,
}

impl<'a> Matrices<'a> {
    /// An error if the model is already in factored form.
    fn new(model: &'a Model) -> Result<Self> {
        if model.weights.has_products() || model.weights.has_other_attention() {
            let what = "compressing a model that is already in another form".into();
            return Err(Error::Unsupported { what });
        }
        Ok(Self { model })
    }

    fn linear(&self, slot: Slot) -> Option<&'a Linear> {
        match &self.model.weights {
            Weights::Decoder(w) => {
                let l = w.layers.get(slot.layer)?;
                Some(match slot.role {
                    Role::Query => &l.q,
                    Role::Key => &l.k,
                    Role::Value => &l.v,
                    Role::Output => &l.o,
                    Role::Gate => &l.gate,
                    Role::Up => &l.up,
                    Role::Down => &l.down,
                })
            }
            Weights::Encoder(w) => {
                let l = w.layers.get(slot.layer)?;
                Some(match slot.role {
                    Role::Query => &l.q,
                    Role::Key => &l.k,
                    Role::Value => &l.v,
                    Role::Output => &l.o,
                    Role::Gate => return None,
                    Role::Up => &l.up,
                    Role::Down => &l.down,
                })
            }
        }
    }

    /// For each row of the matrix as Hugging Face orders it, which stored row it is; `None` where all are in place.
    /// llama.cpp puts the halves of a rotated pair beside one another.
    fn order(&self, slot: Slot) -> Option<Vec<usize>> {
        let c = &self.model.config;
        let rope = c.rope.as_ref().filter(|r| r.layout == Layout::Interleaved)?;
        let heads = match slot.role {
            Role::Query => c.n_heads,
            Role::Key => c.n_kv_heads,
            _ => return None,
        };
        let half = rope.dim / 2;
        let within = move |i: usize| match i {
            i if i < half => 2 * i,
            i if i < 2 * half => 2 * (i - half) + 1,
            i => i,
        };
        let d = c.head_dim;
        Some((0..heads).flat_map(|h| (0..d).map(move |i| h * d + within(i))).collect())
    }

    /// The stored tensor with its rows in order, and the bias.
    fn stored(&self, slot: Slot) -> Option<(Cow<'a, Tensor>, Option<Vec<f32>>)> {
        let map = self.linear(slot)?;
        let Some(order) = self.order(slot) else {
            return Some((Cow::Borrowed(map.weight()), map.bias().map(<[f32]>::to_vec)));
        };
        let weight = map.weight().as_weight();
        let bytes: Vec<u8> = order.iter().flat_map(|&r| weight.row(r)).copied().collect();
        let range = 0..bytes.len();
        let (format, shape) = (map.weight().format(), map.weight().shape().to_vec());
        let tensor = Tensor::new(Arc::new(Source::Owned(bytes)), range, format, shape)?;
        Some((Cow::Owned(tensor), map.bias().map(|b| order.iter().map(|&r| b[r]).collect())))
    }

    /// The name of a map, without `.weight`.
    fn name(&self, slot: Slot) -> String {
        if self.model.config.architecture.is_encoder() {
            let n = &HF_ENCODER;
            let part = [n.q, n.k, n.v, n.o, n.up, n.up, n.down][slot.role as usize];
            format!("{}.{part}", (n.layer)(slot.layer))
        } else {
            let n = &HF_DECODER;
            let part = [n.q, n.k, n.v, n.o, n.gate, n.up, n.down][slot.role as usize];
            format!("model.{}.{part}", (n.layer)(slot.layer))
        }
    }

    fn slots(&self) -> impl Iterator<Item = Slot> + '_ {
        let all =
            (0..self.model.config.n_layers).flat_map(|layer| Role::ALL.map(|role| Slot { layer, role }));
        all.filter(|s| self.linear(*s).is_some())
    }
}

impl Network for Matrices<'_> {
    fn shape(&self) -> LayerShape {
        let c = &self.model.config;
        LayerShape {
            d_model: c.hidden,
            n_heads: c.n_heads,
            n_kv_heads: c.n_kv_heads,
            d: c.head_dim,
            d_v: c.head_dim,
        }
    }

    fn n_layers(&self) -> usize {
        self.model.config.n_layers
    }

    fn size(&self, slot: Slot) -> Option<(usize, usize)> {
        self.linear(slot).map(|l| (l.outputs(), l.inputs()))
    }

    fn map(&self, slot: Slot) -> attlas::Result<Dense> {
        let missing = || attlas::Error::UnknownId { kind: "matrix", id: slot.to_string(), known: Vec::new() };
        let (weight, bias) = self.stored(slot).ok_or_else(missing)?;
        Ok(Dense { weight: Mat::from_vec(weight.to_f32(), weight.rows(), weight.cols()), bias })
    }

    fn rope(&self) -> Option<Rope> {
        self.model.config.rope.clone().map(|rope| Rope { layout: Layout::Half, ..rope })
    }

    fn obstacles(&self) -> Vec<String> {
        let mut list = Vec::new();
        if self.model.config.windows.iter().any(Option::is_some) {
            list.push("sliding windows".to_owned());
        }
        if let Weights::Decoder(w) = &self.model.weights
            && w.layers.iter().any(|l| l.q_norm.is_some() || l.k_norm.is_some())
        {
            list.push("norms of query and key heads".to_owned());
        }
        list
    }
}

/// What a conversion made of a model.
#[derive(Clone, Debug)]
pub struct Compressed<'a> {
    model: &'a Model,
    conversion: &'static Conversion,
    options: Options,
    /// The maps and layers that take the place of others.
    pub rewritten: Rewritten,
}

/// Applies a conversion to a model, to the layers and matrices given or those that it chooses. `progress` is told how many
/// parts of how many are done.
pub fn compress<'a>(
    model: &'a Model,
    conversion: &'static Conversion,
    options: &Options,
    layers: Option<&[usize]>,
    roles: Option<&[Role]>,
    progress: &(dyn Fn(usize, usize) + Sync),
) -> Result<Compressed<'a>> {
    let matrices = Matrices::new(model)?;
    let run = conversion.run.ok_or_else(|| Error::Unsupported {
        what: format!("applying {} without calibration text, as compress does,", conversion.id),
    })?;
    let rewritten = run(&Request { network: &matrices, layers, roles, options, progress })?;
    Ok(Compressed { model, conversion, options: options.clone(), rewritten })
}

/// Element types that factors can be stored in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Elements {
    /// Single precision.
    F32,
    /// Half precision.
    F16,
    /// The upper half of a single.
    Bf16,
    /// 8 bits and a scale for 32 numbers; half precision where rows are no multiple of 32 or a matrix is used transposed.
    Q8,
}

impl Elements {
    /// Numbers in this form. An error if one is too large for it or is not finite.
    fn encode(self, name: &str, values: &[f32], shape: Vec<usize>) -> Result<Tensor> {
        let most = match self {
            Self::F32 | Self::Bf16 => f32::MAX,
            Self::F16 | Self::Q8 => half::f16::MAX.to_f32(),
        };
        if let Some(bad) = values.iter().find(|x| x.is_nan() || x.abs() > most) {
            let expected = format!("at most {most} in magnitude; store factors as f32");
            return Err(Error::invalid(format!("a number of {name}"), bad, expected));
        }
        let blocks = self == Self::Q8 && shape.last().is_some_and(|n| n.is_multiple_of(32));
        let (format, bytes): (Format, Vec<u8>) = match self {
            Self::Q8 if blocks => (Format::Q8_0, values.chunks_exact(32).flat_map(block).collect()),
            Self::F32 => (Format::F32, values.iter().flat_map(|x| x.to_le_bytes()).collect()),
            Self::Bf16 => {
                (Format::BF16, values.iter().flat_map(|&x| half::bf16::from_f32(x).to_le_bytes()).collect())
            }
            Self::F16 | Self::Q8 => {
                (Format::F16, values.iter().flat_map(|&x| half::f16::from_f32(x).to_le_bytes()).collect())
            }
        };
        let range = 0..bytes.len();
        Tensor::new(Arc::new(Source::Owned(bytes)), range, format, shape)
            .ok_or_else(|| Error::invalid(format!("the size of {name}"), values.len(), "that of its shape"))
    }
}

/// 32 numbers as a scale and 8 bits each, as in GGUF's Q8_0.
fn block(values: &[f32]) -> [u8; 34] {
    let largest = values.iter().fold(0.0f32, |m, x| m.max(x.abs()));
    let scale = half::f16::from_f32(largest / 127.0);
    let inverse = if scale.to_f32() > 0.0 { 1.0 / scale.to_f32() } else { 0.0 };
    let mut out = [0; 34];
    out[..2].copy_from_slice(&scale.to_le_bytes());
    let bytes = out[2..].iter_mut().zip(values);
    bytes.for_each(|(o, x)| *o = (x * inverse).round().clamp(-127.0, 127.0) as i8 as u8);
    out
}

/// Tensors to write and what the section says of them.
#[derive(Default)]
struct Contents<'a> {
    tensors: Vec<(String, Cow<'a, Tensor>)>,
    vectors: Vec<(String, Cow<'a, [f32]>)>,
    section: BTreeMap<String, Stored>,
    /// Shared matrices that were written, by address.
    shared: HashMap<usize, String>,
}

impl<'a> Contents<'a> {
    fn tensor(&mut self, name: String, tensor: Cow<'a, Tensor>) {
        let format = tensor.format();
        if !matches!(format, Format::F32 | Format::F16 | Format::BF16) {
            let stored = Stored { format: format.name().into(), shape: tensor.shape().to_vec() };
            self.section.insert(name.clone(), stored);
        }
        self.tensors.push((name, tensor));
    }

    fn dense(&mut self, name: &str, map: &Dense, elements: Elements) -> Result<()> {
        let weight = format!("{name}.weight");
        let shape = vec![map.weight.rows(), map.weight.cols()];
        let tensor = elements.encode(&weight, map.weight.data(), shape)?;
        self.tensor(weight, Cow::Owned(tensor));
        if let Some(bias) = &map.bias {
            self.vectors.push((format!("{name}.bias"), Cow::Owned(bias.clone())));
        }
        Ok(())
    }

    fn stored(&mut self, name: &str, (weight, bias): (Cow<'a, Tensor>, Option<Vec<f32>>)) {
        self.tensor(format!("{name}.weight"), weight);
        if let Some(bias) = bias {
            self.vectors.push((format!("{name}.bias"), Cow::Owned(bias)));
        }
    }

    /// The name under which shared numbers are written, and whether this is the first time.
    fn share(&mut self, address: usize) -> (String, bool) {
        let next = format!("attlas.factor.{}", self.shared.len());
        let name = self.shared.entry(address).or_insert_with(|| next.clone()).clone();
        let first = name == next;
        (name, first)
    }

    fn factor(&mut self, factor: &Factor, elements: Elements) -> Result<Part> {
        let Factor { values, transposed, slices } = factor;
        let (transposed, slices) = (*transposed, *slices);
        // Blocks run along rows: what is transposed when it is read is better kept as numbers.
        let matrix = if elements == Elements::Q8 && transposed { Elements::F16 } else { elements };
        // Weights of mixtures and diagonals are few.
        let exact = Elements::F32;
        let write =
            |this: &mut Self, address: usize, shape: Vec<usize>, data: Cow<'_, [f32]>, e: Elements| {
                let (name, first) = this.share(address);
                if first {
                    let tensor = e.encode(&name, &data, shape)?;
                    this.tensor(name.clone(), Cow::Owned(tensor));
                }
                Ok::<String, Error>(name)
            };
        let mat = |m: &Arc<Mat<f32>>| (Arc::as_ptr(m) as usize, vec![m.rows(), m.cols()]);
        Ok(match values {
            Values::Matrix(m) => {
                let (address, shape) = mat(m);
                let tensor = write(self, address, shape, Cow::Borrowed(m.data()), matrix)?;
                Part::Matrix { tensor, transposed, slices }
            }
            Values::Diagonal { table, row } => {
                let (address, shape) = mat(table);
                let diagonal = write(self, address, shape, Cow::Borrowed(table.data()), exact)?;
                Part::Diagonal { diagonal, row: *row }
            }
            Values::Mixture { cores, weights, rows } => {
                let (height, width) = cores.first().map_or((0, 0), |c| (c.rows(), c.cols()));
                let all: Vec<f32> = cores.iter().flat_map(|c| c.data()).copied().collect();
                let shape = vec![cores.len(), height, width];
                // Mixed when they are read, so quantised blocks would gain nothing but error.
                let e = if elements == Elements::Q8 { Elements::F16 } else { elements };
                let cores = write(self, Arc::as_ptr(cores) as usize, shape, Cow::Owned(all), e)?;
                let (address, shape) = mat(weights);
                let mixture = write(self, address, shape, Cow::Borrowed(weights.data()), exact)?;
                Part::Mixture { cores, mixture, rows: rows.clone(), transposed, slices }
            }
        })
    }
}

impl Compressed<'_> {
    /// Writes the folder, which must not exist yet: configuration, weights, and what texts are tokenised with. It appears
    /// whole or not at all.
    pub fn write(&self, path: &Path, elements: Elements) -> Result<()> {
        let folder = Folder::create(path)?;
        let matrices = Matrices { model: self.model };
        let mut contents = Contents::default();
        match &self.model.weights {
            Weights::Decoder(w) => decoder_tensors(w, &mut contents),
            Weights::Encoder(w) => encoder_tensors(w, &mut contents),
        }
        let mut maps = BTreeMap::new();
        for slot in matrices.slots() {
            let replaced = slot.role.in_attention() && self.rewritten.attention.contains_key(&slot.layer);
            if replaced {
                continue;
            }
            let missing = || Error::MissingTensor { name: slot.to_string() };
            let (name, stored) = (matrices.name(slot), matrices.stored(slot).ok_or_else(missing)?);
            match self.rewritten.maps.get(&slot) {
                None => contents.stored(&name, stored),
                Some(product) => {
                    if let [Factor { values: Values::Matrix(m), transposed: false, slices: 1 }] =
                        &product.factors[..]
                    {
                        let dense = Dense { weight: m.as_ref().clone(), bias: stored.1 };
                        contents.dense(&name, &dense, elements)?;
                        continue;
                    }
                    let parts = product.factors.iter().map(|f| contents.factor(f, elements));
                    maps.insert(name.clone(), parts.collect::<Result<Vec<Part>>>()?);
                    if let Some(bias) = stored.1 {
                        contents.vectors.push((format!("{name}.bias"), Cow::Owned(bias)));
                    }
                }
            }
        }
        let mut attention = BTreeMap::new();
        for (&layer, a) in &self.rewritten.attention {
            let mut weights = BTreeMap::new();
            for (weight, value) in &a.weights {
                let name = match value {
                    Weight::Kept(role) => {
                        let slot = Slot { layer, role: *role };
                        let missing = || Error::MissingTensor { name: slot.to_string() };
                        let name = matrices.name(slot);
                        contents.stored(&name, matrices.stored(slot).ok_or_else(missing)?);
                        name
                    }
                    Weight::New(dense) => {
                        let name = format!("attlas.attention.{layer}.{weight}");
                        // A few numbers a head that multiply everything else.
                        let few = dense.weight.cols() == 1;
                        contents.dense(&name, dense, if few { Elements::F32 } else { elements })?;
                        name
                    }
                };
                weights.insert((*weight).to_owned(), name);
            }
            let s = a.shape;
            let shape = [s.d_model, s.n_heads, s.n_kv_heads, s.d, s.d_v];
            let layer_id = self.conversion.to.to_owned();
            attention.insert(layer, Replaced { layer: layer_id, options: a.options.clone(), shape, weights });
        }
        let section = Section {
            version: VERSION,
            conversion: self.conversion.id.into(),
            params: self.options.clone(),
            stored: contents.section,
            maps,
            attention,
        };
        let mut config = config_json(self.model)?;
        config["attlas"] = serde_json::to_value(&section)?;
        folder.json("config.json", &config)?;
        let tensors: Vec<NamedTensor<'_>> = contents
            .tensors
            .iter()
            .map(|(name, t)| NamedTensor::blocks(name.clone(), t))
            .chain(
                contents
                    .vectors
                    .iter()
                    .map(|(name, v)| NamedTensor::dense(name.clone(), vec![v.len()], &v[..])),
            )
            .collect();
        folder.tensors("model.safetensors", &tensors)?;
        folder.tokenizer(self.model)?;
        folder.finish()
    }
}

fn decoder_tensors<'a>(w: &'a DecoderWeights, out: &mut Contents<'a>) {
    let n = &HF_DECODER;
    out.tensor(format!("model.{}", n.embedding), Cow::Borrowed(&w.embedding));
    if !std::ptr::eq(w.output.weight().bytes(), w.embedding.bytes()) {
        out.tensor("lm_head.weight".into(), Cow::Borrowed(w.output.weight()));
    }
    out.vectors.push((format!("model.{}", n.final_norm), Cow::Borrowed(&w.final_norm)));
    for (i, layer) in w.layers.iter().enumerate() {
        let norms = [
            (n.attention_norm, Some(&layer.attention_norm)),
            (n.ffn_norm, Some(&layer.ffn_norm)),
            (n.q_norm, layer.q_norm.as_ref()),
            (n.k_norm, layer.k_norm.as_ref()),
        ];
        for (name, norm) in norms {
            out.vectors
                .extend(norm.map(|v| (format!("model.{}.{name}", (n.layer)(i)), Cow::Borrowed(&v[..]))));
        }
    }
}

fn encoder_tensors<'a>(w: &'a EncoderWeights, out: &mut Contents<'a>) {
    let n = &HF_ENCODER;
    out.tensor(n.word.into(), Cow::Borrowed(&w.word_embedding));
    out.tensor(n.position.into(), Cow::Borrowed(&w.position_embedding));
    out.tensor(n.kind.into(), Cow::Borrowed(&w.type_embedding));
    let mut norm = |name: String, norm: &'a crate::weights::LayerNorm| {
        out.vectors.push((format!("{name}.weight"), Cow::Borrowed(&norm.weight[..])));
        out.vectors.push((format!("{name}.bias"), Cow::Borrowed(&norm.bias[..])));
    };
    norm(n.embedding_norm.into(), &w.embedding_norm);
    for (i, layer) in w.layers.iter().enumerate() {
        norm(format!("{}.{}", (n.layer)(i), n.attention_norm), &layer.attention_norm);
        norm(format!("{}.{}", (n.layer)(i), n.output_norm), &layer.output_norm);
    }
}

/// A `config.json` that describes the model; an error if it has no place for something.
fn config_json(model: &Model) -> Result<Json> {
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
            json["tie_word_embeddings"] = std::ptr::eq(w.output.weight().bytes(), w.embedding.bytes()).into();
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

/// Operations that the model spends on a token that sees `context` tokens, itself included: one multiply-add is two.
/// Maps that begin with the same factor compute it once, as they do when they run.
pub fn flops_per_token(model: &Model, context: usize) -> u64 {
    let c = &model.config;
    let context = context.max(1);
    let scores = |seen: usize| 4 * (c.n_heads * c.head_dim * seen) as u64;
    let mut total = 0;
    match &model.weights {
        Weights::Decoder(w) => {
            for (i, l) in w.layers.iter().enumerate() {
                total += match l.whole() {
                    Some(a) => a.cost(Mask::Causal, context - 1, 1).map_or(0, |cost| cost.run_flops),
                    None => {
                        let seen = c.windows.get(i).copied().flatten().unwrap_or(context).min(context);
                        flops(&[&l.q, &l.k, &l.v]) + flops(&[&l.o]) + scores(seen)
                    }
                };
                total += flops(&[&l.gate, &l.up]) + flops(&[&l.down]);
            }
            total += flops(&[&w.output]);
        }
        Weights::Encoder(w) => {
            for l in &w.layers {
                total += match &l.attention {
                    Some(a) => {
                        let whole = a.layer.cost(Mask::None, 0, context);
                        whole.map_or(0, |cost| cost.run_flops / context as u64)
                    }
                    None => flops(&[&l.q, &l.k, &l.v]) + flops(&[&l.o]) + scores(context),
                };
                total += flops(&[&l.up]) + flops(&[&l.down]);
            }
        }
    }
    total
}
