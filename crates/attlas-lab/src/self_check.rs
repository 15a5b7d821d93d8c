//! Comparison of a changed model with its original: both predict the same text, token by token.
//!
//! The reference runs once. Its last hidden states are kept, and its logits are recomputed from them for every
//! comparison: $n \times$ width numbers instead of $n \times$ vocabulary. Text is cut into windows without overlap; all
//! but the first token of each are scored, and an incomplete last window is dropped ([`Protocol::Disjoint`]).

use crate::table::{Table, number};
use crate::{Error, Result};
use attlas::Workspace;
use attlas_model::decoder::{LOGIT_ROWS, Observer};
use attlas_model::perplexity::{Divergence, Mean, Perplexity, Protocol, Window, nll};
use attlas_model::{Decoder, Model, Recipe, Rows};
use serde::Serialize;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Distance of a model from its reference.
#[derive(Clone, Debug, Serialize)]
pub struct Quality {
    /// Tokens that were scored.
    pub scored: u64,
    /// Tokens of a window.
    pub window: usize,
    /// Perplexity of the reference.
    pub ppl_before: f64,
    /// Its standard error, as if tokens were independent.
    pub ppl_before_se: f64,
    /// Perplexity of the other model.
    pub ppl_after: f64,
    /// Its standard error.
    pub ppl_after_se: f64,
    /// Mean increase of the negative log-likelihood, in nats: the logarithm of the ratio of perplexities.
    pub nll_increase: f64,
    /// Its standard error over paired tokens.
    pub nll_increase_se: f64,
    /// Mean Kullback–Leibler divergence from the reference's prediction, in nats.
    pub kl_mean: f64,
    /// Its standard error.
    pub kl_se: f64,
    /// Median of the divergence over tokens.
    pub kl_median: Option<f64>,
    /// Its 99 % quantile.
    pub kl_q99: Option<f64>,
    /// Share of tokens for which both have the same likeliest token.
    pub same_top: f64,
    /// Largest difference of two logits.
    pub max_logit_diff: f64,
}

impl Quality {
    /// Returns a row of [`table`] without its name.
    pub(crate) fn cells(&self) -> [String; 9] {
        let quantile = |q: Option<f64>| q.map_or("-".into(), number);
        [
            format!("{:.3}", self.ppl_after),
            format!("{:.3}", self.ppl_after_se),
            format!("{:+.4}", self.nll_increase),
            format!("{:.4}", self.nll_increase_se),
            number(self.kl_mean),
            quantile(self.kl_median),
            quantile(self.kl_q99),
            format!("{:.1}%", 100.0 * self.same_top),
            number(self.max_logit_diff),
        ]
    }
}

/// Returns a table of several models, with their common reference in the first row.
pub fn table(rows: &[(&str, &Quality)]) -> Table {
    let mut table = Table::new(&[
        "<model",
        "perplexity",
        "+-",
        "nll",
        "+-",
        "KL",
        "median",
        "99 %",
        "same top",
        "max logit",
    ]);
    if let Some((_, q)) = rows.first() {
        let own = ["before".to_owned(), format!("{:.3}", q.ppl_before), format!("{:.3}", q.ppl_before_se)];
        table.push(own.to_vec());
    }
    rows.iter().for_each(|(name, q)| table.push([vec![(*name).into()], q.cells().to_vec()].concat()));
    table
}

/// A reference model that has read a text.
#[derive(Debug)]
pub struct SelfCheck<'a> {
    reader: Reader,
    tokens: &'a [u32],
    window: usize,
    windows: Vec<Window>,
    /// Last hidden states of all windows, one after another.
    hidden: Vec<Vec<f32>>,
    /// Negative log-likelihood of every scored token.
    nll: Vec<f64>,
}

impl<'a> SelfCheck<'a> {
    /// Runs `before` over `tokens` in windows of `window`, or in a single window if there are fewer. `progress`
    /// receives tokens done and tokens in all.
    pub fn new(
        before: &Arc<Model>,
        tokens: &'a [u32],
        window: usize,
        threads: &Workspace,
        progress: &mut dyn FnMut(usize, usize),
        stop: &AtomicBool,
    ) -> Result<Self> {
        let window = window.min(tokens.len()).min(before.config.max_positions);
        let windows = Protocol::Disjoint { window }.windows(tokens.len())?;
        let mut reader = Reader::new(before, threads)?;
        let (mut hidden, mut nll) = (Vec::new(), Vec::new());
        for (i, w) in windows.iter().enumerate() {
            let mut states = Vec::new();
            reader.read(&tokens[w.tokens.clone()], &mut states, stop)?;
            for (part, targets) in tokens[w.targets.clone()].chunks(LOGIT_ROWS).enumerate() {
                let logits = reader.logits(&states, part * LOGIT_ROWS, targets.len());
                nll.extend(scores(logits, targets));
            }
            hidden.push(states);
            progress((i + 1) * window, windows.len() * window);
        }
        Ok(Self { reader, tokens, window, windows, hidden, nll })
    }

    /// Returns its perplexity and the standard error.
    pub fn perplexity(&self) -> (f64, f64) {
        let mut sum = Perplexity::default();
        self.nll.iter().for_each(|&x| sum.push(x));
        (sum.perplexity(), sum.standard_error())
    }

    /// Returns the negative log-likelihood of every scored token, in order.
    pub fn into_nll(self) -> Vec<f64> {
        self.nll
    }

    /// Compares with another model of the same vocabulary.
    pub fn against(
        &mut self,
        after: &Arc<Model>,
        threads: &Workspace,
        progress: &mut dyn FnMut(usize, usize),
        stop: &AtomicBool,
    ) -> Result<Quality> {
        let (ours, theirs) = (self.reader.decoder.model().config.vocab, after.config.vocab);
        if ours != theirs {
            return Err(Error::argument(
                "the changed model",
                format!("{ours} tokens in its vocabulary"),
                theirs,
            ));
        }
        let mut other = Reader::new(after, threads)?;
        let (mut sum, mut increase, mut divergence) =
            (Perplexity::default(), Mean::default(), Divergence::default());
        let mut largest = 0.0f64;
        let mut known = self.nll.iter();
        let mut states = Vec::new();
        for (i, (w, hidden)) in self.windows.iter().zip(&self.hidden).enumerate() {
            other.read(&self.tokens[w.tokens.clone()], &mut states, stop)?;
            for (part, targets) in self.tokens[w.targets.clone()].chunks(LOGIT_ROWS).enumerate() {
                let a = self.reader.logits(hidden, part * LOGIT_ROWS, targets.len());
                let b = other.logits(&states, part * LOGIT_ROWS, targets.len());
                for (new, old) in scores(b, targets).zip(&mut known) {
                    sum.push(new);
                    increase.push(new - old);
                }
                let rows = a.chunks(ours).zip(b.chunks(ours)).zip(targets);
                rows.for_each(|((p, q), &t)| divergence.push(p, q, t));
                // A NaN logit must not look like no difference.
                let gap = |x: f64| if x.is_nan() { f64::INFINITY } else { x };
                largest = a.iter().zip(b).map(|(x, y)| gap(f64::from(x - y).abs())).fold(largest, f64::max);
            }
            progress((i + 1) * self.window, self.windows.len() * self.window);
        }
        let (ppl_before, ppl_before_se) = self.perplexity();
        Ok(Quality {
            scored: sum.count(),
            window: self.window,
            ppl_before,
            ppl_before_se,
            ppl_after: sum.perplexity(),
            ppl_after_se: sum.standard_error(),
            nll_increase: increase.mean(),
            nll_increase_se: increase.standard_error(),
            kl_mean: divergence.kl().mean(),
            kl_se: divergence.kl().standard_error(),
            kl_median: divergence.kl_quantile(0.5),
            kl_q99: divergence.kl_quantile(0.99),
            same_top: divergence.same_top(),
            max_logit_diff: largest,
        })
    }
}

fn scores<'l>(logits: &'l [f32], targets: &'l [u32]) -> impl Iterator<Item = f64> + 'l {
    let vocab = logits.len() / targets.len().max(1);
    logits.chunks(vocab.max(1)).zip(targets).map(|(logits, &t)| nll(logits, t))
}

/// A model with room for its logits.
#[derive(Debug)]
struct Reader {
    decoder: Decoder,
    logits: Vec<f32>,
}

struct Stopper<'a>(&'a AtomicBool);

impl Observer for Stopper<'_> {
    fn interrupted(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl Reader {
    fn new(model: &Arc<Model>, threads: &Workspace) -> Result<Self> {
        Ok(Self { decoder: Decoder::on(model.clone(), &Recipe::default(), threads)?, logits: Vec::new() })
    }

    fn read(&mut self, tokens: &[u32], states: &mut Vec<f32>, stop: &AtomicBool) -> Result<()> {
        self.decoder.reset();
        Ok(self.decoder.forward_observed(tokens, Rows::All, states, &mut Stopper(stop))?)
    }

    /// Returns the logits of `rows` rows of `states`, starting at row `first`.
    fn logits(&mut self, states: &[f32], first: usize, rows: usize) -> &[f32] {
        let c = &self.decoder.model().config;
        let (d, len) = (c.hidden, rows * c.vocab);
        self.logits.resize(len, 0.0);
        self.decoder.logits_into(&states[first * d..][..rows * d], &mut self.logits);
        &self.logits
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;
    use attlas::Schedule;

    /// A small model; `size` scales its values.
    fn model(name: &str, size: f32) -> Arc<Model> {
        let value = |part: &str, i: usize| {
            let size = if part.ends_with("v_proj.weight") { size } else { 1.0 };
            size * (((i * 37 + part.len() * 11) % 23) as f32 / 11.0 - 1.0)
        };
        testing::model(&format!("self-check-{name}"), 1, 8, value)
    }

    /// Compares two models once.
    fn quality(
        before: &Arc<Model>,
        after: &Arc<Model>,
        tokens: &[u32],
        window: usize,
        threads: &Workspace,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Quality> {
        let go_on = AtomicBool::new(false);
        let mut first = |done: usize, all: usize| progress(done, 2 * all);
        let mut check = SelfCheck::new(before, tokens, window, threads, &mut first, &go_on)?;
        check.against(after, threads, &mut |done, all| progress(all + done, 2 * all), &go_on)
    }

    #[test]
    fn a_model_equals_itself_and_differs_from_others_by_the_definition() {
        let (before, after) = (model("before", 1.0), model("after", 1.2));
        let threads = Workspace::new(Schedule { threads: 1, ..Schedule::default() }).unwrap();
        let tokens: Vec<u32> = (0..70).map(|i| i * i % 11).collect();
        let mut reported = Vec::new();
        let same =
            quality(&before, &before, &tokens, 32, &threads, &mut |a, b| reported.push((a, b))).unwrap();
        assert_eq!(reported, [(32, 128), (64, 128), (96, 128), (128, 128)]);
        assert_eq!((same.scored, same.window, same.max_logit_diff), (62, 32, 0.0));
        assert_eq!((same.kl_mean, same.nll_increase, same.same_top), (0.0, 0.0, 1.0));
        assert_eq!(same.ppl_before, same.ppl_after);

        let other = quality(&before, &after, &tokens, 32, &threads, &mut |_, _| {}).unwrap();
        let logits = |m: &Arc<Model>, part: &[u32]| {
            let mut decoder = Decoder::on(m.clone(), &Recipe::default(), &threads).unwrap();
            let mut states = Vec::new();
            decoder.forward(part, Rows::All, &mut states).unwrap();
            let mut out = vec![0.0; 32 * 11];
            decoder.logits_into(&states, &mut out);
            // The last row predicts a token beyond the text.
            out.truncate(31 * 11);
            out
        };
        let (mut gap, mut nats) = (0.0f64, [0.0; 2]);
        for part in tokens.chunks_exact(32) {
            let both = [&before, &after].map(|m| logits(m, part));
            gap = both[0].iter().zip(&both[1]).map(|(x, y)| f64::from((x - y).abs())).fold(gap, f64::max);
            for (sum, logits) in nats.iter_mut().zip(&both) {
                *sum += scores(logits, &part[1..]).sum::<f64>();
            }
        }
        assert_eq!(other.max_logit_diff, gap);
        assert!(gap > 1e-3 && other.kl_mean > 0.0 && other.kl_q99 >= other.kl_median);
        // Sums of the same 62 numbers in another order.
        let close = |a: f64, b: f64| assert!((a / b - 1.0).abs() < 1e-12, "{a} {b}");
        close(other.ppl_before, (nats[0] / 62.0).exp());
        close(other.ppl_after, (nats[1] / 62.0).exp());
        close(other.nll_increase.exp(), other.ppl_after / other.ppl_before);
        assert!(table(&[("other", &other)]).text().lines().count() == 3);
    }

    #[test]
    fn too_little_text_and_a_stop_are_errors() {
        let m = model("short", 1.0);
        let threads = Workspace::new(Schedule { threads: 1, ..Schedule::default() }).unwrap();
        assert!(quality(&m, &m, &[1], 32, &threads, &mut |_, _| {}).is_err());
        let stopped = AtomicBool::new(true);
        let error = SelfCheck::new(&m, &[1, 2, 3], 32, &threads, &mut |_, _| {}, &stopped).unwrap_err();
        assert!(matches!(error, Error::Model(attlas_model::Error::Interrupted)));
    }
}
