//! AVX-512: registers of 16 `f32` or 8 `f64`.

use super::attend::Job;
use super::simd::{Kernel, Simd, exp2_fraction, variant};
use super::tiled;
use crate::scratch::Scratch;
use std::arch::x86_64::*;
use std::mem::transmute;

variant!(single, f32, Single::new(), 12, 8, "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma");
variant!(double, f64, Double::new(), 12, 8, "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma");

/// Attention over packed rows.
pub(super) mod packed {
    use super::*;
    use crate::kernels::decode;
    use crate::kernels::packed::AttendPacked;
    use crate::scratch::Scratch;

    variant! { @each Single::new(), "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma",
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
    /// The machine must have AVX-512 F, DQ, BW and VL.
    pub(super) unsafe fn new() -> Self {
        Self(())
    }
}

impl Double {
    /// # Safety
    ///
    /// The machine must have AVX-512 F, DQ, BW and VL.
    pub(super) unsafe fn new() -> Self {
        Self(())
    }
}

/// Returns the mask of the first `n` lanes.
#[inline(always)]
fn first(n: usize) -> u32 {
    (1u32 << n) - 1
}

/// Generates the methods that differ only in the names of the intrinsics.
macro_rules! arithmetic {
    (
        $features:literal, $t:ty, $v:ty, $mask:ty, $lanes:literal, $splat:ident, $add:ident, $sub:ident, $mul:ident, $fma:ident,
        $max:ident, $min:ident, $round:ident, $scalef:ident, $reduce:ident, $blend:ident, $hsum:ident, $hmax:ident,
        $load:ident, $store:ident, $load_part:ident, $store_part:ident
    ) => {
        type T = $t;
        type V = $v;
        const LANES: usize = $lanes;

        #[inline(always)]
        fn call<K: Kernel<Self>>(self, kernel: K) {
            #[inline(never)]
            #[target_feature(enable = $features)]
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
        fn pow2(self, n: $v) -> $v {
            // SAFETY: the token proves that the machine has the instructions.
            unsafe { $scalef($splat(1.0), n) }
        }
        #[inline(always)]
        fn exp2(self, x: $v) -> $v {
            // SAFETY: the token proves that the machine has the instructions.
            unsafe {
                // Reduction gives 0 for −∞; subtracting the rounded value would give −∞ − (−∞), which is NaN.
                let r = $reduce::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x);
                $scalef(exp2_fraction(self, r), $sub(x, r))
            }
        }
        #[inline(always)]
        fn inside(self, x: $v, other: $v, lo: usize, hi: usize) -> $v {
            let seen = first(hi.min($lanes)) & !first(lo.min($lanes));
            // SAFETY: the token proves that the machine has the instructions.
            unsafe { $blend(seen as $mask, other, x) }
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
            // SAFETY: masked lanes are not touched, the caller vouches for the others.
            unsafe { $load_part(first(n) as $mask, p) }
        }
        #[inline(always)]
        unsafe fn store_part(self, p: *mut $t, x: $v, n: usize) {
            // SAFETY: masked lanes are not touched, the caller vouches for the others.
            unsafe { $store_part(p, first(n) as $mask, x) }
        }
        #[inline(always)]
        fn prefetch(self, p: *const $t) {
            // SAFETY: a prefetch never faults.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
        }
    };
}

/// Generates the `f32` arithmetic shared by products of numbers and products of pairs.
macro_rules! single {
    ($features:literal) => {
        arithmetic!(
            $features,
            f32,
            __m512,
            __mmask16,
            16,
            _mm512_set1_ps,
            _mm512_add_ps,
            _mm512_sub_ps,
            _mm512_mul_ps,
            _mm512_fmadd_ps,
            _mm512_max_ps,
            _mm512_min_ps,
            _mm512_roundscale_ps,
            _mm512_scalef_ps,
            _mm512_reduce_ps,
            _mm512_mask_blend_ps,
            _mm512_reduce_add_ps,
            _mm512_reduce_max_ps,
            _mm512_loadu_ps,
            _mm512_storeu_ps,
            _mm512_maskz_loadu_ps,
            _mm512_mask_storeu_ps
        );

        #[inline(always)]
        fn round_bf16(self, x: __m512) -> __m512 {
            // SAFETY: the token proves that the machine has the instructions.
            unsafe {
                let bits = _mm512_castps_si512(x);
                let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
                let up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
                let rounded = _mm512_and_si512(up, _mm512_set1_epi32(0xffff_0000u32 as i32));
                let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
                _mm512_mask_mov_ps(_mm512_castsi512_ps(rounded), nan, x)
            }
        }

        #[inline(always)]
        unsafe fn reduce_add_16(self, x: &[__m512; 16], out: *mut f32) {
            // SAFETY: the caller vouches for `out`; the token for the instructions.
            unsafe {
                // Each step folds two registers into one; every register is summed in the same order.
                let mut a = *x;
                for i in 0..8 {
                    let (x, y) = (a[2 * i], a[2 * i + 1]);
                    a[i] = _mm512_add_ps(_mm512_unpacklo_ps(x, y), _mm512_unpackhi_ps(x, y));
                }
                for i in 0..4 {
                    let (x, y) = (_mm512_castps_pd(a[2 * i]), _mm512_castps_pd(a[2 * i + 1]));
                    let (low, high) = (_mm512_unpacklo_pd(x, y), _mm512_unpackhi_pd(x, y));
                    a[i] = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
                }
                for count in [2, 1] {
                    for i in 0..count {
                        let (x, y) = (a[2 * i], a[2 * i + 1]);
                        a[i] = _mm512_add_ps(
                            _mm512_shuffle_f32x4::<0x88>(x, y),
                            _mm512_shuffle_f32x4::<0xdd>(x, y),
                        );
                    }
                }
                _mm512_storeu_ps(out, a[0]);
            }
        }

        #[inline(always)]
        unsafe fn reduce_each(self, x: &[__m512; 16], out: *mut f32) {
            // SAFETY: the caller vouches for `out`; the token for the instructions.
            unsafe {
                // `reduce_add` adds the upper half to the lower one, then halves of that; each step here does so for two
                // registers at once. They are paired such that the sums come out in order.
                let mut a = [_mm512_setzero_ps(); 4];
                for (i, a) in a.iter_mut().enumerate() {
                    let eighths = |x: __m512, y: __m512| {
                        let (low, high) =
                            (_mm512_shuffle_f32x4::<0x44>(x, y), _mm512_shuffle_f32x4::<0xee>(x, y));
                        _mm512_add_ps(low, high)
                    };
                    let (x, y) = (eighths(x[i], x[i + 4]), eighths(x[i + 8], x[i + 12]));
                    let (low, high) =
                        (_mm512_shuffle_f32x4::<0x88>(x, y), _mm512_shuffle_f32x4::<0xdd>(x, y));
                    *a = _mm512_add_ps(low, high);
                }
                let pairs = |x: __m512, y: __m512| {
                    let (x, y) = (_mm512_castps_pd(x), _mm512_castps_pd(y));
                    let (low, high) = (_mm512_unpacklo_pd(x, y), _mm512_unpackhi_pd(x, y));
                    _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high))
                };
                let (x, y) = (pairs(a[0], a[1]), pairs(a[2], a[3]));
                let (low, high) = (_mm512_shuffle_ps::<0x88>(x, y), _mm512_shuffle_ps::<0xdd>(x, y));
                _mm512_storeu_ps(out, _mm512_add_ps(low, high));
            }
        }

        #[inline(always)]
        unsafe fn transpose(self, src: *const f32, src_stride: usize, dst: *mut f32, dst_stride: usize) {
            // SAFETY: the caller vouches for both squares; the token for the instructions.
            unsafe {
                // Transposes pairs, then quadruples within 128-bit lanes, then the lanes themselves.
                let mut a = [_mm512_setzero_ps(); 16];
                let mut b = a;
                for i in 0..16 {
                    a[i] = _mm512_loadu_ps(src.add(i * src_stride));
                }
                for i in 0..8 {
                    b[2 * i] = _mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]);
                    b[2 * i + 1] = _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]);
                }
                for i in 0..4 {
                    for j in 0..2 {
                        let (x, y) = (_mm512_castps_pd(b[4 * i + j]), _mm512_castps_pd(b[4 * i + j + 2]));
                        a[4 * i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(x, y));
                        a[4 * i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(x, y));
                    }
                }
                for j in 0..4 {
                    let low = _mm512_shuffle_f32x4::<0x88>(a[j], a[4 + j]);
                    let high = _mm512_shuffle_f32x4::<0xdd>(a[j], a[4 + j]);
                    let low2 = _mm512_shuffle_f32x4::<0x88>(a[8 + j], a[12 + j]);
                    let high2 = _mm512_shuffle_f32x4::<0xdd>(a[8 + j], a[12 + j]);
                    _mm512_storeu_ps(dst.add(j * dst_stride), _mm512_shuffle_f32x4::<0x88>(low, low2));
                    _mm512_storeu_ps(
                        dst.add((4 + j) * dst_stride),
                        _mm512_shuffle_f32x4::<0x88>(high, high2),
                    );
                    _mm512_storeu_ps(dst.add((8 + j) * dst_stride), _mm512_shuffle_f32x4::<0xdd>(low, low2));
                    _mm512_storeu_ps(
                        dst.add((12 + j) * dst_stride),
                        _mm512_shuffle_f32x4::<0xdd>(high, high2),
                    );
                }
            }
        }
    };
}

impl Simd for Single {
    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: the token proves that the machine has the instructions.
        unsafe { _mm512_div_ps(a, b) }
    }

    single!("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma");

    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u8, n: usize) -> __m512 {
        // SAFETY: masked lanes are not touched, the caller vouches for the others.
        unsafe {
            let halves = _mm256_maskz_loadu_epi16(first(n) as u16, p.cast());
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves)))
        }
    }
    #[inline(always)]
    unsafe fn load_i8(self, p: *const u8, n: usize) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(first(n) as u16, p.cast()))) }
    }

    #[inline(always)]
    fn attend_pairs(self, job: &Job<'_, f32>, scratch: &Scratch, out: &mut [f32], lse: &mut [f32]) -> bool {
        let found = is_x86_feature_detected!("avx512bf16");
        if found {
            // SAFETY: the machine has the instructions of this token, and those that were just looked for.
            unsafe { attend_pairs(job, scratch, out, lse) };
        }
        found
    }
}

/// # Safety
///
/// The machine must have AVX-512 F, DQ, BW, VL and BF16.
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx512bf16,avx2,fma")]
unsafe fn attend_pairs(job: &Job<'_, f32>, scratch: &Scratch, out: &mut [f32], lse: &mut [f32]) {
    tiled::attend::<Pairs, 8>(Pairs(()), job, scratch, out, lse);
}

/// Token for `f32` with products of pairs of bfloat16.
#[derive(Clone, Copy)]
struct Pairs(());

impl Simd for Pairs {
    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: the token proves that the machine has the instructions.
        unsafe { _mm512_div_ps(a, b) }
    }

    single!("avx512f,avx512dq,avx512bw,avx512vl,avx512bf16,avx2,fma");

    const PAIRS: bool = true;

    #[inline(always)]
    fn mac(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: the token proves that the machine has the instructions; pairs of bfloat16 and `f32` are of
        // the same size.
        unsafe { _mm512_dpbf16_ps(c, transmute::<__m512, __m512bh>(a), transmute::<__m512, __m512bh>(b)) }
    }
    #[inline(always)]
    fn pair(self, low: __m512, high: __m512) -> __m512 {
        // SAFETY: the token proves that the machine has the instructions; sizes agree.
        unsafe {
            // Interleaves the rounded numbers of `low` and `high`.
            let both = transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low));
            _mm512_castsi512_ps(_mm512_permutexvar_epi16(_mm512_loadu_si512(DEAL.as_ptr().cast()), both))
        }
    }
    #[inline(always)]
    fn narrow(self, low: __m512, high: __m512) -> __m512 {
        // SAFETY: the token proves that the machine has the instructions; sizes agree.
        unsafe { transmute::<__m512bh, __m512>(_mm512_cvtne2ps_pbh(high, low)) }
    }
    #[inline(always)]
    fn keep(self, x: __m512, low: bool, high: bool) -> __m512 {
        let mask = (if low { 0xffff } else { 0 }) | (if high { 0xffff_0000u32 } else { 0 });
        // SAFETY: the token proves that the machine has the instructions.
        unsafe {
            _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(mask as i32)))
        }
    }
}

/// Positions of the halves of pair `i` in two consecutive rows of 16: `i` and `16 + i`.
const DEAL: [i16; 32] = {
    let mut order = [0; 32];
    let mut i = 0;
    while i < 16 {
        order[2 * i] = i as i16;
        order[2 * i + 1] = 16 + i as i16;
        i += 1;
    }
    order
};

impl Simd for Double {
    #[inline(always)]
    fn div(self, a: __m512d, b: __m512d) -> __m512d {
        // SAFETY: the token proves that the machine has the instructions.
        unsafe { _mm512_div_pd(a, b) }
    }

    arithmetic!(
        "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma",
        f64,
        __m512d,
        __mmask8,
        8,
        _mm512_set1_pd,
        _mm512_add_pd,
        _mm512_sub_pd,
        _mm512_mul_pd,
        _mm512_fmadd_pd,
        _mm512_max_pd,
        _mm512_min_pd,
        _mm512_roundscale_pd,
        _mm512_scalef_pd,
        _mm512_reduce_pd,
        _mm512_mask_blend_pd,
        _mm512_reduce_add_pd,
        _mm512_reduce_max_pd,
        _mm512_loadu_pd,
        _mm512_storeu_pd,
        _mm512_maskz_loadu_pd,
        _mm512_mask_storeu_pd
    );

    #[inline(always)]
    fn round_bf16(self, x: __m512d) -> __m512d {
        x
    }

    #[inline(always)]
    unsafe fn transpose(self, src: *const f64, src_stride: usize, dst: *mut f64, dst_stride: usize) {
        // SAFETY: the caller vouches for both squares; the token for the instructions.
        unsafe {
            let mut a = [_mm512_setzero_pd(); 8];
            let mut b = a;
            for i in 0..8 {
                a[i] = _mm512_loadu_pd(src.add(i * src_stride));
            }
            for i in 0..4 {
                b[2 * i] = _mm512_unpacklo_pd(a[2 * i], a[2 * i + 1]);
                b[2 * i + 1] = _mm512_unpackhi_pd(a[2 * i], a[2 * i + 1]);
            }
            for j in 0..2 {
                let low = _mm512_shuffle_f64x2::<0x88>(b[j], b[2 + j]);
                let high = _mm512_shuffle_f64x2::<0xdd>(b[j], b[2 + j]);
                let low2 = _mm512_shuffle_f64x2::<0x88>(b[4 + j], b[6 + j]);
                let high2 = _mm512_shuffle_f64x2::<0xdd>(b[4 + j], b[6 + j]);
                _mm512_storeu_pd(dst.add(j * dst_stride), _mm512_shuffle_f64x2::<0x88>(low, low2));
                _mm512_storeu_pd(dst.add((2 + j) * dst_stride), _mm512_shuffle_f64x2::<0x88>(high, high2));
                _mm512_storeu_pd(dst.add((4 + j) * dst_stride), _mm512_shuffle_f64x2::<0xdd>(low, low2));
                _mm512_storeu_pd(dst.add((6 + j) * dst_stride), _mm512_shuffle_f64x2::<0xdd>(high, high2));
            }
        }
    }
}
