//! One token: scores and chooses clusters, attends exactly to the keys of the best and to each other cluster as one
//! token.

use super::state::{KeyClusters, Level};
use super::{Far, Multipole};
use crate::engine::Turn;
use crate::workspace::Context;
use crate::{MatRef, Real};
use attlas_num::cluster::{Counts, Cut};
use attlas_num::kernels::{
    Attend, AttendChosen, Band, Precision, axpy, dot, exp_in_place, matvec, merge_lse, softmax_in_place,
};
use attlas_num::par::*;
use std::ops::Range;

/// Clusters that a task scores, clusters that it attends to, and keys that it attends to at once; fixed, so that
/// results do not depend on the number of threads.
pub(super) const SCORED: usize = 1024;
pub(super) const PIECE: usize = 512;
pub(super) const MEMBERS: usize = 1024;

/// Keys visible to a query: the first `len` keys and values, and the clusters of some of them.
#[derive(Clone, Copy)]
pub(super) struct ClusteredKeys<'a, T> {
    pub(super) k: MatRef<'a, T>,
    pub(super) v: MatRef<'a, T>,
    pub(super) len: usize,
    pub(super) state: &'a KeyClusters<T>,
}

impl Multipole {
    /// Attends with one query row per head at `position`; returns the number of logits computed.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn attend<T: Real>(
        &self,
        cache: ClusteredKeys<'_, T>,
        q: MatRef<'_, T>,
        turn: Option<&Turn>,
        position: f64,
        scale: T,
        cx: Context<'_>,
        out: &mut [T],
        lse: &mut [T],
    ) -> u64 {
        let mut scoring = cx.scratch.take::<T>(q.rows() * q.cols());
        q.gather_into(0..q.rows(), &mut scoring);
        if let Some(turn) = turn {
            let shift = self.params.rope_offset as f64 - position;
            scoring.chunks_exact_mut(q.cols()).for_each(|row| turn.apply(shift, row));
        }
        let scoring = MatRef::new(&scoring, q.rows(), q.cols());
        if !self.params.per_head {
            return self.attend_together(cache, q, scoring, scale, cx, out, lse);
        }
        let d_v = cache.v.cols();
        (0..q.rows())
            .zip(out.chunks_exact_mut(d_v).zip(lse.chunks_exact_mut(1)))
            .map(|(h, (out, lse))| {
                let one = h..h + 1;
                self.attend_together(
                    cache,
                    q.sub_rows(one.clone()),
                    scoring.sub_rows(one),
                    scale,
                    cx,
                    out,
                    lse,
                )
            })
            .sum()
    }

    /// Attends with heads that choose their clusters together.
    #[allow(clippy::too_many_arguments)]
    fn attend_together<T: Real>(
        &self,
        cache: ClusteredKeys<'_, T>,
        q: MatRef<'_, T>,
        scoring: MatRef<'_, T>,
        scale: T,
        cx: Context<'_>,
        out: &mut [T],
        lse: &mut [T],
    ) -> u64 {
        let ClusteredKeys { k, v, len, state } = cache;
        let budget = self.params.budget;
        let token = Token { q, k, v, scale, cx };
        let mut coarse = None;
        let mut fine = match state.coarse() {
            None => Field::all(state.fine(), scoring, scale, budget),
            Some(level) => {
                let budget = (budget as f64 * self.params.coarse_factor) as usize;
                let field = coarse.insert(Field::all(level, scoring, scale, budget));
                field.take(budget);
                let mut children = field.members(&field.taken(0..field.len()));
                children.sort_unstable();
                Field::some(state.fine(), children, scoring, scale)
            }
        };
        fine.take(budget);

        let sinks = self.params.sinks.min(len);
        let recent = (self.params.sinks + state.clustered()).min(len);
        let always: Vec<u32> = (0..sinks).chain(recent.max(sinks)..len).map(|j| j as u32).collect();
        let far = self.params.far == Far::Monopole;
        // In one parallel section: threads already awake need not be woken again.
        let ((), parts) = join(
            || token.attend(&always, out, lse),
            || {
                let coarse = coarse.iter().filter(|_| far).flat_map(|field| field.attend(&token, false, far));
                fine.attend(&token, true, far).into_iter().chain(coarse).collect::<Vec<PartialOutput<T>>>()
            },
        );
        parts.iter().for_each(|part| part.merge_into(out, lse));
        let keys = always.len() + parts.iter().map(|part| part.keys).sum::<usize>();
        let clusters = fine.len() + coarse.as_ref().map_or(0, Field::len);
        (q.rows() * (keys + clusters)) as u64
    }
}

/// The query heads of a token and the cache before them.
#[derive(Clone, Copy)]
struct Token<'a, T> {
    q: MatRef<'a, T>,
    k: MatRef<'a, T>,
    v: MatRef<'a, T>,
    scale: T,
    cx: Context<'a>,
}

impl<T: Real> Token<'_, T> {
    /// Attends exactly to the keys in `members`, in pieces of fixed length merged in order.
    fn attend(&self, members: &[u32], out: &mut [T], lse: &mut [T]) {
        let Self { q, k, v, scale, cx } = *self;
        let (rows, d_v) = (q.rows(), v.cols());
        let run = |chosen: &[u32], out: &mut [T], lse: &mut [T]| {
            let job = AttendChosen { q, k, v, chosen, scale, bias: None, isa: cx.schedule.isa };
            job.run(cx.scratch, out, lse);
        };
        if members.len() <= MEMBERS {
            return run(members, out, lse);
        }
        let pieces = members.len().div_ceil(MEMBERS);
        let mut parts = cx.scratch.take::<T>(pieces * rows * d_v);
        let mut part_lse = cx.scratch.take::<T>(pieces * rows);
        parts
            .par_chunks_mut(rows * d_v)
            .zip(part_lse.par_chunks_mut(rows))
            .zip(members.par_chunks(MEMBERS))
            .with_max_len(1)
            .for_each(|((out, lse), chosen)| run(chosen, out, lse));
        out.fill(T::ZERO);
        lse.fill(T::NEG_INFINITY);
        for (part, part_lse) in parts.chunks_exact(rows * d_v).zip(part_lse.chunks_exact(rows)) {
            merge_rows(out, lse, part, part_lse);
        }
    }
}

/// Output of every head over some keys and clusters.
struct PartialOutput<T> {
    out: Vec<T>,
    lse: Vec<T>,
    /// Keys that were attended to exactly.
    keys: usize,
}

impl<T: Real> PartialOutput<T> {
    fn merge_into(&self, out: &mut [T], lse: &mut [T]) {
        merge_rows(out, lse, &self.out, &self.lse);
    }
}

/// Merges the rows of a second partial attention into those of the first.
fn merge_rows<T: Real>(out: &mut [T], lse: &mut [T], out2: &[T], lse2: &[T]) {
    let d_v = out.len() / lse.len().max(1);
    for (h, (lse, &lse2)) in lse.iter_mut().zip(lse2).enumerate() {
        let row = h * d_v..(h + 1) * d_v;
        merge_lse(&mut out[row.clone()], lse, &out2[row], lse2);
    }
}

/// Scored clusters of one level.
struct Field<'a, T> {
    level: &'a Level<T>,
    /// The clusters; all if absent.
    ids: Option<Vec<u32>>,
    /// Logits of the centroids, head after head.
    logits: Vec<T>,
    /// Histograms of the clusters' keys by logit, with a single head.
    counts: Option<Vec<Counts>>,
    /// Scores that rank the clusters: the sum over heads of their weight per key. With one head the logits, which give
    /// the same order.
    scores: Option<Vec<T>>,
    /// The clusters that are attended exactly.
    cut: Option<Cut>,
}

impl<'a, T: Real> Field<'a, T> {
    /// Scores all clusters of a level, from which clusters with at most `budget` keys in total will be taken.
    fn all(level: &'a Level<T>, q: MatRef<'_, T>, scale: T, budget: usize) -> Self {
        let m = level.len();
        let mut logits = vec![T::ZERO; q.rows() * m];
        let alone = q.rows() == 1;
        let mut counts = None;
        for (q, logits) in q.iter_rows().zip(logits.chunks_exact_mut(m.max(1))) {
            let score = |(t, out): (usize, &mut [T])| {
                let first = t * SCORED;
                matvec(level.keys().sub_rows(first..first + out.len()), q, out);
                out.iter_mut().for_each(|x| *x *= scale);
                alone.then(|| Counts::new(out, first, |c| level.count(c), budget))
            };
            // Score every chunk before collecting: an `Option` of all counts would stop at the first `None`.
            let of_chunks: Vec<Option<Counts>> = match m > SCORED {
                true => logits.par_chunks_mut(SCORED).with_max_len(1).enumerate().map(score).collect(),
                false => logits.chunks_mut(SCORED).enumerate().map(score).collect(),
            };
            counts = of_chunks.into_iter().collect();
        }
        Self { level, ids: None, logits, counts, scores: None, cut: None }
    }

    /// Scores the clusters `ids` of a level.
    fn some(level: &'a Level<T>, ids: Vec<u32>, q: MatRef<'_, T>, scale: T) -> Self {
        let keys = level.keys();
        let logits = q
            .iter_rows()
            .flat_map(|q| ids.iter().map(|&c| scale * dot(q, keys.row(c as usize))).collect::<Vec<T>>());
        let (logits, counts) = (logits.collect(), None);
        Self { level, logits, ids: Some(ids), counts, scores: None, cut: None }
    }

    fn len(&self) -> usize {
        self.ids.as_ref().map_or(self.level.len(), Vec::len)
    }

    fn cluster(&self, place: usize) -> usize {
        self.ids.as_ref().map_or(place, |ids| ids[place] as usize)
    }

    fn scores(&self) -> &[T] {
        self.scores.as_ref().unwrap_or(&self.logits)
    }

    /// Takes the best clusters while their keys fit into `budget`.
    fn take(&mut self, budget: usize) {
        if self.len() == 0 || budget == 0 {
            return;
        }
        self.scores = (self.logits.len() > self.len()).then(|| self.sum_of_weights());
        let keys = |place| self.level.count(self.cluster(place));
        self.cut = Some(match &self.counts {
            Some(counts) => Cut::counted(self.scores(), counts, keys, budget),
            None => Cut::within(self.scores(), keys, budget),
        });
    }

    /// Returns the taken clusters among these places.
    fn taken(&self, places: Range<usize>) -> Vec<u32> {
        let mut taken = vec![0; places.len() + 1];
        let scores = &self.scores()[places.clone()];
        let len = self.cut.map_or(0, |cut| cut.places(scores, places.start, &mut taken));
        taken.truncate(len);
        taken
    }

    /// Returns the members of the clusters at these places, in memory order.
    fn members(&self, places: &[u32]) -> Vec<u32> {
        let mut members = Vec::new();
        for &place in places {
            self.level.append_members(self.cluster(place as usize), &mut members);
        }
        members
    }

    /// Writes the logits of the clusters at `places` plus the logarithms of their numbers of keys.
    fn add_log_counts(&self, places: Range<usize>, logits: &[T], to: &mut [T]) {
        let counts = self.level.log_counts();
        match &self.ids {
            // Without a look-up per cluster, the loop vectorises.
            None => {
                let counts = &counts[places];
                to.iter_mut().zip(logits).zip(counts).for_each(|((x, &s), &c)| *x = s + c);
            }
            Some(ids) => {
                let ids = &ids[places];
                to.iter_mut().zip(logits).zip(ids).for_each(|((x, &s), &i)| *x = s + counts[i as usize]);
            }
        }
    }

    fn sum_of_weights(&self) -> Vec<T> {
        let m = self.len();
        let mut scores = vec![T::ZERO; m];
        let mut weights = vec![T::ZERO; m];
        for logits in self.logits.chunks_exact(m) {
            self.add_log_counts(0..m, logits, &mut weights);
            let log_total = softmax_in_place(&mut weights);
            weights.iter_mut().zip(logits).for_each(|(w, &s)| *w = s - log_total);
            exp_in_place(&mut weights);
            axpy(T::ONE, &weights, &mut scores);
        }
        scores
    }

    /// Attends with a token, one piece of the clusters at a time: exactly to the keys of the taken ones (`near`), to
    /// each of the others as one token (`far`).
    fn attend(&self, token: &Token<'_, T>, near: bool, far: bool) -> Vec<PartialOutput<T>> {
        let (heads, d_v) = (token.q.rows(), token.v.cols());
        let of_piece = |t: usize| {
            let places = t * PIECE..self.len().min((t + 1) * PIECE);
            let (out, lse) = (vec![T::ZERO; heads * d_v], vec![T::NEG_INFINITY; heads]);
            let mut part = PartialOutput { out, lse, keys: 0 };
            let taken = self.taken(places.clone());
            if near {
                let members = self.members(&taken);
                token.attend(&members, &mut part.out, &mut part.lse);
                part.keys = members.len();
            }
            if far {
                self.add_others(token, places, &taken, &mut part);
            }
            part
        };
        match self.len().div_ceil(PIECE) {
            pieces @ (0 | 1) => (0..pieces).map(of_piece).collect(),
            pieces => (0..pieces).into_par_iter().with_max_len(1).map(of_piece).collect(),
        }
    }

    /// Adds attention to the clusters at `places` other than `taken`, each as one token.
    fn add_others(
        &self,
        token: &Token<'_, T>,
        places: Range<usize>,
        taken: &[u32],
        part: &mut PartialOutput<T>,
    ) {
        let (m, d_v, cx) = (self.len(), token.v.cols(), token.cx);
        let mut bias = cx.scratch.take::<T>(places.len());
        let mut o = cx.scratch.take::<T>(d_v);
        let rows = part.out.chunks_exact_mut(d_v).zip(&mut part.lse);
        for (logits, (out, lse)) in self.logits.chunks_exact(m).zip(rows) {
            self.add_log_counts(places.clone(), &logits[places.clone()], &mut bias);
            taken.iter().for_each(|&place| bias[place as usize - places.start] = T::NEG_INFINITY);
            let values = self.level.values();
            let mut l = [T::NEG_INFINITY];
            // The logits are known: keys without columns pass them through the bias.
            let (q, isa, scale) = (MatRef::new(&[], 1, 0), cx.schedule.isa, T::ONE);
            match &self.ids {
                None => {
                    let v = values.sub_rows(places.clone());
                    let k = MatRef::new(&[], v.rows(), 0);
                    let job = Attend {
                        q,
                        k,
                        v,
                        scale,
                        bias: Some(&bias),
                        band: Band::ALL,
                        tile_k: 0,
                        isa,
                        precision: Precision::Full,
                        decode: true,
                        softcap: None,
                    };
                    job.run(cx.scratch, &mut o, &mut l);
                }
                Some(ids) => {
                    let k = MatRef::new(&[], values.rows(), 0);
                    let (chosen, bias) = (&ids[places.clone()], Some(&bias[..]));
                    AttendChosen { q, k, v: values, chosen, scale, bias, isa }
                        .run(cx.scratch, &mut o, &mut l);
                }
            }
            merge_lse(out, lse, &o, l[0]);
        }
    }
}
