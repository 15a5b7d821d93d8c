//! A layer on data.

use super::shared::count;
use clap::Args;
use std::path::PathBuf;

#[derive(Args, Clone, Debug)]
#[command(group = clap::ArgGroup::new("source").required(true))]
pub(crate) struct LayerArgs {
    /// The layer: one of those that `attlas methods` lists.
    #[arg(value_name = "ID")]
    pub(crate) id: String,
    /// Hidden states, an array [tokens, width] or [grid …, width]: .npy, .npz or .safetensors.
    #[arg(long, value_name = "FILE")]
    pub(crate) input: PathBuf,
    /// Which array of a file that holds several.
    #[arg(long, value_name = "NAME")]
    pub(crate) tensor: Option<String>,
    /// Hidden states of another sequence, [tokens, width], that keys and values are made of: cross attention.
    #[arg(long, value_name = "FILE", conflicts_with = "causal")]
    pub(crate) context: Option<PathBuf>,
    /// Weights: a .safetensors file with NAME or NAME.weight, outputs × inputs, and NAME.bias.
    #[arg(long, value_name = "FILE", group = "source")]
    pub(crate) weights: Option<PathBuf>,
    /// Random weights from this seed.
    #[arg(long, value_name = "SEED", group = "source")]
    pub(crate) random: Option<u64>,
    /// Write the output, in the shape of the input: .npy.
    #[arg(long, short, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
    /// Query heads.
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = count)]
    pub(crate) heads: usize,
    /// Key heads; as many as query heads by default.
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) kv_heads: Option<usize>,
    /// Width of queries and keys of one head; the width of the input over the heads by default.
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) d: Option<usize>,
    /// Width of values of one head; that of queries by default.
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) d_v: Option<usize>,
    /// With a causal mask: a token sees itself and those before it.
    #[arg(long)]
    pub(crate) causal: bool,
    /// A parameter of the layer, such as dims=32x32; may be repeated.
    #[arg(long, value_name = "PARAM=VALUE")]
    pub(crate) set: Vec<String>,
}
