//! Which methods support a problem, and how far are they from exact attention?
//! `cargo run -p attlas --features testkit --example compare_methods`.

use attlas::metrics::relative_frobenius;
use attlas::testkit::{Case, How, reference, run_with};
use attlas::{Options, Problem, registry};

fn main() -> attlas::Result<()> {
    let case = Case::gaussian(Problem::new(4, 512, 32).with_kv_heads(2).causal(), 7);
    let (exact, _) = reference(&case);
    for method in registry::METHODS {
        match method.plan(&case.problem, &Options::new()) {
            Ok(plan) => {
                let how = How { lse: false, ..How::default() };
                let ran = run_with(&*plan, &case, how)?;
                let error = relative_frobenius(&ran.o, &exact);
                println!("{:16} error {error:9.2e}  keys {:>8}", method.id, ran.info.keys_visited);
            }
            Err(refusal) => println!("{:16} {refusal}", method.id),
        }
    }
    Ok(())
}
