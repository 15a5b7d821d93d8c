//! Token by token: the state of far keys, and the near keys and values themselves.
//!
//! Keys move from the window into the state only when a block of rows begins, as in a whole sequence.

use super::Scatterbrain;
use super::causal::{absorb, attend_near};
use crate::engine::linear::{Accumulator, Positive};
use crate::group::{GroupStream, RowBlock};
use crate::workspace::Context;
use crate::{MatRef, Real, Result, RunInfo};
use attlas_num::kernels::Band;

/// The state of far keys, and the near keys and values.
#[derive(Debug)]
pub(super) struct NearFarStream<T> {
    plan: Scatterbrain,
    acc: Positive<T>,
    state: Vec<T>,
    cached: usize,
    k: Vec<T>,
    v: Vec<T>,
    d_v: usize,
}

impl<T: Real> NearFarStream<T> {
    /// Creates an empty stream.
    pub(super) fn new(plan: &Scatterbrain, acc: Positive<T>, d_v: usize) -> Self {
        let mut state = vec![T::ZERO; acc.state_len()];
        acc.clear(&mut state);
        Self { plan: plan.clone(), acc, state, cached: 0, k: Vec::new(), v: Vec::new(), d_v }
    }
}

impl<T: Real> GroupStream<T> for NearFarStream<T> {
    fn push(&mut self, k: MatRef<'_, T>, v: MatRef<'_, T>, cx: Context<'_>) -> Result<()> {
        let (d, d_v) = (self.plan.d, self.d_v);
        for (k, v) in k.iter_rows().zip(v.iter_rows()) {
            let len = self.cached + self.v.len() / d_v;
            if len.is_multiple_of(self.plan.params.block()) {
                let old = self.plan.params.near_from(len) - self.cached;
                let (old_k, old_v) =
                    (MatRef::new(&self.k[..old * d], old, d), MatRef::new(&self.v[..old * d_v], old, d_v));
                absorb(&self.acc, &mut self.state, old_k, old_v, cx);
                self.k.drain(..old * d);
                self.v.drain(..old * d_v);
                self.cached += old;
            }
            self.k.extend_from_slice(k);
            self.v.extend_from_slice(v);
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
        let n = self.v.len() / self.d_v;
        let near = (MatRef::new(&self.k, n, self.plan.d), MatRef::new(&self.v, n, self.d_v));
        let rows = RowBlock { head: 0, first: 0, q, out, lse };
        attend_near(&self.acc, &self.state, self.cached, near, scale, Band::ALL, rows, cx);
        Ok(RunInfo::visited((q.rows() * (n + self.plan.features())) as u64))
    }

    fn state_bytes(&self) -> usize {
        (self.state.len() + self.k.len() + self.v.len()) * size_of::<T>()
    }
}
