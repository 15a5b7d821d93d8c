use super::*;
use crate::Options;
use crate::metrics::relative_frobenius;
use crate::testkit::{
    Case, assert_rows_close, assert_same_bits, check_method, reference, reference_masked, run_method,
};

const SCORES: [&str; 5] = ["leverage", "kmeans_outlier", "kmedian_outlier", "kernel_kmeans", "norm2"];

fn options(pairs: &[(&str, &str)]) -> Options {
    pairs.iter().fold(Options::new().with("n_min", 0), |o, (k, v)| o.with(k, *v))
}

fn plan(pairs: &[(&str, &str)]) -> PrescoredHyper {
    PrescoredHyper::new(&Problem::new(1, 60, 5), Params::from_options(&options(pairs)).unwrap()).unwrap()
}

fn kept(pairs: &[(&str, &str)], k: &[f64], d: usize) -> Vec<u32> {
    let k = MatRef::new(k, k.len() / d, d);
    plan(pairs).kept(k, None, StreamKey::new(5)).unwrap_or_else(|| (0..k.rows() as u32).collect())
}

#[test]
fn honours_the_contract() {
    check_method(&METHOD);
}

#[test]
fn with_all_keys_kept_it_is_hyper_attention() {
    let hyper = crate::registry::method("hyper").unwrap();
    for p in [Problem::new(2, 150, 8).with_kv_heads(1), Problem::new(2, 150, 8).causal()] {
        let x = Case::gaussian(p, 1);
        let o = options(&[("block", "16"), ("samples", "20"), ("n_min", "10"), ("seed", "4")]);
        let (a, la) = run_method(hyper, &o, &x);
        for score in SCORES {
            let (b, lb) = run_method(&METHOD, &o.clone().with("keys", 150).with("score", score), &x);
            assert_same_bits(&b, &a, score);
            assert_same_bits(&lb, &la, score);
        }
    }
}

#[test]
fn keys_that_are_not_kept_are_removed() {
    let x = Case::gaussian(Problem::new(1, 90, 6), 2);
    for score in SCORES {
        for select in ["top", "drawn"] {
            let pairs = [("keys", "20"), ("block", "20"), ("score", score), ("select", select)];
            let chosen = {
                let key = crate::group::GroupIndex { batch: 0, kv_head: 0 }.stream_key(0).with(0).with(90);
                plan(&pairs).kept(MatRef::new(&x.k, 90, 6), None, key).unwrap()
            };
            assert_eq!(chosen.len(), 20);
            let (o, lse) = run_method(&METHOD, &options(&pairs), &x);
            let (want, want_lse) = reference_masked(&x, |_, j| chosen.contains(&(j as u32)));
            assert_rows_close(&o, &want, 1e-13, score);
            assert_rows_close(&lse, &want_lse, 1e-13, score);
        }
    }
}

#[test]
fn choices_are_nested() {
    let x = Case::gaussian(Problem::new(1, 120, 5), 3);
    for score in SCORES {
        // The number of clusters must not follow the number of keys.
        let choose = |keys: &str| kept(&[("keys", keys), ("score", score), ("clusters", "6")], &x.k, 5);
        let (few, more) = (choose("10"), choose("40"));
        assert!(few.iter().all(|j| more.contains(j)), "{score}");
    }
}

#[test]
fn leverage_sums_to_the_rank_and_does_not_feel_the_basis() {
    let x = Case::gaussian(Problem::new(1, 70, 4), 4);
    let p = plan(&[]);
    let key = StreamKey::new(0);
    let scores = p.scores(MatRef::new(&x.k, 70, 4), None, key, true);
    assert!((scores.iter().sum::<f64>() - 4.0).abs() < 1e-10);
    // Columns mixed by an invertible matrix.
    let m = [[2.0, 0.5, 0.0, 0.0], [0.0, 1.0, -3.0, 0.0], [0.0, 0.0, 0.3, 1.0], [1.0, 0.0, 0.0, 5.0]];
    let mixed: Vec<f64> =
        x.k.chunks(4)
            .flat_map(|row| (0..4).map(|c| (0..4).map(|l| row[l] * m[l][c]).sum::<f64>()).collect::<Vec<_>>())
            .collect();
    let again = p.scores(MatRef::new(&mixed, 70, 4), None, key, true);
    assert_rows_close(&again, &scores, 1e-10, "leverage");
    let norms = plan(&[("score", "norm2")]);
    let (a, b) = (
        norms.scores(MatRef::new(&x.k, 70, 4), None, key, true),
        norms.scores(MatRef::new(&mixed, 70, 4), None, key, true),
    );
    assert!(a.iter().zip(&b).any(|(a, b)| (a - b).abs() > 1.0));
    // Orthonormal columns: leverage is the squared norm.
    let half = 0.5f64;
    let ortho = [half, half, half, -half, -half, half, -half, -half];
    let scores = p.scores(MatRef::new(&ortho, 4, 2), None, key, true);
    assert_rows_close(&scores, &[0.5; 4], 1e-12, "orthonormal columns");
}

#[test]
fn a_key_orthogonal_to_all_others_has_leverage_one_and_comes_first() {
    let mut k: Vec<f64> = Case::gaussian(Problem::new(1, 60, 5), 5).k.iter().map(|x| 0.01 * x).collect();
    k.chunks_mut(5).for_each(|row| row[4] = 0.0);
    k[33 * 5..34 * 5].copy_from_slice(&[0.0, 0.0, 0.0, 0.0, 0.7]);
    assert_eq!(kept(&[("keys", "1")], &k, 5), [33]);
    let scores = plan(&[]).scores(MatRef::new(&k, 60, 5), None, StreamKey::new(0), true);
    assert!((scores[33] - 1.0).abs() < 1e-9);
    // Equal scores: the smaller index.
    assert_eq!(kept(&[("keys", "2"), ("score", "norm2")], &[1.0, 1.0, 1.0, 0.5], 1), [0, 1]);
}

#[test]
fn outlier_scores_are_shares_of_the_cluster() {
    // Two clusters on a line with centroids 1 and 12; singletons would have distance and score zero.
    let k = [0.0, 1.0, 2.0, 10.0, 14.0];
    let p = plan(&[("score", "kmeans_outlier"), ("clusters", "2"), ("iters", "20")]);
    let scores = p.scores(MatRef::new(&k, 5, 1), None, StreamKey::new(1), true);
    let want = [1.0 / (2.0 + 1e-6), 0.0, 1.0 / (2.0 + 1e-6), 2.0 / (4.0 + 1e-6), 2.0 / (4.0 + 1e-6)];
    assert_rows_close(&scores, &want, 1e-12, "shares");
    assert_rows_close(
        &p.scores(MatRef::new(&k, 5, 1), None, StreamKey::new(1), false),
        &[1.0, 0.0, 1.0, 2.0, 2.0],
        1e-12,
        "distances",
    );
    let kernel = plan(&[("score", "kernel_kmeans"), ("clusters", "2"), ("iters", "20")]);
    let sigma = 1.3 * 6.0 / 5.0;
    let want: Vec<f64> =
        [1.0f64, 0.0, 1.0, 2.0, 2.0].iter().map(|u| (-u * u / (2.0 * sigma * sigma)).exp()).collect();
    assert_rows_close(
        &kernel.scores(MatRef::new(&k, 5, 1), None, StreamKey::new(1), true),
        &want,
        1e-12,
        "kernel",
    );
    let median = plan(&[("score", "kmedian_outlier"), ("clusters", "1")]);
    let distances = median.scores(MatRef::new(&k, 5, 1), None, StreamKey::new(1), false);
    assert_rows_close(&distances, &[2.0, 1.0, 0.0, 8.0, 12.0], 1e-12, "distances to the median");
}

#[test]
fn drawn_keys_follow_their_scores() {
    let k = [1.0, 2.0, 3.0, 0.0];
    let p = plan(&[("keys", "1"), ("score", "norm2"), ("select", "drawn")]);
    let mut counts = [0u32; 4];
    for seed in 0..4000 {
        counts[p.kept(MatRef::new(&k, 4, 1), None, StreamKey::new(seed)).unwrap()[0] as usize] += 1;
    }
    for (count, weight) in counts.iter().zip([1.0, 4.0, 9.0, 0.0]) {
        let share = weight / 14.0;
        let error = (share * (1.0 - share) * 4000.0f64).sqrt();
        assert!((f64::from(*count) - share * 4000.0).abs() <= 5.0 * error, "{counts:?}");
    }
}

#[test]
fn the_error_without_samples_is_bounded_by_the_lost_mass() {
    let x = Case::clustered(Problem::new(1, 300, 8), 7);
    let exact = reference(&x);
    let diameter = (0..300)
        .flat_map(|i| (0..i).map(move |j| (i, j)))
        .map(|(i, j)| (0..8).map(|c| (x.v[i * 8 + c] - x.v[j * 8 + c]).powi(2)).sum::<f64>().sqrt())
        .fold(0.0, f64::max);
    for score in SCORES {
        let (o, lse) =
            run_method(&METHOD, &options(&[("keys", "100"), ("block", "32"), ("score", score)]), &x);
        for i in 0..300 {
            let lost = 1.0 - (lse[i] - exact.1[i]).exp();
            let gap = (0..8).map(|c| (o[i * 8 + c] - exact.0[i * 8 + c]).powi(2)).sum::<f64>().sqrt();
            assert!(lost > -1e-12 && gap <= lost * diameter + 1e-12, "{score}, row {i}: {gap}, lost {lost}");
        }
    }
}

#[test]
fn samples_of_all_keys_make_the_normaliser_unbiased() {
    for p in [Problem::new(1, 97, 8), Problem::new(1, 97, 8).causal()] {
        let x = Case::gaussian(p, 8);
        let (_, exact) = reference(&x);
        let seeds = 600;
        let mut sums = vec![(0.0, 0.0); 97];
        let base =
            options(&[("keys", "30"), ("block", "6"), ("samples", "12"), ("n_min", "12"), ("hashes", "3")]);
        let base = base.with("residual", "all_keys").with("residual_samples", 20);
        for seed in 0..seeds {
            let (_, lse) = run_method(&METHOD, &base.clone().with("seed", seed as u64), &x);
            for (s, (l, e)) in sums.iter_mut().zip(lse.iter().zip(&exact)) {
                let ratio = (l - e).exp();
                *s = (s.0 + ratio, s.1 + ratio * ratio);
            }
        }
        let n = seeds as f64;
        for (row, (sum, squares)) in sums.into_iter().enumerate() {
            let mean = sum / n;
            let error = ((squares / n - mean * mean).max(0.0) / (n - 1.0)).sqrt();
            assert!((mean - 1.0).abs() <= 5.0 * error + 1e-9, "row {row}: {mean} ± {error}");
        }
    }
}

#[test]
fn the_mean_query_finds_what_every_query_attends_to() {
    // Every query shares a direction with keys 57 and 101; others are longer, but no query is aligned with them.
    let mut x = Case::gaussian(Problem::new(2, 150, 8).with_kv_heads(1), 9);
    x.q.chunks_exact_mut(8).for_each(|q| q[0] = 8.0);
    x.q.chunks_exact_mut(8).for_each(|q| q[1] = 0.0);
    x.k.chunks_exact_mut(8).enumerate().for_each(|(j, k)| k[1] = if j % 2 == 0 { 30.0 } else { -30.0 });
    for j in [57, 101] {
        x.k[j * 8..j * 8 + 2].copy_from_slice(&[6.0, 0.0]);
    }
    let (want, _) = reference(&x);
    let error = |score: &str, select: &str| {
        let o = options(&[("keys", "20"), ("block", "20"), ("score", score), ("select", select)]);
        relative_frobenius(&run_method(&METHOD, &o, &x).0, &want)
    };
    assert!(error("mean_query", "top") < 0.01 && error("mean_query", "drawn") < 0.01);
    assert!(error("norm2", "top") > 0.5);
}

#[test]
fn the_complement_is_found_at_its_places() {
    assert_eq!(complement(8, &[0, 3, 4], &[0, 2, 4]), [1, 5, 7]);
    assert_eq!(complement(4, &[0, 1, 2, 3], &[]), Vec::<u32>::new());
    assert_eq!(complement(3, &[], &[0, 1, 2]), [0, 1, 2]);
}

/// Figures of the documentation page for 512 of 2048 keys kept, plain softmax over them: within 15 %, sinks within 1.5.
#[test]
fn reference_figures_are_met() {
    let p = Problem::new(1, 2048, 64);
    let exact = crate::registry::method("exact").unwrap();
    let error = |x: &Case, score: &str| {
        let (want, _) = run_method(exact, &Options::new(), x);
        let o = options(&[("keys", "512"), ("block", "512"), ("score", score), ("clusters", "64")]);
        let o = o.with("seeding", "plus_plus");
        relative_frobenius(&run_method(&METHOD, &o, x).0, &want)
    };
    let near = |got: f64, want: f64, tol: f64| assert!((got / want - 1.0).abs() < tol, "{got} for {want}");
    let mean = |make: fn(Problem, u64) -> Case, score: &str| {
        (0..3).map(|s| error(&make(p, s), score)).sum::<f64>() / 3.0
    };
    near(mean(Case::gaussian, "kmeans_outlier"), 1.8, 0.15);
    near(mean(Case::clustered, "kmeans_outlier"), 0.68, 0.15);
    near(mean(Case::with_heavy_sinks, "kmeans_outlier"), 2.5, 0.5);
    near(mean(Case::gaussian, "leverage"), 1.7, 0.15);
    near(mean(Case::gaussian, "norm2"), 1.7, 0.15);
    near(mean(Case::clustered, "leverage"), 0.27, 0.15);
    near(mean(Case::clustered, "norm2"), 0.51, 0.15);
    near(mean(Case::with_heavy_sinks, "leverage"), 3.6, 0.5);
    near(mean(Case::with_heavy_sinks, "norm2"), 3.6, 0.5);
}
