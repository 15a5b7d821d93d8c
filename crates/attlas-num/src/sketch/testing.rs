//! What the statistical tests share.

use super::features::{LogFeatures, Side, SignedFeatures};
use crate::mat::MatRef;

/// The kernel that a positive map gives one pair.
pub(super) fn kernel_of(map: &dyn LogFeatures<f64>, x: &[f64], y: &[f64]) -> f64 {
    let mut a = vec![f64::NAN; map.num_features()];
    let mut b = a.clone();
    map.log_features(MatRef::new(x, 1, x.len()), Side::Query, &mut a);
    map.log_features(MatRef::new(y, 1, y.len()), Side::Key, &mut b);
    a.iter().zip(&b).map(|(a, b)| (a + b).exp()).sum()
}

/// The kernel that a signed map gives one pair.
pub(super) fn signed_kernel_of(map: &dyn SignedFeatures<f64>, x: &[f64], y: &[f64]) -> f64 {
    let mut a = vec![f64::NAN; map.num_features()];
    let mut b = a.clone();
    let (mut s, mut t) = ([f64::NAN], [f64::NAN]);
    map.signed_features(MatRef::new(x, 1, x.len()), Side::Query, &mut a, &mut s);
    map.signed_features(MatRef::new(y, 1, y.len()), Side::Key, &mut b, &mut t);
    (s[0] + t[0]).exp() * a.iter().zip(&b).map(|(a, b)| a * b).sum::<f64>()
}

/// Checks mean and variance of an estimator over seeds: the mean within five standard errors, the sample
/// variance within `tolerance` (relative), which the caller derives from the kurtosis.
pub(super) fn check_moments(
    name: &str,
    seeds: u64,
    mean: f64,
    variance: f64,
    tolerance: f64,
    mut draw: impl FnMut(u64) -> f64,
) {
    let n = seeds as f64;
    let values: Vec<f64> = (0..seeds).map(&mut draw).collect();
    let average = values.iter().sum::<f64>() / n;
    let standard_error = (variance / n).sqrt();
    assert!(
        (average - mean).abs() <= 5.0 * standard_error + 1e-12 * mean.abs(),
        "{name}: mean {average}, expected {mean} ± {standard_error}"
    );
    let spread = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n;
    assert!(
        (spread - variance).abs() <= tolerance * variance + 1e-24 * mean * mean,
        "{name}: variance {spread}, expected {variance}"
    );
}
