//! The canonical polyadic decomposition (CP, PARAFAC) by alternating least squares.
//!
//! $T \approx \sum_r \lambda_r\, a_r \otimes b_r \otimes c_r$, unit columns. Fixing all factors but one
//! leaves a linear least-squares problem with the small matrix $\Gamma = \bigodot_{m \ne n} A_m^\top A_m$:
//! $A_n \Gamma = Y_n$, where $Y_n$ is the [matricised product](super::mttkrp()). Cycling over the modes never
//! raises the error (Kolda and Bader 2009, section 3.4).
//!
//! A best approximation of rank $R \ge 2$ need not exist: two terms may grow without bound while they cancel
//! (de Silva and Lim 2008). [`Fit::degeneracy`] says when that seems to happen.
//!
//! **Cost.** A sweep takes about $4 R \prod I + N(R^2 \sum I + R^3/3)$ flops for order $N$, and memory for
//! the tensor, the factors and one contraction of $R \prod I / I_N$ numbers: a short mode is best put first.

use super::mttkrp::{SweepCache, mttkrp};
use super::small::{Op, column_sign, eigh, gemm, leading_columns, matmul_tn, solve_gram};
use super::{Error, Result, Tensor, hadamard};
use crate::rng::StreamKey;
use crate::{DType, Mat, Real};

/// A sum of outer products: `Σ_r weights[r] · factors[0][:, r] ⊗ factors[1][:, r] ⊗ …`.
#[derive(Clone, Debug, PartialEq)]
pub struct Cp<T> {
    /// One weight per term.
    pub weights: Vec<T>,
    /// One matrix per mode, `I_n × R`.
    pub factors: Vec<Mat<T>>,
}

impl<T: Real> Cp<T> {
    /// Number of terms.
    pub fn rank(&self) -> usize {
        self.weights.len()
    }

    /// Shape of the tensor that the terms add up to.
    pub fn shape(&self) -> Vec<usize> {
        self.factors.iter().map(Mat::rows).collect()
    }

    /// Numbers stored: `R (1 + Σ I_n)`.
    pub fn parameters(&self) -> usize {
        self.rank() * (1 + self.factors.iter().map(Mat::rows).sum::<usize>())
    }

    /// The dense tensor.
    pub fn reconstruct(&self) -> Result<Tensor<T>> {
        self.check()?;
        let mut out = Tensor::zeros(&self.shape())?;
        let cp = self.cast::<f64>();
        let slice_len = slice_shape(&cp.factors).0 * slice_shape(&cp.factors).1;
        for_each_slice(&cp.weights, &cp.factors, |k, slice| {
            let to = &mut out.data_mut()[k * slice_len..(k + 1) * slice_len];
            to.iter_mut().zip(slice).for_each(|(x, &y)| *x = T::from_f64(y));
        });
        Ok(out)
    }

    /// The same tensor with weights 1: each column is multiplied by the order-th root of its weight, so
    /// that all factors have entries of similar size. Negative weights go to the last mode.
    #[must_use]
    pub fn absorb_weights(&self) -> Self {
        let order = self.factors.len();
        let scaled = |m: usize, f: &Mat<T>| {
            Mat::from_fn(f.rows(), f.cols(), |i, r| {
                let w = self.weights[r].to_f64();
                let root = libm::pow(w.abs(), 1.0 / order as f64);
                let sign = if m + 1 == order && w < 0.0 { -1.0 } else { 1.0 };
                T::from_f64(f[(i, r)].to_f64() * root * sign)
            })
        };
        Self {
            weights: vec![T::ONE; self.rank()],
            factors: self.factors.iter().enumerate().map(|(m, f)| scaled(m, f)).collect(),
        }
    }

    /// Every number converted to the other element type.
    pub fn cast<U: Real>(&self) -> Cp<U> {
        Cp {
            weights: self.weights.iter().map(|w| U::from_f64(w.to_f64())).collect(),
            factors: self.factors.iter().map(Mat::cast).collect(),
        }
    }

    fn check(&self) -> Result<()> {
        match self.factors.iter().find(|f| f.cols() != self.rank()) {
            Some(odd) => Err(Error::shape("columns of a factor", self.rank(), odd.cols())),
            None => Ok(()),
        }
    }
}

/// Where the iteration starts.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Init {
    /// Leading left singular vectors of every unfolding, missing columns standard normal, and 0.01 times a
    /// standard normal added everywhere: the singular vectors alone can be an exact saddle point.
    #[default]
    Hosvd,
    /// Standard normal entries. (Uniform ones in `[0, 1)` would be nearly collinear.)
    Random,
    /// These factors. Their weights and the factor of mode 0 do not matter: the first update solves for them.
    Given(Cp<f64>),
}

/// How to iterate.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// The first start.
    pub init: Init,
    /// Number of starts, at least 1; those after the first are random, and the smallest final error wins.
    pub restarts: usize,
    /// Most sweeps per start, at least 1.
    pub iters: usize,
    /// Stop when the relative error changes by less in a sweep. `None`: 1e-8 for f64 data, 1e-5 for f32.
    pub tol: Option<f64>,
    /// Tikhonov weight on every factor, relative to the mean of the diagonal of Γ.
    pub ridge: f64,
    /// Try to extrapolate from the last two sweeps (Bro 1998).
    pub line_search: bool,
    /// Seed of the random parts.
    pub seed: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            init: Init::Hosvd,
            restarts: 1,
            iters: 500,
            tol: None,
            ridge: 0.0,
            line_search: false,
            seed: 0,
        }
    }
}

impl Options {
    fn validate(&self) -> Result<()> {
        if self.restarts == 0 {
            return Err(Error::param("restarts", 0, "at least 1"));
        }
        if self.iters == 0 {
            return Err(Error::param("iters", 0, "at least 1"));
        }
        for (name, value) in [("tol", self.tol.unwrap_or(0.0)), ("ridge", self.ridge)] {
            if !(value >= 0.0 && value.is_finite()) {
                return Err(Error::param(name, value, "a finite number, at least 0"));
            }
        }
        Ok(())
    }
}

/// How the iteration ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Status {
    /// The error stopped changing, or vanished.
    Converged,
    /// The sweeps were used up.
    MaxIters,
    /// Two terms grow and cancel; see [`Fit::degeneracy`].
    Degenerate,
}

/// Two terms that nearly cancel and are each much larger than the tensor: probably no best approximation of
/// this rank exists.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Degeneracy {
    /// The two terms.
    pub pair: (usize, usize),
    /// Cosine of the angle between them; near −1.
    pub cosine: f64,
    /// Geometric mean of their weights, relative to the norm of the tensor.
    pub weight: f64,
}

impl std::fmt::Display for Degeneracy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "terms {} and {} cancel (cosine {:.3}) at {:.2} times the norm of the tensor: a best approximation \
             of this rank probably does not exist; lower the rank or set ridge = 1e-4",
            self.pair.0, self.pair.1, self.cosine, self.weight
        )
    }
}

/// A decomposition and how it was reached.
#[derive(Clone, Debug)]
pub struct Fit<T> {
    /// Weights at least 0, largest first; unit columns whose largest entry is positive in every mode but the
    /// last. A term of weight 0 may have zero columns.
    pub cp: Cp<T>,
    /// `‖T − T̂‖ / ‖T‖`, of the terms in f64; 0 for a zero tensor.
    pub rel_error: f64,
    /// Relative error after each sweep of the winning start.
    pub history: Vec<f64>,
    /// How the winning start ended.
    pub status: Status,
    /// The worst cancelling pair, where there is one.
    pub degeneracy: Option<Degeneracy>,
    /// Terms that vanished during the iteration.
    pub zero_terms: Vec<usize>,
    /// Which start won, from 0.
    pub start: usize,
}

/// What a tensor must offer to be decomposed without being formed.
///
/// A dense tensor is one implementation. Another is a tensor known through factors, such as a stack of
/// products $W_h U_h^\top$, where all of this is cheap and the dense form is not.
pub trait Target {
    /// Dimensions.
    fn shape(&self) -> Vec<usize>;

    /// `‖T‖²`.
    fn norm_squared(&self) -> f64;

    /// `T₍ₙ₎` times the Khatri–Rao product of the other factors, `I_n × R`.
    fn mttkrp(&mut self, factors: &[Mat<f64>], mode: usize) -> Mat<f64>;

    /// The same inside a sweep, which asks for modes 0, 1, … in turn and changes only the factor just asked
    /// for: an implementation may keep contractions from one call to the next.
    fn mttkrp_in_sweep(&mut self, factors: &[Mat<f64>], mode: usize) -> Mat<f64> {
        self.mttkrp(factors, mode)
    }

    /// `‖T − T̂‖²` entry by entry, where that is possible; used when cancellation hides small errors.
    fn residual_squared(&mut self, _weights: &[f64], _factors: &[Mat<f64>]) -> Option<f64> {
        None
    }

    /// The Gram matrix `T₍ₙ₎ T₍ₙ₎ᵀ`, needed by [`Init::Hosvd`] only; without it that start is random.
    fn gram(&mut self, _mode: usize) -> Option<Mat<f64>> {
        None
    }

    /// Precision of the data, which sets the default tolerance and the smallest ridge.
    fn dtype(&self) -> DType {
        DType::F64
    }
}

struct Dense<'a> {
    t: &'a Tensor<f64>,
    cache: SweepCache,
    dtype: DType,
}

impl Target for Dense<'_> {
    fn shape(&self) -> Vec<usize> {
        self.t.shape().to_vec()
    }

    fn norm_squared(&self) -> f64 {
        self.t.data().iter().map(|x| x * x).sum()
    }

    fn mttkrp(&mut self, factors: &[Mat<f64>], mode: usize) -> Mat<f64> {
        mttkrp(self.t, factors, mode).expect("the driver keeps one factor per mode")
    }

    fn mttkrp_in_sweep(&mut self, factors: &[Mat<f64>], mode: usize) -> Mat<f64> {
        self.cache.next(self.t, factors, mode)
    }

    fn residual_squared(&mut self, weights: &[f64], factors: &[Mat<f64>]) -> Option<f64> {
        let mut sum = 0.0;
        for_each_slice(weights, factors, |k, slice| {
            let exact = &self.t.data()[k * slice.len()..(k + 1) * slice.len()];
            sum += exact.iter().zip(slice).map(|(x, y)| (x - y) * (x - y)).sum::<f64>();
        });
        Some(sum)
    }

    fn gram(&mut self, mode: usize) -> Option<Mat<f64>> {
        Some(super::small::mode_gram(self.t, mode))
    }

    fn dtype(&self) -> DType {
        self.dtype
    }
}

/// Rows and columns of the slices over the last two modes.
fn slice_shape(factors: &[Mat<f64>]) -> (usize, usize) {
    let order = factors.len();
    (if order > 1 { factors[order - 2].rows() } else { 1 }, factors[order - 1].rows())
}

/// Visits the slices over the last two modes of a sum of terms, in row-major order of the leading indices.
fn for_each_slice(weights: &[f64], factors: &[Mat<f64>], mut visit: impl FnMut(usize, &[f64])) {
    let (order, rank) = (factors.len(), weights.len());
    let (rows, cols) = slice_shape(factors);
    let leading = &factors[..order.saturating_sub(2)];
    let count: usize = leading.iter().map(Mat::rows).product();
    let mut slice = vec![0.0; rows * cols];
    let mut left = Mat::zeros(rows, rank);
    for k in 0..count {
        let mut w = weights.to_vec();
        let mut rest = k;
        for f in leading.iter().rev() {
            w.iter_mut().zip(f.row(rest % f.rows())).for_each(|(w, a)| *w *= a);
            rest /= f.rows();
        }
        for i in 0..rows {
            for (r, x) in left.row_mut(i).iter_mut().enumerate() {
                *x = if order > 1 { w[r] * factors[order - 2][(i, r)] } else { w[r] };
            }
        }
        let last = &factors[order - 1];
        gemm(&mut slice, Op::n(left.data(), rows, rank), Op::t(last.data(), cols, rank), false);
        visit(k, &slice);
    }
}

/// Decomposes `t` into `rank` terms.
///
/// `rank` is at least 1 and at most the smallest `Π_{m≠n} I_m`, which always suffices for an exact answer.
/// A zero (or empty) tensor gives weights 0, unit columns and error 0.
pub fn decompose<T: Real>(t: &Tensor<T>, rank: usize, options: &Options) -> Result<Fit<T>> {
    options.validate()?;
    let (working, scale) = t.to_working()?;
    let mut target = Dense { t: &working, cache: SweepCache::default(), dtype: T::DTYPE };
    let fit = decompose_target(&mut target, rank, options)?;
    let mut cp = fit.cp;
    cp.weights.iter_mut().for_each(|w| *w *= scale);
    let cp = cp.cast::<T>();
    if !cp.weights.iter().all(|w| w.is_finite()) {
        return Err(Error::NotFinite { what: "a weight of the decomposition" });
    }
    Ok(Fit {
        cp,
        rel_error: fit.rel_error,
        history: fit.history,
        status: fit.status,
        degeneracy: fit.degeneracy,
        zero_terms: fit.zero_terms,
        start: fit.start,
    })
}

/// Decomposes a tensor that is given by what alternating least squares asks of it.
pub fn decompose_target(target: &mut dyn Target, rank: usize, options: &Options) -> Result<Fit<f64>> {
    options.validate()?;
    let shape = target.shape();
    let norm_squared = target.norm_squared();
    if !norm_squared.is_finite() {
        return Err(Error::NotFinite { what: "the norm of the tensor" });
    }
    let empty = shape.contains(&0);
    let most = (0..shape.len())
        .map(|n| shape.iter().enumerate().filter(|(m, _)| *m != n).map(|(_, d)| d).product())
        .min()
        .unwrap_or(0usize);
    if rank == 0 || (!empty && rank > most) {
        return Err(Error::param("rank", rank, format!("1 to {most} for shape {shape:?}")));
    }
    if let Init::Given(cp) = &options.init {
        check_start(cp, &shape, rank)?;
    }
    if norm_squared == 0.0 {
        return Ok(zero_fit(&shape, rank));
    }
    let mut best: Option<Run> = None;
    for start in 0..options.restarts {
        let factors = initial(target, &shape, rank, start, options);
        let run = iterate(target, norm_squared, factors, start, options)?;
        if best.as_ref().is_none_or(|b| run.error < b.error) {
            best = Some(run);
        }
    }
    Ok(best.expect("there is at least one start").into_fit(norm_squared))
}

fn check_start(cp: &Cp<f64>, shape: &[usize], rank: usize) -> Result<()> {
    cp.check()?;
    if cp.rank() != rank || cp.shape() != shape {
        return Err(Error::shape(
            "given start",
            format!("rank {rank} and shape {shape:?}"),
            format!("rank {} and shape {:?}", cp.rank(), cp.shape()),
        ));
    }
    let mut numbers = cp.weights.iter().chain(cp.factors.iter().flat_map(Mat::data));
    if !numbers.all(|x| x.is_finite()) {
        return Err(Error::NotFinite { what: "the given start" });
    }
    Ok(())
}

fn zero_fit(shape: &[usize], rank: usize) -> Fit<f64> {
    let unit = |n: usize| Mat::from_fn(n, rank, |i, r| if i == r % n.max(1) { 1.0 } else { 0.0 });
    Fit {
        cp: Cp { weights: vec![0.0; rank], factors: shape.iter().map(|&n| unit(n)).collect() },
        rel_error: 0.0,
        history: Vec::new(),
        status: Status::Converged,
        degeneracy: None,
        zero_terms: (0..rank).collect(),
        start: 0,
    }
}

/// The factors a start begins with, unit columns.
fn initial(
    target: &mut dyn Target,
    shape: &[usize],
    rank: usize,
    start: usize,
    options: &Options,
) -> Vec<Mat<f64>> {
    let key = StreamKey::new(options.seed).named("cp start").with(start as u64);
    let mut factors: Vec<Mat<f64>> = match (&options.init, start) {
        (Init::Given(cp), 0) => cp.factors.clone(),
        (init, _) => (0..shape.len())
            .map(|mode| {
                let mut rng = key.with(mode as u64).rng();
                let mut factor = Mat::zeros(shape[mode], rank);
                rng.fill_normal(factor.data_mut());
                let gram = if *init == Init::Hosvd && start == 0 { target.gram(mode) } else { None };
                if let Some(gram) = gram {
                    let basis = leading_columns(&eigh(&gram).1, rank);
                    for i in 0..shape[mode] {
                        factor.row_mut(i)[..basis.cols()].copy_from_slice(basis.row(i));
                    }
                    factor.data_mut().iter_mut().for_each(|x| *x += 0.01 * rng.normal());
                }
                factor
            })
            .collect(),
    };
    factors.iter_mut().for_each(|f| {
        normalise_columns(f);
    });
    factors
}

/// Divides every column by its norm and returns the norms; a column without a usable norm becomes zero.
fn normalise_columns(a: &mut Mat<f64>) -> Vec<f64> {
    (0..a.cols())
        .map(|r| {
            let norm = (0..a.rows()).map(|i| a[(i, r)] * a[(i, r)]).sum::<f64>().sqrt();
            let norm = if norm.is_normal() { norm } else { 0.0 };
            for i in 0..a.rows() {
                a[(i, r)] = if norm > 0.0 { a[(i, r)] / norm } else { 0.0 };
            }
            norm
        })
        .collect()
}

struct Run {
    weights: Vec<f64>,
    factors: Vec<Mat<f64>>,
    error: f64,
    history: Vec<f64>,
    converged: bool,
    start: usize,
}

/// Hadamard product of all matrices but that of `skip`.
fn hadamard_all(grams: &[Mat<f64>], rank: usize, skip: Option<usize>) -> Mat<f64> {
    let ones = Mat::from_vec(vec![1.0; rank * rank], rank, rank);
    let kept = grams.iter().enumerate().filter(|(m, _)| Some(*m) != skip);
    kept.fold(ones, |acc, (_, g)| hadamard(&acc, g).expect("Gram matrices of one rank"))
}

/// Relative error of `weights` and `factors`, given `y`, the product of the last mode.
fn relative_error(
    target: &mut dyn Target,
    norm_squared: f64,
    weights: &[f64],
    factors: &[Mat<f64>],
    grams: &[Mat<f64>],
    y: &Mat<f64>,
) -> f64 {
    let rank = weights.len();
    let all = hadamard_all(grams, rank, None);
    let model: f64 =
        (0..rank).map(|r| weights[r] * all.row(r).iter().zip(weights).map(|(g, w)| g * w).sum::<f64>()).sum();
    let last = &factors[factors.len() - 1];
    let cross: f64 =
        (0..last.rows()).map(|i| (0..rank).map(|r| weights[r] * y[(i, r)] * last[(i, r)]).sum::<f64>()).sum();
    let squared = norm_squared + model - 2.0 * cross;
    // The three terms cancel: what is left is rounding below ε times the largest of them, and an error of
    // 1e-7 has lost all digits but one or two.
    let size = norm_squared + weights.iter().map(|w| w * w).sum::<f64>();
    let squared = if squared < 1e-13 * size {
        target.residual_squared(weights, factors).unwrap_or(squared)
    } else {
        squared
    };
    (squared.max(0.0) / norm_squared).sqrt()
}

fn iterate(
    target: &mut dyn Target,
    norm_squared: f64,
    mut factors: Vec<Mat<f64>>,
    start: usize,
    options: &Options,
) -> Result<Run> {
    let (order, rank) = (factors.len(), factors[0].cols());
    let (tol, floor) = match target.dtype() {
        DType::F64 => (options.tol.unwrap_or(1e-8), 1e-12),
        DType::F32 => (options.tol.unwrap_or(1e-5), 1e-7),
    };
    let mut grams: Vec<Mat<f64>> = factors.iter().map(|f| matmul_tn(f, f)).collect();
    let mut weights = vec![1.0; rank];
    let mut history = Vec::new();
    let mut previous: Option<(Vec<f64>, Vec<Mat<f64>>)> = None;
    let mut extrapolation = Extrapolation::default();
    let mut error = f64::INFINITY;
    let mut converged = false;
    for sweep in 1..=options.iters {
        let mut y = Mat::zeros(0, 0);
        for mode in 0..order {
            let gamma = hadamard_all(&grams, rank, Some(mode));
            y = target.mttkrp_in_sweep(&factors, mode);
            if (y.rows(), y.cols()) != (factors[mode].rows(), rank) {
                return Err(Error::shape(
                    "product of a target",
                    format!("{} × {rank}", factors[mode].rows()),
                    format!("{} × {}", y.rows(), y.cols()),
                ));
            }
            factors[mode] = solve_gram(&gamma, &y, options.ridge, floor);
            weights = normalise_columns(&mut factors[mode]);
            grams[mode] = matmul_tn(&factors[mode], &factors[mode]);
        }
        let mut now = relative_error(target, norm_squared, &weights, &factors, &grams, &y);
        if let Some((w, f)) = previous.as_ref().filter(|_| sweep > 6 && sweep % 2 == 0) {
            let (w, f) = extrapolation.step(sweep, (w, f), (&weights, &factors));
            let g: Vec<Mat<f64>> = f.iter().map(|f| matmul_tn(f, f)).collect();
            let y = target.mttkrp(&f, order - 1);
            let tried = relative_error(target, norm_squared, &w, &f, &g, &y);
            extrapolation.note(tried < now);
            if tried < now {
                (weights, factors, grams, now) = (w, f, g, tried);
            }
        }
        previous = options.line_search.then(|| (weights.clone(), factors.clone()));
        history.push(now);
        let change = (error - now).abs();
        error = now;
        if change < tol || error < 10.0 * f64::EPSILON {
            converged = true;
            break;
        }
    }
    Ok(Run { weights, factors, error, history, converged, start })
}

/// Bro's extrapolation: $A + (t^{1/p} - 1)(A - A^{\text{prev}})$ after sweep $t$, the power $p$ growing when
/// four tries in a row were refused.
struct Extrapolation {
    power: f64,
    refused: usize,
}

impl Default for Extrapolation {
    fn default() -> Self {
        Self { power: 2.0, refused: 0 }
    }
}

impl Extrapolation {
    /// The extrapolated terms; weights travel with the last factor.
    fn step(
        &self,
        sweep: usize,
        (old_weights, old): (&[f64], &[Mat<f64>]),
        (new_weights, new): (&[f64], &[Mat<f64>]),
    ) -> (Vec<f64>, Vec<Mat<f64>>) {
        let stride = libm::pow(sweep as f64, 1.0 / self.power) - 1.0;
        let mut weights = vec![1.0; new_weights.len()];
        let mut factors = Vec::with_capacity(new.len());
        for (m, (a, b)) in old.iter().zip(new).enumerate() {
            let last = m + 1 == new.len();
            let mut moved = Mat::from_fn(b.rows(), b.cols(), |i, r| {
                let (wa, wb) = if last { (old_weights[r], new_weights[r]) } else { (1.0, 1.0) };
                let (a, b) = (wa * a[(i, r)], wb * b[(i, r)]);
                b + stride * (b - a)
            });
            let norms = normalise_columns(&mut moved);
            weights.iter_mut().zip(norms).for_each(|(w, n)| *w *= n);
            factors.push(moved);
        }
        (weights, factors)
    }

    fn note(&mut self, accepted: bool) {
        self.refused = if accepted { 0 } else { self.refused + 1 };
        if self.refused == 4 {
            self.power += 1.0;
            self.refused = 0;
        }
    }
}

impl Run {
    fn into_fit(self, norm_squared: f64) -> Fit<f64> {
        let cp = canonical(self.weights, &self.factors);
        let degeneracy = degeneracy(&cp, norm_squared.sqrt());
        let status = match (degeneracy, self.converged) {
            (Some(_), _) => Status::Degenerate,
            (None, true) => Status::Converged,
            (None, false) => Status::MaxIters,
        };
        let zero_terms = (0..cp.rank()).filter(|&r| cp.weights[r] == 0.0).collect();
        Fit {
            cp,
            rel_error: self.error,
            history: self.history,
            status,
            degeneracy,
            zero_terms,
            start: self.start,
        }
    }
}

/// Weights largest first, and the largest entry of each column positive in every mode but the last.
fn canonical(weights: Vec<f64>, factors: &[Mat<f64>]) -> Cp<f64> {
    let rank = weights.len();
    let mut order: Vec<usize> = (0..rank).collect();
    order.sort_by(|&a, &b| weights[b].total_cmp(&weights[a]));
    let mut flips = vec![1.0; rank];
    let last = factors.len() - 1;
    let mut sorted = Vec::with_capacity(factors.len());
    for (m, f) in factors.iter().enumerate() {
        let signs: Vec<f64> = order
            .iter()
            .zip(&mut flips)
            .map(|(&r, flip)| {
                if m == last {
                    return *flip;
                }
                let sign = column_sign(f, r);
                *flip *= sign;
                sign
            })
            .collect();
        // Adding 0 turns −0 into 0.
        sorted.push(Mat::from_fn(f.rows(), rank, |i, r| f[(i, order[r])] * signs[r] + 0.0));
    }
    Cp { weights: order.iter().map(|&r| weights[r]).collect(), factors: sorted }
}

/// The most strongly cancelling pair of terms that are larger than twice the tensor.
fn degeneracy(cp: &Cp<f64>, norm: f64) -> Option<Degeneracy> {
    let grams: Vec<Mat<f64>> = cp.factors.iter().map(|f| matmul_tn(f, f)).collect();
    let cosines = hadamard_all(&grams, cp.rank(), None);
    let pairs = (0..cp.rank()).flat_map(|r| (r + 1..cp.rank()).map(move |s| (r, s)));
    pairs
        .map(|(r, s)| Degeneracy {
            pair: (r, s),
            cosine: cosines[(r, s)],
            weight: (cp.weights[r].sqrt() * cp.weights[s].sqrt()) / norm,
        })
        .filter(|d| d.cosine < -0.9 && d.weight > 2.0)
        .min_by(|a, b| a.cosine.total_cmp(&b.cosine))
}

#[cfg(test)]
mod tests;
