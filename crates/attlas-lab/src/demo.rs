//! Embedded queries, keys and values of a real model: everything runs without a download.
//!
//! SmolLM2-135M-Instruct (30 layers, 9 query heads over 3 key heads, width 64) reading the first 8192 tokens of *Alice's
//! Adventures in Wonderland*: key head 2 and two of the three query heads that share it (6 and 7), keys after rotation, in
//! layers 5 and 29. Both layers attend far back: a window of the last 704 tokens misses half of layer 5 and a quarter
//! of layer 29. They were chosen because methods have about the same errors on them as over all layers.
//! `scripts/make-demo` wrote the file. Numbers are rounded to half precision (11 significant bits); errors are measured
//! against exact attention on the rounded numbers. Licences of model and text: `data/LICENSE-demo.md`.

use crate::workload::Workload;
use crate::{Result, trace};
use std::path::Path;

static TRACE: &[u8] = include_bytes!("../data/demo.safetensors");

/// Loads the embedded trace.
pub fn load() -> Result<Workload> {
    trace::read_bytes(TRACE, Path::new("demo"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use attlas::Mask;

    #[test]
    fn the_demo_is_a_real_trace_within_its_size() {
        assert!(TRACE.len() <= 9 << 20, "{} bytes", TRACE.len());
        let demo = load().unwrap();
        assert_eq!(demo.mask, Mask::Causal);
        assert!(demo.layers.len() >= 2);
        for layer in &demo.layers {
            let p = &layer.problem;
            assert_eq!((p.n_heads, p.n_kv_heads, p.n_q, p.n_k, p.d, p.d_v), (2, 1, 8192, 8192, 64, 64));
            assert_eq!(p.scale, 0.125);
        }
        assert!(demo.metadata["model"].contains("SmolLM2-135M-Instruct"));
        assert_eq!(demo.metadata["tokens"], "8192");
        assert_eq!(demo.metadata["text_sha256"].len(), 64);
    }
}
