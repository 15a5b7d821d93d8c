//! Lists of independent units, shared among processes and kept in a file from which an interrupted run resumes.
//!
//! The longest units are handed out first, one at a time: a slow machine then delays the others least. Only process 0
//! has the file: a line that identifies the run, then one line per finished unit, appended as it arrives. A truncated
//! line is dropped when the file is read again.

use crate::crew::Crew;
use crate::hash::sha256;
use crate::output;
use crate::{Error, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

const FORMAT: &str = "attlas units";
const VERSION: u32 = 1;

#[derive(Serialize, Deserialize)]
struct Header {
    format: String,
    version: u32,
    /// The command.
    command: String,
    /// SHA-256 of everything that determines a unit's result.
    key: String,
}

/// One unit, as stored and as sent.
#[derive(Serialize, Deserialize)]
struct Line<R> {
    unit: usize,
    /// The machine that did it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    node: Option<String>,
    /// True if it was finished; others are not kept.
    #[serde(default = "yes", skip_serializing_if = "is_true")]
    whole: bool,
    record: R,
}

/// A line without its record.
#[derive(Deserialize)]
struct Head {
    unit: usize,
    #[serde(default = "yes")]
    whole: bool,
}

fn yes() -> bool {
    true
}

#[allow(clippy::trivially_copy_pass_by_ref)]
fn is_true(x: &bool) -> bool {
    *x
}

/// Finished units, in a file if there is one.
#[derive(Debug, Default)]
pub struct Ledger {
    path: Option<PathBuf>,
    /// Kept open for its lock and for appending.
    file: Option<File>,
    known: BTreeMap<usize, String>,
}

impl Ledger {
    /// Creates a ledger that stores nothing.
    pub fn none() -> Self {
        Self::default()
    }

    /// Opens the units of `command` in the file at `path`. Units in the file are reused. A file of another command or
    /// of other inputs or settings (`key`), or one that another process is writing, is refused. Only process 0 of a
    /// crew has it.
    pub fn open(path: &Path, command: &str, key: &str) -> Result<Self> {
        let header = Header {
            format: FORMAT.into(),
            version: VERSION,
            command: command.into(),
            key: sha256(key.as_bytes()),
        };
        let mut ledger = Self { path: Some(path.into()), file: None, known: BTreeMap::new() };
        // Kept until the new file is in place with its own lock.
        let there = output::lock(path)?;
        if there.is_some() {
            ledger.read(path, &header)?;
        }
        let failed = |e: serde_json::Error| Error::writing(path, e.into());
        let mut text = serde_json::to_string(&header).map_err(failed)? + "\n";
        ledger.known.values().for_each(|line| {
            text += line;
            text.push('\n');
        });
        ledger.file = Some(output::write_locked(path, text.as_bytes())?);
        Ok(ledger)
    }

    fn read(&mut self, path: &Path, ours: &Header) -> Result<()> {
        let text = std::fs::read_to_string(path).map_err(|e| Error::reading(path, e))?;
        let malformed = |reason: String| Error::Malformed { path: path.into(), format: FORMAT, reason };
        let mut lines = text.lines();
        let first = lines.next().unwrap_or_default();
        let theirs: Header = serde_json::from_str(first).map_err(|e| malformed(format!("line 1: {e}")))?;
        if (theirs.format.as_str(), theirs.version) != (FORMAT, VERSION) {
            let found = format!("{} of version {}", theirs.format, theirs.version);
            return Err(malformed(format!("expected {FORMAT} of version {VERSION}, found {found}")));
        }
        if (&theirs.command, &theirs.key) != (&ours.command, &ours.key) {
            let expected = format!(
                "units of this {} with the same inputs and settings; remove the file or name another with --state",
                ours.command
            );
            return Err(Error::argument(
                path.display(),
                expected,
                format!("those of another {}", theirs.command),
            ));
        }
        let lines: Vec<&str> = lines.collect();
        for (i, line) in lines.iter().enumerate() {
            match serde_json::from_str::<Head>(line) {
                Ok(unit) => drop(self.known.insert(unit.unit, (*line).to_owned())),
                // The truncated last line of an interrupted run.
                Err(_) if i + 1 == lines.len() => {}
                Err(e) => return Err(malformed(format!("line {}: {e}", i + 2))),
            }
        }
        Ok(())
    }

    /// Returns the number of finished units.
    pub fn len(&self) -> usize {
        self.known.len()
    }

    /// Returns true if no unit is finished.
    pub fn is_empty(&self) -> bool {
        self.known.is_empty()
    }

    fn append(&mut self, line: &str) -> Result<()> {
        if let (Some(path), Some(file)) = (&self.path, &mut self.file) {
            file.write_all(format!("{line}\n").as_bytes()).map_err(|e| Error::writing(path, e))?;
        }
        Ok(())
    }
}

/// Outcome of a unit.
#[derive(Debug)]
pub enum Done<R> {
    /// Finished.
    Whole(R),
    /// Unfinished, for lack of time or because of a stop: shown, and repeated in the next run.
    Partial(R),
    /// Not begun because of a stop. This process takes no more units.
    Stopped,
}

/// The units of all processes.
#[derive(Debug)]
pub struct Shared<R> {
    /// Records by unit, with the machine; none if the unit was not done.
    pub records: Vec<Option<(R, Option<String>)>>,
    /// True if a process stopped before the end of the list.
    pub interrupted: bool,
}

impl<R> Shared<R> {
    /// Returns the machines that did units, each once.
    pub fn nodes(&self) -> Vec<String> {
        let mut nodes: Vec<String> = self.records.iter().flatten().filter_map(|(_, n)| n.clone()).collect();
        nodes.sort();
        nodes.dedup();
        nodes
    }
}

/// Does every unit that is not in the ledger, the heaviest by `weights` first, equal ones in their order. `work`
/// receives a unit and its place in the list. Every process gets all records.
pub fn share<R: Serialize + DeserializeOwned>(
    crew: &dyn Crew,
    ledger: &mut Ledger,
    weights: &[u64],
    work: &mut dyn FnMut(usize, usize) -> Result<Done<R>>,
) -> Result<Shared<R>> {
    let bad =
        |e: serde_json::Error| Error::argument("the record of a unit", "one that can be written and read", e);
    if !crew.is_alone() {
        let shared = crew.broadcast(ledger.known.values().cloned().collect::<Vec<_>>().join("\n"));
        for line in shared.lines().filter(|_| !crew.leads()) {
            let unit = serde_json::from_str::<Head>(line).map_err(bad)?.unit;
            ledger.known.insert(unit, line.to_owned());
        }
    }
    let mut list: Vec<usize> = (0..weights.len()).filter(|unit| !ledger.known.contains_key(unit)).collect();
    list.sort_by_key(|&unit| Reverse(weights[unit]));
    let node = crew.node();
    let kept = ledger.path.is_some() || !crew.is_alone();
    let mut records: Vec<Option<(R, Option<String>)>> = weights.iter().map(|_| None).collect();
    let mut lines: Vec<String> = Vec::new();
    let mut stopped = false;
    crew.begin(list.len());
    while let Some(at) = crew.next() {
        let unit = list[at];
        let (record, whole) = match work(unit, at)? {
            Done::Whole(record) => (record, true),
            Done::Partial(record) => (record, false),
            Done::Stopped => {
                stopped = true;
                break;
            }
        };
        if kept {
            let line = Line { unit, node: node.clone(), whole, record: &record };
            let line = serde_json::to_string(&line).map_err(bad)?;
            if crew.leads() {
                take(ledger, &mut lines, &line)?;
                crew.arrived().iter().try_for_each(|line| take(ledger, &mut lines, line))?;
            } else {
                crew.report(&line);
            }
        }
        records[unit] = Some((record, node.clone()));
    }
    crew.end(&mut |line| take(ledger, &mut lines, line))?;
    if !crew.is_alone() {
        let shared = crew.broadcast(lines.join("\n"));
        lines = shared.lines().map(str::to_owned).collect();
    }
    let known = std::mem::take(&mut ledger.known);
    for line in known.values().chain(lines.iter().filter(|_| !crew.is_alone())) {
        let line: Line<R> = serde_json::from_str(line).map_err(bad)?;
        if let Some(place) = records.get_mut(line.unit) {
            *place = Some((line.record, line.node));
        }
    }
    Ok(Shared { records, interrupted: crew.any(stopped) })
}

/// Stores a record on process 0.
fn take(ledger: &mut Ledger, lines: &mut Vec<String>, line: &str) -> Result<()> {
    let whole = serde_json::from_str::<Head>(line).is_ok_and(|l| l.whole);
    if whole {
        ledger.append(line)?;
    }
    lines.push(line.to_owned());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::crew::Alone;

    fn squares(ledger: &mut Ledger, stop_at: usize) -> (Shared<usize>, Vec<usize>) {
        let mut order = Vec::new();
        let done = share(&Alone::default(), ledger, &[1, 5, 2, 5], &mut |unit, at| {
            if at == stop_at {
                return Ok(Done::Stopped);
            }
            order.push(unit);
            Ok(if unit == 2 { Done::Partial(4) } else { Done::Whole(unit * unit) })
        });
        (done.unwrap(), order)
    }

    #[test]
    fn heavy_units_come_first_and_finished_ones_are_kept() {
        let path = std::env::temp_dir().join(format!("attlas-units-{}.jsonl", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let (all, order) = squares(&mut Ledger::none(), 9);
        assert_eq!(order, [1, 3, 2, 0]);
        let values =
            |s: &Shared<usize>| s.records.iter().map(|r| r.as_ref().map(|r| r.0)).collect::<Vec<_>>();
        assert_eq!((values(&all), all.interrupted), (vec![Some(0), Some(1), Some(4), Some(9)], false));

        let mut ledger = Ledger::open(&path, "squares", "a").unwrap();
        assert!(Ledger::open(&path, "squares", "a").unwrap_err().to_string().contains("being written"));
        let (some, order) = squares(&mut ledger, 3);
        assert_eq!((order, some.interrupted), (vec![1, 3, 2], true));
        drop(ledger);
        // Partial units and truncated lines are done again.
        let whole = std::fs::read_to_string(&path).unwrap();
        assert_eq!(whole.lines().count(), 3, "{whole}");
        std::fs::write(&path, format!("{whole}{{\"unit\":0,\"rec")).unwrap();
        let mut ledger = Ledger::open(&path, "squares", "a").unwrap();
        assert_eq!(ledger.len(), 2);
        let (rest, order) = squares(&mut ledger, 9);
        assert_eq!((order, values(&rest)), (vec![2, 0], values(&all)));
        drop(ledger);
        let other = Ledger::open(&path, "squares", "b").unwrap_err().to_string();
        assert!(other.contains("--state"), "{other}");
        std::fs::write(&path, "{}\n").unwrap();
        assert!(matches!(Ledger::open(&path, "squares", "a"), Err(Error::Malformed { .. })));
        std::fs::remove_file(&path).unwrap();
    }
}
