use crate::metrics::relative_frobenius;
use crate::testkit::{Case, How, assert_rows_close, reference, reference_masked, run_with};
use crate::{Mask, Near, Options, Problem, registry};

fn near(pairs: &[(&str, &str)]) -> Options {
    pairs.iter().fold(Options::new(), |o, (k, v)| o.with(k, *v))
}

/// Exact attention with a near field around it stays exact, whatever is near, heavy and far.
#[test]
fn a_near_field_around_exact_attention_is_exact_attention() {
    let exact = registry::method("exact").unwrap();
    for (n_q, n_k) in [(97, 97), (40, 97), (97, 40), (1, 50), (200, 200), (3, 0), (0, 3)] {
        for mask in [Mask::Causal, Mask::None] {
            let p = Problem {
                batch: 2,
                d_v: 3,
                mask,
                ..Problem::new(4, 1, 8).with_lens(n_q, n_k).with_kv_heads(2)
            };
            let case = Case::gaussian(p, 1);
            let (want, want_lse) = reference(&case);
            for (sinks, window, heavy, block) in [
                (0, 1, 0, 16),
                (3, 0, 0, 16),
                (4, 20, 0, 16),
                (2, 5, 7, 16),
                (0, 0, 9, 33),
                (1, 200, 3, 1),
                (2, 3, 500, 8),
            ] {
                let at = Near { heavy, block: Some(block), ..Near::new(sinks, window) };
                let p = p.with_near(at);
                if window > 0 && mask == Mask::None && n_q != n_k {
                    assert!(exact.plan(&p, &Options::new()).is_err());
                    continue;
                }
                let plan = exact.plan(&p, &Options::new()).unwrap();
                let what = format!(
                    "{n_q}×{n_k} {mask}, {sinks} sinks, window {window}, {heavy} heavy, block {block}"
                );
                for token_major in [false, true] {
                    let ran = run_with(&*plan, &case, How { token_major, ..How::default() }).unwrap();
                    assert_rows_close(&ran.o, &want, 1e-12, &what);
                    assert_rows_close(&ran.lse, &want_lse, 1e-12, &what);
                }
            }
        }
    }
}

/// With a method that finds nothing, sinks and window remain, seen by the same rows as in `sink_window`.
#[test]
fn sinks_and_window_are_those_of_the_yardstick() {
    let p = Problem::new(2, 150, 8).with_kv_heads(1).causal();
    let case = Case::gaussian(p, 2);
    let anna = registry::method("anna").unwrap();
    let options = near(&[
        ("near.sinks", "3"),
        ("near.window", "11"),
        ("near.guard", "false"),
        ("near.rest", "none"),
        ("weights", "softmax"),
        ("width", "0.000001"),
        ("fallback", "zero"),
    ]);
    let ran = run_with(&*anna.plan(&p, &options).unwrap(), &case, How::default()).unwrap();
    let (want, want_lse) = reference_masked(&case, |i, j| j < 3 || j + 11 > i);
    assert_rows_close(&ran.o, &want, 1e-12, "outputs");
    assert_rows_close(&ran.lse, &want_lse, 1e-12, "log-sum-exp");
}

/// If a few far keys have most of the mass of every query, they are found and exact.
#[test]
fn heavy_keys_anywhere_are_seen_by_every_block() {
    let mut case = Case::gaussian(Problem::new(2, 300, 8).with_kv_heads(1).causal(), 3);
    case.q.chunks_exact_mut(8).for_each(|q| q[0] = 6.0);
    for j in [57, 101] {
        case.k[j * 8] = 6.0;
    }
    let (want, _) = reference(&case);
    let error = |heavy: &str| {
        let pairs = [
            ("near.window", "16"),
            ("near.heavy", heavy),
            ("near.guard", "false"),
            ("block", "4"),
            ("rounds", "1"),
            ("min_len", "8"),
        ];
        let plan = registry::method("smyrf").unwrap().plan(&case.problem, &near(&pairs)).unwrap();
        let ran = run_with(&*plan, &case, How::default()).unwrap();
        let rows = 2 * 300 * 8 - 150 * 8;
        relative_frobenius(&ran.o[rows..], &want[rows..])
    };
    assert!(error("4") < 0.1 && error("0") > 0.3, "{} {}", error("4"), error("0"));
}

/// A far part of mere noise is replaced, and the rows are counted.
#[test]
fn a_far_part_worse_than_means_is_replaced() {
    let mut case = Case::gaussian(Problem::new(1, 512, 16).causal(), 4);
    case.q.iter_mut().for_each(|x| *x *= 4.0);
    let (want, _) = reference(&case);
    let run = |guard: &str| {
        let pairs = [("near.sinks", "4"), ("near.window", "32"), ("near.guard", guard), ("features", "8")];
        let plan = registry::method("performer").unwrap().plan(&case.problem, &near(&pairs)).unwrap();
        let ran = run_with(&*plan, &case, How::default()).unwrap();
        (relative_frobenius(&ran.o, &want), ran.info.fallback_rows)
    };
    let (loose, none) = run("false");
    let (guarded, replaced) = run("true");
    assert_eq!(none, 0);
    assert!(replaced > 0 && guarded < loose, "{guarded} with the guard, {loose} without, {replaced} rows");
}
