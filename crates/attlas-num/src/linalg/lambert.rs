//! The Lambert function of an exponential.

/// Computes $w = W_0(e^t)$: the solution of $w + \ln w = t$, for any finite $t$.
///
/// Taking the logarithm of the argument keeps it finite where $e^t$ would overflow. Runs the Fritsch-type iteration
/// $w \leftarrow \frac{w}{1+w}(1 + t - \ln w)$ five times; below $t = -36$ the answer is $e^t$ to rounding.
/// $t = -\infty$ gives 0; $+\infty$ and NaN give themselves.
pub fn lambert_w0_exp(t: f64) -> f64 {
    if t.is_nan() || t == f64::INFINITY {
        return t;
    }
    if t < -36.0 {
        return libm::exp(t);
    }
    // e^(t−1) is right near t = 1; far below, five steps from there end at 4e-14, from e^t they converge.
    let mut w = match t {
        t if t > 1.0 => t - libm::log(t),
        t if t > -1.0 => libm::exp(t - 1.0),
        _ => libm::exp(t),
    };
    for _ in 0..5 {
        w = w / (1.0 + w) * (1.0 + t - libm::log(w));
    }
    w
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defining_equation_holds() {
        for i in -350..2000 {
            let t = f64::from(i) * 0.1;
            let w = lambert_w0_exp(t);
            let terms = w.abs().max(w.ln().abs()).max(t.abs()).max(1.0);
            assert!((w + w.ln() - t).abs() <= 4.0 * crate::linalg::U * terms, "t = {t}: w = {w}");
        }
    }

    #[test]
    fn known_values_and_limits() {
        assert!((lambert_w0_exp(1.0) - 1.0).abs() < 1e-15);
        assert!((lambert_w0_exp(0.0) - 0.567_143_290_409_784).abs() < 1e-15);
        assert_eq!(lambert_w0_exp(-700.0), (-700f64).exp());
        assert_eq!(lambert_w0_exp(f64::NEG_INFINITY), 0.0);
        assert!(lambert_w0_exp(1e300).is_finite() && lambert_w0_exp(f64::NAN).is_nan());
    }
}
