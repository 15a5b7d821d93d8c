//! Sort schedule: rows sorted by a hash go to the process that computes their block.
//!
//! If a method sorts queries and keys and attends block by block ([`SortedRule`]), a ring would sort and fetch the
//! queries of a process again for the keys of every other one. Here processes count their rows by sort key and exchange
//! the counts, which determine the place of every row among all. The blocks are distributed: queries, keys and values
//! go to the process of their block, outputs and log-sum-exps come back. A row is sent once for any number of
//! processes, and blocks, samples and their weights equal those of one process. The rows of the next blocks travel
//! while the current ones are processed.

use crate::attend::{Answer, Parts, Rows};
use crate::{Element, Transport, Wire};
use attlas::engine::{RowSlot, SortedRule, UniformSamples, exact_rows, places};
use attlas::group::GroupIndex;
use attlas::{Band, MatRef, Problem, Result, RunInfo, Workspace};
use attlas_num::cluster::buckets::{Balanced, order_by};
use attlas_num::kernels::{ROWS_AHEAD, prefetch};
use attlas_num::{Buf, Scratch};
use rayon::prelude::*;
use std::ops::Range;

/// Approximate bytes of the rows that a process works on while the next ones travel; few in tests, to have many steps.
const STEP_BYTES: usize = if cfg!(test) { 4 << 10 } else { 4 << 20 };
/// Rows that one task copies.
const COPY_ROWS: usize = 512;
/// Rooms grow by so many elements.
const ROOM: usize = 1 << 14;

/// Equal sort keys of one process: its `len` rows from `first` on have places from `place` on among the rows of all.
#[derive(Clone, Copy, Debug)]
struct Run {
    place: usize,
    first: usize,
    len: usize,
}

/// The keys of a group, or the queries of a head, sorted over all processes.
#[derive(Debug)]
struct SortedRows {
    /// The rows of this process in order.
    order: Vec<u32>,
    /// The runs of every process.
    runs: Vec<Vec<Run>>,
    cut: Balanced,
}

impl SortedRows {
    /// Sorts lists of rows by their keys, equal keys by position.
    fn all(t: &dyn Transport, ranks: &[Vec<u32>], cuts: &[Balanced], ws: &Workspace) -> Vec<Self> {
        let orders: Vec<Vec<u32>> = ws.install(|_| ranks.par_iter().map(|ranks| order_by(ranks)).collect());
        let mut message: Vec<u32> = Vec::new();
        for (ranks, order) in ranks.iter().zip(&orders) {
            let at = message.len();
            message.push(0);
            for equal in order.chunk_by(|&a, &b| ranks[a as usize] == ranks[b as usize]) {
                message.extend([ranks[equal[0] as usize], equal.len() as u32]);
                message[at] += 1;
            }
        }
        let all = t.gather_all(bytemuck::cast_slice(&message));
        let mut counts: Vec<_> = all
            .iter()
            .map(|bytes| bytes.chunks_exact(4).map(|b| b.try_into().map_or(0, u32::from_ne_bytes) as usize))
            .collect();
        let mut lists = Vec::with_capacity(orders.len());
        for (order, &cut) in orders.into_iter().zip(cuts) {
            let mut entries = Vec::new();
            for (process, numbers) in counts.iter_mut().enumerate() {
                for _ in 0..numbers.next().unwrap_or(0) {
                    let (rank, len) = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
                    entries.push((rank, process, len));
                }
            }
            entries.sort_unstable();
            let mut runs: Vec<Vec<Run>> = vec![Vec::new(); t.size()];
            let mut place = 0;
            for (_, process, len) in entries {
                let first = runs[process].last().map_or(0, |r| r.first + r.len);
                runs[process].push(Run { place, first, len });
                place += len;
            }
            lists.push(Self { order, runs, cut });
        }
        lists
    }

    /// Returns how many rows of a process precede a place.
    fn before(&self, process: usize, place: usize) -> usize {
        let runs = &self.runs[process];
        let after = runs.partition_point(|r| r.place < place);
        after.checked_sub(1).map_or(0, |i| runs[i].first + (place - runs[i].place).min(runs[i].len))
    }

    /// Returns the rows of a process in some blocks, counted in its own order.
    fn rows(&self, process: usize, blocks: &Range<usize>) -> Range<usize> {
        let border = |block: usize| self.before(process, self.cut.range(block).start);
        border(blocks.start)..border(blocks.end)
    }

    /// Returns the process with the row at a place, and the row's index in that process's order.
    fn at(&self, place: usize) -> Option<(usize, usize)> {
        let own = |process| self.before(process, place)..self.before(process, place + 1);
        (0..self.runs.len()).map(|p| (p, own(p))).find(|(_, r)| !r.is_empty()).map(|(p, r)| (p, r.start))
    }
}

/// Sorted rows of a group on a process.
struct SortedGroup<'a, T> {
    keys: SortedRows,
    queries: Vec<SortedRows>,
    samples: &'a UniformSamples,
    /// Keys and values of the samples.
    sampled: [Vec<T>; 2],
    /// Rows of this process.
    q: Vec<MatRef<'a, T>>,
    k: MatRef<'a, T>,
    v: MatRef<'a, T>,
}

impl<T: Element> SortedGroup<'_, T> {
    /// Returns the number of elements of the queries that `from` sends for some blocks.
    fn queries_len(&self, from: usize, blocks: &Range<usize>) -> usize {
        self.queries.iter().map(|q| q.rows(from, blocks).len()).sum::<usize>() * self.k.cols()
    }

    /// Returns the number of elements of the keys and values that `from` sends for some blocks.
    fn keys_len(&self, from: usize, blocks: &Range<usize>) -> usize {
        self.keys.rows(from, blocks).len() * (self.k.cols() + self.v.cols())
    }

    /// Returns the number of elements of the outputs and log-sum-exps that `from` gets back for some blocks.
    fn results_len(&self, from: usize, blocks: &Range<usize>) -> usize {
        self.queries.iter().map(|q| q.rows(from, blocks).len()).sum::<usize>() * (self.v.cols() + 1)
    }
}

/// Some consecutive blocks of one group on every process.
#[derive(Clone, Copy, Debug)]
struct Step {
    group: usize,
    /// Blocks before this step, on every process.
    done: usize,
    /// Blocks of a step.
    blocks: usize,
}

impl Step {
    /// Returns the blocks of this step on a process.
    fn of(self, process: usize, all: Balanced) -> Range<usize> {
        let Range { start, end } = all.range(process);
        (start + self.done).min(end)..(start + self.done + self.blocks).min(end)
    }
}

/// Returns the blocks of a process per step, and the steps per group.
pub(crate) fn steps(p: &Problem, blocks: usize, processes: usize, element: usize) -> (usize, usize) {
    let rows =
        p.n_k.div_ceil(blocks) * (p.d + p.d_v) + p.group_size() * p.n_q.div_ceil(blocks) * (p.d + p.d_v);
    let together = (STEP_BYTES / (rows * element).max(1)).max(1);
    (together, blocks.div_ceil(processes).div_ceil(together))
}

/// Returns the bytes that a process sends: its rows for other processes, and the outputs of theirs.
pub(crate) fn bytes(p: &Problem, processes: usize, element: usize) -> f64 {
    let away = (processes - 1) as f64 / (processes * processes) as f64 * p.batch as f64;
    let keys = (p.n_kv_heads * p.n_k * (p.d + p.d_v)) as f64;
    let queries = (p.n_heads * p.n_q * (p.d + p.d_v + 1)) as f64;
    away * (keys + queries) * element as f64
}

/// Rows to and from one other process, double-buffered: one travels while the other is processed.
struct Peer<'s, T> {
    /// Keys and values.
    keys_out: Buf<'s, T>,
    keys_in: [Buf<'s, T>; 2],
    /// The same as bytes, if they travel in another form.
    packed_out: Vec<u8>,
    packed_in: Vec<u8>,
    /// Results of an earlier step, then queries of a later one.
    rows_out: [Buf<'s, T>; 2],
    rows_in: [Buf<'s, T>; 2],
}

impl<'s, T: Element> Peer<'s, T> {
    fn new(scratch: &'s Scratch) -> Self {
        let pair = || [0; 2].map(|_| scratch.take(0));
        Self {
            keys_out: scratch.take(0),
            keys_in: pair(),
            packed_out: Vec::new(),
            packed_in: Vec::new(),
            rows_out: pair(),
            rows_in: pair(),
        }
    }
}

/// Rows received from one process.
#[derive(Clone, Copy)]
struct Received<'a, T> {
    /// Keys, then values.
    keys: &'a [T],
    queries: &'a [T],
}

/// Destination of results.
enum Place<'a, 'p, T> {
    /// Rows of this process.
    Slots(&'a mut [RowSlot<'p, T>]),
    /// Outputs and log-sum-exps for another process.
    Rows(&'a mut [T], &'a mut [T]),
}

/// Keys, values and biases of a block, after those of the samples.
type Room<'s, T> = (Buf<'s, T>, Buf<'s, T>, Buf<'s, T>);

/// One message in each direction.
struct Message<'a> {
    to: usize,
    send: &'a [u8],
    from: usize,
    receive: &'a mut [u8],
}

/// Exchanges all messages while `work` runs.
fn exchange_all(
    t: &dyn Transport,
    messages: &mut [Message<'_>],
    work: &mut dyn FnMut(&dyn Fn()),
    progress: &dyn Fn(),
) {
    match messages.split_first_mut() {
        None => work(progress),
        Some((m, rest)) => {
            t.exchange(m.to, m.send, m.from, m.receive, &mut |progress| {
                exchange_all(t, rest, work, progress)
            });
        }
    }
}

/// Returns the first `len` elements of growing storage.
fn room<'b, 's, T: Element>(scratch: &'s Scratch, storage: &'b mut Buf<'s, T>, len: usize) -> &'b mut [T] {
    if storage.len() < len {
        let mut larger = scratch.take::<T>(len.next_multiple_of(ROOM));
        larger[..storage.len()].copy_from_slice(storage);
        *storage = larger;
    }
    &mut storage[..len]
}

/// Returns two items, the one of this turn first.
fn in_turn<X>([a, b]: &mut [X; 2], turn: usize) -> (&mut X, &mut X) {
    if turn.is_multiple_of(2) { (a, b) } else { (b, a) }
}

/// Copies rows to contiguous memory.
fn copy_rows<T: Element>(a: MatRef<'_, T>, order: &[u32], out: &mut [T]) {
    let copies = out.par_chunks_mut(COPY_ROWS * a.cols()).zip(order.par_chunks(COPY_ROWS));
    copies.for_each(|(out, order)| a.gather_into(order.iter().map(|&i| i as usize), out));
}

/// Writes results to places that lie here and there.
fn put_rows<T: Element>(slots: &mut [RowSlot<'_, T>], o: &[T], lse: &[T], d_v: usize) {
    let mut slots = slots.iter_mut();
    for (o, &lse) in o.chunks_exact(d_v).zip(lse) {
        if let Some(later) = slots.as_slice().get(ROWS_AHEAD) {
            prefetch(later.out);
        }
        if let Some(slot) = slots.next() {
            slot.out.copy_from_slice(o);
            *slot.lse = lse;
        }
    }
}

/// Sorts the rows of all groups, and collects their samples.
fn sorted_groups<'a, T: Element>(
    t: &dyn Transport,
    p: &Problem,
    rule: &'a SortedRule<'_>,
    x: &Parts<'a, T>,
    wire: Wire,
    ws: &Workspace,
) -> Result<Vec<SortedGroup<'a, T>>> {
    let (q, k, v) = (x.q.local()?, x.k.local()?, x.v.local()?);
    let heads = |g: GroupIndex| g.kv_head * p.group_size()..(g.kv_head + 1) * p.group_size();
    let groups: Vec<GroupIndex> = (0..p.batch)
        .flat_map(|batch| (0..p.n_kv_heads).map(move |kv_head| GroupIndex { batch, kv_head }))
        .collect();
    let (mut lists, mut cuts) = (Vec::new(), Vec::new());
    for &g in &groups {
        lists.push((g, k.head(g.batch, g.kv_head)));
        cuts.push(rule.cut());
        for h in heads(g) {
            lists.push((g, q.head(g.batch, h)));
            cuts.push(Balanced::new(p.n_q, rule.cut().blocks()));
        }
    }
    let ranks: Vec<Vec<u32>> = ws.install(|_| lists.iter().map(|&(g, rows)| rule.ranks(g, rows)).collect());
    let mut sorted = SortedRows::all(t, &ranks, &cuts, ws).into_iter();
    let mut found: Vec<SortedGroup<'a, T>> = Vec::with_capacity(groups.len());
    for &g in &groups {
        found.extend(sorted.next().map(|keys| SortedGroup {
            keys,
            queries: sorted.by_ref().take(p.group_size()).collect(),
            samples: rule.samples(g),
            sampled: [p.d, p.d_v].map(|cols| Vec::with_capacity(rule.samples(g).ranks().len() * cols)),
            q: heads(g).map(|h| q.head(g.batch, h)).collect(),
            k: k.head(g.batch, g.kv_head),
            v: v.head(g.batch, g.kv_head),
        }));
    }

    let holders: Vec<Vec<(usize, usize)>> = found
        .iter()
        .map(|g| g.samples.ranks().iter().filter_map(|&place| g.keys.at(place)).collect())
        .collect();
    let mut message: Vec<T> = Vec::new();
    for (g, holders) in found.iter().zip(&holders) {
        for &(_, row) in holders.iter().filter(|(process, _)| *process == t.rank()) {
            let row = g.keys.order[row] as usize;
            message.extend_from_slice(g.k.row(row));
            message.extend_from_slice(g.v.row(row));
        }
    }
    wire.round(&mut message);
    let all = t.gather_all(bytemuck::cast_slice(&message));
    let mut rest: Vec<&[u8]> = all.iter().map(Vec::as_slice).collect();
    for (g, holders) in found.iter_mut().zip(&holders) {
        for &(process, _) in holders {
            for (sampled, cols) in g.sampled.iter_mut().zip([p.d, p.d_v]) {
                let (row, tail) = rest[process].split_at(cols * size_of::<T>());
                rest[process] = tail;
                let at = sampled.len();
                sampled.resize(at + cols, T::ZERO);
                bytemuck::cast_slice_mut(&mut sampled[at..]).copy_from_slice(row);
            }
        }
    }
    Ok(found)
}

/// Attends block by block over rows that all processes sort together.
pub(crate) fn sort<T: Element>(
    t: &dyn Transport,
    p: &Problem,
    rule: &SortedRule<'_>,
    x: &Parts<'_, T>,
    wire: Wire,
    mut rows: Rows<T>,
    ws: &mut Workspace,
) -> Result<Answer<T>> {
    let (rank, size, own) = (t.rank(), t.size(), x.q.layout().rows(t.rank()));
    let others = || (0..size).filter(|&other| other != rank);
    let groups = sorted_groups(t, p, rule, x, wire, ws)?;
    let all = Balanced::new(rule.cut().blocks(), size);
    let (blocks, each) = steps(p, rule.cut().blocks(), size, size_of::<T>());
    let steps: Vec<Step> = (0..groups.len())
        .flat_map(|group| (0..each).map(move |i| Step { group, done: i * blocks, blocks }))
        .collect();

    // Destinations of a head's results, in the order of its queries.
    let heads = rows.o.chunks_mut((own * p.d_v).max(1)).zip(rows.lse.chunks_mut(own.max(1)));
    let mut slots: Vec<Vec<RowSlot<'_, T>>> = heads
        .zip(groups.iter().flat_map(|g| &g.queries))
        .map(|((o, lse), queries)| {
            let mut by_row: Vec<Option<RowSlot<'_, T>>> = places(o, lse, p.d_v).map(Some).collect();
            queries.order.iter().filter_map(|&i| by_row[i as usize].take()).collect()
        })
        .collect();
    // A process without rows has no such list.
    slots.resize_with(p.batch * p.n_heads, Vec::new);
    let slots_of = |step: &Step| step.group * p.group_size()..(step.group + 1) * p.group_size();

    let mut info = RunInfo::default();
    let scratch = ws.scratch();
    let mut peers: Vec<Peer<'_, T>> = (0..size).map(|_| Peer::new(scratch)).collect();
    // In a turn the rows of one step arrive, those of the previous step are processed, and the results of the one
    // before are sent.
    for turn in 0..steps.len() + 2 {
        let step = |back: usize| {
            turn.checked_sub(back).and_then(|i| steps.get(i)).map(|step| (&groups[step.group], step))
        };
        let (coming, working, ended) = (step(0), step(1), step(2));
        let results = |step: Option<(&SortedGroup<'_, T>, &Step)>, of: usize, from: usize| {
            step.map_or(0, |(g, step)| g.results_len(of, &step.of(from, all)))
        };
        for other in others() {
            let (peer, made) = (&mut peers[other], results(ended, other, rank));
            let rows_out = in_turn(&mut peer.rows_out, turn).0;
            let Some((g, step)) = coming else {
                room(scratch, rows_out, made);
                continue;
            };
            let blocks = step.of(other, all);
            let order = &g.keys.order[g.keys.rows(rank, &blocks)];
            let keys = room(scratch, &mut peer.keys_out, g.keys_len(rank, &blocks));
            let mut queries = &mut room(scratch, rows_out, made + g.queries_len(rank, &blocks))[made..];
            ws.install(|_| {
                let (k, v) = keys.split_at_mut(order.len() * p.d);
                copy_rows(g.k, order, k);
                copy_rows(g.v, order, v);
                for (q, list) in g.q.iter().zip(&g.queries) {
                    let order = &list.order[list.rows(rank, &blocks)];
                    let (out, rest) = std::mem::take(&mut queries).split_at_mut(order.len() * p.d);
                    queries = rest;
                    copy_rows(*q, order, out);
                }
            });
            wire.round(keys);
        }

        let (mut out, mut came, mut inputs, mut made) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for (other, peer) in peers.iter_mut().enumerate() {
            let (keys_in, keys_here) = in_turn(&mut peer.keys_in, turn);
            let (rows_in, rows_here) = in_turn(&mut peer.rows_in, turn);
            let (rows_out, rows_made) = in_turn(&mut peer.rows_out, turn);
            // Queries follow results, which were already taken.
            let taken = if other == rank { 0 } else { results(step(3), rank, other) };
            inputs.push(Received { keys: keys_here, queries: rows_here.get(taken..).unwrap_or(&[]) });
            made.push(room(
                scratch,
                rows_made,
                if other == rank { 0 } else { results(working, other, rank) },
            ));
            let (mut keys, mut queries, mut sent) = (0, 0, 0);
            let mut length = results(ended, other, rank);
            if let Some((g, step)) = coming {
                keys = g.keys_len(other, &step.of(rank, all));
                queries = g.queries_len(other, &step.of(rank, all));
                sent = g.keys_len(rank, &step.of(other, all));
                length += g.queries_len(rank, &step.of(other, all));
            }
            if other == rank {
                out.push((&[][..], &[][..]));
                came.push((Default::default(), Default::default()));
                continue;
            }
            let keys_in = room(scratch, keys_in, keys);
            let keys_in = match wire {
                Wire::Full => bytemuck::cast_slice_mut(keys_in),
                Wire::Bf16 => {
                    peer.packed_in.resize(wire.bytes::<T>(keys), 0);
                    &mut peer.packed_in
                }
            };
            let rows_in = room(scratch, rows_in, results(ended, rank, other) + queries);
            out.push((
                wire.pack(&peer.keys_out[..sent], &mut peer.packed_out),
                bytemuck::cast_slice(&rows_out[..length]),
            ));
            came.push((keys_in, bytemuck::cast_slice_mut(rows_in)));
        }
        let mut messages: Vec<Message<'_>> = Vec::with_capacity(2 * size);
        for shift in 1..size {
            let (to, from) = ((rank + shift) % size, (rank + size - shift) % size);
            let (keys, rows): (&mut [u8], &mut [u8]) = std::mem::take(&mut came[from]);
            messages.push(Message { to, send: out[to].0, from, receive: keys });
            messages.push(Message { to, send: out[to].1, from, receive: rows });
        }
        let mut work = |progress: &dyn Fn()| {
            if let Some((g, step)) = working {
                let (slots, blocks) = (&mut slots[slots_of(step)], step.of(rank, all));
                let done = attend_blocks(g, p, rank, &blocks, &inputs, &mut made, slots, wire, ws);
                info = std::mem::take(&mut info).merge(done);
                progress();
            }
        };
        exchange_all(t, &mut messages, &mut work, &|| ());
        drop((messages, inputs, made, out, came));

        for other in others() {
            let peer = &mut peers[other];
            if let (Some((g, step)), Wire::Bf16) = (coming, wire) {
                let keys = g.keys_len(other, &step.of(rank, all));
                let keys_in = in_turn(&mut peer.keys_in, turn).0;
                wire.unpack(&peer.packed_in[..wire.bytes::<T>(keys)], &mut keys_in[..keys]);
            }
            let Some((g, step)) = ended else { continue };
            let blocks = step.of(other, all);
            let mut came = &in_turn(&mut peer.rows_in, turn).0[..];
            for (slots, queries) in slots[slots_of(step)].iter_mut().zip(&g.queries) {
                let slots = &mut slots[queries.rows(rank, &blocks)];
                let (o, rest) = came.split_at(slots.len() * p.d_v);
                let (lse, rest) = rest.split_at(slots.len());
                came = rest;
                ws.install(|_| {
                    let of_slots = slots.par_chunks_mut(COPY_ROWS);
                    let came = o.par_chunks(COPY_ROWS * p.d_v).zip(lse.par_chunks(COPY_ROWS));
                    of_slots.zip(came).for_each(|(slots, (o, lse))| put_rows(slots, o, lse, p.d_v));
                });
            }
        }
    }
    drop(slots);
    // All are written where there are keys.
    rows.clear_empty();
    Ok(rows.answer(true, info))
}

/// Attends in some blocks of a group, with rows of all processes.
fn attend_blocks<T: Element>(
    g: &SortedGroup<'_, T>,
    p: &Problem,
    rank: usize,
    blocks: &Range<usize>,
    inputs: &[Received<'_, T>],
    results: &mut [&mut [T]],
    slots: &mut [Vec<RowSlot<'_, T>>],
    wire: Wire,
    ws: &Workspace,
) -> RunInfo {
    let (size, d, d_v) = (inputs.len(), p.d, p.d_v);
    // For every block the places of its rows, head by head and process by process.
    let mut tasks: Vec<Vec<Place<'_, '_, T>>> = blocks.clone().map(|_| Vec::new()).collect();
    for (queries, slots) in g.queries.iter().zip(slots) {
        let mut own = &mut slots[queries.rows(rank, blocks)];
        for (process, results) in results.iter_mut().enumerate() {
            let count = queries.rows(process, blocks).len();
            let of_blocks = blocks.clone().map(|c| queries.rows(process, &(c..c + 1)).len());
            if process == rank {
                for (count, task) in of_blocks.zip(&mut tasks) {
                    let (of_block, rest) = std::mem::take(&mut own).split_at_mut(count);
                    task.push(Place::Slots(of_block));
                    own = rest;
                }
            } else {
                let (mut o, tail) = std::mem::take(results).split_at_mut(count * d_v);
                let (mut lse, tail) = tail.split_at_mut(count);
                *results = tail;
                for (count, task) in of_blocks.zip(&mut tasks) {
                    let (own, rest) = o.split_at_mut(count * d_v);
                    let (own_lse, rest_lse) = lse.split_at_mut(count);
                    task.push(Place::Rows(own, own_lse));
                    (o, lse) = (rest, rest_lse);
                }
            }
        }
    }
    let m = g.samples.ranks().len();
    let most = g.keys.cut.items().div_ceil(g.keys.cut.blocks());
    let of_keys: Vec<Range<usize>> = (0..size).map(|process| g.keys.rows(process, blocks)).collect();
    let scale = T::from_f64(p.scale);
    let counted: Vec<(u64, usize)> = ws.install(|cx| {
        let room = || {
            // The samples stay in place; the keys of blocks follow them.
            let (mut keys, mut values) =
                (cx.scratch.take::<T>((m + most) * d), cx.scratch.take::<T>((m + most) * d_v));
            keys[..m * d].copy_from_slice(&g.sampled[0]);
            values[..m * d_v].copy_from_slice(&g.sampled[1]);
            (keys, values, cx.scratch.take::<T>(m + most))
        };
        let attend = |(keys, values, bias): &mut Room<'_, T>, (i, places): (usize, Vec<Place<'_, '_, T>>)| {
            let block = blocks.start + i..blocks.start + i + 1;
            let near = g.keys.cut.range(block.start);
            let n = m + near.len();
            let mut at = m;
            for (process, (whole, input)) in of_keys.iter().zip(inputs).enumerate() {
                let rows = g.keys.rows(process, &block);
                let end = at + rows.len();
                let (k, v) = (&mut keys[at * d..end * d], &mut values[at * d_v..end * d_v]);
                if process == rank {
                    let order = || g.keys.order[rows.clone()].iter().map(|&i| i as usize);
                    g.k.gather_into(order(), k);
                    g.v.gather_into(order(), v);
                    wire.round(k);
                    wire.round(v);
                } else {
                    let (first, last) = (rows.start - whole.start, rows.end - whole.start);
                    k.copy_from_slice(&input.keys[first * d..last * d]);
                    let of_values = &input.keys[whole.len() * d..];
                    v.copy_from_slice(&of_values[first * d_v..last * d_v]);
                }
                at = end;
            }
            // Samples inside the block are already among its keys.
            let ranks = g.samples.ranks();
            let inside = ranks.partition_point(|&r| r < near.start)..ranks.partition_point(|&r| r < near.end);
            let (outside, weight) = g.samples.beside(g.keys.cut.items(), near.clone());
            bias[..m].fill(T::from_f64(weight.ln()));
            bias[inside].fill(T::NEG_INFINITY);
            bias[m..n].fill(T::ZERO);
            let bias = (!outside.is_empty()).then_some(&bias[..n]);
            // If all samples are inside, they are left out.
            let from = if bias.is_some() { 0 } else { m };
            let (keys, values) = (
                MatRef::new(&keys[from * d..n * d], n - from, d),
                MatRef::new(&values[from * d_v..n * d_v], n - from, d_v),
            );

            let mut places = places.into_iter();
            let mut taken = vec![0; size];
            let mut rows = 0;
            for (q, list) in g.q.iter().zip(&g.queries) {
                let counts: Vec<usize> = (0..size).map(|process| list.rows(process, &block).len()).collect();
                let count: usize = counts.iter().sum();
                let mut queries = cx.scratch.take::<T>(count * d);
                let mut rest = &mut queries[..];
                for (process, (&count, input)) in counts.iter().zip(inputs).enumerate() {
                    let (out, tail) = rest.split_at_mut(count * d);
                    rest = tail;
                    if process == rank {
                        let order = &list.order[list.rows(process, &block)];
                        q.gather_into(order.iter().map(|&i| i as usize), out);
                    } else {
                        let whole = list.rows(process, blocks);
                        let first = taken[process] + (list.rows(process, &block).start - whole.start) * d;
                        out.copy_from_slice(&input.queries[first..first + count * d]);
                        taken[process] += whole.len() * d;
                    }
                }
                let (mut out, mut lse) = (cx.scratch.take::<T>(count * d_v), cx.scratch.take::<T>(count));
                let queries = MatRef::new(&queries, count, d);
                exact_rows(queries, keys, values, bias, scale, Band::ALL, cx, &mut out, &mut lse);
                let mut first = 0;
                for (place, count) in places.by_ref().take(size).zip(counts) {
                    let (o, l) = (&out[first * d_v..(first + count) * d_v], &lse[first..first + count]);
                    match place {
                        Place::Slots(slots) => put_rows(slots, o, l, d_v),
                        Place::Rows(to, to_lse) => {
                            to.copy_from_slice(o);
                            to_lse.copy_from_slice(l);
                        }
                    }
                    first += count;
                }
                rows += count;
            }
            let dropped = if m > 0 && outside.is_empty() { rows } else { 0 };
            ((rows * (near.len() + outside.len())) as u64, dropped)
        };
        tasks.into_par_iter().enumerate().map_init(room, |room, task| attend(room, task)).collect()
    });
    let mut info = RunInfo::visited(counted.iter().map(|c| c.0).sum());
    let dropped: usize = counted.iter().map(|c| c.1).sum();
    if dropped > 0 {
        info.figures.insert("rows_without_samples", dropped as f64);
    }
    info
}

#[cfg(test)]
mod tests {
    use crate::{Parts, Sharded, Threads, Transport, Wire, attend, layouts};
    use attlas::{Options, Problem, TensorRef, Workspace, registry};
    use attlas_num::rng::StreamKey;

    /// Returns outputs and log-sum-exps of all rows, and the keys they visited.
    fn run(p: &Problem, options: &Options, wire: Wire, processes: usize) -> (Vec<f64>, u64) {
        let hyper = registry::method("hyper").unwrap();
        let draw = |name: &str, count: usize| -> Vec<f64> {
            let mut rng = StreamKey::new(2).named(name).rng();
            (0..count).map(|_| rng.normal()).collect()
        };
        let dims = [(p.n_heads, p.n_q, p.d), (p.n_kv_heads, p.n_k, p.d), (p.n_kv_heads, p.n_k, p.d_v)];
        let [ql, kl] = layouts(p, hyper, options, processes);
        let parts = Threads::run(processes, |t| {
            let cut = |which: usize, name: &str, layout| {
                let (heads, n, cols) = dims[which];
                let whole = draw(name, p.batch * heads * n * cols);
                let whole = TensorRef::bhnd(&whole, [p.batch, heads, n, cols]).unwrap();
                Sharded::cut(whole, layout, t.rank()).unwrap()
            };
            let (q, k, v) = (cut(0, "queries", ql), cut(1, "keys", kl), cut(2, "values", kl));
            let parts = Parts { q: &q, k: &k, v: &v, key_lens: None };
            let mut ws = Workspace::single().unwrap();
            let answer = attend(t, p, hyper, options, &parts, wire, &mut ws).unwrap();
            let o = Sharded::new(answer.o, [p.batch, p.n_heads, p.d_v], ql, t.rank()).unwrap().gather(t);
            let lse = Sharded::new(answer.lse.unwrap(), [p.batch, p.n_heads, 1], ql, t.rank()).unwrap();
            ([o, lse.gather(t)].concat(), answer.info.keys_visited)
        });
        let visited = parts.iter().map(|(_, visited)| visited).sum();
        (parts.into_iter().next().unwrap().0, visited)
    }

    #[test]
    fn rows_see_what_they_see_on_one_process_in_however_many_steps() {
        let options = Options::new().with("n_min", 8).with("hashes", 5);
        let p = Problem { batch: 2, d_v: 6, ..Problem::new(4, 700, 8).with_kv_heads(2) };
        for (p, block, samples) in [
            (p, 16, 32),
            (p, 9, 0),
            (p.with_lens(300, 701), 20, 40),
            (p.with_lens(2000, 61), 30, 11),
            (p.with_lens(9, 400), 3, 200),
        ] {
            let options = options.clone().with("block", block).with("samples", samples);
            let (alone, visited) = run(&p, &options, Wire::Full, 1);
            let (two, _) = run(&p, &options, Wire::Bf16, 2);
            let close = |a: &[f64], b: &[f64]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-9);
            for processes in [2, 3, 5] {
                let (found, seen) = run(&p, &options, Wire::Full, processes);
                assert_eq!(seen, visited, "{options} on {processes}");
                assert!(close(&found, &alone), "{options} on {processes}");
                assert!(run(&p, &options, Wire::Full, processes).0 == found, "the same bits again");
                assert!(close(&run(&p, &options, Wire::Bf16, processes).0, &two), "{options} on {processes}");
            }
        }
    }
}
