//! Runs every parser on mutated files: none may panic, hang or allocate memory out of proportion to the file.
//!
//! For each target the files of `corpus/<target>` run unchanged, then mutated, with one to six changes at a time, until
//! the time is over. An input with a new outcome (a different error text, ignoring numbers) joins the inputs to mutate:
//! this replaces coverage and needs no instrumented build (`fuzz/` runs the same targets under libFuzzer with coverage
//! and the address sanitizer). The sequence depends only on the seed: `--seed` and `--runs` repeat it.
//!
//! A failure writes its input to `--out` and ends with status 1; `--replay FILE` reruns it.

#![forbid(unsafe_code)]

mod mutate;

use attlas_fuzz::{TARGETS, Target};
use attlas_num::kernels::Counting;
use attlas_num::rng::{Rng, StreamKey};
use clap::Parser;
use std::collections::BTreeSet;
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

#[global_allocator]
static MEMORY: Counting = Counting;

/// Memory allowed for any input, including caches of regular expressions and thread pools.
const FREE_BYTES: usize = 32 << 20;
/// Additional memory allowed per byte of an input.
const BYTES_PER_BYTE: usize = 256;
/// Time above which an input counts as hanging, on any machine.
const LONGEST: Duration = Duration::from_secs(20);
/// Largest size of inputs.
const MAX_LEN: usize = 1 << 16;
/// Most inputs that join the corpus; further ones replace others.
const MAX_KEPT: usize = 64;

#[derive(Parser)]
#[command(about = "Runs mutated files against every parser")]
struct Args {
    /// Targets to run; by default all.
    targets: Vec<String>,
    /// Seconds for each target.
    #[arg(long, default_value_t = 5.0)]
    seconds: f64,
    /// Most inputs for each target.
    #[arg(long, default_value_t = u64::MAX)]
    runs: u64,
    /// Seed of the mutations.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Folder for failing inputs.
    #[arg(long, default_value = "target/fuzz")]
    out: PathBuf,
    /// Run only this file, against the single target named.
    #[arg(long)]
    replay: Option<PathBuf>,
    /// Write every input to `--out` before it runs, to catch one that ends the process.
    #[arg(long)]
    trace: bool,
}

/// Reason why an input fails.
#[derive(Debug)]
enum Failure {
    Panic(String),
    Memory { bytes: usize, allowed: usize },
    Slow(Duration),
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Panic(reason) => write!(f, "panicked: {reason}"),
            Self::Memory { bytes, allowed } => write!(f, "held {bytes} bytes, {allowed} are allowed"),
            Self::Slow(time) => write!(f, "took {:.1} s", time.as_secs_f64()),
        }
    }
}

/// Runs one input; the outcome is the error's text, or nothing if it was accepted.
fn run(target: &Target, input: &[u8]) -> Result<String, Failure> {
    let before = Counting::bytes_in_use();
    Counting::reset_peak();
    let start = Instant::now();
    let outcome = std::panic::catch_unwind(AssertUnwindSafe(|| (target.run)(input)));
    let (seconds, bytes) = (start.elapsed(), Counting::peak_bytes().saturating_sub(before));
    let allowed = FREE_BYTES + BYTES_PER_BYTE * input.len();
    match outcome {
        Err(panic) => Err(Failure::Panic(
            (panic.downcast_ref::<String>().cloned())
                .or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()))
                .unwrap_or_default(),
        )),
        Ok(_) if bytes > allowed => Err(Failure::Memory { bytes, allowed }),
        Ok(_) if seconds > LONGEST => Err(Failure::Slow(seconds)),
        Ok(outcome) => Ok(outcome.err().unwrap_or_default()),
    }
}

/// Returns the start of an outcome without numbers and quotations, which makes outcomes of a kind equal.
fn kind(outcome: &str) -> String {
    let plain = outcome.split(['"', '\'', '`', '(', '{']).next().unwrap_or_default();
    let words = plain.split(|c: char| !c.is_ascii_alphabetic());
    let words: Vec<&str> = words.filter(|w| w.chars().all(|c| c.is_ascii_lowercase())).collect();
    words.into_iter().filter(|w| w.len() > 2).take(5).collect::<Vec<_>>().join(" ")
}

/// Returns the committed files of a target with their names, in order.
fn corpus(target: &Target) -> std::io::Result<Vec<(String, Vec<u8>)>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target.name);
    let mut paths: Vec<PathBuf> =
        std::fs::read_dir(folder)?.map(|e| e.map(|e| e.path())).collect::<std::io::Result<_>>()?;
    paths.sort();
    let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    paths.iter().map(|path| Ok((name(path), std::fs::read(path)?))).collect()
}

/// Counts of one target.
#[derive(Debug, Default)]
struct Tally {
    runs: u64,
    read: u64,
    kinds: BTreeSet<String>,
}

/// Runs the corpus and its mutations; returns a failing input with its failure.
fn fuzz(target: &Target, args: &Args) -> Result<Tally, (Vec<u8>, Failure)> {
    let mut pool: Vec<Vec<u8>> =
        corpus(target).unwrap_or_default().into_iter().map(|(_, file)| file).collect();
    let seeds = pool.len();
    let mut rng: Rng = StreamKey::new(args.seed).named(target.name).rng();
    let mut tally = Tally::default();
    let end = Instant::now() + Duration::from_secs_f64(args.seconds.clamp(0.0, 1e6));
    while tally.runs < args.runs.max(seeds as u64) {
        let mutated = tally.runs as usize >= seeds;
        if mutated && (Instant::now() > end || pool.is_empty()) {
            break;
        }
        let input = if mutated {
            let mut input = mutate::mutated(&pool, seeds, &mut rng);
            input.truncate(MAX_LEN);
            input
        } else {
            pool[tally.runs as usize].clone()
        };
        if args.trace {
            let _ = std::fs::write(args.out.join(format!("{}.current", target.name)), &input);
        }
        let outcome = run(target, &input).map_err(|failure| (input.clone(), failure))?;
        tally.runs += 1;
        tally.read += u64::from(outcome.is_empty());
        if tally.kinds.insert(kind(&outcome)) && mutated {
            if pool.len() < seeds + MAX_KEPT {
                pool.push(input);
            } else {
                pool[seeds + rng.below(MAX_KEPT)] = input;
            }
        }
    }
    Ok(tally)
}

fn main() -> ExitCode {
    let args = Args::parse();
    // Panics are reported with their input below; panics of dependencies that the library turns into errors are
    // allowed.
    std::panic::set_hook(Box::new(|_| ()));
    let chosen: Vec<&Target> = TARGETS
        .iter()
        .filter(|t| args.targets.is_empty() || args.targets.iter().any(|n| n == t.name))
        .collect();
    if chosen.is_empty() || args.replay.is_some() && chosen.len() != 1 {
        eprintln!("targets are {}", TARGETS.each_ref().map(|t| t.name).join(", "));
        return ExitCode::from(2);
    }
    if let Err(error) = std::fs::create_dir_all(&args.out) {
        eprintln!("{}: {error}", args.out.display());
        return ExitCode::from(2);
    }
    if let Some(path) = &args.replay {
        let Ok(input) = std::fs::read(path) else {
            eprintln!("{} cannot be read", path.display());
            return ExitCode::from(2);
        };
        return match run(chosen[0], &input) {
            Ok(outcome) => {
                println!("{}", if outcome.is_empty() { "read" } else { &outcome });
                ExitCode::SUCCESS
            }
            Err(failure) => {
                println!("{failure}");
                ExitCode::from(1)
            }
        };
    }
    let sound = chosen.iter().all(|target| report(target, &args));
    attlas_fuzz::tidy();
    ExitCode::from(u8::from(!sound))
}

/// Runs a target and prints the result; false if an input failed.
fn report(target: &Target, args: &Args) -> bool {
    match fuzz(target, args) {
        Ok(Tally { runs, read, kinds }) => {
            let name = target.name;
            println!("{name:<18} {runs:>9} inputs, {read:>8} read, {:>4} kinds of outcome", kinds.len());
            true
        }
        Err((input, failure)) => {
            let path = args.out.join(format!("{}.failed", target.name));
            let _ = std::fs::write(&path, input);
            println!("{:<18} {failure}; input in {}", target.name, path.display());
            false
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_target_has_a_corpus_of_which_all_but_hostile_files_are_read() {
        for target in &TARGETS {
            let files = corpus(target).unwrap();
            assert!(!files.is_empty(), "{}", target.name);
            for (name, file) in &files {
                let outcome = run(target, file).unwrap();
                let hostile = name.starts_with("hostile_");
                assert_eq!(outcome.is_empty(), !hostile, "{}/{name}: {outcome}", target.name);
            }
        }
    }

    #[test]
    fn a_target_that_panics_or_hoards_is_caught() {
        let panics = Target { name: "panics", run: |_| panic!("at the bytes") };
        assert!(matches!(run(&panics, b""), Err(Failure::Panic(reason)) if reason == "at the bytes"));
        let hoards = Target {
            name: "hoards",
            run: |_| {
                std::hint::black_box(vec![1u8; FREE_BYTES + (1 << 20)]);
                Ok(())
            },
        };
        assert!(matches!(run(&hoards, b"x"), Err(Failure::Memory { .. })));
    }

    #[test]
    fn outcomes_that_differ_in_numbers_are_of_one_kind() {
        assert_eq!(kind("the tensor \"a.b\" has shape [3]"), kind("the tensor \"c\" has shape [4, 5]"));
        assert_eq!(kind("12 tokens do not fit"), kind("4 tokens do not fit"));
        assert_ne!(kind("the file ends at byte 4"), kind("the magic is 3"));
    }
}
