//! Perplexity of a model on a text, and its change under another attention.
//!
//! With a recipe the model runs twice over every window, once with exact attention, and the two predictions are
//! compared token by token as they are made; no logits are kept. Windows are independent and can be shared by several
//! processes. Figures of single tokens are added in the order of the text: the sums do not depend on the number of
//! processes.

use crate::crew::{Alone, Crew, Together};
use crate::extract::bos;
use crate::run::{Run, timed};
use crate::task::{self, Task};
use crate::text::Text;
use crate::units::{Done, Ledger, share};
use crate::{Error, Result};
use attlas::{Options, Status, Workspace};
use attlas_model::decoder::{Held, LOGIT_ROWS, Observer, SpreadAttention};
use attlas_model::kept::CacheFormat;
use attlas_model::perplexity::{Difference, Divergence, Mean, Perplexity, Protocol, Window, nll};
use attlas_model::{Compute, Decoder, Model, Recipe, Rows};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Settings of a measurement: windows, attention and number formats.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Windows, and the tokens scored in them.
    pub protocol: Protocol,
    /// Put the beginning-of-text token at the start of every window. With [`Protocol::SecondHalf`] it replaces the
    /// first token; otherwise a window has one token of the text less.
    pub bos: bool,
    /// Build from the text a prompt that needs distant keys, and score only the tokens that need them; the protocol
    /// then gives only the length of the prompt.
    pub task: Option<Task>,
    /// Recipe of attention; exact if absent.
    pub recipe: Option<Recipe>,
    /// Format of stored keys and values; the cost is measured beside single precision.
    pub cache: CacheFormat,
    /// Type that operands of linear layers are rounded to; the cost is measured beside single precision.
    pub compute: Compute,
    /// Division of the work if there are several processes.
    pub sharing: Sharing,
}

/// Division of the work among several processes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sharing {
    /// Windows: each runs on one process.
    #[default]
    Windows,
    /// Tokens of every window, with their keys and values in all layers.
    Keys,
    /// Tokens if there are fewer windows than processes, otherwise windows.
    Fewer,
}

/// Size of keys and values divided among several processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct SpreadKeys {
    /// Processes.
    pub processes: usize,
    /// Bytes of keys and values of all layers in the longest window, on the process that has the most.
    pub cache_bytes: usize,
}

/// The measurement.
#[derive(Clone, Debug, Serialize)]
pub struct Record {
    /// The text.
    pub text: String,
    /// SHA-256 of the text's file.
    pub text_sha256: String,
    /// Tokens of the text that were read.
    pub tokens: usize,
    /// Tokens that were scored.
    pub scored: u64,
    /// `strided`, `llamacpp` or `windows`; `task` if a task made the prompt.
    pub protocol: &'static str,
    /// The task whose answers were scored.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub task: Option<Task>,
    /// Tokens of a window.
    pub context: usize,
    /// Tokens from the start of a window to the start of the next.
    pub stride: usize,
    /// True if every window began with the beginning-of-text token.
    pub bos: bool,
    /// Windows that were run.
    pub windows: usize,
    /// `exact`, the id of a method, or `recipe`.
    pub attention: String,
    /// Storage format of keys and values.
    pub cache: CacheFormat,
    /// Type that operands of linear layers were rounded to.
    #[serde(serialize_with = "crate::text::compute_name")]
    pub compute: Compute,
    /// Formats of matrices that were multiplied in single precision nevertheless, with the number of matrices of each.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub in_f32: BTreeMap<&'static str, usize>,
    /// Parameters set for a single method.
    pub params: Options,
    /// Mean negative log-likelihood, in nats.
    pub nll: f64,
    /// Its standard error, as if tokens were independent.
    pub nll_se: f64,
    /// Perplexity: $e$ to the power of `nll`.
    pub ppl: f64,
    /// Its standard error.
    pub ppl_se: f64,
    /// Seconds of running the model over all windows, logits included.
    pub seconds: f64,
    /// Tokens per second.
    pub tokens_per_second: f64,
    /// Comparison with exact attention, if the model ran another attention.
    #[serde(flatten)]
    pub against_exact: Option<AgainstExact>,
    /// Present if several processes shared the tokens of every window.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub spread_keys: Option<SpreadKeys>,
    /// The machines that ran windows, if several processes shared them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub nodes: Vec<String>,
    /// True if it was interrupted; the figures are then those of the finished windows.
    pub interrupted: bool,
}

/// Distance of a model with other attention from the same model with exact attention.
#[derive(Clone, Debug, Serialize)]
pub struct AgainstExact {
    /// Mean negative log-likelihood with exact attention.
    pub exact_nll: f64,
    /// Perplexity with exact attention.
    pub exact_ppl: f64,
    /// Relative increase of the perplexity.
    pub ppl_increase: f64,
    /// Mean increase of the negative log-likelihood, token by token, in nats.
    pub nll_increase: f64,
    /// Its standard error, from means of runs of 64 scored tokens; none for fewer than two runs.
    pub nll_increase_se: Option<f64>,
    /// Mean Kullback–Leibler divergence from exact attention's prediction, in nats.
    pub kl_mean: f64,
    /// Its standard error.
    pub kl_se: f64,
    /// Median of the divergence over tokens.
    pub kl_median: Option<f64>,
    /// Its 90 % quantile.
    pub kl_q90: Option<f64>,
    /// Its 99 % quantile.
    pub kl_q99: Option<f64>,
    /// Its largest value.
    pub kl_max: Option<f64>,
    /// Share of tokens for which both have the same likeliest token.
    pub same_top: f64,
    /// Mean change of the right token's probability.
    pub delta_p_mean: f64,
    /// Root mean square of that change.
    pub delta_p_rms: f64,
    /// Seconds of the model with exact attention.
    pub exact_seconds: f64,
    /// Share of the scores of exact attention that were computed.
    pub keys_share: f64,
    /// True if the method's settings cover every key at this length: exact attention was then computed, and every
    /// prediction is identical to the bit.
    pub fell_back: bool,
    /// True if a window was longer than the texts that the recipe was checked on.
    pub past_recipe: bool,
    /// Layers with heads whose method for new tokens has no stream: exact attention would decode there.
    pub decodes_exactly: Vec<usize>,
}

/// Scored tokens whose mean counts as one observation: neighbours are not independent.
const RUN: usize = 64;

/// Differences of neighbouring tokens, joined to means of runs.
#[derive(Default)]
struct Paired {
    all: Mean,
    run: Mean,
    runs: Mean,
}

impl Paired {
    fn push(&mut self, x: f64) {
        self.all.push(x);
        self.run.push(x);
        if self.run.count() == RUN as u64 {
            self.runs.push(std::mem::take(&mut self.run).mean());
        }
    }

    fn standard_error(&self) -> Option<f64> {
        let se = self.runs.standard_error();
        se.is_finite().then_some(se)
    }
}

/// Predictions of the model with exact attention for each window of one text. One run of it serves the comparison with
/// several recipes.
#[derive(Debug, Default)]
pub struct Reference {
    windows: BTreeMap<usize, (Vec<f32>, f64, u64)>,
}

impl Reference {
    /// Returns the final hidden states of the first window, if it was run.
    pub fn hidden(&self) -> Option<&[f32]> {
        self.windows.get(&0).map(|w| w.0.as_slice())
    }
}

/// One model on one window: seconds, counts, and the negative log-likelihood of every scored token.
#[derive(Serialize, Deserialize)]
struct Scored {
    seconds: f64,
    keys: u64,
    status: Status,
    nll: Bits,
}

/// Both models on one window, and their distance token by token.
#[derive(Serialize, Deserialize)]
struct Scores {
    /// Tokens that were run.
    run: usize,
    subject: Scored,
    exact: Option<Scored>,
    kl: Bits,
    delta_p: Bits,
    same_top: Vec<bool>,
}

/// Scores of one process's part of a window whose tokens are divided among several.
#[derive(Serialize, Deserialize)]
struct Part {
    scores: Scores,
    /// The rows that predicted the scored tokens.
    rows: Vec<usize>,
    cache_bytes: usize,
    node: Option<String>,
}

impl Part {
    /// Joins the parts of a window, tokens in the order of the text; also returns the most bytes of keys and values on
    /// one process.
    fn join(parts: Vec<Self>) -> (Scores, usize) {
        let mut order: Vec<(usize, usize, usize)> = Vec::new();
        for (p, part) in parts.iter().enumerate() {
            order.extend(part.rows.iter().enumerate().map(|(i, &row)| (row, p, i)));
        }
        order.sort_unstable();
        let bits = |of: &dyn Fn(&Scores) -> &[f64]| {
            let at = |&(_, p, i): &(usize, usize, usize)| of(&parts[p].scores).get(i).copied();
            Bits(order.iter().filter_map(at).collect())
        };
        let one = |of: &dyn Fn(&Scores) -> Option<&Scored>| {
            let all: Vec<&Scored> = parts.iter().filter_map(|p| of(&p.scores)).collect();
            (!all.is_empty()).then(|| Scored {
                seconds: all.iter().map(|s| s.seconds).fold(0.0, f64::max),
                keys: all.iter().map(|s| s.keys).sum(),
                status: all.iter().map(|s| s.status).fold(Status::default(), Status::max),
                nll: bits(&|s| of(s).map_or(&[], |s| &s.nll.0)),
            })
        };
        let top = |&(_, p, i): &(usize, usize, usize)| parts[p].scores.same_top.get(i).copied();
        let scores = Scores {
            run: parts.first().map_or(0, |p| p.scores.run),
            subject: one(&|s| Some(&s.subject)).unwrap_or_else(Scored::nothing),
            exact: one(&|s| s.exact.as_ref()),
            kl: bits(&|s| &s.kl.0),
            delta_p: bits(&|s| &s.delta_p.0),
            same_top: order.iter().filter_map(top).collect(),
        };
        (scores, parts.iter().map(|p| p.cache_bytes).max().unwrap_or(0))
    }
}

/// Numbers serialised as their bits, which preserves NaN and infinities.
#[derive(Serialize, Deserialize)]
#[serde(from = "Vec<u64>", into = "Vec<u64>")]
#[derive(Clone, Default)]
struct Bits(Vec<f64>);

impl From<Vec<u64>> for Bits {
    fn from(bits: Vec<u64>) -> Self {
        Self(bits.into_iter().map(f64::from_bits).collect())
    }
}

impl From<Bits> for Vec<u64> {
    fn from(numbers: Bits) -> Self {
        numbers.0.into_iter().map(f64::to_bits).collect()
    }
}

/// The sums over windows.
#[derive(Default)]
struct Sums {
    windows: usize,
    run: usize,
    subject: Sum,
    exact: Sum,
    divergence: Divergence,
    paired: Paired,
}

#[derive(Default)]
struct Sum {
    nll: Perplexity,
    seconds: f64,
    keys: u64,
    status: Status,
}

impl Sum {
    fn add(&mut self, x: &Scored) {
        x.nll.0.iter().for_each(|nll| self.nll.push(*nll));
        self.seconds += x.seconds;
        self.keys += x.keys;
        self.status = self.status.max(x.status);
    }
}

impl Sums {
    fn add(&mut self, x: &Scores) {
        self.windows += 1;
        self.run += x.run;
        self.subject.add(&x.subject);
        let Some(exact) = &x.exact else { return };
        self.exact.add(exact);
        for (i, (q, p)) in x.subject.nll.0.iter().zip(&exact.nll.0).enumerate() {
            let (kl, delta_p, same_top) = (x.kl.0[i], x.delta_p.0[i], x.same_top[i]);
            self.divergence.add(&Difference { kl, same_top, delta_p });
            self.paired.push(q - p);
        }
    }
}

/// Runs the model over the text. Steps are tokens; the seed draws the words and numbers of a task.
pub fn perplexity(model: &Arc<Model>, text: &Text, settings: &Settings, run: &mut Run<'_>) -> Result<Record> {
    perplexity_with(model, text, settings, &Alone::default(), &mut Ledger::none(), None, run)
}

/// Returns everything that determines the figures of a window: two runs with the same key may share windows. `model`
/// names the model's weights.
pub fn key(model: &str, text: &Text, settings: &Settings, seed: u64) -> Result<String> {
    let recipe = settings.recipe.as_ref().map(Recipe::to_toml).transpose()?;
    let learnt = settings.recipe.as_ref().and_then(|r| serde_json::to_string(&*r.calibrations).ok());
    Ok(format!(
        "{model} {} {} {:?} {} {:?} {} {recipe:?} {learnt:?} {:?} {} {} {}",
        text.sha256,
        text.tokens.len(),
        settings.protocol,
        settings.bos,
        settings.task,
        seed,
        settings.cache,
        settings.compute,
        crate::atlas::fingerprint(),
        env!("CARGO_PKG_VERSION"),
    ))
}

/// Measures with windows shared among the processes of a crew and kept in a ledger; every process gets the record.
/// `reference` keeps the predictions of exact attention for windows of the same text: known ones are reused, missing
/// ones are computed and added.
pub fn perplexity_with(
    model: &Arc<Model>,
    text: &Text,
    settings: &Settings,
    crew: &dyn Crew,
    ledger: &mut Ledger,
    mut reference: Option<&mut Reference>,
    run: &mut Run<'_>,
) -> Result<Record> {
    let n = text.tokens.len();
    let bos = if settings.bos { Some(bos(model)?) } else { None };
    let prompt = match settings.task {
        Some(task) => Some(task_prompt(task, model, text, settings, run.seed)?),
        None => None,
    };
    let source = prompt.as_ref().map_or(&text.tokens, |p| &p.tokens);
    let (windows, name, context, stride) = match &prompt {
        Some(p) => (vec![(0..source.len(), p.targets.clone())], "task", source.len(), source.len()),
        None => {
            let (windows, name, context, stride) = windows(settings.protocol, n, bos.is_some())?;
            let cut = windows.into_iter().map(|w| (w.tokens, vec![w.targets])).collect();
            (cut, name, context, stride)
        }
    };
    let threads = run.workspace()?;
    let recipe = settings.recipe.clone().unwrap_or_default();
    let is_exact = settings.recipe.as_ref().is_none_or(|r| r.rules.is_empty() && r.is_exact());
    let is_exact = is_exact && settings.cache == CacheFormat::F32 && settings.compute == Compute::F32;
    let mut subject = Runner::new(model, &recipe, &threads)?;
    subject.decoder.pack_keys(settings.cache)?;
    subject.decoder.compute_in(settings.compute);
    let in_f32 = subject.decoder.in_single();
    let decodes_exactly = subject.decoder.decodes_exactly();
    let mut exact = if is_exact { None } else { Some(Runner::new(model, &Recipe::default(), &threads)?) };
    let total: usize = windows.iter().map(|(tokens, _)| tokens.len()).sum();
    let mut done = 0;
    let mut so_far = Perplexity::default();
    let mut tokens = Vec::new();
    let replace = prompt.is_none() && matches!(settings.protocol, Protocol::SecondHalf { .. });
    let shift = usize::from(bos.is_some() && !replace);
    let keys = match settings.sharing {
        Sharing::Windows => false,
        Sharing::Keys => true,
        Sharing::Fewer => windows.len() < crew.size(),
    };
    let mut spread = crew.spread().filter(|_| keys);
    let together = spread.is_some();
    let (mut nodes, mut most_bytes) = (BTreeSet::new(), 0);
    let mut work = |unit: usize, at: usize| -> Result<Done<Scores>> {
        // Processes that do every window together stop together.
        if at > 0 && if together { crew.any(run.stopped()) } else { run.stopped() } {
            return Ok(Done::Stopped);
        }
        let (window, targets) = &windows[unit];
        tokens.clear();
        tokens.extend(bos);
        tokens.extend_from_slice(&source[window.clone()][usize::from(replace && bos.is_some())..]);
        let outcome = (|| {
            let held = subject.run(&tokens, &mut spread, run.stop)?;
            match (&mut exact, &mut reference) {
                (Some(exact), Some(known)) if !together => exact.recall(unit, &tokens, known, run.stop)?,
                (Some(exact), _) => drop(exact.run(&tokens, &mut spread, run.stop)?),
                (None, _) => {}
            }
            Ok(held)
        })();
        let held = match outcome {
            // The others cannot go on without one process: the run ends.
            Err(attlas_model::Error::Interrupted) if !together => return Ok(Done::Stopped),
            other => other?,
        };
        let (mut kl, mut delta_p, mut same_top) = (Bits::default(), Bits::default(), Vec::new());
        let mut scored = Vec::new();
        // A token is predicted by the row before it.
        let predicted =
            |t: Range<usize>| t.start - window.start - 1 + shift..t.end - window.start - 1 + shift;
        for (rows, at) in held.inside(targets.iter().cloned().map(predicted), LOGIT_ROWS) {
            let first = rows.start + window.start + 1 - shift;
            let targets = &source[first..first + rows.len()];
            scored.extend(rows);
            subject.score(at, targets);
            if let Some(exact) = &mut exact {
                exact.score(at, targets);
                let vocab = model.config.vocab;
                let pairs = exact.logits.chunks(vocab).zip(subject.logits.chunks(vocab));
                for ((p, q), &t) in pairs.zip(targets) {
                    let x = Difference::new(p, q, t);
                    kl.0.push(x.kl);
                    delta_p.0.push(x.delta_p);
                    same_top.push(x.same_top);
                }
            }
        }
        let ours = subject.take();
        ours.nll.0.iter().for_each(|nll| so_far.push(*nll));
        // Other processes have the windows between.
        done = (done + window.len()).max((at + 1) * total / windows.len().max(1)).min(total);
        run.at(done, total, &format!("perplexity {:.3}", so_far.perplexity()));
        let theirs = exact.as_mut().map(Runner::take);
        let mut scores = Scores { run: tokens.len(), subject: ours, exact: theirs, kl, delta_p, same_top };
        if together {
            let (cache_bytes, node) = (held.cache_bytes, crew.node());
            let part = Part { scores, rows: scored, cache_bytes, node };
            let bad = |e: serde_json::Error| Error::argument("a part of a window", "one that can be sent", e);
            let own = serde_json::to_string(&part).map_err(bad)?;
            let parts: Vec<Part> = crew
                .gather(&own)
                .iter()
                .map(|p| serde_json::from_str(p))
                .collect::<Result<_, _>>()
                .map_err(bad)?;
            nodes.extend(parts.iter().filter_map(|p| p.node.clone()));
            let bytes;
            (scores, bytes) = Part::join(parts);
            most_bytes = most_bytes.max(bytes);
        }
        Ok(Done::Whole(scores))
    };
    let weights: Vec<u64> = windows.iter().map(|(tokens, _)| tokens.len() as u64).collect();
    let all = Together::new(crew);
    let shared = share(if together { &all } else { crew }, ledger, &weights, &mut work)?;
    let mut sums = Sums::default();
    shared.records.iter().flatten().for_each(|(window, _)| sums.add(window));
    if sums.windows == 0 {
        return Err(Error::Model(attlas_model::Error::Interrupted));
    }
    let Sums { windows: finished, run, subject, exact, divergence, paired } = sums;
    let against_exact = (!is_exact).then(|| AgainstExact {
        exact_nll: exact.nll.nll().mean(),
        exact_ppl: exact.nll.perplexity(),
        ppl_increase: subject.nll.perplexity() / exact.nll.perplexity() - 1.0,
        nll_increase: paired.all.mean(),
        nll_increase_se: paired.standard_error(),
        kl_mean: divergence.kl().mean(),
        kl_se: divergence.kl().standard_error(),
        kl_median: divergence.kl_quantile(0.5),
        kl_q90: divergence.kl_quantile(0.9),
        kl_q99: divergence.kl_quantile(0.99),
        kl_max: divergence.kl_quantile(1.0),
        same_top: divergence.same_top(),
        delta_p_mean: divergence.delta_p().mean(),
        delta_p_rms: divergence.delta_p().root_mean_square(),
        exact_seconds: exact.seconds,
        keys_share: subject.keys as f64 / (exact.keys as f64).max(1.0),
        fell_back: subject.status == Status::Exact
            && divergence.kl_quantile(1.0).is_some_and(|kl| kl == 0.0)
            && divergence.delta_p().root_mean_square() == 0.0,
        past_recipe: recipe.tokens.is_some_and(|most| context > most),
        decodes_exactly,
    });
    Ok(Record {
        text: text.source.clone(),
        text_sha256: text.sha256.clone(),
        tokens: n,
        scored: subject.nll.count(),
        protocol: name,
        task: settings.task,
        context,
        stride,
        bos: bos.is_some(),
        windows: finished,
        cache: settings.cache,
        compute: settings.compute,
        in_f32,
        attention: if recipe.rules.is_empty() { recipe.default.method } else { "recipe".into() },
        params: recipe.default.params,
        nll: subject.nll.nll().mean(),
        nll_se: subject.nll.nll().standard_error(),
        ppl: subject.nll.perplexity(),
        ppl_se: subject.nll.standard_error(),
        seconds: subject.seconds,
        tokens_per_second: run as f64 / subject.seconds,
        against_exact,
        spread_keys: together.then(|| SpreadKeys { processes: crew.size(), cache_bytes: most_bytes }),
        nodes: if together { nodes.into_iter().collect() } else { shared.nodes() },
        interrupted: shared.interrupted,
    })
}

/// Builds the prompt of a task, as long as a window of the protocol.
fn task_prompt(
    task: Task,
    model: &Model,
    text: &Text,
    settings: &Settings,
    seed: u64,
) -> Result<task::Prompt> {
    let (Protocol::Strided { window, .. } | Protocol::SecondHalf { window } | Protocol::Disjoint { window }) =
        settings.protocol;
    task::prompt(task, &model.tokenizer, text, window - usize::from(settings.bos).min(window), seed)
}

/// Returns the windows, the protocol's name, and the sizes to report.
fn windows(protocol: Protocol, n: usize, bos: bool) -> Result<(Vec<Window>, &'static str, usize, usize)> {
    // A token at the start takes the place of one of the text.
    let less = usize::from(bos);
    let (name, context, stride, cut) = match protocol {
        Protocol::Strided { window, stride } => {
            let inside = window.saturating_sub(less);
            if stride == 0 || stride > window {
                return Err(Error::argument(
                    "the stride",
                    format!("1 to {window}, the tokens of a window"),
                    stride,
                ));
            }
            // Each window without overlap has one token of the text less.
            let stride = stride.min(inside);
            ("strided", window, stride, Protocol::Strided { window: inside, stride })
        }
        Protocol::SecondHalf { window } => ("llamacpp", window, window, protocol),
        Protocol::Disjoint { window } => {
            let inside = window.saturating_sub(less);
            ("windows", window, inside, Protocol::Disjoint { window: inside })
        }
    };
    Ok((cut.windows(n)?, name, context, stride))
}

/// A timed model; `scored` has the results since the last window.
struct Runner {
    decoder: Decoder,
    hidden: Vec<f32>,
    logits: Vec<f32>,
    scored: Scored,
}

struct Stopper<'a>(&'a AtomicBool);

impl Observer for Stopper<'_> {
    fn interrupted(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl Runner {
    fn new(model: &Arc<Model>, recipe: &Recipe, threads: &Workspace) -> Result<Self> {
        let decoder = Decoder::on(model.clone(), recipe, threads)?;
        Ok(Self { decoder, hidden: Vec::new(), logits: Vec::new(), scored: Scored::nothing() })
    }

    /// Runs a window; with `spread` this process's part of it.
    fn run(
        &mut self,
        tokens: &[u32],
        spread: &mut Option<Box<dyn SpreadAttention + '_>>,
        stop: &AtomicBool,
    ) -> attlas_model::Result<Held> {
        self.decoder.reset();
        self.scored = Scored::nothing();
        let Self { decoder, hidden, .. } = self;
        let mut stopper = Stopper(stop);
        let (result, seconds) = timed(|| match spread {
            Some(spread) => decoder.forward_spread(tokens, hidden, &mut **spread, &mut stopper),
            None => {
                decoder.forward_observed(tokens, Rows::All, hidden, &mut stopper)?;
                let pieces = std::iter::once(0..tokens.len()).collect();
                Ok(Held { pieces, cache_bytes: decoder.cache_bytes() })
            }
        });
        let info = self.decoder.info();
        (self.scored.seconds, self.scored.keys, self.scored.status) =
            (seconds, info.keys_visited, info.status);
        result
    }

    /// Runs window `i` like [`run`](Self::run), or takes its known result.
    fn recall(
        &mut self,
        i: usize,
        tokens: &[u32],
        known: &mut Reference,
        stop: &AtomicBool,
    ) -> attlas_model::Result<()> {
        if let Some((hidden, seconds, keys)) = known.windows.get(&i) {
            self.hidden.clone_from(hidden);
            self.scored = Scored { seconds: *seconds, keys: *keys, ..Scored::nothing() };
            return Ok(());
        }
        self.run(tokens, &mut None, stop)?;
        known.windows.insert(i, (self.hidden.clone(), self.scored.seconds, self.scored.keys));
        Ok(())
    }

    /// Scores `targets`; row `first` predicts the first of them.
    fn score(&mut self, first: usize, targets: &[u32]) {
        let (d, vocab) = (self.decoder.model().config.hidden, self.decoder.model().config.vocab);
        self.logits.resize(targets.len() * vocab, 0.0);
        let rows = &self.hidden[first * d..][..targets.len() * d];
        let ((), seconds) = timed(|| self.decoder.logits_into(rows, &mut self.logits));
        self.scored.seconds += seconds;
        let nlls = self.logits.chunks(vocab).zip(targets).map(|(logits, &t)| nll(logits, t));
        self.scored.nll.0.extend(nlls);
    }

    /// Takes the scored tokens and resets them.
    fn take(&mut self) -> Scored {
        std::mem::replace(&mut self.scored, Scored::nothing())
    }
}

impl Scored {
    fn nothing() -> Self {
        Self { seconds: 0.0, keys: 0, status: Status::default(), nll: Bits::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stride_that_runs_is_the_one_reported() {
        let strided = |window, stride, bos| windows(Protocol::Strided { window, stride }, 100, bos);
        let found = |r: Result<(Vec<Window>, &'static str, usize, usize)>| {
            let (windows, _, context, stride) = r.unwrap();
            (windows[1].tokens.start - windows[0].tokens.start, context, stride)
        };
        assert_eq!(found(strided(20, 5, false)), (5, 20, 5));
        assert_eq!(found(strided(20, 20, true)), (19, 20, 19));
        assert_eq!(found(windows(Protocol::Disjoint { window: 20 }, 100, true)), (19, 20, 19));
        for stride in [0, 21, 9999] {
            let message = strided(20, stride, false).unwrap_err().to_string();
            assert!(message.contains("1 to 20"), "{message}");
        }
    }

    #[test]
    fn a_protocol_that_scores_nothing_is_refused() {
        let message = windows(Protocol::SecondHalf { window: 2 }, 100, false).unwrap_err().to_string();
        assert!(message.contains("3 or more"), "{message}");
        let (found, ..) = windows(Protocol::SecondHalf { window: 3 }, 100, false).unwrap();
        assert!(found.iter().all(|w| w.targets.len() == 1));
    }
}
