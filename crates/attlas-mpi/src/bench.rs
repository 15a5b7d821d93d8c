//! Times of one sequence over all processes.
//!
//! A barrier precedes each run, whose time is that of the slowest process. Inputs depend only on a token's position:
//! each process draws its own part, and the sequence is the same on any number of processes.

use crate::attend::{Answer, Parts, attend_into, layouts, support, zeros};
use crate::{Layout, Sharded, SpreadCache, Traffic, Transport, Wire};
use attlas::{Mask, Method, Options, Problem, Result, TensorRef, Workspace};
use attlas_num::rng::StreamKey;
use serde::{Deserialize, Serialize};
use std::time::Instant;

/// One method at one length, over all processes.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Id of the method.
    pub method: &'static str,
    /// `ring`, `sort` in place of one, `scan`, `gather`, or `decode` over a spread cache.
    pub schedule: &'static str,
    /// Processes.
    pub processes: usize,
    /// Their machines, in the order of ranks.
    pub nodes: Vec<String>,
    /// Length.
    pub n: usize,
    /// Width of heads.
    pub d: usize,
    /// Seconds of each run, by the slowest process.
    pub seconds: Vec<f64>,
    /// Their median.
    pub median: f64,
    /// Form in which keys and values travelled.
    pub wire: Wire,
    /// Bytes that all processes sent in one run.
    pub bytes: u64,
    /// Longest waiting time of a process in the run with the median time, seconds.
    pub waited: f64,
    /// Largest work of a process over the mean, in counted pairs.
    pub balance: f64,
}

/// The benchmark's settings.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Timed runs.
    pub runs: usize,
    /// Form in which keys and values travel.
    pub wire: Wire,
    /// Seed of the inputs.
    pub seed: u64,
}

/// Draws this process's part of a random sequence.
fn draw(
    seed: u64,
    name: &'static str,
    sizes: [usize; 3],
    layout: Layout,
    rank: usize,
) -> Result<Sharded<f32>> {
    let [batch, heads, cols] = sizes;
    // In large pages, as the inputs of one process are.
    let mut data = zeros::<f32>(batch * heads * layout.rows(rank) * cols);
    let key = StreamKey::new(seed).named(name);
    let tokens = (0..batch * heads)
        .flat_map(|head| layout.pieces(rank).into_iter().flatten().map(move |token| (head, token)));
    for (row, (head, token)) in data.chunks_exact_mut(cols.max(1)).zip(tokens) {
        let mut rng = key.with(head as u64).with(token as u64).rng();
        row.iter_mut().for_each(|x| *x = rng.normal() as f32);
    }
    Sharded::new(data, sizes, layout, rank)
}

/// Report of one process on one run.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Run {
    seconds: f64,
    traffic: Traffic,
}

/// Joins the reports of all processes: the slowest time, all bytes, the longest waiting time.
fn join(t: &dyn Transport, own: Run) -> Run {
    let message = serde_json::to_vec(&own).unwrap_or_default();
    let all = t.gather_all(&message);
    let runs = all.iter().filter_map(|bytes| serde_json::from_slice::<Run>(bytes).ok());
    let zero = Run { seconds: 0.0, traffic: Traffic::default() };
    runs.fold(zero, |a, b| Run {
        seconds: a.seconds.max(b.seconds),
        traffic: Traffic {
            bytes: a.traffic.bytes + b.traffic.bytes,
            messages: a.traffic.messages + b.traffic.messages,
            waited: a.traffic.waited.max(b.traffic.waited),
        },
    })
}

/// Link between the processes in the α–β model.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Link {
    /// Microseconds of a message of a few bytes.
    pub us: f64,
    /// Billions of bits per second that a process sends while it receives as many, in long messages.
    pub gbps: f64,
}

/// Measures messages round the ring, all processes at once as in a schedule; the slowest process counts. None for a
/// single process.
pub fn link(t: &dyn Transport) -> Option<Link> {
    const SHORT: (usize, usize) = (8, 200);
    const LONG: (usize, usize) = (16 << 20, 3);
    let (rank, size) = (t.rank(), t.size());
    if size < 2 {
        return None;
    }
    let (to, from) = ((rank + 1) % size, (rank + size - 1) % size);
    // Seconds of one message: the best of a few rounds, because others may use the machine.
    let message = |(bytes, count): (usize, usize)| {
        let (send, mut recv) = (vec![1u8; bytes], vec![0u8; bytes]);
        let mut best = f64::INFINITY;
        for _ in 0..5 {
            t.barrier();
            let begun = Instant::now();
            (0..count).for_each(|_| t.exchange(to, &send, from, &mut recv, &mut |_| ()));
            let seconds = begun.elapsed().as_secs_f64() / count as f64;
            best = best.min(join(t, Run { seconds, traffic: Traffic::default() }).seconds);
        }
        best
    };
    let (short, long) = (message(SHORT), message(LONG));
    Some(Link { us: short * 1e6, gbps: LONG.0 as f64 * 8e-9 / (long - short).max(1e-12) })
}

/// Measures a method on one sequence over all processes; the error gives the reasons if it cannot run. Every process
/// gets the same row.
pub fn measure(
    t: &dyn Transport,
    problem: &Problem,
    method: &'static Method,
    options: &Options,
    settings: &Settings,
    ws: &mut Workspace,
) -> Result<std::result::Result<Row, Vec<String>>> {
    let able = support(problem, method, options, false);
    let Some(mut schedule) = method.claims.spread.name().filter(|_| able.is_yes()) else {
        return Ok(Err(able.reasons));
    };
    let p = problem;
    if t.size() > 1 && method.plan(p, options)?.sorted_rule().is_some() {
        schedule = "sort";
    }
    let [q_layout, k_layout] = layouts(p, method, options, t.size());
    let (rank, seed) = (t.rank(), settings.seed);
    let q = draw(seed, "queries", [p.batch, p.n_heads, p.d], q_layout, rank)?;
    let k = draw(seed, "keys", [p.batch, p.n_kv_heads, p.d], k_layout, rank)?;
    let v = draw(seed, "values", [p.batch, p.n_kv_heads, p.d_v], k_layout, rank)?;
    let parts = Parts { q: &q, k: &k, v: &v, key_lens: None };
    let mut runs = Vec::new();
    let mut answer = Answer::default();
    // The first run does not count: it touches memory for the first time.
    for _ in 0..=settings.runs {
        t.barrier();
        let begun = Instant::now();
        match attend_into(t, p, method, options, &parts, settings.wire, &mut answer, ws) {
            Err(attlas::Error::Unsupported { reasons, .. }) => return Ok(Err(reasons)),
            other => other?,
        }
        let seconds = begun.elapsed().as_secs_f64();
        runs.push(join(t, Run { seconds, traffic: answer.traffic }));
    }
    runs.remove(0);
    let pairs: Vec<f64> = (0..t.size()).map(|r| q_layout.pairs(r) as f64).collect();
    let mean = pairs.iter().sum::<f64>() / pairs.len() as f64;
    let balance = if mean > 0.0 { pairs.iter().copied().fold(0.0, f64::max) / mean } else { 1.0 };
    Ok(Ok(row(t, method.id, schedule, (p.n_k, p.d), runs, settings.wire, balance)))
}

/// Measures one token at a time over a cache of `problem.n_k` tokens divided among all processes.
pub fn measure_decode(
    t: &dyn Transport,
    problem: &Problem,
    settings: &Settings,
    ws: &mut Workspace,
) -> Result<Row> {
    /// Tokens that are drawn and pushed together.
    const CHUNK: usize = 4096;
    let p = Problem { mask: Mask::Causal, ..*problem };
    let mut cache = SpreadCache::<f32>::new(t, &p)?;
    let mut at = 0;
    while at < p.n_k {
        let tokens = CHUNK.min(p.n_k - at);
        let all = Layout::contiguous(tokens, 1);
        let seed = settings.seed.wrapping_add(at as u64);
        let k = draw(seed, "keys", [p.batch, p.n_kv_heads, p.d], all, 0)?;
        let v = draw(seed, "values", [p.batch, p.n_kv_heads, p.d_v], all, 0)?;
        cache.push(k.local()?, v.local()?)?;
        at += tokens;
    }
    let q = draw(settings.seed, "queries", [p.batch, p.n_heads, p.d], Layout::contiguous(1, 1), 0)?;
    let q = TensorRef::bhnd(q.data(), [p.batch, p.n_heads, 1, p.d])?;
    let mut runs = Vec::new();
    for _ in 0..=settings.runs {
        t.barrier();
        let begun = Instant::now();
        let (_, _, traffic) = cache.attend(t, q, ws)?;
        runs.push(join(t, Run { seconds: begun.elapsed().as_secs_f64(), traffic }));
    }
    runs.remove(0);
    Ok(row(t, attlas::registry::baseline().id, "decode", (p.n_k, p.d), runs, Wire::Full, 1.0))
}

fn row(
    t: &dyn Transport,
    method: &'static str,
    schedule: &'static str,
    (n, d): (usize, usize),
    runs: Vec<Run>,
    wire: Wire,
    balance: f64,
) -> Row {
    let mut order: Vec<usize> = (0..runs.len()).collect();
    order.sort_by(|&a, &b| runs[a].seconds.total_cmp(&runs[b].seconds));
    let middle = order.get(order.len() / 2).copied();
    let node = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    Row {
        method,
        schedule,
        processes: t.size(),
        nodes: t.gather_all(t.node().as_bytes()).into_iter().map(node).collect(),
        n,
        d,
        seconds: runs.iter().map(|r| r.seconds).collect(),
        median: middle.map_or(0.0, |i| runs[i].seconds),
        wire,
        bytes: middle.map_or(0, |i| runs[i].traffic.bytes),
        waited: middle.map_or(0.0, |i| runs[i].traffic.waited),
        balance,
    }
}

/// Returns the bytes that a process sends: its state in a scan, its representative keys in a gather; 0 for a ring.
pub fn state_bytes(problem: &Problem, method: &'static Method, options: &Options) -> Result<f64> {
    let p = problem.with_lens(problem.n_q.min(256), problem.n_k.min(256));
    let plan = method.plan(&p, options)?;
    let groups = (p.batch * p.n_kv_heads) as f64;
    Ok(match method.claims.spread {
        attlas::Spread::Scan { .. } => {
            let mut ws = Workspace::single()?;
            let sums = plan.stream(attlas::DType::F32).and_then(|stream| stream.sums(&mut ws));
            sums.map_or(0.0, |s| (s.len() * size_of::<f32>()) as f64)
        }
        attlas::Spread::Gather => {
            let rank = crate::attend::number(method, options, "rank")
                .or_else(|| crate::attend::number(method, options, "landmarks"))
                .unwrap_or(0);
            groups * (rank * (p.d + p.d_v + 1) * size_of::<f32>()) as f64
        }
        _ => 0.0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Threads;

    #[test]
    fn everybody_measures_the_same_link() {
        for size in [2, 3] {
            let found = Threads::run(size, |t| link(t).unwrap());
            assert!(found.iter().all(|l| *l == found[0] && l.us > 0.0 && l.gbps > 0.0), "{found:?}");
        }
        assert_eq!(Threads::run(1, |t| link(t)), [None]);
    }
}
