//! The sign hash, and the Gray order of its codes, in which neighbours differ in one bit.
//!
//! Bit $t$ of a code is $[\langle w_t, x\rangle > 0]$ for a Gaussian direction $w_t$, so two points at angle
//! $\theta$ agree in each bit with probability $1 - \theta/\pi$, independently, and the Hamming distance of
//! their codes is binomial with parameters $r$ and $\theta/\pi$ (Goemans and Williamson 1995; Charikar 2002).
//!
//! [`gray_rank`] is the position of a code in the reflected Gray sequence: sorted by rank, consecutive codes
//! differ in exactly one bit, also from the last to the first. For $r \ge 2$ bits the ranks of two points
//! are neighbours on that cycle with probability $(2\theta/\pi)(1 - \theta/\pi)^{r-1}$. (The map in the other
//! direction gives no such order; public code that sorts by it places codes next to each other that differ in
//! up to four of seven bits.)

use super::{Lsh, directions, project_columns};
use crate::rng::StreamKey;
use crate::{Mat, MatRef, Real};

/// Most bits of a code.
pub const MAX_BITS: usize = 31;

/// Returns the position of `code` in the reflected Gray sequence, whose entry $r$ is $r \oplus \lfloor r/2 \rfloor$.
pub fn gray_rank(code: u32) -> u32 {
    let mut rank = code;
    for shift in [1, 2, 4, 8, 16] {
        rank ^= rank >> shift;
    }
    rank
}

/// Sign hash functions of `bits` bits for a number of rounds.
///
/// Zero vectors and rows with a NaN have code 0; with no bits, all rows do.
#[derive(Clone, Debug)]
pub struct SignHash<T> {
    dim: usize,
    bits: usize,
    rounds: Vec<Mat<T>>,
}

impl<T: Real> SignHash<T> {
    /// Draws the directions. `None` if `bits` is more than [`MAX_BITS`].
    pub fn new(key: StreamKey, dim: usize, bits: usize, rounds: usize) -> Option<Self> {
        let key = key.named("sign hash");
        (bits <= MAX_BITS).then(|| Self {
            dim,
            bits,
            rounds: (0..rounds).map(|r| directions(&mut key.with(r as u64).rng(), bits, dim)).collect(),
        })
    }

    /// Converts to another element type, with the result of drawing in that type from the same stream.
    pub fn cast<U: Real>(&self) -> SignHash<U> {
        SignHash { dim: self.dim, bits: self.bits, rounds: self.rounds.iter().map(Mat::cast).collect() }
    }

    /// Bits of a code: every code is below `1 << bits`.
    pub fn bits(&self) -> usize {
        self.bits
    }

    /// Directions of a round, one per row.
    pub fn directions(&self, round: usize) -> MatRef<'_, T> {
        self.rounds[round].as_ref()
    }

    /// Computes the Gray ranks of the codes of all rows: sorting by them puts similar rows close together.
    pub fn gray_ranks(&self, x: MatRef<'_, T>, round: usize) -> Vec<u32> {
        let mut ranks = self.codes(x, round);
        ranks.iter_mut().for_each(|c| *c = gray_rank(*c));
        ranks
    }
}

impl<T: Real> Lsh<T> for SignHash<T> {
    type Code = u32;

    fn dim(&self) -> usize {
        self.dim
    }

    fn rounds(&self) -> usize {
        self.rounds.len()
    }

    fn codes_into(&self, x: MatRef<'_, T>, round: usize, out: &mut [u32]) {
        assert_eq!(x.rows(), out.len());
        out.fill(0);
        project_columns(x, self.rounds[round].as_ref(), |rows, y| {
            for (t, y) in y.iter_rows().enumerate() {
                let bit = |v: T| u32::from(v > T::ZERO) << t;
                out[rows.clone()].iter_mut().zip(y).for_each(|(code, &v)| *code |= bit(v));
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::squared_norm;
    use crate::hash::tests::{assert_frequency, gaussian, pair_at_angle};
    use crate::linalg::dot;
    use std::f64::consts::PI;

    /// Entry `rank` of the reflected Gray sequence: the inverse of [`gray_rank`].
    fn gray_code(rank: u32) -> u32 {
        rank ^ (rank >> 1)
    }

    /// Codes of two points at angle `theta` in each of many rounds.
    fn codes_at(theta: f64, bits: usize, rounds: usize) -> Vec<(u32, u32)> {
        let hash = SignHash::<f64>::new(StreamKey::new(21), 7, bits, rounds).unwrap();
        let pair = pair_at_angle(7, theta, 0.25);
        (0..rounds).map(|r| hash.codes(pair.as_ref(), r)).map(|c| (c[0], c[1])).collect()
    }

    #[test]
    fn codes_are_equal_with_the_closed_form_probability() {
        for (theta, bits) in [(0.05, 7), (0.3, 7), (0.3, 1), (1.0, 3), (PI / 2.0, 2), (3.0, 1)] {
            let equal = codes_at(theta, bits, 20_000).iter().filter(|(a, b)| a == b).count();
            assert_frequency(equal, 20_000, (1.0 - theta / PI).powi(bits as i32));
        }
    }

    #[test]
    fn the_hamming_distance_is_binomial() {
        let (theta, bits, rounds) = (0.9, 5, 20_000);
        let p: f64 = theta / PI;
        let mut counts = [0; 6];
        codes_at(theta, bits, rounds).iter().for_each(|(a, b)| counts[(a ^ b).count_ones() as usize] += 1);
        for (h, choose) in [1.0, 5.0, 10.0, 10.0, 5.0, 1.0].into_iter().enumerate() {
            let mass = choose * p.powi(h as i32) * (1.0 - p).powi(5 - h as i32);
            assert_frequency(counts[h], rounds, mass);
        }
    }

    #[test]
    fn neighbouring_ranks_have_the_closed_form_probability() {
        let adjacent = |order: fn(u32) -> u32, theta: f64, bits: usize| {
            let last = (1u32 << bits) - 1;
            codes_at(theta, bits, 20_000)
                .iter()
                .filter(|(a, b)| {
                    let step = order(*a).wrapping_sub(order(*b)) & last;
                    step == 1 || step == last
                })
                .count()
        };
        for (theta, bits) in [(0.3, 7), (1.0, 4), (0.6, 3), (1.5, 3)] {
            let law = 2.0 * theta / PI * (1.0 - theta / PI).powi(bits as i32 - 1);
            assert_frequency(adjacent(gray_rank, theta, bits), 20_000, law);
            // The forward map does not obey the law, so the test can tell the two apart.
            let seen = adjacent(gray_code, theta, bits) as f64 / 20_000.0;
            if bits >= 4 {
                assert!((seen - law).abs() > 5.0 * (law / 20_000.0).sqrt(), "{seen} against {law}");
            }
        }
    }

    #[test]
    fn every_bucket_is_equally_likely_over_directions() {
        // The signs of independent Gaussian projections of one point are independent fair coins.
        let (bits, rounds) = (3, 20_000);
        let hash = SignHash::<f64>::new(StreamKey::new(21), 5, bits, rounds).unwrap();
        let x = gaussian::<f64>(2, 1, 5);
        let mut seen = [0; 8];
        (0..rounds).for_each(|r| seen[hash.codes(x.as_ref(), r)[0] as usize] += 1);
        seen.iter().for_each(|&s| assert_frequency(s, rounds, 1.0 / 8.0));
    }

    #[test]
    fn only_the_inverse_gray_order_keeps_neighbours_one_bit_apart() {
        // Mean and largest distance of neighbouring buckets of seven bits, in three orders of the codes.
        let apart = |rank: fn(u32) -> u32| {
            let mut by_rank = vec![0; 128];
            (0..128u32).for_each(|code| by_rank[rank(code) as usize] = code);
            let steps: Vec<u32> =
                (0..128).map(|r| (by_rank[r] ^ by_rank[(r + 1) % 128]).count_ones()).collect();
            let mean = f64::from(steps[..127].iter().sum::<u32>()) / 127.0;
            (mean, steps[..127].iter().copied().max().unwrap())
        };
        assert_eq!(apart(gray_rank), (1.0, 1));
        let (forward, plain) = (apart(gray_code), apart(|code| code));
        assert!((forward.0 - 1.31).abs() < 0.03 && forward.1 == 4, "{forward:?}");
        assert!((plain.0 - 1.95).abs() < 0.03 && plain.1 == 7, "{plain:?}");
    }

    #[test]
    fn ranks_of_three_bit_codes_are_the_known_ones() {
        let ranks: Vec<u32> = (0..8).map(gray_rank).collect();
        assert_eq!(ranks, [0, 1, 3, 2, 7, 6, 4, 5]);
    }

    #[test]
    fn consecutive_ranks_differ_in_one_bit_cyclically() {
        for bits in 1..=12 {
            let n = 1u32 << bits;
            let mut by_rank = vec![u32::MAX; n as usize];
            (0..n).for_each(|code| by_rank[gray_rank(code) as usize] = code);
            for r in 0..n {
                let next = by_rank[((r + 1) % n) as usize];
                assert_eq!((by_rank[r as usize] ^ next).count_ones(), 1);
                assert_eq!(gray_code(r), by_rank[r as usize]);
            }
        }
        for code in [1 << 31, 0x7fff_ffff, u32::MAX, 0x1234_5678] {
            assert_eq!(gray_code(gray_rank(code)), code);
        }
    }

    #[test]
    fn both_precisions_agree_away_from_the_boundaries() {
        let x = gaussian::<f64>(4, 500, 33);
        let single = SignHash::<f32>::new(StreamKey::new(8), 33, 20, 1).unwrap();
        let double = SignHash::<f64>::new(StreamKey::new(8), 33, 20, 1).unwrap();
        let (a, b) = (single.codes(x.cast().as_ref(), 0), double.codes(x.as_ref(), 0));
        let mut compared = 0;
        for i in 0..500 {
            for t in 0..20 {
                let w = double.rounds[0].row(t);
                let clear = 1e-5 * (squared_norm(w) * squared_norm(x.row(i))).sqrt();
                if dot(w, x.row(i)).abs() > clear {
                    assert_eq!(a[i] >> t & 1, b[i] >> t & 1);
                    compared += 1;
                }
            }
        }
        assert!(compared > 9900);
    }

    #[test]
    fn codes_ignore_length() {
        let x = gaussian::<f32>(4, 100, 5);
        let hash = SignHash::<f32>::new(StreamKey::new(8), 5, 31, 1).unwrap();
        let scaled = Mat::from_fn(100, 5, |i, j| 0.25 * x[(i, j)]);
        assert_eq!(hash.codes(x.as_ref(), 0), hash.codes(scaled.as_ref(), 0));
    }

    #[test]
    fn degenerate_rows_and_widths_have_a_defined_code() {
        assert!(SignHash::<f32>::new(StreamKey::new(0), 2, 32, 1).is_none());
        let all = SignHash::<f64>::new(StreamKey::new(0), 2, 0, 1).unwrap();
        assert_eq!(all.codes(gaussian(1, 3, 2).as_ref(), 0), [0, 0, 0]);
        let hash = SignHash::<f64>::new(StreamKey::new(0), 2, 31, 1).unwrap();
        let rows = Mat::from_vec(vec![0.0, -0.0, f64::NAN, 1.0], 2, 2);
        assert_eq!(hash.codes(rows.as_ref(), 0), [0, 0]);
        assert!(hash.codes(Mat::zeros(0, 2).as_ref(), 0).is_empty());
        assert!(hash.gray_ranks(gaussian(1, 99, 2).as_ref(), 0).iter().all(|&r| r < 1 << 31));
    }
}
