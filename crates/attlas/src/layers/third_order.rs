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
//! intervals. An even Taylor polynomial is positive everywhere, so the denominator cannot vanish.
//!
//! **Reference.** sanford2023, alman2024 (scale $1/d$ there, 1 in the former), liang2024, kozachinskiy2025.
//!
//! **Cost.** Exact: $4 N^3 d$ operations a head (a third of it when causal), a few tiles of memory; a decoding step
//! over $M$ tokens $4 M^2 d$; the cache holds $2(d + d_v)$ numbers a key head and token. Polynomial: $O(r\, d_v)$ a
//! token and a state of $2 r (d_v + 1)$ numbers, whatever the length.
//!
//! **Guarantees.** With $|z| \le Z$ the polynomial weights are off by at most
//! $\varepsilon = e^{2Z} Z^{g+1}/(g+1)!$ relatively, and a run is refused where a bound on $Z$ from the norms seen so
//! far makes that larger than `tolerance`. One layer of ordinary attention with $H$ heads of width $m$ in $p$ bits
//! needs $mpH = \Omega(N/\log\log N)$ for the task that one head of this solves (quoted: sanford2023).
//!
//! **When to use.** Tasks that relate triples; never at long lengths in the exact form.

use super::common::rows::{HeadRows, head_of, interleave};
use super::common::third::{Form, Pairwise};
use super::common::{check_io, check_shape, needed, own, project, refuse, take};
use crate::layer::{Layer, LayerCache, LayerKind, LayerShape, Linear, WeightSpec, Weights};
use crate::workspace::Context;
use crate::{Cost, Error, Mask, MatRef, Result, RunInfo, Workspace};
use attlas_num::kernels::{Band, Op, dot, gemm};
use attlas_num::{Mat, Real};
use rayon::prelude::*;

/// Registry entry.
pub static LAYER: LayerKind = LayerKind {
    id: "third_order",
    title: "Third-order attention: queries attend to pairs of tokens",
    reference: "sanford2023, alman2024, liang2024, kozachinskiy2025",
    params: Params::SPECS,
    weights: |shape, options| Ok(weight_specs(shape, &Params::from_options(options)?)),
    cache_elements: |shape, options| cache_elements(shape, &Params::from_options(options)?),
    build: |shape, options, weights| {
        Ok(Box::new(ThirdOrder::new(*shape, Params::from_options(options)?, weights)?))
    },
};

crate::choices! {
    /// How a pair of keys is scored.
    pub enum Score {
        /// The sum of products of three features.
        Trilinear = "trilinear",
        /// The sum of the three inner products.
        Strassen = "strassen",
    }
}

crate::choices! {
    /// How the sum over pairs is computed.
    pub enum Compute {
        /// Over all pairs.
        Exact = "exact",
        /// Through monomials.
        Polynomial = "polynomial",
    }
}

crate::choices! {
    /// The polynomial that stands for the exponential.
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
        /// Factor of the scores; 1/√d where it is auto. The theory papers use 1 and 1/d.
        scale: Option<f64> = None, in 1e-12..=1e12;
        /// How a pair is scored; strassen is exact only.
        form: Score = Score::Trilinear;
        /// Second keys and values are the first ones: weights k2 and v2 are not there.
        tied: bool = false;
        /// Over all pairs, or through monomials.
        compute: Compute = Compute::Exact;
        /// Degree of the polynomial, even.
        degree: usize = 4, in 2..=20;
        /// The polynomial.
        basis: Basis = Basis::Taylor;
        /// Largest |logit| that the Chebyshev polynomial covers; larger ones are refused.
        bound: f64 = 1.0, in 1e-6..=50.0;
        /// Largest relative error of a weight that the polynomial may have, by its bound.
        tolerance: f64 = 0.1, in 0.0..=1.0;
    }
}

fn weight_specs(s: &LayerShape, p: &Params) -> Vec<WeightSpec> {
    let mut list = vec![
        needed("q", s.n_heads * s.d, s.d_model),
        needed("k1", s.n_kv_heads * s.d, s.d_model),
        needed("v1", s.n_kv_heads * s.d_v, s.d_model),
        needed("o", s.d_model, s.n_heads * s.d_v),
    ];
    if !p.tied {
        list.push(needed("k2", s.n_kv_heads * s.d, s.d_model));
        list.push(needed("v2", s.n_kv_heads * s.d_v, s.d_model));
    }
    list
}

fn cache_elements(s: &LayerShape, p: &Params) -> Result<usize> {
    match p.compute {
        Compute::Exact => Ok(s.n_kv_heads * (s.d + s.d_v) * if p.tied { 1 } else { 2 }),
        Compute::Polynomial => Ok(0),
    }
}

/// The layer.
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
    monomials: Option<Monomials>,
}

impl ThirdOrder {
    /// The layer with its weights `q`, `k1`, `v1`, `o`, and `k2`, `v2` unless tied.
    pub fn new(shape: LayerShape, params: Params, mut weights: Weights) -> Result<Self> {
        params.validate()?;
        check_shape(&shape)?;
        let scale = params.scale.unwrap_or(1.0 / (shape.d as f64).sqrt());
        let monomials = match params.compute {
            Compute::Exact => None,
            Compute::Polynomial => {
                if params.form == Score::Strassen {
                    return refuse(LAYER.id, "the polynomial method is for the trilinear form");
                }
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
                Some(Monomials::new(shape.d, &c, scale)?)
            }
        };
        let second =
            if params.tied { None } else { Some((take(&mut weights, "k2")?, take(&mut weights, "v2")?)) };
        let mut take = |name| take(&mut weights, name);
        let (q, k1, v1, o) = (take("q")?, take("k1")?, take("v1")?, take("o")?);
        Ok(Self { shape, params, scale, q, k1, v1, second, o, monomials })
    }

    /// Projections of new tokens: queries, and keys and values of both sides (the second `None` where tied).
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

    /// Refuses where the polynomial may be off by more than the tolerance.
    fn check_bound(&self, z: f64) -> Result<f64> {
        let p = &self.params;
        let eps = match p.basis {
            Basis::Taylor => taylor_error(z, p.degree),
            Basis::Chebyshev if z > p.bound => f64::INFINITY,
            Basis::Chebyshev => relative_error(&chebyshev(p.degree, p.bound), p.bound),
        };
        if eps <= p.tolerance {
            return Ok(eps);
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
        m: &Monomials,
        states: &mut [State],
        y: &Projected,
        causal: bool,
        tokens: usize,
        cx: Context<'_>,
    ) -> Result<(Vec<f32>, RunInfo)> {
        let s = &self.shape;
        let group = s.n_heads / s.n_kv_heads;
        let (k2, v2) = y.second.as_ref().unwrap_or(&y.first);
        // The states change only after every head has been found within the bound.
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
        let parts: Vec<Vec<Vec<f32>>> = states
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
        let heads: Vec<Vec<f32>> = parts.into_iter().flatten().collect();
        let mut info = RunInfo::visited((tokens * s.n_heads) as u64 * m.rank() as u64);
        info.rank = Some(m.rank());
        info.figures.insert("largest_logit_bound", largest);
        info.figures.insert("weight_error_bound", eps);
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
        cache_elements(&self.shape, &self.params).unwrap_or(0)
    }

    fn new_cache(&self) -> Box<dyn LayerCache> {
        let s = &self.shape;
        match &self.monomials {
            None => Box::new(Exact::new(s, self.params.tied)),
            Some(m) => Box::new(Sums {
                states: vec![State::new(m.rank(), s.d_v); s.n_kv_heads],
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
        if let Some(m) = &self.monomials {
            let cache: &mut Sums = own(cache, LAYER.id)?;
            if cache.lost {
                return refuse(
                    LAYER.id,
                    "tokens cannot be taken back from the sums of the polynomial method",
                );
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
            let (heads, info) = match &self.monomials {
                Some(m) => {
                    let mut states = vec![State::new(m.rank(), s.d_v); s.n_kv_heads];
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

    fn cost(&self, mask: Mask, cached: usize, tokens: usize) -> Option<Cost> {
        let s = &self.shape;
        let projections = 2 * (tokens * self.parameters()) as u64;
        let pairs: u64 = match mask {
            Mask::None => (tokens as u64).pow(3),
            Mask::Causal => (cached + 1..=cached + tokens).map(|n| (n as u64).pow(2)).sum(),
        };
        let heads = s.n_heads as u64;
        let run_flops = match &self.monomials {
            None => projections + 2 * pairs * heads * (s.d + s.d_v) as u64,
            Some(m) => {
                let work = (s.d * self.params.degree / 2 + 3 * s.d_v) as u64;
                projections + 2 * tokens as u64 * m.rank() as u64 * work * heads
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

    fn as_any_mut(&mut self) -> &mut dyn std::any::Any {
        self
    }
}

/// Sums of the polynomial method, one state for each key head.
#[derive(Debug)]
struct Sums {
    states: Vec<State>,
    len: usize,
    /// Some tokens were taken back, which sums cannot do.
    lost: bool,
}

impl LayerCache for Sums {
    fn len(&self) -> usize {
        self.len
    }

    fn truncate(&mut self, len: usize) {
        if len == 0 {
            self.states.iter_mut().for_each(State::clear);
            (self.len, self.lost) = (0, false);
        } else if len < self.len {
            (self.len, self.lost) = (len, true);
        }
    }

    fn bytes(&self) -> usize {
        self.states.iter().map(|s| 8 * 2 * (s.sides[0].len())).sum()
    }

    fn as_any_mut(&mut self) -> &mut dyn std::any::Any {
        self
    }
}

/// Coefficients $1/t!$ of the Taylor polynomial of degree `g`.
pub fn taylor(g: usize) -> Vec<f64> {
    let mut c = vec![1.0];
    (1..=g).for_each(|t| c.push(c[t - 1] / t as f64));
    c
}

/// Bound on the relative error of a weight for $|z| \le Z$: $e^{2Z} Z^{g+1}/(g+1)!$.
pub fn taylor_error(z: f64, g: usize) -> f64 {
    (1..=g + 1).fold((2.0 * z).exp(), |e, t| e * z / t as f64)
}

/// Coefficients of the polynomial of degree `g` that interpolates the exponential at Chebyshev nodes of
/// $[-Z, Z]$; those of Taylor where the interpolant is not positive there.
pub fn chebyshev(g: usize, z: f64) -> Vec<f64> {
    let n = g + 1;
    let node = |i: usize| z * (std::f64::consts::PI * (i as f64 + 0.5) / n as f64).cos();
    // Newton's divided differences, then expanded in powers.
    let x: Vec<f64> = (0..n).map(node).collect();
    let mut f: Vec<f64> = x.iter().map(|x| x.exp()).collect();
    for step in 1..n {
        for i in (step..n).rev() {
            f[i] = (f[i] - f[i - 1]) / (x[i] - x[i - step]);
        }
    }
    let mut c = vec![0.0; n];
    for i in (0..n).rev() {
        for t in (1..n).rev() {
            c[t] = c[t - 1] - x[i] * c[t];
        }
        c[0] = f[i] - x[i] * c[0];
    }
    let positive = (0..=1000).all(|i| evaluate(&c, z * (i as f64 / 500.0 - 1.0)) > 0.0);
    if positive { c } else { taylor(g) }
}

fn evaluate(c: &[f64], z: f64) -> f64 {
    c.iter().rev().fold(0.0, |p, c| p * z + c)
}

/// Largest $|P(z) e^{-z} - 1|$ on a grid of $[-Z, Z]$.
fn relative_error(c: &[f64], bound: f64) -> f64 {
    let at = |i: usize| bound * (i as f64 / 500.0 - 1.0);
    (0..=1000).map(|i| (evaluate(c, at(i)) * (-at(i)).exp() - 1.0).abs()).fold(0.0, f64::max)
}

/// Largest rank of the polynomial method.
const MAX_RANK: usize = 20_000;

/// The monomials of degree at most $g$ in $d$ variables, with their weights.
#[derive(Clone, Debug)]
pub struct Monomials {
    /// Each is the product of an earlier one and a variable; the first is 1.
    parents: Vec<(u32, u32)>,
    weights: Vec<f64>,
    d: usize,
}

impl Monomials {
    /// Monomials for the polynomial $\sum_t c_t z^t$ of $z = \mathrm{scale} \sum_l q_l k^1_l k^2_l$: the weight of
    /// $\alpha$ is $c_t\, t!\, \mathrm{scale}^t / \alpha!$ with $t = |\alpha|$. Refused above a rank of 20 000.
    pub fn new(d: usize, c: &[f64], scale: f64) -> Result<Self> {
        let g = c.len().saturating_sub(1);
        let rank = (1..=g).try_fold(1usize, |r, t| Some(r.checked_mul(d + t)? / t));
        match rank {
            Some(r) if r <= MAX_RANK => {}
            _ => {
                let found = rank.map_or("more than can be counted".into(), |r| r.to_string());
                return refuse(
                    LAYER.id,
                    format!(
                        "{found} monomials of degree {g} in {d} variables, more than {MAX_RANK}; use narrower heads or a lower degree"
                    ),
                );
            }
        }
        let (mut parents, mut weights) = (vec![(0, 0)], vec![c.first().copied().unwrap_or(1.0)]);
        // 1/α! of each, and its last variable with its power.
        let mut facts = vec![(1.0, 0usize, 0usize)];
        let (mut level, mut factor) = (0..1, 1.0);
        for (t, &c) in c.iter().enumerate().skip(1) {
            factor *= t as f64 * scale;
            let next = parents.len();
            for parent in level {
                let (inverse, last, power) = facts[parent];
                for var in last..d {
                    let power = if var == last { power + 1 } else { 1 };
                    let inverse = inverse / power as f64;
                    parents.push((parent as u32, var as u32));
                    weights.push(c * factor * inverse);
                    facts.push((inverse, var, power));
                }
            }
            level = next..parents.len();
        }
        Ok(Self { parents, weights, d })
    }

    /// How many.
    pub fn rank(&self) -> usize {
        self.parents.len()
    }

    /// Values of all monomials at `x`.
    fn features<T: Real>(&self, x: &[T], out: &mut [f64]) {
        out[0] = 1.0;
        for n in 1..self.parents.len() {
            let (parent, var) = self.parents[n];
            out[n] = out[parent as usize] * x[var as usize].to_f64();
        }
    }

    /// Third-order attention of the rows of every matrix of `q`, which share the keys `sides[·].0` and values
    /// `sides[·].1`, after adding those to `state`. Causal: row `i` sees the first `i + 1` new keys and all earlier
    /// ones. Outputs are contiguous rows for each matrix of `q`.
    pub fn attend<T: Real>(
        &self,
        state: &mut State,
        q: &[MatRef<'_, T>],
        sides: [(MatRef<'_, T>, MatRef<'_, T>); 2],
        causal: bool,
        cx: Context<'_>,
    ) -> Vec<Vec<T>> {
        let (r, n, d_v) = (self.rank(), sides[0].0.rows(), sides[0].1.cols());
        debug_assert!(sides[0].0.cols() == self.d);
        let mut phi = vec![0.0; r];
        if causal {
            let mut out = vec![Vec::with_capacity(n * d_v); q.len()];
            for i in 0..n {
                for (side, (k, v)) in state.sides.iter_mut().zip(sides) {
                    self.features(k.row(i), &mut phi);
                    for (phi, sums) in phi.iter().zip(side.chunks_exact_mut(d_v + 1)) {
                        sums.iter_mut().zip(v.row(i)).for_each(|(s, v)| *s += phi * v.to_f64());
                        sums[d_v] += phi;
                    }
                }
                for (out, q) in out.iter_mut().zip(q) {
                    self.answer(state, q.row(i), &mut phi, out);
                }
            }
            return out;
        }
        const BLOCK: usize = 256;
        for (side, (k, v)) in state.sides.iter_mut().zip(sides) {
            for start in (0..n).step_by(BLOCK) {
                let rows = start..(start + BLOCK).min(n);
                let mut features = Mat::zeros(rows.len(), r);
                let values = Mat::from_fn(rows.len(), d_v + 1, |i, e| {
                    if e < d_v { v.at(rows.start + i, e).to_f64() } else { 1.0 }
                });
                rows.clone().for_each(|i| self.features(k.row(i), features.row_mut(i - rows.start)));
                let (a, b) = (Op::T(features.as_ref()), Op::N(values.as_ref()));
                gemm(cx.schedule.isa, 1.0, a, b, 1.0, side, d_v + 1, cx.scratch);
            }
        }
        let rows = |q: &MatRef<'_, T>| {
            let parts: Vec<Vec<T>> = (0..q.rows())
                .into_par_iter()
                .map(|i| {
                    let mut out = Vec::with_capacity(d_v);
                    self.answer(state, q.row(i), &mut vec![0.0; r], &mut out);
                    out
                })
                .collect();
            parts.concat()
        };
        q.iter().map(rows).collect()
    }

    /// Appends the output of one query to `out`.
    fn answer<T: Real>(&self, state: &State, q: &[T], phi: &mut [f64], out: &mut Vec<T>) {
        self.features(q, phi);
        let width = state.width;
        let mut acc = vec![0.0; width];
        for ((phi, w), (a, b)) in phi
            .iter()
            .zip(&self.weights)
            .zip(state.sides[0].chunks_exact(width).zip(state.sides[1].chunks_exact(width)))
        {
            let c = phi * w;
            acc.iter_mut().zip(a.iter().zip(b)).for_each(|(acc, (a, b))| *acc += c * a * b);
        }
        let total = acc[width - 1];
        // No key at all leaves an empty sum.
        out.extend(acc[..width - 1].iter().map(|x| T::from_f64(if total == 0.0 { 0.0 } else { x / total })));
    }
}

/// Sums over the keys seen: $\Phi_1^\top [V_1, 1]$ and $\Phi_2^\top [V_2, 1]$, each `rank × (d_v + 1)`.
#[derive(Clone, Debug)]
pub struct State {
    sides: [Vec<f64>; 2],
    width: usize,
    norms: Norms,
}

impl State {
    /// No key seen.
    pub fn new(rank: usize, d_v: usize) -> Self {
        let side = vec![0.0; rank * (d_v + 1)];
        Self { sides: [side.clone(), side], width: d_v + 1, norms: Norms::default() }
    }

    fn clear(&mut self) {
        self.sides.iter_mut().for_each(|s| s.fill(0.0));
        self.norms = Norms::default();
    }
}

/// Largest norms seen, for a bound on the logits.
#[derive(Clone, Copy, Debug, Default)]
struct Norms {
    q: f64,
    two: [f64; 2],
    max: [f64; 2],
}

impl Norms {
    fn see_queries(&mut self, q: MatRef<'_, f32>) {
        self.q = q.iter_rows().map(|r| f64::from(dot(r, r)).sqrt()).fold(self.q, f64::max);
    }

    fn see_keys(&mut self, k1: MatRef<'_, f32>, k2: MatRef<'_, f32>) {
        for (side, k) in [k1, k2].into_iter().enumerate() {
            for row in k.iter_rows() {
                self.two[side] = self.two[side].max(f64::from(dot(row, row)).sqrt());
                self.max[side] = row.iter().fold(self.max[side], |m, x| m.max(f64::from(x.abs())));
            }
        }
    }

    /// Bound on $\max \lVert q\rVert \lVert k^1 \odot k^2\rVert$.
    fn bound(&self) -> f64 {
        self.q * (self.two[0] * self.max[1]).min(self.two[1] * self.max[0])
    }
}

#[cfg(test)]
mod tests {
    use super::super::common::third::tests as pairs;
    use super::super::testing::{
        assert_close, check_causal, forward, forward_all, random, random_layer, random_weights,
    };
    use super::*;
    use crate::Options;

    const SHAPE: LayerShape = LayerShape { d_model: 20, n_heads: 4, n_kv_heads: 2, d: 6, d_v: 5 };

    #[test]
    fn keeps_what_every_causal_layer_keeps() {
        check_causal(&LAYER, &SHAPE, &Options::new(), 23);
        check_causal(&LAYER, &SHAPE, &Options::new().with("tied", true).with("form", "strassen"), 14);
        check_causal(&LAYER, &SHAPE, &Options::new().with("compute", "polynomial").with("scale", 0.05), 14);
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

    fn polynomial(x: &[Mat<f64>], c: &[f64], scale: f64, causal: bool) -> Mat<f64> {
        let m = Monomials::new(x[0].cols(), c, scale).unwrap();
        let mut state = State::new(m.rank(), x[3].cols());
        let ws = Workspace::single().unwrap();
        let sides = [(x[1].as_ref(), x[3].as_ref()), (x[2].as_ref(), x[4].as_ref())];
        let out = m.attend(&mut state, &[x[0].as_ref()], sides, causal, ws.context()).remove(0);
        Mat::from_vec(out, x[0].rows(), x[3].cols())
    }

    #[test]
    fn the_polynomial_method_has_the_known_errors() {
        let x = pairs::known_inputs(6, 4, 1.0);
        let exact = pairs::run(&pairs::pairwise(&x, 0.5)).0;
        let known = [
            (1, 5, 5.582e-3),
            (2, 15, 7.421e-4),
            (3, 35, 1.304e-4),
            (4, 70, 1.631e-5),
            (6, 210, 1.577e-7),
            (8, 495, 8.761e-10),
        ];
        for (g, rank, want) in known {
            assert_eq!(Monomials::new(4, &taylor(g), 0.5).unwrap().rank(), rank);
            let got = polynomial(&x, &taylor(g), 0.5, false);
            let worst = got.data().iter().zip(exact.data()).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!((worst / want - 1.0).abs() < 1e-3, "degree {g}: {worst} against {want}");
        }
    }

    #[test]
    fn the_causal_polynomial_tends_to_the_causal_form() {
        let x = pairs::known_inputs(9, 3, 0.8);
        let p = Pairwise { band1: Band::causal(0), band2: Band::causal(0), ..pairs::pairwise(&x, 0.5) };
        let exact = pairs::run(&p).0;
        pairs::assert_close(&polynomial(&x, &taylor(12), 0.5, true), &exact, 1e-11);
        // Both polynomials stay within the bound that their error on the weights gives.
        let logit = |i: usize, j: usize, k: usize| {
            (0..3).map(|l| 0.5 * x[0][(i, l)] * x[1][(j, l)] * x[2][(k, l)]).sum::<f64>()
        };
        let z = (0..729).map(|n| logit(n / 81, n / 9 % 9, n % 9).abs()).fold(0.0, f64::max);
        let value = 0.8 * 0.8;
        for (c, eps) in
            [(taylor(4), taylor_error(z, 4)), (chebyshev(4, z), relative_error(&chebyshev(4, z), z))]
        {
            pairs::assert_close(&polynomial(&x, &c, 0.5, true), &exact, 2.0 * eps / (1.0 - eps) * value);
        }
    }

    #[test]
    fn polynomials_approximate_the_exponential_within_their_bounds() {
        for g in [2, 4, 6] {
            for z in [0.3, 1.0, 2.0] {
                assert!(relative_error(&taylor(g), z) <= taylor_error(z, g));
                assert!(relative_error(&chebyshev(g, z), z) <= relative_error(&taylor(g), z));
            }
        }
        // On a wide interval a low degree turns negative: Taylor's is taken.
        assert_eq!(chebyshev(2, 20.0), taylor(2));
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
        assert!(Monomials::new(64, &taylor(3), 0.1).is_err() && Monomials::new(32, &taylor(3), 0.1).is_ok());
        let odd = Params { compute: Compute::Polynomial, degree: 3, ..Params::default() };
        assert!(ThirdOrder::new(SHAPE, odd, Weights::new()).is_err());
    }

    #[test]
    fn ranks_are_the_binomials_of_the_page() {
        let rank = |d, g| Monomials::new(d, &taylor(g), 1.0).unwrap().rank();
        assert_eq!(
            [rank(8, 2), rank(8, 4), rank(8, 6), rank(16, 2), rank(16, 4)],
            [45, 495, 3003, 153, 4845]
        );
        assert_eq!([rank(32, 2), rank(32, 3), rank(64, 2)], [561, 6545, 2145]);
    }
}
