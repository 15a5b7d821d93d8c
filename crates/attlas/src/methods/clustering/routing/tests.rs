use super::centroids::{calibrate, layer_norm};
use super::*;
use crate::Options;
use crate::testkit::workloads::{Clustered, assert_within, clustered, measure, stated};
use crate::testkit::{
    Case, How, assert_rows_close, check_method, reference, reference_masked, reference_weights, run_method,
    run_with,
};
use crate::{Inputs, Qkv, TensorRef, Workspace};
use attlas_num::rng::StreamKey;

#[test]
fn honours_the_contract() {
    check_method(&METHOD);
}

/// A calibration with these centroids for the only key head.
fn given(p: &Problem, centroids: &Mat<f64>) -> Calibration {
    let mut calibration = Calibration::new(METHOD.id, p);
    calibration.insert("centroids.0".into(), centroids);
    calibration
}

fn unit_rows(seed: u64, rows: usize, d: usize) -> Mat<f64> {
    let mut m = Mat::zeros(rows, d);
    StreamKey::new(seed).rng().fill_normal(m.data_mut());
    for c in 0..rows {
        layer_norm(m.row_mut(c));
        m.row_mut(c).iter_mut().for_each(|x| *x /= (d as f64).sqrt());
    }
    m
}

fn run_given(case: &Case, options: &Options, centroids: &Mat<f64>) -> (Vec<f64>, Vec<f64>) {
    let plan = METHOD.plan_with(&case.problem, options, Some(&given(&case.problem, centroids))).unwrap();
    let ran = run_with(&*plan, case, How::default()).unwrap();
    (ran.o, ran.lse)
}

/// Products of layer-normed rows with centroids, row after row.
fn scores(x: &[f64], centroids: &Mat<f64>) -> Vec<Vec<f64>> {
    let d = centroids.cols();
    let score = |row: &[f64]| {
        let mut row = row.to_vec();
        layer_norm(&mut row);
        (0..centroids.rows()).map(|c| row.iter().zip(centroids.row(c)).map(|(a, b)| a * b).sum()).collect()
    };
    x.chunks(d).map(score).collect()
}

/// True where a row is among the `w` best of a centroid.
fn members(scores: &[Vec<f64>], w: usize) -> Vec<Vec<bool>> {
    let better = |i: usize, c: usize| scores.iter().filter(|row| row[c] > scores[i][c]).count();
    (0..scores.len()).map(|i| (0..scores[i].len()).map(|c| better(i, c) < w).collect()).collect()
}

fn best(row: &[f64]) -> usize {
    (0..row.len()).fold(0, |a, c| if row[c] > row[a] { c } else { a })
}

#[test]
fn groups_are_the_best_queries_and_keys_of_every_centroid() {
    let p = Problem { d_v: 3, ..Problem::new(1, 1, 6).with_lens(80, 100) };
    let case = Case::gaussian(p, 1);
    let (centroids, w) = (unit_rows(2, 7, 6), 15);
    let (a, b) = (scores(&case.q, &centroids), scores(&case.k, &centroids));
    let (in_q, in_k) = (members(&a, w), members(&b, w));
    for c in 0..7 {
        assert_eq!((in_q.iter().filter(|m| m[c]).count(), in_k.iter().filter(|m| m[c]).count()), (w, w));
    }
    let count = |i: usize, j: usize| {
        let groups = (0..7).filter(|&c| in_q[i][c] && in_k[j][c]).count();
        let lost = !in_q[i].contains(&true);
        groups + usize::from(lost && in_k[j][best(&a[i])])
    };
    let options = Options::new().with("window", w);
    let (o, lse) = run_given(&case, &options, &centroids);
    let (want, want_lse) = reference_masked(&case, |i, j| count(i, j) > 0);
    assert_rows_close(&o, &want, 1e-12, "union");
    assert_rows_close(&lse, &want_lse, 1e-12, "union");
    let (o, lse) = run_given(&case, &options.clone().with("merge", "multiset"), &centroids);
    let (want, want_lse) = reference_weights(&case, |i, j, s| s + (count(i, j) as f64).ln());
    assert_rows_close(&o, &want, 1e-12, "multiset");
    assert_rows_close(&lse, &want_lse, 1e-12, "multiset");

    let (o, mean_lse) = run_given(&case, &options.clone().with("merge", "mean"), &centroids);
    let mut sum = vec![0.0; 80 * 3];
    let mut groups = vec![0.0; 80];
    for c in 0..7 {
        let (part, _) = reference_masked(&case, |i, j| in_q[i][c] && in_k[j][c]);
        for i in (0..80).filter(|&i| in_q[i][c]) {
            groups[i] += 1.0;
            (0..3).for_each(|x| sum[i * 3 + x] += part[i * 3 + x]);
        }
    }
    for i in (0..80).filter(|&i| groups[i] > 0.0) {
        assert!((0..3).all(|x| (o[i * 3 + x] - sum[i * 3 + x] / groups[i]).abs() < 1e-12));
    }
    assert_rows_close(&mean_lse, &want_lse, 1e-12, "mean");

    let (o, lse) = run_given(&case, &options.with("fallback", "zero"), &centroids);
    let lost: Vec<usize> = (0..80).filter(|&i| !in_q[i].contains(&true)).collect();
    assert!(!lost.is_empty());
    assert!(
        lost.iter().all(|&i| lse[i] == f64::NEG_INFINITY && o[i * 3..(i + 1) * 3].iter().all(|&x| x == 0.0))
    );
}

#[test]
fn a_query_sees_the_most_recent_keys_of_its_cluster() {
    let p = Problem { d_v: 3, ..Problem::new(1, 1, 6).with_lens(90, 100) }.causal();
    let case = Case::gaussian(p, 3);
    let centroids = unit_rows(4, 5, 6);
    let (a, b) = (scores(&case.q, &centroids), scores(&case.k, &centroids));
    for w in [4usize, 1, 6] {
        let sees = |i: usize, j: usize| {
            let mates: Vec<usize> =
                (0..=i + 10).rev().filter(|&l| best(&b[l]) == best(&a[i])).take(w).collect();
            mates.contains(&j) || mates.is_empty() && j == i + 10
        };
        let options = Options::new().with("window", w);
        let (o, lse) = run_given(&case, &options, &centroids);
        let (want, want_lse) = reference_masked(&case, sees);
        assert_rows_close(&o, &want, 1e-12, &options.to_string());
        assert_rows_close(&lse, &want_lse, 1e-12, &options.to_string());
    }
}

#[test]
fn the_first_tokens_of_a_causal_sequence_are_exact() {
    let case = Case::gaussian(Problem::new(1, 120, 8).causal(), 5);
    let (want, _) = reference(&case);
    let options = Options::new().with("clusters", 8).with("window", 5).with("prefix", 30);
    let (o, _) = run_method(&METHOD, &options, &case);
    assert_rows_close(&o[..30 * 8], &want[..30 * 8], 1e-12, "prefix");
    assert!((0..8).any(|c| (o[80 * 8 + c] - want[80 * 8 + c]).abs() > 1e-3));
}

#[test]
fn groups_of_all_tokens_are_exact_however_they_are_merged() {
    let p = Problem::new(2, 60, 8).with_kv_heads(1);
    let case = Case::gaussian(p, 6);
    let (want, want_lse) = reference(&case);
    let view = |x, h| TensorRef::bhnd(x, [1, h, 60, 8]).unwrap();
    for clusters in [1, 4] {
        for merge in [Merge::Union, Merge::Mean] {
            let plan = Routing::new(Params { merge, ..Params::default() }, &p, None).unwrap();
            let ws = Workspace::single().unwrap();
            let (mut out, mut lse) = (vec![0.0; 2 * 60 * 8], vec![f64::NEG_INFINITY; 120]);
            let q = view(&case.q, 2);
            let mut g = Group {
                q: crate::group::Queries::new(q),
                k: view(&case.k, 1).head(0, 0),
                v: view(&case.v, 1).head(0, 0),
                scale: p.scale,
                mask: Mask::None,
                out: &mut out,
                lse: &mut lse,
                index: GroupIndex { batch: 0, kv_head: 0 },
                cx: ws.context(),
            };
            let mut normed: Vec<f64> = case.q.iter().chain(&case.k).copied().collect();
            normed.chunks_exact_mut(8).for_each(layer_norm);
            let normed = MatRef::new(&normed, 180, 8);
            let sizes = Sizes { clusters, window: 60, prefix: 0 };
            plan.top_w(&mut g, normed, &unit_rows(7, clusters, 8), sizes);
            assert_rows_close(&out, &want, 1e-12, &format!("{merge:?}"));
            let shift = if merge == Merge::Mean { (clusters as f64).ln() } else { 0.0 };
            let want_lse: Vec<f64> = want_lse.iter().map(|l| l + shift).collect();
            assert_rows_close(&lse, &want_lse, 1e-12, &format!("{merge:?}"));
        }
    }
}

#[test]
fn a_centroid_given_twice_changes_no_union() {
    let case = Case::gaussian(Problem::new(1, 100, 6), 8);
    let once = unit_rows(9, 5, 6);
    let twice = Mat::from_fn(8, 6, |c, x| once[(c % 5, x)]);
    let options = Options::new().with("window", 20);
    let (a, b) = (run_given(&case, &options, &once), run_given(&case, &options, &twice));
    assert_rows_close(&b.0, &a.0, 1e-12, "outputs");
    assert_rows_close(&b.1, &a.1, 1e-12, "log-sum-exp");
}

#[test]
fn the_lost_mass_bounds_the_error_of_a_union() {
    let case = Case::gaussian(Problem::new(1, 200, 8), 10);
    let (exact, exact_lse) = reference(&case);
    let spread = 2.0 * case.v.iter().fold(0.0f64, |a, v| a.max(v.abs()));
    let (o, lse) = run_method(&METHOD, &Options::new(), &case);
    for i in 0..200 {
        let lost = 1.0 - (lse[i] - exact_lse[i]).exp();
        assert!(lost >= -1e-12);
        assert!((0..8).all(|c| (o[i * 8 + c] - exact[i * 8 + c]).abs() <= lost * spread + 1e-12));
    }
}

#[test]
fn planted_clusters_are_found_around_their_centres() {
    // The mass of a query's own group moves by half a percent from one set of centres to the next.
    let seeds = 4;
    for (scale, want) in [(0.125, 0.947), (0.5, 1.0)] {
        let mut mass = 0.0;
        for seed in 0..seeds {
            let Clustered { case, centres } = Case::clustered_with(stated(), seed, 0.05);
            let mut centroids = Mat::from_vec(centres, 64, 64);
            for c in 0..64 {
                layer_norm(centroids.row_mut(c));
                centroids.row_mut(c).iter_mut().for_each(|x| *x /= 8.0);
            }
            let case = case.with_problem(Problem { scale, ..case.problem });
            let exact = crate::registry::method("exact").unwrap();
            let (_, exact_lse) = run_method(exact, &Options::new(), &case);
            let (_, lse) = run_given(&case, &Options::new().with("window", 64), &centroids);
            mass +=
                lse.iter().zip(&exact_lse).map(|(a, b)| (a - b).exp()).sum::<f64>() / (2048 * seeds) as f64;
        }
        assert!((mass - want).abs() < 0.015, "mass {mass} at scale {scale}");
    }
}

#[test]
fn clustered_tokens_give_the_errors_of_an_independent_prototype() {
    // A prototype in NumPy, five seeds: 0.100 for the multiset, 0.166 for the mean, 0.3 % of the queries in no group.
    let options = Options::new().with("clusters", 45).with("window", 92);
    for (merge, want) in [("multiset", 0.100), ("mean", 0.166)] {
        let error = measure(&METHOD, &options.clone().with("merge", merge), clustered, 4).error;
        assert_within(error, want, 0.2, merge);
    }
}

#[test]
fn layer_normed_logits_ignore_length_and_mean() {
    let (p, options) =
        (Problem::new(1, 100, 8), Options::new().with("logits", "layer_norm").with("window", 12));
    for p in [p, p.causal()] {
        let case = Case::gaussian(p, 12);
        let mut moved = case.clone();
        moved.q.iter_mut().chain(&mut moved.k).for_each(|x| *x = 3.0 * *x + 5.0);
        let (a, b) = (run_method(&METHOD, &options, &case), run_method(&METHOD, &options, &moved));
        assert_rows_close(&b.0, &a.0, 1e-10, "moved");
        // Every group holds everything: the softmax of normed products without a scale.
        let mut normed = Case { problem: Problem { scale: 1.0, ..p }, ..case.clone() };
        normed.q.chunks_exact_mut(8).chain(normed.k.chunks_exact_mut(8)).for_each(layer_norm);
        let (want, _) = reference(&normed);
        let all = options.clone().with("window", 100).with("clusters", 1);
        assert_rows_close(&run_method(&METHOD, &all, &case).0, &want, 1e-12, "all");
    }
}

#[test]
fn a_calibration_gives_the_centroids_of_its_samples() {
    let case = Case::clustered_with(stated(), 13, 0.05).case;
    let p = case.problem;
    let view = |x| TensorRef::bhnd(x, [1, 1, 2048, 64]).unwrap();
    let x = Qkv::new(view(&case.q), view(&case.k), view(&case.v));
    let options = Options::new().with("clusters", 64);
    let calibration = calibrate(&Params::from_options(&options).unwrap(), &p, &[Inputs::F64(x)]).unwrap();
    let centroids = calibration.matrix("centroids.0").unwrap();
    assert!(centroids.rows() <= 64 && centroids.rows() > 32);
    for c in 0..centroids.rows() {
        assert!((centroids.row(c).iter().map(|x| x * x).sum::<f64>() - 1.0).abs() < 1e-12);
    }
    let causal = p.causal();
    let plan = METHOD.plan_with(&causal, &options, Some(&Calibration { ..calibration })).unwrap();
    let ran = run_with(&*plan, &case.with_problem(causal), How::default()).unwrap();
    assert!(ran.o.iter().all(|x| x.is_finite()));
}

#[test]
fn what_would_leak_is_refused() {
    let p = Problem::new(1, 100, 8);
    let refused =
        |p: Problem, name: &str, value: &str| METHOD.plan(&p, &Options::new().with(name, value)).is_err();
    assert!(refused(p.causal(), "assignment", "top_w") && refused(p, "assignment", "nearest_recent"));
    assert!(refused(p.causal(), "fallback", "nearest_centroid") && refused(p, "fallback", "self_key"));
}
