//! Speed of tensor methods as shares of this machine's peak: third-order and windowed two-simplicial attention,
//! decoding on factors, alternating least squares, and a Tucker decomposition of the size of a BERT.
//!
//! `cargo bench -p attlas-lab --bench tensor`, or with the names of some parts: `-- pairs decode als tucker`. It
//! produces the figures of `docs/benchmarks/tensor.md`.

use attlas::conversions::collaborative;
use attlas::layer::{Dense, LayerShape, Linear};
use attlas::layers::common::third::{Form, Pairwise};
use attlas::layers::tensor_product::factors::{Query, Side, Sizes, attend_factors};
use attlas::{Mat, MatRef, Options, Out, Problem, Qkv, Schedule, TensorMut, TensorRef, Workspace, registry};
use attlas_lab::machine::Machine;
use attlas_num::kernels::Band;
use attlas_num::tensor::{Tensor, tucker};
use std::borrow::Cow;
use std::hint::black_box;
use std::ops::Range;
use std::time::Instant;

/// Returns pseudo-random numbers.
fn numbers(n: usize, seed: u32) -> Vec<f32> {
    let mut x = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 17;
        x ^= x << 5;
        x as f32 / u32::MAX as f32 - 0.5
    };
    (0..n).map(|_| next()).collect()
}

fn seconds(mut call: impl FnMut()) -> f64 {
    let start = Instant::now();
    call();
    start.elapsed().as_secs_f64()
}

/// Returns the best time of several calls, least disturbed by other programs.
fn best(times: usize, mut call: impl FnMut()) -> f64 {
    call();
    (0..times).map(|_| seconds(&mut call)).fold(f64::INFINITY, f64::min)
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let wanted = |name: &str| words.is_empty() || words.iter().any(|w| w == name);
    let ws = Workspace::new(Schedule::default()).expect("a thread pool");
    let machine = Machine::measure(&ws, 256 << 20);
    let product = matrix_product(&ws);
    println!(
        "{}, {} threads, {}: {product:.1} Gflop/s in matrix products, {:.1} in multiply-adds; copies {:.1} GB/s, reads {:.1}",
        machine.cpu,
        machine.threads,
        machine.isa,
        machine.fma_gflops.unwrap_or(f64::NAN),
        machine.copy_gbs,
        machine.read_gbs
    );
    if wanted("pairs") {
        pairs(&ws, product);
    }
    if wanted("decode") {
        decode(&ws, &machine);
    }
    if wanted("als") {
        sweeps(&ws);
    }
    if wanted("tucker") {
        decomposition(&ws);
    }
}

/// Returns billions of operations per second of the library's matrix product.
fn matrix_product(ws: &Workspace) -> f64 {
    let n = 1536;
    let map = Dense::new(Mat::from_vec(numbers(n * n, 1), n, n));
    let (x, mut out) = (numbers(n * n, 2), vec![0.0; n * n]);
    let time = best(5, || ws.install(|cx| map.apply(MatRef::new(&x, n, n), &mut out, cx)));
    2e-9 * (n as f64).powi(3) / time
}

/// Times third-order attention over all pairs, in both of its forms, and over windows of 512 and 32 tokens.
fn pairs(ws: &Workspace, product: f64) {
    let window = |w: isize| Band { lower: Some(1 - w), upper: Some(0) };
    for d in [64, 128] {
        let cases = [
            ("third order, all pairs", 256, Band::ALL, Band::ALL, Form::Trilinear),
            ("third order, causal", 384, Band::causal(0), Band::causal(0), Form::Trilinear),
            ("strassen, all pairs", 256, Band::ALL, Band::ALL, Form::Strassen),
            ("strassen, causal", 384, Band::causal(0), Band::causal(0), Form::Strassen),
            ("windows of 32 and 512", 1024, window(32), window(512), Form::Trilinear),
        ];
        for (name, n, band1, band2, form) in cases {
            let x: Vec<Vec<f32>> = (0..5).map(|i| numbers(n * d, 10 + i)).collect();
            let m = |i: usize| MatRef::new(&x[i], n, d);
            let p = Pairwise {
                q: m(0),
                k1: m(1),
                k2: m(2),
                v1: m(3),
                v2: m(4),
                scale: 1.0 / (d as f32).sqrt(),
                band1,
                band2,
                form,
            };
            let (mut out, mut lse) = (vec![0.0; n * d], vec![0.0; n]);
            let time = best(3, || ws.install(|cx| p.run(&mut out, &mut lse, cx)));
            black_box(&out);
            let seen = |i: usize| band1.range(i, n).len() * band2.range(i, n).len();
            // Over all pairs, the Strassen form is matrix products: one per feature of the values, and one more.
            let products = form == Form::Strassen && band1 == Band::ALL;
            let work = if products { 2 * (d + 1) } else { 4 * d };
            let rate = 1e-9 * (work * (0..n).map(seen).sum::<usize>()) as f64 / time;
            println!(
                "{name}, n {n}, d {d}: {time:.3} s, {rate:.1} Gflop/s, {:.0} % of a matrix product",
                100.0 * rate / product
            );
        }
    }
}

/// Times one token over a long cache of factors, and over keys and values of the same heads.
fn decode(ws: &Workspace, machine: &Machine) {
    let (h, d) = (32, 64);
    for n in [32 << 10, 128 << 10] {
        for (rank_q, rank) in [(16, 1), (8, 1), (16, 2)] {
            let (a, b) = (numbers(2 * n * rank * h, 20), numbers(2 * n * rank * d, 21));
            let (a_q, b_q) = (numbers(rank_q * h, 22), numbers(rank_q * d, 23));
            let sizes = Sizes { heads: h, d, d_v: d, scale: 0.125f32 };
            let side = |first: usize, t: Range<usize>| Side {
                rank,
                a: &a[(first + t.start) * rank * h..(first + t.end) * rank * h],
                a_fixed: false,
                b: Cow::Borrowed(&b[(first + t.start) * rank * d..(first + t.end) * rank * d]),
            };
            let load = |t: Range<usize>| (side(0, t.clone()), side(n, t));
            let query = Query::Factors { a: &a_q, b: &b_q, rank: rank_q };
            let time = best(7, || {
                black_box(ws.install(|cx| attend_factors(&sizes, &query, n, &load, cx)));
            });
            let rate = 8e-9 * (n * rank * (h + d)) as f64 / time;
            println!(
                "factors ({rank_q}, {rank}, {rank}), {n} tokens, {h} heads of {d}: {:.2} ms, {rate:.1} GB/s of cache, {:.0} % of a copy",
                1e3 * time,
                100.0 * rate / machine.copy_gbs
            );
        }
    }
    let n = 32 << 10;
    let (q, k, v) = (numbers(h * d, 30), numbers(h * n * d, 31), numbers(h * n * d, 32));
    let mut out = vec![0.0f32; h * d];
    let problem = Problem::new(h, 1, d).with_lens(1, n).causal();
    let exact = registry::baseline().plan(&problem, &Options::new()).expect("exact attention");
    let mut own = Workspace::new(*ws.schedule()).expect("a thread pool");
    let time = best(5, || {
        let cube = |x, rows| TensorRef::bhnd(x, [1, h, rows, d]).expect("a shape");
        let inputs = Qkv::new(cube(&q, 1), cube(&k, n), cube(&v, n));
        let output = Out::new(TensorMut::bhnd(&mut out, [1, h, 1, d]).expect("a shape"));
        exact.execute(&inputs.into(), &mut output.into(), &mut own).expect("exact attention");
    });
    println!("exact attention, {n} tokens, {h} heads of {d}: {:.2} ms", 1e3 * time);
}

/// Times sweeps of the decomposition behind collaborative attention, at the sizes of a BERT-base layer.
fn sweeps(ws: &Workspace) {
    let shape = LayerShape { d_model: 768, n_heads: 12, n_kv_heads: 12, d: 64, d_v: 64 };
    let weight = |seed| Dense::new(Mat::from_vec(numbers(768 * 768, seed), 768, 768));
    let (q, k) = (weight(40), weight(41));
    let run = |iters: usize| {
        let params = collaborative::Params { rank: Some(384), iters, tol: 0.0, ..Default::default() };
        seconds(|| {
            let made = ws.install(|_| collaborative::convert(&shape, &params, &q, &k, None));
            black_box(made.expect("a conversion"));
        })
    };
    run(1);
    let (few, many) = (run(1), run(9));
    println!("least squares, 12 × 768 × 768, rank 384: {:.3} s a sweep", (many - few) / 8.0);
}

/// Times ST-HOSVD of all blocks of BERT-base.
fn decomposition(ws: &Workspace) {
    let t = Tensor::new(&[144, 768, 768], numbers(144 * 768 * 768, 50)).expect("as many as the sizes say");
    let ranks = tucker::Ranks::Given(vec![72, 384, 384]);
    let time = seconds(|| {
        let fit = ws.install(|_| tucker::decompose(&t, &ranks, &tucker::Options::default()));
        black_box(fit.expect("a decomposition"));
    });
    println!("ST-HOSVD, 144 × 768 × 768 to 72 × 384 × 384: {time:.1} s");
}
