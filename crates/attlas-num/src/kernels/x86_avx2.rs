//! AVX2 with FMA: registers of 8 `f32` or 4 `f64`.

use super::simd::{Kernel, Simd, variant};
use std::arch::x86_64::*;

variant!(single, f32, Single::new(), 6, 4, "avx2,fma");
variant!(double, f64, Double::new(), 6, 4, "avx2,fma");

/// Attention over packed rows.
pub(super) mod packed {
    use super::*;
    use crate::kernels::decode;
    use crate::kernels::packed::AttendPacked;
    use crate::scratch::Scratch;

    variant! { @each Single::new(), "avx2,fma",
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
    /// The machine must have AVX2 and FMA.
    pub(super) unsafe fn new() -> Self {
        Self(())
    }
}

impl Double {
    /// # Safety
    ///
    /// The machine must have AVX2 and FMA.
    pub(super) unsafe fn new() -> Self {
        Self(())
    }
}

/// Added to an integer of magnitude up to 2²², leaves that integer plus the exponent bias in the lowest bits.
const MAGIC_F32: f32 = 12_582_912.0 + 127.0;
const MAGIC_F64: f64 = 6_755_399_441_055_744.0 + 1023.0;

/// Generates the methods that differ only in the names of the intrinsics.
macro_rules! arithmetic {
    (
        $t:ty, $v:ty, $lanes:literal, $splat:ident, $add:ident, $sub:ident, $mul:ident, $fma:ident, $max:ident,
        $min:ident, $round:ident, $and:ident, $or:ident, $andnot:ident, $cmp:ident, $load:ident, $store:ident, $iota:expr
    ) => {
        type T = $t;
        type V = $v;
        const LANES: usize = $lanes;

        #[inline(always)]
        fn call<K: Kernel<Self>>(self, kernel: K) {
            #[inline(never)]
            #[target_feature(enable = "avx2,fma")]
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
            unsafe { $fma(a, b, c) }
        }
        #[inline(always)]
        fn max(self, new: $v, old: $v) -> $v {
            // SAFETY: the token proves that the machine has the instructions; of two operands, one of which
            // is NaN, they return the second.
            unsafe { $max(new, old) }
        }
        #[inline(always)]
        fn clamp_below(self, x: $v, low: $t) -> $v {
            // SAFETY: as for `max`.
            unsafe { $max($splat(low), x) }
        }
        #[inline(always)]
        fn clamp_above(self, x: $v, high: $t) -> $v {
            // SAFETY: as for `max`.
            unsafe { $min($splat(high), x) }
        }
        #[inline(always)]
        fn round(self, x: $v) -> $v {
            // SAFETY: the token proves that the machine has the instructions.
            unsafe { $round::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x) }
        }
        #[inline(always)]
        fn inside(self, x: $v, other: $v, lo: usize, hi: usize) -> $v {
            // SAFETY: the token proves that the machine has the instructions; the table holds a register.
            unsafe {
                let lane = $load($iota.as_ptr());
                let (lo, hi) = ($splat(lo.min($lanes) as $t), $splat(hi.min($lanes) as $t));
                let seen = $and($cmp::<_CMP_GE_OQ>(lane, lo), $cmp::<_CMP_LT_OQ>(lane, hi));
                $or($and(seen, x), $andnot(seen, other))
            }
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
        fn prefetch(self, p: *const $t) {
            // SAFETY: a prefetch never faults.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
        }
    };
}

impl Simd for Single {
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u8, n: usize) -> __m256 {
        let mut halves = [0u16; 8];
        // SAFETY: the caller vouches for `n` numbers; the copy holds a register.
        unsafe {
            let p = match n {
                8 => p,
                _ => {
                    std::ptr::copy_nonoverlapping(p, halves.as_mut_ptr().cast(), 2 * n.min(8));
                    halves.as_ptr().cast()
                }
            };
            let words = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(words))
        }
    }
    #[inline(always)]
    unsafe fn load_i8(self, p: *const u8, n: usize) -> __m256 {
        let mut numbers = [0u8; 8];
        // SAFETY: as above.
        unsafe {
            let p = match n {
                8 => p,
                _ => {
                    std::ptr::copy_nonoverlapping(p, numbers.as_mut_ptr(), n.min(8));
                    numbers.as_ptr()
                }
            };
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast())))
        }
    }
    #[inline(always)]
    fn div(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: the token proves that the machine has the instructions.
        unsafe { _mm256_div_ps(a, b) }
    }

    arithmetic!(
        f32,
        __m256,
        8,
        _mm256_set1_ps,
        _mm256_add_ps,
        _mm256_sub_ps,
        _mm256_mul_ps,
        _mm256_fmadd_ps,
        _mm256_max_ps,
        _mm256_min_ps,
        _mm256_round_ps,
        _mm256_and_ps,
        _mm256_or_ps,
        _mm256_andnot_ps,
        _mm256_cmp_ps,
        _mm256_loadu_ps,
        _mm256_storeu_ps,
        [0.0f32, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    );

    #[inline(always)]
    fn pow2(self, n: __m256) -> __m256 {
        // SAFETY: the token proves that the machine has the instructions.
        unsafe {
            let bits = _mm256_castps_si256(_mm256_add_ps(n, _mm256_set1_ps(MAGIC_F32)));
            _mm256_castsi256_ps(_mm256_slli_epi32::<23>(bits))
        }
    }

    #[inline(always)]
    fn reduce_add(self, x: __m256) -> f32 {
        // SAFETY: the token proves that the machine has the instructions.
        unsafe {
            let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps::<1>(x, x)))
        }
    }

    #[inline(always)]
    fn reduce_max(self, x: __m256) -> f32 {
        // SAFETY: the token proves that the machine has the instructions.
        unsafe {
            let x = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let x = _mm_max_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps::<1>(x, x)))
        }
    }

    #[inline(always)]
    fn round_bf16(self, x: __m256) -> __m256 {
        // SAFETY: the token proves that the machine has the instructions.
        unsafe {
            let bits = _mm256_castps_si256(x);
            let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            let up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
            let rounded = _mm256_and_si256(up, _mm256_set1_epi32(0xffff_0000u32 as i32));
            _mm256_blendv_ps(_mm256_castsi256_ps(rounded), x, _mm256_cmp_ps::<_CMP_UNORD_Q>(x, x))
        }
    }
}

impl Simd for Double {
    #[inline(always)]
    fn div(self, a: __m256d, b: __m256d) -> __m256d {
        // SAFETY: the token proves that the machine has the instructions.
        unsafe { _mm256_div_pd(a, b) }
    }

    arithmetic!(
        f64,
        __m256d,
        4,
        _mm256_set1_pd,
        _mm256_add_pd,
        _mm256_sub_pd,
        _mm256_mul_pd,
        _mm256_fmadd_pd,
        _mm256_max_pd,
        _mm256_min_pd,
        _mm256_round_pd,
        _mm256_and_pd,
        _mm256_or_pd,
        _mm256_andnot_pd,
        _mm256_cmp_pd,
        _mm256_loadu_pd,
        _mm256_storeu_pd,
        [0.0f64, 1.0, 2.0, 3.0]
    );

    #[inline(always)]
    fn pow2(self, n: __m256d) -> __m256d {
        // SAFETY: the token proves that the machine has the instructions.
        unsafe {
            let bits = _mm256_castpd_si256(_mm256_add_pd(n, _mm256_set1_pd(MAGIC_F64)));
            _mm256_castsi256_pd(_mm256_slli_epi64::<52>(bits))
        }
    }

    #[inline(always)]
    fn reduce_add(self, x: __m256d) -> f64 {
        // SAFETY: the token proves that the machine has the instructions.
        unsafe {
            let x = _mm_add_pd(_mm256_castpd256_pd128(x), _mm256_extractf128_pd::<1>(x));
            _mm_cvtsd_f64(_mm_add_sd(x, _mm_unpackhi_pd(x, x)))
        }
    }

    #[inline(always)]
    fn reduce_max(self, x: __m256d) -> f64 {
        // SAFETY: the token proves that the machine has the instructions.
        unsafe {
            let x = _mm_max_pd(_mm256_castpd256_pd128(x), _mm256_extractf128_pd::<1>(x));
            _mm_cvtsd_f64(_mm_max_sd(x, _mm_unpackhi_pd(x, x)))
        }
    }

    #[inline(always)]
    fn round_bf16(self, x: __m256d) -> __m256d {
        x
    }
}
