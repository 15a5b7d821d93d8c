//! Calibrations of methods, as plain files.
//!
//! A method that learns from data does so once for every layer and key head. A file of calibrations is JSON:
//!
//! ```json
//! {"format": "attlas calibrations", "version": 1,
//!  "entries": [{"layer": 0, "kv_head": 0,
//!               "calibration": {"method": "loki", "n_kv_heads": 1, "n_heads": 3, "d": 64, "d_v": 64,
//!                               "matrices": {"basis.0": {"rows": 64, "cols": 64, "data": [0.1]}}}}]}
//! ```
//!
//! `layer` is `null` for inputs that name no layer. Numbers are written with all their digits: reading restores the
//! same bits. Planning refuses a calibration of another method or for other shapes. A folder stands for all files in it
//! whose names end in [`SUFFIX`].

use crate::error::{Error, Result};
use attlas::Calibration;
use serde::{Deserialize, Serialize};
use std::path::Path;

const FORMAT: &str = "attlas calibrations";
const VERSION: u32 = 1;

/// Ending of the names of calibration files in a folder.
pub const SUFFIX: &str = ".calibration.json";

/// Calibrations by layer, key head and method.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Calibrations {
    format: String,
    version: u32,
    entries: Vec<Entry>,
}

/// One calibration with its layer and key head.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// Layer, if the inputs named one.
    pub layer: Option<usize>,
    /// Key head within the layer.
    pub kv_head: usize,
    /// The calibration.
    pub calibration: Calibration,
}

impl Default for Calibrations {
    fn default() -> Self {
        Self { format: FORMAT.into(), version: VERSION, entries: Vec::new() }
    }
}

impl Calibrations {
    /// Adds a calibration.
    pub fn insert(&mut self, layer: Option<usize>, kv_head: usize, calibration: Calibration) {
        self.entries.push(Entry { layer, kv_head, calibration });
    }

    /// Returns all calibrations, in the order of insertion.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Returns true if there is none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns true if any belongs to this method.
    pub fn has(&self, method: &str) -> bool {
        self.entries.iter().any(|e| e.calibration.method == method)
    }

    /// Returns the calibrations of one method.
    #[must_use]
    pub fn of(&self, method: &str) -> Self {
        let entries = self.entries.iter().filter(|e| e.calibration.method == method).cloned().collect();
        Self { entries, ..Self::default() }
    }

    /// Returns a method's calibration for a key head of a layer; an error if the method has only others.
    pub fn find(&self, method: &str, layer: Option<usize>, kv_head: usize) -> Result<Option<&Calibration>> {
        let wanted = |e: &&Entry| e.calibration.method == method && (e.layer, e.kv_head) == (layer, kv_head);
        match self.entries.iter().find(wanted) {
            Some(entry) => Ok(Some(&entry.calibration)),
            None if self.has(method) => {
                let layer = layer.map_or(String::new(), |l| format!("layer {l}, "));
                Err(Error::Attention(attlas::Error::Calibration {
                    method: method.into(),
                    expected: format!("one for {layer}key head {kv_head}"),
                    found: format!("{} for others", self.entries.len()),
                }))
            }
            None => Ok(None),
        }
    }

    /// Writes a file, under a temporary name first.
    pub fn write(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_string(self)?;
        let mut name = path.file_name().unwrap_or_default().to_os_string();
        name.push(format!(".{}.part", std::process::id()));
        let part = path.with_file_name(name);
        let failed = |source| Error::Io { path: path.into(), source };
        std::fs::write(&part, text).map_err(failed)?;
        std::fs::rename(&part, path).map_err(|e| {
            // A partial file is useless.
            let _ = std::fs::remove_file(&part);
            failed(e)
        })
    }

    /// Reads a file, or every file of calibrations in a folder.
    pub fn read(path: &Path) -> Result<Self> {
        if !path.is_dir() {
            return Self::read_file(path);
        }
        let failed = |source| Error::Io { path: path.into(), source };
        let mut files = Vec::new();
        for entry in std::fs::read_dir(path).map_err(failed)? {
            let file = entry.map_err(failed)?.path();
            if file.to_string_lossy().ends_with(SUFFIX) {
                files.push(file);
            }
        }
        files.sort();
        if files.is_empty() {
            let expected = format!("files named *{SUFFIX}, as attlas calibrate writes them");
            return Err(Error::invalid(format!("the folder {}", path.display()), "without them", expected));
        }
        let mut all = Self::default();
        for file in files {
            all.entries.extend(Self::read_file(&file)?.entries);
        }
        Ok(all)
    }

    fn read_file(path: &Path) -> Result<Self> {
        let bytes = crate::checkpoint::read_file(path)?;
        let read: Self = serde_json::from_slice(&bytes).map_err(|e| Error::from(e).in_file(path))?;
        if (read.format.as_str(), read.version) != (FORMAT, VERSION) {
            let found = format!("{} of version {}", read.format, read.version);
            let expected = format!("{FORMAT} of version {VERSION}");
            return Err(Error::invalid("the format", found, expected).in_file(path));
        }
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use attlas::{Inputs, Options, Problem, Qkv, TensorRef, registry};

    fn learnt(problem: &Problem) -> Calibration {
        let n = problem.n_k;
        let data: Vec<f64> = (0..2 * n * problem.d).map(|i| (0.37 * i as f64).sin() / 3.0).collect();
        let view = |h: usize| TensorRef::bhnd(&data[..h * n * problem.d], [1, h, n, problem.d]).unwrap();
        let x = Qkv::new(view(problem.n_heads), view(problem.n_kv_heads), view(problem.n_kv_heads));
        let loki = registry::method("loki").unwrap();
        (loki.calibrate.unwrap())(problem, &Options::new(), &[Inputs::F64(x)]).unwrap()
    }

    #[test]
    fn a_file_gives_back_the_bits_and_refuses_other_shapes() {
        let problem = Problem::new(2, 100, 8).with_kv_heads(1);
        let mut all = Calibrations::default();
        all.insert(Some(3), 1, learnt(&problem));
        let folder = std::env::temp_dir().join(format!("attlas-calibration-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        assert!(Calibrations::read(&folder).unwrap_err().to_string().contains("attlas calibrate"));
        let path = folder.join("loki.calibration.json");
        all.write(&path).unwrap();
        assert_eq!(Calibrations::read(&folder).unwrap(), all);
        let again = Calibrations::read(&path).unwrap();
        assert_eq!((&again, &again.of("loki")), (&all, &all));
        assert!(again.of("routing").is_empty());
        let found = again.find("loki", Some(3), 1).unwrap().unwrap();
        let loki = registry::method("loki").unwrap();
        assert!(loki.plan_with(&problem, &Options::new(), Some(found)).is_ok());
        for other in [Problem::new(2, 100, 9).with_kv_heads(1), Problem::new(2, 100, 8)] {
            let refused = loki.plan_with(&other, &Options::new(), Some(found));
            assert!(matches!(refused, Err(attlas::Error::Calibration { .. })));
        }
        let other = registry::method("routing").unwrap();
        assert!(other.plan_with(&problem, &Options::new(), Some(found)).is_err());
        assert!(
            again.find("loki", Some(4), 1).is_err() && again.find("routing", Some(4), 1).unwrap().is_none()
        );
        for broken in [
            "",
            "{}",
            "[1]",
            &std::fs::read_to_string(&path).unwrap().replace("\"version\":1", "\"version\":9"),
        ] {
            std::fs::write(&path, broken).unwrap();
            assert!(matches!(Calibrations::read(&path), Err(Error::InFile { .. })), "{broken:.40}");
        }
        std::fs::remove_dir_all(&folder).unwrap();
        assert!(matches!(Calibrations::read(&path), Err(Error::Io { .. })));
    }
}
