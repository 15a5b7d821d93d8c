//! AVX2, with AVX-VNNI where the processor has it: tiles of 6 × 8 outputs.

use super::{BLOCK, Format, Tile, at, scalar};
use std::arch::x86_64::*;

/// Columns of an output tile: one register.
pub(super) const NR: usize = 8;
/// Rows of an output tile: it takes six registers for the sums of a group, six for the sums of all groups, one for
/// weights, one for a broadcast and two for products of pairs.
pub(super) const MR: usize = 6;

/// Rounds a row of x to eight bits, a block in four registers.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn round(x: &[f32], few: bool, row: &mut [u32]) {
    let n = x.len() / BLOCK;
    assert_eq!(row.len(), n * if few { at::FEW } else { at::MANY });
    let row = row.as_mut_ptr();
    for (b, x) in x.as_chunks::<BLOCK>().0.iter().enumerate() {
        // SAFETY: block `b` of `n` of every part, all of which the row holds.
        unsafe {
            let x: [__m256; 4] = std::array::from_fn(|i| _mm256_loadu_ps(x.as_ptr().add(8 * i)));
            let bits = x.map(|x| _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7fff_ffff)));
            let most =
                _mm256_max_epi32(_mm256_max_epi32(bits[0], bits[1]), _mm256_max_epi32(bits[2], bits[3]));
            let most = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256::<1>(most));
            let most = _mm_max_epi32(most, _mm_shuffle_epi32::<0b01_00_11_10>(most));
            let most = _mm_max_epi32(most, _mm_shuffle_epi32::<0b10_11_00_01>(most));
            let (factor, s) = scalar::scale_of(_mm_cvtsi128_si32(most) as u32);
            // The factor of a block with an infinity or a NaN is 0, and 0 times either is NaN.
            let x = if s.is_nan() { [_mm256_setzero_ps(); 4] } else { x };
            let [i, j, k, l] = x.map(|x| _mm256_cvtps_epi32(_mm256_mul_ps(x, _mm256_set1_ps(factor))));
            let bytes = _mm256_packs_epi16(_mm256_packs_epi32(i, j), _mm256_packs_epi32(k, l));
            let numbers = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
            _mm256_storeu_si256(row.add(8 * b).cast(), numbers);

            let pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), numbers);
            let fours = _mm256_madd_epi16(pairs, _mm256_set1_epi16(-1));
            if few {
                _mm256_storeu_si256(row.add(n * at::LANES + 8 * b).cast(), fours);
            }
            let two = _mm256_hadd_epi32(fours, fours);
            let one = _mm256_hadd_epi32(two, two);
            let minus = [_mm256_extract_epi32::<0>(one), _mm256_extract_epi32::<4>(one)];
            *row.add(n * at::SCALE + b) = s.to_bits();
            *row.add(n * at::MINUS + b) = (minus[0] + minus[1]) as u32;
            *row.add(n * at::TIMES + b) = (s * -(minus[0] + minus[1]) as f32).to_bits();
            for h in 0..2 {
                *row.add(n * at::MINUS_HALVES + 2 * b + h) = minus[h] as u32;
                *row.add(n * at::TIMES_HALVES + 2 * b + h) = (s * -minus[h] as f32).to_bits();
            }
        }
    }
}

/// Computes what rounding lost in the blocks of a row that have outliers.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn errors_of_outliers(x: &[f32], row: &[u32], errors: &mut [f32]) {
    scalar::errors_of_outliers(x, row, errors);
}

/// Unpacks the integers of whole blocks.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn unpack(format: Format, bytes: &[u8], u: &mut [u8], d: &mut [f32], m: &mut [f32]) {
    scalar::unpack(format, bytes, u, d, m);
}

/// Sums of four products in each lane.
pub(super) trait Dot {
    /// True if integers above 127 are used as they are. Otherwise 128 is subtracted from them where `WIDE`, and the sum
    /// needs no zero point.
    const WHOLE: bool;
    /// Adds to each lane of `sum` the products of four neighbours of `u`, unsigned, and `a`, of at most 127 in
    /// magnitude.
    ///
    /// # Safety
    /// The processor has what the type is named after.
    unsafe fn dot<const WIDE: bool>(sum: __m256i, u: __m256i, a: __m256i) -> __m256i;
}

/// AVX2 alone.
pub(super) struct Pairs;
impl Dot for Pairs {
    const WHOLE: bool = false;
    #[inline(always)]
    unsafe fn dot<const WIDE: bool>(sum: __m256i, u: __m256i, a: __m256i) -> __m256i {
        // SAFETY: the callers run with AVX2. Two products of at most 128 · 127 fit 16 bits with their sign.
        unsafe {
            let pairs = if WIDE {
                let w = _mm256_xor_si256(u, _mm256_set1_epi8(-128));
                _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(a, w))
            } else {
                _mm256_maddubs_epi16(u, a)
            };
            _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
        }
    }
}

/// AVX-VNNI.
pub(super) struct Vnni;
impl Dot for Vnni {
    const WHOLE: bool = true;
    #[inline(always)]
    unsafe fn dot<const WIDE: bool>(sum: __m256i, u: __m256i, a: __m256i) -> __m256i {
        // SAFETY: the callers run with AVX-VNNI.
        unsafe { _mm256_dpbusd_avx_epi32(sum, u, a) }
    }
}

/// Computes one output tile.
///
/// # Safety
/// As [`super::run_tile`].
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn tile_pairs(t: &Tile<'_>) {
    // SAFETY: passed on from the caller.
    unsafe { tile::<Pairs>(t) }
}

/// Computes one output tile.
///
/// # Safety
/// As [`super::run_tile`].
#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
pub(super) unsafe fn tile_vnni(t: &Tile<'_>) {
    // SAFETY: passed on from the caller.
    unsafe { tile::<Vnni>(t) }
}

/// # Safety
/// As [`super::run_tile`].
#[inline(always)]
unsafe fn tile<D: Dot>(t: &Tile<'_>) {
    // SAFETY: passed on from the caller.
    unsafe {
        match (t.form.group, t.form.zero) {
            (BLOCK, None) => tile_of::<D, BLOCK, true, false>(t),
            (BLOCK, Some(7)) => tile_of::<D, BLOCK, false, true>(t),
            (BLOCK, Some(_)) => tile_of::<D, BLOCK, false, false>(t),
            (_, None) => tile_of::<D, 16, true, false>(t),
            (_, Some(_)) => tile_of::<D, 16, false, false>(t),
        }
    }
}

/// # Safety
/// As [`super::run_tile`]; groups have `GROUP` weights, minima if `MIN` and integers above 127 only if `WIDE`.
#[inline(always)]
unsafe fn tile_of<D: Dot, const GROUP: usize, const MIN: bool, const WIDE: bool>(t: &Tile<'_>) {
    let groups = t.count * BLOCK / GROUP;
    assert!((1..=MR).contains(&t.rows.len()) && t.first + t.count <= t.blocks);
    assert!(t.rows.iter().all(|n| t.x.len() >= n * t.stride + t.blocks * at::MANY));
    assert!(t.panel.words.len() == groups * GROUP / 4 * NR && t.panel.scales.len() == groups * NR);
    assert!(!MIN || t.panel.minima.len() == groups * NR);
    // Missing rows repeat the last one; their sums are not written.
    let x: [*const u32; MR] =
        std::array::from_fn(|i| t.x.as_ptr().wrapping_add(t.rows[i.min(t.rows.len() - 1)] * t.stride));
    let first = t.first * BLOCK / GROUP;
    // Offsets of the sums of groups in a row, by group size.
    let (minus, times) = match GROUP {
        BLOCK => (t.blocks * at::MINUS + first, t.blocks * at::TIMES + first),
        _ => (t.blocks * at::MINUS_HALVES + first, t.blocks * at::TIMES_HALVES + first),
    };
    let scale = t.blocks * at::SCALE + t.first;
    // SAFETY: the processor has AVX2; x holds the rows with the numbers and sums of all blocks, the panel `groups` groups,
    // as asserted above; the output holds `rows` rows of `cols` elements, and masked lanes are not touched.
    unsafe {
        let zero = _mm_cvtsi32_si128(t.form.zero.unwrap_or(0) as i32);
        let mut sums = [_mm256_setzero_ps(); MR];
        let (mut w, mut d, mut m) =
            (t.panel.words.as_ptr(), t.panel.scales.as_ptr(), t.panel.minima.as_ptr());
        let mut word = t.first * 8;
        for g in 0..groups {
            let mut products = [_mm256_setzero_si256(); MR];
            if !MIN && (D::WHOLE || !WIDE) {
                for i in 0..MR {
                    products[i] = _mm256_sll_epi32(_mm256_set1_epi32(*x[i].add(minus + g) as i32), zero);
                }
            }
            for _ in 0..GROUP / 4 {
                let u = _mm256_loadu_si256(w.cast());
                for i in 0..MR {
                    let a = _mm256_set1_epi32(*x[i].add(word) as i32);
                    products[i] = D::dot::<WIDE>(products[i], u, a);
                }
                w = w.add(NR);
                word += 1;
            }
            let scales = _mm256_loadu_ps(d);
            for i in 0..MR {
                let s = _mm256_set1_ps(f32::from_bits(*x[i].add(scale + g * GROUP / BLOCK)));
                let f = _mm256_mul_ps(_mm256_cvtepi32_ps(products[i]), scales);
                sums[i] = _mm256_fmadd_ps(f, s, sums[i]);
            }
            if MIN {
                let minima = _mm256_loadu_ps(m);
                for i in 0..MR {
                    let total = _mm256_set1_ps(f32::from_bits(*x[i].add(times + g)));
                    sums[i] = _mm256_fmadd_ps(minima, total, sums[i]);
                }
                m = m.add(NR);
            }
            d = d.add(NR);
        }
        let lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        let mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(t.cols as i32), lane);
        for (sum, row) in sums.iter().zip(t.rows) {
            let at = t.out.wrapping_add(row * t.out_stride);
            let old = if t.accumulate { _mm256_maskload_ps(at, mask) } else { _mm256_setzero_ps() };
            _mm256_maskstore_ps(at, mask, _mm256_add_ps(old, *sum));
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn burn_pairs(iterations: u64) -> (u64, i32) {
    // SAFETY: AVX2 is there.
    unsafe { burn::<Pairs>(iterations) }
}

#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
pub(super) fn burn_vnni(iterations: u64) -> (u64, i32) {
    // SAFETY: AVX-VNNI is there.
    unsafe { burn::<Vnni>(iterations) }
}

/// # Safety
/// The processor has what `D` needs.
#[inline(always)]
unsafe fn burn<D: Dot>(iterations: u64) -> (u64, i32) {
    const CHAINS: usize = 10;
    // SAFETY: passed on from the caller; the array holds eight numbers.
    unsafe {
        let (u, mut a) = (_mm256_set1_epi8(3), _mm256_set1_epi8(-5));
        let mut sums: [__m256i; CHAINS] = std::array::from_fn(|i| _mm256_set1_epi32(i as i32));
        for _ in 0..iterations {
            for sum in &mut sums {
                *sum = D::dot::<false>(*sum, u, a);
            }
            a = std::hint::black_box(a);
        }
        let all = sums.iter().fold(_mm256_setzero_si256(), |a, b| _mm256_add_epi32(a, *b));
        let mut lanes = [0i32; 8];
        _mm256_storeu_si256(lanes.as_mut_ptr().cast(), all);
        (2 * 32 * CHAINS as u64 * iterations, lanes.iter().fold(0, |a, b| a.wrapping_add(*b)))
    }
}
