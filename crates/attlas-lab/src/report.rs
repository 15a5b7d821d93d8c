//! Everything that was found about a model's attention as one page: structure, spectra, error against time, the recipe, the
//! methods, and how to make it again. It opens from disk, loads nothing, and works from the keyboard; a small script
//! filters families and reads out what has the focus, and without it everything is still there.

use crate::atlas::MethodEntry;
use crate::compare::Comparison;
use crate::figures::{Cell, grid};
use crate::html::{STYLE, colour, escape, plot, table_rows};
use crate::inspect::{CAPTION, Inspection, MAP_STYLE};
use crate::table::{Table, number, percent, seconds, times};
use attlas::registry;
use attlas_model::Recipe;
use std::fmt::Write;

/// What a report is made of.
#[derive(Debug)]
pub struct Report<'a> {
    /// What heads look like.
    pub inspection: &'a Inspection,
    /// What methods do on them.
    pub comparison: &'a Comparison,
    /// The name and content of a recipe.
    pub recipe: Option<(&'a str, &'a Recipe)>,
    /// Commands that make the report and its parts again.
    pub commands: &'a [String],
}

const PAGE_STYLE: &str = "nav{display:flex;flex-wrap:wrap;gap:.25rem 1rem}h2{margin-top:2.5rem}#tip{position:sticky;bottom:0;\
min-height:1.5em;margin:0;padding:.25rem;background:Canvas;font-variant-numeric:tabular-nums}fieldset{border:0;padding:0;\
display:flex;flex-wrap:wrap;gap:.25rem 1rem}pre{overflow-x:auto}.cards{display:grid;gap:.25rem}:focus-visible{outline:2px solid \
#0072b2}.point:focus circle{stroke:currentColor;stroke-width:3}@media print{nav,#tip,fieldset{display:none}h2{break-after:\
avoid}figure,svg{break-inside:avoid}}";

const SCRIPT: &str = include_str!("report.js");

impl Report<'_> {
    /// The page.
    pub fn page(&self) -> String {
        let mut parts: Vec<(&str, &str, String)> = vec![
            ("overview", "Overview", self.overview()),
            ("structure", "Structure", self.structure()),
            ("front", "Error against time", self.front()),
        ];
        if let Some((name, recipe)) = self.recipe {
            parts.push(("recipe", "Recipe", self.recipe(name, recipe)));
        }
        parts.push(("heads", "Patterns and spectra", self.heads()));
        parts.push(("methods", "Methods", self.methods()));
        parts.push(("again", "Make it again", self.again()));
        let links: String =
            parts.iter().map(|(id, name, _)| format!("<a href=\"#{id}\">{name}</a>")).collect();
        let body: String = parts
            .iter()
            .map(|(id, name, text)| format!("<section id=\"{id}\"><h2>{name}</h2>\n{text}</section>\n"))
            .collect();
        format!(
            "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
             <meta name=\"viewport\" content=\"width=device-width\">\n<title>attlas: {source}</title>\n\
             <style>{STYLE}{MAP_STYLE}{PAGE_STYLE}</style></head><body>\n<h1>Attention of {source}</h1>\n\
             <nav aria-label=\"sections\">{links}</nav>\n{body}<p id=\"tip\" role=\"status\"></p>\n\
             <script>{SCRIPT}</script>\n</body></html>\n",
            source = escape(&self.comparison.source),
        )
    }

    fn overview(&self) -> String {
        let (i, c) = (self.inspection, self.comparison);
        let mut table = Table::new(&["<what", "<value"]);
        let mut line = |what: &str, value: String| table.push(vec![what.into(), value]);
        line(
            "heads",
            format!("{} looked at, {} compared, mask {}", i.heads.len(), c.exact.heads.len(), c.mask),
        );
        if let Some(h) = i.heads.first() {
            line("tokens and width", format!("{} and {}", h.report.n_k, h.report.d));
        }
        line("sinks", format!("{} of the heads have one at their first key", percent(i.first_key_sinks)));
        line(
            "exact attention",
            format!("{} for all heads, {} GF/s", seconds(c.exact.run_seconds), number(c.exact.gflops)),
        );
        for limit in [0.01, 0.1] {
            let within = c.summary.iter().filter(|s| s.family != "baseline" && s.rel_fro.mean <= limit);
            let fastest = within.max_by(|a, b| a.speedup.total_cmp(&b.speedup));
            let text = fastest.map_or("none".into(), |s| {
                format!(
                    "{}, {} of exact attention's speed, error {}",
                    s.method,
                    times(s.speedup),
                    number(s.rel_fro.mean)
                )
            });
            line(if limit < 0.05 { "fastest within 1 %" } else { "fastest within 10 %" }, text);
        }
        for (name, value) in &c.metadata {
            line(name, value.clone());
        }
        format!("<table>{}</table>\n{}", table_rows(&table), i.skipped_list())
    }

    fn structure(&self) -> String {
        let maps = self.inspection.maps().into_iter();
        let maps: String = maps
            .map(|(name, svg)| format!("<figure><figcaption>{name}</figcaption>{svg}</figure>"))
            .collect();
        format!(
            "<p>Layers go down, heads across.</p><div class=\"maps\">{maps}</div>\n<table>{}</table>\n<p>{}</p>",
            table_rows(&self.inspection.table()),
            escape(&self.inspection.legend())
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
                    "<label><input type=\"checkbox\" checked data-filter=\"{f}\"> <span style=\"color:{}\">●</span> {f}</label>",
                    colour(f)
                )
            })
            .collect();
        format!(
            "<fieldset aria-label=\"families shown\">{boxes}</fieldset>\n{}\n<p>Relative Frobenius error and seconds of set-up \
             and run, both axes logarithmic. The line joins the methods shown that no other of them beats in both; the dashed one \
             is exact attention.</p>\n<table>{}</table>",
            plot(c),
            table_rows(&c.table())
        )
    }

    fn recipe(&self, name: &str, recipe: &Recipe) -> String {
        let size = |key: &str| self.comparison.metadata.get(key).and_then(|n| n.parse::<usize>().ok());
        let most = |pick: fn(&attlas_model::recipe::Rule) -> &Option<attlas_model::recipe::Numbers>| {
            let numbers = recipe.rules.iter().filter_map(|r| pick(r).as_ref()).flat_map(|n| n.iter().last());
            numbers.max().map_or(1, |n| n + 1)
        };
        let layers = size("model_layers").unwrap_or(0).max(most(|r| &r.layers));
        let heads = size("model_heads").unwrap_or(0).max(most(|r| &r.heads));
        let exact = registry::baseline().id;
        let mut cells = Vec::new();
        for layer in 0..layers {
            for head in 0..heads {
                let (method, params) = recipe.choice(layer, head);
                let value = if method == exact { 0.0 } else { 1.0 };
                cells.push(Cell {
                    layer,
                    head,
                    value,
                    label: format!("{method} {params}").trim().to_string(),
                });
            }
        }
        let family = |c: &Cell| {
            let id = c.label.split(' ').next().unwrap_or_default();
            registry::method(id).map_or("baseline", |m| m.family.name())
        };
        let changed = cells.iter().filter(|c| c.value > 0.0).count();
        let fill = |c: &Cell| match (c.value > 0.0, family(c)) {
            (false, _) => "#8883".to_string(),
            // A yardstick of the exact family is not exact attention.
            (true, "exact") => "#e69f00".to_string(),
            (true, family) => colour(family).to_string(),
        };
        let map =
            grid(
                "method of each head",
                &cells,
                fill,
                |c| if c.value > 0.0 { "#fff" } else { "currentColor" },
            );
        let mut rules = Table::new(&["<layers", "<heads", "<method", "<set", "error", "time"]);
        for r in &recipe.rules {
            let all = |n: &Option<attlas_model::recipe::Numbers>| {
                n.as_ref().map_or("all".into(), ToString::to_string)
            };
            let figure = |f: Option<f64>, show: fn(f64) -> String| f.map_or("-".into(), show);
            rules.push(vec![
                all(&r.layers),
                all(&r.heads),
                r.method.clone(),
                r.params.to_string(),
                figure(r.measured.and_then(|m| m.error), number),
                figure(r.measured.and_then(|m| m.cost), percent),
            ]);
        }
        let mut evidence = Table::new(&["<measured on text that was not used for tuning", "<value"]);
        for (name, value) in &recipe.evidence {
            evidence.push(vec![name.clone(), value.to_string()]);
        }
        let evidence = if recipe.evidence.is_empty() {
            String::new()
        } else {
            format!("<table>{}</table>", table_rows(&evidence))
        };
        format!(
            "<p>{}: {changed} of {} heads do not have exact attention. Grey is exact attention, orange a yardstick, other colours \
             the families above.</p>\n{map}\n{evidence}\n<table>{}</table>",
            escape(name),
            cells.len(),
            table_rows(&rules)
        )
    }

    fn heads(&self) -> String {
        format!("<p>{CAPTION}</p>\n{}", self.inspection.sections())
    }

    fn methods(&self) -> String {
        let mut out = String::from("<div class=\"cards\">");
        let ids = self.comparison.summary.iter().map(|s| s.method);
        for method in ids.filter_map(|id| registry::method(id).ok()) {
            let _ = write!(
                out,
                "<details><summary><b>{}</b> {} ({})</summary><pre>{}</pre></details>",
                escape(method.id),
                escape(method.title),
                escape(method.reference),
                escape(&MethodEntry::new(method).text())
            );
        }
        let refused: String = self
            .comparison
            .refused
            .iter()
            .map(|r| format!("<li>{}: {}</li>", escape(r.method), escape(&r.reasons.join("; "))))
            .collect();
        out += "</div>";
        if refused.is_empty() { out } else { format!("{out}<h3>Refused</h3><ul>{refused}</ul>") }
    }

    fn again(&self) -> String {
        let c = self.comparison;
        let commands: String = self.commands.iter().map(|line| escape(line) + "\n").collect();
        format!(
            "<pre>{commands}</pre><p>attlas {}, {}, {} threads, {} seeds from {}.</p>",
            env!("CARGO_PKG_VERSION"),
            escape(&c.isa),
            c.threads,
            c.seeds,
            c.seed
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::select::Choice;
    use std::sync::atomic::AtomicBool;

    #[test]
    fn one_page_holds_everything_and_loads_nothing() {
        let workload =
            "synthetic:clustered,n=64,d=8,heads=2".parse::<crate::Source>().unwrap().load().unwrap();
        let stop = AtomicBool::new(false);
        let inspection =
            crate::inspect::inspect(&workload, &Default::default(), &mut |_, _, _| (), &stop).unwrap();
        let methods = vec!["top_k".into(), "performer".into()];
        let set = vec!["top_k.keys=8".into()];
        let selection = Choice { methods, set, family: None }.resolve().unwrap();
        let comparison =
            crate::compare::compare(&workload, &selection, &Default::default(), &mut |_| (), &stop).unwrap();
        let recipe = Recipe::from_toml(
            "version = 1\n[evidence]\nkl_mean = 0.5\n[[rule]]\nlayers = \"1\"\nheads = \"0-1\"\nmethod = \"hyper\"\n",
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
        assert!(!page.contains("http") && !page.contains(" src="), "nothing is loaded");
        for id in ["overview", "structure", "front", "recipe", "heads", "methods", "again"] {
            assert!(
                page.contains(&format!("<section id=\"{id}\">")) && page.contains(&format!("href=\"#{id}\""))
            );
        }
        assert!(page.contains("data-filter=\"kernel\"") && page.contains("data-family=\"kernel\""));
        assert!(page.contains("2 of 4 heads do not have exact attention"));
        assert!(page.contains("<td>kl_mean</td><td>0.5</td>"));
        assert!(page.contains("attlas report 'a &lt;b&gt;'") && !page.contains("<b>'"));
        let opened = page.matches("<svg").count();
        assert_eq!((opened, page.matches("</svg>").count()), (6 + 1 + 1 + 2, opened));
        let without = Report { recipe: None, ..report }.page();
        assert!(!without.contains("id=\"recipe\""));
    }
}
