//! Commands on one process, or on several that `mpirun` started.
//!
//! Process 0 prints and writes files; the others work and stay silent. An error ends all of them.

use crate::args::{Command, Common};
use crate::note;
use attlas_lab::Error;
use attlas_lab::crew::{Alone, Crew};
#[cfg(feature = "mpi")]
use attlas_lab::hash::{sha256, sha256_of};
use attlas_lab::table::count;
use attlas_lab::units::Ledger;
use attlas_mpi::{Team, Transport, launch};
#[cfg(feature = "mpi")]
use std::cell::RefCell;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

/// True if this process is not the first of several.
static FOLLOWS: AtomicBool = AtomicBool::new(false);

/// Returns true if another process prints and writes files.
pub(crate) fn follows() -> bool {
    FOLLOWS.load(Ordering::Relaxed)
}

/// Advice when `mpirun` started a program that was built without MPI.
#[cfg(not(feature = "mpi"))]
const BUILD: &str = "build it with MPI (Debian: apt-get install libopenmpi-dev openmpi-bin libclang-dev; \
                     cargo install attlas-cli --features mpi), or start it without mpirun; attlas tune also takes \
                     --shard i/n in any number of programs";

/// Returns true for commands that run over several processes.
#[cfg(feature = "mpi")]
fn runs_spread(command: Option<&Command>) -> bool {
    matches!(
        command,
        Some(
            Command::Bench(_)
                | Command::Inspect(_)
                | Command::Compare(_)
                | Command::Tune(_)
                | Command::Perplexity(_)
        )
    )
}

/// Joins the processes of `mpirun`, if there are several.
pub(crate) fn join(command: Option<&Command>) -> Result<(), Error> {
    let Some(launched) = launch::of_this_process() else { return Ok(()) };
    let found = format!("{} = {}", launched.variable, launched.processes);
    let first = ["OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID"]
        .iter()
        .find_map(|name| std::env::var(name).ok())
        .is_none_or(|rank| rank == "0");
    FOLLOWS.store(!first, Ordering::Relaxed);
    #[cfg(not(feature = "mpi"))]
    {
        let _ = command;
        Err(Error::argument("more than one process", format!("a program with MPI; {BUILD}"), found))
    }
    #[cfg(feature = "mpi")]
    {
        if !runs_spread(command) {
            let expected = "bench, compare, inspect, perplexity or tune under mpirun; start other commands in one process";
            return Err(Error::argument("more than one process", expected, found));
        }
        let world = attlas_mpi::World::join()
            .ok_or_else(|| Error::argument("MPI", "a library that can be joined", "one that cannot"))?;
        FOLLOWS.store(world.rank() != 0, Ordering::Relaxed);
        let result = agree(&world);
        WORLD.with(|cell| cell.replace(Some(world)));
        result
    }
}

#[cfg(feature = "mpi")]
thread_local! {
    /// The processes that the main thread joined.
    static WORLD: RefCell<Option<attlas_mpi::World>> = const { RefCell::new(None) };
}

/// Runs `work` with all processes, if there are several.
pub(crate) fn with<R>(work: impl FnOnce(&dyn Transport) -> R) -> Option<R> {
    #[cfg(feature = "mpi")]
    {
        WORLD.with(|cell| cell.borrow().as_ref().map(|world| work(world)))
    }
    #[cfg(not(feature = "mpi"))]
    {
        let _ = work;
        None
    }
}

/// Runs `work` with all processes, or with this one alone.
pub(crate) fn crewed<R>(work: impl FnOnce(&dyn Crew) -> R) -> R {
    let mut work = Some(work);
    let mut once = |crew: &dyn Crew| match work.take() {
        Some(work) => work(crew),
        None => unreachable!("it is run once"),
    };
    match with(|t| once(&Team::new(t))) {
        Some(result) => result,
        None => once(&Alone::default()),
    }
}

/// Opens the ledger of a command's finished units, if one is kept; only process 0 has it.
pub(crate) fn ledger(
    path: Option<&Path>,
    command: &str,
    key: impl FnOnce() -> Result<String, Error>,
    common: &Common,
) -> Result<Ledger, Error> {
    let Some(path) = path.filter(|_| !follows()) else { return Ok(Ledger::none()) };
    let ledger = Ledger::open(path, command, &key()?)?;
    if !ledger.is_empty() {
        note(common, &format!("{} known from {}", count(ledger.len(), "unit"), path.display()));
    }
    Ok(ledger)
}

/// Lets the first process report its error first; if the processes have not joined, only the first one reports.
pub(crate) fn before_error() {
    if follows() {
        let joined = with(|t| {
            std::thread::sleep(std::time::Duration::from_secs(2));
            use std::io::Write as _;
            let _ = write!(std::io::stderr(), "process {} on {}: ", t.rank(), t.node());
        });
        if joined.is_none() {
            // All processes failed alike, and the first one reports it.
            std::process::exit(2);
        }
    }
}

/// Ends all processes with this status, after the error was reported.
pub(crate) fn after_error(status: u8) {
    #[cfg(feature = "mpi")]
    WORLD.with(|cell| {
        if let Some(world) = cell.borrow().as_ref() {
            world.abort(status.into());
        }
    });
    #[cfg(not(feature = "mpi"))]
    let _ = status;
}

/// Leaves the other processes after a command has succeeded on this one.
pub(crate) fn leave() {
    with(|t| t.barrier());
    #[cfg(feature = "mpi")]
    WORLD.with(|cell| drop(cell.take()));
}

/// Flags whose value is a file that is written, or that only the first process reads.
#[cfg(feature = "mpi")]
const OUTPUTS: [&str; 8] =
    ["--out", "-o", "--state", "--html", "--svg", "--curve", "--save-calibration", "--merge"];

/// Returns the arguments that may name an input: also those behind `=`, but none that follow an output flag.
#[cfg(feature = "mpi")]
fn inputs(arguments: &[String]) -> Vec<&str> {
    let mut found = Vec::new();
    for (i, argument) in arguments.iter().enumerate() {
        let (flag, value) = match argument.split_once('=') {
            Some((flag, value)) if flag.starts_with('-') => (Some(flag), value),
            _ => (i.checked_sub(1).map(|i| arguments[i].as_str()), argument.as_str()),
        };
        if flag.is_none_or(|flag| !OUTPUTS.contains(&flag)) {
            found.push(value);
            // Commas separate the files of one source.
            found.extend(value.split(',').filter(|part| *part != value));
        }
    }
    found
}

/// Fails if a process has another program, other arguments or other input files than the first.
#[cfg(feature = "mpi")]
fn agree(world: &attlas_mpi::World) -> Result<(), Error> {
    let program = std::env::current_exe().and_then(|path| sha256_of(&path)).unwrap_or_default();
    let mut lines = vec![format!("the program {program}")];
    let arguments: Vec<String> =
        crate::ARGUMENTS.get().into_iter().flatten().map(|a| a.to_string_lossy().into_owned()).collect();
    lines.push(format!("the arguments {}", sha256(arguments.join("\0").as_bytes())));
    for input in inputs(&arguments) {
        let path = Path::new(input);
        if path.exists() {
            lines.push(format!("{input} {}", sha256_of(path).unwrap_or_default()));
        }
    }
    let node = world.node();
    let all = world.gather_all(format!("{node}\n{}", lines.join("\n")).as_bytes());
    let said: Vec<Vec<String>> = all
        .iter()
        .map(|bytes| String::from_utf8_lossy(bytes).lines().map(str::to_string).collect())
        .collect();
    for (rank, other) in said.iter().enumerate() {
        let differs = said[0].iter().skip(1).zip(other.iter().skip(1)).find(|(a, b)| a != b);
        if differs.is_some() || other.len() != said[0].len() {
            let what =
                differs.map_or("the input files", |(a, _)| a.rsplit_once(' ').map_or(a.as_str(), |x| x.0));
            return Err(Error::argument(
                what,
                format!("the same on every machine as on {}", said[0][0]),
                format!("another on {} (process {rank})", other[0]),
            ));
        }
    }
    Ok(())
}

#[cfg(all(test, feature = "mpi"))]
mod tests {
    use super::inputs;

    #[test]
    fn what_is_written_is_no_input() {
        let words =
            ["tune", "m.gguf", "--text=a.txt", "--out", "r.toml", "--state=s", "--check-text", "b.txt"];
        let found = words.map(str::to_owned);
        assert_eq!(inputs(&found), ["tune", "m.gguf", "a.txt", "--out", "--check-text", "b.txt"]);
        assert_eq!(inputs(&["q.npy,k.npy".to_owned()]), ["q.npy,k.npy", "q.npy", "k.npy"]);
    }
}
