//! The command line of attlas: parses, calls the lab, prints. A library, so that the Python package has the same one.
//!
//! Results go to standard output and everything else to standard error. Exit status 0: done, 1: over the stated
//! budget, 2: an error, 130: interrupted, with what was finished printed.

#![forbid(unsafe_code)]

mod args;
mod bench;
mod compare;
mod compress;
mod convert;
mod inputs;
mod inspect;
mod language;
mod progress;
mod report;
mod simulate;
mod tune;

use args::{Cli, Command, CompareArgs, MethodsArgs};
use attlas_lab::atlas::{Atlas, ConversionEntry, LayerEntry, MethodEntry};
use attlas_lab::select;
use clap::Parser;
use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;
use std::sync::OnceLock;
use std::sync::atomic::AtomicBool;

/// Counts allocated bytes where the program has it as its allocator, so that reports can say how much memory a method
/// needs.
static ALLOCATOR: peak_alloc::PeakAlloc = peak_alloc::PeakAlloc;

/// The words after the program's name.
static ARGUMENTS: OnceLock<Vec<OsString>> = OnceLock::new();

/// Set by Ctrl-C.
static STOP: AtomicBool = AtomicBool::new(false);

/// What a command ends with.
type Outcome = Result<ExitCode, attlas_lab::Error>;

/// Runs one command: the words after the program's name in, the exit status out. To be called once in a process.
pub fn run(arguments: Vec<OsString>) -> u8 {
    let code = command(ARGUMENTS.get_or_init(|| arguments));
    (0..=u8::MAX).find(|&n| ExitCode::from(n) == code).unwrap_or(2)
}

fn command(arguments: &[OsString]) -> ExitCode {
    let program = OsString::from("attlas");
    let cli = match Cli::try_parse_from(std::iter::once(&program).chain(arguments)) {
        Ok(cli) => cli,
        Err(e) => {
            let _ = e.print();
            return u8::try_from(e.exit_code()).map_or(ExitCode::FAILURE, ExitCode::from);
        }
    };
    let outcome = match &cli.command {
        Some(Command::Methods(a)) => methods(a, &cli.common),
        Some(Command::Inspect(a)) => inspect::run(a, &cli.common),
        Some(Command::Compare(a)) => compare::run(a, &cli.common),
        Some(Command::Report(a)) => report::run(a, &cli.common),
        Some(Command::Bench(a)) => bench::run(a, &cli.common),
        Some(Command::Simulate(a)) => simulate::run(a, &cli.common),
        Some(Command::Extract(a)) => language::extract(a, &cli.common),
        Some(Command::Tune(a)) => tune::run(a, &cli.common),
        Some(Command::Compress(a)) => compress::run(a, &cli.common),
        Some(Command::Convert(a)) => convert::run(a, &cli.common),
        Some(Command::Perplexity(a)) => language::perplexity(a, &cli.common),
        Some(Command::Generate(a)) => language::generate(a, &cli.common),
        None => compare::run(&CompareArgs::first_look(&cli.common), &cli.common),
    };
    outcome.unwrap_or_else(|error| {
        if matches!(error, attlas_lab::Error::Model(attlas_model::Error::Interrupted)) {
            eprintln!("interrupted: nothing was finished");
            return ExitCode::from(130);
        }
        eprintln!("error: {error}");
        eprintln!("{}", next_step(&error));
        ExitCode::from(2)
    })
}

/// Prints a result. A reader that has gone away, such as `head`, is no error.
fn print(text: &str) {
    let _ = std::io::stdout().lock().write_all(text.as_bytes());
}

/// Prints a record as indented JSON.
fn print_json(record: &impl serde::Serialize) {
    match serde_json::to_string_pretty(record) {
        Ok(text) => print(&(text + "\n")),
        Err(e) => eprintln!("error: the result cannot be written as JSON: {e}"),
    }
}

/// A note for people on standard error.
fn note(common: &args::Common, text: &str) {
    if !common.quiet {
        eprintln!("{text}");
    }
}

const RECIPE_HELP: &str = "docs/recipe.md shows a recipe";

/// What to do about an error.
fn next_step(error: &attlas_lab::Error) -> &'static str {
    use attlas_lab::Error as E;
    use attlas_model::Error as M;
    if let E::Model(M::InFile { source, .. }) = error
        && matches!(**source, M::Recipe(_))
    {
        return RECIPE_HELP;
    }
    match error {
        E::Model(M::Attention(inner)) => next_step_of_library(inner),
        E::Attlas(inner) => next_step_of_library(inner),
        E::Model(M::ContextTooShort { .. }) => {
            "read fewer tokens with --tokens, or in windows with --context"
        }
        E::Model(M::Recipe(_)) => RECIPE_HELP,
        E::Model(M::ChatTemplate(_)) => "leave --chat away to continue a plain text",
        E::Model(M::Io { .. }) => "check the path and its permissions",
        E::Model(M::Exists { .. }) => "name another folder, or move what is there out of the way",
        E::Model(M::Unsupported { .. }) => "docs/architecture.md lists what is read, run and written",
        E::Model(_) => {
            "a model is a GGUF file, or a folder with config.json, *.safetensors and tokenizer.json"
        }
        E::Io { .. } => "check the path and its permissions",
        E::Malformed { .. } => "write the file again: it was cut short or is of another kind",
        E::MissingTensor { .. } | E::TensorShape { .. } => {
            "a trace holds layer{l}.q, layer{l}.k and layer{l}.v of shape [heads, n, d]; see docs/json.md"
        }
        E::NonFinite { .. } => "remove rows that are not finite before writing the trace",
        _ => "run `attlas help` for examples of every command",
    }
}

/// Shows a method, or a layer or conversion where no method has that id.
fn describe(id: &str, common: &args::Common) -> Outcome {
    use attlas::registry;
    let method = registry::method(id);
    match (method, registry::layer(id), registry::conversion(id)) {
        (Ok(m), _, _) if common.json => print_json(&MethodEntry::new(m)),
        (Ok(m), _, _) => print(&MethodEntry::new(m).text()),
        (Err(_), Ok(l), _) if common.json => print_json(&LayerEntry::new(l)),
        (Err(_), Ok(l), c) => {
            print(&LayerEntry::new(l).text());
            if let Ok(c) = c {
                print(&format!("\nconversion {}", ConversionEntry::new(c).text()));
            }
        }
        (Err(_), Err(_), Ok(c)) if common.json => print_json(&ConversionEntry::new(c)),
        (Err(_), Err(_), Ok(c)) => print(&ConversionEntry::new(c).text()),
        (Err(e), Err(_), Err(_)) => return Err(e.into()),
    }
    Ok(ExitCode::SUCCESS)
}

fn next_step_of_library(error: &attlas::Error) -> &'static str {
    match error {
        attlas::Error::UnknownId { .. } => "run `attlas methods` to see what each one is",
        attlas::Error::UnknownParam { .. } | attlas::Error::InvalidParam { .. } => {
            "run `attlas methods ID` to see every parameter with its range"
        }
        _ => "run `attlas help` for examples of every command",
    }
}

fn methods(args: &MethodsArgs, common: &args::Common) -> Outcome {
    if let Some(id) = &args.id {
        return describe(id, common);
    }
    let atlas = Atlas::new(args.family.as_deref().map(select::family).transpose()?);
    if common.json {
        print_json(&atlas);
    } else if common.csv {
        print(&atlas.table().csv());
    } else if common.md {
        print(&atlas.markdown());
    } else {
        print(&atlas.text());
        note(common, "`attlas methods ID` shows a method, layer or conversion with its parameters.");
    }
    Ok(ExitCode::SUCCESS)
}
