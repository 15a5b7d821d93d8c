//! Dense row-major tensors, strided views of them, unfoldings and mode products.

use super::{Error, Result};
use crate::linalg::{Op, gemm};
use crate::par::*;
use crate::{Mat, MatRef, Real};
use std::borrow::Cow;

/// Largest number of modes of a tensor.
pub const MAX_ORDER: usize = 8;

/// Owned tensor, row-major: the last index is contiguous.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor<T> {
    shape: Vec<usize>,
    buf: Vec<T>,
}

/// Returns the number of entries of a shape, or the reason why it is refused.
fn entries(shape: &[usize]) -> Result<usize> {
    if shape.is_empty() || shape.len() > MAX_ORDER {
        return Err(Error::shape("order of a tensor", format!("1 to {MAX_ORDER}"), shape.len()));
    }
    // An empty tensor may have any other dimensions, but they must still multiply without overflow so
    // that unfoldings have a size.
    shape
        .iter()
        .try_fold(1usize, |n, &d| n.checked_mul(d.max(1)))
        .filter(|&n| n <= isize::MAX as usize / size_of::<f64>())
        .map(|_| shape.iter().product())
        .ok_or_else(|| {
            Error::shape("entries of a tensor", "a number that fits in memory", format!("{shape:?}"))
        })
}

impl<T> Tensor<T> {
    /// Takes `buf` as a tensor of the given shape.
    pub fn new(shape: &[usize], buf: Vec<T>) -> Result<Self> {
        let n = entries(shape)?;
        if buf.len() != n {
            return Err(Error::shape("entries of a tensor", format!("{n} for shape {shape:?}"), buf.len()));
        }
        Ok(Self { shape: shape.to_vec(), buf })
    }

    /// Builds the tensor whose entry with flat row-major index `k` is `f(k)`.
    pub fn from_flat_fn(shape: &[usize], f: impl FnMut(usize) -> T) -> Result<Self> {
        let n = entries(shape)?;
        Ok(Self { shape: shape.to_vec(), buf: (0..n).map(f).collect() })
    }

    /// Dimensions, one per mode.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Number of modes.
    pub fn order(&self) -> usize {
        self.shape.len()
    }

    /// All entries, row-major.
    pub fn data(&self) -> &[T] {
        &self.buf
    }

    /// All entries, mutable.
    pub fn data_mut(&mut self) -> &mut [T] {
        &mut self.buf
    }

    /// Returns the storage.
    pub fn into_vec(self) -> Vec<T> {
        self.buf
    }

    /// Returns the tensor's sizes `(L, I_n, S)` before, at and after `mode`.
    pub(super) fn split(&self, mode: usize) -> (usize, usize, usize) {
        split(&self.shape, mode)
    }

    pub(super) fn check_mode(&self, mode: usize) -> Result<()> {
        if mode < self.order() {
            return Ok(());
        }
        Err(Error::param("mode", mode, format!("below {}, modes count from 0", self.order())))
    }
}

/// Fibres per piece of a product along the last mode.
const ROWS: usize = 512;
/// Matrix rows per piece of a product along the first mode.
const PRODUCT_ROWS: usize = 48;

/// Returns the sizes before, at and after a mode.
pub(super) fn split(shape: &[usize], mode: usize) -> (usize, usize, usize) {
    (shape[..mode].iter().product(), shape[mode], shape[mode + 1..].iter().product())
}

impl<T: Real> Tensor<T> {
    /// Returns a tensor of zeros.
    pub fn zeros(shape: &[usize]) -> Result<Self> {
        Self::from_flat_fn(shape, |_| T::ZERO)
    }

    /// Stacks matrices of one size: `T[i, :, :]` is matrix `i`.
    pub fn stack(matrices: &[Mat<T>]) -> Result<Self> {
        let (rows, cols) = matrices.first().map_or((0, 0), |m| (m.rows(), m.cols()));
        if let Some(odd) = matrices.iter().find(|m| (m.rows(), m.cols()) != (rows, cols)) {
            return Err(Error::shape(
                "matrices of a stack",
                format!("{rows} × {cols} as the first"),
                format!("{} × {}", odd.rows(), odd.cols()),
            ));
        }
        Self::new(&[matrices.len(), rows, cols], matrices.iter().flat_map(|m| m.data()).copied().collect())
    }

    /// Converts every entry to the other element type.
    pub fn cast<U: Real>(&self) -> Tensor<U> {
        Tensor { shape: self.shape.clone(), buf: self.buf.iter().map(|x| U::from_f64(x.to_f64())).collect() }
    }

    /// Returns the entry at `index`; `None` outside the tensor.
    pub fn get(&self, index: &[usize]) -> Option<T> {
        let inside = index.len() == self.order() && index.iter().zip(&self.shape).all(|(i, n)| i < n);
        inside.then(|| self.buf[index.iter().zip(&self.shape).fold(0, |k, (i, n)| k * n + i)])
    }

    /// Returns the mode-`mode` unfolding, copied.
    pub fn unfold(&self, mode: usize) -> Result<Mat<T>> {
        self.check_mode(mode)?;
        Ok(self.unfold_unchecked(mode))
    }

    pub(super) fn unfold_unchecked(&self, mode: usize) -> Mat<T> {
        let (l, n, s) = self.split(mode);
        let mut out = Vec::with_capacity(self.buf.len());
        for i in 0..n {
            for block in 0..l {
                let start = (block * n + i) * s;
                out.extend_from_slice(&self.buf[start..start + s]);
            }
        }
        Mat::from_vec(out, n, l * s)
    }

    /// Returns the tensor of the given shape whose mode-`mode` unfolding is `m`.
    pub fn fold(m: &Mat<T>, mode: usize, shape: &[usize]) -> Result<Self> {
        let mut out = Self::zeros(shape)?;
        out.check_mode(mode)?;
        let (l, n, s) = out.split(mode);
        if (m.rows(), m.cols()) != (n, l * s) {
            return Err(Error::shape(
                "folding a matrix",
                format!("{n} × {}", l * s),
                format!("{} × {}", m.rows(), m.cols()),
            ));
        }
        for i in 0..n {
            for block in 0..l {
                let start = (block * n + i) * s;
                out.buf[start..start + s].copy_from_slice(&m.row(i)[block * s..(block + 1) * s]);
            }
        }
        Ok(out)
    }

    /// Computes $T \times_n M$ for $M$ of $J \times I_n$: every mode-`mode` fibre is multiplied by $M$.
    pub fn mode_product(&self, m: &Mat<T>, mode: usize) -> Result<Self> {
        self.check_mode(mode)?;
        if m.cols() != self.shape[mode] {
            return Err(Error::shape("mode product", format!("{} columns", self.shape[mode]), m.cols()));
        }
        self.mode_product_op(m, mode, false)
    }

    /// Computes $T \times_n M^\top$ for $M$ of $I_n \times J$, without copying the transpose.
    pub fn mode_product_t(&self, m: &Mat<T>, mode: usize) -> Result<Self> {
        self.check_mode(mode)?;
        if m.rows() != self.shape[mode] {
            return Err(Error::shape("mode product", format!("{} rows", self.shape[mode]), m.rows()));
        }
        self.mode_product_op(m, mode, true)
    }

    fn mode_product_op(&self, m: &Mat<T>, mode: usize, transposed: bool) -> Result<Self> {
        let (l, n, s) = self.split(mode);
        let j = if transposed { m.cols() } else { m.rows() };
        let mut shape = self.shape.clone();
        shape[mode] = j;
        let mut out = Self::zeros(&shape)?;
        if out.buf.is_empty() || n == 0 {
            return Ok(out);
        }
        let op = |flip: bool| if transposed != flip { Op::T(m.as_ref()) } else { Op::N(m.as_ref()) };
        let rows_of = |data, cols| Op::N(MatRef::new(data, data.len() / cols, cols));
        // Pieces depend only on sizes, and each entry belongs to one piece: threads do not change results.
        if s == 1 {
            let (from, to) = (self.buf.par_chunks(ROWS * n), out.buf.par_chunks_mut(ROWS * j));
            from.zip(to).for_each(|(from, to)| {
                gemm(T::ONE, rows_of(from, n), op(true), to, j, false);
            });
        } else if l == 1 {
            let m = if transposed { &m.transpose() } else { m };
            let (rows, to) =
                (m.data().par_chunks(PRODUCT_ROWS * n), out.buf.par_chunks_mut(PRODUCT_ROWS * s));
            rows.zip(to).for_each(|(rows, to)| {
                gemm(T::ONE, rows_of(rows, n), rows_of(&self.buf, s), to, s, false);
            });
        } else {
            let (from, to) = (self.buf.par_chunks(n * s), out.buf.par_chunks_exact_mut(j * s));
            from.zip(to).for_each(|(from, to)| gemm(T::ONE, op(false), rows_of(from, s), to, s, false));
        }
        Ok(out)
    }

    /// Computes several mode products at once, at most one per mode. The mode that shrinks most is contracted first,
    /// whatever the order of the list.
    pub fn mode_products(&self, list: &[(usize, &Mat<T>)]) -> Result<Self> {
        self.products_shrinking_first(list, false)
    }

    /// Computes several products with transposes at once; see [`mode_products`](Self::mode_products).
    pub fn mode_products_t(&self, list: &[(usize, &Mat<T>)]) -> Result<Self> {
        self.products_shrinking_first(list, true)
    }

    fn products_shrinking_first(&self, list: &[(usize, &Mat<T>)], transposed: bool) -> Result<Self> {
        let mut order: Vec<usize> = (0..list.len()).collect();
        for (k, &(mode, _)) in list.iter().enumerate() {
            self.check_mode(mode)?;
            if list[..k].iter().any(|&(other, _)| other == mode) {
                return Err(Error::param("mode", mode, "each mode at most once"));
            }
        }
        let growth = |m: &Mat<T>| {
            let (to, from) = if transposed { (m.cols(), m.rows()) } else { (m.rows(), m.cols()) };
            to as f64 / from.max(1) as f64
        };
        order.sort_by(|&a, &b| growth(list[a].1).total_cmp(&growth(list[b].1)));
        let mut out = Cow::Borrowed(self);
        for k in order {
            let (mode, m) = list[k];
            let next = if transposed { out.mode_product_t(m, mode)? } else { out.mode_product(m, mode)? };
            out = Cow::Owned(next);
        }
        Ok(out.into_owned())
    }

    /// Returns the sum of products of corresponding entries, accumulated in f64.
    pub fn inner(&self, other: &Self) -> Result<f64> {
        if self.shape != other.shape {
            return Err(Error::shape(
                "inner product",
                format!("shape {:?}", self.shape),
                format!("{:?}", other.shape),
            ));
        }
        Ok(self.buf.iter().zip(&other.buf).map(|(x, y)| x.to_f64() * y.to_f64()).sum())
    }

    /// Returns the square root of the sum of squares, accumulated in f64 without overflow or underflow in between.
    pub fn norm(&self) -> f64 {
        let largest = self.largest();
        if largest == 0.0 || !largest.is_finite() {
            return largest;
        }
        let scale = power_of_two_near(largest);
        (self.buf.iter().map(|x| (x.to_f64() / scale).powi(2)).sum::<f64>()).sqrt() * scale
    }

    /// Returns the largest magnitude of an entry; NaN if an entry is NaN.
    fn largest(&self) -> f64 {
        self.buf.iter().map(|x| x.to_f64().abs()).fold(0.0, |m, x| if x > m || x.is_nan() { x } else { m })
    }

    /// Returns the tensor in f64, divided by a power of two if squares of its entries would leave the range of f64, and
    /// that power. Refuses entries, or a norm, that are not finite.
    pub(super) fn to_working(&self) -> Result<(Cow<'_, Tensor<f64>>, f64)> {
        let largest = self.largest();
        if !largest.is_finite() {
            return Err(Error::NotFinite { what: "an entry of the tensor" });
        }
        if !self.norm().is_finite() {
            return Err(Error::NotFinite { what: "the norm of the tensor" });
        }
        if largest != 0.0 && !(1e-100..=1e100).contains(&largest) {
            let scale = power_of_two_near(largest);
            let buf = self.buf.iter().map(|x| x.to_f64() / scale).collect();
            return Ok((Cow::Owned(Tensor { shape: self.shape.clone(), buf }), scale));
        }
        match (self as &dyn std::any::Any).downcast_ref::<Tensor<f64>>() {
            Some(same) => Ok((Cow::Borrowed(same), 1.0)),
            None => Ok((Cow::Owned(self.cast()), 1.0)),
        }
    }
}

/// Returns a power of two within a factor of two of `x`, exact to divide by.
fn power_of_two_near(x: f64) -> f64 {
    libm::ldexp(1.0, libm::ilogb(x).clamp(-1022, 1023))
}

#[cfg(test)]
mod tests {
    use super::super::known::fill;
    use super::super::{khatri_rao, kronecker};
    use super::*;

    fn mat(rows: usize, cols: usize, seed: u64) -> Mat<f64> {
        Mat::from_vec(fill(&[rows, cols], seed).unwrap().into_vec(), rows, cols)
    }

    fn assert_close(a: &[f64], b: &[f64]) {
        assert_eq!(a.len(), b.len());
        let worst = a.iter().zip(b).map(|(x, y)| (x - y).abs()).fold(0.0, f64::max);
        assert!(worst < 64.0 * f64::EPSILON, "{worst}");
    }

    #[test]
    fn unfolding_puts_the_mode_in_rows_and_the_last_index_fastest() {
        let t = Tensor::from_flat_fn(&[2, 3, 2], |k| k as f64).unwrap();
        assert_eq!(t.unfold(0).unwrap().data(), t.data());
        assert_eq!(t.unfold(1).unwrap().row(2), [4.0, 5.0, 10.0, 11.0]);
        assert_eq!(t.unfold(2).unwrap().row(1), [1.0, 3.0, 5.0, 7.0, 9.0, 11.0]);
        assert!(t.unfold(3).is_err());
    }

    #[test]
    fn folding_undoes_unfolding_for_every_order_and_empty_modes() {
        for shape in [&[5][..], &[3, 1], &[2, 3, 4], &[2, 1, 3, 2], &[2, 2, 2, 2, 2, 2, 2, 2], &[3, 0, 2]] {
            let t = fill(shape, 3).unwrap();
            for mode in 0..shape.len() {
                assert_eq!(Tensor::fold(&t.unfold(mode).unwrap(), mode, shape).unwrap(), t);
            }
        }
        assert!(Tensor::fold(&mat(2, 2, 1), 0, &[3, 2]).is_err());
    }

    #[test]
    fn a_mode_product_multiplies_the_unfolding() {
        let t = fill(&[3, 4, 2, 5], 7).unwrap();
        for mode in 0..4 {
            let m = mat(6, t.shape()[mode], 8);
            let product = t.mode_product(&m, mode).unwrap();
            let expected = crate::linalg::matmul(m.as_ref(), t.unfold(mode).unwrap().as_ref());
            assert_close(product.unfold(mode).unwrap().data(), expected.data());
            assert_eq!(t.mode_product_t(&m.transpose(), mode).unwrap().shape(), product.shape());
            assert_close(t.mode_product_t(&m.transpose(), mode).unwrap().data(), product.data());
        }
    }

    #[test]
    fn products_in_several_pieces_are_those_of_the_unfolding_for_any_number_of_threads() {
        let with = |threads: usize, t: &Tensor<f64>, m: &Mat<f64>, mode: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| t.mode_product_t(m, mode).unwrap())
        };
        // More rows than a piece has, along the first and the last mode.
        for (shape, mode, rank) in [([7, 30, 40], 0, 100), ([30, 40, 5], 2, 3), ([30, 7, 40], 1, 9)] {
            let t = fill(&shape, 8).unwrap();
            let m = Mat::from_vec(fill(&[shape[mode], rank], 9).unwrap().into_vec(), shape[mode], rank);
            let product = with(1, &t, &m, mode);
            assert_eq!(product, with(3, &t, &m, mode));
            let want = crate::linalg::matmul_tn(m.as_ref(), t.unfold(mode).unwrap().as_ref());
            let got = product.unfold(mode).unwrap();
            let off = got.data().iter().zip(want.data()).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(off < f64::EPSILON * shape[mode] as f64, "{shape:?}: {off}");
        }
    }

    #[test]
    fn the_tucker_form_is_a_kronecker_product_on_the_buffer() {
        let g = fill(&[2, 3, 2], 1).unwrap();
        let (a, b, c) = (mat(4, 2, 2), mat(3, 3, 3), mat(5, 2, 4));
        let t = g.mode_products(&[(2, &c), (0, &a), (1, &b)]).unwrap();
        let k = kronecker(&kronecker(&a, &b), &c);
        let vec: Vec<f64> =
            k.as_ref().iter_rows().map(|row| row.iter().zip(g.data()).map(|(x, y)| x * y).sum()).collect();
        assert_close(t.data(), &vec);
        let first = crate::linalg::matmul(a.as_ref(), g.unfold(0).unwrap().as_ref());
        let first = crate::linalg::matmul_nt(first.as_ref(), kronecker(&b, &c).as_ref());
        assert_close(t.unfold(0).unwrap().data(), first.data());
    }

    #[test]
    fn the_polyadic_form_unfolds_into_khatri_rao_products() {
        let (a, b, c) = (mat(3, 2, 1), mat(4, 2, 2), mat(2, 2, 3));
        let t =
            super::super::cp::Cp { weights: vec![2.0, 0.5], factors: vec![a.clone(), b.clone(), c.clone()] }
                .reconstruct()
                .unwrap();
        let weighted = |m: &Mat<f64>| Mat::from_fn(m.rows(), 2, |i, r| m[(i, r)] * [2.0, 0.5][r]);
        for (mode, left, right) in [
            (0, &a, khatri_rao(&b, &c).unwrap()),
            (1, &b, khatri_rao(&a, &c).unwrap()),
            (2, &c, khatri_rao(&a, &b).unwrap()),
        ] {
            let expected = crate::linalg::matmul_nt(weighted(left).as_ref(), right.as_ref());
            assert_close(t.unfold(mode).unwrap().data(), expected.data());
        }
    }

    #[test]
    fn single_precision_products_round_in_single_precision() {
        let t = fill(&[3, 4, 5], 7).unwrap();
        let m = mat(2, 4, 8);
        let exact = t.mode_product(&m, 1).unwrap();
        let single = t.cast::<f32>().mode_product(&m.cast(), 1).unwrap();
        for (x, y) in single.data().iter().zip(exact.data()) {
            assert!((f64::from(*x) - y).abs() < 8.0 * f64::from(f32::EPSILON));
        }
    }

    #[test]
    fn stacking_concatenates_buffers() {
        let t = Tensor::stack(&[mat(2, 3, 1), mat(2, 3, 2)]).unwrap();
        assert_eq!(t.shape(), [2, 2, 3]);
        assert_eq!(&t.data()[6..], mat(2, 3, 2).data());
        assert!(Tensor::stack(&[mat(2, 3, 1), mat(3, 2, 2)]).is_err());
        assert_eq!(Tensor::<f64>::stack(&[]).unwrap().norm(), 0.0);
    }

    #[test]
    fn norms_neither_overflow_nor_underflow() {
        let t = Tensor::new(&[2], vec![3e200, 4e200]).unwrap();
        assert!((t.norm() / 5e200 - 1.0).abs() < 4.0 * f64::EPSILON);
        let t = Tensor::new(&[2], vec![3e-320, 4e-320]).unwrap();
        // Subnormal numbers carry few digits.
        assert!((t.norm() / 5e-320 - 1.0).abs() < 1e-3);
        assert!(Tensor::new(&[2], vec![1.0, f64::NAN]).unwrap().norm().is_nan());
        assert_eq!(Tensor::new(&[2], vec![1.0, f64::INFINITY]).unwrap().norm(), f64::INFINITY);
    }

    #[test]
    fn shapes_that_make_no_tensor_are_refused() {
        assert!(Tensor::new(&[], vec![1.0]).is_err());
        assert!(Tensor::new(&[2, 2], vec![1.0]).is_err());
        assert!(Tensor::<f64>::zeros(&[1; 9]).is_err());
        assert!(Tensor::<f64>::zeros(&[usize::MAX, 2]).is_err());
        assert!(Tensor::<f64>::zeros(&[0, usize::MAX, 2]).is_err());
        let empty = Tensor::<f64>::zeros(&[2, 0, 3]).unwrap();
        assert_eq!(empty.norm(), 0.0);
        assert_eq!(empty.mode_product(&Mat::zeros(4, 0), 1).unwrap().data(), [0.0; 24]);
        assert_eq!(empty.mode_product(&Mat::zeros(5, 3), 2).unwrap().shape(), [2, 0, 5]);
        let t = fill(&[2, 3], 1).unwrap();
        assert!(t.mode_product(&mat(2, 2, 1), 1).is_err());
        assert!(t.mode_products(&[(0, &mat(2, 2, 1)), (0, &mat(2, 2, 1))]).is_err());
    }
}
