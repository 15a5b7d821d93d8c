//! What can be said on the command line.

use attlas_lab::Source;
use attlas_lab::select::Choice;
use attlas_lab::source::parse_count;
use clap::{Args, Parser, Subcommand};
use std::path::PathBuf;

/// An atlas of fast attention: methods of all families, measured side by side.
#[derive(Debug, Parser)]
#[command(
    name = "attlas",
    version,
    max_term_width = 100,
    after_help = "Without a command, `compare` runs on the default source for at most 20 seconds.\n\n\
Examples:\n  \
attlas                                     see how methods compare\n  \
attlas methods hyper                       everything about one method\n  \
attlas compare synthetic:needle,n=4k       on other inputs\n  \
attlas bench --methods sink_window --n 1k,4k,16k --causal\n\n\
Results go to standard output, progress and notes to standard error.\n\
Exit status: 0 done, 1 over the stated budget, 2 error, 130 interrupted."
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
    #[command(flatten)]
    pub(crate) common: Common,
}

/// Flags of every command.
#[derive(Args, Clone, Debug)]
pub(crate) struct Common {
    /// Print one JSON document (docs/json.md describes every field).
    #[arg(long, global = true, conflicts_with_all = ["csv", "md"])]
    pub(crate) json: bool,
    /// Print comma-separated values with all digits.
    #[arg(long, global = true, conflicts_with = "md")]
    pub(crate) csv: bool,
    /// Print Markdown.
    #[arg(long, global = true, visible_alias = "markdown")]
    pub(crate) md: bool,
    /// Threads; 0 takes as many as the machine offers.
    #[arg(long, global = true, default_value_t = 0, value_name = "N")]
    pub(crate) threads: usize,
    /// First seed of everything random.
    #[arg(long, global = true, default_value_t = 0, value_name = "N")]
    pub(crate) seed: u64,
    /// No progress and no notes on standard error.
    #[arg(long, short, global = true)]
    pub(crate) quiet: bool,
    /// Show progress even where standard error is not a terminal.
    #[arg(long, global = true, conflicts_with = "quiet")]
    pub(crate) progress: bool,
}

#[derive(Debug, Subcommand)]
#[allow(clippy::large_enum_variant)]
pub(crate) enum Command {
    /// List methods, layers and conversions, what each claims, and its parameters.
    #[command(after_help = "Examples:\n  \
attlas methods\n  \
attlas methods top_k\n  \
attlas methods --family kernel --json\n  \
attlas methods --md > docs/methods.md")]
    Methods(MethodsArgs),
    /// Measure errors and times of methods on given inputs, beside exact attention.
    #[command(after_help = "Examples:\n  \
attlas compare\n  \
attlas compare synthetic:heavy_hitters,n=4k,d=128,heads=8,kv_heads=2 --causal\n  \
attlas compare trace.safetensors --methods sink_window,top_k --set top_k.keys=128\n  \
attlas compare q.npy,k.npy,v.npy --family low_rank --seeds 10 --json\n  \
attlas compare --budget 0.05 --html report.html")]
    Compare(CompareArgs),
    /// Measure how times grow with the length, beside what this machine can do.
    #[command(after_help = "Examples:\n  \
attlas bench\n  \
attlas bench --methods sink_window,top_k --n 1k,4k,16k --d 64,128 --causal\n  \
attlas bench --methods exact --n 32k --d 128 --heads 32 --kv-heads 8 --decode\n  \
attlas bench --methods exact --n 1k,4k --peer-json torch.json --md")]
    Bench(BenchArgs),
    /// Small simulations: attention as a system of particles, and a task about triples.
    #[command(after_help = "Examples:\n  \
attlas simulate particles --svg particles.svg\n  \
attlas simulate particles --model sphere --n 32 --d 2 --beta 9 --t-end 50\n  \
attlas simulate match3\n  \
attlas simulate match3 --n 32 --modulus 61 --count 100 --json")]
    Simulate(SimulateArgs),
}

/// Which methods, with which settings.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct MethodChoice {
    /// Methods by id, or `all`; by default all but exact attention and oracles.
    #[arg(long, value_delimiter = ',', value_name = "ID,…")]
    pub(crate) methods: Vec<String>,
    /// One family alone: exact, clustering, low_rank or kernel.
    #[arg(long, value_name = "NAME")]
    pub(crate) family: Option<String>,
    /// Set a parameter of a method; may be repeated.
    #[arg(long, value_name = "ID.PARAM=VALUE")]
    pub(crate) set: Vec<String>,
}

impl MethodChoice {
    pub(crate) fn choice(&self) -> Choice {
        Choice { methods: self.methods.clone(), family: self.family.clone(), set: self.set.clone() }
    }
}

#[derive(Args, Clone, Debug)]
pub(crate) struct MethodsArgs {
    /// Show this method, layer or conversion whole.
    pub(crate) id: Option<String>,
    /// One family alone: exact, clustering, low_rank or kernel.
    #[arg(long, value_name = "NAME", conflicts_with = "id")]
    pub(crate) family: Option<String>,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct CompareArgs {
    /// Inputs: synthetic:KIND,n=…,d=…,heads=…,kv_heads=…,seed=… with KIND gaussian, clustered,
    /// heavy_hitters, low_rank, smooth or needle; a trace (.safetensors, .npz, .npy); or
    /// q.npy,k.npy,v.npy.
    #[arg(value_name = "SOURCE", default_value_t = Source::default())]
    pub(crate) source: Source,
    #[command(flatten)]
    pub(crate) methods: MethodChoice,
    /// Layers of a trace, by number; all by default.
    #[arg(long, value_delimiter = ',', value_name = "L,…")]
    pub(crate) layers: Vec<usize>,
    /// With a causal mask; the source decides by default (traces are causal, synthetic ones not).
    #[arg(long, conflicts_with = "no_mask")]
    pub(crate) causal: bool,
    /// Without a mask.
    #[arg(long)]
    pub(crate) no_mask: bool,
    /// Seeds for methods that draw random numbers.
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) seeds: u32,
    /// Rows of each head on which exact attention certifies the error.
    #[arg(long, default_value_t = 256, value_name = "N")]
    pub(crate) certify_rows: usize,
    /// Begin nothing new after this many seconds.
    #[arg(long, value_name = "SECONDS", value_parser = positive)]
    pub(crate) time_limit: Option<f64>,
    /// Largest mean relative error accepted: exit with 1 if no method stays within it.
    #[arg(long, value_name = "ERROR", value_parser = positive)]
    pub(crate) budget: Option<f64>,
    /// One line for each head instead of one for each method.
    #[arg(long)]
    pub(crate) each_head: bool,
    /// Use what methods learnt before, from a file of calibrations, instead of learning from the inputs.
    #[arg(long, value_name = "FILE")]
    pub(crate) calibration: Option<PathBuf>,
    /// Also write what methods learnt to a file of calibrations.
    #[arg(long, value_name = "FILE")]
    pub(crate) save_calibration: Option<PathBuf>,
    /// Also write a self-contained page with the table and a plot of error against time.
    #[arg(long, value_name = "FILE")]
    pub(crate) html: Option<PathBuf>,
    /// Also write the plot of error against time as a picture.
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct BenchArgs {
    #[command(flatten)]
    pub(crate) methods: MethodChoice,
    /// Lengths; k stands for 1024.
    #[arg(long, value_delimiter = ',', default_value = "1k,2k,4k,8k", value_name = "N,…", value_parser = count)]
    pub(crate) n: Vec<usize>,
    /// Widths of heads.
    #[arg(long, value_delimiter = ',', default_value = "64", value_name = "D,…", value_parser = count)]
    pub(crate) d: Vec<usize>,
    /// Query heads.
    #[arg(long, default_value = "1", value_name = "N", value_parser = count)]
    pub(crate) heads: usize,
    /// Key heads; as many as query heads by default.
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) kv_heads: Option<usize>,
    /// With a causal mask.
    #[arg(long)]
    pub(crate) causal: bool,
    /// One new token at a time over a cache of N.
    #[arg(long)]
    pub(crate) decode: bool,
    /// Timed runs of each method at each length.
    #[arg(long, default_value_t = 7, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) runs: u32,
    /// Skip a length at which one run is expected to take longer.
    #[arg(long, default_value_t = 60.0, value_name = "SECONDS", value_parser = positive)]
    pub(crate) max_seconds: f64,
    /// Figures measured by another program, merged where the shapes agree (docs/json.md).
    #[arg(long, value_name = "FILE")]
    pub(crate) peer_json: Option<PathBuf>,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct SimulateArgs {
    #[command(subcommand)]
    pub(crate) what: Simulation,
}

#[derive(Clone, Debug, Subcommand)]
pub(crate) enum Simulation {
    /// Tokens as particles that attend to each other while depth goes by: clusters emerge, and the
    /// attention matrix tends to zeros and ones of low rank.
    #[command(after_help = "Examples:\n  \
attlas simulate particles --seed 3 --svg particles.svg\n  \
attlas simulate particles --model rescaled --n 40 --d 80 --t-end 11\n  \
attlas simulate particles --model sphere --causal --t-end 30 --json")]
    Particles(ParticlesArgs),
    /// Which tokens have two partners that complete their sum to zero: one head of third-order
    /// attention knows, one of ordinary attention cannot.
    #[command(after_help = "Examples:\n  \
attlas simulate match3\n  \
attlas simulate match3 --task match2\n  \
attlas simulate match3 --n 32 --modulus 61 --count 100 --single --json")]
    Match3(MatchArgs),
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub(crate) enum ModelName {
    /// In space, growing.
    Free,
    /// In space, in the frame that grows with the particles.
    Rescaled,
    /// On the unit sphere.
    Sphere,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct ParticlesArgs {
    /// Where particles live.
    #[arg(long, value_enum, default_value_t = ModelName::Rescaled)]
    pub(crate) model: ModelName,
    /// Particles; 20, or 64 on the sphere, by default.
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) n: Option<usize>,
    /// Dimensions; 2, or 3 on the sphere, by default.
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) d: Option<usize>,
    /// Sharpness of attention on the sphere.
    #[arg(long, default_value_t = 1.0, value_name = "X", value_parser = positive)]
    pub(crate) beta: f64,
    /// A particle sees those before it only.
    #[arg(long)]
    pub(crate) causal: bool,
    /// How long; 6, 15 on the sphere, 2 for the free system, by default.
    #[arg(long, value_name = "T", value_parser = positive)]
    pub(crate) t_end: Option<f64>,
    /// Length of a step.
    #[arg(long, default_value_t = 0.05, value_name = "T", value_parser = positive)]
    pub(crate) dt: f64,
    /// First-order steps instead of fourth-order ones.
    #[arg(long)]
    pub(crate) euler: bool,
    /// Halve the step until the end moves by less than 0.0001.
    #[arg(long)]
    pub(crate) refine: bool,
    /// Also write the paths as a picture.
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub(crate) enum TaskName {
    /// One partner.
    Match2,
    /// Two partners.
    Match3,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct MatchArgs {
    /// Tokens of a sequence.
    #[arg(long, default_value = "16", value_name = "N", value_parser = count)]
    pub(crate) n: usize,
    /// The modulus; by default about half the tokens have a match.
    #[arg(long, value_name = "M")]
    pub(crate) modulus: Option<u64>,
    /// Sequences.
    #[arg(long, default_value = "500", value_name = "N", value_parser = count)]
    pub(crate) count: usize,
    /// How many partners complete a sum.
    #[arg(long, value_enum, default_value_t = TaskName::Match3)]
    pub(crate) task: TaskName,
    /// Single instead of double precision.
    #[arg(long)]
    pub(crate) single: bool,
}

fn positive(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(x) if x.is_finite() && x > 0.0 => Ok(x),
        _ => Err("expected a positive number".into()),
    }
}

fn count(text: &str) -> Result<usize, String> {
    match parse_count(text) {
        Some(n) if n > 0 => Ok(n),
        _ => Err("expected a positive whole number such as 4096 or 4k".into()),
    }
}
