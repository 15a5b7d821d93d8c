//! Recipes: versioned TOML files that assign methods to heads, by a default and rules for layers and heads.
//!
//! ```toml
//! version = 1
//! producer = "written by hand"
//!
//! [default]
//! method = "exact"
//!
//! [[rule]]                       # later rules win where several match
//! layers = "4-20,25"             # or [4, 5, 25]; all layers if absent
//! heads = "0-2"                  # query heads; all of them if absent
//! method = "sink_window"
//! params = { sinks = 4, window = 256 }
//! measured = { error = 0.012, cost = 0.31 }
//!
//! [rule.decode]                  # another method for new tokens; the same one if absent
//! method = "quest"
//! ```
//!
//! [`Recipe::resolve`] turns a recipe into [`HeadRun`]s: neighbouring heads with the same method and settings are
//! planned together, and a method without a causal form is refused with all its reasons before any token is run.

use crate::calibration::Calibrations;
use crate::config::ModelConfig;
use crate::error::{Error, Result};
use attlas::params::Value;
use attlas::{Calibration, Method, Options, Problem, registry};
use attlas_num::rope::{Layout, Scaling};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Version of the written format.
pub const VERSION: u32 = 1;

/// A method for every head of a model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// Version of the format.
    pub version: u32,
    /// The program that wrote it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub producer: Option<String>,
    /// Description of its model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// Tokens of the longest text it was checked on; its effect on longer ones is unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens: Option<usize>,
    /// Number of tokens, the new one included, below which new tokens attend exactly, whatever the rules say.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub decode_from: usize,
    /// Calibrations of its methods: a file or a folder, beside the recipe unless the path is absolute.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub calibration: Option<PathBuf>,
    /// The calibrations themselves; [`Recipe::open`] reads them.
    #[serde(skip)]
    pub calibrations: Arc<Calibrations>,
    /// Measurements from its making: names and numbers, as information.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub evidence: BTreeMap<String, Value>,
    /// The method if no rule applies.
    #[serde(default)]
    pub default: Choice,
    /// Exceptions; the last rule that matches a head applies.
    #[serde(default, rename = "rule", skip_serializing_if = "Vec::is_empty")]
    pub rules: Vec<Rule>,
}

/// A method with its settings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Choice {
    /// Id of the method.
    pub method: String,
    /// Its parameters, seeds among them; defaults if absent.
    #[serde(default, skip_serializing_if = "Options::is_empty")]
    pub params: Options,
    /// The method for new tokens; the same as for prompts if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decode: Option<Decode>,
}

/// A method for new tokens, with its settings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Decode {
    /// Id of the method.
    pub method: String,
    /// Its parameters, seeds among them; defaults if absent.
    #[serde(default, skip_serializing_if = "Options::is_empty")]
    pub params: Options,
    /// Measurements from its choice.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured: Option<Measured>,
}

/// A method for some heads.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    /// Layers of the rule, counted from 0; all if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layers: Option<Numbers>,
    /// Query heads of the rule, counted from 0; all if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub heads: Option<Numbers>,
    /// Id of the method.
    pub method: String,
    /// Its parameters, seeds among them; defaults if absent.
    #[serde(default, skip_serializing_if = "Options::is_empty")]
    pub params: Options,
    /// Measurements from the making of the rule.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured: Option<Measured>,
    /// The method for new tokens; the same as for prompts if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decode: Option<Decode>,
}

/// The figures behind the choice of a rule.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measured {
    /// Relative error of the heads' outputs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<f64>,
    /// Time as a share of exact attention's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<f64>,
    /// Divergence of the model's predictions with only this rule, nats.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kl: Option<f64>,
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

/// Largest number accepted, which keeps a range from exhausting memory.
const MAX_NUMBER: usize = 1 << 16;

impl Numbers {
    /// Returns true if the set contains `n`.
    pub fn contains(&self, n: usize) -> bool {
        self.0.contains(&n)
    }

    /// The numbers, ascending.
    pub fn iter(&self) -> impl Iterator<Item = usize> {
        self.0.iter().copied()
    }

    /// Fails if a number is not below `n`; the error names the valid range.
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

fn is_zero(n: &usize) -> bool {
    *n == 0
}

impl From<Numbers> for String {
    fn from(numbers: Numbers) -> Self {
        numbers.to_string()
    }
}

impl Default for Choice {
    /// Exact attention.
    fn default() -> Self {
        Self { method: registry::baseline().id.into(), params: Options::new(), decode: None }
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
        let default = Choice { method: method.into(), params, decode: None };
        Self {
            version: VERSION,
            producer: None,
            model: None,
            tokens: None,
            decode_from: 0,
            calibration: None,
            calibrations: Arc::default(),
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
        let mut recipe = Self::from_toml(&String::from_utf8_lossy(&bytes)).map_err(|e| e.in_file(path))?;
        if let Some(learnt) = &recipe.calibration {
            let beside = path.parent().unwrap_or(Path::new("")).join(learnt);
            recipe.calibrations = Arc::new(Calibrations::read(&beside)?);
        }
        Ok(recipe)
    }

    /// Returns the recipe with these calibrations.
    #[must_use]
    pub fn with_calibrations(mut self, calibrations: Arc<Calibrations>) -> Self {
        self.calibrations = calibrations;
        self
    }

    /// Formats the recipe as TOML.
    pub fn to_toml(&self) -> Result<String> {
        toml::to_string(self).map_err(|e| Error::Recipe(e.to_string()))
    }

    /// Returns the method of one query head, with its settings.
    pub fn choice(&self, layer: usize, head: usize) -> (&str, &Options) {
        let matches = |numbers: &Option<Numbers>, n| numbers.as_ref().is_none_or(|x| x.contains(n));
        self.rules
            .iter()
            .rev()
            .find(|r| matches(&r.layers, layer) && matches(&r.heads, head))
            .map_or((&self.default.method, &self.default.params), |r| (&r.method, &r.params))
    }

    /// Returns the method of one query head for new tokens, if it differs from that for prompts.
    pub fn decode_choice(&self, layer: usize, head: usize) -> Option<&Decode> {
        let matches = |numbers: &Option<Numbers>, n| numbers.as_ref().is_none_or(|x| x.contains(n));
        let rule = self.rules.iter().rev().find(|r| matches(&r.layers, layer) && matches(&r.heads, head));
        rule.map_or(self.default.decode.as_ref(), |r| r.decode.as_ref())
    }

    /// Returns true if every head has exact attention in full precision.
    pub fn is_exact(&self) -> bool {
        let exact = |method: &str, params: &Options| method == registry::baseline().id && params.is_empty();
        let decodes = |d: &Option<Decode>| d.as_ref().is_none_or(|d| exact(&d.method, &d.params));
        exact(&self.default.method, &self.default.params)
            && decodes(&self.default.decode)
            && self.rules.iter().all(|r| exact(&r.method, &r.params) && decodes(&r.decode))
    }

    /// Returns the methods of one layer with `n_heads` query heads over `n_kv_heads` key heads, without checking that
    /// they support it.
    pub fn parts(&self, layer: usize, n_heads: usize, n_kv_heads: usize) -> Result<Vec<HeadRun>> {
        let size = n_heads / n_kv_heads.max(1);
        let mut runs: Vec<HeadRun> = Vec::new();
        for head in 0..n_heads {
            let (id, options) = self.choice(layer, head);
            let group = head / size.max(1);
            let choice = |id: &str, options: &Options| -> Result<Attending> {
                let method = registry::method(id)?;
                let calibration = self.calibrations.find(id, Some(layer), group)?.cloned().map(Arc::new);
                Ok(Attending { method, options: options.clone(), calibration })
            };
            let prompt = choice(id, options)?;
            let decode = self.decode_choice(layer, head).map(|d| choice(&d.method, &d.params)).transpose()?;
            match runs.last_mut() {
                // Joins equal choices inside a key head; whole key heads are joined below.
                Some(run) if run.groups.start == group && run.is(&prompt, decode.as_ref()) => {
                    run.heads.end = head + 1;
                }
                _ => runs.push(HeadRun {
                    method: prompt.method,
                    options: prompt.options,
                    calibration: prompt.calibration,
                    decode,
                    heads: head..head + 1,
                    groups: group..group + 1,
                }),
            }
        }
        Ok(join_whole_groups(runs, size))
    }

    /// Returns the methods of each layer of a causal model; the error gives the reasons why one cannot run.
    pub fn resolve(&self, config: &ModelConfig) -> Result<Vec<Vec<HeadRun>>> {
        for rule in &self.rules {
            if let Some(layers) = &rule.layers {
                layers.check("a layer of the recipe", config.n_layers)?;
            }
            if let Some(heads) = &rule.heads {
                heads.check("a head of the recipe", config.n_heads)?;
            }
        }
        let mut accepted: Vec<(&'static Method, Options, bool)> = Vec::new();
        let mut layers = Vec::with_capacity(config.n_layers);
        for layer in 0..config.n_layers {
            let mut parts = self.parts(layer, config.n_heads, config.n_kv_heads)?;
            for part in &mut parts {
                fill_rope(part.method, &mut part.options, config, layer)?;
                if let Some(decode) = &mut part.decode {
                    fill_rope(decode.method, &mut decode.options, config, layer)?;
                }
            }
            for part in &parts {
                for decodes in [false, true] {
                    let choice = part.attending(decodes);
                    let known = |(m, o, d): &(&'static Method, Options, bool)| {
                        std::ptr::eq(*m, choice.method) && *o == choice.options && *d == decodes
                    };
                    if decodes && part.decode.is_none() || accepted.iter().any(known) {
                        continue;
                    }
                    check_causal(&choice, part, config, decodes)?;
                    accepted.push((choice.method, choice.options, decodes));
                }
            }
            layers.push(parts);
        }
        Ok(layers)
    }
}

/// Heads of a layer that are planned together: all of several key heads, or some of one.
#[derive(Clone, Debug)]
pub struct HeadRun {
    /// The method.
    pub method: &'static Method,
    /// Its settings.
    pub options: Options,
    /// Its calibration for this key head.
    pub calibration: Option<Arc<Calibration>>,
    /// The method for new tokens, if it differs.
    pub decode: Option<Attending>,
    /// Query heads.
    pub heads: Range<usize>,
    /// Key heads.
    pub groups: Range<usize>,
}

/// A method with its settings and its calibration.
#[derive(Clone, Debug)]
pub struct Attending {
    /// The method.
    pub method: &'static Method,
    /// Its settings.
    pub options: Options,
    /// Its calibration for the key head it attends in.
    pub calibration: Option<Arc<Calibration>>,
}

impl Attending {
    /// Plans a problem.
    pub fn plan(&self, problem: &Problem) -> Result<Box<dyn attlas::Plan>> {
        Ok(self.method.plan_with(problem, &self.options, self.calibration.as_deref())?)
    }

    /// Returns true if this is exact attention.
    pub fn is_baseline(&self) -> bool {
        std::ptr::eq(self.method, registry::baseline())
    }

    fn is(&self, other: &Attending) -> bool {
        std::ptr::eq(self.method, other.method) && self.options == other.options
    }
}

impl HeadRun {
    /// Returns the method for a prompt, or for a new token.
    pub fn attending(&self, decodes: bool) -> Attending {
        match &self.decode {
            Some(other) if decodes => other.clone(),
            _ => Attending {
                method: self.method,
                options: self.options.clone(),
                calibration: self.calibration.clone(),
            },
        }
    }

    fn is(&self, prompt: &Attending, decode: Option<&Attending>) -> bool {
        let same = match (&self.decode, decode) {
            (Some(a), Some(b)) => a.is(b),
            (None, None) => true,
            _ => false,
        };
        same && self.attending(false).is(prompt)
    }

    /// Returns true if it has a calibration of a single key head.
    fn is_calibrated(&self) -> bool {
        self.calibration.is_some() || self.decode.as_ref().is_some_and(|d| d.calibration.is_some())
    }

    /// Returns true if this is exact attention.
    pub fn is_baseline(&self) -> bool {
        std::ptr::eq(self.method, registry::baseline())
    }
}

fn join_whole_groups(runs: Vec<HeadRun>, size: usize) -> Vec<HeadRun> {
    let mut parts: Vec<HeadRun> = Vec::new();
    for run in runs {
        let whole = run.heads.len() == size;
        match parts.last_mut() {
            Some(last)
                if whole
                    && !run.is_calibrated()
                    && last.heads.len() == last.groups.len() * size
                    && last.is(&run.attending(false), run.decode.as_ref()) =>
            {
                last.heads.end = run.heads.end;
                last.groups.end = run.groups.end;
            }
            _ => parts.push(run),
        }
    }
    parts
}

/// Fills in the layer's rotary parameters for a method that uses the model's embedding (`rope_base = model`, or
/// positions in the cache without a base).
fn fill_rope(method: &Method, options: &mut Options, c: &ModelConfig, layer: usize) -> Result<()> {
    let word = |name: &str| options.get(name).map(|v| v.to_string());
    let asked = match word("rope_base").as_deref() {
        Some("model") => true,
        Some(_) => false,
        None => word("positions").as_deref() == Some("cache_relative"),
    };
    if !asked || !method.params.iter().any(|p| p.name == "rope_base") {
        return Ok(());
    }
    let local = c.local_rope.as_ref().filter(|_| c.windows.get(layer).copied().flatten().is_some());
    let rope = local.or(c.rope.as_ref()).filter(|_| !c.unrotated.contains(&layer));
    match rope {
        Some(rope) if rope.scaling == Scaling::None => {
            let layout = if rope.layout == Layout::Half { "half" } else { "interleaved" };
            options.set("rope_base", rope.base);
            options.set("rope_dim", rope.dim);
            options.set("rope_layout", layout);
            Ok(())
        }
        found => {
            let found = found.map_or("none", |_| "one with a context extension");
            let expected = format!("a rotary embedding without a context extension, for {}", method.id);
            Err(Error::invalid(format!("the positions of layer {layer}"), found, expected))
        }
    }
}

/// Plans a short causal problem: a refusal then comes with all its reasons before any work.
fn check_causal(choice: &Attending, part: &HeadRun, c: &ModelConfig, decodes: bool) -> Result<()> {
    let (heads, groups) = match choice.calibration {
        Some(_) => (part.heads.len(), part.groups.len()),
        None => (c.n_heads, c.n_kv_heads),
    };
    let problem = Problem::new(heads, 64, c.head_dim).with_kv_heads(groups).causal();
    if decodes && !choice.is_baseline() && !choice.method.claims.decode {
        let reasons =
            vec!["it has no form for new tokens; leave [rule.decode] out to attend exactly".to_owned()];
        return Err(attlas::Error::Unsupported { method: choice.method.id.into(), reasons }.into());
    }
    match choice.plan(&problem) {
        Err(Error::Attention(attlas::Error::Unsupported { method, mut reasons }))
            if choice.calibration.is_none()
                && choice.method.claims.needs == attlas::method::Needs::Calibration =>
        {
            reasons.push(format!("attlas calibrate --methods {method} makes one, --calibration passes it"));
            Err(attlas::Error::Unsupported { method, reasons }.into())
        }
        other => other.map(|_| ()),
    }
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
    fn new_tokens_may_have_another_method() {
        let text = r#"
            version = 1
            tokens = 4096
            [default]
            method = "exact"
            decode = { method = "quest" }
            [[rule]]
            layers = "1"
            method = "sink_window"
            [rule.decode]
            method = "sampled_columns"
            params = { keys = 32 }
            [[rule]]
            layers = "2"
            method = "sink_window"
        "#;
        let recipe = Recipe::from_toml(text).unwrap();
        assert_eq!(Recipe::from_toml(&recipe.to_toml().unwrap()).unwrap(), recipe);
        assert_eq!(recipe.tokens, Some(4096));
        let layers = recipe.resolve(&config()).unwrap();
        let decodes = |l: usize| layers[l][0].attending(true).method.id;
        assert_eq!([decodes(0), decodes(1), decodes(2)], ["quest", "sampled_columns", "sink_window"]);
        assert_eq!(layers[1][0].attending(false).method.id, "sink_window");
        assert!(!recipe.is_exact() && Recipe::default().is_exact());
        let wrong = text.replace("sampled_columns", "smyrf").replace("{ keys = 32 }", "{}");
        let found = Recipe::from_toml(&wrong).and_then(|r| r.resolve(&config()));
        let stream = registry::method("smyrf").unwrap().claims.decode;
        assert_eq!(found.is_err(), !stream, "{found:?}");
    }

    #[test]
    fn what_a_method_learnt_belongs_to_one_key_head() {
        let problem = Problem::new(3, 100, 16).with_kv_heads(1);
        let data: Vec<f64> = (0..3 * 100 * 16).map(|i| (0.37 * f64::from(i)).sin() / 3.0).collect();
        let view = |h: usize| attlas::TensorRef::bhnd(&data[..h * 1600], [1, h, 100, 16]).unwrap();
        let x = attlas::Qkv::new(view(3), view(1), view(1));
        let loki = registry::method("loki").unwrap();
        let learn = loki.calibrate.unwrap();
        let learnt = learn(&problem, &Options::new(), &[attlas::Inputs::F64(x)]).unwrap();
        let mut all = Calibrations::default();
        (0..4).for_each(|l| (0..2).for_each(|g| all.insert(Some(l), g, learnt.clone())));
        let recipe = Recipe::uniform("loki", Options::new());
        let refused = recipe.resolve(&config()).unwrap_err().to_string();
        assert!(refused.contains("attlas calibrate"), "{refused}");
        let layers = recipe.with_calibrations(Arc::new(all)).resolve(&config()).unwrap();
        assert!(layers.iter().all(|parts| parts.len() == 2 && parts.iter().all(|p| p.calibration.is_some())));
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
