//! What can be said on the command line.

use attlas::conversions::mla::Stage;
use attlas::{Mask, diagnostics};
use attlas_lab::Source;
use attlas_lab::budget::Budget;
use attlas_lab::select::Choice;
use attlas_lab::source::parse_count;
use attlas_lab::text::Attention;
use attlas_lab::tune::Shard;
use attlas_model::recipe::Numbers;
use clap::{Args, Parser, Subcommand, ValueEnum};
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
attlas inspect --html inside.html          what real heads look like\n  \
attlas bench --methods sink_window --n 1k,4k,16k --causal\n  \
attlas perplexity model.gguf --text book.txt --method sink_window\n  \
attlas tune model.gguf --text book.txt --max-ppl-increase 1% --out recipe.toml\n  \
attlas compress model.gguf --with svd --rank 384 --matrices ffn --text book.txt --out smaller\n  \
attlas convert model.gguf --to mla --text book.txt --out converted\n  \
attlas generate model.gguf --prompt \"The capital of France is\"\n\n\
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
    /// Look inside heads: sparsity patterns, attention sinks, singular values, ranks, entropy.
    #[command(after_help = "Examples:\n  \
attlas inspect\n  \
attlas inspect trace.safetensors --layers 0-3 --heads 0 --html inside.html\n  \
attlas inspect model.gguf --text book.txt --tokens 2048 --layers 5,20 --svg heads.svg\n  \
attlas inspect model.gguf --text book.txt --layers 5,20 --svg spectra.svg --figure scores\n  \
attlas inspect synthetic:low_rank,n=8k --rank 128 --json")]
    Inspect(InspectArgs),
    /// Measure errors and times of methods on given inputs, beside exact attention.
    #[command(after_help = "Examples:\n  \
attlas compare\n  \
attlas compare synthetic:heavy_hitters,n=4k,d=128,heads=8,kv_heads=2 --causal\n  \
attlas compare model.gguf --text book.txt --layers 5,20\n  \
attlas compare trace.safetensors --methods sink_window,top_k --set top_k.keys=128\n  \
attlas compare q.npy,k.npy,v.npy --family low_rank --seeds 10 --json\n  \
attlas compare --match keys=256 --methods hyper,reformer,sink_window\n  \
attlas compare --budget 0.05 --html report.html")]
    Compare(CompareArgs),
    /// Write one page about a model's attention: structure, spectra, methods, recipe; no network needed.
    #[command(after_help = "Examples:\n  \
attlas report --out report.html\n  \
attlas report model.gguf --text book.txt --layers 5,20 --recipe recipe.toml --out report.html\n  \
attlas report trace.safetensors --methods sink_window,hyper --time-limit 60 --out report.html")]
    Report(ReportArgs),
    /// Measure how times grow with the length, beside what this machine can do.
    #[command(after_help = "Examples:\n  \
attlas bench\n  \
attlas bench --methods sink_window,top_k --n 1k,4k,16k --d 64,128 --causal\n  \
attlas bench --methods exact --n 32k --d 128 --heads 32 --kv-heads 8 --decode\n  \
attlas bench --methods exact --n 1k,4k --peer-json torch.json --md\n  \
attlas bench --suite headline --md > headline.md")]
    Bench(BenchArgs),
    /// Small simulations: attention as a system of particles, and a task about triples.
    #[command(after_help = "Examples:\n  \
attlas simulate particles --svg particles.svg\n  \
attlas simulate particles --model sphere --n 32 --d 2 --beta 9 --t-end 50\n  \
attlas simulate match3\n  \
attlas simulate match3 --n 32 --modulus 61 --count 100 --json")]
    Simulate(SimulateArgs),
    /// Write the queries, keys and values of a model reading a text.
    #[command(after_help = "Examples:\n  \
attlas extract model.gguf --text book.txt --tokens 2048 --out trace.safetensors\n  \
attlas extract ./Llama-3.2-1B --text - --layers 0-3,15 --pre-rope --out trace.npz < book.txt\n  \
attlas extract model.gguf --text book.txt --layers 5 --heads 0 --out head.npy\n  \
attlas compare trace.safetensors")]
    Extract(ExtractArgs),
    /// Choose a method for every head of a model within an error budget, and write the recipe.
    #[command(after_help = "Examples:\n  \
attlas tune model.gguf --text book.txt --max-error 0.02 --out recipe.toml\n  \
attlas tune model.gguf --text book.txt --tokens 8192 --max-ppl-increase 1% --effort quick --out recipe.toml\n  \
attlas tune model.gguf --text book.txt --max-kl 0.01 --methods sink_window,hyper --out recipe.toml\n  \
attlas tune model.gguf --text book.txt --max-kl 0.01 --out recipe.toml --state part0.jsonl --shard 0/4\n  \
attlas tune model.gguf --text book.txt --max-kl 0.01 --out recipe.toml --merge part0.jsonl,part1.jsonl\n  \
attlas perplexity model.gguf --text other.txt --recipe recipe.toml\n\n\
The cheapest method by measured time whose error on the text stays within the target; then the model is\n\
checked on text that was not used, and the target halved until the budget holds. Measurements are kept:\n\
the same command goes on where it was interrupted.")]
    Tune(TuneArgs),
    /// Put a model's matrices into factored form, measure what that costs, and write a checkpoint.
    #[command(after_help = "Examples:\n  \
attlas compress model.gguf --with svd --rank 384 --matrices ffn --text book.txt --out smaller\n  \
attlas compress model.gguf --with svd --max-weight-error 0.1 --text book.txt --out smaller\n  \
attlas compress model.gguf --with tucker --rank 256 --set layer_rank=48 --text book.txt --out smaller\n  \
attlas compress model.gguf --with trawl --rank 400 --layers 28,29 --set keep_factors=true --text book.txt --out smaller\n  \
attlas compress model.gguf --with tensor_product --rank 2 --layers 0-3 --text book.txt --out smaller\n  \
attlas compress ./all-MiniLM-L6-v2 --with collaborative --rank 192 --text book.txt --out smaller\n  \
attlas generate smaller --prompt \"The capital of France is\"\n\n\
Conversions: svd (every matrix on its own), shared_factor and tucker (bases that all layers share), trawl\n\
(a few layers, by default the last), tensor_product (a cache of key and value factors), collaborative (heads\n\
that share queries and keys; not with rotary positions). `attlas methods ID` shows their parameters.\n\
The folder is written, opened again and run on its factors; perplexity, divergence, parameters, bytes,\n\
operations and times of both models are printed. Trained weights are not low rank: without training\n\
afterwards most settings lose much. Nothing is overwritten. docs/compress.md describes the format.")]
    Compress(CompressArgs),
    /// Turn a model's attention into another kind, measure what each step costs, and write a checkpoint.
    #[command(after_help = "Examples:\n  \
attlas convert model.gguf --to mla --text book.txt --out converted\n  \
attlas convert model.gguf --to mla --text book.txt --rank 192 --rope-dim 32 --out converted\n  \
attlas convert ./Llama-3.2-1B --to mla --text book.txt --recipe published --fold search --out converted\n  \
attlas convert model.gguf --to mla --text book.txt --until partial_rope --out partial\n  \
attlas generate converted --prompt \"The capital of France is\"\n\n\
Grouped-query attention becomes latent attention (TransMLA). Stages: merged (one latent for all key\n\
heads), rotated (a basis that rotary positions do not notice), partial_rope (only the shared key is\n\
rotated), balanced, low_rank, low_rank_queries. The first text tokens calibrate, the following ones\n\
check. The folder is in the DeepSeek-V3 format; transformers loads it without code of its own. Beside\n\
the weights it holds conversion.json, what was measured, and check.json, logits to compare with.\n\
Nothing is overwritten, and an interrupted command leaves nothing. docs/latent.md says more.")]
    Convert(ConvertArgs),
    /// Measure how well a model predicts a text, with exact attention or beside it.
    #[command(after_help = "Examples:\n  \
attlas perplexity model.gguf --text book.txt --tokens 8192 --context 2048\n  \
attlas perplexity model.gguf --text book.txt --stride 512 --bos\n  \
attlas perplexity model.gguf --text book.txt --method sink_window --set window=256\n  \
attlas perplexity model.gguf --text book.txt --recipe recipe.toml --json\n\n\
Protocols: strided scores every token once, with the context its first window gives it; llamacpp\n\
scores the second half of windows without overlap; windows scores all but the first token of windows\n\
without overlap and drops the rest. Numbers of different protocols cannot be compared.")]
    Perplexity(PerplexityArgs),
    /// Continue a text.
    #[command(after_help = "Examples:\n  \
attlas generate model.gguf --prompt \"The capital of France is\" --max-tokens 20\n  \
attlas generate model.gguf --chat --prompt \"Name three rivers.\" --temperature 0.7 --top-p 0.9\n  \
attlas generate model.gguf --prompt-file long.txt --method sink_window --set window=1024")]
    Generate(GenerateArgs),
}

#[derive(Args, Clone, Debug)]
pub(crate) struct CompressArgs {
    /// A GGUF file, or a folder with config.json, safetensors and tokenizer.json.
    #[arg(value_name = "MODEL")]
    pub(crate) model: PathBuf,
    /// The conversion, by id.
    #[arg(long, value_name = "ID")]
    pub(crate) with: String,
    /// The folder to write; nothing may be there.
    #[arg(long, short, value_name = "FOLDER")]
    pub(crate) out: PathBuf,
    /// The text that both models read.
    #[arg(long, value_name = "FILE")]
    pub(crate) text: PathBuf,
    /// Rank; the same as --set rank=R, or all ranks of the conversion.
    #[arg(long, value_name = "R", value_parser = count)]
    pub(crate) rank: Option<usize>,
    /// Instead of a rank, the largest relative error of weights; the same as --set rel_error=E.
    #[arg(long, value_name = "E", value_parser = positive, conflicts_with = "rank")]
    pub(crate) max_weight_error: Option<f64>,
    /// Set any parameter of the conversion; may be repeated.
    #[arg(long, value_name = "PARAM=VALUE")]
    pub(crate) set: Vec<String>,
    /// Layers, such as 0-3,7; all by default, the last for trawl.
    #[arg(long, value_name = "L,…")]
    pub(crate) layers: Option<Numbers>,
    /// Matrices: q, k, v, o, gate, up, down, or attention, ffn, all.
    #[arg(long, value_name = "M,…")]
    pub(crate) matrices: Option<String>,
    /// Element type of factors; what is left alone stays as it is.
    #[arg(long, value_enum, default_value_t = FactorType::F16)]
    pub(crate) dtype: FactorType,
    /// Read this many tokens at most; paragraphs for an encoder.
    #[arg(long, default_value = "2048", value_name = "N", value_parser = count)]
    pub(crate) tokens: usize,
    /// Tokens of a window.
    #[arg(long, default_value = "512", value_name = "N", value_parser = count)]
    pub(crate) context: usize,
    /// Times that each time is measured; 0 measures none.
    #[arg(long, default_value_t = 5, value_name = "N")]
    pub(crate) repeats: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum FactorType {
    /// Single precision.
    F32,
    /// Half precision.
    F16,
    /// The upper half of a single.
    Bf16,
    /// 8 bits and a scale for every 32 numbers, where rows allow it.
    Q8,
}

/// What a model can be converted to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Target {
    /// Latent attention.
    Mla,
}

/// How a model is converted to latent attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum RecipeName {
    /// Complex basis, errors measured where they act.
    Improved,
    /// Real basis, errors of activations, calibrated twice.
    Published,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub(crate) enum StageName {
    Merged,
    Rotated,
    PartialRope,
    Balanced,
    LowRank,
    LowRankQueries,
}

impl StageName {
    pub(crate) fn stage(self) -> Stage {
        match self {
            Self::Merged => Stage::Merged,
            Self::Rotated => Stage::Rotated,
            Self::PartialRope => Stage::PartialRope,
            Self::Balanced => Stage::Balanced,
            Self::LowRank => Stage::LowRank,
            Self::LowRankQueries => Stage::LowRankQueries,
        }
    }
}

/// Where queries, keys and values come from.
#[derive(Args, Clone, Debug)]
pub(crate) struct Inputs {
    /// Inputs: demo (a real model reading a text, embedded); synthetic:KIND,n=…,d=…,heads=…,
    /// kv_heads=…,seed=… with KIND gaussian, clustered, heavy_hitters, low_rank, smooth or needle; a
    /// trace (.safetensors, .npz, .npy); q.npy,k.npy,v.npy; or a model (.gguf or a folder) with --text.
    #[arg(value_name = "SOURCE", default_value_t = Source::default())]
    pub(crate) source: Source,
    /// Layers of a trace or model, such as 0-3,7; all by default.
    #[arg(long, value_name = "L,…")]
    pub(crate) layers: Option<Numbers>,
    /// The text that a model reads; - is standard input.
    #[arg(long, value_name = "FILE")]
    pub(crate) text: Option<PathBuf>,
    /// Tokens of it that are read.
    #[arg(long, default_value = "2048", value_name = "N", value_parser = count, requires = "text")]
    pub(crate) tokens: usize,
}

/// Which keys a query sees.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct MaskChoice {
    /// With a causal mask; the source decides by default (traces are causal, synthetic ones not).
    #[arg(long, conflicts_with = "no_mask")]
    causal: bool,
    /// Without a mask.
    #[arg(long)]
    no_mask: bool,
}

impl MaskChoice {
    /// The mask, or `None` where the source decides.
    pub(crate) fn mask(self) -> Option<Mask> {
        match (self.causal, self.no_mask) {
            (true, _) => Some(Mask::Causal),
            (_, true) => Some(Mask::None),
            _ => None,
        }
    }
}

#[derive(Args, Clone, Debug)]
pub(crate) struct ConvertArgs {
    /// A GGUF file, or a folder with config.json, safetensors and tokenizer.json.
    #[arg(value_name = "MODEL")]
    pub(crate) model: PathBuf,
    /// What to.
    #[arg(long, value_enum)]
    pub(crate) to: Target,
    /// The folder to write; nothing may be there.
    #[arg(long, short, value_name = "FOLDER")]
    pub(crate) out: PathBuf,
    /// The text to calibrate on, and to check on what follows; - is standard input.
    #[arg(long, value_name = "FILE", visible_alias = "calibration")]
    pub(crate) text: PathBuf,
    /// Width of the latent.
    #[arg(long, value_name = "R", value_parser = count)]
    pub(crate) rank: Option<usize>,
    /// Width of the shared rotated key; divides the head width.
    #[arg(long, value_name = "D", value_parser = count)]
    pub(crate) rope_dim: Option<usize>,
    /// Width of a latent of queries; none by default.
    #[arg(long, value_name = "R", value_parser = count)]
    pub(crate) rank_q: Option<usize>,
    /// Neighbouring frequencies that are mixed, or `search`.
    #[arg(long, value_name = "F")]
    pub(crate) fold: Option<String>,
    /// Defaults of basis, metric and calibration.
    #[arg(long, value_enum, default_value_t = RecipeName::Improved)]
    pub(crate) recipe: RecipeName,
    /// Set any parameter of the conversion (`attlas methods mla`); may be repeated.
    #[arg(long, value_name = "PARAM=VALUE")]
    pub(crate) set: Vec<String>,
    /// Calibrate the low rank on the partly rotated model.
    #[arg(long)]
    pub(crate) recalibrate: bool,
    /// Write the model at this stage instead of the last.
    #[arg(long, value_enum, value_name = "STAGE")]
    pub(crate) until: Option<StageName>,
    /// Stages whose loss is measured besides the last; all by default.
    #[arg(long, value_enum, value_delimiter = ',', value_name = "STAGE,…")]
    pub(crate) stages: Option<Vec<StageName>>,
    /// Calibrate on this many tokens; 8192 by default, or three quarters of a shorter text.
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) tokens: Option<usize>,
    /// Check on this text instead of what follows the calibration tokens.
    #[arg(long, value_name = "FILE")]
    pub(crate) check_text: Option<PathBuf>,
    /// Check on this many tokens; 2048 by default.
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) check_tokens: Option<usize>,
    /// Tokens of a window of the check.
    #[arg(long, default_value = "512", value_name = "N", value_parser = count)]
    pub(crate) context: usize,
}

/// How much of the spectra is computed.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct SpectraSize {
    /// Longest sequence of which all singular values are computed, from a dense matrix; of longer ones the
    /// leading ones are, without storing a matrix.
    #[arg(long, default_value = "1024", value_name = "N", value_parser = count)]
    max_n: usize,
    /// How many are computed above that length.
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
    /// Also write the figures as a picture.
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

/// A text that a model reads.
#[derive(Args, Clone, Debug)]
pub(crate) struct TextChoice {
    /// The text to read; - is standard input.
    #[arg(id = "text", long = "text", value_name = "FILE")]
    pub(crate) path: PathBuf,
    /// Read this many tokens at most.
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) tokens: Option<usize>,
    /// Begin with the token for the beginning of a text; every window does.
    #[arg(long)]
    pub(crate) bos: bool,
}

/// What attends in a model.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct AttentionChoice {
    /// Which method attends in which head: a TOML file.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["method", "set"])]
    pub(crate) recipe: Option<PathBuf>,
    /// One method for all heads, by id; exact attention by default.
    #[arg(long, value_name = "ID")]
    pub(crate) method: Option<String>,
    /// Set a parameter of that method; may be repeated.
    #[arg(long, value_name = "PARAM=VALUE")]
    pub(crate) set: Vec<String>,
}

impl AttentionChoice {
    pub(crate) fn attention(&self) -> Attention {
        Attention { recipe: self.recipe.clone(), method: self.method.clone(), set: self.set.clone() }
    }
}

#[derive(Args, Clone, Debug)]
pub(crate) struct ExtractArgs {
    #[command(flatten)]
    pub(crate) model: ModelChoice,
    #[command(flatten)]
    pub(crate) text: TextChoice,
    /// Where to write: .safetensors, .npz, or .npy for a single head.
    #[arg(long, short, value_name = "FILE")]
    pub(crate) out: PathBuf,
    /// Layers, such as 0-3,7; all by default.
    #[arg(long, value_name = "L,…")]
    pub(crate) layers: Option<Numbers>,
    /// Query heads, such as 0-2; all by default. Of each key head as many as of every other.
    #[arg(long, value_name = "H,…")]
    pub(crate) heads: Option<Numbers>,
    /// Also queries and keys before rotation, as layer{l}.q_pre and layer{l}.k_pre.
    #[arg(long)]
    pub(crate) pre_rope: bool,
    /// Element type in a safetensors file.
    #[arg(long, value_enum, default_value_t = ElementType::F32)]
    pub(crate) dtype: ElementType,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ElementType {
    F32,
    F16,
    Bf16,
}

#[derive(Args, Clone, Debug)]
#[command(group = clap::ArgGroup::new("budget").required(true).multiple(true))]
pub(crate) struct TuneArgs {
    #[command(flatten)]
    pub(crate) model: ModelChoice,
    /// The text to tune on, and where no other is given, to check on what follows.
    #[arg(long, value_name = "FILE")]
    pub(crate) text: PathBuf,
    /// Where to write the recipe.
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
    /// Tokens to tune on, and of a window of the check; by default 2048, or half the text.
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) tokens: Option<usize>,
    /// Another text to check on.
    #[arg(long, value_name = "FILE")]
    pub(crate) check_text: Option<PathBuf>,
    /// Tokens to check on; as many as are tuned on by default.
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) check_tokens: Option<usize>,
    #[command(flatten)]
    pub(crate) methods: MethodChoice,
    /// Layers that may be changed, such as 0-3,7; all by default.
    #[arg(long, value_name = "L,…")]
    pub(crate) layers: Option<Numbers>,
    /// How much is tried.
    #[arg(long, value_enum, default_value_t = EffortName::Normal)]
    pub(crate) effort: EffortName,
    /// Where measurements are kept; the name of the recipe with .jsonl added by default.
    #[arg(long, value_name = "FILE")]
    pub(crate) state: Option<PathBuf>,
    /// Measure part I of N alone, counted from 0, and write no recipe.
    #[arg(long, value_name = "I/N")]
    pub(crate) shard: Option<Shard>,
    /// Take over the measurements in these files.
    #[arg(long, value_delimiter = ',', value_name = "FILE,…")]
    pub(crate) merge: Vec<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum EffortName {
    Quick,
    Normal,
    Thorough,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct PerplexityArgs {
    #[command(flatten)]
    pub(crate) model: ModelChoice,
    #[command(flatten)]
    pub(crate) text: TextChoice,
    /// Tokens of a window; by default 2048, or the model's context where that is shorter.
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) context: Option<usize>,
    /// Tokens from the start of a window to the next; as many as a window has by default.
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) stride: Option<usize>,
    /// Which tokens are scored.
    #[arg(long, value_enum, default_value_t = ProtocolName::Strided)]
    pub(crate) protocol: ProtocolName,
    #[command(flatten)]
    pub(crate) attention: AttentionChoice,
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
    /// The prompt is a message: use the model's chat template.
    #[arg(long)]
    pub(crate) chat: bool,
    /// What the model is told before the message.
    #[arg(long, value_name = "TEXT", requires = "chat")]
    pub(crate) system: Option<String>,
    /// Add this many tokens at most.
    #[arg(long, short = 'n', default_value_t = 128, value_name = "N")]
    pub(crate) max_tokens: usize,
    /// Divides the logits; 0 always takes the likeliest token.
    #[arg(long, default_value_t = 0.0, value_name = "T")]
    pub(crate) temperature: f64,
    /// Choose among this many tokens at most.
    #[arg(long, value_name = "N")]
    pub(crate) top_k: Option<usize>,
    /// Choose among the likeliest tokens that have this probability together.
    #[arg(long, value_name = "P")]
    pub(crate) top_p: Option<f64>,
    /// End before this text; may be repeated.
    #[arg(long, value_name = "TEXT")]
    pub(crate) stop: Vec<String>,
    /// Go on after a token that ends the text.
    #[arg(long)]
    pub(crate) ignore_eos: bool,
    #[command(flatten)]
    pub(crate) attention: AttentionChoice,
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
pub(crate) struct InspectArgs {
    #[command(flatten)]
    pub(crate) inputs: Inputs,
    /// Query heads, such as 0-2; all by default. Heads with numbers that are not finite are named and
    /// left out.
    #[arg(long, value_name = "H,…")]
    pub(crate) heads: Option<Numbers>,
    #[command(flatten)]
    pub(crate) mask: MaskChoice,
    #[command(flatten)]
    pub(crate) spectra: SpectraSize,
    #[command(flatten)]
    pub(crate) pictures: Pictures,
    /// What --svg shows: all of each head, or one of the survey's figures over layers.
    #[arg(long, value_enum, default_value_t = FigureName::Heads, requires = "svg")]
    pub(crate) figure: FigureName,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum FigureName {
    /// Patterns and spectra of each head.
    Heads,
    /// The first tokens' weights of every head.
    Patterns,
    /// Singular values of Q, K and V.
    Inputs,
    /// Singular values of QK^T, A and Z^-1 A.
    Scores,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct CompareArgs {
    #[command(flatten)]
    pub(crate) inputs: Inputs,
    #[command(flatten)]
    pub(crate) methods: MethodChoice,
    /// Query heads of the model, such as 0-2; all by default.
    #[arg(long, value_name = "H,…", requires = "text")]
    pub(crate) heads: Option<Numbers>,
    #[command(flatten)]
    pub(crate) mask: MaskChoice,
    /// Seeds for methods that draw random numbers.
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) seeds: u32,
    /// Rows of each head on which exact attention certifies the error.
    #[arg(long, default_value_t = 256, value_name = "N")]
    pub(crate) certify_rows: usize,
    /// Begin nothing new after this many seconds.
    #[arg(long, value_name = "SECONDS", value_parser = positive)]
    pub(crate) time_limit: Option<f64>,
    /// Give every method the same budget, whatever its parameter is called: keys=N scores a query,
    /// time=P% of exact attention's seconds, or memory=SIZE beyond inputs and output (such as 8M).
    #[arg(long = "match", value_name = "WHAT=AMOUNT")]
    pub(crate) matched: Option<Budget>,
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
    #[command(flatten)]
    pub(crate) pictures: Pictures,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct ReportArgs {
    #[command(flatten)]
    pub(crate) inputs: Inputs,
    /// Where to write the page.
    #[arg(long, short, value_name = "FILE")]
    pub(crate) out: PathBuf,
    /// Show this recipe, too.
    #[arg(long, value_name = "FILE")]
    pub(crate) recipe: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) methods: MethodChoice,
    /// Seeds for methods that draw random numbers.
    #[arg(long, default_value_t = 3, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) seeds: u32,
    /// Begin no new comparison after this many seconds of comparing.
    #[arg(long, value_name = "SECONDS", value_parser = positive)]
    pub(crate) time_limit: Option<f64>,
    #[command(flatten)]
    pub(crate) spectra: SpectraSize,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct BenchArgs {
    #[command(flatten)]
    pub(crate) methods: MethodChoice,
    /// A fixed set of measurements in place of the options: `headline` times every method at the
    /// setting its paper is known for, how it grows and what threads bring (several minutes).
    #[arg(long, value_enum, value_name = "NAME",
          conflicts_with_all = ["methods", "family", "set", "n", "d", "heads", "kv_heads", "causal", "decode", "peer_json"])]
    pub(crate) suite: Option<Suite>,
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

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub(crate) enum Suite {
    /// Every paper's claim beside exact attention on this machine.
    Headline,
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

/// A share, as a number or in percent.
fn share(text: &str) -> Result<f64, String> {
    match text.strip_suffix('%') {
        Some(percent) => positive(percent.trim()).map(|x| x / 100.0),
        None => positive(text),
    }
    .map_err(|_| "expected a positive share such as 1% or 0.01".into())
}

fn count(text: &str) -> Result<usize, String> {
    match parse_count(text) {
        Some(n) if n > 0 => Ok(n),
        _ => Err("expected a positive whole number such as 4096 or 4k".into()),
    }
}
