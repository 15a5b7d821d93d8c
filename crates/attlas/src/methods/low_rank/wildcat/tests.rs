use super::compress::{Bin, Shared, largest_norm, rho, temperature};
use super::*;
use crate::engine::coreset::{Coreset, Values};
use crate::metrics::relative_frobenius;
use crate::testkit::adversarial::Adversary;
use crate::testkit::heads::Workload;
use crate::testkit::{
    Case, How, Ran, assert_rows_close, assert_same_bits, check_method, golden, reference, run_method,
    run_with,
};
use crate::{MatRef, Options, Out, TensorMut, TensorRef, Workspace};
use attlas_num::randla::cholesky_with_pivots;

#[test]
fn honours_the_contract() {
    check_method(&METHOD);
}

fn options(pairs: &[(&str, &str)]) -> Options {
    pairs.iter().fold(Options::new(), |o, (k, v)| o.with(k, *v))
}

fn run(pairs: &[(&str, &str)], case: &Case) -> Ran {
    let plan = METHOD.plan(&case.problem, &options(pairs)).unwrap();
    run_with(&*plan, case, How::default()).unwrap()
}

/// Rows of `d` numbers.
fn rows(x: &[f64], d: usize) -> MatRef<'_, f64> {
    MatRef::new(x, x.len() / d, d)
}

/// The keys and values of the only key head.
fn keys_of(case: &Case) -> (MatRef<'_, f64>, MatRef<'_, f64>) {
    let p = &case.problem;
    (MatRef::new(&case.k, p.n_k, p.d), MatRef::new(&case.v, p.n_k, p.d_v))
}

/// The bins that `METHOD` makes of a case with one key head, with other values.
fn bins_of(pairs: &[(&str, &str)], case: &Case, v: MatRef<'_, f64>) -> Vec<Bin<f64>> {
    let params = Params::from_options(&options(pairs)).unwrap();
    let compressor = Compressor { params };
    let (k, _) = keys_of(case);
    let mean = compressor.mean(k);
    let query_norm = largest_norm(rows(&case.q, case.problem.d));
    let shared = Shared { beta: case.problem.scale, mean: &mean, query_norm };
    let stream = GroupIndex { batch: 0, kv_head: 0 }.stream_key(compressor.params.seed);
    let size = compressor.size(k.rows());
    let ws = Workspace::single().unwrap();
    ws.install(|cx| compressor.bins(k, Values::Plain(v), size, shared, stream, cx))
}

/// $\sum_s e^{\beta q^\top k_s} [V_s \mid w_s]$ of every query.
fn sums(case: &Case, bins: &[Bin<f64>]) -> Vec<Vec<f64>> {
    let p = &case.problem;
    let mut sums = vec![];
    for q in case.q.chunks(p.d) {
        let mut sum = vec![];
        for bin in bins {
            for (key, row) in bin.coreset.keys().iter_rows().zip(bin.coreset.values().iter_rows()) {
                let e = (p.scale * q.iter().zip(key).map(|(a, b)| a * b).sum::<f64>()).exp();
                sum.resize(row.len() - 1, 0.0);
                sum.iter_mut().zip(row).for_each(|(s, v)| *s += e * v);
            }
        }
        sums.push(sum);
    }
    sums
}

fn quotients(case: &Case, bins: &[Bin<f64>]) -> Vec<f64> {
    let divide = |sum: Vec<f64>| {
        let (den, num) = sum.split_last().map(|(d, n)| (*d, n.to_vec())).unwrap();
        num.into_iter().map(move |x| x / den)
    };
    sums(case, bins).into_iter().flat_map(divide).collect()
}

/// Scores $e^{\beta q^\top k}$ and their approximation, row by row: with the identity as values, a coreset is its
/// weights.
fn scores(pairs: &[(&str, &str)], case: &Case) -> (Vec<Vec<f64>>, Vec<Vec<f64>>, Vec<Bin<f64>>) {
    let p = &case.problem;
    let identity = crate::Mat::identity(p.n_k);
    let bins = bins_of(pairs, case, identity.as_ref());
    let approximate = sums(case, &bins).into_iter().map(|mut row| {
        row.pop();
        row
    });
    let score = |q: &[f64], k: &[f64]| (p.scale * q.iter().zip(k).map(|(a, b)| a * b).sum::<f64>()).exp();
    let exact = case.q.chunks(p.d).map(|q| case.k.chunks(p.d).map(|k| score(q, k)).collect()).collect();
    (exact, approximate.collect(), bins)
}

fn value_ranges(case: &Case) -> Vec<f64> {
    let d_v = case.problem.d_v;
    let column = |c: usize| case.v.iter().skip(c).step_by(d_v).copied();
    (0..d_v).map(|c| column(c).fold(f64::MIN, f64::max) - column(c).fold(f64::MAX, f64::min)).collect()
}

/// Keys whose mean is zero.
fn centred(mut case: Case) -> Case {
    let (n, d) = (case.problem.n_k, case.problem.d);
    for c in 0..d {
        let mean = (0..n).map(|j| case.k[j * d + c]).sum::<f64>() / n as f64;
        (0..n).for_each(|j| case.k[j * d + c] -= mean);
    }
    case
}

#[test]
fn the_temperature_has_its_known_values() {
    assert!((rho() - 3.191_601_025_3).abs() < 5e-11);
    let tau = temperature(Temperature::Lambert, 0.5, 3.0, 2.0, 1024);
    assert!((tau - 1.814_401_769_8).abs() < 5e-11, "{tau}");
    let constant = |rq: f64, rk: f64| temperature(Temperature::Const, 0.125, rq, rk, 1);
    assert_eq!(constant(2.0, 2.0), 3.945_82f64.sqrt());
    assert_eq!(constant(8.0, 2.0), (3.945_82f64 / 4.0).sqrt());
    // The constant is below the Lambert value by 2.1 % and 10.6 % at these settings.
    for (product, n, less) in [(100.0, 32768, 0.021), (3.0, 1024, 0.106)] {
        let lambert = temperature(Temperature::Lambert, 1.0, product, 1.0, n);
        let gap = 1.0 - temperature(Temperature::Const, 1.0, product, 1.0, n) / lambert;
        assert!((gap - less).abs() < 6e-4, "{gap}");
    }
}

#[test]
fn given_pivots_give_the_golden_values() {
    let case = golden::inputs();
    let (k, v) = keys_of(&case);
    let params = Params { tau: Some(1.5), clip: false, ..Params::default() };
    let compressor = Compressor { params };
    let mean = compressor.mean(k);
    let shared = Shared { beta: 0.5, mean: &mean, query_norm: 1.0 };
    let ws = Workspace::single().unwrap();
    let bin = compressor.bin(k, Values::Plain(v), 3, shared, ws.context(), |kernel, _| {
        cholesky_with_pivots(kernel, &[0, 3, 5], ws.scratch())
    });
    let w: Vec<f64> = bin.coreset.values().iter_rows().map(|row| row[3]).collect();
    golden::assert_close(&w, &[1.309_406_085_1, 1.968_866_792_6, 2.266_824_948_6]);
    let o = quotients(&case, &[bin]);
    golden::assert_row(&o, 0, &[0.657_576_255_9, 0.489_867_207_2, 0.221_218_532_6]);
    golden::assert_fro(&o, 2.281_856_028_2);
}

#[test]
fn all_keys_as_pivots_reproduce_attention() {
    // A rank just below the number of keys and a twin of the last key force the path.
    let p = Problem { d_v: 5, ..Problem::new(1, 60, 8).with_lens(40, 60) };
    let mut case = Case::gaussian(p, 3);
    let twin = case.k[58 * 8..59 * 8].to_vec();
    case.k[59 * 8..].copy_from_slice(&twin);
    let ran = run(&[("rank", "59"), ("clip", "false")], &case);
    assert_eq!(ran.info.status, crate::Status::Complete);
    assert_eq!(ran.info.rank, Some(59));
    let (want, lse) = reference(&case);
    assert_rows_close(&ran.o, &want, 1e-12, "outputs");
    assert_rows_close(&ran.lse, &lse, 1e-12, "log-sum-exp");
}

#[test]
fn pivots_are_reproduced_and_every_score_keeps_its_certificate() {
    for (seed, pairs) in [
        &[("rank", "16")][..],
        &[("rank", "16"), ("temperature", "const")],
        &[("rank", "24"), ("bins", "3")],
        &[("rank", "9"), ("tau", "2.5"), ("pivoting", "block")],
    ]
    .into_iter()
    .enumerate()
    {
        let p = Problem { d_v: 3, ..Problem::new(1, 40, 6).with_lens(30, 40) };
        let mut case = centred(Case::gaussian(p, seed as u64));
        case.q.iter_mut().for_each(|x| *x *= 0.5);
        let (a, a_hat, bins) = scores(pairs, &case);
        let pivots: Vec<&[f64]> = bins.iter().flat_map(|b| b.coreset.keys().data().chunks(6)).collect();
        let (exact, _) = reference(&case);
        let ran = run(pairs, &case);
        let ranges = value_ranges(&case);
        let e = bins.iter().filter_map(|b| b.error).collect::<Vec<_>>();
        let largest = largest_norm(rows(&case.q, 6));
        let mut worst = 0.0f64;
        for (i, q) in case.q.chunks(6).enumerate() {
            let z: f64 = a[i].iter().sum();
            // Centred keys: the mean of exponentials is at least the exponential of the mean.
            assert!(z >= 40.0 * (1.0 - 1e-14));
            let gap: f64 = a[i].iter().zip(&a_hat[i]).map(|(a, b)| (a - b).abs()).sum();
            for (j, key) in case.k.chunks(6).enumerate() {
                if pivots.contains(&key) {
                    assert!((a[i][j] - a_hat[i][j]).abs() < 1e-10 * a[i][j], "pivot {j}, query {i}");
                }
            }
            let square: f64 = q.iter().map(|x| x * x).sum();
            let bound: f64 =
                e.iter().map(|e| (p.scale * e.tau * e.tau * square / 2.0 + e.log_sum).exp()).sum();
            assert!(gap <= bound * (1.0 + 1e-9), "scores of query {i}: {gap} over {bound}");
            for c in 0..3 {
                let error = (ran.o[i * 3 + c] - exact[i * 3 + c]).abs();
                assert!(error <= ranges[c] * (gap / z).min(1.0) + 1e-12, "row {i}: {error}");
                worst = worst.max(error / ranges[c]);
            }
        }
        let certified = ran.info.figures["certified_error"];
        let again: f64 = e
            .iter()
            .map(|e| (p.scale * e.tau * e.tau * largest * largest / 2.0 + e.log_sum).exp() / 40.0)
            .sum();
        assert!((certified - again.min(1.0)).abs() < 1e-12);
        assert!(worst <= certified);
        assert!(ran.info.figures["residual"] > 0.0 && ran.info.figures["tau"] > 0.0);
    }
}

#[test]
fn the_certificate_says_something_where_keys_are_simple() {
    // Small logits: the kernel is close to a polynomial of low degree.
    let p = Problem { scale: 0.05, ..Problem::new(1, 200, 2) };
    let case = Case::gaussian(p, 4);
    let ran = run(&[("rank", "30")], &case);
    let certified = ran.info.figures["certified_error"];
    let (want, _) = reference(&case);
    let ranges = value_ranges(&case);
    let worst = ran
        .o
        .iter()
        .zip(&want)
        .enumerate()
        .map(|(i, (a, b))| (a - b).abs() / ranges[i % 2])
        .fold(0.0, f64::max);
    assert!(certified < 1e-3 && worst <= certified, "{worst} within {certified}");
}

#[test]
fn a_certificate_covers_what_rounding_hides_of_the_residual() {
    // Keys over twelve decades on a line: after nine pivots no residual differs from zero in double precision, yet
    // outputs have errors of millionths.
    let p = Problem { scale: 1.0, ..Problem::new(1, 59, 1) };
    let case = Adversary::Scales.case(p, 433);
    let ran = run(&[("rank", "9")], &case);
    let (want, _) = reference(&case);
    let worst =
        ran.o.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max) / value_ranges(&case)[0];
    let certified = ran.info.figures["certified_error"];
    assert!(worst > 1e-7 && worst <= certified, "{worst} within {certified}");
}

#[test]
fn certificates_hold_without_centring() {
    let p = Problem { scale: 0.02, ..Problem::new(1, 150, 3) };
    let mut case = Case::gaussian(p, 8);
    case.k.iter_mut().for_each(|x| *x += 1.0);
    let ran = run(&[("rank", "40"), ("centre", "false")], &case);
    let (want, _) = reference(&case);
    let ranges = value_ranges(&case);
    let certified = ran.info.figures["certified_error"];
    assert!(certified < 0.5, "{certified}");
    for (i, (a, b)) in ran.o.iter().zip(&want).enumerate() {
        assert!((a - b).abs() <= certified * ranges[i % 3]);
    }
}

#[test]
fn shifted_keys_and_scaled_pairs_change_nothing() {
    let case = Case::gaussian(Problem::new(1, 120, 8), 5);
    let pairs = [("rank", "24")];
    let first = run(&pairs, &case);
    let mut shifted = case.clone();
    shifted.k.iter_mut().enumerate().for_each(|(i, x)| *x += [2.0, -1.0][i % 2]);
    let moved = run(&pairs, &shifted);
    assert_rows_close(&moved.o, &first.o, 1e-10, "shifted keys");
    let added = |q: &[f64]| {
        case.problem.scale * q.iter().enumerate().map(|(i, x)| x * [2.0, -1.0][i % 2]).sum::<f64>()
    };
    let want: Vec<f64> = first.lse.iter().zip(case.q.chunks(8)).map(|(l, q)| l + added(q)).collect();
    assert_rows_close(&moved.lse, &want, 1e-10, "shifted log-sum-exp");
    // A power of two, so that the same numbers are rounded.
    let mut scaled = case.clone();
    scaled.q.iter_mut().for_each(|x| *x *= 4.0);
    scaled.k.iter_mut().for_each(|x| *x /= 4.0);
    assert_rows_close(&run(&pairs, &scaled).o, &first.o, 1e-10, "queries up, keys down");
    // A negative factor is equivalent to negated queries.
    let mut flipped = case.clone();
    flipped.q.iter_mut().for_each(|x| *x = -*x);
    flipped.problem.scale = -case.problem.scale;
    assert_rows_close(&run(&pairs, &flipped).o, &first.o, 1e-12, "both signs turned");
}

#[test]
fn constant_values_and_equal_keys_are_averaged() {
    let case = Case::gaussian(Problem::new(1, 90, 8), 6);
    let constant = Case { v: vec![1.5; case.v.len()], ..case.clone() };
    for clip in ["true", "false"] {
        let ran = run(&[("rank", "20"), ("clip", clip)], &constant);
        assert_rows_close(&ran.o, &vec![1.5; ran.o.len()], 1e-9, "constant values");
    }
    let mut equal = case.clone();
    equal.k = case.k[..8].repeat(90);
    let mut mean = [0.0; 8];
    case.v.iter().enumerate().for_each(|(i, v)| mean[i % 8] += v / 90.0);
    let zero_scale = case.with_problem(Problem { scale: 0.0, ..case.problem });
    for case in [equal, zero_scale] {
        for case in [case.clone(), case.cast_f32()] {
            let ran = run(&[("rank", "20")], &case);
            assert_eq!(ran.info.rank, Some(1));
            let tolerance = if case.single { 1e-6 } else { 1e-12 };
            assert_rows_close(&ran.o, &mean.repeat(90), tolerance, "equal keys");
        }
    }
}

#[test]
fn single_precision_follows_double_with_the_same_pivots() {
    for rank in [64, 384] {
        let case = Case::gaussian(Problem::new(1, 512, 64), 7).cast_f32();
        let params = Params { rank, ..Params::default() };
        let compressor = Compressor { params };
        let (k, v) = keys_of(&case);
        let mean = compressor.mean(k);
        let query_norm = largest_norm(rows(&case.q, 64));
        let shared = Shared { beta: case.problem.scale, mean: &mean, query_norm };
        let ws = Workspace::single().unwrap();
        let options = compressor.params.pivots(rank);
        let mut pivots = vec![];
        let double = compressor.bin(k, Values::Plain(v), rank, shared, ws.context(), |kernel, h| {
            let f = attlas_num::randla::rp_cholesky(
                kernel,
                Some(h),
                options,
                attlas_num::rng::StreamKey::new(1),
                ws.scratch(),
            )?;
            pivots = f.pivots.clone();
            Ok(f)
        });
        let narrow = |x: &[f64]| x.iter().map(|&x| x as f32).collect::<Vec<f32>>();
        let (k32, v32) = (narrow(&case.k), narrow(&case.v));
        let (k32, v32) = (MatRef::new(&k32, 512, 64), MatRef::new(&v32, 512, 64));
        let single = compressor.bin(k32, Values::Plain(v32), rank, shared, ws.context(), |kernel, _| {
            cholesky_with_pivots(kernel, &pivots, ws.scratch())
        });
        let wide = |c: &Coreset<f32>| {
            let mut wide = Coreset::<f64>::empty(64, 64);
            for (k, v) in c.keys().iter_rows().zip(c.values().iter_rows()) {
                let widen = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
                let row = widen(v);
                wide.push(&widen(k), &row[..64], row[64]);
            }
            wide
        };
        let single = Bin { coreset: wide(&single.coreset), error: None };
        let (a, b) = (quotients(&case, &[single]), quotients(&case, &[double]));
        let gap = a.iter().zip(&b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(gap <= 2e-6, "rank {rank}: {gap:e}");
    }
}

#[test]
fn errors_are_the_specified_ones() {
    let want = [
        (Workload::Iid, [0.73, 0.57, 0.47]),
        (Workload::Smooth, [0.48, 0.23, 0.15]),
        (Workload::Clustered, [0.29, 0.25, 0.22]),
        (Workload::Decaying, [0.82, 0.54, 0.36]),
    ];
    for (workload, errors) in want {
        let ranks = ["64", "256", "512"].map(|rank| [("rank", rank)]);
        let got = errors_on(workload, &ranks.each_ref().map(|r| &r[..]));
        for ((rank, want), draws) in ["64", "256", "512"].iter().zip(errors).zip(got) {
            let n = draws.len() as f64;
            let mean = draws.iter().sum::<f64>() / n;
            let deviation = (draws.iter().map(|e| (e - mean) * (e - mean)).sum::<f64>() / (n - 1.0)).sqrt();
            // 64 pivots hit all of 32 clusters only by luck: this figure is one draw from a wide distribution.
            let lucky = workload == Workload::Clustered && *rank == "64";
            let allowed = if lucky { 3.0 * deviation } else { 0.15 * want };
            assert!(
                (mean - want).abs() <= allowed,
                "{workload:?}, rank {rank}: {draws:.3?}, expected {want}"
            );
        }
    }
}

/// Relative errors on 2048 tokens of width 64, for each setting on three streams.
fn errors_on(workload: Workload, settings: &[&[(&str, &str)]]) -> Vec<Vec<f64>> {
    let mut errors = vec![vec![]; settings.len()];
    for seed in 1..=3 {
        let case = workload.case(2048, 64, seed);
        let exact = crate::registry::method("exact").unwrap();
        let want = run_method(exact, &Options::new(), &case).0;
        for (e, pairs) in errors.iter_mut().zip(settings) {
            e.push(relative_frobenius(&run(pairs, &case).o, &want));
        }
    }
    errors
}

#[test]
fn bins_cost_accuracy_and_stay_close() {
    let settings: [&[(&str, &str)]; 2] = [&[("rank", "256")], &[("rank", "256"), ("bins", "4")]];
    for (one, four) in errors_on(Workload::Smooth, &settings[..1])[0]
        .iter()
        .zip(&errors_on(Workload::Smooth, &settings[1..])[0])
    {
        assert!(*four < 1.5 * one && *four < 0.4, "{one} and {four}");
    }
    // One key per bin is the sequence cut to every second key with weights.
    let case = Case::gaussian(Problem::new(1, 61, 8), 2);
    let ran = run(&[("rank", "30"), ("bins", "30")], &case);
    // Thirty bins of two keys, and one key left over, kept uncompressed.
    assert_eq!(ran.info.rank, Some(31));
    // Ten bins of one key, and the other nine keys together.
    let case = Case::gaussian(Problem::new(1, 19, 8), 2);
    let bins = bins_of(&[("rank", "10"), ("bins", "10")], &case, MatRef::new(&case.v, 19, 8));
    assert_eq!(bins.len(), 11);
    assert_eq!(bins[10].coreset.len(), 1);
}

#[test]
fn cancelled_denominators_are_answered() {
    // Distant queries see one pivot alone, and some pivots have negative weight.
    let mut case = Case::gaussian(Problem::new(1, 80, 2), 0);
    case.q.iter_mut().for_each(|x| *x *= 30.0);
    let (want, lse) = reference(&case);
    let exact = run(&[("rank", "12"), ("tau", "2")], &case);
    let zero = run(&[("rank", "12"), ("tau", "2"), ("fallback", "zero_clip")], &case);
    assert!(exact.info.fallback_rows > 0 && exact.info.fallback_rows == zero.info.fallback_rows);
    let mut seen = 0;
    for i in 0..80 {
        let row = i * 2..(i + 1) * 2;
        if zero.lse[i] == f64::NEG_INFINITY {
            seen += 1;
            assert_rows_close(&exact.o[row.clone()], &want[row.clone()], 1e-12, "exact row");
            assert!((exact.lse[i] - lse[i]).abs() < 1e-10);
            assert!(zero.o[row].iter().all(|&x| x == 0.0), "zero lies within the values here");
        } else {
            assert_same_bits(&exact.o[row.clone()], &zero.o[row], "other rows");
        }
    }
    assert_eq!(seen, zero.info.fallback_rows);
}

#[test]
fn outputs_stay_in_the_range_of_the_values() {
    for seed in 0..4 {
        let case = Case::gaussian(Problem::new(2, 100, 4).with_kv_heads(1), seed);
        for pairs in [&[("rank", "5")][..], &[("rank", "5"), ("fallback", "zero_clip")]] {
            let ran = run(pairs, &case);
            for c in 0..4 {
                let column = |x: &[f64]| {
                    let x = x.iter().skip(c).step_by(4).copied();
                    (x.clone().fold(f64::MAX, f64::min), x.fold(f64::MIN, f64::max))
                };
                let ((low, high), (least, most)) = (column(&case.v), column(&ran.o));
                assert!(low <= least && most <= high);
            }
        }
    }
}

#[test]
fn wide_spreads_raise_the_temperature_and_stay_finite() {
    for single in [false, true] {
        let mut case = Case::gaussian(Problem::new(1, 100, 8), 3);
        case.key_rows(0).step_by(3).for_each(|row| row.iter_mut().for_each(|x| *x *= 40.0));
        let case = if single { case.cast_f32() } else { case };
        let ran = run(&[("rank", "20"), ("tau", "0.5")], &case);
        assert!(ran.o.iter().all(|x| x.is_finite()) && ran.lse.iter().all(|x| x.is_finite()));
        // The largest keys have norm about 40·√8 = 113, so h would spread over thousands.
        let norm = largest_norm(rows(&case.k, 8));
        let limit = if single { 60.0 } else { 600.0 };
        let least = (case.problem.scale * norm * norm / (2.0 * limit)).sqrt();
        let tau = ran.info.figures["tau"];
        assert!(tau > 0.9 * least && tau < 1.3 * least, "{tau} for {least}");
    }
}

#[test]
fn heads_share_one_coreset_where_the_queries_do_not_matter() {
    let p = Problem::new(3, 97, 8).with_kv_heads(1);
    let case = Case::gaussian(p, 8);
    let pairs = [("rank", "20"), ("query_norm", "4")];
    let all = run(&pairs, &case);
    for h in 0..3 {
        let one = Case {
            problem: Problem::new(1, 97, 8),
            q: case.q[h * 97 * 8..(h + 1) * 97 * 8].to_vec(),
            ..case.clone()
        };
        let ran = run(&pairs, &one);
        assert_same_bits(&all.o[h * 97 * 8..(h + 1) * 97 * 8], &ran.o, "head alone");
    }
}

#[test]
fn causal_rows_in_the_first_block_are_exact_and_later_ones_close() {
    let p = Problem::new(2, 300, 16).with_kv_heads(1).causal();
    let mut case = Case::gaussian(p, 1);
    case.q.iter_mut().for_each(|x| *x *= 0.5);
    let (want, lse) = reference(&case);
    for pairs in [
        &[("block", "50"), ("rank", "25")][..],
        &[("block", "50"), ("rank", "25"), ("tree", "true")],
        &[("block", "64"), ("rank", "32"), ("bins", "2")],
    ] {
        let ran = run(pairs, &case);
        for h in 0..2 {
            let first = h * 300 * 16..(h * 300 + 50) * 16;
            assert_rows_close(&ran.o[first.clone()], &want[first], 1e-13, "first block");
        }
        let error = relative_frobenius(&ran.o, &want);
        assert!(error < 0.5, "{pairs:?}: {error}");
        let squares: f64 = ran.lse.iter().zip(&lse).map(|(a, b)| (a - b) * (a - b)).sum();
        let gap = (squares / lse.len() as f64).sqrt();
        assert!(gap < 0.15, "{pairs:?}: {gap}");
        assert!(ran.info.keys_visited < p.visible_pairs());
    }
    let verbatim = run(&[("block", "50"), ("rank", "50")], &case);
    assert_rows_close(&verbatim.o, &want, 1e-12, "blocks kept as they are");
    assert_rows_close(&verbatim.lse, &lse, 1e-12, "blocks kept as they are");
}

#[test]
fn a_tree_visits_fewer_keys() {
    let case = Case::gaussian(Problem::new(1, 512, 8).causal(), 2);
    let flat = run(&[("block", "16"), ("rank", "8")], &case);
    let tree = run(&[("block", "16"), ("rank", "8"), ("tree", "true")], &case);
    assert!(tree.info.keys_visited * 2 < flat.info.keys_visited);
    let (want, _) = reference(&case);
    assert!(relative_frobenius(&flat.o, &want) < relative_frobenius(&tree.o, &want));
    assert!(relative_frobenius(&tree.o, &want) < 0.9);
}

/// Outputs of a stream after every token from `prompt` on, and the bytes it holds at the end.
fn streamed(pairs: &[(&str, &str)], case: &Case, prompt: usize) -> (Vec<Vec<f64>>, usize) {
    let p = case.problem;
    let plan = METHOD.plan(&p, &options(pairs)).unwrap();
    let mut stream = plan.stream(crate::DType::F64).unwrap();
    let mut ws = Workspace::single().unwrap();
    let q = TensorRef::bhnd(&case.q, [1, p.n_heads, p.n_q, p.d]).unwrap();
    let k = TensorRef::bhnd(&case.k, [1, p.n_kv_heads, p.n_k, p.d]).unwrap();
    let v = TensorRef::bhnd(&case.v, [1, p.n_kv_heads, p.n_k, p.d_v]).unwrap();
    let mut rows = vec![];
    let mut done = 0;
    while done < p.n_q {
        let next = if done == 0 { prompt } else { done + 1 };
        stream.push(k.rows(done..next).into(), v.rows(done..next).into(), &mut ws).unwrap();
        let mut o = vec![f64::NAN; p.n_heads * p.d_v];
        let out = Out::new(TensorMut::bhnd(&mut o, [1, p.n_heads, 1, p.d_v]).unwrap());
        stream.attend(q.rows(next - 1..next).into(), &mut out.into(), &mut ws).unwrap();
        rows.push(o);
        done = next;
    }
    (rows, stream.state_bytes())
}

#[test]
fn a_stream_of_blocks_gives_the_rows_of_the_causal_plan() {
    for tree in ["false", "true"] {
        for (block, prompt) in [("16", 1), ("16", 33), ("7", 60), ("32", 32)] {
            let pairs = [("block", block), ("rank", "5"), ("tree", tree)];
            let p = Problem { d_v: 6, ..Problem::new(4, 97, 8).with_kv_heads(2).causal() };
            let case = Case::gaussian(p, 12);
            let want = run(&pairs, &case);
            assert_eq!(want.info.fallback_rows, 0, "rows without fallback are compared");
            let (rows, bytes) = streamed(&pairs, &case, prompt);
            for (t, row) in rows.iter().enumerate() {
                for h in 0..4 {
                    let at = (h * 97 + prompt - 1 + t) * 6;
                    assert_rows_close(&row[h * 6..(h + 1) * 6], &want.o[at..at + 6], 1e-10, "row");
                }
            }
            assert!(bytes < 2 * 97 * 14 * 8, "{bytes} bytes for all keys are {}", 2 * 97 * 14 * 8);
        }
    }
}

#[test]
fn a_compressed_prefix_keeps_sinks_and_window_and_grows_by_whole_tokens() {
    let prefix = Prefix { sinks: 32, window: 32, ratio: 0.25, bin_rank: 12 };
    // 1000 tokens: 936 in between, 234 to keep, 19 bins of 49; the remaining 5 join the window.
    let (middle, size) = prefix.split(1000).unwrap();
    assert_eq!((middle, size.bins, size.rank), (32..32 + 19 * 49, 19, 19 * 12));
    assert!(prefix.split(100).is_none() && prefix.split(10).is_none());

    let case = Workload::Smooth.case(400, 16, 3);
    let case = case.with_problem(case.problem.causal());
    let (want, _) = reference(&case);
    let pairs = [("cache", "prefix"), ("sinks", "8"), ("window", "8")];
    let (rows, bytes) = streamed(&pairs, &case, 380);
    let got: Vec<f64> = rows.concat();
    let error = relative_frobenius(&got, &want[379 * 16..]);
    assert!(error < 0.25, "{error}");
    // 364 tokens in between, 91 to keep, 7 bins of 52 keep 12 each; 16 + 20 tokens uncompressed.
    let kept = 8 * (16 + 18) + 7 * 12 * (16 + 18) + (8 + 20) * 32;
    assert_eq!(bytes, kept * 8);
    // With everything kept the stream is exact.
    let (rows, _) = streamed(&[("cache", "prefix"), ("ratio", "0")], &case, 380);
    assert_rows_close(&rows.concat(), &want[379 * 16..], 1e-12, "nothing compressed");
}

#[test]
fn the_defaults_degrade_to_exact_on_short_sequences() {
    let case = Case::gaussian(Problem::new(1, 128, 8), 1);
    let ran = run(&[], &case);
    assert_eq!(ran.info.status, crate::Status::Exact);
    let exact = crate::registry::method("exact").unwrap();
    assert_same_bits(&ran.o, &run_method(exact, &Options::new(), &case).0, "exact");
}
