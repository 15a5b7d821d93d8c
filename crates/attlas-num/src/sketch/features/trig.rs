//! Trigonometric features of the exponential kernel, and random ReLU features.
//!
//! Trigonometric (Rahimi, Recht 2007): $\varphi(x) = e^{\|x\|^2/2} M^{-1/2} (\cos \omega_l \cdot x, \sin \omega_l
//! \cdot x)_l$, $m = 2M$, unbiased for $e^{\langle x, y\rangle}$, signed, exact at $x = y$.
//!
//! ReLU (generalised attention, Choromanski et al. 2021): $\max(\omega_l \cdot x, 0) + \varepsilon$, a kernel
//! of its own.

use super::{LogFeatures, MapOptions, Side, SignedFeatures, check_call, check_signed_call, saturate};
use crate::mat::{Mat, MatRef, Real};
use crate::sketch::project::{Projection, needs_wide, norm2_wide};
use crate::sketch::{SketchError, ensure};

/// Trigonometric features; $M$ directions give $2M$ features, cosines first.
#[derive(Clone, Debug)]
pub struct Trig<T> {
    omega: Projection<T>,
    options: MapOptions,
}

impl<T: Real> Trig<T> {
    /// Builds the map from the rows of `directions`.
    pub fn new(directions: &Mat<f64>, options: MapOptions) -> Result<Self, SketchError> {
        options.validate()?;
        ensure(directions.rows() > 0, "directions", 0.0, "at least one")?;
        Ok(Self { omega: scaled_directions(directions, options.scale), options })
    }
}

/// Returns $\sqrt{\mathrm{scale}}\,\Omega$, rounded once.
fn scaled_directions<T: Real>(directions: &Mat<f64>, scale: f64) -> Projection<T> {
    let root = scale.sqrt();
    let entry = |i, j| T::from_f64(root * directions[(i, j)]);
    Projection::new(Mat::from_fn(directions.rows(), directions.cols(), entry))
}

impl<T: Real> SignedFeatures<T> for Trig<T> {
    fn input_dim(&self) -> usize {
        self.omega.dim()
    }

    fn num_features(&self) -> usize {
        2 * self.omega.len()
    }

    fn signed_features(&self, x: MatRef<'_, T>, side: Side, out: &mut [T], log_scale: &mut [T]) {
        let m = self.omega.len();
        check_signed_call(x, self.omega.dim(), out, 2 * m, log_scale);
        let drop = self.options.drops(side);
        let norms: Vec<f64> = x.iter_rows().map(|r| self.options.scale * norm2_wide(r)).collect();
        let factor = if drop { 1.0 } else { 1.0 / (m as f64).sqrt() };
        self.omega.rows_in_f64(
            x,
            out,
            2 * m,
            |i| needs_wide::<T>(norms[i]),
            |i, p, row| {
                for (l, &p) in p.iter().enumerate() {
                    let (sin, cos) = phase(p);
                    row[l] = T::from_f64(factor * cos);
                    row[m + l] = T::from_f64(factor * sin);
                }
                log_scale[i] = if drop { T::ZERO } else { saturate(0.5 * norms[i]) };
            },
        );
    }
}

/// Returns sine and cosine; an overflowed angle, whose phase is lost, counts as 0.
pub(super) fn phase(angle: f64) -> (f64, f64) {
    if angle.is_infinite() { (0.0, 1.0) } else { libm::sincos(angle) }
}

/// Random ReLU features, one per direction.
#[derive(Clone, Debug)]
pub struct RandomRelu<T> {
    omega: Projection<T>,
    eps: f64,
    options: MapOptions,
}

impl<T: Real> RandomRelu<T> {
    /// Builds the map from the rows of `directions`; the reference code adds `eps` = 1e-3.
    pub fn new(directions: &Mat<f64>, eps: f64, options: MapOptions) -> Result<Self, SketchError> {
        options.validate()?;
        ensure(directions.rows() > 0, "directions", 0.0, "at least one")?;
        ensure(eps >= 0.0 && eps.is_finite(), "eps", eps, "finite and not negative")?;
        Ok(Self { omega: scaled_directions(directions, options.scale), eps, options })
    }
}

impl<T: Real> LogFeatures<T> for RandomRelu<T> {
    fn input_dim(&self) -> usize {
        self.omega.dim()
    }

    fn num_features(&self) -> usize {
        self.omega.len()
    }

    fn log_features(&self, x: MatRef<'_, T>, _: Side, out: &mut [T]) {
        let m = self.omega.len();
        check_call(x, self.omega.dim(), out, m);
        let wide = |i: usize| needs_wide::<T>(self.options.scale * norm2_wide(x.row(i)));
        self.omega.rows_in_f64(x, out, m, wide, |_, p, row| {
            for (o, &p) in row.iter_mut().zip(p) {
                // This comparison keeps NaN.
                let value = if p < 0.0 { self.eps } else { p + self.eps };
                *o = if value.is_infinite() { saturate(f64::MAX.ln()) } else { T::from_f64(value.ln()) };
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::StreamKey;
    use crate::sketch::testing::{check_moments, kernel_of, signed_kernel_of};
    use crate::sketch::variance::{Pair, trig_relative_variance};
    use crate::sketch::{Constants, Coupling, draw_directions};

    const X: [f64; 4] = [0.3, -0.1, 0.2, 0.1];
    const Y: [f64; 4] = [0.2, 0.25, -0.4, -0.05];

    #[test]
    fn trigonometric_features_are_unbiased_with_the_stated_variance() {
        for d in [1, 3, 4] {
            let (x, y) = (&X[..d], &Y[..d]);
            let pair = Pair::of(x, y);
            for coupling in [Coupling::Iid, Coupling::Orthogonal] {
                // A full block and a cut one.
                let variance = trig_relative_variance(&pair, d, 6, coupling) * pair.sm() * pair.sm();
                check_moments(&format!("{coupling:?}, d = {d}"), 20_000, pair.sm(), variance, 0.2, |seed| {
                    let omega = draw_directions(coupling, 6, d, StreamKey::new(seed)).unwrap();
                    signed_kernel_of(&Trig::new(&omega, MapOptions::default()).unwrap(), x, y)
                });
            }
        }
    }

    #[test]
    fn equal_rows_give_the_exact_kernel() {
        let omega = draw_directions(Coupling::Orthogonal, 5, 4, StreamKey::new(1)).unwrap();
        let map = Trig::new(&omega, MapOptions { scale: 2.0, ..Default::default() }).unwrap();
        let exact = (2.0 * X.iter().map(|x| x * x).sum::<f64>()).exp();
        assert!((signed_kernel_of(&map, &X, &X) - exact).abs() < 1e-14);
    }

    #[test]
    fn dropped_constants_change_a_query_by_one_factor() {
        let omega = draw_directions(Coupling::Orthogonal, 5, 4, StreamKey::new(1)).unwrap();
        let keep = Trig::new(&omega, MapOptions::default()).unwrap();
        let drop = Trig::new(&omega, MapOptions { constants: Constants::Drop, scale: 1.0 }).unwrap();
        let ratio = |k: &[f64]| signed_kernel_of(&keep, &X, k) / signed_kernel_of(&drop, &X, k);
        assert!((ratio(&Y) / ratio(&[1.0, 2.0, 3.0, 4.0]) - 1.0).abs() < 1e-12);
    }

    #[test]
    fn huge_and_zero_rows_are_finite() {
        let omega = draw_directions(Coupling::Orthogonal, 7, 3, StreamKey::new(1)).unwrap();
        let map = Trig::<f32>::new(&omega, MapOptions::default()).unwrap();
        let x = [0.0, 0.0, 0.0, 50.0, -20.0, 3.0, 3e38, -3e38, 3e38f32];
        let (mut out, mut scale) = ([f32::NAN; 42], [f32::NAN; 3]);
        map.signed_features(MatRef::new(&x, 3, 3), Side::Key, &mut out, &mut scale);
        assert!(out.iter().chain(&scale).all(|v| v.is_finite()), "{scale:?}");
        assert_eq!(scale[0], 0.0);
        let map = Trig::<f64>::new(&omega, MapOptions::default()).unwrap();
        let (mut out, mut scale) = ([f64::NAN; 14], [f64::NAN; 1]);
        map.signed_features(MatRef::new(&[1e308, -1e308, 1e308], 1, 3), Side::Key, &mut out, &mut scale);
        assert!(out.iter().chain(&scale).all(|v| v.is_finite()));
    }

    #[test]
    fn relu_features_average_to_the_arc_cosine_kernel() {
        // E relu(ω·x) relu(ω·y) = ‖x‖‖y‖ (sin θ + (π − θ) cos θ) / 2π (Cho, Saul 2009).
        let pair = Pair::of(&X, &Y);
        let (angle, norms) = (pair.angle(), (pair.x2 * pair.y2).sqrt());
        let pi = std::f64::consts::PI;
        let target = norms * (angle.sin() + (pi - angle) * angle.cos()) / (2.0 * pi);
        let (m, d) = (200_000, 4);
        let omega = draw_directions(Coupling::Iid, m, d, StreamKey::new(1)).unwrap();
        let map = RandomRelu::<f64>::new(&omega, 0.0, MapOptions::default()).unwrap();
        let mean = kernel_of(&map, &X, &Y) / m as f64;
        // The second moment of one product is at most ‖x‖²‖y‖² E χ⁴ / 2 over a half space: 3‖x‖²‖y‖²/2.
        assert!((mean - target).abs() < 5.0 * norms * (1.5 / m as f64).sqrt(), "{mean}, {target}");
    }

    #[test]
    fn relu_features_add_epsilon_to_the_positive_part() {
        let omega = Mat::from_vec(vec![1.0, 0.0, 0.0, 1.0, -1.0, 1.0], 3, 2);
        let map = RandomRelu::<f64>::new(&omega, 1e-3, MapOptions::default()).unwrap();
        let (x, y) = ([1.0, 2.0], [0.5, -1.0]);
        let exact = 1.001 * 0.501 + 2.001 * 1e-3 + 1.001 * 1e-3;
        assert!((kernel_of(&map, &x, &y) - exact).abs() < 1e-15);
    }
}
