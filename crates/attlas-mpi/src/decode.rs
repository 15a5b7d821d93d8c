//! Decoding over a cache divided among all processes.
//!
//! Tokens go to processes in turn, in blocks of 256. A query is broadcast, each process attends to its own keys,
//! and the `(d_v + 1) · heads` numbers of each are merged along a binary tree, in the order of ranks.

use crate::{Element, Traffic, Transport};
use attlas::cache::KvCache;
use attlas::{
    Error, Mask, Options, Out, Plan, Problem, Qkv, Result, TensorMut, TensorRef, Workspace, merge_lse,
    registry,
};

/// Consecutive tokens on one process.
const BLOCK: usize = 256;

/// This process's part of a cache of keys and values.
#[derive(Debug)]
pub struct SpreadCache<T> {
    problem: Problem,
    cache: KvCache<T>,
    len: usize,
    rank: usize,
    size: usize,
    plan: Option<Box<dyn Plan>>,
}

impl<T: Element> SpreadCache<T> {
    /// Creates an empty cache for the heads and widths of `problem`.
    pub fn new(t: &dyn Transport, problem: &Problem) -> Result<Self> {
        problem.validate()?;
        let p = Problem { mask: Mask::None, ..*problem };
        let cache = KvCache::new(p.batch, p.n_kv_heads, p.d, p.d_v, BLOCK);
        Ok(Self { problem: p, cache, len: 0, rank: t.rank(), size: t.size(), plan: None })
    }

    /// Returns the number of tokens on all processes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if there is no token yet.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the number of tokens cached by this process.
    pub fn cached(&self) -> usize {
        self.cache.len()
    }

    /// Returns how many of the first `len` tokens are on process `rank`.
    fn share(&self, len: usize) -> usize {
        let round = BLOCK * self.size;
        len / round * BLOCK + (len % round).saturating_sub(self.rank * BLOCK).min(BLOCK)
    }

    /// Appends the keys `[batch, n_kv_heads, t, d]` and values of `t` tokens, which every process has; each keeps its own.
    pub fn push(&mut self, k: TensorRef<'_, T>, v: TensorRef<'_, T>) -> Result<()> {
        let tokens = k.dims()[2];
        if v.dims()[2] != tokens {
            return Err(Error::shape("values", format!("{tokens} tokens"), v.dims()[2]));
        }
        let mut at = 0;
        while at < tokens {
            let here = (BLOCK - (self.len + at) % BLOCK).min(tokens - at);
            if (self.len + at) / BLOCK % self.size == self.rank {
                self.cache.append(k.rows(at..at + here), v.rows(at..at + here))?;
            }
            at += here;
        }
        self.len += tokens;
        Ok(())
    }

    /// Drops all but the first `len` tokens.
    pub fn truncate(&mut self, len: usize) {
        if len < self.len {
            self.cache.truncate(self.share(len));
            self.len = len;
        }
    }

    /// Attends with the queries `[batch, n_heads, 1, d]` of process 0 to every token. Returns the rows and their
    /// log-sum-exp, bit-identical on every process.
    pub fn attend(
        &mut self,
        t: &dyn Transport,
        q: TensorRef<'_, T>,
        ws: &mut Workspace,
    ) -> Result<(Vec<T>, Vec<T>, Traffic)> {
        let before = t.traffic();
        let p = self.problem.with_lens(1, self.cache.len());
        let dims = [p.batch, p.n_heads, 1, p.d];
        if q.dims() != dims {
            return Err(Error::shape("queries", format!("{dims:?}"), format!("{:?}", q.dims())));
        }
        let heads = p.batch * p.n_heads;
        let mut own: Vec<T> = Vec::with_capacity(heads * p.d);
        for (b, h) in (0..p.batch).flat_map(|b| (0..p.n_heads).map(move |h| (b, h))) {
            own.extend_from_slice(q.head(b, h).row(0));
        }
        let mut bytes = bytemuck::cast_slice(&own).to_vec();
        t.broadcast(0, &mut bytes);
        bytemuck::cast_slice_mut(&mut own).copy_from_slice(&bytes);

        // One plan for a growing cache, remade when the cache has doubled.
        if self.plan.as_ref().is_none_or(|plan| plan.problem().n_k < p.n_k) {
            let roomy = p.with_lens(1, p.n_k.next_power_of_two());
            self.plan = Some(registry::baseline().plan(&roomy, &Options::new())?);
        }
        let plan = self.plan.as_ref().unwrap_or_else(|| unreachable!("made above"));
        // Output row, then its log-sum-exp, for every head.
        let (mut o, mut lse) = (vec![T::ZERO; heads * p.d_v], vec![T::NEG_INFINITY; heads]);
        let x = Qkv::new(TensorRef::bhnd(&own, dims)?, self.cache.keys()?, self.cache.values()?);
        let out = Out::with_lse(TensorMut::bhnd(&mut o, [p.batch, p.n_heads, 1, p.d_v])?, &mut lse);
        plan.execute(&T::inputs(x), &mut T::output(out), ws)?;
        merge_all(t, p.d_v, &mut o, &mut lse);
        Ok((o, lse, t.traffic().since(before)))
    }
}

/// Merges the parts of all processes, lower ranks first, and broadcasts the result.
fn merge_all<T: Element>(t: &dyn Transport, d_v: usize, o: &mut Vec<T>, lse: &mut Vec<T>) {
    let (rank, size, heads) = (t.rank(), t.size(), lse.len());
    let mut step = 1;
    while step < size {
        if rank % (2 * step) == step {
            let message: Vec<T> = o.iter().chain(lse.iter()).copied().collect();
            t.send(rank - step, bytemuck::cast_slice(&message));
            break;
        }
        if rank + step < size {
            let mut came = vec![T::ZERO; heads * (d_v + 1)];
            t.receive(rank + step, bytemuck::cast_slice_mut(&mut came));
            let (other, other_lse) = came.split_at(heads * d_v);
            for h in 0..heads {
                let row = h * d_v..(h + 1) * d_v;
                merge_lse(&mut o[row.clone()], &mut lse[h], &other[row], other_lse[h]);
            }
        }
        step *= 2;
    }
    let mut bytes = bytemuck::cast_slice(&o.iter().chain(lse.iter()).copied().collect::<Vec<T>>()).to_vec();
    t.broadcast(0, &mut bytes);
    let mut all = vec![T::ZERO; heads * (d_v + 1)];
    bytemuck::cast_slice_mut(&mut all).copy_from_slice(&bytes);
    *lse = all.split_off(heads * d_v);
    *o = all;
}
