//! The problem: sizes, mask, strided inputs and outputs.

use crate::{Error, Near, Result};
use attlas_num::{DType, MatRef, Real};

/// Which keys a query may see.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mask {
    /// Every query sees every key.
    #[default]
    None,
    /// Query `i` sees key `j` when `j ≤ i + (n_k − n_q)`: the last query sees all keys.
    Causal,
}

impl Mask {
    /// Returns how many of the `n_k` keys, counted from the first, row `i` of `n_q` sees.
    pub fn visible(self, n_q: usize, n_k: usize, i: usize) -> usize {
        match self {
            Mask::None => n_k,
            Mask::Causal => (n_k + i + 1).saturating_sub(n_q).min(n_k),
        }
    }
}

impl std::fmt::Display for Mask {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Mask::None => "none",
            Mask::Causal => "causal",
        })
    }
}

/// The sizes and the mask of an attention problem.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Problem {
    /// Independent sequences.
    pub batch: usize,
    /// Query heads; a multiple of `n_kv_heads`.
    pub n_heads: usize,
    /// Key and value heads.
    pub n_kv_heads: usize,
    /// Queries per head.
    pub n_q: usize,
    /// Keys per head.
    pub n_k: usize,
    /// Width of queries and keys.
    pub d: usize,
    /// Width of values.
    pub d_v: usize,
    /// Factor on the inner products, usually $1/\sqrt d$.
    pub scale: f64,
    /// Which keys a query may see.
    pub mask: Mask,
    /// Keys computed exactly, whatever the method does with the others.
    #[serde(default, skip_serializing_if = "Near::is_none")]
    pub near: Near,
    /// Caps logits smoothly, $c \tanh(s / c)$, as Gemma 2 does. Methods that do not claim softcap refuse the problem.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub softcap: Option<f64>,
}

impl Problem {
    /// One sequence of `n` tokens, `n_heads` heads of width `d`, scale $1/\sqrt d$, no mask.
    pub fn new(n_heads: usize, n: usize, d: usize) -> Self {
        Self {
            batch: 1,
            n_heads,
            n_kv_heads: n_heads,
            n_q: n,
            n_k: n,
            d,
            d_v: d,
            scale: 1.0 / (d.max(1) as f64).sqrt(),
            mask: Mask::None,
            near: Near::NONE,
            softcap: None,
        }
    }

    /// Returns the problem with this softcap, if any.
    #[must_use]
    pub fn with_softcap(self, softcap: Option<f64>) -> Self {
        Self { softcap, ..self }
    }

    /// Returns the problem with this near field.
    #[must_use]
    pub fn with_near(self, near: Near) -> Self {
        Self { near, ..self }
    }

    /// Returns the problem with a causal mask.
    #[must_use]
    pub fn causal(self) -> Self {
        Self { mask: Mask::Causal, ..self }
    }

    /// Returns the problem with `n_kv_heads` key and value heads.
    #[must_use]
    pub fn with_kv_heads(self, n_kv_heads: usize) -> Self {
        Self { n_kv_heads, ..self }
    }

    /// Returns the problem with these numbers of queries and keys.
    #[must_use]
    pub fn with_lens(self, n_q: usize, n_k: usize) -> Self {
        Self { n_q, n_k, ..self }
    }

    /// Returns the problem for `batch` sequences.
    #[must_use]
    pub fn with_batch(self, batch: usize) -> Self {
        Self { batch, ..self }
    }

    /// Returns the number of keys that row `i` of a head sees; they are keys `0..visible(i)`.
    pub fn visible(&self, i: usize) -> usize {
        self.mask.visible(self.n_q, self.n_k, i)
    }

    /// Returns the number of query heads that share one key head.
    pub fn group_size(&self) -> usize {
        self.n_heads / self.n_kv_heads.max(1)
    }

    /// Returns the number of pairs of a query and a key that it sees, over all heads and sequences.
    pub fn visible_pairs(&self) -> u64 {
        let heads = (self.batch * self.n_heads) as u64;
        let (n_q, n_k) = (self.n_q as u64, self.n_k as u64);
        heads
            * match self.mask {
                Mask::None => n_q * n_k,
                // Counted from the last, rows see n_k, n_k − 1, … keys until none is left.
                Mask::Causal => {
                    let rows = n_q.min(n_k);
                    rows * n_k - rows * rows.saturating_sub(1) / 2
                }
            }
    }

    /// Checks every size.
    pub fn validate(&self) -> Result<()> {
        if self.n_kv_heads == 0 || !self.n_heads.is_multiple_of(self.n_kv_heads) || self.n_heads == 0 {
            return Err(Error::shape(
                "heads",
                "n_heads to be a positive multiple of n_kv_heads",
                format!("{} query heads, {} key heads", self.n_heads, self.n_kv_heads),
            ));
        }
        if self.d == 0 || self.d_v == 0 {
            return Err(Error::shape(
                "width",
                "d and d_v of at least 1",
                format!("{} and {}", self.d, self.d_v),
            ));
        }
        if !self.scale.is_finite() {
            return Err(Error::param("scale", self.scale, "a finite number"));
        }
        if let Some(cap) = self.softcap.filter(|c| !(c.is_finite() && *c > 0.0)) {
            return Err(Error::param("softcap", cap, "a positive number"));
        }
        let product = |what, sizes: &[usize]| {
            let total = sizes.iter().try_fold(size_of::<f64>(), |a, &b| a.checked_mul(b));
            match total {
                Some(bytes) if isize::try_from(bytes).is_ok() => Ok(()),
                _ => Err(Error::TooLarge { what, sizes: sizes.to_vec() }),
            }
        };
        product("queries", &[self.batch, self.n_heads, self.n_q, self.d])?;
        product("keys", &[self.batch, self.n_kv_heads, self.n_k, self.d])?;
        product("values", &[self.batch, self.n_kv_heads, self.n_k, self.d_v])?;
        product("output", &[self.batch, self.n_heads, self.n_q, self.d_v])
    }
}

/// Sizes of a four-way tensor: batch, heads, rows, columns.
pub type Dims = [usize; 4];

/// Elements between neighbours along batch, head and row; columns are contiguous.
pub type Strides = [usize; 3];

/// Returns the strides of a contiguous `[batch, heads, rows, columns]` tensor. A product that overflows saturates; no
/// tensor can have such a stride.
pub fn bhnd([_, h, n, c]: Dims) -> Strides {
    let head = n.saturating_mul(c);
    [h.saturating_mul(head), head, c]
}

/// Returns the strides of a contiguous `[batch, rows, heads, columns]` tensor, saturated likewise.
pub fn bnhd([_, h, n, c]: Dims) -> Strides {
    let row = h.saturating_mul(c);
    [n.saturating_mul(row), c, row]
}

/// Returns the index of the last element plus one, or `None` on overflow.
fn extent(dims: Dims, strides: Strides) -> Option<usize> {
    if dims.contains(&0) {
        return Some(0);
    }
    let mut last = dims[3];
    for axis in 0..3 {
        last = last.checked_add((dims[axis] - 1).checked_mul(strides[axis])?)?;
    }
    Some(last)
}

fn check_extent(what: &'static str, len: usize, dims: Dims, strides: Strides) -> Result<()> {
    match extent(dims, strides) {
        Some(needed) if needed <= len => Ok(()),
        Some(needed) => Err(Error::shape(what, format!("at least {needed} elements for {dims:?}"), len)),
        None => Err(Error::TooLarge { what, sizes: dims.to_vec() }),
    }
}

/// A read-only `[batch, heads, rows, columns]` tensor with free strides on the first three axes.
#[derive(Clone, Copy, Debug)]
pub struct TensorRef<'a, T> {
    data: &'a [T],
    dims: Dims,
    strides: Strides,
}

impl<'a, T> TensorRef<'a, T> {
    /// Makes a view with given strides; an error if it reaches past the end of `data`.
    pub fn new(data: &'a [T], dims: Dims, strides: Strides) -> Result<Self> {
        check_extent("tensor", data.len(), dims, strides)?;
        if strides[2] < dims[3] && dims[2] > 1 {
            return Err(Error::shape("row stride", format!("at least {}", dims[3]), strides[2]));
        }
        Ok(Self { data, dims, strides })
    }

    /// Views `data` as a contiguous `[batch, heads, rows, columns]` tensor.
    pub fn bhnd(data: &'a [T], dims: Dims) -> Result<Self> {
        Self::new(data, dims, bhnd(dims))
    }

    /// Views a contiguous `[batch, rows, heads, columns]` tensor as `[batch, heads, rows, columns]`.
    pub fn bnhd(data: &'a [T], dims: Dims) -> Result<Self> {
        Self::new(data, dims, bnhd(dims))
    }

    /// Returns the sizes: batch, heads, rows, columns.
    pub fn dims(&self) -> Dims {
        self.dims
    }

    /// Returns the strides in elements along batch, head and row.
    pub fn strides(&self) -> Strides {
        self.strides
    }

    /// Returns the matrix of one head of one sequence.
    pub fn head(&self, batch: usize, head: usize) -> MatRef<'a, T> {
        assert!(batch < self.dims[0] && head < self.dims[1]);
        let [_, _, rows, cols] = self.dims;
        if rows == 0 {
            return MatRef::new(&[], 0, cols);
        }
        let start = batch * self.strides[0] + head * self.strides[1];
        let len = (rows - 1) * self.strides[2] + cols;
        MatRef::with_stride(&self.data[start..start + len], rows, cols, self.strides[2].max(cols))
            .unwrap_or_else(|| unreachable!("checked on construction"))
    }

    /// Returns one row of every head: a `heads × columns` matrix.
    pub fn token(&self, batch: usize, row: usize) -> Option<MatRef<'a, T>> {
        let [_, heads, _, cols] = self.dims;
        let start = batch * self.strides[0] + row * self.strides[2];
        MatRef::with_stride(self.data.get(start..)?, heads, cols, self.strides[1])
    }

    /// Returns one sequence of the batch.
    pub fn batch(&self, batch: usize) -> TensorRef<'a, T> {
        assert!(batch < self.dims[0]);
        let [_, h, n, c] = self.dims;
        let start = (batch * self.strides[0]).min(self.data.len());
        TensorRef { data: &self.data[start..], dims: [1, h, n, c], strides: self.strides }
    }

    /// Returns rows `range` of every head.
    pub fn rows(&self, range: std::ops::Range<usize>) -> TensorRef<'a, T> {
        assert!(range.start <= range.end && range.end <= self.dims[2]);
        let [b, h, _, c] = self.dims;
        let start = (range.start * self.strides[2]).min(self.data.len());
        TensorRef { data: &self.data[start..], dims: [b, h, range.len(), c], strides: self.strides }
    }

    /// Returns heads `range` of every sequence.
    pub fn heads(&self, range: std::ops::Range<usize>) -> TensorRef<'a, T> {
        assert!(range.start <= range.end && range.end <= self.dims[1]);
        let [b, _, n, c] = self.dims;
        let start = (range.start * self.strides[1]).min(self.data.len());
        TensorRef { data: &self.data[start..], dims: [b, range.len(), n, c], strides: self.strides }
    }
}

/// A read-only tensor in single or double precision.
#[derive(Clone, Copy, Debug)]
pub enum Tensor<'a> {
    /// Single precision.
    F32(TensorRef<'a, f32>),
    /// Double precision.
    F64(TensorRef<'a, f64>),
}

impl<'a> From<TensorRef<'a, f32>> for Tensor<'a> {
    fn from(x: TensorRef<'a, f32>) -> Self {
        Tensor::F32(x)
    }
}

impl<'a> From<TensorRef<'a, f64>> for Tensor<'a> {
    fn from(x: TensorRef<'a, f64>) -> Self {
        Tensor::F64(x)
    }
}

impl Tensor<'_> {
    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        match self {
            Tensor::F32(_) => DType::F32,
            Tensor::F64(_) => DType::F64,
        }
    }
}

/// A writable `[batch, heads, rows, columns]` tensor with free strides on the first three axes.
#[derive(Debug)]
pub struct TensorMut<'a, T> {
    data: &'a mut [T],
    dims: Dims,
    strides: Strides,
}

impl<'a, T> TensorMut<'a, T> {
    /// Makes a view with given strides; an error if it reaches past the end of `data` or if two of its elements
    /// coincide.
    pub fn new(data: &'a mut [T], dims: Dims, strides: Strides) -> Result<Self> {
        check_extent("output", data.len(), dims, strides)?;
        // Along axes in order of stride, each step must skip everything that the shorter axes reach.
        let mut axes = [0, 1, 2].map(|a| (strides[a], dims[a]));
        axes.sort_unstable();
        let mut reach = dims[3];
        for (stride, n) in axes.into_iter().filter(|&(_, n)| n > 1) {
            if stride < reach && !dims.contains(&0) {
                return Err(Error::shape(
                    "output strides",
                    "no two elements at the same place",
                    format!("strides {strides:?} for {dims:?}"),
                ));
            }
            reach = reach.saturating_add(stride.saturating_mul(n - 1));
        }
        Ok(Self { data, dims, strides })
    }

    /// Views `data` as a contiguous `[batch, heads, rows, columns]` tensor.
    pub fn bhnd(data: &'a mut [T], dims: Dims) -> Result<Self> {
        Self::new(data, dims, bhnd(dims))
    }

    /// Views a contiguous `[batch, rows, heads, columns]` tensor as `[batch, heads, rows, columns]`.
    pub fn bnhd(data: &'a mut [T], dims: Dims) -> Result<Self> {
        Self::new(data, dims, bnhd(dims))
    }

    /// Returns the sizes: batch, heads, rows, columns.
    pub fn dims(&self) -> Dims {
        self.dims
    }

    /// Returns true if elements lie in the order of a contiguous `[batch, heads, rows, columns]` tensor.
    pub fn is_bhnd(&self) -> bool {
        let want = bhnd(self.dims);
        (0..3).all(|a| self.dims[a] <= 1 || self.strides[a] == want[a])
    }

    /// Returns the whole storage behind the view.
    pub fn data_mut(&mut self) -> &mut [T] {
        self.data
    }

    /// Returns one row of one head.
    pub fn row_mut(&mut self, batch: usize, head: usize, row: usize) -> &mut [T] {
        assert!(batch < self.dims[0] && head < self.dims[1] && row < self.dims[2]);
        let start = batch * self.strides[0] + head * self.strides[1] + row * self.strides[2];
        &mut self.data[start..start + self.dims[3]]
    }

    /// Returns the same tensor, borrowed for a shorter time.
    pub fn reborrow(&mut self) -> TensorMut<'_, T> {
        TensorMut { data: self.data, dims: self.dims, strides: self.strides }
    }

    /// Borrows rows `range` of every head.
    pub fn rows_mut(&mut self, range: std::ops::Range<usize>) -> TensorMut<'_, T> {
        assert!(range.start <= range.end && range.end <= self.dims[2]);
        let [b, h, _, c] = self.dims;
        let start = (range.start * self.strides[2]).min(self.data.len());
        TensorMut { data: &mut self.data[start..], dims: [b, h, range.len(), c], strides: self.strides }
    }
}

/// Queries, keys and values of one element type.
#[derive(Clone, Copy, Debug)]
pub struct Qkv<'a, T> {
    /// `[batch, n_heads, n_q, d]`.
    pub q: TensorRef<'a, T>,
    /// `[batch, n_kv_heads, n_k, d]`.
    pub k: TensorRef<'a, T>,
    /// `[batch, n_kv_heads, n_k, d_v]`.
    pub v: TensorRef<'a, T>,
    /// Number of valid keys of each sequence; the rest is padding and is never read. `None` if all keys are valid.
    pub key_lens: Option<&'a [usize]>,
    /// Position of the queries of a padded sequence under a causal mask.
    pub align: Align,
}

/// Position of the queries under a causal mask, in sequences with fewer valid keys than planned. Without a mask every
/// query sees every valid key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Align {
    /// At the end: the last query is aligned with the last valid key and sees all valid keys. For caches of different
    /// lengths in one batch.
    #[default]
    End,
    /// The same as without padding: query `i` sees key `j` when `j ≤ i + (n_k − n_q)` and `j` is valid. For
    /// right-padded prompts. Queries past the last valid key are padding, too: their outputs are zero and their
    /// log-sum-exp is −∞.
    Start,
}

impl<'a, T: Real> Qkv<'a, T> {
    /// Bundles queries, keys and values without padding.
    pub fn new(q: TensorRef<'a, T>, k: TensorRef<'a, T>, v: TensorRef<'a, T>) -> Self {
        Self { q, k, v, key_lens: None, align: Align::End }
    }

    /// Returns the inputs with only the first `lens[b]` keys of sequence `b` valid.
    #[must_use]
    pub fn padded(self, lens: &'a [usize], align: Align) -> Self {
        Self { key_lens: Some(lens), align, ..self }
    }

    /// Returns the number of queries of a sequence that precede the padding.
    pub(crate) fn valid_rows(&self, p: &Problem, batch: usize) -> usize {
        match (self.key_lens, self.align, p.mask) {
            (Some(lens), Align::Start, Mask::Causal) => {
                (lens[batch] + p.n_q).saturating_sub(p.n_k).min(p.n_q)
            }
            _ => p.n_q,
        }
    }

    /// Checks that every tensor has the sizes of the problem.
    pub fn validate(&self, p: &Problem) -> Result<()> {
        let expect = |what, dims: Dims, want: Dims| {
            if dims == want {
                Ok(())
            } else {
                Err(Error::shape(what, format!("{want:?}"), format!("{dims:?}")))
            }
        };
        expect("queries", self.q.dims(), [p.batch, p.n_heads, p.n_q, p.d])?;
        expect("keys", self.k.dims(), [p.batch, p.n_kv_heads, p.n_k, p.d])?;
        expect("values", self.v.dims(), [p.batch, p.n_kv_heads, p.n_k, p.d_v])?;
        if let Some(lens) = self.key_lens {
            if lens.len() != p.batch {
                return Err(Error::shape(
                    "key lengths",
                    format!("one for each of {} sequences", p.batch),
                    lens.len(),
                ));
            }
            if let Some(&n) = lens.iter().find(|&&n| n > p.n_k) {
                return Err(Error::shape("key length", format!("at most {}", p.n_k), n));
            }
        }
        Ok(())
    }
}

/// Queries, keys and values, in single or double precision.
#[derive(Clone, Copy, Debug)]
pub enum Inputs<'a> {
    /// Single precision.
    F32(Qkv<'a, f32>),
    /// Double precision.
    F64(Qkv<'a, f64>),
}

impl<'a> From<Qkv<'a, f32>> for Inputs<'a> {
    fn from(x: Qkv<'a, f32>) -> Self {
        Inputs::F32(x)
    }
}

impl<'a> From<Qkv<'a, f64>> for Inputs<'a> {
    fn from(x: Qkv<'a, f64>) -> Self {
        Inputs::F64(x)
    }
}

impl Inputs<'_> {
    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        match self {
            Inputs::F32(_) => DType::F32,
            Inputs::F64(_) => DType::F64,
        }
    }
}

/// Destination of the results in one element type.
#[derive(Debug)]
pub struct Out<'a, T> {
    /// `[batch, n_heads, n_q, d_v]`.
    pub o: TensorMut<'a, T>,
    /// Natural logarithm of each row's normaliser, contiguous `[batch, n_heads, n_q]`, if requested.
    pub lse: Option<&'a mut [T]>,
}

impl<'a, T: Real> Out<'a, T> {
    /// Receives output rows alone.
    pub fn new(o: TensorMut<'a, T>) -> Self {
        Self { o, lse: None }
    }

    /// Receives output rows and their log-sum-exp.
    pub fn with_lse(o: TensorMut<'a, T>, lse: &'a mut [T]) -> Self {
        Self { o, lse: Some(lse) }
    }

    /// Checks that the output has the sizes of the problem.
    pub fn validate(&self, p: &Problem) -> Result<()> {
        let want = [p.batch, p.n_heads, p.n_q, p.d_v];
        if self.o.dims() != want {
            return Err(Error::shape("output", format!("{want:?}"), format!("{:?}", self.o.dims())));
        }
        let rows = p.batch * p.n_heads * p.n_q;
        match &self.lse {
            Some(lse) if lse.len() != rows => {
                Err(Error::shape("log-sum-exp", format!("{rows} elements"), lse.len()))
            }
            _ => Ok(()),
        }
    }
}

/// Destination of the results, in single or double precision.
#[derive(Debug)]
pub enum Output<'a> {
    /// Single precision.
    F32(Out<'a, f32>),
    /// Double precision.
    F64(Out<'a, f64>),
}

impl<'a> From<Out<'a, f32>> for Output<'a> {
    fn from(x: Out<'a, f32>) -> Self {
        Output::F32(x)
    }
}

impl<'a> From<Out<'a, f64>> for Output<'a> {
    fn from(x: Out<'a, f64>) -> Self {
        Output::F64(x)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_layouts_read_the_same_element() {
        let dims = [2, 3, 5, 4];
        let data: Vec<usize> = (0..120).collect();
        let a = TensorRef::bhnd(&data, dims).unwrap();
        let b = TensorRef::bnhd(&data, dims).unwrap();
        assert_eq!(a.head(1, 2).row(3)[1], 60 + 2 * 20 + 3 * 4 + 1);
        assert_eq!(b.head(1, 2).row(3)[1], 60 + 3 * 12 + 2 * 4 + 1);
        assert_eq!(b.rows(2..5).head(1, 2).row(1), b.head(1, 2).row(3));
        assert_eq!(b.token(1, 3).unwrap().row(2), b.head(1, 2).row(3));
    }

    #[test]
    fn overlapping_outputs_are_refused() {
        let mut data = [0.0f32; 64];
        assert!(TensorMut::new(&mut data, [1, 2, 4, 4], [0, 8, 4]).is_err());
        assert!(TensorMut::new(&mut data, [1, 2, 4, 4], [0, 16, 4]).is_ok());
        assert!(TensorMut::new(&mut data, [1, 2, 4, 4], [0, 4, 8]).is_ok());
        assert!(TensorMut::new(&mut data, [1, 2, 4, 4], [0, 4, 4]).is_err());
        assert!(TensorMut::new(&mut data, [1, 2, 100, 4], [0, 4, 8]).is_err());
    }

    #[test]
    fn sizes_whose_product_wraps_are_refused_or_empty() {
        let data = [0.0f32; 64];
        for dims in [[1 << 32, 1 << 16, 1 << 16, 1], [2, 1 << 32, 1 << 32, 1], [1, 1, 1 << 58, 64]] {
            assert!(TensorRef::bhnd(&data, dims).is_err(), "{dims:?}");
            assert!(TensorRef::bnhd(&data, dims).is_err(), "{dims:?}");
            assert!(TensorMut::bhnd(&mut [0.0f32; 64], dims).is_err(), "{dims:?}");
        }
        // Empty, whatever the other sizes are.
        assert!(TensorRef::bhnd(&data, [1, 1 << 40, 1 << 40, 0]).is_ok());
        assert!(TensorRef::bnhd(&data, [0, 1 << 40, 1 << 40, 8]).is_ok());
    }

    #[test]
    fn bad_problems_are_refused() {
        assert!(Problem::new(4, 8, 16).with_kv_heads(3).validate().is_err());
        assert!(Problem { scale: f64::NAN, ..Problem::new(1, 1, 1) }.validate().is_err());
        assert!(Problem { d: 0, ..Problem::new(1, 1, 1) }.validate().is_err());
        let huge = Problem { n_q: usize::MAX / 2, ..Problem::new(2, 4, 4) };
        assert!(matches!(huge.validate(), Err(Error::TooLarge { .. })));
        assert!(Problem::new(1, 0, 4).validate().is_ok());
    }

    #[test]
    fn causal_pairs_are_counted_row_by_row() {
        for (n_q, n_k) in [(4, 4), (1, 7), (3, 7), (7, 3), (0, 3), (3, 0)] {
            let p = Problem::new(2, 1, 1).with_lens(n_q, n_k).causal();
            let by_hand: usize =
                (0..n_q).map(|i| (0..n_k).filter(|&j| j + n_q <= i + n_k).count()).sum::<usize>() * 2;
            assert_eq!(p.visible_pairs(), by_hand as u64, "{n_q} × {n_k}");
        }
    }
}
