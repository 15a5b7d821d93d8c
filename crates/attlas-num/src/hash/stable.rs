//! The p-stable hash of Euclidean space (E2LSH).
//!
//! $h(x) = \lfloor (\langle w, x\rangle + b) / r \rfloor$ with $w \sim N(0, I)$, $b \sim U[0, r)$ and a bucket
//! width $r > 0$. Two points at distance $c$ collide with probability
//! $$p(c) = 1 - 2\Phi(-r/c) - \frac{2c}{\sqrt{2\pi}\, r}\bigl(1 - e^{-r^2/(2c^2)}\bigr), \quad p(0) = 1,$$
//! and with $t$ functions at once with probability $p(c)^t$ (Datar, Immorlica, Indyk and Mirrokni 2004).

use super::{Lsh, directions, project_tiles};
use crate::rng::StreamKey;
use crate::{Mat, MatRef, Real};
use std::f64::consts::{FRAC_1_SQRT_2, PI};

/// Returns the probability that two points at `distance` share a bucket of one function of the given `width`.
pub fn collision_probability(distance: f64, width: f64) -> f64 {
    let distance = distance.abs();
    if distance == 0.0 {
        return 1.0;
    }
    let u = width / distance;
    if u == 0.0 {
        return 0.0;
    }
    // 1 − 2Φ(−u) = erf(u/√2); expm1 keeps the bracket accurate for small u.
    let p = libm::erf(u * FRAC_1_SQRT_2) + 2.0 / ((2.0 * PI).sqrt() * u) * libm::expm1(-0.5 * u * u);
    p.clamp(0.0, 1.0)
}

/// Hash functions of one bucket width, `functions` of them in each round.
///
/// [`Lsh::codes`] gives a 64-bit fingerprint of the tuple of bucket numbers: equal tuples have equal codes, different
/// ones collide with probability about $2^{-64}$; with no functions all points share one code. A projection that is NaN
/// counts as bucket 0; one beyond the range of `i64` is clamped to it.
#[derive(Clone, Debug)]
pub struct PStable<T> {
    dim: usize,
    width: f64,
    functions: usize,
    rounds: Vec<RoundFunctions<T>>,
}

#[derive(Clone, Debug)]
struct RoundFunctions<T> {
    directions: Mat<T>,
    offsets: Vec<f64>,
}

impl<T: Real> PStable<T> {
    /// Draws the functions. `None` unless `width` is positive and finite.
    pub fn new(key: StreamKey, dim: usize, width: f64, functions: usize, rounds: usize) -> Option<Self> {
        let key = key.named("p-stable");
        let draw = |r: usize| {
            let key = key.with(r as u64);
            let mut offset = key.named("offsets").rng();
            RoundFunctions {
                directions: directions(&mut key.rng(), functions, dim),
                offsets: (0..functions).map(|_| offset.uniform() * width).collect(),
            }
        };
        (width > 0.0 && width.is_finite()).then(|| Self {
            dim,
            width,
            functions,
            rounds: (0..rounds).map(draw).collect(),
        })
    }

    /// Converts to another element type, with the result of drawing in that type from the same stream.
    pub fn cast<U: Real>(&self) -> PStable<U> {
        let cast = |r: &RoundFunctions<T>| RoundFunctions {
            directions: r.directions.cast(),
            offsets: r.offsets.clone(),
        };
        PStable {
            dim: self.dim,
            width: self.width,
            functions: self.functions,
            rounds: self.rounds.iter().map(cast).collect(),
        }
    }

    /// Width of a bucket.
    pub fn width(&self) -> f64 {
        self.width
    }

    /// Functions in each round.
    pub fn functions(&self) -> usize {
        self.functions
    }

    /// Returns the probability that two points at `distance` have equal codes in one round.
    pub fn collision_probability(&self, distance: f64) -> f64 {
        collision_probability(distance, self.width).powi(self.functions.min(i32::MAX as usize) as i32)
    }

    fn for_each_tuple(
        &self,
        x: MatRef<'_, T>,
        round: usize,
        mut f: impl FnMut(usize, &mut dyn Iterator<Item = i64>),
    ) {
        let RoundFunctions { directions, offsets } = &self.rounds[round];
        project_tiles(x, directions.as_ref(), |i, y| {
            let bucket = |(y, b): (&T, &f64)| ((y.to_f64() + b) / self.width).floor() as i64;
            f(i, &mut y.iter().zip(offsets).map(bucket));
        });
    }
}

impl<T: Real> Lsh<T> for PStable<T> {
    type Code = u64;

    fn dim(&self) -> usize {
        self.dim
    }

    fn rounds(&self) -> usize {
        self.rounds.len()
    }

    fn codes_into(&self, x: MatRef<'_, T>, round: usize, out: &mut [u64]) {
        assert_eq!(x.rows(), out.len());
        self.for_each_tuple(x, round, |i, tuple| out[i] = fingerprint(tuple));
    }
}

/// Computes a 64-bit digest of a tuple: a bijection (SplitMix64's finaliser) mixes each word into the state.
fn fingerprint(tuple: &mut dyn Iterator<Item = i64>) -> u64 {
    tuple.fold(0x9e37_79b9_7f4a_7c15, |state, word| {
        let mut z = state.rotate_left(29) ^ (word as u64).wrapping_mul(0xd6e8_feb8_6659_fd93);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::tests::{assert_frequency, assert_mean, gaussian};

    /// Computes the tuples of bucket numbers of all rows: `n × functions`.
    fn bucket_numbers<T: Real>(hash: &PStable<T>, x: MatRef<'_, T>, round: usize) -> Mat<i64> {
        let mut out = Vec::with_capacity(x.rows() * hash.functions);
        hash.for_each_tuple(x, round, |_, tuple| out.extend(tuple));
        Mat::from_vec(out, x.rows(), hash.functions)
    }

    #[test]
    fn collision_probabilities_are_the_known_ones() {
        for (c, r, p) in [(1.0, 1.0, 0.3687), (1.0, 4.0, 0.8005), (2.0, 1.0, 0.1954), (0.5, 4.0, 0.9003)] {
            assert!((collision_probability(c, r) - p).abs() < 5e-5, "({c}, {r})");
        }
    }

    #[test]
    fn collision_probabilities_have_the_right_limits() {
        assert_eq!(collision_probability(0.0, 1.0), 1.0);
        assert_eq!(collision_probability(f64::INFINITY, 1.0), 0.0);
        assert_eq!(collision_probability(1e-300, 1.0), 1.0);
        // For wide distances p(c) → r / (c √(2π)).
        let far = collision_probability(1e9, 2.0);
        assert!((far / (2e-9 / (2.0 * PI).sqrt()) - 1.0).abs() < 1e-9);
        let p: Vec<f64> = (0..200).map(|i| collision_probability(0.05 * f64::from(i), 1.5)).collect();
        assert!(p.windows(2).all(|w| w[0] > w[1]));
    }

    #[test]
    fn points_collide_with_the_closed_form_probability() {
        let rounds = 20_000;
        for (distance, width, t) in
            [(1.0, 1.0, 1), (1.0, 4.0, 1), (2.0, 1.0, 1), (0.5, 4.0, 2), (1.5, 3.0, 3)]
        {
            let hash = PStable::<f64>::new(StreamKey::new(5), 4, width, t, rounds).unwrap();
            let law = collision_probability(distance, width).powi(t as i32);
            assert!((hash.collision_probability(distance) - law).abs() < 1e-15);
            let offsets: Vec<f64> = hash.rounds.iter().flat_map(|r| r.offsets.iter().copied()).collect();
            assert!(offsets.iter().all(|b| (0.0..width).contains(b)));
            assert_mean(&offsets, width / 2.0);
            // A common shift must not matter.
            for shift in [0.0, 3.0] {
                let mut pair = Mat::from_fn(2, 4, |_, j| shift * (1.0 - j as f64));
                pair[(1, 2)] += 0.6 * distance;
                pair[(1, 3)] += 0.8 * distance;
                let hits = (0..rounds).filter(|&r| {
                    let codes = hash.codes(pair.as_ref(), r);
                    codes[0] == codes[1]
                });
                assert_frequency(hits.count(), rounds, law);
            }
        }
    }

    #[test]
    fn bucket_numbers_have_the_law_of_a_shifted_gaussian() {
        // ⌊(g + b)/r⌋ = j with g ~ N(0, |x|²) and b uniform: the mean over b of a Gaussian interval.
        let (rounds, width, length) = (20_000, 1.5, 2.0f64);
        let hash = PStable::<f64>::new(StreamKey::new(13), 4, width, 1, rounds).unwrap();
        let x = Mat::from_vec(vec![0.6 * length, 0.0, -0.8 * length, 0.0], 1, 4);
        let numbers: Vec<i64> = (0..rounds).map(|r| bucket_numbers(&hash, x.as_ref(), r)[(0, 0)]).collect();
        let below = |t: f64| 0.5 * libm::erfc(-t / length / 2f64.sqrt());
        for j in -3..=3 {
            let steps = 2000;
            let mass = |i: usize| {
                let b = (i as f64 + 0.5) / steps as f64 * width;
                below((j + 1) as f64 * width - b) - below(j as f64 * width - b)
            };
            let law = (0..steps).map(mass).sum::<f64>() / steps as f64;
            assert_frequency(numbers.iter().filter(|n| **n == j).count(), rounds, law);
        }
    }

    #[test]
    fn codes_are_equal_exactly_where_tuples_are() {
        let x = gaussian::<f64>(1, 400, 3);
        let hash = PStable::<f64>::new(StreamKey::new(2), 3, 2.0, 2, 2).unwrap();
        let (codes, tuples) = (hash.codes(x.as_ref(), 1), bucket_numbers(&hash, x.as_ref(), 1));
        let mut collisions = 0;
        for i in 0..400 {
            for j in 0..i {
                assert_eq!(codes[i] == codes[j], tuples.row(i) == tuples.row(j));
                collisions += usize::from(codes[i] == codes[j]);
            }
        }
        assert!(collisions > 100);
        // Buckets lie on both sides of zero: floor, not truncation.
        assert!(tuples.data().iter().any(|&b| b < 0) && tuples.data().iter().any(|&b| b > 0));
    }

    #[test]
    fn bucket_numbers_are_the_floors_of_shifted_projections() {
        let x = gaussian::<f32>(3, 20, 9);
        let hash = PStable::<f32>::new(StreamKey::new(2), 9, 0.7, 3, 1).unwrap();
        let buckets = bucket_numbers(&hash, x.as_ref(), 0);
        for i in 0..20 {
            for t in 0..3 {
                let RoundFunctions { directions, offsets } = &hash.rounds[0];
                assert!((0.0..0.7).contains(&offsets[t]));
                let y = crate::linalg::dot(x.row(i), directions.row(t)).to_f64() + offsets[t];
                let low = buckets[(i, t)] as f64 * 0.7;
                assert!(low <= y + 1e-12 && y < low + 0.7 + 1e-12);
            }
        }
    }

    #[test]
    fn degenerate_input_has_a_defined_code() {
        for width in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(PStable::<f64>::new(StreamKey::new(0), 2, width, 1, 1).is_none());
        }
        let none = PStable::<f64>::new(StreamKey::new(0), 2, 1.0, 0, 1).unwrap();
        let codes = none.codes(gaussian(1, 5, 2).as_ref(), 0);
        assert!(codes.iter().all(|&c| c == codes[0]));
        assert_eq!(bucket_numbers(&none, gaussian(1, 5, 2).as_ref(), 0).rows(), 5);
        let hash = PStable::<f64>::new(StreamKey::new(0), 2, 1.0, 2, 1).unwrap();
        let rows = Mat::from_vec(vec![f64::NAN, 1.0, 0.0, 0.0, 0.0, 0.0, 1e300, 1e300], 4, 2);
        let buckets = bucket_numbers(&hash, rows.as_ref(), 0);
        assert_eq!(buckets.row(0), [0, 0]);
        assert_eq!(buckets.row(1), buckets.row(2));
        assert!(buckets.row(3).iter().all(|&b| b == i64::MAX || b == i64::MIN));
        assert!(hash.codes(Mat::zeros(0, 2).as_ref(), 0).is_empty());
    }
}
