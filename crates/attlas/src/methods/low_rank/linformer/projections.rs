//! The matrices $E$ and $F$, given, fitted or drawn, and their products with keys and values.
//!
//! Both are $k \times n$ and multiply from the left, $EK$ and $FV$, a few rows at a time, generated on use: a random
//! projection ($N(0, 1/k)$ entries) is never stored, and one in `f64` is never copied whole.

use super::METHOD;
use crate::method::Calibration;
use crate::workspace::Context;
use crate::{Error, MatRef, Problem, Real, Result};
use attlas_num::Mat;
use attlas_num::linalg::{self, Op};
use attlas_num::par::*;
use attlas_num::rng::StreamKey;

/// Sharing of trained projections in a model of several layers and heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// Every head of every layer has its own two matrices.
    None,
    /// The heads of a layer share both matrices.
    Headwise,
    /// The heads of a layer share one matrix for keys and values.
    KeyValue,
    /// One matrix for the whole model.
    Layerwise,
}

impl Sharing {
    /// Returns the number of matrices in a model of this shape.
    pub fn matrices(self, layers: usize, heads: usize) -> usize {
        match self {
            Sharing::None => 2 * layers * heads,
            Sharing::Headwise => 2 * layers,
            Sharing::KeyValue => layers,
            Sharing::Layerwise => 1,
        }
    }
}

/// Makes a calibration for `problem` from trained projections: one matrix for all key heads or one for each; without
/// `f`, `e` also mixes the values. Matrices may be $k \times n$ or $n \times k$; the longer side is the sequence.
pub fn with_projections(problem: &Problem, e: &[Mat<f64>], f: &[Mat<f64>]) -> Result<Calibration> {
    let mut calibration = Calibration::new(METHOD.id, problem);
    for (name, list) in [("e", e), ("f", f)] {
        let per_head = list.len() == problem.n_kv_heads && list.len() != 1;
        if !(per_head || list.len() == 1 || list.is_empty() && name == "f") {
            return Err(wrong(
                format!("one matrix {name}, or one for each of {} key heads", problem.n_kv_heads),
                list.len(),
            ));
        }
        for (g, m) in list.iter().enumerate() {
            let name = if per_head { format!("{name}.{g}") } else { name.into() };
            calibration.insert(name, &oriented(m)?);
        }
    }
    Ok(calibration)
}

pub(super) fn wrong(expected: impl ToString, found: impl ToString) -> Error {
    Error::Calibration { method: METHOD.id.into(), expected: expected.to_string(), found: found.to_string() }
}

/// Orients the matrix with the sequence along its columns: `k × n`, `k ≤ n`.
fn oriented(m: &Mat<f64>) -> Result<Mat<f64>> {
    match m.rows().cmp(&m.cols()) {
        std::cmp::Ordering::Less => Ok(m.clone()),
        std::cmp::Ordering::Greater => Ok(m.transpose()),
        std::cmp::Ordering::Equal if *m == m.transpose() => Ok(m.clone()),
        std::cmp::Ordering::Equal => Err(wrong(
            "a projection with fewer rows than tokens, or a symmetric one",
            format!("a square one of {} rows, which may be transposed", m.rows()),
        )),
    }
}

/// Matrices of every key head, or none if they are generated on use.
#[derive(Debug)]
pub(super) enum Mix {
    Pool,
    Gaussian,
    /// $E$ and $F$ of each key head; a head without its own $F$ uses its $E$.
    Learned(Vec<(Mat<f64>, Option<Mat<f64>>)>),
    /// $F$ of each key head.
    Fitted(Vec<Mat<f64>>),
}

impl Mix {
    pub(super) fn learned(p: &Problem, calibration: &Calibration) -> Result<Self> {
        let find = |name: &str, g: usize| {
            let own = format!("{name}.{g}");
            let name = if calibration.matrices.contains_key(&own) { &own } else { name };
            calibration.matrix(name).and_then(|m| oriented(&m))
        };
        let mut heads = Vec::new();
        for g in 0..p.n_kv_heads {
            let e = find("e", g)?;
            let has_f = calibration.matrices.keys().any(|k| k == "f" || k.starts_with("f."));
            let f = if has_f { Some(find("f", g)?) } else { None };
            let f_shape = f.as_ref().map_or((e.rows(), e.cols()), |f| (f.rows(), f.cols()));
            if f_shape != (e.rows(), e.cols()) {
                return Err(wrong(
                    format!("f as large as e, {} × {}", e.rows(), e.cols()),
                    format!("{f_shape:?}"),
                ));
            }
            if p.n_k > e.cols() {
                return Err(Error::Unsupported {
                    method: METHOD.id.into(),
                    reasons: vec![format!(
                        "the projections were trained for at most {} tokens, there are {} keys",
                        e.cols(),
                        p.n_k
                    )],
                });
            }
            heads.push((e, f));
        }
        Ok(Mix::Learned(heads))
    }

    pub(super) fn fitted(p: &Problem, rank: usize, calibration: &Calibration) -> Result<Self> {
        let rank = rank.min(p.n_k);
        let heads = (0..p.n_kv_heads)
            .map(|g| {
                let f = calibration.matrix(&format!("fitted.{g}"))?;
                if f.cols() == p.n_k && f.rows() == rank {
                    Ok(f)
                } else {
                    let fit = |keys: usize, rank: usize| format!("a fit of rank {rank} for {keys} keys");
                    Err(wrong(fit(p.n_k, rank), fit(f.cols(), f.rows())))
                }
            })
            .collect::<Result<_>>()?;
        Ok(Mix::Fitted(heads))
    }
}

pub(super) fn copy_row<T: Real>(m: &Mat<f64>, r: usize, row: &mut [T]) {
    row.iter_mut().zip(m.row(r)).for_each(|(x, m)| *x = T::from_f64(*m));
}

/// Draws row `r` of a projection with entries $N(0, 1/k)$; a shorter sequence uses the first entries of a longer one.
pub(super) fn gaussian_row<T: Real>(key: StreamKey, k: usize, r: usize, row: &mut [T]) {
    let mut rng = key.with(r as u64).rng();
    let deviation = 1.0 / (k as f64).sqrt();
    row.iter_mut().for_each(|x| *x = T::from_f64(deviation * rng.normal()));
}

/// Rows of a projection that a task multiplies.
pub(super) const CHUNK: usize = 16;

/// Computes `out = projection · x`; `fill(row, entries)` generates rows of the projection on demand.
pub(super) fn multiply<T: Real>(
    fill: impl Fn(usize, &mut [T]) + Sync,
    x: MatRef<'_, T>,
    cx: Context<'_>,
    out: &mut [T],
) {
    let (n, width) = (x.rows(), x.cols());
    // Rounding of the product with a single column depends on its stride: use the same stride in every layout.
    let mut column = cx.scratch.take::<T>(if width == 1 { n } else { 0 });
    let x = if width == 1 {
        x.gather_into(0..n, &mut column);
        MatRef::new(&column, n, 1)
    } else {
        x
    };
    out.par_chunks_mut(CHUNK * width).with_max_len(1).enumerate().for_each(|(c, out)| {
        let rows = out.len() / width;
        let mut e = cx.scratch.take::<T>(rows * n);
        e.chunks_exact_mut(n).enumerate().for_each(|(r, row)| fill(c * CHUNK + r, row));
        linalg::gemm(T::ONE, Op::N(MatRef::new(&e, rows, n)), Op::N(x), out, width, false);
    });
}
