//! The Tucker decomposition: an orthonormal basis per mode and a small dense core.
//!
//! $T \approx G \times_1 U_1 \cdots \times_N U_N$ with $U_n^\top U_n = I$ and $G = T \times_n U_n^\top$, hence
//! $\|T - \hat T\|^2 = \|T\|^2 - \|G\|^2$. Three methods find the bases:
//!
//! - *HOSVD* (De Lathauwer, De Moor, Vandewalle 2000): leading left singular vectors of every unfolding. The
//!   error is at most the root of the sum of all discarded energies, hence $\sqrt N$ times the best one.
//! - *ST-HOSVD* (Vannieuwenhoven, Vandebril, Meerbergen 2012): the same, one mode after another on the tensor
//!   already truncated. The squared error is exactly the sum of the energies discarded step by step.
//! - *HOOI* (De Lathauwer, De Moor, Vandewalle 2000b): from there, each basis in turn is the best one given
//!   the others. The error never rises; it may end at a saddle or a local optimum, hence the restarts.
//!
//! **Cost.** ST-HOSVD: $2 I_1 \prod I + 10 I_1^3$ flops for the first mode, later modes shrink by $R_n/I_n$.
//! A HOOI sweep is about $N$ times an ST-HOSVD of the rest. Stored: $\prod R + \sum I_n R_n$ numbers.

use super::small::{leading_columns, mode_svd, thin_qr};
use super::{Error, Result, Tensor};
use crate::rng::StreamKey;
use crate::{Mat, Real};

/// Core and one basis per mode.
#[derive(Clone, Debug, PartialEq)]
pub struct Tucker<T> {
    /// The core; its shape is the list of ranks.
    pub core: Tensor<T>,
    /// `I_n × R_n` with orthonormal columns; `None` is the identity, for modes left alone.
    pub factors: Vec<Option<Mat<T>>>,
}

impl<T: Real> Tucker<T> {
    /// Shape of the tensor that is represented.
    pub fn shape(&self) -> Vec<usize> {
        let size = |(f, &r): (&Option<Mat<T>>, &usize)| f.as_ref().map_or(r, Mat::rows);
        self.factors.iter().zip(self.core.shape()).map(size).collect()
    }

    /// Ranks, one per mode.
    pub fn ranks(&self) -> &[usize] {
        self.core.shape()
    }

    /// Returns how many numbers are stored: the core and every basis that is not the identity.
    pub fn parameters(&self) -> usize {
        self.core.data().len() + self.factors.iter().flatten().map(|f| f.data().len()).sum::<usize>()
    }

    /// Forms the dense tensor.
    pub fn reconstruct(&self) -> Result<Tensor<T>> {
        let list: Vec<(usize, &Mat<T>)> =
            self.factors.iter().enumerate().filter_map(|(m, f)| Some((m, f.as_ref()?))).collect();
        if self.factors.len() != self.core.order() {
            return Err(Error::shape("factors of a Tucker form", self.core.order(), self.factors.len()));
        }
        self.core.mode_products(&list)
    }

    /// Converts every number to the other element type.
    pub fn cast<U: Real>(&self) -> Tucker<U> {
        Tucker {
            core: self.core.cast(),
            factors: self.factors.iter().map(|f| f.as_ref().map(Mat::cast)).collect(),
        }
    }
}

/// Number of basis vectors to keep.
#[derive(Clone, Debug, PartialEq)]
pub enum Ranks {
    /// Given numbers, one per mode, `1..=I_n`; `I_n` in modes left alone.
    Given(Vec<usize>),
    /// All of them.
    Full,
    /// The fewest in each compressed mode that discard at most $\varepsilon^2 \|T\|^2$ divided by the number of
    /// compressed modes, so the relative error is at most ε, `0..=1`. At least 1.
    RelError(f64),
}

/// Method of finding the bases.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Method {
    /// One mode after another, each on the tensor already truncated.
    #[default]
    StHosvd,
    /// Every mode on the whole tensor.
    Hosvd,
    /// ST-HOSVD, then alternating improvement.
    Hooi,
}

/// Settings of the decomposition.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// Method of finding the bases.
    pub method: Method,
    /// Order in which ST-HOSVD treats the compressed modes. `None`: those that shrink most first, or from first to last
    /// if the ranks are not known beforehand.
    pub order: Option<Vec<usize>>,
    /// Most HOOI sweeps, at least 1.
    pub iters: usize,
    /// Stop HOOI when the norm of the core changes by less, relatively.
    pub tol: f64,
    /// The modes to compress, all of them if `None`; the others keep the identity.
    pub modes: Option<Vec<usize>>,
    /// Number of random starts of HOOI besides ST-HOSVD's bases; the best fit is kept. The iteration can stop at a
    /// saddle or a poor local optimum.
    pub restarts: usize,
    /// Seed of the random bases.
    pub seed: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self { method: Method::StHosvd, order: None, iters: 50, tol: 1e-8, modes: None, restarts: 4, seed: 0 }
    }
}

/// Outcome of HOOI; the direct methods always converge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Status {
    /// The norm of the core stopped changing.
    Converged,
    /// The sweeps were used up.
    MaxIters,
}

/// Decomposition, with the course of its iteration.
#[derive(Clone, Debug)]
pub struct Fit<T> {
    /// The largest entry of every basis vector is positive.
    pub tucker: Tucker<T>,
    /// `‖T − T̂‖ / ‖T‖`, of the decomposition in f64; 0 for a zero tensor.
    pub rel_error: f64,
    /// Energy (sum of squared singular values) that the direct method discarded, one number per mode,
    /// relative to `‖T‖²`.
    pub discarded: Vec<f64>,
    /// Relative error of the start and after each HOOI sweep.
    pub history: Vec<f64>,
    /// Outcome of the iteration.
    pub status: Status,
}

/// Input of [`decompose`] after options and ranks have been checked against the tensor.
struct Job<'a> {
    ranks: &'a Ranks,
    modes: Vec<usize>,
    order: Vec<usize>,
    norm_squared: f64,
}

/// Decomposes `t`.
pub fn decompose<T: Real>(t: &Tensor<T>, ranks: &Ranks, options: &Options) -> Result<Fit<T>> {
    let (modes, order) = check(t.shape(), ranks, options)?;
    let (working, scale) = t.to_working()?;
    let norm_squared: f64 = working.data().iter().map(|x| x * x).sum();
    if norm_squared == 0.0 {
        return zero_fit(t.shape(), ranks, &modes);
    }
    let job = Job { ranks, modes, order, norm_squared };
    let (mut factors, discarded) = match options.method {
        Method::Hosvd => job.hosvd(&working),
        Method::StHosvd | Method::Hooi => job.st_hosvd(&working)?,
    };
    let mut history = Vec::new();
    let mut status = Status::Converged;
    if options.method == Method::Hooi {
        (history, status) = job.hooi(&working, &mut factors, options)?;
        for restart in 0..options.restarts {
            let key = StreamKey::new(options.seed).named("hooi").with(restart as u64);
            let mut other = random_bases(&factors, key);
            let (sweeps, ended) = job.hooi(&working, &mut other, options)?;
            // A start that ends at the same optimum, up to rounding, changes nothing.
            if sweeps.last().zip(history.last()).is_some_and(|(new, best)| *new < best * (1.0 - 1e-9)) {
                (factors, history, status) = (other, sweeps, ended);
            }
        }
    }
    let mut core = project(&working, &factors, &[])?;
    let rel_error = job.relative_error(&working, &core, &factors)?;
    if history.is_empty() {
        history.push(rel_error);
    }
    core.data_mut().iter_mut().for_each(|x| *x *= scale);
    let tucker = Tucker { core, factors }.cast::<T>();
    if !tucker.core.data().iter().all(|x| x.is_finite()) {
        return Err(Error::NotFinite { what: "the core of the decomposition" });
    }
    let discarded = discarded.into_iter().map(|e| e / job.norm_squared).collect();
    Ok(Fit { tucker, rel_error, discarded, history, status })
}

/// Returns the compressed modes in increasing order, and the order in which to treat them.
fn check(shape: &[usize], ranks: &Ranks, options: &Options) -> Result<(Vec<usize>, Vec<usize>)> {
    let mut modes = options.modes.clone().unwrap_or_else(|| (0..shape.len()).collect());
    modes.sort_unstable();
    if modes.windows(2).any(|w| w[0] == w[1]) || modes.iter().any(|&m| m >= shape.len()) {
        return Err(Error::param("modes", format!("{modes:?}"), format!("distinct modes of {shape:?}")));
    }
    if options.iters == 0 {
        return Err(Error::param("iters", 0, "at least 1"));
    }
    if !(options.tol >= 0.0 && options.tol.is_finite()) {
        return Err(Error::param("tol", options.tol, "a finite number, at least 0"));
    }
    match ranks {
        Ranks::Given(list) => {
            let fits = |m: usize, r: usize| {
                if modes.contains(&m) { r >= 1 && r <= shape[m].max(1) } else { r == shape[m] }
            };
            if list.len() != shape.len() || !list.iter().enumerate().all(|(m, &r)| fits(m, r)) {
                return Err(Error::param(
                    "ranks",
                    format!("{list:?}"),
                    format!("1..=I_n in modes {modes:?} of {shape:?}, I_n in the others"),
                ));
            }
        }
        Ranks::RelError(e) if !(0.0..=1.0).contains(e) => {
            return Err(Error::param("rel_error", e, "a number from 0 to 1"));
        }
        Ranks::RelError(_) | Ranks::Full => {}
    }
    let order = match &options.order {
        Some(order) => {
            let mut sorted = order.clone();
            sorted.sort_unstable();
            if sorted != modes {
                return Err(Error::param(
                    "order",
                    format!("{order:?}"),
                    format!("a permutation of {modes:?}"),
                ));
            }
            order.clone()
        }
        None => {
            let mut order = modes.clone();
            if let Ranks::Given(list) = ranks {
                let shrink = |m: usize| shape[m] as f64 / list[m] as f64;
                order.sort_by(|&a, &b| shrink(b).total_cmp(&shrink(a)));
            }
            order
        }
    };
    Ok((modes, order))
}

fn zero_fit<T: Real>(shape: &[usize], ranks: &Ranks, modes: &[usize]) -> Result<Fit<T>> {
    let rank = |m: usize| match ranks {
        Ranks::Given(list) => list[m].min(shape[m]),
        Ranks::RelError(_) if modes.contains(&m) => shape[m].min(1),
        Ranks::RelError(_) | Ranks::Full => shape[m],
    };
    let core_shape: Vec<usize> = (0..shape.len()).map(rank).collect();
    let basis = |m: usize| {
        let unit = Mat::from_fn(shape[m], core_shape[m], |i, j| if i == j { T::ONE } else { T::ZERO });
        modes.contains(&m).then_some(unit)
    };
    Ok(Fit {
        tucker: Tucker { core: Tensor::zeros(&core_shape)?, factors: (0..shape.len()).map(basis).collect() },
        rel_error: 0.0,
        discarded: vec![0.0; shape.len()],
        history: vec![0.0],
        status: Status::Converged,
    })
}

type Factors = Vec<Option<Mat<f64>>>;

/// Draws orthonormal bases of the same sizes, uniformly at random.
fn random_bases(like: &Factors, key: StreamKey) -> Factors {
    let draw = |mode: usize, basis: &Mat<f64>| {
        let mut rng = key.with(mode as u64).rng();
        thin_qr(&Mat::from_fn(basis.rows(), basis.cols(), |_, _| rng.normal())).0
    };
    like.iter().enumerate().map(|(mode, basis)| basis.as_ref().map(|b| draw(mode, b))).collect()
}

/// Computes `T ×_m U_mᵀ` over every basis but those of `skip`.
fn project(t: &Tensor<f64>, factors: &Factors, skip: &[usize]) -> Result<Tensor<f64>> {
    let list: Vec<(usize, &Mat<f64>)> = factors
        .iter()
        .enumerate()
        .filter(|(m, _)| !skip.contains(m))
        .filter_map(|(m, f)| Some((m, f.as_ref()?)))
        .collect();
    t.mode_products_t(&list)
}

fn energy(values: &[f64]) -> f64 {
    // Adds the smallest first, so they are not lost beside the large ones.
    values.iter().rev().map(|s| s * s).sum()
}

impl Job<'_> {
    /// Returns the basis of `mode` for the tensor `t`, and the energy outside it.
    fn basis(&self, t: &Tensor<f64>, mode: usize) -> (Mat<f64>, f64) {
        let (values, vectors, rank) = match self.ranks {
            Ranks::Given(list) => {
                let (values, vectors) = self.vectors_for_rank(t, mode, list[mode]);
                (values, vectors, list[mode])
            }
            Ranks::Full => {
                let (values, vectors) = mode_svd(t, mode, false);
                let rank = values.len();
                (values, vectors, rank)
            }
            Ranks::RelError(epsilon) => {
                // In the Gram matrix, squares of singular values below 1e-8 of the largest are lost in rounding.
                let (values, vectors) = mode_svd(t, mode, *epsilon < 1e-6);
                let budget = epsilon * epsilon * self.norm_squared / self.modes.len() as f64;
                let rank =
                    (1..values.len()).find(|&r| energy(&values[r..]) <= budget).unwrap_or(values.len());
                (values, vectors, rank)
            }
        };
        (leading_columns(&vectors, rank), energy(&values[rank.min(values.len())..]))
    }

    /// Uses the Gram matrix if the requested directions stand clear of its rounding, otherwise a QR.
    fn vectors_for_rank(&self, t: &Tensor<f64>, mode: usize, rank: usize) -> (Vec<f64>, Mat<f64>) {
        let (values, vectors) = mode_svd(t, mode, false);
        if values[rank - 1] > 1e-7 * values[0] { (values, vectors) } else { mode_svd(t, mode, true) }
    }

    fn hosvd(&self, t: &Tensor<f64>) -> (Factors, Vec<f64>) {
        let mut factors: Factors = vec![None; t.order()];
        let mut discarded = vec![0.0; t.order()];
        for &mode in &self.modes {
            let (basis, lost) = self.basis(t, mode);
            (factors[mode], discarded[mode]) = (Some(basis), lost);
        }
        (factors, discarded)
    }

    fn st_hosvd(&self, t: &Tensor<f64>) -> Result<(Factors, Vec<f64>)> {
        let mut factors: Factors = vec![None; t.order()];
        let mut discarded = vec![0.0; t.order()];
        let mut truncated = std::borrow::Cow::Borrowed(t);
        for &mode in &self.order {
            let (basis, lost) = self.basis(&truncated, mode);
            truncated = std::borrow::Cow::Owned(truncated.mode_product_t(&basis, mode)?);
            (factors[mode], discarded[mode]) = (Some(basis), lost);
        }
        Ok((factors, discarded))
    }

    fn hooi(&self, t: &Tensor<f64>, factors: &mut Factors, options: &Options) -> Result<(Vec<f64>, Status)> {
        let captured = |core: &Tensor<f64>| core.data().iter().map(|x| x * x).sum::<f64>();
        let error = |energy: f64| (1.0 - energy / self.norm_squared).max(0.0).sqrt();
        let mut core = project(t, factors, &[])?;
        let mut norm = captured(&core).sqrt();
        let mut history = vec![self.relative_error(t, &core, factors)?];
        let Some((&last, others)) = self.modes.split_last() else {
            return Ok((history, Status::Converged));
        };
        let improve = |factors: &mut Factors, y: &Tensor<f64>, mode: usize| {
            let Some(rank) = factors[mode].as_ref().map(Mat::cols) else { return };
            factors[mode] = Some(leading_columns(&self.vectors_for_rank(y, mode, rank).1, rank));
        };
        for _ in 0..options.iters {
            if !others.is_empty() {
                // The basis of the last mode changes at the end of a sweep only: its product serves all other modes.
                let but_last: Vec<usize> = (0..t.order()).filter(|&m| m != last).collect();
                let shared = project(t, factors, &but_last)?;
                for &mode in others {
                    improve(factors, &project(&shared, factors, &[mode, last])?, mode);
                }
            }
            let y = project(t, factors, &[last])?;
            improve(factors, &y, last);
            core = project(&y, factors, others)?;
            let next = captured(&core).sqrt();
            let cheap = error(next * next);
            history.push(if cheap < 1e-6 { self.relative_error(t, &core, factors)? } else { cheap });
            let change = (next - norm).abs() / next.max(f64::MIN_POSITIVE);
            norm = next;
            if change <= options.tol {
                return Ok((history, Status::Converged));
            }
        }
        Ok((history, Status::MaxIters))
    }

    /// Computes `√(‖T‖² − ‖G‖²) / ‖T‖`, or the error entry by entry if that difference has no digits left.
    fn relative_error(&self, t: &Tensor<f64>, core: &Tensor<f64>, factors: &Factors) -> Result<f64> {
        let captured: f64 = core.data().iter().map(|x| x * x).sum();
        let squared = 1.0 - captured / self.norm_squared;
        if squared > 1e-12 {
            return Ok(squared.sqrt());
        }
        let model = Tucker { core: core.clone(), factors: factors.clone() }.reconstruct()?;
        let residual: f64 = t.data().iter().zip(model.data()).map(|(x, y)| (x - y) * (x - y)).sum();
        Ok((residual / self.norm_squared).sqrt())
    }
}

#[cfg(test)]
mod tests {
    use super::super::golden::{assert_close, floats, golden, sizes};
    use super::super::known::fill;
    use super::*;
    use crate::linalg::matmul_tn;

    fn with(method: Method) -> Options {
        let order = (method != Method::Hosvd).then(|| vec![0, 1, 2]);
        Options { method, order, iters: 5000, tol: 1e-15, restarts: 0, ..Default::default() }
    }

    /// Returns the singular values of every unfolding, largest first.
    fn mode_spectra(t: &Tensor<f64>) -> Vec<Vec<f64>> {
        (0..t.order()).map(|mode| mode_svd(t, mode, true).0).collect()
    }

    fn residual(t: &Tensor<f64>, tucker: &Tucker<f64>) -> f64 {
        let model = tucker.reconstruct().unwrap();
        t.data().iter().zip(model.data()).map(|(x, y)| (x - y).powi(2)).sum::<f64>().sqrt()
    }

    #[test]
    fn the_known_answers_hold() {
        let t = fill(&[4, 5, 6], 50).unwrap();
        assert!((t.norm() - 6.840877956193).abs() < 1e-10);
        let spectrum = &mode_spectra(&t)[0];
        assert_close(spectrum, &[4.015986369881, 3.521015425023, 3.148329757602, 2.891355184444], 1e-10);
        for (ranks, errors) in [
            ([2, 2, 2], [0.8781435115, 0.8344708164, 0.8157985204]),
            ([3, 3, 3], [0.7089618610, 0.6761202657, 0.6626678865]),
            ([2, 3, 4], [0.7806102801, 0.7488778433, 0.7266582600]),
        ] {
            for (method, expected) in [Method::Hosvd, Method::StHosvd, Method::Hooi].into_iter().zip(errors) {
                let fit = decompose(&t, &Ranks::Given(ranks.to_vec()), &with(method)).unwrap();
                assert!((fit.rel_error - expected).abs() < 1e-9, "{ranks:?} {method:?}: {}", fit.rel_error);
                assert_eq!(fit.tucker.ranks(), ranks);
            }
        }
    }

    #[test]
    fn improvement_from_the_same_start_agrees_with_tensorly() {
        for case in golden("tucker")["cases"].as_array().unwrap() {
            let (shape, ranks) = (sizes(&case["shape"]), sizes(&case["ranks"]));
            let t = fill(&shape, case["seed"].as_u64().unwrap()).unwrap();
            let order = Some((0..shape.len()).collect());
            let options = Options {
                method: Method::Hooi,
                order,
                iters: 5000,
                tol: 1e-15,
                restarts: 0,
                ..Default::default()
            };
            let fit = decompose(&t, &Ranks::Given(ranks), &options).unwrap();
            assert!((fit.history[0] - case["st_hosvd"].as_f64().unwrap()).abs() < 1e-12);
            assert!((fit.rel_error - case["hooi"].as_f64().unwrap()).abs() < 1e-9, "{}", fit.rel_error);
            let model = fit.tucker.reconstruct().unwrap();
            // Entries are known to the root of the accuracy of the error.
            assert_close(&model.data()[..4], &floats(&case["hooi_head"]), 1e-5);
        }
        let partial = &golden("tucker")["partial_modes_1_2"];
        let t = fill(&[4, 5, 6], 50).unwrap();
        let options = Options {
            method: Method::Hooi,
            modes: Some(vec![2, 1]),
            iters: 5000,
            tol: 1e-15,
            restarts: 0,
            ..Default::default()
        };
        let fit = decompose(&t, &Ranks::Given(sizes(&partial["ranks"])), &options).unwrap();
        assert!((fit.rel_error - partial["rel_error"].as_f64().unwrap()).abs() < 1e-9, "{}", fit.rel_error);
        assert!(fit.tucker.factors[0].is_none());
        assert_eq!(fit.tucker.parameters(), 4 * 2 * 3 + 10 + 18);
    }

    #[test]
    fn full_ranks_are_exact() {
        for shape in [&[4, 5, 6][..], &[7], &[1, 5], &[2, 1, 3, 2], &[9, 2, 2]] {
            let t = fill(shape, 61).unwrap();
            for method in [Method::Hosvd, Method::StHosvd, Method::Hooi] {
                for ranks in [Ranks::Full, Ranks::Given(shape.to_vec()), Ranks::RelError(0.0)] {
                    let fit = decompose(&t, &ranks, &Options { method, ..Default::default() }).unwrap();
                    assert!(
                        residual(&t, &fit.tucker) <= 100.0 * f64::EPSILON * t.norm(),
                        "{shape:?} {method:?}"
                    );
                    assert!(fit.rel_error <= 100.0 * f64::EPSILON);
                }
            }
        }
    }

    #[test]
    fn the_error_is_what_the_core_does_not_hold() {
        let t = fill(&[4, 5, 6], 50).unwrap();
        for method in [Method::Hosvd, Method::StHosvd, Method::Hooi] {
            let fit = decompose(&t, &Ranks::Given(vec![2, 3, 4]), &with(method)).unwrap();
            let direct = residual(&t, &fit.tucker).powi(2);
            let from_core = t.norm().powi(2) - fit.tucker.core.norm().powi(2);
            assert!((direct - from_core).abs() < 100.0 * f64::EPSILON * t.norm().powi(2));
            for f in fit.tucker.factors.iter().flatten() {
                let gram = matmul_tn(f.as_ref(), f.as_ref());
                assert_close(gram.data(), Mat::<f64>::identity(f.cols()).data(), 50.0 * f64::EPSILON);
            }
            if method == Method::StHosvd {
                let lost: f64 = fit.discarded.iter().sum();
                assert!((fit.rel_error.powi(2) - lost).abs() < 100.0 * f64::EPSILON);
            }
            if method == Method::Hosvd {
                assert!(fit.rel_error.powi(2) <= fit.discarded.iter().sum::<f64>());
            }
        }
    }

    #[test]
    fn improvement_never_loses_and_all_stay_below_the_bound() {
        for (shape, ranks) in [
            (&[4, 5, 6][..], &[2, 2, 2][..]),
            (&[3, 4, 2, 5], &[2, 2, 1, 3]),
            (&[6, 6], &[3, 3]),
            (&[5, 2, 2], &[5, 1, 1]),
        ] {
            let t = fill(shape, 62).unwrap();
            let run = |method| {
                decompose(&t, &Ranks::Given(ranks.to_vec()), &Options { method, ..Default::default() })
                    .unwrap()
            };
            let (hosvd, st, hooi) = (run(Method::Hosvd), run(Method::StHosvd), run(Method::Hooi));
            let bound = hosvd.discarded.iter().sum::<f64>().sqrt();
            let slack = 100.0 * f64::EPSILON;
            assert!(hooi.rel_error <= st.rel_error + slack && st.rel_error <= bound + slack);
            assert!(hosvd.rel_error <= bound + slack);
            assert!(hooi.history.windows(2).all(|w| w[1] <= w[0] + slack), "{:?}", hooi.history);
        }
    }

    #[test]
    fn the_wanted_error_chooses_the_fewest_ranks_per_mode() {
        let t = fill(&[6, 7, 8], 63).unwrap();
        for method in [Method::Hosvd, Method::StHosvd, Method::Hooi] {
            let mut last = usize::MAX;
            for epsilon in [0.0, 1e-9, 0.1, 0.3, 0.7, 1.0] {
                let options = Options { method, ..Default::default() };
                let fit = decompose(&t, &Ranks::RelError(epsilon), &options).unwrap();
                assert!(fit.rel_error <= epsilon + 100.0 * f64::EPSILON, "{method:?} {epsilon}");
                assert!(fit.tucker.parameters() <= last);
                last = fit.tucker.parameters();
            }
        }
        // One vector fewer in a mode of the HOSVD would exceed that mode's share.
        let fit = decompose(&t, &Ranks::RelError(0.5), &with(Method::Hosvd)).unwrap();
        for (mode, spectrum) in mode_spectra(&t).iter().enumerate() {
            let kept = fit.tucker.ranks()[mode];
            let share = 0.25 * t.norm().powi(2) / 3.0;
            assert!(energy(&spectrum[kept..]) <= share && energy(&spectrum[kept - 1..]) > share);
        }
    }

    #[test]
    fn tiny_directions_are_resolved_when_asked_for() {
        // Singular values 1, 1e-5, 1e-10 in every mode: a Gram matrix cannot see the third.
        let mut t = Tensor::<f64>::zeros(&[3, 3, 3]).unwrap();
        for (i, s) in [1.0, 1e-5, 1e-10].into_iter().enumerate() {
            t.data_mut()[i * 13] = s;
        }
        let fit = decompose(&t, &Ranks::RelError(1e-12), &Options::default()).unwrap();
        assert_eq!(fit.tucker.ranks(), [3, 3, 3]);
        let fit = decompose(&t, &Ranks::RelError(1e-9), &Options::default()).unwrap();
        assert_eq!(fit.tucker.ranks(), [2, 2, 2]);
        assert!((fit.rel_error / 1e-10 - 1.0).abs() < 1e-6, "{}", fit.rel_error);
        let fit = decompose(&t, &Ranks::Given(vec![2, 2, 2]), &Options::default()).unwrap();
        assert!((fit.rel_error / 1e-10 - 1.0).abs() < 1e-6, "{}", fit.rel_error);
    }

    #[test]
    fn ranks_beyond_the_product_of_the_others_still_give_a_basis() {
        let t = fill(&[6, 2, 2], 64).unwrap();
        for method in [Method::Hosvd, Method::StHosvd, Method::Hooi] {
            let fit = decompose(&t, &Ranks::Given(vec![6, 1, 1]), &Options { method, ..Default::default() })
                .unwrap();
            let f = fit.tucker.factors[0].as_ref().unwrap();
            assert_close(
                matmul_tn(f.as_ref(), f.as_ref()).data(),
                Mat::<f64>::identity(6).data(),
                50.0 * f64::EPSILON,
            );
        }
    }

    #[test]
    fn degenerate_inputs_get_an_answer_and_bad_ones_an_error() {
        for shape in [&[3, 4, 5][..], &[2, 0, 3], &[1, 1]] {
            let zero = Tensor::<f64>::zeros(shape).unwrap();
            for ranks in [Ranks::Given(vec![1; shape.len()]), Ranks::Full, Ranks::RelError(0.1)] {
                let fit = decompose(&zero, &ranks, &Options::default()).unwrap();
                assert_eq!(fit.rel_error, 0.0);
                assert_eq!(fit.tucker.reconstruct().unwrap(), zero);
            }
        }
        let t = fill(&[3, 4, 5], 1).unwrap();
        let options = Options::default();
        for ranks in [vec![0, 1, 1], vec![1, 1], vec![4, 1, 1]] {
            assert!(matches!(
                decompose(&t, &Ranks::Given(ranks), &options),
                Err(Error::InvalidParam { name: "ranks", .. })
            ));
        }
        assert!(decompose(&t, &Ranks::RelError(f64::NAN), &options).is_err());
        assert!(decompose(&t, &Ranks::Full, &Options { modes: Some(vec![3]), ..options.clone() }).is_err());
        assert!(
            decompose(&t, &Ranks::Full, &Options { modes: Some(vec![1, 1]), ..options.clone() }).is_err()
        );
        assert!(
            decompose(&t, &Ranks::Full, &Options { order: Some(vec![0, 1]), ..options.clone() }).is_err()
        );
        assert!(decompose(&t, &Ranks::Full, &Options { iters: 0, ..options.clone() }).is_err());
        let mut bad = t;
        bad.data_mut()[0] = f64::NAN;
        assert!(matches!(decompose(&bad, &Ranks::Full, &options), Err(Error::NotFinite { .. })));
        let huge = Tensor::from_flat_fn(&[3, 3], |_| 1e308).unwrap();
        assert!(matches!(decompose(&huge, &Ranks::Full, &options), Err(Error::NotFinite { .. })));
    }

    #[test]
    fn the_scale_of_the_entries_does_not_matter() {
        let t = fill(&[4, 5, 6], 50).unwrap();
        for scale in [1e-200, 1e200] {
            let scaled = Tensor::from_flat_fn(t.shape(), |k| t.data()[k] * scale).unwrap();
            let options = Options { order: Some(vec![0, 1, 2]), ..Default::default() };
            let fit = decompose(&scaled, &Ranks::Given(vec![3, 3, 3]), &options).unwrap();
            assert!((fit.rel_error - 0.6761202657).abs() < 1e-9);
        }
    }

    #[test]
    fn single_precision_data_rounds_the_answer_once() {
        let t = fill(&[4, 5, 6], 50).unwrap().cast::<f32>();
        let fit = decompose(&t, &Ranks::Full, &Options::default()).unwrap();
        let model = fit.tucker.reconstruct().unwrap();
        for (x, y) in t.data().iter().zip(model.data()) {
            assert!((x - y).abs() < 64.0 * f32::EPSILON);
        }
    }

    #[test]
    fn restarts_leave_a_saddle() {
        // e₁e₁e₂ + e₁e₂e₁ + e₂e₁e₁: ST-HOSVD's bases are a stationary point with error √(2/3), the best fit of
        // multilinear rank (1, 1, 1) has √(5/9).
        let ones = [1usize, 2, 4];
        let t = Tensor::from_flat_fn(&[2, 2, 2], |i| f64::from(u8::from(ones.contains(&i)))).unwrap();
        let fit = |restarts| {
            let options = Options { method: Method::Hooi, restarts, ..Default::default() };
            decompose(&t, &Ranks::Given(vec![1, 1, 1]), &options).unwrap().rel_error
        };
        assert!((fit(0) - (2.0f64 / 3.0).sqrt()).abs() < 1e-9);
        assert!((fit(4) - (5.0f64 / 9.0).sqrt()).abs() < 1e-6, "{}", fit(4));
    }
}
