//! Processes that share the units of a search.
//!
//! A search is a list of independent units. Alone, one process does all of them; in a crew, each takes the next one from a
//! counter that all share. Records go to process 0 as they are made, and at the end of a list everybody has all of them.

use std::fmt::Debug;

/// Who works on a list of units. Every process calls the same functions in the same order, but for [`report`](Self::report)
/// and [`arrived`](Self::arrived).
pub trait Crew: Debug {
    /// This process, from 0. Process 0 owns files and prints.
    fn rank(&self) -> usize;

    /// Processes.
    fn size(&self) -> usize;

    /// The machine that this process runs on; none where it is alone.
    fn node(&self) -> Option<String> {
        None
    }

    /// Begins a list of `count` units.
    fn begin(&self, count: usize);

    /// The next unit of the list that nobody has taken.
    fn next(&self) -> Option<usize>;

    /// Hands a record to process 0, which writes it as soon as it is not busy.
    fn report(&self, record: &str);

    /// Records that others have handed over, on process 0.
    fn arrived(&self) -> Vec<String>;

    /// Ends a list: the records of all processes, in the order of ranks, on every process.
    fn collect(&self, own: &[String]) -> Vec<String>;

    /// Process 0 owns files and prints.
    fn leads(&self) -> bool {
        self.rank() == 0
    }
}

/// One process.
#[derive(Debug, Default)]
pub struct Alone {
    list: std::cell::Cell<(usize, usize)>,
}

impl Crew for Alone {
    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        1
    }

    fn begin(&self, count: usize) {
        self.list.set((0, count));
    }

    fn next(&self) -> Option<usize> {
        let (at, count) = self.list.get();
        self.list.set((at + 1, count));
        (at < count).then_some(at)
    }

    fn report(&self, _: &str) {}

    fn arrived(&self) -> Vec<String> {
        Vec::new()
    }

    fn collect(&self, own: &[String]) -> Vec<String> {
        own.to_vec()
    }
}
