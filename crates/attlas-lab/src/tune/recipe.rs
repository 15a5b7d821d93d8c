//! What was chosen, as a recipe with its evidence.

use super::{Pick, Settings, Tuned};
use crate::text::{Text, shape};
use attlas::params::Value;
use attlas::{Options, registry};
use attlas_model::Model;
use attlas_model::recipe::{Measured, Numbers, Recipe, Rule};
use std::collections::BTreeMap;

impl Pick {
    /// Whether it is exact attention without any setting.
    pub(super) fn is_exact(&self) -> bool {
        self.method == registry::baseline().id && self.params.is_empty()
    }

    pub(super) fn exact(self) -> Self {
        Self { method: registry::baseline().id.into(), params: Options::new(), error: 0.0, cost: 1.0, ..self }
    }
}

/// Rules for every layer; key heads of a layer with the same choice share one.
pub(super) fn recipe(picks: &[Pick], model: &str) -> Recipe {
    let mut rules: Vec<(usize, Rule, f64)> = Vec::new();
    for p in picks {
        if p.is_exact() {
            continue;
        }
        let same = |(layer, rule, _): &&mut (usize, Rule, f64)| {
            *layer == p.layer && rule.method == p.method && rule.params == p.params
        };
        if let Some((_, rule, members)) = rules.iter_mut().find(same) {
            let heads = rule.heads.iter().flat_map(Numbers::iter).chain(p.heads.iter()).collect();
            rule.heads = Some(heads);
            if let Some(m) = &mut rule.measured {
                m.error = m.error.map(|e| e.max(p.error));
                m.cost = m.cost.map(|c| (c * *members + p.cost) / (*members + 1.0));
            }
            *members += 1.0;
            continue;
        }
        let rule = Rule {
            layers: Some([p.layer].into_iter().collect()),
            heads: Some(p.heads.clone()),
            method: p.method.clone(),
            params: p.params.clone(),
            measured: Some(Measured { error: Some(p.error), cost: Some(p.cost) }),
        };
        rules.push((p.layer, rule, 1.0));
    }
    Recipe {
        producer: Some(concat!("attlas ", env!("CARGO_PKG_VERSION"), " tune").into()),
        model: Some(model.into()),
        rules: rules.into_iter().map(|r| r.1).collect(),
        ..Recipe::default()
    }
}

pub(super) fn evidence(
    tuned: &Tuned,
    text: &Text,
    check: &Text,
    settings: &Settings,
    model: &Model,
) -> BTreeMap<String, Value> {
    let mut out: BTreeMap<String, Value> = BTreeMap::new();
    let mut put = |name: &str, value: Value| out.insert(name.into(), value);
    put("text", Value::Text(text.source.clone()));
    put("text_sha256", Value::Text(text.sha256.clone()));
    put("tokens", tuned.tokens.into());
    put("check_text", Value::Text(check.source.clone()));
    put("check_tokens", check.tokens.len().into());
    put("model_shape", Value::Text(shape(&model.config)));
    if let Some(command) = &settings.command {
        put("command", Value::Text(command.clone()));
    }
    let budgets = [
        ("max_error", settings.max_error),
        ("max_kl", settings.max_kl),
        ("max_ppl_increase", settings.max_ppl_increase),
    ];
    for (name, value) in budgets {
        if let Some(value) = value {
            put(name, value.into());
        }
    }
    if !tuned.fell_back.is_empty() {
        put("exact_at_this_length", Value::Text(tuned.fell_back.join(", ")));
    }
    if let Some(note) = &tuned.note {
        put("note", Value::Text(note.clone()));
    }
    if let (Some(round), None) = (tuned.chosen.map(|i| &tuned.rounds[i]), &tuned.note) {
        put("target_error", round.target.into());
        put("attention_cost", round.cost.into());
        if let Some((r, x)) = round.check.as_ref().and_then(|r| Some((r, r.against_exact.as_ref()?))) {
            put("ppl", r.ppl.into());
            put("exact_ppl", x.exact_ppl.into());
            put("kl_mean", x.kl_mean.into());
            put("same_top", x.same_top.into());
            put("seconds", r.seconds.into());
            put("exact_seconds", x.exact_seconds.into());
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_heads_with_the_same_choice_share_a_rule() {
        let pick = |layer, kv_head: usize, method: &str, error, cost| Pick {
            layer,
            kv_head,
            heads: (3 * kv_head..3 * kv_head + 3).collect(),
            method: method.into(),
            params: if method == "exact" { Options::new() } else { Options::new().with("window", 32) },
            error,
            cost,
        };
        let picks = [
            pick(0, 0, "sink_window", 0.02, 0.5),
            pick(0, 1, "exact", 0.0, 1.0),
            pick(0, 2, "sink_window", 0.04, 0.3),
            pick(1, 0, "sink_window", 0.01, 0.4),
        ];
        let made = recipe(&picks, "a model");
        assert_eq!(made.rules.len(), 2);
        assert_eq!(made.rules[0].heads.as_ref().unwrap().to_string(), "0-2,6-8");
        let m = made.rules[0].measured.unwrap();
        assert_eq!((m.error, m.cost), (Some(0.04), Some(0.4)));
        assert_eq!(made.choice(0, 4).0, "exact");
        assert_eq!(made.choice(1, 1).0, "sink_window");
        assert_eq!(Recipe::from_toml(&made.to_toml().unwrap()).unwrap(), made);
    }
}
