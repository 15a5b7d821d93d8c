//! Exact attention as a building block: whole groups over threads, or given rows on the calling thread.

use crate::group::Group;
use crate::workspace::Context;
use crate::{Result, RunInfo};
use attlas_num::kernels::{Attend, Band, Precision, merge_lse};
use attlas_num::par::*;
use attlas_num::{MatRef, Real};

crate::choices! {
    /// Precision of the operands of both products.
    pub enum Operands {
        /// As given by the caller.
        Full = "full",
        /// Rounded to bfloat16; single-precision inputs only, ignored in double precision.
        Bf16 = "bf16",
    }
}

impl Operands {
    /// Returns the kernel precision.
    pub fn precision(self) -> Precision {
        match self {
            Operands::Full => Precision::Full,
            Operands::Bf16 => Precision::Bf16,
        }
    }
}

/// Maximum query rows of one task when the schedule does not say: the rows that the kernel processes per pass over the
/// keys.
const BLOCK_ROWS: usize = 576;
/// Rows that fill a register on every instruction set.
const LANES: usize = 16;

/// Keys of one piece when a single query per head is split over keys. The number is fixed, so threads cannot change a
/// bit, and small, so all threads stay busy even if the key heads are no multiple of them.
const KEYS_PER_PIECE: usize = 512;

/// Maximum number of keys for which the calling thread may attend alone.
const KEYS_ON_CALLER: usize = 4096;

/// Elements of keys and values that one thread reads in the time it takes to wake another and get its result.
const ELEMENTS_ON_CALLER: usize = 1 << 19;

/// Computes exact attention of a group, in parallel over query blocks, or over keys if each head has one query.
///
/// Methods call this when their budget covers every key, which makes them bit-identical to `exact`.
pub fn exact_group<T: Real>(group: &mut Group<'_, T>) -> Result<RunInfo> {
    exact_group_with(group, Precision::Full)
}

/// Computes exact attention of a group in a given precision.
pub fn exact_group_with<T: Real>(g: &mut Group<'_, T>, precision: Precision) -> Result<RunInfo> {
    exact_group_capped(g, precision, None)
}

/// Computes exact attention of a group in a given precision, with an optional cap on logits.
pub fn exact_group_capped<T: Real>(
    g: &mut Group<'_, T>,
    precision: Precision,
    softcap: Option<f64>,
) -> Result<RunInfo> {
    let visited = g.visible_pairs();
    let empty = (0..g.n_q()).filter(|&i| g.visible(i) == 0).count() * g.q.heads();
    if g.n_q() == 1
        && let Some(q) = g.q.token(0)
    {
        exact_split_keys(q, g.k, g.v, g.scale, (precision, softcap), g.cx, g.out, g.lse);
    } else {
        let (k, v, scale, band, cx) = (g.k, g.v, g.scale, g.band(), g.cx);
        let rows = rows_per_task(g.n_q(), g.q.heads(), cx);
        g.par_row_blocks(rows, |block| {
            let band = band.from_row(block.first);
            let job = attend(block.q, k, v, None, scale, band, precision, cx);
            capped(job, softcap).run(cx.scratch, block.out, block.lse);
            Ok(())
        })?;
    }
    Ok(RunInfo { keys_visited: visited, empty_rows: empty as u64, ..RunInfo::default() })
}

/// Computes exact attention of given rows over given keys on the calling thread, with an optional logit bias per key.
#[allow(clippy::too_many_arguments)]
pub fn exact_rows<T: Real>(
    q: MatRef<'_, T>,
    k: MatRef<'_, T>,
    v: MatRef<'_, T>,
    bias: Option<&[T]>,
    scale: T,
    band: Band,
    cx: Context<'_>,
    out: &mut [T],
    lse: &mut [T],
) {
    attend(q, k, v, bias, scale, band, Precision::Full, cx).run(cx.scratch, out, lse);
}

/// Computes exact attention of given rows without a bias, in a given precision and with an optional cap on logits.
#[allow(clippy::too_many_arguments)]
pub fn exact_rows_with<T: Real>(
    q: MatRef<'_, T>,
    k: MatRef<'_, T>,
    v: MatRef<'_, T>,
    scale: T,
    band: Band,
    (precision, softcap): (Precision, Option<f64>),
    cx: Context<'_>,
    out: &mut [T],
    lse: &mut [T],
) {
    capped(attend(q, k, v, None, scale, band, precision, cx), softcap).run(cx.scratch, out, lse);
}

/// Computes exact attention of a few rows over many keys without a mask: pieces of keys in parallel, of fixed length,
/// so the number of threads cannot change a bit.
pub fn exact_few_rows<T: Real>(
    q: MatRef<'_, T>,
    k: MatRef<'_, T>,
    v: MatRef<'_, T>,
    scale: T,
    cx: Context<'_>,
    out: &mut [T],
    lse: &mut [T],
) {
    exact_split_keys(q, k, v, scale, (Precision::Full, None), cx, out, lse);
}

/// Returns true if exact attention ends sooner on the calling thread: always with one thread, and for one token if
/// reading its keys and values takes less time than waking another thread saves.
pub fn exact_on_caller(p: &crate::Problem, threads: usize) -> bool {
    let elements = (p.batch * p.n_kv_heads * p.n_k).saturating_mul(p.d + p.d_v);
    threads == 1 || p.n_q == 1 && p.n_k <= KEYS_ON_CALLER && elements <= ELEMENTS_ON_CALLER
}

/// Merges the rows of several parts, in order.
fn merge_parts<T: Real>(part_out: &[T], part_lse: &[T], out: &mut [T], lse: &mut [T]) {
    let (rows, d_v) = (lse.len(), out.len() / lse.len().max(1));
    out.copy_from_slice(&part_out[..rows * d_v]);
    lse.copy_from_slice(&part_lse[..rows]);
    for (o, l) in part_out.chunks_exact(rows * d_v).zip(part_lse.chunks_exact(rows)).skip(1) {
        for h in 0..rows {
            merge_lse(&mut out[h * d_v..(h + 1) * d_v], &mut lse[h], &o[h * d_v..(h + 1) * d_v], l[h]);
        }
    }
}

fn rows_per_task(n_q: usize, heads: usize, cx: Context<'_>) -> usize {
    match cx.schedule.tile_q {
        // At least eight tasks per thread, to balance uneven (causal) rows, but never tiny ones; of the sizes near
        // that, the one with which all threads finish together.
        0 => {
            let (rows, threads) = (n_q * heads * cx.groups, cx.schedule.threads.max(1));
            let tasks = threads * rows.div_ceil(threads * BLOCK_ROWS).max(8);
            let most = rows.div_ceil(tasks).max(3 * LANES).next_multiple_of(LANES);
            let last = |size: usize| (n_q.div_ceil(size) * heads * cx.groups).div_ceil(threads) * size;
            let sizes = (1..=most / LANES).rev().map(|lanes| lanes * LANES);
            sizes.take_while(|&size| 2 * size >= most).min_by_key(|&size| last(size)).unwrap_or(most)
        }
        tile => tile,
    }
}

#[allow(clippy::too_many_arguments)]
fn attend<'a, T: Real>(
    q: MatRef<'a, T>,
    k: MatRef<'a, T>,
    v: MatRef<'a, T>,
    bias: Option<&'a [T]>,
    scale: T,
    band: Band,
    precision: Precision,
    cx: Context<'_>,
) -> Attend<'a, T> {
    Attend {
        q,
        k,
        v,
        scale,
        bias,
        band,
        tile_k: cx.schedule.tile_k,
        isa: cx.schedule.isa,
        precision,
        decode: false,
        softcap: None,
    }
}

fn capped<T: Real>(job: Attend<'_, T>, softcap: Option<f64>) -> Attend<'_, T> {
    Attend { softcap: softcap.map(T::from_f64), ..job }
}

/// Attends with one query row per head to all keys: pieces of keys in parallel, merged in order by log-sum-exp. Every
/// key and value row is read once for all heads.
#[allow(clippy::too_many_arguments)]
fn exact_split_keys<T: Real>(
    q: MatRef<'_, T>,
    k: MatRef<'_, T>,
    v: MatRef<'_, T>,
    scale: T,
    (precision, softcap): (Precision, Option<f64>),
    cx: Context<'_>,
    out: &mut [T],
    lse: &mut [T],
) {
    let (heads, d_v) = (q.rows(), v.cols());
    let run = |range: std::ops::Range<usize>, out: &mut [T], lse: &mut [T]| {
        let (k, v) = (k.sub_rows(range.clone()), v.sub_rows(range));
        let job = attend(q, k, v, None, scale, Band::ALL, precision, cx);
        capped(Attend { decode: true, ..job }, softcap).run(cx.scratch, out, lse);
    };
    let pieces = k.rows().div_ceil(KEYS_PER_PIECE);
    if pieces <= 1 {
        return run(0..k.rows(), out, lse);
    }
    let mut part_out = cx.scratch.take::<T>(pieces * heads * d_v);
    let mut part_lse = cx.scratch.take::<T>(pieces * heads);
    let one = |(piece, (out, lse)): (usize, (&mut [T], &mut [T]))| {
        let start = piece * KEYS_PER_PIECE;
        run(start..(start + KEYS_PER_PIECE).min(k.rows()), out, lse);
    };
    if cx.schedule.threads == 1 {
        part_out.chunks_mut(heads * d_v).zip(part_lse.chunks_mut(heads)).enumerate().for_each(one);
    } else {
        let parts = part_out.par_chunks_mut(heads * d_v).zip(part_lse.par_chunks_mut(heads));
        parts.with_max_len(1).enumerate().for_each(one);
    }
    merge_parts(&part_out, &part_lse, out, lse);
}
