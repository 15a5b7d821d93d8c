use super::*;
use crate::Schedule;
use crate::testkit::heads::Workload;
use crate::testkit::{Case, reference_weights};
use attlas_num::linalg::{singular_values, stable_rank};
use attlas_num::randla::LinearOperator;
use attlas_num::rng::StreamKey;

fn workspace() -> Workspace {
    Workspace::single().unwrap()
}

fn gaussian(rows: usize, cols: usize, seed: u64) -> Mat<f64> {
    let mut rng = StreamKey::new(seed).rng();
    Mat::from_fn(rows, cols, |_, _| rng.normal())
}

fn head(n_q: usize, n_k: usize, d: usize, mask: Mask) -> Head {
    let (q, k, v) = (gaussian(n_q, d, 1), gaussian(n_k, d, 2), gaussian(n_k, d + 1, 3));
    Head::new(q.as_ref(), k.as_ref(), v.as_ref(), 1.0 / (d as f64).sqrt(), mask).unwrap()
}

fn of_case(case: &Case, mask: Mask) -> Head {
    let p = &case.problem;
    let view = |x, n, d| MatRef::new(x, n, d);
    let (q, k) = (view(&case.q, p.n_q, p.d), view(&case.k, p.n_k, p.d));
    Head::new(q, k, view(&case.v, p.n_k, p.d_v), p.scale, mask).unwrap()
}

/// The masked logits, −∞ where hidden.
fn logits(head: &Head) -> Mat<f64> {
    let mut s = matmul(head);
    for i in 0..s.rows() {
        let seen = head.band().range(i, s.cols());
        s.row_mut(i)[seen.end..].fill(f64::NEG_INFINITY);
    }
    s
}

fn matmul(head: &Head) -> Mat<f64> {
    let s = attlas_num::linalg::matmul_nt(head.q(), head.k());
    Mat::from_fn(s.rows(), s.cols(), |i, j| head.scale * s[(i, j)])
}

/// The weights, zero where hidden.
fn weights(head: &Head) -> Mat<f64> {
    let mut p = logits(head);
    for i in 0..p.rows() {
        let max = p.row(i).iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = p.row(i).iter().map(|s| (s - max).exp()).sum();
        let empty = max == f64::NEG_INFINITY;
        p.row_mut(i).iter_mut().for_each(|s| *s = if empty { 0.0 } else { (*s - max).exp() / sum });
    }
    p
}

fn close(a: &Mat<f64>, b: &Mat<f64>) -> f64 {
    let gap = a.data().iter().zip(b.data()).map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt();
    gap / b.frobenius().max(f64::MIN_POSITIVE)
}

#[test]
fn operators_act_as_their_matrices() {
    for (n_q, n_k, mask) in [
        (40, 40, Mask::None),
        (33, 57, Mask::None),
        (40, 40, Mask::Causal),
        (30, 50, Mask::Causal),
        (50, 30, Mask::Causal),
        (250, 230, Mask::Causal),
    ] {
        let h = head(n_q, n_k, 8, mask);
        let profile = weight_profile(&h, &Settings::default(), &workspace());
        let s = logits(&h);
        let shift = profile.max_logit;
        assert_eq!(shift, s.data().iter().copied().fold(f64::NEG_INFINITY, f64::max));
        let a = Mat::from_fn(n_q, n_k, |i, j| (s[(i, j)] - shift).exp());
        let p = weights(&h);
        let (x, y) = (gaussian(n_k, 5, 7), gaussian(n_q, 5, 8));
        workspace().install(|cx| {
            let scores = Scores::new(&h, &profile.lse, shift, cx);
            let weights = Weights::new(&h, &profile.lse, cx);
            let what = format!("{n_q} × {n_k}, {mask:?}");
            assert!(close(&weights.apply(x.as_ref()), &p.apply(x.as_ref())) < 1e-13, "{what}");
            assert!(close(&weights.apply_t(y.as_ref()), &p.apply_t(y.as_ref())) < 1e-13, "{what}");
            assert!(close(&scores.apply(x.as_ref()), &a.apply(x.as_ref())) < 1e-13, "{what}");
            assert!(close(&scores.apply_t(y.as_ref()), &a.apply_t(y.as_ref())) < 1e-13, "{what}");
        });
        let energy = |m: &Mat<f64>| m.frobenius().powi(2);
        assert!((profile.scores_energy / energy(&a) - 1.0).abs() < 1e-13);
        assert!((profile.weights_energy / energy(&p) - 1.0).abs() < 1e-13);
    }
}

#[test]
fn dense_spectra_are_those_of_the_matrices() {
    for (n_q, n_k, mask) in [(50, 50, Mask::Causal), (40, 60, Mask::None), (5, 9, Mask::None)] {
        let h = head(n_q, n_k, 8, mask);
        let found = inspect(&h, &Settings::default(), &workspace()).unwrap().spectra;
        let s = logits(&h);
        let max = s.data().iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let a = Mat::from_fn(n_q, n_k, |i, j| (s[(i, j)] - max).exp());
        let qk = attlas_num::linalg::matmul_nt(h.q(), h.k());
        for (spectrum, matrix) in [
            (&found.q, &h.q),
            (&found.k, &h.k),
            (&found.v, &h.v),
            (&found.qk, &qk),
            (&found.scores, &a),
            (&found.weights, &weights(&h)),
        ] {
            let want = singular_values(matrix.as_ref()).unwrap();
            for (x, y) in spectrum.values.iter().zip(&want) {
                assert!((x - y).abs() <= 1e-13 * want[0]);
            }
            assert!(spectrum.complete && (spectrum.captured - 1.0).abs() < 1e-13);
            assert!((spectrum.stable_rank / stable_rank(&want) - 1.0).abs() < 1e-12);
            assert_eq!(spectrum.variance_rank.value, attlas_num::linalg::variance_rank(&want, 0.9));
            let energy: f64 = spectrum.values.iter().map(|s| s * s).sum();
            assert!((energy.sqrt() / matrix.frobenius() - 1.0).abs() < 1e-13);
        }
    }
}

#[test]
fn matrix_free_spectra_agree_with_dense_ones() {
    for mask in [Mask::None, Mask::Causal] {
        for workload in Workload::ALL {
            let h = of_case(&workload.case(300, 16, 1), mask);
            let dense = inspect(&h, &Settings::default(), &workspace()).unwrap().spectra;
            let settings = Settings { dense_limit: 0, rank: 40, power: 4, ..Settings::default() };
            let free = inspect(&h, &settings, &workspace()).unwrap().spectra;
            for (free, dense) in [(&free.scores, &dense.scores), (&free.weights, &dense.weights)] {
                let what = format!("{workload:?}, {mask:?}");
                assert!(!free.complete && free.entropy_rank.is_none() && free.values.len() == 40);
                let top = dense.values[0];
                // The randomised values never exceed the true ones; those near the end of the block lag behind.
                for (i, (x, y)) in free.values.iter().zip(&dense.values).enumerate() {
                    assert!(*x <= y + 1e-13 * top, "{what}: value {i} is {x}, over {y}");
                    let tolerance = if i < 20 { 0.05 } else { 0.25 };
                    assert!(*x >= (1.0 - tolerance) * y, "{what}: value {i} is {x}, far below {y}");
                }
                assert!((free.values[0] / top - 1.0).abs() < 1e-4, "{what}");
                assert!((free.stable_rank / dense.stable_rank - 1.0).abs() < 3e-4, "{what}");
                let (found, want) = (free.variance_rank, dense.variance_rank.value);
                if found.open {
                    assert!(want >= 40, "{what}: {want}");
                } else {
                    assert!(
                        want <= found.value && found.value <= want + want / 4 + 1,
                        "{what}: {found:?} {want}"
                    );
                }
                assert!(free.captured <= 1.0 && free.captured > 0.3, "{what}: {}", free.captured);
                assert!(free.eps_rank.open || free.eps_rank.value <= dense.eps_rank.value);
            }
        }
    }
}

#[test]
fn matrices_of_low_rank_are_seen_through_without_storing_them() {
    // Keys with seven distinct directions: A and P have rank seven without a mask.
    let (n, d) = (400, 8);
    let centres = gaussian(7, d, 4);
    let k = Mat::from_fn(n, d, |i, j| centres[(i % 7, j)]);
    let q = gaussian(n, d, 5);
    let h = Head::new(q.as_ref(), k.as_ref(), q.as_ref(), 0.5, Mask::None).unwrap();
    let settings = Settings { dense_limit: 0, rank: 20, ..Settings::default() };
    let found = inspect(&h, &settings, &workspace()).unwrap().spectra;
    for s in [&found.scores, &found.weights] {
        assert!(s.values[6] > 1e-6 * s.values[0] && s.values[7] < 1e-12 * s.values[0]);
        assert!((s.captured - 1.0).abs() < 1e-12 && !s.variance_rank.open);
    }
}

#[test]
fn weights_of_zero_queries_are_harmonic() {
    let n = 60;
    let (zero, k) = (Mat::zeros(n, 4), gaussian(n, 4, 1));
    let h = Head::new(zero.as_ref(), k.as_ref(), k.as_ref(), 0.5, Mask::Causal).unwrap();
    let found = weight_profile(&h, &Settings::default(), &workspace());
    let harmonic = |n: usize| (1..=n).map(|i| 1.0 / i as f64).sum::<f64>();
    for (j, alpha) in found.mean_weight.iter().enumerate() {
        let want = (harmonic(n) - harmonic(j)) / (n - j) as f64;
        assert!((alpha - want).abs() < 1e-14, "key {j}: {alpha}, expected {want}");
    }
    assert!(found.sinks.is_empty(), "no sink for large n");
    let entropy = (1..=n).map(|i| (i as f64).ln()).sum::<f64>() / n as f64;
    assert!((found.entropy.mean - entropy).abs() < 1e-14);
    let keys: Vec<f64> = (1..=n).map(|i| (0.9 * i as f64 - 1e-9).ceil()).collect();
    assert!((found.keys_for_mass[0].keys.mean - keys.iter().sum::<f64>() / n as f64).abs() < 1e-12);
    assert_eq!(found.below, [(1e-1, 0.0), (1e-2, 0.0), (1e-3, 0.0)]);
    assert_eq!(found.rows, n);
}

#[test]
fn one_planted_sink_is_the_one_reported() {
    for mask in [Mask::None, Mask::Causal] {
        let (n, d) = (80, 8);
        // An extra coordinate: the queries have one there, and key 0 the value that makes its logit 20.
        let widen = |x: Mat<f64>, f: &dyn Fn(usize) -> f64| {
            Mat::from_fn(n, d + 1, |i, j| if j == d { f(i) } else { x[(i, j)] })
        };
        let q = widen(gaussian(n, d, 1), &|_| 1.0);
        let k = widen(gaussian(n, d, 2), &|i| if i == 0 { 40.0 } else { 0.0 });
        let v = Mat::from_fn(n, 3, |i, _| if i == 0 { 0.5 } else { 1.0 });
        let h = Head::new(q.as_ref(), k.as_ref(), v.as_ref(), 0.5, mask).unwrap();
        let report = inspect(&h, &Settings::default(), &workspace()).unwrap();
        let [sink] = report.weights.sinks[..] else { panic!("{:?}", report.weights.sinks) };
        assert!(sink.key == 0 && sink.weight > 0.99 && sink.value_norm == 0.5 && sink.key_norm > 10.0);
    }
}

#[test]
fn a_sink_is_found_by_how_often_it_is_heavy_whatever_the_length() {
    // Key 0 has a tenth of every row, far below a third, and far above 1/n; a local key has all of one row.
    let n = 1000;
    let logit = |i: usize| (0.1 / 0.9 * i as f64).max(1e-9).ln();
    let q = Mat::from_fn(n, 2, |i, j| if j == 0 { logit(i) } else { 1.0 });
    let k = Mat::from_fn(n, 2, |i, j| if j == 0 && i == 0 { 1.0 } else { 0.0 });
    let h = Head::new(q.as_ref(), k.as_ref(), k.as_ref(), 1.0, Mask::Causal).unwrap();
    let found = weight_profile(&h, &Settings::default(), &workspace());
    assert!(found.mean_weight[0] < 0.15, "{}", found.mean_weight[0]);
    assert_eq!(found.sinks.iter().map(|s| s.key).collect::<Vec<_>>(), [0]);
    let own = Mat::from_fn(n, n, |i, j| if i == j { 30.0 } else { 0.0 });
    let h = Head::new(own.as_ref(), own.as_ref(), own.as_ref(), 1.0, Mask::Causal).unwrap();
    assert!(weight_profile(&h, &Settings::default(), &workspace()).sinks.is_empty(), "a diagonal is no sink");
}

#[test]
fn keys_seen_by_few_rows_are_not_judged() {
    // Every token attends to itself: the last keys have weight one, but only a few rows see them.
    let n = 40;
    let x = Mat::from_fn(n, n, |i, j| if i == j { 30.0 } else { 0.0 });
    let h = Head::new(x.as_ref(), x.as_ref(), x.as_ref(), 1.0, Mask::Causal).unwrap();
    let found = weight_profile(&h, &Settings::default(), &workspace());
    assert!((found.mean_weight[n - 1] - 1.0).abs() < 1e-12 && found.sinks.is_empty());
    let judged = weight_profile(&h, &Settings { min_rows: 1, ..Settings::default() }, &workspace());
    assert_eq!(judged.sinks[0].key, n - 1);
}

#[test]
fn the_largest_singular_value_of_weights_is_at_least_one() {
    for mask in [Mask::None, Mask::Causal] {
        let found = inspect(&head(70, 70, 8, mask), &Settings::default(), &workspace()).unwrap();
        assert!(found.spectra.weights.values[0] >= 1.0);
    }
    // Doubly stochastic: equal weights, and a permutation.
    let (n, zero) = (30, Mat::zeros(30, 4));
    let equal = Head::new(zero.as_ref(), gaussian(n, 4, 1).as_ref(), zero.as_ref(), 0.5, Mask::None).unwrap();
    let eye = Mat::from_fn(n, n, |i, j| if i == j { 100.0 } else { 0.0 });
    let turned = Mat::from_fn(n, n, |i, j| eye[((i + 5) % n, j)]);
    let swap = Head::new(eye.as_ref(), turned.as_ref(), eye.as_ref(), 1.0, Mask::None).unwrap();
    for (h, rank) in [(equal, 1), (swap, n)] {
        let s = inspect(&h, &Settings::default(), &workspace()).unwrap().spectra.weights;
        assert!((s.values[0] - 1.0).abs() < 1e-14);
        assert_eq!(s.eps_rank, AtLeast { value: rank, open: false });
    }
}

#[test]
fn equal_keys_have_no_variance_and_scores_of_rank_one() {
    let k = Mat::from_fn(50, 6, |_, j| 0.1 + 0.7 * j as f64);
    assert_eq!(key_components(k.as_ref(), 0.9).unwrap().rank, 0);
    let q = gaussian(40, 6, 1);
    let h = Head::new(q.as_ref(), k.as_ref(), k.as_ref(), 0.5, Mask::None).unwrap();
    let report = inspect(&h, &Settings::default(), &workspace()).unwrap();
    assert_eq!(report.spectra.scores.eps_rank.value, 1);
    assert!(report.spectra.scores.values[1] < 1e-14 * report.spectra.scores.values[0]);
    assert_eq!((report.hardness.key_norm, report.hardness.gamma), (0.0, 0.0));
    // A causal A has a positive diagonal: its rank is full, and only the decay is informative.
    // Here it is the triangle of ones, with singular values 1 / (2 sin((2k−1)π / (4n+2))).
    let causal = Head { mask: Mask::Causal, q: Mat::zeros(50, 6), ..h };
    let s = inspect(&causal, &Settings::default(), &workspace()).unwrap().spectra.scores;
    for (k, value) in s.values.iter().enumerate() {
        let want = 0.5 / ((2 * k + 1) as f64 * std::f64::consts::PI / 202.0).sin();
        assert!((value / want - 1.0).abs() < 1e-12, "value {k}: {value}, expected {want}");
    }
}

#[test]
fn key_components_are_the_golden_ones() {
    let k = Mat::from_fn(6, 4, |i, j| (0.5 * i as f64 * (j + 1) as f64 + 0.3 * j as f64).cos());
    let found = key_components(k.as_ref(), 0.9).unwrap();
    for (got, want) in found.eigenvalues.iter().zip([0.6632171615, 0.6272937508, 0.6125413700, 0.3059523441])
    {
        assert!((got - want).abs() < 1e-10);
    }
    // 0.663 + 0.627 + 0.613 is 86 % of the sum: the fourth is needed.
    assert_eq!(found.rank, 4);
}

#[test]
fn row_figures_follow_their_definitions() {
    for (n_q, n_k, mask) in [(45, 45, Mask::Causal), (37, 61, Mask::None), (50, 30, Mask::Causal)] {
        let mut h = head(n_q, n_k, 6, mask);
        h.scale = 1.5;
        let settings = Settings { cells: 7, ..Settings::default() };
        let found = weight_profile(&h, &settings, &workspace());
        let p = weights(&h);
        let seen: Vec<usize> = (0..n_q).filter(|&i| p.row(i).iter().any(|w| *w > 0.0)).collect();
        assert_eq!(found.rows, seen.len());
        let entropy = |i: &usize| p.row(*i).iter().filter(|w| **w > 0.0).map(|w| -w * w.ln()).sum::<f64>();
        let mean = seen.iter().map(entropy).sum::<f64>() / seen.len() as f64;
        assert!((found.entropy.mean - mean).abs() < 1e-12);
        for mass in found.keys_for_mass {
            let mut counts: Vec<f64> = seen
                .iter()
                .map(|&i| {
                    let mut row = p.row(i).to_vec();
                    row.sort_by(|a, b| b.total_cmp(a));
                    let sums = row.iter().scan(0.0, |sum, w| {
                        let before = *sum;
                        *sum += w;
                        Some(before)
                    });
                    sums.take_while(|before| *before < mass.mass).count() as f64
                })
                .collect();
            assert!((mass.keys.mean - counts.iter().sum::<f64>() / counts.len() as f64).abs() < 1e-12);
            counts.sort_by(f64::total_cmp);
            assert_eq!(mass.keys.median, counts[counts.len().div_ceil(2) - 1]);
            assert_eq!(mass.keys.p95, counts[(0.95 * counts.len() as f64).ceil() as usize - 1]);
        }
        for top in found.mass_of_top {
            let mut masses: Vec<f64> = seen
                .iter()
                .map(|&i| {
                    let mut row = p.row(i).to_vec();
                    row.sort_by(|a, b| b.total_cmp(a));
                    row.iter().take(top.keys).sum()
                })
                .collect();
            // Both are sums of up to 61 weights with a total of at most one.
            let tol = 64.0 * f64::EPSILON;
            assert!((top.mass.mean - masses.iter().sum::<f64>() / masses.len() as f64).abs() < tol);
            masses.sort_by(f64::total_cmp);
            assert!((top.mass.median - masses[masses.len().div_ceil(2) - 1]).abs() < tol);
        }
        for (threshold, share) in found.below {
            let (mut below, mut all) = (0, 0);
            for i in 0..n_q {
                let max = p.row(i).iter().copied().fold(0.0, f64::max);
                let visible = &p.row(i)[h.band().range(i, n_k)];
                below += visible.iter().filter(|w| **w < threshold * max).count();
                all += visible.len();
            }
            assert!((share - below as f64 / all as f64).abs() < 1e-12);
        }
        for a in 0..7 {
            let rows: Vec<usize> = (a * n_q / 7..(a + 1) * n_q / 7).filter(|i| seen.contains(i)).collect();
            for b in 0..7 {
                let cell = (b * n_k / 7)..((b + 1) * n_k / 7);
                let sum: f64 = rows.iter().map(|&i| p.row(i)[cell.clone()].iter().sum::<f64>()).sum();
                let want = sum / rows.len().max(1) as f64;
                assert!((found.map.data[a * 7 + b] - want).abs() < 1e-13);
            }
        }
        for i in 0..20 {
            let max = p.row(i).iter().copied().fold(0.0, f64::max);
            for j in 0..20 {
                let want = if max == 0.0 { 0.0 } else { p[(i, j)] / max };
                assert!((found.leading.data[i * 20 + j] - want).abs() < 1e-13);
            }
        }
    }
}

#[test]
fn the_log_sum_exp_is_that_of_the_reference() {
    let case = Case::gaussian(crate::Problem::new(1, 90, 8).causal(), 3);
    let found = weight_profile(&of_case(&case, Mask::Causal), &Settings::default(), &workspace());
    let (_, lse) = reference_weights(&case, |_, _, s| s);
    assert!(found.lse.iter().zip(&lse).all(|(a, b)| (a - b).abs() < 1e-13));
}

#[test]
fn threads_do_not_change_a_bit() {
    let h = head(150, 150, 8, Mask::Causal);
    let settings = Settings { dense_limit: 0, rank: 10, ..Settings::default() };
    let run = |threads| {
        let ws = Workspace::new(Schedule { threads, ..Schedule::default() }).unwrap();
        inspect(&h, &settings, &ws).unwrap()
    };
    // Serialised, because means of keys that no row sees are NaN.
    let text = |r: &HeadReport| serde_json::to_string(r).unwrap();
    assert_eq!(text(&run(1)), text(&run(4)));
}

#[test]
fn extreme_and_empty_heads_have_reports() {
    for (n_q, n_k) in [(0, 0), (0, 5), (5, 0), (1, 1), (1, 7), (7, 1)] {
        for mask in [Mask::None, Mask::Causal] {
            let report = inspect(&head(n_q, n_k, 3, mask), &Settings::default(), &workspace()).unwrap();
            assert!(report.spectra.weights.values.iter().all(|x| x.is_finite()));
        }
    }
    // Logits of ±1e4.
    let h = Head { scale: 1e4, ..head(60, 60, 4, Mask::Causal) };
    let report = inspect(&h, &Settings::default(), &workspace()).unwrap();
    for s in [&report.spectra.scores, &report.spectra.weights] {
        assert!(s.values.iter().all(|x| x.is_finite()) && s.stable_rank >= 1.0 - 1e-12);
    }
    assert!(report.weights.entropy.mean.is_finite());
    let mut nan = gaussian(4, 3, 1);
    nan[(1, 1)] = f64::NAN;
    let x = gaussian(4, 3, 2);
    assert!(matches!(
        Head::new(nan.as_ref(), x.as_ref(), x.as_ref(), 1.0, Mask::None),
        Err(Error::Numerical { .. })
    ));
    let huge = Mat::from_fn(4, 3, |_, _| 1e200);
    assert!(Head::new(huge.as_ref(), huge.as_ref(), x.as_ref(), 1.0, Mask::None).is_err());
    assert!(Head::new(x.as_ref(), gaussian(4, 2, 1).as_ref(), x.as_ref(), 1.0, Mask::None).is_err());
    assert!(Head::new(x.as_ref(), x.as_ref(), gaussian(3, 2, 1).as_ref(), 1.0, Mask::None).is_err());
}

#[test]
fn hardness_is_that_of_centred_keys() {
    let mut h = head(30, 40, 5, Mask::None);
    let before = hardness(&h);
    let mean: Vec<f64> = (0..5).map(|j| (0..40).map(|i| h.k[(i, j)]).sum::<f64>() / 40.0).collect();
    let longest = (0..40)
        .map(|i| h.k.row(i).iter().zip(&mean).map(|(k, m)| (k - m).powi(2)).sum::<f64>().sqrt())
        .fold(0.0, f64::max);
    assert!((before.key_norm - longest).abs() < 1e-13);
    let want = h.scale * before.query_norm * longest / 40f64.ln();
    assert!((before.gamma - want).abs() < 1e-13);
    h.k.data_mut().iter_mut().for_each(|x| *x += 100.0);
    assert!((hardness(&h).key_norm - longest).abs() < 1e-10);
}
