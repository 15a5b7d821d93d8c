//! Products of a tensor that alternating least squares needs, and their implementation for dense tensors.

use super::terms::for_each_slice;
use crate::tensor::Tensor;
use crate::tensor::mttkrp::{SweepCache, mttkrp};
use crate::tensor::small::mode_gram;
use crate::{DType, Mat};

/// Operations that allow a tensor to be decomposed without being formed.
///
/// A dense tensor is one implementation. Another is a tensor known through factors, such as a stack of
/// products $W_h U_h^\top$, where all of this is cheap and the dense form is not.
pub trait Target {
    /// Returns the dimensions.
    fn shape(&self) -> Vec<usize>;

    /// Returns `‖T‖²`.
    fn norm_squared(&self) -> f64;

    /// Computes `T₍ₙ₎` times the Khatri–Rao product of the other factors, `I_n × R`.
    fn mttkrp(&mut self, factors: &[Mat<f64>], mode: usize) -> Mat<f64>;

    /// Computes the same inside a sweep, which requests modes 0, 1, … in turn and changes only the factor of the mode
    /// just requested: an implementation may keep contractions from one call to the next.
    fn mttkrp_in_sweep(&mut self, factors: &[Mat<f64>], mode: usize) -> Mat<f64> {
        self.mttkrp(factors, mode)
    }

    /// Computes `‖T − T̂‖²` entry by entry, if that is possible; used when cancellation hides small errors.
    fn residual_squared(&mut self, _weights: &[f64], _factors: &[Mat<f64>]) -> Option<f64> {
        None
    }

    /// Returns the Gram matrix `T₍ₙ₎ T₍ₙ₎ᵀ`, needed only by [`Init::Hosvd`](super::Init::Hosvd); without it that start
    /// is random.
    fn gram(&mut self, _mode: usize) -> Option<Mat<f64>> {
        None
    }

    /// Returns the precision of the data, which sets the default tolerance and the smallest ridge.
    fn dtype(&self) -> DType {
        DType::F64
    }
}

/// Tensor that is stored densely.
pub(super) struct Dense<'a> {
    pub(super) t: &'a Tensor<f64>,
    pub(super) cache: SweepCache,
    pub(super) dtype: DType,
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
        Some(mode_gram(self.t, mode))
    }

    fn dtype(&self) -> DType {
        self.dtype
    }
}
