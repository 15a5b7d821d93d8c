//! All monomials of a degree, weighted so that inner products are powers.
//!
//! $(\langle x, y\rangle + \alpha)^p = \sum_{|n| = p} \binom{p}{n} x'^n y'^n$ with $x' = [x; \sqrt\alpha]$, so the
//! features are $\sqrt{p!/\prod_c n_c!}\, x'^n$. At $p = 2$: squares and $\sqrt2$ times products.

use super::{normalise_into, row_scale};
use crate::mat::{MatRef, Real};
use crate::sketch::features::{Constants, MapOptions, Side, SignedFeatures, check_signed_call};
use crate::sketch::{SketchError, ensure};

/// Largest number of monomials allowed.
const MAX_FEATURES: usize = 1 << 20;

/// Exact features of $((\mathrm{scale}\,\langle q, k\rangle) + \alpha)^p$.
#[derive(Clone, Debug)]
pub struct ExactPolynomial {
    d: usize,
    degree: u32,
    alpha: f64,
    scale: f64,
    constants: Constants,
    /// Coordinates of each monomial, `degree` at a time, in increasing order.
    monomials: Vec<u32>,
    weights: Vec<f64>,
}

impl ExactPolynomial {
    /// Builds the map for rows of length `d`. Degrees 1 to 8, at most 2²⁰ monomials.
    pub fn new(d: usize, degree: u32, alpha: f64, options: MapOptions) -> Result<Self, SketchError> {
        ensure(options.scale > 0.0 && options.scale.is_finite(), "scale", options.scale, "positive")?;
        ensure((1..=8).contains(&degree), "degree", f64::from(degree), "1 to 8")?;
        ensure(alpha >= 0.0 && alpha.is_finite(), "alpha", alpha, "finite and not negative")?;
        let inputs = d + usize::from(alpha > 0.0);
        ensure(inputs > 0, "d", 0.0, "at least 1")?;
        let mut count = 1.0;
        for i in 0..degree {
            count *= (inputs as f64 + f64::from(i)) / (f64::from(i) + 1.0);
        }
        ensure(count <= MAX_FEATURES as f64, "monomials", count, "at most 2²⁰")?;
        let p = degree as usize;
        let (mut monomials, mut weights) = (Vec::new(), Vec::new());
        let mut index = vec![0u32; p];
        loop {
            monomials.extend_from_slice(&index);
            weights.push(multinomial(&index).sqrt());
            // The next non-decreasing sequence.
            let Some(last) = (0..p).rev().find(|&i| (index[i] as usize) + 1 < inputs) else { break };
            let next = index[last] + 1;
            index[last..].fill(next);
        }
        let MapOptions { scale, constants } = options;
        Ok(Self { d, degree, alpha, scale, constants, monomials, weights })
    }
}

/// Computes $p! / \prod_c n_c!$ for a non-decreasing sequence of coordinates.
fn multinomial(index: &[u32]) -> f64 {
    let (mut result, mut run) = (1.0, 0.0);
    for (i, &c) in index.iter().enumerate() {
        run = if i > 0 && index[i - 1] == c { run + 1.0 } else { 1.0 };
        result *= (i + 1) as f64 / run;
    }
    result
}

impl<T: Real> SignedFeatures<T> for ExactPolynomial {
    fn input_dim(&self) -> usize {
        self.d
    }

    fn num_features(&self) -> usize {
        self.weights.len()
    }

    fn signed_features(&self, x: MatRef<'_, T>, side: Side, out: &mut [T], log_scale: &mut [T]) {
        let m = self.weights.len();
        check_signed_call(x, self.d, out, m, log_scale);
        let p = self.degree as usize;
        // √scale goes into the logarithm, so √α must be divided by it.
        let extra = (self.alpha / self.scale).sqrt();
        let mut unit = vec![0.0; self.d + usize::from(self.alpha > 0.0)];
        for ((row, out), log_scale) in x.iter_rows().zip(out.chunks_exact_mut(m)).zip(log_scale) {
            let log = normalise_into(row, extra, &mut unit) + 0.5 * self.scale.ln();
            for ((o, index), weight) in out.iter_mut().zip(self.monomials.chunks_exact(p)).zip(&self.weights)
            {
                let value = index.iter().fold(*weight, |v, &c| v * unit[c as usize]);
                *o = T::from_f64(value);
            }
            *log_scale = row_scale(f64::from(self.degree) * log, side, self.constants);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sketch::testing::signed_kernel_of;

    #[test]
    fn features_give_the_kernel_to_rounding() {
        let x = [1.0, -0.5, 2.0, 0.25];
        let y = [0.5, 1.5, -1.0, 3.0];
        let inner: f64 = x.iter().zip(&y).map(|(a, b)| a * b).sum();
        for degree in 1..=8 {
            for alpha in [0.0, 0.7] {
                for scale in [1.0, 0.5] {
                    let options = MapOptions { scale, ..Default::default() };
                    let map = ExactPolynomial::new(4, degree, alpha, options).unwrap();
                    let exact = (scale * inner + alpha).powi(degree as i32);
                    let size: f64 = 5.4 * 3.6 + 1.0;
                    let tol = 64.0 * f64::EPSILON * size.powi(degree as i32);
                    assert!(
                        (signed_kernel_of(&map, &x, &y) - exact).abs() <= tol,
                        "{degree} {alpha} {scale}"
                    );
                }
            }
        }
    }

    #[test]
    fn the_numbers_of_monomials_are_binomials() {
        let len = |d, p| {
            let map = ExactPolynomial::new(d, p, 0.0, MapOptions::default()).unwrap();
            SignedFeatures::<f32>::num_features(&map)
        };
        assert_eq!([len(64, 2), len(16, 4), len(1, 6), len(3, 1)], [2080, 3876, 1, 3]);
    }

    #[test]
    fn quadratic_and_quartic_attention_have_their_known_answers() {
        let q = [1.0, 0.0];
        let keys = [[1.0, 0.0], [2.0, 0.0], [0.0, 3.0]];
        let values = [1.0, 10.0, 100.0];
        for (degree, c0, expected) in
            [(2, 0.0, 8.2), (2, 1.0, 41.0 / 6.0), (4, 0.0, 161.0 / 17.0), (4, 1.0, 161.0 / 18.0)]
        {
            let map = ExactPolynomial::new(2, degree, 0.0, MapOptions::default()).unwrap();
            let weights = keys.map(|k| signed_kernel_of(&map, &q, &k));
            let numerator: f64 = weights.iter().zip(&values).map(|(w, v)| w * v).sum();
            assert!((numerator / (c0 + weights.iter().sum::<f64>()) - expected).abs() < 1e-13);
        }
    }

    #[test]
    fn a_common_rotation_leaves_the_kernel_alone() {
        let (x, y) = ([1.0, -0.5, 2.0], [0.5, 1.5, -1.0]);
        let rotation = crate::sketch::haar::haar(3, &mut crate::rng::StreamKey::new(1).rng());
        let turn =
            |v: &[f64; 3]| -> Vec<f64> { (0..3).map(|i| crate::linalg::dot(rotation.row(i), v)).collect() };
        let map = ExactPolynomial::new(3, 4, 0.0, MapOptions::default()).unwrap();
        let (before, after) = (signed_kernel_of(&map, &x, &y), signed_kernel_of(&map, &turn(&x), &turn(&y)));
        assert!((before - after).abs() < 1e-12 * before.abs().max(1.0) * 16.0);
    }

    #[test]
    fn huge_and_zero_rows_are_finite_and_bad_parameters_refused() {
        let map = ExactPolynomial::new(2, 8, 0.0, MapOptions::default()).unwrap();
        let (mut out, mut scale) = ([f32::NAN; 18], [f32::NAN; 2]);
        map.signed_features(MatRef::new(&[0.0, 0.0, 1e30f32, -1e30], 2, 2), Side::Key, &mut out, &mut scale);
        assert!(out.iter().chain(&scale).all(|v| v.is_finite()));
        assert!(out[..9].iter().all(|v| *v == 0.0));
        assert!(ExactPolynomial::new(128, 8, 0.0, MapOptions::default()).is_err());
        assert!(ExactPolynomial::new(2, 0, 0.0, MapOptions::default()).is_err());
        assert!(ExactPolynomial::new(2, 2, -1.0, MapOptions::default()).is_err());
    }
}
