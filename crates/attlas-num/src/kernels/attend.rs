//! Exact attention over tiles of keys.
//!
//! For a query row $q$ and the keys it sees, $s_j = \tau\, q^\top k_j + b_j$, the output is
//! $o = \sum_j e^{s_j} v_j / \sum_j e^{s_j}$, with $\mathrm{lse} = \ln \sum_j e^{s_j}$. One pass over tiles
//! of keys keeps a running maximum $m$, a running sum $l$ and an unnormalised output (online softmax:
//! Milakov and Gimelshein 2018; tiled as in Dao et al. 2022), so no row of logits is ever stored whole.

use super::{Isa, Precision};
use crate::mat::{MatRef, Real};
use crate::scratch::Scratch;
use std::ops::Range;

/// Keys visible to each row: row `i` sees key `j` if `lower ≤ j − i ≤ upper`; `None` means no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Band {
    /// Least visible `j − i`.
    pub lower: Option<isize>,
    /// Greatest visible `j − i`.
    pub upper: Option<isize>,
}

impl Band {
    /// Every row sees every key.
    pub const ALL: Self = Self { lower: None, upper: None };

    /// Row `i` sees the keys `j ≤ i + offset`. The causal mask aligned at the last row and last key has
    /// `offset = n_k − n_q`.
    pub const fn causal(offset: isize) -> Self {
        Self { lower: None, upper: Some(offset) }
    }

    /// Returns the range of keys, out of `n_k`, that row `i` sees; possibly empty.
    pub fn range(&self, i: usize, n_k: usize) -> Range<usize> {
        let i = isize::try_from(i).unwrap_or(isize::MAX);
        let clamp = |j: isize| usize::try_from(j).unwrap_or(0).min(n_k);
        let start = self.lower.map_or(0, |lower| clamp(i.saturating_add(lower)));
        let end = self.upper.map_or(n_k, |upper| clamp(i.saturating_add(upper).saturating_add(1)));
        start..end.max(start)
    }

    /// Returns the rows that see key `j`, without an upper limit on their number; possibly none.
    pub(super) fn rows(&self, j: usize) -> Range<usize> {
        let j = isize::try_from(j).unwrap_or(isize::MAX);
        let clamp = |i: isize| usize::try_from(i).unwrap_or(0);
        let start = self.upper.map_or(0, |upper| clamp(j.saturating_sub(upper)));
        let end = self.lower.map_or(usize::MAX, |lower| clamp(j.saturating_sub(lower).saturating_add(1)));
        start..end.max(start)
    }

    /// Returns the same band with rows counted from `i0`.
    #[must_use]
    pub fn from_row(self, i0: usize) -> Self {
        let shift = |x: isize| x.saturating_add_unsigned(i0);
        Self { lower: self.lower.map(shift), upper: self.upper.map(shift) }
    }

    /// Returns the same band with keys counted from `j0`.
    #[must_use]
    pub fn from_key(self, j0: usize) -> Self {
        let shift = |x: isize| x.saturating_sub_unsigned(j0);
        Self { lower: self.lower.map(shift), upper: self.upper.map(shift) }
    }
}

/// Exact attention of every row of `q` over the keys it sees.
///
/// A row that sees no key gives `out = 0` and `lse = −∞`. NaN in a query, or in a key or value it sees, reaches its
/// output; keys and values hidden from a row, by the band or by a bias of −∞, cannot change a bit of its result, even
/// if they are NaN. A logit of +∞ gives NaN. Work outside the band is skipped.
///
/// **Reproducibility.** There are two code paths, chosen by `decode`: one reads keys and values in place (decoding),
/// the other goes tile by tile for many rows at once. Their results differ by rounding. Within each, a row's result
/// depends bit for bit on its query, on the keys, values and biases it sees and their positions in `k`, and on
/// `tile_k`, `isa` and `precision`; not on the other rows of the call, their number or order. Any split of rows over
/// threads therefore gives the same bits.
///
/// **Memory.** Less than 1 MiB from the scratch pool for `d + d_v` up to about 5000 `f32`, whatever the number of rows
/// and keys; beyond that it grows with the width.
#[derive(Clone, Copy, Debug)]
pub struct Attend<'a, T> {
    /// Queries, one per row; columns `d`.
    pub q: MatRef<'a, T>,
    /// Keys, `n_k × d`.
    pub k: MatRef<'a, T>,
    /// Values, `n_k × d_v`.
    pub v: MatRef<'a, T>,
    /// Factor of the dot products.
    pub scale: T,
    /// Caps the products smoothly before the bias: $c \tanh(s / c)$ for $c$ positive.
    pub softcap: Option<T>,
    /// Bias added to the logit of each key; −∞ hides the key.
    pub bias: Option<&'a [T]>,
    /// Keys visible to each row.
    pub band: Band,
    /// Keys per tile; 0 for the default. Adjusted to what the tiles allow: whole register blocks, at most 512. The
    /// decoding path has a fixed tile length.
    pub tile_k: usize,
    /// Instruction set; [`Isa::Scalar`] replaces one that the machine lacks.
    pub isa: Isa,
    /// Precision of the products; `f64` ignores it.
    pub precision: Precision,
    /// For decoding: if at most eight rows all see the same keys, reads every key and value once, straight from memory,
    /// for all of them. This path rounds differently from the tiled one, so the caller chooses it; the number of rows
    /// alone does not.
    pub decode: bool,
}

/// [`Attend`] with its shapes checked, as the instruction sets receive it.
pub(super) type Job<'a, T> = Attend<'a, T>;

impl<T: Real> Attend<'_, T> {
    /// Computes `out` (`rows × d_v`, contiguous) and `lse` (`rows`, natural logarithm), on this thread.
    ///
    /// # Panics
    ///
    /// If the shapes of `q`, `k`, `v`, `bias`, `out` and `lse` do not fit together.
    pub fn run(&self, scratch: &Scratch, out: &mut [T], lse: &mut [T]) {
        let (rows, n_k) = (self.q.rows(), self.k.rows());
        assert_eq!(self.q.cols(), self.k.cols(), "queries and keys of different width");
        assert_eq!(self.v.rows(), n_k, "as many values as keys");
        assert_eq!(out.len(), rows * self.v.cols(), "one output row per query");
        assert_eq!(lse.len(), rows, "one log-sum-exp per query");
        assert!(self.bias.is_none_or(|b| b.len() == n_k), "one bias per key");
        T::attend_on(self, scratch, out, lse);
    }
}

/// Attention of a few rows to a list of keys, read in the order of the list: decoding over the best keys of a cache.
///
/// Keys and values are read in place, and later ones are prefetched.
///
/// The rules of [`Attend`] apply to the listed keys; a row's result depends bit for bit on its query, on the listed
/// keys, values and biases, on their order and on `isa`. Memory use is that of [`Attend`]; the scalar definition takes
/// one element per listed key.
#[derive(Clone, Copy, Debug)]
pub struct AttendChosen<'a, T> {
    /// Queries, one per row; columns `d`.
    pub q: MatRef<'a, T>,
    /// Keys, `n_k × d`.
    pub k: MatRef<'a, T>,
    /// Values, `n_k × d_v`.
    pub v: MatRef<'a, T>,
    /// Keys to attend to: row numbers of `k` and `v`.
    pub chosen: &'a [u32],
    /// Factor of the dot products.
    pub scale: T,
    /// Bias added to the logit of each chosen key; −∞ hides the key.
    pub bias: Option<&'a [T]>,
    /// Instruction set; [`Isa::Scalar`] replaces one that the machine lacks.
    pub isa: Isa,
}

impl<T: Real> AttendChosen<'_, T> {
    /// Computes `out` (`rows × d_v`, contiguous) and `lse` (`rows`, natural logarithm), on this thread.
    ///
    /// # Panics
    ///
    /// If the shapes do not fit together, or a chosen key does not exist.
    pub fn run(&self, scratch: &Scratch, out: &mut [T], lse: &mut [T]) {
        let rows = self.q.rows();
        assert_eq!(self.q.cols(), self.k.cols(), "queries and keys of different width");
        assert_eq!(self.v.rows(), self.k.rows(), "as many values as keys");
        assert_eq!(out.len(), rows * self.v.cols(), "one output row per query");
        assert_eq!(lse.len(), rows, "one log-sum-exp per query");
        assert!(self.bias.is_none_or(|b| b.len() == self.chosen.len()), "one bias per chosen key");
        assert!(self.chosen.iter().all(|&j| (j as usize) < self.k.rows()), "a chosen key does not exist");
        T::attend_chosen_on(self, scratch, out, lse);
    }
}

/// Merges a second partial attention over other keys into the first: outputs `o` and `o2` with
/// log-sum-exps `lse` and `lse2`. Merging with an empty part (`lse2 = −∞`) changes nothing.
///
/// With $m = \max(L_a, L_b)$, $w = e^{L - m}$: $o = (w_a o_a + w_b o_b) / (w_a + w_b)$ and
/// $L = m + \ln(w_a + w_b)$.
///
/// # Panics
///
/// If the outputs differ in length.
pub fn merge_lse<T: Real>(o: &mut [T], lse: &mut T, o2: &[T], lse2: T) {
    assert_eq!(o.len(), o2.len(), "outputs of different width");
    if lse2 == T::NEG_INFINITY {
        return;
    }
    if *lse == T::NEG_INFINITY {
        o.copy_from_slice(o2);
        *lse = lse2;
        return;
    }
    let m = if *lse > lse2 { *lse } else { lse2 };
    let (a, b) = ((*lse - m).exp(), (lse2 - m).exp());
    let sum = a + b;
    o.iter_mut().zip(o2).for_each(|(o, &o2)| *o = (a * *o + b * o2) / sum);
    *lse = m + sum.ln();
}
