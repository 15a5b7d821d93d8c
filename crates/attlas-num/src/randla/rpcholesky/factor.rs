//! The factor $G$ of $\hat A = G^\top G$, in panels, and the operations on it.
//!
//! With $S$ the pivots and $L = (G_{:,S})^\top$, $\hat A = A_{:,S} W$ for the interpolation weights $W = L^{-\top} G$: sums over
//! all columns become sums over the pivots.

use crate::kernels::{Isa, Op, gemm};
use crate::linalg::{Triangle, solve_triangular_in_place};
use crate::par::*;
use crate::scratch::Buf;
use crate::{Mat, MatRef, Real, Scratch};
use std::ops::Range;

/// Columns of the factor that are stored together and processed by one thread: fixed, so that the number of threads
/// changes nothing.
pub(super) const PANEL: usize = 512;
/// Panels whose products are summed in the element type before the sums are added in `f64`.
pub(super) const PANELS_PER_SUM: usize = 8;

/// The factor $G$, stored panel by panel: each holds its columns of all rows, one row after another.
#[derive(Debug)]
pub(super) struct Panels<'s, T> {
    pub(super) data: Buf<'s, T>,
    pub(super) n: usize,
    pub(super) width: usize,
    /// Capacity in rows.
    pub(super) capacity: usize,
}

impl<'s, T: Real> Panels<'s, T> {
    pub(super) fn new(n: usize, capacity: usize, scratch: &'s Scratch) -> Self {
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

    pub(super) fn at(&self, row: usize, col: usize) -> T {
        let cols = self.range(col / self.width);
        self.data[cols.start * self.capacity + row * cols.len() + col - cols.start]
    }
}

/// A partial Cholesky factorisation $\hat A = G^\top G$, in memory borrowed from a [`Scratch`].
#[derive(Debug)]
pub struct PartialCholesky<'s, T> {
    pub(super) panels: Panels<'s, T>,
    /// The pivots in the order they were taken.
    pub pivots: Vec<usize>,
    /// Diagonal of $A - \hat A$, never negative, zero at the pivots.
    pub residual: Vec<f64>,
    /// Trace of the residual over the trace of the matrix; both of $D K_0 D$ if log-scales were given.
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

    /// Returns the least residual that a pivot had when it was taken, the least square on the diagonal of $L$; infinite
    /// without pivots.
    pub fn least_pivot(&self) -> f64 {
        let taken = self.pivots.iter().enumerate().map(|(t, &s)| self.panels.at(t, s).to_f64().powi(2));
        taken.fold(f64::INFINITY, f64::min)
    }

    /// Computes $W X$ for the interpolation weights $W = L^{-\top} G$, without forming them: $\hat A = A_{:,S} W$.
    /// `fill(j, row)` writes row `j` of $X$, which has `cols` columns and is never formed whole.
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
}
