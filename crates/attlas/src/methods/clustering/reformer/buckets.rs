//! Sorted keys in chunks, and the chunk of each query.

use super::{Merge, Params};
use crate::Real;
use crate::engine::{BlockMask, BlockRow, CodeIndex};
use attlas_num::cluster::{Balanced, order_by};
use std::ops::Range;

/// Cut of sorted keys into chunks.
#[derive(Clone, Copy, Debug)]
pub(super) enum Chunks {
    /// Chunks of this number of ranks; the last may be short.
    Ragged(usize),
    /// This number of chunks, whose sizes differ by at most one.
    Balanced(usize),
    /// Chunks of this number of ranks within each bucket; the last chunk of a bucket is never full.
    PerBucket(usize),
}

/// The keys of one round.
#[derive(Debug)]
pub(super) struct KeyRound {
    /// Bucket of every key.
    codes: Vec<u32>,
    /// All keys, by bucket and position.
    order: Vec<u32>,
    /// Places in `order` of every chunk.
    chunks: Vec<Range<usize>>,
    /// First chunk of each chunk's bucket, if chunks are cut per bucket; 0 otherwise.
    first: Vec<u32>,
    /// Chunk of every key.
    of_key: Vec<u32>,
    per_bucket: bool,
}

const NONE: u32 = u32::MAX;

impl KeyRound {
    /// Sorts the keys and cuts them into chunks.
    pub(super) fn new(codes: Vec<u32>, chunks: Chunks) -> Self {
        let order = order_by(&codes);
        let n = order.len();
        let (mut ranges, mut first) = (Vec::new(), Vec::new());
        match chunks {
            Chunks::Ragged(block) => {
                ranges.extend((0..n).step_by(block).map(|start| start..(start + block).min(n)));
            }
            Chunks::Balanced(count) => ranges.extend(Balanced::new(n, count).iter()),
            Chunks::PerBucket(block) => {
                let mut start = 0;
                for bucket in order.chunk_by(|&a, &b| codes[a as usize] == codes[b as usize]) {
                    let own = ranges.len() as u32;
                    let end = start + bucket.len();
                    ranges.extend((start..=end).step_by(block).map(|s| s..(s + block).min(end)));
                    first.resize(ranges.len(), own);
                    start = end;
                }
            }
        }
        first.resize(ranges.len(), 0);
        let mut of_key = vec![NONE; codes.len()];
        for (c, range) in ranges.iter().enumerate() {
            order[range.clone()].iter().for_each(|&j| of_key[j as usize] = c as u32);
        }
        let per_bucket = matches!(chunks, Chunks::PerBucket(_));
        Self { codes, order, chunks: ranges, first, of_key, per_bucket }
    }

    /// Bucket of every key.
    pub(super) fn codes(&self) -> &[u32] {
        &self.codes
    }

    /// Number of chunks.
    pub(super) fn chunks(&self) -> usize {
        self.chunks.len()
    }

    /// Returns the places of the keys of a bucket; empty if it has none.
    fn bucket(&self, code: u32) -> Range<usize> {
        let start = self.order.partition_point(|&j| self.codes[j as usize] < code);
        start..start + self.order[start..].partition_point(|&j| self.codes[j as usize] == code)
    }
}

/// The queries of one head in one round.
#[derive(Debug)]
pub(super) struct QueryRound {
    codes: Vec<u32>,
    /// Chunk of every query; `NONE` if its bucket has no key.
    chunk: Vec<u32>,
    /// With chunks per bucket: place in the order of the first key that a query does not see.
    end: Vec<u32>,
}

impl QueryRound {
    /// Sorts queries by bucket and cuts them into the keys' number of chunks.
    pub(super) fn balanced(codes: Vec<u32>, keys: &KeyRound) -> Self {
        let mut chunk = vec![0; codes.len()];
        let order = order_by(&codes);
        for (c, range) in Balanced::new(codes.len(), keys.chunks()).iter().enumerate() {
            order[range].iter().for_each(|&i| chunk[i as usize] = c as u32);
        }
        Self { codes, chunk, end: Vec::new() }
    }

    /// Puts query `i`, which is token `i`, into the chunk of its own key.
    pub(super) fn shared(codes: Vec<u32>, keys: &KeyRound) -> Self {
        Self { codes, chunk: keys.of_key.clone(), end: Vec::new() }
    }

    /// Lets query `i` see the keys below `older[i]` in the chunks of its own bucket.
    pub(super) fn causal(codes: Vec<u32>, keys: &KeyRound, older: &[usize], block: usize) -> Self {
        let buckets = codes.iter().copied().max().map_or(0, |c| c as usize + 1);
        let places: Vec<Range<usize>> = (0..buckets as u32).map(|c| keys.bucket(c)).collect();
        let locate = |(&code, &older): (&u32, &usize)| {
            let places = &places[code as usize];
            if places.is_empty() {
                return (NONE, 0);
            }
            let rank = keys.order[places.clone()].partition_point(|&j| (j as usize) < older);
            let own = keys.of_key[keys.order[places.start] as usize] + (rank / block) as u32;
            (own, (places.start + rank) as u32)
        };
        let (chunk, end) = codes.iter().zip(older).map(locate).unzip();
        Self { codes, chunk, end }
    }

    /// Chunk of every query.
    pub(super) fn chunks(&self) -> &[u32] {
        &self.chunk
    }
}

/// A round: the queries of a chunk attend to the keys of their own and of neighbouring chunks.
pub(super) struct Sorted<'a> {
    pub(super) round: usize,
    pub(super) keys: &'a [KeyRound],
    pub(super) queries: &'a [QueryRound],
    pub(super) params: &'a Params,
    /// With shared keys: the key of query 0.
    pub(super) self_key: Option<usize>,
}

impl Sorted<'_> {
    /// Calls `f(round, chunk)` for every chunk of keys that queries of chunk `c` attend to in `round`.
    fn for_each_chunk(&self, round: usize, c: u32, mut f: impl FnMut(usize, u32)) {
        let (keys, Params { before, after, wrap, .. }) = (&self.keys[round], self.params);
        if c == NONE {
            return;
        }
        let low = (c as usize).saturating_sub(*before).max(keys.first[c as usize] as usize);
        let high = if keys.per_bucket { c as usize } else { (c as usize + after).min(keys.chunks() - 1) };
        if *wrap {
            // All rounds form one long list, closed to a ring.
            let reach = before.saturating_sub(c as usize).min(keys.chunks());
            let last = if round == 0 { self.keys.len() - 1 } else { round - 1 };
            let chunks = self.keys[last].chunks();
            (chunks.saturating_sub(reach)..chunks).for_each(|c| f(last, c as u32));
            let reach = (c as usize + after + 1).saturating_sub(keys.chunks());
            let next = (round + 1) % self.keys.len();
            (0..reach.min(self.keys[next].chunks())).for_each(|c| f(next, c as u32));
        }
        (low..=high).for_each(|c| f(round, c as u32));
    }

    fn code(&self, round: usize, chunk: u32) -> u32 {
        chunk.wrapping_mul(self.keys.len() as u32).wrapping_add(round as u32)
    }

    /// True if keys of other buckets are visible. With a causal mask a chunk holds one bucket, so it makes no
    /// difference.
    fn across(&self) -> bool {
        self.params.across_buckets.unwrap_or(true)
    }

    /// True if the buckets of `round` let query `i` see key `j`.
    fn fits(&self, round: usize, i: usize, j: usize) -> bool {
        self.across() || self.queries[round].codes[i] == self.keys[round].codes[j]
    }
}

/// Summary of a block of queries.
pub(super) struct Block {
    /// Codes of the keys' chunks in the rounds whose pairs may have been counted already.
    index: Option<CodeIndex>,
    /// Chunks of the queries in each earlier round, if there is an index.
    chunks: Vec<Vec<u32>>,
    /// Place of the first key in the round's order, with chunks per bucket.
    start: usize,
    /// Keys at the front that come from another round.
    foreign: usize,
}

/// Reads the entries `rows` of a table in one loop: the table exceeds the nearest cache, and no load has to wait for
/// another.
fn named(table: &[u32], rows: &[u32]) -> Vec<u32> {
    rows.iter().map(|&i| table[i as usize]).collect()
}

impl<T: Real> BlockMask<T> for Sorted<'_> {
    type Block = Block;

    fn keys(&self, b: usize) -> Vec<u32> {
        let own = &self.keys[self.round];
        let mut met: Vec<u32> = Vec::new();
        let mut chunks = Vec::new();
        self.for_each_chunk(self.round, b as u32, |r, c| chunks.push((r, c)));
        let has = |round: usize, chunk: u32| chunks.contains(&(round, chunk));
        for (place, &(r, c)) in chunks.iter().enumerate() {
            let keys = &self.keys[r];
            let own_chunk = |j: u32| has(self.round, own.of_key[j as usize]);
            // With one round, the ring may lead back to a chunk already listed.
            if self.params.merge == Merge::Union && chunks[..place].contains(&(r, c)) {
                continue;
            }
            let foreign = r != self.round && self.params.merge == Merge::Union;
            met.extend(
                keys.order[keys.chunks[c as usize].clone()].iter().filter(|&&j| !foreign || !own_chunk(j)),
            );
        }
        met
    }

    fn enter(&self, b: usize, queries: &[u32], keys: &[u32]) -> Option<Block> {
        let own = &self.keys[self.round];
        let skip = self.params.merge == Merge::Union && self.round > 0;
        if !skip && self.self_key.is_none() && self.across() && !own.per_bucket {
            return None;
        }
        let index = skip.then(|| {
            // In earlier rounds queries attended to chunks of those rounds and, on a ring, to their neighbours.
            let rounds = &self.keys[..if self.params.wrap { self.keys.len() } else { self.round }];
            let mut index = CodeIndex::new(keys.len() * rounds.len());
            for (r, round) in rounds.iter().enumerate() {
                let of_keys = named(&round.of_key, keys);
                of_keys.iter().enumerate().for_each(|(place, &c)| index.insert(self.code(r, c), place));
            }
            index
        });
        let earlier = &self.queries[..if skip { self.round } else { 0 }];
        let chunks = earlier.iter().map(|round| named(&round.chunk, queries)).collect();
        let mut native = 0;
        let mut start = usize::MAX;
        self.for_each_chunk(self.round, b as u32, |r, c| {
            if r == self.round {
                native += own.chunks[c as usize].len();
                start = start.min(own.chunks[c as usize].start);
            }
        });
        let foreign = keys.len().saturating_sub(native);
        Some(Block { index, chunks, start, foreign })
    }

    fn see(&self, block: &Block, row: BlockRow, keys: &[u32], logits: &mut [T]) -> Range<usize> {
        let own = &self.keys[self.round];
        let query = row.query;
        if let Some(first) = self.self_key {
            let token = (first + query) as u32;
            keys.iter()
                .zip(logits.iter_mut())
                .filter(|(j, _)| **j == token)
                .for_each(|(_, s)| *s = T::NEG_INFINITY);
        }
        if !self.across() {
            let seen = keys.iter().zip(logits.iter_mut()).enumerate();
            seen.filter(|(place, (j, _))| {
                *place < block.foreign || !self.fits(self.round, query, **j as usize)
            })
            .for_each(|(_, (_, s))| *s = T::NEG_INFINITY);
        }
        if let Some(index) = &block.index {
            for (t, chunks) in block.chunks.iter().enumerate() {
                self.for_each_chunk(t, chunks[row.place], |r, c| {
                    index.for_each(self.code(r, c), |place| {
                        let j = keys[place] as usize;
                        if self.across() || r == t && self.fits(t, query, j) {
                            logits[place] = T::NEG_INFINITY;
                        }
                    });
                });
            }
        }
        if own.per_bucket {
            let end = self.queries[self.round].end[query] as usize;
            return 0..end.saturating_sub(block.start).min(keys.len());
        }
        0..keys.len()
    }
}
