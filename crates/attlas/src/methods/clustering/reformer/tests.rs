use super::*;
use crate::Options;
use crate::testkit::workloads::{assert_within, clustered};
use crate::testkit::{Case, assert_rows_close, check_method, reference, reference_weights, run_method};
use attlas_num::cluster::{Balanced, order_by};

#[test]
fn honours_the_contract() {
    check_method(&METHOD);
}

/// The same vectors as queries and keys.
fn shared_case(problem: Problem, seed: u64) -> Case {
    let case = Case::gaussian(problem, seed);
    Case { k: case.q.clone(), ..case }
}

/// Logit of a query with a normalised key.
fn unit_logit(case: &Case, i: usize, j: usize) -> f64 {
    let d = case.problem.d;
    let (q, k) = (&case.q[i * d..(i + 1) * d], &case.k[j * d..(j + 1) * d]);
    let norm = k.iter().map(|x| x * x).sum::<f64>().sqrt();
    q.iter().zip(k).map(|(a, b)| a * b).sum::<f64>() / norm
}

/// Buckets of all rounds for given rows.
fn codes(x: &[f64], d: usize, buckets: usize, rounds: usize) -> Vec<Vec<u32>> {
    let key = GroupIndex { batch: 0, kv_head: 0 }.stream_key(0).named("reformer");
    let hash = CrossPolytope::<f64>::new(key, d, buckets, rounds);
    (0..rounds).map(|r| hash.codes(MatRef::new(x, x.len() / d, d), r)).collect()
}

/// Rank of every row by bucket and position.
fn ranks(codes: &[u32]) -> Vec<usize> {
    let mut ranks = vec![0; codes.len()];
    order_by(codes).iter().enumerate().for_each(|(rank, &i)| ranks[i as usize] = rank);
    ranks
}

fn assert_equals(case: &Case, options: &Options, count: impl Fn(usize, usize) -> usize, shared: bool) {
    let (o, lse) = run_method(&METHOD, options, case);
    let (mut want, want_lse) = reference_weights(case, |i, j, s| {
        (count(i, j) as f64).ln() + if shared { unit_logit(case, i, j) } else { s }
    });
    let p = &case.problem;
    for i in (0..p.n_q).filter(|&i| shared && want_lse[i] == f64::NEG_INFINITY) {
        want[i * p.d_v..(i + 1) * p.d_v].copy_from_slice(&case.v[i * p.d_v..(i + 1) * p.d_v]);
    }
    assert_rows_close(&o, &want, 1e-12, &options.to_string());
    assert_rows_close(&lse, &want_lse, 1e-12, &options.to_string());
}

#[test]
fn shared_tokens_see_their_own_and_neighbouring_chunks_but_not_themselves() {
    let case = shared_case(Problem { d_v: 3, ..Problem::new(1, 110, 6) }, 1);
    let options = Options::new().with("keys", "shared").with("rounds", 3).with("block", 16);
    for (before, after, across) in [(1usize, 0usize, true), (1, 1, true), (0, 0, true), (2, 0, false)] {
        let codes = codes(&case.k, 6, 2 * (110 / 16), 3);
        let chunk: Vec<Vec<usize>> =
            codes.iter().map(|c| ranks(c).iter().map(|t| t / 16).collect()).collect();
        let meets = |i: usize, j: usize| {
            let near = |r: &usize| {
                let (a, b) = (chunk[*r][i], chunk[*r][j]);
                b + before >= a && b <= a + after && (across || codes[*r][i] == codes[*r][j])
            };
            if i == j { 0 } else { (0..3).filter(near).count() }
        };
        let options =
            options.clone().with("before", before).with("after", after).with("across_buckets", across);
        assert_equals(&case, &options, |i, j| meets(i, j).min(1), true);
        assert_equals(&case, &options.with("merge", "multiset"), meets, true);
    }
}

#[test]
fn separate_queries_and_keys_meet_in_balanced_chunks() {
    let p = Problem { d_v: 3, ..Problem::new(1, 1, 6).with_lens(90, 131) };
    let case = Case::gaussian(p, 2);
    let (a, b) = (codes(&case.q, 6, 2 * (131 / 16), 3), codes(&case.k, 6, 2 * (131 / 16), 3));
    let chunk = |codes: &[u32]| {
        let cut = Balanced::new(codes.len(), 131usize.div_ceil(16));
        ranks(codes).into_iter().map(|t| cut.block_of(t)).collect::<Vec<usize>>()
    };
    let (a, b): (Vec<_>, Vec<_>) = a.iter().zip(&b).map(|(a, b)| (chunk(a), chunk(b))).unzip();
    let meets = |i: usize, j: usize| (0..3).filter(|&r| b[r][j] == a[r][i] || b[r][j] + 1 == a[r][i]).count();
    let options = Options::new().with("rounds", 3).with("block", 16);
    assert_equals(&case, &options, |i, j| meets(i, j).min(1), false);
    assert_equals(&case, &options.with("merge", "multiset"), meets, false);
}

#[test]
fn wrapping_joins_the_rounds_to_a_ring() {
    let case = shared_case(Problem { d_v: 3, ..Problem::new(1, 96, 6) }, 3);
    let codes = codes(&case.k, 6, 2 * (96 / 16), 3);
    let chunk: Vec<Vec<usize>> = codes.iter().map(|c| ranks(c).iter().map(|t| t / 16).collect()).collect();
    let meets = |i: usize, j: usize| {
        let count = |r: usize| {
            let (own, last) = (chunk[r][i], (r + 2) % 3);
            let back = if own == 0 { chunk[last][j] == 5 } else { chunk[r][j] + 1 == own };
            usize::from(chunk[r][j] == own) + usize::from(back)
        };
        if i == j { 0 } else { (0..3).map(count).sum() }
    };
    let options =
        Options::new().with("keys", "shared").with("rounds", 3).with("block", 16).with("wrap", true);
    assert_equals(&case, &options, |i, j| meets(i, j).min(1), true);
    assert_equals(&case, &options.clone().with("merge", "multiset"), meets, true);
    // If every chunk sees everything, the ring changes nothing.
    let all = options.with("before", 6).with("after", 6);
    let (a, b) = (run_method(&METHOD, &all, &case), run_method(&METHOD, &all.with("wrap", false), &case));
    assert_rows_close(&a.0, &b.0, 1e-12, "ring");
}

#[test]
fn the_causal_form_sees_growing_lists_of_its_own_bucket() {
    let p = Problem { d_v: 3, ..Problem::new(1, 110, 6) };
    for (keys, window) in [("separate", 5usize), ("separate", 0), ("shared", 0), ("shared", 4)] {
        let shared = keys == "shared";
        let case = if shared { shared_case(p.causal(), 4) } else { Case::gaussian(p.causal(), 4) };
        let (block, buckets) = (4, 6);
        let (a, b) = (codes(&case.q, 6, buckets, 2), codes(&case.k, 6, buckets, 2));
        let own = usize::from(shared);
        let older = |i: usize| (i + 1).saturating_sub(window + own);
        let meets = |i: usize, j: usize| {
            if j >= older(i) {
                return usize::from(!shared || j != i);
            }
            let near = |r: &usize| {
                let mates: Vec<usize> = (0..older(i)).filter(|&l| b[*r][l] == a[*r][i]).collect();
                let first = (mates.len() / block).saturating_sub(1) * block;
                mates[first.min(mates.len())..].contains(&j)
            };
            (0..2).filter(near).count()
        };
        let options = Options::new().with("keys", keys).with("rounds", 2).with("block", block);
        let options = options.with("buckets", buckets).with("window", window);
        assert_equals(&case, &options, |i, j| meets(i, j).min(1), shared);
        assert_equals(&case, &options.with("merge", "multiset"), meets, shared);
    }
}

#[test]
fn a_chunk_for_all_is_full_shared_attention() {
    for problem in [Problem::new(1, 60, 5), Problem::new(1, 60, 5).causal()] {
        let case = shared_case(problem, 5);
        for (block, rounds) in [(60usize, 1usize), (1000, 4)] {
            let options = Options::new().with("keys", "shared").with("block", block).with("rounds", rounds);
            assert_equals(
                &case,
                &options.with("merge", "multiset").with("window", 0),
                |i, j| usize::from(i != j),
                true,
            );
        }
    }
}

#[test]
fn equal_tokens_average_the_two_last_chunks() {
    let (n, m) = (50, 8);
    let mut case = shared_case(Problem { d_v: 2, ..Problem::new(1, n, 4) }.causal(), 6);
    case.q = case.q[..4].repeat(n);
    case.k = case.q.clone();
    for rounds in [1usize, 3] {
        let options =
            Options::new().with("keys", "shared").with("rounds", rounds).with("block", m).with("window", 0);
        let (o, lse) = run_method(&METHOD, &options, &case);
        assert_eq!((&o[..2], lse[0]), (&case.v[..2], f64::NEG_INFINITY));
        for i in 1..n {
            let seen = (i / m).saturating_sub(1) * m..i;
            for c in 0..2 {
                let mean = seen.clone().map(|j| case.v[2 * j + c]).sum::<f64>() / seen.len() as f64;
                assert!((o[2 * i + c] - mean).abs() < 1e-13, "row {i}");
            }
        }
    }
}

#[test]
fn mass_grows_with_rounds_and_bounds_the_error() {
    for problem in [Problem::new(1, 300, 8), Problem::new(1, 300, 8).causal()] {
        let case = Case::gaussian(problem, 7);
        let (exact, exact_lse) = reference(&case);
        let spread = 2.0 * case.v.iter().fold(0.0f64, |a, v| a.max(v.abs()));
        let mut last = vec![f64::NEG_INFINITY; 300];
        for rounds in [1usize, 2, 4, 8] {
            let options = Options::new().with("rounds", rounds).with("block", 16);
            let (o, lse) = run_method(&METHOD, &options, &case);
            for i in 0..300 {
                assert!(lse[i] >= last[i] - 1e-12 && lse[i] <= exact_lse[i] + 1e-12);
                let lost = 1.0 - (lse[i] - exact_lse[i]).exp();
                assert!((0..8).all(|c| (o[i * 8 + c] - exact[i * 8 + c]).abs() <= lost * spread + 1e-12));
            }
            last = lse;
        }
    }
}

#[test]
fn clustered_tokens_give_the_reference_figures() {
    let mut errors = [0.0; 4];
    let seeds = 2;
    for seed in 0..seeds {
        let case = clustered(seed);
        let case = Case { k: case.q.clone(), ..case };
        let base = Options::new().with("keys", "shared").with("seed", seed);
        let (want, _) = run_method(&METHOD, &base.clone().with("block", 2048), &case);
        for (error, rounds) in errors.iter_mut().zip([1usize, 2, 4, 8]) {
            let (o, _) = run_method(&METHOD, &base.clone().with("rounds", rounds), &case);
            *error += crate::metrics::relative_frobenius(&o, &want) / seeds as f64;
        }
    }
    for (error, want) in errors.into_iter().zip([1.8, 1.1, 0.55, 0.24]) {
        assert_within(error, want, 0.15, &format!("{errors:?}"));
    }
}

#[test]
fn what_cannot_be_shared_is_refused() {
    let shared = Options::new().with("keys", "shared");
    let grouped = Problem::new(4, 100, 8).with_kv_heads(2);
    assert!(METHOD.plan(&grouped, &shared).is_err() && METHOD.plan(&grouped, &Options::new()).is_ok());
    let cross = Problem::new(1, 1, 8).with_lens(90, 100);
    assert!(METHOD.plan(&cross, &shared).is_err() && METHOD.plan(&cross.causal(), &shared).is_ok());
    assert!(METHOD.plan(&Problem::new(1, 100, 8).causal(), &Options::new().with("wrap", true)).is_err());
    assert!(METHOD.plan(&Problem::new(1, 100, 8), &shared.with("sinks", 2)).is_err());
}

#[test]
fn a_centred_hash_does_not_depend_on_the_means() {
    // A vector added to all keys changes no weight inside a row, and one added to all queries changes logits, not buckets.
    for p in [
        Problem { d_v: 3, ..Problem::new(2, 130, 6) },
        Problem { d_v: 3, ..Problem::new(2, 130, 6).causal() },
    ] {
        let case = Case::gaussian(p, 12);
        let mut moved = case.clone();
        moved
            .k
            .chunks_exact_mut(6)
            .for_each(|k| k.iter_mut().zip([4.0, -9.0, 2.0, 0.0, 7.0, 1.0]).for_each(|(k, c)| *k += c));
        let run = |case: &Case, centre: bool| {
            let options =
                Options::new().with("rounds", 2).with("block", 8).with("window", 4).with("centre", centre);
            run_method(&METHOD, &options, case).0
        };
        assert_rows_close(&run(&moved, true), &run(&case, true), 1e-9, "centred");
        let (a, b) = (run(&moved, false), run(&case, false));
        assert!(a.iter().zip(&b).any(|(a, b)| (a - b).abs() > 0.1), "the means matter to a plain hash");
    }
}
