//! Errors of tensor operations.

/// Reason why a tensor operation was refused.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Sizes that do not match.
    #[error("{what}: expected {expected}, found {found}")]
    Shape {
        /// The operation.
        what: &'static str,
        /// The size that would match.
        expected: String,
        /// The given size.
        found: String,
    },
    /// A parameter outside its range.
    #[error("{name} = {value}: expected {expected}")]
    InvalidParam {
        /// Name of the parameter.
        name: &'static str,
        /// The value given.
        value: String,
        /// Accepted values.
        expected: String,
    },
    /// An infinity or NaN, in the data or, for entries near the largest number, in the result.
    #[error("{what} is not finite")]
    NotFinite {
        /// The operand with the infinity or NaN.
        what: &'static str,
    },
}

/// A result whose error is [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub(super) fn shape(what: &'static str, expected: impl ToString, found: impl ToString) -> Self {
        Self::Shape { what, expected: expected.to_string(), found: found.to_string() }
    }

    pub(super) fn param(name: &'static str, value: impl ToString, expected: impl ToString) -> Self {
        Self::InvalidParam { name, value: value.to_string(), expected: expected.to_string() }
    }
}
