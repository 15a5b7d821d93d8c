//! Speed of the kernels on this machine, as a share of its measured peak.
//!
//! `cargo run --release -p xtask --example kernel_speed [quick | decode | isa]`. Rates count
//! `4 · N² · d` operations per attention (half under the causal mask) and leave out the exponentials.
//! Peak and rate are measured alternately in the same run: a change of clock speed then affects both.

use attlas_num::kernels::{self, Attend, Band, Isa, Op, Precision};
use attlas_num::rng::StreamKey;
use attlas_num::{Mat, MatRef, Real, Scratch};
use std::hint::black_box;
use std::time::Instant;

/// Shortest time of several runs, in seconds.
fn best(runs: usize, mut f: impl FnMut()) -> f64 {
    let time = |f: &mut dyn FnMut()| {
        let start = Instant::now();
        f();
        start.elapsed().as_secs_f64()
    };
    (0..runs).map(|_| time(&mut f)).fold(f64::INFINITY, f64::min)
}

fn normal<T: Real>(seed: u64, rows: usize, cols: usize) -> Mat<T> {
    let mut rng = StreamKey::new(seed).rng();
    // Uniform with the variance of a normal variate: cheaper to draw, and equivalent for timing.
    Mat::from_fn(rows, cols, |_, _| T::from_f64((rng.uniform() - 0.5) * 12f64.sqrt()))
}

fn peak<T: Real>(isa: Isa) -> f64 {
    let mut flops = 0;
    let seconds = best(3, || flops = black_box(kernels::fma_burn::<T>(isa, black_box(400_000))).0);
    flops as f64 / seconds
}

struct Shape {
    n: usize,
    d: usize,
    causal: bool,
}

/// Operations per second of one attention, its rows split over `threads`.
fn attend<T: Real>(isa: Isa, precision: Precision, shape: &Shape, threads: usize, runs: usize) -> f64 {
    let &Shape { n, d, causal } = shape;
    let (q, k, v) = (normal::<T>(1, n, d), normal::<T>(2, n, d), normal::<T>(3, n, d));
    let (mut out, mut lse) = (vec![T::ZERO; n * d], vec![T::ZERO; n]);
    let scratch = Scratch::new();
    let band = if causal { Band::causal(0) } else { Band::ALL };
    let call = |rows: std::ops::Range<usize>, out: &mut [T], lse: &mut [T]| {
        Attend {
            q: q.as_ref().sub_rows(rows.clone()),
            k: k.as_ref(),
            v: v.as_ref(),
            scale: T::from_f64(1.0 / (d as f64).sqrt()),
            bias: None,
            band: band.from_row(rows.start),
            tile_k: 0,
            isa,
            precision,
            decode: true,
            softcap: None,
        }
        .run(&scratch, out, lse);
    };
    let seconds = best(runs, || {
        if threads == 1 {
            call(0..n, &mut out, &mut lse);
        } else {
            // Under the causal mask the first 1/√2 of the rows are half of the work.
            let half = if causal { (n as f64 * 0.5f64.sqrt()) as usize } else { n / 2 };
            let (out, rest) = out.split_at_mut(half * d);
            let (lse, lse_rest) = lse.split_at_mut(half);
            std::thread::scope(|scope| {
                scope.spawn(|| call(0..half, out, lse));
                call(half..n, rest, lse_rest);
            });
        }
        black_box(&mut out);
    });
    let pairs = if causal { n * (n + 1) / 2 } else { n * n };
    4.0 * pairs as f64 * d as f64 / seconds
}

fn gemm<T: Real>(isa: Isa, n: usize) -> f64 {
    let (a, b, mut c) = (normal::<T>(1, n, n), normal::<T>(2, n, n), vec![T::ZERO; n * n]);
    let scratch = Scratch::new();
    let seconds = best(4, || {
        let (a, b) = (Op::N(a.as_ref()), Op::N(b.as_ref()));
        kernels::gemm(isa, T::ONE, a, b, T::ZERO, black_box(&mut c), n, &scratch);
    });
    2.0 * (n as f64).powi(3) / seconds
}

fn table<T: Real>(name: &str, isa: Isa, precision: Precision, sizes: &[usize]) {
    let ceiling = peak::<T>(isa);
    let rate = gemm::<T>(isa, 1024);
    println!(
        "{name} {isa}: peak {:.1} GF/s, gemm {:.1} GF/s ({:.1} %)",
        ceiling / 1e9,
        rate / 1e9,
        rate / ceiling * 100.0
    );
    for &d in &[64, 128] {
        for &n in sizes {
            for causal in [false, true] {
                let runs = (1 << 31) / (n * n * d) + 2;
                let shape = Shape { n, d, causal };
                let ceiling = peak::<T>(isa);
                let one = attend::<T>(isa, precision, &shape, 1, runs);
                let two = attend::<T>(isa, precision, &shape, 2, runs);
                println!(
                    "  d {d:3} N {n:5} {:6}  1 thread {:6.1} GF/s {:5.1} %   2 threads {:6.1} GF/s {:5.1} %",
                    if causal { "causal" } else { "full" },
                    one / 1e9,
                    one / ceiling * 100.0,
                    two / 1e9,
                    two / (2.0 * ceiling) * 100.0
                );
            }
        }
    }
}

/// Prints the share of read bandwidth for a few rows over a long cache.
fn decode() {
    let (n_k, d) = (32_768, 128);
    let (k, v) = (normal::<f32>(2, n_k, d), normal::<f32>(3, n_k, d));
    let bytes = (2 * n_k * d * 4) as f64;
    let (scratch, long) = (Scratch::new(), normal::<f32>(9, 1 << 14, 1 << 11));
    for rows in [1, 2, 4, 8] {
        let q = normal::<f32>(1, rows, d);
        let (mut out, mut lse) = (vec![0.0; rows * d], vec![0.0; rows]);
        let mut fastest = (f64::INFINITY, f64::INFINITY);
        for _ in 0..8 {
            // Reading the long array also evicts keys and values from the caches.
            let read = best(1, || {
                black_box(kernels::read_sum(black_box(long.data())));
            }) / (long.data().len() * 4) as f64;
            let job = Attend {
                q: q.as_ref(),
                k: k.as_ref(),
                v: v.as_ref(),
                scale: 0.09,
                bias: None,
                band: Band::ALL,
                tile_k: 0,
                isa: Isa::best(),
                precision: Precision::Full,
                decode: true,
                softcap: None,
            };
            let seconds = best(1, || job.run(&scratch, &mut out, &mut lse)) / bytes;
            fastest = (fastest.0.min(read), fastest.1.min(seconds));
        }
        let (read, seconds) = fastest;
        println!(
            "decode {rows} rows: {:.1} GB/s, {:.0} % of the {:.1} GB/s that one thread reads",
            1e-9 / seconds,
            read / seconds * 100.0,
            1e-9 / read
        );
    }
    let x = vec![1.0f32; d];
    let mut y = vec![0.0; n_k];
    let seconds = best(5, || kernels::matvec(MatRef::new(k.data(), n_k, d), &x, black_box(&mut y)));
    println!("matvec {:.1} GB/s", bytes / 2e9 / seconds);
}

fn main() {
    let what = std::env::args().nth(1).unwrap_or_default();
    match what.as_str() {
        "probe" => {
            for (n, causal) in [(2048, false), (1024, true)] {
                for d in [64, 128] {
                    let shape = Shape { n, d, causal };
                    let (mut ceiling, mut rate) = (0f64, 0f64);
                    for _ in 0..12 {
                        ceiling = ceiling.max(peak::<f32>(Isa::best()));
                        rate = rate.max(attend::<f32>(Isa::best(), Precision::Full, &shape, 1, 4));
                    }
                    println!(
                        "{n} {d} {causal}: {:.1} of {:.1} = {:.1} %",
                        rate / 1e9,
                        ceiling / 1e9,
                        rate / ceiling * 100.0
                    );
                }
            }
            println!("gemm {:.1}", (0..6).map(|_| gemm::<f32>(Isa::best(), 1024)).fold(0.0, f64::max) / 1e9);
        }
        "decode" => decode(),
        "quick" => table::<f32>("f32", Isa::best(), Precision::Full, &[1024, 4096]),
        "isa" => {
            for isa in Isa::available().into_iter().skip(1) {
                table::<f32>("f32", isa, Precision::Full, &[1024, 4096]);
                table::<f64>("f64", isa, Precision::Full, &[1024]);
            }
        }
        "bf16" => table::<f32>("bf16", Isa::best(), Precision::Bf16, &[1024, 4096]),
        _ => table::<f32>("f32", Isa::best(), Precision::Full, &[1024, 4096, 16_384]),
    }
}
