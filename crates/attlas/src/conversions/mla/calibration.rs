//! Moments of a layer from calibration text.

use crate::layer::LayerShape;
use crate::{Error, Mat, MatRef, Result};
use attlas_num::linalg::matmul_tn;

/// Second moments of queries, keys and values over calibration tokens, before rotation, biases included.
#[derive(Clone, Debug)]
pub struct Calibration {
    pub(super) shape: LayerShape,
    /// Moments of keys and values of all key heads, concatenated.
    pub(super) kv: Mat<f64>,
    /// Moments of each query head.
    pub(super) heads: Vec<Mat<f64>>,
    /// Moments of all query heads together, if requested.
    pub(super) q: Option<Mat<f64>>,
    /// Sum of all query heads.
    pub(super) q_sum: Vec<f64>,
    pub(super) tokens: usize,
    /// Largest norm of a token's keys and values, and of its queries.
    pub(super) longest: [f64; 2],
}

impl Calibration {
    /// Starts without tokens. Moments between query heads are kept if `between_queries`; a latent of queries needs
    /// them.
    pub fn new(shape: LayerShape, between_queries: bool) -> Self {
        let (kv, q) = (shape.n_kv_heads * (shape.d + shape.d_v), shape.n_heads * shape.d);
        Self {
            shape,
            kv: Mat::zeros(kv, kv),
            heads: vec![Mat::zeros(shape.d, shape.d); shape.n_heads],
            q: between_queries.then(|| Mat::zeros(q, q)),
            q_sum: vec![0.0; q],
            tokens: 0,
            longest: [0.0; 2],
        }
    }

    /// Returns the number of tokens so far.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Adds tokens: queries `[token, head, d]`, keys `[token, key head, d]` and values `[token, key head, d_v]` before
    /// rotation. An error if the lengths do not match; nothing is added then.
    pub fn add(&mut self, q: &[f32], k: &[f32], v: &[f32]) -> Result<()> {
        let s = self.shape;
        let (wq, wk, wv) = (s.n_heads * s.d, s.n_kv_heads * s.d, s.n_kv_heads * s.d_v);
        let n = q.len() / wq.max(1);
        if (q.len(), k.len(), v.len()) != (n * wq, n * wk, n * wv) {
            let found = format!("{}, {} and {} numbers", q.len(), k.len(), v.len());
            return Err(Error::shape(
                "queries, keys and values",
                format!("{wq}, {wk} and {wv} a token"),
                found,
            ));
        }
        let queries = Mat::from_vec(q.iter().map(|&x| f64::from(x)).collect(), n, wq);
        let both = Mat::from_fn(n, wk + wv, |i, j| {
            f64::from(if j < wk { k[i * wk + j] } else { v[i * wv + j - wk] })
        });
        for i in 0..n {
            self.q_sum.iter_mut().zip(queries.row(i)).for_each(|(s, x)| *s += x);
            for (longest, row) in self.longest.iter_mut().zip([both.row(i), queries.row(i)]) {
                *longest = longest.max(row.iter().map(|x| x * x).sum::<f64>().sqrt());
            }
        }
        let add = |sum: &mut Mat<f64>, x: MatRef<'_, f64>| {
            let new = matmul_tn(x, x);
            sum.data_mut().iter_mut().zip(new.data()).for_each(|(s, n)| *s += n);
        };
        add(&mut self.kv, both.as_ref());
        for (h, sum) in self.heads.iter_mut().enumerate() {
            add(sum, Mat::from_fn(n, s.d, |i, j| queries[(i, h * s.d + j)]).as_ref());
        }
        if let Some(sum) = &mut self.q {
            add(sum, queries.as_ref());
        }
        self.tokens += n;
        Ok(())
    }
}
