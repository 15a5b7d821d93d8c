//! The parts of a transformer between its linear layers: norms, activations, embeddings.
//!
//! Rows are independent. Sums that determine a scale are in double precision; everything else is single.

use crate::config::Activation;
use crate::error::{Error, Result};
use crate::tensor::Tensor;
use attlas_num::kernels::vectorised;

/// Computes $e^x$ to within two units in the last place, without branches: loops over it vectorise.
///
/// $x = n \ln 2 + r$ with $|r| \le \ln(2)/2$; $e^r$ by its Taylor polynomial, $2^n$ by the exponent bits.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    // Comparisons that keep NaN, unlike `clamp` on the way to an integer.
    let x = if x < -104.0 { -104.0 } else { x };
    let x = if x > 89.0 { 89.0 } else { x };
    // Adding 1.5·2²³ rounds to an integer, which is then in the low bits.
    let shifted = x * std::f32::consts::LOG2_E + 12_582_912.0;
    let n = shifted - 12_582_912.0;
    // ln 2 in two parts; the first has so few bits that its product with n is exact.
    let r = x - n * 0.693_359_4 + n * 2.121_944_4e-4;
    let p = 1.0 / 5040.0;
    let p = p * r + 1.0 / 720.0;
    let p = p * r + 1.0 / 120.0;
    let p = p * r + 1.0 / 24.0;
    let p = p * r + 1.0 / 6.0;
    let p = p * r + 0.5;
    let p = p * r * r + r + 1.0;
    // Two factors, because 2ⁿ itself may be subnormal or infinite. Checked differences would prevent vectorisation.
    let n = (shifted.to_bits() as i32).wrapping_sub(0x4b40_0000);
    let (half, rest) = (n >> 1, n.wrapping_sub(n >> 1));
    let power = |e: i32| f32::from_bits((e.wrapping_add(127) as u32) << 23);
    p * power(half) * power(rest)
}

/// Replaces each row of `x`, as long as `weight`, by $w \odot x / \sqrt{\operatorname{mean}(x^2) + \epsilon}$.
pub fn rms_norm_in_place(x: &mut [f32], weight: &[f32], eps: f64) {
    for row in x.chunks_exact_mut(weight.len().max(1)) {
        vectorised(|| {
            let scale = rms_scale(row, eps);
            row.iter_mut().zip(weight).for_each(|(x, w)| *x = *x * scale * w);
        });
    }
}

/// Normalises the rows of `x`, as long as `weight`, into `out` as in [`rms_norm_in_place`].
pub fn rms_norm_into(x: &[f32], weight: &[f32], eps: f64, out: &mut [f32]) {
    assert_eq!(x.len(), out.len());
    let d = weight.len().max(1);
    for (row, out) in x.chunks_exact(d).zip(out.chunks_exact_mut(d)) {
        vectorised(|| {
            let scale = rms_scale(row, eps);
            out.iter_mut().zip(row).zip(weight).for_each(|((y, x), w)| *y = *x * scale * w);
        });
    }
}

/// Normalises if there is a weight, otherwise copies.
pub fn maybe_norm_into(x: &[f32], weight: Option<&[f32]>, eps: f64, out: &mut [f32]) {
    match weight {
        Some(weight) => rms_norm_into(x, weight, eps, out),
        None => out.copy_from_slice(x),
    }
}

/// `x ← factor · x`; does nothing for a factor of one.
pub fn scale_in_place(x: &mut [f32], factor: f32) {
    if factor != 1.0 {
        x.iter_mut().for_each(|x| *x *= factor);
    }
}

#[inline(always)]
fn rms_scale(row: &[f32], eps: f64) -> f32 {
    (1.0 / (sum_by(row, |x| x * x) / row.len() as f64 + eps).sqrt()) as f32
}

/// Computes $\sum f(x_i)$ in double precision, in four partial sums, which vectorise.
#[inline(always)]
fn sum_by(row: &[f32], f: impl Fn(f64) -> f64) -> f64 {
    let mut sums = [0.0f64; 4];
    let (fours, rest) = row.as_chunks::<4>();
    for four in fours {
        for i in 0..4 {
            sums[i] += f(f64::from(four[i]));
        }
    }
    sums.iter().sum::<f64>() + rest.iter().map(|&x| f(f64::from(x))).sum::<f64>()
}

/// Replaces each row of `x`, as long as `weight`, by $w \odot (x - \mu)/\sqrt{\sigma^2 + \epsilon} + b$,
/// $\sigma^2$ the mean of squared deviations.
pub fn layer_norm_in_place(x: &mut [f32], weight: &[f32], bias: &[f32], eps: f64) {
    assert_eq!(weight.len(), bias.len());
    for row in x.chunks_exact_mut(weight.len().max(1)) {
        let n = row.len() as f64;
        let mean = sum_by(row, |x| x) / n;
        let variance = sum_by(row, |x| (x - mean) * (x - mean)) / n;
        let scale = 1.0 / (variance + eps).sqrt();
        for ((x, w), b) in row.iter_mut().zip(weight).zip(bias) {
            *x = ((f64::from(*x) - mean) * scale) as f32 * w + b;
        }
    }
}

/// `gate ← silu(gate) ⊙ up` with $\operatorname{silu}(z) = z / (1 + e^{-z})$.
pub fn swiglu_in_place(gate: &mut [f32], up: &[f32]) {
    assert_eq!(gate.len(), up.len());
    vectorised(|| gate.iter_mut().zip(up).for_each(|(g, u)| *g = *g / (1.0 + exp(-*g)) * u));
}

/// `gate ← f(gate) ⊙ up` with the activation of a family.
pub fn gate_in_place(activation: Activation, gate: &mut [f32], up: &[f32]) {
    match activation {
        Activation::Silu => swiglu_in_place(gate, up),
        Activation::Gelu => {
            assert_eq!(gate.len(), up.len());
            vectorised(|| gate.iter_mut().zip(up).for_each(|(g, u)| *g = tanh_gelu(*g) * u));
        }
        Activation::Clamped { alpha, limit } => {
            assert_eq!(gate.len(), up.len());
            vectorised(|| {
                for (g, u) in gate.iter_mut().zip(up) {
                    let z = if *g > limit { limit } else { *g };
                    *g = z / (1.0 + exp(-alpha * z)) * (u.clamp(-limit, limit) + 1.0);
                }
            });
        }
    }
}

/// $\frac z2 (1 + \tanh(\sqrt{2/\pi}(z + 0.044715 z^3))) = z / (1 + e^{-2y})$ with $y$ the argument of the tangent.
#[inline(always)]
fn tanh_gelu(z: f32) -> f32 {
    const SLOPE: f32 = 0.797_884_6;
    z / (1.0 + exp(-2.0 * SLOPE * (z + 0.044_715 * z * z * z)))
}

/// `x ← c tanh(x / c)`.
pub fn softcap_in_place(x: &mut [f32], cap: f32) {
    x.iter_mut().for_each(|x| *x = cap * libm::tanhf(*x / cap));
}

/// $x \leftarrow x\,\Phi(x)$ with the normal distribution function $\Phi$.
pub fn gelu_in_place(x: &mut [f32]) {
    // Φ(x) = erfc(−x/√2)/2 keeps relative precision for very negative x.
    x.iter_mut().for_each(|x| *x *= 0.5 * libm::erfcf(-*x * std::f32::consts::FRAC_1_SQRT_2));
}

/// `x ← x + y`.
pub fn add_in_place(x: &mut [f32], y: &[f32]) {
    assert_eq!(x.len(), y.len());
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}

/// Copies the rows `ids` of `table` to `out`.
pub fn embed_into(table: &Tensor, ids: &[u32], out: &mut [f32]) -> Result<()> {
    assert_eq!(out.len(), ids.len() * table.cols());
    for (row, &id) in out.chunks_exact_mut(table.cols().max(1)).zip(ids) {
        if id as usize >= table.rows() {
            return Err(Error::invalid("a token id", id, format!("below {}", table.rows())));
        }
        table.row_into(id as usize, row);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exponential_is_accurate_over_its_whole_range() {
        let ulps = |x: f32| {
            let want = f64::from(x).exp();
            let unit = f64::from((want as f32).max(f32::MIN_POSITIVE)) * f64::from(f32::EPSILON) / 2.0;
            (f64::from(exp(x)) - want).abs() / unit
        };
        let worst = (0..2_000_000).map(|i| -87.0 + i as f32 * (175.5 / 2e6)).map(ulps).fold(0.0, f64::max);
        assert!(worst <= 4.0, "{worst} half units");
        assert_eq!((exp(0.0), exp(-200.0), exp(f32::NEG_INFINITY)), (1.0, 0.0, 0.0));
        assert_eq!((exp(100.0), exp(f32::INFINITY)), (f32::INFINITY, f32::INFINITY));
        assert!(exp(f32::NAN).is_nan());
        assert!(exp(-95.0) > 0.0, "subnormal results are kept");
    }

    #[test]
    fn rms_norm_divides_by_the_root_mean_square() {
        let mut x = [3.0, 4.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0];
        let weight = [1.0, 1.0, 1.0, 2.0];
        let mut out = [f32::NAN; 8];
        rms_norm_into(&x, &weight, 0.0, &mut out);
        rms_norm_in_place(&mut x, &weight, 0.0);
        assert_eq!(x, [1.2, 1.6, 0.0, 0.0, 1.0, 1.0, 1.0, 2.0]);
        assert_eq!(x, out);
        let mut zero = [0.0; 3];
        rms_norm_in_place(&mut zero, &[1.0; 3], 1e-6);
        assert_eq!(zero, [0.0; 3]);
    }

    #[test]
    fn layer_norm_centres_and_scales_by_the_biased_deviation() {
        let mut x = [1.0, 3.0, 5.0, 5.0];
        layer_norm_in_place(&mut x, &[2.0, 1.0], &[0.0, 10.0], 0.0);
        assert_eq!(x[..2], [-2.0, 11.0]);
        assert!(x[2].is_nan(), "no deviation and no epsilon");
        let mut x = [5.0, 5.0];
        layer_norm_in_place(&mut x, &[2.0, 1.0], &[0.0, 10.0], 1e-12);
        assert_eq!(x, [0.0, 10.0]);
    }

    #[test]
    fn activations_have_their_known_values() {
        let mut gate = [0.0, 1.0, -1.0, -1000.0, 1000.0];
        swiglu_in_place(&mut gate, &[1.0, 1.0, 2.0, 1.0, 1.0]);
        for (got, want) in gate.iter().zip([0.0, 0.731_058_6, -0.537_882_84, 0.0, 1000.0]) {
            assert!((got - want).abs() <= 1e-6 * want.abs(), "{got} {want}");
        }
        let arguments = [0.0f32, 1.0, -1.0, -6.0, 20.0];
        let mut x = arguments;
        gelu_in_place(&mut x);
        for ((got, want), x) in
            x.iter().zip([0.0f32, 0.841_344_8, -0.158_655_26, -5.919_526e-9, 20.0]).zip(arguments)
        {
            // Rounding the argument by ε moves Φ by ε·x² relative to itself on the left.
            assert!((got - want).abs() <= f32::EPSILON * (2.0 + x * x) * want.abs(), "{got} {want}");
        }
    }

    #[test]
    fn gates_of_other_families_have_their_known_values() {
        let mut gate = [0.0, 1.0, -1.0, 9.0];
        gate_in_place(Activation::Gelu, &mut gate, &[1.0, 1.0, 2.0, 1.0]);
        for (got, want) in gate.iter().zip([0.0, 0.841_192, -0.317_616, 9.0]) {
            assert!((got - want).abs() < 1e-6, "{got} {want}");
        }
        let mut gate = [1.0, 9.0, -9.0];
        gate_in_place(Activation::Clamped { alpha: 1.702, limit: 7.0 }, &mut gate, &[0.0, 9.0, -9.0]);
        for (got, want) in gate.iter().zip([0.845_796, 55.999_6, 1.202_3e-5]) {
            assert!((got - want).abs() < 1e-4, "{got} {want}");
        }
        let mut x = [0.0, 30.0, -1e9];
        softcap_in_place(&mut x, 30.0);
        assert!(x[0] == 0.0 && (x[1] - 22.847_825).abs() < 1e-4 && x[2] == -30.0);
    }

    #[test]
    fn embeddings_are_rows_and_ids_are_checked() {
        let table = Tensor::from_f32(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], vec![3, 2]).unwrap();
        let mut out = [0.0; 4];
        embed_into(&table, &[2, 0], &mut out).unwrap();
        assert_eq!(out, [5.0, 6.0, 1.0, 2.0]);
        assert!(embed_into(&table, &[3, 0], &mut out).is_err());
    }
}
