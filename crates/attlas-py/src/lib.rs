//! `attlas._native`: the native part of the Python package `attlas`. This file only registers functions;
//! `docs/python.md` describes the package.

mod array;
mod errors;
mod lab;
mod own;
mod plan;
mod runs;
mod threads;

use pyo3::prelude::*;
use std::ffi::OsString;

/// Counts allocated bytes; comparisons report them as the memory of a method.
#[global_allocator]
static ALLOCATOR: attlas_num::kernels::Counting = attlas_num::kernels::Counting;

/// Resets thread pools; called in the child after a fork.
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
