//! One process, or one of several that `mpirun` started.
//!
//! Process 0 prints and writes files; the others work and stay silent. An error ends all of them.

use crate::args::Command;
use attlas_lab::Error;
#[cfg(feature = "mpi")]
use attlas_lab::hash::sha256;
use attlas_mpi::{Transport, launch};
#[cfg(feature = "mpi")]
use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether this process is not the first of several.
static FOLLOWS: AtomicBool = AtomicBool::new(false);

/// Whether another process prints and writes files.
pub(crate) fn follows() -> bool {
    FOLLOWS.load(Ordering::Relaxed)
}

/// What to do where several processes were started and this program cannot join them.
#[cfg(not(feature = "mpi"))]
const BUILD: &str = "build it with MPI (Debian: apt-get install libopenmpi-dev openmpi-bin libclang-dev; \
                     cargo install attlas-cli --features mpi), or start it without mpirun; attlas tune also takes \
                     --shard i/n in any number of programs";

/// Commands that run over several processes.
#[cfg(feature = "mpi")]
fn runs_spread(command: Option<&Command>) -> bool {
    matches!(command, Some(Command::Bench(_) | Command::Inspect(_)))
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
            let expected = "bench or inspect under mpirun; start other commands in one process (attlas tune takes \
                            --shard i/n in each, and --merge at the end)";
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

/// Before an error is told: the first process tells it, and the others only where it has nothing to say.
pub(crate) fn before_error() {
    if follows() {
        let joined = with(|t| {
            std::thread::sleep(std::time::Duration::from_secs(2));
            eprint!("process {} on {}: ", t.rank(), t.node());
        });
        if joined.is_none() {
            // All processes were refused alike, and the first one says so.
            std::process::exit(2);
        }
    }
}

/// After an error was told: ends all processes.
pub(crate) fn after_error() {
    #[cfg(feature = "mpi")]
    WORLD.with(|cell| {
        if let Some(world) = cell.borrow().as_ref() {
            world.abort(2);
        }
    });
}

/// The end of a command that went well on this process.
pub(crate) fn leave() {
    with(|t| t.barrier());
    #[cfg(feature = "mpi")]
    WORLD.with(|cell| drop(cell.take()));
}

/// Flags whose value is a file that is written.
#[cfg(feature = "mpi")]
const OUTPUTS: [&str; 7] = ["--out", "-o", "--state", "--html", "--svg", "--save-calibration", "--merge"];

/// Refuses processes with other programs, arguments or input files than the first.
#[cfg(feature = "mpi")]
fn agree(world: &attlas_mpi::World) -> Result<(), Error> {
    let hash = |path: &std::path::Path| std::fs::read(path).map(|bytes| sha256(&bytes)).unwrap_or_default();
    let program = std::env::current_exe().map(|path| hash(&path)).unwrap_or_default();
    let mut lines = vec![format!("the program {program}")];
    let arguments: Vec<String> =
        crate::ARGUMENTS.get().into_iter().flatten().map(|a| a.to_string_lossy().into_owned()).collect();
    lines.push(format!("the arguments {}", sha256(arguments.join("\0").as_bytes())));
    for (i, argument) in arguments.iter().enumerate() {
        let written = i > 0 && OUTPUTS.contains(&arguments[i - 1].as_str());
        let path = std::path::Path::new(argument);
        if written {
            continue;
        }
        if path.is_file() {
            lines.push(format!("{argument} {}", hash(path)));
        } else if path.is_dir() {
            let mut files: Vec<_> =
                std::fs::read_dir(path).into_iter().flatten().flatten().map(|e| e.path()).collect();
            files.retain(|p| p.is_file());
            files.sort();
            lines.extend(files.iter().map(|p| format!("{} {}", p.display(), hash(p))));
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
