//! `attlas bench` over several processes, and its predictions for a described cluster.

use crate::args::{BenchArgs, Common, WireName};
use crate::{Outcome, note, print, print_json};
use attlas::{Mask, Options, Problem, Schedule, Workspace};
use attlas_lab::Error;
use attlas_lab::machine::Machine;
use attlas_lab::select::{Chosen, baseline};
use attlas_lab::table::{Table, bytes, count, number, percent, seconds};
use attlas_mpi::bench::{Row, Settings, link, measure, measure_decode, state_bytes};
use attlas_mpi::cluster::{Measured, Prediction, predict as predicted};
use attlas_mpi::{Threads, Transport, Wire};
use std::process::ExitCode;

/// Returns exact attention, followed by the chosen methods.
fn subjects(selection: &[Chosen]) -> Result<Vec<Chosen>, Error> {
    let exact = baseline()?;
    let own = |c: &&Chosen| c.method.id == exact.id && c.options.is_empty();
    let mut all = vec![Chosen { method: exact, options: Options::new(), named: true }];
    all.extend(selection.iter().filter(|c| !own(c)).cloned());
    Ok(all)
}

fn problem(args: &BenchArgs, n: usize, d: usize) -> Problem {
    let kv_heads = args.kv_heads.unwrap_or(args.heads);
    let mask = if args.causal { Mask::Causal } else { Mask::None };
    Problem { mask, ..Problem::new(args.heads, n, d).with_kv_heads(kv_heads) }
}

/// Returns the operations per second of all processes together, each taken at the slowest one's rate; `None` if one
/// cannot measure its rate.
fn all_peaks(t: &dyn Transport, ws: &Workspace) -> Option<f64> {
    let own = Machine::fma_peak(ws).unwrap_or(0.0);
    let all = t.gather_all(&own.to_le_bytes());
    let each = all.iter().map(|b| b.as_slice().try_into().map_or(0.0, f64::from_le_bytes));
    Some(1e9 * t.size() as f64 * each.fold(f64::INFINITY, f64::min)).filter(|p| *p > 0.0)
}

/// Returns the reason to leave out a run if its counted operations exceed the time limit even at peak.
fn too_long(
    peak: Option<f64>,
    most: f64,
    chosen: &Chosen,
    options: &Options,
    problem: &Problem,
) -> Option<String> {
    let least = chosen.method.plan(problem, options).ok()?.cost().flops() as f64 / peak?;
    (least > most).then(|| {
        format!("{} tokens take {} or more; --max-seconds allows longer runs", problem.n_k, seconds(least))
    })
}

/// Times one sequence over all processes.
pub(crate) fn bench(t: &dyn Transport, selection: &[Chosen], args: &BenchArgs, common: &Common) -> Outcome {
    if args.peer_json.is_some() {
        return Err(Error::argument(
            "--peer-json",
            "one process, as the figures of other programs",
            "several",
        ));
    }
    let wire = match args.wire {
        WireName::Full => Wire::Full,
        WireName::Bf16 => Wire::Bf16,
    };
    let settings = Settings { runs: args.runs as usize, wire, seed: common.seed };
    let mut ws = Workspace::new(Schedule { threads: common.threads, ..Schedule::default() })?;
    let link = link(t);
    let peak = all_peaks(t, &ws);
    let (mut rows, mut refused): (Vec<Row>, Vec<(&str, Vec<String>)>) = (Vec::new(), Vec::new());
    for &d in &args.d {
        for &n in &args.n {
            let problem = problem(args, n, d);
            problem.validate()?;
            if args.decode {
                rows.push(measure_decode(t, &problem, &settings, &mut ws)?);
                continue;
            }
            for chosen in subjects(selection)? {
                let options = chosen.options_for(common.seed);
                if let Some(reason) = too_long(peak, args.max_seconds, &chosen, &options, &problem) {
                    refused.push((chosen.method.id, vec![reason]));
                    continue;
                }
                match measure(t, &problem, chosen.method, &options, &settings, &mut ws)? {
                    Ok(row) => rows.push(row),
                    Err(reasons) if refused.iter().any(|r| r.0 == chosen.method.id) => drop(reasons),
                    Err(reasons) => refused.push((chosen.method.id, reasons)),
                }
            }
        }
    }
    if common.json {
        let reasons: Vec<_> =
            refused.iter().map(|(id, r)| serde_json::json!({"method": id, "reasons": r})).collect();
        let (mask, threads) = (problem(args, 1, 1).mask, ws.schedule().threads);
        print_json(&serde_json::json!({
            "processes": t.size(), "threads": threads, "mask": mask, "heads": args.heads,
            "kv_heads": args.kv_heads.unwrap_or(args.heads), "link": link, "rows": rows, "refused": reasons,
        }));
        return Ok(ExitCode::SUCCESS);
    }
    let mut table = Table::new(&["method", "<schedule", "n", "d", "time", "range", "sent", "waited", "load"]);
    for r in &rows {
        let range = r.seconds.iter().fold((f64::INFINITY, 0.0f64), |(a, b), &x| (a.min(x), b.max(x)));
        table.push(vec![
            r.method.into(),
            r.schedule.into(),
            r.n.to_string(),
            r.d.to_string(),
            seconds(r.median),
            format!("{} to {}", seconds(range.0), seconds(range.1)),
            bytes(r.bytes as usize),
            seconds(r.waited),
            number(r.balance),
        ]);
    }
    if common.csv {
        print(&table.csv());
    } else {
        let nodes = rows.first().map_or(String::new(), |r| {
            let mut nodes = r.nodes.clone();
            nodes.sort();
            nodes.dedup();
            nodes.join(", ")
        });
        let heading = format!(
            "{} with {} on {nodes}\n{}mask {}, {}, {}",
            count(t.size(), "process"),
            count(ws.schedule().threads, "thread"),
            if args.decode { "one token at a time over a cache on all processes, " } else { "" },
            problem(args, 1, 1).mask,
            count(args.heads, "query head"),
            count(args.kv_heads.unwrap_or(args.heads), "key head")
        );
        let between = link.map_or(String::new(), |l| {
            format!("\nbetween processes: {} us a message, {} Gbit/s", number(l.us), number(l.gbps))
        });
        let form = if common.md { table.markdown() } else { table.text() };
        print(&format!("{heading}{between}\n\n{form}"));
        note(
            common,
            "\ntime: median of the slowest process; sent: by all processes in one run; waited: longest of a process;\n\
             load: counted pairs of the process with most of them over the mean",
        );
    }
    for (id, reasons) in &refused {
        note(common, &format!("{id}: {}", reasons.join("; ")));
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the length measured for a prediction, at most `shortest`: 8192, or a longer one at which the method does no
/// more work than exact attention does at 8192, because caches hold less of a longer input. Each input stays below 256
/// MiB.
fn measured_length(args: &BenchArgs, chosen: &Chosen, options: &Options, shortest: usize, d: usize) -> usize {
    const LENGTH: usize = 8192;
    const ELEMENTS: usize = 1 << 26;
    let flops = |chosen: &Chosen, options: &Options, n: usize| {
        let plan = chosen.method.plan(&problem(args, n, d), options);
        plan.map_or(u64::MAX, |plan| plan.cost().flops())
    };
    let exact = baseline().map(|method| Chosen { method, options: Options::new(), named: true });
    let most = exact.map_or(0, |exact| flops(&exact, &Options::new(), LENGTH));
    let mut n = shortest.min(LENGTH);
    while 2 * n <= shortest && 2 * n * args.heads * d <= ELEMENTS && flops(chosen, options, 2 * n) <= most {
        n *= 2;
    }
    n
}

/// Prints predicted times on clusters.
pub(crate) fn predict(selection: &[Chosen], args: &BenchArgs, common: &Common) -> Outcome {
    let settings = Settings { runs: (args.runs as usize).min(5), wire: Wire::Full, seed: common.seed };
    let mut rows: Vec<Prediction> = Vec::new();
    let mut refused = Vec::new();
    for &d in &args.d {
        for chosen in subjects(selection)? {
            let (method, options) = (chosen.method, chosen.options_for(common.seed));
            let shortest = args.n.iter().copied().min().unwrap_or(1);
            let probe = problem(args, measured_length(args, &chosen, &options, shortest, d), d);
            let run = |t: &Threads| -> Result<_, Error> {
                let mut ws = Workspace::new(Schedule { threads: common.threads, ..Schedule::default() })?;
                Ok(measure(t, &probe, method, &options, &settings, &mut ws)?)
            };
            let measured = match Threads::run(1, run).remove(0)? {
                Ok(row) => Measured { n: row.n, seconds: row.median },
                Err(reasons) => {
                    refused.push((method.id, reasons));
                    continue;
                }
            };
            let state = state_bytes(&problem(args, shortest, d), method, &options)?;
            for cluster in &args.cluster {
                for &n in &args.n {
                    let problem = problem(args, n, d);
                    rows.extend(predicted(cluster, method, &options, &problem, &measured, state)?);
                }
            }
        }
    }
    if common.json {
        let reasons: Vec<_> =
            refused.iter().map(|(id, r)| serde_json::json!({"method": id, "reasons": r})).collect();
        print_json(&serde_json::json!({"clusters": args.cluster, "rows": rows, "refused": reasons}));
        return Ok(ExitCode::SUCCESS);
    }
    let mut table = Table::new(&[
        "method",
        "<schedule",
        "nodes",
        "n",
        "one node",
        "all nodes",
        "efficiency",
        "sent by each",
        "hidden from",
    ]);
    for r in &rows {
        table.push(vec![
            r.method.into(),
            r.schedule.into(),
            r.nodes.to_string(),
            r.n.to_string(),
            seconds(r.one),
            seconds(r.seconds),
            percent(r.efficiency),
            bytes(r.bytes as usize),
            r.hidden_from.map_or("-".into(), |n| number(n.ceil())),
        ]);
    }
    if common.csv {
        print(&table.csv());
    } else {
        let form = if common.md { table.markdown() } else { table.text() };
        print(&form);
        note(
            common,
            "\npredicted from one run on this machine at 8192 tokens or more, counted work, and messages of alpha + bytes x beta\n\
             (docs/scale.md); hidden from: length from which a ring's messages take no longer than its work",
        );
    }
    for (id, reasons) in &refused {
        note(common, &format!("{id}: {}", reasons.join("; ")));
    }
    Ok(ExitCode::SUCCESS)
}
