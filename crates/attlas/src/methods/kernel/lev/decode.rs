//! Decoding: the streaming set with its keys and values, and the near keys and values.
//!
//! Rows see the set as it was before their block, as in a whole sequence; keys and values that neither this set nor the
//! window needs are dropped when a block begins.

use super::normaliser::full_form;
use super::rows::KeptRows;
use super::streaming::StreamingSet;
use super::{Lev, Normaliser, Params};
use crate::group::GroupStream;
use crate::workspace::Context;
use crate::{MatRef, Problem, Real, Result, RunInfo};
use std::collections::BTreeMap;

/// Decoding state: the set with its keys and values, and the near keys and values.
#[derive(Debug)]
pub(super) struct LeverageStream<T> {
    plan: Lev,
    set: StreamingSet,
    /// The set before the current block.
    frozen: Vec<usize>,
    gram: Vec<f64>,
    rows: BTreeMap<usize, (Vec<T>, Vec<T>)>,
    len: usize,
    d: usize,
    d_v: usize,
}

impl<T: Real> LeverageStream<T> {
    pub(super) fn new(plan: &Lev, p: &Problem) -> Self {
        Self {
            set: StreamingSet::new(&plan.params, p.d),
            plan: plan.clone(),
            frozen: Vec::new(),
            gram: vec![0.0; p.d * p.d],
            rows: BTreeMap::new(),
            len: 0,
            d: p.d,
            d_v: p.d_v,
        }
    }

    /// Returns the start of the current block and that of the near keys.
    fn near(&self) -> (usize, usize) {
        let Params { block, window, .. } = self.plan.params;
        let last = self.len.saturating_sub(1);
        let start = last - last % block;
        (start, (start + 1).saturating_sub(window.max(1)))
    }
}

impl<T: Real> GroupStream<T> for LeverageStream<T> {
    fn push(&mut self, k: MatRef<'_, T>, v: MatRef<'_, T>, _: Context<'_>) -> Result<()> {
        for (k, v) in k.iter_rows().zip(v.iter_rows()) {
            if self.len.is_multiple_of(self.plan.params.block) {
                self.frozen = self.set.indices();
                self.gram.clone_from(&self.set.gram);
                let low = (self.len + 1).saturating_sub(self.plan.params.window.max(1));
                let frozen = &self.frozen;
                self.rows.retain(|j, _| *j >= low || frozen.binary_search(j).is_ok());
            }
            self.rows.insert(self.len, (k.to_vec(), v.to_vec()));
            self.set.push(k);
            self.len += 1;
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
        if self.len == 0 {
            out.fill(T::ZERO);
            return Ok(RunInfo { empty_rows: lse.len() as u64, ..RunInfo::default() });
        }
        let (start, low) = self.near();
        let mut kept = KeptRows::empty();
        let frozen = self.frozen.iter().filter(|j| **j < low);
        frozen.filter_map(|j| self.rows.get(j)).for_each(|(k, v)| kept.push(k, v));
        let mut near = KeptRows::empty();
        self.rows.range(low..).for_each(|(_, (k, v))| near.push(k, v));
        let (near_k, near_v) =
            (MatRef::new(&near.k, near.len, self.d), MatRef::new(&near.v, near.len, self.d_v));
        let exact2 = self.plan.params.normaliser == Normaliser::Exact2;
        let scale = self.plan.kernel.scale;
        let extra = |_: usize, q: &[T], top: f64| match exact2 {
            true => (full_form(&self.gram, q, near_k, start - low..near.len, scale, top), true),
            false => (0.0, false),
        };
        self.plan.attend(q, &kept, (near_k, near_v), None, &extra, out, cx);
        Ok(RunInfo::visited((q.rows() * (kept.len + near.len)) as u64))
    }

    fn state_bytes(&self) -> usize {
        let rows = self.rows.len() * (self.d + self.d_v) * size_of::<T>();
        rows + (self.set.inverse.len() + 2 * self.gram.len() + self.set.rows.len()) * size_of::<f64>()
    }
}
