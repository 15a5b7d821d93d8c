//! The tables of docs/benchmarks/real-heads.md: methods on heads of SmolLM2 while it reads a text not used for tuning.
//!
//! ```text
//! scripts/fetch-models --lee
//! cargo run --release -p xtask --example real_heads -- errors|near|speed|decode [--model GGUF] [--text FILE,FILE]
//!     [--calibrate FILE] [--traces FOLDER] [--layers 1,5,9] [--n 8192,32768] [--runs 3] [--try 'ID PARAM=VALUE …']
//! ```
//!
//! `errors` compares methods that compute at most a fifth of the scores with a window; `near` compares every method
//! with a near field with that near field alone; `speed` compares prompts, and `decode` single tokens, with exact
//! attention. `--try`, which may be repeated, replaces the methods of a table. Queries, keys and values are cached in
//! `--traces`: a second run starts at once. Lengths past the trained context stretch the base of the rotation
//! (NTK-aware).

mod decode;
mod errors;
mod heads;
mod speed;

use attlas::{Method, Options, registry};
use heads::Place;
use std::path::PathBuf;

pub(crate) type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// A method with its settings.
#[derive(Clone, Debug)]
pub(crate) struct Subject {
    pub(crate) method: &'static Method,
    pub(crate) options: Options,
}

impl Subject {
    /// Parses `id param=value param=value`.
    pub(crate) fn read(text: &str) -> Outcome<Self> {
        let mut words = text.split_whitespace();
        let method = registry::method(words.next().ok_or("--try needs the id of a method")?)?;
        let mut options = Options::new();
        for word in words {
            let (name, value) =
                word.split_once('=').ok_or_else(|| format!("expected param=value, found '{word}'"))?;
            options.set(name, value);
        }
        Ok(Self { method, options })
    }

    /// Adds a setting.
    pub(crate) fn with(&self, name: &str, value: impl Into<attlas::params::Value>) -> Self {
        Self { method: self.method, options: self.options.clone().with(name, value) }
    }

    /// Formats id and settings in one line.
    pub(crate) fn name(&self) -> String {
        let settings: Vec<String> = self.options.iter().map(|(k, v)| format!("{k}={v}")).collect();
        [self.method.id.to_string(), settings.join(" ")].join(" ").trim_end().to_string()
    }
}

/// Command-line arguments.
#[derive(Debug)]
pub(crate) struct Args {
    pub(crate) place: Place,
    pub(crate) layers: Option<Vec<usize>>,
    pub(crate) lengths: Option<Vec<usize>>,
    pub(crate) runs: usize,
    pub(crate) subjects: Vec<Subject>,
}

impl Args {
    /// Returns the methods of `--try`, or else those in `listed`.
    pub(crate) fn subjects_or(&self, listed: &[&str]) -> Outcome<Vec<Subject>> {
        match self.subjects.is_empty() {
            true => listed.iter().map(|text| Subject::read(text)).collect(),
            false => Ok(self.subjects.clone()),
        }
    }
}

fn main() -> Outcome<()> {
    let mut words = std::env::args().skip(1);
    let table = words.next().ok_or("name a table: errors, near, speed or decode")?;
    let mut args =
        Args { place: Place::default(), layers: None, lengths: None, runs: 3, subjects: Vec::new() };
    while let Some(flag) = words.next() {
        let value = words.next().ok_or_else(|| format!("{flag} needs a value"))?;
        let numbers = || value.split(',').map(str::parse).collect::<Result<Vec<usize>, _>>();
        match flag.as_str() {
            "--model" => args.place.model = value.into(),
            "--text" => args.place.texts = value.split(',').map(PathBuf::from).collect(),
            "--calibrate" => args.place.calibration = value.into(),
            "--traces" => args.place.traces = value.into(),
            "--layers" => args.layers = Some(numbers()?),
            "--n" => args.lengths = Some(numbers()?),
            "--runs" => args.runs = value.parse()?,
            "--try" => args.subjects.push(Subject::read(&value)?),
            _ => return Err(format!("unknown option {flag}").into()),
        }
    }
    match table.as_str() {
        "errors" => errors::errors(&args),
        "near" => errors::near(&args),
        "speed" => speed::speed(&args),
        "decode" => decode::decode(&args),
        _ => Err(format!("unknown table {table}: errors, near, speed or decode").into()),
    }
}
