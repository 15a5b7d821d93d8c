//! QR factorisations: thin by blocked Householder reflections, and with column pivoting.
//!
//! Column pivoting follows Businger and Golub (1965), with norms downdated and recomputed after
//! cancellation as in Drmač and Bujanović (2008).

use super::dense::{axpy, dot};
use super::{Result, U, to_scaled};
use crate::{Mat, MatRef, Real};
use faer::Par;
use faer::dyn_stack::{MemBuffer, MemStack};

/// $A = QR$ with $k = \min(m, n)$.
#[derive(Clone, Debug)]
pub struct ThinQr {
    /// Orthonormal columns, $m \times k$.
    pub q: Mat<f64>,
    /// Upper triangular (trapezoidal if $m < n$), $k \times n$, diagonal not negative.
    pub r: Mat<f64>,
}

/// Computes the thin QR factorisation with a non-negative diagonal of `R`, unique at full rank.
///
/// Cost $2mn^2 - \frac23 n^3$ for $m \ge n$.
pub fn thin_qr<T: Real>(a: MatRef<'_, T>) -> Result<ThinQr> {
    use faer::linalg::householder as apply;
    use faer::linalg::qr::no_pivoting::factor;
    let (a, scale) = to_scaled(a, "the matrix to factor")?;
    let (m, n) = (a.rows(), a.cols());
    let k = m.min(n);
    if k == 0 {
        return Ok(ThinQr { q: Mat::zeros(m, 0), r: Mat::zeros(0, n) });
    }
    let mut factors = faer::Mat::from_fn(m, n, |i, j| a[(i, j)]);
    let block = factor::recommended_block_size::<f64>(m, n);
    let mut coeff = faer::Mat::<f64>::zeros(block, k);
    let mut memory =
        MemBuffer::new(factor::qr_in_place_scratch::<f64>(m, n, block, Par::Seq, Default::default()));
    factor::qr_in_place(
        factors.as_mut(),
        coeff.as_mut(),
        Par::Seq,
        MemStack::new(&mut memory),
        Default::default(),
    );
    let mut q = faer::Mat::<f64>::identity(m, k);
    let mut memory = MemBuffer::new(apply::apply_block_householder_sequence_on_the_left_in_place_scratch::<
        f64,
    >(m, block, k));
    apply::apply_block_householder_sequence_on_the_left_in_place_with_conj(
        factors.get(.., ..k),
        coeff.as_ref(),
        faer::Conj::No,
        q.as_mut(),
        Par::Seq,
        MemStack::new(&mut memory),
    );
    let sign: Vec<f64> = (0..k).map(|i| if factors[(i, i)] < 0.0 { -1.0 } else { 1.0 }).collect();
    Ok(ThinQr {
        q: Mat::from_fn(m, k, |i, j| sign[j] * q[(i, j)]),
        r: Mat::from_fn(k, n, |i, j| if j < i { 0.0 } else { sign[i] * scale * factors[(i, j)] }),
    })
}

/// $A_{:,\mathrm{perm}} = QR$, cut at `rank` columns.
#[derive(Clone, Debug)]
pub struct PivotedQr {
    /// Orthonormal columns, $m \times \mathrm{rank}$.
    pub q: Mat<f64>,
    /// Upper trapezoidal, $\mathrm{rank} \times n$, columns in pivoted order, diagonal positive and
    /// not increasing.
    pub r: Mat<f64>,
    /// Column `perm[j]` of `A` became column `j`.
    pub perm: Vec<usize>,
    /// Number of steps made: the numerical rank for the given tolerance.
    pub rank: usize,
}

/// Computes column-pivoted QR, stopping at `max_rank` columns or when $|R_{kk}| \le \mathrm{tol}\,|R_{00}|$.
///
/// With `tol = 0` only exactly vanishing remainders stop it.
pub fn pivoted_qr<T: Real>(a: MatRef<'_, T>, tol: f64, max_rank: usize) -> Result<PivotedQr> {
    let (a, scale) = to_scaled(a, "the matrix to factor")?;
    let Reflections { columns, diag, tau, perm } = reflect(&a, Some(tol), max_rank);
    let (m, n, rank) = (a.rows(), a.cols(), diag.len());
    let mut q = form_q(&columns, &tau, m, rank);
    let mut r = Mat::zeros(rank, n);
    for (i, &d) in diag.iter().enumerate() {
        let sign = if d < 0.0 { -1.0 } else { 1.0 };
        r[(i, i)] = d.abs() * scale;
        for j in i + 1..n {
            r[(i, j)] = sign * scale * columns[(j, i)];
        }
        if sign < 0.0 {
            (0..m).for_each(|l| q[(l, i)] = -q[(l, i)]);
        }
    }
    Ok(PivotedQr { q, r, perm, rank })
}

/// Returns `extra` orthonormal columns orthogonal to the columns of `q`, which must be orthonormal.
pub(crate) fn orthonormal_complement(q: &Mat<f64>, extra: usize) -> Mat<f64> {
    let Reflections { columns, tau, .. } = reflect(q, None, usize::MAX);
    let full = form_q(&columns, &tau, q.rows(), q.cols() + extra);
    Mat::from_fn(q.rows(), extra, |i, j| full[(i, q.cols() + j)])
}

/// Householder reflections, applied column by column.
struct Reflections {
    /// Row `j` is column `j` after the reflections: `R` above the diagonal, the vector $v$ of reflection `j`
    /// from the diagonal on, with $v_j = 1$.
    columns: Mat<f64>,
    diag: Vec<f64>,
    tau: Vec<f64>,
    perm: Vec<usize>,
}

/// Runs Householder reflections, with pivoting and a stopping rule if `pivot_tol` is given.
fn reflect(a: &Mat<f64>, pivot_tol: Option<f64>, max_rank: usize) -> Reflections {
    let (m, n) = (a.rows(), a.cols());
    let mut columns = a.transpose();
    let mut perm: Vec<usize> = (0..n).collect();
    let mut norms = Norms::new(&columns);
    let (mut diag, mut tau) = (Vec::<f64>::new(), Vec::new());
    for k in 0..m.min(n).min(max_rank) {
        if let Some(tol) = pivot_tol {
            let (pivot, norm) = norms.largest(&columns, k);
            if norm == 0.0 || diag.first().is_some_and(|first| norm <= tol * first.abs()) {
                break;
            }
            if pivot != k {
                perm.swap(k, pivot);
                norms.swap(k, pivot);
                let (head, tail) = columns.data_mut().split_at_mut(pivot * m);
                head[k * m..(k + 1) * m].swap_with_slice(&mut tail[..m]);
            }
        }
        let (head, tail) = columns.data_mut().split_at_mut((k + 1) * m);
        let v = &mut head[k * m + k..];
        let norm = dot(v, v).sqrt();
        if norm == 0.0 {
            v[0] = 1.0;
            diag.push(0.0);
            tau.push(0.0);
            continue;
        }
        let alpha = v[0];
        let beta = if alpha < 0.0 { norm } else { -norm };
        let t = (beta - alpha) / beta;
        v[1..].iter_mut().for_each(|x| *x /= alpha - beta);
        v[0] = 1.0;
        for column in tail.chunks_exact_mut(m) {
            let c = dot(v, &column[k..]);
            axpy(-t * c, v, &mut column[k..]);
        }
        diag.push(beta);
        tau.push(t);
        if pivot_tol.is_some() {
            norms.downdate(&columns, k);
        }
    }
    Reflections { columns, diag, tau, perm }
}

/// Forms columns `0..cols` of the product of all reflections.
fn form_q(columns: &Mat<f64>, tau: &[f64], m: usize, cols: usize) -> Mat<f64> {
    let mut qt = Mat::from_fn(cols, m, |i, j| if i == j { 1.0 } else { 0.0 });
    for (k, &t) in tau.iter().enumerate().rev() {
        let v = &columns.row(k)[k..];
        for j in k..cols {
            let column = &mut qt.row_mut(j)[k..];
            let c = dot(v, column);
            axpy(-t * c, v, column);
        }
    }
    qt.transpose()
}

/// Norms of the remaining parts of all columns.
struct Norms {
    now: Vec<f64>,
    /// Norm when it was last computed from the entries.
    exact: Vec<f64>,
}

impl Norms {
    fn new(columns: &Mat<f64>) -> Self {
        let now: Vec<f64> = (0..columns.rows()).map(|j| dot(columns.row(j), columns.row(j)).sqrt()).collect();
        Self { exact: now.clone(), now }
    }

    /// Returns the column of largest norm from `k` on. Downdated norms are good to half the digits, so those near the
    /// largest are recomputed; otherwise the diagonal of `R` could rise by that much.
    fn largest(&mut self, columns: &Mat<f64>, k: usize) -> (usize, f64) {
        let top = self.now[k..].iter().fold(0.0f64, |a, &b| a.max(b));
        let mut best = (k, -1.0);
        for j in k..self.now.len() {
            if self.now[j] >= top * (1.0 - 1e-6) {
                self.recompute(columns, j, k);
                if self.now[j] > best.1 {
                    best = (j, self.now[j]);
                }
            }
        }
        (best.0, best.1.max(0.0))
    }

    fn recompute(&mut self, columns: &Mat<f64>, j: usize, k: usize) {
        let rest = &columns.row(j)[k..];
        self.now[j] = dot(rest, rest).sqrt();
        self.exact[j] = self.now[j];
    }

    fn swap(&mut self, i: usize, j: usize) {
        self.now.swap(i, j);
        self.exact.swap(i, j);
    }

    /// Removes row `k` from the norms of the columns after `k`.
    fn downdate(&mut self, columns: &Mat<f64>, k: usize) {
        for j in k + 1..self.now.len() {
            if self.now[j] == 0.0 {
                continue;
            }
            let ratio = columns[(j, k)] / self.now[j];
            let left = (1.0 - ratio * ratio).max(0.0);
            let since = self.now[j] / self.exact[j];
            if left * since * since <= U.sqrt() {
                self.recompute(columns, j, k + 1);
            } else {
                self.now[j] *= left.sqrt();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linalg::testing::*;
    use crate::linalg::{LinalgError, matmul};

    const SHAPES: [(usize, usize); 9] =
        [(1, 1), (5, 1), (1, 4), (7, 7), (33, 8), (8, 33), (100, 41), (257, 64), (70, 70)];

    #[test]
    fn thin_qr_reproduces_the_matrix_with_orthonormal_columns() {
        for (m, n) in SHAPES {
            let a = gaussian(m, n, 3);
            let ThinQr { q, r } = thin_qr(a.as_ref()).unwrap();
            let bound = 10.0 * n as f64 * U;
            assert!(distance(&matmul(q.as_ref(), r.as_ref()), &a) <= bound * a.frobenius(), "{m} × {n}");
            assert!(departure_from_orthonormal(&q) <= 10.0 * m.min(n) as f64 * U, "{m} × {n}");
            for i in 0..r.rows() {
                assert!(r[(i, i)] >= 0.0 && (0..i.min(n)).all(|j| r[(i, j)] == 0.0));
            }
        }
    }

    #[test]
    fn pivoted_qr_reproduces_the_permuted_matrix() {
        for (m, n) in SHAPES {
            let a = gaussian(m, n, 11);
            let f = pivoted_qr(a.as_ref(), 0.0, usize::MAX).unwrap();
            assert_eq!(f.rank, m.min(n));
            let permuted = Mat::from_fn(m, n, |i, j| a[(i, f.perm[j])]);
            let error = distance(&matmul(f.q.as_ref(), f.r.as_ref()), &permuted);
            assert!(error <= 10.0 * n as f64 * U * a.frobenius(), "{m} × {n}: {error}");
            assert!(departure_from_orthonormal(&f.q) <= 10.0 * m.min(n) as f64 * U);
        }
    }

    fn assert_diagonal_falls(f: &PivotedQr) {
        for k in 1..f.rank {
            let (before, here) = (f.r[(k - 1, k - 1)], f.r[(k, k)]);
            assert!(here <= before * (1.0 + 10.0 * U), "step {k}: {before} then {here}");
        }
    }

    #[test]
    fn the_pivoted_diagonal_does_not_increase() {
        for seed in 0..20 {
            assert_diagonal_falls(&pivoted_qr(gaussian(60, 40, seed).as_ref(), 0.0, usize::MAX).unwrap());
        }
        // Orthogonal columns of equal norm: all norms tie at every step.
        let q = thin_qr(gaussian(50, 50, 1).as_ref()).unwrap().q;
        assert_diagonal_falls(&pivoted_qr(q.as_ref(), 0.0, usize::MAX).unwrap());
        // Kahan's matrix, on which careless downdating is known to misbehave.
        let (c, s) = (0.285f64, (1.0 - 0.285f64 * 0.285).sqrt());
        let kahan = Mat::from_fn(60, 60, |i, j| {
            s.powi(i as i32)
                * if i == j {
                    1.0
                } else if j > i {
                    -c
                } else {
                    0.0
                }
        });
        assert_diagonal_falls(&pivoted_qr(kahan.as_ref(), 0.0, usize::MAX).unwrap());
    }

    #[test]
    fn the_rank_of_an_integer_product_is_found() {
        for rank in 1..8 {
            let integers = |seed, rows, cols| {
                let g = gaussian(rows, cols, seed);
                Mat::from_fn(rows, cols, |i, j| (3.0 * g[(i, j)]).round())
            };
            let a = matmul(integers(1, 30, rank).as_ref(), integers(2, rank, 20).as_ref());
            let f = pivoted_qr(a.as_ref(), 1e-12, usize::MAX).unwrap();
            assert_eq!(f.rank, rank);
            let permuted = Mat::from_fn(30, 20, |i, j| a[(i, f.perm[j])]);
            assert!(distance(&matmul(f.q.as_ref(), f.r.as_ref()), &permuted) <= 1e-12 * a.frobenius());
        }
    }

    #[test]
    fn the_complement_is_orthonormal_and_orthogonal() {
        let q = thin_qr(gaussian(20, 6, 2).as_ref()).unwrap().q;
        let c = orthonormal_complement(&q, 9);
        let both = Mat::from_fn(20, 15, |i, j| if j < 6 { q[(i, j)] } else { c[(i, j - 6)] });
        assert!(departure_from_orthonormal(&both) < 1e-13);
    }

    #[test]
    fn degenerate_matrices_are_factored() {
        for a in [Mat::zeros(0, 0), Mat::zeros(0, 3), Mat::zeros(4, 0), Mat::zeros(5, 3)] {
            let f = thin_qr::<f64>(a.as_ref()).unwrap();
            assert_eq!((f.q.rows(), f.q.cols(), f.r.cols()), (a.rows(), a.rows().min(a.cols()), a.cols()));
            assert!(f.q.data().iter().chain(f.r.data()).all(|x| x.is_finite()));
            assert_eq!(pivoted_qr::<f64>(a.as_ref(), 0.0, 9).unwrap().rank, 0);
        }
        let equal = Mat::from_fn(6, 4, |_, j| j as f64 - 1.5);
        assert_eq!(pivoted_qr(equal.as_ref(), 1e-13, 9).unwrap().rank, 1);
        let f = thin_qr(equal.as_ref()).unwrap();
        assert!(distance(&matmul(f.q.as_ref(), f.r.as_ref()), &equal) < 1e-14 * 20.0);
    }

    #[test]
    fn extreme_scales_and_nan_are_handled() {
        for s in [1e300, 1e-300, 5e-324 * 1e10] {
            let a = Mat::from_fn(6, 4, |i, j| s * (1.0 + (i * 7 + j * j * 3) as f64 % 5.0));
            let f = thin_qr(a.as_ref()).unwrap();
            assert!(departure_from_orthonormal(&f.q) < 1e-14 * 10.0, "{s}");
            assert!(f.r[(0, 0)] > s && f.r.data().iter().all(|x| x.is_finite()));
            let p = pivoted_qr(a.as_ref(), 1e-12, 9).unwrap();
            assert!(p.rank >= 2 && p.r.data().iter().all(|x| x.is_finite()));
        }
        let want = LinalgError::NotFinite { what: "the matrix to factor" };
        assert_eq!(thin_qr(spoiled(5).as_ref()).unwrap_err(), want);
        assert_eq!(pivoted_qr(spoiled(5).as_ref(), 0.0, 5).unwrap_err(), want);
    }

    #[test]
    fn single_precision_input_is_factored_in_double() {
        let a = gaussian(20, 6, 3).cast::<f32>();
        let f = thin_qr(a.as_ref()).unwrap();
        assert!(distance(&matmul(f.q.as_ref(), f.r.as_ref()), &a.cast()) < 1e-13);
    }
}
