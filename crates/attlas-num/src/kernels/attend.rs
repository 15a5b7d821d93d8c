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

/// Which keys a row sees: row `i` sees key `j` where `lower ≤ j − i ≤ upper`; `None` is no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Band {
    /// Least `j − i` that is seen.
    pub lower: Option<isize>,
    /// Greatest `j − i` that is seen.
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

    /// The keys that row `i` sees out of `n_k`; possibly empty.
    pub fn range(&self, i: usize, n_k: usize) -> Range<usize> {
        let i = isize::try_from(i).unwrap_or(isize::MAX);
        let clamp = |j: isize| usize::try_from(j).unwrap_or(0).min(n_k);
        let start = self.lower.map_or(0, |lower| clamp(i.saturating_add(lower)));
        let end = self.upper.map_or(n_k, |upper| clamp(i.saturating_add(upper).saturating_add(1)));
        start..end.max(start)
    }

    /// The rows that see key `j`, however many there are; possibly none.
    pub(super) fn rows(&self, j: usize) -> Range<usize> {
        let j = isize::try_from(j).unwrap_or(isize::MAX);
        let clamp = |i: isize| usize::try_from(i).unwrap_or(0);
        let start = self.upper.map_or(0, |upper| clamp(j.saturating_sub(upper)));
        let end = self.lower.map_or(usize::MAX, |lower| clamp(j.saturating_sub(lower).saturating_add(1)));
        start..end.max(start)
    }

    /// The same band for the rows from `i0` on, counted from there.
    #[must_use]
    pub fn from_row(self, i0: usize) -> Self {
        let shift = |x: isize| x.saturating_add_unsigned(i0);
        Self { lower: self.lower.map(shift), upper: self.upper.map(shift) }
    }

    /// The same band for the keys from `j0` on, counted from there.
    #[must_use]
    pub fn from_key(self, j0: usize) -> Self {
        let shift = |x: isize| x.saturating_sub_unsigned(j0);
        Self { lower: self.lower.map(shift), upper: self.upper.map(shift) }
    }
}

/// One exact attention: every row of `q` over the keys it sees.
///
/// A row that sees no key gives `out = 0` and `lse = −∞`. NaN in a query, or in a key or value it sees,
/// reaches its output; what a row does not see, by the band or by a bias of −∞, cannot change a bit of its
/// result, not even by being NaN. A logit of +∞ gives NaN. Work outside the band is skipped.
///
/// **Which bits.** There are two ways to compute, chosen by `decode`: keys and values read where they are
/// (decoding), or tile by tile for many rows at once. The two differ by rounding. Within each, the bits of a row depend on its query,
/// on the keys, values and biases it sees and their positions in `k`, and on `tile_k`, `isa` and `precision`; not on
/// the other rows of the call, their number or order, so any split of rows over threads gives the same bits.
///
/// **Memory.** Below 1 MiB from the scratch pool for `d + d_v` up to about 5000 `f32`, whatever the number of
/// rows and keys; beyond that it grows with the width.
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
    /// Per key, added to its logit; −∞ hides the key.
    pub bias: Option<&'a [T]>,
    /// Which keys a row sees.
    pub band: Band,
    /// Keys per tile; 0 for the default. Lowered or raised to what the tiles allow: whole register blocks, at most 512.
    /// The decoding path has a fixed one.
    pub tile_k: usize,
    /// Instruction set; one that the machine lacks is replaced by [`Isa::Scalar`].
    pub isa: Isa,
    /// Precision of the products; `f64` ignores it.
    pub precision: Precision,
    /// For decoding: where at most eight rows all see the same keys, read every key and value once, straight from
    /// memory, for all of them. Rounds differently from the tiles that everything else goes through, which is why
    /// the caller chooses it and the number of rows does not.
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

/// Attention of a few rows to some keys, named in the order in which they are to be read: decoding over the best keys of
/// a cache. Keys and values are read where they lie, and later ones are prefetched.
///
/// The rules of [`Attend`] hold for the rows named; the bits of a row depend on its query, on the named keys, values and
/// biases, on their order and on `isa`. The memory is that of [`Attend`], in the scalar definition one element for each
/// named key.
#[derive(Clone, Copy, Debug)]
pub struct AttendChosen<'a, T> {
    /// Queries, one per row; columns `d`.
    pub q: MatRef<'a, T>,
    /// Keys, `n_k × d`.
    pub k: MatRef<'a, T>,
    /// Values, `n_k × d_v`.
    pub v: MatRef<'a, T>,
    /// The rows of `k` and `v` that are attended to.
    pub chosen: &'a [u32],
    /// Factor of the dot products.
    pub scale: T,
    /// Per chosen key, added to its logit; −∞ hides the key.
    pub bias: Option<&'a [T]>,
    /// Instruction set; one that the machine lacks is replaced by [`Isa::Scalar`].
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
