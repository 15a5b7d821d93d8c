//! The processes of a transport as a crew that shares the units of a search.

use crate::Transport;
use attlas_lab::crew::Crew;
use std::cell::Cell;

/// A crew over a transport.
#[derive(Debug)]
pub struct Team<'a> {
    transport: &'a dyn Transport,
    /// The counter of the current list, and its units.
    list: Cell<(usize, usize)>,
}

impl<'a> Team<'a> {
    /// All processes of `transport`.
    pub fn new(transport: &'a dyn Transport) -> Self {
        Self { transport, list: Cell::new((usize::MAX, 0)) }
    }
}

impl Crew for Team<'_> {
    fn rank(&self) -> usize {
        self.transport.rank()
    }

    fn size(&self) -> usize {
        self.transport.size()
    }

    fn node(&self) -> Option<String> {
        Some(self.transport.node())
    }

    fn begin(&self, count: usize) {
        let (counter, _) = self.list.get();
        self.list.set((counter.wrapping_add(1), count));
    }

    fn next(&self) -> Option<usize> {
        let (counter, count) = self.list.get();
        let unit = self.transport.fetch_add(counter) as usize;
        (unit < count).then_some(unit)
    }

    fn report(&self, record: &str) {
        if self.rank() != 0 {
            self.transport.report(record.as_bytes());
        }
    }

    fn arrived(&self) -> Vec<String> {
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        if self.rank() == 0 { self.transport.arrived().into_iter().map(text).collect() } else { Vec::new() }
    }

    fn collect(&self, own: &[String]) -> Vec<String> {
        // Records are lines: none holds a line break.
        let all = self.transport.gather_all(own.join("\n").as_bytes());
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        let lines = |text: String| text.lines().map(str::to_string).collect::<Vec<_>>();
        all.into_iter().map(text).flat_map(lines).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Threads;

    #[test]
    fn units_are_taken_once_and_records_reach_everybody() {
        for size in 1..=4 {
            let all = Threads::run(size, |t| {
                let team = Team::new(t);
                let mut lists = Vec::new();
                for count in [0, 1, 7] {
                    team.begin(count);
                    let mut own = Vec::new();
                    while let Some(unit) = team.next() {
                        own.push(format!("{unit}"));
                        team.report(&format!("{count}:{unit}"));
                    }
                    lists.push(team.collect(&own));
                }
                t.barrier();
                (lists, team.arrived().len())
            });
            let reported = all[0].1;
            for (lists, _) in all {
                for (count, list) in [0, 1, 7].into_iter().zip(lists) {
                    let mut units: Vec<usize> = list.iter().map(|u| u.parse().unwrap()).collect();
                    units.sort_unstable();
                    assert_eq!(units, (0..count).collect::<Vec<_>>());
                }
            }
            assert!(reported <= 8, "{reported}");
        }
    }
}
