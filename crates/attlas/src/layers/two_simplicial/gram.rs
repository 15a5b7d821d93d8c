//! The layer of Clift et al. (2020): standard tokens read pairs of a few virtual tokens.
//!
//! The last $M$ rows of the input are virtual. One two-simplicial head of width $h$ gives a standard token $i$
//! $$\operatorname{LayerNorm}\Big(\sum_{jk} p_{ijk}\, B(u_j \otimes u_k)\Big),\qquad p_{ijk} \propto e^{\langle p_i, l^1_j, l^2_k\rangle},$$
//! over the $M^2$ pairs of virtual tokens, with $\langle a, b, c\rangle = \lVert (a \cdot b) c - (a \cdot c) b + (b \cdot c) a \rVert$,
//! which only needs inner products, and without a scale. (In the paper the denominator runs over all tokens; its numerator
//! and the authors' code run over virtual ones, and so does this.) A virtual token has $\operatorname{LayerNorm}(u_i)$ in
//! that place. Ordinary heads stand beside it: standard tokens attend to standard tokens, virtual ones to all. Both are
//! concatenated and go through `o`.
//!
//! **Cost.** $4NMh + 8NM^2 + 2NM^2h$ operations for $N$ standard tokens, $2Mh^3 + 2M^2h^2$ for the values of pairs, and
//! the ordinary heads. There is no causal form: virtual tokens see all others, and are seen by all.

use super::{LAYER, Params, Score};
use crate::layer::{Layer, LayerCache, LayerShape, Linear, WeightSpec, Weights};
use crate::layers::common::fold::attend;
use crate::layers::common::rows::head_of;
use crate::layers::common::{
    NoCache, check_io, check_shape, constant, layer_norm, matrix, needed, optional, project, projections,
    refuse, take,
};
use crate::workspace::Context;
use crate::{Cost, Error, Mask, Mat, MatRef, Real, Result, RunInfo, Workspace};
use attlas_num::kernels::{Band, Op, dot, gemm, softmax_in_place};
use attlas_num::par::*;

pub(super) fn weight_specs(s: &LayerShape, p: &Params) -> Vec<WeightSpec> {
    let [q, k, v, o] = projections(["q", "k", "v", "o"], s);
    let mut list = vec![q, k, v, WeightSpec { n_in: o.n_in + p.width, ..o }];
    list.extend(["p", "l1", "l2", "u"].map(|name| needed(name, p.width, s.d_model)));
    // Row (q, r), column s of B; gain, then shift of the norm.
    list.push(needed("b", p.width * p.width, p.width));
    list.push(optional("norm", 2 * p.width, 1));
    list
}

/// The two-simplicial layer over virtual tokens.
#[derive(Debug)]
pub struct Block {
    shape: LayerShape,
    virtual_tokens: usize,
    width: usize,
    scale: f32,
    q: Box<dyn Linear>,
    k: Box<dyn Linear>,
    v: Box<dyn Linear>,
    p: Box<dyn Linear>,
    l: [Box<dyn Linear>; 2],
    u: Box<dyn Linear>,
    b: Mat<f32>,
    norm: Option<Vec<f32>>,
    o: Box<dyn Linear>,
}

impl Block {
    /// Makes the layer from its weights `q`, `k`, `v` of the ordinary heads, `p`, `l1`, `l2`, `u`, `b` and, if given,
    /// `norm` of the two-simplicial one, and `o`.
    pub fn new(shape: LayerShape, params: Params, mut weights: Weights) -> Result<Self> {
        params.validate()?;
        check_shape(&shape)?;
        if params.form != Score::Gram {
            return refuse(LAYER.id, "virtual tokens belong to form = gram");
        }
        let norm = weights.remove("norm").map(|w| constant(&*w));
        let mut take = |name| take(&mut weights, name);
        Ok(Self {
            shape,
            virtual_tokens: params.virtual_tokens,
            width: params.width,
            scale: params.scale.unwrap_or(1.0) as f32,
            q: take("q")?,
            k: take("k")?,
            v: take("v")?,
            p: take("p")?,
            l: [take("l1")?, take("l2")?],
            u: take("u")?,
            b: matrix(&*take("b")?),
            norm,
            o: take("o")?,
        })
    }

    /// Computes the part of the two-simplicial head, `tokens × width`.
    fn simplicial(&self, x: MatRef<'_, f32>, cx: Context<'_>) -> Result<Vec<f32>> {
        let standard = x.rows() - self.virtual_tokens;
        let (tokens, others) = (x.sub_rows(0..standard), x.sub_rows(standard..x.rows()));
        let p = project(&*self.p, tokens, cx);
        let [l1, l2, u] = [&self.l[0], &self.l[1], &self.u].map(|w| project(&**w, others, cx));
        let mine = |data| MatRef::new(data, self.virtual_tokens, self.width);
        let read = gram_in(
            MatRef::new(&p, standard, self.width),
            mine(&l1),
            mine(&l2),
            mine(&u),
            self.b.data(),
            cx,
        )?;
        let mut place = read.into_vec();
        place.extend_from_slice(&u);
        place.chunks_exact_mut(self.width).for_each(|row| layer_norm(row, self.norm.as_deref()));
        Ok(place)
    }
}

impl Layer for Block {
    fn shape(&self) -> LayerShape {
        self.shape
    }

    fn parameters(&self) -> usize {
        let maps = [&self.q, &self.k, &self.v, &self.p, &self.l[0], &self.l[1], &self.u, &self.o];
        let norm = self.norm.as_ref().map_or(0, Vec::len);
        maps.iter().map(|w| w.parameters()).sum::<usize>() + self.b.data().len() + norm
    }

    fn cache_elements(&self) -> usize {
        0
    }

    fn new_cache(&self) -> Box<dyn LayerCache> {
        Box::new(NoCache)
    }

    fn forward(
        &self,
        _: MatRef<'_, f32>,
        _: &mut dyn LayerCache,
        _: &mut [f32],
        _: &mut Workspace,
    ) -> Result<RunInfo> {
        refuse(LAYER.id, "the gram form is not causal: virtual tokens see all others and are seen by all")
    }

    fn forward_all(&self, x: MatRef<'_, f32>, out: &mut [f32], ws: &mut Workspace) -> Result<RunInfo> {
        let (s, n, m) = (&self.shape, x.rows(), self.virtual_tokens);
        check_io(x, out, s.d_model)?;
        if n < m {
            return refuse(LAYER.id, format!("{n} rows, of which the last {m} should be virtual tokens"));
        }
        ws.install(|cx| {
            let [q, k, v] = [&self.q, &self.k, &self.v].map(|w| project(&**w, x, cx));
            let parts: Vec<Vec<f32>> = (0..s.n_heads)
                .into_par_iter()
                .map(|h| {
                    let g = h * s.n_kv_heads / s.n_heads;
                    let q = head_of(&q, n, s.n_heads, s.d, h);
                    let (k, v) =
                        (head_of(&k, n, s.n_kv_heads, s.d, g), head_of(&v, n, s.n_kv_heads, s.d_v, g));
                    let see = |rows: std::ops::Range<usize>, keys: usize| {
                        let (k, v) = (k.sub_rows(0..keys), v.sub_rows(0..keys));
                        attend(q.sub_rows(rows), k, v, self.scale, None, Band::ALL, cx).0
                    };
                    let mut rows = see(0..n - m, n - m);
                    rows.extend(see(n - m..n, n));
                    rows
                })
                .collect();
            let simplicial = self.simplicial(x, cx)?;
            let mut both = Mat::zeros(n, s.n_heads * s.d_v + self.width);
            for i in 0..n {
                let (heads, place) = both.row_mut(i).split_at_mut(s.n_heads * s.d_v);
                for (to, from) in heads.chunks_exact_mut(s.d_v).zip(&parts) {
                    to.copy_from_slice(&from[i * s.d_v..][..s.d_v]);
                }
                place.copy_from_slice(&simplicial[i * self.width..][..self.width]);
            }
            self.o.apply(both.as_ref(), out, cx);
            let ordinary = s.n_heads * ((n - m) * (n - m) + m * n);
            Ok(RunInfo::visited((ordinary + (n - m) * m * m) as u64))
        })
    }

    fn cost(&self, mask: Mask, _: usize, tokens: usize) -> Option<Cost> {
        if mask == Mask::Causal || tokens < self.virtual_tokens {
            return None;
        }
        let (s, m, h) = (&self.shape, self.virtual_tokens as u64, self.width as u64);
        let (all, n) = (tokens as u64, tokens as u64 - m);
        let count = |list: &[&dyn Linear]| list.iter().map(|w| w.parameters()).sum::<usize>() as u64;
        let projections = all * count(&[&*self.q, &*self.k, &*self.v, &*self.o])
            + n * count(&[&*self.p])
            + m * count(&[&*self.l[0], &*self.l[1], &*self.u]);
        let ordinary = 2 * (n * n + m * all) * (s.n_heads * (s.d + s.d_v)) as u64;
        let pairs = 4 * n * m * h + 8 * n * m * m + 2 * n * m * m * h + 2 * m * h * h * h + 2 * m * m * h * h;
        let bytes = 4 * (2 * tokens * s.d_model + self.b.data().len()) as u64;
        Some(Cost { setup_flops: 0, run_flops: 2 * projections + ordinary + pairs, bytes })
    }
}

/// Returns the length $\lVert (a \cdot b) c - (a \cdot c) b + (b \cdot c) a \rVert$ of three vectors, from their inner
/// products: its square is $|a|^2|b|^2|c|^2$ minus the determinant of their Gram matrix.
pub fn unsigned_scalar_triple<T: Real>([ab, bc, ac]: [T; 3], [aa, bb, cc]: [T; 3]) -> T {
    let two = T::ONE + T::ONE;
    let square = ab * ab * cc + bc * bc * aa + ac * ac * bb - two * ab * ac * bc;
    square.max(T::ZERO).sqrt()
}

/// Computes attention over all pairs of a few (virtual) tokens by the length of Clift et al., without a scale.
///
/// `p` are the queries (`n × h`), `l1` and `l2` the keys, `u` the values (`m × h`), and `b` (`h³` numbers, `b[q, r,
/// s]`, row-major) makes a value of a pair: $\sum_{rs} b_{qrs} u_{jr} u_{ks}$. Returns `n × h`.
pub fn gram<T: Real>(
    p: MatRef<'_, T>,
    l1: MatRef<'_, T>,
    l2: MatRef<'_, T>,
    u: MatRef<'_, T>,
    b: &[T],
    ws: &Workspace,
) -> Result<Mat<T>> {
    gram_in(p, l1, l2, u, b, ws.context())
}

fn gram_in<T: Real>(
    p: MatRef<'_, T>,
    l1: MatRef<'_, T>,
    l2: MatRef<'_, T>,
    u: MatRef<'_, T>,
    b: &[T],
    cx: Context<'_>,
) -> Result<Mat<T>> {
    let (m, h) = (u.rows(), u.cols());
    let fits =
        [p.cols(), l1.cols(), l2.cols()].iter().all(|&c| c == p.cols()) && l1.rows() == m && l2.rows() == m;
    if !fits || b.len() != h * h * h {
        return Err(Error::shape(
            "two-simplicial operands",
            format!("{m} keys of one width on both sides and {} numbers in b", h * h * h),
            format!("{} and {} keys, {} numbers", l1.rows(), l2.rows(), b.len()),
        ));
    }
    let product = |x: Op<MatRef<'_, T>>, y: Op<MatRef<'_, T>>| {
        let mut out = Mat::zeros(x.rows(), y.cols());
        let cols = y.cols();
        gemm(cx.schedule.isa, T::ONE, x, y, T::ZERO, out.data_mut(), cols, cx.scratch);
        out
    };
    // B(u_j ⊗ u_k): rows (q, r) times u_k, then times u_j.
    let half = product(Op::N(MatRef::new(b, h * h, h)), Op::T(u));
    let mut values = Mat::zeros(m * m, h);
    for j in 0..m {
        for k in 0..m {
            for q in 0..h {
                let s: T = (0..h).map(|r| half[(q * h + r, k)] * u.at(j, r)).sum();
                values[(j * m + k, q)] = s;
            }
        }
    }
    let (pl, pk, lk) =
        (product(Op::N(p), Op::T(l1)), product(Op::N(p), Op::T(l2)), product(Op::N(l1), Op::T(l2)));
    let squares = |x: MatRef<'_, T>| x.iter_rows().map(|r| dot(r, r)).collect::<Vec<T>>();
    let (pp, ll, kk) = (squares(p), squares(l1), squares(l2));
    let mut weights = Mat::zeros(p.rows(), m * m);
    for i in 0..p.rows() {
        for j in 0..m {
            for k in 0..m {
                let inner = [pl[(i, j)], lk[(j, k)], pk[(i, k)]];
                weights[(i, j * m + k)] = unsigned_scalar_triple(inner, [pp[i], ll[j], kk[k]]);
            }
        }
        softmax_in_place(weights.row_mut(i));
    }
    Ok(product(Op::N(weights.as_ref()), Op::N(values.as_ref())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layers::common::third::tests as pairs;
    use crate::layers::testing::{assert_close, forward_all, random, random_layer, random_weights};
    use crate::{Options, layer::LayerKind};

    const SHAPE: LayerShape = LayerShape { d_model: 10, n_heads: 4, n_kv_heads: 2, d: 3, d_v: 5 };
    static KIND: &LayerKind = &LAYER;

    fn options(virtual_tokens: usize, width: usize) -> Options {
        Options::new().with("form", "gram").with("virtual_tokens", virtual_tokens).with("width", width)
    }

    /// Computes the layer by its definition, token by token and pair by pair, in double precision.
    fn defined(x: &Mat<f32>, m: usize, width: usize) -> Vec<f32> {
        let s = &SHAPE;
        let specs = (KIND.weights)(s, &options(m, width)).unwrap();
        let weight = |name: &str| {
            let spec = specs.iter().find(|w| w.name == name).unwrap();
            random(name, spec.n_out, spec.n_in).cast::<f64>()
        };
        let x = x.cast::<f64>();
        let (n, standard) = (x.rows(), x.rows() - m);
        let of = |name: &str| attlas_num::linalg::matmul_nt(x.as_ref(), weight(name).as_ref());
        let (q, k, v) = (of("q"), of("k"), of("v"));
        let (p, l1, l2, u) = (of("p"), of("l1"), of("l2"), of("u"));
        let (b, norm) = (weight("b"), weight("norm"));
        let softmax = |logits: Vec<f64>| {
            let total: f64 = logits.iter().map(|l| l.exp()).sum();
            logits.into_iter().map(|l| l.exp() / total).collect::<Vec<f64>>()
        };
        let normed = |row: Vec<f64>| {
            let mean = row.iter().sum::<f64>() / width as f64;
            let variance = row.iter().map(|r| (r - mean).powi(2)).sum::<f64>() / width as f64;
            let of = |(e, r): (usize, f64)| {
                (r - mean) / (variance + 1e-5).sqrt() * norm[(e, 0)] + norm[(width + e, 0)]
            };
            row.into_iter().enumerate().map(of).collect::<Vec<f64>>()
        };
        // ‖(a·b)c − (a·c)b + (b·c)a‖ by its definition.
        let length = |a: &[f64], b: &[f64], c: &[f64]| {
            let (ab, ac, bc) = (dot(a, b), dot(a, c), dot(b, c));
            let square = |e: usize| (ab * c[e] - ac * b[e] + bc * a[e]).powi(2);
            (0..a.len()).map(square).sum::<f64>().sqrt()
        };
        let mut both = Mat::zeros(n, s.n_heads * s.d_v + width);
        for i in 0..n {
            let seen = if i < standard { standard } else { n };
            for h in 0..s.n_heads {
                let g = h / 2;
                let logit = |j: usize| dot(&q.row(i)[h * 3..][..3], &k.row(j)[g * 3..][..3]);
                let w = softmax((0..seen).map(logit).collect());
                for e in 0..5 {
                    both[(i, h * 5 + e)] = (0..seen).map(|j| w[j] * v[(j, g * 5 + e)]).sum();
                }
            }
            let place = if i < standard {
                let all: Vec<(usize, usize)> =
                    (standard..n).flat_map(|j| (standard..n).map(move |k| (j, k))).collect();
                let w = softmax(all.iter().map(|&(j, k)| length(p.row(i), l1.row(j), l2.row(k))).collect());
                let value = |e: usize, j: usize, k: usize| -> f64 {
                    let term = |r: usize, t: usize| b[(e * width + r, t)] * u[(j, r)] * u[(k, t)];
                    (0..width).flat_map(|r| (0..width).map(move |t| (r, t))).map(|(r, t)| term(r, t)).sum()
                };
                let of = |e: usize| all.iter().zip(&w).map(|(&(j, k), w)| w * value(e, j, k)).sum();
                (0..width).map(of).collect()
            } else {
                u.row(i).to_vec()
            };
            both.row_mut(i)[s.n_heads * s.d_v..].copy_from_slice(&normed(place));
        }
        attlas_num::linalg::matmul_nt(both.as_ref(), weight("o").as_ref()).cast::<f32>().into_vec()
    }

    #[test]
    fn the_block_is_its_definition() {
        for (n, m, width) in [(9, 2, 6), (5, 3, 4), (2, 2, 3), (12, 1, 7)] {
            let x = random("x", n, 10);
            let layer = random_layer(KIND, &SHAPE, &options(m, width));
            assert_close(&forward_all(&*layer, &x), &defined(&x, m, width));
        }
    }

    #[test]
    fn standard_tokens_hear_virtual_ones_through_their_pairs_only() {
        let m = 2;
        let specs = (KIND.weights)(&SHAPE, &options(m, 4)).unwrap();
        let layer = |deaf: bool| {
            let mut weights = random_weights(&specs);
            if deaf {
                let o = random("o", 10, 24);
                let cut = Mat::from_fn(10, 24, |i, j| if j < 20 { o[(i, j)] } else { 0.0 });
                weights.insert("o".into(), crate::layers::testing::dense(cut));
            }
            KIND.layer(&SHAPE, &options(m, 4), weights).unwrap()
        };
        let x = random("x", 9, 10);
        let mut y = x.clone();
        y.row_mut(8).iter_mut().for_each(|y| *y += 1.0);
        let moved = |deaf| {
            let layer = layer(deaf);
            let (a, b) = (forward_all(&*layer, &x), forward_all(&*layer, &y));
            let differs = |rows: std::ops::Range<usize>| {
                a[rows.start * 10..rows.end * 10] != b[rows.start * 10..rows.end * 10]
            };
            (differs(0..7), differs(7..9))
        };
        assert_eq!((moved(false), moved(true)), ((true, true), (false, true)));
    }

    #[test]
    fn one_virtual_token_says_the_same_to_everybody_and_order_does_not_matter() {
        // Its one pair has weight 1 whatever the query: without ordinary heads all standard rows are equal.
        let specs = (KIND.weights)(&SHAPE, &options(1, 4)).unwrap();
        let mut weights = random_weights(&specs);
        weights.insert("v".into(), crate::layers::testing::dense(Mat::zeros(10, 10)));
        let layer = KIND.layer(&SHAPE, &options(1, 4), weights).unwrap();
        let rows = forward_all(&*layer, &random("x", 6, 10));
        (1..5).for_each(|i| assert_eq!(rows[..10], rows[i * 10..][..10]));

        let x = random("x", 11, 10);
        let layer = random_layer(KIND, &SHAPE, &options(3, 4));
        // Standard and virtual tokens each among themselves.
        let order = [3, 0, 7, 1, 5, 2, 4, 6, 10, 8, 9];
        let permute =
            |m: &[f32]| order.iter().flat_map(|&t| m[t * 10..][..10].to_vec()).collect::<Vec<f32>>();
        let moved = Mat::from_vec(permute(x.data()), 11, 10);
        assert_close(&forward_all(&*layer, &moved), &permute(&forward_all(&*layer, &x)));
    }

    #[test]
    fn counts_are_those_of_the_page_and_what_has_no_form_is_refused() {
        let layer = random_layer(KIND, &SHAPE, &options(2, 4));
        let specs = (KIND.weights)(&SHAPE, &options(2, 4)).unwrap();
        assert_eq!(layer.parameters(), specs.iter().map(|w| w.n_out * w.n_in).sum::<usize>());
        let (n, m, h) = (30, 2, 4);
        let pairs = 4 * n * m * h + 8 * n * m * m + 2 * n * m * m * h + 2 * m * h * h * h + 2 * m * m * h * h;
        let heads = 2 * (n * n + m * (n + m)) * 4 * 8;
        let maps = 2 * ((n + m) * 10 * (12 + 6 + 10 + 24) + n * 40 + m * 120);
        assert_eq!(layer.cost(Mask::None, 0, 32).unwrap().run_flops, (pairs + heads + maps) as u64);
        assert!(layer.cost(Mask::Causal, 0, 32).is_none() && layer.cost(Mask::None, 0, 1).is_none());
        let mut ws = Workspace::single().unwrap();
        let x = random("x", 4, 10);
        assert!(layer.forward(x.as_ref(), &mut *layer.new_cache(), &mut [0.0; 40], &mut ws).is_err());
        assert!(layer.forward_all(x.as_ref().sub_rows(0..1), &mut [0.0; 10], &mut ws).is_err());
        assert!(Block::new(SHAPE, Params::default(), Weights::new()).is_err());
        let gram = Params { form: Score::Gram, ..Params::default() };
        assert!(super::super::TwoSimplicial::new(SHAPE, gram, Weights::new()).is_err());
    }

    #[test]
    fn the_gram_form_has_the_known_answers() {
        let x = pairs::known_inputs(6, 4, 2.0);
        let b = pairs::fill(16, 4, 6, 1.0);
        let ws = Workspace::single().unwrap();
        let [p, l1, l2, u] = [&x[0], &x[1], &x[2], &x[3]].map(Mat::as_ref);
        let out = gram(p, l1, l2, u, b.data(), &ws).unwrap();
        let first = [0.210028694333, -3.619572216574, 2.255796926733, -3.124602552474];
        let last = [0.386181964603, -2.233516610647, 1.964850108263, -2.477016270790];
        pairs::assert_known(&out, &first, &last, -16.100711177920);
        let logit = |i: usize, j: usize, k: usize| {
            let (a, b, c) = (p.row(i), l1.row(j), l2.row(k));
            unsigned_scalar_triple([dot(a, b), dot(b, c), dot(a, c)], [dot(a, a), dot(b, b), dot(c, c)])
        };
        for (k, want) in [15.875720938507, 13.130301137149, 4.045212854188].into_iter().enumerate() {
            assert!((logit(0, 0, k) - want).abs() < 1e-10);
        }
        let sum: f64 = (0..216).map(|n| logit(n / 36, n / 6 % 6, n % 6)).sum();
        assert!((sum - 2252.1022576442).abs() < 1e-9);
    }

    #[test]
    fn the_triple_length_is_symmetric_and_has_its_simple_values() {
        let triple = |a: [f64; 3], b: [f64; 3], c: [f64; 3]| {
            unsigned_scalar_triple(
                [dot(&a, &b), dot(&b, &c), dot(&a, &c)],
                [dot(&a, &a), dot(&b, &b), dot(&c, &c)],
            )
        };
        let (a, b, c) = ([0.3, -1.0, 0.7], [1.1, 0.2, -0.4], [0.5, 0.6, 0.9]);
        let t = triple(a, b, c);
        for other in [triple(b, a, c), triple(c, b, a), triple(a, c, b), triple(b, c, a)] {
            assert!((t - other).abs() < 1e-14);
        }
        assert_eq!(triple([1.0, 0.0, 0.0], [0.0, 2.0, 0.0], [0.0, 0.0, 3.0]), 0.0);
        assert!((triple([1.0, 0.0, 0.0], [2.0, 0.0, 0.0], [0.0, 3.0, 0.0]) - 6.0).abs() < 1e-14);
    }
}
