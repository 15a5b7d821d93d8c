//! The vector operations that the generic kernels are written in.
//!
//! A value of a type that implements [`Simd`] is a token: it exists only where the machine has the instruction set,
//! which makes the arithmetic safe to call. The generic kernels are `inline(always)` down to the operations and are
//! compiled inside the functions that [`variant!`] makes, which carry the `target_feature` attributes.

use super::attend::Job;
use crate::mat::Real;
use crate::scratch::Scratch;

/// Constants of an element type that the exponential needs.
pub(super) trait Exponential: Real {
    /// Coefficients of $r, r^2, …$ in $2^r - 1$ on $[-1/2, 1/2]$: least greatest relative error among
    /// polynomials that are exactly 1 at 0 (Lawson's algorithm), 9.2e-8 for f32, 3.4e-18 for f64.
    const EXP2: &'static [Self];
    /// $\log_2 e$ and its rounding error.
    const LOG2_E: (Self, Self);
    /// Integer at and below which $2^n$ is 0.
    const MIN_EXPONENT: Self;
    /// Integer at and above which $2^n$ is infinite, even after halving.
    const MAX_EXPONENT: Self;
    /// Least finite number.
    const LOWEST: Self;
}

impl Exponential for f32 {
    const EXP2: &'static [f32] = &[0.693_147, 0.240_222_42, 0.055_507_34, 0.009_671_521, 0.001_326_473_7];
    const LOG2_E: (f32, f32) = (std::f32::consts::LOG2_E, 1.925_963_e-8);
    const MIN_EXPONENT: f32 = -127.0;
    const MAX_EXPONENT: f32 = 128.0;
    const LOWEST: f32 = f32::MIN;
}

impl Exponential for f64 {
    const EXP2: &'static [f64] = &[
        0.693_147_180_559_945_3,
        0.240_226_506_959_101_3,
        0.055_504_108_664_820_084,
        0.009_618_129_107_594_102,
        0.001_333_355_814_677_478_7,
        0.000_154_035_304_571_370_66,
        1.525_273_349_301_547_7e-5,
        1.321_543_526_912_264_7e-6,
        1.017_819_959_944_485_5e-7,
        7.073_785_628_816_091e-9,
        4.434_769_882_242_605_5e-10,
    ];
    const LOG2_E: (f64, f64) = (std::f64::consts::LOG2_E, 2.035_527_374_093_103_3e-17);
    const MIN_EXPONENT: f64 = -1023.0;
    const MAX_EXPONENT: f64 = 1024.0;
    const LOWEST: f64 = f64::MIN;
}

/// Hot loop compiled as a function of its own, whatever calls it: see [`Simd::call`].
pub(super) trait Kernel<S> {
    fn run(self, s: S);
}

/// One instruction set for one element type.
pub(super) trait Simd: Copy {
    /// Element.
    type T: Exponential;
    /// Register.
    type V: Copy;
    /// Elements per register.
    const LANES: usize;

    /// Runs a kernel out of line, as a function with the target features of this instruction set: it then has the
    /// registers to itself.
    fn call<K: Kernel<Self>>(self, kernel: K);

    fn splat(self, x: Self::T) -> Self::V;
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// Computes `a · b + c`, rounded once.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// Returns the larger of two; `old` where `new` is NaN.
    fn max(self, new: Self::V, old: Self::V) -> Self::V;
    /// Rounds to the nearest integers.
    fn round(self, x: Self::V) -> Self::V;
    /// Computes $2^n$ for integers from `MIN_EXPONENT`, where it is 0, up to `MAX_EXPONENT`, where it is infinite.
    fn pow2(self, n: Self::V) -> Self::V;
    /// Selects `x` in the lanes `lo..hi`, `other` elsewhere.
    fn inside(self, x: Self::V, other: Self::V, lo: usize, hi: usize) -> Self::V;
    /// Returns the sum of the lanes.
    fn reduce_add(self, x: Self::V) -> Self::T;
    /// Returns the greatest lane; no lane may be NaN.
    fn reduce_max(self, x: Self::V) -> Self::T;

    /// Reads `LANES` elements.
    ///
    /// # Safety
    ///
    /// They must be readable.
    unsafe fn load(self, p: *const Self::T) -> Self::V;
    /// Writes `LANES` elements.
    ///
    /// # Safety
    ///
    /// They must be writable.
    unsafe fn store(self, p: *mut Self::T, x: Self::V);
    /// Reads `n ≤ LANES` elements; 0 in the other lanes.
    ///
    /// # Safety
    ///
    /// They must be readable.
    unsafe fn load_part(self, p: *const Self::T, n: usize) -> Self::V;
    /// Writes the first `n ≤ LANES` elements.
    ///
    /// # Safety
    ///
    /// They must be writable.
    unsafe fn store_part(self, p: *mut Self::T, x: Self::V, n: usize);

    /// Reads `n ≤ LANES` numbers in bfloat16; 0 in the other lanes.
    ///
    /// # Safety
    ///
    /// `2 n` bytes must be readable.
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u8, n: usize) -> Self::V {
        let mut lanes = [Self::T::ZERO; 16];
        for (i, lane) in lanes.iter_mut().enumerate().take(n) {
            // SAFETY: the caller vouches for `n` numbers.
            let bits = unsafe { p.cast::<u16>().add(i).read_unaligned() };
            *lane = Self::T::from_f64(f64::from(f32::from_bits(u32::from(bits) << 16)));
        }
        // SAFETY: no register has more than 16 elements.
        unsafe { self.load(lanes.as_ptr()) }
    }
    /// Reads `n ≤ LANES` 8-bit integers; 0 in the other lanes.
    ///
    /// # Safety
    ///
    /// `n` bytes must be readable.
    #[inline(always)]
    unsafe fn load_i8(self, p: *const u8, n: usize) -> Self::V {
        let mut lanes = [Self::T::ZERO; 16];
        for (i, lane) in lanes.iter_mut().enumerate().take(n) {
            // SAFETY: the caller vouches for `n` numbers.
            *lane = Self::T::from_f64(f64::from(unsafe { p.add(i).cast::<i8>().read() }));
        }
        // SAFETY: no register has more than 16 elements.
        unsafe { self.load(lanes.as_ptr()) }
    }

    /// Copies a square of `LANES × LANES` elements, transposed; strides count elements.
    ///
    /// # Safety
    ///
    /// The square must be readable at `src` and writable at `dst`.
    #[inline(always)]
    unsafe fn transpose(self, src: *const Self::T, src_stride: usize, dst: *mut Self::T, dst_stride: usize) {
        for i in 0..Self::LANES {
            for j in 0..Self::LANES {
                // SAFETY: both ends lie in the squares the caller promises.
                unsafe { *dst.add(j * dst_stride + i) = *src.add(i * src_stride + j) };
            }
        }
    }

    /// Writes the lane sums of 16 registers to `out`.
    ///
    /// # Safety
    ///
    /// 16 elements must be writable at `out`.
    #[inline(always)]
    unsafe fn reduce_add_16(self, x: &[Self::V; 16], out: *mut Self::T) {
        for (n, &x) in x.iter().enumerate() {
            // SAFETY: n < 16.
            unsafe { *out.add(n) = self.reduce_add(x) };
        }
    }

    /// Writes the sum of the lanes of each register to `out`, bit for bit as [`reduce_add`](Self::reduce_add) returns
    /// it.
    ///
    /// # Safety
    ///
    /// 16 elements must be writable at `out`.
    #[inline(always)]
    unsafe fn reduce_each(self, x: &[Self::V; 16], out: *mut Self::T) {
        for (n, &x) in x.iter().enumerate() {
            // SAFETY: n < 16.
            unsafe { *out.add(n) = self.reduce_add(x) };
        }
    }

    /// Computes $2^x$ where that is at most 1: exactly 1 at 0, exactly 0 at −∞; NaN stays NaN.
    #[inline(always)]
    fn exp2(self, x: Self::V) -> Self::V {
        let x = self.clamp_below(x, Self::T::MIN_EXPONENT);
        let n = self.round(x);
        self.mul(exp2_fraction(self, self.sub(x, n)), self.pow2(n))
    }

    /// Computes $e^x$ for any $x$.
    #[inline(always)]
    fn exp(self, x: Self::V) -> Self::V {
        // Each half of the power of two is in range where the whole may overflow or underflow too early.
        let two = Self::T::ONE + Self::T::ONE;
        let (high, low) = Self::T::LOG2_E;
        let x = self.clamp_below(x, two * Self::T::MIN_EXPONENT / high);
        let x = self.clamp_above(x, two * Self::T::MAX_EXPONENT / high);
        let limit = self.mul(x, self.splat(high));
        let n = self.round(limit);
        let r = self.fma(
            x,
            self.splat(low),
            self.fma(x, self.splat(high), self.sub(self.splat(Self::T::ZERO), n)),
        );
        let half = self.round(self.mul(n, self.splat(Self::T::ONE / two)));
        let p = self.mul(exp2_fraction(self, r), self.pow2(half));
        self.mul(p, self.pow2(self.sub(n, half)))
    }

    /// Returns the larger of `x` and `low`; NaN stays NaN.
    fn clamp_below(self, x: Self::V, low: Self::T) -> Self::V;
    /// Returns the smaller of `x` and `high`; NaN stays NaN.
    fn clamp_above(self, x: Self::V, high: Self::T) -> Self::V;
    /// Rounds f32 to eight significant bits, ties to even; leaves f64 alone.
    fn round_bf16(self, x: Self::V) -> Self::V;

    /// True if the register block multiplies pairs: an element then stands for two numbers of half its width, and
    /// [`mac`](Self::mac) adds both products.
    const PAIRS: bool = false;
    /// Adds one term of a sum in a register block: `a · b + c`, or the two products of a pair.
    #[inline(always)]
    fn mac(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        self.fma(a, b, c)
    }
    /// Rounds to pairs lane by lane: `(low[i], high[i])`.
    #[inline(always)]
    fn pair(self, low: Self::V, _high: Self::V) -> Self::V {
        low
    }
    /// Rounds to pairs of neighbours: `(x[2i], x[2i + 1])` of the lanes of `low` followed by those of `high`.
    #[inline(always)]
    fn narrow(self, low: Self::V, _high: Self::V) -> Self::V {
        low
    }
    /// Replaces the unselected halves of pairs by 0.
    #[inline(always)]
    fn keep(self, x: Self::V, _low: bool, _high: bool) -> Self::V {
        x
    }
    /// Runs the tiled kernel with products of pairs if the machine has them; returns true if it did.
    #[inline(always)]
    fn attend_pairs(
        self,
        _job: &Job<'_, Self::T>,
        _scratch: &Scratch,
        _out: &mut [Self::T],
        _lse: &mut [Self::T],
    ) -> bool {
        false
    }

    /// Prefetches the cache line at `p`; harmless wherever it points.
    fn prefetch(self, p: *const Self::T);
}

/// Caps logits in base 2 with a cap $c$ in base $e$: $c \log_2(e) \tanh(x \ln(2) / c)$, by
/// $\tanh y = 1 - 2 / (e^{2y} + 1)$.
#[inline(always)]
pub(super) fn softcap<S: Simd>(s: S, x: S::V, cap: S::T) -> S::V {
    let two = S::T::ONE + S::T::ONE;
    let slope = S::T::from_f64(2.0 * std::f64::consts::LN_2 / cap.to_f64());
    let power = s.exp(s.mul(x, s.splat(slope)));
    let tanh = s.sub(s.splat(S::T::ONE), s.div(s.splat(two), s.add(power, s.splat(S::T::ONE))));
    s.mul(tanh, s.splat(S::T::from_f64(cap.to_f64() * std::f64::consts::LOG2_E)))
}

/// Computes $2^r$ for $|r| \le 1/2$.
#[inline(always)]
pub(super) fn exp2_fraction<S: Simd>(s: S, r: S::V) -> S::V {
    let c = S::T::EXP2;
    let mut p = s.splat(c[c.len() - 1]);
    for k in (0..c.len() - 1).rev() {
        p = s.fma(p, r, s.splat(c[k]));
    }
    s.fma(p, r, s.splat(S::T::ONE))
}

/// Generates the functions of one instruction set for one element type: the generic kernels, compiled with the named
/// target features, with register blocks of `$rows` rows by two registers in products, and of `$keys` keys or columns
/// by three registers of rows in attention.
macro_rules! variant {
    ($name:ident, $t:ty, $token:expr, $rows:literal, $keys:literal, $features:literal) => {
        pub(super) mod $name {
            use super::*;
            use crate::kernels::{
                AttendBackward, AttendChosen, Op, attend::Job, backward, decode, product, tiled, vector,
            };
            use crate::mat::MatRef;
            use crate::scratch::Scratch;

            variant! { @each $token, $features,
                fn attend(job: &Job<'_, $t>, scratch: &Scratch, out: &mut [$t], lse: &mut [$t]) => |s| {
                    if decode::applies(job) {
                        decode::attend(s, job, scratch, out, lse)
                    } else {
                        tiled::attend::<_, $keys>(s, job, scratch, out, lse)
                    }
                }
                fn attend_chosen(
                    job: &AttendChosen<'_, $t>, scratch: &Scratch, out: &mut [$t], lse: &mut [$t]
                ) => |s| decode::attend_chosen(s, job, scratch, out, lse)
                fn attend_backward(
                    job: &AttendBackward<'_, $t>, scratch: &Scratch, dq: &mut [$t], dk: &mut [$t], dv: &mut [$t]
                ) => |s| backward::run::<_, $keys>(s, job, scratch, dq, dk, dv)
                #[allow(clippy::too_many_arguments)]
                fn gemm(
                    alpha: $t, a: Op<MatRef<'_, $t>>, b: Op<MatRef<'_, $t>>, beta: $t, c: &mut [$t],
                    c_stride: usize, scratch: &Scratch
                ) => |s| product::gemm::<_, $rows>(s, alpha, a, b, beta, c, c_stride, scratch)
                fn panel() -> usize => |s| product::panel(s)
                fn pack(b: Op<MatRef<'_, $t>>, dst: &mut [$t]) => |s| product::pack(s, b, dst)
                #[allow(clippy::too_many_arguments)]
                fn gemm_packed(
                    alpha: $t, a: Op<MatRef<'_, $t>>, right: &[$t], n: usize, c: &mut [$t], c_stride: usize,
                    scratch: &Scratch
                ) => |s| product::gemm_packed::<_, $rows>(s, alpha, a, right, n, c, c_stride, scratch)
                fn dot(a: &[$t], b: &[$t]) -> $t => |s| vector::dot(s, a, b)
                fn sq_dist(a: &[$t], b: &[$t]) -> $t => |s| vector::sq_dist(s, a, b)
                fn axpy(a: $t, x: &[$t], y: &mut [$t]) => |s| vector::axpy(s, a, x, y)
                fn scale(a: $t, x: &mut [$t]) => |s| vector::scale(s, a, x)
                fn sum(x: &[$t]) -> $t => |s| vector::sum(s, x)
                fn max(x: &[$t]) -> $t => |s| vector::max(s, x)
                fn exp_in_place(x: &mut [$t]) => |s| vector::exp_in_place(s, x)
                fn exp_sum(x: &mut [$t], shift: $t) -> $t => |s| vector::exp_sum(s, x, shift)
                fn matvec(a: MatRef<'_, $t>, x: &[$t], out: &mut [$t]) => |s| vector::matvec(s, a, x, out)
                fn matvec_each(a: MatRef<'_, $t>, x: MatRef<'_, $t>, out: &mut [$t]) => |s| {
                    vector::matvec_each(s, a, x, out)
                }
                fn fma_burn(iterations: u64) -> (u64, $t) => |s| vector::fma_burn::<_, $rows>(s, iterations)
            }
        }
    };
    (@each $token:expr, $features:literal,
        $($(#[$meta:meta])* fn $f:ident($($arg:ident: $type:ty),*) $(-> $ret:ty)? => |$s:ident| $body:expr)*
    ) => {
        $(
            /// # Safety
            ///
            /// The machine must have the instruction set of this module.
            #[target_feature(enable = $features)]
            $(#[$meta])*
            pub(in crate::kernels) unsafe fn $f($($arg: $type),*) $(-> $ret)? {
                // SAFETY: the caller vouches for the instruction set.
                let $s = unsafe { $token };
                $body
            }
        )*
    };
}
pub(super) use variant;
