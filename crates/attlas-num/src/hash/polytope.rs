//! The cross-polytope hash: the index of the signed random direction nearest in angle.
//!
//! With $k$ Gaussian directions and $y = W x$, $h(x) = \arg\max\,[y_0, \dots, y_{k-1}, -y_0, \dots,
//! -y_{k-1}]$, so there are $2k$ buckets. $h(a x) = h(x)$ for $a > 0$, and $h(-x) = h(x) + k \bmod 2k$. With
//! $k = 1$ it is one sign bit, and two points at angle $\theta$ collide with probability $1 - \theta/\pi$.
//!
//! Many buckets are factored, $n_b = f_1 \cdots f_t$ with even factors: one hash of $f_i / 2$ directions for
//! each, combined as $\sum_i h_i \prod_{j<i} f_j$, at $d \sum_i f_i / 2$ multiplications instead of
//! $d\, n_b / 2$.
//!
//! References: Andoni et al. 2015 (the family); Kitaev, Kaiser and Levskaya 2020 and trax (Gaussian rows,
//! factorisation).

use super::{Lsh, directions, project_tiles};
use crate::rng::StreamKey;
use crate::{Mat, MatRef, Real};

/// Most buckets a hash may have, so that a code fits `u32` with room to spare.
const MAX_BUCKETS: usize = 1 << 31;

/// Factors a bucket count as trax does: one factor up to 128, else $2^{\lceil \log_2 \sqrt{n_b} \rceil}$ and the
/// largest even number that keeps the product at most $n_b$.
///
/// `buckets` is first clamped to $2 \dots 2^{31}$ and rounded up to an even number.
pub fn factor_buckets(buckets: usize) -> Vec<usize> {
    let even = buckets.clamp(2, MAX_BUCKETS).next_multiple_of(2);
    if even <= 128 {
        return vec![even];
    }
    let mut first = 1;
    while first * first < even {
        first *= 2;
    }
    vec![first, 2 * (even / (2 * first))]
}

/// Cross-polytope hash functions for a number of rounds.
///
/// Ties go to the positive side, then to the lowest index, so the zero vector is in bucket 0; so are rows with a NaN.
#[derive(Clone, Debug)]
pub struct CrossPolytope<T> {
    dim: usize,
    factors: Vec<usize>,
    /// Directions of each round: those of the first factor, then of the second, and so on.
    rounds: Vec<Mat<T>>,
}

impl<T: Real> CrossPolytope<T> {
    /// Draws functions of about `buckets` buckets, factored by [`factor_buckets`]; [`buckets`](Self::buckets) returns
    /// the exact number.
    pub fn new(key: StreamKey, dim: usize, buckets: usize, rounds: usize) -> Self {
        Self::draw(key, dim, factor_buckets(buckets), rounds)
    }

    fn draw(key: StreamKey, dim: usize, factors: Vec<usize>, rounds: usize) -> Self {
        let width = factors.iter().sum::<usize>() / 2;
        let key = key.named("cross-polytope");
        let rounds = (0..rounds).map(|r| directions(&mut key.with(r as u64).rng(), width, dim)).collect();
        Self { dim, factors, rounds }
    }

    /// Converts to another element type, with the result of drawing in that type from the same stream.
    pub fn cast<U: Real>(&self) -> CrossPolytope<U> {
        let rounds = self.rounds.iter().map(Mat::cast).collect();
        CrossPolytope { dim: self.dim, factors: self.factors.clone(), rounds }
    }

    /// Number of buckets: every code is below it.
    pub fn buckets(&self) -> usize {
        self.factors.iter().product()
    }

    /// The factors of the number of buckets.
    pub fn factors(&self) -> &[usize] {
        &self.factors
    }
}

impl<T: Real> Lsh<T> for CrossPolytope<T> {
    type Code = u32;

    fn dim(&self) -> usize {
        self.dim
    }

    fn rounds(&self) -> usize {
        self.rounds.len()
    }

    fn codes_into(&self, x: MatRef<'_, T>, round: usize, out: &mut [u32]) {
        assert_eq!(x.rows(), out.len());
        project_tiles(x, self.rounds[round].as_ref(), |i, mut y| {
            let (mut code, mut place) = (0, 1);
            for &factor in &self.factors {
                let (own, rest) = y.split_at(factor / 2);
                code += place * nearest_vertex(own);
                place *= factor;
                y = rest;
            }
            out[i] = code as u32;
        });
    }
}

/// Returns the index of the largest of `[y, −y]`, the first one among equals.
fn nearest_vertex<T: Real>(y: &[T]) -> usize {
    let (mut high, mut low) = ((T::NEG_INFINITY, 0), (T::NEG_INFINITY, 0));
    for (j, &v) in y.iter().enumerate() {
        if v > high.0 {
            high = (v, j);
        }
        if -v > low.0 {
            low = (-v, j);
        }
    }
    if low.0 > high.0 { y.len() + low.1 } else { high.1 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::tests::{assert_frequency, gaussian, pair_at_angle};
    use std::f64::consts::PI;

    fn collisions(buckets: usize, theta: f64, rounds: usize) -> usize {
        let hash = CrossPolytope::<f64>::new(StreamKey::new(11), 6, buckets, rounds);
        let pair = pair_at_angle(6, theta, 3.0);
        (0..rounds).filter(|&r| hash.codes(pair.as_ref(), r).windows(2).all(|c| c[0] == c[1])).count()
    }

    #[test]
    fn two_buckets_collide_as_one_sign_bit_does() {
        for theta in [0.1, 0.5, 1.0, PI / 2.0, 2.5] {
            assert_frequency(collisions(2, theta, 20_000), 20_000, 1.0 - theta / PI);
        }
    }

    #[test]
    fn two_directions_collide_as_the_plane_rotation_does() {
        // The nearest of ±w_0, ±w_1 is a comparison of |y_0| and |y_1|, i.e. the signs of y_0 + y_1 and
        // y_0 − y_1, which are those of two independent Gaussian directions: (1 − θ/π)².
        for theta in [0.2, 0.8, 1.4] {
            assert_frequency(collisions(4, theta, 20_000), 20_000, (1.0 - theta / PI).powi(2));
        }
    }

    #[test]
    fn collisions_get_rarer_as_the_angle_grows() {
        let seen: Vec<usize> = [0.1, 0.4, 0.8, 1.2, 1.6].iter().map(|&t| collisions(12, t, 4000)).collect();
        assert!(seen.windows(2).all(|w| w[0] > w[1] + 100), "{seen:?}");
        // Points at a right angle have independent projections: any two of 12 buckets are equally likely.
        assert_frequency(collisions(12, PI / 2.0, 20_000), 20_000, 1.0 / 12.0);
    }

    #[test]
    fn factors_collide_independently() {
        let hash = CrossPolytope::<f64>::draw(StreamKey::new(3), 5, vec![2, 2, 2], 20_000);
        let pair = pair_at_angle(5, 0.6, 1.0);
        let hits = (0..20_000).filter(|&r| hash.codes(pair.as_ref(), r).windows(2).all(|c| c[0] == c[1]));
        assert_frequency(hits.count(), 20_000, (1.0 - 0.6 / PI).powi(3));
    }

    #[test]
    fn the_nearest_vertex_is_the_first_largest_of_both_signs() {
        for n in 1..40 {
            let x = gaussian::<f64>(n as u64, 2, n);
            // Coarse values repeat, so the maximum has ties.
            let coarse: Vec<f64> = x.row(1).iter().map(|v| (2.0 * v).round()).collect();
            for y in [x.row(0), &coarse, &vec![0.0; n], &vec![f64::NAN; n]] {
                let both: Vec<f64> = y.iter().copied().chain(y.iter().map(|v| -v)).collect();
                let first = |best: usize, j: usize| if both[j] > both[best] { j } else { best };
                assert_eq!(nearest_vertex(y), (0..2 * n).fold(0, first), "{y:?}");
            }
        }
    }

    #[test]
    fn codes_ignore_length_and_move_by_half_the_buckets_under_negation() {
        let x = gaussian::<f64>(1, 300, 16);
        let hash = CrossPolytope::<f64>::new(StreamKey::new(2), 16, 20, 3);
        let scaled = Mat::from_fn(300, 16, |i, j| 8.0 * x[(i, j)]);
        let negated = Mat::from_fn(300, 16, |i, j| -x[(i, j)]);
        for r in 0..3 {
            let codes = hash.codes(x.as_ref(), r);
            assert_eq!(codes, hash.codes(scaled.as_ref(), r));
            let moved: Vec<u32> = codes.iter().map(|c| (c + 10) % 20).collect();
            assert_eq!(moved, hash.codes(negated.as_ref(), r));
            // Listing the smallest instead of the largest entry only relabels the buckets.
            let argmin: Vec<u32> = (0..300)
                .map(|i| {
                    let y: Vec<f64> = (0..10)
                        .map(|k| x.row(i).iter().zip(hash.rounds[r].row(k)).map(|(a, b)| a * b).sum())
                        .collect();
                    let both: Vec<f64> = y.iter().copied().chain(y.iter().map(|v| -v)).collect();
                    (0..20).min_by(|&a, &b| both[a].total_cmp(&both[b])).unwrap() as u32
                })
                .collect();
            assert_eq!(moved, argmin);
        }
    }

    #[test]
    fn every_bucket_is_equally_likely_over_directions() {
        let rounds = 20_000;
        let x = gaussian::<f64>(2, 1, 6);
        for factors in [vec![10], vec![4, 2]] {
            let hash = CrossPolytope::<f64>::draw(StreamKey::new(12), 6, factors, rounds);
            let mut seen = vec![0; hash.buckets()];
            (0..rounds).for_each(|r| seen[hash.codes(x.as_ref(), r)[0] as usize] += 1);
            seen.iter().for_each(|&s| assert_frequency(s, rounds, 1.0 / hash.buckets() as f64));
        }
    }

    #[test]
    fn bucket_counts_factor_as_in_trax() {
        assert_eq!(factor_buckets(0), [2]);
        assert_eq!(factor_buckets(7), [8]);
        assert_eq!(factor_buckets(128), [128]);
        assert_eq!(factor_buckets(130), [16, 8]);
        assert_eq!(factor_buckets(200), [16, 12]);
        assert_eq!(factor_buckets(256), [16, 16]);
        assert_eq!(factor_buckets(4096), [64, 64]);
        for n in (130..5000).step_by(2) {
            let f = factor_buckets(n);
            assert!(f.iter().all(|f| f % 2 == 0 && *f > 0) && f.iter().product::<usize>() <= n);
        }
        assert!(factor_buckets(usize::MAX).iter().product::<usize>() <= MAX_BUCKETS);
    }

    #[test]
    fn codes_fill_the_range_and_combine_with_the_first_factor_fastest() {
        let x = gaussian::<f32>(5, 4000, 8);
        let hash = CrossPolytope::<f32>::draw(StreamKey::new(6), 8, vec![4, 6], 1);
        let codes = hash.codes(x.as_ref(), 0);
        let mut seen = [0; 24];
        codes.iter().for_each(|&c| seen[c as usize] += 1);
        assert!(seen.iter().all(|&s| s > 0), "{seen:?}");
        for (i, &c) in codes.iter().enumerate() {
            let y = |k| crate::linalg::dot(x.row(i), hash.rounds[0].row(k));
            let first = nearest_vertex(&[y(0), y(1)]);
            let second = nearest_vertex(&[y(2), y(3), y(4)]);
            assert_eq!(c as usize, first + 4 * second);
        }
    }

    #[test]
    fn zero_nan_and_no_rows_have_a_defined_code() {
        let hash = CrossPolytope::<f64>::new(StreamKey::new(2), 3, 200, 2);
        let rows = Mat::from_vec(vec![0.0, 0.0, 0.0, f64::NAN, 1.0, 2.0, -0.0, 0.0, -0.0], 3, 3);
        assert_eq!(hash.codes(rows.as_ref(), 1), [0, 0, 0]);
        let infinite = Mat::from_vec(vec![f64::INFINITY, f64::NEG_INFINITY, 1.0], 1, 3);
        assert!((hash.codes(infinite.as_ref(), 0)[0] as usize) < hash.buckets());
        assert!(hash.codes(Mat::zeros(0, 3).as_ref(), 0).is_empty());
        assert_eq!(
            CrossPolytope::<f64>::new(StreamKey::new(2), 0, 8, 1).codes(Mat::zeros(2, 0).as_ref(), 0),
            [0, 0]
        );
    }

    #[test]
    fn more_rounds_begin_with_the_same_rounds() {
        let x = gaussian::<f64>(1, 50, 4);
        let few = CrossPolytope::<f64>::new(StreamKey::new(9), 4, 8, 2);
        let many = CrossPolytope::<f64>::new(StreamKey::new(9), 4, 8, 5);
        assert_eq!(few.codes(x.as_ref(), 1), many.codes(x.as_ref(), 1));
        assert_ne!(many.codes(x.as_ref(), 1), many.codes(x.as_ref(), 2));
    }
}
