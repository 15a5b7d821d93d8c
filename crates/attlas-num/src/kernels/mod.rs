//! Hot loops, and the only module of this crate with `unsafe` code.
//!
//! `scalar.rs` is the readable definition of every kernel; one other file per instruction set offers the same
//! functions. The functions here check lengths and dispatch to the best instruction set of the machine, or to the one
//! that the caller names. All run on the calling thread: the caller splits the work, with the loops of [`par`].
//!
//! ```
//! use attlas_num::kernels::{Attend, Band, Isa, Precision};
//! use attlas_num::{Mat, Scratch};
//!
//! // Softmax attention of two queries over three keys; the values are the keys' numbers.
//! let q = Mat::from_vec(vec![1.0f32, 0.0, 0.0, 1.0], 2, 2);
//! let k = Mat::from_vec(vec![9.0, 0.0, 0.0, 9.0, 0.0, 0.0], 3, 2);
//! let v = Mat::from_vec(vec![0.0, 1.0, 2.0], 3, 1);
//! let (mut out, mut lse) = ([0.0; 2], [0.0; 2]);
//! let attend = Attend {
//!     q: q.as_ref(),
//!     k: k.as_ref(),
//!     v: v.as_ref(),
//!     scale: 1.0,
//!     bias: None,
//!     band: Band::ALL,
//!     tile_k: 0,
//!     isa: Isa::best(),
//!     precision: Precision::Full,
//!     decode: false,
//!     softcap: None,
//! };
//! attend.run(&Scratch::new(), &mut out, &mut lse);
//! assert!(out[0] < 0.01 && (out[1] - 1.0).abs() < 0.01);
//! ```

// Register tiles are several arrays indexed by the same row and column; polynomial coefficients only resemble
// constants.
#![allow(clippy::needless_range_loop, clippy::too_many_arguments, clippy::approx_constant)]

#[cfg(target_arch = "aarch64")]
mod aarch64_neon;
mod attend;
mod backward;
mod block;
mod counting;
mod decode;
mod isa;
mod log;
mod packed;
pub mod pages;
pub mod par;
mod product;
pub mod quant;
mod scalar;
mod simd;
mod team;
mod tiled;
mod vector;
#[cfg(target_arch = "x86_64")]
mod x86_avx2;
#[cfg(target_arch = "x86_64")]
mod x86_avx512;

pub use attend::{Attend, AttendChosen, Band, merge_lse};
pub use backward::AttendBackward;
pub use counting::Counting;
pub use isa::{Isa, UnknownIsa, vectorised};
pub use packed::{AttendPacked, PackedRows, RowFormat};

use crate::mat::{MatRef, Real};
use crate::scratch::Scratch;

/// Precision of the products inside [`Attend`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Precision {
    /// The element type's own.
    #[default]
    Full,
    /// Scaled queries, keys, weights and values rounded to bfloat16 (eight significant bits); sums in f32.
    Bf16,
}

/// A matrix operand as it stands, or transposed.
#[derive(Clone, Copy, Debug)]
pub enum Op<M> {
    /// As it stands.
    N(M),
    /// Transposed.
    T(M),
}

impl<'a, T> Op<MatRef<'a, T>> {
    /// Returns the number of rows after the transposition.
    pub fn rows(&self) -> usize {
        match self {
            Self::N(a) => a.rows(),
            Self::T(a) => a.cols(),
        }
    }

    /// Returns the number of columns after the transposition.
    pub fn cols(&self) -> usize {
        match self {
            Self::N(a) => a.cols(),
            Self::T(a) => a.rows(),
        }
    }
}

impl<T: Copy> Op<MatRef<'_, T>> {
    /// Returns the element in row `i`, column `j` after the transposition.
    pub fn at(&self, i: usize, j: usize) -> T {
        match self {
            Self::N(a) => a.at(i, j),
            Self::T(a) => a.at(j, i),
        }
    }
}

mod dispatch {
    #[cfg(target_arch = "aarch64")]
    use super::aarch64_neon;
    use super::{
        AttendBackward, AttendChosen, AttendPacked, Isa, MatRef, Op, Scratch, attend::Job, backward, log,
        scalar,
    };
    #[cfg(target_arch = "x86_64")]
    use super::{x86_avx2, x86_avx512};

    /// Dispatch table with one entry per kernel: generic code finds the functions of its element type here.
    pub trait Kernels: Sized {
        fn attend_on(job: &Job<'_, Self>, scratch: &Scratch, out: &mut [Self], lse: &mut [Self]);
        fn attend_chosen_on(
            job: &AttendChosen<'_, Self>,
            scratch: &Scratch,
            out: &mut [Self],
            lse: &mut [Self],
        );
        fn attend_backward_on(
            job: &AttendBackward<'_, Self>,
            scratch: &Scratch,
            dq: &mut [Self],
            dk: &mut [Self],
            dv: &mut [Self],
        );
        #[allow(clippy::too_many_arguments)]
        fn gemm_on(
            isa: Isa,
            alpha: Self,
            a: Op<MatRef<'_, Self>>,
            b: Op<MatRef<'_, Self>>,
            beta: Self,
            c: &mut [Self],
            c_stride: usize,
            scratch: &Scratch,
        );
        fn panel_on(isa: Isa) -> usize;
        fn pack_on(isa: Isa, b: Op<MatRef<'_, Self>>, dst: &mut [Self]);
        #[allow(clippy::too_many_arguments)]
        fn gemm_packed_on(
            isa: Isa,
            alpha: Self,
            a: Op<MatRef<'_, Self>>,
            right: &[Self],
            n: usize,
            c: &mut [Self],
            c_stride: usize,
            scratch: &Scratch,
        );
        fn dot_on(isa: Isa, a: &[Self], b: &[Self]) -> Self;
        fn sq_dist_on(isa: Isa, a: &[Self], b: &[Self]) -> Self;
        fn axpy_on(isa: Isa, a: Self, x: &[Self], y: &mut [Self]);
        fn scale_on(isa: Isa, a: Self, x: &mut [Self]);
        fn sum_on(isa: Isa, x: &[Self]) -> Self;
        fn max_on(isa: Isa, x: &[Self]) -> Self;
        fn exp_in_place_on(isa: Isa, x: &mut [Self]);
        fn exp_sum_on(isa: Isa, x: &mut [Self], shift: Self) -> Self;
        fn ln_in_place_on(isa: Isa, x: &mut [Self]);
        fn matvec_on(isa: Isa, a: MatRef<'_, Self>, x: &[Self], out: &mut [Self]);
        fn matvec_each_on(isa: Isa, a: MatRef<'_, Self>, x: MatRef<'_, Self>, out: &mut [Self]);
        fn fma_burn_on(isa: Isa, iterations: u64) -> (u64, Self);
    }

    /// Dispatches a call to the instruction set that it names, or to the scalar definition if the machine lacks it.
    macro_rules! choose {
        ($isa:expr, $module:ident, $f:ident($($arg:expr),*), $fallback:expr) => {
            match $isa {
                // SAFETY: the machine was found to have the instruction set.
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 if Isa::Avx512.is_available() => unsafe { x86_avx512::$module::$f($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 if Isa::Avx2.is_available() => unsafe { x86_avx2::$module::$f($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "aarch64")]
                Isa::Neon => unsafe { aarch64_neon::$module::$f($($arg),*) },
                _ => $fallback,
            }
        };
    }

    /// Attention over packed rows.
    pub(super) fn attend_packed_on(
        job: &AttendPacked<'_>,
        scratch: &Scratch,
        out: &mut [f32],
        lse: &mut [f32],
    ) {
        choose!(job.isa, packed, attend_packed(job, scratch, out, lse), job.run_scalar(scratch, out, lse))
    }

    macro_rules! kernels {
        ($t:ty, $module:ident) => {
            impl Kernels for $t {
                fn attend_on(job: &Job<'_, Self>, scratch: &Scratch, out: &mut [Self], lse: &mut [Self]) {
                    choose!(
                        job.isa,
                        $module,
                        attend(job, scratch, out, lse),
                        scalar::attend(job, scratch, out, lse)
                    )
                }
                fn attend_chosen_on(
                    job: &AttendChosen<'_, Self>,
                    scratch: &Scratch,
                    out: &mut [Self],
                    lse: &mut [Self],
                ) {
                    choose!(
                        job.isa,
                        $module,
                        attend_chosen(job, scratch, out, lse),
                        scalar::attend_chosen(job, scratch, out, lse)
                    )
                }
                fn attend_backward_on(
                    job: &AttendBackward<'_, Self>,
                    scratch: &Scratch,
                    dq: &mut [Self],
                    dk: &mut [Self],
                    dv: &mut [Self],
                ) {
                    choose!(
                        job.isa,
                        $module,
                        attend_backward(job, scratch, dq, dk, dv),
                        backward::scalar(job, dq, dk, dv)
                    )
                }
                fn gemm_on(
                    isa: Isa,
                    alpha: Self,
                    a: Op<MatRef<'_, Self>>,
                    b: Op<MatRef<'_, Self>>,
                    beta: Self,
                    c: &mut [Self],
                    c_stride: usize,
                    scratch: &Scratch,
                ) {
                    choose!(
                        isa,
                        $module,
                        gemm(alpha, a, b, beta, c, c_stride, scratch),
                        scalar::gemm(alpha, a, b, beta, c, c_stride)
                    )
                }
                fn panel_on(isa: Isa) -> usize {
                    choose!(isa, $module, panel(), 1)
                }
                fn pack_on(isa: Isa, b: Op<MatRef<'_, Self>>, dst: &mut [Self]) {
                    choose!(isa, $module, pack(b, dst), scalar::pack(b, dst))
                }
                fn gemm_packed_on(
                    isa: Isa,
                    alpha: Self,
                    a: Op<MatRef<'_, Self>>,
                    right: &[Self],
                    n: usize,
                    c: &mut [Self],
                    c_stride: usize,
                    scratch: &Scratch,
                ) {
                    // Scalar panels have one column each, so they are the rows of the transposed operand.
                    let rows = MatRef::new(&right[..n * a.cols()], n, a.cols());
                    choose!(
                        isa,
                        $module,
                        gemm_packed(alpha, a, right, n, c, c_stride, scratch),
                        scalar::gemm(alpha, a, Op::T(rows), 0.0, c, c_stride)
                    )
                }
                fn dot_on(isa: Isa, a: &[Self], b: &[Self]) -> Self {
                    choose!(isa, $module, dot(a, b), scalar::dot(a, b))
                }
                fn sq_dist_on(isa: Isa, a: &[Self], b: &[Self]) -> Self {
                    choose!(isa, $module, sq_dist(a, b), scalar::sq_dist(a, b))
                }
                fn axpy_on(isa: Isa, a: Self, x: &[Self], y: &mut [Self]) {
                    choose!(isa, $module, axpy(a, x, y), scalar::axpy(a, x, y))
                }
                fn scale_on(isa: Isa, a: Self, x: &mut [Self]) {
                    choose!(isa, $module, scale(a, x), scalar::scale(a, x))
                }
                fn sum_on(isa: Isa, x: &[Self]) -> Self {
                    choose!(isa, $module, sum(x), scalar::sum(x))
                }
                fn max_on(isa: Isa, x: &[Self]) -> Self {
                    choose!(isa, $module, max(x), scalar::max(x))
                }
                fn exp_in_place_on(isa: Isa, x: &mut [Self]) {
                    choose!(isa, $module, exp_in_place(x), scalar::exp_in_place(x))
                }
                fn exp_sum_on(isa: Isa, x: &mut [Self], shift: Self) -> Self {
                    choose!(isa, $module, exp_sum(x, shift), scalar::exp_sum(x, shift))
                }
                fn ln_in_place_on(isa: Isa, x: &mut [Self]) {
                    log::$module(isa, x);
                }
                fn matvec_on(isa: Isa, a: MatRef<'_, Self>, x: &[Self], out: &mut [Self]) {
                    choose!(isa, $module, matvec(a, x, out), scalar::matvec(a, x, out))
                }
                fn matvec_each_on(isa: Isa, a: MatRef<'_, Self>, x: MatRef<'_, Self>, out: &mut [Self]) {
                    choose!(isa, $module, matvec_each(a, x, out), scalar::matvec_each(a, x, out))
                }
                fn fma_burn_on(isa: Isa, iterations: u64) -> (u64, Self) {
                    choose!(isa, $module, fma_burn(iterations), scalar::fma_burn(iterations))
                }
            }
        };
    }
    kernels!(f32, single);
    kernels!(f64, double);
}

/// Operations of an element type that kernels need; implemented for `f32` and `f64` only.
pub trait Element: dispatch::Kernels {}
impl Element for f32 {}
impl Element for f64 {}

/// Computes $C = \alpha\, \mathrm{op}(A)\, \mathrm{op}(B) + \beta\, C$, with rows of `c` starting `c_stride` elements
/// apart. With `beta = 0` the old contents of `c` are not read.
///
/// # Panics
///
/// If the shapes do not fit, `c` is too short, or its rows overlap.
#[allow(clippy::too_many_arguments)]
pub fn gemm<T: Real>(
    isa: Isa,
    alpha: T,
    a: Op<MatRef<'_, T>>,
    b: Op<MatRef<'_, T>>,
    beta: T,
    c: &mut [T],
    c_stride: usize,
    scratch: &Scratch,
) {
    let (m, n) = (a.rows(), b.cols());
    assert_eq!(a.cols(), b.rows(), "inner dimensions differ");
    if m == 0 || n == 0 {
        return;
    }
    assert!(m == 1 || c_stride >= n, "rows of the result overlap");
    let needed = (m - 1).checked_mul(c_stride).and_then(|last_row| last_row.checked_add(n));
    assert!(needed.is_some_and(|needed| needed <= c.len()), "the result does not fit");
    T::gemm_on(isa, alpha, a, b, beta, c, c_stride, scratch);
}

/// Returns the packed length of a right operand of `depth` rows and `n` columns for [`gemm_packed`].
pub fn packed_len<T: Real>(isa: Isa, depth: usize, n: usize) -> usize {
    n.next_multiple_of(T::panel_on(isa)) * depth
}

/// Packs a right operand once for many products.
///
/// Panels are packed independently, so any run of whole panels is the packed form of its columns. A run that begins at
/// a multiple of 64 columns begins at a panel.
///
/// # Panics
///
/// If `dst` does not have the length that [`packed_len`] returns.
pub fn pack_right<T: Real>(isa: Isa, b: Op<MatRef<'_, T>>, dst: &mut [T]) {
    assert_eq!(dst.len(), packed_len::<T>(isa, b.rows(), b.cols()), "room for the packed operand");
    T::pack_on(isa, b, dst);
}

/// Computes $C = \alpha\, \mathrm{op}(A)\, B$ for the first `n` columns of a right operand that [`pack_right`] packed
/// for the same instruction set; up to an inner dimension of 256, the bits are those of [`gemm`].
///
/// # Panics
///
/// If the packed operand has fewer columns, or the result does not fit.
#[allow(clippy::too_many_arguments)]
pub fn gemm_packed<T: Real>(
    isa: Isa,
    alpha: T,
    a: Op<MatRef<'_, T>>,
    right: &[T],
    n: usize,
    c: &mut [T],
    c_stride: usize,
    scratch: &Scratch,
) {
    let (m, depth) = (a.rows(), a.cols());
    if m == 0 || n == 0 {
        return;
    }
    assert!(right.len() >= packed_len::<T>(isa, depth, n), "fewer columns are packed");
    assert!(m == 1 || c_stride >= n, "rows of the result overlap");
    let needed = (m - 1).checked_mul(c_stride).and_then(|last_row| last_row.checked_add(n));
    assert!(needed.is_some_and(|needed| needed <= c.len()), "the result does not fit");
    if depth == 0 {
        (0..m).for_each(|i| c[i * c_stride..i * c_stride + n].fill(T::ZERO));
        return;
    }
    T::gemm_packed_on(isa, alpha, a, right, n, c, c_stride, scratch);
}

/// Returns $\sum_i a_i b_i$. Panics if the lengths differ.
pub fn dot<T: Real>(a: &[T], b: &[T]) -> T {
    assert_eq!(a.len(), b.len(), "vectors of different length");
    T::dot_on(Isa::best(), a, b)
}

/// Returns $\sum_i (a_i - b_i)^2$. Panics if the lengths differ.
pub fn sq_dist<T: Real>(a: &[T], b: &[T]) -> T {
    assert_eq!(a.len(), b.len(), "vectors of different length");
    T::sq_dist_on(Isa::best(), a, b)
}

/// Computes $y \leftarrow a x + y$. Panics if the lengths differ.
pub fn axpy<T: Real>(a: T, x: &[T], y: &mut [T]) {
    assert_eq!(x.len(), y.len(), "vectors of different length");
    T::axpy_on(Isa::best(), a, x, y);
}

/// Computes $x \leftarrow a x$.
pub fn scale<T: Real>(a: T, x: &mut [T]) {
    T::scale_on(Isa::best(), a, x);
}

/// Returns the sum of the elements.
pub fn sum<T: Real>(x: &[T]) -> T {
    T::sum_on(Isa::best(), x)
}

/// Returns the greatest element, ignoring NaN; −∞ if there is none.
pub fn max<T: Real>(x: &[T]) -> T {
    T::max_on(Isa::best(), x)
}

/// Computes $x_i \leftarrow e^{x_i}$, within two units in the last place; exactly 0 where the result would be subnormal
/// or less.
pub fn exp_in_place<T: Real>(x: &mut [T]) {
    T::exp_in_place_on(Isa::best(), x);
}

/// Computes $x_i \leftarrow e^{x_i - \text{shift}}$ and returns the sum.
pub fn exp_sum<T: Real>(x: &mut [T], shift: T) -> T {
    T::exp_sum_on(Isa::best(), x, shift)
}

/// Computes $x_i \leftarrow \ln x_i$, within two units in the last place: −∞ for 0, NaN for negative numbers.
pub fn ln_in_place<T: Real>(x: &mut [T]) {
    T::ln_in_place_on(Isa::best(), x);
}

/// Computes $x_i \leftarrow e^{x_i} / \sum_j e^{x_j}$ and returns $\ln \sum_j e^{x_j}$. Entries of −∞ become 0; if all
/// are −∞, or there are none, the weights are 0 and the result is −∞. A NaN makes all of them NaN.
pub fn softmax_in_place<T: Real>(x: &mut [T]) -> T {
    let isa = Isa::best();
    let m = T::max_on(isa, x);
    if m == T::NEG_INFINITY {
        let lse = x.iter().fold(T::NEG_INFINITY, |l, &x| if x.is_nan() { x } else { l });
        x.fill(if lse.is_nan() { lse } else { T::ZERO });
        return lse;
    }
    let total = T::exp_sum_on(isa, x, m);
    T::scale_on(isa, T::ONE / total, x);
    m + total.ln()
}

/// Computes `out[i] = dot(rows[i], x)`, reading the matrix once. Panics if the shapes do not fit.
pub fn matvec<T: Real>(rows: MatRef<'_, T>, x: &[T], out: &mut [T]) {
    assert_eq!(rows.cols(), x.len(), "matrix and vector do not fit");
    assert_eq!(rows.rows(), out.len(), "one result per row");
    T::matvec_on(Isa::best(), rows, x, out);
}

/// Computes [`matvec`] for each row of `x`, bit for bit, one list of results after another, and reads the matrix once
/// for four of them. Panics if the shapes do not fit.
pub fn matvec_each<T: Real>(rows: MatRef<'_, T>, x: MatRef<'_, T>, out: &mut [T]) {
    assert_eq!(rows.cols(), x.cols(), "matrix and vectors do not fit");
    assert_eq!(rows.rows() * x.rows(), out.len(), "one result per row and vector");
    T::matvec_each_on(Isa::best(), rows, x, out);
}

/// Prefetch distance, in rows, for gathers of rows of a few hundred bytes in random order: long enough to cover one
/// memory latency.
pub const ROWS_AHEAD: usize = 12;

/// Prefetches the memory behind `x`, for rows visited in an order that no hardware prefetcher predicts. Affects time
/// only; does nothing on machines other than x86-64.
pub fn prefetch<T: Real>(x: &[T]) {
    #[cfg(target_arch = "x86_64")]
    for line in x.chunks(64 / size_of::<T>()) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: prefetching needs no more than the baseline instruction set and never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = x;
}

/// Runs fused multiply-adds on registers only, with enough independent chains to fill the pipes.
///
/// Returns the number of floating-point operations and a value that depends on all of them. Timed by the caller, it
/// shows the machine's peak.
pub fn fma_burn<T: Real>(isa: Isa, iterations: u64) -> (u64, T) {
    T::fma_burn_on(isa, iterations)
}

/// Sums a long array, reading memory as fast as one thread can: the yardstick for bandwidth.
pub fn read_sum(x: &[f32]) -> f32 {
    sum(x)
}

/// Copies `src` to `dst`, the yardstick for copy bandwidth. Panics if the lengths differ.
pub fn copy(src: &[f32], dst: &mut [f32]) {
    dst.copy_from_slice(src);
}

#[cfg(test)]
mod tests;
