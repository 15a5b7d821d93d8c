//! Block terms: a sum of small Tucker forms, between the polyadic form (all block ranks 1) and Tucker (one
//! block).
//!
//! $T \approx \sum_p G_p \times_1 A_p^{(1)} \cdots \times_N A_p^{(N)}$ with cores of one shape
//! $L_1 \times \dots \times L_N$ (De Lathauwer 2008). Alternating least squares: in mode $n$ the unknown
//! $[A_1^{(n)} \dots A_P^{(n)}]$ multiplies the stacked rows $Z_p = G_{p(n)}\,\bigl(\bigotimes_{m \ne n}
//! A_p^{(m)}\bigr)^\top$; then all cores together solve a least-squares problem. Neither regressor is formed:
//! $Z_p Z_q^\top = G_{p(n)} \bigl(\bigotimes_{m \ne n} A_p^{(m)\top} A_q^{(m)}\bigr) G_{q(n)}^\top$ is a chain
//! of small mode products, and $T_{(n)} Z_p^\top$ follows from $T \times_{m \ne n} A_p^{(m)\top}$. Bases are
//! made orthonormal after every update, the triangular factor going to the core, so that the equations
//! stay well conditioned.
//!
//! **Cost.** A sweep takes about $2 (N + 1) P L \prod I$ flops, and $(P \prod L)^3 / 3$ for the cores.

use super::small::{column_sign, kron_chain, solve_gram, thin_qr};
use super::tucker::{self, Tucker};
use super::{Error, Result, Tensor};
use crate::linalg::{matmul, matmul_nt, matmul_tn};
use crate::rng::{Rng, StreamKey};
use crate::{DType, Mat, Real};

/// Most unknowns of the joint equations of the cores; their matrix holds the square of that number.
pub const MAX_CORE_UNKNOWNS: usize = 8192;

/// Sum of Tucker forms of one shape.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockTerms<T> {
    /// The blocks; every factor is `Some`.
    pub blocks: Vec<Tucker<T>>,
}

impl<T: Real> BlockTerms<T> {
    /// Numbers stored.
    pub fn parameters(&self) -> usize {
        self.blocks.iter().map(Tucker::parameters).sum()
    }

    /// The dense tensor.
    pub fn reconstruct(&self) -> Result<Tensor<T>> {
        let mut sum: Option<Tensor<T>> = None;
        for block in &self.blocks {
            let part = block.reconstruct()?;
            match &mut sum {
                None => sum = Some(part),
                Some(sum) if sum.shape() == part.shape() => {
                    sum.data_mut().iter_mut().zip(part.data()).for_each(|(x, &y)| *x += y);
                }
                Some(sum) => {
                    return Err(Error::shape(
                        "blocks",
                        format!("shape {:?} as the first", sum.shape()),
                        format!("{:?}", part.shape()),
                    ));
                }
            }
        }
        sum.ok_or_else(|| Error::shape("blocks", "at least one", 0))
    }
}

/// Starting point of the iteration.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Init {
    /// Random groups of a Tucker basis, slightly perturbed; every other start mixes the basis at random.
    #[default]
    Split,
    /// These blocks for the first start.
    Given(BlockTerms<f64>),
}

/// Settings of the iteration.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// The first start; all others are [`Init::Split`].
    pub init: Init,
    /// Number of starts, at least 1; the smallest final error wins. One block needs one start only.
    pub restarts: usize,
    /// Most sweeps per start, at least 1.
    pub iters: usize,
    /// Stop when the relative error changes by less in a sweep. `None`: 1e-8 for f64 data, 1e-5 for f32.
    pub tol: Option<f64>,
    /// Tikhonov weight, relative to the mean diagonal of the normal equations.
    pub ridge: f64,
    /// Seed of the random parts.
    pub seed: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self { init: Init::Split, restarts: 5, iters: 500, tol: None, ridge: 0.0, seed: 0 }
    }
}

/// Outcome of the iteration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Status {
    /// The error stopped changing, or vanished.
    Converged,
    /// The sweeps were used up.
    MaxIters,
}

/// Decomposition, with the course of its iteration.
#[derive(Clone, Debug)]
pub struct Fit<T> {
    /// Blocks by norm of their core, largest first; orthonormal bases with positive largest entries.
    pub terms: BlockTerms<T>,
    /// `‖T − T̂‖ / ‖T‖`, of the blocks in f64; 0 for a zero tensor.
    pub rel_error: f64,
    /// Relative error after each sweep of the winning start.
    pub history: Vec<f64>,
    /// Outcome of the winning start.
    pub status: Status,
    /// Number of the winning start, from 0.
    pub start: usize,
}

/// Decomposes `t` into `blocks` blocks whose cores have shape `ranks`, `1..=I_n` in each mode.
pub fn decompose<T: Real>(
    t: &Tensor<T>,
    blocks: usize,
    ranks: &[usize],
    options: &Options,
) -> Result<Fit<T>> {
    check(t.shape(), blocks, ranks, options)?;
    let (working, scale) = t.to_working()?;
    let norm_squared: f64 = working.data().iter().map(|x| x * x).sum();
    if norm_squared == 0.0 {
        return zero_fit(t.shape(), blocks, ranks);
    }
    let (tol, floor) = match T::DTYPE {
        DType::F64 => (options.tol.unwrap_or(1e-8), 1e-12),
        DType::F32 => (options.tol.unwrap_or(1e-5), 1e-7),
    };
    let problem = Problem {
        t: &working,
        norm_squared,
        ranks,
        blocks,
        tol,
        ridge: options.ridge,
        floor,
        iters: options.iters,
    };
    let mut best: Option<Fit<f64>> = None;
    for start in 0..options.restarts {
        let bases = match (&options.init, start) {
            (Init::Given(given), 0) => {
                given.blocks.iter().map(|b| b.factors.iter().flatten().cloned().collect()).collect()
            }
            _ => {
                problem.split(StreamKey::new(options.seed).named("block terms").with(start as u64), start)?
            }
        };
        // A given core matters: the first update solves for the bases of mode 0 with that core.
        let cores = match (&options.init, start) {
            (Init::Given(given), 0) => given.blocks.iter().map(|b| b.core.clone()).collect(),
            _ => problem.solve_cores(&bases)?.0,
        };
        let fit = problem.iterate(bases, cores, start)?;
        if best.as_ref().is_none_or(|b| fit.rel_error < b.rel_error) {
            best = Some(fit);
        }
    }
    let mut best = best.expect("there is at least one start");
    for block in &mut best.terms.blocks {
        block.core.data_mut().iter_mut().for_each(|x| *x *= scale);
    }
    let terms = BlockTerms { blocks: best.terms.blocks.iter().map(Tucker::cast).collect::<Vec<Tucker<T>>>() };
    if !terms.blocks.iter().flat_map(|b| b.core.data()).all(|x| x.is_finite()) {
        return Err(Error::NotFinite { what: "a core of the decomposition" });
    }
    Ok(Fit {
        terms,
        rel_error: best.rel_error,
        history: best.history,
        status: best.status,
        start: best.start,
    })
}

fn check(shape: &[usize], blocks: usize, ranks: &[usize], options: &Options) -> Result<()> {
    if blocks == 0 {
        return Err(Error::param("blocks", 0, "at least 1"));
    }
    if ranks.len() != shape.len() || ranks.iter().zip(shape).any(|(&r, &n)| r == 0 || r > n.max(1)) {
        return Err(Error::param(
            "ranks",
            format!("{ranks:?}"),
            format!("1..=I_n in each mode of {shape:?}"),
        ));
    }
    let unknowns = ranks.iter().try_fold(blocks, |n, &r| n.checked_mul(r));
    if unknowns.is_none_or(|n| n > MAX_CORE_UNKNOWNS) {
        return Err(Error::param(
            "blocks",
            blocks,
            format!("at most {MAX_CORE_UNKNOWNS} core entries in all blocks together"),
        ));
    }
    if options.restarts == 0 || options.iters == 0 {
        return Err(Error::param("restarts, iters", 0, "at least 1"));
    }
    for (name, value) in [("tol", options.tol.unwrap_or(0.0)), ("ridge", options.ridge)] {
        if !(value >= 0.0 && value.is_finite()) {
            return Err(Error::param(name, value, "a finite number, at least 0"));
        }
    }
    let Init::Given(given) = &options.init else { return Ok(()) };
    let fits = |b: &Tucker<f64>| {
        b.ranks() == ranks
            && b.factors.len() == shape.len()
            && b.factors.iter().all(Option::is_some)
            && b.shape() == shape
            && b.factors.iter().flatten().zip(ranks).all(|(f, &r)| f.cols() == r)
    };
    if given.blocks.len() != blocks || !given.blocks.iter().all(fits) {
        return Err(Error::shape(
            "given start",
            format!("{blocks} blocks of shape {shape:?} and ranks {ranks:?}, no identity factors"),
            format!("{} blocks that differ", given.blocks.len()),
        ));
    }
    let numbers = |b: &Tucker<f64>| {
        b.core.data().iter().chain(b.factors.iter().flatten().flat_map(Mat::data)).all(|x| x.is_finite())
    };
    if !given.blocks.iter().all(numbers) {
        return Err(Error::NotFinite { what: "the given start" });
    }
    Ok(())
}

fn zero_fit<T: Real>(shape: &[usize], blocks: usize, ranks: &[usize]) -> Result<Fit<T>> {
    let ranks: Vec<usize> = ranks.iter().zip(shape).map(|(&r, &n)| r.min(n)).collect();
    let unit =
        |(&n, &r): (&usize, &usize)| Some(Mat::from_fn(n, r, |i, j| if i == j { T::ONE } else { T::ZERO }));
    let block =
        Tucker { core: Tensor::zeros(&ranks)?, factors: shape.iter().zip(&ranks).map(unit).collect() };
    Ok(Fit {
        terms: BlockTerms { blocks: vec![block; blocks] },
        rel_error: 0.0,
        history: Vec::new(),
        status: Status::Converged,
        start: 0,
    })
}

struct Problem<'a> {
    t: &'a Tensor<f64>,
    norm_squared: f64,
    ranks: &'a [usize],
    blocks: usize,
    tol: f64,
    ridge: f64,
    floor: f64,
    iters: usize,
}

/// `bases[p][n]`: the basis of block `p` in mode `n`.
type Bases = Vec<Vec<Mat<f64>>>;

/// Returns the named columns of a basis, slightly perturbed; standard normal numbers where it has none.
fn pick(basis: &Mat<f64>, columns: &[usize], rng: &mut Rng) -> Mat<f64> {
    Mat::from_fn(basis.rows(), columns.len(), |i, j| match columns[j] {
        c if c < basis.cols() => basis[(i, c)] + 0.01 * rng.normal(),
        _ => rng.normal(),
    })
}

impl Problem<'_> {
    fn order(&self) -> usize {
        self.t.order()
    }

    /// Returns bases from a Tucker basis wide enough for all blocks, as far as the tensor is wide enough.
    fn split(&self, key: StreamKey, start: usize) -> Result<Bases> {
        let shape = self.t.shape();
        let wide: Vec<usize> =
            self.ranks.iter().zip(shape).map(|(&r, &n)| (r * self.blocks).min(n)).collect();
        let whole = tucker::decompose(self.t, &tucker::Ranks::Given(wide), &Default::default())?.tucker;
        let mut bases: Bases = vec![Vec::new(); self.blocks];
        for mode in 0..self.order() {
            let Some(basis) = &whole.factors[mode] else { continue };
            let mut rng = key.with(mode as u64).rng();
            let (r, all) = (self.ranks[mode], self.ranks[mode] * self.blocks);
            // One block takes the columns in order: that is the best start, and there is nothing to split.
            let order = if self.blocks == 1 { (0..all).collect() } else { rng.permutation(all) };
            for (p, bases) in bases.iter_mut().enumerate() {
                let picked = if start.is_multiple_of(2) {
                    pick(basis, &order[p * r..(p + 1) * r], &mut rng)
                } else {
                    let mut mix = Mat::zeros(basis.cols(), r);
                    rng.fill_normal(mix.data_mut());
                    matmul(basis.as_ref(), mix.as_ref())
                };
                bases.push(thin_qr(&picked).0);
            }
        }
        Ok(bases)
    }

    /// Computes `T ×_m A_pᵀ` over all modes but `skip`.
    fn project(&self, bases: &[Mat<f64>], skip: Option<usize>) -> Result<Tensor<f64>> {
        let list: Vec<(usize, &Mat<f64>)> =
            bases.iter().enumerate().filter(|(m, _)| Some(*m) != skip).collect();
        self.t.mode_products_t(&list)
    }

    /// Returns the cores that fit best together, and `gᵀNg − 2gᵀb`, the squared error minus `‖T‖²`.
    fn solve_cores(&self, bases: &Bases) -> Result<(Vec<Tensor<f64>>, f64)> {
        let len: usize = self.ranks.iter().product();
        let total = len * self.blocks;
        let mut normal = Mat::zeros(total, total);
        let mut rhs = Mat::zeros(1, total);
        for p in 0..self.blocks {
            let projected = self.project(&bases[p], None)?;
            rhs.row_mut(0)[p * len..(p + 1) * len].copy_from_slice(projected.data());
            for q in 0..=p {
                let crosses: Vec<Mat<f64>> =
                    bases[p].iter().zip(&bases[q]).map(|(a, b)| matmul_tn(a.as_ref(), b.as_ref())).collect();
                let block = kron_chain(&crosses);
                for i in 0..len {
                    for j in 0..len {
                        normal[(p * len + i, q * len + j)] = block[(i, j)];
                        normal[(q * len + j, p * len + i)] = block[(i, j)];
                    }
                }
            }
        }
        let solved = solve_gram(&normal, &rhs, self.ridge, self.floor);
        let image = matmul(solved.as_ref(), normal.as_ref());
        let gain = (0..total).map(|i| solved[(0, i)] * (image[(0, i)] - 2.0 * rhs[(0, i)])).sum();
        let cores = solved.data().chunks_exact(len).map(|c| Tensor::new(self.ranks, c.to_vec()));
        Ok((cores.collect::<Result<_>>()?, gain))
    }

    /// Replaces the bases of one mode by the best ones for the given cores and other bases, and orthonormalises them.
    fn update_mode(&self, bases: &mut Bases, cores: &mut [Tensor<f64>], mode: usize) -> Result<()> {
        let r = self.ranks[mode];
        let total = r * self.blocks;
        let mut gamma = Mat::zeros(total, total);
        let mut y = Mat::zeros(self.t.shape()[mode], total);
        let unfolded: Vec<Mat<f64>> = cores.iter().map(|g| g.unfold(mode)).collect::<Result<_>>()?;
        for p in 0..self.blocks {
            let projected = self.project(&bases[p], Some(mode))?.unfold(mode)?;
            let rows = matmul_nt(projected.as_ref(), unfolded[p].as_ref());
            for i in 0..y.rows() {
                y.row_mut(i)[p * r..(p + 1) * r].copy_from_slice(rows.row(i));
            }
            for q in 0..=p {
                let crosses: Vec<(usize, Mat<f64>)> = (0..self.order())
                    .filter(|&m| m != mode)
                    .map(|m| (m, matmul_tn(bases[p][m].as_ref(), bases[q][m].as_ref())))
                    .collect();
                let list: Vec<(usize, &Mat<f64>)> = crosses.iter().map(|(m, c)| (*m, c)).collect();
                let moved = cores[q].mode_products(&list)?.unfold(mode)?;
                let block = matmul_nt(unfolded[p].as_ref(), moved.as_ref());
                for i in 0..r {
                    for j in 0..r {
                        gamma[(p * r + i, q * r + j)] = block[(i, j)];
                        gamma[(q * r + j, p * r + i)] = block[(i, j)];
                    }
                }
            }
        }
        let solved = solve_gram(&gamma, &y, self.ridge, self.floor);
        for p in 0..self.blocks {
            let part = Mat::from_fn(solved.rows(), r, |i, j| solved[(i, p * r + j)]);
            let (q, triangle) = thin_qr(&part);
            cores[p] = cores[p].mode_product(&triangle, mode)?;
            bases[p][mode] = q;
        }
        Ok(())
    }

    fn iterate(&self, mut bases: Bases, mut cores: Vec<Tensor<f64>>, start: usize) -> Result<Fit<f64>> {
        let mut history = Vec::new();
        let mut error = f64::INFINITY;
        let mut status = Status::MaxIters;
        for _ in 0..self.iters {
            for mode in 0..self.order() {
                self.update_mode(&mut bases, &mut cores, mode)?;
            }
            let gain;
            (cores, gain) = self.solve_cores(&bases)?;
            let size: f64 = cores.iter().flat_map(|c| c.data()).map(|x| x * x).sum();
            let mut squared = self.norm_squared + gain;
            if squared < 1e-13 * (self.norm_squared + size) {
                squared = self.residual_squared(&bases, &cores)?;
            }
            let now = (squared.max(0.0) / self.norm_squared).sqrt();
            history.push(now);
            let change = (error - now).abs();
            error = now;
            if change < self.tol || error < 10.0 * f64::EPSILON {
                status = Status::Converged;
                break;
            }
        }
        let terms = assemble(bases, cores)?;
        Ok(Fit { terms, rel_error: error, history, status, start })
    }

    fn residual_squared(&self, bases: &Bases, cores: &[Tensor<f64>]) -> Result<f64> {
        let model = assemble(bases.clone(), cores.to_vec())?.reconstruct()?;
        Ok(self.t.data().iter().zip(model.data()).map(|(x, y)| (x - y) * (x - y)).sum())
    }
}

/// Returns the blocks, largest first, with the sign rule applied to every basis vector.
fn assemble(bases: Bases, cores: Vec<Tensor<f64>>) -> Result<BlockTerms<f64>> {
    let mut blocks = Vec::with_capacity(cores.len());
    for (mut bases, mut core) in bases.into_iter().zip(cores) {
        for (mode, basis) in bases.iter_mut().enumerate() {
            let signs: Vec<f64> = (0..basis.cols()).map(|j| column_sign(basis, j)).collect();
            *basis = Mat::from_fn(basis.rows(), basis.cols(), |i, j| basis[(i, j)] * signs[j]);
            let flip = Mat::from_fn(signs.len(), signs.len(), |i, j| if i == j { signs[i] } else { 0.0 });
            core = core.mode_product(&flip, mode)?;
        }
        blocks.push(Tucker { core, factors: bases.into_iter().map(Some).collect() });
    }
    blocks.sort_by(|a, b| b.core.norm().total_cmp(&a.core.norm()));
    Ok(BlockTerms { blocks })
}

#[cfg(test)]
mod tests {
    use super::super::cp;
    use super::super::golden::{assert_close, floats, golden, mat, sizes};
    use super::super::known::fill;
    use super::*;

    fn start(shape: &[usize], blocks: usize, ranks: &[usize]) -> BlockTerms<f64> {
        let block = |p: usize| Tucker {
            core: fill(ranks, 300 + p as u64).unwrap(),
            factors: (0..shape.len())
                .map(|m| Some(mat(shape[m], ranks[m], (200 + 10 * p + m) as u64)))
                .collect(),
        };
        BlockTerms { blocks: (0..blocks).map(block).collect() }
    }

    #[test]
    fn sweeps_from_a_given_start_agree_with_explicit_least_squares() {
        for case in golden("block_terms").as_array().unwrap() {
            let (shape, ranks) = (sizes(&case["shape"]), sizes(&case["ranks"]));
            let blocks = case["blocks"].as_u64().unwrap() as usize;
            let t = fill(&shape, case["seed"].as_u64().unwrap()).unwrap();
            let errors = floats(&case["errors"]);
            let options = Options {
                init: Init::Given(start(&shape, blocks, &ranks)),
                restarts: 1,
                iters: errors.len(),
                tol: Some(0.0),
                ..Default::default()
            };
            let fit = decompose(&t, blocks, &ranks, &options).unwrap();
            // The smallest ridge, 1e-12, times the condition of the normal equations, up to 1e4 here.
            assert_close(&fit.history, &errors, 1e-8);
        }
    }

    #[test]
    fn one_block_reproduces_tucker() {
        let t = fill(&[4, 5, 6], 50).unwrap();
        let hooi =
            tucker::Options { method: tucker::Method::Hooi, iters: 5000, tol: 1e-15, ..Default::default() };
        for ranks in [[2, 2, 2], [3, 3, 3], [2, 3, 4]] {
            let expected =
                tucker::decompose(&t, &tucker::Ranks::Given(ranks.to_vec()), &hooi).unwrap().rel_error;
            let options = Options { iters: 5000, tol: Some(1e-14), ..Default::default() };
            let fit = decompose(&t, 1, &ranks, &options).unwrap();
            // Several optima exist; several starts may find a better one than HOOI's single start.
            assert!(fit.rel_error < expected + 1e-9, "{ranks:?}: {} {expected}", fit.rel_error);
            let single = decompose(&t, 1, &ranks, &Options { restarts: 1, ..options }).unwrap();
            assert!((single.rel_error - expected).abs() < 1e-9, "{ranks:?}: {} {expected}", single.rel_error);
        }
    }

    #[test]
    fn blocks_of_rank_one_reproduce_the_polyadic_form() {
        let t = fill(&[4, 5, 6], 50).unwrap();
        let expected = golden("polyadic")["best_of_30"].as_f64().unwrap();
        let options = Options { restarts: 30, iters: 3000, tol: Some(1e-13), ..Default::default() };
        let fit = decompose(&t, 2, &[1, 1, 1], &options).unwrap();
        assert!((fit.rel_error - expected).abs() < 1e-9, "{} {expected}", fit.rel_error);
        let polyadic = cp::Options { restarts: 30, iters: 3000, tol: Some(1e-13), ..Default::default() };
        let polyadic = cp::decompose(&t, 2, &polyadic).unwrap();
        assert!((fit.rel_error - polyadic.rel_error).abs() < 1e-9);
    }

    #[test]
    fn an_exact_sum_of_blocks_is_recovered() {
        let t = start(&[6, 7, 8], 2, &[2, 2, 2]).reconstruct().unwrap();
        let fit = decompose(&t, 2, &[2, 2, 2], &Options { iters: 2000, ..Default::default() }).unwrap();
        assert!(fit.rel_error < 1e-6, "{} {:?}", fit.rel_error, fit.history.len());
        let norms: Vec<f64> = fit.terms.blocks.iter().map(|b| b.core.norm()).collect();
        assert!(norms[0] >= norms[1]);
        assert_eq!(fit.terms.parameters(), 2 * (8 + 12 + 14 + 16));
    }

    #[test]
    fn the_error_never_rises_between_sweeps() {
        let t = fill(&[5, 6, 4], 55).unwrap();
        let options = Options { iters: 200, tol: Some(0.0), ..Default::default() };
        let fit = decompose(&t, 2, &[2, 2, 2], &options).unwrap();
        for pair in fit.history.windows(2) {
            let rise = pair[1].powi(2) - pair[0].powi(2);
            assert!(rise <= 10.0 * f64::EPSILON, "{pair:?} {rise:e}");
        }
    }

    #[test]
    fn degenerate_inputs_get_an_answer_and_bad_ones_an_error() {
        for shape in [&[3, 4, 5][..], &[2, 0, 3], &[1, 1]] {
            let zero = Tensor::<f64>::zeros(shape).unwrap();
            let fit = decompose(&zero, 2, &vec![1; shape.len()], &Options::default()).unwrap();
            assert_eq!(fit.terms.reconstruct().unwrap(), zero);
        }
        // More block columns than the mode has, rank-deficient cores, one-sized modes.
        for (shape, ranks) in
            [(&[2, 3, 4][..], &[2, 3, 1][..]), (&[1, 3, 1], &[1, 2, 1]), (&[5], &[3]), (&[3, 1], &[3, 1])]
        {
            let t = fill(shape, 65).unwrap();
            let fit = decompose(&t, 3, ranks, &Options { iters: 20, ..Default::default() }).unwrap();
            let model = fit.terms.reconstruct().unwrap();
            assert!(model.data().iter().all(|x| x.is_finite()), "{shape:?}");
            assert!(fit.rel_error <= 1.0 + 1e-12);
        }
        let t = fill(&[3, 4, 5], 1).unwrap();
        let options = Options::default();
        assert!(decompose(&t, 0, &[1, 1, 1], &options).is_err());
        assert!(decompose(&t, 1, &[0, 1, 1], &options).is_err());
        assert!(decompose(&t, 1, &[4, 1, 1], &options).is_err());
        assert!(decompose(&t, 1, &[1, 1], &options).is_err());
        assert!(decompose(&t, usize::MAX, &[2, 2, 2], &options).is_err());
        assert!(decompose(&t, 1, &[1, 1, 1], &Options { restarts: 0, ..options.clone() }).is_err());
        let given = Options { init: Init::Given(start(&[3, 4], 1, &[1, 1])), ..options.clone() };
        assert!(decompose(&t, 1, &[1, 1, 1], &given).is_err());
        let mut bad = t;
        bad.data_mut()[0] = f64::NAN;
        assert!(matches!(decompose(&bad, 1, &[1, 1, 1], &options), Err(Error::NotFinite { .. })));
        assert!(BlockTerms::<f64> { blocks: vec![] }.reconstruct().is_err());
    }
}
