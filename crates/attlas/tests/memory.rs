//! Diagnostics of long heads store no matrix of scores. The test has its own process because it counts allocations.

use attlas::diagnostics::{Head, HeadReport, Settings, inspect};
use attlas::testkit::Case;
use attlas::{MatRef, Problem, Schedule, Workspace};

#[global_allocator]
static ALLOCATOR: attlas_num::kernels::Counting = attlas_num::kernels::Counting;

/// Inspects a causal head of `n` tokens; also returns the peak of allocated bytes, inputs included.
fn watched(n: usize, d: usize, settings: &Settings) -> (HeadReport, usize) {
    let case = Case::clustered(Problem::new(1, n, d).causal(), 1);
    let ws = Workspace::new(Schedule::default()).unwrap();
    attlas_num::kernels::Counting::reset_peak();
    let view = |x| MatRef::new(x, n, d);
    let p = &case.problem;
    let head = Head::new(view(&case.q), view(&case.k), view(&case.v), p.scale, p.mask).unwrap();
    let report = inspect(&head, settings, &ws).unwrap();
    (report, attlas_num::kernels::Counting::peak_bytes())
}

#[test]
fn a_long_head_needs_less_than_its_matrix_of_scores() {
    let n = 3000;
    let settings = Settings { dense_limit: 0, rank: 24, power: 1, ..Settings::default() };
    let (report, peak) = watched(n, 32, &settings);
    assert!(!report.spectra.weights.complete && report.spectra.weights.values[0] >= 1.0 - 1e-9);
    // 22 MB, of which inputs and their copy are 5; the matrix would be 72.
    assert!(peak < n * n * size_of::<f64>() / 2, "{peak} bytes for {n} tokens");
}

/// Minutes of work: `cargo test --release -p attlas --test memory -- --ignored`.
#[test]
#[ignore = "a minute: cargo test --release -p attlas --all-features --test memory -- --ignored"]
fn thirty_two_thousand_tokens_need_less_than_two_gibibytes() {
    let (report, peak) = watched(32 << 10, 64, &Settings::default());
    assert_eq!(report.spectra.weights.values.len(), 256);
    assert!(peak < 2 << 30, "{peak} bytes");
}
