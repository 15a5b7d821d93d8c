//! Conversion of a grouped-query model to latent attention. The loss of every stage is measured on text not used for
//! calibration, and the written folder is reopened before it counts as finished.
//!
//! The mathematics is in [`attlas::conversions::mla`], the model in [`attlas_model::convert`], GGUF files in
//! [`attlas_model::export`]. Besides the checkpoint a folder contains `conversion.json`, the [`Record`], and
//! `check.json`, some logits of the written model, with which another program can be compared without running this one.

mod record;
mod search;

pub use record::{Record, StageRecord};

use super::{Bench, Order, Rewrite, Written, check_conversion};
use crate::self_check::SelfCheck;
use crate::text::Text;
use crate::{Error, Result};
use attlas::Workspace;
use attlas::conversions::mla::{Calibration, Params, Stage};
use attlas::conversions::{Conversion, Run};
use attlas_model::compress::Elements;
use attlas_model::convert::{Latents, calibrate, check, convert, has_mlp_biases, stored_as, write};
use attlas_model::export::{self, is_gguf};
use attlas_model::save::{Folder, GGUF};
use attlas_model::{Decoder, Model, Recipe, Rows};
use record::{Proof, model_files, stage_record, used};
use search::{search_fold, search_rank};
use std::path::PathBuf;
use std::sync::Arc;

/// Fewest tokens of a check.
const FEWEST: usize = 16;
/// Tokens to calibrate on by default.
const TOKENS: usize = 8192;
/// Tokens to check on by default.
const CHECK_TOKENS: usize = 2048;
/// Tokens of a calibration sequence.
const CALIBRATION_WINDOW: usize = 256;
/// Most tokens of a search.
const SEARCHED: usize = 2048;

/// Settings of a conversion.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The model.
    pub model: PathBuf,
    /// The conversion.
    pub conversion: &'static Conversion,
    /// Widths and metrics.
    pub params: Params,
    /// Instead of a rank, the share of the cache that remains.
    pub keep: Option<f64>,
    /// Last stage; [`Stage::LowRankQueries`] includes everything that the parameters set.
    pub until: Stage,
    /// Stages whose loss is measured; the last one always is.
    pub measured: Vec<Stage>,
    /// Take the moments for the low rank from the model at [`Stage::PartialRope`], as the method's authors do.
    pub recalibrate: bool,
    /// Choose the fold by perplexity on the last calibration tokens.
    pub search_fold: bool,
    /// Choose the smallest rank that loses at most this many nats per token, on held-out calibration tokens.
    pub max_kl: Option<f64>,
    /// Element type of new matrices and of those in a wider type; if absent, the format's closest to the model's own.
    pub elements: Option<Elements>,
    /// Output folder or GGUF file.
    pub out: PathBuf,
    /// The text to calibrate on.
    pub text: PathBuf,
    /// Tokens of it; if absent, 8192, or three quarters of a shorter text that also serves the check.
    pub tokens: Option<usize>,
    /// The text to check on; if absent, the tokens after those.
    pub check_text: Option<PathBuf>,
    /// Tokens of it; 2048 if absent.
    pub check_tokens: Option<usize>,
    /// Tokens of a window of the check.
    pub window: usize,
    /// Threads; 0 uses all that the machine offers.
    pub threads: usize,
}

/// Checked settings for a model, and its texts.
#[derive(Debug)]
pub struct Ready {
    params: Params,
    elements: Elements,
    text: Text,
    check: Text,
}

/// The model with latents as written, and the measurements on the way.
#[derive(Debug)]
pub struct Made<'a> {
    latents: Latents,
    params: Params,
    recalibrated: bool,
    reference: SelfCheck<'a>,
    calibration_tokens: usize,
    fold_search: Vec<(usize, f64)>,
    rank_search: Vec<(usize, f64)>,
    stages: Vec<StageRecord>,
    /// Logits of the model in memory, and of the same model with rounded weights.
    proofs: [Proof; 2],
}

impl Rewrite for Settings {
    type Ready = Ready;
    type Made<'a> = Made<'a>;
    type Record = Record;

    fn order(&self) -> Result<Order<'_>> {
        let mine = |run: &Run| matches!(run, Run::Latents);
        check_conversion("--to", self.conversion, mine, "attlas compress --with")?;
        Ok(Order { model: &self.model, out: &self.out, window: self.window, threads: self.threads })
    }

    fn prepare(&self, model: &Model) -> Result<Ready> {
        let params = check(model, &self.kept(model)?)?;
        let (text, checked) = self.texts(model)?;
        let gguf = is_gguf(&self.out);
        if gguf {
            export::check_latent_gguf(model, params.rank_q)?;
        }
        let elements = stored_elements(model, self.elements, gguf)?;
        if self.until < Stage::PartialRope {
            let expected =
                "partial_rope or a later stage: no checkpoint has all features of a latent rotated";
            return Err(Error::argument("--until", expected, self.until.name()));
        }
        if checked.tokens.len() < FEWEST {
            let expected = format!("{FEWEST} tokens or more");
            return Err(Error::argument("the text of the check", expected, checked.tokens.len()));
        }
        Ok(Ready { params, elements, text, check: checked })
    }

    fn make<'a>(&'a self, bench: &'a Bench<'a>, ready: &'a Ready) -> Result<Made<'a>> {
        let Bench { before: model, threads, stop, .. } = bench;
        let mut params = ready.params.clone();
        // The tokens that choose a rank must not be those its basis was fitted to.
        let tokens = &ready.text.tokens[..];
        let aside = if self.max_kl.is_some() { (tokens.len() / 4).min(SEARCHED) } else { 0 };
        let (tokens, aside) = tokens.split_at(tokens.len() - aside);
        let shape = model.config.layer_shape();
        let features = shape.n_kv_heads * (shape.d + shape.d_v);
        if tokens.len() < features {
            let expected = format!("{features} tokens or more, one for each feature of keys and values");
            return Err(Error::argument("the calibration text", expected, tokens.len()));
        }
        let moments = |of: &Arc<Model>, what: &str| -> Result<Vec<Calibration>> {
            let (window, mut report) = (CALIBRATION_WINDOW, bench.report(what));
            Ok(calibrate(model, of, tokens, window, true, threads, &mut report, stop)?)
        };
        let first = moments(model, "calibrating")?;
        let convert = |params: &Params, stage, again: Option<&[Calibration]>, neutral| -> Result<Latents> {
            Ok(threads.install(|_| convert(model, params, stage, &first, again, neutral))?)
        };
        let partial = |params: &Params| -> Result<Model> {
            Ok(convert(params, Stage::PartialRope, None, false)?.model)
        };
        let mut fold_search = Vec::new();
        if self.search_fold {
            let tail = &tokens[tokens.len().saturating_sub(SEARCHED)..];
            fold_search = search_fold(bench, &params, tail, partial)?;
            let best = fold_search.iter().min_by(|a, b| a.1.total_cmp(&b.1));
            params.fold = best.map(|(fold, _)| *fold);
        }
        let mut reference = bench.read(model, &ready.check.tokens, "before")?;

        let wanted = |stage: &Stage| {
            *stage <= self.until && (*stage < Stage::LowRankQueries || params.rank_q.is_some())
        };
        let all: Vec<Stage> = Stage::ALL.into_iter().filter(wanted).collect();
        let last = *all.last().unwrap_or(&Stage::Merged);
        let mut again = None;
        if last > Stage::PartialRope && self.recalibrate {
            again = Some(moments(&Arc::new(partial(&params)?), "calibrating again")?);
        }
        let mut rank_search = Vec::new();
        if let Some(most) = self.max_kl.filter(|_| last >= Stage::LowRank) {
            let mut before = bench.read(model, aside, "searching the rank")?;
            let of = |rank: usize, report: &mut dyn FnMut(usize, usize)| {
                let params = Params { rank: Some(rank), ..params.clone() };
                let latents = convert(&params, last, again.as_deref(), false)?;
                Ok(before.against(&Arc::new(latents.model), threads, report, stop)?.kl_mean)
            };
            let full = features - params.rope_dim.unwrap_or(0);
            rank_search = search_rank(full, most, of, &mut bench.report("searching the rank"))?;
            params.rank = rank_search.iter().filter(|(_, kl)| *kl <= most).map(|(rank, _)| *rank).min();
        }
        let mut at = |stage: Stage| -> Result<(StageRecord, Arc<Model>)> {
            (bench.progress)(&format!("converting, {}", stage.name()), 0, 1);
            let latents = convert(&params, stage, again.as_deref(), false)?;
            let converted = Arc::new(latents.model);
            let quality = bench.against(&mut reference, &converted, stage.name())?;
            Ok((stage_record(stage, &converted, &latents.figures, quality), converted))
        };
        let earlier = all.iter().filter(|s| **s != last && self.measured.contains(s));
        let mut stages = earlier.map(|s| Ok(at(*s)?.0)).collect::<Result<Vec<_>>>()?;
        let (record, exact) = at(last)?;
        stages.push(record);
        let gguf = is_gguf(&self.out);
        let rounded = Arc::new(threads.install(|_| stored_as(&exact, ready.elements, gguf))?);
        let proofs = [exact, rounded].map(|model| Proof::new(&model, &ready.check.tokens, threads));
        let [exact, rounded] = proofs;
        Ok(Made {
            proofs: [exact?, rounded?],
            latents: convert(&params, last, again.as_deref(), !gguf)?,
            params,
            recalibrated: again.is_some(),
            reference,
            calibration_tokens: tokens.len(),
            fold_search,
            rank_search,
            stages,
        })
    }

    fn write(&self, bench: &Bench<'_>, ready: &Ready, made: &Made<'_>) -> Result<Option<Folder>> {
        let (model, gguf) = (&made.latents.model, is_gguf(&self.out));
        let folder = Folder::create(&self.out)?;
        let stored = bench.threads.install(|_| stored_as(model, ready.elements, gguf))?;
        if gguf {
            export::write_gguf(&stored, ready.elements, &folder.path().join(GGUF))?;
        } else {
            write(&stored, &folder)?;
        }
        Ok(Some(folder))
    }

    fn measure(
        &self,
        bench: &Bench<'_>,
        ready: &Ready,
        mut made: Made<'_>,
        after: Written,
    ) -> Result<Record> {
        let (before, threads) = (&bench.before, &bench.threads);
        let written = bench.against(&mut made.reference, &after.model, "as written")?;
        let proof = Proof::new(&after.model, &ready.check.tokens, threads)?;
        let [exact, rounded] = &made.proofs;
        let probe = &ready.check.tokens[..FEWEST];
        let [(_, model_bytes), (_, written_bytes)] = after.sizes;
        Ok(Record {
            producer: format!("attlas {}", env!("CARGO_PKG_VERSION")),
            conversion: self.conversion.id,
            model: bench.order.name(),
            model_sha256: if self.model.exists() { model_files(&self.model)? } else { Vec::new() },
            model_bytes,
            text: ready.text.source.clone(),
            text_sha256: ready.text.sha256.clone(),
            check_text: ready.check.source.clone(),
            params: used(&made.params),
            recalibrated: made.recalibrated,
            fold_search: made.fold_search,
            rank_search: made.rank_search,
            calibration_tokens: made.calibration_tokens,
            stages: made.stages,
            written,
            dtype: ready.elements.name(),
            written_diff: rounded.agrees(&proof)?,
            rounding_diff: exact.gap(rounded),
            written_bytes,
            layers: made.latents.figures,
            cache_bytes_before: cache_bytes(before, probe, threads)?,
            cache_bytes_after: cache_bytes(&after.model, probe, threads)?,
            own_class: has_mlp_biases(before),
            proof,
        })
    }

    fn finish(&self, folder: Folder, record: &Record) -> Result<()> {
        if is_gguf(&self.out) {
            return Ok(folder.finish_file(GGUF)?);
        }
        folder.json("conversion.json", record)?;
        folder.json("check.json", &record.proof)?;
        Ok(folder.finish()?)
    }
}

impl Settings {
    /// Returns the parameters with the rank that leaves the given share of the cache.
    fn kept(&self, model: &Model) -> Result<Params> {
        let Some(share) = self.keep else { return Ok(self.params.clone()) };
        let resolved = check(model, &self.params)?;
        let shape = model.config.layer_shape();
        let (cache, rotated) = (shape.n_kv_heads * (shape.d + shape.d_v), resolved.rope_dim.unwrap_or(0));
        // The rotated key, and the constant of the written latent, are cached beside it.
        let rank = ((share * cache as f64) as usize).saturating_sub(rotated + 1);
        if rank == 0 || share > 1.0 {
            let least = 100.0 * (rotated + 2) as f64 / cache as f64;
            let expected = format!("more than {least:.1}%, the rotated key of {rotated}, and at most 100%");
            return Err(Error::argument("--keep", expected, format!("{:.1}%", 100.0 * share)));
        }
        Ok(Params { rank: Some(rank.min(cache - rotated)), ..self.params.clone() })
    }

    /// Returns the text to calibrate on, and the one to check on: another text, or the following tokens.
    fn texts(&self, model: &Model) -> Result<(Text, Text)> {
        let mut text = Text::read(&self.text, model, None)?;
        let all = text.tokens.len();
        let share = if self.check_text.is_some() { all } else { all / 4 * 3 };
        let n = self.tokens.unwrap_or(TOKENS.min(share));
        let mut check = match &self.check_text {
            Some(path) => Text::read(path, model, None)?,
            None => {
                let tokens = text.tokens[n.min(all)..].to_vec();
                Text { source: format!("{} after its first {n} tokens", text.source), tokens, ..text.clone() }
            }
        };
        if n > all || check.tokens.len() < FEWEST {
            let expected = format!(
                "{n} tokens to calibrate on and {FEWEST} or more after them to check on, or --check-text"
            );
            return Err(Error::argument("--text", expected, format!("{all} tokens")));
        }
        text.tokens.truncate(n);
        check.tokens.truncate(self.check_tokens.unwrap_or(CHECK_TOKENS));
        Ok((text, check))
    }
}

/// Returns the element type of matrices: the given one, or the closest to most of the model's own. A folder stores no
/// quantised blocks.
fn stored_elements(model: &Model, asked: Option<Elements>, gguf: bool) -> Result<Elements> {
    match (asked, Elements::of(model)) {
        (Some(Elements::Q8), _) if !gguf => {
            let expected = "f32, f16 or bf16 for a folder; q8 for --out FILE.gguf";
            Err(Error::argument("--dtype", expected, Elements::Q8.name()))
        }
        (Some(elements), _) => Ok(elements),
        (None, Elements::Q8) if !gguf => Ok(Elements::F16),
        (None, own) => Ok(own),
    }
}

/// Returns the bytes cached per token in all layers.
fn cache_bytes(model: &Arc<Model>, tokens: &[u32], threads: &Workspace) -> Result<usize> {
    let mut decoder = Decoder::on(model.clone(), &Recipe::default(), threads)?;
    decoder.forward(tokens, Rows::None, &mut Vec::new())?;
    Ok(decoder.cache_bytes() / tokens.len().max(1))
}
