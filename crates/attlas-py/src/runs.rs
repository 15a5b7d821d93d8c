//! Attention of a model under a recipe: masks as intervals of keys, cut into runs that are ordinary problems.
//!
//! A row attends to the keys of one interval. Consecutive rows with related intervals form a *run*: equal intervals
//! (full), ends that rise by one from a common start (causal), or moving intervals of a fixed width (window). Each run
//! is an ordinary problem on views; padding is never read, and a sequence in a padded batch gives the same bits as
//! alone.

use crate::array::{Access, Flat, Target, View, intervals};
use crate::plan::{attend_heads, execute, options, problem, push};
use crate::{errors, threads};
use attlas::{DType, Inputs, Options, Out, Output, Problem, Qkv, Real, RunInfo, Workspace, registry};
use attlas_model::recipe;
use pyo3::exceptions::{PyRuntimeError, PyTypeError};
use pyo3::prelude::*;
use std::collections::HashMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, TryLockError};

/// Rows that form one ordinary problem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    kind: Kind,
    rows: Range<usize>,
    keys: Range<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Full,
    Causal,
    Window(usize),
}

impl Kind {
    fn window(self) -> Option<usize> {
        if let Kind::Window(w) = self { Some(w) } else { None }
    }

    fn name(self) -> &'static str {
        match self {
            Kind::Full => "full",
            Kind::Causal => "causal",
            Kind::Window(_) => "window",
        }
    }
}

/// Cuts the intervals of one sequence into runs; `Err` has the first row whose keys are no interval.
fn cut(rows: &[(i32, i32)], n_k: usize) -> Result<Vec<Run>, usize> {
    let mut runs = Vec::new();
    let interval = |i: usize| -> Result<(usize, usize), usize> {
        let (start, end) = rows[i];
        match (usize::try_from(start), usize::try_from(end)) {
            (Ok(s), Ok(e)) if s <= e && e <= n_k => Ok((s, e)),
            _ => Err(i),
        }
    };
    let mut first = 0;
    while first < rows.len() {
        let (start, end) = interval(first)?;
        if start == end {
            first += 1;
            continue;
        }
        let (mut last, mut kind) = ((start, end), Kind::Full);
        let mut next = first + 1;
        while next < rows.len() {
            let (s, e) = interval(next)?;
            let alone = next == first + 1;
            kind = match kind {
                Kind::Full if (s, e) == last => Kind::Full,
                Kind::Full if alone && e == last.1 + 1 && s == last.0 => Kind::Causal,
                Kind::Full if alone && e == last.1 + 1 && s == last.0 + 1 => Kind::Window(e - s),
                Kind::Causal if e == last.1 + 1 && s == last.0 => Kind::Causal,
                Kind::Causal if e == last.1 + 1 && s == last.0 + 1 => Kind::Window(e - s),
                Kind::Window(w) if e == last.1 + 1 && s == last.0 + 1 => Kind::Window(w),
                _ => break,
            };
            last = (s, e);
            next += 1;
        }
        runs.push(Run { kind, rows: first..next, keys: start..last.1 });
        first = next;
    }
    Ok(runs)
}

/// Returns the runs of every sequence as `(kind, first row, end, first key, end, window)`, for tests and inspection.
#[pyfunction]
pub(crate) fn runs(
    py: Python<'_>,
    mask: &Bound<'_, PyAny>,
    n_k: usize,
) -> PyResult<Vec<Vec<(&'static str, usize, usize, usize, usize, usize)>>> {
    let all = intervals(mask)?;
    all.iter()
        .map(|rows| {
            let runs = cut(rows, n_k).map_err(|i| gap(py, i))?;
            let tell = |r: Run| {
                let window = r.kind.window().unwrap_or(0);
                (r.kind.name(), r.rows.start, r.rows.end, r.keys.start, r.keys.end, window)
            };
            Ok(runs.into_iter().map(tell).collect())
        })
        .collect()
}

fn gap(py: Python<'_>, row: usize) -> PyErr {
    let reason = format!(
        "the mask leaves gaps: the keys that row {row} sees are no interval. Padding on one side, windows, chunks and \
         packed sequences are intervals; use sdpa or eager for other masks"
    );
    errors::unsupported(py, "attlas", vec![reason])
}

/// Assignment of methods to heads; see `docs/recipe.md`.
#[pyclass(frozen, module = "attlas._native")]
pub(crate) struct Recipe {
    pub(crate) inner: recipe::Recipe,
    resolved: Mutex<Resolved>,
}

/// Parts of layers by layer, heads and key heads.
type Resolved = HashMap<(usize, usize, usize), Arc<[recipe::HeadRun]>>;

/// Most cached layers; a model has fewer.
const LAYERS_KEPT: usize = 1024;

fn refused(method: &str, reason: &str) -> attlas_model::Error {
    attlas::Error::Unsupported { method: method.into(), reasons: vec![reason.into()] }.into()
}

impl Recipe {
    pub(crate) fn new(inner: recipe::Recipe) -> Self {
        Self { inner, resolved: Mutex::default() }
    }

    /// Caches [`parts_of`](Self::parts_of), because a decoding model needs it for every layer and token. It never waits
    /// for the lock, which a fork may leave locked.
    fn parts_kept(
        &self,
        layer: usize,
        heads: usize,
        kv_heads: usize,
    ) -> Result<Arc<[recipe::HeadRun]>, attlas_model::Error> {
        let key = (layer, heads, kv_heads);
        let mut kept = self.resolved.try_lock().ok();
        if let Some(parts) = kept.as_ref().and_then(|kept| kept.get(&key)) {
            return Ok(parts.clone());
        }
        let parts: Arc<[recipe::HeadRun]> = self.parts_of(layer, heads, kv_heads)?.into();
        if let Some(kept) = kept.as_mut().filter(|kept| kept.len() < LAYERS_KEPT) {
            kept.insert(key, parts.clone());
        }
        Ok(parts)
    }

    /// Returns the heads of one layer that are planned together. Refuses recipes with calibrations: those of the Rust
    /// runtime are in the coordinates of the model's file, and transformers may use another order.
    fn parts_of(
        &self,
        layer: usize,
        heads: usize,
        kv_heads: usize,
    ) -> Result<Vec<recipe::HeadRun>, attlas_model::Error> {
        let parts = self.inner.parts(layer, heads, kv_heads)?;
        let learnt = |p: &recipe::HeadRun| {
            [p.attending(false), p.attending(true)].into_iter().find(|told| told.calibration.is_some())
        };
        match parts.iter().find_map(learnt) {
            None => Ok(parts),
            Some(told) => Err(refused(
                told.method.id,
                "the recipe brings calibrations in the coordinates of the model's file, which transformers keeps in another order: \
                 run it by `attlas generate --recipe`, or tune without this method",
            )),
        }
    }
}

/// A group of heads with its method: method, settings, first head, end, first key head, end.
type Told = (&'static str, String, usize, usize, usize, usize);

#[pymethods]
impl Recipe {
    #[staticmethod]
    fn from_toml(py: Python<'_>, text: &str) -> PyResult<Self> {
        Ok(Self::new(recipe::Recipe::from_toml(text).map_err(|e| errors::model(py, e))?))
    }

    #[staticmethod]
    fn load(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        Ok(Self::new(recipe::Recipe::open(&path).map_err(|e| errors::model(py, e))?))
    }

    #[staticmethod]
    fn from_json(py: Python<'_>, text: &str) -> PyResult<Self> {
        let inner: recipe::Recipe = serde_json::from_str(text)
            .map_err(|e| errors::model(py, attlas_model::Error::Recipe(e.to_string())))?;
        // Reading it back also checks the version.
        let written = inner.to_toml().and_then(|t| recipe::Recipe::from_toml(&t));
        Ok(Self::new(written.map_err(|e| errors::model(py, e))?))
    }

    #[staticmethod]
    fn uniform(py: Python<'_>, method: &str, params: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        let method = registry::method(method).map_err(|e| errors::library(py, e))?;
        Ok(Self::new(recipe::Recipe::uniform(method.id, options(params)?)))
    }

    fn to_toml(&self, py: Python<'_>) -> PyResult<String> {
        self.inner.to_toml().map_err(|e| errors::model(py, e))
    }

    fn to_json(&self) -> PyResult<String> {
        serde_json::to_string(&self.inner).map_err(|e| PyRuntimeError::new_err(e.to_string()))
    }

    /// Returns the method of one query head, and its settings.
    fn choice(&self, layer: usize, head: usize) -> (String, String) {
        let (method, options) = self.inner.choice(layer, head);
        (method.into(), options.to_string())
    }

    /// Heads of one layer that are planned together.
    fn parts(&self, py: Python<'_>, layer: usize, heads: usize, kv_heads: usize) -> PyResult<Vec<Told>> {
        let parts = self.inner.parts(layer, heads, kv_heads).map_err(|e| errors::model(py, e))?;
        let tell = |p: recipe::HeadRun| {
            (p.method.id, p.options.to_string(), p.heads.start, p.heads.end, p.groups.start, p.groups.end)
        };
        Ok(parts.into_iter().map(tell).collect())
    }

    /// Fails if a rule names a layer or head that does not exist, or if a method refuses a problem of 64 tokens.
    fn check(
        &self,
        py: Python<'_>,
        layers: usize,
        heads: usize,
        kv_heads: usize,
        d: usize,
        causal: bool,
    ) -> PyResult<()> {
        let checked = || -> Result<(), attlas_model::Error> {
            for rule in &self.inner.rules {
                rule.layers.as_ref().map_or(Ok(()), |x| x.check("a layer of the recipe", layers))?;
                rule.heads.as_ref().map_or(Ok(()), |x| x.check("a head of the recipe", heads))?;
            }
            let problem =
                problem([1, heads, 64, d], [1, kv_heads, 64, d], [1, kv_heads, 64, d], causal, None);
            let mut accepted: Vec<(&str, Options)> = Vec::new();
            for layer in 0..layers {
                for part in self.parts_of(layer, heads, kv_heads)? {
                    for told in [part.attending(false), part.attending(true)] {
                        if !accepted.iter().any(|(m, o)| *m == told.method.id && *o == told.options) {
                            told.method.plan(&problem, &told.options)?;
                            accepted.push((told.method.id, told.options));
                        }
                    }
                    if let Some(told) =
                        part.decode.filter(|told| !told.is_baseline() && !told.method.claims.decode)
                    {
                        let reason =
                            "it has no form for new tokens; leave [rule.decode] out to attend exactly";
                        return Err(refused(told.method.id, reason));
                    }
                }
            }
            Ok(())
        };
        let done = py.detach(|| threads::run(0, |_| checked()));
        done.map_err(|e| errors::library(py, e))?.map_err(|e| errors::model(py, e))
    }

    /// Returns the name of its model, and a description of the sizes; empty if the recipe does not have them.
    #[getter]
    fn made_for(&self) -> (String, String) {
        let shape = self.inner.evidence.get("model_shape").map(ToString::to_string);
        (self.inner.model.clone().unwrap_or_default(), shape.unwrap_or_default())
    }

    #[getter]
    fn methods(&self) -> Vec<String> {
        let mut all: Vec<String> = self.inner.rules.iter().map(|r| r.method.clone()).collect();
        all.push(self.inner.default.method.clone());
        all.sort();
        all.dedup();
        all
    }
}

/// One count of attention calls: method, kind of run, first head, end, runs.
type Count = (&'static str, &'static str, usize, usize, usize);

/// Attention settings of one call.
struct Job<'a> {
    q: &'a View,
    k: &'a View,
    v: &'a View,
    parts: &'a [recipe::HeadRun],
    scale: Option<f64>,
}

impl Job<'_> {
    /// Returns true if everything is a single run of exact attention, as for a new token: it takes no time to plan and
    /// wakes the threads only if it needs them.
    fn is_one_exact_run(&self, sequences: &[Vec<Run>]) -> bool {
        let Some([run]) = sequences.first().map(Vec::as_slice) else { return false };
        let square = run.rows.len() == run.keys.len();
        let exact = matches!(self.parts, [part] if part.is_baseline() && part.options.is_empty());
        run.kind.window().is_none()
            && (!square || exact)
            && sequences.iter().all(|other| other[..] == [run.clone()])
    }

    /// Computes one run of some sequences; `lse` is that of the whole call.
    fn run<T: Real>(
        &self,
        run: &Run,
        batch: Range<usize>,
        out: &mut Target,
        lse: Option<&mut [T]>,
        counts: &mut Vec<Count>,
        ws: &mut Workspace,
    ) -> attlas::Result<RunInfo>
    where
        for<'x> Qkv<'x, T>: Into<Inputs<'x>>,
        for<'x> Out<'x, T>: Into<Output<'x>>,
    {
        let causal = run.kind != Kind::Full;
        let [_, heads, n_q, _] = self.q.dims();
        let whole = |batch: Range<usize>, h: Range<usize>, g: Range<usize>| {
            [
                self.q.part(batch.clone(), h, run.rows.clone()),
                self.k.part(batch.clone(), g.clone(), run.keys.clone()),
                self.v.part(batch, g, run.keys.clone()),
            ]
        };
        let square = run.rows.len() == run.keys.len();
        let groups = self.k.dims()[1];
        let everything = [recipe::HeadRun {
            method: registry::baseline(),
            options: Options::new(),
            calibration: None,
            decode: None,
            heads: 0..heads,
            groups: 0..groups,
        }];
        let window = run.kind.window().map(registry::sliding_window);
        // Exact attention replaces methods without a form for the run: few rows over many keys, windows.
        let parts = if square && window.is_none() { self.parts } else { &everything[..] };
        let mut lse = lse;
        let mut info = RunInfo::default();
        for part in parts {
            let dims = |x: &View, h: usize, n: usize| [batch.len(), h, n, x.dims()[3]];
            let problem: Problem = problem(
                dims(self.q, part.heads.len(), run.rows.len()),
                dims(self.k, part.groups.len(), run.keys.len()),
                dims(self.v, part.groups.len(), run.keys.len()),
                causal,
                self.scale,
            );
            let baseline = (registry::baseline(), Options::new());
            let (method, options) = match &window {
                Some(window) => window.clone(),
                // An encoder's heads use exact attention if the method has no unmasked form.
                None if !causal
                    && !part.is_baseline()
                    && !part.method.support(&problem, &part.options).is_yes() =>
                {
                    baseline
                }
                None => (part.method, part.options.clone()),
            };
            if lse.is_some() && !method.claims.lse {
                let reason = format!(
                    "{} has no log-sum-exp, which the sinks or the gradient of this layer need",
                    method.id
                );
                return Err(attlas::Error::Unsupported { method: method.id.into(), reasons: vec![reason] });
            }
            counts.push((method.id, run.kind.name(), part.heads.start, part.heads.end, batch.len()));
            let plan = method.plan(&problem, &options)?;
            let inputs = whole(batch.clone(), part.heads.clone(), part.groups.clone());
            let o = out.part::<T>(batch.clone(), part.heads.clone(), run.rows.clone())?;
            let mut part_lse =
                lse.as_ref().map(|_| vec![T::ZERO; batch.len() * part.heads.len() * run.rows.len()]);
            info = info.merge(execute::<T>(&*plan, inputs, o, part_lse.as_deref_mut(), None, ws)?);
            if let (Some(all), Some(some)) = (lse.as_deref_mut(), part_lse) {
                let mut rows = some.chunks_exact(run.rows.len());
                for b in batch.clone() {
                    for h in part.heads.clone() {
                        if let Some(row) = rows.next() {
                            all[(b * heads + h) * n_q + run.rows.start..][..row.len()].copy_from_slice(row);
                        }
                    }
                }
            }
        }
        Ok(info)
    }
}

/// Computes the attention of a model's layer: a mask of intervals or none, methods by the recipe. Rows without a key
/// are zero.
#[pyfunction]
pub(crate) fn attend_runs<'py>(
    py: Python<'py>,
    q: &Bound<'py, PyAny>,
    k: &Bound<'py, PyAny>,
    v: &Bound<'py, PyAny>,
    out: &Bound<'py, PyAny>,
    lse: Option<&Bound<'py, PyAny>>,
    mask: Option<&Bound<'py, PyAny>>,
    causal: bool,
    recipe: &Recipe,
    layer: usize,
    scale: Option<f64>,
    threads: usize,
) -> PyResult<(Vec<Count>, u64)> {
    let read = |x, name| View::new(x, name, false, Access::Read);
    let (q, k, v) = (read(q, "query")?, read(k, "key")?, read(v, "value")?);
    let mut out = Target::new(out, "out", true, &[("query", &q), ("key", &k), ("value", &v)])?;
    let mut lse = lse.filter(|x| !x.is_none()).map(|x| Flat::new(x, "lse")).transpose()?;
    let [batch, heads, n_q, _] = q.dims();
    let [_, kv_heads, n_k, _] = k.dims();
    problem(q.dims(), k.dims(), v.dims(), causal, scale).validate().map_err(|e| errors::library(py, e))?;
    for (name, found, want) in [
        ("key", k.dims(), [batch, kv_heads, n_k, q.dims()[3]]),
        ("value", v.dims(), [batch, kv_heads, n_k, v.dims()[3]]),
        ("out", out.view().dims(), [batch, heads, n_q, v.dims()[3]]),
    ] {
        if found != want {
            return Err(errors::shape(py, name, &format!("{want:?}"), &format!("{found:?}")));
        }
    }
    if let Some(lse) = &lse
        && lse.len() != batch * heads * n_q
    {
        return Err(errors::shape(
            py,
            "lse",
            &format!("{} elements", batch * heads * n_q),
            &lse.len().to_string(),
        ));
    }
    let sequences: Vec<Vec<Run>> = match mask.filter(|m| !m.is_none()) {
        Some(mask) => {
            let all = intervals(mask)?;
            let fits = |rows: &Vec<(i32, i32)>| rows.len() == n_q;
            if !all.iter().all(fits) || all.len() != batch && all.len() != 1 {
                let found = format!("{} × {}", all.len(), all.first().map_or(0, Vec::len));
                return Err(errors::shape(py, "mask", &format!("intervals of {batch} × {n_q} rows"), &found));
            }
            let cut: Result<Vec<_>, _> =
                all.iter().map(|rows| cut(rows, n_k).map_err(|i| gap(py, i))).collect();
            let cut = cut?;
            if cut.len() == batch { cut } else { vec![cut[0].clone(); batch] }
        }
        // A prompt into an empty static cache: keys past the prompt do not exist yet.
        None if causal && n_q > 1 => {
            let keys = 0..n_q.min(n_k);
            vec![vec![Run { kind: Kind::Causal, rows: 0..n_q, keys }]; batch]
        }
        None if n_k == 0 || n_q == 0 => vec![Vec::new(); batch],
        None => vec![vec![Run { kind: Kind::Full, rows: 0..n_q, keys: 0..n_k }]; batch],
    };
    let parts = recipe.parts_kept(layer, heads, kv_heads).map_err(|e| errors::model(py, e))?;
    let job = Job { q: &q, k: &k, v: &v, parts: &parts, scale };
    let here = job.is_one_exact_run(&sequences);
    let done = py.detach(|| {
        let work = |ws: &mut Workspace| -> attlas::Result<(Vec<Count>, u64)> {
            match q.dtype() {
                DType::F32 => all_runs::<f32>(&job, &sequences, &mut out, lse.as_mut().map(Flat::write), ws),
                DType::F64 => all_runs::<f64>(&job, &sequences, &mut out, lse.as_mut().map(Flat::write), ws),
            }
        };
        if here { threads::run_here(threads, work)? } else { threads::run(threads, work)? }
    });
    done.map_err(|e| errors::library(py, e))
}

fn all_runs<T: Real>(
    job: &Job<'_>,
    sequences: &[Vec<Run>],
    out: &mut Target,
    mut lse: Option<&mut [T]>,
    ws: &mut Workspace,
) -> attlas::Result<(Vec<Count>, u64)>
where
    for<'x> Qkv<'x, T>: Into<Inputs<'x>>,
    for<'x> Out<'x, T>: Into<Output<'x>>,
{
    let n_q = job.q.dims()[2];
    let (mut counts, mut keys) = (Vec::new(), 0);
    let mut first = 0;
    while first < sequences.len() {
        let runs = &sequences[first];
        let same = sequences[first..].iter().take_while(|other| *other == runs).count();
        let batch = first..first + same;
        let covered: usize = runs.iter().map(|r| r.rows.len()).sum();
        if covered < n_q {
            let heads = job.q.dims()[1];
            let mut o = out.part::<T>(batch.clone(), 0..heads, 0..n_q)?;
            for b in 0..same {
                for h in 0..heads {
                    (0..n_q).for_each(|i| o.row_mut(b, h, i).fill(T::ZERO));
                }
            }
            if let Some(lse) = lse.as_deref_mut() {
                lse[first * heads * n_q..batch.end * heads * n_q].fill(T::NEG_INFINITY);
            }
        }
        for run in runs {
            let info = job.run::<T>(run, batch.clone(), out, lse.as_deref_mut(), &mut counts, ws)?;
            keys += info.keys_visited;
        }
        first = batch.end;
    }
    Ok((counts, keys))
}

/// The streams of one layer: one for each part whose method decodes, exact attention for the others.
#[pyclass(frozen, module = "attlas._native")]
pub(crate) struct Streams {
    parts: Mutex<Vec<(recipe::HeadRun, Option<Box<dyn attlas::Stream>>)>>,
    dtype: DType,
}

impl Streams {
    fn with<R>(
        &self,
        work: impl FnOnce(&mut Vec<(recipe::HeadRun, Option<Box<dyn attlas::Stream>>)>) -> R,
    ) -> PyResult<R> {
        match self.parts.try_lock() {
            Ok(mut parts) => Ok(work(&mut parts)),
            Err(TryLockError::WouldBlock) => {
                Err(PyRuntimeError::new_err("another thread is using this cache"))
            }
            Err(TryLockError::Poisoned(_)) => {
                Err(PyRuntimeError::new_err("this cache was left half written by a failed call"))
            }
        }
    }
}

#[pymethods]
impl Streams {
    /// Creates streams for the sizes batch, heads, key heads, capacity, width and width of values.
    #[new]
    fn new(
        py: Python<'_>,
        recipe: &Recipe,
        layer: usize,
        sizes: [usize; 6],
        scale: Option<f64>,
        double: bool,
    ) -> PyResult<Self> {
        let [batch, heads, kv_heads, n, d, d_v] = sizes;
        let dtype = if double { DType::F64 } else { DType::F32 };
        let parts = recipe.parts_of(layer, heads, kv_heads).map_err(|e| errors::model(py, e))?;
        let made = py.detach(|| {
            threads::run(0, |_| -> attlas::Result<_> {
                let mut all = Vec::new();
                for part in parts {
                    // The method for new tokens, if the recipe names another one for them.
                    let told = part.attending(true);
                    let part =
                        recipe::HeadRun { method: told.method, options: told.options, decode: None, ..part };
                    let (h, g) = (part.heads.len(), part.groups.len());
                    let problem =
                        problem([batch, h, n, d], [batch, g, n, d], [batch, g, n, d_v], true, scale);
                    // Exact attention reads the existing cache; a stream would duplicate it.
                    let stream = if part.is_baseline() {
                        None
                    } else {
                        part.method.plan(&problem, &part.options)?.stream(dtype)
                    };
                    all.push((part, stream));
                }
                Ok(all)
            })?
        });
        Ok(Self { parts: Mutex::new(made.map_err(|e| errors::library(py, e))?), dtype })
    }

    /// Returns true if any head decodes by a stream.
    #[getter]
    fn any(&self) -> PyResult<bool> {
        self.with(|parts| parts.iter().any(|(_, s)| s.is_some()))
    }

    fn __len__(&self) -> PyResult<usize> {
        self.with(|parts| parts.iter().filter_map(|(_, s)| s.as_ref()).map(|s| s.len()).min().unwrap_or(0))
    }

    #[getter]
    fn nbytes(&self) -> PyResult<usize> {
        self.with(|parts| parts.iter().filter_map(|(_, s)| s.as_ref()).map(|s| s.state_bytes()).sum())
    }

    /// Pushes the new keys and attends with the query of the last one, token by token.
    fn attend(
        &self,
        py: Python<'_>,
        q: &Bound<'_, PyAny>,
        k: &Bound<'_, PyAny>,
        v: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        scale: Option<f64>,
        threads: usize,
    ) -> PyResult<Vec<Count>> {
        let read = |x, name| View::new(x, name, false, Access::Read);
        let (q, k, v) = (read(q, "query")?, read(k, "key")?, read(v, "value")?);
        let mut out = Target::new(out, "out", true, &[("query", &q), ("key", &k), ("value", &v)])?;
        if [&q, &k, &v, out.view()].iter().any(|x| x.dtype() != self.dtype) {
            return Err(PyTypeError::new_err(format!(
                "expected {:?}, as the streams were made for",
                self.dtype
            )));
        }
        let [batch, _, rows, _] = q.dims();
        let n_k = k.dims()[2];
        if rows != 1 || out.view().dims()[2] != 1 {
            return Err(errors::shape(py, "query", "one row", &format!("{rows}")));
        }
        let dtype = self.dtype;
        py.detach(|| {
            self.with(|parts| {
                threads::run(threads, |ws| -> attlas::Result<Vec<Count>> {
                    let mut counts = Vec::new();
                    for (part, stream) in parts.iter_mut() {
                        let (h, g) = (part.heads.clone(), part.groups.clone());
                        let queries = q.part(0..batch, h.clone(), 0..1);
                        if let Some(stream) = stream {
                            let known = stream.len().min(n_k);
                            let (new_k, new_v) =
                                (k.part(0..batch, g.clone(), known..n_k), v.part(0..batch, g, known..n_k));
                            if known < n_k {
                                push(&mut **stream, new_k, new_v, dtype, ws)?;
                            }
                            attend_heads(&mut **stream, queries, &mut out, h.clone(), dtype, ws)?;
                            counts.push((part.method.id, "stream", h.start, h.end, 1));
                            continue;
                        }
                        let keys = [
                            queries,
                            k.part(0..batch, g.clone(), 0..n_k),
                            v.part(0..batch, g.clone(), 0..n_k),
                        ];
                        let (d, d_v) = (k.dims()[3], v.dims()[3]);
                        let problem = problem(
                            [batch, h.len(), 1, d],
                            [batch, g.len(), n_k, d],
                            [batch, g.len(), n_k, d_v],
                            false,
                            scale,
                        );
                        let plan = registry::baseline().plan(&problem, &Options::new())?;
                        match dtype {
                            DType::F32 => execute::<f32>(
                                &*plan,
                                keys,
                                out.part(0..batch, h.clone(), 0..1)?,
                                None,
                                None,
                                ws,
                            )?,
                            DType::F64 => execute::<f64>(
                                &*plan,
                                keys,
                                out.part(0..batch, h.clone(), 0..1)?,
                                None,
                                None,
                                ws,
                            )?,
                        };
                        counts.push((registry::baseline().id, "full", h.start, h.end, 1));
                    }
                    Ok(counts)
                })?
            })
        })?
        .map_err(|e| errors::library(py, e))
    }
}
