//! Attention layers: maps from hidden states to hidden states, with weights and a cache of their own.

use crate::params::ParamSpec;
use crate::workspace::Context;
use crate::{Cost, Error, Mask, MatRef, Options, Result, RunInfo, Workspace};
use attlas_num::Mat;
use attlas_num::kernels::{Op, gemm};
use attlas_num::par::*;
use std::any::Any;
use std::collections::BTreeMap;
use std::fmt::Debug;

/// Sizes of an attention layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerShape {
    /// Width of hidden states.
    pub d_model: usize,
    /// Query heads.
    pub n_heads: usize,
    /// Key heads; divides `n_heads`.
    pub n_kv_heads: usize,
    /// Width of queries and keys of one head.
    pub d: usize,
    /// Width of values of one head.
    pub d_v: usize,
}

/// A layer: its registry entry.
#[derive(Debug)]
pub struct LayerKind {
    /// Name in the literature, `snake_case`; public API.
    pub id: &'static str,
    /// One-line title for people.
    pub title: &'static str,
    /// Authors and year, or the section of the survey.
    pub reference: &'static str,
    /// Its parameters.
    pub params: &'static [ParamSpec],
    /// Returns the weights it takes, by name.
    pub weights: fn(&LayerShape, &Options) -> Result<Vec<WeightSpec>>,
    /// Returns how many numbers the cache holds per token.
    pub cache_elements: fn(&LayerShape, &Options) -> Result<usize>,
    /// Parameter that names the grid into which the layer folds its tokens, if it has one.
    pub grid: Option<&'static str>,
    /// Makes the layer from its weights, which [`LayerKind::layer`] has checked.
    pub build: fn(&LayerShape, &Options, Weights) -> Result<Box<dyn Layer>>,
}

impl LayerKind {
    /// Makes the layer; an error if a weight is missing or has another shape.
    pub fn layer(&self, shape: &LayerShape, options: &Options, weights: Weights) -> Result<Box<dyn Layer>> {
        for spec in (self.weights)(shape, options)? {
            match weights.get(spec.name) {
                Some(w) => spec.check(&**w)?,
                None if spec.optional => {}
                None => return Err(Error::shape("weight", spec.name, "none of that name")),
            }
        }
        (self.build)(shape, options, weights)
    }
}

/// A weight that a layer takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightSpec {
    /// Its name.
    pub name: &'static str,
    /// Number of outputs.
    pub n_out: usize,
    /// Number of inputs.
    pub n_in: usize,
    /// True if the layer works without it.
    pub optional: bool,
}

impl WeightSpec {
    /// Returns an error if a map has other sizes.
    pub(crate) fn check(&self, w: &dyn Linear) -> Result<()> {
        if (w.n_out(), w.n_in()) == (self.n_out, self.n_in) {
            return Ok(());
        }
        let words = |o: usize, i: usize| format!("{} with {o} outputs and {i} inputs", self.name);
        Err(Error::shape("weight", words(self.n_out, self.n_in), words(w.n_out(), w.n_in())))
    }
}

/// A linear map $y = W x + b$ in whatever form its weights are stored.
pub trait Linear: Debug + Send + Sync {
    /// Returns the number of outputs.
    fn n_out(&self) -> usize;
    /// Returns the number of inputs.
    fn n_in(&self) -> usize;
    /// Writes the images of the rows of `x` (`rows × n_in`) to `out` (`rows × n_out`, contiguous).
    fn apply(&self, x: MatRef<'_, f32>, out: &mut [f32], cx: Context<'_>);
    /// Returns how many numbers are stored.
    fn parameters(&self) -> usize {
        self.n_out() * self.n_in()
    }
}

/// Weights by name.
pub type Weights = BTreeMap<String, Box<dyn Linear>>;

/// A dense single-precision linear map.
#[derive(Clone, Debug)]
pub struct Dense {
    /// `n_out × n_in`.
    pub weight: Mat<f32>,
    /// `n_out` numbers, if there is a bias.
    pub bias: Option<Vec<f32>>,
}

impl Dense {
    /// Makes a map without bias.
    pub fn new(weight: Mat<f32>) -> Self {
        Self { weight, bias: None }
    }
}

impl Linear for Dense {
    fn n_out(&self) -> usize {
        self.weight.rows()
    }

    fn n_in(&self) -> usize {
        self.weight.cols()
    }

    fn apply(&self, x: MatRef<'_, f32>, out: &mut [f32], cx: Context<'_>) {
        let n_out = self.n_out();
        assert_eq!(out.len(), x.rows() * n_out);
        if out.is_empty() {
            return;
        }
        let rows = x.rows().div_ceil(4 * cx.schedule.threads.max(1)).clamp(1, 256).next_multiple_of(12);
        out.par_chunks_mut(rows * n_out).enumerate().for_each(|(b, out)| {
            let x = x.sub_rows(b * rows..(b * rows + out.len() / n_out));
            gemm(cx.schedule.isa, 1.0, Op::N(x), Op::T(self.weight.as_ref()), 0.0, out, n_out, cx.scratch);
            if let Some(bias) = &self.bias {
                out.chunks_exact_mut(n_out)
                    .for_each(|row| row.iter_mut().zip(bias).for_each(|(y, b)| *y += b));
            }
        });
    }

    fn parameters(&self) -> usize {
        self.weight.data().len() + self.bias.as_ref().map_or(0, Vec::len)
    }
}

/// An attention layer with its weights.
pub trait Layer: Debug + Send + Sync {
    /// Returns its sizes.
    fn shape(&self) -> LayerShape;

    /// Returns how many numbers its weights hold.
    fn parameters(&self) -> usize;

    /// Returns how many numbers its cache holds per token.
    fn cache_elements(&self) -> usize;

    /// Makes an empty cache.
    fn new_cache(&self) -> Box<dyn LayerCache>;

    /// Appends the tokens of `x` (`t × d_model`) to the cache and writes their outputs (`t × d_model`). Causal:
    /// a token sees the cache, the tokens before it and itself.
    fn forward(
        &self,
        x: MatRef<'_, f32>,
        cache: &mut dyn LayerCache,
        out: &mut [f32],
        ws: &mut Workspace,
    ) -> Result<RunInfo>;

    /// Computes the outputs (`n × d_model`) of a whole sequence `x` (`n × d_model`) without a mask: every token sees
    /// every other. Layers that have only a causal form refuse; layers without a causal form refuse
    /// [`forward`](Self::forward).
    fn forward_all(&self, _x: MatRef<'_, f32>, _out: &mut [f32], _ws: &mut Workspace) -> Result<RunInfo> {
        Err(Error::Unsupported {
            method: "this layer".into(),
            reasons: vec!["it is offered in its causal form only".into()],
        })
    }

    /// Computes the outputs (`n × d_model`) of `x` (`n × d_model`) with keys and values of another sequence (`m ×
    /// d_model`), without a mask: cross attention. Layers refuse if the two sequences would need common positions.
    fn forward_cross(
        &self,
        _x: MatRef<'_, f32>,
        _context: MatRef<'_, f32>,
        _out: &mut [f32],
        _ws: &mut Workspace,
    ) -> Result<RunInfo> {
        Err(Error::Unsupported {
            method: "this layer".into(),
            reasons: vec!["its queries and keys are of one sequence".into()],
        })
    }

    /// Returns the work of `tokens` new tokens after `cached` earlier ones, projections included; `None` if it is not
    /// counted. Without a mask there are no earlier tokens.
    fn cost(&self, _mask: Mask, _cached: usize, _tokens: usize) -> Option<Cost> {
        None
    }
}

/// State of a layer after the tokens so far. Only the layer that made it knows its type.
pub trait LayerCache: Debug + Send + Any {
    /// Returns the number of cached tokens.
    fn len(&self) -> usize;
    /// Returns true if no token is cached.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Forgets all but the first `len` tokens.
    fn truncate(&mut self, len: usize);
    /// Returns the bytes of the cached tokens.
    fn bytes(&self) -> usize;
}
