//! Decoding: scores of all keys by their ranking coordinates, attention to the chosen ones in place.

use super::{Basis, GroupSelect, Loki, RANK_PIECE, larger};
use crate::group::{GroupIndex, GroupStream};
use crate::method::RunInfo;
use crate::workspace::Context;
use crate::{MatRef, Problem, Real, Result};
use attlas_num::cluster::{Counts, Cut};
use attlas_num::kernels::{AttendChosen, matvec, merge_lse, pages};
use attlas_num::par::*;
use attlas_num::{Mat, linalg};

/// Keys among which a task attends to the chosen ones; fixed, so that results do not depend on the number of threads.
const ATTEND_PIECE: usize = 2048;

impl Loki {
    /// Chooses keys by `scores`, like `choose` but on all threads. `counts` may hold the histograms of the scores.
    pub(super) fn keep<T: Real>(&self, scores: &[T], counts: Option<&[Counts]>) -> Cut {
        let n = scores.len();
        if self.keeps_all(n) {
            return Cut::ALL;
        }
        match counts {
            Some(counts) => Cut::counted(scores, counts, |_| 1, self.budget(n)),
            None => Cut::largest(scores, self.budget(n)),
        }
    }
}

/// The cache of one key head: ranking coordinates, and separately the rest of every key with its value.
#[derive(Debug)]
pub(super) struct Split<T> {
    plan: Loki,
    /// Map applied to queries: rows that give the ranking coordinates, then those that complete them.
    q_map: Mat<T>,
    a_k: Mat<T>,
    /// The remaining columns of the rotation; `None` if whole keys are stored beside the ranking columns.
    k_rest: Option<Mat<T>>,
    d_v: usize,
    len: usize,
    ranked: Vec<T>,
    /// Remaining coordinates of each key followed by its value, contiguous in memory.
    rest: Vec<T>,
}

/// Appends the rows of `x · m` to `out`.
fn append_product<T: Real>(x: MatRef<'_, T>, m: &Mat<T>, out: &mut Vec<T>) {
    let start = out.len();
    pages::reserve(out, x.rows() * m.cols());
    out.resize(start + x.rows() * m.cols(), T::ZERO);
    if m.cols() > 0 {
        linalg::gemm(T::ONE, linalg::Op::N(x), linalg::Op::N(m.as_ref()), &mut out[start..], m.cols(), false);
    }
}

/// One query of a head: its scores of all keys, and its coordinates for the rest of a key.
#[derive(Clone, Copy)]
struct Query<'a, T> {
    scores: &'a [T],
    rest: &'a [T],
}

impl<T: Real> Split<T> {
    /// Creates an empty cache.
    pub(super) fn new(plan: Loki, p: &Problem, index: GroupIndex) -> Self {
        let basis = &plan.bases[index.kv_head];
        // The columns after the ranking ones complete kept keys; if the ranking columns are no part of the key, it is
        // read whole.
        let (q_map, k_rest) = match plan.params.basis {
            Basis::Pca => {
                let rest = Mat::from_fn(p.d, p.d - plan.rank, |i, j| basis.rotation[(i, plan.rank + j)]);
                (basis.rotation.transpose(), Some(rest.cast()))
            }
            Basis::QkOptimal => (basis.a_q.transpose(), None),
        };
        let (q_map, a_k) = (q_map.cast(), basis.a_k.cast());
        Self { plan, q_map, a_k, k_rest, d_v: p.d_v, len: 0, ranked: Vec::new(), rest: Vec::new() }
    }

    /// Attends with some heads to the keys that `kept` selects by the scores `by`: pieces of the cache in parallel,
    /// merged in order. Returns the number of keys.
    #[allow(clippy::too_many_arguments)]
    fn attend_kept(
        &self,
        kept: Cut,
        by: &[T],
        heads: &[Query<'_, T>],
        scale: T,
        cx: Context<'_>,
        out: &mut [T],
        lse: &mut [T],
    ) -> usize {
        let (n, d_v, count) = (self.len, self.d_v, heads.len());
        out.fill(T::ZERO);
        lse.fill(T::NEG_INFINITY);
        let Some(stride) = self.rest.len().checked_div(n) else { return 0 };
        let (k, v) = self.rest.split_at(stride - d_v);
        let view = |x, cols| MatRef::with_stride(x, n, cols, stride).expect("rows of the cache are whole");
        let (k, v) = (view(&self.rest, k.len()), view(v, d_v));
        // With the ranking coordinates split off, their contribution to a logit is already known.
        let split = self.k_rest.is_some();
        let pieces = n.div_ceil(ATTEND_PIECE);
        let mut part = cx.scratch.take::<T>(pieces * count * d_v);
        let mut part_lse = cx.scratch.take::<T>(pieces * count);
        let found = part
            .par_chunks_mut(count * d_v)
            .zip(part_lse.par_chunks_mut(count))
            .enumerate()
            .with_max_len(1)
            .map(|(t, (part, part_lse))| {
                let keys = t * ATTEND_PIECE..n.min((t + 1) * ATTEND_PIECE);
                let mut chosen = cx.scratch.take::<u32>(keys.len() + 1);
                let found = kept.places(&by[keys.clone()], keys.start, &mut chosen);
                let chosen = &chosen[..found];
                let mut bias = cx.scratch.take::<T>(if split { found } else { 0 });
                for ((o, l), head) in part.chunks_exact_mut(d_v).zip(part_lse.chunks_exact_mut(1)).zip(heads)
                {
                    bias.iter_mut().zip(chosen).for_each(|(b, &j)| *b = scale * head.scores[j as usize]);
                    let (q, bias) = (MatRef::new(head.rest, 1, head.rest.len()), split.then_some(&bias[..]));
                    AttendChosen { q, k, v, chosen, scale, bias, isa: cx.schedule.isa }.run(cx.scratch, o, l);
                }
                found
            })
            .sum();
        for (part, part_lse) in part.chunks_exact(count * d_v).zip(part_lse.chunks_exact(count)) {
            for i in 0..count {
                let row = i * d_v..(i + 1) * d_v;
                merge_lse(&mut out[row.clone()], &mut lse[i], &part[row], part_lse[i]);
            }
        }
        found
    }
}

impl<T: Real> GroupStream<T> for Split<T> {
    fn push(&mut self, k: MatRef<'_, T>, v: MatRef<'_, T>, _: Context<'_>) -> Result<()> {
        append_product(k, &self.a_k, &mut self.ranked);
        let mut completed = Vec::new();
        let rest = match &self.k_rest {
            Some(m) => {
                append_product(k, m, &mut completed);
                MatRef::new(&completed, k.rows(), m.cols())
            }
            None => k,
        };
        pages::reserve(&mut self.rest, v.rows() * (rest.cols() + self.d_v));
        for (j, v) in v.iter_rows().enumerate() {
            self.rest.extend_from_slice(rest.row(j));
            self.rest.extend_from_slice(v);
        }
        self.len += k.rows();
        Ok(())
    }

    fn attend(
        &mut self,
        q: MatRef<'_, T>,
        scale: T,
        out: &mut [T],
        lse: &mut [T],
        cx: Context<'_>,
    ) -> Result<RunInfo> {
        let (heads, n, r, d_v) = (q.rows(), self.len, self.a_k.cols(), self.d_v);
        let width = self.q_map.rows();
        let mut mapped = cx.scratch.take::<T>(heads * width);
        q.iter_rows()
            .zip(mapped.chunks_exact_mut(width))
            .for_each(|(q, mapped)| matvec(self.q_map.as_ref(), q, mapped));
        let mut scores = cx.scratch.take::<T>(heads * n);
        let keys = MatRef::new(&self.ranked, n, r);
        // Count scores while they are in cache; if heads choose together, their maxima are counted later.
        let together = self.plan.params.group_select == GroupSelect::GroupMax && heads > 1;
        let (counted, budget) = (!together && !self.plan.keeps_all(n), self.plan.budget(n));
        let rank = |(h, q): (usize, &[T])| -> Vec<Counts> {
            let scores = &mut scores[h * n..(h + 1) * n];
            let pieces = scores.par_chunks_mut(RANK_PIECE).with_max_len(1).enumerate();
            let counts = pieces.map(|(piece, out)| {
                let first = piece * RANK_PIECE;
                matvec(keys.sub_rows(first..first + out.len()), &q[..r], out);
                counted.then(|| Counts::new(out, first, |_| 1, budget))
            });
            counts.collect::<Option<_>>().unwrap_or_default()
        };
        let counts: Vec<Vec<Counts>> = mapped.chunks_exact(width).enumerate().map(rank).collect();
        let queries: Vec<Query<'_, T>> = (0..heads)
            .map(|h| {
                let rest =
                    if self.k_rest.is_some() { &mapped[h * width + r..(h + 1) * width] } else { q.row(h) };
                Query { scores: &scores[h * n..(h + 1) * n], rest }
            })
            .collect();
        let mut kept = 0;
        if together {
            let mut best = cx.scratch.take_copy::<T>(queries[0].scores);
            for other in &queries[1..] {
                best.iter_mut().zip(other.scores).for_each(|(a, &b)| *a = larger(*a, b));
            }
            kept =
                heads * self.attend_kept(self.plan.keep(&best, None), &best, &queries, scale, cx, out, lse);
        } else {
            let rows = out.chunks_exact_mut(d_v).zip(lse.chunks_exact_mut(1));
            for ((head, counts), (out, lse)) in queries.chunks_exact(1).zip(&counts).zip(rows) {
                let by = head[0].scores;
                kept += self.attend_kept(self.plan.keep(by, Some(counts)), by, head, scale, cx, out, lse);
            }
        }
        Ok(RunInfo {
            rank: Some(r),
            figures: [("kept_keys", kept as f64 / heads.max(1) as f64)].into(),
            ..RunInfo::visited((heads * n + kept) as u64)
        })
    }

    fn state_bytes(&self) -> usize {
        (self.ranked.len() + self.rest.len()) * size_of::<T>()
    }
}
