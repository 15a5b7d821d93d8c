//! The binary `attlas`.

#![forbid(unsafe_code)]

/// Counts allocated bytes; reports show them as the memory of a method.
#[global_allocator]
static ALLOCATOR: peak_alloc::PeakAlloc = peak_alloc::PeakAlloc;

fn main() -> std::process::ExitCode {
    attlas_cli::run(std::env::args_os().skip(1).collect()).into()
}
