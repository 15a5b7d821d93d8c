//! Diagnostics of a head before the choice of a method: sparsity, sinks, singular values and ranks.
//!
//! For queries $Q$, keys $K$, values $V$ and scale $\beta$ let $S = \beta QK^\top$ be the logits, $A = e^S$ the
//! scores, both zero where the mask hides a key, and $P = Z^{-1}A$ the weights, $Z$ the row sums. [`inspect`]
//! reports on one head:
//!
//! - [`spectra`]: singular values of $Q$, $K$, $V$, $QK^\top$, $A$ and $P$ and their effective ranks; principal
//!   components of the keys ([`key_components`]);
//! - [`weight_profile`]: sparsity of the rows of $P$, number of keys that hold a given mass, entropies, attention
//!   sinks, the leading block of $P$ and a map of all of it;
//! - [`hardness`]: norms that determine how hard the head is for coreset methods.
//!
//! Above [`Settings::dense_limit`] no matrix of the size of $A$ is stored: the leading singular values of $A$
//! and $P$ come from a randomised SVD (halko2011) whose products go through the tiled exact
//! kernel: $PX$ is attention with values $X$, and $P^\top Y$ is attention with queries and keys exchanged and a bias of
//! minus the log-sum-exp ([`Weights`]). Row figures come from blocks of rows that are dropped at once.
//!
//! Everything is computed in double precision and does not depend on the number of threads.

mod operator;
mod rows;
mod spectrum;

pub use operator::{Scores, Weights};
pub use rows::{HeatMap, MassKeys, Sink, Summary, TopMass, WeightProfile, weight_profile};
pub use spectrum::{AtLeast, KeyComponents, Spectra, Spectrum, key_components, spectra};

use crate::{Error, Mask, Result, Workspace};
use attlas_num::kernels::Band;
use attlas_num::linalg::LinalgError;
use attlas_num::{Mat, MatRef, Real};

/// One head to inspect, in double precision.
#[derive(Clone, Debug)]
pub struct Head {
    q: Mat<f64>,
    k: Mat<f64>,
    v: Mat<f64>,
    scale: f64,
    mask: Mask,
}

impl Head {
    /// Copies one head's queries `n_q × d`, keys `n_k × d` and values `n_k × d_v`; an error if the shapes do not fit or
    /// a number is not finite.
    pub fn new<T: Real>(
        q: MatRef<'_, T>,
        k: MatRef<'_, T>,
        v: MatRef<'_, T>,
        scale: f64,
        mask: Mask,
    ) -> Result<Self> {
        let d = q.cols();
        if k.cols() != d {
            return Err(Error::shape("keys", format!("{d} columns"), k.cols()));
        }
        if v.rows() != k.rows() {
            return Err(Error::shape("values", format!("{} rows", k.rows()), v.rows()));
        }
        let wide = |what: &'static str, x: MatRef<'_, T>| {
            let data: Vec<f64> = x.iter_rows().flatten().map(|x| x.to_f64()).collect();
            match data.iter().all(|x| x.is_finite()) {
                true => Ok(Mat::from_vec(data, x.rows(), x.cols())),
                false => Err(Error::Numerical { what, reason: "an entry is not finite".into() }),
            }
        };
        let head = Self { q: wide("queries", q)?, k: wide("keys", k)?, v: wide("values", v)?, scale, mask };
        // The dot product of the longest rows bounds every logit.
        let largest = head.scale.abs() * longest(head.q.as_ref()) * longest(head.k.as_ref());
        match largest.is_finite() {
            true => Ok(head),
            false => Err(Error::Numerical { what: "logits", reason: "they can overflow".into() }),
        }
    }

    /// Queries.
    pub fn q(&self) -> MatRef<'_, f64> {
        self.q.as_ref()
    }

    /// Keys.
    pub fn k(&self) -> MatRef<'_, f64> {
        self.k.as_ref()
    }

    /// Values.
    pub fn v(&self) -> MatRef<'_, f64> {
        self.v.as_ref()
    }

    /// Factor of the dot products.
    pub fn scale(&self) -> f64 {
        self.scale
    }

    /// Mask of the keys that a row sees.
    pub fn mask(&self) -> Mask {
        self.mask
    }

    /// Returns the mask as a band of `key − row`.
    fn band(&self) -> Band {
        match self.mask {
            Mask::None => Band::ALL,
            Mask::Causal => Band::causal(self.offset()),
        }
    }

    /// Offset of the causal mask: row `i` sees the keys up to `i + offset`.
    fn offset(&self) -> isize {
        self.k.rows() as isize - self.q.rows() as isize
    }
}

/// Settings of [`inspect`]; the defaults are those of the survey's figures.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Settings {
    /// Share of the sum of squared singular values that an effective rank must reach.
    pub share: f64,
    /// Singular values below this multiple of the largest do not count for [`Spectrum::eps_rank`].
    pub eps: f64,
    /// A key is a sink if at least half of the rows that see it give it more than this multiple of the uniform weight.
    /// This holds for any length, and excludes keys that only their neighbours attend to.
    pub sink: f64,
    /// Keys visible to fewer rows cannot be sinks.
    pub min_rows: usize,
    /// Rows and columns of the stored leading block.
    pub block: usize,
    /// Rows and columns of the map of all weights.
    pub cells: usize,
    /// Smaller side of $A$ up to which all its singular values are computed from a dense matrix.
    pub dense_limit: usize,
    /// Singular values computed above that limit.
    pub rank: usize,
    /// Power steps of the randomised SVD.
    pub power: usize,
    /// Seed of the randomised SVD.
    pub seed: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            share: 0.9,
            eps: 1e-2,
            sink: 10.0,
            min_rows: 16,
            block: 20,
            cells: 64,
            dense_limit: 2048,
            rank: 256,
            power: 2,
            seed: 0,
        }
    }
}

/// Report on one head.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct HeadReport {
    /// Queries.
    pub n_q: usize,
    /// Keys.
    pub n_k: usize,
    /// Width of queries and keys.
    pub d: usize,
    /// Singular values and ranks.
    pub spectra: Spectra,
    /// Sparsity, mass, entropy and sinks.
    pub weights: WeightProfile,
    /// Norms.
    pub hardness: Hardness,
}

/// Inspects one head.
pub fn inspect(head: &Head, settings: &Settings, ws: &Workspace) -> Result<HeadReport> {
    let weights = weight_profile(head, settings, ws);
    Ok(HeadReport {
        n_q: head.q.rows(),
        n_k: head.k.rows(),
        d: head.q.cols(),
        spectra: spectra(head, &weights, settings, ws)?,
        weights,
        hardness: hardness(head),
    })
}

/// Norms that determine how hard a head is for methods that replace keys by fewer ones.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Hardness {
    /// $R_Q$, the length of the longest query.
    pub query_norm: f64,
    /// $R_K$, the length of the longest key after the mean is subtracted.
    pub key_norm: f64,
    /// $\beta R_Q R_K / \ln n_k$; the guarantee of `wildcat` needs it bounded. 0 for fewer than two keys.
    pub gamma: f64,
}

/// Computes $R_Q$, $R_K$ and $\gamma$ of a head.
pub fn hardness(head: &Head) -> Hardness {
    let query_norm = longest(head.q());
    let key_norm = longest(centred(head.k()).as_ref());
    let n = head.k.rows();
    let gamma = if n < 2 { 0.0 } else { head.scale.abs() * query_norm * key_norm / (n as f64).ln() };
    Hardness { query_norm, key_norm, gamma }
}

/// Returns the largest 2-norm of a row.
fn longest(x: MatRef<'_, f64>) -> f64 {
    x.iter_rows().map(norm).fold(0.0, f64::max)
}

/// Returns the 2-norm of a row.
fn norm(row: &[f64]) -> f64 {
    row.iter().fold(0.0, |a: f64, x| a.hypot(*x))
}

/// Subtracts the mean of the rows; the result is exactly zero if all rows are equal.
fn centred(x: MatRef<'_, f64>) -> Mat<f64> {
    let (n, d) = (x.rows(), x.cols());
    if n == 0 {
        return Mat::zeros(0, d);
    }
    // Use differences from the first row: equal rows then have a mean of exactly zero.
    let first = x.row(0);
    let mut centred = Mat::from_fn(n, d, |i, j| x.at(i, j) - first[j]);
    let mut mean = vec![0.0; d];
    for i in 0..n {
        mean.iter_mut().zip(centred.row(i)).for_each(|(m, x)| *m += x / n as f64);
    }
    for i in 0..n {
        centred.row_mut(i).iter_mut().zip(&mean).for_each(|(x, m)| *x -= m);
    }
    centred
}

/// Converts a failed factorisation into an error of this crate.
fn failed(what: &'static str) -> impl Fn(LinalgError) -> Error {
    move |e| Error::Numerical { what, reason: e.to_string() }
}

#[cfg(test)]
mod tests;
