//! Attention of some rows over some keys with any pair hidden: the kernel for blocks of sorted rows.
//!
//! One product gives the logits, then each row has a softmax over the keys it sees, and a second product gives the
//! outputs. The bits of a row depend on its own query, on the keys from the first to the last it sees, and on the start
//! of the tile.

use crate::workspace::Context;
use attlas_num::kernels::{Op, axpy, gemm, softmax_in_place};
use attlas_num::{MatRef, Real};
use std::ops::Range;

/// Logits held at one time, unless a row is longer.
const TILE_LEN: usize = 1 << 15;
/// Rows processed together.
const ROWS: Range<usize> = 8..64;

/// Attends with every row of `q` to the keys that it sees: `see(row, logits)` returns their range, and may set logits
/// in it to −∞. A row that sees nothing gives zeros and −∞. Keys that a row does not see cannot change it, even if they
/// are NaN.
#[allow(clippy::too_many_arguments)]
pub fn attend_tile<T: Real>(
    q: MatRef<'_, T>,
    k: MatRef<'_, T>,
    v: MatRef<'_, T>,
    scale: T,
    cx: Context<'_>,
    mut see: impl FnMut(usize, &mut [T]) -> Range<usize>,
    out: &mut [T],
    lse: &mut [T],
) {
    let (n, d_v, isa) = (k.rows(), v.cols(), cx.schedule.isa);
    if n == 0 {
        out.fill(T::ZERO);
        lse.fill(T::NEG_INFINITY);
        return;
    }
    let rows = tile_rows(n);
    let mut logits = cx.scratch.take::<T>(rows.min(q.rows()) * n);
    // Zero times NaN is NaN, so such values are added separately, to the rows that see them. The loop has no early
    // exit, so that it vectorises.
    let finite = |row: &[T]| row.iter().fold(true, |so_far, x| so_far & x.is_finite());
    let spoilt: Vec<usize> = (0..n).filter(|&j| !finite(v.row(j))).collect();
    let clean = (!spoilt.is_empty()).then(|| {
        let mut clean = v.to_mat();
        spoilt.iter().for_each(|&j| clean.row_mut(j).fill(T::ZERO));
        clean
    });
    let values = clean.as_ref().map_or(v, |c| c.as_ref());
    for first in (0..q.rows()).step_by(rows) {
        let block = first..(first + rows).min(q.rows());
        let logits = &mut logits[..block.len() * n];
        gemm(isa, scale, Op::N(q.sub_rows(block.clone())), Op::T(k), T::ZERO, logits, n, cx.scratch);
        let mut late = Vec::new();
        for (i, row) in block.clone().zip(logits.chunks_exact_mut(n)) {
            let seen = see(i, row);
            let visible = |j: &&usize| seen.contains(*j) && row[**j] != T::NEG_INFINITY;
            late.extend(spoilt.iter().filter(visible).map(|&j| (i, j)));
            row[..seen.start].fill(T::ZERO);
            row[seen.end..].fill(T::ZERO);
            lse[i] = softmax_in_place(&mut row[seen]);
        }
        let weights = MatRef::new(logits, block.len(), n);
        let out_block = &mut out[block.start * d_v..block.end * d_v];
        gemm(isa, T::ONE, Op::N(weights), Op::N(values), T::ZERO, out_block, d_v, cx.scratch);
        for (i, j) in late {
            axpy(weights.at(i - first, j), v.row(j), &mut out[i * d_v..(i + 1) * d_v]);
        }
    }
}

fn tile_rows(n: usize) -> usize {
    (TILE_LEN / n.max(1)).clamp(ROWS.start, ROWS.end)
}

/// Index of the keys of a tile by a code, such as the number of their earlier block.
#[derive(Debug)]
pub struct CodeIndex {
    /// Last entry of each slot, or `NONE`.
    slots: Vec<u32>,
    entries: Vec<Entry>,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    code: u32,
    key: u32,
    next: u32,
}

const NONE: u32 = u32::MAX;

impl CodeIndex {
    /// Makes an empty index for about `len` entries.
    pub fn new(len: usize) -> Self {
        Self { slots: vec![NONE; (2 * len).next_power_of_two()], entries: Vec::with_capacity(len) }
    }

    fn slot(&self, code: u32) -> usize {
        // Fibonacci hashing spreads consecutive codes over all slots.
        (u64::from(code.wrapping_mul(0x9e37_79b9)) as usize >> 7) & (self.slots.len() - 1)
    }

    /// Records that the key at place `key` of the tile has `code`.
    pub fn insert(&mut self, code: u32, key: usize) {
        let slot = self.slot(code);
        self.entries.push(Entry { code, key: key as u32, next: self.slots[slot] });
        self.slots[slot] = self.entries.len() as u32 - 1;
    }

    /// Calls `f` with every key that has `code`.
    pub fn for_each(&self, code: u32, mut f: impl FnMut(usize)) {
        let mut at = self.slots[self.slot(code)];
        while let Some(entry) = self.entries.get(at as usize) {
            if entry.code == code {
                f(entry.key as usize);
            }
            at = entry.next;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testkit::{Case, assert_rows_close, reference_masked};
    use crate::{Problem, Workspace};

    #[test]
    fn hidden_pairs_are_not_seen_even_as_nan() {
        let p = Problem { d_v: 5, ..Problem::new(1, 70, 6).with_lens(150, 70) };
        let case = Case::gaussian(p, 3);
        let sees = |i: usize, j: usize| (i % 7..i % 7 + 3 + i / 3).contains(&j) && !(i + j).is_multiple_of(4);
        let (want, want_lse) = reference_masked(&case, sees);
        let ws = Workspace::single().unwrap();
        let run = |k: &[f64], v: &[f64]| {
            let (mut o, mut lse) = (vec![f64::NAN; 150 * 5], vec![f64::NAN; 150]);
            attend_tile(
                MatRef::new(&case.q, 150, 6),
                MatRef::new(k, 70, 6),
                MatRef::new(v, 70, 5),
                p.scale,
                ws.context(),
                |i, s| {
                    (0..70).filter(|&j| !sees(i, j)).for_each(|j| s[j] = f64::NEG_INFINITY);
                    i % 7..(i % 7 + 3 + i / 3).min(70)
                },
                &mut o,
                &mut lse,
            );
            (o, lse)
        };
        let (o, lse) = run(&case.k, &case.v);
        assert_rows_close(&o, &want, 1e-12, "outputs");
        assert_rows_close(&lse, &want_lse, 1e-12, "log-sum-exp");
        let (mut k, mut v) = (case.k.clone(), case.v.clone());
        k[30 * 6..31 * 6].fill(f64::NAN);
        v[30 * 5..31 * 5].fill(f64::NAN);
        let (spoilt, _) = run(&k, &v);
        for i in 0..150 {
            let (got, was) = (&spoilt[i * 5..(i + 1) * 5], &o[i * 5..(i + 1) * 5]);
            assert!(if sees(i, 30) { got.iter().all(|x| x.is_nan()) } else { got == was }, "row {i}");
        }
        let (spoilt, _) = run(&case.k, &v);
        assert!((0..150).all(|i| spoilt[i * 5].is_nan() == sees(i, 30)));
    }

    #[test]
    fn the_index_finds_every_key_of_a_code() {
        let mut index = CodeIndex::new(8);
        for key in 0..500 {
            index.insert(key as u32 % 37 * 1024, key);
        }
        for code in 0..40u32 {
            let mut found = Vec::new();
            index.for_each(code * 1024, |key| found.push(key));
            found.sort_unstable();
            assert_eq!(found, (0..500).filter(|key| key % 37 == code as usize).collect::<Vec<_>>());
        }
    }
}
