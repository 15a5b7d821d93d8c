//! `attlas report`.

use crate::args::{Common, ReportArgs};
use crate::compare::meter;
use crate::inputs::{Numerals, check_outputs, load};
use crate::interrupt;
use crate::progress::measured;
use crate::{Outcome, note, print, print_json};
use attlas_lab::compare::compare;
use attlas_lab::report::Report;
use attlas_lab::{compare as comparing, inspect, output};
use attlas_model::Recipe;
use std::process::ExitCode;

pub(crate) fn run(args: &ReportArgs, common: &Common) -> Outcome {
    let selection = args.methods.choice().resolve()?;
    let recipe = args.recipe.as_deref().map(Recipe::open).transpose()?;
    check_outputs(&[("--out", Some(&args.out))], &args.inputs, args.recipe.as_deref())?;
    interrupt::catch(common);
    let workload = load(&args.inputs, None, Numerals::Finite, common)?;
    let looking = inspect::Settings { figures: args.spectra.figures(common), ..inspect::Settings::default() };
    let inspection = measured(common, "", |run| inspect::inspect(&workload, &looking, run))?;
    let measuring = comparing::Settings {
        seeds: args.seeds as usize,
        time_limit: args.time_limit,
        meter: meter(),
        ..comparing::Settings::default()
    };
    let comparison = measured(common, "", |run| compare(&workload, &selection, &measuring, run))?;
    if inspection.interrupted || comparison.interrupted {
        tell!("interrupted: no report was written");
        return Ok(ExitCode::from(130));
    }
    let name = args.recipe.as_ref().map(|p| p.display().to_string()).unwrap_or_default();
    let commands = commands(recipe.as_ref());
    let report = Report {
        inspection: &inspection,
        comparison: &comparison,
        recipe: recipe.as_ref().map(|r| (name.as_str(), r)),
        commands: &commands,
    };
    let page = report.page();
    output::write(&args.out, page.as_bytes())?;
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

/// Returns this command, and the one that made the recipe.
fn commands(recipe: Option<&Recipe>) -> Vec<String> {
    let made = recipe.and_then(|r| r.evidence.get("command")).map(ToString::to_string);
    made.into_iter().chain([command_line()]).collect()
}

/// Returns this process's command line, quoted for a shell.
pub(crate) fn command_line() -> String {
    let words = crate::ARGUMENTS.get().into_iter().flatten().map(|a| quoted(&a.to_string_lossy()));
    std::iter::once("attlas".to_string()).chain(words).collect::<Vec<_>>().join(" ")
}

/// Quotes a word for a shell.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,%@+".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.into()
    } else {
        format!("'{}'", word.replace('\'', "'\\''"))
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
