//! A layer on data.

use super::shared::count;
use clap::Args;
use std::path::PathBuf;

#[derive(Args, Clone, Debug)]
#[command(group = clap::ArgGroup::new("source").required(true))]
pub(crate) struct LayerArgs {
    /// The layer, by id; `attlas methods` lists them.
    #[arg(value_name = "ID")]
    pub(crate) id: String,
    /// Hidden states, an array [tokens, width] or [grid …, width]: .npy, .npz or .safetensors.
    #[arg(long, value_name = "FILE")]
    pub(crate) input: PathBuf,
    /// Name of the array, if the file has several.
    #[arg(long, value_name = "NAME")]
    pub(crate) tensor: Option<String>,
    /// Hidden states of another sequence, [tokens, width], for the keys and values of cross attention.
    #[arg(long, value_name = "FILE", conflicts_with = "causal")]
    pub(crate) context: Option<PathBuf>,
    /// Weights: a .safetensors file with NAME or NAME.weight, outputs × inputs, and NAME.bias.
    #[arg(long, value_name = "FILE", group = "source")]
    pub(crate) weights: Option<PathBuf>,
    /// Draw random weights from this seed.
    #[arg(long, value_name = "SEED", group = "source")]
    pub(crate) random: Option<u64>,
    /// Write the output, in the shape of the input: .npy.
    #[arg(long, short, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
    /// Query heads.
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = count)]
    pub(crate) heads: usize,
    /// Key heads; by default one for each query head.
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) kv_heads: Option<usize>,
    /// Width of one head's queries and keys; by default the input width divided by the number of heads.
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) d: Option<usize>,
    /// Width of one head's values; by default that of its queries.
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) d_v: Option<usize>,
    /// Use a causal mask: a token attends to itself and to earlier tokens.
    #[arg(long)]
    pub(crate) causal: bool,
    /// Set a parameter of the layer, such as dims=32x32; may be repeated.
    #[arg(long, value_name = "PARAM=VALUE")]
    pub(crate) set: Vec<String>,
}
