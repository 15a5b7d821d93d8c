//! `top_k`: exact attention over the largest logits of each row.

use crate::methods::exact::{Exact, empty_rows};
use crate::plan::{Core, Io};
use crate::prims::ranked::{Choice, Ranked};
use crate::{DeviceWorkspace, Form, Result};
use attlas::methods::exact::top_k::{METHOD, Params};
use attlas::{Problem, RunInfo, Status, Support};

pub(crate) static FORM: Form = Form {
    method: &METHOD,
    draws: false,
    decodes: false,
    supports: |_, _, _, _| Support::yes(),
    build: |r| {
        let Params { keys, .. } = Params::from_options(r.options)?;
        if keys >= r.problem.n_k {
            return Ok(Box::new(Exact::new(r, Status::Exact)?));
        }
        let choice = Choice { keys: Some(keys), fraction: 0.0, min_len: 0, together: false };
        let ranked = Ranked::new(r.device, r.problem, r.element, r.problem.d, choice)?;
        Ok(Box::new(TopK { ranked, problem: *r.problem, keys }))
    },
};

#[derive(Debug)]
struct TopK {
    ranked: Ranked,
    problem: Problem,
    keys: usize,
}

impl Core for TopK {
    fn workspace_bytes(&self) -> usize {
        self.ranked.workspace_bytes(self.problem.n_q, self.problem.n_k)
    }

    fn run(&self, io: &Io<'_>, ws: &mut DeviceWorkspace) -> Result<RunInfo> {
        let p = &self.problem;
        let [q, k, v] = [io.q, io.k, io.v].map(|t| t.view());
        self.ranked.run(q, [k, v], [q, k], p.n_q, p.n_k, io.o.view(), io.lse, ws)?;
        Ok(RunInfo {
            empty_rows: empty_rows(p),
            rank: Some(self.keys),
            ..RunInfo::visited(p.visible_pairs())
        })
    }
}
