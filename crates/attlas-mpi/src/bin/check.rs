//! Program that the tests run under `mpirun`: `attlas-mpi-check CHECK` runs one check on all processes;
//! `attlas-mpi-check die RANK` ends one process in the middle.

use attlas_mpi::{Transport, World, checks};
use std::process::ExitCode;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let Some(world) = World::join() else {
        eprintln!("MPI could not be joined");
        return ExitCode::from(2);
    };
    match args.first().map(String::as_str) {
        Some("die") => {
            let rank: usize = args.get(1).and_then(|r| r.parse().ok()).unwrap_or(0);
            world.barrier();
            if world.rank() == rank {
                std::process::abort();
            }
            // The others wait for a process that never arrives.
            world.gather_all(&[0; 8]);
            ExitCode::SUCCESS
        }
        Some(name) => {
            let Some((_, check)) = checks::ALL.iter().find(|(n, _)| *n == name) else {
                eprintln!("there is no check {name}");
                world.abort(2);
            };
            if let Err(found) = check(&world) {
                eprintln!("process {} of {}: {name}: {found}", world.rank(), world.size());
                world.abort(1);
            }
            ExitCode::SUCCESS
        }
        None => {
            eprintln!("attlas-mpi-check CHECK, or attlas-mpi-check die RANK");
            world.abort(2);
        }
    }
}
