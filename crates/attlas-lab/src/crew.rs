//! Processes that share the units of a search.
//!
//! A search is a list of independent units. Alone, one process does all of them; in a crew, each takes the next one from a
//! counter that all share. Records go to process 0 as they are made; at the end of a list everybody gets what process 0 has.

use crate::Result;
use attlas_model::decoder::SpreadAttention;
use std::cell::Cell;
use std::fmt::Debug;

/// The processes that work on a list of units. Every process calls the same functions in the same order, but for
/// [`next`](Self::next), [`report`](Self::report) and [`arrived`](Self::arrived).
pub trait Crew: Debug {
    /// This process, from 0. Process 0 owns files and prints.
    fn rank(&self) -> usize;

    /// Processes.
    fn size(&self) -> usize;

    /// The machine that this process runs on; none where it is alone.
    fn node(&self) -> Option<String> {
        None
    }

    /// Attention inside a model whose tokens lie on all processes; none where this one is alone.
    fn spread(&self) -> Option<Box<dyn SpreadAttention + '_>> {
        None
    }

    /// Begins a list of `count` units.
    fn begin(&self, count: usize);

    /// The next unit of the list that nobody has taken.
    fn next(&self) -> Option<usize>;

    /// Hands a record, a line of text, to process 0. Nothing happens on process 0 itself.
    fn report(&self, record: &str);

    /// Records that others have handed over since the last call, on process 0.
    fn arrived(&self) -> Vec<String>;

    /// Ends a list: process 0 calls `take` with records as they arrive until every process has ended its list.
    fn end(&self, take: &mut dyn FnMut(&str) -> Result<()>) -> Result<()>;

    /// The text of process 0, on every process.
    fn broadcast(&self, text: String) -> String;

    /// The texts of all processes, in the order of ranks, on every process.
    fn gather(&self, own: &str) -> Vec<String>;

    /// Process 0 owns files and prints.
    fn leads(&self) -> bool {
        self.rank() == 0
    }

    /// Whether this process has nobody to share with.
    fn is_alone(&self) -> bool {
        self.size() == 1
    }

    /// Whether one of the processes says so.
    fn any(&self, own: bool) -> bool {
        if self.is_alone() { own } else { self.gather(if own { "1" } else { "" }).iter().any(|x| x == "1") }
    }
}

/// One process.
#[derive(Debug, Default)]
pub struct Alone {
    list: Cell<(usize, usize)>,
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

    fn end(&self, _: &mut dyn FnMut(&str) -> Result<()>) -> Result<()> {
        Ok(())
    }

    fn broadcast(&self, text: String) -> String {
        text
    }

    fn gather(&self, own: &str) -> Vec<String> {
        vec![own.to_owned()]
    }
}

/// Processes that do every unit of a list together: each of them gets all units in the same order, and process 0 keeps the
/// records, which are the same on all.
#[derive(Debug)]
pub struct Together<'a> {
    crew: &'a dyn Crew,
    list: Alone,
}

impl<'a> Together<'a> {
    /// The processes of `crew`.
    pub fn new(crew: &'a dyn Crew) -> Self {
        Self { crew, list: Alone::default() }
    }
}

impl Crew for Together<'_> {
    fn rank(&self) -> usize {
        self.crew.rank()
    }

    fn size(&self) -> usize {
        self.crew.size()
    }

    fn node(&self) -> Option<String> {
        self.crew.node()
    }

    fn begin(&self, count: usize) {
        self.list.begin(count);
    }

    fn next(&self) -> Option<usize> {
        self.list.next()
    }

    fn report(&self, _: &str) {}

    fn arrived(&self) -> Vec<String> {
        Vec::new()
    }

    fn end(&self, _: &mut dyn FnMut(&str) -> Result<()>) -> Result<()> {
        Ok(())
    }

    fn broadcast(&self, text: String) -> String {
        self.crew.broadcast(text)
    }

    fn gather(&self, own: &str) -> Vec<String> {
        self.crew.gather(own)
    }
}
