//! The matricised tensor times Khatri–Rao product, the one expensive step of alternating least squares:
//! $Y_n = T_{(n)}\,(A_1 * \dots * A_{n-1} * A_{n+1} * \dots * A_N)$, without forming that product.
//!
//! One mode is contracted by matrix products ($2R\prod I$ flops), the others by weights on one operand or by
//! sums over a tensor that already has the rank as its last index. Over a sweep the modes fall into two
//! halves that share their first contraction, so that a sweep needs two large products whatever the order
//! (a dimension tree of depth two; Phan, Tichavský, Cichocki 2013).

use super::{Error, Result, Tensor};
use crate::linalg::{Op, gemm};
use crate::{Mat, MatRef, Real};

/// Computes $Y_n$ for `mode`: entry $(i, r)$ is the contraction of the slice with index $i$ in `mode` with column $r$
/// of every other factor. `factors` has one matrix per mode; that of `mode` gives only its column count.
pub fn mttkrp<T: Real>(t: &Tensor<T>, factors: &[Mat<T>], mode: usize) -> Result<Mat<T>> {
    t.check_mode(mode)?;
    let rank = factors.first().map_or(0, Mat::cols);
    let fits = |(m, f): (usize, &Mat<T>)| f.cols() == rank && (f.rows() == t.shape()[m] || m == mode);
    if factors.len() != t.order() || !factors.iter().enumerate().all(fits) {
        let found: Vec<_> = factors.iter().map(|f| (f.rows(), f.cols())).collect();
        return Err(Error::shape(
            "factors",
            format!("one matrix of {rank} columns per mode of {:?}", t.shape()),
            format!("{found:?}"),
        ));
    }
    Ok(unchecked(t, factors, mode, rank))
}

fn unchecked<T: Real>(t: &Tensor<T>, factors: &[Mat<T>], mode: usize, rank: usize) -> Mat<T> {
    let last = t.order() - 1;
    if last == 0 {
        return Mat::from_fn(t.shape()[0], rank, |i, _| t.data()[i]);
    }
    let partial = if mode == last {
        Partial::from_left(t, factors, last)
    } else {
        Partial::from_last(t, &factors[last])
    };
    partial.finish(factors, mode)
}

/// Tensor with some modes contracted; the rank is its last index.
#[derive(Debug)]
struct Partial<T> {
    /// Remaining modes, in increasing order, and their sizes.
    modes: Vec<(usize, usize)>,
    rank: usize,
    buf: Vec<T>,
}

impl<T: Real> Partial<T> {
    /// Contracts the modes before `end`, `end ≥ 1`: one product per leading index, summed where needed, so that no
    /// intermediate is larger than the result.
    fn from_left(t: &Tensor<T>, factors: &[Mat<T>], end: usize) -> Self {
        let (_, i, s) = t.split(end - 1);
        let (leading, factor) = (&factors[..end - 1], &factors[end - 1]);
        let rank = factor.cols();
        let mut buf = vec![T::ZERO; s * rank];
        let mut weighted = Mat::zeros(i, rank);
        for (k, slice) in t.data().chunks_exact((i * s).max(1)).enumerate() {
            let mut weights = vec![T::ONE; rank];
            let mut rest = k;
            for f in leading.iter().rev() {
                weights.iter_mut().zip(f.row(rest % f.rows())).for_each(|(w, &a)| *w *= a);
                rest /= f.rows();
            }
            for row in 0..i {
                let values = factor.row(row).iter().zip(&weights);
                weighted.row_mut(row).iter_mut().zip(values).for_each(|(x, (&a, &w))| *x = a * w);
            }
            gemm(T::ONE, Op::T(MatRef::new(slice, i, s)), Op::N(weighted.as_ref()), &mut buf, rank, true);
        }
        Self { modes: t.shape().iter().copied().enumerate().skip(end).collect(), rank, buf }
    }

    fn from_last(t: &Tensor<T>, factor: &Mat<T>) -> Self {
        let last = t.order() - 1;
        let (l, i, _) = t.split(last);
        let rank = factor.cols();
        let mut buf = vec![T::ZERO; l * rank];
        gemm(T::ONE, Op::N(MatRef::new(t.data(), l, i)), Op::N(factor.as_ref()), &mut buf, rank, false);
        Self { modes: t.shape().iter().copied().enumerate().take(last).collect(), rank, buf }
    }

    /// Sums over the remaining mode at position `at`, weighting each column by the factor's.
    fn contract(&self, at: usize, factor: &Mat<T>) -> Self {
        let l: usize = self.modes[..at].iter().map(|m| m.1).product();
        let n = self.modes[at].1;
        let row: usize = self.modes[at + 1..].iter().map(|m| m.1).product::<usize>() * self.rank;
        let mut buf = vec![T::ZERO; l * row];
        if row > 0 && n > 0 {
            for (from, to) in self.buf.chunks_exact(n * row).zip(buf.chunks_exact_mut(row)) {
                for (i, from) in from.chunks_exact(row).enumerate() {
                    let weights = factor.row(i);
                    for (from, to) in from.chunks_exact(self.rank).zip(to.chunks_exact_mut(self.rank)) {
                        for ((&x, &w), y) in from.iter().zip(weights).zip(to) {
                            *y += x * w;
                        }
                    }
                }
            }
        }
        let mut modes = self.modes.clone();
        modes.remove(at);
        Self { modes, rank: self.rank, buf }
    }

    /// Contracts every remaining mode but `mode`, the last ones first.
    fn finish(&self, factors: &[Mat<T>], mode: usize) -> Mat<T> {
        let mut current = None;
        for at in (0..self.modes.len()).rev() {
            let m = self.modes[at].0;
            if m != mode {
                current = Some(current.as_ref().unwrap_or(self).contract(at, &factors[m]));
            }
        }
        let done = current.as_ref().unwrap_or(self);
        Mat::from_vec(done.buf.clone(), done.modes[0].1, self.rank)
    }
}

/// Products of one sweep in turn, mode 0 first, with contractions shared between modes.
#[derive(Debug, Default)]
pub(super) struct SweepCache {
    partial: Option<Partial<f64>>,
}

impl SweepCache {
    /// Returns $Y_n$ of the sweep's next mode. Between two calls only the factor of the earlier mode may change.
    pub(super) fn next(&mut self, t: &Tensor<f64>, factors: &[Mat<f64>], mode: usize) -> Mat<f64> {
        let order = t.order();
        if order == 1 {
            return unchecked(t, factors, mode, factors[0].cols());
        }
        // Modes below `half` share the contraction of those from `half` on, and the other way round.
        let half = order.div_ceil(2);
        if mode == 0 {
            let mut partial = Partial::from_last(t, &factors[order - 1]);
            for m in (half..order - 1).rev() {
                partial = partial.contract(m, &factors[m]);
            }
            self.partial = Some(partial);
        } else if mode == half {
            self.partial = Some(Partial::from_left(t, factors, half));
        }
        match &self.partial {
            Some(partial) => partial.finish(factors, mode),
            None => unchecked(t, factors, mode, factors[0].cols()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::khatri_rao;
    use super::super::known::fill;
    use super::*;
    use crate::linalg::matmul;

    fn factors(shape: &[usize], rank: usize) -> Vec<Mat<f64>> {
        let make = |(m, &n): (usize, &usize)| {
            Mat::from_vec(fill(&[n, rank], 20 + m as u64).unwrap().into_vec(), n, rank)
        };
        shape.iter().enumerate().map(make).collect()
    }

    #[test]
    fn the_product_equals_its_definition_for_every_order_and_mode() {
        for shape in [&[4][..], &[3, 5], &[3, 4, 5], &[1, 3, 1], &[2, 3, 2, 4], &[2, 3, 1, 2, 3], &[2, 0, 3]]
        {
            let t = fill(shape, 11).unwrap();
            let factors = factors(shape, 3);
            let mut cache = SweepCache::default();
            for mode in 0..shape.len() {
                let others: Vec<&Mat<f64>> =
                    factors.iter().enumerate().filter(|(m, _)| *m != mode).map(|(_, f)| f).collect();
                let mut kr = Mat::from_vec(vec![1.0; 3], 1, 3);
                for f in others {
                    kr = khatri_rao(&kr, f).unwrap();
                }
                let expected = matmul(t.unfold(mode).unwrap().as_ref(), kr.as_ref());
                for y in [mttkrp(&t, &factors, mode).unwrap(), cache.next(&t, &factors, mode)] {
                    assert_eq!((y.rows(), y.cols()), (shape[mode], 3));
                    for (a, b) in y.data().iter().zip(expected.data()) {
                        // At most 48 terms below 1.
                        assert!((a - b).abs() < 48.0 * f64::EPSILON, "{shape:?} mode {mode}: {a} {b}");
                    }
                }
            }
        }
    }

    #[test]
    fn factors_that_do_not_fit_are_refused() {
        let t = fill(&[3, 4], 1).unwrap();
        assert!(mttkrp(&t, &factors(&[3, 5], 2), 0).is_err());
        assert!(mttkrp(&t, &factors(&[3], 2), 0).is_err());
        assert!(mttkrp(&t, &factors(&[3, 4], 2), 2).is_err());
        assert_eq!(mttkrp(&t, &factors(&[3, 4], 0), 1).unwrap().data().len(), 0);
    }
}
