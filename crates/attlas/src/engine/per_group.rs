//! Random objects of a plan: one per sequence and key head, drawn before any data.
//!
//! Objects are drawn in double precision; a run casts its own to the element type of its inputs, which gives the same
//! bits as drawing in that type.

use crate::group::GroupIndex;
use crate::{Problem, Result};
use std::sync::Arc;

/// One value for every sequence and key head of a problem. Clones share the values.
#[derive(Debug)]
pub struct PerGroup<V> {
    n_kv_heads: usize,
    values: Arc<[V]>,
}

impl<V> Clone for PerGroup<V> {
    fn clone(&self) -> Self {
        Self { n_kv_heads: self.n_kv_heads, values: self.values.clone() }
    }
}

impl<V> PerGroup<V> {
    /// Calls `draw` for every sequence and key head of `problem`.
    pub fn draw(problem: &Problem, draw: impl Fn(GroupIndex) -> Result<V>) -> Result<Self> {
        let indices = (0..problem.batch)
            .flat_map(|batch| (0..problem.n_kv_heads).map(move |kv_head| GroupIndex { batch, kv_head }));
        let values: Result<Vec<V>> = indices.map(draw).collect();
        Ok(Self { n_kv_heads: problem.n_kv_heads, values: values?.into() })
    }

    /// Returns the value of one sequence and key head.
    ///
    /// # Panics
    /// If the planned problem has no such sequence or key head.
    pub fn of(&self, index: GroupIndex) -> &V {
        assert!(index.kv_head < self.n_kv_heads, "key head {} of {}", index.kv_head, self.n_kv_heads);
        &self.values[index.batch * self.n_kv_heads + index.kv_head]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_sequence_and_key_head_has_its_own_value() {
        let p = Problem::new(4, 8, 2).with_kv_heads(2).with_batch(3);
        let drawn = PerGroup::draw(&p, |i| Ok((i.batch, i.kv_head))).unwrap();
        for (batch, kv_head) in [(0, 0), (0, 1), (2, 0), (2, 1)] {
            assert_eq!(*drawn.clone().of(GroupIndex { batch, kv_head }), (batch, kv_head));
        }
        assert_eq!(drawn.values.len(), 6);
    }
}
