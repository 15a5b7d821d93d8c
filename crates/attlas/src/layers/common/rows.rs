//! Rows of every head, appended token by token: the storage of most caches.

use crate::layer::LayerCache;
use attlas_num::MatRef;

/// One growing matrix per head; a head's tokens are contiguous.
#[derive(Clone, Debug)]
pub(crate) struct HeadRows {
    heads: Vec<Vec<f32>>,
    width: usize,
}

impl HeadRows {
    pub(crate) fn new(heads: usize, width: usize) -> Self {
        Self { heads: vec![Vec::new(); heads], width }
    }

    /// Tokens cached.
    pub(crate) fn len(&self) -> usize {
        self.heads.first().map_or(0, |h| h.len() / self.width.max(1))
    }

    /// Appends `[tokens, heads, width]`.
    pub(crate) fn append(&mut self, x: &[f32]) {
        let (n, w) = (self.heads.len(), self.width);
        for token in x.chunks_exact((n * w).max(1)) {
            self.heads.iter_mut().zip(token.chunks_exact(w)).for_each(|(h, row)| h.extend_from_slice(row));
        }
    }

    /// Appends rows of one head.
    pub(crate) fn append_to(&mut self, head: usize, rows: &[f32]) {
        self.heads[head].extend_from_slice(rows);
    }

    pub(crate) fn truncate(&mut self, len: usize) {
        self.heads.iter_mut().for_each(|h| h.truncate(len.saturating_mul(self.width)));
    }

    /// Forgets the first `n` tokens.
    pub(crate) fn drop_front(&mut self, n: usize) {
        self.heads.iter_mut().for_each(|h| drop(h.drain(..n * self.width)));
    }

    pub(crate) fn bytes(&self) -> usize {
        self.heads.iter().map(|h| 4 * h.len()).sum()
    }

    /// The numbers of one head.
    pub(crate) fn data(&self, head: usize) -> &[f32] {
        &self.heads[head]
    }

    /// The rows of one head.
    pub(crate) fn head(&self, head: usize) -> MatRef<'_, f32> {
        MatRef::new(&self.heads[head], self.len(), self.width)
    }

    pub(crate) fn width(&self) -> usize {
        self.width
    }
}

/// Keys and values of several attentions over the same tokens, such as one per axis.
#[derive(Debug)]
pub(crate) struct KeyValues(pub(crate) Vec<(HeadRows, HeadRows)>);

impl LayerCache for KeyValues {
    fn len(&self) -> usize {
        self.0.first().map_or(0, |(k, _)| k.len())
    }

    fn truncate(&mut self, len: usize) {
        for (k, v) in &mut self.0 {
            k.truncate(len);
            v.truncate(len);
        }
    }

    fn bytes(&self) -> usize {
        self.0.iter().map(|(k, v)| k.bytes() + v.bytes()).sum()
    }
}

/// Returns the rows of one head inside `[tokens, heads, width]`.
pub(crate) fn head_of(x: &[f32], tokens: usize, heads: usize, width: usize, head: usize) -> MatRef<'_, f32> {
    let start = (head * width).min(x.len());
    MatRef::with_stride(&x[start..], tokens, width, heads * width)
        .unwrap_or_else(|| unreachable!("a head lies inside its tokens"))
}

/// Writes the rows of every head, each contiguous, as `[tokens, heads, width]`.
pub(crate) fn interleave(parts: &[Vec<f32>], tokens: usize, width: usize) -> Vec<f32> {
    let mut out = vec![0.0; tokens * parts.len() * width];
    for (h, part) in parts.iter().enumerate() {
        for (t, row) in part.chunks_exact(width.max(1)).enumerate() {
            out[(t * parts.len() + h) * width..][..width].copy_from_slice(row);
        }
    }
    out
}
