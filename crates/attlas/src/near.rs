//! The near field of a problem: keys that every query sees exactly, whatever method does the rest.
//!
//! Heads of trained models put most of their mass on the first keys, on the latest ones and on a few heavy keys that
//! all queries of a neighbourhood share. A method that hashes, samples or averages keys treats these as noise. With a
//! near field the runner computes them with the exact kernel, hands the method the far keys alone and merges by
//! log-sum-exp (see `engine/near`). Every method that gives a log-sum-exp can have one; the default is none, which
//! leaves a method as published.
//!
//! In options, command lines and recipes the fields are named `near.sinks`, `near.window`, …. A plain `sinks` or `window`
//! given to a method without a parameter of that name means the field, too.

use crate::method::{Claims, Law, Method};
use crate::params::ParamSpec;
use crate::{Error, Options, Problem, Result};

/// Prefix of a field's name in [`Options`].
pub const PREFIX: &str = "near.";

/// Fields that an option also sets by its plain name, if the method has no parameter of that name.
const PLAIN: [&str; 2] = ["sinks", "window"];

/// Returns the field that an option of a method with these parameters sets, if any; it need not exist.
fn field<'n>(name: &'n str, params: &[ParamSpec]) -> Option<&'n str> {
    let plain = PLAIN.contains(&name) && !params.iter().any(|p| p.name == name);
    name.strip_prefix(PREFIX).or(plain.then_some(name))
}

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

    /// Returns true if `name` names a field in the [`Options`] of a method with these parameters.
    pub fn names(name: &str, params: &[ParamSpec]) -> bool {
        field(name, params).is_some_and(|field| Near::SPECS.iter().any(|s| s.name == field))
    }

    /// Splits options into the near field that they describe, or `base` if they name none of its fields, and the
    /// others. Options `sinks` and `window` that `params` does not have count as `near.sinks` and `near.window`; both
    /// spellings with different values are an error.
    pub fn split(base: Near, options: &Options, params: &[ParamSpec]) -> Result<(Near, Options)> {
        let (mut fields, mut rest) = (Options::new(), Options::new());
        for (name, value) in options.iter() {
            match field(name, params) {
                Some(field) => match fields.get(field).filter(|other| other.to_string() != value.to_string())
                {
                    Some(other) => {
                        let expected = format!("{other} as in {PREFIX}{field}, another name of it");
                        return Err(Error::param(name, value, expected));
                    }
                    None => fields.set(field, value.clone()),
                },
                None if name == "always" && !params.iter().any(|p| p.name == name) => {
                    return Err(Error::param(name, value, "near.sinks or near.heavy in its place"));
                }
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
    fn plain_sinks_and_window_are_the_near_fields_where_a_method_has_none() {
        let options = Options::new().with("sinks", 3).with("window", 7);
        let p = Problem::new(1, 50, 4).causal();
        let near = |id: &str, options: &Options| -> Result<_> {
            let plan = registry::method(id).unwrap().plan(&p, options)?;
            Ok((plan.problem().near.sinks, plan.problem().near.window))
        };
        assert_eq!(near("hyper", &options).unwrap(), (3, 7));
        assert_eq!(near("reformer", &options).unwrap(), (3, 0), "it has a window of its own");
        assert_eq!(near("sink_window", &options).unwrap(), (0, 0));
        let params = registry::method("hyper").unwrap().params;
        assert!(
            Near::names("window", params) && Near::split(Near::NONE, &options, params).unwrap().1.is_empty()
        );
        assert_eq!(near("hyper", &options.clone().with("near.window", "7")).unwrap(), (3, 7));
        let both = near("hyper", &options.with("near.window", 8)).unwrap_err().to_string();
        assert!(both.contains("window = 7") && both.contains("8 as in near.window"), "{both}");
        let gone = near("hyper", &Options::new().with("always", "0-3+17")).unwrap_err().to_string();
        assert_eq!(
            gone,
            "parameter always = 0-3+17 is not accepted; expected near.sinks or near.heavy in its place"
        );
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
