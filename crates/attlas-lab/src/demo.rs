//! Queries, keys and values of a real model, embedded, so that everything runs without a download.
//!
//! SmolLM2-135M-Instruct (30 layers, 9 query heads over 3 key heads, width 64) reading the first 2048 tokens
//! of *Alice's Adventures in Wonderland*: of four layers with contrasting attention, one key head and the three
//! query heads that share it, keys after rotation. `scripts/make-demo` wrote the file; numbers are rounded to half
//! precision (11 significant bits, a relative error of at most $2^{-11}$), which moves attention outputs by about as
//! much. Licences of model and text: `data/LICENSE-demo.md`.

use crate::source::Workload;
use crate::{Result, trace};
use std::path::Path;

static TRACE: &[u8] = include_bytes!("../data/demo.safetensors");

/// The embedded trace.
pub fn load() -> Result<Workload> {
    trace::read_bytes(TRACE, Path::new("demo"))
}
