//! `attlas report`.

use crate::args::{Common, ReportArgs};
use crate::compare::{catch_interrupts, load_model, meter};
use crate::progress::Progress;
use crate::{Outcome, STOP, note, print, print_json};
use attlas::diagnostics;
use attlas_lab::compare::compare;
use attlas_lab::report::Report;
use attlas_lab::{Error, Source, Workload, compare as comparing, inspect, trace};
use attlas_model::Recipe;
use std::process::ExitCode;

pub(crate) fn run(args: &ReportArgs, common: &Common) -> Outcome {
    let selection = args.methods.choice().resolve()?;
    let recipe = args.recipe.as_deref().map(Recipe::open).transpose()?;
    catch_interrupts(common);
    let workload = load(args, common)?;
    let looking = inspect::Settings {
        threads: common.threads,
        figures: diagnostics::Settings {
            dense_limit: args.max_n,
            rank: args.rank,
            seed: common.seed,
            ..diagnostics::Settings::default()
        },
        ..inspect::Settings::default()
    };
    let progress = Progress::new(common);
    let inspection =
        inspect::inspect(&workload, &looking, &mut |done, total, what| progress.at(done, total, what), &STOP);
    progress.end();
    let inspection = inspection?;
    let measuring = comparing::Settings {
        seeds: args.seeds as usize,
        seed: common.seed,
        threads: common.threads,
        time_limit: args.time_limit,
        meter: meter(),
        ..comparing::Settings::default()
    };
    let progress = Progress::new(common);
    let comparison = compare(
        &workload,
        &selection,
        &measuring,
        &mut |step| progress.at(step.done, step.total, step.method),
        &STOP,
    );
    progress.end();
    let comparison = comparison?;
    if inspection.interrupted || comparison.interrupted {
        eprintln!("interrupted: no report was written");
        return Ok(ExitCode::from(130));
    }
    let name = args.recipe.as_ref().map(|p| p.display().to_string()).unwrap_or_default();
    let commands = [std::env::args().map(|a| quoted(&a)).collect::<Vec<_>>().join(" ")];
    let report = Report {
        inspection: &inspection,
        comparison: &comparison,
        recipe: recipe.as_ref().map(|r| (name.as_str(), r)),
        commands: &commands,
    };
    let page = report.page();
    trace::write_file(&args.out, page.as_bytes())?;
    if common.json {
        print_json(&serde_json::json!({
            "out": args.out.display().to_string(),
            "bytes": page.len(),
            "heads": inspection.heads.len(),
            "methods": comparison.summary.iter().map(|s| s.method).collect::<Vec<_>>(),
        }));
    } else {
        print(&format!("{}\n", args.out.display()));
        note(common, "open it in a browser; it needs no network");
    }
    Ok(ExitCode::SUCCESS)
}

/// A word as a shell reads it back.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,%@+".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.into()
    } else {
        format!("'{}'", word.replace('\'', "'\\''"))
    }
}

fn load(args: &ReportArgs, common: &Common) -> Result<Workload, Error> {
    match (&args.source, &args.text) {
        (Source::Model(path), Some(text)) => {
            load_model(path, text, args.tokens, args.layers.clone(), None, common)
        }
        (source, Some(_)) => Err(Error::argument("--text", "a model as the source", source)),
        (source, None) => {
            let mut workload = source.load()?;
            if let Some(layers) = &args.layers {
                workload.keep_layers(&layers.iter().collect::<Vec<_>>())?;
            }
            Ok(workload)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::quoted;

    #[test]
    fn words_are_quoted_for_a_shell() {
        assert_eq!((quoted("--n=4k"), quoted("a b")), ("--n=4k".into(), "'a b'".into()));
        assert_eq!((quoted(""), quoted("it's")), ("''".into(), "'it'\\''s'".into()));
    }
}
