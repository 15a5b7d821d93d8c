//! Entry point: chooses the schedule, checks support, and runs it.

use crate::{Element, Layout, Sharded, Traffic, Transport, Wire, gather, ring, scan, sort};
use attlas::method::Needs;
use attlas::{
    Align, Error, Mask, Method, Near, Options, Out, Problem, Qkv, Result, RunInfo, Spread, Support,
    TensorMut, TensorRef, Workspace, merge_lse,
};
use attlas_num::kernels::pages;
use attlas_num::par::*;
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
    /// Number of valid keys of each sequence, counted from its start; with a causal mask, queries past them are
    /// padding, too ([`Align::Start`]). All keys if absent.
    pub key_lens: Option<&'a [usize]>,
}

/// The output rows of this process, with the traffic and counts.
#[derive(Clone, Debug, Default)]
pub struct Answer<T> {
    /// `[batch, n_heads, rows, d_v]`, rows as in the queries' part.
    pub o: Vec<T>,
    /// Log-sum-exp of each row, if the method has one.
    pub lse: Option<Vec<T>>,
    /// Run record of this process.
    pub info: RunInfo,
    /// Bytes sent by this process, and the time it waited.
    pub traffic: Traffic,
}

/// Returns the best layouts of queries and keys: stripes with a causal mask, because late rows attend to more keys;
/// pieces without one, and if all rows are equal work because they read sums. Borders do not cut a method's blocks.
/// With a causal mask, [`attend`] accepts stripes and pieces for all methods.
pub fn layouts(problem: &Problem, method: &Method, options: &Options, processes: usize) -> [Layout; 2] {
    let pieces = [problem.n_q, problem.n_k].map(|n| Layout::contiguous(n, processes));
    match (problem.mask, method.claims.spread) {
        (Mask::None, _) => pieces,
        (Mask::Causal, Spread::Scan { .. }) => pieces.map(|l| l.aligned(block(method, options))),
        (Mask::Causal, _) => [Layout::striped(problem.n_q, processes, 1); 2],
    }
}

/// Returns the tokens of one block, which must not be divided between processes with a causal mask.
pub(crate) fn block(method: &Method, options: &Options) -> usize {
    match method.claims.spread {
        Spread::Scan { block: Some(param) } => number(method, options, param).unwrap_or(1),
        _ => 1,
    }
}

/// Returns the value of an integer parameter, or its default.
pub(crate) fn number(method: &Method, options: &Options, param: &str) -> Option<usize> {
    let given = options.get(param).map(|v| v.to_string());
    let default = || method.params.iter().find(|p| p.name == param).map(|p| (p.default)().to_string());
    given.or_else(default)?.parse().ok()
}

/// Checks support for keys on several processes; if it is missing, returns all the reasons.
pub fn support(problem: &Problem, method: &Method, options: &Options, padded: bool) -> Support {
    let mut support = method.support(problem, options);
    if let (Spread::Ring { window: None, .. }, true) = (method.claims.spread, support.is_yes()) {
        // The problem of each process: its queries and another one's keys.
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
        Spread::Ring { window, .. } => support.and_unless(
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

/// Attends with this process's queries to the keys of all processes. Every process calls it with the same problem,
/// method and options, and with its own part of the data.
pub fn attend<T: Element>(
    t: &dyn Transport,
    problem: &Problem,
    method: &Method,
    options: &Options,
    x: &Parts<'_, T>,
    wire: Wire,
    ws: &mut Workspace,
) -> Result<Answer<T>> {
    let mut answer = Answer::default();
    attend_into(t, problem, method, options, x, wire, &mut answer, ws)?;
    Ok(answer)
}

/// The same in the memory of an earlier answer, which is lost: fresh memory costs the system as much time as a fast method
/// takes for its rows.
pub fn attend_into<T: Element>(
    t: &dyn Transport,
    problem: &Problem,
    method: &Method,
    options: &Options,
    x: &Parts<'_, T>,
    wire: Wire,
    answer: &mut Answer<T>,
    ws: &mut Workspace,
) -> Result<()> {
    let memory = std::mem::take(answer);
    problem.validate()?;
    let support = support(problem, method, options, x.key_lens.is_some());
    if !support.is_yes() {
        return Err(Error::Unsupported { method: method.id.into(), reasons: support.reasons });
    }
    let p = problem;
    expect("queries", x.q.dims(), [p.batch, p.n_heads, p.n_q, p.d])?;
    expect("keys", x.k.dims(), [p.batch, p.n_kv_heads, p.n_k, p.d])?;
    expect("values", x.v.dims(), [p.batch, p.n_kv_heads, p.n_k, p.d_v])?;
    let (ql, kl) = (x.q.layout(), x.k.layout());
    let cut = match p.mask {
        Mask::None => !ql.is_striped() && !kl.is_striped(),
        Mask::Causal => ql == kl && kl.align().is_multiple_of(block(method, options)),
    };
    if !cut || kl != x.v.layout() || [ql, kl].iter().any(|l| l.processes() != t.size()) {
        let want = layouts(problem, method, options, t.size());
        return Err(Error::shape("layouts", format!("such as {want:?}"), format!("{ql:?} and {kl:?}")));
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
    let rows = Rows::new(p, ql.rows(t.rank()), memory);
    *answer = match method.claims.spread {
        Spread::Ring { window: None, shared } => {
            // Methods that sort rows are among those whose rows share a budget of keys.
            let whole = shared.is_empty() || t.size() == 1 || x.key_lens.is_some();
            let plan = if whole { None } else { Some(method.plan(p, options)?) };
            match plan.as_ref().and_then(|plan| plan.sorted_rule()) {
                Some(rule) => sort::sort(t, p, &rule, x, wire, rows, ws)?,
                None => ring::ring(t, p, method, options, x, wire, rows, ws)?,
            }
        }
        Spread::Ring { window: Some(names), .. } => {
            ring::window(t, p, method, options, names, x, wire, rows, ws)?
        }
        Spread::Scan { .. } => scan::scan(t, p, method, options, x, rows, ws)?,
        Spread::Gather => gather::gather(t, p, method, options, x, rows, ws)?,
        Spread::Refused { .. } => unreachable!("refused above"),
    };
    answer.traffic = t.traffic().since(before);
    Ok(())
}

fn expect(what: &'static str, dims: [usize; 4], want: [usize; 4]) -> Result<()> {
    if dims == want { Ok(()) } else { Err(Error::shape(what, format!("{want:?}"), format!("{dims:?}"))) }
}

/// Rows of one process into which parts over disjoint keys are merged.
#[derive(Debug)]
pub(crate) struct Rows<T> {
    pub(crate) o: Vec<T>,
    pub(crate) lse: Vec<T>,
    batch: usize,
    heads: usize,
    rows: usize,
    d_v: usize,
}

impl<T: Element> Rows<T> {
    /// Creates rows without any key, in the memory of an earlier answer if it has the size.
    fn new(p: &Problem, rows: usize, memory: Answer<T>) -> Self {
        let heads = p.batch * p.n_heads;
        let (mut o, mut lse) = (memory.o, memory.lse.unwrap_or_default());
        if o.len() != heads * rows * p.d_v {
            // Two outputs are never there at once.
            drop(o);
            o = zeros(heads * rows * p.d_v);
        }
        lse.clear();
        lse.resize(heads * rows, T::NEG_INFINITY);
        Self { o, lse, batch: p.batch.max(1), heads, rows, d_v: p.d_v }
    }

    /// Returns true if rows `range` have no key yet.
    fn is_new(&self, range: &Range<usize>) -> bool {
        self.lse
            .chunks_exact(self.rows.max(1))
            .all(|l| l[range.clone()].iter().all(|&l| l == T::NEG_INFINITY))
    }

    /// Merges a part over other keys, for rows `range` of every head; `o` and `lse` have `step ≥ range.len()` rows per
    /// head.
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

    /// Lets `work` write rows `range` of every head: in place if these are all rows, otherwise in separate storage.
    pub(crate) fn write(
        &mut self,
        range: Range<usize>,
        work: impl FnOnce(Out<'_, T>) -> Result<RunInfo>,
    ) -> Result<RunInfo> {
        let (len, d_v) = (range.len(), self.d_v);
        if len == self.rows {
            let o = TensorMut::bhnd(&mut self.o, [self.batch, self.heads / self.batch, len, d_v])?;
            return work(Out::with_lse(o, &mut self.lse));
        }
        let (mut o, mut lse) = (zeros(self.heads * len * d_v), vec![T::ZERO; self.heads * len]);
        let info = work(Out::with_lse(
            TensorMut::bhnd(&mut o, [self.batch, self.heads / self.batch, len, d_v])?,
            &mut lse,
        ))?;
        for h in 0..self.heads {
            let to = h * self.rows + range.start;
            self.o[to * d_v..(to + len) * d_v].copy_from_slice(&o[h * len * d_v..(h + 1) * len * d_v]);
            self.lse[to..to + len].copy_from_slice(&lse[h * len..(h + 1) * len]);
        }
        Ok(info)
    }

    /// Clears rows of padding.
    pub(crate) fn clear(&mut self, batch: usize, heads_each: usize, rows: Range<usize>) {
        for h in batch * heads_each..(batch + 1) * heads_each {
            let from = h * self.rows;
            self.o[(from + rows.start) * self.d_v..(from + rows.end) * self.d_v].fill(T::ZERO);
            self.lse[from + rows.start..from + rows.end].fill(T::NEG_INFINITY);
        }
    }

    /// Clears the rows that saw no key in any part, and counts them.
    pub(crate) fn clear_empty(&mut self) -> u64 {
        let rows = self.o.chunks_exact_mut(self.d_v.max(1)).zip(&self.lse);
        rows.filter(|(_, lse)| **lse == T::NEG_INFINITY).map(|(o, _)| o.fill(T::ZERO)).count() as u64
    }

    pub(crate) fn answer(self, lse: bool, info: RunInfo) -> Answer<T> {
        Answer { o: self.o, lse: lse.then_some(self.lse), info, traffic: Traffic::default() }
    }
}

/// Runs a plan of `method` on one rectangle, some queries and some keys, and merges the result into rows `at` of
/// `rows`.
pub(crate) fn rectangle<T: Element>(
    rows: &mut Rows<T>,
    at: Range<usize>,
    p: &Problem,
    method: &Method,
    options: &Options,
    q: TensorRef<'_, T>,
    k: TensorRef<'_, T>,
    v: TensorRef<'_, T>,
    key_lens: Option<&[usize]>,
    ws: &mut Workspace,
) -> Result<RunInfo> {
    let p = &p.with_lens(q.dims()[2], k.dims()[2]);
    let plan = method.plan(p, options)?;
    let x = Qkv::new(q, k, v);
    let x = match key_lens {
        Some(lens) => x.padded(lens, Align::Start),
        None => x,
    };
    if p.n_q == at.len() && rows.is_new(&at) {
        return rows.write(at, |out| plan.execute(&T::inputs(x), &mut T::output(out), ws));
    }
    let count = p.batch * p.n_heads * p.n_q;
    let (mut o, mut lse) = (zeros(count * p.d_v), vec![T::ZERO; count]);
    let out = Out::with_lse(TensorMut::bhnd(&mut o, [p.batch, p.n_heads, p.n_q, p.d_v])?, &mut lse);
    let info = plan.execute(&T::inputs(x), &mut T::output(out), ws)?;
    rows.merge(at, &o, &lse, p.n_q, ws);
    Ok(info)
}

/// Returns `len` zeros. Asks for large pages before anything is written: an allocator that counts bytes writes its zeros
/// at once, in small pages that are joined later.
pub(crate) fn zeros<T: Element>(len: usize) -> Vec<T> {
    let mut zeros = Vec::new();
    pages::reserve(&mut zeros, len);
    zeros.resize(len, T::ZERO);
    zeros
}

/// Returns the offset of each piece's rows among those of its process.
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
