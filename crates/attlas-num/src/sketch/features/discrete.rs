//! Features of the exponential kernel from random powers: $e^{xy} = \sum_n (xy)^n / n!$, one term drawn per
//! coordinate (Likhosherstov et al. 2022).
//!
//! * Poisson, $\omega_c \sim \mathrm{Poisson}(\lambda)$:
//!   $f = e^{\lambda d/2} \prod_c x_c^{\omega_c} \lambda^{-\omega_c/2}$.
//! * Geometric, $P(\omega_c = n) = p(1-p)^n$:
//!   $f = p^{-d/2} \prod_c x_c^{\omega_c} ((1-p)^{\omega_c} \omega_c!)^{-1/2}$.
//!
//! Signed unless all coordinates are non-negative. A shift $c$ below all coordinates makes them so:
//! $\langle x, y\rangle = \langle x', y'\rangle + \langle c, x'\rangle + \langle c, y'\rangle + \|c\|^2$ with
//! $x' = x - c$, $y' = y - c$.

use super::{MapOptions, Side, SignedFeatures, check_signed_call, saturate};
use crate::mat::{Mat, MatRef, Real};
use crate::rng::{Rng, StreamKey};
use crate::sketch::{SketchError, ensure, ensure_size};

/// The law of the random powers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum DiscreteLaw {
    /// Poisson with this rate, in (0, 1e6].
    Poisson(f64),
    /// Geometric with this success probability, in (0, 1).
    Geometric(f64),
}

impl DiscreteLaw {
    fn validate(self) -> Result<(), SketchError> {
        match self {
            Self::Poisson(rate) => ensure(rate > 0.0 && rate <= 1e6, "rate", rate, "in (0, 1e6]"),
            Self::Geometric(p) => ensure(p > 0.0 && p < 1.0, "p", p, "in (0, 1)"),
        }
    }

    fn draw(self, rng: &mut Rng) -> u32 {
        match self {
            Self::Poisson(rate) => poisson(rate, rng),
            Self::Geometric(p) => {
                let n = (libm::log(rng.uniform_positive()) / libm::log1p(-p)).floor();
                n.min(f64::from(u32::MAX)) as u32
            }
        }
    }

    /// $\ln$ of the factor of $x^n$.
    fn log_weight(self, n: u32) -> f64 {
        let n = f64::from(n);
        match self {
            Self::Poisson(rate) => 0.5 * (rate - n * rate.ln()),
            Self::Geometric(p) => -0.5 * (p.ln() + n * (-p).ln_1p() + libm::lgamma(n + 1.0)),
        }
    }
}

/// A Poisson number by inversion, in pieces of rate at most 64 whose $e^{-\mathrm{rate}}$ is far from underflow.
fn poisson(rate: f64, rng: &mut Rng) -> u32 {
    let pieces = (rate / 64.0).ceil().max(1.0);
    let piece = rate / pieces;
    let mut total = 0;
    for _ in 0..pieces as usize {
        let target = rng.uniform();
        let mut probability = libm::exp(-piece);
        let mut cumulated = probability;
        let mut n = 0u32;
        // The tail beyond 1000 at rate 64 is below every number that `uniform` can return.
        while target >= cumulated && n < 1000 {
            n += 1;
            probability *= piece / f64::from(n);
            cumulated += probability;
        }
        total += n;
    }
    total
}

/// Features from random powers, one per draw.
#[derive(Clone, Debug)]
pub struct Discrete {
    powers: Mat<u32>,
    log_weights: Vec<f64>,
    shift: Option<Vec<f64>>,
    options: MapOptions,
}

impl Discrete {
    /// Draws `m` features for rows of length `d`.
    pub fn new(
        law: DiscreteLaw,
        m: usize,
        d: usize,
        key: StreamKey,
        options: MapOptions,
    ) -> Result<Self, SketchError> {
        options.validate()?;
        law.validate()?;
        ensure(m > 0, "m", 0.0, "at least 1")?;
        let mut rng = key.rng();
        let powers = Mat::from_fn(m, d, |_, _| law.draw(&mut rng));
        let log_weights = (0..m)
            .map(|l| powers.row(l).iter().map(|&n| law.log_weight(n)).sum::<f64>() - 0.5 * (m as f64).ln())
            .collect();
        Ok(Self { powers, log_weights, shift: None, options })
    }

    /// Subtracts `shift` from scaled rows first, keeping the kernel. Features are non-negative for rows that
    /// are nowhere below it.
    pub fn with_shift(mut self, shift: Vec<f64>) -> Result<Self, SketchError> {
        ensure_size("shift", self.powers.cols(), shift.len())?;
        let norm = shift.iter().map(|c| c * c).sum::<f64>();
        ensure(norm.is_finite(), "shift", norm, "finite")?;
        self.shift = Some(shift);
        Ok(self)
    }
}

impl<T: Real> SignedFeatures<T> for Discrete {
    fn input_dim(&self) -> usize {
        self.powers.cols()
    }

    fn num_features(&self) -> usize {
        self.powers.rows()
    }

    fn signed_features(&self, x: MatRef<'_, T>, side: Side, out: &mut [T], log_scale: &mut [T]) {
        let (m, d) = (self.powers.rows(), self.powers.cols());
        check_signed_call(x, d, out, m, log_scale);
        let root = self.options.scale.sqrt();
        let mut logs = vec![0.0; d];
        let mut negative = vec![false; d];
        let mut features = vec![0.0; m];
        for ((row, out), scale) in x.iter_rows().zip(out.chunks_exact_mut(m)).zip(log_scale) {
            let mut common = 0.0;
            for (c, x) in row.iter().enumerate() {
                let shift = self.shift.as_ref().map_or(0.0, |s| s[c]);
                let value = root * x.to_f64() - shift;
                common += shift * (value + 0.5 * shift);
                logs[c] = value.abs().ln();
                negative[c] = value < 0.0;
            }
            for (l, f) in features.iter_mut().enumerate() {
                *f = self.log_weights[l];
                // A power of zero is one, also of a zero coordinate.
                for (&n, log) in self.powers.row(l).iter().zip(&logs).filter(|(n, _)| **n > 0) {
                    *f += f64::from(n) * log;
                }
            }
            let top = features.iter().fold(f64::NEG_INFINITY, |m, &f| m.max(f));
            let top = if top.is_finite() { top } else { 0.0 };
            for (l, (o, f)) in out.iter_mut().zip(&features).enumerate() {
                let odd = self.powers.row(l).iter().zip(&negative).filter(|(n, neg)| **neg && *n % 2 == 1);
                let value = (f - top).exp();
                *o = T::from_f64(if odd.count() % 2 == 1 { -value } else { value });
            }
            *scale = if self.options.drops(side) { T::ZERO } else { saturate(top + common) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sketch::testing::{check_moments, signed_kernel_of};
    use crate::sketch::variance::{geometric_variance, poisson_variance};

    const X: [f64; 3] = [0.5, -0.2, 0.3];
    const Y: [f64; 3] = [0.4, 0.3, 0.5];

    fn sm() -> f64 {
        X.iter().zip(&Y).map(|(a, b)| a * b).sum::<f64>().exp()
    }

    #[test]
    fn both_laws_are_unbiased_with_the_stated_variance() {
        for (law, variance) in [
            (DiscreteLaw::Poisson(0.1), poisson_variance(&X, &Y, 0.1)),
            (DiscreteLaw::Geometric(0.7), geometric_variance(&X, &Y, 0.7)),
        ] {
            check_moments(&format!("{law:?}"), 20_000, sm(), variance / 16.0, 0.08, |seed| {
                let map = Discrete::new(law, 16, 3, StreamKey::new(seed), MapOptions::default()).unwrap();
                signed_kernel_of(&map, &X, &Y)
            });
        }
    }

    #[test]
    fn a_shift_makes_features_non_negative_and_keeps_the_mean() {
        let shift = vec![0.4, -0.2, 0.3];
        let shifted = |v: &[f64; 3]| -> Vec<f64> { v.iter().zip(&shift).map(|(a, c)| a - c).collect() };
        let factor = (shift.iter().zip(X.iter().zip(&Y)))
            .map(|(c, (x, y))| c * (x - c) + c * (y - c) + c * c)
            .sum::<f64>()
            .exp();
        let variance = poisson_variance(&shifted(&X), &shifted(&Y), 0.1) / 16.0 * factor * factor;
        check_moments("shifted", 20_000, sm(), variance, 0.08, |seed| {
            let map =
                Discrete::new(DiscreteLaw::Poisson(0.1), 16, 3, StreamKey::new(seed), MapOptions::default())
                    .and_then(|m| m.with_shift(shift.clone()))
                    .unwrap();
            let (mut out, mut scale) = ([f64::NAN; 16], [f64::NAN]);
            map.signed_features(MatRef::new(&X, 1, 3), Side::Query, &mut out, &mut scale);
            assert!(out.iter().all(|v| *v >= 0.0));
            signed_kernel_of(&map, &X, &Y)
        });
    }

    #[test]
    fn poisson_numbers_have_their_mean_and_variance() {
        for rate in [0.05, 3.0, 200.0] {
            let mut rng = StreamKey::new(1).rng();
            let n = 20_000;
            let draws: Vec<f64> = (0..n).map(|_| f64::from(poisson(rate, &mut rng))).collect();
            let mean = draws.iter().sum::<f64>() / f64::from(n);
            let var = draws.iter().map(|v| (v - rate).powi(2)).sum::<f64>() / f64::from(n);
            assert!((mean - rate).abs() < 5.0 * (rate / f64::from(n)).sqrt(), "{rate}: {mean}");
            // The fourth central moment is λ + 3λ².
            let se = ((rate + 2.0 * rate * rate) / f64::from(n)).sqrt();
            assert!((var - rate).abs() < 5.0 * se, "{rate}: {var}");
        }
    }

    #[test]
    fn zero_and_huge_rows_are_finite() {
        for law in [DiscreteLaw::Poisson(2.0), DiscreteLaw::Geometric(0.3)] {
            let map = Discrete::new(law, 9, 2, StreamKey::new(1), MapOptions::default()).unwrap();
            let (mut out, mut scale) = ([f32::NAN; 18], [f32::NAN; 2]);
            map.signed_features(
                MatRef::new(&[0.0, 0.0, -1e30f32, 1e30], 2, 2),
                Side::Key,
                &mut out,
                &mut scale,
            );
            assert!(out.iter().chain(&scale).all(|v| v.is_finite()), "{out:?} {scale:?}");
        }
        assert!(
            Discrete::new(DiscreteLaw::Poisson(0.0), 1, 1, StreamKey::new(1), MapOptions::default()).is_err()
        );
        assert!(
            Discrete::new(DiscreteLaw::Geometric(1.0), 1, 1, StreamKey::new(1), MapOptions::default())
                .is_err()
        );
    }
}
