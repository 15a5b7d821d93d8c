//! Tensors whose tokens are divided among several processes.

use crate::{Element, Layout, Transport};
use attlas::{Result, TensorRef};

/// One process's part of a `[batch, heads, tokens, columns]` tensor: the rows of its pieces, one after another.
#[derive(Clone, Debug)]
pub struct Sharded<T> {
    data: Vec<T>,
    batch: usize,
    heads: usize,
    cols: usize,
    layout: Layout,
    rank: usize,
}

impl<T: Element> Sharded<T> {
    /// Creates the part from this process's rows, contiguous `[batch, heads, rows, columns]`.
    pub fn new(data: Vec<T>, [batch, heads, cols]: [usize; 3], layout: Layout, rank: usize) -> Result<Self> {
        TensorRef::bhnd(&data, [batch, heads, layout.rows(rank), cols])?;
        Ok(Self { data, batch, heads, cols, layout, rank })
    }

    /// Cuts this process's part from a whole tensor.
    pub fn cut(whole: TensorRef<'_, T>, layout: Layout, rank: usize) -> Result<Self> {
        let [batch, heads, _, cols] = whole.dims();
        Self::new(part(whole, layout, rank), [batch, heads, cols], layout, rank)
    }

    /// Creates the part from this process's rows in any memory layout.
    pub fn of_rows(rows: TensorRef<'_, T>, layout: Layout, rank: usize) -> Result<Self> {
        let [batch, heads, n, cols] = rows.dims();
        Self::new(part(rows, Layout::contiguous(n, 1), 0), [batch, heads, cols], layout, rank)
    }

    /// Scatters a tensor of process `root`; the others give its sizes, and each gets its part.
    pub fn scatter(
        t: &dyn Transport,
        root: usize,
        whole: Option<TensorRef<'_, T>>,
        [batch, heads, cols]: [usize; 3],
        layout: Layout,
    ) -> Result<Self> {
        let rank = t.rank();
        let own = match whole.filter(|_| rank == root) {
            Some(whole) => {
                for other in (0..t.size()).filter(|&r| r != root) {
                    t.send(other, bytemuck::cast_slice(&part(whole, layout, other)));
                }
                part(whole, layout, rank)
            }
            None => {
                let mut own = vec![T::ZERO; batch * heads * layout.rows(rank) * cols];
                t.receive(root, bytemuck::cast_slice_mut(&mut own));
                own
            }
        };
        Self::new(own, [batch, heads, cols], layout, rank)
    }

    /// Gathers the whole tensor, contiguous `[batch, heads, tokens, columns]`, on every process.
    pub fn gather(&self, t: &dyn Transport) -> Vec<T> {
        let all = t.gather_all(bytemuck::cast_slice(&self.data));
        let (n, cols) = (self.layout.len(), self.cols);
        let mut whole = vec![T::ZERO; self.batch * self.heads * n * cols];
        for (rank, bytes) in all.iter().enumerate() {
            let rows = self.layout.rows(rank);
            let mut data = vec![T::ZERO; self.batch * self.heads * rows * cols];
            bytemuck::cast_slice_mut(&mut data).copy_from_slice(bytes);
            for head in 0..self.batch * self.heads {
                let mut at = head * rows * cols;
                for piece in self.layout.pieces(rank) {
                    let to = (head * n + piece.start) * cols;
                    whole[to..to + piece.len() * cols].copy_from_slice(&data[at..at + piece.len() * cols]);
                    at += piece.len() * cols;
                }
            }
        }
        whole
    }

    /// The rows of this process.
    pub fn local(&self) -> Result<TensorRef<'_, T>> {
        TensorRef::bhnd(&self.data, [self.batch, self.heads, self.layout.rows(self.rank), self.cols])
    }

    /// Returns the layout.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Returns batch, heads, total tokens and columns.
    pub fn dims(&self) -> [usize; 4] {
        [self.batch, self.heads, self.layout.len(), self.cols]
    }

    /// Returns the elements on this process.
    pub fn data(&self) -> &[T] {
        &self.data
    }
}

fn part<T: Element>(whole: TensorRef<'_, T>, layout: Layout, rank: usize) -> Vec<T> {
    let [batch, heads, _, cols] = whole.dims();
    let mut data = Vec::with_capacity(batch * heads * layout.rows(rank) * cols);
    for (b, h) in (0..batch).flat_map(|b| (0..heads).map(move |h| (b, h))) {
        let head = whole.head(b, h);
        for piece in layout.pieces(rank) {
            piece.for_each(|i| data.extend_from_slice(head.row(i)));
        }
    }
    data
}
