//! Whether a changed model is one that somebody would keep.

use crate::args::{Common, Limit};
use crate::note;
use attlas_lab::self_check::Quality;
use attlas_lab::table::bytes;
use std::process::ExitCode;

/// What a change came to, in a sentence, and whether it is within the limit. `sizes` are bytes before and after.
pub(crate) fn of(q: &Quality, limit: Limit, sizes: Option<(usize, usize)>) -> (String, bool) {
    let rise = q.ppl_after / q.ppl_before - 1.0;
    // What is no number is past every limit.
    let within = rise <= limit.max_ppl_increase;
    let mut said = format!("perplexity {:.2} -> {:.2} ({:+.1} %)", q.ppl_before, q.ppl_after, 100.0 * rise);
    if let Some((before, after)) = sizes {
        let (a, b) = (bytes(before), bytes(after));
        said += &match after.cmp(&before) {
            std::cmp::Ordering::Greater => format!(", larger than before: {a} -> {b}"),
            std::cmp::Ordering::Equal => format!(", as large as before: {a}"),
            std::cmp::Ordering::Less => format!(", {a} -> {b}"),
        };
    }
    let judged = if within {
        format!("Within {:.0} %", 100.0 * limit.max_ppl_increase)
    } else {
        format!(
            "This model no longer predicts as the one it was made from, by more than {:.0} %",
            100.0 * limit.max_ppl_increase
        )
    };
    (format!("{judged}: {said}."), within)
}

/// The status to end with.
pub(crate) fn status(within: bool, common: &Common) -> ExitCode {
    if within {
        return ExitCode::SUCCESS;
    }
    note(common, "over the limit; --max-ppl-increase sets another, other settings lose less");
    ExitCode::from(1)
}
