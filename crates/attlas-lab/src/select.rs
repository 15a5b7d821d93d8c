//! Selection of methods and their settings.

use crate::{Error, Result};
use attlas::method::Family;
use attlas::near::PREFIX;
use attlas::params::Value;
use attlas::{Method, Options, registry};
use serde_json::Map;

/// A method with its settings.
#[derive(Clone, Debug)]
pub struct Chosen {
    /// The method.
    pub method: &'static Method,
    /// Parameters set; the others are at their defaults.
    pub options: Options,
    /// True if the user named the method; a refusal is then reported prominently.
    pub named: bool,
}

/// Methods in the order of the registry.
pub type Selection = Vec<Chosen>;

/// Command-line choice of methods.
#[derive(Clone, Debug, Default)]
pub struct Choice {
    /// Ids, or the word `all`; if empty, all but the baseline and the oracles.
    pub methods: Vec<String>,
    /// Only this family.
    pub family: Option<String>,
    /// Settings `id.param=value`.
    pub set: Vec<String>,
}

/// Returns the method that every other is compared with.
pub fn baseline() -> Result<&'static Method> {
    Ok(registry::method("exact")?)
}

/// Returns the family called `name`.
pub fn family(name: &str) -> Result<Family> {
    Family::ALL.into_iter().find(|f| f.name() == name).ok_or_else(|| {
        let names: Vec<&str> = Family::ALL.iter().map(|f| f.name()).collect();
        Error::argument("family", format!("one of {}", names.join(", ")), format!("'{name}'"))
    })
}

impl Choice {
    /// Looks up all names. Unknown ids, families and parameters are errors that list the known ones.
    pub fn resolve(&self) -> Result<Selection> {
        let exact = baseline()?;
        let all = self.methods.iter().any(|m| m == "all");
        let named: Vec<&'static Method> = self
            .methods
            .iter()
            .filter(|m| *m != "all")
            .map(|id| Ok(registry::method(id)?))
            .collect::<Result<_>>()?;
        // A setting `near.…` without an id applies to every method but the baseline and the oracles.
        let (near, named_settings): (Vec<&String>, Vec<&String>) =
            self.set.iter().partition(|s| s.starts_with(PREFIX));
        let near: Vec<(&str, &str)> = near.iter().map(|s| parse_near(s)).collect::<Result<_>>()?;
        let settings: Vec<(&'static Method, &str, &str)> =
            named_settings.iter().map(|s| parse_setting(s)).collect::<Result<_>>()?;
        let family = self.family.as_deref().map(family).transpose()?;
        let mut selection = Selection::new();
        for method in registry::METHODS {
            let is = |other: &Method| other.id == method.id;
            let by_name = named.iter().any(|m| is(m));
            let by_setting = settings.iter().any(|(m, ..)| is(m));
            let by_default = named.is_empty() && (all || !method.claims.oracle && (!is(exact) || by_setting));
            let in_family = family.is_none_or(|f| f == method.family);
            if !in_family || !(by_name || by_default || all) {
                continue;
            }
            let mut options = Options::new();
            if !is(exact) && !method.claims.oracle {
                near.iter().for_each(|(name, value)| options.set(name, *value));
            }
            for (_, name, value) in settings.iter().filter(|(m, ..)| is(m)) {
                options.set(name, *value);
            }
            selection.push(Chosen { method, options, named: by_name });
        }
        if let Some((method, ..)) =
            settings.iter().find(|(m, ..)| !selection.iter().any(|c| c.method.id == m.id))
        {
            let ids: Vec<&str> = selection.iter().map(|c| c.method.id).collect();
            return Err(Error::argument(
                "--set",
                format!("a method that is being measured ({})", ids.join(", ")),
                method.id,
            ));
        }
        if selection.is_empty() {
            return Err(Error::argument(
                "methods",
                "at least one method",
                "none that fits the family and names",
            ));
        }
        Ok(selection)
    }
}

/// Splits `near.field=value` and checks that the field exists.
fn parse_near(text: &str) -> Result<(&str, &str)> {
    let (name, value) = text.split_once('=').unwrap_or((text, ""));
    match attlas::Near::names(name, &[]) {
        true => Ok((name, value)),
        false => Err(attlas::Error::UnknownParam {
            name: name.into(),
            accepted: attlas::Near::SPECS.iter().map(|p| format!("{PREFIX}{}", p.name)).collect(),
        }
        .into()),
    }
}

/// Splits `id.param=value` and checks that both names exist.
fn parse_setting(text: &str) -> Result<(&'static Method, &str, &str)> {
    let wrong =
        || Error::argument("--set", "method.parameter=value, such as top_k.keys=32", format!("'{text}'"));
    let (name, value) = text.split_once('=').ok_or_else(wrong)?;
    let (id, param) = name.split_once('.').ok_or_else(wrong)?;
    let method = registry::method(id)?;
    method.check_option(param, value)?;
    Ok((method, param, value))
}

impl Chosen {
    /// Returns true if results depend on a seed that can be varied.
    pub fn has_free_seed(&self) -> bool {
        !self.method.claims.deterministic
            && self.method.params.iter().any(|p| p.name == "seed")
            && self.options.get("seed").is_none()
    }

    /// Returns the options of the run with `seed`.
    pub fn options_for(&self, seed: u64) -> Options {
        if self.has_free_seed() { self.options.clone().with("seed", seed) } else { self.options.clone() }
    }

    /// Returns every parameter with its value in `options`.
    pub fn params(&self, options: &Options) -> Map<String, serde_json::Value> {
        let json = |v: &Value| match v {
            Value::Bool(x) => (*x).into(),
            Value::Int(x) => (*x).into(),
            Value::Float(x) => (*x).into(),
            Value::Text(x) => x.as_str().into(),
        };
        let value = |spec: &attlas::params::ParamSpec| {
            options.get(spec.name).cloned().unwrap_or_else(|| (spec.default)())
        };
        let full = |name: &str| format!("{PREFIX}{}", name.trim_start_matches(PREFIX));
        let near = options.iter().filter(|(name, _)| attlas::Near::names(name, self.method.params));
        let near = near.map(|(name, value)| (full(name), json(value)));
        self.method
            .params
            .iter()
            .map(|spec| (spec.name.to_string(), json(&value(spec))))
            .chain(near)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choose(methods: &[&str], family: Option<&str>, set: &[&str]) -> Result<Vec<String>> {
        let owned = |x: &[&str]| x.iter().map(|s| s.to_string()).collect();
        let choice = Choice { methods: owned(methods), family: family.map(String::from), set: owned(set) };
        Ok(choice.resolve()?.into_iter().map(|c| c.method.id.to_string()).collect())
    }

    #[test]
    fn the_default_leaves_out_the_baseline_and_the_oracles() {
        let ids = choose(&[], None, &[]).unwrap();
        assert!(ids.contains(&"top_k".to_string()) && !ids.contains(&"exact".to_string()));
        assert!(
            registry::METHODS.iter().filter(|m| m.claims.oracle).all(|m| !ids.contains(&m.id.to_string()))
        );
        assert_eq!(choose(&["all"], None, &[]).unwrap().len(), registry::METHODS.len());
        assert!(choose(&[], None, &["exact.precision=bf16"]).unwrap().contains(&"exact".to_string()));
    }

    #[test]
    fn names_come_in_registry_order_and_families_narrow() {
        assert_eq!(choose(&["top_k", "naive"], None, &[]).unwrap(), ["naive", "top_k"]);
        let family = choose(&["all"], Some("exact"), &[]).unwrap();
        assert!(
            family.len() >= 4
                && family.iter().all(|id| registry::method(id).unwrap().family == Family::Exact)
        );
    }

    #[test]
    fn a_near_field_is_set_for_all_methods_or_for_one_and_shows_in_records() {
        let set = ["near.window=128", "top_k.near.sinks=4", "hyper.sinks=3"].map(String::from);
        let choice = Choice {
            methods: vec!["top_k".into(), "hyper".into(), "exact".into()],
            set: set.into(),
            ..Choice::default()
        };
        let chosen = choice.resolve().unwrap();
        let of = |id: &str| chosen.iter().find(|c| c.method.id == id).unwrap();
        assert!(of("exact").options.is_empty());
        let params = of("hyper").params(&of("hyper").options);
        assert_eq!((&params["near.window"], &params["near.sinks"]), (&128.into(), &3.into()));
        let params = of("top_k").params(&of("top_k").options);
        assert_eq!((&params["near.window"], &params["near.sinks"]), (&128.into(), &4.into()));
        let wrong = Choice { set: vec!["near.windows=3".into()], ..Choice::default() }.resolve();
        assert!(wrong.unwrap_err().to_string().contains("near.window"));
    }

    #[test]
    fn what_does_not_exist_is_listed() {
        let message = |r: Result<Vec<String>>| r.unwrap_err().to_string();
        assert!(message(choose(&["topk"], None, &[])).contains("sink_window"));
        assert!(message(choose(&[], Some("sparse"), &[])).contains("low_rank"));
        assert!(message(choose(&[], None, &["top_k.key=3"])).contains("accepted are keys"));
        assert!(message(choose(&[], None, &["top_k.near.key=3"])).contains("accepted are near.sinks"));
        assert!(message(choose(&[], None, &["top_k.always=3"])).contains("near.sinks or near.heavy"));
        assert!(message(choose(&[], None, &["top_k"])).contains("method.parameter=value"));
        assert!(
            message(choose(&["top_k"], None, &["sink_window.sinks=3"])).contains("being measured (top_k)")
        );
    }

    #[test]
    fn parameters_show_defaults_and_settings() {
        let chosen = Chosen {
            method: registry::method("sink_window").unwrap(),
            options: Options::new().with("sinks", 9),
            named: true,
        };
        let params = chosen.params(&chosen.options);
        assert_eq!(params["sinks"], 9);
        assert_eq!(params["window"], 512);
        assert!(!chosen.has_free_seed());
    }
}
