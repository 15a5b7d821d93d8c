//! Times of the backward pass of exact attention beside those of the forward pass.
//!
//! `cargo run --release -p xtask --example gradient_speed -- 4096 2`: tokens and threads.

use attlas::gradient::Pass;
use attlas::{Mask, Options, Out, Problem, Qkv, Schedule, TensorMut, TensorRef, Workspace, registry};
use attlas_num::rng::StreamKey;
use std::time::Instant;

fn main() -> attlas::Result<()> {
    let mut words = std::env::args().skip(1).map(|w| w.parse::<usize>());
    let mut number = |default| words.next().and_then(Result::ok).unwrap_or(default);
    let (n, threads) = (number(4096), number(1));
    let mut ws = Workspace::new(Schedule { threads, ..Schedule::default() })?;
    println!("{n} tokens, {} threads, f32; medians of 7", ws.schedule().threads);
    println!("heads  d    mask    forward   backward  ratio  scratch");
    for (heads, kv_heads, d, mask) in [
        (1, 1, 64, Mask::None),
        (1, 1, 64, Mask::Causal),
        (4, 4, 64, Mask::Causal),
        (4, 1, 64, Mask::Causal),
        (2, 2, 128, Mask::Causal),
    ] {
        let p = Problem { mask, ..Problem::new(heads, n, d).with_kv_heads(kv_heads) };
        let fill = |name: &str, heads: usize| -> Vec<f32> {
            let mut rng = StreamKey::new(1).named(name).rng();
            (0..heads * n * d).map(|_| rng.normal() as f32).collect()
        };
        let (q, k, v, g) = (fill("q", heads), fill("k", kv_heads), fill("v", kv_heads), fill("g", heads));
        let (many, few) = ([1, heads, n, d], [1, kv_heads, n, d]);
        let x = Qkv::new(TensorRef::bhnd(&q, many)?, TensorRef::bhnd(&k, few)?, TensorRef::bhnd(&v, few)?);
        let plan = registry::baseline().plan(&p, &Options::new())?;
        let (mut o, mut lse) = (vec![0.0f32; heads * n * d], vec![0.0f32; heads * n]);
        let (mut forward, mut backward) = (Vec::new(), Vec::new());
        let mut grads = [many, few, few].map(|dims| vec![0.0f32; dims.iter().product()]);
        ws.scratch().reset_peak();
        for _ in 0..8 {
            let start = Instant::now();
            let out = Out::with_lse(TensorMut::bhnd(&mut o, many)?, &mut lse);
            plan.execute(&x.into(), &mut out.into(), &mut ws)?;
            forward.push(start.elapsed().as_secs_f64());
            let [dq, dk, dv] = &mut grads;
            let pass = Pass {
                x,
                o: TensorRef::bhnd(&o, many)?,
                lse: &lse,
                d_o: TensorRef::bhnd(&g, many)?,
                d_lse: None,
                dq: TensorMut::bhnd(dq, many)?,
                dk: TensorMut::bhnd(dk, few)?,
                dv: TensorMut::bhnd(dv, few)?,
            };
            let start = Instant::now();
            plan.backward(&mut pass.into(), &mut ws)?;
            backward.push(start.elapsed().as_secs_f64());
        }
        // The first run of each wakes threads and allocates memory.
        let median = |times: &mut Vec<f64>| {
            times.remove(0);
            times.sort_by(f64::total_cmp);
            times[times.len() / 2]
        };
        let (f, b) = (median(&mut forward), median(&mut backward));
        let scratch = ws.scratch().peak_bytes() as f64 / f64::from(1 << 20);
        let (f_ms, b_ms, ratio) = (1e3 * f, 1e3 * b, b / f);
        println!(
            "{heads}/{kv_heads}    {d:<4} {mask:<7} {f_ms:7.1} ms {b_ms:7.1} ms  {ratio:5.2}  {scratch:6.1} MiB"
        );
    }
    Ok(())
}
