//! The attlas side of `bench/peers/model.py`: reads one JSON request per line, runs it once, answers with seconds. It
//! answers `ceilings` with the machine's peak rates, and `tokens` with the tokens of a file.

use attlas::{Options, Schedule};
use attlas_lab::text::open_model;
use attlas_model::kept::CacheFormat;
use attlas_model::{Decoder, Model, Recipe, Weights};
use attlas_num::kernels::quant::narrow;
use attlas_num::kernels::{pages, read_sum};
use rayon::prelude::*;
use serde_json::{Map, Value, json};
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
        let answer = if request["ceilings"].as_bool() == Some(true) {
            ceilings(threads as usize, &model)?
        } else if let Some(file) = request["tokens"].as_str() {
            json!({ "tokens": model.tokenizer.encode(&std::fs::read_to_string(file)?, false)? })
        } else {
            run(&request, threads, &model, &mut last)?
        };
        println!("{answer}");
        std::io::stdout().flush()?;
    }
    Ok(())
}

fn run(
    request: &Value,
    threads: u64,
    model: &std::sync::Arc<Model>,
    last: &mut Option<(u64, Decoder)>,
) -> Result<Value, Box<dyn std::error::Error>> {
    let ids =
        |name: &str| -> Result<Vec<u32>, serde_json::Error> { serde_json::from_value(request[name].clone()) };
    let (prompt, steps) = (ids("prompt")?, ids("steps")?);
    if last.as_ref().is_none_or(|(t, _)| *t != threads) {
        let schedule = Schedule { threads: threads as usize, ..Schedule::default() };
        let precision = request["precision"].as_str().unwrap_or("full").to_owned();
        let recipe = match request["recipe"].as_str() {
            Some(file) => Recipe::open(Path::new(file))?,
            None => Recipe::uniform("exact", Options::new().with("precision", precision)),
        };
        let mut decoder = Decoder::new(model.clone(), &recipe, schedule)?;
        decoder.compute_in(request["compute"].as_str().unwrap_or("f32").parse()?);
        decoder.pack_keys(request["cache"].as_str().unwrap_or("f32").parse()?)?;
        *last = Some((threads, decoder));
    }
    let Some((_, decoder)) = last else { return Err("no decoder".into()) };
    decoder.reset();
    let mut logits = Vec::new();
    let start = Instant::now();
    decoder.next_logits(&prompt, &mut logits)?;
    let prefill = start.elapsed().as_secs_f64();
    let start = Instant::now();
    for id in &steps {
        decoder.next_logits(&[*id], &mut logits)?;
    }
    Ok(json!({"prefill": prefill, "decode": start.elapsed().as_secs_f64()}))
}

/// Rates of 8-bit multiplications and additions and of bytes read, per second, and a token's use of both: the
/// operations of its matrices in a prompt, and while decoding the bytes of all matrices and, for each format of the cache, of a
/// cached token.
fn ceilings(threads: usize, model: &Model) -> Result<Value, Box<dyn std::error::Error>> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build()?;
    let (mut operations, mut bytes) = (0.0f64, 0.0f64);
    let mut data: Vec<f32> = Vec::new();
    pages::reserve(&mut data, 64 << 20);
    data.resize(64 << 20, 1.0);
    for _ in 0..5 {
        let start = Instant::now();
        let done: u64 = pool.broadcast(|_| narrow::burn(narrow::Isa::best(), 1_000_000).0).into_iter().sum();
        operations = operations.max(done as f64 / start.elapsed().as_secs_f64());
        let start = Instant::now();
        let sum: f32 = pool.install(|| data.par_chunks(1 << 20).map(read_sum).sum());
        assert!(sum > 0.0);
        bytes = bytes.max(4.0 * data.len() as f64 / start.elapsed().as_secs_f64());
    }
    let Weights::Decoder(weights) = &model.weights else { return Err("the model is an encoder".into()) };
    let (mut products, mut stored) = (0, 0);
    for l in &weights.layers {
        for map in [&l.q, &l.k, &l.v, &l.o, &l.gate, &l.up, &l.down] {
            products += 2 * map.inputs() * map.outputs();
            stored += map.matrices().map(|m| m.bytes().len()).sum::<usize>();
        }
    }
    stored += weights.output.matrices().map(|m| m.bytes().len()).sum::<usize>();
    let c = &model.config;
    let cached = |format: CacheFormat| 2 * c.n_layers * c.n_kv_heads * format.row_bytes(c.head_dim);
    let cached: Map<String, Value> =
        CacheFormat::ALL.into_iter().map(|f| (f.name().to_owned(), cached(f).into())).collect();
    Ok(json!({
        "int8_per_second": operations, "read_per_second": bytes, "products": products, "stored": stored, "cached": cached,
    }))
}
