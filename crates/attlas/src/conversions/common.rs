//! What several conversions need: products of matrices as linear maps, and the stack of a layer's square blocks.

use crate::layer::Linear;
use crate::workspace::Context;
use crate::{Error, Mat, MatRef, Result};
use attlas_num::kernels::{Op, gemm};
use std::sync::Arc;

/// A linear map that is applied factor by factor: $y = F_k \cdots F_1 x + b$. Factors may be shared between maps.
#[derive(Clone, Debug)]
pub struct Chain {
    /// The factors, the first to act first, each `n_out × n_in`.
    pub factors: Vec<Arc<Mat<f32>>>,
    /// Added at the end, where there is a bias.
    pub bias: Option<Vec<f32>>,
}

impl Chain {
    /// The dense matrix.
    pub fn dense(&self) -> Mat<f32> {
        let start = Mat::identity(self.n_in());
        self.factors.iter().fold(start, |m, f| attlas_num::linalg::matmul(f.as_ref().as_ref(), m.as_ref()))
    }
}

impl Linear for Chain {
    fn n_out(&self) -> usize {
        self.factors.last().map_or(0, |f| f.rows())
    }

    fn n_in(&self) -> usize {
        self.factors.first().map_or(0, |f| f.cols())
    }

    fn apply(&self, x: MatRef<'_, f32>, out: &mut [f32], cx: Context<'_>) {
        let rows = x.rows();
        let mut now = x.to_mat();
        for f in &self.factors {
            let mut next = Mat::zeros(rows, f.rows());
            let (a, b) = (Op::N(now.as_ref()), Op::T(f.as_ref().as_ref()));
            gemm(cx.schedule.isa, 1.0, a, b, 0.0, next.data_mut(), f.rows(), cx.scratch);
            now = next;
        }
        out.copy_from_slice(now.data());
        if let Some(bias) = &self.bias {
            out.chunks_exact_mut(bias.len().max(1))
                .for_each(|row| row.iter_mut().zip(bias).for_each(|(y, b)| *y += b));
        }
    }

    fn parameters(&self) -> usize {
        self.factors.iter().map(|f| f.data().len()).sum::<usize>() + self.bias.as_ref().map_or(0, Vec::len)
    }
}

/// The weights of one transformer layer, each `n_out × n_in`.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerMatrices {
    /// Queries, keys, values and output of attention, all `d × d`, heads concatenated.
    pub attention: [Mat<f32>; 4],
    /// Into the feed-forward layer, `f × d`.
    pub ffn_in: Mat<f32>,
    /// Out of it, `d × f`.
    pub ffn_out: Mat<f32>,
}

/// Which blocks are stacked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scope {
    /// Attention and feed-forward blocks.
    #[default]
    All,
    /// Attention blocks.
    Attention,
    /// Feed-forward blocks.
    Ffn,
}

/// The square blocks of layers on one stack, in the orientation $x \cdot W$ (inputs × outputs): for each layer $W_Q$,
/// $W_K$, $W_V$, $W_O$, then the slices of $W_{in}$ transposed, then the slices of $W_{out}$, so that in feed-forward
/// blocks the rows are always the hidden slice and the columns the model width. Refused where widths do not fit: a
/// feed-forward layer whose width is no multiple of $d$ is never padded.
pub fn stack(layers: &[LayerMatrices], scope: Scope) -> Result<Vec<Mat<f32>>> {
    let mut blocks = Vec::new();
    for layer in layers {
        let d = layer.attention[0].rows();
        let f = layer.ffn_in.rows();
        let square = layer.attention.iter().all(|w| (w.rows(), w.cols()) == (d, d));
        let fits = layer.ffn_in.cols() == d && (layer.ffn_out.rows(), layer.ffn_out.cols()) == (d, f);
        if d != layers[0].attention[0].rows() || (scope != Scope::Ffn && !square) {
            return Err(Error::shape(
                "attention weights",
                "square matrices of one width in all layers",
                format!("width {d}"),
            ));
        }
        if scope != Scope::Attention && (d == 0 || !fits || !f.is_multiple_of(d)) {
            return Err(Error::shape(
                "feed-forward weights",
                format!("a hidden width that is a multiple of {d}"),
                f,
            ));
        }
        if scope != Scope::Ffn {
            blocks.extend(layer.attention.iter().map(Mat::transpose));
        }
        if scope != Scope::Attention {
            let slices = f / d;
            blocks.extend((0..slices).map(|j| layer.ffn_in.as_ref().sub_rows(j * d..(j + 1) * d).to_mat()));
            blocks.extend((0..slices).map(|j| Mat::from_fn(d, d, |i, o| layer.ffn_out[(o, j * d + i)])));
        }
    }
    Ok(blocks)
}

/// Writes a stack back into layers of the same shape: the inverse of [`stack`].
pub fn unstack(blocks: &[Mat<f32>], layers: &mut [LayerMatrices], scope: Scope) -> Result<()> {
    let counts: Vec<usize> = stack(layers, scope)?.iter().map(|b| b.rows()).collect();
    if counts.len() != blocks.len()
        || blocks.iter().zip(&counts).any(|(b, &d)| (b.rows(), b.cols()) != (d, d))
    {
        return Err(Error::shape("stack", format!("{} square blocks", counts.len()), blocks.len()));
    }
    let mut blocks = blocks.iter();
    let mut next = || blocks.next().unwrap_or_else(|| unreachable!("as many blocks as were counted"));
    for layer in layers {
        let d = layer.attention[0].rows();
        if scope != Scope::Ffn {
            layer.attention.iter_mut().for_each(|w| *w = next().transpose());
        }
        if scope != Scope::Attention {
            let slices = layer.ffn_in.rows() / d;
            for j in 0..slices {
                let block = next();
                (0..d).for_each(|i| layer.ffn_in.row_mut(j * d + i).copy_from_slice(block.row(i)));
            }
            for j in 0..slices {
                let block = next();
                (0..d).for_each(|i| (0..d).for_each(|o| layer.ffn_out[(o, j * d + i)] = block[(i, o)]));
            }
        }
    }
    Ok(())
}

/// A refusal by the numerical tools, in the words of this crate.
pub(crate) fn refused(id: &str, e: impl std::fmt::Display) -> Error {
    Error::Unsupported { method: id.into(), reasons: vec![e.to_string()] }
}

/// $\lVert A - B \rVert_F / \lVert A \rVert_F$; 0 where both vanish.
pub fn relative_error(a: &Mat<f32>, b: &Mat<f32>) -> f64 {
    let gap: f64 = a.data().iter().zip(b.data()).map(|(x, y)| f64::from(x - y).powi(2)).sum();
    let norm = a.frobenius();
    if norm == 0.0 { gap.sqrt() } else { gap.sqrt() / norm }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::Workspace;
    use crate::layers::testing::random;

    /// A layer of width `d` with a feed-forward layer of `2d`.
    pub(crate) fn layer(name: &str, d: usize) -> LayerMatrices {
        let of = |part: &str, o: usize, i: usize| random(&format!("{name} {part}"), o, i);
        LayerMatrices {
            attention: ["q", "k", "v", "o"].map(|p| of(p, d, d)),
            ffn_in: of("in", 2 * d, d),
            ffn_out: of("out", d, 2 * d),
        }
    }

    #[test]
    fn stacking_and_unstacking_is_the_identity() {
        let layers = [layer("a", 5), layer("b", 5)];
        for (scope, count) in [(Scope::All, 16), (Scope::Attention, 8), (Scope::Ffn, 8)] {
            let blocks = stack(&layers, scope).unwrap();
            assert_eq!(blocks.len(), count);
            let mut back = layers.clone();
            let emptied = blocks.iter().map(|b| Mat::zeros(b.rows(), b.cols())).collect::<Vec<_>>();
            unstack(&emptied, &mut back, scope).unwrap();
            assert!(back != layers);
            unstack(&blocks, &mut back, scope).unwrap();
            assert_eq!(back, layers);
            assert!(unstack(&blocks[1..], &mut back, scope).is_err());
        }
        // Blocks act as x·W: the third of the first layer is the value projection.
        let blocks = stack(&layers, Scope::All).unwrap();
        assert_eq!(blocks[2][(1, 3)], layers[0].attention[2][(3, 1)]);
        assert_eq!(blocks[5][(1, 3)], layers[0].ffn_in[(6, 3)]);
        assert_eq!(blocks[7][(1, 3)], layers[0].ffn_out[(3, 6)]);
    }

    #[test]
    fn widths_that_do_not_fit_are_refused() {
        let mut odd = layer("a", 5);
        odd.ffn_in = random("in", 7, 5);
        odd.ffn_out = random("out", 5, 7);
        assert!(stack(&[odd.clone()], Scope::All).is_err() && stack(&[odd], Scope::Attention).is_ok());
        assert!(stack(&[layer("a", 5), layer("b", 4)], Scope::All).is_err());
    }

    #[test]
    fn a_chain_is_the_product_of_its_factors() {
        let (a, b) = (Arc::new(random("a", 3, 7)), Arc::new(random("b", 5, 3)));
        let chain = Chain { factors: vec![a.clone(), b.clone()], bias: Some(vec![1.0, 2.0, 3.0, 4.0, 5.0]) };
        assert_eq!((chain.n_in(), chain.n_out(), chain.parameters()), (7, 5, 21 + 15 + 5));
        let x = random("x", 4, 7);
        let mut out = vec![f32::NAN; 20];
        chain.apply(x.as_ref(), &mut out, Workspace::single().unwrap().context());
        let want = attlas_num::linalg::matmul_nt(x.as_ref(), chain.dense().as_ref());
        for (i, (got, want)) in out.iter().zip(want.data()).enumerate() {
            assert!((got - want - (i % 5 + 1) as f32).abs() < 1e-6);
        }
    }
}
