//! The interface of one key head, which a method's author implements, and the runner around it.
//!
//! A method sees the keys and values of one key head and the query rows of all query heads that share it. The
//! runner here checks shapes, reads strides, cuts off padding, runs groups in parallel, hands out scratch
//! memory and the names of random streams, and writes outputs in the caller's layout.

use crate::engine::SortedRule;
use crate::engine::near::NearField;
use crate::gradient::{Backward, GroupBackward, Pass, run_backward};
use crate::method::{Cost, Method, Plan, RunInfo, Spec, Stream, Support};
use crate::problem::Dims;
use crate::spread::Numbers;
use crate::workspace::Context;
use crate::{Error, Inputs, Mask, Out, Output, Problem, Qkv, Result, Schedule, Tensor, TensorRef, Workspace};
use attlas_num::kernels::Band;
use attlas_num::par::*;
use attlas_num::rng::StreamKey;
use attlas_num::{DType, MatRef, Real};
use std::fmt::Debug;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// The queries of one group: `heads × n_q` rows.
#[derive(Clone, Copy, Debug)]
pub struct Queries<'a, T> {
    tensor: TensorRef<'a, T>,
}

impl<'a, T: Real> Queries<'a, T> {
    /// Wraps a `[1, heads, n_q, d]` tensor of queries.
    pub fn new(tensor: TensorRef<'a, T>) -> Self {
        Self { tensor }
    }

    /// Returns the number of query heads in the group.
    pub fn heads(&self) -> usize {
        self.tensor.dims()[1]
    }

    /// Returns the number of rows of each head.
    pub fn n_q(&self) -> usize {
        self.tensor.dims()[2]
    }

    /// Returns the rows of head `h`.
    pub fn head(&self, h: usize) -> MatRef<'a, T> {
        self.tensor.head(0, h)
    }

    /// Returns head `h` alone.
    #[must_use]
    pub fn only(&self, h: usize) -> Self {
        Self { tensor: self.tensor.heads(h..h + 1) }
    }

    /// Returns rows `range` of every head.
    #[must_use]
    pub fn rows(&self, range: std::ops::Range<usize>) -> Self {
        Self { tensor: self.tensor.rows(range) }
    }

    /// Returns row `i` of every head as a `heads × d` matrix, or `None` if the strides do not allow it.
    pub fn token(&self, i: usize) -> Option<MatRef<'a, T>> {
        self.tensor.token(0, i)
    }

    /// Iterates over every row of every head, head after head.
    pub fn iter_rows(self) -> impl Iterator<Item = &'a [T]> {
        (0..self.heads()).flat_map(move |h| {
            let head = self.head(h);
            (0..head.rows()).map(move |i| head.row(i))
        })
    }
}

/// One group: everything that [`GroupPlan::run`] reads and writes.
#[derive(Debug)]
pub struct Group<'a, T> {
    /// Queries of all heads that share the keys.
    pub q: Queries<'a, T>,
    /// Keys, `n_k × d`; fewer than planned if the sequence is padded.
    pub k: MatRef<'a, T>,
    /// Values, `n_k × d_v`.
    pub v: MatRef<'a, T>,
    /// Factor on the inner products.
    pub scale: T,
    /// Which keys a query may see.
    pub mask: Mask,
    /// Output rows, contiguous `heads × n_q × d_v`, unspecified at first.
    pub out: &'a mut [T],
    /// Log-sum-exp of each row, contiguous `heads × n_q`, unspecified at first. Always present.
    pub lse: &'a mut [T],
    /// Sequence and key head of the group.
    pub index: GroupIndex,
    /// Schedule and scratch memory. Code already runs on the workspace's threads: use [`attlas_num::par`] or rayon freely.
    pub cx: Context<'a>,
}

/// Sequence and key head of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupIndex {
    /// The sequence.
    pub batch: usize,
    /// The key head.
    pub kv_head: usize,
}

impl GroupIndex {
    /// Returns the random streams of this group under `seed`.
    pub fn stream_key(self, seed: u64) -> StreamKey {
        StreamKey::new(seed).with(self.batch as u64).with(self.kv_head as u64)
    }
}

impl<'a, T: Real> Group<'a, T> {
    /// Makes the group of one decoding step: one query row per head over all keys of a stream.
    #[allow(clippy::too_many_arguments)]
    pub fn decode(
        q: MatRef<'a, T>,
        k: MatRef<'a, T>,
        v: MatRef<'a, T>,
        scale: T,
        out: &'a mut [T],
        lse: &'a mut [T],
        index: GroupIndex,
        cx: Context<'a>,
    ) -> Result<Self> {
        let tensor = TensorRef::new(q.data(), [1, q.rows(), 1, q.cols()], [0, q.stride(), q.cols()])?;
        Ok(Self { q: Queries::new(tensor), k, v, scale, mask: Mask::None, out, lse, index, cx })
    }

    /// Returns the same group, borrowed for a shorter time.
    pub fn reborrow(&mut self) -> Group<'_, T> {
        Group {
            q: self.q,
            k: self.k,
            v: self.v,
            scale: self.scale,
            mask: self.mask,
            out: self.out,
            lse: self.lse,
            index: self.index,
            cx: self.cx,
        }
    }

    /// Returns the number of keys.
    pub fn n_k(&self) -> usize {
        self.k.rows()
    }

    /// Returns the number of query rows of each head.
    pub fn n_q(&self) -> usize {
        self.q.n_q()
    }

    /// Returns the width of values.
    pub fn d_v(&self) -> usize {
        self.v.cols()
    }

    /// Returns the mask as a band: row `i` sees key `j` when `j − i ≤ n_k − n_q`.
    pub fn band(&self) -> Band {
        match self.mask {
            Mask::None => Band::ALL,
            Mask::Causal => Band::causal(self.n_k() as isize - self.n_q() as isize),
        }
    }

    /// Returns the number of keys that row `i` of a head sees; they are keys `0..visible(i)`.
    pub fn visible(&self, i: usize) -> usize {
        self.mask.visible(self.n_q(), self.n_k(), i)
    }

    /// Returns true if queries, keys and values are all finite.
    pub fn is_finite(&self) -> bool {
        let finite = |row: &[T]| row.iter().all(|x| x.is_finite());
        self.q.iter_rows().all(finite) && self.k.iter_rows().all(finite) && self.v.iter_rows().all(finite)
    }

    /// Returns the number of pairs of a query row and a key it sees, over all heads of the group.
    pub fn visible_pairs(&self) -> u64 {
        let rows: usize = (0..self.n_q()).map(|i| self.visible(i)).sum();
        (rows * self.q.heads()) as u64
    }

    /// Writes every row as one that sees no key: zero output, log-sum-exp −∞.
    pub fn fill_empty(&mut self) -> RunInfo {
        self.out.fill(T::ZERO);
        self.lse.fill(T::NEG_INFINITY);
        RunInfo { empty_rows: self.lse.len() as u64, ..RunInfo::default() }
    }

    /// Runs `work` in parallel on blocks of `rows_per_block` rows of each head, later blocks first: under a causal mask
    /// these take longest, so a free thread always takes the longest block left. Results come in this order, too.
    pub fn par_row_blocks<R: Send>(
        &mut self,
        rows_per_block: usize,
        work: impl Fn(RowBlock<'_, T>) -> Result<R> + Sync + Send,
    ) -> Result<Vec<R>> {
        let threads = self.cx.schedule.threads;
        let blocks = self.row_blocks(rows_per_block);
        // One slot per block: sorting the results would compile a sort for every result type.
        let results: Mutex<Vec<Option<R>>> = Mutex::new(blocks.iter().map(|_| None).collect());
        run_blocks(blocks, threads, &|at, block| {
            let result = work(block)?;
            results.lock().unwrap_or_else(PoisonError::into_inner)[at] = Some(result);
            Ok(())
        })?;
        let results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
        Ok(results.into_iter().flatten().collect())
    }

    /// Returns the blocks of [`par_row_blocks`](Self::par_row_blocks), in its order.
    fn row_blocks(&mut self, rows_per_block: usize) -> Vec<RowBlock<'_, T>> {
        let (n_q, d_v) = (self.n_q(), self.d_v());
        let mut blocks = Vec::new();
        if n_q == 0 {
            return blocks;
        }
        let rows_per_block = rows_per_block.clamp(1, n_q);
        for (head, (out, lse)) in self.out.chunks_mut(n_q * d_v).zip(self.lse.chunks_mut(n_q)).enumerate() {
            let q = self.q.head(head);
            for (b, (out, lse)) in
                out.chunks_mut(rows_per_block * d_v).zip(lse.chunks_mut(rows_per_block)).enumerate()
            {
                let first = b * rows_per_block;
                blocks.push(RowBlock { head, first, q: q.sub_rows(first..first + lse.len()), out, lse });
            }
        }
        blocks.sort_by_key(|b| std::cmp::Reverse(b.first));
        blocks
    }
}

/// Runs `work` on blocks in order, each on whichever thread is free. Compiled once per element type, not once per
/// caller: the code of a parallel loop is larger than most of what runs inside.
fn run_blocks<T: Real>(
    blocks: Vec<RowBlock<'_, T>>,
    threads: usize,
    work: &(dyn Fn(usize, RowBlock<'_, T>) -> Result<()> + Sync),
) -> Result<()> {
    let blocks: Vec<Mutex<Option<RowBlock<'_, T>>>> =
        blocks.into_iter().map(|b| Mutex::new(Some(b))).collect();
    let next = AtomicUsize::new(0);
    let take = || {
        let at = next.fetch_add(1, Ordering::Relaxed);
        let block = blocks.get(at)?.lock().unwrap_or_else(PoisonError::into_inner).take()?;
        Some((at, block))
    };
    let of_thread = |_: usize| {
        while let Some((at, block)) = take() {
            work(at, block)?;
        }
        Ok(())
    };
    match threads.min(blocks.len()) {
        0 | 1 => of_thread(0),
        threads => (0..threads).into_par_iter().with_max_len(1).try_for_each(of_thread),
    }
}

/// Consecutive query rows of one head, with slots for their results.
#[derive(Debug)]
pub struct RowBlock<'a, T> {
    /// Head within the group.
    pub head: usize,
    /// First row.
    pub first: usize,
    /// The rows' queries.
    pub q: MatRef<'a, T>,
    /// The rows' outputs, contiguous.
    pub out: &'a mut [T],
    /// The rows' log-sum-exp.
    pub lse: &'a mut [T],
}

/// The numerics of one group, which the author of a method implements.
pub trait GroupPlan: Debug + Send + Sync + Sized + 'static {
    /// True if it computes in double precision, too. Without the feature `double` only the oracles do; plans refuse
    /// double precision for the others.
    const DOUBLE: bool = cfg!(feature = "double");

    /// Returns the counted work for the whole problem, set-up included.
    fn cost(&self, problem: &Problem) -> Cost;

    /// Computes one group.
    fn run<T: Real>(&self, group: Group<'_, T>) -> Result<RunInfo>;

    /// Returns true if `run` writes a log-sum-exp; must agree with the method's claim.
    fn has_lse(&self) -> bool {
        true
    }

    /// Returns true if `run` may return an error. Results then pass through scratch memory, so an error leaves the
    /// caller's output unchanged.
    fn can_fail(&self) -> bool {
        true
    }

    /// Returns true if a run with this many threads ends sooner on the calling thread than after waking others. Used
    /// only for calls from outside the workspace's threads, of plans that cannot fail. `run` then finds one thread in
    /// its context and must not use rayon, which would run on the threads of the process.
    fn on_caller(&self, problem: &Problem, threads: usize) -> bool {
        let _ = (problem, threads);
        false
    }

    /// Returns true if `backward` is implemented; must agree with the method's claim.
    fn has_gradient(&self) -> bool {
        false
    }

    /// Writes the gradients of one group. Called only if `has_gradient` returns true.
    fn backward<T: Real>(&self, g: GroupBackward<'_, T>) -> Result<()> {
        let _ = g;
        Err(no_gradient())
    }

    /// Returns how it sorts and cuts queries and keys: see [`Plan::sorted_rule`].
    fn sorted_rule(&self, problem: &Problem) -> Option<SortedRule<'_>> {
        let _ = problem;
        None
    }

    /// Returns the numbers of a few weighted keys that represent a piece of keys, if the method makes them.
    fn stand_ins<T: Real>(&self, piece: StandIns<'_, T>) -> Option<Vec<T>> {
        let _ = piece;
        None
    }

    /// Attends with the queries of a group to such numbers and to nothing else.
    fn attend_stand_ins<T: Real>(&self, group: Group<'_, T>, stand_ins: &[T]) -> Result<RunInfo> {
        let _ = (group, stand_ins);
        Err(not_made_for("stand-ins", "a method that gathers"))
    }

    /// Makes an empty stream for one group, if the method can decode.
    fn stream<T: Real>(&self, problem: &Problem, index: GroupIndex) -> Option<Box<dyn GroupStream<T>>> {
        let _ = (problem, index);
        None
    }
}

/// Makes the refusal of a plan without a backward pass.
pub(crate) fn no_gradient() -> Error {
    Error::Unsupported { method: "this plan".into(), reasons: vec!["it has no gradient".into()] }
}

/// Makes the refusal of an input that only other plans and streams take.
fn not_made_for(what: &'static str, expected: &str) -> Error {
    Error::shape(what, expected, "another one")
}

/// A piece of keys to be represented by stand-ins: see [`Plan::stand_ins`].
#[derive(Clone, Copy, Debug)]
pub struct StandIns<'a, T> {
    /// Keys.
    pub k: MatRef<'a, T>,
    /// Values.
    pub v: MatRef<'a, T>,
    /// Factor on the inner products.
    pub scale: f64,
    /// Sequence and key head of the keys.
    pub index: GroupIndex,
    /// Index of the piece within the sequence.
    pub piece: u64,
    /// Schedule and scratch memory.
    pub cx: Context<'a>,
}

/// Wraps `plan` as a [`Plan`] of the whole problem. Not public: [`Spec::plan_with`](crate::method::Spec::plan_with)
/// checks first.
pub(crate) fn boxed<S: Spec, P: GroupPlan>(spec: S, plan: P, problem: &Problem) -> Box<dyn Plan> {
    let problem = *problem;
    match problem.near.is_none() {
        true => Box::new(Grouped { problem, spec, plan }),
        false => Box::new(Grouped { problem, spec, plan: NearField::new(&problem, plan) }),
    }
}

/// Decoding for one group.
pub trait GroupStream<T: Real>: Debug + Send {
    /// Appends rows of keys and values.
    fn push(&mut self, k: MatRef<'_, T>, v: MatRef<'_, T>, cx: Context<'_>) -> Result<()>;

    /// Returns true if `push` with this many tokens ends sooner than another thread wakes. It then runs on the caller's
    /// thread, where it must not use rayon.
    fn push_on_caller(&self, tokens: usize) -> bool {
        let _ = tokens;
        false
    }

    /// Attends with one query row per head, `heads × d`, to everything pushed.
    fn attend(
        &mut self,
        q: MatRef<'_, T>,
        scale: T,
        out: &mut [T],
        lse: &mut [T],
        cx: Context<'_>,
    ) -> Result<RunInfo>;

    /// Appends the tokens of `x` and attends with each of them to everything up to itself: token by token, unless the
    /// method has something faster.
    fn extend(&mut self, x: Group<'_, T>) -> Result<RunInfo> {
        token_by_token(x, &mut |k, v, q, scale, out, lse, cx| {
            self.push(k, v, cx)?;
            self.attend(q, scale, out, lse, cx)
        })
    }

    /// Returns the current size of the state in bytes.
    fn state_bytes(&self) -> usize;

    /// Returns the sums that represent everything pushed, if the stream holds nothing else.
    fn sums(&self, cx: Context<'_>) -> Option<Vec<T>> {
        let _ = cx;
        None
    }

    /// Adds the sums of another stream, which represent `tokens` tokens.
    fn add_sums(&mut self, sums: &[T], tokens: usize) -> Result<()> {
        let _ = (sums, tokens);
        Err(not_made_for("sums", "a stream that is a sum over keys"))
    }

    /// Returns the sums of the keys that the next call of [`rows`](Self::rows) brings, under a causal mask, and keeps
    /// the intermediate results for that call. `None` if `rows` has no use for them.
    fn prepare(&mut self, k: MatRef<'_, T>, v: MatRef<'_, T>, cx: Context<'_>) -> Option<Vec<T>> {
        let _ = (k, v, cx);
        None
    }

    /// Computes the rows of `x`, which see everything pushed and, under a causal mask, the keys of `x` up to their own.
    /// Pushes nothing.
    fn rows(&mut self, x: Group<'_, T>) -> Result<RunInfo> {
        let _ = x;
        Err(not_made_for("rows", "a stream that is a sum over keys"))
    }
}

/// Appends one token and attends with it: keys, values, queries, scale, output and log-sum-exp of one row.
type Step<'s, T> = &'s mut dyn FnMut(
    MatRef<'_, T>,
    MatRef<'_, T>,
    MatRef<'_, T>,
    T,
    &mut [T],
    &mut [T],
    Context<'_>,
) -> Result<RunInfo>;

/// Processes the tokens of `x` one after another.
fn token_by_token<T: Real>(x: Group<'_, T>, step: Step<'_, T>) -> Result<RunInfo> {
    let (heads, n, d_v) = (x.q.heads(), x.n_q(), x.d_v());
    let mut q = x.cx.scratch.take::<T>(heads * x.k.cols());
    let (mut out, mut lse) = (x.cx.scratch.take::<T>(heads * d_v), x.cx.scratch.take::<T>(heads));
    let mut info = RunInfo::default();
    for i in 0..n {
        for (h, row) in q.chunks_exact_mut(x.k.cols()).enumerate() {
            row.copy_from_slice(x.q.head(h).row(i));
        }
        let (k, v) = (x.k.sub_rows(i..i + 1), x.v.sub_rows(i..i + 1));
        let rows = MatRef::new(&q, heads, x.k.cols());
        info = info.merge(step(k, v, rows, x.scale, &mut out, &mut lse, x.cx)?);
        for (h, (row, l)) in out.chunks_exact(d_v).zip(&*lse).enumerate() {
            x.out[(h * n + i) * d_v..][..d_v].copy_from_slice(row);
            x.lse[h * n + i] = *l;
        }
    }
    Ok(info)
}

/// A [`GroupPlan`] over all groups of a problem.
#[derive(Debug)]
struct Grouped<S, P> {
    problem: Problem,
    spec: S,
    plan: P,
}

impl<S: Spec, P: GroupPlan> Plan for Grouped<S, P> {
    fn problem(&self) -> &Problem {
        &self.problem
    }

    fn cost(&self) -> Cost {
        self.plan.cost(&self.problem)
    }

    fn execute(&self, inputs: &Inputs<'_>, out: &mut Output<'_>, ws: &mut Workspace) -> Result<RunInfo> {
        match (inputs, out) {
            (Inputs::F32(x), Output::F32(o)) => self.execute_typed(x, o, ws),
            (Inputs::F64(x), Output::F64(o)) if P::DOUBLE => self.execute_typed(x, o, ws),
            (Inputs::F64(_), Output::F64(_)) => Err(single_only(S::METHOD)),
            (x, _) => Err(Error::shape("output element type", format!("{:?}", x.dtype()), "the other one")),
        }
    }

    fn backward(&self, pass: &mut Backward<'_>, ws: &mut Workspace) -> Result<()> {
        match pass {
            Backward::F32(pass) => self.backward_typed(pass, ws),
            Backward::F64(pass) if P::DOUBLE => self.backward_typed(pass, ws),
            Backward::F64(_) => Err(single_only(S::METHOD)),
        }
    }

    fn stream(&self, dtype: DType) -> Option<Box<dyn Stream>> {
        match dtype {
            DType::F32 => self.stream_typed::<f32>(|s| Box::new(s)),
            DType::F64 if P::DOUBLE => self.stream_typed::<f64>(|s| Box::new(s)),
            DType::F64 => None,
        }
    }

    fn sorted_rule(&self) -> Option<SortedRule<'_>> {
        self.plan.sorted_rule(&self.problem)
    }

    fn stand_ins(
        &self,
        k: Tensor<'_>,
        v: Tensor<'_>,
        piece: u64,
        ws: &mut Workspace,
    ) -> Result<Option<Vec<Numbers>>> {
        match (k, v) {
            (Tensor::F32(k), Tensor::F32(v)) => {
                make_stand_ins(&self.problem, k, v, piece, ws, &|x| self.plan.stand_ins(x))
            }
            (Tensor::F64(k), Tensor::F64(v)) if P::DOUBLE => {
                make_stand_ins(&self.problem, k, v, piece, ws, &|x| self.plan.stand_ins(x))
            }
            (Tensor::F64(_), Tensor::F64(_)) => Err(single_only(S::METHOD)),
            (k, _) => Err(wrong_type(k.dtype())),
        }
    }

    fn attend_stand_ins(
        &self,
        q: Tensor<'_>,
        stand_ins: &[Numbers],
        out: &mut Output<'_>,
        ws: &mut Workspace,
    ) -> Result<RunInfo> {
        match (q, out) {
            (Tensor::F32(q), Output::F32(o)) => {
                run_stand_ins(&self.problem, q, stand_ins, o, ws, &|g, list| {
                    self.plan.attend_stand_ins(g, list)
                })
            }
            (Tensor::F64(q), Output::F64(o)) if P::DOUBLE => {
                run_stand_ins(&self.problem, q, stand_ins, o, ws, &|g, list| {
                    self.plan.attend_stand_ins(g, list)
                })
            }
            (Tensor::F64(_), Output::F64(_)) => Err(single_only(S::METHOD)),
            (q, _) => Err(wrong_type(q.dtype())),
        }
    }
}

/// Makes the refusal of double precision where only single precision is compiled.
fn single_only(method: &Method) -> Error {
    let reason =
        "this program computes it in single precision alone: the feature `double` of attlas adds the other";
    Error::Unsupported { method: method.id.into(), reasons: vec![reason.into()] }
}

impl<S: Spec, P: GroupPlan> Grouped<S, P> {
    /// Returns the problem of one call, whose lengths may be smaller than the planned ones.
    fn call(&self, n_q: usize, n_k: usize) -> Result<Problem> {
        shorter(&self.problem, S::METHOD, n_q, n_k, &|call| self.spec.supports(call))
    }

    fn execute_typed<T: Real>(
        &self,
        x: &Qkv<'_, T>,
        out: &mut Out<'_, T>,
        ws: &mut Workspace,
    ) -> Result<RunInfo> {
        let p = self.call(x.q.dims()[2], x.k.dims()[2])?;
        let claims = PlanClaims {
            has_lse: self.plan.has_lse(),
            can_fail: self.plan.can_fail(),
            on_caller: self.plan.on_caller(&p, ws.schedule().threads),
        };
        run_plan(&p, S::METHOD, claims, x, out, ws, &|group| self.plan.run(group))
    }

    fn backward_typed<T: Real>(&self, pass: &mut Pass<'_, T>, ws: &mut Workspace) -> Result<()> {
        let p = self.call(pass.x.q.dims()[2], pass.x.k.dims()[2])?;
        check_gradient(&p, S::METHOD, self.plan.has_gradient())?;
        run_backward(&p, pass, ws, &|g| self.plan.backward(g))
    }

    fn stream_typed<T: Typed>(&self, wrap: fn(GroupedStream<T>) -> Box<dyn Stream>) -> Option<Box<dyn Stream>>
    where
        Self: Sized,
    {
        let p = &self.problem;
        let groups: Option<Vec<_>> = (0..p.batch * p.n_kv_heads)
            .map(|g| {
                let index = GroupIndex { batch: g / p.n_kv_heads, kv_head: g % p.n_kv_heads };
                self.plan.stream::<T>(p, index)
            })
            .collect();
        Some(wrap(GroupedStream { problem: *p, groups: groups?, len: 0 }))
    }
}

// The functions from here on take a method's work as a trait object, so they are compiled once per element type, not
// once per method: the code of a parallel loop is larger than most of what runs inside.

/// Returns `planned` with the lengths of one call; refuses longer calls and those that the method does not support.
fn shorter(
    planned: &Problem,
    method: &Method,
    n_q: usize,
    n_k: usize,
    supports: &dyn Fn(&Problem) -> Support,
) -> Result<Problem> {
    let call = planned.with_lens(n_q, n_k);
    if (n_q, n_k) == (planned.n_q, planned.n_k) {
        return Ok(call);
    }
    if n_q > planned.n_q || n_k > planned.n_k {
        return Err(Error::shape(
            "lengths",
            format!("at most {} queries and {} keys, as planned", planned.n_q, planned.n_k),
            format!("{n_q} and {n_k}"),
        ));
    }
    let mut reasons = supports(&call).reasons;
    reasons.extend(call.near.reasons(method, &call));
    if reasons.is_empty() { Ok(call) } else { Err(Error::Unsupported { method: method.id.into(), reasons }) }
}

/// Returns an error if the plan has no gradient for the problem.
fn check_gradient(p: &Problem, method: &Method, has_gradient: bool) -> Result<()> {
    let reason = if p.softcap.is_some() {
        "it has no gradient where logits are capped: leave softcap out".into()
    } else if !has_gradient {
        let near = if p.near.is_none() { "" } else { ", and none with a near field" };
        format!("it has no gradient with these settings{near}: exact has one")
    } else {
        return Ok(());
    };
    Err(Error::Unsupported { method: method.id.into(), reasons: vec![reason] })
}

/// Properties of a plan for one call, from the methods of [`GroupPlan`] with these names.
struct PlanClaims {
    has_lse: bool,
    can_fail: bool,
    on_caller: bool,
}

/// Checks the tensors of one call and runs every group.
fn run_plan<T: Real>(
    p: &Problem,
    method: &Method,
    claims: PlanClaims,
    x: &Qkv<'_, T>,
    out: &mut Out<'_, T>,
    ws: &mut Workspace,
    run: RunGroup<'_, T>,
) -> Result<RunInfo> {
    x.validate(p)?;
    out.validate(p)?;
    if out.lse.is_some() && !claims.has_lse {
        return Err(Error::Unsupported {
            method: method.id.into(),
            reasons: vec!["it has no log-sum-exp: its sums are not exponentials of logits".into()],
        });
    }
    let outside = rayon::current_thread_index().is_none();
    if !claims.can_fail && outside && claims.on_caller {
        return run_groups_here(p, x, out, ws.context(), run);
    }
    run_groups(p, x, out, ws, !claims.can_fail, run)
}

/// Makes the stand-ins of the keys and values of every group; `None` if the plan has none.
fn make_stand_ins<T: Typed>(
    p: &Problem,
    k: TensorRef<'_, T>,
    v: TensorRef<'_, T>,
    piece: u64,
    ws: &mut Workspace,
    make: &(dyn Fn(StandIns<'_, T>) -> Option<Vec<T>> + Sync),
) -> Result<Option<Vec<Numbers>>> {
    let tokens = k.dims()[2];
    expect("keys", k.dims(), [p.batch, p.n_kv_heads, tokens, p.d])?;
    expect("values", v.dims(), [p.batch, p.n_kv_heads, tokens, p.d_v])?;
    let groups = p.batch * p.n_kv_heads;
    Ok(ws.install(|cx| {
        (0..groups)
            .into_par_iter()
            .with_max_len(1)
            .map(|g| {
                let index = GroupIndex { batch: g / p.n_kv_heads, kv_head: g % p.n_kv_heads };
                let (k, v) = (k.head(index.batch, index.kv_head), v.head(index.batch, index.kv_head));
                make(StandIns { k, v, scale: p.scale, index, piece, cx }).map(T::numbers)
            })
            .collect()
    }))
}

/// Attends to the stand-ins of every group instead of keys.
fn run_stand_ins<T: Typed>(
    planned: &Problem,
    q: TensorRef<'_, T>,
    stand_ins: &[Numbers],
    out: &mut Out<'_, T>,
    ws: &mut Workspace,
    attend: &(dyn Fn(Group<'_, T>, &[T]) -> Result<RunInfo> + Sync),
) -> Result<RunInfo> {
    let p = &Problem { mask: Mask::None, ..planned.with_lens(q.dims()[2], 0) };
    let groups = p.batch * p.n_kv_heads;
    let typed: Option<Vec<&[T]>> = stand_ins.iter().map(T::of_numbers).collect();
    let typed = typed.filter(|lists| lists.len() == groups);
    let typed = typed.ok_or_else(|| {
        Error::shape("stand-ins", format!("{groups} lists of {:?}", T::DTYPE), stand_ins.len())
    })?;
    let none = TensorRef::new(&[], [p.batch, p.n_kv_heads, 0, p.d], [0, 0, p.d])?;
    let no_values = TensorRef::new(&[], [p.batch, p.n_kv_heads, 0, p.d_v], [0, 0, p.d_v])?;
    let x = Qkv::new(q, none, no_values);
    x.validate(p)?;
    out.validate(p)?;
    run_groups(p, &x, out, ws, false, &|group| {
        let list = typed[group.index.batch * p.n_kv_heads + group.index.kv_head];
        attend(group, list)
    })
}

/// A function that computes one group.
type RunGroup<'r, T> = &'r (dyn Fn(Group<'_, T>) -> Result<RunInfo> + Sync);

/// Runs every group of a problem.
fn run_groups<T: Real>(
    p: &Problem,
    x: &Qkv<'_, T>,
    out: &mut Out<'_, T>,
    ws: &mut Workspace,
    direct: bool,
    run: RunGroup<'_, T>,
) -> Result<RunInfo> {
    ws.install(|cx| {
        with_staging(p, out, cx, direct, |o, lse| {
            let rows = p.group_size() * p.n_q;
            let groups = p.batch * p.n_kv_heads;
            let cx = Context { groups, ..cx };
            let one = |g: usize, out: &mut [T], lse: &mut [T]| run_one(p, x, g, out, lse, cx, run);
            if rows * p.d_v == 0 {
                return (0..groups).try_fold(RunInfo::default(), |all, g| {
                    Ok(all.merge(one(g, &mut [], &mut lse[g * rows..][..rows])?))
                });
            }
            // Merged in any order, which makes no difference, and without a list: a model makes one such pass per token
            // and layer. Of several errors, that of the first group is returned.
            let all = Mutex::new((RunInfo::default(), None::<(usize, Error)>));
            let groups = o.par_chunks_mut(rows * p.d_v).zip(lse.par_chunks_mut(rows)).enumerate();
            groups.with_max_len(1).for_each(|(g, (out, lse))| {
                let result = one(g, out, lse);
                let mut all = all.lock().unwrap_or_else(PoisonError::into_inner);
                match result {
                    Ok(info) => all.0 = std::mem::take(&mut all.0).merge(info),
                    Err(e) if all.1.as_ref().is_none_or(|(first, _)| g < *first) => all.1 = Some((g, e)),
                    Err(_) => {}
                }
            });
            let (info, error) = all.into_inner().unwrap_or_else(PoisonError::into_inner);
            error.map_or(Ok(info), |(_, e)| Err(e))
        })
    })
}

/// Runs every group on the calling thread, one after another, for plans that cannot fail and then use no other thread.
fn run_groups_here<T: Real>(
    p: &Problem,
    x: &Qkv<'_, T>,
    out: &mut Out<'_, T>,
    cx: Context<'_>,
    run: RunGroup<'_, T>,
) -> Result<RunInfo> {
    let groups = p.batch * p.n_kv_heads;
    let cx = Context { groups, schedule: Schedule { threads: 1, ..cx.schedule }, ..cx };
    with_staging(p, out, cx, true, |o, lse| {
        let rows = p.group_size() * p.n_q;
        (0..groups).try_fold(RunInfo::default(), |all, g| {
            let (o, lse) = (&mut o[g * rows * p.d_v..][..rows * p.d_v], &mut lse[g * rows..][..rows]);
            Ok(all.merge(run_one(p, x, g, o, lse, cx, run)?))
        })
    })
}

/// Runs group number `g`, whose last rows may be padding.
fn run_one<T: Real>(
    p: &Problem,
    x: &Qkv<'_, T>,
    g: usize,
    out: &mut [T],
    lse: &mut [T],
    cx: Context<'_>,
    run: RunGroup<'_, T>,
) -> Result<RunInfo> {
    let index = GroupIndex { batch: g / p.n_kv_heads, kv_head: g % p.n_kv_heads };
    let group = group_of(p, x, index, out, lse, cx);
    let rows = x.valid_rows(p, index.batch);
    if rows == p.n_q { answer(run, group) } else { run_padded(run, group, rows) }
}

/// Computes the first `rows` rows of every head; the rest is padding and sees nothing.
fn run_padded<T: Real>(run: RunGroup<'_, T>, mut group: Group<'_, T>, rows: usize) -> Result<RunInfo> {
    if rows == 0 {
        return Ok(group.fill_empty());
    }
    let (heads, n_q, d_v, cx) = (group.q.heads(), group.n_q(), group.d_v(), group.cx);
    let (mut o, mut lse) = (cx.scratch.take::<T>(heads * rows * d_v), cx.scratch.take::<T>(heads * rows));
    let q = group.q.rows(0..rows);
    let info = answer(run, Group { q, out: &mut o, lse: &mut lse, ..group.reborrow() })?;
    group.fill_empty();
    for h in 0..heads {
        group.out[h * n_q * d_v..][..rows * d_v].copy_from_slice(&o[h * rows * d_v..][..rows * d_v]);
        group.lse[h * n_q..][..rows].copy_from_slice(&lse[h * rows..][..rows]);
    }
    Ok(RunInfo { empty_rows: info.empty_rows + (heads * (n_q - rows)) as u64, ..info })
}

/// Returns the part of the inputs that one group reads, and its slices of the output.
fn group_of<'a, T: Real>(
    p: &Problem,
    x: &Qkv<'a, T>,
    index: GroupIndex,
    out: &'a mut [T],
    lse: &'a mut [T],
    cx: Context<'a>,
) -> Group<'a, T> {
    let GroupIndex { batch, kv_head } = index;
    let n_k = x.key_lens.map_or(p.n_k, |lens| lens[batch]);
    let heads = kv_head * p.group_size()..(kv_head + 1) * p.group_size();
    Group {
        q: Queries::new(x.q.batch(batch).heads(heads)),
        k: x.k.head(batch, kv_head).sub_rows(0..n_k),
        v: x.v.head(batch, kv_head).sub_rows(0..n_k),
        scale: T::from_f64(p.scale),
        mask: p.mask,
        out,
        lse,
        index,
        cx,
    }
}

/// Runs one group. If NaN and infinities leave a method without an answer, all rows of their own group become NaN, and
/// other groups keep their answers. Under a causal mask some of those rows see no such input, so the error is returned.
fn answer<T: Real>(run: RunGroup<'_, T>, mut group: Group<'_, T>) -> Result<RunInfo> {
    match run(group.reborrow()) {
        Err(_) if group.mask == Mask::None && !group.is_finite() => {
            group.out.fill(T::NAN);
            group.lse.fill(T::NAN);
            let mut info = RunInfo::default();
            info.figures.insert("rows_without_answer", group.lse.len() as f64);
            Ok(info)
        }
        result => result,
    }
}

/// Gives `work` contiguous `[batch, heads, rows]` slices for outputs and log-sum-exp: the caller's own if `direct` and
/// the layout match, otherwise scratch memory that is copied out at the end.
fn with_staging<T: Real>(
    p: &Problem,
    out: &mut Out<'_, T>,
    cx: Context<'_>,
    direct: bool,
    work: impl FnOnce(&mut [T], &mut [T]) -> Result<RunInfo>,
) -> Result<RunInfo> {
    let rows = p.batch * p.n_heads * p.n_q;
    let mut own_lse = (!direct || out.lse.is_none()).then(|| cx.scratch.take::<T>(rows));
    let mut own_o = (!direct || !out.o.is_bhnd()).then(|| cx.scratch.take::<T>(rows * p.d_v));
    let lse = match (&mut own_lse, &mut out.lse) {
        (Some(lse), _) => &mut lse[..],
        (None, Some(lse)) => &mut lse[..],
        (None, None) => unreachable!("taken above"),
    };
    let o = match &mut own_o {
        Some(o) => &mut o[..],
        None => &mut out.o.data_mut()[..rows * p.d_v],
    };
    let info = work(o, lse)?;
    if let (Some(lse), Some(target)) = (&own_lse, &mut out.lse) {
        target.copy_from_slice(lse);
    }
    if let Some(staged) = own_o {
        if out.o.is_bhnd() {
            let target = out.o.data_mut()[..rows * p.d_v].par_chunks_mut(COPIED);
            target.zip(staged.par_chunks(COPIED)).for_each(|(dst, src)| dst.copy_from_slice(src));
            return Ok(info);
        }
        let mut source = staged.chunks_exact(p.d_v);
        for b in 0..p.batch {
            for h in 0..p.n_heads {
                for (i, row) in (0..p.n_q).zip(&mut source) {
                    out.o.row_mut(b, h, i).copy_from_slice(row);
                }
            }
        }
    }
    Ok(info)
}

/// Elements that one task copies: starting a task costs a microsecond, as much as copying some of them.
const COPIED: usize = 1 << 16;

/// Most groups whose next token the caller's thread appends: some microseconds for copies of a row each, as long as
/// waking another thread takes.
const GROUPS_ON_CALLER: usize = 64;

/// Streams of all groups of a problem, behind one [`Stream`].
#[derive(Debug)]
struct GroupedStream<T: Real> {
    problem: Problem,
    groups: Vec<Box<dyn GroupStream<T>>>,
    len: usize,
}

/// Access to the typed part of inputs and outputs.
trait Typed: Real {
    fn inputs<'x, 'a>(inputs: &'x Inputs<'a>) -> Option<&'x Qkv<'a, Self>>;
    fn tensor<'a>(tensor: Tensor<'a>) -> Option<TensorRef<'a, Self>>;
    fn output<'x, 'a>(output: &'x mut Output<'a>) -> Option<&'x mut Out<'a, Self>>;
    fn numbers(list: Vec<Self>) -> Numbers;
    fn of_numbers(numbers: &Numbers) -> Option<&[Self]>;
}

macro_rules! typed {
    ($t:ty, $variant:ident) => {
        impl Typed for $t {
            fn inputs<'x, 'a>(inputs: &'x Inputs<'a>) -> Option<&'x Qkv<'a, Self>> {
                match inputs {
                    Inputs::$variant(x) => Some(x),
                    _ => None,
                }
            }
            fn tensor<'a>(tensor: Tensor<'a>) -> Option<TensorRef<'a, Self>> {
                match tensor {
                    Tensor::$variant(x) => Some(x),
                    _ => None,
                }
            }
            fn output<'x, 'a>(output: &'x mut Output<'a>) -> Option<&'x mut Out<'a, Self>> {
                match output {
                    Output::$variant(x) => Some(x),
                    _ => None,
                }
            }
            fn numbers(list: Vec<Self>) -> Numbers {
                Numbers::$variant(list)
            }
            fn of_numbers(numbers: &Numbers) -> Option<&[Self]> {
                match numbers {
                    Numbers::$variant(x) => Some(x),
                    _ => None,
                }
            }
        }
    };
}
typed!(f32, F32);
typed!(f64, F64);

fn wrong_type(dtype: DType) -> Error {
    Error::shape("element type", format!("{dtype:?}, as the stream was made for"), "the other one")
}

impl<T: Typed> GroupedStream<T> {
    fn tensor<'a>(x: Tensor<'a>) -> Result<TensorRef<'a, T>> {
        T::tensor(x).ok_or_else(|| wrong_type(T::DTYPE))
    }

    /// Runs `work` for every group with its slices of the output.
    fn for_groups(
        &mut self,
        n_q: usize,
        out: &mut Out<'_, T>,
        ws: &mut Workspace,
        work: impl Fn(&mut dyn GroupStream<T>, GroupIndex, &mut [T], &mut [T], Context<'_>) -> Result<RunInfo>
        + Sync,
    ) -> Result<RunInfo> {
        let p = Problem { n_q, ..self.problem };
        out.validate(&p)?;
        let rows = p.group_size() * n_q;
        if rows == 0 {
            return Ok(RunInfo::default());
        }
        ws.install(|cx| {
            with_staging(&p, out, cx, true, |o, lse| {
                let infos: Result<Vec<RunInfo>> = self
                    .groups
                    .par_iter_mut()
                    .with_max_len(1)
                    .zip(o.par_chunks_mut(rows * p.d_v).zip(lse.par_chunks_mut(rows)))
                    .enumerate()
                    .map(|(g, (group, (o, lse)))| {
                        let index = GroupIndex { batch: g / p.n_kv_heads, kv_head: g % p.n_kv_heads };
                        work(&mut **group, index, o, lse, cx)
                    })
                    .collect();
                Ok(infos?.into_iter().fold(RunInfo::default(), RunInfo::merge))
            })
        })
    }
}

impl<T: Typed> Stream for GroupedStream<T> {
    fn push(&mut self, k: Tensor<'_>, v: Tensor<'_>, ws: &mut Workspace) -> Result<()> {
        let p = self.problem;
        let (k, v) = (Self::tensor(k)?, Self::tensor(v)?);
        let tokens = k.dims()[2];
        expect("keys", k.dims(), [p.batch, p.n_kv_heads, tokens, p.d])?;
        expect("values", v.dims(), [p.batch, p.n_kv_heads, tokens, p.d_v])?;
        let push = |g: usize, group: &mut dyn GroupStream<T>, cx: Context<'_>| {
            let (b, h) = (g / p.n_kv_heads, g % p.n_kv_heads);
            group.push(k.head(b, h), v.head(b, h), cx)
        };
        if self.groups.len() <= GROUPS_ON_CALLER && self.groups.iter().all(|g| g.push_on_caller(tokens)) {
            let cx = ws.context();
            self.groups.iter_mut().enumerate().try_for_each(|(g, group)| push(g, &mut **group, cx))?;
        } else {
            ws.install(|cx| {
                let groups = self.groups.par_iter_mut().with_max_len(1).enumerate();
                groups.try_for_each(|(g, group)| push(g, &mut **group, cx))
            })?;
        }
        self.len += tokens;
        Ok(())
    }

    fn attend(&mut self, q: Tensor<'_>, out: &mut Output<'_>, ws: &mut Workspace) -> Result<RunInfo> {
        let p = self.problem;
        let q = Self::tensor(q)?;
        let out = T::output(out).ok_or_else(|| wrong_type(T::DTYPE))?;
        expect("queries", q.dims(), [p.batch, p.n_heads, 1, p.d])?;
        let size = p.group_size();
        self.for_groups(1, out, ws, |group, index, o, lse, cx| {
            let heads = q.batch(index.batch).heads(index.kv_head * size..(index.kv_head + 1) * size);
            // One row per head, gathered if the strides form no matrix.
            let gathered = heads.token(0, 0).is_none().then(|| {
                let mut rows = cx.scratch.take::<T>(size * p.d);
                (0..size)
                    .zip(rows.chunks_exact_mut(p.d))
                    .for_each(|(i, r)| r.copy_from_slice(heads.head(0, i).row(0)));
                rows
            });
            let q = match &gathered {
                Some(rows) => MatRef::new(rows, size, p.d),
                None => heads.token(0, 0).unwrap_or_else(|| unreachable!("checked above")),
            };
            group.attend(q, T::from_f64(p.scale), o, lse, cx)
        })
    }

    fn extend(&mut self, inputs: &Inputs<'_>, out: &mut Output<'_>, ws: &mut Workspace) -> Result<RunInfo> {
        let x = T::inputs(inputs).ok_or_else(|| wrong_type(T::DTYPE))?;
        let out = T::output(out).ok_or_else(|| wrong_type(T::DTYPE))?;
        let tokens = x.k.dims()[2];
        let p = self.problem.with_lens(tokens, tokens).causal();
        x.validate(&p)?;
        if x.key_lens.is_some() {
            return Err(Error::shape("key lengths", "none in a stream", "some"));
        }
        let info = self.for_groups(tokens, out, ws, |group, index, o, lse, cx| {
            group.extend(group_of(&p, x, index, o, lse, cx))
        })?;
        self.len += tokens;
        Ok(info)
    }

    fn len(&self) -> usize {
        self.len
    }

    fn state_bytes(&self) -> usize {
        self.groups.iter().map(|g| g.state_bytes()).sum()
    }

    fn sums(&self, ws: &mut Workspace) -> Option<Numbers> {
        let lists: Option<Vec<Vec<T>>> = self.groups.iter().map(|g| g.sums(ws.context())).collect();
        lists.map(|lists| T::numbers(lists.concat()))
    }

    fn add_sums(&mut self, sums: &Numbers, tokens: usize) -> Result<()> {
        let sums = T::of_numbers(sums).ok_or_else(|| wrong_type(T::DTYPE))?;
        let groups = self.groups.len().max(1);
        if !sums.len().is_multiple_of(groups) {
            return Err(Error::shape("sums", format!("{groups} lists of one length"), sums.len()));
        }
        let each = (sums.len() / groups).max(1);
        for (group, sums) in self.groups.iter_mut().zip(sums.chunks_exact(each)) {
            group.add_sums(sums, tokens)?;
        }
        self.len += tokens;
        Ok(())
    }

    fn prepare(&mut self, k: Tensor<'_>, v: Tensor<'_>, ws: &mut Workspace) -> Result<Option<Numbers>> {
        let p = self.problem;
        let (k, v) = (Self::tensor(k)?, Self::tensor(v)?);
        let tokens = k.dims()[2];
        expect("keys", k.dims(), [p.batch, p.n_kv_heads, tokens, p.d])?;
        expect("values", v.dims(), [p.batch, p.n_kv_heads, tokens, p.d_v])?;
        let lists: Option<Vec<Vec<T>>> = ws.install(|cx| {
            let groups = self.groups.par_iter_mut().with_max_len(1).enumerate();
            let one = |(g, group): (usize, &mut Box<dyn GroupStream<T>>)| {
                let (b, h) = (g / p.n_kv_heads, g % p.n_kv_heads);
                group.prepare(k.head(b, h), v.head(b, h), cx)
            };
            groups.map(one).collect()
        });
        Ok(lists.map(|lists| T::numbers(lists.concat())))
    }

    fn rows(
        &mut self,
        inputs: &Inputs<'_>,
        causal: bool,
        out: &mut Output<'_>,
        ws: &mut Workspace,
    ) -> Result<RunInfo> {
        let x = T::inputs(inputs).ok_or_else(|| wrong_type(T::DTYPE))?;
        let out = T::output(out).ok_or_else(|| wrong_type(T::DTYPE))?;
        let mask = if causal { Mask::Causal } else { Mask::None };
        let p = Problem { mask, ..self.problem.with_lens(x.q.dims()[2], x.k.dims()[2]) };
        x.validate(&p)?;
        self.for_groups(p.n_q, out, ws, |group, index, o, lse, cx| {
            group.rows(group_of(&p, x, index, o, lse, cx))
        })
    }
}

fn expect(what: &'static str, dims: Dims, want: Dims) -> Result<()> {
    if dims == want { Ok(()) } else { Err(Error::shape(what, format!("{want:?}"), format!("{dims:?}"))) }
}
