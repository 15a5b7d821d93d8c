//! Helpers for tests of feature-map methods: direct evaluation of the definition, and the generic checks.

use crate::method::Method;
use crate::testkit::{Case, How, Ran, assert_rows_close, run_method, run_with};
use crate::{MatRef, Options, Problem};
use attlas_num::sketch::{LogFeatures, Side, SignedFeatures};

/// Computes kernel attention with given weights: `weight(head, row, key)` as a sign and a logarithm.
pub(crate) fn naive(case: &Case, weight: impl Fn(usize, usize, usize) -> (f64, f64)) -> (Vec<f64>, Vec<f64>) {
    let p = &case.problem;
    assert_eq!((p.batch, p.n_kv_heads), (1, 1), "one group");
    let mut o = vec![0.0; p.n_heads * p.n_q * p.d_v];
    let mut lse = vec![f64::NEG_INFINITY; p.n_heads * p.n_q];
    for row in 0..lse.len() {
        let (h, i) = (row / p.n_q, row % p.n_q);
        let seen = p.visible(i);
        let weights: Vec<(f64, f64)> = (0..seen).map(|j| weight(h, i, j)).collect();
        let top = weights.iter().fold(f64::NEG_INFINITY, |m, w| m.max(w.1));
        if top == f64::NEG_INFINITY {
            continue;
        }
        let values: Vec<f64> = weights.iter().map(|(sign, log)| sign * (log - top).exp()).collect();
        let total: f64 = values.iter().sum();
        lse[row] = top + total.ln();
        for (j, w) in values.iter().enumerate() {
            let v = &case.v[j * p.d_v..(j + 1) * p.d_v];
            o[row * p.d_v..(row + 1) * p.d_v].iter_mut().zip(v).for_each(|(o, v)| *o += w / total * v);
        }
    }
    (o, lse)
}

/// Evaluates the definition with the features of a positive map.
pub(crate) fn naive_positive(map: &dyn LogFeatures<f64>, case: &Case) -> (Vec<f64>, Vec<f64>) {
    let (p, m) = (&case.problem, map.num_features());
    let features = |x: &[f64], side| {
        let mut out = vec![f64::NAN; x.len() / p.d * m];
        map.log_features(MatRef::new(x, x.len() / p.d, p.d), side, &mut out);
        out
    };
    let (b, a) = (features(&case.q, Side::Query), features(&case.k, Side::Key));
    naive(case, |h, i, j| {
        let (b, a) = (&b[(h * p.n_q + i) * m..][..m], &a[j * m..][..m]);
        let top = b.iter().zip(a).fold(f64::NEG_INFINITY, |t, (b, a)| t.max(b + a));
        if top == f64::NEG_INFINITY {
            return (1.0, top);
        }
        (1.0, top + b.iter().zip(a).map(|(b, a)| (b + a - top).exp()).sum::<f64>().ln())
    })
}

/// Evaluates the definition with the features of a signed map.
pub(crate) fn naive_signed(map: &dyn SignedFeatures<f64>, case: &Case) -> (Vec<f64>, Vec<f64>) {
    let (p, m) = (&case.problem, map.num_features());
    let features = |x: &[f64], side| {
        let n = x.len() / p.d;
        let (mut out, mut scale) = (vec![f64::NAN; n * m], vec![f64::NAN; n]);
        map.signed_features(MatRef::new(x, n, p.d), side, &mut out, &mut scale);
        (out, scale)
    };
    let ((b, bs), (a, a_s)) = (features(&case.q, Side::Query), features(&case.k, Side::Key));
    naive(case, |h, i, j| {
        let row = h * p.n_q + i;
        let dot: f64 = b[row * m..][..m].iter().zip(&a[j * m..][..m]).map(|(x, y)| x * y).sum();
        (dot.signum(), dot.abs().ln() + bs[row] + a_s[j])
    })
}

/// Normal inputs times `size`.
pub(crate) fn scaled_case(p: Problem, seed: u64, size: f64) -> Case {
    let mut case = Case::gaussian(p, seed);
    case.q.iter_mut().chain(&mut case.k).for_each(|x| *x *= size);
    case
}

/// Plans and runs on one thread.
pub(crate) fn run(method: &Method, options: &Options, case: &Case) -> Ran {
    let how = How { lse: method.claims.lse, ..How::default() };
    let plan = method.plan(&case.problem, options).unwrap_or_else(|e| panic!("{} {options}: {e}", method.id));
    run_with(&*plan, case, how).unwrap_or_else(|e| panic!("{} {options}: {e}", method.id))
}

/// Checks that rows equal the definition for lengths around every block and widths of values from 1 to 3d, with and
/// without a mask, and for log-features that make chunks end early.
pub(crate) fn check_generic(
    method: &Method,
    options: &Options,
    sizes: &[f64],
    definition: impl Fn(&Case) -> (Vec<f64>, Vec<f64>),
) {
    let base = Problem { d_v: 3, ..Problem::new(2, 1, 4).with_kv_heads(1) };
    let mut shapes: Vec<(usize, usize)> = [1, 2, 63, 64, 65, 203].map(|n| (n, n)).to_vec();
    // More than one causal piece, more than one block, queries fewer and more than keys.
    shapes.extend([(17, 150), (150, 17), (40, 2100), (1, 300)]);
    for (t, (n_q, n_k)) in shapes.into_iter().enumerate() {
        let p = Problem { d_v: [3, 1, 4, 12][t % 4], ..base }.with_lens(n_q, n_k);
        for p in [p, p.causal()] {
            for &size in sizes {
                let case = scaled_case(p, 31, size);
                let (o, lse) = run_method(method, options, &case);
                let (want, want_lse) = definition(&case);
                let name = format!("{} {options} {n_q} × {n_k} {} times {size}", method.id, p.mask);
                // Logarithms of size L have an error of L roundings, which is a relative error of the weights.
                let tolerance = 1e-12 * (1.0 + 10.0 * size * size);
                assert_rows_close(&o, &want, tolerance, &name);
                if method.claims.lse {
                    assert_rows_close(&lse, &want_lse, tolerance, &format!("{name}, log-sum-exp"));
                }
            }
        }
    }
}

/// Checks that single precision follows double precision at log-features of a thousand, and that rows stay finite when
/// one vector is added to all keys.
pub(crate) fn check_large(method: &Method, options: &Options) {
    let base = Problem { d_v: 3, ..Problem::new(1, 130, 16) };
    for p in [base, base.causal()] {
        let single = scaled_case(p, 32, 22.0).cast_f32();
        let double = Case { single: false, ..single.clone() };
        let (a, b) = (run(method, options, &single), run(method, options, &double));
        assert_rows_close(
            &a.o,
            &b.o,
            5e-3,
            &format!("{} {options} {} in both precisions", method.id, p.mask),
        );
        for single in [false, true] {
            let mut moved = Case::gaussian(p, 33);
            moved.k.iter_mut().enumerate().for_each(|(i, x)| *x += (i % p.d) as f64 * 10.0);
            moved.single = single;
            assert!(run(method, options, &moved).o.iter().all(|x| x.is_finite()));
        }
    }
}

/// Estimates mean and variance of one un-normalised entry over `draws` independent groups; `e^lse` of one key is that
/// entry.
pub(crate) fn entry_moments(
    method: &Method,
    options: &Options,
    x: &[f64],
    y: &[f64],
    draws: usize,
) -> [f64; 3] {
    let p = Problem { batch: draws, scale: 1.0, d_v: 1, ..Problem::new(1, 1, x.len()) };
    let case =
        Case { problem: p, q: x.repeat(draws), k: y.repeat(draws), v: vec![1.0; draws], single: false };
    let values: Vec<f64> = run(method, options, &case).lse.iter().map(|l| l.exp()).collect();
    let n = draws as f64;
    let mean = values.iter().sum::<f64>() / n;
    let central = |p: i32| values.iter().map(|v| (v - mean).powi(p)).sum::<f64>() / n;
    let (variance, fourth) = (central(2), central(4));
    [mean, variance, ((fourth - variance * variance) / n).sqrt()]
}

/// Checks mean and variance of an entry, each within five standard errors.
pub(crate) fn check_entry(
    method: &Method,
    options: &Options,
    (x, y): (&[f64], &[f64]),
    (mean, variance): (f64, f64),
) {
    let draws = 20_000;
    let [m, v, error] = entry_moments(method, options, x, y, draws);
    let name = format!("{} {options}", method.id);
    let tolerance = 5.0 * (variance / draws as f64).sqrt();
    assert!((m - mean).abs() <= tolerance, "{name}: mean {m}, expected {mean} ± {tolerance}");
    assert!((v - variance).abs() <= 5.0 * error, "{name}: variance {v}, expected {variance} ± {error}");
    assert!(error < 0.05 * variance, "{name}: {draws} draws tell the variance only to {error}");
}

/// A pair with known values: `d` = 4, ‖x‖² = ‖y‖² = 1/4, ⟨x, y⟩ = 0.15.
pub(crate) const PAIR: ([f64; 4], [f64; 4]) = ([0.5, 0.0, 0.0, 0.0], [0.3, 0.4, 0.0, 0.0]);

/// Returns the relative Frobenius error against exact softmax, and that of the mean of the values, for normal queries
/// and keys of deviation `s`, values K/s, 1024 tokens of width 64: the workload of the table of measured errors.
pub(crate) fn table_errors(method: &Method, options: &Options, s: f64, seeds: u64) -> [f64; 2] {
    let p = Problem::new(1, 1024, 64);
    let mut errors = [0.0; 2];
    for seed in 0..seeds {
        let mut case = scaled_case(p, 100 + seed, s);
        case.v = case.k.iter().map(|x| x / s).collect();
        let case = case.cast_f32();
        let exact = run_method(&crate::methods::exact::exact::METHOD, &Options::new(), &case).0;
        let got = run(method, &options.clone().with("seed", seed), &case).o;
        let mut mean = vec![0.0; p.d_v];
        case.v.chunks(p.d_v).for_each(|v| mean.iter_mut().zip(v).for_each(|(m, v)| *m += v / p.n_k as f64));
        errors[0] += crate::metrics::relative_frobenius(&got, &exact) / seeds as f64;
        errors[1] += crate::metrics::relative_frobenius(&mean.repeat(p.n_q), &exact) / seeds as f64;
    }
    errors
}
