//! Candidates for a key head: methods with settings, over the parameters that their registry entries mark as tunable.

use super::{Effort, Phase, Settings};
use crate::select::Chosen;
use attlas::method::{Ladder, Needs};
use attlas::params::Value;
use attlas::{Method, Near, Options, Problem, registry};

/// Near field of methods that have none by default: sinks, a window and a few heavy keys.
const NEAR: [(&str, usize); 3] = [("near.sinks", 4), ("near.window", 128), ("near.heavy", 64)];

/// A method with settings.
#[derive(Clone, Debug)]
pub(super) struct Candidate {
    pub(super) method: &'static Method,
    pub(super) options: Options,
}

impl Candidate {
    pub(super) fn name(&self) -> String {
        format!("{} {}", self.method.id, self.options)
    }
}

/// Settings of one method that differ only in its budget, smallest first.
pub(super) type Steps = Vec<Candidate>;

/// Returns exact attention with every non-default value that its entry offers, such as rounded inputs.
fn rounded_exact() -> Vec<Candidate> {
    let method = registry::baseline();
    let values = method.tunable.iter().filter_map(|t| match t.ladder {
        Ladder::Values(values) => Some(values.iter().map(move |v| Options::new().with(t.param, *v))),
        Ladder::UpToKeys => None,
    });
    values.flatten().map(|options| Candidate { method, options }).collect()
}

/// Returns all candidates to screen for a problem.
pub(super) fn all(settings: &Settings, seed: u64, problem: &Problem, phase: Phase) -> Vec<Steps> {
    let mut found: Vec<Steps> = Vec::new();
    if phase == Phase::Prompt {
        found.extend(rounded_exact().into_iter().map(|c| vec![c]));
    }
    for chosen in &settings.selection {
        let (m, claims) = (chosen.method, &chosen.method.claims);
        let wanted = chosen.named || settings.effort == Effort::Thorough || claims.softmax;
        let learnt = claims.needs != Needs::Calibration || settings.calibrations.has(m.id);
        let baseline = std::ptr::eq(m, registry::baseline());
        if !wanted || !claims.causal || claims.oracle || !learnt || baseline {
            continue;
        }
        if phase == Phase::Decode && !claims.decode {
            continue;
        }
        found.extend(of(chosen, settings, seed, problem, phase));
    }
    found
}

fn of(chosen: &Chosen, settings: &Settings, seed: u64, problem: &Problem, phase: Phase) -> Vec<Steps> {
    let method = chosen.method;
    let mut bases = vec![below_the_switch(chosen, seed, problem.n_k)];
    // A method with its own sinks has a near field; others get one, and a thorough search also tries them as published.
    let own = crate::budget::has_near_field(method)
        || chosen.options.iter().any(|(name, _)| Near::names(name, method.params));
    if !own && method.claims.lse {
        let near = NEAR.iter().fold(bases[0].clone(), |o, (name, value)| o.with(name, *value));
        if settings.effort == Effort::Thorough {
            bases.push(near);
        } else {
            bases = vec![near];
        }
    }
    let mut settled: Vec<Options> = Vec::new();
    for base in &bases {
        let mut variants = vec![base.clone()];
        for t in method.tunable.iter().filter(|t| chosen.options.get(t.param).is_none()) {
            let Ladder::Values(values) = t.ladder else { continue };
            // Rounded inputs are no candidates for new tokens.
            if t.param == "precision" && phase == Phase::Decode {
                continue;
            }
            let with = |o: &Options| values.iter().map(|v| o.clone().with(t.param, *v)).collect::<Vec<_>>();
            let more: Vec<Options> = variants.iter().flat_map(with).collect();
            match t.param {
                // Rounded inputs lose almost no accuracy.
                "precision" if settings.effort != Effort::Thorough => variants = more,
                _ => variants.extend(more),
            }
        }
        settled.extend(variants);
    }
    let names = crate::budget::params(chosen);
    let short = problem.with_lens(problem.n_q.min(64), problem.n_k.min(64));
    // A recipe is also planned for other lengths, and short ones must be possible.
    let needs = method.claims.needs == Needs::Calibration;
    let accepted = |o: &Options| {
        let able =
            |p: &Problem| if needs { method.support(p, o).is_yes() } else { method.plan(p, o).is_ok() };
        able(problem) && able(&short)
    };
    let mut ladders = Vec::new();
    for base in settled {
        let mut steps: Vec<Options> = Vec::new();
        for halvings in settings.effort.halvings() {
            let budget = (problem.n_k >> halvings).max(1);
            let options = names.iter().fold(base.clone(), |o, name| o.with(name, budget));
            if !steps.contains(&options) {
                steps.push(options);
            }
        }
        steps.retain(accepted);
        if steps.is_empty() && accepted(&base) {
            steps.push(base);
        }
        if !steps.is_empty() {
            ladders.push(steps.into_iter().map(|options| Candidate { method, options }).collect());
        }
    }
    ladders
}

/// Returns the options with the length below which a method computes exact attention lowered to an eighth of the keys.
fn below_the_switch(chosen: &Chosen, seed: u64, n_k: usize) -> Options {
    let options = chosen.options_for(seed);
    let Some(name) = chosen.method.exact_below.filter(|name| chosen.options.get(name).is_none()) else {
        return options;
    };
    let default = chosen.method.params.iter().find(|p| p.name == name).map(|p| (p.default)());
    match default {
        Some(Value::Int(least)) if least > (n_k / 8) as u64 => options.with(name, (n_k / 8).max(64)),
        _ => options,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::select::Choice;

    fn names(methods: &[&str], effort: Effort, phase: Phase) -> Vec<String> {
        let methods = methods.iter().map(|m| m.to_string()).collect();
        let selection = Choice { methods, ..Choice::default() }.resolve().unwrap();
        let settings = Settings { selection, effort, ..super::super::tests::settings() };
        let problem = Problem::new(3, 4096, 64).with_kv_heads(1).causal();
        all(&settings, 7, &problem, phase).into_iter().flatten().map(|c| c.name()).collect()
    }

    #[test]
    fn methods_get_a_near_field_and_rounded_inputs_and_no_switch_to_exact_attention() {
        let found = names(&["hyper", "sampled_columns"], Effort::Quick, Phase::Prompt);
        assert_eq!(found[0], "exact precision=bf16");
        let hyper: Vec<&String> = found.iter().filter(|n| n.starts_with("hyper")).collect();
        assert!(hyper.len() >= 2, "{found:?}");
        assert!(hyper.iter().all(|n| n.contains("near.window=128") && n.contains("n_min=512")), "{found:?}");
        let columns: Vec<&String> = found.iter().filter(|n| n.starts_with("sampled_columns")).collect();
        assert!(columns.iter().all(|n| n.contains("precision=bf16") && !n.contains("near")), "{found:?}");
        let all = names(&["hyper"], Effort::Thorough, Phase::Prompt);
        assert!(all.iter().any(|n| n.starts_with("hyper") && !n.contains("near")));
    }

    #[test]
    fn new_tokens_are_for_methods_that_stream() {
        let found = names(&["sampled_columns", "smyrf", "quest"], Effort::Quick, Phase::Decode);
        assert!(
            found.iter().any(|n| n.starts_with("quest")) && found.iter().all(|n| !n.contains("precision"))
        );
        assert_eq!(
            registry::method("smyrf").unwrap().claims.decode,
            found.iter().any(|n| n.starts_with("smyrf"))
        );
        // A method that needs calibration is a candidate only with it.
        assert!(names(&["loki"], Effort::Normal, Phase::Prompt).iter().all(|n| n.starts_with("exact")));
    }
}
