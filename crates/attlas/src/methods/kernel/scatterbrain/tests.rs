use super::residual::Hull;
use super::*;
use crate::Options;
use crate::engine::linear::testing::{naive, naive_positive, run, scaled_case};
use crate::testkit::{Case, assert_rows_close, check_method, reference, run_method};
use attlas_num::hash::lift::max_norm;
use attlas_num::sketch::Coupling;
use attlas_num::sketch::variance::{Pair, exp_relative_variance};

fn options(pairs: &[(&str, &str)]) -> Options {
    pairs.iter().fold(Options::new(), |o, (k, v)| o.with(k, *v))
}

/// The features of a run without a mask.
fn features(o: &Options, x: &Case) -> ExpFeatures<f64> {
    let p = &x.problem;
    let params = Params::from_options(o).unwrap();
    let key = GroupIndex { batch: 0, kv_head: 0 }.stream_key(params.seed).named("directions");
    let count = params.features.div_ceil(2);
    let omega = draw_directions(params.directions.coupling(), count, p.d, key).unwrap();
    let map = MapOptions { scale: p.scale, ..MapOptions::default() };
    ExpFeatures::new(&Exponent::favor(p.d), &omega, true, map).unwrap()
}

/// The logarithm of the estimated kernel of every pair, `n_q × n_k`.
fn estimates(o: &Options, x: &Case) -> Vec<f64> {
    let p = &x.problem;
    let alone = |i: usize, j: usize| {
        let one = Problem { d_v: 1, n_heads: 1, ..*p }.with_lens(1, 1);
        let pair = Case {
            problem: one,
            q: x.q[i * p.d..(i + 1) * p.d].to_vec(),
            k: x.k[j * p.d..(j + 1) * p.d].to_vec(),
            v: vec![1.0],
            single: false,
        };
        naive_positive(&features(o, x), &pair).1[0]
    };
    (0..p.n_q).flat_map(|i| (0..p.n_k).map(move |j| (i, j))).map(|(i, j)| alone(i, j)).collect()
}

fn score(x: &Case, i: usize, j: usize) -> f64 {
    let d = x.problem.d;
    let dot: f64 = x.q[i * d..(i + 1) * d].iter().zip(&x.k[j * d..(j + 1) * d]).map(|(a, b)| a * b).sum();
    x.problem.scale * dot
}

/// The definition: exact scores where `on` is true, estimates elsewhere.
fn definition(o: &Options, x: &Case, on: impl Fn(usize, usize) -> bool) -> (Vec<f64>, Vec<f64>) {
    let table = estimates(o, x);
    naive(x, |_, i, j| (1.0, if on(i, j) { score(x, i, j) } else { table[i * x.problem.n_k + j] }))
}

#[test]
fn honours_the_contract() {
    check_method(&METHOD);
}

#[test]
fn rows_are_exact_on_a_window_and_estimated_elsewhere() {
    let o = options(&[("support", "window"), ("keys", "5"), ("features", "24")]);
    for (n_q, n_k) in [(70, 70), (30, 90), (140, 20), (1, 40)] {
        let x = scaled_case(Problem { d_v: 3, ..Problem::new(1, 1, 4).with_lens(n_q, n_k) }, 1, 0.7);
        let at = |i: usize| i as isize + n_k as isize - n_q as isize;
        let want = definition(&o, &x, |i, j| (j as isize - at(i)).abs() < 5);
        let (got, lse) = run_method(&METHOD, &o, &x);
        assert_rows_close(&got, &want.0, 1e-10, &format!("{n_q} × {n_k}"));
        assert_rows_close(&lse, &want.1, 1e-10, &format!("{n_q} × {n_k}, log-sum-exp"));
    }
}

#[test]
fn rows_are_exact_on_the_largest_scores_and_estimated_elsewhere() {
    let o = options(&[("support", "top_k"), ("keys", "6"), ("features", "24")]);
    let x = scaled_case(Problem { d_v: 3, ..Problem::new(1, 60, 4) }, 2, 0.7);
    let nth = |i: usize| {
        let mut scores: Vec<f64> = (0..60).map(|j| score(&x, i, j)).collect();
        scores.sort_by(f64::total_cmp);
        scores[60 - 6]
    };
    let limits: Vec<f64> = (0..60).map(nth).collect();
    let want = definition(&o, &x, |i, j| score(&x, i, j) >= limits[i]);
    assert_rows_close(&run_method(&METHOD, &o, &x).0, &want.0, 1e-10, "largest scores");
}

#[test]
fn pairs_that_meet_in_several_rounds_count_once() {
    let o = options(&[("support", "lsh"), ("keys", "9"), ("rounds", "4"), ("features", "24")]);
    for (n_q, n_k) in [(60, 60), (25, 80)] {
        let x = scaled_case(Problem { d_v: 3, ..Problem::new(1, 1, 4).with_lens(n_q, n_k) }, 3, 0.7);
        let (q, k) = (MatRef::new(&x.q, n_q, 4), MatRef::new(&x.k, n_k, 4));
        let plan = Scatterbrain::new(&x.problem, Params::from_options(&o).unwrap()).unwrap();
        let ws = crate::Workspace::single().unwrap();
        let index = GroupIndex { batch: 0, kv_head: 0 };
        let rounds = plan.rounds(q, k, max_norm(k), index, ws.context());
        // How often every pair is in a tile, and how often it is visible there.
        let (mut met, mut seen) = (vec![0; n_q * n_k], vec![0; n_q * n_k]);
        for round in &rounds {
            for (rows, keys) in &round.tiles {
                for &i in &round.rows[rows.clone()] {
                    let keys = &round.keys[keys.clone()];
                    let mut logits = vec![0.0; keys.len()];
                    round.see.hide(i, keys, &mut logits);
                    for (&j, l) in keys.iter().zip(&logits) {
                        met[i as usize * n_k + j as usize] += 1;
                        seen[i as usize * n_k + j as usize] += usize::from(*l == 0.0);
                    }
                }
            }
        }
        assert!(met.iter().any(|&m| m > 1));
        assert!(met.iter().zip(&seen).all(|(m, s)| *s == usize::from(*m > 0)));
        let want = definition(&o, &x, |i, j| met[i * n_k + j] > 0);
        assert_rows_close(&run_method(&METHOD, &o, &x).0, &want.0, 1e-10, "union of rounds");
    }
}

#[test]
fn causal_rows_are_exact_on_their_window_and_estimated_before_it() {
    let o = options(&[("keys", "5"), ("features", "24")]);
    for (n_q, n_k) in [(1, 1), (33, 33), (203, 203), (40, 150), (150, 40)] {
        let x = scaled_case(Problem { d_v: 3, ..Problem::new(1, 1, 4).with_lens(n_q, n_k).causal() }, 4, 0.7);
        let at = |i: usize| (i + n_k).saturating_sub(n_q);
        // Blocks of 32 rows; at least the five nearest keys of the block's first row.
        let want = definition(&o, &x, |i, j| j + 5 > at(i) / 32 * 32);
        let (got, lse) = run_method(&METHOD, &o, &x);
        assert_rows_close(&got, &want.0, 1e-10, &format!("{n_q} × {n_k}"));
        assert_rows_close(&lse, &want.1, 1e-10, &format!("{n_q} × {n_k}, log-sum-exp"));
    }
    // More than one piece, each with a state of its own.
    let x = scaled_case(Problem { d_v: 3, ..Problem::new(1, 2500, 4).with_lens(20, 2500).causal() }, 5, 0.7);
    let want = definition(&o, &x, |i, j| j + 5 > (i + 2480) / 32 * 32);
    assert_rows_close(&run_method(&METHOD, &o, &x).0, &want.0, 1e-9, "two pieces and a half");
}

#[test]
fn without_a_support_it_is_performer() {
    let x = scaled_case(Problem::new(2, 90, 8), 6, 0.8);
    let o = options(&[("keys", "0"), ("features", "32")]);
    let performer = crate::registry::method("performer").unwrap();
    let (want, want_lse) = run_method(performer, &options(&[("features", "32")]), &x);
    let (got, lse) = run_method(&METHOD, &o, &x);
    assert_rows_close(&got, &want, 1e-11, "hyperbolic features alone");
    assert_rows_close(&lse, &want_lse, 1e-11, "log-sum-exp");
}

#[test]
fn a_support_of_everything_is_softmax_although_the_residual_cancels() {
    let x = Case::gaussian(Problem::new(1, 50, 8), 7);
    let want = reference(&x).0;
    // One cluster of 49 of 50 keys, twice: almost everything; a window that covers everything.
    let near = run_method(&METHOD, &options(&[("support", "window"), ("keys", "49")]), &x);
    let all = options(&[("support", "top_k"), ("keys", "49"), ("features", "64")]);
    let missing = run_method(&METHOD, &all, &x).0;
    assert!(crate::metrics::relative_frobenius(&missing, &want) < 0.02);
    // Only the first row misses the last key, and only the last row misses the first.
    assert_rows_close(&near.0[8..49 * 8], &want[8..49 * 8], 1e-12, "rows that see everything");
    // Row 69 alone sees a key more than its window holds.
    let causal = Case::gaussian(Problem { d_v: 5, ..Problem::new(1, 70, 8).causal() }, 5);
    let (got, lse) = run_method(&METHOD, &options(&[("keys", "69")]), &causal);
    let (want, want_lse) = reference(&causal);
    assert_rows_close(&got[..69 * 5], &want[..69 * 5], 1e-12, "a causal window over everything");
    assert_rows_close(&lse[..69], &want_lse[..69], 1e-12, "log-sum-exp");
    assert_ne!(lse[69], want_lse[69]);
}

/// One query and two keys, the second in the window; many independent draws at once.
fn two_keys(draws: usize) -> Case {
    let p = Problem { d_v: 1, scale: 1.0, batch: draws, ..Problem::new(1, 1, 4).with_lens(1, 2) };
    let (q, k) = ([0.5, 0.0, 0.0, 0.0], [0.3, 0.4, 0.0, 0.0, 0.9, -0.2, 0.1, 0.4]);
    Case { problem: p, q: q.repeat(draws), k: k.repeat(draws), v: [1.0, -1.0].repeat(draws), single: false }
}

#[test]
fn entries_off_the_support_have_the_variance_of_the_map_and_those_on_it_none() {
    let draws = 20_000;
    let x = two_keys(draws);
    let on = score(&x, 0, 1).exp();
    let pair = Pair::of(&x.q[..4], &x.k[..4]);
    let variance = exp_relative_variance(&pair, 4, 4, Coupling::Orthogonal, 0.0, true) * pair.sm().powi(2);
    assert!((variance - 0.06965431518).abs() < 1e-9);
    let o = options(&[("support", "window"), ("keys", "1"), ("features", "8")]);
    // The normaliser less the exact entry: the estimate of the other one.
    let values: Vec<f64> = run(&METHOD, &o, &x).lse.iter().map(|l| l.exp() - on).collect();
    let n = draws as f64;
    let mean = values.iter().sum::<f64>() / n;
    let central = |p: i32| values.iter().map(|v| (v - mean).powi(p)).sum::<f64>() / n;
    let (spread, fourth) = (central(2), central(4));
    // Counting the estimate on the support too would raise the mean by the kernel there, above one.
    assert!((mean - pair.sm()).abs() < 5.0 * (variance / n).sqrt(), "{mean}, {}", pair.sm());
    let error = ((fourth - spread * spread) / n).sqrt();
    assert!((spread - variance).abs() < 5.0 * error, "{spread}, {variance} ± {error}");
    assert!(error < 0.05 * variance);
}

#[test]
fn hashed_supports_lower_the_variance_by_the_chance_to_meet() {
    // Two keys in clusters of one: the query is paired with one of them, by a line independent of the features.
    let draws = 20_000;
    let x = two_keys(draws);
    let o = options(&[("support", "lsh"), ("keys", "1"), ("rounds", "1"), ("features", "8")]);
    let exact = [score(&x, 0, 0).exp(), score(&x, 0, 1).exp()];
    let variance = [0, 1].map(|j| {
        let pair = Pair::of(&x.q[..4], &x.k[4 * j..4 * j + 4]);
        exp_relative_variance(&pair, 4, 4, Coupling::Orthogonal, 0.0, true) * pair.sm().powi(2)
    });
    // With one query, the cluster it falls into is the first; the key there is the smaller projection.
    let index = |batch| GroupIndex { batch, kv_head: 0 };
    let plan = Scatterbrain::new(&x.problem, Params::from_options(&o).unwrap()).unwrap();
    let ws = crate::Workspace::single().unwrap();
    let (q, k) = (MatRef::new(&x.q[..4], 1, 4), MatRef::new(&x.k[..8], 2, 4));
    let mut first = 0;
    for batch in 0..draws {
        let rounds = plan.rounds(q, k, max_norm(k), index(batch), ws.context());
        let (_, keys) = rounds[0].tiles.iter().find(|(rows, _)| !rows.is_empty()).unwrap();
        first += usize::from(rounds[0].keys[keys.start] == 0);
    }
    let p = first as f64 / draws as f64;
    assert!(p > 0.1 && p < 0.9, "{p}");
    let values: Vec<f64> = run(&METHOD, &o, &x).lse.iter().map(|l| l.exp()).collect();
    let n = draws as f64;
    let mean = values.iter().sum::<f64>() / n;
    let central = |p: i32| values.iter().map(|v| (v - mean).powi(p)).sum::<f64>() / n;
    let (spread, fourth) = (central(2), central(4));
    let want = (1.0 - p) * variance[0] + p * variance[1];
    assert!((mean - exact[0] - exact[1]).abs() < 5.0 * (want / n).sqrt());
    let error = ((fourth - spread * spread) / n).sqrt();
    assert!((spread - want).abs() < 5.0 * error, "{spread}, {want} ± {error}");
}

#[test]
fn cancelled_residuals_are_dropped_and_others_stay_in_the_hull() {
    let hull = Hull::of(MatRef::new(&[1.0, -2.0, 3.0, 5.0], 2, 2));
    assert_eq!(hull.settle(&mut [7.0, 7.0, 0.9e-4], 1.0), None);
    assert_eq!(hull.settle(&mut [7.0, 7.0, -0.5], 1.0), None);
    assert_eq!(hull.settle(&mut [0.0, 0.0, 0.0], 0.0), None);
    let mut residual = [1.0, -3.0, 0.5];
    assert_eq!(hull.settle(&mut residual, 1.0), Some(0.5));
    assert_eq!(residual[..2], [2.0, -2.0]);
    let mut spoilt = [f64::NAN, 2.0, 0.5];
    assert_eq!(hull.settle(&mut spoilt, 1.0), Some(0.5));
    assert!(spoilt[0].is_nan() && spoilt[1] == 4.0);
}

fn error(x: &Case, o: &Options, seeds: u64) -> f64 {
    let want = reference(x).0;
    let squares = (0..seeds).map(|seed| {
        let got = run_method(&METHOD, &o.clone().with("seed", seed), x).0;
        crate::metrics::relative_frobenius(&got, &want).powi(2)
    });
    (squares.sum::<f64>() / seeds as f64).sqrt()
}

#[test]
fn a_support_with_the_large_scores_beats_either_part_alone() {
    // Each query is close to one key, so that a few scores stand out of many small ones.
    let mut x = Case::gaussian(Problem::new(1, 128, 16), 3);
    let keys = x.k.clone();
    x.q.iter_mut().zip(&keys).for_each(|(q, k)| *q = 0.3 * *q + 0.8 * k);
    let with = |support: &str, keys: usize, features: usize| {
        let o = options(&[("support", support)]).with("keys", keys).with("features", features);
        error(&x, &o, 6)
    };
    let (features, both, hashed) = (with("lsh", 0, 64), with("top_k", 8, 64), with("lsh", 8, 64));
    let sparse = {
        let top = crate::registry::method("top_k").unwrap();
        let got = run_method(top, &options(&[("keys", "8")]), &x).0;
        crate::metrics::relative_frobenius(&got, &reference(&x).0)
    };
    // The paper has errors 2.1 times lower than those of either part on its data.
    assert!(both < features / 1.5 && both < sparse / 1.5, "{both}, {features}, {sparse}");
    assert!(hashed < features, "{hashed}, {features}");
}

#[test]
fn more_features_mean_less_error() {
    // Norms at which no entry's variance is large: errors then fall like the root of the number of features.
    let x = scaled_case(Problem::new(1, 96, 8), 4, 0.25);
    for x in [x.clone(), x.with_problem(x.problem.causal())] {
        for map in ["hyp", "oprf"] {
            let o = |m: usize| options(&[("keys", "4"), ("map", map)]).with("features", m);
            let errors = [32, 512, 8192].map(|m| error(&x, &o(m), 6));
            // By 4 for 16 times the features; some six runs leave a quarter of that open.
            assert!(errors[1] < errors[0] / 3.0 && errors[2] < errors[1] / 3.0, "{map}: {errors:?}");
        }
    }
}

#[test]
fn a_stream_holds_no_more_than_the_run_says() {
    let p = Problem { d_v: 5, ..Problem::new(1, 300, 4).causal() };
    let x = Case::gaussian(p, 8);
    let o = options(&[("keys", "40"), ("features", "16")]);
    let figure = run(&METHOD, &o, &x).info.figures["decode_bytes"];
    // Sixteen features with a sum, a maximum and a reference each, and 40 + 39 near keys and values.
    assert_eq!(figure, f64::from(8 * (16 * (5 + 3) + 79 * 9)));
}

#[test]
fn what_has_no_causal_form_is_refused() {
    let p = Problem::new(1, 20, 4).causal();
    for support in ["lsh", "top_k"] {
        assert!(METHOD.plan(&p, &options(&[("support", support)])).is_err());
    }
    assert!(METHOD.plan(&p, &options(&[("support", "window")])).is_ok());
}
