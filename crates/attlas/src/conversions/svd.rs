//! Truncated singular value decomposition of every matrix on its own.
//!
//! **Idea.** Replace a matrix by the product of two thin ones, the best of their rank.
//!
//! **Math.** $W \approx U_R \Sigma_R V_R^\top$, stored as $U_R \Sigma_R$ and $V_R^\top$.
//!
//! **Reference.** eckart1936; ren2022 (its variant II).
//!
//! **Cost.** $R(n_{in} + n_{out})$ numbers, and twice as many operations a token: it pays for $R < n/2$ in square
//! matrices.
//!
//! **Guarantees.** The smallest Frobenius error of any matrix of that rank (Eckart and Young).
//!
//! **When to use.** As the yardstick of every factored form. Trained weights are not low rank: without training, quality
//! falls quickly.

use super::common::network::{Loss, Request, Rewritten, Slot};
use super::common::product::{Factor, Product};
use super::common::refused;
use crate::conversions::Conversion;
use crate::layer::Linear;
use crate::{Mat, Result};
use rayon::prelude::*;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Registry entry.
pub static CONVERSION: Conversion = Conversion {
    id: "svd",
    title: "Every matrix as the product of two thin ones",
    reference: "eckart1936, ren2022",
    params: Params::SPECS,
    from: "grouped_query",
    to: "grouped_query",
    run: Some(run),
};

crate::params! {
    /// Parameters of [`factor`].
    pub struct Params {
        /// Rank of every matrix, lowered to the smaller side where it is more.
        rank: usize = 64, in 1..=1 << 20;
        /// Instead of a rank: the smallest one with at most this relative error, matrix by matrix.
        rel_error: Option<f64> = None, in 0.0..=1.0;
    }
}

/// A matrix in factored form.
#[derive(Clone, Debug)]
pub struct Factored {
    /// The map, factor by factor.
    pub map: Product,
    /// The rank that was kept.
    pub rank: usize,
    /// $\lVert W - \hat W \rVert_F / \lVert W \rVert_F$, from the singular values left out.
    pub rel_error: f64,
}

/// The best approximation of `w` (`n_out × n_in`) of the given rank, or of the rank that the error asks for.
pub fn factor(w: &Mat<f32>, params: &Params) -> Result<Factored> {
    params.validate()?;
    let svd = attlas_num::linalg::svd(w.as_ref()).map_err(|e| refused(CONVERSION.id, e))?;
    let most = svd.sigma.len();
    // Smallest first, so that they are not lost beside the large ones.
    let square = |s: &[f64]| s.iter().rev().map(|s| s * s).sum::<f64>();
    let total = square(&svd.sigma);
    let rank = match params.rel_error {
        None => params.rank.min(most).max(1),
        Some(e) => (1..most).find(|&r| square(&svd.sigma[r..]) <= e * e * total).unwrap_or(most.max(1)),
    };
    let rel_error = if total > 0.0 { (square(&svd.sigma[rank.min(most)..]) / total).sqrt() } else { 0.0 };
    let cut = svd.truncated(rank);
    let left = Mat::from_fn(w.rows(), cut.sigma.len(), |i, r| (cut.u[(i, r)] * cut.sigma[r]) as f32);
    let right = cut.v.transpose().cast::<f32>();
    Ok(Factored {
        map: Product { factors: vec![Factor::matrix(right), Factor::matrix(left)] },
        rank,
        rel_error,
    })
}

/// Every matrix asked for, all of them by default, in factored form.
fn run(request: &Request<'_>) -> Result<Rewritten> {
    let params = Params::from_options(request.options)?;
    let slots = request.slots(&request.layers_or(|n| (0..n).collect())?, |_| true)?;
    let done = AtomicUsize::new(0);
    let factored: Vec<(Slot, Factored)> = slots
        .par_iter()
        .map(|&slot| {
            let factored = factor(&request.network.map(slot)?.weight, &params)?;
            (request.progress)(done.fetch_add(1, Ordering::Relaxed) + 1, slots.len());
            Ok((slot, factored))
        })
        .collect::<Result<_>>()?;
    let mut out = Rewritten::default();
    for (slot, f) in factored {
        out.losses.push(Loss {
            what: slot.to_string(),
            rank: f.rank,
            rel_error: f.rel_error,
            before: f.map.n_out() * f.map.n_in(),
            after: f.map.parameters(),
        });
        out.maps.insert(slot, f.map);
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::super::common::network::{Network, Role};
    use super::super::common::relative_error;
    use super::super::common::tests::{Toy, request};
    use super::*;
    use crate::Options;
    use crate::layers::testing::random;
    use attlas_num::linalg::matmul;

    fn at(rank: usize) -> Params {
        Params { rank, ..Params::default() }
    }

    #[test]
    fn full_rank_is_the_matrix_and_less_is_the_best_of_its_rank() {
        let w = random("w", 9, 7);
        let full = factor(&w, &at(64)).unwrap();
        assert!(relative_error(&w, &full.map.dense()) < 1e-6 && full.rel_error == 0.0);
        assert_eq!((full.map.parameters(), full.rank), (7 * (9 + 7), 7));
        for rank in [1, 3, 6] {
            let f = factor(&w, &at(rank)).unwrap();
            assert!((relative_error(&w, &f.map.dense()) - f.rel_error).abs() < 1e-6);
            // No other factors of that rank do better.
            for seed in ["a", "b"] {
                let other = matmul(random(seed, 9, rank).as_ref(), random("c", rank, 7).as_ref());
                assert!(relative_error(&w, &other) > f.rel_error);
            }
        }
        assert!(factor(&Mat::zeros(3, 4), &at(2)).unwrap().rel_error == 0.0);
    }

    #[test]
    fn a_target_error_takes_the_smallest_rank_that_keeps_it() {
        let w = random("w", 9, 7);
        for target in [0.0, 0.3, 0.7, 1.0] {
            let f = factor(&w, &Params { rel_error: Some(target), ..Params::default() }).unwrap();
            assert!(f.rel_error <= target);
            assert!(f.rank == 1 || factor(&w, &at(f.rank - 1)).unwrap().rel_error > target);
        }
    }

    #[test]
    fn a_network_is_rewritten_where_asked() {
        let (toy, options) =
            (Toy { kv_heads: 2, gated: true, ..Toy::default() }, Options::new().with("rank", 8));
        let all = run(&request(&toy, &options)).unwrap();
        assert_eq!((all.maps.len(), all.losses.len()), (14, 14));
        for (slot, map) in &all.maps {
            assert!(relative_error(&toy.map(*slot).unwrap().weight, &map.dense()) < 1e-6, "{slot}");
        }
        let part = Request { layers: Some(&[1]), roles: Some(&[Role::Key]), ..request(&toy, &options) };
        let slots: Vec<Slot> = run(&part).unwrap().maps.into_keys().collect();
        assert_eq!(slots, [Slot { layer: 1, role: Role::Key }]);
        let wrong = Options::new().with("layer_rank", 8);
        assert!(run(&request(&toy, &wrong)).is_err());
    }
}
