//! Low-rank methods where there is nothing to decompose: equal keys, zero variance, cores without rank.

use attlas::method::{Family, Needs};
use attlas::testkit::adversarial::{Adversary, learn};
use attlas::testkit::{Case, How, Ran, assert_rows_close, reference, run_with};
use attlas::{Calibration, Error, Mask, Method, Options, Problem, registry};

fn low_rank() -> impl Iterator<Item = &'static Method> {
    registry::METHODS.iter().copied().filter(|m| m.family == Family::LowRank)
}

/// Returns the defaults and every probe.
fn settings(method: &Method) -> Vec<Options> {
    let of = |pairs: &[(&str, &str)]| pairs.iter().fold(Options::new(), |o, (k, v)| o.with(k, *v));
    std::iter::once(Options::new()).chain(method.probes.iter().map(|p| of(p))).collect()
}

/// Runs with a calibration learnt from the case itself, if one is needed; `None` if the method refuses.
fn run(method: &Method, options: &Options, case: &Case) -> Option<Ran> {
    let calibration: Option<Calibration> = match method.claims.needs {
        Needs::Calibration => match learn(method, options, case) {
            Ok(c) => c,
            Err(e) => panic!("{} with {options} learns nothing: {e}", method.id),
        },
        _ => None,
    };
    let plan = match method.plan_with(&case.problem, options, calibration.as_ref()) {
        Err(Error::Unsupported { .. }) => return None,
        other => other.unwrap_or_else(|e| panic!("{} with {options}: {e}", method.id)),
    };
    let how = How { lse: method.claims.lse, ..How::default() };
    Some(run_with(&*plan, case, how).unwrap_or_else(|e| panic!("{} with {options}: {e}", method.id)))
}

fn problems() -> Vec<Problem> {
    let square = Problem { d_v: 5, ..Problem::new(2, 83, 6).with_kv_heads(1) };
    vec![square, square.causal(), Problem::new(1, 1, 4).with_lens(40, 90), Problem::new(1, 70, 1)]
}

#[test]
fn no_adversary_makes_a_low_rank_method_answer_with_nan() {
    for method in low_rank() {
        for options in settings(method) {
            for problem in problems() {
                for kind in Adversary::ALL {
                    let case = kind.case(problem, 5);
                    for case in [case.clone(), case.cast_f32()] {
                        let Some(ran) = run(method, &options, &case) else { continue };
                        let what =
                            format!("{} with {options} on {kind:?}, single {}", method.id, case.single);
                        assert!(ran.o.iter().all(|x| x.is_finite()), "{what}: an output is not finite");
                        if method.claims.lse {
                            assert!(ran.lse.iter().all(|x| !x.is_nan()), "{what}: a log-sum-exp is NaN");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn equal_keys_give_the_mean_of_the_values() {
    // Every core has rank one. Only loki, which keeps some of the keys, and skyformer, which does not normalise, differ.
    let settings: [(&str, &[(&str, &str)]); 13] = [
        ("linformer", &[("rank", "7")]),
        ("wildcat", &[("rank", "9")]),
        ("wildcat", &[("rank", "9"), ("bins", "3")]),
        ("lifted_nystrom", &[("landmarks", "9")]),
        ("lifted_nystrom", &[("landmarks", "9"), ("solver", "razavi")]),
        ("lifted_nystrom", &[("landmarks", "9"), ("sampling", "uniform_wr")]),
        ("lifted_nystrom", &[("landmarks", "8"), ("source", "both")]),
        ("nystromformer", &[("landmarks", "9"), ("len_bias", "true")]),
        ("nystromformer", &[("landmarks", "9"), ("pinv", "svd")]),
        ("nystromformer", &[("landmarks", "9"), ("pinv", "svd"), ("rcond", "0")]),
        ("nystromformer", &[("landmarks", "9"), ("pinv", "hyperpower7"), ("iters", "15")]),
        ("csalr", &[("landmarks", "9")]),
        ("csalr", &[("landmarks", "9"), ("pool", "windows")]),
    ];
    for (id, pairs) in settings {
        let method = registry::method(id).unwrap();
        let options = pairs.iter().fold(Options::new(), |o, (k, v)| o.with(k, *v));
        for kind in [Adversary::EqualKeys, Adversary::Zero] {
            let case = kind.case(Problem { d_v: 5, ..Problem::new(2, 83, 6).with_kv_heads(1) }, 7);
            let (want, _) = reference(&case);
            let ran = run(method, &options, &case).unwrap();
            // The lifted kernel is factored with a jitter of a few units of rounding.
            assert_rows_close(&ran.o, &want, 1e-6, &format!("{id} with {options} on {kind:?}"));
        }
    }
}

#[test]
fn a_basis_without_variance_still_ranks_keys() {
    let loki = registry::method("loki").unwrap();
    for kind in [Adversary::EqualKeys, Adversary::Zero, Adversary::Duplicates] {
        let case = kind.case(Problem::new(2, 90, 6).with_kv_heads(1).causal(), 9);
        for pairs in [
            &[("variance", "0.9")][..],
            &[("rank", "2")],
            &[("basis", "qk_optimal")],
            &[("basis", "qk_optimal"), ("variance", "0.5")],
        ] {
            let options = pairs.iter().fold(Options::new().with("min_len", 0), |o, (k, v)| o.with(k, *v));
            let ran = run(loki, &options, &case).unwrap();
            let (want, lse) = reference(&case);
            assert!(ran.o.iter().all(|x| x.is_finite()));
            assert!(ran.lse.iter().zip(&lse).all(|(a, b)| *a <= b + 1e-12));
            // All keys kept: the basis must still be orthogonal.
            let all = run(loki, &options.with("fraction", 0.999), &case).unwrap();
            assert_rows_close(&all.o[..6 * 60], &want[..6 * 60], 1e-10, "nearly all keys");
        }
    }
}

#[test]
fn a_core_of_duplicates_is_as_good_as_without_them() {
    // Three distinct keys: nine landmarks hold each of them several times.
    for mask in [Mask::None, Mask::Causal] {
        let p = Problem { mask, ..Problem::new(1, 120, 6) };
        let case = Adversary::Duplicates.case(p, 11);
        let (want, _) = reference(&case);
        for (id, pairs) in [
            ("wildcat", &[("rank", "12"), ("block", "30")][..]),
            ("wildcat", &[("rank", "12"), ("block", "30"), ("pivoting", "block")]),
            ("lifted_nystrom", &[("landmarks", "20"), ("block", "30"), ("sampling", "rpcholesky")]),
        ] {
            let options = pairs.iter().fold(Options::new(), |o, (k, v)| o.with(k, *v));
            let ran = run(registry::method(id).unwrap(), &options, &case).unwrap();
            assert_rows_close(&ran.o, &want, 1e-6, &format!("{id} with {options}, {mask:?}"));
        }
    }
}
