//! Powers of positive and negative parts (PolaFormer, Meng et al. 2025).
//!
//! With channel powers $p_c > 0$ and divisors $s_c$, $x_\pm = \max(\pm x_c / s_c, 0)^{p_c}$. Keys map to
//! $[k_+; k_-]$, queries to $[q_+; q_-]$ for the similar stream and to $[q_-; q_+]$ for the opposite one;
//! both kernels are positive and nothing is subtracted. At $p = 1$ their difference is $\langle q, k\rangle$
//! and their sum $\sum_c |q_c||k_c|$.

use super::{LogFeatures, Side, check_call};
use crate::kernels::ln_in_place;
use crate::mat::{MatRef, Real};
use crate::sketch::{SketchError, ensure, ensure_size};

/// The map of the similar stream; [`Pola::swap_streams_in_place`] gives the opposite one.
#[derive(Clone, Debug)]
pub struct Pola {
    powers: Vec<f64>,
    log_divisors: Vec<f64>,
}

impl Pola {
    /// Builds the map from one power and one divisor per channel.
    pub fn new(powers: Vec<f64>, divisors: &[f64]) -> Result<Self, SketchError> {
        ensure_size("divisors", powers.len(), divisors.len())?;
        for &p in &powers {
            ensure(p > 0.0 && p.is_finite(), "power", p, "positive and finite")?;
        }
        for &s in divisors {
            ensure(s > 0.0 && s.is_finite(), "divisor", s, "positive and finite")?;
        }
        Ok(Self { powers, log_divisors: divisors.iter().map(|s| s.ln()).collect() })
    }

    /// Builds the map from trained weights: powers $1 + \alpha\,\mathrm{sigmoid}(w_c)$, divisors
    /// $\mathrm{softplus}(s_c)$.
    pub fn from_weights(alpha: f64, w: &[f64], s: &[f64]) -> Result<Self, SketchError> {
        ensure(alpha >= 0.0 && alpha.is_finite(), "alpha", alpha, "finite and not negative")?;
        let powers = w.iter().map(|w| 1.0 + alpha / (1.0 + (-w).exp())).collect();
        let divisors: Vec<f64> = s.iter().map(|s| s.max(0.0) + (-s.abs()).exp().ln_1p()).collect();
        Self::new(powers, &divisors)
    }

    /// Builds the untrained map, all weights zero: powers $1 + \alpha/2$, divisors $\ln 2$.
    pub fn untrained(d: usize, alpha: f64) -> Result<Self, SketchError> {
        Self::from_weights(alpha, &vec![0.0; d], &vec![0.0; d])
    }

    /// Returns the powers and the logarithms of the divisors of the channels.
    pub fn parts(&self) -> [&[f64]; 2] {
        [&self.powers, &self.log_divisors]
    }

    /// Turns query features of one stream into those of the other.
    pub fn swap_streams_in_place<T: Real>(&self, features: &mut [T]) {
        let d = self.powers.len();
        for row in features.chunks_exact_mut((2 * d).max(1)) {
            let (positive, negative) = row.split_at_mut(d);
            positive.swap_with_slice(negative);
        }
    }
}

impl<T: Real> LogFeatures<T> for Pola {
    fn input_dim(&self) -> usize {
        self.powers.len()
    }

    fn num_features(&self) -> usize {
        2 * self.powers.len()
    }

    fn log_features(&self, x: MatRef<'_, T>, _: Side, out: &mut [T]) {
        let d = self.powers.len();
        check_call(x, d, out, 2 * d);
        let narrow = |x: &[f64]| -> Vec<T> { x.iter().map(|&x| T::from_f64(x)).collect() };
        let (powers, log_divisors) = (narrow(&self.powers), narrow(&self.log_divisors));
        for (row, out) in x.iter_rows().zip(out.chunks_exact_mut((2 * d).max(1))) {
            let (positive, negative) = out.split_at_mut(d);
            positive.iter_mut().zip(row).for_each(|(o, x)| *o = x.abs());
            ln_in_place(positive);
            let of_both = powers.iter().zip(&log_divisors).zip(positive.iter_mut().zip(negative));
            for (&x, ((&power, &divisor), (positive, negative))) in row.iter().zip(of_both) {
                let log = power * (*positive - divisor);
                // A NaN fails both comparisons and must survive in both halves.
                *positive = if x <= T::ZERO { T::NEG_INFINITY } else { log };
                *negative = if x >= T::ZERO { T::NEG_INFINITY } else { log };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sketch::testing::kernel_of;

    /// Kernels of the similar and the opposite stream.
    fn streams(map: &Pola, q: &[f64], k: &[f64]) -> [f64; 2] {
        let mut fq = vec![f64::NAN; 2 * q.len()];
        let mut fk = fq.clone();
        map.log_features(MatRef::new(q, 1, q.len()), Side::Query, &mut fq);
        map.log_features(MatRef::new(k, 1, k.len()), Side::Key, &mut fk);
        let sum = |fq: &[f64]| fq.iter().zip(&fk).map(|(a, b)| (a + b).exp()).sum::<f64>();
        let similar = sum(&fq);
        map.swap_streams_in_place(&mut fq);
        [similar, sum(&fq)]
    }

    #[test]
    fn at_power_one_the_streams_differ_by_the_inner_product() {
        let map = Pola::new(vec![1.0; 3], &[1.0; 3]).unwrap();
        let (q, k) = ([1.0, -2.0, 0.5], [0.3, 0.7, -4.0]);
        let [similar, opposite] = streams(&map, &q, &k);
        assert!((similar - opposite - (0.3 - 1.4 - 2.0)).abs() < 1e-15 * 8.0);
        assert!((similar + opposite - 3.7).abs() < 1e-15 * 8.0);
    }

    #[test]
    fn non_negative_rows_have_no_opposite_stream_and_signs_swap_streams() {
        let map = Pola::untrained(2, 4.0).unwrap();
        assert_eq!(streams(&map, &[1.0, 2.0], &[0.5, 0.0])[1], 0.0);
        let (q, k) = ([1.0, -2.0], [0.5, 3.0]);
        let [similar, opposite] = streams(&map, &q, &k);
        assert_eq!(streams(&map, &[-1.0, 2.0], &k), [opposite, similar]);
        // p = 3, divisor ln 2: the shared channel gives (1·0.5)³/ln⁶2.
        assert!((similar - 0.125 / 2f64.ln().powi(6)).abs() < 1e-12);
        assert_eq!(kernel_of(&map, &q, &k), similar);
    }

    #[test]
    fn a_larger_power_sharpens_the_weights() {
        let keys = [[1.0, 0.2], [0.6, 0.9], [0.2, 0.4]];
        let entropy = |p: f64| {
            let map = Pola::new(vec![p; 2], &[1.0; 2]).unwrap();
            let w: Vec<f64> = keys.iter().map(|k| kernel_of(&map, &[1.0, 0.5], k)).collect();
            let total: f64 = w.iter().sum();
            -w.iter().map(|w| w / total * (w / total).ln()).sum::<f64>()
        };
        assert!(entropy(3.0) < entropy(2.0) && entropy(2.0) < entropy(1.0));
    }

    #[test]
    fn zeros_nan_and_bad_parameters_are_handled() {
        let map = Pola::untrained(2, 4.0).unwrap();
        let mut out = [0.0f32; 4];
        map.log_features(MatRef::new(&[0.0, f32::NAN], 1, 2), Side::Key, &mut out);
        assert_eq!([out[0], out[2]], [f32::NEG_INFINITY; 2]);
        assert!(out[1].is_nan() && out[3].is_nan());
        assert!(Pola::new(vec![0.0], &[1.0]).is_err());
        assert!(Pola::new(vec![1.0], &[1.0, 2.0]).is_err());
    }
}
