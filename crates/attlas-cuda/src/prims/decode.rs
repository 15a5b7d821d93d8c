//! Decoding: one query row per head over all keys of a cache.

use crate::driver::{Arg, Kernel, View};
use crate::prims::{number, sizes, view_aligned};
use crate::workspace::padded;
use crate::{Device, DeviceRef, DeviceWorkspace, Element, KernelFamily, Result, programs};
use attlas::Problem;

/// Returns the keys per piece, only from the number of keys: bits do not depend on the GPU.
fn piece(n_k: usize) -> usize {
    match n_k {
        0..8192 => 256,
        8192..65536 => 1024,
        _ => 4096,
    }
}

/// Most heads of a group for the tensor-core kernel.
const FAST_GROUP: usize = 8;

/// Decoding of a problem with one query.
#[derive(Clone, Debug)]
pub(crate) struct Decode {
    problem: Problem,
    element: Element,
    any: Kernel,
    fast: Option<(Kernel, Kernel)>,
}

impl Decode {
    pub(crate) fn new(device: &Device, problem: &Problem, element: Element) -> Result<Self> {
        let problem = Problem { n_q: 1, ..*problem };
        let p = &problem;
        let any = device.kernel(&programs::any(element), "any_attend", p.d * element.sum().bytes())?;
        let quick = device.info().family != KernelFamily::Any
            && element.is_half()
            && p.d == p.d_v
            && [64, 128].contains(&p.d)
            && p.group_size() <= FAST_GROUP
            && p.scale > 0.0;
        let fast = if quick {
            let program = programs::decode(element, p.d);
            let shared = (2 * 3 * 64 * p.d * 2).max(4 * 8 * (p.d + 2) * 4);
            Some((
                device.kernel(&program, "decode", shared)?,
                device.kernel(&program, "merge_pieces", 32768)?,
            ))
        } else {
            None
        };
        Ok(Self { problem, element, any, fast })
    }

    pub(crate) fn workspace_bytes(&self, n_k: usize) -> usize {
        let p = &self.problem;
        let rows = p.batch * p.n_heads * n_k.div_ceil(piece(n_k));
        if self.fast.is_some() { padded(rows * p.d_v * 4) + padded(rows * 8) } else { 0 }
    }

    /// Attends to the first `n_k` rows of the caches.
    pub(crate) fn run(
        &self,
        q: &DeviceRef<'_>,
        [k, v]: [View; 2],
        n_k: usize,
        out: &DeviceRef<'_>,
        lse: u64,
        ws: &mut DeviceWorkspace,
    ) -> Result<()> {
        let p = Problem { n_k, ..self.problem };
        let pieces = n_k.div_ceil(piece(n_k));
        let views = [q.view(), k, v];
        match &self.fast {
            Some((decode, merge))
                if n_k > 0 && views.iter().all(view_aligned) && pieces * 4 <= merge.shared =>
            {
                let rows = p.batch * p.n_heads * pieces;
                let parts = Arg::Address(ws.take(rows * p.d_v * 4)?);
                let sums = Arg::Address(ws.take(rows * 8)?);
                let sl2 = Arg::Float((p.scale * std::f64::consts::LOG2_E) as f32);
                let args = [
                    Arg::View(views[0]),
                    Arg::View(k),
                    Arg::View(v),
                    parts,
                    sums,
                    Arg::Sizes(sizes(&p)),
                    Arg::Int(piece(n_k) as i32),
                    sl2,
                ];
                decode.launch(ws.stream(), [pieces, p.n_kv_heads, p.batch], 128, decode.shared, &args)?;
                let args = [
                    parts,
                    sums,
                    Arg::View(out.view()),
                    Arg::Address(lse),
                    Arg::Sizes(sizes(&p)),
                    Arg::Int(pieces as i32),
                ];
                merge.launch(ws.stream(), [p.n_heads, p.batch, 1], p.d, pieces * 4, &args)
            }
            _ => {
                let args = [
                    Arg::View(views[0]),
                    Arg::View(k),
                    Arg::View(v),
                    Arg::View(out.view()),
                    Arg::Address(lse),
                    Arg::Address(0),
                    Arg::Sizes(sizes(&p)),
                    Arg::Int(0),
                    Arg::Int(1 << 30),
                    Arg::Int(0),
                    number(self.element, p.scale),
                ];
                self.any.launch(ws.stream(), [1, p.n_heads, p.batch], 32, self.any.shared, &args)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn pieces_are_long_enough_to_fill_a_gpu_and_short_enough_to_share() {
        assert_eq!(
            [1, 8191, 8192, 65535, 65536, 1 << 20].map(super::piece),
            [256, 256, 1024, 1024, 4096, 4096]
        );
    }
}
