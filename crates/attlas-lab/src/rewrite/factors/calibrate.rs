//! Second moments from a text, gathered before matrices are decomposed.
//!
//! With the second moments of a matrix's inputs, its decomposition is the best for that text. If one budget distributes
//! ranks over all matrices, their losses must be comparable: each matrix alone is truncated to the rank at which its
//! factors store as much as the matrix, and the price of a unit of error is the divergence of the predictions on the
//! first tokens of the text, divided by the relative squared error of the outputs.

use super::{Settings, paragraphs};
use crate::rewrite::Bench;
use crate::self_check::SelfCheck;
use crate::text::Text;
use crate::{Error, Result};
use attlas::Options;
use attlas::conversions::common::network::{Loss, Role, Slot};
use attlas_model::compress::{Calibration, Elements, Learnt, compress_seen};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A text to fit to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Calibrate {
    /// The text. If it is also the text of the measurement, the tokens after the measured and the held-out ones are
    /// used.
    pub text: PathBuf,
    /// Tokens of it, or paragraphs for an encoder.
    pub tokens: usize,
    /// Tokens of it for the sensitivities, if a budget for all matrices needs them.
    pub probe: usize,
}

/// The calibration text, and the loss it predicts.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Calibrated {
    /// The text.
    pub text: String,
    /// SHA-256 of its file.
    pub text_sha256: String,
    /// Tokens that were read.
    pub tokens: usize,
    /// Root mean square of the relative errors of outputs on it, by numbers of the matrices.
    pub seen_error: f64,
    /// By matrix, the cost of a unit of relative squared error of its outputs, in nats per token, if measured.
    pub sensitivity: Option<Vec<Sensitivity>>,
    /// Total loss that these predict for the kept ranks, in nats per token.
    pub predicted_kl: Option<f64>,
}

/// The cost of an error in the outputs of a matrix.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Sensitivity {
    /// The matrix.
    pub what: String,
    /// Nats per token for a unit of relative squared error.
    pub nats: f64,
}

impl Calibrated {
    /// Adds the final losses.
    pub(super) fn with_losses(mut self, losses: &[Loss]) -> Self {
        let seen = || losses.iter().filter_map(|l| Some((l, l.seen_error?.powi(2))));
        let total: usize = seen().map(|(l, _)| l.before).sum();
        let sum: f64 = seen().map(|(l, e)| e * l.before as f64).sum();
        self.seen_error = if total > 0 { (sum / total as f64).sqrt() } else { 0.0 };
        self.predicted_kl = self.sensitivity.as_ref().map(|list| {
            let nats = |l: &Loss| list.iter().find(|s| s.what == l.what).map_or(0.0, |s| s.nats);
            seen().map(|(l, e)| nats(l) * e).sum()
        });
        self
    }
}

/// Reads the calibration text of the settings, if there is one.
pub(super) fn learn(bench: &Bench<'_>, settings: &Settings) -> Result<(Option<Learnt>, Option<Calibrated>)> {
    let Some(calibrate) = &settings.calibrate else { return Ok((None, None)) };
    if !settings.conversion.reads_text {
        let expected = "a conversion that fits weights to inputs";
        return Err(Error::argument("--calibrate", expected, settings.conversion.id));
    }
    let used = settings.tokens.saturating_add(settings.accept.as_ref().map_or(0, |a| a.tokens));
    let skip = if same_file(&calibrate.text, &settings.text) { used } else { 0 };
    let (layers, roles) = (settings.layers.as_deref(), settings.roles.as_deref());
    let Bench { before: model, threads, stop, .. } = bench;
    let mut report = bench.report("calibrating");
    let encoder = model.config.architecture.is_encoder();
    let limit = (!encoder).then(|| skip.saturating_add(calibrate.tokens));
    let mut text = Text::read(&calibrate.text, model, limit)?;
    let record = |learnt: &Learnt, sensitivity| Calibrated {
        text: text.source.clone(),
        text_sha256: text.sha256.clone(),
        tokens: learnt.tokens,
        seen_error: 0.0,
        sensitivity,
        predicted_kl: None,
    };
    if encoder {
        let texts = paragraphs(&calibrate.text, model, skip, calibrate.tokens)?;
        let learnt =
            Learnt::read(model, Calibration::Texts(&texts), layers, roles, threads, &mut report, stop)?;
        let record = record(&learnt, None);
        return Ok((Some(learnt), Some(record)));
    }
    let tokens = text.tokens.split_off(skip.min(text.tokens.len()));
    if tokens.len() < 2 {
        let expected = format!("two tokens or more after the {skip} that are measured on and set aside");
        return Err(Error::argument("--calibrate", expected, tokens.len()));
    }
    let read = Calibration::Tokens { tokens: &tokens, window: settings.window };
    let mut learnt = Learnt::read(model, read, layers, roles, threads, &mut report, stop)?;
    let budget = |name: &str| settings.options.get(name).is_some();
    let sensitivity = if budget("keep") || budget("max_loss") {
        let probe = &tokens[..calibrate.probe.clamp(2, tokens.len())];
        let nats = sensitivities(bench, settings, &learnt, probe)?;
        let list =
            nats.iter().map(|(slot, nats)| Sensitivity { what: slot.to_string(), nats: *nats }).collect();
        learnt.sensitivity = nats.into_iter().collect();
        Some(list)
    } else {
        None
    };
    let record = record(&learnt, sensitivity);
    Ok((Some(learnt), Some(record)))
}

fn same_file(a: &Path, b: &Path) -> bool {
    a == b || matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
}

/// Measures for each matrix the cost of a unit of relative squared error of its outputs, in nats per token.
fn sensitivities(
    bench: &Bench<'_>,
    settings: &Settings,
    learnt: &Learnt,
    probe: &[u32],
) -> Result<Vec<(Slot, f64)>> {
    let Bench { before: model, threads, progress, stop, .. } = bench;
    let layers = settings.layers.clone().unwrap_or_else(|| (0..model.config.n_layers).collect());
    let roles = settings.roles.clone().unwrap_or_else(|| Role::ALL.to_vec());
    let mut check = SelfCheck::new(model, probe, settings.window, threads, &mut |_, _| {}, stop)?;
    let mut out = Vec::new();
    let all = layers.len() * roles.len();
    for (i, (&layer, &role)) in layers.iter().flat_map(|l| roles.iter().map(move |r| (l, r))).enumerate() {
        progress("probing", i, all);
        let slot = Slot { layer, role };
        let Some((rows, cols)) = attlas_model::compress::size(model, slot)? else { continue };
        let rank = (rows * cols / (rows + cols).max(1)).max(1);
        let options = Options::new().with("rank", rank);
        let (layers, roles) = ([layer], [role]);
        let one = compress_seen(
            model,
            settings.conversion,
            &options,
            Some(&layers),
            Some(&roles),
            Some(learnt),
            &|_, _| (),
        )?;
        let error = one.rewritten.losses.iter().filter_map(|l| l.seen_error).fold(0.0, f64::max).powi(2);
        let changed = Arc::new(one.model(Elements::F32)?);
        let kl = check.against(&changed, threads, &mut |_, _| {}, stop)?.kl_mean;
        // If the outputs have a lower rank, nothing is lost, and the price does not matter.
        let nats = if error > 1e-12 { (kl / error).max(0.0) } else { 0.0 };
        out.push((slot, nats));
    }
    Ok(out)
}
