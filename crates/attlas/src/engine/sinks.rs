//! The first keys, which every query sees exactly, whatever the method does with the others.
//!
//! Trained models put much attention on the first few keys. A method that samples or hashes keys and misses one of them
//! gets the normaliser of a row badly wrong. The first `sinks` keys are therefore attended to exactly and merged by
//! log-sum-exp with the method's result on the rest.

use super::exact_rows;
use crate::group::Group;
use crate::{Real, Result, RunInfo};
use attlas_num::kernels::merge_lse;

/// Query rows of one task.
const TASK_ROWS: usize = 96;

/// Runs `rest` on the group without its first `sinks` keys, then adds these exactly. A causal mask stays causal:
/// positions are counted from the last key.
pub fn with_sinks<T: Real>(
    group: &mut Group<'_, T>,
    sinks: usize,
    rest: impl FnOnce(&mut Group<'_, T>) -> Result<RunInfo>,
) -> Result<RunInfo> {
    let sinks = sinks.min(group.n_k());
    if sinks == 0 {
        return rest(group);
    }
    let (k, v, scale, band, cx) = (group.k, group.v, group.scale, group.band(), group.cx);
    let (k_all, v_all) = (k, v);
    let (k, v) = (k.sub_rows(0..sinks), v.sub_rows(0..sinks));
    let mut pool = group.reborrow();
    pool.k = k_all.sub_rows(sinks..k_all.rows());
    pool.v = v_all.sub_rows(sinks..v_all.rows());
    let info = rest(&mut pool)?;
    let d_v = v.cols();
    let seen = group.par_row_blocks(TASK_ROWS, |block| {
        let rows = block.lse.len();
        let mut out = cx.scratch.take::<T>(rows * d_v);
        let mut lse = cx.scratch.take::<T>(rows);
        let band = band.from_row(block.first);
        exact_rows(block.q, k, v, None, scale, band, cx, &mut out, &mut lse);
        let more = out.chunks_exact(d_v).zip(lse.iter());
        for ((o, l), (o2, &l2)) in block.out.chunks_exact_mut(d_v).zip(block.lse.iter_mut()).zip(more) {
            merge_lse(o, l, o2, l2);
        }
        let visited: usize = (0..rows).map(|i| band.range(i, sinks).len()).sum();
        Ok((visited as u64, block.lse.iter().filter(|l| **l == T::NEG_INFINITY).count() as u64))
    })?;
    let visited = seen.iter().map(|s| s.0).sum::<u64>() + info.keys_visited;
    Ok(RunInfo { keys_visited: visited, empty_rows: seen.iter().map(|s| s.1).sum(), ..info })
}
