//! Decoding: one list of positions for every centroid, which only grows.
//!
//! Centroids are given, or computed once from the keys of the first tokens, which attend exactly until then; a new key
//! joins the list of its best centroid, and a query reads the end of one list.

use super::centroids::norm_into;
use super::{Routing, Sizes};
use crate::engine::{CachedRows, attend_subset, exact_group};
use crate::group::{Group, GroupIndex, GroupStream};
use crate::workspace::Context;
use crate::{Mat, MatRef, Problem, Real, Result, RunInfo};
use attlas_num::cluster::Metric;
use attlas_num::cluster::kmeans::assign_into;

/// Decoding: one list of positions for every centroid, which only grows.
#[derive(Debug)]
pub(super) struct CentroidStream<T> {
    plan: Routing,
    sizes: Sizes,
    exact: bool,
    centroids: Option<Mat<T>>,
    lists: Vec<Vec<u32>>,
    cached: CachedRows<T>,
    /// Layer-normed keys: those before there are centroids, or all if logits use them.
    normed: Vec<T>,
    d: usize,
    d_v: usize,
    index: GroupIndex,
}

impl<T: Real> CentroidStream<T> {
    /// Creates an empty stream.
    pub(super) fn new(plan: &Routing, p: &Problem, index: GroupIndex) -> Self {
        let sizes = plan.sizes(p.n_k, index.kv_head);
        Self {
            plan: plan.clone(),
            // The stream is exact whenever the plan is.
            exact: plan.raw() && (sizes.window >= p.n_k || sizes.prefix >= p.n_k),
            sizes,
            centroids: None,
            lists: Vec::new(),
            cached: CachedRows::new(p.d, p.d_v),
            normed: Vec::new(),
            d: p.d,
            d_v: p.d_v,
            index,
        }
    }

    /// Appends layer-normed keys, which start at position `first`, to the lists of their centroids.
    fn append(&mut self, keys: &[T], first: usize) {
        let Some(centroids) = &self.centroids else { return };
        let mut labels = vec![0; keys.len() / self.d];
        let rows = MatRef::new(keys, labels.len(), self.d);
        assign_into(rows, centroids.as_ref(), Metric::Spherical, &mut labels);
        self.lists.resize(centroids.rows(), Vec::new());
        for (j, &label) in (first..).zip(&labels) {
            self.lists[label as usize].push(j as u32);
        }
    }
}

impl<T: Real> GroupStream<T> for CentroidStream<T> {
    fn push(&mut self, k: MatRef<'_, T>, v: MatRef<'_, T>, _: Context<'_>) -> Result<()> {
        let first = self.cached.tokens();
        self.cached.append(k, v);
        if self.exact {
            return Ok(());
        }
        let mut normed = vec![T::ZERO; k.rows() * self.d];
        norm_into(k, &mut normed);
        if self.centroids.is_some() {
            self.append(&normed, first);
            if !self.plan.raw() {
                self.normed.extend_from_slice(&normed);
            }
            return Ok(());
        }
        self.normed.extend_from_slice(&normed);
        let n = self.normed.len() / self.d;
        if n >= self.sizes.prefix && n > 0 {
            let fitted = MatRef::new(&self.normed, n, self.d).sub_rows(0..self.sizes.prefix);
            self.centroids = Some(self.plan.centroids(fitted, self.sizes, self.index));
            let waiting = std::mem::take(&mut self.normed);
            self.append(&waiting, 0);
            if !self.plan.raw() {
                self.normed = waiting;
            }
        }
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
        let n = self.cached.tokens();
        let mut norm_q = vec![T::ZERO; q.rows() * self.d];
        norm_into(q, &mut norm_q);
        let norm_q = MatRef::new(&norm_q, q.rows(), self.d);
        let raw = self.plan.raw();
        let k = if raw { self.cached.keys() } else { MatRef::new(&self.normed, n, self.d) };
        let v = self.cached.values();
        let (q, scale) = (if raw { q } else { norm_q }, self.plan.scale(scale));
        let Some(centroids) = self.centroids.as_ref().filter(|_| n > self.sizes.prefix) else {
            return exact_group(&mut Group::decode(q, k, v, scale, out, lse, self.index, cx)?);
        };
        let mut labels = vec![0; q.rows()];
        assign_into(norm_q, centroids.as_ref(), Metric::Spherical, &mut labels);
        let mut info = RunInfo { rank: Some(self.sizes.clusters), ..RunInfo::default() };
        for ((h, &label), (out, lse)) in
            labels.iter().enumerate().zip(out.chunks_exact_mut(self.d_v).zip(lse))
        {
            let list = &self.lists[label as usize];
            let recent = &list[list.len().saturating_sub(self.sizes.window)..];
            let met: Vec<usize> = recent.iter().map(|&j| j as usize).collect();
            *lse = attend_subset(q.row(h), k, v, &met, scale, &mut vec![T::ZERO; met.len()], out);
            info.keys_visited += (met.len() + centroids.rows()) as u64;
            if *lse == T::NEG_INFINITY {
                *lse = self.plan.fallback().answer(q.row(h), k, v, n, scale, out);
                info.fallback_rows += u64::from(*lse != T::NEG_INFINITY);
                info.empty_rows += u64::from(*lse == T::NEG_INFINITY);
            }
        }
        Ok(info)
    }

    fn state_bytes(&self) -> usize {
        let positions: usize = self.lists.iter().map(Vec::len).sum();
        self.cached.bytes() + self.normed.len() * size_of::<T>() + 4 * positions
    }
}
