//! The universal set of all keys: bounds on sensitivities, and the keys they keep.
//!
//! $\alpha_j = \sup_y |\langle k_j, y\rangle|^p / \sum_l |\langle k_l, y\rangle|^p$ is bounded by $\ell_p$ Lewis weights, for $p = 2$ by the
//! leverage score itself. Keys with a bound of at least $\varepsilon$ hold every weight of at least $\varepsilon$ of
//! any query; keeping the `keys` largest bounds is the same with $\varepsilon$ set by their number.

use super::{Lev, Params};
use crate::engine::top_indices;
use crate::method::{RunInfo, Status};
use crate::workspace::Context;
use crate::{MatRef, Real};
use attlas_num::randla::{LewisOptions, LewisWeights, lewis_weights};
use std::collections::BTreeMap;

impl Lev {
    /// Returns the kept keys in increasing order, bounds on sensitivities, and the figures a run reports.
    pub(super) fn select<T: Real>(
        &self,
        k: MatRef<'_, T>,
        cx: Context<'_>,
    ) -> (Vec<usize>, Vec<f64>, RunInfo) {
        let Params { degree, rank_tol, iters, tol, .. } = self.params;
        let n = k.rows();
        let options = LewisOptions { iters, tol, rank_tol };
        // If the factorisation fails on finite keys, use the trivial bound.
        let weights = lewis_weights(k, degree, options, cx.scratch).unwrap_or_else(|_| LewisWeights {
            weights: vec![1.0; n],
            certificate: 1.0,
            iterations: 0,
            converged: false,
            not_finite: Vec::new(),
        });
        let mut bounds = weights.sensitivity_bounds(degree);
        // Keys that are not finite are always kept, so that they stay visible.
        weights.not_finite.iter().for_each(|&j| bounds[j] = 1.0);
        let kept = match self.params.eps {
            Some(eps) => (0..n).filter(|&j| bounds[j] >= eps).collect(),
            None => top_indices(&bounds, self.params.keys),
        };
        let info = RunInfo {
            rank: Some(kept.len()),
            iterations: Some(weights.iterations),
            status: if weights.converged { Status::Complete } else { Status::StoppedEarly },
            figures: BTreeMap::from([
                ("sensitivity_sum", bounds.iter().sum()),
                ("keys_needed", bounds.iter().filter(|&&b| b >= self.params.target_error).count() as f64),
            ]),
            ..RunInfo::default()
        };
        (kept, bounds, info)
    }
}
