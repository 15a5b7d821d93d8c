//! Runs a model with a recipe, and prints the distance of its next-token prediction from exact attention's.
//!
//! `cargo run --release -p attlas-model --example recipe -- model.gguf recipe.toml book.txt`

use attlas::Schedule;
use attlas_model::perplexity::Divergence;
use attlas_model::{Decoder, Model, Recipe};
use std::path::Path;
use std::sync::Arc;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [model, recipe, text] = &arguments[..] else {
        println!("usage: recipe MODEL RECIPE TEXT");
        return Ok(());
    };
    let model = Arc::new(Model::open(Path::new(model))?);
    let mut ids = model.tokenizer.encode(&std::fs::read_to_string(text)?, false)?;
    ids.truncate(model.config.max_positions.min(2048));
    let Some((&target, prompt)) = ids.split_last() else { return Ok(()) };

    let predict = |recipe: &Recipe| -> attlas_model::Result<Vec<f32>> {
        let mut logits = Vec::new();
        Decoder::new(model.clone(), recipe, Schedule::default())?.next_logits(prompt, &mut logits)?;
        Ok(logits)
    };
    let mut divergence = Divergence::default();
    divergence.push(&predict(&Recipe::default())?, &predict(&Recipe::open(Path::new(recipe))?)?, target);
    println!("divergence after {} tokens: {:.3e} nats", prompt.len(), divergence.kl().mean());
    Ok(())
}
