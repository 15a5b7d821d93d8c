//! Which method for which head of a model, within an error that is accepted.
//!
//! For every layer and key head the methods of a selection are run, with growing budgets, on the queries, keys and
//! values of the model reading a text. The choice is the method with the least measured time, as a share of exact
//! attention's in the same process, whose error stays within the target; exact attention is always a choice, also with
//! its inputs rounded. The error is the largest relative Frobenius error of the heads that share the key head. It is
//! certified by a census: exact attention is computed on every row, so the bound of [`certify`](crate::certify) is the
//! error itself.
//!
//! Budgets are tried from the smallest up, and no further than the first that is accurate enough or no longer faster
//! than what is already found: a larger one takes longer. Methods that are nowhere faster than exact attention on a few
//! key heads, spread over the layers, or nowhere near it, are not tried on the others.
//!
//! Then the model runs with that recipe over text that was not used for tuning. Where its budget is one on the model,
//! the divergence from exact attention or the increase of the perplexity, the target is searched: halved until the
//! budget holds, doubled while it does, then once more in between; with exact attention everywhere both are zero, so it
//! ends. Such a target is one for the layer: a head whose output is a third of the layer's others, root mean square over
//! heads, may be off by three times as much. With a largest error of heads the target is for each of them, and never
//! above it. A recipe that is not faster than exact attention in that run is given up for exact attention.
//!
//! Every measurement is appended to a file as soon as it is made ([`State`]), so that an interrupted search resumes, and
//! parts of a search made elsewhere ([`Shard`]) can be merged.

mod recipe;
mod search;
mod state;

pub use state::{Key, Measurement, PEAK_CLASS, State};

use crate::hash::sha256;
use crate::perplexity::{self, Record};
use crate::select::Chosen;
use crate::table::{Table, number, percent, seconds};
use crate::text::Text;
use crate::workload::Workload;
use crate::{Error, Result, extract};
use attlas::{Options, Schedule, Workspace};
use attlas_model::Model;
use attlas_model::perplexity::Protocol;
use attlas_model::recipe::{Numbers, Recipe};
use search::{Bench, Search};
use serde::Serialize;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// A method replaces exact attention where it takes at most this share of its time: what is gained below is less than
/// what a measurement is uncertain by.
const WORTH_IT: f64 = 0.9;
/// Where the search for a target begins.
const FIRST_TARGET: f64 = 0.2;
/// Where it ends: what is further off is no approximation.
const LAST_TARGET: f64 = 0.8;
/// Targets after which the best that was found is taken.
const ROUNDS: usize = 8;
/// Ratio of a target that fails to one that holds below which nothing is tried between them.
const CLOSE: f64 = 1.5;

/// How much is tried.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum Effort {
    /// Three budgets of each method, one run of each; methods chosen by two key heads.
    Quick,
    /// Four budgets, up to three runs; methods chosen by four key heads.
    #[default]
    Normal,
    /// Six budgets, up to five runs, every method everywhere, those that are models of their own included.
    Thorough,
}

impl Effort {
    /// Budgets as halvings of the number of keys, from the smallest.
    fn halvings(self) -> &'static [u32] {
        match self {
            Self::Quick => &[5, 3, 2],
            Self::Normal => &[5, 4, 3, 2],
            Self::Thorough => &[6, 5, 4, 3, 2, 1],
        }
    }

    fn runs(self) -> usize {
        match self {
            Self::Quick => 1,
            Self::Normal => 3,
            Self::Thorough => 5,
        }
    }

    /// Key heads on which methods are screened; none where every method is tried everywhere.
    fn screens(self) -> usize {
        match self {
            Self::Quick => 2,
            Self::Normal => 4,
            Self::Thorough => 0,
        }
    }
}

/// One part of a search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    /// Which, from 0.
    pub index: usize,
    /// Of how many.
    pub count: usize,
}

impl std::str::FromStr for Shard {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let parsed = text.split_once('/').and_then(|(i, n)| {
            let (index, count) = (i.parse().ok()?, n.parse().ok()?);
            (index < count).then_some(Shard { index, count })
        });
        parsed.ok_or_else(|| {
            Error::argument("--shard", "i/n with i from 0 to n-1, such as 0/4", format!("'{text}'"))
        })
    }
}

/// Settings of a search.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Largest relative error of a head's output.
    pub max_error: Option<f64>,
    /// Largest mean divergence from the exact model, nats.
    pub max_kl: Option<f64>,
    /// Largest relative increase of the perplexity.
    pub max_ppl_increase: Option<f64>,
    /// Methods that may be chosen.
    pub selection: Vec<Chosen>,
    /// Layers that may be changed; all where absent.
    pub layers: Option<Numbers>,
    /// How much is tried.
    pub effort: Effort,
    /// One part of the measurements alone, and no recipe.
    pub shard: Option<Shard>,
    /// Seed of methods that draw random numbers; it is written into the recipe.
    pub seed: u64,
    /// Threads; 0 for all.
    pub threads: usize,
    /// The model's name in the recipe.
    pub model: String,
    /// The command that makes the recipe, for its evidence.
    pub command: Option<String>,
}

impl Settings {
    /// Whether a budget is one on the model's predictions.
    fn on_model(&self) -> bool {
        self.max_kl.is_some() || self.max_ppl_increase.is_some()
    }
}

/// What one key head got.
#[derive(Clone, Debug, Serialize)]
pub struct Pick {
    /// Layer.
    pub layer: usize,
    /// Key head.
    pub kv_head: usize,
    /// Its query heads.
    pub heads: Numbers,
    /// Id of the method.
    pub method: String,
    /// What is set.
    pub params: Options,
    /// Largest error of the query heads.
    pub error: f64,
    /// Time over exact attention's.
    pub cost: f64,
}

/// One target and what the model did with it.
#[derive(Clone, Debug, Serialize)]
pub struct Round {
    /// Error target of heads.
    pub target: f64,
    /// Share of key heads that do not have exact attention.
    pub changed: f64,
    /// Mean time of attention over exact attention's, from the heads' measurements.
    pub cost: f64,
    /// The model on text that was not used for tuning; none where exact attention is everywhere.
    pub check: Option<Record>,
    /// Whether every budget holds.
    pub holds: bool,
}

/// The result.
#[derive(Clone, Debug, Serialize)]
pub struct Tuned {
    /// The model's name.
    pub model: String,
    /// The text that was tuned on.
    pub text: String,
    /// Tokens of it.
    pub tokens: usize,
    /// How much was tried.
    pub effort: Effort,
    /// Measurements made or found.
    pub measurements: usize,
    /// Methods that computed exact attention at this length, and are no choice of their own.
    pub fell_back: Vec<String>,
    /// One for each target.
    pub rounds: Vec<Round>,
    /// The round whose choices stand, counted from 0.
    pub chosen: Option<usize>,
    /// What each key head got; empty for a shard.
    pub picks: Vec<Pick>,
    /// Why the answer is exact attention everywhere, where it is.
    pub note: Option<String>,
    /// The recipe.
    pub recipe: Option<Recipe>,
}

/// How a search ended.
#[derive(Debug)]
pub enum Ended {
    /// With an answer.
    Done(Box<Tuned>),
    /// At the caller's wish, with that many measurements kept.
    Interrupted(usize),
}

/// Queries, keys and values to tune on.
pub fn extract_layers(
    model: &Arc<Model>,
    text: &Text,
    settings: &Settings,
    progress: &mut (dyn FnMut(usize, usize) + Send),
    stop: &AtomicBool,
) -> Result<Workload> {
    let wanted = extract::Settings {
        layers: settings.layers.clone(),
        threads: settings.threads,
        ..extract::Settings::default()
    };
    Ok(extract::extract(model, text, &wanted, progress, stop)?.workload)
}

/// What measurements are made on: the numbers, the machine, the registry, effort, seed and version.
pub fn key(workload: &Workload, settings: &Settings) -> Result<Key> {
    let ws = Workspace::new(Schedule { threads: settings.threads, ..Schedule::default() })?;
    let mut bytes = workload.layers.len().to_le_bytes().to_vec();
    // The last layer depends on the whole model and text.
    if let Some(x) = workload.layers.last() {
        for part in [&x.q, &x.k, &x.v] {
            bytes.extend(part.iter().flat_map(|v| v.to_le_bytes()));
        }
    }
    let effort = format!("{:?}", settings.effort).to_lowercase();
    Ok(Key {
        inputs: sha256(&bytes),
        machine: crate::machine::name(&ws),
        peak_gflops: crate::machine::Machine::fma_peak(&ws),
        registry: crate::atlas::fingerprint(),
        effort,
        seed: settings.seed,
        version: env!("CARGO_PKG_VERSION").into(),
    })
}

/// A model that recipes are tried on.
pub trait Check {
    /// The model with a recipe beside the exact one over `check`, in windows of `context` tokens; `None` once `stop` is
    /// set.
    fn check(
        &mut self,
        recipe: &Recipe,
        check: &Text,
        context: usize,
        stop: &AtomicBool,
    ) -> Result<Option<Record>>;

    /// The model's sizes in one line, as [`shape`](crate::text::shape) gives them.
    fn shape(&self) -> String;
}

/// A model of this workspace's runtime.
#[derive(Debug)]
pub struct Runtime<'a> {
    /// The model.
    pub model: &'a Arc<Model>,
    /// Threads; 0 for all.
    pub threads: usize,
}

impl Check for Runtime<'_> {
    fn check(
        &mut self,
        recipe: &Recipe,
        check: &Text,
        context: usize,
        stop: &AtomicBool,
    ) -> Result<Option<Record>> {
        let protocol = Protocol::Strided { window: context, stride: context };
        let how = perplexity::Settings {
            cache: attlas_model::kept::CacheFormat::F32,
            task: None,
            seed: 0,
            protocol,
            bos: false,
            recipe: Some(recipe.clone()),
            threads: self.threads,
        };
        match perplexity::perplexity(self.model, check, &how, &mut |_, _, _| (), stop) {
            Err(Error::Model(attlas_model::Error::Interrupted)) => Ok(None),
            Ok(record) if record.interrupted => Ok(None),
            other => other.map(Some),
        }
    }

    fn shape(&self) -> String {
        crate::text::shape(&self.model.config)
    }
}

/// Searches. `check` is text that was not used for tuning. `watch` receives key heads done, key heads in all, and what is
/// being done.
pub fn tune(
    model: &mut dyn Check,
    text: &Text,
    check: &Text,
    workload: &Workload,
    settings: &Settings,
    state: &mut State,
    watch: &mut dyn FnMut(usize, usize, &str),
    stop: &AtomicBool,
) -> Result<Ended> {
    let bench = Bench::new(workload, settings);
    let mut search = Search::new(workload, settings, &bench)?;
    let mut tuned = Tuned {
        model: settings.model.clone(),
        text: text.source.clone(),
        tokens: text.tokens.len(),
        effort: settings.effort,
        measurements: 0,
        fell_back: Vec::new(),
        rounds: Vec::new(),
        chosen: None,
        picks: Vec::new(),
        note: None,
        recipe: None,
    };
    let (first, last) = match settings.max_error {
        Some(error) => (error, error),
        None => (FIRST_TARGET, LAST_TARGET),
    };
    let mut targets = Targets { holds: None, fails: None, last, on_model: settings.on_model() };
    let mut best: Option<(usize, Vec<Pick>, Recipe)> = None;
    let mut seen: Vec<(Recipe, Option<Record>)> = Vec::new();
    let mut latest = Vec::new();
    let mut next = Some(first);
    while let Some(target) = next.filter(|_| tuned.rounds.len() < ROUNDS) {
        let Some(picks) = search.round(target, state, watch, stop)? else {
            return Ok(Ended::Interrupted(state.len()));
        };
        tuned.measurements = state.len();
        tuned.fell_back = state.fell_back();
        if settings.shard.is_some() {
            return Ok(Ended::Done(Box::new(tuned)));
        }
        let changed = picks.iter().filter(|p| !p.is_exact()).count();
        let n = picks.len().max(1) as f64;
        let recipe = recipe::recipe(&picks, &settings.model);
        let check = match seen.iter().find(|(other, _)| *other == recipe) {
            Some((_, known)) => known.clone(),
            None if changed == 0 => None,
            None => {
                watch(0, 1, &format!("checking on other text, target {}", number(target)));
                match model.check(&recipe, check, text.tokens.len(), stop)? {
                    Some(record) => Some(record),
                    None => return Ok(Ended::Interrupted(state.len())),
                }
            }
        };
        seen.push((recipe.clone(), check.clone()));
        let holds = check.as_ref().is_none_or(|record| holds(record, settings));
        tuned.rounds.push(Round {
            target,
            changed: changed as f64 / n,
            cost: picks.iter().map(|p| p.cost).sum::<f64>() / n,
            check,
            holds,
        });
        if holds {
            best = Some((tuned.rounds.len() - 1, picks.clone(), recipe));
        }
        latest = picks;
        next = targets.after(target, holds);
    }
    let (picks, mut recipe) = match best {
        Some((round, picks, recipe)) => {
            tuned.chosen = Some(round);
            tuned.note = objection(&tuned.rounds[round]);
            (picks, recipe)
        }
        None => {
            let target = tuned.rounds.last().map_or(first, |r| r.target);
            tuned.note = Some(format!("no recipe held the budget down to an error of {}", number(target)));
            (latest, Recipe::default())
        }
    };
    tuned.picks = picks;
    if tuned.note.is_some() {
        tuned.picks = std::mem::take(&mut tuned.picks).into_iter().map(Pick::exact).collect();
        recipe = recipe::recipe(&tuned.picks, &settings.model);
    }
    recipe.evidence = recipe::evidence(&tuned, text, check, settings, model.shape());
    tuned.recipe = Some(recipe);
    Ok(Ended::Done(Box::new(tuned)))
}

/// Which target comes next.
struct Targets {
    /// The largest that held.
    holds: Option<f64>,
    /// The smallest that did not.
    fails: Option<f64>,
    last: f64,
    /// Whether the budget is one on the model, so that a larger target may do.
    on_model: bool,
}

impl Targets {
    fn after(&mut self, target: f64, holds: bool) -> Option<f64> {
        if holds {
            self.holds = Some(self.holds.map_or(target, |h| h.max(target)));
        } else {
            self.fails = Some(self.fails.map_or(target, |f| f.min(target)));
        }
        match (self.holds, self.fails) {
            (None, Some(fails)) => Some(fails / 2.0),
            (Some(holds), None) if self.on_model && holds < self.last => Some((2.0 * holds).min(self.last)),
            (Some(holds), Some(fails)) if fails > CLOSE * holds => Some((holds * fails).sqrt()),
            _ => None,
        }
    }
}

/// Why the best recipe is not worth having, where it is not.
fn objection(round: &Round) -> Option<String> {
    if round.changed == 0.0 {
        return Some("no method was both accurate enough and faster".into());
    }
    let record = round.check.as_ref()?;
    let exact = record.against_exact.as_ref()?.exact_seconds;
    (record.seconds >= exact).then(|| {
        format!(
            "the best recipe took {} where exact attention took {}",
            seconds(record.seconds),
            seconds(exact)
        )
    })
}

fn holds(record: &Record, settings: &Settings) -> bool {
    let Some(x) = &record.against_exact else { return true };
    // What is no number is over every budget.
    let within = |value: f64, limit: Option<f64>| limit.is_none_or(|limit| value <= limit);
    within(x.kl_mean, settings.max_kl)
        && within(x.ppl_increase, settings.max_ppl_increase)
        && x.kl_mean.is_finite()
}

impl Tuned {
    /// One line for each key head.
    pub fn table(&self) -> Table {
        let mut table = Table::new(&["layer", "<heads", "<method", "<set", "error", "time"]);
        for p in &self.picks {
            table.push(vec![
                p.layer.to_string(),
                p.heads.to_string(),
                p.method.clone(),
                p.params.to_string(),
                number(p.error),
                percent(p.cost),
            ]);
        }
        table
    }

    /// One line for each target.
    pub fn round_table(&self) -> Table {
        let mut table =
            Table::new(&["target", "changed", "attention", "KL", "perplexity", "same top", "time", "<holds"]);
        for (i, r) in self.rounds.iter().enumerate() {
            let x = r.check.as_ref().and_then(|c| Some((c, c.against_exact.as_ref()?)));
            table.push(vec![
                number(r.target),
                percent(r.changed),
                percent(r.cost),
                x.map_or("0".into(), |(_, x)| number(x.kl_mean)),
                x.map_or("+0.00%".into(), |(_, x)| format!("{:+.2}%", 100.0 * x.ppl_increase)),
                x.map_or("100.0%".into(), |(_, x)| format!("{:.1}%", 100.0 * x.same_top)),
                x.map_or("100%".into(), |(c, x)| percent(c.seconds / x.exact_seconds)),
                match (r.holds, self.chosen == Some(i) && self.note.is_none()) {
                    (true, true) => "taken".into(),
                    (true, false) => "yes".into(),
                    (false, _) => "no".into(),
                },
            ]);
        }
        table
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_halved_until_they_hold_and_doubled_while_they_do() {
        let path = |holds: &dyn Fn(f64) -> bool, on_model: bool| {
            let mut targets = Targets { holds: None, fails: None, last: 0.8, on_model };
            let mut seen = vec![0.2];
            while let Some(next) = targets.after(*seen.last().unwrap(), holds(*seen.last().unwrap())) {
                seen.push(next);
                if seen.len() == 9 {
                    break;
                }
            }
            (seen, targets.holds)
        };
        let (seen, best) = path(&|t| t < 0.06, true);
        assert_eq!((&seen[..3], best), (&[0.2, 0.1, 0.05][..], Some(0.05)));
        assert!((seen[3] - 0.005f64.sqrt()).abs() < 1e-12 && seen.len() == 4, "{seen:?}");
        assert_eq!(path(&|_| true, true), (vec![0.2, 0.4, 0.8], Some(0.8)));
        assert_eq!(path(&|_| true, false), (vec![0.2], Some(0.2)));
        assert_eq!(path(&|_| false, true).1, None);
    }

    #[test]
    fn shards_are_read_as_a_part_of_a_whole() {
        assert_eq!("2/3".parse::<Shard>().unwrap(), Shard { index: 2, count: 3 });
        assert!(["", "3/3", "a/2", "1", "-1/2", "0/0"].iter().all(|t| t.parse::<Shard>().is_err()));
    }
}
