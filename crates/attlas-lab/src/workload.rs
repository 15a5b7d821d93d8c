//! Queries, keys and values, the inputs of all measurements.

use crate::hash::sha256;
use crate::{Error, Result};
use attlas::{Inputs, Mask, Problem, Qkv, TensorRef};
use std::collections::BTreeMap;

/// Queries, keys and values of one or more layers.
#[derive(Clone, Debug)]
pub struct Workload {
    /// Its source.
    pub source: String,
    /// Default mask of these inputs.
    pub mask: Mask,
    /// Metadata of the file: model, text hash, token count, producer, ….
    pub metadata: BTreeMap<String, String>,
    /// The layers, in order.
    pub layers: Vec<LayerData>,
}

impl Workload {
    /// Keeps only the named layers; if one is missing, the error lists the existing ones.
    pub fn keep_layers(&mut self, wanted: &[usize]) -> Result<()> {
        let number = |i: usize, x: &LayerData| x.layer.unwrap_or(i);
        let there: Vec<usize> = self.layers.iter().enumerate().map(|(i, x)| number(i, x)).collect();
        if let Some(missing) = wanted.iter().find(|l| !there.contains(l)) {
            let names: Vec<String> = there.iter().map(usize::to_string).collect();
            return Err(Error::argument("layer", format!("one of {}", names.join(", ")), missing));
        }
        let mut i = 0;
        self.layers.retain(|x| {
            i += 1;
            wanted.contains(&number(i - 1, x))
        });
        Ok(())
    }

    /// Returns the SHA-256 of all numbers with their sizes.
    pub fn hash(&self) -> String {
        let mut all = String::new();
        for layer in &self.layers {
            all += &format!("{:?} {:?}", layer.layer, layer.problem);
            for part in [&layer.q, &layer.k, &layer.v] {
                let bytes: Vec<u8> = part.iter().flat_map(|x| x.to_le_bytes()).collect();
                all += &sha256(&bytes);
            }
        }
        sha256(all.as_bytes())
    }
}

/// Queries, keys and values of one layer, contiguous `[heads, rows, columns]`, all finite.
#[derive(Clone, Debug)]
pub struct LayerData {
    /// Layer of the model, if there is one.
    pub layer: Option<usize>,
    /// Sizes; the mask is the workload's.
    pub problem: Problem,
    /// `n_heads × n_q × d`.
    pub q: Vec<f32>,
    /// `n_kv_heads × n_k × d`.
    pub k: Vec<f32>,
    /// `n_kv_heads × n_k × d_v`.
    pub v: Vec<f32>,
}

impl LayerData {
    /// Returns the problem of one key head with all query heads that share it.
    pub fn group_problem(&self, mask: Mask) -> Problem {
        Problem { n_heads: self.problem.group_size(), n_kv_heads: 1, mask, ..self.problem }
    }

    /// Returns the query heads that share key head `group`.
    pub fn heads_of(&self, group: usize) -> std::ops::Range<usize> {
        let size = self.problem.group_size();
        group * size..(group + 1) * size
    }

    /// Returns the tensors of key head `group` and of the query heads that share it.
    pub fn group(&self, group: usize) -> Result<Qkv<'_, f32>> {
        let p = &self.problem;
        let size = p.group_size();
        let q = TensorRef::bhnd(&self.q, [1, p.n_heads, p.n_q, p.d])?;
        let k = TensorRef::bhnd(&self.k, [1, p.n_kv_heads, p.n_k, p.d])?;
        let v = TensorRef::bhnd(&self.v, [1, p.n_kv_heads, p.n_k, p.d_v])?;
        Ok(Qkv::new(
            q.heads(group * size..(group + 1) * size),
            k.heads(group..group + 1),
            v.heads(group..group + 1),
        ))
    }

    /// Returns all heads at once.
    pub fn inputs(&self) -> Result<Inputs<'_>> {
        let p = &self.problem;
        let q = TensorRef::bhnd(&self.q, [1, p.n_heads, p.n_q, p.d])?;
        let k = TensorRef::bhnd(&self.k, [1, p.n_kv_heads, p.n_k, p.d])?;
        let v = TensorRef::bhnd(&self.v, [1, p.n_kv_heads, p.n_k, p.d_v])?;
        Ok(Qkv::new(q, k, v).into())
    }
}
