//! Positive semidefinite matrices that are read in pieces and need not be stored.

use crate::kernels::{Isa, Op, exp_in_place, gemm};
use crate::linalg::dot;
use crate::par::*;
use crate::{MatRef, Real, Scratch};
use std::ops::Range;

/// Positive semidefinite matrix, read in pieces of rows.
pub trait PsdMatrix<T: Real>: Sync {
    /// Returns the number of rows.
    fn size(&self) -> usize;
    /// Writes the diagonal, `n` entries.
    fn diag_into(&self, out: &mut [T]);
    /// Writes the columns `cols` of the named rows, row after row, `rows.len() × cols.len()` entries.
    fn rows_into(&self, rows: &[usize], cols: Range<usize>, out: &mut [T], scratch: &Scratch);
    /// Writes the named rows and columns, `index.len()²` entries.
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
    /// Creates the kernel of the rows of `points`.
    pub fn new(points: MatRef<'a, T>) -> Self {
        let half = T::from_f64(0.5);
        let of_row = |i: usize| half * dot(points.row(i), points.row(i));
        let half_norms = (0..points.rows()).into_par_iter().with_min_len(1024).map(of_row).collect();
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

/// Computes $e^{\min(0, x)}$, with NaN kept.
fn capped_exp<T: Real>(x: T) -> T {
    if x > T::ZERO { T::ONE } else { x.exp() }
}
