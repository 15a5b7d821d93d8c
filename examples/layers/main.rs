//! What layers are for, on data made here, with weights written by hand: images, a video, series of sensors, sequences, triples
//! that match, patches of an image.
//!
//! `cargo run -p xtask --example layers` runs all of them, `… layers axial` those of one layer.

mod cache;
mod image;
mod sequence;
mod series;
mod video;

use attlas::layer::{Dense, Layer, Linear};
use attlas::{Mask, Mat, Workspace};
use attlas_lab::simulate::{Matching, Task};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// The layers that each example shows.
const EXAMPLES: [(&[&str], fn() -> Result<()>); 9] = [
    (&["axial", "mode_wise", "grouped_query"], image::image),
    (&["higher_order"], video::video),
    (&["teaformer"], series::series),
    (&["feature_wise"], series::gaps),
    (&["tensorized"], series::period),
    (&["two_simplicial"], sequence::pairs),
    (&["gau"], sequence::gated),
    (&["third_order"], triples),
    (&["latent", "tensor_product", "collaborative"], cache::caches),
];

fn main() -> Result<()> {
    let wanted: Vec<String> = std::env::args().skip(1).collect();
    for id in attlas::registry::LAYERS.iter().map(|l| l.id) {
        if !EXAMPLES.iter().any(|(ids, _)| ids.contains(&id)) {
            return Err(format!("the layer {id} has no example").into());
        }
    }
    let chosen = |ids: &[&str]| wanted.is_empty() || wanted.iter().any(|w| ids.contains(&w.as_str()));
    for (_, example) in EXAMPLES.iter().filter(|(ids, _)| chosen(ids)) {
        example()?;
    }
    Ok(())
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

/// Whether two other tokens sum to zero with a token, modulo a number: pairs of keys decide it, single keys cannot.
fn triples() -> Result<()> {
    let task = Matching { n: 24, modulus: None, count: 20, task: Task::Match3, single: false, seed: 1 };
    let run = task.run(1)?;
    println!("triples that sum to zero modulo {}", run.modulus);
    println!("  third order        {:5.1} % of tokens right", 100.0 * run.third_order.accuracy);
    println!("  ordinary attention {:5.1} %", 100.0 * run.pairwise.accuracy);
    Ok(())
}
