//! Maps that act on each coordinate: $m = d$, no randomness.
//!
//! `Elu1` is the map of linear attention (Katharopoulos et al. 2020), $\varphi(x) = \mathrm{elu}(x) + 1$. Its
//! logarithm, $x$ for $x \le 0$ and $\ln(1 + x)$ above, is exact far below the point where the value
//! underflows.

use super::{LogFeatures, MapOptions, Side, SignedFeatures, check_call, check_signed_call};
use crate::kernels::{ln_in_place, softmax_in_place};
use crate::mat::{MatRef, Real};
use crate::sketch::{SketchError, ensure};

/// Positive function of each coordinate.
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
                    // The logarithm above is 0 for x ≤ 0; this adds x itself there.
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

    fn has_gradient(&self) -> bool {
        true
    }

    fn pull_back(&self, x: MatRef<'_, T>, side: Side, g: &[T], dx: &mut [T]) {
        check_call(x, self.d, g, self.d);
        assert_eq!(dx.len(), x.rows() * self.d, "one gradient per entry");
        let root = T::from_f64(self.options.scale.sqrt());
        let mut weights = vec![T::ZERO; self.d];
        let normalised = side == Side::Query && !self.options.drops(side);
        let rows = g.chunks_exact(self.d.max(1)).zip(dx.chunks_exact_mut(self.d.max(1)));
        for (row, (g, dx)) in x.iter_rows().zip(rows) {
            pull_back_row(self.function, root, row, normalised.then_some(&mut weights), g, dx);
        }
    }
}

/// Computes the gradient of one row of log-features.
fn pull_back_row<T: Real>(
    function: Elementwise,
    root: T,
    row: &[T],
    softmax: Option<&mut [T]>,
    g: &[T],
    dx: &mut [T],
) {
    let total = g.iter().copied().sum::<T>();
    match (function, softmax) {
        (Elementwise::Softmax, Some(weights)) => {
            map_row(row, weights, |x| x * root);
            softmax_in_place(weights);
            dx.iter_mut().zip(g).zip(&*weights).for_each(|((d, &g), &w)| *d = root * (g - total * w));
        }
        (Elementwise::Softmax, None) => dx.iter_mut().zip(g).for_each(|(d, &g)| *d = root * g),
        (Elementwise::Elu1, _) => {
            // The logarithm is x up to 0 and ln(1 + x) above.
            let slope = |x: T| if x > T::ZERO { root / (T::ONE + x) } else { root };
            dx.iter_mut().zip(g).zip(row).for_each(|((d, &g), &x)| *d = g * slope(x * root));
        }
        (Elementwise::Relu { eps }, _) => {
            let eps = T::from_f64(eps);
            let slope = |x: T| if x > T::ZERO { root / (x + eps) } else { T::ZERO };
            dx.iter_mut().zip(g).zip(row).for_each(|((d, &g), &x)| *d = g * slope(x * root));
        }
        (Elementwise::Square, _) => {
            let slope = |x: T| if x == T::ZERO { T::ZERO } else { (T::ONE + T::ONE) / x };
            dx.iter_mut().zip(g).zip(row).for_each(|((d, &g), &x)| *d = g * slope(x));
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
    fn gradients_agree_with_finite_differences() {
        let functions = [
            Elementwise::Elu1,
            Elementwise::Relu { eps: 0.0 },
            Elementwise::Relu { eps: 0.2 },
            Elementwise::Softmax,
            Elementwise::Square,
        ];
        let options = MapOptions { scale: 0.7, constants: Constants::Keep };
        for (function, side) in functions.into_iter().flat_map(|f| [(f, Side::Query), (f, Side::Key)]) {
            let f = ElementwiseFeatures::new(function, 3, options).unwrap();
            let (x, g) = ([0.5, -0.4, 1.3], [0.3, 1.1, -0.6]);
            let sum = |x: &[f64]| {
                let mut out = [f64::NAN; 3];
                f.log_features(MatRef::new(x, 1, 3), side, &mut out);
                // A feature that is exactly zero has no logarithm, and no gradient.
                out.iter().zip(&g).filter(|(o, _)| o.is_finite()).map(|(o, g)| o * g).sum::<f64>()
            };
            let mut dx = [f64::NAN; 3];
            f.pull_back(MatRef::new(&x, 1, 3), side, &g, &mut dx);
            for c in 0..3 {
                let moved =
                    |h: f64| sum(&std::array::from_fn::<f64, 3, _>(|i| x[i] + if i == c { h } else { 0.0 }));
                let slope = (moved(1e-6) - moved(-1e-6)) / 2e-6;
                assert!((slope - dx[c]).abs() < 1e-8, "{function:?} {side:?} {c}: {slope} {}", dx[c]);
            }
        }
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
