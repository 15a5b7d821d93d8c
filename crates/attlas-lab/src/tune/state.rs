//! Measurements that are kept: a file of JSON lines that is added to as they are made.

use super::search::Candidate;
use crate::{Error, Result};
use attlas::Options;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};

/// One method with one budget on one key head.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measurement {
    /// Layer.
    pub layer: usize,
    /// Key head.
    pub kv_head: usize,
    /// Id of the method.
    pub method: String,
    /// What was set.
    pub params: Options,
    /// Largest error of the query heads; none where it did not give one.
    pub error: Option<f64>,
    /// Seconds of set-up and run, all query heads together.
    pub seconds: f64,
    /// The same over exact attention's.
    pub cost: f64,
}

/// Measurements that are kept in a file, one JSON line each after a line that says what they were made on.
#[derive(Debug)]
pub struct State {
    path: Option<PathBuf>,
    key: String,
    pub(super) done: BTreeMap<(usize, usize, String), Measurement>,
}

#[derive(Serialize, Deserialize)]
struct Header {
    format: String,
    version: u32,
    key: String,
}

const FORMAT: &str = "attlas measurements";
const VERSION: u32 = 1;

impl State {
    /// Measurements made on what `key` names, in a file if one is given. What the file already holds is used again; one
    /// made on something else is refused. A last line that was cut off is dropped.
    pub fn open(path: Option<&Path>, key: &str) -> Result<Self> {
        let mut state = Self { path: path.map(Into::into), key: key.into(), done: BTreeMap::new() };
        if let Some(path) = path {
            if path.exists() {
                state.merge(path)?;
            }
            state.rewrite()?;
        }
        Ok(state)
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.done.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.done.is_empty()
    }

    /// Adds the measurements of another file.
    pub fn merge(&mut self, path: &Path) -> Result<()> {
        let text = std::fs::read_to_string(path).map_err(|e| Error::reading(path, e))?;
        let malformed = |reason: String| Error::Malformed { path: path.into(), format: FORMAT, reason };
        let mut lines = text.lines();
        let header: Header = serde_json::from_str(lines.next().unwrap_or_default())
            .map_err(|e| malformed(format!("line 1: {e}")))?;
        if (header.format.as_str(), header.version) != (FORMAT, VERSION) {
            return Err(malformed(format!("expected {FORMAT} of version {VERSION}")));
        }
        if header.key != self.key {
            return Err(Error::argument(
                path.display(),
                "measurements on this model, text, length, seed, machine and version; remove the file or name another \
                 with --state",
                "measurements on something else",
            ));
        }
        let lines: Vec<&str> = lines.collect();
        for (i, line) in lines.iter().enumerate() {
            match serde_json::from_str::<Measurement>(line) {
                Ok(m) => {
                    self.done.insert(key_of(&m), m);
                }
                // The last line of an interrupted run.
                Err(_) if i + 1 == lines.len() => {}
                Err(e) => return Err(malformed(format!("line {}: {e}", i + 2))),
            }
        }
        Ok(())
    }

    /// Writes everything anew.
    pub fn rewrite(&self) -> Result<()> {
        let Some(path) = &self.path else { return Ok(()) };
        let header = Header { format: FORMAT.into(), version: VERSION, key: self.key.clone() };
        let failed = |e: serde_json::Error| Error::writing(path, e.into());
        let mut text = serde_json::to_string(&header).map_err(failed)? + "\n";
        for m in self.done.values() {
            text += &(serde_json::to_string(m).map_err(failed)? + "\n");
        }
        crate::trace::write_file(path, text.as_bytes())
    }

    pub(super) fn get(&self, layer: usize, kv_head: usize, candidate: &Candidate) -> Option<&Measurement> {
        self.done.get(&(layer, kv_head, candidate.name()))
    }

    pub(super) fn push(&mut self, m: Measurement) -> Result<()> {
        if let Some(path) = &self.path {
            let line = serde_json::to_string(&m).map_err(|e| Error::writing(path, e.into()))? + "\n";
            std::fs::OpenOptions::new()
                .append(true)
                .open(path)
                .and_then(|mut f| f.write_all(line.as_bytes()))
                .map_err(|e| Error::writing(path, e))?;
        }
        self.done.insert(key_of(&m), m);
        Ok(())
    }
}

fn key_of(m: &Measurement) -> (usize, usize, String) {
    (m.layer, m.kv_head, format!("{} {}", m.method, m.params))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn window(keys: usize) -> Options {
        Options::new().with("window", keys)
    }

    fn made_up(kv_head: usize, params: &Options) -> Measurement {
        Measurement {
            layer: 0,
            kv_head,
            method: "sink_window".into(),
            params: params.clone(),
            error: Some(0.5),
            seconds: 0.25,
            cost: 0.25,
        }
    }

    #[test]
    fn measurements_survive_a_cut_line_and_are_refused_for_anything_else() {
        let path = std::env::temp_dir().join(format!("attlas-tune-{}.jsonl", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let steps = [16, 32].map(window);
        let mut state = State::open(Some(&path), "one").unwrap();
        state.push(made_up(0, &steps[0])).unwrap();
        state.push(made_up(1, &steps[1])).unwrap();
        let whole = std::fs::read_to_string(&path).unwrap();
        assert_eq!(whole.lines().count(), 3);
        std::fs::write(&path, &whole[..whole.len() - 9]).unwrap();
        let again = State::open(Some(&path), "one").unwrap();
        assert_eq!(again.done.into_values().collect::<Vec<_>>(), [made_up(0, &steps[0])]);
        assert_eq!(
            std::fs::read_to_string(&path).unwrap().lines().count(),
            2,
            "the rest of the line is gone"
        );
        let other = State::open(Some(&path), "two").unwrap_err().to_string();
        assert!(other.contains("something else") && other.contains("--state"), "{other}");
        std::fs::write(&path, "{}\n").unwrap();
        assert!(matches!(State::open(Some(&path), "one"), Err(Error::Malformed { .. })));
        std::fs::remove_file(&path).unwrap();
    }
}
