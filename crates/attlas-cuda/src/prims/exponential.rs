//! Linear attention with exponential features on tensor cores: bf16, 64 columns.

use crate::driver::{Arg, Kernel};
use crate::prims::features::Random;
use crate::prims::{aligned, sizes};
use crate::workspace::padded;
use crate::{Device, DeviceBuffer, DeviceRef, DeviceWorkspace, Element, KernelFamily, Result, programs};
use attlas::{Mask, Problem};

const SEGMENT: usize = 128;
const CHUNK: usize = 64;
const TILE_BYTES: usize = 8192;

/// Most tiles of 16 features whose weights fit into a thread's registers.
const MOST_TILES: usize = 18;

/// The three kernels of a problem and a map that have this form.
#[derive(Clone, Debug)]
pub(crate) struct Exponential {
    problem: Problem,
    states: Kernel,
    prefix: Kernel,
    rows: Kernel,
    /// The kernel that fits the exponent, and the squared norms of the directions.
    fit: Option<(Kernel, DeviceBuffer)>,
    omega: DeviceBuffer,
    constants: DeviceBuffer,
    directions: usize,
    tiles: usize,
    signs: usize,
    norm: f64,
}

impl Exponential {
    pub(crate) fn new(
        device: &Device,
        p: &Problem,
        element: Element,
        map: &Random<'_>,
    ) -> Result<Option<Self>> {
        let Some(first) = map.queries.first() else { return Ok(None) };
        let (directions, signs) = (first.directions.rows(), if map.opposite { 2 } else { 1 });
        let tiles = directions.div_ceil(16);
        let quick = device.info().family != KernelFamily::Any
            && element == Element::Bf16
            && p.d == 64
            && p.d_v == 64
            && map.keys.is_none()
            && map.relu.is_none()
            && first.norm.is_none()
            && tiles * signs <= MOST_TILES
            && p.n_k > 0
            && (p.mask == Mask::None || p.n_q == p.n_k);
        if !quick {
            return Ok(None);
        }
        // Two bf16 terms each, which give projections single-precision accuracy.
        let padded = tiles * 16;
        let mut omega = Vec::with_capacity(map.queries.len() * 2 * padded * 64);
        for part in map.queries {
            let mut low = Vec::with_capacity(padded * 64);
            for l in 0..padded {
                for c in 0..64 {
                    let x = if l < directions { part.directions[(l, c)] } else { 0.0 };
                    let high = element.round(x);
                    omega.push(high);
                    low.push(x - high);
                }
            }
            omega.append(&mut low);
        }
        let constants: Vec<f64> = map.queries.iter().flat_map(|p| p.constants.iter().copied()).collect();
        let causal = p.mask == Mask::Causal;
        let program = programs::exponential(tiles, signs, causal);
        let features = signs * padded;
        let room = (CHUNK * (features + 8) * 2).max(features * 128);
        let shared = 2 * padded * 128 + room + 2 * TILE_BYTES + 4 * (padded + features);
        let fit = match &map.lengths {
            Some(lengths) => Some((
                device.kernel(&programs::features(element), "fit_exponent", 0)?,
                DeviceBuffer::from_host(device, Element::F32, lengths)?,
            )),
            None => None,
        };
        Ok(Some(Self {
            problem: *p,
            states: device.kernel(&program, "feature_states", 4 * TILE_BYTES + 4 * SEGMENT)?,
            prefix: device.kernel(&program, "prefix_means", 0)?,
            rows: device.kernel(&program, "feature_rows", shared)?,
            fit,
            omega: DeviceBuffer::from_host(device, element, &omega)?,
            constants: DeviceBuffer::from_host(device, Element::F32, &constants)?,
            directions,
            tiles,
            signs,
            norm: first.norm_scale,
        }))
    }

    /// Returns true if the kernels can read these rows.
    pub(crate) fn takes(&self, tensors: &[&DeviceRef<'_>]) -> bool {
        aligned(tensors)
    }

    /// Returns the bytes of means, of their logarithms, and of fitted values.
    fn bytes(&self) -> [usize; 3] {
        let p = &self.problem;
        let heads = p.batch * p.n_kv_heads;
        let states = heads * p.n_k.div_ceil(SEGMENT) * self.signs * self.tiles * 16;
        [states * 128, states * 4, heads * 12]
    }

    pub(crate) fn workspace_bytes(&self) -> usize {
        self.bytes().map(padded).iter().sum()
    }

    pub(crate) fn run(
        &self,
        [q, k, v]: [&DeviceRef<'_>; 3],
        out: &DeviceRef<'_>,
        lse: u64,
        ws: &mut DeviceWorkspace,
    ) -> Result<()> {
        let p = &self.problem;
        let [means, logs, found] = self.bytes();
        let (means, logs) = (Arg::Address(ws.take(means)?), Arg::Address(ws.take(logs)?));
        let found = ws.take(found)?;
        let (heads, n) = (p.batch * p.n_kv_heads, Arg::Sizes(sizes(p)));
        let views = [q, k, v].map(|t| Arg::View(t.view()));
        let (mut fitted, mut lengths) = (Arg::Address(0), Arg::Address(0));
        if let Some((kernel, squares)) = &self.fit {
            (fitted, lengths) = (Arg::Address(found), Arg::Address(squares.address()));
            let args = [views[0], views[1], fitted, n, Arg::Double(p.scale)];
            kernel.launch(ws.stream(), [p.n_kv_heads, p.batch, 1], 1024, 0, &args)?;
        }
        let int = |x: usize| Arg::Int(x as i32);
        let map =
            [Arg::Address(self.omega.address()), Arg::Address(self.constants.address()), fitted, lengths];
        let (directions, norm) = (int(self.directions), Arg::Float(self.norm as f32));
        let segments = p.n_k.div_ceil(SEGMENT);
        let args = [views[1], views[2], map[0], map[1], map[2], map[3], means, logs, n, directions, norm];
        let grid = [segments, self.tiles.div_ceil(4), heads];
        self.states.launch(ws.stream(), grid, 128, self.states.shared, &args)?;
        let whole = Arg::Int(i32::from(p.mask == Mask::None));
        let grid = [self.signs * self.tiles * 4, heads, 1];
        self.prefix.launch(ws.stream(), grid, 128, 0, &[means, logs, int(segments), whole])?;
        let args = [
            views[0],
            views[1],
            views[2],
            map[0],
            map[1],
            map[2],
            map[3],
            means,
            logs,
            Arg::View(out.view()),
            Arg::Address(lse),
            n,
            int(segments),
            directions,
            norm,
        ];
        let grid = [p.n_q.div_ceil(CHUNK), p.n_heads, p.batch];
        self.rows.launch(ws.stream(), grid, 128, self.rows.shared, &args)
    }
}
