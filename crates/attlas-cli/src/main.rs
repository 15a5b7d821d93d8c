//! The binary `attlas`.

#![forbid(unsafe_code)]

/// Counts allocated bytes; reports show them as the memory of a method.
#[global_allocator]
static ALLOCATOR: attlas_num::kernels::Counting = attlas_num::kernels::Counting;

fn main() -> std::process::ExitCode {
    attlas_cli::run(std::env::args_os().skip(1).collect()).into()
}
