//! The fuzz targets: every function that reads an untrusted file, with some use of its result.
//!
//! The binary of this crate mutates files without instrumentation; `fuzz/` runs the same targets under libFuzzer.

#![forbid(unsafe_code)]

use attlas::{Calibration, Options, Out, Problem, Qkv, TensorMut, TensorRef, Workspace, registry};
use attlas_model::bert::Batch;
use attlas_model::checkpoint::{Tensors, shard_names};
use attlas_model::gguf::Gguf;
use attlas_model::tensor::Source;
use attlas_model::{ChatTemplate, Decoder, Encoder, Message, Model, ModelConfig, Recipe, Tokenizer, Weights};
use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A parser with some use of its result.
#[derive(Debug)]
pub struct Target {
    /// Name of the target and of its corpus.
    pub name: &'static str,
    /// Reads an input and uses the result; returns the error's text if it was refused.
    pub run: fn(&[u8]) -> Result<(), String>,
}

/// All targets.
pub static TARGETS: [Target; 14] = [
    Target { name: "gguf", run: gguf },
    Target { name: "gguf_vocabulary", run: gguf_vocabulary },
    Target { name: "safetensors", run: safetensors },
    Target { name: "config", run: config },
    Target { name: "folder", run: folder },
    Target { name: "factored", run: folder },
    Target { name: "tokenizer", run: tokenizer },
    Target { name: "chat_template", run: chat_template },
    Target { name: "recipe", run: recipe },
    Target { name: "trace_safetensors", run: |bytes| trace(bytes, "safetensors") },
    Target { name: "trace_npy", run: |bytes| trace(bytes, "npy") },
    Target { name: "trace_npz", run: |bytes| trace(bytes, "npz") },
    Target { name: "calibrations", run: calibrations },
    Target { name: "arguments", run: arguments },
];

fn text(error: impl std::fmt::Display) -> String {
    let text = error.to_string();
    assert!(!text.is_empty(), "an error that says nothing");
    text
}

fn use_tokenizer(tokenizer: &Tokenizer) {
    let ids = tokenizer.encode("ab a <s>c\u{e9} [X] 12", true).unwrap_or_default();
    let _ = tokenizer.decode(&ids, false);
    let _ = tokenizer.decode(&[0, 5, u32::MAX], true);
    let _ = (tokenizer.token(3), tokenizer.vocab_size());
}

fn use_model(model: &Model) {
    use_tokenizer(&model.tokenizer);
    if let Ok(template) = ChatTemplate::of(model) {
        let _ = template.render(&[Message::user("a")], true);
    }
    if let Some(rope) = &model.config.rope {
        assert!(rope.frequencies(10).iter().all(|f| f.is_finite()));
    }
    match &model.weights {
        Weights::Decoder(_) => {
            let mut logits = Vec::new();
            let outcome = THREADS.with_borrow(|threads| {
                let mut decoder = Decoder::on(Arc::new(model.clone()), &Recipe::default(), threads)?;
                decoder.next_logits(&[1, 0, 2], &mut logits)?;
                decoder.next_logits(&[1], &mut logits)
            });
            assert!(outcome.is_err() || logits.len() == model.config.vocab);
        }
        Weights::Encoder(_) => {
            let outcome = THREADS.with_borrow_mut(|threads| {
                let batch = Batch::new(&[vec![1, 0, 2]])?;
                Encoder::new(model)?.embed(&batch, registry::baseline(), &Options::new(), threads)
            });
            assert!(outcome.is_err() || outcome.is_ok_and(|e| e[0].len() == model.config.hidden));
        }
    }
}

thread_local! {
    /// One thread, started once.
    static THREADS: RefCell<Workspace> = RefCell::new(Workspace::single().expect("a thread"));
}

fn gguf(bytes: &[u8]) -> Result<(), String> {
    use_model(&Model::from_gguf_bytes(bytes.to_vec()).map_err(text)?);
    Ok(())
}

fn gguf_vocabulary(bytes: &[u8]) -> Result<(), String> {
    use_tokenizer(&Tokenizer::from_gguf(&Gguf::parse(bytes).map_err(text)?).map_err(text)?);
    Ok(())
}

fn safetensors(bytes: &[u8]) -> Result<(), String> {
    let tensors = Tensors::from_safetensors(&Arc::new(Source::Owned(bytes.to_vec()))).map_err(text)?;
    tensors.names().filter_map(|name| tensors.get(name)).for_each(|t| drop(t.to_f32()));
    Ok(())
}

fn config(bytes: &[u8]) -> Result<(), String> {
    let index = shard_names(bytes);
    let mut config = match (ModelConfig::from_json(bytes), index) {
        (Ok(config), _) => config,
        (Err(_), Ok(names)) => {
            assert!(names.iter().all(|n| !n.contains(['/', '\\'])));
            return Ok(());
        }
        (Err(error), Err(_)) => return Err(text(error)),
    };
    let _ = config.set_eos_from_json(bytes);
    assert_eq!(config.windows.len(), config.n_layers);
    if let Some(rope) = &config.rope {
        assert!(rope.frequencies(100).iter().all(|f| f.is_finite()));
    }
    Ok(())
}

fn tokenizer(bytes: &[u8]) -> Result<(), String> {
    use_tokenizer(&Tokenizer::from_json(bytes).map_err(text)?);
    Ok(())
}

fn chat_template(bytes: &[u8]) -> Result<(), String> {
    let source = String::from_utf8_lossy(bytes);
    let template = ChatTemplate::new(&source, "<s>", "</s>").map_err(text)?;
    let turns = [Message::new("system", "s"), Message::user("u"), Message::new("assistant", "a")];
    template.render(&turns, true).map_err(text)?;
    Ok(())
}

fn recipe(bytes: &[u8]) -> Result<(), String> {
    let recipe = Recipe::from_toml(&String::from_utf8_lossy(bytes)).map_err(text)?;
    let again = Recipe::from_toml(&recipe.to_toml().map_err(text)?).map_err(text)?;
    assert_eq!(again.rules.len(), recipe.rules.len());
    let config = ModelConfig::from_json(CONFIG).map_err(text)?;
    recipe.resolve(&config).map_err(text)?;
    Ok(())
}

/// Returns the model for which recipes are resolved.
const CONFIG: &[u8] =
    br#"{"model_type": "llama", "hidden_size": 8, "intermediate_size": 4, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-5, "vocab_size": 4,
    "max_position_embeddings": 64}"#;

/// Removes this process's files.
pub fn tidy() {
    for name in ["trace", "folder"] {
        let path = scratch(name);
        let _ = std::fs::remove_dir_all(path.parent().unwrap_or(&path));
    }
}

/// Returns an error's text without the path of the file.
fn about(path: &Path, error: impl std::fmt::Display) -> String {
    text(error).replace(&format!("{}", path.display()), "")
}

/// Returns this process's folder for files that can only be read by path.
fn scratch(name: &str) -> PathBuf {
    // Files in memory if the system supports it: thousands are written.
    let memory = Path::new("/dev/shm");
    let base = if memory.is_dir() { memory.to_path_buf() } else { std::env::temp_dir() };
    let path = base.join(format!("attlas-fuzz-{}", std::process::id())).join(name);
    std::fs::create_dir_all(&path).expect("a scratch folder");
    path
}

fn trace(bytes: &[u8], extension: &str) -> Result<(), String> {
    let path = scratch("trace").join(format!("input.{extension}"));
    std::fs::write(&path, bytes).expect("a scratch file");
    let workload = attlas_lab::trace::read(std::slice::from_ref(&path)).map_err(|e| about(&path, e))?;
    for x in &workload.layers {
        let p = &x.problem;
        assert_eq!(x.q.len(), p.n_heads * p.n_q * p.d);
        assert_eq!(x.k.len(), p.n_kv_heads * p.n_k * p.d);
        assert_eq!(x.v.len(), p.n_kv_heads * p.n_k * p.d_v);
        assert!(x.q.iter().chain(&x.k).chain(&x.v).all(|v| v.is_finite()));
    }
    Ok(())
}

fn calibrations(bytes: &[u8]) -> Result<(), String> {
    let path = scratch("trace").join("input.json");
    std::fs::write(&path, bytes).expect("a scratch file");
    let read = attlas_lab::Calibrations::read(&path).map_err(|e| about(&path, e))?;
    read.entries().iter().try_for_each(|e| attend_with(&e.calibration).map_err(text))
}

/// Plans a few tokens in the shape of a calibration, unless that is large.
fn attend_with(c: &Calibration) -> attlas::Result<()> {
    const N: usize = 12;
    let method = registry::method(&c.method)?;
    let (heads, groups, d, d_v) = (c.n_heads.min(4), c.n_kv_heads.min(4), c.d.min(16), c.d_v.min(16));
    let p = Problem { d_v, ..Problem::new(heads, N, d).with_kv_heads(groups).causal() };
    let plan = method.plan_with(&p, &Options::new(), Some(c))?;
    let x: Vec<f32> = (0..4 * N * 16).map(|i| (i as f32 * 0.37).sin()).collect();
    let view = |heads: usize, cols: usize| TensorRef::bhnd(&x[..heads * N * cols], [1, heads, N, cols]);
    let inputs = Qkv::new(view(heads, d)?, view(groups, d)?, view(groups, d_v)?).into();
    let mut o = vec![0.0f32; heads * N * d_v];
    let mut out = Out::new(TensorMut::bhnd(&mut o, [1, heads, N, d_v])?).into();
    THREADS.with_borrow_mut(|threads| plan.execute(&inputs, &mut out, threads)).map(drop)
}

/// Parses a source on the first line and settings of methods on the others.
fn arguments(bytes: &[u8]) -> Result<(), String> {
    let lines = String::from_utf8_lossy(bytes);
    let mut lines = lines.lines();
    let source = lines.next().unwrap_or_default().parse::<attlas_lab::Source>();
    let set = lines.map(String::from).collect();
    let chosen = attlas_lab::select::Choice { set, ..Default::default() }.resolve();
    source.map_err(text)?;
    chosen.map_err(text)?;
    Ok(())
}

/// Unpacks a folder from one input: each file follows a line `=== name`.
fn folder(bytes: &[u8]) -> Result<(), String> {
    let folder = scratch("folder");
    let parts = split(bytes);
    for name in FILES {
        let path = folder.join(name);
        match parts.iter().find(|(n, _)| *n == name.as_bytes()) {
            Some((_, content)) => std::fs::write(&path, content).expect("a scratch file"),
            None => drop(std::fs::remove_file(&path)),
        }
    }
    let model = Model::open(&folder).map_err(|e| about(&folder, e))?;
    use_model(&model);
    Ok(())
}

/// File names allowed in a folder.
const FILES: [&str; 7] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "one.safetensors",
];

const MARK: &[u8] = b"\n=== ";

fn split(bytes: &[u8]) -> Vec<(&[u8], &[u8])> {
    let mut starts: Vec<usize> =
        bytes.windows(MARK.len()).enumerate().filter(|(_, w)| *w == MARK).map(|(i, _)| i).collect();
    starts.push(bytes.len());
    starts
        .windows(2)
        .filter_map(|pair| {
            let part = &bytes[pair[0] + MARK.len()..pair[1]];
            let line = part.iter().position(|b| *b == b'\n')?;
            Some((&part[..line], &part[line + 1..]))
        })
        .collect()
}
