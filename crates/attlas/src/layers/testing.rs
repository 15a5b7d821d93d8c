//! Tests that every layer passes.

use crate::layer::{Dense, Layer, LayerCache, LayerKind, LayerShape, Linear, WeightSpec, Weights};
use crate::{Mask, Mat, Options, Schedule, Workspace};
use attlas_num::rng::StreamKey;

/// Draws a reproducible normal matrix with entries of standard deviation 0.3.
pub(crate) fn random(name: &str, rows: usize, cols: usize) -> Mat<f32> {
    let mut rng = StreamKey::new(1).named(name).rng();
    Mat::from_fn(rows, cols, |_, _| (0.3 * rng.normal()) as f32)
}

pub(crate) fn dense(w: Mat<f32>) -> Box<dyn Linear> {
    Box::new(Dense::new(w))
}

pub(crate) fn weights_from(list: impl IntoIterator<Item = (&'static str, Mat<f32>)>) -> Weights {
    list.into_iter().map(|(name, w)| (name.to_string(), dense(w))).collect()
}

/// Draws random weights for every specification.
pub(crate) fn random_weights(specs: &[WeightSpec]) -> Weights {
    specs.iter().map(|w| (w.name.to_string(), dense(random(w.name, w.n_out, w.n_in)))).collect()
}

pub(crate) fn random_layer(kind: &LayerKind, shape: &LayerShape, options: &Options) -> Box<dyn Layer> {
    let specs = (kind.weights)(shape, options).unwrap();
    kind.layer(shape, options, random_weights(&specs)).unwrap()
}

/// Computes causal outputs, fed in `chunks`.
pub(crate) fn forward(layer: &dyn Layer, x: &Mat<f32>, chunks: &[usize]) -> Vec<f32> {
    let mut ws = Workspace::single().unwrap();
    let mut cache = layer.new_cache();
    let mut out = vec![f32::NAN; x.rows() * x.cols()];
    for &c in chunks {
        let rows = cache.len()..cache.len() + c;
        let part = &mut out[rows.start * x.cols()..rows.end * x.cols()];
        layer.forward(x.as_ref().sub_rows(rows), &mut *cache, part, &mut ws).unwrap();
    }
    assert_eq!(cache.len(), x.rows());
    out
}

/// Computes outputs without a mask.
pub(crate) fn forward_all(layer: &dyn Layer, x: &Mat<f32>) -> Vec<f32> {
    let mut out = vec![f32::NAN; x.rows() * x.cols()];
    layer.forward_all(x.as_ref(), &mut out, &mut Workspace::single().unwrap()).unwrap();
    out
}

/// Asserts equality to 1e-5 of the largest entry: a few hundred roundings of single precision.
pub(crate) fn assert_close(a: &[f32], b: &[f32]) {
    assert_eq!(a.len(), b.len());
    let size = b.iter().fold(1f32, |m, x| m.max(x.abs()));
    let worst = a.iter().zip(b).map(|(x, y)| (x - y).abs()).fold(0.0, f32::max);
    assert!(worst < 1e-5 * size && a.iter().all(|x| !x.is_nan()), "largest difference {worst} of {size}");
}

/// A cache that no layer makes.
#[derive(Debug)]
struct Foreign;

impl LayerCache for Foreign {
    fn len(&self) -> usize {
        0
    }
    fn truncate(&mut self, _: usize) {}
    fn bytes(&self) -> usize {
        0
    }
}

/// Checks the laws of every causal layer: chunks, decoding and one shot agree; later tokens change no earlier row;
/// threads do not matter; tokens can be taken back; counts are those of the registry entry; bad calls are refused.
pub(crate) fn check_causal(kind: &LayerKind, shape: &LayerShape, options: &Options, n: usize) {
    assert!(n >= 12);
    let specs = (kind.weights)(shape, options).unwrap();
    let layer = random_layer(kind, shape, options);
    let stored: usize = specs.iter().map(|w| w.n_out * w.n_in).sum();
    assert_eq!(layer.parameters(), stored, "{}: parameters", kind.id);
    assert_eq!(layer.cache_elements(), (kind.cache_elements)(shape, options).unwrap());
    assert_eq!(layer.shape(), *shape);
    let cost = layer.cost(Mask::Causal, 0, n).unwrap();
    assert!(cost.run_flops > 2 * n as u64, "{}: cost", kind.id);

    let x = random("x", n, shape.d_model);
    let whole = forward(&*layer, &x, &[n]);
    assert_close(&forward(&*layer, &x, &vec![1; n]), &whole);
    assert_close(&forward(&*layer, &x, &[3, 1, n - 9, 0, 5]), &whole);

    for t in [1, n / 2, n - 1] {
        let mut y = x.clone();
        y.row_mut(t).fill(f32::NAN);
        let other = forward(&*layer, &y, &[n]);
        let kept = t * shape.d_model;
        assert!(
            whole[..kept].iter().zip(&other[..kept]).all(|(a, b)| a.to_bits() == b.to_bits()),
            "{}: leak from {t}",
            kind.id
        );
        assert!(other[kept..kept + shape.d_model].iter().any(|x| x.is_nan()), "{}: {t} sees itself", kind.id);
    }

    let mut ws = Workspace::new(Schedule { threads: 3, ..Schedule::default() }).unwrap();
    let mut cache = layer.new_cache();
    let mut out = vec![f32::NAN; whole.len()];
    layer.forward(x.as_ref(), &mut *cache, &mut out, &mut ws).unwrap();
    assert_eq!(out, whole, "{}: threads change bits", kind.id);

    cache.truncate(n - 4);
    assert_eq!(cache.len(), n - 4);
    let mut again = vec![f32::NAN; 4 * shape.d_model];
    if layer.forward(x.as_ref().sub_rows(n - 4..n), &mut *cache, &mut again, &mut ws).is_ok() {
        assert_close(&again, &whole[(n - 4) * shape.d_model..]);
    } else {
        cache.truncate(0);
        layer.forward(x.as_ref(), &mut *cache, &mut out, &mut ws).unwrap();
        assert_eq!(out, whole, "{}: an emptied cache starts again", kind.id);
    }

    for spec in specs.iter().filter(|s| !s.optional) {
        let mut weights = random_weights(&specs);
        weights.remove(spec.name);
        assert!(kind.layer(shape, options, weights).is_err(), "{} without {}", kind.id, spec.name);
    }
    let narrow = random("x", 2, shape.d_model + 1);
    let mut cache = layer.new_cache();
    assert!(layer.forward(narrow.as_ref(), &mut *cache, &mut [0.0; 2], &mut ws).is_err());
    assert!(layer.forward(x.as_ref(), &mut Foreign, &mut out, &mut ws).is_err());
    assert_eq!(cache.len(), 0);
}

#[test]
fn keys_and_values_may_come_from_another_sequence() {
    let (short, long) = (7, 12);
    let z = random("x", long, 16);
    let x = Mat::from_fn(short, 16, |i, j| z[(i, j)]);
    let shape = LayerShape { d_model: 16, n_heads: 4, n_kv_heads: 4, d: 4, d_v: 4 };
    let mut ws = Workspace::single().unwrap();
    let none = || Options::new().with("rope", "none");
    for (id, options) in [
        ("grouped_query", none()),
        ("latent", none().with("rank", 5).with("rope_dim", 2)),
        ("latent", none().with("rank", 5).with("rope_dim", 0).with("form", "absorbed")),
        ("tensor_product", none()),
        ("collaborative", Options::new()),
        ("feature_wise", Options::new()),
        ("teaformer", Options::new().with("dims", "4x4").with("core", "3x2").with("views", 2)),
        ("third_order", Options::new()),
        ("third_order", Options::new().with("tied", true)),
    ] {
        let kind = crate::registry::layer(id).unwrap();
        let layer = random_layer(kind, &shape, &options);
        let mut cross = |x: &Mat<f32>, context: &Mat<f32>| {
            let mut out = vec![f32::NAN; x.rows() * 16];
            layer.forward_cross(x.as_ref(), context.as_ref(), &mut out, &mut ws).unwrap();
            out
        };
        // A row of the output depends on its own query alone, whichever sequence that belongs to.
        assert_close(&cross(&x, &z), &forward_all(&*layer, &z)[..short * 16]);
        assert_close(&cross(&z, &x)[..short * 16], &forward_all(&*layer, &x));
        let narrow = random("x", 3, 15);
        let refused = layer.forward_cross(x.as_ref(), narrow.as_ref(), &mut [0.0; 7 * 16], &mut ws);
        assert!(refused.unwrap_err().to_string().contains("16 columns"), "{id}");
    }
    for (id, words) in [("grouped_query", "rope = none"), ("axial", "of one sequence")] {
        let layer = random_layer(crate::registry::layer(id).unwrap(), &shape, &Options::new());
        let refused = layer.forward_cross(x.as_ref(), z.as_ref(), &mut [0.0; 7 * 16], &mut ws);
        assert!(refused.unwrap_err().to_string().contains(words), "{id}");
    }
}
