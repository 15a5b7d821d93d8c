//! Latent, tensor product and collaborative attention: what a layer keeps of the tokens that it has seen.

use crate::{Result, map, run};
use attlas::layer::{Layer, LayerShape, Weights};
use attlas::{Mat, Options, registry};
use attlas_num::linalg::{matmul, matmul_nt};
use attlas_num::rng::StreamKey;

const WIDTH: usize = 36;
const HEADS: usize = 6;
const D: usize = 6;

/// Patches of 6 × 6 pixels of a smooth image: they lie near a subspace of few dimensions, its first cosines.
fn patches(n: usize) -> (Mat<f64>, Mat<f64>) {
    let mut rng = StreamKey::new(12).named("patches").rng();
    let cosine = |k: usize, i: usize| (std::f64::consts::PI * k as f64 * (i as f64 + 0.5) / 6.0).cos();
    let basis = Mat::from_fn(WIDTH, WIDTH, |pixel, wave| {
        let norm = |k: usize| if k == 0 { 6.0f64.sqrt() } else { 3.0f64.sqrt() };
        let (y, x) = (wave / 6, wave % 6);
        cosine(y, pixel / 6) * cosine(x, pixel % 6) / (norm(y) * norm(x))
    });
    let waves = Mat::from_fn(n, WIDTH, |_, wave| {
        let slow = 1.0 + (wave / 6).pow(2) as f64 + (wave % 6).pow(2) as f64;
        6.0 * rng.normal() / slow.powf(1.5)
    });
    (matmul_nt(waves.as_ref(), basis.as_ref()), basis)
}

fn layer(
    id: &str,
    shape: &LayerShape,
    options: &Options,
    weights: &[(&str, &Mat<f64>)],
) -> Result<Box<dyn Layer>> {
    let weights: Weights = weights
        .iter()
        .map(|(name, w)| (name.to_string(), map(w.rows(), w.cols(), |i, j| w[(i, j)])))
        .collect();
    Ok(registry::layer(id)?.layer(shape, options, weights)?)
}

/// Keys and values of all heads from one short latent, from few shared factors, or scores from shared features: the same
/// outputs from a smaller cache where the data or the heads have that structure.
pub(crate) fn caches() -> Result<()> {
    let (x, basis) = patches(256);
    let x32 = x.cast::<f32>();
    let random = |name: &str, rows: usize, cols: usize| {
        let mut rng = StreamKey::new(13).named(name).rng();
        Mat::from_fn(rows, cols, |_, _| rng.normal() / (cols as f64).sqrt())
    };
    let shape = LayerShape { d_model: WIDTH, n_heads: HEADS, n_kv_heads: HEADS, d: D, d_v: D };
    let plain = Options::new().with("rope", "none");
    let [q, v, o] = ["q", "v", "o"].map(|name| random(name, HEADS * D, WIDTH));
    let k = random("k", HEADS * D, WIDTH);
    let full = layer("grouped_query", &shape, &plain, &[("q", &q), ("k", &k), ("v", &v), ("o", &o)])?;
    let (all, _) = run(&*full, &x32)?;
    let distance = |y: &Mat<f32>, all: &Mat<f32>| {
        let gap: f64 = y.data().iter().zip(all.data()).map(|(a, b)| f64::from(a - b).powi(2)).sum();
        gap.sqrt() / all.data().iter().map(|a| f64::from(*a).powi(2)).sum::<f64>().sqrt()
    };
    println!("256 patches of 6 × 6 pixels, {HEADS} heads");
    println!("  grouped_query      {:3} numbers cached for a token", full.cache_elements());
    for rank in [6, 12, 24] {
        // The latent is the patch in its slowest waves; keys and values are rebuilt from it.
        let mut order: Vec<usize> = (0..WIDTH).collect();
        order.sort_by_key(|w| (w / 6).pow(2) + (w % 6).pow(2));
        let slow = Mat::from_fn(WIDTH, rank, |i, j| basis[(i, order[j])]);
        let (down, k_up, v_up) =
            (slow.transpose(), matmul(k.as_ref(), slow.as_ref()), matmul(v.as_ref(), slow.as_ref()));
        // Of every head its keys, then its values.
        let up = Mat::from_fn(2 * HEADS * D, rank, |i, j| {
            let (head, e) = (i / (2 * D), i % (2 * D));
            if e < D { k_up[(head * D + e, j)] } else { v_up[(head * D + e - D, j)] }
        });
        let options = plain.clone().with("rank", rank).with("rope_dim", 0);
        let latent =
            layer("latent", &shape, &options, &[("q", &q), ("kv_a", &down), ("kv_b", &up), ("o", &o)])?;
        let (y, _) = run(&*latent, &x32)?;
        let (cached, error) = (latent.cache_elements(), distance(&y, &all));
        println!("  latent             {cached:3} numbers, relative distance {error:.3}");
    }
    // Heads whose keys and values are mixtures of two.
    let mix = random("mix", HEADS, 2);
    let [k2, v2] = ["k2", "v2"].map(|name| random(name, 2 * D, WIDTH));
    let mixed = |two: &Mat<f64>| {
        Mat::from_fn(HEADS * D, WIDTH, |i, j| {
            let (h, e) = (i / D, i % D);
            (0..2).map(|r| mix[(h, r)] * two[(r * D + e, j)]).sum::<f64>()
        })
    };
    let (k, v) = (mixed(&k2), mixed(&v2));
    let full = layer("grouped_query", &shape, &plain, &[("q", &q), ("k", &k), ("v", &v), ("o", &o)])?;
    let (all, _) = run(&*full, &x32)?;
    // The layer takes the mean over terms, factors of heads term by term.
    let heads = Mat::from_fn(2 * HEADS, 1, |i, _| 2.0 * mix[(i % HEADS, i / HEADS)]);
    let options = plain.clone().with("kv_only", true).with("contextual", "b_only");
    let factors = [("q", &q), ("a_k", &heads), ("b_k", &k2), ("a_v", &heads), ("b_v", &v2), ("o", &o)];
    let product = layer("tensor_product", &shape, &options, &factors)?;
    let (y, _) = run(&*product, &x32)?;
    println!(
        "  tensor_product     {:3} numbers, relative distance {:.1e} where heads are mixtures of two",
        product.cache_elements(),
        distance(&y, &all)
    );
    // Heads that score by their own weights on eight features in common.
    let (q8, k8, weight) = (random("q8", 8, WIDTH), random("k8", 8, WIDTH), random("weight", HEADS * 8, 1));
    let wide = LayerShape { d: 8, ..shape };
    let own = Mat::from_fn(HEADS * 8, WIDTH, |i, j| weight[(i, 0)] * q8[(i % 8, j)]);
    let keys = Mat::from_fn(HEADS * 8, WIDTH, |i, j| k8[(i % 8, j)]);
    let full = layer("grouped_query", &wide, &plain, &[("q", &own), ("k", &keys), ("v", &v), ("o", &o)])?;
    let (all, _) = run(&*full, &x32)?;
    let shared = [("q", &q8), ("k", &k8), ("mix", &weight), ("v", &v), ("o", &o)];
    let shared = layer("collaborative", &wide, &Options::new().with("rank", 8), &shared)?;
    let (y, _) = run(&*shared, &x32)?;
    println!(
        "  collaborative      {:.0} % of the parameters, relative distance {:.1e} where heads share features",
        100.0 * shared.parameters() as f64 / full.parameters() as f64,
        distance(&y, &all)
    );
    Ok(())
}
