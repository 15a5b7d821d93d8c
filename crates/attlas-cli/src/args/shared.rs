//! Groups of arguments that several commands take, and parsers of numbers.

use super::Common;
use attlas::{Mask, diagnostics};
use attlas_lab::Source;
use attlas_lab::device::{Gpu, GpuSetup};
use attlas_lab::select::Choice;
use attlas_lab::text::Attention;
use attlas_lab::words::parse_count;
use attlas_model::recipe::Numbers;
use clap::{Args, ValueEnum};
use std::path::PathBuf;

/// Source of queries, keys and values.
#[derive(Args, Clone, Debug)]
pub(crate) struct Inputs {
    /// Inputs: demo (embedded, from a real model reading a text); synthetic:KIND,n=…,d=…,heads=…, kv_heads=…,seed=…
    /// with KIND gaussian, clustered, heavy_hitters, low_rank, smooth or needle; a trace (.safetensors, .npz, .npy);
    /// q.npy,k.npy,v.npy; or a model (.gguf or a folder) with --text.
    #[arg(value_name = "SOURCE", default_value_t = Source::default())]
    pub(crate) source: Source,
    /// Layers of a trace or model, such as 0-3,7; all by default.
    #[arg(long, value_name = "L,…")]
    pub(crate) layers: Option<Numbers>,
    /// The text that a model reads; - is standard input.
    #[arg(long, value_name = "FILE")]
    pub(crate) text: Option<PathBuf>,
    /// Number of tokens to read from it.
    #[arg(long, default_value = "2048", value_name = "N", value_parser = count, requires = "text")]
    pub(crate) tokens: usize,
    /// Make a prompt of --tokens tokens from the text whose last rows need distant keys: a passage read twice (repeat,
    /// repeat=TOKENS), hidden facts (needle) or a list to look up (lookup). Errors are then those of these rows.
    #[arg(long, value_name = "TASK", requires = "text")]
    pub(crate) task: Option<attlas_lab::task::Task>,
}

/// Choice of the mask.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct MaskChoice {
    /// Use a causal mask; by default the source decides (traces are causal, synthetic inputs are not).
    #[arg(long, conflicts_with = "no_mask")]
    causal: bool,
    /// Use no mask.
    #[arg(long)]
    no_mask: bool,
}

impl MaskChoice {
    /// Returns the mask, or `None` if the source decides.
    pub(crate) fn mask(self) -> Option<Mask> {
        match (self.causal, self.no_mask) {
            (true, _) => Some(Mask::Causal),
            (_, true) => Some(Mask::None),
            _ => None,
        }
    }
}

/// Extent of the spectra computed.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct SpectraSize {
    /// Longest sequence for which all singular values are computed, from a dense matrix; for longer ones only the
    /// leading values, without storing a matrix.
    #[arg(long, default_value = "1024", value_name = "N", value_parser = count)]
    max_n: usize,
    /// Number of singular values computed above that length.
    #[arg(long, default_value = "128", value_name = "N", value_parser = count)]
    rank: usize,
}

impl SpectraSize {
    pub(crate) fn figures(self, common: &Common) -> diagnostics::Settings {
        diagnostics::Settings {
            dense_limit: self.max_n,
            rank: self.rank,
            seed: common.seed,
            ..diagnostics::Settings::default()
        }
    }
}

/// Pictures beside the table.
#[derive(Args, Clone, Debug)]
pub(crate) struct Pictures {
    /// Also write a self-contained page with the table and the figures.
    #[arg(long, value_name = "FILE")]
    pub(crate) html: Option<PathBuf>,
    /// Also write the figures as a picture: SVG, or PDF if the name ends in .pdf.
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,
}

/// A pretrained model.
#[derive(Args, Clone, Debug)]
pub(crate) struct ModelChoice {
    /// A GGUF file, or a folder with config.json, safetensors and tokenizer.json.
    #[arg(id = "model", value_name = "MODEL")]
    pub(crate) path: PathBuf,
}

/// A folder that does not exist yet.
#[derive(Args, Clone, Debug)]
pub(crate) struct NewFolder {
    /// The folder to write, or the file if its name ends in .gguf; it must not exist yet.
    #[arg(id = "out", long = "out", short = 'o', value_name = "PLACE")]
    pub(crate) path: PathBuf,
}

/// Largest loss of a changed model.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct Limit {
    /// Largest increase of the perplexity, such as 50% or 0.5; beyond it the folder is still written, but the command
    /// exits with 1.
    #[arg(long, default_value = "50%", value_name = "SHARE", value_parser = share)]
    pub(crate) max_ppl_increase: f64,
}

/// A text that a model reads.
#[derive(Args, Clone, Debug)]
pub(crate) struct TextChoice {
    /// The text to read; - is standard input.
    #[arg(id = "text", long = "text", value_name = "FILE")]
    pub(crate) path: PathBuf,
    /// Read at most this many tokens.
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) tokens: Option<usize>,
    /// Begin every window with the model's beginning-of-text token.
    #[arg(long)]
    pub(crate) bos: bool,
}

/// Choice of attention in a model.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct AttentionChoice {
    /// Recipe that assigns methods to heads: a TOML file.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["method", "set"])]
    pub(crate) recipe: Option<PathBuf>,
    /// One method for all heads, by id; exact attention by default.
    #[arg(long, value_name = "ID")]
    pub(crate) method: Option<String>,
    /// Set a parameter of that method; may be repeated.
    #[arg(long, value_name = "PARAM=VALUE")]
    pub(crate) set: Vec<String>,
    /// Keys that every query attends to exactly, beside that method: sinks, window, heavy, …, such as
    /// sinks=4,window=128.
    #[arg(long, value_delimiter = ',', value_name = "NAME=VALUE,…", requires = "method")]
    pub(crate) near: Vec<String>,
    /// Calibrations of methods: a file, or the folder that `attlas calibrate` wrote.
    #[arg(long, value_name = "PATH")]
    pub(crate) calibration: Option<PathBuf>,
}

impl AttentionChoice {
    pub(crate) fn attention(&self) -> Attention {
        let set = self.set.iter().cloned().chain(near_settings(&self.near)).collect();
        Attention {
            recipe: self.recipe.clone(),
            method: self.method.clone(),
            set,
            calibration: self.calibration.clone(),
        }
    }
}

/// Turns `sinks=4` into the setting `near.sinks=4`.
fn near_settings(near: &[String]) -> impl Iterator<Item = String> + '_ {
    near.iter().map(|setting| format!("near.{setting}"))
}

/// Choice of methods and their settings.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct MethodChoice {
    /// Methods by id, or `all`; by default all but exact attention and oracles.
    #[arg(long, value_delimiter = ',', value_name = "ID,…")]
    pub(crate) methods: Vec<String>,
    /// Only this family: exact, clustering, low_rank or kernel.
    #[arg(long, value_name = "NAME")]
    pub(crate) family: Option<String>,
    /// Set a parameter of a method; may be repeated.
    #[arg(long, value_name = "ID.PARAM=VALUE")]
    pub(crate) set: Vec<String>,
    /// Keys that every query attends to exactly, beside all of these methods: sinks, window, heavy, …, such as
    /// sinks=4,window=128.
    #[arg(long, value_delimiter = ',', value_name = "NAME=VALUE,…")]
    pub(crate) near: Vec<String>,
}

impl MethodChoice {
    pub(crate) fn choice(&self) -> Choice {
        let set = self.set.iter().cloned().chain(near_settings(&self.near)).collect();
        Choice { methods: self.methods.clone(), family: self.family.clone(), set }
    }
}

/// Where methods run.
#[derive(Args, Clone, Debug)]
pub(crate) struct DeviceChoice {
    /// Device of the methods: cpu, or cuda for the first NVIDIA GPU (bench times it in bf16).
    #[arg(long, value_enum, default_value_t = DeviceName::Cpu, value_name = "NAME")]
    pub(crate) device: DeviceName,
    /// NVRTC for --device cuda: the library or its folder; by default it is found by name.
    #[arg(long, value_name = "PATH")]
    pub(crate) nvrtc: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum DeviceName {
    /// This machine's processor.
    Cpu,
    /// The first NVIDIA GPU.
    Cuda,
}

impl DeviceChoice {
    /// Opens the GPU, if one is chosen.
    pub(crate) fn open(&self) -> attlas_lab::Result<Option<Gpu>> {
        if self.device == DeviceName::Cpu {
            return Ok(None);
        }
        let home = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
        let home = home.or_else(|| std::env::var_os("HOME").map(|h| PathBuf::from(h).join(".cache")));
        let setup =
            GpuSetup { cache: home.map(|h| h.join("attlas").join("cubin")), nvrtc: self.nvrtc.clone() };
        Gpu::open(&setup).map(Some)
    }
}

pub(super) fn positive(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(x) if x.is_finite() && x > 0.0 => Ok(x),
        _ => Err("expected a positive number".into()),
    }
}

/// Parses a share, as a number or in percent.
pub(super) fn share(text: &str) -> Result<f64, String> {
    match text.strip_suffix('%') {
        Some(percent) => positive(percent.trim()).map(|x| x / 100.0),
        None => positive(text),
    }
    .map_err(|_| "expected a positive share such as 1% or 0.01".into())
}

pub(super) fn count(text: &str) -> Result<usize, String> {
    match parse_count(text) {
        Some(n) if n > 0 => Ok(n),
        _ => Err("expected a positive whole number such as 4096 or 4k".into()),
    }
}
