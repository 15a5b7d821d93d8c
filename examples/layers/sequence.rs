//! Two-simplicial attention and the gated attention unit on a sequence.

use crate::Result;
use attlas::layer::{Dense, Layer, LayerKind, LayerShape, Linear, Weights};
use attlas::{Mask, Mat, Options, Workspace, registry};
use attlas_num::rng::StreamKey;

/// Tokens that drift, so that near ones look alike.
fn drifting(n: usize, width: usize) -> Mat<f32> {
    let mut rng = StreamKey::new(7).named("sequence").rng();
    let mut state = vec![0.0f64; width];
    Mat::from_fn(n, width, |_, j| {
        state[j] = 0.9 * state[j] + 0.6 * rng.normal();
        state[j] as f32
    })
}

fn random_layer(kind: &'static LayerKind, shape: &LayerShape, options: &Options) -> Result<Box<dyn Layer>> {
    let weights: Weights = (kind.weights)(shape, options)?
        .into_iter()
        .filter(|w| !w.optional)
        .map(|w| {
            let mut rng = StreamKey::new(8).named(w.name).rng();
            let drawn = Mat::from_fn(w.n_out, w.n_in, |_, _| (rng.normal() / (w.n_in as f64).sqrt()) as f32);
            (w.name.to_string(), Box::new(Dense::new(drawn)) as Box<dyn Linear>)
        })
        .collect();
    Ok(kind.layer(shape, options, weights)?)
}

/// Causal outputs, and the keys or pairs visited.
fn forward(layer: &dyn Layer, x: &Mat<f32>) -> Result<(Vec<f32>, u64)> {
    let mut out = vec![0.0; x.rows() * x.cols()];
    let info = layer.forward(x.as_ref(), &mut *layer.new_cache(), &mut out, &mut Workspace::single()?)?;
    Ok((out, info.keys_visited))
}

/// Relative distance of the outputs.
fn distance(out: &[f32], all: &[f32]) -> f64 {
    let norm = |x: &mut dyn Iterator<Item = f32>| x.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
    norm(&mut out.iter().zip(all).map(|(a, b)| a - b)) / norm(&mut all.iter().copied())
}

/// Windows of pairs in a sequence: how much of attention to all earlier pairs they keep, and for how much work.
pub(crate) fn pairs() -> Result<()> {
    let (n, width) = (192, 24);
    let shape = LayerShape { d_model: width, n_heads: 2, n_kv_heads: 2, d: 12, d_v: 12 };
    let x = drifting(n, width);
    let kind = registry::layer("two_simplicial")?;
    let with_windows = |w1: usize, w2: usize| -> Result<(Vec<f32>, u64)> {
        let options = Options::new().with("w1", w1).with("w2", w2);
        forward(&*random_layer(kind, &shape, &options)?, &x)
    };
    let (all, pairs) = with_windows(n, n)?;
    println!("sequence of {n} tokens, attention to pairs of earlier ones");
    for (w1, w2) in [(96, 48), (48, 16), (16, 8)] {
        let (out, visited) = with_windows(w1, w2)?;
        let (error, share) = (distance(&out, &all), 100.0 * visited as f64 / pairs as f64);
        println!(
            "  two_simplicial {w1:>3} × {w2:<3} relative distance {error:.3} for {share:.1} % of the pairs"
        );
    }
    Ok(())
}

/// A gated attention unit over a long sequence: in chunks its work grows with the length, and a linear far field brings
/// back a part of what lies outside.
pub(crate) fn gated() -> Result<()> {
    let (n, width) = (2048, 32);
    let shape = LayerShape { d_model: width, n_heads: 1, n_kv_heads: 1, d: 16, d_v: 64 };
    let x = drifting(n, width);
    let kind = registry::layer("gau")?;
    println!("sequence of {n} tokens, gated attention units");
    for (name, block, far) in [("whole", n, false), ("chunks alone", 128, false), ("FLASH", 128, true)] {
        let options =
            Options::new().with("block", block).with("far", far).with("length", n).with("norm", "scale");
        let layer = random_layer(kind, &shape, &options)?;
        let (out, _) = forward(&*layer, &x)?;
        let size = out.iter().map(|y| f64::from(*y).powi(2)).sum::<f64>().sqrt() / (n as f64).sqrt();
        let flops = layer.cost(Mask::Causal, 0, n).map_or(0, |c| c.flops());
        println!("  gau, {name:<12}  {:6.1} M operations, outputs of size {size:.2e}", flops as f64 / 1e6);
    }
    Ok(())
}
