//! Drawing of pivots: one at a time, in blocks thinned by rejection, or in blocks.
//!
//! Pivots are drawn with probability proportional to $(D_j^2 p_j)^\gamma$, $p$ being the residual diagonal and $D$ the
//! scales. A block is drawn with the $p$ at its start. Rejection takes its proposals in order and keeps $j$ with
//! probability $(p'_j / p_j)^\gamma$, $p'$ being the residual after those kept before it: the kept pivots are then
//! distributed as if drawn one at a time. The decision needs only the small matrix $A_{I,I} - G_{:,I}^\top G_{:,I}$ of
//! the proposals.

use super::matrix::PsdMatrix;
use super::state::Factorisation;
use crate::linalg::Result;
use crate::rng::StreamKey;
use crate::{Mat, Real};

impl<T: Real> Factorisation<'_, T> {
    /// Returns the logarithm of the sampling weight of `j`, before the power.
    fn log_score(&self, j: usize) -> f64 {
        if self.residual[j] <= 0.0 {
            return f64::NEG_INFINITY;
        }
        libm::log(self.residual[j]) + self.log_weight.as_ref().map_or(0.0, |w| w[j])
    }

    fn argmax(&self, mut score: impl FnMut(usize) -> f64) -> Option<usize> {
        let mut best = (None, f64::NEG_INFINITY);
        for j in 0..self.n {
            let s = score(j);
            if s > best.1 {
                best = (Some(j), s);
            }
        }
        best.0
    }

    /// Returns running sums of the sampling weights.
    fn cumulative(&self, power: f64) -> Vec<f64> {
        let mut sum = 0.0;
        let mut add = |w: f64| {
            sum += w;
            sum
        };
        if power == 1.0 {
            let plain: Vec<f64> = match &self.weight {
                None => self.residual.iter().map(|&p| add(p)).collect(),
                Some(w) => self.residual.iter().zip(w).map(|(&p, &w)| add(p * w)).collect(),
            };
            // If products underflow, logarithms replace them.
            if self.weight.is_none() || plain.last().is_some_and(|&total| total > 1e-250) {
                return plain;
            }
            sum = 0.0;
        }
        let mut add = |w: f64| {
            sum += w;
            sum
        };
        let scores: Vec<f64> = (0..self.n).map(|j| self.log_score(j)).collect();
        let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max).max(-f64::MAX);
        scores.iter().map(|s| add(libm::exp(power * (s - top)))).collect()
    }

    pub(super) fn simple_step<M: PsdMatrix<T> + ?Sized>(
        &mut self,
        matrix: &M,
        power: f64,
        key: StreamKey,
    ) -> Result<()> {
        let mut rng = key.rng();
        let pivot = if power.is_infinite() {
            self.argmax(|j| self.log_score(j))
        } else {
            pick(&self.cumulative(power), rng.uniform())
        };
        match pivot {
            Some(s) => self.take_pivot(matrix, s),
            // All weights underflow: nothing significant is left.
            None => {
                self.residual.fill(0.0);
                Ok(())
            }
        }
    }

    pub(super) fn accelerated_round<M: PsdMatrix<T> + ?Sized>(
        &mut self,
        matrix: &M,
        power: f64,
        block: usize,
        wanted: usize,
        key: StreamKey,
    ) -> Result<()> {
        let mut rng = key.rng();
        let cumulative = self.cumulative(power);
        let index: Vec<usize> = (0..block).filter_map(|_| pick(&cumulative, rng.uniform())).collect();
        if index.is_empty() {
            self.residual.fill(0.0);
            return Ok(());
        }
        let mut h = self.residual_block(matrix, &index)?;
        let before: Vec<f64> = (0..index.len()).map(|j| h[(j, j)]).collect();
        let mut accepted: Vec<usize> = Vec::new();
        for j in 0..index.len() {
            // Every proposal uses one draw, so a rejection does not shift the stream.
            let draw = rng.uniform();
            let s = index[j];
            if before[j] <= self.noise[s] {
                // The recomputed residual is noise; setting it to 0 keeps rounds from repeating.
                self.residual[s] = 0.0;
                continue;
            }
            let taken = self.chosen[s] || accepted.iter().any(|&i| index[i] == s);
            let kept = libm::pow(draw, 1.0 / power) * before[j] < h[(j, j)];
            if accepted.len() == wanted || taken || !kept || h[(j, j)] <= 8.0 * T::ROUNDOFF * before[j] {
                continue;
            }
            eliminate(&mut h, j);
            accepted.push(j);
        }
        self.append_accepted(matrix, &index, &accepted, &h)
    }

    pub(super) fn block_round<M: PsdMatrix<T> + ?Sized>(
        &mut self,
        matrix: &M,
        power: f64,
        block: usize,
        wanted: usize,
        key: StreamKey,
    ) -> Result<()> {
        let mut rng = key.rng();
        let cumulative = self.cumulative(power);
        let mut index: Vec<usize> = Vec::new();
        for _ in 0..2 * block {
            if let Some(s) = pick(&cumulative, rng.uniform())
                && index.len() < block.min(wanted)
                && !index.contains(&s)
            {
                index.push(s);
            }
        }
        if index.is_empty() {
            self.residual.fill(0.0);
            return Ok(());
        }
        let mut h = self.residual_block(matrix, &index)?;
        let largest = self.residual.iter().copied().fold(0.0, f64::max);
        let floor = T::ROUNDOFF * index.len() as f64 * largest;
        let mut accepted = Vec::new();
        for j in 0..index.len() {
            if h[(j, j)] <= floor.max(self.noise[index[j]]) {
                self.residual[index[j]] = 0.0;
                continue;
            }
            eliminate(&mut h, j);
            accepted.push(j);
        }
        self.append_accepted(matrix, &index, &accepted, &h)
    }
}

/// Takes step `j` of an outer-product Cholesky: column `j` becomes that of the factor, the block after it the Schur
/// complement.
fn eliminate(h: &mut Mat<f64>, j: usize) {
    let b = h.rows();
    let root = h[(j, j)].sqrt();
    (j..b).for_each(|i| h[(i, j)] /= root);
    for i in j + 1..b {
        for l in j + 1..=i {
            let update = h[(i, j)] * h[(l, j)];
            h[(i, l)] -= update;
        }
    }
}

/// Returns the index whose slice of the running sums holds the share `u` of the total; never one of weight zero.
fn pick(cumulative: &[f64], u: f64) -> Option<usize> {
    let total = *cumulative.last()?;
    if !(total > 0.0 && total.is_finite()) {
        return None;
    }
    let target = u * total;
    let found = cumulative.partition_point(|&c| c <= target);
    // `u · total` may round up to the total.
    Some(if found < cumulative.len() { found } else { cumulative.partition_point(|&c| c < total) })
}
