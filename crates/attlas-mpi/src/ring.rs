//! Ring schedule: keys and values travel round a ring of processes.
//!
//! In step `s` process `p` has the keys of process `p − s`, attends to them with its own queries, and merges by
//! log-sum-exp; meanwhile they travel to `p + 1` and the next ones arrive from `p − 1`. A method runs on one rectangle
//! at a time: some queries and the keys of one piece. With a causal mask the rectangle of the same piece has the mask,
//! those of earlier pieces have none, and later ones are skipped.
//!
//! A method draws random numbers separately for each rectangle, with a seed derived from the method's seed and the two
//! pieces; a single rectangle uses the seed itself. If a method reads a few of many keys for every row, the rectangles
//! of a row share that number: without a mask, those of all pieces in proportion to their lengths; with a causal mask,
//! those of the earlier pieces in the same half under recursive halving of the sequence, as in the methods themselves.
//!
//! Liu, Zaharia and Abbeel, *Ring Attention with Blockwise Transformers* (2023); the two stripes of a process are those of
//! striped and zigzag layouts.

use crate::attend::{Answer, Parts, Rows, number, rectangle, starts, zeros};
use crate::{Element, Layout, Transport, Wire};
use attlas::{Mask, Method, Options, Problem, Result, RunInfo, Spread, TensorRef, Workspace};
use attlas_num::kernels::pages;
use std::ops::Range;

/// Attends with a method whose parts over disjoint keys merge.
pub(crate) fn ring<T: Element>(
    t: &dyn Transport,
    p: &Problem,
    method: &Method,
    options: &Options,
    x: &Parts<'_, T>,
    wire: Wire,
    mut rows: Rows<T>,
    ws: &mut Workspace,
) -> Result<Answer<T>> {
    let (q_layout, k_layout) = (x.q.layout(), x.k.layout());
    let own = q_layout.pieces(t.rank());
    let own_at = starts(&own);
    let q = x.q.local()?;
    let mut info = RunInfo::default();
    let mut failed = None;
    let shares = Shares::new(p.mask, k_layout);
    pass_blocks(t, p, x, wire, &mut |owner, k, v, progress| {
        let pieces = k_layout.pieces(owner);
        for (piece, at) in pieces.iter().zip(starts(&pieces)) {
            for (mine, mine_at) in own.iter().zip(&own_at) {
                if failed.is_some() || p.mask == Mask::Causal && piece.start > mine.start {
                    continue;
                }
                let same = p.mask == Mask::Causal && piece.start == mine.start;
                let lens: Option<Vec<usize>> = x.key_lens.map(|lens| {
                    lens.iter().map(|n| n.saturating_sub(piece.start).min(piece.len())).collect()
                });
                if lens.as_ref().is_some_and(|l| l.iter().all(|&n| n == 0)) {
                    continue;
                }
                let mask = if same { Mask::Causal } else { Mask::None };
                let part = Problem { mask, ..*p };
                let options = seeded(method, options, mine.start, piece.start);
                let options = shares.budgets(method, &options, mine.start, piece);
                let queries = q.rows(*mine_at..mine_at + mine.len());
                let (k, v) = (k.rows(at..at + piece.len()), v.rows(at..at + piece.len()));
                let at = *mine_at..mine_at + mine.len();
                match rectangle(&mut rows, at, &part, method, &options, queries, k, v, lens.as_deref(), ws) {
                    Ok(done) => info = std::mem::take(&mut info).merge(done),
                    Err(e) => failed = Some(e),
                }
                progress();
            }
        }
    })?;
    if let Some(error) = failed {
        return Err(error);
    }
    clear_padding(p, x, &own, &own_at, &mut rows);
    // Rows are empty where no part saw a key, not where one part did not.
    info.empty_rows = rows.clear_empty();
    Ok(rows.answer(method.claims.lse, info))
}

/// Attends with a method whose rows use the first keys and those around their position: each piece collects these from
/// the passing blocks, and is one problem at the end.
pub(crate) fn window<T: Element>(
    t: &dyn Transport,
    p: &Problem,
    method: &Method,
    options: &Options,
    (first, last): (&str, &str),
    x: &Parts<'_, T>,
    wire: Wire,
    mut rows: Rows<T>,
    ws: &mut Workspace,
) -> Result<Answer<T>> {
    let (q_layout, k_layout) = (x.q.layout(), x.k.layout());
    let own = q_layout.pieces(t.rank());
    let own_at = starts(&own);
    let sinks = number(method, options, first).unwrap_or(0).min(p.n_k);
    let window = number(method, options, last).unwrap_or(p.n_k);
    // Positions of keys and of queries are aligned at their ends.
    let shift = p.n_k as isize - p.n_q as isize;
    let mut kept: Vec<SeenKeys<T>> = own
        .iter()
        .map(|piece| {
            let at = |i: usize| i as isize + shift;
            let low = (at(piece.start) - window.min(isize::MAX as usize / 4) as isize + 1).max(0) as usize;
            let high = match p.mask {
                Mask::Causal => at(piece.end),
                Mask::None => at(piece.end).saturating_add_unsigned(window - 1),
            };
            let high = high.clamp(0, p.n_k as isize) as usize;
            SeenKeys::new(p, [0..sinks.min(low).min(high), low.min(high)..high])
        })
        .collect();
    pass_blocks(t, p, x, wire, &mut |owner, k, v, _| {
        let pieces = k_layout.pieces(owner);
        for (piece, at) in pieces.iter().zip(starts(&pieces)) {
            kept.iter_mut().for_each(|kept| kept.take(piece, at, k, v));
        }
    })?;
    let q = x.q.local()?;
    let mut info = RunInfo::default();
    for ((piece, &at), kept) in own.iter().zip(&own_at).zip(&kept) {
        // Without a mask, keys after the last query need queries at their positions: zeros, whose rows are dropped.
        let end = (piece.end as isize + shift).max(0) as usize;
        let behind = kept.ranges[1].end.saturating_sub(end);
        let mut queries = Vec::with_capacity(p.batch * p.n_heads * (piece.len() + behind) * p.d);
        for (b, h) in (0..p.batch).flat_map(|b| (0..p.n_heads).map(move |h| (b, h))) {
            let head = q.head(b, h);
            (at..at + piece.len()).for_each(|i| queries.extend_from_slice(head.row(i)));
            queries.resize(queries.len() + behind * p.d, T::ZERO);
        }
        let step = piece.len() + behind;
        let queries = TensorRef::bhnd(&queries, [p.batch, p.n_heads, step, p.d])?;
        let (k, v) = kept.tensors(p)?;
        let lens: Option<Vec<usize>> = x.key_lens.map(|lens| lens.iter().map(|&n| kept.valid(n)).collect());
        let own = at..at + piece.len();
        let done = rectangle(&mut rows, own, p, method, options, queries, k, v, lens.as_deref(), ws)?;
        info = info.merge(done);
    }
    clear_padding(p, x, &own, &own_at, &mut rows);
    // Rows are empty where no part saw a key, not where one part did not.
    info.empty_rows = rows.clear_empty();
    Ok(rows.answer(method.claims.lse, info))
}

/// Keys visible to the rows of one piece: some of the first, and a run.
#[derive(Debug)]
struct SeenKeys<T> {
    ranges: [Range<usize>; 2],
    k: Vec<T>,
    v: Vec<T>,
}

impl<T: Element> SeenKeys<T> {
    fn new(p: &Problem, ranges: [Range<usize>; 2]) -> Self {
        let rows = p.batch * p.n_kv_heads * (ranges[0].len() + ranges[1].len());
        Self { ranges, k: vec![T::ZERO; rows * p.d], v: vec![T::ZERO; rows * p.d_v] }
    }

    fn len(&self) -> usize {
        self.ranges[0].len() + self.ranges[1].len()
    }

    /// Returns how many of the kept keys precede token `n`.
    fn valid(&self, n: usize) -> usize {
        self.ranges.iter().map(|r| n.saturating_sub(r.start).min(r.len())).sum()
    }

    /// Keeps the needed keys of a piece whose rows begin at `at`.
    fn take(&mut self, piece: &Range<usize>, at: usize, k: TensorRef<'_, T>, v: TensorRef<'_, T>) {
        let len = self.len();
        let [batch, heads, ..] = k.dims();
        let mut before = 0;
        for range in self.ranges.clone() {
            let tokens = range.start.max(piece.start)..range.end.min(piece.end);
            for (x, store) in [(k, &mut self.k), (v, &mut self.v)] {
                let cols = x.dims()[3];
                for (b, h) in (0..batch).flat_map(|b| (0..heads).map(move |h| (b, h))) {
                    let head = x.head(b, h);
                    for token in tokens.clone() {
                        let to = ((b * heads + h) * len + before + token - range.start) * cols;
                        store[to..to + cols].copy_from_slice(head.row(at + token - piece.start));
                    }
                }
            }
            before += range.len();
        }
    }

    fn tensors(&self, p: &Problem) -> Result<(TensorRef<'_, T>, TensorRef<'_, T>)> {
        Ok((
            TensorRef::bhnd(&self.k, [p.batch, p.n_kv_heads, self.len(), p.d])?,
            TensorRef::bhnd(&self.v, [p.batch, p.n_kv_heads, self.len(), p.d_v])?,
        ))
    }
}

/// Returns the options with the seed of a rectangle, if the method draws random numbers.
fn seeded(method: &Method, options: &Options, query: usize, key: usize) -> Options {
    let draws = !method.claims.deterministic && method.params.iter().any(|p| p.name == "seed");
    if !draws || (query, key) == (0, 0) {
        return options.clone();
    }
    let seed = options.get("seed").and_then(|s| s.to_string().parse::<u64>().ok()).unwrap_or(0);
    // Uses positions of pieces, not their indices: they identify rectangles on any number of processes.
    let mut x = seed ^ (query as u64).rotate_left(40) ^ (key as u64).rotate_left(8);
    for _ in 0..2 {
        x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^= x >> 31;
    }
    // Options from files store numbers as floating point, which limits the bits.
    options.clone().with("seed", x >> 12)
}

/// The pieces of all processes, and their shares of a row's budget of keys.
struct Shares {
    mask: Mask,
    /// Pieces in the order of tokens.
    pieces: Vec<Range<usize>>,
}

impl Shares {
    fn new(mask: Mask, layout: Layout) -> Self {
        let mut pieces: Vec<Range<usize>> =
            (0..layout.processes()).flat_map(|rank| layout.pieces(rank)).collect();
        pieces.sort_by_key(|piece| piece.start);
        Self { mask, pieces }
    }

    /// Returns the index of the piece that begins at a token.
    fn place(&self, start: usize) -> usize {
        self.pieces.partition_point(|piece| piece.start < start)
    }

    /// Returns the number of keys of all pieces that share with `piece` the budget of a row of the piece at `start`.
    fn together(&self, start: usize, piece: &Range<usize>) -> usize {
        let (mine, own) = (self.place(start), self.place(piece.start));
        if self.mask == Mask::None || mine == own {
            let all =
                if mine == own && self.mask == Mask::Causal { own..own + 1 } else { 0..self.pieces.len() };
            return self.pieces[all].iter().map(Range::len).sum();
        }
        let level = (mine ^ own).ilog2();
        let earlier = self.pieces.iter().enumerate().take(mine).filter(|(i, _)| (mine ^ i).ilog2() == level);
        earlier.map(|(_, piece)| piece.len()).sum()
    }

    /// Returns the options of a rectangle, with its share of a row's budget.
    fn budgets(&self, method: &Method, options: &Options, start: usize, piece: &Range<usize>) -> Options {
        share(method, options, piece.len(), self.together(start, piece))
    }
}

/// Returns the options for `keys` of the `all` keys that share a row's budget.
pub(crate) fn share(method: &Method, options: &Options, keys: usize, all: usize) -> Options {
    let Spread::Ring { shared, .. } = method.claims.spread else { return options.clone() };
    if keys == all || all == 0 {
        return options.clone();
    }
    shared.iter().fold(options.clone(), |options, param| match number(method, &options, param) {
        Some(most) => {
            let part = (most.min(all) as u128 * keys as u128).div_ceil(all as u128) as usize;
            options.with(param, part)
        }
        None => options,
    })
}

/// Work on the keys and values of one process; it may call the last argument to advance messages.
type Visit<'v, T> = dyn FnMut(usize, TensorRef<'_, T>, TensorRef<'_, T>, &dyn Fn()) + 'v;

/// Sends this process's keys and values round the ring and visits those of all others, its own first.
fn pass_blocks<T: Element>(
    t: &dyn Transport,
    p: &Problem,
    x: &Parts<'_, T>,
    wire: Wire,
    visit: &mut Visit<'_, T>,
) -> Result<()> {
    let (rank, size, layout) = (t.rank(), t.size(), x.k.layout());
    let groups = p.batch * p.n_kv_heads;
    let mut current: Vec<T> = Vec::new();
    pages::reserve(&mut current, x.k.data().len() + x.v.data().len());
    current.extend_from_slice(x.k.data());
    current.extend_from_slice(x.v.data());
    wire.round(&mut current);
    let mut next: Vec<T> = Vec::new();
    let (mut packed, mut came): (Vec<u8>, Vec<u8>) = (Vec::new(), Vec::new());
    for step in 0..size {
        let owner = (rank + size - step) % size;
        let rows = layout.rows(owner);
        let (k, v) = current.split_at(groups * rows * p.d);
        let k = TensorRef::bhnd(k, [p.batch, p.n_kv_heads, rows, p.d])?;
        let v = TensorRef::bhnd(v, [p.batch, p.n_kv_heads, rows, p.d_v])?;
        if step + 1 == size {
            visit(owner, k, v, &|| ());
            break;
        }
        let count = groups * layout.rows((owner + size - 1) % size) * (p.d + p.d_v);
        if next.len() != count {
            next = zeros(count);
        }
        let (to, from) = ((rank + 1) % size, (rank + size - 1) % size);
        let mut work = |progress: &dyn Fn()| visit(owner, k, v, progress);
        let send = wire.pack(&current, &mut packed);
        match wire {
            Wire::Full => t.exchange(to, send, from, bytemuck::cast_slice_mut(&mut next), &mut work),
            Wire::Bf16 => {
                came.resize(wire.bytes::<T>(count), 0);
                t.exchange(to, send, from, &mut came, &mut work);
                wire.unpack(&came, &mut next);
            }
        }
        std::mem::swap(&mut current, &mut next);
    }
    Ok(())
}

/// With a causal mask, queries past the last valid key are padding.
fn clear_padding<T: Element>(
    p: &Problem,
    x: &Parts<'_, T>,
    own: &[Range<usize>],
    own_at: &[usize],
    rows: &mut Rows<T>,
) {
    let Some(lens) = x.key_lens.filter(|_| p.mask == Mask::Causal) else { return };
    for (b, &len) in lens.iter().enumerate() {
        for (piece, at) in own.iter().zip(own_at) {
            let valid = len.saturating_sub(piece.start).min(piece.len());
            rows.clear(b, p.n_heads, at + valid..at + piece.len());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Sharded, Threads, attend, layouts};
    use attlas::registry;
    use attlas_num::rng::StreamKey;

    /// Returns the log-sum-exps of all rows and the keys that they visited.
    fn run(p: &Problem, id: &str, options: &Options, processes: usize) -> (Vec<f64>, u64) {
        let method = registry::method(id).unwrap();
        let draw = |name: &str, heads: usize, n: usize, cols: usize| -> Vec<f64> {
            let mut rng = StreamKey::new(1).named(name).rng();
            (0..heads * n * cols).map(|_| rng.normal()).collect()
        };
        let q = draw("queries", p.n_heads, p.n_q, p.d);
        let k = draw("keys", p.n_kv_heads, p.n_k, p.d);
        let v = draw("values", p.n_kv_heads, p.n_k, p.d_v);
        let [ql, kl] = layouts(p, method, options, processes);
        let parts = Threads::run(processes, |t| {
            let cut = |x: &[f64], heads, n, cols, layout| {
                Sharded::cut(TensorRef::bhnd(x, [1, heads, n, cols]).unwrap(), layout, t.rank()).unwrap()
            };
            let q = cut(&q, p.n_heads, p.n_q, p.d, ql);
            let (k, v) = (cut(&k, p.n_kv_heads, p.n_k, p.d, kl), cut(&v, p.n_kv_heads, p.n_k, p.d_v, kl));
            let parts = Parts { q: &q, k: &k, v: &v, key_lens: None };
            let mut ws = Workspace::single().unwrap();
            let answer = attend(t, p, method, options, &parts, Wire::Full, &mut ws).unwrap();
            let lse = Sharded::new(answer.lse.unwrap(), [1, p.n_heads, 1], ql, t.rank()).unwrap();
            (lse.gather(t), answer.info.keys_visited)
        });
        let visited = parts.iter().map(|(_, visited)| visited).sum();
        (parts.into_iter().next().unwrap().0, visited)
    }

    #[test]
    fn rows_read_as_many_keys_on_any_number_of_processes() {
        let options = Options::new().with("block", 16).with("samples", 32).with("n_min", 8);
        for id in ["hyper", "kdeformer"] {
            for p in [Problem::new(2, 512, 8), Problem::new(2, 512, 8).causal()] {
                let (_, alone) = run(&p, id, &options, 1);
                for processes in [2, 4] {
                    let (_, spread) = run(&p, id, &options, processes);
                    let ratio = spread as f64 / alone as f64;
                    assert!((0.8..1.15).contains(&ratio), "{id} {:?} {processes}: {ratio}", p.mask);
                }
            }
        }
    }

    #[test]
    fn shared_samples_leave_normalisers_unbiased() {
        const SEEDS: usize = 300;
        let p = Problem::new(1, 64, 4).with_lens(32, 64);
        let (exact, _) = run(&p, "exact", &Options::new(), 1);
        let options = Options::new().with("block", 8).with("samples", 16).with("n_min", 0);
        let mut mean = vec![0.0; p.n_q];
        for seed in 0..SEEDS {
            let (lse, _) = run(&p, "hyper", &options.clone().with("seed", seed), 2);
            mean.iter_mut().zip(lse.iter().zip(&exact)).for_each(|(m, (l, e))| *m += (l - e).exp());
        }
        let all = mean.iter().sum::<f64>() / (SEEDS * p.n_q) as f64;
        assert!((all - 1.0).abs() < 0.02, "{all}");
        assert!(mean.iter().all(|m| (m / SEEDS as f64 - 1.0).abs() < 0.15), "{mean:?}");
    }

    #[test]
    fn pieces_share_as_a_sequence_is_halved() {
        let method = registry::method("hyper").unwrap();
        let options = Options::new().with("block", 80).with("samples", 0);
        let shares = Shares::new(Mask::Causal, Layout::striped(800, 4, 1));
        // Seven pieces: the stripes of the last process are adjacent.
        let lens: Vec<usize> = shares.pieces.iter().map(Range::len).collect();
        assert_eq!(lens, [100, 100, 100, 200, 100, 100, 100]);
        let block = |mine: usize, other: usize| {
            let (start, piece) = (shares.pieces[mine].start, &shares.pieces[other]);
            number(method, &shares.budgets(method, &options, start, piece), "block").unwrap()
        };
        // For piece 6 = 110 in binary, pieces 0 to 3 form one half, 4 and 5 the next.
        assert_eq!([0, 1, 2, 3, 4, 5, 6].map(|j| block(6, j)), [16, 16, 16, 32, 40, 40, 80]);
        assert_eq!([0, 1, 2].map(|j| block(2, j)), [40, 40, 80]);
        // A budget above the number of keys counts as all keys.
        let most = options.with("block", 10_000);
        let all = shares.budgets(method, &most, shares.pieces[1].start, &shares.pieces[0]);
        assert!(number(method, &all, "block").unwrap() >= 100);
    }
}
