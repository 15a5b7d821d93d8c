//! A stable sort of rows by integer keys, segment by segment.

use crate::driver::{Arg, Kernel};
use crate::workspace::padded;
use crate::{Device, DeviceBuffer, DeviceWorkspace, Result, programs};

/// Rows of a chunk.
pub(crate) const CHUNK: usize = 2048;
const BINS: usize = 256;

/// Rows `first .. first + rows`, sorted separately; their places follow those of the previous segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    pub(crate) first: usize,
    pub(crate) rows: usize,
}

/// A sort of the same segments of every head.
#[derive(Debug)]
pub(crate) struct Sort {
    count: Kernel,
    scan: Kernel,
    scatter: Kernel,
    chunks: DeviceBuffer,
    firsts: DeviceBuffer,
    num_chunks: usize,
    segments: usize,
    heads: usize,
    n: usize,
    total: usize,
    passes: usize,
}

/// Cuts segments into chunks for kernels; also returns the first chunk of each segment.
fn cut(segments: &[Segment]) -> (Vec<[usize; 4]>, Vec<usize>, usize) {
    let (mut chunks, mut firsts, mut place) = (Vec::new(), vec![0], 0);
    for (s, segment) in segments.iter().enumerate() {
        for start in (0..segment.rows).step_by(CHUNK) {
            let end = (start + CHUNK).min(segment.rows);
            chunks.push([s, place + start, place + end, segment.first + start]);
        }
        place += segment.rows;
        firsts.push(chunks.len());
    }
    (chunks, firsts, place)
}

impl Sort {
    /// Plans the sort of segments of `heads` heads of `n` rows by keys below `limit`.
    pub(crate) fn new(
        device: &Device,
        heads: usize,
        n: usize,
        segments: &[Segment],
        limit: usize,
    ) -> Result<Self> {
        let program = programs::sort();
        let (chunks, firsts, total) = cut(segments);
        let ints = |x: &[usize]| x.iter().map(|&x| x as u32).collect::<Vec<u32>>();
        let flat: Vec<usize> = chunks.iter().flatten().copied().collect();
        let bits = usize::BITS - limit.saturating_sub(1).leading_zeros();
        Ok(Self {
            count: device.kernel(&program, "sort_count", 0)?,
            scan: device.kernel(&program, "sort_scan", 0)?,
            scatter: device.kernel(&program, "sort_scatter", 0)?,
            num_chunks: chunks.len(),
            chunks: DeviceBuffer::from_ints(device, &ints(&flat))?,
            firsts: DeviceBuffer::from_ints(device, &ints(&firsts))?,
            segments: segments.len(),
            heads,
            n,
            total,
            passes: (bits as usize).div_ceil(8).max(1),
        })
    }

    /// Returns the address and number of the chunks.
    pub(crate) fn chunks(&self) -> (u64, usize) {
        (self.chunks.address(), self.num_chunks)
    }

    pub(crate) fn workspace_bytes(&self) -> usize {
        let again = if self.passes > 1 { padded(self.heads * self.total * 4) } else { 0 };
        padded(self.heads * self.num_chunks * BINS * 4) + again
    }

    /// Writes the sorted rows to `order`, and their keys in that order to `sorted_keys` if it is not 0.
    pub(crate) fn run(
        &self,
        keys: u64,
        order: u64,
        sorted_keys: u64,
        ws: &mut DeviceWorkspace,
    ) -> Result<()> {
        let mark = ws.mark();
        let counts = Arg::Address(ws.take(self.heads * self.num_chunks * BINS * 4)?);
        let other = if self.passes > 1 { ws.take(self.heads * self.total * 4)? } else { 0 };
        let (chunks, int) = (Arg::Address(self.chunks.address()), |x: usize| Arg::Int(x as i32));
        let (keys, grid) = (Arg::Address(keys), [self.num_chunks, self.heads, 1]);
        let mut from = 0;
        for pass in 0..self.passes {
            let last = pass + 1 == self.passes;
            let to = if (self.passes - 1 - pass).is_multiple_of(2) { order } else { other };
            let (n, total, shift) = (int(self.n), int(self.total), int(8 * pass));
            let source = Arg::Address(from);
            self.count.launch(ws.stream(), grid, 256, 0, &[keys, source, counts, chunks, n, total, shift])?;
            let firsts = Arg::Address(self.firsts.address());
            let scan = [counts, chunks, firsts, int(self.num_chunks)];
            self.scan.launch(ws.stream(), [self.segments, self.heads, 1], 1024, 0, &scan)?;
            let sorted = Arg::Address(if last { sorted_keys } else { 0 });
            let scatter = [keys, source, counts, Arg::Address(to), sorted, chunks, n, total, shift];
            self.scatter.launch(ws.stream(), grid, 256, 0, &scatter)?;
            from = to;
        }
        ws.rewind(mark);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_are_cut_into_chunks_in_order() {
        let segments =
            [Segment { first: 10, rows: 5000 }, Segment { first: 0, rows: 0 }, Segment { first: 7, rows: 3 }];
        let (chunks, firsts, total) = cut(&segments);
        assert_eq!(
            chunks,
            [[0, 0, 2048, 10], [0, 2048, 4096, 2058], [0, 4096, 5000, 4106], [2, 5000, 5003, 7]]
        );
        assert_eq!((firsts, total), (vec![0, 3, 3, 4], 5003));
    }
}
