//! The method of each head of a model in a recipe, and its effect on the model.

use crate::html::{escape, table_rows};
use crate::table::{Table, number, percent, seconds, times};
use attlas::params::Value as Setting;
use attlas::registry;
use attlas_model::Recipe;
use attlas_model::recipe::{Numbers, Rule};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// A recipe spread out over layers and heads.
pub(super) struct RecipeMap<'a> {
    name: &'a str,
    recipe: &'a Recipe,
    layers: usize,
    heads: usize,
}

/// Names of evidence that the comparison of before and after already shows.
const QUALITY: [&str; 7] = ["ppl", "exact_ppl", "kl_mean", "same_top", "seconds", "exact_seconds", "curve"];

impl<'a> RecipeMap<'a> {
    /// Expands the recipe over the layers and heads of the model's metadata, or of the rules.
    pub(super) fn new(name: &'a str, recipe: &'a Recipe, metadata: &BTreeMap<String, String>) -> Self {
        let size = |key: &str| metadata.get(key).and_then(|n| n.parse::<usize>().ok()).unwrap_or(0);
        let most = |pick: fn(&Rule) -> &Option<Numbers>| {
            let numbers = recipe.rules.iter().filter_map(|r| pick(r).as_ref()).flat_map(|n| n.iter().last());
            numbers.max().map_or(1, |n| n + 1)
        };
        Self {
            name,
            recipe,
            layers: size("model_layers").max(most(|r| &r.layers)),
            heads: size("model_heads").max(most(|r| &r.heads)),
        }
    }

    fn figure(&self, name: &str) -> Option<f64> {
        match self.recipe.evidence.get(name)? {
            Setting::Float(x) => Some(*x),
            Setting::Int(n) => Some(*n as f64),
            _ => None,
        }
    }

    /// Returns the last rule that matches a head, as in [`Recipe::choice`].
    fn rule(&self, layer: usize, head: usize) -> Option<&Rule> {
        let within = |n: &Option<Numbers>, i: usize| n.as_ref().is_none_or(|n| n.contains(i));
        self.recipe.rules.iter().rev().find(|r| within(&r.layers, layer) && within(&r.heads, head))
    }

    /// Returns the cells of the map, and pairs of before and after.
    pub(super) fn data(&self) -> Value {
        let mut cells = Vec::new();
        for layer in 0..self.layers {
            for head in 0..self.heads {
                let (method, params) = self.recipe.choice(layer, head);
                let measured = self.rule(layer, head).and_then(|r| r.measured);
                cells.push(json!({
                    "layer": layer,
                    "head": head,
                    "method": method,
                    "name": format!("{method} {params}").trim(),
                    "error": measured.and_then(|m| m.error),
                    "cost": measured.and_then(|m| m.cost),
                }));
            }
        }
        let pair = |what: &str, before: &str, after: &str| {
            let (before, after) = (self.figure(before)?, self.figure(after)?);
            Some(json!({ "what": what, "before": before, "after": after }))
        };
        let quality: Vec<Value> =
            [pair("perplexity", "exact_ppl", "ppl"), pair("seconds", "exact_seconds", "seconds")]
                .into_iter()
                .flatten()
                .collect();
        let names = cells.iter().filter_map(|c| c["name"].as_str());
        json!({ "cells": cells, "colours": colours(names, registry::baseline().id), "quality": quality })
    }

    /// Returns the number of heads without plain exact attention, and of all heads.
    fn changed(&self) -> (usize, usize) {
        let exact = registry::baseline().id;
        let all = (0..self.layers).flat_map(|l| (0..self.heads).map(move |h| (l, h)));
        let other = all.filter(|&(l, h)| {
            let (method, params) = self.recipe.choice(l, h);
            method != exact || !params.is_empty()
        });
        (other.count(), self.layers * self.heads)
    }

    /// Returns one line for the overview.
    pub(super) fn headline(&self) -> Option<(String, String)> {
        let speed = self.figure("exact_seconds")? / self.figure("seconds")?;
        let rise = self.figure("ppl")? / self.figure("exact_ppl")? - 1.0;
        Some((
            times(speed),
            format!("speed of the model with {}, perplexity {:+.2} %", self.name, 100.0 * rise),
        ))
    }

    /// Returns the section.
    pub(super) fn section(&self) -> String {
        let (changed, all) = self.changed();
        let mut rules = Table::new(&["<layers", "<heads", "<method", "<set", "error", "time"]);
        for r in &self.recipe.rules {
            let numbers = |n: &Option<Numbers>| n.as_ref().map_or("all".into(), ToString::to_string);
            let figure = |f: Option<f64>, show: fn(f64) -> String| f.map_or("-".into(), show);
            rules.push(vec![
                numbers(&r.layers),
                numbers(&r.heads),
                r.method.clone(),
                r.params.to_string(),
                figure(r.measured.and_then(|m| m.error), number),
                figure(r.measured.and_then(|m| m.cost), percent),
            ]);
        }
        format!(
            "<p><b>{}</b>: {changed} of {all} heads do not have exact attention.</p>\n{}\
             <div class=\"pair\"><figure id=\"recipe-map\" class=\"plot\"></figure>\n<div>{}</div></div>\n{}\
             <details><summary>The rules</summary><div class=\"wide\"><table>{}</table></div></details>\n",
            escape(self.name),
            self.curve(),
            self.quality(),
            self.evidence(),
            table_rows(&rules)
        )
    }

    /// Draws time against divergence over all budgets, if the recipe's evidence has the curve.
    fn curve(&self) -> String {
        let Some(Setting::Text(words)) = self.recipe.evidence.get("curve") else { return String::new() };
        let taken = self.figure("kl_mean").zip(self.figure("attention_cost"));
        let dots: Vec<(f64, f64, bool)> = taken.map(|(kl, cost)| (kl, cost, true)).into_iter().collect();
        let svg = crate::tune::curve::draw(&crate::tune::curve::read(words), &dots, self.name);
        format!(
            "<figure>{svg}<figcaption>What every budget would cost; the dot is this recipe.</figcaption></figure>\n"
        )
    }

    /// Returns a table of the model with exact attention and with the recipe, on text not used for tuning.
    fn quality(&self) -> String {
        let mut table = Table::new(&["<on text that was not used for tuning", "exact", "recipe"]);
        let mut line = |what: &str, exact: Option<String>, recipe: Option<String>| {
            if let Some(recipe) = recipe {
                table.push(vec![what.into(), exact.unwrap_or("-".into()), recipe]);
            }
        };
        let show = |name: &str, f: fn(f64) -> String| self.figure(name).map(f);
        line("perplexity", show("exact_ppl", |x| format!("{x:.3}")), show("ppl", |x| format!("{x:.3}")));
        line("seconds", show("exact_seconds", seconds), show("seconds", seconds));
        line("divergence, nats", Some("0".into()), show("kl_mean", number));
        line("same likeliest token", Some("100%".into()), show("same_top", |x| format!("{:.1}%", 100.0 * x)));
        if table.is_empty() {
            return String::new();
        }
        format!(
            "<h3>Quality before and after</h3>\n<figure id=\"quality\" class=\"plot\"></figure>\n\
             <div class=\"wide\"><table>{}</table></div>\n",
            table_rows(&table)
        )
    }

    fn evidence(&self) -> String {
        let mut table = Table::new(&["<evidence", "<value"]);
        for (name, value) in self.recipe.evidence.iter().filter(|(n, _)| !QUALITY.contains(&n.as_str())) {
            table.push(vec![name.clone(), value.to_string()]);
        }
        if table.is_empty() {
            return String::new();
        }
        format!(
            "<details><summary>What it was made from</summary><div class=\"wide\"><table>{}</table></div></details>\n",
            table_rows(&table)
        )
    }
}

/// Easily distinguished colours; further ones are spread over hues and lightness.
const PALETTE: [&str; 9] =
    ["#4e79a7", "#f28e2c", "#e15759", "#76b7b2", "#59a14f", "#edc949", "#af7aa1", "#ff9da7", "#9c755f"];

/// Assigns a colour to every setting, those with the most heads first; exact attention is grey.
fn colours<'a>(names: impl Iterator<Item = &'a str>, exact: &str) -> Vec<Value> {
    let mut counts: Vec<(&str, usize)> = Vec::new();
    for name in names {
        match counts.iter_mut().find(|(n, _)| *n == name) {
            Some((_, count)) => *count += 1,
            None => counts.push((name, 1)),
        }
    }
    counts.sort_by_key(|&(name, count)| (name != exact, std::cmp::Reverse(count)));
    let mut taken: Vec<String> = Vec::new();
    let mut next = 0;
    let entry = |(name, count): (&str, usize)| {
        let colour = if name == exact {
            "var(--line)".to_string()
        } else {
            loop {
                let colour = PALETTE.get(next).map_or_else(|| spread(next), |c| c.to_string());
                next += 1;
                if !taken.contains(&colour) {
                    break colour;
                }
            }
        };
        taken.push(colour.clone());
        json!({ "name": name, "count": count, "colour": colour })
    };
    counts.into_iter().map(entry).collect()
}

/// Returns the `i`-th of an endless series of colours: hues a golden angle apart, alternately darker and lighter.
fn spread(i: usize) -> String {
    let hue = (i as f64 * 137.507_764) % 360.0 / 60.0;
    let lightness = [0.35, 0.65, 0.5, 0.8][i % 4];
    let chroma = (1.0 - (2.0 * lightness - 1.0f64).abs()) * 0.6;
    let second = chroma * (1.0 - (hue % 2.0 - 1.0).abs());
    let [r, g, b] = match hue as usize {
        0 => [chroma, second, 0.0],
        1 => [second, chroma, 0.0],
        2 => [0.0, chroma, second],
        3 => [0.0, second, chroma],
        4 => [second, 0.0, chroma],
        _ => [chroma, 0.0, second],
    };
    let byte = |x: f64| (255.0 * (x + lightness - chroma / 2.0)).round().clamp(0.0, 255.0) as u8;
    format!("#{:02x}{:02x}{:02x}", byte(r), byte(g), byte(b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_has_a_colour_of_its_own() {
        let names: Vec<String> = (0..60).map(|i| format!("sink_window window={i}")).collect();
        let all = names.iter().map(String::as_str).chain(["exact", "exact", names[7].as_str()]);
        let found = colours(all, "exact");
        assert_eq!((found.len(), &found[0]["name"], &found[0]["count"]), (61, &json!("exact"), &json!(2)));
        assert_eq!(found[1]["name"], json!(names[7]));
        let mut seen: Vec<&str> = found.iter().map(|f| f["colour"].as_str().unwrap()).collect();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), 61);
    }
}
