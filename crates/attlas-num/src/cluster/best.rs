//! The best of many items within a budget, in linear time.
//!
//! Items are ordered by score, larger first, ties by position, and taken while their total weight stays within a
//! budget; the first item that does not fit ends the selection. With equal weights these are the largest scores. NaN
//! counts as the largest, so it is never dropped silently; the two zeros are equal.
//!
//! The choice is a [`Cut`]: all items above one score, and the items of that score up to one position. A weighted
//! histogram of the leading bits of the scores ([`Counts`]) locates the bin of the cut; the items of that bin are
//! halved until few enough are left to sort. Long lists are counted in pieces on rayon's current pool, or by the tasks
//! that compute the scores; weights are integers, so the number of threads does not move the cut.

use crate::par::*;
use crate::{DType, Real, kernels};
use std::ops::Range;

/// Bins of the histogram: the top bits of a score, sign and exponent first.
const BIN_BITS: u32 = 12;
const BINS: usize = 1 << BIN_BITS;
const BIN_SHIFT: u32 = u64::BITS - BIN_BITS;

/// Most items at the cut that are sorted; more are halved first.
const SORTED: usize = 32;

/// Scores whose bins are computed in one loop before they are counted.
const COUNTED: usize = 256;

/// Scores that one test excludes together if none lies in the bin of the cut.
const BLOCK: usize = 16;

/// Scores per counting task.
const PIECE: usize = 8192;

/// Selection of items: those before a cut in the order of scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Score at the cut, as numbered by `rank_of`.
    rank: u64,
    /// One past the last position taken at this score.
    end: usize,
}

impl Cut {
    /// Cut that takes everything.
    pub const ALL: Self = Self { rank: 0, end: usize::MAX };

    /// Returns true if the item at `position` with this score is taken.
    #[inline]
    pub fn takes<T: Real>(&self, score: T, position: usize) -> bool {
        let rank = rank_of(score);
        rank > self.rank || (rank == self.rank) & (position < self.end)
    }

    /// Writes the positions of the taken items into `places`, in order, and returns their number. The first score is at
    /// position `first`; `places` must be longer than `scores`.
    ///
    /// # Panics
    ///
    /// If `places` is too short, or a position does not fit into `u32`.
    pub fn places<T: Real>(&self, scores: &[T], first: usize, places: &mut [u32]) -> usize {
        assert!(places.len() > scores.len(), "a list that is longer than the scores");
        assert!(u32::try_from(first + scores.len()).is_ok(), "positions of 32 bits");
        let mut len = 0;
        // Writes every position and advances only for taken ones: no branch predictor can learn which are taken.
        let mut write = |i: usize, taken: bool| {
            places[len] = i as u32;
            len += usize::from(taken);
        };
        let value: T = value_of(self.rank);
        if value.is_nan() {
            (first..).zip(scores).for_each(|(i, &s)| write(i, self.takes(s, i)));
        } else {
            // NaN comes before all numbers.
            let below = self.end.saturating_sub(first).min(scores.len());
            let (before, behind) = scores.split_at(below);
            (first..).zip(before).for_each(|(i, &s)| write(i, (s >= value) | s.is_nan()));
            (first + below..).zip(behind).for_each(|(i, &s)| write(i, (s > value) | s.is_nan()));
        }
        len
    }

    /// Sets the logits of scores that are not taken to −∞ and returns their number. The first score is at position
    /// `first`; the cut must leave something out.
    pub fn hide_others<T: Real>(&self, scores: &[T], first: usize, logits: &mut [T]) -> usize {
        let value: T = value_of(self.rank);
        let below = self.end.saturating_sub(first).min(scores.len());
        let ((before, behind), (early, late)) = (scores.split_at(below), logits.split_at_mut(below));
        // A NaN fails the comparisons and stays; if the score at the cut is NaN itself, only some of the NaNs stay.
        let hidden = if value.is_nan() {
            hide(before, early, |s| !s.is_nan()) + hide(behind, late, |_| true)
        } else {
            hide(before, early, |s| s < value) + hide(behind, late, |s| s <= value)
        };
        hidden as usize
    }

    /// Selects the `count` largest scores.
    pub fn largest<T: Real>(scores: &[T], count: usize) -> Self {
        if count >= scores.len() { Self::ALL } else { Self::within(scores, |_| 1, count) }
    }

    /// Selects the best items while their total weight stays within `budget`.
    pub fn within<T: Real>(scores: &[T], weight: impl Fn(usize) -> usize + Sync, budget: usize) -> Self {
        let count = |t: usize| {
            let piece = t * PIECE..scores.len().min((t + 1) * PIECE);
            Counts::new(&scores[piece.clone()], piece.start, &weight, budget)
        };
        let pieces = scores.len().div_ceil(PIECE);
        let counts: Vec<Counts> = match pieces {
            0 | 1 => (0..pieces).map(count).collect(),
            _ => (0..pieces).into_par_iter().with_max_len(1).map(count).collect(),
        };
        Self::counted(scores, &counts, weight, budget)
    }

    /// Selects as `within` does, from items already counted, piece after piece, with these weights and this budget or a
    /// larger one.
    pub fn counted<T: Real>(
        scores: &[T],
        counts: &[Counts],
        weight: impl Fn(usize) -> usize + Sync,
        budget: usize,
    ) -> Self {
        debug_assert_eq!(counts.iter().map(|c| c.piece.len()).sum::<usize>(), scores.len());
        let mut left = budget;
        let Some(edge) = edge_of(counts, &mut left) else { return Self::ALL };
        // Scores of other bins lie below `low` or above `high`; if a bound is NaN, any score may be inside.
        let (low, high): (T, T) =
            (value_of(least_of(edge)), value_of(least_of(edge) | !(u64::MAX << BIN_SHIFT)));
        let collect = |c: &Counts| {
            let mut found: Vec<(u64, usize)> = Vec::new();
            let mut places = [0u8; BLOCK];
            for (first, block) in c.piece.clone().step_by(BLOCK).zip(scores[c.piece.clone()].chunks(BLOCK)) {
                // A loop without an early exit is vectorised.
                if block.iter().fold(true, |outside, &s| outside & ((s < low) | (s > high))) {
                    continue;
                }
                // Writes every place and advances only for matches: no branch predictor can learn which match.
                let mut len = 0;
                for (place, &s) in (0u8..).zip(block) {
                    places[len] = place;
                    len += usize::from(bin_of(rank_of(s)) == edge);
                }
                let item = |&place: &u8| (rank_of(block[usize::from(place)]), first + usize::from(place));
                found.extend(places[..len].iter().map(item));
            }
            found
        };
        // Few scores are searched faster than a second thread starts.
        let found: Vec<Vec<(u64, usize)>> = match scores.len() > 2 * PIECE {
            true => counts.par_iter().with_max_len(1).map(collect).collect(),
            false => counts.iter().map(collect).collect(),
        };
        let mut found = found.concat();
        let mut rest = &mut found[..];
        let best_first = |a: &(u64, usize), b: &(u64, usize)| b.0.cmp(&a.0).then(a.1.cmp(&b.1));
        while rest.len() > SORTED {
            let middle = rest.len() / 2;
            let (better, _, _) = rest.select_nth_unstable_by(middle, best_first);
            match left.checked_sub(better.iter().map(|&(_, i)| weight(i)).sum()) {
                Some(less) => {
                    left = less;
                    rest = &mut rest[middle..];
                }
                None => rest = &mut rest[..middle],
            }
        }
        rest.sort_unstable_by(best_first);
        let over = rest.iter().position(|&(_, i)| match left.checked_sub(weight(i)) {
            Some(less) => {
                left = less;
                false
            }
            None => true,
        });
        // The item that did not fit is the first that is not taken.
        over.map_or(Self::ALL, |first| Self { rank: rest[first].0, end: rest[first].1 })
    }
}

/// Sets the logits of scores that fulfil a condition to −∞ and returns their number.
fn hide<T: Real>(scores: &[T], logits: &mut [T], condition: impl Fn(T) -> bool) -> u32 {
    let mut hidden = 0;
    for (x, &s) in logits.iter_mut().zip(scores) {
        let hide = condition(s);
        hidden += u32::from(hide);
        *x = if hide { T::NEG_INFINITY } else { *x };
    }
    hidden
}

/// Writes the indices of the `count` largest scores into `index`, in increasing order; ties go to the smaller index.
/// NaN counts as the largest, so it is never dropped silently.
pub fn select_top<T: Real>(scores: &[T], count: usize, index: &mut Vec<usize>) {
    index.clear();
    if count >= scores.len() {
        index.extend(0..scores.len());
        return;
    }
    if count == 0 {
        return;
    }
    if scores.len() >= FEW * count {
        return select_few(scores, count, index);
    }
    let cut = Cut::largest(scores, count);
    let list = |t: usize| {
        let piece = t * PIECE..scores.len().min((t + 1) * PIECE);
        let mut places = vec![0; piece.len() + 1];
        let len = cut.places(&scores[piece.clone()], piece.start, &mut places);
        places.truncate(len);
        places
    };
    let pieces = scores.len().div_ceil(PIECE);
    // Few scores are listed faster than a second thread starts.
    let lists: Vec<Vec<u32>> = match pieces > 2 {
        true => (0..pieces).into_par_iter().with_max_len(1).map(list).collect(),
        false => (0..pieces).map(list).collect(),
    };
    index.extend(lists.iter().flatten().map(|&i| i as usize));
    debug_assert_eq!(index.len(), count, "a cut of ones takes that many");
}

/// Ratio of scores to `count` from which `count` is few.
const FEW: usize = 16;

/// [`select_top`] for few scores among many: the maxima of `4 · count` blocks give a bound that at least `count` scores
/// reach, and only blocks that reach it are searched.
fn select_few<T: Real>(scores: &[T], count: usize, index: &mut Vec<usize>) {
    let len = scores.len() / (4 * count);
    let largest: Vec<u64> = scores
        .chunks(len)
        .map(|block| {
            let largest = kernels::max(block);
            // The sum shows a NaN, which `max` ignores; opposite infinities also make it NaN, which costs only time.
            let any_nan = kernels::sum(block).is_nan() && block.iter().any(|s| s.is_nan());
            rank_of(if any_nan { T::NAN } else { largest })
        })
        .collect();
    let mut bounds = largest.clone();
    let bound = *bounds.select_nth_unstable_by(count - 1, |a, b| b.cmp(a)).1;
    let mut found: Vec<(u64, u32)> = Vec::with_capacity(4 * count);
    for (b, block) in scores.chunks(len).enumerate() {
        if largest[b] >= bound {
            let ranked = block.iter().zip((b * len) as u32..).map(|(&s, i)| (rank_of(s), i));
            found.extend(ranked.filter(|&(rank, _)| rank >= bound));
        }
    }
    if found.len() > count {
        found.select_nth_unstable_by(count - 1, |a, b| b.0.cmp(&a.0).then(a.1.cmp(&b.1)));
        found.truncate(count);
    }
    index.extend(found.iter().map(|&(_, i)| i as usize));
    index.sort_unstable();
}

/// Weights of one piece of the items, by the leading bits of their scores.
///
/// A task that computes scores can count them while they are in cache. The cut does not depend on the pieces; they need
/// a fixed length only if other results must not depend on the number of threads.
#[derive(Clone, Debug)]
pub struct Counts {
    piece: Range<usize>,
    /// Non-empty bins and their weights, from the best down to the bin in which the budget ends: few, so the thread
    /// that computes the cut reads little memory written by others.
    bins: Vec<(usize, usize)>,
}

impl Counts {
    /// Counts the items with these scores from position `first` on, as far as cuts within `budget` reach.
    pub fn new<T: Real>(scores: &[T], first: usize, weight: impl Fn(usize) -> usize, budget: usize) -> Self {
        let piece = first..first + scores.len();
        let mut bins = [0; BINS];
        let mut best = 0;
        let mut of_block = [0u16; COUNTED];
        for (start, block) in piece.clone().step_by(COUNTED).zip(scores.chunks(COUNTED)) {
            // Two loops, so that the first is vectorised.
            of_block.iter_mut().zip(block).for_each(|(bin, &s)| *bin = bin_of(rank_of(s)) as u16);
            for (i, &bin) in (start..).zip(&of_block[..block.len()]) {
                bins[usize::from(bin)] += weight(i);
                best = best.max(bin);
            }
        }
        let mut filled = Vec::with_capacity(COUNTED);
        let mut left = Some(budget);
        for (bin, &weight) in
            bins[..=usize::from(best)].iter().enumerate().rev().filter(|&(_, &weight)| weight > 0)
        {
            filled.push((bin, weight));
            left = left.and_then(|left| left.checked_sub(weight));
            if left.is_none() {
                break;
            }
        }
        Self { piece, bins: filled }
    }
}

/// Returns the first bin from above that does not fit whole; subtracts the weight of those above it from `left`.
fn edge_of(counts: &[Counts], left: &mut usize) -> Option<usize> {
    let mut rest: Vec<&[(usize, usize)]> = counts.iter().map(|c| &c.bins[..]).collect();
    while let Some(best) = rest.iter().filter_map(|bins| bins.first()).map(|&(bin, _)| bin).max() {
        let mut total = 0;
        for bins in &mut rest {
            if let Some((&(_, weight), others)) = bins.split_first().filter(|((bin, _), _)| *bin == best) {
                total += weight;
                *bins = others;
            }
        }
        match left.checked_sub(total) {
            Some(less) => *left = less,
            None => return Some(best),
        }
    }
    None
}

/// Maps a score to a number with the same order, with 0 and −0 equal and NaN above everything.
///
/// Free of branches: the signs of scores follow no pattern.
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

/// Inverts `rank_of`: returns the score of this rank, NaN for the ranks of no score.
fn value_of<T: Real>(rank: u64) -> T {
    let bits = if rank >> 63 == 1 { rank ^ 1 << 63 } else { !rank };
    match T::DTYPE {
        DType::F32 => T::from_f64(f32::from_bits((bits >> 32) as u32).into()),
        DType::F64 => T::from_f64(f64::from_bits(bits)),
    }
}

fn bin_of(rank: u64) -> usize {
    (rank >> BIN_SHIFT) as usize
}

/// Returns the least rank of a bin.
fn least_of(bin: usize) -> u64 {
    (bin as u64) << BIN_SHIFT
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::StreamKey;

    /// Returns positions from the best down to the first that does not fit.
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

    /// Selects item by item, as the reference for the merged lists of two parts.
    fn taken<T: Real>(cut: Cut, scores: &[T]) -> Vec<usize> {
        let taken: Vec<usize> = (0..scores.len()).filter(|&i| cut.takes(scores[i], i)).collect();
        let (mut places, mut listed) = (vec![0; scores.len() + 1], Vec::new());
        let (head, tail) = scores.split_at(scores.len() / 3);
        for (part, first) in [(head, 0), (tail, head.len())] {
            let len = cut.places(part, first, &mut places);
            listed.extend(places[..len].iter().map(|&i| i as usize));
        }
        assert_eq!(listed, taken);
        taken
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
                for count in [0, 1, n / 40, n / 4, n / 2, n.saturating_sub(1), n, 2 * n, 5 * n] {
                    let what = format!("{count} of {n}, round {round}");
                    let ones = vec![1; n];
                    let largest = taken(Cut::largest(&scores, count), &scores);
                    assert_eq!(largest, by_sorting(&scores, &ones, count), "{what}");
                    let largest = taken(Cut::largest(&narrow, count), &narrow);
                    assert_eq!(largest, by_sorting(&narrow, &ones, count), "{what}, single");
                    let mut found = Vec::new();
                    select_top(&narrow, count, &mut found);
                    assert_eq!(found, largest, "{what}, as a list");
                    if (1..n).contains(&count) {
                        let mut kept = vec![0.0f32; n];
                        // In two parts, as tiles are.
                        let (head, tail) = kept.split_at_mut(n / 3);
                        let cut = Cut::largest(&narrow, count);
                        let hidden = cut.hide_others(&narrow[..n / 3], 0, head)
                            + cut.hide_others(&narrow[n / 3..], n / 3, tail);
                        assert_eq!(hidden, n - count, "{what}, hidden");
                        let kept: Vec<usize> = (0..n).filter(|&i| kept[i] == 0.0).collect();
                        assert_eq!(kept, found, "{what}, by comparison");
                    }
                    let within = taken(Cut::within(&scores, |i| weights[i], count), &scores);
                    assert_eq!(within, by_sorting(&scores, &weights, count), "{what}, weighted");
                    let pieces: Vec<Counts> = scores
                        .chunks(n / 3 + 1)
                        .zip((0..).step_by(n / 3 + 1))
                        .map(|(piece, first)| Counts::new(piece, first, |i| weights[i], count))
                        .collect();
                    let counted = Cut::counted(&scores, &pieces, |i| weights[i], count);
                    assert_eq!(counted, Cut::within(&scores, |i| weights[i], count), "{what}, in pieces");
                }
            }
        }
    }
}
