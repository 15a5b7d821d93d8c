//! Scores and weights as linear operators that are never stored.

use super::Head;
use crate::workspace::Context;
use attlas_num::kernels::{Attend, Band, Precision};
use attlas_num::par::*;
use attlas_num::randla::LinearOperator;
use attlas_num::{Mat, MatRef};

/// Rows per task; fixed, so that results do not depend on the number of threads.
const TASK_ROWS: usize = 96;

/// $P = Z^{-1} A$, applied through the exact kernel.
///
/// $PX$ is attention with values $X$. With $\ell_i = \ln Z_i$,
/// $(P^\top Y)_j = \sum_i e^{s_{ij} - \ell_i} y_i$ is attention with the roles of queries and keys exchanged and a
/// bias of $-\ell_i$, times $e^{\ell'_j}$, the exponential of its own log-sum-exp. Rows that see no key are zero.
#[derive(Clone, Copy, Debug)]
pub struct Weights<'a> {
    head: &'a Head,
    /// Log-sum-exp of the rows.
    lse: &'a [f64],
    cx: Context<'a>,
}

impl<'a> Weights<'a> {
    /// Creates the weights of a head whose rows have the log-sum-exp `lse`; runs on the caller's thread pool.
    pub fn new(head: &'a Head, lse: &'a [f64], cx: Context<'a>) -> Self {
        assert_eq!(lse.len(), head.q.rows(), "one log-sum-exp per query");
        Self { head, lse, cx }
    }
}

impl LinearOperator for Weights<'_> {
    fn rows(&self) -> usize {
        self.head.q.rows()
    }

    fn cols(&self) -> usize {
        self.head.k.rows()
    }

    fn apply(&self, x: MatRef<'_, f64>) -> Mat<f64> {
        let h = self.head;
        attend(h.q(), h.k(), x, None, h.scale, h.band(), self.cx).0
    }

    fn apply_t(&self, y: MatRef<'_, f64>) -> Mat<f64> {
        // An empty row has ℓ = −∞; its bias hides it where the mask does not.
        let hidden = |l: &f64| if *l == f64::NEG_INFINITY { *l } else { -l };
        let bias: Vec<f64> = self.lse.iter().map(hidden).collect();
        answers_of_queries(self.head, y, Some(&bias), 0.0, self.cx)
    }
}

/// $A e^{-c}$ for one common shift $c$, applied through the exact kernel: $A = \operatorname{diag}(e^{\ell_i}) P$.
///
/// The shift divides all singular values by $e^c$; with the largest logit as $c$ nothing overflows.
#[derive(Clone, Copy, Debug)]
pub struct Scores<'a> {
    weights: Weights<'a>,
    shift: f64,
}

impl<'a> Scores<'a> {
    /// Creates the scores of a head whose rows have the log-sum-exp `lse`, divided by $e^{\text{shift}}$.
    pub fn new(head: &'a Head, lse: &'a [f64], shift: f64, cx: Context<'a>) -> Self {
        Self { weights: Weights::new(head, lse, cx), shift }
    }
}

impl LinearOperator for Scores<'_> {
    fn rows(&self) -> usize {
        self.weights.rows()
    }

    fn cols(&self) -> usize {
        self.weights.cols()
    }

    fn apply(&self, x: MatRef<'_, f64>) -> Mat<f64> {
        let mut out = self.weights.apply(x);
        scale_rows(&mut out, self.weights.lse, self.shift);
        out
    }

    fn apply_t(&self, y: MatRef<'_, f64>) -> Mat<f64> {
        answers_of_queries(self.weights.head, y, None, self.shift, self.weights.cx)
    }
}

/// Computes $\sum_i e^{s_{ij} + b_i - c} y_i$ for every key $j$, over the rows $i$ that see it.
fn answers_of_queries(
    h: &Head,
    y: MatRef<'_, f64>,
    bias: Option<&[f64]>,
    shift: f64,
    cx: Context<'_>,
) -> Mat<f64> {
    let band = match h.band().upper {
        Some(offset) => Band { lower: Some(-offset), upper: None },
        None => Band::ALL,
    };
    let (mut out, lse) = attend(h.k(), h.q(), y, bias, h.scale, band, cx);
    scale_rows(&mut out, &lse, shift);
    out
}

/// Multiplies row `i` by $e^{\ell_i - c}$.
fn scale_rows(x: &mut Mat<f64>, lse: &[f64], shift: f64) {
    for (i, l) in lse.iter().enumerate() {
        let factor = (l - shift).exp();
        x.row_mut(i).iter_mut().for_each(|x| *x *= factor);
    }
}

/// Computes exact attention of all rows in parallel: outputs and log-sum-exp.
pub(super) fn attend(
    q: MatRef<'_, f64>,
    k: MatRef<'_, f64>,
    v: MatRef<'_, f64>,
    bias: Option<&[f64]>,
    scale: f64,
    band: Band,
    cx: Context<'_>,
) -> (Mat<f64>, Vec<f64>) {
    let (n, cols) = (q.rows(), v.cols());
    let mut out = Mat::zeros(n, cols);
    let mut lse = vec![f64::NEG_INFINITY; n];
    if n == 0 || cols == 0 {
        return (out, lse);
    }
    out.data_mut()
        .par_chunks_mut(TASK_ROWS * cols)
        .zip(lse.par_chunks_mut(TASK_ROWS))
        .with_max_len(1)
        .enumerate()
        .for_each(|(task, (out, lse))| {
            let first = task * TASK_ROWS;
            Attend {
                q: q.sub_rows(first..first + lse.len()),
                k,
                v,
                scale,
                bias,
                band: band.from_row(first),
                tile_k: cx.schedule.tile_k,
                isa: cx.schedule.isa,
                precision: Precision::Full,
                decode: false,
                softcap: None,
            }
            .run(cx.scratch, out, lse);
        });
    (out, lse)
}
