//! Error against size: the approximation error of a tensor as the rank grows.

use super::{Result, Tensor, cp, tucker};
use crate::rng::StreamKey;
use crate::{Mat, Real};

/// One point of an error curve.
#[derive(Clone, Debug, PartialEq)]
pub struct Point {
    /// Rank per mode; the number of terms, once, for the polyadic form.
    pub ranks: Vec<usize>,
    /// Numbers stored.
    pub parameters: usize,
    /// `‖T − T̂‖ / ‖T‖`.
    pub rel_error: f64,
    /// True if two terms grow and cancel at this rank; never for Tucker.
    pub degenerate: bool,
}

/// Computes the polyadic error for each rank of the list, in the order given.
///
/// If a rank exceeds the one before, the earlier terms extended by random columns are tried as a further start. Its
/// first update is at least as good as the earlier terms, so errors along an increasing list never rise by more than
/// rounding (with `ridge = 0`).
pub fn polyadic<T: Real>(t: &Tensor<T>, ranks: &[usize], options: &cp::Options) -> Result<Vec<Point>> {
    let mut points = Vec::with_capacity(ranks.len());
    let mut earlier: Option<cp::Fit<T>> = None;
    for &rank in ranks {
        let mut fit = cp::decompose(t, rank, options)?;
        if let Some(old) = earlier.as_ref().filter(|old| old.cp.rank() < rank) {
            let start = widened(&old.cp.cast::<f64>(), rank, options.seed);
            let warm = cp::Options { init: cp::Init::Given(start), restarts: 1, ..options.clone() };
            let other = cp::decompose(t, rank, &warm)?;
            if other.rel_error < fit.rel_error {
                fit = other;
            }
        }
        points.push(Point {
            ranks: vec![rank],
            parameters: fit.cp.parameters(),
            rel_error: fit.rel_error,
            degenerate: fit.status == cp::Status::Degenerate,
        });
        earlier = Some(fit);
    }
    Ok(points)
}

/// Returns the terms with standard normal columns added up to `rank`.
fn widened(old: &cp::Cp<f64>, rank: usize, seed: u64) -> cp::Cp<f64> {
    let key = StreamKey::new(seed).named("cp widened").with(rank as u64);
    let widen = |(m, f): (usize, &Mat<f64>)| {
        let mut rng = key.with(m as u64).rng();
        Mat::from_fn(f.rows(), rank, |i, r| if r < old.rank() { f[(i, r)] } else { rng.normal() })
    };
    cp::Cp { weights: vec![1.0; rank], factors: old.factors.iter().enumerate().map(widen).collect() }
}

/// Computes the Tucker error for each list of ranks.
pub fn tucker<T: Real>(t: &Tensor<T>, ranks: &[Vec<usize>], options: &tucker::Options) -> Result<Vec<Point>> {
    ranks
        .iter()
        .map(|list| {
            let fit = tucker::decompose(t, &tucker::Ranks::Given(list.clone()), options)?;
            Ok(Point {
                ranks: list.clone(),
                parameters: fit.tucker.parameters(),
                rel_error: fit.rel_error,
                degenerate: false,
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::known::fill;
    use super::*;

    #[test]
    fn polyadic_errors_fall_with_the_rank() {
        let t = fill(&[3, 4, 5], 70).unwrap();
        let options = cp::Options { iters: 200, ..Default::default() };
        let points = polyadic(&t, &[1, 2, 3, 5, 8], &options).unwrap();
        for pair in points.windows(2) {
            assert!(pair[1].rel_error <= pair[0].rel_error + 1e-12, "{points:?}");
        }
        assert_eq!(points[2].parameters, 3 * 13);
        assert!(points[4].rel_error < 0.1 * points[0].rel_error);
    }

    #[test]
    fn tucker_errors_fall_with_nested_ranks_and_vanish_at_full_rank() {
        let t = fill(&[3, 4, 5], 70).unwrap();
        let ranks: Vec<Vec<usize>> = vec![vec![1, 1, 1], vec![2, 2, 2], vec![2, 3, 4], vec![3, 4, 5]];
        let options = tucker::Options { method: tucker::Method::Hooi, ..Default::default() };
        let points = tucker(&t, &ranks, &options).unwrap();
        assert!(points.windows(2).all(|p| p[1].rel_error < p[0].rel_error), "{points:?}");
        assert!(points[3].rel_error < 100.0 * f64::EPSILON);
        assert_eq!(points[1].parameters, 8 + 2 * 12);
    }
}
