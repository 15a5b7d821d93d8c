//! The named tensors of a model, from a GGUF file or a Hugging Face folder.

use crate::error::{Error, Result};
use crate::factored::{Attention, Section};
use crate::gguf::{Gguf, split_names};
use crate::linear::Linear;
use crate::tensor::{Source, Tensor};
use attlas_num::kernels::quant::Format;
use safetensors::tensor::Metadata;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value as Json;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Tensors by name.
#[derive(Clone, Debug, Default)]
pub struct Tensors {
    by_name: HashMap<String, Tensor>,
    /// Tensors of bytes: their sources, ranges and shapes.
    bytes: HashMap<String, (Arc<Source>, Range<usize>, Vec<usize>)>,
    /// Maps that are products, by name.
    maps: HashMap<String, Linear>,
    /// Attention of another kind, by layer.
    attention: BTreeMap<usize, Attention>,
}

impl Tensors {
    /// Returns the tensor called `name`.
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.by_name.get(name)
    }

    /// Returns the bytes and the shape of the tensor called `name`, if it is one of bytes.
    pub fn bytes(&self, name: &str) -> Option<(&[u8], &[usize])> {
        let (source, range, shape) = self.bytes.get(name)?;
        Some((source.bytes().get(range.clone())?, shape))
    }

    /// Returns the map called `name`, if it is a product.
    pub fn map(&self, name: &str) -> Option<&Linear> {
        self.maps.get(name)
    }

    /// Returns the attention of a layer, if it is of another kind than the model's.
    pub fn attention(&self, layer: usize) -> Option<&Attention> {
        self.attention.get(&layer)
    }

    /// Returns true if some maps are products or some layers have another kind of attention.
    pub(crate) fn is_factored(&self) -> bool {
        !self.maps.is_empty() || !self.attention.is_empty()
    }

    pub(crate) fn set_factored(
        &mut self,
        maps: HashMap<String, Linear>,
        attention: BTreeMap<usize, Attention>,
    ) {
        (self.maps, self.attention) = (maps, attention);
    }

    /// Returns the numbers and bytes of all tensors together.
    pub fn size(&self) -> (usize, usize) {
        let sum = |f: fn(&Tensor) -> usize| self.by_name.values().map(f).sum();
        (sum(|t| t.rows() * t.cols()), sum(|t| t.bytes().len()))
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.by_name.len()
    }

    /// Returns true if there are no tensors.
    pub fn is_empty(&self) -> bool {
        self.by_name.is_empty()
    }

    /// Returns the names, in no particular order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.by_name.keys().map(String::as_str)
    }

    /// Collects the tensors that the header of `source` describes.
    pub fn from_gguf(gguf: &Gguf, source: &Arc<Source>) -> Result<Self> {
        let mut tensors = Self::default();
        tensors.add_gguf(gguf, source)?;
        Ok(tensors)
    }

    fn add_gguf(&mut self, gguf: &Gguf, source: &Arc<Source>) -> Result<()> {
        for info in gguf.tensors() {
            let tensor = Tensor::new(source.clone(), info.range.clone(), info.format, info.shape.clone())
                .ok_or_else(|| {
                    Error::invalid(
                        format!("the range of {}", info.name),
                        format!("{:?}", info.range),
                        "its size",
                    )
                })?;
            self.add(info.name.clone(), tensor)?;
        }
        Ok(())
    }

    /// Collects the floating-point tensors of a safetensors file; integer tensors are left out.
    pub fn from_safetensors(source: &Arc<Source>) -> Result<Self> {
        let mut tensors = Self::default();
        tensors.add_safetensors(source)?;
        Ok(tensors)
    }

    fn add_safetensors(&mut self, source: &Arc<Source>) -> Result<()> {
        let bytes = source.bytes();
        let (header, metadata): (usize, Metadata) = SafeTensors::read_metadata(bytes)?;
        let start = header.saturating_add(8);
        for (name, info) in metadata.tensors() {
            let range = start.saturating_add(info.data_offsets.0)..start.saturating_add(info.data_offsets.1);
            let wrong = || Error::invalid(format!("the range of {name}"), format!("{range:?}"), "its size");
            // A scalar becomes a vector of one.
            let shape = if info.shape.is_empty() { vec![1] } else { info.shape.clone() };
            let tensor = match info.dtype {
                Dtype::F32 => Tensor::new(source.clone(), range.clone(), Format::F32, shape),
                Dtype::F16 => Tensor::new(source.clone(), range.clone(), Format::F16, shape),
                Dtype::BF16 => Tensor::new(source.clone(), range.clone(), Format::BF16, shape),
                Dtype::F64 => {
                    let raw = bytes.get(range.clone()).ok_or_else(wrong)?;
                    let values: Vec<f32> =
                        raw.as_chunks::<8>().0.iter().map(|b| f64::from_le_bytes(*b) as f32).collect();
                    Tensor::from_f32(&values, shape)
                }
                Dtype::U8 => {
                    let len = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
                    if len != Some(range.len()) || bytes.get(range.clone()).is_none() {
                        return Err(wrong());
                    }
                    self.bytes.insert(name, (source.clone(), range, shape));
                    continue;
                }
                Dtype::BOOL
                | Dtype::I8
                | Dtype::I16
                | Dtype::U16
                | Dtype::I32
                | Dtype::U32
                | Dtype::I64
                | Dtype::U64 => continue,
                other => {
                    return Err(Error::UnsupportedFormat {
                        tensor: name,
                        format: format!("{other:?}"),
                        supported: "F64 F32 F16 BF16".into(),
                    });
                }
            };
            self.add(name.clone(), tensor.ok_or_else(wrong)?)?;
        }
        Ok(())
    }

    pub(crate) fn add(&mut self, name: String, tensor: Tensor) -> Result<()> {
        if self.by_name.contains_key(&name) {
            return Err(Error::invalid("a tensor name", format!("{name:?} twice"), "distinct names"));
        }
        self.by_name.insert(name, tensor);
        Ok(())
    }
}

/// Opens a GGUF file with all its parts, if it is split.
pub fn open_gguf(path: &Path) -> Result<(Gguf, Tensors)> {
    let read = |path: &Path| -> Result<(Gguf, Arc<Source>)> {
        let source = Arc::new(Source::open(path)?);
        let gguf = Gguf::parse(source.bytes()).map_err(|e| e.in_file(path))?;
        Ok((gguf, source))
    };
    let (gguf, source) = read(path)?;
    let parts = gguf.integer("split.count").map_err(|e| e.in_file(path))?.unwrap_or(1);
    if parts <= 1 {
        let tensors = Tensors::from_gguf(&gguf, &source).map_err(|e| e.in_file(path))?;
        return Ok((gguf, tensors));
    }
    let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
    let names = split_names(name, parts).ok_or_else(|| {
        Error::invalid("the name of a split file", name, format!("…-00001-of-{parts:05}.gguf")).in_file(path)
    })?;
    let mut tensors = Tensors::default();
    let mut first = None;
    for (i, name) in names.iter().enumerate() {
        let path = path.with_file_name(name);
        let (part, source) = read(&path)?;
        if part.integer("split.no")? != Some(i) {
            return Err(Error::invalid("split.no", format!("{:?}", part.get("split.no")), i.to_string())
                .in_file(&path));
        }
        tensors.add_gguf(&part, &source).map_err(|e| e.in_file(&path))?;
        first.get_or_insert(part);
    }
    let first = first.unwrap_or(gguf);
    if let Some(expected) = first.integer("split.tensors.count")?
        && expected != tensors.len()
    {
        return Err(
            Error::invalid("the tensors of all parts", tensors.len(), expected.to_string()).in_file(path)
        );
    }
    Ok((first, tensors))
}

/// Opens the weights of a Hugging Face folder: `model.safetensors`, or the shards its index names.
pub fn open_safetensors(folder: &Path) -> Result<Tensors> {
    let index = folder.join("model.safetensors.index.json");
    let files: Vec<PathBuf> = if index.is_file() {
        let names = shard_names(&read_file(&index)?).map_err(|e| e.in_file(&index))?;
        names.into_iter().map(|name| folder.join(name)).collect()
    } else {
        let file = folder.join("model.safetensors");
        let pickled = ["pytorch_model.bin", "pytorch_model.bin.index.json"];
        if !file.exists() && pickled.iter().any(|name| folder.join(name).is_file()) {
            let what = "weights in a pytorch_model.bin, which is a program that has to be run,".into();
            let instead = "safetensors: in transformers, from_pretrained and then save_pretrained".into();
            return Err(Error::UseInstead { what, instead }.in_file(folder));
        }
        vec![file]
    };
    let mut tensors = Tensors::default();
    for file in files {
        let source = Arc::new(Source::open(&file)?);
        tensors.add_safetensors(&source).map_err(|e| e.in_file(&file))?;
    }
    Ok(tensors)
}

/// Opens the weights of a Hugging Face folder with this `config.json`, in factored form if it has such a section.
pub(crate) fn open_folder(folder: &Path, config: &[u8]) -> Result<Tensors> {
    match Section::of_config(config).map_err(|e| e.in_file(&folder.join("config.json")))? {
        Some(section) => section.open(folder),
        None => open_safetensors(folder),
    }
}

/// Returns the numbers and bytes of all tensors of a GGUF file or a Hugging Face folder.
pub fn size(path: &Path) -> Result<(usize, usize)> {
    let config = path.join("config.json");
    if config.is_file() {
        return Ok(open_folder(path, &read_file(&config)?)?.size());
    }
    Ok(open_gguf(path)?.1.size())
}

/// Returns the files that an index of shards names, sorted. Paths outside the folder are refused.
pub fn shard_names(index: &[u8]) -> Result<Vec<String>> {
    let json: Json = serde_json::from_slice(index)?;
    let map = json
        .get("weight_map")
        .and_then(Json::as_object)
        .ok_or_else(|| Error::MissingKey { key: "weight_map".into() })?;
    let mut names = Vec::new();
    for (tensor, file) in map {
        let name = file.as_str().unwrap_or_default();
        if name.is_empty() || name.contains(['/', '\\', '\0']) || name == ".." || name == "." {
            return Err(Error::invalid(
                format!("the file of {tensor}"),
                file,
                "the name of a file in the same folder",
            ));
        }
        names.push(name.to_owned());
    }
    names.sort_unstable();
    names.dedup();
    Ok(names)
}

/// Reads a small file whole.
pub(crate) fn read_file(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).map_err(|source| Error::Io { path: path.to_path_buf(), source })
}
