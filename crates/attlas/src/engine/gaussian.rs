//! The Gaussian kernel $g(a, b) = e^{-\|a - b\|^2/2}$ as an operator: products with it, without the whole matrix.
//!
//! It is evaluated as $\exp(\min(0, a^\top b - \|a\|^2/2 - \|b\|^2/2))$, so entries lie in $[0, 1]$ and nothing
//! overflows. With $x = \sqrt\beta\, q$ and $y = \sqrt\beta\, k$ it is $e^{\beta q^\top k}$ up to a factor for each
//! query and each key.

use crate::workspace::Context;
use crate::{Mat, MatRef, Real};
use attlas_num::kernels::{Op, dot, exp_in_place, gemm};
use attlas_num::linalg::{Iteration, PinvStart, iterative_pinv, matmul, psd_factor};
use attlas_num::par::*;
use attlas_num::rng::StreamKey;

/// Points of one tile; fixed, so the number of threads changes nothing.
const TILE: usize = 512;
/// Tiles whose products are summed in the element type before the sums are added in `f64`.
const TILES_PER_SUM: usize = 8;

/// Points with their half squared norms.
#[derive(Clone, Copy, Debug)]
pub struct Points<'a, T> {
    /// One point per row.
    pub x: MatRef<'a, T>,
    /// $\|x\|^2/2$ of each.
    pub half_norms: &'a [T],
}

impl<'a, T: Real> Points<'a, T> {
    /// Some of the points.
    #[must_use]
    pub fn rows(&self, range: std::ops::Range<usize>) -> Self {
        Self { x: self.x.sub_rows(range.clone()), half_norms: &self.half_norms[range] }
    }
}

/// Writes $\|x\|^2/2$ of each row.
pub fn half_norms_into<T: Real>(x: MatRef<'_, T>, out: &mut [T]) {
    let half = T::from_f64(0.5);
    x.iter_rows().zip(out).for_each(|(x, h)| *h = half * dot(x, x));
}

/// Rows that one task of [`points_into`] maps.
const MAPPED_ROWS: usize = 1024;

/// Writes `map` of every row, and half its squared norm, in parallel.
pub fn points_into<T: Real>(
    rows: MatRef<'_, T>,
    map: impl Fn(&[T], &mut [T]) + Sync,
    x: &mut [T],
    half_norms: &mut [T],
) {
    let d = rows.cols();
    let pieces = x.par_chunks_mut(MAPPED_ROWS * d).zip(half_norms.par_chunks_mut(MAPPED_ROWS));
    pieces.with_max_len(1).enumerate().for_each(|(p, (x, half_norms))| {
        let first = p * MAPPED_ROWS;
        let from = rows.sub_rows(first..first + half_norms.len());
        x.chunks_exact_mut(d).zip(from.iter_rows()).for_each(|(x, row)| map(row, x));
        half_norms_into(MatRef::new(x, half_norms.len(), d), half_norms);
    });
}

/// Writes $g(A, B)$, `a.rows × b.rows`.
pub fn kernel_into<T: Real>(a: Points<'_, T>, b: Points<'_, T>, out: &mut [T], cx: Context<'_>) {
    let width = b.x.rows();
    gemm(cx.schedule.isa, T::ONE, Op::N(a.x), Op::T(b.x), T::ZERO, out, width, cx.scratch);
    for (row, &ha) in out.chunks_exact_mut(width.max(1)).zip(a.half_norms) {
        for (s, &hb) in row.iter_mut().zip(b.half_norms) {
            let exponent = *s - ha - hb;
            // Not `min`, which would turn NaN into 0.
            *s = if exponent > T::ZERO { T::ZERO } else { exponent };
        }
        exp_in_place(row);
    }
}

/// Computes $g(A, B) V$ on the calling thread, tile by tile over the points $B$; `v` has one row per point of $B$.
pub fn apply_rows<T: Real>(
    a: Points<'_, T>,
    b: Points<'_, T>,
    v: MatRef<'_, T>,
    out: &mut [T],
    cx: Context<'_>,
) {
    let (rows, cols, n) = (a.x.rows(), v.cols(), b.x.rows());
    out.fill(T::ZERO);
    let mut tile = cx.scratch.take::<T>(rows * TILE.min(n));
    for start in (0..n).step_by(TILE) {
        let range = start..(start + TILE).min(n);
        let tile = &mut tile[..rows * range.len()];
        kernel_into(a, b.rows(range.clone()), tile, cx);
        let left = Op::N(MatRef::new(tile, rows, range.len()));
        gemm(cx.schedule.isa, T::ONE, left, Op::N(v.sub_rows(range)), T::ONE, out, cols, cx.scratch);
    }
}

/// Computes $g(A, B) X$ for few points $A$ and many $B$, in parallel over $B$; `fill(j, row)` writes row `j` of $X$.
pub fn apply_long<T: Real>(
    a: Points<'_, T>,
    b: Points<'_, T>,
    cols: usize,
    cx: Context<'_>,
    fill: impl Fn(usize, &mut [T]) + Sync,
) -> Mat<f64> {
    let (m, n) = (a.x.rows(), b.x.rows());
    let width = TILE.min(n);
    let tiles = n.div_ceil(TILE);
    let sums: Vec<Mat<T>> = (0..tiles.div_ceil(TILES_PER_SUM))
        .into_par_iter()
        .with_max_len(1)
        .map(|s| {
            let mut sum = Mat::zeros(m, cols);
            let mut kernel = cx.scratch.take::<T>(m * width);
            let mut x = cx.scratch.take::<T>(width * cols);
            for t in s * TILES_PER_SUM..((s + 1) * TILES_PER_SUM).min(tiles) {
                let range = t * TILE..((t + 1) * TILE).min(n);
                let (kernel, x) = (&mut kernel[..m * range.len()], &mut x[..range.len() * cols]);
                kernel_into(a, b.rows(range.clone()), kernel, cx);
                x.chunks_exact_mut(cols).zip(range.clone()).for_each(|(row, j)| fill(j, row));
                let left = Op::N(MatRef::new(kernel, m, range.len()));
                let right = Op::N(MatRef::new(x, range.len(), cols));
                gemm(cx.schedule.isa, T::ONE, left, right, T::ONE, sum.data_mut(), cols, cx.scratch);
            }
            sum
        })
        .collect();
    let mut total = Mat::<f64>::zeros(m, cols);
    for sum in &sums {
        total.data_mut().iter_mut().zip(sum.data()).for_each(|(t, s)| *t += s.to_f64());
    }
    total
}

crate::choices! {
    /// Origin of the landmarks.
    pub enum Source {
        /// Keys alone.
        Keys = "keys",
        /// Half of them from queries, half from keys.
        Both = "both",
    }
}

crate::choices! {
    /// Sampling of the landmarks.
    pub enum Sampling {
        /// Uniformly with replacement, as in the paper.
        UniformWr = "uniform_wr",
        /// Uniformly without replacement.
        UniformWor = "uniform_wor",
        /// By randomly pivoted Cholesky.
        RpCholesky = "rpcholesky",
    }
}

crate::choices! {
    /// Solver of the small system.
    pub enum SolverKind {
        /// Cholesky, with the jitter that a singular matrix needs.
        Cholesky = "cholesky",
        /// The iteration of Razavi et al. on the scaled matrix, a fixed number of steps.
        Razavi = "razavi",
    }
}

impl SolverKind {
    /// Adds the number of steps.
    pub fn with_steps(self, steps: usize) -> Solver {
        match self {
            SolverKind::Cholesky => Solver::Cholesky,
            SolverKind::Razavi => Solver::Razavi(steps),
        }
    }
}

/// Draws `m` of `n` indices uniformly and returns them in increasing order.
pub fn uniform(n: usize, m: usize, replace: bool, stream: StreamKey) -> Vec<usize> {
    let mut rng = stream.rng();
    if !replace {
        return rng.subset(n, m);
    }
    let mut drawn: Vec<usize> = (0..m).map(|_| rng.below(n)).collect();
    drawn.sort_unstable();
    drawn
}

/// Method that applies $(M + \gamma I)^{-1}$.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Solver {
    /// Cholesky, with the jitter that a singular matrix needs.
    Cholesky,
    /// This many steps of the iteration of Razavi et al., on the matrix scaled to a spectrum in $(0, 1]$.
    Razavi(usize),
}

/// Returns $(g(L, L) + \gamma I)^{-1} B$ and the steps of an iteration; `None` if numbers are not finite.
pub fn solve<T: Real>(
    landmarks: Points<'_, T>,
    gamma: f64,
    solver: Solver,
    b: &Mat<f64>,
    cx: Context<'_>,
) -> Option<(Mat<f64>, Option<usize>)> {
    let m = landmarks.x.rows();
    let mut gram = cx.scratch.take::<T>(m * m);
    kernel_into(landmarks, landmarks, &mut gram, cx);
    let mut gram = MatRef::new(&gram[..], m, m).to_mat();
    (0..m).for_each(|i| gram[(i, i)] = T::ONE);
    match solver {
        Solver::Cholesky => {
            (0..m).for_each(|i| gram[(i, i)] += T::from_f64(gamma));
            Some((psd_factor(gram.as_ref()).ok()?.solve(b.as_ref()).ok()?, None))
        }
        Solver::Razavi(steps) => {
            let mut gram = gram.cast::<f64>();
            (0..m).for_each(|i| gram[(i, i)] += gamma);
            // D M D with D the inverse roots of the row sums has its spectrum in (0, 1], 1 attained.
            let roots: Vec<f64> = (0..m).map(|i| 1.0 / gram.row(i).iter().sum::<f64>().sqrt()).collect();
            let scaled = Mat::from_fn(m, m, |i, j| roots[i] * gram[(i, j)] * roots[j]);
            let start = PinvStart::Identity;
            let found = iterative_pinv(scaled.as_ref(), Iteration::Razavi, steps, 0.0, start).ok()?;
            let right = Mat::from_fn(m, b.cols(), |i, j| roots[i] * b[(i, j)]);
            let mut x = matmul(found.inverse.as_ref(), right.as_ref());
            (0..m).for_each(|i| x.row_mut(i).iter_mut().for_each(|x| *x *= roots[i]));
            Some((x, Some(found.steps)))
        }
    }
}
