//! Errors of the crates as Python exceptions; the classes are in `attlas._errors`.

use attlas::Error;
use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

fn make<'py>(
    py: Python<'py>,
    class: &str,
    args: impl IntoPyObject<'py, Target = PyTuple, Output = Bound<'py, PyTuple>, Error = PyErr>,
) -> PyErr {
    let made = || -> PyResult<Bound<'py, PyAny>> {
        let args = args.into_pyobject(py)?;
        py.import("attlas._errors")?.getattr(class)?.call1(args)
    };
    made().map_or_else(|e| e, PyErr::from_value)
}

/// Creates the error for memory that the core cannot read in place: the caller copies it and tries again.
pub(crate) fn needs_copy(py: Python<'_>, why: &str) -> PyErr {
    make(py, "NeedsCopy", (why,))
}

pub(crate) fn shape(py: Python<'_>, what: &str, expected: &str, found: &str) -> PyErr {
    make(py, "ShapeError", (format!("{what}: expected {expected}, found {found}"), what, expected, found))
}

pub(crate) fn too_large(py: Python<'_>, what: &str, sizes: &[usize]) -> PyErr {
    make(py, "TooLargeError", (format!("{what} is too large: {sizes:?} overflows the address space"),))
}

pub(crate) fn unsupported(py: Python<'_>, method: &str, reasons: Vec<String>) -> PyErr {
    let text = format!("{method} cannot do this: {}", reasons.join("; "));
    make(py, "UnsupportedError", (text, method, reasons))
}

pub(crate) fn param(py: Python<'_>, text: String, name: &str, value: &str, expected: &str) -> PyErr {
    make(py, "ParameterError", (text, name, value, expected))
}

/// Converts an error of the library.
pub(crate) fn library(py: Python<'_>, error: Error) -> PyErr {
    let text = error.to_string();
    match error {
        Error::Unsupported { method, reasons } => unsupported(py, &method, reasons),
        Error::InvalidParam { name, value, expected } => param(py, text, &name, &value, &expected),
        Error::UnknownParam { name, accepted } => {
            param(py, text, &name, "", &format!("one of {}", accepted.join(", ")))
        }
        Error::UnknownId { kind, id, known } => {
            param(py, text, kind, &id, &format!("one of {}", known.join(", ")))
        }
        Error::Shape { what, expected, found } => shape(py, what, &expected, &found),
        Error::Calibration { method, expected, found } => {
            param(py, text, &format!("calibration of {method}"), &found, &expected)
        }
        Error::TooLarge { .. } => make(py, "TooLargeError", (text,)),
        Error::Threads { .. } => make(py, "ThreadsError", (text,)),
        Error::Numerical { .. } => make(py, "NumericalError", (text,)),
        _ => make(py, "Error", (text,)),
    }
}

/// Converts an error of the model runtime.
pub(crate) fn model(py: Python<'_>, error: attlas_model::Error) -> PyErr {
    use attlas_model::Error as E;
    let text = error.to_string();
    match error {
        E::Attention(inner) => library(py, inner),
        E::Interrupted => PyKeyboardInterrupt::new_err("interrupted"),
        E::Io { .. } | E::InFile { .. } => make(py, "DataError", (text,)),
        E::Recipe(_) => make(py, "RecipeError", (text,)),
        _ => make(py, "ModelError", (text,)),
    }
}

/// Converts an error of the lab.
pub(crate) fn lab(py: Python<'_>, error: attlas_lab::Error) -> PyErr {
    use attlas_lab::Error as E;
    let text = error.to_string();
    match error {
        E::Attlas(inner) => library(py, inner),
        E::Model(inner) => model(py, inner),
        E::Argument { what, expected, found } => param(py, text, &what, &found, &expected),
        E::Unknown { what, found, meant } => param(py, text, what, &found, &meant),
        E::NoRoom { .. } => make(py, "TooLargeError", (text,)),
        E::TensorShape { tensor, expected, found, .. } => {
            make(py, "ShapeError", (text, tensor, expected, found))
        }
        _ => make(py, "DataError", (text,)),
    }
}
