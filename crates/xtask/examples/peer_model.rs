//! The attlas side of `bench/peers/model.py`: reads one JSON request a line, runs it once, answers with seconds.

use attlas::{Options, Schedule};
use attlas_lab::text::open_model;
use attlas_model::{Decoder, Recipe};
use serde_json::{Value, json};
use std::io::{BufRead, Write};
use std::path::Path;
use std::time::Instant;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args().nth(1).ok_or("the path of a model is missing")?;
    let model = open_model(Path::new(&path))?;
    let mut last: Option<(u64, Decoder)> = None;
    for line in std::io::stdin().lock().lines() {
        let request: Value = serde_json::from_str(&line?)?;
        let threads = request["threads"].as_u64().unwrap_or(1);
        let ids = |name: &str| -> Result<Vec<u32>, serde_json::Error> {
            serde_json::from_value(request[name].clone())
        };
        let (prompt, steps) = (ids("prompt")?, ids("steps")?);
        if last.as_ref().is_none_or(|(t, _)| *t != threads) {
            let schedule = Schedule { threads: threads as usize, ..Schedule::default() };
            let precision = request["precision"].as_str().unwrap_or("full").to_owned();
            let recipe = Recipe::uniform("exact", Options::new().with("precision", precision));
            last = Some((threads, Decoder::new(model.clone(), &recipe, schedule)?));
        }
        let Some((_, decoder)) = &mut last else { continue };
        decoder.reset();
        let mut logits = Vec::new();
        let start = Instant::now();
        decoder.next_logits(&prompt, &mut logits)?;
        let prefill = start.elapsed().as_secs_f64();
        let start = Instant::now();
        for id in &steps {
            decoder.next_logits(&[*id], &mut logits)?;
        }
        println!("{}", json!({"prefill": prefill, "decode": start.elapsed().as_secs_f64()}));
        std::io::stdout().flush()?;
    }
    Ok(())
}
