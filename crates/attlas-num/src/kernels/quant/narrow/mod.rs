//! Products in 8-bit integers.
//!
//! A row of x is cut into blocks of 32, each rounded to $x_i \approx s\,a_i$ with $s = \max|x_i| / 127$ and integer
//! $a_i$, as llama.cpp rounds activations (its formats Q8_0 and Q8_1). Weights are stored as integers anyway: in groups
//! of 32 or 16, $w_i = d\,(u_i - z) + m$ with 8-bit $u_i$, a zero point $z$ of the format and a minimum $m$ where the
//! format has one. A group then adds
//!
//! $$ s\,d \sum_i (u_i - z)\,a_i \;+\; s\,m \sum_i a_i $$
//!
//! where both sums are exact in 32 bits, so implementations differ only in the order in which they add groups. Compared
//! with the product with unrounded x, the error of an element is at most $\sum_b \tfrac12 s_b \sum_{i \in b} |w_i|$.
//!
//! Activations of language models have outliers, and the few blocks that hold them cause most of that error. Blocks whose
//! $s_b^2$ exceeds twice the mean of the row are therefore rounded twice: their rounding errors are rounded to eight bits again, with
//! a scale of their own, and multiplied as a second, sparse row. The choice depends on the row of x alone, so a row has
//! the same integers alone and in a prompt.
//!
//! `scalar.rs` is the definition. Few rows of x (decoding) are multiplied with each weight row as it is read; for many
//! (prefill), a panel of weight rows is unpacked to eight bits once and multiplied with tiles of rows of x.

#[cfg(target_arch = "aarch64")]
mod aarch64_dot;
mod scalar;
#[cfg(target_arch = "x86_64")]
mod x86_avx2;
#[cfg(target_arch = "x86_64")]
mod x86_avx512;
#[cfg(target_arch = "x86_64")]
mod x86_eights;
#[cfg(target_arch = "x86_64")]
pub(super) mod x86_rows;

use super::{AT_ONCE, DEPTH, FEW_ROWS, FUSED_ROWS, Format, Job, Target, Targets, WeightRef, few_rows};
use crate::par::*;
use crate::scratch::Buf;
use crate::{MatRef, Scratch};

/// Elements of x that share one scale.
pub const BLOCK: usize = 32;
/// Most weights in a stored block.
const MOST: usize = 256;

/// Instruction set of a product in 8-bit integers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// Plain Rust.
    Scalar,
    /// AVX2, FMA and F16C: products of pairs in 16 bits.
    Avx2,
    /// The above and AVX-VNNI: four products at once.
    AvxVnni,
    /// AVX-512 F, BW, DQ, VL and VNNI.
    Avx512Vnni,
    /// NEON with dot products of eight bits.
    NeonDot,
}

impl Isa {
    /// Returns the instruction sets of this processor, slowest first.
    pub fn available() -> &'static [Isa] {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::is_x86_feature_detected as has;
            if has!("avx2") && has!("fma") && has!("f16c") {
                let wide = has!("avx512f") && has!("avx512bw") && has!("avx512dq") && has!("avx512vl");
                return match (has!("avxvnni"), wide && has!("avx512vnni")) {
                    (true, true) => &[Self::Scalar, Self::Avx2, Self::AvxVnni, Self::Avx512Vnni],
                    (false, true) => &[Self::Scalar, Self::Avx2, Self::Avx512Vnni],
                    (true, false) => &[Self::Scalar, Self::Avx2, Self::AvxVnni],
                    (false, false) => &[Self::Scalar, Self::Avx2],
                };
            }
        }
        #[cfg(target_arch = "aarch64")]
        if std::arch::is_aarch64_feature_detected!("dotprod") {
            return &[Self::Scalar, Self::NeonDot];
        }
        &[Self::Scalar]
    }

    /// Returns the fastest instruction set of this processor.
    pub fn best() -> Isa {
        *Self::available().last().unwrap_or(&Self::Scalar)
    }
}

/// Integer layout of a format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Form {
    /// Weights that share one scale: 16 or 32.
    group: usize,
    /// Base-2 logarithm of the zero point; none if groups have a minimum.
    zero: Option<u32>,
}

fn form(format: Format) -> Option<Form> {
    let (group, zero) = match format {
        Format::F32 | Format::F16 | Format::BF16 => return None,
        Format::Q4_0 => (32, Some(3)),
        Format::Q5_0 | Format::Mxfp4 => (32, Some(4)),
        Format::Q8_0 | Format::Q8K | Format::Iq4Nl | Format::Iq4Xs => (32, Some(7)),
        Format::Q4_1 | Format::Q5_1 | Format::Q4K | Format::Q5K => (32, None),
        Format::Q2K => (16, None),
        Format::Q3K => (16, Some(2)),
        Format::Q6K => (16, Some(5)),
    };
    Some(Form { group, zero })
}

/// Returns true if weights of the format are integers of at most eight bits.
pub fn is_narrow(format: Format) -> bool {
    form(format).is_some()
}

/// Rows of x in eight bits, each followed by its rounding errors in eight bits. A row is a run of words: the integers, four
/// to a word, then the per-block data that products need.
struct Rounded<'p> {
    words: Buf<'p, u32>,
    /// Per 64 rows, one word per block whose bit i is set if row i has errors there. Only for many rows.
    masks: Buf<'p, u64>,
    rows: usize,
    /// Blocks per row.
    blocks: usize,
    /// Words per row; the errors of a row follow it.
    stride: usize,
}

/// A block is rounded twice if its squared scale exceeds the mean of its row by this factor. In SmolLM2 10 to 15 % of the
/// blocks do, and they cause 51 to 78 % of the squared error.
const OUTLIER: f32 = 2.0;

/// Rows of x that share a mask.
const MASKED: usize = 64;
/// Most rows of a tile, on any instruction set.
const MOST_ROWS: usize = 6;

/// Offsets of the parts of a row, in words per block.
#[cfg_attr(
    not(any(target_arch = "x86_64", test)),
    expect(dead_code, reason = "x86-64 alone multiplies with unsigned weights, which negated sums correct")
)]
mod at {
    /// Scales, one f32 per block.
    pub(super) const SCALE: usize = 8;
    /// Negated sums, one i32 per block.
    pub(super) const MINUS: usize = 9;
    /// Negated sums of both halves, two i32 per block.
    pub(super) const MINUS_HALVES: usize = 10;
    /// Scale times sum, one f32 per block.
    pub(super) const TIMES: usize = 12;
    /// Scale times the sums of both halves, two f32 per block.
    pub(super) const TIMES_HALVES: usize = 13;
    /// Negated sums of four neighbours, eight i32 per block; present only for few rows.
    pub(super) const LANES: usize = 15;
    /// Words per block without and with the last part.
    pub(super) const MANY: usize = 15;
    pub(super) const FEW: usize = 23;
}

impl<'p> Rounded<'p> {
    fn new(isa: Isa, x: MatRef<'_, f32>, scratch: &'p Scratch) -> Self {
        let (rows, blocks) = (x.rows(), x.cols() / BLOCK);
        let few = rows <= FUSED_ROWS;
        let stride = blocks * if few { at::FEW } else { at::MANY };
        let mut words = scratch.take::<u32>(rows * 2 * stride);
        let round = |x: &[f32], row: &mut [u32]| match isa {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the caller checked that the processor has the features.
            Isa::Avx2 | Isa::AvxVnni | Isa::Avx512Vnni => unsafe { x86_avx2::round(x, few, row) },
            _ => scalar::round(x, few, row),
        };
        let errors_of_outliers = |x: &[f32], row: &[u32], buffer: &mut [f32]| match isa {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Isa::Avx2 | Isa::AvxVnni | Isa::Avx512Vnni => unsafe {
                x86_avx2::errors_of_outliers(x, row, buffer);
            },
            _ => scalar::errors_of_outliers(x, row, buffer),
        };
        let twice = |i: usize, words: &mut [u32], buffer: &mut [f32]| {
            let (row, errors) = words.split_at_mut(stride);
            round(x.row(i), row);
            errors_of_outliers(x.row(i), row, buffer);
            round(buffer, errors);
        };
        let mut masks = scratch.take(if few { 0 } else { rows.div_ceil(MASKED) * blocks });
        if few {
            let mut buffer = scratch.take(x.cols());
            words.chunks_exact_mut(2 * stride).enumerate().for_each(|(i, w)| twice(i, w, &mut buffer));
        } else {
            let some = words.par_chunks_mut(MASKED * 2 * stride).zip(masks.par_chunks_exact_mut(blocks));
            some.enumerate().for_each(|(chunk, (words, masks))| {
                let mut buffer = scratch.take(x.cols());
                masks.fill(0);
                for (i, words) in words.chunks_exact_mut(2 * stride).enumerate() {
                    twice(chunk * MASKED + i, words, &mut buffer);
                    let scales = &words[stride + blocks * at::SCALE..][..blocks];
                    masks.iter_mut().zip(scales).for_each(|(mask, s)| *mask |= u64::from(*s != 0) << i);
                }
            });
        }
        Self { words, masks, rows, blocks, stride }
    }

    /// Returns the rows of a range that have errors in a block.
    fn rows_with_errors(&self, block: usize, range: std::ops::Range<usize>) -> impl Iterator<Item = usize> {
        (range.start / MASKED..range.end.div_ceil(MASKED)).flat_map(move |chunk| {
            let first = chunk * MASKED;
            let mut mask = self.masks[chunk * self.blocks + block];
            mask &= u64::MAX << range.start.saturating_sub(first);
            if range.end - first < MASKED {
                mask &= (1 << (range.end - first)) - 1;
            }
            std::iter::from_fn(move || {
                let bit = (mask != 0).then(|| mask.trailing_zeros() as usize);
                mask &= mask.wrapping_sub(1);
                bit.map(|bit| first + bit)
            })
        })
    }

    fn row(&self, n: usize) -> &[u32] {
        &self.words[2 * n * self.stride..][..self.stride]
    }

    /// The rounding errors of a row, zero but for its outliers.
    fn errors(&self, n: usize) -> &[u32] {
        &self.words[(2 * n + 1) * self.stride..][..self.stride]
    }
}

/// Computes several products with the same x in one parallel pass.
///
/// Panics if the shapes do not match or a format has no integer layout.
pub fn products(isa: Isa, x: MatRef<'_, f32>, jobs: &mut [Job<'_>], scratch: &Scratch) {
    assert!(Isa::available().contains(&isa), "this processor has no {isa:?}");
    for job in jobs.iter() {
        assert!(is_narrow(job.weight.format), "{} is not made of whole numbers", job.weight.format);
        assert_eq!(x.cols(), job.weight.cols, "columns of x and of the weights");
        assert_eq!(Some(job.out.len()), x.rows().checked_mul(job.weight.rows), "length of the product");
    }
    if x.cols() == 0 || x.rows() == 0 || jobs.is_empty() {
        jobs.iter_mut().for_each(|job| job.out.fill(0.0));
        return;
    }
    let rounded = Rounded::new(isa, x, scratch);
    for jobs in jobs.chunks_mut(AT_ONCE) {
        let targets = Targets::new(x.rows(), jobs);
        if x.rows() <= FUSED_ROWS {
            fused(isa, &rounded, &targets);
        } else {
            tiled(isa, &rounded, &targets, scratch);
        }
    }
}

/// Weight rows `rows` of a matrix against at most [`FEW_ROWS`] rows of x.
struct Strip<'a> {
    weight: WeightRef<'a>,
    form: Form,
    rows: std::ops::Range<usize>,
    /// Rows of x, each with its errors.
    x: &'a [[&'a [u32]; 2]],
    /// Output of the first row of x for weight row 0.
    out: *mut f32,
}

fn form_of(target: &Target<'_>) -> Form {
    form(target.weight.format).unwrap_or_else(|| unreachable!("seen before the pass"))
}

/// Multiplies few rows of x.
fn fused(isa: Isa, x: &Rounded<'_>, targets: &Targets<'_>) {
    targets.share(|t, rows| {
        for part in few_rows(x.rows) {
            let some: [[&[u32]; 2]; FEW_ROWS] = std::array::from_fn(|i| {
                let n = (part.start + i).min(part.end - 1);
                [x.row(n), x.errors(n)]
            });
            let strip = Strip {
                weight: t.weight,
                form: form_of(t),
                rows: rows.clone(),
                x: &some[..part.len()],
                // SAFETY: the output holds `x.rows · weight.rows` elements.
                out: unsafe { t.out.0.add(part.start * t.weight.rows) },
            };
            // SAFETY: shares are disjoint ranges of weight rows, so nobody else writes these columns.
            unsafe { run_strip(isa, &strip) };
        }
    });
}

/// # Safety
/// The processor has `isa`; `strip.out` is valid for the whole product and its columns `strip.rows` are
/// written by nobody else meanwhile.
unsafe fn run_strip(isa: Isa, strip: &Strip<'_>) {
    // SAFETY: passed on from the caller.
    unsafe {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => x86_rows::pairs(strip),
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni => x86_rows::vnni(strip),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni => x86_eights::strip(strip),
            #[cfg(target_arch = "aarch64")]
            Isa::NeonDot => aarch64_dot::strip(strip),
            _ => scalar::strip(strip),
        }
    }
}

/// Operands of a register tile.
struct Tile<'a> {
    form: Form,
    /// Rows of x, or their errors, `stride` words apart, with `blocks` blocks each.
    x: &'a [u32],
    stride: usize,
    blocks: usize,
    /// First block of this piece, and number of its blocks.
    first: usize,
    count: usize,
    /// The rows of the tile, at most [`MOST_ROWS`].
    rows: &'a [usize],
    panel: Panel<'a>,
    /// Output of row 0 of x; rows of `cols` elements, `out_stride` apart.
    out: *mut f32,
    out_stride: usize,
    cols: usize,
    /// Add to the output instead of replacing it.
    accumulate: bool,
}

/// Weight rows over a piece of the depth, zero past the last: per four neighbouring columns, one word for every row.
#[derive(Clone, Copy)]
struct Panel<'a> {
    words: &'a [u32],
    /// Per group, the scales of all rows.
    scales: &'a [f32],
    /// Laid out as the scales; only if groups have minima.
    minima: &'a [f32],
}

/// Returns the rows and columns of the register tile.
fn tile_shape(isa: Isa) -> (usize, usize) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 | Isa::AvxVnni => (x86_avx2::MR, x86_avx2::NR),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Vnni => (x86_avx512::MR, x86_avx512::NR),
        #[cfg(target_arch = "aarch64")]
        Isa::NeonDot => (aarch64_dot::MR, aarch64_dot::NR),
        _ => (scalar::MR, scalar::NR),
    }
}

/// Multiplies many rows of x: one task per register tile's width of weight rows, split into row ranges of x if these
/// are fewer than threads.
fn tiled(isa: Isa, x: &Rounded<'_>, targets: &Targets<'_>, scratch: &Scratch) {
    let (mr, nr) = tile_shape(isa);
    let tiles = targets.tiles(nr);
    if tiles == 0 {
        return;
    }
    let threads = rayon::current_num_threads();
    let parts = threads.div_ceil(tiles).min(x.rows.div_ceil(4 * mr)).max(1);
    let part = x.rows.div_ceil(parts).next_multiple_of(mr);
    (0..tiles * parts).into_par_iter().with_max_len(1).for_each(|task| {
        let (mut tile, n) = (task / parts, task % parts * part);
        for target in targets.iter() {
            let count = target.weight.rows.div_ceil(nr);
            if tile < count {
                let rows = tile * nr..(tile * nr + nr).min(target.weight.rows);
                run_panel(isa, x, n..(n + part).min(x.rows), target, rows, scratch);
                return;
            }
            tile -= count;
        }
    });
}

/// Multiplies weight rows `rows`, at most one register tile wide, with the rows `part` of x.
fn run_panel(
    isa: Isa,
    x: &Rounded<'_>,
    part: std::ops::Range<usize>,
    target: &Target<'_>,
    rows: std::ops::Range<usize>,
    scratch: &Scratch,
) {
    let (mr, nr) = tile_shape(isa);
    let (weight, form) = (target.weight, form_of(target));
    let depth = DEPTH.min(weight.cols);
    let (words, groups) = (nr * depth / 4, nr * depth / form.group);
    let mut buffer = scratch.take::<u32>(2 * words + 4 * groups);
    let (rows_u8, rest) = buffer.split_at_mut(words);
    let (panel, rest) = rest.split_at_mut(words);
    let scales: &mut [f32] = bytemuck::cast_slice_mut(rest);
    let mut k = 0;
    while k < weight.cols {
        // Equal pieces, cut at block boundaries.
        let pieces = (weight.cols - k).div_ceil(DEPTH);
        let align = weight.format.block_len();
        let depth = (weight.cols - k).div_ceil(pieces).next_multiple_of(align).min(weight.cols - k);
        let (words, groups) = (nr * depth / 4, nr * depth / form.group);
        let (of_rows, of_panel) = scales.split_at_mut(2 * groups);
        let of_panel = &mut of_panel[..2 * groups];
        unpack_rows(isa, weight, rows.clone(), k..k + depth, &mut rows_u8[..words], of_rows);
        transpose(isa, &rows_u8[..words], nr, &mut panel[..words]);
        let kinds = if form.zero.is_some() { 1 } else { 2 };
        let both = of_rows.chunks_exact(groups).zip(of_panel.chunks_exact_mut(groups));
        for (rows, panel) in both.take(kinds) {
            transpose(isa, bytemuck::cast_slice(rows), nr, bytemuck::cast_slice_mut(panel));
        }
        let (scales, minima) = of_panel.split_at(groups);
        let panel = Panel { words: &panel[..words], scales, minima };
        let first = k / BLOCK;
        let run = |of: &[usize], panel: Panel<'_>, errors: usize, blocks: std::ops::Range<usize>| {
            let tile = Tile {
                form,
                x: &x.words[errors * x.stride..],
                stride: 2 * x.stride,
                blocks: x.blocks,
                first: blocks.start,
                count: blocks.len(),
                rows: of,
                panel,
                // SAFETY: `rows.start < weight.rows`.
                out: unsafe { target.out.0.add(rows.start) },
                out_stride: weight.rows,
                cols: rows.len(),
                accumulate: k + errors > 0,
            };
            // SAFETY: rows of the tile are rows of x, the panel holds these blocks, and tasks are disjoint in rows of x or of
            // the weights.
            unsafe { run_tile(isa, &tile) };
        };
        let mut of = [0; MOST_ROWS];
        for n in part.clone().step_by(mr) {
            let count = mr.min(part.end - n);
            of[..count].iter_mut().enumerate().for_each(|(i, row)| *row = n + i);
            run(&of[..count], panel, 0, first..first + depth / BLOCK);
        }
        for b in 0..depth / BLOCK {
            let (words, groups) = (nr * BLOCK / 4, nr * BLOCK / form.group);
            let panel = Panel {
                words: &panel.words[b * words..][..words],
                scales: &panel.scales[b * groups..][..groups],
                minima: &panel.minima[b * groups..][..groups],
            };
            let mut with_errors = x.rows_with_errors(first + b, part.clone());
            loop {
                let mut count = 0;
                for (row, next) in of[..mr].iter_mut().zip(&mut with_errors) {
                    (*row, count) = (next, count + 1);
                }
                match count {
                    0 => break,
                    _ => run(&of[..count], panel, 1, first + b..first + b + 1),
                }
            }
        }
        k += depth;
    }
}

/// # Safety
/// The processor has `isa`; x and the panel hold what `tile` states, its outputs are valid and touched by nobody else
/// meanwhile.
unsafe fn run_tile(isa: Isa, tile: &Tile<'_>) {
    // SAFETY: passed on from the caller.
    unsafe {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => x86_avx2::tile_pairs(tile),
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni => x86_avx2::tile_vnni(tile),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni => x86_avx512::tile(tile),
            #[cfg(target_arch = "aarch64")]
            Isa::NeonDot => aarch64_dot::tile(tile),
            _ => scalar::tile(tile),
        }
    }
}

/// Unpacks columns `depth` of weight rows `rows` into integers, four to a word, with scales and then minima of all
/// groups; zero past the last row.
fn unpack_rows(
    isa: Isa,
    weight: WeightRef<'_>,
    rows: std::ops::Range<usize>,
    depth: std::ops::Range<usize>,
    words: &mut [u32],
    scales: &mut [f32],
) {
    let (block, bytes) = (weight.format.block_len(), weight.format.block_bytes());
    let stored = depth.start / block * bytes..depth.end / block * bytes;
    let numbers: &mut [u8] = bytemuck::cast_slice_mut(words);
    let (used, count) = (rows.len(), scales.len() / 2);
    let groups = count * depth.len() / numbers.len();
    let (scales, minima) = scales.split_at_mut(count);
    numbers[used * depth.len()..].fill(0);
    scales[used * groups..].fill(0.0);
    minima[used * groups..].fill(0.0);
    let of_row = numbers
        .chunks_exact_mut(depth.len())
        .zip(scales.chunks_exact_mut(groups).zip(minima.chunks_exact_mut(groups)));
    for ((numbers, (scales, minima)), r) in of_row.zip(rows) {
        let stored = &weight.row(r)[stored.clone()];
        match isa {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the caller checked that the processor has the features.
            Isa::Avx2 | Isa::AvxVnni => unsafe {
                x86_avx2::unpack(weight.format, stored, numbers, scales, minima);
            },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Isa::Avx512Vnni => unsafe {
                x86_avx512::unpack(weight.format, stored, numbers, scales, minima);
            },
            _ => scalar::unpack(weight.format, stored, numbers, scales, minima),
        }
    }
}

/// Transposes `rows` rows of words.
fn transpose(isa: Isa, from: &[u32], rows: usize, to: &mut [u32]) {
    assert!(from.len() == to.len() && from.len().is_multiple_of(rows));
    let k = from.len() / rows;
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 | Isa::AvxVnni | Isa::Avx512Vnni => {
            // SAFETY: the caller checked the instruction set, which moves bits as they are; both slices hold `rows · k`
            // elements and `rows` is a multiple of eight.
            unsafe {
                super::x86_avx2::transpose(bytemuck::cast_slice(from), k, rows, bytemuck::cast_slice_mut(to))
            }
        }
        _ => {
            super::scalar::transpose(bytemuck::cast_slice(from), k, rows, bytemuck::cast_slice_mut(to), rows)
        }
    }
}

/// Runs 8-bit products on registers only, with enough independent chains to fill the pipes.
///
/// Returns the number of multiplications and additions, and a value that depends on all of them. Timed by the caller,
/// it shows the machine's peak.
pub fn burn(isa: Isa, iterations: u64) -> (u64, i32) {
    assert!(Isa::available().contains(&isa), "this processor has no {isa:?}");
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the processor has the features.
        Isa::Avx2 => unsafe { x86_avx2::burn_pairs(iterations) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::AvxVnni => unsafe { x86_avx2::burn_vnni(iterations) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx512Vnni => unsafe { x86_avx512::burn(iterations) },
        #[cfg(target_arch = "aarch64")]
        // SAFETY: as above.
        Isa::NeonDot => unsafe { aarch64_dot::burn(iterations) },
        _ => scalar::burn(iterations),
    }
}

#[cfg(test)]
mod tests;
