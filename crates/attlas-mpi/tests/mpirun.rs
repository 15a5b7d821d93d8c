//! Every check on the processes of `mpirun`, 1 to 4 of them, and one that dies.
#![cfg(feature = "mpi")]

mod common;

use common::stderr;
use std::process::Output;
use std::time::{Duration, Instant};

fn mpirun(processes: usize, args: &[&str]) -> Output {
    common::mpirun(env!("CARGO_BIN_EXE_attlas-mpi-check"), processes, args)
}

fn run(name: &str) {
    for processes in 1..=4 {
        let done = mpirun(processes, &[name]);
        let said = stderr(&done);
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
    let said = stderr(&done);
    assert!(!done.status.success());
    assert!(begun.elapsed() < Duration::from_secs(30), "the others went on: {said}");
    assert!(said.contains("rank 1"), "{said}");
}
