//! Measurements that are kept: a file of JSON lines that is added to as they are made.

use super::candidates::Candidate;
use super::{Outcome, Phase};
use crate::output;
use crate::{Error, Result};
use attlas::Options;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

/// One method with one budget on one key head.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measurement {
    /// Prompts or new tokens.
    pub phase: Phase,
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
    /// The same over exact attention's; for new tokens, scores over exact attention's.
    pub cost: f64,
    /// Whether its settings covered everything, so that exact attention was timed under its name.
    #[serde(default)]
    pub exact: bool,
    /// Divergence of the model's predictions with this key head changed alone, nats, where it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kl: Option<f64>,
}

/// What a model did with a recipe on a text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Checked {
    /// SHA-256 of the recipe, the text and the number of tokens.
    pub(super) checked: String,
    pub(super) outcome: Outcome,
}

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Line {
    Checked(Checked),
    Measured(Measurement),
}

/// What measurements were made on. Times of another machine, registry, effort or version are not comparable, so every part
/// has to agree.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Key {
    /// SHA-256 of the last layer's queries, keys and values, with the number of layers: the model, the text and its length.
    pub inputs: String,
    /// Processor, platform, instruction set and threads.
    pub machine: String,
    /// Measured multiply-add peak, billions of operations per second; clocks and load move it, so that one within a
    /// factor of [`PEAK_CLASS`] is the same machine.
    pub peak_gflops: Option<f64>,
    /// SHA-256 of the ids, parameters and defaults of all methods.
    pub registry: String,
    /// How much is tried, which says how many runs stand behind a time.
    pub effort: String,
    /// Seed of methods that draw random numbers.
    pub seed: u64,
    /// Version of this program.
    pub version: String,
}

/// Ratio of measured peaks above which machines of one name are told apart.
pub const PEAK_CLASS: f64 = 4.0;

impl Key {
    /// Whether times made on `other` may stand beside ours.
    fn fits(&self, other: &Self) -> bool {
        let peak = match (self.peak_gflops, other.peak_gflops) {
            (Some(a), Some(b)) => a.max(b) <= PEAK_CLASS * a.min(b),
            _ => true,
        };
        peak && Self { peak_gflops: None, ..self.clone() } == Self { peak_gflops: None, ..other.clone() }
    }

    /// The parts that differ from `other`, each as `name: ours, theirs`.
    fn differences(&self, other: &Self) -> (Vec<String>, Vec<String>) {
        let short = |hash: &str| hash.chars().take(12).collect::<String>();
        let parts = |k: &Self| {
            [
                ("model, text and length", short(&k.inputs)),
                ("machine", k.machine.clone()),
                ("peak", k.peak_gflops.map_or("unknown".into(), |g| format!("{g:.0} GF/s"))),
                ("registry of methods", short(&k.registry)),
                ("effort", k.effort.clone()),
                ("seed", k.seed.to_string()),
                ("version", k.version.clone()),
            ]
        };
        let pairs = parts(self).into_iter().zip(parts(other)).filter(|(a, b)| a.1 != b.1);
        pairs.map(|(a, b)| (format!("{} {}", a.0, a.1), format!("{} {}", b.0, b.1))).unzip()
    }
}

/// Measurements that are kept in a file, one JSON line each after a line that says what they were made on. The file is
/// locked as long as this lives: two searches would lose each other's lines.
#[derive(Debug)]
pub struct State {
    path: Option<PathBuf>,
    /// Held open, for its lock and to append to.
    file: Option<File>,
    key: Key,
    done: BTreeMap<(Phase, usize, usize, String), Measurement>,
    checks: BTreeMap<String, Outcome>,
    made: usize,
}

#[derive(Serialize, Deserialize)]
struct Header {
    format: String,
    version: u32,
    key: Key,
}

const FORMAT: &str = "attlas measurements";
const VERSION: u32 = 3;

impl State {
    /// Measurements made on what `key` names, in a file if one is given. What the file already holds is used again; one
    /// made on something else, or that another process is writing, is refused. A last line that was cut off is dropped.
    pub fn open(path: Option<&Path>, key: &Key) -> Result<Self> {
        let mut state = Self {
            path: path.map(Into::into),
            file: None,
            key: key.clone(),
            done: BTreeMap::new(),
            checks: BTreeMap::new(),
            made: 0,
        };
        if let Some(path) = path {
            // Kept until the new file is in place with a lock of its own.
            let there = output::lock(path)?;
            if there.is_some() {
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

    /// Methods that computed exact attention wherever they were measured, because their settings cover this length.
    pub fn fell_back(&self) -> Vec<String> {
        let mut all: BTreeMap<&str, bool> = BTreeMap::new();
        for m in self.done.values() {
            *all.entry(&m.method).or_insert(true) &= m.exact;
        }
        all.into_iter().filter(|(_, exact)| *exact).map(|(id, _)| id.into()).collect()
    }

    /// Adds the measurements of another file.
    pub fn merge(&mut self, path: &Path) -> Result<()> {
        let text = std::fs::read_to_string(path).map_err(|e| Error::reading(path, e))?;
        let malformed = |reason: String| Error::Malformed { path: path.into(), format: FORMAT, reason };
        let mut lines = text.lines();
        let first = lines.next().unwrap_or_default();
        #[derive(Deserialize)]
        struct Kind {
            format: String,
            version: u32,
        }
        let kind: Kind = serde_json::from_str(first).map_err(|e| malformed(format!("line 1: {e}")))?;
        if (kind.format.as_str(), kind.version) != (FORMAT, VERSION) {
            return Err(malformed(format!("expected {FORMAT} of version {VERSION}, found {}", kind.version)));
        }
        let header: Header = serde_json::from_str(first).map_err(|e| malformed(format!("line 1: {e}")))?;
        if !self.key.fits(&header.key) {
            let (ours, theirs) = self.key.differences(&header.key);
            return Err(Error::argument(
                path.display(),
                format!(
                    "measurements with {}; remove the file or name another with --state",
                    ours.join(", ")
                ),
                theirs.join(", "),
            ));
        }
        let lines: Vec<&str> = lines.collect();
        for (i, line) in lines.iter().enumerate() {
            match serde_json::from_str::<Line>(line) {
                Ok(Line::Measured(m)) => {
                    self.done.insert(key_of(&m), m);
                }
                Ok(Line::Checked(c)) => {
                    self.checks.insert(c.checked, c.outcome);
                }
                // The last line of an interrupted run.
                Err(_) if i + 1 == lines.len() => {}
                Err(e) => return Err(malformed(format!("line {}: {e}", i + 2))),
            }
        }
        Ok(())
    }

    /// Writes everything anew.
    pub fn rewrite(&mut self) -> Result<()> {
        let Some(path) = &self.path else { return Ok(()) };
        let header = Header { format: FORMAT.into(), version: VERSION, key: self.key.clone() };
        let failed = |e: serde_json::Error| Error::writing(path, e.into());
        let mut text = serde_json::to_string(&header).map_err(failed)? + "\n";
        for m in self.done.values() {
            text += &(serde_json::to_string(m).map_err(failed)? + "\n");
        }
        for (checked, outcome) in &self.checks {
            let line = Checked { checked: checked.clone(), outcome: outcome.clone() };
            text += &(serde_json::to_string(&line).map_err(failed)? + "\n");
        }
        self.file = Some(output::write_locked(path, text.as_bytes())?);
        Ok(())
    }

    pub(super) fn get(
        &self,
        phase: Phase,
        layer: usize,
        kv_head: usize,
        candidate: &Candidate,
    ) -> Option<&Measurement> {
        self.done.get(&(phase, layer, kv_head, candidate.name()))
    }

    /// Everything known of a key head.
    pub(super) fn of(
        &self,
        phase: Phase,
        layer: usize,
        kv_head: usize,
    ) -> impl Iterator<Item = &Measurement> {
        let first = (phase, layer, kv_head, String::new());
        self.done
            .range(first..)
            .map(|(_, m)| m)
            .take_while(move |m| (m.phase, m.layer, m.kv_head) == (phase, layer, kv_head))
    }

    /// How many were made since it was opened.
    pub(super) fn made(&self) -> usize {
        self.made
    }

    pub(super) fn push(&mut self, m: Measurement) -> Result<()> {
        self.append(&m)?;
        self.made += 1;
        self.done.insert(key_of(&m), m);
        Ok(())
    }

    /// What is known of a recipe on a text.
    pub(super) fn checked(&self, name: &str) -> Option<&Outcome> {
        self.checks.get(name)
    }

    pub(super) fn push_check(&mut self, name: &str, outcome: &Outcome) -> Result<()> {
        self.append(&Checked { checked: name.into(), outcome: outcome.clone() })?;
        self.checks.insert(name.into(), outcome.clone());
        Ok(())
    }

    fn append(&mut self, line: &impl Serialize) -> Result<()> {
        if let (Some(path), Some(file)) = (&self.path, &mut self.file) {
            let line = serde_json::to_string(line).map_err(|e| Error::writing(path, e.into()))? + "\n";
            file.write_all(line.as_bytes()).map_err(|e| Error::writing(path, e))?;
        }
        Ok(())
    }
}

fn key_of(m: &Measurement) -> (Phase, usize, usize, String) {
    (m.phase, m.layer, m.kv_head, format!("{} {}", m.method, m.params))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn window(keys: usize) -> Options {
        Options::new().with("window", keys)
    }

    fn made_up(kv_head: usize, params: &Options) -> Measurement {
        Measurement {
            phase: Phase::Prompt,
            layer: 0,
            kv_head,
            method: "sink_window".into(),
            params: params.clone(),
            error: Some(0.5),
            seconds: 0.25,
            cost: 0.25,
            exact: false,
            kl: None,
        }
    }

    fn key(machine: &str) -> Key {
        Key { machine: machine.into(), effort: "quick".into(), ..Key::default() }
    }

    #[test]
    fn measurements_survive_a_cut_line_and_are_refused_for_anything_else() {
        let path = std::env::temp_dir().join(format!("attlas-tune-{}.jsonl", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let steps = [16, 32].map(window);
        let mut state = State::open(Some(&path), &key("one")).unwrap();
        state.push(made_up(0, &steps[0])).unwrap();
        state.push(made_up(1, &steps[1])).unwrap();
        let second = State::open(Some(&path), &key("one")).unwrap_err().to_string();
        assert!(second.contains("being written") && second.contains("--state"), "{second}");
        drop(state);
        let whole = std::fs::read_to_string(&path).unwrap();
        assert_eq!(whole.lines().count(), 3);
        std::fs::write(&path, &whole[..whole.len() - 9]).unwrap();
        let again = State::open(Some(&path), &key("one")).unwrap();
        assert_eq!(again.done.clone().into_values().collect::<Vec<_>>(), [made_up(0, &steps[0])]);
        drop(again);
        assert_eq!(
            std::fs::read_to_string(&path).unwrap().lines().count(),
            2,
            "the rest of the line is gone"
        );
        let other = State::open(Some(&path), &key("two")).unwrap_err().to_string();
        assert!(other.contains("machine two") && other.contains("found machine one"), "{other}");
        assert!(other.contains("--state") && !other.contains("effort"), "{other}");
        let effort = Key { effort: "thorough".into(), ..key("one") };
        let other = State::open(Some(&path), &effort).unwrap_err().to_string();
        assert!(other.contains("found effort quick"), "{other}");
        let (slow, fast) =
            (Key { peak_gflops: Some(10.0), ..key("one") }, |g| Key { peak_gflops: Some(g), ..key("one") });
        assert!(slow.fits(&fast(39.0)) && slow.fits(&key("one")) && !slow.fits(&fast(41.0)));
        std::fs::write(&path, "{}\n").unwrap();
        assert!(matches!(State::open(Some(&path), &key("one")), Err(Error::Malformed { .. })));
        std::fs::remove_file(&path).unwrap();
    }
}
