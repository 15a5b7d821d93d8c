//! Plans, streams, calibrations, and the single call that combines them: views in, rows out.

use crate::array::{Access, Flat, Part, Target, View};
use crate::{errors, threads};
use attlas::params::Value;
use attlas::{
    DType, Inputs, Mask, Method, Options, Out, Output, Problem, Qkv, Real, Result, RunInfo, Workspace,
    registry,
};
use pyo3::exceptions::{PyRuntimeError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString, PyTuple};
use std::sync::{Mutex, TryLockError};

/// Reads options: a dictionary, or text such as `block=64,seed=1`.
pub(crate) fn options(given: Option<&Bound<'_, PyAny>>) -> PyResult<Options> {
    let mut options = Options::new();
    let Some(given) = given.filter(|g| !g.is_none()) else { return Ok(options) };
    if let Ok(text) = given.cast::<PyString>() {
        let text = text.to_str()?;
        for part in text.split(',').filter(|p| !p.is_empty()) {
            let (name, value) = part.split_once('=').ok_or_else(|| {
                PyValueError::new_err(format!(
                    "options: expected name=value, such as block=64, found '{part}'"
                ))
            })?;
            options.set(name, value);
        }
        return Ok(options);
    }
    for (name, value) in given.cast::<PyDict>()? {
        let name: String = name.extract()?;
        options.set(&name, self::value(given.py(), &name, &value)?);
    }
    Ok(options)
}

fn value(py: Python<'_>, name: &str, x: &Bound<'_, PyAny>) -> PyResult<Value> {
    if x.is_none() {
        return Ok(Value::Text("auto".into()));
    }
    if let Ok(x) = x.extract::<bool>() {
        return Ok(Value::Bool(x));
    }
    if let Ok(x) = x.extract::<u64>() {
        return Ok(Value::Int(x));
    }
    if let Ok(x) = x.extract::<f64>() {
        return Ok(Value::Float(x));
    }
    if let Ok(x) = x.cast::<PyString>() {
        return Ok(Value::from(x.to_str()?));
    }
    if let Ok(items) = x.extract::<Vec<usize>>() {
        let words: Vec<String> = items.iter().map(usize::to_string).collect();
        return Ok(Value::from(words.join("x")));
    }
    let found = x.repr()?.to_string();
    let expected = "a number, a word, true or false, None for auto, or a list of whole numbers";
    let text = format!("parameter {name} = {found} is not accepted; expected {expected}");
    Err(errors::param(py, text, name, &found, expected))
}

/// Runs a plan on parts of views.
pub(crate) fn execute<T: Real>(
    plan: &dyn attlas::Plan,
    [q, k, v]: [Part<'_>; 3],
    out: attlas::TensorMut<'_, T>,
    lse: Option<&mut [T]>,
    key_lens: Option<&[usize]>,
    ws: &mut Workspace,
) -> Result<RunInfo>
where
    for<'x> Qkv<'x, T>: Into<Inputs<'x>>,
    for<'x> Out<'x, T>: Into<Output<'x>>,
{
    let x = Qkv { key_lens, ..Qkv::new(q.read::<T>()?, k.read::<T>()?, v.read::<T>()?) };
    let out = match lse {
        Some(lse) => Out::with_lse(out, lse),
        None => Out::new(out),
    };
    plan.execute(&x.into(), &mut out.into(), ws)
}

/// The views of one call, checked against each other.
pub(crate) struct Views {
    pub(crate) q: View,
    pub(crate) k: View,
    pub(crate) v: View,
    pub(crate) out: Target,
    pub(crate) lse: Option<Flat>,
}

impl Views {
    pub(crate) fn new<'py>(
        [q, k, v, out]: [&Bound<'py, PyAny>; 4],
        lse: Option<&Bound<'py, PyAny>>,
        tokens_first: bool,
    ) -> PyResult<Self> {
        let py = q.py();
        let read = |x, name| View::new(x, name, tokens_first, Access::Read);
        let (q, k, v) = (read(q, "q")?, read(k, "k")?, read(v, "v")?);
        let out = Target::new(out, "out", tokens_first, &[("q", &q), ("k", &k), ("v", &v)])?;
        let views = Self {
            q,
            k,
            v,
            out,
            lse: lse.filter(|x| !x.is_none()).map(|x| Flat::new(x, "lse")).transpose()?,
        };
        for (name, x) in [("k", &views.k), ("v", &views.v), ("out", views.out.view())] {
            if x.dtype() != views.q.dtype() {
                let found = format!("{name} of {:?}, q of {:?}", x.dtype(), views.q.dtype());
                return Err(PyTypeError::new_err(format!(
                    "expected one element type for all arrays, found {found}"
                )));
            }
        }
        let [b, h, n, _] = views.q.dims();
        let [_, _, _, d_v] = views.v.dims();
        if views.out.view().dims() != [b, h, n, d_v] {
            let found = format!("{:?}", views.out.view().dims());
            return Err(errors::shape(py, "out", &format!("{:?}", [b, h, n, d_v]), &found));
        }
        if let Some(lse) = &views.lse
            && lse.len() != b * h * n
        {
            return Err(errors::shape(py, "lse", &format!("{} elements", b * h * n), &lse.len().to_string()));
        }
        Ok(views)
    }

    pub(crate) fn problem(&self, causal: bool, scale: Option<f64>) -> Problem {
        problem(self.q.dims(), self.k.dims(), self.v.dims(), causal, scale)
    }
}

pub(crate) fn problem(
    q: [usize; 4],
    k: [usize; 4],
    v: [usize; 4],
    causal: bool,
    scale: Option<f64>,
) -> Problem {
    let base = Problem { batch: q[0], ..Problem::new(q[1], q[2], q[3]) };
    Problem {
        n_kv_heads: k[1],
        n_k: k[2],
        d_v: v[3],
        scale: scale.unwrap_or(base.scale),
        mask: if causal { Mask::Causal } else { Mask::None },
        ..base
    }
}

fn run_views(
    plan: &dyn attlas::Plan,
    views: &mut Views,
    key_lens: Option<&[usize]>,
    ws: &mut Workspace,
) -> Result<RunInfo> {
    let inputs = [views.q.whole(), views.k.whole(), views.v.whole()];
    let lse = views.lse.as_mut();
    match views.q.dtype() {
        DType::F32 => execute::<f32>(plan, inputs, views.out.whole()?, lse.map(|x| x.write()), key_lens, ws),
        DType::F64 => execute::<f64>(plan, inputs, views.out.whole()?, lse.map(|x| x.write()), key_lens, ws),
    }
}

/// Returns the fields of `attlas.RunInfo`.
pub(crate) fn info<'py>(py: Python<'py>, info: &RunInfo) -> PyResult<Bound<'py, PyTuple>> {
    let status = serde_json::to_value(info.status).ok().and_then(|v| v.as_str().map(str::to_string));
    let figures = PyDict::new(py);
    for (name, value) in &info.figures {
        figures.set_item(name, value)?;
    }
    (
        info.keys_visited,
        info.empty_rows,
        info.fallback_rows,
        info.rank,
        info.iterations,
        status.unwrap_or_default(),
        figures,
    )
        .into_pyobject(py)
}

/// Plans and runs one problem, given as arrays.
#[pyfunction]
pub(crate) fn attend<'py>(
    py: Python<'py>,
    q: &Bound<'py, PyAny>,
    k: &Bound<'py, PyAny>,
    v: &Bound<'py, PyAny>,
    out: &Bound<'py, PyAny>,
    lse: Option<&Bound<'py, PyAny>>,
    tokens_first: bool,
    method: &str,
    options: Option<&Bound<'py, PyAny>>,
    causal: bool,
    scale: Option<f64>,
    key_lengths: Option<Vec<usize>>,
    calibration: Option<&Calibration>,
    threads: usize,
    want_info: bool,
) -> PyResult<Option<Bound<'py, PyTuple>>> {
    let method = registry::method(method).map_err(|e| errors::library(py, e))?;
    let options = self::options(options)?;
    let mut views = Views::new([q, k, v, out], lse, tokens_first)?;
    let problem = views.problem(causal, scale);
    refuse_lse(py, method, lse.is_some_and(|x| !x.is_none()))?;
    let calibration = calibration.map(|c| &c.inner);
    // Plain exact attention takes no time to plan.
    let here = std::ptr::eq(method, registry::baseline()) && options.is_empty();
    let ran = py.detach(|| {
        let work = |ws: &mut Workspace| {
            let plan = method.plan_with(&problem, &options, calibration)?;
            run_views(&*plan, &mut views, key_lengths.as_deref(), ws)
        };
        if here { threads::run_here(threads, work)? } else { threads::run(threads, work)? }
    });
    let ran = ran.map_err(|e| errors::library(py, e))?;
    want_info.then(|| info(py, &ran)).transpose()
}

fn refuse_lse(py: Python<'_>, method: &Method, wanted: bool) -> PyResult<()> {
    if wanted && !method.claims.lse {
        let reason = "it has no log-sum-exp: its sums are not exponentials of logits";
        return Err(errors::unsupported(py, method.id, vec![reason.into()]));
    }
    Ok(())
}

/// Returns every reason why a method refuses a problem.
#[pyfunction]
pub(crate) fn supports(
    py: Python<'_>,
    method: &str,
    options: Option<&Bound<'_, PyAny>>,
    sizes: [usize; 7],
    causal: bool,
    scale: Option<f64>,
) -> PyResult<Vec<String>> {
    let method = registry::method(method).map_err(|e| errors::library(py, e))?;
    let options = self::options(options)?;
    let problem = from_sizes(sizes, causal, scale);
    problem.validate().map_err(|e| errors::library(py, e))?;
    Ok(py.detach(|| method.support(&problem, &options).reasons))
}

/// Builds a problem from batch, heads, key heads, queries, keys, width and width of values.
pub(crate) fn from_sizes(
    [batch, heads, kv_heads, n_q, n_k, d, d_v]: [usize; 7],
    causal: bool,
    scale: Option<f64>,
) -> Problem {
    problem([batch, heads, n_q, d], [batch, kv_heads, n_k, d], [batch, kv_heads, n_k, d_v], causal, scale)
}

/// A plan: all decisions about a problem that do not depend on the data.
#[pyclass(frozen, module = "attlas._native")]
pub(crate) struct Plan {
    plan: Box<dyn attlas::Plan>,
    method: &'static Method,
}

#[pymethods]
impl Plan {
    #[new]
    fn new(
        py: Python<'_>,
        method: &str,
        options: Option<&Bound<'_, PyAny>>,
        sizes: [usize; 7],
        causal: bool,
        scale: Option<f64>,
        calibration: Option<&Calibration>,
        threads: usize,
    ) -> PyResult<Self> {
        let method = registry::method(method).map_err(|e| errors::library(py, e))?;
        let options = self::options(options)?;
        let problem = from_sizes(sizes, causal, scale);
        let calibration = calibration.map(|c| &c.inner);
        let plan = py
            .detach(|| threads::run(threads, |_| method.plan_with(&problem, &options, calibration))?)
            .map_err(|e| errors::library(py, e))?;
        Ok(Self { plan, method })
    }

    /// Returns the sizes in the order of the constructor, the scale, and true if causal.
    #[getter]
    fn problem(&self) -> ([usize; 7], f64, bool) {
        let p = self.plan.problem();
        ([p.batch, p.n_heads, p.n_kv_heads, p.n_q, p.n_k, p.d, p.d_v], p.scale, p.mask == Mask::Causal)
    }

    /// Returns the operations of set-up and run, and the bytes.
    #[getter]
    fn cost(&self) -> (u64, u64, u64) {
        let c = self.plan.cost();
        (c.setup_flops, c.run_flops, c.bytes)
    }

    fn workspace_bytes(&self, py: Python<'_>, threads: usize) -> PyResult<usize> {
        py.detach(|| threads::run(threads, |ws| self.plan.workspace_bytes(DType::F32, ws))?)
            .map_err(|e| errors::library(py, e))
    }

    fn execute<'py>(
        &self,
        py: Python<'py>,
        q: &Bound<'py, PyAny>,
        k: &Bound<'py, PyAny>,
        v: &Bound<'py, PyAny>,
        out: &Bound<'py, PyAny>,
        lse: Option<&Bound<'py, PyAny>>,
        tokens_first: bool,
        key_lengths: Option<Vec<usize>>,
        threads: usize,
    ) -> PyResult<Bound<'py, PyTuple>> {
        refuse_lse(py, self.method, lse.is_some_and(|x| !x.is_none()))?;
        let mut views = Views::new([q, k, v, out], lse, tokens_first)?;
        let ran = py.detach(|| {
            threads::run_here(threads, |ws| run_views(&*self.plan, &mut views, key_lengths.as_deref(), ws))?
        });
        info(py, &ran.map_err(|e| errors::library(py, e))?)
    }

    /// Returns a stream for token-by-token decoding, or `None`.
    fn stream(&self, py: Python<'_>, double: bool) -> PyResult<Option<Stream>> {
        let dtype = if double { DType::F64 } else { DType::F32 };
        let problem = *self.plan.problem();
        let made = py.detach(|| threads::run(0, |_| self.plan.stream(dtype)));
        let made = made.map_err(|e| errors::library(py, e))?;
        Ok(made.map(|stream| Stream { stream: Mutex::new(stream), problem, dtype }))
    }
}

/// Decoding one token at a time.
#[pyclass(frozen, module = "attlas._native")]
pub(crate) struct Stream {
    stream: Mutex<Box<dyn attlas::Stream>>,
    problem: Problem,
    dtype: DType,
}

impl Stream {
    fn with<R>(&self, work: impl FnOnce(&mut dyn attlas::Stream) -> R) -> PyResult<R> {
        match self.stream.try_lock() {
            Ok(mut stream) => Ok(work(&mut **stream)),
            Err(TryLockError::WouldBlock) => Err(PyRuntimeError::new_err(
                "another thread is using this stream; give each thread a stream of its own",
            )),
            Err(TryLockError::Poisoned(_)) => {
                Err(PyRuntimeError::new_err("this stream was left half written by a failed call"))
            }
        }
    }

    fn check(&self, x: &View, name: &str) -> PyResult<()> {
        if x.dtype() == self.dtype {
            return Ok(());
        }
        let text =
            format!("{name}: expected {:?}, as the stream was made for, found {:?}", self.dtype, x.dtype());
        Err(PyTypeError::new_err(text))
    }
}

#[pymethods]
impl Stream {
    /// Appends keys and values.
    fn push(
        &self,
        py: Python<'_>,
        k: &Bound<'_, PyAny>,
        v: &Bound<'_, PyAny>,
        tokens_first: bool,
        threads: usize,
    ) -> PyResult<()> {
        let k = View::new(k, "k", tokens_first, Access::Read)?;
        let v = View::new(v, "v", tokens_first, Access::Read)?;
        self.check(&k, "k")?;
        self.check(&v, "v")?;
        py.detach(|| {
            self.with(|stream| {
                threads::run(threads, |ws| push(stream, k.whole(), v.whole(), self.dtype, ws))?
            })
        })?
        .map_err(|e| errors::library(py, e))
    }

    /// Attends with the query of the last token.
    fn attend(
        &self,
        py: Python<'_>,
        q: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        tokens_first: bool,
        threads: usize,
    ) -> PyResult<()> {
        let q = View::new(q, "q", tokens_first, Access::Read)?;
        let mut out = Target::new(out, "out", tokens_first, &[("q", &q)])?;
        self.check(&q, "q")?;
        self.check(out.view(), "out")?;
        py.detach(|| {
            self.with(|stream| {
                threads::run(threads, |ws| attend_last(stream, q.whole(), &mut out, self.dtype, ws))?
            })
        })?
        .map_err(|e| errors::library(py, e))
    }

    fn __len__(&self) -> PyResult<usize> {
        self.with(|s| s.len())
    }

    #[getter]
    fn nbytes(&self) -> PyResult<usize> {
        self.with(|s| s.state_bytes())
    }

    #[getter]
    fn problem(&self) -> ([usize; 7], f64, bool) {
        let p = &self.problem;
        ([p.batch, p.n_heads, p.n_kv_heads, p.n_q, p.n_k, p.d, p.d_v], p.scale, p.mask == Mask::Causal)
    }
}

/// Appends to a stream.
pub(crate) fn push(
    stream: &mut dyn attlas::Stream,
    k: Part<'_>,
    v: Part<'_>,
    dtype: DType,
    ws: &mut Workspace,
) -> Result<()> {
    match dtype {
        DType::F32 => stream.push(k.read::<f32>()?.into(), v.read::<f32>()?.into(), ws),
        DType::F64 => stream.push(k.read::<f64>()?.into(), v.read::<f64>()?.into(), ws),
    }
}

/// Attends to a stream.
pub(crate) fn attend_last(
    stream: &mut dyn attlas::Stream,
    q: Part<'_>,
    out: &mut Target,
    dtype: DType,
    ws: &mut Workspace,
) -> Result<()> {
    let heads = 0..out.view().dims()[1];
    attend_heads(stream, q, out, heads, dtype, ws)
}

/// Attends to a stream and writes some heads of the output.
pub(crate) fn attend_heads(
    stream: &mut dyn attlas::Stream,
    q: Part<'_>,
    out: &mut Target,
    heads: std::ops::Range<usize>,
    dtype: DType,
    ws: &mut Workspace,
) -> Result<()> {
    let [batch, _, rows, _] = out.view().dims();
    let info = match dtype {
        DType::F32 => {
            let o = out.part::<f32>(0..batch, heads, 0..rows)?;
            stream.attend(q.read::<f32>()?.into(), &mut Out::new(o).into(), ws)
        }
        DType::F64 => {
            let o = out.part::<f64>(0..batch, heads, 0..rows)?;
            stream.attend(q.read::<f64>()?.into(), &mut Out::new(o).into(), ws)
        }
    };
    info.map(|_| ())
}

/// Calibration of a method.
#[pyclass(frozen, module = "attlas._native")]
pub(crate) struct Calibration {
    pub(crate) inner: attlas::Calibration,
}

#[pymethods]
impl Calibration {
    #[staticmethod]
    fn from_json(text: &str) -> PyResult<Self> {
        let inner = serde_json::from_str(text).map_err(|e| {
            PyValueError::new_err(format!("expected a calibration as attlas.calibrate saves it, found {e}"))
        })?;
        Ok(Self { inner })
    }

    fn to_json(&self) -> PyResult<String> {
        serde_json::to_string(&self.inner).map_err(|e| PyValueError::new_err(e.to_string()))
    }

    #[getter]
    fn method(&self) -> &str {
        &self.inner.method
    }

    fn __repr__(&self) -> String {
        let c = &self.inner;
        format!("<calibration of {}: {} heads, {} key heads, d = {}>", c.method, c.n_heads, c.n_kv_heads, c.d)
    }
}

/// Learns from one sample of inputs.
#[pyfunction]
pub(crate) fn calibrate(
    py: Python<'_>,
    method: &str,
    options: Option<&Bound<'_, PyAny>>,
    samples: &Bound<'_, PyList>,
    tokens_first: bool,
    causal: bool,
    scale: Option<f64>,
    threads: usize,
) -> PyResult<Calibration> {
    let method = registry::method(method).map_err(|e| errors::library(py, e))?;
    let options = self::options(options)?;
    let Some(learn) = method.calibrate else {
        let reason = format!("{} learns nothing from data: leave the calibration out", method.id);
        return Err(errors::unsupported(py, method.id, vec![reason]));
    };
    let mut views = Vec::new();
    for sample in samples {
        let (q, k, v): (Bound<'_, PyAny>, Bound<'_, PyAny>, Bound<'_, PyAny>) = sample.extract()?;
        let read = |x, name| View::new(x, name, tokens_first, Access::Read);
        views.push([read(&q, "q")?, read(&k, "k")?, read(&v, "v")?]);
    }
    let Some([q, k, v]) = views.first() else {
        return Err(PyValueError::new_err("expected one or more samples (q, k, v), found none"));
    };
    let problem = problem(q.dims(), k.dims(), v.dims(), causal, scale);
    let learnt = py.detach(|| {
        threads::run(threads, |_| {
            problem.validate()?;
            let mut inputs: Vec<Inputs<'_>> = Vec::new();
            for [q, k, v] in &views {
                let (q, k, v) = (q.whole(), k.whole(), v.whole());
                inputs.push(match views[0][0].dtype() {
                    DType::F32 => Qkv::new(q.read::<f32>()?, k.read::<f32>()?, v.read::<f32>()?).into(),
                    DType::F64 => Qkv::new(q.read::<f64>()?, k.read::<f64>()?, v.read::<f64>()?).into(),
                });
            }
            learn(&problem, &options, &inputs)
        })?
    });
    Ok(Calibration { inner: learnt.map_err(|e| errors::library(py, e))? })
}
