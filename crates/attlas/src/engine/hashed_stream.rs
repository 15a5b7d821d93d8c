//! Decoding with old keys sorted by a hash: the block of keys around the query's own rank, and samples of the others.
//!
//! A token sees exactly the last tokens, and the `block` old keys around the place of its hash's Gray rank
//! among theirs; `samples` uniform draws represent the old keys outside that block,
//! $$\hat Z = \sum_{j \in \text{near}} e^{s_j} + \omega \sum_{j \in T \setminus c} e^{s_j},$$
//! with $\omega$ as in prompts. Among keys of the query's own rank, the latest are taken. All keys are kept, since
//! later queries may need others.

use super::{CachedRows, UniformSamples, exact_group, exact_rows};
use crate::group::{Group, GroupIndex, GroupStream};
use crate::workspace::Context;
use crate::{MatRef, Real, Result, RunInfo};
use attlas_num::hash::sign::gray_rank;
use attlas_num::hash::{Lsh, SignHash};
use attlas_num::kernels::{Band, merge_lse};
use attlas_num::rng::StreamKey;
use std::ops::Range;

/// Keys visible to a token.
#[derive(Clone, Copy, Debug)]
pub struct HashedRule {
    /// Old keys around the query's rank.
    pub block: usize,
    /// Draws that represent the others; 0 leaves them out.
    pub samples: usize,
    /// True if a key can be drawn more than once.
    pub replacement: bool,
    /// Last tokens that are seen exactly; the token itself always is.
    pub recent: usize,
    /// Random stream of the samples.
    pub key: StreamKey,
}

/// The cache, and its old keys in the order of their ranks.
#[derive(Debug)]
pub struct HashedStream<T> {
    rule: HashedRule,
    hash: Option<SignHash<T>>,
    cached: CachedRows<T>,
    index: GroupIndex,
    /// Ranks and places of the keys before `edge`, in increasing order.
    sorted: Vec<(u32, u32)>,
    edge: usize,
}

/// Maximum number of keys that are inserted one by one; more are sorted together with all others.
const FEW: usize = 32;

impl<T: Real> HashedStream<T> {
    /// Makes an empty stream. `hash` is that of prompts; without one, keys keep the order of tokens.
    pub fn new(
        rule: HashedRule,
        hash: Option<&SignHash<f64>>,
        (d, d_v): (usize, usize),
        index: GroupIndex,
    ) -> Self {
        let hash = hash.map(SignHash::cast::<T>);
        Self { rule, hash, cached: CachedRows::new(d, d_v), index, sorted: Vec::new(), edge: 0 }
    }

    fn ranks(&self, rows: MatRef<'_, T>) -> Vec<u32> {
        let mut ranks = vec![0; rows.rows()];
        if let Some(hash) = &self.hash {
            hash.codes_into(rows, 0, &mut ranks);
            ranks.iter_mut().for_each(|r| *r = gray_rank(*r));
        }
        ranks
    }

    /// Adds the keys before `edge` to the sorted ones.
    fn sort_to(&mut self, edge: usize) {
        let new = self.edge..edge;
        if new.is_empty() {
            return;
        }
        let ranks = self.ranks(self.cached.keys().sub_rows(new.clone()));
        let pairs = ranks.into_iter().zip(new.clone()).map(|(rank, j)| (rank, j as u32));
        if new.len() > FEW {
            self.sorted.extend(pairs);
            self.sorted.sort_unstable();
        } else {
            for pair in pairs {
                let place = self.sorted.partition_point(|p| *p < pair);
                self.sorted.insert(place, pair);
            }
        }
        self.edge = edge;
    }

    /// Returns the places of the keys around a rank, among the sorted ones.
    fn around(&self, rank: u32) -> Range<usize> {
        let (n, block) = (self.sorted.len(), self.rule.block.min(self.sorted.len()));
        let low = self.sorted.partition_point(|p| p.0 < rank);
        let high = self.sorted.partition_point(|p| p.0 <= rank);
        // The latest keys of that rank, or all of them with neighbours on both sides.
        let start = if high - low >= block {
            high - block
        } else {
            let spare = block - (high - low);
            low.saturating_sub(spare / 2).min(n - block)
        };
        start..start + block
    }
}

impl<T: Real> GroupStream<T> for HashedStream<T> {
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
        let HashedRule { block, samples, replacement, recent, key } = self.rule;
        let (n, (d, d_v), heads) = (self.cached.tokens(), self.cached.widths(), q.rows());
        let edge = n.saturating_sub(recent.max(1));
        let covered = edge <= block.max(samples);
        if !covered {
            self.sort_to(edge);
        }
        let (k, v) = (self.cached.keys(), self.cached.values());
        if covered {
            return exact_group(&mut Group::decode(q, k, v, scale, out, lse, self.index, cx)?);
        }
        // The last tokens, for all heads together.
        let near = (k.sub_rows(edge..n), v.sub_rows(edge..n));
        let mut info = exact_group(&mut Group::decode(q, near.0, near.1, scale, out, lse, self.index, cx)?)?;
        let drawn = UniformSamples::new(edge, samples, replacement, key.named("decode").with(n as u64));
        let ranks = self.ranks(q);
        let most = block + samples;
        let mut keys = cx.scratch.take::<T>(most * d);
        let mut values = cx.scratch.take::<T>(most * d_v);
        let mut bias = cx.scratch.take::<T>(most);
        let (mut far, mut far_lse) = (cx.scratch.take::<T>(d_v), [T::ZERO]);
        for h in 0..heads {
            let around = self.around(ranks[h]);
            let (others, weight) = drawn.beside(edge, around.clone());
            let places = self.sorted[around].iter().map(|p| p.1 as usize);
            let sampled = others.iter().map(|&r| self.sorted[r].1 as usize);
            let count = block.min(edge);
            let all: Vec<usize> = places.chain(sampled).collect();
            let (keys, values) = (&mut keys[..all.len() * d], &mut values[..all.len() * d_v]);
            k.gather_into(all.iter().copied(), keys);
            v.gather_into(all.iter().copied(), values);
            let bias = &mut bias[..all.len()];
            bias[..count].fill(T::ZERO);
            bias[count..].fill(T::from_f64(weight.ln()));
            let (keys, values) = (MatRef::new(keys, all.len(), d), MatRef::new(values, all.len(), d_v));
            exact_rows(
                q.sub_rows(h..h + 1),
                keys,
                values,
                Some(bias),
                scale,
                Band::ALL,
                cx,
                &mut far,
                &mut far_lse,
            );
            merge_lse(&mut out[h * d_v..(h + 1) * d_v], &mut lse[h], &far, far_lse[0]);
            info.keys_visited += all.len() as u64;
        }
        Ok(info)
    }

    fn state_bytes(&self) -> usize {
        self.cached.bytes() + self.sorted.len() * size_of::<(u32, u32)>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testkit::Case;
    use crate::{Problem, Workspace};

    fn rule(seed: u64) -> HashedRule {
        let key = StreamKey::new(5).with(seed);
        HashedRule { block: 12, samples: 20, replacement: false, recent: 9, key }
    }

    fn case(n: usize) -> Case {
        Case::gaussian(Problem { d_v: 5, ..Problem::new(2, n, 8).with_kv_heads(1).causal() }, 3)
    }

    /// Returns output and log-sum-exp of the last token of both heads.
    fn last(rule: HashedRule, case: &Case, pieces: &[usize]) -> (Vec<f64>, Vec<f64>) {
        let p = &case.problem;
        let index = GroupIndex { batch: 0, kv_head: 0 };
        let hash = SignHash::new(StreamKey::new(9), p.d, 5, 1);
        let mut stream = HashedStream::<f64>::new(rule, hash.as_ref(), (p.d, p.d_v), index);
        let (mut out, mut lse) = (vec![f64::NAN; 2 * p.d_v], vec![f64::NAN; 2]);
        let ws = Workspace::single().unwrap();
        let mut done = 0;
        for &piece in pieces {
            let (k, v) =
                (&case.k[done * p.d..(done + piece) * p.d], &case.v[done * p.d_v..(done + piece) * p.d_v]);
            done += piece;
            let q: Vec<f64> =
                (0..2).flat_map(|h| &case.q[(h * p.n_q + done - 1) * p.d..][..p.d]).copied().collect();
            ws.install(|cx| {
                stream.push(MatRef::new(k, piece, p.d), MatRef::new(v, piece, p.d_v), cx).unwrap();
                stream.attend(MatRef::new(&q, 2, p.d), p.scale, &mut out, &mut lse, cx).unwrap();
            });
        }
        assert_eq!(stream.cached.tokens(), p.n_k);
        (out, lse)
    }

    #[test]
    fn the_way_tokens_arrive_changes_nothing() {
        let case = case(150);
        let at_once = last(rule(0), &case, &[150]);
        assert_eq!(last(rule(0), &case, &[60, 1, 1, 40, 1, 47]), at_once);
        assert_eq!(last(rule(0), &case, &[1; 150]), at_once);
    }

    #[test]
    fn the_normaliser_is_unbiased_over_samples() {
        let case = case(120);
        let exact = last(HashedRule { block: 1000, ..rule(0) }, &case, &[120]);
        for replacement in [false, true] {
            let count = 3000u64;
            let mut sums = [0.0; 2];
            let mut squares = [0.0; 2];
            for seed in 0..count {
                let rule = HashedRule { replacement, ..rule(seed) };
                // The hash is fixed; only the samples are drawn anew.
                let (_, lse) = last(rule, &case, &[120]);
                for h in 0..2 {
                    let ratio = (lse[h] - exact.1[h]).exp();
                    sums[h] += ratio;
                    squares[h] += ratio * ratio;
                }
            }
            for h in 0..2 {
                let mean = sums[h] / count as f64;
                let error = ((squares[h] / count as f64 - mean * mean) / count as f64).sqrt();
                assert!((mean - 1.0).abs() < 4.5 * error, "{replacement}: {mean} +- {error}");
            }
        }
    }

    #[test]
    fn blocks_hold_the_keys_of_the_same_rank_and_the_latest_of_many() {
        let index = GroupIndex { batch: 0, kv_head: 0 };
        let rule = HashedRule { block: 4, ..rule(0) };
        let mut stream = HashedStream::<f64>::new(rule, None, (1, 1), index);
        stream.sorted = [0, 0, 0, 0, 0, 0, 3, 3, 7, 9].into_iter().zip(0..).collect();
        assert_eq!(stream.around(0), 2..6);
        assert_eq!(stream.around(3), 5..9);
        assert_eq!(stream.around(5), 6..10);
        assert_eq!(stream.around(20), 6..10);
        stream.rule.block = 40;
        assert_eq!(stream.around(3), 0..10);
    }
}
