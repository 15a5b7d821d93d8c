//! NEON, which every AArch64 machine has: registers of 4 `f32` or 2 `f64`.

use super::simd::{Kernel, Simd, variant};
use std::arch::aarch64::*;

variant!(single, f32, Single::new(), 12, 8, "neon");
variant!(double, f64, Double::new(), 12, 8, "neon");

/// Attention over packed rows.
pub(super) mod packed {
    use super::*;
    use crate::kernels::decode;
    use crate::kernels::packed::AttendPacked;
    use crate::scratch::Scratch;

    variant! { @each Single::new(), "neon",
        fn attend_packed(
            job: &AttendPacked<'_>, scratch: &Scratch, out: &mut [f32], lse: &mut [f32]
        ) => |s| decode::attend_packed(s, job, scratch, out, lse)
    }
}

/// Token for `f32`.
#[derive(Clone, Copy)]
pub(super) struct Single(());

/// Token for `f64`.
#[derive(Clone, Copy)]
pub(super) struct Double(());

impl Single {
    /// # Safety
    ///
    /// The machine must have NEON.
    pub(super) unsafe fn new() -> Self {
        Self(())
    }
}

impl Double {
    /// # Safety
    ///
    /// The machine must have NEON.
    pub(super) unsafe fn new() -> Self {
        Self(())
    }
}

/// Generates the methods that differ only in the names of the intrinsics.
macro_rules! arithmetic {
    (
        $t:ty, $v:ty, $lanes:literal, $splat:ident, $add:ident, $sub:ident, $mul:ident, $fma:ident, $max:ident,
        $maxnm:ident, $min:ident, $round:ident, $hsum:ident, $hmax:ident, $load:ident, $store:ident, $ge:ident,
        $lt:ident, $and:ident, $select:ident, $iota:expr
    ) => {
        type T = $t;
        type V = $v;
        const LANES: usize = $lanes;

        #[inline(always)]
        fn call<K: Kernel<Self>>(self, kernel: K) {
            #[inline(never)]
            #[target_feature(enable = "neon")]
            fn enter<S, K: Kernel<S>>(s: S, kernel: K) {
                kernel.run(s);
            }
            // SAFETY: the token proves that the machine has the features.
            unsafe { enter(self, kernel) }
        }
        #[inline(always)]
        fn splat(self, x: $t) -> $v {
            // SAFETY: the token proves that the machine has the instructions.
            unsafe { $splat(x) }
        }
        #[inline(always)]
        fn add(self, a: $v, b: $v) -> $v {
            // SAFETY: the token proves that the machine has the instructions.
            unsafe { $add(a, b) }
        }
        #[inline(always)]
        fn sub(self, a: $v, b: $v) -> $v {
            // SAFETY: the token proves that the machine has the instructions.
            unsafe { $sub(a, b) }
        }
        #[inline(always)]
        fn mul(self, a: $v, b: $v) -> $v {
            // SAFETY: the token proves that the machine has the instructions.
            unsafe { $mul(a, b) }
        }
        #[inline(always)]
        fn fma(self, a: $v, b: $v, c: $v) -> $v {
            // SAFETY: the token proves that the machine has the instructions.
            unsafe { $fma(c, a, b) }
        }
        #[inline(always)]
        fn max(self, new: $v, old: $v) -> $v {
            // SAFETY: the token proves that the machine has the instructions; this maximum returns the
            // number where the other operand is NaN.
            unsafe { $maxnm(new, old) }
        }
        #[inline(always)]
        fn clamp_below(self, x: $v, low: $t) -> $v {
            // SAFETY: the token proves that the machine has the instructions; this maximum returns NaN where
            // either operand is.
            unsafe { $max(x, $splat(low)) }
        }
        #[inline(always)]
        fn clamp_above(self, x: $v, high: $t) -> $v {
            // SAFETY: as for `clamp_below`.
            unsafe { $min(x, $splat(high)) }
        }
        #[inline(always)]
        fn round(self, x: $v) -> $v {
            // SAFETY: the token proves that the machine has the instructions.
            unsafe { $round(x) }
        }
        #[inline(always)]
        fn inside(self, x: $v, other: $v, lo: usize, hi: usize) -> $v {
            // SAFETY: the token proves that the machine has the instructions; the table holds a register.
            unsafe {
                let lane = $load($iota.as_ptr());
                let (lo, hi) = ($splat(lo.min($lanes) as $t), $splat(hi.min($lanes) as $t));
                let seen = $and($ge(lane, lo), $lt(lane, hi));
                $select(seen, x, other)
            }
        }
        #[inline(always)]
        fn reduce_add(self, x: $v) -> $t {
            // SAFETY: the token proves that the machine has the instructions.
            unsafe { $hsum(x) }
        }
        #[inline(always)]
        fn reduce_max(self, x: $v) -> $t {
            // SAFETY: the token proves that the machine has the instructions.
            unsafe { $hmax(x) }
        }
        #[inline(always)]
        unsafe fn load(self, p: *const $t) -> $v {
            // SAFETY: the caller vouches for the memory.
            unsafe { $load(p) }
        }
        #[inline(always)]
        unsafe fn store(self, p: *mut $t, x: $v) {
            // SAFETY: the caller vouches for the memory.
            unsafe { $store(p, x) }
        }
        #[inline(always)]
        unsafe fn load_part(self, p: *const $t, n: usize) -> $v {
            let mut lanes = [0.0; $lanes];
            // SAFETY: the caller vouches for `n` elements; the copy holds a register.
            unsafe {
                std::ptr::copy_nonoverlapping(p, lanes.as_mut_ptr(), n.min($lanes));
                $load(lanes.as_ptr())
            }
        }
        #[inline(always)]
        unsafe fn store_part(self, p: *mut $t, x: $v, n: usize) {
            let mut lanes = [0.0; $lanes];
            // SAFETY: the caller vouches for `n` elements; the copy holds a register.
            unsafe {
                $store(lanes.as_mut_ptr(), x);
                std::ptr::copy_nonoverlapping(lanes.as_ptr(), p, n.min($lanes));
            }
        }
        #[inline(always)]
        fn prefetch(self, _p: *const $t) {
            // Stable Rust has no prefetch intrinsic here; the hardware prefetcher copes with rows read in order.
        }
    };
}

impl Simd for Single {
    #[inline(always)]
    fn div(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: the token proves that the machine has the instructions.
        unsafe { vdivq_f32(a, b) }
    }

    arithmetic!(
        f32,
        float32x4_t,
        4,
        vdupq_n_f32,
        vaddq_f32,
        vsubq_f32,
        vmulq_f32,
        vfmaq_f32,
        vmaxq_f32,
        vmaxnmq_f32,
        vminq_f32,
        vrndnq_f32,
        vaddvq_f32,
        vmaxvq_f32,
        vld1q_f32,
        vst1q_f32,
        vcgeq_f32,
        vcltq_f32,
        vandq_u32,
        vbslq_f32,
        [0.0f32, 1.0, 2.0, 3.0]
    );

    #[inline(always)]
    fn pow2(self, n: float32x4_t) -> float32x4_t {
        // SAFETY: the token proves that the machine has the instructions.
        unsafe { vreinterpretq_f32_s32(vshlq_n_s32::<23>(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)))) }
    }

    #[inline(always)]
    fn round_bf16(self, x: float32x4_t) -> float32x4_t {
        // SAFETY: the token proves that the machine has the instructions.
        unsafe {
            let bits = vreinterpretq_u32_f32(x);
            let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
            let up = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd);
            let rounded = vreinterpretq_f32_u32(vandq_u32(up, vdupq_n_u32(0xffff_0000)));
            // NaN differs from itself, so it is passed on unrounded.
            vbslq_f32(vceqq_f32(x, x), rounded, x)
        }
    }
}

impl Simd for Double {
    #[inline(always)]
    fn div(self, a: float64x2_t, b: float64x2_t) -> float64x2_t {
        // SAFETY: the token proves that the machine has the instructions.
        unsafe { vdivq_f64(a, b) }
    }

    arithmetic!(
        f64,
        float64x2_t,
        2,
        vdupq_n_f64,
        vaddq_f64,
        vsubq_f64,
        vmulq_f64,
        vfmaq_f64,
        vmaxq_f64,
        vmaxnmq_f64,
        vminq_f64,
        vrndnq_f64,
        vaddvq_f64,
        vmaxvq_f64,
        vld1q_f64,
        vst1q_f64,
        vcgeq_f64,
        vcltq_f64,
        vandq_u64,
        vbslq_f64,
        [0.0f64, 1.0]
    );

    #[inline(always)]
    fn pow2(self, n: float64x2_t) -> float64x2_t {
        // SAFETY: the token proves that the machine has the instructions.
        unsafe { vreinterpretq_f64_s64(vshlq_n_s64::<52>(vaddq_s64(vcvtq_s64_f64(n), vdupq_n_s64(1023)))) }
    }

    #[inline(always)]
    fn round_bf16(self, x: float64x2_t) -> float64x2_t {
        x
    }
}
