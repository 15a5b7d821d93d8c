//! NEON with dot products of eight bits (`sdot`, of Armv8.2): tiles of 6 × 8 outputs.
//!
//! Weights minus their zero point fit a signed byte in every format, so sums need no correction. The instruction is
//! written in assembly because its intrinsic is not stable.

use super::{BLOCK, FEW_ROWS, Strip, Tile, at, scalar};
use std::arch::aarch64::*;
use std::arch::asm;

/// Columns of an output tile: two registers.
pub(super) const NR: usize = 8;
/// Rows of an output tile: with two registers of columns, it takes 12 registers for the sums of a group, 12 for the
/// sums of all groups, two for weights and one for a broadcast.
pub(super) const MR: usize = 6;

/// Adds to each lane of `sum` the products of four neighbours.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn dot(mut sum: int32x4_t, w: int8x16_t, a: int8x16_t) -> int32x4_t {
    // SAFETY: the instruction is there, and reads and writes these registers alone.
    unsafe {
        asm!(
            "sdot {0:v}.4s, {1:v}.16b, {2:v}.16b",
            inout(vreg) sum, in(vreg) w, in(vreg) a,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sum
}

/// Returns sixteen weights minus their zero point.
///
/// # Safety
/// Sixteen bytes can be read at `p`.
#[inline]
#[target_feature(enable = "neon,dotprod")]
unsafe fn weights(p: *const u8, zero: uint8x16_t) -> int8x16_t {
    // SAFETY: passed on from the caller.
    vreinterpretq_s8_u8(vsubq_u8(unsafe { vld1q_u8(p) }, zero))
}

/// Multiplies a strip of weight rows with few rows of x.
///
/// # Safety
/// As [`super::run_strip`].
#[target_feature(enable = "neon,dotprod")]
pub(super) unsafe fn strip(s: &Strip<'_>) {
    /// Weights unpacked at a time; a multiple of every block length.
    const PIECE: usize = 1024;
    let (weight, group) = (s.weight, s.form.group);
    let blocks = weight.cols / BLOCK;
    assert!(s.x.iter().flatten().all(|x| x.len() == blocks * at::FEW) && s.rows.end <= weight.rows);
    let zero = vdupq_n_u8(s.form.zero.map_or(0, |z| 1 << z));
    let (mut u, mut d, mut m) = ([0; PIECE], [0.0f32; PIECE / 16], [0.0f32; PIECE / 16]);
    for r in s.rows.clone() {
        let mut sums = [vdupq_n_f32(0.0); FEW_ROWS];
        let mut of_minima = [0.0f32; FEW_ROWS];
        for k in (0..weight.cols).step_by(PIECE) {
            let len = PIECE.min(weight.cols - k);
            let at = |k: usize| k / weight.format.block_len() * weight.format.block_bytes();
            let stored = &weight.row(r)[at(k)..at(k + len)];
            let count = len / group;
            scalar::unpack(weight.format, stored, &mut u[..len], &mut d[..count], &mut m[..count]);
            for (i, u) in u[..len].as_chunks::<BLOCK>().0.iter().enumerate() {
                let b = k / BLOCK + i;
                // SAFETY: a block has 32 weights.
                let w = unsafe { [weights(u.as_ptr(), zero), weights(u.as_ptr().add(16), zero)] };
                for n in 0..2 * s.x.len() {
                    let (n, x) = (n / 2, s.x[n / 2][n % 2]);
                    let a: &[i8] = bytemuck::cast_slice(&x[8 * b..8 * b + 8]);
                    // SAFETY: a block has 32 numbers.
                    let a = unsafe { [vld1q_s8(a.as_ptr()), vld1q_s8(a.as_ptr().add(16))] };
                    let scale = f32::from_bits(x[blocks * at::SCALE + b]);
                    if scale == 0.0 {
                        continue;
                    }
                    let none = vdupq_n_s32(0);
                    if group == BLOCK {
                        let products = vcvtq_f32_s32(dot(dot(none, w[0], a[0]), w[1], a[1]));
                        sums[n] = vfmaq_n_f32(sums[n], products, scale * d[i]);
                    } else {
                        for h in 0..2 {
                            let products = vcvtq_f32_s32(dot(none, w[h], a[h]));
                            sums[n] = vfmaq_n_f32(sums[n], products, scale * d[2 * i + h]);
                        }
                    }
                    if s.form.zero.is_none() {
                        of_minima[n] += if group == BLOCK {
                            m[i] * f32::from_bits(x[blocks * at::TIMES + b])
                        } else {
                            let of = |h: usize| f32::from_bits(x[blocks * at::TIMES_HALVES + 2 * b + h]);
                            m[2 * i] * of(0) + m[2 * i + 1] * of(1)
                        };
                    }
                }
            }
        }
        for n in 0..s.x.len() {
            // SAFETY: the output holds `x.len() · weight.rows` elements.
            unsafe { *s.out.add(n * weight.rows + r) = vaddvq_f32(sums[n]) + of_minima[n] };
        }
    }
}

/// Computes one output tile.
///
/// # Safety
/// As [`super::run_tile`].
#[target_feature(enable = "neon,dotprod")]
pub(super) unsafe fn tile(t: &Tile<'_>) {
    // SAFETY: passed on from the caller.
    unsafe {
        match (t.form.group, t.form.zero) {
            (BLOCK, None) => tile_of::<BLOCK, true>(t),
            (BLOCK, Some(_)) => tile_of::<BLOCK, false>(t),
            (_, None) => tile_of::<16, true>(t),
            (_, Some(_)) => tile_of::<16, false>(t),
        }
    }
}

/// # Safety
/// As [`super::run_tile`]; groups have `GROUP` weights, and minima if `MIN`.
#[target_feature(enable = "neon,dotprod")]
unsafe fn tile_of<const GROUP: usize, const MIN: bool>(t: &Tile<'_>) {
    let groups = t.count * BLOCK / GROUP;
    assert!((1..=MR).contains(&t.rows.len()) && t.first + t.count <= t.blocks);
    assert!(t.rows.iter().all(|n| t.x.len() >= n * t.stride + t.blocks * at::MANY));
    assert!(t.panel.words.len() == groups * GROUP / 4 * NR && t.panel.scales.len() == groups * NR);
    assert!(!MIN || t.panel.minima.len() == groups * NR);
    // Missing rows repeat the last one; their sums are not written.
    let x: [*const u32; MR] =
        std::array::from_fn(|i| t.x.as_ptr().wrapping_add(t.rows[i.min(t.rows.len() - 1)] * t.stride));
    let (scale, first) = (t.blocks * at::SCALE + t.first, t.first * BLOCK / GROUP);
    let times = first + t.blocks * if GROUP == BLOCK { at::TIMES } else { at::TIMES_HALVES };
    let zero = vdupq_n_u8(t.form.zero.map_or(0, |z| 1 << z));
    let mut sums = [[vdupq_n_f32(0.0); 2]; MR];
    let (mut w, mut d, mut m) = (t.panel.words.as_ptr(), t.panel.scales.as_ptr(), t.panel.minima.as_ptr());
    let mut word = t.first * 8;
    for g in 0..groups {
        // SAFETY: x holds the rows with the numbers and sums of all blocks, the panel `groups` groups: asserted above.
        unsafe {
            let mut products = [[vdupq_n_s32(0); 2]; MR];
            for _ in 0..GROUP / 4 {
                let both = [weights(w.cast(), zero), weights(w.add(4).cast(), zero)];
                for i in 0..MR {
                    let a = vreinterpretq_s8_u32(vld1q_dup_u32(x[i].add(word)));
                    products[i] = [dot(products[i][0], both[0], a), dot(products[i][1], both[1], a)];
                }
                w = w.add(NR);
                word += 1;
            }
            let scales = [vld1q_f32(d), vld1q_f32(d.add(4))];
            for i in 0..MR {
                let s = f32::from_bits(*x[i].add(scale + g * GROUP / BLOCK));
                for half in 0..2 {
                    let scaled = vmulq_f32(vcvtq_f32_s32(products[i][half]), scales[half]);
                    sums[i][half] = vfmaq_n_f32(sums[i][half], scaled, s);
                }
            }
            if MIN {
                let minima = [vld1q_f32(m), vld1q_f32(m.add(4))];
                for i in 0..MR {
                    let total = f32::from_bits(*x[i].add(times + g));
                    for half in 0..2 {
                        sums[i][half] = vfmaq_n_f32(sums[i][half], minima[half], total);
                    }
                }
                m = m.add(NR);
            }
            d = d.add(NR);
        }
    }
    for (sum, n) in sums.iter().zip(t.rows) {
        let mut row = [0.0f32; NR];
        // SAFETY: the array holds eight numbers.
        unsafe {
            vst1q_f32(row.as_mut_ptr(), sum[0]);
            vst1q_f32(row.as_mut_ptr().add(4), sum[1]);
        }
        for (j, sum) in row.iter().enumerate().take(t.cols) {
            // SAFETY: the output holds `rows` rows of `cols` elements, `out_stride` apart.
            let y = unsafe { &mut *t.out.add(n * t.out_stride + j) };
            *y = if t.accumulate { *y + sum } else { *sum };
        }
    }
}

#[target_feature(enable = "neon,dotprod")]
pub(super) fn burn(iterations: u64) -> (u64, i32) {
    const CHAINS: usize = 16;
    let (w, mut a) = (vdupq_n_s8(3), vdupq_n_s8(-5));
    let mut sums: [int32x4_t; CHAINS] = std::array::from_fn(|i| vdupq_n_s32(i as i32));
    for _ in 0..iterations {
        for sum in &mut sums {
            *sum = dot(*sum, w, a);
        }
        a = std::hint::black_box(a);
    }
    let all = sums.iter().fold(vdupq_n_s32(0), |a, b| vaddq_s32(a, *b));
    (2 * 16 * CHAINS as u64 * iterations, vaddvq_s32(all))
}
