//! The canonical polyadic decomposition (CP, PARAFAC) by alternating least squares.
//!
//! $T \approx \sum_r \lambda_r\, a_r \otimes b_r \otimes c_r$, unit columns. With all factors but one fixed, a linear
//! least-squares problem with the small matrix $\Gamma = \bigodot_{m \ne n} A_m^\top A_m$ remains: $A_n \Gamma = Y_n$,
//! where $Y_n$ is the [matricised product](super::mttkrp()). Cycling over the modes never raises the error (Kolda and
//! Bader 2009, section 3.4).
//!
//! A best approximation of rank $R \ge 2$ need not exist: two terms may grow without bound while they cancel (de Silva
//! and Lim 2008). [`Fit::degeneracy`] reports when that seems to happen.
//!
//! **Cost.** A sweep takes about $4 R \prod I + N(R^2 \sum I + R^3/3)$ flops for order $N$, and memory for
//! the tensor, the factors and one contraction of $R \prod I / I_N$ numbers: a short mode is best put first.

mod fit;
mod sweep;
mod target;
mod terms;
#[cfg(test)]
mod tests;

pub use fit::{Degeneracy, Fit, Status};
pub use target::Target;
pub use terms::Cp;

use super::mttkrp::SweepCache;
use super::{Error, Result, Tensor};
use crate::{Mat, Real};
use sweep::{Run, initial, iterate};
use target::Dense;

/// Starting point of the iteration.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Init {
    /// Leading left singular vectors of every unfolding, missing columns standard normal, and 0.01 times a
    /// standard normal added everywhere: the singular vectors alone can be an exact saddle point.
    #[default]
    Hosvd,
    /// Standard normal entries. (Uniform ones in `[0, 1)` would be nearly collinear.)
    Random,
    /// These factors. Their weights and the factor of mode 0 do not matter: the first update solves for them.
    Given(Cp<f64>),
}

/// Settings of the iteration.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// The first start.
    pub init: Init,
    /// Number of starts, at least 1; those after the first are random, and the smallest final error wins.
    pub restarts: usize,
    /// Most sweeps per start, at least 1.
    pub iters: usize,
    /// Stop when the relative error changes by less in a sweep. `None`: 1e-8 for f64 data, 1e-5 for f32.
    pub tol: Option<f64>,
    /// Tikhonov weight on every factor, relative to the mean of the diagonal of Γ.
    pub ridge: f64,
    /// True to extrapolate from the last two sweeps (Bro 1998).
    pub line_search: bool,
    /// Seed of the random parts.
    pub seed: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            init: Init::Hosvd,
            restarts: 1,
            iters: 500,
            tol: None,
            ridge: 0.0,
            line_search: false,
            seed: 0,
        }
    }
}

impl Options {
    fn validate(&self) -> Result<()> {
        if self.restarts == 0 {
            return Err(Error::param("restarts", 0, "at least 1"));
        }
        if self.iters == 0 {
            return Err(Error::param("iters", 0, "at least 1"));
        }
        for (name, value) in [("tol", self.tol.unwrap_or(0.0)), ("ridge", self.ridge)] {
            if !(value >= 0.0 && value.is_finite()) {
                return Err(Error::param(name, value, "a finite number, at least 0"));
            }
        }
        Ok(())
    }
}

/// Decomposes `t` into `rank` terms.
///
/// `rank` is at least 1 and at most the smallest `Π_{m≠n} I_m`, which always suffices for an exact answer.
/// A zero (or empty) tensor gives weights 0, unit columns and error 0.
pub fn decompose<T: Real>(t: &Tensor<T>, rank: usize, options: &Options) -> Result<Fit<T>> {
    options.validate()?;
    let (working, scale) = t.to_working()?;
    let mut target = Dense { t: &working, cache: SweepCache::default(), dtype: T::DTYPE };
    let fit = decompose_target(&mut target, rank, options)?;
    let mut cp = fit.cp;
    cp.weights.iter_mut().for_each(|w| *w *= scale);
    let cp = cp.cast::<T>();
    if !cp.weights.iter().all(|w| w.is_finite()) {
        return Err(Error::NotFinite { what: "a weight of the decomposition" });
    }
    Ok(Fit {
        cp,
        rel_error: fit.rel_error,
        history: fit.history,
        status: fit.status,
        degeneracy: fit.degeneracy,
        zero_terms: fit.zero_terms,
        start: fit.start,
    })
}

/// Decomposes a tensor given by the products that alternating least squares needs.
pub fn decompose_target(target: &mut dyn Target, rank: usize, options: &Options) -> Result<Fit<f64>> {
    options.validate()?;
    let shape = target.shape();
    let norm_squared = target.norm_squared();
    if !norm_squared.is_finite() {
        return Err(Error::NotFinite { what: "the norm of the tensor" });
    }
    let empty = shape.contains(&0);
    let most = (0..shape.len())
        .map(|n| shape.iter().enumerate().filter(|(m, _)| *m != n).map(|(_, d)| d).product())
        .min()
        .unwrap_or(0usize);
    if rank == 0 || (!empty && rank > most) {
        return Err(Error::param("rank", rank, format!("1 to {most} for shape {shape:?}")));
    }
    if let Init::Given(cp) = &options.init {
        check_start(cp, &shape, rank)?;
    }
    if norm_squared == 0.0 {
        return Ok(zero_fit(&shape, rank));
    }
    let mut best: Option<Run> = None;
    for start in 0..options.restarts {
        let factors = initial(target, &shape, rank, start, options);
        let run = iterate(target, norm_squared, factors, start, options)?;
        if best.as_ref().is_none_or(|b| run.error < b.error) {
            best = Some(run);
        }
    }
    Ok(best.expect("there is at least one start").into_fit(norm_squared))
}

fn check_start(cp: &Cp<f64>, shape: &[usize], rank: usize) -> Result<()> {
    cp.check()?;
    if cp.rank() != rank || cp.shape() != shape {
        return Err(Error::shape(
            "given start",
            format!("rank {rank} and shape {shape:?}"),
            format!("rank {} and shape {:?}", cp.rank(), cp.shape()),
        ));
    }
    let mut numbers = cp.weights.iter().chain(cp.factors.iter().flat_map(Mat::data));
    if !numbers.all(|x| x.is_finite()) {
        return Err(Error::NotFinite { what: "the given start" });
    }
    Ok(())
}

fn zero_fit(shape: &[usize], rank: usize) -> Fit<f64> {
    let unit = |n: usize| Mat::from_fn(n, rank, |i, r| if i == r % n.max(1) { 1.0 } else { 0.0 });
    Fit {
        cp: Cp { weights: vec![0.0; rank], factors: shape.iter().map(|&n| unit(n)).collect() },
        rel_error: 0.0,
        history: Vec::new(),
        status: Status::Converged,
        degeneracy: None,
        zero_terms: (0..rank).collect(),
        start: 0,
    }
}
