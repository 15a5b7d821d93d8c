//! Choice of a method for each head of a model, by the model's loss.
//!
//! For every layer and key head, candidates are measured on the queries, keys and values of the model reading a text:
//! the selected methods with growing budgets, with a near field if they have none of their own, with rounded inputs,
//! and with their calibration. Candidates are first screened on a few key heads, spread over the layers. Exact
//! attention is the baseline and always a choice; a candidate whose settings made it exact attention is not.
//!
//! Then the model is measured: for candidates on the front of error and time, the divergence of its predictions from
//! exact attention's with only that key head changed ([`Replace`]). For other candidates of the same key head it is
//! estimated as proportional to the square of their error. Small divergences add up: one Lagrange multiplier, the price
//! of a nat, chooses for all key heads the least time within a sum of divergences. Without a model, the error relative
//! to the layer's output replaces the divergence.
//!
//! The recipe then runs over a second text, and the sum is searched until the budget is met there: doubled while it is
//! met, halved until it is, then bisected. A budget is met if both the upper 95 % bound of the increase, from
//! differences token by token, and the divergence are within it; the divergence estimates the loss on texts like the
//! model's own. A third text gives the reported result; a choice that exceeds the budget there is reduced. Methods for
//! new tokens are chosen separately, by their time after the text; if the model does not decode faster with them, exact
//! attention decodes.
//!
//! Every measurement and every check is appended to a file as soon as it is made ([`SearchState`]): an interrupted
//! search can resume, and parts of a search made elsewhere ([`Shard`]) can be merged.

mod candidates;
mod choose;
pub mod curve;
mod divergence;
mod measure;
mod recipe;
mod run;
mod runtime;
mod search;
mod state;

pub use curve::CurvePoint;
pub use divergence::Replace;
pub use runtime::Runtime;
pub use state::{Key, Measurement, Node, PEAK_CLASS, PEAK_MIXED, SearchState, check_nodes};

use crate::crew::{Alone, Crew};
use crate::hash::sha256;
use crate::perplexity::Record;
use crate::run::Run;
use crate::select::Chosen;
use crate::table::{Table, number, percent};
use crate::task::Task;
use crate::text::Text;
use crate::workload::Workload;
use crate::{Error, Result, extract};
use attlas::Options;
use attlas_model::recipe::{Numbers, Recipe};
use attlas_model::{Calibrations, Model};
use run::Tuning;
use search::Search;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Largest share of exact attention's time at which a method replaces it: smaller gains are within the uncertainty of a
/// measurement.
const WORTH_IT: f64 = 0.9;
/// Standard errors of the upper bound: 95 % of a normal distribution lies below.
const BOUND: f64 = 1.645;

/// Stage of a model: a prompt, or a token after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// Whole prompts, by time.
    Prompt,
    /// Single new tokens after a prompt, by time.
    Decode,
}

/// Extent of the search.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum Effort {
    /// Two budgets per method, one run each; eight candidates per key head, two of them measured in the model on 128
    /// rows.
    Quick,
    /// Five budgets; fourteen candidates, five of them in the model on 256 rows.
    #[default]
    Normal,
    /// Six budgets, three runs, also methods as published; two dozen candidates, all of the front in the model on 512
    /// rows.
    Thorough,
}

impl Effort {
    /// Returns the budgets as halvings of the number of keys, from the smallest.
    fn halvings(self) -> &'static [u32] {
        match self {
            Self::Quick => &[6, 4],
            Self::Normal => &[6, 5, 4, 3, 2],
            Self::Thorough => &[7, 6, 5, 4, 3, 2],
        }
    }

    fn runs(self) -> usize {
        if self == Self::Thorough { 3 } else { 1 }
    }

    /// Returns the number of key heads for screening.
    fn screens(self) -> usize {
        match self {
            Self::Quick => 4,
            Self::Normal => 6,
            Self::Thorough => 8,
        }
    }

    /// Returns the number of candidates tried on every key head.
    fn candidates(self) -> usize {
        match self {
            Self::Quick => 8,
            Self::Normal => 14,
            Self::Thorough => 24,
        }
    }

    /// Returns the number of candidates per key head measured in the model.
    fn asked(self) -> usize {
        match self {
            Self::Quick => 2,
            Self::Normal => 5,
            Self::Thorough => usize::MAX,
        }
    }

    /// Returns the number of rows in the mean of a divergence.
    fn rows(self) -> usize {
        match self {
            Self::Quick => 128,
            Self::Normal => 256,
            Self::Thorough => 512,
        }
    }

    /// Returns the number of new tokens in a measurement.
    fn steps(self) -> usize {
        if self == Self::Quick { 32 } else { 64 }
    }

    /// Returns the number of sums of divergences tried on the second text.
    fn rounds(self) -> usize {
        match self {
            Self::Quick => 4,
            Self::Normal => 6,
            Self::Thorough => 9,
        }
    }
}

/// One part of a search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    /// Index of the part, from 0.
    pub index: usize,
    /// Number of parts.
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
    /// Calibrations; methods that need one are candidates only if it is here.
    pub calibrations: Arc<Calibrations>,
    /// The third text, which gives the reported result; without it the second one does.
    pub answer: Option<Text>,
    /// Task that turns texts into prompts that need distant keys; only the tokens that need them are scored.
    pub task: Option<Task>,
    /// Choose for new tokens, too.
    pub decode: bool,
    /// Layers that may be changed; all if absent.
    pub layers: Option<Numbers>,
    /// Extent of the search.
    pub effort: Effort,
    /// Make only one part of the measurements, and no recipe.
    pub shard: Option<Shard>,
    /// The model's name in the recipe.
    pub model: String,
    /// The command that makes the recipe, for its evidence.
    pub command: Option<String>,
}

impl Settings {
    /// Returns true if a budget limits the loss of the model's predictions.
    fn on_model(&self) -> bool {
        self.max_kl.is_some() || self.max_ppl_increase.is_some()
    }
}

/// The choice for one key head.
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
    /// Its settings.
    pub params: Options,
    /// Largest error of the query heads.
    pub error: f64,
    /// Time over exact attention's.
    pub cost: f64,
    /// Divergence of the model with only this change, nats.
    pub kl: f64,
    /// The choice for new tokens, if one was made.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decode: Option<DecodePick>,
}

/// The choice for new tokens of one key head.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DecodePick {
    /// Id of the method.
    pub method: String,
    /// Its settings.
    pub params: Options,
    /// Largest error of the query heads.
    pub error: f64,
    /// Time over exact attention's.
    pub cost: f64,
    /// Divergence of the model with only this change, estimated from that of prompts, nats.
    pub kl: f64,
}

/// Results of a model with a recipe.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// Tokens scored.
    pub scored: u64,
    /// Perplexity.
    #[serde(deserialize_with = "crate::reread::number")]
    pub ppl: f64,
    /// Perplexity with exact attention.
    #[serde(deserialize_with = "crate::reread::number")]
    pub exact_ppl: f64,
    /// Relative increase of the perplexity.
    #[serde(deserialize_with = "crate::reread::number")]
    pub ppl_increase: f64,
    /// Its upper 95 % bound.
    #[serde(deserialize_with = "crate::reread::number")]
    pub ppl_increase_upper: f64,
    /// Mean divergence, nats.
    #[serde(deserialize_with = "crate::reread::number")]
    pub kl_mean: f64,
    /// Its standard error.
    #[serde(deserialize_with = "crate::reread::number")]
    pub kl_se: f64,
    /// Share of tokens with the same likeliest token.
    #[serde(deserialize_with = "crate::reread::number")]
    pub same_top: f64,
    /// Scores over exact attention's.
    #[serde(deserialize_with = "crate::reread::number")]
    pub keys_share: f64,
    /// Seconds of the model, logits included.
    #[serde(deserialize_with = "crate::reread::number")]
    pub seconds: f64,
    /// Seconds of the model with exact attention; none if it was not timed.
    pub exact_seconds: Option<f64>,
}

impl Outcome {
    /// Takes the results from a record that includes exact attention.
    pub fn new(record: &Record) -> Option<Self> {
        let x = record.against_exact.as_ref()?;
        let upper = x.nll_increase + BOUND * x.nll_increase_se.unwrap_or(0.0);
        Some(Self {
            scored: record.scored,
            ppl: record.ppl,
            exact_ppl: x.exact_ppl,
            ppl_increase: x.ppl_increase,
            ppl_increase_upper: upper.exp_m1(),
            kl_mean: x.kl_mean,
            kl_se: x.kl_se,
            same_top: x.same_top,
            keys_share: x.keys_share,
            seconds: record.seconds,
            exact_seconds: Some(x.exact_seconds),
        })
    }
}

/// One sum of divergences and the model's results with it.
#[derive(Clone, Debug, Serialize)]
pub struct Round {
    /// Largest sum of the divergences of single key heads, nats; none if only the error of heads is limited.
    pub target: Option<f64>,
    /// Share of key heads without exact attention.
    pub changed: f64,
    /// Mean time of attention over exact attention's, from the heads' measurements.
    pub cost: f64,
    /// The model on the second text; none if exact attention is everywhere.
    pub check: Option<Outcome>,
    /// True if every budget is met.
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
    /// Extent of the search.
    pub effort: Effort,
    /// Measurements made or found.
    pub measurements: usize,
    /// Key heads measured per second by all processes, counted once for prompts and once for new tokens; none if all
    /// were known.
    pub heads_per_second: Option<f64>,
    /// Methods that computed exact attention at this length and therefore are no choice.
    pub fell_back: Vec<String>,
    /// Candidates that were tried on every key head.
    pub candidates: Vec<String>,
    /// Predicted time against divergence over all budgets.
    pub curve: Vec<CurvePoint>,
    /// One round per sum of divergences tried.
    pub rounds: Vec<Round>,
    /// The model on the third text, with the final choices.
    pub answer: Option<Outcome>,
    /// The model decoding the second text, with the choices for new tokens.
    pub decoded: Option<Outcome>,
    /// Number of tokens from which on decoding with the choices for new tokens was faster in the model than exact
    /// attention.
    pub decode_from: Option<usize>,
    /// Reason why exact attention decodes everywhere, if it does.
    pub decode_note: Option<String>,
    /// Layers with heads whose method for new tokens has no stream: exact attention decodes there.
    pub decodes_exactly: Vec<usize>,
    /// The round with the final choices, counted from 0.
    pub chosen: Option<usize>,
    /// The choice for each key head; empty for a shard.
    pub picks: Vec<Pick>,
    /// Reason why the result is exact attention everywhere, if it is.
    pub note: Option<String>,
    /// The recipe.
    pub recipe: Option<Recipe>,
}

/// End of a search.
#[derive(Debug)]
pub enum Ended {
    /// With a result.
    Done(Box<Tuned>),
    /// By the caller's request; the number of measurements kept.
    Interrupted(usize),
}

/// Extracts queries, keys and values to tune on.
pub fn extract_layers(
    model: &Arc<Model>,
    text: &Text,
    settings: &Settings,
    threads: usize,
    progress: &mut (dyn FnMut(usize, usize) + Send),
    stop: &AtomicBool,
) -> Result<Workload> {
    let wanted =
        extract::Settings { layers: settings.layers.clone(), threads, ..extract::Settings::default() };
    Ok(extract::extract(model, text, &wanted, progress, stop)?.workload)
}

/// Returns everything that measurements depend on: the inputs, the machine, the registry, effort, seed and version.
pub fn key(workload: &Workload, settings: &Settings, run: &Run<'_>) -> Result<Key> {
    let ws = run.workspace()?;
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
        seed: run.seed,
        version: env!("CARGO_PKG_VERSION").into(),
    })
}

/// A model on which recipes are tried.
pub trait Check {
    /// Runs the model with a recipe and with exact attention over `check`, in windows of `context` tokens; `None` once
    /// `stop` is set.
    fn check(
        &mut self,
        recipe: &Recipe,
        check: &Text,
        context: usize,
        stop: &AtomicBool,
    ) -> Result<Option<Record>>;

    /// Returns the model's sizes in one line, as from [`shape`](crate::text::shape).
    fn shape(&self) -> String;

    /// Returns the model after it has read `text`, ready to measure the loss of changed key heads; `None` if it cannot.
    fn replace(&mut self, text: &Text, rows: usize, stop: &AtomicBool) -> Result<Option<Box<dyn Replace>>> {
        let _ = (text, rows, stop);
        Ok(None)
    }

    /// Returns the layers in which exact attention decodes because a method for new tokens has no stream.
    fn decodes_exactly(&self, recipe: &Recipe) -> Result<Vec<usize>> {
        let _ = recipe;
        Ok(Vec::new())
    }

    /// Runs the model with a recipe and decodes the last `steps` of the first `context` tokens of `check` one by one;
    /// `None` if it cannot, or once `stop` is set.
    fn decode(
        &mut self,
        recipe: &Recipe,
        check: &Text,
        context: usize,
        steps: usize,
        stop: &AtomicBool,
    ) -> Result<Option<Outcome>> {
        let _ = (recipe, check, context, steps, stop);
        Ok(None)
    }
}

/// Searches for a recipe. `check` is text that was not used for tuning. Steps are key heads.
pub fn tune(
    model: &mut dyn Check,
    text: &Text,
    check: &Text,
    workload: &Workload,
    settings: &Settings,
    state: &mut SearchState,
    run: &mut Run<'_>,
) -> Result<Ended> {
    tune_with(model, text, check, workload, settings, state, &Alone::default(), run)
}

/// Searches with key heads shared among the processes of a crew; each has its own state ([`SearchState::open_with`])
/// and comes to the same result.
pub fn tune_with(
    model: &mut dyn Check,
    text: &Text,
    check: &Text,
    workload: &Workload,
    settings: &Settings,
    state: &mut SearchState,
    crew: &dyn Crew,
    run: &mut Run<'_>,
) -> Result<Ended> {
    let search = Search::new(workload, settings, crew, run)?;
    let mut tuning = Tuning { model, text, check, settings, search, state, crew, run };
    match tuning.whole()? {
        Some(tuned) => Ok(Ended::Done(Box::new(tuned))),
        None => Ok(Ended::Interrupted(tuning.state.len())),
    }
}

impl Settings {
    /// Returns true if every budget on the model is met. NaN exceeds every budget.
    fn holds(&self, x: &Outcome) -> bool {
        let within = |value: f64, limit: Option<f64>| limit.is_none_or(|limit| value <= limit);
        let kl = x.kl_mean + BOUND * if x.kl_se.is_finite() { x.kl_se } else { 0.0 };
        within(kl, self.max_kl)
            && within(x.ppl_increase_upper, self.max_ppl_increase)
            && within(x.kl_mean.exp_m1(), self.max_ppl_increase)
            && x.kl_mean.is_finite()
    }
}

impl Tuned {
    /// Returns a table with one line per key head.
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

    /// Returns a table with one line per sum of divergences.
    pub fn round_table(&self) -> Table {
        let mut table = Table::new(&[
            "divergence",
            "changed",
            "attention",
            "KL",
            "perplexity",
            "at most",
            "same top",
            "time",
            "<holds",
        ]);
        let mut push = |first: String, r: Option<&Round>, x: Option<&Outcome>, holds: &str| {
            let time = |x: &Outcome| x.exact_seconds.map_or("-".into(), |exact| percent(x.seconds / exact));
            table.push(vec![
                first,
                r.map_or("".into(), |r| percent(r.changed)),
                r.map_or("".into(), |r| percent(r.cost)),
                x.map_or("0".into(), |x| number(x.kl_mean)),
                x.map_or("+0.00%".into(), |x| format!("{:+.2}%", 100.0 * x.ppl_increase)),
                x.map_or("+0.00%".into(), |x| format!("{:+.2}%", 100.0 * x.ppl_increase_upper)),
                x.map_or("100.0%".into(), |x| format!("{:.1}%", 100.0 * x.same_top)),
                x.map_or("100%".into(), time),
                holds.into(),
            ]);
        };
        for (i, r) in self.rounds.iter().enumerate() {
            let holds = match (r.holds, self.chosen == Some(i) && self.note.is_none()) {
                (true, true) => "taken",
                (true, false) => "yes",
                (false, _) => "no",
            };
            push(r.target.map_or("any".into(), number), Some(r), r.check.as_ref(), holds);
        }
        if let Some(x) = &self.answer {
            push("third text".into(), None, Some(x), "yes");
        }
        if let Some(x) = &self.decoded {
            push("new tokens".into(), None, Some(x), "yes");
        }
        table
    }

    /// Returns the mean time of attention over exact attention's, for the final choices.
    pub fn cost(&self) -> f64 {
        self.picks.iter().map(|p| p.cost).sum::<f64>() / self.picks.len().max(1) as f64
    }

    /// Returns the mean time of attention for a new token over exact attention's; none if new tokens were not tuned.
    pub fn decode_cost(&self) -> Option<f64> {
        let costs: Vec<f64> = self.picks.iter().filter_map(|p| Some(p.decode.as_ref()?.cost)).collect();
        (!costs.is_empty()).then(|| crate::stats::mean(&costs))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns default settings.
    pub(super) fn settings() -> Settings {
        Settings {
            max_error: None,
            max_kl: None,
            max_ppl_increase: None,
            selection: Vec::new(),
            calibrations: Arc::default(),
            answer: None,
            task: None,
            decode: false,
            layers: None,
            effort: Effort::Quick,
            shard: None,
            model: "a model".into(),
            command: None,
        }
    }

    #[test]
    fn a_budget_holds_where_its_upper_bound_does_and_the_divergence() {
        let one = Settings { max_ppl_increase: Some(0.01), ..settings() };
        let x = |upper: f64, kl: f64| Outcome {
            scored: 100,
            ppl: 10.0,
            exact_ppl: 10.0,
            ppl_increase: 0.0,
            ppl_increase_upper: upper,
            kl_mean: kl,
            kl_se: 0.0,
            same_top: 1.0,
            keys_share: 0.1,
            seconds: 1.0,
            exact_seconds: Some(2.0),
        };
        assert!(one.holds(&x(0.009, 0.009)) && !one.holds(&x(0.011, 0.001)));
        assert!(!one.holds(&x(-0.5, 0.02)), "luck on one text is no promise");
        assert!(!one.holds(&x(f64::NAN, 0.0)) && !one.holds(&x(0.0, f64::NAN)));
        let kl = Settings { max_kl: Some(0.1), ..settings() };
        assert!(kl.holds(&x(9.0, 0.1)) && !kl.holds(&Outcome { kl_se: 0.01, ..x(0.0, 0.1) }));
    }

    #[test]
    fn shards_are_read_as_a_part_of_a_whole() {
        assert_eq!("2/3".parse::<Shard>().unwrap(), Shard { index: 2, count: 3 });
        assert!(["", "3/3", "a/2", "1", "-1/2", "0/0"].iter().all(|t| t.parse::<Shard>().is_err()));
    }
}
