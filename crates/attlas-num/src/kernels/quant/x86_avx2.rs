//! AVX2 with FMA and F16C: tiles of 6 × 16 outputs, eight weights per register.

use super::narrow::x86_rows;
use super::{FEW_ROWS, Format, Strip, Tile, generic_strip, scalar};
use crate::MatRef;
use std::arch::x86_64::*;
use std::marker::PhantomData;

/// Columns of an output tile: two registers.
pub(super) const NR: usize = 16;
/// Rows of an output tile: with two registers of columns, it takes 12 registers for sums, two for weights and one for a
/// broadcast.
pub(super) const MR: usize = 6;

/// Dequantises whole blocks.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn dequantise(format: Format, bytes: &[u8], out: &mut [f32]) {
    // SAFETY: the features are on.
    unsafe { by_format!(format, values_of(bytes, out), scalar::dequantise(format, bytes, out)) }
}

/// Unpacks rows of scaled 8-bit integers.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn unpack_scaled_rows(width: usize, bytes: &[u8], out: &mut [f32]) {
    scalar::unpack_scaled_rows(width, bytes, out);
}

/// Rounds rows to bfloat16.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn pack_halves(rows: MatRef<'_, f32>, out: &mut [u8]) {
    scalar::pack_halves(rows, out);
}

/// Packs rows as scaled 8-bit integers.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn pack_scaled_rows(rows: MatRef<'_, f32>, out: &mut [u8]) {
    scalar::pack_scaled_rows(rows, out);
}

/// # Safety
/// `U` is the format; both slices hold the same number of blocks.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn values_of<U: Unit>(bytes: &[u8], out: &mut [f32]) {
    for (stored, out) in bytes.chunks_exact(U::BYTES).zip(out.chunks_exact_mut(32 * U::GROUPS)) {
        // SAFETY: a chunk holds the bytes of a unit, and the other one its values.
        unsafe {
            let scales = U::scales(stored.as_ptr());
            for (g, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
                for (i, w) in U::group(stored.as_ptr(), g, &scales).into_iter().enumerate() {
                    _mm256_storeu_ps(out.as_mut_ptr().add(8 * i), w);
                }
            }
        }
    }
}

/// Transposes `rows` rows of length `k` into `dst`, where entry `(p, r)` is at `p · rows + r`; `rows` is a
/// multiple of eight.
///
/// # Safety
/// The processor has AVX2; both slices hold `rows · k` elements.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn transpose(src: &[f32], k: usize, rows: usize, dst: &mut [f32]) {
    for r in (0..rows).step_by(8) {
        for p in (0..k / 8 * 8).step_by(8) {
            // SAFETY: rows r..r+8 and columns p..p+8 exist on both sides.
            unsafe { transpose_8x8(src.as_ptr().add(r * k + p), k, dst.as_mut_ptr().add(p * rows + r), rows) }
        }
        for p in k / 8 * 8..k {
            for i in r..r + 8 {
                dst[p * rows + i] = src[i * k + p];
            }
        }
    }
}

/// # Safety
/// Eight rows of eight elements can be read at `src` and written at `dst`.
#[inline(always)]
unsafe fn transpose_8x8(src: *const f32, src_stride: usize, dst: *mut f32, dst_stride: usize) {
    // SAFETY: passed on from the caller, who runs with AVX2.
    unsafe {
        let row: [__m256; 8] = std::array::from_fn(|i| _mm256_loadu_ps(src.add(i * src_stride)));
        let pairs: [__m256; 8] = std::array::from_fn(|i| {
            let (a, b) = (row[i / 2 * 2], row[i / 2 * 2 + 1]);
            if i % 2 == 0 { _mm256_unpacklo_ps(a, b) } else { _mm256_unpackhi_ps(a, b) }
        });
        // quads[4h + c] holds column c (and c + 4) of rows 4h..4h+4.
        let quads: [__m256; 8] = std::array::from_fn(|i| {
            let (h, c) = (i / 4, i % 4);
            let (a, b) = (pairs[4 * h + c / 2], pairs[4 * h + 2 + c / 2]);
            if c % 2 == 0 { _mm256_shuffle_ps::<0x44>(a, b) } else { _mm256_shuffle_ps::<0xee>(a, b) }
        });
        for c in 0..4 {
            let low = _mm256_permute2f128_ps::<0x20>(quads[c], quads[4 + c]);
            let high = _mm256_permute2f128_ps::<0x31>(quads[c], quads[4 + c]);
            _mm256_storeu_ps(dst.add(c * dst_stride), low);
            _mm256_storeu_ps(dst.add((c + 4) * dst_stride), high);
        }
    }
}

/// Computes one output tile.
///
/// # Safety
/// As [`super::run_tile`].
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn tile(t: &Tile) {
    // SAFETY: passed on from the caller.
    unsafe {
        match t.rows {
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
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn tile_of<const M: usize>(t: &Tile) {
    let mut sums = [[_mm256_setzero_ps(); 2]; M];
    let (mut x, mut w) = (t.x, t.panel);
    for _ in 0..t.depth {
        // SAFETY: the panel holds `depth · NR` elements, x holds M rows of `depth`.
        unsafe {
            let w0 = _mm256_loadu_ps(w);
            let w1 = _mm256_loadu_ps(w.add(8));
            for (i, sum) in sums.iter_mut().enumerate() {
                let a = _mm256_broadcast_ss(&*x.add(i * t.x_stride));
                sum[0] = _mm256_fmadd_ps(a, w0, sum[0]);
                sum[1] = _mm256_fmadd_ps(a, w1, sum[1]);
            }
            x = x.add(1);
            w = w.add(NR);
        }
    }
    let masks = [tail_mask(t.cols), tail_mask(t.cols.saturating_sub(8))];
    for (i, sum) in sums.iter().enumerate() {
        for (half, &mask) in masks.iter().enumerate() {
            // SAFETY: the output holds M rows of `cols` elements; masked lanes are not touched. The offset
            // is formed by wrapping because it may lie past the output where the whole mask is empty.
            unsafe {
                let at = t.out.wrapping_add(i * t.out_stride + 8 * half);
                let old = if t.accumulate { _mm256_maskload_ps(at, mask) } else { _mm256_setzero_ps() };
                _mm256_maskstore_ps(at, mask, _mm256_add_ps(old, sum[half]));
            }
        }
    }
}

/// Returns sign bits for the first `n` of eight lanes; for all of them if `n` is larger.
#[target_feature(enable = "avx2,fma,f16c")]
fn tail_mask(n: usize) -> __m256i {
    let lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    _mm256_cmpgt_epi32(_mm256_set1_epi32(n.min(8) as i32), lane)
}

/// Multiplies a strip of weight rows with few rows of x.
///
/// # Safety
/// As [`super::run_strip`].
#[target_feature(enable = "avx2,fma,f16c")]
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
#[target_feature(enable = "avx2,fma,f16c")]
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
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn rows_by<U: Unit, const M: usize>(s: &Strip<'_>) {
    let cols = s.weight.cols;
    let whole = cols / 32 * 32;
    let x: [*const f32; M] = std::array::from_fn(|n| s.x.row(n).as_ptr());
    for r in s.rows.clone() {
        let row = s.weight.row(r).as_ptr();
        let mut sums = [[_mm256_setzero_ps(); 2]; M];
        for unit in 0..whole / 32 / U::GROUPS {
            // SAFETY: a row holds units of U::BYTES bytes, x holds `cols` elements per row.
            unsafe {
                let p = row.add(unit * U::BYTES);
                let scales = U::scales(p);
                for g in 0..U::GROUPS {
                    let w = U::group(p, g, &scales);
                    let k = 32 * (unit * U::GROUPS + g);
                    for (sum, x) in sums.iter_mut().zip(x) {
                        for (i, w) in w.iter().enumerate() {
                            sum[i % 2] = _mm256_fmadd_ps(*w, _mm256_loadu_ps(x.add(k + 8 * i)), sum[i % 2]);
                        }
                    }
                }
            }
        }
        let mut totals: [f32; M] =
            std::array::from_fn(|n| horizontal_sum(_mm256_add_ps(sums[n][0], sums[n][1])));
        if whole < cols {
            // Only formats with blocks of one value end inside a group of 32.
            let mut rest = [0.0f32; 32];
            let at = whole / 32 * U::BYTES;
            scalar::dequantise(s.weight.format, &s.weight.row(r)[at..], &mut rest[..cols - whole]);
            for (n, total) in totals.iter_mut().enumerate() {
                *total += scalar::dot(&rest[..cols - whole], &s.x.row(n)[whole..]);
            }
        }
        for (n, total) in totals.iter().enumerate() {
            // SAFETY: the output holds `M · weight.rows` elements.
            unsafe { *s.out.add(n * s.weight.rows + r) = *total };
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn horizontal_sum(v: __m256) -> f32 {
    let four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
}

/// Thirty-two consecutive weights in four registers.
trait Load {
    /// Bytes of thirty-two weights.
    const BYTES: usize;
    /// # Safety
    /// AVX2, FMA and F16C are there and `BYTES` bytes can be read at `p`.
    unsafe fn load(p: *const u8) -> [__m256; 4];
}

/// Format read unit by unit: a stored block, or thirty-two weights if blocks are shorter.
trait Unit {
    /// Bytes in a unit.
    const BYTES: usize;
    /// Groups of thirty-two in a unit.
    const GROUPS: usize;
    /// Data unpacked once for all groups.
    type Scales;
    /// # Safety
    /// AVX2, FMA and F16C are there and `BYTES` bytes can be read at `p`.
    unsafe fn scales(p: *const u8) -> Self::Scales;
    /// Returns the weights of a group.
    ///
    /// # Safety
    /// As `scales`, and the group exists.
    unsafe fn group(p: *const u8, g: usize, scales: &Self::Scales) -> [__m256; 4];
}

impl<L: Load> Unit for L {
    const BYTES: usize = L::BYTES;
    const GROUPS: usize = 1;
    type Scales = ();
    #[inline(always)]
    unsafe fn scales(_: *const u8) {}
    #[inline(always)]
    unsafe fn group(p: *const u8, _: usize, (): &()) -> [__m256; 4] {
        // SAFETY: passed on from the caller.
        unsafe { L::load(p) }
    }
}

/// Integer format, unpacked as for products in 8-bit integers.
struct Whole<L>(PhantomData<L>);
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
    unsafe fn group(p: *const u8, g: usize, scales: &L::Scales) -> [__m256; 4] {
        // SAFETY: passed on from the caller.
        unsafe {
            let (u, d) = L::group(p, g, scales);
            let d =
                [_mm256_castps256_ps128(d), _mm256_extractf128_ps::<1>(d)].map(|d| _mm256_broadcastss_ps(d));
            let minima = x86_rows::minima_of::<L>(p, g, scales);
            let (low, high) = (_mm256_castsi256_si128(u), _mm256_extracti128_si256::<1>(u));
            let eights = [low, _mm_srli_si128::<8>(low), high, _mm_srli_si128::<8>(high)];
            std::array::from_fn(|i| {
                let u = _mm256_cvtepu8_epi32(eights[i]);
                if L::MINIMA > 0 {
                    return _mm256_add_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(u), d[i / 2]), minima[i / 2]);
                }
                let moved = _mm256_sub_epi32(u, _mm256_set1_epi32(1 << L::ZERO));
                _mm256_mul_ps(_mm256_cvtepi32_ps(moved), d[i / 2])
            })
        }
    }
}

/// Returns the half-precision number at `p` in every lane.
#[inline(always)]
unsafe fn half(p: *const u8) -> __m256 {
    // SAFETY: the callers run with F16C and can read two bytes.
    unsafe {
        _mm256_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(p.cast::<u16>().read_unaligned()))))
    }
}

/// Unpacks the low nibbles of sixteen bytes, then the high ones.
#[inline(always)]
unsafe fn nibbles(p: *const u8) -> [__m256; 4] {
    // SAFETY: the callers run with AVX2 and can read sixteen bytes.
    unsafe {
        let bytes = _mm_loadu_si128(p.cast());
        let low = _mm_and_si128(bytes, _mm_set1_epi8(15));
        let high = _mm_and_si128(_mm_srli_epi16::<4>(bytes), _mm_set1_epi8(15));
        [low, _mm_srli_si128::<8>(low), high, _mm_srli_si128::<8>(high)]
            .map(|b| _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(b)))
    }
}

struct Q4_0;
impl Load for Q4_0 {
    const BYTES: usize = 18;
    #[inline(always)]
    unsafe fn load(p: *const u8) -> [__m256; 4] {
        // SAFETY: passed on from the caller.
        unsafe {
            let (d, eight) = (half(p), _mm256_set1_ps(8.0));
            nibbles(p.add(2)).map(|q| _mm256_mul_ps(d, _mm256_sub_ps(q, eight)))
        }
    }
}

struct Q4_1;
impl Load for Q4_1 {
    const BYTES: usize = 20;
    #[inline(always)]
    unsafe fn load(p: *const u8) -> [__m256; 4] {
        // SAFETY: passed on from the caller.
        unsafe {
            let (d, m) = (half(p), half(p.add(2)));
            nibbles(p.add(4)).map(|q| _mm256_fmadd_ps(q, d, m))
        }
    }
}

struct Q8_0;
impl Load for Q8_0 {
    const BYTES: usize = 34;
    #[inline(always)]
    unsafe fn load(p: *const u8) -> [__m256; 4] {
        // SAFETY: passed on from the caller.
        unsafe {
            let d = half(p);
            std::array::from_fn(|i| {
                let q = _mm256_cvtepi8_epi32(_mm_loadl_epi64(p.add(2 + 8 * i).cast()));
                _mm256_mul_ps(d, _mm256_cvtepi32_ps(q))
            })
        }
    }
}

struct F32;
impl Load for F32 {
    const BYTES: usize = 128;
    #[inline(always)]
    unsafe fn load(p: *const u8) -> [__m256; 4] {
        // SAFETY: passed on from the caller.
        std::array::from_fn(|i| unsafe { _mm256_loadu_ps(p.add(32 * i).cast()) })
    }
}

struct F16;
impl Load for F16 {
    const BYTES: usize = 64;
    #[inline(always)]
    unsafe fn load(p: *const u8) -> [__m256; 4] {
        // SAFETY: passed on from the caller.
        std::array::from_fn(|i| unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.add(16 * i).cast())) })
    }
}

struct BF16;
impl Load for BF16 {
    const BYTES: usize = 64;
    #[inline(always)]
    unsafe fn load(p: *const u8) -> [__m256; 4] {
        // SAFETY: passed on from the caller.
        std::array::from_fn(|i| unsafe {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.add(16 * i).cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        })
    }
}

/// Returns the sum of products of equally long slices.
#[target_feature(enable = "avx2,fma,f16c")]
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [_mm256_setzero_ps(); 4];
    let (a32, a_rest) = a.as_chunks::<32>();
    let (b32, b_rest) = b.as_chunks::<32>();
    for (x, y) in a32.iter().zip(b32) {
        for (i, sum) in sums.iter_mut().enumerate() {
            // SAFETY: both chunks hold 32 elements.
            let (x, y) =
                unsafe { (_mm256_loadu_ps(x.as_ptr().add(8 * i)), _mm256_loadu_ps(y.as_ptr().add(8 * i))) };
            *sum = _mm256_fmadd_ps(x, y, *sum);
        }
    }
    let sum = _mm256_add_ps(_mm256_add_ps(sums[0], sums[1]), _mm256_add_ps(sums[2], sums[3]));
    horizontal_sum(sum) + scalar::dot(a_rest, b_rest)
}
