//! Higher-order attention on a video.

use crate::{Result, map, run, when};
use attlas::layer::{LayerShape, Weights};
use attlas::{Mat, Options, registry};
use attlas_num::rng::StreamKey;
use std::f64::consts::TAU;

const FRAMES: usize = 48;
const SIDE: usize = 16;
const PERIOD: usize = 12;

/// A spot that goes round four times. Pooled over a frame, pixels weighted by the cosine and sine of their direction tell where
/// the spot is, so that frames of the same phase are averaged; rows and columns keep to themselves by their places. One matrix
/// for each mode replaces attention among all pixels of all frames.
pub(crate) fn video() -> Result<()> {
    let centre = (SIDE as f64 - 1.0) / 2.0;
    let clean = |t: usize, r: usize, c: usize| {
        let (sin, cos) = (TAU * (t % PERIOD) as f64 / PERIOD as f64).sin_cos();
        let (y, x) = (r as f64 - centre - 5.0 * sin, c as f64 - centre - 5.0 * cos);
        (-(x * x + y * y) / 6.0).exp()
    };
    let place = |i: usize| (i / (SIDE * SIDE), i / SIDE % SIDE, i % SIDE);
    let n = FRAMES * SIDE * SIDE;
    let mut rng = StreamKey::new(11).named("video").rng();
    let noisy: Vec<f64> = (0..n)
        .map(|i| {
            let (t, r, c) = place(i);
            clean(t, r, c) + 0.2 * rng.normal()
        })
        .collect();
    // The pixel, the pixel times its direction, and the places of row and column on a circle.
    let width = 7;
    let x = Mat::from_fn(n, width, |i, j| {
        let (_, r, c) = place(i);
        let direction = (r as f64 - centre).atan2(c as f64 - centre);
        let around = |k: usize| (TAU * k as f64 / (2 * SIDE) as f64).sin_cos();
        (match j {
            0 => noisy[i],
            1 => noisy[i] * direction.cos(),
            2 => noisy[i] * direction.sin(),
            3 => around(r).1,
            4 => around(r).0,
            5 => around(c).1,
            _ => around(c).0,
        }) as f32
    });
    // The spot weighs about 19 pixels: means over a frame are about 19/256 long.
    let grid = format!("{FRAMES}x{SIDE}x{SIDE}");
    let options = Options::new()
        .with("dims", grid)
        .with("pool", "mean")
        .with("qk_norm", "none")
        .with("combine", "product");
    let shape = LayerShape { d_model: width, n_heads: 1, n_kv_heads: 1, d: 2, d_v: 1 };
    let mut weights: Weights =
        [("v", map(1, width, |_, j| when(j == 0, 1.0))), ("o", map(width, 1, |i, _| when(i == 0, 1.0)))]
            .map(|(name, w)| (name.to_string(), w))
            .into();
    for (mode, size) in [(0, 80.0), (1, 20.0), (2, 20.0)] {
        for side in ["q", "k"] {
            weights.insert(format!("{side}.{mode}"), map(2, width, |i, j| when(j == 1 + 2 * mode + i, size)));
        }
    }
    let layer = registry::layer("higher_order")?.layer(&shape, &options, weights)?;
    let (y, flops) = run(&*layer, &x)?;
    let psnr = |pixel: &dyn Fn(usize) -> f64| {
        let squares = (0..n).map(|i| {
            let (t, r, c) = place(i);
            (pixel(i) - clean(t, r, c)).powi(2)
        });
        -10.0 * (squares.sum::<f64>() / n as f64).log10()
    };
    // Three multiply-adds a pair: two for the score, one for the value.
    let all = 6 * (n * n) as u64;
    println!("video of {FRAMES} frames of {SIDE} × {SIDE} pixels with noise");
    println!("  noisy              {:5.1} dB", psnr(&|i| noisy[i]));
    println!(
        "  higher_order       {:5.1} dB   {:.1} M operations; all pairs of pixels would take {:.0} M",
        psnr(&|i| f64::from(y[(i, 0)])),
        flops as f64 / 1e6,
        all as f64 / 1e6
    );
    Ok(())
}
