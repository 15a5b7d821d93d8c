//! Decompositions of tensors.

use super::shared::{count, share};
use attlas_lab::decompose::Form;
use clap::Args;
use std::path::PathBuf;

#[derive(Args, Clone, Debug)]
#[command(group = clap::ArgGroup::new("size").required(true))]
pub(crate) struct DecomposeArgs {
    /// The tensor: a .npy, .npz or .safetensors file.
    #[arg(value_name = "FILE")]
    pub(crate) path: PathBuf,
    /// Name of the tensor, if the file has several.
    #[arg(long, value_name = "NAME")]
    pub(crate) tensor: Option<String>,
    /// The form of the decomposition.
    #[arg(long = "with", value_enum, value_name = "FORM")]
    pub(crate) form: Form,
    /// Number of terms for cp; for the other forms one rank for all modes, or one per mode.
    #[arg(long, value_name = "R,…", value_delimiter = ',', value_parser = count, group = "size")]
    pub(crate) rank: Option<Vec<usize>>,
    /// Find the smallest decomposition with at most this relative error, such as 0.05 or 5%.
    #[arg(long, value_name = "ERROR", value_parser = share, group = "size")]
    pub(crate) error: Option<f64>,
    /// Number of blocks for btd.
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = count)]
    pub(crate) blocks: usize,
    /// Number of starts; the best result is kept.
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = count)]
    pub(crate) restarts: usize,
    /// Write the factors: .npz or .safetensors.
    #[arg(long, short, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
    /// Write the curve of error against numbers stored, up to the rank found: .svg, .pdf or .csv.
    #[arg(long, value_name = "FILE")]
    pub(crate) curve: Option<PathBuf>,
}
