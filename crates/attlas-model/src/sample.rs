//! Sampling of the next token from logits.

use crate::error::{Error, Result};
use attlas_num::rng::{Rng, StreamKey};

/// Settings of sampling: first the temperature, then the `top_k` most likely tokens, then the smallest set of these
/// with probability `top_p`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divisor of the logits; 0 always takes the most likely token.
    pub temperature: f64,
    /// Most tokens to choose from; `None` is all.
    pub top_k: Option<usize>,
    /// Total probability of the tokens to choose from; `None` is all of it.
    pub top_p: Option<f64>,
    /// Seed of the random stream.
    pub seed: u64,
}

impl Sampling {
    /// Always the most likely token.
    pub const GREEDY: Self = Self { temperature: 0.0, top_k: None, top_p: None, seed: 0 };
}

/// Sampler that draws tokens one after another.
#[derive(Clone, Debug)]
pub struct Sampler {
    options: Sampling,
    rng: Rng,
}

impl Sampler {
    /// Creates a sampler at the start of its stream.
    pub fn new(options: Sampling) -> Result<Self> {
        if !(options.temperature >= 0.0 && options.temperature.is_finite()) {
            return Err(Error::invalid("temperature", options.temperature, "0 or a positive number"));
        }
        if options.top_k == Some(0) {
            return Err(Error::invalid("top_k", 0, "1 or more"));
        }
        if let Some(p) = options.top_p.filter(|p| !(*p > 0.0 && *p <= 1.0)) {
            return Err(Error::invalid("top_p", p, "more than 0, at most 1"));
        }
        Ok(Self { options, rng: StreamKey::new(options.seed).named("sampling").rng() })
    }

    /// Draws the next token. NaN logits are skipped; fails if no logit is finite.
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32> {
        let best = argmax(logits)
            .filter(|&i| logits[i as usize].is_finite())
            .ok_or_else(|| Error::invalid("the logits", "without a finite one", "a finite maximum"))?;
        if self.options.temperature == 0.0 {
            return Ok(best);
        }
        let max = f64::from(logits[best as usize]);
        let weight = |l: f32| ((f64::from(l) - max) / self.options.temperature).exp();
        let mut candidates: Vec<(u32, f64)> = (0u32..)
            .zip(logits)
            .filter(|(_, l)| !l.is_nan())
            .map(|(id, &l)| (id, weight(l)))
            .filter(|(_, w)| *w > 0.0)
            .collect();
        // Likeliest first, lower ids first among equals, which makes the draw deterministic.
        let order = |a: &(u32, f64), b: &(u32, f64)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
        if let Some(k) = self.options.top_k.filter(|&k| k < candidates.len()) {
            candidates.select_nth_unstable_by(k, order);
            candidates.truncate(k);
        }
        candidates.sort_unstable_by(order);
        let mut total: f64 = candidates.iter().map(|c| c.1).sum();
        if let Some(p) = self.options.top_p {
            let mut sum = 0.0;
            let enough = candidates.iter().position(|c| {
                sum += c.1;
                sum >= p * total
            });
            candidates.truncate(enough.map_or(candidates.len(), |i| i + 1));
            total = candidates.iter().map(|c| c.1).sum();
        }
        let mut left = self.rng.uniform() * total;
        let drawn = candidates.iter().find(|c| {
            left -= c.1;
            left < 0.0
        });
        Ok(drawn.map_or(best, |c| c.0))
    }
}

/// Returns the index of the largest number, the first among equals; `None` if there is none.
pub fn argmax(values: &[f32]) -> Option<u32> {
    let mut best: Option<(u32, f32)> = None;
    for (i, &v) in (0u32..).zip(values) {
        if !v.is_nan() && best.is_none_or(|(_, b)| v > b) {
            best = Some((i, v));
        }
    }
    best.map(|(i, _)| i)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(options: Sampling, logits: &[f32], n: usize) -> Vec<usize> {
        let mut sampler = Sampler::new(options).unwrap();
        let mut counts = vec![0; logits.len()];
        (0..n).for_each(|_| counts[sampler.sample(logits).unwrap() as usize] += 1);
        counts
    }

    const PLAIN: Sampling = Sampling { temperature: 1.0, top_k: None, top_p: None, seed: 1 };

    #[test]
    fn greedy_takes_the_first_of_the_largest() {
        let mut s = Sampler::new(Sampling::GREEDY).unwrap();
        assert_eq!(s.sample(&[1.0, f32::NAN, 3.0, 3.0, f32::NEG_INFINITY]).unwrap(), 2);
        assert!(s.sample(&[]).is_err());
        assert!(s.sample(&[f32::NAN, f32::NEG_INFINITY]).is_err());
    }

    #[test]
    fn frequencies_follow_the_softmax() {
        let logits = [0.0f32, 1.0, 2.0, f32::NEG_INFINITY];
        for temperature in [1.0, 0.5] {
            let n = 20_000;
            let counts = counts(Sampling { temperature, ..PLAIN }, &logits, n);
            let weights = logits.map(|l| (f64::from(l) / temperature).exp());
            let total: f64 = weights.iter().sum();
            for (c, w) in counts.iter().zip(weights) {
                let p = w / total;
                let deviation = (n as f64 * p * (1.0 - p)).sqrt();
                assert!((*c as f64 - n as f64 * p).abs() <= 5.0 * deviation, "{counts:?}");
            }
        }
    }

    #[test]
    fn top_k_and_top_p_leave_out_the_tail() {
        let logits = [0.0, 3.0, 2.0, 1.0, 2.0];
        let k2 = counts(Sampling { top_k: Some(2), ..PLAIN }, &logits, 2000);
        assert!(k2[1] > 0 && k2[2] > 0 && k2[0] + k2[3] + k2[4] == 0, "{k2:?}");
        // Probabilities 0.50, 0.18, 0.18, 0.07, 0.02 …: 0.6 needs two, 0.4 one.
        let p6 = counts(Sampling { top_p: Some(0.6), ..PLAIN }, &logits, 2000);
        assert!(p6[1] > 0 && p6[2] > 0 && p6[0] + p6[3] + p6[4] == 0, "{p6:?}");
        assert_eq!(counts(Sampling { top_p: Some(0.4), ..PLAIN }, &logits, 100)[1], 100);
    }

    #[test]
    fn the_seed_decides() {
        let logits: Vec<f32> = (0..50).map(|i| (i % 7) as f32 / 3.0).collect();
        let draw = |seed| {
            let mut s = Sampler::new(Sampling { seed, ..PLAIN }).unwrap();
            (0..20).map(|_| s.sample(&logits).unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(draw(3), draw(3));
        assert_ne!(draw(3), draw(4));
    }

    #[test]
    fn impossible_options_are_refused() {
        for bad in [
            Sampling { temperature: -1.0, ..PLAIN },
            Sampling { temperature: f64::NAN, ..PLAIN },
            Sampling { top_k: Some(0), ..PLAIN },
            Sampling { top_p: Some(0.0), ..PLAIN },
            Sampling { top_p: Some(1.5), ..PLAIN },
        ] {
            assert!(Sampler::new(bad).is_err(), "{bad:?}");
        }
    }
}
