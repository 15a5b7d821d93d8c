//! Decoding token by token: a state of all complete blocks, and the keys of the current one unchanged.
//!
//! A block enters the state only when the next one begins: until then its rows treat it as their own block, as in a
//! whole group.

use super::power::{KeyTile, PowerKernel, augment_into};
use super::rows::NearTile;
use super::state::SketchSums;
use super::{Form, Guard, HalfSketch, Prepare, SketchAttention};
use crate::group::{Group, GroupStream};
use crate::spread::{join_log, split_log};
use crate::workspace::Context;
use crate::{Error, Mask, MatRef, Real, Result, RunInfo};

/// Decoding with a state: keys of the current block are kept unchanged and added to the state when the next block
/// begins.
#[derive(Debug)]
pub struct SketchStream<T: Real, M> {
    map: M,
    manner: Manner,
    d: usize,
    d_v: usize,
    sums: Vec<T>,
    log: f64,
    k: Vec<T>,
    v: Vec<T>,
    /// All keys and values, if rows may have to be recomputed.
    kept: [Vec<T>; 2],
}

/// The settings of a [`SketchAttention`], without its map, which the stream owns.
#[derive(Clone, Copy, Debug)]
struct Manner {
    form: Form,
    near: Option<PowerKernel>,
    c0: f64,
    block: usize,
    prepare: Prepare,
    guard: Guard,
}

impl Manner {
    fn with<'a, T: Real>(&self, map: &'a dyn HalfSketch<T>) -> SketchAttention<'a, T> {
        let Self { form, near, c0, block, prepare, guard } = *self;
        SketchAttention { map, form, near, c0, block, prepare, guard }
    }
}

impl<T: Real, M: HalfSketch<T> + 'static> SketchStream<T, M> {
    /// Makes an empty stream of the attention `like`, with its own map.
    pub fn new(like: &SketchAttention<'_, T>, map: M, d: usize, d_v: usize) -> Self {
        let sums = vec![T::ZERO; like.state_len(d_v)];
        let SketchAttention { form, near, c0, block, prepare, guard, .. } = *like;
        let manner = Manner { form, near, c0, block, prepare, guard };
        let (log, [k, v], kept) = (f64::NEG_INFINITY, [Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
        Self { map, manner, d, d_v, sums, log, k, v, kept }
    }

    /// Adds the current block to the state.
    fn close_block(&mut self, cx: Context<'_>) {
        let n = self.manner.block;
        let (k, v) = (MatRef::new(&self.k, n, self.d), MatRef::new(&self.v, n, self.d_v));
        let mut state = SketchSums { sums: &mut self.sums, log: self.log };
        self.manner.with(&self.map).absorb(k, v, &mut state, cx);
        self.log = state.log;
        self.k.clear();
        self.v.clear();
    }
}

impl<T: Real, M: HalfSketch<T> + 'static> GroupStream<T> for SketchStream<T, M> {
    fn push(&mut self, k: MatRef<'_, T>, v: MatRef<'_, T>, cx: Context<'_>) -> Result<()> {
        let Manner { block, prepare, guard, .. } = self.manner;
        for (k, v) in k.iter_rows().zip(v.iter_rows()) {
            if self.v.len() == block * self.d_v {
                self.close_block(cx);
            }
            let start = self.k.len();
            self.k.resize(start + self.d, T::ZERO);
            prepare.apply_into(MatRef::new(k, 1, self.d), &mut self.k[start..]);
            self.v.extend_from_slice(v);
            if guard.kernel().is_some() {
                self.kept[0].extend_from_slice(&self.k[start..]);
                self.kept[1].extend_from_slice(v);
            }
        }
        Ok(())
    }

    fn attend(
        &mut self,
        q: MatRef<'_, T>,
        _: T,
        out: &mut [T],
        lse: &mut [T],
        cx: Context<'_>,
    ) -> Result<RunInfo> {
        lse.fill(T::NEG_INFINITY);
        let n = self.v.len() / self.d_v;
        if n == 0 {
            out.fill(T::ZERO);
            return Ok(RunInfo { empty_rows: lse.len() as u64, ..RunInfo::default() });
        }
        let like = self.manner.with(&self.map);
        let (k, v) = (MatRef::new(&self.k, n, self.d), MatRef::new(&self.v, n, self.d_v));
        let mut augmented = cx.scratch.take::<T>(n * (self.d_v + 1));
        let spoiled = augment_into(v, &mut augmented);
        let tile = KeyTile { k, v, augmented: MatRef::new(&augmented, n, self.d_v + 1), spoiled: &spoiled };
        let sketched = if like.near.is_none() { n } else { 0 };
        let mut short = cx.scratch.take::<T>(sketched * like.map.width());
        let mut logs = cx.scratch.take::<f64>(sketched);
        if sketched > 0 {
            like.map.sketch_into(k, cx, &mut short, &mut logs);
        }
        let near = NearTile { tile, short: &short, logs: &logs };
        let state = SketchSums { sums: &mut self.sums, log: self.log };
        let guarded = like.attend(q, &state, Some((near, &|_| n)), out, cx);
        if let Some(kernel) = like.guard.kernel() {
            let all = self.kept[1].len() / self.d_v;
            let k = MatRef::new(&self.kept[0], all, self.d);
            let v = MatRef::new(&self.kept[1], all, self.d_v);
            for &i in &guarded {
                let row = like.exact_row(kernel, q.sub_rows(i..i + 1), k, v, cx);
                out[i * self.d_v..(i + 1) * self.d_v].copy_from_slice(&row);
            }
        }
        let visited = (q.rows() * (like.features() + n)) as u64;
        Ok(RunInfo { keys_visited: visited, fallback_rows: guarded.len() as u64, ..RunInfo::default() })
    }

    fn state_bytes(&self) -> usize {
        let kept: usize = self.kept.iter().map(Vec::len).sum();
        (self.sums.len() + self.k.len() + self.v.len() + kept) * size_of::<T>()
    }

    /// Returns the state with the current block in it, and the two halves of its scale.
    fn sums(&self, cx: Context<'_>) -> Option<Vec<T>> {
        if self.manner.guard.kernel().is_some() {
            return None;
        }
        let mut sums = self.sums.clone();
        let mut state = SketchSums { sums: &mut sums, log: self.log };
        let n = self.v.len() / self.d_v;
        let (k, v) = (MatRef::new(&self.k, n, self.d), MatRef::new(&self.v, n, self.d_v));
        self.manner.with(&self.map).absorb(k, v, &mut state, cx);
        let log = state.log;
        sums.extend(split_log::<T>(log));
        Some(sums)
    }

    /// Other keys come before or after the current block; either way that block must be complete.
    fn add_sums(&mut self, sums: &[T], _: usize) -> Result<()> {
        let len = self.sums.len();
        if sums.len() != len + 2 || !self.k.is_empty() {
            return Err(Error::shape("sums", format!("{} and no open block", len + 2), sums.len()));
        }
        let mut state = SketchSums { sums: &mut self.sums, log: self.log };
        SketchAttention::combine(&mut state, &sums[..len], join_log([sums[len], sums[len + 1]]));
        self.log = state.log;
        Ok(())
    }

    fn rows(&mut self, mut x: Group<'_, T>) -> Result<RunInfo> {
        if !self.k.is_empty() || self.manner.guard.kernel().is_some() {
            return Err(Error::shape("rows", "sums of complete blocks alone", "a block that is open"));
        }
        if x.mask == Mask::Causal && x.n_q() > x.n_k() {
            return Err(Error::shape("queries", format!("at most {} keys", x.n_k()), x.n_q()));
        }
        let (k, cx) = (x.k, x.cx);
        let rows = if x.mask == Mask::Causal { k.rows() } else { 0 };
        let mut prepared = cx.scratch.take::<T>(rows * k.cols());
        self.manner.prepare.par_apply_into(k.sub_rows(0..rows), &mut prepared);
        let k = MatRef::new(&prepared, rows, k.cols());
        let state = SketchSums { sums: &mut self.sums, log: self.log };
        self.manner.with(&self.map).run_after(&mut x, k, Some(state))
    }
}
