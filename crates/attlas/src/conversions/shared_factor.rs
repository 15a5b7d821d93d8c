//! One pair of factors shared by all blocks of a network.
//!
//! **Idea.** Stack all $m$ square blocks of the network and give them one common input basis and one common output basis;
//! each block keeps a small core.
//!
//! **Math.** $X_i \approx B G_i C^\top$ with orthonormal $B, C \in \mathbb{R}^{d \times R}$ and $G_i = B^\top X_i C$: the
//! partial Tucker decomposition of the stack on its last two modes (the paper calls it a tensor train).
//!
//! **Reference.** ren2022 (its variant III). Blocks are those of [`common::stack`](super::common::stack).
//!
//! **Cost.** $2dR + mR^2$ numbers; $2(2dR + R^2)$ operations a token and block, less where $xB$ serves several blocks.
//!
//! **Guarantees.** $R = d$ reproduces every block; at equal $R$ the error is between those of `svd` and `tucker`.
//!
//! **When to use.** Before distillation. After training alone it destroys a model: one basis serves all layers and roles.

use super::common::{Chain, refused};
use crate::layer::Conversion;
use crate::{Error, Mat, Result};
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
};

crate::params! {
    /// Parameters of [`factor`].
    pub struct Params {
        /// Width R of both bases.
        rank: usize = 64, in 1..=1 << 16;
        /// Most sweeps of the alternating improvement.
        iters: usize = 50, in 1..=10_000;
        /// Stop when the norm of the cores changes by less, relatively.
        tol: f64 = 1e-8, in 0.0..=1.0;
    }
}

/// Blocks with shared bases.
#[derive(Clone, Debug)]
pub struct Shared {
    /// Rows of blocks, `d × R`.
    pub b: Arc<Mat<f32>>,
    /// Columns of blocks, `d × R`.
    pub c: Arc<Mat<f32>>,
    /// One core for each block, `R × R`.
    pub cores: Vec<Arc<Mat<f32>>>,
    /// Relative Frobenius error over the whole stack.
    pub rel_error: f64,
}

impl Shared {
    /// Numbers stored, shared ones counted once.
    pub fn parameters(&self) -> usize {
        let cores: usize = self.cores.iter().map(|g| g.data().len()).sum();
        self.b.data().len() + self.c.data().len() + cores
    }

    /// Block `i`, dense.
    pub fn block(&self, i: usize) -> Mat<f32> {
        let bg = attlas_num::linalg::matmul(self.b.as_ref().as_ref(), self.cores[i].as_ref().as_ref());
        attlas_num::linalg::matmul_nt(bg.as_ref(), self.c.as_ref().as_ref())
    }

    /// Block `i` as the map $x \mapsto x X_i$, on the factors.
    pub fn map(&self, i: usize) -> Chain {
        let transposed = |m: &Mat<f32>| Arc::new(m.transpose());
        Chain { factors: vec![transposed(&self.b), transposed(&self.cores[i]), self.c.clone()], bias: None }
    }
}

/// Shared bases for the blocks, all `d × d`.
pub fn factor(blocks: &[Mat<f32>], params: &Params) -> Result<Shared> {
    params.validate()?;
    let d = check(blocks, params.rank)?;
    let stack = Tensor::stack(blocks).map_err(|e| refused(CONVERSION.id, e))?.cast::<f64>();
    let options = tucker::Options {
        method: tucker::Method::Hooi,
        iters: params.iters,
        tol: params.tol,
        modes: Some(vec![1, 2]),
        ..Default::default()
    };
    let ranks = tucker::Ranks::Given(vec![blocks.len(), params.rank, params.rank]);
    let fit = tucker::decompose(&stack, &ranks, &options).map_err(|e| refused(CONVERSION.id, e))?;
    let basis = |m: usize| {
        Arc::new(fit.tucker.factors[m].as_ref().map_or_else(|| Mat::identity(d), Mat::cast::<f32>))
    };
    Ok(Shared { b: basis(1), c: basis(2), cores: slices(&fit.tucker.core), rel_error: fit.rel_error })
}

/// The matrices of a stack.
pub(super) fn slices(t: &Tensor<f64>) -> Vec<Arc<Mat<f32>>> {
    let (rows, cols) = (t.shape()[1], t.shape()[2]);
    let cut = |x: &[f64]| Arc::new(Mat::from_vec(x.iter().map(|&x| x as f32).collect(), rows, cols));
    t.data().chunks_exact((rows * cols).max(1)).map(cut).collect()
}

/// The width of the blocks, all square and of one width, at least as wide as the rank.
pub(super) fn check(blocks: &[Mat<f32>], rank: usize) -> Result<usize> {
    let d = blocks.first().map_or(0, Mat::rows);
    if d == 0 || blocks.iter().any(|b| (b.rows(), b.cols()) != (d, d)) {
        return Err(Error::shape("blocks", "at least one, all square and of one width", blocks.len()));
    }
    if rank > d {
        return Err(Error::param("rank", rank, format!("at most the width of the blocks, {d}")));
    }
    Ok(d)
}

#[cfg(test)]
mod tests {
    use super::super::common::{Scope, relative_error, stack, tests::layer};
    use super::super::svd;
    use super::*;
    use crate::Workspace;
    use crate::layer::Linear;
    use crate::layers::testing::{assert_close, random};

    #[test]
    fn full_rank_reproduces_every_block_and_maps_act_like_them() {
        let blocks = stack(&[layer("a", 6)], Scope::All).unwrap();
        let shared = factor(&blocks, &Params { rank: 6, ..Params::default() }).unwrap();
        assert!(shared.rel_error < 1e-12);
        let x = random("x", 4, 6);
        let ws = Workspace::single().unwrap();
        for (i, block) in blocks.iter().enumerate() {
            assert_close(shared.block(i).data(), block.data());
            let mut out = vec![0.0; 24];
            shared.map(i).apply(x.as_ref(), &mut out, ws.context());
            assert_close(&out, attlas_num::linalg::matmul(x.as_ref(), block.as_ref()).data());
        }
        assert_eq!(shared.parameters(), 2 * 36 + 8 * 36);
    }

    #[test]
    fn each_matrix_alone_does_better_at_equal_rank() {
        let blocks = stack(&[layer("a", 6), layer("b", 6)], Scope::All).unwrap();
        let norm: f64 = blocks.iter().map(|b| b.frobenius().powi(2)).sum();
        for rank in 1..6 {
            let shared = factor(&blocks, &Params { rank, ..Params::default() }).unwrap();
            let alone: f64 = blocks
                .iter()
                .map(|b| (svd::factor(b, &svd::Params { rank }).unwrap().rel_error * b.frobenius()).powi(2))
                .sum();
            assert!((alone / norm).sqrt() <= shared.rel_error + 1e-9);
            let worst: f64 = blocks
                .iter()
                .enumerate()
                .map(|(i, b)| (relative_error(b, &shared.block(i)) * b.frobenius()).powi(2))
                .sum();
            assert!(((worst / norm).sqrt() - shared.rel_error).abs() < 1e-5);
        }
    }

    #[test]
    fn counts_are_those_of_the_page() {
        let count = |m: usize, d: usize, r: usize| 2 * d * r + m * r * r;
        assert_eq!((count(144, 768, 64), count(144, 768, 384)), (688_128, 21_823_488));
        let blocks = stack(&[layer("a", 5)], Scope::Ffn).unwrap();
        let shared = factor(&blocks, &Params { rank: 3, ..Params::default() }).unwrap();
        assert_eq!(shared.parameters(), count(4, 5, 3));
        assert!(factor(&blocks, &Params { rank: 6, ..Params::default() }).is_err());
        assert!(factor(&[], &Params::default()).is_err());
    }
}
