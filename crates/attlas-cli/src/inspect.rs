//! `attlas inspect`.

use crate::args::{Common, InspectArgs, ReorderName};
use crate::inputs::{Numerals, check_outputs, load};
use crate::interrupt;
use crate::progress::measured;
use crate::{Outcome, note, print, print_json, team};
use attlas_lab::crew::Crew;
use attlas_lab::inspect::{Inspection, Settings, inspect_with, key};
use attlas_lab::table::{Table, count, percent, wrap};
use attlas_lab::{Error, Workload, output, reorder};
use std::path::Path;
use std::process::ExitCode;

pub(crate) fn run(args: &InspectArgs, common: &Common) -> Outcome {
    team::crewed(|crew| run_on(crew, args, common))
}

fn run_on(crew: &dyn Crew, args: &InspectArgs, common: &Common) -> Outcome {
    let outputs = [
        ("--html", args.pictures.html.as_deref()),
        ("--svg", args.pictures.svg.as_deref()),
        ("--state", args.state.as_deref()),
    ];
    check_outputs(&outputs, &args.inputs, None)?;
    interrupt::catch(common);
    let workload = load(&args.inputs, None, Numerals::Unchecked, common)?;
    if let (Some(ReorderName::Hyper), Some(path)) = (args.reorder, &args.pictures.svg) {
        return if crew.leads() { reordered(args, path, &workload, common) } else { Ok(ExitCode::SUCCESS) };
    }
    let settings =
        Settings { mask: args.mask.mask(), heads: args.heads.clone(), figures: args.spectra.figures(common) };
    let path = args.state.as_deref();
    let mut ledger = team::ledger(path, "inspection", || Ok(key(&workload, &settings)), common)?;
    let result = measured(common, "", |run| inspect_with(&workload, &settings, crew, &mut ledger, run))?;
    if !crew.leads() {
        return Ok(ExitCode::SUCCESS);
    }
    if let (true, Some(head)) = (result.heads.is_empty(), result.skipped.first()) {
        return Err(Error::argument("source", "at least one head of finite numbers", head.line()));
    }
    show(&result, common);
    if let Some(path) = &args.pictures.html {
        output::write(path, result.page().as_bytes())?;
        note(common, &format!("wrote {}", path.display()));
    }
    if let Some(path) = &args.pictures.svg {
        output::write_figure(path, &args.figure.draw(&result))?;
        note(common, &format!("wrote {}", path.display()));
    }
    for head in &result.skipped {
        tell!("{}", head.line());
    }
    if result.interrupted {
        tell!("interrupted: what was finished is printed");
        return Ok(ExitCode::from(130));
    }
    Ok(ExitCode::SUCCESS)
}

/// Writes the figure of heads before and after sorting.
fn reordered(args: &InspectArgs, path: &Path, workload: &Workload, common: &Common) -> Outcome {
    let found = reorder::reorder(workload, args.heads.as_ref(), args.mask.mask(), args.block, common.seed)?;
    output::write_figure(path, &reorder::svg(&found))?;
    if common.json {
        let entry = |h: &reorder::Reordered| {
            let [before, after] = h.inside;
            serde_json::json!({"layer": h.layer, "head": h.head, "block": h.block, "before": before, "after": after})
        };
        print_json(&found.iter().map(entry).collect::<Vec<_>>());
        return Ok(ExitCode::SUCCESS);
    }
    let mut table = Table::new(&["layer", "head", "before", "after"]);
    for h in &found {
        let [before, after] = h.inside.map(percent);
        table.push(vec![h.layer.map_or("-".into(), |l| l.to_string()), h.head.to_string(), before, after]);
    }
    if common.csv {
        print(&table.csv());
    } else if common.md {
        print(&table.markdown());
    } else {
        print(&table.text());
    }
    note(
        common,
        &format!("share of the weight in blocks of {} on the diagonal; wrote {}", args.block, path.display()),
    );
    Ok(ExitCode::SUCCESS)
}

fn show(result: &Inspection, common: &Common) {
    if common.json {
        return print_json(result);
    }
    if common.csv {
        return print(&result.csv_table().csv());
    }
    let heads = result.heads.len();
    let heading =
        format!("{}\nmask {}, {}\n{}", result.source, result.mask, count(heads, "head"), result.sinks_said());
    let masses = "mass of a row that its largest weights hold, mean";
    if common.md {
        let (figures, mass) = (result.table().markdown(), result.mass_table().markdown());
        print(&format!("{}\n\n{figures}\n{masses}\n\n{mass}", heading.replace('\n', "  \n")));
    } else {
        print(&format!("{heading}\n\n{}\n{masses}\n\n{}", result.table().text(), result.mass_table().text()));
    }
    note(common, "");
    note(common, &wrap(&result.legend()));
}
