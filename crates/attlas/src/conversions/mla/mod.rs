//! Grouped-query layers as latent attention: one cached latent for all key heads, one shared rotated key.
//!
//! **Idea.** All keys and values of a token together are a latent, and the heads pick their own with fixed matrices.
//! A change of basis that rotary positions do not notice gathers what is rotated in one narrow key; the rotation of the
//! rest is dropped, and what is left is cut to few dimensions where calibration text has its energy.
//!
//! **Math.** With $T$ the orthogonal basis of [`Rotation`], $k' = T^\top k$: the first $d_R$ features stay rotated, the
//! others, $k'_N$, are not. $y = [P_K k'_N/\alpha;\ P_V v]$ has second moments $R \Lambda R^\top$ over calibration
//! tokens; the latent is $R_r^\top y$, keys are rebuilt by $\alpha T_h^N P_K^{-1} R_{K}$ and values by $P_V^{-1} R_V$.
//! `pca = functional` takes $P_K^2 = \sum_h T_h^{N\top} (\sum q_h q_h^\top) T_h^N$, which measures errors of keys as errors
//! of scores, and $P_V^2 = \sum_h W_{O,h}^\top W_{O,h}$ by groups, which measures those of values after the output
//! projection; `activation` takes the identity. $\alpha$ is the ratio of the mean column norms of the two parts.
//! Queries of head $h$ become $\gamma[q_h; T_h^{R\top} q_h]$, $\gamma = \sqrt{(d + d_R)/d}$, because the latent layer
//! divides scores by $\sqrt{d + d_R}$; their latent is that of $q - b$, and the bias $b$ stays whole.
//!
//! **Reference.** meng2025transmla; the complex basis and the functional metric are this project's. Errata of the
//! survey's appendix are followed: rotations of column vectors, mixtures over folded frequencies with their cross terms,
//! balanced weights on both sides.
//!
//! **Cost.** Eigenproblems of $GF$ (twice that for the complex basis) for each group of frequencies and of
//! $G(d + d_v) - d_R$ once, all in double precision. The new layer caches $r + d_R$ numbers instead of $G(d + d_v)$.
//!
//! **Guarantees.** Every [`Stage`] can be had alone. Exact to rounding: `merged`, `rotated` with `fold = 1`, and going
//! from `partial_rope` to `balanced`; tested here. What is lost otherwise is reported as [`Figures`].
//!
//! **When to use.** To shrink the cache of a trained model without training it, mildly: quality falls quickly.

mod rotation;
#[cfg(test)]
mod tests;

pub use rotation::{Rotation, Widths};

use super::common::refused;
use crate::layer::{Conversion, Dense, LayerShape, Linear, Weights};
use crate::layers::latent::{self, Latent};
use crate::{Error, Mat, MatRef, Result};
use attlas_num::linalg::{matmul, matmul_tn, symmetric_eigen};
use attlas_num::rope::{Layout, Rope, Scaling};

/// Registry entry.
pub static CONVERSION: Conversion = Conversion {
    id: "mla",
    title: "Grouped-query attention as latent attention (TransMLA)",
    reference: "meng2025transmla",
    params: Params::SPECS,
    from: "grouped_query",
    to: "latent",
    run: None,
};

crate::choices! {
    /// The basis in which part of the keys loses its rotation.
    pub enum Rotate {
        /// Unitary mixtures of key heads: gathers most.
        Complex = "complex",
        /// Orthogonal mixtures of key heads, as published.
        Real = "real",
        /// The features of key head 0, as they are.
        None = "none",
    }
}

crate::choices! {
    /// How the error of the low rank is measured.
    pub enum Metric {
        /// Keys by the scores, values by the outputs that they make.
        Functional = "functional",
        /// Keys and values as vectors, as published.
        Activation = "activation",
        /// Weights alone, without calibration tokens.
        Weight = "weight",
    }
}

crate::params! {
    /// Parameters of [`convert`].
    pub struct Params {
        /// Width of the shared rotated key; divides the head width. Auto is 64, or the head width if that is less.
        rope_dim: Option<usize> = None, in 2..=1 << 20;
        /// Neighbouring frequencies that are mixed: a multiple of head width / rope_dim that divides half the head
        /// width. Auto is 2, or the smallest that is allowed if that is more.
        fold: Option<usize> = None, in 1..=1 << 20;
        /// Width of the latent, at most n_kv_heads · (d + d_v) − rope_dim. Auto is 512, or that if it is less.
        rank: Option<usize> = None, in 1..=1 << 20;
        /// Width of a latent of queries; auto is none.
        rank_q: Option<usize> = None, in 1..=1 << 20;
        /// Weight of keys against values in the low rank: below 1 favours values, 0 is no balancing.
        balance: f64 = 1.0, in 0.0..=1e6;
        /// The basis in which part of the keys loses its rotation.
        rotate: Rotate = Rotate::Complex;
        /// How the error of the low rank is measured.
        pca: Metric = Metric::Functional;
    }
}

/// How far a conversion goes; each stage contains those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// One latent for all key heads, everything rotated as before: exact, and nothing is saved.
    Merged,
    /// In the new basis, everything still rotated: exact without folding.
    Rotated,
    /// Only the shared key is rotated; nothing is cut.
    PartialRope,
    /// Keys and values in the basis of the low rank, all of it: the same as before.
    Balanced,
    /// The latent is cut to its rank.
    LowRank,
    /// Queries have a latent as well.
    LowRankQueries,
}

impl Stage {
    /// All, in order.
    pub const ALL: [Stage; 6] =
        [Self::Merged, Self::Rotated, Self::PartialRope, Self::Balanced, Self::LowRank, Self::LowRankQueries];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Merged => "merged",
            Self::Rotated => "rotated",
            Self::PartialRope => "partial_rope",
            Self::Balanced => "balanced",
            Self::LowRank => "low_rank",
            Self::LowRankQueries => "low_rank_queries",
        }
    }
}

/// A grouped-query layer: projections without norms between them and the rotation.
#[derive(Clone, Copy, Debug)]
pub struct Source<'a> {
    /// Its sizes.
    pub shape: LayerShape,
    /// Queries.
    pub q: &'a Dense,
    /// Keys.
    pub k: &'a Dense,
    /// Values.
    pub v: &'a Dense,
    /// Output.
    pub o: &'a Dense,
    /// Rotary positions over the whole head, where there are any.
    pub rope: Option<&'a Rope>,
}

/// Second moments of queries, keys and values over calibration tokens, before rotation, biases included.
#[derive(Clone, Debug)]
pub struct Calibration {
    shape: LayerShape,
    /// Of keys and values of all key heads, one after another.
    kv: Mat<f64>,
    /// Of each query head.
    heads: Vec<Mat<f64>>,
    /// Of all query heads together, where they were asked for.
    q: Option<Mat<f64>>,
    /// Sum of all query heads.
    q_sum: Vec<f64>,
    tokens: usize,
    /// Longest vector of keys and values, and of queries, of a token.
    longest: [f64; 2],
}

impl Calibration {
    /// No tokens yet. Moments between query heads are kept if `between_queries`; a latent of queries needs them.
    pub fn new(shape: LayerShape, between_queries: bool) -> Self {
        let (kv, q) = (shape.n_kv_heads * (shape.d + shape.d_v), shape.n_heads * shape.d);
        Self {
            shape,
            kv: Mat::zeros(kv, kv),
            heads: vec![Mat::zeros(shape.d, shape.d); shape.n_heads],
            q: between_queries.then(|| Mat::zeros(q, q)),
            q_sum: vec![0.0; q],
            tokens: 0,
            longest: [0.0; 2],
        }
    }

    /// Tokens seen.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Adds tokens: queries `[token, head, d]`, keys `[token, key head, d]` and values `[token, key head, d_v]` before
    /// rotation. An error if the lengths do not belong together; nothing is added then.
    pub fn add(&mut self, q: &[f32], k: &[f32], v: &[f32]) -> Result<()> {
        let s = self.shape;
        let (wq, wk, wv) = (s.n_heads * s.d, s.n_kv_heads * s.d, s.n_kv_heads * s.d_v);
        let n = q.len() / wq.max(1);
        if (q.len(), k.len(), v.len()) != (n * wq, n * wk, n * wv) {
            let found = format!("{}, {} and {} numbers", q.len(), k.len(), v.len());
            return Err(Error::shape(
                "queries, keys and values",
                format!("{wq}, {wk} and {wv} a token"),
                found,
            ));
        }
        let queries = Mat::from_vec(q.iter().map(|&x| f64::from(x)).collect(), n, wq);
        let both = Mat::from_fn(n, wk + wv, |i, j| {
            f64::from(if j < wk { k[i * wk + j] } else { v[i * wv + j - wk] })
        });
        for i in 0..n {
            self.q_sum.iter_mut().zip(queries.row(i)).for_each(|(s, x)| *s += x);
            for (longest, row) in self.longest.iter_mut().zip([both.row(i), queries.row(i)]) {
                *longest = longest.max(row.iter().map(|x| x * x).sum::<f64>().sqrt());
            }
        }
        let add = |sum: &mut Mat<f64>, x: MatRef<'_, f64>| {
            let new = matmul_tn(x, x);
            sum.data_mut().iter_mut().zip(new.data()).for_each(|(s, n)| *s += n);
        };
        add(&mut self.kv, both.as_ref());
        for (h, sum) in self.heads.iter_mut().enumerate() {
            add(sum, Mat::from_fn(n, s.d, |i, j| queries[(i, h * s.d + j)]).as_ref());
        }
        if let Some(sum) = &mut self.q {
            add(sum, queries.as_ref());
        }
        self.tokens += n;
        Ok(())
    }
}

/// What a conversion kept and lost.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Figures {
    /// Share of the keys' energy that is still rotated.
    pub kept_energy: f64,
    /// What keys were divided by before the low rank.
    pub alpha: f64,
    /// Relative error of keys and values in the metric of the low rank, $\sqrt{1 - \sum_{j<r} \lambda_j / \sum \lambda_j}$.
    pub rel_error: f64,
    /// The same of queries.
    pub query_error: f64,
}

/// A latent layer.
#[derive(Clone, Debug)]
pub struct Converted {
    /// Its sizes.
    pub shape: LayerShape,
    /// Its parameters.
    pub params: latent::Params,
    /// Rotation of the shared key.
    pub rope: Option<Rope>,
    /// From hidden states to the latent of queries, and its norm, where there is one.
    pub q_a: Option<(Dense, Option<Vec<f32>>)>,
    /// Queries, from hidden states or their latent.
    pub q: Dense,
    /// Latent and shared key.
    pub kv_a: Dense,
    /// Weight of the latent's norm, where there is one.
    pub kv_a_norm: Option<Vec<f32>>,
    /// From the latent to keys and values of each head.
    pub kv_b: Mat<f32>,
    /// Output.
    pub o: Dense,
    /// What was kept and lost.
    pub figures: Figures,
    /// No latent of a calibration token is longer: of keys and values, and of queries.
    longest: [f64; 2],
}

impl Converted {
    /// The weights under the names that [`latent::LAYER`] knows.
    pub fn weights(&self) -> Weights {
        let column = |v: &[f32]| Dense::new(Mat::from_vec(v.to_vec(), v.len(), 1));
        let mut list =
            vec![("kv_a", self.kv_a.clone()), ("kv_b", Dense::new(self.kv_b.clone())), ("o", self.o.clone())];
        list.extend(self.kv_a_norm.as_ref().map(|n| ("kv_a_norm", column(n))));
        match &self.q_a {
            None => list.push(("q", self.q.clone())),
            Some((a, norm)) => {
                list.extend([("q_a", a.clone()), ("q_b", self.q.clone())]);
                list.extend(norm.as_ref().map(|n| ("q_a_norm", column(n))));
            }
        }
        let boxed = |(name, w): (&str, Dense)| (name.to_string(), Box::new(w) as Box<dyn Linear>);
        list.into_iter().map(boxed).collect()
    }

    /// The layer.
    pub fn layer(&self) -> Result<Latent> {
        Latent::new(self.shape, self.params.clone(), self.rope.clone(), self.weights())
    }

    /// The same layer with norms that do nothing, for programs that always apply them: each latent gets one more
    /// coordinate that is a large constant $\beta$, so that its root mean square hardly moves, and the norm's weight
    /// undoes it. The norm multiplies by $(1 + \lVert c \rVert^2/\beta^2)^{-1/2}$, at most $5 \cdot 10^{-7}$ from 1 on
    /// calibration tokens. Where queries have a latent and a bias, the constant becomes 1 and carries the bias, for
    /// programs that know none behind the latent.
    #[must_use]
    pub fn with_neutral_norms(mut self) -> Self {
        let neutral = |map: &Dense, rank: usize, longest: f64| {
            let beta = 1e3 * longest.max(1e-3);
            let (rows, cols) = (map.weight.rows(), map.weight.cols());
            let weight = Mat::from_fn(rows + 1, cols, |i, j| match i.cmp(&rank) {
                std::cmp::Ordering::Less => map.weight[(i, j)],
                std::cmp::Ordering::Equal => 0.0,
                std::cmp::Ordering::Greater => map.weight[(i - 1, j)],
            });
            let mut bias = map.bias.clone().unwrap_or_else(|| vec![0.0; rows]);
            bias.insert(rank, beta as f32);
            let mut norm = vec![(beta / ((rank + 1) as f64).sqrt()) as f32; rank];
            norm.push(0.0);
            (Dense { weight, bias: Some(bias) }, norm)
        };
        let widen = |w: &Mat<f32>| {
            Mat::from_fn(w.rows(), w.cols() + 1, |i, j| if j < w.cols() { w[(i, j)] } else { 0.0 })
        };
        if self.kv_a_norm.is_none() {
            let (kv_a, norm) = neutral(&self.kv_a, self.params.rank, self.longest[0]);
            (self.kv_a, self.kv_a_norm) = (kv_a, Some(norm));
            self.kv_b = widen(&self.kv_b);
            self.params.rank += 1;
        }
        if let (Some((a, None)), Some(rank)) = (&self.q_a, self.params.rank_q) {
            let (a, mut norm) = neutral(a, rank, self.longest[1]);
            self.q.weight = widen(&self.q.weight);
            if let Some(bias) = self.q.bias.take() {
                norm[rank] = (1.0 / ((rank + 1) as f64).sqrt()) as f32;
                bias.iter().enumerate().for_each(|(i, &b)| self.q.weight[(i, rank)] = b);
            }
            self.q_a = Some((a, Some(norm)));
            self.params.rank_q = Some(rank + 1);
        }
        self
    }
}

/// A layer in latent form, as far as `stage`. The low rank is that of `calibration`, or of `again` where that is given:
/// moments of the same projections on the hidden states of the model at [`Stage::PartialRope`], as its authors take them.
pub fn convert(
    source: &Source<'_>,
    params: &Params,
    stage: Stage,
    calibration: &Calibration,
    again: Option<&Calibration>,
) -> Result<Converted> {
    params.validate()?;
    let plan = Plan::new(source, params)?;
    let second = again.unwrap_or(calibration);
    for c in [calibration, second] {
        plan.check(source, c, stage)?;
    }
    let s = source.shape;
    let (wk, wv) = (s.n_kv_heads * s.d, s.n_kv_heads * s.d_v);
    let Some(rope) = source.rope else {
        // Nothing is rotated: every stage up to the low rank is the same.
        let all = Mat::identity(wk);
        let none = Mat::zeros(wk, 0);
        let cut = if stage < Stage::Balanced {
            Cut::whole(&all, wv)
        } else {
            Cut::new(source, &plan, params, stage, &all, second)?
        };
        return assemble(source, &plan, params, stage, &none, Some(cut), None, 1.0, second);
    };
    let how = if stage == Stage::Merged { Rotate::None } else { params.rotate };
    let rotation = Rotation::new(plan.widths, how, rope.layout, &calibration.kv)?;
    let columns = |range: std::ops::Range<usize>| {
        Mat::from_fn(wk, range.len(), |i, j| rotation.basis[(i, range.start + j)])
    };
    if stage <= Stage::Rotated {
        let theta = rope.frequencies(1);
        let wide = Rope { dim: wk, base: rope.base, layout: Layout::Interleaved, scaling: Scaling::None };
        // Frequencies repeat from group to group, which no base gives.
        let own = wide.frequencies(1);
        let divisors = own.iter().zip(&rotation.frequency).map(|(own, &l)| own / theta[l]).collect();
        let wide = Rope { scaling: Scaling::Divisors(divisors), ..wide };
        return assemble(source, &plan, params, stage, &rotation.basis, None, Some(wide), 1.0, second);
    }
    let (kept, rest) = (columns(0..rotation.kept), columns(rotation.kept..wk));
    let cut = if stage == Stage::PartialRope {
        Cut::whole(&rest, wv)
    } else {
        Cut::new(source, &plan, params, stage, &rest, second)?
    };
    let narrow = narrow_rope(rope, plan.widths.collapse)?;
    assemble(source, &plan, params, stage, &kept, Some(cut), Some(narrow), rotation.energy, second)
}

/// Sizes that follow from source and parameters.
#[derive(Debug)]
struct Plan {
    widths: Widths,
    /// Width of the latent.
    rank: usize,
}

impl Params {
    /// With every width that was left open set as it will be used; an error if a layer of this shape and rotation
    /// cannot be converted so, which is cheap to know before calibrating.
    pub fn resolved(&self, shape: &LayerShape, rope: Option<&Rope>) -> Result<Self> {
        self.validate()?;
        let plan = Plan::sizes(shape, rope, self)?;
        let Widths { d, fold, collapse, .. } = plan.widths;
        rope.map_or(Ok(()), |rope| narrow_rope(rope, collapse).map(|_| ()))?;
        let rotated = rope.map(|_| (d / collapse, fold));
        Ok(Self {
            rope_dim: rotated.map(|r| r.0),
            fold: rotated.map(|r| r.1),
            rank: Some(plan.rank),
            ..self.clone()
        })
    }
}

impl Plan {
    fn new(source: &Source<'_>, p: &Params) -> Result<Self> {
        let s = source.shape;
        let maps = [
            ("q", source.q, s.n_heads * s.d, s.d_model),
            ("k", source.k, s.n_kv_heads * s.d, s.d_model),
            ("v", source.v, s.n_kv_heads * s.d_v, s.d_model),
            ("o", source.o, s.d_model, s.n_heads * s.d_v),
        ];
        for (name, map, n_out, n_in) in maps {
            if (map.n_out(), map.n_in()) != (n_out, n_in) {
                let found = format!("{} × {}", map.n_out(), map.n_in());
                return Err(Error::shape("weight", format!("{name} of {n_out} × {n_in}"), found));
            }
        }
        Self::sizes(&s, source.rope, p)
    }

    fn sizes(s: &LayerShape, rope: Option<&Rope>, p: &Params) -> Result<Self> {
        crate::layers::common::check_shape(s)?;
        let rotated = match rope {
            None => 0,
            Some(rope) if rope.dim != s.d => {
                return Err(refused(
                    CONVERSION.id,
                    format!("{} of {} features of a head are rotated; all must be", rope.dim, s.d),
                ));
            }
            Some(_) => p.rope_dim.unwrap_or(64.min(s.d)),
        };
        let (collapse, fold) = if rotated == 0 {
            (1, 1)
        } else {
            if rotated > s.d || !s.d.is_multiple_of(rotated) || !rotated.is_multiple_of(2) {
                return Err(Error::param("rope_dim", rotated, format!("an even divisor of {}", s.d)));
            }
            let collapse = s.d / rotated;
            let fold = p.fold.unwrap_or(2.min(s.d / 2).max(collapse));
            if !fold.is_multiple_of(collapse) || !(s.d / 2).is_multiple_of(fold) {
                let expected = format!("a multiple of {collapse} that divides {}", s.d / 2);
                return Err(Error::param("fold", fold, expected));
            }
            (collapse, fold)
        };
        let full = s.n_kv_heads * (s.d + s.d_v) - rotated;
        let rank = p.rank.unwrap_or(512.min(full));
        if rank > full {
            return Err(Error::param("rank", rank, format!("at most {full}, which is all there is")));
        }
        let widest = (s.n_heads * s.d).min(s.d_model);
        if let Some(r) = p.rank_q.filter(|&r| r > widest) {
            return Err(Error::param("rank_q", r, format!("at most {widest}, the rank of the queries")));
        }
        Ok(Self { widths: Widths { groups: s.n_kv_heads, d: s.d, fold, collapse }, rank })
    }

    fn check(&self, source: &Source<'_>, c: &Calibration, stage: Stage) -> Result<()> {
        if c.shape != source.shape {
            return Err(Error::shape(
                "calibration",
                format!("of a layer with {:?}", source.shape),
                format!("{:?}", c.shape),
            ));
        }
        let features = c.kv.rows();
        if stage > Stage::Merged && c.tokens < features {
            return Err(refused(
                CONVERSION.id,
                format!(
                    "{} calibration tokens are too few for {features} features of keys and values",
                    c.tokens
                ),
            ));
        }
        Ok(())
    }
}

/// The rotation of the kept pairs, every `collapse`-th of the source's: of the same kind with a narrower width.
fn narrow_rope(rope: &Rope, collapse: usize) -> Result<Rope> {
    let scaling = match &rope.scaling {
        same @ (Scaling::None | Scaling::Linear { .. } | Scaling::Llama3 { .. }) => same.clone(),
        Scaling::Divisors(d) => Scaling::Divisors(d.iter().copied().step_by(collapse).collect()),
        Scaling::Dynamic { .. } | Scaling::Yarn(_) => {
            return Err(refused(
                CONVERSION.id,
                "context extension by dynamic or yarn scaling has no equal of another width",
            ));
        }
    };
    Ok(Rope { dim: rope.dim / collapse, base: rope.base, layout: Layout::Interleaved, scaling })
}

/// The maps to and from the latent.
#[derive(Debug)]
struct Cut {
    /// Latent × all keys and values.
    down: Mat<f64>,
    /// All keys × latent.
    up_k: Mat<f64>,
    /// All values × latent.
    up_v: Mat<f64>,
    alpha: f64,
    rel_error: f64,
}

impl Cut {
    /// Nothing is cut: the latent is what is not rotated, `rest` (all keys × features), and the values.
    fn whole(rest: &Mat<f64>, wv: usize) -> Self {
        let (wk, w) = (rest.rows(), rest.cols());
        let unit = |i: usize, j: usize| f64::from(u8::from(i == j));
        Self {
            down: Mat::from_fn(w + wv, wk + wv, |i, j| match (i < w, j < wk) {
                (true, true) => rest[(j, i)],
                (false, false) => unit(i - w, j - wk),
                _ => 0.0,
            }),
            up_k: Mat::from_fn(wk, w + wv, |i, j| if j < w { rest[(i, j)] } else { 0.0 }),
            up_v: Mat::from_fn(wv, w + wv, |i, j| if j < w { 0.0 } else { unit(i, j - w) }),
            alpha: 1.0,
            rel_error: 0.0,
        }
    }

    fn new(
        source: &Source<'_>,
        plan: &Plan,
        p: &Params,
        stage: Stage,
        rest: &Mat<f64>,
        calibration: &Calibration,
    ) -> Result<Self> {
        let s = source.shape;
        let (wk, wv, w) = (rest.rows(), s.n_kv_heads * s.d_v, rest.cols());
        let weights;
        let gram = if p.pca == Metric::Weight {
            let all = stacked(source.k, source.v);
            let all = Mat::from_fn(wk + wv, s.d_model, |i, j| all[(i, j)]);
            weights = attlas_num::linalg::matmul_nt(all.as_ref(), all.as_ref());
            &weights
        } else {
            &calibration.kv
        };
        let ((root_k, inverse_k), (root_v, inverse_v)) = if p.pca == Metric::Functional {
            (roots(&score_metric(&s, rest, calibration))?, roots(&output_metric(&s, source.o))?)
        } else {
            let same = |n: usize| (Mat::identity(n), Mat::identity(n));
            (same(w), same(wv))
        };
        let from_keys = matmul(root_k.as_ref(), rest.transpose().as_ref());
        let mut left = Mat::from_fn(w + wv, wk + wv, |i, j| match (i < w, j < wk) {
            (true, true) => from_keys[(i, j)],
            (false, false) => root_v[(i - w, j - wk)],
            _ => 0.0,
        });
        let moments = |left: &Mat<f64>| {
            attlas_num::linalg::matmul_nt(matmul(left.as_ref(), gram.as_ref()).as_ref(), left.as_ref())
        };
        let mut moved = moments(&left);
        let mean_norm = |range: std::ops::Range<usize>| {
            let n = range.len().max(1) as f64;
            range.map(|i| moved[(i, i)].max(0.0).sqrt()).sum::<f64>() / n
        };
        let (keys, values) = (mean_norm(0..w), mean_norm(w..w + wv));
        let alpha =
            if p.balance > 0.0 && keys > 0.0 && values > 0.0 { keys / (values * p.balance) } else { 1.0 };
        left.data_mut()[..w * (wk + wv)].iter_mut().for_each(|x| *x /= alpha);
        for i in 0..w + wv {
            for j in 0..w + wv {
                let factor = if i < w { alpha } else { 1.0 } * if j < w { alpha } else { 1.0 };
                moved[(i, j)] /= factor;
            }
        }
        let eigen = symmetric_eigen(moved.as_ref()).map_err(|e| refused(CONVERSION.id, e))?;
        let rank = if stage >= Stage::LowRank { plan.rank } else { w + wv };
        let kept = |rows: std::ops::Range<usize>, factor: f64| {
            Mat::from_fn(rows.len(), rank, |i, j| factor * eigen.vectors[(rows.start + i, j)])
        };
        let back_k = matmul(inverse_k.as_ref(), kept(0..w, alpha).as_ref());
        Ok(Self {
            down: matmul_tn(kept(0..w + wv, 1.0).as_ref(), left.as_ref()),
            up_k: matmul(rest.as_ref(), back_k.as_ref()),
            up_v: matmul(inverse_v.as_ref(), kept(w..w + wv, 1.0).as_ref()),
            alpha,
            rel_error: lost(&eigen.values, rank),
        })
    }
}

/// $\sqrt{\sum_{j \ge r} \lambda_j / \sum \lambda_j}$.
fn lost(values: &[f64], rank: usize) -> f64 {
    let sum = |v: &[f64]| v.iter().map(|x| x.max(0.0)).sum::<f64>();
    let total = sum(values);
    if total > 0.0 { (sum(&values[rank..]) / total).sqrt() } else { 0.0 }
}

/// What an error of the unrotated keys costs in squared scores, summed over heads and pairs of calibration tokens.
fn score_metric(s: &LayerShape, rest: &Mat<f64>, calibration: &Calibration) -> Mat<f64> {
    let group = s.n_heads / s.n_kv_heads;
    let mut sum = Mat::zeros(rest.cols(), rest.cols());
    for g in 0..s.n_kv_heads {
        let mut queries = Mat::zeros(s.d, s.d);
        for gram in &calibration.heads[g * group..(g + 1) * group] {
            queries.data_mut().iter_mut().zip(gram.data()).for_each(|(s, x)| *s += x);
        }
        let own = rest.as_ref().sub_rows(g * s.d..(g + 1) * s.d);
        let part = matmul_tn(own, matmul(queries.as_ref(), own).as_ref());
        sum.data_mut().iter_mut().zip(part.data()).for_each(|(s, x)| *s += x);
    }
    sum
}

/// What an error of the values costs after the output projection, if every head passed it on whole.
fn output_metric(s: &LayerShape, o: &Dense) -> Mat<f64> {
    let group = s.n_heads / s.n_kv_heads;
    let o = o.weight.cast::<f64>();
    let mut metric = Mat::zeros(s.n_kv_heads * s.d_v, s.n_kv_heads * s.d_v);
    for h in 0..s.n_heads {
        let own = Mat::from_fn(s.d_model, s.d_v, |i, j| o[(i, h * s.d_v + j)]);
        let part = matmul_tn(own.as_ref(), own.as_ref());
        let at = h / group * s.d_v;
        for i in 0..s.d_v {
            for j in 0..s.d_v {
                metric[(at + i, at + j)] += part[(i, j)];
            }
        }
    }
    metric
}

/// The symmetric square root and its inverse, eigenvalues below 1e-6 of the largest raised to that.
fn roots(a: &Mat<f64>) -> Result<(Mat<f64>, Mat<f64>)> {
    let n = a.rows();
    if n == 0 {
        return Ok((Mat::zeros(0, 0), Mat::zeros(0, 0)));
    }
    let eigen = symmetric_eigen(a.as_ref()).map_err(|e| refused(CONVERSION.id, e))?;
    let largest = eigen.values.first().copied().unwrap_or(0.0);
    if largest <= 0.0 {
        return Ok((Mat::identity(n), Mat::identity(n)));
    }
    let root: Vec<f64> = eigen.values.iter().map(|v| v.max(1e-6 * largest).sqrt()).collect();
    let power = |f: &dyn Fn(f64) -> f64| {
        let scaled = Mat::from_fn(n, n, |i, j| eigen.vectors[(i, j)] * f(root[j]));
        attlas_num::linalg::matmul_nt(scaled.as_ref(), eigen.vectors.as_ref())
    };
    Ok((power(&|r| r), power(&|r| 1.0 / r)))
}

/// Second moments of queries less their bias, which stays whole behind the latent: $\sum (q-b)(q-b)^\top$, and a
/// billionth of $W W^\top$, so that directions which no token has shown are kept where there is room for them.
fn query_moments(gram: &Mat<f64>, calibration: &Calibration, q: &Dense) -> Mat<f64> {
    let (n, sum) = (calibration.tokens as f64, &calibration.q_sum);
    let b = |i: usize| q.bias.as_ref().map_or(0.0, |b| f64::from(b[i]));
    let weight = q.weight.cast::<f64>();
    let mut moments = attlas_num::linalg::matmul_nt(weight.as_ref(), weight.as_ref());
    let trace = |a: &Mat<f64>| (0..a.rows()).map(|i| a[(i, i)]).sum::<f64>();
    let small = 1e-9 * trace(gram) / trace(&moments).max(f64::MIN_POSITIVE);
    for i in 0..gram.rows() {
        for j in 0..gram.cols() {
            let shifted = gram[(i, j)] - sum[i] * b(j) - b(i) * sum[j] + n * b(i) * b(j);
            moments[(i, j)] = shifted + small * moments[(i, j)];
        }
    }
    moments
}

/// Weight and bias, the latter as one more column.
fn affine(map: &Dense) -> Mat<f64> {
    let n_in = map.n_in();
    Mat::from_fn(map.n_out(), n_in + 1, |i, j| {
        f64::from(if j < n_in { map.weight[(i, j)] } else { map.bias.as_ref().map_or(0.0, |b| b[i]) })
    })
}

/// The inverse of [`affine`], without a bias that is zero.
fn to_dense(map: &Mat<f64>) -> Dense {
    let n_in = map.cols() - 1;
    let bias: Vec<f32> = (0..map.rows()).map(|i| map[(i, n_in)] as f32).collect();
    Dense {
        weight: Mat::from_fn(map.rows(), n_in, |i, j| map[(i, j)] as f32),
        bias: bias.iter().any(|&b| b != 0.0).then_some(bias),
    }
}

fn stacked(a: &Dense, b: &Dense) -> Mat<f64> {
    let (mut rows, n) = (affine(a).into_vec(), a.n_in() + 1);
    rows.extend(affine(b).into_vec());
    Mat::from_vec(rows, a.n_out() + b.n_out(), n)
}

/// Writes out the layer. `kept` are the rotated features (all keys × features); without a `cut` every key is among
/// them, and the latent is the values.
#[allow(clippy::too_many_arguments)]
fn assemble(
    source: &Source<'_>,
    plan: &Plan,
    p: &Params,
    stage: Stage,
    kept: &Mat<f64>,
    cut: Option<Cut>,
    rope: Option<Rope>,
    kept_energy: f64,
    calibration: &Calibration,
) -> Result<Converted> {
    let s = source.shape;
    let (wk, wv, dr) = (s.n_kv_heads * s.d, s.n_kv_heads * s.d_v, kept.cols());
    let group = plan.widths.groups.max(1);
    let group_of = |h: usize| h / (s.n_heads / group);
    let nope = if cut.is_some() { s.d } else { 0 };
    let cut = cut.unwrap_or_else(|| Cut {
        down: Mat::from_fn(wv, wk + wv, |i, j| f64::from(u8::from(i + wk == j))),
        up_k: Mat::zeros(wk, wv),
        up_v: Mat::identity(wv),
        alpha: 1.0,
        rel_error: 0.0,
    });
    let rank = cut.down.rows();

    let kv = stacked(source.k, source.v);
    let latent = matmul(cut.down.as_ref(), kv.as_ref());
    let shared = matmul_tn(kept.as_ref(), kv.as_ref().sub_rows(0..wk));
    let kv_a =
        Mat::from_fn(
            rank + dr,
            s.d_model + 1,
            |i, j| {
                if i < rank { latent[(i, j)] } else { shared[(i - rank, j)] }
            },
        );
    let each = nope + s.d_v;
    let kv_b = Mat::from_fn(s.n_heads * each, rank, |i, j| {
        let (g, e) = (group_of(i / each), i % each);
        (if e < nope { cut.up_k[(g * s.d + e, j)] } else { cut.up_v[(g * s.d_v + e - nope, j)] }) as f32
    });

    let gamma = ((nope + dr) as f64 / s.d as f64).sqrt();
    let mut queries = affine(source.q);
    let (mut q_a, mut query_error) = (None, 0.0);
    let rank_q = p.rank_q.filter(|_| stage == Stage::LowRankQueries);
    if let Some(rq) = rank_q {
        let Some(gram) = &calibration.q else {
            return Err(refused(
                CONVERSION.id,
                "rank_q needs a calibration with moments between query heads",
            ));
        };
        let gram = query_moments(gram, calibration, source.q);
        let eigen = symmetric_eigen(gram.as_ref()).map_err(|e| refused(CONVERSION.id, e))?;
        query_error = lost(&eigen.values, rq);
        let wide = source.q.weight.cast::<f64>();
        let basis = Mat::from_fn(wide.rows(), rq, |i, j| eigen.vectors[(i, j)]);
        let down = matmul_tn(basis.as_ref(), wide.as_ref());
        q_a = Some((Dense::new(down.cast()), None));
        // The bias stays whole, behind the latent.
        let bias = wide.cols();
        queries =
            Mat::from_fn(wide.rows(), rq + 1, |i, j| if j < rq { basis[(i, j)] } else { queries[(i, bias)] });
    }
    let n_in = queries.cols();
    let mut q = Mat::zeros(s.n_heads * (nope + dr), n_in);
    for h in 0..s.n_heads {
        let own = queries.as_ref().sub_rows(h * s.d..(h + 1) * s.d);
        let g = group_of(h);
        let rotated = matmul_tn(kept.as_ref().sub_rows(g * s.d..(g + 1) * s.d), own);
        for i in 0..nope + dr {
            let from = if i < nope { own.row(i) } else { rotated.row(i - nope) };
            let to = q.row_mut(h * (nope + dr) + i).iter_mut();
            to.zip(from).for_each(|(q, x)| *q = gamma * x);
        }
    }
    let norm = cut.down.frobenius();
    let query_bias = source.q.bias.iter().flatten().map(|&b| f64::from(b).powi(2)).sum::<f64>().sqrt();
    Ok(Converted {
        shape: LayerShape { n_kv_heads: s.n_heads, d: nope + dr, ..s },
        params: latent::Params {
            rank,
            rank_q,
            rope_dim: dr,
            rope_base: rope.as_ref().map_or(10_000.0, |r| r.base),
            ..latent::Params::default()
        },
        rope,
        q_a,
        q: to_dense(&q),
        kv_a: to_dense(&kv_a),
        kv_a_norm: None,
        kv_b,
        o: source.o.clone(),
        figures: Figures { kept_energy, alpha: cut.alpha, rel_error: cut.rel_error, query_error },
        longest: [norm * calibration.longest[0], calibration.longest[1] + query_bias],
    })
}
