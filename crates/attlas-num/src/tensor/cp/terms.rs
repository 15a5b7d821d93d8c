//! A sum of outer products, and its dense form slice by slice.
//!
//! A slice over the last two modes is $A \operatorname{diag}(w) B^\top$, where $w_r$ is the weight of term $r$ times its entries in the
//! leading modes.

use crate::linalg::{Op, gemm};
use crate::tensor::{Error, Result, Tensor};
use crate::{Mat, Real};

/// Sum of outer products: `Σ_r weights[r] · factors[0][:, r] ⊗ factors[1][:, r] ⊗ …`.
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

    /// Returns how many numbers are stored: `R (1 + Σ I_n)`.
    pub fn parameters(&self) -> usize {
        self.rank() * (1 + self.factors.iter().map(Mat::rows).sum::<usize>())
    }

    /// Forms the dense tensor.
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

    /// Returns the same tensor with weights 1: each column is multiplied by the order-th root of its weight, so all
    /// factors have entries of similar size. Negative weights go to the last mode.
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

    /// Converts every number to the other element type.
    pub fn cast<U: Real>(&self) -> Cp<U> {
        Cp {
            weights: self.weights.iter().map(|w| U::from_f64(w.to_f64())).collect(),
            factors: self.factors.iter().map(Mat::cast).collect(),
        }
    }

    pub(super) fn check(&self) -> Result<()> {
        match self.factors.iter().find(|f| f.cols() != self.rank()) {
            Some(odd) => Err(Error::shape("columns of a factor", self.rank(), odd.cols())),
            None => Ok(()),
        }
    }
}

/// Returns the rows and columns of the slices over the last two modes.
fn slice_shape(factors: &[Mat<f64>]) -> (usize, usize) {
    let order = factors.len();
    (if order > 1 { factors[order - 2].rows() } else { 1 }, factors[order - 1].rows())
}

/// Visits the slices over the last two modes of a sum of terms, in row-major order of the leading indices.
pub(super) fn for_each_slice(weights: &[f64], factors: &[Mat<f64>], mut visit: impl FnMut(usize, &[f64])) {
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
        gemm(1.0, Op::N(left.as_ref()), Op::T(last.as_ref()), &mut slice, cols, false);
        visit(k, &slice);
    }
}
