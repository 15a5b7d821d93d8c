//! Products with weights that stay in their stored form: $Y = X W^\top$ with $W$ quantised.
//!
//! A [`WeightRef`] is a matrix in one of the block formats of GGUF files ([`Format`]), row after row as in
//! the file. Two schedules compute the product, both "dequantise to f32, then multiply" in exact arithmetic:
//!
//! - few rows of x (decoding): each weight row is read once, dequantised in registers and multiplied with
//!   all rows of x, at the speed of memory;
//! - many rows of x (prefill): a panel of weight rows is dequantised into a tile that stays in cache, laid
//!   out so that a register tile of outputs is updated by broadcast multiply-adds.
//!
//! [`Compute`] selects the rounding of the operands before multiplication: none, bfloat16, or 8-bit integers
//! ([`narrow`]).
//!
//! Output rows are independent, and the order of additions in an element depends only on the schedule and the
//! instruction set, not on the thread count or on the other rows computed with it.
//!
//! Block layouts: ggml, `ggml-common.h` and `ggml-quants.c`.

/// Calls a function with the unit [`Whole`](x86_avx512::Whole) of an integer format; runs `$other` for the other
/// formats.
#[cfg(target_arch = "x86_64")]
macro_rules! by_format {
    ($format:expr, $run:ident($($argument:expr),*), $other:expr) => {
        match $format {
            Format::Q4_0 => $run::<Whole<x86_rows::Q4_0>>($($argument),*),
            Format::Q4_1 => $run::<Whole<x86_rows::Q4_1>>($($argument),*),
            Format::Q5_0 => $run::<Whole<x86_rows::Q5_0>>($($argument),*),
            Format::Q5_1 => $run::<Whole<x86_rows::Q5_1>>($($argument),*),
            Format::Q8_0 => $run::<Whole<x86_rows::Q8_0>>($($argument),*),
            Format::Q2K => $run::<Whole<x86_rows::Q2K>>($($argument),*),
            Format::Q3K => $run::<Whole<x86_rows::Q3K>>($($argument),*),
            Format::Q4K => $run::<Whole<x86_rows::Q4K>>($($argument),*),
            Format::Q5K => $run::<Whole<x86_rows::Q5K>>($($argument),*),
            Format::Q6K => $run::<Whole<x86_rows::Q6K>>($($argument),*),
            Format::Q8K => $run::<Whole<x86_rows::Q8K>>($($argument),*),
            Format::Iq4Nl => $run::<Whole<x86_rows::Iq4Nl>>($($argument),*),
            Format::Iq4Xs => $run::<Whole<x86_rows::Iq4Xs>>($($argument),*),
            Format::Mxfp4 => $run::<Whole<x86_rows::Mxfp4>>($($argument),*),
            Format::F32 | Format::F16 | Format::BF16 => $other,
        }
    };
}

mod half_width;
pub mod narrow;
mod scalar;
#[cfg(target_arch = "x86_64")]
mod x86_avx2;
#[cfg(target_arch = "x86_64")]
mod x86_avx512;
#[cfg(target_arch = "x86_64")]
mod x86_bf16;

use crate::par::*;
use crate::{MatRef, Scratch};

/// Storage format of a block of weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// The upper half of a single-precision number.
    BF16,
    /// 32 values of 4 bits, one scale.
    Q4_0,
    /// 32 values of 4 bits, scale and minimum.
    Q4_1,
    /// 32 values of 5 bits, one scale.
    Q5_0,
    /// 32 values of 5 bits, scale and minimum.
    Q5_1,
    /// 32 values of 8 bits, one scale.
    Q8_0,
    /// 256 values of 2 bits, 4-bit scales and minima per 16.
    Q2K,
    /// 256 values of 3 bits, 6-bit scales per 16.
    Q3K,
    /// 256 values of 4 bits, 6-bit scales and minima per 32.
    Q4K,
    /// 256 values of 5 bits, 6-bit scales and minima per 32.
    Q5K,
    /// 256 values of 6 bits, 8-bit scales per 16.
    Q6K,
    /// 256 values of 8 bits, one scale in single precision; ggml's format of intermediate results.
    Q8K,
    /// 32 values from a table of 16 that are denser near zero, one scale.
    Iq4Nl,
    /// 256 values from the same table, 6-bit scales per 32.
    Iq4Xs,
    /// 32 floating-point numbers of 4 bits, one power of two: the microscaling format of the Open Compute Project.
    Mxfp4,
}

impl Format {
    /// Every format.
    pub const ALL: [Format; 17] = [
        Self::F32,
        Self::F16,
        Self::BF16,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q2K,
        Self::Q3K,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
        Self::Q8K,
        Self::Iq4Nl,
        Self::Iq4Xs,
        Self::Mxfp4,
    ];

    /// Returns the number of values in a block; the columns of a matrix are a multiple of it.
    pub fn block_len(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::BF16 => 1,
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Q8_0 => 32,
            Self::Iq4Nl | Self::Mxfp4 => 32,
            Self::Q2K | Self::Q3K | Self::Q4K | Self::Q5K | Self::Q6K | Self::Q8K | Self::Iq4Xs => 256,
        }
    }

    /// Returns the bytes of a block.
    pub fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q8_0 => 34,
            Self::Q2K => 84,
            Self::Q3K => 110,
            Self::Q4K => 144,
            Self::Q5K => 176,
            Self::Q6K => 210,
            Self::Q8K => 292,
            Self::Iq4Nl => 18,
            Self::Iq4Xs => 136,
            Self::Mxfp4 => 17,
        }
    }

    /// Returns the name that ggml gives the format.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::BF16 => "BF16",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q5_1 => "Q5_1",
            Self::Q8_0 => "Q8_0",
            Self::Q2K => "Q2_K",
            Self::Q3K => "Q3_K",
            Self::Q4K => "Q4_K",
            Self::Q5K => "Q5_K",
            Self::Q6K => "Q6_K",
            Self::Q8K => "Q8_K",
            Self::Iq4Nl => "IQ4_NL",
            Self::Iq4Xs => "IQ4_XS",
            Self::Mxfp4 => "MXFP4",
        }
    }

    /// Returns the bytes of `len` values; `None` if `len` is not a whole number of blocks or the product overflows.
    pub fn bytes_of(self, len: usize) -> Option<usize> {
        if !len.is_multiple_of(self.block_len()) {
            return None;
        }
        (len / self.block_len()).checked_mul(self.block_bytes())
    }
}

impl std::fmt::Display for Format {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Instruction set of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// Plain Rust.
    Scalar,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ and VL, beside the above.
    Avx512,
}

impl Isa {
    /// Returns the instruction sets of this processor, slowest first.
    pub fn available() -> &'static [Isa] {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::is_x86_feature_detected as has;
            if has!("avx2") && has!("fma") && has!("f16c") {
                if has!("avx512f") && has!("avx512bw") && has!("avx512dq") && has!("avx512vl") {
                    return &[Self::Scalar, Self::Avx2, Self::Avx512];
                }
                return &[Self::Scalar, Self::Avx2];
            }
        }
        &[Self::Scalar]
    }

    /// Returns the fastest instruction set of this processor.
    pub fn best() -> Isa {
        *Self::available().last().unwrap_or(&Self::Scalar)
    }
}

/// Matrix of weights in stored form, row after row.
#[derive(Clone, Copy, Debug)]
pub struct WeightRef<'a> {
    bytes: &'a [u8],
    format: Format,
    rows: usize,
    cols: usize,
    /// Bytes of a row.
    stride: usize,
}

impl<'a> WeightRef<'a> {
    /// Creates a view of `rows × cols` weights. `None` if a row is not a whole number of blocks or `bytes` is not
    /// exactly as long as the matrix.
    pub fn new(bytes: &'a [u8], format: Format, rows: usize, cols: usize) -> Option<Self> {
        let stride = format.bytes_of(cols)?;
        let needed = stride.checked_mul(rows)?;
        (needed == bytes.len()).then_some(Self { bytes, format, rows, cols, stride })
    }

    /// Returns the number of rows: outputs of the product.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Returns the number of columns: inputs of the product.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Returns the storage format of the weights.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Returns row `i` as stored.
    #[inline]
    pub fn row(&self, i: usize) -> &'a [u8] {
        assert!(i < self.rows, "row {i} of {}", self.rows);
        &self.bytes[i * self.stride..][..self.stride]
    }

    /// Prefetches the rows after `rows`, far enough ahead to hide the latency of memory: hardware prefetching stops at
    /// page boundaries, which come every few small rows.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn prefetch_behind(&self, rows: std::ops::Range<usize>) {
        const AHEAD_BYTES: usize = 6144;
        const LINE_BYTES: usize = 64;
        let bytes = rows.start * self.stride..rows.end * self.stride;
        for at in bytes.step_by(LINE_BYTES) {
            let line = self.bytes.as_ptr().wrapping_add(at + AHEAD_BYTES);
            // SAFETY: a prefetch never faults, wherever it points.
            unsafe { std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(line.cast()) };
        }
    }

    /// Writes row `i` to `out` in single precision.
    pub fn row_into(&self, i: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.cols);
        dequantise_into(Isa::best(), self.format, self.row(i), out);
    }
}

/// Dequantises whole blocks to single precision. Panics if the lengths do not match.
pub fn dequantise_into(isa: Isa, format: Format, bytes: &[u8], out: &mut [f32]) {
    assert_eq!(Some(bytes.len()), format.bytes_of(out.len()), "{format} bytes for {} values", out.len());
    match checked(isa) {
        Isa::Scalar => scalar::dequantise(format, bytes, out),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `checked` saw that the processor has the features.
        Isa::Avx2 => unsafe { x86_avx2::dequantise(format, bytes, out) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx512 => unsafe { x86_avx512::dequantise(format, bytes, out) },
        #[cfg(not(target_arch = "x86_64"))]
        _ => scalar::dequantise(format, bytes, out),
    }
}

/// Unpacks rows of `width` 8-bit integers, each block of 32, or what is left of a row, behind its scale in single
/// precision. Panics if the lengths do not match.
pub fn unpack_scaled_rows(isa: Isa, width: usize, bytes: &[u8], out: &mut [f32]) {
    let row = width + 4 * width.div_ceil(32);
    assert!(width > 0 && out.len().is_multiple_of(width) && bytes.len() == out.len() / width * row);
    match checked(isa) {
        Isa::Scalar => scalar::unpack_scaled_rows(width, bytes, out),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `checked` saw that the processor has the features.
        Isa::Avx2 => unsafe { x86_avx2::unpack_scaled_rows(width, bytes, out) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx512 => unsafe { x86_avx512::unpack_scaled_rows(width, bytes, out) },
        #[cfg(not(target_arch = "x86_64"))]
        _ => scalar::unpack_scaled_rows(width, bytes, out),
    }
}

/// Rounds rows to bfloat16. Panics if `out` has another length than the rounded rows.
pub fn pack_halves(isa: Isa, rows: MatRef<'_, f32>, out: &mut [u8]) {
    assert_eq!(out.len(), 2 * rows.rows() * rows.cols());
    match checked(isa) {
        Isa::Scalar => scalar::pack_halves(rows, out),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `checked` saw that the processor has the features.
        Isa::Avx2 => unsafe { x86_avx2::pack_halves(rows, out) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx512 => unsafe { x86_avx512::pack_halves(rows, out) },
        #[cfg(not(target_arch = "x86_64"))]
        _ => scalar::pack_halves(rows, out),
    }
}

/// Packs rows as [`unpack_scaled_rows`] reads them: the greatest magnitude of a block becomes 127, and a block with NaN
/// or infinity becomes NaN. Panics if `out` has another length than the packed rows.
pub fn pack_scaled_rows(isa: Isa, rows: MatRef<'_, f32>, out: &mut [u8]) {
    assert_eq!(out.len(), rows.rows() * (rows.cols() + 4 * rows.cols().div_ceil(32)));
    match checked(isa) {
        Isa::Scalar => scalar::pack_scaled_rows(rows, out),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `checked` saw that the processor has the features.
        Isa::Avx2 => unsafe { x86_avx2::pack_scaled_rows(rows, out) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx512 => unsafe { x86_avx512::pack_scaled_rows(rows, out) },
        #[cfg(not(target_arch = "x86_64"))]
        _ => scalar::pack_scaled_rows(rows, out),
    }
}

fn checked(isa: Isa) -> Isa {
    assert!(Isa::available().contains(&isa), "this processor has no {isa:?}");
    isa
}

/// Most rows of x that one pass multiplies with each weight row dequantised in registers.
const FEW_ROWS: usize = 4;
/// Most rows of x for which such passes are repeated; above it, panels are tiled.
const FUSED_ROWS: usize = 20;
/// Depth of a packed panel; a multiple of every block length.
const DEPTH: usize = 768;
/// Most weight rows of a packed panel, in units of a register tile.
const PANEL_TILES: usize = 4;
/// Stored bytes below which a share of work is not worth another thread.
const MIN_TASK_BYTES: usize = 16 << 10;

/// One weight matrix and the destination of its product: `x.rows() × weight.rows()`, contiguous.
#[derive(Debug)]
pub struct Job<'a> {
    /// The weights.
    pub weight: WeightRef<'a>,
    /// The product, overwritten.
    pub out: &'a mut [f32],
}

/// Computes $Y = X W^\top$ on the best instruction set, in parallel over output rows.
///
/// Panics if the shapes do not match.
pub fn product(x: MatRef<'_, f32>, weight: WeightRef<'_>, out: &mut [f32], scratch: &Scratch) {
    products(Isa::best(), x, &mut [Job { weight, out }], scratch);
}

/// Computes several products with the same x in one parallel pass: query, key and value projections, for example.
///
/// Panics if the shapes do not match.
pub fn products(isa: Isa, x: MatRef<'_, f32>, jobs: &mut [Job<'_>], scratch: &Scratch) {
    let isa = checked(isa);
    check(x, jobs);
    if x.cols() == 0 {
        jobs.iter_mut().for_each(|job| job.out.fill(0.0));
        return;
    }
    for jobs in jobs.chunks_mut(AT_ONCE) {
        let targets = Targets::new(x.rows(), jobs);
        if x.rows() <= FUSED_ROWS {
            fused(isa, x, false, &targets);
        } else {
            tiled(isa, x, false, &targets, scratch);
        }
    }
}

/// Panics if the shapes do not match.
fn check(x: MatRef<'_, f32>, jobs: &[Job<'_>]) {
    for job in jobs {
        assert_eq!(x.cols(), job.weight.cols, "columns of x and of the weights");
        assert_eq!(Some(job.out.len()), x.rows().checked_mul(job.weight.rows), "length of the product");
    }
}

/// Type to which the operands of a product are rounded. Sums are in f32 in any case.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Compute {
    /// No rounding: weights have their stored values.
    #[default]
    F32,
    /// bfloat16, eight significant bits.
    Bf16,
    /// 8-bit integers: x with one scale per 32 elements of a row, weights as the integers they are stored as. Formats
    /// without integers are multiplied as by [`Compute::F32`].
    Int8,
}

impl Compute {
    /// All variants.
    pub const ALL: [Self; 3] = [Self::F32, Self::Bf16, Self::Int8];

    /// Returns a short name.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::Int8 => "int8",
        }
    }

    /// Returns the type in which products with weights of `format` are computed.
    pub fn of(self, format: Format) -> Self {
        match self {
            Self::Int8 if !narrow::is_narrow(format) => Self::F32,
            other => other,
        }
    }
}

impl std::fmt::Display for Compute {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// A name that is none of [`Compute::ALL`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("products: expected f32, bf16 or int8, found '{0}'")]
pub struct UnknownCompute(String);

impl std::str::FromStr for Compute {
    type Err = UnknownCompute;

    fn from_str(text: &str) -> Result<Self, UnknownCompute> {
        Self::ALL.into_iter().find(|c| c.name() == text).ok_or_else(|| UnknownCompute(text.to_owned()))
    }
}

/// Computes several products with the same x, each in the type that [`Compute::of`] returns for its format. May reorder
/// `jobs`.
///
/// Panics if the shapes do not match.
pub fn products_in(compute: Compute, x: MatRef<'_, f32>, jobs: &mut [Job<'_>], scratch: &Scratch) {
    match compute {
        Compute::F32 => products(Isa::best(), x, jobs, scratch),
        Compute::Bf16 => half_width::products(Isa::best(), x, jobs, scratch),
        Compute::Int8 => {
            jobs.sort_unstable_by_key(|job| !narrow::is_narrow(job.weight.format));
            let split = jobs.partition_point(|job| narrow::is_narrow(job.weight.format));
            let (narrow, wide) = jobs.split_at_mut(split);
            narrow::products(narrow::Isa::best(), x, narrow, scratch);
            products(Isa::best(), x, wide, scratch);
        }
    }
}

/// Most products that one pass computes.
const AT_ONCE: usize = 8;

/// Destinations of the products of one pass, without the empty ones.
struct Targets<'a> {
    all: [Option<Target<'a>>; AT_ONCE],
}

impl<'a> Targets<'a> {
    fn new(rows: usize, jobs: &'a mut [Job<'_>]) -> Self {
        let mut all = [const { None }; AT_ONCE];
        for (place, job) in all.iter_mut().zip(jobs).filter(|(_, job)| job.weight.rows > 0 && rows > 0) {
            *place = Some(Target { weight: job.weight, out: Output(job.out.as_mut_ptr()) });
        }
        Self { all }
    }

    fn iter(&self) -> impl Iterator<Item = &Target<'a>> {
        self.all.iter().flatten()
    }

    /// Returns the number of tiles of `nr` weight rows over all matrices.
    fn tiles(&self, nr: usize) -> usize {
        self.iter().map(|t| t.weight.rows.div_ceil(nr)).sum()
    }

    /// Runs `work` on shares of equal stored size, cut at row boundaries, over all matrices.
    fn share(&self, work: impl Fn(&Target<'a>, std::ops::Range<usize>) + Sync + Send) {
        let total: usize = self.iter().map(|t| t.weight.bytes.len()).sum();
        let threads = rayon::current_num_threads();
        let tasks = if threads == 1 { 1 } else { (total / MIN_TASK_BYTES).clamp(1, 4 * threads) };
        let share = |task: usize| {
            let (from, to) =
                (total / tasks * task, if task + 1 == tasks { total } else { total / tasks * (task + 1) });
            let mut start = 0;
            for t in self.iter() {
                let row_bytes = t.weight.stride;
                // A row belongs to the share that holds its first byte.
                let first = from.saturating_sub(start).div_ceil(row_bytes).min(t.weight.rows);
                let last = to.saturating_sub(start).div_ceil(row_bytes).min(t.weight.rows);
                work(t, first..last);
                start += t.weight.bytes.len();
            }
        };
        (0..tasks).into_par_iter().for_each_in_runs(share);
    }
}

/// Pointer into an output, to whose disjoint parts several threads write.
#[derive(Clone, Copy)]
struct Output(*mut f32);
// SAFETY: tasks write disjoint elements, and the borrow behind the pointer outlives the parallel pass.
unsafe impl Send for Output {}
// SAFETY: as above.
unsafe impl Sync for Output {}

struct Target<'a> {
    weight: WeightRef<'a>,
    out: Output,
}

/// Weight rows `rows` of a matrix against at most [`FEW_ROWS`] rows of x.
struct Strip<'a> {
    weight: WeightRef<'a>,
    rows: std::ops::Range<usize>,
    x: MatRef<'a, f32>,
    /// Round weights to bfloat16; x is rounded already.
    rounds: bool,
    /// Output of the first row of x for weight row 0.
    out: *mut f32,
}

/// Splits rows of x into passes of four, two and one: three rows have no code of their own, which would be a quarter of
/// all passes' code in every format and instruction set.
fn few_rows(rows: usize) -> impl Iterator<Item = std::ops::Range<usize>> {
    let mut from = 0;
    std::iter::from_fn(move || {
        let count = match rows - from {
            3 => 2,
            rest => rest.min(FEW_ROWS),
        };
        from += count;
        (count > 0).then(|| from - count..from)
    })
}

/// Multiplies few rows of x; rounds weights to bfloat16 if `rounds`.
fn fused(isa: Isa, x: MatRef<'_, f32>, rounds: bool, targets: &Targets<'_>) {
    targets.share(|t, rows| {
        for some in few_rows(x.rows()) {
            // SAFETY: the output holds `x.rows() · weight.rows` elements.
            let out = unsafe { t.out.0.add(some.start * t.weight.rows) };
            let strip = Strip {
                weight: t.weight,
                rows: rows.clone(),
                x: x.sub_rows(some),
                rounds: rounds && t.weight.format != Format::BF16,
                out,
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
            Isa::Avx2 => x86_avx2::strip(strip),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => x86_avx512::strip(strip),
            _ => generic_strip(strip, scalar::dequantise, scalar::dot),
        }
    }
}

/// Computes a strip by dequantising each row piece by piece; for formats without a fused kernel.
///
/// # Safety
/// As [`run_strip`].
#[inline(always)]
unsafe fn generic_strip(
    strip: &Strip<'_>,
    dequantise: impl Fn(Format, &[u8], &mut [f32]),
    dot: impl Fn(&[f32], &[f32]) -> f32,
) {
    const PIECE: usize = 512;
    let Strip { weight, x, .. } = strip;
    let mut piece = [0.0f32; PIECE];
    for r in strip.rows.clone() {
        let mut sums = [0.0f32; FEW_ROWS];
        let row = weight.row(r);
        for k in (0..weight.cols).step_by(PIECE) {
            let len = PIECE.min(weight.cols - k);
            let at = |k: usize| k / weight.format.block_len() * weight.format.block_bytes();
            dequantise(weight.format, &row[at(k)..at(k + len)], &mut piece[..len]);
            if strip.rounds {
                piece[..len].iter_mut().for_each(|w| *w = half_width::rounded(*w));
            }
            for (n, sum) in sums.iter_mut().enumerate().take(x.rows()) {
                *sum += dot(&piece[..len], &x.row(n)[k..k + len]);
            }
        }
        for (n, sum) in sums.iter().enumerate().take(x.rows()) {
            // SAFETY: the output holds `x.rows() · weight.rows` elements.
            unsafe { *strip.out.add(n * weight.rows + r) = *sum };
        }
    }
}

/// Operands of a register tile.
struct Tile {
    /// `rows × depth`, rows `x_stride` apart.
    x: *const f32,
    x_stride: usize,
    depth: usize,
    rows: usize,
    /// `depth × NR`, contiguous, columns past `cols` are zero.
    panel: *const f32,
    /// `rows × cols`, rows `out_stride` apart.
    out: *mut f32,
    out_stride: usize,
    cols: usize,
    /// Add to the output instead of replacing it.
    accumulate: bool,
}

/// Returns the rows and columns of the register tile.
fn tile_shape(isa: Isa) -> (usize, usize) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => (x86_avx2::MR, x86_avx2::NR),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => (x86_avx512::MR, x86_avx512::NR),
        _ => (scalar::MR, scalar::NR),
    }
}

/// Multiplies many rows of x: one task per panel of weight rows, split into row ranges of x if there are fewer panels
/// than threads. Rounds weights to bfloat16 if `rounds`.
fn tiled(isa: Isa, x: MatRef<'_, f32>, rounds: bool, targets: &Targets<'_>, scratch: &Scratch) {
    let (mr, nr) = tile_shape(isa);
    let threads = rayon::current_num_threads();
    let units = targets.tiles(nr);
    if units == 0 {
        return;
    }
    // The panel height that minimises the longest share; among equals the tallest, which reads x least often.
    let tiles = (1..=PANEL_TILES)
        .min_by_key(|&p| {
            let panels: usize = targets.iter().map(|t| t.weight.rows.div_ceil(nr).div_ceil(p)).sum();
            (panels.div_ceil(threads) * p, std::cmp::Reverse(p))
        })
        .unwrap_or(1);
    let row_parts = threads.div_ceil(units).min(x.rows().div_ceil(4 * mr)).max(1);
    let part = x.rows().div_ceil(row_parts).next_multiple_of(mr);

    let mut tasks = Vec::new();
    for target in targets.iter() {
        for first in (0..target.weight.rows).step_by(tiles * nr) {
            for n in (0..x.rows()).step_by(part) {
                tasks.push((
                    target,
                    first..(first + tiles * nr).min(target.weight.rows),
                    n..(n + part).min(x.rows()),
                ));
            }
        }
    }

    // Rows a multiple of a page apart would all map to the same few cache sets.
    let mut padded = None;
    let mut x = x;
    if x.stride().is_multiple_of(1024) && x.stride() > 0 {
        let stride = x.cols().next_multiple_of(16) + 16;
        let mut copy = scratch.take::<f32>(x.rows() * stride);
        copy.par_chunks_mut(stride)
            .enumerate()
            .for_each(|(i, row)| row[..x.cols()].copy_from_slice(x.row(i)));
        let copy = padded.insert(copy);
        if let Some(view) = MatRef::with_stride(copy, x.rows(), x.cols(), stride) {
            x = view;
        }
    }

    tasks.par_iter().with_max_len(1).for_each(|(target, rows, part)| {
        let depth = DEPTH.min(x.cols());
        let mut panel = scratch.take::<f32>(depth * tiles * nr);
        let mut rows_f32 = scratch.take::<f32>(depth * nr);
        let weight = target.weight;
        let align = weight.format.block_len().max(16);
        let mut k = 0;
        while k < x.cols() {
            // Equal pieces, cut at block boundaries.
            let pieces = (x.cols() - k).div_ceil(DEPTH);
            let depth = (x.cols() - k).div_ceil(pieces).next_multiple_of(align).min(x.cols() - k);
            for (t, first) in rows.clone().step_by(nr).enumerate() {
                let count = nr.min(rows.end - first);
                let dst = &mut panel[t * depth * nr..][..depth * nr];
                pack(isa, weight, first..first + count, k..k + depth, rounds, &mut rows_f32, dst);
            }
            for n in part.clone().step_by(mr) {
                for (t, first) in rows.clone().step_by(nr).enumerate() {
                    let tile = Tile {
                        x: x.row(n)[k..].as_ptr(),
                        x_stride: x.stride(),
                        depth,
                        rows: mr.min(part.end - n),
                        panel: panel[t * depth * nr..][..depth * nr].as_ptr(),
                        // SAFETY: `n < x.rows()` and `first < weight.rows`.
                        out: unsafe { target.out.0.add(n * weight.rows + first) },
                        out_stride: weight.rows,
                        cols: nr.min(rows.end - first),
                        accumulate: k > 0,
                    };
                    // SAFETY: x has `tile.rows` rows from `n` on with `depth` columns from `k` on, the panel
                    // was packed for this depth, and tasks are disjoint in rows of x or of the weights.
                    unsafe { run_tile(isa, &tile) };
                }
            }
            k += depth;
        }
    });
}

/// # Safety
/// The processor has `isa`; the pointers of `tile` are valid for what it states, and its outputs are
/// touched by nobody else meanwhile.
unsafe fn run_tile(isa: Isa, tile: &Tile) {
    // SAFETY: passed on from the caller.
    unsafe {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => x86_avx2::tile(tile),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => x86_avx512::tile(tile),
            _ => scalar::tile(tile),
        }
    }
}

/// Dequantises columns `depth` of weight rows `rows` into `panel`, column by column, zero past the last row.
fn pack(
    isa: Isa,
    weight: WeightRef<'_>,
    rows: std::ops::Range<usize>,
    depth: std::ops::Range<usize>,
    rounds: bool,
    rows_f32: &mut [f32],
    panel: &mut [f32],
) {
    let (_, nr) = tile_shape(isa);
    let at = |k: usize| k / weight.format.block_len() * weight.format.block_bytes();
    let (k, count) = (depth.len(), rows.len());
    let rows_f32 = &mut rows_f32[..nr * k];
    for (values, r) in rows_f32.chunks_exact_mut(k).zip(rows) {
        dequantise_into(isa, weight.format, &weight.row(r)[at(depth.start)..at(depth.end)], values);
    }
    rows_f32[count * k..].fill(0.0);
    if rounds {
        rows_f32.iter_mut().for_each(|w| *w = half_width::rounded(*w));
    }
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 | Isa::Avx512 => {
            assert_eq!(panel.len(), nr * k);
            // SAFETY: the caller checked the instruction set; both slices hold `nr · k` elements.
            unsafe { x86_avx2::transpose(rows_f32, k, nr, panel) }
        }
        _ => scalar::transpose(rows_f32, k, nr, panel, nr),
    }
}

#[cfg(test)]
mod tests;
