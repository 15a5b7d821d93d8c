//! Perplexity of a model on a text, and divergence between two models.
//!
//! Perplexity is $\exp$ of the mean negative log-likelihood over the scored tokens. The [`Protocol`] determines which
//! tokens are scored and with how much context; numbers of different protocols are not comparable. Log probabilities
//! are differences of logits in double precision; their normaliser sums single-precision exponentials in double
//! precision.

use crate::error::{Error, Result};
use crate::ops;
use crate::sample::argmax;
use std::ops::Range;

/// Protocol of a measurement: the windows of a text and their scored tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// Windows that begin `stride` tokens apart; each token is scored once, with the context in its first window
    /// (Hugging Face). Positions restart in every window.
    Strided {
        /// Tokens of a window.
        window: usize,
        /// Tokens from the start of one window to that of the next.
        stride: usize,
    },
    /// Windows without overlap; the second half of each is scored (llama.cpp).
    SecondHalf {
        /// Tokens of a window.
        window: usize,
    },
    /// Windows without overlap; all but the first token of each are scored, tokens after the last whole window are
    /// dropped (GPTQ and others).
    Disjoint {
        /// Tokens of a window.
        window: usize,
    },
}

/// A part of a text that runs at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Window {
    /// Its tokens.
    pub tokens: Range<usize>,
    /// The scored tokens; token `t` is predicted at `t − 1`.
    pub targets: Range<usize>,
}

impl Protocol {
    /// Returns the windows of a text of `n` tokens.
    pub fn windows(self, n: usize) -> Result<Vec<Window>> {
        let (Self::Strided { window, .. } | Self::SecondHalf { window } | Self::Disjoint { window }) = self;
        if window < 2 {
            return Err(Error::invalid("the window", window, "2 or more tokens"));
        }
        if matches!(self, Self::SecondHalf { .. }) && window < 3 {
            return Err(Error::invalid(
                "the window",
                window,
                "3 or more tokens, so that its second half has one to score",
            ));
        }
        let least = match self {
            Self::Strided { .. } => 2,
            Self::SecondHalf { .. } => 2 * window,
            Self::Disjoint { .. } => window,
        };
        if n < least {
            return Err(Error::invalid("the text", format!("{n} tokens"), format!("at least {least}")));
        }
        match self {
            Self::Strided { window, stride } => {
                if stride == 0 || stride > window {
                    return Err(Error::invalid("the stride", stride, format!("1 to {window}")));
                }
                let mut windows = Vec::new();
                let mut scored = 0;
                for start in (0..n).step_by(stride) {
                    let end = (start + window).min(n);
                    windows.push(Window { tokens: start..end, targets: scored.max(start + 1)..end });
                    scored = end;
                    if end == n {
                        break;
                    }
                }
                windows.retain(|w| !w.targets.is_empty());
                Ok(windows)
            }
            Self::SecondHalf { window } => Ok((0..n / window)
                .map(|i| i * window..(i + 1) * window)
                .map(|tokens| Window { targets: tokens.start + window / 2 + 1..tokens.end, tokens })
                .collect()),
            Self::Disjoint { window } => Ok((0..n / window)
                .map(|i| i * window..(i + 1) * window)
                .map(|tokens| Window { targets: tokens.start + 1..tokens.end, tokens })
                .collect()),
        }
    }
}

/// Computes $\ln \sum_i e^{l_i}$; −∞ for no logits, NaN if one is NaN.
pub fn log_sum_exp(logits: &[f32]) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, |a, b| if b > a || b.is_nan() { b } else { a });
    if !max.is_finite() {
        return f64::from(max);
    }
    let mut total = 0.0;
    for block in logits.chunks(512) {
        let mut sums = [0.0f32; 16];
        let (whole, rest) = block.as_chunks::<16>();
        for part in whole {
            for i in 0..16 {
                sums[i] += ops::exp(part[i] - max);
            }
        }
        total += sums.iter().map(|&s| f64::from(s)).sum::<f64>();
        total += rest.iter().map(|&l| f64::from(ops::exp(l - max))).sum::<f64>();
    }
    f64::from(max) + total.ln()
}

/// Returns the negative log-likelihood of `target`. Panics if it is no index of `logits`.
pub fn nll(logits: &[f32], target: u32) -> f64 {
    log_sum_exp(logits) - f64::from(logits[target as usize])
}

/// Running mean and variance of numbers (Welford).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Mean {
    count: u64,
    mean: f64,
    squares: f64,
}

impl Mean {
    /// Adds one number.
    pub fn push(&mut self, x: f64) {
        self.count += 1;
        let before = x - self.mean;
        self.mean += before / self.count as f64;
        self.squares += before * (x - self.mean);
    }

    /// Adds all numbers of `other`.
    pub fn merge(&mut self, other: &Self) {
        if other.count == 0 {
            return;
        }
        let (a, b) = (self.count as f64, other.count as f64);
        let gap = other.mean - self.mean;
        self.mean += gap * b / (a + b);
        self.squares += other.squares + gap * gap * a * b / (a + b);
        self.count += other.count;
    }

    /// Number of tokens scored.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Their mean; 0 if there are none.
    pub fn mean(&self) -> f64 {
        self.mean
    }

    /// Square root of the mean of squares.
    pub fn root_mean_square(&self) -> f64 {
        if self.count == 0 { 0.0 } else { (self.squares / self.count as f64 + self.mean * self.mean).sqrt() }
    }

    /// Standard error of the mean; infinite for fewer than two.
    pub fn standard_error(&self) -> f64 {
        if self.count < 2 {
            return f64::INFINITY;
        }
        (self.squares / self.count as f64 / (self.count - 1) as f64).sqrt()
    }
}

/// Perplexity of the scored tokens so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Perplexity {
    nll: Mean,
}

impl Perplexity {
    /// Scores one token.
    pub fn push(&mut self, nll: f64) {
        self.nll.push(nll);
    }

    /// Adds the tokens scored by `other`.
    pub fn merge(&mut self, other: &Self) {
        self.nll.merge(&other.nll);
    }

    /// Tokens scored.
    pub fn count(&self) -> u64 {
        self.nll.count()
    }

    /// Negative log-likelihoods.
    pub fn nll(&self) -> &Mean {
        &self.nll
    }

    /// $e^{\mathrm{mean}}$.
    pub fn perplexity(&self) -> f64 {
        self.nll.mean().exp()
    }

    /// Standard error of the perplexity, to first order: that of the mean times the perplexity.
    pub fn standard_error(&self) -> f64 {
        self.perplexity() * self.nll.standard_error()
    }
}

/// Divergence of a model from a reference, token by token.
#[derive(Clone, Debug, Default)]
pub struct Divergence {
    kl: Mean,
    values: Vec<f32>,
    same_top: u64,
    delta_p: Mean,
}

/// Difference of two predictions of one token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Difference {
    /// Kullback–Leibler divergence of the other prediction from the reference, in nats.
    pub kl: f64,
    /// True if both have the same likeliest token.
    pub same_top: bool,
    /// Change of the probability of the right token.
    pub delta_p: f64,
}

impl Difference {
    /// Compares two predictions of the token `target`. Panics if the lengths differ.
    pub fn new(reference: &[f32], other: &[f32], target: u32) -> Self {
        assert_eq!(reference.len(), other.len());
        let (zp, zq) = (log_sum_exp(reference), log_sum_exp(other));
        let mut kl = 0.0;
        for (&a, &b) in reference.iter().zip(other) {
            let (log_p, log_q) = (f64::from(a) - zp, f64::from(b) - zq);
            // Terms below e⁻⁶⁰ vanish in double precision; this also covers −∞ against −∞.
            if log_p > -60.0 {
                kl += log_p.exp() * (log_p - log_q);
            }
        }
        let p = |logits: &[f32], z: f64| (f64::from(logits[target as usize]) - z).exp();
        Self {
            // Only rounding can make it negative.
            kl: if kl < 0.0 { 0.0 } else { kl },
            same_top: argmax(reference) == argmax(other),
            delta_p: p(other, zq) - p(reference, zp),
        }
    }
}

impl Divergence {
    /// Compares two predictions of the token `target`. Panics if the lengths differ.
    pub fn push(&mut self, reference: &[f32], other: &[f32], target: u32) {
        self.add(&Difference::new(reference, other, target));
    }

    /// Adds one compared token.
    pub fn add(&mut self, x: &Difference) {
        self.kl.push(x.kl);
        self.values.push(x.kl as f32);
        self.same_top += u64::from(x.same_top);
        self.delta_p.push(x.delta_p);
    }

    /// Adds the tokens compared by `other`.
    pub fn merge(&mut self, other: &Self) {
        self.kl.merge(&other.kl);
        self.values.extend_from_slice(&other.values);
        self.same_top += other.same_top;
        self.delta_p.merge(&other.delta_p);
    }

    /// Kullback–Leibler divergence of the other model from the reference, in nats.
    pub fn kl(&self) -> &Mean {
        &self.kl
    }

    /// Returns the `q` quantile of the divergences, interpolated; `None` if there are none.
    pub fn kl_quantile(&self, q: f64) -> Option<f64> {
        let mut sorted = self.values.clone();
        sorted.sort_unstable_by(f32::total_cmp);
        let at = q.clamp(0.0, 1.0) * sorted.len().checked_sub(1)? as f64;
        let (low, high) = (sorted[at.floor() as usize], sorted[at.ceil() as usize]);
        Some(f64::from(low) + (f64::from(high) - f64::from(low)) * at.fract())
    }

    /// Returns the share of tokens for which both have the same likeliest token; 0 if there are none.
    pub fn same_top(&self) -> f64 {
        self.same_top as f64 / (self.kl.count() as f64).max(1.0)
    }

    /// Change of the probability of the right token.
    pub fn delta_p(&self) -> &Mean {
        &self.delta_p
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn window(tokens: Range<usize>, targets: Range<usize>) -> Window {
        Window { tokens, targets }
    }

    #[test]
    fn strided_windows_score_every_token_but_the_first_once() {
        let windows = Protocol::Strided { window: 4, stride: 2 }.windows(9).unwrap();
        assert_eq!(windows, [window(0..4, 1..4), window(2..6, 4..6), window(4..8, 6..8), window(6..9, 8..9)]);
        let one = Protocol::Strided { window: 10, stride: 5 }.windows(7).unwrap();
        assert_eq!(one, [window(0..7, 1..7)]);
        for (n, w, s) in [(100, 16, 5), (64, 8, 1), (33, 7, 3)] {
            let windows = Protocol::Strided { window: w, stride: s }.windows(n).unwrap();
            let scored: Vec<usize> = windows.iter().flat_map(|w| w.targets.clone()).collect();
            assert_eq!(scored, (1..n).collect::<Vec<_>>());
        }
    }

    #[test]
    fn strided_windows_without_overlap_are_disjoint_ones_with_a_rest() {
        let strided = Protocol::Strided { window: 4, stride: 4 }.windows(10).unwrap();
        let disjoint = Protocol::Disjoint { window: 4 }.windows(10).unwrap();
        assert_eq!(disjoint, [window(0..4, 1..4), window(4..8, 5..8)]);
        assert_eq!(strided[..2], disjoint);
        assert_eq!(strided[2..], [window(8..10, 9..10)]);
        let nothing_left = Protocol::Strided { window: 4, stride: 4 }.windows(9).unwrap();
        assert_eq!(nothing_left, disjoint, "a last token alone has nothing to be predicted from");
    }

    #[test]
    fn second_half_windows_score_255_of_512() {
        let windows = Protocol::SecondHalf { window: 512 }.windows(1100).unwrap();
        assert_eq!(windows, [window(0..512, 257..512), window(512..1024, 769..1024)]);
        assert_eq!(windows[0].targets.len(), 255);
        assert!(Protocol::SecondHalf { window: 512 }.windows(1023).is_err());
    }

    #[test]
    fn protocols_that_make_no_sense_are_refused() {
        assert!(Protocol::Strided { window: 4, stride: 0 }.windows(9).is_err());
        assert!(Protocol::Strided { window: 4, stride: 5 }.windows(9).is_err());
        assert!(Protocol::Disjoint { window: 1 }.windows(9).is_err());
        assert!(Protocol::Disjoint { window: 10 }.windows(9).is_err());
        assert!(Protocol::Strided { window: 4, stride: 2 }.windows(1).is_err());
    }

    #[test]
    fn a_toy_model_of_three_tokens_has_its_hand_computed_perplexity() {
        // Probabilities 1/2, 1/4, 1/4 for every token, and a text of tokens 0, 1, 0, 2.
        let logits = [0.5f32.ln(), 0.25f32.ln(), 0.25f32.ln()];
        let mut ppl = Perplexity::default();
        [1, 0, 2].into_iter().for_each(|t| ppl.push(nll(&logits, t)));
        // (2 + 1 + 2) bits over three tokens.
        assert!((ppl.perplexity() - 2f64.powf(5.0 / 3.0)).abs() < 1e-6);
        let bits = [2.0, 1.0, 2.0].map(|b| b * std::f64::consts::LN_2);
        let mean = bits.iter().sum::<f64>() / 3.0;
        let variance = bits.iter().map(|b| (b - mean).powi(2)).sum::<f64>() / 3.0;
        assert!((ppl.standard_error() / (ppl.perplexity() * (variance / 2.0).sqrt()) - 1.0).abs() < 1e-6);
        assert_eq!(ppl.count(), 3);
    }

    #[test]
    fn the_normaliser_is_stable_and_accurate() {
        let logits: Vec<f32> = (0..5000).map(|i| ((i * 37) % 101) as f32 / 7.0 + 1000.0).collect();
        let exact = logits.iter().map(|&l| (f64::from(l) - 1000.0).exp()).sum::<f64>().ln() + 1000.0;
        // Each term and each of 32 additions per lane is rounded once in single precision.
        assert!((log_sum_exp(&logits) - exact).abs() < 40.0 * f64::from(f32::EPSILON));
        assert_eq!(log_sum_exp(&[]), f64::NEG_INFINITY);
        assert_eq!(log_sum_exp(&[f32::NEG_INFINITY; 3]), f64::NEG_INFINITY);
        assert!(log_sum_exp(&[1.0, f32::NAN, 2.0]).is_nan());
        assert_eq!(log_sum_exp(&[f32::NEG_INFINITY, 3.0]), 3.0);
    }

    #[test]
    fn means_merge_to_what_one_pass_gives() {
        let values: Vec<f64> = (0..100).map(|i| f64::from(i * i % 17) - 3.0).collect();
        let collect = |v: &[f64]| {
            let mut m = Mean::default();
            v.iter().for_each(|&x| m.push(x));
            m
        };
        let whole = collect(&values);
        let mut parts = collect(&values[..30]);
        parts.merge(&Mean::default());
        parts.merge(&collect(&values[30..]));
        assert_eq!(parts.count(), 100);
        assert!((parts.mean() - whole.mean()).abs() < 1e-12);
        assert!((parts.standard_error() - whole.standard_error()).abs() < 1e-12);
        let rms = (values.iter().map(|x| x * x).sum::<f64>() / 100.0).sqrt();
        assert!((whole.root_mean_square() - rms).abs() < 1e-12);
        assert_eq!(Mean::default().standard_error(), f64::INFINITY);
    }

    #[test]
    fn equal_predictions_do_not_diverge_and_others_do_by_the_formula() {
        let p = [2.0f32.ln(), 0.0, f32::NEG_INFINITY];
        let q = [0.0, 2.0f32.ln(), 0.0];
        let mut d = Divergence::default();
        d.push(&p, &p, 0);
        d.push(&p, &q, 0);
        // p = (2/3, 1/3, 0), q = (1/4, 1/2, 1/4).
        let kl = 2.0 / 3.0 * (8.0f64 / 3.0).ln() + 1.0 / 3.0 * (2.0f64 / 3.0).ln();
        assert!((d.kl().mean() - kl / 2.0).abs() < 1e-6);
        assert_eq!(d.same_top(), 0.5);
        assert!((d.delta_p().mean() - (0.25 - 2.0 / 3.0) / 2.0).abs() < 1e-6);
        assert_eq!(d.kl_quantile(0.0), Some(0.0));
        assert!((d.kl_quantile(0.5).unwrap() - kl / 2.0).abs() < 1e-6);
        assert!((d.kl_quantile(1.0).unwrap() - kl).abs() < 1e-6);
        let mut twice = d.clone();
        twice.merge(&d);
        assert_eq!((twice.kl().count(), twice.same_top()), (4, 0.5));
        assert_eq!(Divergence::default().kl_quantile(0.5), None);
        d.push(&q, &p, 0);
        assert_eq!(d.kl().mean(), f64::INFINITY, "no mass where the reference has some");
    }
}
