//! Features of polynomial kernels $(\langle x, y\rangle + c)^p$: exact, and by two kinds of sketch.
//!
//! * [`ExactPolynomial`]: all monomials of degree $p$, $\binom{d+p-1}{p}$ of them.
//! * [`ProductSketch`] (Kacham et al. 2024): products of Gaussian projections over a tree of independent branches.
//! * [`TensorSketch`] (Pham, Pagh 2013): circular convolutions of count sketches.
//!
//! Sketched kernels may be negative. [`symmetric_square_into`] squares a half-degree sketch: then the kernel
//! is non-negative, but its mean is too large by the variance of the half sketch
//! ([`variance::self_tensored_mean`](super::variance::self_tensored_mean)).
//!
//! Every row is divided by its length first and $p \ln \|x\|$ becomes its logarithmic scale, so that high
//! degrees do not overflow.

mod exact;
mod product;
mod tensor;

pub use exact::ExactPolynomial;
pub use product::{ProductScale, ProductSketch};
pub use tensor::{Domain, Hashing, TensorSketch, TensorSketchSpec};

use super::features::{Constants, Side, saturate};
use super::project::norm2_wide;
use crate::mat::Real;

/// Writes features of the square of a kernel: $a_u^2$ and $\sqrt2\, a_u a_w$ for $u < w$, `r(r+1)/2` numbers with
/// $\langle \mathrm{sym}(a), \mathrm{sym}(b)\rangle = \langle a, b\rangle^2$. Panics on a wrong output length.
pub fn symmetric_square_into<T: Real>(a: &[T], out: &mut [T]) {
    assert_eq!(out.len(), symmetric_square_len(a.len()), "r(r+1)/2");
    let root2 = T::from_f64(std::f64::consts::SQRT_2);
    let mut start = 0;
    for (u, &x) in a.iter().enumerate() {
        let row = &mut out[start..start + a.len() - u];
        row[0] = x * x;
        let factor = root2 * x;
        row[1..].iter_mut().zip(&a[u + 1..]).for_each(|(o, &y)| *o = factor * y);
        start += row.len();
    }
}

/// Returns the length of the [symmetric square](symmetric_square_into) of `r` numbers.
pub fn symmetric_square_len(r: usize) -> usize {
    r * (r + 1) / 2
}

/// Writes `x` divided by its length (with `extra` appended as one more coordinate, if positive) and returns the
/// length's logarithm; a zero row stays zero with logarithm 0.
fn normalise_into<T: Real>(x: &[T], extra: f64, out: &mut [f64]) -> f64 {
    // Divides by the largest entry first: squares of very large or small numbers leave the range.
    let top = x.iter().fold(extra.abs(), |m, v| m.max(v.to_f64().abs()));
    if top == 0.0 {
        // Copies instead of filling with zeros: a NaN, which `max` skips, must survive.
        out.iter_mut().zip(x).for_each(|(o, v)| *o = v.to_f64());
        out[x.len()..].fill(0.0);
        return 0.0;
    }
    out.iter_mut().zip(x).for_each(|(o, v)| *o = v.to_f64() / top);
    if let Some(last) = out.get_mut(x.len()) {
        *last = extra / top;
    }
    let length = norm2_wide(out).sqrt();
    out.iter_mut().for_each(|o| *o /= length);
    top.ln() + length.ln()
}

/// Returns the logarithmic scale of a row.
fn row_scale<T: Real>(log: f64, side: Side, constants: Constants) -> T {
    if constants == Constants::Drop && side == Side::Query { T::ZERO } else { saturate(log) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_symmetric_square_squares_inner_products() {
        for r in [1usize, 2, 5] {
            let a: Vec<f64> = (0..r).map(|i| i as f64 - 1.5).collect();
            let b: Vec<f64> = (0..r).map(|i| 0.5 * i as f64 + 0.25).collect();
            let mut fa = vec![f64::NAN; symmetric_square_len(r)];
            let mut fb = fa.clone();
            symmetric_square_into(&a, &mut fa);
            symmetric_square_into(&b, &mut fb);
            let inner = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(a, b)| a * b).sum::<f64>();
            assert!((inner(&fa, &fb) - inner(&a, &b).powi(2)).abs() < 1e-14);
        }
    }

    #[test]
    fn normalisation_survives_the_ends_of_the_range() {
        for size in [1e-200, 1.0, 1e200] {
            let mut out = [f64::NAN; 3];
            let log = normalise_into(&[3.0 * size, 0.0], 4.0 * size, &mut out);
            assert!((log - (5.0f64.ln() + size.ln())).abs() < 1e-12);
            assert!((out[0] - 0.6).abs() < 1e-15 && (out[2] - 0.8).abs() < 1e-15);
        }
        let mut out = [f64::NAN; 2];
        assert_eq!(normalise_into(&[0.0f32, 0.0], 0.0, &mut out), 0.0);
        assert_eq!(out, [0.0, 0.0]);
        normalise_into(&[f32::NAN, 0.0], 0.0, &mut out);
        assert!(out[0].is_nan());
    }
}
