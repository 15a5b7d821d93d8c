//! AVX-512 with BF16: pairs of bfloat16 numbers multiplied and added at once, in tiles of 12 × 32 outputs.

use super::narrow::x86_rows;
use super::x86_avx512::{BF16, F16, F32, Q4_0, Q4_1, Q8_0, Unit, Whole, tail_mask};
use super::{DEPTH, FEW_ROWS, FUSED_ROWS, Format, Target, Targets, dequantise_into, half_width, scalar};
use crate::par::*;
use crate::scratch::Buf;
use crate::{MatRef, Scratch};
use std::arch::x86_64::*;

/// Columns of an output tile: two registers.
const NR: usize = 32;
/// Rows of an output tile: with two registers of columns, it takes 24 registers for sums, two for weights and one for a
/// broadcast.
const MR: usize = 12;

/// Returns true if the processor has the instructions.
pub(super) fn is_available() -> bool {
    super::Isa::best() == super::Isa::Avx512 && std::arch::is_x86_feature_detected!("avx512bf16")
}

/// Rows of x in bfloat16, two to a word, padded with zeros to whole registers.
struct Rounded<'p> {
    words: Buf<'p, u32>,
    rows: usize,
    cols: usize,
    stride: usize,
}

impl<'p> Rounded<'p> {
    fn new(x: MatRef<'_, f32>, scratch: &'p Scratch) -> Self {
        let stride = x.cols().div_ceil(32) * 16;
        let mut words = scratch.take::<u32>(x.rows() * stride);
        // SAFETY: the caller checked that the processor has the features.
        let round = |(i, row): (usize, &mut [u32])| unsafe { round(x.row(i), bytemuck::cast_slice_mut(row)) };
        if x.rows() <= FUSED_ROWS {
            words.chunks_exact_mut(stride).enumerate().for_each(round);
        } else {
            words.par_chunks_exact_mut(stride).with_min_len(8).enumerate().for_each(round);
        }
        Self { words, rows: x.rows(), cols: x.cols(), stride }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
fn round(x: &[f32], out: &mut [u16]) {
    out.iter_mut().zip(x).for_each(|(y, x)| *y = half_width::bits(*x));
    out[x.len()..].fill(0);
}

/// Computes all products of a pass; the caller checked the shapes, that x has elements, and [`is_available`].
pub(super) fn run(x: MatRef<'_, f32>, jobs: &mut [super::Job<'_>], scratch: &Scratch) {
    let rounded = Rounded::new(x, scratch);
    for jobs in jobs.chunks_mut(super::AT_ONCE) {
        let targets = Targets::new(x.rows(), jobs);
        if x.rows() <= FUSED_ROWS {
            targets.share(|t, rows| {
                for n in (0..x.rows()).step_by(FEW_ROWS) {
                    let count = FEW_ROWS.min(x.rows() - n);
                    // SAFETY: the processor has the features; shares are disjoint ranges of weight rows.
                    unsafe { strip(&rounded, n, count, t, rows.clone()) };
                }
            });
        } else {
            tiled(&rounded, &targets, scratch);
        }
    }
}

/// Multiplies weight rows `rows` with `count` rows of x from `n` on.
///
/// # Safety
/// The processor has the features, and nobody else writes the outputs of these weight rows meanwhile.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
unsafe fn strip(x: &Rounded<'_>, n: usize, count: usize, t: &Target<'_>, rows: std::ops::Range<usize>) {
    // SAFETY: passed on from the caller.
    unsafe {
        match t.weight.format {
            Format::Q4_0 => rows_of::<Q4_0>(x, n, count, t, rows),
            Format::Q4_1 => rows_of::<Q4_1>(x, n, count, t, rows),
            Format::Q8_0 => rows_of::<Q8_0>(x, n, count, t, rows),
            Format::F32 => rows_of::<F32>(x, n, count, t, rows),
            Format::F16 => rows_of::<F16>(x, n, count, t, rows),
            Format::BF16 => rows_of::<BF16>(x, n, count, t, rows),
            other => by_format!(other, rows_of(x, n, count, t, rows), {}),
        }
    }
}

/// Rounds thirty-two numbers to bfloat16, in order.
#[target_feature(enable = "avx512f,avx512bf16")]
fn joined(low: __m512, high: __m512) -> __m512bh {
    _mm512_cvtne2ps_pbh(high, low)
}

/// Loads thirty-two numbers of x.
///
/// # Safety
/// Sixteen words can be read at `p`.
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn load_x(p: *const u32) -> __m512bh {
    // SAFETY: passed on from the caller; both types are 512 bits of which every pattern is a value.
    unsafe { std::mem::transmute::<__m512i, __m512bh>(_mm512_loadu_si512(p.cast())) }
}

/// # Safety
/// As [`strip`]; `U` is the format of the weights.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
unsafe fn rows_of<U: Unit>(
    x: &Rounded<'_>,
    n: usize,
    count: usize,
    t: &Target<'_>,
    rows: std::ops::Range<usize>,
) {
    let whole = x.cols / 32 * 32;
    let at: [*const u32; FEW_ROWS] =
        std::array::from_fn(|i| x.words[(n + i.min(count - 1)) * x.stride..][..x.stride].as_ptr());
    for r in rows {
        let row = t.weight.row(r);
        let mut sums = [_mm512_setzero_ps(); FEW_ROWS];
        for unit in 0..whole / 32 / U::GROUPS {
            // SAFETY: a row holds units of U::BYTES bytes, x whole registers.
            unsafe {
                let p = row.as_ptr().add(unit * U::BYTES);
                let scales = U::scales(p);
                for g in 0..U::GROUPS {
                    let (low, high) = U::group(p, g, &scales);
                    let w = joined(low, high);
                    for i in 0..count {
                        let x = load_x(at[i].add(16 * (unit * U::GROUPS + g)));
                        sums[i] = _mm512_dpbf16_ps(sums[i], w, x);
                    }
                }
            }
        }
        if whole < x.cols {
            // Only formats with blocks of one value end inside a group of 32.
            let mut rest = [0.0f32; 32];
            scalar::dequantise(t.weight.format, &row[whole / 32 * U::BYTES..], &mut rest[..x.cols - whole]);
            // SAFETY: `rest` holds 32 numbers, and rows of x whole registers.
            unsafe {
                let w = joined(_mm512_loadu_ps(rest.as_ptr()), _mm512_loadu_ps(rest.as_ptr().add(16)));
                for i in 0..count {
                    sums[i] = _mm512_dpbf16_ps(sums[i], w, load_x(at[i].add(whole / 2)));
                }
            }
        }
        for i in 0..count {
            // SAFETY: the output holds `x.rows · weight.rows` elements.
            unsafe { *t.out.0.add((n + i) * t.weight.rows + r) = _mm512_reduce_add_ps(sums[i]) };
        }
    }
}

/// Multiplies many rows of x: one task per 32 weight rows, split into row ranges of x if these are fewer than threads.
fn tiled(x: &Rounded<'_>, targets: &Targets<'_>, scratch: &Scratch) {
    let tiles = targets.tiles(NR);
    if tiles == 0 {
        return;
    }
    let parts = rayon::current_num_threads().div_ceil(tiles).min(x.rows.div_ceil(4 * MR)).max(1);
    let part = x.rows.div_ceil(parts).next_multiple_of(MR);
    (0..tiles * parts).into_par_iter().with_max_len(1).for_each(|task| {
        let (mut tile, n) = (task / parts, task % parts * part);
        for target in targets.iter() {
            let count = target.weight.rows.div_ceil(NR);
            if tile < count {
                let rows = tile * NR..(tile * NR + NR).min(target.weight.rows);
                run_panel(x, n..(n + part).min(x.rows), target, rows, scratch);
                return;
            }
            tile -= count;
        }
    });
}

/// Multiplies at most 32 weight rows with the rows `part` of x.
fn run_panel(
    x: &Rounded<'_>,
    part: std::ops::Range<usize>,
    target: &Target<'_>,
    rows: std::ops::Range<usize>,
    scratch: &Scratch,
) {
    let weight = target.weight;
    let most = DEPTH.min(x.cols).next_multiple_of(2);
    let mut values = scratch.take::<f32>(most);
    let mut words = scratch.take::<u32>(NR * most);
    let (of_rows, panel) = words.split_at_mut(NR * most / 2);
    let mut k = 0;
    while k < x.cols {
        // Equal pieces, cut at block boundaries and between pairs.
        let pieces = (x.cols - k).div_ceil(DEPTH);
        let align = weight.format.block_len().max(16);
        let depth = (x.cols - k).div_ceil(pieces).next_multiple_of(align).min(x.cols - k);
        let (steps, block, bytes) =
            (depth.div_ceil(2), weight.format.block_len(), weight.format.block_bytes());
        let of_rows = &mut of_rows[..NR * steps];
        of_rows[rows.len() * steps..].fill(0);
        for (r, to) in rows.clone().zip(of_rows.chunks_exact_mut(steps)) {
            let stored = &weight.row(r)[k / block * bytes..(k + depth) / block * bytes];
            dequantise_into(super::Isa::Avx512, weight.format, stored, &mut values[..depth]);
            // SAFETY: the processor has the features.
            unsafe { round(&values[..depth], bytemuck::cast_slice_mut(to)) };
        }
        let panel = &mut panel[..NR * steps];
        // SAFETY: the processor has AVX2, and both hold 32 rows of `steps` words, which are moved as they are.
        unsafe {
            super::x86_avx2::transpose(
                bytemuck::cast_slice(of_rows),
                steps,
                NR,
                bytemuck::cast_slice_mut(panel),
            );
        }
        for n in part.clone().step_by(MR) {
            let tile = Tile {
                x: &x.words[n * x.stride..],
                stride: x.stride,
                first: k / 2,
                steps,
                panel,
                // SAFETY: `n < x.rows` and `rows.start < weight.rows`.
                out: unsafe { target.out.0.add(n * weight.rows + rows.start) },
                out_stride: weight.rows,
                cols: rows.len(),
                accumulate: k > 0,
            };
            // SAFETY: the processor has the features, x has that many rows from `n` on, and tasks are disjoint in rows of
            // x or of the weights.
            unsafe { run_tile(&tile, MR.min(part.end - n)) };
        }
        k += depth;
    }
}

/// Operands of a register tile.
struct Tile<'a> {
    x: &'a [u32],
    stride: usize,
    /// First pair of this piece, and number of its pairs.
    first: usize,
    steps: usize,
    /// `steps × NR` pairs of weights.
    panel: &'a [u32],
    out: *mut f32,
    out_stride: usize,
    cols: usize,
    accumulate: bool,
}

/// # Safety
/// The processor has the features; the outputs are valid and touched by nobody else meanwhile.
unsafe fn run_tile(t: &Tile<'_>, rows: usize) {
    // SAFETY: passed on from the caller.
    unsafe {
        match rows {
            12 => tile::<12>(t),
            11 => tile::<11>(t),
            10 => tile::<10>(t),
            9 => tile::<9>(t),
            8 => tile::<8>(t),
            7 => tile::<7>(t),
            6 => tile::<6>(t),
            5 => tile::<5>(t),
            4 => tile::<4>(t),
            3 => tile::<3>(t),
            2 => tile::<2>(t),
            _ => tile::<1>(t),
        }
    }
}

/// # Safety
/// As [`run_tile`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
unsafe fn tile<const M: usize>(t: &Tile<'_>) {
    assert!(t.x.len() >= (M - 1) * t.stride + t.first + t.steps && t.panel.len() == t.steps * NR);
    let x: [*const u32; M] = std::array::from_fn(|i| t.x.as_ptr().wrapping_add(i * t.stride + t.first));
    let mut w = t.panel.as_ptr();
    let mut sums = [[_mm512_setzero_ps(); 2]; M];
    for p in 0..t.steps {
        // SAFETY: the panel holds `steps · NR` words, x M rows of `steps` words: asserted above. The types are 512 bits of
        // which every pattern is a value.
        unsafe {
            let (w0, w1) = (load_x(w), load_x(w.add(16)));
            for i in 0..M {
                let a = std::mem::transmute::<__m512i, __m512bh>(_mm512_set1_epi32(*x[i].add(p) as i32));
                sums[i][0] = _mm512_dpbf16_ps(sums[i][0], w0, a);
                sums[i][1] = _mm512_dpbf16_ps(sums[i][1], w1, a);
            }
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
