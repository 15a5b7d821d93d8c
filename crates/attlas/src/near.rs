//! The near field of a problem: keys that every query sees exactly, whatever method does the rest.
//!
//! Heads of trained models put most of their mass on the first keys, on the latest ones and on a few heavy keys that
//! all queries of a neighbourhood share. A method that hashes, samples or averages keys treats these as noise. With a
//! near field the runner computes them with the exact kernel, hands the method the far keys alone and merges by
//! log-sum-exp (see `engine/near`). Every method that gives a log-sum-exp can have one; the default is none, which
//! leaves a method as published.
//!
//! In options, command lines and recipes the fields are named `near.sinks`, `near.window`, …. A plain `sinks` given to a method
//! without a parameter of that name means `near.sinks`.

use crate::method::{Claims, Law, Method};
use crate::params::ParamSpec;
use crate::{Error, Options, Problem, Result};

/// Prefix of a field's name in [`Options`].
pub const PREFIX: &str = "near.";

crate::choices! {
    /// Representation of the far keys that a method leaves out.
    #[derive(serde::Serialize, serde::Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum Rest {
        /// By means if the method claims to drop keys, not at all otherwise.
        Auto = "auto",
        /// Not at all.
        None = "none",
        /// Each run of 64 far keys by its mean key and mean value, with the logarithm of their number as bias.
        Mean = "mean",
    }
}

crate::params! {
    /// The near field: keys that every query sees exactly. None by default.
    #[derive(Copy, serde::Serialize, serde::Deserialize)]
    #[serde(default)]
    pub struct Near {
        /// Keys at the start that every query sees.
        sinks: usize = 0, in 0..=1 << 30;
        /// Most recent keys that a query sees, its own included; without a mask, keys nearer than this on both sides of
        /// a block of queries.
        window: usize = 0, in 0..=1 << 30;
        /// Far keys that a block of queries sees exactly: the keys to which the mean of recent queries gives the most
        /// weight.
        heavy: usize = 0, in 0..=1 << 20;
        /// Queries that share their heavy keys; auto is a 32nd of the keys, at least 64.
        block: Option<usize> = None, in 1..=1 << 30;
        /// Queries whose mean selects the heavy keys: the first of the block and those before it.
        recent: usize = 256, in 1..=1 << 20;
        /// Representation of the far keys that the method leaves out.
        rest: Rest = Rest::Auto;
        /// Compare the far part with exact attention in the first of every 64 rows. If means of the far keys, or no far
        /// part at all, were more accurate in the latest of these rows, they replace it. In decoding, only together
        /// with heavy keys, which keep all keys in the cache.
        guard: bool = true;
    }
}

impl Near {
    /// No near field.
    pub const NONE: Near =
        Near { sinks: 0, window: 0, heavy: 0, block: None, recent: 256, rest: Rest::Auto, guard: true };

    /// Makes a near field of sinks and a window.
    pub fn new(sinks: usize, window: usize) -> Self {
        Self { sinks, window, ..Self::NONE }
    }

    /// Returns true if it names no key.
    pub fn is_none(&self) -> bool {
        self.sinks == 0 && self.window == 0 && self.heavy == 0
    }

    /// Returns the number of queries that share their heavy keys, among `n_k` keys.
    pub fn block_of(&self, n_k: usize) -> usize {
        self.block.unwrap_or((n_k / 32).max(64))
    }

    /// Returns true if `name` names a field in [`Options`].
    pub fn names(name: &str) -> bool {
        name.strip_prefix(PREFIX).is_some_and(|field| Near::SPECS.iter().any(|s| s.name == field))
    }

    /// Returns the options without those of the near field; these are the ones that a method reads.
    pub fn strip(options: &Options) -> Options {
        let others = options.iter().filter(|(name, _)| !name.starts_with(PREFIX));
        others.fold(Options::new(), |rest, (name, value)| rest.with(name, value.clone()))
    }

    /// Splits options into the near field that they describe, or `base` if they name none of its fields, and the
    /// others. An option `sinks` that `params` does not have counts as `near.sinks`.
    pub fn split(base: Near, options: &Options, params: &[ParamSpec]) -> Result<(Near, Options)> {
        let (mut fields, mut rest) = (Options::new(), Options::new());
        for (name, value) in options.iter() {
            let alias = name == "sinks" && !params.iter().any(|p| p.name == name);
            match name.strip_prefix(PREFIX).or(alias.then_some(name)) {
                Some(field) => fields.set(field, value.clone()),
                None => rest.set(name, value.clone()),
            }
        }
        if fields.is_empty() {
            return Ok((base, rest));
        }
        let named = |e| match e {
            Error::UnknownParam { name, accepted } => Error::UnknownParam {
                name: format!("{PREFIX}{name}"),
                accepted: accepted.iter().map(|n| format!("{PREFIX}{n}")).collect(),
            },
            Error::InvalidParam { name, value, expected } => {
                Error::InvalidParam { name: format!("{PREFIX}{name}"), value, expected }
            }
            other => other,
        };
        Ok((Near::from_options(&fields).map_err(named)?, rest))
    }

    /// Returns every reason why a method with these claims cannot have this near field.
    pub fn reasons(&self, method: &Method, problem: &Problem) -> Vec<String> {
        let mut reasons = Vec::new();
        if self.is_none() {
            return reasons;
        }
        if !method.claims.lse {
            let why = if method.claims.softmax {
                "its rows are normalised inside a product of small matrices, so they come without the log-sum-exp by which \
                 near and far keys are merged"
            } else {
                "its weights are no exponentials of logits, so they have no normaliser in common with the exact near keys"
            };
            reasons.push(format!("{} takes no near field: {why}", method.id));
        }
        if self.window > 0 && problem.mask == crate::Mask::None && problem.n_q != problem.n_k {
            reasons.push(format!(
                "without a mask a window needs queries and keys of the same tokens, here {} queries meet {} keys: set \
                 near.window = 0",
                problem.n_q, problem.n_k
            ));
        }
        reasons
    }

    /// Returns the near field with `rest` decided from what a method claims.
    #[must_use]
    pub(crate) fn resolved(self, claims: &Claims) -> Self {
        match self.rest {
            Rest::Auto => Self { rest: if claims.drops { Rest::Mean } else { Rest::None }, ..self },
            _ => self,
        }
    }

    /// Returns true if a method that keeps `law` keeps it with this near field.
    pub(crate) fn keeps(&self, law: Law) -> bool {
        let chooses = self.heavy > 0 || self.guard;
        match law {
            _ if self.is_none() => true,
            Law::KeyOrder => false,
            Law::LinearInValues => !self.guard,
            Law::QueriesAlone | Law::DecodeIsPrefill => !chooses,
            Law::HeadsAlone => self.heavy == 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry;

    #[test]
    fn fields_are_read_from_options_in_one_place() {
        let hyper = registry::method("hyper").unwrap();
        let options = Options::new().with("near.sinks", 4).with("near.window", 128).with("block", 16);
        let (near, rest) = Near::split(Near::NONE, &options, hyper.params).unwrap();
        assert_eq!(near, Near::new(4, 128));
        assert_eq!(rest, Options::new().with("block", 16));
        assert_eq!(Near::split(near, &rest, hyper.params).unwrap().0, near);
        let plan = hyper.plan(&Problem::new(2, 200, 8).causal(), &options).unwrap();
        assert_eq!(plan.problem().near.window, 128);
    }

    #[test]
    fn a_name_that_does_not_exist_is_refused_with_those_that_do() {
        let message = |name: &str, value: &str| {
            let plan = registry::method("top_k").unwrap();
            let error = plan.plan(&Problem::new(1, 9, 4), &Options::new().with(name, value));
            error.unwrap_err().to_string()
        };
        let unknown = message("near.windows", "3");
        assert!(unknown.contains("near.windows") && unknown.contains("near.window"), "{unknown}");
        assert!(message("near.window", "-1").contains("near.window"));
    }

    #[test]
    fn plain_sinks_are_the_near_fields_where_a_method_has_none() {
        let options = Options::new().with("sinks", 3);
        let p = Problem::new(1, 50, 4).causal();
        assert_eq!(registry::method("top_k").unwrap().plan(&p, &options).unwrap().problem().near.sinks, 3);
        let own = registry::method("sink_window").unwrap().plan(&p, &options).unwrap();
        assert!(own.problem().near.is_none());
    }

    #[test]
    fn methods_without_a_log_sum_exp_say_why_they_take_none() {
        let p = Problem::new(1, 64, 8).causal();
        for method in registry::METHODS.iter().filter(|m| !m.claims.lse) {
            let error = method.plan(&p, &Options::new().with("near.window", 8)).unwrap_err().to_string();
            assert!(error.contains("takes no near field"), "{error}");
        }
    }
}
