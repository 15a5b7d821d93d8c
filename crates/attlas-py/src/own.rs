//! Time of a problem without Python, the baseline for a call of the package.

use crate::plan::{from_sizes, options};
use crate::{errors, threads};
use attlas::{Out, Qkv, Result, TensorMut, TensorRef, Workspace, registry};
use pyo3::prelude::*;
use std::time::Instant;

/// Returns the mean seconds of a call over `calls`, including planning. Arrays, plan and output belong to Rust, without
/// Python in between. Single precision.
#[pyfunction]
pub(crate) fn own_seconds(
    py: Python<'_>,
    method: &str,
    params: Option<&Bound<'_, PyAny>>,
    sizes: [usize; 7],
    causal: bool,
    threads: usize,
    calls: u32,
) -> PyResult<f64> {
    let method = registry::method(method).map_err(|e| errors::library(py, e))?;
    let options = options(params)?;
    let p = from_sizes(sizes, causal, None);
    let timed = py.detach(|| {
        threads::run_here(threads, |ws: &mut Workspace| -> Result<f64> {
            p.validate()?;
            let shapes = [
                [p.batch, p.n_heads, p.n_q, p.d],
                [p.batch, p.n_kv_heads, p.n_k, p.d],
                [p.batch, p.n_kv_heads, p.n_k, p.d_v],
            ];
            let len = |[b, h, n, c]: [usize; 4]| b * h * n * c;
            let wave = |n: usize, step: f32| (0..n).map(|i| (i as f32 * step).sin()).collect();
            let data: [Vec<f32>; 3] =
                [wave(len(shapes[0]), 0.37), wave(len(shapes[1]), 0.61), wave(len(shapes[2]), 0.83)];
            let shape = [p.batch, p.n_heads, p.n_q, p.d_v];
            let mut out = vec![0.0f32; len(shape)];
            let begun = Instant::now();
            for _ in 0..calls {
                let plan = method.plan(&p, &options)?;
                let read = |i: usize| TensorRef::bhnd(&data[i], shapes[i]);
                let x = Qkv::new(read(0)?, read(1)?, read(2)?);
                plan.execute(&x.into(), &mut Out::new(TensorMut::bhnd(&mut out, shape)?).into(), ws)?;
            }
            Ok(begun.elapsed().as_secs_f64() / f64::from(calls.max(1)))
        })?
    });
    timed.map_err(|e| errors::library(py, e))
}
