//! Operations on rows: merging of parts in the type of sums, copies of keys and values.

use crate::driver::{Arg, Kernel, Memory, Stream, View};
use crate::prims::{contiguous, sizes};
use crate::workspace::padded;
use crate::{Device, DeviceRef, DeviceWorkspace, Element, Result, programs};
use attlas::Problem;
use std::sync::Arc;

/// Rows into which parts are merged: outputs and log-sum-exp in the type of sums.
#[derive(Clone, Debug)]
pub(crate) struct Joined {
    clear: Kernel,
    finish: Kernel,
    problem: Problem,
    element: Element,
}

/// Addresses of the merged rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows {
    pub(crate) o: View,
    pub(crate) lse: u64,
}

impl Joined {
    pub(crate) fn new(device: &Device, problem: &Problem, element: Element) -> Result<Self> {
        let any = programs::any(element);
        Ok(Self {
            clear: device.kernel(&any, "clear_rows", 0)?,
            finish: device.kernel(&any, "finish_rows", 0)?,
            problem: *problem,
            element,
        })
    }

    fn rows(&self) -> usize {
        self.problem.batch * self.problem.n_heads * self.problem.n_q
    }

    pub(crate) fn workspace_bytes(&self) -> usize {
        let size = self.element.sum().bytes();
        padded(self.rows() * self.problem.d_v * size) + padded(self.rows() * size)
    }

    /// Starts rows without a part, cleared if the first part does not write all of them. Uses the caller's log-sum-exp
    /// if there is one.
    pub(crate) fn start(&self, lse: u64, clear: bool, ws: &mut DeviceWorkspace) -> Result<Rows> {
        let (p, size) = (&self.problem, self.element.sum().bytes());
        let o = ws.take(self.rows() * p.d_v * size)?;
        let own = ws.take(self.rows() * size)?;
        let lse = if lse == 0 { own } else { lse };
        if clear {
            let args =
                [Arg::Address(o), Arg::Address(lse), Arg::Long(self.rows() as i64), Arg::Int(p.d_v as i32)];
            self.clear.launch(ws.stream(), [(self.rows() * p.d_v).div_ceil(256), 1, 1], 256, 0, &args)?;
        }
        Ok(Rows { o: contiguous(o, p.n_heads, p.n_q, p.d_v), lse })
    }

    /// Writes the rows as elements.
    pub(crate) fn finish(&self, rows: Rows, out: &DeviceRef<'_>, ws: &DeviceWorkspace) -> Result<()> {
        let p = &self.problem;
        let args = [Arg::Address(rows.o.address), Arg::View(out.view()), Arg::Sizes(sizes(p))];
        let pieces = if p.d_v.is_multiple_of(4) { p.d_v / 4 } else { p.d_v };
        self.finish.launch(ws.stream(), [(p.n_q * pieces).div_ceil(256), p.n_heads, p.batch], 256, 0, &args)
    }
}

/// Copies of rows.
#[derive(Clone, Debug)]
pub(crate) struct Copy {
    kernel: Kernel,
}

/// Destination of copied rows.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Places {
    /// Slot of the first row.
    pub(crate) at: usize,
    /// Length of the ring of slots after the first `fixed`; 0 for none.
    pub(crate) ring: usize,
    pub(crate) fixed: usize,
}

impl Copy {
    pub(crate) fn new(device: &Device, element: Element) -> Result<Self> {
        Ok(Self { kernel: device.kernel(&programs::any(element), "copy_rows", 0)? })
    }

    /// Copies rows of every head: those named by `order` (an address), or all in order if it is 0.
    pub(crate) fn run(
        &self,
        from: &DeviceRef<'_>,
        to: View,
        order: u64,
        places: Places,
        ws: &DeviceWorkspace,
    ) -> Result<()> {
        let [batch, heads, rows, columns] = from.dims();
        let int = |x: usize| Arg::Int(x as i32);
        let args = [
            Arg::View(from.view()),
            Arg::View(to),
            Arg::Address(order),
            int(rows),
            int(columns),
            int(places.at),
            int(places.fixed),
            int(places.ring),
        ];
        self.kernel.launch(ws.stream(), [(rows * columns).div_ceil(256), heads, batch], 256, 0, &args)
    }
}

/// Negation of every element of rows.
#[derive(Clone, Debug)]
pub(crate) struct Negate {
    kernel: Kernel,
}

impl Negate {
    pub(crate) fn new(device: &Device, element: Element) -> Result<Self> {
        Ok(Self { kernel: device.kernel(&programs::any(element), "negate_rows", 0)? })
    }

    pub(crate) fn run(&self, from: &DeviceRef<'_>, to: View, ws: &DeviceWorkspace) -> Result<()> {
        let [batch, heads, rows, columns] = from.dims();
        let int = |x: usize| Arg::Int(x as i32);
        let args = [Arg::View(from.view()), Arg::View(to), int(rows), int(columns)];
        self.kernel.launch(ws.stream(), [(rows * columns).div_ceil(256), heads, batch], 256, 0, &args)
    }
}

/// Keys or values of a stream: `[batch, heads, capacity, columns]`, grown by doubling.
#[derive(Debug)]
pub(crate) struct GrowingRows {
    device: Device,
    element: Element,
    batch: usize,
    heads: usize,
    columns: usize,
    capacity: usize,
    memory: Arc<Memory>,
}

impl GrowingRows {
    pub(crate) fn new(
        device: &Device,
        element: Element,
        [batch, heads, capacity, columns]: [usize; 4],
    ) -> Result<Self> {
        let capacity = capacity.max(1);
        let bytes = batch * heads * capacity * columns * element.bytes();
        let memory = Arc::new(Memory::new(device.context(), bytes)?);
        Ok(Self { device: device.clone(), element, batch, heads, columns, capacity, memory })
    }

    pub(crate) fn view(&self) -> View {
        contiguous(self.memory.address(), self.heads, self.capacity, self.columns)
    }

    pub(crate) fn columns(&self) -> usize {
        self.columns
    }

    pub(crate) fn bytes(&self) -> usize {
        self.memory.bytes()
    }

    /// Reserves room for `rows` rows and keeps the existing ones.
    pub(crate) fn reserve(&mut self, rows: usize, stream: &Stream) -> Result<()> {
        if rows <= self.capacity {
            return Ok(());
        }
        let dims = [self.batch, self.heads, rows.max(2 * self.capacity), self.columns];
        let larger = Self::new(&self.device, self.element, dims)?;
        // Head by head, because their offsets change.
        let size = self.element.bytes() as u64;
        for head in 0..self.batch * self.heads {
            let from = head as u64 * (self.capacity * self.columns) as u64 * size;
            let to = head as u64 * (larger.capacity * self.columns) as u64 * size;
            let bytes = self.capacity * self.columns * size as usize;
            larger.memory.copy_range(&self.memory, from, to, bytes, stream)?;
        }
        stream.synchronize()?;
        *self = larger;
        Ok(())
    }
}
