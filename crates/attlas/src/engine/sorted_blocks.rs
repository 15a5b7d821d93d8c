//! Queries and keys sorted by a sign hash and cut into the same number of blocks, and attention inside them.
//!
//! Rows are sorted by the Gray rank of their codes, equal ranks in order of position, so neighbours in the order are
//! likely to be close in angle. The keys are cut into $L = \lceil n_k / b \rceil$ blocks whose sizes differ by at most
//! one. Without a mask the sorted queries of each head are cut into $L$ blocks, too, and block $c$ of the queries
//! attends to block $c$ of the keys: the block diagonal of HyperAttention (han2024) and KDEformer (zandieh2023),
//! without padding. In the parts of a causal problem a later query could then move an earlier one across a block's
//! edge; there a query goes to the block at which its own rank would be inserted among the keys, spread by position
//! over the keys of equal rank. Without bits both rules agree.
//!
//! [`attend_blocks`] attends to the block and to additional keys, given per block with a bias on their logits: samples
//! with their weights. Both together are one call of the exact kernel on gathered rows.

use super::{CausalPart, PerGroup, Rectangle, exact_rows};
use crate::group::{Group, GroupIndex, Queries};
use crate::workspace::Context;
use crate::{MatRef, Problem, Real, Result, RunInfo};
use attlas_num::cluster::buckets::{Balanced, order_by};
use attlas_num::hash::sign::gray_rank;
use attlas_num::hash::{Lsh, SignHash};
use attlas_num::kernels::{Band, ROWS_AHEAD, merge_lse, prefetch};
use attlas_num::par::*;
use attlas_num::rng::StreamKey;
use std::borrow::Cow;
use std::ops::Range;

/// Rows that one task hashes.
const HASH_ROWS: usize = 1024;

/// Maximum query rows of one task.
const TASK_ROWS: usize = 512;

/// Assignment of queries to blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Assign {
    /// Sorted queries are cut into the same number of blocks as the keys, of nearly equal sizes.
    Balanced,
    /// By their own rank among the keys, whatever the other queries are.
    Alone,
}

/// A query row of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Row {
    /// Head within the group.
    pub head: u32,
    /// Row of the head.
    pub row: u32,
}

/// Sort keys of the rows of a group: Gray ranks of their sign hashes.
#[derive(Debug)]
pub struct Ranks {
    /// Ranks of the queries of each head.
    queries: Vec<Vec<u32>>,
    keys: Vec<u32>,
}

impl Ranks {
    /// Computes the ranks of the codes of `hash`; all 0 without one.
    pub fn new<T: Real>(q: Queries<'_, T>, k: MatRef<'_, T>, hash: Option<&SignHash<f64>>) -> Self {
        let hash = hash.map(SignHash::cast::<T>);
        let queries = (0..q.heads()).into_par_iter().map(|h| ranks(hash.as_ref(), q.head(h))).collect();
        Self { queries, keys: ranks(hash.as_ref(), k) }
    }
}

/// Hash functions of a plan that sorts rows by codes of `bits` bits (at most 31), one for each sequence and key head.
pub type SortHashes = PerGroup<Option<SignHash<f64>>>;

/// Draws the [`SortHashes`] of a plan.
pub fn draw_sort_hashes(problem: &Problem, seed: u64, bits: usize) -> Result<SortHashes> {
    PerGroup::draw(problem, |index| {
        Ok(SignHash::new(index.stream_key(seed).named("directions"), problem.d, bits, 1))
    })
}

/// Rule by which a method sorts the rows of each group without a mask, cuts the keys into blocks, and samples other
/// keys. It suffices for processes that each hold some of the rows to do this together. The queries of a head are cut
/// into the same number of blocks, and every query sees the keys of its block and the samples outside it, by
/// [`UniformSamples`].
#[derive(Debug)]
pub struct SortedRule<'a> {
    hashes: &'a SortHashes,
    samples: PerGroup<UniformSamples>,
    cut: Balanced,
}

impl<'a> SortedRule<'a> {
    /// Makes blocks of at most `block` keys, and the samples that `draw` gives for each group.
    pub fn new(
        p: &Problem,
        hashes: &'a SortHashes,
        block: usize,
        draw: impl Fn(GroupIndex) -> UniformSamples,
    ) -> Result<Self> {
        let samples = PerGroup::draw(p, |index| Ok(draw(index)))?;
        Ok(Self { hashes, samples, cut: Balanced::with_target(p.n_k, block) })
    }

    /// Returns the sort keys of the rows `x` of a group; rows with equal ones are sorted by position.
    pub fn ranks<T: Real>(&self, index: GroupIndex, x: MatRef<'_, T>) -> Vec<u32> {
        ranks(self.hashes.of(index).as_ref().map(SignHash::cast::<T>).as_ref(), x)
    }

    /// Returns the cut of the sorted keys.
    pub fn cut(&self) -> Balanced {
        self.cut
    }

    /// Returns the samples of a group.
    pub fn samples(&self, index: GroupIndex) -> &UniformSamples {
        self.samples.of(index)
    }
}

/// Blocks of sorted queries and keys.
#[derive(Debug)]
pub struct SortedBlocks {
    /// Query rows, block by block, those of head 0 first.
    rows: Vec<Row>,
    /// Block `c` has `rows[starts[c]..starts[c + 1]]`.
    starts: Vec<usize>,
    n_q: usize,
    /// Keys in sorted order.
    keys: Vec<u32>,
    cut: Balanced,
}

impl SortedBlocks {
    /// Sorts the rows of `part` by their ranks and cuts its keys into blocks of at most `block`; with `kept`, only the
    /// keys that it names in increasing order, counted from the first of the part.
    pub fn new(ranks: &Ranks, part: &Rectangle, kept: Option<&[u32]>, block: usize, assign: Assign) -> Self {
        let of_keys = &ranks.keys[part.keys.clone()];
        let of_keys: Cow<'_, [u32]> = match kept {
            Some(kept) => kept.iter().map(|&j| of_keys[j as usize]).collect(),
            None => of_keys.into(),
        };
        let of_queries = ranks.queries.par_iter().map(|ranks| &ranks[part.rows.clone()]);
        let cut = Balanced::with_target(of_keys.len(), block);
        let (order, heads): (Vec<u32>, Vec<(Vec<u32>, Vec<usize>)>) = match assign {
            Assign::Balanced => join(
                || order_by(&of_keys),
                || of_queries.map(|ranks| balanced(ranks, cut.blocks())).collect(),
            ),
            Assign::Alone => {
                let order = order_by(&of_keys);
                let places = Insertion::new(&order, &of_keys);
                let heads = of_queries.map(|ranks| places.blocks(ranks, &cut)).collect();
                (order, heads)
            }
        };
        let (mut rows, mut starts) = (Vec::with_capacity(heads.len() * part.rows.len()), vec![0]);
        for c in 0..cut.blocks() {
            for ((order, starts), head) in heads.iter().zip(0..) {
                rows.extend(order[starts[c]..starts[c + 1]].iter().map(|&row| Row { head, row }));
            }
            starts.push(rows.len());
        }
        let keys = match kept {
            Some(kept) => order.iter().map(|&i| kept[i as usize]).collect(),
            None => order,
        };
        Self { rows, starts, n_q: part.rows.len(), keys, cut }
    }

    /// Number of blocks.
    pub fn blocks(&self) -> usize {
        self.cut.blocks()
    }

    /// Returns all keys in sorted order; a place in it is a rank.
    pub fn keys(&self) -> &[u32] {
        &self.keys
    }

    /// Ranks of the keys of block `c`.
    pub fn ranks(&self, c: usize) -> Range<usize> {
        self.cut.range(c)
    }

    /// The keys of block `c`.
    pub fn block_keys(&self, c: usize) -> &[u32] {
        &self.keys[self.ranks(c)]
    }

    /// The query rows of block `c`.
    pub fn block_rows(&self, c: usize) -> &[Row] {
        &self.rows[self.starts[c]..self.starts[c + 1]]
    }

    /// Runs `work` on every block that has queries, in parallel; a block with many queries is given in pieces. `places`
    /// are the slots of all rows, head 0 first. Results come in order of the blocks.
    pub fn par_blocks<'p, T: Real, R: Send>(
        &self,
        places: impl Iterator<Item = RowSlot<'p, T>>,
        work: impl Fn(Piece<'_, 'p, T>) -> Result<R> + Sync + Send,
    ) -> Result<Vec<R>> {
        // Handing out each row's slot in sorted order lets tasks write to it without a copy in between.
        let mut by_row: Vec<Option<RowSlot<'p, T>>> = places.map(Some).collect();
        let place = |r: &Row| by_row[r.head as usize * self.n_q + r.row as usize].take();
        let mut sorted: Vec<RowSlot<'p, T>> = self.rows.iter().filter_map(place).collect();
        let mut pieces = Vec::with_capacity(self.blocks());
        let mut rest = &mut sorted[..];
        for block in 0..self.blocks() {
            for rows in self.block_rows(block).chunks(TASK_ROWS) {
                let (places, tail) = rest.split_at_mut(rows.len());
                rest = tail;
                pieces.push(Piece { block, rows, places });
            }
        }
        pieces.into_par_iter().with_max_len(1).map(work).collect()
    }
}

/// Returns the Gray ranks of the codes of all rows.
fn ranks<T: Real>(hash: Option<&SignHash<T>>, x: MatRef<'_, T>) -> Vec<u32> {
    let mut ranks = vec![0u32; x.rows()];
    if let Some(hash) = hash {
        ranks.par_chunks_mut(HASH_ROWS).enumerate().for_each(|(t, ranks)| {
            let first = t * HASH_ROWS;
            hash.codes_into(x.sub_rows(first..first + ranks.len()), 0, ranks);
            ranks.iter_mut().for_each(|r| *r = gray_rank(*r));
        });
    }
    ranks
}

/// Returns the sorted rows and the starts of blocks of nearly equal sizes.
fn balanced(ranks: &[u32], blocks: usize) -> (Vec<u32>, Vec<usize>) {
    let cut = Balanced::new(ranks.len(), blocks);
    let starts = (0..blocks).map(|c| cut.range(c).start).chain([ranks.len()]).collect();
    (order_by(ranks), starts)
}

/// Index for inserting ranks among those of the keys.
struct Insertion {
    /// The distinct ranks of the keys, increasing, and the place of the first key of each; at the end their number.
    values: Vec<u32>,
    starts: Vec<usize>,
}

impl Insertion {
    fn new(order: &[u32], ranks: &[u32]) -> Self {
        let (mut values, mut starts) = (Vec::new(), Vec::new());
        for (place, &j) in order.iter().enumerate() {
            let rank = ranks[j as usize];
            if values.last() != Some(&rank) {
                values.push(rank);
                starts.push(place);
            }
        }
        starts.push(order.len());
        Self { values, starts }
    }

    /// Returns the rows sorted by the key block of each, equal ones by position, and the starts of the blocks.
    fn blocks(&self, ranks: &[u32], cut: &Balanced) -> (Vec<u32>, Vec<usize>) {
        let last = cut.items().saturating_sub(1);
        let block_of = |(i, rank): (usize, &u32)| {
            let place = match self.values.binary_search(rank) {
                Ok(t) => {
                    let (low, high) = (self.starts[t], self.starts[t + 1]);
                    low + (i as u128 * (high - low) as u128 / ranks.len() as u128) as usize
                }
                Err(t) => self.starts[t],
            };
            cut.block_of(place.min(last)) as u32
        };
        let of_rows: Vec<u32> = if cut.items() == 0 {
            vec![0; ranks.len()]
        } else {
            ranks.iter().enumerate().map(block_of).collect()
        };
        let mut starts = vec![0; cut.blocks() + 1];
        of_rows.iter().for_each(|&c| starts[c as usize + 1] += 1);
        (0..cut.blocks()).for_each(|c| starts[c + 1] += starts[c]);
        (order_by(&of_rows), starts)
    }
}

/// Destination of the results of one row.
#[derive(Debug)]
pub struct RowSlot<'a, T> {
    /// The output row.
    pub out: &'a mut [T],
    /// Its log-sum-exp.
    pub lse: &'a mut T,
}

/// Iterates over the slots of some rows.
pub fn places<'a, T>(out: &'a mut [T], lse: &'a mut [T], d_v: usize) -> impl Iterator<Item = RowSlot<'a, T>> {
    out.chunks_exact_mut(d_v).zip(lse).map(|(out, lse)| RowSlot { out, lse })
}

/// Some query rows of one block.
#[derive(Debug)]
pub struct Piece<'a, 'p, T> {
    /// The block.
    pub block: usize,
    /// The rows.
    pub rows: &'a [Row],
    /// Destinations of their results.
    pub places: &'a mut [RowSlot<'p, T>],
}

impl<T: Real> Piece<'_, '_, T> {
    /// Copies the piece's queries into `out`.
    pub fn gather_queries(&self, q: Queries<'_, T>, out: &mut [T]) {
        let mut rest = out;
        for rows in self.rows.chunk_by(|a, b| a.head == b.head) {
            let head = q.head(rows[0].head as usize);
            let (out, tail) = rest.split_at_mut(rows.len() * head.cols());
            head.gather_into(rows.iter().map(|r| r.row as usize), out);
            rest = tail;
        }
    }
}

/// Attends with every query to the keys of its block and, with a bias on their logits, to the keys that `extra(c)`
/// gives for block `c`. Ignores the mask.
pub fn attend_blocks<T: Real>(
    group: &mut Group<'_, T>,
    blocks: &SortedBlocks,
    extra: impl Fn(usize) -> Vec<(u32, T)> + Sync + Send,
) -> Result<RunInfo> {
    let Group { q, k, v, scale, cx, .. } = *group;
    attend_at(places(group.out, group.lse, v.cols()), (q, k, v), scale, cx, blocks, extra, |place, o, l| {
        place.out.copy_from_slice(o);
        *place.lse = l;
    })
}

/// Does the same for a part of a causal problem and joins each row to its earlier result.
pub fn join_blocks<T: Real>(
    part_rows: CausalPart<'_, T>,
    blocks: &SortedBlocks,
    extra: impl Fn(usize) -> Vec<(u32, T)> + Sync + Send,
) -> Result<RunInfo> {
    let CausalPart { q, k, v, scale, cx, .. } = part_rows;
    attend_at(part_rows.into_places(), (q, k, v), scale, cx, blocks, extra, |place, o, l| {
        merge_lse(place.out, place.lse, o, l);
    })
}

/// Attends, and passes the result of each row to `put` with the row's slot.
fn attend_at<'p, T: Real>(
    places: impl Iterator<Item = RowSlot<'p, T>>,
    (q, k, v): (Queries<'_, T>, MatRef<'_, T>, MatRef<'_, T>),
    scale: T,
    cx: Context<'_>,
    blocks: &SortedBlocks,
    extra: impl Fn(usize) -> Vec<(u32, T)> + Sync + Send,
    put: impl Fn(&mut RowSlot<'p, T>, &[T], T) + Sync + Send,
) -> Result<RunInfo> {
    let (d, d_v) = (k.cols(), v.cols());
    let visited = blocks.par_blocks(places, |piece| {
        let (near, extra) = (blocks.block_keys(piece.block), extra(piece.block));
        let (n, rows) = (near.len() + extra.len(), piece.rows.len());
        let index = || near.iter().copied().chain(extra.iter().map(|e| e.0)).map(|j| j as usize);
        let mut keys = cx.scratch.take::<T>(n * d);
        let mut values = cx.scratch.take::<T>(n * d_v);
        k.gather_into(index(), &mut keys);
        v.gather_into(index(), &mut values);
        let mut bias = cx.scratch.take::<T>(n);
        bias[..near.len()].fill(T::ZERO);
        bias[near.len()..].iter_mut().zip(&extra).for_each(|(b, e)| *b = e.1);
        let bias = (!extra.is_empty()).then_some(&bias[..]);
        let mut queries = cx.scratch.take::<T>(rows * d);
        piece.gather_queries(q, &mut queries);
        let mut out = cx.scratch.take::<T>(rows * d_v);
        let mut lse = cx.scratch.take::<T>(rows);
        let queries = MatRef::new(&queries, rows, d);
        let (keys, values) = (MatRef::new(&keys, n, d), MatRef::new(&values, n, d_v));
        exact_rows(queries, keys, values, bias, scale, Band::ALL, cx, &mut out, &mut lse);
        let mut places = piece.places.iter_mut();
        for (o, &l) in out.chunks_exact(d_v).zip(lse.iter()) {
            if let Some(later) = places.as_slice().get(ROWS_AHEAD) {
                prefetch(later.out);
            }
            if let Some(place) = places.next() {
                put(place, o, l);
            }
        }
        Ok((rows * n) as u64)
    })?;
    Ok(RunInfo::visited(visited.into_iter().sum()))
}

/// Keys drawn uniformly, one set for all queries, which represent all the keys outside a block.
///
/// Without replacement, the $m_c$ samples outside block $c$ each represent $(n - |c|)/m_c$ keys; with replacement, each
/// of $m$ draws represents $n/m$, and those inside the block are dropped. Both make the residual sum unbiased (given
/// $m_c > 0$); the first has the smaller variance and is exact at $m = n$.
#[derive(Clone, Debug)]
pub struct UniformSamples {
    /// Ranks, in increasing order.
    ranks: Vec<usize>,
    replacement: bool,
}

impl UniformSamples {
    /// Draws `samples` of `n` ranks.
    pub fn new(n: usize, samples: usize, replacement: bool, key: StreamKey) -> Self {
        let mut rng = key.rng();
        let ranks = if replacement {
            let mut ranks: Vec<usize> = (0..if n == 0 { 0 } else { samples }).map(|_| rng.below(n)).collect();
            ranks.sort_unstable();
            ranks
        } else {
            rng.subset(n, samples)
        };
        Self { ranks, replacement }
    }

    /// Returns the drawn ranks, in increasing order.
    pub fn ranks(&self) -> &[usize] {
        &self.ranks
    }

    /// Returns the samples outside block `c`, as key and bias.
    pub fn outside<T: Real>(&self, blocks: &SortedBlocks, c: usize) -> Vec<(u32, T)> {
        let (ranks, weight) = self.beside(blocks.keys().len(), blocks.ranks(c));
        let bias = T::from_f64(weight.ln());
        ranks.iter().map(|&r| (blocks.keys()[r], bias)).collect()
    }

    /// Returns the samples outside the ranks of a block of `n` keys, and how many keys each represents.
    pub fn beside(&self, n: usize, block: Range<usize>) -> (Vec<usize>, f64) {
        let inside =
            self.ranks.partition_point(|&r| r < block.start)..self.ranks.partition_point(|&r| r < block.end);
        let outside = self.ranks.len() - inside.len();
        let weight = if self.replacement {
            n as f64 / self.ranks.len() as f64
        } else {
            (n - block.len()) as f64 / outside as f64
        };
        (self.ranks[..inside.start].iter().chain(&self.ranks[inside.end..]).copied().collect(), weight)
    }

    /// Counts the query rows in whose block all samples lie, so that their residual is dropped.
    pub fn dropped_rows(&self, blocks: &SortedBlocks) -> usize {
        let (Some(&first), Some(&last)) = (self.ranks.first(), self.ranks.last()) else { return 0 };
        let covers = |c: &usize| blocks.ranks(*c).contains(&first) && blocks.ranks(*c).contains(&last);
        (0..blocks.blocks()).filter(covers).map(|c| blocks.block_rows(c).len()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TensorRef;
    use crate::testkit::Case;

    fn blocks_of(case: &Case, block: usize, hashes: usize, assign: Assign) -> SortedBlocks {
        let p = case.problem;
        let q = TensorRef::bhnd(&case.q, [1, p.n_heads, p.n_q, p.d]).unwrap();
        let k = MatRef::new(&case.k, p.n_k, p.d);
        let ranks = Ranks::new(Queries::new(q), k, SignHash::new(StreamKey::new(4), p.d, hashes, 1).as_ref());
        SortedBlocks::new(&ranks, &Rectangle { rows: 0..p.n_q, keys: 0..p.n_k }, None, block, assign)
    }

    #[test]
    fn every_query_and_key_is_in_one_block() {
        for assign in [Assign::Balanced, Assign::Alone] {
            for (n_q, n_k, block) in [(97, 97, 10), (13, 97, 4), (97, 13, 5), (3, 50, 7), (64, 64, 64)] {
                let p = Problem::new(2, 1, 8).with_lens(n_q, n_k).with_kv_heads(1);
                let blocks = blocks_of(&Case::gaussian(p, 1), block, 5, assign);
                assert_eq!(blocks.blocks(), n_k.div_ceil(block));
                let mut keys: Vec<u32> =
                    (0..blocks.blocks()).flat_map(|c| blocks.block_keys(c).to_vec()).collect();
                keys.sort_unstable();
                assert_eq!(keys, (0..n_k as u32).collect::<Vec<_>>());
                let mut rows: Vec<Row> =
                    (0..blocks.blocks()).flat_map(|c| blocks.block_rows(c).to_vec()).collect();
                rows.sort_unstable();
                let want: Vec<Row> =
                    (0..2).flat_map(|head| (0..n_q as u32).map(move |row| Row { head, row })).collect();
                assert_eq!(rows, want);
                if assign == Assign::Balanced {
                    let sizes = (0..blocks.blocks()).map(|c| blocks.block_rows(c).len());
                    assert!(sizes.clone().max().unwrap() - sizes.min().unwrap() <= 2);
                }
            }
        }
    }

    #[test]
    fn without_bits_rows_keep_their_order() {
        for assign in [Assign::Balanced, Assign::Alone] {
            let p = Problem::new(1, 30, 4);
            let blocks = blocks_of(&Case::gaussian(p, 2), 7, 0, assign);
            assert_eq!(blocks.keys(), (0..30).collect::<Vec<u32>>());
            let rows: Vec<u32> = blocks.block_rows(1).iter().map(|r| r.row).collect();
            assert_eq!(rows, (6..12).collect::<Vec<u32>>());
        }
    }

    #[test]
    fn the_length_of_a_query_does_not_move_it() {
        let case = Case::gaussian(Problem::new(1, 60, 6), 3);
        let scaled = Case { q: case.q.iter().map(|x| 7.5 * x).collect(), ..case.clone() };
        let (a, b) = (blocks_of(&case, 9, 6, Assign::Balanced), blocks_of(&scaled, 9, 6, Assign::Balanced));
        assert_eq!((a.rows, a.keys), (b.rows, b.keys));
    }

    #[test]
    fn a_query_alone_goes_where_keys_have_its_rank() {
        let p = Problem::new(1, 200, 6);
        let mut case = Case::gaussian(p, 5);
        case.q.copy_from_slice(&case.k);
        let blocks = blocks_of(&case, 10, 9, Assign::Alone);
        let ranks = |x: &[f64]| {
            SignHash::<f64>::new(StreamKey::new(4), 6, 9, 1).unwrap().gray_ranks(MatRef::new(x, 200, 6), 0)
        };
        let (of_q, of_k) = (ranks(&case.q), ranks(&case.k));
        for c in 0..blocks.blocks() {
            for r in blocks.block_rows(c) {
                assert!(blocks.block_keys(c).iter().any(|&j| of_k[j as usize] == of_q[r.row as usize]));
            }
        }
    }

    #[test]
    fn samples_stand_for_all_keys_outside_the_block() {
        let blocks = blocks_of(&Case::gaussian(Problem::new(1, 100, 4), 6), 10, 4, Assign::Balanced);
        for replacement in [false, true] {
            let mut total = 0.0;
            for seed in 0..400 {
                let samples = UniformSamples::new(100, 20, replacement, StreamKey::new(seed));
                let far = samples.outside::<f64>(&blocks, 3);
                assert!(far.iter().all(|(j, _)| !blocks.block_keys(3).contains(j)));
                let mass: f64 = far.iter().map(|(_, b)| b.exp()).sum();
                // Without replacement the number of keys is known, not estimated.
                assert!(replacement || (mass - 90.0).abs() < 1e-9);
                total += mass;
            }
            // With replacement the number outside is Binomial(20, 0.9), weight 5: standard error 0.34.
            assert!((total / 400.0 - 90.0).abs() < 1.7);
        }
        let all = UniformSamples::new(100, 100, false, StreamKey::new(1)).outside::<f64>(&blocks, 0);
        assert!(all.len() == 90 && all.iter().all(|(_, b)| *b == 0.0));
    }
}
