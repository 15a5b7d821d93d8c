//! Exact attention in one call, for the common case.

use crate::{Error, Options, Out, Problem, Qkv, Result, Schedule, TensorMut, TensorRef, Workspace, registry};

/// The shape of a call of [`attention`]: `Attention { causal: true, ..Attention::new(8, 64) }`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attention {
    /// Independent sequences.
    pub batch: usize,
    /// Query heads.
    pub n_heads: usize,
    /// Key and value heads; a divisor of the query heads.
    pub n_kv_heads: usize,
    /// Width of queries and keys.
    pub d: usize,
    /// Width of values.
    pub d_v: usize,
    /// Factor on the inner products; $1/\sqrt d$ where absent.
    pub scale: Option<f64>,
    /// True if query `i` sees key `j` only when `j ≤ i + (n_k − n_q)`.
    pub causal: bool,
}

impl Attention {
    /// Makes the shape of one sequence, `n_heads` heads of width `d`, no mask.
    pub fn new(n_heads: usize, d: usize) -> Self {
        Self { batch: 1, n_heads, n_kv_heads: n_heads, d, d_v: d, scale: None, causal: false }
    }

    /// Returns the problem of slices with these numbers of elements.
    fn problem(&self, q: usize, k: usize, v: usize) -> Result<Problem> {
        let rows = |what, len: usize, heads: usize, width: usize| {
            let each = self.batch.checked_mul(heads).and_then(|x| x.checked_mul(width)).filter(|&x| x > 0);
            match each {
                Some(each) if len.is_multiple_of(each) => Ok(len / each),
                _ => Err(Error::shape(
                    what,
                    format!("a multiple of {} sequences × {heads} heads × width {width}", self.batch),
                    format!("{len} elements"),
                )),
            }
        };
        let n_q = rows("queries", q, self.n_heads, self.d)?;
        let n_k = rows("keys", k, self.n_kv_heads, self.d)?;
        let n_v = rows("values", v, self.n_kv_heads, self.d_v)?;
        if n_v != n_k {
            return Err(Error::shape("values", format!("{n_k} rows, one for each key"), n_v));
        }
        let p = Problem { d_v: self.d_v, ..Problem::new(self.n_heads, n_q, self.d) };
        let p = p.with_lens(n_q, n_k).with_kv_heads(self.n_kv_heads).with_batch(self.batch);
        let p = Problem { scale: self.scale.unwrap_or(p.scale), ..p };
        Ok(if self.causal { p.causal() } else { p })
    }
}

/// Computes exact softmax attention on all threads. Slices are contiguous `[batch, heads, rows, width]`, and so is the
/// result; the numbers of rows follow from the lengths of the slices.
///
/// ```
/// use attlas::{Attention, attention};
///
/// let (q, k, v) = (vec![0.1f32; 8 * 100 * 64], vec![0.2; 2 * 100 * 64], vec![0.3; 2 * 100 * 64]);
/// let o = attention(&q, &k, &v, &Attention { n_kv_heads: 2, causal: true, ..Attention::new(8, 64) })?;
/// assert_eq!(o.len(), 8 * 100 * 64);
/// # Ok::<(), attlas::Error>(())
/// ```
///
/// Elements are `f32` or `f64`, and with the feature `half` also `half::f16` and `half::bf16`, which are computed in
/// single precision. Each call starts its own threads: code that attends often should keep a [`Workspace`] and a
/// [`Plan`](crate::Plan), which also take strided tensors and other methods.
pub fn attention<E: Element>(q: &[E], k: &[E], v: &[E], shape: &Attention) -> Result<Vec<E>> {
    E::attend(&shape.problem(q.len(), k.len(), v.len())?, q, k, v)
}

/// Element types that [`attention`] takes.
pub trait Element: Copy + sealed::Sealed {
    #[doc(hidden)]
    fn attend(problem: &Problem, q: &[Self], k: &[Self], v: &[Self]) -> Result<Vec<Self>>;
}

mod sealed {
    pub trait Sealed {}
}

macro_rules! real_element {
    ($t:ty) => {
        impl sealed::Sealed for $t {}
        impl Element for $t {
            fn attend(p: &Problem, q: &[Self], k: &[Self], v: &[Self]) -> Result<Vec<Self>> {
                let plan = registry::baseline().plan(p, &Options::new())?;
                let x = Qkv::new(
                    TensorRef::bhnd(q, [p.batch, p.n_heads, p.n_q, p.d])?,
                    TensorRef::bhnd(k, [p.batch, p.n_kv_heads, p.n_k, p.d])?,
                    TensorRef::bhnd(v, [p.batch, p.n_kv_heads, p.n_k, p.d_v])?,
                );
                let dims = [p.batch, p.n_heads, p.n_q, p.d_v];
                let mut o = vec![0.0; dims.iter().product()];
                let mut ws = Workspace::new(Schedule::default())?;
                plan.execute(&x.into(), &mut Out::new(TensorMut::bhnd(&mut o, dims)?).into(), &mut ws)?;
                Ok(o)
            }
        }
    };
}
real_element!(f32);
real_element!(f64);

#[cfg(feature = "half")]
macro_rules! half_element {
    ($t:ty) => {
        impl sealed::Sealed for $t {}
        impl Element for $t {
            fn attend(p: &Problem, q: &[Self], k: &[Self], v: &[Self]) -> Result<Vec<Self>> {
                let [q, k, v] = [q, k, v].map(|x| x.iter().map(|x| x.to_f32()).collect::<Vec<f32>>());
                Ok(f32::attend(p, &q, &k, &v)?.into_iter().map(<$t>::from_f32).collect())
            }
        }
    };
}
#[cfg(feature = "half")]
half_element!(half::f16);
#[cfg(feature = "half")]
half_element!(half::bf16);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testkit::{Case, assert_rows_close, reference};

    fn case() -> (Case, Attention) {
        let p = Problem { d_v: 6, ..Problem::new(4, 30, 8).with_kv_heads(2).with_batch(2).causal() };
        let shape = Attention { batch: 2, n_kv_heads: 2, d_v: 6, causal: true, ..Attention::new(4, 8) };
        (Case::gaussian(p.with_lens(20, 30), 1), shape)
    }

    #[test]
    fn one_call_is_softmax_attention() {
        let (case, shape) = case();
        let o = attention(&case.q, &case.k, &case.v, &shape).unwrap();
        assert_rows_close(&o, &reference(&case).0, 1e-13, "attention");
    }

    #[test]
    fn lengths_that_do_not_fit_are_refused() {
        let (case, shape) = case();
        for (q, k, v) in [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 2 * 2 * 6)] {
            let cut = |x: &[f64], n: usize| x[n..].to_vec();
            let result = attention(&cut(&case.q, q), &cut(&case.k, k), &cut(&case.v, v), &shape);
            assert!(matches!(result, Err(Error::Shape { .. })), "{result:?}");
        }
        let none = Attention { n_heads: 0, n_kv_heads: 0, ..shape };
        assert!(attention::<f64>(&[], &[], &[], &none).is_err());
    }

    #[cfg(feature = "half")]
    #[test]
    fn half_precision_is_rounded_once_on_the_way_in_and_once_out() {
        let (case, shape) = case();
        let [q, k, v] = [&case.q, &case.k, &case.v]
            .map(|x| x.iter().map(|&x| half::bf16::from_f64(x)).collect::<Vec<half::bf16>>());
        let o = attention(&q, &k, &v, &shape).unwrap();
        let widen = |x: &[half::bf16]| x.iter().map(|x| x.to_f64()).collect::<Vec<f64>>();
        let rounded = Case { q: widen(&q), k: widen(&k), v: widen(&v), ..case };
        assert_rows_close(&widen(&o), &reference(&rounded).0, 1.0 / 256.0, "bf16");
    }
}
