//! Attention matrices as tensors with separate modes for layers, heads and roles.
//!
//! $\mathcal W^Q \in \mathbb{R}^{L \times H \times d \times D}$ holds the query matrices of all layers, head by head
//! (order 4). In order 5 roles with equal numbers and widths of heads share a tensor, such as
//! $4 \times L \times H \times d \times D$ for multi-head attention, or queries with outputs and keys with values when
//! key heads are shared. As for a stack of blocks, a decomposition gives for each matrix a basis of its rows $(h, e)$,
//! a core, and a basis of the model's width. The modes for heads and widths form the first basis as a Kronecker product
//! (Tucker) or column by column (CP); those for layers and roles form the weights of the cores in the same way.

use super::network::{Loss, Request, Rewritten, Role, Slot};
use super::product::{Product, Values, parameters};
use super::refused;
use super::stack::{Member, Stack};
use crate::{Error, Mat, Result};
use attlas_num::tensor::{Tensor, cp, khatri_rao, kronecker, tucker};
use std::sync::Arc;

/// Matrices of some roles in all requested layers, as one tensor.
#[derive(Clone, Debug)]
pub struct HeadStack {
    /// The matrices, roles first, in blocks (head, width of a head) × model width.
    pub stack: Stack,
    /// Layers, heads, width of a head, model width; in order 5 preceded by roles.
    pub shape: Vec<usize>,
}

/// Decomposition of a [`HeadStack`], with blocks $B (\sum_k a_{ik} G_k) C^\top$.
#[derive(Clone, Debug)]
pub struct HeadFactors {
    /// Weights of the cores, one row per block.
    pub a: Mat<f32>,
    /// Basis of heads and their widths.
    pub b: Mat<f32>,
    /// Basis of the model's width.
    pub c: Mat<f32>,
    /// Cores; none for CP, where `a` holds the diagonals.
    pub cores: Vec<Mat<f32>>,
    /// Relative Frobenius error over the whole tensor.
    pub rel_error: f64,
}

/// Builds the tensors of a request, of order 4 or 5. Refuses feed-forward matrices, which have no heads, and moments of
/// inputs.
pub fn head_stacks(
    request: &Request<'_>,
    layers: &[usize],
    order: usize,
    id: &str,
) -> Result<Vec<HeadStack>> {
    let (network, s) = (request.network, request.network.shape());
    let slots = request.slots(layers, Role::in_attention)?;
    let mut reasons = Vec::new();
    if slots.iter().any(|slot| !slot.role.in_attention()) {
        reasons
            .push(format!("order = {order} has a mode for heads: matrices can only be those of attention"));
    }
    if slots.iter().any(|&slot| network.moments(slot).is_some()) {
        reasons.push(format!("order = {order} is fitted to the weights alone, without a calibration text"));
    }
    if !reasons.is_empty() {
        return Err(Error::Unsupported { method: id.into(), reasons });
    }
    let sizes = |role: Role| match role {
        Role::Query => (s.n_heads, s.d),
        Role::Key => (s.n_kv_heads, s.d),
        Role::Value => (s.n_kv_heads, s.d_v),
        _ => (s.n_heads, s.d_v),
    };
    let mut groups: Vec<Vec<Role>> = Vec::new();
    for role in Role::ALL.into_iter().filter(|&role| slots.contains(&Slot { layer: layers[0], role })) {
        match groups.iter_mut().find(|g| order == 5 && sizes(g[0]) == sizes(role)) {
            Some(group) => group.push(role),
            None => groups.push(vec![role]),
        }
    }
    let tensor = |roles: Vec<Role>| {
        let (heads, width) = sizes(roles[0]);
        let places = roles.iter().flat_map(|&role| layers.iter().map(move |&layer| Slot { layer, role }));
        let members =
            places.map(|slot| Member { slot, turned: slot.role != Role::Output, slices: 1 }).collect();
        let name = roles.iter().map(|r| r.name()).collect::<Vec<_>>().join("+");
        let mut shape = vec![layers.len(), heads, width, s.d_model];
        if order == 5 {
            shape.insert(0, roles.len());
        }
        HeadStack { stack: Stack { name, shape: (heads * width, s.d_model), members }, shape }
    };
    Ok(groups.into_iter().map(tensor).collect())
}

impl HeadStack {
    fn tensor(&self, blocks: &[Mat<f32>], id: &str) -> Result<Tensor<f32>> {
        let numbers: Vec<f32> = blocks.iter().flat_map(|b| b.data()).copied().collect();
        Tensor::new(&self.shape, numbers).map_err(|e| refused(id, e))
    }

    /// Returns the number of modes before heads, head widths and the model's width.
    fn outer(&self) -> usize {
        self.shape.len() - 3
    }

    /// Computes a Tucker decomposition; `ranks` are those of layers, heads, head widths and the model's width, each
    /// lowered to the mode's size. All roles are kept.
    pub fn tucker(
        &self,
        blocks: &[Mat<f32>],
        ranks: Option<[usize; 4]>,
        rel_error: f64,
        options: &tucker::Options,
        id: &str,
    ) -> Result<HeadFactors> {
        let ranks = match ranks {
            None => tucker::Ranks::RelError(rel_error),
            Some(ranks) => {
                let mut given = self.shape.clone();
                let last = given.len() - 4;
                given[last..].iter_mut().zip(ranks).for_each(|(n, r)| *n = r.min(*n));
                tucker::Ranks::Given(given)
            }
        };
        // Roles are few and differ: their mode is not compressed.
        let modes = (self.shape.len() == 5).then(|| (1..5).collect());
        let options = tucker::Options { modes, ..options.clone() };
        let fit =
            tucker::decompose(&self.tensor(blocks, id)?, &ranks, &options).map_err(|e| refused(id, e))?;
        let basis = |m: usize| fit.tucker.factors[m].clone().unwrap_or_else(|| Mat::identity(self.shape[m]));
        let outer = self.outer();
        let core = &fit.tucker.core;
        let (rows, cols) = (core.shape()[outer] * core.shape()[outer + 1], core.shape()[outer + 2]);
        let cores = core.data().chunks_exact((rows * cols).max(1));
        Ok(HeadFactors {
            a: (1..outer).fold(basis(0), |a, m| kronecker(&a, &basis(m))),
            b: kronecker(&basis(outer), &basis(outer + 1)),
            c: basis(outer + 2),
            cores: cores.map(|x| Mat::from_vec(x.to_vec(), rows, cols)).collect(),
            rel_error: fit.rel_error,
        })
    }

    /// Computes a sum of `rank` outer products.
    pub fn cp(
        &self,
        blocks: &[Mat<f32>],
        rank: usize,
        options: &cp::Options,
        id: &str,
    ) -> Result<HeadFactors> {
        let tensor = self.tensor(blocks, id)?.cast::<f64>();
        let fit = cp::decompose(&tensor, rank, options).map_err(|e| refused(id, e))?;
        let factors = fit.cp.absorb_weights().factors;
        let outer = self.outer();
        let joined = |range: std::ops::Range<usize>| -> Result<Mat<f32>> {
            let mut product = factors[range.start].clone();
            for m in range.skip(1) {
                product = khatri_rao(&product, &factors[m]).map_err(|e| refused(id, e))?;
            }
            Ok(product.cast())
        };
        Ok(HeadFactors {
            a: joined(0..outer)?,
            b: joined(outer..outer + 2)?,
            c: factors[outer + 2].cast(),
            cores: Vec::new(),
            rel_error: fit.rel_error,
        })
    }
}

impl HeadFactors {
    /// Returns the maps of all matrices of the tensor, in their order.
    pub fn products(self, stack: &Stack) -> Vec<Product> {
        let [a, b, c] = [self.a, self.b, self.c].map(Arc::new);
        let cores = Arc::new(self.cores);
        let core = |row: usize| match cores.is_empty() {
            true => Values::Diagonal { table: a.clone(), row },
            false => Values::Mixture { cores: cores.clone(), weights: a.clone(), rows: vec![row] },
        };
        stack.members.iter().enumerate().map(|(row, m)| m.product(&b, core(row), &c)).collect()
    }
}

/// Decomposes tensors one at a time and replaces each matrix by `finish` of its product.
pub fn rewrite(
    request: &Request<'_>,
    stacks: &[HeadStack],
    decompose: impl Fn(&HeadStack, &[Mat<f32>]) -> Result<HeadFactors>,
    finish: impl Fn(Product) -> Product,
) -> Result<Rewritten> {
    let mut out = Rewritten::default();
    for (i, heads) in stacks.iter().enumerate() {
        let factors = decompose(heads, &heads.stack.blocks(request.network)?)?;
        let (rank, rel_error) = (factors.b.cols().max(factors.c.cols()), factors.rel_error);
        let products: Vec<Product> = factors.products(&heads.stack).into_iter().map(&finish).collect();
        let sizes: Vec<String> = heads.shape.iter().map(usize::to_string).collect();
        out.losses.push(Loss {
            what: format!("{} of {}", sizes.join("x"), heads.stack.name),
            rank,
            rel_error,
            seen_error: None,
            before: heads.stack.numbers(),
            after: parameters(&products),
        });
        out.maps.extend(heads.stack.members.iter().map(|m| m.slot).zip(products));
        (request.progress)(i + 1, stacks.len());
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::super::network::Network;
    use super::super::relative_error;
    use super::super::tests::{Toy, request};
    use super::*;
    use crate::Options;
    use crate::conversions::{trawl, tucker as tucker_conversion};

    fn run(conversion: &crate::conversions::Conversion, request: &Request<'_>) -> Result<Rewritten> {
        let crate::conversions::Run::Matrices(run) = conversion.run else { panic!("{}", conversion.id) };
        run(request)
    }

    #[test]
    fn full_ranks_reproduce_every_matrix_of_attention() {
        for kv_heads in [4, 2] {
            let toy = Toy { layers: 3, kv_heads, ..Toy::default() };
            for order in [4, 5] {
                let options = Options::new().with("order", order).with("rank", 8).with("layer_rank", 3);
                let all = run(&tucker_conversion::CONVERSION, &request(&toy, &options)).unwrap();
                assert_eq!(all.maps.len(), 12, "attention alone has heads");
                for (slot, map) in &all.maps {
                    let w = toy.map(*slot).unwrap().weight;
                    assert!(relative_error(&w, &map.dense()) < 1e-5, "order {order}: {slot}");
                }
                let names: Vec<&str> = all.losses.iter().map(|l| l.what.as_str()).collect();
                match (order, kv_heads) {
                    (5, 4) => assert_eq!(names, ["4x3x4x2x8 of q+k+v+o"]),
                    (5, _) => assert_eq!(names, ["2x3x4x2x8 of q+o", "2x3x2x2x8 of k+v"]),
                    _ => assert_eq!((names.len(), names[0]), (4, "3x4x2x8 of q")),
                }
            }
        }
    }

    /// Matrices that form an outer product of roles, layers, heads and widths: one term of order 5.
    struct Separable(Toy);

    impl Network for Separable {
        fn shape(&self) -> crate::layer::LayerShape {
            self.0.shape()
        }
        fn n_layers(&self) -> usize {
            self.0.layers
        }
        fn size(&self, slot: Slot) -> Option<(usize, usize)> {
            self.0.size(slot)
        }
        fn map(&self, slot: Slot) -> Result<crate::layer::Dense> {
            let size = (1.0 + slot.role as usize as f32) * (0.5 + slot.layer as f32);
            // Row (h, e) and column j of a block.
            let block = |i: usize, j: usize| {
                let (h, e) = ((i / 2) as f32, (i % 2) as f32);
                size * (1.0 + h) * (0.7 - e) * (0.3 * j as f32).cos()
            };
            let turned = slot.role == Role::Output;
            let weight = Mat::from_fn(8, 8, |i, j| if turned { block(j, i) } else { block(i, j) });
            Ok(crate::layer::Dense::new(weight))
        }
        fn rope(&self) -> Option<attlas_num::rope::Rope> {
            None
        }
        fn obstacles(&self) -> Vec<String> {
            Vec::new()
        }
        fn moments(&self, _: Slot) -> Option<Arc<super::super::moments::Moments>> {
            None
        }
    }

    #[test]
    fn one_term_of_order_five_is_found_by_both_decompositions() {
        let network = Separable(Toy { layers: 3, ..Toy::default() });
        let layers = [0, 1, 2];
        let cp = Options::new()
            .with("target", "attention")
            .with("span", "all")
            .with("order", 5)
            .with("rank", 1)
            .with("keep_factors", true);
        let tucker = Options::new()
            .with("order", 5)
            .with("rank", 1)
            .with("layer_rank", 1)
            .with("head_rank", 1)
            .with("width_rank", 1);
        for (conversion, options, numbers) in [
            // A basis of 8 rows, one of 8 columns, and one number for each of 12 matrices.
            (&trawl::CONVERSION, &cp, 8 + 8 + 12),
            // The same bases, weights of four cores, and the cores.
            (&tucker_conversion::CONVERSION, &tucker, 8 + 8 + 12 * 4 + 4),
        ] {
            let all =
                run(conversion, &Request { layers: Some(&layers), ..request(&network, options) }).unwrap();
            for (slot, map) in &all.maps {
                let w = network.map(*slot).unwrap().weight;
                assert!(relative_error(&w, &map.dense()) < 1e-5, "{}: {slot}", conversion.id);
            }
            assert_eq!((all.maps.len(), parameters(all.maps.values())), (12, numbers), "{}", conversion.id);
            assert!(all.losses[0].rel_error < 1e-5);
        }
    }

    #[test]
    fn more_terms_err_less_and_the_error_is_that_of_the_maps() {
        let toy = Toy { layers: 3, ..Toy::default() };
        let at = |order: usize, rank: usize| {
            let options = Options::new()
                .with("target", "attention")
                .with("span", "all")
                .with("order", order)
                .with("rank", rank);
            run(&trawl::CONVERSION, &Request { layers: Some(&[0, 1, 2]), ..request(&toy, &options) }).unwrap()
        };
        for order in [4, 5] {
            let (few, many) = (at(order, 4), at(order, 24));
            let error = |r: &Rewritten| {
                let square = |w: &Mat<f32>| w.frobenius().powi(2);
                let (mut gap, mut all) = (0.0, 0.0);
                for (slot, map) in &r.maps {
                    let w = toy.map(*slot).unwrap().weight;
                    gap += relative_error(&w, &map.dense()).powi(2) * square(&w);
                    all += square(&w);
                }
                (gap / all).sqrt()
            };
            assert!(error(&many) < 0.9 * error(&few), "{order}: {} {}", error(&many), error(&few));
            if order == 5 {
                assert!((few.losses[0].rel_error / error(&few) - 1.0).abs() < 1e-3);
            }
        }
    }

    #[test]
    fn what_has_no_heads_or_a_text_is_refused() {
        let (toy, seen) = (Toy::default(), Toy { seen: true, ..Toy::default() });
        let options = Options::new().with("order", 4);
        let refused = |network: &Toy, roles: Option<&[Role]>, words: &str| {
            let request = Request { roles, ..request(network, &options) };
            let error = run(&tucker_conversion::CONVERSION, &request).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        };
        refused(&toy, Some(&[Role::Query, Role::Up]), "a mode for heads");
        refused(&seen, None, "without a calibration text");
    }
}
