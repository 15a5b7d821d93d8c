//! Commands that write a new checkpoint of a model.

use super::shared::{Limit, ModelChoice, NewFolder, count, positive, share};
use attlas::conversions::mla::Stage;
use attlas::conversions::{Conversion, Run};
use attlas::registry;
use attlas_model::compress::Elements;
use attlas_model::recipe::Numbers;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueEnum};
use std::path::PathBuf;

#[derive(Args, Clone, Debug)]
pub(crate) struct CompressArgs {
    #[command(flatten)]
    pub(crate) model: ModelChoice,
    /// The conversion, by id.
    #[arg(long, value_name = "ID")]
    pub(crate) with: String,
    #[command(flatten)]
    pub(crate) out: NewFolder,
    /// The text that both models read.
    #[arg(long, value_name = "FILE")]
    pub(crate) text: PathBuf,
    /// Rank: sets `rank`, and every rank_… parameter of the conversion. With --accept several can be tried.
    #[arg(long, value_delimiter = ',', value_name = "R,…", value_parser = count)]
    pub(crate) rank: Vec<usize>,
    /// Instead of a rank, the largest relative error of weights; the same as --set rel_error=E.
    #[arg(long, value_name = "E", value_parser = positive, conflicts_with = "rank")]
    pub(crate) max_weight_error: Option<f64>,
    /// Instead of a rank, the share of all matrices' numbers that is stored, such as 75%: one Lagrange multiplier
    /// distributes the ranks over the matrices (svd).
    #[arg(long, value_name = "SHARE", value_parser = share, conflicts_with_all = ["rank", "max_weight_error"])]
    pub(crate) keep: Option<f64>,
    /// Instead of a rank, the largest total loss of all matrices, distributed in the same way: in nats per token with
    /// --calibrate, otherwise as the sum of relative squared errors (svd).
    #[arg(long, value_name = "LOSS", value_parser = positive, conflicts_with_all = ["rank", "max_weight_error", "keep"])]
    pub(crate) max_loss: Option<f64>,
    /// Fit to the matrices' inputs on this text, instead of weighting all inputs equally. If it is the file of --text,
    /// the tokens after the measured ones are used.
    #[arg(long, value_name = "FILE")]
    pub(crate) calibrate: Option<PathBuf>,
    /// Tokens of --calibrate to read; paragraphs for an encoder.
    #[arg(long, default_value = "8192", value_name = "N", value_parser = count, requires = "calibrate")]
    pub(crate) calibrate_tokens: usize,
    /// Tokens of --calibrate on which losses of different matrices are made comparable, with --keep and --max-loss.
    #[arg(long, default_value = "256", value_name = "N", value_parser = count, requires = "calibrate")]
    pub(crate) probe_tokens: usize,
    /// Set any parameter of the conversion; may be repeated.
    #[arg(long, value_name = "PARAM=VALUE")]
    pub(crate) set: Vec<String>,
    /// Layers, such as 0-3,7; all by default, the last for trawl without --accept.
    #[arg(long, value_name = "L,…")]
    pub(crate) layers: Option<Numbers>,
    /// Matrices: q, k, v, o, gate, up, down, or attention, ffn, all.
    #[arg(long, value_name = "M,…")]
    pub(crate) matrices: Option<String>,
    /// Change one layer at a time, from the last to the first, and keep a change only if held-out text is predicted no
    /// worse; of several ranks the best is kept.
    #[arg(long)]
    pub(crate) accept: bool,
    /// Tokens held out for --accept, after those of --tokens.
    #[arg(long, default_value = "1024", value_name = "N", value_parser = count, requires = "accept")]
    pub(crate) accept_tokens: usize,
    /// Element type of the factors; unchanged matrices keep theirs. By default that of most numbers of the model, or q8
    /// if those are quantised.
    #[arg(long, value_enum)]
    pub(crate) dtype: Option<StoredType>,
    /// Read at most this many tokens; paragraphs for an encoder.
    #[arg(long, default_value = "2048", value_name = "N", value_parser = count)]
    pub(crate) tokens: usize,
    /// Tokens of a window.
    #[arg(long, default_value = "512", value_name = "N", value_parser = count)]
    pub(crate) context: usize,
    #[command(flatten)]
    pub(crate) limit: Limit,
    /// Number of runs of each timing; 0 skips the timings.
    #[arg(long, default_value_t = 5, value_name = "N")]
    pub(crate) repeats: usize,
}

/// Element types that can be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum StoredType {
    /// Single precision.
    F32,
    /// Half precision.
    F16,
    /// Upper 16 bits of single precision.
    Bf16,
    /// 8 bits, and a scale for every 32 numbers, where the row length allows it.
    #[value(alias = "q8_0")]
    Q8,
}

impl From<StoredType> for Elements {
    fn from(dtype: StoredType) -> Self {
        match dtype {
            StoredType::F32 => Self::F32,
            StoredType::F16 => Self::F16,
            StoredType::Bf16 => Self::Bf16,
            StoredType::Q8 => Self::Q8,
        }
    }
}

#[derive(Args, Clone, Debug)]
pub(crate) struct ConvertArgs {
    #[command(flatten)]
    pub(crate) model: ModelChoice,
    /// Target of the conversion.
    #[arg(long, value_parser = target())]
    pub(crate) to: &'static Conversion,
    #[command(flatten)]
    pub(crate) out: NewFolder,
    /// The text to calibrate on, and then to check on its following tokens; - is standard input.
    #[arg(long, value_name = "FILE", visible_alias = "calibration")]
    pub(crate) text: PathBuf,
    /// Width of the latent.
    #[arg(long, value_name = "R", value_parser = count)]
    pub(crate) rank: Option<usize>,
    /// Instead of a rank, the share of the cache that remains; 75% by default.
    #[arg(long, value_name = "SHARE", value_parser = share, conflicts_with = "rank")]
    pub(crate) keep: Option<f64>,
    /// Instead of a rank, the largest divergence from the model's predictions, in nats per token. The last quarter of
    /// the calibration tokens is then excluded from fitting and determines the smallest rank within the limit. The
    /// command exits with 1 if the check text exceeds it.
    #[arg(long, value_name = "NATS", value_parser = positive, conflicts_with_all = ["rank", "keep"])]
    pub(crate) max_kl: Option<f64>,
    /// Element type of new matrices and of those stored in a wider type; a folder stores quantised ones in it, too. By
    /// default that of most numbers of the model; if those are quantised, q8 in a GGUF file and f16 in a folder.
    #[arg(long, value_enum)]
    pub(crate) dtype: Option<StoredType>,
    /// Width of the shared rotated key; divides the head width.
    #[arg(long, value_name = "D", value_parser = count)]
    pub(crate) rope_dim: Option<usize>,
    /// Width of a latent of queries; none by default.
    #[arg(long, value_name = "R", value_parser = count)]
    pub(crate) rank_q: Option<usize>,
    /// Number of neighbouring frequencies to mix, or `search`.
    #[arg(long, value_name = "F")]
    pub(crate) fold: Option<String>,
    /// Set of defaults for basis, metric and calibration.
    #[arg(long, value_enum, default_value_t = RecipeName::Improved)]
    pub(crate) recipe: RecipeName,
    /// Set any parameter of the conversion (`attlas methods mla`); may be repeated.
    #[arg(long, value_name = "PARAM=VALUE")]
    pub(crate) set: Vec<String>,
    /// Calibrate the low rank on the partly rotated model.
    #[arg(long)]
    pub(crate) recalibrate: bool,
    /// Write the model at this stage instead of the last.
    #[arg(long, value_parser = stage(), value_name = "STAGE")]
    pub(crate) until: Option<Stage>,
    /// Stages whose loss is measured besides the last; all by default.
    #[arg(long, value_parser = stage(), value_delimiter = ',', value_name = "STAGE,…")]
    pub(crate) stages: Option<Vec<Stage>>,
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
    #[command(flatten)]
    pub(crate) limit: Limit,
}

/// Defaults for the conversion to latent attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum RecipeName {
    /// Complex basis, errors measured where they act.
    Improved,
    /// Real basis, errors of activations, calibrated twice.
    Published,
}

/// Parses the id of a conversion. Those of another command parse, too, but are not shown in the help.
fn target() -> impl TypedValueParser<Value = &'static Conversion> {
    let shown = |c: &&Conversion| match c.run {
        Run::Latents => PossibleValue::new(c.id).help("Latent attention"),
        Run::Matrices(_) => PossibleValue::new(c.id).hide(true),
    };
    let ids = registry::CONVERSIONS.iter().map(shown).collect::<Vec<_>>();
    PossibleValuesParser::new(ids).try_map(|id| registry::conversion(&id))
}

/// Parses the name of a stage.
fn stage() -> impl TypedValueParser<Value = Stage> {
    let find = |name: String| Stage::ALL.into_iter().find(|s| s.name() == name).ok_or("no such stage");
    PossibleValuesParser::new(Stage::ALL.map(Stage::name)).try_map(find)
}
