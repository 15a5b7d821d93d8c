//! Second moments of the inputs of a matrix on calibration text, and errors measured by them.
//!
//! With $G = X^\top X / n$ for inputs $x$ of a map $W$, the mean squared error of its outputs is
//! $\operatorname{tr}\big((W - \hat W)\, G\, (W - \hat W)^\top\big) = \lVert (W - \hat W) L \rVert_F^2$ for every
//! $LL^\top = G$. Decompositions of $WL$ are therefore optimal for this text, whereas those of $W$ are optimal for
//! inputs with equal variance in all directions (wang2025svdllm). Directions that the text does not use get a small
//! ridge.

use super::refused;
use crate::{Error, Mat, Result};
use attlas_num::linalg::{Triangle, cholesky, matmul, matmul_tn, solve_triangular_in_place, thin_qr};
use std::sync::Arc;

/// Moments of the inputs of a matrix.
#[derive(Clone, Debug)]
pub struct Moments {
    gram: Mat<f64>,
    mean: Vec<f64>,
}

/// Share of the mean second moment added to all directions by conversions without a parameter for it.
pub const RIDGE: f64 = 1e-6;

impl Moments {
    /// Takes second moments $X^\top X / n$ and means of inputs. An error if sizes do not fit or a number is not finite.
    pub fn new(gram: Mat<f64>, mean: Vec<f64>) -> Result<Self> {
        let n = mean.len();
        if (gram.rows(), gram.cols()) != (n, n) {
            let found = format!("{} × {}", gram.rows(), gram.cols());
            return Err(Error::shape("calibration Gram matrix", format!("{n} × {n}"), found));
        }
        if !gram.data().iter().chain(&mean).all(|x| x.is_finite()) {
            return Err(Error::param("calibration", "a moment that is not finite", "finite activations"));
        }
        Ok(Self { gram, mean })
    }

    /// Returns the width of the inputs.
    pub fn width(&self) -> usize {
        self.mean.len()
    }

    /// Returns $X^\top X / n$.
    pub fn gram(&self) -> &Mat<f64> {
        &self.gram
    }

    /// Computes the lower factor of the second moments plus `ridge` times their mean diagonal; the ridge grows tenfold
    /// while rounding leaves no positive pivot.
    pub fn root(&self, ridge: f64) -> Result<Mat<f64>> {
        let n = self.width();
        let mean = (0..n).map(|i| self.gram[(i, i)]).sum::<f64>() / n.max(1) as f64;
        // A text with zero inputs gives no information: all directions count equally.
        if mean <= 0.0 {
            return Ok(Mat::identity(n));
        }
        let mut share = ridge.max(f64::EPSILON);
        loop {
            let mut shifted = self.gram.clone();
            (0..n).for_each(|i| shifted[(i, i)] += share * mean);
            match cholesky(shifted.as_ref()) {
                Ok(l) => return Ok(l),
                Err(_) if share < 1.0 => share *= 10.0,
                Err(e) => return Err(refused("calibration", e)),
            }
        }
    }

    /// Extends the moments by one more input, always 1, for a bias.
    #[must_use]
    pub fn with_one(&self) -> Self {
        let n = self.width();
        let gram = Mat::from_fn(n + 1, n + 1, |i, j| match (i < n, j < n) {
            (true, true) => self.gram[(i, j)],
            (true, false) => self.mean[i],
            (false, true) => self.mean[j],
            (false, false) => 1.0,
        });
        let mean = self.mean.iter().copied().chain([1.0]).collect();
        Self { gram, mean }
    }

    /// Averages several moments, each scaled to the same trace, so that none outweighs the others.
    pub fn pooled(list: &[Arc<Moments>]) -> Option<Self> {
        let n = list.first()?.width();
        let (mut gram, mut mean) = (Mat::zeros(n, n), vec![0.0; n]);
        for m in list {
            if m.width() != n {
                return None;
            }
            let trace: f64 = (0..n).map(|i| m.gram[(i, i)]).sum();
            let scale = if trace > 0.0 { n as f64 / (trace * list.len() as f64) } else { 0.0 };
            gram.data_mut().iter_mut().zip(m.gram.data()).for_each(|(a, b)| *a += scale * b);
            mean.iter_mut().zip(&m.mean).for_each(|(a, b)| *a += scale.sqrt() * b);
        }
        Some(Self { gram, mean })
    }

    /// Returns the mean squared length of the outputs of a map (`n_out × n_in`).
    pub fn energy(&self, w: &Mat<f64>) -> f64 {
        let through = matmul(w.as_ref(), self.gram.as_ref());
        through.data().iter().zip(w.data()).map(|(a, b)| a * b).sum::<f64>().max(0.0)
    }

    /// Computes the root mean square error of the outputs of `approximate` relative to those of `exact`, both
    /// `n_out × n_in`.
    pub fn relative_error(&self, exact: &Mat<f32>, approximate: &Mat<f32>) -> f64 {
        let wide = exact.cast::<f64>();
        let mut gap = approximate.cast::<f64>();
        gap.data_mut().iter_mut().zip(wide.data()).for_each(|(g, w)| *g -= w);
        let all = self.energy(&wide);
        if all > 0.0 { (self.energy(&gap) / all).sqrt() } else { 0.0 }
    }
}

/// Moments of all blocks of a stack; inputs are rows of its blocks, or columns if blocks are turned.
#[derive(Clone, Debug)]
pub struct Seen {
    /// True if inputs are columns.
    pub turned: bool,
    /// Moments of each block.
    pub each: Vec<Arc<Moments>>,
}

impl Seen {
    /// Computes the lower factor of the mean of all moments.
    pub fn root(&self) -> Result<Mat<f64>> {
        let wrong = || Error::shape("calibration moments", "one width for all blocks", "several, or none");
        Moments::pooled(&self.each).ok_or_else(wrong)?.root(RIDGE)
    }

    /// Weights the inputs of the block by the factor: $L^\top X$, or $XL$ if blocks are turned.
    pub fn weighted(&self, block: &Mat<f32>, root: &Mat<f64>) -> Mat<f64> {
        let wide = block.cast::<f64>();
        if self.turned {
            matmul(wide.as_ref(), root.as_ref())
        } else {
            matmul_tn(root.as_ref(), wide.as_ref())
        }
    }

    /// Splits the basis in the inputs' own coordinates, $L^{-\top} \tilde B = QR$, into an orthonormal basis $Q$ and a
    /// factor $R$ for the cores.
    pub fn unweighted(&self, basis: &Mat<f64>, root: &Mat<f64>) -> Result<(Mat<f64>, Mat<f64>)> {
        let (mut out, cols) = (basis.clone(), basis.cols());
        solve_triangular_in_place(Triangle::LowerTransposed, root.as_ref(), out.data_mut(), cols);
        let qr = thin_qr(out.as_ref()).map_err(|e| refused("calibration", e))?;
        Ok((qr.q, qr.r))
    }

    /// Computes, for block `i` and bases of its inputs and outputs, $B^\top H B$ and $B^\top H X C$, with $X$ as inputs
    /// × outputs and $H$ the block's second moments plus a small ridge.
    pub fn normal(
        &self,
        i: usize,
        block: &Mat<f32>,
        inputs: &Mat<f64>,
        outputs: &Mat<f64>,
    ) -> (Mat<f64>, Mat<f64>) {
        let gram = self.each[i].gram();
        let n = gram.rows();
        let mean = (0..n).map(|j| gram[(j, j)]).sum::<f64>() / n.max(1) as f64;
        let ridge = if mean > 0.0 { RIDGE * mean } else { 1.0 };
        let mut hb = matmul(gram.as_ref(), inputs.as_ref());
        hb.data_mut().iter_mut().zip(inputs.data()).for_each(|(h, b)| *h += ridge * b);
        let wide = block.cast::<f64>();
        let x = if self.turned { wide.transpose() } else { wide };
        let small = matmul_tn(hb.as_ref(), x.as_ref());
        (matmul_tn(inputs.as_ref(), hb.as_ref()), matmul(small.as_ref(), outputs.as_ref()))
    }

    /// Computes the root mean square error of the outputs of all blocks together, relative to the exact outputs.
    pub fn relative_error(&self, blocks: &[Mat<f32>], approximate: impl Fn(usize) -> Mat<f32>) -> f64 {
        let (mut gap, mut all) = (0.0, 0.0);
        for (i, (block, moments)) in blocks.iter().zip(&self.each).enumerate() {
            let map = |m: &Mat<f32>| if self.turned { m.cast::<f64>() } else { m.cast::<f64>().transpose() };
            let (exact, mut other) = (map(block), map(&approximate(i)));
            other.data_mut().iter_mut().zip(exact.data()).for_each(|(a, b)| *a -= b);
            // Each block counts relative to its own outputs.
            let energy = moments.energy(&exact);
            if energy > 0.0 {
                gap += moments.energy(&other) / energy;
                all += 1.0;
            }
        }
        if all > 0.0 { (gap / all).sqrt() } else { 0.0 }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::layers::testing::random;

    /// Moments of rows, by their definition.
    pub(crate) fn moments_of(x: &Mat<f32>) -> Moments {
        let wide = x.cast::<f64>();
        let n = x.rows() as f64;
        let mut gram = matmul_tn(wide.as_ref(), wide.as_ref());
        gram.data_mut().iter_mut().for_each(|g| *g /= n);
        let mean = (0..x.cols()).map(|j| (0..x.rows()).map(|i| wide[(i, j)]).sum::<f64>() / n).collect();
        Moments::new(gram, mean).unwrap()
    }

    #[test]
    fn errors_are_those_of_outputs() {
        let (x, w, other) = (random("x", 30, 6), random("w", 5, 6), random("other", 5, 6));
        let m = moments_of(&x);
        let outputs = |w: &Mat<f32>| attlas_num::linalg::matmul_nt(x.as_ref(), w.as_ref());
        let want = super::super::relative_error(&outputs(&w), &outputs(&other));
        assert!((m.relative_error(&w, &other) / want - 1.0).abs() < 1e-5);
        let root = m.root(0.0).unwrap();
        let direct = matmul(w.cast::<f64>().as_ref(), root.as_ref()).frobenius();
        assert!((direct / m.energy(&w.cast()).sqrt() - 1.0).abs() < 1e-9);
    }

    #[test]
    fn a_bias_is_one_more_input() {
        let x = random("x", 30, 4);
        let wider = Mat::from_fn(30, 5, |i, j| if j < 4 { x[(i, j)] } else { 1.0 });
        let (a, b) = (moments_of(&x).with_one(), moments_of(&wider));
        assert!(a.gram().data().iter().zip(b.gram().data()).all(|(a, b)| (a - b).abs() < 1e-9));
        assert_eq!(a.width(), 5);
    }

    #[test]
    fn inputs_that_use_few_directions_or_none_have_a_root() {
        let few = matmul(random("few", 30, 2).as_ref(), random("directions", 2, 6).as_ref());
        let m = moments_of(&few);
        let root = m.root(0.0).unwrap();
        let back = attlas_num::linalg::matmul_nt(root.as_ref(), root.as_ref());
        let size = m.gram().frobenius();
        assert!(back.data().iter().zip(m.gram().data()).all(|(a, b)| (a - b).abs() < 1e-6 * size));
        let none = Moments::new(Mat::zeros(3, 3), vec![0.0; 3]).unwrap();
        assert_eq!(none.root(0.1).unwrap(), Mat::identity(3));
        assert!(Moments::new(Mat::zeros(3, 2), vec![0.0; 3]).is_err());
        assert!(Moments::new(Mat::from_fn(1, 1, |_, _| f64::NAN), vec![0.0]).is_err());
    }
}
