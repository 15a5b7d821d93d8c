//! Divergence of the model's predictions when one key head uses another method.
//!
//! The prompt is read once, with exact attention on rounded inputs. The last rows are then run again from the changed
//! layer on, with the rows of the changed heads in place of their exact ones: keys and values of earlier rows stay
//! exact, those of the last rows follow the change. The divergence is the mean over these rows of the Kullback–Leibler
//! divergence from the unchanged predictions, $\sum_t p_t (\ln p_t - \ln q_t)$; with the logits $l$ of $q$ it is
//! $\sum_t p_t \ln p_t - \sum_t p_t l_t + \ln \sum_t e^{l_t}$, and only $p$ and one number per row need to be kept.

use crate::Result;
use crate::text::Text;
use attlas::{Options, Workspace, registry};
use attlas_model::decoder::{LOGIT_ROWS, Observer};
use attlas_model::perplexity::log_sum_exp;
use attlas_model::{Decoder, Model, Recipe, Rows};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A model in which single key heads can be changed.
pub trait Replace {
    /// Returns the number of changed rows, the last ones of the text.
    fn rows(&self) -> usize;

    /// Returns the mean divergence, in nats, if query heads `heads` of `layer` output `out`, `[heads, rows, head_dim]`.
    fn replaced(&mut self, layer: usize, heads: Range<usize>, out: &[f32]) -> Result<f64>;
}

/// A model of the Rust runtime.
pub(super) struct Changed {
    decoder: Decoder,
    rows: usize,
    /// The residual stream of the last rows before each layer.
    residuals: Vec<Vec<f32>>,
    /// Unchanged predictions, `rows × vocab`.
    p: Vec<f32>,
    /// $\sum_t p_t \ln p_t$ of each row.
    negentropy: Vec<f64>,
    hidden: Vec<f32>,
    logits: Vec<f32>,
}

struct Watching<'a> {
    residuals: Vec<Vec<f32>>,
    stop: &'a AtomicBool,
}

impl Observer for Watching<'_> {
    fn interrupted(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    fn residual(&mut self, layer: usize, _: usize, x: &[f32]) {
        if let Some(kept) = self.residuals.get_mut(layer) {
            kept.extend_from_slice(x);
        }
    }
}

struct Change<'a> {
    layer: usize,
    heads: Range<usize>,
    out: &'a [f32],
    n_heads: usize,
    d: usize,
}

impl Observer for Change<'_> {
    fn change(&mut self, layer: usize, _: usize, o: &mut [f32]) {
        if layer != self.layer {
            return;
        }
        let rows = o.len() / (self.n_heads * self.d).max(1);
        for (row, o) in o.chunks_exact_mut(self.n_heads * self.d).enumerate() {
            for (i, h) in self.heads.clone().enumerate() {
                o[h * self.d..][..self.d].copy_from_slice(&self.out[(i * rows + row) * self.d..][..self.d]);
            }
        }
    }
}

impl Changed {
    /// Reads the text. An interruption is a model error.
    pub(super) fn new(
        model: &Arc<Model>,
        text: &Text,
        rows: usize,
        threads: &Workspace,
        stop: &AtomicBool,
    ) -> Result<Self> {
        let recipe = Recipe::uniform(registry::baseline().id, Options::new().with("precision", "bf16"));
        let mut decoder = Decoder::on(model.clone(), &recipe, threads)?;
        let n = text.tokens.len();
        let before = n - rows.min(n);
        let mut hidden = Vec::new();
        let mut watching = Watching { residuals: Vec::new(), stop };
        decoder.reserve(n);
        decoder.forward_observed(&text.tokens[..before], Rows::None, &mut hidden, &mut watching)?;
        watching.residuals = vec![Vec::new(); model.config.n_layers];
        decoder.forward_observed(&text.tokens[before..], Rows::All, &mut hidden, &mut watching)?;
        decoder.truncate(before);
        let vocab = model.config.vocab;
        let mut p = vec![0.0; (n - before) * vocab];
        let width = model.config.hidden;
        for (hidden, p) in hidden.chunks(LOGIT_ROWS * width).zip(p.chunks_mut(LOGIT_ROWS * vocab)) {
            decoder.logits_into(hidden, p);
        }
        let negentropy = p.chunks_mut(vocab.max(1)).map(normalise).collect();
        let residuals = watching.residuals;
        Ok(Self { decoder, rows: n - before, residuals, p, negentropy, hidden, logits: Vec::new() })
    }
}

/// Turns logits into probabilities that sum to one in double precision; returns the sum of $p \ln p$.
fn normalise(row: &mut [f32]) -> f64 {
    let z = log_sum_exp(row);
    let sum: f64 = row.iter().map(|l| (f64::from(*l) - z).exp()).sum();
    let z = z + sum.ln();
    let mut total = 0.0;
    for l in row {
        let log_p = f64::from(*l) - z;
        let p = log_p.exp();
        if p > 0.0 {
            total += p * log_p;
        }
        *l = p as f32;
    }
    total
}

fn kl(p: &[f32], negentropy: f64, logits: &[f32]) -> f64 {
    let (mut cross, mut mass) = (0.0f64, 0.0f64);
    for (p, l) in p.chunks(512).zip(logits.chunks(512)) {
        let sums = p
            .iter()
            .zip(l)
            .fold((0.0f64, 0.0f64), |(c, m), (p, l)| (c + f64::from(*p) * f64::from(*l), m + f64::from(*p)));
        cross += sums.0;
        mass += sums.1;
    }
    // Probabilities were rounded to single precision: their sum is only nearly one.
    (negentropy - cross / mass.max(f64::MIN_POSITIVE) + log_sum_exp(logits)).max(0.0)
}

impl Replace for Changed {
    fn rows(&self) -> usize {
        self.rows
    }

    fn replaced(&mut self, layer: usize, heads: Range<usize>, out: &[f32]) -> Result<f64> {
        let c = &self.decoder.model().config;
        let (vocab, width) = (c.vocab, c.hidden);
        let mut change = Change { layer, heads, out, n_heads: c.n_heads, d: c.head_dim };
        let mut hidden = std::mem::take(&mut self.hidden);
        self.decoder.forward_from(layer, &self.residuals[layer], &mut hidden, &mut change)?;
        let mut sum = 0.0;
        let rows = hidden.chunks(LOGIT_ROWS * width).zip(self.p.chunks(LOGIT_ROWS * vocab));
        for ((hidden, p), negentropy) in rows.zip(self.negentropy.chunks(LOGIT_ROWS)) {
            self.logits.resize(p.len(), 0.0);
            self.decoder.logits_into(hidden, &mut self.logits);
            let rows = p.chunks(vocab).zip(self.logits.chunks(vocab));
            sum += rows.zip(negentropy).map(|((p, l), e)| kl(p, *e, l)).sum::<f64>();
        }
        self.hidden = hidden;
        Ok(sum / self.rows.max(1) as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_divergence_is_that_of_the_definition() {
        let logits = |shift: f32| {
            (0..700).map(|i| ((i * 37) % 101) as f32 / 9.0 + shift * (i % 3) as f32).collect::<Vec<f32>>()
        };
        let (a, b) = (logits(0.0), logits(0.2));
        let mut p = a.clone();
        let negentropy = normalise(&mut p);
        // The normaliser adds in single precision, 512 terms at a time.
        let rounding = 40.0 * f64::from(f32::EPSILON);
        assert!(kl(&p, negentropy, &a) < rounding, "{}", kl(&p, negentropy, &a));
        let z = |l: &[f32]| l.iter().map(|x| f64::from(*x).exp()).sum::<f64>().ln();
        let (za, zb) = (z(&a), z(&b));
        let wanted: f64 = a
            .iter()
            .zip(&b)
            .map(|(x, y)| {
                let (lp, lq) = (f64::from(*x) - za, f64::from(*y) - zb);
                lp.exp() * (lp - lq)
            })
            .sum();
        let found = kl(&p, negentropy, &b);
        assert!(wanted > 1e-3 && (found - wanted).abs() < rounding, "{found} for {wanted}");
    }
}
