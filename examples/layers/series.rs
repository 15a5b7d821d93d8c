//! TEAFormer, feature-wise and tensorized attention on series of sensors.

use crate::{Result, map, run, when};
use attlas::layer::{LayerShape, Weights};
use attlas::{Mat, Options, registry};
use attlas_num::rng::StreamKey;
use std::f64::consts::TAU;

/// Sensors on a 4 × 4 plate see a wave go by; averages over steps of the same phase take noise away. Factors for the two axes
/// of the plate take a fraction of the weights of a dense layer.
pub(crate) fn series() -> Result<()> {
    let (steps, side) = (240, 4);
    let d = side * side;
    let mut rng = StreamKey::new(6).named("series").rng();
    let clean = |t: usize, s: usize| (t as f64 * TAU / 24.0 + s as f64 * TAU / 16.0).cos();
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

/// Four sensors with gaps: every feature has scores of its own, so that a token can be left out for the sensor that it lacks
/// and count for the others. One score for all features of a token averages the gaps in.
pub(crate) fn gaps() -> Result<()> {
    let (steps, sensors) = (192, 4);
    // Readings, whether each is there, the phase of the day, and 1.
    let width = 2 * sensors + 3;
    let mut rng = StreamKey::new(9).named("gaps").rng();
    let clean = |t: usize, s: usize| 1.0 + (t as f64 * TAU / 24.0 + s as f64).sin();
    let noise = Mat::from_fn(steps, sensors, |_, _| 0.1 * rng.normal());
    let there: Vec<bool> = (0..steps * sensors).map(|_| rng.uniform() > 0.4).collect();
    let x = Mat::from_fn(steps, width, |t, j| {
        let phase = t as f64 * TAU / 24.0;
        (match j {
            j if j < sensors => when(there[t * sensors + j], clean(t, j) + noise[(t, j)]),
            j if j < 2 * sensors => when(there[t * sensors + j - sensors], 1.0),
            j if j == 2 * sensors => phase.cos(),
            j if j == 2 * sensors + 1 => phase.sin(),
            _ => 1.0,
        }) as f32
    });
    // Steps of the same phase attend to one another; a reading that is missing has a score of -5 instead of 5.
    let shape = LayerShape { d_model: width, n_heads: 1, n_kv_heads: 1, d: 2, d_v: sensors };
    let phase = || map(2, width, |i, j| when(j == 2 * sensors + i, 4.0));
    println!("series of {steps} steps of {sensors} sensors, four readings in ten missing");
    for id in ["grouped_query", "feature_wise"] {
        let mut weights: Weights = [
            ("q", phase()),
            ("k", phase()),
            ("v", map(sensors, width, |i, j| when(i == j, 1.0))),
            ("o", map(width, sensors, |i, j| when(i == j, 1.0))),
        ]
        .map(|(name, w)| (name.to_string(), w))
        .into();
        let mut options = Options::new().with("rope", "none");
        if id == "feature_wise" {
            let score = |i: usize, j: usize| when(j == sensors + i, 100.0) - when(j == width - 1, 50.0);
            weights.insert("s".into(), map(sensors, width, score));
            options = Options::new();
        }
        let (y, _) = run(&*registry::layer(id)?.layer(&shape, &options, weights)?, &x)?;
        let missing = (0..steps * sensors).filter(|&i| !there[i]);
        let errors: Vec<f64> = missing
            .map(|i| (f64::from(y[(i / sensors, i % sensors)]) - clean(i / sensors, i % sensors)).powi(2))
            .collect();
        let rmse = (errors.iter().sum::<f64>() / errors.len() as f64).sqrt();
        println!("  {id:<18} {rmse:5.3} root mean square error of the missing readings");
    }
    Ok(())
}

/// The period of a noisy series: the output weights of the tensorized layer take every pair of steps apart, so that they can
/// add up products of steps at one distance.
pub(crate) fn period() -> Result<()> {
    let (steps, lags, period) = (48, 16, 11);
    let mut rng = StreamKey::new(10).named("period").rng();
    let x = Mat::from_fn(steps, lags, |t, j| {
        (match j {
            0 => (t as f64 * TAU / period as f64).cos() + 0.3 * rng.normal(),
            1 => 1.0,
            _ => 0.0,
        }) as f32
    });
    let shape = LayerShape { d_model: lags, n_heads: 1, n_kv_heads: 1, d: 1, d_v: 1 };
    let options = Options::new().with("rank", 1).with("cores", 1).with("seq_len", steps);
    let reading = || map(1, lags, |_, j| when(j == 0, 1.0));
    // Row (j, m) of the output weights: 1 in the column of the distance from j to m.
    let output = |i: usize, _: usize| {
        let (pair, lag) = (i / lags, i % lags);
        when(pair % steps == pair / steps + lag, 1.0 / (steps - lag) as f64)
    };
    let weights: Weights = [
        ("q", map(1, lags, |_, j| when(j == 1, 1.0))),
        ("k", reading()),
        ("v", reading()),
        ("core", map(1, 1, |_, _| 1.0)),
        ("o", map(steps * steps * lags, 1, output)),
    ]
    .map(|(name, w)| (name.to_string(), w))
    .into();
    let (y, _) = run(&*registry::layer("tensorized")?.layer(&shape, &options, weights)?, &x)?;
    let found = (4..lags).max_by(|&a, &b| y[(0, a)].total_cmp(&y[(0, b)])).unwrap_or(0);
    println!("series of {steps} steps with a period of {period}");
    println!("  tensorized         largest autocorrelation at distance {found}: {:.2}", y[(0, found)]);
    Ok(())
}
