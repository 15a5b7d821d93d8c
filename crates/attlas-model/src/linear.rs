//! Linear layers with weights in their stored form.

use crate::tensor::Tensor;
use attlas_num::kernels::quant::{Compute, Job, products_in};
use attlas_num::{MatRef, Scratch};
use std::sync::Arc;

/// $y = W x + b$ with $W$ as `[out, in]` in stored form, or as a product of such factors, which is never multiplied
/// out.
#[derive(Clone, Debug)]
pub struct Linear {
    /// The first acts first; the last is a matrix. There is one unless the map is a product.
    factors: Vec<Factor>,
    bias: Option<Vec<f32>>,
}

/// A factor of a product.
#[derive(Clone, Debug)]
pub enum Factor {
    /// A matrix `[out, in]` that acts equally on a number of slices of its input.
    Matrix(Tensor, usize),
    /// A diagonal.
    Diagonal(Arc<Vec<f32>>),
}

impl Factor {
    /// Outputs and inputs.
    fn size(&self) -> (usize, usize) {
        match self {
            Self::Matrix(m, slices) => (m.rows() * slices, m.cols() * slices),
            Self::Diagonal(d) => (d.len(), d.len()),
        }
    }

    /// Returns true if both use the same numbers in memory in the same way.
    fn is(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Matrix(a, s), Self::Matrix(b, t)) => s == t && std::ptr::eq(a.bytes(), b.bytes()),
            (Self::Diagonal(a), Self::Diagonal(b)) => Arc::ptr_eq(a, b),
            _ => false,
        }
    }

    /// Numbers stored.
    fn numbers(&self) -> usize {
        match self {
            Self::Matrix(m, _) => m.rows() * m.cols(),
            Self::Diagonal(d) => d.len(),
        }
    }

    /// Operations for one token.
    fn flops(&self) -> u64 {
        match self {
            Self::Matrix(m, slices) => 2 * (m.rows() * m.cols() * slices) as u64,
            Self::Diagonal(d) => d.len() as u64,
        }
    }
}

impl Linear {
    /// Creates a layer; `None` if the weight is no matrix or the bias does not match its rows.
    pub fn new(weight: Tensor, bias: Option<Vec<f32>>) -> Option<Self> {
        Self::product(vec![Factor::Matrix(weight, 1)], bias)
    }

    /// Creates a layer from a product; the first factor acts first. `None` if the factors do not match, the last is no
    /// matrix, or the bias does not match the outputs.
    pub fn product(factors: Vec<Factor>, bias: Option<Vec<f32>>) -> Option<Self> {
        let matrices = factors.iter().all(|f| match f {
            // A matrix without columns can claim any number of rows.
            Factor::Matrix(m, slices) => {
                let fits = |n: usize| n.checked_mul(*slices).is_some();
                m.shape().len() == 2 && *slices > 0 && fits(m.rows()) && fits(m.cols())
            }
            Factor::Diagonal(_) => true,
        });
        let joined = || factors.windows(2).all(|w| w[0].size().0 == w[1].size().1);
        let Some(last @ Factor::Matrix(..)) = factors.last() else { return None };
        let fits = matrices && joined() && bias.as_ref().is_none_or(|b| b.len() == last.size().0);
        fits.then_some(Self { factors, bias })
    }

    /// Width of the input.
    pub fn inputs(&self) -> usize {
        self.factors.first().map_or(0, |f| f.size().1)
    }

    /// Width of the output.
    pub fn outputs(&self) -> usize {
        self.factors.last().map_or(0, |f| f.size().0)
    }

    /// Returns the weights, `[out, in]`; of a product, those of the last factor.
    pub fn weight(&self) -> &Tensor {
        match self.factors.last() {
            Some(Factor::Matrix(weight, _)) => weight,
            _ => unreachable!("the constructor saw a matrix at the end"),
        }
    }

    /// Returns true if the map is a product of factors.
    pub fn is_product(&self) -> bool {
        !matches!(&self.factors[..], [Factor::Matrix(_, 1)])
    }

    /// The bias, if there is one.
    pub fn bias(&self) -> Option<&[f32]> {
        self.bias.as_deref()
    }

    /// Applies the layer to every row of `x`; `out` is `x.rows() × outputs`, contiguous. Panics if the shapes do not
    /// match.
    ///
    /// Runs on the current rayon pool. To apply many layers in a row, run inside a pool (`ThreadPool::install`), where
    /// a parallel pass starts fastest.
    pub fn apply(&self, x: MatRef<'_, f32>, out: &mut [f32], scratch: &Scratch) {
        self.apply_in(Compute::F32, x, out, scratch);
    }

    /// The same with operands rounded as `compute` says, where weights are stored in a format that has it.
    pub fn apply_in(&self, compute: Compute, x: MatRef<'_, f32>, out: &mut [f32], scratch: &Scratch) {
        apply_all_in(compute, &mut [(self, out)], x, scratch);
    }

    /// Returns the weights as one matrix `[out, in]` in single precision.
    pub fn multiplied_out(&self) -> Vec<f32> {
        if !self.is_product() {
            return self.weight().to_f32();
        }
        let (n, m) = (self.inputs(), self.outputs());
        let identity = attlas_num::Mat::<f32>::identity(n);
        let mut columns = vec![0.0; n * m];
        let plain = Self { factors: self.factors.clone(), bias: None };
        plain.apply(identity.as_ref(), &mut columns, &Scratch::new());
        (0..n * m).map(|i| columns[i % n * m + i / n]).collect()
    }

    /// Returns the stored matrices of the layer.
    pub fn matrices(&self) -> impl Iterator<Item = &Tensor> {
        self.factors.iter().filter_map(|f| match f {
            Factor::Matrix(m, _) => Some(m),
            Factor::Diagonal(_) => None,
        })
    }
}

impl attlas::layer::Linear for Linear {
    fn n_out(&self) -> usize {
        self.outputs()
    }

    fn n_in(&self) -> usize {
        self.inputs()
    }

    fn apply(&self, x: MatRef<'_, f32>, out: &mut [f32], cx: attlas::Context<'_>) {
        apply_all(&mut [(self, out)], x, cx.scratch);
    }

    fn parameters(&self) -> usize {
        let numbers: usize = self.factors.iter().map(Factor::numbers).sum();
        numbers + self.bias.as_ref().map_or(0, Vec::len)
    }
}

/// Applies several layers to the same input in one parallel pass. Products that begin with the same factor compute it
/// once.
pub fn apply_all(layers: &mut [(&Linear, &mut [f32])], x: MatRef<'_, f32>, scratch: &Scratch) {
    apply_all_in(Compute::F32, layers, x, scratch);
}

/// The same with operands rounded as `compute` says, where weights are stored in a format that has it.
pub fn apply_all_in(
    compute: Compute,
    layers: &mut [(&Linear, &mut [f32])],
    x: MatRef<'_, f32>,
    scratch: &Scratch,
) {
    fn job<'a>(layer: &'a mut (&Linear, &mut [f32])) -> Job<'a> {
        Job { weight: layer.0.weight().as_weight(), out: &mut *layer.1 }
    }
    if layers.iter().any(|(layer, _)| layer.is_product()) {
        let maps = layers.iter_mut().map(|(layer, out)| (&layer.factors[..], &mut **out)).collect();
        match x.as_contiguous() {
            Some(data) => apply_products(compute, maps, data, x.rows(), scratch),
            None => apply_products(compute, maps, x.to_mat().data(), x.rows(), scratch),
        }
    } else {
        // The numbers of layers that a transformer applies together need no allocated list.
        match &mut *layers {
            [a] => products_in(compute, x, &mut [job(a)], scratch),
            [a, b] => products_in(compute, x, &mut [job(a), job(b)], scratch),
            [a, b, c] => products_in(compute, x, &mut [job(a), job(b), job(c)], scratch),
            more => {
                let mut jobs: Vec<Job<'_>> = more.iter_mut().map(job).collect();
                products_in(compute, x, &mut jobs, scratch);
            }
        }
    }
    for (layer, out) in layers {
        if let Some(bias) = &layer.bias {
            for row in out.chunks_exact_mut(bias.len().max(1)) {
                row.iter_mut().zip(bias).for_each(|(y, b)| *y += b);
            }
        }
    }
}

/// Groups the remaining maps of the same rows by their first factor.
fn by_first<T>(maps: Vec<(&[Factor], T)>) -> Vec<(&Factor, Vec<(&[Factor], T)>)> {
    let mut groups: Vec<(&Factor, Vec<(&[Factor], T)>)> = Vec::new();
    for (factors, out) in maps {
        let Some((first, rest)) = factors.split_first() else { continue };
        match groups.iter_mut().find(|(f, group)| f.is(first) && !rest.is_empty() && !group[0].0.is_empty()) {
            Some((_, group)) => group.push((rest, out)),
            None => groups.push((first, vec![(rest, out)])),
        }
    }
    groups
}

fn apply_products(
    compute: Compute,
    maps: Vec<(&[Factor], &mut [f32])>,
    x: &[f32],
    rows: usize,
    scratch: &Scratch,
) {
    let mut groups = by_first(maps);
    // The last factor writes to the output, all others to a buffer.
    let mut buffers: Vec<Vec<f32>> = groups
        .iter()
        .map(|(f, group)| if group[0].0.is_empty() { Vec::new() } else { vec![0.0; rows * f.size().0] })
        .collect();
    let mut plain = Vec::new();
    for ((first, group), buffer) in groups.iter_mut().zip(&mut buffers) {
        let out = if group[0].0.is_empty() { &mut *group[0].1 } else { &mut buffer[..] };
        match first {
            Factor::Matrix(m, 1) => plain.push(Job { weight: m.as_weight(), out }),
            Factor::Matrix(m, slices) => {
                let sliced = MatRef::new(x, rows * slices, m.cols());
                products_in(compute, sliced, &mut [Job { weight: m.as_weight(), out }], scratch);
            }
            Factor::Diagonal(d) => {
                for (out, x) in out.chunks_exact_mut(d.len().max(1)).zip(x.chunks_exact(d.len().max(1))) {
                    out.iter_mut().zip(x.iter().zip(&**d)).for_each(|(o, (x, d))| *o = x * d);
                }
            }
        }
    }
    if let Some(width) = plain.first().map(|job| job.weight.cols()) {
        products_in(compute, MatRef::new(x, rows, width), &mut plain, scratch);
    }
    for ((_, group), buffer) in groups.into_iter().zip(&buffers) {
        if !group[0].0.is_empty() {
            apply_products(compute, group, buffer, rows, scratch);
        }
    }
}

/// Counts the operations for one token of layers applied together: shared factors once, biases not at all.
pub fn flops(layers: &[&Linear]) -> u64 {
    fn count(maps: Vec<(&[Factor], ())>) -> u64 {
        by_first(maps).into_iter().map(|(first, group)| first.flops() + count(group)).sum()
    }
    count(layers.iter().map(|l| (&l.factors[..], ())).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bias_is_added_to_every_row() {
        let weight = Tensor::from_f32(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], vec![3, 2]).unwrap();
        let layer = Linear::new(weight.clone(), Some(vec![0.5, 0.0, -1.0])).unwrap();
        let x = [1.0, 1.0, 0.0, 2.0];
        let mut out = [f32::NAN; 6];
        layer.apply(MatRef::new(&x, 2, 2), &mut out, &Scratch::poisoned());
        assert_eq!(out, [3.5, 7.0, 10.0, 4.5, 8.0, 11.0]);
        assert!(Linear::new(weight, Some(vec![0.0; 2])).is_none());
    }

    fn tensor(rows: usize, cols: usize, seed: usize) -> Tensor {
        let value = |i: usize| ((i * 31 + seed * 17) % 23) as f32 / 23.0 - 0.5;
        Tensor::from_f32(&(0..rows * cols).map(value).collect::<Vec<_>>(), vec![rows, cols]).unwrap()
    }

    /// Applies the factors to the rows of x one multiplication at a time.
    fn slowly(factors: &[Factor], x: &[f32], rows: usize) -> Vec<f32> {
        let mut now = x.to_vec();
        for f in factors {
            let (n_out, n_in) = f.size();
            let mut next = vec![0.0; rows * n_out];
            for r in 0..rows {
                let x = &now[r * n_in..(r + 1) * n_in];
                for o in 0..n_out {
                    next[r * n_out + o] = match f {
                        Factor::Diagonal(d) => d[o] * x[o],
                        Factor::Matrix(m, _) => {
                            let (w, s) = (m.to_f32(), o / m.rows());
                            let row = &w[o % m.rows() * m.cols()..][..m.cols()];
                            row.iter().zip(&x[s * m.cols()..]).map(|(w, x)| w * x).sum()
                        }
                    };
                }
            }
            now = next;
        }
        now
    }

    #[test]
    fn products_act_factor_by_factor_and_share_what_they_begin_with() {
        let first = tensor(3, 8, 1);
        let diagonal = Arc::new(vec![1.0, -2.0, 0.5]);
        let maps = [
            vec![Factor::Matrix(first.clone(), 1), Factor::Matrix(tensor(5, 3, 2), 1)],
            vec![Factor::Matrix(tensor(6, 8, 3), 1)],
            vec![
                Factor::Matrix(first.clone(), 1),
                Factor::Diagonal(diagonal),
                Factor::Matrix(tensor(6, 3, 4), 1),
                Factor::Matrix(tensor(4, 3, 5), 2),
            ],
            vec![Factor::Matrix(tensor(2, 4, 6), 2), Factor::Matrix(tensor(7, 4, 7), 1)],
        ];
        let layers: Vec<Linear> = maps.iter().map(|m| Linear::product(m.clone(), None).unwrap()).collect();
        for rows in [1, 3, 40] {
            let x: Vec<f32> = (0..rows * 8).map(|i| ((i * 13) % 29) as f32 / 29.0 - 0.5).collect();
            let mut outs: Vec<Vec<f32>> = layers.iter().map(|l| vec![f32::NAN; rows * l.outputs()]).collect();
            let mut jobs: Vec<(&Linear, &mut [f32])> =
                layers.iter().zip(&mut outs).map(|(l, o)| (l, &mut o[..])).collect();
            apply_all(&mut jobs, MatRef::new(&x, rows, 8), &Scratch::poisoned());
            for (map, out) in maps.iter().zip(&outs) {
                let want = slowly(map, &x, rows);
                assert!(
                    out.iter().zip(&want).all(|(a, b)| (a - b).abs() < 8.0 * f32::EPSILON),
                    "{rows} rows"
                );
            }
        }
        let all: Vec<&Linear> = layers.iter().collect();
        let separate: u64 = all.iter().map(|l| flops(&[l])).sum();
        assert_eq!(flops(&all), separate - 2 * 3 * 8, "the common factor is applied once");
        assert_eq!((layers[2].inputs(), layers[2].outputs(), layers[3].inputs()), (8, 8, 8));
        assert_eq!(flops(&[&layers[2]]), 2 * 24 + 3 + 2 * 18 + 2 * 24);
    }

    #[test]
    fn factors_that_do_not_fit_are_refused() {
        let fit =
            |a: Tensor, b: Tensor| Linear::product(vec![Factor::Matrix(a, 1), Factor::Matrix(b, 1)], None);
        assert!(fit(tensor(3, 8, 1), tensor(5, 3, 1)).is_some());
        assert!(fit(tensor(3, 8, 1), tensor(5, 4, 1)).is_none());
        assert!(Linear::product(vec![], None).is_none());
        assert!(Linear::product(vec![Factor::Diagonal(Arc::new(vec![1.0]))], None).is_none());
        let wide = Tensor::from_f32(&[], vec![1 << 60, 0]).unwrap();
        assert!(
            Linear::product(vec![Factor::Matrix(wide, 16)], None).is_none(),
            "more rows than can be counted"
        );
        let cube = Tensor::from_f32(&[0.0; 8], vec![2, 2, 2]).unwrap();
        assert!(Linear::new(cube, None).is_none());
    }
}
