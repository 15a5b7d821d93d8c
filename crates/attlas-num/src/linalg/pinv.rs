//! Pseudo-inverses: by singular values, and by iterations made of matrix products alone.
//!
//! From $Z_0 = C^\top / (\|C\|_1 \|C\|_\infty)$ the eigenvalues of $X = CZ$ lie in $[0, 1]$, and each step maps
//! every error $e = 1 - x$ by the polynomial in the table. Small eigenvalues grow by the factor in the last
//! column, so a fixed number of steps inverts large singular values and leaves small ones alone: a
//! spectral filter.
//!
//! | iteration | step | products | $e \mapsto$ | growth |
//! |---|---|---|---|---|
//! | [`Razavi`](Iteration::Razavi) | $Z(13I - X(15I - X(7I - X)))/4$ | 4 | $(3e^3 + e^4)/4$ | 13/4 |
//! | [`NewtonSchulz`](Iteration::NewtonSchulz) | $Z(2I - X)$ | 2 | $e^2$ | 2 |
//! | [`Chebyshev`](Iteration::Chebyshev) | $Z(3I - X(3I - X))$ | 3 | $e^3$ | 3 |
//! | [`Hyperpower7`](Iteration::Hyperpower7) | $Z(I + (E + E^4)(I + E + E^2))$ | 5 | $e^7$ | 7 |
//!
//! Razavi et al. (2014) is what Nyströmformer uses; it is the least efficient of the four.

use super::svd::svd_fast;
use super::{LinalgError, Result, matmul, norm_inf, norm_one, square, to_scaled};
use crate::{Mat, MatRef, Real};

/// Computes $A^+$ by singular values, dropping those at most `rcond` times the largest; also returns the rank kept.
pub fn pinv<T: Real>(a: MatRef<'_, T>, rcond: f64) -> Result<(Mat<f64>, usize)> {
    Ok(svd_fast(a)?.pinv(rcond))
}

/// Iteration for the inverse; see the table in the module documentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Iteration {
    /// Third order, four products.
    Razavi,
    /// Second order, two products.
    NewtonSchulz,
    /// Third order, three products.
    Chebyshev,
    /// Seventh order, five products.
    Hyperpower7,
}

impl Iteration {
    /// Matrix products per step.
    pub fn products(self) -> usize {
        match self {
            Self::Razavi => 4,
            Self::NewtonSchulz => 2,
            Self::Chebyshev => 3,
            Self::Hyperpower7 => 5,
        }
    }

    /// Returns the largest number of steps. On a singular matrix rounding errors in the null space grow like small
    /// eigenvalues; the limits keep that growth below $3.25^{25} \approx 6 \cdot 10^{12}$.
    pub fn max_steps(self) -> usize {
        match self {
            Self::Razavi => 25,
            Self::NewtonSchulz => 42,
            Self::Chebyshev => 26,
            Self::Hyperpower7 => 15,
        }
    }

    fn step(self, z: &Mat<f64>, x: &Mat<f64>) -> Mat<f64> {
        let times = |a: &Mat<f64>, b: &Mat<f64>| matmul(a.as_ref(), b.as_ref());
        // c I − a
        let from = |c: f64, mut a: Mat<f64>| {
            a.data_mut().iter_mut().for_each(|v| *v = -*v);
            (0..a.rows()).for_each(|i| a[(i, i)] += c);
            a
        };
        match self {
            Self::NewtonSchulz => times(z, &from(2.0, x.clone())),
            Self::Chebyshev => times(z, &from(3.0, times(x, &from(3.0, x.clone())))),
            Self::Razavi => {
                let inner = from(15.0, times(x, &from(7.0, x.clone())));
                let mut next = times(z, &from(13.0, times(x, &inner)));
                next.data_mut().iter_mut().for_each(|v| *v *= 0.25);
                next
            }
            Self::Hyperpower7 => {
                let e = from(1.0, x.clone());
                let e2 = times(&e, &e);
                let mut left = times(&e2, &e2);
                let mut right = e2;
                for (i, &v) in e.data().iter().enumerate() {
                    left.data_mut()[i] += v;
                    right.data_mut()[i] += v;
                }
                (0..e.rows()).for_each(|i| right[(i, i)] += 1.0);
                let mut factor = times(&left, &right);
                (0..e.rows()).for_each(|i| factor[(i, i)] += 1.0);
                times(z, &factor)
            }
        }
    }
}

/// Starting point of an iteration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PinvStart {
    /// $C^\top / (\|C\|_1 \|C\|_\infty)$: converges for every matrix.
    Scaled,
    /// The identity: better for a symmetric matrix with spectrum in $(0, 1]$, and for nothing else.
    Identity,
}

/// Result of an iteration.
#[derive(Clone, Debug)]
pub struct PinvReport {
    /// The approximate (pseudo-)inverse.
    pub inverse: Mat<f64>,
    /// Steps made.
    pub steps: usize,
    /// $\|I - CZ\|_F$ of the result; about $\sqrt{m - \mathrm{rank}}$ for a singular matrix.
    pub residual: f64,
    /// True if [`Iteration::max_steps`] cut the number of steps.
    pub capped: bool,
}

/// Inverts a square matrix in at most `steps` steps, stopping once $\|I - CZ\|_F \le$ `tol`.
pub fn iterative_pinv<T: Real>(
    c: MatRef<'_, T>,
    iteration: Iteration,
    steps: usize,
    tol: f64,
    start: PinvStart,
) -> Result<PinvReport> {
    let m = square(c, "columns of a square matrix")?;
    let (c, scale) = to_scaled(c, "the square matrix")?;
    let bound = norm_one(c.as_ref()) * norm_inf(c.as_ref());
    if bound == 0.0 {
        let residual = (m as f64).sqrt();
        return Ok(PinvReport { inverse: Mat::zeros(m, m), steps: 0, residual, capped: false });
    }
    let (c, mut z, scale) = match start {
        PinvStart::Scaled => {
            let mut z = c.transpose();
            z.data_mut().iter_mut().for_each(|v| *v /= bound);
            (c, z, scale)
        }
        // The identity is meant for the caller's matrix, not for a scaled one.
        PinvStart::Identity => {
            let mut c = c;
            c.data_mut().iter_mut().for_each(|v| *v *= scale);
            (c, Mat::identity(m), 1.0)
        }
    };
    let allowed = steps.min(iteration.max_steps());
    let mut done = 0;
    let residual = loop {
        let x = matmul(c.as_ref(), z.as_ref());
        let residual = distance_from_identity(&x);
        if !residual.is_finite() {
            return Err(LinalgError::NoConvergence { iters: done });
        }
        if residual <= tol || done == allowed {
            break residual;
        }
        z = iteration.step(&z, &x);
        done += 1;
    };
    z.data_mut().iter_mut().for_each(|v| *v /= scale);
    let capped = allowed < steps && done == allowed && residual > tol;
    Ok(PinvReport { inverse: z, steps: done, residual, capped })
}

fn distance_from_identity(x: &Mat<f64>) -> f64 {
    let mut sum = 0.0;
    for i in 0..x.rows() {
        for (j, v) in x.row(i).iter().enumerate() {
            let e = if i == j { 1.0 - v } else { *v };
            sum += e * e;
        }
    }
    sum.sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linalg::matmul_nt;
    use crate::linalg::testing::*;

    const ALL: [Iteration; 4] =
        [Iteration::Razavi, Iteration::NewtonSchulz, Iteration::Chebyshev, Iteration::Hyperpower7];

    /// Diagonal matrix whose largest entry is 1, so that $Z_0 = C$ and $x_0 = \sigma^2$.
    fn diagonal(x: &[f64]) -> Mat<f64> {
        Mat::from_fn(x.len(), x.len(), |i, j| if i == j { x[i].sqrt() } else { 0.0 })
    }

    fn filtered(x: &[f64], iteration: Iteration, steps: usize) -> Vec<f64> {
        let c = diagonal(x);
        let z = iterative_pinv(c.as_ref(), iteration, steps, 0.0, PinvStart::Scaled).unwrap().inverse;
        (0..x.len()).map(|i| z[(i, i)] * c[(i, i)]).collect()
    }

    #[test]
    fn one_step_maps_errors_as_tabulated() {
        let x = [1.0, 0.9, 0.5, 0.1, 1e-3];
        let map = |iteration, e: f64| match iteration {
            Iteration::Razavi => (3.0 * e.powi(3) + e.powi(4)) / 4.0,
            Iteration::NewtonSchulz => e * e,
            Iteration::Chebyshev => e.powi(3),
            Iteration::Hyperpower7 => e.powi(7),
        };
        for iteration in ALL {
            for (x0, x1) in x.iter().zip(filtered(&x, iteration, 1)) {
                let want = 1.0 - map(iteration, 1.0 - x0);
                assert!((x1 - want).abs() < 1e-14, "{iteration:?} at {x0}");
            }
        }
    }

    #[test]
    fn tiny_eigenvalues_grow_by_the_tabulated_factor() {
        for (iteration, per_product) in ALL.into_iter().zip([1.34, 1.41, 1.44, 1.48]) {
            let growth = filtered(&[1.0, 1e-9], iteration, 1)[1] / 1e-9;
            let root = growth.powf(1.0 / iteration.products() as f64);
            assert!((root - per_product).abs() < 0.005, "{iteration:?}: {root}");
        }
    }

    #[test]
    fn six_razavi_steps_are_the_tabulated_filter() {
        let found = filtered(&[1.0, 1e-2, 3e-3, 1e-3, 3e-4, 1e-4], Iteration::Razavi, 6);
        for (got, want) in found.iter().zip([1.0, 1.000, 0.967, 0.687, 0.297, 0.111]) {
            assert!((got - want).abs() <= 5.1e-4, "{got} against {want}");
        }
    }

    #[test]
    fn every_iteration_inverts_a_nonsingular_matrix() {
        let sigma: Vec<f64> = (0..12).map(|i| 1.0 + f64::from(i) * 0.4).collect();
        let c = with_spectrum(12, 12, &sigma, 1);
        let (exact, rank) = pinv(c.as_ref(), 1e-14).unwrap();
        assert_eq!(rank, 12);
        for iteration in ALL {
            let r = iterative_pinv(c.as_ref(), iteration, 40, 1e-12, PinvStart::Scaled).unwrap();
            assert!(r.residual <= 1e-12 && !r.capped, "{iteration:?}: {r:?}");
            assert!(distance(&r.inverse, &exact) < 1e-12);
        }
    }

    #[test]
    fn the_identity_starts_a_normalised_matrix_faster() {
        let sigma: Vec<f64> = (0..10).map(|i| 1.0 - 0.08 * f64::from(i)).collect();
        let q = crate::linalg::thin_qr(gaussian(10, 10, 3).as_ref()).unwrap().q;
        let scaled = Mat::from_fn(10, 10, |i, j| q[(i, j)] * sigma[j]);
        let c = matmul_nt(scaled.as_ref(), q.as_ref());
        let run = |start| iterative_pinv(c.as_ref(), Iteration::Razavi, 25, 1e-10, start).unwrap();
        assert!(run(PinvStart::Identity).steps < run(PinvStart::Scaled).steps);
        // Started outside its region, the iteration diverges and reports it.
        let big = Mat::from_fn(3, 3, |i, j| if i == j { 50.0 } else { 0.0 });
        let r = iterative_pinv(big.as_ref(), Iteration::Hyperpower7, 15, 0.0, PinvStart::Identity);
        assert!(matches!(r, Err(LinalgError::NoConvergence { .. })));
    }

    #[test]
    fn singular_matrices_stay_bounded_because_steps_are_capped() {
        let sigma: Vec<f64> = (0..32).map(|i| 1.0 + f64::from(i % 4)).collect();
        let c = with_spectrum(64, 64, &sigma, 8);
        let (exact, rank) = pinv(c.as_ref(), 1e-12).unwrap();
        assert_eq!(rank, 32);
        for iteration in ALL {
            let r = iterative_pinv(c.as_ref(), iteration, 1000, 0.0, PinvStart::Scaled).unwrap();
            assert!(r.capped && r.steps == iteration.max_steps());
            // Noise of relative size u in the null space of Z₀, grown by 6e12.
            assert!(distance(&r.inverse, &exact) < 1e-2 * exact.frobenius(), "{iteration:?}");
            assert!((r.residual - 32f64.sqrt()).abs() < 1e-2);
        }
    }

    #[test]
    fn degenerate_matrices_have_pseudo_inverses() {
        for n in [0, 1, 4] {
            let zero = Mat::<f64>::zeros(n, n);
            assert_eq!(pinv(zero.as_ref(), 1e-3).unwrap(), (zero.clone(), 0));
            let r = iterative_pinv(zero.as_ref(), Iteration::Razavi, 6, 0.0, PinvStart::Scaled).unwrap();
            assert!(r.inverse == zero && r.residual == (n as f64).sqrt());
        }
        let ones = Mat::from_fn(4, 4, |_, _| 1.0);
        let (p, rank) = pinv(ones.as_ref(), 1e-12).unwrap();
        assert!(rank == 1 && p.data().iter().all(|v| (v - 0.0625).abs() < 1e-16));
        let r = iterative_pinv(ones.as_ref(), Iteration::Chebyshev, 6, 0.0, PinvStart::Scaled).unwrap();
        assert!(r.inverse.data().iter().all(|v| (v - 0.0625).abs() < 1e-15));
        for s in [1e300, 1e-300] {
            let c = Mat::from_vec(vec![2.0 * s, 0.0, 0.0, s], 2, 2);
            let r = iterative_pinv(c.as_ref(), Iteration::Hyperpower7, 9, 1e-13, PinvStart::Scaled).unwrap();
            assert!((r.inverse[(0, 0)] * s - 0.5).abs() < 1e-12);
        }
        let nan = spoiled(4);
        assert!(pinv(nan.as_ref(), 0.0).is_err());
        assert!(iterative_pinv(nan.as_ref(), Iteration::Razavi, 6, 0.0, PinvStart::Scaled).is_err());
        let rectangular = pinv(gaussian(5, 3, 1).as_ref(), 1e-12).unwrap();
        let back = matmul(rectangular.0.as_ref(), gaussian(5, 3, 1).as_ref());
        assert!(distance(&back, &Mat::identity(3)) < 1e-13);
    }
}
