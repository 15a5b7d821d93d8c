//! The cache of keys and values that exact decoding reads.
//!
//! Keys are stored after any positional rotation, so each is rotated once. Storage grows by doubling and is laid out
//! `[batch, head, token, column]`, so a head's tokens are contiguous and a view costs nothing.

use crate::problem::Dims;
use crate::{Error, Real, Result, TensorRef};
use attlas_num::kernels::pages;
use attlas_num::par::*;
use std::ops::Range;

/// Keys and values of every key head, appended token by token or chunk by chunk.
#[derive(Clone, Debug)]
pub struct KvCache<T> {
    batch: usize,
    n_kv_heads: usize,
    d: usize,
    d_v: usize,
    len: usize,
    capacity: usize,
    k: Vec<T>,
    v: Vec<T>,
}

impl<T: Real> KvCache<T> {
    /// Makes an empty cache with room for `capacity` tokens.
    pub fn new(batch: usize, n_kv_heads: usize, d: usize, d_v: usize, capacity: usize) -> Self {
        let heads = batch * n_kv_heads;
        let (k, v) = (room(heads, capacity * d), room(heads, capacity * d_v));
        Self { batch, n_kv_heads, d, d_v, len: 0, capacity, k, v }
    }

    /// Returns the batch size, the number of key heads and the width of keys.
    pub fn sizes(&self) -> (usize, usize, usize) {
        (self.batch, self.n_kv_heads, self.d)
    }

    /// Returns the number of cached tokens.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if no token is cached.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the bytes of the cached tokens.
    pub fn bytes(&self) -> usize {
        self.batch * self.n_kv_heads * self.len * (self.d + self.d_v) * size_of::<T>()
    }

    /// Appends the keys `[batch, n_kv_heads, t, d]` and values `[batch, n_kv_heads, t, d_v]` of `t` tokens.
    pub fn append(&mut self, k: TensorRef<'_, T>, v: TensorRef<'_, T>) -> Result<()> {
        let tokens = k.dims()[2];
        for (what, dims, width) in [("keys", k.dims(), self.d), ("values", v.dims(), self.d_v)] {
            let want: Dims = [self.batch, self.n_kv_heads, tokens, width];
            if dims != want {
                return Err(Error::shape(what, format!("{want:?}"), format!("{dims:?}")));
            }
        }
        self.make_room(tokens);
        for (store, x, width) in [(&mut self.k, k, self.d), (&mut self.v, v, self.d_v)] {
            for b in 0..self.batch {
                for h in 0..self.n_kv_heads {
                    let start = ((b * self.n_kv_heads + h) * self.capacity + self.len) * width;
                    let rows = store[start..start + tokens * width].chunks_exact_mut(width);
                    rows.zip(x.head(b, h).iter_rows()).for_each(|(dst, src)| dst.copy_from_slice(src));
                }
            }
        }
        self.len += tokens;
        Ok(())
    }

    /// Appends `tokens` tokens whose rows `fill` writes, on the threads of the current pool. It receives a head, counted
    /// through the batch, some of the new tokens, and the room for their keys and for their values.
    pub fn append_with(
        &mut self,
        tokens: usize,
        fill: impl Fn(usize, Range<usize>, &mut [T], &mut [T]) + Sync,
    ) {
        self.make_room(tokens);
        let (d, d_v, first) = (self.d, self.d_v, self.len);
        let keys = self.k.par_chunks_exact_mut((self.capacity * d).max(1));
        let values = self.v.par_chunks_exact_mut((self.capacity * d_v).max(1));
        // A few rows take less time than handing them out.
        let min = if tokens < BLOCK { usize::MAX } else { 1 };
        keys.zip(values).with_max_len(1).with_min_len(min).enumerate().for_each(|(head, (k, v))| {
            let (k, v) = (&mut k[first * d..][..tokens * d], &mut v[first * d_v..][..tokens * d_v]);
            let blocks = k.par_chunks_mut((BLOCK * d).max(1)).zip(v.par_chunks_mut((BLOCK * d_v).max(1)));
            blocks.with_max_len(1).enumerate().for_each(|(i, (k, v))| {
                let some = i * BLOCK..tokens.min((i + 1) * BLOCK);
                fill(head, some, k, v);
            });
        });
        self.len += tokens;
    }

    /// Forgets all but the first `len` tokens; does nothing if there are fewer.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Returns the cached keys, `[batch, n_kv_heads, len, d]`.
    pub fn keys(&self) -> Result<TensorRef<'_, T>> {
        self.view(&self.k, self.d)
    }

    /// Returns the cached values, `[batch, n_kv_heads, len, d_v]`.
    pub fn values(&self) -> Result<TensorRef<'_, T>> {
        self.view(&self.v, self.d_v)
    }

    fn view<'a>(&self, data: &'a [T], width: usize) -> Result<TensorRef<'a, T>> {
        let dims = [self.batch, self.n_kv_heads, self.len, width];
        TensorRef::new(data, dims, [self.n_kv_heads * self.capacity * width, self.capacity * width, width])
    }

    /// Makes room for `tokens` tokens in all; appending up to there moves nothing.
    pub fn reserve(&mut self, tokens: usize) {
        if tokens > self.capacity {
            self.grow(tokens);
        }
    }

    fn make_room(&mut self, tokens: usize) {
        if self.len + tokens > self.capacity {
            self.grow((self.len + tokens).max(2 * self.capacity).max(64));
        }
    }

    fn grow(&mut self, capacity: usize) {
        let heads = self.batch * self.n_kv_heads;
        for (store, width) in [(&mut self.k, self.d), (&mut self.v, self.d_v)] {
            let mut grown = room(heads, capacity * width);
            for h in 0..heads {
                let old = &store[h * self.capacity * width..][..self.len * width];
                grown[h * capacity * width..][..old.len()].copy_from_slice(old);
            }
            *store = grown;
        }
        self.capacity = capacity;
    }
}

/// Per-head size in bytes above which storage uses large pages. Below it, reserved but unused capacity would be backed by
/// whole pages.
const LARGE: usize = 16 << 20;

/// Tokens of a head that one task writes: keys and values of 64 numbers fill 128 KiB.
const BLOCK: usize = 256;

fn room<T: Real>(heads: usize, each: usize) -> Vec<T> {
    let large = each.saturating_mul(size_of::<T>()) >= LARGE;
    if large { pages::zeros(heads * each) } else { vec![T::ZERO; heads * each] }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testkit::Case;
    use crate::{Options, Out, Problem, Qkv, TensorMut, Workspace, registry};

    /// Returns the rows of one-shot causal attention, and those of the same text fed in `chunks` through a cache.
    fn one_shot_and_chunked(chunks: &[usize]) -> (Vec<f64>, Vec<f64>) {
        let n = chunks.iter().sum();
        let p = Problem { batch: 2, d_v: 5, ..Problem::new(4, n, 8).with_kv_heads(2).causal() };
        let case = Case::gaussian(p, 1);
        let exact = registry::method("exact").unwrap();
        let one_shot = crate::testkit::run_method(exact, &Options::new(), &case).0;
        let q = TensorRef::bhnd(&case.q, [2, 4, n, 8]).unwrap();
        let k = TensorRef::bhnd(&case.k, [2, 2, n, 8]).unwrap();
        let v = TensorRef::bhnd(&case.v, [2, 2, n, 5]).unwrap();
        let mut cache = KvCache::new(2, 2, 8, 5, 0);
        let mut ws = Workspace::single().unwrap();
        let mut o = vec![f64::NAN; one_shot.len()];
        for &c in chunks {
            let rows = cache.len()..cache.len() + c;
            cache.append(k.rows(rows.clone()), v.rows(rows.clone())).unwrap();
            // Speculate three tokens ahead, then take them back.
            if rows.end + 3 <= n {
                cache.append(k.rows(rows.end..rows.end + 3), v.rows(0..3)).unwrap();
                cache.truncate(rows.end);
            }
            let plan = exact.plan(&p.with_lens(c, cache.len()), &Options::new()).unwrap();
            let x = Qkv::new(q.rows(rows.clone()), cache.keys().unwrap(), cache.values().unwrap());
            let mut tensor = TensorMut::bhnd(&mut o, [2, 4, n, 5]).unwrap();
            plan.execute(&x.into(), &mut Out::new(tensor.rows_mut(rows)).into(), &mut ws).unwrap();
        }
        assert_eq!(cache.bytes(), 2 * 2 * n * 13 * 8);
        (one_shot, o)
    }

    #[test]
    fn chunked_prefill_and_decoding_equal_one_shot() {
        for chunks in [&[1usize; 9][..], &[70, 1, 1, 30], &[3, 64, 65], &[50], &[5, 0, 6]] {
            let (a, b) = one_shot_and_chunked(chunks);
            crate::testkit::assert_rows_close(&b, &a, 1e-13, &format!("chunks {chunks:?}"));
        }
    }

    #[test]
    fn truncating_and_appending_again_gives_the_same_bits() {
        let x: Vec<f64> = (0..60).map(f64::from).collect();
        let part = |r: std::ops::Range<usize>| TensorRef::bhnd(&x, [1, 2, 10, 3]).unwrap().rows(r);
        let mut a = KvCache::new(1, 2, 3, 3, 4);
        a.append(part(0..10), part(0..10)).unwrap();
        let mut b = a.clone();
        b.truncate(4);
        b.append(part(4..10), part(4..10)).unwrap();
        for h in 0..2 {
            assert!(a.keys().unwrap().head(0, h).iter_rows().eq(b.keys().unwrap().head(0, h).iter_rows()));
        }
        assert!(a.append(part(0..2), TensorRef::bhnd(&x[..12], [1, 2, 2, 3]).unwrap()).is_ok());
        assert!(a.append(part(0..2), part(0..3)).is_err());
    }
}
