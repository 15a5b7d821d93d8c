//! Assignment of tokens to processes.

use std::ops::Range;

/// Assignment of tokens to processes. With a causal mask, process `p` of `P` has two stripes, `p` and `2P − 1 − p` of
/// `2P`: late rows attend to many keys and early ones to few, and together they are equal work on every process.
/// Without a mask it has one piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    n: usize,
    processes: usize,
    striped: bool,
    align: usize,
}

impl Layout {
    /// Creates two stripes per process, with borders at multiples of `align`.
    pub fn striped(n: usize, processes: usize, align: usize) -> Self {
        Self { n, processes: processes.max(1), striped: true, align: align.max(1) }
    }

    /// Creates one piece per process.
    pub fn contiguous(n: usize, processes: usize) -> Self {
        Self { n, processes: processes.max(1), striped: false, align: 1 }
    }

    /// Moves the borders to multiples of `align`.
    #[must_use]
    pub fn aligned(self, align: usize) -> Self {
        Self { align: align.max(1), ..self }
    }

    /// Returns the alignment of borders.
    pub fn align(&self) -> usize {
        self.align
    }

    /// Returns true if processes have an early and a late stripe.
    pub fn is_striped(&self) -> bool {
        self.striped
    }

    /// Returns the number of tokens.
    pub fn len(&self) -> usize {
        self.n
    }

    /// Returns true if there is no token.
    pub fn is_empty(&self) -> bool {
        self.n == 0
    }

    /// Processes.
    pub fn processes(&self) -> usize {
        self.processes
    }

    fn border(&self, i: usize) -> usize {
        let stripes = if self.striped { 2 * self.processes } else { self.processes };
        if i >= stripes {
            return self.n;
        }
        let blocks = self.n.div_ceil(self.align);
        (i * blocks / stripes * self.align).min(self.n)
    }

    /// Returns the early and the late tokens of process `p`. The late ones are empty without a mask, and on the last
    /// process, whose stripes are adjacent.
    pub fn halves(&self, p: usize) -> [Range<usize>; 2] {
        if !self.striped {
            return [self.border(p)..self.border(p + 1), self.n..self.n];
        }
        let late = 2 * self.processes - 1 - p;
        let (early, late) = (self.border(p)..self.border(p + 1), self.border(late)..self.border(late + 1));
        if early.end == late.start && !late.is_empty() {
            return [early.start..late.end, self.n..self.n];
        }
        [early, late]
    }

    /// Returns the non-empty pieces of process `p`.
    pub fn pieces(&self, p: usize) -> Vec<Range<usize>> {
        self.halves(p).into_iter().filter(|r| !r.is_empty()).collect()
    }

    /// Returns the number of tokens on process `p`.
    pub fn rows(&self, p: usize) -> usize {
        self.halves(p).iter().map(Range::len).sum()
    }

    /// Counts the pairs of a query of process `p` and a visible key, for one head: for stripes under a causal mask.
    pub fn pairs(&self, p: usize) -> u64 {
        if !self.striped {
            return (self.rows(p) * self.n) as u64;
        }
        let upto = |n: usize| (n as u64) * (n as u64 + 1) / 2;
        self.halves(p).iter().map(|r| upto(r.end) - upto(r.start)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_token_is_somewhere_once() {
        for n in [0, 1, 2, 3, 5, 8, 13, 97, 256] {
            for processes in 1..=5 {
                for align in [1, 16] {
                    for layout in [Layout::striped(n, processes, align), Layout::contiguous(n, processes)] {
                        let mut all: Vec<usize> =
                            (0..processes).flat_map(|p| layout.pieces(p)).flatten().collect();
                        assert_eq!(all.len(), (0..processes).map(|p| layout.rows(p)).sum::<usize>());
                        all.sort_unstable();
                        assert_eq!(all, (0..n).collect::<Vec<_>>(), "{layout:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn stripes_begin_at_blocks() {
        let layout = Layout::striped(1000, 3, 64);
        for p in 0..3 {
            assert!(layout.pieces(p).iter().all(|r| r.start % 64 == 0), "{:?}", layout.pieces(p));
        }
    }

    #[test]
    fn causal_work_is_equal() {
        let layout = Layout::striped(16384, 4, 1);
        let pairs: Vec<u64> = (0..4).map(|p| layout.pairs(p)).collect();
        let mean = pairs.iter().sum::<u64>() as f64 / 4.0;
        let slowest = pairs.iter().copied().max().unwrap_or(0) as f64;
        assert_eq!(pairs.iter().sum::<u64>(), 16384 * 16385 / 2);
        assert!(slowest / mean <= 1.05, "{}", slowest / mean);
    }

    #[test]
    fn one_process_holds_one_piece() {
        for (layout, p, want) in [(Layout::striped(10, 1, 1), 0, 0..10), (Layout::striped(12, 3, 1), 2, 4..8)]
        {
            let pieces = layout.pieces(p);
            assert_eq!((pieces.len(), pieces[0].clone()), (1, want));
        }
        assert_eq!(Layout::striped(12, 3, 1).pieces(0), [0..2, 10..12]);
    }
}
