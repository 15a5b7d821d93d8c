//! Representative rows: means of segments, attention to them with a bias, and small inverses.

use crate::driver::{Arg, Kernel, View};
use crate::prims::{number, sizes};
use crate::{Device, DeviceRef, DeviceWorkspace, Element, Result, programs};
use attlas::Problem;

/// Means of segments of rows.
#[derive(Clone, Debug)]
pub(crate) struct Pool {
    kernel: Kernel,
}

impl Pool {
    pub(crate) fn new(device: &Device, element: Element) -> Result<Self> {
        Ok(Self { kernel: device.kernel(&programs::pool(element), "pool_rows", 0)? })
    }

    /// Computes the means of the first `n` rows of `x` in `count` segments; each head of `x` gives `group` heads.
    pub(crate) fn run(
        &self,
        x: View,
        [batch, heads, n, d]: [usize; 4],
        count: usize,
        group: usize,
        to: View,
        ws: &DeviceWorkspace,
    ) -> Result<()> {
        let int = |x: usize| Arg::Int(x as i32);
        let args = [Arg::View(x), Arg::View(to), int(n), int(count), int(d), int(group)];
        self.kernel.launch(ws.stream(), [count, heads * group, batch], 256, 0, &args)
    }
}

/// Biases of representatives: one number for the first `split`, another for the rest.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Bias {
    pub(crate) split: usize,
    pub(crate) low: f64,
    pub(crate) high: f64,
}

impl Bias {
    /// Computes the logarithms of the lengths of `count` segments of `n` tokens.
    pub(crate) fn lengths(n: usize, count: usize) -> Self {
        let (short, rest) = (n / count, n % count);
        Self { split: count - rest, low: (short as f64).ln(), high: (short as f64 + 1.0).ln() }
    }

    /// Returns true if all `count` biases are equal.
    pub(crate) fn is_constant(&self, count: usize) -> bool {
        self.split >= count
    }
}

/// Rows per block in the attention to representatives.
const ROWS: usize = 4;

/// Attention of all rows to representatives.
#[derive(Clone, Debug)]
pub(crate) struct Weighted {
    kernel: Kernel,
    problem: Problem,
    element: Element,
}

impl Weighted {
    /// With `join`, merges with existing parts, in the type of sums.
    pub(crate) fn new(device: &Device, problem: &Problem, element: Element, join: bool) -> Result<Self> {
        let name = if join { "weighted_rows_join" } else { "weighted_rows" };
        let room = ROWS * problem.d * element.sum().bytes();
        let kernel = device.kernel(&programs::pool(element), name, room)?;
        Ok(Self { kernel, problem: *problem, element })
    }

    #[allow(clippy::too_many_arguments)]
    pub(crate) fn run(
        &self,
        q: View,
        [k, v]: [View; 2],
        count: usize,
        bias: Bias,
        out: View,
        lse: u64,
        ws: &DeviceWorkspace,
    ) -> Result<()> {
        let p = Problem { n_k: count, ..self.problem };
        let args = [
            Arg::View(q),
            Arg::View(k),
            Arg::View(v),
            Arg::View(out),
            Arg::Address(lse),
            Arg::Sizes(sizes(&p)),
            number(self.element, p.scale),
            Arg::Int(bias.split as i32),
            number(self.element, bias.low),
            number(self.element, bias.high),
        ];
        let grid = [p.n_q.div_ceil(ROWS), p.n_heads, p.batch];
        self.kernel.launch(ws.stream(), grid, 32 * ROWS, self.kernel.shared, &args)
    }
}

/// Adds a number to the log-sum-exp of rows.
#[derive(Clone, Debug)]
pub(crate) struct Shift {
    kernel: Kernel,
    element: Element,
}

impl Shift {
    pub(crate) fn new(device: &Device, element: Element) -> Result<Self> {
        Ok(Self { kernel: device.kernel(&programs::pool(element), "shift_lse", 0)?, element })
    }

    pub(crate) fn run(&self, lse: u64, rows: usize, by: f64, ws: &DeviceWorkspace) -> Result<()> {
        let args = [Arg::Address(lse), Arg::Long(rows as i64), number(self.element, by)];
        self.kernel.launch(ws.stream(), [rows.div_ceil(256), 1, 1], 256, 0, &args)
    }
}

/// The small matrices of averaged queries and keys: their softmax, its inverse by an iteration, and its product.
#[derive(Clone, Debug)]
pub(crate) struct Landmarks {
    weights: Kernel,
    invert: Kernel,
    apply: Kernel,
    kind: i32,
    steps: usize,
}

impl Landmarks {
    /// `kind`: the number of the iteration in the kernel.
    pub(crate) fn new(device: &Device, element: Element, kind: i32, steps: usize) -> Result<Self> {
        let program = programs::pool(element);
        Ok(Self {
            weights: device.kernel(&program, "landmark_weights", 0)?,
            invert: device.kernel(&program, "invert", 0)?,
            apply: device.kernel(&program, "apply_inverse", 0)?,
            kind,
            steps,
        })
    }

    /// Returns the scratch memory for `heads` matrices of `m` rows.
    pub(crate) fn workspace_bytes(heads: usize, m: usize) -> usize {
        heads * m * m * 6 * 8
    }

    /// Writes to `out` the m × m inverse of the softmax of the `m` averaged queries and keys, times `u`; `room` has the
    /// bytes of `workspace_bytes`.
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn run(
        &self,
        q: &DeviceRef<'_>,
        k: &DeviceRef<'_>,
        scale: f64,
        bias: Bias,
        u: u64,
        out: View,
        d_v: usize,
        room: u64,
        ws: &DeviceWorkspace,
    ) -> Result<()> {
        let [batch, heads, m, d] = q.dims();
        let int = |x: usize| Arg::Int(x as i32);
        let size = (batch * heads * m * m * 8) as u64;
        let (weights, inverses, more) = (room, room + size, room + 2 * size);
        let args = [
            Arg::View(q.view()),
            Arg::View(k.view()),
            Arg::Address(weights),
            int(heads),
            int(m),
            int(m),
            int(d),
            Arg::Double(scale),
            int(bias.split),
            Arg::Double(bias.low),
            Arg::Double(bias.high),
        ];
        self.weights.launch(ws.stream(), [m.div_ceil(4), heads, batch], 128, 0, &args)?;
        let args = [
            Arg::Address(weights),
            Arg::Address(inverses),
            Arg::Address(more),
            int(m),
            Arg::Int(self.kind),
            int(self.steps),
        ];
        self.invert.launch(ws.stream(), [batch * heads, 1, 1], 1024, 0, &args)?;
        let args = [Arg::Address(inverses), Arg::Address(u), Arg::View(out), int(heads), int(m), int(d_v)];
        self.apply.launch(ws.stream(), [m, heads, batch], 128, 0, &args)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_of_one_length_have_one_bias() {
        assert!(Bias::lengths(12, 4).is_constant(4));
        let cut = Bias::lengths(14, 4);
        assert_eq!((cut.split, cut.low, cut.high), (2, 3f64.ln(), 4f64.ln()));
        assert!(!cut.is_constant(4));
    }
}
