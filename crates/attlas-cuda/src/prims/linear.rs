//! Linear attention with features elu + 1 of 64 columns on tensor cores.

use crate::driver::{Arg, Kernel};
use crate::prims::{aligned, sizes};
use crate::workspace::padded;
use crate::{Device, DeviceRef, DeviceWorkspace, Element, KernelFamily, Result, programs};
use attlas::{Mask, Problem};

const SEGMENT: usize = 1024;
const WIDTH: usize = 72;

/// The three kernels of a problem with this form.
#[derive(Clone, Debug)]
pub(crate) struct Elu1 {
    problem: Problem,
    states: Kernel,
    prefix: Kernel,
    answer: Kernel,
}

impl Elu1 {
    pub(crate) fn new(device: &Device, p: &Problem, element: Element) -> Result<Option<Self>> {
        let quick = device.info().family != KernelFamily::Any
            && element.is_half()
            && p.d == 64
            && p.d_v == 64
            && p.n_k > 0
            && (p.mask == Mask::None || p.n_q == p.n_k);
        if !quick {
            return Ok(None);
        }
        let (program, shared) = (programs::linear(element), 6 * 8192 + 2 * 64 * WIDTH * 2);
        let answer = if p.mask == Mask::Causal { "answer_causal" } else { "answer_whole" };
        Ok(Some(Self {
            problem: *p,
            states: device.kernel(&program, "segment_states", 0)?,
            prefix: device.kernel(&program, "prefix_states", 0)?,
            answer: device.kernel(&program, answer, shared)?,
        }))
    }

    /// Returns true if the kernels can read these rows.
    pub(crate) fn takes(&self, tensors: &[&DeviceRef<'_>]) -> bool {
        aligned(tensors)
    }

    fn state_bytes(&self) -> usize {
        let p = &self.problem;
        p.batch * p.n_kv_heads * p.n_k.div_ceil(SEGMENT) * 64 * WIDTH * 4
    }

    pub(crate) fn workspace_bytes(&self) -> usize {
        padded(self.state_bytes())
    }

    pub(crate) fn run(
        &self,
        x: [&DeviceRef<'_>; 3],
        out: &DeviceRef<'_>,
        lse: u64,
        ws: &mut DeviceWorkspace,
    ) -> Result<()> {
        let (p, n) = (&self.problem, Arg::Sizes(sizes(&self.problem)));
        let segments = p.n_k.div_ceil(SEGMENT);
        let own = Arg::Address(ws.take(self.state_bytes())?);
        let views = x.map(|t| Arg::View(t.view()));
        let whole = Arg::Int(i32::from(p.mask == Mask::None));
        let grid = [segments, p.n_kv_heads, p.batch];
        self.states.launch(ws.stream(), grid, 128, 0, &[views[1], views[2], own, n])?;
        let segments = Arg::Int(segments as i32);
        let grid = [64 * WIDTH / 128, p.batch * p.n_kv_heads, 1];
        self.prefix.launch(ws.stream(), grid, 128, 0, &[own, segments, whole])?;
        let args = [views[0], views[1], views[2], own, Arg::View(out.view()), Arg::Address(lse), n, segments];
        let grid = [p.n_q.div_ceil(SEGMENT), p.n_heads, p.batch];
        self.answer.launch(ws.stream(), grid, 128, self.answer.shared, &args)
    }
}
