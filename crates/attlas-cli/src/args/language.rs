//! Commands that run a model.

use super::shared::{AttentionChoice, MethodChoice, ModelChoice, TextChoice, count, positive, share};
use attlas_lab::trace::Elements;
use attlas_lab::tune::{Effort, Shard};
use attlas_model::Compute;
use attlas_model::kept::CacheFormat;
use attlas_model::recipe::Numbers;
use clap::{Args, ValueEnum};
use std::path::PathBuf;

#[derive(Args, Clone, Debug)]
pub(crate) struct ExtractArgs {
    #[command(flatten)]
    pub(crate) model: ModelChoice,
    #[command(flatten)]
    pub(crate) text: TextChoice,
    /// Output file: .safetensors, .npz, or .npy for a single head.
    #[arg(long, short, value_name = "FILE")]
    pub(crate) out: PathBuf,
    /// Layers, such as 0-3,7; all by default.
    #[arg(long, value_name = "L,…")]
    pub(crate) layers: Option<Numbers>,
    /// Query heads, such as 0-2; all by default. Every key head must keep the same number of them.
    #[arg(long, value_name = "H,…")]
    pub(crate) heads: Option<Numbers>,
    /// Also write queries and keys before rotation, as layer{l}.q_pre and layer{l}.k_pre.
    #[arg(long)]
    pub(crate) pre_rope: bool,
    /// Element type in a safetensors file.
    #[arg(long, value_enum, default_value_t = Elements::F32)]
    pub(crate) dtype: Elements,
}

#[derive(Args, Clone, Debug)]
#[command(group = clap::ArgGroup::new("budget").required(true).multiple(true))]
pub(crate) struct TuneArgs {
    #[command(flatten)]
    pub(crate) model: ModelChoice,
    /// The text to tune on; without --check-text its following tokens are the check.
    #[arg(long, value_name = "FILE")]
    pub(crate) text: PathBuf,
    /// Output file of the recipe.
    #[arg(long, short, value_name = "FILE")]
    pub(crate) out: PathBuf,
    /// Largest relative error of a head's output.
    #[arg(long, value_name = "ERROR", value_parser = positive, group = "budget")]
    pub(crate) max_error: Option<f64>,
    /// Largest mean divergence of predictions from exact attention's, in nats.
    #[arg(long, value_name = "NATS", value_parser = positive, group = "budget")]
    pub(crate) max_kl: Option<f64>,
    /// Largest increase of the perplexity, such as 1% or 0.01.
    #[arg(long, value_name = "SHARE", value_parser = share, group = "budget")]
    pub(crate) max_ppl_increase: Option<f64>,
    /// Tokens to tune on, and per window of the check; by default 2048, or half the text.
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) tokens: Option<usize>,
    /// Another text to check on.
    #[arg(long, value_name = "FILE")]
    pub(crate) check_text: Option<PathBuf>,
    /// A third text, for the reported result; by default the tokens after the check, if there are enough.
    #[arg(long, value_name = "FILE")]
    pub(crate) answer_text: Option<PathBuf>,
    /// Tokens to check on; by default the number tuned on.
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) check_tokens: Option<usize>,
    #[command(flatten)]
    pub(crate) methods: MethodChoice,
    /// Calibrations of methods: a file, or the folder that `attlas calibrate` wrote. With it, methods that need
    /// calibration become candidates.
    #[arg(long, value_name = "PATH")]
    pub(crate) calibration: Option<PathBuf>,
    /// Tune on prompts made from the texts whose scored tokens need distant keys: a passage read twice (repeat,
    /// repeat=TOKENS), hidden facts (needle) or a list to look up (lookup).
    #[arg(long, value_name = "TASK")]
    pub(crate) task: Option<attlas_lab::task::Task>,
    /// Use the methods of the prompt for new tokens, too, instead of choosing separate ones.
    #[arg(long)]
    pub(crate) no_decode: bool,
    /// Also draw time against divergence over all budgets: .svg or .pdf.
    #[arg(long, value_name = "FILE")]
    pub(crate) curve: Option<PathBuf>,
    /// Layers that may be changed, such as 0-3,7; all by default.
    #[arg(long, value_name = "L,…")]
    pub(crate) layers: Option<Numbers>,
    /// Extent of the search.
    #[arg(long, value_enum, default_value_t = Effort::Normal)]
    pub(crate) effort: Effort,
    /// File that keeps the measurements; by default the name of the recipe with .jsonl added.
    #[arg(long, value_name = "FILE")]
    pub(crate) state: Option<PathBuf>,
    /// Under mpirun, accept machines whose measured peaks differ by more than 10 %, although times of their key heads
    /// are then not comparable.
    #[arg(long)]
    pub(crate) mixed: bool,
    /// Measure only part I of N, counted from 0, and write no recipe.
    #[arg(long, value_name = "I/N")]
    pub(crate) shard: Option<Shard>,
    /// Also use the measurements in these files.
    #[arg(long, value_delimiter = ',', value_name = "FILE,…")]
    pub(crate) merge: Vec<PathBuf>,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct CalibrateArgs {
    #[command(flatten)]
    pub(crate) model: ModelChoice,
    /// The text to learn from, and then to check on its following tokens; - is standard input.
    #[arg(long, value_name = "FILE")]
    pub(crate) text: PathBuf,
    /// The folder to write: ID.calibration.json for each method, and errors.json with the errors measured.
    #[arg(long, short, value_name = "FOLDER")]
    pub(crate) out: PathBuf,
    #[command(flatten)]
    pub(crate) methods: MethodChoice,
    /// Tokens to learn from; by default 2048, or half the text.
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) tokens: Option<usize>,
    /// Tokens after those to check on; by default the number learnt from.
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) check_tokens: Option<usize>,
    /// Layers, such as 0-3,7; all by default.
    #[arg(long, value_name = "L,…")]
    pub(crate) layers: Option<Numbers>,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct PerplexityArgs {
    #[command(flatten)]
    pub(crate) model: ModelChoice,
    #[command(flatten)]
    pub(crate) text: TextChoice,
    /// Tokens per window; by default 2048, or the model's context if that is shorter. Beyond that context the base of
    /// the rotary positions is increased (NTK-aware scaling).
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) context: Option<usize>,
    /// Tokens from the start of one window to that of the next; by default one window.
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) stride: Option<usize>,
    /// Protocol: the windows and the tokens scored in them.
    #[arg(long, value_enum, default_value_t = ProtocolName::Strided)]
    pub(crate) protocol: ProtocolName,
    /// Make a prompt of --context tokens from the text whose scored tokens need distant keys: a passage read twice
    /// (repeat, repeat=TOKENS), hidden facts (needle) or a list to look up (lookup).
    #[arg(long, value_name = "TASK", conflicts_with_all = ["stride", "protocol"])]
    pub(crate) task: Option<attlas_lab::task::Task>,
    #[command(flatten)]
    pub(crate) attention: AttentionChoice,
    /// Keep finished windows in this file; the same command resumes from it, on any number of processes.
    #[arg(long, value_name = "FILE")]
    pub(crate) state: Option<PathBuf>,
    /// How MPI processes share the work: windows (each window runs on one process) or keys (the tokens of every window,
    /// and their keys in all layers, are divided among all processes). By default keys if there are fewer windows than
    /// processes.
    #[arg(long, value_enum, value_name = "WHAT")]
    pub(crate) spread: Option<SpreadName>,
    /// Element type of cached keys and values: f32, bf16 or q8.
    #[arg(long, default_value = "f32", value_name = "TYPE")]
    pub(crate) cache: CacheFormat,
    /// Rounding of the operands of linear layers: f32 (none), bf16, or int8, 8-bit integers with one scale per 32, as
    /// in llama.cpp. Weights stored as f32, f16 or bf16 have no int8 form and stay f32.
    #[arg(long, default_value_t = Compute::F32, value_name = "TYPE")]
    pub(crate) compute: Compute,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum SpreadName {
    Windows,
    Keys,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ProtocolName {
    Strided,
    Llamacpp,
    Windows,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct GenerateArgs {
    #[command(flatten)]
    pub(crate) model: ModelChoice,
    /// The text to continue.
    #[arg(long, short, value_name = "TEXT", required_unless_present = "prompt_file")]
    pub(crate) prompt: Option<String>,
    /// A file with the text to continue; - is standard input.
    #[arg(long, value_name = "FILE", conflicts_with = "prompt")]
    pub(crate) prompt_file: Option<PathBuf>,
    /// Treat the prompt as a message: use the model's chat template.
    #[arg(long)]
    pub(crate) chat: bool,
    /// System message, before the user's.
    #[arg(long, value_name = "TEXT", requires = "chat")]
    pub(crate) system: Option<String>,
    /// Generate at most this many tokens.
    #[arg(long, short = 'n', default_value_t = 128, value_name = "N")]
    pub(crate) max_tokens: usize,
    /// Context length in tokens; by default the model's own. Beyond that the base of the rotary positions is increased
    /// (NTK-aware scaling), which costs some accuracy.
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) context: Option<usize>,
    /// Divisor of the logits; 0 always takes the likeliest token.
    #[arg(long, default_value_t = 0.0, value_name = "T")]
    pub(crate) temperature: f64,
    /// Choose among at most this many of the likeliest tokens.
    #[arg(long, value_name = "N")]
    pub(crate) top_k: Option<usize>,
    /// Choose among the likeliest tokens that together have this probability.
    #[arg(long, value_name = "P")]
    pub(crate) top_p: Option<f64>,
    /// Stop before this text; may be repeated.
    #[arg(long, value_name = "TEXT")]
    pub(crate) stop: Vec<String>,
    /// Continue after an end-of-text token.
    #[arg(long)]
    pub(crate) ignore_eos: bool,
    #[command(flatten)]
    pub(crate) attention: AttentionChoice,
    /// Element type of cached keys and values: f32, bf16 or q8. `attlas perplexity --cache` measures the loss.
    #[arg(long, default_value = "bf16", value_name = "TYPE")]
    pub(crate) cache: CacheFormat,
    /// Rounding of the operands of linear layers: f32 (none), bf16, or int8, 8-bit integers with one scale per 32, as
    /// in llama.cpp, and blocks with outliers rounded twice. `attlas perplexity --compute` measures the loss. Weights stored as
    /// f32, f16 or bf16 have no int8 form and stay f32.
    #[arg(long, default_value_t = Compute::Int8, value_name = "TYPE")]
    pub(crate) compute: Compute,
}
