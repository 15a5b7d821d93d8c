//! The parameter that determines a method's cost, and settings at which different methods cost the same.
//!
//! Budgets have different names in different methods: keys kept, rank, landmarks, features; the registry entry names
//! these parameters. [`equalise`] finds the largest value with which a method stays within a common number of scores,
//! seconds or bytes, measured on one key head in the middle of the inputs: it doubles the value from the smallest, then
//! bisects in logarithms. If a method computes exact attention below some length, that length is lowered until it does
//! not. The amount spent on all heads is known only after the run
//! ([`Matching::settle`](crate::compare::Matching::settle)), and is the one that counts.

use crate::calibration::Calibrations;
use crate::compare::{self, Group, Row};
use crate::run::Run;
use crate::select::Chosen;
use crate::words::parse_count;
use crate::workload::Workload;
use crate::{Error, Result};
use attlas::Options;
use attlas::method::Ladder;
use serde::Serialize;
use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};

/// Ratio of neighbouring values at which a search ends, and by which other heads may exceed the searched one.
pub(crate) const CLOSE: f64 = 1.1;
/// Smallest budget tried.
const FEWEST: usize = 16;

/// Returns a method's budget parameters that are not set yet; empty if it has none.
pub fn params(chosen: &Chosen) -> Vec<&'static str> {
    let budgets = chosen.method.tunable.iter().filter(|t| t.ladder == Ladder::UpToKeys).map(|t| t.param);
    budgets.filter(|name| chosen.options.get(name).is_none()).collect()
}

/// Returns true if a method keeps a near field by default: it has a parameter `sinks` with a default above zero.
pub fn has_near_field(method: &attlas::Method) -> bool {
    let sinks = method.params.iter().find(|p| p.name == "sinks").map(|p| (p.default)());
    matches!(sinks, Some(attlas::params::Value::Int(n)) if n > 0)
}

/// The budget of every method.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Budget {
    /// Scores computed for a query, on average.
    Keys(f64),
    /// Seconds of set-up and run as a share of exact attention's.
    Time(f64),
    /// Bytes beyond inputs and output.
    Memory(usize),
}

impl FromStr for Budget {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let (what, amount) = text.split_once('=').unwrap_or((text, ""));
        let positive = |x: f64| (x.is_finite() && x > 0.0).then_some(x);
        let budget = match what {
            "keys" => parse_count(amount).and_then(|n| positive(n as f64)).map(Budget::Keys),
            "time" => {
                let (number, unit) = match amount.strip_suffix('%') {
                    Some(percent) => (percent, 0.01),
                    None => (amount, 1.0),
                };
                number.parse::<f64>().ok().and_then(|x| positive(x * unit)).map(Budget::Time)
            }
            "memory" => parse_count(amount).filter(|n| *n > 0).map(Budget::Memory),
            _ => None,
        };
        budget
            .ok_or_else(|| Error::argument("--match", "keys=256, time=50% or memory=8m", format!("'{text}'")))
    }
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Budget::Keys(n) => write!(f, "{n} scores a query"),
            Budget::Time(share) => write!(f, "{:.0}% of exact attention's time", 100.0 * share),
            Budget::Memory(bytes) => write!(f, "{} beyond inputs and output", crate::table::bytes(*bytes)),
        }
    }
}

impl Budget {
    /// Returns the amount that a measured head spent, in the budget's unit.
    pub(crate) fn spent(&self, row: &Row, queries: usize) -> f64 {
        match self {
            Budget::Keys(_) => row.keys_visited as f64 / queries.max(1) as f64,
            Budget::Time(_) => 1.0 / row.speedup,
            Budget::Memory(_) => row.peak_bytes as f64,
        }
    }

    /// Formats an amount in the budget's unit.
    pub(crate) fn shown(&self, x: f64) -> String {
        use crate::table::{bytes, number, percent};
        match self {
            Budget::Keys(_) => format!("{} scores a query", number(x)),
            Budget::Time(_) => format!("{} of the time", percent(x)),
            Budget::Memory(_) => bytes(x as usize),
        }
    }

    pub(crate) fn amount(&self) -> f64 {
        match self {
            Budget::Keys(x) | Budget::Time(x) => *x,
            Budget::Memory(bytes) => *bytes as f64,
        }
    }
}

/// The budget of one method.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Matched {
    /// Id of the method.
    pub method: &'static str,
    /// The parameters that were set, all to the same value; empty if it has no budget.
    pub params: Vec<&'static str>,
    /// The value of these parameters.
    pub value: Option<usize>,
    /// Parameter and value of the length below which it computes exact attention, if that had to be lowered.
    pub switch: Option<(&'static str, usize)>,
    /// The amount it spent on the key head of the search, in the budget's unit; none if it could not run.
    pub spent: Option<f64>,
    /// Mean amount over heads that it spent in the run; none before the run.
    pub measured: Option<f64>,
    /// True if that is within the budget, with a tolerance of a tenth for differences between heads.
    pub within: bool,
    /// Reason why the budget cannot be met, if it cannot.
    pub reason: Option<String>,
}

/// Sets the budget of every method to the largest value that stays within `budget`. A method that exceeds it even at
/// its smallest value keeps that value; a method without a budget, or that spends nothing of this kind, keeps its
/// defaults. For methods with feature maps the features of a query count as its scores.
pub fn equalise(
    workload: &Workload,
    selection: &[Chosen],
    budget: Budget,
    settings: &compare::Settings,
    run: &mut Run<'_>,
) -> Result<(Vec<Chosen>, Vec<Matched>)> {
    let layer = &workload.layers[workload.layers.len() / 2];
    let mask = settings.mask.unwrap_or(workload.mask);
    let short = compare::Settings { seeds: 1, runs: 1, ..*settings };
    let given = Calibrations::default();
    let ws = &mut run.workspace()?;
    let mut group = Group::new(layer, layer.problem.n_kv_heads / 2, mask, &short, run.seed, &given, ws)?;
    let problem = layer.group_problem(mask);
    let mut chosen = Vec::new();
    let mut report = Vec::new();
    for (done, c) in selection.iter().enumerate() {
        run.at(done, selection.len(), c.method.id);
        let names = params(c);
        let set =
            |base: &Options, value: usize| names.iter().fold(base.clone(), |o, name| o.with(name, value));
        // A setting that the method refuses is no candidate.
        let mut try_with = |options: Options| -> Option<(f64, bool)> {
            let tried = Chosen { options, ..c.clone() };
            let rows = group.measure(&tried, None, &mut Calibrations::default(), ws).ok()?;
            rows.first().map(|row| (budget.spent(row, problem.n_q), row.status == "exact"))
        };
        let least = FEWEST.min(problem.n_k.max(1));
        let mut base = c.options.clone();
        let mut switch = None;
        // Lowered until the smallest budget is neither exact attention nor over the limit, or to the cheapest value.
        if let Some(name) = switch_of(c).filter(|_| !names.is_empty()) {
            let mut tried: Option<(f64, Option<usize>)> = None;
            let mut length: Option<usize> = None;
            while !run.stopped() {
                let options = length.map_or(c.options.clone(), |n| c.options.clone().with(name, n));
                let outcome = try_with(set(&options, least));
                if let Some((spent, exact)) = outcome {
                    let spent = if exact { f64::MAX } else { spent };
                    if tried.is_none_or(|(best, _)| spent < best) {
                        tried = Some((spent, length));
                    }
                }
                let next = length.unwrap_or(problem.n_k) / 2;
                if tried.is_some_and(|(best, _)| best <= budget.amount()) || next < least {
                    break;
                }
                length = Some(next);
            }
            if let Some(length) = tried.and_then(|(_, length)| length) {
                base = c.options.clone().with(name, length);
                switch = Some((name, length));
            }
        }
        let mut best: Option<(usize, f64)> = None;
        if !names.is_empty() && !run.stopped() {
            let spend = &mut |value: usize| try_with(set(&base, value)).map(|(spent, _)| spent);
            best = largest_within(problem.n_k, budget.amount(), spend, run.stop);
        }
        let useful = best.filter(|(_, spent)| *spent > 0.0);
        let value = useful.map(|b| b.0);
        // A method that could not be matched runs with its defaults.
        let options = value.map_or_else(|| c.options.clone(), |value| set(&base, value));
        let within = useful.is_some_and(|b| b.1 <= budget.amount());
        let reason = match (names.is_empty(), best) {
            (true, _) => Some("it has no parameter that its cost grows with".into()),
            (false, None) => Some("it refuses every setting here".into()),
            (false, Some((_, 0.0))) => Some("it spends nothing of this kind".into()),
            (false, Some((v, spent))) if !within => {
                Some(format!("{} at its smallest, {} = {v}", budget.shown(spent), names.join(", ")))
            }
            _ => None,
        };
        report.push(Matched {
            method: c.method.id,
            params: if value.is_some() { names.clone() } else { Vec::new() },
            value,
            switch: switch.filter(|_| value.is_some()),
            spent: useful.map(|b| b.1),
            measured: None,
            within,
            reason,
        });
        chosen.push(Chosen { options, ..c.clone() });
    }
    Ok((chosen, report))
}

/// Returns the parameter of the length below which a method computes exact attention, if it has one that is not set.
fn switch_of(chosen: &Chosen) -> Option<&'static str> {
    chosen.method.exact_below.filter(|name| chosen.options.get(name).is_none())
}

/// Returns the largest value up to `most` whose cost is within `amount`, with that cost; if none is, the smallest value
/// with a cost. Values without a cost are skipped.
fn largest_within(
    most: usize,
    amount: f64,
    spend: &mut dyn FnMut(usize) -> Option<f64>,
    stop: &AtomicBool,
) -> Option<(usize, f64)> {
    let mut within: Option<(usize, f64)> = None;
    let mut over: Option<(usize, f64)> = None;
    let mut value = FEWEST.min(most.max(1));
    loop {
        match spend(value) {
            Some(cost) if cost > amount => {
                over = Some((value, cost));
                break;
            }
            Some(cost) => within = Some((value, cost)),
            None => {}
        }
        if value >= most || stop.load(Ordering::Relaxed) {
            break;
        }
        value = (2 * value).min(most);
    }
    let (Some(mut low), Some(high)) = (within, over) else { return within.or(over) };
    let mut high = high.0;
    while high as f64 > CLOSE * low.0 as f64 && high > low.0 + 1 && !stop.load(Ordering::Relaxed) {
        let middle = ((low.0 as f64 * high as f64).sqrt() as usize).clamp(low.0 + 1, high - 1);
        match spend(middle) {
            Some(cost) if cost <= amount => low = (middle, cost),
            _ => high = middle,
        }
    }
    Some(low)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::select::Choice;
    use attlas::Mask;

    #[test]
    fn budgets_are_read_with_their_units() {
        assert_eq!("keys=1k".parse::<Budget>().unwrap(), Budget::Keys(1024.0));
        assert_eq!("time=50%".parse::<Budget>().unwrap(), Budget::Time(0.5));
        assert_eq!("memory=8m".parse::<Budget>().unwrap(), Budget::Memory(8 << 20));
        for bad in ["keys", "keys=0", "time=-1", "memory=x", "error=1", ""] {
            let message = bad.parse::<Budget>().unwrap_err().to_string();
            assert!(message.contains("keys=256"), "{message}");
        }
    }

    #[test]
    fn the_largest_value_within_an_amount_is_found_up_to_a_tenth() {
        let go = AtomicBool::new(false);
        let (value, cost) = largest_within(1 << 20, 5000.0, &mut |v| Some(v as f64 * 3.0), &go).unwrap();
        assert!(cost <= 5000.0 && (value as f64) * CLOSE > 5000.0 / 3.0 / CLOSE, "{value}");
        assert_eq!(largest_within(100, 1e9, &mut |v| Some(v as f64), &go), Some((100, 100.0)));
        assert_eq!(largest_within(100, 1.0, &mut |v| Some(v as f64), &go), Some((16, 16.0)));
        assert_eq!(largest_within(100, 1.0, &mut |_| None, &go), None);
        // A method that needs at least 40.
        let picky = &mut |v: usize| (v >= 40).then_some(v as f64);
        assert_eq!(largest_within(100, 70.0, picky, &go).unwrap().0, 67);
    }

    mod binned {
        use attlas::group::{Group, GroupPlan};
        use attlas::method::{Accepted, Cost, Method, RunInfo, Spec, Tunable};
        use attlas::{Problem, Real, Result};

        pub(super) static METHOD: Method = Method {
            id: "binned",
            title: "Every key, whatever the bins",
            reference: "none",
            tunable: &[Tunable::budget("bins")],
            ..Method::of::<Params>()
        };

        attlas::params! {
            /// Parameters of a method with a budget of its own name.
            pub struct Params {
                /// Budget.
                bins: usize = 8, in 1..=1 << 20;
            }
        }

        impl Spec for Params {
            const METHOD: &'static Method = &METHOD;

            fn build(self, _: Accepted<'_>) -> Result<impl GroupPlan> {
                Ok(Binned)
            }
        }

        #[derive(Debug)]
        struct Binned;

        impl GroupPlan for Binned {
            fn cost(&self, p: &Problem) -> Cost {
                Cost { run_flops: p.visible_pairs(), ..Cost::default() }
            }

            fn run<T: Real>(&self, mut group: Group<'_, T>) -> Result<RunInfo> {
                attlas::engine::exact_group(&mut group)
            }
        }
    }

    #[test]
    fn a_new_method_is_tunable_by_whatever_name_its_budget_has() {
        let mut chosen = Chosen { method: &binned::METHOD, options: attlas::Options::new(), named: true };
        assert_eq!(params(&chosen), ["bins"]);
        chosen.options = chosen.options.with("bins", 3);
        assert!(params(&chosen).is_empty(), "it was set already");
    }

    #[test]
    fn methods_with_the_same_keys_compute_about_as_many_scores() {
        let workload = "synthetic:clustered,n=512,d=8".parse::<crate::Source>().unwrap().load().unwrap();
        let methods = ["sink_window", "top_k", "linear"].map(String::from).to_vec();
        let selection = Choice { methods, ..Choice::default() }.resolve().unwrap();
        let settings = compare::Settings { mask: Some(Mask::Causal), ..Default::default() };
        let budget = Budget::Keys(64.0);
        let (chosen, report) =
            Run::silent(1, 0, |run| equalise(&workload, &selection, budget, &settings, run)).unwrap();
        let window = report.iter().find(|m| m.method == "sink_window").unwrap();
        assert!(window.within && window.spent.unwrap() > 64.0 / 1.25, "{window:?}");
        // `top_k` scores every key to find the largest, so the least it can spend is over the budget.
        let top = report.iter().find(|m| m.method == "top_k").unwrap();
        assert!(!top.within && top.value == Some(16), "{top:?}");
        let linear = report.iter().find(|m| m.method == "linear").unwrap();
        assert!(linear.value.is_none() && linear.params.is_empty(), "it has no budget: {linear:?}");
        assert!(top.reason.as_ref().unwrap().contains("at its smallest"), "{top:?}");
        let set = chosen.iter().find(|c| c.method.id == "sink_window").unwrap();
        assert_eq!(set.options.get("window").map(ToString::to_string), window.value.map(|v| v.to_string()));
    }

    #[test]
    fn a_method_that_would_be_exact_at_this_length_is_made_to_spend_less() {
        let workload = "synthetic:clustered,n=512,d=8".parse::<crate::Source>().unwrap().load().unwrap();
        let methods = ["hyper", "top_k", "wildcat"].map(String::from).to_vec();
        let selection = Choice { methods, ..Choice::default() }.resolve().unwrap();
        let settings = compare::Settings { mask: Some(Mask::Causal), seeds: 1, ..Default::default() };
        let budget = Budget::Keys(192.0);
        let (chosen, methods) =
            Run::silent(1, 0, |run| equalise(&workload, &selection, budget, &settings, run)).unwrap();
        let hyper = methods.iter().find(|m| m.method == "hyper").unwrap();
        assert!(
            hyper.within && hyper.switch.is_some_and(|(name, n)| name == "n_min" && n < 512),
            "{hyper:?}"
        );
        // A causal block of 1024 would hold every key.
        let wildcat = methods.iter().find(|m| m.method == "wildcat").unwrap();
        assert!(
            wildcat.within && wildcat.switch.is_some_and(|(name, n)| name == "block" && n < 512),
            "{wildcat:?}"
        );
        let result = Run::silent(1, 0, |run| compare::compare(&workload, &chosen, &settings, run)).unwrap();
        let result = result.matched_to(compare::Matching { budget, methods });
        let matching = result.matched.as_ref().unwrap();
        // The amount spent equals the one that the run reports.
        for m in &matching.methods {
            let row = result.rows.iter().find(|r| r.method == m.method).unwrap();
            assert_eq!(m.measured, Some(row.keys_visited as f64 / 512.0));
        }
        assert!(!matching.is_over("hyper") && matching.is_over("top_k"));
        // Methods over the budget never come first.
        let table = result.table().text();
        let names: Vec<&str> = table.lines().skip(1).filter_map(|l| l.split_whitespace().next()).collect();
        assert_eq!(names.last(), Some(&"top_k"), "{table}");
        assert!(!result.summary.iter().any(|s| s.method == "top_k" && s.front));
    }
}
