//! The exact near field, chosen keys and a smooth far field of a block of rows, gathered side by side.
//!
//! [`Gathered`] holds the keys, values and biases of one call of the exact kernel. [`RunMeans`] holds the sums of
//! aligned runs of keys; [`RunMeans::append`] turns each run into one pseudo key: the mean of its keys that were not
//! chosen, with the logarithm of their number as its bias.

use crate::workspace::Context;
use attlas_num::kernels::{Attend, Band, Precision, axpy, pages, sq_dist};
use attlas_num::par::*;
use attlas_num::scratch::Buf;
use attlas_num::{MatRef, Real};
use std::ops::Range;

/// Keys and values that the rows of a block attend to, with a bias for each.
#[derive(Debug)]
pub struct Gathered<'p, T> {
    k: Buf<'p, T>,
    v: Buf<'p, T>,
    bias: Buf<'p, T>,
    len: usize,
    d: usize,
    d_v: usize,
}

impl<'p, T: Real> Gathered<'p, T> {
    /// Makes room for `capacity` keys.
    pub fn new(capacity: usize, d: usize, d_v: usize, cx: Context<'p>) -> Self {
        let (k, v) = (cx.scratch.take(capacity * d), cx.scratch.take(capacity * d_v));
        Self { k, v, bias: cx.scratch.take(capacity), len: 0, d, d_v }
    }

    /// Keys held.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if no key is held.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Appends the rows named by `index`, without a bias.
    pub fn append<I>(&mut self, k: MatRef<'_, T>, v: MatRef<'_, T>, index: I)
    where
        I: ExactSizeIterator<Item = usize> + Clone,
    {
        let end = self.len + index.len();
        k.gather_into(index.clone(), &mut self.k[self.len * self.d..end * self.d]);
        v.gather_into(index, &mut self.v[self.len * self.d_v..end * self.d_v]);
        self.bias[self.len..end].fill(T::ZERO);
        self.len = end;
    }

    /// Appends a pseudo key that represents `count` keys with these sums.
    pub fn append_mean(&mut self, k: &[T], v: &[T], count: usize) {
        let (key, value) = (self.len * self.d, self.len * self.d_v);
        write_mean(k, &mut self.k[key..key + self.d], count);
        self.bias[self.len] = write_mean(v, &mut self.v[value..value + self.d_v], count);
        self.len += 1;
    }

    /// Appends a pseudo key with this bias.
    pub fn append_pseudo(&mut self, k: &[T], v: &[T], bias: T) {
        self.k[self.len * self.d..(self.len + 1) * self.d].copy_from_slice(k);
        self.v[self.len * self.d_v..(self.len + 1) * self.d_v].copy_from_slice(v);
        self.bias[self.len] = bias;
        self.len += 1;
    }

    /// The keys held.
    pub fn keys(&self) -> MatRef<'_, T> {
        MatRef::new(&self.k[..self.len * self.d], self.len, self.d)
    }

    /// The values held.
    pub fn values(&self) -> MatRef<'_, T> {
        MatRef::new(&self.v[..self.len * self.d_v], self.len, self.d_v)
    }

    /// The biases of the keys.
    pub fn biases(&self) -> &[T] {
        &self.bias[..self.len]
    }

    /// Attends with the rows of `q` to the keys of the band, on the calling thread.
    #[allow(clippy::too_many_arguments)]
    pub fn attend(
        &self,
        q: MatRef<'_, T>,
        scale: T,
        band: Band,
        precision: Precision,
        cx: Context<'_>,
        out: &mut [T],
        lse: &mut [T],
    ) {
        let job = Attend {
            q,
            k: self.keys(),
            v: self.values(),
            scale,
            bias: Some(&self.bias[..self.len]),
            band,
            tile_k: cx.schedule.tile_k,
            isa: cx.schedule.isa,
            precision,
            decode: false,
            softcap: None,
        };
        job.run(cx.scratch, out, lse);
    }
}

/// Maximum number of parts of a run.
const PARTS_MAX: usize = 4;
/// Minimum number of runs that one task sums up.
const RUNS: usize = 16;
/// Lloyd iterations that split a run.
const ITERS: usize = 4;

/// Sums of keys and of values over aligned runs of `len` keys, each whole run split into `parts` clusters.
#[derive(Debug)]
pub struct RunMeans<T> {
    len: usize,
    parts: usize,
    d: usize,
    d_v: usize,
    /// Part of each key within its run; empty with one part.
    labels: Vec<u8>,
    counts: Vec<u32>,
    /// `[run][part][d]` and `[run][part][d_v]`.
    k: Vec<T>,
    v: Vec<T>,
}

impl<T: Real> RunMeans<T> {
    /// Makes an empty store of runs of `len` keys, each split into `parts`, at most four.
    pub fn new(len: usize, parts: usize, d: usize, d_v: usize) -> Self {
        let parts = parts.clamp(1, PARTS_MAX);
        Self { len, parts, d, d_v, labels: Vec::new(), counts: Vec::new(), k: Vec::new(), v: Vec::new() }
    }

    /// Whole runs held.
    pub fn runs(&self) -> usize {
        self.counts.len() / self.parts
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        (self.k.len() + self.v.len()) * size_of::<T>() + self.labels.len() + 4 * self.counts.len()
    }

    /// Adds the whole runs of `k` and `v` that are not yet held, on all threads. The content of a run depends on its
    /// own keys alone.
    pub fn extend(&mut self, k: MatRef<'_, T>, v: MatRef<'_, T>) {
        let (len, parts, d, d_v) = (self.len, self.parts, self.d, self.d_v);
        let (from, to) = (self.runs(), k.rows() / len);
        if from >= to {
            return;
        }
        pages::reserve(&mut self.k, (to - from) * parts * d);
        pages::reserve(&mut self.v, (to - from) * parts * d_v);
        self.k.resize(to * parts * d, T::ZERO);
        self.v.resize(to * parts * d_v, T::ZERO);
        self.counts.resize(to * parts, 0);
        let counts = self.counts[from * parts..].par_chunks_mut(parts);
        let keys = self.k[from * parts * d..].par_chunks_mut((parts * d).max(1));
        let values = self.v[from * parts * d_v..].par_chunks_mut((parts * d_v).max(1));
        let each = counts.zip(keys.zip(values)).enumerate().with_min_len(RUNS);
        let labels: Vec<Vec<u8>> = each
            .map(|(run, (counts, (key, value)))| {
                let members = (from + run) * len..(from + run + 1) * len;
                if parts == 1 {
                    counts[0] = len as u32;
                    members.for_each(|j| {
                        axpy(T::ONE, k.row(j), key);
                        axpy(T::ONE, v.row(j), value);
                    });
                    return Vec::new();
                }
                let labels = split(k.sub_rows(members.clone()), parts);
                for (j, &part) in members.zip(&labels) {
                    let part = usize::from(part);
                    counts[part] += 1;
                    axpy(T::ONE, k.row(j), &mut key[part * d..][..d]);
                    axpy(T::ONE, v.row(j), &mut value[part * d_v..][..d_v]);
                }
                labels
            })
            .collect();
        self.labels.extend(labels.into_iter().flatten());
    }

    /// Returns the largest number of pseudo keys that `far` keys in up to two ranges give.
    pub fn most(&self, far: usize) -> usize {
        (far / self.len + 4) * self.parts
    }

    /// Appends the means of the keys in `far` other than `chosen`, which is in increasing order. A run that `far` cuts
    /// gives one mean, to which no key outside `far` contributes.
    pub fn append(
        &self,
        k: MatRef<'_, T>,
        v: MatRef<'_, T>,
        far: Range<usize>,
        chosen: &[u32],
        into: &mut Gathered<'_, T>,
    ) {
        let mut sums = Sums::new(self.parts, self.d, self.d_v);
        for (run, taken) in self.runs_of(far, chosen) {
            let chosen = &chosen[taken];
            let parts = self.rest_of(&mut sums, (k, v), run, chosen, |i| {
                (k.row(chosen[i] as usize), v.row(chosen[i] as usize))
            });
            for part in (0..parts).filter(|&part| sums.counts[part] > 0) {
                let (key, value) = sums.part(part);
                into.append_mean(key, value, sums.counts[part]);
            }
        }
    }

    /// Writes the means that `append` appends, and returns their number, at most [`most`](Self::most). The rows of
    /// `chosen` are given in the order of the list: gathered before, they are still in the cache.
    pub fn write(
        &self,
        k: MatRef<'_, T>,
        v: MatRef<'_, T>,
        far: Range<usize>,
        chosen: &[u32],
        (chosen_k, chosen_v): (&[T], &[T]),
        means: Slots<'_, T>,
    ) -> usize {
        let (d, d_v) = (self.d, self.d_v);
        let mut sums = Sums::new(self.parts, d, d_v);
        let mut len = 0;
        for (run, taken) in self.runs_of(far, chosen) {
            let first = taken.start;
            let parts = self.rest_of(&mut sums, (k, v), run, &chosen[taken], |i| {
                (&chosen_k[(first + i) * d..][..d], &chosen_v[(first + i) * d_v..][..d_v])
            });
            for part in (0..parts).filter(|&part| sums.counts[part] > 0) {
                let ((key, value), count) = (sums.part(part), sums.counts[part]);
                write_mean(key, &mut means.k[len * d..][..d], count);
                means.bias[len] = write_mean(value, &mut means.v[len * d_v..][..d_v], count);
                len += 1;
            }
        }
        len
    }

    /// Splits `far` at the borders of runs, each part with the places of its keys in `chosen`.
    fn runs_of(
        &self,
        far: Range<usize>,
        chosen: &[u32],
    ) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
        let (len, mut start) = (self.len, far.start);
        let mut from = chosen.partition_point(|&j| (j as usize) < start);
        std::iter::from_fn(move || {
            let end = ((start / len + 1) * len).min(far.end);
            (start < end).then(|| {
                let run = start..end;
                // No more keys than the run has.
                let rest = &chosen[from..(from + run.len()).min(chosen.len())];
                let taken = from..from + rest.partition_point(|&j| (j as usize) < end);
                (start, from) = (end, taken.end);
                (run, taken)
            })
        })
    }

    /// Sums up the keys of a run other than the `taken` ones, and returns the number of parts; `row` returns key and
    /// value of a taken one.
    fn rest_of<'r>(
        &self,
        sums: &mut Sums<T>,
        (k, v): (MatRef<'_, T>, MatRef<'_, T>),
        run: Range<usize>,
        taken: &[u32],
        row: impl Fn(usize) -> (&'r [T], &'r [T]),
    ) -> usize {
        let (parts, d, d_v) = (self.parts, self.d, self.d_v);
        let (index, Sums { k: key, v: value, counts, .. }) = (run.start / self.len, sums);
        if run.len() == self.len && index < self.runs() {
            key.copy_from_slice(&self.k[index * parts * d..][..parts * d]);
            value.copy_from_slice(&self.v[index * parts * d_v..][..parts * d_v]);
            counts.iter_mut().zip(&self.counts[index * parts..]).for_each(|(c, &n)| *c = n as usize);
            for (i, &j) in taken.iter().enumerate() {
                let part = if parts > 1 { usize::from(self.labels[j as usize]) } else { 0 };
                let row = row(i);
                counts[part] -= 1;
                subtract(&mut key[part * d..][..d], row.0);
                subtract(&mut value[part * d_v..][..d_v], row.1);
            }
            parts
        } else {
            key[..d].fill(T::ZERO);
            value[..d_v].fill(T::ZERO);
            counts[0] = run.len() - taken.len();
            let mut taken = taken.iter().peekable();
            for j in run {
                if taken.next_if(|&&t| t as usize == j).is_none() {
                    add(&mut key[..d], k.row(j));
                    add(&mut value[..d_v], v.row(j));
                }
            }
            1
        }
    }
}

/// Room for keys, values and biases.
#[derive(Debug)]
pub struct Slots<'a, T> {
    /// Keys, a row each.
    pub k: &'a mut [T],
    /// Values, a row each.
    pub v: &'a mut [T],
    /// Biases.
    pub bias: &'a mut [T],
}

/// Sums of the keys and values of the parts of a run, and their numbers.
struct Sums<T> {
    k: Vec<T>,
    v: Vec<T>,
    counts: [usize; PARTS_MAX],
    d: usize,
    d_v: usize,
}

impl<T: Real> Sums<T> {
    fn new(parts: usize, d: usize, d_v: usize) -> Self {
        Self { k: vec![T::ZERO; parts * d], v: vec![T::ZERO; parts * d_v], counts: [0; PARTS_MAX], d, d_v }
    }

    fn part(&self, part: usize) -> (&[T], &[T]) {
        (&self.k[part * self.d..][..self.d], &self.v[part * self.d_v..][..self.d_v])
    }
}

/// Writes the mean of `count` rows with this sum and returns its bias.
fn write_mean<T: Real>(sum: &[T], mean: &mut [T], count: usize) -> T {
    let share = T::ONE / T::from_usize(count);
    mean.iter_mut().zip(sum).for_each(|(x, &s)| *x = s * share);
    T::from_usize(count).ln()
}

/// Returns the part of each key of a run, by k-means: it starts from the key farthest from the mean, then each time
/// from the key farthest from the previous ones.
fn split<T: Real>(k: MatRef<'_, T>, parts: usize) -> Vec<u8> {
    let mut labels = vec![0u8; k.rows()];
    let mut centres: Vec<Vec<T>> = vec![mean_of(k, |_| true).unwrap_or_default()];
    for _ in 0..parts {
        let gap = |j: usize| {
            let gaps = centres.iter().map(|c| sq_dist(k.row(j), c).to_f64());
            gaps.fold(f64::INFINITY, f64::min)
        };
        let far = (0..k.rows()).map(|j| (gap(j), j)).fold((-1.0, 0), |a, b| if b.0 > a.0 { b } else { a });
        centres.push(k.row(far.1).to_vec());
    }
    centres.remove(0);
    for _ in 0..ITERS {
        for (label, x) in labels.iter_mut().zip(k.iter_rows()) {
            let gaps = centres.iter().map(|c| sq_dist(x, c)).enumerate();
            *label = gaps.fold((0, T::INFINITY), |a, b| if b.1 < a.1 { b } else { a }).0 as u8;
        }
        for (part, centre) in centres.iter_mut().enumerate() {
            if let Some(mean) = mean_of(k, |j| usize::from(labels[j]) == part) {
                *centre = mean;
            }
        }
    }
    labels
}

fn add<T: Real>(sum: &mut [T], x: &[T]) {
    sum.iter_mut().zip(x).for_each(|(s, &x)| *s += x);
}

fn subtract<T: Real>(sum: &mut [T], x: &[T]) {
    sum.iter_mut().zip(x).for_each(|(s, &x)| *s -= x);
}

/// Returns the mean of the rows that fulfil a condition, if there are any.
fn mean_of<T: Real>(k: MatRef<'_, T>, condition: impl Fn(usize) -> bool) -> Option<Vec<T>> {
    let (mut sum, mut count) = (vec![T::ZERO; k.cols()], 0);
    for j in (0..k.rows()).filter(|&j| condition(j)) {
        add(&mut sum, k.row(j));
        count += 1;
    }
    (count > 0).then(|| {
        let share = T::ONE / T::from_usize(count);
        sum.iter_mut().for_each(|x| *x *= share);
        sum
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Workspace;
    use attlas_num::rng::StreamKey;

    #[test]
    fn means_stand_for_every_key_that_was_not_chosen() {
        let (n, d, d_v) = (150, 5, 3);
        let mut rng = StreamKey::new(1).rng();
        let (mut k, mut v) = (vec![0.0f64; n * d], vec![0.0f64; n * d_v]);
        rng.fill_normal(&mut k);
        rng.fill_normal(&mut v);
        let (k, v) = (MatRef::new(&k, n, d), MatRef::new(&v, n, d_v));
        let ws = Workspace::single().unwrap();
        for parts in [1, 2, 4] {
            let mut means = RunMeans::new(16, parts, d, d_v);
            means.extend(k.sub_rows(0..40), v.sub_rows(0..40));
            means.extend(k, v);
            assert_eq!(means.runs(), 9);
            for far in [0..150, 3..97, 20..30, 7..7] {
                let chosen: Vec<u32> =
                    far.clone().filter(|j| j % 3 == 1 || (32..48).contains(j)).map(|j| j as u32).collect();
                let mut all = Gathered::new(means.most(far.len()), d, d_v, ws.context());
                means.append(k, v, far.clone(), &chosen, &mut all);
                let (rows_k, rows_v): (Vec<f64>, Vec<f64>) = (
                    chosen.iter().flat_map(|&j| k.row(j as usize)).copied().collect(),
                    chosen.iter().flat_map(|&j| v.row(j as usize)).copied().collect(),
                );
                let most = means.most(far.len());
                let mut room = (vec![f64::NAN; most * d], vec![f64::NAN; most * d_v], vec![f64::NAN; most]);
                let slots = Slots { k: &mut room.0, v: &mut room.1, bias: &mut room.2 };
                let count = means.write(k, v, far.clone(), &chosen, (&rows_k, &rows_v), slots);
                assert_eq!(count, all.len());
                assert_eq!(&room.0[..count * d], all.keys().data());
                assert_eq!(&room.1[..count * d_v], all.values().data());
                assert_eq!(&room.2[..count], all.biases());
                // Counts times means are the sums over the remaining keys.
                let counts: Vec<f64> = all.bias[..all.len()].iter().map(|b| b.exp()).collect();
                let total: f64 = counts.iter().sum();
                assert!((total - (far.len() - chosen.len()) as f64).abs() < 1e-9);
                for c in 0..d_v {
                    let got: f64 = (0..all.len()).map(|i| counts[i] * all.values().at(i, c)).sum();
                    let want: f64 =
                        far.clone().filter(|&j| !chosen.contains(&(j as u32))).map(|j| v.at(j, c)).sum();
                    assert!((got - want).abs() < 1e-10, "{parts} parts of {far:?}: {got}, expected {want}");
                }
            }
        }
    }
}
