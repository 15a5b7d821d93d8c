//! Commands that look at attention and measure methods.

use super::shared::{DeviceChoice, Inputs, MaskChoice, MethodChoice, Pictures, SpectraSize, count, positive};
use attlas_lab::budget::Budget;
use attlas_lab::survey::Figure;
use attlas_model::recipe::Numbers;
use attlas_mpi::cluster::Cluster;
use clap::{Args, ValueEnum};
use std::path::PathBuf;

#[derive(Args, Clone, Debug)]
pub(crate) struct MethodsArgs {
    /// Show this method, layer or conversion in full.
    pub(crate) id: Option<String>,
    /// Only this family: exact, clustering, low_rank or kernel.
    #[arg(long, value_name = "NAME", conflicts_with = "id")]
    pub(crate) family: Option<String>,
    /// Write a picture of all methods, layers and conversions by family: SVG, or PDF if the name ends in .pdf.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["id", "family"])]
    pub(crate) svg: Option<std::path::PathBuf>,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct InspectArgs {
    #[command(flatten)]
    pub(crate) inputs: Inputs,
    /// Query heads, such as 0-2; all by default. Heads with non-finite numbers are named and left out.
    #[arg(long, value_name = "H,…")]
    pub(crate) heads: Option<Numbers>,
    #[command(flatten)]
    pub(crate) mask: MaskChoice,
    #[command(flatten)]
    pub(crate) spectra: SpectraSize,
    #[command(flatten)]
    pub(crate) pictures: Pictures,
    /// Contents of --svg: all of each head, or one of the survey's figures over layers.
    #[arg(long, value_enum, default_value_t = Figure::Heads, requires = "svg")]
    pub(crate) figure: Figure,
    /// Draw the weights of each head before and after sorting queries and keys by hash codes, instead of the other
    /// figures.
    #[arg(long, value_enum, value_name = "METHOD", requires = "svg", conflicts_with = "html")]
    pub(crate) reorder: Option<ReorderName>,
    /// Tokens per diagonal block, for --reorder.
    #[arg(long, default_value = "256", value_name = "N", value_parser = count, requires = "reorder")]
    pub(crate) block: usize,
    /// Keep finished heads in this file; the same command resumes from it, on any number of processes.
    #[arg(long, value_name = "FILE")]
    pub(crate) state: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ReorderName {
    /// Signs of random projections, sorted by Gray rank.
    Hyper,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct CompareArgs {
    #[command(flatten)]
    pub(crate) inputs: Inputs,
    #[command(flatten)]
    pub(crate) methods: MethodChoice,
    #[command(flatten)]
    pub(crate) device: DeviceChoice,
    /// Query heads of the model, such as 0-2; all by default.
    #[arg(long, value_name = "H,…")]
    pub(crate) heads: Option<Numbers>,
    #[command(flatten)]
    pub(crate) mask: MaskChoice,
    /// Seeds for methods that draw random numbers.
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) seeds: u32,
    /// Start no new measurement after this many seconds.
    #[arg(long, value_name = "SECONDS", value_parser = positive)]
    pub(crate) time_limit: Option<f64>,
    /// Give every method the same budget: keys=N (scores per query), time=P% (of exact attention's time) or memory=SIZE
    /// (beyond inputs and output, such as 8M).
    #[arg(long = "match", value_name = "WHAT=AMOUNT")]
    pub(crate) matched: Option<Budget>,
    /// Also measure every method over a range of score counts, as published and with a near field.
    #[arg(long, conflicts_with = "matched")]
    pub(crate) curves: bool,
    /// Largest mean relative error accepted: exit with 1 if no method stays within it.
    #[arg(long, value_name = "ERROR", value_parser = positive)]
    pub(crate) budget: Option<f64>,
    /// Print one line per head instead of one per method.
    #[arg(long)]
    pub(crate) each_head: bool,
    /// Use the calibrations in this file instead of learning from the inputs.
    #[arg(long, value_name = "FILE")]
    pub(crate) calibration: Option<PathBuf>,
    /// Also write what methods learn to this file of calibrations.
    #[arg(long, value_name = "FILE")]
    pub(crate) save_calibration: Option<PathBuf>,
    /// Keep finished key heads in this file; the same command resumes from it, on any number of processes.
    #[arg(long, value_name = "FILE")]
    pub(crate) state: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) pictures: Pictures,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct ReportArgs {
    #[command(flatten)]
    pub(crate) inputs: Inputs,
    /// Output file of the page.
    #[arg(long, short, value_name = "FILE")]
    pub(crate) out: PathBuf,
    /// Also show this recipe.
    #[arg(long, value_name = "FILE")]
    pub(crate) recipe: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) methods: MethodChoice,
    /// Seeds for methods that draw random numbers.
    #[arg(long, default_value_t = 3, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) seeds: u32,
    /// Start no new comparison after this many seconds of comparing.
    #[arg(long, value_name = "SECONDS", value_parser = positive)]
    pub(crate) time_limit: Option<f64>,
    #[command(flatten)]
    pub(crate) spectra: SpectraSize,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct BenchArgs {
    #[command(flatten)]
    pub(crate) methods: MethodChoice,
    #[command(flatten)]
    pub(crate) device: DeviceChoice,
    /// Sequence lengths; k stands for 1024.
    #[arg(long, value_delimiter = ',', default_value = "1k,2k,4k,8k", value_name = "N,…", value_parser = count)]
    pub(crate) n: Vec<usize>,
    /// Head widths.
    #[arg(long, value_delimiter = ',', default_value = "64", value_name = "D,…", value_parser = count)]
    pub(crate) d: Vec<usize>,
    /// Query heads.
    #[arg(long, default_value = "1", value_name = "N", value_parser = count)]
    pub(crate) heads: usize,
    /// Key heads; by default one for each query head.
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) kv_heads: Option<usize>,
    /// Use a causal mask.
    #[arg(long)]
    pub(crate) causal: bool,
    /// Time one new token at a time over a cache of N tokens.
    #[arg(long)]
    pub(crate) decode: bool,
    /// Timed runs of each method at each length.
    #[arg(long, default_value_t = 7, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) runs: u32,
    /// Skip a length if one run is expected to take longer than this.
    #[arg(long, default_value_t = 60.0, value_name = "SECONDS", value_parser = positive)]
    pub(crate) max_seconds: f64,
    /// Form in which keys and values travel between MPI processes: unchanged, or rounded to bf16.
    #[arg(long, value_enum, default_value_t = WireName::Full)]
    pub(crate) wire: WireName,
    /// Predict times on a cluster instead, from this machine's rates: nodes=N,gbps=G,us=U; may be repeated.
    #[arg(long, value_name = "nodes=N,gbps=G,us=U", conflicts_with_all = ["decode", "peer_json"])]
    pub(crate) cluster: Vec<Cluster>,
    /// Add figures measured by another program where the shapes agree (docs/json.md).
    #[arg(long, value_name = "FILE")]
    pub(crate) peer_json: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum WireName {
    /// Unchanged.
    Full,
    /// Rounded to 8 significant bits.
    Bf16,
}
