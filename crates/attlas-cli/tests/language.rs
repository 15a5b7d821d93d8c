//! `extract`, `perplexity` and `generate` on real models: outputs, errors and exit statuses.

mod support;

use serde_json::Value;
use std::io::BufRead;
use support::{Folder, alice, attlas, json, minilm, model};

fn refused(args: &[&str], expected: &str) {
    let (status, out, err) = attlas(args);
    assert_eq!((status, out.as_str()), (2, ""), "{err}");
    assert!(err.starts_with("error: ") && err.contains(expected), "{err}");
    assert_eq!(err.lines().count(), 2, "an error and what to do next: {err}");
}

#[test]
fn perplexity_tells_the_protocol_and_compares_a_method_with_exact_attention() {
    let (model, text) = (model(), alice());
    let x = json(&[
        "perplexity",
        &model,
        "--text",
        &text,
        "--tokens",
        "96",
        "--context",
        "64",
        "--method",
        "sink_window",
        "--set",
        "window=16",
        "--json",
    ]);
    assert_eq!((&x["tokens"], &x["scored"], &x["windows"]), (&96.into(), &94.into(), &2.into()));
    assert_eq!((&x["protocol"], &x["context"], &x["stride"]), (&"strided".into(), &64.into(), &64.into()));
    assert_eq!((&x["bos"], &x["attention"]), (&false.into(), &"sink_window".into()));
    let number = |key: &str| x[key].as_f64().unwrap_or_else(|| panic!("{key}: {x}"));
    assert!((number("ppl") / number("nll").exp() - 1.0).abs() < 1e-12);
    assert!(number("exact_ppl") > 1.0 && number("kl_mean") > 0.0 && number("kl_q99") >= number("kl_median"));
    assert!(number("same_top") > 0.3 && number("same_top") < 1.0);
    assert!(number("keys_share") < 1.0);
    let (status, out, _) = attlas(&[
        "perplexity",
        &model,
        "--text",
        &text,
        "--tokens",
        "40",
        "--bos",
        "--protocol",
        "windows",
        "--context",
        "20",
    ]);
    assert_eq!(status, 0);
    assert!(out.contains("windows, window 20, stride 19, with BOS; 2 windows, 36 tokens scored"), "{out}");
    assert!(out.contains("attention   exact"), "{out}");
}

#[test]
fn a_budget_of_all_keys_does_not_diverge() {
    let folder = Folder::new("recipe");
    let recipe = folder.file("recipe.toml");
    let text = "version = 1\n[[rule]]\nlayers = \"0-14\"\nmethod = \"top_k\"\nparams = { keys = 4096 }\n";
    std::fs::write(&recipe, text).unwrap();
    let x =
        json(&["perplexity", &model(), "--text", &alice(), "--tokens", "64", "--recipe", &recipe, "--json"]);
    assert_eq!((&x["attention"], &x["same_top"]), (&"recipe".into(), &1.0.into()));
    assert!(x["kl_mean"].as_f64().unwrap() < 1e-6, "{x}");
}

#[test]
fn generating_is_greedy_by_default_and_reproducible_by_seed() {
    let model = model();
    let prompt = ["generate", &model, "--prompt", "The capital of France is", "--json", "--max-tokens", "8"];
    let prompt = [&prompt[..], &["--compute", "f32"]].concat();
    let x = json(&prompt);
    assert_eq!(x["prompt_ids"], serde_json::json!([504, 3575, 282, 4649, 314]));
    assert_eq!(x["ids"], serde_json::json!([7042, 30, 198, 198, 504, 2988, 314, 42]));
    assert!(x["text"].as_str().unwrap().starts_with(" Paris."));
    assert_eq!(x["ended"], "max_tokens");
    assert!(x["tokens_per_second"].as_f64().unwrap() > 0.0);
    let drawn = |seed: &str| {
        json(&[&prompt[..], &["--temperature", "1.5", "--top-k", "50", "--seed", seed]].concat())["ids"]
            .clone()
    };
    assert_eq!(drawn("1"), drawn("1"));
    assert_ne!(drawn("1"), drawn("2"));
    let (status, out, err) =
        attlas(&["generate", &model, "--prompt", "The capital of France is", "--stop", "\n"]);
    assert_eq!((status, out.as_str()), (0, " Paris.\n"));
    assert!(err.contains("tokens/s") && err.contains("K in bf16, products int8"), "{err}");
    // Keys and values take two bytes a number unless four are asked for.
    let full = json(&[&prompt[..], &["--cache", "f32"]].concat());
    assert_eq!((&x["cache"], &full["cache"]), (&"bf16".into(), &"f32".into()));
    assert_eq!(x["cache_bytes"].as_u64().map(|n| 2 * n), full["cache_bytes"].as_u64());
}

#[test]
fn a_chat_is_laid_out_by_the_models_template_and_ends_by_itself() {
    let x = json(&[
        "generate",
        &model(),
        "--chat",
        "--system",
        "You are brief.",
        "--prompt",
        "Say hello.",
        "--max-tokens",
        "40",
        "--json",
    ]);
    let ids: Vec<u64> = x["prompt_ids"].as_array().unwrap().iter().map(|v| v.as_u64().unwrap()).collect();
    assert_eq!(ids.iter().filter(|&&id| id == 1).count(), 3, "three turns begin: {ids:?}");
    assert_eq!(ids[0], 1);
    assert!(!x["text"].as_str().unwrap().is_empty());
}

#[test]
fn what_is_extracted_can_be_compared_in_every_format() {
    let folder = Folder::new("extract");
    let (model, text) = (model(), alice());
    let trace = folder.file("t.safetensors");
    let x = json(&[
        "extract",
        &model,
        "--text",
        &text,
        "--tokens",
        "48",
        "--layers",
        "1,3",
        "--heads",
        "3-5",
        "--pre-rope",
        "--out",
        &trace,
        "--json",
    ]);
    assert_eq!((&x["tokens"], &x["heads"], &x["kv_heads"]), (&48.into(), &3.into(), &1.into()));
    assert_eq!(x["layers"], serde_json::json!([1, 3]));
    assert_eq!(x["metadata"]["heads"], "3-5");
    let y = json(&["compare", &trace, "--methods", "sink_window", "--set", "sink_window.window=8", "--json"]);
    assert_eq!((&y["mask"], &y["metadata"]["tokens"]), (&"causal".into(), &"48".into()));
    assert_eq!(y["rows"].as_array().unwrap().iter().filter(|r| r["method"] == "sink_window").count(), 6);
    let direct = json(&[
        "compare",
        &model,
        "--text",
        &text,
        "--tokens",
        "48",
        "--layers",
        "1,3",
        "--heads",
        "3-5",
        "--methods",
        "sink_window",
        "--set",
        "sink_window.window=8",
        "--json",
    ]);
    let error =
        |x: &Value| x["summary"].as_array().unwrap().last().unwrap()["rel_fro"]["mean"].as_f64().unwrap();
    assert_eq!(error(&y), error(&direct), "a file in single precision loses nothing");
    let head = folder.file("h.npy");
    json(&[
        "extract", &model, "--text", &text, "--tokens", "20", "--layers", "0", "--heads", "8", "--out",
        &head, "--json",
    ]);
    let one = json(&["compare", &head, "--methods", "sink_window", "--json"]);
    assert_eq!(one["exact"]["heads"].as_array().unwrap().len(), 1);
    let left: Vec<_> = std::fs::read_dir(&folder.0).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left.len(), 2, "no temporary file is left: {left:?}");
}

#[test]
fn an_encoder_is_extracted_without_a_mask() {
    let folder = Folder::new("encoder");
    let trace = folder.file("t.npz");
    let args = [
        "extract",
        &minilm().display().to_string(),
        "--text",
        &alice(),
        "--tokens",
        "30",
        "--out",
        &trace,
        "--json",
    ];
    let x = json(&args);
    assert_eq!((&x["tokens"], &x["heads"], &x["d"]), (&32.into(), &12.into(), &32.into()));
    assert_eq!(x["layers"].as_array().unwrap().len(), 6);
}

#[test]
fn mistakes_are_named_with_a_way_out() {
    let folder = Folder::new("mistakes");
    let (model, text) = (model(), alice());
    let out = folder.file("t.safetensors");
    let empty = folder.file("empty.txt");
    std::fs::write(&empty, "").unwrap();
    refused(&["perplexity", "nowhere.gguf", "--text", &text], "nowhere.gguf");
    refused(&["perplexity", &text, "--text", &text], "alice29.txt");
    refused(&["perplexity", &model, "--text", "nowhere.txt"], "nowhere.txt");
    refused(&["perplexity", &model, "--text", &empty], "at least one token");
    refused(&["perplexity", &model, "--text", &text, "--context", "600000"], "at most 524288");
    refused(&["perplexity", &model, "--text", &text, "--method", "nonsense"], "nonsense");
    refused(&["perplexity", &model, "--text", &text, "--method", "top_k", "--set", "nonsense=1"], "keys");
    let bidirectional = attlas::registry::METHODS.iter().find(|m| !m.claims.causal).unwrap();
    refused(&["perplexity", &model, "--text", &text, "--method", bidirectional.id], bidirectional.id);
    refused(&["generate", &model, "--prompt", ""], "at least one token");
    refused(&["generate", &model, "--prompt-file", &text], "context of 8192");
    refused(&["generate", &model, "--prompt", "a", "--top-p", "2"], "top_p");
    refused(&["generate", &minilm().display().to_string(), "--prompt", "a"], "encoder");
    refused(&["extract", &model, "--text", &text, "--out", "t.txt"], ".safetensors, .npz or .npy");
    refused(
        &["extract", &model, "--text", &text, "--tokens", "8", "--layers", "30", "--out", &out],
        "0 to 29",
    );
    refused(
        &["extract", &model, "--text", &text, "--tokens", "8", "--heads", "0,1,3", "--out", &out],
        "key head",
    );
    refused(&["compare", &model], "--text");
    assert!(!std::path::Path::new(&out).exists());
}

#[test]
fn tuning_writes_a_recipe_within_its_budget_and_goes_on_where_it_was() {
    let folder = Folder::new("tune");
    let (model, text, out) = (model(), alice(), folder.file("recipe.toml"));
    let common =
        ["tune", &model, "--text", &text, "--tokens", "256", "--check-tokens", "64", "--layers", "3,4"];
    let few = ["--methods", "sink_window,top_k", "--effort", "quick", "--out", &out, "--json"];
    let tune = |more: &[&str]| attlas(&[&common[..], &few[..], more].concat());
    let (status, json_text, err) = tune(&["--max-error", "0.5"]);
    assert_eq!(status, 0, "{err}");
    let x: Value = serde_json::from_str(&json_text).unwrap();
    let picks = x["picks"].as_array().unwrap();
    assert_eq!(picks.len(), 2 * 3);
    // New tokens have separate choices here, all with streams.
    assert_eq!(x["decodes_exactly"], serde_json::json!([]));
    assert!(picks.iter().all(|p| p["error"].as_f64().unwrap() <= 0.5 && p["cost"].as_f64().unwrap() <= 1.0));
    // The faster method depends on the machine; the written recipe runs and changes no other layer.
    let run = json(&["perplexity", &model, "--text", &text, "--tokens", "64", "--recipe", &out, "--json"]);
    assert!(run["ppl"].as_f64().unwrap() > 1.0);
    let recipe = std::fs::read_to_string(&out).unwrap();
    assert!(
        recipe.contains("[evidence]") && recipe.contains("text_sha256") && recipe.contains("tokens = 256")
    );
    assert!(!recipe.contains("layers = \"5\""));

    let (status, again, err) = tune(&["--max-error", "0.5"]);
    assert!(status == 0 && err.contains("measurements are known"), "{err}");
    let again: Value = serde_json::from_str(&again).unwrap();
    assert_eq!(again["measurements"], x["measurements"], "nothing is measured twice");
    let (status, _, err) = tune(&["--max-error", "0.5", "--seed", "9"]);
    assert!(status == 2 && err.contains("found") && err.contains("seed 0"), "{err}");

    // A budget that only exact attention can meet is met.
    let (status, tight, err) = tune(&["--max-kl", "1e-12"]);
    assert_eq!(status, 0, "{err}");
    let tight: Value = serde_json::from_str(&tight).unwrap();
    let last = tight["rounds"].as_array().unwrap().last().unwrap();
    assert!(last["holds"] == true || tight["note"].is_string(), "{tight}");
    for p in tight["picks"].as_array().unwrap() {
        assert!(p["method"] == "exact" || last["check"]["kl_mean"].as_f64().unwrap() <= 1e-12, "{p}");
    }
}

#[test]
fn parts_of_a_search_are_merged() {
    let folder = Folder::new("shards");
    let (model, text, out) = (model(), alice(), folder.file("recipe.toml"));
    let parts = [folder.file("0.jsonl"), folder.file("1.jsonl")];
    let args = [
        "tune",
        &model,
        "--text",
        &text,
        "--tokens",
        "128",
        "--check-tokens",
        "32",
        "--layers",
        "3",
        "--methods",
        "sink_window",
        "--effort",
        "quick",
        "--max-error",
        "0.3",
        "--out",
        &out,
        "--json",
    ];
    for (i, part) in parts.iter().enumerate() {
        let shard = format!("{i}/2");
        let x = json(&[&args[..], &["--shard", &shard, "--state", part]].concat());
        assert!(x["recipe"].is_null() && x["measurements"].as_u64().unwrap() > 0);
    }
    assert!(!std::path::Path::new(&out).exists());
    let x = json(&[&args[..], &["--merge", &parts.join(",")]].concat());
    assert_eq!(x["picks"].as_array().unwrap().len(), 3);
    assert!(std::path::Path::new(&out).exists());
}

#[test]
fn tuning_refuses_what_it_cannot_do() {
    let folder = Folder::new("tune-mistakes");
    let (model, text, out) = (model(), alice(), folder.file("r.toml"));
    let short = folder.file("short.txt");
    std::fs::write(&short, "Alice was beginning to get very tired.").unwrap();
    let base = ["tune", &model, "--out", &out, "--text"];
    let with = |more: &[&'static str], text: &str| {
        let args: Vec<&str> = base.iter().copied().chain([text]).chain(more.iter().copied()).collect();
        attlas(&args)
    };
    assert_eq!(with(&[], &text).0, 2, "a budget is needed");
    let (status, _, err) = with(&["--max-error", "0.1"], &short);
    assert!(status == 2 && err.contains("not used for tuning"), "{err}");
    let (status, _, err) = with(&["--max-error", "0.1", "--tokens", "9000"], &text);
    assert!(status == 2 && err.contains("at most 8192"), "{err}");
    let (status, _, err) = with(&["--max-error", "0.1", "--layers", "30", "--tokens", "32"], &text);
    assert!(status == 2 && err.contains("0 to 29"), "{err}");
    assert_eq!(with(&["--max-error", "0.1", "--shard", "2/2"], &text).0, 2);
    assert_eq!(with(&["--max-ppl-increase", "-1%"], &text).0, 2);
    refused(
        &[
            "tune",
            &model,
            "--text",
            &text,
            "--max-kl",
            "1",
            "--tokens",
            "32",
            "--layers",
            "0",
            "--out",
            "no/such/r.toml",
        ],
        "writing failed",
    );
    assert!(!std::path::Path::new(&out).exists());
}

#[test]
fn a_recipe_for_another_model_or_with_unknown_names_is_refused() {
    let folder = Folder::new("recipes");
    let (model, text) = (model(), alice());
    let try_one = |name: &str, toml: &str, expected: &str| {
        let path = folder.file(name);
        std::fs::write(&path, format!("version = 1\n{toml}")).unwrap();
        refused(&["perplexity", &model, "--text", &text, "--tokens", "32", "--recipe", &path], expected);
        refused(&["generate", &model, "--prompt", "a", "--max-tokens", "1", "--recipe", &path], expected);
    };
    try_one("id.toml", "[[rule]]\nmethod = \"hyperattention\"\n", "hyper");
    try_one("param.toml", "[[rule]]\nmethod = \"hyper\"\nparams = { sample = 3 }\n", "samples");
    try_one("layer.toml", "[[rule]]\nlayers = \"30\"\nmethod = \"hyper\"\n", "0 to 29");
    try_one("head.toml", "[[rule]]\nheads = \"9\"\nmethod = \"hyper\"\n", "0 to 8");
    try_one(
        "model.toml",
        "model = \"Llama\"\n[evidence]\nmodel_shape = \"16 layers, 32 heads, 8 key heads, width 64, 128256 tokens known\"\n",
        "one for Llama of 16 layers",
    );
    try_one("cut.toml", "[[rule]\n", "recipe");
}

#[test]
fn an_output_that_cannot_be_written_is_told_before_the_work() {
    let folder = Folder::new("unwritable");
    let (model, text) = (model(), alice());
    // A file where a folder should be: root may write into a folder without permissions.
    let blocked = folder.file("blocked");
    std::fs::write(&blocked, "x").unwrap();
    let out = format!("{blocked}/r.toml");
    let begun = std::time::Instant::now();
    refused(&["tune", &model, "--text", &text, "--max-error", "0.1", "--out", &out], "r.toml");
    assert!(begun.elapsed().as_secs() < 60, "before the model reads");
    refused(&["report", "--out", &out], "r.toml");
    assert_eq!(std::fs::read_to_string(&blocked).unwrap(), "x");
}

#[test]
fn an_interrupted_search_keeps_what_is_measured_and_goes_on() {
    let folder = Folder::new("interrupted");
    let (model, text, out) = (model(), alice(), folder.file("recipe.toml"));
    let args = [
        "tune",
        &model,
        "--text",
        &text,
        "--tokens",
        "512",
        "--check-tokens",
        "32",
        "--layers",
        "0-9",
        "--max-error",
        "0.3",
        "--methods",
        "sink_window,top_k,hyper",
        "--out",
        &out,
        "--progress",
    ];
    let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_attlas"))
        .args(args)
        .stderr(std::process::Stdio::piped())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    // Waits for the progress line of the first layer.
    let mut lines = std::io::BufReader::new(child.stderr.take().unwrap()).lines();
    assert!(lines.by_ref().any(|l| l.unwrap().contains("layer 0, key head")));
    let stopped =
        std::process::Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(stopped.success());
    let rest: Vec<String> = lines.map(|l| l.unwrap()).collect();
    let status = child.wait().unwrap().code();
    let state = folder.file("recipe.toml.jsonl");
    let kept = std::fs::read_to_string(&state).unwrap();
    if status == Some(0) {
        // The command finished before the signal arrived.
        return;
    }
    assert_eq!(status, Some(130), "{rest:?}");
    assert!(rest.iter().any(|l| l.contains("measurements are kept")), "{rest:?}");
    assert!(!std::path::Path::new(&out).exists(), "no half of a recipe");
    assert!(kept.ends_with('\n') && kept.lines().count() > 1, "{kept}");
    assert!(kept.lines().all(|l| serde_json::from_str::<Value>(l).is_ok()));
    let left: Vec<_> = std::fs::read_dir(folder.file("")).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left, ["recipe.toml.jsonl"], "nothing half-written is left");
}

#[test]
fn a_method_that_covers_the_text_says_that_it_is_exact() {
    let folder = Folder::new("covers");
    let (model, text) = (folder.model("qwen3", 1), folder.text(60));
    let args = ["perplexity", &model, "--text", &text, "--context", "32", "--method", "hyper"];
    let x = json(&[&args[..], &["--json"]].concat());
    assert_eq!((&x["fell_back"], &x["kl_mean"]), (&true.into(), &0.0.into()));
    let (status, out, _) = attlas(&args);
    assert!(status == 0 && out.contains("exact at this length, its settings cover 32 tokens"), "{out}");
    let window = [
        "perplexity",
        &model,
        "--text",
        &text,
        "--context",
        "32",
        "--method",
        "sink_window",
        "--set",
        "window=4",
    ];
    let x = json(&[&window[..], &["--json"]].concat());
    assert_eq!(x["fell_back"], false);
    let generate = ["generate", &model, "--prompt", "abcdefgh", "--max-tokens", "2", "--method", "hyper"];
    let (status, _, err) = attlas(&generate);
    assert!(status == 0 && err.contains("hyper is exact at this length"), "{err}");
    assert_eq!(json(&[&generate[..], &["--json"]].concat())["fell_back"], true);
}

#[test]
fn layers_whose_method_has_no_stream_are_said_to_decode_exactly() {
    let folder = Folder::new("decodes");
    let (model, text) = (folder.model("qwen3", 2), folder.text(60));
    let perplexity = ["perplexity", &model, "--text", &text, "--context", "32"];
    let generate = ["generate", &model, "--prompt", "abcdefgh", "--max-tokens", "2"];
    let decodes = |words: &[&str], more: &[&str]| json(&[words, more, &["--json"]].concat());
    for (method, layers) in [("sink_window", vec![]), ("smyrf", vec![0, 1])] {
        for words in [&perplexity[..], &generate] {
            assert_eq!(decodes(words, &["--method", method])["decodes_exactly"], serde_json::json!(layers));
        }
    }
    let recipe = folder.file("recipe.toml");
    let mixed = "version = 1\n[[rule]]\nlayers = [1]\nmethod = 'smyrf'\n";
    std::fs::write(&recipe, mixed).unwrap();
    let (status, out, err) = attlas(&[&perplexity[..], &["--recipe", &recipe]].concat());
    assert!(status == 0 && out.contains("exact attention in layers 1:"), "{out}{err}");
    let (status, _, err) = attlas(&[&generate[..], &["--recipe", &recipe]].concat());
    assert!(status == 0 && err.contains("exact attention decodes in layers 1:"), "{err}");
    std::fs::write(&recipe, format!("{mixed}[rule.decode]\nmethod = 'sink_window'\n")).unwrap();
    for words in [&perplexity[..], &generate] {
        assert_eq!(decodes(words, &["--recipe", &recipe])["decodes_exactly"], serde_json::json!([]));
    }
}

#[test]
fn comma_separated_values_are_plain_numbers() {
    let folder = Folder::new("plain");
    let (model, text) = (folder.model("qwen3", 1), folder.text(60));
    let (status, out, err) = attlas(&["perplexity", &model, "--text", &text, "--context", "32", "--csv"]);
    assert_eq!(status, 0, "{err}");
    let lines: Vec<Vec<&str>> = out.lines().map(|l| l.split(',').collect()).collect();
    assert!(lines.len() == 2 && lines[0].len() == lines[1].len(), "{out}");
    let value = |name: &str| lines[1][lines[0].iter().position(|n| *n == name).unwrap()];
    assert!(value("ppl").parse::<f64>().unwrap() > 1.0 && value("ppl_se").parse::<f64>().is_ok(), "{out}");
    let (status, out, _) = attlas(&["generate", &model, "--prompt", "abc", "--max-tokens", "3", "--csv"]);
    assert!(
        status == 0 && out.starts_with("prompt_ids,ids,text,ended,") && out.lines().count() == 2,
        "{out}"
    );
}

#[test]
fn what_cannot_be_scored_or_read_is_refused_with_flags_that_exist() {
    let folder = Folder::new("scored");
    let (model, text) = (folder.model("qwen3", 1), folder.text(60));
    let base = ["perplexity", &model, "--text", &text];
    refused(&[&base[..], &["--protocol", "llamacpp", "--context", "2"]].concat(), "3 or more tokens");
    refused(&[&base[..], &["--context", "32", "--stride", "9999"]].concat(), "1 to 32");
    let long = "a".repeat(100);
    let (status, _, err) = attlas(&["generate", &model, "--prompt", &long]);
    assert!(status == 2 && err.contains("a shorter prompt") && !err.contains("--tokens"), "{err}");
    let out = folder.file("t.npz");
    let (_, _, err) = attlas(&["extract", &model, "--text", &folder.text(90), "--out", &out]);
    assert!(err.contains("--tokens") && !err.contains("--context"), "{err}");
    let (_, _, err) = attlas(&["perplexity", "none.gguf", "--text", &text]);
    assert!(err.contains("there is no such file or folder") && err.contains("check the path"), "{err}");
    let one = folder.text(1);
    let (_, _, err) = attlas(&["perplexity", &model, "--text", &one]);
    assert!(err.contains("give a longer text") && !err.contains("a model is"), "{err}");
}

#[test]
fn a_prompt_that_is_read_tells_its_progress() {
    let folder = Folder::new("reading");
    let model = folder.model("qwen3", 2);
    let (status, _, err) =
        attlas(&["generate", &model, "--prompt", "abcdefgh", "--max-tokens", "1", "--progress"]);
    assert!(status == 0 && err.contains("reading the prompt"), "{err}");
}

#[test]
fn what_methods_learnt_attends_in_the_model() {
    let folder = Folder::new("calibrate");
    let (model, text, out) = (model(), alice(), folder.file("learnt"));
    let learn =
        ["calibrate", &model, "--text", &text, "--tokens", "96", "--methods", "loki,crt", "--out", &out];
    let x = json(&[&learn[..], &["--json"]].concat());
    let rows = x["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 2 * 90);
    let of = |id: &str| rows.iter().filter(|r| r["method"] == id).cloned().collect::<Vec<Value>>();
    assert!(of("loki").iter().all(|r| r["before"].is_null() && r["after"].as_f64().unwrap() < 1.5));
    assert!(of("crt").iter().all(|r| r["before"].as_f64().is_some() && r["after"].as_f64().is_some()));
    let score = ["perplexity", &model, "--text", &text, "--tokens", "96", "--method", "loki", "--json"];
    let (status, _, err) = attlas(&score);
    assert!(status == 2 && err.contains("attlas calibrate --methods loki"), "{err}");
    let run = json(&[&score[..], &["--calibration", &out]].concat());
    assert!(run["ppl"].as_f64().unwrap() > 1.0 && run["attention"] == "loki");
    let (status, _, err) =
        attlas(&["calibrate", &model, "--text", &text, "--methods", "top_k", "--out", &out]);
    assert!(status == 2 && err.contains("loki"), "{err}");
}

#[test]
fn a_recipe_warns_past_the_length_it_was_checked_at() {
    let folder = Folder::new("past");
    let (model, text, recipe) = (model(), alice(), folder.file("r.toml"));
    let written = "version = 1\ntokens = 32\n[default]\nmethod = \"sink_window\"\n[default.decode]\nmethod = \"exact\"\n";
    std::fs::write(&recipe, written).unwrap();
    let score = ["perplexity", &model, "--text", &text, "--tokens", "64", "--recipe", &recipe, "--json"];
    let (status, out, err) = attlas(&[&score[..], &["--context", "64"]].concat());
    assert!(status == 0 && err.contains("checked on texts of 32 tokens"), "{err}");
    let x: Value = serde_json::from_str(&out).unwrap();
    assert!(x["past_recipe"] == true && x["nll_increase"].as_f64().is_some());
    let (_, _, err) = attlas(&[&score[..], &["--context", "32"]].concat());
    assert!(!err.contains("checked on"), "{err}");
}

#[test]
fn products_in_narrow_types_are_named_and_their_cost_is_measured() {
    let (model, text) = (model(), alice());
    let read = ["perplexity", &model, "--text", &text, "--tokens", "96", "--context", "96", "--json"];
    let plain = json(&read);
    assert_eq!(plain["compute"], "f32");
    assert!(plain.get("kl_mean").is_none() && plain.get("in_f32").is_none(), "{plain}");
    for compute in ["int8", "bf16"] {
        let x = json(&[&read[..], &["--compute", compute]].concat());
        assert_eq!((&x["compute"], &x["exact_ppl"]), (&compute.into(), &plain["ppl"]));
        let kl = x["kl_mean"].as_f64().unwrap();
        assert!(kl > 0.0 && kl < 0.01, "{compute}: {kl}");
    }
    let generate = ["generate", &model, "--prompt", "abc", "--max-tokens", "2"];
    assert_eq!(json(&[&generate[..], &["--json", "--compute", "f32"]].concat())["compute"], "f32");
    assert_eq!(json(&[&generate[..], &["--json"]].concat())["compute"], "int8");
    let (status, _, err) = attlas(&generate);
    assert!(status == 0 && err.contains("products int8"), "{err}");
    let (status, _, err) = attlas(&[&generate[..], &["--compute", "int4"]].concat());
    assert!(status == 2 && err.contains("f32, bf16 or int8"), "{err}");
}
