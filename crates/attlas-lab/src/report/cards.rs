//! Cards of methods: idea, mathematics, cost, guarantees and reference, from the documentation of their modules.
//!
//! The text is `assets/cards.json`, which `cargo run -p xtask -- cards` writes from the modules. Formulas are MathML,
//! which needs no script. Methods that are not in it get a card from their registry entry alone.

use crate::atlas::MethodEntry;
use crate::html::escape;
use crate::table::Table;
use attlas::Method;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fmt::Write;

static CARDS: &str = include_str!("../../assets/cards.json");

/// The documentation of a module; every part is HTML.
#[derive(Debug, Deserialize)]
struct Card {
    /// Hash of the documentation it was made from.
    #[cfg_attr(not(test), expect(dead_code, reason = "tests hold it against the modules"))]
    sha256: String,
    #[serde(default)]
    idea: String,
    #[serde(default)]
    math: String,
    #[serde(default)]
    cost: String,
    #[serde(default)]
    guarantees: String,
    #[serde(default)]
    when: String,
    #[serde(default)]
    works: Vec<String>,
}

/// All cards by id.
pub(super) struct Cards(BTreeMap<String, Card>);

impl Cards {
    /// Reads the cards; none if the file is malformed, which a test excludes.
    pub(super) fn new() -> Self {
        Self(serde_json::from_str(CARDS).unwrap_or_default())
    }

    /// Returns the card of a method, collapsed.
    pub(super) fn html(&self, method: &'static Method) -> String {
        let entry = MethodEntry::new(method);
        let mut out = format!(
            "<details class=\"card\" id=\"card-{id}\" data-family=\"{family}\"><summary><span class=\"dot {family}\">\
             </span><b>{id}</b> <span>{title}</span></summary>",
            id = escape(method.id),
            family = method.family.name(),
            title = escape(method.title),
        );
        let mut part = |name: &str, html: &str| {
            if !html.is_empty() {
                let _ = write!(out, "<h4>{name}</h4>{html}");
            }
        };
        let claims = claims(&entry);
        let params = params(&entry);
        match self.0.get(method.id) {
            Some(card) => {
                part("Idea", &card.idea);
                part("Mathematics", &card.math);
                part("Cost", &card.cost);
                part("Guarantees", &card.guarantees);
                part("When to use", &card.when);
                part("Claims", &claims);
                let works: String = card.works.iter().map(|w| format!("<li>{w}</li>")).collect();
                let own = format!("<p>{}</p>", escape(method.reference));
                part("Reference", &if works.is_empty() { own } else { format!("<ul>{works}</ul>") });
            }
            None => {
                part("Claims", &claims);
                part("Reference", &format!("<p>{}</p>", escape(method.reference)));
            }
        }
        part("Parameters", &params);
        out + "</details>\n"
    }
}

fn claims(entry: &MethodEntry) -> String {
    let c = &entry.claims;
    let mut words: Vec<String> = [
        (c.softmax, "approximates softmax attention"),
        (!c.softmax, "a kernel of its own"),
        (c.causal, "causal"),
        (c.decode, "decodes token by token"),
        (c.row_stochastic, "weights are non-negative and sum to one"),
        (c.unbiased, "unbiased normaliser"),
        (c.deterministic, "draws no random numbers"),
        (c.lse, "gives a log-sum-exp"),
    ]
    .into_iter()
    .filter(|(holds, _)| *holds)
    .map(|(_, word)| word.into())
    .collect();
    words.extend(
        c.exact_at
            .iter()
            .map(|(param, budget)| format!("exact at {param} = {}", crate::atlas::covering(*budget))),
    );
    format!("<p>{}.</p>", escape(&words.join("; ")))
}

fn params(entry: &MethodEntry) -> String {
    let mut table = Table::new(&["<parameter", "<default", "<meaning"]);
    for p in &entry.params {
        table.push(vec![p.name.into(), p.default.to_string(), p.doc.replace('|', "∣")]);
    }
    if table.is_empty() {
        return String::new();
    }
    format!("<div class=\"wide\"><table>{}</table></div>", crate::html::table_rows(&table))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::sha256;
    use attlas::registry;
    use std::path::{Path, PathBuf};

    /// Returns the path of a method's module.
    fn source(id: &str, family: &str) -> Option<PathBuf> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../attlas/src/methods").join(family);
        [folder.join(format!("{id}.rs")), folder.join(id).join("mod.rs")].into_iter().find(|p| p.exists())
    }

    #[test]
    fn every_method_has_a_card_that_is_up_to_date() {
        let cards = Cards::new();
        for method in registry::METHODS {
            let card = cards
                .0
                .get(method.id)
                .unwrap_or_else(|| panic!("run `cargo run -p xtask -- cards`: {}", method.id));
            for part in [&card.idea, &card.math, &card.cost, &card.guarantees, &card.when] {
                assert!(!part.is_empty(), "{}", method.id);
            }
            let path = source(method.id, method.family.name()).unwrap();
            let text = std::fs::read_to_string(path).unwrap();
            let doc: Vec<&str> = text
                .split('\n')
                .filter_map(|l| l.strip_prefix("//!").map(|l| l.strip_prefix(' ').unwrap_or(l)))
                .collect();
            let found = sha256(doc.join("\n").as_bytes());
            assert_eq!(found, card.sha256, "{} has changed: run `cargo run -p xtask -- cards`", method.id);
        }
        assert!(cards.html(registry::method("hyper").unwrap()).contains("<math"));
    }
}
