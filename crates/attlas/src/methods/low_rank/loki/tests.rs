use super::learn::qk_optimal;
use super::*;
use crate::engine::moments::Moments;
use crate::testkit::heads::{Workload, table};
use crate::testkit::{
    Case, How, Ran, assert_rows_close, assert_same_bits, check_method, golden, reference, run_method,
    run_with,
};
use crate::{Options, Qkv, TensorRef, Workspace, metrics, registry};
use attlas_num::Mat;
use attlas_num::cluster::Counts;
use attlas_num::linalg::{matmul, matmul_nt, symmetric_eigen};

fn options(pairs: &[(&str, &str)]) -> Options {
    pairs.iter().fold(Options::new(), |o, (k, v)| o.with(k, *v))
}

/// A calibration on the case itself.
fn learn(x: &Case, set: &Options) -> Calibration {
    let p = x.problem;
    let view = |x, h, n, w| TensorRef::bhnd(x, [p.batch, h, n, w]).unwrap();
    let sample = Qkv::new(
        view(&x.q, p.n_heads, p.n_q, p.d),
        view(&x.k, p.n_kv_heads, p.n_k, p.d),
        view(&x.v, p.n_kv_heads, p.n_k, p.d_v),
    );
    calibrate(&Params::from_options(set).unwrap(), &p, &[sample.into()]).unwrap()
}

fn run_on(x: &Case, set: &Options, c: &Calibration) -> Ran {
    run_with(&*METHOD.plan_with(&x.problem, set, Some(c)).unwrap(), x, How::default()).unwrap()
}

fn run(x: &Case, pairs: &[(&str, &str)]) -> Ran {
    let set = options(pairs).with("min_len", 0);
    run_on(x, &set, &learn(x, &set))
}

#[test]
fn honours_the_contract() {
    check_method(&METHOD);
}

#[test]
fn reproduces_the_golden_values() {
    let x = golden::inputs();
    let c = learn(&x, &Options::new());
    let lambda = c.matrix("lambda.0").unwrap();
    golden::assert_close(lambda.data(), &[0.6632171615, 0.6272937508, 0.6125413700, 0.3059523441]);
    let ran = run(&x, &[("rank", "2"), ("keys", "3"), ("basis", "pca")]);
    golden::assert_row(&ran.o, 0, &[0.5300664790, 0.3687341645, 0.2716848310]);
    golden::assert_fro(&ran.o, 2.4450529879);
    let ran = run(&x, &[("rank", "1"), ("keys", "2"), ("basis", "pca")]);
    golden::assert_row(&ran.o, 0, &[0.4475320631, 0.4925208877, 0.5203660986]);
    golden::assert_fro(&ran.o, 2.9071623862);
}

#[test]
fn all_coordinates_choose_what_exact_top_k_chooses() {
    let top_k = registry::method("top_k").unwrap();
    for p in [Problem::new(2, 97, 8).with_kv_heads(1), Problem::new(1, 97, 8).causal()] {
        let x = Case::gaussian(p, 1);
        let (want, want_lse) = run_method(top_k, &Options::new().with("keys", 13), &x);
        for basis in ["pca", "qk_optimal"] {
            let ran = run(&x, &[("rank", "8"), ("keys", "13"), ("basis", basis)]);
            assert_rows_close(&ran.o, &want, 1e-12, basis);
            assert_rows_close(&ran.lse, &want_lse, 1e-12, basis);
        }
    }
}

#[test]
fn keys_in_a_subspace_are_ranked_exactly_by_its_dimensions() {
    let mut x = Case::gaussian(Problem::new(1, 97, 8), 2);
    let map = Case::gaussian(Problem::new(1, 3, 8), 3).q;
    let low = Case::gaussian(Problem::new(1, 97, 3), 4).k;
    x.k = linalg::matmul(MatRef::new(&low, 97, 3), MatRef::new(&map, 3, 8)).into_vec();
    let (want, _) = run_method(registry::method("top_k").unwrap(), &Options::new().with("keys", 13), &x);
    assert_rows_close(&run(&x, &[("rank", "3"), ("keys", "13")]).o, &want, 1e-11, "subspace");
    let error = metrics::relative_frobenius(&run(&x, &[("rank", "1"), ("keys", "13")]).o, &want);
    assert!(error > 0.05, "one dimension is enough: {error}");
    // And the variance needs exactly these dimensions.
    let ran = run(&x, &[("variance", "0.999999"), ("keys", "13")]);
    assert_eq!(ran.info.rank, Some(3));
}

#[test]
fn a_shift_of_all_keys_changes_nothing() {
    let x = Case::gaussian(Problem::new(1, 97, 8), 5);
    let mut moved = x.clone();
    moved.k.chunks_mut(8).for_each(|k| k.iter_mut().enumerate().for_each(|(i, k)| *k += 3.0 - i as f64));
    for basis in ["pca", "qk_optimal"] {
        let set = [("rank", "3"), ("keys", "13"), ("basis", basis)];
        assert_rows_close(&run(&moved, &set).o, &run(&x, &set).o, 1e-10, basis);
    }
}

#[test]
fn the_error_is_bounded_by_the_lost_mass() {
    let x = Case::gaussian(Problem::new(1, 130, 8).causal(), 6);
    let (exact, exact_lse) = reference(&x);
    let range = |c: usize| {
        let column = || x.v.iter().skip(c).step_by(8).copied();
        column().fold(f64::MIN, f64::max) - column().fold(f64::MAX, f64::min)
    };
    for set in [&[("rank", "2")][..], &[("rank", "2"), ("keys", "5")]] {
        let ran = run(&x, set);
        for i in 0..130 {
            let lost = 1.0 - (ran.lse[i] - exact_lse[i]).exp();
            assert!(lost > -1e-12, "captured more than all");
            for c in 0..8 {
                let gap = (ran.o[i * 8 + c] - exact[i * 8 + c]).abs();
                assert!(gap <= lost.max(0.0) * range(c) + 1e-12, "row {i}");
            }
        }
    }
}

#[test]
fn scores_miss_at_most_the_product_of_the_dropped_parts() {
    let x = Case::gaussian(Problem::new(1, 40, 8), 7);
    let basis = learn(&x, &Options::new()).matrix("basis.0").unwrap();
    let turned = |x: &[f64]| linalg::matmul(MatRef::new(x, 40, 8), basis.as_ref());
    let (q, k) = (turned(&x.q), turned(&x.k));
    for r in 1..8 {
        for i in 0..40 {
            for j in 0..40 {
                let full: f64 = (0..8).map(|c| x.q[i * 8 + c] * x.k[j * 8 + c]).sum();
                let reduced: f64 = (0..r).map(|c| q[(i, c)] * k[(j, c)]).sum();
                let rest = |m: &Mat<f64>, i| (r..8).map(|c| m[(i, c)] * m[(i, c)]).sum::<f64>().sqrt();
                assert!((full - reduced).abs() <= rest(&q, i) * rest(&k, j) + 1e-12);
            }
        }
    }
}

#[test]
fn the_best_keys_are_kept_and_all_of_a_short_row() {
    let plan = |pairs| {
        let x = Case::gaussian(Problem::new(1, 20, 4), 8);
        Loki::new(&x.problem, Params::from_options(&options(pairs)).unwrap(), &learn(&x, &Options::new()))
            .unwrap()
    };
    let mut chosen = Vec::new();
    let scores: Vec<f64> = (0..10).map(f64::from).collect();
    let kept = plan(&[("keys", "3"), ("min_len", "0")]);
    kept.choose(&scores, &mut chosen);
    assert_eq!(chosen, [7, 8, 9]);
    kept.choose(&scores[..3], &mut chosen);
    assert_eq!(chosen, [0, 1, 2]);
    plan(&[("fraction", "0.21"), ("min_len", "10")]).choose(&scores, &mut chosen);
    assert_eq!(chosen, [7, 8, 9]);
    plan(&[("fraction", "0.21"), ("min_len", "11")]).choose(&scores, &mut chosen);
    assert_eq!(chosen.len(), 10);
}

#[test]
fn decoding_keeps_the_keys_that_rows_choose() {
    let x = Case::gaussian(Problem::new(1, 3000, 4), 15);
    let calibration = learn(&x, &Options::new());
    // Repeated scores, some of them NaN.
    let scores: Vec<f64> =
        (0..x.k.len()).map(|i| if i % 997 == 3 { f64::NAN } else { (3.0 * x.k[i]).round() }).collect();
    let mut chosen = Vec::new();
    for set in [&[("keys", "700")][..], &[("fraction", "0.3")], &[("fraction", "1")], &[("min_len", "20000")]]
    {
        let plan = Loki::new(&x.problem, Params::from_options(&options(set)).unwrap(), &calibration).unwrap();
        for n in [1, 100, scores.len()] {
            plan.choose(&scores[..n], &mut chosen);
            let pieces = scores[..n].chunks(64).zip((0..).step_by(64));
            let count = |(s, first)| Counts::new(s, first, |_| 1, plan.budget(n));
            let counts: Vec<Counts> = pieces.clone().map(count).collect();
            for counts in [None, Some(&counts[..])] {
                let kept = plan.keep(&scores[..n], counts);
                let (mut found, mut places) = (Vec::new(), vec![0; 65]);
                for (piece, first) in pieces.clone() {
                    let len = kept.places(piece, first, &mut places);
                    found.extend(places[..len].iter().map(|&j| j as usize));
                }
                assert_eq!(found, chosen, "{set:?}, {n} keys");
            }
        }
    }
}

#[test]
fn one_choice_per_group_is_the_union_of_its_best_scores() {
    // With equal queries in all heads, choosing together equals choosing separately.
    let p = Problem::new(3, 97, 8).with_kv_heads(1);
    let mut x = Case::gaussian(p, 9);
    let head = x.q[..97 * 8].to_vec();
    x.q = head.repeat(3);
    let set = |how| [("rank", "3"), ("keys", "13"), ("group_select", how)];
    assert_same_bits(&run(&x, &set("group_max")).o, &run(&x, &set("per_head")).o, "equal queries");
    let y = Case::gaussian(p, 10);
    assert!(run(&y, &set("group_max")).o != run(&y, &set("per_head")).o);
}

/// Expected squared error of scores of the bilinear form $A_q A_k^\top$, relative to that of predicting zero.
fn score_error(r_q: &Mat<f64>, r_k: &Mat<f64>, a_q: &Mat<f64>, a_k: &Mat<f64>, r: usize) -> f64 {
    let d = r_q.rows();
    let form = |i: usize, j: usize| (0..r).map(|c| a_q[(i, c)] * a_k[(j, c)]).sum::<f64>();
    let miss = Mat::from_fn(d, d, |i, j| f64::from(i == j) - form(i, j));
    let error = |m: &Mat<f64>| {
        let left = matmul(r_q.as_ref(), m.as_ref());
        let right = matmul(left.as_ref(), r_k.as_ref());
        (0..d).map(|i| (0..d).map(|j| right[(i, j)] * m[(i, j)]).sum::<f64>()).sum::<f64>()
    };
    error(&miss) / error(&Mat::identity(d))
}

#[test]
fn the_optimal_form_misses_scores_least() {
    let moment = |seed, power: f64| {
        let x = Case::gaussian(Problem::new(1, 400, 16), seed);
        let turn = linalg::thin_qr(MatRef::new(&Case::gaussian(Problem::new(1, 16, 16), seed + 1).q, 16, 16))
            .unwrap()
            .q;
        let scaled = Mat::from_fn(400, 16, |i, j| x.k[i * 16 + j] * (-power * j as f64 / 16.0).exp());
        let mut m = Moments::new(16);
        m.update(matmul_nt(scaled.as_ref(), turn.as_ref()).as_ref());
        m.covariance().unwrap()
    };
    let (r_q, r_k) = (moment(1, 3.0), moment(5, 1.5));
    let pca = symmetric_eigen(r_k.as_ref()).unwrap().vectors;
    let (a_q, a_k) = qk_optimal(&r_q, &r_k).unwrap();
    for r in [1, 4, 9] {
        let (best, plain) = (score_error(&r_q, &r_k, &a_q, &a_k, r), score_error(&r_q, &r_k, &pca, &pca, r));
        assert!(best < 0.9 * plain, "rank {r}: {best} against {plain}");
    }
    assert!(score_error(&r_q, &r_k, &a_q, &a_k, 16) < 1e-20);
    // Without knowledge of the queries it is principal component analysis.
    let (a_q, a_k) = qk_optimal(&Mat::identity(16), &r_k).unwrap();
    for r in [1, 4, 9] {
        let gap = score_error(&Mat::identity(16), &r_k, &a_q, &a_k, r)
            - score_error(&Mat::identity(16), &r_k, &pca, &pca, r);
        assert!(gap.abs() < 1e-12, "rank {r}");
    }
}

#[test]
fn pieces_of_a_calibration_merge_and_a_saved_one_gives_the_same_bits() {
    let x = Case::gaussian(Problem::new(2, 97, 8).with_kv_heads(1), 11);
    let p = x.problem;
    let whole = learn(&x, &Options::new());
    let view = |x, h| TensorRef::bhnd(x, [1, h, 97, 8]).unwrap();
    let (q, k) = (view(&x.q, 2), view(&x.k, 1));
    let mut parts = [0..40, 40..97].map(|r: Range<usize>| {
        let mut c = Calibrator::new(&p);
        c.update(&Qkv::new(q.rows(r.clone()), k.rows(r.clone()), k.rows(r)).into()).unwrap();
        c
    });
    parts.reverse();
    let [mut a, b] = parts;
    a.merge(&b);
    let merged = a.finish(Basis::Pca).unwrap();
    assert_rows_close(&merged.matrices["lambda.0"].data, &whole.matrices["lambda.0"].data, 1e-13, "merged");
    assert_eq!(merged.matrices["count.0"].data, [97.0]);
    let loaded: Calibration = serde_json::from_str(&serde_json::to_string(&whole).unwrap()).unwrap();
    let set = options(&[("min_len", "0"), ("rank", "2")]);
    assert_same_bits(&run_on(&x, &set, &loaded).o, &run_on(&x, &set, &whole).o, "saved and loaded");
}

#[test]
fn calibrations_that_do_not_fit_are_refused() {
    let x = Case::gaussian(Problem::new(2, 97, 8), 12);
    let c = learn(&x, &Options::new());
    let plan = |p: &Problem, o: &Options, c| METHOD.plan_with(p, o, c).map(|_| ());
    assert!(plan(&x.problem, &Options::new(), Some(&c)).is_ok());
    assert!(matches!(plan(&x.problem, &Options::new(), None), Err(Error::Unsupported { .. })));
    let other = Problem::new(2, 97, 16);
    assert!(matches!(plan(&other, &Options::new(), Some(&c)), Err(Error::Calibration { .. })));
    let pca = options(&[("basis", "pca")]);
    let keys_alone = learn(&x, &pca);
    assert!(plan(&x.problem, &pca, Some(&keys_alone)).is_ok());
    assert!(matches!(plan(&x.problem, &Options::new(), Some(&keys_alone)), Err(Error::Calibration { .. })));
    let both = options(&[("rank", "2"), ("variance", "0.5")]);
    assert!(matches!(plan(&x.problem, &both, Some(&c)), Err(Error::InvalidParam { .. })));
    assert!(Calibrator::new(&x.problem).finish(Basis::Pca).is_err());
}

#[test]
fn the_stream_holds_no_more_than_the_cache() {
    let p = Problem { d_v: 6, ..Problem::new(1, 50, 8).causal() };
    let x = Case::gaussian(p, 13);
    for (basis, extra) in [("pca", 0), ("qk_optimal", 2)] {
        let set = options(&[("basis", basis)]);
        let plan = METHOD.plan_with(&p, &set, Some(&learn(&x, &set))).unwrap();
        let mut stream = plan.stream(crate::DType::F32).unwrap();
        let narrow = |x: &[f64]| x.iter().map(|&x| x as f32).collect::<Vec<f32>>();
        let (k, v) = (narrow(&x.k), narrow(&x.v));
        let (k, v) =
            (TensorRef::bhnd(&k, [1, 1, 50, 8]).unwrap(), TensorRef::bhnd(&v, [1, 1, 50, 6]).unwrap());
        stream.push(k.into(), v.into(), &mut Workspace::single().unwrap()).unwrap();
        assert_eq!(stream.state_bytes(), 4 * 50 * (8 + 6 + extra));
    }
}

#[test]
fn errors_and_captured_mass_on_synthetic_heads_are_the_specified_ones() {
    let wanted = [
        (Workload::Iid, 1, 1.22, 0.45),
        (Workload::Smooth, table::SEEDS, 1.01, 0.52),
        (Workload::Decaying, 1, 0.0060, 0.99),
    ];
    for (workload, seeds, want, want_mass) in wanted {
        let (mut error, mut mass) = (0.0, 0.0);
        for seed in 0..seeds {
            let (e, m) = on_table(workload, seed);
            error += e / seeds as f64;
            mass += m / seeds as f64;
        }
        table::assert_error(mass, want_mass, &format!("{workload:?}, mass"));
        table::assert_error(error, want, &format!("{workload:?}"));
    }
}

#[test]
fn clustered_heads_lose_hardly_more_than_with_exact_top_k() {
    // The error itself differs by a factor of two between streams; its ratio to that of exact top-k does not.
    let (error, mass) = on_table(Workload::Clustered, 0);
    let best =
        table::error_of(registry::method("top_k").unwrap(), &[("keys", "512")], None, Workload::Clustered, 1);
    table::assert_error(error / best, 0.0013 / 0.0012, "ratio");
    assert!(mass > 0.999 && error < 0.003, "{error}, {mass}");
}

/// Error and captured mass of the authors' basis on a case of the table.
fn on_table(workload: Workload, seed: usize) -> (f64, f64) {
    let x = table::known(workload, seed);
    let ran = run(&x.case, &[("basis", "pca")]);
    let shares = ran.lse.iter().zip(&x.lse).map(|(a, b)| (a - b).exp());
    (metrics::relative_frobenius(&ran.o, &x.o), shares.sum::<f64>() / 2048.0)
}

#[test]
fn all_of_the_keys_are_exact_attention() {
    let x = Case::gaussian(Problem::new(1, 97, 8).causal(), 14);
    let (want, _) = run_method(registry::method("exact").unwrap(), &Options::new(), &x);
    assert_same_bits(&run(&x, &[("fraction", "1")]).o, &want, "fraction of one");
}

#[test]
fn one_key_is_enough_to_learn_from() {
    for basis in ["pca", "qk_optimal"] {
        let x = Case::gaussian(Problem::new(2, 1, 8), 15);
        let ran = run(&x, &[("basis", basis), ("keys", "1")]);
        assert_rows_close(&ran.o, &x.v, 1e-15, basis);
    }
}
