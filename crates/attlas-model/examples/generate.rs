//! Continues a text with a model and any attention method.
//!
//! `cargo run --release -p attlas-model --example generate -- model.gguf "The capital of France is" [method]`

use attlas::{Options, Schedule};
use attlas_model::sample::argmax;
use attlas_model::{Decoder, Model, Recipe};
use std::path::Path;
use std::sync::Arc;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [model, prompt, method @ ..] = &arguments[..] else {
        println!("usage: generate MODEL PROMPT [METHOD]");
        return Ok(());
    };
    let model = Arc::new(Model::open(Path::new(model))?);
    let recipe = method.first().map_or(Recipe::default(), |id| Recipe::uniform(id, Options::new()));
    let mut decoder = Decoder::new(model.clone(), &recipe, Schedule::default())?;

    let mut ids = model.tokenizer.encode(prompt, true)?;
    let (mut next, mut logits) = (ids.clone(), Vec::new());
    for _ in 0..20 {
        decoder.next_logits(&next, &mut logits)?;
        next = argmax(&logits).into_iter().collect();
        ids.extend(&next);
    }
    println!("{}", model.tokenizer.decode(&ids, true)?);
    Ok(())
}
