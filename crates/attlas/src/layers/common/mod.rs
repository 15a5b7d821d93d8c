//! Code shared by several layers.

pub mod cache_size;
pub(crate) mod fold;
pub(crate) mod rows;
pub mod third;
pub mod third_backward;

use crate::layer::{LayerCache, LayerShape, Linear, WeightSpec, Weights};
use crate::workspace::Context;
use crate::{Error, MatRef, Problem, Result, Schedule};
use attlas_num::rope::{Angles, Layout, Rope, Scaling, Table};
use attlas_num::{Mat, Scratch};
use std::any::Any;
use std::sync::{Arc, RwLock};

/// Makes the registry entry of a layer with the constructor `new(shape, params, weights)`. Its `Params` are those of
/// the module; `weights` and `cache_elements` are functions of shape and parameters.
macro_rules! layer_kind {
    (@grid) => { None };
    (@grid $grid:literal) => { Some($grid) };
    (
        $(#[$doc:meta])*
        $layer:ident {
            id: $id:literal,
            title: $title:literal,
            reference: $reference:literal,
            weights: $weights:expr,
            cache_elements: $cache_elements:expr,
            $(grid: $grid:literal,)?
        }
    ) => {
        $(#[$doc])*
        pub static LAYER: $crate::layer::LayerKind = $crate::layer::LayerKind {
            id: $id,
            title: $title,
            reference: $reference,
            params: Params::SPECS,
            grid: $crate::layers::common::layer_kind!(@grid $($grid)?),
            weights: |shape, options| {
                type Of = fn(&$crate::layer::LayerShape, &Params) -> $crate::Result<Vec<$crate::layer::WeightSpec>>;
                let of: Of = $weights;
                of(shape, &Params::from_options(options)?)
            },
            cache_elements: |shape, options| {
                let of: fn(&$crate::layer::LayerShape, &Params) -> $crate::Result<usize> = $cache_elements;
                of(shape, &Params::from_options(options)?)
            },
            build: |shape, options, weights| {
                Ok(Box::new($layer::new(*shape, Params::from_options(options)?, weights)?))
            },
        };
    };
}

pub(crate) use layer_kind;

crate::choices! {
    /// Positions of the two halves of a rotated pair.
    pub enum Pairs {
        /// No rotation.
        None = "none",
        /// `x[l]` and `x[l + d/2]`, as in Hugging Face checkpoints.
        Half = "half",
        /// `x[2l]` and `x[2l + 1]`, as in Meta's, DeepSeek's and GGUF checkpoints.
        Interleaved = "interleaved",
    }
}

/// Specifies a required weight.
pub(crate) fn needed(name: &'static str, n_out: usize, n_in: usize) -> WeightSpec {
    WeightSpec { name, n_out, n_in, optional: false }
}

/// Specifies an optional weight.
pub(crate) fn optional(name: &'static str, n_out: usize, n_in: usize) -> WeightSpec {
    WeightSpec { name, n_out, n_in, optional: true }
}

/// Specifies queries, keys, values and output of grouped-query attention, under these names.
pub(crate) fn projections([q, k, v, o]: [&'static str; 4], s: &LayerShape) -> [WeightSpec; 4] {
    [
        needed(q, s.n_heads * s.d, s.d_model),
        needed(k, s.n_kv_heads * s.d, s.d_model),
        needed(v, s.n_kv_heads * s.d_v, s.d_model),
        needed(o, s.d_model, s.n_heads * s.d_v),
    ]
}

/// Takes a weight out of the list.
pub(crate) fn take(weights: &mut Weights, name: &str) -> Result<Box<dyn Linear>> {
    weights.remove(name).ok_or_else(|| Error::shape("weight", name, "none of that name"))
}

/// Runs `work` outside a caller's workspace, for the few weights that are read once when a layer is made.
fn at_load<R>(work: impl FnOnce(Context<'_>) -> R) -> R {
    let scratch = Scratch::new();
    work(Context { schedule: Schedule { threads: 1, ..Schedule::default() }, scratch: &scratch, groups: 1 })
}

/// Returns the numbers of a weight that depends on no token: a map from the single number 1.
pub(crate) fn constant(w: &dyn Linear) -> Vec<f32> {
    let mut out = vec![0.0; w.n_out()];
    at_load(|cx| w.apply(MatRef::new(&[1.0], 1, 1), &mut out, cx));
    out
}

/// Returns the matrix of a map, `n_out × n_in`, without its bias.
pub(crate) fn matrix(w: &dyn Linear) -> Mat<f32> {
    // A few unit vectors at a time: a map may have far more inputs than outputs.
    const ROWS: usize = 64;
    let (n_out, n_in) = (w.n_out(), w.n_in());
    let mut columns = vec![0.0; n_in * n_out];
    at_load(|cx| {
        for (b, out) in columns.chunks_mut((ROWS * n_out).max(1)).enumerate() {
            let units = Mat::from_fn(out.len() / n_out, n_in, |i, j| f32::from(u8::from(b * ROWS + i == j)));
            w.apply(units.as_ref(), out, cx);
        }
    });
    let bias = bias(w);
    Mat::from_fn(n_out, n_in, |o, i| columns[i * n_out + o] - bias[o])
}

/// Returns the bias of a map.
pub(crate) fn bias(w: &dyn Linear) -> Vec<f32> {
    let (n_out, n_in) = (w.n_out(), w.n_in());
    let mut out = vec![0.0; n_out];
    at_load(|cx| w.apply(MatRef::new(&vec![0.0; n_in], 1, n_in), &mut out, cx));
    out
}

/// Returns the images of the rows of `x`, contiguous.
pub(crate) fn project(w: &dyn Linear, x: MatRef<'_, f32>, cx: Context<'_>) -> Vec<f32> {
    let mut out = vec![0.0; x.rows() * w.n_out()];
    w.apply(x, &mut out, cx);
    out
}

/// Checks the widths of hidden states.
pub(crate) fn check_io(x: MatRef<'_, f32>, out: &[f32], d_model: usize) -> Result<()> {
    if x.cols() == d_model && out.len() == x.rows() * d_model {
        return Ok(());
    }
    let found = format!("{} × {} in, {} elements out", x.rows(), x.cols(), out.len());
    Err(Error::shape("hidden states", format!("{d_model} columns in and out"), found))
}

/// Checks the widths of hidden states and of another sequence that gives their keys and values.
pub(crate) fn check_cross(
    x: MatRef<'_, f32>,
    context: MatRef<'_, f32>,
    out: &[f32],
    d_model: usize,
) -> Result<()> {
    check_io(x, out, d_model)?;
    if context.cols() == d_model && context.rows() > 0 {
        return Ok(());
    }
    let found = format!("{} × {}", context.rows(), context.cols());
    Err(Error::shape(
        "hidden states of the context",
        format!("at least one token of {d_model} columns"),
        found,
    ))
}

/// Refuses rotary positions between two sequences.
pub(crate) fn check_unrotated(id: &str, rotated: bool) -> Result<()> {
    if !rotated {
        return Ok(());
    }
    refuse(id, "places in two sequences have no distance: cross attention needs rope = none")
}

/// Returns the cache as the type that layer `id` makes.
pub(crate) fn own<'a, C: LayerCache>(cache: &'a mut dyn LayerCache, id: &str) -> Result<&'a mut C> {
    let any: &mut dyn Any = cache;
    any.downcast_mut::<C>()
        .ok_or_else(|| Error::shape("cache", format!("one made by {id}"), "another layer's"))
}

/// Makes a refusal with one reason.
pub(crate) fn refuse<T>(id: &str, reason: impl Into<String>) -> Result<T> {
    Err(Error::Unsupported { method: id.into(), reasons: vec![reason.into()] })
}

/// Refuses more tokens than a grid has places.
pub(crate) fn check_room(id: &str, tokens: usize, grid: &[usize]) -> Result<()> {
    let room: usize = grid.iter().product();
    if tokens <= room {
        return Ok(());
    }
    refuse(id, format!("{tokens} tokens do not fit into a grid of {room}"))
}

/// Refuses key heads that several query heads share; the layer has `instead` in their place.
pub(crate) fn check_own_keys(s: &LayerShape, instead: &str) -> Result<()> {
    if s.n_kv_heads == s.n_heads {
        return Ok(());
    }
    Err(Error::shape("key heads", format!("as many as query heads{instead}"), s.n_kv_heads))
}

/// Checks heads and widths of a layer.
pub(crate) fn check_shape(s: &LayerShape) -> Result<()> {
    Problem { d_v: s.d_v, ..Problem::new(s.n_heads, 1, s.d).with_kv_heads(s.n_kv_heads) }.validate()
}

/// Constant that layer norms add to the variance.
const EPS: f64 = 1e-5;

/// Computes $(x - \mu)/\sqrt{\sigma^2 + \epsilon}$, then applies gain and shift.
pub(crate) fn layer_norm(x: &mut [f32], affine: Option<&[f32]>) {
    let n = x.len().max(1) as f64;
    let mean = x.iter().map(|&x| f64::from(x)).sum::<f64>() / n;
    let variance = x.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / n;
    let inverse = 1.0 / (variance + EPS).sqrt();
    let d = x.len();
    for (e, x) in x.iter_mut().enumerate() {
        let (gain, shift) = affine.map_or((1.0, 0.0), |a| (a[e], a[d + e]));
        *x = ((f64::from(*x) - mean) * inverse) as f32 * gain + shift;
    }
}

/// The cache of a layer that sees whole inputs only.
#[derive(Debug)]
pub(crate) struct NoCache;

impl LayerCache for NoCache {
    fn len(&self) -> usize {
        0
    }

    fn truncate(&mut self, _: usize) {}

    fn bytes(&self) -> usize {
        0
    }
}

/// Rotary positions with a table that grows by doubling.
#[derive(Debug)]
pub(crate) struct Rotary {
    rope: Rope,
    table: RwLock<Option<Arc<Table<f32>>>>,
}

impl Rotary {
    /// Makes the rotation of the first `dim` features, or none.
    pub(crate) fn new(pairs: Pairs, dim: usize, base: f64) -> Result<Option<Self>> {
        let layout = match pairs {
            Pairs::None => return Ok(None),
            Pairs::Half => Layout::Half,
            Pairs::Interleaved => Layout::Interleaved,
        };
        if !dim.is_multiple_of(2) {
            return Err(Error::shape("rotated width", "an even number for rotary positions", dim));
        }
        Ok(Some(Self::from_rope(Rope { dim, base, layout, scaling: Scaling::None })))
    }

    /// Wraps any rotation; its width is even.
    pub(crate) fn from_rope(rope: Rope) -> Self {
        Self { rope, table: RwLock::new(None) }
    }

    /// Returns a table for at least `positions` positions.
    pub(crate) fn table(&self, positions: usize) -> Arc<Table<f32>> {
        let ready = self.table.read().unwrap_or_else(|e| e.into_inner()).clone();
        match ready {
            Some(table) if table.positions() >= positions => table,
            _ => {
                let table =
                    Arc::new(Table::new(&self.rope, positions.next_power_of_two().max(256), Angles::Single));
                *self.table.write().unwrap_or_else(|e| e.into_inner()) = Some(table.clone());
                table
            }
        }
    }

    /// Rotates `[tokens, heads, width]` in place; the first token is at position `first`.
    pub(crate) fn rotate(&self, first: usize, x: &mut [f32], heads: usize, width: usize) {
        let tokens = x.len() / (heads * width).max(1);
        self.table(first + tokens).rotate_tokens_in_place(first, x, heads, width);
    }
}
