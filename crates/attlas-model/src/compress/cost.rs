//! Costs of running a model.

use crate::linear::flops;
use crate::model::Model;
use crate::weights::Weights;
use attlas::Mask;

/// Counts the operations for a token that attends to `context` tokens, itself included; one multiply-add counts two.
/// Maps that begin with the same factor compute it once, as in a run.
pub fn flops_per_token(model: &Model, context: usize) -> u64 {
    let c = &model.config;
    let context = context.max(1);
    let scores = |seen: usize| 4 * (c.n_heads * c.head_dim * seen) as u64;
    let mut total = 0;
    match &model.weights {
        Weights::Decoder(w) => {
            for (i, l) in w.layers.iter().enumerate() {
                total += match l.whole() {
                    Some(a) => a.cost(Mask::Causal, context - 1, 1).map_or(0, |cost| cost.run_flops),
                    None => {
                        let seen = c.windows.get(i).copied().flatten().unwrap_or(context).min(context);
                        flops(&[&l.q, &l.k, &l.v]) + flops(&[&l.o]) + scores(seen)
                    }
                };
                total += flops(&[&l.gate, &l.up]) + flops(&[&l.down]);
            }
            total += flops(&[&w.output]);
        }
        Weights::Encoder(w) => {
            for l in &w.layers {
                total += match &l.attention {
                    Some(a) => {
                        let whole = a.layer.cost(Mask::None, 0, context);
                        whole.map_or(0, |cost| cost.run_flops / context as u64)
                    }
                    None => flops(&[&l.q, &l.k, &l.v]) + flops(&[&l.o]) + scores(context),
                };
                total += flops(&[&l.up]) + flops(&[&l.down]);
            }
        }
    }
    total
}
