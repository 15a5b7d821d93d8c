//! TRAWL: weights replaced by their low-rank reconstruction, to remove noise.
//!
//! **Idea.** Stack the feed-forward matrices (or the attention matrices) of some layers, decompose the stack at low rank
//! and write the reconstruction back, or keep the factors.
//!
//! **Math.** Feed-forward: $W_{in}$ and $W_{out}^\top$, both $d \times f$, of $k$ layers form a $2k \times d \times f$
//! tensor ($3k$ with a gate); attention: $W_Q, W_K, W_V, W_O$ form a $4k \times d \times d$ one, and with grouped-query
//! attention $W_Q, W_O$ and $W_K, W_V$ one each. CP of rank $R$, or Tucker of ranks (all, $R$, $R$). With moments of
//! the inputs the decomposition is that of the weighted stack (see `shared_factor`), and the diagonal of each matrix is
//! optimal for its own inputs; matrices with inputs as rows and those with inputs as columns then form separate stacks.
//!
//! **Reference.** luo2025; whitening after wang2025svdllm. The published gains come mostly from the feed-forward
//! weights of the last layers, and their rank was chosen on the reported metric itself.
//!
//! **Cost.** Dense weights are written back, so the cost of the model does not change. With `keep_factors` and CP a
//! $d \times f$ matrix costs $2R(d + f)$ operations per token instead of $2df$, and both bases are stored once per
//! stack.
//!
//! **Guarantees.** Full rank changes nothing; equal matrices in a stack need the rank of one. Tested here.
//!
//! **When to use.** As a post-training experiment with a validation metric: sweep layers from the last, and keep a
//! change only if the metric does not fall. `attlas compress --with trawl --accept` does this on held-out text.

use super::common::heads::{HeadStack, head_stacks, rewrite};
use super::common::moments::Seen;
use super::common::network::{Loss, Request, Rewritten, Role};
use super::common::product::{Factor, Product, Values, parameters};
use super::common::refused;
use super::common::stack::{Member, Stack, stacks};
use super::shared_factor::{self, check, stack_error, weighted_stack};
use super::{Conversion, Run};
use crate::{Mat, Result};
use attlas_num::linalg::{Triangle, matmul_tn, psd_factor, solve_triangular_in_place};
use attlas_num::tensor::{Tensor, cp, tucker};
use std::sync::Arc;

/// Registry entry.
pub static CONVERSION: Conversion = Conversion {
    id: "trawl",
    title: "Weights of chosen layers replaced by a low-rank reconstruction",
    reference: "luo2025",
    params: Params::SPECS,
    from: "grouped_query",
    to: "grouped_query",
    reads_text: true,
    run: Run::Matrices(run),
};

crate::choices! {
    /// Stacked matrices.
    pub enum Target {
        /// The feed-forward matrices.
        Ffn = "ffn",
        /// The attention matrices.
        Attention = "attention",
    }
}

crate::choices! {
    /// Layers that are stacked together.
    pub enum Span {
        /// Each layer separately.
        Single = "single",
        /// Runs of consecutive layers.
        Segment = "segment",
        /// All requested layers.
        All = "all",
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
    /// Parameters of [`factor`].
    pub struct Params {
        /// Stacked matrices, if none are named.
        target: Target = Target::Ffn;
        /// Layers that are stacked together.
        span: Span = Span::Single;
        /// The decomposition.
        format: Format = Format::Cp;
        /// Terms of the sum, or vectors of each basis.
        rank: usize = 32, in 1..=1 << 16;
        /// Modes of a stack: 3 (matrices, rows, columns), 4 (layers, heads, width of a head, model width, for each role of
        /// attention), or 5 (also roles, if their numbers of heads are equal).
        order: usize = 3, in 3..=5;
        /// Keep the factors instead of writing dense weights back.
        keep_factors: bool = false;
        /// Maximum number of sweeps.
        iters: usize = 100, in 1..=10_000;
        /// Stop when the relative error changes by less than this.
        tol: f64 = 1e-6, in 0.0..=1.0;
        /// Seed of the random part of a start.
        seed: u64 = 0, in 0..=u64::MAX;
    }
}

/// A stack of blocks with common bases: block $i$ is $B G_i C^\top$.
#[derive(Clone, Debug)]
pub struct Factored {
    /// Basis of the rows of blocks, `rows × R`.
    pub b: Arc<Mat<f32>>,
    /// Basis of the columns of blocks, `columns × R`.
    pub c: Arc<Mat<f32>>,
    /// Cores between the factors, block by block: diagonals for CP, matrices for Tucker.
    pub cores: Vec<Values>,
    /// Relative Frobenius error over the whole stack.
    pub rel_error: f64,
    /// Relative root mean square error of the outputs, if moments of the inputs are known.
    pub seen_error: Option<f64>,
}

impl Factored {
    /// Returns the number of vectors in the larger basis.
    pub fn rank(&self) -> usize {
        self.b.cols().max(self.c.cols())
    }

    /// Returns block `i` as part of a map.
    pub fn product(&self, member: &Member, i: usize) -> Product {
        member.product(&self.b, self.cores[i].clone(), &self.c)
    }
}

/// Decomposes blocks of one shape, for inputs with the given moments if they are known.
pub fn factor(blocks: &[Mat<f32>], params: &Params, seen: Option<&Seen>) -> Result<Factored> {
    params.validate()?;
    check(blocks)?;
    if params.format == Format::Tucker {
        let (iters, tol) = (params.iters, params.tol);
        let of = shared_factor::Params { rank: params.rank, iters, tol, ..Default::default() };
        let shared = shared_factor::factor(blocks, &of, seen)?;
        let (rel_error, seen_error) = (shared.rel_error, shared.seen_error);
        let cores = shared.cores.into_iter().map(|g| Values::Matrix(Arc::new(g))).collect();
        return Ok(Factored { b: shared.b, c: shared.c, cores, rel_error, seen_error });
    }
    let weighted = seen.map(|seen| weighted_stack(blocks, seen, CONVERSION.id)).transpose()?;
    let stack = match &weighted {
        Some((stack, _)) => stack.cast::<f64>(),
        None => Tensor::stack(blocks).map_err(|e| refused(CONVERSION.id, e))?.cast::<f64>(),
    };
    let options =
        cp::Options { iters: params.iters, tol: Some(params.tol), seed: params.seed, ..Default::default() };
    let fit = cp::decompose(&stack, params.rank, &options).map_err(|e| refused(CONVERSION.id, e))?;
    let balanced = fit.cp.absorb_weights();
    let finish = |[table, b, c]: [Mat<f64>; 3], rel_error, seen_error| {
        let [table, b, c] = [table, b, c].map(|m| Arc::new(m.cast::<f32>()));
        let cores = (0..blocks.len()).map(|row| Values::Diagonal { table: table.clone(), row }).collect();
        Factored { b, c, cores, rel_error, seen_error }
    };
    let [table, b, c] = [0, 1, 2].map(|m: usize| balanced.factors[m].clone());
    let (Some(seen), Some((_, root))) = (seen, &weighted) else {
        return Ok(finish([table, b, c], fit.rel_error, None));
    };
    let back = |mut m: Mat<f64>| {
        let cols = m.cols();
        solve_triangular_in_place(Triangle::LowerTransposed, root.as_ref(), m.data_mut(), cols);
        m
    };
    let (b, c) = if seen.turned { (b, back(c)) } else { (back(b), c) };
    let (b, c) = (with_unit_columns(b), with_unit_columns(c));
    let table = diagonals(seen, blocks, &b, &c)?;
    let mut factored = finish([table, b, c], 0.0, None);
    let member =
        Member { slot: super::common::network::Slot { layer: 0, role: Role::Up }, turned: true, slices: 1 };
    // A turned member's map is its block.
    let block = |i: usize| factored.product(&member, i).dense();
    let (rel_error, seen_error) = (stack_error(blocks, block), Some(seen.relative_error(blocks, block)));
    factored.rel_error = rel_error;
    factored.seen_error = seen_error;
    Ok(factored)
}

fn with_unit_columns(mut m: Mat<f64>) -> Mat<f64> {
    for j in 0..m.cols() {
        let norm = (0..m.rows()).map(|i| m[(i, j)].powi(2)).sum::<f64>().sqrt();
        if norm > 0.0 {
            (0..m.rows()).for_each(|i| m[(i, j)] /= norm);
        }
    }
    m
}

/// Computes for each block the optimal diagonal for its own inputs, one per row.
fn diagonals(seen: &Seen, blocks: &[Mat<f32>], b: &Mat<f64>, c: &Mat<f64>) -> Result<Mat<f64>> {
    let (inputs, outputs) = if seen.turned { (c, b) } else { (b, c) };
    let overlap = matmul_tn(outputs.as_ref(), outputs.as_ref());
    let rank = b.cols();
    let mut rows = Vec::with_capacity(blocks.len() * rank);
    for (i, block) in blocks.iter().enumerate() {
        let (mut normal, right) = seen.normal(i, block, inputs, outputs);
        normal.data_mut().iter_mut().zip(overlap.data()).for_each(|(n, o)| *n *= o);
        let goal = Mat::from_fn(rank, 1, |r, _| right[(r, r)]);
        let solved = psd_factor(normal.as_ref()).and_then(|f| f.solve(goal.as_ref()));
        rows.extend_from_slice(solved.map_err(|e| refused(CONVERSION.id, e))?.data());
    }
    Ok(Mat::from_vec(rows, blocks.len(), rank))
}

/// Reconstructs the requested matrices, by default the feed-forward ones of the last layer.
fn run(request: &Request<'_>) -> Result<Rewritten> {
    let params = Params::from_options(request.options)?;
    let layers = request.layers_or(|n| n.checked_sub(1).into_iter().collect())?;
    let written = |product: Product| match params.keep_factors {
        true => product,
        false => Product { factors: vec![Factor::matrix(product.dense())] },
    };
    if params.order > 3 {
        let mut list = Vec::new();
        for layers in spans(&layers, params.span) {
            list.extend(head_stacks(request, layers, params.order, CONVERSION.id)?);
        }
        let all = usize::MAX;
        let cp = cp::Options {
            iters: params.iters,
            tol: Some(params.tol),
            seed: params.seed,
            ..Default::default()
        };
        let hooi = tucker::Options {
            method: tucker::Method::Hooi,
            restarts: 0,
            iters: params.iters,
            tol: params.tol,
            ..Default::default()
        };
        let fit = |heads: &HeadStack, blocks: &[Mat<f32>]| match params.format {
            Format::Cp => heads.cp(blocks, params.rank, &cp, CONVERSION.id),
            Format::Tucker => {
                heads.tucker(blocks, Some([all, all, params.rank, params.rank]), 0.0, &hooi, CONVERSION.id)
            }
        };
        return rewrite(request, &list, fit, written);
    }
    let chosen = |r: Role| r.in_attention() == (params.target == Target::Attention);
    let mut list: Vec<Stack> = Vec::new();
    for layers in spans(&layers, params.span) {
        list.extend(stacks(request.network, &request.slots(layers, chosen)?, false)?);
    }
    let mut out = Rewritten::default();
    for (i, stack) in list.iter().enumerate() {
        let seen = stack.seen(request.network);
        let fit = factor(&stack.blocks(request.network)?, &params, seen.as_ref())?;
        let mut products = Vec::new();
        for (block, member) in stack.members.iter().enumerate() {
            let product = fit.product(member, block);
            products.push(written(product));
        }
        out.losses.push(Loss {
            what: format!("{} of {}", stack.name, layer_names(stack)),
            rank: fit.rank(),
            rel_error: fit.rel_error,
            seen_error: fit.seen_error,
            before: stack.numbers(),
            after: parameters(&products),
        });
        out.maps.extend(stack.members.iter().map(|m| m.slot).zip(products));
        (request.progress)(i + 1, list.len());
    }
    Ok(out)
}

/// Groups the layers that are stacked together.
fn spans(layers: &[usize], span: Span) -> Vec<&[usize]> {
    match span {
        Span::Single => layers.chunks(1).collect(),
        Span::Segment => layers.chunk_by(|a, b| a + 1 == *b).collect(),
        Span::All => vec![layers],
    }
}

fn layer_names(stack: &Stack) -> String {
    let first = stack.members.iter().map(|m| m.slot.layer).min().unwrap_or(0);
    let last = stack.members.iter().map(|m| m.slot.layer).max().unwrap_or(0);
    if first == last { format!("layer {first}") } else { format!("layers {first} to {last}") }
}

#[cfg(test)]
mod tests {
    use super::super::common::network::Network;
    use super::super::common::relative_error;
    use super::super::common::tests::{Toy, request};
    use super::*;
    use crate::Options;
    use crate::layers::testing::random;
    use attlas_num::linalg::matmul;

    #[test]
    fn full_rank_changes_nothing() {
        for toy in [Toy::default(), Toy { kv_heads: 2, ffn: 12, gated: true, ..Toy::default() }] {
            for (target, count) in [("ffn", if toy.gated { 3 } else { 2 }), ("attention", 4)] {
                for keep in [false, true] {
                    let options = Options::new()
                        .with("target", target)
                        .with("format", "tucker")
                        .with("rank", 64)
                        .with("keep_factors", keep);
                    let all = run(&Request { layers: Some(&[0, 1]), ..request(&toy, &options) }).unwrap();
                    assert_eq!(all.maps.len(), 2 * count);
                    for (slot, map) in &all.maps {
                        let w = toy.map(*slot).unwrap().weight;
                        assert!(relative_error(&w, &map.dense()) < 1e-5, "{slot}");
                        assert_eq!(map.factors.len(), if keep { 3 } else { 1 });
                    }
                }
            }
        }
    }

    #[test]
    fn the_last_feed_forward_layer_is_the_default_and_factors_are_what_is_written_back() {
        let toy = Toy::default();
        let written = run(&request(&toy, &Options::new().with("rank", 2))).unwrap();
        assert!(written.maps.keys().all(|s| s.layer == 1 && !s.role.in_attention()));
        assert!(written.losses[0].rel_error > 0.1);
        let kept = Options::new().with("rank", 2).with("keep_factors", true);
        let kept = run(&request(&toy, &kept)).unwrap();
        for (slot, map) in &kept.maps {
            assert!(relative_error(&written.maps[slot].dense(), &map.dense()) < 1e-6);
        }
        // One basis for the rows, one for the columns, a diagonal for each of the two matrices.
        assert_eq!(parameters(kept.maps.values()), 2 * (8 + 16) + 2 * 2);
    }

    #[test]
    fn spans_say_which_layers_are_stacked_together() {
        let layers = [0, 1, 2, 5];
        assert_eq!(spans(&layers, Span::Single).len(), 4);
        assert_eq!(spans(&layers, Span::Segment), [&[0, 1, 2][..], &[5]]);
        assert_eq!(spans(&layers, Span::All), [&layers[..]]);
        let (toy, options) = (Toy::default(), Options::new().with("rank", 2).with("span", "all"));
        let all = run(&Request { layers: Some(&[0, 1]), ..request(&toy, &options) }).unwrap();
        assert_eq!((all.losses.len(), all.losses[0].what.as_str()), (1, "up+down of layers 0 to 1"));
    }

    #[test]
    fn equal_matrices_need_the_rank_of_one() {
        let w = matmul(random("left", 8, 2).as_ref(), random("right", 2, 4).as_ref());
        let params = Params { rank: 2, iters: 2000, tol: 1e-12, ..Params::default() };
        let fit = factor(&vec![w.clone(); 4], &params, None).unwrap();
        assert!(fit.rel_error < 1e-5, "{}", fit.rel_error);
        let slot = super::super::common::network::Slot { layer: 0, role: Role::Up };
        let member = Member { slot, turned: true, slices: 1 };
        assert!(relative_error(&w, &fit.product(&member, 3).dense()) < 1e-5);
        assert!(factor(&[], &params, None).is_err());
    }

    #[test]
    fn moments_of_the_inputs_lower_the_error_of_the_outputs() {
        let toy = Toy { gated: true, ffn: 12, ..Toy::default() };
        let seen = Toy { seen: true, gated: true, ffn: 12, ..Toy::default() };
        for format in ["cp", "tucker"] {
            let options = Options::new().with("format", format).with("rank", 4).with("keep_factors", true);
            let (plain, better) =
                (run(&request(&toy, &options)).unwrap(), run(&request(&seen, &options)).unwrap());
            let names: Vec<&str> = better.losses.iter().map(|l| l.what.as_str()).collect();
            assert_eq!(names, ["gate+up of layer 1", "down of layer 1"]);
            let error = |r: &Rewritten| {
                let of = |(slot, map): (&super::super::common::network::Slot, &Product)| {
                    let m = seen.moments(*slot).unwrap();
                    m.relative_error(&toy.map(*slot).unwrap().weight, &map.dense()).powi(2)
                };
                r.maps.iter().map(of).sum::<f64>()
            };
            assert!(error(&better) < 0.9 * error(&plain), "{format}: {} {}", error(&better), error(&plain));
            let reported: f64 =
                better.losses.iter().zip([2.0, 1.0]).map(|(l, n)| n * l.seen_error.unwrap().powi(2)).sum();
            assert!(
                (reported / error(&better) - 1.0).abs() < 1e-3,
                "{format}: {reported} {}",
                error(&better)
            );
        }
    }
}
