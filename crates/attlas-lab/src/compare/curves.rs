//! Methods over a range of scores, as published and beside a near field: curves instead of one point each.
//!
//! Every method's budget is set to each of a few numbers of scores per query. With a near field the number is divided:
//! half is the window, the rest belongs to the method, plus a few sinks. The curves show the scores computed and the
//! time taken, and so compare methods whose parameters mean different things.

use super::budget;
use super::{Group, Settings, refusal};
use crate::Result;
use crate::calibration::Calibrations;
use crate::crew::Crew;
use crate::reread::Name;
use crate::run::Run;
use crate::select::Chosen;
use crate::stats::mean;
use crate::table::{Table, number, percent, times};
use crate::units::{Done, Ledger, share};
use crate::workload::Workload;
use attlas::{Near, Options};
use serde::{Deserialize, Serialize};
use std::time::Instant;

/// Scores per query that are tried, as halvings of the number of keys.
const HALVINGS: [u32; 5] = [6, 5, 4, 3, 2];
/// Sinks beside a method.
const SINKS: usize = 4;

/// Curve of one method, as published or with a near field.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Curve {
    /// Id of the method.
    #[serde(deserialize_with = "crate::reread::name")]
    pub method: Name,
    /// Its family.
    #[serde(deserialize_with = "crate::reread::name")]
    pub family: Name,
    /// True if it has a near field of sinks and a window.
    pub near: bool,
    /// Measurements, by growing budget.
    pub points: Vec<CurvePoint>,
}

/// One setting of a method, mean over heads.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CurvePoint {
    /// Its settings.
    pub params: Options,
    /// Mean relative Frobenius error.
    #[serde(deserialize_with = "crate::reread::number")]
    pub error: f64,
    /// Share of the scores of exact attention.
    #[serde(deserialize_with = "crate::reread::number")]
    pub keys_share: f64,
    /// Exact seconds over those of set-up and run.
    #[serde(deserialize_with = "crate::reread::number")]
    pub speedup: f64,
}

/// Returns the settings of a curve.
fn settings_of(chosen: &Chosen, near: bool, n_k: usize) -> Vec<Options> {
    let names = budget::params(chosen);
    let mut all: Vec<Options> = Vec::new();
    for halvings in HALVINGS {
        let scores = (n_k >> halvings).max(2);
        let own = if near { scores / 2 } else { scores };
        let mut options = names.iter().fold(chosen.options.clone(), |o, name| o.with(name, own));
        if near {
            options = options.with("near.sinks", SINKS).with("near.window", scores - own);
        }
        if let Some(switch) = chosen.method.exact_below.filter(|name| chosen.options.get(name).is_none()) {
            options = options.with(switch, (n_k / 8).max(64));
        }
        if !all.contains(&options) {
            all.push(options);
        }
    }
    all
}

/// Measures the curves of every method on every head, one run of each. Once `stop` is set or the time limit is reached,
/// it returns the finished curves; a method whose time ran out has none. The processes of a crew share the curves, and
/// each gets all of them.
pub fn curves(
    workload: &Workload,
    selection: &[Chosen],
    settings: &Settings,
    given: &Calibrations,
    crew: &dyn Crew,
    run: &mut Run<'_>,
) -> Result<Vec<Curve>> {
    let mask = settings.mask.unwrap_or(workload.mask);
    let scored_from = workload.metadata.get(super::SCORED_FROM).and_then(|row| row.parse().ok());
    let settings =
        &Settings { seeds: 1, runs: 1, first_row: scored_from.unwrap_or(settings.first_row), ..*settings };
    let mut ws = run.workspace()?;
    let begun = Instant::now();
    let over = || settings.time_limit.is_some_and(|limit| begun.elapsed().as_secs_f64() > limit);
    let mut groups = Vec::new();
    for layer in &workload.layers {
        for g in 0..layer.problem.n_kv_heads {
            groups.push((
                layer.group_problem(mask),
                Group::new(layer, g, mask, settings, run.seed, given, &mut ws)?,
            ));
        }
    }
    let mut kinds: Vec<(&Chosen, bool)> = Vec::new();
    for chosen in selection {
        let named = chosen.options.iter().any(|(name, _)| Near::names(name, chosen.method.params));
        kinds.push((chosen, false));
        if !budget::has_near_field(chosen.method) && !named && chosen.method.claims.lse {
            kinds.push((chosen, true));
        }
    }
    let mut work = |unit: usize, at: usize| -> Result<Done<Curve>> {
        let (chosen, near) = kinds[unit];
        let (method, family) = (chosen.method.id, chosen.method.family.name());
        let mut curve = Curve { method, family, near, points: Vec::new() };
        let n_k = groups.iter().map(|(p, _)| p.n_k).max().unwrap_or(0);
        for options in settings_of(chosen, near, n_k) {
            if run.stopped() || over() {
                return Ok(Done::Stopped);
            }
            run.at(at, kinds.len(), chosen.method.id);
            let tried = Chosen { options, ..chosen.clone() };
            let mut rows = Vec::new();
            for (problem, group) in &mut groups {
                if refusal(&tried, problem, run.seed, given).ok().is_none_or(|r| r.is_some()) {
                    break;
                }
                match group.measure(&tried, None, &mut Calibrations::default(), &mut ws) {
                    Ok(more) => rows.extend(more),
                    Err(_) => break,
                }
            }
            // All heads or none: methods are never compared on different heads.
            let heads: usize = groups.iter().map(|(p, _)| p.n_heads).sum();
            if rows.len() < heads || rows.iter().all(|r| r.status == "exact") {
                continue;
            }
            let taken: f64 = rows.iter().map(|r| r.setup_seconds + r.run_seconds).sum();
            let exact: f64 = rows.iter().map(|r| r.speedup * (r.setup_seconds + r.run_seconds)).sum();
            curve.points.push(CurvePoint {
                params: tried.options,
                error: mean(&rows.iter().map(|r| r.rel_fro.mean).collect::<Vec<_>>()),
                keys_share: mean(&rows.iter().map(|r| r.keys_share).collect::<Vec<_>>()),
                speedup: exact / taken,
            });
        }
        Ok(Done::Whole(curve))
    };
    let shared = share(crew, &mut Ledger::none(), &vec![1; kinds.len()], &mut work)?;
    let found = shared.records.into_iter().flatten().map(|(curve, _)| curve);
    Ok(found.filter(|curve| !curve.points.is_empty()).collect())
}

/// Returns a table with one line per curve: the best error within a quarter of the scores (for a method that reads
/// more, at its fewest scores) and the best error at twice the speed of exact attention; smallest error first.
pub fn table(curves: &[Curve]) -> Table {
    let mut table = Table::new(&["<method", "<near", "error", "keys", "faster", "error at 2x", "<set"]);
    let within = |c: &Curve| {
        let finite = || c.points.iter().filter(|p| p.error.is_finite());
        let best = finite().filter(|p| p.keys_share <= 0.25).min_by(|a, b| a.error.total_cmp(&b.error));
        best.or_else(|| finite().min_by(|a, b| a.keys_share.total_cmp(&b.keys_share))).cloned()
    };
    let mut lines: Vec<(&Curve, CurvePoint)> = curves.iter().filter_map(|c| Some((c, within(c)?))).collect();
    lines.sort_by(|a, b| a.1.error.total_cmp(&b.1.error));
    for (c, p) in lines {
        let fast = c.points.iter().filter(|p| p.speedup >= 2.0 && p.error.is_finite());
        let fast = fast.map(|p| p.error).reduce(f64::min);
        table.push(vec![
            c.method.into(),
            if c.near { "beside".into() } else { String::new() },
            number(p.error),
            percent(p.keys_share),
            times(p.speedup),
            fast.map_or("-".into(), number),
            p.params.to_string(),
        ]);
    }
    table
}

/// Returns the verdict of the curves, in a sentence.
pub fn verdict(curves: &[Curve], tokens: usize) -> String {
    let all = || curves.iter().flat_map(|c| c.points.iter().map(move |p| (c, p)));
    let fastest = |within: f64| {
        let fit = all().filter(|(_, p)| p.error <= within && p.speedup > 1.0);
        fit.max_by(|a, b| a.1.speedup.total_cmp(&b.1.speedup))
    };
    let said = |(c, p): (&Curve, &CurvePoint)| {
        let beside = if c.near { " beside a near field" } else { "" };
        format!("{}{beside} is {} faster at {:.1} % error", c.method, times(p.speedup), 100.0 * p.error)
    };
    let mut parts: Vec<String> = Vec::new();
    for within in [0.3, 0.1, 0.01] {
        match fastest(within) {
            Some(found) => {
                let text = said(found);
                if !parts.contains(&text) {
                    parts.push(text);
                }
            }
            None => parts.push(format!("nothing is faster within {:.0} %", 100.0 * within)),
        }
    }
    format!("At {tokens} tokens {}.", parts.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::crew::Alone;
    use crate::select::Choice;

    #[test]
    fn curves_have_both_forms_and_spend_what_they_say() {
        let workload = "synthetic:clustered,n=512,d=16,heads=2,kv_heads=1"
            .parse::<crate::Source>()
            .unwrap()
            .load()
            .unwrap();
        let methods = ["hyper", "sampled_columns"].map(String::from).to_vec();
        let selection = Choice { methods, ..Choice::default() }.resolve().unwrap();
        let settings = Settings { mask: Some(attlas::Mask::Causal), ..Settings::default() };
        let (given, crew) = (Calibrations::default(), Alone::default());
        let found =
            Run::silent(1, 0, |run| curves(&workload, &selection, &settings, &given, &crew, run)).unwrap();
        let kinds: Vec<(&str, bool)> = found.iter().map(|c| (c.method, c.near)).collect();
        assert!(kinds.contains(&("hyper", true)) && kinds.contains(&("sampled_columns", false)), "{kinds:?}");
        assert!(!kinds.contains(&("sampled_columns", true)), "it has a near field of its own");
        for c in &found {
            assert!(c.points.iter().all(|p| p.error.is_finite() && p.keys_share > 0.0), "{c:?}");
        }
        assert!(table(&found).text().contains("sampled_columns"));
        assert!(verdict(&found, 512).starts_with("At 512 tokens "));
        let stopped = std::sync::atomic::AtomicBool::new(true);
        let mut run = Run { threads: 1, seed: 0, progress: &mut |_| (), stop: &stopped };
        let none = curves(&workload, &selection, &settings, &given, &crew, &mut run);
        assert!(none.unwrap().is_empty());
        assert!(verdict(&[], 8).contains("nothing is faster within 1 %"));
    }
}
