//! `loki`: keys ranked by a few coordinates of a calibrated basis, exact attention over the best.
//!
//! Ranking coordinates are kept in the type of the elements.

use crate::methods::exact::{Exact, empty_rows};
use crate::plan::{Core, Io, Request};
use crate::prims::contiguous;
use crate::prims::ranked::{Choice, Projection, Ranked};
use crate::prims::rows::{Copy, GrowingRows, Places};
use crate::workspace::padded;
use crate::{Device, DeviceOut, DeviceRef, DeviceStream, DeviceWorkspace, Element, Form, Pending, Result};
use attlas::methods::low_rank::loki::{GroupSelect, Loki as Host, METHOD, Params};
use attlas::{Error, Mask, Problem, RunInfo, Status, Support};

pub(crate) static FORM: Form = Form {
    method: &METHOD,
    draws: false,
    decodes: true,
    supports: |_, _, _, _| Support::yes(),
    build: |r| Ok(Box::new(Loki::new(r)?)),
};

#[derive(Debug)]
struct Loki {
    /// Exact attention, if every row keeps all keys.
    whole: Option<Exact>,
    ranked: Ranked,
    queries: Projection,
    keys: Projection,
    rank: usize,
    info: RunInfo,
    problem: Problem,
    element: Element,
    device: Device,
}

impl Loki {
    fn new(r: &Request<'_>) -> Result<Self> {
        let p = r.problem;
        let params = Params::from_options(r.options)?;
        let learnt = r.calibration.ok_or_else(|| Error::Calibration {
            method: METHOD.id.into(),
            expected: "a calibration".into(),
            found: "none".into(),
        })?;
        let choice = Choice {
            keys: params.keys,
            fraction: params.fraction,
            min_len: params.min_len,
            together: params.group_select == GroupSelect::GroupMax,
        };
        let all = match p.mask {
            Mask::None => choice.keeps_all(p.n_k),
            Mask::Causal => (0..=p.n_k).rev().all(|n| choice.keeps_all(n)),
        };
        let host = Host::new(p, params, learnt)?;
        let rank = host.rank();
        let map = |side: usize| -> Vec<f64> {
            (0..p.n_kv_heads).flat_map(|g| host.maps(g)[side].data().to_vec()).collect()
        };
        let voters = if choice.together { p.group_size() as u64 } else { 1 };
        Ok(Self {
            whole: all.then(|| Exact::new(r, Status::Exact)).transpose()?,
            ranked: Ranked::new(r.device, p, r.element, rank, choice)?,
            queries: Projection::new(r.device, r.element, &map(0), rank)?,
            keys: Projection::new(r.device, r.element, &map(1), rank)?,
            rank,
            info: RunInfo {
                rank: Some(rank),
                empty_rows: empty_rows(p),
                ..RunInfo::visited(p.visible_pairs() * (1 + voters))
            },
            problem: *p,
            element: r.element,
            device: r.device.clone(),
        })
    }

    fn ranks_bytes(&self, heads: usize, rows: usize) -> usize {
        self.problem.batch * heads * rows * self.rank * self.element.bytes()
    }
}

impl Core for Loki {
    fn workspace_bytes(&self) -> usize {
        let p = &self.problem;
        padded(self.ranks_bytes(p.n_heads, p.n_q))
            + padded(self.ranks_bytes(p.n_kv_heads, p.n_k))
            + self.ranked.workspace_bytes(p.n_q, p.n_k)
    }

    fn run(&self, io: &Io<'_>, ws: &mut DeviceWorkspace) -> Result<RunInfo> {
        if let Some(whole) = &self.whole {
            return whole.run(io, ws);
        }
        let p = &self.problem;
        let q_ranks = contiguous(ws.take(self.ranks_bytes(p.n_heads, p.n_q))?, p.n_heads, p.n_q, self.rank);
        let k_ranks =
            contiguous(ws.take(self.ranks_bytes(p.n_kv_heads, p.n_k))?, p.n_kv_heads, p.n_k, self.rank);
        self.queries.run(&io.q, p.group_size(), q_ranks, ws)?;
        self.keys.run(&io.k, 1, k_ranks, ws)?;
        let [q, k, v] = [io.q, io.k, io.v].map(|t| t.view());
        self.ranked.run(q, [k, v], [q_ranks, k_ranks], p.n_q, p.n_k, io.o.view(), io.lse, ws)?;
        Ok(self.info.clone())
    }

    fn stream(&self, capacity: usize) -> Option<Result<Box<dyn DeviceStream>>> {
        let made = RankedTokens::new(self, capacity);
        Some(made.map(|s| Box::new(s) as Box<dyn DeviceStream>))
    }
}

/// Decoding: keys, values and ranking coordinates stay on the device.
#[derive(Debug)]
struct RankedTokens {
    problem: Problem,
    element: Element,
    rank: usize,
    ranked: Ranked,
    queries: Projection,
    keys: Projection,
    copy: Copy,
    k: GrowingRows,
    v: GrowingRows,
    ranks: GrowingRows,
    len: usize,
}

impl RankedTokens {
    fn new(plan: &Loki, capacity: usize) -> Result<Self> {
        let (p, element) = (&plan.problem, plan.element);
        let cache =
            |columns| GrowingRows::new(&plan.device, element, [p.batch, p.n_kv_heads, capacity, columns]);
        Ok(Self {
            problem: Problem { n_q: 1, mask: Mask::None, ..*p },
            element,
            rank: plan.rank,
            ranked: plan.ranked.decoding(),
            queries: plan.queries.clone(),
            keys: plan.keys.clone(),
            copy: Copy::new(&plan.device, element)?,
            k: cache(p.d)?,
            v: cache(p.d_v)?,
            ranks: cache(plan.rank)?,
            len: 0,
        })
    }
}

impl DeviceStream for RankedTokens {
    fn push(&mut self, k: DeviceRef<'_>, v: DeviceRef<'_>, ws: &mut DeviceWorkspace) -> Result<()> {
        let rows = k.dims()[2];
        if rows == 0 {
            return Ok(());
        }
        for cache in [&mut self.k, &mut self.v, &mut self.ranks] {
            cache.reserve(self.len + rows, ws.stream())?;
        }
        let places = Places { at: self.len, ..Places::default() };
        self.copy.run(&k, self.k.view(), 0, places, ws)?;
        self.copy.run(&v, self.v.view(), 0, places, ws)?;
        let mut to = self.ranks.view();
        to.address += (self.len * self.rank * self.element.bytes()) as u64;
        self.keys.run(&k, 1, to, ws)?;
        self.len += rows;
        Ok(())
    }

    fn attend(
        &mut self,
        q: DeviceRef<'_>,
        out: &mut DeviceOut<'_>,
        ws: &mut DeviceWorkspace,
    ) -> Result<Pending> {
        let p = &self.problem;
        let bytes = p.batch * p.n_heads * self.rank * self.element.bytes();
        ws.reserve(padded(bytes) + self.ranked.workspace_bytes(1, self.len))?;
        ws.reset();
        let ranks = contiguous(ws.take(bytes)?, p.n_heads, 1, self.rank);
        self.queries.run(&q, p.group_size(), ranks, ws)?;
        let lse = out.lse.as_ref().map_or(0, |l| l.as_ref().view().address);
        let (cache, ranks) = ([self.k.view(), self.v.view()], [ranks, self.ranks.view()]);
        self.ranked.run(q.view(), cache, ranks, 1, self.len, out.o.as_ref().view(), lse, ws)?;
        let rows = (p.batch * p.n_heads) as u64;
        let info = RunInfo {
            rank: Some(self.rank),
            empty_rows: if self.len == 0 { rows } else { 0 },
            ..RunInfo::visited(2 * rows * self.len as u64)
        };
        Ok(Pending::new(info, ws))
    }

    fn len(&self) -> usize {
        self.len
    }

    fn state_bytes(&self) -> usize {
        self.k.bytes() + self.v.bytes() + self.ranks.bytes()
    }
}
