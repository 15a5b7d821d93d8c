//! Linear layers whose weights stay as they are stored.

use crate::tensor::Tensor;
use attlas_num::kernels::quant::{Isa, Job, products};
use attlas_num::{MatRef, Scratch};

/// $y = W x + b$ with $W$ as `[out, in]` in stored form.
#[derive(Clone, Debug)]
pub struct Linear {
    weight: Tensor,
    bias: Option<Vec<f32>>,
}

impl Linear {
    /// A layer; `None` if the weight is no matrix or the bias has another length than its rows.
    pub fn new(weight: Tensor, bias: Option<Vec<f32>>) -> Option<Self> {
        let fits = weight.shape().len() == 2 && bias.as_ref().is_none_or(|b| b.len() == weight.rows());
        fits.then_some(Self { weight, bias })
    }

    /// Width of the input.
    pub fn inputs(&self) -> usize {
        self.weight.cols()
    }

    /// Width of the output.
    pub fn outputs(&self) -> usize {
        self.weight.rows()
    }

    /// The weights, `[out, in]`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// The bias, if there is one.
    pub fn bias(&self) -> Option<&[f32]> {
        self.bias.as_deref()
    }

    /// Applies the layer to every row of `x`; `out` is `x.rows() × outputs`, contiguous. Panics if the
    /// shapes do not belong together.
    ///
    /// Runs on the current rayon pool; a caller that applies many layers in a row does well to run inside
    /// one (`ThreadPool::install`), where starting a parallel pass costs least.
    pub fn apply(&self, x: MatRef<'_, f32>, out: &mut [f32], scratch: &Scratch) {
        apply_all(&mut [(self, out)], x, scratch);
    }
}

impl attlas::layer::Linear for Linear {
    fn n_out(&self) -> usize {
        self.outputs()
    }

    fn n_in(&self) -> usize {
        self.inputs()
    }

    fn apply(&self, x: MatRef<'_, f32>, out: &mut [f32], cx: attlas::Context<'_>) {
        apply_all(&mut [(self, out)], x, cx.scratch);
    }

    fn parameters(&self) -> usize {
        self.outputs() * self.inputs() + self.bias.as_ref().map_or(0, Vec::len)
    }
}

/// Applies several layers to the same input in one parallel pass.
pub fn apply_all(layers: &mut [(&Linear, &mut [f32])], x: MatRef<'_, f32>, scratch: &Scratch) {
    let mut jobs: Vec<Job<'_>> =
        layers.iter_mut().map(|(layer, out)| Job { weight: layer.weight.as_weight(), out }).collect();
    products(Isa::best(), x, &mut jobs, scratch);
    for (layer, out) in layers {
        if let Some(bias) = &layer.bias {
            for row in out.chunks_exact_mut(bias.len().max(1)) {
                row.iter_mut().zip(bias).for_each(|(y, b)| *y += b);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bias_is_added_to_every_row() {
        let weight = Tensor::from_f32(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], vec![3, 2]).unwrap();
        let layer = Linear::new(weight.clone(), Some(vec![0.5, 0.0, -1.0])).unwrap();
        let x = [1.0, 1.0, 0.0, 2.0];
        let mut out = [f32::NAN; 6];
        layer.apply(MatRef::new(&x, 2, 2), &mut out, &Scratch::poisoned());
        assert_eq!(out, [3.5, 7.0, 10.0, 4.5, 8.0, 11.0]);
        assert!(Linear::new(weight, Some(vec![0.0; 2])).is_none());
    }
}
