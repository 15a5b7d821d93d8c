//! Third-order attention: a query attends to pairs of tokens.
//!
//! **Idea.** Ordinary attention weighs single tokens; here a query weighs pairs $(j, k)$ by a trilinear score, and
//! a pair's value is the product of one value from each. One softmax runs over all pairs jointly.
//!
//! **Math.** $o_i = \sum_{jk} p_{ijk}\, v^1_j \odot v^2_k$ with $p_{ijk} \propto
//! \exp(\tau \sum_l q_{il} k^1_{jl} k^2_{kl})$, or, in the form `strassen`, $\exp(\tau(q_i \cdot k^1_j + k^1_j \cdot
//! k^2_k + k^2_k \cdot q_i))$. A causal token sees the pairs with $j, k \le i$. [`common::third`](super::common::third)
//! evaluates both exactly. `compute = polynomial` replaces the exponential by a polynomial of degree $g$ in the
//! $d$ products $q_l k^1_l k^2_l$: with the monomials $\alpha$ of degree at most $g$,
//! $$P_g(z) = \sum_{|\alpha| \le g} w_\alpha q^\alpha k_1^\alpha k_2^\alpha,\qquad
//! O = \frac{\Phi_Q [(\Phi_1^\top V_1) \odot (\Phi_2^\top V_2)]}{\Phi_Q [(\Phi_1^\top 1) \odot (\Phi_2^\top 1)]},$$
//! rank $r = \binom{d + g}{g}$; no pair is ever formed, and a causal mask is exact because it is a product of two
//! intervals. An even Taylor polynomial is positive everywhere, so the denominator cannot vanish. `compute = random` takes
//! products of random signed sums instead ([`features`]): without bias at any width, but of either sign, so that
//! denominators can cancel; they are guarded, and the record shows how much was left of the smallest.
//!
//! **Reference.** sanford2023, alman2024 (scale $1/d$ there, 1 in the former), liang2024, kozachinskiy2025.
//!
//! **Cost.** Exact: $4 N^3 d$ operations per head (a third of it when causal), a few tiles of memory; a decoding step
//! over $M$ tokens $4 M^2 d$; the cache holds $2(d + d_v)$ numbers per key head and token. The form `strassen` without
//! a mask is $2 N^3 (d_v + 1)$, all of it in matrix products. Polynomial: $O(r\, d_v)$ per token and a state of $2 r
//! (d_v + 1)$ numbers, whatever the length.
//!
//! **Guarantees.** With $|z| \le Z$ the polynomial weights are off by at most
//! $\varepsilon = e^{2Z} Z^{g+1}/(g+1)!$ relatively, and a run is refused where a bound on $Z$ from the norms seen so
//! far makes that larger than `tolerance`. One layer of ordinary attention with $H$ heads of width $m$ in $p$ bits
//! needs $mpH = \Omega(N/\log\log N)$ for the task that one head of this layer solves (quoted: sanford2023).
//!
//! **When to use.** Tasks that relate triples; never at long lengths in the exact form.

pub mod features;

use super::common::rows::{HeadRows, head_of, interleave};
use super::common::third::{Form, Pairwise};
use super::common::{
    check_cross, check_io, check_shape, layer_kind, needed, own, project, projections, refuse, take,
};
use crate::layer::{Layer, LayerCache, LayerShape, Linear, WeightSpec, Weights};
use crate::workspace::Context;
use crate::{Cost, Error, Mask, MatRef, Result, RunInfo, Workspace};
use attlas_num::kernels::Band;
use attlas_num::par::*;
use features::{FeatureSums, Features, chebyshev, relative_error, taylor, taylor_error};

layer_kind! {
    /// Registry entry.
    ThirdOrder {
        id: "third_order",
        title: "Third-order attention: queries attend to pairs of tokens",
        reference: "sanford2023, alman2024, liang2024, kozachinskiy2025",
        weights: |s, p| Ok(weight_specs(s, p)),
        cache_elements: |s, p| Ok(cache_elements(s, p)),
    }
}

crate::choices! {
    /// Score of a pair of keys.
    pub enum Score {
        /// The sum of products of three features.
        Trilinear = "trilinear",
        /// The sum of the three inner products.
        Strassen = "strassen",
    }
}

crate::choices! {
    /// Computation of the sum over pairs.
    pub enum Compute {
        /// Over all pairs.
        Exact = "exact",
        /// Through monomials.
        Polynomial = "polynomial",
        /// Through random features; experimental.
        Random = "random",
    }
}

crate::choices! {
    /// The polynomial that approximates the exponential.
    pub enum Basis {
        /// Its Taylor polynomial at 0.
        Taylor = "taylor",
        /// Its interpolant at Chebyshev nodes.
        Chebyshev = "chebyshev",
    }
}

crate::params! {
    /// Parameters of [`ThirdOrder`].
    pub struct Params {
        /// Factor of the scores; auto is 1/√d. The theory papers use 1 and 1/d.
        scale: Option<f64> = None, in 1e-12..=1e12;
        /// Score of a pair; strassen is exact only.
        form: Score = Score::Trilinear;
        /// Second keys and values equal the first ones; the weights k2 and v2 are then absent.
        tied: bool = false;
        /// Over all pairs, through monomials, or through random features.
        compute: Compute = Compute::Exact;
        /// Degree of the polynomial, even.
        degree: usize = 4, in 2..=20;
        /// The polynomial that approximates the exponential.
        basis: Basis = Basis::Taylor;
        /// Largest |logit| that the Chebyshev polynomial covers; larger ones are refused.
        bound: f64 = 1.0, in 1e-6..=50.0;
        /// Largest relative error of a weight that the polynomial may have, by its bound.
        tolerance: f64 = 0.1, in 0.0..=1.0;
        /// Random features.
        features: usize = 4096, in 1..=1 << 20;
        /// Random stream of the features.
        seed: u64 = 0, in 0..=u64::MAX;
    }
}

fn weight_specs(s: &LayerShape, p: &Params) -> Vec<WeightSpec> {
    let mut list = projections(["q", "k1", "v1", "o"], s).to_vec();
    if !p.tied {
        list.push(needed("k2", s.n_kv_heads * s.d, s.d_model));
        list.push(needed("v2", s.n_kv_heads * s.d_v, s.d_model));
    }
    list
}

fn cache_elements(s: &LayerShape, p: &Params) -> usize {
    match p.compute {
        Compute::Exact => s.n_kv_heads * (s.d + s.d_v) * if p.tied { 1 } else { 2 },
        Compute::Polynomial | Compute::Random => 0,
    }
}

/// The third-order attention layer.
#[derive(Debug)]
pub struct ThirdOrder {
    shape: LayerShape,
    params: Params,
    scale: f64,
    q: Box<dyn Linear>,
    k1: Box<dyn Linear>,
    v1: Box<dyn Linear>,
    second: Option<(Box<dyn Linear>, Box<dyn Linear>)>,
    o: Box<dyn Linear>,
    features: Option<Features>,
}

impl ThirdOrder {
    /// Makes the layer from its weights `q`, `k1`, `v1`, `o`, and `k2`, `v2` unless tied.
    pub fn new(shape: LayerShape, params: Params, mut weights: Weights) -> Result<Self> {
        params.validate()?;
        check_shape(&shape)?;
        let scale = params.scale.unwrap_or(1.0 / (shape.d as f64).sqrt());
        if params.compute != Compute::Exact && params.form == Score::Strassen {
            return refuse(LAYER.id, "polynomials and random features are for the trilinear form");
        }
        let features = match params.compute {
            Compute::Exact => None,
            Compute::Random => Some(Features::random(shape.d, params.features, scale, params.seed)),
            Compute::Polynomial => {
                if !params.degree.is_multiple_of(2) {
                    return Err(Error::param(
                        "degree",
                        params.degree,
                        "an even number: odd ones can be negative",
                    ));
                }
                let c = match params.basis {
                    Basis::Taylor => taylor(params.degree),
                    Basis::Chebyshev => chebyshev(params.degree, params.bound),
                };
                Some(Features::monomials(shape.d, &c, scale)?)
            }
        };
        let second =
            if params.tied { None } else { Some((take(&mut weights, "k2")?, take(&mut weights, "v2")?)) };
        let mut take = |name| take(&mut weights, name);
        let (q, k1, v1, o) = (take("q")?, take("k1")?, take("v1")?, take("o")?);
        Ok(Self { shape, params, scale, q, k1, v1, second, o, features })
    }

    /// Projects new tokens to queries, and to keys and values of both sides (the second `None` if tied).
    fn project(&self, x: MatRef<'_, f32>, cx: Context<'_>) -> Projected {
        let second = self.second.as_ref().map(|(k, v)| (project(&**k, x, cx), project(&**v, x, cx)));
        Projected {
            q: project(&*self.q, x, cx),
            first: (project(&*self.k1, x, cx), project(&*self.v1, x, cx)),
            second,
        }
    }

    fn attend(
        &self,
        cache: &Exact,
        q: &[f32],
        tokens: usize,
        band: Band,
        cx: Context<'_>,
    ) -> (Vec<Vec<f32>>, u64) {
        let s = &self.shape;
        let form = if self.params.form == Score::Strassen { Form::Strassen } else { Form::Trilinear };
        let parts: Vec<(Vec<f32>, u64)> = (0..s.n_heads)
            .into_par_iter()
            .map(|h| {
                let g = h * s.n_kv_heads / s.n_heads;
                let p = Pairwise {
                    q: head_of(q, tokens, s.n_heads, s.d, h),
                    k1: cache.k1.head(g),
                    v1: cache.v1.head(g),
                    k2: cache.second().0.head(g),
                    v2: cache.second().1.head(g),
                    scale: self.scale as f32,
                    band1: band,
                    band2: band,
                    form,
                };
                let mut out = vec![0.0; tokens * s.d_v];
                p.run(&mut out, &mut vec![0.0; tokens], cx);
                (out, p.pairs())
            })
            .collect();
        let pairs = parts.iter().map(|p| p.1).sum();
        (parts.into_iter().map(|p| p.0).collect(), pairs)
    }

    /// Computes the outputs of `x` with first keys and values from one sequence and second ones from another, of any
    /// lengths, without a mask: attention to pairs of tokens of two views (Cao et al.). Exact only; refused if keys are
    /// tied.
    pub fn forward_views(
        &self,
        x: MatRef<'_, f32>,
        first: MatRef<'_, f32>,
        second: MatRef<'_, f32>,
        out: &mut [f32],
        ws: &mut Workspace,
    ) -> Result<RunInfo> {
        if self.second.is_none() {
            return refuse(LAYER.id, "a second view needs second keys: tied = false");
        }
        self.attend_to(x, first, second, out, ws)
    }

    fn attend_to(
        &self,
        x: MatRef<'_, f32>,
        first: MatRef<'_, f32>,
        second: MatRef<'_, f32>,
        out: &mut [f32],
        ws: &mut Workspace,
    ) -> Result<RunInfo> {
        let s = &self.shape;
        check_cross(x, first, out, s.d_model)?;
        check_cross(x, second, out, s.d_model)?;
        if self.features.is_some() {
            return refuse(LAYER.id, "other sequences are attended to over all pairs: compute = exact");
        }
        ws.install(|cx| {
            let pair = |k: &dyn Linear, v: &dyn Linear, y| (project(k, y, cx), project(v, y, cx));
            let y = Projected {
                q: project(&*self.q, x, cx),
                first: pair(&*self.k1, &*self.v1, first),
                second: self.second.as_ref().map(|(k2, v2)| pair(&**k2, &**v2, second)),
            };
            let mut all = Exact::new(s, self.second.is_none());
            all.append(&y);
            let (parts, pairs) = self.attend(&all, &y.q, x.rows(), Band::ALL, cx);
            let heads = interleave(&parts, x.rows(), s.d_v);
            self.o.apply(MatRef::new(&heads, x.rows(), s.n_heads * s.d_v), out, cx);
            Ok(RunInfo::visited(pairs))
        })
    }

    /// Refuses if the polynomial may be off by more than the tolerance.
    fn check_bound(&self, z: f64) -> Result<Option<f64>> {
        let p = &self.params;
        if p.compute == Compute::Random {
            return Ok(None);
        }
        let eps = match p.basis {
            Basis::Taylor => taylor_error(z, p.degree),
            Basis::Chebyshev if z > p.bound => f64::INFINITY,
            Basis::Chebyshev => relative_error(&chebyshev(p.degree, p.bound), p.bound),
        };
        if eps <= p.tolerance {
            return Ok(Some(eps));
        }
        refuse(
            LAYER.id,
            format!(
                "logits may reach {z:.3} (scale · max‖q‖ · max‖k1‖ · max|k2|), where a polynomial of degree {} is off by \
                 {eps:.3} of a weight, more than tolerance = {}; raise the degree, shorten the vectors or use compute = exact",
                p.degree, p.tolerance
            ),
        )
    }

    fn polynomial(
        &self,
        m: &Features,
        states: &mut [FeatureSums],
        y: &Projected,
        causal: bool,
        tokens: usize,
        cx: Context<'_>,
    ) -> Result<(Vec<f32>, RunInfo)> {
        let s = &self.shape;
        let group = s.n_heads / s.n_kv_heads;
        let (k2, v2) = y.second.as_ref().unwrap_or(&y.first);
        // The states change only after every head is found within the bound.
        let mut largest: f64 = 0.0;
        let mut norms = Vec::new();
        for (g, state) in states.iter().enumerate() {
            let mut n = state.norms;
            for h in g * group..(g + 1) * group {
                n.see_queries(head_of(&y.q, tokens, s.n_heads, s.d, h));
            }
            n.see_keys(
                head_of(&y.first.0, tokens, s.n_kv_heads, s.d, g),
                head_of(k2, tokens, s.n_kv_heads, s.d, g),
            );
            largest = largest.max(self.scale * n.bound());
            norms.push(n);
        }
        let eps = self.check_bound(largest)?;
        let parts: Vec<(Vec<Vec<f32>>, f64)> = states
            .par_iter_mut()
            .zip(norms)
            .enumerate()
            .map(|(g, (state, n))| {
                state.norms = n;
                let sides = [(&y.first.0, &y.first.1), (k2, v2)].map(|(k, v)| {
                    (head_of(k, tokens, s.n_kv_heads, s.d, g), head_of(v, tokens, s.n_kv_heads, s.d_v, g))
                });
                let q: Vec<MatRef<'_, f32>> =
                    (g * group..(g + 1) * group).map(|h| head_of(&y.q, tokens, s.n_heads, s.d, h)).collect();
                m.attend(state, &q, sides, causal, cx)
            })
            .collect();
        let least = parts.iter().map(|p| p.1).fold(1.0, f64::min);
        let heads: Vec<Vec<f32>> = parts.into_iter().flat_map(|p| p.0).collect();
        let mut info = RunInfo::visited((tokens * s.n_heads) as u64 * m.rank() as u64);
        info.rank = Some(m.rank());
        info.figures.insert("largest_logit_bound", largest);
        match eps {
            Some(eps) => info.figures.insert("weight_error_bound", eps),
            None => info.figures.insert("least_denominator", least),
        };
        Ok((interleave(&heads, tokens, s.d_v), info))
    }
}

/// Queries, and keys and values of both sides, each `[tokens, heads, width]`.
struct Projected {
    q: Vec<f32>,
    first: (Vec<f32>, Vec<f32>),
    second: Option<(Vec<f32>, Vec<f32>)>,
}

impl Layer for ThirdOrder {
    fn shape(&self) -> LayerShape {
        self.shape
    }

    fn parameters(&self) -> usize {
        let second = self.second.as_ref().map_or(0, |(k, v)| k.parameters() + v.parameters());
        second + [&self.q, &self.k1, &self.v1, &self.o].iter().map(|w| w.parameters()).sum::<usize>()
    }

    fn cache_elements(&self) -> usize {
        cache_elements(&self.shape, &self.params)
    }

    fn new_cache(&self) -> Box<dyn LayerCache> {
        let s = &self.shape;
        match &self.features {
            None => Box::new(Exact::new(s, self.params.tied)),
            Some(m) => Box::new(Sums {
                states: vec![FeatureSums::new(m.rank(), s.d_v); s.n_kv_heads],
                len: 0,
                lost: false,
            }),
        }
    }

    fn forward(
        &self,
        x: MatRef<'_, f32>,
        cache: &mut dyn LayerCache,
        out: &mut [f32],
        ws: &mut Workspace,
    ) -> Result<RunInfo> {
        let s = &self.shape;
        check_io(x, out, s.d_model)?;
        let tokens = x.rows();
        let heads_width = s.n_heads * s.d_v;
        if let Some(m) = &self.features {
            let cache: &mut Sums = own(cache, LAYER.id)?;
            if cache.lost {
                return refuse(LAYER.id, "tokens cannot be taken back from sums over features");
            }
            return ws.install(|cx| {
                let y = self.project(x, cx);
                let (heads, info) = self.polynomial(m, &mut cache.states, &y, true, tokens, cx)?;
                cache.len += tokens;
                self.o.apply(MatRef::new(&heads, tokens, heads_width), out, cx);
                Ok(info)
            });
        }
        let cache: &mut Exact = own(cache, LAYER.id)?;
        ws.install(|cx| {
            let first = cache.k1.len();
            let y = self.project(x, cx);
            cache.append(&y);
            let (parts, pairs) = self.attend(cache, &y.q, tokens, Band::causal(first as isize), cx);
            self.o.apply(MatRef::new(&interleave(&parts, tokens, s.d_v), tokens, heads_width), out, cx);
            Ok(RunInfo::visited(pairs))
        })
    }

    fn forward_all(&self, x: MatRef<'_, f32>, out: &mut [f32], ws: &mut Workspace) -> Result<RunInfo> {
        let s = &self.shape;
        check_io(x, out, s.d_model)?;
        let tokens = x.rows();
        ws.install(|cx| {
            let y = self.project(x, cx);
            let (heads, info) = match &self.features {
                Some(m) => {
                    let mut states = vec![FeatureSums::new(m.rank(), s.d_v); s.n_kv_heads];
                    self.polynomial(m, &mut states, &y, false, tokens, cx)?
                }
                None => {
                    let mut all = Exact::new(s, self.params.tied);
                    all.append(&y);
                    let (parts, pairs) = self.attend(&all, &y.q, tokens, Band::ALL, cx);
                    (interleave(&parts, tokens, s.d_v), RunInfo::visited(pairs))
                }
            };
            self.o.apply(MatRef::new(&heads, tokens, s.n_heads * s.d_v), out, cx);
            Ok(info)
        })
    }

    fn forward_cross(
        &self,
        x: MatRef<'_, f32>,
        context: MatRef<'_, f32>,
        out: &mut [f32],
        ws: &mut Workspace,
    ) -> Result<RunInfo> {
        self.attend_to(x, context, context, out, ws)
    }

    fn cost(&self, mask: Mask, cached: usize, tokens: usize) -> Option<Cost> {
        let s = &self.shape;
        let projections = 2 * (tokens * self.parameters()) as u64;
        let pairs: u64 = match mask {
            Mask::None => (tokens as u64).pow(3),
            Mask::Causal => (cached + 1..=cached + tokens).map(|n| (n as u64).pow(2)).sum(),
        };
        let heads = s.n_heads as u64;
        let run_flops = match &self.features {
            // Products of three matrices of scores, which are formed once each.
            None if self.params.form == Score::Strassen && mask == Mask::None => {
                let squares = 3 * (tokens as u64).pow(2) * s.d as u64;
                projections + 2 * heads * (pairs * (s.d_v + 1) as u64 + squares)
            }
            None => projections + 2 * pairs * heads * (s.d + s.d_v) as u64,
            Some(m) => {
                let work = match self.params.compute {
                    Compute::Random => 3 * (m.work() + m.rank() * s.d_v),
                    _ => m.rank() * (s.d * self.params.degree / 2 + 3 * s.d_v),
                };
                projections + 2 * tokens as u64 * work as u64 * heads
            }
        };
        let bytes = 4 * ((cached + tokens) * self.cache_elements() + 2 * tokens * s.d_model) as u64;
        Some(Cost { setup_flops: 0, run_flops, bytes })
    }
}

/// Keys and values of both sides.
#[derive(Debug)]
struct Exact {
    k1: HeadRows,
    v1: HeadRows,
    second: Option<(HeadRows, HeadRows)>,
}

impl Exact {
    fn new(s: &LayerShape, tied: bool) -> Self {
        let rows = |width| HeadRows::new(s.n_kv_heads, width);
        Self { k1: rows(s.d), v1: rows(s.d_v), second: (!tied).then(|| (rows(s.d), rows(s.d_v))) }
    }

    fn second(&self) -> (&HeadRows, &HeadRows) {
        self.second.as_ref().map_or((&self.k1, &self.v1), |(k, v)| (k, v))
    }

    fn append(&mut self, y: &Projected) {
        self.k1.append(&y.first.0);
        self.v1.append(&y.first.1);
        if let (Some((k, v)), Some((new_k, new_v))) = (&mut self.second, &y.second) {
            k.append(new_k);
            v.append(new_v);
        }
    }
}

impl LayerCache for Exact {
    fn len(&self) -> usize {
        self.k1.len()
    }

    fn truncate(&mut self, len: usize) {
        let second = self.second.iter_mut().flat_map(|(k, v)| [k, v]);
        [&mut self.k1, &mut self.v1].into_iter().chain(second).for_each(|rows| rows.truncate(len));
    }

    fn bytes(&self) -> usize {
        let second = self.second.as_ref().map_or(0, |(k, v)| k.bytes() + v.bytes());
        self.k1.bytes() + self.v1.bytes() + second
    }
}

/// Sums over features, one state for each key head.
#[derive(Debug)]
struct Sums {
    states: Vec<FeatureSums>,
    len: usize,
    /// True if tokens were taken back, which sums cannot do.
    lost: bool,
}

impl LayerCache for Sums {
    fn len(&self) -> usize {
        self.len
    }

    fn truncate(&mut self, len: usize) {
        if len == 0 {
            self.states.iter_mut().for_each(FeatureSums::clear);
            (self.len, self.lost) = (0, false);
        } else if len < self.len {
            (self.len, self.lost) = (len, true);
        }
    }

    fn bytes(&self) -> usize {
        self.states.iter().map(|s| 8 * 2 * (s.sides[0].len())).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{
        assert_close, check_causal, forward, forward_all, random, random_layer, random_weights,
    };
    use super::*;
    use crate::{Mat, Options};

    const SHAPE: LayerShape = LayerShape { d_model: 20, n_heads: 4, n_kv_heads: 2, d: 6, d_v: 5 };

    #[test]
    fn keeps_what_every_causal_layer_keeps() {
        check_causal(&LAYER, &SHAPE, &Options::new(), 23);
        check_causal(&LAYER, &SHAPE, &Options::new().with("tied", true).with("form", "strassen"), 14);
        check_causal(&LAYER, &SHAPE, &Options::new().with("compute", "polynomial").with("scale", 0.05), 14);
        let random = Options::new().with("compute", "random").with("scale", 0.05).with("features", 300);
        check_causal(&LAYER, &SHAPE, &random, 14);
    }

    #[test]
    fn counts_are_those_of_the_page() {
        let s = LayerShape { n_kv_heads: 4, d_v: 6, ..SHAPE };
        let layer = random_layer(&LAYER, &s, &Options::new());
        assert_eq!(layer.parameters(), 5 * 20 * 6 * 4 + 20 * 4 * 6);
        assert_eq!(layer.cache_elements(), 4 * 6 * 4);
        let n = 50u64;
        let projections = 2 * n * layer.parameters() as u64;
        assert_eq!(layer.cost(Mask::None, 0, 50).unwrap().run_flops, projections + 4 * n.pow(3) * 6 * 4);
        let step = layer.cost(Mask::Causal, 99, 1).unwrap().run_flops;
        assert_eq!(step, 2 * layer.parameters() as u64 + 4 * 100 * 100 * 6 * 4);
    }

    #[test]
    fn tied_keys_equal_two_equal_projections() {
        let x = random("x", 17, 20);
        let tied = random_layer(&LAYER, &SHAPE, &Options::new().with("tied", true));
        let mut weights = random_weights(&(LAYER.weights)(&SHAPE, &Options::new()).unwrap());
        for (name, from, rows) in [("k2", "k1", 12), ("v2", "v1", 10)] {
            weights.insert(name.into(), super::super::testing::dense(random(from, rows, 20)));
        }
        let full = LAYER.layer(&SHAPE, &Options::new(), weights).unwrap();
        assert_close(&forward(&*tied, &x, &[17]), &forward(&*full, &x, &[17]));
        assert_close(&forward_all(&*tied, &x), &forward_all(&*full, &x));
        assert_eq!(2 * tied.cache_elements(), full.cache_elements());
    }

    #[test]
    fn large_logits_and_large_ranks_are_refused() {
        let options = Options::new().with("compute", "polynomial");
        let mut layer = random_layer(&LAYER, &SHAPE, &options.clone().with("scale", 30.0));
        let x = random("x", 5, 20);
        let mut cache = layer.new_cache();
        let error =
            layer.forward(x.as_ref(), &mut *cache, &mut [0.0; 100], &mut Workspace::single().unwrap());
        assert!(error.unwrap_err().to_string().contains("logits may reach"));
        assert_eq!(cache.len(), 0);
        layer = random_layer(&LAYER, &SHAPE, &options.clone().with("scale", 0.05));
        let mut out = vec![0.0; 100];
        let info = layer.forward_all(x.as_ref(), &mut out, &mut Workspace::single().unwrap()).unwrap();
        assert_eq!(info.rank, Some(210));
        assert!(info.figures["weight_error_bound"] < 0.1);
        assert!(
            Features::monomials(64, &taylor(3), 0.1).is_err()
                && Features::monomials(32, &taylor(3), 0.1).is_ok()
        );
        let random = options.clone().with("compute", "random").with("features", 99).with("scale", 30.0);
        let info = random_layer(&LAYER, &SHAPE, &random)
            .forward_all(x.as_ref(), &mut out, &mut Workspace::single().unwrap())
            .unwrap();
        assert_eq!(info.rank, Some(99));
        assert!(info.figures["least_denominator"] <= 1.0 && out.iter().all(|x| x.is_finite()));
        let odd = Params { compute: Compute::Polynomial, degree: 3, ..Params::default() };
        assert!(ThirdOrder::new(SHAPE, odd, Weights::new()).is_err());
    }

    #[test]
    fn keys_and_values_may_come_from_two_other_sequences() {
        let s = LayerShape { d_model: 10, n_heads: 2, n_kv_heads: 2, d: 4, d_v: 3 };
        let specs = (LAYER.weights)(&s, &Options::new()).unwrap();
        let layer = ThirdOrder::new(s, Params::default(), random_weights(&specs)).unwrap();
        let mut ws = Workspace::single().unwrap();
        let (x, first, second) = (random("x", 9, 10), random("first", 5, 10), random("second", 7, 10));
        let mut run = |x: &Mat<f32>, first: &Mat<f32>, second: &Mat<f32>| {
            let mut out = vec![f32::NAN; x.rows() * 10];
            let info =
                layer.forward_views(x.as_ref(), first.as_ref(), second.as_ref(), &mut out, &mut ws).unwrap();
            (out, info.keys_visited)
        };
        let same = run(&x, &x, &x).0;
        assert_close(&same, &forward_all(&layer, &x));
        let (out, pairs) = run(&x, &first, &second);
        assert_eq!(pairs, 2 * 9 * 5 * 7);
        // Tokens of a view in another order change nothing; another view does.
        let turned = Mat::from_fn(7, 10, |i, j| second[(6 - i, j)]);
        assert_close(&run(&x, &first, &turned).0, &out);
        assert!(out.iter().zip(&same).any(|(a, b)| (a - b).abs() > 1e-3));
        let mut out = vec![0.0; 90];
        let narrow = random("narrow", 5, 9);
        assert!(layer.forward_views(x.as_ref(), narrow.as_ref(), x.as_ref(), &mut out, &mut ws).is_err());
    }
}
