//! The gradient of exact attention over tiles of keys.
//!
//! With weights $p_{ij} = e^{s_{ij} - \mathrm{lse}_i}$ and $\delta_i = \langle \bar o_i, o_i\rangle - \bar\ell_i$,
//! where $\bar o$ and $\bar\ell$ are the gradients with respect to outputs and log-sum-exps,
//! $\bar v_j = \sum_i p_{ij} \bar o_i$, $\bar s_{ij} = p_{ij} (\langle \bar o_i, v_j \rangle - \delta_i)$,
//! $\bar q_i = \tau \sum_j \bar s_{ij} k_j$, $\bar k_j = \tau \sum_i \bar s_{ij} q_i$ (Dao et al. 2022, Algorithm 4).
//! The weights are recomputed from the log-sum-exp, so nothing of size `rows × keys` is stored.

use super::Isa;
use super::attend::Band;
use super::block::{Block, accumulate, fetch, pack_columns, pack_transposed};
use super::simd::{Kernel, Simd};
use crate::mat::{MatRef, Real};
use crate::scratch::Scratch;
use std::ops::Range;

/// Gradient of [`Attend`](super::Attend) without a bias, in full precision.
///
/// A row that sees no key gets the gradient 0. A pair outside the band adds nothing, not even NaN.
///
/// **Reproducibility.** The bits of `dq` depend on the row and on the keys and values it sees; those of `dk` and `dv`
/// on the rows of the call and their order.
///
/// **Memory.** Less than 1.5 MiB from the scratch pool for `d + d_v` up to about 1000, whatever the number of rows and
/// keys.
#[derive(Clone, Copy, Debug)]
pub struct AttendBackward<'a, T> {
    /// Queries, one per row; columns `d`.
    pub q: MatRef<'a, T>,
    /// Keys, `n_k × d`.
    pub k: MatRef<'a, T>,
    /// Values, `n_k × d_v`.
    pub v: MatRef<'a, T>,
    /// Gradient with respect to the outputs, one row per query; columns `d_v`.
    pub d_out: MatRef<'a, T>,
    /// Log-sum-exp of every row, natural logarithm.
    pub lse: &'a [T],
    /// For every row, the inner product of output and `d_out` minus the gradient with respect to its log-sum-exp.
    pub delta: &'a [T],
    /// Factor of the dot products.
    pub scale: T,
    /// Keys visible to each row.
    pub band: Band,
    /// Instruction set; [`Isa::Scalar`] replaces one that the machine lacks.
    pub isa: Isa,
}

/// [`AttendBackward`] with its shapes checked, as the instruction sets receive it.
pub(super) type Job<'a, T> = AttendBackward<'a, T>;

impl<T: Real> AttendBackward<'_, T> {
    /// Writes `dq` (`rows × d`) and adds to `dk` (`n_k × d`) and `dv` (`n_k × d_v`), all contiguous, on this thread.
    ///
    /// # Panics
    ///
    /// If the shapes do not fit together.
    pub fn run(&self, scratch: &Scratch, dq: &mut [T], dk: &mut [T], dv: &mut [T]) {
        let (rows, n_k) = (self.q.rows(), self.k.rows());
        let (d, d_v) = (self.k.cols(), self.v.cols());
        assert_eq!(self.q.cols(), d, "queries and keys of different width");
        assert_eq!(self.v.rows(), n_k, "as many values as keys");
        assert_eq!((self.d_out.rows(), self.d_out.cols()), (rows, d_v), "one output row per query");
        assert!(
            self.lse.len() == rows && self.delta.len() == rows,
            "one log-sum-exp and one delta per query"
        );
        assert_eq!(dq.len(), rows * d, "one gradient per query");
        assert!(dk.len() == n_k * d && dv.len() == n_k * d_v, "one gradient per key and value");
        if rows > 0 {
            T::attend_backward_on(self, scratch, dq, dk, dv);
        }
    }
}

/// Keys in a tile: whole register blocks of every instruction set, few enough for the weights of a group and their
/// gradients to stay in the first-level cache.
const TILE: usize = 96;
/// Bytes of the state kept for a block of rows, which stays in the second-level cache beside a tile.
const BLOCK_BYTES: usize = 384 << 10;
/// Most registers of rows in a group.
const VECTORS: usize = 3;
/// Registers of columns in a block of the products that run over rows.
const NV: usize = 2;

/// One group of `width` rows, of which the first `live` exist.
struct GroupRows<'g, T> {
    row: usize,
    live: usize,
    /// Scaled queries and gradients, transposed: `[d][width]`, `[d_v][width]`.
    q: &'g [T],
    g: &'g [T],
    /// Scaled queries and gradients in panels of columns: `[panel][rows][NV · LANES]`.
    q_panels: &'g [T],
    g_panels: &'g [T],
    /// In base 2.
    lse: &'g [T],
    delta: &'g [T],
}

/// One tile of keys and values, padded with zeros to whole blocks.
#[derive(Clone, Copy)]
struct Keys<'t, T> {
    first: usize,
    live: usize,
    k: &'t [T],
    v: &'t [T],
    /// Widths, padding included.
    d: usize,
    d_v: usize,
}

#[inline(always)]
pub(super) fn run<S: Simd, const MR: usize>(
    s: S,
    job: &Job<'_, S::T>,
    scratch: &Scratch,
    dq: &mut [S::T],
    dk: &mut [S::T],
    dv: &mut [S::T],
) {
    const { assert!(TILE.is_multiple_of(MR), "tiles are whole blocks") };
    let (rows, n_k, d, d_v) = (job.q.rows(), job.k.rows(), job.q.cols(), job.v.cols());
    let panel = NV * S::LANES;
    let (d_pad, v_pad) = (d.next_multiple_of(MR), d_v.next_multiple_of(MR));
    let (d_panels, v_panels) = (d.div_ceil(panel), d_v.div_ceil(panel));
    let per_row = d + d_v + (d_panels + v_panels) * panel + d_pad + 2;
    let most =
        (BLOCK_BYTES / (per_row * size_of::<S::T>()) / (VECTORS * S::LANES)).max(1) * VECTORS * S::LANES;
    let block = most.min(rows.next_multiple_of(S::LANES));
    let log2e = std::f64::consts::LOG2_E;
    let factor = S::T::from_f64(job.scale.to_f64() * log2e);

    let mut q = scratch.take::<S::T>(block * d);
    let mut g = scratch.take::<S::T>(block * d_v);
    let mut q_panels = scratch.take::<S::T>(block * d_panels * panel);
    let mut g_panels = scratch.take::<S::T>(block * v_panels * panel);
    let mut acc = scratch.take::<S::T>(block * d_pad);
    let mut lse = scratch.take::<S::T>(block);
    let mut delta = scratch.take::<S::T>(block);
    let mut k = scratch.take::<S::T>(TILE * d_pad);
    let mut v = scratch.take::<S::T>(TILE * v_pad);
    let mut weights = scratch.take::<S::T>(TILE * (VECTORS * S::LANES).min(block));
    let mut ds = scratch.take::<S::T>(TILE * (VECTORS * S::LANES).min(block));

    for i0 in (0..rows).step_by(block) {
        let live = (rows - i0).min(block);
        lse.fill(S::T::ZERO);
        delta.fill(S::T::ZERO);
        for r in 0..live {
            lse[r] = S::T::from_f64(job.lse[i0 + r].to_f64() * log2e);
            delta[r] = job.delta[i0 + r];
        }
        for Group { first, vectors } in groups(live, S::LANES) {
            let (width, count) = (vectors * S::LANES, (live - first).min(vectors * S::LANES));
            let at = first..first + width;
            s.call(Pack {
                q: job.q,
                g: job.d_out,
                row: i0 + first,
                count,
                factor,
                scale: job.scale,
                q_t: &mut q[at.start * d..at.end * d],
                g_t: &mut g[at.start * d_v..at.end * d_v],
                q_p: &mut q_panels[at.start * d_panels * panel..at.end * d_panels * panel],
                g_p: &mut g_panels[at.start * v_panels * panel..at.end * v_panels * panel],
            });
        }
        acc.fill(S::T::ZERO);

        // Neither end of a row's key range decreases from row to row.
        let seen = job.band.range(i0, n_k).start..job.band.range(i0 + live - 1, n_k).end;
        let mut j0 = seen.start / TILE * TILE;
        while j0 < seen.end {
            let count = (n_k - j0).min(TILE);
            let keys = Keys {
                first: j0,
                live: count,
                k: tile_of(job.k, j0..j0 + count, d_pad, &mut k),
                v: tile_of(job.v, j0..j0 + count, v_pad, &mut v),
                d: d_pad,
                d_v: v_pad,
            };
            let (after, ahead) = (j0 + count, seen.end.clamp(j0 + count, j0 + count + TILE) - (j0 + count));
            for Group { first, vectors } in groups(live, S::LANES) {
                let width = vectors * S::LANES;
                let at = first..first + width;
                // Fetches the next tile while this one is in use.
                let next = after + ahead * first / live..after + ahead * at.end.min(live) / live;
                fetch(s, job.k, next.clone());
                fetch(s, job.v, next);
                let group = GroupRows {
                    row: i0 + first,
                    live: (live - first).min(width),
                    q: &q[at.start * d..at.end * d],
                    g: &g[at.start * d_v..at.end * d_v],
                    q_panels: &q_panels[at.start * d_panels * panel..at.end * d_panels * panel],
                    g_panels: &g_panels[at.start * v_panels * panel..at.end * v_panels * panel],
                    lse: &lse[at.clone()],
                    delta: &delta[at.clone()],
                };
                let (w, ds) = (&mut weights[..TILE * width], &mut ds[..TILE * width]);
                let dq = &mut acc[at.start * d_pad..at.end * d_pad];
                let dk = &mut dk[j0 * d..(j0 + count) * d];
                let dv = &mut dv[j0 * d_v..(j0 + count) * d_v];
                match vectors {
                    1 => tile::<S, MR, 1>(s, job.band, n_k, keys, &group, w, ds, dq, dk, dv),
                    2 => tile::<S, MR, 2>(s, job.band, n_k, keys, &group, w, ds, dq, dk, dv),
                    _ => tile::<S, MR, 3>(s, job.band, n_k, keys, &group, w, ds, dq, dk, dv),
                }
            }
            j0 += TILE;
        }
        for Group { first, vectors } in groups(live, S::LANES) {
            let width = vectors * S::LANES;
            for r in 0..(live - first).min(width) {
                let acc = &acc[first * d_pad..][r..];
                let row = &mut dq[(i0 + first + r) * d..][..d];
                row.iter_mut().zip(acc.iter().step_by(width)).for_each(|(x, &a)| *x = a * job.scale);
            }
        }
    }
}

/// Registers of rows processed together.
#[derive(Clone, Copy)]
struct Group {
    first: usize,
    vectors: usize,
}

#[inline(always)]
fn groups(rows: usize, lanes: usize) -> impl Iterator<Item = Group> {
    let vectors = rows.div_ceil(lanes);
    (0..vectors)
        .step_by(VECTORS)
        .map(move |v| Group { first: v * lanes, vectors: (vectors - v).min(VECTORS) })
}

/// Returns rows of `a` as `[TILE][width]`: in place if they are contiguous and fill it, otherwise as a copy padded with
/// zeros beside and below.
fn tile_of<'t, T: Real>(a: MatRef<'t, T>, rows: Range<usize>, width: usize, dst: &'t mut [T]) -> &'t [T] {
    let (cols, count) = (a.cols(), rows.len());
    if cols == width && a.stride() == width && count == TILE {
        return &a.data()[rows.start * width..rows.end * width];
    }
    for (i, dst) in rows.zip(dst.chunks_exact_mut(width.max(1))) {
        dst[..cols].copy_from_slice(a.row(i));
        dst[cols..].fill(T::ZERO);
    }
    dst[count * width..].fill(T::ZERO);
    dst
}

/// Packs the rows of a group into the layouts that the products read.
struct Pack<'t, 'q, T> {
    q: MatRef<'q, T>,
    g: MatRef<'q, T>,
    row: usize,
    count: usize,
    /// Scale in base 2, for the queries in the logits.
    factor: T,
    /// Scale, for the queries in the gradients of keys.
    scale: T,
    q_t: &'t mut [T],
    g_t: &'t mut [T],
    q_p: &'t mut [T],
    g_p: &'t mut [T],
}

impl<S: Simd> Kernel<S> for Pack<'_, '_, S::T> {
    #[inline(always)]
    fn run(self, s: S) {
        let Self { q, g, row, count, factor, scale, q_t, g_t, q_p, g_p } = self;
        let width = if q.cols() > 0 { q_t.len() / q.cols() } else { g_t.len() / g.cols().max(1) };
        pack_transposed(s, q, row, count, width, q_t);
        pack_transposed(s, g, row, count, width, g_t);
        for (a, panels) in [(q, &mut *q_p), (g, g_p)] {
            let panel = NV * S::LANES;
            for (c, dst) in panels.chunks_exact_mut(width * panel).enumerate() {
                let (live, rest) = dst.split_at_mut(count * panel);
                pack_columns(s, a, row, count, c * panel, panel, live);
                rest.fill(S::T::ZERO);
            }
        }
        for (data, factor) in [(q_t, factor), (q_p, scale)] {
            for at in (0..data.len()).step_by(S::LANES) {
                store(s, data, at, s.mul(load(s, data, at), s.splat(factor)));
            }
        }
    }
}

/// Processes one group of rows over one tile of keys.
#[inline(always)]
fn tile<S: Simd, const MR: usize, const NR: usize>(
    s: S,
    band: Band,
    n_k: usize,
    keys: Keys<'_, S::T>,
    group: &GroupRows<'_, S::T>,
    weights: &mut [S::T],
    ds: &mut [S::T],
    dq: &mut [S::T],
    dk: &mut [S::T],
    dv: &mut [S::T],
) {
    // Keys that at least one row sees, and keys that all rows see.
    let end = keys.first + keys.live;
    let of_row = |i: usize| {
        let Range { start, end: stop } = band.range(i, n_k);
        (start.clamp(keys.first, end) - keys.first, stop.clamp(keys.first, end) - keys.first)
    };
    let ((lo, common_hi), (common_lo, hi)) = (of_row(group.row), of_row(group.row + group.live - 1));
    if lo >= hi {
        return;
    }
    let common = common_lo..common_hi.max(common_lo);
    let common = if common.is_empty() { lo..lo } else { common };
    s.call(Scores::<S::T, MR, NR> { keys, group, seen: lo..hi, weights: &mut *weights, ds: &mut *ds });
    let sees = See { band, first: keys.first, row: group.row, live: group.live };
    s.call(Weigh::<S::T, NR> {
        group,
        sees,
        seen: lo..hi,
        common: common.clone(),
        weights: &mut *weights,
        ds: &mut *ds,
    });
    s.call(Queries::<S::T, MR, NR> { keys, sees, seen: lo..hi, common: common.clone(), ds: &*ds, dq });
    let width = NR * S::LANES;
    for (left, panels, target) in [(&*weights, group.g_panels, dv), (&*ds, group.q_panels, dk)] {
        let cols = target.len() / keys.live;
        s.call(KeySums::<S::T, MR> {
            sees,
            seen: lo..hi,
            common: common.clone(),
            width,
            left,
            panels,
            cols,
            target,
        });
    }
}

/// Visibility of the keys of a tile to the rows of a group.
#[derive(Clone, Copy)]
struct See {
    band: Band,
    first: usize,
    row: usize,
    live: usize,
}

impl See {
    /// Returns the rows that see key `j` of the tile, counted within the group.
    #[inline(always)]
    fn rows(&self, j: usize) -> Range<usize> {
        let rows = self.band.rows(self.first + j);
        let (start, end) = (rows.start.saturating_sub(self.row), rows.end.saturating_sub(self.row));
        start.min(self.live)..end.min(self.live).max(start.min(self.live))
    }
}

/// Logits in base 2 and products of values with gradients, both `[key][rows of the group]`.
struct Scores<'t, T, const MR: usize, const NR: usize> {
    keys: Keys<'t, T>,
    group: &'t GroupRows<'t, T>,
    seen: Range<usize>,
    weights: &'t mut [T],
    ds: &'t mut [T],
}

impl<S: Simd, const MR: usize, const NR: usize> Kernel<S> for Scores<'_, S::T, MR, NR> {
    #[inline(always)]
    fn run(self, s: S) {
        let Self { keys, group, seen, weights, ds } = self;
        let width = NR * S::LANES;
        let blocks = seen.start / MR..seen.end.div_ceil(MR);
        let sides = [(keys.k, keys.d, group.q, weights), (keys.v, keys.d_v, group.g, ds)];
        for (left, stride, right, out) in sides {
            let depth = right.len() / width;
            assert!(depth <= stride && left.len() >= blocks.end * MR * stride);
            assert!(out.len() >= blocks.end * MR * width);
            for p in blocks.clone() {
                let mut acc: Block<S, MR, NR> = [[s.splat(S::T::ZERO); NR]; MR];
                // SAFETY: `MR` rows of `stride` elements lie at block `p`, `depth` steps of `width` in the rows, and the
                // block of results holds `MR` rows of `NR` registers.
                unsafe {
                    let left = left.as_ptr().add(p * MR * stride);
                    accumulate::<S, MR, NR>(s, depth, left, (stride, 1), right.as_ptr(), &mut acc);
                    let out = out.as_mut_ptr().add(p * MR * width);
                    for r in 0..MR {
                        for v in 0..NR {
                            s.store(out.add(r * width + v * S::LANES), acc[r][v]);
                        }
                    }
                }
            }
        }
    }
}

/// Turns logits into weights and products into gradients of logits; 0 where a row does not see a key.
struct Weigh<'t, T, const NR: usize> {
    group: &'t GroupRows<'t, T>,
    sees: See,
    seen: Range<usize>,
    common: Range<usize>,
    weights: &'t mut [T],
    ds: &'t mut [T],
}

impl<S: Simd, const NR: usize> Kernel<S> for Weigh<'_, S::T, NR> {
    #[inline(always)]
    fn run(self, s: S) {
        let Self { group, sees, seen, common, weights, ds } = self;
        let width = NR * S::LANES;
        let zero = s.splat(S::T::ZERO);
        let mut lse = [zero; NR];
        let mut delta = [zero; NR];
        for v in 0..NR {
            lse[v] = load(s, group.lse, v * S::LANES);
            delta[v] = load(s, group.delta, v * S::LANES);
        }
        for j in seen {
            let rows = if common.contains(&j) { 0..width } else { sees.rows(j) };
            let (weights, ds) =
                (&mut weights[j * width..(j + 1) * width], &mut ds[j * width..(j + 1) * width]);
            for v in 0..NR {
                let at = v * S::LANES;
                let mut w = s.exp2(s.sub(load(s, weights, at), lse[v]));
                let mut x = s.mul(w, s.sub(load(s, ds, at), delta[v]));
                if rows.start > at || rows.end < at + S::LANES {
                    let (lo, hi) = (rows.start.saturating_sub(at), rows.end.saturating_sub(at));
                    w = s.inside(w, zero, lo, hi);
                    x = s.inside(x, zero, lo, hi);
                }
                store(s, weights, at, w);
                store(s, ds, at, x);
            }
        }
    }
}

/// Adds to the gradients of queries, `[d][rows of the group]`.
struct Queries<'t, T, const MR: usize, const NR: usize> {
    keys: Keys<'t, T>,
    sees: See,
    seen: Range<usize>,
    common: Range<usize>,
    ds: &'t [T],
    dq: &'t mut [T],
}

impl<S: Simd, const MR: usize, const NR: usize> Kernel<S> for Queries<'_, S::T, MR, NR> {
    #[inline(always)]
    fn run(self, s: S) {
        let Self { keys, sees, seen, common, ds, dq } = self;
        let (width, stride) = (NR * S::LANES, keys.d);
        assert!(ds.len() >= seen.end * width && keys.k.len() >= seen.end * stride);
        assert!(common.end <= seen.end && dq.len() <= stride * width);
        for (c, dq) in dq.chunks_exact_mut(MR * width).enumerate() {
            let mut block: Block<S, MR, NR> = [[s.splat(S::T::ZERO); NR]; MR];
            for r in 0..MR {
                for v in 0..NR {
                    block[r][v] = load(s, dq, r * width + v * S::LANES);
                }
            }
            // SAFETY: keys and gradients hold all steps, keys `MR` columns from `c · MR` on.
            unsafe {
                let left = keys.k.as_ptr().add(common.start * stride + c * MR);
                let right = ds.as_ptr().add(common.start * width);
                accumulate::<S, MR, NR>(s, common.len(), left, (1, stride), right, &mut block);
            }
            // Keys that only some rows see: added to those rows alone.
            for j in (seen.start..common.start).chain(common.end..seen.end) {
                let (rows, k) = (sees.rows(j), &keys.k[j * stride + c * MR..][..MR]);
                for v in 0..NR {
                    let at = v * S::LANES;
                    let (lo, hi) = (rows.start.saturating_sub(at), rows.end.saturating_sub(at));
                    let right = load(s, ds, j * width + at);
                    for r in 0..MR {
                        let new = s.fma(s.splat(k[r]), right, block[r][v]);
                        block[r][v] = s.inside(new, block[r][v], lo, hi);
                    }
                }
            }
            for r in 0..MR {
                for v in 0..NR {
                    store(s, dq, r * width + v * S::LANES, block[r][v]);
                }
            }
        }
    }
}

/// Adds products over the rows of a group to gradients of keys or values.
struct KeySums<'t, T, const MR: usize> {
    sees: See,
    seen: Range<usize>,
    common: Range<usize>,
    width: usize,
    /// `[key][rows of the group]`.
    left: &'t [T],
    /// `[panel][rows of the group][NV · LANES]`.
    panels: &'t [T],
    cols: usize,
    /// `[key][cols]`.
    target: &'t mut [T],
}

impl<S: Simd, const MR: usize> Kernel<S> for KeySums<'_, S::T, MR> {
    #[inline(always)]
    fn run(self, s: S) {
        let Self { sees, seen, common, width, left, panels, cols, target } = self;
        let panel = NV * S::LANES;
        let whole = common.start..common.start + common.len() / MR * MR;
        assert!(left.len() >= seen.end * width && target.len() >= seen.end * cols);
        for (c, right) in panels.chunks_exact(width * panel).enumerate() {
            let live = (cols - c * panel).min(panel);
            for j in whole.clone().step_by(MR) {
                let target = &mut target[j * cols + c * panel..];
                // SAFETY: `MR` keys from `j` on lie in `left` with `width` rows each, of which `live` exist, and the panel
                // holds as many steps.
                unsafe {
                    let left = left.as_ptr().add(j * width);
                    add_product::<S, MR>(s, sees.live, left, width, right.as_ptr(), target, cols, live);
                }
            }
            for j in (seen.start..whole.start).chain(whole.end..seen.end) {
                let rows = if common.contains(&j) { 0..sees.live } else { sees.rows(j) };
                let target = &mut target[j * cols + c * panel..];
                // SAFETY: as above for one key, and rows from `rows.start` on.
                unsafe {
                    let left = left.as_ptr().add(j * width + rows.start);
                    let right = right.as_ptr().add(rows.start * panel);
                    add_product::<S, 1>(s, rows.len(), left, width, right, target, cols, live);
                }
            }
        }
    }
}

/// Adds the product of `MR` rows at `left` with a panel at `right` to `live` columns of the rows of `target`.
///
/// # Safety
///
/// `left` must hold `MR` rows, `stride` apart, of `depth` elements, and `right` `depth` steps of `NV` registers.
#[inline(always)]
unsafe fn add_product<S: Simd, const MR: usize>(
    s: S,
    depth: usize,
    left: *const S::T,
    stride: usize,
    right: *const S::T,
    target: &mut [S::T],
    cols: usize,
    live: usize,
) {
    assert!(target.len() >= (MR - 1) * cols + live);
    let mut block: Block<S, MR, NV> = [[s.splat(S::T::ZERO); NV]; MR];
    // SAFETY: the caller's promise; every row of the target holds `live` columns, of which the parts are read and written.
    unsafe {
        accumulate::<S, MR, NV>(s, depth, left, (stride, 1), right, &mut block);
        let target = target.as_mut_ptr();
        // Without a branch in between, the sums stay in registers.
        if live == NV * S::LANES {
            for r in 0..MR {
                for v in 0..NV {
                    let p = target.add(r * cols + v * S::LANES);
                    s.store(p, s.add(s.load(p), block[r][v]));
                }
            }
            return;
        }
        for r in 0..MR {
            for v in 0..NV {
                let count = live.saturating_sub(v * S::LANES).min(S::LANES);
                let p = target.add(r * cols + (v * S::LANES).min(live));
                s.store_part(p, s.add(s.load_part(p, count), block[r][v]), count);
            }
        }
    }
}

#[inline(always)]
fn load<S: Simd>(s: S, x: &[S::T], at: usize) -> S::V {
    let x = &x[at..at + S::LANES];
    // SAFETY: the slice holds a register.
    unsafe { s.load(x.as_ptr()) }
}

#[inline(always)]
fn store<S: Simd>(s: S, x: &mut [S::T], at: usize, value: S::V) {
    let x = &mut x[at..at + S::LANES];
    // SAFETY: the slice holds a register.
    unsafe { s.store(x.as_mut_ptr(), value) };
}

/// Scalar definition, pair by pair.
pub(super) fn scalar<T: Real>(job: &Job<'_, T>, dq: &mut [T], dk: &mut [T], dv: &mut [T]) {
    let (d, d_v) = (job.k.cols(), job.v.cols());
    let dot = super::scalar::dot::<T>;
    dq.fill(T::ZERO);
    for i in 0..job.q.rows() {
        let (q, g) = (job.q.row(i), job.d_out.row(i));
        for j in job.band.range(i, job.k.rows()) {
            let (k, v) = (job.k.row(j), job.v.row(j));
            let p = (job.scale * dot(q, k) - job.lse[i]).exp();
            super::scalar::axpy(p, g, &mut dv[j * d_v..(j + 1) * d_v]);
            let ds = job.scale * p * (dot(g, v) - job.delta[i]);
            super::scalar::axpy(ds, k, &mut dq[i * d..(i + 1) * d]);
            super::scalar::axpy(ds, q, &mut dk[j * d..(j + 1) * d]);
        }
    }
}

#[cfg(test)]
mod tests;
