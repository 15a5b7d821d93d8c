//! Linear attention with features of either sign: by segments, and decoding with a state.

use crate::driver::{Arg, Kernel, View};
use crate::prims::positive::{PARTS, Piece, ROWS, SEGMENT, blocks};
use crate::prims::{number, sizes};
use crate::workspace::padded;
use crate::{Device, DeviceBuffer, DeviceRef, DeviceWorkspace, Element, Result, programs};
use attlas::{Mask, Problem};

/// Features by their number in the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Trig = 0,
    Angular = 1,
    Gaussian = 2,
}

/// Treatment of a row with a nearly cancelling denominator, by its number in the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Policy {
    Strict = 0,
    Clamp = 1,
    ZeroRow = 2,
}

/// Most features, and most directions, for the kernels.
pub(crate) const MOST_FEATURES: usize = 1200;
pub(crate) const MOST_DIRECTIONS: usize = 512;

/// Directions of every sequence and key head.
pub(crate) struct Directions {
    pub(crate) kind: Kind,
    /// `[maps][d][bases + weights]`.
    pub(crate) map: Vec<f64>,
    pub(crate) bases: usize,
    pub(crate) weights: usize,
}

impl Directions {
    pub(crate) fn features(&self) -> usize {
        match self.kind {
            Kind::Trig => 2 * self.bases,
            Kind::Angular => 4 * self.bases * (self.weights + 1),
            Kind::Gaussian => 2 * self.bases * (1 + 4 * self.weights),
        }
    }
}

/// Linear attention of a problem with a signed map.
#[derive(Clone, Debug)]
pub(crate) struct Signed {
    device: Device,
    problem: Problem,
    element: Element,
    map: DeviceBuffer,
    kind: Kind,
    bases: usize,
    weights: usize,
    m: usize,
    policy: Policy,
    least: f64,
    features: Kernel,
    sums: Kernel,
    prefix: Kernel,
    references: Kernel,
    answer: Kernel,
    clear: Kernel,
    absorb: Kernel,
}

/// Features of some rows with their scales: addresses.
#[derive(Clone, Copy)]
struct Mapped {
    features: u64,
    scales: u64,
}

impl Signed {
    pub(crate) fn new(
        device: &Device,
        problem: &Problem,
        element: Element,
        directions: &Directions,
        policy: Policy,
        least: f64,
    ) -> Result<Self> {
        let (program, m, size) = (programs::signed(element), directions.features(), element.sum().bytes());
        let wide = if element.is_half() { Element::F32 } else { Element::F64 };
        let width = directions.bases + directions.weights;
        Ok(Self {
            device: device.clone(),
            problem: *problem,
            element,
            map: DeviceBuffer::from_host(device, wide, &directions.map)?,
            kind: directions.kind,
            bases: directions.bases,
            weights: directions.weights,
            m,
            policy,
            least,
            features: device.kernel(&program, "signed_features", 4 * (problem.d + width) * wide.bytes())?,
            sums: device.kernel(&program, "segment_sums", 0)?,
            prefix: device.kernel(&program, "prefix_sums", 0)?,
            references: device.kernel(&program, "prefix_references", 0)?,
            answer: device.kernel(&program, "answer_rows", ROWS * (m + SEGMENT + 3 + PARTS) * size)?,
            clear: device.kernel(&program, "clear_state", 0)?,
            absorb: device.kernel(&program, "absorb_tokens", 0)?,
        })
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    pub(crate) fn problem(&self) -> &Problem {
        &self.problem
    }

    pub(crate) fn element(&self) -> Element {
        self.element
    }

    /// Returns the number of features of a token.
    pub(crate) fn count(&self) -> usize {
        self.m
    }

    fn state_len(&self) -> usize {
        self.m * (self.problem.d_v + 2) + 1
    }

    pub(crate) fn state_bytes(&self) -> usize {
        let p = &self.problem;
        p.batch * p.n_kv_heads * self.state_len() * self.element.sum().bytes()
    }

    fn segments(&self) -> usize {
        self.problem.n_k.div_ceil(SEGMENT).max(1)
    }

    /// Returns the scratch memory of some key heads: features and scales of keys and of queries, states.
    fn head_bytes(&self, heads: usize) -> [usize; 5] {
        let (p, m, rows) = (&self.problem, self.m, heads * self.problem.group_size() * self.problem.n_q);
        let keys = heads * p.n_k;
        [keys * m, keys, rows * m, rows, heads * self.segments() * self.state_len()]
            .map(|numbers| numbers * self.element.sum().bytes())
    }

    fn pieces(&self) -> Vec<Piece> {
        Piece::all(&self.problem, self.head_bytes(1).iter().sum())
    }

    pub(crate) fn workspace_bytes(&self) -> usize {
        let most = self.pieces().iter().map(|x| x.batch.len() * x.heads.len()).max().unwrap_or(0);
        self.head_bytes(most).map(padded).iter().sum()
    }

    #[allow(clippy::too_many_arguments)]
    fn map(
        &self,
        x: View,
        [batch, heads, n]: [usize; 3],
        group: usize,
        map: usize,
        of_keys: bool,
        to: Mapped,
        ws: &DeviceWorkspace,
    ) -> Result<()> {
        let d = self.problem.d;
        let int = |x: usize| Arg::Int(x as i32);
        let ahead = map * d * (self.bases + self.weights) * self.map.element().bytes();
        let scale = self.problem.scale;
        let args = [
            Arg::View(x),
            Arg::Address(self.map.address() + ahead as u64),
            Arg::Address(to.features),
            Arg::Address(to.scales),
            int(n),
            int(d),
            int(heads),
            int(group),
            int(self.bases),
            int(self.weights),
            int(self.m),
            Arg::Int(self.kind as i32),
            Arg::Int(i32::from(of_keys)),
            if self.element.is_half() { Arg::Float(scale as f32) } else { Arg::Double(scale) },
        ];
        self.features.launch(ws.stream(), [n.div_ceil(4), heads, batch], 128, self.features.shared, &args)
    }

    pub(crate) fn run(
        &self,
        [q, k, v]: [&DeviceRef<'_>; 3],
        out: &DeviceRef<'_>,
        lse: u64,
        ws: &mut DeviceWorkspace,
    ) -> Result<()> {
        let (p, group, segments) = (&self.problem, self.problem.group_size(), self.segments());
        if p.n_q == 0 {
            return Ok(());
        }
        let int = |x: usize| Arg::Int(x as i32);
        for piece in self.pieces() {
            let mark = ws.mark();
            let part = piece.problem(p);
            let (batch, heads) = (part.batch, part.n_kv_heads);
            let mut places = [0; 5];
            for (place, bytes) in places.iter_mut().zip(self.head_bytes(batch * heads)) {
                *place = ws.take(bytes)?;
            }
            let keys = Mapped { features: places[0], scales: places[1] };
            let queries = Mapped { features: places[2], scales: places[3] };
            let (states, v) = (Arg::Address(places[4]), piece.cut(v, 1));
            let map = piece.first(p);
            self.map(piece.cut(k, 1), [batch, heads, p.n_k], 1, map, true, keys, ws)?;
            self.map(piece.cut(q, group), [batch, part.n_heads, p.n_q], group, map, false, queries, ws)?;
            let args = [
                Arg::Address(keys.features),
                Arg::Address(keys.scales),
                Arg::View(v),
                states,
                Arg::Sizes(sizes(&part)),
                int(heads),
                int(self.m),
            ];
            let tiles = self.m.div_ceil(64) * p.d_v.div_ceil(64).max(1);
            self.sums.launch(ws.stream(), [segments, tiles, batch * heads], 256, 0, &args)?;
            let whole = Arg::Int(i32::from(p.mask == Mask::None));
            let args = [states, int(segments), Arg::Long(self.state_len() as i64), whole];
            let grid = [(self.state_len() - 1).div_ceil(128), batch * heads, 1];
            self.prefix.launch(ws.stream(), grid, 128, 0, &args)?;
            self.references.launch(ws.stream(), [batch * heads, 1, 1], 1, 0, &args)?;
            let lse = piece.lse(lse, p, self.element.sum().bytes());
            let views = [v, piece.cut(out, group)];
            self.answer(places[4], keys, queries, views, lse, &part, segments, ws)?;
            ws.rewind(mark);
        }
        Ok(())
    }

    #[allow(clippy::too_many_arguments)]
    fn answer(
        &self,
        states: u64,
        keys: Mapped,
        queries: Mapped,
        [v, out]: [View; 2],
        lse: u64,
        p: &Problem,
        segments: usize,
        ws: &DeviceWorkspace,
    ) -> Result<()> {
        let int = |x: usize| Arg::Int(x as i32);
        let causal = p.mask == Mask::Causal;
        let args = [
            Arg::Address(states),
            Arg::Address(keys.features),
            Arg::Address(keys.scales),
            Arg::Address(queries.features),
            Arg::Address(queries.scales),
            Arg::View(v),
            Arg::View(out),
            Arg::Address(lse),
            Arg::Sizes(sizes(p)),
            int(p.n_kv_heads),
            int(segments),
            int(self.m),
            Arg::Int(i32::from(causal)),
            Arg::Int(self.policy as i32),
            number(self.element, self.least),
        ];
        let rows = if causal { blocks(p.n_q as i64, p.n_k as i64) } else { p.n_q.div_ceil(ROWS) };
        let grid = [rows, p.n_heads, p.batch];
        self.answer.launch(ws.stream(), grid, 32 * ROWS, self.answer.shared, &args)
    }

    /// Returns the scratch memory of some tokens or rows of decoding.
    pub(crate) fn step_bytes(&self, heads: usize, rows: usize) -> usize {
        let rows = self.problem.batch * heads * rows * self.element.sum().bytes();
        padded(rows * self.m) + padded(rows)
    }

    fn take(&self, heads: usize, rows: usize, ws: &mut DeviceWorkspace) -> Result<Mapped> {
        let rows = self.problem.batch * heads * rows * self.element.sum().bytes();
        Ok(Mapped { features: ws.take(rows * self.m)?, scales: ws.take(rows)? })
    }

    pub(crate) fn clear_state(&self, state: u64, ws: &DeviceWorkspace) -> Result<()> {
        let heads = self.problem.batch * self.problem.n_kv_heads;
        let args = [Arg::Address(state), Arg::Long(self.state_len() as i64)];
        self.clear.launch(ws.stream(), [heads, 1, 1], 256, 0, &args)
    }

    /// Adds tokens to the states.
    pub(crate) fn push(
        &self,
        state: u64,
        k: &DeviceRef<'_>,
        v: &DeviceRef<'_>,
        ws: &mut DeviceWorkspace,
    ) -> Result<()> {
        let [batch, heads, n, _] = k.dims();
        let keys = self.take(heads, n, ws)?;
        self.map(k.view(), [batch, heads, n], 1, 0, true, keys, ws)?;
        let args = [
            Arg::Address(state),
            Arg::Address(keys.features),
            Arg::Address(keys.scales),
            Arg::View(v.view()),
            Arg::Int(n as i32),
            Arg::Int(self.m as i32),
            Arg::Int(self.problem.d_v as i32),
        ];
        self.absorb.launch(ws.stream(), [heads, batch, 1], 256, 0, &args)
    }

    /// Computes one row of each head from states of `seen` tokens.
    pub(crate) fn attend(
        &self,
        state: u64,
        seen: usize,
        q: &DeviceRef<'_>,
        out: &DeviceRef<'_>,
        lse: u64,
        ws: &mut DeviceWorkspace,
    ) -> Result<()> {
        let p = Problem { n_q: 1, n_k: seen, mask: Mask::None, ..self.problem };
        let queries = self.take(p.n_heads, 1, ws)?;
        self.map(q.view(), [p.batch, p.n_heads, 1], p.group_size(), 0, false, queries, ws)?;
        let keys = Mapped { features: 0, scales: 0 };
        self.answer(state, keys, queries, [out.view(), out.view()], lse, &p, 1, ws)
    }
}
