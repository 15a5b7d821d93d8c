//! `sink_window`: exact attention over a band and the first keys; decoding in a ring.

use crate::methods::exact::{Exact, KeptTokens};
use crate::plan::{Core, Io, Request};
use crate::prims::attend::{Attend, Rule};
use crate::{Device, DeviceStream, DeviceWorkspace, Element, Form, Result};
use attlas::methods::exact::sink_window::{METHOD, Params};
use attlas::{Mask, Problem, RunInfo, Status, Support};

pub(crate) static FORM: Form = Form {
    method: &METHOD,
    draws: false,
    decodes: true,
    supports: |_, options, element, _| {
        let asked = options.get("precision").is_some_and(|v| v.to_string() != "full");
        Support::unless(
            asked && !element.is_half(),
            "precision = bf16 rounds operands on the host; on the device the tensors themselves are bf16",
        )
        .and_unless(
            options.get("positions").is_some_and(|v| v.to_string() != "original"),
            "positions = cache_relative turns queries on the host alone",
        )
    },
    build: |r| Ok(Box::new(SinkWindow::new(r)?)),
};

#[derive(Debug)]
struct SinkWindow {
    /// Exact attention, if the window covers everything.
    whole: Option<Exact>,
    attend: Attend,
    info: RunInfo,
    problem: Problem,
    element: Element,
    device: Device,
    sinks: usize,
    window: usize,
}

impl SinkWindow {
    fn new(r: &Request<'_>) -> Result<Self> {
        let Params { sinks, window, .. } = Params::from_options(r.options)?;
        let (p, causal) = (r.problem, r.problem.mask == Mask::Causal);
        let covers = window >= p.n_k.max(p.n_q) || causal && sinks.saturating_add(window) >= p.n_k;
        let rule = Rule { causal, window: Some(window), sinks, ..Rule::default() };
        let (pairs, empty) = visited(p, sinks, window);
        let heads = (p.batch * p.n_heads) as u64;
        Ok(Self {
            whole: covers.then(|| Exact::new(r, Status::Exact)).transpose()?,
            attend: Attend::new(r.device, p, r.element, rule)?,
            info: RunInfo { keys_visited: heads * pairs, empty_rows: heads * empty, ..RunInfo::default() },
            problem: *p,
            element: r.element,
            device: r.device.clone(),
            sinks,
            window,
        })
    }
}

/// Counts the pairs and empty rows of one head.
fn visited(p: &Problem, sinks: usize, window: usize) -> (u64, u64) {
    let (n_k, window, sinks) = (p.n_k as i64, window as i64, sinks.min(p.n_k) as i64);
    let (mut pairs, mut empty) = (0, 0);
    for i in 0..p.n_q as i64 {
        let at = i + n_k - p.n_q as i64;
        let causal = p.mask == Mask::Causal;
        let to = (if causal { at + 1 } else { at.saturating_add(window) }).clamp(0, n_k);
        let sunk = if causal { sinks.min(to) } else { sinks };
        let seen = sunk + (to - (at - window + 1).clamp(sunk, to.max(sunk))).max(0);
        pairs += seen as u64;
        empty += u64::from(seen == 0);
    }
    (pairs, empty)
}

impl Core for SinkWindow {
    fn run(&self, io: &Io<'_>, ws: &mut DeviceWorkspace) -> Result<RunInfo> {
        if let Some(whole) = &self.whole {
            return whole.run(io, ws);
        }
        self.attend.run(&io.q, &io.k, &io.v, io.o.view(), io.lse, ws)?;
        Ok(self.info.clone())
    }

    fn stream(&self, capacity: usize) -> Option<Result<Box<dyn DeviceStream>>> {
        let bounds = Some((self.sinks, self.window));
        let made = KeptTokens::new(&self.device, &self.problem, self.element, capacity, bounds);
        Some(made.map(|s| Box::new(s) as Box<dyn DeviceStream>))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_counted_as_the_host_counts_them() {
        let method = attlas::registry::method("sink_window").unwrap();
        for (n_q, n_k) in [(40, 40), (10, 40), (40, 10), (40, 0)] {
            for mask in [Mask::None, Mask::Causal] {
                let p = Problem { mask, ..Problem::new(1, 1, 4).with_lens(n_q, n_k) };
                let options = attlas::Options::new().with("sinks", 3usize).with("window", 5usize);
                let plan = method.plan(&p, &options).unwrap();
                let case = attlas::testkit::Case::gaussian(p, 1);
                let ran = attlas::testkit::run_with(&*plan, &case, attlas::testkit::How::default()).unwrap();
                if ran.info.status == Status::Exact {
                    continue;
                }
                let (pairs, empty) = visited(&p, 3, 5);
                assert_eq!(
                    (pairs, empty),
                    (ran.info.keys_visited, ran.info.empty_rows),
                    "{n_q}×{n_k} {mask}"
                );
            }
        }
    }
}
