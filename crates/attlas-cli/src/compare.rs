//! `attlas compare`.

use crate::args::{Cli, Command, Common, CompareArgs};
use crate::inputs::{Numerals, check_outputs, load};
use crate::interrupt;
use crate::progress::measured;
use crate::{Outcome, note, print, print_json, team};
use attlas_lab::budget::{Budget, equalise};
use attlas_lab::compare::{Comparison, Matching, Settings, compare_with, curves, key};
use attlas_lab::crew::Crew;
use attlas_lab::select::{Chosen, Selection};
use attlas_lab::table::{bytes, count, number, seconds, wrap};
use attlas_lab::{Calibrations, Error, Meter, Run, Workload, html, output};
use attlas_num::kernels::Counting;
use clap::Parser;
use std::process::ExitCode;

/// Time limit of a run without a command, in seconds.
const FIRST_LOOK_SECONDS: &str = "18";

impl CompareArgs {
    /// Returns the comparison that runs without a command.
    pub(crate) fn first_look(common: &Common) -> Self {
        note(
            common,
            "No command given: comparing all methods on the default source, for at most 20 seconds.",
        );
        note(common, "`attlas help` shows what else there is.");
        let words = ["attlas", "compare", "--time-limit", FIRST_LOOK_SECONDS];
        match Cli::try_parse_from(words).map(|cli| cli.command) {
            Ok(Some(Command::Compare(args))) => args,
            _ => unreachable!("the words above are a comparison"),
        }
    }
}

/// The allocator's figures.
pub(crate) fn meter() -> Meter {
    Meter { peak: Counting::peak_bytes, reset: Counting::reset_peak }
}

pub(crate) fn run(args: &CompareArgs, common: &Common) -> Outcome {
    team::crewed(|crew| run_on(crew, args, common))
}

fn run_on(crew: &dyn Crew, args: &CompareArgs, common: &Common) -> Outcome {
    let selection = args.methods.choice().resolve()?;
    let gpu = args.device.open()?;
    if gpu.is_some() && !crew.is_alone() {
        return Err(Error::argument("--device", "cpu with several processes", "cuda"));
    }
    let (selection, left_out) = match &gpu {
        Some(gpu) => gpu.select(selection)?,
        None => (selection, Vec::new()),
    };
    let outputs = [
        ("--save-calibration", args.save_calibration.as_deref()),
        ("--html", args.pictures.html.as_deref()),
        ("--svg", args.pictures.svg.as_deref()),
        ("--state", args.state.as_deref()),
    ];
    check_outputs(&outputs, &args.inputs, args.calibration.as_deref())?;
    interrupt::catch(common);
    let workload = load(&args.inputs, args.heads.as_ref(), Numerals::Finite, common)?;
    let settings = Settings {
        mask: args.mask.mask(),
        seeds: args.seeds as usize,
        time_limit: args.time_limit,
        meter: meter(),
        ..Settings::default()
    };
    let given = args.calibration.as_deref().map(Calibrations::read).transpose()?.unwrap_or_default();
    let (selection, matched) = match args.matched {
        Some(budget) => equal_budgets(crew, &workload, selection, budget, &settings, common)?,
        None => (selection, None),
    };
    let (threads, seed) = (common.threads, common.seed);
    let of = || Run::silent(threads, seed, |run| key(&workload, &selection, &settings, &given, run));
    let mut ledger = team::ledger(args.state.as_deref(), "comparison", of, common)?;
    let result = measured(common, "", |run| {
        compare_with(&workload, &selection, &settings, &given, crew, &mut ledger, run)
    });
    let mut result = match matched {
        Some(matching) => result?.matched_to(matching),
        None => result?,
    };
    if args.curves && !result.interrupted {
        result.curves = measured(common, "curve of ", |run| {
            curves::curves(&workload, &selection, &settings, &given, crew, run)
        })?;
        result.verdict = curves::verdict(&result.curves, result.tokens);
    }
    if !crew.leads() {
        return Ok(ExitCode::SUCCESS);
    }
    show(&result, args, common);
    if let Some(gpu) = &gpu {
        note(common, &format!("\n{}\n{}", gpu.heading(), gpu.times(&result).text()));
        left_out.iter().for_each(|line| note(common, line));
    }
    if let Some(path) = &args.save_calibration {
        result.learnt.write(path)?;
        note(common, &format!("wrote {}", path.display()));
    }
    if let Some(path) = &args.pictures.html {
        output::write(path, html::comparison(&result).as_bytes())?;
        note(common, &format!("wrote {}", path.display()));
    }
    if let Some(path) = &args.pictures.svg {
        let picture = match result.curves.is_empty() {
            true => html::picture(&result),
            false => html::curves(&result.curves),
        };
        output::write_figure(path, &picture)?;
        note(common, &format!("wrote {}", path.display()));
    }
    if result.interrupted {
        tell!("interrupted: what was finished is printed");
        return Ok(ExitCode::from(130));
    }
    let named: Vec<&str> = selection.iter().filter(|c| c.named).map(|c| c.method.id).collect();
    if !named.is_empty() && result.refused.len() >= selection.len() * workload.layers.len() {
        let r = &result.refused[0];
        return Err(Error::Attlas(attlas::Error::Unsupported {
            method: r.method.into(),
            reasons: r.reasons.clone(),
        }));
    }
    match args.budget {
        Some(budget) => Ok(judge(&result, budget, common)),
        None => Ok(ExitCode::SUCCESS),
    }
}

/// Returns settings with which all methods spend the same budget, and their description. The first process searches for
/// them and shares them with the others.
fn equal_budgets(
    crew: &dyn Crew,
    workload: &Workload,
    selection: Selection,
    budget: Budget,
    settings: &Settings,
    common: &Common,
) -> Result<(Selection, Option<Matching>), Error> {
    let broken = |e: serde_json::Error| Error::argument("the settings of methods", "a list", e);
    if !crew.leads() {
        let shared: Vec<attlas::Options> =
            serde_json::from_str(&crew.broadcast(String::new())).map_err(broken)?;
        let with = |(chosen, options)| Chosen { options, ..chosen };
        return Ok((selection.into_iter().zip(shared).map(with).collect(), None));
    }
    let (selection, methods) =
        measured(common, "budget of ", |run| equalise(workload, &selection, budget, settings, run))?;
    let options: Vec<&attlas::Options> = selection.iter().map(|c| &c.options).collect();
    crew.broadcast(serde_json::to_string(&options).map_err(broken)?);
    Ok((selection, Some(Matching { budget, methods })))
}

/// Returns the exit status: success if some method stays within the error budget.
fn judge(result: &Comparison, budget: f64, common: &Common) -> ExitCode {
    let within: Vec<&str> = result
        .summary
        .iter()
        .filter(|s| s.family != "baseline" && s.rel_fro.mean <= budget)
        .map(|s| s.method)
        .collect();
    if within.is_empty() {
        note(common, &format!("over budget: no method stays within a relative error of {budget}"));
        return ExitCode::from(1);
    }
    note(common, &format!("within {budget}: {}", within.join(", ")));
    ExitCode::SUCCESS
}

fn show(result: &Comparison, args: &CompareArgs, common: &Common) {
    if common.json {
        return print_json(result);
    }
    if common.csv {
        return print(&result.csv_table().csv());
    }
    let table = if args.each_head { result.head_table() } else { result.table() };
    let heading = heading(result);
    let features = result.feature_table();
    if common.md {
        print(&format!("{}\n\n{}", heading.join("  \n"), table.markdown()));
    } else {
        print(&format!("{}\n\n{}", heading.join("\n"), table.text()));
    }
    if !features.is_empty() {
        let text = if common.md { features.markdown() } else { features.text() };
        print(&format!("\nfeatures, predicted for a typical kernel entry of the worst head:\n\n{text}"));
    }
    if let Some(matching) = &result.matched {
        let text = matching.table();
        let text = if common.md { text.markdown() } else { text.text() };
        print(&format!(
            "\nat most {} (a tenth more where heads differ), over all heads:\n\n{text}",
            matching.budget
        ));
        if let Some(over) = matching.unmatched() {
            print(&format!("{}\n", wrap(&over)));
        }
    }
    if !result.curves.is_empty() {
        let curves = curves::table(&result.curves);
        let text = if common.md { curves.markdown() } else { curves.text() };
        print(&format!(
            "\nbest within a quarter of the scores, as published and beside a near field:\n\n{text}"
        ));
    }
    print(&format!("\n{}\n", wrap(&result.verdict)));
    if let Some(fell_back) = result.fallbacks() {
        print(&format!("{}\n", wrap(&fell_back)));
    }
    // Layers that a method refuses for the same reasons share one line.
    let mut reported: Vec<(&str, &Vec<String>)> = Vec::new();
    for r in &result.refused {
        if reported.contains(&(r.method, &r.reasons)) {
            continue;
        }
        reported.push((r.method, &r.reasons));
        let same = result.refused.iter().filter(|o| (o.method, &o.reasons) == (r.method, &r.reasons));
        let layers: Vec<String> = same.filter_map(|o| o.layer).map(|l| l.to_string()).collect();
        let on = if layers.is_empty() { String::new() } else { format!(" on layers {}", layers.join(", ")) };
        note(common, &wrap(&format!("{} refused{on}: {}", r.method, r.reasons.join("; "))));
    }
    let compared = result.exact.heads.len();
    if compared < result.heads {
        let why = if result.interrupted { "before the interruption" } else { "within the time limit" };
        note(
            common,
            &format!(
                "compared on {compared} of {} heads: all methods shown finished these {why}",
                result.heads
            ),
        );
    }
    let mut late: Vec<&str> = Vec::new();
    for s in &result.skipped {
        if !late.contains(&s.method) && !result.summary.iter().any(|m| m.method == s.method) {
            late.push(s.method);
        }
    }
    if !late.is_empty() {
        note(common, &wrap(&format!("not measured, the time limit was reached: {}", late.join(", "))));
    }
    if !args.each_head {
        note(common, "");
        note(common, &legend(result));
    }
}

fn heading(result: &Comparison) -> Vec<String> {
    let heads = result.exact.heads.len();
    vec![
        result.source.clone(),
        format!(
            "mask {}, {}, {}, {}, {} from {}",
            result.mask,
            count(heads, "head"),
            count(result.threads, "thread"),
            result.isa,
            count(result.seeds, "seed"),
            result.seed,
        ),
        format!(
            "exact: {} for {}, {} GF/s, {} beyond inputs and output",
            seconds(result.exact.run_seconds),
            if heads == 1 { "the head".into() } else { format!("all {heads} heads") },
            number(result.exact.gflops),
            bytes(result.exact.peak_bytes),
        ),
    ]
}

fn legend(result: &Comparison) -> String {
    let spread = if result.exact.heads.len() > 1 {
        "worst: of the heads"
    } else {
        "+-: 95 % Student t interval over seeds"
    };
    // The legend explains only the columns shown.
    let mut lines = vec![format!("error: relative Frobenius error, mean; {spread}")];
    lines.push("set-up: planning; run: executing; faster: exact over both; keys: share of scores".into());
    lines.push("mean_v: the mean of the visible values, which any method should beat".into());
    if result.summary.iter().any(|s| s.front) {
        lines.push("front: nothing is both faster and more accurate, exact attention included".into());
    }
    if result.summary.iter().any(|s| s.fell_back()) {
        lines.push("exact: its settings cover this length, so that exact attention was computed".into());
    }
    if !result.feature_table().is_empty() {
        lines.push("entry sd: relative standard deviation of a kernel entry, above 0.5 rows mean".into());
        lines.push("little; needed: features for the sd that --set ID.target_error asks for;".into());
        lines.push("decode: bytes a stream holds per key head, whatever the length".into());
    }
    lines.join("\n")
}
