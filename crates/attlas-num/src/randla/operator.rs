//! Matrices known only by their action on blocks of vectors, and their operator norm.

use super::gaussian_matrix;
use crate::linalg::{matmul, matmul_nt, matmul_tn};
use crate::rng::Rng;
use crate::{DType, Mat, MatRef, Real};

/// Linear map given by its action and that of its transpose.
pub trait LinearOperator {
    /// Number of rows.
    fn rows(&self) -> usize;
    /// Number of columns.
    fn cols(&self) -> usize;
    /// Computes $AX$ for a block of columns.
    fn apply(&self, x: MatRef<'_, f64>) -> Mat<f64>;
    /// Computes $A^\top Y$ for a block of columns.
    fn apply_t(&self, y: MatRef<'_, f64>) -> Mat<f64>;

    /// Forms the matrix itself, from its action on the identity of the smaller side.
    fn to_dense(&self) -> Mat<f64> {
        if self.cols() <= self.rows() {
            self.apply(Mat::identity(self.cols()).as_ref())
        } else {
            self.apply_t(Mat::identity(self.rows()).as_ref()).transpose()
        }
    }
}

impl<T: Real> LinearOperator for MatRef<'_, T> {
    fn rows(&self) -> usize {
        MatRef::rows(self)
    }

    fn cols(&self) -> usize {
        MatRef::cols(self)
    }

    fn apply(&self, x: MatRef<'_, f64>) -> Mat<f64> {
        match in_double(self) {
            Some(a) => matmul(a, x),
            None => matmul(crate::linalg::to_f64(*self).as_ref(), x),
        }
    }

    fn apply_t(&self, y: MatRef<'_, f64>) -> Mat<f64> {
        match in_double(self) {
            Some(a) => matmul_tn(a, y),
            None => matmul_tn(crate::linalg::to_f64(*self).as_ref(), y),
        }
    }
}

/// Returns the same view if it is already one of `f64`.
fn in_double<'a, T: Real>(a: &MatRef<'a, T>) -> Option<MatRef<'a, f64>> {
    let data = (T::DTYPE == DType::F64).then(|| bytemuck::cast_slice(a.data()))?;
    MatRef::with_stride(data, a.rows(), a.cols(), a.stride())
}

impl LinearOperator for Mat<f64> {
    fn rows(&self) -> usize {
        Mat::rows(self)
    }

    fn cols(&self) -> usize {
        Mat::cols(self)
    }

    fn apply(&self, x: MatRef<'_, f64>) -> Mat<f64> {
        matmul(self.as_ref(), x)
    }

    fn apply_t(&self, y: MatRef<'_, f64>) -> Mat<f64> {
        matmul_tn(self.as_ref(), y)
    }
}

/// Operator made of two closures.
pub struct FnOperator<F, G> {
    /// Number of rows.
    pub rows: usize,
    /// Number of columns.
    pub cols: usize,
    /// $X \mapsto AX$.
    pub apply: F,
    /// $Y \mapsto A^\top Y$.
    pub apply_t: G,
}

impl<F, G> std::fmt::Debug for FnOperator<F, G> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FnOperator")
            .field("rows", &self.rows)
            .field("cols", &self.cols)
            .finish_non_exhaustive()
    }
}

impl<F, G> LinearOperator for FnOperator<F, G>
where
    F: Fn(MatRef<'_, f64>) -> Mat<f64>,
    G: Fn(MatRef<'_, f64>) -> Mat<f64>,
{
    fn rows(&self) -> usize {
        self.rows
    }

    fn cols(&self) -> usize {
        self.cols
    }

    fn apply(&self, x: MatRef<'_, f64>) -> Mat<f64> {
        (self.apply)(x)
    }

    fn apply_t(&self, y: MatRef<'_, f64>) -> Mat<f64> {
        (self.apply_t)(y)
    }
}

/// $L R^\top$, never formed.
#[derive(Clone, Copy, Debug)]
pub struct Product<'a> {
    /// $m \times r$.
    pub left: MatRef<'a, f64>,
    /// $n \times r$.
    pub right: MatRef<'a, f64>,
}

impl LinearOperator for Product<'_> {
    fn rows(&self) -> usize {
        self.left.rows()
    }

    fn cols(&self) -> usize {
        self.right.rows()
    }

    fn apply(&self, x: MatRef<'_, f64>) -> Mat<f64> {
        matmul(self.left, matmul_tn(self.right, x).as_ref())
    }

    fn apply_t(&self, y: MatRef<'_, f64>) -> Mat<f64> {
        matmul(self.right, matmul_tn(self.left, y).as_ref())
    }

    fn to_dense(&self) -> Mat<f64> {
        matmul_nt(self.left, self.right)
    }
}

/// Result of a power iteration.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormEstimate {
    /// Never more than the largest singular value, up to rounding.
    pub value: f64,
    /// Products with $A^\top A$ made.
    pub steps: usize,
    /// True if the value settled before the steps ran out.
    pub converged: bool,
}

/// Steps of power iteration before it gives up.
const MAX_STEPS: usize = 200;

/// Estimates the largest singular value by power iteration on $A^\top A$ from a Gaussian start.
///
/// Stops when the relative change has stayed at most `tol` three times running.
pub fn operator_norm<A: LinearOperator + ?Sized>(a: &A, tol: f64, rng: &mut Rng) -> NormEstimate {
    let mut x = gaussian_matrix::<f64>(rng, a.cols(), 1);
    normalise(x.data_mut());
    let mut value = 0.0;
    let mut settled = 0;
    for steps in 1..=MAX_STEPS {
        let mut y = a.apply(x.as_ref());
        let now = normalise(y.data_mut());
        if now == 0.0 || now.is_nan() {
            return NormEstimate { value: now, steps, converged: now == 0.0 };
        }
        settled = if (now - value).abs() <= tol * now { settled + 1 } else { 0 };
        // Rounding can lower a settled value by a few units; the largest seen is still a lower bound.
        value = f64::max(value, now);
        if settled == 3 {
            return NormEstimate { value, steps, converged: true };
        }
        x = a.apply_t(y.as_ref());
        normalise(x.data_mut());
    }
    NormEstimate { value, steps: MAX_STEPS, converged: false }
}

/// Divides by the 2-norm and returns it; zero and NaN stay as they are.
fn normalise(x: &mut [f64]) -> f64 {
    let max = x.iter().fold(0.0, |m: f64, v| m.max(v.abs()));
    if x.iter().any(|v| v.is_nan()) {
        return f64::NAN;
    }
    if max == 0.0 {
        return 0.0;
    }
    let root = x.iter().map(|v| (v / max) * (v / max)).sum::<f64>().sqrt();
    x.iter_mut().for_each(|v| *v = *v / max / root);
    max * root
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linalg::singular_values;
    use crate::linalg::testing::*;
    use crate::rng::StreamKey;

    fn norm(a: &Mat<f64>, tol: f64) -> NormEstimate {
        operator_norm(a, tol, &mut StreamKey::new(1).rng())
    }

    #[test]
    fn the_norm_is_the_largest_singular_value() {
        for (m, n) in [(1, 1), (30, 20), (20, 30), (64, 64)] {
            let sigma: Vec<f64> = (0..m.min(n)).map(|i| 0.7f64.powi(i as i32)).collect();
            let a = with_spectrum(m, n, &sigma, 3);
            let found = norm(&a, 1e-8);
            let top = singular_values(a.as_ref()).unwrap()[0];
            assert!(found.converged && (found.value / top - 1.0).abs() < 1e-7, "{found:?}");
            assert!(found.value <= top * (1.0 + 1e-14));
        }
    }

    #[test]
    fn the_value_is_a_lower_bound_even_without_a_gap() {
        for seed in 0..20 {
            let a = gaussian(50, 50, seed);
            let top = singular_values(a.as_ref()).unwrap()[0];
            let found = norm(&a, 1e-3);
            assert!(found.value <= top * (1.0 + 1e-14) && found.value >= 0.9 * top);
        }
    }

    #[test]
    fn rank_one_needs_one_step() {
        let (u, v) = (gaussian(12, 1, 1), gaussian(9, 1, 2));
        let a = matmul_nt(u.as_ref(), v.as_ref());
        let found = norm(&a, 1e-13);
        // One step to align, three more to see that nothing moves.
        assert!(found.converged && found.steps <= 5, "{found:?}");
        assert!((found.value / (u.frobenius() * v.frobenius()) - 1.0).abs() < 1e-14);
    }

    #[test]
    fn degenerate_operators_have_norms() {
        for (m, n) in [(0, 0), (3, 0), (0, 3), (4, 5)] {
            assert_eq!(norm(&Mat::zeros(m, n), 1e-8).value, 0.0);
        }
        let nan = norm(&spoiled(4), 1e-8);
        assert!(nan.value.is_nan() && !nan.converged);
        let huge = Mat::from_fn(3, 3, |i, j| if i == j { 1e300 } else { 0.0 });
        assert!((norm(&huge, 1e-8).value / 1e300 - 1.0).abs() < 1e-14);
    }

    #[test]
    fn implicit_operators_agree_with_their_matrices() {
        let (l, r) = (gaussian(8, 3, 1), gaussian(6, 3, 2));
        let product = Product { left: l.as_ref(), right: r.as_ref() };
        let dense = product.to_dense();
        let closures = FnOperator {
            rows: 8,
            cols: 6,
            apply: |x: MatRef<'_, f64>| product.apply(x),
            apply_t: |y: MatRef<'_, f64>| product.apply_t(y),
        };
        assert!(distance(&closures.to_dense(), &dense) < 1e-14);
        let y = gaussian(8, 2, 3);
        assert!(distance(&closures.apply_t(y.as_ref()), &dense.apply_t(y.as_ref())) < 1e-13);
        let single = dense.cast::<f32>();
        for (view, tol) in
            [(dense.as_ref().apply_t(y.as_ref()), 1e-13), (single.as_ref().apply_t(y.as_ref()), 1e-4)]
        {
            assert!(distance(&view, &dense.apply_t(y.as_ref())) < tol);
        }
    }
}
