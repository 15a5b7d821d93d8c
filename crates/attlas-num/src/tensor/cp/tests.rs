//! Tests of the polyadic decomposition.

use super::super::golden::{assert_close, floats, golden, mat, sizes};
use super::super::known::fill;
use super::super::outer;
use super::*;
use crate::linalg::matmul_tn;

fn sum(parts: &[Tensor<f64>]) -> Tensor<f64> {
    Tensor::from_flat_fn(parts[0].shape(), |k| parts.iter().map(|p| p.data()[k]).sum()).unwrap()
}

/// `e1⊗e1⊗e2 + e1⊗e2⊗e1 + e2⊗e1⊗e1`: rank 3, border rank 2.
fn w_tensor() -> Tensor<f64> {
    let (e1, e2) = ([1.0, 0.0], [0.0, 1.0]);
    let term = |a: &[f64], b: &[f64], c: &[f64]| outer(&[a, b, c]).unwrap();
    sum(&[term(&e1, &e1, &e2), term(&e1, &e2, &e1), term(&e2, &e1, &e1)])
}

fn exact_rank(shape: &[usize], rank: usize, seed: u64) -> Tensor<f64> {
    let factors = shape.iter().enumerate().map(|(m, &n)| mat(n, rank, seed + m as u64)).collect();
    Cp { weights: vec![1.0; rank], factors }.reconstruct().unwrap()
}

fn relative_residual(t: &Tensor<f64>, cp: &Cp<f64>) -> f64 {
    let model = cp.reconstruct().unwrap();
    let squared: f64 = t.data().iter().zip(model.data()).map(|(x, y)| (x - y).powi(2)).sum();
    squared.sqrt() / t.norm()
}

#[test]
fn sweeps_from_a_given_start_agree_with_tensorly() {
    for case in golden("polyadic")["cases"].as_array().unwrap() {
        let (shape, rank) = (sizes(&case["shape"]), case["rank"].as_u64().unwrap() as usize);
        let t = fill(&shape, case["seed"].as_u64().unwrap()).unwrap();
        let factors = shape.iter().enumerate().map(|(m, &n)| mat(n, rank, 100 + m as u64)).collect();
        let start = Cp { weights: vec![1.0; rank], factors };
        let options = Options { init: Init::Given(start), iters: 12, tol: Some(0.0), ..Default::default() };
        let fit = decompose(&t, rank, &options).unwrap();
        // The smallest ridge, 1e-12 relative to Γ, moves each solution by that times the condition of Γ,
        // up to 1e3 here.
        assert_close(&fit.history, &floats(&case["errors"]), 1e-9);
        assert_close(&fit.cp.reconstruct().unwrap().data()[..6], &floats(&case["model_head"]), 1e-8);
        assert_eq!(fit.status, Status::MaxIters);
    }
}

#[test]
fn the_best_of_many_starts_is_the_optimum_tensorly_finds() {
    let t = fill(&[4, 5, 6], 50).unwrap();
    let options = Options { restarts: 30, iters: 3000, tol: Some(1e-13), ..Default::default() };
    let fit = decompose(&t, 2, &options).unwrap();
    let best = golden("polyadic")["best_of_30"].as_f64().unwrap();
    // The error is flat at an optimum: 1e-13 per sweep at linear convergence leaves far less than 1e-9.
    assert!((fit.rel_error - best).abs() < 1e-9, "{} against {best}", fit.rel_error);
}

#[test]
fn an_exact_tensor_is_recovered() {
    let t = exact_rank(&[4, 5, 6], 2, 90);
    let fit = decompose(&t, 2, &Options::default()).unwrap();
    assert!(fit.rel_error < 1e-7, "{}", fit.rel_error);
    assert_eq!(fit.status, Status::Converged);
    assert!((fit.rel_error - relative_residual(&t, &fit.cp)).abs() < 1e-14);
    assert_eq!(fit.cp.parameters(), 2 * 16);
}

#[test]
fn terms_are_in_canonical_form() {
    let t = fill(&[4, 5, 6], 50).unwrap();
    let cp = decompose(&t, 3, &Options::default()).unwrap().cp;
    assert!(cp.weights.windows(2).all(|w| w[0] >= w[1]) && cp.weights[2] >= 0.0);
    for (m, f) in cp.factors.iter().enumerate() {
        for r in 0..3 {
            let column: Vec<f64> = (0..f.rows()).map(|i| f[(i, r)]).collect();
            let norm: f64 = column.iter().map(|x| x * x).sum();
            assert!((norm - 1.0).abs() < 8.0 * f64::EPSILON);
            let largest = column.iter().copied().max_by(|a, b| a.abs().total_cmp(&b.abs())).unwrap();
            assert!(m == 2 || largest > 0.0);
        }
    }
}

#[test]
fn the_w_tensor_has_the_published_best_single_term() {
    let fit = decompose(&w_tensor(), 1, &Options { tol: Some(1e-14), ..Default::default() }).unwrap();
    assert!((fit.rel_error - 5f64.sqrt() / 3.0).abs() < 1e-10, "{}", fit.rel_error);
    assert!((fit.cp.weights[0] - 2.0 / 3f64.sqrt()).abs() < 1e-6);
}

#[test]
fn two_terms_of_the_w_tensor_degenerate_at_the_published_rate() {
    let t = w_tensor();
    for (iters, error) in [(100, 0.0203), (500, 0.0091), (1000, 0.0065), (5000, 0.0029)] {
        let fit = decompose(&t, 2, &Options { iters, tol: Some(0.0), ..Default::default() }).unwrap();
        // The start shifts the sweep count, and with it the error by a few per cent.
        assert!((fit.rel_error / error - 1.0).abs() < 0.1, "{iters}: {}", fit.rel_error);
    }
    let fit = decompose(&t, 2, &Options::default()).unwrap();
    assert_eq!(fit.status, Status::Degenerate);
    let found = fit.degeneracy.unwrap();
    assert!((found.cosine + 0.909).abs() < 0.01 && (found.weight - 2.35).abs() < 0.1, "{found:?}");
    assert!(found.to_string().contains("ridge = 1e-4"));
    let later = decompose(&t, 2, &Options { iters: 5000, ..Default::default() }).unwrap();
    let later = later.degeneracy.unwrap();
    assert!(later.cosine < found.cosine && later.weight > found.weight);
}

#[test]
fn a_ridge_keeps_the_w_tensor_from_degenerating() {
    let options = Options { ridge: 1e-4, iters: 5000, ..Default::default() };
    let fit = decompose(&w_tensor(), 2, &options).unwrap();
    assert_ne!(fit.status, Status::Degenerate, "{:?}", fit.degeneracy);
    assert!(fit.rel_error < 0.1, "{}", fit.rel_error);
}

#[test]
fn three_terms_of_the_w_tensor_are_exact() {
    let options = Options { restarts: 5, iters: 5000, tol: Some(1e-12), ..Default::default() };
    let fit = decompose(&w_tensor(), 3, &options).unwrap();
    assert!(fit.rel_error < 1e-7, "{} {:?}", fit.rel_error, fit.status);
}

#[test]
fn an_unperturbed_start_would_stop_at_a_saddle_of_the_w_tensor() {
    let unit = Mat::<f64>::identity(2);
    let start = Cp { weights: vec![1.0; 2], factors: vec![unit.clone(), unit.clone(), unit] };
    let fit = decompose(&w_tensor(), 2, &Options { init: Init::Given(start), ..Default::default() }).unwrap();
    assert!((fit.rel_error - (2f64 / 3.0).sqrt()).abs() < 1e-10, "{}", fit.rel_error);
    let fit = decompose(&w_tensor(), 2, &Options::default()).unwrap();
    assert!(fit.rel_error < 0.01);
}

#[test]
fn the_error_never_rises_between_sweeps() {
    for (shape, rank, seed) in
        [(&[4, 5, 6][..], 3, 50), (&[3, 3, 3], 5, 58), (&[2, 3, 4, 2], 3, 59), (&[6, 7], 3, 60)]
    {
        for init in [Init::Hosvd, Init::Random] {
            let options = Options { init, tol: Some(0.0), iters: 300, ..Default::default() };
            let fit = decompose(&fill(shape, seed).unwrap(), rank, &options).unwrap();
            for pair in fit.history.windows(2) {
                // Compares squared errors, because the sweep computes and rounds those.
                let rise = pair[1].powi(2) - pair[0].powi(2);
                assert!(rise <= 10.0 * f64::EPSILON, "{shape:?}: {pair:?} {rise:e}");
            }
        }
    }
}

#[test]
fn permuting_modes_permutes_factors() {
    let t = fill(&[4, 5, 6], 50).unwrap();
    // Shapes [i, j, k] and [k, i, j].
    let permuted = |t: &Tensor<f64>, shape: [usize; 3], from: [usize; 3]| {
        Tensor::from_flat_fn(&shape, |e| {
            let at = [e / (shape[1] * shape[2]), e / shape[2] % shape[1], e % shape[2]];
            t.get(&from.map(|m| at[m])).unwrap()
        })
        .unwrap()
    };
    let p = permuted(&t, [6, 4, 5], [1, 2, 0]);
    let options = Options { iters: 5000, tol: Some(1e-14), restarts: 10, ..Default::default() };
    let (a, b) = (decompose(&t, 2, &options).unwrap(), decompose(&p, 2, &options).unwrap());
    assert!((a.rel_error - b.rel_error).abs() < 1e-10);
    assert_close(&a.cp.weights, &b.cp.weights, 1e-5);
    let back = permuted(&b.cp.reconstruct().unwrap(), [4, 5, 6], [2, 0, 1]);
    // The terms are known to the root of the error's accuracy.
    assert_close(back.data(), a.cp.reconstruct().unwrap().data(), 1e-5);
}

#[test]
fn more_terms_than_the_rank_of_the_tensor_do_not_fail() {
    let ones = Tensor::from_flat_fn(&[2, 3, 4], |_| 1.0).unwrap();
    for init in [Init::Hosvd, Init::Random] {
        let fit = decompose(&ones, 2, &Options { init, ..Default::default() }).unwrap();
        assert!(fit.rel_error < 1e-7, "{}", fit.rel_error);
        assert!(fit.cp.factors.iter().flat_map(|f| f.data()).all(|x| x.is_finite()));
    }
    let fit = decompose(&exact_rank(&[3, 4, 5], 2, 91), 6, &Options::default()).unwrap();
    assert!(fit.rel_error < 1e-6, "{}", fit.rel_error);
}

#[test]
fn two_equal_matrices_in_a_stack_need_the_rank_of_one() {
    let m = crate::linalg::matmul(mat(6, 2, 92).as_ref(), mat(2, 5, 93).as_ref());
    let t = Tensor::stack(&[m.clone(), m]).unwrap();
    let fit = decompose(&t, 2, &Options::default()).unwrap();
    assert!(fit.rel_error < 1e-7, "{}", fit.rel_error);
}

#[test]
fn extrapolation_never_raises_the_error_and_shortens_a_swamp() {
    // Nearly collinear columns make plain sweeps slow.
    let base = mat(8, 3, 94);
    let squeeze = |m: &Mat<f64>| Mat::from_fn(8, 3, |i, r| m[(i, 0)] + 0.2 * m[(i, r)]);
    let factors = vec![squeeze(&base), squeeze(&mat(8, 3, 95)), squeeze(&mat(8, 3, 96))];
    let t = Cp { weights: vec![1.0; 3], factors }.reconstruct().unwrap();
    let run = |line_search| {
        let options = Options { line_search, iters: 200, tol: Some(0.0), ..Default::default() };
        decompose(&t, 3, &options).unwrap()
    };
    let (plain, fast) = (run(false), run(true));
    assert!(fast.history.windows(2).all(|w| w[1].powi(2) - w[0].powi(2) <= 10.0 * f64::EPSILON));
    let caught_up = fast.history.iter().position(|&e| e <= plain.rel_error);
    assert!(caught_up.is_some_and(|sweep| sweep < 150), "{caught_up:?} {}", plain.rel_error);
}

/// The stack of `w[h] · u[h]ᵀ`, never formed.
struct Stack {
    w: Vec<Mat<f64>>,
    u: Vec<Mat<f64>>,
    wide: bool,
}

impl Target for Stack {
    fn shape(&self) -> Vec<usize> {
        vec![self.w.len(), self.w[0].rows(), self.u[0].rows()]
    }

    fn norm_squared(&self) -> f64 {
        let trace = |(w, u): (&Mat<f64>, &Mat<f64>)| {
            let (a, b) = (matmul_tn(w.as_ref(), w.as_ref()), matmul_tn(u.as_ref(), u.as_ref()));
            a.data().iter().zip(b.data()).map(|(x, y)| x * y).sum::<f64>()
        };
        self.w.iter().zip(&self.u).map(trace).sum()
    }

    fn mttkrp(&mut self, f: &[Mat<f64>], mode: usize) -> Mat<f64> {
        let rank = f[0].cols();
        let mut out = Mat::zeros(self.shape()[mode], rank + usize::from(self.wide));
        for (h, (w, u)) in self.w.iter().zip(&self.u).enumerate() {
            let (p, q) = (matmul_tn(w.as_ref(), f[1].as_ref()), matmul_tn(u.as_ref(), f[2].as_ref()));
            for r in 0..rank {
                let (left, right) = if mode == 1 { (w, &q) } else { (u, &p) };
                for k in 0..w.cols() {
                    match mode {
                        0 => out[(h, r)] += p[(k, r)] * q[(k, r)],
                        _ => {
                            for i in 0..left.rows() {
                                out[(i, r)] += left[(i, k)] * right[(k, r)] * f[0][(h, r)];
                            }
                        }
                    }
                }
            }
        }
        out
    }
}

#[test]
fn a_tensor_that_is_never_formed_gives_the_same_sweeps() {
    let w: Vec<Mat<f64>> = (0..3).map(|h| mat(6, 2, 110 + h)).collect();
    let u: Vec<Mat<f64>> = (0..3).map(|h| mat(5, 2, 120 + h)).collect();
    let slices: Vec<Mat<f64>> =
        w.iter().zip(&u).map(|(w, u)| crate::linalg::matmul_nt(w.as_ref(), u.as_ref())).collect();
    let dense = Tensor::stack(&slices).unwrap();
    let options = Options { init: Init::Random, iters: 20, tol: Some(0.0), ..Default::default() };
    let mut stack = Stack { w, u, wide: false };
    let (a, b) = (decompose(&dense, 4, &options), decompose_target(&mut stack, 4, &options));
    // Rounding differs between the two products and grows a little with every sweep.
    assert_close(&a.unwrap().history, &b.unwrap().history, 1e-9);
    stack.wide = true;
    assert!(matches!(decompose_target(&mut stack, 4, &options), Err(Error::Shape { .. })));
}

#[test]
fn degenerate_inputs_get_an_answer() {
    for shape in [&[3, 4, 5][..], &[2, 0, 3], &[1, 1, 1], &[4]] {
        let fit = decompose(&Tensor::<f64>::zeros(shape).unwrap(), 1, &Options::default()).unwrap();
        assert_eq!((fit.rel_error, fit.cp.weights.as_slice()), (0.0, &[0.0][..]));
        assert_eq!(fit.cp.shape(), shape);
        for f in fit.cp.factors.iter().filter(|f| f.rows() > 0) {
            assert_eq!(f.frobenius(), 1.0);
        }
    }
    for shape in [&[1][..], &[5], &[1, 4], &[1, 1, 3], &[2, 1, 3, 1, 2], &[2; 8]] {
        let t = fill(shape, 97).unwrap();
        let fit = decompose(&t, 1, &Options::default()).unwrap();
        assert!(fit.rel_error.is_finite());
        assert!((fit.rel_error - relative_residual(&t, &fit.cp)).abs() < 1e-9, "{shape:?}");
    }
}

#[test]
fn bad_requests_are_errors() {
    let t = fill(&[3, 4, 5], 1).unwrap();
    let options = Options::default();
    assert!(matches!(decompose(&t, 0, &options), Err(Error::InvalidParam { name: "rank", .. })));
    assert!(matches!(decompose(&t, 13, &options), Err(Error::InvalidParam { name: "rank", .. })));
    assert!(decompose(&t, 2, &Options { iters: 0, ..options.clone() }).is_err());
    assert!(decompose(&t, 2, &Options { restarts: 0, ..options.clone() }).is_err());
    assert!(decompose(&t, 2, &Options { tol: Some(f64::NAN), ..options.clone() }).is_err());
    assert!(decompose(&t, 2, &Options { ridge: -1.0, ..options.clone() }).is_err());
    let start = Cp { weights: vec![1.0], factors: vec![mat(3, 1, 1), mat(4, 1, 1)] };
    assert!(decompose(&t, 1, &Options { init: Init::Given(start), ..options.clone() }).is_err());
    let mut bad = t.clone();
    bad.data_mut()[7] = f64::NAN;
    assert!(matches!(decompose(&bad, 2, &options), Err(Error::NotFinite { .. })));
    bad.data_mut()[7] = f64::INFINITY;
    assert!(matches!(decompose(&bad, 2, &options), Err(Error::NotFinite { .. })));
}

#[test]
fn the_scale_of_the_entries_does_not_matter() {
    let t = exact_rank(&[3, 4, 5], 2, 98);
    let reference = decompose(&t, 2, &Options::default()).unwrap();
    for exponent in [-1000, -500, 0, 500, 1000] {
        let scale = libm::ldexp(1.0, exponent);
        let scaled = Tensor::from_flat_fn(t.shape(), |k| t.data()[k] * scale).unwrap();
        let fit = decompose(&scaled, 2, &Options::default()).unwrap();
        assert!(fit.rel_error < 1e-7);
        // The power of two divided out may differ, and with it the rounding of the ridge.
        let ratio = fit.cp.weights[0] / scale / reference.cp.weights[0];
        assert!((ratio - 1.0).abs() < 1e-6, "{exponent}: {ratio}");
    }
}

#[test]
fn single_precision_data_is_decomposed_in_double_precision() {
    let t = exact_rank(&[4, 5, 6], 2, 90).cast::<f32>();
    let fit = decompose(&t, 2, &Options { tol: Some(1e-9), ..Default::default() }).unwrap();
    // The rest is the rounding of the data and of the smallest ridge, both near 1e-7.
    assert!(fit.rel_error < 1e-5, "{}", fit.rel_error);
}

#[test]
fn the_same_seed_gives_the_same_bits_and_another_one_does_not() {
    let t = fill(&[4, 5, 6], 50).unwrap();
    let run = |seed| decompose(&t, 3, &Options { seed, iters: 5, ..Default::default() }).unwrap().cp;
    assert_eq!(run(1), run(1));
    assert_ne!(run(1), run(2));
}
