//! `attlas._native`: what the Python package `attlas` is made of. Registration alone; `docs/python.md` describes the
//! package.

mod array;
mod errors;
mod lab;
mod own;
mod plan;
mod runs;
mod threads;

use pyo3::prelude::*;
use std::ffi::OsString;

/// Counts allocated bytes, so that comparisons can say how much memory a method needs.
#[global_allocator]
static ALLOCATOR: peak_alloc::PeakAlloc = peak_alloc::PeakAlloc;

/// To be called in the child after a fork.
#[pyfunction]
fn after_fork() {
    threads::after_fork();
}

/// Runs the command line.
#[pyfunction]
fn command_line(py: Python<'_>, arguments: Vec<OsString>) -> u8 {
    py.detach(|| attlas_cli::run(arguments))
}

/// The native part of attlas.
#[pymodule(gil_used = false)]
mod _native {
    #[pymodule_export]
    use super::array::view;
    #[pymodule_export]
    use super::lab::{
        Memory, Trace, atlas_json, compare, inspect, method_text, methods_text, perplexity_of_file, report,
        tune,
    };
    #[pymodule_export]
    use super::own::own_seconds;
    #[pymodule_export]
    use super::plan::{Calibration, Plan, Stream, attend, calibrate, supports};
    #[pymodule_export]
    use super::runs::{Recipe, Streams, attend_runs, runs};
    #[pymodule_export]
    use super::{after_fork, command_line};
}
