//! Every check with 1 to 4 processes that are threads of this program.

use attlas_mpi::{Threads, checks};

fn run(name: &str) {
    let (_, check) = checks::ALL.iter().find(|(n, _)| *n == name).unwrap();
    for size in 1..=4 {
        for found in Threads::run(size, |t| check(t)) {
            assert_eq!(found, Ok(()), "{name} with {size} processes");
        }
    }
}

macro_rules! tests {
    ($($name:ident)*) => {
        $(#[test] fn $name() { run(stringify!($name)); })*

        #[test]
        fn no_check_is_left_out() {
            let names: Vec<&str> = checks::ALL.iter().map(|c| c.0).collect();
            assert_eq!(names, [$(stringify!($name)),*]);
        }
    };
}
tests!(scattering one_process approximations leaks padding shapes wires decoding);

#[test]
fn methods_with_a_schedule_have_what_it_needs() {
    for method in checks::scheduled() {
        let merges = !matches!(method.claims.spread, attlas::Spread::Scan { .. });
        assert!(!merges || method.claims.lse, "{} merges parts without a log-sum-exp", method.id);
    }
    assert!(checks::scheduled().count() >= 15);
}
