//! Second moments from a text, gathered before matrices are decomposed.
//!
//! Second moments of the inputs of every matrix make its decomposition the best for that text. Where ranks are spread
//! over all matrices under one budget, losses of different matrices have to be comparable: each matrix is cut alone to the
//! rank at which its factors store as much as itself, and the divergence of the predictions from the model's own on the
//! first tokens of the text, divided by the relative squared error of the outputs, is what a unit of that error costs.

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
    /// The text. Where it is the one that is measured on, what follows the tokens that are measured and set aside is read.
    pub text: PathBuf,
    /// Tokens of it, or paragraphs for an encoder.
    pub tokens: usize,
    /// Tokens of it that sensitivities are measured on, where a budget for all matrices needs them.
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
    /// By matrix, the nats a token that a unit of relative squared error of its outputs costs, where that was measured.
    pub sensitivity: Option<Vec<Sensitivity>>,
    /// The sum of all losses that these predict for what was kept, in nats a token.
    pub predicted_kl: Option<f64>,
}

/// The cost of an error in the outputs of a matrix.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Sensitivity {
    /// The matrix.
    pub what: String,
    /// Nats a token for a unit of relative squared error.
    pub nats: f64,
}

impl Calibrated {
    /// With what was lost in the end.
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

/// Reads the calibration text of the settings, where there is one.
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

/// For each matrix the nats a token that a unit of relative squared error of its outputs costs.
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
        // Outputs of lower rank than that lose nothing: no error has a price there, and none is made.
        let nats = if error > 1e-12 { (kl / error).max(0.0) } else { 0.0 };
        out.push((slot, nats));
    }
    Ok(out)
}
