//! Progress on standard error: a bar on a terminal, lines elsewhere with `--progress`.

use crate::STOP;
use crate::args::Common;
use attlas_lab::Run;
use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;

/// Shows what is being measured.
pub(crate) enum Progress {
    Bar(ProgressBar),
    Lines,
    Off,
}

impl Progress {
    pub(crate) fn new(common: &Common) -> Self {
        match (common.quiet, std::io::stderr().is_terminal(), common.progress) {
            (false, true, _) => {
                let bar = ProgressBar::new(0);
                if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed} {msg}") {
                    bar.set_style(style);
                }
                Self::Bar(bar)
            }
            (false, false, true) => Self::Lines,
            _ => Self::Off,
        }
    }

    pub(crate) fn at(&self, done: usize, total: usize, what: &str) {
        match self {
            Self::Bar(bar) => {
                bar.set_length(total as u64);
                bar.set_position(done as u64);
                bar.set_message(what.to_string());
            }
            Self::Lines => tell!("{}/{total} {what}", done + 1),
            Self::Off => {}
        }
    }

    pub(crate) fn end(&self) {
        if let Self::Bar(bar) = self {
            bar.finish_and_clear();
        }
    }
}

/// Runs a measurement with the command line's threads and seed and shows its progress, until it ends or is interrupted.
/// `before` prefixes each progress message.
pub(crate) fn measured<R>(common: &Common, before: &str, work: impl FnOnce(&mut Run<'_>) -> R) -> R {
    let line = Progress::new(common);
    let mut progress =
        |at: attlas_lab::Progress<'_>| line.at(at.done, at.total, &format!("{before}{}", at.what));
    let (threads, seed) = (common.threads, common.seed);
    let result = work(&mut Run { threads, seed, progress: &mut progress, stop: &STOP });
    line.end();
    result
}
