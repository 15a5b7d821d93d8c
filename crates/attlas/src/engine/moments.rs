//! Mean and covariance of rows that arrive in pieces.

use attlas_num::linalg::{Op, gemm};
use attlas_num::par::*;
use attlas_num::{Mat, MatRef, Real};

/// Count, mean and centred scatter of rows, in double precision. Pieces merge in any order (Chan, Golub and LeVeque
/// 1983): $\delta = \mu_b - \mu_a$, $\mu = \mu_a + \delta n_b / n$, $M = M_a + M_b + \delta\delta^\top n_a n_b / n$.
#[derive(Clone, Debug, PartialEq)]
pub struct Moments {
    count: usize,
    mean: Vec<f64>,
    scatter: Mat<f64>,
}

/// Rows that one task sums: fixed, so the number of threads changes no bit.
const SUMMED_ROWS: usize = 2048;

/// Returns the mean of the rows, in double precision: pieces in parallel, added in order. Zeros without rows.
pub fn mean_of<T: Real>(rows: MatRef<'_, T>) -> Vec<f64> {
    let n = rows.rows();
    let sums: Vec<Vec<f64>> = (0..n.div_ceil(SUMMED_ROWS))
        .into_par_iter()
        .with_max_len(1)
        .map(|p| {
            let mut sum = vec![0.0; rows.cols()];
            for row in rows.sub_rows(p * SUMMED_ROWS..((p + 1) * SUMMED_ROWS).min(n)).iter_rows() {
                sum.iter_mut().zip(row).for_each(|(m, x)| *m += x.to_f64());
            }
            sum
        })
        .collect();
    let mut mean = vec![0.0; rows.cols()];
    sums.iter().for_each(|sum| mean.iter_mut().zip(sum).for_each(|(m, s)| *m += s));
    mean.iter_mut().for_each(|m| *m /= n.max(1) as f64);
    mean
}

/// Rows that are centred and multiplied at a time.
const CHUNK: usize = 256;

impl Moments {
    /// Makes the moments of no rows, with `d` columns.
    pub fn new(d: usize) -> Self {
        Self { count: 0, mean: vec![0.0; d], scatter: Mat::zeros(d, d) }
    }

    /// Adds rows.
    pub fn update<T: Real>(&mut self, rows: MatRef<'_, T>) {
        let d = self.mean.len();
        for first in (0..rows.rows()).step_by(CHUNK) {
            let chunk = rows.sub_rows(first..(first + CHUNK).min(rows.rows()));
            let n = chunk.rows() as f64;
            let mut mean = vec![0.0; d];
            for row in chunk.iter_rows() {
                mean.iter_mut().zip(row).for_each(|(m, x)| *m += x.to_f64() / n);
            }
            let centred = Mat::from_fn(chunk.rows(), d, |i, j| chunk.at(i, j).to_f64() - mean[j]);
            let mut scatter = Mat::zeros(d, d);
            gemm(1.0, Op::T(centred.as_ref()), Op::N(centred.as_ref()), scatter.data_mut(), d, false);
            self.merge(&Self { count: chunk.rows(), mean, scatter });
        }
    }

    /// Adds the rows of `other`.
    pub fn merge(&mut self, other: &Self) {
        if other.count == 0 {
            return;
        }
        let total = (self.count + other.count) as f64;
        let (share, cross) = (other.count as f64 / total, self.count as f64 * other.count as f64 / total);
        let delta: Vec<f64> = self.mean.iter().zip(&other.mean).map(|(a, b)| b - a).collect();
        for (i, &di) in delta.iter().enumerate() {
            let row = self.scatter.row_mut(i).iter_mut().zip(other.scatter.row(i)).zip(&delta);
            row.for_each(|((s, o), dj)| *s += o + cross * di * dj);
        }
        self.mean.iter_mut().zip(&delta).for_each(|(m, d)| *m += share * d);
        self.count += other.count;
    }

    /// Returns the number of rows so far.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Their mean.
    pub fn mean(&self) -> &[f64] {
        &self.mean
    }

    /// Returns the covariance, divided by one less than the count; `None` for fewer than two rows.
    pub fn covariance(&self) -> Option<Mat<f64>> {
        let d = self.mean.len();
        let divisor = self.count.checked_sub(1).filter(|&n| n > 0)? as f64;
        Some(Mat::from_fn(d, d, |i, j| self.scatter[(i, j)] / divisor))
    }

    /// Returns the mean of $x x^\top$; `None` without rows.
    pub fn second_moment(&self) -> Option<Mat<f64>> {
        let (d, n) = (self.mean.len(), self.count as f64);
        (self.count > 0)
            .then(|| Mat::from_fn(d, d, |i, j| self.scatter[(i, j)] / n + self.mean[i] * self.mean[j]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use attlas_num::rng::StreamKey;

    #[test]
    fn a_mean_takes_every_row_once() {
        // Sums of small integers are exact, in any number of pieces.
        for n in [1, 7, SUMMED_ROWS, SUMMED_ROWS + 1, 3 * SUMMED_ROWS + 5] {
            let x = Mat::from_fn(n, 2, |i, j| if j == 0 { i as f32 } else { 3.0 });
            assert_eq!(mean_of(x.as_ref()), [(n - 1) as f64 / 2.0, 3.0], "{n} rows");
        }
        assert_eq!(mean_of(Mat::<f32>::zeros(0, 3).as_ref()), [0.0; 3]);
    }

    #[test]
    fn pieces_merge_in_any_order() {
        let mut rng = StreamKey::new(1).rng();
        let x = Mat::from_fn(700, 3, |_, j| 100.0 + rng.normal() * (j + 1) as f64);
        let all = {
            let mut m = Moments::new(3);
            m.update(x.as_ref());
            m
        };
        let mut parts: Vec<Moments> = [0..1, 1..300, 300..300, 300..700]
            .map(|r| {
                let mut m = Moments::new(3);
                m.update(x.as_ref().sub_rows(r));
                m
            })
            .into();
        for _ in 0..4 {
            parts.rotate_left(1);
            let mut merged = Moments::new(3);
            parts.iter().for_each(|p| merged.merge(p));
            assert_eq!(merged.count(), 700);
            let (a, b) = (merged.covariance().unwrap(), all.covariance().unwrap());
            assert!(a.data().iter().zip(b.data()).all(|(a, b)| (a - b).abs() < 1e-11));
            assert!(merged.mean().iter().zip(all.mean()).all(|(a, b)| (a - b).abs() < 1e-11));
        }
        let plain = |i: usize, j: usize| {
            let mean = |c: usize| (0..700).map(|t| x[(t, c)]).sum::<f64>() / 700.0;
            let (a, b) = (mean(i), mean(j));
            (0..700).map(|t| (x[(t, i)] - a) * (x[(t, j)] - b)).sum::<f64>() / 699.0
        };
        let second = all.second_moment().unwrap();
        for i in 0..3 {
            for j in 0..3 {
                assert!((all.covariance().unwrap()[(i, j)] - plain(i, j)).abs() < 1e-11);
                let raw = (0..700).map(|t| x[(t, i)] * x[(t, j)]).sum::<f64>() / 700.0;
                assert!((second[(i, j)] - raw).abs() < 1e-8);
            }
        }
        assert!(Moments::new(2).covariance().is_none() && Moments::new(2).second_moment().is_none());
    }
}
