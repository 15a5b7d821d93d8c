//! Continuing a text, token by token.

use crate::run::timed;
use crate::{Error, Result};
use attlas::{Schedule, Status};
use attlas_model::decoder::Observer;
use attlas_model::kept::CacheFormat;
use attlas_model::sample::{Sampler, Sampling};
use attlas_model::{Compute, Decoder, Model, Recipe, Rows};
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Settings of a continuation.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Most tokens to add.
    pub max_tokens: usize,
    /// Choice of the next token.
    pub sampling: Sampling,
    /// Texts that end the answer; they are not part of it.
    pub stop: Vec<String>,
    /// Continue after an end-of-text token.
    pub ignore_eos: bool,
    /// Recipe of attention; exact if absent.
    pub recipe: Option<Recipe>,
    /// Storage format of keys and values, in layers that keep them.
    pub cache: CacheFormat,
    /// Type that operands of linear layers are rounded to.
    pub compute: Compute,
    /// Threads; 0 uses all that the machine offers.
    pub threads: usize,
}

/// The generated text.
#[derive(Clone, Debug, Serialize)]
pub struct Generated {
    /// Tokens of the prompt.
    pub prompt_ids: Vec<u32>,
    /// Generated tokens, without the one that ended the text.
    pub ids: Vec<u32>,
    /// Their text.
    pub text: String,
    /// Reason for its end.
    pub ended: Ended,
    /// Prompt tokens per second.
    pub prompt_tokens_per_second: f64,
    /// Generated tokens per second, without the prompt's time; `null` for fewer than two tokens.
    pub tokens_per_second: Option<f64>,
    /// Seconds in all.
    pub seconds: f64,
    /// Bytes of the cache and of the states of streams at the end.
    pub cache_bytes: usize,
    /// Storage format of keys and values, in layers that keep them.
    pub cache: CacheFormat,
    /// Type that operands of linear layers were rounded to.
    #[serde(serialize_with = "crate::text::compute_name")]
    pub compute: Compute,
    /// Formats of matrices that were multiplied in single precision nevertheless, with the number of matrices of each.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub in_f32: BTreeMap<&'static str, usize>,
    /// Layers with heads whose method has no stream: exact attention decodes there.
    pub decodes_exactly: Vec<usize>,
    /// Layers whose heads all decode by streams and which store no keys.
    pub without_keys: Vec<usize>,
    /// True if the method's settings cover the whole prompt: it was then read by exact attention.
    pub fell_back: bool,
}

/// Reason why a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Ended {
    /// The limit on tokens was reached.
    MaxTokens,
    /// The model ended it.
    EndOfText,
    /// A stop text appeared.
    StopText,
    /// The context of the model is full.
    ContextFull,
    /// It was interrupted.
    Interrupted,
}

/// Reports progress while a prompt is read, and stops on request.
struct Reading<'a> {
    stop: &'a AtomicBool,
    progress: &'a mut (dyn FnMut(usize, usize) + Send),
    tokens: usize,
    layers: usize,
    hidden: usize,
}

impl Observer for Reading<'_> {
    fn interrupted(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    fn entering(&mut self, layer: usize, first: usize, x: &[f32]) {
        let chunk = x.len() / self.hidden.max(1);
        (self.progress)(first + chunk * layer / self.layers.max(1), self.tokens);
    }
}

/// Continues `prompt_ids`. `show` receives the text as it grows, in whole characters; text that may begin a stop text
/// is held back until that is decided. `progress` receives the prompt tokens read, and their total.
pub fn generate(
    model: &Arc<Model>,
    prompt_ids: &[u32],
    settings: &Settings,
    show: &mut dyn FnMut(&str),
    progress: &mut (dyn FnMut(usize, usize) + Send),
    stop: &AtomicBool,
) -> Result<Generated> {
    if prompt_ids.is_empty() {
        return Err(Error::argument("the prompt", "at least one token", "none"));
    }
    if settings.stop.iter().any(String::is_empty) {
        return Err(Error::argument("a stop text", "at least one character", "none"));
    }
    let recipe = settings.recipe.clone().unwrap_or_default();
    let schedule = Schedule { threads: settings.threads, ..Schedule::default() };
    let mut decoder = Decoder::new(model.clone(), &recipe, schedule)?;
    decoder.compute_in(settings.compute);
    decoder.pack_keys(settings.cache)?;
    decoder.forget_keys()?;
    let mut sampler = Sampler::new(settings.sampling)?;
    // Growing later would copy the cache.
    decoder.reserve(prompt_ids.len().saturating_add(settings.max_tokens.min(1024)));
    let mut ends = model.config.eos.clone();
    ends.extend(model.tokenizer.eos());

    let (mut hidden, mut logits) = (Vec::new(), vec![0.0; model.config.vocab]);
    let (first, prompt_seconds) = timed(|| {
        let (layers, width) = (model.config.n_layers, model.config.hidden);
        let mut reading = Reading { stop, progress, tokens: prompt_ids.len(), layers, hidden: width };
        decoder.forward_observed(prompt_ids, Rows::Last, &mut hidden, &mut reading)?;
        progress(prompt_ids.len(), prompt_ids.len());
        decoder.logits_into(&hidden, &mut logits);
        Ok::<(), attlas_model::Error>(())
    });
    first?;
    // In a recipe some heads may have fallen back and others not.
    let fell_back = recipe.rules.is_empty() && decoder.info().status == Status::Exact;
    let mut ids = Vec::new();
    let mut text = Shown::default();
    let (ended, seconds) = timed(|| -> Result<Ended> {
        loop {
            if ids.len() >= settings.max_tokens {
                return Ok(Ended::MaxTokens);
            }
            if stop.load(Ordering::Relaxed) {
                return Ok(Ended::Interrupted);
            }
            let id = sampler.sample(&logits)?;
            if !settings.ignore_eos && ends.contains(&id) {
                return Ok(Ended::EndOfText);
            }
            ids.push(id);
            let whole = model.tokenizer.decode(&ids, true)?;
            if text.grow(whole, &settings.stop, show) {
                return Ok(Ended::StopText);
            }
            if ids.len() >= settings.max_tokens {
                return Ok(Ended::MaxTokens);
            }
            if decoder.len() + 1 > model.config.longest_context() {
                return Ok(Ended::ContextFull);
            }
            decoder.next_logits(&[id], &mut logits)?;
        }
    });
    let ended = ended?;
    text.finish(show);
    let decoding = decoder.decoding();
    // The first token comes from the prompt's own pass.
    let steps = ids.len().saturating_sub(1);
    Ok(Generated {
        prompt_ids: prompt_ids.to_vec(),
        text: text.all,
        ended,
        prompt_tokens_per_second: prompt_ids.len() as f64 / prompt_seconds,
        tokens_per_second: (steps > 0).then(|| steps as f64 / seconds),
        seconds: prompt_seconds + seconds,
        cache_bytes: decoder.cache_bytes(),
        cache: settings.cache,
        compute: settings.compute,
        in_f32: decoder.in_single(),
        decodes_exactly: decoder.decodes_exactly(),
        without_keys: decoding.iter().filter(|l| !l.keeps_keys).map(|l| l.layer).collect(),
        fell_back,
        ids,
    })
}

/// A text and the part already shown.
#[derive(Default)]
struct Shown {
    all: String,
    shown: usize,
}

impl Shown {
    /// Takes the whole text so far; returns true if a stop text ended it.
    fn grow(&mut self, whole: String, stops: &[String], show: &mut dyn FnMut(&str)) -> bool {
        self.all = whole;
        let found = stops.iter().filter_map(|s| self.all.find(s.as_str())).min();
        if let Some(end) = found {
            self.all.truncate(end);
            return true;
        }
        // An unfinished character is decoded as U+FFFD; a suffix may become a stop text.
        let mut end = self.all.trim_end_matches('\u{FFFD}').len();
        for stop in stops {
            let pending = (1..stop.len())
                .rev()
                .filter(|&n| stop.is_char_boundary(n))
                .find(|&n| self.all[..end].ends_with(&stop[..n]));
            end -= pending.unwrap_or(0);
        }
        self.show_to(end, show);
        false
    }

    fn show_to(&mut self, end: usize, show: &mut dyn FnMut(&str)) {
        if end > self.shown && self.all.is_char_boundary(self.shown) {
            show(&self.all[self.shown..end]);
            self.shown = end;
        }
    }

    fn finish(&mut self, show: &mut dyn FnMut(&str)) {
        self.show_to(self.all.len(), show);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(pieces: &[&str], stops: &[&str]) -> (String, String, bool) {
        let stops: Vec<String> = stops.iter().map(|s| s.to_string()).collect();
        let (mut text, mut out, mut whole) = (Shown::default(), String::new(), String::new());
        let mut ended = false;
        for piece in pieces {
            whole.push_str(piece);
            ended = text.grow(whole.clone(), &stops, &mut |s| out.push_str(s));
            if ended {
                break;
            }
        }
        text.finish(&mut |s| out.push_str(s));
        (out, text.all, ended)
    }

    #[test]
    fn a_stop_text_is_never_shown_even_in_pieces() {
        let (out, all, ended) = run(&["Hel", "lo E", "N", "D more"], &["END"]);
        assert_eq!((out.as_str(), all.as_str(), ended), ("Hello ", "Hello ", true));
        let (out, _, ended) = run(&["an EN", "trance"], &["END", "EE"]);
        assert_eq!((out.as_str(), ended), ("an ENtrance", false));
    }

    #[test]
    fn unfinished_characters_wait() {
        let mut text = Shown::default();
        let mut out = Vec::new();
        for whole in ["a\u{FFFD}", "aé", "aéb"] {
            text.grow(whole.into(), &[], &mut |s| out.push(s.to_string()));
        }
        assert_eq!(out, ["a", "é", "b"]);
    }
}
