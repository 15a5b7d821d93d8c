//! Truncated singular value decomposition of every matrix separately.
//!
//! **Idea.** Replace a matrix by the product of two thin ones, optimal for their rank: for all inputs equally, or for
//! those of a calibration text.
//!
//! **Math.** $W \approx U_R \Sigma_R V_R^\top$, stored as $U_R \Sigma_R$ and $V_R^\top$. With second moments
//! $LL^\top = X^\top X / n$ of the inputs the decomposition is that of $WL = U \Sigma V^\top$, and
//! $\hat W = U_R \Sigma_R V_R^\top L^{-1} = U_R (U_R^\top W)$: $L$ need not be inverted. A budget for all matrices together
//! (`keep`, `max_loss`) is distributed by one multiplier ([`common::fill`](super::common::fill)); a matrix whose
//! factors would need more storage stays unfactored.
//!
//! **Reference.** eckart1936; ren2022 (its variant II); wang2025svdllm (whitening by a Cholesky factor); ranks by one
//! multiplier are this project's.
//!
//! **Cost.** $R(n_{in} + n_{out})$ numbers, and twice that number of operations per token: a saving for $R < n/2$ in
//! square matrices.
//!
//! **Guarantees.** The smallest Frobenius error of any matrix of that rank (Eckart and Young); with moments, the smallest
//! mean squared error of the outputs on the calibration text. Tested here.
//!
//! **When to use.** As the yardstick of every factored form. Trained weights are not low rank, but their outputs on
//! text nearly are: with a calibration text the loss at the same rank is several times smaller.

use super::common::fill::{Budget, Spectrum, fill};
use super::common::moments::Moments;
use super::common::network::{Loss, Request, Rewritten, Slot};
use super::common::product::{Factor, Product};
use super::common::refused;
use crate::conversions::{Conversion, Run};
use crate::layer::Linear;
use crate::{Error, Mat, Result};
use attlas_num::linalg::{matmul, matmul_tn, singular_values};
use attlas_num::par::*;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Registry entry.
pub static CONVERSION: Conversion = Conversion {
    id: "svd",
    title: "Every matrix as the product of two thin ones",
    reference: "eckart1936, ren2022, wang2025svdllm",
    params: Params::SPECS,
    from: "grouped_query",
    to: "grouped_query",
    reads_text: true,
    run: Run::Matrices(run),
};

crate::params! {
    /// Parameters of [`factor`].
    pub struct Params {
        /// Rank of every matrix, at most its smaller side.
        rank: usize = 64, in 1..=1 << 20;
        /// Instead of a rank: for each matrix, the smallest one with at most this relative error, of the outputs if
        /// there is a calibration text.
        rel_error: Option<f64> = None, in 0.0..=1.0;
        /// Instead of a rank: the share of all matrices' numbers that is stored, distributed by one multiplier.
        keep: Option<f64> = None, in 0.0..=1.0;
        /// Instead of a rank: the largest loss of all matrices together, distributed by one multiplier. In nats per
        /// token if sensitivities were measured, otherwise the sum of relative squared errors.
        max_loss: Option<f64> = None, in 0.0..=1e9;
        /// Share of the mean second moment of the inputs added to all directions, so that directions unused by the
        /// calibration text count a little.
        ridge: f64 = 1e-6, in 0.0..=1.0;
    }
}

/// A matrix in factored form.
#[derive(Clone, Debug)]
pub struct Factored {
    /// The map, factor by factor.
    pub map: Product,
    /// The rank that was kept.
    pub rank: usize,
    /// $\lVert W - \hat W \rVert_F / \lVert W \rVert_F$.
    pub rel_error: f64,
    /// The same error for the outputs, if moments of the inputs are known.
    pub seen_error: Option<f64>,
}

/// Computes the best approximation of `w` (`n_out × n_in`) of the given rank, or of the rank that the error needs: for
/// all inputs equally, or for inputs with these moments. Ignores budgets for several matrices.
pub fn factor(w: &Mat<f32>, params: &Params, moments: Option<&Moments>) -> Result<Factored> {
    params.validate()?;
    let wide = w.cast::<f64>();
    let seen = weighted(&wide, params, moments)?;
    let svd = attlas_num::linalg::svd(seen.as_ref().unwrap_or(&wide).as_ref())
        .map_err(|e| refused(CONVERSION.id, e))?;
    let most = svd.sigma.len();
    // Smallest first, so that rounding does not lose them beside the large ones.
    let square = |s: &[f64]| s.iter().rev().map(|s| s * s).sum::<f64>();
    let total = square(&svd.sigma);
    let rank = match params.rel_error {
        None => params.rank.min(most).max(1),
        Some(e) => (1..most).find(|&r| square(&svd.sigma[r..]) <= e * e * total).unwrap_or(most.max(1)),
    };
    let error = if total > 0.0 { (square(&svd.sigma[rank.min(most)..]) / total).sqrt() } else { 0.0 };
    let cut = svd.truncated(rank);
    let product = |right: Mat<f32>, left: Mat<f32>| Product {
        factors: vec![Factor::matrix(right), Factor::matrix(left)],
    };
    if seen.is_none() {
        let left = Mat::from_fn(w.rows(), cut.sigma.len(), |i, r| (cut.u[(i, r)] * cut.sigma[r]) as f32);
        let map = product(cut.v.transpose().cast(), left);
        return Ok(Factored { map, rank, rel_error: error, seen_error: None });
    }
    let right = matmul_tn(cut.u.as_ref(), wide.as_ref());
    // The removed part is orthogonal to the projection.
    let (norm, kept) = (wide.frobenius().powi(2), right.frobenius().powi(2));
    let rel_error = if norm > 0.0 && rank < most { (1.0 - kept / norm).max(0.0).sqrt() } else { 0.0 };
    Ok(Factored { map: product(right.cast(), cut.u.cast()), rank, rel_error, seen_error: Some(error) })
}

/// Weights the inputs of the matrix, if their moments are known.
fn weighted(w: &Mat<f64>, params: &Params, moments: Option<&Moments>) -> Result<Option<Mat<f64>>> {
    let Some(m) = moments else { return Ok(None) };
    if m.width() != w.cols() {
        return Err(Error::shape("calibration moments", format!("{} inputs", w.cols()), m.width()));
    }
    Ok(Some(matmul(w.as_ref(), m.root(params.ridge)?.as_ref())))
}

/// Finds the ranks of all matrices within the common budget, if there is one; a rank of `None` leaves a matrix
/// unfactored.
fn ranks(request: &Request<'_>, slots: &[Slot], params: &Params) -> Result<Option<Vec<Option<usize>>>> {
    let given = [params.rel_error.is_some(), params.keep.is_some(), params.max_loss.is_some()];
    if given.iter().filter(|g| **g).count() > 1 {
        return Err(Error::param("keep", "beside another", "only one of rel_error, keep and max_loss"));
    }
    if params.keep.is_none() && params.max_loss.is_none() {
        return Ok(None);
    }
    let network = request.network;
    let spectrum = |&slot: &Slot| {
        let w = network.map(slot)?.weight.cast::<f64>();
        let seen = weighted(&w, params, network.moments(slot).as_deref())?;
        let sigma =
            singular_values(seen.as_ref().unwrap_or(&w).as_ref()).map_err(|e| refused(CONVERSION.id, e))?;
        let energies: Vec<f64> = sigma.iter().map(|s| s * s).collect();
        let total: f64 = energies.iter().sum();
        let relative = if total > 0.0 { 1.0 / total } else { 0.0 };
        let weight = network.sensitivity(slot).unwrap_or(1.0) * relative;
        Ok(Spectrum { energies, rows: w.rows(), cols: w.cols(), weight })
    };
    let spectra: Vec<Spectrum> = slots.par_iter().map(spectrum).collect::<Result<_>>()?;
    let all: usize = spectra.iter().map(|s| s.rows * s.cols).sum();
    let budget = match (params.keep, params.max_loss) {
        (Some(share), _) => Budget::Numbers((share * all as f64) as usize),
        (None, Some(loss)) => Budget::Loss(loss),
        (None, None) => unreachable!("one of them is there"),
    };
    let filled = fill(&spectra, budget);
    match budget {
        Budget::Numbers(n) if filled.numbers > n => {
            let least = filled.numbers as f64 / all.max(1) as f64;
            Err(Error::param(
                "keep",
                params.keep.unwrap_or(0.0),
                format!("at least {least:.4}, rank 1 everywhere"),
            ))
        }
        _ => Ok(Some(filled.ranks)),
    }
}

/// Factors every requested matrix, by default all.
fn run(request: &Request<'_>) -> Result<Rewritten> {
    let params = Params::from_options(request.options)?;
    let slots = request.slots(&request.layers_or(|n| (0..n).collect())?, |_| true)?;
    let ranks = ranks(request, &slots, &params)?;
    let done = AtomicUsize::new(0);
    let network = request.network;
    let one = |(i, &slot): (usize, &Slot)| {
        let rank = ranks.as_ref().map(|all| all[i]);
        let factored = match rank {
            Some(None) => None,
            _ => {
                let own = Params { rank: rank.flatten().unwrap_or(params.rank), ..params.clone() };
                Some(factor(&network.map(slot)?.weight, &own, network.moments(slot).as_deref())?)
            }
        };
        (request.progress)(done.fetch_add(1, Ordering::Relaxed) + 1, slots.len());
        Ok((slot, factored))
    };
    let factored: Vec<(Slot, Option<Factored>)> =
        slots.par_iter().enumerate().map(one).collect::<Result<_>>()?;
    let mut out = Rewritten::default();
    for (slot, f) in factored {
        let (rows, cols) = network.size(slot).unwrap_or((0, 0));
        let (what, before) = (slot.to_string(), rows * cols);
        let Some(f) = f else {
            let seen_error = network.moments(slot).map(|_| 0.0);
            let rank = rows.min(cols);
            out.losses.push(Loss { what, rank, rel_error: 0.0, seen_error, before, after: before });
            continue;
        };
        let (rank, rel_error, seen_error) = (f.rank, f.rel_error, f.seen_error);
        let after = f.map.parameters();
        out.losses.push(Loss { what, rank, rel_error, seen_error, before, after });
        out.maps.insert(slot, f.map);
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::super::common::moments::tests::moments_of;
    use super::super::common::network::{Network, Role};
    use super::super::common::relative_error;
    use super::super::common::tests::{Toy, inputs_of, request};
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
        let full = factor(&w, &at(64), None).unwrap();
        assert!(relative_error(&w, &full.map.dense()) < 1e-6 && full.rel_error == 0.0);
        assert_eq!((full.map.parameters(), full.rank), (7 * (9 + 7), 7));
        for rank in [1, 3, 6] {
            let f = factor(&w, &at(rank), None).unwrap();
            assert!((relative_error(&w, &f.map.dense()) - f.rel_error).abs() < 1e-6);
            // No other factors of this rank do better.
            for seed in ["a", "b"] {
                let other = matmul(random(seed, 9, rank).as_ref(), random("c", rank, 7).as_ref());
                assert!(relative_error(&w, &other) > f.rel_error);
            }
        }
        assert!(factor(&Mat::zeros(3, 4), &at(2), None).unwrap().rel_error == 0.0);
    }

    #[test]
    fn a_target_error_takes_the_smallest_rank_that_keeps_it() {
        let w = random("w", 9, 7);
        for target in [0.0, 0.3, 0.7, 1.0] {
            let f = factor(&w, &Params { rel_error: Some(target), ..Params::default() }, None).unwrap();
            assert!(f.rel_error <= target);
            assert!(f.rank == 1 || factor(&w, &at(f.rank - 1), None).unwrap().rel_error > target);
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

    #[test]
    fn with_moments_no_matrix_of_that_rank_has_better_outputs() {
        let (w, x) = (random("w", 9, 7), inputs_of("x", 7));
        let m = moments_of(&x);
        let outputs = |w: &Mat<f32>| attlas_num::linalg::matmul_nt(x.as_ref(), w.as_ref());
        for rank in [1, 3, 6] {
            let (plain, seen) =
                (factor(&w, &at(rank), None).unwrap(), factor(&w, &at(rank), Some(&m)).unwrap());
            let error = |f: &Factored| relative_error(&outputs(&w), &outputs(&f.map.dense()));
            assert!((error(&seen) - seen.seen_error.unwrap()).abs() < 1e-4, "rank {rank}");
            assert!(error(&seen) < error(&plain) && plain.rel_error <= seen.rel_error, "rank {rank}");
            assert!((relative_error(&w, &seen.map.dense()) - seen.rel_error).abs() < 1e-5);
            // The outputs of the best matrix of this rank are the truncated decomposition of the exact outputs.
            let sigma = attlas_num::linalg::singular_values(outputs(&w).as_ref()).unwrap();
            let square = |s: &[f64]| s.iter().map(|s| s * s).sum::<f64>();
            let best = (square(&sigma[rank..]) / square(&sigma)).sqrt();
            assert!((error(&seen) - best).abs() < 1e-4, "rank {rank}: {} and {best}", error(&seen));
        }
        let full = factor(&w, &at(7), Some(&m)).unwrap();
        assert!(relative_error(&w, &full.map.dense()) < 1e-6 && full.rel_error == 0.0);
        let target = Params { rel_error: Some(0.2), ..Params::default() };
        let target = factor(&w, &target, Some(&m)).unwrap();
        assert!(target.seen_error.unwrap() <= 0.2 && target.rank < 7);
        assert!(factor(&random("w", 9, 6), &at(2), Some(&m)).is_err(), "another width");
    }

    #[test]
    fn a_budget_for_all_matrices_is_kept_and_spent_where_it_helps() {
        let toy = Toy { kv_heads: 2, gated: true, seen: true, ..Toy::default() };
        let all: usize = run(&request(&toy, &Options::new())).unwrap().losses.iter().map(|l| l.before).sum();
        let loss = |r: &Rewritten| r.losses.iter().map(|l| l.seen_error.unwrap().powi(2)).sum::<f64>();
        for share in [0.4, 0.6, 0.8] {
            let filled = run(&request(&toy, &Options::new().with("keep", share))).unwrap();
            let after: usize = filled.losses.iter().map(|l| l.after).sum();
            assert!(
                after as f64 <= share * all as f64 && after as f64 > 0.85 * share * all as f64,
                "{share}"
            );
            // The same rank everywhere, or the same share of every matrix, loses no less at this size.
            for rank in 1..4 {
                let uniform = run(&request(&toy, &Options::new().with("rank", rank))).unwrap();
                if uniform.losses.iter().map(|l| l.after).sum::<usize>() <= after {
                    assert!(loss(&filled) <= loss(&uniform) + 1e-9, "{share}, rank {rank}");
                }
            }
        }
        let bounded = run(&request(&toy, &Options::new().with("max_loss", 0.5))).unwrap();
        assert!(loss(&bounded) <= 0.5 && loss(&bounded) > 0.0);
        let untouched = run(&request(&toy, &Options::new().with("max_loss", 0.0))).unwrap();
        assert!(untouched.maps.is_empty() && untouched.losses.len() == 14 && untouched.rel_error() == 0.0);
        for wrong in [
            Options::new().with("keep", 0.5).with("max_loss", 1.0),
            Options::new().with("keep", 0.5).with("rel_error", 0.1),
            Options::new().with("keep", 0.01),
        ] {
            assert!(run(&request(&toy, &wrong)).is_err(), "{wrong}");
        }
    }
}
