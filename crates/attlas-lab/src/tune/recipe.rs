//! The choice as a recipe, with its evidence.

use super::{DecodePick, Pick, Settings, Tuned, curve};
use crate::text::Text;
use attlas::params::Value;
use attlas::{Options, registry};
use attlas_model::recipe::{Decode, Measured, Numbers, Recipe, Rule};
use std::collections::BTreeMap;

impl Pick {
    /// Returns true if it is exact attention without any setting.
    pub(super) fn is_exact(&self) -> bool {
        self.method == registry::baseline().id && self.params.is_empty()
    }

    /// Returns true if neither prompts nor new tokens are changed.
    fn is_default(&self) -> bool {
        self.is_exact() && self.decode.as_ref().is_none_or(DecodePick::is_exact)
    }

    pub(super) fn exact(self) -> Self {
        Self {
            method: registry::baseline().id.into(),
            params: Options::new(),
            error: 0.0,
            cost: 1.0,
            kl: 0.0,
            decode: None,
            ..self
        }
    }
}

impl DecodePick {
    fn is_exact(&self) -> bool {
        self.method == registry::baseline().id && self.params.is_empty()
    }

    fn rule(&self) -> Decode {
        let measured = (!self.is_exact()).then_some(Measured {
            error: Some(self.error),
            cost: Some(self.cost),
            kl: Some(self.kl),
        });
        Decode { method: self.method.clone(), params: self.params.clone(), measured }
    }
}

/// Returns true if two choices for new tokens differ at most in their measurements.
fn same(a: Option<&Decode>, b: Option<&Decode>) -> bool {
    let plain = |d: Option<&Decode>| d.map(|d| (d.method.clone(), d.params.clone()));
    plain(a) == plain(b)
}

/// Builds the rules of every layer; key heads of a layer with the same choice share one.
pub(super) fn recipe(picks: &[Pick], model: &str) -> Recipe {
    let mut rules: Vec<(usize, Rule, f64)> = Vec::new();
    for p in picks {
        if p.is_default() {
            continue;
        }
        let decode = p.decode.as_ref().map(DecodePick::rule);
        let alike = |(layer, rule, _): &&mut (usize, Rule, f64)| {
            *layer == p.layer
                && rule.method == p.method
                && rule.params == p.params
                && same(rule.decode.as_ref(), decode.as_ref())
        };
        if let Some((_, rule, members)) = rules.iter_mut().find(alike) {
            let heads = rule.heads.iter().flat_map(Numbers::iter).chain(p.heads.iter()).collect();
            rule.heads = Some(heads);
            if let Some(m) = &mut rule.measured {
                m.error = m.error.map(|e| e.max(p.error));
                m.cost = m.cost.map(|c| (c * *members + p.cost) / (*members + 1.0));
                m.kl = m.kl.map(|kl| kl + p.kl);
            }
            let known = rule.decode.as_mut().and_then(|d| d.measured.as_mut());
            if let (Some(m), Some(new)) = (known, &p.decode) {
                m.error = m.error.map(|e| e.max(new.error));
                m.cost = m.cost.map(|c| (c * *members + new.cost) / (*members + 1.0));
                m.kl = m.kl.map(|kl| kl + new.kl);
            }
            *members += 1.0;
            continue;
        }
        let rule = Rule {
            layers: Some([p.layer].into_iter().collect()),
            heads: Some(p.heads.clone()),
            method: p.method.clone(),
            params: p.params.clone(),
            measured: Some(Measured { error: Some(p.error), cost: Some(p.cost), kl: Some(p.kl) }),
            decode,
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
    model_shape: String,
) -> BTreeMap<String, Value> {
    let mut out: BTreeMap<String, Value> = BTreeMap::new();
    let mut put = |name: &str, value: Value| out.insert(name.into(), value);
    put("text", Value::Text(text.source.clone()));
    put("text_sha256", Value::Text(text.sha256.clone()));
    put("tokens", tuned.tokens.into());
    put("check_text", Value::Text(check.source.clone()));
    put("check_tokens", check.tokens.len().into());
    put("model_shape", Value::Text(model_shape));
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
    if !tuned.curve.is_empty() {
        put("curve", Value::Text(curve::words(&tuned.curve)));
    }
    if let Some(cost) = tuned.decode_cost() {
        put("decode_cost", cost.into());
    }
    if !tuned.decodes_exactly.is_empty() {
        let layers: Numbers = tuned.decodes_exactly.iter().copied().collect();
        put("decodes_exactly", Value::Text(layers.to_string()));
    }
    if let Some(x) = &tuned.decoded {
        put("decode_kl_mean", x.kl_mean.into());
        put("decode_tokens", (x.scored as usize).into());
    }
    if let (Some(round), None) = (tuned.chosen.map(|i| &tuned.rounds[i]), &tuned.note) {
        put("attention_cost", tuned.cost().into());
        put("predicted_kl", tuned.picks.iter().map(|p| p.kl).sum::<f64>().into());
        if let (Some(text), Some(_)) = (&settings.answer, &tuned.answer) {
            put("answer_text", Value::Text(text.source.clone()));
            put("answer_tokens", text.tokens.len().into());
        }
        // The results on the third text, or on the second if there is no third.
        if let Some(x) = tuned.answer.as_ref().or(round.check.as_ref()) {
            put("ppl", x.ppl.into());
            put("exact_ppl", x.exact_ppl.into());
            put("ppl_increase_upper", x.ppl_increase_upper.into());
            put("kl_mean", x.kl_mean.into());
            put("same_top", x.same_top.into());
            put("seconds", x.seconds.into());
            if let Some(exact) = x.exact_seconds {
                put("exact_seconds", exact.into());
            }
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
            kl: 0.001,
            decode: None,
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
        assert_eq!((m.error, m.cost, m.kl), (Some(0.04), Some(0.4), Some(0.002)));
        assert_eq!(made.choice(0, 4).0, "exact");
        assert_eq!(made.choice(1, 1).0, "sink_window");
        assert_eq!(Recipe::from_toml(&made.to_toml().unwrap()).unwrap(), made);
        // New tokens of an exact head may have a method, and those of a changed head none.
        let quest = Pick { method: "quest".into(), ..picks[0].clone() }.as_decode();
        let exact = picks[1].clone().exact().as_decode();
        let apart = [
            Pick { decode: Some(exact), ..picks[0].clone() },
            Pick { decode: Some(quest), ..picks[1].clone() },
        ];
        let made = recipe(&apart, "a model");
        let decodes: Vec<&str> =
            made.rules.iter().map(|r| r.decode.as_ref().unwrap().method.as_str()).collect();
        assert_eq!((decodes, made.rules[1].method.as_str()), (vec!["exact", "quest"], "exact"));
        assert_eq!(Recipe::from_toml(&made.to_toml().unwrap()).unwrap(), made);
    }
}
