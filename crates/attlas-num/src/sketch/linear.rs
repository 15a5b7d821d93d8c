//! Linear sketches: short vectors $Sx$ with $E\langle Sx, Sy\rangle = \langle x, y\rangle$.
//!
//! * [`GaussianSketch`]: independent $N(0, 1/r)$ entries; $O(nr)$ per vector.
//! * [`CountSketch`] (Charikar et al. 2002): each coordinate goes to one of $r$ buckets with a random sign; $O(n)$.
//! * [`Srht`] (Ailon, Chazelle 2006; Tropp 2011): random signs, Walsh–Hadamard transform, $r$ rows without
//!   replacement; $O(n \log n)$, length padded to a power of two; an isometry when all rows are kept.
//!
//! Variances are in [`variance`](super::variance).

use super::{SketchError, ensure};
use crate::mat::{Mat, MatRef, Real};
use crate::rng::StreamKey;
use crate::sketch::project::{dot, project};
use crate::transform::walsh_hadamard_in_place;

/// A random linear map from vectors of length `input_len` to vectors of length `output_len`.
pub trait LinearSketch<T: Real>: std::fmt::Debug + Send + Sync {
    /// Length of what is sketched.
    fn input_len(&self) -> usize;

    /// Length of sketches.
    fn output_len(&self) -> usize;

    /// Writes $Sx$. Panics on wrong lengths.
    fn apply_into(&self, x: &[T], out: &mut [T]);

    /// Sketches every row: $A S^\top$.
    fn apply_to_rows(&self, a: MatRef<'_, T>) -> Mat<T> {
        let mut out = Mat::zeros(a.rows(), self.output_len());
        for (i, row) in a.iter_rows().enumerate() {
            self.apply_into(row, out.row_mut(i));
        }
        out
    }

    /// Sketches every column: $S A$, of `output_len` rows.
    fn apply_to_columns(&self, a: MatRef<'_, T>) -> Mat<T> {
        self.apply_to_rows(a.to_mat().transpose().as_ref()).transpose()
    }
}

fn check_lengths<T>(x: &[T], input: usize, out: &[T], output: usize) {
    assert_eq!(x.len(), input, "length of the vector");
    assert_eq!(out.len(), output, "length of the sketch");
}

/// Independent Gaussian entries.
#[derive(Clone, Debug)]
pub struct GaussianSketch<T> {
    matrix: Mat<T>,
}

impl<T: Real> GaussianSketch<T> {
    /// Draws a sketch of vectors of length `n` to length `r`.
    pub fn new(n: usize, r: usize, key: StreamKey) -> Result<Self, SketchError> {
        ensure(r > 0, "r", 0.0, "at least 1")?;
        let (mut rng, factor) = (key.rng(), 1.0 / (r as f64).sqrt());
        Ok(Self { matrix: Mat::from_fn(r, n, |_, _| T::from_f64(factor * rng.normal())) })
    }

    /// The matrix $S$.
    pub fn matrix(&self) -> &Mat<T> {
        &self.matrix
    }
}

impl<T: Real> LinearSketch<T> for GaussianSketch<T> {
    fn input_len(&self) -> usize {
        self.matrix.cols()
    }

    fn output_len(&self) -> usize {
        self.matrix.rows()
    }

    fn apply_into(&self, x: &[T], out: &mut [T]) {
        check_lengths(x, self.matrix.cols(), out, self.matrix.rows());
        out.iter_mut().enumerate().for_each(|(l, o)| *o = dot(x, self.matrix.row(l)));
    }

    fn apply_to_rows(&self, a: MatRef<'_, T>) -> Mat<T> {
        assert_eq!(a.cols(), self.matrix.cols(), "length of the vector");
        let mut out = Mat::zeros(a.rows(), self.matrix.rows());
        project(a, &self.matrix, out.data_mut(), self.matrix.rows());
        out
    }
}

/// Random buckets and signs.
#[derive(Clone, Debug)]
pub struct CountSketch {
    buckets: Vec<u32>,
    negative: Vec<bool>,
    r: usize,
}

impl CountSketch {
    /// Draws a sketch of vectors of length `n` to length `r`.
    pub fn new(n: usize, r: usize, key: StreamKey) -> Result<Self, SketchError> {
        ensure(r > 0 && r <= u32::MAX as usize, "r", r as f64, "in 1..2³²")?;
        let mut rng = key.rng();
        let buckets = (0..n).map(|_| rng.below(r) as u32).collect();
        let negative = (0..n).map(|_| rng.sign() < 0.0).collect();
        Ok(Self { buckets, negative, r })
    }
}

impl<T: Real> LinearSketch<T> for CountSketch {
    fn input_len(&self) -> usize {
        self.buckets.len()
    }

    fn output_len(&self) -> usize {
        self.r
    }

    fn apply_into(&self, x: &[T], out: &mut [T]) {
        check_lengths(x, self.buckets.len(), out, self.r);
        out.fill(T::ZERO);
        for ((&x, &b), &negative) in x.iter().zip(&self.buckets).zip(&self.negative) {
            out[b as usize] += if negative { -x } else { x };
        }
    }

    fn apply_to_columns(&self, a: MatRef<'_, T>) -> Mat<T> {
        assert_eq!(a.rows(), self.buckets.len(), "length of the vector");
        let mut out = Mat::zeros(self.r, a.cols());
        for (i, row) in a.iter_rows().enumerate() {
            let target = out.row_mut(self.buckets[i] as usize);
            if self.negative[i] {
                target.iter_mut().zip(row).for_each(|(o, &x)| *o -= x);
            } else {
                target.iter_mut().zip(row).for_each(|(o, &x)| *o += x);
            }
        }
        out
    }
}

/// Rows of a randomised Hadamard transform.
#[derive(Clone, Debug)]
pub struct Srht {
    negative: Vec<bool>,
    rows: Vec<usize>,
    padded: usize,
}

impl Srht {
    /// Draws a sketch of vectors of length `n` to length `r`, at most `n` rounded up to a power of two.
    pub fn new(n: usize, r: usize, key: StreamKey) -> Result<Self, SketchError> {
        let padded = n.next_power_of_two();
        ensure(r > 0 && r <= padded, "r", r as f64, "at least 1, at most the padded length")?;
        let mut rng = key.rng();
        let negative = (0..n).map(|_| rng.sign() < 0.0).collect();
        Ok(Self { negative, rows: rng.subset(padded, r), padded })
    }
}

impl<T: Real> LinearSketch<T> for Srht {
    fn input_len(&self) -> usize {
        self.negative.len()
    }

    fn output_len(&self) -> usize {
        self.rows.len()
    }

    fn apply_into(&self, x: &[T], out: &mut [T]) {
        check_lengths(x, self.negative.len(), out, self.rows.len());
        let mut work = vec![T::ZERO; self.padded];
        for ((w, &x), &negative) in work.iter_mut().zip(x).zip(&self.negative) {
            *w = if negative { -x } else { x };
        }
        walsh_hadamard_in_place(&mut work);
        let factor = T::from_f64(1.0 / (self.rows.len() as f64).sqrt());
        out.iter_mut().zip(&self.rows).for_each(|(o, &l)| *o = factor * work[l]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sketch::testing::check_moments;
    use crate::sketch::variance::{count_sketch_variance, gaussian_sketch_variance, srht_variance};

    const X: [f64; 5] = [1.0, -0.5, 0.3, 0.0, 2.0];
    const Y: [f64; 5] = [0.2, 1.0, -1.5, 0.7, 1.0];

    fn estimate(s: &dyn LinearSketch<f64>) -> f64 {
        let (mut a, mut b) = (vec![f64::NAN; s.output_len()], vec![f64::NAN; s.output_len()]);
        s.apply_into(&X, &mut a);
        s.apply_into(&Y, &mut b);
        dot(&a, &b)
    }

    #[test]
    fn inner_products_are_unbiased_with_the_stated_variance() {
        let target = dot(&X, &Y);
        let key = StreamKey::new;
        // Light tails: 20 000 seeds settle the variance to about 2 %.
        check_moments("gaussian", 20_000, target, gaussian_sketch_variance(&X, &Y, 6), 0.08, |t| {
            estimate(&GaussianSketch::new(5, 6, key(t)).unwrap())
        });
        for r in [3, 6] {
            check_moments("count", 20_000, target, count_sketch_variance(&X, &Y, r), 0.08, |t| {
                estimate(&CountSketch::new(5, r, key(t)).unwrap())
            });
            check_moments("srht", 20_000, target, srht_variance(&X, &Y, r), 0.08, |t| {
                estimate(&Srht::new(5, r, key(t)).unwrap())
            });
        }
    }

    #[test]
    fn all_rows_of_a_hadamard_transform_are_an_isometry() {
        let s = Srht::new(5, 8, StreamKey::new(2)).unwrap();
        assert!((estimate(&s) - dot(&X, &Y)).abs() < 1e-14);
        assert_eq!(srht_variance(&X, &Y, 8), 0.0);
    }

    #[test]
    fn rows_and_columns_are_sketched_alike_and_linearly() {
        let sketches: [Box<dyn LinearSketch<f64>>; 3] = [
            Box::new(GaussianSketch::new(5, 3, StreamKey::new(1)).unwrap()),
            Box::new(CountSketch::new(5, 3, StreamKey::new(1)).unwrap()),
            Box::new(Srht::new(5, 3, StreamKey::new(1)).unwrap()),
        ];
        let sum: Vec<f64> = X.iter().zip(&Y).map(|(a, b)| 2.0 * a - b).collect();
        let rows = Mat::from_fn(3, 5, |i, j| [X[j], Y[j], sum[j]][i]);
        for s in &sketches {
            let by_rows = s.apply_to_rows(rows.as_ref());
            let by_columns = s.apply_to_columns(rows.transpose().as_ref());
            for l in 0..3 {
                for i in 0..3 {
                    assert!((by_rows[(i, l)] - by_columns[(l, i)]).abs() < 1e-14, "{s:?}");
                }
                let combined = 2.0 * by_rows[(0, l)] - by_rows[(1, l)];
                assert!((combined - by_rows[(2, l)]).abs() < 1e-14, "{s:?}");
            }
        }
    }

    #[test]
    fn length_one_works_and_bad_sizes_are_refused() {
        let mut out = [f64::NAN];
        LinearSketch::<f64>::apply_into(&Srht::new(1, 1, StreamKey::new(0)).unwrap(), &[3.0], &mut out);
        assert_eq!(out[0].abs(), 3.0);
        assert!(Srht::new(5, 9, StreamKey::new(0)).is_err());
        assert!(CountSketch::new(5, 0, StreamKey::new(0)).is_err());
        assert!(GaussianSketch::<f32>::new(5, 0, StreamKey::new(0)).is_err());
    }
}
