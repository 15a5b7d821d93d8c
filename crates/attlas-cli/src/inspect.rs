//! `attlas inspect`.

use crate::args::{Common, InspectArgs};
use crate::compare::{catch_interrupts, load_model};
use crate::progress::Progress;
use crate::{Outcome, STOP, note, print, print_json};
use attlas::Mask;
use attlas::diagnostics;
use attlas_lab::inspect::{Inspection, Settings, inspect};
use attlas_lab::table::percent;
use attlas_lab::{Error, Source, Workload, trace};
use std::process::ExitCode;

pub(crate) fn run(args: &InspectArgs, common: &Common) -> Outcome {
    catch_interrupts(common);
    let workload = load(args, common)?;
    let settings = Settings {
        mask: match (args.causal, args.no_mask) {
            (true, _) => Some(Mask::Causal),
            (_, true) => Some(Mask::None),
            _ => None,
        },
        heads: args.heads.clone(),
        threads: common.threads,
        figures: diagnostics::Settings {
            dense_limit: args.max_n,
            rank: args.rank,
            seed: common.seed,
            ..diagnostics::Settings::default()
        },
    };
    let progress = Progress::new(common);
    let result =
        inspect(&workload, &settings, &mut |done, total, what| progress.at(done, total, what), &STOP);
    progress.end();
    let result = result?;
    if let (true, Some(head)) = (result.heads.is_empty(), result.skipped.first()) {
        return Err(Error::argument("source", "at least one head of finite numbers", head.line()));
    }
    show(&result, common);
    if let Some(path) = &args.html {
        trace::write_file(path, result.page().as_bytes())?;
        note(common, &format!("wrote {}", path.display()));
    }
    if let Some(path) = &args.svg {
        trace::write_file(path, result.picture().as_bytes())?;
        note(common, &format!("wrote {}", path.display()));
    }
    for head in &result.skipped {
        eprintln!("{}", head.line());
    }
    if result.interrupted {
        eprintln!("interrupted: what was finished is printed");
        return Ok(ExitCode::from(130));
    }
    Ok(ExitCode::SUCCESS)
}

fn load(args: &InspectArgs, common: &Common) -> Result<Workload, Error> {
    match (&args.source, &args.text) {
        (Source::Model(path), Some(text)) => {
            load_model(path, text, args.tokens, args.layers.clone(), None, common)
        }
        (source, Some(_)) => Err(Error::argument("--text", "a model as the source", source)),
        (source, None) => {
            let mut workload = source.load_as_it_is()?;
            if let Some(layers) = &args.layers {
                workload.keep_layers(&layers.iter().collect::<Vec<_>>())?;
            }
            Ok(workload)
        }
    }
}

fn show(result: &Inspection, common: &Common) {
    if common.json {
        return print_json(result);
    }
    if common.csv {
        return print(&result.csv_table().csv());
    }
    let heads = result.heads.len();
    let heading = format!(
        "{}\nmask {}, {heads} head{}; {} have a sink at their first key",
        result.source,
        result.mask,
        if heads == 1 { "" } else { "s" },
        percent(result.first_key_sinks)
    );
    if common.md {
        print(&format!("{}\n\n{}", heading.replace('\n', "  \n"), result.table().markdown()));
    } else {
        print(&format!("{heading}\n\n{}", result.table().text()));
    }
    note(common, "");
    note(common, &result.legend());
}
