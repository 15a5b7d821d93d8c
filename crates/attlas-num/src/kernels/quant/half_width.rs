//! Products of operands rounded to bfloat16, with sums in f32.
//!
//! Weights are dequantised and rounded, x is rounded once. Processors with `vdpbf16ps` multiply and add pairs at twice
//! the width of f32; on others the same rounded numbers go through the schedules of f32, at the same accuracy and
//! without saving time. A product of two numbers of eight significant bits is exact in f32, so the two differ only in
//! the order of additions.

use super::{FUSED_ROWS, Isa, Job, MatRef, Scratch, Targets};
use crate::par::*;

/// Rounds to the nearest number of eight significant bits, ties to even.
#[inline(always)]
pub(super) fn rounded(x: f32) -> f32 {
    f32::from_bits(u32::from(bits(x)) << 16)
}

/// Returns the upper half of the rounded number; NaN stays NaN.
#[inline(always)]
pub(super) fn bits(x: f32) -> u16 {
    let b = x.to_bits();
    if x.is_nan() {
        return (b >> 16) as u16 | 0x40;
    }
    (b.wrapping_add(0x7fff + (b >> 16 & 1)) >> 16) as u16
}

/// Computes several products with the same x in one parallel pass.
///
/// Panics if the shapes do not match.
pub(super) fn products(isa: Isa, x: MatRef<'_, f32>, jobs: &mut [Job<'_>], scratch: &Scratch) {
    let isa = super::checked(isa);
    super::check(x, jobs);
    if x.cols() == 0 || x.rows() == 0 {
        jobs.iter_mut().for_each(|job| job.out.fill(0.0));
        return;
    }
    #[cfg(target_arch = "x86_64")]
    if isa == Isa::Avx512 && super::x86_bf16::is_available() {
        return super::x86_bf16::run(x, jobs, scratch);
    }
    let cols = x.cols();
    let mut copy = scratch.take::<f32>(x.rows() * cols);
    let round = |(i, row): (usize, &mut [f32])| {
        row.iter_mut().zip(x.row(i)).for_each(|(y, x)| *y = rounded(*x));
    };
    if x.rows() <= FUSED_ROWS {
        copy.chunks_exact_mut(cols).enumerate().for_each(round);
    } else {
        copy.par_chunks_exact_mut(cols).enumerate().for_each(round);
    }
    let x = MatRef::new(&copy, x.rows(), cols);
    for jobs in jobs.chunks_mut(super::AT_ONCE) {
        let targets = Targets::new(x.rows(), jobs);
        if x.rows() <= FUSED_ROWS {
            super::fused(isa, x, true, &targets);
        } else {
            super::tiled(isa, x, true, &targets, scratch);
        }
    }
}
