//! Linear attention with positive features: by tensor cores where there is a form, token by token otherwise.

use crate::driver::{Arg, Kernel, Sizes, View};
use crate::prims::{aligned, number, sizes};
use crate::workspace::padded;
use crate::{Device, DeviceRef, DeviceWorkspace, Element, KernelFamily, Result, programs};
use attlas::{Mask, Problem};

/// A map of single coordinates of `root` · x, by its number in the kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Map {
    pub(crate) code: i32,
    pub(crate) root: f64,
    /// Added to every feature of the relu map.
    pub(crate) eps: f64,
    /// Added to every denominator.
    pub(crate) den_eps: f64,
}

const SEGMENT: usize = 1024;
const WIDTH: usize = 72;

/// Linear attention of a problem.
#[derive(Clone, Debug)]
pub(crate) struct Linear {
    problem: Problem,
    element: Element,
    map: Map,
    features: Kernel,
    clear: Kernel,
    scan: Kernel,
    read: Kernel,
    fast: Option<[Kernel; 3]>,
}

impl Linear {
    pub(crate) fn new(device: &Device, problem: &Problem, element: Element, map: Map) -> Result<Self> {
        let (p, program) = (problem, programs::scan(element));
        let room = (2 * p.d + 40) * element.sum().bytes();
        let plain = map.code == 0 && map.root == 1.0 && map.den_eps == 0.0;
        let quick = device.info().family != KernelFamily::Any
            && element.is_half()
            && p.d == 64
            && p.d_v == 64
            && plain
            && p.n_k > 0
            && (p.mask == Mask::None || p.n_q == p.n_k);
        let fast = if quick {
            let (program, shared) = (programs::linear(element), 6 * 8192 + 2 * 64 * WIDTH * 2);
            let answer = if p.mask == Mask::Causal { "answer_causal" } else { "answer_whole" };
            Some([
                device.kernel(&program, "segment_states", 0)?,
                device.kernel(&program, "prefix_states", 0)?,
                device.kernel(&program, answer, shared)?,
            ])
        } else {
            None
        };
        Ok(Self {
            problem: *p,
            element,
            map,
            features: device.kernel(&program, "log_features", 0)?,
            clear: device.kernel(&program, "clear_state", 0)?,
            scan: device.kernel(&program, "scan_tokens", room)?,
            read: device.kernel(&program, "read_rows", room)?,
            fast,
        })
    }

    /// Bytes of the states of all key heads.
    pub(crate) fn state_bytes(&self) -> usize {
        let p = &self.problem;
        p.batch * p.n_kv_heads * p.d * (p.d_v + 2) * self.element.sum().bytes()
    }

    fn feature_bytes(&self, heads: usize, rows: usize) -> usize {
        self.problem.batch * heads * rows * self.problem.d * self.element.sum().bytes()
    }

    pub(crate) fn workspace_bytes(&self) -> usize {
        let p = &self.problem;
        let plain = padded(self.state_bytes())
            + padded(self.feature_bytes(p.n_kv_heads, p.n_k))
            + padded(self.feature_bytes(p.n_heads, p.n_q));
        let states = padded(p.batch * p.n_kv_heads * p.n_k.div_ceil(SEGMENT) * 64 * WIDTH * 4);
        // Strides may rule out the fast form, so there is room for either.
        if self.fast.is_some() { plain.max(states) } else { plain }
    }

    /// Logarithms of the features of all rows.
    pub(crate) fn log_features(
        &self,
        x: &DeviceRef<'_>,
        queries: bool,
        to: u64,
        ws: &DeviceWorkspace,
    ) -> Result<()> {
        let [batch, heads, n, d] = x.dims();
        let args = [
            Arg::View(x.view()),
            Arg::Address(to),
            Arg::Int(n as i32),
            Arg::Int(d as i32),
            Arg::Int(heads as i32),
            Arg::Int(self.map.code),
            Arg::Int(i32::from(queries)),
            number(self.element, self.map.root),
            number(self.element, self.map.eps),
        ];
        self.features.launch(ws.stream(), [n.div_ceil(8), heads, batch], 256, 0, &args)
    }

    pub(crate) fn clear_state(&self, state: u64, ws: &DeviceWorkspace) -> Result<()> {
        let p = &self.problem;
        let args = [Arg::Address(state), Arg::Int(p.d as i32), Arg::Int(p.d_v as i32)];
        self.clear.launch(ws.stream(), [p.batch * p.n_kv_heads, 1, 1], 256, 0, &args)
    }

    /// Adds tokens to the states; with a causal mask, answers the queries at them.
    pub(crate) fn absorb(
        &self,
        state: u64,
        features: u64,
        v: View,
        n: Sizes,
        rows: Option<(u64, View, u64)>,
        ws: &DeviceWorkspace,
    ) -> Result<()> {
        let p = &self.problem;
        let (queries, out, lse) = rows.unwrap_or_default();
        let args = [
            Arg::Address(state),
            Arg::Address(features),
            Arg::View(v),
            Arg::Address(queries),
            Arg::View(out),
            Arg::Address(lse),
            Arg::Sizes(n),
            Arg::Int(p.d as i32),
            Arg::Int(i32::from(rows.is_some())),
            number(self.element, self.map.den_eps),
        ];
        self.scan.launch(ws.stream(), [p.n_kv_heads, p.batch, 1], 256, self.scan.shared, &args)
    }

    /// Answers queries from the states.
    pub(crate) fn read(
        &self,
        state: u64,
        features: u64,
        out: View,
        lse: u64,
        n: Sizes,
        ws: &DeviceWorkspace,
    ) -> Result<()> {
        let args = [
            Arg::Address(state),
            Arg::Address(features),
            Arg::View(out),
            Arg::Address(lse),
            Arg::Sizes(n),
            Arg::Int(self.problem.d as i32),
            number(self.element, self.map.den_eps),
        ];
        let grid = [n.nq as usize, n.heads as usize, self.problem.batch];
        self.read.launch(ws.stream(), grid, 128, self.read.shared, &args)
    }

    pub(crate) fn run(
        &self,
        [q, k, v]: [&DeviceRef<'_>; 3],
        out: &DeviceRef<'_>,
        lse: u64,
        ws: &mut DeviceWorkspace,
    ) -> Result<()> {
        let (p, n) = (&self.problem, sizes(&self.problem));
        if p.n_q == 0 {
            return Ok(());
        }
        if let Some([states, prefix, answer]) = self.fast.as_ref().filter(|_| aligned(&[q, k, v, out])) {
            let segments = p.n_k.div_ceil(SEGMENT);
            let own = Arg::Address(ws.take(p.batch * p.n_kv_heads * segments * 64 * WIDTH * 4)?);
            let (views, n) = ([q, k, v].map(|t| Arg::View(t.view())), Arg::Sizes(n));
            let causal = p.mask == Mask::Causal;
            let whole = Arg::Int(i32::from(!causal));
            states.launch(
                ws.stream(),
                [segments, p.n_kv_heads, p.batch],
                128,
                0,
                &[views[1], views[2], own, n],
            )?;
            let segments = Arg::Int(segments as i32);
            prefix.launch(
                ws.stream(),
                [64 * WIDTH / 128, p.batch * p.n_kv_heads, 1],
                128,
                0,
                &[own, segments, whole],
            )?;
            let args =
                [views[0], views[1], views[2], own, Arg::View(out.view()), Arg::Address(lse), n, segments];
            let grid = [p.n_q.div_ceil(SEGMENT), p.n_heads, p.batch];
            return answer.launch(ws.stream(), grid, 128, answer.shared, &args);
        }
        let state = ws.take(self.state_bytes())?;
        let keys = ws.take(self.feature_bytes(p.n_kv_heads, p.n_k))?;
        let queries = ws.take(self.feature_bytes(p.n_heads, p.n_q))?;
        self.clear_state(state, ws)?;
        self.log_features(k, false, keys, ws)?;
        self.log_features(q, true, queries, ws)?;
        if p.mask == Mask::Causal {
            self.absorb(state, keys, v.view(), n, Some((queries, out.view(), lse)), ws)
        } else {
            self.absorb(state, keys, v.view(), n, None, ws)?;
            self.read(state, queries, out.view(), lse, n, ws)
        }
    }
}
