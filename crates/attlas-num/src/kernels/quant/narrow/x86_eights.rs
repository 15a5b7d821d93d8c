//! Strips of weight rows on registers of 64 bytes, for AVX-512: eight groups at a time, two to a register.
//!
//! One group at a time takes some fourteen instructions for 20 bytes of Q4_1: cores run them more slowly than memory
//! delivers the bytes. Here the scales of eight groups are converted and multiplied at once, and so are the products of
//! two groups, which halves the number of instructions.

use super::x86_rows::{
    self, Iq4Nl, Load, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0, eight, halves, six_bits,
};
use super::{BLOCK, FEW_ROWS, Format, Strip, at, scalar};
use std::arch::x86_64::*;

/// Computes a strip.
///
/// # Safety
/// As [`super::run_strip`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn strip(s: &Strip<'_>) {
    let blocks = s.weight.cols / BLOCK;
    assert!(s.x.iter().flatten().all(|x| x.len() == blocks * at::FEW) && s.rows.end <= s.weight.rows);
    // SAFETY: passed on from the caller; rows of x hold all parts of `blocks` blocks.
    unsafe {
        match s.weight.format {
            Format::Q4_0 => rows_of::<Q4_0>(s),
            Format::Q4_1 => rows_of::<Q4_1>(s),
            Format::Q5_0 => rows_of::<Q5_0>(s),
            Format::Q5_1 => rows_of::<Q5_1>(s),
            Format::Q8_0 => rows_of::<Q8_0>(s),
            Format::Iq4Nl => rows_of::<Iq4Nl>(s),
            Format::Q4K => rows_of::<Q4K>(s),
            Format::Q5K => rows_of::<Q5K>(s),
            Format::Q6K => rows_of::<Q6K>(s),
            // Falls back to one group at a time.
            _ => x86_rows::vnni_512(s),
        }
    }
}

/// # Safety
/// As [`strip`]; `L` is the strip's format.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn rows_of<L: Eight>(s: &Strip<'_>) {
    // SAFETY: passed on from the caller.
    unsafe {
        match s.x.len() {
            1 => rows_by::<L, 1>(s),
            2 => rows_by::<L, 2>(s),
            _ => rows_by::<L, FEW_ROWS>(s),
        }
    }
}

/// # Safety
/// As [`rows_of`], and `M` is the number of rows of x.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn rows_by<L: Eight, const M: usize>(s: &Strip<'_>) {
    let blocks = s.weight.cols / BLOCK;
    let x: [[*const u32; 2]; M] = std::array::from_fn(|n| s.x[n].map(<[u32]>::as_ptr));
    // Negated sums of x that account for zero points, for one register of x.
    let start = |x: *const u32, b: usize| {
        // SAFETY: x holds two blocks from `b` on, or other parts of its row behind the last.
        let lanes = unsafe { _mm512_loadu_si512(x.add(blocks * at::LANES + 8 * b).cast()) };
        _mm512_sll_epi32(lanes, _mm_cvtsi32_si128(L::ZERO))
    };
    // SAFETY: a row holds `blocks / 8` times eight groups, and one stored block for each remaining group; formats with
    // larger blocks leave none. x holds all parts of `blocks` blocks, the output `M · weight.rows` elements.
    unsafe {
        for r in s.rows.clone() {
            let mut p = s.weight.row(r).as_ptr();
            s.weight.prefetch_behind(r..r + 1);
            // Pairs alternate between two sums, so neither waits for the other.
            let mut sums = [[_mm512_setzero_ps(); 2]; M];
            let mut rest = [_mm256_setzero_ps(); M];
            let mut b = 0;
            while b + 8 <= blocks {
                let (d, m) = L::factors(p);
                let mut factors = [[_mm512_setzero_ps(); 2]; M];
                for n in 0..M {
                    factors[n] = x[n].map(|x| {
                        let scale = _mm256_loadu_ps(x.add(blocks * at::SCALE + b).cast());
                        match L::HALVES {
                            true => _mm512_mul_ps(
                                d,
                                _mm512_permutexvar_ps(TWICE.get(), _mm512_zextps256_ps512(scale)),
                            ),
                            false => _mm512_zextps256_ps512(_mm256_mul_ps(_mm512_castps512_ps256(d), scale)),
                        }
                    });
                    if L::MINIMA > 0 {
                        let times = x[n].map(|x| _mm256_loadu_ps(x.add(blocks * at::TIMES + b).cast()));
                        rest[n] = _mm256_fmadd_ps(m, _mm256_add_ps(times[0], times[1]), rest[n]);
                    }
                }
                for k in 0..4 {
                    let (u, b) = (L::pair(p, k), b + 2 * k);
                    let of_pair = if L::HALVES { OF_PAIR_BY_HALVES[k].get() } else { OF_PAIR[k].get() };
                    for n in 0..M {
                        for part in 0..2 {
                            let x = x[n][part];
                            // Most pairs have no errors: the branch repeats in every weight row, and is predicted.
                            let scales = x.add(blocks * at::SCALE + b).cast::<u64>();
                            if part > 0 && scales.read_unaligned() == 0 {
                                continue;
                            }
                            let start = if L::MINIMA > 0 { _mm512_setzero_si512() } else { start(x, b) };
                            let a = _mm512_loadu_si512(x.add(8 * b).cast());
                            let products = _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(start, u, a));
                            let factor = _mm512_permutexvar_ps(of_pair, factors[n][part]);
                            sums[n][k % 2] = _mm512_fmadd_ps(products, factor, sums[n][k % 2]);
                        }
                    }
                }
                p = p.add(8 / L::GROUPS * L::BYTES);
                b += 8;
            }
            while b < blocks {
                let scales = L::scales(p);
                let (u, d) = L::group(p, 0, &scales);
                for n in 0..2 * M {
                    let (n, x) = (n / 2, x[n / 2][n % 2]);
                    let start = match L::MINIMA {
                        0 => {
                            let lanes = _mm256_loadu_si256(x.add(blocks * at::LANES + 8 * b).cast());
                            _mm256_sll_epi32(lanes, _mm_cvtsi32_si128(L::ZERO))
                        }
                        _ => _mm256_setzero_si256(),
                    };
                    let a = _mm256_loadu_si256(x.add(8 * b).cast());
                    let products = _mm256_cvtepi32_ps(_mm256_dpbusd_epi32(start, u, a));
                    let scale = _mm256_set1_ps(f32::from_bits(*x.add(blocks * at::SCALE + b)));
                    rest[n] = _mm256_fmadd_ps(_mm256_mul_ps(products, d), scale, rest[n]);
                    if L::MINIMA > 0 {
                        let times = _mm_load_ss(x.add(blocks * at::TIMES + b).cast());
                        let times = _mm256_zextps128_ps256(times);
                        rest[n] = _mm256_fmadd_ps(L::minima(p, 0, &scales), times, rest[n]);
                    }
                }
                p = p.add(L::BYTES);
                b += 1;
            }
            for n in 0..M {
                let sum = _mm512_add_ps(sums[n][0], sums[n][1]);
                let sum = _mm512_add_ps(sum, _mm512_zextps256_ps512(rest[n]));
                *s.out.add(n * s.weight.rows + r) = _mm512_reduce_add_ps(sum);
            }
        }
    }
}

/// Sixteen lane indices.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Lanes([i32; 16]);

impl Lanes {
    /// Creates indices with lane `i` equal to `first + i / run`.
    const fn runs(first: i32, run: usize) -> Self {
        let (mut lanes, mut i) = ([0; 16], 0);
        while i < 16 {
            lanes[i] = first + (i / run) as i32;
            i += 1;
        }
        Self(lanes)
    }

    #[inline(always)]
    unsafe fn get(&self) -> __m512i {
        // SAFETY: the callers run with AVX-512; the array holds sixteen lanes.
        unsafe { _mm512_load_si512(self.0.as_ptr().cast()) }
    }
}

/// Indices that repeat each of eight numbers.
static TWICE: Lanes = Lanes::runs(0, 2);
/// Indices of the factors of two groups among eight, and of their halves among sixteen.
static OF_PAIR: [Lanes; 4] = [Lanes::runs(0, 8), Lanes::runs(2, 8), Lanes::runs(4, 8), Lanes::runs(6, 8)];
static OF_PAIR_BY_HALVES: [Lanes; 4] =
    [Lanes::runs(0, 4), Lanes::runs(4, 4), Lanes::runs(8, 4), Lanes::runs(12, 4)];

/// A format, eight groups of 32 at a time: one stored block of 256, or eight of 32.
trait Eight: Load {
    /// True if the halves of a group have scales of their own.
    const HALVES: bool = false;
    /// Returns scales, in the first eight lanes unless `HALVES`, and minima of the groups.
    ///
    /// # Safety
    /// AVX-512 is there and eight groups can be read at `p`.
    unsafe fn factors(p: *const u8) -> (__m512, __m256);
    /// Returns the integers of groups `2 k` and `2 k + 1`.
    ///
    /// # Safety
    /// As `factors`, and `k < 4`.
    unsafe fn pair(p: *const u8, k: usize) -> __m512i;
}

/// Reads the first four bytes of eight blocks.
#[inline(always)]
unsafe fn heads(p: *const u8, bytes: usize) -> __m256i {
    // SAFETY: the callers can read eight blocks.
    unsafe {
        let word = |i: usize| p.add(i * bytes).cast::<i32>().read_unaligned();
        let four = |i: usize| _mm_setr_epi32(word(i), word(i + 1), word(i + 2), word(i + 3));
        _mm256_setr_m128i(four(0), four(4))
    }
}

/// Converts the low halves of the lanes.
#[inline(always)]
unsafe fn converted(heads: __m256i) -> __m256 {
    // SAFETY: the callers run with AVX-512 VL and F16C.
    unsafe { _mm256_cvtph_ps(_mm256_cvtepi32_epi16(heads)) }
}

/// Unpacks the nibbles of sixteen bytes at `p` and of sixteen at `q`, each the low ones, then the high ones.
#[inline(always)]
unsafe fn nibbles(p: *const u8, q: *const u8) -> __m512i {
    // SAFETY: the callers run with AVX-512 and can read the bytes.
    unsafe {
        let first = _mm512_broadcast_i32x4(_mm_loadu_si128(p.cast()));
        let both = _mm512_mask_broadcast_i32x4(first, 0xff00, _mm_loadu_si128(q.cast()));
        let shifted = _mm512_srlv_epi64(both, _mm512_setr_epi64(0, 0, 4, 4, 0, 0, 4, 4));
        _mm512_and_si512(shifted, _mm512_set1_epi8(15))
    }
}

/// Adds 16 where the 32 bits at `p`, then those at `q`, are set.
#[inline(always)]
unsafe fn fifth(u: __m512i, p: *const u8, q: *const u8) -> __m512i {
    // SAFETY: the callers run with AVX-512 BW and can read four bytes at both.
    unsafe {
        let word = |p: *const u8| u64::from(p.cast::<u32>().read_unaligned());
        _mm512_mask_add_epi8(u, word(p) | word(q) << 32, u, _mm512_set1_epi8(16))
    }
}

/// Implements formats with blocks of 32 that start with a half-precision scale, then the minimum if there is one.
macro_rules! blocks_of_32 {
    ($name:ident, |$p:ident, $q:ident| $numbers:expr) => {
        impl Eight for $name {
            #[inline(always)]
            unsafe fn factors(p: *const u8) -> (__m512, __m256) {
                // SAFETY: passed on from the caller.
                unsafe {
                    let heads = heads(p, Self::BYTES);
                    let m = match Self::MINIMA {
                        0 => _mm256_setzero_ps(),
                        _ => converted(_mm256_srli_epi32::<16>(heads)),
                    };
                    (_mm512_zextps256_ps512(converted(heads)), m)
                }
            }
            #[inline(always)]
            unsafe fn pair(p: *const u8, k: usize) -> __m512i {
                // SAFETY: passed on from the caller.
                unsafe {
                    let $p = p.add(2 * k * Self::BYTES);
                    let $q = $p.add(Self::BYTES);
                    $numbers
                }
            }
        }
    };
}

blocks_of_32! { Q4_0, |p, q| nibbles(p.add(2), q.add(2)) }
blocks_of_32! { Q4_1, |p, q| nibbles(p.add(4), q.add(4)) }
blocks_of_32! { Q5_0, |p, q| fifth(nibbles(p.add(6), q.add(6)), p.add(2), q.add(2)) }
blocks_of_32! { Q5_1, |p, q| fifth(nibbles(p.add(8), q.add(8)), p.add(4), q.add(4)) }
blocks_of_32! {
    Q8_0, |p, q| {
        let first = _mm512_castsi256_si512(_mm256_loadu_si256(p.add(2).cast()));
        let both = _mm512_inserti64x4::<1>(first, _mm256_loadu_si256(q.add(2).cast()));
        _mm512_xor_si512(both, _mm512_set1_epi8(-128))
    }
}
blocks_of_32! {
    Iq4Nl, |p, q| {
        let table = _mm512_broadcast_i32x4(_mm_loadu_si128(scalar::IQ4_BYTES.as_ptr().cast()));
        _mm512_shuffle_epi8(table, nibbles(p.add(2), q.add(2)))
    }
}

/// Returns the scales and minima of Q4_K and Q5_K.
#[inline(always)]
unsafe fn of_six_bits(p: *const u8) -> (__m512, __m256) {
    // SAFETY: passed on from the caller, who can read a block.
    unsafe {
        let (scales, minima) = six_bits(p);
        let least = _mm256_xor_ps(halves(p.add(2)), _mm256_set1_ps(-0.0));
        (_mm512_zextps256_ps512(eight(scales, halves(p))), eight(minima, least))
    }
}

/// Unpacks the low, then the high nibbles of 32 bytes.
#[inline(always)]
unsafe fn nibbles_of_pair(p: *const u8) -> __m512i {
    // SAFETY: the callers run with AVX-512 and can read the bytes.
    unsafe {
        let both = _mm512_broadcast_i64x4(_mm256_loadu_si256(p.cast()));
        let shifted = _mm512_srlv_epi64(both, _mm512_setr_epi64(0, 0, 0, 0, 4, 4, 4, 4));
        _mm512_and_si512(shifted, _mm512_set1_epi8(15))
    }
}

impl Eight for Q4K {
    #[inline(always)]
    unsafe fn factors(p: *const u8) -> (__m512, __m256) {
        // SAFETY: passed on from the caller.
        unsafe { of_six_bits(p) }
    }
    #[inline(always)]
    unsafe fn pair(p: *const u8, k: usize) -> __m512i {
        // SAFETY: passed on from the caller.
        unsafe { nibbles_of_pair(p.add(16 + 32 * k)) }
    }
}

impl Eight for Q5K {
    #[inline(always)]
    unsafe fn factors(p: *const u8) -> (__m512, __m256) {
        // SAFETY: passed on from the caller.
        unsafe { of_six_bits(p) }
    }
    #[inline(always)]
    unsafe fn pair(p: *const u8, k: usize) -> __m512i {
        // SAFETY: passed on from the caller. Bit g of a byte of tops belongs to group g.
        unsafe {
            let tops = _mm512_broadcast_i64x4(_mm256_loadu_si256(p.add(16).cast()));
            let bits = _mm512_inserti64x4::<1>(
                _mm512_set1_epi8((1u8 << (2 * k)) as i8),
                _mm256_set1_epi8((2u8 << (2 * k)) as i8),
            );
            let set = _mm512_test_epi8_mask(tops, bits);
            let u = nibbles_of_pair(p.add(48 + 32 * k));
            _mm512_mask_add_epi8(u, set, u, _mm512_set1_epi8(16))
        }
    }
}

impl Eight for Q6K {
    const HALVES: bool = true;
    #[inline(always)]
    unsafe fn factors(p: *const u8) -> (__m512, __m256) {
        // SAFETY: passed on from the caller.
        unsafe {
            let all = _mm512_broadcast_f32x8(halves(p.add(208)));
            let whole = _mm512_cvtepi8_epi32(_mm_loadu_si128(p.add(192).cast()));
            (_mm512_mul_ps(_mm512_cvtepi32_ps(whole), all), _mm256_setzero_ps())
        }
    }
    #[inline(always)]
    unsafe fn pair(p: *const u8, k: usize) -> __m512i {
        // SAFETY: passed on from the caller.
        unsafe {
            let low = _mm512_loadu_si512(p.add(64 * (k / 2)).cast());
            let low = if k.is_multiple_of(2) { low } else { _mm512_srli_epi16::<4>(low) };
            let high = _mm512_broadcast_i64x4(_mm256_loadu_si256(p.add(128 + 32 * (k / 2)).cast()));
            // Moves two bits for each of four groups to bits four and five; the mask below clears bits from
            // neighbouring bytes.
            let high = match k % 2 {
                0 => _mm512_sllv_epi64(high, _mm512_setr_epi64(4, 4, 4, 4, 2, 2, 2, 2)),
                _ => _mm512_srlv_epi64(high, _mm512_setr_epi64(0, 0, 0, 0, 2, 2, 2, 2)),
            };
            let low = _mm512_and_si512(low, _mm512_set1_epi8(15));
            _mm512_or_si512(low, _mm512_and_si512(high, _mm512_set1_epi8(48)))
        }
    }
}
