//! Acceptance of changes: one layer at a time, kept only if held-out text is predicted no worse.
//!
//! Layers are tried from the last to the first, each at every given rank and on top of the changes kept before. The
//! best trial of a layer is kept if the mean negative log-likelihood of the held-out tokens does not rise. The record
//! measures on other tokens, because a choice looks better on the text it was made on. TRAWL (luo2025) chooses layers
//! and rank in this way, except that its authors report the metric they choose by.

use super::Settings;
use crate::self_check::SelfCheck;
use crate::table::{Table, number};
use crate::{Error, Result, stats};
use attlas::conversions::Conversion;
use attlas::{Options, Workspace};
use attlas_model::Model;
use attlas_model::compress::{Compressed, Learnt, compress_seen};
use attlas_model::perplexity::Mean;
use serde::Serialize;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The rule of acceptance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Accept {
    /// Held-out tokens, after those of the measurement.
    pub tokens: usize,
    /// Ranks to try; only that of the options if empty.
    pub ranks: Vec<usize>,
}

/// A layer changed at a rank.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Trial {
    /// The layer.
    pub layer: usize,
    /// The largest rank of its factors.
    pub rank: usize,
    /// Relative error of its weights.
    pub rel_error: f64,
    /// Mean negative log-likelihood of the held-out tokens with the changes kept before, in nats.
    pub nll_before: f64,
    /// The same with this change, too.
    pub nll_after: f64,
    /// Standard error of the difference over paired tokens.
    pub change_se: f64,
    /// True if the change was kept.
    pub accepted: bool,
}

/// All trials, and the result of those kept.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Acceptance {
    /// Held-out tokens that were scored.
    pub scored: usize,
    /// Perplexity of the model on them.
    pub ppl_before: f64,
    /// Perplexity with all kept changes.
    pub ppl_after: f64,
    /// Trials in their order.
    pub trials: Vec<Trial>,
}

impl Acceptance {
    /// Returns the layers with a kept change, the last first.
    pub fn layers(&self) -> Vec<usize> {
        self.trials.iter().filter(|t| t.accepted).map(|t| t.layer).collect()
    }

    /// Returns a table with one line per trial.
    pub fn table(&self) -> Table {
        let mut table = Table::new(&["layer", "rank", "error", "nll before", "change", "+-", "<kept"]);
        for t in &self.trials {
            table.push(vec![
                t.layer.to_string(),
                t.rank.to_string(),
                number(t.rel_error),
                format!("{:.4}", t.nll_before),
                format!("{:+.4}", t.nll_after - t.nll_before),
                format!("{:.4}", t.change_se),
                if t.accepted { "yes" } else { "no" }.into(),
            ]);
        }
        table
    }
}

/// Sets the rank of a conversion: `rank`, or all of its ranks.
pub fn set_rank(conversion: &Conversion, options: &mut Options, rank: usize) {
    let ranks = conversion.params.iter().filter(|p| p.name == "rank" || p.name.starts_with("rank_"));
    ranks.for_each(|p| options.set(p.name, rank));
}

/// Tries the named layers, or all of them. `progress` receives the current trial, trials done and trials in all.
pub(super) fn choose<'a>(
    model: &'a Arc<Model>,
    settings: &Settings,
    accept: &Accept,
    set_aside: &[u32],
    learnt: Option<&Learnt>,
    threads: &Workspace,
    progress: &(dyn Fn(&str, usize, usize) + Sync),
    stop: &AtomicBool,
) -> Result<(Compressed<'a>, Acceptance)> {
    let (conversion, options) = (settings.conversion, &settings.options);
    let n = model.config.n_layers;
    let mut layers = settings.layers.clone().unwrap_or_else(|| (0..n).collect());
    layers.sort_unstable();
    layers.dedup();
    if let Some(unknown) = layers.last().filter(|l| **l >= n) {
        return Err(attlas::Error::param("layers", unknown, format!("0 to {}", n.saturating_sub(1))).into());
    }
    let variants: Vec<Options> = match &accept.ranks[..] {
        [] => vec![options.clone()],
        ranks => ranks
            .iter()
            .map(|&rank| {
                let mut variant = options.clone();
                set_rank(conversion, &mut variant, rank);
                variant
            })
            .collect(),
    };
    let score = |model: &Arc<Model>| -> Result<Vec<f64>> {
        Ok(SelfCheck::new(model, set_aside, settings.window, threads, &mut |_, _| {}, stop)?.into_nll())
    };
    let first = score(model)?;
    let (mut kept, mut nll) = (Compressed::unchanged(model, conversion, options)?, first.clone());
    let mut trials: Vec<Trial> = Vec::new();
    for &layer in layers.iter().rev() {
        let nll_before = stats::mean(&nll);
        let mut best: Option<(usize, Compressed<'a>, Vec<f64>)> = None;
        for variant in &variants {
            progress(&format!("trying layer {layer}"), trials.len(), layers.len() * variants.len());
            let (roles, only) = (settings.roles.as_deref(), [layer]);
            let one = compress_seen(model, conversion, variant, Some(&only), roles, learnt, &|_, _| ())?;
            if stop.load(Ordering::Relaxed) {
                return Err(attlas_model::Error::Interrupted.into());
            }
            let (rel_error, rank) = (one.rewritten.rel_error(), one.rewritten.losses.iter().map(|l| l.rank));
            let rank = rank.max().unwrap_or(0);
            let mut with = kept.clone();
            with.add(one.rewritten);
            let scores = score(&Arc::new(with.model(settings.elements_of(model))?))?;
            let mut change = Mean::default();
            scores.iter().zip(&nll).for_each(|(after, before)| change.push(after - before));
            let nll_after = stats::mean(&scores);
            // NaN is never better.
            let bar = best.as_ref().map_or(nll_before, |(_, _, nll)| stats::mean(nll));
            if nll_after < bar || (best.is_none() && nll_after <= bar) {
                best = Some((trials.len(), with, scores));
            }
            let change_se = change.standard_error();
            trials.push(Trial { layer, rank, rel_error, nll_before, nll_after, change_se, accepted: false });
        }
        if let Some((trial, with, scores)) = best {
            trials[trial].accepted = true;
            (kept, nll) = (with, scores);
        }
    }
    let ppl = |nll: &[f64]| stats::mean(nll).exp();
    let acceptance = Acceptance { scored: nll.len(), ppl_before: ppl(&first), ppl_after: ppl(&nll), trials };
    Ok((kept, acceptance))
}

/// Fails if the model predicts no text, or if no tokens were left to hold out.
pub(super) fn check(tokens: Option<&[u32]>) -> Result<()> {
    match tokens {
        None => Err(Error::argument("--accept", "a model that predicts text", "an encoder")),
        Some(t) if t.len() < 2 => {
            let expected = "two tokens or more after those that are measured on (--tokens)";
            Err(Error::argument("--accept", expected, t.len()))
        }
        Some(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;
    use attlas::{Schedule, registry};
    use attlas_model::Weights;
    use attlas_model::compress::Elements;
    use std::path::PathBuf;

    /// Four layers of random weights.
    fn model(name: &str) -> Arc<Model> {
        let value = |name: &str, i: usize| {
            let start: usize = name.bytes().map(usize::from).sum();
            ((i * 7919 + start * 31) % 101) as f32 / 50.0 - 1.0
        };
        testing::model(&format!("accept-{name}"), 4, 12, value)
    }

    fn settings(id: &str, options: Options) -> Settings {
        Settings {
            model: PathBuf::new(),
            conversion: registry::conversion(id).unwrap(),
            options,
            layers: None,
            roles: None,
            elements: Some(Elements::F32),
            out: PathBuf::new(),
            text: PathBuf::new(),
            tokens: 2,
            window: 32,
            repeats: 0,
            threads: 1,
            accept: None,
            calibrate: None,
        }
    }

    fn tokens() -> Vec<u32> {
        (0..192).map(|i| i * i * i % 11).collect()
    }

    fn one_thread() -> Workspace {
        Workspace::new(Schedule { threads: 1, ..Schedule::default() }).unwrap()
    }

    #[test]
    fn a_change_is_kept_exactly_where_the_text_set_aside_is_predicted_no_worse() {
        let (model, text, threads) = (model("kept"), tokens(), one_thread());
        let settings = settings("trawl", Options::new().with("iters", 30));
        let accept = Accept { tokens: 192, ranks: vec![2, 6] };
        let reported = std::sync::Mutex::new(Vec::new());
        let progress =
            |what: &str, done: usize, all: usize| reported.lock().unwrap().push((what.to_owned(), done, all));
        let go_on = AtomicBool::new(false);
        let (kept, chosen) =
            choose(&model, &settings, &accept, &text, None, &threads, &progress, &go_on).unwrap();

        assert_eq!(reported.lock().unwrap().len(), 8);
        assert_eq!(reported.lock().unwrap()[2], ("trying layer 2".to_owned(), 2, 8));
        let order: Vec<(usize, usize)> = chosen.trials.iter().map(|t| (t.layer, t.rank)).collect();
        assert_eq!(order, [(3, 2), (3, 6), (2, 2), (2, 6), (1, 2), (1, 6), (0, 2), (0, 6)]);
        assert!(chosen.trials.iter().all(|t| t.rel_error > 0.0 && t.change_se > 0.0));
        let layers = chosen.layers();
        assert!(!layers.is_empty() && layers.len() < 4, "some are kept and some are not: {chosen:?}");

        // By the definition, layer after layer.
        let mut now = chosen.trials[0].nll_before;
        for pair in chosen.trials.chunks(2) {
            assert!(pair.iter().all(|t| t.nll_before == now));
            let best = if pair[1].nll_after < pair[0].nll_after { &pair[1] } else { &pair[0] };
            assert_eq!(pair.iter().any(|t| t.accepted), best.nll_after <= now, "{pair:?}");
            assert_eq!(pair.iter().filter(|t| t.accepted).count(), usize::from(best.accepted));
            if best.accepted {
                now = best.nll_after;
            }
        }
        assert!((now.exp() / chosen.ppl_after - 1.0).abs() < 1e-12 && chosen.ppl_after < chosen.ppl_before);

        // The result is the model with exactly those layers changed.
        let after = Arc::new(kept.model(Elements::F32).unwrap());
        let again = SelfCheck::new(&after, &text, 32, &threads, &mut |_, _| {}, &go_on).unwrap().into_nll();
        assert_eq!((again.len(), stats::mean(&again)), (chosen.scored, now));
        let (Weights::Decoder(a), Weights::Decoder(b)) = (&model.weights, &after.weights) else { panic!() };
        for (l, (a, b)) in a.layers.iter().zip(&b.layers).enumerate() {
            let same =
                |x: &attlas_model::Linear, y: &attlas_model::Linear| x.weight().bytes() == y.weight().bytes();
            assert_eq!(!same(&a.up, &b.up), layers.contains(&l), "layer {l}");
            assert!(same(&a.q, &b.q), "attention was not asked for");
        }
        assert_eq!(chosen.table().text().lines().count(), 9);
    }

    #[test]
    fn what_changes_nothing_is_kept_everywhere_it_rounds_the_right_way() {
        let (model, text, threads) = (model("nothing"), tokens(), one_thread());
        let full = Options::new().with("rank", 12).with("format", "tucker");
        let settings = Settings { layers: Some(vec![2, 0]), ..settings("trawl", full) };
        let accept = Accept { tokens: 192, ranks: Vec::new() };
        let go_on = AtomicBool::new(false);
        let (_, chosen) =
            choose(&model, &settings, &accept, &text, None, &threads, &|_, _, _| (), &go_on).unwrap();
        assert_eq!(chosen.trials.iter().map(|t| t.layer).collect::<Vec<_>>(), [2, 0]);
        for t in &chosen.trials {
            // Logits of a few units, sums of at most twelve products in single precision.
            assert!((t.nll_after - t.nll_before).abs() < 1e-4, "{t:?}");
            assert_eq!(t.accepted, t.nll_after <= t.nll_before);
        }
    }

    #[test]
    fn what_cannot_be_tried_is_refused() {
        let (model, text, threads) = (model("refused"), tokens(), one_thread());
        let accept = Accept { tokens: 192, ranks: Vec::new() };
        let go_on = AtomicBool::new(false);
        let beyond = Settings { layers: Some(vec![4]), ..settings("trawl", Options::new()) };
        let error =
            choose(&model, &beyond, &accept, &text, None, &threads, &|_, _, _| (), &go_on).unwrap_err();
        assert!(error.to_string().contains("0 to 3"), "{error}");
        let stopped = AtomicBool::new(true);
        let all = settings("trawl", Options::new());
        let error =
            choose(&model, &all, &accept, &text, None, &threads, &|_, _, _| (), &stopped).unwrap_err();
        assert!(matches!(error, Error::Model(attlas_model::Error::Interrupted)));
        assert!(check(None).is_err() && check(Some(&[1])).is_err() && check(Some(&[1, 2])).is_ok());
    }
}
