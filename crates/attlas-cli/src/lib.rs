//! The command line of attlas: parses, calls the lab, prints. It is a library because the Python package runs it, too.
//!
//! Results go to standard output and everything else to standard error. Exit status 0: done, 1: over the stated
//! budget, 2: an error, 130: interrupted, with what was finished printed.

#![forbid(unsafe_code)]

/// Prints a line on standard error. `eprintln!` would panic if the line cannot be written, and lose the result.
macro_rules! tell {
    ($($text:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr(), $($text)*);
    }};
}

mod args;
mod bench;
mod calibrate;
mod compare;
mod compress;
mod convert;
mod decompose;
mod inputs;
mod inspect;
mod interrupt;
mod language;
mod layer;
mod progress;
mod report;
mod simulate;
mod spread;
mod team;
mod tune;
mod verdict;

use args::{Cli, Command, CompareArgs, MethodsArgs};
use attlas_lab::atlas::{Atlas, ConversionEntry, LayerEntry, MethodEntry};
use attlas_lab::select;
use attlas_lab::table::count;
use attlas_lab::words::{nearest, printable};
use clap::{CommandFactory, Parser};
use std::ffi::OsString;
use std::io::{ErrorKind, Write};
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, OnceLock, PoisonError};

/// Arguments after the program's name.
static ARGUMENTS: OnceLock<Vec<OsString>> = OnceLock::new();

/// Set by Ctrl-C.
static STOP: AtomicBool = AtomicBool::new(false);

/// Result of a command.
type Outcome = Result<ExitCode, attlas_lab::Error>;

/// Runs one command from the arguments after the program's name, and returns the exit status. Call it once per process.
pub fn run(arguments: Vec<OsString>) -> u8 {
    let code = command(ARGUMENTS.get_or_init(|| arguments));
    (0..=u8::MAX).find(|&n| ExitCode::from(n) == code).unwrap_or(2)
}

fn command(arguments: &[OsString]) -> ExitCode {
    let program = OsString::from("attlas");
    let mut cli = match Cli::try_parse_from(std::iter::once(&program).chain(arguments)) {
        Ok(cli) => cli,
        Err(e) => {
            // Help and the version are results and go to standard output.
            if let Err(lost) = e.print().and_then(|()| std::io::stdout().flush()) {
                lose(lost);
            }
            return ending(u8::try_from(e.exit_code()).map_or(ExitCode::FAILURE, ExitCode::from));
        }
    };
    let joined = team::join(cli.command.as_ref());
    cli.common.quiet |= team::follows();
    cap_threads(&mut cli.common);
    let outcome = joined.and_then(|()| dispatch(&cli));
    let status = outcome.unwrap_or_else(|error| {
        team::before_error();
        if matches!(error, attlas_lab::Error::Model(attlas_model::Error::Interrupted)) {
            tell!("interrupted: nothing was finished");
            team::after_error(130);
            return ExitCode::from(130);
        }
        tell!("error: {}", printable(&described(&error)));
        tell!("{}", next_step(&error, cli.command.as_ref()));
        team::after_error(2);
        ExitCode::from(2)
    });
    team::leave();
    ending(status)
}

fn dispatch(cli: &Cli) -> Outcome {
    match &cli.command {
        Some(Command::Methods(a)) => methods(a, &cli.common),
        Some(Command::Inspect(a)) => inspect::run(a, &cli.common),
        Some(Command::Compare(a)) => compare::run(a, &cli.common),
        Some(Command::Report(a)) => report::run(a, &cli.common),
        Some(Command::Bench(a)) => bench::run(a, &cli.common),
        Some(Command::Decompose(a)) => decompose::run(a, &cli.common),
        Some(Command::Layer(a)) => layer::run(a, &cli.common),
        Some(Command::Simulate(a)) => simulate::run(a, &cli.common),
        Some(Command::Extract(a)) => language::extract(a, &cli.common),
        Some(Command::Calibrate(a)) => calibrate::run(a, &cli.common),
        Some(Command::Tune(a)) => tune::run(a, &cli.common),
        Some(Command::Compress(a)) => compress::run(a, &cli.common),
        Some(Command::Convert(a)) => convert::run(a, &cli.common),
        Some(Command::Perplexity(a)) => language::perplexity(a, &cli.common),
        Some(Command::Generate(a)) => language::generate(a, &cli.common),
        Some(Command::Completions(a)) => completions(a),
        Some(Command::Man(a)) => manual(a),
        None => compare::run(&CompareArgs::first_look(&cli.common), &cli.common),
    }
}

/// First error in writing the result, if any.
static LOST: Mutex<Option<std::io::Error>> = Mutex::new(None);

/// Prints a result. A closed pipe, as after `head`, is no error; [`ending`] reports any other failure.
fn print(text: &str) {
    if team::follows() {
        return;
    }
    let mut out = std::io::stdout().lock();
    if let Err(e) = out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        lose(e);
    }
}

fn lose(error: std::io::Error) {
    if error.kind() != std::io::ErrorKind::BrokenPipe {
        LOST.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
    }
}

/// Returns the exit status: that of the outcome, or an error if the result could not be printed.
fn ending(status: ExitCode) -> ExitCode {
    match &*LOST.lock().unwrap_or_else(PoisonError::into_inner) {
        None => status,
        Some(e) => {
            tell!("error: standard output: writing failed: {e}");
            tell!("make room, or send the result to another place; what was printed is not complete");
            ExitCode::from(2)
        }
    }
}

/// Prints a record as indented JSON.
fn print_json(record: &impl serde::Serialize) {
    match serde_json::to_string_pretty(record) {
        Ok(text) => print(&(text + "\n")),
        Err(e) => lose(std::io::Error::other(format!("the result is no JSON: {e}"))),
    }
}

/// Prints a note on standard error, unless `--quiet`.
fn note(common: &args::Common, text: &str) {
    if !common.quiet {
        tell!("{}", printable(text));
    }
}

const RECIPE_HELP: &str = "docs/recipe.md shows a recipe";

/// Most threads per processor; more would only cost memory and start-up time.
const THREADS_EACH: usize = 8;

/// Caps the number of threads, and prints a note if it exceeds the processors. Results do not depend on it.
fn cap_threads(common: &mut args::Common) {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let asked = common.threads;
    if asked <= processors {
        return;
    }
    common.threads = asked.min(THREADS_EACH * processors);
    let used = if common.threads < asked { format!("; {} are used", common.threads) } else { String::new() };
    note(common, &format!("note: {asked} threads on {}{used}", count(processors, "processor")));
}

fn completions(args: &args::CompletionsArgs) -> Outcome {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "attlas", &mut script);
    print(&String::from_utf8_lossy(&script));
    Ok(ExitCode::SUCCESS)
}

fn manual(args: &args::ManArgs) -> Outcome {
    let mut all = Cli::command();
    all.build();
    let page = match &args.command {
        None => all,
        Some(name) => {
            let known: Vec<String> = all.get_subcommands().map(|c| c.get_name().to_string()).collect();
            let found = all.get_subcommands().find(|c| c.get_name() == name).cloned();
            found
                .ok_or_else(|| {
                    attlas_lab::Error::argument("the command", format!("one of {}", known.join(", ")), name)
                })?
                .display_name(format!("attlas-{name}"))
        }
    };
    let mut text = Vec::new();
    clap_mangen::Man::new(page)
        .render(&mut text)
        .map_err(|e| attlas_lab::Error::writing(Path::new("the manual page"), e))?;
    print(&String::from_utf8_lossy(&text));
    Ok(ExitCode::SUCCESS)
}

/// Describes an error: suggests the likely name instead of listing all, and puts system errors in plain words.
fn described(error: &attlas_lab::Error) -> String {
    use attlas_lab::Error as E;
    use attlas_model::Error as M;
    let missing = |path: &Path| format!("{}: there is no such file or folder", path.display());
    match error {
        E::Attlas(inner) | E::Model(M::Attention(inner)) => meant(inner),
        E::Model(M::Io { path, source }) if source.kind() == ErrorKind::NotFound => missing(path),
        E::Io { path, action, reason } if *action == "reading" && reason.kind() == ErrorKind::NotFound => {
            format!("{}: reading failed: there is no such file", path.display())
        }
        _ => error.to_string(),
    }
}

fn meant(error: &attlas::Error) -> String {
    let all = |names: &'_ [String]| names.to_vec();
    let (said, word, known) = match error {
        attlas::Error::UnknownId { kind, id, known } => {
            (format!("there is no {kind} {id}"), id.as_str(), all(known))
        }
        attlas::Error::UnknownParam { name, accepted } => {
            (format!("there is no parameter {name}"), name.split(' ').next().unwrap_or(name), all(accepted))
        }
        _ => return error.to_string(),
    };
    match nearest(word, known.iter().map(String::as_str)) {
        Some(near) => format!("{said}; did you mean {near}?"),
        None => error.to_string(),
    }
}

/// Returns advice on a system error.
fn about(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::NotFound => "check the path",
        ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => "check the permissions of the path",
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => "make room on the disk, or name another place",
        _ => "check the path and its permissions",
    }
}

/// Returns advice on an error.
fn next_step(error: &attlas_lab::Error, command: Option<&Command>) -> &'static str {
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
        E::Model(M::ContextTooShort { .. }) => match command {
            Some(Command::Generate(_)) => "give a shorter prompt, or make room with --context",
            Some(Command::Perplexity(_)) => "read fewer tokens with --tokens, or in windows with --context",
            _ => "read fewer tokens with --tokens",
        },
        E::Model(M::Invalid { what, .. }) if what == "the text" => match command {
            Some(Command::Perplexity(_)) => "give a longer text, or a shorter --context",
            _ => "give a longer text",
        },
        E::Model(M::Invalid { what, .. }) if what == "the window" => "give a longer --context",
        E::Model(M::BeingWritten { .. }) => "wait until it has ended, or name another folder",
        E::Model(M::Recipe(_)) => RECIPE_HELP,
        E::Model(M::ChatTemplate(_)) => "leave --chat away to continue a plain text",
        E::Model(M::Io { source, .. }) => about(source.kind()),
        E::Model(M::Exists { .. }) => "name another folder, or move what is there out of the way",
        E::Model(M::Unsupported { .. }) => "docs/architecture.md lists what is read, run and written",
        E::Model(_) => {
            "a model is a GGUF file, or a folder with config.json, *.safetensors and tokenizer.json"
        }
        E::Io { reason, .. } => about(reason.kind()),
        E::Malformed { .. } => "write the file again: it was cut short or is of another kind",
        E::MissingTensor { .. } | E::TensorShape { .. } => {
            "a trace holds layer{l}.q, layer{l}.k and layer{l}.v of shape [heads, n, d]; see docs/json.md"
        }
        E::NoRoom { .. } => "give fewer tokens, heads or columns",
        E::NonFinite { .. } => "remove rows that are not finite before writing the trace",
        _ => "run `attlas help` for examples of every command",
    }
}

/// Shows a method, or a layer or conversion if no method has that id.
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

/// Returns the line width in columns, from the environment or the terminal; `None` elsewhere.
fn width() -> Option<usize> {
    let said = std::env::var("COLUMNS").ok().and_then(|n| n.parse().ok()).filter(|n| *n > 0);
    said.or_else(|| terminal_size::terminal_size_of(std::io::stdout()).map(|(w, _)| usize::from(w.0)))
}

fn methods(args: &MethodsArgs, common: &args::Common) -> Outcome {
    if let Some(id) = &args.id {
        return describe(id, common);
    }
    if let Some(path) = &args.svg {
        attlas_lab::output::check(&[("--svg", path)], &[])?;
        attlas_lab::output::write_figure(path, &attlas_lab::taxonomy::svg())?;
        return Ok(ExitCode::SUCCESS);
    }
    let atlas = Atlas::new(args.family.as_deref().map(select::family).transpose()?);
    if common.json {
        print_json(&atlas);
    } else if common.csv {
        print(&atlas.table().csv());
    } else if common.md {
        print(&atlas.markdown());
    } else {
        print(&atlas.text(width()));
        note(common, "`attlas methods ID` shows a method, layer or conversion with its parameters.");
    }
    Ok(ExitCode::SUCCESS)
}
