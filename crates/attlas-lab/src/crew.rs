//! Processes that share the units of a search.
//!
//! A search is a list of independent units. Alone, one process does all of them; in a crew, each process takes the next
//! unit from a shared counter. Records go to process 0 as they are made; at the end of a list every process gets all
//! records of process 0.

use crate::Result;
use attlas_model::decoder::SpreadAttention;
use std::cell::Cell;
use std::fmt::Debug;

/// The processes that work on a list of units. Every process calls the same functions in the same order, except
/// [`next`](Self::next), [`report`](Self::report) and [`arrived`](Self::arrived).
pub trait Crew: Debug {
    /// Returns the rank of this process, from 0. Process 0 owns files and prints.
    fn rank(&self) -> usize;

    /// Returns the number of processes.
    fn size(&self) -> usize;

    /// Returns the machine of this process; none if it is alone.
    fn node(&self) -> Option<String> {
        None
    }

    /// Returns attention for a model whose tokens are divided among all processes; none if this process is alone.
    fn spread(&self) -> Option<Box<dyn SpreadAttention + '_>> {
        None
    }

    /// Begins a list of `count` units.
    fn begin(&self, count: usize);

    /// Takes the next unit of the list that no process has taken.
    fn next(&self) -> Option<usize>;

    /// Sends a record, one line of text, to process 0; does nothing on process 0 itself.
    fn report(&self, record: &str);

    /// Returns the records that others have sent since the last call, on process 0.
    fn arrived(&self) -> Vec<String>;

    /// Ends a list: process 0 calls `take` with records as they arrive until every process has ended its list.
    fn end(&self, take: &mut dyn FnMut(&str) -> Result<()>) -> Result<()>;

    /// Returns the text of process 0 on every process.
    fn broadcast(&self, text: String) -> String;

    /// Returns the texts of all processes, in the order of ranks, on every process.
    fn gather(&self, own: &str) -> Vec<String>;

    /// Returns true for process 0, which owns files and prints.
    fn leads(&self) -> bool {
        self.rank() == 0
    }

    /// Returns true if there is only one process.
    fn is_alone(&self) -> bool {
        self.size() == 1
    }

    /// Returns true if `own` is true on any process.
    fn any(&self, own: bool) -> bool {
        if self.is_alone() { own } else { self.gather(if own { "1" } else { "" }).iter().any(|x| x == "1") }
    }
}

/// A crew of one process.
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

/// Processes that do every unit of a list together: each gets all units in the same order, and process 0 keeps the
/// records, which are equal on all.
#[derive(Debug)]
pub struct Together<'a> {
    crew: &'a dyn Crew,
    list: Alone,
}

impl<'a> Together<'a> {
    /// Wraps the processes of `crew`.
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
