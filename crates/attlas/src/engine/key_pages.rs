//! Pages of cached keys. Each token scores them by a bound or a mean, attends exactly to the keys of the best ones, and
//! to every run of the others at its mean.

use crate::engine::CachedRows;
use crate::group::GroupStream;
use crate::method::RunInfo;
use crate::workspace::Context;
use crate::{MatRef, Real, Result};
use attlas_num::cluster::select_top;
use attlas_num::kernels::{Attend, AttendChosen, Band, Precision, matvec, max, merge_lse};
use attlas_num::par::*;

/// Score of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageScore {
    /// Upper bound of its logits from the least and greatest values of each coordinate.
    Bound,
    /// The logit of its mean.
    Mean,
}

/// Rule that selects the pages to attend exactly.
#[derive(Clone, Copy, Debug)]
pub struct PageRule {
    /// How pages are scored.
    pub score: PageScore,
    /// Keys of a page.
    pub page: usize,
    /// Keys of a run, which becomes one pseudo key if none of its pages is taken; a multiple of the page.
    pub run: usize,
    /// Maximum number of keys in the taken pages.
    pub keys: usize,
    /// Estimated share of the weight of sinks, window and taken pages at which no more pages are taken.
    pub share: f64,
    /// Keys at the start and at the end that are always exact.
    pub sinks: usize,
    /// See `sinks`; the token itself always is.
    pub window: usize,
    /// True if keys that were not taken count as means.
    pub means: bool,
}

/// Summaries of the pages and runs of a cache.
#[derive(Debug)]
pub struct KeyPages<T> {
    rule: PageRule,
    d: usize,
    d_v: usize,
    /// `[page][2d]`: greatest, then least values; or `[page][d]`: means.
    scores: Vec<T>,
    /// `[run][d]` and `[run][d_v]`.
    mean_k: Vec<T>,
    mean_v: Vec<T>,
}

/// Pages, runs or keys of one task; fixed, so that threads cannot change a bit.
const PIECE: usize = 1024;

impl<T: Real> KeyPages<T> {
    /// Makes empty summaries.
    pub fn new(rule: PageRule, d: usize, d_v: usize) -> Self {
        Self { rule, d, d_v, scores: Vec::new(), mean_k: Vec::new(), mean_v: Vec::new() }
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        (self.scores.len() + self.mean_k.len() + self.mean_v.len()) * size_of::<T>()
    }

    fn runs(&self) -> usize {
        self.mean_k.len() / self.d
    }

    /// Summarises the whole runs of `k` and `v` that are not yet known.
    pub fn extend(&mut self, k: MatRef<'_, T>, v: MatRef<'_, T>) {
        let PageRule { page, run, score, .. } = self.rule;
        let share = |count: usize| T::ONE / T::from_usize(count);
        for r in self.runs()..k.rows() / run {
            for first in (r * run..(r + 1) * run).step_by(page) {
                let keys = k.sub_rows(first..first + page);
                match score {
                    PageScore::Mean => push_mean(&mut self.scores, keys, share(page)),
                    PageScore::Bound => {
                        for pick in [T::max, T::min] {
                            let at = self.scores.len();
                            self.scores.extend_from_slice(keys.row(0));
                            for row in keys.iter_rows() {
                                // A NaN stays, so its page is never left out silently.
                                self.scores[at..].iter_mut().zip(row).for_each(|(m, &x)| {
                                    *m = if x.is_nan() || m.is_nan() { T::NAN } else { pick(*m, x) };
                                });
                            }
                        }
                    }
                }
            }
            push_mean(&mut self.mean_k, k.sub_rows(r * run..(r + 1) * run), share(run));
            push_mean(&mut self.mean_v, v.sub_rows(r * run..(r + 1) * run), share(run));
        }
    }

    /// Returns the end of the runs that are far from the last of `n` keys.
    pub fn edge(&self, n: usize) -> usize {
        n.saturating_sub(self.rule.window.max(1)) / self.rule.run * self.rule.run
    }

    /// Attends with one query row per head to the first `n` keys, whose far runs are known, on all threads or on the
    /// calling one alone; returns the number of scores computed.
    #[allow(clippy::too_many_arguments)]
    pub fn attend(
        &self,
        q: MatRef<'_, T>,
        k: MatRef<'_, T>,
        v: MatRef<'_, T>,
        n: usize,
        scale: T,
        parallel: bool,
        cx: Context<'_>,
        out: &mut [T],
        lse: &mut [T],
    ) -> u64 {
        let PageRule { page, run, sinks, means, .. } = self.rule;
        let (heads, d, d_v) = (q.rows(), self.d, self.d_v);
        let edge = self.edge(n);
        let sinks = sinks.min(edge);
        let mut list: Vec<u32> = (0..sinks).chain(edge..n).map(|j| j as u32).collect();
        let always = list.len();
        let chosen = |chosen: &[u32], out: &mut [T], lse: &mut [T]| {
            let isa = cx.schedule.isa;
            AttendChosen { q, k, v, chosen, scale, bias: None, isa }.run(cx.scratch, out, lse);
        };
        chosen(&list, out, lse);
        if edge <= sinks {
            return (heads * always) as u64;
        }
        let taken = self.choose(q, edge / page, scale, lse, parallel, cx);
        list.clear();
        list.extend(taken.iter().flat_map(|&p| ((p * page).max(sinks)..(p + 1) * page).map(|j| j as u32)));

        // Runs without a taken page are whole; the first one also lacks the sinks.
        let runs = edge / run;
        let mut bias = cx.scratch.take::<T>(runs);
        bias.fill(T::from_usize(run).ln());
        let (mut cut_k, mut cut_v, mut cut_bias) = (Vec::new(), Vec::new(), Vec::new());
        if means {
            let mut cut: Vec<usize> = taken.iter().map(|&p| p * page / run).collect();
            cut.extend((0..runs.min(sinks.div_ceil(run))).filter(|_| sinks > 0));
            cut.sort_unstable();
            cut.dedup();
            for r in cut {
                bias[r] = T::NEG_INFINITY;
                let left = |j: &usize| *j >= sinks && taken.binary_search(&(*j / page)).is_err();
                let rows: Vec<usize> = (r * run..(r + 1) * run).filter(left).collect();
                if !rows.is_empty() {
                    let share = T::ONE / T::from_usize(rows.len());
                    push_mean_of(&mut cut_k, k, &rows, share);
                    push_mean_of(&mut cut_v, v, &rows, share);
                    cut_bias.push(T::from_usize(rows.len()).ln());
                }
            }
        }
        let (mean_k, mean_v) =
            (MatRef::new(&self.mean_k, self.runs(), d), MatRef::new(&self.mean_v, self.runs(), d_v));
        let attend = |k: MatRef<'_, T>, v: MatRef<'_, T>, bias: &[T], out: &mut [T], lse: &mut [T]| {
            let job = Attend {
                q,
                k,
                v,
                scale,
                bias: Some(bias),
                band: Band::ALL,
                tile_k: 0,
                isa: cx.schedule.isa,
                precision: Precision::Full,
                decode: true,
                softcap: None,
            };
            job.run(cx.scratch, out, lse);
        };
        let (pieces, smooth) = (list.len().div_ceil(PIECE), if means { runs.div_ceil(PIECE) } else { 0 });
        let parts = pieces + smooth + usize::from(!cut_bias.is_empty());
        let mut part_out = cx.scratch.take::<T>(parts * heads * d_v);
        let mut part_lse = cx.scratch.take::<T>(parts * heads);
        let of_part = |t: usize, out: &mut [T], lse: &mut [T]| {
            if t < pieces {
                chosen(&list[t * PIECE..list.len().min((t + 1) * PIECE)], out, lse);
            } else if t < pieces + smooth {
                let some = (t - pieces) * PIECE..runs.min((t - pieces + 1) * PIECE);
                attend(mean_k.sub_rows(some.clone()), mean_v.sub_rows(some.clone()), &bias[some], out, lse);
            } else {
                let count = cut_bias.len();
                attend(MatRef::new(&cut_k, count, d), MatRef::new(&cut_v, count, d_v), &cut_bias, out, lse);
            }
        };
        let (wide, narrow) = ((heads * d_v).max(1), heads.max(1));
        if parallel {
            let work = part_out.par_chunks_mut(wide).zip(part_lse.par_chunks_mut(narrow));
            work.with_max_len(1).enumerate().for_each(|(t, (out, lse))| of_part(t, out, lse));
        } else {
            let work = part_out.chunks_mut(wide).zip(part_lse.chunks_mut(narrow));
            work.enumerate().for_each(|(t, (out, lse))| of_part(t, out, lse));
        }
        for (part, part_lse) in part_out.chunks_exact(heads * d_v).zip(part_lse.chunks_exact(heads)) {
            for (h, (lse, &lse2)) in lse.iter_mut().zip(part_lse).enumerate() {
                let row = h * d_v..(h + 1) * d_v;
                merge_lse(&mut out[row.clone()], lse, &part[row], lse2);
            }
        }
        let smooth = if means { runs + cut_bias.len() } else { 0 };
        (heads * (always + list.len() + edge / page + smooth)) as u64
    }

    /// Returns the best of the first `count` pages in increasing order. `near` holds the log-sum-exps of the keys that
    /// are always exact.
    fn choose(
        &self,
        q: MatRef<'_, T>,
        count: usize,
        scale: T,
        near: &[T],
        parallel: bool,
        cx: Context<'_>,
    ) -> Vec<usize> {
        let PageRule { score, page, keys, share, .. } = self.rule;
        let width = if score == PageScore::Bound { 2 * self.d } else { self.d };
        let known = MatRef::new(&self.scores, self.scores.len() / width, width);
        let mut logits = cx.scratch.take::<T>(count);
        let mut total = vec![T::ZERO; count];
        let mut covered = 0.0;
        for (q, &near) in q.iter_rows().zip(near) {
            let query: Vec<T> = match score {
                PageScore::Mean => q.iter().map(|&x| x * scale).collect(),
                PageScore::Bound => {
                    let signed = |pick: fn(T, T) -> T| q.iter().map(move |&x| pick(x * scale, T::ZERO));
                    signed(T::max).chain(signed(T::min)).collect()
                }
            };
            let score = |(t, out): (usize, &mut [T])| {
                matvec(known.sub_rows(t * PIECE..t * PIECE + out.len()), &query, out);
            };
            if parallel {
                logits.par_chunks_mut(PIECE).with_max_len(1).enumerate().for_each(score);
            } else {
                logits.chunks_mut(PIECE).enumerate().for_each(score);
            }
            if near.is_nan() {
                total.iter_mut().for_each(|x| *x = T::NAN);
                continue;
            }
            // Shares of the weight, if every key of a page had the page's score.
            let size = T::from_usize(page).ln();
            let top = (max(&logits) + size).max(near);
            logits.iter_mut().for_each(|x| *x = *x + size - top);
            attlas_num::kernels::exp_in_place(&mut logits);
            let rest = (near - top).exp();
            let sum = rest + attlas_num::kernels::sum(&logits);
            covered += (rest / sum).to_f64();
            total.iter_mut().zip(logits.iter()).for_each(|(t, &x)| *t += x / sum);
        }
        let mut best = Vec::new();
        select_top(&total, keys / page, &mut best);
        if share < 1.0 {
            let wanted = share * q.rows() as f64;
            best.sort_by(|&a, &b| total[b].partial_cmp(&total[a]).unwrap_or(std::cmp::Ordering::Equal));
            let enough = best.iter().take_while(|&&p| {
                let short = covered.partial_cmp(&wanted).is_none_or(|order| order.is_lt());
                covered += total[p].to_f64();
                short
            });
            let enough = enough.count();
            best.truncate(enough);
            best.sort_unstable();
        }
        best
    }
}

fn push_mean<T: Real>(to: &mut Vec<T>, rows: MatRef<'_, T>, share: T) {
    let at = to.len();
    to.resize(at + rows.cols(), T::ZERO);
    rows.iter_rows().for_each(|row| to[at..].iter_mut().zip(row).for_each(|(s, &x)| *s += x));
    to[at..].iter_mut().for_each(|x| *x *= share);
}

fn push_mean_of<T: Real>(to: &mut Vec<T>, x: MatRef<'_, T>, rows: &[usize], share: T) {
    let at = to.len();
    to.resize(at + x.cols(), T::ZERO);
    rows.iter().for_each(|&j| to[at..].iter_mut().zip(x.row(j)).for_each(|(s, &x)| *s += x));
    to[at..].iter_mut().for_each(|x| *x *= share);
}

/// A growing cache with its pages.
#[derive(Debug)]
pub(super) struct PagedStream<T> {
    cached: CachedRows<T>,
    known: KeyPages<T>,
}

impl<T: Real> KeyPages<T> {
    /// Makes an empty stream.
    pub fn stream(rule: PageRule, d: usize, d_v: usize) -> Box<dyn GroupStream<T>> {
        Box::new(PagedStream { cached: CachedRows::new(d, d_v), known: KeyPages::new(rule, d, d_v) })
    }
}

impl<T: Real> GroupStream<T> for PagedStream<T> {
    fn push(&mut self, k: MatRef<'_, T>, v: MatRef<'_, T>, _: Context<'_>) -> Result<()> {
        self.cached.append(k, v);
        self.known.extend(self.cached.keys(), self.cached.values());
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
        let (k, v, n) = (self.cached.keys(), self.cached.values(), self.cached.tokens());
        Ok(RunInfo::visited(self.known.attend(q, k, v, n, scale, true, cx, out, lse)))
    }

    fn state_bytes(&self) -> usize {
        self.cached.bytes() + self.known.bytes()
    }
}
