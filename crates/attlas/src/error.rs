//! Errors, each with the facts a caller needs to correct it.

/// Result type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Reason for a refusal. Nothing has been written to any output when one of these is returned.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The method cannot solve the problem; lists all the reasons.
    #[error("{method} cannot do this: {}", reasons.join("; "))]
    Unsupported {
        /// Id of the method, layer or conversion.
        method: String,
        /// Every reason, in words a user can act on.
        reasons: Vec<String>,
    },
    /// A parameter has a value that is not accepted.
    #[error("parameter {name} = {value} is not accepted; expected {expected}")]
    InvalidParam {
        /// Name of the parameter.
        name: String,
        /// The value found.
        value: String,
        /// The accepted values.
        expected: String,
    },
    /// No parameter of that name exists.
    #[error("there is no parameter {name}; accepted are {}", list(accepted))]
    UnknownParam {
        /// The name found.
        name: String,
        /// The names that exist.
        accepted: Vec<String>,
    },
    /// No method, layer or conversion of that id exists.
    #[error("there is no {kind} {id}; known are {}", list(known))]
    UnknownId {
        /// "method", "layer" or "conversion".
        kind: &'static str,
        /// The id found.
        id: String,
        /// The ids that exist.
        known: Vec<String>,
    },
    /// A tensor, stride or count does not fit the problem.
    #[error("{what}: expected {expected}, found {found}")]
    Shape {
        /// The object.
        what: &'static str,
        /// The shape that the problem needs.
        expected: String,
        /// The value found.
        found: String,
    },
    /// Sizes whose product does not fit into memory addresses.
    #[error("{what} is too large: {sizes:?} overflows the address space")]
    TooLarge {
        /// The object.
        what: &'static str,
        /// The factors.
        sizes: Vec<usize>,
    },
    /// A calibration that was made for something else, or is missing.
    #[error("calibration for {method}: expected {expected}, found {found}")]
    Calibration {
        /// Id of the method.
        method: String,
        /// The calibration that the method needs.
        expected: String,
        /// The value found.
        found: String,
    },
    /// A computation that has no answer for these numbers.
    #[error("{what}: {reason}")]
    Numerical {
        /// The computation.
        what: &'static str,
        /// The reason.
        reason: String,
    },
    /// A device refused, or a call of its driver failed.
    #[error("{device}: {reason}")]
    Device {
        /// The device.
        device: String,
        /// Its message.
        reason: String,
    },
    /// The threads could not be started.
    #[error("could not start {threads} threads: {reason}")]
    Threads {
        /// Number requested.
        threads: usize,
        /// The system's message.
        reason: String,
    },
}

impl Error {
    /// Makes an [`Error::Shape`].
    pub fn shape(what: &'static str, expected: impl ToString, found: impl ToString) -> Self {
        Self::Shape { what, expected: expected.to_string(), found: found.to_string() }
    }

    /// Makes an [`Error::InvalidParam`].
    pub fn param(name: &str, value: impl ToString, expected: impl ToString) -> Self {
        Self::InvalidParam { name: name.into(), value: value.to_string(), expected: expected.to_string() }
    }
}

fn list(names: &[String]) -> String {
    if names.is_empty() { "none".into() } else { names.join(", ") }
}
