//! Helpers of the statistical tests.

use super::features::{LogFeatures, Side, SignedFeatures};
use crate::mat::MatRef;

/// Returns the kernel value of one pair under a positive map.
pub(super) fn kernel_of(map: &dyn LogFeatures<f64>, x: &[f64], y: &[f64]) -> f64 {
    let mut a = vec![f64::NAN; map.num_features()];
    let mut b = a.clone();
    map.log_features(MatRef::new(x, 1, x.len()), Side::Query, &mut a);
    map.log_features(MatRef::new(y, 1, y.len()), Side::Key, &mut b);
    a.iter().zip(&b).map(|(a, b)| (a + b).exp()).sum()
}

/// Returns the kernel value of one pair under a signed map.
pub(super) fn signed_kernel_of(map: &dyn SignedFeatures<f64>, x: &[f64], y: &[f64]) -> f64 {
    let mut a = vec![f64::NAN; map.num_features()];
    let mut b = a.clone();
    let (mut s, mut t) = ([f64::NAN], [f64::NAN]);
    map.signed_features(MatRef::new(x, 1, x.len()), Side::Query, &mut a, &mut s);
    map.signed_features(MatRef::new(y, 1, y.len()), Side::Key, &mut b, &mut t);
    (s[0] + t[0]).exp() * a.iter().zip(&b).map(|(a, b)| a * b).sum::<f64>()
}

/// Checks mean and variance of an estimator over seeds, each within five standard errors.
///
/// The standard error of the sample variance comes from the fourth moment of the sample. Five of them must stay below
/// the fraction `sharpness` of the variance; otherwise the test would prove nothing.
pub(super) fn check_moments(
    name: &str,
    seeds: u64,
    mean: f64,
    variance: f64,
    sharpness: f64,
    draw: impl FnMut(u64) -> f64,
) {
    let n = seeds as f64;
    let values: Vec<f64> = (0..seeds).map(draw).collect();
    let average = values.iter().sum::<f64>() / n;
    let standard_error = (variance / n).sqrt();
    assert!(
        (average - mean).abs() <= 5.0 * standard_error,
        "{name}: mean {average}, expected {mean} ± {standard_error}"
    );
    let central = |p: i32| values.iter().map(|v| (v - mean).powi(p)).sum::<f64>() / n;
    let (spread, fourth) = (central(2), central(4));
    let error = 5.0 * ((fourth - spread * spread) / n).sqrt();
    assert!((spread - variance).abs() <= error, "{name}: variance {spread}, expected {variance} ± {error}");
    assert!(
        error <= sharpness * variance,
        "{name}: {seeds} seeds tell the variance only to {}",
        error / variance
    );
}
