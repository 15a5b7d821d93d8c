//! Matrix views with a row stride, owned row-major matrices, and the two element types.
//!
//! A view never owns and never copies: a head of a `[batch, tokens, heads, d]` tensor is a [`MatRef`]
//! whose row stride is `heads · d`. Columns are always contiguous, so a row is a slice.
//!
//! ```
//! use attlas_num::MatRef;
//!
//! // Head 1 of a [tokens, heads, d] tensor with 3 tokens, 2 heads and width 2, without a copy.
//! let tensor: Vec<i32> = (0..12).collect();
//! let head = MatRef::with_stride(&tensor[2..], 3, 2, 4).unwrap();
//! assert_eq!(head.row(2), [10, 11]);
//! ```

mod real;

use crate::kernels::{ROWS_AHEAD, prefetch};
pub use real::{DType, Real};

/// A read-only matrix: `rows × cols`, rows `stride` elements apart, columns contiguous.
#[derive(Clone, Copy, Debug)]
pub struct MatRef<'a, T> {
    data: &'a [T],
    rows: usize,
    cols: usize,
    stride: usize,
}

impl<'a, T> MatRef<'a, T> {
    /// Creates a view of `rows` contiguous rows. Panics if `data` is not exactly `rows · cols` long.
    pub fn new(data: &'a [T], rows: usize, cols: usize) -> Self {
        assert_eq!(Some(data.len()), rows.checked_mul(cols), "elements of a {rows} × {cols} matrix");
        Self { data, rows, cols, stride: cols }
    }

    /// Creates a view with rows `stride` apart, starting at the front of `data`. `None` if `data` is too short or rows
    /// would overlap.
    pub fn with_stride(data: &'a [T], rows: usize, cols: usize, stride: usize) -> Option<Self> {
        let needed =
            if rows == 0 || cols == 0 { 0 } else { (rows - 1).checked_mul(stride)?.checked_add(cols)? };
        (needed <= data.len() && (stride >= cols || rows <= 1)).then_some(Self { data, rows, cols, stride })
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Distance from the start of one row to the start of the next, in elements.
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// Row `i` as a slice.
    pub fn row(&self, i: usize) -> &'a [T] {
        debug_assert!(i < self.rows);
        if self.cols == 0 {
            return &[];
        }
        let start = i * self.stride;
        &self.data[start..start + self.cols]
    }

    /// Elements behind the view, from its first element on; longer than the view if it is strided.
    pub fn data(&self) -> &'a [T] {
        self.data
    }

    /// All elements as one slice, if rows are contiguous.
    pub fn as_contiguous(&self) -> Option<&'a [T]> {
        (self.stride == self.cols || self.rows <= 1).then(|| &self.data[..self.rows * self.cols])
    }

    /// Rows `range.start .. range.end` as a view.
    pub fn sub_rows(&self, range: std::ops::Range<usize>) -> MatRef<'a, T> {
        assert!(range.start <= range.end && range.end <= self.rows);
        let start = (range.start * self.stride).min(self.data.len());
        MatRef { data: &self.data[start..], rows: range.len(), cols: self.cols, stride: self.stride }
    }

    /// The rows in order.
    pub fn iter_rows(&self) -> impl Iterator<Item = &'a [T]> + use<'a, '_, T> {
        (0..self.rows).map(|i| self.row(i))
    }
}

impl<'a, T: Copy> MatRef<'a, T> {
    /// The element in row `i`, column `j`.
    pub fn at(&self, i: usize, j: usize) -> T {
        self.row(i)[j]
    }

    /// Returns a contiguous copy.
    pub fn to_mat(&self) -> Mat<T> {
        let mut data = Vec::with_capacity(self.rows * self.cols);
        self.iter_rows().for_each(|row| data.extend_from_slice(row));
        Mat { data, rows: self.rows, cols: self.cols }
    }

    /// Copies the rows that `index` names into `out`, in order, prefetching later rows meanwhile.
    pub fn gather_into<I>(&self, index: I, out: &mut [T])
    where
        T: Real,
        I: IntoIterator<Item = usize, IntoIter: Clone>,
    {
        let index = index.into_iter();
        let mut later = index.clone().take(out.len() / self.cols.max(1)).skip(ROWS_AHEAD);
        for (dst, i) in out.chunks_exact_mut(self.cols.max(1)).zip(index) {
            if let Some(later) = later.next() {
                prefetch(self.row(later));
            }
            dst.copy_from_slice(self.row(i));
        }
    }
}

/// Returns `rows · cols`. Panics on overflow: kernels trust the sizes of a view when they read through pointers.
fn element_count(rows: usize, cols: usize) -> usize {
    rows.checked_mul(cols).unwrap_or_else(|| panic!("a {rows} × {cols} matrix has more elements than memory"))
}

/// An owned, contiguous, row-major matrix.
#[derive(Clone, Debug, PartialEq)]
pub struct Mat<T> {
    data: Vec<T>,
    rows: usize,
    cols: usize,
}

impl<T> Mat<T> {
    /// Takes `data` as a `rows × cols` matrix. Panics if the length does not fit.
    pub fn from_vec(data: Vec<T>, rows: usize, cols: usize) -> Self {
        assert_eq!(Some(data.len()), rows.checked_mul(cols), "elements of a {rows} × {cols} matrix");
        Self { data, rows, cols }
    }

    /// Builds a matrix whose entry `(i, j)` is `f(i, j)`.
    pub fn from_fn(rows: usize, cols: usize, mut f: impl FnMut(usize, usize) -> T) -> Self {
        let mut data = Vec::with_capacity(element_count(rows, cols));
        for i in 0..rows {
            for j in 0..cols {
                data.push(f(i, j));
            }
        }
        Self { data, rows, cols }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// A view of the whole matrix.
    pub fn as_ref(&self) -> MatRef<'_, T> {
        MatRef { data: &self.data, rows: self.rows, cols: self.cols, stride: self.cols }
    }

    /// Row `i`.
    pub fn row(&self, i: usize) -> &[T] {
        &self.data[i * self.cols..(i + 1) * self.cols]
    }

    /// Row `i`, mutable.
    pub fn row_mut(&mut self, i: usize) -> &mut [T] {
        &mut self.data[i * self.cols..(i + 1) * self.cols]
    }

    /// All elements, row after row.
    pub fn data(&self) -> &[T] {
        &self.data
    }

    /// All elements, mutable.
    pub fn data_mut(&mut self) -> &mut [T] {
        &mut self.data
    }

    /// Returns the storage.
    pub fn into_vec(self) -> Vec<T> {
        self.data
    }
}

impl<T: Real> Mat<T> {
    /// Returns a matrix of zeros.
    pub fn zeros(rows: usize, cols: usize) -> Self {
        Self { data: vec![T::ZERO; element_count(rows, cols)], rows, cols }
    }

    /// Returns the identity.
    pub fn identity(n: usize) -> Self {
        Self::from_fn(n, n, |i, j| if i == j { T::ONE } else { T::ZERO })
    }

    /// Returns a transposed copy.
    pub fn transpose(&self) -> Self {
        Self::from_fn(self.cols, self.rows, |i, j| self[(j, i)])
    }

    /// Converts every element to the other element type.
    pub fn cast<U: Real>(&self) -> Mat<U> {
        Mat {
            data: self.data.iter().map(|x| U::from_f64(x.to_f64())).collect(),
            rows: self.rows,
            cols: self.cols,
        }
    }

    /// Returns the square root of the sum of squares, accumulated in f64.
    pub fn frobenius(&self) -> f64 {
        self.data.iter().map(|x| x.to_f64() * x.to_f64()).sum::<f64>().sqrt()
    }
}

impl<T> std::ops::Index<(usize, usize)> for Mat<T> {
    type Output = T;
    fn index(&self, (i, j): (usize, usize)) -> &T {
        &self.data[i * self.cols + j]
    }
}

impl<T> std::ops::IndexMut<(usize, usize)> for Mat<T> {
    fn index_mut(&mut self, (i, j): (usize, usize)) -> &mut T {
        &mut self.data[i * self.cols + j]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_strided_view_reads_every_other_row() {
        let data: Vec<i32> = (0..12).collect();
        let view = MatRef::with_stride(&data, 3, 2, 4).unwrap();
        assert_eq!(view.row(2), &[8, 9]);
        assert_eq!(view.sub_rows(1..3).row(1), &[8, 9]);
        assert_eq!(view.to_mat().data(), &[0, 1, 4, 5, 8, 9]);
        assert!(view.as_contiguous().is_none());
    }

    #[test]
    fn gathered_rows_come_in_the_order_named() {
        let m = Mat::from_fn(40, 3, |i, j| (10 * i + j) as f64);
        for count in [0, 1, 11, 12, 13, 40] {
            let index = (0..count).map(|t| (7 * t + 5) % 40);
            let mut out = vec![0.0; 3 * count];
            m.as_ref().gather_into(index.clone(), &mut out);
            for (row, i) in out.chunks(3).zip(index) {
                assert_eq!(row, m.row(i));
            }
        }
        // Copies as many rows as fit, however many the index names.
        let mut out = vec![0.0; 6];
        m.as_ref().gather_into(38.., &mut out);
        assert_eq!(out, [380.0, 381.0, 382.0, 390.0, 391.0, 392.0]);
    }

    #[test]
    fn sizes_whose_product_wraps_are_refused() {
        // 2⁵⁸ + 1 rows of 64 wrap to 64 elements.
        let rows = (1usize << (usize::BITS - 6)) + 1;
        let data = [1.0f32; 64];
        let refused = |f: &dyn Fn()| std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)).is_err();
        assert!(refused(&|| assert!(MatRef::new(&data, rows, 64).rows() > 0)));
        assert!(refused(&|| drop(Mat::from_vec(data.to_vec(), rows, 64))));
        assert!(refused(&|| drop(Mat::<f32>::zeros(rows, 64))));
        assert!(refused(&|| drop(Mat::from_fn(rows, 64, |_, _| 0.0f32))));
    }

    #[test]
    fn views_that_do_not_fit_are_refused() {
        let data = [0.0f32; 7];
        assert!(MatRef::with_stride(&data, 3, 2, 3).is_none());
        assert!(MatRef::with_stride(&data, 3, 2, 1).is_none());
        assert!(MatRef::with_stride(&data, usize::MAX, 2, usize::MAX).is_none());
        assert!(MatRef::with_stride(&data, 0, 5, 9).is_some());
    }
}
