//! Which method for which head of a model, within an error that is accepted.
//!
//! For every layer and key head the methods of a selection are run, with growing budgets, on the queries, keys and
//! values of the model reading a text. The choice is the method with the least measured time, as a share of exact
//! attention's in the same process, whose error stays within the target; exact attention is always a choice. The error
//! is the largest relative Frobenius error of the heads that share the key head. It is certified by a census: exact
//! attention is computed on every row, so the bound of [`certify`](crate::certify) is the error itself.
//!
//! Budgets are tried from the smallest up, and no further than the first that is accurate enough or no longer faster
//! than what is already found: a larger one takes longer. Methods that are nowhere faster than exact attention on a few
//! key heads, spread over the layers, are not tried on the others.
//!
//! Then the model runs with that recipe over text that was not used for tuning. Where the divergence from the exact model
//! or the increase of the perplexity is over the budget, the target is halved and the search goes on where it stopped;
//! with exact attention everywhere both are zero, so it ends. A recipe that is not faster than exact attention in that run
//! is given up for exact attention.
//!
//! Every measurement is appended to a file as soon as it is made ([`State`]), so that an interrupted search resumes, and
//! parts of a search made elsewhere ([`Shard`]) can be merged.

use crate::calibration::Calibrations;
use crate::compare::{self, Group};
use crate::hash::sha256;
use crate::perplexity::{self, Record};
use crate::select::Chosen;
use crate::source::{LayerData, Workload};
use crate::table::{Table, number, percent, seconds};
use crate::text::Text;
use crate::{Error, Result, extract};
use attlas::method::{Budget, Needs};
use attlas::params::Value;
use attlas::{Mask, Method, Options, Problem, Schedule, Workspace, registry};
use attlas_model::Model;
use attlas_model::perplexity::Protocol;
use attlas_model::recipe::{Measured, Numbers, Recipe, Rule};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Words for budgets in the shared vocabulary of parameters: more of it is more accurate and takes longer.
const BUDGETS: [&str; 10] =
    ["keys", "window", "block", "samples", "rank", "landmarks", "budget", "features", "rounds", "clusters"];
/// A method replaces exact attention where it takes at most this share of its time: what is gained below is less than
/// what a measurement is uncertain by.
const WORTH_IT: f64 = 0.9;
/// Where the search begins if only the model's own budget is given.
const FIRST_TARGET: f64 = 0.2;
/// Halvings after which exact attention is taken.
const ROUNDS: usize = 8;

/// How much is tried.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Effort {
    /// Two budgets of each method, one run of each; methods chosen by two key heads.
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
            Self::Quick => &[4, 2],
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

/// What is asked for.
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
}

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
    done: BTreeMap<(usize, usize, String), Measurement>,
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

    fn get(&self, layer: usize, kv_head: usize, candidate: &Candidate) -> Option<&Measurement> {
        self.done.get(&(layer, kv_head, candidate.name()))
    }

    fn push(&mut self, m: Measurement) -> Result<()> {
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

/// A method with one budget.
#[derive(Clone, Debug)]
struct Candidate {
    method: &'static Method,
    options: Options,
}

impl Candidate {
    fn name(&self) -> String {
        format!("{} {}", self.method.id, self.options)
    }
}

/// A method's budgets, smallest first.
type Ladder = Vec<Candidate>;

/// The budgets of a method that it accepts for a problem; empty where it cannot do it.
fn ladder(chosen: &Chosen, problem: &Problem, effort: Effort, seed: u64) -> Ladder {
    let method = chosen.method;
    let base = chosen.options_for(seed);
    if std::ptr::eq(method, registry::baseline()) && chosen.options.is_empty() {
        return Vec::new();
    }
    let free = |name: &str| {
        BUDGETS.contains(&name)
            && chosen.options.get(name).is_none()
            && method.params.iter().any(|p| p.name == name && p.kind == "integer")
    };
    let covers = |b: &Budget| matches!(b, Budget::NumKeys | Budget::NumTokens);
    let mut names: Vec<&str> =
        method.claims.exact_at.iter().filter(|(n, b)| covers(b) && free(n)).map(|(n, _)| *n).collect();
    if names.is_empty() {
        names.extend(BUDGETS.into_iter().find(|n| free(n)));
    }
    let mut steps: Vec<Options> = Vec::new();
    for halvings in effort.halvings() {
        let budget = (problem.n_k >> halvings).max(1);
        let options = names.iter().fold(base.clone(), |options, name| options.with(name, budget));
        if !steps.contains(&options) {
            steps.push(options);
        }
    }
    // A recipe is planned again for other lengths, so short ones must be possible, too.
    let short = problem.with_lens(problem.n_q.min(64), problem.n_k.min(64));
    let accepted = |o: &Options| method.plan(problem, o).is_ok() && method.plan(&short, o).is_ok();
    steps.retain(accepted);
    if steps.is_empty() && accepted(&base) {
        steps.push(base);
    }
    steps.into_iter().map(|options| Candidate { method, options }).collect()
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
    /// One for each target.
    pub rounds: Vec<Round>,
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

/// A name for what measurements are made on: the numbers, the machine's instruction set and threads, seed and version.
pub fn key(workload: &Workload, settings: &Settings) -> Result<String> {
    let ws = Workspace::new(Schedule { threads: settings.threads, ..Schedule::default() })?;
    let mut bytes = format!(
        "{} {} {} {} {}",
        env!("CARGO_PKG_VERSION"),
        ws.schedule().isa,
        ws.schedule().threads,
        settings.seed,
        workload.layers.len()
    )
    .into_bytes();
    // The last layer depends on the whole model and text.
    if let Some(x) = workload.layers.last() {
        for part in [&x.q, &x.k, &x.v] {
            bytes.extend(part.iter().flat_map(|v| v.to_le_bytes()));
        }
    }
    Ok(sha256(&bytes))
}

/// Searches. `check` is text that was not used for tuning. `watch` is told key heads done, key heads in all, and what is
/// being done.
pub fn tune(
    model: &Arc<Model>,
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
        rounds: Vec::new(),
        picks: Vec::new(),
        note: None,
        recipe: None,
    };
    let mut target = settings.max_error.unwrap_or(FIRST_TARGET);
    loop {
        let Some(picks) = search.round(target, state, watch, stop)? else {
            return Ok(Ended::Interrupted(state.len()));
        };
        tuned.measurements = state.len();
        if settings.shard.is_some() {
            return Ok(Ended::Done(Box::new(tuned)));
        }
        let changed =
            picks.iter().filter(|p| p.method != registry::baseline().id || !p.params.is_empty()).count();
        let n = picks.len().max(1) as f64;
        let mut round = Round {
            target,
            changed: changed as f64 / n,
            cost: picks.iter().map(|p| p.cost).sum::<f64>() / n,
            check: None,
            holds: true,
        };
        let mut recipe = recipe(&picks, settings);
        if changed > 0 {
            watch(0, 1, &format!("checking on other text, target {}", number(target)));
            let protocol = Protocol::Strided { window: text.tokens.len(), stride: text.tokens.len() };
            let how = perplexity::Settings {
                protocol,
                bos: false,
                recipe: Some(recipe.clone()),
                threads: settings.threads,
            };
            let record = match perplexity::perplexity(model, check, &how, &mut |_, _, _| (), stop) {
                Err(Error::Model(attlas_model::Error::Interrupted)) => {
                    return Ok(Ended::Interrupted(state.len()));
                }
                Ok(record) if record.interrupted => return Ok(Ended::Interrupted(state.len())),
                other => other?,
            };
            round.holds = holds(&record, settings);
            round.check = Some(record);
        }
        let slower = round
            .check
            .as_ref()
            .and_then(|r| r.against_exact.as_ref().map(|x| (r.seconds, x.exact_seconds)))
            .filter(|(own, exact)| own >= exact);
        let held = round.holds;
        tuned.rounds.push(round);
        let give_up = if let (true, Some((own, exact))) = (held, slower) {
            Some(format!(
                "the best recipe took {} where exact attention took {}",
                seconds(own),
                seconds(exact)
            ))
        } else if !held && tuned.rounds.len() > ROUNDS {
            Some(format!("no recipe held the budget down to an error of {}", number(target)))
        } else {
            (changed == 0).then(|| "no method was both accurate enough and faster".into())
        };
        if give_up.is_some() {
            tuned.picks = picks.into_iter().map(Pick::exact).collect();
            recipe = self::recipe(&tuned.picks, settings);
        } else if held {
            tuned.picks = picks;
        } else {
            target /= 2.0;
            continue;
        }
        tuned.note = give_up;
        recipe.evidence = evidence(&tuned, text, check);
        tuned.recipe = Some(recipe);
        return Ok(Ended::Done(Box::new(tuned)));
    }
}

fn holds(record: &Record, settings: &Settings) -> bool {
    let Some(x) = &record.against_exact else { return true };
    // What is no number is over every budget.
    let within = |value: f64, limit: Option<f64>| limit.is_none_or(|limit| value <= limit);
    within(x.kl_mean, settings.max_kl)
        && within(x.ppl_increase, settings.max_ppl_increase)
        && x.kl_mean.is_finite()
}

impl Pick {
    fn exact(self) -> Self {
        Self { method: registry::baseline().id.into(), params: Options::new(), error: 0.0, cost: 1.0, ..self }
    }
}

/// Rules for every layer; key heads of a layer with the same choice share one.
fn recipe(picks: &[Pick], settings: &Settings) -> Recipe {
    let mut rules: Vec<(usize, Rule, f64)> = Vec::new();
    for p in picks {
        if p.method == registry::baseline().id && p.params.is_empty() {
            continue;
        }
        let same = |(layer, rule, _): &&mut (usize, Rule, f64)| {
            *layer == p.layer && rule.method == p.method && rule.params == p.params
        };
        if let Some((_, rule, members)) = rules.iter_mut().find(same) {
            let heads = rule.heads.iter().flat_map(Numbers::iter).chain(p.heads.iter()).collect();
            rule.heads = Some(heads);
            if let Some(m) = &mut rule.measured {
                m.error = m.error.map(|e| e.max(p.error));
                m.cost = m.cost.map(|c| (c * *members + p.cost) / (*members + 1.0));
            }
            *members += 1.0;
            continue;
        }
        let rule = Rule {
            layers: Some([p.layer].into_iter().collect()),
            heads: Some(p.heads.clone()),
            method: p.method.clone(),
            params: p.params.clone(),
            measured: Some(Measured { error: Some(p.error), cost: Some(p.cost) }),
        };
        rules.push((p.layer, rule, 1.0));
    }
    Recipe {
        producer: Some(concat!("attlas ", env!("CARGO_PKG_VERSION"), " tune").into()),
        model: Some(settings.model.clone()),
        rules: rules.into_iter().map(|r| r.1).collect(),
        ..Recipe::default()
    }
}

fn evidence(tuned: &Tuned, text: &Text, check: &Text) -> BTreeMap<String, Value> {
    let mut out: BTreeMap<String, Value> = BTreeMap::new();
    let mut put = |name: &str, value: Value| out.insert(name.into(), value);
    put("text", Value::Text(text.source.clone()));
    put("text_sha256", Value::Text(text.sha256.clone()));
    put("tokens", tuned.tokens.into());
    put("check_text", Value::Text(check.source.clone()));
    put("check_tokens", check.tokens.len().into());
    if let Some(note) = &tuned.note {
        put("note", Value::Text(note.clone()));
    }
    if let (Some(round), None) = (tuned.rounds.last(), &tuned.note) {
        put("target_error", round.target.into());
        put("attention_cost", round.cost.into());
        if let Some((r, x)) = round.check.as_ref().and_then(|r| Some((r, r.against_exact.as_ref()?))) {
            put("ppl", r.ppl.into());
            put("exact_ppl", x.exact_ppl.into());
            put("kl_mean", x.kl_mean.into());
            put("same_top", x.same_top.into());
            put("seconds", r.seconds.into());
            put("exact_seconds", x.exact_seconds.into());
        }
    }
    out
}

/// The layers, the budgets of every method on each, and which methods are still worth trying.
struct Search<'a> {
    workload: &'a Workload,
    settings: &'a Settings,
    /// For each layer.
    ladders: Vec<Vec<Ladder>>,
    bench: &'a Bench,
    ws: Workspace,
}

/// How measurements are made; no method gets anything that was learnt before.
struct Bench {
    measuring: compare::Settings,
    given: Calibrations,
}

impl Bench {
    fn new(workload: &Workload, settings: &Settings) -> Self {
        let measuring = compare::Settings {
            seeds: 1,
            seed: settings.seed,
            threads: settings.threads,
            certify_rows: workload.layers.iter().map(|l| l.problem.n_q).max().unwrap_or(0),
            runs: settings.effort.runs(),
            ..compare::Settings::default()
        };
        Self { measuring, given: Calibrations::default() }
    }
}

impl<'a> Search<'a> {
    fn new(workload: &'a Workload, settings: &'a Settings, bench: &'a Bench) -> Result<Self> {
        let ladders = workload.layers.iter().map(|layer| {
            let problem = layer.group_problem(Mask::Causal);
            let able = |c: &&Chosen| {
                let claims = &c.method.claims;
                let wanted = c.named || settings.effort == Effort::Thorough || claims.softmax;
                wanted && claims.causal && claims.needs != Needs::Calibration && !claims.oracle
            };
            let ladders = settings.selection.iter().filter(able);
            ladders
                .map(|c| ladder(c, &problem, settings.effort, settings.seed))
                .filter(|l| !l.is_empty())
                .collect()
        });
        Ok(Self {
            workload,
            settings,
            ladders: ladders.collect(),
            bench,
            ws: Workspace::new(Schedule { threads: settings.threads, ..Schedule::default() })?,
        })
    }

    /// The choice of every key head for a target, or of those of the shard; `None` once `stop` is set.
    fn round(
        &mut self,
        target: f64,
        state: &mut State,
        watch: &mut dyn FnMut(usize, usize, &str),
        stop: &AtomicBool,
    ) -> Result<Option<Vec<Pick>>> {
        let layers = &self.workload.layers;
        let units: Vec<(usize, usize)> = layers
            .iter()
            .enumerate()
            .flat_map(|(i, l)| (0..l.problem.n_kv_heads).map(move |g| (i, g)))
            .collect();
        let dropped = match self.screen(&units, state, watch, stop)? {
            Some(dropped) => dropped,
            None => return Ok(None),
        };
        let mut picks = Vec::new();
        let begun = Instant::now();
        let known = state.len();
        for (done, &(i, g)) in units.iter().enumerate() {
            if self.settings.shard.is_some_and(|s| done % s.count != s.index) {
                continue;
            }
            // What is already known takes no time, so it says nothing about the rest.
            let left = if state.len() > known && done > 0 {
                let each = begun.elapsed().as_secs_f64() / done as f64;
                format!(", about {} left", seconds(each * (units.len() - done) as f64))
            } else {
                String::new()
            };
            let layer = layers[i].layer.unwrap_or(i);
            watch(
                done,
                units.len(),
                &format!("layer {layer}, key head {g}, target {}{left}", number(target)),
            );
            match self.pick(i, g, target, &dropped, state, stop)? {
                Some(pick) => picks.push(pick),
                None => return Ok(None),
            }
        }
        Ok(Some(picks))
    }

    /// Methods that are faster than exact attention on none of a few key heads.
    fn screen(
        &mut self,
        units: &[(usize, usize)],
        state: &mut State,
        watch: &mut dyn FnMut(usize, usize, &str),
        stop: &AtomicBool,
    ) -> Result<Option<Vec<&'static str>>> {
        let count = self.settings.effort.screens().min(units.len());
        let mut fast: Vec<&'static str> = Vec::new();
        let mut all: Vec<&'static str> = Vec::new();
        for s in 0..count {
            // The middles of equal parts of the model.
            let (i, g) = units[(2 * s + 1) * units.len() / (2 * count)];
            let firsts: Vec<Candidate> = self.ladders[i].iter().map(|l| l[0].clone()).collect();
            let mut bench = None;
            for c in firsts {
                if stop.load(Ordering::Relaxed) {
                    return Ok(None);
                }
                watch(s, count, &format!("screening {}", c.method.id));
                let m = self.measure(i, g, &c, &mut bench, state)?;
                all.push(c.method.id);
                if m.cost <= WORTH_IT {
                    fast.push(c.method.id);
                }
            }
        }
        Ok(Some(all.into_iter().filter(|id| !fast.contains(id)).collect()))
    }

    fn pick(
        &mut self,
        i: usize,
        g: usize,
        target: f64,
        dropped: &[&str],
        state: &mut State,
        stop: &AtomicBool,
    ) -> Result<Option<Pick>> {
        let layer: &'a LayerData = &self.workload.layers[i];
        let size = layer.problem.group_size();
        let mut best = Pick {
            layer: layer.layer.unwrap_or(i),
            kv_head: g,
            heads: (g * size..(g + 1) * size).collect(),
            method: registry::baseline().id.into(),
            params: Options::new(),
            error: 0.0,
            cost: 1.0,
        };
        let mut bench = None;
        for ladder in self.ladders[i].clone() {
            if dropped.contains(&ladder[0].method.id) {
                continue;
            }
            for candidate in ladder {
                if stop.load(Ordering::Relaxed) {
                    return Ok(None);
                }
                let m = self.measure(i, g, &candidate, &mut bench, state)?;
                if m.cost > WORTH_IT || m.cost >= best.cost {
                    break;
                }
                if let Some(error) = m.error.filter(|e| *e <= target) {
                    best = Pick { method: m.method, params: m.params, error, cost: m.cost, ..best };
                    break;
                }
            }
        }
        Ok(Some(best))
    }

    /// A measurement that is known, or a new one that is kept at once.
    fn measure(
        &mut self,
        i: usize,
        g: usize,
        candidate: &Candidate,
        bench: &mut Option<Group<'a>>,
        state: &mut State,
    ) -> Result<Measurement> {
        let layer: &'a LayerData = &self.workload.layers[i];
        let number = layer.layer.unwrap_or(i);
        if let Some(m) = state.get(number, g, candidate) {
            return Ok(m.clone());
        }
        let chosen = Chosen { method: candidate.method, options: candidate.options.clone(), named: true };
        let group = match bench {
            Some(group) => group,
            None => {
                let Bench { measuring, given } = self.bench;
                bench.insert(Group::new(layer, g, Mask::Causal, measuring, given, &mut self.ws)?)
            }
        };
        let rows = group.measure(&chosen, None, &mut Calibrations::default(), &mut self.ws);
        let mut m = Measurement {
            layer: number,
            kv_head: g,
            method: candidate.method.id.into(),
            params: candidate.options.clone(),
            error: None,
            seconds: 0.0,
            // A method that fails on these numbers is never worth it.
            cost: f64::MAX,
        };
        if let Ok(rows) = rows {
            m.error = rows.iter().try_fold(0.0, |a: f64, r| r.certified.bound.map(|b| a.max(b)));
            m.seconds = rows.iter().map(|r| r.setup_seconds + r.run_seconds).sum();
            let exact: f64 = rows.iter().map(|r| r.speedup * (r.setup_seconds + r.run_seconds)).sum();
            m.cost = if exact > 0.0 { m.seconds / exact } else { f64::MAX };
        }
        state.push(m.clone())?;
        Ok(m)
    }
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
        for r in &self.rounds {
            let x = r.check.as_ref().and_then(|c| Some((c, c.against_exact.as_ref()?)));
            table.push(vec![
                number(r.target),
                percent(r.changed),
                percent(r.cost),
                x.map_or("0".into(), |(_, x)| number(x.kl_mean)),
                x.map_or("+0.00%".into(), |(_, x)| format!("{:+.2}%", 100.0 * x.ppl_increase)),
                x.map_or("100.0%".into(), |(_, x)| format!("{:.1}%", 100.0 * x.same_top)),
                x.map_or("100%".into(), |(c, x)| percent(c.seconds / x.exact_seconds)),
                if r.holds { "yes" } else { "no" }.into(),
            ]);
        }
        table
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::select::Choice;

    fn settings(methods: &[&str], max_error: f64) -> Settings {
        let methods: Vec<String> = methods.iter().map(|m| m.to_string()).collect();
        Settings {
            max_error: Some(max_error),
            max_kl: None,
            max_ppl_increase: None,
            selection: Choice { methods, ..Choice::default() }.resolve().unwrap(),
            layers: None,
            effort: Effort::Thorough,
            shard: None,
            seed: 7,
            threads: 1,
            model: "a model".into(),
        }
    }

    fn workload() -> Workload {
        let mut workload = "synthetic:clustered,n=256,d=8,heads=4,kv_heads=2"
            .parse::<crate::Source>()
            .unwrap()
            .load()
            .unwrap();
        workload.mask = Mask::Causal;
        workload
    }

    fn search(settings: &Settings, target: f64, state: &mut State) -> Vec<Pick> {
        let workload = workload();
        let bench = Bench::new(&workload, settings);
        let mut search = Search::new(&workload, settings, &bench).unwrap();
        search.round(target, state, &mut |_, _, _| (), &AtomicBool::new(false)).unwrap().unwrap()
    }

    /// A measurement that says what a test needs.
    fn made_up(kv_head: usize, candidate: &Candidate, error: f64, cost: f64) -> Measurement {
        Measurement {
            layer: 0,
            kv_head,
            method: candidate.method.id.into(),
            params: candidate.options.clone(),
            error: Some(error),
            seconds: cost,
            cost,
        }
    }

    fn ladder_of(id: &str, s: &Settings) -> Ladder {
        let chosen = s.selection.iter().find(|c| c.method.id == id).unwrap();
        ladder(chosen, &workload().layers[0].group_problem(Mask::Causal), s.effort, s.seed)
    }

    #[test]
    fn budgets_grow_with_the_number_of_keys_and_carry_the_seed() {
        let s = settings(&["sink_window", "hyper"], 0.1);
        let windows: Vec<String> = ladder_of("sink_window", &s)
            .iter()
            .map(|c| c.options.get("window").unwrap().to_string())
            .collect();
        assert_eq!(windows, ["4", "8", "16", "32", "64", "128"]);
        assert!(ladder_of("hyper", &s).iter().all(|c| c.options.get("seed") == Some(&7u64.into())));
        let exact = Choice { methods: vec!["exact".into()], ..Choice::default() }.resolve().unwrap();
        let problem = workload().layers[0].group_problem(Mask::Causal);
        assert!(ladder(&exact[0], &problem, Effort::Quick, 0).is_empty(), "exact attention is always there");
    }

    #[test]
    fn the_cheapest_method_within_the_target_is_chosen_and_a_tighter_target_goes_on() {
        let s = settings(&["sink_window", "top_k"], 0.1);
        let (windows, tops) = (ladder_of("sink_window", &s), ladder_of("top_k", &s));
        let mut state = State::open(None, "k").unwrap();
        for g in 0..2 {
            for (i, c) in windows.iter().enumerate() {
                state.push(made_up(g, c, 0.4 / f64::from(1 << i), 0.1 + 0.1 * i as f64)).unwrap();
            }
            for (i, c) in tops.iter().enumerate() {
                state.push(made_up(g, c, 0.09 / f64::from(1 << i), 0.35 + 0.2 * i as f64)).unwrap();
            }
        }
        let known = state.len();
        // Windows reach 0.1 at the third step for 0.3 of the time; keys at the first for 0.35.
        let loose = search(&s, 0.1, &mut state);
        assert_eq!(
            (loose.len(), loose[0].method.as_str(), loose[0].cost),
            (2, "sink_window", 0.30000000000000004)
        );
        assert_eq!(loose[1].heads.to_string(), "2-3");
        // 0.05 takes the fourth window, 0.4, or the second number of keys, 0.55.
        assert_eq!(search(&s, 0.05, &mut state)[0].params, windows[3].options);
        // 0.0126 takes the sixth window, 0.6; the third number of keys, 0.75, is dearer and not accurate enough.
        let tight = search(&s, 0.0126, &mut state);
        assert_eq!((tight[0].method.as_str(), tight[0].error), ("sink_window", 0.0125));
        // Nothing reaches 1e-9: exact attention is left.
        let none = search(&s, 1e-9, &mut state);
        assert_eq!((none[0].method.as_str(), none[0].error, none[0].cost), ("exact", 0.0, 1.0));
        assert_eq!(state.len(), known, "everything was known");
    }

    #[test]
    fn real_measurements_stay_within_the_target() {
        let s = settings(&["sink_window", "top_k"], 0.3);
        let mut state = State::open(None, "k").unwrap();
        let picks = search(&s, 0.3, &mut state);
        assert!(picks.iter().all(|p| p.error <= 0.3 && p.cost <= 1.0), "{picks:?}");
        assert!(!state.is_empty());
        assert!(state.done.values().all(|m| m.error.is_some_and(|e| e.is_finite()) && m.cost > 0.0));
    }

    #[test]
    fn key_heads_with_the_same_choice_share_a_rule() {
        let s = settings(&["sink_window"], 0.1);
        let pick = |layer, kv_head: usize, method: &str, error, cost| Pick {
            layer,
            kv_head,
            heads: (3 * kv_head..3 * kv_head + 3).collect(),
            method: method.into(),
            params: if method == "exact" { Options::new() } else { Options::new().with("window", 32) },
            error,
            cost,
        };
        let picks = [
            pick(0, 0, "sink_window", 0.02, 0.5),
            pick(0, 1, "exact", 0.0, 1.0),
            pick(0, 2, "sink_window", 0.04, 0.3),
            pick(1, 0, "sink_window", 0.01, 0.4),
        ];
        let made = recipe(&picks, &s);
        assert_eq!(made.rules.len(), 2);
        assert_eq!(made.rules[0].heads.as_ref().unwrap().to_string(), "0-2,6-8");
        let m = made.rules[0].measured.unwrap();
        assert_eq!((m.error, m.cost), (Some(0.04), Some(0.4)));
        assert_eq!(made.choice(0, 4).0, "exact");
        assert_eq!(made.choice(1, 1).0, "sink_window");
        assert_eq!(Recipe::from_toml(&made.to_toml().unwrap()).unwrap(), made);
    }

    #[test]
    fn measurements_survive_a_cut_line_and_are_refused_for_anything_else() {
        let path = std::env::temp_dir().join(format!("attlas-tune-{}.jsonl", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let s = settings(&["sink_window"], 0.1);
        let steps = ladder_of("sink_window", &s);
        let mut state = State::open(Some(&path), "one").unwrap();
        state.push(made_up(0, &steps[0], 0.5, 0.1)).unwrap();
        state.push(made_up(1, &steps[1], 0.25, 0.2)).unwrap();
        let whole = std::fs::read_to_string(&path).unwrap();
        assert_eq!(whole.lines().count(), 3);
        std::fs::write(&path, &whole[..whole.len() - 9]).unwrap();
        let again = State::open(Some(&path), "one").unwrap();
        assert_eq!(again.done.into_values().collect::<Vec<_>>(), [made_up(0, &steps[0], 0.5, 0.1)]);
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

    #[test]
    fn shards_are_read_as_a_part_of_a_whole() {
        assert_eq!("2/3".parse::<Shard>().unwrap(), Shard { index: 2, count: 3 });
        assert!(["", "3/3", "a/2", "1", "-1/2", "0/0"].iter().all(|t| t.parse::<Shard>().is_err()));
    }

    #[test]
    fn a_stop_ends_the_search_between_measurements() {
        let s = settings(&["sink_window"], 0.1);
        let workload = workload();
        let bench = Bench::new(&workload, &s);
        let mut search = Search::new(&workload, &s, &bench).unwrap();
        let mut state = State::open(None, "k").unwrap();
        let stopped = search.round(0.1, &mut state, &mut |_, _, _| (), &AtomicBool::new(true)).unwrap();
        assert!(stopped.is_none() && state.is_empty());
    }
}
