//! A growing factorisation: residual diagonal, pivots taken so far, and the addition of new ones.
//!
//! New pivots $I$ with $LL^\top = A_{I,I} - G_{:,I}^\top G_{:,I}$ append the rows $L^{-1}(A_{I,:} - G_{:,I}^\top G)$ to
//! $G$, and the residual diagonal falls by their squares. Panels of columns are processed independently, in parallel.

use super::factor::{Panels, PartialCholesky};
use super::matrix::PsdMatrix;
use crate::kernels::{Isa, Op, gemm};
use crate::linalg::{LinalgError, Result, Triangle, solve_triangular_in_place};
use crate::par::*;
use crate::{Mat, MatRef, Real, Scratch};

/// Unfinished factorisation.
pub(super) struct Factorisation<'s, T> {
    pub(super) n: usize,
    panels: Panels<'s, T>,
    scratch: &'s Scratch,
    pub(super) pivots: Vec<usize>,
    pub(super) chosen: Vec<bool>,
    pub(super) residual: Vec<f64>,
    /// Residuals at most this are noise.
    pub(super) noise: Vec<f64>,
    /// $2 \ln D$.
    pub(super) log_weight: Option<Vec<f64>>,
    /// $D^2$ over its largest value, and the trace weighted by it.
    pub(super) weight: Option<Vec<f64>>,
    trace: f64,
}

impl<'s, T: Real> Factorisation<'s, T> {
    pub(super) fn new<M: PsdMatrix<T> + ?Sized>(
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
            state.weight = Some(log.par_iter().with_min_len(1024).map(|x| libm::exp(x - top)).collect());
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

    /// Returns the relative residual; 0 for the zero matrix.
    pub(super) fn relative_residual(&self) -> f64 {
        if self.trace > 0.0 { self.weighted_trace() / self.trace } else { 0.0 }
    }

    pub(super) fn finish(self, rounds: usize) -> PartialCholesky<'s, T> {
        PartialCholesky {
            relative_residual: self.relative_residual(),
            panels: self.panels,
            pivots: self.pivots,
            residual: self.residual,
            rounds,
        }
    }

    pub(super) fn take_pivot<M: PsdMatrix<T> + ?Sized>(&mut self, matrix: &M, s: usize) -> Result<()> {
        let root = self.residual[s].sqrt();
        self.append(matrix, &[s], &Mat::from_vec(vec![root], 1, 1))
    }

    /// Computes $A_{I,I} - G_{:,I}^\top G_{:,I}$.
    pub(super) fn residual_block<M: PsdMatrix<T> + ?Sized>(
        &self,
        matrix: &M,
        index: &[usize],
    ) -> Result<Mat<f64>> {
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

    /// Returns $G_{:,I}$.
    fn factor_columns(&self, index: &[usize]) -> Mat<T> {
        Mat::from_fn(self.pivots.len(), index.len(), |t, j| self.panels.at(t, index[j]))
    }

    /// Appends the accepted ones among the drawn indices; column `j` of `h` is that of the Cholesky factor.
    pub(super) fn append_accepted<M: PsdMatrix<T> + ?Sized>(
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
