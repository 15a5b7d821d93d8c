//! Decoding: the best old keys, chosen again at intervals, and all newer keys.

use super::{MeanQuery, PrescoredHyper, RECENT_QUERIES, Residual, complement};
use crate::engine::{CachedRows, Gathered, exact_group};
use crate::group::{Group, GroupIndex, GroupStream};
use crate::workspace::Context;
use crate::{MatRef, Real, Result, RunInfo};
use attlas_num::kernels::{Band, merge_lse};
use std::collections::VecDeque;

/// Tokens between two scorings of the old keys.
pub(super) const RESCORE: usize = 256;

/// The cache, and the kept part of its old keys.
#[derive(Debug)]
pub(super) struct BestKeys<T> {
    plan: PrescoredHyper,
    cached: CachedRows<T>,
    index: GroupIndex,
    /// Keys before this one were scored; all later ones are visible.
    scored: Option<usize>,
    /// Kept keys and samples of the others, side by side.
    far_k: Vec<T>,
    far_v: Vec<T>,
    bias: Vec<T>,
    /// Means over the heads of the last queries.
    queries: VecDeque<Vec<f64>>,
}

impl<T: Real> BestKeys<T> {
    pub(super) fn new(plan: PrescoredHyper, (d, d_v): (usize, usize), index: GroupIndex) -> Self {
        Self {
            plan,
            cached: CachedRows::new(d, d_v),
            index,
            scored: None,
            far_k: Vec::new(),
            far_v: Vec::new(),
            bias: Vec::new(),
            queries: VecDeque::new(),
        }
    }

    /// Stores the mean of the heads' queries.
    fn remember(&mut self, q: MatRef<'_, T>) {
        let mut mean = vec![0.0; q.cols()];
        for row in q.iter_rows() {
            mean.iter_mut().zip(row).for_each(|(m, x)| *m += x.to_f64() / q.rows() as f64);
        }
        if self.queries.len() == RECENT_QUERIES {
            self.queries.pop_front();
        }
        self.queries.push_back(mean);
    }

    /// Scores the keys before `edge` and gathers the kept ones.
    fn score(&mut self, edge: usize, scale: T, cx: Context<'_>) -> u64 {
        let (d, d_v) = self.cached.widths();
        let (k, v) = (self.cached.keys(), self.cached.values());
        let old = k.sub_rows(0..edge);
        let key = self.index.stream_key(self.plan.params.seed).named("decode").with(edge as u64);
        let factor = scale.to_f64() / self.queries.len().max(1) as f64;
        let sum = |i: usize| self.queries.iter().map(|q| q[i]).sum::<f64>() * factor;
        let mean = MeanQuery((0..d).map(sum).collect());
        let kept = self.plan.kept(old, Some(&mean), key);
        let all = || (0..old.rows() as u32).collect::<Vec<u32>>();
        let kept = kept.unwrap_or_else(all);
        let left = old.rows() - kept.len();
        let drawn = match self.plan.params.residual {
            Residual::None => Vec::new(),
            Residual::AllKeys => key.named("residual").rng().subset(left, self.plan.params.residual_samples),
        };
        let weight = T::from_f64((left as f64 / drawn.len().max(1) as f64).ln());
        let samples = complement(old.rows(), &kept, &drawn);
        let mut far = Gathered::new(kept.len() + samples.len(), d, d_v, cx);
        far.append(k, v, kept.iter().map(|&j| j as usize));
        far.append(k, v, samples.iter().map(|&j| j as usize));
        self.far_k.clear();
        self.far_k.extend_from_slice(far.keys().data());
        self.far_v.clear();
        self.far_v.extend_from_slice(far.values().data());
        self.bias.clear();
        self.bias.resize(kept.len(), T::ZERO);
        self.bias.resize(kept.len() + samples.len(), weight);
        self.scored = Some(edge);
        self.plan.scores_per_key() * old.rows() as u64
    }
}

impl<T: Real> GroupStream<T> for BestKeys<T> {
    fn push(&mut self, k: MatRef<'_, T>, v: MatRef<'_, T>, _: Context<'_>) -> Result<()> {
        self.cached.append(k, v);
        Ok(())
    }

    fn attend(
        &mut self,
        q: MatRef<'_, T>,
        scale: T,
        out: &mut [T],
        lse: &mut [T],
        cx: Context<'_>,
    ) -> Result<RunInfo> {
        let (n, (d, d_v)) = (self.cached.tokens(), self.cached.widths());
        self.remember(q);
        // The token itself is always visible.
        let edge = n.saturating_sub(self.plan.params.n_min.max(1));
        let covered = edge <= self.plan.params.block.max(self.plan.params.samples);
        let mut setup = 0;
        if !covered && self.scored.is_none_or(|scored| edge >= scored + RESCORE) {
            setup = self.score(edge, scale, cx);
        }
        let (k, v) = (self.cached.keys(), self.cached.values());
        let Some(first) = self.scored.filter(|_| !covered) else {
            return exact_group(&mut Group::decode(q, k, v, scale, out, lse, self.index, cx)?);
        };
        let newer = (k.sub_rows(first..n), v.sub_rows(first..n));
        let info = exact_group(&mut Group::decode(q, newer.0, newer.1, scale, out, lse, self.index, cx)?)?;
        let count = self.bias.len();
        let far = (MatRef::new(&self.far_k, count, d), MatRef::new(&self.far_v, count, d_v));
        let mut part = cx.scratch.take::<T>(q.rows() * d_v);
        let mut part_lse = cx.scratch.take::<T>(q.rows());
        crate::engine::exact_rows(
            q,
            far.0,
            far.1,
            Some(&self.bias),
            scale,
            Band::ALL,
            cx,
            &mut part,
            &mut part_lse,
        );
        for (h, (lse, &part_lse)) in lse.iter_mut().zip(&*part_lse).enumerate() {
            merge_lse(&mut out[h * d_v..(h + 1) * d_v], lse, &part[h * d_v..(h + 1) * d_v], part_lse);
        }
        let keys_visited = info.keys_visited + (count * q.rows()) as u64;
        Ok(RunInfo { keys_visited, setup_scores: setup, ..info })
    }

    fn state_bytes(&self) -> usize {
        let numbers = self.far_k.len() + self.far_v.len() + self.bias.len();
        let queries = self.queries.len() * self.cached.widths().0 * size_of::<f64>();
        self.cached.bytes() + numbers * size_of::<T>() + queries
    }
}
