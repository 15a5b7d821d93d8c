//! Axial attention: ordinary attention along one axis of a grid at a time.
//!
//! **Idea.** On an $N_1 \times \cdots \times N_k$ grid, attend along axis $a$ with all other axes as batch; after all
//! axes every position has seen every other.
//!
//! **Math.** For axis $a$ with weights of its own, $\mathcal{X} \leftarrow \mathcal{X} + \mathrm{MHA}_a(\mathcal{X})$, axes in
//! order (`sequential`; the last residual is left to the caller, as for every layer here), or $\sum_a
//! \mathrm{MHA}_a(\mathcal{X})$ (`sum`). An axis may be causal.
//!
//! **Reference.** ho2019. The popular package sums the axes and has no masks.
//!
//! **Cost.** $4 N D \sum N_a$ operations against $4 N^2 D$; parameters $4 D^2$ per axis. The cache of the causal form
//! holds the keys and values of every axis.
//!
//! **Guarantees.** One axis, or one longer than 1, is multi-head attention; tested here.
//!
//! **When to use.** Images, videos and other grids.

use super::common::fold::Along;
use super::common::rows::{HeadRows, KeyValues, interleave};
use super::common::{check_io, check_room, check_shape, layer_kind, own, project, projections, take};
use crate::layer::{Layer, LayerCache, LayerShape, Linear, WeightSpec, Weights};
use crate::params::Sizes;
use crate::workspace::Context;
use crate::{Cost, Error, Mask, MatRef, Result, RunInfo, Workspace};

layer_kind! {
    /// Registry entry.
    Axial {
        id: "axial",
        title: "Axial attention: one axis of a grid at a time",
        reference: "ho2019",
        weights: weight_specs,
        cache_elements: |s, p| Ok(p.dims.0.len() * s.n_kv_heads * (s.d + s.d_v)),
        grid: "dims",
    }
}

crate::choices! {
    /// Combination of the axes.
    pub enum Combine {
        /// One after another, with residuals in between.
        Sequential = "sequential",
        /// Each applied to the input, then added.
        Sum = "sum",
    }
}

crate::params! {
    /// Parameters of [`Axial`].
    pub struct Params {
        /// The grid, slowest axis first; at most four axes.
        dims: Sizes = Sizes(vec![16, 16]), in 1..=1 << 40;
        /// Combination of the axes.
        combine: Combine = Combine::Sequential;
        /// Axes that are causal even without a mask: 1 for causal, 0 for the others, such as 1x0; auto is none.
        causal: Option<Sizes> = None, in 0..=1;
    }
}

const NAMES: [[&str; 4]; 4] = [
    ["q.0", "k.0", "v.0", "o.0"],
    ["q.1", "k.1", "v.1", "o.1"],
    ["q.2", "k.2", "v.2", "o.2"],
    ["q.3", "k.3", "v.3", "o.3"],
];

fn weight_specs(s: &LayerShape, p: &Params) -> Result<Vec<WeightSpec>> {
    check_shape(s)?;
    let axes = p.dims.0.len();
    if axes == 0 || axes > NAMES.len() || p.dims.product().is_none() {
        return Err(Error::param("dims", format!("{:?}", p.dims.0), "one to four sizes"));
    }
    if let Some(causal) = &p.causal
        && causal.0.len() != axes
    {
        return Err(Error::param(
            "causal",
            format!("{:?}", causal.0),
            format!("{axes} numbers, one for each axis"),
        ));
    }
    Ok(NAMES[..axes].iter().flat_map(|names| projections(*names, s)).collect())
}

/// The axial attention layer.
#[derive(Debug)]
pub struct Axial {
    shape: LayerShape,
    params: Params,
    /// Queries, keys, values and output of every axis.
    axes: Vec<[Box<dyn Linear>; 4]>,
}

impl Axial {
    /// Makes the layer from its weights `q.a`, `k.a`, `v.a` and `o.a` for each axis.
    pub fn new(shape: LayerShape, params: Params, mut weights: Weights) -> Result<Self> {
        params.validate()?;
        weight_specs(&shape, &params)?;
        let axes = NAMES[..params.dims.0.len()]
            .iter()
            .map(|names| {
                let mut take = |i: usize| take(&mut weights, names[i]);
                Ok([take(0)?, take(1)?, take(2)?, take(3)?])
            })
            .collect::<Result<_>>()?;
        Ok(Self { shape, params, axes })
    }

    /// Runs one axis over the new rows `x`, whose keys and values join `cache`; returns its outputs and the visited
    /// pairs.
    fn axis(
        &self,
        axis: usize,
        x: MatRef<'_, f32>,
        cache: &mut (HeadRows, HeadRows),
        causal: bool,
        cx: Context<'_>,
    ) -> (Vec<f32>, u64) {
        let s = &self.shape;
        let [wq, wk, wv, wo] = &self.axes[axis];
        let q = project(&**wq, x, cx);
        let first = cache.0.len();
        cache.0.append(&project(&**wk, x, cx));
        cache.1.append(&project(&**wv, x, cx));
        let along = Along {
            q: &q,
            heads: s.n_heads,
            k: &cache.0,
            v: &cache.1,
            kv_heads: (s.n_kv_heads, s.n_kv_heads),
            tokens: first..first + x.rows(),
            causal,
            scale: (1.0 / (s.d as f64).sqrt()) as f32,
        };
        let (parts, pairs) = along.run(&self.params.dims.0, axis, cx);
        let heads = interleave(&parts, x.rows(), s.d_v);
        (project(&**wo, MatRef::new(&heads, x.rows(), s.n_heads * s.d_v), cx), pairs)
    }

    /// Runs all axes; `causal` says which have a mask.
    fn run(
        &self,
        x: MatRef<'_, f32>,
        cache: &mut [(HeadRows, HeadRows)],
        causal: &[bool],
        out: &mut [f32],
        cx: Context<'_>,
    ) -> u64 {
        let (n, d) = (x.rows(), self.shape.d_model);
        let mut hidden = x.to_mat().into_vec();
        let mut visited = 0;
        out.fill(0.0);
        for (a, cache) in cache.iter_mut().enumerate() {
            let (y, pairs) = self.axis(a, MatRef::new(&hidden, n, d), cache, causal[a], cx);
            visited += pairs;
            out.iter_mut().zip(&y).for_each(|(o, y)| *o += y);
            if self.params.combine == Combine::Sequential {
                hidden.iter_mut().zip(&y).for_each(|(h, y)| *h += y);
            }
        }
        visited
    }

    fn empty(&self) -> Vec<(HeadRows, HeadRows)> {
        let s = &self.shape;
        let one = || (HeadRows::new(s.n_kv_heads, s.d), HeadRows::new(s.n_kv_heads, s.d_v));
        self.axes.iter().map(|_| one()).collect()
    }
}

impl Layer for Axial {
    fn shape(&self) -> LayerShape {
        self.shape
    }

    fn parameters(&self) -> usize {
        self.axes.iter().flatten().map(|w| w.parameters()).sum()
    }

    fn cache_elements(&self) -> usize {
        self.axes.len() * self.shape.n_kv_heads * (self.shape.d + self.shape.d_v)
    }

    fn new_cache(&self) -> Box<dyn LayerCache> {
        Box::new(KeyValues(self.empty()))
    }

    /// Every axis is causal: a token sees the positions at which no index exceeds its own.
    fn forward(
        &self,
        x: MatRef<'_, f32>,
        cache: &mut dyn LayerCache,
        out: &mut [f32],
        ws: &mut Workspace,
    ) -> Result<RunInfo> {
        check_io(x, out, self.shape.d_model)?;
        let cache: &mut KeyValues = own(cache, LAYER.id)?;
        check_room(LAYER.id, cache.len() + x.rows(), &self.params.dims.0)?;
        let causal = vec![true; self.axes.len()];
        Ok(RunInfo::visited(ws.install(|cx| self.run(x, &mut cache.0, &causal, out, cx))))
    }

    fn forward_all(&self, x: MatRef<'_, f32>, out: &mut [f32], ws: &mut Workspace) -> Result<RunInfo> {
        check_io(x, out, self.shape.d_model)?;
        check_room(LAYER.id, x.rows(), &self.params.dims.0)?;
        let causal: Vec<bool> = self
            .params
            .causal
            .as_ref()
            .map_or(vec![false; self.axes.len()], |c| c.0.iter().map(|&c| c == 1).collect());
        Ok(RunInfo::visited(ws.install(|cx| self.run(x, &mut self.empty(), &causal, out, cx))))
    }

    fn cost(&self, mask: Mask, cached: usize, tokens: usize) -> Option<Cost> {
        let (s, grid) = (&self.shape, &self.params.dims.0);
        let mut pairs = 0u64;
        for (axis, &size) in grid.iter().enumerate() {
            let stride: usize = grid[axis + 1..].iter().product();
            let causal = mask == Mask::Causal || self.params.causal.as_ref().is_some_and(|c| c.0[axis] == 1);
            pairs += match causal {
                true => (cached..cached + tokens).map(|t| (t / stride % size + 1) as u64).sum(),
                false => (tokens * size) as u64,
            };
        }
        let flops = 2 * (tokens * self.parameters()) as u64 + 2 * pairs * (s.n_heads * (s.d + s.d_v)) as u64;
        let bytes = 4 * ((cached + tokens) * self.cache_elements() + 2 * tokens * s.d_model) as u64;
        Some(Cost { setup_flops: 0, run_flops: flops, bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::super::mode_wise;
    use super::super::testing::{
        assert_close, check_causal, dense, forward, forward_all, random, random_layer, random_weights,
        weights_from,
    };
    use super::*;
    use crate::{Mat, Options};

    const SHAPE: LayerShape = LayerShape { d_model: 20, n_heads: 4, n_kv_heads: 2, d: 6, d_v: 5 };

    fn dims(text: &str) -> Options {
        Options::new().with("dims", text)
    }

    #[test]
    fn keeps_what_every_causal_layer_keeps() {
        check_causal(&LAYER, &SHAPE, &dims("6x5"), 28);
        check_causal(&LAYER, &SHAPE, &dims("3x4x5").with("combine", "sum"), 47);
    }

    #[test]
    fn one_axis_is_multi_head_attention() {
        let x = random("x", 24, 20);
        let list = [("q", 24), ("k", 12), ("v", 10), ("o", 20)];
        let plain = weights_from(list.map(|(name, o)| (name, random(name, o, 20))));
        let plain = mode_wise::LAYER.layer(&SHAPE, &Options::new().with("modes", "24"), plain).unwrap();
        let weights =
            || weights_from(NAMES[0].iter().zip(list).map(|(&to, (name, o))| (to, random(name, o, 20))));
        let axial = LAYER.layer(&SHAPE, &dims("24"), weights()).unwrap();
        assert_eq!(forward(&*axial, &x, &[24]), forward(&*plain, &x, &[24]));
        assert_eq!(forward_all(&*axial, &x), forward_all(&*plain, &x));
        // Axes of length one are projections of each token; with zero output weights they vanish.
        for (grid, long) in [("24x1", 0), ("1x24", 1)] {
            let mut w =
                random_weights(&weight_specs(&SHAPE, &Params::from_options(&dims(grid)).unwrap()).unwrap());
            for (&to, (name, o)) in NAMES[long].iter().zip(list) {
                w.insert(to.into(), dense(random(name, o, 20)));
            }
            w.insert(NAMES[1 - long][3].into(), dense(Mat::zeros(20, 20)));
            let layer = LAYER.layer(&SHAPE, &dims(grid), w).unwrap();
            assert_close(&forward_all(&*layer, &x), &forward_all(&*plain, &x));
        }
    }

    #[test]
    fn without_queries_it_averages_axis_by_axis() {
        let s = LayerShape { d_model: 5, n_heads: 1, n_kv_heads: 1, d: 5, d_v: 5 };
        let x = random("x", 12, 5);
        let weights = weights_from((0..2).flat_map(|a| {
            let id = |scale: f32| Mat::from_fn(5, 5, move |i, j| if i == j { scale } else { 0.0 });
            [
                (NAMES[a][0], Mat::zeros(5, 5)),
                (NAMES[a][1], id(1.0)),
                (NAMES[a][2], id(1.0)),
                (NAMES[a][3], id(1.0)),
            ]
        }));
        let layer = LAYER.layer(&s, &dims("3x4"), weights).unwrap();
        let out = forward_all(&*layer, &x);
        // y1 = column mean of x; y2 = row mean of x + y1; the layer gives y1 + y2.
        let column = |c: usize, e: usize| (0..3).map(|r| x[(r * 4 + c, e)]).sum::<f32>() / 3.0;
        let want: Vec<f32> = (0..12)
            .flat_map(|t| (0..5).map(move |e| (t, e)).collect::<Vec<_>>())
            .map(|(t, e)| {
                let row = (0..4).map(|c| x[(t / 4 * 4 + c, e)] + column(c, e)).sum::<f32>() / 4.0;
                column(t % 4, e) + row
            })
            .collect();
        assert_close(&out, &want);
    }

    #[test]
    fn counts_are_those_of_the_page_and_bad_grids_are_refused() {
        let s = LayerShape { d_model: 24, n_heads: 4, n_kv_heads: 4, d: 6, d_v: 6 };
        let layer = random_layer(&LAYER, &s, &dims("5x7"));
        assert_eq!(layer.parameters(), 2 * 4 * 24 * 24);
        let flops = layer.cost(Mask::None, 0, 35).unwrap().run_flops;
        assert_eq!(flops, 2 * 35 * layer.parameters() as u64 + 4 * 35 * 24 * 12);
        let x = random("x", 36, 24);
        let mut out = vec![0.0; 36 * 24];
        let mut ws = Workspace::single().unwrap();
        assert!(layer.forward_all(x.as_ref(), &mut out, &mut ws).is_err());
        assert!(layer.forward(x.as_ref(), &mut *layer.new_cache(), &mut out, &mut ws).is_err());
        assert!((LAYER.weights)(&s, &dims("2x2x2x2x2")).is_err());
        assert!((LAYER.weights)(&s, &dims("2x2").with("causal", "1")).is_err());
    }
}
