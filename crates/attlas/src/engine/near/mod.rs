//! A near field around any method: exact near keys, the method on the far ones, merged by log-sum-exp.
//!
//! Row $i$ at position $p = i + n_k - n_q$ sees the first `sinks` keys and, with a causal mask, the keys $p - w < j \le
//! p$ exactly. Its far keys are $s \le j \le p - w$. They are **again a causal problem**, of the same queries and the
//! keys shifted by the window, so the far part is one run of the method's own causal form: keys are hashed, clustered
//! or summed once, the cost keeps its order of growth, and the law that the form already obeys (no later query, key or
//! value changes a row) carries over. Rectangles without a mask would need a form in which queries do not influence
//! each other, which seven methods lack without a mask.
//!
//! **Heavy keys.** Rows form blocks that begin at multiples of `block`. For each block, the far keys that all of its
//! rows see are scored by the mean of the latest `recent` queries up to the block's first row, one softmax per query
//! head, summed over the heads of the group; the heaviest keys are attended to exactly. The far part of a block is one
//! causal run of the method over the other far keys, with more keys than rows. The automatic block is a 32nd of the
//! keys, so a method sets up its keys at most 32 times, whatever the length.
//!
//! **The rest.** If a method drops keys, each run of 64 far keys is represented by its mean key and mean value with
//! bias $\ln(64)$, less the share of the keys that the method plans to visit. The means for a tile of 64 rows cover the
//! far keys of its first row.
//!
//! **Guard.** The first row of each tile is computed exactly as well. The errors with the method's far part, with means
//! alone and without a far part are kept as running means over tiles, and the best of the three is used for the tile;
//! rows that lose the method's far part are counted in [`RunInfo::fallback_rows`].
//!
//! Without a mask, sinks and heavy keys (chosen by the mean of the latest queries) are the same for all rows, and the window
//! is shared by a block of rows, whose far keys are everything else.

mod choose;
mod rows;
mod stream;

use super::{exact_few_rows, exact_group, exact_rows};
use crate::group::{Group, GroupIndex, GroupPlan, GroupStream};
use crate::method::Cost;
use crate::near::{Near, Rest};
use crate::{Mask, MatRef, Problem, Real, Result, RunInfo, Status};
use attlas_num::kernels::Band;
use attlas_num::par::*;
use choose::choose;
use rows::{Means, TILE, Tile, merge, tiles};
use std::ops::Range;
use std::sync::Arc;

/// A plan with a near field around it.
#[derive(Debug)]
pub struct NearField<P> {
    near: Near,
    plan: Arc<P>,
}

impl<P: GroupPlan> NearField<P> {
    /// Wraps `plan`, made for `problem`, in the near field of `problem`.
    pub fn new(problem: &Problem, plan: P) -> Self {
        Self { near: problem.near, plan: Arc::new(plan) }
    }

    /// Returns the bias of the means: the logarithm of the share of far keys that the method does not plan to visit.
    /// `None` if it visits all of them, or `means` is off.
    fn unseen(&self, problem: &Problem) -> Option<f64> {
        if self.near.rest != Rest::Mean {
            return None;
        }
        // One group, so that a run and a stream agree.
        let group = Problem { batch: 1, n_heads: problem.group_size(), n_kv_heads: 1, ..*problem };
        let far = far_problem(&group);
        if far.visible_pairs() == 0 {
            return Some(0.0);
        }
        let pairs = self.plan.cost(&far).run_flops as f64 / (2 * (far.d + far.d_v)) as f64;
        let unseen = 1.0 - pairs / far.visible_pairs() as f64;
        (unseen > 0.0).then(|| unseen.ln())
    }
}

/// Returns the far part of a problem, as if no key were heavy.
fn far_problem(p: &Problem) -> Problem {
    let near = p.near.sinks.saturating_add(p.near.window);
    let n_k = p.n_k.saturating_sub(near);
    let n_q = if p.mask == Mask::Causal { p.n_q.min(n_k) } else { p.n_q };
    Problem { near: Near::NONE, ..p.with_lens(n_q, n_k) }
}

impl<P: GroupPlan> GroupPlan for NearField<P> {
    const DOUBLE: bool = P::DOUBLE;

    fn cost(&self, p: &Problem) -> Cost {
        let far = far_problem(p);
        let inner = if far.n_k > 0 { self.plan.cost(&far) } else { Cost::default() };
        let rows = (p.batch * p.n_heads * p.n_q) as u64;
        let near = (self.near.sinks + self.near.window + self.near.heavy).min(p.n_k) as u64;
        let blocks = if self.near.heavy > 0 { p.n_q.div_ceil(self.near.block_of(p.n_k)) as u64 } else { 1 };
        let far_keys = (p.batch * p.n_kv_heads * far.n_k) as u64;
        // Far keys are scored once per block and head, and once per tile and head if the guard is on.
        let scored = if self.near.heavy > 0 { blocks * far_keys * p.group_size() as u64 / 2 } else { 0 };
        let guarded = if self.near.guard { far.visible_pairs() / TILE as u64 } else { 0 };
        let means = if self.near.rest == Rest::Mean { far.visible_pairs() / TILE as u64 } else { 0 };
        let width = (p.d + p.d_v) as u64;
        Cost {
            setup_flops: inner.setup_flops * blocks.div_ceil(2) + 2 * scored * p.d as u64,
            run_flops: inner.run_flops + 2 * (rows * near + guarded + means) * width,
            bytes: inner.bytes + 4 * (rows + blocks * far_keys) * width,
        }
    }

    fn run<T: Real>(&self, mut group: Group<'_, T>) -> Result<RunInfo> {
        let field = Field::new(&self.near, &group);
        if field.covers() {
            return Ok(RunInfo { status: Status::Exact, ..exact_group(&mut group)? });
        }
        let problem = Problem {
            batch: 1,
            n_heads: group.q.heads(),
            n_kv_heads: 1,
            n_q: group.n_q(),
            n_k: group.n_k(),
            d: group.k.cols(),
            d_v: group.d_v(),
            scale: group.scale.to_f64(),
            mask: group.mask,
            near: self.near,
            softcap: None,
        };
        let plan = &*self.plan;
        field.run(&mut group, self.unseen(&problem), &|far| plan.run(far))
    }

    fn stream<T: Real>(&self, p: &Problem, index: GroupIndex) -> Option<Box<dyn GroupStream<T>>> {
        let plan = self.plan.clone();
        let far = far_problem(p);
        let inner = Box::new(move || plan.stream::<T>(&far, index));
        stream::NearStream::new(self.near, self.unseen(p), p, inner).map(|s| Box::new(s) as _)
    }
}

/// A method's own form, which runs on far keys.
type Far<'f, T> = &'f dyn Fn(Group<'_, T>) -> Result<RunInfo>;

/// Position of the near field of one group.
#[derive(Clone, Copy, Debug)]
struct Field {
    near: Near,
    sinks: usize,
    window: usize,
    causal: bool,
    n_q: usize,
    n_k: usize,
}

/// Some rows that share their heavy keys.
#[derive(Debug)]
struct Epoch {
    rows: Range<usize>,
    /// Far keys, in order. In a causal problem all rows see the first `shared`, and each row sees one more than the
    /// last.
    far: [Range<usize>; 2],
    shared: usize,
}

impl Field {
    fn new<T: Real>(near: &Near, g: &Group<'_, T>) -> Self {
        let (n_q, n_k) = (g.n_q(), g.n_k());
        let causal = g.mask == Mask::Causal;
        let (sinks, window) = (near.sinks.min(n_k), near.window.min(n_k.max(n_q)));
        Self { near: *near, sinks, window, causal, n_q, n_k }
    }

    /// Returns true if the near field covers every visible key of every row.
    fn covers(&self) -> bool {
        let near = if self.causal { self.sinks + self.window } else { self.sinks.max(self.window) };
        near >= self.n_k
    }

    /// Returns the position of row `i` among the keys.
    fn position(&self, row: usize) -> isize {
        row as isize + self.n_k as isize - self.n_q as isize
    }

    fn epochs(&self) -> Vec<Epoch> {
        let block = self.near.block_of(self.n_k);
        let Self { sinks, window, n_q, n_k, .. } = *self;
        if !self.causal {
            let block = if window == 0 { n_q.max(1) } else { block };
            let rows = (0..n_q).step_by(block).map(|r| r..(r + block).min(n_q));
            return rows
                .map(|rows| {
                    let near = self.shared_window(&rows);
                    let far = match near.is_empty() {
                        true => [sinks..n_k, n_k..n_k],
                        false => [sinks..near.start.max(sinks), near.end.max(sinks)..n_k],
                    };
                    let shared = far.iter().map(Range::len).sum();
                    Epoch { rows, far, shared }
                })
                .filter(|e| e.shared > 0)
                .collect();
        }
        // Rows from the first with a far key on: the key at `position − window` is its last.
        let mut first = ((sinks + window + n_q) as isize - n_k as isize).max(0) as usize;
        let mut epochs = Vec::new();
        while first < n_q {
            let position = self.position(first) as usize;
            let left = if self.near.heavy > 0 { block - position % block } else { n_q - first };
            let rows = first..(first + left).min(n_q);
            let shared = position + 1 - window - sinks;
            let end = sinks + shared + rows.len() - 1;
            let far = [sinks..end, end..end];
            first = rows.end;
            epochs.push(Epoch { rows, far, shared });
        }
        epochs
    }

    /// Returns the keys that all of `rows` see as their window without a mask; empty without a window.
    fn shared_window(&self, rows: &Range<usize>) -> Range<usize> {
        if self.window == 0 {
            return 0..0;
        }
        let clip = |p: isize| p.clamp(0, self.n_k as isize) as usize;
        let window = self.window as isize;
        clip(self.position(rows.start) - window + 1)..clip(self.position(rows.end) + window - 1)
    }

    fn run<T: Real>(&self, g: &mut Group<'_, T>, unseen: Option<f64>, far: Far<'_, T>) -> Result<RunInfo> {
        let mut info = RunInfo::visited(self.exact_near(g)?);
        let mut errors = vec![[0.0; 3]; g.q.heads()];
        let mut exact = true;
        for epoch in self.epochs() {
            let part = self.epoch(g, &epoch, unseen, far, &mut errors)?;
            exact &= part.status == Status::Exact;
            let status = if part.status == Status::Exact { Status::Complete } else { part.status };
            info = info.merge(RunInfo { status, ..part });
        }
        // Exact only if every far part was, or there was none.
        info.status = if exact { Status::Exact } else { info.status };
        info.empty_rows = g.lse.iter().filter(|l| **l == T::NEG_INFINITY).count() as u64;
        Ok(info)
    }

    /// Computes sinks and window of every row; returns the visited pairs.
    fn exact_near<T: Real>(&self, g: &mut Group<'_, T>) -> Result<u64> {
        let (k, v, scale, cx) = (g.k, g.v, g.scale, g.cx);
        let Self { sinks, window, causal, .. } = *self;
        let block_rows = if causal || window == 0 { ROWS } else { self.near.block_of(self.n_k) };
        let visited = g.par_row_blocks(block_rows, |block| {
            let (rows, p) = (block.lse.len(), self.position(block.first));
            let (k_sink, v_sink) = (k.sub_rows(0..sinks), v.sub_rows(0..sinks));
            let band = Band { lower: None, upper: causal.then_some(p) };
            exact_rows(block.q, k_sink, v_sink, None, scale, band, cx, block.out, block.lse);
            let mut visited: usize = (0..rows).map(|i| band.range(i, sinks).len()).sum();
            if window > 0 {
                let keys = match causal {
                    true => sinks..self.n_k,
                    false => {
                        let near = self.shared_window(&(block.first..block.first + rows));
                        near.start.max(sinks)..near.end.max(sinks)
                    }
                };
                let shift = p - keys.start as isize;
                let band = match causal {
                    true => Band { lower: Some(shift - window as isize + 1), upper: Some(shift) },
                    false => Band::ALL,
                };
                let mut out = cx.scratch.take::<T>(rows * v.cols());
                let mut lse = cx.scratch.take::<T>(rows);
                let (k, v) = (k.sub_rows(keys.clone()), v.sub_rows(keys.clone()));
                exact_rows(block.q, k, v, None, scale, band, cx, &mut out, &mut lse);
                merge(block.out, block.lse, &out, &lse);
                visited += (0..rows).map(|i| band.range(i, keys.len()).len()).sum::<usize>();
            }
            Ok(visited as u64)
        })?;
        Ok(visited.into_iter().sum())
    }

    /// Computes heavy keys and the far part of some rows.
    fn epoch<T: Real>(
        &self,
        g: &mut Group<'_, T>,
        epoch: &Epoch,
        unseen: Option<f64>,
        far: Far<'_, T>,
        errors: &mut [[f64; 3]],
    ) -> Result<RunInfo> {
        let (q, k, v, cx) = (g.q, g.k, g.v, g.cx);
        let (rows, heads, d_v) = (epoch.rows.len(), q.heads(), v.cols());
        let mut info = RunInfo::default();
        let keys: Vec<usize> = epoch.far.iter().cloned().flatten().collect();
        let heavy = if self.near.heavy == 0 {
            Vec::new()
        } else {
            let last = if self.causal { epoch.rows.start } else { epoch.rows.end.max(1) - 1 };
            let recent = (last + 1).saturating_sub(self.near.recent)..last + 1;
            info.keys_visited += (epoch.shared * heads) as u64;
            choose(q, recent, k, &keys[..epoch.shared], self.near.heavy, g.scale, cx)
        };
        // `heavy` is in order, so the remaining far keys are, too.
        let mut left = keys;
        let mut taken = heavy.iter().copied().peekable();
        left.retain(|&j| taken.next_if_eq(&j).is_none());
        let shared = epoch.shared - heavy.len();

        let gathered = if heavy.is_empty() && epoch.far[1].is_empty() { 0 } else { left.len() };
        let mut k_far = cx.scratch.take::<T>(gathered * k.cols());
        let mut v_far = cx.scratch.take::<T>(gathered * d_v);
        let (k_far, v_far) = if gathered == 0 {
            let range = epoch.far[0].start..epoch.far[0].start + left.len();
            (k.sub_rows(range.clone()), v.sub_rows(range))
        } else {
            k.gather_into(left.iter().copied(), &mut k_far);
            v.gather_into(left.iter().copied(), &mut v_far);
            (MatRef::new(&k_far, left.len(), k.cols()), MatRef::new(&v_far, left.len(), d_v))
        };

        let mut far_out = cx.scratch.take::<T>(heads * rows * d_v);
        let mut far_lse = cx.scratch.take::<T>(heads * rows);
        let part = far(Group {
            q: q.rows(epoch.rows.clone()),
            k: k_far,
            v: v_far,
            scale: g.scale,
            mask: g.mask,
            out: &mut far_out,
            lse: &mut far_lse,
            index: g.index,
            cx,
        })?;
        let exact = part.status == Status::Exact;
        info = info.merge(RunInfo { empty_rows: 0, ..part });

        let mut k_heavy = cx.scratch.take::<T>(heavy.len() * k.cols());
        let mut v_heavy = cx.scratch.take::<T>(heavy.len() * d_v);
        k.gather_into(heavy.iter().copied(), &mut k_heavy);
        v.gather_into(heavy.iter().copied(), &mut v_heavy);
        info.keys_visited += (heavy.len() * rows * heads) as u64;

        let guarded = self.near.guard && !exact;
        let unseen = if exact { None } else { unseen };
        let means = (guarded || unseen.is_some()).then(|| Means::new(k_far, v_far));
        let part = EpochRows {
            field: self,
            epoch,
            q: g.q,
            k,
            v,
            scale: g.scale,
            cx,
            shared,
            heavy: (MatRef::new(&k_heavy, heavy.len(), k.cols()), MatRef::new(&v_heavy, heavy.len(), d_v)),
            means: means.as_ref(),
            unseen: unseen.map(T::from_f64),
        };
        let mut all = tiles(g.out, g.lse, self.n_q, d_v, &epoch.rows, |row| self.position(row));
        let scouts: Vec<Scout> = all
            .par_iter_mut()
            .with_max_len(1)
            .map(|t| part.add_near(t, &far_view(&far_out, &far_lse, t, epoch, d_v), guarded))
            .collect();
        let mut choices = Vec::with_capacity(all.len());
        for (tile, scout) in all.iter().zip(&scouts) {
            let choice = if guarded { decide(&mut errors[tile.head], scout.errors) } else { Choice::Method };
            let replaced = if choice == Choice::Method { 0 } else { tile.lse.len() };
            info.keys_visited += scout.visited;
            info.fallback_rows += replaced as u64;
            choices.push(choice);
        }
        let means_visited: u64 = all
            .par_iter_mut()
            .with_max_len(1)
            .zip(choices.par_iter())
            .map(|(t, &choice)| part.add_far(t, &far_view(&far_out, &far_lse, t, epoch, d_v), choice))
            .sum();
        info.keys_visited += means_visited;
        Ok(info)
    }
}

/// Query rows of one task.
const ROWS: usize = 96;

/// Returns the far part of a tile's rows.
fn far_view<'f, T: Real>(
    out: &'f [T],
    lse: &'f [T],
    t: &Tile<'_, T>,
    epoch: &Epoch,
    d_v: usize,
) -> (&'f [T], &'f [T]) {
    let first = t.head * epoch.rows.len() + t.first - epoch.rows.start;
    let rows = first..first + t.lse.len();
    (&out[rows.start * d_v..rows.end * d_v], &lse[rows])
}

/// Far part of a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Choice {
    Method,
    Means,
    Nothing,
}

/// Squared relative errors of the first row of a tile, in the order of [`Choice`], and the pairs spent on them.
#[derive(Clone, Copy, Debug, Default)]
struct Scout {
    errors: [f64; 3],
    visited: u64,
}

/// Returns the squared distance of `got` from `want` over the square of `want`, or the distance alone if that is zero.
fn relative_square<T: Real>(got: &[T], want: &[T]) -> f64 {
    let square = |x: f64| x * x;
    let size: f64 = want.iter().map(|x| square(x.to_f64())).sum();
    let gap: f64 = got.iter().zip(want).map(|(a, b)| square(a.to_f64() - b.to_f64())).sum();
    gap / if size > 0.0 { size } else { 1.0 }
}

/// Adds the errors of one tile and returns the choice with the least recent error; the method's own part wins ties.
fn decide(running: &mut [f64; 3], errors: [f64; 3]) -> Choice {
    running.iter_mut().zip(errors).for_each(|(r, e)| *r = KEEP * *r + e);
    let [method, means, nothing] = *running;
    match () {
        () if method <= GOOD => Choice::Method,
        () if means < method && means <= nothing => Choice::Means,
        () if nothing < method => Choice::Nothing,
        () => Choice::Method,
    }
}

/// Squared relative error up to which the method's own far part is always kept: on a row with few far keys their mean
/// is as good, but not on the rows after it.
const GOOD: f64 = 1e-6;

/// Factor that the running errors keep from tile to tile.
const KEEP: f64 = 0.75;

/// The operands of the rows of one epoch.
struct EpochRows<'a, T> {
    field: &'a Field,
    epoch: &'a Epoch,
    q: crate::group::Queries<'a, T>,
    k: MatRef<'a, T>,
    v: MatRef<'a, T>,
    scale: T,
    cx: crate::workspace::Context<'a>,
    shared: usize,
    heavy: (MatRef<'a, T>, MatRef<'a, T>),
    means: Option<&'a Means<'a, T>>,
    unseen: Option<T>,
}

impl<T: Real> EpochRows<'_, T> {
    /// Returns the number of far keys, without heavy ones, that the first row of a tile sees.
    fn limit(&self, t: &Tile<'_, T>) -> usize {
        if self.field.causal { self.shared + t.first - self.epoch.rows.start } else { self.shared }
    }

    /// Adds the heavy keys to the rows of a tile, and measures the candidates for its far part on the first row.
    fn add_near(&self, t: &mut Tile<'_, T>, far: &(&[T], &[T]), guarded: bool) -> Scout {
        let (d_v, cx, scale) = (self.v.cols(), self.cx, self.scale);
        let q = self.q.head(t.head).sub_rows(t.first..t.first + t.lse.len());
        if self.heavy.0.rows() > 0 {
            let mut out = cx.scratch.take::<T>(t.out.len());
            let mut lse = cx.scratch.take::<T>(t.lse.len());
            exact_rows(q, self.heavy.0, self.heavy.1, None, scale, Band::ALL, cx, &mut out, &mut lse);
            merge(t.out, t.lse, &out, &lse);
        }
        let Some(means) = self.means.filter(|_| guarded) else { return Scout::default() };
        let seen =
            if self.field.causal { (self.field.position(t.first) + 1) as usize } else { self.field.n_k };
        let first = q.sub_rows(0..1);
        let mut row = cx.scratch.take::<T>(4 * d_v);
        let (exact, rest) = row.split_at_mut(d_v);
        let mut lse = [T::ZERO; 2];
        let (k, v) = (self.k.sub_rows(0..seen), self.v.sub_rows(0..seen));
        exact_few_rows(first, k, v, scale, cx, exact, &mut lse[..1]);
        let error = |o: &[T]| relative_square(o, exact);
        let (o, mean) = rest.split_at_mut(d_v);
        let mean = &mut mean[..d_v];
        // The method's part, with the means of what it drops.
        o.copy_from_slice(&t.out[..d_v]);
        let mut l = t.lse[0];
        crate::merge_lse(o, &mut l, &far.0[..d_v], far.1[0]);
        let limit = self.limit(t);
        let mut visited = seen;
        if let Some(unseen) = self.unseen {
            visited += means.attend(first, limit, unseen, scale, cx, mean, &mut lse[1..]);
            crate::merge_lse(o, &mut l, mean, lse[1]);
        }
        let method = error(o);
        visited += means.attend(first, limit, T::ZERO, scale, cx, mean, &mut lse[1..]);
        o.copy_from_slice(&t.out[..d_v]);
        l = t.lse[0];
        crate::merge_lse(o, &mut l, mean, lse[1]);
        Scout { errors: [method, error(o), error(&t.out[..d_v])], visited: visited as u64 }
    }

    /// Adds the far part; returns the visited means.
    fn add_far(&self, t: &mut Tile<'_, T>, far: &(&[T], &[T]), choice: Choice) -> u64 {
        if choice == Choice::Method {
            merge(t.out, t.lse, far.0, far.1);
        }
        let bias = match choice {
            Choice::Method => self.unseen,
            Choice::Means => Some(T::ZERO),
            Choice::Nothing => None,
        };
        let (Some(bias), Some(means)) = (bias, self.means) else { return 0 };
        let q = self.q.head(t.head).sub_rows(t.first..t.first + t.lse.len());
        let mut out = self.cx.scratch.take::<T>(t.out.len());
        let mut lse = self.cx.scratch.take::<T>(t.lse.len());
        let visited = means.attend(q, self.limit(t), bias, self.scale, self.cx, &mut out, &mut lse);
        merge(t.out, t.lse, &out, &lse);
        visited as u64
    }
}

#[cfg(test)]
mod tests;
