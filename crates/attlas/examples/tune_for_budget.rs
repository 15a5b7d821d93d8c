//! Which method reaches an error of 5 % with the fewest scores, and at which budget?
//! `cargo run --release -p attlas --example tune_for_budget`.

use attlas::method::{Ladder, Needs};
use attlas::metrics::relative_frobenius;
use attlas::{
    Attention, Options, Out, Problem, Qkv, Result, TensorMut, TensorRef, Workspace, attention, registry,
};

const N: usize = 1024;
const D: usize = 32;

/// Tokens around sixteen centres: structure of the kind that trained models have.
fn tokens(salt: f64) -> Vec<f32> {
    let wave = |x: f64| (12.9898 * x + salt).sin() * 43758.5453;
    let unit = |x: f64| 2.0 * (wave(x) - wave(x).floor()) - 1.0;
    let row =
        |i: usize| (0..D).map(move |c| (3.0 * unit(((i * 7) % 16 * D + c) as f64), unit((i * D + c) as f64)));
    (0..N).flat_map(row).map(|(centre, noise)| (centre + 0.5 * noise) as f32).collect()
}

fn main() -> Result<()> {
    let (x, v) = (tokens(0.0), tokens(1.0));
    let problem = Problem::new(1, N, D).causal();
    let exact = attention(&x, &x, &v, &Attention { causal: true, ..Attention::new(1, D) })?;
    let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
    let (dims, mut ws) = ([1, 1, N, D], Workspace::single()?);
    let (q, v) = (TensorRef::bhnd(&x, dims)?, TensorRef::bhnd(&v, dims)?);
    println!("{:16} {:>18} {:>8} {:>12}", "method", "budget", "error", "scores a row");
    for method in registry::METHODS.iter().filter(|m| m.claims.softmax && m.claims.needs == Needs::Nothing) {
        let names = method.tunable.iter().filter(|t| t.ladder == Ladder::UpToKeys).map(|t| t.param);
        let names: Vec<&str> = names.collect();
        let mut budget = if names.is_empty() { N } else { 16 };
        while budget <= N {
            let options = names.iter().fold(Options::new(), |o, name| o.with(name, budget));
            // Skips budgets that a method refuses and masks that it lacks.
            if let Ok(plan) = method.plan(&problem, &options) {
                let mut o = vec![0.0f32; N * D];
                let mut out = Out::new(TensorMut::bhnd(&mut o, dims)?).into();
                let info = plan.execute(&Qkv::new(q, q, v).into(), &mut out, &mut ws)?;
                let error = relative_frobenius(&wide(&o), &wide(&exact));
                if error <= 0.05 {
                    let scores = info.keys_visited / N as u64;
                    println!("{:16} {:>18} {error:>8.4} {scores:>12}", method.id, options.to_string());
                    break;
                }
            }
            budget *= 2;
        }
    }
    Ok(())
}
