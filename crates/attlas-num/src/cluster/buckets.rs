//! Sorting by hash code, cutting the order into blocks, and remembering the blocks of several rounds.
//!
//! [`order_by`] is a stable radix sort: equal codes stay in the order of their positions. [`Balanced`] cuts $n$ items
//! into $L$ blocks, block $c$ being $[\lfloor cn/L \rfloor, \lfloor (c+1)n/L \rfloor)$, so sizes differ by at most one
//! and nothing is padded. [`Membership`] tests with one comparison per round if two items share a block, which turns a
//! union over rounds into a sum that counts each pair only in its first common round.

use std::ops::Range;

/// Number that items are sorted by.
pub trait SortKey: Copy {
    /// Returns the key as an unsigned number of the same order.
    fn sort_bits(self) -> u64;
}

macro_rules! integer_keys {
    ($($t:ty => $f:expr),*) => {$(
        impl SortKey for $t {
            fn sort_bits(self) -> u64 {
                let f: fn($t) -> u64 = $f;
                f(self)
            }
        }
    )*};
}

integer_keys!(u32 => u64::from, u64 => |x| x, i64 => |x| (x as u64) ^ (1 << 63));

/// Numerical order; the two zeros are equal, NaN comes last.
impl SortKey for f64 {
    fn sort_bits(self) -> u64 {
        if self.is_nan() {
            return u64::MAX;
        }
        let bits = (self + 0.0).to_bits();
        if bits >> 63 == 0 { bits | 1 << 63 } else { !bits }
    }
}

/// Numerical order; the two zeros are equal, NaN comes last.
impl SortKey for f32 {
    fn sort_bits(self) -> u64 {
        if self.is_nan() {
            return u64::from(u32::MAX);
        }
        let bits = (self + 0.0).to_bits();
        u64::from(if bits >> 31 == 0 { bits | 1 << 31 } else { !bits })
    }
}

const DIGIT_BITS: u32 = 8;

/// Returns the positions of `keys` in increasing order of key, equal keys in order of position.
///
/// # Panics
/// With more than `u32::MAX` keys.
pub fn order_by<K: SortKey>(keys: &[K]) -> Vec<u32> {
    let n = u32::try_from(keys.len()).expect("positions are 32-bit numbers");
    let mut items: Vec<(u64, u32)> = keys.iter().map(|k| k.sort_bits()).zip(0..n).collect();
    if keys.len() <= 64 {
        items.sort_unstable();
        return items.into_iter().map(|(_, i)| i).collect();
    }
    // Digits in which all keys agree need no pass: codes of few buckets take one pass.
    let (all, any) = items.iter().fold((u64::MAX, 0), |(all, any), (k, _)| (all & k, any | k));
    let mut spare = vec![(0, 0); items.len()];
    for shift in (0..u64::BITS).step_by(DIGIT_BITS as usize) {
        if ((all ^ any) >> shift) & 0xff != 0 {
            counting_pass(&items, &mut spare, shift);
            std::mem::swap(&mut items, &mut spare);
        }
    }
    items.into_iter().map(|(_, i)| i).collect()
}

/// Runs one stable counting sort by the digit at `shift`.
fn counting_pass(from: &[(u64, u32)], to: &mut [(u64, u32)], shift: u32) {
    let digit = |key: u64| (key >> shift) as usize & 0xff;
    let mut next = [0usize; 1 << DIGIT_BITS];
    from.iter().for_each(|&(key, _)| next[digit(key)] += 1);
    let mut start = 0;
    for slot in &mut next {
        start += std::mem::replace(slot, start);
    }
    for &item in from {
        let slot = &mut next[digit(item.0)];
        to[*slot] = item;
        *slot += 1;
    }
}

/// Returns the rank of each position in `order`: `inverse[order[rank]] = rank`.
///
/// # Panics
/// If `order` contains a position beyond its length.
pub fn inverse_order(order: &[u32]) -> Vec<u32> {
    let mut inverse = vec![0; order.len()];
    order.iter().zip(0..).for_each(|(&i, rank)| inverse[i as usize] = rank);
    inverse
}

/// Partition of `0..n` into consecutive blocks whose sizes differ by at most one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Balanced {
    n: usize,
    blocks: usize,
}

impl Balanced {
    /// Partitions `n` items into `blocks` blocks, at least one; some are empty if there are more blocks than items.
    pub fn new(n: usize, blocks: usize) -> Self {
        Self { n, blocks: blocks.max(1) }
    }

    /// Partitions into the fewest blocks of at most `target` items each; one block if `target` is 0.
    pub fn with_target(n: usize, target: usize) -> Self {
        Self::new(n, if target == 0 { 1 } else { n.div_ceil(target) })
    }

    /// Number of items.
    pub fn items(&self) -> usize {
        self.n
    }

    /// Number of blocks.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// The items of block `c`.
    pub fn range(&self, c: usize) -> Range<usize> {
        self.start(c)..self.start(c + 1)
    }

    /// Returns the block of item `i < n`.
    pub fn block_of(&self, i: usize) -> usize {
        debug_assert!(i < self.n);
        // i ≥ ⌊cn/L⌋ ⟺ c ≤ ⌊((i + 1)L − 1) / n⌋.
        ((((i + 1) as u128) * self.blocks as u128 - 1) / self.n.max(1) as u128) as usize
    }

    /// The blocks in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Range<usize>> + use<> {
        let this = *self;
        (0..this.blocks).map(move |c| this.range(c))
    }

    fn start(&self, c: usize) -> usize {
        (c as u128 * self.n as u128 / self.blocks as u128) as usize
    }
}

/// One number per item and round, such as the block of the item; the rounds of an item are contiguous.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoundTable {
    rounds: usize,
    items: usize,
    cells: Vec<u32>,
}

impl RoundTable {
    /// Marks an item that takes no part in a round: it shares no block there.
    pub const ABSENT: u32 = u32::MAX;

    /// Creates a table in which every item is absent from every round.
    pub fn new(items: usize, rounds: usize) -> Self {
        Self { rounds, items, cells: vec![Self::ABSENT; items * rounds] }
    }

    /// Number of rounds.
    pub fn rounds(&self) -> usize {
        self.rounds
    }

    /// Number of items.
    pub fn items(&self) -> usize {
        self.items
    }

    /// Numbers of an item in all rounds.
    pub fn row(&self, item: usize) -> &[u32] {
        &self.cells[item * self.rounds..(item + 1) * self.rounds]
    }

    /// Sets one cell.
    pub fn set(&mut self, item: usize, round: usize, value: u32) {
        assert!(round < self.rounds);
        self.cells[item * self.rounds + round] = value;
    }

    /// Writes the blocks of a sorted order: the item of rank `t` is in block `block_of(t)`. Items missing from `order`
    /// keep their numbers.
    pub fn set_ranked(&mut self, round: usize, order: &[u32], mut block_of: impl FnMut(usize) -> u32) {
        order.iter().enumerate().for_each(|(rank, &i)| self.set(i as usize, round, block_of(rank)));
    }
}

/// Pairs that share a block: in each round, query `i` is paired with the keys of its own block.
#[derive(Clone, Copy, Debug)]
pub struct Membership<'a> {
    queries: &'a RoundTable,
    keys: &'a RoundTable,
}

impl<'a> Membership<'a> {
    /// Pairs queries with the keys of their own block.
    ///
    /// # Panics
    /// If the tables have different numbers of rounds.
    pub fn new(queries: &'a RoundTable, keys: &'a RoundTable) -> Self {
        assert_eq!(queries.rounds, keys.rounds);
        Self { queries, keys }
    }

    /// Returns true if query `i` and key `j` share a block in `round`.
    #[inline]
    pub fn meets(&self, i: usize, j: usize, round: usize) -> bool {
        same_block(self.queries.row(i)[round], self.keys.row(j)[round])
    }

    /// Returns true if they shared a block in a round before `round`: a union skips such a pair.
    #[inline]
    pub fn met_before(&self, i: usize, j: usize, round: usize) -> bool {
        let (a, b) = (&self.queries.row(i)[..round], &self.keys.row(j)[..round]);
        a.iter().zip(b).any(|(&a, &b)| same_block(a, b))
    }

    /// Returns the number of rounds in which they share a block; a union that does not skip subtracts its logarithm.
    pub fn count(&self, i: usize, j: usize) -> usize {
        (0..self.queries.rounds).filter(|&t| self.meets(i, j, t)).count()
    }
}

#[inline]
fn same_block(a: u32, b: u32) -> bool {
    a == b && a != RoundTable::ABSENT
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::tests::gaussian;
    use crate::hash::{CrossPolytope, Lsh};
    use crate::rng::StreamKey;

    #[test]
    fn sorting_is_stable_for_every_kind_of_key() {
        let mut rng = StreamKey::new(1).rng();
        for n in [0, 1, 2, 63, 64, 65, 1000] {
            for spread in [1, 3, 300, 1 << 40] {
                let keys: Vec<u64> = (0..n).map(|_| rng.below(spread) as u64).collect();
                let mut expected: Vec<u32> = (0..n as u32).collect();
                expected.sort_by_key(|&i| keys[i as usize]);
                assert_eq!(order_by(&keys), expected);
                let narrow: Vec<u32> = keys.iter().map(|&k| k as u32).collect();
                expected.sort_by_key(|&i| (narrow[i as usize], i));
                assert_eq!(order_by(&narrow), expected);
                let signed: Vec<i64> = keys.iter().map(|&k| k as i64 - spread as i64 / 2).collect();
                expected.sort_by_key(|&i| (signed[i as usize], i));
                assert_eq!(order_by(&signed), expected);
            }
        }
    }

    #[test]
    fn floats_sort_by_value_with_equal_zeros_and_nan_last() {
        let keys =
            [1.5, f64::NAN, -0.0, f64::NEG_INFINITY, 0.0, -2.0, f64::INFINITY, -f64::NAN, -0.0, 1e-320];
        assert_eq!(order_by(&keys), [3, 5, 2, 4, 8, 9, 0, 6, 1, 7]);
        let single: Vec<f32> = keys.iter().map(|&x| x as f32).collect();
        assert_eq!(order_by(&single), [3, 5, 2, 4, 8, 9, 0, 6, 1, 7]);
        let x = gaussian::<f32>(2, 500, 1);
        let order = order_by(x.data());
        assert!(order.windows(2).all(|w| x.data()[w[0] as usize] <= x.data()[w[1] as usize]));
    }

    #[test]
    fn the_inverse_order_undoes_the_order() {
        let order = order_by(&[5u32, 1, 5, 0, 1]);
        assert_eq!(order, [3, 1, 4, 0, 2]);
        let inverse = inverse_order(&order);
        assert_eq!(inverse, [3, 1, 4, 0, 2]);
        assert!((0..5).all(|i| order[inverse[i] as usize] as usize == i));
        assert!(inverse_order(&[]).is_empty());
    }

    #[test]
    fn balanced_blocks_cover_everything_with_sizes_that_differ_by_one() {
        for n in 0..40 {
            for blocks in 1..45 {
                let p = Balanced::new(n, blocks);
                let mut next = 0;
                for (c, range) in p.iter().enumerate() {
                    assert_eq!(range.start, next);
                    assert_eq!(range, c * n / blocks..(c + 1) * n / blocks);
                    assert!((n / blocks..=n.div_ceil(blocks)).contains(&range.len()));
                    range.clone().for_each(|i| assert_eq!(p.block_of(i), c));
                    next = range.end;
                }
                assert_eq!((next, p.blocks(), p.items()), (n, blocks, n));
            }
        }
    }

    #[test]
    fn a_target_size_is_an_upper_bound() {
        assert_eq!(Balanced::with_target(10, 4), Balanced::new(10, 3));
        assert_eq!(Balanced::with_target(8, 4).blocks(), 2);
        assert_eq!(Balanced::with_target(4, 4).blocks(), 1);
        assert_eq!(Balanced::with_target(0, 4).blocks(), 1);
        assert_eq!(Balanced::with_target(5, 0).blocks(), 1);
        let huge = Balanced::new(usize::MAX, 3);
        assert_eq!(huge.range(2).end, usize::MAX);
        assert_eq!(huge.block_of(usize::MAX - 1), 2);
    }

    /// Returns the blocks of several hash rounds for random points, queries and keys separately.
    fn tables(n_q: usize, n_k: usize, rounds: usize, blocks: usize) -> [RoundTable; 2] {
        let hash = CrossPolytope::<f64>::new(StreamKey::new(3), 4, 8, rounds);
        [(5, n_q), (6, n_k)].map(|(seed, n)| {
            let x = gaussian::<f64>(seed, n, 4);
            let mut table = RoundTable::new(n, rounds);
            for r in 0..rounds {
                let cut = Balanced::new(n, blocks);
                table.set_ranked(r, &order_by(&hash.codes(x.as_ref(), r)), |t| cut.block_of(t) as u32);
            }
            table
        })
    }

    #[test]
    fn first_meetings_and_counts_give_the_same_union() {
        let [q, k] = tables(30, 41, 5, 6);
        let m = Membership::new(&q, &k);
        for i in 0..30 {
            for j in 0..41 {
                let met: Vec<usize> = (0..5).filter(|&t| q.row(i)[t] == k.row(j)[t]).collect();
                assert_eq!(m.count(i, j), met.len());
                let first: Vec<usize> =
                    (0..5).filter(|&t| m.meets(i, j, t) && !m.met_before(i, j, t)).collect();
                assert_eq!(first, met.into_iter().take(1).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn skipping_counting_and_multiset_sums_are_related_as_they_should_be() {
        let [q, k] = tables(20, 35, 4, 5);
        let m = Membership::new(&q, &k);
        let weight = |i: usize, j: usize| ((i * 7 + j * 3) % 11) as f64 - 4.0;
        let mut previous = [0.0; 20];
        for rounds in 1..=4 {
            for (i, previous) in previous.iter_mut().enumerate() {
                let union: f64 = (0..35)
                    .filter(|&j| (0..rounds).any(|t| m.meets(i, j, t)))
                    .map(|j| weight(i, j).exp())
                    .sum();
                let pairs = || (0..rounds).flat_map(|t| (0..35).map(move |j| (t, j)));
                let skipping: f64 = pairs()
                    .filter(|&(t, j)| m.meets(i, j, t) && !m.met_before(i, j, t))
                    .map(|(_, j)| weight(i, j).exp())
                    .sum();
                assert!((skipping - union).abs() <= 1e-14 * union);
                assert!(union >= *previous);
                *previous = union;
                if rounds == 4 {
                    let counting: f64 = pairs()
                        .filter(|&(t, j)| m.meets(i, j, t))
                        .map(|(_, j)| (weight(i, j) - (m.count(i, j) as f64).ln()).exp())
                        .sum();
                    assert!((counting - union).abs() <= 1e-14 * union);
                }
            }
        }
    }

    #[test]
    fn identical_rounds_count_every_pair_that_often_and_add_nothing() {
        let [one, _] = tables(25, 1, 1, 4);
        let mut table = RoundTable::new(25, 3);
        (0..3).for_each(|r| (0..25).for_each(|i| table.set(i, r, one.row(i)[0])));
        let m = Membership::new(&table, &table);
        for i in 0..25 {
            for j in 0..25 {
                let met = m.meets(i, j, 0);
                assert_eq!(m.count(i, j), if met { 3 } else { 0 });
                assert_eq!(m.met_before(i, j, 2), met);
                assert!(!m.met_before(i, j, 0));
            }
        }
    }

    #[test]
    fn absent_items_meet_nobody() {
        let mut blocks = RoundTable::new(4, 1);
        blocks.set(0, 0, 0);
        blocks.set(1, 0, u32::MAX - 1);
        let m = Membership::new(&blocks, &blocks);
        assert!(m.meets(0, 0, 0) && m.meets(1, 1, 0));
        assert!((0..4).all(|i| !m.meets(2, i, 0) && !m.meets(i, 3, 0)));
    }
}
