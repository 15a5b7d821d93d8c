//! Mixtures of experts: every token passes through a few of the layer's feed-forward networks.
//!
//! A router gives every expert a score $s_e$ of the token $m$: a softmax over all experts, or a sigmoid of each. The
//! best $k$ are chosen, within the best groups if experts are grouped, by $s_e + b_e$ if the router has a bias. With
//! $w_e = s_e$ of the chosen ones, divided by their sum if the model normalises, the layer adds
//! $c \sum_e w_e\,W^{down}_e(\operatorname{silu}(W^{gate}_e m) \odot W^{up}_e m)$ to the output of the expert of every
//! token.
//!
//! References: Shazeer et al. 2017; Jiang et al. 2024 (Mixtral); DeepSeek-V2 and V3 technical reports.

use crate::config::{Activation, ExpertConfig, Scores};
use crate::linear::{Linear, apply_all_in};
use crate::ops;
use attlas_num::kernels::quant::Compute;
use attlas_num::{MatRef, Scratch};

/// The experts of a layer.
#[derive(Clone, Debug)]
pub struct Experts {
    /// Map from hidden states to the logits of experts.
    pub router: Linear,
    /// Bias of the scores for the choice of experts, not for their weights.
    pub bias: Option<Vec<f32>>,
    /// The experts in order.
    pub experts: Vec<Mlp>,
    /// Map from hidden states to one number, whose sigmoid weights the expert of every token.
    pub shared_gate: Option<Linear>,
}

/// A gated feed-forward layer.
#[derive(Clone, Debug)]
pub struct Mlp {
    /// Activation of the gate.
    pub gate: Linear,
    /// The gated map.
    pub up: Linear,
    /// Map back to the residual stream.
    pub down: Linear,
}

impl Experts {
    /// Adds the outputs of the chosen experts for the rows of `x` to those of `sum`, which must already contain the
    /// output of the expert of every token; that is weighted first if the layer has a gate for it.
    pub fn add_into(
        &self,
        config: &ExpertConfig,
        activation: Activation,
        x: MatRef<'_, f32>,
        sum: &mut [f32],
        compute: Compute,
        scratch: &Scratch,
    ) {
        let (n, d) = (x.rows(), x.cols());
        if let Some(gate) = &self.shared_gate {
            let mut open = vec![0.0; n];
            gate.apply_in(compute, x, &mut open, scratch);
            for (row, g) in sum.chunks_exact_mut(d).zip(open) {
                let g = 1.0 / (1.0 + (-g).exp());
                row.iter_mut().for_each(|y| *y *= g);
            }
        }
        let mut logits = vec![0.0; n * config.count];
        self.router.apply_in(compute, x, &mut logits, scratch);
        // Tokens of every expert, with their weights.
        let mut chosen: Vec<Vec<(usize, f32)>> = vec![Vec::new(); config.count];
        for (i, row) in logits.chunks_exact(config.count).enumerate() {
            for (expert, weight) in choose(config, row, self.bias.as_deref()) {
                chosen[expert].push((i, weight));
            }
        }
        let [mut rows, mut gate, mut up, mut out] = [const { Vec::new() }; 4];
        for (expert, tokens) in self.experts.iter().zip(&chosen).filter(|(_, t)| !t.is_empty()) {
            rows.clear();
            tokens.iter().for_each(|&(i, _)| rows.extend_from_slice(x.row(i)));
            let (m, width) = (tokens.len(), config.width);
            gate.resize(m * width, 0.0);
            up.resize(m * width, 0.0);
            out.resize(m * d, 0.0);
            let jobs = &mut [(&expert.gate, &mut gate[..m * width]), (&expert.up, &mut up[..m * width])];
            apply_all_in(compute, jobs, MatRef::new(&rows, m, d), scratch);
            ops::gate_in_place(activation, &mut gate[..m * width], &up[..m * width]);
            expert.down.apply_in(
                compute,
                MatRef::new(&gate[..m * width], m, width),
                &mut out[..m * d],
                scratch,
            );
            for (&(i, weight), row) in tokens.iter().zip(out.chunks_exact(d)) {
                sum[i * d..][..d].iter_mut().zip(row).for_each(|(y, o)| *y += weight * o);
            }
        }
    }
}

/// Chooses the experts of a token by its router's logits, and returns their weights. Of equal scores the first expert
/// wins; NaN loses.
fn choose(config: &ExpertConfig, logits: &[f32], bias: Option<&[f32]>) -> Vec<(usize, f32)> {
    let scores: Vec<f64> = match config.scores {
        Scores::Sigmoid => logits.iter().map(|&x| 1.0 / (1.0 + f64::from(-x).exp())).collect(),
        Scores::Softmax => {
            let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let powers: Vec<f64> = logits.iter().map(|&x| f64::from(x - most).exp()).collect();
            let total: f64 = powers.iter().sum();
            powers.into_iter().map(|p| p / total).collect()
        }
    };
    let mut wanted = scores.clone();
    if let Some(bias) = bias {
        wanted.iter_mut().zip(bias).for_each(|(s, b)| *s += f64::from(*b));
    }
    if config.groups > 1 {
        let size = config.count / config.groups;
        let counted = if config.scores == Scores::Sigmoid { 2 } else { 1 };
        let quality = |group: &[f64]| best(group, counted).iter().map(|&i| group[i]).sum::<f64>();
        let qualities: Vec<f64> = wanted.chunks_exact(size).map(quality).collect();
        let kept = best(&qualities, config.groups_per_token);
        for (g, group) in wanted.chunks_exact_mut(size).enumerate() {
            if !kept.contains(&g) {
                group.fill(f64::NEG_INFINITY);
            }
        }
    }
    let list = best(&wanted, config.per_token);
    let total: f64 =
        if config.normalised { list.iter().map(|&e| scores[e]).sum::<f64>() + 1e-20 } else { 1.0 };
    list.into_iter().map(|e| (e, (scores[e] / total * config.factor) as f32)).collect()
}

/// Returns the indices of the `n` largest numbers, largest first.
fn best(values: &[f64], n: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    let key = |i: usize| if values[i].is_nan() { f64::NEG_INFINITY } else { values[i] };
    order.sort_by(|&a, &b| key(b).total_cmp(&key(a)));
    order.truncate(n);
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(count: usize, per_token: usize) -> ExpertConfig {
        ExpertConfig {
            count,
            per_token,
            width: 1,
            shared_width: 0,
            scores: Scores::Softmax,
            normalised: true,
            factor: 1.0,
            groups: 1,
            groups_per_token: 1,
            layers: vec![true],
        }
    }

    #[test]
    fn the_best_experts_are_chosen_and_weighted() {
        let logits = [0.0, 2.0f32.ln(), 5.0f32.ln(), f32::NEG_INFINITY];
        let chosen = choose(&config(4, 2), &logits, None);
        assert_eq!((chosen[0].0, chosen[1].0), (2, 1));
        assert!((chosen[0].1 - 5.0 / 7.0).abs() < 1e-6 && (chosen[1].1 - 2.0 / 7.0).abs() < 1e-6);
        let plain = ExpertConfig { normalised: false, factor: 2.0, ..config(4, 1) };
        assert!((choose(&plain, &logits, None)[0].1 - 1.25).abs() < 1e-6);
        // A bias chooses, but does not weigh.
        let sigmoid = ExpertConfig { scores: Scores::Sigmoid, normalised: false, ..config(4, 1) };
        assert_eq!(choose(&sigmoid, &[0.0, 1.0, 0.0, 0.0], Some(&[9.0, 0.0, 0.0, 0.0])), [(0, 0.5)]);
    }

    #[test]
    fn groups_come_first() {
        let logits = [3.0, -9.0, 2.0, 2.5];
        let by_best = ExpertConfig { groups: 2, ..config(4, 1) };
        assert_eq!(choose(&by_best, &logits, None)[0].0, 0);
        let by_two = ExpertConfig { groups: 2, scores: Scores::Sigmoid, ..config(4, 1) };
        assert_eq!(
            choose(&by_two, &logits, None)[0].0,
            3,
            "two good ones are better than the best and the worst"
        );
    }
}
