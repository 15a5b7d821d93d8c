//! Uses of the layers, on generated data with hand-written weights: an image for axial and mode-wise attention, a
//! series of sensors for TEAFormer, a sequence for two-simplicial attention, triples for third-order attention.
//!
//! `cargo run -p xtask --example layers_on_data`

use attlas::layer::{Dense, Layer, LayerShape, Linear, Weights};
use attlas::{Mask, Mat, Options, Workspace, registry};
use attlas_lab::simulate::{Matching, Task};
use attlas_num::rng::StreamKey;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn main() -> Result<()> {
    image()?;
    series()?;
    sequence()?;
    triples()
}

/// A map by its entries.
fn map(rows: usize, cols: usize, entry: impl Fn(usize, usize) -> f64) -> Box<dyn Linear> {
    Box::new(Dense::new(Mat::from_fn(rows, cols, |i, j| entry(i, j) as f32)))
}

fn when(condition: bool, value: f64) -> f64 {
    if condition { value } else { 0.0 }
}

fn run(layer: &dyn Layer, x: &Mat<f32>) -> Result<(Mat<f32>, u64)> {
    let mut out = vec![0.0; x.rows() * x.cols()];
    layer.forward_all(x.as_ref(), &mut out, &mut Workspace::single()?)?;
    let flops = layer.cost(Mask::None, 0, x.rows()).map_or(0, |c| c.flops());
    Ok((Mat::from_vec(out, x.rows(), x.cols()), flops))
}

/// Noise is taken from an image by averages over pixels whose surroundings look alike: along rows and columns alone, the
/// average is nearly as good as over all pixels, for a fraction of the work.
fn image() -> Result<()> {
    const SIDE: usize = 48;
    const PATCH: usize = 9;
    // Hidden states: the 3 × 3 patch around a pixel, half its squared norm, 1, and the pixel.
    let (width, d) = (PATCH + 3, PATCH + 1);
    let clean = |r: usize, c: usize| -> f64 {
        let disc = (r as f64 - 20.0).hypot(c as f64 - 26.0) < 12.0;
        if disc { 0.9 } else { when((c / 8).is_multiple_of(2), 0.4) }
    };
    let mut rng = StreamKey::new(5).named("image").rng();
    let noisy = Mat::from_fn(SIDE, SIDE, |r, c| clean(r, c) + 0.15 * rng.normal());
    let at = |r: usize, c: usize, k: usize| -> f64 {
        let clamp = |x: usize, step: usize| (x + step).saturating_sub(1).min(SIDE - 1);
        noisy[(clamp(r, k / 3), clamp(c, k % 3))]
    };
    let x = Mat::from_fn(SIDE * SIDE, width, |i, j| {
        let (r, c) = (i / SIDE, i % SIDE);
        let half_norm = || (0..PATCH).map(|k| at(r, c, k).powi(2)).sum::<f64>() / 2.0;
        (match j {
            j if j < PATCH => at(r, c, j),
            j if j == PATCH => half_norm(),
            j if j == PATCH + 1 => 1.0,
            _ => noisy[(r, c)],
        }) as f32
    });
    // ⟨q, k⟩ = −‖p − p'‖²/2 up to what a row has in common, times a sharpness.
    let sharp = (5.0 * (d as f64).sqrt()).sqrt();
    let query = || map(d, width, |i, j| when(if i < PATCH { i == j } else { j == PATCH + 1 }, sharp));
    let key = || map(d, width, |i, j| if i < PATCH { when(i == j, sharp) } else { when(j == PATCH, -sharp) });
    let value = || map(1, width, |_, j| when(j == width - 1, 1.0));
    let output = || map(width, 1, |i, _| when(i == width - 1, 1.0));
    let shape = LayerShape { d_model: width, n_heads: 1, n_kv_heads: 1, d, d_v: 1 };
    let psnr = |pixel: &dyn Fn(usize) -> f64| {
        let squares = (0..SIDE * SIDE).map(|i| (pixel(i) - clean(i / SIDE, i % SIDE)).powi(2));
        -10.0 * (squares.sum::<f64>() / (SIDE * SIDE) as f64).log10()
    };
    println!("image of {SIDE} × {SIDE} pixels with noise");
    println!("  noisy              {:5.1} dB", psnr(&|i| noisy[(i / SIDE, i % SIDE)]));
    let grid = format!("{SIDE}x{SIDE}");
    let plain = Options::new().with("rope", "none");
    for (id, options, share) in [
        ("grouped_query", plain, 1.0),
        ("mode_wise", Options::new().with("modes", grid.clone()), 1.0),
        ("axial", Options::new().with("dims", grid).with("combine", "sum"), 0.5),
    ] {
        let axes: &[&str] = if id == "axial" { &[".0", ".1"] } else { &[""] };
        let mut weights = Weights::new();
        for end in axes {
            let maps = [("q", query()), ("k", key()), ("v", value()), ("o", output())];
            weights.extend(maps.into_iter().map(|(name, w)| (format!("{name}{end}"), w)));
        }
        let layer = registry::layer(id)?.layer(&shape, &options, weights)?;
        let (y, flops) = run(&*layer, &x)?;
        let better = psnr(&|i| share * f64::from(y[(i, width - 1)]));
        let work = if flops > 0 { format!("{:.1} M operations", flops as f64 / 1e6) } else { String::new() };
        println!("  {id:<18} {better:5.1} dB   {work}");
    }
    Ok(())
}

/// Sensors on a 4 × 4 plate see a wave go by; averages over steps of the same phase take noise away. Factors for the two axes
/// of the plate take a fraction of the weights of a dense layer.
fn series() -> Result<()> {
    let (steps, side) = (240, 4);
    let d = side * side;
    let mut rng = StreamKey::new(6).named("series").rng();
    let clean = |t: usize, s: usize| {
        (t as f64 * std::f64::consts::TAU / 24.0 + s as f64 * std::f64::consts::TAU / 16.0).cos()
    };
    let noisy = Mat::from_fn(steps, d, |t, s| (clean(t, s) + 0.5 * rng.normal()) as f32);
    let shape = LayerShape { d_model: d, n_heads: 1, n_kv_heads: 1, d, d_v: d };
    let options = Options::new().with("dims", "4x4").with("core", "4x4").with("head", "4x4");
    let kind = registry::layer("teaformer")?;
    // Identity factors; queries and keys sharper by the fourth root for each of two factors and two sides.
    let identity = |size: f64| move |i: usize, j: usize| when(i == j, size);
    let weights: Weights = (kind.weights)(&shape, &options)?
        .into_iter()
        .map(|w| {
            let size = if w.name.starts_with(['q', 'k']) { 8f64.powf(0.25) } else { 1.0 };
            (w.name.to_string(), map(w.n_out, w.n_in, identity(size)))
        })
        .collect();
    let layer = kind.layer(&shape, &options, weights)?;
    let (y, _) = run(&*layer, &noisy)?;
    let rmse = |m: &Mat<f32>| {
        let squares = (0..steps * d).map(|i| (f64::from(m[(i / d, i % d)]) - clean(i / d, i % d)).powi(2));
        (squares.sum::<f64>() / (steps * d) as f64).sqrt()
    };
    println!("series of {steps} steps of a plate of {side} × {side} sensors");
    println!("  noisy              {:5.3} root mean square error", rmse(&noisy));
    println!(
        "  teaformer          {:5.3}, {} weights against {} of a dense layer",
        rmse(&y),
        layer.parameters(),
        4 * d * d
    );
    Ok(())
}

/// Windows of pairs in a sequence: how much of attention to all earlier pairs they keep, and for how much work.
fn sequence() -> Result<()> {
    let (n, width) = (192, 24);
    let shape = LayerShape { d_model: width, n_heads: 2, n_kv_heads: 2, d: 12, d_v: 12 };
    let mut rng = StreamKey::new(7).named("sequence").rng();
    // Tokens drift, so that near ones look alike.
    let mut state = vec![0.0f64; width];
    let x = Mat::from_fn(n, width, |_, j| {
        state[j] = 0.9 * state[j] + 0.6 * rng.normal();
        state[j] as f32
    });
    let kind = registry::layer("two_simplicial")?;
    let with_windows = |w1: usize, w2: usize| -> Result<(Vec<f32>, u64)> {
        let options = Options::new().with("w1", w1).with("w2", w2);
        let weights: Weights = (kind.weights)(&shape, &options)?
            .into_iter()
            .map(|w| {
                let mut rng = StreamKey::new(8).named(w.name).rng();
                let drawn =
                    Mat::from_fn(w.n_out, w.n_in, |_, _| (rng.normal() / (w.n_in as f64).sqrt()) as f32);
                (w.name.to_string(), Box::new(Dense::new(drawn)) as Box<dyn Linear>)
            })
            .collect();
        let layer = kind.layer(&shape, &options, weights)?;
        let mut out = vec![0.0; n * width];
        let info = layer.forward(x.as_ref(), &mut *layer.new_cache(), &mut out, &mut Workspace::single()?)?;
        Ok((out, info.keys_visited))
    };
    let (all, pairs) = with_windows(n, n)?;
    let norm = all.iter().map(|y| f64::from(*y).powi(2)).sum::<f64>().sqrt();
    println!("sequence of {n} tokens, attention to pairs of earlier ones");
    for (w1, w2) in [(96, 48), (48, 16), (16, 8)] {
        let (out, visited) = with_windows(w1, w2)?;
        let error = out.iter().zip(&all).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>().sqrt() / norm;
        let share = 100.0 * visited as f64 / pairs as f64;
        println!(
            "  two_simplicial {w1:>3} × {w2:<3} relative distance {error:.3} for {share:.1} % of the pairs"
        );
    }
    Ok(())
}

/// Whether two other tokens sum to zero with a token, modulo a number: pairs of keys decide it, single keys cannot.
fn triples() -> Result<()> {
    let task = Matching { n: 24, modulus: None, count: 20, task: Task::Match3, single: false, seed: 1 };
    let run = task.run(1)?;
    println!("triples that sum to zero modulo {}", run.modulus);
    println!("  third order        {:5.1} % of tokens right", 100.0 * run.third_order.accuracy);
    println!("  ordinary attention {:5.1} %", 100.0 * run.pairwise.accuracy);
    Ok(())
}
