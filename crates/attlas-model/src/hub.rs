//! Models on the Hugging Face hub: `hf:owner/name` and `hf:owner/name/file.gguf`.
//!
//! Downloading needs the cargo feature `hf-hub`. Files are stored in the hub's own cache and reused from it. `HF_HOME`,
//! `HF_ENDPOINT` and the token of `huggingface-cli login` are respected.

use crate::error::{Error, Result};
use std::path::PathBuf;

/// A repository on the hub, and optionally one of its files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Name {
    /// `owner/name`.
    pub repository: String,
    /// A GGUF file; the whole folder if absent.
    pub file: Option<String>,
}

impl Name {
    /// Parses `hf:owner/name[/file.gguf]`; `None` if `text` does not begin with `hf:`.
    pub fn parse(text: &str) -> Option<Result<Self>> {
        let rest = text.strip_prefix("hf:")?;
        let sound = |part: &&str| {
            !matches!(*part, "" | "." | "..")
                && part.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
        };
        let parts: Vec<&str> = rest.split('/').collect();
        let file = parts.get(2..).filter(|f| !f.is_empty()).map(|f| f.join("/"));
        let gguf = file.as_deref().is_none_or(|f| f.to_ascii_lowercase().ends_with(".gguf"));
        Some(if parts.len() >= 2 && parts.iter().all(sound) && gguf {
            Ok(Self { repository: parts[..2].join("/"), file })
        } else {
            Err(Error::invalid(
                "a model on the hub",
                format!("{text:?}"),
                "hf:owner/name or hf:owner/name/file.gguf",
            ))
        })
    }
}

/// Returns the file or folder of a model argument: a path unchanged, or the downloaded files of `hf:…`.
pub fn locate(argument: &str) -> Result<PathBuf> {
    match Name::parse(argument) {
        None => Ok(PathBuf::from(argument)),
        Some(name) => download(&name?),
    }
}

#[cfg(not(feature = "hf-hub"))]
fn download(name: &Name) -> Result<PathBuf> {
    Err(Error::Download {
        repository: name.repository.clone(),
        reason: "this build cannot download models: rebuild with `--features hf-hub`, or download the \
                 repository and give the path of its folder or of its GGUF file"
            .into(),
    })
}

/// Files of a model's folder besides its weights: required ones, and optional ones.
#[cfg(feature = "hf-hub")]
const NEEDED: [&str; 2] = ["config.json", "tokenizer.json"];
#[cfg(feature = "hf-hub")]
const WELCOME: [&str; 3] = ["generation_config.json", "tokenizer_config.json", "chat_template.jinja"];

#[cfg(feature = "hf-hub")]
fn download(name: &Name) -> Result<PathBuf> {
    use hf_hub::api::sync::ApiBuilder;
    let failed = |reason: String| Error::Download { repository: name.repository.clone(), reason };
    let api = ApiBuilder::from_env().with_progress(true).build().map_err(|e| failed(e.to_string()))?;
    let repository = api.model(name.repository.clone());
    let get = |file: &str| repository.get(file).map_err(|e| failed(format!("{file}: {e}")));
    if let Some(file) = &name.file {
        return get(file);
    }
    let present: Vec<String> = repository
        .info()
        .map_err(|e| failed(e.to_string()))?
        .siblings
        .into_iter()
        .map(|sibling| sibling.rfilename)
        .collect();
    let has = |file: &str| present.iter().any(|p| p == file);
    if let Some(missing) = NEEDED.iter().find(|file| !has(file)) {
        let ggufs: Vec<&str> = present.iter().map(String::as_str).filter(|p| p.ends_with(".gguf")).collect();
        return Err(failed(if ggufs.is_empty() {
            format!("the repository has no {missing}")
        } else {
            format!("the repository has no {missing}; name one of its files: {}", ggufs.join(", "))
        }));
    }
    let index = "model.safetensors.index.json";
    let weights = if has(index) {
        let path = get(index)?;
        crate::checkpoint::shard_names(&crate::checkpoint::read_file(&path)?).map_err(|e| e.in_file(&path))?
    } else {
        vec!["model.safetensors".to_owned()]
    };
    let mut folder = PathBuf::new();
    let small = NEEDED.into_iter().chain(WELCOME.into_iter().filter(|f| has(f))).map(str::to_owned);
    for file in small.chain(weights) {
        folder = get(&file)?.parent().map(PathBuf::from).unwrap_or_default();
    }
    Ok(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_owner_name_and_perhaps_a_file() {
        let name = |text: &str| Name::parse(text).unwrap().unwrap();
        assert_eq!(name("hf:a/b-1.5"), Name { repository: "a/b-1.5".into(), file: None });
        assert_eq!(name("hf:a/b/q/x.GGUF").file.as_deref(), Some("q/x.GGUF"));
        for bad in
            ["hf:", "hf:a", "hf:a/", "hf:/b", "hf:a/../b", "hf:a/b/x.bin", "hf:a/b/", "hf:a b/c", "hf:../.."]
        {
            assert!(Name::parse(bad).unwrap().is_err(), "{bad}");
        }
        assert!(Name::parse("models/x.gguf").is_none());
    }

    #[test]
    fn paths_are_left_alone() {
        assert_eq!(locate("some/model.gguf").unwrap(), PathBuf::from("some/model.gguf"));
    }

    #[cfg(not(feature = "hf-hub"))]
    #[test]
    fn a_build_without_the_feature_says_what_to_do() {
        let error = locate("hf:owner/name").unwrap_err().to_string();
        assert!(error.contains("--features hf-hub") && error.contains("owner/name"), "{error}");
    }
}
