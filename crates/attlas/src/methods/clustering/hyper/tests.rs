use super::*;
use crate::Options;
use crate::metrics::relative_frobenius;
use crate::testkit::{
    Case, assert_rows_close, assert_same_bits, check_method, reference, reference_masked, run_method,
    run_with,
};
use attlas_num::hash::SignHash;

/// Approximate settings for short problems.
fn options(pairs: &[(&str, &str)]) -> Options {
    pairs.iter().fold(Options::new().with("n_min", 0), |o, (k, v)| o.with(k, *v))
}

/// Relative error of the output and mean of $e^{\hat\ell - \ell}$.
fn quality(options: &Options, x: &Case, exact: &(Vec<f64>, Vec<f64>)) -> (f64, f64) {
    let (o, lse) = run_method(&METHOD, options, x);
    let mass = lse.iter().zip(&exact.1).map(|(a, b)| (a - b).exp()).sum::<f64>() / lse.len() as f64;
    (relative_frobenius(&o, &exact.0), mass)
}

#[test]
fn honours_the_contract() {
    check_method(&METHOD);
}

#[test]
fn samples_of_all_keys_without_replacement_are_exact_for_any_block() {
    // Forces the approximate path: the plan itself would call the exact kernel here.
    for (n_q, n_k, block) in [(1, 2, 1), (5, 3, 2), (97, 97, 10), (13, 200, 16), (200, 13, 4)] {
        let x = Case::gaussian(Problem { d_v: 3, ..Problem::new(1, 1, 8).with_lens(n_q, n_k) }, 1);
        let mut out = vec![f64::NAN; n_q * 3];
        let mut lse = vec![f64::NAN; n_q];
        let ws = crate::Workspace::single().unwrap();
        let q = crate::TensorRef::bhnd(&x.q, [1, 1, n_q, 8]).unwrap();
        ws.install(|cx| {
            let mut group = Group {
                q: crate::group::Queries::new(q),
                k: crate::MatRef::new(&x.k, n_k, 8),
                v: crate::MatRef::new(&x.v, n_k, 3),
                scale: x.problem.scale,
                mask: Mask::None,
                out: &mut out,
                lse: &mut lse,
                index: crate::group::GroupIndex { batch: 0, kv_head: 0 },
                cx,
            };
            let key = group.index.stream_key(3);
            let ranks = Ranks::new(group.q, group.k, SignHash::new(key, 8, 5, 1).as_ref());
            for assign in [Assign::Balanced, Assign::Alone] {
                let blocks = SortedBlocks::new(&ranks, &Rectangle::whole(&group), None, block, assign);
                let all = UniformSamples::new(n_k, n_k, false, key);
                attend_blocks(&mut group, &blocks, |c| all.outside(&blocks, c)).unwrap();
                let (want, want_lse) = reference(&x);
                assert_rows_close(group.out, &want, 1e-13, "output");
                assert_rows_close(group.lse, &want_lse, 1e-13, "log-sum-exp");
            }
        });
    }
}

#[test]
fn the_normaliser_is_unbiased_in_the_practical_variant() {
    let problem = Problem::new(1, 97, 8);
    for (p, sampling) in [
        (problem, "without_replacement"),
        (problem, "with_replacement"),
        (problem.causal(), "without_replacement"),
    ] {
        let x = Case::gaussian(p, 2);
        let (_, exact) = reference(&x);
        let seeds = 600;
        let mut sums = vec![(0.0, 0.0); 97];
        for seed in 0..seeds {
            let o = options(&[("block", "8"), ("samples", "24"), ("hashes", "4"), ("sampling", sampling)]);
            let (_, lse) = run_method(&METHOD, &o.with("n_min", 12).with("seed", seed as u64), &x);
            for (s, (l, e)) in sums.iter_mut().zip(lse.iter().zip(&exact)) {
                let ratio = (l - e).exp();
                *s = (s.0 + ratio, s.1 + ratio * ratio);
            }
        }
        let n = seeds as f64;
        for (row, (sum, squares)) in sums.into_iter().enumerate() {
            let mean = sum / n;
            let error = ((squares / n - mean * mean).max(0.0) / (n - 1.0)).sqrt();
            assert!((mean - 1.0).abs() <= 5.0 * error + 1e-9, "{sampling}, row {row}: {mean} ± {error}");
        }
    }
}

#[test]
fn constant_values_are_reproduced_and_outputs_stay_in_their_hull() {
    for p in [Problem::new(2, 150, 8), Problem::new(2, 150, 8).causal()] {
        for sampling in ["without_replacement", "with_replacement"] {
            let o = options(&[("block", "16"), ("samples", "20"), ("n_min", "10"), ("sampling", sampling)]);
            let mut x = Case::gaussian(p, 3);
            let (low, high) = x.v.iter().fold((0.0f64, 0.0f64), |(a, b), &v| (a.min(v), b.max(v)));
            let (out, _) = run_method(&METHOD, &o, &x);
            assert!(out.iter().all(|&v| v >= low - 1e-12 && v <= high + 1e-12));
            x.v.fill(-2.5);
            let (out, _) = run_method(&METHOD, &o, &x);
            assert_rows_close(&out, &vec![-2.5; out.len()], 1e-12, sampling);
        }
    }
}

#[test]
fn the_practical_variant_is_linear_in_the_values() {
    let p = Problem::new(1, 120, 8);
    let (a, b) = (Case::gaussian(p, 4), Case::gaussian(p, 5));
    let o = options(&[("block", "16"), ("samples", "20")]);
    let run = |v: Vec<f64>| run_method(&METHOD, &o, &Case { v, ..a.clone() }).0;
    let sum = run(a.v.iter().zip(&b.v).map(|(x, y)| x - 2.0 * y).collect());
    let want: Vec<f64> = run(a.v.clone()).iter().zip(run(b.v.clone())).map(|(x, y)| x - 2.0 * y).collect();
    assert_rows_close(&sum, &want, 1e-12, "sum of values");
}

#[test]
fn without_bits_and_samples_the_blocks_are_those_of_the_tokens() {
    let x = Case::gaussian(Problem::new(1, 50, 8), 6);
    let (o, lse) = run_method(&METHOD, &options(&[("block", "7"), ("samples", "0"), ("hashes", "0")]), &x);
    let block = |i: usize| (0..8).filter(|c| i >= c * 50 / 8).count();
    let (want, want_lse) = reference_masked(&x, |i, j| block(i) == block(j));
    assert_rows_close(&o, &want, 1e-13, "output");
    assert_rows_close(&lse, &want_lse, 1e-13, "log-sum-exp");
}

#[test]
fn the_error_of_the_block_part_is_bounded_by_the_lost_mass() {
    let x = Case::clustered(Problem::new(1, 300, 8), 7);
    let exact = reference(&x);
    let (o, lse) = run_method(&METHOD, &options(&[("block", "32"), ("samples", "0")]), &x);
    let diameter = (0..300)
        .flat_map(|i| (0..i).map(move |j| (i, j)))
        .map(|(i, j)| (0..8).map(|c| (x.v[i * 8 + c] - x.v[j * 8 + c]).powi(2)).sum::<f64>().sqrt())
        .fold(0.0, f64::max);
    for i in 0..300 {
        let lost = 1.0 - (lse[i] - exact.1[i]).exp();
        let gap = (0..8).map(|c| (o[i * 8 + c] - exact.0[i * 8 + c]).powi(2)).sum::<f64>().sqrt();
        assert!(lost > -1e-12 && gap <= lost * diameter + 1e-12, "row {i}: {gap}, lost {lost}");
    }
}

#[test]
fn the_error_falls_with_the_root_of_the_samples() {
    let x = Case::gaussian(Problem::new(1, 512, 16), 8);
    let exact = reference(&x);
    let error = |samples: usize| {
        let runs = 12;
        let total: f64 = (0..runs)
            .map(|seed| {
                let o = options(&[("block", "32")]).with("samples", samples).with("seed", seed as u64);
                quality(&o.with("sampling", "with_replacement"), &x, &exact).0.powi(2)
            })
            .sum();
        (total / runs as f64).sqrt()
    };
    let (few, many) = (error(16), error(256));
    let slope = (many / few).ln() / 16f64.ln();
    assert!((-0.62..-0.38).contains(&slope), "slope {slope}: {few} → {many}");
}

#[test]
fn sinks_are_seen_exactly() {
    // Nearly all mass on the sinks, the rest flat: sampling cannot harm what is not sampled.
    let mut x = Case::with_heavy_sinks(Problem::new(1, 256, 16), 9);
    x.q.iter_mut().for_each(|q| *q *= 2.0);
    x.k[4 * 16..].iter_mut().for_each(|k| *k *= 0.05);
    x.v[..4 * 16].iter_mut().for_each(|v| *v *= 50.0);
    for p in [x.problem, x.problem.causal()] {
        let x = x.with_problem(p);
        let exact = reference(&x);
        let o = options(&[("block", "16"), ("samples", "16"), ("n_min", "16")]);
        let (without, _) = quality(&o, &x, &exact);
        let (with, mass) = quality(&o.with("near.sinks", 4), &x, &exact);
        assert!(with < 0.15 && without > 5.0 * with, "{without} → {with}");
        assert!((mass - 1.0).abs() < 0.01, "mass {mass}");
    }
}

/// Figures of the documentation page, $n = 2048$, $d = 64$: error within 15 %, with sinks within a factor of 1.5.
#[test]
fn reference_figures_are_met() {
    let p = Problem::new(1, 2048, 64);
    let full = |seed: u64, o: &[(&str, &str)]| options(o).with("seed", seed);
    let mean = |cases: &[(Case, (Vec<f64>, Vec<f64>))], o: &[(&str, &str)]| {
        let runs: Vec<(f64, f64)> =
            cases.iter().enumerate().map(|(s, (x, e))| quality(&full(s as u64, o), x, e)).collect();
        let n = runs.len() as f64;
        (runs.iter().map(|r| r.0).sum::<f64>() / n, runs.iter().map(|r| r.1).sum::<f64>() / n)
    };
    let exact = |x: Case| {
        let plan = crate::registry::method("exact").unwrap();
        let e = run_method(plan, &Options::new(), &x);
        (x, e)
    };
    let iid: Vec<_> = (0..3).map(|s| exact(Case::gaussian(p, s))).collect();
    let clustered: Vec<_> = (0..3).map(|s| exact(Case::clustered(p, s))).collect();
    let sinks: Vec<_> = (0..3).map(|s| exact(Case::with_heavy_sinks(p, s))).collect();
    let base = [("block", "256"), ("samples", "256")];
    let with = |more: (&'static str, &'static str)| [base[0], base[1], more];
    let close = |got: f64, want: f64, tol: f64| assert!((got / want - 1.0).abs() < tol, "{got} for {want}");
    let report = |got: (f64, f64), want: (f64, f64)| {
        close(got.0, want.0, 0.15);
        close(got.1, want.1, 0.05);
    };
    report(mean(&iid, &base), (2.39, 1.0));
    report(mean(&clustered, &base), (0.202, 1.0));
    // Four sinks, each found with probability 1/8: the mass of three runs is no evidence.
    close(mean(&sinks, &base).0, 3.05, 0.5);
    let near = [base[0], base[1], ("near.sinks", "4"), ("near.guard", "false")];
    report(mean(&clustered, &near), (0.199, 1.0));
    report(mean(&sinks, &near), (1.31, 1.0));
    report(mean(&clustered, &with(("sampling", "with_replacement"))), (0.208, 1.0));
    report(mean(&clustered, &[base[0], ("samples", "0")]), (0.266, 0.42));
}

#[test]
fn causal_reference_figures_are_met() {
    let p = Problem::new(1, 2048, 64).causal();
    let o = [("block", "64"), ("samples", "128"), ("n_min", "256")];
    for (x, want) in [(Case::gaussian(p, 1), 0.85), (Case::clustered(p, 1), 0.185)] {
        let exact = run_method(crate::registry::method("exact").unwrap(), &Options::new(), &x);
        let (error, mass) = quality(&options(&o), &x, &exact);
        assert!((error / want - 1.0).abs() < 0.15, "{error} for {want}");
        assert!((mass - 1.0).abs() < 0.05, "mass {mass}");
    }
}

#[test]
fn the_theory_variant_without_cap_and_floor_has_the_practical_normaliser() {
    let x = Case::gaussian(Problem::new(2, 130, 8).with_kv_heads(1), 10);
    let o = options(&[("block", "16"), ("samples", "40"), ("sampling", "with_replacement")]);
    let (_, practical) = run_method(&METHOD, &o, &x);
    let theory = o.clone().with("variant", "theory").with("cap", f64::INFINITY).with("kappa", f64::INFINITY);
    let (_, lse) = run_method(&METHOD, &theory, &x);
    assert_rows_close(&lse, &practical, 1e-12, "log-sum-exp");
    // The cap and the floor take effect.
    let (_, capped) = run_method(&METHOD, &theory.with("cap", 1e-3), &x);
    assert!(capped.iter().zip(&lse).all(|(a, b)| a <= b) && capped != lse);
    let (_, floored) = run_method(&METHOD, &o.with("variant", "theory").with("kappa", 1.0), &x);
    assert!(floored.iter().zip(&capped).all(|(a, b)| a > b));
}

#[test]
fn the_theory_variant_nears_exact_attention_with_more_samples() {
    let x = Case::gaussian(Problem::new(1, 400, 8), 11);
    let exact = reference(&x);
    let error = |samples: usize| {
        let runs = (0..6).map(|seed: u64| {
            let o =
                options(&[("block", "25"), ("variant", "theory")]).with("samples", samples).with("cap", 1e3);
            quality(&o.with("seed", seed), &x, &exact).0
        });
        runs.sum::<f64>() / 6.0
    };
    let (few, many) = (error(20), error(320));
    assert!(many < 0.45 * few, "{few} → {many}");
}

#[test]
fn a_column_far_above_the_block_does_not_overflow() {
    let mut x = Case::gaussian(Problem::new(1, 64, 4), 12);
    x.k[..4].fill(300.0);
    x.q[..4].fill(300.0);
    let o = options(&[("block", "4"), ("samples", "60"), ("variant", "theory")]);
    for seed in 0..20u64 {
        let (out, lse) = run_method(&METHOD, &o.clone().with("seed", seed), &x);
        assert!(out.iter().chain(&lse).all(|x| x.is_finite()));
    }
}

#[test]
fn a_causal_theory_variant_is_refused_with_the_reason() {
    let p = Problem::new(1, 64, 4).causal();
    let error = METHOD.plan(&p, &Options::new().with("variant", "theory")).unwrap_err();
    assert!(error.to_string().contains("variant = practical"), "{error}");
    assert!(
        METHOD.plan(&Problem::new(1, 64, 4), &options(&[("variant", "theory"), ("samples", "0")])).is_err()
    );
}

#[test]
fn query_heads_of_a_group_share_the_sampled_keys() {
    let p = Problem::new(2, 120, 8).with_kv_heads(1);
    let mut x = Case::gaussian(p, 13);
    let (first, second) = x.q.split_at_mut(120 * 8);
    second.copy_from_slice(first);
    let (o, _) = run_method(&METHOD, &options(&[("block", "16"), ("samples", "20")]), &x);
    assert_same_bits(&o[..120 * 8], &o[120 * 8..], "equal query heads");
}

#[test]
fn visited_pairs_are_counted_as_the_cost_says() {
    let p = Problem::new(1, 1024, 8);
    let o = options(&[("block", "32"), ("samples", "32"), ("hashes", "5")]);
    let plan = METHOD.plan(&p, &o).unwrap();
    let ran = run_with(&*plan, &Case::gaussian(p, 14), Default::default()).unwrap();
    let (rows, visited) = (1024u64, ran.info.keys_visited);
    assert!(visited <= rows * 64 && visited > rows * 60, "{visited}");
    assert_eq!(plan.cost().run_flops, 2 * rows * 64 * 16);
    let exact = crate::registry::method("exact").unwrap().plan(&p, &Options::new()).unwrap();
    assert!(plan.cost().flops() * 10 < exact.cost().flops());
}
