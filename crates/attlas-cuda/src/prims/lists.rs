//! Sorted queries against blocks of sorted keys and samples of the rest.

use crate::driver::{Arg, Kernel, View};
use crate::prims::sort::{Segment, Sort};
use crate::prims::{aligned, number, sizes, view_aligned};
use crate::workspace::padded;
use crate::{Device, DeviceBuffer, DeviceRef, DeviceWorkspace, Element, KernelFamily, Result, programs};
use attlas::Problem;
use attlas_num::cluster::buckets::Balanced;
use std::ops::Range;

/// Assignment of queries to blocks of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Assign {
    /// Sorted queries are cut into the same number of blocks as the keys.
    Balanced,
    /// By their own rank among the keys.
    Alone,
}

/// An unmasked part, and the ranks drawn for each group of heads, group by group.
#[derive(Clone, Debug)]
pub(crate) struct CausalPart {
    pub(crate) rows: Range<usize>,
    pub(crate) keys: Range<usize>,
    pub(crate) samples: Vec<u32>,
}

/// Values shared by all parts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ListOptions {
    pub(crate) block: usize,
    /// Samples of each part and group.
    pub(crate) samples: usize,
    pub(crate) replacement: bool,
    /// Upper limit of codes.
    pub(crate) codes: usize,
    pub(crate) assign: Assign,
    pub(crate) join: bool,
}

/// Parts that share no row, run together.
#[derive(Debug)]
pub(crate) struct Lists {
    problem: Problem,
    element: Element,
    options: ListOptions,
    any: Kernel,
    fast: Option<Kernel>,
    assign: Kernel,
    starts: Kernel,
    sort_keys: Sort,
    sort_queries: Sort,
    parts: DeviceBuffer,
    blocks: DeviceBuffer,
    samples: DeviceBuffer,
    /// Offsets of the blocks of balanced queries.
    balanced: Option<DeviceBuffer>,
    count: usize,
    rows: usize,
    keys: usize,
    pairs: u64,
}

/// Most keys of a block and most samples for the Hopper kernel.
const FAST_NEAR: usize = 512;
const FAST_FAR: usize = 256;

/// Makes the tables of parts and blocks for kernels.
fn tables(parts: &[CausalPart], block: usize) -> (Vec<[usize; 7]>, Vec<[usize; 6]>) {
    let (mut table, mut blocks, mut row_place, mut key_place) = (Vec::new(), Vec::new(), 0, 0);
    for (index, part) in parts.iter().enumerate() {
        let (rows, keys) = (part.rows.len(), part.keys.len());
        let cut = Balanced::with_target(keys, block);
        table.push([part.rows.start, rows, row_place, key_place, keys, blocks.len(), cut.blocks()]);
        blocks.extend(cut.iter().map(|r| [key_place + r.start, r.len(), r.start, keys, index, parts.len()]));
        row_place += rows;
        key_place += keys;
    }
    (table, blocks)
}

impl Lists {
    pub(crate) fn new(
        device: &Device,
        problem: &Problem,
        element: Element,
        parts: &[CausalPart],
        options: ListOptions,
    ) -> Result<Self> {
        let p = problem;
        let (table, blocks) = tables(parts, options.block);
        let segments = |range: fn(&CausalPart) -> &Range<usize>| -> Vec<Segment> {
            parts.iter().map(|x| Segment { first: range(x).start, rows: range(x).len() }).collect()
        };
        let most_blocks = table.iter().map(|t| t[6]).max().unwrap_or(1);
        let near = blocks.iter().map(|b| b[1]).max().unwrap_or(0);
        let (heads, kv_heads) = (p.batch * p.n_heads, p.batch * p.n_kv_heads);
        let limit = if options.assign == Assign::Alone { most_blocks } else { options.codes };
        let groups = kv_heads;
        let mut samples = Vec::with_capacity(groups * parts.len() * options.samples);
        for g in 0..groups {
            for part in parts {
                samples.extend_from_slice(&part.samples[g * options.samples..(g + 1) * options.samples]);
            }
        }
        let balanced = match options.assign {
            Assign::Balanced => {
                let cut = Balanced::new(p.n_q, blocks.len());
                let one: Vec<u32> =
                    (0..blocks.len()).map(|c| cut.range(c).start as u32).chain([p.n_q as u32]).collect();
                Some(DeviceBuffer::from_ints(device, &one.repeat(heads))?)
            }
            Assign::Alone => None,
        };
        let name = if options.join { "any_lists_join" } else { "any_lists" };
        let quick = device.info().family_for(element, p.d, p.d_v) == KernelFamily::Wgmma
            && p.d <= 128
            && near <= FAST_NEAR
            && options.samples <= FAST_FAR
            && p.scale > 0.0;
        let fast = if quick {
            let program = programs::lists(element, p.d, near, options.samples, options.join);
            Some(device.kernel(&program, "lists", 2 * p.d * (128 + 2 * 4 * 64) + 1024)?)
        } else {
            None
        };
        let ints = |x: Vec<usize>| x.into_iter().map(|x| x as u32).collect::<Vec<u32>>();
        let pairs = parts.iter().map(|x| x.rows.len() as u64).sum::<u64>() * (near + options.samples) as u64;
        Ok(Self {
            problem: *p,
            element,
            options,
            any: device.kernel(&programs::any(element), name, 8 * p.d * element.sum().bytes())?,
            fast,
            assign: device.kernel(&programs::sort(), "assign_blocks", 0)?,
            starts: device.kernel(&programs::sort(), "block_starts", 0)?,
            sort_keys: Sort::new(device, kv_heads, p.n_k, &segments(|x| &x.keys), options.codes)?,
            sort_queries: Sort::new(device, heads, p.n_q, &segments(|x| &x.rows), limit)?,
            count: blocks.len(),
            parts: DeviceBuffer::from_ints(device, &ints(table.into_iter().flatten().collect()))?,
            blocks: DeviceBuffer::from_ints(device, &ints(blocks.into_iter().flatten().collect()))?,
            samples: DeviceBuffer::from_ints(device, &samples)?,
            balanced,
            rows: parts.iter().map(|x| x.rows.len()).sum(),
            keys: parts.iter().map(|x| x.keys.len()).sum(),
            pairs: pairs * heads as u64,
        })
    }

    /// Returns the number of pairs whose score is computed.
    pub(crate) fn pairs(&self) -> u64 {
        self.pairs
    }

    pub(crate) fn workspace_bytes(&self) -> usize {
        let p = &self.problem;
        let (heads, kv_heads) = (p.batch * p.n_heads, p.batch * p.n_kv_heads);
        let alone = match self.options.assign {
            Assign::Balanced => 0,
            Assign::Alone => {
                padded(kv_heads * self.keys * 4)
                    + padded(heads * p.n_q * 4)
                    + padded(heads * self.rows * 4)
                    + padded(heads * (self.count + 1) * 4)
            }
        };
        padded(kv_heads * self.keys * 4)
            + padded(heads * self.rows * 4)
            + alone
            + self.sort_keys.workspace_bytes().max(self.sort_queries.workspace_bytes())
    }

    /// Sorts and attends. `query_ranks` and `key_ranks` are those of all rows of all heads.
    pub(crate) fn run(
        &self,
        [q, k, v]: [&DeviceRef<'_>; 3],
        [query_ranks, key_ranks]: [u64; 2],
        out: View,
        lse: u64,
        ws: &mut DeviceWorkspace,
    ) -> Result<()> {
        let (p, mark) = (&self.problem, ws.mark());
        let (heads, kv_heads) = (p.batch * p.n_heads, p.batch * p.n_kv_heads);
        let int = |x: usize| Arg::Int(x as i32);
        let kidx = ws.take(kv_heads * self.keys * 4)?;
        let qidx = ws.take(heads * self.rows * 4)?;
        let starts = match &self.balanced {
            Some(table) => {
                self.sort_keys.run(key_ranks, kidx, 0, ws)?;
                self.sort_queries.run(query_ranks, qidx, 0, ws)?;
                table.address()
            }
            None => {
                let sorted_ranks = ws.take(kv_heads * self.keys * 4)?;
                let block_of = ws.take(heads * p.n_q * 4)?;
                let sorted_blocks = ws.take(heads * self.rows * 4)?;
                let starts = ws.take(heads * (self.count + 1) * 4)?;
                self.sort_keys.run(key_ranks, kidx, sorted_ranks, ws)?;
                let (chunks, num_chunks) = self.sort_queries.chunks();
                let args = [
                    Arg::Address(query_ranks),
                    Arg::Address(sorted_ranks),
                    Arg::Address(block_of),
                    Arg::Address(chunks),
                    Arg::Address(self.parts.address()),
                    int(p.n_q),
                    int(self.keys),
                    int(p.n_heads),
                    int(p.group_size()),
                ];
                self.assign.launch(ws.stream(), [num_chunks, heads, 1], 256, 0, &args)?;
                self.sort_queries.run(block_of, qidx, sorted_blocks, ws)?;
                let args = [
                    Arg::Address(sorted_blocks),
                    Arg::Address(starts),
                    Arg::Address(self.blocks.address()),
                    Arg::Address(self.parts.address()),
                    int(self.count),
                    int(self.rows),
                ];
                self.starts.launch(ws.stream(), [(self.count + 1).div_ceil(256), heads, 1], 256, 0, &args)?;
                starts
            }
        };
        let quick = aligned(&[q, k, v])
            && k.strides()[2] == v.strides()[2]
            && (self.options.join || view_aligned(&out));
        let fast = self.fast.as_ref().filter(|_| quick);
        let scale = match fast {
            Some(_) => Arg::Float((p.scale * std::f64::consts::LOG2_E) as f32),
            None => number(self.element, p.scale),
        };
        let args = [
            Arg::View(q.view()),
            Arg::View(k.view()),
            Arg::View(v.view()),
            Arg::View(out),
            Arg::Address(lse),
            Arg::Address(qidx),
            Arg::Address(starts),
            Arg::Address(kidx),
            Arg::Address(self.blocks.address()),
            Arg::Address(self.samples.address()),
            Arg::Sizes(sizes(p)),
            int(self.rows),
            int(self.keys),
            int(self.count),
            int(self.options.samples),
            Arg::Int(i32::from(self.options.replacement)),
            scale,
        ];
        match fast {
            Some(kernel) => {
                let grid = [self.rows / 128 + self.count, p.n_heads, p.batch];
                kernel.launch(ws.stream(), grid, 256, kernel.shared, &args)?;
            }
            None => {
                self.any.launch(
                    ws.stream(),
                    [self.rows.div_ceil(8), p.n_heads, p.batch],
                    256,
                    self.any.shared,
                    &args,
                )?;
            }
        }
        ws.rewind(mark);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_count_places_and_blocks_over_parts() {
        let part = |rows, keys| CausalPart { rows, keys, samples: Vec::new() };
        let (parts, blocks) = tables(&[part(10..20, 0..7), part(30..33, 20..30)], 4);
        assert_eq!(parts, [[10, 10, 0, 0, 7, 0, 2], [30, 3, 10, 7, 10, 2, 3]]);
        assert_eq!(blocks[1], [3, 4, 3, 7, 0, 2]);
        assert_eq!(blocks[4], [13, 4, 6, 10, 1, 2]);
        let covered: usize = blocks.iter().map(|b| b[1]).sum();
        assert_eq!(covered, 17);
    }
}
