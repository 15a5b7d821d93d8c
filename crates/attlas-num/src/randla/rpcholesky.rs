//! Randomly pivoted Cholesky: a low-rank approximation of a positive semidefinite matrix from few of its rows.
//!
//! **Math.** Partial Cholesky $\hat A = G^\top G$, $G$ being $k \times n$, whose pivots are drawn with probability
//! proportional to the diagonal of the residual $A - \hat A$. $\hat A$ is the Nyström approximation with
//! the pivots as landmarks: it reproduces their rows, and the residual is positive semidefinite.
//!
//! **Reference.** Chen, Epperly, Tropp and Webber (2024); the accelerated variant is Epperly, Tropp and
//! Webber (2024). The `block` variant differs from public code in keeping the first distinct draws in draw
//! order, where a sorted list would favour low indices.
//!
//! **Cost.** $(k + 1) n$ entries of $A$ and $k^2 n$ multiply-adds; `simple` in matrix–vector products,
//! the others in matrix–matrix products.
//!
//! **Guarantee.** $\mathbb E \operatorname{tr}(A - \hat A) \le (1 + \varepsilon) \operatorname{tr}(A - A_r)$ once
//! $k \ge r/\varepsilon + r \ln(1/(\varepsilon\eta))$ with $\eta = \operatorname{tr}(A - A_r) / \operatorname{tr} A$;
//! for `simple` and `accelerated`, whose pivots have the same distribution.

use crate::kernels::{Isa, Op, exp_in_place, gemm};
use crate::linalg::{LinalgError, Result, Triangle, dot, matmul_tn, solve_triangular_in_place};
use crate::rng::StreamKey;
use crate::scratch::Buf;
use crate::{Mat, MatRef, Real, Scratch};
use rayon::prelude::*;
use std::ops::Range;

/// A positive semidefinite matrix, read by pieces of rows.
pub trait PsdMatrix<T: Real>: Sync {
    /// Number of rows.
    fn size(&self) -> usize;
    /// The diagonal, `n` entries.
    fn diag_into(&self, out: &mut [T]);
    /// The columns `cols` of the named rows, row after row, `rows.len() × cols.len()` entries.
    fn rows_into(&self, rows: &[usize], cols: Range<usize>, out: &mut [T], scratch: &Scratch);
    /// The named rows and columns, `index.len()²` entries.
    fn sub_into(&self, index: &[usize], out: &mut [T]);
}

impl<T: Real> PsdMatrix<T> for MatRef<'_, T> {
    fn size(&self) -> usize {
        self.rows()
    }

    fn diag_into(&self, out: &mut [T]) {
        out.iter_mut().enumerate().for_each(|(i, x)| *x = self.at(i, i));
    }

    fn rows_into(&self, rows: &[usize], cols: Range<usize>, out: &mut [T], _: &Scratch) {
        for (dst, &i) in out.chunks_exact_mut(cols.len().max(1)).zip(rows) {
            dst.copy_from_slice(&self.row(i)[cols.clone()]);
        }
    }

    fn sub_into(&self, index: &[usize], out: &mut [T]) {
        for (row, &i) in out.chunks_exact_mut(index.len().max(1)).zip(index) {
            row.iter_mut().zip(index).for_each(|(x, &j)| *x = self.at(i, j));
        }
    }
}

/// $K_{ij} = e^{-\|x_i - x_j\|^2/2}$, evaluated as $\exp(\min(0, x_i \cdot x_j - h_i - h_j))$ with $h = \|x\|^2/2$.
#[derive(Clone, Debug)]
pub struct GaussianKernel<'a, T> {
    points: MatRef<'a, T>,
    half_norms: Vec<T>,
}

impl<'a, T: Real> GaussianKernel<'a, T> {
    /// The kernel of the rows of `points`.
    pub fn new(points: MatRef<'a, T>) -> Self {
        let half = T::from_f64(0.5);
        let half_norms = points.iter_rows().map(|x| half * dot(x, x)).collect();
        Self { points, half_norms }
    }

    /// $h_i = \|x_i\|^2/2$.
    pub fn half_norms(&self) -> &[T] {
        &self.half_norms
    }
}

impl<T: Real> PsdMatrix<T> for GaussianKernel<'_, T> {
    fn size(&self) -> usize {
        self.points.rows()
    }

    fn diag_into(&self, out: &mut [T]) {
        out.fill(T::ONE);
    }

    fn rows_into(&self, rows: &[usize], cols: Range<usize>, out: &mut [T], scratch: &Scratch) {
        let (d, width) = (self.points.cols(), cols.len());
        let mut chosen = scratch.take::<T>(rows.len() * d);
        self.points.gather_into(rows.iter().copied(), &mut chosen);
        let chosen = Op::N(MatRef::new(&chosen, rows.len(), d));
        let points = Op::T(self.points.sub_rows(cols.clone()));
        gemm(Isa::best(), T::ONE, chosen, points, T::ZERO, out, width, scratch);
        let half_norms = &self.half_norms[cols.clone()];
        for (row, &i) in out.chunks_exact_mut(width.max(1)).zip(rows) {
            let h = self.half_norms[i];
            for (x, &hj) in row.iter_mut().zip(half_norms) {
                let exponent = *x - h - hj;
                // Not `min`, which would turn NaN into 0.
                *x = if exponent > T::ZERO { T::ZERO } else { exponent };
            }
            exp_in_place(row);
            if cols.contains(&i) {
                row[i - cols.start] = T::ONE;
            }
        }
    }

    fn sub_into(&self, index: &[usize], out: &mut [T]) {
        for (row, &i) in out.chunks_exact_mut(index.len().max(1)).zip(index) {
            for (x, &j) in row.iter_mut().zip(index) {
                let inner = dot(self.points.row(i), self.points.row(j));
                let value = capped_exp(inner - self.half_norms[i] - self.half_norms[j]);
                *x = if i == j { T::ONE } else { value };
            }
        }
    }
}

/// $e^{\min(0, x)}$, with NaN kept.
fn capped_exp<T: Real>(x: T) -> T {
    if x > T::ZERO { T::ONE } else { x.exp() }
}

/// How pivots are found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Variant {
    /// One at a time.
    Simple,
    /// Drawn in blocks and thinned by rejection to the distribution of `Simple`.
    Accelerated,
    /// Drawn in blocks and all kept: cheapest, and worse on clustered data.
    Block,
}

/// Parameters of [`rp_cholesky`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    /// Most pivots.
    pub rank: usize,
    /// `None`: accelerated from rank 64 on, and for finite `power`; else simple.
    pub variant: Option<Variant>,
    /// Draws per round. `None`: a tenth of the rank, between 10 and 128.
    pub block: Option<usize>,
    /// Relative residual trace at which to stop. `None`: $10^{-13}$ in `f64`, $10^{-6}$ in `f32`.
    pub stop_tol: Option<f64>,
    /// Probabilities are proportional to the residual to this power; infinity always takes the largest.
    pub power: f64,
}

impl Options {
    /// The defaults, for at most `rank` pivots.
    pub fn rank(rank: usize) -> Self {
        Self { rank, variant: None, block: None, stop_tol: None, power: 1.0 }
    }

    /// Draws per round.
    fn block_len(&self) -> usize {
        self.block.unwrap_or(self.rank.div_ceil(10).clamp(10, 128)).max(1)
    }
}

/// Columns of the factor that lie together and are worked on by one thread: fixed, so that the number of
/// threads changes nothing.
const PANEL: usize = 512;
/// Panels whose products are summed in the element type before the sums are added in `f64`.
const PANELS_PER_SUM: usize = 8;

/// The factor $G$, stored panel by panel: each holds its columns of all rows, one row after another.
#[derive(Debug)]
struct Panels<'s, T> {
    data: Buf<'s, T>,
    n: usize,
    width: usize,
    /// Rows there is room for.
    capacity: usize,
}

impl<'s, T: Real> Panels<'s, T> {
    fn new(n: usize, capacity: usize, scratch: &'s Scratch) -> Self {
        let width = n.clamp(1, PANEL);
        Self { data: scratch.take(n * capacity), n, width, capacity }
    }

    /// Columns of panel `p`.
    fn range(&self, p: usize) -> Range<usize> {
        p * self.width..((p + 1) * self.width).min(self.n)
    }

    fn count(&self) -> usize {
        self.n.div_ceil(self.width)
    }

    /// The first `rows` rows of panel `p`.
    fn panel(&self, p: usize, rows: usize) -> MatRef<'_, T> {
        let cols = self.range(p);
        let start = cols.start * self.capacity;
        MatRef::new(&self.data[start..start + rows * cols.len()], rows, cols.len())
    }

    fn at(&self, row: usize, col: usize) -> T {
        let cols = self.range(col / self.width);
        self.data[cols.start * self.capacity + row * cols.len() + col - cols.start]
    }
}

/// Upper bound on the scratch bytes of [`rp_cholesky`] on `n` points of width `d` with `threads` threads, for
/// elements of `size` bytes.
pub fn scratch_bytes(n: usize, d: usize, options: &Options, threads: usize, size: usize) -> usize {
    let rank = options.rank.min(n);
    let sums = n.div_ceil(PANEL).div_ceil(PANELS_PER_SUM);
    // Two packed operands of a product, and the gathered rows.
    let per_thread = (192 << 10) + (512 << 10) + 2 * (options.block_len() * d * size + 256);
    n * rank * size + threads * per_thread + sums * 256
}

/// A partial Cholesky factorisation $\hat A = G^\top G$, in memory borrowed from a [`Scratch`].
#[derive(Debug)]
pub struct PartialCholesky<'s, T> {
    panels: Panels<'s, T>,
    /// The pivots in the order they were taken.
    pub pivots: Vec<usize>,
    /// Diagonal of $A - \hat A$, never negative, zero at the pivots.
    pub residual: Vec<f64>,
    /// Trace of the residual over the trace of the matrix; both of $D K_0 D$ where log-scales were given.
    pub relative_residual: f64,
    /// Rounds of drawing that were made.
    pub rounds: usize,
}

impl<T: Real> PartialCholesky<'_, T> {
    /// Number of pivots.
    pub fn rank(&self) -> usize {
        self.pivots.len()
    }

    /// $G$, one row per pivot, copied; restricted to the pivots it is upper triangular.
    pub fn factor(&self) -> Mat<T> {
        Mat::from_fn(self.rank(), self.panels.n, |t, j| self.panels.at(t, j))
    }

    /// The lower triangular $L = (G_{:,S})^\top$, with $A_{S,S} = LL^\top$.
    pub fn lower(&self) -> Mat<f64> {
        let k = self.rank();
        Mat::from_fn(k, k, |i, j| if j <= i { self.panels.at(j, self.pivots[i]).to_f64() } else { 0.0 })
    }

    /// $W X$ for the interpolation weights $W = L^{-\top} G$, without forming them: $\hat A = A_{:,S} W$.
    /// `x` is $n \times c$; the result $k \times c$.
    pub fn apply_weights(&self, x: MatRef<'_, T>, scratch: &Scratch) -> Result<Mat<f64>> {
        let n = self.panels.n;
        if x.rows() != n {
            return Err(LinalgError::Shape { what: "rows of x", expected: n, found: x.rows() });
        }
        Ok(self.apply_weights_with(x.cols(), scratch, |j, out| out.copy_from_slice(x.row(j))))
    }

    /// The same where `fill(j, row)` writes row `j` of $X$, which has `cols` columns and is never formed whole.
    pub fn apply_weights_with(
        &self,
        cols: usize,
        scratch: &Scratch,
        fill: impl Fn(usize, &mut [T]) + Sync,
    ) -> Mat<f64> {
        let k = self.rank();
        let sums: Vec<Mat<T>> = (0..self.panels.count().div_ceil(PANELS_PER_SUM))
            .into_par_iter()
            .with_max_len(1)
            .map(|s| {
                let mut sum = Mat::zeros(k, cols);
                let mut x = scratch.take::<T>(self.panels.width * cols);
                for p in s * PANELS_PER_SUM..((s + 1) * PANELS_PER_SUM).min(self.panels.count()) {
                    let range = self.panels.range(p);
                    let x = &mut x[..range.len() * cols];
                    x.chunks_exact_mut(cols.max(1)).zip(range.clone()).for_each(|(row, j)| fill(j, row));
                    let (g, x) = (Op::N(self.panels.panel(p, k)), Op::N(MatRef::new(x, range.len(), cols)));
                    gemm(Isa::best(), T::ONE, g, x, T::ONE, sum.data_mut(), cols, scratch);
                }
                sum
            })
            .collect();
        let mut y = Mat::<f64>::zeros(k, cols);
        for sum in &sums {
            y.data_mut().iter_mut().zip(sum.data()).for_each(|(y, s)| *y += s.to_f64());
        }
        solve_triangular_in_place(Triangle::LowerTransposed, self.lower().as_ref(), y.data_mut(), cols);
        y
    }

    /// $G^\top G$, formed: for small matrices.
    pub fn approximation(&self) -> Mat<T> {
        let factor = self.factor();
        matmul_tn(factor.as_ref(), factor.as_ref())
    }
}

/// Randomly pivoted Cholesky of `matrix`, or of $D K_0 D$ with `matrix` $= K_0$ if `log_scale` $= \ln D$ is given.
///
/// With log-scales the factor is still that of $K_0$, in which nothing overflows; only the pivots follow
/// $D K_0 D$. Fewer pivots than asked for are taken where the residual is exhausted. Residuals below eight
/// roundoffs of their diagonal entry are noise and count as zero. Columns are worked on in parallel.
pub fn rp_cholesky<'s, T: Real, M: PsdMatrix<T> + ?Sized>(
    matrix: &M,
    log_scale: Option<&[f64]>,
    options: Options,
    key: StreamKey,
    scratch: &'s Scratch,
) -> Result<PartialCholesky<'s, T>> {
    let power = options.power;
    if power.is_nan() || power <= 0.0 {
        return Err(LinalgError::InvalidParam { name: "power", value: power, expected: "above 0" });
    }
    let rank = options.rank.min(matrix.size());
    let mut state = State::new(matrix, log_scale, rank, scratch)?;
    let block = options.block_len();
    let stop = options.stop_tol.unwrap_or(if T::ROUNDOFF < 1e-10 { 1e-13 } else { 1e-6 });
    let variant = match options.variant {
        _ if power.is_infinite() => Variant::Simple,
        Some(variant) => variant,
        None if options.rank >= 64 => Variant::Accelerated,
        None => Variant::Simple,
    };
    let mut rounds = 0;
    while state.pivots.len() < rank && state.relative_residual() > stop {
        let round = key.with(rounds as u64);
        rounds += 1;
        let wanted = rank - state.pivots.len();
        match variant {
            Variant::Simple => state.simple_step(matrix, power, round)?,
            Variant::Accelerated => state.accelerated_round(matrix, power, block, wanted, round)?,
            Variant::Block => state.block_round(matrix, power, block, wanted, round)?,
        }
    }
    Ok(state.finish(rounds))
}

/// Partial Cholesky with the given pivots, in their order. A pivot whose residual is gone (a repeated one,
/// for instance) is an error.
pub fn cholesky_with_pivots<'s, T: Real, M: PsdMatrix<T> + ?Sized>(
    matrix: &M,
    pivots: &[usize],
    scratch: &'s Scratch,
) -> Result<PartialCholesky<'s, T>> {
    let mut state = State::new(matrix, None, pivots.len(), scratch)?;
    for &s in pivots {
        if s >= state.n {
            return Err(LinalgError::Shape { what: "a pivot", expected: state.n, found: s });
        }
        if state.residual[s] <= 0.0 {
            return Err(LinalgError::NotPositiveDefinite { pivot: s });
        }
        state.take_pivot(matrix, s)?;
    }
    Ok(state.finish(pivots.len()))
}

struct State<'s, T> {
    n: usize,
    panels: Panels<'s, T>,
    scratch: &'s Scratch,
    pivots: Vec<usize>,
    chosen: Vec<bool>,
    residual: Vec<f64>,
    /// Residuals at most this are noise.
    noise: Vec<f64>,
    /// $2 \ln D$.
    log_weight: Option<Vec<f64>>,
    /// $D^2$ over its largest value, and the trace weighted by it.
    weight: Option<Vec<f64>>,
    trace: f64,
}

impl<'s, T: Real> State<'s, T> {
    fn new<M: PsdMatrix<T> + ?Sized>(
        matrix: &M,
        log_scale: Option<&[f64]>,
        rank: usize,
        scratch: &'s Scratch,
    ) -> Result<Self> {
        let n = matrix.size();
        let mut diag = vec![T::ZERO; n];
        matrix.diag_into(&mut diag);
        let residual: Vec<f64> = diag.iter().map(|x| x.to_f64()).collect();
        if residual.iter().any(|x| !x.is_finite()) {
            return Err(LinalgError::NotFinite { what: "the diagonal" });
        }
        if let Some(pivot) = residual.iter().position(|&x| x < 0.0) {
            return Err(LinalgError::NotPositiveDefinite { pivot });
        }
        let mut state = Self {
            n,
            panels: Panels::new(n, rank, scratch),
            scratch,
            pivots: Vec::new(),
            chosen: vec![false; n],
            noise: residual.iter().map(|x| 8.0 * T::ROUNDOFF * x).collect(),
            residual,
            log_weight: None,
            weight: None,
            trace: 0.0,
        };
        if let Some(scale) = log_scale {
            if scale.len() != n {
                return Err(LinalgError::Shape { what: "log_scale", expected: n, found: scale.len() });
            }
            if scale.iter().any(|x| x.is_nan() || *x == f64::INFINITY) {
                return Err(LinalgError::NotFinite { what: "log_scale" });
            }
            let log: Vec<f64> = scale.iter().map(|x| 2.0 * x).collect();
            let top = log.iter().copied().fold(f64::NEG_INFINITY, f64::max).max(-f64::MAX);
            state.weight = Some(log.iter().map(|x| libm::exp(x - top)).collect());
            state.log_weight = Some(log);
        }
        state.trace = state.weighted_trace();
        Ok(state)
    }

    fn weighted_trace(&self) -> f64 {
        match &self.weight {
            Some(w) => self.residual.iter().zip(w).map(|(p, w)| p * w).sum(),
            None => self.residual.iter().sum(),
        }
    }

    /// 0 for the zero matrix.
    fn relative_residual(&self) -> f64 {
        if self.trace > 0.0 { self.weighted_trace() / self.trace } else { 0.0 }
    }

    fn finish(self, rounds: usize) -> PartialCholesky<'s, T> {
        PartialCholesky {
            relative_residual: self.relative_residual(),
            panels: self.panels,
            pivots: self.pivots,
            residual: self.residual,
            rounds,
        }
    }

    /// Logarithm of the sampling weight of `j`, before the power.
    fn log_score(&self, j: usize) -> f64 {
        if self.residual[j] <= 0.0 {
            return f64::NEG_INFINITY;
        }
        libm::log(self.residual[j]) + self.log_weight.as_ref().map_or(0.0, |w| w[j])
    }

    fn argmax(&self, mut score: impl FnMut(usize) -> f64) -> Option<usize> {
        let mut best = (None, f64::NEG_INFINITY);
        for j in 0..self.n {
            let s = score(j);
            if s > best.1 {
                best = (Some(j), s);
            }
        }
        best.0
    }

    /// Running sums of the sampling weights.
    fn cumulative(&self, power: f64) -> Vec<f64> {
        let mut sum = 0.0;
        let mut add = |w: f64| {
            sum += w;
            sum
        };
        if power == 1.0 {
            let plain: Vec<f64> = match &self.weight {
                None => self.residual.iter().map(|&p| add(p)).collect(),
                Some(w) => self.residual.iter().zip(w).map(|(&p, &w)| add(p * w)).collect(),
            };
            // Products that underflow are taken by their logarithms.
            if self.weight.is_none() || plain.last().is_some_and(|&total| total > 1e-250) {
                return plain;
            }
            sum = 0.0;
        }
        let mut add = |w: f64| {
            sum += w;
            sum
        };
        let scores: Vec<f64> = (0..self.n).map(|j| self.log_score(j)).collect();
        let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max).max(-f64::MAX);
        scores.iter().map(|s| add(libm::exp(power * (s - top)))).collect()
    }

    fn simple_step<M: PsdMatrix<T> + ?Sized>(
        &mut self,
        matrix: &M,
        power: f64,
        key: StreamKey,
    ) -> Result<()> {
        let mut rng = key.rng();
        let pivot = if power.is_infinite() {
            self.argmax(|j| self.log_score(j))
        } else {
            pick(&self.cumulative(power), rng.uniform())
        };
        match pivot {
            Some(s) => self.take_pivot(matrix, s),
            // Weights that all underflow: nothing left that counts.
            None => {
                self.residual.fill(0.0);
                Ok(())
            }
        }
    }

    fn take_pivot<M: PsdMatrix<T> + ?Sized>(&mut self, matrix: &M, s: usize) -> Result<()> {
        let root = self.residual[s].sqrt();
        self.append(matrix, &[s], &Mat::from_vec(vec![root], 1, 1))
    }

    fn accelerated_round<M: PsdMatrix<T> + ?Sized>(
        &mut self,
        matrix: &M,
        power: f64,
        block: usize,
        wanted: usize,
        key: StreamKey,
    ) -> Result<()> {
        let mut rng = key.rng();
        let cumulative = self.cumulative(power);
        let index: Vec<usize> = (0..block).filter_map(|_| pick(&cumulative, rng.uniform())).collect();
        if index.is_empty() {
            self.residual.fill(0.0);
            return Ok(());
        }
        let mut h = self.residual_block(matrix, &index)?;
        let before: Vec<f64> = (0..index.len()).map(|j| h[(j, j)]).collect();
        let mut accepted: Vec<usize> = Vec::new();
        for j in 0..index.len() {
            // Every proposal uses one draw, so that a rejection does not shift the stream.
            let draw = rng.uniform();
            let s = index[j];
            if before[j] <= self.noise[s] {
                // Recomputed, the residual is noise; forgetting it keeps rounds from repeating.
                self.residual[s] = 0.0;
                continue;
            }
            let taken = self.chosen[s] || accepted.iter().any(|&i| index[i] == s);
            let kept = libm::pow(draw, 1.0 / power) * before[j] < h[(j, j)];
            if accepted.len() == wanted || taken || !kept || h[(j, j)] <= 8.0 * T::ROUNDOFF * before[j] {
                continue;
            }
            eliminate(&mut h, j);
            accepted.push(j);
        }
        self.append_accepted(matrix, &index, &accepted, &h)
    }

    fn block_round<M: PsdMatrix<T> + ?Sized>(
        &mut self,
        matrix: &M,
        power: f64,
        block: usize,
        wanted: usize,
        key: StreamKey,
    ) -> Result<()> {
        let mut rng = key.rng();
        let cumulative = self.cumulative(power);
        let mut index: Vec<usize> = Vec::new();
        for _ in 0..2 * block {
            if let Some(s) = pick(&cumulative, rng.uniform())
                && index.len() < block.min(wanted)
                && !index.contains(&s)
            {
                index.push(s);
            }
        }
        if index.is_empty() {
            self.residual.fill(0.0);
            return Ok(());
        }
        let mut h = self.residual_block(matrix, &index)?;
        let largest = self.residual.iter().copied().fold(0.0, f64::max);
        let floor = T::ROUNDOFF * index.len() as f64 * largest;
        let mut accepted = Vec::new();
        for j in 0..index.len() {
            if h[(j, j)] <= floor.max(self.noise[index[j]]) {
                self.residual[index[j]] = 0.0;
                continue;
            }
            eliminate(&mut h, j);
            accepted.push(j);
        }
        self.append_accepted(matrix, &index, &accepted, &h)
    }

    /// $A_{I,I} - G_{:,I}^\top G_{:,I}$.
    fn residual_block<M: PsdMatrix<T> + ?Sized>(&self, matrix: &M, index: &[usize]) -> Result<Mat<f64>> {
        let b = index.len();
        let mut sub = vec![T::ZERO; b * b];
        matrix.sub_into(index, &mut sub);
        let mut h = Mat::from_vec(sub, b, b).cast::<f64>();
        let columns = self.factor_columns(index).cast::<f64>();
        let (left, right) = (Op::T(columns.as_ref()), Op::N(columns.as_ref()));
        gemm(Isa::best(), -1.0, left, right, 1.0, h.data_mut(), b, self.scratch);
        if h.data().iter().any(|x| !x.is_finite()) {
            return Err(LinalgError::NotFinite { what: "the matrix" });
        }
        Ok(h)
    }

    /// $G_{:,I}$.
    fn factor_columns(&self, index: &[usize]) -> Mat<T> {
        Mat::from_fn(self.pivots.len(), index.len(), |t, j| self.panels.at(t, index[j]))
    }

    /// Appends the accepted ones of the drawn indices; column `j` of `h` holds that of the Cholesky factor.
    fn append_accepted<M: PsdMatrix<T> + ?Sized>(
        &mut self,
        matrix: &M,
        index: &[usize],
        accepted: &[usize],
        h: &Mat<f64>,
    ) -> Result<()> {
        let b = accepted.len();
        if b == 0 {
            return Ok(());
        }
        let lower = Mat::from_fn(b, b, |i, j| if j <= i { h[(accepted[i], accepted[j])] } else { 0.0 });
        let pivots: Vec<usize> = accepted.iter().map(|&j| index[j]).collect();
        self.append(matrix, &pivots, &lower)
    }

    /// Appends $L^{-1} (A_{I,:} - G_{:,I}^\top G)$ for the new pivots $I$, and lowers the residual diagonal.
    fn append<M: PsdMatrix<T> + ?Sized>(
        &mut self,
        matrix: &M,
        pivots: &[usize],
        lower: &Mat<f64>,
    ) -> Result<()> {
        let (done, b) = (self.pivots.len(), pivots.len());
        let columns = self.factor_columns(pivots);
        let (rounded, earlier, scratch) = (lower.cast::<T>(), &self.pivots, self.scratch);
        let (width, capacity) = (self.panels.width, self.panels.capacity);
        let finite = self
            .panels
            .data
            .par_chunks_mut(width * capacity)
            .zip(self.residual.par_chunks_mut(width).zip(self.noise.par_chunks(width)))
            .enumerate()
            .map(|(p, (panel, (residual, noise)))| {
                let len = residual.len();
                let cols = p * width..p * width + len;
                let (factor, rest) = panel.split_at_mut(done * len);
                let rows = &mut rest[..b * len];
                matrix.rows_into(pivots, cols.clone(), rows, scratch);
                let (left, right) = (Op::T(columns.as_ref()), Op::N(MatRef::new(factor, done, len)));
                gemm(Isa::best(), -T::ONE, left, right, T::ONE, rows, len, scratch);
                solve_triangular_in_place(Triangle::Lower, rounded.as_ref(), rows, len);
                for &s in earlier.iter().filter(|s| cols.contains(s)) {
                    rows.iter_mut().skip(s - cols.start).step_by(len).for_each(|g| *g = T::ZERO);
                }
                for (t, row) in rows.chunks_exact_mut(len).enumerate() {
                    for (j, &s) in pivots.iter().enumerate().filter(|(_, s)| cols.contains(s)) {
                        row[s - cols.start] = T::from_f64(lower[(j, t)]);
                    }
                    for (p, (g, noise)) in residual.iter_mut().zip(row.iter().zip(noise)) {
                        let left = *p - g.to_f64() * g.to_f64();
                        *p = if left > *noise { left } else { 0.0 };
                    }
                }
                rows.iter().all(|g| g.is_finite())
            })
            .reduce(|| true, |a, b| a && b);
        if !finite {
            return Err(LinalgError::NotFinite { what: "the matrix" });
        }
        for &s in pivots {
            self.residual[s] = 0.0;
            self.chosen[s] = true;
        }
        self.pivots.extend_from_slice(pivots);
        Ok(())
    }
}

/// Step `j` of an outer-product Cholesky: column `j` becomes that of the factor, the block after it the Schur
/// complement.
fn eliminate(h: &mut Mat<f64>, j: usize) {
    let b = h.rows();
    let root = h[(j, j)].sqrt();
    (j..b).for_each(|i| h[(i, j)] /= root);
    for i in j + 1..b {
        for l in j + 1..=i {
            let update = h[(i, j)] * h[(l, j)];
            h[(i, l)] -= update;
        }
    }
}

/// The index whose slice of the running sums holds the share `u` of the total; never one of weight zero.
fn pick(cumulative: &[f64], u: f64) -> Option<usize> {
    let total = *cumulative.last()?;
    if !(total > 0.0 && total.is_finite()) {
        return None;
    }
    let target = u * total;
    let found = cumulative.partition_point(|&c| c <= target);
    // `u · total` may round up to the total.
    Some(if found < cumulative.len() { found } else { cumulative.partition_point(|&c| c < total) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linalg::testing::*;
    use crate::linalg::{matmul, matmul_nt, symmetric_eigen};
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

    fn trace(a: &Mat<f64>) -> f64 {
        (0..a.rows()).map(|i| a[(i, i)]).sum()
    }

    /// A kernel matrix with a quickly falling spectrum.
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
                assert!(distance(&f.approximation(), &a) <= 1e-10 * a.frobenius());
                // Asking for more pivots than there are directions stops early, without noise pivots.
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
            assert!(distance(&f.approximation(), &a) <= 1e-12 * a.frobenius(), "{variant:?}");
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
                let approximation = f.approximation();
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
            let sub = Mat::from_fn(12, 12, |i, j| a[(f.pivots[i], f.pivots[j])]);
            assert!(distance(&matmul_nt(l.as_ref(), l.as_ref()), &sub) < 1e-12);
            let weights = f.apply_weights(Mat::identity(40).as_ref(), &SCRATCH).unwrap();
            let columns = Mat::from_fn(40, 12, |i, j| a[(i, f.pivots[j])]);
            let rebuilt = matmul(columns.as_ref(), weights.as_ref());
            assert!(distance(&rebuilt, &f.approximation()) < 1e-8, "{variant:?}");
            let x = gaussian(40, 3, 2);
            let direct = matmul(weights.as_ref(), x.as_ref());
            let applied = f.apply_weights(x.as_ref(), &SCRATCH).unwrap();
            assert!(distance(&applied, &direct) <= 1e-9 * weights.frobenius());
            assert!(f.apply_weights(gaussian(3, 3, 2).as_ref(), &SCRATCH).is_err());
        }
    }

    /// Pearson's statistic of observed counts.
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

    /// Probabilities of the ordered pairs of first pivots, row by row.
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
        // The block variant draws its second pivot from the first diagonal: the test has the power to see it.
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
        // Scales beyond the range of numbers only matter by their differences.
        let huge: Vec<f64> = log_scale.iter().map(|x| x + 5000.0).collect();
        let run = |scale: &[f64]| {
            rp_cholesky(&k0.as_ref(), Some(scale), with(Variant::Simple, 3), StreamKey::new(5), &SCRATCH)
                .unwrap()
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
            // And it cannot beat the best approximation of its rank.
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
        let w = f.apply_weights(scaled.as_ref(), &SCRATCH).unwrap();
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
                assert_eq!(f.apply_weights(Mat::zeros(n, 2).as_ref(), &SCRATCH).unwrap().rows(), 0);
            }
            let one = run(&Mat::from_vec(vec![9.0], 1, 1), with(variant, 3), 1);
            assert_eq!((one.factor().data(), &one.pivots[..]), (&[3.0][..], &[0][..]));
            let equal = run(&Mat::from_fn(7, 7, |_, _| 2.0), with(variant, 7), 1);
            assert!(equal.rank() == 1 && equal.relative_residual == 0.0);
            assert_eq!(run(&fixed(), with(variant, 0), 1).rank(), 0);

            let go =
                |a: &Mat<f64>| rp_cholesky(&a.as_ref(), None, with(variant, 4), StreamKey::new(1), &SCRATCH);
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
}
