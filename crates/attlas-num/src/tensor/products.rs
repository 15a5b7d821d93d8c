//! Kronecker, Khatri–Rao, Hadamard and outer products.

use super::{Error, Result, Tensor};
use crate::{Mat, Real};

/// Computes $A \otimes B$: entry $(iK + k, jL + l)$ is $a_{ij} b_{kl}$ for $B$ of $K \times L$.
pub fn kronecker<T: Real>(a: &Mat<T>, b: &Mat<T>) -> Mat<T> {
    let (k, l) = (b.rows().max(1), b.cols().max(1));
    Mat::from_fn(a.rows() * b.rows(), a.cols() * b.cols(), |i, j| a[(i / k, j / l)] * b[(i % k, j % l)])
}

/// Computes $A * B$, the Kronecker product column by column: entry $(iJ + j, r)$ is $a_{ir} b_{jr}$ for $B$ of $J$
/// rows. Both need the same number of columns.
pub fn khatri_rao<T: Real>(a: &Mat<T>, b: &Mat<T>) -> Result<Mat<T>> {
    if a.cols() != b.cols() {
        return Err(Error::shape("Khatri–Rao product", format!("{} columns", a.cols()), b.cols()));
    }
    let j = b.rows().max(1);
    Ok(Mat::from_fn(a.rows() * b.rows(), a.cols(), |i, r| a[(i / j, r)] * b[(i % j, r)]))
}

/// Computes $A \odot B$, entry by entry.
pub fn hadamard<T: Real>(a: &Mat<T>, b: &Mat<T>) -> Result<Mat<T>> {
    if (a.rows(), a.cols()) != (b.rows(), b.cols()) {
        return Err(Error::shape(
            "Hadamard product",
            format!("{} × {}", a.rows(), a.cols()),
            format!("{} × {}", b.rows(), b.cols()),
        ));
    }
    Ok(Mat::from_fn(a.rows(), a.cols(), |i, j| a[(i, j)] * b[(i, j)]))
}

/// Computes the outer product of one vector per mode.
pub fn outer<T: Real>(vectors: &[&[T]]) -> Result<Tensor<T>> {
    let shape: Vec<usize> = vectors.iter().map(|v| v.len()).collect();
    let mut buf = vec![T::ONE];
    for v in vectors {
        buf = buf.iter().flat_map(|&x| v.iter().map(move |&y| x * y)).collect();
    }
    Tensor::new(&shape, buf)
}

#[cfg(test)]
mod tests {
    use super::super::known::fill;
    use super::*;
    use crate::linalg::{matmul, matmul_tn};

    fn mat(rows: usize, cols: usize, seed: u64) -> Mat<f64> {
        Mat::from_vec(fill(&[rows, cols], seed).unwrap().into_vec(), rows, cols)
    }

    fn assert_close(a: &Mat<f64>, b: &Mat<f64>) {
        assert_eq!((a.rows(), a.cols()), (b.rows(), b.cols()));
        let worst = a.data().iter().zip(b.data()).map(|(x, y)| (x - y).abs()).fold(0.0, f64::max);
        // Sums of at most 12 products of numbers below 1.
        assert!(worst < 16.0 * f64::EPSILON * 12.0, "{worst}");
    }

    #[test]
    fn gram_matrices_of_khatri_rao_products_are_hadamard_products() {
        // Different column counts on the two sides, as the block-term update needs.
        let (a, b, c, d) = (mat(3, 2, 1), mat(4, 2, 2), mat(3, 5, 3), mat(4, 5, 4));
        let left = matmul_tn(khatri_rao(&a, &b).unwrap().as_ref(), khatri_rao(&c, &d).unwrap().as_ref());
        assert_close(
            &left,
            &hadamard(&matmul_tn(a.as_ref(), c.as_ref()), &matmul_tn(b.as_ref(), d.as_ref())).unwrap(),
        );
    }

    #[test]
    fn the_kronecker_product_multiplies_factor_by_factor() {
        let (a, b, c, d) = (mat(2, 3, 5), mat(3, 2, 6), mat(3, 2, 7), mat(2, 4, 8));
        let left = matmul(kronecker(&a, &b).as_ref(), kronecker(&c, &d).as_ref());
        assert_close(&left, &kronecker(&matmul(a.as_ref(), c.as_ref()), &matmul(b.as_ref(), d.as_ref())));
    }

    #[test]
    fn the_first_argument_is_the_slow_one() {
        let a = Mat::from_vec(vec![2.0, 3.0], 2, 1);
        let b = Mat::from_vec(vec![1.0, 10.0], 2, 1);
        assert_eq!(khatri_rao(&a, &b).unwrap().data(), [2.0, 20.0, 3.0, 30.0]);
        assert_eq!(outer(&[a.data(), b.data()]).unwrap().data(), [2.0, 20.0, 3.0, 30.0]);
    }

    #[test]
    fn sizes_that_do_not_fit_are_errors() {
        assert!(matches!(khatri_rao(&mat(2, 2, 1), &mat(2, 3, 1)), Err(Error::Shape { .. })));
        assert!(matches!(hadamard(&mat(2, 2, 1), &mat(2, 3, 1)), Err(Error::Shape { .. })));
        assert_eq!(kronecker(&mat(0, 2, 1), &mat(3, 0, 1)).data().len(), 0);
        assert!(outer::<f64>(&[]).is_err());
    }
}
