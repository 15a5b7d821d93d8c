//! What can go wrong with a model's files.

use std::path::PathBuf;

/// A model that cannot be read, and why.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// Something stands where a folder was to be written.
    #[error("{}: it exists already, and nothing is overwritten", path.display())]
    Exists {
        /// The file or folder.
        path: PathBuf,
    },
    /// Another process is writing the same folder.
    #[error("{}: another process is writing it, in {}", path.display(), part.display())]
    BeingWritten {
        /// The folder.
        path: PathBuf,
        /// Where its files are until they are moved.
        part: PathBuf,
    },
    /// An error in one file of several.
    #[error("{}: {source}", path.display())]
    InFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: Box<Error>,
    },
    /// Neither a GGUF file nor a folder with `config.json`.
    #[error("{}: neither a GGUF file nor a folder with a config.json", path.display())]
    NotAModel {
        /// What was given.
        path: PathBuf,
    },
    /// The file ends before what its header announces.
    #[error("the file ends at byte {len}, but {what} at byte {offset} needs {needed} more")]
    Truncated {
        /// What was being read.
        what: &'static str,
        /// Where.
        offset: usize,
        /// Bytes it needs.
        needed: u64,
        /// Length of the file.
        len: usize,
    },
    /// A field of a header holds an impossible value.
    #[error("{what} is {found}; expected {expected}")]
    Invalid {
        /// The field.
        what: String,
        /// Its value.
        found: String,
        /// What would have been accepted.
        expected: String,
    },
    /// A block format that no product is defined for.
    #[error("tensor {tensor} has type {format}, which is not supported; supported are {supported}")]
    UnsupportedFormat {
        /// The tensor.
        tensor: String,
        /// Its type.
        format: String,
        /// The types that are.
        supported: String,
    },
    /// A key that the architecture needs.
    #[error("the key {key} is missing")]
    MissingKey {
        /// The key.
        key: String,
    },
    /// A tensor that the architecture needs.
    #[error("the tensor {name} is missing")]
    MissingTensor {
        /// Its name in this file.
        name: String,
    },
    /// A tensor whose shape contradicts the configuration.
    #[error("the tensor {name} has shape {found:?}; the configuration asks for {expected:?}")]
    Shape {
        /// The tensor.
        name: String,
        /// Outermost dimension first.
        found: Vec<usize>,
        /// Outermost dimension first.
        expected: Vec<usize>,
    },
    /// A model of another kind.
    #[error("the architecture {found:?} is not known; known are {known}")]
    UnknownArchitecture {
        /// What the file says.
        found: String,
        /// What this crate reads.
        known: String,
    },
    /// A feature of a known architecture that is not implemented.
    #[error("{what} is not supported")]
    Unsupported {
        /// The feature.
        what: String,
    },
    /// Malformed JSON.
    #[error("malformed JSON: {0}")]
    Json(#[from] serde_json::Error),
    /// Malformed safetensors.
    #[error("malformed safetensors: {0}")]
    Safetensors(#[from] safetensors::SafeTensorError),
    /// A method that cannot attend as asked, with its reasons.
    #[error(transparent)]
    Attention(#[from] attlas::Error),
    /// Malformed recipe.
    #[error("malformed recipe: {0}")]
    Recipe(String),
    /// Whoever was watching asked to stop.
    #[error("interrupted")]
    Interrupted,
    /// More tokens than the model was made for.
    #[error("{tokens} tokens do not fit into the context of {context}")]
    ContextTooShort {
        /// Tokens that were to be held at once.
        tokens: usize,
        /// The longest context of the model.
        context: usize,
    },
    /// A chat template that is missing, malformed, or that refuses the messages.
    #[error("chat template: {0}")]
    ChatTemplate(String),
    /// A model that cannot be downloaded.
    #[error("hf:{repository}: {reason}")]
    Download {
        /// Owner and name.
        repository: String,
        /// What went wrong, or what to do.
        reason: String,
    },
    /// The tokeniser cannot be built or cannot read a text.
    #[error("tokeniser: {0}")]
    Tokenizer(String),
}

impl Error {
    pub(crate) fn invalid(
        what: impl Into<String>,
        found: impl std::fmt::Display,
        expected: impl Into<String>,
    ) -> Self {
        Self::Invalid { what: what.into(), found: found.to_string(), expected: expected.into() }
    }

    pub(crate) fn in_file(self, path: &std::path::Path) -> Self {
        match self {
            Self::Io { .. } | Self::InFile { .. } => self,
            other => Self::InFile { path: path.to_path_buf(), source: Box::new(other) },
        }
    }
}

/// A result whose error is an [`Error`].
pub type Result<T> = std::result::Result<T, Error>;
