//! The largest of many scores, in linear time.

use attlas_num::kernels;
use attlas_num::{DType, Real};

/// Bins of the histogram: the top bits of a score, sign and exponent first.
const BINS: usize = 1 << 12;
const BIN_SHIFT: u32 = 52;

/// A number that orders as the score does, with 0 and −0 equal and NaN above everything, and its bin.
///
/// Without a branch: the signs of scores follow no pattern.
fn rank_of<T: Real>(score: T) -> (u64, usize) {
    let bits = match T::DTYPE {
        DType::F32 => (score + T::ZERO).to_bits64() << 32,
        DType::F64 => (score + T::ZERO).to_bits64(),
    };
    let negative = (bits as i64 >> 63) as u64;
    let key = bits ^ (negative | 1 << 63);
    let key = if score.is_nan() { u64::MAX } else { key };
    (key, (key >> BIN_SHIFT) as usize)
}

/// The number of the last of the `count` largest scores as `rank_of` gives it, and how many of that number are among them
/// and in all; for `0 < count < scores.len()`.
///
/// A histogram of the leading bits finds the bin in which the last chosen score lies; only that bin is sorted.
fn edge<T: Real>(scores: &[T], count: usize) -> (u64, usize, usize) {
    let mut bins = [0u32; BINS];
    scores.iter().for_each(|&s| bins[rank_of(s).1] += 1);
    let (mut above, mut edge) = (0usize, BINS - 1);
    while above + (bins[edge] as usize) < count && edge > 0 {
        above += bins[edge] as usize;
        edge -= 1;
    }
    let wanted = count - above;
    let mut keys = vec![0u64; bins[edge] as usize + 1];
    let mut len = 0;
    for &s in scores {
        let (key, bin) = rank_of(s);
        keys[len] = key;
        len += usize::from(bin == edge);
    }
    keys.truncate(len);
    let (greater, &mut key, less) = keys.select_nth_unstable_by(wanted - 1, |a, b| b.cmp(a));
    let same = |keys: &[u64]| keys.iter().filter(|&&k| k == key).count();
    let before = same(greater);
    (key, wanted - greater.len() + before, before + 1 + same(less))
}

/// Writes the indices of the `count` largest scores into `index`, in increasing order; ties go to the smaller index.
/// NaN counts as the largest, so that it is never dropped silently.
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
    let (threshold, mut equals, _) = edge(scores, count);
    // Written whether chosen or not: what is chosen follows no pattern that a branch could be predicted by.
    index.resize(count + 1, 0);
    let mut len = 0;
    for (i, &s) in scores.iter().enumerate() {
        let key = rank_of(s).0;
        let equal = key == threshold && equals > 0;
        equals -= usize::from(equal);
        index[len] = i;
        len += usize::from(key > threshold || equal);
    }
    debug_assert_eq!(len, count, "the histogram counts every score once");
    index.truncate(count);
}

/// The share of scores, one in this number, that counts as few.
const FEW: usize = 16;

/// [`select_top`] for few scores among many: the largest of each of `4 · count` blocks show a bound that at least `count`
/// scores reach, and only blocks that reach it are looked into.
fn select_few<T: Real>(scores: &[T], count: usize, index: &mut Vec<usize>) {
    let len = scores.len() / (4 * count);
    let largest: Vec<u64> = scores
        .chunks(len)
        .map(|block| {
            let largest = kernels::max(block);
            // The sum shows a NaN, which `max` leaves out; two infinities may look like one and are no harm.
            let any_nan = kernels::sum(block).is_nan() && block.iter().any(|s| s.is_nan());
            rank_of(if any_nan { T::NAN } else { largest }).0
        })
        .collect();
    let mut bounds = largest.clone();
    let bound = *bounds.select_nth_unstable_by(count - 1, |a, b| b.cmp(a)).1;
    let mut found: Vec<(u64, u32)> = Vec::with_capacity(4 * count);
    for (b, block) in scores.chunks(len).enumerate() {
        if largest[b] >= bound {
            let ranked = block.iter().zip((b * len) as u32..).map(|(&s, i)| (rank_of(s).0, i));
            found.extend(ranked.filter(|&(key, _)| key >= bound));
        }
    }
    if found.len() > count {
        found.select_nth_unstable_by(count - 1, |a, b| b.0.cmp(&a.0).then(a.1.cmp(&b.1)));
        found.truncate(count);
    }
    index.extend(found.iter().map(|&(_, i)| i as usize));
    index.sort_unstable();
}

/// The choice of [`select_top`] as a comparison: scores above one value, and those equal to it that come first.
#[derive(Clone, Copy, Debug)]
pub struct Threshold<T> {
    value: T,
    /// Equal scores are chosen before this place.
    end: usize,
}

impl<T: Real> Threshold<T> {
    /// Of the `count` largest scores, `0 < count < scores.len()`.
    pub fn of_top(scores: &[T], count: usize) -> Self {
        let (key, chosen, equal) = edge(scores, count);
        let bits = if key >> 63 == 1 { key ^ 1 << 63 } else { !key };
        let value = match T::DTYPE {
            DType::F32 => T::from_f64(f32::from_bits((bits >> 32) as u32).into()),
            DType::F64 => T::from_f64(f64::from_bits(bits)),
        };
        let same = |s: &T| *s == value || s.is_nan() && value.is_nan();
        let end = match chosen == equal {
            true => scores.len(),
            false => (0..scores.len()).filter(|&i| same(&scores[i])).nth(chosen).unwrap_or(scores.len()),
        };
        Self { value, end }
    }

    /// Sets to −∞ what belongs to scores that are not chosen, the first of which is at place `first`; returns how many.
    pub fn hide_others(&self, scores: &[T], first: usize, logits: &mut [T]) -> usize {
        let value = self.value;
        let split = self.end.saturating_sub(first).min(scores.len());
        let ((before, behind), (early, late)) = (scores.split_at(split), logits.split_at_mut(split));
        // A NaN fails the comparisons and stays; where it is the value itself, only some of them do.
        let hidden = if value.is_nan() {
            hide(before, early, |s| !s.is_nan()) + hide(behind, late, |_| true)
        } else {
            hide(before, early, |s| s < value) + hide(behind, late, |s| s <= value)
        };
        hidden as usize
    }
}

/// Sets to −∞ what belongs to scores that fulfil a condition; returns how many.
fn hide<T: Real>(scores: &[T], logits: &mut [T], condition: impl Fn(T) -> bool) -> u32 {
    let mut hidden = 0;
    for (x, &s) in logits.iter_mut().zip(scores) {
        let hide = condition(s);
        hidden += u32::from(hide);
        *x = if hide { T::NEG_INFINITY } else { *x };
    }
    hidden
}

#[cfg(test)]
mod tests {
    use super::*;
    use attlas_num::rng::StreamKey;

    fn by_sorting<T: Real>(scores: &[T], count: usize) -> Vec<usize> {
        let mut index: Vec<usize> = (0..scores.len()).collect();
        let rank = |i: usize| if scores[i].is_nan() { f64::INFINITY } else { scores[i].to_f64() };
        index.sort_by(|&a, &b| {
            let nan = scores[b].is_nan().cmp(&scores[a].is_nan());
            nan.then(rank(b).partial_cmp(&rank(a)).unwrap()).then(a.cmp(&b))
        });
        index.truncate(count);
        index.sort_unstable();
        index
    }

    #[test]
    fn selection_agrees_with_sorting() {
        let mut rng = StreamKey::new(1).rng();
        let mut found = Vec::new();
        for n in [0usize, 1, 2, 17, 300, 1111] {
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
                for count in [0, 1, 2, n / 40, n / 4, n / 2, n.saturating_sub(1), n, n + 1] {
                    select_top(&scores, count, &mut found);
                    assert_eq!(found, by_sorting(&scores, count), "{count} of {n}, round {round}");
                    select_top(&narrow, count, &mut found);
                    assert_eq!(found, by_sorting(&narrow, count), "{count} of {n}, round {round}, single");
                    if (1..n).contains(&count) {
                        let cut = Threshold::of_top(&narrow, count);
                        let mut kept = vec![0.0f32; n];
                        // In two parts, as tiles are.
                        let (head, tail) = kept.split_at_mut(n / 3);
                        let hidden = cut.hide_others(&narrow[..n / 3], 0, head)
                            + cut.hide_others(&narrow[n / 3..], n / 3, tail);
                        assert_eq!(hidden, n - count);
                        let kept: Vec<usize> = (0..n).filter(|&i| kept[i] == 0.0).collect();
                        assert_eq!(kept, found, "{count} of {n}, round {round}, by comparison");
                    }
                }
            }
        }
    }
}
