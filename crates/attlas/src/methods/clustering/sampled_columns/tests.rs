use super::*;
use crate::testkit::workloads::clustered;
use crate::testkit::{
    Case, How, assert_rows_close, assert_same_bits, check_method, reference, run_method, run_with,
};
use crate::{DType, Options, Out, TensorMut, TensorRef, Workspace, metrics};

#[test]
fn honours_the_contract() {
    check_method(&METHOD);
}

/// The inputs of `goldens/sampled_columns/make.py`.
fn golden_case(heads: usize, n: usize, d: usize, d_v: usize) -> Case {
    let mut state = 1u64;
    let mut draw = |count: usize| {
        let values = (0..count).map(|_| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            3.0 * ((state >> 40) as f64 / f64::from(1 << 23) - 1.0)
        });
        values.collect::<Vec<f64>>()
    };
    let (q, k, v) = (draw(heads * n * d), draw(n * d), draw(n * d_v));
    let problem = Problem { d_v, scale: 0.25, ..Problem::new(heads, n, d).with_kv_heads(1).causal() };
    Case { problem, q, k, v, single: false }
}

#[test]
fn outputs_are_those_of_the_definition() {
    let text = include_str!("../../../../../../goldens/sampled_columns/columns.json");
    let golden: serde_json::Value = serde_json::from_str(text).unwrap();
    let size = |name: &str| golden[name].as_u64().unwrap() as usize;
    let case = golden_case(size("heads"), size("n"), size("d"), size("d_v"));
    for stored in golden["cases"].as_array().unwrap() {
        let mut options = Options::new();
        for (name, value) in stored["setting"].as_object().unwrap() {
            match value.as_bool() {
                Some(far) => options.set(name, if far { "mean" } else { "none" }),
                None => options.set(name, value.as_u64().unwrap()),
            }
        }
        let want: Vec<f64> = stored["o"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect();
        let (o, _) = run_method(&METHOD, &options, &case);
        assert_rows_close(&o, &want, 1e-10, &options.to_string());
        let (single, _) = run_method(&METHOD, &options, &case.clone().cast_f32());
        assert_rows_close(&single, &want, 1e-4, &format!("{options}, single precision"));
    }
}

fn small() -> Options {
    Options::new().with("block", 8).with("window", 4).with("keys", 6).with("far_block", 8).with("refresh", 4)
}

#[test]
fn later_queries_cannot_change_a_row_not_even_as_nan() {
    let p = Problem::new(2, 96, 8).with_kv_heads(1).causal();
    let case = Case::gaussian(p, 3);
    for options in [small(), small().with("chooser", "mean_query"), small().with("far", "split")] {
        let (first, first_lse) = run_method(&METHOD, &options, &case);
        for t in [9, 17, 40, 41, 95] {
            let mut changed = case.clone();
            for h in 0..2 {
                changed.q[(h * 96 + t) * 8..(h + 1) * 96 * 8].fill(f64::NAN);
            }
            let (o, lse) = run_method(&METHOD, &options, &changed);
            for h in 0..2 {
                let (rows, what) = (h * 96..h * 96 + t, format!("{options}, token {t}"));
                assert_same_bits(&lse[rows.clone()], &first_lse[rows.clone()], &what);
                assert_same_bits(
                    &o[rows.start * 8..rows.end * 8],
                    &first[rows.start * 8..rows.end * 8],
                    &what,
                );
            }
        }
    }
}

#[test]
fn equal_keys_within_runs_are_exact() {
    // Runs of equal keys equal their means, whatever is chosen.
    for problem in [Problem::new(2, 120, 6).with_kv_heads(1), Problem::new(1, 120, 6).causal()] {
        let mut case = Case::gaussian(problem, 4);
        for run in case.k.chunks_mut(8 * 6) {
            let first = run[..6].to_vec();
            run.chunks_exact_mut(6).for_each(|k| k.copy_from_slice(&first));
        }
        let (want, want_lse) = reference(&case);
        for far in ["mean", "split"] {
            let (o, lse) = run_method(&METHOD, &small().with("far", far), &case);
            assert_rows_close(&o, &want, 1e-12, far);
            assert_rows_close(&lse, &want_lse, 1e-12, far);
        }
    }
}

#[test]
fn a_repeated_passage_is_found_along_its_diagonal() {
    // Row i attends to key i − 100 alone: one diagonal covers all rows, single keys do not.
    let (n, d) = (256, 64);
    let mut case = Case::gaussian(Problem { scale: 1.0, ..Problem::new(1, n, d).causal() }, 5);
    for i in 100..n {
        let key: Vec<f64> = case.k[(i - 100) * d..(i - 99) * d].to_vec();
        case.q[i * d..(i + 1) * d].copy_from_slice(&key);
    }
    let options = Options::new().with("block", 16).with("window", 16).with("keys", 4);
    let (want, _) = reference(&case);
    let error = |o: &[f64]| metrics::relative_frobenius(&o[144 * d..], &want[144 * d..]);
    let with = error(&run_method(&METHOD, &options, &case).0);
    let without = error(&run_method(&METHOD, &options.with("diagonals", 0), &case).0);
    assert!(with < 1e-6 && without > 0.3, "error {with} with a diagonal, {without} without");
}

#[test]
fn a_key_that_every_row_looks_at_does_not_hide_a_diagonal() {
    // Two heads whose rows give most of their weight to one key, and the rest to the key 100 before them.
    let (n, d) = (320, 64);
    let mut case =
        Case::gaussian(Problem { scale: 1.0, ..Problem::new(2, n, d).with_kv_heads(1).causal() }, 9);
    case.k.chunks_exact_mut(d).for_each(|k| k[0] = 0.0);
    for k in case.k.chunks_exact_mut(d) {
        let norm = k.iter().map(|x| x * x).sum::<f64>().sqrt();
        k.iter_mut().for_each(|x| *x *= 7.0 / norm);
    }
    case.k[20 * d..21 * d].fill(0.0);
    case.k[20 * d] = 8.0;
    for (i, q) in case.q.chunks_exact_mut(d).enumerate().map(|(row, q)| (row % n, q)) {
        if i >= 100 {
            q.copy_from_slice(&case.k[(i - 100) * d..(i - 99) * d]);
        }
        q[0] = 51.0 / 8.0;
    }
    let options = Options::new().with("block", 16).with("window", 16).with("keys", 1).with("sinks", 0);
    let (want, _) = reference(&case);
    let error = |o: &[f64]| metrics::relative_frobenius(&o[160 * d..n * d], &want[160 * d..n * d]);
    let with = error(&run_method(&METHOD, &options.clone().with("diagonals", 1), &case).0);
    let without = error(&run_method(&METHOD, &options.with("diagonals", 0), &case).0);
    assert!(with < 1e-3 && without > 0.1, "error {with} with a diagonal, {without} without");
}

#[test]
fn the_estimate_of_the_error_is_close_to_it() {
    for seed in 0..10 {
        let case = clustered(seed).with_problem(Problem::new(1, 2048, 64).causal());
        let options = Options::new().with("keys", 48);
        let plan = METHOD.plan(&case.problem, &options).unwrap();
        let ran = run_with(&*plan, &case, How::default()).unwrap();
        let error = metrics::relative_frobenius(&ran.o, &reference_of(&case));
        let estimate = ran.info.figures["error_estimate"];
        assert!((estimate / error - 1.0).abs() < 0.6, "{estimate} for {error}");
    }
}

fn reference_of(case: &Case) -> Vec<f64> {
    run_method(crate::registry::baseline(), &Options::new(), case).0
}

#[test]
fn bf16_stays_within_the_rounding_of_its_operands() {
    let case = Case::gaussian(Problem::new(2, 300, 64).with_kv_heads(1).causal(), 6).cast_f32();
    let full = run_method(&METHOD, &small(), &case).0;
    let rounded = run_method(&METHOD, &small().with("precision", "bf16"), &case).0;
    let error = metrics::relative_frobenius(&rounded, &full);
    assert!(error > 1e-5 && error < 0.02, "relative error {error}");
}

#[test]
fn decoding_with_every_key_chosen_is_exact_and_else_close() {
    let p = Problem { d_v: 5, ..Problem::new(4, 300, 8).with_kv_heads(2).causal() };
    let mut case = Case::gaussian(p, 7);
    case.q.iter_mut().for_each(|x| *x *= 0.5);
    let (want, _) = reference(&case);
    let run = |options: &Options| {
        let plan = METHOD.plan(&p, options).unwrap();
        let mut stream = plan.stream(DType::F64).unwrap();
        let mut ws = Workspace::single().unwrap();
        let q = TensorRef::bhnd(&case.q, [1, 4, 300, 8]).unwrap();
        let k = TensorRef::bhnd(&case.k, [1, 2, 300, 8]).unwrap();
        let v = TensorRef::bhnd(&case.v, [1, 2, 300, 5]).unwrap();
        let (mut got, mut wanted, mut done) = (Vec::new(), Vec::new(), 0);
        while done < 300 {
            let next = if done == 0 { 100 } else { done + 1 };
            stream.push(k.rows(done..next).into(), v.rows(done..next).into(), &mut ws).unwrap();
            let mut o = vec![f64::NAN; 20];
            let out = Out::new(TensorMut::bhnd(&mut o, [1, 4, 1, 5]).unwrap());
            stream.attend(q.rows(next - 1..next).into(), &mut out.into(), &mut ws).unwrap();
            got.extend(o);
            (0..4).for_each(|h| wanted.extend_from_slice(&want[(h * 300 + next - 1) * 5..][..5]));
            done = next;
        }
        metrics::relative_frobenius(&got, &wanted)
    };
    let all = run(&small().with("keys", 300).with("refresh", 1));
    assert!(all < 1e-12, "error {all} with every key");
    let (means, dropped) =
        (run(&small().with("keys", 16)), run(&small().with("keys", 16).with("far", "none")));
    assert!(means < 0.6 * dropped, "error {means} with means, {dropped} without");
}
