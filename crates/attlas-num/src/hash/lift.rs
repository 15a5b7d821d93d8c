//! Asymmetric lifts that turn inner products into Euclidean distances, used only through projections.
//!
//! With $M_Q = \max_i |q_i|$, $M_K = \max_j |k_j|$ and $M^2 = M_Q^2 + M_K^2$, the lifts
//! $$F(q) = [\,q;\ 0;\ \sqrt{M^2 - |q|^2}\,], \qquad G(k) = [\,k;\ \sqrt{M^2 - |k|^2};\ 0\,]$$
//! into $d + 2$ dimensions have equal lengths and $|F(q) - G(k)|^2 = 2 M^2 - 2\langle q, k\rangle$: a larger
//! inner product is a smaller distance. A projection on $a \in R^{d+2}$ needs one extra product for each
//! row, so the lifted vectors are never formed.
//!
//! Reference: Daras, Kitaev, Odena and Dimakis 2020 (SMYRF), after Neyshabur and Srebro 2015.

use super::{directions, project_columns, squared_norm};
use crate::par::*;
use crate::rng::StreamKey;
use crate::{Mat, MatRef, Real};

/// Returns the largest Euclidean norm of a row; 0 without rows. Rows with a NaN are ignored.
pub fn max_norm<T: Real>(x: MatRef<'_, T>) -> f64 {
    // A maximum does not depend on the order of the comparisons.
    let rows = (0..x.rows()).into_par_iter().with_min_len(TASK_ROWS);
    rows.map(|i| squared_norm(x.row(i))).reduce(|| 0.0, f64::max).sqrt()
}

/// Fewest rows per task.
const TASK_ROWS: usize = 1024;

/// Pair of lifts for sets with given largest norms.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lift {
    squared_radius: f64,
}

impl Lift {
    /// Creates the lifts for these two sets.
    pub fn new<T: Real>(q: MatRef<'_, T>, k: MatRef<'_, T>) -> Self {
        Self::from_max_norms(max_norm(q), max_norm(k))
    }

    /// Creates the lifts for sets whose largest norms (not squared) are known, as when one set of keys serves several
    /// sets of queries.
    pub fn from_max_norms(max_q: f64, max_k: f64) -> Self {
        Self { squared_radius: max_q * max_q + max_k * max_k }
    }

    /// $M^2$, the squared length of every lifted vector.
    pub fn squared_radius(&self) -> f64 {
        self.squared_radius
    }

    /// Returns the one non-zero added coordinate of each row, $\sqrt{M^2 - |x|^2}$; never below 0, and 0 for rows with
    /// a NaN. It does not depend on the direction, so one call serves all rounds.
    pub fn heights<T: Real>(&self, x: MatRef<'_, T>) -> Vec<T> {
        x.iter_rows()
            .map(|row| T::from_f64((self.squared_radius - squared_norm(row)).max(0.0).sqrt()))
            .collect()
    }
}

/// The lift that applies to a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// $F$: the added coordinate is the last one.
    Query,
    /// $G$: the added coordinate is the last but one.
    Key,
}

/// One Gaussian direction in $d + 2$ dimensions per round.
#[derive(Clone, Debug)]
pub struct LiftedLines<T> {
    /// Components along the original coordinates, one row per round.
    flat: Mat<T>,
    /// Components along the two added coordinates, that of keys first.
    added: Vec<[T; 2]>,
}

impl<T: Real> LiftedLines<T> {
    /// Draws the directions; round `r` uses the stream `key.with(r)`.
    pub fn new(key: StreamKey, dim: usize, rounds: usize) -> Self {
        let key = key.named("lifted lines");
        let (mut flat, mut added) = (Vec::with_capacity(rounds * dim), Vec::with_capacity(rounds));
        for r in 0..rounds {
            let a = directions(&mut key.with(r as u64).rng(), 1, dim + 2).into_vec();
            flat.extend_from_slice(&a[..dim]);
            added.push([a[dim], a[dim + 1]]);
        }
        Self { flat: Mat::from_vec(flat, rounds, dim), added }
    }

    /// Takes given directions, one row of $d + 2$ elements per round. `None` if rows are shorter than 2.
    pub fn from_directions(a: MatRef<'_, T>) -> Option<Self> {
        let dim = a.cols().checked_sub(2)?;
        let flat = Mat::from_fn(a.rows(), dim, |r, j| a.at(r, j));
        Some(Self { flat, added: a.iter_rows().map(|row| [row[dim], row[dim + 1]]).collect() })
    }

    /// Converts to another element type, with the result of drawing in that type from the same stream.
    pub fn cast<U: Real>(&self) -> LiftedLines<U> {
        let added = self.added.iter().map(|a| a.map(|x| U::from_f64(x.to_f64()))).collect();
        LiftedLines { flat: self.flat.cast(), added }
    }

    /// Number of directions.
    pub fn rounds(&self) -> usize {
        self.added.len()
    }

    /// Projects the lifted rows of `x` on the line of `round`. `heights` are those of `x` from [`Lift::heights`].
    ///
    /// # Panics
    /// If `heights` and `out` do not have one element per row, or rows do not have `dim` elements.
    pub fn project_into(&self, side: Side, x: MatRef<'_, T>, heights: &[T], round: usize, out: &mut [T]) {
        assert!(x.rows() == heights.len() && x.rows() == out.len());
        let [key, query] = self.added[round];
        let along = if side == Side::Query { query } else { key };
        project_columns(x, self.flat.as_ref().sub_rows(round..round + 1), |rows, y| {
            let lifted = out[rows.clone()].iter_mut().zip(y.row(0)).zip(&heights[rows]);
            lifted.for_each(|((out, &y), &height)| *out = y + along * height);
        });
    }

    /// Projects on the lines of all rounds in one product: `n × rounds`, the rounds of a row together.
    ///
    /// # Panics
    /// If `heights` does not have one element per row, `out` not one per row and round, or rows do not have
    /// `dim` elements.
    pub fn project_rounds_into(&self, side: Side, x: MatRef<'_, T>, heights: &[T], out: &mut [T]) {
        let rounds = self.rounds();
        assert!(x.rows() == heights.len() && x.rows() * rounds == out.len());
        project_columns(x, self.flat.as_ref(), |rows, y| {
            let added = self.added.iter().map(|&[key, query]| if side == Side::Query { query } else { key });
            for (r, (y, along)) in y.iter_rows().zip(added).enumerate() {
                for (i, &y) in rows.clone().zip(y) {
                    out[i * rounds + r] = y + along * heights[i];
                }
            }
        });
    }

    /// As [`project_into`](Self::project_into), in a new vector.
    pub fn project(&self, side: Side, x: MatRef<'_, T>, heights: &[T], round: usize) -> Vec<T> {
        let mut out = vec![T::ZERO; x.rows()];
        self.project_into(side, x, heights, round, &mut out);
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::squared_distance;
    use crate::hash::tests::{assert_mean, gaussian};
    use crate::linalg::dot;

    /// The lifted vectors, formed as they are defined.
    fn lifted(lift: Lift, side: Side, x: MatRef<'_, f64>) -> Mat<f64> {
        let (heights, d) = (lift.heights(x), x.cols());
        Mat::from_fn(x.rows(), d + 2, |i, j| match (side, j) {
            (_, j) if j < d => x.at(i, j),
            (Side::Query, j) if j == d + 1 => heights[i],
            (Side::Key, j) if j == d => heights[i],
            _ => 0.0,
        })
    }

    #[test]
    fn all_rounds_at_once_are_the_rounds_one_by_one() {
        let x = gaussian::<f64>(5, 40, 7);
        let lift = Lift::from_max_norms(9.0, max_norm(x.as_ref()));
        let (heights, lines) = (lift.heights(x.as_ref()), LiftedLines::new(StreamKey::new(2), 7, 3));
        for side in [Side::Query, Side::Key] {
            let mut all = vec![f64::NAN; 120];
            lines.project_rounds_into(side, x.as_ref(), &heights, &mut all);
            for r in 0..3 {
                let one = lines.project(side, x.as_ref(), &heights, r);
                assert!((0..40).all(|i| (one[i] - all[3 * i + r]).abs() < 1e-13));
            }
        }
    }

    #[test]
    fn the_known_pair_is_lifted_as_published() {
        let (q, k) = (Mat::from_vec(vec![1.0, 0.0], 1, 2), Mat::from_vec(vec![0.0, 2.0], 1, 2));
        let lift = Lift::new(q.as_ref(), k.as_ref());
        assert_eq!(lift.squared_radius(), 5.0);
        let f = lifted(lift, Side::Query, q.as_ref());
        let g = lifted(lift, Side::Key, k.as_ref());
        assert_eq!(f.row(0), [1.0, 0.0, 0.0, 2.0]);
        assert_eq!(g.row(0), [0.0, 2.0, 1.0, 0.0]);
        assert_eq!(squared_distance(f.row(0), g.row(0)), 10.0);
    }

    #[test]
    fn lifted_distances_are_inner_products_turned_round() {
        let (q, k) = (gaussian::<f64>(1, 13, 5), gaussian::<f64>(2, 17, 5));
        let lift = Lift::new(q.as_ref(), k.as_ref());
        let (f, g) = (lifted(lift, Side::Query, q.as_ref()), lifted(lift, Side::Key, k.as_ref()));
        let m2 = lift.squared_radius();
        for i in 0..13 {
            assert!((squared_norm(f.row(i)) - m2).abs() < 1e-14 * m2);
            for j in 0..17 {
                let distance = squared_distance(f.row(i), g.row(j));
                assert!((distance - 2.0 * m2 + 2.0 * dot(q.row(i), k.row(j))).abs() < 1e-14 * m2);
            }
        }
    }

    #[test]
    fn projections_are_those_of_the_lifted_vectors() {
        let (q, k) = (gaussian::<f64>(1, 13, 5), gaussian::<f64>(2, 17, 5));
        let lift = Lift::new(q.as_ref(), k.as_ref());
        let a = gaussian::<f64>(3, 3, 7);
        let lines = LiftedLines::from_directions(a.as_ref()).unwrap();
        for (side, x) in [(Side::Query, &q), (Side::Key, &k)] {
            let up = lifted(lift, side, x.as_ref());
            for r in 0..lines.rounds() {
                let y = lines.project(side, x.as_ref(), &lift.heights(x.as_ref()), r);
                for (i, y) in y.iter().enumerate() {
                    assert!((y - dot(up.row(i), a.row(r))).abs() < 1e-13);
                }
            }
        }
    }

    #[test]
    fn projected_differences_have_the_lifted_distance_as_variance() {
        let (q, k) = (gaussian::<f64>(4, 2, 6), gaussian::<f64>(5, 2, 6));
        let lift = Lift::new(q.as_ref(), k.as_ref());
        let lines = LiftedLines::<f64>::new(StreamKey::new(6), 6, 4000);
        let (hq, hk) = (lift.heights(q.as_ref()), lift.heights(k.as_ref()));
        let squares: Vec<f64> = (0..lines.rounds())
            .map(|r| {
                let x = lines.project(Side::Query, q.as_ref(), &hq, r)[1];
                let y = lines.project(Side::Key, k.as_ref(), &hk, r)[0];
                (x - y) * (x - y)
            })
            .collect();
        assert_mean(&squares, 2.0 * lift.squared_radius() - 2.0 * dot(q.row(1), k.row(0)));
    }

    #[test]
    fn a_common_rotation_of_points_and_directions_changes_nothing() {
        let (q, k) = (gaussian::<f64>(7, 9, 2), gaussian::<f64>(8, 9, 2));
        let a = gaussian::<f64>(9, 1, 4);
        let (sin, cos) = 0.7f64.sin_cos();
        let turn = |m: &Mat<f64>| {
            Mat::from_fn(m.rows(), m.cols(), |i, j| match j {
                0 => cos * m[(i, 0)] - sin * m[(i, 1)],
                1 => sin * m[(i, 0)] + cos * m[(i, 1)],
                _ => m[(i, j)],
            })
        };
        let project = |q: &Mat<f64>, k: &Mat<f64>, a: &Mat<f64>| {
            let lift = Lift::new(q.as_ref(), k.as_ref());
            let lines = LiftedLines::from_directions(a.as_ref()).unwrap();
            let mut y = lines.project(Side::Query, q.as_ref(), &lift.heights(q.as_ref()), 0);
            y.extend(lines.project(Side::Key, k.as_ref(), &lift.heights(k.as_ref()), 0));
            y
        };
        let (plain, turned) = (project(&q, &k, &a), project(&turn(&q), &turn(&k), &turn(&a)));
        // Heights near 0 lose half the digits to the square root.
        assert!(plain.iter().zip(&turned).all(|(x, y)| (x - y).abs() < 1e-6), "{plain:?} {turned:?}");
    }

    #[test]
    fn degenerate_rows_are_projected_without_nan() {
        let zero = Mat::<f32>::zeros(2, 3);
        let lift = Lift::new(zero.as_ref(), Mat::zeros(0, 3).as_ref());
        assert_eq!(lift.squared_radius(), 0.0);
        let lines = LiftedLines::<f32>::new(StreamKey::new(1), 3, 1);
        assert_eq!(lines.project(Side::Query, zero.as_ref(), &lift.heights(zero.as_ref()), 0), [0.0, 0.0]);
        // Squares of these overflow f32, not the lift.
        let huge = Mat::from_vec(vec![1e30f32; 6], 2, 3);
        let lift = Lift::new(huge.as_ref(), huge.as_ref());
        let heights = lift.heights(huge.as_ref());
        assert!(lines.project(Side::Key, huge.as_ref(), &heights, 0).iter().all(|y| y.is_finite()));
        let bad = Mat::from_vec(vec![f32::NAN, 0.0, 0.0, 3.0, 0.0, 4.0], 2, 3);
        assert_eq!(max_norm(bad.as_ref()), 5.0);
        assert_eq!(Lift::from_max_norms(5.0, 0.0).heights(bad.as_ref()), [0.0, 0.0]);
        assert!(LiftedLines::from_directions(Mat::<f64>::zeros(1, 1).as_ref()).is_none());
    }
}
