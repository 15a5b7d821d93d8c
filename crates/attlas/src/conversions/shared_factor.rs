//! One pair of factors shared by all blocks of a network.
//!
//! **Idea.** Stack all $m$ blocks of the network and give them one common input basis and one common output basis;
//! each block keeps a small core.
//!
//! **Math.** $X_i \approx B G_i C^\top$ with orthonormal $B, C \in \mathbb{R}^{d \times R}$ and $G_i = B^\top X_i C$: the
//! partial Tucker decomposition of the stack on its last two modes (the paper calls it a tensor train). With moments
//! $H_i = X^\top X / n$ of the inputs of each block, bases are those of the stack of $L^\top X_i$, $LL^\top$ the mean
//! of all $H_i$, each scaled to the same trace, and each core is optimal for its block's inputs:
//! $G_i = (B^\top H_i B)^{-1} B^\top H_i X_i C$.
//!
//! **Reference.** ren2022 (its variant III); whitening after wang2025svdllm. Blocks are those of
//! [`common::stack`](super::common::stack): matrices of different shapes form several stacks, each with its own bases.
//!
//! **Cost.** $2dR + mR^2$ numbers per stack; $2(2dR + R^2)$ operations per token and block, fewer if several blocks
//! share $xB$.
//!
//! **Guarantees.** $R = d$ reproduces every block; at equal $R$ the error is between those of `svd` and `tucker`.
//!
//! **When to use.** Before distillation. After training alone it destroys a model: one basis serves all layers and roles.

use super::common::moments::Seen;
use super::common::network::{Loss, Request, Rewritten};
use super::common::product::{Values, parameters};
use super::common::refused;
use super::common::stack::{Stack, stacks};
use super::{Conversion, Run};
use crate::{Error, Mat, Result};
use attlas_num::linalg::psd_factor;
use attlas_num::par::*;
use attlas_num::tensor::{Tensor, tucker};
use std::sync::Arc;

/// Registry entry.
pub static CONVERSION: Conversion = Conversion {
    id: "shared_factor",
    title: "All blocks of a network with one input and one output basis",
    reference: "ren2022",
    params: Params::SPECS,
    from: "grouped_query",
    to: "grouped_query",
    reads_text: true,
    run: Run::Matrices(run),
};

crate::params! {
    /// Parameters of [`factor`].
    pub struct Params {
        /// Width R of both bases, at most the sides of the blocks.
        rank: usize = 64, in 1..=1 << 16;
        /// Instead of a rank: the smallest widths that guarantee at most this relative error of the stack.
        rel_error: Option<f64> = None, in 0.0..=1.0;
        /// Maximum number of HOOI sweeps.
        iters: usize = 50, in 1..=10_000;
        /// Stop when the relative change of the norm of the cores is less than this.
        tol: f64 = 1e-8, in 0.0..=1.0;
    }
}

/// Blocks with shared bases.
#[derive(Clone, Debug)]
pub struct Shared {
    /// Basis of the rows of blocks, `rows × R`.
    pub b: Arc<Mat<f32>>,
    /// Basis of the columns of blocks, `columns × R`.
    pub c: Arc<Mat<f32>>,
    /// One core for each block.
    pub cores: Vec<Mat<f32>>,
    /// Relative Frobenius error over the whole stack.
    pub rel_error: f64,
    /// Relative root mean square error of the outputs, if moments of the inputs are known.
    pub seen_error: Option<f64>,
}

impl Shared {
    /// Counts the stored numbers, shared ones once.
    pub fn parameters(&self) -> usize {
        let cores: usize = self.cores.iter().map(|g| g.data().len()).sum();
        self.b.data().len() + self.c.data().len() + cores
    }

    /// Computes both errors, block by block.
    fn measure(&mut self, blocks: &[Mat<f32>], seen: &Seen) {
        self.rel_error = stack_error(blocks, |i| self.block(i));
        self.seen_error = Some(seen.relative_error(blocks, |i| self.block(i)));
    }

    /// Returns block `i`, dense.
    pub fn block(&self, i: usize) -> Mat<f32> {
        let bg = attlas_num::linalg::matmul(self.b.as_ref().as_ref(), self.cores[i].as_ref());
        attlas_num::linalg::matmul_nt(bg.as_ref(), self.c.as_ref().as_ref())
    }
}

/// Factors blocks of one shape with shared bases, for inputs with the given moments if they are known.
pub fn factor(blocks: &[Mat<f32>], params: &Params, seen: Option<&Seen>) -> Result<Shared> {
    params.validate()?;
    let (rows, cols) = check(blocks)?;
    let options = tucker::Options {
        method: tucker::Method::Hooi,
        // ST-HOSVD is a good start for stacks of weights, and a sweep over them is expensive.
        restarts: 0,
        iters: params.iters,
        tol: params.tol,
        modes: Some(vec![1, 2]),
        ..Default::default()
    };
    let ranks = match params.rel_error {
        Some(e) => tucker::Ranks::RelError(e),
        None => tucker::Ranks::Given(vec![blocks.len(), params.rank.min(rows), params.rank.min(cols)]),
    };
    let fail = |e: attlas_num::tensor::Error| refused(CONVERSION.id, e);
    let Some(seen) = seen else {
        let stack = Tensor::stack(blocks).map_err(fail)?;
        let fit = tucker::decompose(&stack, &ranks, &options).map_err(fail)?;
        let basis =
            |m: usize, n: usize| Arc::new(fit.tucker.factors[m].clone().unwrap_or_else(|| Mat::identity(n)));
        return Ok(Shared {
            b: basis(1, rows),
            c: basis(2, cols),
            cores: slices(&fit.tucker.core),
            rel_error: fit.rel_error,
            seen_error: None,
        });
    };
    let (stack, root) = weighted_stack(blocks, seen, CONVERSION.id)?;
    let fit = tucker::decompose(&stack, &ranks, &options).map_err(fail)?.tucker.cast::<f64>();
    let basis = |m: usize, n: usize| fit.factors[m].clone().unwrap_or_else(|| Mat::identity(n));
    let (b, c) = (basis(1, rows), basis(2, cols));
    let (b, c) =
        if seen.turned { (b, seen.unweighted(&c, &root)?.0) } else { (seen.unweighted(&b, &root)?.0, c) };
    let core = |(i, block): (usize, &Mat<f32>)| {
        let (inputs, outputs) = if seen.turned { (&c, &b) } else { (&b, &c) };
        let (normal, right) = seen.normal(i, block, inputs, outputs);
        let solved = psd_factor(normal.as_ref()).and_then(|f| f.solve(right.as_ref()));
        let core = solved.map_err(|e| refused(CONVERSION.id, e))?;
        Ok(if seen.turned { core.transpose() } else { core }.cast::<f32>())
    };
    let cores = blocks.par_iter().enumerate().map(core).collect::<Result<Vec<_>>>()?;
    let mut shared =
        Shared { b: Arc::new(b.cast()), c: Arc::new(c.cast()), cores, rel_error: 0.0, seen_error: None };
    shared.measure(blocks, seen);
    Ok(shared)
}

/// Stacks the blocks with inputs weighted by the mean of all moments; also returns the factor of this mean.
pub(super) fn weighted_stack(blocks: &[Mat<f32>], seen: &Seen, id: &str) -> Result<(Tensor<f32>, Mat<f64>)> {
    if seen.each.len() != blocks.len() {
        return Err(Error::shape(
            "calibration moments",
            format!("{} of them", blocks.len()),
            seen.each.len(),
        ));
    }
    let (root, inputs) = (seen.root()?, if seen.turned { blocks[0].cols() } else { blocks[0].rows() });
    if root.rows() != inputs {
        return Err(Error::shape("calibration moments", format!("{inputs} inputs"), root.rows()));
    }
    let weighted: Vec<Mat<f32>> = blocks.par_iter().map(|b| seen.weighted(b, &root).cast()).collect();
    Ok((Tensor::stack(&weighted).map_err(|e| refused(id, e))?, root))
}

/// Computes the relative Frobenius error of all blocks together.
pub(super) fn stack_error(blocks: &[Mat<f32>], approximate: impl Fn(usize) -> Mat<f32>) -> f64 {
    let (mut gap, mut all) = (0.0, 0.0);
    for (i, block) in blocks.iter().enumerate() {
        let norm = block.frobenius().powi(2);
        gap += super::common::relative_error(block, &approximate(i)).powi(2) * norm;
        all += norm;
    }
    if all > 0.0 { (gap / all).sqrt() } else { 0.0 }
}

/// Factors the requested matrices, by default all, stack by stack.
fn run(request: &Request<'_>) -> Result<Rewritten> {
    let params = Params::from_options(request.options)?;
    each_stack(request, |stack, blocks, seen, out| {
        let shared = factor(&blocks, &params, seen)?;
        for (member, range) in stack.numbered() {
            let cores: Vec<f32> = range.flat_map(|i| shared.cores[i].data()).copied().collect();
            let width = shared.c.cols();
            let core = Mat::from_vec(cores, member.slices * shared.b.cols(), width);
            let product = member.product(&shared.b, Values::Matrix(Arc::new(core)), &shared.c);
            out.maps.insert(member.slot, product);
        }
        Ok((shared.b.cols().max(shared.c.cols()), shared.rel_error, shared.seen_error))
    })
}

/// Decomposes the stacks of a request one at a time; `work` adds maps and returns the rank, the error, and the error of
/// the outputs.
pub(super) fn each_stack(
    request: &Request<'_>,
    mut work: impl FnMut(
        &Stack,
        Vec<Mat<f32>>,
        Option<&Seen>,
        &mut Rewritten,
    ) -> Result<(usize, f64, Option<f64>)>,
) -> Result<Rewritten> {
    let slots = request.slots(&request.layers_or(|n| (0..n).collect())?, |_| true)?;
    let stacks = stacks(request.network, &slots, true)?;
    let mut out = Rewritten::default();
    for (i, stack) in stacks.iter().enumerate() {
        let seen = stack.seen(request.network);
        let (rank, rel_error, seen_error) =
            work(stack, stack.blocks(request.network)?, seen.as_ref(), &mut out)?;
        let products = stack.members.iter().filter_map(|m| out.maps.get(&m.slot));
        let after = parameters(products);
        out.losses.push(Loss {
            what: format!("{} blocks of {}", stack.len(), stack.name),
            rank,
            rel_error,
            seen_error,
            before: stack.numbers(),
            after,
        });
        (request.progress)(i + 1, stacks.len());
    }
    Ok(out)
}

/// Returns the matrices of a stack.
pub(super) fn slices(t: &Tensor<f32>) -> Vec<Mat<f32>> {
    let (rows, cols) = (t.shape()[1], t.shape()[2]);
    t.data().chunks_exact((rows * cols).max(1)).map(|x| Mat::from_vec(x.to_vec(), rows, cols)).collect()
}

/// Returns the rows and columns of the blocks; an error unless all have one shape.
pub(super) fn check(blocks: &[Mat<f32>]) -> Result<(usize, usize)> {
    let (rows, cols) = blocks.first().map_or((0, 0), |b| (b.rows(), b.cols()));
    if rows == 0 || cols == 0 || blocks.iter().any(|b| (b.rows(), b.cols()) != (rows, cols)) {
        return Err(Error::shape("blocks", "at least one, all of one shape", blocks.len()));
    }
    Ok((rows, cols))
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::common::network::{Network, Slot};
    use super::super::common::product::Product;
    use super::super::common::relative_error;
    use super::super::common::tests::{Toy, request};
    use super::super::svd;
    use super::*;
    use crate::Options;
    use crate::layers::testing::assert_close;

    fn at(rank: usize) -> Params {
        Params { rank, ..Params::default() }
    }

    /// The blocks of a network of square matrices.
    pub(in super::super) fn blocks(layers: usize) -> Vec<Mat<f32>> {
        let (toy, options) = (Toy { layers, ..Toy::default() }, Options::new());
        let slots = request(&toy, &options).slots(&(0..layers).collect::<Vec<_>>(), |_| true).unwrap();
        stacks(&toy, &slots, true).unwrap()[0].blocks(&toy).unwrap()
    }

    #[test]
    fn full_rank_reproduces_every_block() {
        let blocks = blocks(1);
        let shared = factor(&blocks, &at(8), None).unwrap();
        assert!(shared.rel_error < 1e-12);
        for (i, block) in blocks.iter().enumerate() {
            assert_close(shared.block(i).data(), block.data());
        }
        assert_eq!(shared.parameters(), 2 * 64 + 8 * 64);
    }

    #[test]
    fn each_matrix_alone_does_better_at_equal_rank() {
        let blocks = blocks(2);
        let norm: f64 = blocks.iter().map(|b| b.frobenius().powi(2)).sum();
        for rank in 1..8 {
            let shared = factor(&blocks, &at(rank), None).unwrap();
            let alone: f64 = blocks
                .iter()
                .map(|b| {
                    let params = svd::Params { rank, ..Default::default() };
                    (svd::factor(b, &params, None).unwrap().rel_error * b.frobenius()).powi(2)
                })
                .sum();
            assert!((alone / norm).sqrt() <= shared.rel_error + 1e-9);
            let worst: f64 = blocks
                .iter()
                .enumerate()
                .map(|(i, b)| (relative_error(b, &shared.block(i)) * b.frobenius()).powi(2))
                .sum();
            assert!(((worst / norm).sqrt() - shared.rel_error).abs() < 1e-5);
        }
        let target = factor(&blocks, &Params { rel_error: Some(0.5), ..Params::default() }, None).unwrap();
        assert!(target.rel_error <= 0.5 && target.b.cols() < 8);
    }

    #[test]
    fn counts_are_those_of_the_page() {
        let count = |m: usize, d: usize, r: usize| 2 * d * r + m * r * r;
        assert_eq!((count(144, 768, 64), count(144, 768, 384)), (688_128, 21_823_488));
        let blocks = blocks(1);
        let shared = factor(&blocks, &at(3), None).unwrap();
        assert_eq!(shared.parameters(), count(8, 8, 3));
        assert_eq!(factor(&blocks, &at(9), None).unwrap().b.cols(), 8, "lowered to the width of the blocks");
        assert!(factor(&[], &Params::default(), None).is_err());
    }

    #[test]
    fn a_network_of_any_shape_is_reproduced_at_full_rank_and_counted() {
        for toy in [Toy::default(), Toy { kv_heads: 2, ffn: 12, gated: true, ..Toy::default() }] {
            let full = Options::new().with("rank", 12);
            for (slot, map) in &run(&request(&toy, &full)).unwrap().maps {
                assert!(relative_error(&toy.map(*slot).unwrap().weight, &map.dense()) < 1e-5, "{slot}");
            }
            let small = Options::new().with("rank", 3);
            let small = run(&request(&toy, &small)).unwrap();
            let stored: usize = small.losses.iter().map(|l| l.after).sum();
            assert_eq!(stored, parameters(small.maps.values()), "bases belong to one stack each");
            let square = small.losses.iter().find(|l| l.what.contains('q')).unwrap();
            let m = if toy.gated { 4 } else { 16 };
            assert_eq!(square.after, 2 * 8 * 3 + m * 9);
        }
    }

    #[test]
    fn moments_of_the_inputs_lower_the_error_of_the_outputs() {
        for gated in [false, true] {
            let toy = Toy { kv_heads: 2, ffn: 12, gated, ..Toy::default() };
            let seen = Toy { seen: true, ..Toy { kv_heads: 2, ffn: 12, gated, ..Toy::default() } };
            let full = Options::new().with("rank", 12);
            for (slot, map) in &run(&request(&seen, &full)).unwrap().maps {
                assert!(relative_error(&toy.map(*slot).unwrap().weight, &map.dense()) < 1e-4, "{slot}");
            }
            let small = Options::new().with("rank", 3);
            let (plain, better) =
                (run(&request(&toy, &small)).unwrap(), run(&request(&seen, &small)).unwrap());
            let error = |r: &Rewritten| {
                let of = |(slot, map): (&Slot, &Product)| {
                    let m = seen.moments(*slot).unwrap();
                    m.relative_error(&toy.map(*slot).unwrap().weight, &map.dense()).powi(2)
                };
                r.maps.iter().map(of).sum::<f64>()
            };
            assert!(error(&better) < 0.8 * error(&plain), "{} {}", error(&better), error(&plain));
            // The recorded figures equal those of the maps.
            let reported: f64 = better
                .losses
                .iter()
                .map(|l| {
                    let count = l.what.split(' ').next().unwrap().parse::<f64>().unwrap();
                    l.seen_error.unwrap().powi(2) * count
                })
                .sum();
            assert!((reported / error(&better) - 1.0).abs() < 1e-4, "{reported}");
            assert!(plain.losses.iter().all(|l| l.seen_error.is_none()));
        }
    }
}
