//! Errors of measurements: each says what was expected, what was found and what to do next.

use std::path::{Path, PathBuf};

/// Result of anything in this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Reason why a measurement could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The library refused.
    #[error(transparent)]
    Attlas(#[from] attlas::Error),
    /// A model could not be read or run.
    #[error(transparent)]
    Model(#[from] attlas_model::Error),
    /// A written folder whose model differs from the one in memory.
    #[error(
        "the written folder differs from the model in memory by {found:.3e} in a logit, where rounding explains {allowed:.1e}: \
         nothing is kept; please report this model"
    )]
    WrittenDiffers {
        /// The largest difference.
        found: f64,
        /// The largest that is accepted.
        allowed: f64,
    },
    /// A setting or argument that could not be parsed.
    #[error("{what}: expected {expected}, found {found}")]
    Argument {
        /// The argument.
        what: String,
        /// The accepted values.
        expected: String,
        /// The value found.
        found: String,
    },
    /// A name that is nearly right.
    #[error("{what}: there is no {found}; did you mean {meant}?")]
    Unknown {
        /// The kind of thing expected.
        what: &'static str,
        /// The value given.
        found: String,
        /// The likely intended name.
        meant: String,
    },
    /// Inputs too large for the machine's memory.
    #[error("{what} would take {} of memory, more than this machine has", crate::table::bytes(*needed))]
    NoRoom {
        /// A command or option that accepts it.
        what: String,
        /// Bytes that it takes.
        needed: usize,
    },
    /// A file that could not be read or written.
    #[error("{}: {action} failed: {reason}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// "reading" or "writing".
        action: &'static str,
        /// The system's message.
        reason: std::io::Error,
    },
    /// A file whose bytes are not in its format, or end too early.
    #[error("{}: not a complete {format} file: {reason}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// Its format.
        format: &'static str,
        /// The reader's message.
        reason: String,
    },
    /// A file that lacks a required tensor.
    #[error("{}: expected {expected}, found {}", path.display(), if found.is_empty() { "no tensor".into() } else { found.join(", ") })]
    MissingTensor {
        /// The file.
        path: PathBuf,
        /// The requirement.
        expected: String,
        /// The tensors in the file.
        found: Vec<String>,
    },
    /// A tensor with a shape or element type that does not fit.
    #[error("{}: tensor {tensor}: expected {expected}, found {found}", path.display())]
    TensorShape {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The requirement.
        expected: String,
        /// The state found.
        found: String,
    },
    /// A tensor with a value that is not a finite number.
    #[error("{}: tensor {tensor}: expected finite numbers, found {value} at element {index}", path.display())]
    NonFinite {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Position, counted from 0 in memory order.
        index: usize,
        /// The value.
        value: f64,
    },
}

impl Error {
    /// Creates an [`Error::Argument`].
    pub fn argument(what: impl ToString, expected: impl ToString, found: impl ToString) -> Self {
        Self::Argument { what: what.to_string(), expected: expected.to_string(), found: found.to_string() }
    }

    /// Creates the error for a file that could not be read.
    pub fn reading(path: &Path, reason: std::io::Error) -> Self {
        Self::Io { path: path.into(), action: "reading", reason }
    }

    /// A file that could not be written.
    pub fn writing(path: &Path, reason: std::io::Error) -> Self {
        Self::Io { path: path.into(), action: "writing", reason }
    }
}
