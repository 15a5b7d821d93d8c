//! TRAWL: weights replaced by their low-rank reconstruction, to remove noise.
//!
//! **Idea.** Stack the feed-forward matrices (or the attention matrices) of some layers, decompose the stack at low rank
//! and write the reconstruction back.
//!
//! **Math.** Feed-forward: $W_{in}$ and $W_{out}^\top$, both $d \times f$, of $k$ layers make a $2k \times d \times f$
//! tensor; attention: $W_Q, W_K, W_V, W_O$ make a $4k \times d \times d$ one. CP of rank $R$, or Tucker of ranks (all, $R$,
//! $R$).
//!
//! **Reference.** luo2025. The published gains come mostly from the feed-forward weights of the last layers, and the rank
//! was chosen on the metric that is reported.
//!
//! **Cost.** Dense weights are written back, so a model costs what it did.
//!
//! **Guarantees.** Full rank changes nothing; equal matrices in a stack need the rank of one. Tested here.
//!
//! **When to use.** As a post-training experiment with a validation metric at hand: sweep layers from the last, keep a
//! change only where the metric does not fall.

use super::common::{LayerMatrices, refused};
use crate::layer::Conversion;
use crate::{Error, Mat, Result};
use attlas_num::tensor::{Tensor, cp, tucker};

/// Registry entry.
pub static CONVERSION: Conversion = Conversion {
    id: "trawl",
    title: "Weights of chosen layers replaced by a low-rank reconstruction",
    reference: "luo2025",
    params: Params::SPECS,
    from: "grouped_query",
    to: "grouped_query",
};

crate::choices! {
    /// Which matrices are stacked.
    pub enum Target {
        /// The feed-forward matrices.
        Ffn = "ffn",
        /// The attention matrices.
        Attention = "attention",
    }
}

crate::choices! {
    /// The decomposition.
    pub enum Format {
        /// A sum of outer products.
        Cp = "cp",
        /// Bases for the last two modes.
        Tucker = "tucker",
    }
}

crate::params! {
    /// Parameters of [`denoise`].
    pub struct Params {
        /// Which matrices are stacked.
        target: Target = Target::Ffn;
        /// The decomposition.
        format: Format = Format::Cp;
        /// Terms of the sum, or vectors of each basis.
        rank: usize = 32, in 1..=1 << 16;
        /// Most sweeps.
        iters: usize = 100, in 1..=10_000;
        /// Stop when the relative error changes by less.
        tol: f64 = 1e-6, in 0.0..=1.0;
        /// Stream of the random part of a start.
        seed: u64 = 0, in 0..=u64::MAX;
    }
}

/// Replaces the weights of `layers`, stacked together, by their reconstruction; gives the relative error of the stack.
pub fn denoise(layers: &mut [LayerMatrices], params: &Params) -> Result<f64> {
    params.validate()?;
    let matrices: Vec<Mat<f32>> = layers
        .iter()
        .flat_map(|l| match params.target {
            Target::Ffn => vec![l.ffn_in.transpose(), l.ffn_out.clone()],
            Target::Attention => l.attention.to_vec(),
        })
        .collect();
    if matrices.is_empty() {
        return Err(Error::shape("layers", "at least one", 0));
    }
    let stack = Tensor::stack(&matrices).map_err(|e| refused(CONVERSION.id, e))?.cast::<f64>();
    let (rebuilt, error) = match params.format {
        Format::Cp => {
            let options = cp::Options {
                iters: params.iters,
                tol: Some(params.tol),
                seed: params.seed,
                ..Default::default()
            };
            let fit = cp::decompose(&stack, params.rank, &options).map_err(|e| refused(CONVERSION.id, e))?;
            (fit.cp.reconstruct(), fit.rel_error)
        }
        Format::Tucker => {
            let options = tucker::Options {
                method: tucker::Method::Hooi,
                iters: params.iters,
                tol: params.tol,
                modes: Some(vec![1, 2]),
                ..Default::default()
            };
            let (rows, cols) = (stack.shape()[1], stack.shape()[2]);
            let ranks = vec![matrices.len(), params.rank.min(rows), params.rank.min(cols)];
            let fit = tucker::decompose(&stack, &tucker::Ranks::Given(ranks), &options);
            let fit = fit.map_err(|e| refused(CONVERSION.id, e))?;
            (fit.tucker.reconstruct(), fit.rel_error)
        }
    };
    let rebuilt = rebuilt.map_err(|e| refused(CONVERSION.id, e))?;
    let (rows, cols) = (stack.shape()[1], stack.shape()[2]);
    let mut parts = rebuilt.data().chunks_exact((rows * cols).max(1));
    let mut next = || {
        let part = parts.next().unwrap_or_else(|| unreachable!("as many matrices as were stacked"));
        Mat::from_vec(part.iter().map(|&x| x as f32).collect(), rows, cols)
    };
    for layer in layers {
        match params.target {
            Target::Ffn => {
                layer.ffn_in = next().transpose();
                layer.ffn_out = next();
            }
            Target::Attention => layer.attention.iter_mut().for_each(|w| *w = next()),
        }
    }
    Ok(error)
}

#[cfg(test)]
mod tests {
    use super::super::common::{relative_error, tests::layer};
    use super::*;
    use crate::layers::testing::random;
    use attlas_num::linalg::matmul;

    #[test]
    fn full_rank_changes_nothing_but_the_chosen_weights() {
        let original = [layer("a", 4), layer("b", 4)];
        for target in [Target::Ffn, Target::Attention] {
            let mut layers = original.clone();
            let params = Params { target, format: Format::Tucker, rank: 8, ..Params::default() };
            assert!(denoise(&mut layers, &params).unwrap() < 1e-9);
            for (a, b) in layers.iter().zip(&original) {
                assert!(
                    relative_error(&b.ffn_in, &a.ffn_in) < 1e-6
                        && relative_error(&b.ffn_out, &a.ffn_out) < 1e-6
                );
                (0..4).for_each(|i| assert!(relative_error(&b.attention[i], &a.attention[i]) < 1e-6));
            }
        }
        let mut layers = original.clone();
        let error = denoise(&mut layers, &Params { rank: 2, ..Params::default() }).unwrap();
        assert!(
            error > 0.1
                && layers[0].attention == original[0].attention
                && layers[0].ffn_in != original[0].ffn_in
        );
    }

    #[test]
    fn equal_matrices_need_the_rank_of_one() {
        let w = matmul(random("left", 8, 2).as_ref(), random("right", 2, 4).as_ref());
        let mut equal = layer("a", 4);
        equal.ffn_in = w.clone();
        equal.ffn_out = w.transpose();
        let mut layers = [equal.clone(), equal];
        let params = Params { rank: 2, iters: 2000, tol: 1e-12, ..Params::default() };
        let error = denoise(&mut layers, &params).unwrap();
        assert!(error < 1e-5, "{error}");
        assert!(relative_error(&w, &layers[1].ffn_in) < 1e-5);
        assert!(denoise(&mut [], &params).is_err());
    }
}
