//! The readable definition of every step: rounding, unpacking, sums of a strip and of a tile.

use super::super::scalar::{IQ4_VALUES, MXFP4_DOUBLES, f32_at, half_at, mxfp4_scale, scale_min};
use super::{BLOCK, FEW_ROWS, Format, MOST, OUTLIER, Strip, Tile, at};

/// Columns of an output tile.
pub(super) const NR: usize = 16;
/// Rows of an output tile.
pub(super) const MR: usize = 4;

/// Returns the factor that rounds a block, and its scale, from the bits of its greatest magnitude.
#[inline(always)]
pub(super) fn scale_of(most: u32) -> (f32, f32) {
    let (most, odd) = (f32::from_bits(most), most >= 0x7f80_0000);
    let factor = 127.0 / most;
    match (odd, factor.is_finite()) {
        (true, _) => (0.0, f32::NAN),
        (false, false) => (0.0, 0.0),
        (false, true) => (factor, most / 127.0),
    }
}

/// Rounds a row of x to eight bits. A block whose numbers are too small to divide by becomes zero; the scale of a block
/// with an infinity or a NaN is NaN.
#[inline(always)]
pub(super) fn round(x: &[f32], few: bool, row: &mut [u32]) {
    let n = x.len() / BLOCK;
    let (words, rest) = row.split_at_mut(n * at::SCALE);
    let (scale, rest) = rest.split_at_mut(n);
    let (minus, rest) = rest.split_at_mut(n);
    let (minus_halves, rest) = rest.split_at_mut(2 * n);
    let (times, rest) = rest.split_at_mut(n);
    let (times_halves, lanes) = rest.split_at_mut(2 * n);
    let numbers: &mut [i8] = bytemuck::cast_slice_mut(words);
    for (b, (x, a)) in x.as_chunks::<BLOCK>().0.iter().zip(numbers.as_chunks_mut::<BLOCK>().0).enumerate() {
        // Compares magnitudes by their bits, which puts infinities and NaN last.
        let most = x.iter().fold(0, |most: u32, x| most.max(x.to_bits() & 0x7fff_ffff));
        let (factor, s) = scale_of(most);
        for (a, x) in a.iter_mut().zip(x) {
            *a = (x * factor).round_ties_even() as i32 as i8;
        }
        let sum = |a: &[i8]| a.iter().map(|a| i32::from(*a)).sum::<i32>();
        let halves = [sum(&a[..16]), sum(&a[16..])];
        scale[b] = s.to_bits();
        minus[b] = -(halves[0] + halves[1]) as u32;
        times[b] = (s * (halves[0] + halves[1]) as f32).to_bits();
        for h in 0..2 {
            minus_halves[2 * b + h] = -halves[h] as u32;
            times_halves[2 * b + h] = (s * halves[h] as f32).to_bits();
        }
        if few {
            for (lane, four) in lanes[8 * b..8 * b + 8].iter_mut().zip(a.as_chunks::<4>().0) {
                *lane = -sum(four) as u32;
            }
        }
    }
}

/// What rounding lost in the blocks of a row that have outliers; zero in the others, and in a block that is not finite.
#[inline(always)]
pub(super) fn errors_of_outliers(x: &[f32], row: &[u32], errors: &mut [f32]) {
    let n = x.len() / BLOCK;
    let numbers: &[i8] = bytemuck::cast_slice(&row[..n * at::SCALE]);
    let scales: &[f32] = bytemuck::cast_slice(&row[n * at::SCALE..][..n]);
    let least = OUTLIER * scales.iter().map(|s| s * s).filter(|s| s.is_finite()).sum::<f32>() / n as f32;
    let blocks = x.as_chunks::<BLOCK>().0.iter().zip(numbers.as_chunks::<BLOCK>().0);
    for ((errors, s), (x, a)) in errors.as_chunks_mut::<BLOCK>().0.iter_mut().zip(scales).zip(blocks) {
        // The largest scale times 127 may round to infinity.
        let outlier = s * s > least && (s * 127.0).is_finite();
        for (error, (x, a)) in errors.iter_mut().zip(x.iter().zip(a)) {
            *error = if outlier { x - s * f32::from(*a) } else { 0.0 };
        }
    }
}

/// Applies `f` to every whole block: its bytes, its numbers, its scales and minima.
#[inline(always)]
fn each<const B: usize, const L: usize, const G: usize>(
    bytes: &[u8],
    u: &mut [u8],
    d: &mut [f32],
    m: &mut [f32],
    f: impl Fn(&[u8; B], &mut [u8; L], &mut [f32; G], &mut [f32; G]),
) {
    let groups = d.as_chunks_mut::<G>().0.iter_mut().zip(m.as_chunks_mut::<G>().0);
    for ((block, u), (d, m)) in bytes.as_chunks::<B>().0.iter().zip(u.as_chunks_mut::<L>().0).zip(groups) {
        f(block, u, d, m);
    }
}

/// Unpacks the integers $u$ of whole blocks, their scales $d$ and, if the format has them, minima $m$. All slices have
/// the same number of blocks.
#[inline(always)]
pub(super) fn unpack(format: Format, bytes: &[u8], u: &mut [u8], d: &mut [f32], m: &mut [f32]) {
    match format {
        Format::F32 | Format::F16 | Format::BF16 => {}
        Format::Q4_0 => each(bytes, u, d, m, |b: &[u8; 18], u: &mut [u8; 32], d: &mut [f32; 1], _| {
            nibbles(&b[2..], u);
            d[0] = half_at(b, 0);
        }),
        Format::Q4_1 => each(bytes, u, d, m, |b: &[u8; 20], u: &mut [u8; 32], d: &mut [f32; 1], m| {
            nibbles(&b[4..], u);
            (d[0], m[0]) = (half_at(b, 0), half_at(b, 2));
        }),
        Format::Q5_0 => each(bytes, u, d, m, |b: &[u8; 22], u: &mut [u8; 32], d: &mut [f32; 1], _| {
            fives(&b[2..], u);
            d[0] = half_at(b, 0);
        }),
        Format::Q5_1 => each(bytes, u, d, m, |b: &[u8; 24], u: &mut [u8; 32], d: &mut [f32; 1], m| {
            fives(&b[4..], u);
            (d[0], m[0]) = (half_at(b, 0), half_at(b, 2));
        }),
        Format::Q8_0 => each(bytes, u, d, m, |b: &[u8; 34], u: &mut [u8; 32], d: &mut [f32; 1], _| {
            u.iter_mut().zip(&b[2..]).for_each(|(u, b)| *u = b ^ 0x80);
            d[0] = half_at(b, 0);
        }),
        Format::Iq4Nl => each(bytes, u, d, m, |b: &[u8; 18], u: &mut [u8; 32], d: &mut [f32; 1], _| {
            from_table(&b[2..], &IQ4_BYTES, u);
            d[0] = half_at(b, 0);
        }),
        Format::Mxfp4 => each(bytes, u, d, m, |b: &[u8; 17], u: &mut [u8; 32], d: &mut [f32; 1], _| {
            from_table(&b[1..], &MXFP4_BYTES, u);
            d[0] = mxfp4_scale(b[0]);
        }),
        Format::Q2K => each(bytes, u, d, m, q2_k),
        Format::Q3K => each(bytes, u, d, m, q3_k),
        Format::Q4K => each(bytes, u, d, m, q4_k),
        Format::Q5K => each(bytes, u, d, m, q5_k),
        Format::Q6K => each(bytes, u, d, m, q6_k),
        Format::Q8K => each(bytes, u, d, m, |b: &[u8; 292], u: &mut [u8; 256], d: &mut [f32; 8], _| {
            u.iter_mut().zip(&b[4..]).for_each(|(u, b)| *u = b ^ 0x80);
            d.fill(f32_at(b, 0));
        }),
        Format::Iq4Xs => each(bytes, u, d, m, iq4_xs),
    }
}

/// Shifts a table of integers by a zero point.
const fn moved(table: &[f32; 16], zero: i32) -> [u8; 16] {
    let mut out = [0; 16];
    let mut i = 0;
    while i < 16 {
        out[i] = (table[i] as i32 + zero) as u8;
        i += 1;
    }
    out
}

/// Values of the 16 codes of IQ4_NL and IQ4_XS, plus 128.
pub(super) const IQ4_BYTES: [u8; 16] = moved(&IQ4_VALUES, 128);
/// Twice the values of the 4-bit codes of MXFP4, plus 16.
pub(super) const MXFP4_BYTES: [u8; 16] = moved(&MXFP4_DOUBLES, 16);

/// Unpacks the low halves of sixteen bytes, then the high ones.
#[inline(always)]
fn nibbles(b: &[u8], u: &mut [u8; 32]) {
    for j in 0..16 {
        u[j] = b[j] & 15;
        u[j + 16] = b[j] >> 4;
    }
}

/// Unpacks nibbles with a fifth bit each; the 32 fifth bits come first.
#[inline(always)]
fn fives(b: &[u8], u: &mut [u8; 32]) {
    let high = u32::from_le_bytes([b[0], b[1], b[2], b[3]]);
    for j in 0..16 {
        u[j] = b[4 + j] & 15 | ((high >> j) as u8 & 1) << 4;
        u[j + 16] = b[4 + j] >> 4 | ((high >> (j + 16)) as u8 & 1) << 4;
    }
}

#[inline(always)]
fn from_table(b: &[u8], table: &[u8; 16], u: &mut [u8]) {
    for j in 0..16 {
        u[j] = table[usize::from(b[j] & 15)];
        u[j + 16] = table[usize::from(b[j] >> 4)];
    }
}

#[inline(always)]
fn q2_k(b: &[u8; 84], u: &mut [u8; 256], d: &mut [f32; 16], m: &mut [f32; 16]) {
    let (all, least) = (half_at(b, 80), half_at(b, 82));
    for s in 0..16 {
        (d[s], m[s]) = (all * f32::from(b[s] & 15), -(least * f32::from(b[s] >> 4)));
        let (half, shift, from) = (s / 8, 2 * (s % 8 / 2), 16 * (s % 2));
        for l in 0..16 {
            u[16 * s + l] = b[16 + 32 * half + from + l] >> shift & 3;
        }
    }
}

#[inline(always)]
fn q3_k(b: &[u8; 110], u: &mut [u8; 256], d: &mut [f32; 16], _: &mut [f32; 16]) {
    let (mask, numbers, t) = (&b[..32], &b[32..96], &b[96..108]);
    let all = half_at(b, 108);
    for s in 0..16 {
        let low = t[s % 8] >> (4 * (s / 8)) & 15;
        let high = t[8 + s % 4] >> (2 * (s / 4)) & 3;
        d[s] = all * (f32::from(low | high << 4) - 32.0);
        let (half, shift, from) = (s / 8, 2 * (s % 8 / 2), 16 * (s % 2));
        for l in 0..16 {
            let top = mask[from + l] >> (s / 2) & 1;
            u[16 * s + l] = numbers[32 * half + from + l] >> shift & 3 | top << 2;
        }
    }
}

/// Unpacks the scales and minima of Q4_K and Q5_K.
#[inline(always)]
pub(super) fn scales_and_minima(b: &[u8], d: &mut [f32; 8], m: &mut [f32; 8]) {
    let (all, least) = (half_at(b, 0), half_at(b, 2));
    for s in 0..8 {
        let (scale, min) = scale_min(&b[4..16], s);
        (d[s], m[s]) = (all * scale, -(least * min));
    }
}

#[inline(always)]
fn q4_k(b: &[u8; 144], u: &mut [u8; 256], d: &mut [f32; 8], m: &mut [f32; 8]) {
    scales_and_minima(b, d, m);
    for two in 0..4 {
        for l in 0..32 {
            u[64 * two + l] = b[16 + 32 * two + l] & 15;
            u[64 * two + 32 + l] = b[16 + 32 * two + l] >> 4;
        }
    }
}

#[inline(always)]
fn q5_k(b: &[u8; 176], u: &mut [u8; 256], d: &mut [f32; 8], m: &mut [f32; 8]) {
    scales_and_minima(b, d, m);
    for two in 0..4 {
        for l in 0..32 {
            let high = b[16 + l] >> (2 * two);
            u[64 * two + l] = b[48 + 32 * two + l] & 15 | (high & 1) << 4;
            u[64 * two + 32 + l] = b[48 + 32 * two + l] >> 4 | (high >> 1 & 1) << 4;
        }
    }
}

#[inline(always)]
fn q6_k(b: &[u8; 210], u: &mut [u8; 256], d: &mut [f32; 16], _: &mut [f32; 16]) {
    let all = half_at(b, 208);
    for half in 0..2 {
        let (low, high) = (&b[64 * half..][..64], &b[128 + 32 * half..][..32]);
        for l in 0..32 {
            u[128 * half + l] = low[l] & 15 | (high[l] & 3) << 4;
            u[128 * half + 32 + l] = low[32 + l] & 15 | (high[l] >> 2 & 3) << 4;
            u[128 * half + 64 + l] = low[l] >> 4 | (high[l] >> 4 & 3) << 4;
            u[128 * half + 96 + l] = low[32 + l] >> 4 | (high[l] >> 6) << 4;
        }
    }
    for s in 0..16 {
        d[s] = all * f32::from(b[192 + s] as i8);
    }
}

#[inline(always)]
fn iq4_xs(b: &[u8; 136], u: &mut [u8; 256], d: &mut [f32; 8], _: &mut [f32; 8]) {
    let all = half_at(b, 0);
    let high = u16::from_le_bytes([b[2], b[3]]);
    for s in 0..8 {
        let low = b[4 + s / 2] >> (4 * (s % 2)) & 15;
        d[s] = all * (f32::from(low | ((high >> (2 * s)) as u8 & 3) << 4) - 32.0);
        from_table(&b[8 + 16 * s..], &IQ4_BYTES, &mut u[32 * s..32 * s + 32]);
    }
}

/// Computes a strip, block by block.
///
/// # Safety
/// As [`super::run_strip`].
pub(super) unsafe fn strip(strip: &Strip<'_>) {
    let Strip { weight, form, .. } = strip;
    let (block, bytes) = (weight.format.block_len(), weight.format.block_bytes());
    let (mut u, mut d, mut m) = ([0; MOST], [0.0; MOST / 16], [0.0; MOST / 16]);
    let groups = block / form.group;
    for r in strip.rows.clone() {
        let mut sums = [0.0f32; FEW_ROWS];
        for (i, stored) in weight.row(r).chunks_exact(bytes).enumerate() {
            unpack(weight.format, stored, &mut u[..block], &mut d[..groups], &mut m[..groups]);
            for n in 0..2 * strip.x.len() {
                let (x, sum) = (strip.x[n / 2][n % 2], &mut sums[n / 2]);
                let blocks = weight.cols / BLOCK;
                let numbers: &[i8] = bytemuck::cast_slice(&x[..blocks * at::SCALE]);
                for (g, u) in u[..block].chunks_exact(form.group).enumerate() {
                    let first = i * block + g * form.group;
                    let s = f32::from_bits(x[blocks * at::SCALE + first / BLOCK]);
                    let zero = form.zero.map_or(0, |z| 1 << z);
                    let (mut products, mut total) = (0, 0);
                    for (u, a) in u.iter().zip(&numbers[first..]) {
                        products += (i32::from(*u) - zero) * i32::from(*a);
                        total += i32::from(*a);
                    }
                    *sum += s * d[g] * products as f32;
                    if form.zero.is_none() {
                        *sum += s * m[g] * total as f32;
                    }
                }
            }
        }
        for n in 0..strip.x.len() {
            // SAFETY: the output holds `x.len() · weight.rows` elements.
            unsafe { *strip.out.add(n * weight.rows + r) = sums[n] };
        }
    }
}

/// Computes one output tile.
///
/// # Safety
/// As [`super::run_tile`].
pub(super) unsafe fn tile(t: &Tile<'_>) {
    let group = t.form.group;
    for &n in t.rows {
        let x = &t.x[n * t.stride..][..t.blocks * at::MANY];
        let numbers: &[i8] = bytemuck::cast_slice(&x[..t.blocks * at::SCALE]);
        for r in 0..t.cols {
            let mut sum = 0.0f32;
            for g in 0..t.count * BLOCK / group {
                let first = t.first * BLOCK + g * group;
                let s = f32::from_bits(x[t.blocks * at::SCALE + first / BLOCK]);
                let zero = t.form.zero.map_or(0, |z| 1 << z);
                let (mut products, mut total) = (0, 0);
                for j in 0..group {
                    let four = t.panel.words[(g * group + j) / 4 * NR + r].to_le_bytes();
                    let a = i32::from(numbers[first + j]);
                    products += (i32::from(four[j % 4]) - zero) * a;
                    total += a;
                }
                sum += s * t.panel.scales[g * NR + r] * products as f32;
                if t.form.zero.is_none() {
                    sum += s * t.panel.minima[g * NR + r] * total as f32;
                }
            }
            // SAFETY: the output holds `rows` rows of `cols` elements, `out_stride` apart.
            let y = unsafe { &mut *t.out.add(n * t.out_stride + r) };
            *y = if t.accumulate { *y + sum } else { sum };
        }
    }
}

pub(super) fn burn(iterations: u64) -> (u64, i32) {
    let mut sums = [0i32; 8];
    for i in 0..iterations {
        for (j, sum) in sums.iter_mut().enumerate() {
            *sum = sum.wrapping_add((i as i8 as i32).wrapping_mul(j as i32 + 1));
        }
    }
    (2 * 8 * iterations, sums.iter().fold(0, |a, b| a.wrapping_add(*b)))
}
