//! Checkpoints in factored form: a Hugging Face folder whose `config.json` has one more section, `attlas`.
//!
//! The section describes the tensors of `model.safetensors` that other programs do not know; factors are never
//! multiplied out. A folder without the section is an ordinary one.
//!
//! ```json
//! "attlas": {
//!   "version": 1,
//!   "conversion": "tucker",
//!   "params": {"rank": 64, "layer_rank": 36},
//!   "stored": {"model.embed_tokens.weight": {"format": "Q4_1", "shape": [49152, 576]}},
//!   "maps": {
//!     "model.layers.0.self_attn.q_proj": [
//!       {"tensor": "attlas.shared.0", "transposed": true},
//!       {"cores": "attlas.shared.1", "mixture": "attlas.shared.2", "rows": [0], "transposed": true},
//!       {"tensor": "attlas.shared.3"}
//!     ]
//!   },
//!   "attention": {
//!     "0": {"layer": "tensor_product", "options": {"rank_k": 2}, "shape": [576, 9, 9, 64, 64],
//!           "weights": {"q": "model.layers.0.self_attn.q", "b_k": "model.layers.0.self_attn.b_k"}}
//!   }
//! }
//! ```
//!
//! - `stored`: tensors that keep their quantised blocks, as bytes of shape `[rows, bytes of a row]`.
//! - `maps`: linear maps that are products; the first factor acts first. A factor is a matrix `[out, in]` (`tensor`);
//!   or the sum of the matrices `cores` (`[count, out, in]`) weighted by a row of `mixture`, stacked for several
//!   `rows`; either may be `transposed`, and may act equally on a number of `slices` of its input; or a `diagonal`, a
//!   `row` of a matrix. `NAME.bias`, if present, is added.
//! - `attention`: layers whose attention is another layer of the registry, with its sizes (width, query heads, key heads,
//!   width of a head's keys, of its values) and its weights: maps by name, products or `NAME.weight`. Decoders accept
//!   layers with a causal form, encoders those with a form without a mask.

use crate::checkpoint::Tensors;
use crate::error::{Error, Result};
use crate::linear::{Factor, Linear};
use crate::tensor::{Source, Tensor};
use attlas::layer::{Layer, LayerShape, Weights};
use attlas::{Mat, MatRef, Options, Workspace};
use attlas_num::kernels::quant::Format;
use safetensors::tensor::Metadata;
use safetensors::{Dtype, SafeTensors};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;

/// The version written, and the only one read.
pub const VERSION: u32 = 1;

/// Most slices, or stacked mixtures.
const MAX_SLICES: usize = 1 << 10;

/// Numbers that mixtures may always have; beyond that, [`MIXED_RATIO`] times the stored ones.
const MIXED: usize = 1 << 24;
const MIXED_RATIO: usize = 64;

/// The section `attlas` of a configuration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Section {
    /// Version of the format.
    pub version: u32,
    /// The program that made the checkpoint.
    pub conversion: String,
    /// Its parameters.
    #[serde(default)]
    pub params: Options,
    /// Tensors that keep their quantised blocks.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub stored: BTreeMap<String, Stored>,
    /// Linear maps that are products.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub maps: BTreeMap<String, Vec<FactorSpec>>,
    /// Attention replaced by another layer, by layer.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub attention: BTreeMap<usize, Replaced>,
}

/// A tensor of quantised blocks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stored {
    /// Name of the block format.
    pub format: String,
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
}

/// A factor of a map.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged, deny_unknown_fields)]
pub enum FactorSpec {
    /// A matrix.
    Matrix {
        /// Its name.
        tensor: String,
        /// True if its transpose acts.
        #[serde(default, skip_serializing_if = "is_false")]
        transposed: bool,
        /// Number of input slices on which it acts equally.
        #[serde(default = "one", skip_serializing_if = "is_one")]
        slices: usize,
    },
    /// Mixtures of matrices.
    Mixture {
        /// The matrices, `[count, out, in]`.
        cores: String,
        /// Weights, one mixture per row.
        mixture: String,
        /// The stacked mixtures.
        rows: Vec<usize>,
        /// True if the transpose acts.
        #[serde(default, skip_serializing_if = "is_false")]
        transposed: bool,
        /// Number of input slices on which it acts equally.
        #[serde(default = "one", skip_serializing_if = "is_one")]
        slices: usize,
    },
    /// A diagonal.
    Diagonal {
        /// A matrix with one diagonal per row.
        diagonal: String,
        /// The row of this diagonal.
        row: usize,
    },
}

fn is_false(x: &bool) -> bool {
    !x
}

fn one() -> usize {
    1
}

fn is_one(x: &usize) -> bool {
    *x == 1
}

/// An attention layer of another kind.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Replaced {
    /// Id of the layer.
    pub layer: String,
    /// Its parameters.
    #[serde(default)]
    pub options: Options,
    /// Width, query heads, key heads, width of a head's keys and of its values.
    pub shape: [usize; 5],
    /// Names of maps by names of weights.
    pub weights: BTreeMap<String, String>,
}

/// An attention layer read from a checkpoint.
#[derive(Clone, Debug)]
pub struct Attention {
    /// The layer.
    pub layer: Arc<dyn Layer>,
    /// Its maps by name.
    pub maps: BTreeMap<String, Linear>,
}

impl Attention {
    /// Returns the maps for queries, keys, values and output, with no outputs if the layer has no such map.
    pub(crate) fn projections(&self) -> Result<[Linear; 4]> {
        let part = |names: &[&str]| {
            let none = || Tensor::from_f32(&[], vec![0, self.layer.shape().d_model]);
            let found = names.iter().find_map(|n| self.maps.get(*n)).cloned();
            found
                .or_else(|| Linear::new(none()?, None))
                .ok_or_else(|| Error::MissingTensor { name: names.join(" or ") })
        };
        Ok([part(&["q"])?, part(&["k", "b_k"])?, part(&["v", "b_v"])?, part(&["o"])?])
    }

    /// Fails if the layer has no causal form with these parameters; tries one token.
    pub(crate) fn check_causal(&self, layer: usize) -> Result<()> {
        let d = self.layer.shape().d_model;
        let mut ws = Workspace::single()?;
        let tried = self.layer.forward(
            MatRef::new(&vec![0.0; d], 1, d),
            &mut *self.layer.new_cache(),
            &mut vec![0.0; d],
            &mut ws,
        );
        match tried {
            Err(attlas::Error::Unsupported { method, reasons }) => Err(Error::Unsupported {
                what: format!(
                    "{method} as the attention of layer {layer} of a decoder ({})",
                    reasons.join("; ")
                ),
            }),
            other => Ok(other.map(|_| ())?),
        }
    }
}

impl Section {
    /// Returns the section of a `config.json`, if it has one.
    pub fn of_config(text: &[u8]) -> Result<Option<Self>> {
        let json: serde_json::Value = serde_json::from_slice(text)?;
        let Some(section) = json.get("attlas").filter(|s| !s.is_null()) else { return Ok(None) };
        let version = section.get("version").and_then(serde_json::Value::as_u64);
        if version != Some(u64::from(VERSION)) {
            let found = version.map_or("missing".into(), |v| v.to_string());
            return Err(Error::invalid("the version of the section attlas", found, VERSION.to_string()));
        }
        let section = serde_json::from_value(section.clone()).map_err(|e| {
            Error::invalid("the section attlas of config.json", e, "as docs/compress.md says")
        })?;
        Ok(Some(section))
    }

    /// Reads the tensors of a folder, including its maps and attention layers.
    pub fn open(&self, folder: &Path) -> Result<Tensors> {
        let path = folder.join("model.safetensors");
        let source = Arc::new(Source::open(&path)?);
        self.read(&source).map_err(|e| e.in_file(&path))
    }

    /// Reads the tensors from the bytes of a safetensors file.
    pub fn read(&self, source: &Arc<Source>) -> Result<Tensors> {
        let mut tensors = Tensors::from_safetensors(source)?;
        let (header, metadata): (usize, Metadata) = SafeTensors::read_metadata(source.bytes())?;
        let all = metadata.tensors();
        for (name, stored) in &self.stored {
            let info = all.get(name).ok_or_else(|| Error::MissingTensor { name: name.clone() })?;
            let format = Format::ALL.into_iter().find(|f| f.name() == stored.format).ok_or_else(|| {
                let supported = Format::ALL.map(Format::name).join(" ");
                Error::UnsupportedFormat { tensor: name.clone(), format: stored.format.clone(), supported }
            })?;
            let start = header.saturating_add(8);
            let range = start.saturating_add(info.data_offsets.0)..start.saturating_add(info.data_offsets.1);
            let tensor = (info.dtype == Dtype::U8)
                .then(|| Tensor::new(source.clone(), range, format, stored.shape.clone()))
                .flatten()
                .ok_or_else(|| {
                    let found = format!("{} bytes", info.data_offsets.1.saturating_sub(info.data_offsets.0));
                    Error::invalid(
                        format!("the tensor {name}"),
                        found,
                        format!("{format} of {:?}", stored.shape),
                    )
                })?;
            tensors.add(name.clone(), tensor)?;
        }
        self.attach(&mut tensors)?;
        Ok(tensors)
    }

    /// Makes the maps and attention layers once all tensors are known.
    pub(crate) fn attach(&self, tensors: &mut Tensors) -> Result<()> {
        let mut maps = HashMap::new();
        let room = MIXED.saturating_add(tensors.size().0.saturating_mul(MIXED_RATIO));
        let mut reader = Reader { tensors, matrices: HashMap::new(), cores: HashMap::new(), room };
        for (name, parts) in &self.maps {
            maps.insert(name.clone(), reader.map(name, parts)?);
        }
        let mut attention = BTreeMap::new();
        for (&layer, replaced) in &self.attention {
            attention.insert(layer, replaced.build(tensors, &maps)?);
        }
        tensors.set_factored(maps, attention);
        Ok(())
    }
}

/// Reader of factors; makes each matrix once in each orientation.
struct Reader<'a> {
    tensors: &'a Tensors,
    matrices: HashMap<(String, bool), Tensor>,
    /// Matrices of the stacks that are mixed.
    cores: HashMap<String, Vec<Mat<f32>>>,
    /// Numbers left for mixtures.
    room: usize,
}

impl Reader<'_> {
    fn tensor(&self, name: &str, dims: usize) -> Result<&Tensor> {
        let t = self.tensors.get(name).ok_or_else(|| Error::MissingTensor { name: name.to_owned() })?;
        if t.shape().len() != dims {
            let found = format!("{:?}", t.shape());
            return Err(Error::invalid(format!("the shape of {name}"), found, format!("{dims} dimensions")));
        }
        Ok(t)
    }

    fn map(&mut self, name: &str, parts: &[FactorSpec]) -> Result<Linear> {
        let factors = parts.iter().map(|p| self.factor(p)).collect::<Result<Vec<Factor>>>()?;
        let bias = self.tensors.get(&format!("{name}.bias")).map(Tensor::to_f32);
        Linear::product(factors, bias).ok_or_else(|| {
            Error::invalid(
                format!("the map {name}"),
                "factors that do not fit",
                "matrices that can be multiplied",
            )
        })
    }

    fn factor(&mut self, part: &FactorSpec) -> Result<Factor> {
        if let FactorSpec::Matrix { slices, .. } | FactorSpec::Mixture { slices, .. } = part
            && *slices > MAX_SLICES
        {
            return Err(Error::invalid("the slices of a factor", slices, format!("at most {MAX_SLICES}")));
        }
        match part {
            FactorSpec::Diagonal { diagonal, row } => {
                let table = self.tensor(diagonal, 2)?;
                if *row >= table.rows() {
                    let expected = format!("below {}", table.rows());
                    return Err(Error::invalid(format!("a row of {diagonal}"), row, expected));
                }
                let mut values = vec![0.0; table.cols()];
                table.row_into(*row, &mut values);
                Ok(Factor::Diagonal(Arc::new(values)))
            }
            FactorSpec::Matrix { tensor, transposed, slices } => {
                let key = (tensor.clone(), *transposed);
                if let Some(ready) = self.matrices.get(&key) {
                    return Ok(Factor::Matrix(ready.clone(), *slices));
                }
                let stored = self.tensor(tensor, 2)?.clone();
                let matrix = if *transposed { transpose(&stored) } else { stored };
                self.matrices.insert(key, matrix.clone());
                Ok(Factor::Matrix(matrix, *slices))
            }
            FactorSpec::Mixture { cores, mixture, rows, transposed, slices } => {
                let (stack, weights) = (self.tensor(cores, 3)?, self.tensor(mixture, 2)?);
                let (count, height, width) = (stack.shape()[0], stack.shape()[1], stack.shape()[2]);
                let bad = rows.iter().any(|&r| r >= weights.rows());
                if weights.cols() != count || bad || rows.is_empty() || rows.len() > MAX_SLICES {
                    let found = format!("rows {rows:?} of a matrix {:?}", weights.shape());
                    return Err(Error::invalid(
                        format!("a mixture of {cores}"),
                        found,
                        format!("{count} columns"),
                    ));
                }
                // A row takes little in the file, but a matrix in memory.
                let numbers = rows.len().checked_mul(height).and_then(|n| n.checked_mul(width));
                let left = numbers.and_then(|n| self.room.checked_sub(n)).ok_or_else(|| {
                    let expected = format!("mixtures of at most {MIXED_RATIO} times the numbers stored");
                    let found = format!("{} rows of {height} x {width}", rows.len());
                    Error::invalid(format!("a mixture of {cores}"), found, expected)
                })?;
                let format = stack.format();
                let weights = Mat::from_vec(weights.to_f32(), weights.rows(), count);
                let list = match self.cores.get(cores) {
                    Some(list) => list,
                    None => {
                        let numbers = stack.to_f32();
                        let slice = |x: &[f32]| Mat::from_vec(x.to_vec(), height, width);
                        let list = numbers.chunks_exact((height * width).max(1)).map(slice).collect();
                        self.cores.entry(cores.clone()).or_insert(list)
                    }
                };
                let mixed = attlas::conversions::common::product::mix(list, &weights, rows);
                self.room = left;
                let mixed = if *transposed { mixed.transpose() } else { mixed };
                let tensor = narrowed(mixed.data(), vec![mixed.rows(), mixed.cols()], format);
                Ok(Factor::Matrix(tensor, *slices))
            }
        }
    }
}

/// Returns the transpose in the element type of the original; quantised blocks become half precision.
fn transpose(t: &Tensor) -> Tensor {
    let m = Mat::from_vec(t.to_f32(), t.rows(), t.cols()).transpose();
    narrowed(m.data(), vec![m.rows(), m.cols()], t.format())
}

/// Stores numbers in the given format of their source tensors.
fn narrowed(values: &[f32], shape: Vec<usize>, format: Format) -> Tensor {
    let bytes: Vec<u8> = match format {
        Format::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        Format::BF16 => values.iter().flat_map(|&x| half::bf16::from_f32(x).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|&x| half::f16::from_f32(x).to_le_bytes()).collect(),
    };
    let format = if matches!(format, Format::F32 | Format::BF16) { format } else { Format::F16 };
    let range = 0..bytes.len();
    Tensor::new(Arc::new(Source::Owned(bytes)), range, format, shape)
        .unwrap_or_else(|| unreachable!("as many numbers as the shape says"))
}

impl Replaced {
    fn build(&self, tensors: &Tensors, maps: &HashMap<String, Linear>) -> Result<Attention> {
        let kind = attlas::registry::layer(&self.layer)?;
        let [d_model, n_heads, n_kv_heads, d, d_v] = self.shape;
        if self.shape.iter().any(|&n| n == 0 || n > 1 << 21) {
            let found = format!("{:?}", self.shape);
            return Err(Error::invalid("the shape of an attention layer", found, "sizes from 1"));
        }
        let shape = LayerShape { d_model, n_heads, n_kv_heads, d, d_v };
        let mut weights = Weights::new();
        let mut list = BTreeMap::new();
        for (weight, name) in &self.weights {
            let map = match maps.get(name) {
                Some(map) => map.clone(),
                None => {
                    let full = format!("{name}.weight");
                    let missing = || Error::MissingTensor { name: full.clone() };
                    let tensor = tensors.get(&full).ok_or_else(missing)?.clone();
                    let bias = tensors.get(&format!("{name}.bias")).map(Tensor::to_f32);
                    Linear::new(tensor, bias).ok_or_else(missing)?
                }
            };
            weights.insert(weight.clone(), Box::new(map.clone()));
            list.insert(weight.clone(), map);
        }
        Ok(Attention { layer: kind.layer(&shape, &self.options, weights)?.into(), maps: list })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mixtures_far_larger_than_what_is_stored_are_refused() {
        let mut tensors = Tensors::default();
        tensors.add("c".into(), Tensor::from_f32(&[0.5; 4 * 128 * 128], vec![4, 128, 128]).unwrap()).unwrap();
        tensors.add("m".into(), Tensor::from_f32(&[1.0; 8], vec![2, 4]).unwrap()).unwrap();
        let open = |maps: usize, rows: usize| {
            let part = FactorSpec::Mixture {
                cores: "c".into(),
                mixture: "m".into(),
                rows: vec![1; rows],
                transposed: false,
                slices: 1,
            };
            let section = Section {
                version: VERSION,
                conversion: "test".into(),
                params: Options::new(),
                stored: BTreeMap::new(),
                maps: (0..maps).map(|i| (format!("map{i}"), vec![part.clone()])).collect(),
                attention: BTreeMap::new(),
            };
            section.attach(&mut tensors.clone())
        };
        open(2, 8).unwrap();
        let error = open(8, MAX_SLICES).unwrap_err().to_string();
        assert!(error.contains("64 times the numbers stored"), "{error}");
    }
}
