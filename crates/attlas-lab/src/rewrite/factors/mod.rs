//! A model in factored form against its original: predictions, storage and cost.
//!
//! The folder is written first and reopened: all measurements are made on the written model. Smaller is not always
//! faster: both models are timed in turn, and the record names the times that got longer.

mod accept;
mod calibrate;

pub use accept::{Accept, Acceptance, Trial, set_rank};
pub use calibrate::{Calibrate, Calibrated};

use super::{Bench, Order, Rewrite, Written, check_conversion};
use crate::run::timed;
use crate::self_check::Quality;
use crate::table::{Table, bytes, number, seconds};
use crate::text::Text;
use crate::{Error, Result};
use attlas::conversions::common::network::{Loss, Role};
use attlas::conversions::{Conversion, Run};
use attlas::{Options, Workspace, registry};
use attlas_model::bert::Batch;
use attlas_model::compress::{Compressed, Elements, compress_seen, flops_per_token};
use attlas_model::export::{check_gguf, is_gguf};
use attlas_model::save::Folder;
use attlas_model::{Decoder, Encoder, Model, Recipe, Rows};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Settings of a compression.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The model.
    pub model: PathBuf,
    /// The conversion.
    pub conversion: &'static Conversion,
    /// Parameters of the conversion.
    pub options: Options,
    /// Layers; the conversion's choice if absent.
    pub layers: Option<Vec<usize>>,
    /// Matrices; the conversion's choice if absent.
    pub roles: Option<Vec<Role>>,
    /// Element type of factors; if absent, that of most numbers of the model, with 8 bits for quantised ones.
    pub elements: Option<Elements>,
    /// Output folder or GGUF file.
    pub out: PathBuf,
    /// The text both models read.
    pub text: PathBuf,
    /// Tokens of it, or texts for an encoder.
    pub tokens: usize,
    /// Tokens of a window.
    pub window: usize,
    /// Times each measurement is repeated; 0 measures no times.
    pub repeats: usize,
    /// Threads; 0 uses all that the machine offers.
    pub threads: usize,
    /// Change one layer at a time and keep only changes that pass on held-out text.
    pub accept: Option<Accept>,
    /// Fit to the matrices' inputs on a text.
    pub calibrate: Option<Calibrate>,
}

impl Settings {
    /// Returns the element type of this model's factors.
    fn elements_of(&self, model: &Model) -> Elements {
        self.elements.unwrap_or_else(|| Elements::of(model))
    }
}

/// Storage and cost of a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Figures {
    /// Numbers in the checkpoint.
    pub parameters: usize,
    /// Bytes of its tensors.
    pub bytes: usize,
    /// Operations for a token that attends to a whole window.
    pub flops_per_token: u64,
    /// Bytes cached per token; absent for an encoder.
    pub cache_bytes_per_token: Option<usize>,
    /// Median seconds for all tokens of a window at once; for an encoder, for all texts.
    pub prefill_seconds: Option<f64>,
    /// Median seconds for one more token after a window; absent for an encoder.
    pub decode_seconds: Option<f64>,
}

/// Change of an encoder's embeddings.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Embeddings {
    /// Texts compared.
    pub texts: usize,
    /// Tokens of all of them.
    pub tokens: usize,
    /// Mean cosine between the embeddings of a text by both models.
    pub cosine_mean: f64,
    /// The smallest.
    pub cosine_min: f64,
}

/// The measurement.
#[derive(Clone, Debug, Serialize)]
pub struct Record {
    /// The model.
    pub model: String,
    /// The conversion.
    pub conversion: &'static str,
    /// Its parameters.
    pub params: Options,
    /// Element type of the factors.
    pub dtype: &'static str,
    /// The written folder.
    pub out: String,
    /// The text.
    pub text: String,
    /// SHA-256 of the text's file.
    pub text_sha256: String,
    /// Tokens of a window.
    pub window: usize,
    /// Seconds of the conversion itself, with all trials.
    pub convert_seconds: f64,
    /// Root mean square of the relative errors of weights, by numbers.
    pub rel_error: f64,
    /// Losses by matrix.
    pub losses: Vec<Loss>,
    /// Trials, if each change had to be accepted.
    pub acceptance: Option<Acceptance>,
    /// The text that weights were fitted to.
    pub calibration: Option<Calibrated>,
    /// The model.
    pub before: Figures,
    /// The written folder.
    pub after: Figures,
    /// Predictions of both, if the model predicts tokens.
    pub quality: Option<Quality>,
    /// Embeddings of both, if the model is an encoder.
    pub embeddings: Option<Embeddings>,
    /// `prefill` and `decode`, if they take at least 5 % longer than before.
    pub slower: Vec<&'static str>,
}

impl Rewrite for Settings {
    type Ready = Texts;
    /// The model in factored form, its trials, and the text that it was fitted to.
    type Made<'a> = (Compressed<'a>, Option<Acceptance>, Option<Calibrated>);
    type Record = Record;

    fn order(&self) -> Result<Order<'_>> {
        let mine = |run: &Run| matches!(run, Run::Matrices(_));
        check_conversion("--with", self.conversion, mine, "attlas convert --to")?;
        Ok(Order { model: &self.model, out: &self.out, window: self.window, threads: self.threads })
    }

    fn prepare(&self, model: &Model) -> Result<Texts> {
        if is_gguf(&self.out) {
            check_gguf(model)?;
        }
        Texts::read(self, model)
    }

    fn make<'a>(&'a self, bench: &'a Bench<'a>, texts: &'a Texts) -> Result<Self::Made<'a>> {
        let (model, progress) = (&bench.before, bench.progress);
        let (learnt, calibration) = calibrate::learn(bench, self)?;
        let (learnt, set_aside) = (learnt.as_ref(), &texts.set_aside);
        let (compressed, acceptance) = if let Some(accept) = &self.accept {
            let (threads, stop) = (&bench.threads, bench.stop);
            let (kept, acceptance) =
                accept::choose(model, self, accept, set_aside, learnt, threads, progress, stop)?;
            (kept, Some(acceptance))
        } else {
            let report = |done: usize, all: usize| progress("decomposing", done, all);
            let (layers, roles) = (self.layers.as_deref(), self.roles.as_deref());
            (compress_seen(model, self.conversion, &self.options, layers, roles, learnt, &report)?, None)
        };
        let calibration = calibration.map(|c| c.with_losses(&compressed.rewritten.losses));
        Ok((compressed, acceptance, calibration))
    }

    /// The folder needs no record beside it.
    fn write(&self, bench: &Bench<'_>, _: &Texts, made: &Self::Made<'_>) -> Result<Option<Folder>> {
        made.0.write(&self.out, self.elements_of(&bench.before))?;
        Ok(None)
    }

    fn measure(
        &self,
        bench: &Bench<'_>,
        texts: &Texts,
        (compressed, acceptance, calibration): Self::Made<'_>,
        written: Written,
    ) -> Result<Record> {
        let Bench { before, threads, .. } = bench;
        let models = [before, &written.model];
        let mut figures = [0, 1].map(|i| sizes(models[i], written.sizes[i], self.window));
        let (mut quality, mut embeddings) = (None, None);
        if texts.paragraphs.is_empty() {
            let tokens = &texts.text.tokens;
            let mut reference = bench.read(before, tokens, "before")?;
            quality = Some(bench.against(&mut reference, &written.model, "as written")?);
            let window = &tokens[..self.window.min(tokens.len())];
            time_decoders(models, window, &mut figures, self.repeats, threads, bench.progress)?;
        } else {
            let (ids, threads) = (&texts.paragraphs, threads.sibling());
            embeddings = Some(compare_embeddings(models, ids, &mut figures, self.repeats, threads)?);
        }
        let [before, after] = figures;
        let slower = times(&before, &after).into_iter().filter(|(_, a, b)| *b >= 1.05 * a);
        let slower = slower.map(|(name, ..)| name).collect();
        Ok(Record {
            model: bench.order.name(),
            conversion: self.conversion.id,
            params: self.options.clone(),
            dtype: self.elements_of(&bench.before).name(),
            out: self.out.display().to_string(),
            text: texts.text.source.clone(),
            text_sha256: texts.text.sha256.clone(),
            window: self.window,
            convert_seconds: written.make_seconds,
            rel_error: compressed.rewritten.rel_error(),
            losses: compressed.rewritten.losses,
            acceptance,
            calibration,
            before,
            after,
            quality,
            embeddings,
            slower,
        })
    }
}

/// The text that both models read.
#[derive(Debug)]
pub struct Texts {
    /// The text whose tokens are predicted.
    text: Text,
    /// The tokens after those, if they decide which changes are kept.
    set_aside: Vec<u32>,
    /// For an encoder, the texts to embed instead.
    paragraphs: Vec<Vec<u32>>,
}

/// Fewest characters of a paragraph to embed.
const PARAGRAPH: usize = 200;
/// Most tokens of a paragraph.
const PARAGRAPH_TOKENS: usize = 128;

impl Texts {
    fn read(settings: &Settings, model: &Model) -> Result<Self> {
        let Settings { accept, tokens, .. } = settings;
        if model.config.architecture.is_encoder() {
            accept.as_ref().map_or(Ok(()), |_| accept::check(None))?;
            let text = Text::read(&settings.text, model, None)?;
            let paragraphs = paragraphs(&settings.text, model, 0, *tokens)?;
            return Ok(Self { text, set_aside: Vec::new(), paragraphs });
        }
        let more = accept.as_ref().map_or(0, |a| a.tokens);
        let mut text = Text::read(&settings.text, model, Some(tokens.saturating_add(more)))?;
        let set_aside = text.tokens.split_off((*tokens).min(text.tokens.len()));
        if text.tokens.len() < 2 {
            return Err(Error::argument("--text", "two tokens or more", text.tokens.len()));
        }
        accept.as_ref().map_or(Ok(()), |_| accept::check(Some(&set_aside)))?;
        Ok(Self { text, set_aside, paragraphs: Vec::new() })
    }
}

/// Returns at most `most` paragraphs of a text as token lists for an encoder, after the first `skip`.
fn paragraphs(path: &Path, model: &Model, skip: usize, most: usize) -> Result<Vec<Vec<u32>>> {
    let all = std::fs::read_to_string(path).map_err(|e| Error::reading(path, e))?;
    let paragraphs = all.split("\n\n").map(|p| p.split_whitespace().collect::<Vec<_>>().join(" "));
    let mut ids = Vec::new();
    for text in paragraphs.filter(|p| p.len() > PARAGRAPH).skip(skip).take(most) {
        let mut list = model.tokenizer.encode(&text, true)?;
        let longest = PARAGRAPH_TOKENS.min(model.config.max_positions);
        if list.len() > longest {
            // Keeps the end-of-text token.
            let last = list[list.len() - 1];
            list.truncate(longest - 1);
            list.push(last);
        }
        ids.push(list);
    }
    if ids.is_empty() {
        let expected = format!("a paragraph of more than {PARAGRAPH} characters");
        return Err(Error::argument(path.display(), expected, "none"));
    }
    Ok(ids)
}

fn sizes(model: &Model, (parameters, bytes): (usize, usize), window: usize) -> Figures {
    let window = window.min(model.config.max_positions);
    let context = if model.config.architecture.is_encoder() { PARAGRAPH_TOKENS } else { window };
    Figures { parameters, bytes, flops_per_token: flops_per_token(model, context), ..Figures::default() }
}

/// Returns the median time, the lower one of two middle times.
fn median(times: &mut [f64]) -> Option<f64> {
    times.sort_by(f64::total_cmp);
    times.get(times.len().checked_sub(1)? / 2).copied()
}

/// Tokens added one by one to time decoding.
const STEPS: usize = 8;

/// Times both models in turn: a change of the machine's speed then affects both.
fn time_decoders(
    models: [&Arc<Model>; 2],
    window: &[u32],
    figures: &mut [Figures; 2],
    repeats: usize,
    threads: &Workspace,
    progress: &dyn Fn(&str, usize, usize),
) -> Result<()> {
    let steps = STEPS.min(window.len() - 1);
    let (prompt, rest) = window.split_at(window.len() - steps);
    let mut hidden = Vec::new();
    let mut decoders = Vec::new();
    for model in models {
        let mut decoder = Decoder::on(model.clone(), &Recipe::default(), threads)?;
        decoder.reserve(window.len());
        decoders.push(decoder);
    }
    let mut times = [const { (Vec::new(), Vec::new()) }; 2];
    // The first round warms up caches and buffers.
    for round in 0..=repeats {
        for (i, decoder) in decoders.iter_mut().enumerate() {
            decoder.reset();
            let (done, prefill) = timed(|| decoder.forward(prompt, Rows::Last, &mut hidden));
            done?;
            figures[i].cache_bytes_per_token = Some(decoder.cache_bytes() / prompt.len());
            let mut logits = Vec::new();
            let (done, decode) =
                timed(|| rest.iter().try_for_each(|&t| decoder.next_logits(&[t], &mut logits)));
            done?;
            if round > 0 {
                times[i].0.push(prefill);
                times[i].1.push(decode / steps as f64);
            }
        }
        progress("timing", round + 1, repeats + 1);
    }
    for (figures, (prefill, decode)) in figures.iter_mut().zip(&mut times) {
        figures.prefill_seconds = median(prefill);
        figures.decode_seconds = median(decode);
    }
    Ok(())
}

fn compare_embeddings(
    models: [&Arc<Model>; 2],
    ids: &[Vec<u32>],
    figures: &mut [Figures; 2],
    repeats: usize,
    mut threads: Workspace,
) -> Result<Embeddings> {
    let batch = Batch::new(ids)?;
    let mut vectors = [const { Vec::new() }; 2];
    let mut times = [const { Vec::new() }; 2];
    for round in 0..=repeats {
        for (i, model) in models.into_iter().enumerate() {
            let encoder = Encoder::new(model)?;
            let (done, seconds) =
                timed(|| encoder.embed(&batch, registry::baseline(), &Options::new(), &mut threads));
            vectors[i] = done?;
            if round > 0 {
                times[i].push(seconds);
            }
        }
    }
    for (figures, times) in figures.iter_mut().zip(&mut times) {
        figures.prefill_seconds = median(times);
    }
    let [a, b] = &vectors;
    let cosines: Vec<f64> = a.iter().zip(b).map(|(a, b)| cosine(a, b)).collect();
    Ok(Embeddings {
        texts: ids.len(),
        tokens: ids.iter().map(Vec::len).sum(),
        cosine_mean: crate::stats::mean(&cosines),
        cosine_min: cosines.iter().copied().fold(f64::INFINITY, f64::min),
    })
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum::<f64>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

/// Returns the measured seconds of both models.
fn times(before: &Figures, after: &Figures) -> Vec<(&'static str, f64, f64)> {
    let of = |f: &Figures| [("prefill", f.prefill_seconds), ("decode", f.decode_seconds)];
    let pairs = of(before).into_iter().zip(of(after));
    pairs.filter_map(|((name, a), (_, b))| Some((name, a?, b?))).collect()
}

impl Record {
    /// Returns a table of the changes, one line per figure.
    pub fn table(&self) -> Table {
        let mut table = Table::new(&["<figure", "before", "after", "after/before"]);
        let mut line = |name: &str, a: String, b: String, ratio: f64| {
            table.push(vec![
                name.into(),
                a,
                b,
                if ratio.is_finite() { format!("{ratio:.3}") } else { "-".into() },
            ]);
        };
        if let Some(q) = &self.quality {
            let shown = |p: f64, se: f64| format!("{p:.3} +- {se:.3}");
            line(
                "perplexity",
                shown(q.ppl_before, q.ppl_before_se),
                shown(q.ppl_after, q.ppl_after_se),
                q.ppl_after / q.ppl_before,
            );
            line("KL, mean nats", "0".into(), number(q.kl_mean), f64::NAN);
            line("same top token", "100 %".into(), format!("{:.1} %", 100.0 * q.same_top), q.same_top);
        }
        if let Some(e) = &self.embeddings {
            line("cosine, mean", "1".into(), format!("{:.4}", e.cosine_mean), e.cosine_mean);
            line("cosine, least", "1".into(), format!("{:.4}", e.cosine_min), e.cosine_min);
        }
        let (a, b) = (&self.before, &self.after);
        let ratio = |a: usize, b: usize| b as f64 / a as f64;
        let million = |n: usize| format!("{:.3} M", n as f64 / 1e6);
        line("parameters", million(a.parameters), million(b.parameters), ratio(a.parameters, b.parameters));
        line("bytes", bytes(a.bytes), bytes(b.bytes), ratio(a.bytes, b.bytes));
        let (x, y) = (a.flops_per_token, b.flops_per_token);
        let mega = |n: u64| format!("{:.1} M", n as f64 / 1e6);
        line("flops a token", mega(x), mega(y), y as f64 / x as f64);
        if let (Some(x), Some(y)) = (a.cache_bytes_per_token, b.cache_bytes_per_token) {
            line("cache a token", bytes(x), bytes(y), ratio(x, y));
        }
        for (name, x, y) in times(a, b) {
            line(name, seconds(x), seconds(y), y / x);
        }
        table
    }

    /// Returns one sentence about speed.
    pub fn verdict(&self) -> String {
        let said = |name: &str, ratio: f64| match ratio {
            r if r >= 1.05 => format!("{name} got slower, by {:.0} %", 100.0 * (r - 1.0)),
            r if r <= 0.95 => format!("{name} got faster, by {:.0} %", 100.0 * (1.0 / r - 1.0)),
            _ => format!("{name} takes as long as before"),
        };
        let times = times(&self.before, &self.after);
        let parts: Vec<String> = times.into_iter().map(|(name, x, y)| said(name, y / x)).collect();
        if parts.is_empty() { "no times were measured".into() } else { parts.join("; ") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_are_the_lower_middle() {
        assert_eq!(median(&mut [3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&mut [4.0, 1.0, 2.0, 3.0]), Some(2.0));
        assert_eq!(median(&mut []), None);
    }
}
