//! Which method attends where: a versioned TOML file with a default and rules for layers and heads.
//!
//! ```toml
//! version = 1
//! producer = "written by hand"
//!
//! [default]
//! method = "exact"
//!
//! [[rule]]                       # later rules win where several match
//! layers = "4-20,25"             # or [4, 5, 25]; all layers where absent
//! heads = "0-2"                  # query heads; all of them where absent
//! method = "sink_window"
//! params = { sinks = 4, window = 256 }
//! measured = { error = 0.012, cost = 0.31 }
//! ```
//!
//! [`Recipe::resolve`] turns it into [`Part`]s: neighbouring heads that share a method and its settings are
//! planned together, and a method that cannot attend causally is refused with all its reasons before any
//! token is run.

use crate::config::ModelConfig;
use crate::error::{Error, Result};
use attlas::params::Value;
use attlas::{Method, Options, Problem, registry};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;

/// The version of the format that is written.
pub const VERSION: u32 = 1;

/// A method for every head of a model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// Version of the format.
    pub version: u32,
    /// What wrote it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub producer: Option<String>,
    /// The model it was made for, in words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// What was measured when it was made: names and numbers, for people.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub evidence: BTreeMap<String, Value>,
    /// What attends where no rule says otherwise.
    #[serde(default)]
    pub default: Choice,
    /// Exceptions; the last one that matches a head decides.
    #[serde(default, rename = "rule", skip_serializing_if = "Vec::is_empty")]
    pub rules: Vec<Rule>,
}

/// A method with its settings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Choice {
    /// Id of the method.
    pub method: String,
    /// Its parameters, seeds among them; defaults where absent.
    #[serde(default, skip_serializing_if = "Options::is_empty")]
    pub params: Options,
}

/// A method for some heads.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    /// Layers it holds for, counted from 0; all where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layers: Option<Numbers>,
    /// Query heads it holds for, counted from 0; all where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub heads: Option<Numbers>,
    /// Id of the method.
    pub method: String,
    /// Its parameters, seeds among them; defaults where absent.
    #[serde(default, skip_serializing_if = "Options::is_empty")]
    pub params: Options,
    /// What was measured when the rule was made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured: Option<Measured>,
}

/// The figures that a rule was chosen by.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measured {
    /// Relative error of the heads' outputs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<f64>,
    /// Time as a share of exact attention's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<f64>,
}

/// A set of whole numbers, written as `"0-3,7"` or as a list.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Written", into = "String")]
pub struct Numbers(BTreeSet<usize>);

#[derive(Deserialize)]
#[serde(untagged)]
enum Written {
    One(usize),
    Text(String),
    List(Vec<usize>),
}

/// Numbers above this are refused, so that a range cannot exhaust memory.
const MAX_NUMBER: usize = 1 << 16;

impl Numbers {
    /// Whether `n` is among them.
    pub fn contains(&self, n: usize) -> bool {
        self.0.contains(&n)
    }

    /// The numbers, ascending.
    pub fn iter(&self) -> impl Iterator<Item = usize> {
        self.0.iter().copied()
    }

    /// An error that says what there is if one of them is not below `n`.
    pub fn check(&self, what: &str, n: usize) -> Result<()> {
        match self.0.last() {
            Some(&last) if last >= n => {
                Err(Error::invalid(what, last, format!("0 to {}", n.saturating_sub(1))))
            }
            _ => Ok(()),
        }
    }
}

impl FromIterator<usize> for Numbers {
    fn from_iter<I: IntoIterator<Item = usize>>(numbers: I) -> Self {
        Self(numbers.into_iter().collect())
    }
}

impl std::str::FromStr for Numbers {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let wrong = || Error::invalid("a list of numbers", format!("{text:?}"), "a list such as 0-3,7");
        let mut numbers = BTreeSet::new();
        for part in text.split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let number =
                |t: &str| t.trim().parse::<usize>().ok().filter(|&n| n < MAX_NUMBER).ok_or_else(wrong);
            let (first, last) = (number(first)?, number(last)?);
            if first > last {
                return Err(wrong());
            }
            numbers.extend(first..=last);
        }
        Ok(Self(numbers))
    }
}

impl std::fmt::Display for Numbers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut spans: Vec<(usize, usize)> = Vec::new();
        for &n in &self.0 {
            match spans.last_mut() {
                Some((_, last)) if *last + 1 == n => *last = n,
                _ => spans.push((n, n)),
            }
        }
        let words: Vec<String> =
            spans.into_iter().map(|(a, b)| if a == b { a.to_string() } else { format!("{a}-{b}") }).collect();
        f.write_str(&words.join(","))
    }
}

impl TryFrom<Written> for Numbers {
    type Error = Error;

    fn try_from(written: Written) -> Result<Self> {
        match written {
            Written::One(n) => Ok(Self([n].into())),
            Written::Text(text) => text.parse(),
            Written::List(list) => Ok(list.into_iter().collect()),
        }
    }
}

impl From<Numbers> for String {
    fn from(numbers: Numbers) -> Self {
        numbers.to_string()
    }
}

impl Default for Choice {
    /// Exact attention.
    fn default() -> Self {
        Self { method: registry::baseline().id.into(), params: Options::new() }
    }
}

impl Default for Recipe {
    /// Exact attention everywhere.
    fn default() -> Self {
        Self::uniform(registry::baseline().id, Options::new())
    }
}

impl Recipe {
    /// The same method everywhere.
    pub fn uniform(method: &str, params: Options) -> Self {
        let default = Choice { method: method.into(), params };
        Self {
            version: VERSION,
            producer: None,
            model: None,
            evidence: BTreeMap::new(),
            default,
            rules: Vec::new(),
        }
    }

    /// Reads a recipe.
    pub fn from_toml(text: &str) -> Result<Self> {
        let recipe: Self = toml::from_str(text).map_err(|e| {
            let line =
                |at: std::ops::Range<usize>| 1 + text[..at.start.min(text.len())].matches('\n').count();
            let place = e.span().map_or(String::new(), |at| format!("line {}: ", line(at)));
            Error::Recipe(place + &e.message().replace('\n', ", "))
        })?;
        if recipe.version != VERSION {
            return Err(Error::invalid("the version of the recipe", recipe.version, VERSION.to_string()));
        }
        Ok(recipe)
    }

    /// Reads the recipe in a file.
    pub fn open(path: &Path) -> Result<Self> {
        let bytes = crate::checkpoint::read_file(path)?;
        Self::from_toml(&String::from_utf8_lossy(&bytes)).map_err(|e| e.in_file(path))
    }

    /// The recipe as text.
    pub fn to_toml(&self) -> Result<String> {
        toml::to_string(self).map_err(|e| Error::Recipe(e.to_string()))
    }

    /// The method of one query head, with its settings.
    pub fn choice(&self, layer: usize, head: usize) -> (&str, &Options) {
        let matches = |numbers: &Option<Numbers>, n| numbers.as_ref().is_none_or(|x| x.contains(n));
        self.rules
            .iter()
            .rev()
            .find(|r| matches(&r.layers, layer) && matches(&r.heads, head))
            .map_or((&self.default.method, &self.default.params), |r| (&r.method, &r.params))
    }

    /// What attends in one layer with `n_heads` query heads over `n_kv_heads` key heads. Whether the methods can is
    /// for the caller to ask.
    pub fn parts(&self, layer: usize, n_heads: usize, n_kv_heads: usize) -> Result<Vec<Part>> {
        let size = n_heads / n_kv_heads.max(1);
        let mut runs: Vec<Part> = Vec::new();
        for head in 0..n_heads {
            let (id, options) = self.choice(layer, head);
            let method = registry::method(id)?;
            let group = head / size.max(1);
            match runs.last_mut() {
                // Runs of equal choices inside a key head; whole key heads are joined below.
                Some(run) if run.groups.start == group && run.is(method, options) => run.heads.end = head + 1,
                _ => runs.push(Part {
                    method,
                    options: options.clone(),
                    heads: head..head + 1,
                    groups: group..group + 1,
                }),
            }
        }
        Ok(join_whole_groups(runs, size))
    }

    /// What attends in each layer of a causal model, or why a method cannot.
    pub fn resolve(&self, config: &ModelConfig) -> Result<Vec<Vec<Part>>> {
        for rule in &self.rules {
            if let Some(layers) = &rule.layers {
                layers.check("a layer of the recipe", config.n_layers)?;
            }
            if let Some(heads) = &rule.heads {
                heads.check("a head of the recipe", config.n_heads)?;
            }
        }
        let mut accepted: Vec<(&'static Method, Options)> = Vec::new();
        let mut layers = Vec::with_capacity(config.n_layers);
        for layer in 0..config.n_layers {
            let parts = self.parts(layer, config.n_heads, config.n_kv_heads)?;
            for part in &parts {
                let known =
                    |(m, o): &(&'static Method, Options)| std::ptr::eq(*m, part.method) && *o == part.options;
                if !accepted.iter().any(known) {
                    check_causal(part.method, &part.options, config)?;
                    accepted.push((part.method, part.options.clone()));
                }
            }
            layers.push(parts);
        }
        Ok(layers)
    }
}

/// Heads of a layer that are planned together: all of several key heads, or some of one.
#[derive(Clone, Debug)]
pub struct Part {
    /// The method.
    pub method: &'static Method,
    /// Its settings.
    pub options: Options,
    /// Query heads.
    pub heads: Range<usize>,
    /// Key heads.
    pub groups: Range<usize>,
}

impl Part {
    fn is(&self, method: &'static Method, options: &Options) -> bool {
        std::ptr::eq(self.method, method) && self.options == *options
    }

    /// Whether this is exact attention.
    pub fn is_baseline(&self) -> bool {
        std::ptr::eq(self.method, registry::baseline())
    }
}

fn join_whole_groups(runs: Vec<Part>, size: usize) -> Vec<Part> {
    let mut parts: Vec<Part> = Vec::new();
    for run in runs {
        let whole = run.heads.len() == size;
        match parts.last_mut() {
            Some(last)
                if whole
                    && last.heads.len() == last.groups.len() * size
                    && last.is(run.method, &run.options) =>
            {
                last.heads.end = run.heads.end;
                last.groups.end = run.groups.end;
            }
            _ => parts.push(run),
        }
    }
    parts
}

/// Plans a short causal problem, so that a refusal comes with all its reasons before any work.
fn check_causal(method: &'static Method, options: &Options, c: &ModelConfig) -> Result<()> {
    let problem = Problem::new(c.n_heads, 64, c.head_dim).with_kv_heads(c.n_kv_heads).causal();
    method.plan(&problem, options)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Architecture;

    fn config() -> ModelConfig {
        ModelConfig {
            architecture: Architecture::Llama,
            hidden: 64,
            intermediate: 64,
            n_layers: 4,
            n_heads: 6,
            n_kv_heads: 2,
            head_dim: 16,
            latent: None,
            vocab: 10,
            max_positions: 100,
            norm_eps: 1e-5,
            rope: None,
            local_rope: None,
            activation: crate::config::Activation::Silu,
            attention_softcap: None,
            logit_softcap: None,
            unrotated: Vec::new(),
            experts: None,
            multipliers: crate::config::Multipliers::default(),
            windows: vec![None; 4],
            tied: true,
            token_types: 0,
            eos: Vec::new(),
        }
    }

    const EXAMPLE: &str = r#"
        version = 1
        producer = "a test"
        [evidence]
        text = "a book"
        tokens = 2048
        kl_mean = 0.25
        [default]
        method = "exact"
        [[rule]]
        layers = "1-2"
        method = "sink_window"
        params = { window = 32, sinks = 2 }
        measured = { error = 0.01, cost = 0.5 }
        [[rule]]
        layers = [2, 3]
        heads = "0-2,5"
        method = "top_k"
    "#;

    #[test]
    fn recipes_survive_being_written() {
        let recipe = Recipe::from_toml(EXAMPLE).unwrap();
        assert_eq!(Recipe::from_toml(&recipe.to_toml().unwrap()).unwrap(), recipe);
        let uniform = Recipe::uniform("hyper", Options::new().with("seed", 3u64));
        assert_eq!(Recipe::from_toml(&uniform.to_toml().unwrap()).unwrap(), uniform);
    }

    #[test]
    fn the_last_rule_that_matches_decides_and_equal_neighbours_are_joined() {
        let recipe = Recipe::from_toml(EXAMPLE).unwrap();
        let layers = recipe.resolve(&config()).unwrap();
        let seen: Vec<Vec<(&str, Range<usize>, Range<usize>)>> = layers
            .iter()
            .map(|parts| parts.iter().map(|p| (p.method.id, p.heads.clone(), p.groups.clone())).collect())
            .collect();
        assert_eq!(seen[0], [("exact", 0..6, 0..2)]);
        assert_eq!(seen[1], [("sink_window", 0..6, 0..2)]);
        assert_eq!(seen[2], [("top_k", 0..3, 0..1), ("sink_window", 3..5, 1..2), ("top_k", 5..6, 1..2)]);
        assert_eq!(seen[3], [("top_k", 0..3, 0..1), ("exact", 3..5, 1..2), ("top_k", 5..6, 1..2)]);
        assert_eq!(layers[1][0].options.get("window"), Some(&32usize.into()));
    }

    #[test]
    fn methods_without_a_causal_form_are_refused_with_the_reason() {
        let refused = registry::METHODS.iter().find(|m| !m.claims.causal).unwrap();
        match Recipe::uniform(refused.id, Options::new()).resolve(&config()) {
            Err(Error::Attention(attlas::Error::Unsupported { method, reasons })) => {
                assert_eq!(method, refused.id);
                assert!(!reasons.is_empty());
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn mistakes_are_named() {
        let refused =
            |text: &str| Recipe::from_toml(text).and_then(|r| r.resolve(&config())).unwrap_err().to_string();
        assert!(refused("version = 2").contains("version"));
        assert!(refused("version = 1\nmethods = 3").contains("methods"));
        assert!(refused("version = 1\n[default]\nmethod = \"nonsense\"").contains("nonsense"));
        assert!(refused("version = 1\n[[rule]]\nlayers = \"4\"\nmethod = \"exact\"").contains("0 to 3"));
        assert!(refused("version = 1\n[[rule]]\nheads = \"9\"\nmethod = \"exact\"").contains("0 to 5"));
        assert!(refused("version = 1\n[[rule]]\nheads = \"3-1\"\nmethod = \"exact\"").contains("0-3,7"));
        assert!(
            refused("version = 1\n[[rule]]\nheads = \"0-99999999999\"\nmethod = \"exact\"").contains("0-3,7")
        );
        assert!(
            refused("version = 1\n[default]\nmethod = \"top_k\"\nparams = { keys = 0 }").contains("keys")
        );
    }

    #[test]
    fn numbers_are_written_as_spans() {
        let numbers: Numbers = "7,0-3, 5".parse().unwrap();
        assert_eq!(numbers.to_string(), "0-3,5,7");
        assert!(["", "a", "1-", "-", "3-2"].iter().all(|t| t.parse::<Numbers>().is_err()));
    }
}
