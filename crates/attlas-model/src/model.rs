//! A model from disk: description, weights and tokeniser together.

use crate::checkpoint::{Tensors, open_gguf, read_file};
use crate::config::ModelConfig;
use crate::error::{Error, Result};
use crate::gguf::Gguf;
use crate::tensor::Source;
use crate::tokenizer::Tokenizer;
use crate::weights::{Naming, Weights};
use attlas_num::rope::Scaling;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A model ready to run.
#[derive(Clone, Debug)]
pub struct Model {
    /// Its configuration.
    pub config: ModelConfig,
    /// Its tensors, in stored form.
    pub weights: Weights,
    /// Tokeniser.
    pub tokenizer: Tokenizer,
    /// Jinja template of conversations, if the model has one.
    pub chat_template: Option<String>,
    /// The Hugging Face folder of the model, if it was opened from one.
    pub folder: Option<PathBuf>,
}

impl Model {
    /// Opens a GGUF file or a Hugging Face folder.
    pub fn open(path: &Path) -> Result<Self> {
        if path.join("config.json").is_file() {
            return Self::open_folder(path);
        }
        if !path.exists() {
            let source = std::io::Error::from(std::io::ErrorKind::NotFound);
            return Err(Error::Io { path: path.to_path_buf(), source });
        }
        if !path.is_file() {
            return Err(Error::NotAModel { path: path.to_path_buf() });
        }
        let (gguf, tensors) = open_gguf(path)?;
        Self::from_gguf(&gguf, &tensors).map_err(|e| e.in_file(path))
    }

    /// Opens a model from the bytes of an unsplit GGUF file.
    pub fn from_gguf_bytes(bytes: Vec<u8>) -> Result<Self> {
        let source = Arc::new(Source::Owned(bytes));
        let gguf = Gguf::parse(source.bytes())?;
        Self::from_gguf(&gguf, &Tensors::from_gguf(&gguf, &source)?)
    }

    fn from_gguf(gguf: &Gguf, tensors: &Tensors) -> Result<Self> {
        let mut config = ModelConfig::from_gguf(gguf)?;
        config.set_long_rope(gguf, tensors)?;
        if let (Some(rope), Some(divisors)) = (&mut config.rope, tensors.get("rope_freqs.weight")) {
            let expected = vec![rope.dim / 2];
            if divisors.shape() != expected {
                let (name, found) = ("rope_freqs.weight".to_owned(), divisors.shape().to_vec());
                return Err(Error::Shape { name, found, expected });
            }
            let divisors: Vec<f64> = divisors.to_f32().into_iter().map(f64::from).collect();
            if let Some(bad) = divisors.iter().find(|d| !(d.is_finite() && **d > 0.0)) {
                return Err(Error::invalid("a value of rope_freqs.weight", bad, "a positive number"));
            }
            rope.scaling = Scaling::Divisors(divisors);
        }
        Ok(Self {
            weights: Weights::collect(&config, tensors, Naming::Gguf)?,
            tokenizer: Tokenizer::from_gguf(gguf)?,
            chat_template: gguf.text("tokenizer.chat_template")?.map(str::to_owned),
            folder: None,
            config,
        })
    }

    fn open_folder(folder: &Path) -> Result<Self> {
        let path = folder.join("config.json");
        let text = read_file(&path)?;
        let mut config = ModelConfig::from_json(&text).map_err(|e| e.in_file(&path))?;
        let path = folder.join("generation_config.json");
        if path.is_file() {
            config.set_eos_from_json(&read_file(&path)?).map_err(|e| e.in_file(&path))?;
        }
        let tensors = crate::checkpoint::open_folder(folder, &text)?;
        let weights =
            Weights::collect(&config, &tensors, Naming::HuggingFace).map_err(|e| e.in_file(folder))?;
        let path = folder.join("tokenizer.json");
        let mut tokenizer = Tokenizer::from_json(&read_file(&path)?).map_err(|e| e.in_file(&path))?;
        let path = folder.join("tokenizer_config.json");
        let settings = if path.is_file() { read_file(&path)? } else { b"null".to_vec() };
        let settings = serde_json::from_slice(&settings).map_err(|e| Error::from(e).in_file(&path))?;
        tokenizer.name_special_tokens(&settings);
        let chat_template = chat_template(folder, &settings)?;
        Ok(Self { config, weights, tokenizer, chat_template, folder: Some(folder.to_path_buf()) })
    }
}

/// Reads the chat template. Newer folders have it in a separate file; some have several, with one default.
fn chat_template(folder: &Path, settings: &serde_json::Value) -> Result<Option<String>> {
    let path = folder.join("chat_template.jinja");
    if path.is_file() {
        return Ok(Some(String::from_utf8_lossy(&read_file(&path)?).into_owned()));
    }
    let value = &settings["chat_template"];
    let default = || {
        let mut named = value.as_array()?.iter();
        named.find(|t| t["name"] == "default")?["template"].as_str()
    };
    Ok(value.as_str().or_else(default).map(str::to_owned))
}
