use super::*;
use crate::Mat;
use crate::linalg::testing::*;
use crate::linalg::{matmul, matmul_nt, matmul_tn, symmetric_eigen};
use std::sync::LazyLock;

static SCRATCH: LazyLock<Scratch> = LazyLock::new(Scratch::poisoned);

const VARIANTS: [Variant; 3] = [Variant::Simple, Variant::Accelerated, Variant::Block];

fn gram(n: usize, rank: usize, seed: u64) -> Mat<f64> {
    let g = gaussian(n, rank, seed);
    matmul_nt(g.as_ref(), g.as_ref())
}

fn with(variant: Variant, rank: usize) -> Options {
    Options { variant: Some(variant), block: Some(6), ..Options::rank(rank) }
}

fn run(a: &Mat<f64>, options: Options, seed: u64) -> PartialCholesky<'static, f64> {
    rp_cholesky(&a.as_ref(), None, options, StreamKey::new(seed), &SCRATCH).unwrap()
}

/// Forms $G^\top G$.
fn approximation(f: &PartialCholesky<'_, f64>) -> Mat<f64> {
    let factor = f.factor();
    matmul_tn(factor.as_ref(), factor.as_ref())
}

/// Computes $W X$ for the interpolation weights $W$ of `f`.
fn apply_weights(f: &PartialCholesky<'_, f64>, x: &Mat<f64>) -> Mat<f64> {
    f.apply_weights_with(x.cols(), &SCRATCH, |j, out| out.copy_from_slice(x.row(j)))
}

fn trace(a: &Mat<f64>) -> f64 {
    (0..a.rows()).map(|i| a[(i, i)]).sum()
}

/// Returns a kernel matrix with a quickly falling spectrum.
fn smooth_kernel(n: usize, seed: u64) -> Mat<f64> {
    let x = gaussian(n, 2, seed);
    let kernel = GaussianKernel::new(x.as_ref());
    let mut k = Mat::zeros(n, n);
    kernel.rows_into(&(0..n).collect::<Vec<_>>(), 0..n, k.data_mut(), &SCRATCH);
    k
}

#[test]
fn a_matrix_of_low_rank_is_exhausted_by_its_rank() {
    for variant in VARIANTS {
        for (n, rank) in [(1, 1), (20, 1), (50, 7), (90, 30)] {
            let a = gram(n, rank, 3);
            let f = run(&a, with(variant, rank), 1);
            assert!(f.relative_residual <= 1e-10, "{variant:?} {n} {rank}");
            assert!(distance(&approximation(&f), &a) <= 1e-10 * a.frobenius());
            // A request for more pivots than there are directions stops early, without noise pivots.
            let more = run(&a, with(variant, n), 1);
            assert_eq!(more.rank(), rank, "{variant:?}");
        }
    }
}

#[test]
fn full_rank_reproduces_the_matrix() {
    for variant in VARIANTS {
        let a = gram(40, 60, 5);
        let f = run(&a, with(variant, 40), 2);
        assert_eq!(f.rank(), 40);
        assert!(distance(&approximation(&f), &a) <= 1e-12 * a.frobenius(), "{variant:?}");
        let mut all = f.pivots.clone();
        all.sort_unstable();
        assert_eq!(all, (0..40).collect::<Vec<_>>());
    }
}

#[test]
fn rows_of_pivots_are_reproduced_and_the_residual_is_semidefinite() {
    for variant in VARIANTS {
        for a in [smooth_kernel(60, 1), gram(60, 80, 2)] {
            let f = run(&a, with(variant, 15), 4);
            let approximation = approximation(&f);
            for &s in &f.pivots {
                for j in 0..60 {
                    assert!((approximation[(s, j)] - a[(s, j)]).abs() < 1e-12 * a[(s, s)].max(1.0));
                }
                assert_eq!(f.residual[s], 0.0);
            }
            let gap = Mat::from_fn(60, 60, |i, j| a[(i, j)] - approximation[(i, j)]);
            assert!(*symmetric_eigen(gap.as_ref()).unwrap().values.last().unwrap() > -1e-11);
            for (j, p) in f.residual.iter().enumerate() {
                assert!(*p >= 0.0 && (p - gap[(j, j)]).abs() < 1e-11);
            }
            let want = f.residual.iter().sum::<f64>() / trace(&a);
            assert!((f.relative_residual - want).abs() < 1e-14);
        }
    }
}

#[test]
fn residuals_never_rise_as_pivots_are_added() {
    let a = smooth_kernel(50, 3);
    let mut before = vec![1.0; 50];
    for rank in 1..12 {
        let f = run(&a, with(Variant::Simple, rank), 9);
        assert!(f.residual.iter().zip(&before).all(|(now, was)| now <= was && *now >= 0.0));
        before = f.residual;
    }
}

#[test]
fn the_factor_is_triangular_on_its_pivots_and_weights_interpolate() {
    for variant in VARIANTS {
        let a = smooth_kernel(40, 8);
        let f = run(&a, with(variant, 12), 1);
        let factor = f.factor();
        for (t, row) in (0..f.rank()).map(|t| (t, factor.row(t))) {
            assert!(f.pivots[..t].iter().all(|&s| row[s] == 0.0));
        }
        let l = f.lower();
        let least = (0..12).map(|t| l[(t, t)] * l[(t, t)]).fold(f64::INFINITY, f64::min);
        assert!(least > 0.0 && f.least_pivot() == least);
        let sub = Mat::from_fn(12, 12, |i, j| a[(f.pivots[i], f.pivots[j])]);
        assert!(distance(&matmul_nt(l.as_ref(), l.as_ref()), &sub) < 1e-12);
        let weights = apply_weights(&f, &Mat::identity(40));
        let columns = Mat::from_fn(40, 12, |i, j| a[(i, f.pivots[j])]);
        let rebuilt = matmul(columns.as_ref(), weights.as_ref());
        assert!(distance(&rebuilt, &approximation(&f)) < 1e-8, "{variant:?}");
        let x = gaussian(40, 3, 2);
        let direct = matmul(weights.as_ref(), x.as_ref());
        let applied = apply_weights(&f, &x);
        assert!(distance(&applied, &direct) <= 1e-9 * weights.frobenius());
    }
}

/// Computes Pearson's statistic of observed counts.
fn chi_square(counts: &[usize], probabilities: &[f64]) -> f64 {
    let total = counts.iter().sum::<usize>() as f64;
    counts
        .iter()
        .zip(probabilities)
        .filter(|(_, p)| **p > 0.0)
        .map(|(&c, &p)| (c as f64 - total * p).powi(2) / (total * p))
        .sum()
}

fn fixed() -> Mat<f64> {
    Mat::from_vec(
        vec![4.0, 1.0, 0.5, 0.0, 1.0, 3.0, 1.5, 0.4, 0.5, 1.5, 2.0, -0.3, 0.0, 0.4, -0.3, 1.0],
        4,
        4,
    )
}

/// Returns the probabilities of the ordered pairs of first pivots, row by row.
fn pair_probabilities(a: &Mat<f64>, power: f64) -> Vec<f64> {
    let n = a.rows();
    let total: f64 = (0..n).map(|i| a[(i, i)].powf(power)).sum();
    let mut p = vec![0.0; n * n];
    for s in 0..n {
        let left = |j: usize| {
            if j == s { 0.0 } else { (a[(j, j)] - a[(s, j)] * a[(s, j)] / a[(s, s)]).powf(power) }
        };
        let rest: f64 = (0..n).map(left).sum();
        for t in 0..n {
            p[s * n + t] = a[(s, s)].powf(power) / total * left(t) / rest;
        }
    }
    p
}

fn pair_counts(a: &Mat<f64>, log_scale: Option<&[f64]>, options: Options, runs: u64) -> Vec<usize> {
    let n = a.rows();
    let mut counts = vec![0; n * n];
    for seed in 0..runs {
        let f = rp_cholesky(&a.as_ref(), log_scale, options, StreamKey::new(seed), &SCRATCH).unwrap();
        counts[f.pivots[0] * n + f.pivots[1]] += 1;
    }
    counts
}

/// 99.9 % quantile of chi-square with 3 and with 11 degrees of freedom.
const CHI3: f64 = 16.27;
const CHI11: f64 = 31.26;

#[test]
fn first_pivots_follow_the_diagonal() {
    let a = fixed();
    for variant in VARIANTS {
        let mut counts = [0; 4];
        for seed in 0..20_000 {
            counts[run(&a, with(variant, 1), seed).pivots[0]] += 1;
        }
        let statistic = chi_square(&counts, &[0.4, 0.3, 0.2, 0.1]);
        assert!(statistic < CHI3, "{variant:?}: {statistic}");
    }
}

#[test]
fn pairs_of_pivots_follow_the_residual_in_simple_and_accelerated() {
    let a = fixed();
    let diagonal = Mat::from_fn(4, 4, |i, j| if i == j { (i + 1) as f64 } else { 0.0 });
    for variant in [Variant::Simple, Variant::Accelerated] {
        for power in [1.0, 2.0] {
            for (name, a) in [("fixed", &a), ("diagonal", &diagonal)] {
                let options = Options { power, ..with(variant, 2) };
                let counts = pair_counts(a, None, options, 20_000);
                let statistic = chi_square(&counts, &pair_probabilities(a, power));
                assert!(statistic < CHI11, "{variant:?}, power {power}, {name}: {statistic}");
            }
        }
    }
    // The block variant draws its second pivot from the first diagonal; the test must detect it.
    let counts = pair_counts(&a, None, with(Variant::Block, 2), 20_000);
    assert!(chi_square(&counts, &pair_probabilities(&a, 1.0)) > CHI11);
}

#[test]
fn log_scales_give_the_pivots_of_the_scaled_matrix() {
    let k0 = Mat::from_fn(4, 4, |i, j| (-0.3 * (i as f64 - j as f64).powi(2)).exp());
    let log_scale = [0.3f64, -0.2, 0.5, 0.1];
    let scaled = Mat::from_fn(4, 4, |i, j| k0[(i, j)] * (log_scale[i] + log_scale[j]).exp());
    for variant in [Variant::Simple, Variant::Accelerated] {
        let counts = pair_counts(&k0, Some(&log_scale), with(variant, 2), 20_000);
        let statistic = chi_square(&counts, &pair_probabilities(&scaled, 1.0));
        assert!(statistic < CHI11, "{variant:?}: {statistic}");
    }
    // Of scales beyond the range of numbers, only the differences matter.
    let huge: Vec<f64> = log_scale.iter().map(|x| x + 5000.0).collect();
    let run = |scale: &[f64]| {
        rp_cholesky(&k0.as_ref(), Some(scale), with(Variant::Simple, 3), StreamKey::new(5), &SCRATCH).unwrap()
    };
    let (f, g) = (run(&huge), run(&log_scale));
    assert_eq!(f.pivots, g.pivots);
    assert!((f.relative_residual - g.relative_residual).abs() < 1e-12);
    let want: f64 = (0..4).map(|j| f.residual[j] * (2.0 * log_scale[j]).exp()).sum();
    assert!((g.relative_residual - want / trace(&scaled)).abs() < 1e-13);
}

#[test]
fn the_trace_error_keeps_its_bound_in_expectation() {
    let a = smooth_kernel(80, 6);
    let spectrum = symmetric_eigen(a.as_ref()).unwrap().values;
    let (r, eps) = (4usize, 0.5f64);
    let best: f64 = spectrum[r..].iter().sum();
    let eta = best / trace(&a);
    let k = (r as f64 / eps + r as f64 * (1.0 / (eps * eta)).ln()).ceil() as usize;
    assert!(k < 40, "the bound says something: {k}");
    for variant in [Variant::Simple, Variant::Accelerated] {
        let errors: Vec<f64> =
            (0..60).map(|seed| run(&a, with(variant, k), seed).relative_residual * trace(&a)).collect();
        let mean = errors.iter().sum::<f64>() / 60.0;
        assert!(mean <= (1.0 + eps) * best, "{variant:?}: {mean} over {best}");
        // The approximation cannot beat the best one of its rank.
        assert!(mean >= spectrum[k..].iter().sum::<f64>());
    }
}

#[test]
fn accelerated_and_simple_are_equally_accurate() {
    let a = smooth_kernel(120, 2);
    let errors = |variant| -> (f64, f64) {
        let e: Vec<f64> =
            (0..80).map(|seed| run(&a, with(variant, 10), seed).relative_residual.ln()).collect();
        let mean = e.iter().sum::<f64>() / 80.0;
        (mean, e.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / 79.0 / 80.0)
    };
    let ((simple, v1), (accelerated, v2)) = (errors(Variant::Simple), errors(Variant::Accelerated));
    assert!((simple - accelerated).abs() < 4.0 * (v1 + v2).sqrt(), "{simple} and {accelerated}");
}

#[test]
fn the_tolerance_stops_early_and_not_too_early() {
    let a = smooth_kernel(100, 4);
    for variant in VARIANTS {
        let mut last = 0;
        for tol in [0.5, 1e-2, 1e-6] {
            let f = run(&a, Options { stop_tol: Some(tol), ..with(variant, 100) }, 3);
            assert!(f.relative_residual <= tol && f.rank() > last && f.rank() < 100, "{variant:?}");
            last = f.rank();
            if variant == Variant::Simple {
                let shorter = run(&a, with(variant, last - 1), 3);
                assert!(shorter.relative_residual > tol);
            }
        }
    }
}

#[test]
fn greedy_takes_the_largest_residual() {
    let a = fixed();
    let options = Options { power: f64::INFINITY, ..Options::rank(4) };
    let f = run(&a, options, 1);
    // After pivot 0 the residuals are 2.75 at 1, 1.9375 at 2, 1 at 3; after pivot 1 they are 1.25… and 0.94….
    assert_eq!(f.pivots, [0, 1, 2, 3]);
    assert_eq!(run(&a, options, 2).pivots, f.pivots);
}

#[test]
fn given_pivots_reproduce_the_golden_values() {
    // Specification, golden values: six keys in four dimensions, centred, tau = 1.5, beta = 1/2.
    let raw = Mat::from_fn(6, 4, |i, j| (0.5 * (i * (j + 1)) as f64 + 0.3 * j as f64).cos());
    let mean: Vec<f64> = (0..4).map(|j| (0..6).map(|i| raw[(i, j)]).sum::<f64>() / 6.0).collect();
    let x = Mat::from_fn(6, 4, |i, j| (raw[(i, j)] - mean[j]) * 0.5f64.sqrt() / 1.5);
    let kernel = GaussianKernel::new(x.as_ref());
    let f = cholesky_with_pivots(&kernel, &[0, 3, 5], &SCRATCH).unwrap();
    for (j, want) in [(1, 0.497_185_503_7), (2, 0.353_311_863_8), (4, 0.414_827_684_3)] {
        assert!((f.residual[j] - want).abs() < 1e-10, "{j}: {}", f.residual[j]);
    }
    let h = kernel.half_norms();
    let scaled = Mat::from_fn(6, 1, |i, _| h[i].exp());
    let w = apply_weights(&f, &scaled);
    for (t, want) in [1.309_406_085_1, 1.968_866_792_6, 2.266_824_948_6].iter().enumerate() {
        assert!((w[(t, 0)] * (-h[f.pivots[t]]).exp() - want).abs() < 1e-9);
    }
    assert!(matches!(
        cholesky_with_pivots(&kernel, &[2, 2], &SCRATCH),
        Err(LinalgError::NotPositiveDefinite { pivot: 2 })
    ));
    assert!(cholesky_with_pivots(&kernel, &[6], &SCRATCH).is_err());
}

#[test]
fn the_gaussian_kernel_is_the_same_by_rows_and_by_blocks() {
    let x = gaussian(9, 3, 4);
    let kernel = GaussianKernel::new(x.as_ref());
    let index = [4, 0, 4, 7];
    let (mut rows, mut sub) = (vec![f64::NAN; 36], vec![f64::NAN; 16]);
    kernel.rows_into(&index, 0..9, &mut rows, &SCRATCH);
    kernel.sub_into(&index, &mut sub);
    for (a, &i) in index.iter().enumerate() {
        for (b, &j) in index.iter().enumerate() {
            let d2: f64 = (0..3).map(|l| (x[(i, l)] - x[(j, l)]).powi(2)).sum();
            assert!((sub[4 * a + b] - (-0.5 * d2).exp()).abs() < 1e-14);
            assert!((rows[9 * a + j] - sub[4 * a + b]).abs() < 1e-14);
        }
        assert_eq!(rows[9 * a + i], 1.0);
    }
}

#[test]
fn near_duplicates_in_single_precision_give_no_noise_pivots() {
    let points = gaussian(8, 3, 1);
    let noise = gaussian(64, 3, 2);
    let x = Mat::from_fn(64, 3, |i, j| (points[(i % 8, j)] + 1e-6 * noise[(i, j)]) as f32);
    let kernel = GaussianKernel::new(x.as_ref());
    for variant in VARIANTS {
        let f = rp_cholesky(&kernel, None, with(variant, 64), StreamKey::new(3), &SCRATCH).unwrap();
        assert!((8..=20).contains(&f.rank()), "{variant:?}: {}", f.rank());
        assert!(f.factor().data().iter().all(|g| g.abs() < 1.01));
    }
}

#[test]
fn results_repeat_and_depend_on_the_seed() {
    let a = smooth_kernel(70, 5);
    let options = Options::rank(64);
    let f = run(&a, options, 1);
    assert_eq!(
        (f.pivots.clone(), f.factor().clone()),
        (run(&a, options, 1).pivots, run(&a, options, 1).factor())
    );
    assert_ne!(f.pivots, run(&a, options, 2).pivots);
}

#[test]
fn degenerate_matrices_are_factored_or_refused() {
    for variant in VARIANTS {
        for n in [0, 1, 5] {
            let f = run(&Mat::zeros(n, n), with(variant, 3), 1);
            assert!(f.rank() == 0 && f.relative_residual == 0.0 && f.factor().cols() == n);
            assert_eq!(apply_weights(&f, &Mat::zeros(n, 2)).rows(), 0);
        }
        let one = run(&Mat::from_vec(vec![9.0], 1, 1), with(variant, 3), 1);
        assert_eq!((one.factor().data(), &one.pivots[..]), (&[3.0][..], &[0][..]));
        let equal = run(&Mat::from_fn(7, 7, |_, _| 2.0), with(variant, 7), 1);
        assert!(equal.rank() == 1 && equal.relative_residual == 0.0);
        assert_eq!(run(&fixed(), with(variant, 0), 1).rank(), 0);

        let go = |a: &Mat<f64>| rp_cholesky(&a.as_ref(), None, with(variant, 4), StreamKey::new(1), &SCRATCH);
        assert!(matches!(
            go(&spoiled(5)),
            Err(LinalgError::NotFinite { .. } | LinalgError::NotPositiveDefinite { .. })
        ));
        let mut off = fixed();
        (0..4)
            .flat_map(|i| (0..4).map(move |j| (i, j)))
            .filter(|(i, j)| i != j)
            .for_each(|at| off[at] = f64::NAN);
        assert!(matches!(go(&off), Err(LinalgError::NotFinite { .. })));
        let mut negative = fixed();
        negative[(2, 2)] = -1.0;
        assert_eq!(go(&negative).unwrap_err(), LinalgError::NotPositiveDefinite { pivot: 2 });
        // Indefinite with a positive diagonal: an answer, bounded and finite.
        let indefinite = Mat::from_fn(6, 6, |i, j| if i == j { 1.0 } else { 5.0 });
        assert!(go(&indefinite).unwrap().factor().data().iter().all(|x| x.is_finite()));
    }
    let a = fixed();
    let with_scale =
        |s: &[f64]| rp_cholesky(&a.as_ref(), Some(s), Options::rank(2), StreamKey::new(1), &SCRATCH);
    assert!(with_scale(&[0.0; 3]).is_err() && with_scale(&[f64::NAN; 4]).is_err());
    // Vanishing scales exclude their rows; all vanishing is the zero matrix.
    let none = f64::NEG_INFINITY;
    assert_eq!(with_scale(&[none, 0.0, none, none]).unwrap().pivots, [1]);
    assert_eq!(with_scale(&[none; 4]).unwrap().rank(), 0);
    let power = Options { power: 0.0, ..Options::rank(2) };
    assert!(rp_cholesky(&a.as_ref(), None, power, StreamKey::new(1), &SCRATCH).is_err());
}
