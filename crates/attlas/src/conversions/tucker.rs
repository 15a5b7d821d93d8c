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

use super::Conversion;
use super::common::network::{Request, Rewritten};
use super::common::product::{Values, mix};
use super::common::refused;
use super::shared_factor::{Shared, check, each_stack, slices};
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
    run: Some(run),
};

crate::params! {
    /// Parameters of [`factor`].
    pub struct Params {
        /// Width R of both bases, lowered to the sides of blocks where it is more.
        rank: usize = 64, in 1..=1 << 16;
        /// Cores ℓ that blocks are mixtures of.
        layer_rank: usize = 36, in 1..=1 << 16;
        /// Instead of ranks: the smallest ones that promise at most this relative error of the stack.
        rel_error: Option<f64> = None, in 0.0..=1.0;
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
        let cores = (0..self.a.rows()).map(|i| mix(&self.shared.cores, &self.a, &[i])).collect();
        Shared { cores, ..self.shared.clone() }
    }
}

/// The decomposition of the blocks, all of one shape.
pub fn factor(blocks: &[Mat<f32>], params: &Params) -> Result<Mixture> {
    params.validate()?;
    let (rows, cols) = check(blocks)?;
    if params.layer_rank > blocks.len() && params.rel_error.is_none() {
        let expected = format!("at most the number of blocks, {}", blocks.len());
        return Err(Error::param("layer_rank", params.layer_rank, expected));
    }
    let stack = Tensor::stack(blocks).map_err(|e| refused(CONVERSION.id, e))?;
    let options = tucker::Options {
        method: tucker::Method::Hooi,
        // ST-HOSVD is a good start for stacks of weights, and a sweep over them is expensive.
        restarts: 0,
        iters: params.iters,
        tol: params.tol,
        ..Default::default()
    };
    let ranks = match params.rel_error {
        Some(e) => tucker::Ranks::RelError(e),
        None => tucker::Ranks::Given(vec![params.layer_rank, params.rank.min(rows), params.rank.min(cols)]),
    };
    let fit = tucker::decompose(&stack, &ranks, &options).map_err(|e| refused(CONVERSION.id, e))?;
    let basis = |m: usize, n: usize| fit.tucker.factors[m].clone().unwrap_or_else(|| Mat::identity(n));
    let shared = Shared {
        b: Arc::new(basis(1, rows)),
        c: Arc::new(basis(2, cols)),
        cores: slices(&fit.tucker.core),
        rel_error: fit.rel_error,
    };
    Ok(Mixture { a: basis(0, blocks.len()), shared })
}

/// The selected matrices, all of them by default, stack by stack.
fn run(request: &Request<'_>) -> Result<Rewritten> {
    let params = Params::from_options(request.options)?;
    each_stack(request, |stack, blocks, out| {
        let Mixture { a, shared } = factor(&blocks, &params)?;
        let (weights, cores) = (Arc::new(a), Arc::new(shared.cores));
        for (member, range) in stack.numbered() {
            let core =
                Values::Mixture { cores: cores.clone(), weights: weights.clone(), rows: range.collect() };
            out.maps.insert(member.slot, member.product(&shared.b, core, &shared.c));
        }
        Ok((shared.b.cols().max(shared.c.cols()), shared.rel_error))
    })
}

#[cfg(test)]
mod tests {
    use super::super::common::network::Network;
    use super::super::common::product::parameters;
    use super::super::common::relative_error;
    use super::super::common::tests::{Toy, request};
    use super::super::shared_factor;
    use super::super::shared_factor::tests::blocks;
    use super::*;
    use crate::Options;
    use crate::layers::testing::assert_close;

    #[test]
    fn full_ranks_reproduce_every_block() {
        let blocks = blocks(1);
        let m = factor(&blocks, &Params { rank: 8, layer_rank: 8, ..Params::default() }).unwrap();
        let mixed = m.mixed();
        blocks.iter().enumerate().for_each(|(i, b)| assert_close(mixed.block(i).data(), b.data()));
        assert_eq!(m.parameters(), 64 + 8 * 64 + 128);
    }

    #[test]
    fn all_cores_give_shared_factors_and_fewer_do_worse() {
        let blocks = blocks(2);
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
        let toy = Toy { layers: 1, ..Toy::default() };
        let options = Options::new().with("rank", 2).with("layer_rank", 3);
        let small = run(&request(&toy, &options)).unwrap();
        assert_eq!(parameters(small.maps.values()), count(8, 8, 3, 2));
        assert_eq!(small.losses[0].after, count(8, 8, 3, 2));
    }

    #[test]
    fn a_network_is_reproduced_at_full_ranks_with_its_slices_in_place() {
        let toy = Toy::default();
        let options = Options::new().with("rank", 8).with("layer_rank", 16);
        for (slot, map) in &run(&request(&toy, &options)).unwrap().maps {
            assert!(relative_error(&toy.map(*slot).unwrap().weight, &map.dense()) < 1e-5, "{slot}");
        }
    }
}
