//! The register block that all dense products share, and the packing that feeds it.
//!
//! A block has `MR` rows and `NV` registers of columns. Its left operand is read one element at a time and broadcast to
//! a register; its right operand is packed as `[depth][NV · LANES]`. Every entry is the sum over `depth` in increasing
//! order, one fused multiply-add per term, wherever in the block it stands: results therefore do not depend on how rows
//! are grouped. (Where the instruction set multiplies pairs of bfloat16, a term is a pair; see [`Simd::PAIRS`].)

use super::simd::Simd;
use crate::mat::{MatRef, Real};
use std::ops::Range;

/// Accumulators of a register block.
pub(super) type Block<S, const MR: usize, const NV: usize> = [[<S as Simd>::V; NV]; MR];

/// Adds the product of a left operand at `a` (rows `a_row` apart, steps `a_step` apart) and a packed right
/// operand at `b` to `acc`.
///
/// # Safety
///
/// `a` must be readable at all `r · a_row + l · a_step` with `r < MR`, `l < depth`, and `b` for
/// `depth · NV · LANES` elements.
#[inline(always)]
pub(super) unsafe fn accumulate<S: Simd, const MR: usize, const NV: usize>(
    s: S,
    depth: usize,
    a: *const S::T,
    (a_row, a_step): (usize, usize),
    b: *const S::T,
    acc: &mut Block<S, MR, NV>,
) {
    let (mut a, mut b) = (a, b);
    // Unrolled by four: the loop is then short enough for the branch predictor to learn its end.
    for _ in 0..depth / 4 {
        for l in 0..4 {
            // SAFETY: step `l` of the remaining depth exists.
            unsafe { step(s, a.add(l * a_step), a_row, b.add(l * NV * S::LANES), acc) };
        }
        a = a.wrapping_add(4 * a_step);
        b = b.wrapping_add(4 * NV * S::LANES);
    }
    for l in 0..depth % 4 {
        // SAFETY: as above.
        unsafe { step(s, a.add(l * a_step), a_row, b.add(l * NV * S::LANES), acc) };
    }
}

/// Adds one term of the sums: an outer product.
///
/// # Safety
///
/// As for [`accumulate`] with `depth = 1`.
#[inline(always)]
unsafe fn step<S: Simd, const MR: usize, const NV: usize>(
    s: S,
    a: *const S::T,
    a_row: usize,
    b: *const S::T,
    acc: &mut Block<S, MR, NV>,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut right = [s.splat(S::T::ZERO); NV];
        for v in 0..NV {
            right[v] = s.load(b.add(v * S::LANES));
        }
        for r in 0..MR {
            let left = s.splat(*a.add(r * a_row));
            for c in 0..NV {
                acc[r][c] = s.mac(left, right[c], acc[r][c]);
            }
        }
    }
}

/// Prefetches rows of a matrix.
#[inline(always)]
pub(super) fn fetch<S: Simd>(s: S, a: MatRef<'_, S::T>, rows: Range<usize>) {
    for i in rows {
        for x in a.row(i).chunks(64 / size_of::<S::T>()) {
            s.prefetch(x.as_ptr());
        }
    }
}

/// Packs up to `MR` rows of `a`, times `factor`, as `[cols][MR]`; missing rows are 0.
#[inline(always)]
pub(super) fn pack_rows<S: Simd, const MR: usize>(
    s: S,
    a: MatRef<'_, S::T>,
    first: usize,
    rows: usize,
    factor: S::T,
    dst: &mut [S::T],
) {
    let cols = a.cols();
    assert!(rows <= MR && dst.len() == cols * MR && first + rows <= a.rows());
    let mut done = 0;
    if rows == MR && first + MR.next_multiple_of(S::LANES) <= a.rows() {
        let whole = cols - cols % S::LANES;
        // Transposes squares of up to 16 × 16 elements; rows beyond the group are read but not kept.
        let mut square = [S::T::ZERO; 256];
        assert!(S::LANES * S::LANES <= square.len());
        for c in (0..whole).step_by(S::LANES) {
            for r in (0..MR).step_by(S::LANES) {
                let count = (MR - r).min(S::LANES);
                // SAFETY: rows up to the next multiple of `LANES` exist; `square` holds a square, and each
                // column of the group has `MR` places.
                unsafe {
                    let src = a.data().as_ptr().add((first + r) * a.stride() + c);
                    s.transpose(src, a.stride(), square.as_mut_ptr(), S::LANES);
                    for l in 0..S::LANES {
                        let x = s.mul(s.load(square.as_ptr().add(l * S::LANES)), s.splat(factor));
                        s.store_part(dst.as_mut_ptr().add((c + l) * MR + r), x, count);
                    }
                }
            }
        }
        done = whole;
    } else if rows < MR {
        dst.fill(S::T::ZERO);
    }
    for r in 0..if done < cols { rows } else { 0 } {
        for (dst, &x) in dst[done * MR + r..].iter_mut().step_by(MR).zip(&a.row(first + r)[done..]) {
            *dst = x * factor;
        }
    }
}

/// Packs rows `first..first + rows` of `a` transposed, as `[cols][width]`, whole registers wide; missing rows are 0.
#[inline(always)]
pub(super) fn pack_transposed<S: Simd>(
    s: S,
    a: MatRef<'_, S::T>,
    first: usize,
    rows: usize,
    width: usize,
    dst: &mut [S::T],
) {
    let cols = a.cols();
    assert!(
        rows <= width
            && width.is_multiple_of(S::LANES)
            && dst.len() == cols * width
            && first + rows <= a.rows()
    );
    for part in (0..width).step_by(S::LANES) {
        let live = rows.saturating_sub(part).min(S::LANES);
        let whole = if live == S::LANES { cols - cols % S::LANES } else { 0 };
        for c in (0..whole).step_by(S::LANES) {
            // SAFETY: `LANES` rows from `first + part` on and columns `c .. c + LANES` exist; the destination holds
            // `cols` rows of `width`.
            unsafe {
                let src = a.data().as_ptr().add((first + part) * a.stride() + c);
                s.transpose(src, a.stride(), dst.as_mut_ptr().add(c * width + part), width);
            }
        }
        for r in 0..if whole < cols { live } else { 0 } {
            let row = a.row(first + part + r);
            for c in whole..cols {
                dst[c * width + part + r] = row[c];
            }
        }
        if live < S::LANES {
            for line in dst.chunks_exact_mut(width) {
                line[part + live..part + S::LANES].fill(S::T::ZERO);
            }
        }
    }
}

/// Packs columns `col..` of the rows `first..first + rows` of `a` as `[rows][width]`; missing columns are 0.
#[inline(always)]
pub(super) fn pack_columns<S: Simd>(
    s: S,
    a: MatRef<'_, S::T>,
    first: usize,
    rows: usize,
    col: usize,
    width: usize,
    dst: &mut [S::T],
) {
    let count = (a.cols() - col).min(width);
    assert!(dst.len() == rows * width && first + rows <= a.rows());
    for (r, dst) in dst.chunks_exact_mut(width).enumerate() {
        pack_row(s, &a.row(first + r)[col..col + count], dst);
    }
}

/// Copies elements, followed by zeros.
#[inline(always)]
fn pack_row<S: Simd>(s: S, src: &[S::T], dst: &mut [S::T]) {
    if src.len() == dst.len() && dst.len().is_multiple_of(S::LANES) {
        for at in (0..dst.len()).step_by(S::LANES) {
            // SAFETY: source and destination hold a register from `at` on.
            unsafe { s.store(dst.as_mut_ptr().add(at), s.load(src.as_ptr().add(at))) };
        }
    } else {
        dst[..src.len()].copy_from_slice(src);
        dst[src.len()..].fill(S::T::ZERO);
    }
}
