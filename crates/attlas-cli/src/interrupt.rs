//! Ctrl-C and SIGTERM: both end a command after the current run and keep the finished results.

use crate::args::Common;
use crate::team::follows;
use crate::{STOP, note};
use std::sync::atomic::Ordering;

/// Makes Ctrl-C and SIGTERM end a measurement after the current run. A second one ends the process at once, because a
/// single long run cannot be stopped from inside.
pub(crate) fn catch(common: &Common) {
    if !arm() {
        note(common, "note: Ctrl-C cannot be caught here and will lose what is finished");
    }
}

/// Handler of each signal.
fn interrupted() {
    if STOP.swap(true, Ordering::Relaxed) {
        std::process::exit(130);
    }
    if !follows() {
        tell!("\nstopping after the current run; press Ctrl-C again to stop at once");
    }
}

/// Handles SIGINT and SIGTERM. SIGHUP keeps its usual meaning, on which `nohup` relies.
#[cfg(unix)]
fn arm() -> bool {
    use signal_hook::consts::{SIGINT, SIGTERM};
    let Ok(mut signals) = signal_hook::iterator::Signals::new([SIGINT, SIGTERM]) else { return false };
    std::thread::Builder::new()
        .name("interrupts".into())
        .spawn(move || signals.forever().for_each(|_| interrupted()))
        .is_ok()
}

#[cfg(not(unix))]
fn arm() -> bool {
    ctrlc::set_handler(interrupted).is_ok()
}
