//! Dense matrix work that the decompositions need: a guarded normal-equation solve, and leading left singular vectors.
//!
//! Large sums are cut into a number of parts that depends only on sizes, and added in their order, so results do not
//! depend on threads. Eigenvalues and singular values come from faer; where its iteration does not converge, the Jacobi
//! rotations of `linalg` take over.

use super::Tensor;
use crate::Mat;
use crate::linalg::{matmul, matmul_nt, svd};
use crate::par::*;
use faer::linalg::matmul::triangular::{self, BlockStructure};
use faer::linalg::solvers::Solve;
use faer::{Accum, MatMut, MatRef, Par, Side};

fn view(a: &Mat<f64>) -> MatRef<'_, f64> {
    MatRef::from_row_major_slice(a.data(), a.rows(), a.cols())
}

fn owned(a: MatRef<'_, f64>) -> Mat<f64> {
    Mat::from_fn(a.nrows(), a.ncols(), |i, j| a[(i, j)])
}

/// Solves `a (Γ + μI) = y` for `a`, row by row, with Γ symmetric positive semidefinite up to rounding.
///
/// `μ = (ridge + c) · tr Γ / R`. Uses Cholesky; if it breaks down, `c` grows a hundredfold, five times at most, and
/// after that the solution comes from the eigenvectors of Γ with eigenvalues above `R ε λ_max`.
pub(super) fn solve_gram(gamma: &Mat<f64>, y: &Mat<f64>, ridge: f64, c: f64) -> Mat<f64> {
    let r = gamma.rows();
    assert!(gamma.cols() == r && y.cols() == r, "normal equations must be square");
    let scale = (0..r).map(|i| gamma[(i, i)]).sum::<f64>() / r.max(1) as f64;
    if scale == 0.0 || y.rows() == 0 {
        return Mat::zeros(y.rows(), r);
    }
    let mut c = c;
    for _ in 0..=5 {
        let mut shifted = gamma.clone();
        (0..r).for_each(|i| shifted[(i, i)] += (ridge + c) * scale);
        if let Ok(llt) = view(&shifted).llt(Side::Lower) {
            let solved = owned(llt.solve(view(y).transpose()).transpose());
            if solved.data().iter().all(|x| x.is_finite()) {
                return solved;
            }
        }
        c *= 100.0;
    }
    let (values, vectors) = eigh(gamma);
    let floor = r as f64 * f64::EPSILON * values.first().copied().unwrap_or(0.0);
    let mut in_basis = matmul(y.as_ref(), vectors.as_ref());
    for i in 0..in_basis.rows() {
        for (x, &v) in in_basis.row_mut(i).iter_mut().zip(&values) {
            *x = if v > floor { *x / (v + ridge * scale) } else { 0.0 };
        }
    }
    matmul_nt(in_basis.as_ref(), vectors.as_ref())
}

/// Computes eigenvalues, largest first, and eigenvectors (columns) of a symmetric positive semidefinite matrix.
pub(super) fn eigh(a: &Mat<f64>) -> (Vec<f64>, Mat<f64>) {
    let n = a.rows();
    match view(a).self_adjoint_eigen(Side::Lower) {
        Ok(eigen) => {
            let (values, vectors) = (eigen.S(), eigen.U());
            ((0..n).map(|i| values[n - 1 - i]).collect(), Mat::from_fn(n, n, |i, j| vectors[(i, n - 1 - j)]))
        }
        // For a semidefinite matrix singular values and vectors are eigenvalues and eigenvectors.
        Err(_) => left_svd_slowly(a),
    }
}

/// Computes singular values, largest first, and left singular vectors of `a`; all `a.rows()` vectors, with value 0
/// beyond the smaller dimension.
pub(super) fn left_svd(a: &Mat<f64>) -> (Vec<f64>, Mat<f64>) {
    let n = a.rows();
    if a.cols() == 0 {
        return (vec![0.0; n], Mat::identity(n));
    }
    match view(a).svd() {
        Ok(svd) => {
            let s = svd.S();
            let known = n.min(a.cols());
            ((0..n).map(|i| if i < known { s[i] } else { 0.0 }).collect(), owned(svd.U()))
        }
        Err(_) => left_svd_slowly(a),
    }
}

/// Computes the same with [`linalg`](crate::linalg), which has a second algorithm; NaN if that fails too.
fn left_svd_slowly(a: &Mat<f64>) -> (Vec<f64>, Mat<f64>) {
    let n = a.rows();
    // Padding with zero columns makes a thin decomposition return all left vectors.
    let wide = Mat::from_fn(n, n.max(a.cols()), |i, j| if j < a.cols() { a[(i, j)] } else { 0.0 });
    match svd(wide.as_ref()) {
        Ok(found) => (found.sigma, found.u),
        Err(_) => (vec![f64::NAN; n], Mat::identity(n)),
    }
}

/// Computes `a[0] ⊗ a[1] ⊗ …`.
pub(super) fn kron_chain(list: &[Mat<f64>]) -> Mat<f64> {
    list.iter().fold(Mat::identity(1), |acc, m| super::kronecker(&acc, m))
}

/// Returns an orthonormal basis of the columns of `a` (`rows ≥ cols`) and the triangular factor: `a = q r`.
pub(super) fn thin_qr(a: &Mat<f64>) -> (Mat<f64>, Mat<f64>) {
    let qr = view(a).qr();
    (owned(qr.compute_thin_Q().as_ref()), owned(qr.thin_R()))
}

/// Parts of a large Gram matrix; fixed, so that sums do not depend on threads.
const PARTS: usize = 8;
/// Multiply-adds below which one part is faster than several.
const SMALL: usize = 1 << 22;

/// Computes the Gram matrix `T₍ₙ₎ T₍ₙ₎ᵀ` from the buffer, without unfolding.
pub(super) fn mode_gram(t: &Tensor<f64>, mode: usize) -> Mat<f64> {
    let (l, i, s) = t.split(mode);
    if t.data().is_empty() {
        return Mat::zeros(i, i);
    }
    // The unfolding is one matrix, or one matrix per index before the mode, side by side.
    let whole = match (l, s) {
        (_, 1) => Some(MatRef::from_row_major_slice(t.data(), l, i).transpose()),
        (1, _) => Some(MatRef::from_row_major_slice(t.data(), i, s)),
        _ => None,
    };
    let units = if whole.is_some() { l * s } else { l };
    let parts = if i * t.data().len() < SMALL { 1 } else { PARTS.min(units) };
    let sum = |part: usize| {
        let range = part * units / parts..(part + 1) * units / parts;
        let mut gram = Mat::zeros(i, i);
        match whole {
            Some(a) => add_gram(&mut gram, a.subcols(range.start, range.len())),
            None => {
                for slice in t.data()[range.start * i * s..range.end * i * s].chunks_exact(i * s) {
                    add_gram(&mut gram, MatRef::from_row_major_slice(slice, i, s));
                }
            }
        }
        gram
    };
    let sums: Vec<Mat<f64>> = (0..parts).into_par_iter().map(sum).collect();
    let mut sums = sums.into_iter();
    let mut gram = sums.next().unwrap_or_else(|| Mat::zeros(i, i));
    for part in sums {
        gram.data_mut().iter_mut().zip(part.data()).for_each(|(g, p)| *g += p);
    }
    for row in 0..i {
        for col in row + 1..i {
            gram[(row, col)] = gram[(col, row)];
        }
    }
    gram
}

/// Adds the lower half of `a aᵀ`.
fn add_gram(gram: &mut Mat<f64>, a: MatRef<'_, f64>) {
    let n = gram.rows();
    triangular::matmul(
        MatMut::from_row_major_slice_mut(gram.data_mut(), n, n),
        BlockStructure::TriangularLower,
        Accum::Add,
        a,
        BlockStructure::Rectangular,
        a.transpose(),
        BlockStructure::Rectangular,
        1.0,
        Par::Seq,
    );
}

/// Computes singular values (largest first, `I_n` of them) and all left singular vectors of the unfolding of `mode`.
///
/// Uses the Gram matrix, whose small singular values are accurate only to `√ε σ_1`, or, if `precise`, the triangular
/// factor of `T₍ₙ₎ᵀ`.
pub(super) fn mode_svd(t: &Tensor<f64>, mode: usize, precise: bool) -> (Vec<f64>, Mat<f64>) {
    let (_, i, _) = t.split(mode);
    if t.data().is_empty() {
        return (vec![0.0; i], Mat::identity(i));
    }
    let (values, mut vectors) = if precise {
        let unfolded = t.unfold_unchecked(mode);
        if unfolded.cols() > i {
            let r = owned(view(&unfolded).transpose().qr().thin_R());
            left_svd(&r.transpose())
        } else {
            left_svd(&unfolded)
        }
    } else {
        let (values, vectors) = eigh(&mode_gram(t, mode));
        (values.into_iter().map(|v| v.max(0.0).sqrt()).collect(), vectors)
    };
    for j in 0..vectors.cols() {
        if column_sign(&vectors, j) < 0.0 {
            (0..i).for_each(|row| vectors[(row, j)] = -vectors[(row, j)]);
        }
    }
    (values, vectors)
}

/// Returns the sign of the largest entry of column `j`; of the first one if several agree to ten digits, so rounding
/// does not choose.
pub(super) fn column_sign(a: &Mat<f64>, j: usize) -> f64 {
    let largest = (0..a.rows()).map(|i| a[(i, j)].abs()).fold(0.0, f64::max);
    let first = (0..a.rows()).map(|i| a[(i, j)]).find(|x| x.abs() >= largest * (1.0 - 1e-10));
    if first.is_some_and(|x| x < 0.0) { -1.0 } else { 1.0 }
}

/// Returns the first `k` columns.
pub(super) fn leading_columns(a: &Mat<f64>, k: usize) -> Mat<f64> {
    Mat::from_fn(a.rows(), k.min(a.cols()), |i, j| a[(i, j)])
}

#[cfg(test)]
mod tests {
    use super::super::known::fill;
    use super::*;
    use crate::linalg::matmul_tn;

    fn mat(rows: usize, cols: usize, seed: u64) -> Mat<f64> {
        Mat::from_vec(fill(&[rows, cols], seed).unwrap().into_vec(), rows, cols)
    }

    fn worst(a: &Mat<f64>, b: &Mat<f64>) -> f64 {
        assert_eq!((a.rows(), a.cols()), (b.rows(), b.cols()));
        a.data().iter().zip(b.data()).map(|(x, y)| (x - y).abs()).fold(0.0, f64::max)
    }

    #[test]
    fn both_algorithms_find_the_same_singular_values() {
        for (rows, cols) in [(4, 9), (9, 4), (6, 6), (1, 3), (3, 1)] {
            let a = mat(rows, cols, 3);
            let (s, u) = left_svd_slowly(&a);
            let (s_ref, _) = left_svd(&a);
            for (x, y) in s.iter().zip(&s_ref) {
                assert!((x - y).abs() < 100.0 * f64::EPSILON, "{rows}×{cols}: {x} {y}");
            }
            assert!(worst(&matmul_tn(u.as_ref(), u.as_ref()), &Mat::identity(rows)) < 100.0 * f64::EPSILON);
            let gram = matmul_nt(a.as_ref(), a.as_ref());
            let diagonal = matmul_tn(u.as_ref(), matmul(gram.as_ref(), u.as_ref()).as_ref());
            let expected = Mat::from_fn(rows, rows, |i, j| if i == j { s[i] * s[i] } else { 0.0 });
            assert!(worst(&diagonal, &expected) < 200.0 * f64::EPSILON);
        }
    }

    #[test]
    fn both_ways_to_singular_vectors_agree() {
        let t = fill(&[4, 5, 6], 50).unwrap();
        for mode in 0..3 {
            let (s, u) = mode_svd(&t, mode, false);
            let (s2, u2) = mode_svd(&t, mode, true);
            for (x, y) in s.iter().zip(&s2) {
                assert!((x - y).abs() < 1e-13, "{x} {y}");
            }
            // Vectors to ε over the smallest relative gap of these spectra, about a twentieth.
            assert!(worst(&u, &u2) < 1e-12);
        }
    }

    #[test]
    fn large_gram_matrices_are_summed_alike_by_any_number_of_threads() {
        let with = |threads: usize, t: &Tensor<f64>, mode: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| mode_gram(t, mode))
        };
        for shape in [[11, 90, 90], [90, 11, 90], [90, 90, 11], [3, 1, 70]] {
            let t = fill(&shape, 7).unwrap();
            for mode in 0..3 {
                let gram = with(1, &t, mode);
                assert_eq!(gram, with(3, &t, mode), "{shape:?}, mode {mode}");
                let unfolded = t.unfold_unchecked(mode);
                let exact = matmul_nt(unfolded.as_ref(), unfolded.as_ref());
                // Each entry is a sum of products, none larger than the largest diagonal entry, rounded in two orders.
                let size = (0..exact.rows()).map(|i| exact[(i, i)]).fold(0.0, f64::max);
                assert!(worst(&gram, &exact) <= 2.0 * f64::EPSILON * unfolded.cols() as f64 * size);
            }
        }
    }

    #[test]
    fn more_vectors_than_columns_still_form_a_basis() {
        let t = fill(&[6, 2, 1], 4).unwrap();
        for precise in [false, true] {
            let (s, u) = mode_svd(&t, 0, precise);
            assert_eq!((s.len(), u.cols()), (6, 6));
            assert!(worst(&matmul_tn(u.as_ref(), u.as_ref()), &Mat::identity(6)) < 100.0 * f64::EPSILON);
        }
    }

    #[test]
    fn the_guarded_solve_reproduces_the_solution_and_survives_singular_systems() {
        let a = mat(3, 4, 9);
        let b = mat(9, 4, 8);
        let gamma = matmul_tn(b.as_ref(), b.as_ref());
        let y = matmul(a.as_ref(), gamma.as_ref());
        // Bias c · cond(Γ), with cond(Γ) below 100 here.
        assert!(worst(&solve_gram(&gamma, &y, 0.0, 1e-12), &a) < 1e-10);
        let ones = Mat::from_vec(vec![1.0; 4], 2, 2);
        let solved = solve_gram(&ones, &Mat::from_vec(vec![2.0, 2.0], 1, 2), 0.0, 1e-12);
        assert!((solved[(0, 0)] + solved[(0, 1)] - 2.0).abs() < 1e-10);
        let zero = solve_gram(&Mat::zeros(2, 2), &Mat::zeros(3, 2), 0.0, 1e-12);
        assert!(zero.data().iter().all(|&x| x == 0.0));
        // Indefinite beyond what the shifts repair: the eigenvector branch answers.
        let indefinite = Mat::from_vec(vec![1.0, 0.0, 0.0, -0.5], 2, 2);
        let solved = solve_gram(&indefinite, &Mat::from_vec(vec![3.0, 1.0], 1, 2), 0.0, 1e-12);
        assert!((solved[(0, 0)] - 3.0).abs() < 1e-12 && solved[(0, 1)] == 0.0, "{solved:?}");
    }
}
