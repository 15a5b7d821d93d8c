//! Small statistics: means with intervals, medians with spread, fits in logarithms, tail bounds.

use serde::{Deserialize, Serialize};

/// A mean with an interval around it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Interval {
    /// The mean.
    #[serde(deserialize_with = "crate::reread::number")]
    pub mean: f64,
    /// Lower end, not below 0: everything measured here is non-negative.
    #[serde(deserialize_with = "crate::reread::number")]
    pub lo: f64,
    /// Upper end.
    #[serde(deserialize_with = "crate::reread::number")]
    pub hi: f64,
}

impl Interval {
    /// Returns the mean of `values` with its 95 % Student t interval; a single value is its own interval.
    pub fn student(values: &[f64]) -> Self {
        let n = values.len() as f64;
        let mean = mean(values);
        let half = match values.len() {
            0 | 1 => 0.0,
            len => {
                let variance = values.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / (n - 1.0);
                student_t_975(len - 1) * (variance / n).sqrt()
            }
        };
        Self { mean, lo: (mean - half).max(0.0), hi: mean + half }
    }

    /// Returns the mean of `values` with their smallest and largest.
    pub fn range(values: &[f64]) -> Self {
        let fold = |f: fn(f64, f64) -> f64| values.iter().copied().reduce(f).unwrap_or(f64::NAN);
        Self { mean: mean(values), lo: fold(f64::min), hi: fold(f64::max) }
    }
}

/// Returns the arithmetic mean; NaN for no values.
pub fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// Returns the 97.5 % quantile of Student's t with `df ≥ 1` degrees of freedom: from a table up to 30, then by the
/// Cornish–Fisher expansion in 1/df, whose error there is below 1e-4.
pub fn student_t_975(df: usize) -> f64 {
    const TABLE: [f64; 30] = [
        12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010, 2.1788,
        2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860, 2.0796, 2.0739, 2.0687, 2.0639,
        2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423,
    ];
    let z: f64 = 1.959_964;
    match TABLE.get(df.saturating_sub(1)) {
        Some(&t) => t,
        None => {
            let v = df as f64;
            z + (z.powi(3) + z) / (4.0 * v) + (5.0 * z.powi(5) + 16.0 * z.powi(3) + 3.0 * z) / (96.0 * v * v)
        }
    }
}

/// Median and spread of repeated measurements.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// Median.
    pub median: f64,
    /// Smallest.
    pub min: f64,
    /// Largest.
    pub max: f64,
    /// Number of values.
    pub runs: usize,
}

impl Spread {
    /// Computes the spread of `values`; `None` if there are none.
    pub fn new(values: &[f64]) -> Option<Self> {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (min, max) = (*sorted.first()?, *sorted.last()?);
        Some(Self { median: median_of_sorted(&sorted), min, max, runs: sorted.len() })
    }
}

/// Returns the median; NaN for no values.
pub fn median(values: &[f64]) -> f64 {
    Spread::new(values).map_or(f64::NAN, |s| s.median)
}

fn median_of_sorted(sorted: &[f64]) -> f64 {
    let n = sorted.len();
    if n % 2 == 1 { sorted[n / 2] } else { (sorted[n / 2 - 1] + sorted[n / 2]) / 2.0 }
}

/// Returns the slope of the least-squares line through `(ln x, ln y)`; `None` with fewer than two different `x`.
pub fn log_slope(points: &[(f64, f64)]) -> Option<f64> {
    let logs: Vec<(f64, f64)> = points.iter().map(|&(x, y)| (x.ln(), y.ln())).collect();
    let n = logs.len() as f64;
    let (mx, my) = (logs.iter().map(|p| p.0).sum::<f64>() / n, logs.iter().map(|p| p.1).sum::<f64>() / n);
    let sxx: f64 = logs.iter().map(|p| (p.0 - mx).powi(2)).sum();
    let sxy: f64 = logs.iter().map(|p| (p.0 - mx) * (p.1 - my)).sum();
    (sxx > 0.0).then(|| sxy / sxx)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn student_intervals_match_the_textbook() {
        let i = Interval::student(&[1.0, 2.0, 3.0, 4.0, 5.0]);
        assert_eq!(i.mean, 3.0);
        assert!((i.hi - 3.0 - 2.7764 * (2.5f64 / 5.0).sqrt()).abs() < 1e-12);
        assert_eq!(Interval::student(&[0.5]), Interval { mean: 0.5, lo: 0.5, hi: 0.5 });
        assert_eq!(Interval::student(&[0.0, 1.0]).lo, 0.0);
        // Tabulated values of t at 40 and 120 degrees of freedom.
        assert!((student_t_975(40) - 2.0211).abs() < 1e-4 && (student_t_975(120) - 1.9799).abs() < 1e-4);
    }

    #[test]
    fn medians_slopes_and_spreads() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(Spread::new(&[]), None);
        let cubic: Vec<(f64, f64)> = [1.0, 2.0, 5.0].iter().map(|&x: &f64| (x, 7.0 * x.powi(3))).collect();
        assert!((log_slope(&cubic).unwrap() - 3.0).abs() < 1e-12);
        assert_eq!(log_slope(&[(2.0, 1.0)]), None);
        assert_eq!(Interval::range(&[2.0, 1.0, 3.0]), Interval { mean: 2.0, lo: 1.0, hi: 3.0 });
    }
}
