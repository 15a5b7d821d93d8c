//! Configuration of a model: sizes, norms, rotary embedding, windows; from GGUF metadata or `config.json`.

mod families;
mod gguf;
mod json;
#[cfg(test)]
mod tests;

pub use families::{Activation, Architecture};
pub(crate) use families::{HeadNorm, MLP_BIAS_NAME, Norms, Windows};

use crate::error::{Error, Result};
use attlas::layer::LayerShape;
use attlas_num::rope::{Layout, Rope, Scaling};
use serde_json::Value as Json;

/// Choice and widths of experts.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertConfig {
    /// Experts of a layer.
    pub count: usize,
    /// Experts that each token passes through.
    pub per_token: usize,
    /// Width of each.
    pub width: usize,
    /// Width of the expert of every token; 0 if there is none.
    pub shared_width: usize,
    /// Function from the router's logits to scores.
    pub scores: Scores,
    /// True if the weights of the chosen experts are divided by their sum.
    pub normalised: bool,
    /// Factor of the weights.
    pub factor: f64,
    /// Number of groups of experts.
    pub groups: usize,
    /// Groups among which a token chooses its experts.
    pub groups_per_token: usize,
    /// For each layer, true if it has experts.
    pub layers: Vec<bool>,
}

/// Function from the logits of a router to the scores of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scores {
    /// Softmax: scores sum to one. A group's score is that of its best expert.
    Softmax,
    /// Sigmoid of each logit. A group's score is the sum of its two best experts'.
    Sigmoid,
}

/// Constant multipliers of some families.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Multipliers {
    /// Multiplier of embeddings.
    pub embedding: f32,
    /// Multiplier of a layer's contribution to the residual stream.
    pub residual: f32,
    /// Multiplier of queries: the scale of the softmax times the root of the head's width.
    pub query: f32,
    /// Multiplier of logits.
    pub logit: f32,
}

impl Default for Multipliers {
    fn default() -> Self {
        Self { embedding: 1.0, residual: 1.0, query: 1.0, logit: 1.0 }
    }
}

/// Sizes of latent attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LatentConfig {
    /// Width of the latent of keys and values.
    pub rank: usize,
    /// Width of the latent of queries, if there is one.
    pub rank_q: Option<usize>,
    /// Features of a head that are not rotated; the rotated ones follow them.
    pub nope: usize,
    /// Width of a head's values.
    pub v_dim: usize,
}

/// The description of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Family of the model.
    pub architecture: Architecture,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the feed-forward layer.
    pub intermediate: usize,
    /// Number of layers.
    pub n_layers: usize,
    /// Query heads.
    pub n_heads: usize,
    /// Key and value heads; divides `n_heads`.
    pub n_kv_heads: usize,
    /// Width of a head: of its queries and keys.
    pub head_dim: usize,
    /// Sizes of latent attention, if the family has it.
    pub latent: Option<LatentConfig>,
    /// Number of tokens known.
    pub vocab: usize,
    /// Longest context the model was trained for.
    pub max_positions: usize,
    /// Added under the root of every norm.
    pub norm_eps: f64,
    /// Rotary embedding of queries and keys; encoders have none.
    pub rope: Option<Rope>,
    /// Rotary embedding of layers with a window, if it differs.
    pub local_rope: Option<Rope>,
    /// Layers whose queries and keys are not rotated, in order.
    pub unrotated: Vec<usize>,
    /// Choice of experts, if there are any.
    pub experts: Option<ExpertConfig>,
    /// Constants of the family.
    pub multipliers: Multipliers,
    /// For each layer, the window in keys, including the query's own; `None` is all.
    pub windows: Vec<Option<usize>>,
    /// Gate of the feed-forward layers.
    pub activation: Activation,
    /// Soft cap of the logits of attention, if the family has one.
    pub attention_softcap: Option<f64>,
    /// Soft cap of the logits of tokens, if the family has one.
    pub logit_softcap: Option<f32>,
    /// True if the configuration ties the output projection to the embedding; a checkpoint without an output tensor is
    /// tied in any case.
    pub tied: bool,
    /// Token types of an encoder; 0 for decoders.
    pub token_types: usize,
    /// Tokens that end a text.
    pub eos: Vec<u32>,
}

/// Sizes above this are refused: products of any three still fit in 64 bits.
const MAX_SIZE: usize = 1 << 21;
/// Largest extension of the trained context; more is refused.
const MAX_EXTENSION: usize = 64;
/// Most layers; more are refused before anything is allocated for each of them.
const MAX_LAYERS: usize = 1 << 12;

impl ModelConfig {
    /// Returns the sizes of attention layers whose values are as wide as keys.
    pub fn layer_shape(&self) -> LayerShape {
        let (d_model, d) = (self.hidden, self.head_dim);
        LayerShape { d_model, n_heads: self.n_heads, n_kv_heads: self.n_kv_heads, d, d_v: d }
    }

    /// Returns the longest context that can be run. If frequencies follow the length (dynamic NTK, YaRN), it exceeds
    /// the trained one.
    pub fn longest_context(&self) -> usize {
        let extends = match self.rope.as_ref().map(|r| &r.scaling) {
            Some(Scaling::Yarn(_)) => true,
            // Latent attention rotates by its own table, which is made once.
            Some(Scaling::Dynamic { .. }) => self.latent.is_none(),
            _ => false,
        };
        if extends { self.max_positions.saturating_mul(MAX_EXTENSION) } else { self.max_positions }
    }

    /// Extends the context to `tokens`: the base of the rotation grows by $s^{d/(d-2)}$ for $s$ times the length, which
    /// keeps the total angle of the slowest pair and the speed of the fastest (NTK-aware scaling, Peng et al. 2024).
    /// Does nothing if the tokens already fit.
    ///
    /// # Errors
    /// If frequencies already follow another rule, or the context would be more than 64 times longer.
    pub fn stretch_context(&mut self, tokens: usize) -> Result<()> {
        let longest = self.longest_context();
        if tokens <= longest {
            return Ok(());
        }
        let most = self.max_positions.saturating_mul(MAX_EXTENSION);
        let plain = self.latent.is_none() && self.local_rope.is_none();
        match self.rope.as_mut().filter(|r| plain && r.dim > 2 && matches!(r.scaling, Scaling::None)) {
            Some(rope) if tokens <= most => {
                let (stretch, dim) = (tokens as f64 / self.max_positions as f64, rope.dim as f64);
                rope.base *= stretch.powf(dim / (dim - 2.0));
                self.max_positions = tokens;
                Ok(())
            }
            Some(_) => {
                Err(Error::invalid("the context", tokens, format!("at most {most}, 64 times the model's")))
            }
            None => Err(Error::invalid(
                "the context",
                tokens,
                format!("at most {longest}: only a plain rotation can be stretched past the model's context"),
            )),
        }
    }

    /// Returns true if layers are those of Llama: norms before attention and before one feed-forward layer, no
    /// multipliers, rotation in every layer.
    pub fn is_plain(&self) -> bool {
        let t = self.architecture.traits();
        let multiplied = self.multipliers != Multipliers::default();
        let capped = self.attention_softcap.is_some() || self.logit_softcap.is_some();
        let rotated = self.unrotated.is_empty() && self.local_rope.is_none();
        let usual = t.norms == Norms::Before && self.activation == Activation::Silu && !t.sinks;
        usual && rotated && !capped && !multiplied && self.experts.is_none()
    }

    /// Returns the query heads per key head.
    pub fn group(&self) -> usize {
        self.n_heads / self.n_kv_heads
    }

    /// Replaces the end tokens by those of a `generation_config.json`, if it names any.
    pub fn set_eos_from_json(&mut self, text: &[u8]) -> Result<()> {
        let ids = eos_ids(&serde_json::from_slice(text)?)?;
        if !ids.is_empty() {
            self.eos = ids;
        }
        Ok(())
    }

    fn validate(&self) -> Result<()> {
        let sizes = [
            ("the hidden size", self.hidden),
            ("the feed-forward size", self.intermediate),
            ("the number of layers", self.n_layers),
            ("the number of heads", self.n_heads),
            ("the number of key heads", self.n_kv_heads),
            ("the head dimension", self.head_dim),
            ("the vocabulary size", self.vocab),
            ("the context length", self.max_positions),
        ];
        for (what, size) in sizes {
            let limit = match what {
                "the context length" => 1 << 32,
                "the number of layers" => MAX_LAYERS,
                _ => MAX_SIZE,
            };
            if size == 0 || size > limit {
                return Err(Error::invalid(what, size, format!("1 to {limit}")));
            }
        }
        if let Some(l) = &self.latent {
            let sizes = [
                ("the rank of the latent", l.rank),
                ("the rank of the queries", l.rank_q.unwrap_or(1)),
                ("the width of values", l.v_dim),
            ];
            for (what, size) in sizes {
                if size == 0 || size > MAX_SIZE {
                    return Err(Error::invalid(what, size, format!("1 to {MAX_SIZE}")));
                }
            }
            if self.n_kv_heads != self.n_heads {
                let expected = format!("{}, as latent attention has no groups", self.n_heads);
                return Err(Error::invalid("the number of key heads", self.n_kv_heads, expected));
            }
        }
        if let Some(e) = &self.experts {
            let sizes = [
                ("the number of experts", e.count, 1..=1 << 16),
                ("the number of experts of a token", e.per_token, 1..=e.count),
                ("the width of an expert", e.width, 1..=MAX_SIZE),
                ("the width of the expert of every token", e.shared_width, 0..=MAX_SIZE),
                ("the number of groups of experts", e.groups, 1..=e.count),
                ("the number of groups of a token", e.groups_per_token, 1..=e.groups),
            ];
            for (what, found, expected) in sizes {
                if !expected.contains(&found) {
                    let expected = format!("{} to {}", expected.start(), expected.end());
                    return Err(Error::invalid(what, found, expected));
                }
            }
            let room = e.groups_per_token * (e.count / e.groups);
            if !e.count.is_multiple_of(e.groups) || e.per_token > room {
                let expected = format!("groups of equal size that hold {} experts", e.per_token);
                return Err(Error::invalid("the number of groups of experts", e.groups, expected));
            }
            if !(e.factor.is_finite() && e.factor > 0.0) {
                return Err(Error::invalid("the factor of experts", e.factor, "a positive number"));
            }
        }
        let m = &self.multipliers;
        for (what, x) in [
            ("the multiplier of embeddings", m.embedding),
            ("the multiplier of the residual stream", m.residual),
            ("the multiplier of attention", m.query),
            ("the multiplier of logits", m.logit),
        ] {
            if !(x.is_finite() && x > 0.0) {
                return Err(Error::invalid(what, x, "a positive number"));
            }
        }
        if !self.n_heads.is_multiple_of(self.n_kv_heads) {
            return Err(Error::invalid(
                "the number of key heads",
                self.n_kv_heads,
                format!("a divisor of {}", self.n_heads),
            ));
        }
        if !(self.norm_eps > 0.0 && self.norm_eps < 1.0) {
            return Err(Error::invalid("the norm epsilon", self.norm_eps, "between 0 and 1"));
        }
        let caps = [
            ("the cap of attention", self.attention_softcap),
            ("the cap of logits", self.logit_softcap.map(f64::from)),
        ];
        for (what, cap) in caps {
            if let Some(cap) = cap.filter(|c| !(c.is_finite() && *c > 0.0)) {
                return Err(Error::invalid(what, cap, "a positive number"));
            }
        }
        for rope in self.rope.iter().chain(&self.local_rope) {
            if rope.dim == 0 || rope.dim > self.head_dim || !rope.dim.is_multiple_of(2) {
                return Err(Error::invalid(
                    "the rotary dimension",
                    rope.dim,
                    format!("even, at most {}", self.head_dim),
                ));
            }
            if !(rope.base > 1.0 && rope.base.is_finite()) {
                return Err(Error::invalid("the rotary base", rope.base, "more than 1"));
            }
            validate_scaling(&rope.scaling, rope.dim)?;
        }
        Ok(())
    }
}

fn validate_scaling(scaling: &Scaling, dim: usize) -> Result<()> {
    let positive = |what: &str, x: f64| {
        if x > 0.0 && x.is_finite() {
            Ok(())
        } else {
            Err(Error::invalid(format!("rope scaling: {what}"), x, "a positive number"))
        }
    };
    match scaling {
        Scaling::None => Ok(()),
        Scaling::Linear { factor } => positive("factor", *factor),
        Scaling::Dynamic { factor, max_positions } => {
            positive("factor", *factor)?;
            positive("max_position_embeddings", *max_positions)
        }
        Scaling::Llama3 { factor, low_freq, high_freq, original } => {
            positive("factor", *factor)?;
            positive("low_freq_factor", *low_freq)?;
            positive("original_max_position_embeddings", *original)?;
            positive("high_freq_factor − low_freq_factor", high_freq - low_freq)
        }
        Scaling::Yarn(yarn) => {
            positive("factor", yarn.factor)?;
            positive("beta_slow", yarn.beta_slow)?;
            positive("beta_fast − beta_slow", yarn.beta_fast - yarn.beta_slow)?;
            positive("original_max_position_embeddings", yarn.original)?;
            positive("the magnitude", yarn.magnitude())
        }
        Scaling::LongRope(long) => {
            for (what, list) in [("short_factor", &long.short), ("long_factor", &long.long)] {
                if list.len() != dim / 2 {
                    let what = format!("rope scaling: the length of {what}");
                    return Err(Error::invalid(what, list.len(), (dim / 2).to_string()));
                }
                list.iter().try_for_each(|&d| positive(what, d))?;
            }
            positive("original_max_position_embeddings", long.original)?;
            positive("the magnitude", long.magnitude)
        }
        Scaling::Divisors(divisors) => divisors.iter().try_for_each(|&d| positive("a frequency divisor", d)),
    }
}

fn divide(hidden: usize, n_heads: usize) -> Result<usize> {
    if n_heads == 0 || !hidden.is_multiple_of(n_heads) {
        return Err(Error::invalid("the number of heads", n_heads, format!("a divisor of {hidden}")));
    }
    Ok(hidden / n_heads)
}

/// Returns every layer whose number, counted from one, is a multiple of `step`; none if `step` is 0.
fn unrotated(step: usize, n_layers: usize) -> Vec<usize> {
    (0..n_layers).filter(|l| step > 0 && (l + 1).is_multiple_of(step)).collect()
}

/// Reads one or several end tokens.
fn eos_ids(json: &Json) -> Result<Vec<u32>> {
    let Some(value) = json.get("eos_token_id").filter(|v| !v.is_null()) else { return Ok(Vec::new()) };
    let list = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
    list.iter()
        .map(|v| {
            v.as_u64()
                .and_then(|n| u32::try_from(n).ok())
                .ok_or_else(|| Error::invalid("eos_token_id", v, "a token id or a list of them"))
        })
        .collect()
}
