//! The binary `attlas`.

#![forbid(unsafe_code)]

/// Counts allocated bytes, so that reports can say how much memory a method needs.
#[global_allocator]
static ALLOCATOR: peak_alloc::PeakAlloc = peak_alloc::PeakAlloc;

fn main() -> std::process::ExitCode {
    attlas_cli::run(std::env::args_os().skip(1).collect()).into()
}
