//! Method cards: the documentation of every method's module as HTML with MathML, which needs no script.

use attlas::registry;
use attlas_lab::hash::sha256;
use pulldown_latex::config::{DisplayMode, RenderConfig};
use pulldown_latex::{Event, Parser, Storage, push_mathml};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::path::{Path, PathBuf};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Headings of a module's documentation, and the corresponding fields of a card.
const PARTS: [(&str, &str); 6] = [
    ("Idea", "idea"),
    ("Math", "math"),
    ("Reference", "reference"),
    ("Cost", "cost"),
    ("Guarantees", "guarantees"),
    ("When to use", "when"),
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Writes the cards, or with `check` compares them with the file.
pub(crate) fn run(check: bool) -> Result<()> {
    let path = root().join("crates/attlas-lab/assets/cards.json");
    let cards = cards()?;
    if !check {
        return Ok(std::fs::write(path, cards)?);
    }
    if std::fs::read_to_string(path)? == cards {
        Ok(())
    } else {
        Err("the method cards are out of date: run `cargo run -p xtask -- cards`".into())
    }
}

/// Returns the cards of all methods as JSON.
fn cards() -> Result<String> {
    let works = works(&std::fs::read_to_string(root().join("docs/bibliography.md"))?);
    let mut cards = Map::new();
    for method in registry::METHODS {
        let folder = root().join("crates/attlas/src/methods").join(method.family.name());
        let files = [folder.join(format!("{}.rs", method.id)), folder.join(method.id).join("mod.rs")];
        let file = files.iter().find(|f| f.exists()).ok_or_else(|| format!("{} has no module", method.id))?;
        let text = std::fs::read_to_string(file)?;
        let card = card(&documentation(&text), &works).map_err(|e| format!("{}: {e}", method.id))?;
        cards.insert(method.id.into(), card);
    }
    let mut out = Vec::new();
    let format = serde_json::ser::PrettyFormatter::with_indent(b" ");
    let mut serializer = serde_json::Serializer::with_formatter(&mut out, format);
    serde::Serialize::serialize(&cards, &mut serializer)?;
    Ok(String::from_utf8(out)? + "\n")
}

/// Returns the module's documentation without comment markers.
fn documentation(source: &str) -> String {
    let lines = source.split('\n').filter_map(|l| l.strip_prefix("//!"));
    let lines: Vec<&str> = lines.map(|l| l.strip_prefix(' ').unwrap_or(l)).collect();
    lines.join("\n")
}

/// Returns the entries of the bibliography by key, without links: the page is self-contained.
fn works(bibliography: &str) -> BTreeMap<String, String> {
    let entries = bibliography.split("\n## ").skip(1);
    entries
        .filter_map(|entry| {
            let (key, text) = entry.split_once('\n')?;
            Some((key.trim().to_owned(), without_links(&text.split('\n').collect::<Vec<_>>().join(" "))))
        })
        .collect()
}

fn card(doc: &str, works: &BTreeMap<String, String>) -> Result<Value> {
    let mut card = Map::new();
    card.insert("sha256".into(), sha256(doc.as_bytes()).into());
    let mut found: Vec<(usize, usize, &str)> = Vec::new();
    for (title, field) in PARTS {
        let heading = format!("**{title}.** ");
        let at = if doc.starts_with(&heading) {
            Some(0)
        } else {
            doc.find(&format!("\n{heading}")).map(|i| i + 1)
        };
        found.extend(at.map(|at| (at, at + heading.len(), field)));
    }
    found.sort_unstable();
    for (i, &(_, start, field)) in found.iter().enumerate() {
        let end = found.get(i + 1).map_or(doc.len(), |next| next.0);
        card.insert(field.into(), block(doc[start..end].trim())?.into());
    }
    let reference = card.get("reference").and_then(Value::as_str).unwrap_or_default();
    let words = reference.split(|c: char| !c.is_ascii_alphanumeric());
    let cited: Vec<&String> = {
        let mut seen = BTreeSet::new();
        words.filter(|word| seen.insert(*word)).filter_map(|word| works.get(word)).collect()
    };
    card.insert("works".into(), cited.into_iter().map(|w| Value::from(escape(w))).collect());
    Ok(card.into())
}

/// Renders paragraphs and lists.
fn block(text: &str) -> Result<String> {
    let mut html = String::new();
    let lines: Vec<&str> = text.split('\n').collect();
    for paragraph in lines.split(|line| line.trim().is_empty()).filter(|p| !p.is_empty()) {
        let (mut lead, mut items): (Vec<&str>, Vec<Vec<&str>>) = Default::default();
        for line in paragraph {
            let item = line.trim_start();
            match (item.strip_prefix("* ").or_else(|| item.strip_prefix("- ")), items.last_mut()) {
                (Some(item), _) => items.push(vec![item]),
                (None, Some(last)) => last.push(line.trim()),
                (None, None) => lead.push(line),
            }
        }
        if !lead.is_empty() {
            html += &format!("<p>{}</p>", inline(&lead.join("\n"))?);
        }
        if !items.is_empty() {
            let items: Result<String> =
                items.iter().map(|i| Ok(format!("<li>{}</li>", inline(&i.join("\n"))?))).collect();
            html += &format!("<ul>{}</ul>", items?);
        }
    }
    Ok(html)
}

/// Renders text with formulas, code and emphasis. Formulas and code are extracted before the rest is escaped.
fn inline(text: &str) -> Result<String> {
    let (mut kept, mut plain, mut rest) = (Vec::new(), String::new(), text);
    let keep = |html: String, plain: &mut String, kept: &mut Vec<String>| {
        plain.push_str(&format!("\0{}\0", kept.len()));
        kept.push(html);
    };
    while let Some(at) = rest.find(['$', '`', '[']) {
        plain.push_str(&rest[..at]);
        rest = &rest[at..];
        let (html, used) = if let Some((formula, used)) = between(rest, "$$", "$$") {
            (mathml(formula, DisplayMode::Block)?, used)
        } else if let Some((formula, used)) = between(rest, "$", "$") {
            (mathml(formula, DisplayMode::Inline)?, used)
        } else if let Some((code, used)) = between(rest, "[`", "`]") {
            (code_html(code), used + target_len(&rest[used..]))
        } else if let Some((code, used)) = between(rest, "`", "`") {
            (code_html(code), used)
        } else {
            (rest[..1].to_owned(), 1)
        };
        if used == 1 {
            plain.push_str(&html)
        } else {
            keep(html, &mut plain, &mut kept)
        }
        rest = &rest[used..];
    }
    plain.push_str(rest);
    let html = emphasise(&escape(&without_links(&plain)));
    let mut out = String::new();
    for (i, piece) in html.split('\0').enumerate() {
        out += if i % 2 == 0 { piece } else { &kept[piece.parse::<usize>()?] };
    }
    Ok(out)
}

/// Returns the text between two marks at the start of `text`, and its length including the marks.
fn between<'a>(text: &'a str, open: &str, close: &str) -> Option<(&'a str, usize)> {
    let inner = text.strip_prefix(open)?;
    let end = inner.find(close).filter(|&end| end > 0)?;
    Some((&inner[..end], open.len() + end + close.len()))
}

/// Returns the length of a link's `(target)` at the start of `text`, or 0.
fn target_len(text: &str) -> usize {
    between(text, "(", ")").map_or(0, |(_, used)| used)
}

/// Replaces `[text](target)` by its text.
fn without_links(text: &str) -> String {
    let (mut out, mut rest) = (String::new(), text);
    while let Some(at) = rest.find('[') {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        match between(rest, "[", "]").filter(|(_, used)| rest[*used..].starts_with('(')) {
            Some((inner, used)) => {
                out.push_str(inner);
                rest = &rest[used + target_len(&rest[used..])..];
            }
            None => {
                out.push('[');
                rest = &rest[1..];
            }
        }
    }
    (out + rest).trim().to_owned()
}

/// Renders `**bold**` and `*italic*`.
fn emphasise(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find('*') {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let bold = between(rest, "**", "**").map(|found| ("b", found));
        let italic =
            || between(rest, "*", "*").filter(|(t, _)| !t.starts_with([' ', '\n'])).map(|found| ("i", found));
        match bold.or_else(italic) {
            Some((tag, (inner, used))) => {
                out.push_str(&format!("<{tag}>{inner}</{tag}>"));
                rest = &rest[used..];
            }
            None => {
                out.push('*');
                rest = &rest[1..];
            }
        }
    }
    out + rest
}

fn code_html(code: &str) -> String {
    format!("<code>{}</code>", escape(code))
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// Renders a formula; the error names one that cannot be parsed.
fn mathml(formula: &str, display_mode: DisplayMode) -> Result<String> {
    let storage = Storage::new();
    let events: std::result::Result<Vec<Event<'_>>, _> = Parser::new(formula, &storage).collect();
    let events = events.map_err(|e| format!("formula {formula}: {e}"))?;
    let mut out = String::new();
    let config = RenderConfig { display_mode, ..RenderConfig::default() };
    push_mathml(&mut out, events.into_iter().map(Ok::<_, std::fmt::Error>), config)?;
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formulas_code_links_and_emphasis_become_html() {
        let html = inline("**Bold** and *it* of `a < b`, [`Problem`](crate::Problem), [a page](x) & $x_i$.")
            .unwrap();
        assert!(html.starts_with(
            "<b>Bold</b> and <i>it</i> of <code>a &lt; b</code>, <code>Problem</code>, a page &amp; <math"
        ));
        assert!(html.ends_with("</math>."));
        assert_eq!(block("- one\n  more\n- two").unwrap(), "<ul><li>one\nmore</li><li>two</li></ul>");
        assert!(inline(r"$\frac{1}{$").is_err());
    }

    #[test]
    fn the_cards_are_up_to_date() {
        run(true).unwrap();
    }
}
