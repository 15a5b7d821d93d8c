//! The distance of an output from the exact one.
//!
//! All figures are computed in double precision. `rows` are `d_v` wide; a row that is zero in both outputs has
//! error 0, one that is zero in the exact output alone has a relative error of infinity.

use attlas_num::Real;
use attlas_num::rng::StreamKey;

/// Distances between an output and the exact one.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Errors {
    /// $\|\hat O - O\|_F / \|O\|_F$.
    #[serde(deserialize_with = "number")]
    pub rel_fro: f64,
    /// $\|\hat O - O\|_2 / \|O\|_2$, largest singular values, by power iteration.
    #[serde(deserialize_with = "number")]
    pub rel_spectral: f64,
    /// $\max |\hat o - o|$.
    #[serde(deserialize_with = "number")]
    pub max_abs: f64,
    /// Mean over rows of the cosine between $\hat o_i$ and $o_i$.
    #[serde(deserialize_with = "number")]
    pub cosine: f64,
    /// $\sum |\hat o - o| / \sum |o|$.
    #[serde(deserialize_with = "number")]
    pub rel_l1: f64,
    /// Quantiles 0.5, 0.9, 0.99 and 1 of the relative error of rows.
    #[serde(deserialize_with = "numbers")]
    pub row_quantiles: [f64; 4],
    /// Largest and root-mean-square difference of log-sum-exp, if both outputs have one.
    pub lse: Option<LseError>,
}

/// Differences of log-sum-exp over rows that see a key.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct LseError {
    /// Largest absolute difference.
    #[serde(deserialize_with = "number")]
    pub max: f64,
    /// Root mean square.
    #[serde(deserialize_with = "number")]
    pub rms: f64,
    /// Mean of $e^{\hat\ell - \ell}$: the share of the normaliser that was found.
    #[serde(deserialize_with = "number")]
    pub mass: f64,
}

/// Reads a number back: JSON writes numbers that are not finite as null.
fn number<'de, D: serde::Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    use serde::Deserialize;
    Ok(Option::<f64>::deserialize(from)?.unwrap_or(f64::NAN))
}

fn numbers<'de, D: serde::Deserializer<'de>>(from: D) -> Result<[f64; 4], D::Error> {
    use serde::Deserialize;
    Ok(<[Option<f64>; 4]>::deserialize(from)?.map(|x| x.unwrap_or(f64::NAN)))
}

impl Errors {
    /// Compares two outputs of `d_v` columns, and their log-sum-exp if given.
    pub fn new<T: Real>(got: &[T], exact: &[T], d_v: usize, lse: Option<(&[T], &[T])>) -> Self {
        assert_eq!(got.len(), exact.len(), "outputs have different lengths");
        let wide = |x: &[T]| x.iter().map(|v| v.to_f64()).collect::<Vec<f64>>();
        let (got, exact) = (wide(got), wide(exact));
        let gap: Vec<f64> = got.iter().zip(&exact).map(|(g, e)| g - e).collect();
        let l1 = |x: &[f64]| x.iter().map(|v| v.abs()).sum::<f64>();
        let mut rows: Vec<f64> =
            gap.chunks(d_v).zip(exact.chunks(d_v)).map(|(g, e)| ratio(norm(g), norm(e))).collect();
        rows.sort_by(f64::total_cmp);
        let cosines: Vec<f64> = got.chunks(d_v).zip(exact.chunks(d_v)).map(|(g, e)| cosine(g, e)).collect();
        Self {
            rel_fro: ratio(norm(&gap), norm(&exact)),
            rel_spectral: ratio(spectral_norm(&gap, d_v), spectral_norm(&exact, d_v)),
            max_abs: gap.iter().fold(0.0, |a: f64, g| if g.is_nan() { f64::NAN } else { a.max(g.abs()) }),
            cosine: cosines.iter().sum::<f64>() / cosines.len().max(1) as f64,
            rel_l1: ratio(l1(&gap), l1(&exact)),
            row_quantiles: [0.5, 0.9, 0.99, 1.0].map(|p| quantile(&rows, p)),
            lse: lse.map(|(a, b)| LseError::new(&wide(a), &wide(b))),
        }
    }
}

impl LseError {
    fn new(got: &[f64], exact: &[f64]) -> Self {
        let gaps: Vec<f64> =
            got.iter().zip(exact).filter(|(_, e)| **e != f64::NEG_INFINITY).map(|(g, e)| g - e).collect();
        let n = gaps.len().max(1) as f64;
        Self {
            max: gaps.iter().fold(0.0, |a: f64, g| a.max(g.abs())),
            rms: (gaps.iter().map(|g| g * g).sum::<f64>() / n).sqrt(),
            mass: gaps.iter().map(|g| g.exp()).sum::<f64>() / n,
        }
    }
}

/// Returns $\|\hat O - O\|_F / \|O\|_F$.
pub fn relative_frobenius(got: &[f64], exact: &[f64]) -> f64 {
    let gap: Vec<f64> = got.iter().zip(exact).map(|(g, e)| g - e).collect();
    ratio(norm(&gap), norm(exact))
}

fn norm(x: &[f64]) -> f64 {
    x.iter().map(|v| v * v).sum::<f64>().sqrt()
}

fn ratio(gap: f64, size: f64) -> f64 {
    if gap == 0.0 { 0.0 } else { gap / size }
}

fn cosine(a: &[f64], b: &[f64]) -> f64 {
    let (na, nb) = (norm(a), norm(b));
    if na == 0.0 && nb == 0.0 {
        return 1.0;
    }
    let dot: f64 = a.iter().zip(b).map(|(x, y)| x * y).sum();
    if na == 0.0 || nb == 0.0 { 0.0 } else { dot / (na * nb) }
}

/// Returns the nearest-rank quantile of sorted values; 0 if there are none.
fn quantile(sorted: &[f64], p: f64) -> f64 {
    let rank = (p * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1).min(sorted.len().saturating_sub(1))).copied().unwrap_or(0.0)
}

/// Returns the largest singular value of a matrix of `cols` columns, by power iteration on its small Gram matrix.
fn spectral_norm(x: &[f64], cols: usize) -> f64 {
    let mut gram = vec![0.0; cols * cols];
    for row in x.chunks(cols) {
        for (i, a) in row.iter().enumerate() {
            gram[i * cols..(i + 1) * cols].iter_mut().zip(row).for_each(|(g, b)| *g += a * b);
        }
    }
    let mut rng = StreamKey::new(0).named("spectral norm").rng();
    let mut y: Vec<f64> = (0..cols).map(|_| rng.normal()).collect();
    let mut value = 0.0;
    for _ in 0..200 {
        let size = norm(&y);
        if size == 0.0 || !size.is_finite() {
            return size.sqrt();
        }
        let unit: Vec<f64> = y.iter().map(|v| v / size).collect();
        y = gram.chunks(cols).map(|row| row.iter().zip(&unit).map(|(a, b)| a * b).sum()).collect();
        let next: f64 = y.iter().zip(&unit).map(|(a, b)| a * b).sum();
        let done = (next - value).abs() <= 1e-12 * next.abs();
        value = next;
        if done {
            break;
        }
    }
    value.max(0.0).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_distances() {
        let exact = [3.0, 4.0, 0.0, 0.0];
        let got = [3.0, 4.0, 0.0, 1.0];
        let e =
            Errors::new(&got, &exact, 2, Some((&[0.0, f64::NEG_INFINITY], &[2f64.ln(), f64::NEG_INFINITY])));
        assert_eq!((e.rel_fro, e.max_abs, e.rel_l1), (0.2, 1.0, 1.0 / 7.0));
        assert!((e.rel_spectral - 0.2).abs() < 1e-12);
        assert_eq!(e.cosine, 0.5);
        assert_eq!(e.row_quantiles[0], 0.0);
        assert_eq!(e.row_quantiles[3], f64::INFINITY);
        let lse = e.lse.unwrap();
        assert!((lse.max - 2f64.ln()).abs() < 1e-15 && (lse.mass - 0.5).abs() < 1e-15);
    }

    #[test]
    fn equal_outputs_have_no_error() {
        let x = [1.0f32, 2.0, -3.0, 0.5, 0.0, 0.0];
        let e = Errors::new(&x, &x, 3, None);
        assert_eq!(
            (e.rel_fro, e.rel_spectral, e.max_abs, e.rel_l1, e.row_quantiles[3]),
            (0.0, 0.0, 0.0, 0.0, 0.0)
        );
        assert!((e.cosine - 1.0).abs() < 1e-12);
        let empty = Errors::new::<f64>(&[], &[], 4, None);
        assert_eq!(empty.rel_fro, 0.0);
    }

    #[test]
    fn the_spectral_norm_is_the_largest_singular_value() {
        // Singular values 3 and 1, rotated.
        let (c, s) = (0.6, 0.8);
        let x = [3.0 * c, 3.0 * s, -s, c];
        assert!((spectral_norm(&x, 2) - 3.0).abs() < 1e-9);
    }
}
