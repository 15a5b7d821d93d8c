use super::*;
use crate::engine::pool::Parts;
use crate::testkit::heads::{Workload, table};
use crate::testkit::{
    Case, How, Ran, assert_rows_close, assert_same_bits, check_method, golden, reference, run_method,
    run_with,
};
use crate::{Options, Qkv, TensorRef, Workspace, metrics};
use attlas_num::rng::StreamKey;
use attlas_num::{Mat, linalg};

fn options(pairs: &[(&str, &str)]) -> Options {
    pairs.iter().fold(Options::new(), |o, (k, v)| o.with(k, *v))
}

fn run_calibrated(set: &Options, c: &Calibration, x: &Case) -> Ran {
    run_with(&*METHOD.plan_with(&x.problem, set, Some(c)).unwrap(), x, How::default()).unwrap()
}

#[test]
fn honours_the_contract() {
    check_method(&METHOD);
}

#[test]
fn reproduces_the_golden_values() {
    let x = golden::inputs();
    let (o, _) = run_method(&METHOD, &options(&[("rank", "3")]), &x);
    golden::assert_row(&o, 0, &[0.7131085239, 0.5242980181, 0.2243924701]);
    golden::assert_fro(&o, 2.3708375676);
    let (o, _) = run_method(&METHOD, &options(&[("rank", "4")]), &x);
    golden::assert_row(&o, 0, &[0.6544489393, 0.4613265189, 0.1758734361]);
    golden::assert_fro(&o, 2.3567466015);
}

#[test]
fn keys_constant_inside_segments_are_answered_exactly() {
    for (n, rank) in [(60, 6), (67, 7), (97, 40)] {
        let mut x = Case::gaussian(Problem { d_v: 3, ..Problem::new(2, n, 8).with_kv_heads(1) }, 1);
        let parts = Segments::new(n, rank);
        for j in 0..n {
            let first = parts.range(parts.part_of(j)).start * 8;
            x.k.copy_within(first..first + 8, j * 8);
        }
        let (want, want_lse) = reference(&x);
        let (o, lse) = run_method(&METHOD, &Options::new().with("rank", rank), &x);
        assert_rows_close(&o, &want, 1e-12, &format!("{n} keys in {rank} segments"));
        assert_rows_close(&lse, &want_lse, 1e-12, "log-sum-exp");
    }
}

#[test]
fn one_segment_gives_the_mean_and_pooling_stays_in_the_hull() {
    let x = Case::gaussian(Problem { d_v: 2, ..Problem::new(1, 97, 8) }, 2);
    let mean = |c: usize| x.v.iter().skip(c).step_by(2).sum::<f64>() / 97.0;
    let (o, _) = run_method(&METHOD, &options(&[("rank", "1")]), &x);
    assert_rows_close(&o, &[mean(0), mean(1)].repeat(97), 1e-13, "one segment");
    for causal in [false, true] {
        let p = if causal { x.problem.causal() } else { x.problem };
        let y = Case {
            problem: p,
            v: vec![1.5; x.v.len()],
            q: x.q.iter().map(|q| 30.0 * q).collect(),
            ..x.clone()
        };
        let (o, _) = run_method(&METHOD, &options(&[("rank", "9")]), &y);
        assert_rows_close(&o, &vec![1.5; o.len()], 1e-14, "constant values");
        let z = Case { v: x.v.clone(), ..y };
        let (o, _) = run_method(&METHOD, &options(&[("rank", "9")]), &z);
        let (low, high) = z.v.iter().fold((f64::MAX, f64::MIN), |(a, b), &v| (a.min(v), b.max(v)));
        assert!(o.iter().all(|&o| o >= low - 1e-13 && o <= high + 1e-13));
    }
}

#[test]
fn the_causal_form_is_what_it_says() {
    for (n_q, n_k, rank) in [(97, 97, 8), (40, 97, 13), (97, 40, 7), (300, 300, 100)] {
        let p = Problem { d_v: 3, ..Problem::new(1, 1, 8).with_lens(n_q, n_k).causal() };
        let x = Case::gaussian(p, 3);
        let len = n_k.div_ceil(rank);
        let (o, lse) = run_method(&METHOD, &Options::new().with("rank", rank), &x);
        for i in 0..n_q {
            let Some(position) = (i + n_k).checked_sub(n_q) else {
                assert!(o[i * 3..(i + 1) * 3].iter().all(|&o| o == 0.0) && lse[i] == f64::NEG_INFINITY);
                continue;
            };
            let own = position / len * len;
            let (mut k, mut v, mut weight) = (Vec::new(), Vec::new(), Vec::new());
            for s in (0..own).step_by(len) {
                let mean = |x: &[f64], w: usize| {
                    (0..w)
                        .map(|c| (s..s + len).map(|j| x[j * w + c]).sum::<f64>() / len as f64)
                        .collect::<Vec<f64>>()
                };
                k.push(mean(&x.k, 8));
                v.push(mean(&x.v, 3));
                weight.push(len as f64);
            }
            for j in own..=position {
                k.push(x.k[j * 8..(j + 1) * 8].to_vec());
                v.push(x.v[j * 3..(j + 1) * 3].to_vec());
                weight.push(1.0);
            }
            let dot = |k: &[f64]| x.q[i * 8..].iter().zip(k).map(|(a, b)| a * b).sum::<f64>() * p.scale;
            let w: Vec<f64> = k.iter().zip(&weight).map(|(k, w)| w * dot(k).exp()).collect();
            let z: f64 = w.iter().sum();
            let want: Vec<f64> =
                (0..3).map(|c| w.iter().zip(&v).map(|(w, v)| w * v[c]).sum::<f64>() / z).collect();
            assert_rows_close(
                &o[i * 3..(i + 1) * 3],
                &want,
                1e-12,
                &format!("{n_q}×{n_k} rank {rank} row {i}"),
            );
            assert!((lse[i] - z.ln()).abs() < 1e-12);
        }
    }
}

#[test]
fn the_stream_holds_means_and_one_segment() {
    let p = Problem::new(1, 100, 4).causal();
    let plan = METHOD.plan(&p, &options(&[("rank", "10")])).unwrap();
    let mut stream = plan.stream(crate::DType::F64).unwrap();
    let x = Case::gaussian(p, 4);
    let view = TensorRef::bhnd(&x.k, [1, 1, 100, 4]).unwrap();
    let mut ws = Workspace::single().unwrap();
    stream.push(view.into(), view.into(), &mut ws).unwrap();
    assert_eq!(stream.state_bytes(), 8 * (9 * (4 + 4 + 1) + 10 * (4 + 4)));
}

#[test]
fn identity_projections_are_exact_attention() {
    let p = Problem { d_v: 3, ..Problem::new(2, 33, 8).with_kv_heads(1) };
    let x = Case::gaussian(p, 5);
    let c = with_projections(&p, &[Mat::identity(33)], &[]).unwrap();
    let ran = run_calibrated(&options(&[("source", "learned")]), &c, &x);
    let (want, want_lse) = reference(&x);
    assert_rows_close(&ran.o, &want, 1e-13, "identity");
    assert_rows_close(&ran.lse, &want_lse, 1e-13, "identity");
}

/// Attention to given keys and values, one pair per key head.
fn attend_mixed(x: &Case, e: &[Mat<f64>], f: &[Mat<f64>]) -> Vec<f64> {
    let p = x.problem;
    let mix = |m: &[Mat<f64>], data: &[f64], width: usize| {
        let heads = data.chunks(p.n_k * width).enumerate();
        heads
            .flat_map(|(g, head)| {
                let m = &m[g % m.len()];
                let cut = Mat::from_fn(m.rows(), p.n_k, |i, j| m[(i, j)]);
                linalg::matmul(cut.as_ref(), MatRef::new(head, p.n_k, width)).into_vec()
            })
            .collect::<Vec<f64>>()
    };
    let problem = Problem { n_k: e[0].rows(), ..p };
    reference(&Case { problem, k: mix(e, &x.k, p.d), v: mix(f, &x.v, p.d_v), ..x.clone() }).0
}

#[test]
fn learned_projections_are_applied_with_every_sharing() {
    let p = Problem { d_v: 3, ..Problem::new(4, 50, 8).with_kv_heads(2) };
    let x = Case::gaussian(p, 6);
    let make = |seed| {
        let mut rng = StreamKey::new(seed).rng();
        Mat::from_fn(20, 64, |_, _| 0.2 * rng.normal())
    };
    let [a, b, c, d] = [1, 2, 3, 4].map(make);
    let set = options(&[("source", "learned")]);
    let check = |e: &[Mat<f64>], f: &[Mat<f64>]| {
        let made = with_projections(&p, e, f).unwrap();
        let loaded: Calibration = serde_json::from_str(&serde_json::to_string(&made).unwrap()).unwrap();
        let got = run_calibrated(&set, &made, &x).o;
        assert_rows_close(&got, &attend_mixed(&x, e, if f.is_empty() { e } else { f }), 1e-12, "learned");
        assert_same_bits(&run_calibrated(&set, &loaded, &x).o, &got, "after saving and loading");
    };
    check(&[a.clone(), b.clone()], &[c.clone(), d.clone()]);
    check(std::slice::from_ref(&a), std::slice::from_ref(&b));
    check(std::slice::from_ref(&a), &[]);
    let turned = with_projections(&p, &[a.transpose()], &[]).unwrap();
    let plain = with_projections(&p, &[a], &[]).unwrap();
    assert_eq!(turned, plain);
}

#[test]
fn projections_that_do_not_fit_are_refused() {
    let p = Problem::new(2, 50, 8);
    let set = options(&[("source", "learned")]);
    let square = Mat::from_fn(50, 50, |i, j| (i * 50 + j) as f64);
    assert!(with_projections(&p, &[square], &[]).is_err());
    assert!(with_projections(&p, &[], &[]).is_err());
    let short = with_projections(&p, &[Mat::zeros(4, 49)], &[]).unwrap();
    assert!(matches!(METHOD.plan_with(&p, &set, Some(&short)), Err(Error::Unsupported { .. })));
    let good = with_projections(&p, &[Mat::zeros(4, 64)], &[]).unwrap();
    assert!(METHOD.plan_with(&p, &set, Some(&good)).is_ok());
    assert!(METHOD.plan_with(&p.causal(), &set, Some(&good)).is_err());
    assert!(matches!(
        METHOD.plan_with(&Problem::new(2, 50, 16), &set, Some(&good)),
        Err(Error::Calibration { .. })
    ));
    assert!(METHOD.plan(&p, &set).is_err());
}

#[test]
fn sharing_counts_the_matrices_of_a_model() {
    let count = |s: Sharing| s.matrices(12, 12);
    assert_eq!(
        [Sharing::None, Sharing::Headwise, Sharing::KeyValue, Sharing::Layerwise].map(count),
        [288, 24, 12, 1]
    );
}

fn fit(x: &Case, set: &Options) -> Calibration {
    let p = x.problem;
    let view = |x, h, w| TensorRef::bhnd(x, [p.batch, h, p.n_k, w]).unwrap();
    let sample =
        Qkv::new(view(&x.q, p.n_heads, p.d), view(&x.k, p.n_kv_heads, p.d), view(&x.v, p.n_kv_heads, p.d_v));
    METHOD.calibrate.unwrap()(&p, set, &[sample.into()]).unwrap()
}

#[test]
fn the_fit_is_closer_to_the_weights_than_pooling() {
    // With the identity as values, outputs are the weights themselves.
    let mut x = Case::gaussian(Problem { d_v: 48, ..Problem::new(2, 48, 8).with_kv_heads(1) }, 7);
    x.v = Mat::<f64>::identity(48).into_vec();
    let set = options(&[("rank", "7"), ("source", "fitted"), ("ridge", "0")]);
    let made = fit(&x, &set);
    let (want, _) = reference(&x);
    let fitted = run_calibrated(&set, &made, &x).o;
    let (pooled, _) = run_method(&METHOD, &options(&[("rank", "7")]), &x);
    let (a, b) = (metrics::relative_frobenius(&fitted, &want), metrics::relative_frobenius(&pooled, &want));
    assert!(a < b, "fitted {a}, pooled {b}");
    for row in made.matrix("fitted.0").unwrap().as_ref().iter_rows() {
        assert!((row.iter().sum::<f64>() - 1.0).abs() < 1e-10);
    }
    let other = Problem { n_q: 40, n_k: 40, ..x.problem };
    assert!(METHOD.plan_with(&other, &set, Some(&made)).is_err());
}

#[test]
fn a_padded_sequence_is_pooled_where_the_fit_was_for_another_length() {
    let x = Case::gaussian(Problem { d_v: 3, ..Problem::new(1, 24, 8) }, 9);
    let set = options(&[("rank", "9"), ("source", "fitted")]);
    let plan = METHOD.plan_with(&x.problem, &set, Some(&fit(&x, &set))).unwrap();
    for n in [7usize, 17] {
        let (want, _) = run_method(&METHOD, &options(&[("rank", "9")]), &x.with_keys(n));
        let view = |x, w| TensorRef::bhnd(x, [1, 1, 24, w]).unwrap();
        let lens = [n];
        let qkv = Qkv { key_lens: Some(&lens), ..Qkv::new(view(&x.q, 8), view(&x.k, 8), view(&x.v, 3)) };
        let mut o = vec![f64::NAN; 72];
        let out = crate::Out::new(crate::TensorMut::bhnd(&mut o, [1, 1, 24, 3]).unwrap());
        let mut ws = Workspace::single().unwrap();
        let info = plan.execute(&qkv.into(), &mut out.into(), &mut ws).unwrap();
        // With no more keys than rows of the projection attention is exact.
        assert_eq!(info.fallback_rows, if n > 9 { 24 } else { 0 });
        assert_rows_close(&o, &want, 1e-13, &format!("{n} of 24 keys"));
    }
}

#[test]
fn the_fit_of_as_many_rows_as_keys_is_the_identity() {
    let x = Case::gaussian(Problem::new(3, 24, 8).with_kv_heads(1), 8);
    let made = fit(&x, &options(&[("rank", "24"), ("source", "fitted"), ("ridge", "0")]));
    assert_rows_close(
        made.matrix("fitted.0").unwrap().data(),
        Mat::<f64>::identity(24).data(),
        1e-9,
        "F = I",
    );
}

#[test]
fn a_fit_of_another_rank_is_refused_and_one_of_all_keys_is_exact() {
    let x = Case::gaussian(Problem::new(2, 24, 8).with_kv_heads(1), 10);
    let set = |rank: &str| options(&[("rank", rank), ("source", "fitted")]);
    let made = fit(&x, &set("3"));
    assert!(METHOD.plan_with(&x.problem, &set("3"), Some(&made)).is_ok());
    for rank in ["2", "24", "65"] {
        let refused = METHOD.plan_with(&x.problem, &set(rank), Some(&made));
        assert!(matches!(refused, Err(Error::Calibration { .. })), "rank {rank}");
    }
    let exact = crate::registry::method("exact").unwrap();
    let want = run_method(exact, &Options::new(), &x);
    for rank in ["24", "65"] {
        let ran = run_calibrated(&set(rank), &fit(&x, &set(rank)), &x);
        assert_same_bits(&ran.o, &want.0, "as many rows as keys");
        assert_same_bits(&ran.lse, &want.1, "as many rows as keys");
    }
}

#[test]
fn a_single_column_has_the_same_bits_in_either_layout() {
    let x = Case::gaussian(Problem::new(3, 65, 1).with_kv_heads(3), 11);
    for source in ["fitted", "gaussian"] {
        let set = options(&[("rank", "9"), ("source", source)]);
        let plan = METHOD.plan_with(&x.problem, &set, Some(&fit(&x, &set))).unwrap();
        let heads = run_with(&*plan, &x, How::default()).unwrap();
        let tokens = run_with(&*plan, &x, How { token_major: true, ..How::default() }).unwrap();
        assert_same_bits(&tokens.o, &heads.o, source);
    }
}

#[test]
fn errors_on_synthetic_heads_are_the_specified_ones() {
    let wanted = [
        (Workload::Iid, 0.84, 0.81),
        (Workload::Smooth, 0.45, 0.25),
        (Workload::Clustered, 0.98, 1.02),
        (Workload::Decaying, 1.00, 1.00),
    ];
    for (workload, few, many) in wanted {
        for (rank, want) in [("64", few), ("256", many)] {
            let error = table::error_of(&METHOD, &[("rank", rank)], None, workload, 1);
            table::assert_error(error, want, &format!("{workload:?}, rank {rank}"));
        }
    }
    let random = [("rank", "256"), ("source", "gaussian")];
    let error = table::error_of(&METHOD, &random, None, Workload::Smooth, 1);
    assert!(error > 2.0, "a random projection approximates attention: {error}");
}
