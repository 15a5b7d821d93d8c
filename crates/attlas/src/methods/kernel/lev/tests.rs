use super::streaming::{RIDGE, StreamingSet};
use super::*;
use crate::testkit::{Case, How, assert_rows_close, check_method, run_method, run_with};
use crate::{MatRef, Options, Workspace};

#[test]
fn honours_the_contract() {
    check_method(&METHOD);
}

fn run(x: &Case, options: &Options) -> Vec<f64> {
    run_method(&METHOD, options, x).0
}

fn polynomial(x: &Case, degree: usize) -> Vec<f64> {
    run_method(crate::registry::method("polynomial").unwrap(), &Options::new().with("degree", degree), x).0
}

#[test]
fn with_all_keys_it_is_polynomial_attention() {
    let p = Problem { d_v: 5, ..Problem::new(2, 50, 6).with_kv_heads(1) };
    for (p, degree) in [(p, 2usize), (p, 4), (p.causal(), 2), (p.causal(), 4)] {
        let x = Case::gaussian(p, 1);
        let options = Options::new().with("degree", degree as f64);
        let want = polynomial(&x, degree);
        assert_rows_close(&run(&x, &options.clone().with("keys", 50usize)), &want, 1e-12, "all keys");
        assert_rows_close(&run(&x, &options.with("eps", 1e-9)), &want, 1e-12, "no threshold");
    }
    // A window over all keys does the same, whatever is kept.
    let x = Case::gaussian(p, 2);
    let options = Options::new().with("keys", 1usize).with("window", 50usize);
    assert_rows_close(&run(&x, &options), &polynomial(&x, 2), 1e-12, "all near");
}

#[test]
fn softmax_weights_over_all_keys_are_softmax() {
    for p in [Problem::new(1, 40, 6), Problem::new(1, 40, 6).causal()] {
        let x = Case::gaussian(p, 3);
        let options = Options::new().with("weights", "softmax").with("keys", 40usize).with("block", 9usize);
        let (want, _) = crate::testkit::reference(&x);
        assert_rows_close(&run(&x, &options), &want, 1e-12, "softmax");
    }
}

#[test]
fn every_heavy_weight_belongs_to_a_kept_key() {
    let mut x = Case::gaussian(Problem { d_v: 1, ..Problem::new(1, 120, 5) }, 4);
    for (j, row) in x.key_rows(0).enumerate() {
        let size = if j % 11 == 3 { 4.0 } else { 0.3 };
        row.iter_mut().for_each(|v| *v *= size);
    }
    let ws = Workspace::single().unwrap();
    for (degree, eps) in [(1.0, 0.1), (2.0, 0.1), (3.0, 0.3), (4.0, 0.5)] {
        let params = Params { degree, eps: Some(eps), iters: 60, ..Params::default() };
        let plan = Lev::new(&x.problem, params).unwrap();
        let (kept, bounds, _) = plan.select(MatRef::new(&x.k, 120, 5), ws.context());
        assert!(kept.len() < 120);
        assert!(bounds.iter().sum::<f64>() <= 5f64.powf((degree / 2.0).max(1.0)) * (1.0 + 1e-6));
        for q in x.q.chunks(5) {
            let f = |j: usize| dot(q, &x.k[j * 5..(j + 1) * 5]).abs().powf(degree);
            let total: f64 = (0..120).map(f).sum();
            for j in (0..120).filter(|&j| f(j) / total >= eps) {
                assert!(kept.binary_search(&j).is_ok(), "p = {degree}: key {j}");
            }
        }
    }
}

#[test]
fn a_causal_set_of_degree_one_keeps_every_heavy_key() {
    // One long key and nine short ones: each short one has a weight of 0.1/1.9 > 0.05 even at the end, and a leverage of
    // less than 0.01.
    let n = 10;
    let p = Problem { d_v: n, ..Problem::new(1, n, 1).causal() };
    let mut x = Case::gaussian(p, 4);
    x.k.fill(0.1);
    x.k[0] = 1.0;
    x.v.iter_mut().enumerate().for_each(|(i, v)| *v = f64::from(u8::from(i / n == i % n)));
    let o = run(&x, &Options::new().with("degree", 1.0).with("eps", 0.05).with("block", 1usize));
    for i in 0..n {
        let total: f64 = x.k[..=i].iter().sum();
        for j in 0..=i {
            let weight = x.k[j] / total;
            assert!(weight >= 0.05);
            assert!((o[i * n + j] - weight).abs() < 1e-12, "row {i}, key {j}: {} for {weight}", o[i * n + j]);
        }
    }
}

#[test]
fn the_exact_normaliser_is_the_full_sum() {
    let p = Problem { d_v: 1, ..Problem::new(1, 70, 4) };
    for p in [p, p.causal()] {
        let x = Case::gaussian(p, 5);
        let base = Options::new().with("keys", 6usize).with("block", 8usize);
        let over = run(&x, &base);
        let full = run(&x, &base.clone().with("normaliser", "exact2"));
        let ones = Case { v: vec![1.0; x.v.len()], ..x.clone() };
        let (all, share) = (run(&ones, &base), run(&ones, &base.clone().with("normaliser", "exact2")));
        // Normalised over the kept keys, weights sum to one; over all keys, to the kept mass. Outputs differ by it.
        assert_rows_close(&all, &vec![1.0; 70], 1e-12, "over U");
        assert!(share.iter().all(|&s| s > 0.0 && s <= 1.0 + 1e-12) && share.iter().any(|&s| s < 0.9));
        let want: Vec<f64> = over.iter().zip(&share).map(|(o, s)| o * s).collect();
        assert_rows_close(&full, &want, 1e-12, "exact2");
    }
    // The kept mass by its definition, without a mask.
    let x = Case::gaussian(p, 6);
    let ones = Case { v: vec![1.0; 70], ..x.clone() };
    let share = run(&ones, &Options::new().with("keys", 70usize).with("normaliser", "exact2"));
    assert_rows_close(&share, &vec![1.0; 70], 1e-11, "all keys kept");
}

#[test]
fn the_sampled_normaliser_is_unbiased_within_its_stated_spread() {
    let p = Problem { d_v: 1, ..Problem::new(1, 60, 4).with_lens(5, 60) };
    let mut x = Case::gaussian(p, 7);
    x.v.fill(1.0);
    let base = Options::new().with("keys", 8usize).with("draws", 16usize);
    let share = run(&x, &base.clone().with("normaliser", "exact2"));
    let seeds = 600u32;
    let mut moments = vec![(0.0, 0.0); 5];
    let mut sd = 0.0;
    for seed in 0..seeds {
        let options = base.clone().with("normaliser", "sampled").with("seed", u64::from(seed));
        let plan = METHOD.plan(&p, &options).unwrap();
        let ran = run_with(&*plan, &x, How { lse: false, ..How::default() }).unwrap();
        sd = ran.info.figures["predicted_rel_sd"];
        for ((m, o), s) in moments.iter_mut().zip(&ran.o).zip(&share) {
            // 1/o is the normaliser in units of the kept mass; its mean is 1/share.
            let ratio = s / o;
            *m = (m.0 + ratio, m.1 + ratio * ratio);
        }
    }
    // The formula: (1/s)(Σ f²/π − (Σ f)²) over the keys that are not kept, relative to the squared normaliser.
    let ws = Workspace::single().unwrap();
    let plan = Lev::new(&p, Params { keys: 8, draws: 16, ..Params::default() }).unwrap();
    let (kept, bounds, _) = plan.select(MatRef::new(&x.k, 60, 4), ws.context());
    let rest: Vec<usize> = (0..60).filter(|j| kept.binary_search(j).is_err()).collect();
    let total: f64 = rest.iter().map(|&j| bounds[j]).sum();
    let variance = |q: &[f64]| {
        let f = |j: usize| dot(q, &x.k[j * 4..(j + 1) * 4]).powi(2);
        let squares: f64 = rest.iter().map(|&j| f(j) * f(j) * total / bounds[j]).sum();
        let sum: f64 = rest.iter().map(|&j| f(j)).sum();
        let all: f64 = (0..60).map(f).sum();
        (squares - sum * sum) / 16.0 / (all * all)
    };
    let n = f64::from(seeds);
    for ((sum, squares), q) in moments.into_iter().zip(x.q.chunks(4)) {
        let mean = sum / n;
        let spread = (squares / n - mean * mean).max(0.0);
        assert!((mean - 1.0).abs() <= 5.0 * (spread / n).sqrt(), "{mean} ± {spread}");
        // Sums of sixteen terms are close to normal: the variance of a sample variance is 2σ⁴/n, or a little more.
        let want = variance(q);
        assert!((spread - want).abs() <= 5.0 * want * (3.0 / n).sqrt(), "{spread}, {want}");
        assert!(want.sqrt() <= sd * (1.0 + 1e-9), "{want} > {sd}²");
    }
    // Far keys are bounded by the sum of their sensitivities, and more draws bring the error down to any target.
    let needed = (sd * sd * 16.0 / 0.01).ceil();
    let options = base.with("normaliser", "sampled");
    let ran = run_with(&*METHOD.plan(&p, &options).unwrap(), &x, How { lse: false, ..How::default() });
    assert_eq!(ran.unwrap().info.figures["draws_needed"], needed);
}

/// $a_i^\top (A^\top A + \lambda I)^{-1} a_i$.
fn ridge_leverage_scores(a: MatRef<'_, f64>, lambda: f64) -> Vec<f64> {
    let mut gram = attlas_num::linalg::matmul_tn(a, a);
    (0..gram.rows()).for_each(|i| gram[(i, i)] += lambda);
    let columns = a.to_mat().transpose();
    let half = attlas_num::linalg::psd_factor(gram.as_ref()).unwrap().half_solve(columns.as_ref()).unwrap();
    (0..a.rows()).map(|j| (0..half.rows()).map(|i| half[(i, j)].powi(2)).sum()).collect()
}

#[test]
fn the_streaming_set_is_that_of_every_prefix() {
    let d = 4;
    let x = Case::gaussian(Problem::new(1, 90, d), 8);
    let params = Params { eps: Some(0.15), ..Params::default() };
    let mut set = StreamingSet::new(&params, d);
    for t in 0..90 {
        set.push(&x.k[t * d..(t + 1) * d]);
        let prefix = MatRef::new(&x.k[..(t + 1) * d], t + 1, d);
        let lambda = RIDGE * dot(&x.k[..d], &x.k[..d]);
        let scores = ridge_leverage_scores(prefix, lambda);
        let want: Vec<usize> = (0..=t).filter(|&j| scores[j] >= 0.15).collect();
        assert_eq!(set.indices(), want, "after {t}");
        assert!(want.len() as f64 <= d as f64 / 0.15);
        for (j, s) in set.index.iter().zip(&set.scores) {
            assert!((s - scores[*j]).abs() < 1e-8);
        }
    }
    let before = set.scores.clone();
    set.refresh();
    assert!(set.scores.iter().zip(&before).all(|(a, b)| (a - b).abs() < 1e-8));
}

#[test]
fn the_default_set_ignores_the_order_of_keys_and_a_change_of_basis() {
    let x = Case::gaussian(Problem::new(1, 60, 3), 9);
    let options = Options::new().with("keys", 7usize);
    let reverse = |v: &[f64]| v.chunks(3).rev().flatten().copied().collect::<Vec<f64>>();
    let turned = Case { k: reverse(&x.k), v: reverse(&x.v), ..x.clone() };
    assert_rows_close(&run(&turned, &options), &run(&x, &options), 1e-11, "reversed");
    let ws = Workspace::single().unwrap();
    let plan = Lev::new(&x.problem, Params { keys: 7, ..Params::default() }).unwrap();
    let skew: Vec<f64> = x.k.chunks(3).flat_map(|k| [k[0] + 2.0 * k[1], k[1] - k[2], 3.0 * k[2]]).collect();
    let set = |k: &[f64]| plan.select(MatRef::new(k, 60, 3), ws.context()).0;
    assert_eq!(set(&x.k), set(&skew));
}

#[test]
fn impossible_combinations_are_refused() {
    let p = Problem::new(1, 20, 4);
    for (options, causal) in [
        (Options::new().with("normaliser", "exact2").with("degree", 4.0), false),
        (Options::new().with("normaliser", "sampled"), true),
        (Options::new().with("normaliser", "sampled").with("window", 3usize), false),
        (Options::new().with("normaliser", "sampled").with("weights", "softmax"), false),
    ] {
        assert!(METHOD.plan(&if causal { p.causal() } else { p }, &options).is_err());
    }
}
