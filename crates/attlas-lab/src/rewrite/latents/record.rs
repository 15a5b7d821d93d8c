//! Records of a conversion.

use crate::self_check::Quality;
use crate::table::{Table, number};
use crate::{Error, Result};
use attlas::conversions::mla::{Figures, Params, Stage};
use attlas::params::{ParamSet, Value};
use attlas::{Options, Workspace};
use attlas_model::{Decoder, Model, Recipe, Rows};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Loss of a stage.
#[derive(Clone, Debug, Serialize)]
pub struct StageRecord {
    /// Its name.
    pub stage: &'static str,
    /// Numbers cached per token in a layer.
    pub cache_numbers: usize,
    /// Share of the keys' energy that is still rotated, mean over layers.
    pub kept_energy: f64,
    /// Relative error of the low rank in its own metric, mean over layers.
    pub rel_error: f64,
    /// Relative error of the latent of queries, mean over layers.
    pub query_error: f64,
    /// Comparison with the original model.
    #[serde(flatten)]
    pub quality: Quality,
}

/// A conversion with all its measurements.
#[derive(Clone, Debug, Serialize)]
pub struct Record {
    /// The program that wrote it.
    pub producer: String,
    /// The conversion's id.
    pub conversion: &'static str,
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
    /// Parameters as they were used.
    pub params: Options,
    /// True if the low rank had a calibration of its own.
    pub recalibrated: bool,
    /// Folds that were tried, with their perplexities.
    pub fold_search: Vec<(usize, f64)>,
    /// Ranks that were tried, each with its divergence on held-out text in nats per token.
    pub rank_search: Vec<(usize, f64)>,
    /// Tokens of the calibration.
    pub calibration_tokens: usize,
    /// The stages in their order.
    pub stages: Vec<StageRecord>,
    /// The written model, reopened, against the original.
    pub written: Quality,
    /// Element type of its new matrices.
    pub dtype: &'static str,
    /// Largest difference of its logits from those of the model in memory, which has the same rounded weights and no
    /// norms of latents.
    pub written_diff: f64,
    /// Largest change of a logit by this rounding of weights.
    pub rounding_diff: f64,
    /// Bytes of its tensors.
    pub written_bytes: usize,
    /// Figures of every layer in the last stage.
    pub layers: Vec<Figures>,
    /// Bytes cached per token in all layers, before.
    pub cache_bytes_before: usize,
    /// The same after, with the latent's constant coordinate.
    pub cache_bytes_after: usize,
    /// True if transformers needs custom code from the folder.
    #[serde(skip)]
    pub own_class: bool,
    /// Logits of the folder's model.
    #[serde(skip)]
    pub(super) proof: Proof,
}

impl Record {
    /// Returns a table of the stages with the loss of each.
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
        let before = [self.written.ppl_before, self.written.ppl_before_se].map(|x| format!("{x:.3}"));
        let none = || [const { String::new() }; 3];
        table.push([&["before".into()][..], &none(), &before].concat());
        let mut line = |name: &str, stage: [String; 3], q: &Quality| {
            let [ppl, se, nll, _, kl, _, q99, same_top, largest] = q.cells();
            table.push([&[name.into()][..], &stage, &[ppl, se, nll, kl, q99, same_top, largest]].concat());
        };
        for s in &self.stages {
            let error = if s.query_error > 0.0 { s.query_error } else { s.rel_error };
            let stage = [s.cache_numbers.to_string(), format!("{:.3}", s.kept_energy), number(error)];
            line(s.stage, stage, &s.quality);
        }
        line("as written", none(), &self.written);
        table
    }
}

pub(super) fn stage_record(
    stage: Stage,
    model: &Model,
    figures: &[Figures],
    quality: Quality,
) -> StageRecord {
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

/// Returns the parameters that are set.
pub(super) fn used(params: &Params) -> Options {
    let all = params.to_options();
    let set = all.iter().filter(|(_, value)| **value != Value::from("auto"));
    set.fold(Options::new(), |options, (name, value)| options.with(name, value.clone()))
}

/// Returns names and SHA-256 of a model's files: the file itself, or a folder's configuration and weights.
pub(super) fn model_files(path: &Path) -> Result<Vec<(String, String)>> {
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
    let hashed = |(name, file): (String, PathBuf)| {
        let source = attlas_model::tensor::Source::open(&file)?;
        Ok((name, crate::hash::sha256(source.bytes())))
    };
    files.into_iter().map(hashed).collect()
}

/// Numbers of positions and of tokens whose logits are recorded.
const PROOF: [usize; 2] = [48, 256];

/// Tolerance of the written model's logits against those of the model in memory with equally rounded weights, as a
/// share of the largest logit. Rounding in single precision, including the norms of latents that the format adds, stays
/// an order of magnitude below it.
const WRITTEN_TOLERANCE: f64 = 2e-3;

/// Some logits of a model.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Proof {
    /// The texts read.
    tokens: Vec<u32>,
    /// Tokens whose logits follow.
    ids: Vec<usize>,
    /// One row per position: little-endian single precision in hexadecimal digits.
    logits: Vec<String>,
    #[serde(skip)]
    values: Vec<f32>,
}

impl Proof {
    pub(super) fn new(model: &Arc<Model>, tokens: &[u32], threads: &Workspace) -> Result<Self> {
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

    /// Returns the largest difference of a logit.
    pub(super) fn gap(&self, other: &Self) -> f64 {
        // Keeps NaN, which `max` would drop.
        let larger = |most: f64, x: f64| if most >= x || most.is_nan() { most } else { x };
        let gap = |(a, b): (&f32, &f32)| f64::from(a - b).abs();
        self.values.iter().zip(&other.values).map(gap).fold(0.0, larger)
    }

    /// Returns the largest difference of a logit in the written model; an error if rounding cannot explain it.
    pub(super) fn agrees(&self, written: &Self) -> Result<f64> {
        let found = self.gap(written);
        let largest = self.values.iter().map(|x| f64::from(x.abs())).fold(1.0, f64::max);
        let allowed = WRITTEN_TOLERANCE * largest;
        if found <= allowed { Ok(found) } else { Err(Error::WrittenDiffers { found, allowed }) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
