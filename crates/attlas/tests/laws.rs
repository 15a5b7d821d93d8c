//! Laws of softmax attention on random shapes, for the exact methods.

use attlas::testkit::{Case, assert_rows_close, reference, run_method};
use attlas::{Mask, Options, Problem, registry};
use proptest::prelude::*;

fn problems() -> impl Strategy<Value = Problem> {
    (
        1..3usize,
        1..4usize,
        1..3usize,
        0..70usize,
        0..70usize,
        1..40usize,
        1..40usize,
        any::<bool>(),
        0.0..2.0f64,
    )
        .prop_map(|(batch, groups, kv, n_q, n_k, d, d_v, causal, scale)| Problem {
            batch,
            n_heads: groups * kv,
            n_kv_heads: kv,
            n_q,
            n_k,
            d,
            d_v,
            scale,
            mask: if causal { Mask::Causal } else { Mask::None },
            near: attlas::Near::NONE,
            softcap: None,
        })
}

proptest! {
    #![proptest_config(ProptestConfig::default())]

    #[test]
    fn exact_methods_agree_with_two_passes(problem in problems(), seed in 0..1000u64) {
        let case = Case::gaussian(problem, seed);
        let (want, want_lse) = reference(&case);
        for id in ["naive", "exact"] {
            let (o, lse) = run_method(registry::method(id).unwrap(), &Options::new(), &case);
            assert_rows_close(&o, &want, 1e-12, id);
            assert_rows_close(&lse, &want_lse, 1e-12, id);
        }
    }

    #[test]
    fn single_precision_stays_within_the_practical_bound(problem in problems(), seed in 0..1000u64) {
        let case = Case::gaussian(problem, seed).cast_f32();
        let (want, _) = reference(&case);
        let (o, _) = run_method(registry::method("exact").unwrap(), &Options::new(), &case);
        let range = case.v.iter().fold(0.0f64, |a, v| a.max(2.0 * v.abs()));
        for (got, want) in o.iter().zip(&want) {
            prop_assert!((got - want).abs() <= 2e-5 * range);
        }
    }

    #[test]
    fn shifting_all_keys_moves_the_normaliser_alone(problem in problems(), seed in 0..1000u64, shift in -3.0..3.0f64) {
        let case = Case::gaussian(problem, seed);
        let mut moved = case.clone();
        moved.k.iter_mut().for_each(|k| *k += shift);
        let exact = registry::method("exact").unwrap();
        let ((a, la), (b, lb)) = (run_method(exact, &Options::new(), &case), run_method(exact, &Options::new(), &moved));
        assert_rows_close(&b, &a, 1e-10, "outputs");
        let added: Vec<f64> = case.q.chunks(problem.d).map(|q| problem.scale * shift * q.iter().sum::<f64>()).collect();
        let want: Vec<f64> = la.iter().zip(&added).map(|(l, s)| l + s).collect();
        assert_rows_close(&lb, &want, 1e-10, "log-sum-exp");
    }

    #[test]
    fn keys_twice_add_the_logarithm_of_two(problem in problems(), seed in 0..1000u64) {
        let problem = Problem { mask: Mask::None, ..problem };
        let case = Case::gaussian(problem, seed);
        let twice = |x: &[f64], width: usize| {
            x.chunks(problem.n_k * width).flat_map(|head| head.repeat(2)).collect::<Vec<f64>>()
        };
        let double = Case {
            problem: Problem { n_k: 2 * problem.n_k, ..problem },
            k: if problem.n_k == 0 { vec![] } else { twice(&case.k, problem.d) },
            v: if problem.n_k == 0 { vec![] } else { twice(&case.v, problem.d_v) },
            ..case.clone()
        };
        let exact = registry::method("exact").unwrap();
        let ((a, la), (b, lb)) = (run_method(exact, &Options::new(), &case), run_method(exact, &Options::new(), &double));
        assert_rows_close(&b, &a, 1e-12, "outputs");
        let want: Vec<f64> = la.iter().map(|l| l + 2f64.ln()).collect();
        assert_rows_close(&lb, &want, 1e-12, "log-sum-exp");
    }
}
