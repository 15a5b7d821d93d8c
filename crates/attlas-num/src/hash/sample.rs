//! Drawing by weight: with replacement from an alias table, without replacement from a stream.
//!
//! [`AliasTable`] draws index $i$ with probability $w_i / \sum_j w_j$ in constant time after $O(n)$ set-up (Walker
//! 1977, in Vose's 1991 form). [`Reservoir`] keeps $m$ items of a stream, distributed as $m$ draws by weight without
//! replacement: each item gets an exponential waiting time with its weight as rate, and the first $m$ are kept. In the
//! log domain the key is the log weight minus the logarithm of a standard exponential, and the largest keys are kept
//! (Efraimidis and Spirakis 2006).

use crate::rng::{Rng, StreamKey};
use std::cmp::Ordering;
use std::collections::BinaryHeap;

/// Discrete distribution with draws in constant time.
#[derive(Clone, Debug)]
pub struct AliasTable {
    cells: Vec<Cell>,
}

/// Cell of the table: all cells are equally likely, and within one, `own` has probability `share`.
#[derive(Clone, Copy, Debug)]
struct Cell {
    share: f64,
    own: u32,
    other: u32,
}

impl AliasTable {
    /// Builds the distribution proportional to `weights`. Weights that are not positive numbers count as zero and are
    /// never drawn. `None` if no weight is positive, the largest is infinite, or there are more than `u32::MAX`
    /// weights.
    pub fn new(weights: &[f64]) -> Option<Self> {
        let largest = weights.iter().copied().fold(0.0, f64::max);
        if !(largest > 0.0 && largest.is_finite()) || u32::try_from(weights.len()).is_err() {
            return None;
        }
        // Relative to the largest weight the sum cannot overflow.
        let kept: Vec<u32> =
            (0..weights.len() as u32).filter(|&i| weights[i as usize] / largest > 0.0).collect();
        let relative = |i: u32| weights[i as usize] / largest;
        let mean = kept.iter().map(|&i| relative(i)).sum::<f64>() / kept.len() as f64;
        let mut cells: Vec<Cell> =
            kept.iter().map(|&i| Cell { share: relative(i) / mean, own: i, other: i }).collect();
        // Cells below the mean are filled up from cells above it.
        let (mut low, mut high): (Vec<usize>, Vec<usize>) =
            (0..cells.len()).partition(|&c| cells[c].share < 1.0);
        while let (Some(&needy), Some(&rich)) = (low.last(), high.last()) {
            low.pop();
            cells[needy].other = cells[rich].own;
            cells[rich].share -= 1.0 - cells[needy].share;
            if cells[rich].share < 1.0 {
                high.pop();
                low.push(rich);
            }
        }
        // The remaining cells differ from the mean by rounding only.
        low.into_iter().chain(high).for_each(|c| cells[c].share = 1.0);
        Some(Self { cells })
    }

    /// Builds the distribution proportional to $e^{a_i}$, without overflow. NaN and −∞ count as zero weight; `None` as
    /// for [`new`](Self::new).
    pub fn from_log_weights(log_weights: &[f64]) -> Option<Self> {
        let largest = log_weights.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        if !largest.is_finite() {
            return None;
        }
        Self::new(&log_weights.iter().map(|a| libm::exp(a - largest)).collect::<Vec<_>>())
    }

    /// Draws an index.
    pub fn draw(&self, rng: &mut Rng) -> usize {
        let cell = self.cells[rng.below(self.cells.len())];
        (if rng.uniform() < cell.share { cell.own } else { cell.other }) as usize
    }

    /// Draws `m` independent indices.
    pub fn draws(&self, m: usize, key: StreamKey) -> Vec<usize> {
        let mut rng = key.rng();
        (0..m).map(|_| self.draw(&mut rng)).collect()
    }
}

/// Sample of `m` items of a stream, drawn by weight without replacement.
#[derive(Clone, Debug)]
pub struct Reservoir<I> {
    capacity: usize,
    seen: u64,
    /// Kept items, smallest key on top.
    kept: BinaryHeap<Keyed<I>>,
}

#[derive(Clone, Debug)]
struct Keyed<I> {
    key: f64,
    arrival: u64,
    item: I,
}

impl<I> PartialEq for Keyed<I> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}
impl<I> Eq for Keyed<I> {}
impl<I> PartialOrd for Keyed<I> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl<I> Ord for Keyed<I> {
    /// Reversed: the heap's largest is the smallest key, among equals the latest.
    fn cmp(&self, other: &Self) -> Ordering {
        other.key.total_cmp(&self.key).then(self.arrival.cmp(&other.arrival))
    }
}

impl<I> Reservoir<I> {
    /// Creates an empty reservoir that keeps up to `capacity` items.
    pub fn new(capacity: usize) -> Self {
        Self { capacity, seen: 0, kept: BinaryHeap::new() }
    }

    /// Offers an item of weight $e^{a}$, $a$ = `log_weight`. Items with $a = -\infty$ or NaN are not kept.
    pub fn push(&mut self, log_weight: f64, item: I, rng: &mut Rng) {
        self.seen += 1;
        // One variate per item, kept or not, so later draws do not depend on this weight.
        let waiting = (-libm::log(rng.uniform_positive())).max(f64::MIN_POSITIVE);
        let key = log_weight - libm::log(waiting);
        if log_weight == f64::NEG_INFINITY || key.is_nan() {
            return;
        }
        if self.kept.len() < self.capacity {
            self.kept.push(Keyed { key, arrival: self.seen, item });
        } else if let Some(mut smallest) = self.kept.peek_mut()
            && key > smallest.key
        {
            *smallest = Keyed { key, arrival: self.seen, item };
        }
    }

    /// Returns the kept items in the order in which they arrived.
    pub fn into_items(self) -> Vec<I> {
        let mut kept = self.kept.into_vec();
        kept.sort_unstable_by_key(|k| k.arrival);
        kept.into_iter().map(|k| k.item).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::tests::assert_frequency;

    /// The probabilities that the table encodes.
    fn encoded(table: &AliasTable, n: usize) -> Vec<f64> {
        let mut p = vec![0.0; n];
        for c in &table.cells {
            p[c.own as usize] += c.share / table.cells.len() as f64;
            p[c.other as usize] += (1.0 - c.share) / table.cells.len() as f64;
        }
        p
    }

    #[test]
    fn the_table_encodes_the_normalised_weights() {
        let mut rng = StreamKey::new(1).rng();
        for n in [1, 2, 3, 10, 257] {
            let w: Vec<f64> =
                (0..n).map(|i| if i % 5 == 4 { 0.0 } else { libm::exp(3.0 * rng.normal()) }).collect();
            let total: f64 = w.iter().sum();
            let table = AliasTable::new(&w).unwrap();
            for (p, w) in encoded(&table, n).iter().zip(&w) {
                assert!((p - w / total).abs() < 4.0 * f64::EPSILON * n as f64, "{p} {}", w / total);
                assert!(*w > 0.0 || *p == 0.0);
            }
            assert!(table.cells.iter().all(|c| (0.0..=1.0).contains(&c.share)));
        }
    }

    #[test]
    fn draws_have_the_frequencies_of_the_weights() {
        let table = AliasTable::new(&[1.0, 0.0, 3.0, 0.5, 5.5]).unwrap();
        let mut counts = [0; 5];
        table.draws(40_000, StreamKey::new(2)).iter().for_each(|&i| counts[i] += 1);
        for (c, p) in counts.iter().zip([0.1, 0.0, 0.3, 0.05, 0.55]) {
            assert_frequency(*c, 40_000, p);
        }
    }

    #[test]
    fn log_weights_of_any_size_are_accepted() {
        let table =
            AliasTable::from_log_weights(&[1e6, 1e6 + 3f64.ln(), f64::NEG_INFINITY, -1e6, f64::NAN]).unwrap();
        let p = encoded(&table, 5);
        assert!((p[0] - 0.25).abs() < 1e-9 && (p[1] - 0.75).abs() < 1e-9 && p[2..] == [0.0; 3]);
    }

    #[test]
    fn tables_without_mass_are_refused() {
        for w in [&[][..], &[0.0], &[-1.0, f64::NAN], &[1.0, f64::INFINITY]] {
            assert!(AliasTable::new(w).is_none(), "{w:?}");
        }
        assert!(AliasTable::from_log_weights(&[f64::NEG_INFINITY, f64::NAN]).is_none());
        assert!(AliasTable::from_log_weights(&[]).is_none());
        assert_eq!(AliasTable::new(&[0.0, 1e-308, 0.0]).unwrap().draws(3, StreamKey::new(0)), [1, 1, 1]);
        assert!(AliasTable::new(&[f64::MAX; 4]).is_some());
    }

    #[test]
    fn a_reservoir_of_one_draws_by_weight() {
        let weights = [1.0f64, 2.0, 4.0, 1.0];
        let mut rng = StreamKey::new(3).rng();
        let mut counts = [0; 4];
        for _ in 0..20_000 {
            let mut r = Reservoir::new(1);
            weights.iter().enumerate().for_each(|(i, w)| r.push(w.ln(), i, &mut rng));
            counts[r.into_items()[0]] += 1;
        }
        for (c, w) in counts.iter().zip(weights) {
            assert_frequency(*c, 20_000, w / 8.0);
        }
    }

    #[test]
    fn a_reservoir_of_two_draws_successively_without_replacement() {
        let weights = [1.0f64, 2.0, 3.0];
        let mut rng = StreamKey::new(4).rng();
        let mut counts = [0; 3];
        for _ in 0..20_000 {
            let mut r = Reservoir::new(2);
            weights.iter().enumerate().for_each(|(i, w)| r.push(w.ln(), i, &mut rng));
            let items = r.into_items();
            assert!(items.len() == 2 && items[0] < items[1]);
            counts[3 - items[0] - items[1]] += 1;
        }
        // Chance that item i is the one left out: it is drawn neither first nor second.
        for (i, &c) in counts.iter().enumerate() {
            let others: Vec<f64> = (0..3).filter(|&j| j != i).map(|j| weights[j]).collect();
            let out = others[0] / 6.0 * others[1] / (6.0 - others[0])
                + others[1] / 6.0 * others[0] / (6.0 - others[1]);
            assert_frequency(c, 20_000, out);
        }
    }

    #[test]
    fn a_reservoir_keeps_all_it_can_and_no_item_without_weight() {
        let mut rng = StreamKey::new(5).rng();
        let mut all = Reservoir::new(9);
        for (i, a) in [0.0, f64::NEG_INFINITY, f64::NAN, -1e9, 1e9].into_iter().enumerate() {
            all.push(a, i, &mut rng);
        }
        assert_eq!(all.into_items(), [0, 3, 4]);
        let mut none = Reservoir::new(0);
        none.push(0.0, 1, &mut rng);
        assert!(none.into_items().is_empty());
    }
}
