//! Maps that act on each coordinate: $m = d$, no randomness.
//!
//! `Elu1` is the map of linear attention (Katharopoulos et al. 2020), $\varphi(x) = \mathrm{elu}(x) + 1$. Its
//! logarithm, $x$ for $x \le 0$ and $\ln(1 + x)$ above, is exact far below the point where the value
//! underflows.

use super::{LogFeatures, MapOptions, Side, SignedFeatures, check_call, check_signed_call};
use crate::kernels::{ln_in_place, softmax_in_place};
use crate::mat::{MatRef, Real};
use crate::sketch::{SketchError, ensure};

/// A positive function of each coordinate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Elementwise {
    /// $\mathrm{elu}(x) + 1$.
    Elu1,
    /// $\max(x, 0) + \varepsilon$.
    Relu {
        /// Added to every feature; 0 keeps exact zeros.
        eps: f64,
    },
    /// Queries: softmax over the coordinates. Keys: $e^x$.
    Softmax,
    /// $x^2$.
    Square,
}

/// The map of an [`Elementwise`] function.
#[derive(Clone, Copy, Debug)]
pub struct ElementwiseFeatures {
    function: Elementwise,
    d: usize,
    options: MapOptions,
}

impl ElementwiseFeatures {
    /// The map for rows of length `d`.
    pub fn new(function: Elementwise, d: usize, options: MapOptions) -> Result<Self, SketchError> {
        options.validate()?;
        if let Elementwise::Relu { eps } = function {
            ensure(eps >= 0.0 && eps.is_finite(), "eps", eps, "finite and not negative")?;
        }
        Ok(Self { function, d, options })
    }
}

impl<T: Real> LogFeatures<T> for ElementwiseFeatures {
    fn input_dim(&self) -> usize {
        self.d
    }

    fn num_features(&self) -> usize {
        self.d
    }

    fn log_features(&self, x: MatRef<'_, T>, side: Side, out: &mut [T]) {
        check_call(x, self.d, out, self.d);
        let root = T::from_f64(self.options.scale.sqrt());
        let mut weights = vec![T::ZERO; self.d];
        for (row, out) in x.iter_rows().zip(out.chunks_exact_mut(self.d.max(1))) {
            match self.function {
                Elementwise::Elu1 => {
                    map_row(row, out, |x| if x * root > T::ZERO { T::ONE + x * root } else { T::ONE });
                    ln_in_place(out);
                    // The logarithm of one is zero.
                    let below = |x: T| if x > T::ZERO { T::ZERO } else { x };
                    out.iter_mut().zip(row).for_each(|(o, &x)| *o += below(x * root));
                }
                Elementwise::Relu { eps } => {
                    let eps = T::from_f64(eps);
                    // Not `max`, which would turn NaN into 0.
                    map_row(row, out, |x| if x * root < T::ZERO { eps } else { x * root + eps });
                    ln_in_place(out);
                }
                Elementwise::Square => {
                    map_row(row, out, |x| (x * root).abs());
                    ln_in_place(out);
                    out.iter_mut().for_each(|x| *x += *x);
                }
                Elementwise::Softmax => {
                    map_row(row, out, |x| x * root);
                    if side == Side::Query && !self.options.drops(side) {
                        weights.copy_from_slice(out);
                        let log_sum = softmax_in_place(&mut weights);
                        out.iter_mut().for_each(|x| *x -= log_sum);
                    }
                }
            }
        }
    }
}

fn map_row<T: Real>(row: &[T], out: &mut [T], f: impl Fn(T) -> T) {
    row.iter().zip(out).for_each(|(&x, o)| *o = f(x));
}

/// The identity: the kernel is the inner product itself.
#[derive(Clone, Copy, Debug)]
pub struct Identity {
    d: usize,
    options: MapOptions,
}

impl Identity {
    /// The map for rows of length `d`.
    pub fn new(d: usize, options: MapOptions) -> Result<Self, SketchError> {
        options.validate()?;
        Ok(Self { d, options })
    }
}

impl<T: Real> SignedFeatures<T> for Identity {
    fn input_dim(&self) -> usize {
        self.d
    }

    fn num_features(&self) -> usize {
        self.d
    }

    fn signed_features(&self, x: MatRef<'_, T>, side: Side, out: &mut [T], log_scale: &mut [T]) {
        check_signed_call(x, self.d, out, self.d, log_scale);
        let log = if self.options.drops(side) { 0.0 } else { 0.5 * self.options.scale.ln() };
        log_scale.fill(T::from_f64(log));
        for (row, out) in x.iter_rows().zip(out.chunks_exact_mut(self.d.max(1))) {
            out.copy_from_slice(row);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sketch::Constants;
    use crate::sketch::testing::{kernel_of, signed_kernel_of};

    fn map(function: Elementwise, d: usize) -> ElementwiseFeatures {
        ElementwiseFeatures::new(function, d, MapOptions::default()).unwrap()
    }

    #[test]
    fn elu1_gives_the_known_linear_attention() {
        let elu = map(Elementwise::Elu1, 2);
        let q = [1.0, -(2f64.ln())];
        let weights = [kernel_of(&elu, &q, &[0.0, 0.0]), kernel_of(&elu, &q, &[1.0, 0.0])];
        let y = (2.0 * weights[0] + 5.0 * weights[1]) / (weights[0] + weights[1]);
        assert!((y - 27.5 / 7.0).abs() < 1e-15 * 8.0);
    }

    #[test]
    fn very_negative_inputs_keep_their_logarithm() {
        let elu = map(Elementwise::Elu1, 3);
        let mut out = [f32::NAN; 3];
        elu.log_features(MatRef::new(&[-1e3f32, 0.0, 1e3], 1, 3), Side::Key, &mut out);
        assert_eq!(out[..2], [-1e3, 0.0]);
        assert!((out[2] - 1001f32.ln()).abs() <= 2.0 * f32::EPSILON * 8.0, "{}", out[2]);
    }

    #[test]
    fn relu_square_and_softmax_are_what_they_say() {
        let x = [0.5, -2.0, 0.0];
        let y = [1.0, 3.0, 4.0];
        let relu = |x: f64| x.max(0.0);
        let direct = |f: fn(f64) -> f64| -> f64 { x.iter().zip(&y).map(|(a, b)| f(*a) * f(*b)).sum() };
        assert!((kernel_of(&map(Elementwise::Relu { eps: 0.0 }, 3), &x, &y) - direct(relu)).abs() < 1e-15);
        assert!((kernel_of(&map(Elementwise::Square, 3), &x, &y) - direct(|v| v * v)).abs() < 1e-13);
        let total: f64 = x.iter().map(|v| v.exp()).sum();
        let softmax: f64 = x.iter().zip(&y).map(|(a, b)| a.exp() / total * b.exp()).sum();
        assert!((kernel_of(&map(Elementwise::Softmax, 3), &x, &y) - softmax).abs() < 1e-13);
        let id = Identity::new(3, MapOptions { scale: 0.25, constants: Constants::Keep }).unwrap();
        assert!((signed_kernel_of(&id, &x, &y) - 0.25 * -5.5).abs() < 1e-15);
    }

    #[test]
    fn softmax_of_huge_rows_is_finite() {
        let soft = map(Elementwise::Softmax, 2);
        let mut out = [f32::NAN; 2];
        soft.log_features(MatRef::new(&[1e4f32, -1e4], 1, 2), Side::Query, &mut out);
        assert_eq!(out, [0.0, -2e4]);
    }

    #[test]
    fn nan_stays_nan() {
        for f in [Elementwise::Elu1, Elementwise::Relu { eps: 1e-3 }, Elementwise::Square] {
            let mut out = [0.0];
            map(f, 1).log_features(MatRef::new(&[f64::NAN], 1, 1), Side::Key, &mut out);
            assert!(out[0].is_nan(), "{f:?}");
        }
        assert!(ElementwiseFeatures::new(Elementwise::Relu { eps: -1.0 }, 1, MapOptions::default()).is_err());
    }
}
