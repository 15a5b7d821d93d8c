//! The verdict of a comparison, in a sentence or two.

use super::records::{Comparison, Summary};
use crate::table::{count, percent_of, times};

/// Error that counts as close to exact attention.
const CLOSE: f64 = 0.01;
/// Ratio up to which two errors count as about the same.
const ALIKE: f64 = 1.25;
/// A method whose error is above this share of the mean-of-values error is useless.
const BETTER: f64 = 0.9;

impl Comparison {
    /// Names the method that is worth its error on these inputs, or says that none is.
    pub fn verdict(&self) -> String {
        let trivial = self.summary.iter().find(|s| s.family == "baseline").map_or(1.0, |s| s.rel_fro.mean);
        let faster: Vec<&Summary> = self
            .summary
            .iter()
            .filter(|s| s.family != "baseline" && self.ranks(s))
            .filter(|s| s.speedup > 1.0 && s.rel_fro.mean < BETTER * trivial)
            .collect();
        let fastest = |within: f64| {
            let fit = faster.iter().filter(|s| s.rel_fro.mean <= within);
            fit.max_by(|a, b| a.speedup.total_cmp(&b.speedup))
        };
        let said = |s: &Summary| {
            format!("{} is {} faster at {} error", s.method, times_of(s.speedup), percent_of(s.rel_fro.mean))
        };
        let at = match self.tokens {
            0 => String::new(),
            n => format!(" at {}", count(n, "token")),
        };
        let least = faster.iter().map(|s| s.rel_fro.mean).fold(f64::INFINITY, f64::min);
        match (fastest(CLOSE), fastest(ALIKE * least)) {
            (Some(close), _) => {
                let more = fastest(0.1).filter(|s| s.method != close.method && s.speedup > close.speedup);
                let more = more.map_or(String::new(), |s| format!(", {}", said(s)));
                format!("{}{more}{at}.", said(close))
            }
            (None, Some(best)) => {
                let quick = fastest(0.5).filter(|s| s.method != best.method && s.speedup > best.speedup);
                let quick = quick.map_or(String::new(), |s| format!(", {}", said(s)));
                format!("{}{quick}; nothing is faster within {}{at}.", said(best), percent_of(CLOSE))
            }
            (None, None) if self.summary.iter().all(|s| s.family == "baseline") => {
                "No method was measured.".into()
            }
            (None, None) => {
                format!("Nothing is faster than exact attention and better than the mean of the values{at}.")
            }
        }
    }

    /// Names the methods that computed exact attention because their settings cover every key at this length, each with
    /// the setting that shows it, if any; none if there are no such methods.
    pub fn fallbacks(&self) -> Option<String> {
        let named: Vec<String> = self
            .summary
            .iter()
            .filter(|s| s.family != "baseline" && s.fell_back())
            .map(|s| {
                let params = self.rows.iter().find(|r| r.method == s.method).map(|r| &r.params);
                // The length below which the method is exact, if that is the reason.
                let switch = params.and_then(|params| {
                    let name = attlas::registry::method(s.method).ok()?.exact_below?;
                    let value = params.get(name)?.as_u64()?;
                    // `block` counts only under a causal mask.
                    let here = name != "block" || self.mask == attlas::Mask::Causal;
                    (here && value >= self.tokens as u64).then_some((name, value))
                });
                match switch {
                    Some((name, value)) => format!("{} ({name} = {value})", s.method),
                    None => s.method.into(),
                }
            })
            .collect();
        (!named.is_empty()).then(|| format!("Exact at this length: {}.", named.join(", ")))
    }
}

/// Formats a factor like `2.1×`.
fn times_of(x: f64) -> String {
    times(x).replace('x', " ×")
}

#[cfg(test)]
mod tests {
    use super::super::{Settings, compare};
    use crate::run::Run;
    use crate::select::Choice;

    #[test]
    fn the_verdict_names_what_is_worth_its_error() {
        let workload = "synthetic:gaussian,n=50,d=8".parse::<crate::Source>().unwrap().load().unwrap();
        let methods = ["top_k", "sink_window", "hyper"].map(String::from).to_vec();
        let set = vec!["top_k.keys=8".into(), "sink_window.window=8".into()];
        let selection = Choice { methods, set, family: None }.resolve().unwrap();
        let settings = Settings { seeds: 1, ..Settings::default() };
        let mut c = Run::silent(1, 0, |run| compare(&workload, &selection, &settings, run)).unwrap();
        assert_eq!(c.fallbacks().unwrap(), "Exact at this length: hyper (n_min = 4096).");
        let mut say = |figures: [(f64, f64); 2]| {
            for s in &mut c.summary {
                let (error, speed) = match s.method {
                    "mean_v" => (1.0, 50.0),
                    "sink_window" => figures[0],
                    "top_k" => figures[1],
                    _ => (0.0, 1.2),
                };
                (s.rel_fro.mean, s.speedup) = (error, speed);
            }
            c.verdict()
        };
        assert_eq!(
            say([(0.24, 2.1), (0.001, 0.5)]),
            "sink_window is 2.10 × faster at 24 % error; nothing is faster within 1 % at 50 tokens."
        );
        assert_eq!(
            say([(0.05, 3.0), (0.004, 1.5)]),
            "top_k is 1.50 × faster at 0.4 % error, sink_window is 3.00 × faster at 5 % error at 50 tokens."
        );
        // Of two methods with about the same error, the faster one.
        assert_eq!(
            say([(0.12, 3.0), (0.1, 1.5)]),
            "sink_window is 3.00 × faster at 12 % error; nothing is faster within 1 % at 50 tokens."
        );
        // No better than the mean of the values, or slower.
        assert!(say([(0.95, 9.0), (0.1, 0.9)]).starts_with("Nothing is faster than exact attention"));
    }
}
