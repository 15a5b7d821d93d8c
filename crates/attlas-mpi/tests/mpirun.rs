//! Every check on the processes of `mpirun`, 1 to 4 of them, and one that dies.
#![cfg(feature = "mpi")]

use std::process::{Command, Output};
use std::time::{Duration, Instant};

fn mpirun(processes: usize, args: &[&str]) -> Output {
    let mut command = Command::new("mpirun");
    command.args([
        "--oversubscribe",
        "--allow-run-as-root",
        "--timeout",
        "300",
        "-n",
        &processes.to_string(),
    ]);
    command.arg(env!("CARGO_BIN_EXE_attlas-mpi-check")).args(args);
    // More processes than processors give way to each other instead of spinning.
    command.env("OMPI_MCA_mpi_yield_when_idle", "1");
    command.output().expect("mpirun is installed: Debian's openmpi-bin")
}

fn run(name: &str) {
    for processes in 1..=4 {
        let done = mpirun(processes, &[name]);
        let said = String::from_utf8_lossy(&done.stderr);
        assert!(done.status.success(), "{name} on {processes} processes: {said}");
    }
}

macro_rules! tests {
    ($($name:ident)*) => { $(#[test] fn $name() { run(stringify!($name)); })* };
}
tests!(scattering one_process approximations leaks padding shapes wires decoding);

#[test]
fn a_process_that_dies_takes_the_others_with_it() {
    let begun = Instant::now();
    let done = mpirun(3, &["die", "1"]);
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(!done.status.success());
    assert!(begun.elapsed() < Duration::from_secs(30), "the others went on: {said}");
    assert!(said.contains("rank 1"), "{said}");
}
