//! The largest of many scores, in linear time.

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

/// Writes the indices of the `count` largest scores into `index`, in increasing order; ties go to the smaller index.
/// NaN counts as the largest, so that it is never dropped silently.
///
/// A histogram of the leading bits finds the bin in which the last chosen score lies; only that bin is sorted.
pub fn select_top<T: Real>(scores: &[T], count: usize, index: &mut Vec<usize>) {
    index.clear();
    if count >= scores.len() {
        index.extend(0..scores.len());
        return;
    }
    if count == 0 {
        return;
    }
    let mut bins = [0u32; BINS];
    scores.iter().for_each(|&s| bins[rank_of(s).1] += 1);
    let (mut above, mut edge) = (0usize, BINS - 1);
    while above + bins[edge] as usize <= count && edge > 0 {
        above += bins[edge] as usize;
        edge -= 1;
    }
    // `count − above` scores of the bin at the edge are chosen: all above its key there, and the first of equals.
    let wanted = count - above;
    let mut keys = vec![0u64; bins[edge] as usize + 1];
    let mut len = 0;
    for &s in scores {
        let (key, bin) = rank_of(s);
        keys[len] = key;
        len += usize::from(bin == edge);
    }
    keys.truncate(len);
    let (threshold, mut equals) = if wanted == 0 {
        // Everything above the bin, nothing in it.
        (((edge as u64 + 1) << BIN_SHIFT) - 1, 0)
    } else {
        let (greater, key, _) = keys.select_nth_unstable_by(wanted - 1, |a, b| b.cmp(a));
        let key = *key;
        (key, wanted - greater.iter().filter(|&&g| g > key).count())
    };
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
        for n in [0usize, 1, 2, 17, 300] {
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
                for count in [0, 1, n / 4, n / 2, n.saturating_sub(1), n, n + 1] {
                    select_top(&scores, count, &mut found);
                    assert_eq!(found, by_sorting(&scores, count), "{count} of {n}, round {round}");
                    select_top(&narrow, count, &mut found);
                    assert_eq!(found, by_sorting(&narrow, count), "{count} of {n}, round {round}, single");
                }
            }
        }
    }
}
