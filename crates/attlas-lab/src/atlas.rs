//! The atlas: the contents of the registry, as records and as pages.

use crate::table::Table;
use attlas::Spread;
use attlas::conversions::Conversion;
use attlas::layer::{LayerKind, LayerShape};
use attlas::layers::common::cache_size;
use attlas::method::{Budget, Claims, Family, Needs, Promise, Withdrawn};
use attlas::params::{ParamSpec, Value};
use attlas::{Method, Options, registry};
use serde::Serialize;
use std::fmt::Write;

/// Everything in the registry.
#[derive(Clone, Debug, Serialize)]
pub struct Atlas {
    /// Drop-ins for softmax attention.
    pub methods: Vec<MethodEntry>,
    /// Layers with weights.
    pub layers: Vec<LayerEntry>,
    /// Conversions of weights.
    pub conversions: Vec<ConversionEntry>,
    /// Cache size per token of each attention scheme.
    pub cache_sizes: Vec<CacheEntry>,
}

/// Cache size per token of one attention scheme, in one layer.
#[derive(Clone, Debug, Serialize)]
pub struct CacheEntry {
    /// Common name of the scheme.
    pub scheme: &'static str,
    /// Numbers per token, as a formula.
    pub formula: &'static str,
    /// Numbers per token in the shapes of known models, by name.
    pub numbers: Vec<(&'static str, usize)>,
}

/// Shapes whose cache sizes are listed, with the rank of the latent.
const SHAPES: [(&str, LayerShape, usize); 3] = [
    ("Llama-2-7B", LayerShape { d_model: 4096, n_heads: 32, n_kv_heads: 32, d: 128, d_v: 128 }, 512),
    ("Llama-3-8B", LayerShape { d_model: 4096, n_heads: 32, n_kv_heads: 8, d: 128, d_v: 128 }, 512),
    ("SmolLM2-135M", LayerShape { d_model: 576, n_heads: 9, n_kv_heads: 3, d: 64, d_v: 64 }, 128),
];

fn cache_sizes() -> Vec<CacheEntry> {
    let tables = SHAPES.map(|(name, shape, rank)| (name, cache_size::table(&shape, rank, 64, 2, 2)));
    let entry = |i: usize| {
        let scheme = tables[0].1[i].0;
        let numbers = tables.iter().map(|(name, table)| (*name, table[i].1)).collect();
        CacheEntry { scheme: scheme.name(), formula: scheme.formula(), numbers }
    };
    (0..tables[0].1.len()).map(entry).collect()
}

/// A method.
#[derive(Clone, Debug, Serialize)]
pub struct MethodEntry {
    /// Its id.
    pub id: &'static str,
    /// Its family.
    pub family: &'static str,
    /// One line for people.
    pub title: &'static str,
    /// Authors and year, or the section of the survey.
    pub reference: &'static str,
    /// Its promises.
    pub claims: Claims,
    /// Its parameters.
    pub params: Vec<ParamEntry>,
}

/// A parameter.
#[derive(Clone, Debug, Serialize)]
pub struct ParamEntry {
    /// Its name.
    pub name: &'static str,
    /// `integer`, `number`, `boolean`, `choice` or `list`.
    pub kind: &'static str,
    /// Its default.
    pub default: Value,
    /// The accepted values, in words.
    pub accepted: String,
    /// Its documentation.
    pub doc: String,
}

/// A layer.
#[derive(Clone, Debug, Serialize)]
pub struct LayerEntry {
    /// Its id.
    pub id: &'static str,
    /// One line for people.
    pub title: &'static str,
    /// Authors and year, or the section of the survey.
    pub reference: &'static str,
    /// Parameter that names the grid of its tokens, if it folds them into one.
    pub grid: Option<&'static str>,
    /// Its weights, outputs × inputs, for hidden states of width 64 and 4 heads of width 16.
    pub weights: String,
    /// Its parameters.
    pub params: Vec<ParamEntry>,
}

/// A conversion.
#[derive(Clone, Debug, Serialize)]
pub struct ConversionEntry {
    /// Its id.
    pub id: &'static str,
    /// One line for people.
    pub title: &'static str,
    /// Authors and year, or the section of the survey.
    pub reference: &'static str,
    /// Layer it starts from.
    pub from: &'static str,
    /// Layer it ends in.
    pub to: &'static str,
    /// Its parameters.
    pub params: Vec<ParamEntry>,
}

impl Atlas {
    /// Collects the whole registry, or only one family of methods.
    pub fn new(family: Option<Family>) -> Self {
        let wanted = |m: &&&'static Method| family.is_none_or(|f| f == m.family);
        let whole = family.is_none();
        Self {
            methods: registry::METHODS.iter().filter(wanted).map(|m| MethodEntry::new(m)).collect(),
            layers: registry::LAYERS.iter().filter(|_| whole).map(|l| LayerEntry::new(l)).collect(),
            conversions: registry::CONVERSIONS
                .iter()
                .filter(|_| whole)
                .map(|c| ConversionEntry::new(c))
                .collect(),
            cache_sizes: if whole { cache_sizes() } else { Vec::new() },
        }
    }

    /// Returns a table with one line per method.
    pub fn table(&self) -> Table {
        let mut table = Table::new(&[
            "<method",
            "<family",
            "<causal",
            "<decode",
            "<exact at",
            "<needs",
            "N^",
            "<reference",
        ]);
        for m in &self.methods {
            table.push(m.line().to_vec());
        }
        table
    }

    /// Returns a table of the numbers cached per token in one layer.
    fn cache_table(&self) -> Table {
        let mut titles = vec!["<scheme", "<numbers"];
        titles.extend(SHAPES.map(|(name, _, _)| name));
        let mut table = Table::new(&titles);
        for e in &self.cache_sizes {
            let mut row = vec![e.scheme.to_owned(), e.formula.to_owned()];
            row.extend(e.numbers.iter().map(|(_, n)| n.to_string()));
            table.push(row);
        }
        table
    }

    /// Lists the families with their methods, in lines of at most `width` characters, or in full without a limit. To
    /// fit short lines, it cuts titles and leaves out references and the settings that make a method exact.
    pub fn text(&self, width: Option<usize>) -> String {
        let mut out = String::new();
        for family in Family::ALL {
            let methods: Vec<&MethodEntry> =
                self.methods.iter().filter(|m| m.family == family.name()).collect();
            if methods.is_empty() {
                continue;
            }
            let whole = self.family_table(&methods, false, usize::MAX);
            let fits = |t: &Table| width.is_none_or(|w| t.text().lines().all(|l| l.chars().count() + 2 <= w));
            let table = if fits(&whole) {
                whole
            } else {
                // The room that the other columns leave.
                let rest = self.family_table(&methods, true, 0).text();
                let used =
                    rest.lines().map(|l| l.trim_end_matches("title").chars().count()).max().unwrap_or(0);
                self.family_table(&methods, true, width.unwrap_or(80).saturating_sub(used + 3).max(9))
            };
            let _ = writeln!(out, "{}\n{}", family.name(), indent(&table.text()));
        }
        for (title, lines) in [
            ("layers", self.layers.iter().map(|l| (l.id, l.title)).collect::<Vec<_>>()),
            ("conversions", self.conversions.iter().map(|c| (c.id, c.title)).collect()),
        ] {
            if !lines.is_empty() {
                let mut table = Table::new(&["<id", "<title"]);
                let longest = lines.iter().map(|(id, _)| id.chars().count()).max().unwrap_or(0);
                let room = width.map_or(usize::MAX, |w| w.saturating_sub(longest + 4).max(9));
                lines.iter().for_each(|(id, title)| table.push(vec![id.to_string(), shorten(title, room)]));
                let _ = writeln!(out, "{title}\n{}", indent(&table.text()));
            }
        }
        if !self.cache_sizes.is_empty() {
            let _ = writeln!(out, "{CACHE_TITLE}\n{}", indent(&self.cache_table().text()));
        }
        out
    }

    /// Returns a table of a family's methods, with titles of at most `room` characters; `short` leaves columns out.
    fn family_table(&self, methods: &[&MethodEntry], short: bool, room: usize) -> Table {
        let mut table = Table::new(match short {
            true => &["<method", "<causal", "<decode", "N^", "<title"],
            false => &["<method", "<causal", "<decode", "N^", "<title", "<exact at", "<needs", "<reference"],
        });
        for m in methods {
            let [id, _, causal, decode, exact, needs, exponent, reference] = m.line();
            let mut row = vec![id, causal, decode, exponent, shorten(m.title, room)];
            if !short {
                row.extend([exact, needs, reference]);
            }
            table.push(row);
        }
        table
    }

    /// Returns the page of all methods, generated from the registry.
    pub fn markdown(&self) -> String {
        let mut out = String::from(
            "# Methods\n\nGenerated by `attlas methods --md`. *Exact at* names the parameter that makes a method equal \
             to exact\nattention bit for bit when it covers everything; *N^* is the published exponent of the length.\n",
        );
        for family in Family::ALL {
            let methods: Vec<&MethodEntry> =
                self.methods.iter().filter(|m| m.family == family.name()).collect();
            if methods.is_empty() {
                continue;
            }
            let mut table = Table::new(&[
                "<method",
                "<title",
                "<causal",
                "<decode",
                "<exact at",
                "<needs",
                "N^",
                "<reference",
            ]);
            for m in &methods {
                let mut line = m.line();
                line[0] = format!("[`{0}`](#{0})", m.id);
                line[1] = m.title.into();
                table.push(line.to_vec());
            }
            let _ = write!(out, "\n## Family {}\n\n{}", family.name(), table.markdown());
            for m in methods {
                let _ = write!(out, "\n### {}\n\n{}. {}.\n", m.id, m.title, m.reference);
                for (law, reason) in m.claims.except {
                    let _ = write!(out, "\nDoes not keep {}: {reason}.\n", word(law));
                }
                for w in m.claims.withdrawn {
                    let _ = write!(out, "\nWith {}: {}.\n", withdrawn(w), w.reason);
                }
                if !m.params.is_empty() {
                    let _ = write!(out, "\n{}", param_table(&m.params).markdown());
                }
            }
        }
        let mut section = |title: &str, entries: Vec<Described<'_>>| {
            if entries.is_empty() {
                return;
            }
            let mut table = Table::new(&["<id", "<title", "<reference"]);
            for e in &entries {
                table.push(vec![format!("`{}`", e.id), e.title.into(), e.reference.into()]);
            }
            let _ = write!(out, "\n## {title}\n\n{}", table.markdown());
            for e in entries {
                let kind = title.trim_end_matches('s').to_lowercase();
                let _ = write!(out, "\n### {kind} {}\n\n{}. {}.{}\n", e.id, e.title, e.reference, e.more);
                if !e.params.is_empty() {
                    let _ = write!(out, "\n{}", param_table(e.params).markdown());
                }
            }
        };
        section("Layers", self.layers.iter().map(LayerEntry::described).collect());
        section("Conversions", self.conversions.iter().map(ConversionEntry::described).collect());
        if !self.cache_sizes.is_empty() {
            let _ = write!(
                out,
                "\n## Cache sizes\n\nThe {CACHE_TITLE}, with $D$ the model's width, $H$ query heads, $G$ key heads of width \
                 $d$,\nlatent rank $r$ (512, or 128 for SmolLM2), rotated width $d_R = 64$, factors $R_K = R_V = 2$. Values count as \
                 wide as keys.\nMHA in the shape of a model with groups is that model without them.\n\n{}",
                self.cache_table().markdown()
            );
        }
        out
    }
}

/// Returns the SHA-256 of every method's claims and parameters, which distinguishes results of different registries.
pub fn fingerprint() -> String {
    let methods: Vec<MethodEntry> = registry::METHODS.iter().map(|m| MethodEntry::new(m)).collect();
    // An entry that cannot be serialised still has a name and defaults.
    let text = serde_json::to_string(&methods).unwrap_or_else(|_| format!("{methods:?}"));
    crate::hash::sha256(text.as_bytes())
}

const CACHE_TITLE: &str = "numbers that a layer caches for a token";

fn param_table(params: &[ParamEntry]) -> Table {
    let mut table = Table::new(&["<parameter", "<default", "<accepted", "<meaning"]);
    for p in params {
        let name = format!("`{}`", p.name);
        table.push(vec![name, p.default.to_string(), p.accepted.clone(), p.doc.clone()]);
    }
    table
}

fn param_text(params: &[ParamEntry]) -> String {
    let mut out = String::from("\nparameters\n");
    if params.is_empty() {
        out += "  none\n";
    }
    for p in params {
        out += &wrapped(&format!("{} = {} ({})", p.name, p.default, p.accepted), 2, 6);
        out += &wrapped(&p.doc, 6, 6);
    }
    out
}

/// Text of a page about a layer or a conversion.
struct Described<'a> {
    id: &'a str,
    title: &'a str,
    reference: &'a str,
    more: String,
    params: &'a [ParamEntry],
}

impl Described<'_> {
    fn text(&self) -> String {
        let mut out = format!("{}: {}\n", self.id, self.title);
        out += &wrapped(&format!("reference {}", self.reference), 2, 4);
        if !self.more.is_empty() {
            out += &wrapped(&self.more, 2, 4);
        }
        out + &param_text(self.params)
    }
}

fn shorten(text: &str, room: usize) -> String {
    if text.chars().count() <= room {
        return text.into();
    }
    text.chars().take(room.saturating_sub(1)).collect::<String>() + "…"
}

fn indent(text: &str) -> String {
    text.lines().map(|l| format!("  {l}\n")).collect()
}

fn word(value: impl Serialize) -> String {
    serde_json::to_value(value).ok().and_then(|v| v.as_str().map(|s| s.replace('_', " "))).unwrap_or_default()
}

/// Describes a setting and the promise that it withdraws, such as `map = trig it does not promise unbiased`.
fn withdrawn(w: &Withdrawn) -> String {
    let Withdrawn { param, value, promise, .. } = w;
    let setting = match *value {
        "*" => format!("{param} off its default"),
        v if v.starts_with(['<', '>', '!']) => format!("{param} {v}"),
        v => format!("{param} = {v}"),
    };
    let promise = match promise {
        Promise::Law(law) => word(law),
        other => word(other),
    };
    format!("{setting} it does not promise {promise}")
}

fn params(specs: &[ParamSpec]) -> Vec<ParamEntry> {
    specs
        .iter()
        .map(|p| ParamEntry {
            name: p.name,
            kind: p.kind,
            default: (p.default)(),
            accepted: (p.accepted)(),
            doc: p.doc.split_whitespace().collect::<Vec<_>>().join(" "),
        })
        .collect()
}

impl MethodEntry {
    /// Describes the registry entry `m`.
    pub fn new(m: &'static Method) -> Self {
        Self {
            id: m.id,
            family: m.family.name(),
            title: m.title,
            reference: m.reference,
            claims: m.claims,
            params: params(m.params),
        }
    }

    fn line(&self) -> [String; 8] {
        let yes = |b: bool| if b { "yes" } else { "no" }.to_string();
        let exact: Vec<&str> = self.claims.exact_at.iter().map(|e| e.0).collect();
        [
            self.id.into(),
            self.family.into(),
            yes(self.claims.causal),
            yes(self.claims.decode),
            if exact.is_empty() { "-".into() } else { exact.join(",") },
            needs(self.claims.needs).into(),
            format!("{}", self.claims.exponent),
            self.reference.into(),
        ]
    }

    /// Returns the full description of the method, wrapped to 80 columns.
    pub fn text(&self) -> String {
        let c = &self.claims;
        let yes = |b: bool| if b { "yes" } else { "no" };
        let mut out = format!("{}: {}\n", self.id, self.title);
        let mut facts = Table::new(&["<", "<"]);
        let mut fact = |name: &str, value: String| facts.push(vec![name.into(), value]);
        fact("family", self.family.into());
        fact("reference", self.reference.into());
        fact("approximates softmax", yes(c.softmax).into());
        fact("causal", yes(c.causal).into());
        fact("decodes token by token", yes(c.decode).into());
        fact("has a gradient", yes(c.gradient).into());
        fact("needs", needs(c.needs).into());
        fact("time grows as", format!("N^{}", c.exponent));
        fact("random", yes(!c.deterministic).into());
        fact("weights sum to one", yes(c.row_stochastic).into());
        fact("normaliser unbiased", yes(c.unbiased).into());
        fact("gives log-sum-exp", yes(c.lse).into());
        fact("on several processes", c.spread.name().unwrap_or("no").into());
        for (param, budget) in c.exact_at {
            let value = match budget {
                Budget::NumKeys => "at least the number of keys".to_string(),
                Budget::NumTokens => "at least the number of tokens".to_string(),
                Budget::Value(x) => x.to_string(),
            };
            fact("exact bit for bit at", format!("{param} = {value}"));
        }
        // The table's empty title line is dropped.
        out += &indent(facts.text().trim_start_matches('\n'));
        for (law, reason) in c.except {
            out += &wrapped(&format!("does not keep {}: {reason}", word(law)), 2, 4);
        }
        if let Spread::Refused { reason } = c.spread {
            out += &wrapped(&format!("not on several processes: {reason}"), 2, 4);
        }
        for w in c.withdrawn {
            out += &wrapped(&format!("with {}: {}", withdrawn(w), w.reason), 2, 4);
        }
        out + &param_text(&self.params)
    }
}

fn needs(needs: Needs) -> &'static str {
    match needs {
        Needs::Nothing => "nothing",
        Needs::Calibration => "calibration",
        Needs::Training => "training",
    }
}

/// Describes the value at which a method is exact.
pub(crate) fn covering(budget: Budget) -> String {
    match budget {
        Budget::NumKeys => "num_keys".into(),
        Budget::NumTokens => "num_tokens".into(),
        Budget::Value(x) => x.to_string(),
    }
}

/// Wraps words to lines of at most 79 characters.
fn wrapped(text: &str, first: usize, rest: usize) -> String {
    let mut out = " ".repeat(first);
    let mut used = first;
    for (i, word) in text.split_whitespace().enumerate() {
        let len = word.chars().count();
        if i > 0 && used + 1 + len > 79 {
            out += "\n";
            out += &" ".repeat(rest);
            used = rest;
        } else if i > 0 {
            out.push(' ');
            used += 1;
        }
        out += word;
        used += len;
    }
    out + "\n"
}

/// Returns settings under which a layer fits heads of width 16: steps of 8 × 8 numbers have heads of 4 × 4, and at most
/// half of a head is rotated.
pub(crate) fn example_options(kind: &'static LayerKind) -> Options {
    let known = |name: &str| kind.params.iter().any(|p| p.name == name);
    let fitting = [("head", "4x4"), ("rope_dim", "8")].into_iter().filter(|(name, _)| known(name));
    fitting.fold(Options::new(), |options, (name, value)| options.with(name, value))
}

/// Describes the weights of a layer in a small example: `q 64 × 64` and so on.
fn example_weights(kind: &'static LayerKind) -> String {
    let shape = LayerShape { d_model: 64, n_heads: 4, n_kv_heads: 4, d: 16, d_v: 16 };
    match (kind.weights)(&shape, &example_options(kind)) {
        Ok(specs) => specs
            .iter()
            .map(|w| {
                format!("{} {} × {}{}", w.name, w.n_out, w.n_in, if w.optional { " (optional)" } else { "" })
            })
            .collect::<Vec<_>>()
            .join(", "),
        Err(e) => e.to_string(),
    }
}

impl LayerEntry {
    /// Describes the registry entry `l`.
    pub fn new(l: &'static LayerKind) -> Self {
        Self {
            id: l.id,
            title: l.title,
            reference: l.reference,
            grid: l.grid,
            weights: example_weights(l),
            params: params(l.params),
        }
    }

    fn described(&self) -> Described<'_> {
        let Self { id, title, reference, grid, weights, params } = self;
        let fold = grid.map_or(String::new(), |name| {
            format!(" Its tokens stand on a grid, `{name}`, which `attlas layer` takes from the shape of the input.")
        });
        let more = format!(
            "{fold} Input and output: `[tokens, width]`. Weights, outputs × inputs, for width 64 and 4 heads of width 16: \
             {weights}."
        );
        Described { id, title, reference, more, params }
    }

    /// Returns the full description of the layer, wrapped to 80 columns.
    pub fn text(&self) -> String {
        self.described().text()
    }
}

impl ConversionEntry {
    fn described(&self) -> Described<'_> {
        let Self { id, title, reference, from, to, params } = self;
        Described { id, title, reference, more: format!(" From `{from}` to `{to}`."), params }
    }

    /// Returns the full description of the conversion, wrapped to 80 columns.
    pub fn text(&self) -> String {
        self.described().text()
    }

    /// Describes the registry entry `c`.
    pub fn new(c: &'static Conversion) -> Self {
        let Conversion { id, title, reference, params: p, from, to, .. } = *c;
        Self { id, title, reference, from, to, params: params(p) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_method_is_on_every_page_within_80_columns() {
        let atlas = Atlas::new(None);
        let (text, markdown) = (atlas.text(Some(80)), atlas.markdown());
        assert_eq!(atlas.methods.len(), registry::METHODS.len());
        for m in registry::METHODS {
            assert!(text.contains(m.id) && markdown.contains(&format!("### {}\n", m.id)), "{}", m.id);
            let page = MethodEntry::new(m).text();
            assert!(m.params.iter().all(|p| page.contains(p.name)), "{page}");
            for line in text.lines().chain(page.lines()) {
                assert!(line.chars().count() < 80 || line.contains(m.title), "{line}");
            }
        }
    }

    #[test]
    fn every_layer_and_conversion_is_on_every_page() {
        let atlas = Atlas::new(None);
        let (text, markdown) = (atlas.text(Some(80)), atlas.markdown());
        let check = |kind: &str, id: &str, page: String, params: &[ParamSpec]| {
            assert!(text.contains(id) && markdown.contains(&format!("### {kind} {id}\n")), "{id}");
            assert!(params.iter().all(|p| page.contains(p.name)), "{page}");
            assert!(page.lines().skip(1).all(|l| l.chars().count() < 80), "{page}");
        };
        for l in registry::LAYERS {
            check("layer", l.id, LayerEntry::new(l).text(), l.params);
            assert!(example_weights(l).contains('×'), "{}: {}", l.id, example_weights(l));
        }
        for c in registry::CONVERSIONS {
            check("conversion", c.id, ConversionEntry::new(c).text(), c.params);
        }
    }

    #[test]
    fn records_hold_claims_and_parameters() {
        let entry = MethodEntry::new(registry::method("sink_window").unwrap());
        let json = serde_json::to_value(&entry).unwrap();
        assert_eq!(json["claims"]["exact_at"][0]["value"], "num_tokens");
        assert_eq!(json["claims"]["except"][0]["law"], "key_order");
        assert_eq!(json["params"][1]["default"], 512);
        assert!(json["params"][0]["doc"].as_str().unwrap().starts_with("Keys at the start"));
    }

    #[test]
    fn a_family_stands_alone() {
        let atlas = Atlas::new(Some(Family::Exact));
        assert!(atlas.methods.iter().all(|m| m.family == "exact") && atlas.layers.is_empty());
    }
}
