//! Exact attention: dense, banded, or over tiles of a table.

use crate::driver::{Arg, Kernel, TensorMap, View};
use crate::prims::{aligned, number, sizes};
use crate::programs::{self, Mode, Wgmma, Write};
use crate::{Device, DeviceBuffer, DeviceRef, DeviceWorkspace, Element, KernelFamily, Result};
use attlas::{Mask, Problem};
use std::ops::Range;

/// A window wider than any sequence.
const NO_WINDOW: i32 = 1 << 30;

/// Rows with their keys: all of `keys`, or with a causal rule those up to row + `offset`.
#[derive(Clone, Debug)]
pub(crate) struct Area {
    pub(crate) rows: Range<usize>,
    pub(crate) keys: Range<usize>,
    pub(crate) offset: isize,
}

/// Keys visible to the rows, and the form of the output.
#[derive(Clone, Debug, Default)]
pub(crate) struct Rule {
    pub(crate) causal: bool,
    pub(crate) window: Option<usize>,
    pub(crate) sinks: usize,
    /// Form in which rows are written.
    pub(crate) write: Write,
    /// Rows and keys by areas instead of all.
    pub(crate) areas: Option<Vec<Area>>,
}

impl Rule {
    pub(crate) fn of(mask: Mask) -> Self {
        Self { causal: mask == Mask::Causal, ..Self::default() }
    }
}

/// Exact attention of a problem.
#[derive(Debug)]
pub(crate) struct Attend {
    problem: Problem,
    element: Element,
    rule: Rule,
    any: Kernel,
    warps: usize,
    fast: Option<Fast>,
    table: Option<(DeviceBuffer, usize)>,
}

#[derive(Debug)]
enum Fast {
    Wgmma(Kernel, Wgmma),
    Mma(Kernel),
}

/// Rows of a block of the `mma` kernel.
const MMA_ROWS: usize = 128;

impl Attend {
    /// Uses only the portable kernel.
    pub(crate) fn plain(device: &Device, problem: &Problem, element: Element, rule: Rule) -> Result<Self> {
        Self::with_fast(device, problem, element, rule, false)
    }

    pub(crate) fn new(device: &Device, problem: &Problem, element: Element, rule: Rule) -> Result<Self> {
        Self::with_fast(device, problem, element, rule, true)
    }

    /// Sets another number of keys; only for forms without areas.
    pub(crate) fn set_keys(&mut self, n_k: usize) {
        self.problem.n_k = n_k;
    }

    fn with_fast(
        device: &Device,
        problem: &Problem,
        element: Element,
        rule: Rule,
        fast: bool,
    ) -> Result<Self> {
        let name = match rule.write {
            Write::Direct => "any_attend",
            Write::Join => "any_attend_join",
            Write::First => "any_attend_first",
        };
        let warps = (40960 / (problem.d * element.sum().bytes())).clamp(1, 8);
        let any = device.kernel(&programs::any(element), name, warps * problem.d * element.sum().bytes())?;
        let mode = Mode {
            causal: rule.causal,
            window: rule.window.is_some(),
            table: rule.areas.is_some(),
            write: rule.write,
        };
        let positive = fast && problem.scale > 0.0;
        let fast = match device.info().family_for(element, problem.d, problem.d_v) {
            KernelFamily::Wgmma if positive => {
                let shape = Wgmma::new(problem.d, mode.masked(), problem.n_k);
                let program = programs::attend_wgmma(element, shape, mode);
                Some(Fast::Wgmma(device.kernel(&program, "attend", shape.shared())?, shape))
            }
            KernelFamily::Mma if positive && !mode.window && !mode.table && mode.write == Write::Direct => {
                let shared = 2 * problem.d * (MMA_ROWS + 4 * 64);
                let program = programs::attend_mma(element, problem.d, rule.causal);
                Some(Fast::Mma(device.kernel(&program, "attend", shared)?))
            }
            _ => None,
        };
        let rows = match &fast {
            Some(Fast::Wgmma(_, shape)) => shape.rows(),
            _ => 64,
        };
        let table = match &rule.areas {
            Some(areas) => {
                let tiles: Vec<u32> = areas.iter().flat_map(|a| tiles(a, rows)).flatten().collect();
                Some((DeviceBuffer::from_ints(device, &tiles)?, tiles.len() / 5))
            }
            None => None,
        };
        Ok(Self { problem: *problem, element, rule, any, warps, fast, table })
    }

    /// Puts the work on the stream. `out` has elements, or sums if parts are merged; `lse` is 0 for none.
    pub(crate) fn run(
        &self,
        q: &DeviceRef<'_>,
        k: &DeviceRef<'_>,
        v: &DeviceRef<'_>,
        out: View,
        lse: u64,
        ws: &DeviceWorkspace,
    ) -> Result<()> {
        let p = &self.problem;
        if p.n_q == 0 || p.batch == 0 {
            return Ok(());
        }
        let window = Arg::Int(self.rule.window.map_or(NO_WINDOW, |w| w.min(NO_WINDOW as usize) as i32));
        let sinks = Arg::Int(self.rule.sinks.min(p.n_k) as i32);
        let table = Arg::Address(self.table.as_ref().map_or(0, |(t, _)| t.address()));
        let tiles = |rows: usize| self.table.as_ref().map_or(p.n_q.div_ceil(rows), |(_, n)| *n);
        let sl2 = Arg::Float((p.scale * std::f64::consts::LOG2_E) as f32);
        let writable = out.address.is_multiple_of(8) && out.strides.iter().all(|s| s % 2 == 0);
        match &self.fast {
            Some(Fast::Wgmma(kernel, shape)) if p.n_k > 0 && writable && aligned(&[q, k, v]) => {
                let map = |t: &DeviceRef<'_>, rows: usize| {
                    let ([b, h, n, c], s) = (t.dims(), t.strides());
                    let dims = [c, n, h, b].map(|x| x as u64);
                    // Strides of axes of length 1 are arbitrary, but the engine rejects 0.
                    let stride =
                        |a: usize, n: usize| if n > 1 { s[a] as u64 } else { (s[a] as u64).max(c as u64) };
                    let strides = [stride(2, n), stride(1, h), stride(0, b)];
                    TensorMap::new(self.element == Element::F16, t.view().address, dims, strides, rows as u32)
                };
                let (mq, mk, mv) = (map(q, shape.rows())?, map(k, shape.keys)?, map(v, shape.keys)?);
                let args = [
                    Arg::Map(&mq),
                    Arg::Map(&mk),
                    Arg::Map(&mv),
                    Arg::View(out),
                    Arg::Address(lse),
                    table,
                    Arg::Sizes(sizes(p)),
                    window,
                    sinks,
                    sl2,
                ];
                let grid = [tiles(shape.rows()), p.n_heads, p.batch];
                kernel.launch(ws.stream(), grid, shape.threads(), shape.shared(), &args)
            }
            Some(Fast::Mma(kernel)) if p.n_k > 0 && writable && aligned(&[q, k, v]) => {
                let args = [
                    Arg::View(q.view()),
                    Arg::View(k.view()),
                    Arg::View(v.view()),
                    Arg::View(out),
                    Arg::Address(lse),
                    Arg::Sizes(sizes(p)),
                    sl2,
                ];
                kernel.launch(ws.stream(), [tiles(MMA_ROWS), p.n_heads, p.batch], 256, kernel.shared, &args)
            }
            _ => {
                let args = [
                    Arg::View(q.view()),
                    Arg::View(k.view()),
                    Arg::View(v.view()),
                    Arg::View(out),
                    Arg::Address(lse),
                    table,
                    Arg::Sizes(sizes(p)),
                    Arg::Int(i32::from(self.rule.causal)),
                    window,
                    sinks,
                    number(self.element, p.scale),
                ];
                self.any.launch(
                    ws.stream(),
                    [tiles(self.warps), p.n_heads, p.batch],
                    32 * self.warps,
                    self.any.shared,
                    &args,
                )
            }
        }
    }
}

/// Cuts an area into tiles of `rows` rows, in the form for kernels.
fn tiles(area: &Area, rows: usize) -> impl Iterator<Item = [u32; 5]> {
    let Area { rows: range, keys, offset } = area.clone();
    range.clone().step_by(rows).map(move |first| {
        let end = (first + rows).min(range.end);
        [first as i32, end as i32, keys.start as i32, keys.end as i32, offset as i32].map(|x| x as u32)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_cover_their_area_once() {
        let area = Area { rows: 3..200, keys: 5..9, offset: -2 };
        let got: Vec<[u32; 5]> = tiles(&area, 64).collect();
        assert_eq!(got.len(), 4);
        assert_eq!(got[0], [3, 67, 5, 9, (-2i32) as u32]);
        assert_eq!(got[3], [195, 200, 5, 9, (-2i32) as u32]);
        assert!(got.windows(2).all(|w| w[0][1] == w[1][0]));
    }
}
