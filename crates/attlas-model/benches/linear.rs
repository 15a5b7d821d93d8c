//! All linear layers of SmolLM2-135M, for one token and for a prompt.
//!
//! `cargo bench -p attlas-model --bench linear`, after `scripts/fetch-models`.

use attlas_model::linear::{Linear, apply_all};
use attlas_model::{Model, Weights};
use attlas_num::{MatRef, Scratch};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Median and spread of the seconds of a call.
fn seconds(repeats: usize, mut call: impl FnMut()) -> (f64, f64) {
    call();
    let mut times: Vec<f64> = (0..repeats)
        .map(|_| {
            let start = Instant::now();
            call();
            start.elapsed().as_secs_f64()
        })
        .collect();
    times.sort_by(f64::total_cmp);
    (times[repeats / 2], times[repeats - 1] - times[0])
}

fn main() {
    let folder = std::env::var_os("ATTLAS_MODELS")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.models"), PathBuf::from);
    let model = Model::open(&folder.join("smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"))
        .expect("run scripts/fetch-models");
    let Weights::Decoder(w) = &model.weights else { return };
    let (d, f, q, kv) = (576, 1536, 576, 192);
    let scratch = Scratch::new();
    let pass = |n: usize, logits: usize| {
        let x = vec![0.25f32; n * f];
        let at = |cols: usize| MatRef::new(&x[..n * cols], n, cols);
        let mut y: [Vec<f32>; 3] = [q.max(f), kv.max(f), kv].map(|width| vec![0.0; n * width]);
        let mut out = vec![0.0; logits * model.config.vocab];
        for layer in &w.layers {
            let [a, b, c] = &mut y;
            let (a, b, c) = (&mut a[..], &mut b[..], &mut c[..]);
            let mut qkv: [(&Linear, &mut [f32]); 3] =
                [(&layer.q, &mut a[..n * q]), (&layer.k, &mut b[..n * kv]), (&layer.v, &mut c[..n * kv])];
            apply_all(&mut qkv, at(d), &scratch);
            layer.o.apply(at(q), &mut a[..n * d], &scratch);
            apply_all(&mut [(&layer.gate, &mut a[..n * f]), (&layer.up, &mut b[..n * f])], at(d), &scratch);
            layer.down.apply(at(f), &mut a[..n * d], &scratch);
        }
        w.output.apply(MatRef::new(&x[..logits * d], logits, d), &mut out, &scratch);
    };
    for threads in [1, rayon::current_num_threads()] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a thread pool");
        pool.install(|| {
            let (decode, spread) = seconds(25, || pass(1, 1));
            println!(
                "{threads} threads, one token: {:.2} ms ± {:.2}, {:.0} tokens/s",
                decode * 1e3,
                spread * 1e3,
                1.0 / decode
            );
            let n = 2048;
            let (prefill, spread) = seconds(3, || pass(n, 1));
            let flops = 2.0 * n as f64 * 30.0 * (d * (q + 2 * kv + d) + 3 * d * f) as f64;
            println!(
                "{threads} threads, {n} tokens: {:.2} s ± {:.2}, {:.0} tokens/s, {:.0} Gflop/s",
                prefill,
                spread,
                n as f64 / prefill,
                flops / prefill * 1e-9
            );
        });
    }
}
