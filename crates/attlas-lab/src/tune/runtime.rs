//! Recipes on a model of this workspace's runtime.

use super::divergence::{Changed, Replace};
use super::{Check, Outcome};
use crate::crew::{Alone, Crew};
use crate::perplexity::{self, Record, Reference};
use crate::run::{Run, timed};
use crate::task::{self, Task};
use crate::text::Text;
use crate::units::Ledger;
use crate::{Error, Result};
use attlas::{Schedule, Workspace};
use attlas_model::perplexity::{Divergence, Perplexity, Protocol, nll};
use attlas_model::{Decoder, Model, Recipe, Rows};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A model of this workspace's runtime, which keeps the predictions of exact attention for each text.
#[derive(Debug)]
pub struct Runtime<'a> {
    model: &'a Arc<Model>,
    threads: usize,
    task: Option<Task>,
    seed: u64,
    known: BTreeMap<String, Reference>,
    /// The processes that share the windows of a check.
    crew: Option<&'a dyn Crew>,
}

impl<'a> Runtime<'a> {
    /// Wraps a model on `threads` threads, 0 for all; a task turns texts into its prompts.
    pub fn new(model: &'a Arc<Model>, threads: usize, task: Option<Task>, seed: u64) -> Self {
        Self { model, threads, task, seed, known: BTreeMap::new(), crew: None }
    }

    /// Shares windows among the processes of a crew; all of them check and decode at the same time.
    #[must_use]
    pub fn with_crew(self, crew: &'a dyn Crew) -> Self {
        Self { crew: Some(crew), ..self }
    }

    /// Runs the model with a recipe and with exact attention, on the processes of `crew`.
    fn beside(
        &mut self,
        crew: &dyn Crew,
        recipe: &Recipe,
        check: &Text,
        context: usize,
        stop: &AtomicBool,
    ) -> Result<Option<Record>> {
        let how = self.settings(recipe, context);
        let known = self.known.entry(key(check, context)).or_default();
        let (model, mut ledger) = (self.model, Ledger::none());
        let mut run = Run { threads: self.threads, seed: self.seed, progress: &mut |_| (), stop };
        let found = perplexity::perplexity_with(model, check, &how, crew, &mut ledger, Some(known), &mut run);
        match found {
            Err(Error::Model(attlas_model::Error::Interrupted)) => Ok(None),
            Ok(record) if record.interrupted => Ok(None),
            other => other.map(Some),
        }
    }

    fn settings(&self, recipe: &Recipe, context: usize) -> perplexity::Settings {
        perplexity::Settings {
            cache: attlas_model::kept::CacheFormat::F32,
            compute: attlas_model::Compute::F32,
            task: self.task,
            protocol: Protocol::Strided { window: context, stride: context },
            bos: false,
            recipe: Some(recipe.clone()),
            sharing: perplexity::Sharing::Windows,
        }
    }
}

fn key(text: &Text, context: usize) -> String {
    format!("{} {} {} {context}", text.sha256, text.source, text.tokens.len())
}

impl Check for Runtime<'_> {
    fn check(
        &mut self,
        recipe: &Recipe,
        check: &Text,
        context: usize,
        stop: &AtomicBool,
    ) -> Result<Option<Record>> {
        let alone = Alone::default();
        self.beside(self.crew.unwrap_or(&alone), recipe, check, context, stop)
    }

    fn shape(&self) -> String {
        crate::text::shape(&self.model.config)
    }

    fn replace(&mut self, text: &Text, rows: usize, stop: &AtomicBool) -> Result<Option<Box<dyn Replace>>> {
        if self.model.weights.has_other_attention() {
            return Ok(None);
        }
        let threads = Workspace::new(Schedule { threads: self.threads, ..Schedule::default() })?;
        match Changed::new(self.model, text, rows, &threads, stop) {
            Err(Error::Model(attlas_model::Error::Interrupted)) => Ok(None),
            other => Ok(Some(Box::new(other?))),
        }
    }

    fn decodes_exactly(&self, recipe: &Recipe) -> Result<Vec<usize>> {
        let threads = Workspace::new(Schedule { threads: self.threads, ..Schedule::default() })?;
        Ok(Decoder::on(self.model.clone(), recipe, &threads)?.decodes_exactly())
    }

    fn decode(
        &mut self,
        recipe: &Recipe,
        check: &Text,
        context: usize,
        steps: usize,
        stop: &AtomicBool,
    ) -> Result<Option<Outcome>> {
        // Decoding is sequential: the first process decodes for all.
        let Some(crew) = self.crew.filter(|c| !c.is_alone()) else {
            return self.decode_alone(recipe, check, context, steps, stop);
        };
        let found = if crew.leads() { self.decode_alone(recipe, check, context, steps, stop)? } else { None };
        let broken = |e: serde_json::Error| Error::argument("a record of new tokens", "finite figures", e);
        let shared = crew.broadcast(serde_json::to_string(&found).map_err(broken)?);
        serde_json::from_str(&shared).map_err(broken)
    }
}

impl Runtime<'_> {
    fn decode_alone(
        &mut self,
        recipe: &Recipe,
        check: &Text,
        context: usize,
        steps: usize,
        stop: &AtomicBool,
    ) -> Result<Option<Outcome>> {
        let tokens = match self.task {
            Some(task) => task::prompt(task, &self.model.tokenizer, check, context, self.seed)?.tokens,
            None => check.tokens[..context.min(check.tokens.len())].to_vec(),
        };
        let n = tokens.len();
        let steps = steps.min(n / 2);
        if steps < 2 {
            return Ok(None);
        }
        // Uses exact predictions of the same tokens if a check has made them.
        let name = key(check, context);
        if self.known.get(&name).is_none_or(|r| r.hidden().is_none())
            && self.beside(&Alone::default(), recipe, check, context, stop)?.is_none()
        {
            return Ok(None);
        }
        let Some(exact) = self.known.get(&name).and_then(Reference::hidden) else { return Ok(None) };
        let (d, vocab) = (self.model.config.hidden, self.model.config.vocab);
        let (mut p, mut q) = (vec![0.0; vocab], vec![0.0; vocab]);
        let (mut ours, mut theirs, mut divergence) =
            (Perplexity::default(), Perplexity::default(), Divergence::default());
        let score = |t: usize, decoder: &Decoder, hidden: &[f32]| {
            decoder.logits_into(hidden, &mut q);
            decoder.logits_into(&exact[t * d..][..d], &mut p);
            let target = tokens[t + 1];
            divergence.push(&p, &q, target);
            ours.push(nll(&q, target));
            theirs.push(nll(&p, target));
        };
        let Some((seconds, visited)) = self.steps(recipe, &tokens, steps, score, stop)? else {
            return Ok(None);
        };
        let beside = self.steps(&Recipe::default(), &tokens, steps, |_, _, _| (), stop)?;
        let Some((exact_seconds, _)) = beside else { return Ok(None) };
        let c = &self.model.config;
        let all: usize = (n - steps..n - 1).map(|t| t + 1).sum::<usize>() * c.n_heads * c.n_layers;
        let increase = ours.nll().mean() - theirs.nll().mean();
        Ok(Some(Outcome {
            scored: ours.count(),
            ppl: ours.perplexity(),
            exact_ppl: theirs.perplexity(),
            ppl_increase: increase.exp_m1(),
            ppl_increase_upper: increase.exp_m1(),
            kl_mean: divergence.kl().mean(),
            kl_se: divergence.kl().standard_error(),
            same_top: divergence.same_top(),
            keys_share: visited as f64 / (all as f64).max(1.0),
            seconds,
            exact_seconds: Some(exact_seconds),
        }))
    }

    /// Decodes all but one of the last `steps` tokens one by one. Returns the scores and the seconds of the model,
    /// without the first token, in which methods finish their work on the prompt. `each` receives the model's output
    /// for each token.
    fn steps(
        &self,
        recipe: &Recipe,
        tokens: &[u32],
        steps: usize,
        mut each: impl FnMut(usize, &Decoder, &[f32]),
        stop: &AtomicBool,
    ) -> Result<Option<(f64, u64)>> {
        let n = tokens.len();
        let threads = Workspace::new(Schedule { threads: self.threads, ..Schedule::default() })?;
        let mut decoder = Decoder::on(self.model.clone(), recipe, &threads)?;
        decoder.reserve(n);
        let mut hidden = Vec::new();
        decoder.forward(&tokens[..n - steps], Rows::None, &mut hidden)?;
        let (before, mut seconds) = (decoder.info().keys_visited, 0.0);
        for t in n - steps..n - 1 {
            if stop.load(Ordering::Relaxed) {
                return Ok(None);
            }
            let (done, took) = timed(|| decoder.forward(&tokens[t..=t], Rows::Last, &mut hidden));
            done?;
            if t > n - steps || steps == 2 {
                seconds += took;
            }
            each(t, &decoder, &hidden);
        }
        Ok(Some((seconds, decoder.info().keys_visited - before)))
    }
}
