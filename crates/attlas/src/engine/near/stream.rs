//! Decoding with a near field: the latest keys stay in a window, and keys that leave it go to the method's own stream.

use super::choose::heaviest;
use super::rows::{TILE, attend_means, mean_into, merge};
use super::{Choice, decide, relative_square};
use crate::engine::exact_few_rows;
use crate::group::GroupStream;
use crate::near::{Near, Rest};
use crate::workspace::Context;
use crate::{MatRef, Problem, Real, Result, RunInfo, merge_lse};
use std::fmt;

/// Makes an empty stream of the method.
pub(super) type Inner<T> = Box<dyn Fn() -> Option<Box<dyn GroupStream<T>>> + Send>;

/// Attends to sinks, window and heavy keys exactly, and to the others by the method's stream.
pub(super) struct NearStream<T> {
    near: Near,
    unseen: Option<T>,
    /// Distance between the positions at which heavy keys are chosen again.
    block: usize,
    make: Inner<T>,
    inner: Box<dyn GroupStream<T>>,
    d: usize,
    d_v: usize,
    /// Tokens pushed.
    len: usize,
    sinks: Pairs<T>,
    /// Cached keys after the sinks, oldest first: the window, or all of them if heavy keys are chosen.
    cached: Pairs<T>,
    /// Number of keys after the sinks that have left the cache.
    gone: usize,
    /// Number of far keys in the method's stream, without heavy ones.
    given: usize,
    /// Far keys before this one, counted after the sinks, are in the stream or heavy.
    settled: usize,
    heavy: Pairs<T>,
    /// The block in which the heavy keys were chosen.
    chosen_in: Option<usize>,
    recent: Recent<T>,
    rest: Runs<T>,
    guard: Option<Guard>,
}

/// Far part of each head, decided anew in every tile of positions. All keys must be cached.
#[derive(Debug)]
struct Guard {
    tile: Option<usize>,
    errors: Vec<[f64; 3]>,
    choices: Vec<Choice>,
}

impl<T> fmt::Debug for NearStream<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NearStream").field("near", &self.near).field("len", &self.len).finish_non_exhaustive()
    }
}

impl<T: Real> NearStream<T> {
    /// Makes a stream; `None` if the method has none.
    pub(super) fn new(near: Near, unseen: Option<f64>, p: &Problem, make: Inner<T>) -> Option<Self> {
        let inner = make()?;
        Some(Self {
            near,
            unseen: unseen.filter(|_| near.rest == Rest::Mean).map(T::from_f64),
            block: near.block_of(p.n_k),
            make,
            inner,
            d: p.d,
            d_v: p.d_v,
            len: 0,
            sinks: Pairs::default(),
            cached: Pairs::default(),
            gone: 0,
            given: 0,
            settled: 0,
            heavy: Pairs::default(),
            chosen_in: None,
            recent: Recent { queries: Vec::new(), heads: p.group_size(), most: near.recent, next: 0 },
            rest: Runs::default(),
            guard: (near.guard && near.heavy > 0).then(|| Guard {
                tile: None,
                errors: vec![[0.0; 3]; p.group_size()],
                choices: vec![Choice::Method; p.group_size()],
            }),
        })
    }

    /// Adds the representation of the far keys to rows that hold the near ones.
    fn add_far(
        &mut self,
        q: MatRef<'_, T>,
        scale: T,
        out: &mut [T],
        lse: &mut [T],
        info: &mut RunInfo,
        cx: Context<'_>,
    ) -> Result<()> {
        let (d, d_v, heads) = (self.d, self.d_v, q.rows());
        let mut far = PartialOutput::new(heads, d_v);
        let part = self.inner.attend(q, scale, &mut far.out, &mut far.lse, cx)?;
        *info = std::mem::take(info).merge(RunInfo { empty_rows: 0, ..part });
        // As in a prompt, the means of a tile of rows cover the keys that its first row sees.
        let position = self.len - 1;
        let first = (position - position % TILE).max(self.near.sinks + self.near.window);
        let limit = self.given - (position - first).min(self.given);
        let means = |bias: T| {
            let mut part = PartialOutput::new(heads, d_v);
            let visited = self.rest.attend(q, limit, d, d_v, bias, scale, cx, &mut part.out, &mut part.lse);
            (part, visited as u64)
        };
        if let Some(bias) = self.unseen {
            let (rest, visited) = means(bias);
            merge(&mut far.out, &mut far.lse, &rest.out, &rest.lse);
            info.keys_visited += visited;
        }
        let Some(guard) = &mut self.guard else {
            merge(out, lse, &far.out, &far.lse);
            return Ok(());
        };
        let fresh = guard.tile != Some(position / TILE);
        let rest = (fresh || guard.choices.contains(&Choice::Means)).then(|| means(T::ZERO));
        info.keys_visited += rest.as_ref().map_or(0, |r| r.1);
        let with = |h: usize, part: &PartialOutput<T>| {
            let (mut o, mut l) = (out[h * d_v..(h + 1) * d_v].to_vec(), lse[h]);
            merge_lse(&mut o, &mut l, &part.out[h * d_v..(h + 1) * d_v], part.lse[h]);
            o
        };
        if let Some((rest, _)) = rest.as_ref().filter(|_| fresh) {
            guard.tile = Some(position / TILE);
            let mut exact = PartialOutput::new(heads, d_v);
            let mut more = PartialOutput::new(heads, d_v);
            let (k, v) = self.sinks.rows(0..self.sinks.len(d), d, d_v);
            exact_few_rows(q, k, v, scale, cx, &mut exact.out, &mut exact.lse);
            let (k, v) = self.cached.rows(0..self.cached.len(d), d, d_v);
            exact_few_rows(q, k, v, scale, cx, &mut more.out, &mut more.lse);
            merge(&mut exact.out, &mut exact.lse, &more.out, &more.lse);
            info.keys_visited += (self.len * heads) as u64;
            for h in 0..heads {
                let want = &exact.out[h * d_v..(h + 1) * d_v];
                let error = |o: &[T]| relative_square(o, want);
                let found =
                    [error(&with(h, &far)), error(&with(h, rest)), error(&out[h * d_v..(h + 1) * d_v])];
                guard.choices[h] = decide(&mut guard.errors[h], found);
            }
        }
        for (h, choice) in guard.choices.iter().enumerate() {
            let part = match (choice, &rest) {
                (Choice::Method, _) => &far,
                (Choice::Means, Some((rest, _))) => rest,
                _ => continue,
            };
            let row = h * d_v..(h + 1) * d_v;
            merge_lse(&mut out[row.clone()], &mut lse[h], &part.out[row], part.lse[h]);
        }
        info.fallback_rows += guard.choices.iter().filter(|c| **c != Choice::Method).count() as u64;
        Ok(())
    }

    /// Returns the number of keys after the sinks that have left the window.
    fn far_len(&self) -> usize {
        self.len.saturating_sub(self.near.window).saturating_sub(self.near.sinks)
    }

    /// Pushes the far keys that the method's stream does not yet have.
    fn settle(&mut self, cx: Context<'_>) -> Result<()> {
        let far = self.far_len();
        if far > self.settled {
            let rows = self.settled - self.gone..far - self.gone;
            let (k, v) = self.cached.rows(rows, self.d, self.d_v);
            self.inner.push(k, v, cx)?;
            if self.unseen.is_some() || self.guard.is_some() {
                self.rest.push(k, v);
            }
            self.given += k.rows();
            self.settled = far;
        }
        if self.near.heavy == 0 {
            // Moving the remaining keys costs as much as the window is long, so it is done once in that number of
            // tokens.
            let done = self.settled - self.gone;
            if done >= self.near.window.max(TILE) {
                self.cached.drop_front(done, self.d, self.d_v);
                self.gone = self.settled;
            }
        }
        Ok(())
    }

    /// Chooses heavy keys anew and pushes all others to a fresh stream.
    fn choose(&mut self, scale: T, cx: Context<'_>) -> Result<u64> {
        let far = self.far_len();
        let means = self.recent.means(self.d);
        let means = MatRef::new(&means, self.recent.heads, self.d);
        let (k, v) = self.cached.rows(0..far, self.d, self.d_v);
        let keys: Vec<usize> = (0..far).collect();
        let heavy = heaviest(means, k, &keys, self.near.heavy, scale, cx);
        let mut taken = heavy.iter().copied().peekable();
        let left: Vec<usize> = keys.into_iter().filter(|j| taken.next_if_eq(j).is_none()).collect();
        let gather = |index: &[usize]| {
            let mut pairs =
                Pairs { k: vec![T::ZERO; index.len() * self.d], v: vec![T::ZERO; index.len() * self.d_v] };
            k.gather_into(index.iter().copied(), &mut pairs.k);
            v.gather_into(index.iter().copied(), &mut pairs.v);
            pairs
        };
        let others = gather(&left);
        self.heavy = gather(&heavy);
        if let Some(fresh) = (self.make)() {
            self.inner = fresh;
        }
        self.rest = Runs::default();
        let (k, v) = others.rows(0..left.len(), self.d, self.d_v);
        if k.rows() > 0 {
            self.inner.push(k, v, cx)?;
            if self.unseen.is_some() || self.guard.is_some() {
                self.rest.push(k, v);
            }
        }
        (self.given, self.settled) = (left.len(), far);
        Ok((far * self.recent.heads) as u64)
    }
}

impl<T: Real> GroupStream<T> for NearStream<T> {
    fn push(&mut self, k: MatRef<'_, T>, v: MatRef<'_, T>, cx: Context<'_>) -> Result<()> {
        for (k, v) in k.iter_rows().zip(v.iter_rows()) {
            let to = if self.len < self.near.sinks { &mut self.sinks } else { &mut self.cached };
            to.k.extend_from_slice(k);
            to.v.extend_from_slice(v);
            self.len += 1;
        }
        // Heavy keys are chosen with the next query, before the method's stream gets any key.
        if self.near.heavy == 0 { self.settle(cx) } else { Ok(()) }
    }

    fn attend(
        &mut self,
        q: MatRef<'_, T>,
        scale: T,
        out: &mut [T],
        lse: &mut [T],
        cx: Context<'_>,
    ) -> Result<RunInfo> {
        let (d, d_v, heads) = (self.d, self.d_v, q.rows());
        let mut info = RunInfo::default();
        if self.near.heavy > 0 {
            self.recent.push(q);
            let block = self.len.saturating_sub(1) / self.block;
            if self.chosen_in != Some(block) && self.far_len() > 0 {
                info.keys_visited += self.choose(scale, cx)?;
                self.chosen_in = Some(block);
            }
            self.settle(cx)?;
        }
        let (k, v) = self.sinks.rows(0..self.sinks.len(d), d, d_v);
        exact_few_rows(q, k, v, scale, cx, out, lse);
        let mut more = vec![T::ZERO; out.len()];
        let mut more_lse = vec![T::NEG_INFINITY; heads];
        let mut seen = k.rows();
        let window = self.far_len() - self.gone..self.cached.len(d);
        for (pairs, rows) in [(&self.cached, window), (&self.heavy, 0..self.heavy.len(d))] {
            let (k, v) = pairs.rows(rows, d, d_v);
            if k.rows() > 0 {
                exact_few_rows(q, k, v, scale, cx, &mut more, &mut more_lse);
                merge(out, lse, &more, &more_lse);
                seen += k.rows();
            }
        }
        info.keys_visited += (seen * heads) as u64;
        if self.given > 0 {
            self.add_far(q, scale, out, lse, &mut info, cx)?;
        }
        Ok(info)
    }

    fn state_bytes(&self) -> usize {
        let own =
            [&self.sinks, &self.cached, &self.heavy].iter().map(|p| p.k.len() + p.v.len()).sum::<usize>();
        let rest = self.rest.means.k.len()
            + self.rest.means.v.len()
            + self.rest.tail.k.len()
            + self.rest.tail.v.len();
        self.inner.state_bytes() + (own + rest + self.recent.queries.len()) * size_of::<T>()
    }
}

/// Outputs and log-sum-exp of one row per head.
struct PartialOutput<T> {
    out: Vec<T>,
    lse: Vec<T>,
}

impl<T: Real> PartialOutput<T> {
    fn new(heads: usize, d_v: usize) -> Self {
        Self { out: vec![T::ZERO; heads * d_v], lse: vec![T::NEG_INFINITY; heads] }
    }
}

/// Keys and values, row after row.
#[derive(Debug, Default)]
struct Pairs<T> {
    k: Vec<T>,
    v: Vec<T>,
}

impl<T: Real> Pairs<T> {
    fn len(&self, d: usize) -> usize {
        self.k.len() / d
    }

    fn rows(&self, rows: std::ops::Range<usize>, d: usize, d_v: usize) -> (MatRef<'_, T>, MatRef<'_, T>) {
        let n = rows.len();
        (
            MatRef::new(&self.k[rows.start * d..rows.end * d], n, d),
            MatRef::new(&self.v[rows.start * d_v..rows.end * d_v], n, d_v),
        )
    }

    fn drop_front(&mut self, n: usize, d: usize, d_v: usize) {
        self.k.drain(..n * d);
        self.v.drain(..n * d_v);
    }
}

/// The latest queries of each head, for their mean.
#[derive(Debug)]
struct Recent<T> {
    /// Queries of all heads, token after token.
    queries: Vec<T>,
    heads: usize,
    most: usize,
    next: usize,
}

impl<T: Real> Recent<T> {
    fn push(&mut self, q: MatRef<'_, T>) {
        let token = self.heads * q.cols();
        if self.queries.len() < self.most * token {
            q.iter_rows().for_each(|row| self.queries.extend_from_slice(row));
            return;
        }
        let slot = &mut self.queries[self.next * token..(self.next + 1) * token];
        slot.chunks_exact_mut(q.cols()).zip(q.iter_rows()).for_each(|(s, row)| s.copy_from_slice(row));
        self.next = (self.next + 1) % self.most;
    }

    fn means(&self, d: usize) -> Vec<T> {
        let mut means = vec![T::ZERO; self.heads * d];
        for token in self.queries.chunks_exact(self.heads * d) {
            means.iter_mut().zip(token).for_each(|(m, &x)| *m += x);
        }
        let count = (self.queries.len() / (self.heads * d).max(1)).max(1);
        means.iter_mut().for_each(|m| *m /= T::from_f64(count as f64));
        means
    }
}

/// Means of runs of far keys in order of arrival, and the keys of the last runs.
#[derive(Debug)]
struct Runs<T> {
    means: Pairs<T>,
    /// The keys after run `first`, at most three runs of them.
    tail: Pairs<T>,
    first: usize,
}

impl<T> Default for Runs<T> {
    fn default() -> Self {
        let none = || Pairs { k: Vec::new(), v: Vec::new() };
        Self { means: none(), tail: none(), first: 0 }
    }
}

impl<T: Real> Runs<T> {
    fn push(&mut self, k: MatRef<'_, T>, v: MatRef<'_, T>) {
        let (d, d_v) = (k.cols(), v.cols());
        for (k, v) in k.iter_rows().zip(v.iter_rows()) {
            self.tail.k.extend_from_slice(k);
            self.tail.v.extend_from_slice(v);
            let n = self.tail.len(d);
            if n.is_multiple_of(TILE) {
                let (k, v) = self.tail.rows(n - TILE..n, d, d_v);
                let (at_k, at_v) = (self.means.k.len(), self.means.v.len());
                self.means.k.resize(at_k + d, T::ZERO);
                self.means.v.resize(at_v + d_v, T::ZERO);
                mean_into(k, &mut self.means.k[at_k..]);
                mean_into(v, &mut self.means.v[at_v..]);
                if n == 3 * TILE {
                    self.tail.drop_front(TILE, d, d_v);
                    self.first += 1;
                }
            }
        }
    }

    /// Attends to the means of the first `limit` keys, at most a run fewer than there are.
    #[allow(clippy::too_many_arguments)]
    fn attend(
        &self,
        q: MatRef<'_, T>,
        limit: usize,
        d: usize,
        d_v: usize,
        bias: T,
        scale: T,
        cx: Context<'_>,
        out: &mut [T],
        lse: &mut [T],
    ) -> usize {
        let whole = limit / TILE;
        let rows = (whole - self.first) * TILE..limit - self.first * TILE;
        let (k, v) = self.tail.rows(rows, d, d_v);
        attend_means(
            q,
            &self.means.k[..whole * d],
            &self.means.v[..whole * d_v],
            k,
            v,
            bias,
            scale,
            cx,
            out,
            lse,
        )
    }
}
