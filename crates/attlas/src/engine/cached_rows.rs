//! Decoding cache of one key head: keys and values row after row, in memory that grows by large pages.

use crate::{MatRef, Real};
use attlas_num::kernels::pages;

/// Every key and value of a stream, in the order of the tokens.
#[derive(Debug)]
pub struct CachedRows<T> {
    k: Vec<T>,
    v: Vec<T>,
    d: usize,
    d_v: usize,
}

impl<T: Real> CachedRows<T> {
    /// Makes an empty cache.
    pub fn new(d: usize, d_v: usize) -> Self {
        Self { k: Vec::new(), v: Vec::new(), d, d_v }
    }

    /// Appends keys and their values.
    pub fn append(&mut self, k: MatRef<'_, T>, v: MatRef<'_, T>) {
        pages::reserve(&mut self.k, k.rows() * self.d);
        pages::reserve(&mut self.v, v.rows() * self.d_v);
        k.iter_rows().for_each(|row| self.k.extend_from_slice(row));
        v.iter_rows().for_each(|row| self.v.extend_from_slice(row));
    }

    /// Number of tokens.
    pub fn tokens(&self) -> usize {
        self.k.len() / self.d
    }

    /// Widths of a key and of a value.
    pub fn widths(&self) -> (usize, usize) {
        (self.d, self.d_v)
    }

    /// The keys, a row each.
    pub fn keys(&self) -> MatRef<'_, T> {
        MatRef::new(&self.k, self.tokens(), self.d)
    }

    /// The values, a row each.
    pub fn values(&self) -> MatRef<'_, T> {
        MatRef::new(&self.v, self.tokens(), self.d_v)
    }

    /// Bytes of the rows.
    pub fn bytes(&self) -> usize {
        (self.k.len() + self.v.len()) * size_of::<T>()
    }
}
