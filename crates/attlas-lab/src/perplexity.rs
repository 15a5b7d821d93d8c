//! How well a model predicts a text, and what another attention does to that.
//!
//! With a recipe the model runs twice over every window, once with exact attention, and the two predictions are
//! compared token by token as they are made; no logits are kept.

use crate::extract::bos;
use crate::run::timed;
use crate::task::{self, Task};
use crate::text::Text;
use crate::{Error, Result};
use attlas::{Options, Schedule, Status, Workspace};
use attlas_model::decoder::{LOGIT_ROWS, Observer};
use attlas_model::kept::CacheFormat;
use attlas_model::perplexity::{Divergence, Mean, Perplexity, Protocol, Window, nll};
use attlas_model::{Compute, Decoder, Model, Recipe, Rows};
use serde::Serialize;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// How a text is cut and run.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Which tokens are scored, in which windows.
    pub protocol: Protocol,
    /// Put the token for the beginning of a text at the start of every window. With [`Protocol::SecondHalf`]
    /// it replaces the first token; otherwise a window holds one token of the text less.
    pub bos: bool,
    /// Build a prompt that needs far keys from the text and score only the tokens that need them; the protocol
    /// then gives the length of the prompt alone.
    pub task: Option<Task>,
    /// Seed of the task's words and numbers.
    pub seed: u64,
    /// Recipe of attention; exact where absent.
    pub recipe: Option<Recipe>,
    /// How keys and values are stored; what that costs is measured beside single precision.
    pub cache: CacheFormat,
    /// What linear layers round their operands to; what that costs is measured beside single precision.
    pub compute: Compute,
    /// Threads; 0 takes as many as the machine offers.
    pub threads: usize,
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
    /// `strided`, `llamacpp` or `windows`; `task` where a task made the prompt.
    pub protocol: &'static str,
    /// The task whose answers were scored.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub task: Option<Task>,
    /// Tokens of a window.
    pub context: usize,
    /// Tokens from the start of a window to the start of the next.
    pub stride: usize,
    /// Whether every window began with the token for the beginning of a text.
    pub bos: bool,
    /// Windows that were run.
    pub windows: usize,
    /// `exact`, the id of a method, or `recipe`.
    pub attention: String,
    /// How keys and values were stored.
    pub cache: CacheFormat,
    /// What linear layers rounded their operands to.
    #[serde(serialize_with = "crate::text::compute_name")]
    pub compute: Compute,
    /// Formats of matrices that were multiplied in single precision nevertheless, with how many there are of each.
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
    /// Tokens run in a second.
    pub tokens_per_second: f64,
    /// The model with exact attention beside it, where something else attended.
    #[serde(flatten)]
    pub against_exact: Option<AgainstExact>,
    /// Whether it was ended early; the figures are then those of the finished windows.
    pub interrupted: bool,
}

/// How far a model with other attention is from itself.
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
    /// Share of tokens for which both find the same one likeliest.
    pub same_top: f64,
    /// Mean change of the right token's probability.
    pub delta_p_mean: f64,
    /// Root mean square of that change.
    pub delta_p_rms: f64,
    /// Seconds of the model with exact attention.
    pub exact_seconds: f64,
    /// Share of the scores of exact attention that were computed.
    pub keys_share: f64,
    /// Whether the method's settings cover everything at this length, so that exact attention was computed under its
    /// name and every prediction is the same to the bit.
    pub fell_back: bool,
    /// Whether a window was longer than the texts that the recipe was checked on.
    pub past_recipe: bool,
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

/// What the model with exact attention gave for each window of one text, so that several recipes are compared with one run
/// of it.
#[derive(Debug, Default)]
pub struct Reference {
    windows: Vec<(Vec<f32>, f64, u64)>,
}

impl Reference {
    /// Final hidden states of the first window, where it was run.
    pub fn hidden(&self) -> Option<&[f32]> {
        self.windows.first().map(|w| w.0.as_slice())
    }
}

/// Runs the model over the text. `progress` receives tokens done, tokens in all, and the perplexity so far.
pub fn perplexity(
    model: &Arc<Model>,
    text: &Text,
    settings: &Settings,
    progress: &mut dyn FnMut(usize, usize, f64),
    stop: &AtomicBool,
) -> Result<Record> {
    perplexity_beside(model, text, settings, None, progress, stop)
}

/// The same beside what exact attention gave before, for the same text cut in the same way; what is missing is run and kept.
pub fn perplexity_beside(
    model: &Arc<Model>,
    text: &Text,
    settings: &Settings,
    mut reference: Option<&mut Reference>,
    progress: &mut dyn FnMut(usize, usize, f64),
    stop: &AtomicBool,
) -> Result<Record> {
    let n = text.tokens.len();
    let bos = if settings.bos { Some(bos(model)?) } else { None };
    let prompt = match settings.task {
        Some(task) => Some(task_prompt(task, model, text, settings)?),
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
    let threads = Workspace::new(Schedule { threads: settings.threads, ..Schedule::default() })?;
    let recipe = settings.recipe.clone().unwrap_or_default();
    let is_exact = settings.recipe.as_ref().is_none_or(|r| r.rules.is_empty() && r.is_exact());
    let is_exact = is_exact && settings.cache == CacheFormat::F32 && settings.compute == Compute::F32;
    let mut subject = Runner::new(model, &recipe, &threads)?;
    subject.decoder.pack_keys(settings.cache)?;
    subject.decoder.compute_in(settings.compute);
    let mut exact = if is_exact { None } else { Some(Runner::new(model, &Recipe::default(), &threads)?) };
    let mut divergence = Divergence::default();
    let mut paired = Paired::default();
    let total: usize = windows.iter().map(|(tokens, _)| tokens.len()).sum();
    let (mut done, mut finished, mut run, mut interrupted) = (0, 0, 0, false);
    let mut tokens = Vec::new();
    for (window, targets) in &windows {
        tokens.clear();
        let replace = prompt.is_none() && matches!(settings.protocol, Protocol::SecondHalf { .. });
        tokens.extend(bos);
        tokens.extend_from_slice(&source[window.clone()][usize::from(replace && bos.is_some())..]);
        let shift = usize::from(bos.is_some() && !replace);
        let outcome = (|| {
            subject.run(&tokens, stop)?;
            match (&mut exact, &mut reference) {
                (Some(exact), Some(known)) => exact.recall(finished, &tokens, known, stop)?,
                (Some(exact), None) => exact.run(&tokens, stop)?,
                (None, _) => {}
            }
            Ok(())
        })();
        match outcome {
            Err(attlas_model::Error::Interrupted) => {
                interrupted = true;
                break;
            }
            other => other?,
        }
        for target in chunks(targets, LOGIT_ROWS) {
            // Row of the state that predicts the first target.
            let rows = target.start - window.start - 1 + shift;
            let targets = &source[target];
            subject.score(rows, targets);
            if let Some(exact) = &mut exact {
                exact.score(rows, targets);
                let vocab = model.config.vocab;
                let pairs = exact.logits.chunks(vocab).zip(subject.logits.chunks(vocab));
                for ((p, q), &t) in pairs.zip(targets) {
                    divergence.push(p, q, t);
                    paired.push(nll(q, t) - nll(p, t));
                }
            }
        }
        done += window.len();
        run += tokens.len();
        finished += 1;
        progress(done, total, subject.sum.perplexity());
        if stop.load(Ordering::Relaxed) && finished < windows.len() {
            interrupted = true;
            break;
        }
    }
    if finished == 0 {
        return Err(Error::Model(attlas_model::Error::Interrupted));
    }
    let against_exact = exact.map(|exact| AgainstExact {
        exact_nll: exact.sum.nll().mean(),
        exact_ppl: exact.sum.perplexity(),
        ppl_increase: subject.sum.perplexity() / exact.sum.perplexity() - 1.0,
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
    });
    Ok(Record {
        text: text.source.clone(),
        text_sha256: text.sha256.clone(),
        tokens: n,
        scored: subject.sum.count(),
        protocol: name,
        task: settings.task,
        context,
        stride,
        bos: bos.is_some(),
        windows: finished,
        cache: settings.cache,
        compute: settings.compute,
        in_f32: subject.decoder.in_single(),
        attention: if recipe.rules.is_empty() { recipe.default.method } else { "recipe".into() },
        params: recipe.default.params,
        nll: subject.sum.nll().mean(),
        nll_se: subject.sum.nll().standard_error(),
        ppl: subject.sum.perplexity(),
        ppl_se: subject.sum.standard_error(),
        seconds: subject.seconds,
        tokens_per_second: run as f64 / subject.seconds,
        against_exact,
        interrupted,
    })
}

/// The prompt of a task, as long as a window of the protocol.
fn task_prompt(task: Task, model: &Model, text: &Text, settings: &Settings) -> Result<task::Prompt> {
    let (Protocol::Strided { window, .. } | Protocol::SecondHalf { window } | Protocol::Disjoint { window }) =
        settings.protocol;
    task::prompt(task, &model.tokenizer, text, window - usize::from(settings.bos).min(window), settings.seed)
}

/// The ranges cut into pieces of at most `len`.
fn chunks(ranges: &[Range<usize>], len: usize) -> impl Iterator<Item = Range<usize>> {
    ranges.iter().flat_map(move |r| r.clone().step_by(len).map(move |at| at..r.end.min(at + len)))
}

/// The windows, the protocol's name, and the sizes that are reported.
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
            // Windows without overlap have one token of the text less each.
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

/// A model under the clock.
struct Runner {
    decoder: Decoder,
    hidden: Vec<f32>,
    logits: Vec<f32>,
    sum: Perplexity,
    seconds: f64,
    keys: u64,
    status: Status,
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
        Ok(Self {
            decoder,
            hidden: Vec::new(),
            logits: Vec::new(),
            sum: Perplexity::default(),
            seconds: 0.0,
            keys: 0,
            status: Status::default(),
        })
    }

    fn run(&mut self, tokens: &[u32], stop: &AtomicBool) -> attlas_model::Result<()> {
        self.decoder.reset();
        let Self { decoder, hidden, .. } = self;
        let (result, seconds) =
            timed(|| decoder.forward_observed(tokens, Rows::All, hidden, &mut Stopper(stop)));
        self.seconds += seconds;
        self.keys += self.decoder.info().keys_visited;
        self.status = self.status.max(self.decoder.info().status);
        result
    }

    /// The same as [`run`](Self::run) for window `i`, or what is known of it.
    fn recall(
        &mut self,
        i: usize,
        tokens: &[u32],
        known: &mut Reference,
        stop: &AtomicBool,
    ) -> attlas_model::Result<()> {
        if let Some((hidden, seconds, keys)) = known.windows.get(i) {
            self.hidden.clone_from(hidden);
            self.seconds += seconds;
            self.keys += keys;
            return Ok(());
        }
        let (seconds, keys) = (self.seconds, self.keys);
        self.run(tokens, stop)?;
        known.windows.push((self.hidden.clone(), self.seconds - seconds, self.keys - keys));
        Ok(())
    }

    /// Scores `targets`, the first of which is predicted by row `first`.
    fn score(&mut self, first: usize, targets: &[u32]) {
        let (d, vocab) = (self.decoder.model().config.hidden, self.decoder.model().config.vocab);
        self.logits.resize(targets.len() * vocab, 0.0);
        let rows = &self.hidden[first * d..][..targets.len() * d];
        let ((), seconds) = timed(|| self.decoder.logits_into(rows, &mut self.logits));
        self.seconds += seconds;
        let sum = &mut self.sum;
        self.logits.chunks(vocab).zip(targets).for_each(|(logits, &t)| sum.push(nll(logits, t)));
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
