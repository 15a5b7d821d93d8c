//! The commands, and the flags common to all of them. Each kind of command has a file for its arguments; [`shared`] has
//! the groups of arguments that several commands take.

mod decompose;
mod language;
mod layer;
mod measure;
mod rewrite;
mod shared;
mod simulate;

pub(crate) use decompose::DecomposeArgs;
pub(crate) use language::{
    CalibrateArgs, ExtractArgs, GenerateArgs, PerplexityArgs, ProtocolName, SpreadName, TuneArgs,
};
pub(crate) use layer::LayerArgs;
pub(crate) use measure::{
    BenchArgs, CompareArgs, InspectArgs, MethodsArgs, ReorderName, ReportArgs, WireName,
};
pub(crate) use rewrite::{CompressArgs, ConvertArgs, RecipeName};
pub(crate) use shared::{Inputs, Limit};
pub(crate) use simulate::{KhopArgs, MatchArgs, ParticlesArgs, SimulateArgs, Simulation};

use clap::{Args, Parser, Subcommand};

/// An atlas of fast attention: methods of all families, measured side by side.
#[derive(Debug, Parser)]
#[command(
    name = "attlas",
    version,
    max_term_width = 100,
    after_help = laid_out("Without a command, `compare` runs on the default source for at most 20 seconds.\n\n\
Examples:\n  \
attlas                                     see how methods compare\n  \
attlas methods hyper                       everything about one method\n  \
attlas compare synthetic:needle,n=4k       on other inputs\n  \
attlas inspect --html inside.html          what real heads look like\n  \
attlas bench --methods sink_window --n 1k,4k,16k --causal\n  \
attlas perplexity model.gguf --text book.txt --method sink_window\n  \
attlas tune model.gguf --text book.txt --max-ppl-increase 1% --out recipe.toml\n  \
attlas compress model.gguf --with svd --rank 288 --matrices q,o --text book.txt --out smaller\n  \
attlas convert model.gguf --to mla --text book.txt --out converted\n  \
attlas generate model.gguf --prompt \"The capital of France is\"\n\n\
Results go to standard output, progress and notes to standard error.\n\n\
Exit status: 0 done, 1 over the stated budget, 2 error, 130 interrupted.\n\n\
Documents named docs/… are at https://github.com/attlas/attlas/tree/main/docs")
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
    #[command(flatten)]
    pub(crate) common: Common,
}

/// Help heading of the flags common to all commands.
const GLOBAL: &str = "Options of every command";

/// Lays out examples and remarks for printing. Commands too long for 80 columns continue after a backslash, which keeps
/// them pasteable; paragraphs are left for the terminal to wrap.
pub(crate) fn laid_out(text: &str) -> String {
    let command = |line: &str| {
        let (mut out, mut width) = (String::new(), 0);
        let mut words: Vec<String> = Vec::new();
        // A flag and its value stay together.
        for word in line.trim().split(' ') {
            match words.last_mut() {
                Some(last) if last.starts_with('-') && !last.contains(' ') && !word.starts_with('-') => {
                    *last += &format!(" {word}");
                }
                Some(last) if last.matches('"').count() % 2 == 1 => *last += &format!(" {word}"),
                _ => words.push(word.into()),
            }
        }
        for (i, word) in words.iter().enumerate() {
            let len = word.chars().count();
            if i > 0 && 2 + width + 1 + len > 76 {
                out += " \\\n      ";
                width = 4;
            } else if i > 0 {
                out.push(' ');
                width += 1;
            }
            out += word;
            width += len;
        }
        format!("  {out}")
    };
    let block = |block: &str| match block.strip_prefix("Examples:\n") {
        Some(lines) => {
            let lines =
                lines.lines().map(|l| if l.chars().count() > 78 { command(l) } else { l.to_string() });
            format!("Examples:\n{}", lines.collect::<Vec<_>>().join("\n"))
        }
        None => block.split_whitespace().collect::<Vec<_>>().join(" "),
    };
    text.split("\n\n").map(block).collect::<Vec<_>>().join("\n\n")
}

/// Flags common to all commands.
#[derive(Args, Clone, Debug)]
pub(crate) struct Common {
    /// Print one JSON document (docs/json.md describes every field).
    #[arg(long, global = true, help_heading = GLOBAL, conflicts_with_all = ["csv", "md"])]
    pub(crate) json: bool,
    /// Print comma-separated values with all digits.
    #[arg(long, global = true, help_heading = GLOBAL, conflicts_with = "md")]
    pub(crate) csv: bool,
    /// Print Markdown.
    #[arg(long, global = true, help_heading = GLOBAL, visible_alias = "markdown")]
    pub(crate) md: bool,
    /// Number of threads; 0 uses all that the machine offers, and eight per processor is the maximum.
    #[arg(long, global = true, help_heading = GLOBAL, default_value_t = 0, value_name = "N")]
    pub(crate) threads: usize,
    /// First seed of all random numbers.
    #[arg(long, global = true, help_heading = GLOBAL, default_value_t = 0, value_name = "N")]
    pub(crate) seed: u64,
    /// Print no progress and no notes on standard error.
    #[arg(long, short, global = true, help_heading = GLOBAL)]
    pub(crate) quiet: bool,
    /// Show progress even if standard error is not a terminal.
    #[arg(long, global = true, help_heading = GLOBAL, conflicts_with = "quiet")]
    pub(crate) progress: bool,
}

#[derive(Debug, Subcommand)]
#[allow(clippy::large_enum_variant)]
pub(crate) enum Command {
    /// List methods, layers and conversions with their claims and parameters.
    #[command(after_help = laid_out("Examples:\n  \
attlas methods\n  \
attlas methods top_k\n  \
attlas methods --family kernel --json\n  \
attlas methods --md > docs/methods.md\n  \
attlas methods --svg docs/img/taxonomy.svg"))]
    Methods(MethodsArgs),
    /// Look inside heads: sparsity patterns, attention sinks, singular values, ranks, entropy.
    #[command(after_help = laid_out("Examples:\n  \
attlas inspect\n  \
attlas inspect trace.safetensors --layers 0-3 --heads 0 --html inside.html\n  \
attlas inspect model.gguf --text book.txt --tokens 2048 --layers 5,20 --svg heads.svg\n  \
attlas inspect model.gguf --text book.txt --layers 5,20 --svg spectra.svg --figure scores\n  \
attlas inspect synthetic:low_rank,n=8k --rank 128 --json\n  \
attlas inspect --heads 0,4 --reorder hyper --svg blocks.svg\n\n\
Under `mpirun -n P attlas inspect …` the processes share the heads (docs/scale.md)."))]
    Inspect(InspectArgs),
    /// Measure errors and times of methods on given inputs, against exact attention.
    #[command(after_help = laid_out("Examples:\n  \
attlas compare\n  \
attlas compare synthetic:heavy_hitters,n=4k,d=128,heads=8,kv_heads=2 --causal\n  \
attlas compare model.gguf --text book.txt --layers 5,20\n  \
attlas compare trace.safetensors --methods sink_window,top_k --set top_k.keys=128\n  \
attlas compare q.npy,k.npy,v.npy --family low_rank --seeds 10 --json\n  \
attlas compare --match keys=256 --methods hyper,reformer,sink_window\n  \
attlas compare --budget 0.05 --html report.html\n\n\
Under `mpirun -n P attlas compare …` the processes share the key heads, and with --state the same command\n\
resumes after an interruption (docs/scale.md)."))]
    Compare(CompareArgs),
    /// Write a self-contained page about a model's attention: structure, spectra, methods, recipe.
    #[command(after_help = laid_out("Examples:\n  \
attlas report --out report.html\n  \
attlas report model.gguf --text book.txt --layers 5,20 --recipe recipe.toml --out report.html\n  \
attlas report trace.safetensors --methods sink_window,hyper --time-limit 60 --out report.html"))]
    Report(ReportArgs),
    /// Measure how times grow with sequence length, against this machine's peak.
    #[command(after_help = laid_out("Examples:\n  \
attlas bench\n  \
attlas bench --methods sink_window,top_k --n 1k,4k,16k --d 64,128 --causal\n  \
attlas bench --methods exact --n 32k --d 128 --heads 32 --kv-heads 8 --decode\n  \
attlas bench --methods exact --n 1k,4k --peer-json torch.json --md\n  \
attlas bench --methods exact,linear --n 1M,10M --causal --cluster nodes=64,gbps=100,us=2\n\n\
Under `mpirun -n P attlas bench …` one sequence is divided among all processes (docs/scale.md)."))]
    Bench(BenchArgs),
    /// Decompose a tensor from a file: canonical polyadic, Tucker or block-term form.
    #[command(after_help = laid_out("Examples:\n  \
attlas decompose weights.npy --with cp --rank 8 --restarts 10 --out factors.npz\n  \
attlas decompose model.safetensors --tensor model.layers.0.mlp.up_proj.weight --with hosvd --error 10%\n  \
attlas decompose weights.npy --with tucker --rank 16,32,32 --curve curve.svg"))]
    Decompose(DecomposeArgs),
    /// Run a layer on hidden states from a file, with weights from a file or random ones.
    #[command(after_help = laid_out("Examples:\n  \
attlas layer axial --input image.npy --random 1 --out y.npy\n  \
attlas layer grouped_query --input x.npy --weights w.safetensors --heads 8 --kv-heads 2 --causal --out y.npy\n  \
attlas layer higher_order --input video.npy --random 1 --set combine=sum --json\n\n\
`attlas methods ID` lists the parameters and weights of a layer. A layer that folds its tokens into a grid takes the grid\n\
from the shape of the input: [32, 32, 64] is a grid of 32 x 32 tokens of width 64."))]
    Layer(LayerArgs),
    /// Run small simulations: attention as interacting particles, sums of triples, chains of hops.
    #[command(after_help = laid_out("Examples:\n  \
attlas simulate particles --svg particles.svg\n  \
attlas simulate particles --model sphere --n 32 --d 2 --beta 9 --t-end 50\n  \
attlas simulate match3\n  \
attlas simulate match3 --n 32 --modulus 61 --count 100 --json"))]
    Simulate(SimulateArgs),
    /// Write the queries, keys and values that a model computes on a text.
    #[command(after_help = laid_out("Examples:\n  \
attlas extract model.gguf --text book.txt --tokens 2048 --out trace.safetensors\n  \
attlas extract ./Llama-3.2-1B --text - --layers 0-3,15 --pre-rope --out trace.npz < book.txt\n  \
attlas extract model.gguf --text book.txt --layers 5 --heads 0 --out head.npy\n  \
attlas compare trace.safetensors"))]
    Extract(ExtractArgs),
    /// Learn the data-dependent parts of methods from a text, for each key head of a model.
    #[command(after_help = laid_out("Examples:\n  \
attlas calibrate model.gguf --text book.txt --out calibration\n  \
attlas calibrate model.gguf --text book.txt --methods loki,crt --tokens 4096 --out calibration\n  \
attlas perplexity model.gguf --text other.txt --method loki --calibration calibration\n  \
attlas tune model.gguf --text book.txt --max-kl 0.01 --calibration calibration --out recipe.toml\n\n\
Nothing is trained: bases and moments are computed in closed form, for each layer and key head. Errors are\n\
measured on the tokens that follow those learnt from, without and with the calibration."))]
    Calibrate(CalibrateArgs),
    /// Choose a method for every head of a model within a budget, and write the recipe.
    #[command(after_help = laid_out("Examples:\n  \
attlas tune model.gguf --text book.txt --max-error 0.02 --out recipe.toml\n  \
attlas tune model.gguf --text book.txt --tokens 8192 --max-ppl-increase 1% --effort quick --out recipe.toml\n  \
attlas tune model.gguf --text book.txt --max-kl 0.01 --methods sink_window,hyper --out recipe.toml\n  \
attlas tune model.gguf --text book.txt --max-kl 0.01 --out recipe.toml --state part0.jsonl --shard 0/4\n  \
attlas tune model.gguf --text book.txt --max-kl 0.01 --out recipe.toml --merge part0.jsonl,part1.jsonl\n  \
attlas perplexity model.gguf --text other.txt --recipe recipe.toml\n\n\
Methods are timed on every key head, and the divergence of the model's predictions is measured with that\n\
head alone changed. One price per nat for all heads minimises the time; a second text adjusts it until\n\
the budget is met there with 95 % confidence, and a third text gives the reported result. Methods for\n\
new tokens are chosen separately. All measurements are kept: the same command resumes where it stopped.\n\
--effort quick takes minutes, normal about three times as long, thorough hours.\n\n\
Under `mpirun -n P attlas tune …` the processes share the key heads (docs/scale.md)."))]
    Tune(TuneArgs),
    /// Factor a model's matrices, measure what that costs, and write a checkpoint.
    #[command(after_help = laid_out("Examples:\n  \
attlas compress model.gguf --with svd --rank 288 --matrices q,o --text book.txt --out smaller\n  \
attlas compress model.gguf --with svd --max-weight-error 0.1 --text book.txt --out smaller\n  \
attlas compress model.gguf --with tucker --rank 256 --set layer_rank=48 --text book.txt --out smaller\n  \
attlas compress model.gguf --with trawl --rank 400 --layers 28,29 --set keep_factors=true --text book.txt --out smaller\n  \
attlas compress model.gguf --with trawl --rank 256,400 --accept --text book.txt --out smaller\n  \
attlas compress model.gguf --with tensor_product --rank 2 --layers 0-3 --text book.txt --out smaller\n  \
attlas compress ./all-MiniLM-L6-v2 --with collaborative --rank 192 --text book.txt --out smaller\n  \
attlas generate smaller --prompt \"The capital of France is\"\n\n\
Conversions: svd (every matrix on its own), shared_factor and tucker (bases that all layers share), trawl\n\
(a few layers, by default the last), tensor_product (a cache of key and value factors), collaborative (heads\n\
that share queries and keys; not with rotary positions). `attlas methods ID` shows their parameters.\n\
The command writes the folder, opens it again and runs it on its factors; it prints perplexity, divergence,\n\
parameters, bytes, operations and times of both models. Trained weights are not low-rank: without training\n\
afterwards most settings lose much; --accept keeps only changes that cost nothing on held-out text.\n\
Existing files are not overwritten. docs/compress.md describes the format."))]
    Compress(CompressArgs),
    /// Convert a model's attention to another kind, measure what each stage costs, and write a checkpoint.
    #[command(after_help = laid_out("Examples:\n  \
attlas convert model.gguf --to mla --text book.txt --out converted\n  \
attlas convert model.gguf --to mla --text book.txt --rank 192 --rope-dim 32 --out converted\n  \
attlas convert model.gguf --to mla --text book.txt --max-kl 0.2 --out converted.gguf\n  \
attlas convert ./Llama-3.2-1B --to mla --text book.txt --recipe published --fold search --out converted\n  \
attlas convert model.gguf --to mla --text book.txt --until partial_rope --out partial\n  \
attlas generate converted --prompt \"The capital of France is\"\n\n\
Grouped-query attention becomes latent attention (TransMLA). Stages: merged (one latent for all key\n\
heads), rotated (a change of basis that commutes with rotary positions), partial_rope (only the shared\n\
key is rotated), balanced, low_rank, low_rank_queries. The first tokens of the text calibrate, the\n\
following ones check. The folder is in the DeepSeek-V3 format; transformers loads it without custom code.\n\
Beside the weights it contains conversion.json, the measurements, and check.json, logits to compare with.\n\
A name that ends in .gguf gives a file that llama.cpp runs as deepseek2.\n\
Existing files are not overwritten, and an interrupted command leaves none. See docs/latent.md."))]
    Convert(ConvertArgs),
    /// Measure how well a model predicts a text, with exact attention or with another method against it.
    #[command(after_help = laid_out("Examples:\n  \
attlas perplexity model.gguf --text book.txt --tokens 8192 --context 2048\n  \
attlas perplexity model.gguf --text book.txt --stride 512 --bos\n  \
attlas perplexity model.gguf --text book.txt --method sink_window --set window=256\n  \
attlas perplexity model.gguf --text book.txt --recipe recipe.toml --json\n\n\
Protocols: strided scores every token once, with the context its first window gives it; llamacpp\n\
scores the second half of windows without overlap; windows scores all but the first token of windows\n\
without overlap and drops the tokens after the last whole window. Their numbers are not comparable.\n\n\
Under `mpirun -n P attlas perplexity …` the processes share the windows, and with --state the same command\n\
resumes after an interruption (docs/scale.md)."))]
    Perplexity(PerplexityArgs),
    /// Continue a text.
    #[command(after_help = laid_out("Examples:\n  \
attlas generate model.gguf --prompt \"The capital of France is\" --max-tokens 20\n  \
attlas generate model.gguf --chat --prompt \"Name three rivers.\" --temperature 0.7 --top-p 0.9\n  \
attlas generate model.gguf --prompt-file long.txt --method sink_window --set window=1024"))]
    Generate(GenerateArgs),
    /// Print a script that completes commands and flags in a shell.
    #[command(after_help = laid_out("Examples:\n  \
attlas completions bash > ~/.local/share/bash-completion/completions/attlas\n  \
attlas completions zsh > ~/.zfunc/_attlas\n  \
attlas completions fish > ~/.config/fish/completions/attlas.fish"))]
    Completions(CompletionsArgs),
    /// Print the manual page of attlas, or of one command.
    #[command(after_help = laid_out("Examples:\n  \
attlas man > attlas.1\n  \
attlas man compare > attlas-compare.1"))]
    Man(ManArgs),
}

#[derive(Args, Clone, Debug)]
pub(crate) struct CompletionsArgs {
    /// The shell.
    #[arg(value_enum)]
    pub(crate) shell: clap_complete::Shell,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct ManArgs {
    /// The command; without one, the overview of all commands.
    pub(crate) command: Option<String>,
}
