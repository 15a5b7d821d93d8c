//! Models in factored form: applies conversions of the registry to a checkpoint and writes the result as a folder that
//! [`Model::open`] reads and runs on the factors.
//!
//! The mathematics is that of [`attlas::conversions`]; this module presents a model as a list of matrices, writes the
//! result in the form of [`factored`](crate::factored), and counts operations. Unchanged tensors are written as stored,
//! including quantised blocks: a comparison shows only the effect of the conversion.

mod contents;
mod cost;
mod elements;
mod learn;
mod matrices;
mod settings;

pub use cost::flops_per_token;
pub use elements::Elements;
pub use learn::{Calibration, Learnt};

use crate::checkpoint::Tensors;
use crate::config::ModelConfig;
use crate::error::{Error, Result};
use crate::export;
use crate::factored::{FactorSpec, Replaced, Section, VERSION};
use crate::model::Model;
use crate::save::{Folder, GGUF, NamedTensor};
use crate::tensor::Tensor;
use crate::weights::{Naming, Weights};
use attlas::Options;
use attlas::conversions::common::network::{Network, Request, Rewritten, Role, Slot, Weight};
use attlas::conversions::common::product::{Factor, Values};
use attlas::conversions::{Conversion, Run};
use attlas::layer::Dense;
use contents::{Contents, decoder_tensors, encoder_tensors};
use matrices::Matrices;
use settings::config_json;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;

/// The result of a conversion.
#[derive(Clone, Debug)]
pub struct Compressed<'a> {
    model: &'a Model,
    conversion: &'static Conversion,
    options: Options,
    /// The maps and layers that replace others.
    pub rewritten: Rewritten,
}

/// Applies a conversion to the given layers and matrices of a model, or to those that it chooses. `progress` receives
/// parts done and parts in all.
pub fn compress<'a>(
    model: &'a Model,
    conversion: &'static Conversion,
    options: &Options,
    layers: Option<&[usize]>,
    roles: Option<&[Role]>,
    progress: &(dyn Fn(usize, usize) + Sync),
) -> Result<Compressed<'a>> {
    compress_seen(model, conversion, options, layers, roles, None, progress)
}

/// Applies a conversion fitted to inputs like those of a calibration text.
pub fn compress_seen<'a>(
    model: &'a Model,
    conversion: &'static Conversion,
    options: &Options,
    layers: Option<&[usize]>,
    roles: Option<&[Role]>,
    learnt: Option<&Learnt>,
    progress: &(dyn Fn(usize, usize) + Sync),
) -> Result<Compressed<'a>> {
    let matrices = Matrices { learnt, ..Matrices::new(model)? };
    let Run::Matrices(run) = conversion.run else {
        let what = format!("applying {} without its own calibration, as compress does,", conversion.id);
        return Err(Error::Unsupported { what });
    };
    let rewritten = run(&Request { network: &matrices, layers, roles, options, progress })?;
    Ok(Compressed { model, conversion, options: options.clone(), rewritten })
}

/// Returns outputs and inputs of a matrix, if the model has it; an error if its matrices cannot be factored.
pub fn size(model: &Model, slot: Slot) -> Result<Option<(usize, usize)>> {
    Ok(Matrices::new(model)?.size(slot))
}

impl<'a> Compressed<'a> {
    /// Wraps the unchanged model, to which parts can be [added](Self::add).
    pub fn unchanged(model: &'a Model, conversion: &'static Conversion, options: &Options) -> Result<Self> {
        Matrices::new(model)?;
        Ok(Self { model, conversion, options: options.clone(), rewritten: Rewritten::default() })
    }

    /// Adds results of the same conversion for other matrices of the model.
    pub fn add(&mut self, other: Rewritten) {
        self.rewritten.extend(other);
    }

    /// Writes the folder, which must not exist yet: configuration, weights and tokeniser; or, by its name, a GGUF file
    /// with the factors multiplied out. It appears whole or not at all.
    pub fn write(&self, path: &Path, elements: Elements) -> Result<()> {
        let folder = Folder::create(path)?;
        if export::is_gguf(path) {
            export::write_gguf(&self.model(elements)?, elements, &folder.path().join(GGUF))?;
            return folder.finish_file(GGUF);
        }
        let (contents, section) = self.contents(elements)?;
        let mut config = config_json(self.model)?;
        config["attlas"] = serde_json::to_value(&section)?;
        folder.json("config.json", &config)?;
        let blocks = contents.tensors.iter().map(|(name, t)| NamedTensor::blocks(name.clone(), t));
        let dense =
            contents.vectors.iter().map(|(name, v)| NamedTensor::dense(name.clone(), vec![v.len()], &v[..]));
        folder.tensors("model.safetensors", &blocks.chain(dense).collect::<Vec<_>>())?;
        folder.tokenizer(self.model)?;
        folder.finish()
    }

    /// Returns the model that [`Model::open`] would read from the folder of [`write`](Self::write), without writing it.
    /// Unchanged parts are shared with the source.
    pub fn model(&self, elements: Elements) -> Result<Model> {
        let (contents, section) = self.contents(elements)?;
        let mut tensors = Tensors::default();
        for (name, tensor) in contents.tensors {
            tensors.add(name, tensor.into_owned())?;
        }
        for (name, values) in contents.vectors {
            let tensor = Tensor::from_f32(&values, vec![values.len()]);
            let wrong = || Error::invalid(format!("the size of {name}"), values.len(), "that of its shape");
            tensors.add(name.clone(), tensor.ok_or_else(wrong)?)?;
        }
        section.attach(&mut tensors)?;
        let config = ModelConfig::from_json(&serde_json::to_vec(&config_json(self.model)?)?)?;
        Ok(Model {
            weights: Weights::collect(&config, &tensors, Naming::HuggingFace)?,
            config,
            ..self.model.clone()
        })
    }

    /// Returns all tensors of the checkpoint, and the section that describes their use.
    fn contents(&self, elements: Elements) -> Result<(Contents<'a>, Section)> {
        let matrices = Matrices { model: self.model, learnt: None };
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
                    maps.insert(name.clone(), parts.collect::<Result<Vec<FactorSpec>>>()?);
                    if let Some(bias) = stored.1 {
                        contents.vectors.push((format!("{name}.bias"), Cow::Owned(bias)));
                    }
                }
            }
        }
        let mut attention = BTreeMap::new();
        for &layer in self.rewritten.attention.keys() {
            attention.insert(layer, self.attention(layer, &matrices, elements, &mut contents)?);
        }
        let section = Section {
            version: VERSION,
            conversion: self.conversion.id.into(),
            params: self.options.clone(),
            stored: std::mem::take(&mut contents.section),
            maps,
            attention,
        };
        Ok((contents, section))
    }

    /// Adds the weights of a layer whose attention was replaced.
    fn attention(
        &self,
        layer: usize,
        matrices: &Matrices<'a>,
        elements: Elements,
        contents: &mut Contents<'a>,
    ) -> Result<Replaced> {
        let a = &self.rewritten.attention[&layer];
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
                    // A few numbers per head that scale everything else stay exact.
                    let few = dense.weight.cols() == 1;
                    contents.dense(&name, dense, if few { Elements::F32 } else { elements })?;
                    name
                }
            };
            weights.insert((*weight).to_owned(), name);
        }
        let s = a.shape;
        Ok(Replaced {
            layer: self.conversion.to.to_owned(),
            options: a.options.clone(),
            shape: [s.d_model, s.n_heads, s.n_kv_heads, s.d, s.d_v],
            weights,
        })
    }
}
