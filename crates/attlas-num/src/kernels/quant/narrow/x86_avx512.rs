//! AVX-512 with VNNI: tiles of 6 × 32 outputs.

use super::{BLOCK, Format, Tile, at, scalar};
use std::arch::x86_64::*;

/// Columns of an output tile: two registers.
pub(super) const NR: usize = 32;
/// Rows of an output tile: with two registers of columns, it takes 12 registers for the sums of a group, 12 for the
/// sums of all groups, two for weights and one for a broadcast.
pub(super) const MR: usize = 6;

/// Unpacks the integers of whole blocks.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(super) fn unpack(format: Format, bytes: &[u8], u: &mut [u8], d: &mut [f32], m: &mut [f32]) {
    scalar::unpack(format, bytes, u, d, m);
}

/// Computes one output tile.
///
/// # Safety
/// As [`super::run_tile`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn tile(t: &Tile<'_>) {
    // SAFETY: passed on from the caller.
    unsafe {
        match (t.form.group, t.form.zero) {
            (BLOCK, None) => tile_by::<BLOCK, true>(t),
            (BLOCK, Some(_)) => tile_by::<BLOCK, false>(t),
            (_, None) => tile_by::<16, true>(t),
            (_, Some(_)) => tile_by::<16, false>(t),
        }
    }
}

/// # Safety
/// As [`super::run_tile`]; groups have `GROUP` weights, and minima if `MIN`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn tile_by<const GROUP: usize, const MIN: bool>(t: &Tile<'_>) {
    // SAFETY: passed on from the caller.
    unsafe {
        match t.rows.len() {
            6 => tile_of::<6, GROUP, MIN>(t),
            5 => tile_of::<5, GROUP, MIN>(t),
            4 => tile_of::<4, GROUP, MIN>(t),
            3 => tile_of::<3, GROUP, MIN>(t),
            2 => tile_of::<2, GROUP, MIN>(t),
            _ => tile_of::<1, GROUP, MIN>(t),
        }
    }
}

/// # Safety
/// As [`tile_by`], and the tile has `M` rows.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn tile_of<const M: usize, const GROUP: usize, const MIN: bool>(t: &Tile<'_>) {
    let groups = t.count * BLOCK / GROUP;
    let rows: &[usize; M] = t.rows.try_into().unwrap_or_else(|_| unreachable!("M rows"));
    assert!(rows.iter().all(|n| t.x.len() >= n * t.stride + t.blocks * at::MANY));
    assert!(t.first + t.count <= t.blocks);
    assert!(t.panel.words.len() == groups * GROUP / 4 * NR && t.panel.scales.len() == groups * NR);
    assert!(!MIN || t.panel.minima.len() == groups * NR);
    let x: [*const u32; M] = rows.map(|n| t.x.as_ptr().wrapping_add(n * t.stride));
    let first = t.first * BLOCK / GROUP;
    // Offsets of the sums of groups in a row, by group size.
    let (minus, times) = match GROUP {
        BLOCK => (t.blocks * at::MINUS + first, t.blocks * at::TIMES + first),
        _ => (t.blocks * at::MINUS_HALVES + first, t.blocks * at::TIMES_HALVES + first),
    };
    let scale = t.blocks * at::SCALE + t.first;
    let zero = _mm_cvtsi32_si128(t.form.zero.unwrap_or(0) as i32);
    let mut sums = [[_mm512_setzero_ps(); 2]; M];
    let (mut w, mut d, mut m) = (t.panel.words.as_ptr(), t.panel.scales.as_ptr(), t.panel.minima.as_ptr());
    let mut word = t.first * 8;
    for g in 0..groups {
        // SAFETY: x holds M rows with the numbers and sums of all blocks, the panel `groups` groups: asserted above.
        unsafe {
            let mut products = [[_mm512_setzero_si512(); 2]; M];
            if !MIN {
                for i in 0..M {
                    let start = _mm512_sll_epi32(_mm512_set1_epi32(*x[i].add(minus + g) as i32), zero);
                    products[i] = [start; 2];
                }
            }
            for _ in 0..GROUP / 4 {
                let (w0, w1) = (_mm512_loadu_si512(w.cast()), _mm512_loadu_si512(w.add(16).cast()));
                for i in 0..M {
                    let a = _mm512_set1_epi32(*x[i].add(word) as i32);
                    products[i][0] = _mm512_dpbusd_epi32(products[i][0], w0, a);
                    products[i][1] = _mm512_dpbusd_epi32(products[i][1], w1, a);
                }
                w = w.add(NR);
                word += 1;
            }
            let (d0, d1) = (_mm512_loadu_ps(d), _mm512_loadu_ps(d.add(16)));
            for i in 0..M {
                let s = _mm512_set1_ps(f32::from_bits(*x[i].add(scale + g * GROUP / BLOCK)));
                let f0 = _mm512_mul_ps(_mm512_cvtepi32_ps(products[i][0]), d0);
                let f1 = _mm512_mul_ps(_mm512_cvtepi32_ps(products[i][1]), d1);
                sums[i][0] = _mm512_fmadd_ps(f0, s, sums[i][0]);
                sums[i][1] = _mm512_fmadd_ps(f1, s, sums[i][1]);
            }
            if MIN {
                let (m0, m1) = (_mm512_loadu_ps(m), _mm512_loadu_ps(m.add(16)));
                for i in 0..M {
                    let total = _mm512_set1_ps(f32::from_bits(*x[i].add(times + g)));
                    sums[i][0] = _mm512_fmadd_ps(m0, total, sums[i][0]);
                    sums[i][1] = _mm512_fmadd_ps(m1, total, sums[i][1]);
                }
                m = m.add(NR);
            }
            d = d.add(NR);
        }
    }
    let masks = [tail_mask(t.cols), tail_mask(t.cols.saturating_sub(16))];
    for (i, sum) in sums.iter().enumerate() {
        for (half, &mask) in masks.iter().enumerate() {
            // SAFETY: the output holds M rows of `cols` elements; masked lanes are not touched. The offset
            // is formed by wrapping because it may lie past the output where the whole mask is empty.
            unsafe {
                let at = t.out.wrapping_add(rows[i] * t.out_stride + 16 * half);
                let old = if t.accumulate { _mm512_maskz_loadu_ps(mask, at) } else { _mm512_setzero_ps() };
                _mm512_mask_storeu_ps(at, mask, _mm512_add_ps(old, sum[half]));
            }
        }
    }
}

/// Returns a mask of the first `n` of sixteen lanes; of all lanes if `n` is larger.
#[inline(always)]
fn tail_mask(n: usize) -> u16 {
    if n >= 16 { u16::MAX } else { (1 << n) - 1 }
}

#[target_feature(enable = "avx512f,avx512vnni")]
pub(super) fn burn(iterations: u64) -> (u64, i32) {
    const CHAINS: usize = 16;
    let (u, mut a) = (_mm512_set1_epi8(3), _mm512_set1_epi8(-5));
    let mut sums: [__m512i; CHAINS] = std::array::from_fn(|i| _mm512_set1_epi32(i as i32));
    for _ in 0..iterations {
        for sum in &mut sums {
            *sum = _mm512_dpbusd_epi32(*sum, u, a);
        }
        a = std::hint::black_box(a);
    }
    let all = sums.iter().fold(_mm512_setzero_si512(), |a, b| _mm512_add_epi32(a, *b));
    (2 * 64 * CHAINS as u64 * iterations, _mm512_reduce_add_epi32(all))
}
