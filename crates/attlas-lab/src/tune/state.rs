//! Storage of measurements: a file of JSON lines, appended as they are made.

use super::candidates::Candidate;
use super::{Outcome, Phase};
use crate::crew::Crew;
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
    /// Its settings.
    pub params: Options,
    /// Largest error of the query heads; none if it is not finite.
    pub error: Option<f64>,
    /// Seconds of set-up and run, all query heads together; for new tokens, of one of them.
    pub seconds: f64,
    /// Seconds over those of exact attention.
    pub cost: f64,
    /// True if its settings covered every key: exact attention was then timed.
    #[serde(default)]
    pub exact: bool,
    /// Divergence of the model's predictions with only this key head changed, nats, if it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kl: Option<f64>,
    /// The machine of the measurement, if several processes shared the search.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
}

/// Results of a model with a recipe on a text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Checked {
    /// SHA-256 of the recipe, the text and the number of tokens.
    pub(super) checked: String,
    pub(super) outcome: Outcome,
}

/// A machine that took part.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Node {
    /// Its name.
    pub node: String,
    /// Most billions of multiply-add operations per second of one of its processes; none if it could not be measured.
    pub peak_gflops: Option<f64>,
}

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Line {
    Checked(Checked),
    Measured(Measurement),
    Node(Node),
}

/// Ratio of measured peaks above which machines are not mixed in one search.
pub const PEAK_MIXED: f64 = 1.1;

/// Fails if the peaks of two machines differ by more than a tenth: times of their units are not comparable.
pub fn check_nodes<'n>(nodes: impl IntoIterator<Item = &'n Node>) -> Result<()> {
    let known: Vec<(&str, f64)> =
        nodes.into_iter().filter_map(|n| Some((n.node.as_str(), n.peak_gflops?))).collect();
    let by = |a: &&(&str, f64), b: &&(&str, f64)| a.1.total_cmp(&b.1);
    let (Some(slow), Some(fast)) = (known.iter().min_by(by), known.iter().max_by(by)) else { return Ok(()) };
    if fast.1 <= PEAK_MIXED * slow.1 {
        return Ok(());
    }
    Err(Error::argument(
        "the machines",
        "peaks within 10 % of each other, so that times compare; leave one out, or allow it with --mixed",
        format!("{} with {:.1} GF/s and {} with {:.1} GF/s", fast.0, fast.1, slow.0, slow.1),
    ))
}

/// Conditions of the measurements. Times of another machine, registry, effort or version are not comparable: every part
/// must agree.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Key {
    /// SHA-256 of the last layer's queries, keys and values, with the number of layers: the model, the text and its length.
    pub inputs: String,
    /// Processor, platform, instruction set and threads.
    pub machine: String,
    /// Measured multiply-add peak, billions of operations per second. Clocks and load change it: peaks within a factor
    /// of [`PEAK_CLASS`] count as the same machine.
    pub peak_gflops: Option<f64>,
    /// SHA-256 of the ids, parameters and defaults of all methods.
    pub registry: String,
    /// Effort of the search, which determines the number of runs behind a time.
    pub effort: String,
    /// Seed of methods that draw random numbers.
    pub seed: u64,
    /// Version of this program.
    pub version: String,
}

/// Ratio of measured peaks above which machines of one name count as different.
pub const PEAK_CLASS: f64 = 4.0;

impl Key {
    /// Returns true if times measured under `other` are comparable with ours.
    fn fits(&self, other: &Self) -> bool {
        let peak = match (self.peak_gflops, other.peak_gflops) {
            (Some(a), Some(b)) => a.max(b) <= PEAK_CLASS * a.min(b),
            _ => true,
        };
        peak && Self { peak_gflops: None, ..self.clone() } == Self { peak_gflops: None, ..other.clone() }
    }

    /// Returns the parts that differ from `other`, each as `name: ours, theirs`.
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

/// Measurements in a file, one JSON line each after a line with their conditions. The file stays locked for the
/// lifetime of this value: two searches would lose each other's lines.
#[derive(Debug)]
pub struct SearchState {
    path: Option<PathBuf>,
    /// Kept open for its lock and for appending.
    file: Option<File>,
    key: Key,
    done: BTreeMap<(Phase, usize, usize, String), Measurement>,
    checks: BTreeMap<String, Outcome>,
    nodes: BTreeMap<String, Node>,
    made: usize,
    /// Lines not yet sent to the processes of a crew.
    news: Vec<String>,
}

#[derive(Serialize, Deserialize)]
struct Header {
    format: String,
    version: u32,
    key: Key,
}

const FORMAT: &str = "attlas measurements";
const VERSION: u32 = 4;

impl SearchState {
    /// Opens the measurements under the conditions `key`, in a file if one is given. Measurements in the file are
    /// reused; a file with other conditions, or one that another process is writing, is refused. A truncated last line
    /// is dropped.
    pub fn open(path: Option<&Path>, key: &Key) -> Result<Self> {
        let mut state = Self {
            path: path.map(Into::into),
            file: None,
            key: key.clone(),
            done: BTreeMap::new(),
            checks: BTreeMap::new(),
            nodes: BTreeMap::new(),
            made: 0,
            news: Vec::new(),
        };
        if let Some(path) = path {
            // Kept until the new file is in place with its own lock.
            let there = output::lock(path)?;
            if there.is_some() {
                state.merge(path)?;
            }
            state.rewrite()?;
        }
        Ok(state)
    }

    /// Opens the measurements for all processes of a crew: process 0 has the file, and the others its contents. `merge`
    /// adds the measurements of other files. The peak of every machine is measured and kept; machines that differ too
    /// much are refused unless `mixed` is set.
    pub fn open_with(
        path: &Path,
        key: &Key,
        merge: &[PathBuf],
        mixed: bool,
        crew: &dyn Crew,
    ) -> Result<Self> {
        let mut state = Self::open(crew.leads().then_some(path), key)?;
        if crew.leads() && !merge.is_empty() {
            merge.iter().try_for_each(|other| state.merge(other))?;
            state.rewrite()?;
        }
        if crew.is_alone() {
            return Ok(state);
        }
        let broken =
            |e: serde_json::Error| Error::argument("what another process says", "a line of the state", e);
        for line in crew.broadcast(state.lines()?.join("\n")).lines().filter(|_| !crew.leads()) {
            state.absorb(line)?;
        }
        let own = Node { node: crew.node().unwrap_or_default(), peak_gflops: key.peak_gflops };
        let mut here: BTreeMap<String, Node> = BTreeMap::new();
        for line in crew.gather(&serde_json::to_string(&own).map_err(broken)?) {
            let node: Node = serde_json::from_str(&line).map_err(broken)?;
            let known = here.entry(node.node.clone()).or_insert(node.clone());
            // The best of a machine's processes counts, because they measure at the same time.
            known.peak_gflops = known.peak_gflops.into_iter().chain(node.peak_gflops).reduce(f64::max);
        }
        let before = state.nodes.clone();
        let all = before.values().filter(|n| !here.contains_key(&n.node)).chain(here.values());
        if !mixed {
            check_nodes(all)?;
        }
        for node in here.into_values() {
            if crew.leads() {
                state.append(&node)?;
            }
            state.nodes.insert(node.node.clone(), node);
        }
        Ok(state)
    }

    /// Returns the number of measurements.
    pub fn len(&self) -> usize {
        self.done.len()
    }

    /// Returns true if there are no measurements.
    pub fn is_empty(&self) -> bool {
        self.done.is_empty()
    }

    /// Returns the methods that computed exact attention wherever they were measured, because their settings cover this
    /// length.
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
                Ok(Line::Node(n)) => {
                    self.nodes.insert(n.node.clone(), n);
                }
                // The truncated last line of an interrupted run.
                Err(_) if i + 1 == lines.len() => {}
                Err(e) => return Err(malformed(format!("line {}: {e}", i + 2))),
            }
        }
        Ok(())
    }

    /// Rewrites the whole file.
    pub fn rewrite(&mut self) -> Result<()> {
        let Some(path) = &self.path else { return Ok(()) };
        let header = Header { format: FORMAT.into(), version: VERSION, key: self.key.clone() };
        let failed = |e: serde_json::Error| Error::writing(path, e.into());
        let mut text = serde_json::to_string(&header).map_err(failed)? + "\n";
        for line in self.lines()? {
            text += &(line + "\n");
        }
        self.file = Some(output::write_locked(path, text.as_bytes())?);
        Ok(())
    }

    /// Returns all lines but the first.
    fn lines(&self) -> Result<Vec<String>> {
        let failed = |e| Error::argument("a measurement", "one that can be written", e);
        let nodes = self.nodes.values().map(serde_json::to_string);
        let done = self.done.values().map(serde_json::to_string);
        let check = |(checked, outcome): (&String, &Outcome)| {
            serde_json::to_string(&Checked { checked: checked.clone(), outcome: outcome.clone() })
        };
        let all = nodes.chain(done).chain(self.checks.iter().map(check));
        all.map(|line| line.map_err(failed)).collect()
    }

    /// Takes a line from another process if it is new.
    pub(super) fn absorb(&mut self, line: &str) -> Result<()> {
        let broken = |e| Error::argument("what another process says", "a line of the state", e);
        match serde_json::from_str::<Line>(line).map_err(broken)? {
            Line::Measured(m) => {
                // A measured divergence is never overwritten by a line without one.
                let known = self.done.get(&key_of(&m));
                if known.is_none_or(|k| *k != m && (k.kl.is_none() || m.kl.is_some())) {
                    self.append(&m)?;
                    self.done.insert(key_of(&m), m);
                }
            }
            Line::Checked(c) if !self.checks.contains_key(&c.checked) => {
                self.append(&c)?;
                self.checks.insert(c.checked, c.outcome);
            }
            Line::Checked(_) => {}
            Line::Node(n) => drop(self.nodes.insert(n.node.clone(), n)),
        }
        Ok(())
    }

    /// Keeps a new measurement and sends it to process 0, which also takes the lines that have arrived.
    pub(super) fn keep(&mut self, m: Measurement, crew: &dyn Crew) -> Result<()> {
        if !crew.leads() {
            let failed = |e| Error::argument("a measurement", "one that can be written", e);
            crew.report(&serde_json::to_string(&m).map_err(failed)?);
        }
        self.push(m)?;
        crew.arrived().iter().try_for_each(|line| self.absorb(line))
    }

    /// Ends a list of measurements: every process gets those of all.
    pub(super) fn settle(&mut self, crew: &dyn Crew) -> Result<()> {
        crew.end(&mut |line| self.absorb(line))?;
        let news = std::mem::take(&mut self.news);
        if !crew.is_alone() {
            let shared = crew.broadcast(news.join("\n"));
            shared.lines().filter(|_| !crew.leads()).try_for_each(|line| self.absorb(line))?;
            self.news.clear();
        }
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

    /// Returns all measurements of a key head.
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

    /// Returns the number of measurements made since opening.
    pub(super) fn made(&self) -> usize {
        self.made
    }

    pub(super) fn push(&mut self, m: Measurement) -> Result<()> {
        self.append(&m)?;
        self.made += 1;
        self.done.insert(key_of(&m), m);
        Ok(())
    }

    /// Returns the known results of a recipe on a text.
    pub(super) fn checked(&self, name: &str) -> Option<&Outcome> {
        self.checks.get(name)
    }

    pub(super) fn push_check(&mut self, name: &str, outcome: &Outcome) -> Result<()> {
        self.append(&Checked { checked: name.into(), outcome: outcome.clone() })?;
        self.checks.insert(name.into(), outcome.clone());
        Ok(())
    }

    fn append(&mut self, line: &impl Serialize) -> Result<()> {
        let failed = |e| Error::argument("a measurement", "one that can be written", e);
        let line = serde_json::to_string(line).map_err(failed)?;
        if let (Some(path), Some(file)) = (&self.path, &mut self.file) {
            file.write_all(format!("{line}\n").as_bytes()).map_err(|e| Error::writing(path, e))?;
        }
        self.news.push(line);
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
            node: None,
        }
    }

    fn key(machine: &str) -> Key {
        Key { machine: machine.into(), effort: "quick".into(), ..Key::default() }
    }

    #[test]
    fn machines_whose_peaks_differ_by_more_than_a_tenth_are_not_mixed() {
        let node = |name: &str, peak: Option<f64>| Node { node: name.into(), peak_gflops: peak };
        check_nodes(&[node("a", Some(100.0)), node("b", Some(109.0)), node("c", None)]).unwrap();
        check_nodes(&[]).unwrap();
        let error = check_nodes(&[node("a", Some(100.0)), node("b", Some(111.0))]).unwrap_err().to_string();
        assert!(error.contains("b with 111") && error.contains("--mixed"), "{error}");
    }

    #[test]
    fn what_the_model_said_is_not_forgotten() {
        let mut state = SearchState::open(None, &key("one")).unwrap();
        let plain = made_up(0, &window(16));
        let said = Measurement { kl: Some(0.5), node: Some("there".into()), ..plain.clone() };
        for m in [&plain, &said, &plain] {
            state.absorb(&serde_json::to_string(m).unwrap()).unwrap();
        }
        assert_eq!(state.done.into_values().collect::<Vec<_>>(), [said]);
        assert!(SearchState::open(None, &key("one")).unwrap().absorb("{}").is_err());
    }

    #[test]
    fn measurements_survive_a_cut_line_and_are_refused_for_anything_else() {
        let path = std::env::temp_dir().join(format!("attlas-tune-{}.jsonl", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let steps = [16, 32].map(window);
        let mut state = SearchState::open(Some(&path), &key("one")).unwrap();
        state.push(made_up(0, &steps[0])).unwrap();
        state.push(made_up(1, &steps[1])).unwrap();
        let second = SearchState::open(Some(&path), &key("one")).unwrap_err().to_string();
        assert!(second.contains("being written") && second.contains("--state"), "{second}");
        drop(state);
        let whole = std::fs::read_to_string(&path).unwrap();
        assert_eq!(whole.lines().count(), 3);
        std::fs::write(&path, &whole[..whole.len() - 9]).unwrap();
        let again = SearchState::open(Some(&path), &key("one")).unwrap();
        assert_eq!(again.done.clone().into_values().collect::<Vec<_>>(), [made_up(0, &steps[0])]);
        drop(again);
        assert_eq!(
            std::fs::read_to_string(&path).unwrap().lines().count(),
            2,
            "the rest of the line is gone"
        );
        let other = SearchState::open(Some(&path), &key("two")).unwrap_err().to_string();
        assert!(other.contains("machine two") && other.contains("found machine one"), "{other}");
        assert!(other.contains("--state") && !other.contains("effort"), "{other}");
        let effort = Key { effort: "thorough".into(), ..key("one") };
        let other = SearchState::open(Some(&path), &effort).unwrap_err().to_string();
        assert!(other.contains("found effort quick"), "{other}");
        let (slow, fast) =
            (Key { peak_gflops: Some(10.0), ..key("one") }, |g| Key { peak_gflops: Some(g), ..key("one") });
        assert!(slow.fits(&fast(39.0)) && slow.fits(&key("one")) && !slow.fits(&fast(41.0)));
        std::fs::write(&path, "{}\n").unwrap();
        assert!(matches!(SearchState::open(Some(&path), &key("one")), Err(Error::Malformed { .. })));
        std::fs::remove_file(&path).unwrap();
    }
}
