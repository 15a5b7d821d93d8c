//! Groups of queries and keys around the centroids.

use crate::engine::{BlockMask, BlockRow, CodeIndex, top_indices};
use crate::workspace::Context;
use crate::{MatRef, Real};
use attlas_num::kernels::{Op, gemm};
use attlas_num::par::*;
use std::ops::Range;

/// Returns, for each centroid, the `w` rows with the largest products, ties to the smaller index, in order of position.
pub(super) fn best_members<T: Real>(
    x: MatRef<'_, T>,
    centroids: MatRef<'_, T>,
    w: usize,
    cx: Context<'_>,
) -> Vec<Vec<u32>> {
    let n = x.rows();
    let batches = (0..centroids.rows()).step_by(BATCH).collect::<Vec<usize>>();
    let members = batches.into_par_iter().with_max_len(1).map(|c| {
        let batch = centroids.sub_rows(c..(c + BATCH).min(centroids.rows()));
        let mut scores = cx.scratch.take::<T>(batch.rows() * n);
        gemm(cx.schedule.isa, T::ONE, Op::N(batch), Op::T(x), T::ZERO, &mut scores, n, cx.scratch);
        (0..batch.rows()).map(|c| largest(&scores[c * n..(c + 1) * n], w)).collect::<Vec<_>>()
    });
    members.collect::<Vec<_>>().concat()
}

/// Returns the places of the `w` largest scores in increasing order. NaN counts as largest, so that it is never dropped
/// silently.
fn largest<T: Real>(scores: &[T], w: usize) -> Vec<u32> {
    top_indices(scores, w).into_iter().map(|i| i as u32).collect()
}

/// Centroids whose scores are computed together.
pub(super) const BATCH: usize = 16;

/// Groups of queries and keys; both may be in several groups.
pub(super) struct Routed<'a> {
    keys: &'a [Vec<u32>],
    groups_of_query: Memberships,
    groups_of_key: Memberships,
    union: bool,
}

/// The groups of every item, in increasing order.
struct Memberships {
    starts: Vec<u32>,
    groups: Vec<u32>,
}

impl Memberships {
    fn new(members: &[Vec<u32>], items: usize) -> Self {
        let mut starts = vec![0; items + 1];
        members.iter().flatten().for_each(|&i| starts[i as usize + 1] += 1);
        (0..items).for_each(|i| starts[i + 1] += starts[i]);
        let (mut next, mut groups) = (starts.clone(), vec![0; starts[items] as usize]);
        for (group, members) in (0u32..).zip(members) {
            for &i in members {
                groups[next[i as usize] as usize] = group;
                next[i as usize] += 1;
            }
        }
        Self { starts, groups }
    }

    fn of(&self, item: usize) -> &[u32] {
        &self.groups[self.starts[item] as usize..self.starts[item + 1] as usize]
    }
}

impl<'a> Routed<'a> {
    /// Groups of `n_q` queries and `n_k` keys; with `union`, a pair counts in the first group that holds it.
    pub(super) fn new(
        queries: &[Vec<u32>],
        keys: &'a [Vec<u32>],
        n_q: usize,
        n_k: usize,
        union: bool,
    ) -> Self {
        let groups_of_key = Memberships::new(if union { keys } else { &[] }, n_k);
        Self { keys, groups_of_query: Memberships::new(queries, n_q), groups_of_key, union }
    }

    /// Queries in no group.
    pub(super) fn unrouted(&self) -> Vec<u32> {
        let starts = &self.groups_of_query.starts;
        (0u32..).zip(starts.windows(2)).filter(|(_, s)| s[0] == s[1]).map(|(i, _)| i).collect()
    }
}

/// A group, and its keys' earlier groups.
pub(super) struct Later {
    group: u32,
    of_keys: CodeIndex,
}

impl<T: Real> BlockMask<T> for Routed<'_> {
    type Block = Later;

    fn keys(&self, b: usize) -> Vec<u32> {
        self.keys[b].clone()
    }

    fn enter(&self, b: usize, _: &[u32], keys: &[u32]) -> Option<Later> {
        if !self.union || b == 0 {
            return None;
        }
        let earlier = |&j: &u32| self.groups_of_key.of(j as usize).iter().take_while(|&&g| g < b as u32);
        let mut of_keys = CodeIndex::new(keys.iter().map(|j| earlier(j).count()).sum());
        for (place, j) in keys.iter().enumerate() {
            earlier(j).for_each(|&group| of_keys.insert(group, place));
        }
        Some(Later { group: b as u32, of_keys })
    }

    fn see(&self, block: &Later, row: BlockRow, keys: &[u32], logits: &mut [T]) -> Range<usize> {
        for &group in self.groups_of_query.of(row.query).iter().take_while(|g| **g < block.group) {
            block.of_keys.for_each(group, |place| logits[place] = T::NEG_INFINITY);
        }
        0..keys.len()
    }
}

/// Keys of every cluster in order of position; a query sees the last `window` keys not later than itself.
pub(super) struct Recent {
    /// Keys of all clusters, cluster by cluster.
    order: Vec<u32>,
    /// Ranges of the clusters in `order`.
    clusters: Vec<Range<usize>>,
    /// First block of every cluster: block `b` of a cluster serves ranks from `b · window` on.
    first_block: Vec<usize>,
    window: usize,
}

impl Recent {
    /// Groups the keys by cluster.
    pub(super) fn new(labels: &[u32], clusters: usize, window: usize) -> Self {
        let mut lists: Vec<Vec<u32>> = vec![Vec::new(); clusters];
        (0..).zip(labels).for_each(|(j, &label)| lists[label as usize].push(j));
        let (mut places, mut first_block) = (Vec::with_capacity(clusters), vec![0]);
        let (mut start, mut block) = (0, 0);
        for list in &lists {
            places.push(start..start + list.len());
            start += list.len();
            block += list.len() / window + 1;
            first_block.push(block);
        }
        Self { order: lists.concat(), clusters: places, first_block, window }
    }

    /// Number of blocks.
    pub(super) fn blocks(&self) -> usize {
        self.first_block[self.clusters.len()]
    }

    /// Assigns queries to blocks, leaving out the first `skipped`.
    pub(super) fn place(&self, labels: &[u32], visible: &[usize], skipped: usize) -> RecentQueries<'_> {
        let mut blocks = vec![u32::MAX; labels.len()];
        let mut ranks = vec![0; labels.len()];
        for i in skipped..labels.len() {
            let cluster = &self.clusters[labels[i] as usize];
            let rank = self.order[cluster.clone()].partition_point(|&j| (j as usize) < visible[i]);
            if rank > 0 {
                blocks[i] = (self.first_block[labels[i] as usize] + rank / self.window) as u32;
                ranks[i] = rank as u32;
            }
        }
        RecentQueries { recent: self, blocks, ranks }
    }
}

/// Queries in blocks of similar rank, so that a block needs at most two windows of keys.
pub(super) struct RecentQueries<'a> {
    recent: &'a Recent,
    /// Block of every query; none if its cluster has no key yet.
    pub(super) blocks: Vec<u32>,
    /// Number of keys of its cluster that a query may see.
    ranks: Vec<u32>,
}

impl RecentQueries<'_> {
    /// Returns the cluster of a block and the first rank of its keys.
    fn span(&self, b: usize) -> (usize, usize) {
        let cluster = self.recent.first_block.partition_point(|&first| first <= b) - 1;
        let own = b - self.recent.first_block[cluster];
        (cluster, own.saturating_sub(1) * self.recent.window)
    }
}

/// The keys of its cluster that a block of queries sees.
pub(super) struct Window {
    /// Rank of the block's first key.
    start: usize,
    /// Ranks of the queries.
    ranks: Vec<usize>,
}

impl<T: Real> BlockMask<T> for RecentQueries<'_> {
    type Block = Window;

    fn keys(&self, b: usize) -> Vec<u32> {
        let (cluster, start) = self.span(b);
        let own = b - self.recent.first_block[cluster];
        let keys = &self.recent.order[self.recent.clusters[cluster].clone()];
        keys[start..((own + 1) * self.recent.window).min(keys.len())].to_vec()
    }

    fn enter(&self, b: usize, queries: &[u32], _: &[u32]) -> Option<Window> {
        let ranks = queries.iter().map(|&i| self.ranks[i as usize] as usize).collect();
        Some(Window { start: self.span(b).1, ranks })
    }

    fn see(&self, block: &Window, row: BlockRow, _: &[u32], _: &mut [T]) -> Range<usize> {
        let (start, rank) = (block.start, block.ranks[row.place]);
        rank.saturating_sub(self.recent.window).max(start) - start..rank - start
    }
}
