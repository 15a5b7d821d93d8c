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

use super::common::{Chain, refused};
use crate::layer::Conversion;
use crate::{Mat, Result};
use std::sync::Arc;

/// Registry entry.
pub static CONVERSION: Conversion = Conversion {
    id: "svd",
    title: "Every matrix as the product of two thin ones",
    reference: "eckart1936, ren2022",
    params: Params::SPECS,
    from: "grouped_query",
    to: "grouped_query",
};

crate::params! {
    /// Parameters of [`factor`].
    pub struct Params {
        /// Rank of every matrix, lowered to the smaller side where it is more.
        rank: usize = 64, in 1..=1 << 20;
    }
}

/// A matrix in factored form.
#[derive(Clone, Debug)]
pub struct Factored {
    /// The map, factor by factor.
    pub map: Chain,
    /// $\lVert W - \hat W \rVert_F / \lVert W \rVert_F$, from the singular values left out.
    pub rel_error: f64,
}

/// The best approximation of `w` (`n_out × n_in`) of the given rank.
pub fn factor(w: &Mat<f32>, params: &Params) -> Result<Factored> {
    params.validate()?;
    let svd = attlas_num::linalg::svd(w.as_ref()).map_err(|e| refused(CONVERSION.id, e))?;
    let rank = params.rank.min(svd.sigma.len()).max(1);
    let square = |s: &[f64]| s.iter().map(|s| s * s).sum::<f64>();
    let total = square(&svd.sigma);
    let rel_error =
        if total > 0.0 { (square(&svd.sigma[rank.min(svd.sigma.len())..]) / total).sqrt() } else { 0.0 };
    let cut = svd.truncated(rank);
    let left = Mat::from_fn(w.rows(), cut.sigma.len(), |i, r| (cut.u[(i, r)] * cut.sigma[r]) as f32);
    let right = cut.v.transpose().cast::<f32>();
    Ok(Factored { map: Chain { factors: vec![Arc::new(right), Arc::new(left)], bias: None }, rel_error })
}

#[cfg(test)]
mod tests {
    use super::super::common::relative_error;
    use super::*;
    use crate::layer::Linear;
    use crate::layers::testing::random;
    use attlas_num::linalg::matmul;

    #[test]
    fn full_rank_is_the_matrix_and_less_is_the_best_of_its_rank() {
        let w = random("w", 9, 7);
        let full = factor(&w, &Params { rank: 64 }).unwrap();
        assert!(relative_error(&w, &full.map.dense()) < 1e-6 && full.rel_error == 0.0);
        assert_eq!(full.map.parameters(), 7 * (9 + 7));
        for rank in [1, 3, 6] {
            let f = factor(&w, &Params { rank }).unwrap();
            assert!((relative_error(&w, &f.map.dense()) - f.rel_error).abs() < 1e-6);
            // No other factors of that rank do better.
            for seed in ["a", "b"] {
                let other = matmul(random(seed, 9, rank).as_ref(), random("c", rank, 7).as_ref());
                assert!(relative_error(&w, &other) > f.rel_error);
            }
        }
        assert!(factor(&Mat::zeros(3, 4), &Params { rank: 2 }).unwrap().rel_error == 0.0);
    }
}
