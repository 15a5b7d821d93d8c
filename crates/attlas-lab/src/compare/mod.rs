//! Errors and times of methods on given inputs, beside exact attention in the same process.
//!
//! The unit of work is one key head with the query heads that share it: methods may then share work that depends only
//! on keys. Times and counts per query head are those of the group divided by its size. Each method is planned and run
//! once to warm up; that run gives the first error, the peak memory and the log-sum-exp. Further runs, one per seed for
//! methods that draw random numbers, give errors and times, and exact attention is timed between them. Set-up is
//! planning, run is executing; a plan's work on the keys before its first row is part of the run, and
//! `counted_setup_share` is its share of the counted work.
//!
//! Methods are compared on the same heads. If a time limit or an interruption ends the comparison early, methods that
//! did not finish the first head are named as skipped, and the heads compared are those that all other methods
//! finished; rows of further heads are dropped.

pub mod budget;
pub mod curves;
mod group;
mod records;
mod tables;
mod verdict;

pub(crate) use group::Group;
pub(crate) use records::status_name;
pub use records::{Baseline, BaselineHead, Comparison, Matching, Refused, Row, Skipped, Summary, front};

use crate::calibration::Calibrations;
use crate::crew::{Alone, Crew};
use crate::reread::Name;
use crate::run::{Meter, Run};
use crate::select::{Chosen, baseline};
use crate::units::{Done, Ledger, share};
use crate::workload::{LayerData, Workload};
use crate::{Error, Result};
use attlas::method::Needs;
use attlas::{Mask, Problem};
use records::summarise;
use serde::{Deserialize, Serialize};
use std::time::Instant;

/// Name in a workload's metadata of the first row whose error counts.
pub const SCORED_FROM: &str = "scored_from";

/// Settings of a comparison.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Mask; the workload's own if absent.
    pub mask: Option<Mask>,
    /// Seeds for methods that draw random numbers.
    pub seeds: usize,
    /// First row whose error counts; the workload's [`SCORED_FROM`] takes precedence.
    pub first_row: usize,
    /// Most timed runs of a method that draws no random numbers.
    pub runs: usize,
    /// Seconds after which no new measurement starts; every method gets an equal share of the time left.
    pub time_limit: Option<f64>,
    /// Counter of allocated bytes.
    pub meter: Meter,
}

impl Default for Settings {
    fn default() -> Self {
        Self { mask: None, seeds: 5, first_row: 0, runs: 5, time_limit: None, meter: Meter::NONE }
    }
}

/// Measures every method of `selection` on every head. The seed of `run` is the first seed of the methods.
pub fn compare(
    workload: &Workload,
    selection: &[Chosen],
    settings: &Settings,
    run: &mut Run<'_>,
) -> Result<Comparison> {
    let (crew, given) = (Alone::default(), Calibrations::default());
    compare_with(workload, selection, settings, &given, &crew, &mut Ledger::none(), run)
}

/// Returns everything that determines the figures of a key head: two runs with the same key may share them. Times are
/// those of one kind of machine.
pub fn key(
    workload: &Workload,
    selection: &[Chosen],
    settings: &Settings,
    given: &Calibrations,
    run: &Run<'_>,
) -> Result<String> {
    let ws = run.workspace()?;
    let methods: Vec<String> = selection.iter().map(|c| format!("{} {}", c.method.id, c.options)).collect();
    Ok(format!(
        "{} {:?} {:?} {} {} {} {} {} {} {} {:?}",
        workload.hash(),
        methods,
        settings.mask,
        settings.seeds,
        run.seed,
        settings.first_row,
        settings.runs,
        crate::machine::name(&ws),
        crate::atlas::fingerprint(),
        env!("CARGO_PKG_VERSION"),
        serde_json::to_string(given).ok(),
    ))
}

/// Compares with earlier calibrations, with key heads shared among the processes of a crew and kept in a ledger.
/// Methods without a calibration learn from the inputs. Every process gets the whole comparison.
pub fn compare_with(
    workload: &Workload,
    selection: &[Chosen],
    settings: &Settings,
    given: &Calibrations,
    crew: &dyn Crew,
    ledger: &mut Ledger,
    run: &mut Run<'_>,
) -> Result<Comparison> {
    let mask = settings.mask.unwrap_or(workload.mask);
    let scored_from = workload.metadata.get(SCORED_FROM).and_then(|row| row.parse().ok());
    let settings = &Settings { first_row: scored_from.unwrap_or(settings.first_row), ..*settings };
    let mut ws = run.workspace()?;
    let exact = baseline()?;
    let mut result = Comparison {
        source: workload.source.clone(),
        metadata: workload.metadata.clone(),
        mask,
        threads: ws.schedule().threads,
        isa: ws.schedule().isa.to_string(),
        seeds: settings.seeds,
        seed: run.seed,
        interval: "95 % Student t interval of the mean over seeds",
        exact: Baseline { method: exact.id, ..Baseline::default() },
        rows: Vec::new(),
        summary: Vec::new(),
        refused: Vec::new(),
        skipped: Vec::new(),
        interrupted: false,
        matched: None,
        heads: 0,
        tokens: workload.layers.iter().map(|l| l.problem.n_k).max().unwrap_or(0),
        verdict: String::new(),
        curves: Vec::new(),
        learnt: Calibrations::default(),
    };

    // Refusals and bad parameters come before any work.
    let mut runnable: Vec<Vec<&Chosen>> = Vec::new();
    for layer in &workload.layers {
        let problem = layer.group_problem(mask);
        let mut able = Vec::new();
        for chosen in selection {
            match refusal(chosen, &problem, run.seed, given)? {
                None => able.push(chosen),
                Some(reasons) => {
                    result.refused.push(Refused { method: chosen.method.id, layer: layer.layer, reasons })
                }
            }
        }
        runnable.push(able);
    }

    let units = units(&workload.layers, settings.time_limit.is_some());
    let total: usize = units.iter().map(|&(i, _)| runnable[i].len() + 1).sum();
    result.heads = units.iter().map(|&(i, _)| workload.layers[i].problem.group_size()).sum();
    let clock = Clock { start: Instant::now(), limit: settings.time_limit, processes: crew.size() };
    let node = crew.node();
    let mut cut = false;
    let mut work = |unit: usize, at: usize| -> Result<Done<Finished>> {
        let (i, g) = units[unit];
        let (layer, able) = (&workload.layers[i], &runnable[i]);
        let mut here = Finished {
            rows: Vec::new(),
            able: able.iter().map(|c| c.method.id).collect(),
            methods: Vec::new(),
            exact: Baseline::default(),
            skipped: Vec::new(),
            learnt: Calibrations::default(),
        };
        let late = |method: Name| Skipped {
            method,
            layer: layer.layer,
            heads: layer.heads_of(g).collect(),
            reason: TIME_LIMIT.into(),
        };
        // The first one always has its baseline.
        if at > 0 && clock.share(1).is_some_and(|share| share <= 0.0) {
            here.skipped.extend(able.iter().map(|c| late(c.method.id)));
            return Ok(Done::Partial(here));
        }
        if at > 0 && run.stopped() {
            return Ok(Done::Stopped);
        }
        // Earlier units of the list are done or belong to other processes.
        let mut done = (at * total / units.len().max(1)).min(total);
        run.at(done, total, exact.id);
        let mut bench = Group::new(layer, g, mask, settings, run.seed, given, &mut ws)?;
        done += 1;
        here.rows = bench.mean_of_values();
        let mut whole = true;
        for chosen in able {
            if run.stopped() {
                (whole, cut) = (false, true);
                break;
            }
            run.at(done, total, chosen.method.id);
            match clock.share(total.saturating_sub(done)) {
                Some(share) if share <= 0.0 => {
                    here.skipped.push(late(chosen.method.id));
                    whole = false;
                }
                share => {
                    here.rows.extend(bench.measure(chosen, share, &mut here.learnt, &mut ws)?);
                    here.methods.push(chosen.method.id);
                }
            }
            done += 1;
        }
        bench.finish(&mut here.exact);
        here.rows.iter_mut().for_each(|row| row.node.clone_from(&node));
        Ok(if whole { Done::Whole(here) } else { Done::Partial(here) })
    };
    // If time may not suffice, the order of units determines which heads are compared.
    let short = settings.time_limit.is_some();
    let weight = |&(i, _): &(usize, usize)| {
        let p = workload.layers[i].group_problem(mask);
        if short { 1 } else { p.visible_pairs() * (p.d + p.d_v) as u64 }
    };
    let weights: Vec<u64> = units.iter().map(weight).collect();
    let shared = share(crew, ledger, &weights, &mut work)?;
    result.interrupted = shared.interrupted || crew.any(cut);
    let mut finished: Vec<Finished> = shared.records.into_iter().flatten().map(|(unit, _)| unit).collect();
    for unit in &mut finished {
        result.skipped.append(&mut unit.skipped);
        for entry in std::mem::take(&mut unit.learnt).entries() {
            result.learnt.insert(entry.layer, entry.kv_head, entry.calibration.clone());
        }
    }
    finished.retain(|unit| !unit.exact.heads.is_empty());
    keep_common(&finished, &mut result);
    let b = &mut result.exact;
    b.gflops = if b.run_seconds > 0.0 { b.flops as f64 / b.run_seconds * 1e-9 } else { 0.0 };
    result.summary = summarise(&result);
    result.verdict = result.verdict();
    Ok(result)
}

const TIME_LIMIT: &str = "the time limit was reached";

/// Returns the key heads in the order of measurement: layer by layer, or, if time may not suffice, one key head of
/// every layer in turn.
fn units(layers: &[LayerData], short: bool) -> Vec<(usize, usize)> {
    let mut units: Vec<(usize, usize)> = layers
        .iter()
        .enumerate()
        .flat_map(|(i, layer)| (0..layer.problem.n_kv_heads).map(move |g| (i, g)))
        .collect();
    if short {
        units.sort_by_key(|&(i, g)| (g, i));
    }
    units
}

/// Measurements on one key head.
#[derive(Serialize, Deserialize)]
struct Finished {
    rows: Vec<Row>,
    /// Methods that can run on it.
    #[serde(deserialize_with = "crate::reread::names")]
    able: Vec<Name>,
    /// Methods that finished it.
    #[serde(deserialize_with = "crate::reread::names")]
    methods: Vec<Name>,
    exact: Baseline,
    skipped: Vec<Skipped>,
    learnt: Calibrations,
}

/// Keeps the methods that finished the first key head, and the key heads that all of these finished.
fn keep_common(finished: &[Finished], result: &mut Comparison) {
    let Some(first) = finished.first() else { return };
    let late = |id: &str| first.able.contains(&id) && !first.methods.contains(&id);
    let whole = |f: &&Finished| f.able.iter().all(|id| late(id) || f.methods.contains(id));
    for f in std::iter::once(first).chain(finished[1..].iter().filter(whole)) {
        let all = &mut result.exact;
        all.run_seconds += f.exact.run_seconds;
        all.flops += f.exact.flops;
        all.peak_bytes = all.peak_bytes.max(f.exact.peak_bytes);
        all.heads.extend(f.exact.heads.iter().cloned());
        result.rows.extend(f.rows.iter().filter(|row| !late(row.method)).cloned());
    }
}

/// Returns the reasons why a method cannot do a problem; other errors, such as a bad parameter, go to the caller.
fn refusal(
    chosen: &Chosen,
    problem: &Problem,
    seed: u64,
    given: &Calibrations,
) -> Result<Option<Vec<String>>> {
    let options = chosen.options_for(seed);
    if chosen.method.claims.needs == Needs::Calibration || given.has(chosen.method.id) {
        let support = chosen.method.support(problem, &options);
        return Ok((!support.is_yes()).then_some(support.reasons));
    }
    match chosen.method.plan(problem, &options) {
        Ok(_) => Ok(None),
        Err(attlas::Error::Unsupported { reasons, .. }) => Ok(Some(reasons)),
        Err(e) => Err(name_method(chosen, e)),
    }
}

/// Adds the method to an error about its parameter.
fn name_method(chosen: &Chosen, error: attlas::Error) -> Error {
    match error {
        attlas::Error::InvalidParam { name, value, expected } => {
            attlas::Error::InvalidParam { name: format!("{}.{name}", chosen.method.id), value, expected }
                .into()
        }
        other => other.into(),
    }
}

/// Divides a time limit among steps.
struct Clock {
    start: Instant,
    limit: Option<f64>,
    processes: usize,
}

impl Clock {
    /// Returns the seconds that each of `left` steps may take; all processes share the steps.
    fn share(&self, left: usize) -> Option<f64> {
        let each = left.div_ceil(self.processes).max(1) as f64;
        self.limit.map(|limit| (limit - self.start.elapsed().as_secs_f64()) / each)
    }
}

#[cfg(test)]
mod tests {
    use super::records::mark_front;
    use super::*;
    use crate::select::Choice;

    fn run(source: &str, methods: &[&str], set: &[&str], settings: Settings) -> Comparison {
        run_on(1, source, methods, set, settings)
    }

    fn run_on(
        threads: usize,
        source: &str,
        methods: &[&str],
        set: &[&str],
        settings: Settings,
    ) -> Comparison {
        let workload = source.parse::<crate::Source>().unwrap().load().unwrap();
        let owned = |x: &[&str]| x.iter().map(|s| s.to_string()).collect();
        let selection = Choice { methods: owned(methods), family: None, set: owned(set) }.resolve().unwrap();
        Run::silent(threads, 0, |run| compare(&workload, &selection, &settings, run)).unwrap()
    }

    fn error(c: &Comparison, method: &str, head: usize) -> f64 {
        c.rows.iter().find(|r| r.method == method && r.head == head).unwrap().rel_fro.mean
    }

    #[test]
    fn the_oracle_agrees_and_a_full_budget_is_exact() {
        let settings = Settings { mask: Some(Mask::Causal), ..Settings::default() };
        let c = run(
            "synthetic:clustered,n=300,d=16,heads=4,kv_heads=2",
            &["naive", "top_k"],
            &["top_k.keys=300"],
            settings,
        );
        for head in 0..4 {
            // Rounding of single precision: 16 products, 300 terms.
            assert!(
                error(&c, "naive", head) < 16.0 * f64::from(f32::EPSILON),
                "{}",
                error(&c, "naive", head)
            );
            assert_eq!(error(&c, "top_k", head), 0.0);
            assert!(error(&c, "mean_v", head) > 0.3);
        }
        let row = c.rows.iter().find(|r| r.method == "top_k").unwrap();
        assert_eq!((row.status, row.keys_share), ("exact", 1.0));
        assert_eq!(c.rows.len(), 3 * 4);
        assert_eq!(c.summary.iter().map(|s| s.method).collect::<Vec<_>>(), ["mean_v", "naive", "top_k"]);
        assert_eq!(c.exact.heads.len(), 4);
        assert_eq!(row.params["keys"], 300);
    }

    #[test]
    fn the_mean_of_values_has_the_error_of_the_method_pages() {
        // 0.81, 0.99 and 1.01 on the clustering page's workloads; 1.00 and 0.82 on those of the low-rank page.
        for (kind, wanted) in [
            ("gaussian", 0.83),
            ("clustered", 0.99),
            ("heavy_hitters", 1.01),
            ("low_rank", 1.0),
            ("smooth", 0.82),
        ] {
            let settings = Settings { time_limit: Some(0.0), ..Settings::default() };
            let c = run(&format!("synthetic:{kind}"), &["sink_window"], &[], settings);
            let found = error(&c, "mean_v", 0);
            assert!((found / wanted - 1.0).abs() < 0.1, "{kind}: {found} for {wanted}");
        }
    }

    #[test]
    fn the_front_holds_what_nothing_beats_in_both() {
        let settings = Settings::default();
        // Settings that keep every method from falling back to exact attention.
        let narrow =
            ["top_k.keys=9", "sink_window.window=9", "hyper.n_min=8", "hyper.block=8", "hyper.samples=8"];
        let mut c = run("synthetic:gaussian,n=50,d=8", &["top_k", "sink_window", "hyper"], &narrow, settings);
        let figures = [(0.5, 0.0), (0.1, 2.0), (0.2, 1.0), (0.2, 3.0)];
        for (s, (error, time)) in c.summary.iter_mut().zip(figures) {
            s.rel_fro.mean = error;
            (s.setup_seconds, s.run_seconds) = (0.0, time);
        }
        mark_front(&mut c.summary, 10.0);
        assert_eq!(c.summary.iter().map(|s| s.front).collect::<Vec<_>>(), [true, true, true, false]);
        // Exact attention and the mean of the values beat methods that are slower and no better; a method that fell
        // back to exact attention does not count.
        let mut fronts = |exact: f64| {
            mark_front(&mut c.summary, exact);
            c.summary.iter().map(|s| s.front).collect::<Vec<_>>()
        };
        assert_eq!(fronts(1.5), [true, false, true, false]);
        assert_eq!(fronts(0.5), [true, false, false, false]);
        c.summary[1].status = "exact";
        mark_front(&mut c.summary, 10.0);
        assert!(!c.summary[1].front);
    }

    #[test]
    fn methods_are_compared_on_heads_that_all_of_them_finished() {
        let mut c = run(
            "synthetic:gaussian,n=40,d=8,heads=6,kv_heads=3",
            &["top_k", "sink_window", "linear"],
            &[],
            Settings { seeds: 1, ..Settings::default() },
        );
        assert_eq!((c.heads, c.exact.heads.len()), (6, 6));
        let part = |g: usize, methods: &[&'static str]| Finished {
            rows: c
                .rows
                .iter()
                .filter(|r| r.head / 2 == g && (r.method == "mean_v" || methods.contains(&r.method)))
                .cloned()
                .collect(),
            able: vec!["top_k", "sink_window", "linear"],
            methods: methods.to_vec(),
            exact: Baseline { heads: c.exact.heads[2 * g..2 * g + 2].to_vec(), ..Baseline::default() },
            skipped: Vec::new(),
            learnt: Calibrations::default(),
        };
        let parts = [
            part(0, &["top_k", "sink_window"]),
            part(1, &["top_k", "sink_window"]),
            part(2, &["top_k", "linear"]),
        ];
        (c.rows, c.exact) = (Vec::new(), Baseline::default());
        keep_common(&parts, &mut c);
        let summary = summarise(&c);
        let found: Vec<(&str, usize)> = summary.iter().map(|s| (s.method, s.heads)).collect();
        assert_eq!(found, [("mean_v", 4), ("sink_window", 4), ("top_k", 4)]);
        assert_eq!(c.exact.heads.len(), 4);
    }

    #[test]
    fn a_short_limit_goes_through_layers_before_heads() {
        let mut w =
            "synthetic:gaussian,n=4,d=2,heads=4,kv_heads=2".parse::<crate::Source>().unwrap().load().unwrap();
        w.layers.push(w.layers[0].clone());
        assert_eq!(units(&w.layers, false), [(0, 0), (0, 1), (1, 0), (1, 1)]);
        assert_eq!(units(&w.layers, true), [(0, 0), (1, 0), (0, 1), (1, 1)]);
    }

    #[test]
    fn a_spent_time_limit_and_a_stop_leave_what_is_finished() {
        let settings = Settings { time_limit: Some(0.0), ..Settings::default() };
        let c = run("synthetic:gaussian,n=50,d=8", &["top_k"], &[], settings);
        assert_eq!((c.skipped.len(), c.rows.len()), (1, 1));
        let workload = "synthetic:gaussian,n=50,d=8".parse::<crate::Source>().unwrap().load().unwrap();
        let selection = Choice::default().resolve().unwrap();
        let stop = std::sync::atomic::AtomicBool::new(true);
        let mut run = Run { threads: 1, seed: 0, progress: &mut |_| (), stop: &stop };
        let c = compare(&workload, &selection, &Settings::default(), &mut run).unwrap();
        assert!(c.interrupted && c.rows.iter().all(|r| r.method == "mean_v"));
    }

    #[test]
    fn a_parameter_out_of_range_names_its_method() {
        let workload = "synthetic:gaussian,n=50,d=8".parse::<crate::Source>().unwrap().load().unwrap();
        let selection = Choice { set: vec!["top_k.keys=0".into()], ..Choice::default() }.resolve().unwrap();
        let result = Run::silent(1, 0, |run| compare(&workload, &selection, &Settings::default(), run));
        let message = result.unwrap_err().to_string();
        assert!(message.contains("top_k.keys = 0") && message.contains("from 1 to"), "{message}");
    }

    #[test]
    fn results_do_not_depend_on_the_number_of_threads() {
        let with = |threads| {
            let source = "synthetic:needle,n=200,d=16,heads=2";
            let c = run_on(threads, source, &["all"], &[], Settings::default());
            c.rows.iter().map(|r| (r.method, r.head, r.rel_fro.mean.to_bits())).collect::<Vec<_>>()
        };
        assert_eq!(with(1), with(2));
    }
}
