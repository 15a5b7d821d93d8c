//! A model in factored form beside the one it was made from: what it predicts, what it stores, what it costs.
//!
//! The folder is written first and opened again, so that everything measured is measured on what was written. Smaller is
//! not always faster: times of both models are taken in turn, and the record says which got slower.

mod accept;
mod calibrate;

pub use accept::{Accept, Acceptance, Trial, set_rank};
pub use calibrate::{Calibrate, Calibrated};

use crate::run::timed;
use crate::self_check::{Quality, SelfCheck};
use crate::table::{Table, bytes, number, seconds};
use crate::text::{Text, model_size, open_model};
use crate::{Error, Result};
use attlas::conversions::Conversion;
use attlas::conversions::common::network::Role;
use attlas::{Options, Schedule, Workspace, registry};
use attlas_model::bert::Batch;
use attlas_model::compress::{Compressed, Elements, Learnt, compress_seen, flops_per_token};
use attlas_model::save::Folder;
use attlas_model::{Decoder, Encoder, Model, Recipe, Rows};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Settings of a compression.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The model.
    pub model: PathBuf,
    /// The conversion.
    pub conversion: &'static Conversion,
    /// Parameters of that.
    pub options: Options,
    /// Layers; the conversion's choice where absent.
    pub layers: Option<Vec<usize>>,
    /// Matrices; the conversion's choice where absent.
    pub roles: Option<Vec<Role>>,
    /// How factors are stored; where absent, as most numbers of the model are, those in blocks in 8 bits.
    pub elements: Option<Elements>,
    /// Where to.
    pub out: PathBuf,
    /// The text both models read.
    pub text: PathBuf,
    /// Tokens of it, or texts for an encoder.
    pub tokens: usize,
    /// Tokens of a window.
    pub window: usize,
    /// Times each measurement is repeated; 0 measures no times.
    pub repeats: usize,
    /// Threads; 0 takes as many as the machine offers.
    pub threads: usize,
    /// Change one layer at a time and keep what text set aside accepts.
    pub accept: Option<Accept>,
    /// Fit to the inputs that a text gives the matrices.
    pub calibrate: Option<Calibrate>,
}

impl Settings {
    /// How factors of this model are stored.
    fn elements_of(&self, model: &Model) -> Elements {
        self.elements.unwrap_or_else(|| Elements::of(model))
    }
}

/// Storage and cost of a model.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Figures {
    /// Numbers in the checkpoint.
    pub parameters: usize,
    /// Bytes of its tensors.
    pub bytes: usize,
    /// Operations for a token that sees a whole window.
    pub flops_per_token: u64,
    /// Bytes of the cache for each token; absent for an encoder.
    pub cache_bytes_per_token: Option<usize>,
    /// Seconds for all tokens of a window at once, median; of an encoder, for all texts.
    pub prefill_seconds: Option<f64>,
    /// Seconds for one more token after a window, median; absent for an encoder.
    pub decode_seconds: Option<f64>,
}

/// How far embeddings of an encoder moved.
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

/// Loss of weights that were decomposed together.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Loss {
    /// Which weights.
    pub what: String,
    /// The rank that was kept.
    pub rank: usize,
    /// Relative Frobenius error.
    pub rel_error: f64,
    /// Relative root mean square error of the outputs on calibration text.
    pub seen_error: Option<f64>,
    /// Numbers before.
    pub before: usize,
    /// Numbers after.
    pub after: usize,
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
    /// How factors are stored.
    pub dtype: &'static str,
    /// The folder that was written.
    pub out: String,
    /// The text.
    pub text: String,
    /// SHA-256 of the text's file.
    pub text_sha256: String,
    /// Tokens of a window.
    pub window: usize,
    /// Seconds of the conversion itself, with all that was tried.
    pub convert_seconds: f64,
    /// Root mean square of the relative errors of weights, by numbers.
    pub rel_error: f64,
    /// Losses by place.
    pub losses: Vec<Loss>,
    /// Trials, where each change had to be accepted.
    pub acceptance: Option<Acceptance>,
    /// The text that weights were fitted to.
    pub calibration: Option<Calibrated>,
    /// The model.
    pub before: Figures,
    /// The written folder.
    pub after: Figures,
    /// Predictions of both, where the model makes any.
    pub quality: Option<Quality>,
    /// Embeddings of both, where the model makes those.
    pub embeddings: Option<Embeddings>,
    /// `prefill` and `decode`, as far as they take longer than before by 5 % or more.
    pub slower: Vec<&'static str>,
}

/// Converts, writes, opens again and measures. `progress` receives what is done, parts done and parts in all.
pub fn run(
    settings: &Settings,
    progress: &(dyn Fn(&str, usize, usize) + Sync),
    stop: &AtomicBool,
) -> Result<Record> {
    // What can be known to fail is known before a model is opened.
    Folder::check(&settings.out)?;
    let before = open_model(&settings.model)?;
    if attlas_model::export::is_gguf(&settings.out) {
        attlas_model::export::check_gguf(&before)?;
    }
    let texts = Texts::read(settings, &before)?;
    let threads = Workspace::new(Schedule { threads: settings.threads, ..Schedule::default() })?;
    let ((learnt, calibration), learn_seconds) =
        timed_result(|| calibrate::learn(&before, settings, &threads, progress, stop))?;
    let ((compressed, acceptance), convert_seconds) = timed_result(|| {
        convert(&before, settings, &texts.set_aside, learnt.as_ref(), &threads, progress, stop)
    })?;
    let convert_seconds = learn_seconds + convert_seconds;
    let calibration = calibration.map(|c: Calibrated| c.with_losses(&compressed.rewritten.losses));
    if stop.load(Ordering::Relaxed) {
        return Err(attlas_model::Error::Interrupted.into());
    }
    let elements = settings.elements_of(&before);
    compressed.write(&settings.out, elements)?;
    let losses = compressed.rewritten.losses.iter();
    let losses = losses
        .map(|l| Loss {
            what: l.what.clone(),
            rank: l.rank,
            rel_error: l.rel_error,
            seen_error: l.seen_error,
            before: l.before,
            after: l.after,
        })
        .collect();
    let rel_error = compressed.rewritten.rel_error();
    let after = Arc::new(Model::open(&settings.out)?);
    let mut figures = [sizes(&before, &settings.model, settings)?, sizes(&after, &settings.out, settings)?];
    let models = [&before, &after];
    let (mut quality, mut embeddings) = (None, None);
    match &texts.content {
        Content::Tokens(tokens) => {
            let mut report = |done: usize, all: usize| progress("reading", done, 2 * all);
            let mut check = SelfCheck::new(&before, tokens, settings.window, &threads, &mut report, stop)?;
            let mut report = |done: usize, all: usize| progress("reading", all + done, 2 * all);
            quality = Some(check.against(&after, &threads, &mut report, stop)?);
            let window = &tokens[..settings.window.min(tokens.len())];
            time_decoders(models, window, &mut figures, settings.repeats, &threads, progress)?;
        }
        Content::Texts(ids) => {
            embeddings = Some(compare_embeddings(models, ids, &mut figures, settings.repeats, threads)?);
        }
    }
    let [before, after] = figures;
    let worse = |a: Option<f64>, b: Option<f64>| matches!((a, b), (Some(a), Some(b)) if b >= 1.05 * a);
    let mut slower = Vec::new();
    if worse(before.prefill_seconds, after.prefill_seconds) {
        slower.push("prefill");
    }
    if worse(before.decode_seconds, after.decode_seconds) {
        slower.push("decode");
    }
    Ok(Record {
        model: settings.model.file_name().unwrap_or_default().to_string_lossy().into_owned(),
        conversion: settings.conversion.id,
        params: settings.options.clone(),
        dtype: elements.name(),
        out: settings.out.display().to_string(),
        text: texts.source,
        text_sha256: texts.sha256,
        window: settings.window,
        convert_seconds,
        rel_error,
        losses,
        acceptance,
        calibration,
        before,
        after,
        quality,
        embeddings,
        slower,
    })
}

/// Applies the conversion everywhere, or only where text set aside accepts it.
fn convert<'a>(
    model: &'a Arc<Model>,
    settings: &Settings,
    set_aside: &[u32],
    learnt: Option<&Learnt>,
    threads: &Workspace,
    progress: &(dyn Fn(&str, usize, usize) + Sync),
    stop: &AtomicBool,
) -> Result<(Compressed<'a>, Option<Acceptance>)> {
    if let Some(accept) = &settings.accept {
        let (kept, acceptance) =
            accept::choose(model, settings, accept, set_aside, learnt, threads, progress, stop)?;
        return Ok((kept, Some(acceptance)));
    }
    let Settings { options, layers, roles, .. } = settings;
    let report = |done: usize, all: usize| progress("decomposing", done, all);
    let (layers, roles) = (layers.as_deref(), roles.as_deref());
    let all = compress_seen(model, settings.conversion, options, layers, roles, learnt, &report)?;
    Ok((all, None))
}

/// The result of work that may fail, and the seconds it took.
fn timed_result<T>(work: impl FnOnce() -> Result<T>) -> Result<(T, f64)> {
    let (done, seconds) = timed(work);
    Ok((done?, seconds))
}

/// The text that both models read.
struct Texts {
    source: String,
    sha256: String,
    content: Content,
    /// The tokens after those, where they decide what is kept.
    set_aside: Vec<u32>,
}

enum Content {
    /// Tokens to predict.
    Tokens(Vec<u32>),
    /// Texts to embed.
    Texts(Vec<Vec<u32>>),
}

/// Characters below which a paragraph is not worth embedding.
const PARAGRAPH: usize = 200;
/// Most tokens of a paragraph.
const PARAGRAPH_TOKENS: usize = 128;

impl Texts {
    fn read(settings: &Settings, model: &Model) -> Result<Self> {
        if !model.config.architecture.is_encoder() {
            let more = settings.accept.as_ref().map_or(0, |a| a.tokens);
            let mut text = Text::read(&settings.text, model, Some(settings.tokens.saturating_add(more)))?;
            let set_aside = text.tokens.split_off(settings.tokens.min(text.tokens.len()));
            if text.tokens.len() < 2 {
                return Err(Error::argument("--text", "two tokens or more", text.tokens.len()));
            }
            if settings.accept.is_some() {
                accept::check(Some(&set_aside))?;
            }
            return Ok(Self {
                source: text.source,
                sha256: text.sha256,
                content: Content::Tokens(text.tokens),
                set_aside,
            });
        }
        if settings.accept.is_some() {
            accept::check(None)?;
        }
        let whole = Text::read(&settings.text, model, None)?;
        let ids = paragraphs(&settings.text, model, 0, settings.tokens)?;
        Ok(Self {
            source: whole.source,
            sha256: whole.sha256,
            content: Content::Texts(ids),
            set_aside: Vec::new(),
        })
    }
}

/// Paragraphs of a text as an encoder reads them, all but the first `skip` of them, `most` at most.
fn paragraphs(path: &Path, model: &Model, skip: usize, most: usize) -> Result<Vec<Vec<u32>>> {
    let all = std::fs::read_to_string(path).map_err(|e| Error::reading(path, e))?;
    let paragraphs = all.split("\n\n").map(|p| p.split_whitespace().collect::<Vec<_>>().join(" "));
    let mut ids = Vec::new();
    for text in paragraphs.filter(|p| p.len() > PARAGRAPH).skip(skip).take(most) {
        let mut list = model.tokenizer.encode(&text, true)?;
        let longest = PARAGRAPH_TOKENS.min(model.config.max_positions);
        if list.len() > longest {
            // The token that ends a text stays.
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

fn sizes(model: &Arc<Model>, path: &Path, settings: &Settings) -> Result<Figures> {
    let (parameters, bytes) = model_size(path)?;
    let window = settings.window.min(model.config.max_positions);
    let context = if model.config.architecture.is_encoder() { PARAGRAPH_TOKENS } else { window };
    Ok(Figures {
        parameters,
        bytes,
        flops_per_token: flops_per_token(model, context),
        cache_bytes_per_token: None,
        prefill_seconds: None,
        decode_seconds: None,
    })
}

/// The middle of the times; the lower of the two middle ones.
fn median(times: &mut [f64]) -> Option<f64> {
    times.sort_by(f64::total_cmp);
    times.get(times.len().checked_sub(1)? / 2).copied()
}

/// Tokens that are added one by one where decoding is timed.
const STEPS: usize = 8;

/// Times both models in turn, so that a machine that changes its speed changes it for both.
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
    // The first round warms caches and buffers up.
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

impl Record {
    /// The changes, one line per figure.
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
        let times = [
            ("prefill", a.prefill_seconds, b.prefill_seconds),
            ("decode", a.decode_seconds, b.decode_seconds),
        ];
        for (name, x, y) in times {
            if let (Some(x), Some(y)) = (x, y) {
                line(name, seconds(x), seconds(y), y / x);
            }
        }
        table
    }

    /// One sentence about speed.
    pub fn verdict(&self) -> String {
        let words = |a: Option<f64>, b: Option<f64>| Some(b? / a?);
        let (prefill, decode) = (
            words(self.before.prefill_seconds, self.after.prefill_seconds),
            words(self.before.decode_seconds, self.after.decode_seconds),
        );
        let said = |name: &str, ratio: f64| match ratio {
            r if r >= 1.05 => format!("{name} got slower, by {:.0} %", 100.0 * (r - 1.0)),
            r if r <= 0.95 => format!("{name} got faster, by {:.0} %", 100.0 * (1.0 / r - 1.0)),
            _ => format!("{name} takes as long as before"),
        };
        let parts: Vec<String> = [("prefill", prefill), ("decode", decode)]
            .into_iter()
            .filter_map(|(n, r)| Some(said(n, r?)))
            .collect();
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
