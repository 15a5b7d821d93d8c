//! The whole network as one Tucker decomposition.
//!
//! **Idea.** As `shared_factor`, and the cores of the blocks are themselves mixtures of a few.
//!
//! **Math.** $X_i \approx B \big(\sum_{k=1}^{\ell} A_{ik} G_k\big) C^\top$, $G_k$ the slices of the core (the survey
//! prints $G_i$ inside the sum).
//!
//! **Reference.** ren2022 (its variant IV). Blocks are those of [`common::stack`](super::common::stack).
//!
//! **Cost.** $m\ell + \ell R^2 + 2dR$ numbers; mixed cores are formed when loaded, so that running costs what
//! `shared_factor` costs.
//!
//! **Guarantees.** $\ell = m$ is `shared_factor`; $\ell = m$ and $R = d$ reproduce every block.
//!
//! **When to use.** Before distillation; see `shared_factor`.

use super::common::refused;
use super::shared_factor::{Shared, check, slices};
use crate::layer::Conversion;
use crate::{Error, Mat, Result};
use attlas_num::tensor::{Tensor, tucker};
use std::sync::Arc;

/// Registry entry.
pub static CONVERSION: Conversion = Conversion {
    id: "tucker",
    title: "All blocks of a network as one Tucker decomposition",
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
        /// Cores ℓ that blocks are mixtures of.
        layer_rank: usize = 36, in 1..=1 << 16;
        /// Most sweeps of the alternating improvement.
        iters: usize = 50, in 1..=10_000;
        /// Stop when the norm of the core changes by less, relatively.
        tol: f64 = 1e-8, in 0.0..=1.0;
    }
}

/// Blocks as mixtures of a few cores between shared bases.
#[derive(Clone, Debug)]
pub struct Mixture {
    /// Weights of the cores in each block, `m × ℓ`.
    pub a: Mat<f32>,
    /// Bases, and one core for each of the ℓ.
    pub shared: Shared,
}

impl Mixture {
    /// Numbers stored.
    pub fn parameters(&self) -> usize {
        self.a.data().len() + self.shared.parameters()
    }

    /// The form that runs: one mixed core for each block.
    pub fn mixed(&self) -> Shared {
        let r = self.shared.b.cols();
        let core = |i: usize| {
            let mut g = Mat::zeros(r, r);
            for (k, core) in self.shared.cores.iter().enumerate() {
                g.data_mut().iter_mut().zip(core.data()).for_each(|(g, c)| *g += self.a[(i, k)] * c);
            }
            Arc::new(g)
        };
        Shared { cores: (0..self.a.rows()).map(core).collect(), ..self.shared.clone() }
    }
}

/// The decomposition of the blocks, all `d × d`.
pub fn factor(blocks: &[Mat<f32>], params: &Params) -> Result<Mixture> {
    params.validate()?;
    let d = check(blocks, params.rank)?;
    if params.layer_rank > blocks.len() {
        let expected = format!("at most the number of blocks, {}", blocks.len());
        return Err(Error::param("layer_rank", params.layer_rank, expected));
    }
    let stack = Tensor::stack(blocks).map_err(|e| refused(CONVERSION.id, e))?.cast::<f64>();
    let options = tucker::Options {
        method: tucker::Method::Hooi,
        iters: params.iters,
        tol: params.tol,
        ..Default::default()
    };
    let ranks = tucker::Ranks::Given(vec![params.layer_rank, params.rank, params.rank]);
    let fit = tucker::decompose(&stack, &ranks, &options).map_err(|e| refused(CONVERSION.id, e))?;
    let basis = |m: usize, n: usize| {
        fit.tucker.factors[m].as_ref().map_or_else(|| Mat::identity(n), Mat::cast::<f32>)
    };
    let shared = Shared {
        b: Arc::new(basis(1, d)),
        c: Arc::new(basis(2, d)),
        cores: slices(&fit.tucker.core),
        rel_error: fit.rel_error,
    };
    Ok(Mixture { a: basis(0, blocks.len()), shared })
}

#[cfg(test)]
mod tests {
    use super::super::common::{Scope, stack, tests::layer};
    use super::super::shared_factor;
    use super::*;
    use crate::layers::testing::assert_close;

    #[test]
    fn full_ranks_reproduce_every_block() {
        let blocks = stack(&[layer("a", 5)], Scope::All).unwrap();
        let m = factor(&blocks, &Params { rank: 5, layer_rank: 8, ..Params::default() }).unwrap();
        let mixed = m.mixed();
        blocks.iter().enumerate().for_each(|(i, b)| assert_close(mixed.block(i).data(), b.data()));
        assert_eq!(m.parameters(), 64 + 8 * 25 + 50);
    }

    #[test]
    fn all_cores_give_shared_factors_and_fewer_do_worse() {
        let blocks = stack(&[layer("a", 5), layer("b", 5)], Scope::All).unwrap();
        let shared =
            shared_factor::factor(&blocks, &shared_factor::Params { rank: 3, ..Default::default() }).unwrap();
        let at = |layer_rank| {
            factor(&blocks, &Params { rank: 3, layer_rank, ..Params::default() }).unwrap().shared.rel_error
        };
        assert!((at(16) - shared.rel_error).abs() < 1e-6, "{} {}", at(16), shared.rel_error);
        assert!(at(9) >= shared.rel_error && at(4) >= at(9));
        assert!(factor(&blocks, &Params { rank: 3, layer_rank: 17, ..Params::default() }).is_err());
    }

    #[test]
    fn counts_are_those_of_the_page() {
        let count = |m: usize, d: usize, l: usize, r: usize| m * l + l * r * r + 2 * d * r;
        assert_eq!(count(144, 768, 36, 128), 791_616);
        assert_eq!(count(144, 768, 36, 256), 2_757_696);
        assert_eq!(count(144, 768, 72, 384), 11_217_024);
        let blocks = stack(&[layer("a", 5)], Scope::All).unwrap();
        let m = factor(&blocks, &Params { rank: 2, layer_rank: 3, ..Params::default() }).unwrap();
        assert_eq!(m.parameters(), count(8, 5, 3, 2));
    }
}
