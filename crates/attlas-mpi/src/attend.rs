//! The door: which schedule, whether it can be done, and the run.

use crate::{Element, Layout, Sharded, Traffic, Transport, Wire, gather, ring, scan};
use attlas::method::Needs;
use attlas::{
    Align, Error, Mask, Method, Near, Options, Out, Problem, Qkv, Result, RunInfo, Spread, Support,
    TensorMut, TensorRef, Workspace, merge_lse,
};
use rayon::prelude::*;
use std::ops::Range;

/// This process's part of queries, keys and values.
#[derive(Clone, Copy, Debug)]
pub struct Parts<'a, T> {
    /// `[batch, n_heads, n_q, d]`.
    pub q: &'a Sharded<T>,
    /// `[batch, n_kv_heads, n_k, d]`.
    pub k: &'a Sharded<T>,
    /// `[batch, n_kv_heads, n_k, d_v]`.
    pub v: &'a Sharded<T>,
    /// Valid keys of each sequence, which are its first; with a causal mask queries past them are padding, too
    /// ([`Align::Start`]). All keys where absent.
    pub key_lens: Option<&'a [usize]>,
}

/// The rows of this process, and what they took.
#[derive(Clone, Debug)]
pub struct Answer<T> {
    /// `[batch, n_heads, rows, d_v]`, rows as in the queries' part.
    pub o: Vec<T>,
    /// Log-sum-exp of each row, where the method has one.
    pub lse: Option<Vec<T>>,
    /// What happened here.
    pub info: RunInfo,
    /// What this process sent, and how long it waited.
    pub traffic: Traffic,
}

/// How queries and keys are to be cut: stripes with a causal mask, whose borders do not cut the blocks of a method that
/// has such, pieces without.
pub fn layouts(problem: &Problem, method: &Method, options: &Options, processes: usize) -> [Layout; 2] {
    match problem.mask {
        Mask::None => [problem.n_q, problem.n_k].map(|n| Layout::contiguous(n, processes)),
        Mask::Causal => {
            let block = match method.claims.spread {
                Spread::Scan { block: Some(param) } => number(method, options, param),
                _ => None,
            };
            [Layout::striped(problem.n_q, processes, block.unwrap_or(1)); 2]
        }
    }
}

/// A whole number that is set, or its default.
pub(crate) fn number(method: &Method, options: &Options, param: &str) -> Option<usize> {
    let given = options.get(param).map(|v| v.to_string());
    let default = || method.params.iter().find(|p| p.name == param).map(|p| (p.default)().to_string());
    given.or_else(default)?.parse().ok()
}

/// Whether keys on several processes can be attended to, and if not, all the reasons.
pub fn support(problem: &Problem, method: &Method, options: &Options, padded: bool) -> Support {
    let mut support = method.support(problem, options);
    if let (Spread::Ring { window: None }, true) = (method.claims.spread, support.is_yes()) {
        // What each process does: its queries and another one's keys.
        let rectangle = Problem { mask: Mask::None, ..problem.with_lens(problem.n_q, problem.n_k / 2) };
        support = method.support(&rectangle, options);
    }
    let near = Near::split(problem.near, options, method.params).map_or(problem.near, |(near, _)| near);
    let name = method.id;
    support = match method.claims.spread {
        Spread::Refused { reason } => {
            support.and_unless(true, format!("{name} has no schedule for keys on several processes: {reason}"))
        }
        Spread::Scan { .. } | Spread::Gather => {
            support.and_unless(padded, "sums and stand-ins are those of whole sequences: run without padding")
        }
        Spread::Ring { window } => support.and_unless(
            window.is_some() && padded && problem.mask == Mask::None,
            "without a mask the window of a padded sequence stands at its own end: run sequences of one length",
        )
        .and_unless(
            window.is_some() && options.get("positions").is_some_and(|v| v.to_string() != "original"),
            "positions = cache_relative turns queries by their place in the whole sequence",
        ),
    };
    support
        .and_unless(
            !near.is_none(),
            "a near field joins keys by their positions, which a block of keys on its way does not have",
        )
        .and_unless(
            problem.mask == Mask::Causal && problem.n_q != problem.n_k,
            "with a causal mask every token needs a query and a key: stripes are those of both",
        )
        .and_unless(method.claims.needs == Needs::Calibration, "calibrations are not sent to other processes")
}

/// Attends with this process's queries to the keys of all processes. Every process calls it with the same problem, method
/// and options, and its own part of the data.
pub fn attend<T: Element>(
    t: &dyn Transport,
    problem: &Problem,
    method: &Method,
    options: &Options,
    x: &Parts<'_, T>,
    wire: Wire,
    ws: &mut Workspace,
) -> Result<Answer<T>> {
    problem.validate()?;
    let support = support(problem, method, options, x.key_lens.is_some());
    if !support.is_yes() {
        return Err(Error::Unsupported { method: method.id.into(), reasons: support.reasons });
    }
    let p = problem;
    expect("queries", x.q.dims(), [p.batch, p.n_heads, p.n_q, p.d])?;
    expect("keys", x.k.dims(), [p.batch, p.n_kv_heads, p.n_k, p.d])?;
    expect("values", x.v.dims(), [p.batch, p.n_kv_heads, p.n_k, p.d_v])?;
    let [q_layout, k_layout] = layouts(problem, method, options, t.size());
    if x.q.layout() != q_layout || x.k.layout() != k_layout || x.v.layout() != k_layout {
        let found = format!("{:?} and {:?}", x.q.layout(), x.k.layout());
        return Err(Error::shape("layouts", format!("{q_layout:?} and {k_layout:?}"), found));
    }
    if let Some(lens) = x.key_lens
        && (lens.len() != p.batch || lens.iter().any(|&n| n > p.n_k))
    {
        return Err(Error::shape(
            "key lengths",
            format!("{} of at most {}", p.batch, p.n_k),
            format!("{lens:?}"),
        ));
    }
    let before = t.traffic();
    let mut answer = match method.claims.spread {
        Spread::Ring { window: None } => ring::ring(t, p, method, options, x, wire, ws)?,
        Spread::Ring { window: Some(names) } => ring::window(t, p, method, options, names, x, wire, ws)?,
        Spread::Scan { .. } => scan::scan(t, p, method, options, x, ws)?,
        Spread::Gather => gather::gather(t, p, method, options, x, ws)?,
        Spread::Refused { .. } => unreachable!("refused above"),
    };
    answer.traffic = t.traffic().since(before);
    Ok(answer)
}

fn expect(what: &'static str, dims: [usize; 4], want: [usize; 4]) -> Result<()> {
    if dims == want { Ok(()) } else { Err(Error::shape(what, format!("{want:?}"), format!("{dims:?}"))) }
}

/// Rows of one process that parts over disjoint keys are merged into.
#[derive(Debug)]
pub(crate) struct Rows<T> {
    pub(crate) o: Vec<T>,
    pub(crate) lse: Vec<T>,
    heads: usize,
    rows: usize,
    d_v: usize,
}

impl<T: Element> Rows<T> {
    /// Rows that have seen nothing yet.
    pub(crate) fn new(p: &Problem, rows: usize) -> Self {
        let heads = p.batch * p.n_heads;
        Self {
            o: vec![T::ZERO; heads * rows * p.d_v],
            lse: vec![T::NEG_INFINITY; heads * rows],
            heads,
            rows,
            d_v: p.d_v,
        }
    }

    /// Merges a part over other keys, for rows `range` of every head; `o` and `lse` hold `step ≥ range.len()` rows a head.
    pub(crate) fn merge(&mut self, range: Range<usize>, o: &[T], lse: &[T], step: usize, ws: &Workspace) {
        let (rows, d_v, len) = (self.rows, self.d_v, range.len());
        if len == 0 || self.heads == 0 {
            return;
        }
        let heads = self.o.par_chunks_mut(rows * d_v).zip(self.lse.par_chunks_mut(rows)).enumerate();
        ws.install(|_| {
            heads.for_each(|(h, (out, out_lse))| {
                for i in 0..len {
                    let (to, from) = (range.start + i, h * step + i);
                    let part = &o[from * d_v..(from + 1) * d_v];
                    merge_lse(&mut out[to * d_v..(to + 1) * d_v], &mut out_lse[to], part, lse[from]);
                }
            });
        });
    }

    /// Writes rows `range` of every head.
    pub(crate) fn set(&mut self, range: Range<usize>, o: &[T], lse: Option<&[T]>, step: usize) {
        for h in 0..self.heads {
            let (to, from) = ((h * self.rows + range.start) * self.d_v, h * step * self.d_v);
            let len = range.len();
            self.o[to..to + len * self.d_v].copy_from_slice(&o[from..from + len * self.d_v]);
            if let Some(lse) = lse {
                let to = h * self.rows + range.start;
                self.lse[to..to + len].copy_from_slice(&lse[h * step..h * step + len]);
            }
        }
    }

    /// Rows that are padding see nothing.
    pub(crate) fn clear(&mut self, batch: usize, heads_each: usize, rows: Range<usize>) {
        for h in batch * heads_each..(batch + 1) * heads_each {
            let from = h * self.rows;
            self.o[(from + rows.start) * self.d_v..(from + rows.end) * self.d_v].fill(T::ZERO);
            self.lse[from + rows.start..from + rows.end].fill(T::NEG_INFINITY);
        }
    }

    pub(crate) fn answer(self, lse: bool, info: RunInfo) -> Answer<T> {
        Answer { o: self.o, lse: lse.then_some(self.lse), info, traffic: Traffic::default() }
    }
}

/// Runs a plan of `method` on one rectangle: some queries and some keys. Returns contiguous rows and their log-sum-exp.
pub(crate) fn rectangle<T: Element>(
    p: &Problem,
    method: &Method,
    options: &Options,
    q: TensorRef<'_, T>,
    k: TensorRef<'_, T>,
    v: TensorRef<'_, T>,
    key_lens: Option<&[usize]>,
    ws: &mut Workspace,
) -> Result<(Vec<T>, Vec<T>, RunInfo)> {
    let p = &p.with_lens(q.dims()[2], k.dims()[2]);
    let plan = method.plan(p, options)?;
    let rows = p.batch * p.n_heads * p.n_q;
    let (mut o, mut lse) = (vec![T::ZERO; rows * p.d_v], vec![T::ZERO; rows]);
    let out = Out::with_lse(TensorMut::bhnd(&mut o, [p.batch, p.n_heads, p.n_q, p.d_v])?, &mut lse);
    let x = Qkv::new(q, k, v);
    let x = match key_lens {
        Some(lens) => x.padded(lens, Align::Start),
        None => x,
    };
    let info = plan.execute(&T::inputs(x), &mut T::output(out), ws)?;
    Ok((o, lse, info))
}

/// Where the rows of each piece begin among those of its process.
pub(crate) fn starts(pieces: &[Range<usize>]) -> Vec<usize> {
    let mut at = 0;
    pieces
        .iter()
        .map(|piece| {
            at += piece.len();
            at - piece.len()
        })
        .collect()
}
