//! Axial and mode-wise attention on an image.

use crate::{Result, map, run, when};
use attlas::layer::{LayerShape, Weights};
use attlas::{Mat, Options, registry};
use attlas_num::rng::StreamKey;

/// Noise is taken from an image by averages over pixels whose surroundings look alike: along rows and columns alone, the
/// average is nearly as good as over all pixels, for a fraction of the work.
pub(crate) fn image() -> Result<()> {
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
