//! `naive` and `exact`: exact attention by the portable kernel, and by the best kernel for the widths.

use crate::plan::{Core, Io, Request};
use crate::prims::attend::{Attend, Rule};
use crate::prims::decode::Decode;
use crate::prims::rows::{Copy, GrowingRows, Places};
use crate::{Device, DeviceOut, DeviceRef, DeviceStream, DeviceWorkspace, Element, Form, Pending, Result};
use attlas::methods::exact::{exact, naive};
use attlas::{Mask, Problem, RunInfo, Status, Support};

/// The plain kernel.
pub(crate) static NAIVE: Form = Form {
    method: &naive::METHOD,
    draws: false,
    decodes: true,
    supports: |_, _, _, _| Support::yes(),
    build: |r| Ok(Box::new(Exact::new(r, Status::Complete)?)),
};

/// The best kernel.
pub(crate) static EXACT: Form = Form {
    method: &exact::METHOD,
    draws: false,
    decodes: true,
    supports: |_, options, element, _| {
        let asked = options.get("precision").is_some_and(|v| v.to_string() != "full");
        Support::unless(
            asked && !element.is_half(),
            "precision = bf16 rounds operands on the host; on the device the tensors themselves are bf16",
        )
    },
    build: |r| Ok(Box::new(Exact::new(r, Status::Complete)?)),
};

/// Returns the number of rows without a key.
pub(crate) fn empty_rows(p: &Problem) -> u64 {
    let rows = match p.mask {
        _ if p.n_k == 0 => p.n_q,
        Mask::Causal => p.n_q.saturating_sub(p.n_k),
        Mask::None => 0,
    };
    (p.batch * p.n_heads * rows) as u64
}

/// Exact attention over all keys.
#[derive(Debug)]
pub(crate) struct Exact {
    attend: Attend,
    info: RunInfo,
    device: Device,
    problem: Problem,
    element: Element,
}

impl Exact {
    pub(crate) fn new(r: &Request<'_>, status: Status) -> Result<Self> {
        let p = r.problem;
        let info = RunInfo {
            keys_visited: p.visible_pairs(),
            empty_rows: empty_rows(p),
            status,
            ..RunInfo::default()
        };
        let attend = Attend::new(r.device, p, r.element, Rule::of(p.mask))?;
        Ok(Self { attend, info, device: r.device.clone(), problem: *p, element: r.element })
    }
}

impl Core for Exact {
    fn run(&self, io: &Io<'_>, ws: &mut DeviceWorkspace) -> Result<RunInfo> {
        self.attend.run(&io.q, &io.k, &io.v, io.o.view(), io.lse, ws)?;
        Ok(self.info.clone())
    }

    fn stream(&self, capacity: usize) -> Option<Result<Box<dyn DeviceStream>>> {
        let made = KeptTokens::new(&self.device, &self.problem, self.element, capacity, None);
        Some(made.map(|s| Box::new(s) as Box<dyn DeviceStream>))
    }
}

/// Decoding over kept keys and values: all of them, or the first `sinks` and a ring of the last `window`.
#[derive(Debug)]
pub(crate) struct KeptTokens {
    problem: Problem,
    decode: Decode,
    copy: Copy,
    k: GrowingRows,
    v: GrowingRows,
    bounds: Option<(usize, usize)>,
    len: usize,
}

impl KeptTokens {
    pub(crate) fn new(
        device: &Device,
        p: &Problem,
        element: Element,
        capacity: usize,
        bounds: Option<(usize, usize)>,
    ) -> Result<Self> {
        let rows = bounds.map_or(capacity, |(sinks, window)| capacity.min(sinks.saturating_add(window)));
        let cache = |columns| GrowingRows::new(device, element, [p.batch, p.n_kv_heads, rows, columns]);
        Ok(Self {
            problem: *p,
            decode: Decode::new(device, p, element)?,
            copy: Copy::new(device, element)?,
            k: cache(p.d)?,
            v: cache(p.d_v)?,
            bounds,
            len: 0,
        })
    }

    /// Returns the number of slots in use after `len` tokens.
    fn cached(&self, len: usize) -> usize {
        self.bounds.map_or(len, |(sinks, window)| len.min(sinks.saturating_add(window)))
    }
}

impl DeviceStream for KeptTokens {
    fn push(&mut self, k: DeviceRef<'_>, v: DeviceRef<'_>, ws: &mut DeviceWorkspace) -> Result<()> {
        let rows = k.dims()[2];
        if rows == 0 {
            return Ok(());
        }
        let cached = self.cached(self.len + rows);
        self.k.reserve(cached, ws.stream())?;
        self.v.reserve(cached, ws.stream())?;
        let places = match self.bounds {
            Some((sinks, window)) => Places { at: self.len, fixed: sinks, ring: window },
            None => Places { at: self.len, ..Places::default() },
        };
        self.copy.run(&k, self.k.view(), 0, places, ws)?;
        self.copy.run(&v, self.v.view(), 0, places, ws)?;
        self.len += rows;
        Ok(())
    }

    fn attend(
        &mut self,
        q: DeviceRef<'_>,
        out: &mut DeviceOut<'_>,
        ws: &mut DeviceWorkspace,
    ) -> Result<Pending> {
        let cached = self.cached(self.len);
        ws.reserve(self.decode.workspace_bytes(cached))?;
        ws.reset();
        let lse = out.lse.as_ref().map_or(0, |l| l.as_ref().view().address);
        self.decode.run(&q, [self.k.view(), self.v.view()], cached, &out.o.as_ref(), lse, ws)?;
        let p = &self.problem;
        let rows = (p.batch * p.n_heads) as u64;
        let info = RunInfo {
            keys_visited: rows * cached as u64,
            empty_rows: if cached == 0 { rows } else { 0 },
            ..RunInfo::default()
        };
        Ok(Pending::new(info, ws))
    }

    fn len(&self) -> usize {
        self.len
    }

    fn state_bytes(&self) -> usize {
        self.k.bytes() + self.v.bytes()
    }
}
