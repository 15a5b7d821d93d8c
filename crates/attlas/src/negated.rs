//! A negative scale: the plan of the positive one, with the queries negated.
//!
//! $-\beta\, q^\top k = \beta\, (-q)^\top k$. Methods that rank or hash queries and keys ignore the sign of the scale,
//! so it moves into the queries here, once for all methods.

use crate::gradient::Backward;
use crate::method::{Cost, Plan, RunInfo, Stream};
use crate::{Inputs, Output, Problem, Qkv, Result, Tensor, TensorMut, TensorRef, Workspace};
use attlas_num::{DType, Real};

/// A plan for a positive scale, run with negated queries.
#[derive(Debug)]
pub(crate) struct Negated<P: ?Sized> {
    problem: Problem,
    inner: Box<P>,
}

impl<P: ?Sized> Negated<P> {
    /// Wraps `inner`, a plan of `problem` with the sign of its scale changed.
    pub(crate) fn new(inner: Box<P>, problem: &Problem) -> Self {
        Self { problem: *problem, inner }
    }
}

impl Plan for Negated<dyn Plan> {
    fn problem(&self) -> &Problem {
        &self.problem
    }

    fn cost(&self) -> Cost {
        self.inner.cost()
    }

    fn execute(&self, inputs: &Inputs<'_>, out: &mut Output<'_>, ws: &mut Workspace) -> Result<RunInfo> {
        with_negated(inputs, |inputs| self.inner.execute(inputs, out, ws))
    }

    fn backward(&self, pass: &mut Backward<'_>, ws: &mut Workspace) -> Result<()> {
        match pass {
            Backward::F32(pass) => {
                let q = negated(pass.x.q);
                let x = Qkv { q: TensorRef::bhnd(&q, pass.x.q.dims())?, ..pass.x };
                self.inner.backward(&mut pass.reborrow_with(x).into(), ws)?;
                negate_rows(&mut pass.dq);
            }
            Backward::F64(pass) => {
                let q = negated(pass.x.q);
                let x = Qkv { q: TensorRef::bhnd(&q, pass.x.q.dims())?, ..pass.x };
                self.inner.backward(&mut pass.reborrow_with(x).into(), ws)?;
                negate_rows(&mut pass.dq);
            }
        }
        Ok(())
    }

    fn stream(&self, dtype: DType) -> Option<Box<dyn Stream>> {
        let inner = self.inner.stream(dtype)?;
        Some(Box::new(Negated { problem: self.problem, inner }))
    }
}

impl Stream for Negated<dyn Stream> {
    fn push(&mut self, k: Tensor<'_>, v: Tensor<'_>, ws: &mut Workspace) -> Result<()> {
        self.inner.push(k, v, ws)
    }

    fn attend(&mut self, q: Tensor<'_>, out: &mut Output<'_>, ws: &mut Workspace) -> Result<RunInfo> {
        match q {
            Tensor::F32(q) => self.inner.attend(TensorRef::bhnd(&negated(q), q.dims())?.into(), out, ws),
            Tensor::F64(q) => self.inner.attend(TensorRef::bhnd(&negated(q), q.dims())?.into(), out, ws),
        }
    }

    fn extend(&mut self, inputs: &Inputs<'_>, out: &mut Output<'_>, ws: &mut Workspace) -> Result<RunInfo> {
        with_negated(inputs, |inputs| self.inner.extend(inputs, out, ws))
    }

    fn len(&self) -> usize {
        self.inner.len()
    }

    fn state_bytes(&self) -> usize {
        self.inner.state_bytes()
    }
}

/// Runs `work` on the same inputs with every query negated.
fn with_negated<R>(inputs: &Inputs<'_>, work: impl FnOnce(&Inputs<'_>) -> Result<R>) -> Result<R> {
    match inputs {
        Inputs::F32(x) => {
            let q = negated(x.q);
            work(&Inputs::F32(Qkv { q: TensorRef::bhnd(&q, x.q.dims())?, ..*x }))
        }
        Inputs::F64(x) => {
            let q = negated(x.q);
            work(&Inputs::F64(Qkv { q: TensorRef::bhnd(&q, x.q.dims())?, ..*x }))
        }
    }
}

fn negate_rows<T: Real>(x: &mut TensorMut<'_, T>) {
    let [batch, heads, rows, _] = x.dims();
    for (b, h) in (0..batch).flat_map(|b| (0..heads).map(move |h| (b, h))) {
        for i in 0..rows {
            x.row_mut(b, h, i).iter_mut().for_each(|x| *x = -*x);
        }
    }
}

fn negated<T: Real>(x: TensorRef<'_, T>) -> Vec<T> {
    let [batch, heads, rows, d] = x.dims();
    let mut q = Vec::with_capacity(batch * heads * rows * d);
    for b in 0..batch {
        for h in 0..heads {
            x.head(b, h).iter_rows().for_each(|row| q.extend(row.iter().map(|&x| -x)));
        }
    }
    q
}
