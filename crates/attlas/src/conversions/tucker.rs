//! The whole network as one Tucker decomposition.
//!
//! **Idea.** As `shared_factor`, but the cores of the blocks are mixtures of a few shared ones.
//!
//! **Math.** $X_i \approx B \big(\sum_{k=1}^{\ell} A_{ik} G_k\big) C^\top$, $G_k$ the slices of the core (the survey
//! prints $G_i$ inside the sum). With moments of the inputs, bases and cores are those of the weighted stack (see
//! `shared_factor`), and the weights $A_{i\cdot}$ of each block are optimal for its own inputs. With `order` 4 or 5 the
//! matrices of attention have modes for layers, heads and roles instead (see [`common::heads`](super::common::heads)).
//!
//! **Reference.** ren2022 (its variant IV); whitening after wang2025svdllm. Blocks are those of [`common::stack`](super::common::stack).
//!
//! **Cost.** $m\ell + \ell R^2 + 2dR$ numbers; mixed cores are formed on loading, so a run costs the same as with
//! `shared_factor`.
//!
//! **Guarantees.** $\ell = m$ is `shared_factor`; $\ell = m$ and $R = d$ reproduce every block.
//!
//! **When to use.** Before distillation; see `shared_factor`.

use super::common::heads::{HeadStack, head_stacks, rewrite};
use super::common::moments::Seen;
use super::common::network::{Request, Rewritten};
use super::common::product::{Values, mix};
use super::common::refused;
use super::shared_factor::{Shared, check, each_stack, slices, stack_error, weighted_stack};
use super::{Conversion, Run};
use crate::{Error, Mat, Result};
use attlas_num::linalg::{matmul, matmul_nt, psd_factor};
use attlas_num::par::*;
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
    reads_text: true,
    run: Run::Matrices(run),
};

crate::params! {
    /// Parameters of [`factor`].
    pub struct Params {
        /// Width R of both bases, at most the sides of the blocks.
        rank: usize = 64, in 1..=1 << 16;
        /// Number of cores ℓ that blocks mix; in orders 4 and 5 the rank of the layers, at most their number.
        layer_rank: usize = 36, in 1..=1 << 16;
        /// Modes of a stack: 3 (blocks, rows, columns), 4 (layers, heads, width of a head, model width, for each role of
        /// attention), or 5 (also roles, if their numbers of heads are equal).
        order: usize = 3, in 3..=5;
        /// Rank of the heads in orders 4 and 5; auto is their number.
        head_rank: Option<usize> = None, in 1..=1 << 16;
        /// Rank of the width of a head in orders 4 and 5; auto is the full width.
        width_rank: Option<usize> = None, in 1..=1 << 16;
        /// Instead of ranks: the smallest ones that guarantee at most this relative error of the stack.
        rel_error: Option<f64> = None, in 0.0..=1.0;
        /// Maximum number of HOOI sweeps.
        iters: usize = 50, in 1..=10_000;
        /// Stop when the relative change of the norm of the core is less than this.
        tol: f64 = 1e-8, in 0.0..=1.0;
    }
}

impl Params {
    fn hooi(&self) -> tucker::Options {
        tucker::Options {
            method: tucker::Method::Hooi,
            // ST-HOSVD is a good start for stacks of weights, and a sweep over them is expensive.
            restarts: 0,
            iters: self.iters,
            tol: self.tol,
            ..Default::default()
        }
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
    /// Counts the stored numbers.
    pub fn parameters(&self) -> usize {
        self.a.data().len() + self.shared.parameters()
    }

    /// Returns the form used in runs: one mixed core per block.
    pub fn mixed(&self) -> Shared {
        let cores = (0..self.a.rows()).map(|i| mix(&self.shared.cores, &self.a, &[i])).collect();
        Shared { cores, ..self.shared.clone() }
    }
}

/// Decomposes blocks of one shape, for inputs with the given moments if they are known.
pub fn factor(blocks: &[Mat<f32>], params: &Params, seen: Option<&Seen>) -> Result<Mixture> {
    params.validate()?;
    let (rows, cols) = check(blocks)?;
    if params.layer_rank > blocks.len() && params.rel_error.is_none() {
        let expected = format!("at most the number of blocks, {}", blocks.len());
        return Err(Error::param("layer_rank", params.layer_rank, expected));
    }
    let options = params.hooi();
    let ranks = match params.rel_error {
        Some(e) => tucker::Ranks::RelError(e),
        None => tucker::Ranks::Given(vec![params.layer_rank, params.rank.min(rows), params.rank.min(cols)]),
    };
    let fail = |e: attlas_num::tensor::Error| refused(CONVERSION.id, e);
    let Some(seen) = seen else {
        let stack = Tensor::stack(blocks).map_err(fail)?;
        let fit = tucker::decompose(&stack, &ranks, &options).map_err(fail)?;
        let basis = |m: usize, n: usize| fit.tucker.factors[m].clone().unwrap_or_else(|| Mat::identity(n));
        let shared = Shared {
            b: Arc::new(basis(1, rows)),
            c: Arc::new(basis(2, cols)),
            cores: slices(&fit.tucker.core),
            rel_error: fit.rel_error,
            seen_error: None,
        };
        return Ok(Mixture { a: basis(0, blocks.len()), shared });
    };
    let (stack, root) = weighted_stack(blocks, seen, CONVERSION.id)?;
    let fit = tucker::decompose(&stack, &ranks, &options).map_err(fail)?.tucker;
    let basis = |m: usize, n: usize| fit.factors[m].clone().unwrap_or_else(|| Mat::identity(n)).cast::<f64>();
    let (b, c) = (basis(1, rows), basis(2, cols));
    let cores: Vec<Mat<f64>> = slices(&fit.core).iter().map(Mat::cast).collect();
    // The triangular factor of the input basis goes into the cores.
    let (b, c, cores) = if seen.turned {
        let (q, r) = seen.unweighted(&c, &root)?;
        (b, q, cores.iter().map(|g| matmul_nt(g.as_ref(), r.as_ref())).collect::<Vec<_>>())
    } else {
        let (q, r) = seen.unweighted(&b, &root)?;
        (q, c, cores.iter().map(|g| matmul(r.as_ref(), g.as_ref())).collect())
    };
    let row = |(i, block): (usize, &Mat<f32>)| weights(seen, i, block, &b, &c, &cores);
    let a: Vec<Vec<f32>> = blocks.par_iter().enumerate().map(row).collect::<Result<_>>()?;
    let a = Mat::from_vec(a.concat(), blocks.len(), cores.len());
    let cores = cores.iter().map(Mat::cast).collect();
    let shared =
        Shared { b: Arc::new(b.cast()), c: Arc::new(c.cast()), cores, rel_error: 0.0, seen_error: None };
    let mut mixture = Mixture { a, shared };
    let mixed = mixture.mixed();
    mixture.shared.rel_error = stack_error(blocks, |i| mixed.block(i));
    mixture.shared.seen_error = Some(seen.relative_error(blocks, |i| mixed.block(i)));
    Ok(mixture)
}

/// Computes the optimal weights of the cores in block `i` for its own inputs.
fn weights(
    seen: &Seen,
    i: usize,
    block: &Mat<f32>,
    b: &Mat<f64>,
    c: &Mat<f64>,
    cores: &[Mat<f64>],
) -> Result<Vec<f32>> {
    let (inputs, outputs) = if seen.turned { (c, b) } else { (b, c) };
    let (normal, right) = seen.normal(i, block, inputs, outputs);
    let right = if seen.turned { right.transpose() } else { right };
    let through = |g: &Mat<f64>| {
        if seen.turned { matmul(g.as_ref(), normal.as_ref()) } else { matmul(normal.as_ref(), g.as_ref()) }
    };
    let dot = |a: &Mat<f64>, b: &Mat<f64>| a.data().iter().zip(b.data()).map(|(x, y)| x * y).sum::<f64>();
    let weighted: Vec<Mat<f64>> = cores.iter().map(through).collect();
    let n = cores.len();
    let system = Mat::from_fn(n, n, |k, l| dot(&cores[k], &weighted[l]));
    let goal = Mat::from_fn(n, 1, |k, _| dot(&cores[k], &right));
    let solved = psd_factor(system.as_ref()).and_then(|f| f.solve(goal.as_ref()));
    let solved = solved.map_err(|e| refused(CONVERSION.id, e))?;
    Ok(solved.data().iter().map(|x| *x as f32).collect())
}

/// Factors the selected matrices, by default all, stack by stack.
fn run(request: &Request<'_>) -> Result<Rewritten> {
    let params = Params::from_options(request.options)?;
    if params.order > 3 {
        let layers = request.layers_or(|n| (0..n).collect())?;
        let stacks = head_stacks(request, &layers, params.order, CONVERSION.id)?;
        let all = |rank: Option<usize>| rank.unwrap_or(usize::MAX);
        let ranks = [params.layer_rank, all(params.head_rank), all(params.width_rank), params.rank];
        let ranks = params.rel_error.is_none().then_some(ranks);
        let error = params.rel_error.unwrap_or(0.0);
        let fit = |heads: &HeadStack, blocks: &[Mat<f32>]| {
            heads.tucker(blocks, ranks, error, &params.hooi(), CONVERSION.id)
        };
        return rewrite(request, &stacks, fit, |product| product);
    }
    each_stack(request, |stack, blocks, seen, out| {
        let Mixture { a, shared } = factor(&blocks, &params, seen)?;
        let (weights, cores) = (Arc::new(a), Arc::new(shared.cores));
        for (member, range) in stack.numbered() {
            let core =
                Values::Mixture { cores: cores.clone(), weights: weights.clone(), rows: range.collect() };
            out.maps.insert(member.slot, member.product(&shared.b, core, &shared.c));
        }
        Ok((shared.b.cols().max(shared.c.cols()), shared.rel_error, shared.seen_error))
    })
}

#[cfg(test)]
mod tests {
    use super::super::common::network::{Network, Role, Slot};
    use super::super::common::product::{Product, parameters};
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
        let m = factor(&blocks, &Params { rank: 8, layer_rank: 8, ..Params::default() }, None).unwrap();
        let mixed = m.mixed();
        blocks.iter().enumerate().for_each(|(i, b)| assert_close(mixed.block(i).data(), b.data()));
        assert_eq!(m.parameters(), 64 + 8 * 64 + 128);
    }

    #[test]
    fn all_cores_give_shared_factors_and_fewer_do_worse() {
        let blocks = blocks(2);
        let shared =
            shared_factor::factor(&blocks, &shared_factor::Params { rank: 3, ..Default::default() }, None)
                .unwrap();
        let at = |layer_rank| {
            factor(&blocks, &Params { rank: 3, layer_rank, ..Params::default() }, None)
                .unwrap()
                .shared
                .rel_error
        };
        assert!((at(16) - shared.rel_error).abs() < 1e-6, "{} {}", at(16), shared.rel_error);
        assert!(at(9) >= shared.rel_error && at(4) >= at(9));
        assert!(factor(&blocks, &Params { rank: 3, layer_rank: 17, ..Params::default() }, None).is_err());
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

    #[test]
    fn moments_of_the_inputs_lower_the_error_of_the_outputs() {
        let (toy, seen) = (Toy::default(), Toy { seen: true, ..Toy::default() });
        let full = Options::new().with("rank", 16).with("layer_rank", 8);
        let attention = [Role::Query, Role::Key, Role::Value, Role::Output];
        let part = |toy, options| Request { roles: Some(&attention), ..request(toy, options) };
        for (slot, map) in &run(&part(&seen, &full)).unwrap().maps {
            assert!(relative_error(&toy.map(*slot).unwrap().weight, &map.dense()) < 1e-4, "{slot}");
        }
        let small = Options::new().with("rank", 4).with("layer_rank", 6);
        let (plain, better) = (run(&part(&toy, &small)).unwrap(), run(&part(&seen, &small)).unwrap());
        let error = |r: &Rewritten| {
            let of = |(slot, map): (&Slot, &Product)| {
                let m = seen.moments(*slot).unwrap();
                m.relative_error(&toy.map(*slot).unwrap().weight, &map.dense()).powi(2)
            };
            (r.maps.iter().map(of).sum::<f64>() / r.maps.len() as f64).sqrt()
        };
        assert!(error(&better) < 0.9 * error(&plain), "{} {}", error(&better), error(&plain));
        assert!((better.losses[0].seen_error.unwrap() / error(&better) - 1.0).abs() < 1e-4);
    }
}
