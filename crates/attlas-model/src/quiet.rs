//! Turns panics of dependencies into errors, without their message on the terminal.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Once;

thread_local! {
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// Runs third-party code that may panic on malformed input; `None` if it did.
///
/// The first call puts a panic hook before the installed one. It is silent while this function runs on the panicking
/// thread, and passes all other panics on.
pub(crate) fn catch<T>(f: impl FnOnce() -> T) -> Option<T> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = take_hook();
        set_hook(Box::new(move |info| {
            if !QUIET.try_with(Cell::get).unwrap_or(false) {
                before(info);
            }
        }));
    });
    let outer = QUIET.replace(true);
    let result = catch_unwind(AssertUnwindSafe(f));
    QUIET.set(outer);
    result.ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn only_panics_inside_are_silent() {
        static SEEN: AtomicUsize = AtomicUsize::new(0);
        let before = take_hook();
        set_hook(Box::new(|_| {
            SEEN.fetch_add(1, Ordering::Relaxed);
        }));
        assert_eq!(catch(|| 1), Some(1));
        assert_eq!(catch(|| panic!("inside")), None::<()>);
        assert_eq!(SEEN.load(Ordering::Relaxed), 0);
        assert!(catch_unwind(|| panic!("outside")).is_err());
        assert_eq!(SEEN.load(Ordering::Relaxed), 1);
        set_hook(before);
    }
}
