//! The processes of a transport as a crew that shares the units of a search.

use crate::{SpreadModel, Transport};
use attlas_lab::Result;
use attlas_lab::crew::Crew;
use attlas_model::decoder::SpreadAttention;
use std::cell::Cell;
use std::time::Duration;

/// Pause of an idle process 0 before it looks for records again.
const PAUSE: Duration = Duration::from_millis(1);

/// The counter of lists, reset at the end of each.
const COUNTER: usize = 0;

/// A crew over a transport.
#[derive(Debug)]
pub struct Team<'a> {
    transport: &'a dyn Transport,
    /// Units of the current list.
    count: Cell<usize>,
    /// Processes that have ended it, on process 0.
    ended: Cell<usize>,
}

impl<'a> Team<'a> {
    /// Makes a team of all processes of `transport`. Only one team at a time may have lists.
    pub fn new(transport: &'a dyn Transport) -> Self {
        Self { transport, count: Cell::new(0), ended: Cell::new(0) }
    }

    /// Looks for messages; an empty one is the end of a process's list.
    fn look(&self) -> Vec<String> {
        let mut found = Vec::new();
        for bytes in self.transport.arrived() {
            match bytes.is_empty() {
                true => self.ended.set(self.ended.get() + 1),
                false => found.push(String::from_utf8_lossy(&bytes).into_owned()),
            }
        }
        found
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

    fn spread(&self) -> Option<Box<dyn SpreadAttention + '_>> {
        Some(Box::new(SpreadModel::new(self.transport)))
    }

    fn begin(&self, count: usize) {
        self.count.set(count);
    }

    fn next(&self) -> Option<usize> {
        let unit = self.transport.fetch_add(COUNTER) as usize;
        (unit < self.count.get()).then_some(unit)
    }

    fn report(&self, record: &str) {
        if self.rank() != 0 {
            self.transport.report(record.as_bytes());
        }
    }

    fn arrived(&self) -> Vec<String> {
        if self.rank() == 0 { self.look() } else { Vec::new() }
    }

    fn end(&self, take: &mut dyn FnMut(&str) -> Result<()>) -> Result<()> {
        if self.rank() != 0 {
            self.transport.report(&[]);
        } else {
            loop {
                self.look().iter().try_for_each(|record| take(record))?;
                if self.ended.get() + 1 == self.size() {
                    break;
                }
                std::thread::sleep(PAUSE);
            }
            self.ended.set(0);
            // All have left the list and wait below.
            self.transport.reset(COUNTER);
        }
        self.broadcast(String::new());
        Ok(())
    }

    fn broadcast(&self, text: String) -> String {
        let mut bytes = if self.rank() == 0 { text.into_bytes() } else { Vec::new() };
        self.transport.broadcast(0, &mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn gather(&self, own: &str) -> Vec<String> {
        let all = self.transport.gather_all(own.as_bytes());
        all.into_iter().map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Threads;

    #[test]
    fn units_are_taken_once_and_records_reach_the_first() {
        for size in 1..=4 {
            let all = Threads::run(size, |t| {
                let team = Team::new(t);
                let mut lists = Vec::new();
                // Successive lists share the counter.
                for count in [0, 1, 7, 3, 7] {
                    team.begin(count);
                    let mut records = Vec::new();
                    while let Some(unit) = team.next() {
                        if team.leads() {
                            records.push(unit.to_string());
                            records.extend(team.arrived());
                        } else {
                            team.report(&unit.to_string());
                        }
                    }
                    team.end(&mut |record| {
                        records.push(record.to_owned());
                        Ok(())
                    })
                    .unwrap();
                    let shared = team.broadcast(records.join(" "));
                    assert_eq!(team.gather(&shared), vec![shared.clone(); size]);
                    assert!(team.any(team.rank() + 1 == size) && !team.any(false));
                    lists.push((count, shared));
                }
                lists
            });
            for (count, shared) in all.into_iter().flatten() {
                let mut units: Vec<usize> = shared.split_whitespace().map(|u| u.parse().unwrap()).collect();
                units.sort_unstable();
                assert_eq!(units, (0..count).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn a_shared_search_keeps_one_file_and_everybody_gets_all_of_it() {
        use attlas_lab::units::{Done, Ledger, share};
        let path = std::env::temp_dir().join(format!("attlas-team-{}.jsonl", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let found = |size: usize, stop_at: usize| {
            Threads::run(size, |t| {
                let team = Team::new(t);
                let mut ledger =
                    if team.leads() { Ledger::open(&path, "squares", "").unwrap() } else { Ledger::none() };
                let shared = share(&team, &mut ledger, &[3, 9, 1, 4, 4], &mut |unit, at| {
                    Ok(if at == stop_at { Done::Stopped } else { Done::Whole(unit * unit) })
                });
                let shared = shared.unwrap();
                let values: Vec<Option<usize>> =
                    shared.records.iter().map(|r| r.as_ref().map(|r| r.0)).collect();
                (values, shared.interrupted)
            })
        };
        // One process stops, and all notice; finished units are in the file, and a different number of processes does
        // the rest.
        let stopped = found(3, 2);
        assert!(
            stopped.iter().all(|(values, interrupted)| *interrupted && values[4].is_none()),
            "{stopped:?}"
        );
        let kept = std::fs::read_to_string(&path).unwrap().lines().count() - 1;
        assert_eq!(kept, 4);
        for size in [2, 4] {
            for (values, interrupted) in found(size, 9) {
                assert_eq!((values, interrupted), ((0..5).map(|u| Some(u * u)).collect(), false));
            }
            assert_eq!(std::fs::read_to_string(&path).unwrap().lines().count(), 6);
        }
        std::fs::remove_file(&path).unwrap();
    }
}
