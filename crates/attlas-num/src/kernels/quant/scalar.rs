//! The readable definition of every block format, of the fused dot products and of the matrix product.
//!
//! The SIMD variants inline these functions where they have nothing better of their own.

use super::{Format, Tile, half_width};
use crate::MatRef;

/// Columns of an output tile.
pub(super) const NR: usize = 16;
/// Rows of an output tile.
pub(super) const MR: usize = 4;

/// Converts IEEE half-precision bits to single precision.
///
/// A half shifted into the fields of a single is too small by a factor of 2¹¹²; multiplying by it is exact, for
/// subnormal halves too.
#[inline(always)]
pub(super) fn half_to_f32(h: u16) -> f32 {
    let magnitude = u32::from(h & 0x7fff) << 13;
    let finite = (f32::from_bits(magnitude) * f32::from_bits(0x7780_0000)).to_bits();
    let bits = if h & 0x7c00 == 0x7c00 { magnitude | 0x7f80_0000 } else { finite };
    f32::from_bits(bits | u32::from(h & 0x8000) << 16)
}

#[inline(always)]
pub(super) fn half_at(b: &[u8], at: usize) -> f32 {
    half_to_f32(u16::from_le_bytes([b[at], b[at + 1]]))
}

#[inline(always)]
pub(super) fn f32_at(b: &[u8], at: usize) -> f32 {
    f32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]])
}

/// Unpacks rows of scaled 8-bit integers.
#[inline(always)]
pub(super) fn unpack_scaled_rows(width: usize, bytes: &[u8], out: &mut [f32]) {
    if width.is_multiple_of(32) {
        return each(bytes, out, |b: &[u8; 36], y: &mut [f32; 32]| {
            let scale = f32_at(b, 0);
            for j in 0..32 {
                y[j] = scale * f32::from(b[4 + j] as i8);
            }
        });
    }
    let row = width + 4 * width.div_ceil(32);
    for (bytes, out) in bytes.chunks_exact(row).zip(out.chunks_exact_mut(width)) {
        for (b, y) in bytes.chunks(36).zip(out.chunks_mut(32)) {
            let scale = f32_at(b, 0);
            y.iter_mut().zip(&b[4..]).for_each(|(y, b)| *y = scale * f32::from(*b as i8));
        }
    }
}

/// Rounds rows to bfloat16.
#[inline(always)]
pub(super) fn pack_halves(rows: MatRef<'_, f32>, out: &mut [u8]) {
    for (row, out) in rows.iter_rows().zip(out.chunks_exact_mut((2 * rows.cols()).max(1))) {
        for (out, &x) in out.as_chunks_mut::<2>().0.iter_mut().zip(row) {
            *out = half_width::bits(x).to_le_bytes();
        }
    }
}

/// Packs rows as scaled 8-bit integers.
#[inline(always)]
pub(super) fn pack_scaled_rows(rows: MatRef<'_, f32>, out: &mut [u8]) {
    let bytes = rows.cols() + 4 * rows.cols().div_ceil(32);
    for (row, out) in rows.iter_rows().zip(out.chunks_exact_mut(bytes.max(1))) {
        for (block, out) in row.chunks(32).zip(out.chunks_mut(36)) {
            // Magnitudes in the order of their bits, which puts NaN and infinity last.
            let most = block.iter().fold(0, |most: u32, x| most.max(x.to_bits() & 0x7fff_ffff));
            let most = f32::from_bits(most);
            let scale = if most.is_finite() { most / 127.0 } else { f32::NAN };
            let factor = if scale > 0.0 { 1.0 / scale } else { 0.0 };
            let (head, numbers) = out.split_at_mut(4);
            head.copy_from_slice(&scale.to_le_bytes());
            // Added to 1.5 · 2^23, a number is rounded to an integer, ties to even, in the low bits of the sum.
            const SHIFT: f32 = 12_582_912.0;
            numbers.iter_mut().zip(block).for_each(|(n, &x)| *n = (x * factor + SHIFT).to_bits() as u8);
        }
    }
}

/// Applies `f` to every whole block and its values.
#[inline(always)]
fn each<const B: usize, const L: usize>(bytes: &[u8], out: &mut [f32], f: impl Fn(&[u8; B], &mut [f32; L])) {
    for (block, values) in bytes.as_chunks::<B>().0.iter().zip(out.as_chunks_mut::<L>().0) {
        f(block, values);
    }
}

/// Dequantises whole blocks. `bytes` and `out` have the same number of blocks.
#[inline(always)]
pub(super) fn dequantise(format: Format, bytes: &[u8], out: &mut [f32]) {
    match format {
        Format::F32 => each(bytes, out, |b: &[u8; 4], y: &mut [f32; 1]| y[0] = f32::from_le_bytes(*b)),
        Format::F16 => each(bytes, out, |b: &[u8; 2], y: &mut [f32; 1]| y[0] = half_at(b, 0)),
        Format::BF16 => each(bytes, out, |b: &[u8; 2], y: &mut [f32; 1]| {
            y[0] = f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16);
        }),
        Format::Q4_0 => each(bytes, out, q4_0),
        Format::Q4_1 => each(bytes, out, q4_1),
        Format::Q5_0 => each(bytes, out, q5_0),
        Format::Q5_1 => each(bytes, out, q5_1),
        Format::Q8_0 => each(bytes, out, |b: &[u8; 34], y: &mut [f32; 32]| {
            let d = half_at(b, 0);
            for j in 0..32 {
                y[j] = d * f32::from(b[2 + j] as i8);
            }
        }),
        Format::Q2K => each(bytes, out, q2_k),
        Format::Q3K => each(bytes, out, q3_k),
        Format::Q4K => each(bytes, out, q4_k),
        Format::Q5K => each(bytes, out, q5_k),
        Format::Q6K => each(bytes, out, q6_k),
        Format::Q8K => each(bytes, out, |b: &[u8; 292], y: &mut [f32; 256]| {
            let d = f32_at(b, 0);
            for j in 0..256 {
                y[j] = d * f32::from(b[4 + j] as i8);
            }
        }),
        Format::Iq4Nl => each(bytes, out, iq4_nl),
        Format::Iq4Xs => each(bytes, out, iq4_xs),
        Format::Mxfp4 => each(bytes, out, mxfp4),
    }
}

/// Values of the 16 codes of IQ4_NL and IQ4_XS.
pub(super) const IQ4_VALUES: [f32; 16] = [
    -127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0,
];
/// Twice the values of the 4-bit codes of MXFP4: sign, two bits of exponent, one of mantissa.
pub(super) const MXFP4_DOUBLES: [f32; 16] =
    [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0];

#[inline(always)]
fn iq4_nl(b: &[u8; 18], y: &mut [f32; 32]) {
    let d = half_at(b, 0);
    for j in 0..16 {
        y[j] = d * IQ4_VALUES[usize::from(b[2 + j] & 15)];
        y[j + 16] = d * IQ4_VALUES[usize::from(b[2 + j] >> 4)];
    }
}

/// Dequantises eight sub-blocks of 32 whose scales have four bits in one place and two in another.
#[inline(always)]
fn iq4_xs(b: &[u8; 136], y: &mut [f32; 256]) {
    let d = half_at(b, 0);
    let high = u16::from_le_bytes([b[2], b[3]]);
    for s in 0..8 {
        let low = b[4 + s / 2] >> (4 * (s % 2)) & 15;
        let scale = d * (f32::from(low | ((high >> (2 * s)) as u8 & 3) << 4) - 32.0);
        for j in 0..16 {
            let q = b[8 + 16 * s + j];
            y[32 * s + j] = scale * IQ4_VALUES[usize::from(q & 15)];
            y[32 * s + j + 16] = scale * IQ4_VALUES[usize::from(q >> 4)];
        }
    }
}

/// Returns half of the power of two of a block, subnormal for the two least exponents.
#[inline(always)]
pub(super) fn mxfp4_scale(exponent: u8) -> f32 {
    let e = u32::from(exponent);
    f32::from_bits(if e < 2 { 0x0020_0000 << e } else { (e - 1) << 23 })
}

#[inline(always)]
fn mxfp4(b: &[u8; 17], y: &mut [f32; 32]) {
    let d = mxfp4_scale(b[0]);
    for j in 0..16 {
        y[j] = d * MXFP4_DOUBLES[usize::from(b[1 + j] & 15)];
        y[j + 16] = d * MXFP4_DOUBLES[usize::from(b[1 + j] >> 4)];
    }
}

#[inline(always)]
fn q4_0(b: &[u8; 18], y: &mut [f32; 32]) {
    let d = half_at(b, 0);
    for j in 0..16 {
        y[j] = d * (f32::from(b[2 + j] & 15) - 8.0);
        y[j + 16] = d * (f32::from(b[2 + j] >> 4) - 8.0);
    }
}

#[inline(always)]
fn q4_1(b: &[u8; 20], y: &mut [f32; 32]) {
    let (d, m) = (half_at(b, 0), half_at(b, 2));
    for j in 0..16 {
        y[j] = d * f32::from(b[4 + j] & 15) + m;
        y[j + 16] = d * f32::from(b[4 + j] >> 4) + m;
    }
}

#[inline(always)]
fn q5_0(b: &[u8; 22], y: &mut [f32; 32]) {
    let d = half_at(b, 0);
    let high = u32::from_le_bytes([b[2], b[3], b[4], b[5]]);
    for j in 0..16 {
        y[j] = d * (f32::from(b[6 + j] & 15 | ((high >> j) as u8 & 1) << 4) - 16.0);
        y[j + 16] = d * (f32::from(b[6 + j] >> 4 | ((high >> (j + 16)) as u8 & 1) << 4) - 16.0);
    }
}

#[inline(always)]
fn q5_1(b: &[u8; 24], y: &mut [f32; 32]) {
    let (d, m) = (half_at(b, 0), half_at(b, 2));
    let high = u32::from_le_bytes([b[4], b[5], b[6], b[7]]);
    for j in 0..16 {
        y[j] = d * f32::from(b[8 + j] & 15 | ((high >> j) as u8 & 1) << 4) + m;
        y[j + 16] = d * f32::from(b[8 + j] >> 4 | ((high >> (j + 16)) as u8 & 1) << 4) + m;
    }
}

/// Dequantises sixteen sub-blocks of 16: 4-bit scale and minimum each, values of two bits.
#[inline(always)]
fn q2_k(b: &[u8; 84], y: &mut [f32; 256]) {
    let (scales, rest) = b.split_at(16);
    let qs = &rest[..64];
    let (d, dmin) = (half_at(b, 80), half_at(b, 82));
    for s in 0..16 {
        let (scale, min) = (d * f32::from(scales[s] & 15), dmin * f32::from(scales[s] >> 4));
        let (half, shift, from) = (s / 8, 2 * (s % 8 / 2), 16 * (s % 2));
        for l in 0..16 {
            y[16 * s + l] = scale * f32::from(qs[32 * half + from + l] >> shift & 3) - min;
        }
    }
}

/// Dequantises sixteen sub-blocks of 16: signed 6-bit scales, values of three bits whose top bit is in `hmask`.
#[inline(always)]
fn q3_k(b: &[u8; 110], y: &mut [f32; 256]) {
    let (hmask, qs, t) = (&b[..32], &b[32..96], &b[96..108]);
    let d = half_at(b, 108);
    for s in 0..16 {
        let low = t[s % 8] >> (4 * (s / 8)) & 15;
        let high = t[8 + s % 4] >> (2 * (s / 4)) & 3;
        let scale = d * (f32::from(low | high << 4) - 32.0);
        let (half, shift, from) = (s / 8, 2 * (s % 8 / 2), 16 * (s % 2));
        for l in 0..16 {
            let top = hmask[from + l] >> (s / 2) & 1;
            let q = (qs[32 * half + from + l] >> shift & 3 | top << 2) as i8 - 4;
            y[16 * s + l] = scale * f32::from(q);
        }
    }
}

/// Returns the 6-bit scale and minimum of sub-block `s` of Q4_K and Q5_K.
#[inline(always)]
pub(super) fn scale_min(t: &[u8], s: usize) -> (f32, f32) {
    let (scale, min) = if s < 4 {
        (t[s] & 63, t[s + 4] & 63)
    } else {
        (t[s + 4] & 15 | t[s - 4] >> 6 << 4, t[s + 4] >> 4 | t[s] >> 6 << 4)
    };
    (f32::from(scale), f32::from(min))
}

#[inline(always)]
fn q4_k(b: &[u8; 144], y: &mut [f32; 256]) {
    let (d, dmin) = (half_at(b, 0), half_at(b, 2));
    for s in 0..8 {
        let (scale, min) = scale_min(&b[4..16], s);
        let (scale, min) = (d * scale, dmin * min);
        let qs = &b[16 + 32 * (s / 2)..][..32];
        for l in 0..32 {
            y[32 * s + l] = scale * f32::from(qs[l] >> (4 * (s % 2)) & 15) - min;
        }
    }
}

#[inline(always)]
fn q5_k(b: &[u8; 176], y: &mut [f32; 256]) {
    let (d, dmin) = (half_at(b, 0), half_at(b, 2));
    let qh = &b[16..48];
    for s in 0..8 {
        let (scale, min) = scale_min(&b[4..16], s);
        let (scale, min) = (d * scale, dmin * min);
        let qs = &b[48 + 32 * (s / 2)..][..32];
        for l in 0..32 {
            let q = qs[l] >> (4 * (s % 2)) & 15 | (qh[l] >> s & 1) << 4;
            y[32 * s + l] = scale * f32::from(q) - min;
        }
    }
}

#[inline(always)]
fn q6_k(b: &[u8; 210], y: &mut [f32; 256]) {
    let d = half_at(b, 208);
    for half in 0..2 {
        let (ql, qh) = (&b[64 * half..][..64], &b[128 + 32 * half..][..32]);
        let scales = &b[192 + 8 * half..][..8];
        for quarter in 0..4 {
            let out = &mut y[128 * half + 32 * quarter..][..32];
            let low = &ql[32 * (quarter % 2)..][..32];
            for l in 0..32 {
                let scale = d * f32::from(scales[2 * quarter + l / 16] as i8);
                let q = low[l] >> (4 * (quarter / 2)) & 15 | (qh[l] >> (2 * quarter) & 3) << 4;
                out[l] = scale * f32::from(q as i8 - 32);
            }
        }
    }
}

/// Returns the sum of products, in eight interleaved partial sums that the compiler can vectorise.
#[inline(always)]
pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0f32; 8];
    let (a8, a_rest) = a.as_chunks::<8>();
    let (b8, b_rest) = b.as_chunks::<8>();
    for (x, y) in a8.iter().zip(b8) {
        for i in 0..8 {
            sums[i] += x[i] * y[i];
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(x, y)| x * y).sum();
    sums.iter().sum::<f32>() + rest
}

/// Transposes `rows` rows of length `k` in `src` into `dst`, where entry `(p, r)` is at `p · nr + r`.
#[inline(always)]
pub(super) fn transpose(src: &[f32], k: usize, rows: usize, dst: &mut [f32], nr: usize) {
    for r in 0..rows {
        for p in 0..k {
            dst[p * nr + r] = src[r * k + p];
        }
    }
}

/// Computes one output tile: at most [`MR`] rows of x times a packed panel of [`NR`] weight rows.
///
/// # Safety
/// The pointers of `t` are valid for the extents it states, and nobody else touches its outputs meanwhile.
#[inline(always)]
pub(super) unsafe fn tile(t: &Tile) {
    let mut sums = [[0.0f32; NR]; MR];
    for p in 0..t.depth {
        // SAFETY: the panel holds `depth · NR` elements.
        let w = unsafe { &*t.panel.add(p * NR).cast::<[f32; NR]>() };
        for (i, sum) in sums.iter_mut().enumerate().take(t.rows) {
            // SAFETY: x holds `rows` rows of `depth` elements, `x_stride` apart.
            let a = unsafe { *t.x.add(i * t.x_stride + p) };
            for j in 0..NR {
                sum[j] += a * w[j];
            }
        }
    }
    for (i, sum) in sums.iter().enumerate().take(t.rows) {
        for (j, s) in sum.iter().enumerate().take(t.cols) {
            // SAFETY: the output holds `rows` rows of `cols` elements, `out_stride` apart.
            let y = unsafe { &mut *t.out.add(i * t.out_stride + j) };
            *y = if t.accumulate { *y + s } else { *s };
        }
    }
}
