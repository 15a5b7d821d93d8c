//! Dense product of packed blocks, after Goto and van de Geijn 2008: a slab of the right operand and a block
//! of the left one are packed so that the register block streams through contiguous memory.

use super::Op;
use super::block::{self, accumulate, pack_columns, pack_rows, pack_transposed};
use super::simd::{Kernel, Simd};
use crate::mat::{MatRef, Real};
use crate::scratch::Scratch;

/// Columns of a register block, in registers.
const NV: usize = 2;
type Block<S, const MR: usize> = block::Block<S, MR, NV>;

/// Longest inner dimension of one pass, in elements.
const DEPTH: usize = 256;
/// Bytes of the packed left and right operands; each stays in the second-level cache.
const LEFT_BYTES: usize = 192 << 10;
const RIGHT_BYTES: usize = 512 << 10;

#[allow(clippy::too_many_arguments)]
#[inline(always)]
pub(super) fn gemm<S: Simd, const MR: usize>(
    s: S,
    alpha: S::T,
    a: Op<MatRef<'_, S::T>>,
    b: Op<MatRef<'_, S::T>>,
    beta: S::T,
    c: &mut [S::T],
    c_stride: usize,
    scratch: &Scratch,
) {
    let width = NV * S::LANES;
    let (m, depth, n) = (a.rows(), a.cols(), b.cols());
    if depth == 0 {
        for i in 0..m {
            for c in &mut c[i * c_stride..i * c_stride + n] {
                *c = if beta == S::T::ZERO { S::T::ZERO } else { beta * *c };
            }
        }
        return;
    }
    let kc = depth.min(DEPTH);
    let mc = (LEFT_BYTES / size_of::<S::T>() / kc / MR * MR).min(m.next_multiple_of(MR));
    let nc = (RIGHT_BYTES / size_of::<S::T>() / kc / width * width).min(n.next_multiple_of(width));
    let mut left = scratch.take::<S::T>(mc * kc);
    let mut right = scratch.take::<S::T>(nc * kc);

    for j0 in (0..n).step_by(nc) {
        let cols = (n - j0).min(nc);
        for l0 in (0..depth).step_by(kc) {
            let len = (depth - l0).min(kc);
            for (p, dst) in
                right[..cols.div_ceil(width) * width * len].chunks_exact_mut(width * len).enumerate()
            {
                pack_right(s, b, l0, len, j0 + p * width, dst);
            }
            for i0 in (0..m).step_by(mc) {
                let rows = (m - i0).min(mc);
                for (p, dst) in left[..rows.div_ceil(MR) * MR * len].chunks_exact_mut(MR * len).enumerate() {
                    pack_left::<S, MR>(s, a, l0, i0 + p * MR, dst);
                }
                // A panel of the left operand stays in the first-level cache while the right one streams by.
                for (pi, left) in left.chunks_exact(MR * len).take(rows.div_ceil(MR)).enumerate() {
                    let i = i0 + pi * MR;
                    s.call(Strip::<S::T, MR> {
                        depth: len,
                        left,
                        right: &right[..cols.div_ceil(width) * width * len],
                        alpha,
                        beta: if l0 == 0 { beta } else { S::T::ONE },
                        c: &mut c[i * c_stride + j0..],
                        c_stride,
                        rows: (m - i).min(MR),
                        cols,
                    });
                }
            }
        }
    }
}

/// Returns the number of columns in a panel of a packed right operand.
#[inline(always)]
pub(super) fn panel<S: Simd>(_: S) -> usize {
    NV * S::LANES
}

/// Packs all of a right operand, panel after panel, for [`gemm_packed`].
#[inline(always)]
pub(super) fn pack<S: Simd>(s: S, b: Op<MatRef<'_, S::T>>, dst: &mut [S::T]) {
    let (width, depth) = (NV * S::LANES, b.rows());
    for (p, dst) in dst.chunks_exact_mut((width * depth).max(1)).enumerate() {
        pack_right(s, b, 0, depth, p * width, dst);
    }
}

/// Computes `c = alpha · a · b` for the first `n` columns of a right operand that [`pack`] has packed.
#[allow(clippy::too_many_arguments)]
#[inline(always)]
pub(super) fn gemm_packed<S: Simd, const MR: usize>(
    s: S,
    alpha: S::T,
    a: Op<MatRef<'_, S::T>>,
    right: &[S::T],
    n: usize,
    c: &mut [S::T],
    c_stride: usize,
    scratch: &Scratch,
) {
    let (m, depth) = (a.rows(), a.cols());
    let right = &right[..n.next_multiple_of(NV * S::LANES) * depth];
    let mut left = scratch.take::<S::T>(MR * depth);
    for i in (0..m).step_by(MR) {
        pack_left::<S, MR>(s, a, 0, i, &mut left);
        s.call(Strip::<S::T, MR> {
            depth,
            left: &left,
            right,
            alpha,
            beta: S::T::ZERO,
            c: &mut c[i * c_stride..],
            c_stride,
            rows: (m - i).min(MR),
            cols: n,
        });
    }
}

/// `MR` rows of the result times all packed columns.
struct Strip<'t, T, const MR: usize> {
    depth: usize,
    left: &'t [T],
    right: &'t [T],
    alpha: T,
    beta: T,
    c: &'t mut [T],
    c_stride: usize,
    rows: usize,
    cols: usize,
}

impl<S: Simd, const MR: usize> Kernel<S> for Strip<'_, S::T, MR> {
    #[inline(always)]
    fn run(self, s: S) {
        let width = NV * S::LANES;
        assert!(self.left.len() == self.depth * MR);
        for (p, right) in self.right.chunks_exact(width * self.depth).enumerate() {
            let j = p * width;
            for r in 0..self.rows {
                s.prefetch(self.c[r * self.c_stride + j..].as_ptr());
            }
            let mut acc: Block<S, MR> = [[s.splat(S::T::ZERO); NV]; MR];
            // SAFETY: both panels hold `depth` steps.
            unsafe {
                accumulate::<S, MR, NV>(s, self.depth, self.left.as_ptr(), (1, MR), right.as_ptr(), &mut acc);
            }
            let live = (self.cols - j).min(width);
            write(s, &acc, self.alpha, self.beta, &mut self.c[j..], self.c_stride, self.rows, live);
        }
    }
}

/// Writes `c = beta · c + alpha · acc` on the part of the block that exists.
#[allow(clippy::too_many_arguments)]
#[inline(always)]
fn write<S: Simd, const MR: usize>(
    s: S,
    acc: &Block<S, MR>,
    alpha: S::T,
    beta: S::T,
    c: &mut [S::T],
    c_stride: usize,
    rows: usize,
    cols: usize,
) {
    let (va, vb) = (s.splat(alpha), s.splat(beta));
    for r in 0..MR {
        if r >= rows {
            break;
        }
        let row = &mut c[r * c_stride..r * c_stride + cols];
        for v in 0..NV {
            let count = cols.saturating_sub(v * S::LANES).min(S::LANES);
            if count == 0 {
                break;
            }
            let p = row[v * S::LANES..].as_mut_ptr();
            let mut value = s.mul(va, acc[r][v]);
            // SAFETY: `count` elements of the row lie at `p`.
            unsafe {
                if count == S::LANES {
                    if beta != S::T::ZERO {
                        value = s.fma(vb, s.load(p), value);
                    }
                    s.store(p, value);
                } else {
                    if beta != S::T::ZERO {
                        value = s.fma(vb, s.load_part(p, count), value);
                    }
                    s.store_part(p, value, count);
                }
            }
        }
    }
}

/// Packs rows `i..i + MR`, columns `l0..` of the left operand as `[len][MR]`.
#[inline(always)]
fn pack_left<S: Simd, const MR: usize>(s: S, a: Op<MatRef<'_, S::T>>, l0: usize, i: usize, dst: &mut [S::T]) {
    let len = dst.len() / MR;
    match a {
        Op::N(a) => {
            let part = MatRef::with_stride(&a.data()[l0..], a.rows(), len, a.stride());
            let part = part.expect("columns of a view are inside it");
            pack_rows::<S, MR>(s, part, i, (a.rows() - i).min(MR), S::T::ONE, dst);
        }
        Op::T(a) => {
            let rows = (a.cols() - i).min(MR);
            let lines = dst.chunks_exact_mut(MR).enumerate();
            if rows == MR {
                // A length known at compile time makes each line a few register moves, not a call.
                lines.for_each(|(l, dst)| dst.copy_from_slice(&a.row(l0 + l)[i..][..MR]));
                return;
            }
            for (l, dst) in lines {
                dst[..rows].copy_from_slice(&a.row(l0 + l)[i..i + rows]);
                dst[rows..].fill(S::T::ZERO);
            }
        }
    }
}

/// Packs rows `l0..l0 + len`, columns `j..j + NV · LANES` of the right operand as `[len][NV · LANES]`.
#[inline(always)]
fn pack_right<S: Simd>(s: S, b: Op<MatRef<'_, S::T>>, l0: usize, len: usize, j: usize, dst: &mut [S::T]) {
    match b {
        Op::N(b) => pack_columns(s, b, l0, len, j, NV * S::LANES, dst),
        Op::T(b) => {
            let part = MatRef::with_stride(&b.data()[l0..], b.rows(), len, b.stride());
            let part = part.expect("columns of a view are inside it");
            pack_transposed(s, part, j, (b.rows() - j).min(NV * S::LANES), NV * S::LANES, dst);
        }
    }
}
