//! AVX-512: tiles of 12 × 32 outputs, sixteen weights per register.

use super::narrow::x86_rows;
use super::{FEW_ROWS, Format, Strip, Tile, generic_strip, scalar};
use crate::MatRef;
use std::arch::x86_64::*;
use std::marker::PhantomData;

/// Columns of an output tile: two registers.
pub(super) const NR: usize = 32;
/// Rows of an output tile: with two registers of columns, it takes 24 registers for sums, two for weights and one for a
/// broadcast.
pub(super) const MR: usize = 12;

/// Dequantises whole blocks.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(super) fn dequantise(format: Format, bytes: &[u8], out: &mut [f32]) {
    // SAFETY: the features are on.
    unsafe { by_format!(format, values_of(bytes, out), scalar::dequantise(format, bytes, out)) }
}

/// Unpacks rows of scaled 8-bit integers.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(super) fn unpack_scaled_rows(width: usize, bytes: &[u8], out: &mut [f32]) {
    scalar::unpack_scaled_rows(width, bytes, out);
}

/// Rounds rows to bfloat16.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(super) fn pack_halves(rows: MatRef<'_, f32>, out: &mut [u8]) {
    scalar::pack_halves(rows, out);
}

/// Packs rows as scaled 8-bit integers.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(super) fn pack_scaled_rows(rows: MatRef<'_, f32>, out: &mut [u8]) {
    scalar::pack_scaled_rows(rows, out);
}

/// # Safety
/// `U` is the format; both slices hold the same number of blocks.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn values_of<U: Unit>(bytes: &[u8], out: &mut [f32]) {
    for (stored, out) in bytes.chunks_exact(U::BYTES).zip(out.chunks_exact_mut(32 * U::GROUPS)) {
        // SAFETY: a chunk holds the bytes of a unit, and the other one its values.
        unsafe {
            let scales = U::scales(stored.as_ptr());
            for g in 0..U::GROUPS {
                let (low, high) = U::group(stored.as_ptr(), g, &scales);
                _mm512_storeu_ps(out.as_mut_ptr().add(32 * g), low);
                _mm512_storeu_ps(out.as_mut_ptr().add(32 * g + 16), high);
            }
        }
    }
}

/// Computes one output tile.
///
/// # Safety
/// As [`super::run_tile`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(super) unsafe fn tile(t: &Tile) {
    // SAFETY: passed on from the caller.
    unsafe {
        match t.rows {
            12 => tile_of::<12>(t),
            11 => tile_of::<11>(t),
            10 => tile_of::<10>(t),
            9 => tile_of::<9>(t),
            8 => tile_of::<8>(t),
            7 => tile_of::<7>(t),
            6 => tile_of::<6>(t),
            5 => tile_of::<5>(t),
            4 => tile_of::<4>(t),
            3 => tile_of::<3>(t),
            2 => tile_of::<2>(t),
            _ => tile_of::<1>(t),
        }
    }
}

/// # Safety
/// As [`super::run_tile`], and `t.rows == M`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn tile_of<const M: usize>(t: &Tile) {
    let mut sums = [[_mm512_setzero_ps(); 2]; M];
    let (mut x, mut w) = (t.x, t.panel);
    for _ in 0..t.depth {
        // SAFETY: the panel holds `depth · NR` elements, x holds M rows of `depth`.
        unsafe {
            let w0 = _mm512_loadu_ps(w);
            let w1 = _mm512_loadu_ps(w.add(16));
            for (i, sum) in sums.iter_mut().enumerate() {
                let a = _mm512_set1_ps(*x.add(i * t.x_stride));
                sum[0] = _mm512_fmadd_ps(a, w0, sum[0]);
                sum[1] = _mm512_fmadd_ps(a, w1, sum[1]);
            }
            x = x.add(1);
            w = w.add(NR);
        }
    }
    let masks = [tail_mask(t.cols), tail_mask(t.cols.saturating_sub(16))];
    for (i, sum) in sums.iter().enumerate() {
        for (half, &mask) in masks.iter().enumerate() {
            // SAFETY: the output holds M rows of `cols` elements; masked lanes are not touched. The offset
            // is formed by wrapping because it may lie past the output where the whole mask is empty.
            unsafe {
                let at = t.out.wrapping_add(i * t.out_stride + 16 * half);
                let old = if t.accumulate { _mm512_maskz_loadu_ps(mask, at) } else { _mm512_setzero_ps() };
                _mm512_mask_storeu_ps(at, mask, _mm512_add_ps(old, sum[half]));
            }
        }
    }
}

/// Returns a mask of the first `n` of sixteen lanes; of all lanes if `n` is larger.
#[inline(always)]
pub(super) fn tail_mask(n: usize) -> u16 {
    if n >= 16 { u16::MAX } else { (1 << n) - 1 }
}

/// Multiplies a strip of weight rows with few rows of x.
///
/// # Safety
/// As [`super::run_strip`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(super) unsafe fn strip(s: &Strip<'_>) {
    // SAFETY: passed on from the caller.
    unsafe {
        match s.weight.format {
            _ if s.rounds => generic_strip(s, |f, b, y| dequantise(f, b, y), |w, x| dot(w, x)),
            Format::Q4_0 => rows_of::<Q4_0>(s),
            Format::Q4_1 => rows_of::<Q4_1>(s),
            Format::Q8_0 => rows_of::<Q8_0>(s),
            Format::F32 => rows_of::<F32>(s),
            Format::F16 => rows_of::<F16>(s),
            Format::BF16 => rows_of::<BF16>(s),
            other => by_format!(
                other,
                rows_of(s),
                generic_strip(s, |f, b, y| dequantise(f, b, y), |w, x| dot(w, x))
            ),
        }
    }
}

/// # Safety
/// As [`super::run_strip`]; `U` is the strip's format.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn rows_of<U: Unit>(s: &Strip<'_>) {
    // SAFETY: passed on from the caller.
    unsafe {
        match s.x.rows() {
            1 => rows_by::<U, 1>(s),
            2 => rows_by::<U, 2>(s),
            _ => rows_by::<U, FEW_ROWS>(s),
        }
    }
}

/// # Safety
/// As [`rows_of`], and `M` is the number of rows of x.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn rows_by<U: Unit, const M: usize>(s: &Strip<'_>) {
    let cols = s.weight.cols;
    let whole = cols / 32 * 32;
    let x: [*const f32; M] = std::array::from_fn(|n| s.x.row(n).as_ptr());
    for r in s.rows.clone() {
        let row = s.weight.row(r).as_ptr();
        s.weight.prefetch_behind(r..r + 1);
        // Units alternate between two pairs of sums, so an addition need not wait the four cycles of the one before.
        // (Several weight rows at a time would do as well, but long rows are then read at half the speed.)
        let mut pairs = [[[_mm512_setzero_ps(); 2]; M]; 2];
        let units = whole / 32 / U::GROUPS;
        // SAFETY: a row holds `units` units of U::BYTES bytes, x holds `cols` elements per row.
        let add = |unit: usize, sums: &mut [[__m512; 2]; M]| unsafe {
            let p = row.add(unit * U::BYTES);
            let scales = U::scales(p);
            for g in 0..U::GROUPS {
                let (lo, hi) = U::group(p, g, &scales);
                let k = 32 * (unit * U::GROUPS + g);
                for (sum, x) in sums.iter_mut().zip(x) {
                    sum[0] = _mm512_fmadd_ps(lo, _mm512_loadu_ps(x.add(k)), sum[0]);
                    sum[1] = _mm512_fmadd_ps(hi, _mm512_loadu_ps(x.add(k + 16)), sum[1]);
                }
            }
        };
        for pair in 0..units / 2 {
            add(2 * pair, &mut pairs[0]);
            add(2 * pair + 1, &mut pairs[1]);
        }
        if units % 2 == 1 {
            add(units - 1, &mut pairs[0]);
        }
        let mut sums = pairs[0];
        for (sum, other) in sums.iter_mut().zip(pairs[1]) {
            *sum = [_mm512_add_ps(sum[0], other[0]), _mm512_add_ps(sum[1], other[1])];
        }
        if whole < cols {
            // Only formats with blocks of one value end inside a group of 32.
            let mut rest = [0.0f32; 32];
            let at = whole / 32 * U::BYTES;
            scalar::dequantise(s.weight.format, &s.weight.row(r)[at..], &mut rest[..cols - whole]);
            for (n, sum) in sums.iter_mut().enumerate() {
                for (half, sum) in sum.iter_mut().enumerate() {
                    let mask = tail_mask((cols - whole).saturating_sub(16 * half));
                    // SAFETY: masked lanes are not read; the address is inside or just past the row.
                    let x = unsafe { _mm512_maskz_loadu_ps(mask, x[n].wrapping_add(whole + 16 * half)) };
                    // SAFETY: `rest` holds 32 elements.
                    let w = unsafe { _mm512_loadu_ps(rest.as_ptr().add(16 * half)) };
                    *sum = _mm512_mask3_fmadd_ps(w, x, *sum, mask);
                }
            }
        }
        for (n, sum) in sums.iter().enumerate() {
            // SAFETY: the output holds `M · weight.rows` elements.
            unsafe {
                *s.out.add(n * s.weight.rows + r) = _mm512_reduce_add_ps(_mm512_add_ps(sum[0], sum[1]));
            }
        }
    }
}

/// Thirty-two consecutive weights in two registers.
pub(super) trait Load {
    /// Bytes of thirty-two weights.
    const BYTES: usize;
    /// # Safety
    /// AVX-512 is there and `BYTES` bytes can be read at `p`.
    unsafe fn load(p: *const u8) -> (__m512, __m512);
}

/// Format read unit by unit: a stored block, or thirty-two weights if blocks are shorter.
pub(super) trait Unit {
    /// Bytes in a unit.
    const BYTES: usize;
    /// Groups of thirty-two in a unit.
    const GROUPS: usize;
    /// Data unpacked once for all groups.
    type Scales;
    /// # Safety
    /// AVX-512 is there and `BYTES` bytes can be read at `p`.
    unsafe fn scales(p: *const u8) -> Self::Scales;
    /// Returns the weights of a group.
    ///
    /// # Safety
    /// As `scales`, and the group exists.
    unsafe fn group(p: *const u8, g: usize, scales: &Self::Scales) -> (__m512, __m512);
}

impl<L: Load> Unit for L {
    const BYTES: usize = L::BYTES;
    const GROUPS: usize = 1;
    type Scales = ();
    #[inline(always)]
    unsafe fn scales(_: *const u8) {}
    #[inline(always)]
    unsafe fn group(p: *const u8, _: usize, (): &()) -> (__m512, __m512) {
        // SAFETY: passed on from the caller.
        unsafe { L::load(p) }
    }
}

/// Integer format, unpacked as for products in 8-bit integers.
pub(super) struct Whole<L>(PhantomData<L>);
impl<L: x86_rows::Load> Unit for Whole<L> {
    const BYTES: usize = L::BYTES;
    const GROUPS: usize = L::GROUPS;
    type Scales = L::Scales;
    #[inline(always)]
    unsafe fn scales(p: *const u8) -> L::Scales {
        // SAFETY: passed on from the caller.
        unsafe { L::scales(p) }
    }
    #[inline(always)]
    unsafe fn group(p: *const u8, g: usize, scales: &L::Scales) -> (__m512, __m512) {
        // SAFETY: passed on from the caller.
        unsafe {
            let (u, d) = L::group(p, g, scales);
            let (low, high) = (_mm256_castsi256_si128(u), _mm256_extracti128_si256::<1>(u));
            let values = |u: __m128i, d: __m128, minimum: __m256| {
                let (u, d) = (_mm512_cvtepu8_epi32(u), _mm512_broadcastss_ps(d));
                if L::MINIMA > 0 {
                    let minimum = _mm512_broadcastss_ps(_mm256_castps256_ps128(minimum));
                    return _mm512_add_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(u), d), minimum);
                }
                _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(u, _mm512_set1_epi32(1 << L::ZERO))), d)
            };
            let [first, second] = x86_rows::minima_of::<L>(p, g, scales);
            (
                values(low, _mm256_castps256_ps128(d), first),
                values(high, _mm256_extractf128_ps::<1>(d), second),
            )
        }
    }
}

/// Returns `0.0, 1.0, … 15.0`.
#[inline(always)]
unsafe fn iota() -> __m512 {
    // SAFETY: the callers run with AVX-512.
    unsafe { _mm512_setr_ps(0., 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12., 13., 14., 15.) }
}

/// Looks up the low and the high nibbles of sixteen bytes in a table of sixteen values.
#[inline(always)]
unsafe fn nibbles(p: *const u8, table: __m512) -> (__m512, __m512) {
    // SAFETY: the callers run with AVX-512 and can read sixteen bytes. The permutation reads four bits of
    // each index, so the upper nibble needs no mask.
    unsafe {
        let index = _mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast()));
        (_mm512_permutexvar_ps(index, table), _mm512_permutexvar_ps(_mm512_srli_epi32::<4>(index), table))
    }
}

/// Converts the half-precision number at `p`.
#[inline(always)]
unsafe fn half(p: *const u8) -> __m128 {
    // SAFETY: the callers run with F16C and can read two bytes.
    unsafe { _mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(p.cast::<u16>().read_unaligned()))) }
}

pub(super) struct Q4_0;
impl Load for Q4_0 {
    const BYTES: usize = 18;
    #[inline(always)]
    unsafe fn load(p: *const u8) -> (__m512, __m512) {
        // SAFETY: passed on from the caller.
        unsafe {
            let d = _mm512_broadcastss_ps(half(p));
            nibbles(p.add(2), _mm512_mul_ps(d, _mm512_sub_ps(iota(), _mm512_set1_ps(8.0))))
        }
    }
}

pub(super) struct Q4_1;
impl Load for Q4_1 {
    const BYTES: usize = 20;
    #[inline(always)]
    unsafe fn load(p: *const u8) -> (__m512, __m512) {
        // SAFETY: passed on from the caller.
        unsafe {
            let pair = _mm_cvtph_ps(_mm_cvtsi32_si128(p.cast::<i32>().read_unaligned()));
            let d = _mm512_broadcastss_ps(pair);
            let m = _mm512_broadcastss_ps(_mm_movehdup_ps(pair));
            nibbles(p.add(4), _mm512_fmadd_ps(iota(), d, m))
        }
    }
}

pub(super) struct Q8_0;
impl Load for Q8_0 {
    const BYTES: usize = 34;
    #[inline(always)]
    unsafe fn load(p: *const u8) -> (__m512, __m512) {
        // SAFETY: passed on from the caller.
        unsafe {
            let d = _mm512_broadcastss_ps(half(p));
            let lo = _mm512_cvtepi8_epi32(_mm_loadu_si128(p.add(2).cast()));
            let hi = _mm512_cvtepi8_epi32(_mm_loadu_si128(p.add(18).cast()));
            (_mm512_mul_ps(d, _mm512_cvtepi32_ps(lo)), _mm512_mul_ps(d, _mm512_cvtepi32_ps(hi)))
        }
    }
}

pub(super) struct F32;
impl Load for F32 {
    const BYTES: usize = 128;
    #[inline(always)]
    unsafe fn load(p: *const u8) -> (__m512, __m512) {
        // SAFETY: passed on from the caller.
        unsafe { (_mm512_loadu_ps(p.cast()), _mm512_loadu_ps(p.add(64).cast())) }
    }
}

pub(super) struct F16;
impl Load for F16 {
    const BYTES: usize = 64;
    #[inline(always)]
    unsafe fn load(p: *const u8) -> (__m512, __m512) {
        // SAFETY: passed on from the caller.
        unsafe {
            let both = _mm512_loadu_si512(p.cast());
            let hi = _mm512_extracti64x4_epi64::<1>(both);
            (_mm512_cvtph_ps(_mm512_castsi512_si256(both)), _mm512_cvtph_ps(hi))
        }
    }
}

pub(super) struct BF16;
impl Load for BF16 {
    const BYTES: usize = 64;
    #[inline(always)]
    unsafe fn load(p: *const u8) -> (__m512, __m512) {
        // SAFETY: passed on from the caller.
        unsafe {
            let widen = |p: *const u8| {
                let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
            };
            (widen(p), widen(p.add(32)))
        }
    }
}

/// Returns the sum of products of equally long slices.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
fn dot(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let mut sums = [_mm512_setzero_ps(); 4];
    for (i, k) in (0..a.len()).step_by(16).enumerate() {
        let mask = tail_mask(a.len() - k);
        // SAFETY: lanes past the end are masked.
        let (x, y) = unsafe {
            (_mm512_maskz_loadu_ps(mask, a.as_ptr().add(k)), _mm512_maskz_loadu_ps(mask, b.as_ptr().add(k)))
        };
        sums[i % 4] = _mm512_fmadd_ps(x, y, sums[i % 4]);
    }
    _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(sums[0], sums[1]), _mm512_add_ps(sums[2], sums[3])))
}
