//! Averages of consecutive tokens: the landmarks of methods that rely on locality.
//!
//! $n$ tokens are cut into $m \le n$ disjoint, non-empty segments: the first $m - (n \bmod m)$ have
//! $\lfloor n/m \rfloor$ tokens, the rest one more. The formula in the Nyströmformer paper divides by $m$ and sums $m$
//! terms; both must be the length of the segment.

use crate::Real;
use crate::workspace::Context;
use attlas_num::linalg::matmul_nt;
use attlas_num::par::*;
use attlas_num::{Mat, MatRef};
use std::ops::Range;

/// A partition of tokens into parts that are averaged.
pub trait Parts: Sync {
    /// Number of parts.
    fn count(&self) -> usize;
    /// Returns the tokens of a part, at least one.
    fn tokens(&self, part: usize) -> impl Iterator<Item = usize>;
    /// Returns the number of tokens of a part.
    fn len_of(&self, part: usize) -> usize;
    /// Returns the part of a token.
    fn part_of(&self, token: usize) -> usize;
}

/// `n` tokens in `count` consecutive segments of nearly equal length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segments {
    n: usize,
    count: usize,
}

impl Segments {
    /// Cuts `n` tokens into `count` segments, at most one per token.
    pub fn new(n: usize, count: usize) -> Self {
        Self { n, count: count.min(n) }
    }

    /// The tokens of segment `s`.
    pub fn range(&self, s: usize) -> Range<usize> {
        let (short, rest) = (self.n / self.count, self.n % self.count);
        let start = |s: usize| s * short + s.saturating_sub(self.count - rest);
        start(s)..start(s + 1)
    }
}

impl Parts for Segments {
    fn count(&self) -> usize {
        self.count
    }

    fn tokens(&self, part: usize) -> impl Iterator<Item = usize> {
        self.range(part)
    }

    fn len_of(&self, part: usize) -> usize {
        self.range(part).len()
    }

    fn part_of(&self, token: usize) -> usize {
        let (short, rest) = (self.n / self.count, self.n % self.count);
        let all_short = (self.count - rest) * short;
        if token < all_short { token / short } else { self.count - rest + (token - all_short) / (short + 1) }
    }
}

/// Writes the mean row of each part of `x`, summed in double precision: `parts.count() × x.cols()` into `out`.
pub fn pool_rows<T: Real>(x: MatRef<'_, T>, parts: &impl Parts, cx: Context<'_>, out: &mut [T]) {
    let d = x.cols();
    out.par_chunks_exact_mut(d).enumerate().for_each_init(
        || cx.scratch.take::<f64>(d),
        |sum, (s, mean)| {
            sum.fill(0.0);
            for i in parts.tokens(s) {
                sum.iter_mut().zip(x.row(i)).for_each(|(a, x)| *a += x.to_f64());
            }
            let inverse = 1.0 / parts.len_of(s) as f64;
            mean.iter_mut().zip(sum.iter()).for_each(|(m, a)| *m = T::from_f64(a * inverse));
        },
    );
}

/// Returns the logarithms of the lengths of the parts: the bias with which an average represents all its tokens.
pub fn log_lens<T: Real>(parts: &impl Parts) -> Vec<T> {
    (0..parts.count()).map(|s| T::from_f64((parts.len_of(s) as f64).ln())).collect()
}

/// Computes $\operatorname{softmax}(\beta \bar Q \bar K^\top + b)$ row by row in double precision; every row sums to
/// one.
pub fn landmark_weights<T: Real>(
    q: MatRef<'_, T>,
    k: MatRef<'_, T>,
    bias: Option<&[T]>,
    scale: T,
) -> Mat<f64> {
    let widen = |x: MatRef<'_, T>, factor: f64| {
        let data = x.iter_rows().flatten().map(|x| factor * x.to_f64()).collect();
        Mat::<f64>::from_vec(data, x.rows(), x.cols())
    };
    let mut c = matmul_nt(widen(q, scale.to_f64()).as_ref(), widen(k, 1.0).as_ref());
    for i in 0..c.rows() {
        let row = c.row_mut(i);
        if let Some(bias) = bias {
            row.iter_mut().zip(bias).for_each(|(s, b)| *s += b.to_f64());
        }
        attlas_num::kernels::softmax_in_place(row);
    }
    c
}

/// Returns the smallest and largest value of each column, ignoring NaN.
pub fn column_ranges<T: Real>(v: MatRef<'_, T>) -> Vec<(T, T)> {
    let mut ranges = vec![(T::INFINITY, T::NEG_INFINITY); v.cols()];
    for row in v.iter_rows() {
        for ((low, high), &x) in ranges.iter_mut().zip(row) {
            *low = low.min(x);
            *high = high.max(x);
        }
    }
    ranges
}

/// Clips every element of the rows in `out` to the range of its column; NaN stays.
pub fn clip_rows<T: Real>(out: &mut [T], ranges: &[(T, T)]) {
    for row in out.chunks_exact_mut(ranges.len()) {
        for (o, &(low, high)) in row.iter_mut().zip(ranges) {
            if *o < low {
                *o = low;
            } else if *o > high {
                *o = high;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Workspace;

    #[test]
    fn segments_have_the_specified_lengths() {
        let lens = |n, m| {
            let s = Segments::new(n, m);
            (0..s.count()).map(|i| s.len_of(i)).collect::<Vec<usize>>()
        };
        assert_eq!(lens(7, 3), [2, 2, 3]);
        assert_eq!(lens(6, 4), [1, 1, 2, 2]);
        let long = lens(309, 64);
        assert_eq!((long[..11].to_vec(), long[11..].to_vec()), (vec![4; 11], vec![5; 53]));
        assert_eq!(lens(3, 9), [1, 1, 1]);
    }

    #[test]
    fn segments_are_a_partition() {
        for n in 1..40 {
            for m in 1..=n {
                let s = Segments::new(n, m);
                let mut next = 0;
                for part in 0..m {
                    let range = s.range(part);
                    assert!(range.start == next && !range.is_empty(), "{n} into {m}");
                    assert!(range.clone().all(|i| s.part_of(i) == part), "{n} into {m}");
                    next = range.end;
                }
                assert_eq!(next, n);
            }
        }
    }

    #[test]
    fn means_are_means_and_weights_sum_to_one() {
        let x: Vec<f32> = (0..14).map(|i| i as f32).collect();
        let ws = Workspace::single().unwrap();
        let mut out = [0.0f32; 6];
        ws.install(|cx| pool_rows(MatRef::new(&x, 7, 2), &Segments::new(7, 3), cx, &mut out));
        assert_eq!(out, [1.0, 2.0, 5.0, 6.0, 10.0, 11.0]);
        let m = MatRef::new(&out, 3, 2);
        let c = landmark_weights(m, m, Some(&[0.0, 1.0, 2.0]), 0.3);
        for i in 0..3 {
            assert!((c.row(i).iter().sum::<f64>() - 1.0).abs() < 1e-15);
        }
    }

    #[test]
    fn clipping_keeps_nan() {
        let v = MatRef::new(&[1.0, 5.0, f64::NAN, 7.0], 2, 2);
        let mut out = [0.0, 9.0, f64::NAN, 6.0];
        clip_rows(&mut out, &column_ranges(v));
        assert_eq!((out[0], out[1], out[3]), (1.0, 7.0, 6.0));
        assert!(out[2].is_nan());
    }
}
