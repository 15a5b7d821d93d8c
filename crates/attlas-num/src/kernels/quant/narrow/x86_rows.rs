//! Strips of weight rows on registers of 32 bytes: each weight row is unpacked as it is read and multiplied with all rows of
//! x, group by group.

use super::x86_avx2::{Dot, Pairs, Vnni};
use super::{BLOCK, FEW_ROWS, Format, Strip, at, scalar};
use std::arch::x86_64::*;

/// VNNI of AVX-512.
struct Vnni512;
impl Dot for Vnni512 {
    const WHOLE: bool = true;
    #[inline(always)]
    unsafe fn dot<const WIDE: bool>(sum: __m256i, u: __m256i, a: __m256i) -> __m256i {
        // SAFETY: the callers run with AVX-512 VL and VNNI.
        unsafe { _mm256_dpbusd_epi32(sum, u, a) }
    }
}

/// Computes a strip without VNNI.
///
/// # Safety
/// As [`super::run_strip`].
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn pairs(s: &Strip<'_>) {
    // SAFETY: passed on from the caller.
    unsafe { strip::<Pairs>(s) }
}

/// Computes a strip with AVX-VNNI.
///
/// # Safety
/// As [`super::run_strip`].
#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
pub(super) unsafe fn vnni(s: &Strip<'_>) {
    // SAFETY: passed on from the caller.
    unsafe { strip::<Vnni>(s) }
}

/// Computes a strip with AVX-512.
///
/// # Safety
/// As [`super::run_strip`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn vnni_512(s: &Strip<'_>) {
    // SAFETY: passed on from the caller.
    unsafe { strip::<Vnni512>(s) }
}

/// # Safety
/// As [`super::run_strip`], and the processor has what `D` needs.
#[inline(always)]
unsafe fn strip<D: Dot>(s: &Strip<'_>) {
    let blocks = s.weight.cols / BLOCK;
    assert!(s.x.iter().flatten().all(|x| x.len() == blocks * at::FEW) && s.rows.end <= s.weight.rows);
    // SAFETY: passed on from the caller; rows of x hold all parts of `blocks` blocks.
    unsafe {
        match s.weight.format {
            Format::Q4_0 => rows_of::<Q4_0, D>(s),
            Format::Q4_1 => rows_of::<Q4_1, D>(s),
            Format::Q5_0 => rows_of::<Q5_0, D>(s),
            Format::Q5_1 => rows_of::<Q5_1, D>(s),
            Format::Q8_0 => rows_of::<Q8_0, D>(s),
            Format::Iq4Nl => rows_of::<Iq4Nl, D>(s),
            Format::Mxfp4 => rows_of::<Mxfp4, D>(s),
            Format::Q4K => rows_of::<Q4K, D>(s),
            Format::Q5K => rows_of::<Q5K, D>(s),
            Format::Q6K => rows_of::<Q6K, D>(s),
            Format::Iq4Xs => rows_of::<Iq4Xs, D>(s),
            Format::Q2K => rows_of::<Q2K, D>(s),
            Format::Q3K => rows_of::<Q3K, D>(s),
            Format::Q8K => rows_of::<Q8K, D>(s),
            Format::F32 | Format::F16 | Format::BF16 => {}
        }
    }
}

/// # Safety
/// As [`strip`]; `L` is the strip's format.
#[inline(always)]
unsafe fn rows_of<L: Load, D: Dot>(s: &Strip<'_>) {
    // SAFETY: passed on from the caller.
    unsafe {
        match s.x.len() {
            1 => rows_by::<L, D, 1>(s),
            2 => rows_by::<L, D, 2>(s),
            _ => rows_by::<L, D, FEW_ROWS>(s),
        }
    }
}

/// # Safety
/// As [`rows_of`], and `M` is the number of rows of x.
#[inline(always)]
unsafe fn rows_by<L: Load, D: Dot, const M: usize>(s: &Strip<'_>) {
    let blocks = s.weight.cols / BLOCK;
    let x: [[*const u32; 2]; M] = std::array::from_fn(|n| s.x[n].map(<[u32]>::as_ptr));
    // SAFETY: a row holds `blocks / GROUPS` units of `BYTES` bytes, x all parts of `blocks` blocks; the output holds
    // `M · weight.rows` elements.
    unsafe {
        for r in s.rows.clone() {
            let mut p = s.weight.row(r).as_ptr();
            s.weight.prefetch_behind(r..r + 1);
            // Groups alternate between two sums, so neither waits for the other.
            let mut sums = [[_mm256_setzero_ps(); 2]; M];
            let mut of_minima = [_mm256_setzero_ps(); M];
            let mut b = 0;
            while b < blocks {
                let units = if L::GROUPS == 1 && b + 1 < blocks { 2 } else { 1 };
                for unit in 0..units {
                    let (first, scales) = (b + unit, L::scales(p));
                    for g in 0..L::GROUPS {
                        let (b, (u, d)) = (first + g, L::group(p, g, &scales));
                        for n in 0..2 * M {
                            let (n, x) = (n / 2, x[n / 2][n % 2]);
                            let scale = f32::from_bits(*x.add(blocks * at::SCALE + b));
                            // Most blocks have no errors: the branch repeats in every weight row, and is predicted.
                            if scale == 0.0 {
                                continue;
                            }
                            let start = if L::MINIMA > 0 || L::WIDE && !D::WHOLE {
                                _mm256_setzero_si256()
                            } else {
                                let lanes = x.add(blocks * at::LANES + 8 * b);
                                _mm256_sll_epi32(_mm256_loadu_si256(lanes.cast()), _mm_cvtsi32_si128(L::ZERO))
                            };
                            let a = _mm256_loadu_si256(x.add(8 * b).cast());
                            let products = if L::WIDE {
                                D::dot::<true>(start, u, a)
                            } else {
                                D::dot::<false>(start, u, a)
                            };
                            let products = _mm256_mul_ps(_mm256_cvtepi32_ps(products), d);
                            let sum = &mut sums[n][(unit + g) % 2];
                            *sum = _mm256_fmadd_ps(products, _mm256_set1_ps(scale), *sum);
                        }
                    }
                    for h in 0..L::MINIMA {
                        let minima = L::minima(p, h, &scales);
                        for n in 0..M {
                            let times = x[n].map(|x| {
                                let times = x.add(blocks * at::TIMES + first).cast();
                                match (L::MINIMA, L::GROUPS) {
                                    (1, 1) => _mm256_zextps128_ps256(_mm_load_ss(times)),
                                    (1, _) => _mm256_loadu_ps(times),
                                    _ => _mm256_loadu_ps(
                                        x.add(blocks * at::TIMES_HALVES + 2 * first + 8 * h).cast(),
                                    ),
                                }
                            });
                            let times = _mm256_add_ps(times[0], times[1]);
                            of_minima[n] = _mm256_fmadd_ps(minima, times, of_minima[n]);
                        }
                    }
                    p = p.add(L::BYTES);
                }
                b += units * L::GROUPS;
            }
            for n in 0..M {
                let mut sum = _mm256_add_ps(sums[n][0], sums[n][1]);
                if L::MINIMA > 0 {
                    sum = _mm256_add_ps(sum, of_minima[n]);
                }
                *s.out.add(n * s.weight.rows + r) = horizontal_sum(sum);
            }
        }
    }
}

#[inline(always)]
unsafe fn horizontal_sum(v: __m256) -> f32 {
    // SAFETY: the callers run with AVX2.
    unsafe {
        let four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
    }
}

/// Format read unit by unit, where a unit is a stored block.
pub(in super::super) trait Load {
    /// Bytes in a unit.
    const BYTES: usize;
    /// Groups of 32 in a unit.
    const GROUPS: usize;
    /// Registers of minima in a unit: one for all groups, or two if groups are of 16.
    const MINIMA: usize = 0;
    /// True if integers exceed 127.
    const WIDE: bool = false;
    /// Base-2 logarithm of the zero point, if there are no minima.
    const ZERO: i32 = 0;
    /// Data unpacked once for all groups.
    type Scales;
    /// # Safety
    /// AVX2, FMA and F16C are there and `BYTES` bytes can be read at `p`.
    unsafe fn scales(p: *const u8) -> Self::Scales;
    /// Returns the integers of a group and the scale of each lane.
    ///
    /// # Safety
    /// As `scales`, and the group exists.
    unsafe fn group(p: *const u8, g: usize, scales: &Self::Scales) -> (__m256i, __m256);
    /// Returns a register of minima; if the unit is one group, in its first lane.
    ///
    /// # Safety
    /// As `scales`.
    #[inline(always)]
    unsafe fn minima(_p: *const u8, _h: usize, _scales: &Self::Scales) -> __m256 {
        // SAFETY: passed on from the caller.
        unsafe { _mm256_setzero_ps() }
    }
}

/// Returns the minima of both halves of group `g`, each in every lane.
///
/// # Safety
/// As [`Load::group`].
#[inline(always)]
pub(in super::super) unsafe fn minima_of<L: Load>(p: *const u8, g: usize, scales: &L::Scales) -> [__m256; 2] {
    // SAFETY: passed on from the caller.
    unsafe {
        let lane = |h: usize, i: usize| {
            _mm256_permutevar8x32_ps(L::minima(p, h, scales), _mm256_set1_epi32(i as i32))
        };
        match L::MINIMA {
            0 => [_mm256_setzero_ps(); 2],
            1 => [lane(0, g); 2],
            _ => [lane(g / 4, 2 * (g % 4)), lane(g / 4, 2 * (g % 4) + 1)],
        }
    }
}

/// Converts the half-precision number at `p`.
#[inline(always)]
unsafe fn half(p: *const u8) -> __m128 {
    // SAFETY: the callers run with F16C and can read two bytes.
    unsafe { _mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(p.cast::<u16>().read_unaligned()))) }
}

/// Returns the half-precision number at `p` in every lane.
#[inline(always)]
pub(super) unsafe fn halves(p: *const u8) -> __m256 {
    // SAFETY: as `half`.
    unsafe { _mm256_broadcastss_ps(half(p)) }
}

/// Unpacks the low halves of sixteen bytes, then the high ones.
#[inline(always)]
unsafe fn nibbles(p: *const u8) -> __m256i {
    // SAFETY: the callers run with AVX2 and can read sixteen bytes.
    unsafe {
        let both = _mm256_broadcastsi128_si256(_mm_loadu_si128(p.cast()));
        let both = _mm256_srlv_epi64(both, _mm256_setr_epi64x(0, 0, 4, 4));
        _mm256_and_si256(both, _mm256_set1_epi8(15))
    }
}

/// Returns bit i of the word at `p` as 16 in byte i.
#[inline(always)]
unsafe fn fifth_bits(p: *const u8) -> __m256i {
    // SAFETY: the callers run with AVX2 and can read four bytes.
    unsafe {
        let word = _mm256_set1_epi32(p.cast::<i32>().read_unaligned());
        let spread =
            _mm256_setr_epi64x(0, 0x0101_0101_0101_0101, 0x0202_0202_0202_0202, 0x0303_0303_0303_0303);
        let bit = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64 as i64);
        let bytes = _mm256_and_si256(_mm256_shuffle_epi8(word, spread), bit);
        _mm256_and_si256(_mm256_cmpeq_epi8(bytes, bit), _mm256_set1_epi8(16))
    }
}

/// Looks up both halves of sixteen bytes in a table.
#[inline(always)]
unsafe fn looked_up(p: *const u8, table: &[u8; 16]) -> __m256i {
    // SAFETY: the callers run with AVX2 and can read sixteen bytes.
    unsafe {
        let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
        _mm256_shuffle_epi8(table, nibbles(p))
    }
}

/// Implements formats with a block of 32 that starts with a half-precision scale.
macro_rules! blocks_of_32 {
    ($name:ident, $bytes:literal, |$p:ident| $numbers:expr, $($rest:tt)*) => {
        pub(in super::super) struct $name;
        impl Load for $name {
            const BYTES: usize = $bytes;
            const GROUPS: usize = 1;
            $($rest)*
            type Scales = __m128;
            #[inline(always)]
            unsafe fn scales(p: *const u8) -> __m128 {
                // SAFETY: passed on from the caller; a block has eight bytes and more.
                unsafe { _mm_cvtph_ps(_mm_loadl_epi64(p.cast())) }
            }
            #[inline(always)]
            unsafe fn group($p: *const u8, _: usize, scales: &__m128) -> (__m256i, __m256) {
                // SAFETY: passed on from the caller.
                unsafe { ($numbers, _mm256_broadcastss_ps(*scales)) }
            }
        }
    };
}

/// Reads the minimum of a block from the half-precision number after the scale.
macro_rules! minimum_after_scale {
    () => {
        const MINIMA: usize = 1;
        #[inline(always)]
        unsafe fn minima(_: *const u8, _: usize, scales: &__m128) -> __m256 {
            // SAFETY: passed on from the caller.
            unsafe { _mm256_zextps128_ps256(_mm_move_ss(_mm_setzero_ps(), _mm_movehdup_ps(*scales))) }
        }
    };
}

// Braces keep the formatter from putting commas between items.
blocks_of_32! { Q4_0, 18, |p| nibbles(p.add(2)), const ZERO: i32 = 3; }
blocks_of_32! { Q4_1, 20, |p| nibbles(p.add(4)), minimum_after_scale!(); }
blocks_of_32! { Q5_0, 22, |p| _mm256_or_si256(nibbles(p.add(6)), fifth_bits(p.add(2))), const ZERO: i32 = 4; }
blocks_of_32! { Q5_1, 24, |p| _mm256_or_si256(nibbles(p.add(8)), fifth_bits(p.add(4))), minimum_after_scale!(); }
blocks_of_32! {
    Q8_0, 34, |p| _mm256_xor_si256(_mm256_loadu_si256(p.add(2).cast()), _mm256_set1_epi8(-128)),
    const ZERO: i32 = 7;
    const WIDE: bool = true;
}
blocks_of_32! {
    Iq4Nl, 18, |p| looked_up(p.add(2), &scalar::IQ4_BYTES),
    const ZERO: i32 = 7;
    const WIDE: bool = true;
}

pub(in super::super) struct Mxfp4;
impl Load for Mxfp4 {
    const BYTES: usize = 17;
    const GROUPS: usize = 1;
    const ZERO: i32 = 4;
    type Scales = f32;
    #[inline(always)]
    unsafe fn scales(p: *const u8) -> f32 {
        // SAFETY: passed on from the caller.
        super::super::scalar::mxfp4_scale(unsafe { *p })
    }
    #[inline(always)]
    unsafe fn group(p: *const u8, _: usize, scales: &f32) -> (__m256i, __m256) {
        // SAFETY: passed on from the caller.
        unsafe { (looked_up(p.add(1), &scalar::MXFP4_BYTES), _mm256_set1_ps(*scales)) }
    }
}

/// Unpacks the scales and minima of Q4_K and Q5_K as eight bytes each.
#[inline(always)]
pub(super) unsafe fn six_bits(p: *const u8) -> (u64, u64) {
    // SAFETY: the callers can read a block.
    let [a, b, c] = unsafe { p.add(4).cast::<[u32; 3]>().read_unaligned() };
    let two = |x: u32| (x >> 6 & 0x0303_0303) << 4;
    let join = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
    let scales = join(a & 0x3f3f_3f3f, c & 0x0f0f_0f0f | two(a));
    let minima = join(b & 0x3f3f_3f3f, c >> 4 & 0x0f0f_0f0f | two(b));
    (scales, minima)
}

/// Returns eight unsigned bytes times a scale.
#[inline(always)]
pub(super) unsafe fn eight(bytes: u64, scale: __m256) -> __m256 {
    // SAFETY: the callers run with AVX2.
    unsafe {
        let wide = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(bytes as i64));
        _mm256_mul_ps(_mm256_cvtepi32_ps(wide), scale)
    }
}

/// Stores eight numbers to be read one at a time.
#[inline(always)]
unsafe fn spilled(v: __m256) -> [f32; 8] {
    let mut out = [0.0; 8];
    // SAFETY: the callers run with AVX2; the array holds eight numbers.
    unsafe { _mm256_storeu_ps(out.as_mut_ptr(), v) };
    out
}

/// Returns the low or the high halves of the 32 bytes that group `g` shares with its neighbour.
#[inline(always)]
unsafe fn half_of_pair(p: *const u8, g: usize) -> __m256i {
    // SAFETY: the callers run with AVX2 and can read the bytes of all groups.
    unsafe {
        let both = _mm256_loadu_si256(p.add(32 * (g / 2)).cast());
        let low = if g.is_multiple_of(2) { both } else { _mm256_srli_epi16::<4>(both) };
        _mm256_and_si256(low, _mm256_set1_epi8(15))
    }
}

/// Implements the layout shared by Q4_K and Q5_K.
macro_rules! six_bit_scales {
    () => {
        const GROUPS: usize = 8;
        const MINIMA: usize = 1;
        type Scales = ([f32; 8], __m256);
        #[inline(always)]
        unsafe fn scales(p: *const u8) -> ([f32; 8], __m256) {
            // SAFETY: passed on from the caller.
            unsafe {
                let (scales, minima) = six_bits(p);
                let least = _mm256_xor_ps(halves(p.add(2)), _mm256_set1_ps(-0.0));
                (spilled(eight(scales, halves(p))), eight(minima, least))
            }
        }
        #[inline(always)]
        unsafe fn minima(_: *const u8, _: usize, scales: &([f32; 8], __m256)) -> __m256 {
            scales.1
        }
    };
}

pub(in super::super) struct Q4K;
impl Load for Q4K {
    const BYTES: usize = 144;
    six_bit_scales!();
    #[inline(always)]
    unsafe fn group(p: *const u8, g: usize, scales: &([f32; 8], __m256)) -> (__m256i, __m256) {
        // SAFETY: passed on from the caller.
        unsafe { (half_of_pair(p.add(16), g), _mm256_set1_ps(scales.0[g])) }
    }
}

pub(in super::super) struct Q5K;
impl Load for Q5K {
    const BYTES: usize = 176;
    six_bit_scales!();
    #[inline(always)]
    unsafe fn group(p: *const u8, g: usize, scales: &([f32; 8], __m256)) -> (__m256i, __m256) {
        // SAFETY: passed on from the caller.
        unsafe {
            let bit = _mm256_set1_epi8((1u8 << g) as i8);
            let tops = _mm256_and_si256(_mm256_loadu_si256(p.add(16).cast()), bit);
            let top = _mm256_and_si256(_mm256_cmpeq_epi8(tops, bit), _mm256_set1_epi8(16));
            (_mm256_or_si256(half_of_pair(p.add(48), g), top), _mm256_set1_ps(scales.0[g]))
        }
    }
}

/// Returns two bits of each of the 32 bytes that group `g` shares with three neighbours.
#[inline(always)]
unsafe fn two_bits(p: *const u8, g: usize) -> __m256i {
    // SAFETY: the callers run with AVX2 and can read the bytes of all groups.
    unsafe {
        let four = _mm256_loadu_si256(p.add(32 * (g / 4)).cast());
        let shifted = _mm256_srl_epi16(four, _mm_cvtsi32_si128(2 * (g % 4) as i32));
        _mm256_and_si256(shifted, _mm256_set1_epi8(3))
    }
}

/// Stores sixteen numbers to be read one at a time.
#[inline(always)]
unsafe fn sixteen([low, high]: [__m256; 2]) -> [f32; 16] {
    let mut out = [0.0; 16];
    // SAFETY: the callers run with AVX2; the array holds sixteen numbers.
    unsafe {
        _mm256_storeu_ps(out.as_mut_ptr(), low);
        _mm256_storeu_ps(out.as_mut_ptr().add(8), high);
    }
    out
}

/// Returns the scales of both halves of a group, each in its lanes.
#[inline(always)]
unsafe fn of_halves(low: f32, high: f32) -> __m256 {
    // SAFETY: the callers run with AVX2.
    unsafe { _mm256_set_m128(_mm_set1_ps(high), _mm_set1_ps(low)) }
}

pub(in super::super) struct Q6K;
impl Load for Q6K {
    const BYTES: usize = 210;
    const GROUPS: usize = 8;
    const ZERO: i32 = 5;
    type Scales = [f32; 16];
    #[inline(always)]
    unsafe fn scales(p: *const u8) -> [f32; 16] {
        // SAFETY: passed on from the caller.
        unsafe {
            let all = halves(p.add(208));
            let of = |at: usize| _mm256_cvtepi8_epi32(_mm_loadl_epi64(p.add(192 + at).cast()));
            sixteen([of(0), of(8)].map(|x| _mm256_mul_ps(_mm256_cvtepi32_ps(x), all)))
        }
    }
    #[inline(always)]
    unsafe fn group(p: *const u8, g: usize, scales: &[f32; 16]) -> (__m256i, __m256) {
        let (half, quarter) = (g / 4, g % 4);
        // SAFETY: passed on from the caller.
        unsafe {
            let low = _mm256_loadu_si256(p.add(64 * half + 32 * (quarter % 2)).cast());
            let low = if quarter < 2 { low } else { _mm256_srli_epi16::<4>(low) };
            let high = _mm256_loadu_si256(p.add(128 + 32 * half).cast());
            let high = match quarter {
                0 => _mm256_slli_epi16::<4>(high),
                1 => _mm256_slli_epi16::<2>(high),
                2 => high,
                _ => _mm256_srli_epi16::<2>(high),
            };
            let low = _mm256_and_si256(low, _mm256_set1_epi8(15));
            let u = _mm256_or_si256(low, _mm256_and_si256(high, _mm256_set1_epi8(48)));
            (u, of_halves(scales[2 * g], scales[2 * g + 1]))
        }
    }
}

pub(in super::super) struct Iq4Xs;
impl Load for Iq4Xs {
    const BYTES: usize = 136;
    const GROUPS: usize = 8;
    const ZERO: i32 = 7;
    const WIDE: bool = true;
    type Scales = f32;
    #[inline(always)]
    unsafe fn scales(p: *const u8) -> f32 {
        // SAFETY: passed on from the caller.
        unsafe { _mm_cvtss_f32(half(p)) }
    }
    #[inline(always)]
    unsafe fn group(p: *const u8, g: usize, scales: &f32) -> (__m256i, __m256) {
        // SAFETY: passed on from the caller.
        unsafe {
            let low = *p.add(4 + g / 2) >> (4 * (g % 2)) & 15;
            let high = p.add(2).cast::<u16>().read_unaligned() >> (2 * g) & 3;
            let scale = (i32::from(low) | i32::from(high) << 4) - 32;
            (looked_up(p.add(8 + 16 * g), &scalar::IQ4_BYTES), _mm256_set1_ps(*scales * scale as f32))
        }
    }
}

pub(in super::super) struct Q2K;
impl Load for Q2K {
    const BYTES: usize = 84;
    const GROUPS: usize = 8;
    const MINIMA: usize = 2;
    type Scales = ([f32; 16], [__m256; 2]);
    #[inline(always)]
    unsafe fn scales(p: *const u8) -> ([f32; 16], [__m256; 2]) {
        // SAFETY: passed on from the caller.
        unsafe {
            let [low, high] = p.cast::<[u64; 2]>().read_unaligned();
            let part = |x: u64, shift: u32| x >> shift & 0x0f0f_0f0f_0f0f_0f0f;
            let least = _mm256_xor_ps(halves(p.add(82)), _mm256_set1_ps(-0.0));
            let minima = [eight(part(low, 4), least), eight(part(high, 4), least)];
            (sixteen([part(low, 0), part(high, 0)].map(|x| eight(x, halves(p.add(80))))), minima)
        }
    }
    #[inline(always)]
    unsafe fn group(p: *const u8, g: usize, scales: &Self::Scales) -> (__m256i, __m256) {
        // SAFETY: passed on from the caller.
        unsafe { (two_bits(p.add(16), g), of_halves(scales.0[2 * g], scales.0[2 * g + 1])) }
    }
    #[inline(always)]
    unsafe fn minima(_: *const u8, h: usize, scales: &Self::Scales) -> __m256 {
        scales.1[h]
    }
}

pub(in super::super) struct Q3K;
impl Load for Q3K {
    const BYTES: usize = 110;
    const GROUPS: usize = 8;
    const ZERO: i32 = 2;
    type Scales = [f32; 16];
    #[inline(always)]
    unsafe fn scales(p: *const u8) -> [f32; 16] {
        // SAFETY: passed on from the caller.
        unsafe {
            let [a, b, c] = p.add(96).cast::<[u32; 3]>().read_unaligned();
            let join = |low: u32, high: u32| low & 0x0f0f_0f0f | (high & 0x0303_0303) << 4;
            let six = |shift: u32| {
                let (first, second) = (join(a >> shift, c >> shift), join(b >> shift, c >> (shift + 2)));
                let wide = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(
                    (u64::from(first) | u64::from(second) << 32) as i64,
                ));
                let number = _mm256_cvtepi32_ps(_mm256_sub_epi32(wide, _mm256_set1_epi32(32)));
                _mm256_mul_ps(number, halves(p.add(108)))
            };
            sixteen([six(0), six(4)])
        }
    }
    #[inline(always)]
    unsafe fn group(p: *const u8, g: usize, scales: &[f32; 16]) -> (__m256i, __m256) {
        // SAFETY: passed on from the caller.
        unsafe {
            let bit = _mm256_set1_epi8((1u8 << g) as i8);
            let tops = _mm256_and_si256(_mm256_loadu_si256(p.cast()), bit);
            let top = _mm256_and_si256(_mm256_cmpeq_epi8(tops, bit), _mm256_set1_epi8(4));
            let u = _mm256_or_si256(two_bits(p.add(32), g), top);
            (u, of_halves(scales[2 * g], scales[2 * g + 1]))
        }
    }
}

pub(in super::super) struct Q8K;
impl Load for Q8K {
    const BYTES: usize = 292;
    const GROUPS: usize = 8;
    const ZERO: i32 = 7;
    const WIDE: bool = true;
    type Scales = f32;
    #[inline(always)]
    unsafe fn scales(p: *const u8) -> f32 {
        // SAFETY: passed on from the caller.
        unsafe { p.cast::<f32>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn group(p: *const u8, g: usize, scales: &f32) -> (__m256i, __m256) {
        // SAFETY: passed on from the caller.
        unsafe {
            let stored = _mm256_loadu_si256(p.add(4 + 32 * g).cast());
            (_mm256_xor_si256(stored, _mm256_set1_epi8(-128)), _mm256_set1_ps(*scales))
        }
    }
}
