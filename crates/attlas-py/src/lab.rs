//! The lab: traces, comparisons, inspections, recipes and reports. Records are returned as JSON with their table and
//! picture; a Python function receives the progress, and Ctrl-C ends the work between two steps.

use crate::array::{Access, View};
use crate::errors;
use crate::runs::Recipe;
use attlas::diagnostics;
use attlas::{Mask, Options};
use attlas_lab::compare::{self as comparing, Comparison, Matching};
use attlas_lab::inspect::{self as looking, Inspection};
use attlas_lab::perplexity::{AgainstExact, Record};
use attlas_lab::report::Report;
use attlas_lab::select::{Choice, Selection};
use attlas_lab::text::Text;
use attlas_lab::tune::{self as tuning, Check, Effort, Ended, SearchState};
use attlas_lab::{
    LayerData, Meter, Progress, Run, Source, Workload, atlas, budget, extract, html, perplexity, text, trace,
};
use attlas_model::perplexity::Protocol;
use attlas_model::recipe::Numbers;
use attlas_num::kernels::Counting;
use pyo3::exceptions::{PyKeyError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

fn json(x: &impl serde::Serialize) -> PyResult<String> {
    serde_json::to_string(x).map_err(|e| PyRuntimeError::new_err(e.to_string()))
}

fn meter() -> Meter {
    Meter { peak: Counting::peak_bytes, reset: Counting::reset_peak }
}

/// Calls a Python function for every step, and stops the work at Ctrl-C or if the function raises.
struct Watch {
    call: Option<Py<PyAny>>,
    stop: AtomicBool,
    raised: Option<PyErr>,
}

impl Watch {
    fn new(call: Option<Py<PyAny>>) -> Self {
        Self { call, stop: AtomicBool::new(false), raised: None }
    }

    /// `stop` is the flag of this watch, borrowed beside it.
    fn step(
        call: &Option<Py<PyAny>>,
        stop: &AtomicBool,
        raised: &mut Option<PyErr>,
        done: usize,
        total: usize,
        what: &str,
    ) {
        if raised.is_some() {
            return;
        }
        let told = Python::attach(|py| {
            py.check_signals()?;
            call.as_ref().map_or(Ok(()), |f| f.call1(py, (done, total, what)).map(|_| ()))
        });
        if let Err(e) = told {
            *raised = Some(e);
            stop.store(true, Ordering::Relaxed);
        }
    }

    /// Raises the exception, unless it is Ctrl-C and the finished part is to be kept.
    fn ended(self, py: Python<'_>, keep: bool) -> PyResult<()> {
        match self.raised {
            Some(e) if keep && e.is_instance_of::<pyo3::exceptions::PyKeyboardInterrupt>(py) => Ok(()),
            Some(e) => Err(e),
            None => Ok(()),
        }
    }
}

/// Returns the whole registry, as from `attlas methods --json`.
#[pyfunction]
pub(crate) fn atlas_json() -> PyResult<String> {
    json(&atlas::Atlas::new(None))
}

/// Returns the page of one method.
#[pyfunction]
pub(crate) fn method_text(py: Python<'_>, id: &str) -> PyResult<String> {
    let method = attlas::registry::method(id).map_err(|e| errors::library(py, e))?;
    Ok(atlas::MethodEntry::new(method).text())
}

/// Returns the table of all methods, or of one family.
#[pyfunction]
pub(crate) fn methods_text(py: Python<'_>, family: Option<&str>) -> PyResult<String> {
    let family = family.map(attlas_lab::select::family).transpose().map_err(|e| errors::lab(py, e))?;
    Ok(atlas::Atlas::new(family).table().text())
}

/// Queries, keys and values of one or more layers, in Rust's memory.
#[pyclass(frozen, module = "attlas._native")]
pub(crate) struct Trace {
    pub(crate) work: Arc<Workload>,
}

#[pymethods]
impl Trace {
    /// Loads a source named as on the command line: `demo`, `synthetic:…`, files.
    #[staticmethod]
    fn load(py: Python<'_>, source: &str) -> PyResult<Self> {
        let load = || source.parse::<Source>()?.load();
        Ok(Self { work: Arc::new(py.detach(load).map_err(|e| errors::lab(py, e))?) })
    }

    /// Creates a trace from layers `(number, q, k, v, scale)` with arrays `[heads, n, d]`.
    #[staticmethod]
    fn from_arrays(
        py: Python<'_>,
        layers: &Bound<'_, PyList>,
        causal: bool,
        source: String,
        metadata: BTreeMap<String, String>,
    ) -> PyResult<Self> {
        let mut data = Vec::new();
        for layer in layers {
            let (number, q, k, v, scale): (
                usize,
                Bound<'_, PyAny>,
                Bound<'_, PyAny>,
                Bound<'_, PyAny>,
                Option<f64>,
            ) = layer.extract()?;
            let read = |x: &Bound<'_, PyAny>, name: &str| -> PyResult<(Vec<f32>, [usize; 4])> {
                let view = View::new(x, name, false, Access::Read)?;
                let part = view.whole();
                let tensor = part.read::<f32>().map_err(|e| errors::library(py, e))?;
                let [b, h, n, d] = tensor.dims();
                if b != 1 {
                    return Err(errors::shape(
                        py,
                        name,
                        "one sequence [heads, n, d]",
                        &format!("{b} sequences"),
                    ));
                }
                let mut all = Vec::with_capacity(h * n * d);
                (0..h).for_each(|i| tensor.head(0, i).iter_rows().for_each(|r| all.extend_from_slice(r)));
                if let Some(i) = all.iter().position(|x: &f32| !x.is_finite()) {
                    let text = format!(
                        "layer {number}, {name}: expected finite numbers, found {} at element {i}",
                        all[i]
                    );
                    return Err(PyValueError::new_err(text));
                }
                Ok((all, [b, h, n, d]))
            };
            let ((q, q_dims), (k, k_dims), (v, v_dims)) = (read(&q, "q")?, read(&k, "k")?, read(&v, "v")?);
            let problem = crate::plan::problem(q_dims, k_dims, v_dims, false, scale);
            problem.validate().map_err(|e| errors::library(py, e))?;
            if (v_dims[1], v_dims[2], k_dims[3]) != (k_dims[1], k_dims[2], q_dims[3]) {
                let found = format!("q {q_dims:?}, k {k_dims:?}, v {v_dims:?}");
                return Err(errors::shape(
                    py,
                    "trace",
                    "keys as wide as queries, as many values as keys",
                    &found,
                ));
            }
            data.push(LayerData { layer: Some(number), problem, q, k, v });
        }
        if data.is_empty() {
            return Err(PyValueError::new_err("trace: expected one or more layers, found none"));
        }
        data.sort_by_key(|x| x.layer);
        let mask = if causal { Mask::Causal } else { Mask::None };
        Ok(Self { work: Arc::new(Workload { source, mask, metadata, layers: data }) })
    }

    /// Extracts a trace from a model of the Rust runtime that reads a text.
    #[staticmethod]
    fn extract(
        py: Python<'_>,
        model: PathBuf,
        text: PathBuf,
        tokens: usize,
        layers: Option<&str>,
        heads: Option<&str>,
        threads: usize,
        watch: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        let mut watch = Watch::new(watch);
        let settings = extract::Settings {
            layers: numbers(py, layers)?,
            heads: numbers(py, heads)?,
            threads,
            ..extract::Settings::default()
        };
        let (call, stop, raised) = (&watch.call, &watch.stop, &mut watch.raised);
        let done = py.detach(|| -> attlas_lab::Result<Workload> {
            let opened = text::open_model(&model)?;
            let read = Text::read(&text, &opened, Some(tokens))?;
            let mut workload = extract::extract(
                &opened,
                &read,
                &settings,
                &mut |done, total| Watch::step(call, stop, raised, done, total, "reading"),
                stop,
            )?
            .workload;
            let name = model.file_name().unwrap_or(model.as_os_str()).to_string_lossy().into_owned();
            workload.metadata.insert("model".into(), name);
            workload.source = format!("{} reading {}", model.display(), read.source);
            Ok(workload)
        });
        watch.ended(py, false)?;
        Ok(Self { work: Arc::new(done.map_err(|e| errors::lab(py, e))?) })
    }

    fn save(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        py.detach(|| trace::write(&self.work, &path)).map_err(|e| errors::lab(py, e))
    }

    #[getter]
    fn source(&self) -> &str {
        &self.work.source
    }

    #[getter]
    fn causal(&self) -> bool {
        self.work.mask == Mask::Causal
    }

    #[getter]
    fn metadata(&self) -> BTreeMap<String, String> {
        self.work.metadata.clone()
    }

    /// Returns the numbers of the layers.
    #[getter]
    fn layers(&self) -> Vec<usize> {
        self.work.layers.iter().enumerate().map(|(i, x)| x.layer.unwrap_or(i)).collect()
    }

    /// Returns the scale of one layer.
    fn scale(&self, layer: usize) -> PyResult<f64> {
        Ok(self.work.layers[self.place(layer)?].problem.scale)
    }

    /// Returns queries (0), keys (1) or values (2) of one layer.
    fn part(&self, layer: usize, which: usize) -> PyResult<Memory> {
        Ok(Memory { work: self.work.clone(), place: self.place(layer)?, which })
    }

    /// Returns the trace with only some layers.
    fn keep(&self, py: Python<'_>, layers: Vec<usize>) -> PyResult<Self> {
        let mut work = (*self.work).clone();
        work.keep_layers(&layers).map_err(|e| errors::lab(py, e))?;
        Ok(Self { work: Arc::new(work) })
    }
}

impl Trace {
    fn place(&self, layer: usize) -> PyResult<usize> {
        let there = self.layers();
        there
            .iter()
            .position(|&l| l == layer)
            .ok_or_else(|| PyKeyError::new_err(format!("layer: expected one of {there:?}, found {layer}")))
    }
}

/// Memory of a trace that NumPy can view without a copy.
#[pyclass(frozen, module = "attlas._native")]
pub(crate) struct Memory {
    work: Arc<Workload>,
    place: usize,
    which: usize,
}

#[pymethods]
impl Memory {
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let layer = &self.work.layers[self.place];
        let p = &layer.problem;
        let (data, shape) = match self.which {
            0 => (&layer.q, (p.n_heads, p.n_q, p.d)),
            1 => (&layer.k, (p.n_kv_heads, p.n_k, p.d)),
            _ => (&layer.v, (p.n_kv_heads, p.n_k, p.d_v)),
        };
        let interface = PyDict::new(py);
        interface.set_item("version", 3)?;
        interface.set_item("typestr", if cfg!(target_endian = "little") { "<f4" } else { ">f4" })?;
        interface.set_item("shape", shape)?;
        // Read-only: the trace is shared.
        interface.set_item("data", (data.as_ptr() as usize, true))?;
        Ok(interface)
    }
}

fn numbers(py: Python<'_>, text: Option<&str>) -> PyResult<Option<Numbers>> {
    text.map(|t| t.parse::<Numbers>().map_err(|e| errors::model(py, e))).transpose()
}

fn selection(py: Python<'_>, methods: Vec<String>, set: Vec<String>) -> PyResult<Selection> {
    Choice { methods, family: None, set }.resolve().map_err(|e| errors::lab(py, e))
}

fn mask(causal: Option<bool>) -> Option<Mask> {
    causal.map(|c| if c { Mask::Causal } else { Mask::None })
}

/// JSON, the table as text, the table as Markdown, and the picture.
type Shown = (String, String, String, String);

/// Measures errors and times of methods.
#[pyfunction]
pub(crate) fn compare(
    py: Python<'_>,
    trace: &Trace,
    methods: Vec<String>,
    set: Vec<String>,
    matched: Option<&str>,
    seeds: usize,
    seed: u64,
    causal: Option<bool>,
    time_limit: Option<f64>,
    threads: usize,
    watch: Option<Py<PyAny>>,
    keep: bool,
) -> PyResult<Shown> {
    let (result, _) =
        compared(py, trace, methods, set, matched, seeds, seed, causal, time_limit, threads, watch, keep)?;
    let table = result.table();
    Ok((json(&result)?, table.text(), table.markdown(), html::picture(&result)))
}

fn compared(
    py: Python<'_>,
    trace: &Trace,
    methods: Vec<String>,
    set: Vec<String>,
    matched: Option<&str>,
    seeds: usize,
    seed: u64,
    causal: Option<bool>,
    time_limit: Option<f64>,
    threads: usize,
    watch: Option<Py<PyAny>>,
    keep: bool,
) -> PyResult<(Comparison, bool)> {
    let chosen = selection(py, methods, set)?;
    let budget = matched.map(|b| b.parse::<budget::Budget>().map_err(|e| errors::lab(py, e))).transpose()?;
    let settings = comparing::Settings {
        mask: mask(causal),
        seeds,
        time_limit,
        meter: meter(),
        ..comparing::Settings::default()
    };
    let mut watch = Watch::new(watch);
    let (call, stop, raised) = (&watch.call, &watch.stop, &mut watch.raised);
    let done = py.detach(|| -> attlas_lab::Result<Comparison> {
        let progress = &mut |at: Progress<'_>| Watch::step(call, stop, raised, at.done, at.total, at.what);
        let mut run = Run { threads, seed, progress, stop };
        let mut matching = None;
        let mut selection = chosen;
        if let Some(budget) = budget {
            let (equal, methods) = budget::equalise(&trace.work, &selection, budget, &settings, &mut run)?;
            selection = equal;
            matching = Some(Matching { budget, methods });
        }
        let result = comparing::compare(&trace.work, &selection, &settings, &mut run)?;
        Ok(Comparison { matched: matching, ..result })
    });
    watch.ended(py, keep)?;
    let result = done.map_err(|e| errors::lab(py, e))?;
    let interrupted = result.interrupted;
    Ok((result, interrupted))
}

fn inspected(
    py: Python<'_>,
    trace: &Trace,
    heads: Option<&str>,
    figures: &str,
    causal: Option<bool>,
    threads: usize,
    watch: Option<Py<PyAny>>,
    keep: bool,
) -> PyResult<Inspection> {
    let settings = looking::Settings {
        mask: mask(causal),
        heads: numbers(py, heads)?,
        figures: figures_from(py, figures)?,
    };
    let mut watch = Watch::new(watch);
    let (call, stop, raised) = (&watch.call, &watch.stop, &mut watch.raised);
    let done = py.detach(|| {
        let progress = &mut |at: Progress<'_>| Watch::step(call, stop, raised, at.done, at.total, at.what);
        looking::inspect(&trace.work, &settings, &mut Run { threads, seed: 0, progress, stop })
    });
    watch.ended(py, keep)?;
    done.map_err(|e| errors::lab(py, e))
}

/// Parses the sizes of spectra: `rank=64,seed=0`.
fn figures_from(py: Python<'_>, text: &str) -> PyResult<diagnostics::Settings> {
    let mut figures = diagnostics::Settings::default();
    for part in text.split(',').filter(|p| !p.is_empty()) {
        let (name, value) = part.split_once('=').unwrap_or((part, ""));
        let number = || {
            value.parse::<usize>().map_err(|_| {
                let expected = "a whole number";
                errors::param(
                    py,
                    format!("{name}: expected {expected}, found '{value}'"),
                    name,
                    value,
                    expected,
                )
            })
        };
        match name {
            "rank" => figures.rank = number()?,
            "seed" => figures.seed = number()? as u64,
            _ => {
                let expected = "rank or seed";
                return Err(errors::param(
                    py,
                    format!("there is no setting {name}; accepted are {expected}"),
                    name,
                    value,
                    expected,
                ));
            }
        }
    }
    Ok(figures)
}

/// Inspects heads.
#[pyfunction]
pub(crate) fn inspect(
    py: Python<'_>,
    trace: &Trace,
    heads: Option<&str>,
    figures: &str,
    causal: Option<bool>,
    threads: usize,
    watch: Option<Py<PyAny>>,
    keep: bool,
) -> PyResult<Shown> {
    let found = inspected(py, trace, heads, figures, causal, threads, watch, keep)?;
    Ok((json(&found)?, found.table().text(), found.table().markdown(), found.picture()))
}

/// Makes the report page.
#[pyfunction]
pub(crate) fn report(
    py: Python<'_>,
    trace: &Trace,
    recipe: Option<(String, PyRef<'_, Recipe>)>,
    methods: Vec<String>,
    seeds: usize,
    time_limit: Option<f64>,
    figures: &str,
    threads: usize,
    command: String,
    watch: Option<Py<PyAny>>,
) -> PyResult<String> {
    let again = watch.as_ref().map(|w| w.clone_ref(py));
    let inspection = inspected(py, trace, None, figures, None, threads, again, false)?;
    let (comparison, _) =
        compared(py, trace, methods, Vec::new(), None, seeds, 0, None, time_limit, threads, watch, false)?;
    let made = recipe.as_ref().and_then(|(_, r)| r.inner.evidence.get("command")).map(ToString::to_string);
    let commands: Vec<String> = made.into_iter().chain([command]).collect();
    let page = Report {
        inspection: &inspection,
        comparison: &comparison,
        recipe: recipe.as_ref().map(|(name, r)| (name.as_str(), &r.inner)),
        commands: &commands,
    };
    Ok(page.page())
}

/// Reads a record like that of `attlas perplexity` from JSON that the Python side computed.
fn record(text: &str) -> Result<Record, String> {
    let x: serde_json::Value = serde_json::from_str(text).map_err(|e| e.to_string())?;
    let number = |name: &str| x[name].as_f64().ok_or(format!("no number {name}"));
    let whole = |name: &str| x[name].as_u64().map(|n| n as usize).ok_or(format!("no whole number {name}"));
    let word = |name: &str| x[name].as_str().unwrap_or_default().to_string();
    let against_exact = match x.get("exact_nll") {
        None => None,
        Some(_) => Some(AgainstExact {
            exact_nll: number("exact_nll")?,
            exact_ppl: number("exact_ppl")?,
            ppl_increase: number("ppl_increase")?,
            nll_increase: number("nll_increase")
                .or_else(|_| Ok::<f64, String>(number("nll")? - number("exact_nll")?))?,
            nll_increase_se: x["nll_increase_se"].as_f64(),
            kl_mean: number("kl_mean")?,
            kl_se: number("kl_se")?,
            kl_median: x["kl_median"].as_f64(),
            kl_q90: x["kl_q90"].as_f64(),
            kl_q99: x["kl_q99"].as_f64(),
            kl_max: x["kl_max"].as_f64(),
            same_top: number("same_top")?,
            delta_p_mean: number("delta_p_mean")?,
            delta_p_rms: number("delta_p_rms")?,
            exact_seconds: number("exact_seconds")?,
            keys_share: number("keys_share")?,
            fell_back: x["fell_back"].as_bool().unwrap_or(false),
            past_recipe: x["past_recipe"].as_bool().unwrap_or(false),
            decodes_exactly: Vec::new(),
        }),
    };
    Ok(Record {
        text: word("text"),
        text_sha256: word("text_sha256"),
        tokens: whole("tokens")?,
        scored: whole("scored")? as u64,
        protocol: "strided",
        task: None,
        context: whole("context")?,
        stride: whole("stride")?,
        bos: x["bos"].as_bool().unwrap_or(false),
        windows: whole("windows")?,
        attention: word("attention"),
        cache: attlas_model::kept::CacheFormat::F32,
        compute: attlas_model::Compute::F32,
        in_f32: std::collections::BTreeMap::new(),
        params: Options::new(),
        nll: number("nll")?,
        nll_se: number("nll_se")?,
        ppl: number("ppl")?,
        ppl_se: number("ppl_se")?,
        seconds: number("seconds")?,
        tokens_per_second: number("tokens_per_second")?,
        against_exact,
        spread_keys: None,
        nodes: Vec::new(),
        interrupted: false,
    })
}

/// A model that Python runs.
struct Called {
    call: Py<PyAny>,
    shape: String,
    raised: Option<PyErr>,
}

impl Check for Called {
    fn check(
        &mut self,
        recipe: &attlas_model::Recipe,
        _: &Text,
        context: usize,
        _: &AtomicBool,
    ) -> attlas_lab::Result<Option<Record>> {
        let toml = recipe.to_toml()?;
        let told = Python::attach(|py| -> PyResult<String> {
            py.check_signals()?;
            self.call.call1(py, (toml, context))?.extract(py)
        });
        match told {
            Ok(text) => record(&text).map(Some).map_err(|found| {
                attlas_lab::Error::argument("check", "the record of attlas.perplexity", found)
            }),
            Err(e) => {
                self.raised = Some(e);
                Ok(None)
            }
        }
    }

    fn shape(&self) -> String {
        self.shape.clone()
    }
}

/// Chooses a method for each head. `check(recipe, context)` runs the model and returns a record as JSON.
#[pyfunction]
pub(crate) fn tune(
    py: Python<'_>,
    trace: &Trace,
    check: Py<PyAny>,
    model: (String, String),
    texts: [(String, String, usize); 2],
    budgets: (Option<f64>, Option<f64>, Option<f64>),
    methods: Vec<String>,
    set: Vec<String>,
    effort: &str,
    seed: u64,
    state: Option<PathBuf>,
    command: Option<String>,
    threads: usize,
    watch: Option<Py<PyAny>>,
) -> PyResult<(String, String, String, Option<Recipe>)> {
    let effort = match effort {
        "quick" => Effort::Quick,
        "normal" => Effort::Normal,
        "thorough" => Effort::Thorough,
        other => {
            let expected = "quick, normal or thorough";
            return Err(errors::param(
                py,
                format!("effort: expected {expected}, found '{other}'"),
                "effort",
                other,
                expected,
            ));
        }
    };
    let (name, shape) = model;
    let settings = tuning::Settings {
        max_error: budgets.0,
        max_kl: budgets.1,
        max_ppl_increase: budgets.2,
        selection: selection(py, methods, set)?,
        layers: None,
        calibrations: std::sync::Arc::default(),
        answer: None,
        task: None,
        decode: false,
        effort,
        shard: None,
        model: name,
        command,
    };
    // The search uses only the number of tokens; the Python side has the text.
    let [text, check_text] = texts.map(|(source, sha256, n)| Text { source, sha256, tokens: vec![0; n] });
    let mut called = Called { call: check, shape, raised: None };
    let mut watch = Watch::new(watch);
    let (call, stop, raised) = (&watch.call, &watch.stop, &mut watch.raised);
    let ended = py.detach(|| -> attlas_lab::Result<Ended> {
        let progress = &mut |at: Progress<'_>| Watch::step(call, stop, raised, at.done, at.total, at.what);
        let mut run = Run { threads, seed, progress, stop };
        let mut kept = SearchState::open(state.as_deref(), &tuning::key(&trace.work, &settings, &run)?)?;
        tuning::tune(&mut called, &text, &check_text, &trace.work, &settings, &mut kept, &mut run)
    });
    if let Some(e) = called.raised {
        return Err(e);
    }
    watch.ended(py, false)?;
    match ended.map_err(|e| errors::lab(py, e))? {
        Ended::Interrupted(_) => Err(pyo3::exceptions::PyKeyboardInterrupt::new_err("interrupted")),
        Ended::Done(tuned) => {
            let table = tuned.round_table().text() + "\n" + &tuned.table().text();
            let markdown = tuned.round_table().markdown() + "\n" + &tuned.table().markdown();
            let recipe = tuned.recipe.clone().map(Recipe::new);
            Ok((json(&*tuned)?, table, markdown, recipe))
        }
    }
}

/// Measures the perplexity of a model of the Rust runtime.
#[pyfunction]
pub(crate) fn perplexity_of_file(
    py: Python<'_>,
    model: PathBuf,
    text: PathBuf,
    tokens: Option<usize>,
    window: usize,
    stride: usize,
    recipe: Option<PyRef<'_, Recipe>>,
    threads: usize,
    watch: Option<Py<PyAny>>,
) -> PyResult<String> {
    let settings = perplexity::Settings {
        cache: attlas_model::kept::CacheFormat::F32,
        compute: attlas_model::Compute::F32,
        protocol: Protocol::Strided { window, stride },
        bos: false,
        task: None,
        recipe: recipe.map(|r| r.inner.clone()),
        sharing: perplexity::Sharing::Windows,
    };
    let mut watch = Watch::new(watch);
    let (call, stop, raised) = (&watch.call, &watch.stop, &mut watch.raised);
    let done = py.detach(|| {
        let opened = text::open_model(&model)?;
        let read = Text::read(&text, &opened, tokens)?;
        let progress = &mut |at: Progress<'_>| Watch::step(call, stop, raised, at.done, at.total, at.what);
        perplexity::perplexity(&opened, &read, &settings, &mut Run { threads, seed: 0, progress, stop })
    });
    watch.ended(py, false)?;
    json(&done.map_err(|e| errors::lab(py, e))?)
}
