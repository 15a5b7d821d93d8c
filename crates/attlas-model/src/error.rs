//! Errors in a model's files.

use std::path::PathBuf;

/// Errors of reading or running a model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused.
    #[error("{}: {source}", shown(path))]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// Something exists at the place of a new folder.
    #[error("{}: it exists already, and nothing is overwritten", shown(path))]
    Exists {
        /// The file or folder.
        path: PathBuf,
    },
    /// Another process is writing the same folder.
    #[error("{}: another process is writing it, in {}", path.display(), part.display())]
    BeingWritten {
        /// The folder.
        path: PathBuf,
        /// Temporary folder of its files.
        part: PathBuf,
    },
    /// An error in one file of several.
    #[error("{}: {source}", shown(path))]
    InFile {
        /// The file.
        path: PathBuf,
        /// The fault.
        source: Box<Error>,
    },
    /// Neither a GGUF file nor a folder with `config.json`.
    #[error("{}: neither a GGUF file nor a folder with a config.json", shown(path))]
    NotAModel {
        /// The value given.
        path: PathBuf,
    },
    /// A file shorter than its header announces.
    #[error("the file ends at byte {len}, but {what} at byte {offset} needs {needed} more")]
    Truncated {
        /// The part that was being read.
        what: &'static str,
        /// Offset of that part.
        offset: usize,
        /// Bytes it needs.
        needed: u64,
        /// Length of the file.
        len: usize,
    },
    /// A field of a header with an impossible value.
    #[error("{} is {}; expected {}", plain(what), plain(found), plain(expected))]
    Invalid {
        /// The field.
        what: String,
        /// Its value.
        found: String,
        /// Accepted values.
        expected: String,
    },
    /// A block format without a defined product.
    #[error(
        "tensor {} has type {}, which is not supported; supported are {supported}: take a file of the model in one of \
         these, or make one from its F16 file with llama-quantize",
        plain(tensor),
        plain(format)
    )]
    UnsupportedFormat {
        /// The tensor.
        tensor: String,
        /// Its type.
        format: String,
        /// The supported types.
        supported: String,
    },
    /// A key that the architecture needs.
    #[error("the key {} is missing", plain(key))]
    MissingKey {
        /// The key.
        key: String,
    },
    /// A tensor that the architecture needs.
    #[error("the tensor {} is missing", plain(name))]
    MissingTensor {
        /// Its name in this file.
        name: String,
    },
    /// A tensor whose shape contradicts the configuration.
    #[error("the tensor {} has shape {found:?}; the configuration asks for {expected:?}", plain(name))]
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
        /// The value in the file.
        found: String,
        /// The values that this crate reads.
        known: String,
    },
    /// A feature of a known architecture that is not implemented.
    #[error("{} is not supported", plain(what))]
    Unsupported {
        /// The feature.
        what: String,
    },
    /// Files that are not supported although the same model is available in another format.
    #[error("{} is not supported; use {instead}", plain(what))]
    UseInstead {
        /// The value found.
        what: String,
        /// The command to use instead.
        instead: String,
    },
    /// A tensor that no part of the model uses.
    #[error(
        "the tensor {} is part of nothing that a {architecture} model is known to have{}; running the rest would be \
         another model",
        plain(name),
        if *more > 0 { format!(", and {more} others are not, either") } else { String::new() }
    )]
    UnreadTensor {
        /// Its name; the first of them.
        name: String,
        /// Number of others.
        more: usize,
        /// The file's own name for it.
        architecture: &'static str,
    },
    /// Malformed JSON.
    #[error("malformed JSON: {0}")]
    Json(#[from] serde_json::Error),
    /// Malformed safetensors.
    #[error("malformed safetensors: {}", plain(&.0.to_string()))]
    Safetensors(#[from] safetensors::SafeTensorError),
    /// A method that cannot do the problem, with its reasons.
    #[error(transparent)]
    Attention(#[from] attlas::Error),
    /// Malformed recipe.
    #[error("malformed recipe: {}", plain_lines(.0))]
    Recipe(String),
    /// The observer stopped the run.
    #[error("interrupted")]
    Interrupted,
    /// More tokens than the model's context.
    #[error("{tokens} tokens do not fit into the context of {context}")]
    ContextTooShort {
        /// Tokens requested at once.
        tokens: usize,
        /// The longest context of the model.
        context: usize,
    },
    /// A chat template that is missing, malformed, or that refuses the messages.
    #[error("chat template: {}", plain(.0))]
    ChatTemplate(String),
    /// A model that cannot be downloaded.
    #[error("hf:{repository}: {reason}")]
    Download {
        /// Owner and name.
        repository: String,
        /// The fault, or what to do.
        reason: String,
    },
    /// The tokeniser cannot be built or cannot read a text.
    #[error("tokeniser: {}", plain(.0))]
    Tokenizer(String),
}

/// Escapes control characters in a text from a file, for a terminal.
fn plain(text: &str) -> std::borrow::Cow<'_, str> {
    if !text.contains(char::is_control) {
        return text.into();
    }
    let spelled = |c: char| if c.is_control() { c.escape_default().to_string() } else { c.to_string() };
    text.chars().map(spelled).collect::<String>().into()
}

/// Escapes each line separately: the parser shows where it stopped.
fn plain_lines(text: &str) -> String {
    text.split('\n').map(plain).collect::<Vec<_>>().join("\n")
}

fn shown(path: &std::path::Path) -> String {
    plain(&path.to_string_lossy()).into_owned()
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

/// A result with an [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_from_files_cannot_write_to_the_terminal() {
        let name = || "a\u{1b}[2J\u{9b}b\r".to_owned();
        let errors = [
            Error::MissingTensor { name: name() },
            Error::MissingKey { key: name() },
            Error::invalid(name(), name(), name()),
            Error::UnsupportedFormat { tensor: name(), format: name(), supported: "F32".into() },
            Error::Shape { name: name(), found: vec![], expected: vec![] },
            Error::Unsupported { what: name() },
            Error::UnknownArchitecture { found: name(), known: "llama".into() },
            Error::ChatTemplate(name()),
            Error::Tokenizer(name()),
            Error::Recipe(format!("line 1\n{}", name())),
            Error::MissingKey { key: "x".into() }.in_file(std::path::Path::new(&name())),
        ];
        for error in errors {
            let text = error.to_string();
            assert!(!text.replace('\n', "").contains(char::is_control), "{text:?}");
            assert!(text.contains("\\u{1b}[2J"), "{text:?}");
        }
    }
}
