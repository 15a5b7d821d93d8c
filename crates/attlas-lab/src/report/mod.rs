//! Report on a model's attention as one page: structure, spectra, error against time, the recipe, the methods, and the
//! commands that reproduce it.
//!
//! The page opens from disk and loads nothing: it contains Observable Plot and d3, the data as JSON, and a script
//! (`assets/report.js`) that draws the figures, filters families, moves through cells and points with the arrow keys
//! and announces the one with the focus. Every number of a figure is also in a table, which needs no script. Colours
//! follow the reader's choice of light or dark; in print, controls are left out and everything is expanded.

mod cards;
mod data;
mod recipe;

use crate::compare::{Comparison, Summary};
use crate::html::{escape, origin, table_rows};
use crate::inspect::Inspection;
use crate::table::{Table, count, number, percent, seconds, times};
use attlas::registry;
use attlas_model::Recipe;
use cards::Cards;
use recipe::RecipeMap;
use std::fmt::Write;

/// Contents of a report.
#[derive(Debug)]
pub struct Report<'a> {
    /// Structure of the heads.
    pub inspection: &'a Inspection,
    /// Comparison of methods on them.
    pub comparison: &'a Comparison,
    /// The name and content of a recipe.
    pub recipe: Option<(&'a str, &'a Recipe)>,
    /// Commands that reproduce the report and its parts.
    pub commands: &'a [String],
}

const STYLE: &str = include_str!("../../assets/report.css");
const SCRIPT: &str = include_str!("../../assets/report.js");
/// d3 7.9, ISC licence (`assets/d3.LICENSE`).
const D3: &str = include_str!("../../assets/d3.min.js");
/// Observable Plot 0.6, ISC licence (`assets/plot.LICENSE`).
const PLOT: &str = include_str!("../../assets/plot.umd.min.js");

impl Report<'_> {
    /// Returns the page.
    pub fn page(&self) -> String {
        let recipe = self.recipe.map(|(name, r)| RecipeMap::new(name, r, &self.comparison.metadata));
        let mut parts: Vec<(&str, &str, String)> = vec![
            ("overview", "Overview", self.overview(recipe.as_ref())),
            ("structure", "Structure", self.structure()),
            ("spectra", "Spectra", self.spectra()),
            ("front", "Error and cost", self.front()),
        ];
        if let Some(recipe) = &recipe {
            parts.push(("recipe", "Recipe", recipe.section()));
        }
        parts.push(("methods", "Methods", self.methods()));
        parts.push(("again", "Make it again", self.again()));
        let links: String =
            parts.iter().map(|(id, name, _)| format!("<a href=\"#{id}\">{name}</a>")).collect();
        let body: String = parts
            .iter()
            .map(|(id, name, text)| format!("<section id=\"{id}\"><h2>{name}</h2>\n{text}</section>\n"))
            .collect();
        // Only `</` could end a script element early.
        let data = data::data(self, recipe.as_ref()).to_string().replace("</", "<\\/");
        format!(
            "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
             <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n<title>attlas: {source}</title>\n\
             <style>{STYLE}</style></head><body>\n<a class=\"skip\" href=\"#overview\">Skip to the content</a>\n\
             <header><div><h1>Attention, inside and faster</h1><p>{origin}</p></div>\
             <button id=\"theme\" type=\"button\">Dark</button></header>\n<nav aria-label=\"Sections\">{links}</nav>\n\
             <main>\n<noscript><p>Figures need a script; all numbers are in the tables.</p></noscript>\n{body}</main>\n\
             <script type=\"application/json\" id=\"data\">{data}</script>\n<script>{D3}</script>\n<script>{PLOT}</script>\n\
             <script>{SCRIPT}</script>\n</body></html>\n",
            source = escape(&self.comparison.source),
            origin = escape(&origin(&self.comparison.source, &self.comparison.metadata)),
        )
    }

    fn overview(&self, recipe: Option<&RecipeMap<'_>>) -> String {
        let (i, c) = (self.inspection, self.comparison);
        let mut tiles: Vec<(String, String)> = Vec::new();
        tiles.extend(recipe.and_then(RecipeMap::headline));
        for (limit, words) in [(0.01, "1 %"), (0.1, "10 %")] {
            let whole = |s: &Summary| s.heads == c.exact.heads.len() && !s.fell_back();
            let faster = |s: &&Summary| s.family != "baseline" && s.speedup > 1.0 && whole(s);
            let within = c.summary.iter().filter(faster).filter(|s| s.rel_fro.mean <= limit);
            tiles.push(match within.max_by(|a, b| a.speedup.total_cmp(&b.speedup)) {
                Some(s) => (
                    times(s.speedup),
                    format!(
                        "speed of {}, the fastest within {words} of error ({})",
                        s.method,
                        number(s.rel_fro.mean)
                    ),
                ),
                None => (
                    "none".into(),
                    format!("of the methods is faster within {words} of error at these settings"),
                ),
            });
        }
        let sinks = format!(
            "of the heads have a sink at their first key: half of the rows give it over {} times a uniform weight",
            i.settings.sink
        );
        tiles.push((percent(i.first_key_sinks), sinks));
        let mean = |f: &dyn Fn(&crate::inspect::Inspected) -> f64| {
            i.heads.iter().map(f).sum::<f64>() / i.heads.len().max(1) as f64
        };
        let keys = mean(&|h| h.report.weights.keys_for_mass[0].keys.mean);
        tiles.push((number(keys), "keys hold 90 % of a row, on average".into()));
        tiles.push((
            seconds(c.exact.run_seconds),
            format!(
                "for exact attention on {}, {} GF/s",
                count(c.exact.heads.len(), "head"),
                number(c.exact.gflops)
            ),
        ));
        let tiles: String = tiles
            .iter()
            .map(|(value, what)| {
                format!("<div class=\"tile\"><b>{}</b><span>{}</span></div>", escape(value), escape(what))
            })
            .collect();
        let mut table = Table::new(&["<what", "<value"]);
        let mut line = |what: &str, value: String| table.push(vec![what.into(), value]);
        line("source", c.source.clone());
        line(
            "heads",
            format!("{} looked at, {} compared, mask {}", i.heads.len(), c.exact.heads.len(), c.mask),
        );
        if let Some(h) = i.heads.first() {
            line("tokens and width", format!("{} and {}", h.report.n_k, h.report.d));
        }
        for (name, value) in &c.metadata {
            line(name, value.clone());
        }
        format!(
            "<p class=\"verdict\">{}</p>\n<div class=\"tiles\">{tiles}</div>\n<details><summary>What was read</summary><div class=\"wide\"><table>{}</table>\
             </div></details>\n{}",
            escape(&self.said()),
            table_rows(&table),
            i.skipped_list()
        )
    }

    /// Returns a summary in words.
    fn said(&self) -> String {
        let c = self.comparison;
        let left = (c.exact.heads.len() < c.heads).then(|| {
            format!(
                " Compared on {} of {} heads, which all methods finished in time.",
                c.exact.heads.len(),
                c.heads
            )
        });
        let fell_back = c.fallbacks().map_or(String::new(), |f| format!(" {f}"));
        format!("{}{fell_back}{}", c.verdict, left.unwrap_or_default())
    }

    fn structure(&self) -> String {
        format!(
            "<p>Layers go down, heads across. Arrow keys move through a map, Enter shows the head below.</p>\n\
             <div id=\"maps\" class=\"maps\"></div>\n<p class=\"status\" id=\"map-status\" role=\"status\"></p>\n\
             <details><summary>All figures</summary><div class=\"wide\"><table>{}</table></div><p>{}</p>\
             <div class=\"wide\"><table>{}</table></div><p>Mean mass of a row that its largest weights hold.</p></details>",
            table_rows(&self.inspection.table()),
            escape(&self.inspection.legend()),
            table_rows(&self.inspection.mass_table()),
        )
    }

    fn spectra(&self) -> String {
        let mut options = String::new();
        for (i, h) in self.inspection.heads.iter().enumerate() {
            let _ = write!(options, "<option value=\"{i}\">{}</option>", h.name());
        }
        format!(
            "<div class=\"controls\"><label>Head <select id=\"head\">{options}</select></label>\
             <button type=\"button\" id=\"before\">Previous</button><button type=\"button\" id=\"after\">Next</button></div>\n\
             <div id=\"head-view\" class=\"head-view\"></div>\n<p>Patterns are rows of Z⁻¹A, first tokens at the top left: the \
             leading block over each row's largest weight, and the whole averaged over blocks, both on a logarithmic scale of \
             four decades. Singular values are divided by the largest; A is the exponential of the scores and Z⁻¹A has rows \
             that sum to one.</p>"
        )
    }

    fn front(&self) -> String {
        let c = self.comparison;
        let mut families: Vec<&str> = Vec::new();
        for s in &c.summary {
            if !families.contains(&s.family) {
                families.push(s.family);
            }
        }
        let boxes: String = families
            .iter()
            .map(|f| {
                format!(
                    "<label><input type=\"checkbox\" checked data-filter=\"{f}\"><span class=\"dot {f}\"></span>{}</label>",
                    f.replace('_', " ")
                )
            })
            .collect();
        format!(
            "<div class=\"controls\"><fieldset><legend>Families</legend>{boxes}</fieldset>\
             <label>Cost <select id=\"cost\"><option value=\"seconds\">time</option><option value=\"bytes\">memory</option>\
             <option value=\"keys\">scores computed</option></select></label>\
             </div>\n<figure id=\"pareto\" class=\"plot\"></figure>\n\
             <p class=\"status\" id=\"front-status\" role=\"status\"></p>\n\
             <p>Relative Frobenius error of outputs against exact attention, mean over heads, bars from the best to the worst; \
             cost of all heads together, set-up included; both axes logarithmic, an error of zero on the lowest line. The line \
             joins what nothing beats in both, exact attention and the mean of the values included; the dashed one is exact \
             attention. Rings are methods whose settings cover everything at this length: they computed exact attention.</p>\n\
             <div class=\"wide\"><table id=\"methods-table\">{}</table></div>",
            table_rows(&c.table()),
        )
    }

    fn methods(&self) -> String {
        let cards = Cards::new();
        let ids = self.comparison.summary.iter().map(|s| s.method);
        let body: String =
            ids.filter_map(|id| registry::method(id).ok()).map(|method| cards.html(method)).collect();
        let mut reported: Vec<(&str, &[String])> = Vec::new();
        for r in &self.comparison.refused {
            if !reported.contains(&(r.method, &r.reasons)) {
                reported.push((r.method, &r.reasons));
            }
        }
        let refused: String = reported
            .iter()
            .map(|(id, reasons)| format!("<li><b>{}</b>: {}</li>", escape(id), escape(&reasons.join("; "))))
            .collect();
        let cards = format!("<div class=\"cards\">{body}</div>");
        if refused.is_empty() { cards } else { format!("{cards}<h3>Cannot do this</h3><ul>{refused}</ul>") }
    }

    fn again(&self) -> String {
        let c = self.comparison;
        let commands: String = self.commands.iter().map(|line| escape(line) + "\n").collect();
        format!(
            "<pre>{commands}</pre><p>attlas {}, {} kernels, {}, {}/{}; {} from {}. Drawn with d3 7.9 and \
             Observable Plot 0.6.</p>",
            env!("CARGO_PKG_VERSION"),
            escape(&c.isa),
            count(c.threads, "thread"),
            std::env::consts::OS,
            std::env::consts::ARCH,
            count(c.seeds, "seed"),
            c.seed
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::Run;
    use crate::select::Choice;

    #[test]
    fn one_page_holds_everything_and_loads_nothing() {
        let workload =
            "synthetic:clustered,n=64,d=8,heads=2".parse::<crate::Source>().unwrap().load().unwrap();
        let looking = Default::default();
        let inspection = Run::silent(0, 0, |run| crate::inspect::inspect(&workload, &looking, run)).unwrap();
        let methods = vec!["top_k".into(), "performer".into()];
        let set = vec!["top_k.keys=8".into()];
        let selection = Choice { methods, set, family: None }.resolve().unwrap();
        let settings = Default::default();
        let comparison =
            Run::silent(0, 0, |run| crate::compare::compare(&workload, &selection, &settings, run)).unwrap();
        let recipe = Recipe::from_toml(
            "version = 1\n[evidence]\nkl_mean = 0.5\nppl = 12.0\nexact_ppl = 10.0\nseconds = 1.0\nexact_seconds = 2.0\n\
             [[rule]]\nlayers = \"1\"\nheads = \"0-1\"\nmethod = \"hyper\"\n",
        )
        .unwrap();
        let commands = ["attlas report 'a <b>'".to_string()];
        let report = Report {
            inspection: &inspection,
            comparison: &comparison,
            recipe: Some(("r.toml", &recipe)),
            commands: &commands,
        };
        let page = report.page();
        assert!(page.starts_with("<!doctype html>") && page.ends_with("</html>\n"));
        let own = page.replace(D3, "").replace(PLOT, "");
        assert!(
            !own.contains("http") && !own.contains(" src=") && !own.contains("<link"),
            "nothing is loaded"
        );
        for id in ["overview", "structure", "spectra", "front", "recipe", "methods", "again"] {
            assert!(
                page.contains(&format!("<section id=\"{id}\">")) && page.contains(&format!("href=\"#{id}\""))
            );
        }
        assert!(page.contains("data-filter=\"kernel\"") && page.contains("id=\"card-performer\""));
        assert!(page.contains("2 of 4 heads do not have exact attention"));
        assert!(page.contains("<td>perplexity</td><td>10.000</td><td>12.000</td>"));
        assert!(page.contains("perplexity +20.00 %"), "the headline");
        assert!(page.contains("attlas report 'a &lt;b&gt;'") && !page.contains("<b>'"));
        let data = page.split("id=\"data\">").nth(1).unwrap().split("</script>").next().unwrap();
        let data: serde_json::Value = serde_json::from_str(data).unwrap();
        assert_eq!(data["heads"].as_array().unwrap().len(), 2);
        assert_eq!(data["recipe"]["cells"].as_array().unwrap().len(), 4);
        assert_eq!(data["methods"].as_array().unwrap().len(), 3);
        // The page draws the front that the table marks.
        let on: Vec<&str> =
            data["fronts"]["seconds"].as_array().unwrap().iter().filter_map(|v| v.as_str()).collect();
        let marked = comparison.summary.iter().filter(|s| s.front).map(|s| s.method);
        assert_eq!(on, std::iter::once("exact").chain(marked).collect::<Vec<_>>());
        assert!(page.contains(&escape(&comparison.verdict)) && page.contains(&crate::machine::date()));
        assert_eq!(page.matches("<script").count(), page.matches("</script>").count());
        let without = Report { recipe: None, ..report }.page();
        assert!(!without.contains("id=\"recipe\""));
    }
}
