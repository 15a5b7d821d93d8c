//! A model and a text that it reads.

use crate::hash::sha256;
use crate::words::setting;
use crate::{Error, Result};
use attlas::params::Value;
use attlas_model::config::ModelConfig;
use attlas_model::{Model, Recipe};
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

/// Opens a GGUF file, a Hugging Face folder, or a model on the hub by its name (see [`attlas_model::hub`]).
pub fn open_model(path: &Path) -> Result<Arc<Model>> {
    Ok(open_model_for(path, None)?.0)
}

/// Opens a model for `context` tokens and, beyond the context it was trained for, stretches its positions
/// ([`ModelConfig::stretch_context`](attlas_model::ModelConfig::stretch_context)). Also returns the trained context.
pub fn open_model_for(path: &Path, context: Option<usize>) -> Result<(Arc<Model>, usize)> {
    let located = path.to_str().map(attlas_model::hub::locate).transpose()?;
    let mut model = Model::open(located.as_deref().unwrap_or(path))?;
    let trained = model.config.max_positions;
    context.map_or(Ok(()), |tokens| model.config.stretch_context(tokens))?;
    Ok((Arc::new(model), trained))
}

/// Returns the numbers and bytes of a model's tensors; the model may be on the hub.
pub fn model_size(path: &Path) -> Result<(usize, usize)> {
    let located = path.to_str().map(attlas_model::hub::locate).transpose()?;
    Ok(attlas_model::checkpoint::size(located.as_deref().unwrap_or(path))?)
}

/// A tokenised text.
#[derive(Clone, Debug)]
pub struct Text {
    /// Source of the text.
    pub source: String,
    /// SHA-256 of its bytes.
    pub sha256: String,
    /// Its tokens, without those that a tokeniser puts around a text.
    pub tokens: Vec<u32>,
}

impl Text {
    /// Reads the file at `path`, or standard input for `-`, and keeps its first `limit` tokens. A text without tokens
    /// and invalid UTF-8 are errors.
    pub fn read(path: &Path, model: &Model, limit: Option<usize>) -> Result<Self> {
        let mut bytes = Vec::new();
        if path == Path::new("-") {
            std::io::stdin().read_to_end(&mut bytes).map_err(|e| Error::reading(path, e))?;
        } else {
            bytes = std::fs::read(path).map_err(|e| Error::reading(path, e))?;
        }
        let text = std::str::from_utf8(&bytes).map_err(|e| Error::Malformed {
            path: path.into(),
            format: "UTF-8 text",
            reason: e.to_string(),
        })?;
        let mut tokens = model.tokenizer.encode(text, false)?;
        tokens.truncate(limit.unwrap_or(usize::MAX));
        if tokens.is_empty() {
            return Err(Error::argument(path.display(), "a text of at least one token", "none"));
        }
        Ok(Self { source: path.display().to_string(), sha256: sha256(&bytes), tokens })
    }
}

/// Describes a model's sizes in one line; recipes carry it to identify their model.
pub fn shape(c: &ModelConfig) -> String {
    format!(
        "{} layers, {} heads, {} key heads, width {}, {} tokens known",
        c.n_layers, c.n_heads, c.n_kv_heads, c.head_dim, c.vocab
    )
}

/// Fails if a recipe was made for a model of other sizes.
pub fn check_recipe(recipe: &Recipe, model: &Model) -> Result<()> {
    match recipe.evidence.get("model_shape") {
        Some(Value::Text(made_for)) if *made_for != shape(&model.config) => {
            let name = recipe.model.as_deref().unwrap_or("another model");
            let expected = format!("a recipe for a model of {}", shape(&model.config));
            Err(Error::argument("--recipe", expected, format!("one for {name} of {made_for}")))
        }
        _ => Ok(()),
    }
}

/// Returns the warning for a recipe on more tokens than it was checked on.
pub fn past_recipe(recipe: &Recipe, tokens: usize) -> Option<String> {
    let most = recipe.tokens.filter(|most| tokens > *most)?;
    Some(format!(
        "the recipe was checked on texts of {most} tokens; what it does to {tokens} is not known: tune with --tokens {tokens}"
    ))
}

/// Command-line choice of attention: a recipe, or one method with its settings.
#[derive(Clone, Debug, Default)]
pub struct Attention {
    /// A recipe.
    pub recipe: Option<std::path::PathBuf>,
    /// One method for every head, instead.
    pub method: Option<String>,
    /// Settings `param=value` or `id.param=value` of that method.
    pub set: Vec<String>,
    /// Calibrations: a file, or a folder of files.
    pub calibration: Option<std::path::PathBuf>,
}

impl Attention {
    /// Returns the recipe, or `None` for exact attention everywhere.
    pub fn resolve(&self) -> Result<Option<Recipe>> {
        let recipe = self.without_calibration()?;
        match (&self.calibration, recipe) {
            (Some(path), Some(recipe)) => {
                let learnt = attlas_model::Calibrations::read(path)?;
                Ok(Some(recipe.with_calibrations(Arc::new(learnt))))
            }
            (Some(_), None) => {
                Err(Error::argument("--calibration", "a --method or --recipe that uses it", "neither"))
            }
            (None, recipe) => Ok(recipe),
        }
    }

    fn without_calibration(&self) -> Result<Option<Recipe>> {
        if let Some(path) = &self.recipe {
            return Ok(Some(Recipe::open(path)?));
        }
        let Some(id) = &self.method else {
            return match self.set.first() {
                Some(set) => Err(Error::argument("--set", "a --method that it belongs to", set)),
                None => Ok(None),
            };
        };
        let method = attlas::registry::method(id)?;
        let mut options = attlas::Options::new();
        for text in &self.set {
            let (name, value) = setting(text, "window=256")?;
            let name = name.strip_prefix(method.id).and_then(|n| n.strip_prefix('.')).unwrap_or(name);
            method.check_option(name, value)?;
            options.set(name, value);
        }
        Ok(Some(Recipe::uniform(method.id, options)))
    }
}

/// Serialises the name of the type that products are computed in.
pub(crate) fn compute_name<S: serde::Serializer>(
    compute: &attlas_model::Compute,
    to: S,
) -> std::result::Result<S::Ok, S::Error> {
    to.serialize_str(compute.name())
}
