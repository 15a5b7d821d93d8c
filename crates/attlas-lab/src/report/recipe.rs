//! Which method each head of a model got, and what that did to the model.

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

/// Names of evidence that stand in the comparison of before and after, and need no line of their own.
const QUALITY: [&str; 6] = ["ppl", "exact_ppl", "kl_mean", "same_top", "seconds", "exact_seconds"];

impl<'a> RecipeMap<'a> {
    /// The recipe over the layers and heads that the model says it has, or that rules name.
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

    /// The last rule that matches a head, as [`Recipe::choice`] does.
    fn rule(&self, layer: usize, head: usize) -> Option<&Rule> {
        let within = |n: &Option<Numbers>, i: usize| n.as_ref().is_none_or(|n| n.contains(i));
        self.recipe.rules.iter().rev().find(|r| within(&r.layers, layer) && within(&r.heads, head))
    }

    /// Cells of the map, and pairs of before and after.
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
        json!({ "cells": cells, "exact": registry::baseline().id, "quality": quality })
    }

    /// Heads that do not have plain exact attention, and all of them.
    fn changed(&self) -> (usize, usize) {
        let exact = registry::baseline().id;
        let all = (0..self.layers).flat_map(|l| (0..self.heads).map(move |h| (l, h)));
        let other = all.filter(|&(l, h)| {
            let (method, params) = self.recipe.choice(l, h);
            method != exact || !params.is_empty()
        });
        (other.count(), self.layers * self.heads)
    }

    /// What it does in one line, for the overview.
    pub(super) fn headline(&self) -> Option<(String, String)> {
        let speed = self.figure("exact_seconds")? / self.figure("seconds")?;
        let rise = self.figure("ppl")? / self.figure("exact_ppl")? - 1.0;
        Some((
            times(speed),
            format!("speed of the model with {}, perplexity {:+.2} %", self.name, 100.0 * rise),
        ))
    }

    /// The section.
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
            "<p><b>{}</b>: {changed} of {all} heads do not have exact attention.</p>\n\
             <div class=\"pair\"><figure id=\"recipe-map\" class=\"plot\"></figure>\n<div>{}</div></div>\n{}\
             <details><summary>The rules</summary><div class=\"wide\"><table>{}</table></div></details>\n",
            escape(self.name),
            self.quality(),
            self.evidence(),
            table_rows(&rules)
        )
    }

    /// The model with exact attention and with the recipe, on text that was not used for tuning.
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
