//! A grouped-query model turned into one with latent attention, with its own proof: what every stage costs, measured on
//! text that was not calibrated on, and a folder that was opened again before it was called finished.
//!
//! The mathematics is in [`attlas::conversions::mla`], the model in [`attlas_model::convert`], GGUF files in
//! [`attlas_model::export`]. Besides the checkpoint a folder holds `conversion.json`, the [`Record`], and `check.json`, some logits of the written model, so that another
//! program can be compared with this one without running it.

use crate::self_check::{Quality, SelfCheck};
use crate::table::{Table, number};
use crate::{Error, Result};
use attlas::conversions::mla::{Calibration, Figures, Params, Stage};
use attlas::params::ParamValue;
use attlas::{Options, Schedule, Workspace};
use attlas_model::compress::Elements;
use attlas_model::convert::{Latents, calibrate, check, layer_shape, stored_as, write};
use attlas_model::save::{Folder, GGUF};
use attlas_model::{Decoder, Model, Recipe, Rows, export};
use serde::Serialize;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Fewest tokens that anything is checked on.
pub const FEWEST: usize = 16;
/// Tokens that a search is made on, at most.
const SEARCHED: usize = 2048;
/// Positions and tokens of which logits are written down.
const PROOF: [usize; 2] = [48, 256];

/// How a model is converted.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Widths and metrics.
    pub params: Params,
    /// Where to stop; [`Stage::LowRankQueries`] is everything that the parameters ask for.
    pub until: Stage,
    /// Stages whose loss is measured; the last one always is.
    pub measured: Vec<Stage>,
    /// Take the moments for the low rank from the model at [`Stage::PartialRope`], as the method's authors do.
    pub recalibrate: bool,
    /// Choose the fold by perplexity on the last calibration tokens.
    pub search_fold: bool,
    /// Choose the smallest rank that loses at most this many nats a token, by tokens set aside from the calibration.
    pub max_kl: Option<f64>,
    /// How matrices are stored that are new or wider; where absent, as near to the model's own as the format has it.
    pub elements: Option<Elements>,
    /// Tokens of a calibration sequence.
    pub calibration_window: usize,
    /// Tokens of a window of the check.
    pub check_window: usize,
    /// Threads; 0 takes as many as the machine offers.
    pub threads: usize,
}

/// Where a model and its texts came from, for the record.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Origin {
    /// File or folder of the model.
    pub model: String,
    /// SHA-256 of each of its files.
    pub model_sha256: Vec<(String, String)>,
    /// Bytes of its tensors.
    pub model_bytes: usize,
    /// The calibration text.
    pub text: String,
    /// SHA-256 of its file.
    pub text_sha256: String,
    /// The text of the check.
    pub check_text: String,
}

/// Loss of a stage.
#[derive(Clone, Debug, Serialize)]
pub struct StageRecord {
    /// Its name.
    pub stage: &'static str,
    /// Numbers that a layer caches for a token.
    pub cache_numbers: usize,
    /// Share of the keys' energy that is still rotated, mean over layers.
    pub kept_energy: f64,
    /// Relative error of the low rank in its own metric, mean over layers.
    pub rel_error: f64,
    /// Relative error of the latent of queries, mean over layers.
    pub query_error: f64,
    /// Beside the model it started from.
    #[serde(flatten)]
    pub quality: Quality,
}

/// Energy kept and lost by a layer in the last stage.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct LayerRecord {
    /// Share of the keys' energy that is still rotated.
    pub kept_energy: f64,
    /// Divisor of keys before the low rank.
    pub alpha: f64,
    /// Relative error of the low rank.
    pub rel_error: f64,
    /// Relative error of the latent of queries.
    pub query_error: f64,
}

impl From<&Figures> for LayerRecord {
    fn from(f: &Figures) -> Self {
        let Figures { kept_energy, alpha, rel_error, query_error } = *f;
        Self { kept_energy, alpha, rel_error, query_error }
    }
}

/// Logits of what was written may differ from those of the model in memory, its weights rounded in the same way, by this
/// share of the largest one. Rounding in single precision, the norms of latents that the format adds included, stays an order
/// of magnitude below.
const WRITTEN_TOLERANCE: f64 = 2e-3;

/// A conversion with everything that was measured.
#[derive(Clone, Debug, Serialize)]
pub struct Record {
    /// The program that wrote it.
    pub producer: String,
    /// The conversion's id.
    pub conversion: &'static str,
    /// Model and texts.
    #[serde(flatten)]
    pub origin: Origin,
    /// Parameters as they were used.
    pub params: Options,
    /// Whether the low rank was calibrated on its own.
    pub recalibrated: bool,
    /// Folds that were tried, with their perplexities.
    pub fold_search: Vec<(usize, f64)>,
    /// Ranks that were tried, with the divergence of each in nats a token of text set aside.
    pub rank_search: Vec<(usize, f64)>,
    /// Tokens that were calibrated on.
    pub calibration_tokens: usize,
    /// One after another.
    pub stages: Vec<StageRecord>,
    /// The folder's model, opened again, beside the model it was made from.
    pub written: Quality,
    /// How its new matrices are stored.
    pub dtype: &'static str,
    /// Largest difference of its logits from those of the model in memory, which has no norms of latents and the same weights,
    /// rounded to what is stored.
    pub written_diff: f64,
    /// Largest difference of a logit that this rounding of weights makes.
    pub rounding_diff: f64,
    /// Bytes of its tensors.
    pub written_bytes: usize,
    /// Every layer in the last stage.
    pub layers: Vec<LayerRecord>,
    /// Bytes that a token takes in the cache of all layers, before.
    pub cache_bytes_before: usize,
    /// The same after, with the latent's constant coordinate.
    pub cache_bytes_after: usize,
}

impl Record {
    /// The stages with what each lost.
    pub fn table(&self) -> Table {
        let mut table = Table::new(&[
            "<stage",
            "cache",
            "rotated",
            "error",
            "perplexity",
            "+-",
            "nll",
            "KL",
            "99 %",
            "same top",
            "max logit",
        ]);
        let line = |name: &str, cache: String, rotated: String, error: String, q: &Quality| {
            let quantile = |q: Option<f64>| q.map_or("-".into(), number);
            vec![
                name.into(),
                cache,
                rotated,
                error,
                format!("{:.3}", q.ppl_after),
                format!("{:.3}", q.ppl_after_se),
                format!("{:+.4}", q.nll_increase),
                number(q.kl_mean),
                quantile(q.kl_q99),
                format!("{:.1}%", 100.0 * q.same_top),
                number(q.max_logit_diff),
            ]
        };
        let q = &self.written;
        table.push(vec![
            "before".into(),
            String::new(),
            String::new(),
            String::new(),
            format!("{:.3}", q.ppl_before),
            format!("{:.3}", q.ppl_before_se),
        ]);
        for s in &self.stages {
            let error = if s.query_error > 0.0 { s.query_error } else { s.rel_error };
            table.push(line(
                s.stage,
                s.cache_numbers.to_string(),
                format!("{:.3}", s.kept_energy),
                number(error),
                &s.quality,
            ));
        }
        table.push(line("as written", String::new(), String::new(), String::new(), q));
        table
    }
}

/// Some logits of a model.
#[derive(Clone, Debug, Serialize)]
struct Proof {
    /// The texts read.
    tokens: Vec<u32>,
    /// Tokens whose logits follow.
    ids: Vec<usize>,
    /// One row for every position: little-endian single precision in hexadecimal digits.
    logits: Vec<String>,
    #[serde(skip)]
    values: Vec<f32>,
}

impl Proof {
    fn new(model: &Arc<Model>, tokens: &[u32], threads: &Workspace) -> Result<Self> {
        let tokens = tokens[..tokens.len().min(PROOF[0])].to_vec();
        let mut decoder = Decoder::on(model.clone(), &Recipe::default(), threads)?;
        let mut hidden = Vec::new();
        decoder.forward(&tokens, Rows::All, &mut hidden)?;
        let vocab = model.config.vocab;
        let mut all = vec![0.0; tokens.len() * vocab];
        decoder.logits_into(&hidden, &mut all);
        let n = PROOF[1].min(vocab);
        let ids: Vec<usize> = (0..n).map(|i| i * vocab / n).collect();
        let values: Vec<f32> = all.chunks(vocab).flat_map(|row| ids.iter().map(|&i| row[i])).collect();
        let hex = |row: &[f32]| {
            row.iter().flat_map(|x| x.to_le_bytes()).map(|b| format!("{b:02x}")).collect::<String>()
        };
        Ok(Self { tokens, logits: values.chunks(n).map(hex).collect(), ids, values })
    }

    /// The largest difference of a logit.
    fn gap(&self, other: &Self) -> f64 {
        // Kept as it is where it is no number, which `max` would drop.
        let larger = |most: f64, x: f64| if most >= x || most.is_nan() { most } else { x };
        let gap = |(a, b): (&f32, &f32)| f64::from(a - b).abs();
        self.values.iter().zip(&other.values).map(gap).fold(0.0, larger)
    }

    /// The largest difference of a logit in what was written; an error if it is more than rounding.
    fn agrees(&self, written: &Self) -> Result<f64> {
        let found = self.gap(written);
        let largest = self.values.iter().map(|x| f64::from(x.abs())).fold(1.0, f64::max);
        let allowed = WRITTEN_TOLERANCE * largest;
        if found <= allowed { Ok(found) } else { Err(Error::WrittenDiffers { found, allowed }) }
    }
}

/// Input of a conversion: the model, the moments of its layers, and the model at the stage where moments are
/// taken again.
#[derive(Debug)]
pub struct Converter {
    model: Arc<Model>,
    threads: Workspace,
    first: Vec<Calibration>,
    window: usize,
}

impl Converter {
    /// Calibrates on `tokens`. `progress` receives tokens done and tokens in all.
    pub fn new(
        model: &Arc<Model>,
        tokens: &[u32],
        window: usize,
        threads: Workspace,
        progress: &mut dyn FnMut(usize, usize),
        stop: &AtomicBool,
    ) -> Result<Self> {
        let shape = layer_shape(&model.config);
        let features = shape.n_kv_heads * (shape.d + shape.d_v);
        if tokens.len() < features {
            let expected = format!("{features} tokens or more, one for each feature of keys and values");
            return Err(Error::argument("the calibration text", expected, tokens.len()));
        }
        let first = calibrate(model, model, tokens, window, true, &threads, progress, stop)?;
        Ok(Self { model: model.clone(), threads, first, window })
    }

    /// The moments of the model with these parameters at [`Stage::PartialRope`].
    pub fn again(
        &self,
        params: &Params,
        tokens: &[u32],
        progress: &mut dyn FnMut(usize, usize),
        stop: &AtomicBool,
    ) -> Result<Vec<Calibration>> {
        let partial = Arc::new(self.convert(params, Stage::PartialRope, None, false)?.model);
        let Self { model, threads, window, .. } = self;
        Ok(calibrate(model, &partial, tokens, *window, true, threads, progress, stop)?)
    }

    /// The model as far as `stage`; see [`attlas_model::convert::convert`].
    pub fn convert(
        &self,
        params: &Params,
        stage: Stage,
        again: Option<&[Calibration]>,
        neutral: bool,
    ) -> Result<Latents> {
        let convert =
            || attlas_model::convert::convert(&self.model, params, stage, &self.first, again, neutral);
        Ok(self.threads.install(|_| convert())?)
    }
}

/// Converts `model`, measures every stage, and writes a folder at `out`, or a GGUF file by that name, which appears when it
/// is complete. `progress` receives the step, the parts of it that are done, and the parts in all.
pub fn convert(
    model: &Arc<Model>,
    calibration: &[u32],
    checked: &[u32],
    settings: &Settings,
    origin: Origin,
    out: &Path,
    progress: &mut dyn FnMut(&str, usize, usize),
    stop: &AtomicBool,
) -> Result<Record> {
    Folder::check(out)?;
    let mut params = check(model, &settings.params)?;
    let gguf = export::is_gguf(out);
    if gguf {
        export::check_latent_gguf(model, params.rank_q)?;
    }
    let elements = stored_elements(model, settings.elements, gguf)?;
    if settings.until < Stage::PartialRope {
        let expected = "partial_rope or a later stage: no checkpoint has all features of a latent rotated";
        return Err(Error::argument("--until", expected, settings.until.name()));
    }
    if checked.len() < FEWEST {
        return Err(Error::argument(
            "the text of the check",
            format!("{FEWEST} tokens or more"),
            checked.len(),
        ));
    }
    let schedule = Schedule { threads: settings.threads, ..Schedule::default() };
    let threads = Workspace::new(schedule)?;
    let window = settings.calibration_window;
    // What chooses a rank is not what its basis was fitted to.
    let aside = if settings.max_kl.is_some() { (calibration.len() / 4).min(SEARCHED) } else { 0 };
    let (calibration, aside) = calibration.split_at(calibration.len() - aside);
    let mut report = |done: usize, all: usize| progress("calibrating", done, all);
    let converter = Converter::new(model, calibration, window, threads.sibling(), &mut report, stop)?;
    let mut fold_search = Vec::new();
    if settings.search_fold {
        let tail = &calibration[calibration.len().saturating_sub(SEARCHED)..];
        let window = settings.check_window;
        let mut report = |done: usize, all: usize| progress("searching the fold", done, all);
        fold_search = search_fold(&converter, &params, tail, window, &mut report, stop)?;
        let best = fold_search.iter().min_by(|a, b| a.1.total_cmp(&b.1));
        params.fold = best.map(|(fold, _)| *fold);
    }
    let mut report = |done: usize, all: usize| progress("before", done, all);
    let mut reference = SelfCheck::new(model, checked, settings.check_window, &threads, &mut report, stop)?;

    let wanted = |stage: &Stage| {
        *stage <= settings.until && (*stage < Stage::LowRankQueries || params.rank_q.is_some())
    };
    let stages: Vec<Stage> = Stage::ALL.into_iter().filter(wanted).collect();
    let last = *stages.last().unwrap_or(&Stage::Merged);
    let mut again = None;
    if last > Stage::PartialRope && settings.recalibrate {
        let mut report = |done: usize, all: usize| progress("calibrating again", done, all);
        again = Some(converter.again(&params, calibration, &mut report, stop)?);
    }
    let mut rank_search = Vec::new();
    if let Some(most) = settings.max_kl.filter(|_| last >= Stage::LowRank) {
        let window = settings.check_window;
        let mut report = |done: usize, all: usize| progress("searching the rank", done, all);
        let mut before = SelfCheck::new(model, aside, window, &threads, &mut |_, _| {}, stop)?;
        let of = |rank: usize, report: &mut dyn FnMut(usize, usize)| {
            let params = Params { rank: Some(rank), ..params.clone() };
            let latents = converter.convert(&params, last, again.as_deref(), false)?;
            Ok(before.against(&Arc::new(latents.model), &threads, report, stop)?.kl_mean)
        };
        let shape = layer_shape(&model.config);
        let full = shape.n_kv_heads * (shape.d + shape.d_v) - params.rope_dim.unwrap_or(0);
        rank_search = search_rank(full, most, of, &mut report)?;
        params.rank = rank_search.iter().filter(|(_, kl)| *kl <= most).map(|(rank, _)| *rank).min();
    }
    let mut records = Vec::new();
    let mut final_proof = None;
    for stage in stages {
        if stage != last && !settings.measured.contains(&stage) {
            continue;
        }
        progress(&format!("converting, {}", stage.name()), 0, 1);
        let latents = converter.convert(&params, stage, again.as_deref(), false)?;
        let converted = Arc::new(latents.model);
        let mut report = |done: usize, all: usize| progress(stage.name(), done, all);
        let quality = reference.against(&converted, &threads, &mut report, stop)?;
        records.push(stage_record(stage, &converted, &latents.figures, quality));
        if stage == last {
            let rounded = Arc::new(threads.install(|_| stored_as(&converted, elements, gguf))?);
            let exact = Proof::new(&converted, checked, &threads)?;
            final_proof = Some((exact, Proof::new(&rounded, checked, &threads)?));
        }
    }

    progress("writing", 0, 1);
    let latents = converter.convert(&params, last, again.as_deref(), !gguf)?;
    let folder = Folder::create(out)?;
    let place = if gguf { folder.path().join(GGUF) } else { folder.path().to_path_buf() };
    let stored = threads.install(|_| stored_as(&latents.model, elements, gguf))?;
    if gguf {
        export::write_gguf(&stored, elements, &place)?;
    } else {
        write(&stored, &folder)?;
    }
    drop(stored);
    let reopened = Arc::new(Model::open(&place)?);
    let mut report = |done: usize, all: usize| progress("as written", done, all);
    let written = reference.against(&reopened, &threads, &mut report, stop)?;
    let proof = Proof::new(&reopened, checked, &threads)?;
    let (written_diff, rounding_diff) = match final_proof {
        Some((exact, rounded)) => (rounded.agrees(&proof)?, exact.gap(&rounded)),
        None => (f64::NAN, f64::NAN),
    };
    let probe = &checked[..FEWEST];
    let record = Record {
        producer: format!("attlas {}", env!("CARGO_PKG_VERSION")),
        conversion: attlas::conversions::mla::CONVERSION.id,
        origin,
        params: used(&params),
        recalibrated: again.is_some(),
        fold_search,
        rank_search,
        calibration_tokens: calibration.len(),
        stages: records,
        written,
        dtype: elements.name(),
        written_diff,
        rounding_diff,
        written_bytes: attlas_model::checkpoint::size(&place)?.1,
        layers: latents.figures.iter().map(LayerRecord::from).collect(),
        cache_bytes_before: cache_bytes(model, probe, &threads)?,
        cache_bytes_after: cache_bytes(&reopened, probe, &threads)?,
    };
    drop(reopened);
    if stop.load(Ordering::Relaxed) {
        return Err(attlas_model::Error::Interrupted.into());
    }
    if gguf {
        folder.finish_file(GGUF)?;
    } else {
        folder.json("conversion.json", &record)?;
        folder.json("check.json", &proof)?;
        folder.finish()?;
    }
    Ok(record)
}

/// How matrices are stored: as asked, or near to what most of the model's own are. A folder has no blocks.
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

fn stage_record(stage: Stage, model: &Model, figures: &[Figures], quality: Quality) -> StageRecord {
    let mean = |f: &dyn Fn(&Figures) -> f64| figures.iter().map(f).sum::<f64>() / figures.len().max(1) as f64;
    let rope = model.config.rope.as_ref().map_or(0, |r| r.dim);
    StageRecord {
        stage: stage.name(),
        cache_numbers: model.config.latent.map_or(0, |l| l.rank) + rope,
        kept_energy: mean(&|f| f.kept_energy),
        rel_error: mean(&|f| f.rel_error),
        query_error: mean(&|f| f.query_error),
        quality,
    }
}

/// Doubles the fold while the perplexity of the model at [`Stage::PartialRope`] falls.
fn search_fold(
    converter: &Converter,
    params: &Params,
    tokens: &[u32],
    window: usize,
    progress: &mut dyn FnMut(usize, usize),
    stop: &AtomicBool,
) -> Result<Vec<(usize, f64)>> {
    let Some(rope) = &converter.model.config.rope else { return Ok(Vec::new()) };
    let collapse = rope.dim / params.rope_dim.unwrap_or(rope.dim.min(64)).max(1);
    let mut found: Vec<(usize, f64)> = Vec::new();
    let mut fold = collapse.max(1);
    while (rope.dim / 2).is_multiple_of(fold) {
        let params = Params { fold: Some(fold), ..params.clone() };
        let model = Arc::new(converter.convert(&params, Stage::PartialRope, None, false)?.model);
        let read = SelfCheck::new(&model, tokens, window, &converter.threads, progress, stop)?;
        let (ppl, _) = read.perplexity();
        let worse = found.last().is_some_and(|(_, before)| ppl >= *before);
        found.push((fold, ppl));
        if worse {
            break;
        }
        fold *= 2;
    }
    Ok(found)
}

/// Divergences of ranks up to `full` by bisection, until the smallest that loses at most `most` is known to a step of
/// $1/64$ of all there is; an error if not even that is within it.
fn search_rank(
    full: usize,
    most: f64,
    mut of: impl FnMut(usize, &mut dyn FnMut(usize, usize)) -> Result<f64>,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Vec<(usize, f64)>> {
    let whole = of(full, progress)?;
    let mut found = vec![(full, whole)];
    // NaN is past every limit.
    if whole > most || whole.is_nan() {
        let expected = format!("more than {}, which dropping rotations costs at full rank", number(whole));
        return Err(Error::argument("--max-kl", expected, number(most)));
    }
    let step = full.div_ceil(64);
    let (mut below, mut within) = (0, full);
    while within - below > step {
        let rank = (below + (within - below) / 2).next_multiple_of(step).min(within - 1);
        let kl = of(rank, progress)?;
        found.push((rank, kl));
        if kl <= most { within = rank } else { below = rank }
    }
    Ok(found)
}

/// The parameters for the record.
fn used(p: &Params) -> Options {
    let mut options = Options::new();
    for (name, size) in [("rope_dim", p.rope_dim), ("fold", p.fold), ("rank", p.rank), ("rank_q", p.rank_q)] {
        if let Some(size) = size {
            options.set(name, size);
        }
    }
    options.set("balance", p.balance);
    options.set("rotate", p.rotate.to_value());
    options.set("pca", p.pca.to_value());
    options
}

/// Bytes that a token takes in the cache of all layers.
fn cache_bytes(model: &Arc<Model>, tokens: &[u32], threads: &Workspace) -> Result<usize> {
    let mut decoder = Decoder::on(model.clone(), &Recipe::default(), threads)?;
    decoder.forward(tokens, Rows::None, &mut Vec::new())?;
    Ok(decoder.cache_bytes() / tokens.len().max(1))
}

/// Names and SHA-256 of the files of a model: the file itself, or what a folder has of configuration and weights.
pub fn model_files(path: &Path) -> Result<Vec<(String, String)>> {
    let mut files = Vec::new();
    if path.is_dir() {
        for entry in std::fs::read_dir(path).map_err(|e| Error::reading(path, e))? {
            let file = entry.map_err(|e| Error::reading(path, e))?.path();
            let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if name == "config.json" || name.ends_with(".safetensors") {
                files.push((name, file));
            }
        }
        files.sort();
    } else {
        files.push((path.file_name().unwrap_or_default().to_string_lossy().into_owned(), path.to_path_buf()));
    }
    let hashed = |(name, file): (String, std::path::PathBuf)| {
        let source = attlas_model::tensor::Source::open(&file)?;
        Ok((name, crate::hash::sha256(source.bytes())))
    };
    files.into_iter().map(hashed).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_rank_within_a_loss_is_found_by_bisection() {
        // Falls with the rank, and is within 0.1 from 200 on.
        let kl = |rank: usize| 20.0 / rank as f64;
        let tried = search_rank(320, 0.1, |rank, _| Ok(kl(rank)), &mut |_, _| {}).unwrap();
        let best = tried.iter().filter(|(_, kl)| *kl <= 0.1).map(|(rank, _)| *rank).min().unwrap();
        assert!((200..205).contains(&best) && tried.len() < 9, "{tried:?}");
        assert!(tried.iter().all(|&(rank, found)| found == kl(rank)));
        let error = search_rank(320, 0.06, |rank, _| Ok(kl(rank)), &mut |_, _| {}).unwrap_err().to_string();
        assert!(error.contains("--max-kl") && error.contains("0.0625"), "{error}");
        assert!(search_rank(320, 0.06, |_, _| Ok(f64::NAN), &mut |_, _| {}).is_err());
        assert_eq!(search_rank(1, 1.0, |_, _| Ok(0.5), &mut |_, _| {}).unwrap(), [(1, 0.5)]);
    }

    #[test]
    fn a_written_folder_that_differs_is_an_error() {
        let proof = |values: &[f32]| Proof {
            tokens: vec![0],
            ids: vec![0, 1],
            logits: Vec::new(),
            values: values.to_vec(),
        };
        let memory = proof(&[20.0, -3.0]);
        assert!(memory.agrees(&proof(&[20.01, -3.0])).unwrap() < 0.011);
        for other in [[20.0, 0.26], [f32::NAN, -3.0], [20.0, f32::INFINITY]] {
            let error = memory.agrees(&proof(&other)).unwrap_err();
            assert!(matches!(error, Error::WrittenDiffers { .. }), "{error}");
        }
    }
}
