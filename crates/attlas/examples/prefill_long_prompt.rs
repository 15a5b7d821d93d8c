//! Time saved by a clustering method on the prefill of a long causal prompt, and its cost in accuracy.
//! `cargo run --release -p attlas --features testkit --example prefill_long_prompt`.

use attlas::metrics::relative_frobenius;
use attlas::testkit::{Case, How, Ran, run_with};
use attlas::{Options, Problem, Schedule, registry};
use std::time::Instant;

/// Ids and settings, which set how many keys a query may attend to beyond the exact part near the diagonal.
const METHODS: [(&str, &[(&str, &str)]); 4] = [
    ("smyrf", &[("rounds", "4"), ("block", "64"), ("min_len", "512")]),
    ("hyper", &[("block", "128"), ("samples", "128"), ("n_min", "512")]),
    ("reformer", &[("rounds", "4"), ("block", "64")]),
    ("multipole", &[("budget", "256"), ("window", "1024")]),
];

fn timed(id: &str, pairs: &[(&str, &str)], case: &Case) -> attlas::Result<(Ran, f64)> {
    let options = pairs.iter().fold(Options::new(), |o, (k, v)| o.with(k, *v));
    let plan = registry::method(id)?.plan(&case.problem, &options)?;
    let how = How { schedule: Schedule::default(), lse: false, ..How::default() };
    let start = Instant::now();
    let ran = run_with(&*plan, case, how)?;
    Ok((ran, start.elapsed().as_secs_f64()))
}

fn main() -> attlas::Result<()> {
    println!("{:>6} {:10} {:>8} {:>13} {:>9}", "tokens", "method", "error", "keys per row", "time");
    for n in [2048, 4096, 8192] {
        // Prompts of a trained model have structure: the tokens here lie around 64 centres.
        let case = Case::clustered(Problem::new(1, n, 64).causal(), 1).cast_f32();
        let (exact, seconds) = timed("exact", &[], &case)?;
        let row = |id: &str, ran: &Ran, seconds: f64| {
            let error = relative_frobenius(&ran.o, &exact.o);
            let keys = ran.info.keys_visited / n as u64;
            println!("{n:>6} {id:10} {error:>8.4} {keys:>13} {:>6.1} ms", 1e3 * seconds);
        };
        row("exact", &exact, seconds);
        for (id, pairs) in METHODS {
            let (ran, seconds) = timed(id, pairs, &case)?;
            row(id, &ran, seconds);
        }
    }
    Ok(())
}
