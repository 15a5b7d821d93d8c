//! A program on several processes.

// Each test program uses a part of it.
#![allow(dead_code, unreachable_pub)]

use std::process::{Command, Output};

/// The command that runs `program` under `mpirun`.
pub fn launch(program: &str, processes: usize, args: &[&str]) -> Command {
    let mut command = Command::new("mpirun");
    command.args([
        "--oversubscribe",
        "--allow-run-as-root",
        "--timeout",
        "300",
        "-n",
        &processes.to_string(),
    ]);
    // More processes than processors give way to each other instead of spinning.
    command.arg(program).args(args).env("OMPI_MCA_mpi_yield_when_idle", "1");
    command
}

/// Runs it to its end.
pub fn mpirun(program: &str, processes: usize, args: &[&str]) -> Output {
    launch(program, processes, args).output().expect("mpirun is installed: Debian's openmpi-bin")
}

/// The messages of a program.
pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}
