//! One libFuzzer program for all targets of `attlas-fuzz`; the variable `ATTLAS_FUZZ_TARGET` names the one to run.

#![no_main]

use attlas_fuzz::{TARGETS, Target};
use std::sync::LazyLock;

static TARGET: LazyLock<&'static Target> = LazyLock::new(|| {
    let name = std::env::var("ATTLAS_FUZZ_TARGET").unwrap_or_default();
    TARGETS.iter().find(|t| t.name == name).unwrap_or_else(|| {
        let known: Vec<&str> = TARGETS.iter().map(|t| t.name).collect();
        panic!("ATTLAS_FUZZ_TARGET is {name:?}; expected one of {}", known.join(", "))
    })
});

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    // A refusal is a valid result; only panics, overruns and excessive time or memory are findings.
    let _ = (TARGET.run)(data);
});
