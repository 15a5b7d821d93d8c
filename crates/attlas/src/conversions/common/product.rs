//! Linear maps that are products of stored matrices, some of them shared between maps.

use crate::layer::Linear;
use crate::workspace::Context;
use crate::{Mat, MatRef};
use attlas_num::kernels::{Op, gemm};
use std::borrow::Cow;
use std::sync::Arc;

/// The numbers of a factor. Data behind one [`Arc`] is stored once, however many factors use it.
#[derive(Clone, Debug)]
pub enum Values {
    /// A matrix.
    Matrix(Arc<Mat<f32>>),
    /// A diagonal: one row of a table.
    Diagonal {
        /// One diagonal per row.
        table: Arc<Mat<f32>>,
        /// Row of the diagonal.
        row: usize,
    },
    /// Mixtures of a few matrices, stacked on one another.
    Mixture {
        /// The matrices, all of one shape.
        cores: Arc<Vec<Mat<f32>>>,
        /// Weights of the matrices, one mixture per row.
        weights: Arc<Mat<f32>>,
        /// The mixtures that are stacked.
        rows: Vec<usize>,
    },
}

/// One factor of a product.
#[derive(Clone, Debug)]
pub struct Factor {
    /// Its numbers, `n_out × n_in` unless it is transposed.
    pub values: Values,
    /// True if the transpose of the stored values acts.
    pub transposed: bool,
    /// Number of slices of the input that it acts on, each giving one slice of the output.
    pub slices: usize,
}

impl Factor {
    /// Makes a factor from an unshared matrix.
    pub fn matrix(m: Mat<f32>) -> Self {
        Self::shared(&Arc::new(m), false)
    }

    /// Makes a factor from a matrix that others may share.
    pub fn shared(m: &Arc<Mat<f32>>, transposed: bool) -> Self {
        Self { values: Values::Matrix(m.clone()), transposed, slices: 1 }
    }

    /// Returns the matrix that acts on one slice, `n_out × n_in`. A diagonal is written out.
    pub fn dense(&self) -> Mat<f32> {
        let stored = match &self.values {
            Values::Matrix(m) => Cow::Borrowed(m.as_ref()),
            Values::Diagonal { table, row } => {
                let diagonal = table.row(*row);
                let n = diagonal.len();
                Cow::Owned(Mat::from_fn(n, n, |i, j| if i == j { diagonal[i] } else { 0.0 }))
            }
            Values::Mixture { cores, weights, rows } => Cow::Owned(mix(cores, weights, rows)),
        };
        if self.transposed { stored.transpose() } else { stored.into_owned() }
    }

    /// Returns the outputs and inputs of all slices together.
    pub fn size(&self) -> (usize, usize) {
        let (rows, cols) = match &self.values {
            Values::Matrix(m) => (m.rows(), m.cols()),
            Values::Diagonal { table, .. } => (table.cols(), table.cols()),
            Values::Mixture { cores, rows, .. } => {
                cores.first().map_or((0, 0), |c| (c.rows() * rows.len(), c.cols()))
            }
        };
        let (n_out, n_in) = if self.transposed { (cols, rows) } else { (rows, cols) };
        (n_out * self.slices, n_in * self.slices)
    }
}

/// Stacks mixtures of matrices on one another.
pub fn mix(cores: &[Mat<f32>], weights: &Mat<f32>, rows: &[usize]) -> Mat<f32> {
    let (height, width) = cores.first().map_or((0, 0), |c| (c.rows(), c.cols()));
    let mut out = Mat::zeros(height * rows.len(), width);
    for (block, &row) in out.data_mut().chunks_exact_mut((height * width).max(1)).zip(rows) {
        for (core, &w) in cores.iter().zip(weights.row(row)) {
            block.iter_mut().zip(core.data()).for_each(|(o, c)| *o += w * c);
        }
    }
    out
}

/// A product of factors in the order in which they act.
#[derive(Clone, Debug)]
pub struct Product {
    /// The factors.
    pub factors: Vec<Factor>,
}

impl Product {
    /// Computes the dense matrix, `n_out × n_in`.
    pub fn dense(&self) -> Mat<f32> {
        let n_in = self.n_in();
        let start = Mat::identity(n_in);
        let rows = self.run(start.as_ref(), crate::Schedule::default().isa, &attlas_num::Scratch::new());
        rows.transpose()
    }

    fn run(
        &self,
        x: MatRef<'_, f32>,
        isa: attlas_num::kernels::Isa,
        scratch: &attlas_num::Scratch,
    ) -> Mat<f32> {
        let n = x.rows();
        let mut now = x.to_mat();
        for f in &self.factors {
            let (n_out, n_in) = f.size();
            let rows = n * f.slices;
            let input = MatRef::new(now.data(), rows, n_in / f.slices.max(1));
            let mut next = Mat::zeros(n, n_out);
            let width = n_out / f.slices.max(1);
            match &f.values {
                Values::Diagonal { table, row } => {
                    for (out, x) in next.data_mut().chunks_exact_mut(width.max(1)).zip(input.iter_rows()) {
                        out.iter_mut().zip(x.iter().zip(table.row(*row))).for_each(|(o, (x, d))| *o = x * d);
                    }
                }
                Values::Matrix(m) => {
                    let op =
                        if f.transposed { Op::N(m.as_ref().as_ref()) } else { Op::T(m.as_ref().as_ref()) };
                    gemm(isa, 1.0, Op::N(input), op, 0.0, next.data_mut(), width, scratch);
                }
                Values::Mixture { .. } => {
                    let m = f.dense();
                    gemm(isa, 1.0, Op::N(input), Op::T(m.as_ref()), 0.0, next.data_mut(), width, scratch);
                }
            }
            now = next;
        }
        now
    }
}

impl Linear for Product {
    fn n_out(&self) -> usize {
        self.factors.last().map_or(0, |f| f.size().0)
    }

    fn n_in(&self) -> usize {
        self.factors.first().map_or(0, |f| f.size().1)
    }

    fn apply(&self, x: MatRef<'_, f32>, out: &mut [f32], cx: Context<'_>) {
        out.copy_from_slice(self.run(x, cx.schedule.isa, cx.scratch).data());
    }

    fn parameters(&self) -> usize {
        parameters([self])
    }
}

/// Counts the numbers stored for all products together, shared ones once.
pub fn parameters<'a>(products: impl IntoIterator<Item = &'a Product>) -> usize {
    let mut seen = std::collections::BTreeMap::new();
    for f in products.into_iter().flat_map(|p| &p.factors) {
        match &f.values {
            Values::Matrix(m) | Values::Diagonal { table: m, .. } => {
                seen.insert(Arc::as_ptr(m) as usize, m.data().len());
            }
            Values::Mixture { cores, weights, .. } => {
                seen.insert(Arc::as_ptr(cores) as usize, cores.iter().map(|c| c.data().len()).sum());
                seen.insert(Arc::as_ptr(weights) as usize, weights.data().len());
            }
        }
    }
    seen.values().sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Workspace;
    use crate::layers::testing::{assert_close, random};
    use attlas_num::linalg::{matmul, matmul_nt};

    #[test]
    fn a_product_acts_as_its_dense_matrix() {
        let (a, b) = (Arc::new(random("a", 3, 7)), random("b", 5, 3));
        let table = Arc::new(random("table", 2, 3));
        let diagonal = Factor {
            values: Values::Diagonal { table: table.clone(), row: 1 },
            transposed: false,
            slices: 1,
        };
        let product =
            Product { factors: vec![Factor::shared(&a, false), diagonal, Factor::matrix(b.clone())] };
        assert_eq!((product.n_in(), product.n_out(), product.parameters()), (7, 5, 21 + 6 + 15));
        let scaled = Mat::from_fn(3, 7, |i, j| table[(1, i)] * a[(i, j)]);
        assert_close(product.dense().data(), matmul(b.as_ref(), scaled.as_ref()).data());
        let x = random("x", 4, 7);
        let mut out = vec![f32::NAN; 20];
        product.apply(x.as_ref(), &mut out, Workspace::single().unwrap().context());
        assert_close(&out, matmul_nt(x.as_ref(), product.dense().as_ref()).data());
    }

    #[test]
    fn slices_are_treated_alike_and_shared_numbers_counted_once() {
        let m = Arc::new(random("m", 3, 2));
        let sliced = Factor { slices: 2, ..Factor::shared(&m, true) };
        assert_eq!(sliced.size(), (4, 6));
        let product = Product { factors: vec![sliced] };
        let dense = product.dense();
        for (i, j) in [(0, 0), (1, 2), (3, 5), (0, 4)] {
            let want = if i / 2 == j / 3 { m[(j % 3, i % 2)] } else { 0.0 };
            assert_eq!(dense[(i, j)], want);
        }
        assert_eq!(parameters([&product, &product.clone()]), 6);
    }

    #[test]
    fn mixtures_are_stacked() {
        let cores = Arc::new(vec![random("g0", 2, 3), random("g1", 2, 3)]);
        let weights = Arc::new(random("w", 4, 2));
        let values = Values::Mixture { cores: cores.clone(), weights: weights.clone(), rows: vec![3, 0] };
        let factor = Factor { values, transposed: true, slices: 1 };
        let dense = factor.dense();
        assert_eq!(factor.size(), (3, 4));
        for (i, row) in [(0, 3), (2, 0)] {
            let want = weights[(row, 0)] * cores[0][(0, 1)] + weights[(row, 1)] * cores[1][(0, 1)];
            assert!((dense[(1, i)] - want).abs() < 1e-6);
        }
    }
}
