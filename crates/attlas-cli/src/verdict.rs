//! Rewriting of a model, and the verdict on its loss against the limit.

use crate::args::{Common, Limit};
use crate::progress::Progress;
use crate::{STOP, interrupt, note};
use attlas_lab::Error;
use attlas_lab::rewrite::{Rewrite, run};
use attlas_lab::self_check::Quality;
use attlas_lab::table::bytes;
use std::process::ExitCode;

/// Rewrites a model with its progress on the terminal, until it is done or interrupted.
pub(crate) fn rewritten<R: Rewrite>(rewrite: &R, common: &Common) -> Result<R::Record, Error> {
    interrupt::catch(common);
    let progress = Progress::new(common);
    let record = run(rewrite, &|what, done, all| progress.at(done, all, what), &STOP);
    progress.end();
    record
}

/// Describes a change in a sentence, and returns true if its loss is within the limit. `sizes` are bytes before and
/// after.
pub(crate) fn of(q: &Quality, limit: Limit, sizes: Option<(usize, usize)>) -> (String, bool) {
    let rise = q.ppl_after / q.ppl_before - 1.0;
    // NaN is past every limit.
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

/// Returns the exit status.
pub(crate) fn status(within: bool, common: &Common) -> ExitCode {
    if within {
        return ExitCode::SUCCESS;
    }
    note(common, "over the limit; --max-ppl-increase sets another, other settings lose less");
    ExitCode::from(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quality(ppl_after: f64) -> Quality {
        Quality {
            scored: 100,
            window: 50,
            ppl_before: 20.0,
            ppl_before_se: 1.0,
            ppl_after,
            ppl_after_se: 1.0,
            nll_increase: 0.0,
            nll_increase_se: 0.0,
            kl_mean: 0.0,
            kl_se: 0.0,
            kl_median: None,
            kl_q99: None,
            same_top: 1.0,
            max_logit_diff: 0.0,
        }
    }

    #[test]
    fn a_ruined_model_and_one_that_grew_are_called_so() {
        let limit = Limit { max_ppl_increase: 0.5 };
        let (said, within) = of(&quality(22.0), limit, Some((100 << 20, 90 << 20)));
        assert_eq!(
            (said.as_str(), within),
            ("Within 50 %: perplexity 20.00 -> 22.00 (+10.0 %), 100M -> 90M.", true)
        );
        let (said, within) = of(&quality(381_848.0), limit, Some((92 << 20, 184 << 20)));
        assert!(!within && said.starts_with("This model no longer predicts"), "{said}");
        assert!(said.contains("larger than before: 92M -> 184M"), "{said}");
        assert!(!of(&quality(f64::NAN), limit, None).1 && !of(&quality(30.1), limit, None).1);
        assert!(of(&quality(30.1), Limit { max_ppl_increase: 1.0 }, None).1);
    }
}
