//! Programs for maintainers; nothing here is published.
//!
//! - `cargo run -p xtask -- cards`: the method cards of `attlas report`, from the documentation of the methods' modules.
//! - `cargo run --release -p xtask -- headline`: speed-ups beside published ones, growth and threads, for
//!   `docs/benchmarks/headline.md`.
//!
//! Examples of this crate make other tables: `latent_tables` those of `docs/latent.md`, `kernel_speed` rates of single
//! kernels; `peer` and `peer_model` are driven by the programs in `bench/peers`.

mod cards;
mod headline;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// Counts allocated bytes, which the headline suite reports as the memory of a method.
#[global_allocator]
static ALLOCATOR: attlas_num::kernels::Counting = attlas_num::kernels::Counting;

#[derive(Parser)]
#[command(about = "Programs of the maintainers of attlas")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Write the method cards of the report.
    Cards {
        /// Write nothing; fail if the cards are out of date.
        #[arg(long)]
        check: bool,
    },
    /// Time methods at the settings of their papers, against exact attention.
    Headline(headline::Args),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Cards { check } => cards::run(check),
        Command::Headline(args) => headline::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}
