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
mod tests;
