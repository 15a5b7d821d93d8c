//! Keys with weights, and values before and after compression.
//!
//! A coreset of keys $k_s$ has rows $[V_s \mid w_s \mid |w_s|]$ in place of values, so one pass of the exact kernel
//! gives numerator, denominator and the size of the denominator before cancellation. Uncompressed keys have $[v \mid 1
//! \mid 1]$.

use crate::Real;
use attlas_num::MatRef;
use std::ops::Range;

/// Values of the keys to compress.
#[derive(Clone, Copy, Debug)]
pub enum Values<'a, T> {
    /// One row per key, of weight one.
    Plain(MatRef<'a, T>),
    /// The rows $[V \mid w \mid |w|]$ of a coreset.
    Weighted(MatRef<'a, T>),
}

impl<'a, T: Real> Values<'a, T> {
    /// Width of the values proper.
    pub fn d_v(&self) -> usize {
        match self {
            Values::Plain(v) => v.cols(),
            Values::Weighted(v) => v.cols() - 2,
        }
    }

    /// The rows `range`.
    #[must_use]
    pub fn rows(&self, range: Range<usize>) -> Self {
        match self {
            Values::Plain(v) => Values::Plain(v.sub_rows(range)),
            Values::Weighted(v) => Values::Weighted(v.sub_rows(range)),
        }
    }

    /// The values proper and the weight of row `j`.
    pub fn row(&self, j: usize) -> (&'a [T], T) {
        match self {
            Values::Plain(v) => (v.row(j), T::ONE),
            Values::Weighted(v) => {
                let row = v.row(j);
                (&row[..row.len() - 2], row[row.len() - 2])
            }
        }
    }

    /// Writes `factor` times $[v_j \mid w_j]$.
    pub fn scaled_into(&self, j: usize, factor: T, out: &mut [T]) {
        let (v, w) = self.row(j);
        out.iter_mut().zip(v).for_each(|(o, &v)| *o = factor * v);
        out[v.len()] = factor * w;
    }
}

/// Weighted keys that represent many.
#[derive(Clone, Debug)]
pub struct Coreset<T> {
    keys: Vec<T>,
    values: Vec<T>,
    len: usize,
    d: usize,
    d_v: usize,
}

impl<T: Real> Coreset<T> {
    /// Makes a coreset without keys.
    pub fn empty(d: usize, d_v: usize) -> Self {
        Self { keys: Vec::new(), values: Vec::new(), len: 0, d, d_v }
    }

    /// Makes a coreset of all keys with their values unchanged.
    pub fn verbatim(keys: MatRef<'_, T>, values: Values<'_, T>) -> Self {
        let mut all = Self::empty(keys.cols(), values.d_v());
        for j in 0..keys.rows() {
            let (v, w) = values.row(j);
            all.push(keys.row(j), v, w);
        }
        all
    }

    /// Adds a key with its values and its weight.
    pub fn push(&mut self, key: &[T], values: &[T], weight: T) {
        self.keys.extend_from_slice(key);
        self.values.extend_from_slice(values);
        self.values.extend_from_slice(&[weight, weight.abs()]);
        self.len += 1;
    }

    /// Adds all keys of another coreset.
    pub fn append(&mut self, other: &Self) {
        self.keys.extend_from_slice(&other.keys);
        self.values.extend_from_slice(&other.values);
        self.len += other.len;
    }

    /// Number of keys.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if it holds no key.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The keys, one per row.
    pub fn keys(&self) -> MatRef<'_, T> {
        MatRef::new(&self.keys, self.len, self.d)
    }

    /// The rows $[V \mid w \mid |w|]$.
    pub fn values(&self) -> MatRef<'_, T> {
        MatRef::new(&self.values, self.len, self.d_v + 2)
    }

    /// Returns true if every number is finite.
    pub fn is_finite(&self) -> bool {
        self.keys.iter().chain(&self.values).all(|x| x.is_finite())
    }

    /// Bytes cached.
    pub fn bytes(&self) -> usize {
        (self.keys.len() + self.values.len()) * size_of::<T>()
    }
}
