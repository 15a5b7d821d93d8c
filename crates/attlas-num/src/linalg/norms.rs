//! Matrix norms that are sums and maxima, and the effective ranks of a spectrum.

use crate::{MatRef, Real};

/// Largest column sum of magnitudes.
pub fn norm_one<T: Real>(a: MatRef<'_, T>) -> f64 {
    let mut sums = vec![0.0; a.cols()];
    for row in a.iter_rows() {
        sums.iter_mut().zip(row).for_each(|(s, x)| *s += x.to_f64().abs());
    }
    nan_max(sums)
}

/// Largest row sum of magnitudes.
pub fn norm_inf<T: Real>(a: MatRef<'_, T>) -> f64 {
    nan_max(a.iter_rows().map(|row| row.iter().map(|x| x.to_f64().abs()).sum()))
}

/// The largest, or NaN if any is NaN; 0 of none.
fn nan_max(values: impl IntoIterator<Item = f64>) -> f64 {
    values.into_iter().fold(0.0, |a: f64, b| if a.is_nan() || b.is_nan() { f64::NAN } else { a.max(b) })
}

/// $\|A\|_F^2 / \|A\|_2^2$ of singular values in any order: between 1 and the rank; 0 of a zero matrix.
pub fn stable_rank(sigma: &[f64]) -> f64 {
    let top = nan_max(sigma.iter().copied());
    if top == 0.0 { 0.0 } else { sigma.iter().map(|s| (s / top) * (s / top)).sum() }
}

/// Least `r` such that the first `r` of the descending singular values carry the share `v` of the sum of
/// squares; 0 of a zero matrix.
///
/// On eigenvalues of a covariance (which are variances already), pass their square roots.
pub fn variance_rank(sigma: &[f64], v: f64) -> usize {
    let top = nan_max(sigma.iter().copied());
    if top == 0.0 || top.is_nan() {
        return 0;
    }
    let energy = |s: &f64| (s / top) * (s / top);
    let wanted = v * sigma.iter().map(energy).sum::<f64>();
    let mut sum = 0.0;
    for (i, s) in sigma.iter().enumerate() {
        if sum >= wanted {
            return i;
        }
        sum += energy(s);
    }
    sigma.len()
}

/// $\exp(-\sum p_i \ln p_i)$ with $p = \sigma / \sum \sigma$; 0 of a zero matrix.
pub fn entropy_rank(sigma: &[f64]) -> f64 {
    let top = nan_max(sigma.iter().copied());
    if top == 0.0 {
        return 0.0;
    }
    let total: f64 = sigma.iter().map(|s| s / top).sum();
    let entropy: f64 = sigma
        .iter()
        .map(|s| s / top / total)
        .filter(|&p| p > 0.0 || p.is_nan())
        .map(|p| -p * libm::log(p))
        .sum();
    libm::exp(entropy)
}

/// How many singular values exceed `eps` times the largest.
pub fn eps_rank(sigma: &[f64], eps: f64) -> usize {
    let top = nan_max(sigma.iter().copied());
    sigma.iter().filter(|&&s| s > eps * top).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Mat;
    use crate::linalg::singular_values;
    use crate::linalg::testing::gaussian;

    #[test]
    fn the_worked_example_is_reproduced() {
        let sigma = [4.0, 2.0, 1.0];
        assert_eq!(stable_rank(&sigma), 1.3125);
        assert_eq!(variance_rank(&sigma, 0.9), 2);
        assert!((entropy_rank(&sigma) - 2.600_490_006_0).abs() < 5e-11);
        assert_eq!((eps_rank(&sigma, 0.25), eps_rank(&sigma, 0.2), eps_rank(&sigma, 0.5)), (2, 3, 1));
    }

    #[test]
    fn the_variance_rank_is_inclusive() {
        assert_eq!(variance_rank(&[2.0, 2.0, 2.0, 2.0], 0.5), 2);
        assert_eq!(variance_rank(&[1.0, 1.0], 1.0), 2);
        assert_eq!(variance_rank(&[1.0, 0.0], 1.0), 1);
        assert_eq!(variance_rank(&[3.0, 1.0], 0.0), 0);
    }

    #[test]
    fn zero_and_empty_spectra_have_rank_zero() {
        for sigma in [&[][..], &[0.0, 0.0]] {
            assert_eq!((stable_rank(sigma), entropy_rank(sigma)), (0.0, 0.0));
            assert_eq!((variance_rank(sigma, 0.9), eps_rank(sigma, 0.01)), (0, 0));
        }
        assert!(stable_rank(&[1e200, 1e200]) == 2.0 && entropy_rank(&[1e-320, 1e-320]) == 2.0);
    }

    #[test]
    fn stable_and_entropy_rank_lie_between_one_and_the_rank() {
        for seed in 0..20 {
            let sigma = singular_values(gaussian(12, 5, seed).as_ref()).unwrap();
            for r in [stable_rank(&sigma), entropy_rank(&sigma)] {
                assert!((1.0..=5.0).contains(&r));
            }
        }
    }

    #[test]
    fn sums_of_magnitudes_are_taken_by_rows_and_by_columns() {
        let stochastic = Mat::from_fn(4, 4, |_, _| 0.25);
        assert_eq!((norm_one(stochastic.as_ref()), norm_inf(stochastic.as_ref())), (1.0, 1.0));
        let a = Mat::from_vec(vec![1.0, -2.0, 3.0, -4.0, 0.5, 0.0], 2, 3);
        assert_eq!((norm_one(a.as_ref()), norm_inf(a.as_ref())), (5.0, 6.0));
        assert!(norm_one(Mat::from_vec(vec![f64::NAN, 1.0], 1, 2).as_ref()).is_nan());
    }
}
