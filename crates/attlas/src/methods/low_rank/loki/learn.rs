//! Bases learnt from queries and keys.

use super::{Basis, METHOD, Params, wrong};
use crate::engine::moments::Moments;
use crate::method::Calibration;
use crate::{Inputs, Problem, Qkv, Real, Result};
use attlas_num::Mat;
use attlas_num::linalg::{self, matmul, matmul_nt, symmetric_eigen};

/// Statistics of queries and keys from any number of inputs; use at least $50 d$ tokens.
#[derive(Clone, Debug)]
pub struct Calibrator {
    problem: Problem,
    keys: Vec<Moments>,
    queries: Vec<Moments>,
}

impl Calibrator {
    /// Creates empty statistics for the heads and widths of `problem`; its lengths do not matter.
    pub fn new(problem: &Problem) -> Self {
        let moments = vec![Moments::new(problem.d); problem.n_kv_heads];
        Self { problem: *problem, keys: moments.clone(), queries: moments }
    }

    /// Adds queries and keys of any batch and length.
    pub fn update(&mut self, inputs: &Inputs<'_>) -> Result<()> {
        match inputs {
            Inputs::F32(x) => self.update_typed(x),
            Inputs::F64(x) => self.update_typed(x),
        }
    }

    fn update_typed<T: Real>(&mut self, x: &Qkv<'_, T>) -> Result<()> {
        let ([batch, _, n_q, _], [_, _, n_k, _]) = (x.q.dims(), x.k.dims());
        x.validate(&Problem { batch, n_q, n_k, ..self.problem })?;
        let size = self.problem.group_size();
        for b in 0..batch {
            let valid = x.key_lens.map_or(n_k, |lens| lens[b]);
            for g in 0..self.problem.n_kv_heads {
                self.keys[g].update(x.k.head(b, g).sub_rows(0..valid));
                (g * size..(g + 1) * size).for_each(|h| self.queries[g].update(x.q.head(b, h)));
            }
        }
        Ok(())
    }

    /// Adds the statistics of another one for the same problem.
    pub fn merge(&mut self, other: &Self) {
        self.keys.iter_mut().zip(&other.keys).for_each(|(a, b)| a.merge(b));
        self.queries.iter_mut().zip(&other.queries).for_each(|(a, b)| a.merge(b));
    }

    /// Computes the basis of every key head, `basis.g`, with its eigenvalues `lambda.g`, mean `mean.g` and count
    /// `count.g`; for `qk_optimal` also `a_q.g` and `a_k.g`.
    pub fn finish(&self, basis: Basis) -> Result<Calibration> {
        let mut out = Calibration::new(METHOD.id, &self.problem);
        for (g, (keys, queries)) in self.keys.iter().zip(&self.queries).enumerate() {
            // A single key has no variance, and any basis ranks it first.
            let alone = || (keys.count() == 1).then(|| Mat::zeros(self.problem.d, self.problem.d));
            let covariance = keys
                .covariance()
                .or_else(alone)
                .ok_or_else(|| wrong("at least one key per head", keys.count()))?;
            let eigen = symmetric_eigen(covariance.as_ref()).map_err(|e| wrong("finite keys", e))?;
            let row = |x: Vec<f64>| Mat::from_vec(x.clone(), 1, x.len());
            out.insert(format!("basis.{g}"), &eigen.vectors);
            out.insert(format!("lambda.{g}"), &row(eigen.values.iter().map(|x| x.max(0.0)).collect()));
            out.insert(format!("mean.{g}"), &row(keys.mean().to_vec()));
            out.insert(format!("count.{g}"), &row(vec![keys.count() as f64]));
            if basis == Basis::QkOptimal {
                let second =
                    queries.second_moment().ok_or_else(|| wrong("at least one query per head", 0))?;
                let (a_q, a_k) =
                    qk_optimal(&second, &covariance).map_err(|e| wrong("finite queries and keys", e))?;
                out.insert(format!("a_q.{g}"), &a_q);
                out.insert(format!("a_k.{g}"), &a_k);
            }
        }
        Ok(out)
    }
}

/// Calibrates for the registry.
pub(super) fn calibrate(params: &Params, p: &Problem, samples: &[Inputs<'_>]) -> Result<Calibration> {
    let mut calibrator = Calibrator::new(p);
    samples.iter().try_for_each(|x| calibrator.update(x))?;
    calibrator.finish(params.basis)
}

/// Computes all columns of $A_q$ and $A_k$, best first; inverse roots leave out directions without variance.
pub(super) fn qk_optimal(r_q: &Mat<f64>, r_k: &Mat<f64>) -> linalg::Result<(Mat<f64>, Mat<f64>)> {
    let roots = |r: &Mat<f64>| -> linalg::Result<(Mat<f64>, Mat<f64>)> {
        let eigen = symmetric_eigen(r.as_ref())?;
        let cut = r.rows() as f64 * f64::EPSILON * eigen.values.first().copied().unwrap_or(0.0);
        let power = |f: fn(f64) -> f64| {
            let scaled = Mat::from_fn(r.rows(), r.rows(), |i, j| {
                let value = eigen.values[j];
                if value > cut { eigen.vectors[(i, j)] * f(value) } else { 0.0 }
            });
            matmul_nt(scaled.as_ref(), eigen.vectors.as_ref())
        };
        Ok((power(f64::sqrt), power(|x| 1.0 / x.sqrt())))
    };
    let ((q_root, q_inverse), (k_root, k_inverse)) = (roots(r_q)?, roots(r_k)?);
    let svd = linalg::svd(matmul(q_root.as_ref(), k_root.as_ref()).as_ref())?;
    let times = |inverse: &Mat<f64>, vectors: &Mat<f64>| {
        let mut a = matmul(inverse.as_ref(), vectors.as_ref());
        for i in 0..a.rows() {
            a.row_mut(i).iter_mut().zip(&svd.sigma).for_each(|(x, s)| *x *= s.sqrt());
        }
        a
    };
    Ok((times(&q_inverse, &svd.u), times(&k_inverse, &svd.v)))
}
