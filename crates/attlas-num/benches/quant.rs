//! Products with quantised weights at the shapes of a 135M-parameter model, one row and many.
//!
//! `cargo bench -p attlas-num --bench quant`

use attlas_num::kernels::quant::{Compute, Format, Job, WeightRef, narrow, products_in};
use attlas_num::{MatRef, Scratch};
use std::time::Instant;

/// Returns the median seconds of a call.
fn median_seconds(mut call: impl FnMut()) -> f64 {
    call();
    let mut times: Vec<f64> = (0..9)
        .map(|_| {
            let start = Instant::now();
            call();
            start.elapsed().as_secs_f64()
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn main() {
    for threads in [1, rayon::current_num_threads()] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        pool.expect("a thread pool").install(|| run(threads));
    }
}

fn run(threads: usize) {
    let scratch = Scratch::new();
    let format = Format::Q4_1;
    let start = Instant::now();
    let (operations, _) = narrow::burn(narrow::Isa::best(), 2_000_000);
    println!("eight bits, one thread: {:.0} Gop/s", 1e-9 * operations as f64 / start.elapsed().as_secs_f64());
    for compute in Compute::ALL {
        for (rows, cols) in [(576, 576), (192, 576), (1536, 576), (576, 1536), (49152, 576)] {
            let format = if rows == 49152 { Format::Q8_0 } else { format };
            // Enough copies to exceed the cache.
            let size = format.bytes_of(rows * cols).unwrap_or_default();
            let copies = (96 << 20) / size;
            let bytes: Vec<u8> = (0..size * copies).map(|i| (i * 7) as u8 & 0x3b).collect();
            let weights: Vec<WeightRef<'_>> =
                bytes.chunks_exact(size).filter_map(|b| WeightRef::new(b, format, rows, cols)).collect();
            for n in [1, 4, 16, 32, 2048] {
                let x = vec![0.5f32; n * cols];
                let mut out = vec![0.0; n * rows];
                if n * rows > 20_000_000 {
                    continue;
                }
                let calls = if n > 64 { 1 } else { copies.min(100) };
                let seconds = median_seconds(|| {
                    for weight in &weights[..calls] {
                        let mut jobs = [Job { weight: *weight, out: &mut out }];
                        products_in(compute, MatRef::new(&x, n, cols), &mut jobs, &scratch);
                    }
                }) / calls as f64;
                println!(
                    "{threads} threads {compute} {format} {rows}×{cols} n={n}: {:.1} µs, {:.1} GB/s, {:.1} Gflop/s",
                    seconds * 1e6,
                    size as f64 / seconds * 1e-9,
                    2e-9 * (n * rows * cols) as f64 / seconds
                );
            }
        }
    }
}
