//! Learning from text, without training: fits methods to the heads of a model and measures the gain.
//!
//! The model reads a text once. For every layer and key head a method learns from the queries, keys and values of the first
//! tokens; its error against exact attention is then measured on the rows that follow, which attend to everything
//! before them, without and with the calibration.

use crate::run::execute;
use crate::select::{Chosen, Selection};
use crate::stats::mean;
use crate::table::{Table, number};
use crate::text::Text;
use crate::workload::LayerData;
use crate::{Calibrations, Error, Result, extract};
use attlas::{Calibration, Inputs, Mask, Options, Problem, Qkv, Schedule, Workspace, registry};
use attlas_model::Model;
use attlas_model::recipe::Numbers;
use serde::Serialize;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Settings of a calibration.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Methods that learn.
    pub selection: Selection,
    /// Layers; all if absent.
    pub layers: Option<Numbers>,
    /// Tokens to learn from; the rest of the text is for the check.
    pub tokens: usize,
    /// Seed of methods that draw random numbers.
    pub seed: u64,
    /// Threads; 0 for all.
    pub threads: usize,
}

/// One method on one key head.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Id of the method.
    pub method: &'static str,
    /// Layer.
    pub layer: usize,
    /// Key head.
    pub kv_head: usize,
    /// Mean relative error of the query heads on the following rows without the calibration; none if the method needs
    /// one.
    pub before: Option<f64>,
    /// The same with it; none if the method cannot attend causally with it.
    pub after: Option<f64>,
}

/// A calibration and the error it saves.
#[derive(Clone, Debug, Serialize)]
pub struct Calibrated {
    /// The text.
    pub text: String,
    /// SHA-256 of it.
    pub text_sha256: String,
    /// Tokens learnt from.
    pub tokens: usize,
    /// Tokens after them, for the check.
    pub check_tokens: usize,
    /// One for each method and key head.
    pub rows: Vec<Row>,
    /// Methods whose calibration a causal model cannot use, with the reason.
    pub refused: Vec<(&'static str, String)>,
    /// The calibration.
    #[serde(skip)]
    pub learnt: Calibrations,
}

/// Returns the methods that can learn; if the selection has none, the error names them.
pub fn learners(selection: &[Chosen]) -> Result<Selection> {
    let able: Selection = selection.iter().filter(|c| c.method.calibrate.is_some()).cloned().collect();
    let ids = || {
        let all = registry::METHODS.iter().filter(|m| m.calibrate.is_some()).map(|m| m.id);
        all.collect::<Vec<_>>().join(", ")
    };
    if let Some(other) = selection.iter().find(|c| c.named && c.method.calibrate.is_none()) {
        return Err(Error::argument("--methods", format!("methods that learn: {}", ids()), other.method.id));
    }
    if able.is_empty() {
        return Err(Error::argument("--methods", format!("methods that learn: {}", ids()), "none of them"));
    }
    Ok(able)
}

/// Calibrates the methods. `progress` receives steps done and steps in all; an interruption is a model error.
pub fn calibrate(
    model: &Arc<Model>,
    text: &Text,
    settings: &Settings,
    progress: &mut (dyn FnMut(usize, usize, &str) + Send),
    stop: &AtomicBool,
) -> Result<Calibrated> {
    let n = settings.tokens;
    if n == 0 || n >= text.tokens.len() {
        let expected = format!(
            "fewer than the {} tokens of the text, so that some are left to try on",
            text.tokens.len()
        );
        return Err(Error::argument("--tokens", expected, n));
    }
    let wanted = extract::Settings {
        layers: settings.layers.clone(),
        threads: settings.threads,
        ..extract::Settings::default()
    };
    let workload =
        extract::extract(model, text, &wanted, &mut |a, b| progress(a, b, "reading"), stop)?.workload;
    let mut ws = Workspace::new(Schedule { threads: settings.threads, ..Schedule::default() })?;
    let mut found = Calibrated {
        text: text.source.clone(),
        text_sha256: text.sha256.clone(),
        tokens: n,
        check_tokens: text.tokens.len() - n,
        rows: Vec::new(),
        refused: Vec::new(),
        learnt: Calibrations::default(),
    };
    let units: usize = workload.layers.iter().map(|l| l.problem.n_kv_heads).sum();
    let mut done = 0;
    for (i, layer) in workload.layers.iter().enumerate() {
        let number = layer.layer.unwrap_or(i);
        for g in 0..layer.problem.n_kv_heads {
            if stop.load(Ordering::Relaxed) {
                return Err(Error::Model(attlas_model::Error::Interrupted));
            }
            progress(done, units, &format!("learning, layer {number}"));
            done += 1;
            let head = Head::new(layer, g, n, &mut ws)?;
            for chosen in &settings.selection {
                if found.refused.iter().any(|(id, _)| *id == chosen.method.id) {
                    continue;
                }
                match head.learn(chosen, settings.seed, &mut ws) {
                    Ok((calibration, before, after)) => {
                        found.rows.push(Row {
                            method: chosen.method.id,
                            layer: number,
                            kv_head: g,
                            before,
                            after: Some(after),
                        });
                        found.learnt.insert(Some(number), g, calibration);
                    }
                    Err(Error::Attlas(attlas::Error::Unsupported { reasons, .. })) => {
                        found.refused.push((chosen.method.id, reasons.join("; ")));
                    }
                    Err(other) => return Err(other),
                }
            }
        }
    }
    if found.learnt.is_empty() {
        let reasons: Vec<String> = found.refused.iter().map(|(id, why)| format!("{id}: {why}")).collect();
        return Err(Error::argument("--methods", "one that a causal model can use", reasons.join(" / ")));
    }
    Ok(found)
}

/// A key head with its exact output.
struct Head<'a> {
    problem: Problem,
    x: Qkv<'a, f32>,
    /// Tokens to learn from.
    n: usize,
    exact: Vec<f32>,
}

impl<'a> Head<'a> {
    fn new(layer: &'a LayerData, g: usize, n: usize, ws: &mut Workspace) -> Result<Self> {
        let problem = layer.group_problem(Mask::Causal);
        let x = layer.group(g)?;
        let mut exact = vec![0.0; problem.n_heads * problem.n_q * problem.d_v];
        execute(&*registry::baseline().plan(&problem, &Options::new())?, x, &mut exact, None, ws)?;
        Ok(Self { problem, x, n, exact })
    }

    /// Calibrates a method, and measures its error on later rows without and with the calibration.
    fn learn(
        &self,
        chosen: &Chosen,
        seed: u64,
        ws: &mut Workspace,
    ) -> Result<(Calibration, Option<f64>, f64)> {
        let Some(learn) = chosen.method.calibrate else {
            let reasons = vec!["it does not learn".to_owned()];
            return Err(attlas::Error::Unsupported { method: chosen.method.id.into(), reasons }.into());
        };
        let options = chosen.options_for(seed);
        let n = self.n;
        let first = Qkv::new(self.x.q.rows(0..n), self.x.k.rows(0..n), self.x.v.rows(0..n));
        let learnt = learn(&self.problem.with_lens(n, n), &options, &[Inputs::from(first)])?;
        let after = self.error(chosen, &options, Some(&learnt), ws)?;
        let before = match self.error(chosen, &options, None, ws) {
            Ok(error) => Some(error),
            Err(Error::Attlas(attlas::Error::Unsupported { .. })) => None,
            Err(other) => return Err(other),
        };
        Ok((learnt, before, after))
    }

    /// Returns the mean relative error of the query heads on the rows after the tokens learnt from.
    fn error(
        &self,
        chosen: &Chosen,
        options: &Options,
        learnt: Option<&Calibration>,
        ws: &mut Workspace,
    ) -> Result<f64> {
        let p = &self.problem;
        let plan = chosen.method.plan_with(p, options, learnt)?;
        let mut output = vec![0.0f32; self.exact.len()];
        execute(&*plan, self.x, &mut output, None, ws)?;
        let len = p.n_q * p.d_v;
        let heads = output.chunks(len).zip(self.exact.chunks(len)).map(|(got, exact)| {
            let rows = self.n * p.d_v..;
            let pairs = got[rows.clone()].iter().zip(&exact[rows]);
            let (gap, size) = pairs.fold((0.0, 0.0), |(gap, size), (g, e)| {
                let (g, e) = (f64::from(*g), f64::from(*e));
                (gap + (g - e) * (g - e), size + e * e)
            });
            if gap == 0.0 { 0.0 } else { (gap / size).sqrt() }
        });
        Ok(mean(&heads.collect::<Vec<f64>>()))
    }
}

impl Calibrated {
    /// Returns a table with one line per method: mean errors over key heads before and after, and the number of key
    /// heads that improve.
    pub fn table(&self) -> Table {
        let mut table = Table::new(&["<method", "key heads", "before", "after", "worst after", "better on"]);
        let mut ids: Vec<&'static str> = self.rows.iter().map(|r| r.method).collect();
        ids.dedup();
        ids.sort_unstable();
        ids.dedup();
        for id in ids {
            let rows: Vec<&Row> = self.rows.iter().filter(|r| r.method == id).collect();
            let before: Vec<f64> = rows.iter().filter_map(|r| r.before).collect();
            let after: Vec<f64> = rows.iter().filter_map(|r| r.after).collect();
            let better = rows.iter().filter(|r| r.before.zip(r.after).is_some_and(|(b, a)| a < b)).count();
            let known = before.len() == rows.len();
            table.push(vec![
                id.into(),
                rows.len().to_string(),
                if known { number(mean(&before)) } else { "-".into() },
                number(mean(&after)),
                number(after.iter().copied().fold(0.0, f64::max)),
                if known { better.to_string() } else { "-".into() },
            ]);
        }
        table
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::select::Choice;

    fn chosen(id: &str) -> Chosen {
        let choice = Choice { methods: vec![id.into()], ..Choice::default() };
        choice.resolve().unwrap().remove(0)
    }

    #[test]
    fn errors_are_those_of_rows_that_were_not_learnt_from() {
        let source = "synthetic:low_rank,n=400,d=16,heads=4,kv_heads=2".parse::<crate::Source>().unwrap();
        let workload = source.load().unwrap();
        let mut ws = Workspace::new(Schedule { threads: 1, ..Schedule::default() }).unwrap();
        let head = Head::new(&workload.layers[0], 1, 200, &mut ws).unwrap();
        let (learnt, before, after) = head.learn(&chosen("loki"), 0, &mut ws).unwrap();
        assert_eq!((learnt.method.as_str(), learnt.n_heads, before), ("loki", 2, None));
        assert!(after.is_finite() && after < 1.0, "{after}");
        let (_, before, after) = head.learn(&chosen("crt"), 0, &mut ws).unwrap();
        assert!(before.unwrap().is_finite() && after.is_finite());
        // Exact on the rows that are counted, whatever comes before.
        let all = chosen("sink_window");
        assert!(head.error(&all, &Options::new().with("window", 400), None, &mut ws).unwrap() < 1e-6);
    }

    #[test]
    fn methods_that_do_not_learn_are_refused_by_name_and_left_out_otherwise() {
        assert!(learners(&[chosen("top_k")]).unwrap_err().to_string().contains("loki"));
        let all = learners(&Choice::default().resolve().unwrap()).unwrap();
        assert!(all.iter().any(|c| c.method.id == "crt") && all.iter().all(|c| c.method.calibrate.is_some()));
    }
}
