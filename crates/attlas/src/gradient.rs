//! Gradients with respect to queries, keys and values, from those with respect to the results of a plan.
//!
//! [`Plan::backward`](crate::Plan::backward) takes a [`Pass`]: the inputs and results of a run, the gradient with
//! respect to the results, and the destinations of the gradients of queries, keys and values. Methods that claim
//! [`gradient`](crate::Claims::gradient) implement [`GroupPlan::backward`](crate::GroupPlan::backward) for one key
//! head; the runner here checks shapes, reads strides, cuts off padding and runs the groups in parallel.
//!
//! ```
//! use attlas::gradient::{Backward, Pass};
//! use attlas::{Options, Out, Plan, Problem, Qkv, TensorMut, TensorRef, Workspace, registry};
//!
//! let (n, d) = (100, 16);
//! let x: Vec<f32> = (0..n * d).map(|i| (i as f32 * 0.37).sin()).collect();
//! let dims = [1, 1, n, d];
//! let t = TensorRef::bhnd(&x, dims)?;
//! let plan = registry::baseline().plan(&Problem::new(1, n, d).causal(), &Options::new())?;
//! let mut ws = Workspace::single()?;
//! let (mut o, mut lse) = (vec![0.0f32; n * d], vec![0.0f32; n]);
//! let qkv = Qkv::new(t, t, t);
//! plan.execute(&qkv.into(), &mut Out::with_lse(TensorMut::bhnd(&mut o, dims)?, &mut lse).into(), &mut ws)?;
//!
//! // The gradient of half the squared norm of the output.
//! let [mut dq, mut dk, mut dv] = [(); 3].map(|()| vec![0.0f32; n * d]);
//! let o = TensorRef::bhnd(&o, dims)?;
//! let pass = Pass {
//!     x: qkv,
//!     o,
//!     lse: &lse,
//!     d_o: o,
//!     d_lse: None,
//!     dq: TensorMut::bhnd(&mut dq, dims)?,
//!     dk: TensorMut::bhnd(&mut dk, dims)?,
//!     dv: TensorMut::bhnd(&mut dv, dims)?,
//! };
//! plan.backward(&mut Backward::from(pass), &mut ws)?;
//! assert!(dv.iter().any(|g| *g != 0.0));
//! # Ok::<(), attlas::Error>(())
//! ```

use crate::group::{GroupIndex, Queries};
use crate::problem::Dims;
use crate::workspace::Context;
use crate::{Error, Mask, MatRef, Problem, Qkv, Real, Result, TensorMut, TensorRef, Workspace};
use attlas_num::kernels::{Band, dot};
use attlas_num::par::*;
use attlas_num::scratch::Buf;
use std::ops::Range;

/// One backward pass in one element type.
#[derive(Debug)]
pub struct Pass<'a, T> {
    /// The inputs of the run.
    pub x: Qkv<'a, T>,
    /// Its outputs, `[batch, n_heads, n_q, d_v]`.
    pub o: TensorRef<'a, T>,
    /// Its log-sum-exps, contiguous `[batch, n_heads, n_q]`.
    pub lse: &'a [T],
    /// Gradient with respect to the outputs.
    pub d_o: TensorRef<'a, T>,
    /// Gradient with respect to the log-sum-exps, if any.
    pub d_lse: Option<&'a [T]>,
    /// Destination of the gradient of the queries.
    pub dq: TensorMut<'a, T>,
    /// Destination of the gradient of the keys.
    pub dk: TensorMut<'a, T>,
    /// Destination of the gradient of the values.
    pub dv: TensorMut<'a, T>,
}

/// A backward pass in single or double precision.
#[derive(Debug)]
pub enum Backward<'a> {
    /// Single precision.
    F32(Pass<'a, f32>),
    /// Double precision.
    F64(Pass<'a, f64>),
}

impl<'a> From<Pass<'a, f32>> for Backward<'a> {
    fn from(x: Pass<'a, f32>) -> Self {
        Backward::F32(x)
    }
}

impl<'a> From<Pass<'a, f64>> for Backward<'a> {
    fn from(x: Pass<'a, f64>) -> Self {
        Backward::F64(x)
    }
}

impl<T: Real> Pass<'_, T> {
    /// Returns the same pass with other inputs of the same sizes.
    pub(crate) fn reborrow_with<'b>(&'b mut self, x: Qkv<'b, T>) -> Pass<'b, T> {
        Pass {
            x,
            o: self.o,
            lse: self.lse,
            d_o: self.d_o,
            d_lse: self.d_lse,
            dq: self.dq.reborrow(),
            dk: self.dk.reborrow(),
            dv: self.dv.reborrow(),
        }
    }

    /// Checks that everything has the sizes of the problem.
    fn validate(&self, p: &Problem) -> Result<()> {
        self.x.validate(p)?;
        let expect = |what, dims: Dims, want: Dims| {
            if dims == want {
                Ok(())
            } else {
                Err(Error::shape(what, format!("{want:?}"), format!("{dims:?}")))
            }
        };
        let out = [p.batch, p.n_heads, p.n_q, p.d_v];
        expect("outputs", self.o.dims(), out)?;
        expect("gradient of outputs", self.d_o.dims(), out)?;
        expect("gradient of queries", self.dq.dims(), [p.batch, p.n_heads, p.n_q, p.d])?;
        expect("gradient of keys", self.dk.dims(), [p.batch, p.n_kv_heads, p.n_k, p.d])?;
        expect("gradient of values", self.dv.dims(), [p.batch, p.n_kv_heads, p.n_k, p.d_v])?;
        let rows = p.batch * p.n_heads * p.n_q;
        for (what, len) in
            [("log-sum-exp", Some(self.lse.len())), ("gradient of log-sum-exps", self.d_lse.map(<[T]>::len))]
        {
            if let Some(len) = len.filter(|&len| len != rows) {
                return Err(Error::shape(what, format!("{rows} elements"), len));
            }
        }
        Ok(())
    }
}

/// One group of a backward pass: everything that [`GroupPlan::backward`](crate::GroupPlan::backward) reads and writes.
#[derive(Debug)]
pub struct GroupBackward<'a, T> {
    /// Queries of all heads that share the keys.
    pub q: Queries<'a, T>,
    /// Keys, `n_k × d`.
    pub k: MatRef<'a, T>,
    /// Values, `n_k × d_v`.
    pub v: MatRef<'a, T>,
    /// Factor on the inner products.
    pub scale: T,
    /// Which keys a query may see.
    pub mask: Mask,
    /// Log-sum-exp of each row, `heads × n_q`.
    pub lse: &'a [T],
    /// Gradient with respect to the outputs, laid out as the queries are.
    pub d_o: Queries<'a, T>,
    /// Per row, the inner product of output and `d_o`, less the gradient of its log-sum-exp; `heads × n_q`.
    pub delta: &'a [T],
    /// Gradient of the queries, contiguous `heads × n_q × d`, unspecified at first.
    pub dq: &'a mut [T],
    /// Gradient of the keys, contiguous `n_k × d`, zero at first.
    pub dk: &'a mut [T],
    /// Gradient of the values, contiguous `n_k × d_v`, zero at first.
    pub dv: &'a mut [T],
    /// Sequence and key head of the group.
    pub index: GroupIndex,
    /// Schedule and scratch memory.
    pub cx: Context<'a>,
}

impl<T: Real> GroupBackward<'_, T> {
    /// Returns the number of query rows of each head.
    pub fn n_q(&self) -> usize {
        self.q.n_q()
    }

    /// Returns the mask as a band: row `i` sees key `j` when `j − i ≤ n_k − n_q`.
    pub fn band(&self) -> Band {
        match self.mask {
            Mask::None => Band::ALL,
            Mask::Causal => Band::causal(self.k.rows() as isize - self.n_q() as isize),
        }
    }
}

/// Gradients of queries, keys and values of one group, with its numbers of rows per head and of keys.
struct Done<'s, T> {
    dq: Buf<'s, T>,
    dk: Buf<'s, T>,
    dv: Buf<'s, T>,
    rows: usize,
    keys: usize,
}

/// Runs `work` on every group of a problem and writes the gradients; padding gets the gradient 0. Nothing is written when
/// an error is returned.
pub(crate) fn run_backward<T: Real>(
    p: &Problem,
    pass: &mut Pass<'_, T>,
    ws: &mut Workspace,
    work: &(dyn Fn(GroupBackward<'_, T>) -> Result<()> + Sync),
) -> Result<()> {
    pass.validate(p)?;
    let (x, o, d_o, lse, d_lse) = (pass.x, pass.o, pass.d_o, pass.lse, pass.d_lse);
    ws.install(|cx| {
        let cx = Context { groups: p.batch * p.n_kv_heads, ..cx };
        let group = |g: usize| -> Result<Done<'_, T>> {
            let index = GroupIndex { batch: g / p.n_kv_heads, kv_head: g % p.n_kv_heads };
            let GroupIndex { batch, kv_head } = index;
            let (size, keys) = (p.group_size(), x.key_lens.map_or(p.n_k, |lens| lens[batch]));
            let (rows, heads) = (x.valid_rows(p, batch), kv_head * size..(kv_head + 1) * size);
            let (d_o, o) = (queries_of(d_o, batch, &heads, rows), queries_of(o, batch, &heads, rows));
            let mut own_lse = cx.scratch.take::<T>(size * rows);
            let mut delta = cx.scratch.take::<T>(size * rows);
            for h in 0..size {
                let first = (batch * p.n_heads + heads.start + h) * p.n_q;
                let at = h * rows..(h + 1) * rows;
                own_lse[at.clone()].copy_from_slice(&lse[first..first + rows]);
                for (i, delta) in delta[at].iter_mut().enumerate() {
                    let reached = d_lse.map_or(T::ZERO, |d| d[first + i]);
                    *delta = dot(o.head(h).row(i), d_o.head(h).row(i)) - reached;
                }
            }
            let mut dq = cx.scratch.take::<T>(size * rows * p.d);
            let mut dk = cx.scratch.take_zeroed::<T>(keys * p.d);
            let mut dv = cx.scratch.take_zeroed::<T>(keys * p.d_v);
            if rows > 0 {
                work(GroupBackward {
                    q: queries_of(x.q, batch, &heads, rows),
                    k: x.k.head(batch, kv_head).sub_rows(0..keys),
                    v: x.v.head(batch, kv_head).sub_rows(0..keys),
                    scale: T::from_f64(p.scale),
                    mask: p.mask,
                    lse: &own_lse,
                    d_o,
                    delta: &delta,
                    dq: &mut dq,
                    dk: &mut dk,
                    dv: &mut dv,
                    index,
                    cx,
                })?;
            }
            Ok(Done { dq, dk, dv, rows, keys })
        };
        let done: Result<Vec<_>> =
            (0..p.batch * p.n_kv_heads).into_par_iter().with_max_len(1).map(group).collect();
        for (g, Done { dq, dk, dv, rows, keys }) in done?.into_iter().enumerate() {
            let (batch, kv_head) = (g / p.n_kv_heads, g % p.n_kv_heads);
            for h in 0..p.group_size() {
                let head = kv_head * p.group_size() + h;
                copy_rows(&mut pass.dq, batch, head, &dq[h * rows * p.d..(h + 1) * rows * p.d], rows);
            }
            copy_rows(&mut pass.dk, batch, kv_head, &dk, keys);
            copy_rows(&mut pass.dv, batch, kv_head, &dv, keys);
        }
        Ok(())
    })
}

/// Returns the first rows of some heads of one sequence.
fn queries_of<'t, T: Real>(
    t: TensorRef<'t, T>,
    batch: usize,
    heads: &Range<usize>,
    rows: usize,
) -> Queries<'t, T> {
    Queries::new(t.batch(batch).heads(heads.clone()).rows(0..rows))
}

/// Copies the first `rows` rows of a head and sets the others to 0.
fn copy_rows<T: Real>(to: &mut TensorMut<'_, T>, batch: usize, head: usize, from: &[T], rows: usize) {
    let [_, _, all, width] = to.dims();
    for i in 0..all {
        let row = to.row_mut(batch, head, i);
        if i < rows { row.copy_from_slice(&from[i * width..(i + 1) * width]) } else { row.fill(T::ZERO) }
    }
}
