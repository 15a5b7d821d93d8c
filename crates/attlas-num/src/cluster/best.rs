//! The best of many items within a budget, in linear time.
//!
//! Items come in order of their score, the larger first, equal ones by position, and are taken while their weights
//! together stay within a budget; the first that does not fit ends it. With equal weights these are the largest so many
//! scores. NaN counts as the largest, so that it is never dropped silently; the two zeros are equal.
//!
//! What is taken is a [`Cut`]: everything above one score, and of the items of that score those up to one position. A
//! histogram of the leading bits of the scores, with weights, shows the bin in which the cut lies, histograms of the bits
//! that follow narrow it down, and only a few items are sorted. Long lists are counted in pieces on rayon's current pool;
//! weights are whole numbers, so no number of threads moves the cut.

use crate::{DType, Real};
use rayon::prelude::*;

/// Bins of the histogram: the top bits of a score, sign and exponent first.
const BIN_BITS: u32 = 12;
const BINS: usize = 1 << BIN_BITS;
const BIN_SHIFT: u32 = u64::BITS - BIN_BITS;

/// Items at the edge that are few enough to be sorted; more are counted again by the bits that follow.
const SORTED: usize = 64;

/// Scores that one task counts.
const PIECE: usize = 8192;

/// Which items are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// The score at the cut, as `rank_of` numbers it.
    rank: u64,
    /// One past the last position that is taken at this score.
    end: usize,
}

impl Cut {
    /// Everything is taken.
    pub const ALL: Self = Self { rank: 0, end: usize::MAX };

    /// Whether the item at `position` with this score is taken.
    #[inline]
    pub fn takes<T: Real>(&self, score: T, position: usize) -> bool {
        let rank = rank_of(score);
        rank > self.rank || (rank == self.rank) & (position < self.end)
    }

    /// The `count` largest scores.
    pub fn largest<T: Real>(scores: &[T], count: usize) -> Self {
        if count >= scores.len() { Self::ALL } else { Self::within(scores, |_| 1, count) }
    }

    /// The best items while their weights stay within `budget`.
    pub fn within<T: Real>(scores: &[T], weight: impl Fn(usize) -> usize + Sync, budget: usize) -> Self {
        let piece = |t: usize| (t * PIECE..).zip(&scores[t * PIECE..scores.len().min((t + 1) * PIECE)]);
        let count = |t: usize| {
            let mut bins = vec![0usize; BINS];
            piece(t).for_each(|(i, &s)| bins[bin_of(rank_of(s))] += weight(i));
            bins
        };
        let pieces = scores.len().div_ceil(PIECE);
        let counted: Vec<Vec<usize>> = match pieces {
            0 | 1 => (0..pieces).map(count).collect(),
            _ => (0..pieces).into_par_iter().with_max_len(1).map(count).collect(),
        };
        let mut left = budget;
        let total = |bin: usize| counted.iter().map(|bins| bins[bin]).sum();
        let Some(edge) = edge_of(total, &mut left) else { return Self::ALL };

        let collect = |t: usize| -> Vec<(u64, usize)> {
            piece(t).map(|(i, &s)| (rank_of(s), i)).filter(|&(rank, _)| bin_of(rank) == edge).collect()
        };
        let mut found: Vec<(u64, usize)> = match pieces {
            0 | 1 => (0..pieces).flat_map(collect).collect(),
            _ => {
                let found: Vec<_> = (0..pieces).into_par_iter().with_max_len(1).map(collect).collect();
                found.concat()
            }
        };
        let mut shift = BIN_SHIFT;
        while found.len() > SORTED && shift > 0 {
            shift = shift.saturating_sub(BIN_BITS);
            let bin = |rank: u64| (rank >> shift) as usize % BINS;
            let mut bins = vec![0usize; BINS];
            found.iter().for_each(|&(rank, i)| bins[bin(rank)] += weight(i));
            let Some(edge) = edge_of(|bin| bins[bin], &mut left) else { return Self::ALL };
            found.retain(|&(rank, _)| bin(rank) == edge);
        }
        found.sort_unstable_by(|a, b| b.0.cmp(&a.0).then(a.1.cmp(&b.1)));
        let over = found.iter().position(|&(_, i)| match left.checked_sub(weight(i)) {
            Some(rest) => {
                left = rest;
                false
            }
            None => true,
        });
        // The item that did not fit is the first that is not taken.
        over.map_or(Self::ALL, |first| Self { rank: found[first].0, end: found[first].1 })
    }
}

/// The first bin from above that does not fit whole; `left` loses the weight of those above it.
fn edge_of(total: impl Fn(usize) -> usize, left: &mut usize) -> Option<usize> {
    (0..BINS).rev().find(|&bin| match left.checked_sub(total(bin)) {
        Some(rest) => {
            *left = rest;
            false
        }
        None => true,
    })
}

/// A number that orders as the score does, with 0 and −0 equal and NaN above everything.
///
/// Without a branch: the signs of scores follow no pattern.
#[inline]
fn rank_of<T: Real>(score: T) -> u64 {
    let bits = match T::DTYPE {
        DType::F32 => (score + T::ZERO).to_bits64() << 32,
        DType::F64 => (score + T::ZERO).to_bits64(),
    };
    let negative = (bits as i64 >> 63) as u64;
    let rank = bits ^ (negative | 1 << 63);
    if score.is_nan() { u64::MAX } else { rank }
}

fn bin_of(rank: u64) -> usize {
    (rank >> BIN_SHIFT) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::StreamKey;

    /// Positions from the best down to the first that does not fit.
    fn by_sorting<T: Real>(scores: &[T], weights: &[usize], budget: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..scores.len()).collect();
        let value = |i: usize| if scores[i].is_nan() { f64::INFINITY } else { scores[i].to_f64() };
        order.sort_by(|&a, &b| {
            let nan = scores[b].is_nan().cmp(&scores[a].is_nan());
            nan.then(value(b).partial_cmp(&value(a)).unwrap()).then(a.cmp(&b))
        });
        let mut sum = 0;
        let fits = |&i: &usize| {
            sum += weights[i];
            sum <= budget
        };
        let mut taken: Vec<usize> = order.into_iter().take_while(fits).collect();
        taken.sort_unstable();
        taken
    }

    fn taken<T: Real>(cut: Cut, scores: &[T]) -> Vec<usize> {
        (0..scores.len()).filter(|&i| cut.takes(scores[i], i)).collect()
    }

    #[test]
    fn cuts_agree_with_sorting() {
        let mut rng = StreamKey::new(1).rng();
        for n in [0usize, 1, 2, 17, 300, 2 * PIECE + 11] {
            for round in 0..8 {
                let scores: Vec<f64> = (0..n)
                    .map(|_| match round {
                        0 => 1.5,
                        1 => rng.below(3) as f64 - 1.0,
                        2 => 0.0 * rng.sign(),
                        3 if rng.below(5) == 0 => f64::NAN,
                        4 if rng.below(3) == 0 => f64::NEG_INFINITY,
                        5 => 1.0 + 1e-9 * rng.normal(),
                        6 => (20.0 * rng.normal()).exp() * rng.sign(),
                        _ => rng.normal(),
                    })
                    .collect();
                let narrow: Vec<f32> = scores.iter().map(|&s| s as f32).collect();
                let weights: Vec<usize> = (0..n).map(|_| rng.below(5)).collect();
                for count in [0, 1, n / 4, n / 2, n.saturating_sub(1), n, 2 * n, 5 * n] {
                    let what = format!("{count} of {n}, round {round}");
                    let ones = vec![1; n];
                    let largest = taken(Cut::largest(&scores, count), &scores);
                    assert_eq!(largest, by_sorting(&scores, &ones, count), "{what}");
                    let largest = taken(Cut::largest(&narrow, count), &narrow);
                    assert_eq!(largest, by_sorting(&narrow, &ones, count), "{what}, single");
                    let within = taken(Cut::within(&scores, |i| weights[i], count), &scores);
                    assert_eq!(within, by_sorting(&scores, &weights, count), "{what}, weighted");
                }
            }
        }
    }
}
