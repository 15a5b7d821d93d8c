use super::*;
use crate::testkit::workloads::{assert_within, clustered, diffuse, measure, sinks};
use crate::testkit::{Case, assert_rows_close, check_method, reference, run_method, run_with};
use crate::{DType, Options, Out, TensorMut, TensorRef, Workspace};
use attlas_num::rng::StreamKey;

#[test]
fn honours_the_contract() {
    check_method(&METHOD);
}

/// Settings that cluster every key but the last.
fn all_clustered() -> Options {
    Options::new().with("sinks", 0).with("interval", 1)
}

#[test]
fn a_budget_for_all_clustered_keys_is_exact() {
    let case = Case::gaussian(Problem::new(2, 150, 8).with_kv_heads(1), 1);
    let (want, want_lse) = reference(&case);
    let options = all_clustered().with("budget", 149);
    for options in [options.clone(), options.with("hierarchy", true)] {
        let (o, lse) = run_method(&METHOD, &options, &case);
        assert_rows_close(&o, &want, 1e-12, "outputs");
        assert_rows_close(&lse, &want_lse, 1e-12, "log-sum-exp");
    }
}

#[test]
fn clusters_of_one_key_are_exact_for_any_budget() {
    for problem in [Problem::new(1, 150, 8), Problem::new(1, 150, 8).causal()] {
        let case = Case::gaussian(problem, 2);
        let (want, want_lse) = reference(&case);
        for budget in [0usize, 7, 60] {
            let options = Options::new().with("ratio", 1.0).with("budget", budget).with("interval", 10);
            let (o, lse) = run_method(&METHOD, &options.with("sinks", 2), &case);
            assert_rows_close(&o, &want, 1e-12, "outputs");
            assert_rows_close(&lse, &want_lse, 1e-12, "log-sum-exp");
        }
    }
}

/// Runs one head over given clusters, without sinks.
fn over_labels(case: &Case, labels: &[u32], params: Params) -> (Vec<f64>, Vec<f64>) {
    let p = &case.problem;
    let params = Params { sinks: 0, ..params };
    let (k, v) = (MatRef::new(&case.k, p.n_k, p.d), MatRef::new(&case.v, p.n_k, p.d_v));
    let plan = Multipole::new(params.clone()).unwrap();
    let state = KeyClusters::new(params, p.d, p.d_v, StreamKey::new(1)).with_labels(k, v, labels);
    let ws = Workspace::single().unwrap();
    let (mut out, mut lse) = (vec![f64::NAN; p.n_q * p.d_v], vec![f64::NAN; p.n_q]);
    for (i, (out, lse)) in out.chunks_exact_mut(p.d_v).zip(lse.chunks_exact_mut(1)).enumerate() {
        let q = MatRef::new(&case.q[i * p.d..(i + 1) * p.d], 1, p.d);
        let cache = ClusteredKeys { k, v, len: p.n_k, state: &state };
        plan.attend(cache, q, None, 0.0, p.scale, ws.context(), out, lse);
    }
    (out, lse)
}

#[test]
fn one_cluster_of_two_opposite_keys_is_the_known_answer() {
    let p = Problem { scale: 1.0, ..Problem::new(1, 1, 1).with_lens(1, 2) };
    let case = Case { q: vec![1.0], k: vec![1.0, -1.0], v: vec![1.0, -1.0], ..Case::gaussian(p, 1) };
    let (o, lse) = over_labels(&case, &[0, 0], Params { budget: 0, ..Params::default() });
    assert!((lse[0].exp() - 2.0).abs() < 1e-15 && o[0] == 0.0);
    let (o, lse) = over_labels(&case, &[0, 0], Params { budget: 2, ..Params::default() });
    assert!((lse[0].exp() - 3.0862).abs() < 5e-5 && (o[0] - 1f64.tanh()).abs() < 1e-15);
    // A cluster that does not fit entirely is not taken at all.
    let (_, lse) = over_labels(&case, &[0, 0], Params { budget: 1, ..Params::default() });
    assert!((lse[0].exp() - 2.0).abs() < 1e-15);
}

#[test]
fn equal_keys_in_every_cluster_are_exact_for_any_budget_and_values() {
    let mut case = Case::gaussian(Problem::new(1, 120, 6), 3);
    let labels: Vec<u32> = (0..120).map(|i| i * 7 % 13).collect();
    let centres = case.k[..13 * 6].to_vec();
    for (i, &label) in labels.iter().enumerate() {
        case.k[i * 6..(i + 1) * 6].copy_from_slice(&centres[label as usize * 6..][..6]);
    }
    let (want, want_lse) = reference(&case);
    for budget in [0, 10, 40] {
        for hierarchy in [false, true] {
            let params = Params { budget, hierarchy, coarse_ratio: 1.0, ..Params::default() };
            let (o, lse) = over_labels(&case, &labels, params);
            assert_rows_close(&o, &want, 1e-12, "outputs");
            assert_rows_close(&lse, &want_lse, 1e-12, "log-sum-exp");
        }
    }
}

#[test]
fn the_mass_found_never_exceeds_the_true_one_and_grows_with_budget_and_refinement() {
    let case = Case::gaussian(Problem::new(1, 200, 8), 4);
    let (_, exact) = reference(&case);
    let coarse: Vec<u32> = (0..200).map(|i| i % 10).collect();
    let fine: Vec<u32> = (0..200).map(|i| i % 30).collect();
    let mut last = vec![f64::NEG_INFINITY; 200];
    for budget in [0, 20, 60, 200] {
        let (_, lse) = over_labels(&case, &coarse, Params { budget, ..Params::default() });
        assert!((0..200).all(|i| lse[i] <= exact[i] + 1e-12 && lse[i] >= last[i] - 1e-12));
        last = lse;
    }
    let (_, a) = over_labels(&case, &coarse, Params { budget: 0, ..Params::default() });
    let (_, b) = over_labels(&case, &fine, Params { budget: 0, ..Params::default() });
    assert!((0..200).all(|i| b[i] >= a[i] - 1e-12));
    // For small logits the ratio of masses is 1 + var/2.
    let p = Problem { scale: 0.02, ..case.problem };
    let small = case.with_problem(p);
    let (_, exact) = reference(&small);
    let (_, lse) = over_labels(&small, &vec![0; 200], Params { budget: 0, ..Params::default() });
    for i in 0..200 {
        let s: Vec<f64> = (0..200)
            .map(|j| 0.02 * (0..8).map(|c| case.q[i * 8 + c] * case.k[j * 8 + c]).sum::<f64>())
            .collect();
        let mean = s.iter().sum::<f64>() / 200.0;
        let variance = s.iter().map(|s| (s - mean).powi(2)).sum::<f64>() / 200.0;
        assert!(((exact[i] - lse[i]).exp() - 1.0 - variance / 2.0).abs() < 4.0 * variance.powf(1.5));
    }
}

#[test]
fn one_coarse_cluster_that_is_taken_gives_the_flat_answer() {
    let case = Case::gaussian(Problem::new(1, 200, 8), 5);
    let labels: Vec<u32> = (0..200).map(|i| i % 25).collect();
    let flat = Params { budget: 30, ..Params::default() };
    let (want, want_lse) = over_labels(&case, &labels, flat.clone());
    let nested = Params { hierarchy: true, coarse_ratio: 1e-6, coarse_factor: 1e3, ..flat };
    let (o, lse) = over_labels(&case, &labels, nested);
    assert_rows_close(&o, &want, 1e-12, "outputs");
    assert_rows_close(&lse, &want_lse, 1e-12, "log-sum-exp");
}

#[test]
fn heads_choose_by_their_mean_score() {
    // Two heads favour opposite clusters; a budget for one cluster goes to the head with the more peaked weights.
    let p = Problem { scale: 1.0, ..Problem::new(2, 1, 1).with_lens(1, 4).with_kv_heads(1) };
    let k = vec![2.0, 2.2, -2.0, -2.2];
    let (k, v) = (MatRef::new(&k, 4, 1), MatRef::new(&k, 4, 1));
    let params = Params { sinks: 0, budget: 2, far: Far::Drop, ..Params::default() };
    let run = |params: Params| {
        let state =
            KeyClusters::new(params.clone(), 1, 1, StreamKey::new(1)).with_labels(k, v, &[0, 0, 1, 1]);
        let ws = Workspace::single().unwrap();
        let (mut out, mut lse) = ([0.0; 2], [0.0; 2]);
        let cache = ClusteredKeys { k, v, len: 4, state: &state };
        let q = MatRef::new(&[0.1, -3.0], 2, 1);
        Multipole::new(params).unwrap().attend(
            cache,
            q,
            None,
            0.0,
            p.scale,
            ws.context(),
            &mut out,
            &mut lse,
        );
        out
    };
    let together = run(params.clone());
    assert!(together[0] < -1.9 && together[1] < -1.9, "{together:?}");
    let alone = run(Params { per_head: true, ..params });
    assert!(alone[0] > 1.9 && alone[1] < -1.9, "{alone:?}");
}

#[test]
fn every_clustered_key_is_in_one_cluster_after_every_update() {
    let (n, d) = (900, 4);
    let case = Case::gaussian(Problem::new(1, n, d), 6);
    let (k, v) = (MatRef::new(&case.k, n, d), MatRef::new(&case.v, n, d));
    let params = Params {
        sinks: 3,
        interval: 20,
        window: 100,
        hierarchy: true,
        coarse_ratio: 0.02,
        ..Params::default()
    };
    let plan = Multipole::new(params.clone()).unwrap();
    for prompt in [0, 30, 333, 600] {
        let mut state = KeyClusters::<f64>::new(params.clone(), d, d, StreamKey::new(2));
        state.prefill(k, v, plan.clustered(prompt));
        for tokens in prompt..=n {
            let target = plan.clustered(tokens);
            state.update(k, v, target);
            let recent = tokens.saturating_sub(3 + target);
            assert!(target == 0 || (20..40).contains(&recent), "{recent} recent of {tokens}");
            if tokens % 20 != 3 {
                continue;
            }
            assert_eq!(state.clustered(), target);
            let mut seen = vec![0; n];
            for c in 0..state.fine().len() {
                let members = state.fine().members(c);
                assert_eq!(members.len(), state.fine().count(c));
                members.iter().for_each(|&j| seen[j as usize] += 1);
                for x in 0..d {
                    let mean = |m: MatRef<'_, f64>| {
                        members.iter().map(|&j| m.at(j as usize, x)).sum::<f64>() / members.len() as f64
                    };
                    assert!((state.fine().keys().at(c, x) - mean(k)).abs() < 1e-12);
                    assert!((state.fine().values().at(c, x) - mean(v)).abs() < 1e-12);
                }
            }
            assert!((0..n).all(|j| seen[j] == usize::from((3..3 + target).contains(&j))));
            let coarse = state.coarse().unwrap();
            let mut children = vec![0; state.fine().len()];
            for c in 0..coarse.len() {
                let keys: usize = coarse.members(c).iter().map(|&f| state.fine().count(f as usize)).sum();
                assert_eq!(keys, coarse.count(c));
                coarse.members(c).iter().for_each(|&f| children[f as usize] += 1);
            }
            assert!(children.iter().all(|&n| n == 1));
        }
    }
}

/// Output rows of a stream fed a prompt and then single tokens.
fn streamed(options: &Options, case: &Case, prompt: usize) -> Vec<f64> {
    let p = case.problem;
    let plan = METHOD.plan(&p, options).unwrap();
    let mut stream = plan.stream(DType::F64).unwrap();
    let mut ws = Workspace::single().unwrap();
    let q = TensorRef::bhnd(&case.q, [1, p.n_heads, p.n_q, p.d]).unwrap();
    let k = TensorRef::bhnd(&case.k, [1, p.n_kv_heads, p.n_k, p.d]).unwrap();
    let v = TensorRef::bhnd(&case.v, [1, p.n_kv_heads, p.n_k, p.d_v]).unwrap();
    let mut rows = vec![0.0; p.n_heads * p.n_q * p.d_v];
    if prompt > 0 {
        stream.push(k.rows(0..prompt).into(), v.rows(0..prompt).into(), &mut ws).unwrap();
    }
    for t in prompt..p.n_k {
        let i = t + p.n_q - p.n_k;
        stream.push(k.rows(t..t + 1).into(), v.rows(t..t + 1).into(), &mut ws).unwrap();
        let mut o = vec![f64::NAN; p.n_heads * p.d_v];
        let out = Out::new(TensorMut::bhnd(&mut o, [1, p.n_heads, 1, p.d_v]).unwrap());
        stream.attend(q.rows(i..i + 1).into(), &mut out.into(), &mut ws).unwrap();
        for h in 0..p.n_heads {
            rows[(h * p.n_q + i) * p.d_v..][..p.d_v].copy_from_slice(&o[h * p.d_v..][..p.d_v]);
        }
    }
    rows
}

#[test]
fn decoding_gives_the_rows_of_the_causal_plan_for_the_same_prompt() {
    let base = Options::new().with("interval", 8).with("window", 32).with("sinks", 2).with("budget", 10);
    let base = base.with("ratio", 0.25);
    for options in [base.clone(), base.clone().with("hierarchy", true), base.with("rope_base", 1e4)] {
        for prompt in [0, 70] {
            let p = Problem { d_v: 5, ..Problem::new(4, 1, 6).with_kv_heads(2).with_lens(150 - prompt, 150) };
            let case = Case::gaussian(p.causal(), 7);
            let (want, _) = run_method(&METHOD, &options, &case);
            assert_rows_close(
                &streamed(&options, &case, prompt),
                &want,
                1e-12,
                &format!("{options} {prompt}"),
            );
        }
    }
}

#[test]
fn unrotated_keys_are_clustered_whatever_their_positions() {
    // One key, rotated to every position: a single cluster without spread, scored at the assumed distance.
    let (n, d) = (200, 8);
    let mut case = Case::gaussian(Problem::new(1, n, d), 8);
    let turn = Turn::new(1e4, d, true);
    let key = case.k[..d].to_vec();
    for j in 0..n {
        case.k[j * d..(j + 1) * d].copy_from_slice(&key);
        turn.apply(j as f64, &mut case.k[j * d..(j + 1) * d]);
    }
    let options = all_clustered().with("budget", 0).with("ratio", 0.005).with("rope_base", 1e4);
    let (_, lse) = run_method(&METHOD, &options.with("rope_offset", 300), &case);
    for (i, &lse) in lse.iter().enumerate() {
        // The query is at position i; rotated to 300 it scores the key at 0. The last key is exact.
        let mut q = case.q[i * d..(i + 1) * d].to_vec();
        let last: f64 = (0..d).map(|c| q[c] * case.k[(n - 1) * d + c]).sum();
        turn.apply(300.0 - i as f64, &mut q);
        let far: f64 = (0..d).map(|c| q[c] * key[c]).sum();
        let scale = case.problem.scale;
        let want = ((scale * last).exp() + (n - 1) as f64 * (scale * far).exp()).ln();
        assert!((lse - want).abs() < 1e-11, "row {i}: {lse} instead of {want}");
    }
}

#[test]
fn the_workloads_give_the_reference_figures() {
    let base = all_clustered();
    type Make = fn(u64) -> Case;
    let rows: [(&str, Make, usize, f64, f64); 6] = [
        ("monopole", diffuse, 128, 0.70, 0.71),
        ("monopole", clustered, 128, 0.0081, 0.994),
        ("monopole", sinks, 128, 0.49, 0.84),
        ("monopole", clustered, 512, 0.0042, 0.997),
        ("monopole", sinks, 512, 0.32, 0.90),
        ("drop", clustered, 128, 0.088, 0.945),
    ];
    for (far, make, budget, error, mass) in rows {
        let q = measure(&METHOD, &base.clone().with("far", far).with("budget", budget), make, 2);
        assert_within(q.error, error, 0.15, &format!("error, {far} {budget}, expected {error}"));
        assert_within(q.mass, mass, 0.15, &format!("mass, {far} {budget}, expected {mass}"));
    }
}

#[test]
fn impossible_windows_and_rotations_are_refused() {
    let p = Problem::new(1, 10, 7);
    assert!(METHOD.plan(&p, &Options::new().with("window", 255)).is_err());
    assert!(METHOD.plan(&p, &Options::new().with("rope_base", 1e4)).is_err());
    assert!(METHOD.plan(&p, &Options::new().with("rope_base", 1e4).with("rope_dim", 6)).is_ok());
    let case = Case::gaussian(p, 1);
    let plan = METHOD.plan(&p, &Options::new().with("budget", 0)).unwrap();
    let ran = run_with(&*plan, &case, crate::testkit::How::default()).unwrap();
    // Too few keys to cluster any: all are exact.
    assert_rows_close(&ran.o, &reference(&case).0, 1e-12, "short");
}

#[test]
fn blocks_of_rows_with_clusters_of_one_key_are_exact_for_any_budget() {
    let case = Case::gaussian(Problem::new(3, 300, 8).with_kv_heads(1).causal(), 9);
    let (want, want_lse) = reference(&case);
    for budget in [0usize, 7, 60] {
        let options = Options::new().with("prompt", "blocks").with("ratio", 1.0).with("chunk", 32);
        let options = options.with("interval", 10).with("budget", budget).with("sinks", 3);
        let (o, lse) = run_method(&METHOD, &options, &case);
        assert_rows_close(&o, &want, 1e-12, "outputs");
        assert_rows_close(&lse, &want_lse, 1e-12, "log-sum-exp");
    }
}

#[test]
fn every_cluster_is_scored_however_many_there_are() {
    // More clusters than one task scores, each of one key: attention to their centroids is exact for any budget,
    // whether heads choose together or separately.
    let p = Problem::new(2, 1, 4).with_kv_heads(1).with_lens(3, 2 * super::attend::SCORED + 100);
    let case = Case::gaussian(p.causal(), 12);
    let want = reference(&case).0;
    let options = Options::new().with("ratio", 1.0).with("interval", 8).with("iters", 1).with("budget", 16);
    for per_head in [false, true] {
        let rows = streamed(&options.clone().with("per_head", per_head), &case, p.n_k - 3);
        assert_rows_close(&rows, &want, 1e-9, &format!("per_head = {per_head}"));
    }
}

#[test]
fn blocks_of_rows_do_not_see_later_queries_not_even_as_nan() {
    let p = Problem::new(2, 200, 8).with_kv_heads(1).causal();
    let case = Case::gaussian(p, 10);
    let options = Options::new().with("prompt", "blocks").with("chunk", 16).with("interval", 8);
    let options = options.with("window", 32).with("budget", 12).with("ratio", 0.25);
    let (first, first_lse) = run_method(&METHOD, &options, &case);
    for t in [65, 128, 129, 199] {
        let mut changed = case.clone();
        for h in 0..2 {
            changed.q[(h * 200 + t) * 8..(h + 1) * 200 * 8].fill(f64::NAN);
        }
        let (o, lse) = run_method(&METHOD, &options, &changed);
        for h in 0..2 {
            let rows = h * 200..h * 200 + t;
            let what = format!("token {t}");
            crate::testkit::assert_same_bits(&lse[rows.clone()], &first_lse[rows.clone()], &what);
            let cells = rows.start * 8..rows.end * 8;
            crate::testkit::assert_same_bits(&o[cells.clone()], &first[cells], &what);
        }
    }
}
