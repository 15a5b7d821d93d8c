//! The set of a growing prefix: every key whose weight may reach the threshold, for $p \le 2$.
//!
//! With $P = (K^\top K + \lambda I)^{-1}$ over the keys so far, the score of a kept key is $\tau_j = k_j^\top P k_j$. A new key $k$,
//! $u = Pk$, $g = 1 + k^\top u$, changes it by the rank-one formula of Sherman and Morrison: $P \leftarrow P - uu^\top/g$, hence
//! $\tau_j \leftarrow \tau_j - \langle k_j, u\rangle^2/g$, and $\tau = k^\top u / g$ for the key itself. Scores only
//! fall, so a key below the threshold can be dropped for good.
//!
//! The threshold is compared with $\tau_j^{p/2}$ for $p \le 2$, a bound of the weight: $\sum_l |x_l|^p \ge (\sum_l x_l^2)^{p/2}$, hence
//! $|x_j|^p / \sum_l |x_l|^p \le (x_j^2 / \sum_l x_l^2)^{p/2} \le \tau_j^{p/2}$. For $p > 2$ the bound is $t^{p/2-1} \tau_j^{p/2}$ after
//! $t$ keys, which may grow again.

use super::Params;
use super::normaliser::add_outer;
use crate::Real;
use attlas_num::Mat;
use attlas_num::kernels::dot;
use attlas_num::linalg::inverse;

/// Keys between recomputations of the streaming set.
const REFRESH: usize = 4096;

/// The set of a growing prefix.
#[derive(Clone, Debug)]
pub(super) struct StreamingSet {
    d: usize,
    keys: usize,
    eps: Option<f64>,
    degree: f64,
    /// $(K^\top K + \lambda I)^{-1}$; empty before the first key that is not zero.
    pub(super) inverse: Vec<f64>,
    pub(super) gram: Vec<f64>,
    lambda: f64,
    seen: usize,
    since_refresh: usize,
    pub(super) index: Vec<usize>,
    pub(super) rows: Vec<f64>,
    pub(super) scores: Vec<f64>,
}

/// The ridge, relative to the squared length of the first key.
pub(super) const RIDGE: f64 = 1e-6;

impl StreamingSet {
    pub(super) fn new(params: &Params, d: usize) -> Self {
        Self {
            d,
            keys: params.keys,
            eps: params.eps,
            degree: params.degree,
            inverse: Vec::new(),
            gram: vec![0.0; d * d],
            lambda: 0.0,
            seen: 0,
            since_refresh: 0,
            index: Vec::new(),
            rows: Vec::new(),
            scores: Vec::new(),
        }
    }

    /// Kept keys, in increasing order.
    pub(super) fn indices(&self) -> Vec<usize> {
        self.index.clone()
    }

    /// Adds the next key.
    pub(super) fn push<T: Real>(&mut self, key: &[T]) {
        let j = self.seen;
        self.seen += 1;
        let k: Vec<f64> = key.iter().map(|x| x.to_f64()).collect();
        let length: f64 = k.iter().map(|x| x * x).sum();
        if length == 0.0 {
            return;
        }
        if !length.is_finite() {
            // No bound exists for this key: keep it, and leave it out of the scores of others.
            self.keep(j, vec![0.0; self.d], f64::INFINITY);
            return;
        }
        if self.inverse.is_empty() {
            self.lambda = RIDGE * length;
            self.inverse = vec![0.0; self.d * self.d];
            (0..self.d).for_each(|i| self.inverse[i * self.d + i] = 1.0 / self.lambda);
        }
        add_outer(&mut self.gram, &k);
        let u: Vec<f64> = self.inverse.chunks_exact(self.d).map(|row| dot(row, &k)).collect();
        let g = 1.0 + dot(&k, &u);
        for (row, score) in self.rows.chunks_exact(self.d).zip(&mut self.scores) {
            let along = dot(row, &u);
            *score -= along * along / g;
        }
        for (row, a) in self.inverse.chunks_exact_mut(self.d).zip(&u) {
            row.iter_mut().zip(&u).for_each(|(p, b)| *p -= a * b / g);
        }
        let score = dot(&k, &u) / g;
        self.keep(j, k, score);
        self.since_refresh += 1;
        if self.since_refresh == REFRESH {
            self.refresh();
        }
        self.drop_light();
    }

    fn keep(&mut self, j: usize, row: Vec<f64>, score: f64) {
        self.index.push(j);
        self.rows.extend(row);
        self.scores.push(score);
    }

    /// Recomputes the inverse and all scores to remove the drift of the updates.
    pub(super) fn refresh(&mut self) {
        self.since_refresh = 0;
        let d = self.d;
        let ridged = Mat::from_fn(d, d, |i, j| self.gram[i * d + j] + if i == j { self.lambda } else { 0.0 });
        let Ok(inverse) = inverse(ridged.as_ref()) else { return };
        self.inverse = inverse.into_vec();
        for (row, score) in self.rows.chunks_exact(d).zip(&mut self.scores).filter(|(_, s)| s.is_finite()) {
            *score = self.inverse.chunks_exact(d).zip(row).map(|(p, a)| a * dot(p, row)).sum();
        }
    }

    /// Drops keys below the threshold, or the smallest scores beyond the number to keep.
    fn drop_light(&mut self) {
        let power = 0.5 * self.degree;
        let factor = if power > 1.0 { (self.seen as f64).powf(power - 1.0) } else { 1.0 };
        let mut t = 0;
        while t < self.index.len() {
            let light = match self.eps {
                Some(eps) => factor * self.scores[t].max(0.0).powf(power) < eps,
                None => self.index.len() > self.keys && t == self.lightest(),
            };
            if light {
                self.index.remove(t);
                self.scores.remove(t);
                self.rows.drain(t * self.d..(t + 1) * self.d);
            } else {
                t += 1;
            }
        }
    }

    /// Returns the place of the smallest score, ties to the later key.
    fn lightest(&self) -> usize {
        let mut best = 0;
        for (t, s) in self.scores.iter().enumerate() {
            if *s <= self.scores[best] {
                best = t;
            }
        }
        best
    }
}
