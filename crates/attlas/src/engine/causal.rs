//! Causal attention from a method without a mask.
//!
//! Recursive halving, as in HyperAttention (han2024): rows and keys are cut in the middle; both halves are causal
//! problems of their own, and every row of the second half sees every key of the first, a part without a mask. The
//! second half's two results merge by log-sum-exp. Below a base size the exact kernel runs. A part holds only keys that
//! all of its rows see, so a method cannot leak any of them.
//!
//! Halves are `⌊n/2⌋` and the rest: nothing is padded. With more keys than rows, the keys before the first
//! row's position are one more part without a mask; with more rows than keys, the first rows see nothing.

use super::{RowSlot, exact_rows, places};
use crate::group::{Group, GroupIndex, Queries};
use crate::workspace::Context;
use crate::{Mask, MatRef, Problem, Real, Result, RunInfo};
use attlas_num::kernels::{Band, merge_lse};
use attlas_num::par::*;
use attlas_num::rng::StreamKey;
use std::collections::BTreeMap;
use std::ops::Range;

/// Rows of one task, where only rows are split.
const TASK_ROWS: usize = 96;

/// A part of a causal problem in which every row sees every key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rectangle {
    /// Its rows among the group's queries.
    pub rows: Range<usize>,
    /// Its keys among the group's; no two parts share keys, so the keys identify a part's random streams.
    pub keys: Range<usize>,
}

impl Rectangle {
    /// Returns the whole of a group without a mask.
    pub fn whole<T: Real>(group: &Group<'_, T>) -> Self {
        Self { rows: 0..group.n_q(), keys: 0..group.n_k() }
    }

    /// Returns the random stream of this part.
    pub fn stream(&self, key: StreamKey) -> StreamKey {
        key.with(self.keys.start as u64).with(self.keys.end as u64)
    }
}

/// Operands of a part, and the results of its rows so far, with which its own are merged.
#[derive(Debug)]
pub struct CausalPart<'a, T> {
    /// Queries of the part.
    pub q: Queries<'a, T>,
    /// Its keys.
    pub k: MatRef<'a, T>,
    /// Its values.
    pub v: MatRef<'a, T>,
    /// Factor of the dot products.
    pub scale: T,
    /// Sequence and key head of its group.
    pub index: GroupIndex,
    /// Scratch and schedule.
    pub cx: Context<'a>,
    found: Rows<'a, T>,
}

impl<'a, T: Real> CausalPart<'a, T> {
    /// Runs the part as a group without a mask, in its own memory, and merges its results by log-sum-exp.
    pub fn run(self, work: impl FnOnce(Group<'_, T>) -> Result<RunInfo>) -> Result<RunInfo> {
        let Self { q, k, v, scale, index, cx, found } = self;
        let (n, d_v) = (q.n_q(), v.cols());
        let mut out = cx.scratch.take::<T>(q.heads() * n * d_v);
        let mut lse = cx.scratch.take::<T>(q.heads() * n);
        let group = Group { q, k, v, scale, mask: Mask::None, out: &mut out, lse: &mut lse, index, cx };
        let info = work(group)?;
        found.into_tasks(d_v).into_par_iter().for_each(|task| {
            let start = task.head * n + task.first;
            let more = out[start * d_v..].chunks_exact(d_v).zip(&lse[start..]);
            for ((o, l), (o2, &l2)) in task.out.chunks_exact_mut(d_v).zip(task.lse.iter_mut()).zip(more) {
                merge_lse(o, l, o2, l2);
            }
        });
        Ok(info)
    }

    /// Returns the slots of the rows, those of head 0 first.
    pub fn into_places(self) -> impl Iterator<Item = RowSlot<'a, T>> {
        let d_v = self.v.cols();
        self.found.out.into_iter().zip(self.found.lse).flat_map(move |(out, lse)| places(out, lse, d_v))
    }
}

/// Runs a causal group and passes every part without a mask to `unmasked`, which joins its results to the earlier ones.
///
/// Square parts of at most `n_min` rows are exact. Parts run after the halves they join, so concurrent parts never
/// share a row. The order of merging is fixed; bits do not depend on threads if those of `unmasked` do not.
pub fn causalize<T, F>(group: &mut Group<'_, T>, n_min: usize, unmasked: &F) -> Result<RunInfo>
where
    T: Real,
    F: Fn(CausalPart<'_, T>, Rectangle) -> Result<RunInfo> + Sync,
{
    debug_assert_eq!(group.mask, Mask::Causal);
    let (n_q, n_k) = (group.n_q(), group.n_k());
    let whole = Halver {
        q: group.q,
        k: group.k,
        v: group.v,
        scale: group.scale,
        index: group.index,
        cx: group.cx,
        n_min: n_min.max(1),
        offset: n_k as isize - n_q as isize,
        unmasked,
    };
    let mut rows = Rows::new(group, n_q);
    let unseen_rows = n_q.saturating_sub(n_k);
    let (mut unseeing, mut seeing) = rows.reborrow().split_at(unseen_rows, whole.v.cols());
    unseeing.fill_empty();
    let empty_rows = (unseen_rows * whole.q.heads()) as u64;
    let mut info = whole.square(unseen_rows..n_q, seeing.reborrow())?;
    if n_k > n_q {
        info = info.merge(whole.part(0..n_q, 0..n_k - n_q, seeing)?);
    }
    Ok(RunInfo { empty_rows: info.empty_rows + empty_rows, ..info })
}

/// Returns the largest number of parts without a mask that can run at one time.
pub fn causal_parts(p: &Problem, n_min: usize) -> usize {
    2 * p.n_q.div_ceil(n_min.max(1)) + 1
}

/// Returns the parts without a mask of a causal problem, in the order in which [`causalize`] cuts it.
pub fn causal_rectangles(n_q: usize, n_k: usize, n_min: usize) -> Vec<Rectangle> {
    fn square(rows: Range<usize>, offset: isize, n_min: usize, out: &mut Vec<Rectangle>) {
        if rows.len() <= n_min {
            return;
        }
        let middle = rows.start + rows.len() / 2;
        let at = |i: usize| (i as isize + offset).max(0) as usize;
        square(rows.start..middle, offset, n_min, out);
        square(middle..rows.end, offset, n_min, out);
        out.push(Rectangle { rows: middle..rows.end, keys: at(rows.start)..at(middle) });
    }
    let (unseen_rows, offset) = (n_q.saturating_sub(n_k), n_k as isize - n_q as isize);
    let mut out = Vec::new();
    square(unseen_rows..n_q, offset, n_min.max(1), &mut out);
    if n_k > n_q {
        out.push(Rectangle { rows: 0..n_q, keys: 0..n_k - n_q });
    }
    out
}

/// Counts the pairs of a row and a key that each head visits, if a part of `rows` rows and `keys` keys visits
/// `unmasked(rows, keys)` of them.
pub fn causal_pairs(n_q: usize, n_k: usize, n_min: usize, unmasked: &dyn Fn(usize, usize) -> u64) -> u64 {
    let rows = n_q.min(n_k);
    let prefix = if n_k > n_q { unmasked(n_q, n_k - n_q) } else { 0 };
    prefix + square_pairs(rows, n_min.max(1), unmasked, &mut BTreeMap::new())
}

/// Counts the pairs of a square. Halves differ by at most one, so each level has at most two sizes and the table stays
/// small.
fn square_pairs(
    n: usize,
    n_min: usize,
    unmasked: &dyn Fn(usize, usize) -> u64,
    known: &mut BTreeMap<usize, u64>,
) -> u64 {
    if n <= n_min {
        return n as u64 * (n as u64 + 1) / 2;
    }
    if let Some(&pairs) = known.get(&n) {
        return pairs;
    }
    let half = n / 2;
    let pairs = square_pairs(half, n_min, unmasked, known)
        + square_pairs(n - half, n_min, unmasked, known)
        + unmasked(n - half, half);
    known.insert(n, pairs);
    pairs
}

/// Operands of every step of the recursion.
struct Halver<'a, T, F> {
    q: Queries<'a, T>,
    k: MatRef<'a, T>,
    v: MatRef<'a, T>,
    scale: T,
    index: GroupIndex,
    cx: Context<'a>,
    n_min: usize,
    /// Last key that row 0 sees.
    offset: isize,
    unmasked: &'a F,
}

impl<T, F> Halver<'_, T, F>
where
    T: Real,
    F: Fn(CausalPart<'_, T>, Rectangle) -> Result<RunInfo> + Sync,
{
    /// Returns the keys at the positions of `rows`.
    fn keys(&self, rows: &Range<usize>) -> Range<usize> {
        let shift = |i: usize| (i as isize + self.offset).max(0) as usize;
        shift(rows.start)..shift(rows.end)
    }

    /// Computes causal attention of `rows` over the keys at their positions.
    fn square(&self, rows: Range<usize>, mut results: Rows<'_, T>) -> Result<RunInfo> {
        let n = rows.len();
        if n <= self.n_min {
            self.base(rows, results);
            return Ok(RunInfo::visited((self.q.heads() * n * (n + 1) / 2) as u64));
        }
        let middle = rows.start + n / 2;
        let (first, second) = (rows.start..middle, middle..rows.end);
        let (top, mut bottom) = results.reborrow().split_at(n / 2, self.v.cols());
        let (a, b) =
            join(|| self.square(first.clone(), top), || self.square(second.clone(), bottom.reborrow()));
        let keys = self.keys(&first);
        Ok(a?.merge(b?).merge(self.part(second, keys, bottom)?))
    }

    /// Computes exact causal attention of a small square.
    fn base(&self, rows: Range<usize>, results: Rows<'_, T>) {
        let keys = self.keys(&rows);
        let (k, v) = (self.k.sub_rows(keys.clone()), self.v.sub_rows(keys));
        results.into_tasks(v.cols()).into_par_iter().with_max_len(1).for_each(|task| {
            let q = self
                .q
                .head(task.head)
                .sub_rows(rows.start + task.first..rows.start + task.first + task.lse.len());
            let band = Band::causal(0).from_row(task.first);
            exact_rows(q, k, v, None, self.scale, band, self.cx, task.out, task.lse);
        });
    }

    /// Adds the part of `rows` and `keys`, in which every row sees every key.
    fn part(&self, rows: Range<usize>, keys: Range<usize>, found: Rows<'_, T>) -> Result<RunInfo> {
        let part_rows = CausalPart {
            q: self.q.rows(rows.clone()),
            k: self.k.sub_rows(keys.clone()),
            v: self.v.sub_rows(keys.clone()),
            scale: self.scale,
            index: self.index,
            cx: self.cx,
            found,
        };
        let info = (self.unmasked)(part_rows, Rectangle { rows, keys })?;
        // A row without keys here has keys in its own half.
        Ok(RunInfo { empty_rows: 0, ..info })
    }
}

/// Slots for the results of consecutive rows, for every head.
#[derive(Debug)]
struct Rows<'a, T> {
    out: Vec<&'a mut [T]>,
    lse: Vec<&'a mut [T]>,
}

/// Some rows of one head.
struct Task<'a, T> {
    head: usize,
    first: usize,
    out: &'a mut [T],
    lse: &'a mut [T],
}

impl<'a, T: Real> Rows<'a, T> {
    fn new(group: &'a mut Group<'_, T>, n_q: usize) -> Self {
        let d_v = group.v.cols();
        Self {
            out: group.out.chunks_mut((n_q * d_v).max(1)).collect(),
            lse: group.lse.chunks_mut(n_q.max(1)).collect(),
        }
    }

    fn reborrow(&mut self) -> Rows<'_, T> {
        Rows {
            out: self.out.iter_mut().map(|x| &mut **x).collect(),
            lse: self.lse.iter_mut().map(|x| &mut **x).collect(),
        }
    }

    fn split_at(self, row: usize, d_v: usize) -> (Rows<'a, T>, Rows<'a, T>) {
        let (top_out, bottom_out) = self.out.into_iter().map(|x| x.split_at_mut(row * d_v)).unzip();
        let (top_lse, bottom_lse) = self.lse.into_iter().map(|x| x.split_at_mut(row)).unzip();
        (Rows { out: top_out, lse: top_lse }, Rows { out: bottom_out, lse: bottom_lse })
    }

    fn fill_empty(&mut self) {
        self.out.iter_mut().for_each(|x| x.fill(T::ZERO));
        self.lse.iter_mut().for_each(|x| x.fill(T::NEG_INFINITY));
    }

    fn into_tasks(self, d_v: usize) -> Vec<Task<'a, T>> {
        let heads = self.out.into_iter().zip(self.lse).enumerate();
        heads
            .flat_map(|(head, (out, lse))| {
                let tiles = out.chunks_mut(TASK_ROWS * d_v).zip(lse.chunks_mut(TASK_ROWS)).enumerate();
                tiles.map(move |(t, (out, lse))| Task { head, first: t * TASK_ROWS, out, lse })
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::exact_group;
    use crate::testkit::{Case, assert_rows_close, assert_same_bits, reference};
    use crate::{Schedule, TensorRef, Workspace};
    use std::sync::Mutex;

    /// Returns output, log-sum-exp and the parts passed to `unmasked`, in order of their keys.
    fn run(case: &Case, n_min: usize, threads: usize) -> (Vec<f64>, Vec<f64>, Vec<Rectangle>, RunInfo) {
        let p = case.problem;
        let ws = Workspace::new(Schedule { threads, ..Schedule::default() }).unwrap();
        let mut o = vec![f64::NAN; p.n_heads * p.n_q * p.d_v];
        let mut lse = vec![f64::NAN; p.n_heads * p.n_q];
        let parts = Mutex::new(Vec::new());
        let q = TensorRef::bhnd(&case.q, [1, p.n_heads, p.n_q, p.d]).unwrap();
        let info = ws.install(|cx| {
            let mut group = Group {
                q: Queries::new(q),
                k: MatRef::new(&case.k, p.n_k, p.d),
                v: MatRef::new(&case.v, p.n_k, p.d_v),
                scale: p.scale,
                mask: Mask::Causal,
                out: &mut o,
                lse: &mut lse,
                index: GroupIndex { batch: 0, kv_head: 0 },
                cx,
            };
            causalize(&mut group, n_min, &|part_rows: CausalPart<'_, f64>, part| {
                parts.lock().unwrap().push(part.clone());
                part_rows.run(|mut group| {
                    assert_eq!((group.n_q(), group.n_k()), (part.rows.len(), part.keys.len()));
                    exact_group(&mut group)
                })
            })
        });
        let mut parts = parts.into_inner().unwrap();
        parts.sort_by_key(|part| (part.keys.start, part.keys.end));
        (o, lse, parts, info.unwrap())
    }

    #[test]
    fn exact_parts_make_exact_causal_attention_for_every_size() {
        for (n_q, n_k) in
            [(1, 1), (2, 2), (37, 37), (64, 64), (13, 50), (50, 13), (1, 9), (9, 1), (0, 4), (4, 0)]
        {
            for n_min in [0, 1, 5, 16, 100] {
                let p = Problem { d_v: 3, ..Problem::new(2, 1, 4).with_lens(n_q, n_k).with_kv_heads(1) };
                let case = Case::gaussian(p.causal(), 1);
                let (o, lse, parts, info) = run(&case, n_min, 2);
                let (want, want_lse) = reference(&case);
                let name = format!("{n_q}×{n_k}, base {n_min}");
                assert_rows_close(&o, &want, 1e-13, &name);
                assert_rows_close(&lse, &want_lse, 1e-13, &name);
                assert!(parts.windows(2).all(|w| w[0].keys != w[1].keys), "{name}: {parts:?}");
                assert_eq!(info.keys_visited, p.causal().visible_pairs(), "{name}");
                let per_head = causal_pairs(n_q, n_k, n_min, &|r, k| (r * k) as u64);
                assert_eq!(2 * per_head, p.causal().visible_pairs(), "{name}");
                assert_eq!(info.empty_rows, 2 * n_q.saturating_sub(n_k) as u64);
                assert!(parts.len() <= causal_parts(&p, n_min), "{name}");
                let mut known = causal_rectangles(n_q, n_k, n_min);
                known.sort_by_key(|part| (part.keys.start, part.keys.end));
                assert_eq!(parts, known, "{name}");
            }
        }
    }

    #[test]
    fn parts_are_the_halves_and_the_keys_before_the_first_row() {
        let p = Problem::new(1, 1, 2).with_lens(8, 11).causal();
        let (_, _, parts, _) = run(&Case::gaussian(p, 2), 2, 1);
        let want = [(0..8, 0..3), (2..4, 3..5), (4..8, 3..7), (6..8, 7..9)];
        assert_eq!(parts, want.map(|(rows, keys)| Rectangle { rows, keys }));
    }

    #[test]
    fn threads_do_not_change_a_bit() {
        let case = Case::gaussian(Problem::new(2, 150, 8).with_kv_heads(1).causal(), 3);
        let (one, two) = (run(&case, 10, 1), run(&case, 10, 3));
        assert_same_bits(&one.0, &two.0, "output");
        assert_same_bits(&one.1, &two.1, "log-sum-exp");
    }
}
