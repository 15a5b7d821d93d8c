//! Heads of a model reading a text, cached as traces.

use crate::Outcome;
use attlas::{Mask, Out, Plan, Qkv, RunInfo, TensorMut, Workspace};
use attlas_lab::extract::{Settings, extract};
use attlas_lab::text::Text;
use attlas_lab::trace;
use attlas_lab::workload::{LayerData, Workload};
use attlas_model::Model;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Tokens that the model was trained on.
const TRAINED: usize = 8192;

/// Paths of model, texts and traces.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) model: PathBuf,
    /// The texts, read in order.
    pub(crate) texts: Vec<PathBuf>,
    /// Another text, for methods that need calibration.
    pub(crate) calibration: PathBuf,
    pub(crate) traces: PathBuf,
}

impl Default for Place {
    fn default() -> Self {
        Self {
            model: ".models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf".into(),
            texts: vec![".models/lee/lee_background.cor".into()],
            calibration: "data/alice29.txt".into(),
            traces: "target/real-heads".into(),
        }
    }
}

impl Place {
    /// Returns layers of the model at the first `n` tokens of the texts.
    pub(crate) fn heads(&self, n: usize, layers: &[usize]) -> Outcome<Workload> {
        self.load(&self.texts, n, layers)
    }

    /// Returns layers of the model on the calibration text.
    pub(crate) fn to_learn_from(&self, n: usize, layers: &[usize]) -> Outcome<Workload> {
        self.load(std::slice::from_ref(&self.calibration), n, layers)
    }

    fn load(&self, texts: &[PathBuf], n: usize, layers: &[usize]) -> Outcome<Workload> {
        let stem = |p: &PathBuf| p.file_stem().map_or(String::new(), |s| s.to_string_lossy().into_owned());
        let stems: Vec<String> = texts.iter().map(stem).collect();
        let numbers: Vec<String> = layers.iter().map(usize::to_string).collect();
        let name = format!("{}-{n}-layers{}.safetensors", stems.join("+"), numbers.join("_"));
        let path = self.traces.join(name);
        if path.is_file() {
            return Ok(trace::read(&[path])?);
        }
        std::fs::create_dir_all(&self.traces)?;
        let mut model = Model::open(&self.model)?;
        if let Some(rope) = model.config.rope.as_mut().filter(|_| n > TRAINED) {
            let (stretch, dim) = (n as f64 / TRAINED as f64, rope.dim as f64);
            rope.base *= stretch.powf(dim / (dim - 2.0));
            model.config.max_positions = n;
        }
        let model = Arc::new(model);
        let mut text = Text::read(first(texts)?, &model, None)?;
        for more in &texts[1..] {
            text.tokens.extend(Text::read(more, &model, None)?.tokens);
        }
        if text.tokens.len() < n {
            return Err(format!("{n} tokens are needed, the texts have {}", text.tokens.len()).into());
        }
        text.tokens.truncate(n);
        let settings = Settings { layers: Some(layers.iter().copied().collect()), ..Settings::default() };
        let mut shown = 0;
        let mut progress = |done: usize, all: usize| {
            let tenth = 10 * done / all.max(1);
            if tenth > shown {
                shown = tenth;
                eprintln!("reading {n} tokens: {} %", 10 * tenth);
            }
        };
        let workload = extract(&model, &text, &settings, &mut progress, &AtomicBool::new(false))?.workload;
        trace::write(&workload, &path)?;
        Ok(workload)
    }
}

fn first(texts: &[PathBuf]) -> Outcome<&Path> {
    Ok(texts.first().ok_or("--text names no file")?)
}

/// Runs a plan for one key head and the query heads that share it; returns `[heads, n, d_v]` rows.
pub(crate) fn run(plan: &dyn Plan, x: Qkv<'_, f32>, ws: &mut Workspace) -> Outcome<(Vec<f32>, RunInfo)> {
    let p = plan.problem();
    let dims = [1, p.n_heads, p.n_q, p.d_v];
    let mut rows = vec![0.0f32; dims.iter().product()];
    let out = Out::new(TensorMut::bhnd(&mut rows, dims)?);
    let info = plan.execute(&x.into(), &mut out.into(), ws)?;
    Ok((rows, info))
}

/// Returns the relative Frobenius error of each head.
pub(crate) fn head_errors(got: &[f32], exact: &[f32], heads: usize) -> Vec<f64> {
    let size = exact.len() / heads;
    let error = |(a, b): (&[f32], &[f32])| {
        let square = |x: f64| x * x;
        let gap: f64 = a.iter().zip(b).map(|(a, b)| square(f64::from(a - b))).sum();
        (gap / b.iter().map(|b| square(f64::from(*b))).sum::<f64>()).sqrt()
    };
    got.chunks_exact(size).zip(exact.chunks_exact(size)).map(error).collect()
}

/// Repeats the tokens `times` times.
pub(crate) fn repeat(workload: &mut Workload, times: usize) {
    for layer in &mut workload.layers {
        let p = layer.problem;
        for (x, size) in
            [(&mut layer.q, p.n_q * p.d), (&mut layer.k, p.n_k * p.d), (&mut layer.v, p.n_k * p.d_v)]
        {
            *x = x.chunks_exact(size).flat_map(|head| head.repeat(times)).collect();
        }
        layer.problem = p.with_lens(times * p.n_q, times * p.n_k);
    }
}

/// Returns the key heads of all layers.
pub(crate) fn groups(workload: &Workload) -> impl Iterator<Item = (usize, &LayerData, usize)> {
    let layers = workload.layers.iter().enumerate();
    layers.flat_map(|(i, layer)| (0..layer.problem.n_kv_heads).map(move |g| (i, layer, g)))
}

/// The mask of every table.
pub(crate) const MASK: Mask = Mask::Causal;
