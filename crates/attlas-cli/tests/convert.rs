//! `convert`: written files, output, and every error that is found before anything is written.

mod support;

use attlas::conversions::Run;
use attlas::registry;
use serde_json::{Value, json};
use support::{Folder, alice, attlas, minilm, model};

/// Runs `attlas convert … --to mla`: status, standard output, standard error.
fn convert(args: &[&str]) -> (i32, String, String) {
    attlas(&[&["convert", "--to", "mla"], args].concat())
}

#[test]
fn a_small_model_is_converted_stage_by_stage() {
    let folder = Folder::new("small");
    let (model, text, out) = (folder.model("llama", 1), folder.text(400), folder.file("out"));
    let args = [&model, "--text", &text, "--out", &out, "--rank", "10", "--rank-q", "12", "--rope-dim", "4"];
    let (status, table, err) = convert(&args);
    assert_eq!(status, 0, "{err}");
    for word in
        ["merged", "rotated", "partial_rope", "balanced", "low_rank", "low_rank_queries", "as written"]
    {
        assert!(table.lines().any(|l| l.starts_with(word)), "{word} in {table}");
    }
    // 32 numbers of 4 bytes; a latent of 10, its constant, and 4 rotated ones.
    assert!(table.contains("cache 128B -> 60B a token (46.9 %)"), "{table}");
    let record: Value =
        serde_json::from_slice(&std::fs::read(folder.0.join("out/conversion.json")).unwrap()).unwrap();
    assert_eq!((&record["params"]["rank"], &record["params"]["fold"]), (&json!(10), &json!(2)));
    assert_eq!(record["model_sha256"].as_array().map(Vec::len), Some(2));
    let stages = record["stages"].as_array().unwrap();
    assert_eq!(stages.len(), 6);
    let diff = |i: usize| stages[i]["max_logit_diff"].as_f64().unwrap();
    assert!(diff(0) < 1e-4, "one latent for all is exact: {}", diff(0));
    assert!(diff(2) > 1e-3 && (diff(3) - diff(2)).abs() < 1e-3, "balancing costs nothing");
    assert!(stages.iter().all(|s| s["ppl_after"].as_f64().unwrap().is_finite()));
    assert_eq!(stages[4]["cache_numbers"], json!(14));
    // The norms are identities: the written model gives the logits of the model in memory.
    assert!(record["written_diff"].as_f64().unwrap() < 1e-4);
    let proof: Value =
        serde_json::from_slice(&std::fs::read(folder.0.join("out/check.json")).unwrap()).unwrap();
    assert_eq!(proof["logits"][0].as_str().map(str::len), Some(26 * 8));

    assert!(!table.contains("nothing is saved"), "{table}");
    // By default three quarters of the cache remain; the full rank saves nothing.
    let (status, table, err) = convert(&[&model, "--text", &text, "--out", &folder.file("default")]);
    assert!(status <= 1 && table.contains("cache 128B -> 96B a token (75.0 %)"), "{table}{err}");
    let all = ["--keep", "100%", "--out", &folder.file("whole")];
    let (status, table, err) = convert(&[&[&model[..], "--text", &text], &all[..]].concat());
    assert!(status <= 1 && table.contains("nothing is saved"), "{table}{err}");

    // Half the bytes, and the predictions of the rounded model.
    let narrow = ["--rank", "10", "--dtype", "bf16", "--json", "--out", &folder.file("narrow")];
    let (status, json_text, err) = convert(&[&[&model[..], "--text", &text], &narrow[..]].concat());
    assert!(status <= 1, "{err}");
    let narrow: Value = serde_json::from_str(&json_text).unwrap();
    let number = |record: &Value, name: &str| record[name].as_f64().unwrap();
    assert_eq!((&record["dtype"], &narrow["dtype"]), (&json!("f32"), &json!("bf16")));
    assert_eq!(number(&record, "rounding_diff"), 0.0);
    assert!(number(&narrow, "rounding_diff") > number(&narrow, "written_diff"));
    assert!(number(&narrow, "written_diff") < 1e-4);
    assert!(number(&narrow, "written_bytes") < 0.6 * number(&record, "written_bytes"));
    assert_eq!(number(&narrow, "model_bytes"), number(&record, "model_bytes"));

    // The written model runs; converting it again is refused.
    let (status, _, err) = convert(&[&out, "--text", &text, "--out", &folder.file("twice")]);
    assert_eq!(status, 2);
    assert!(err.contains("latent attention already"), "{err}");
    assert!(!folder.0.join("twice").exists());
}

#[test]
fn stages_recipes_and_folds_can_be_chosen() {
    let folder = Folder::new("chosen");
    let (model, text) = (folder.model("llama", 1), folder.text(400));
    let record = |out: &str, more: &[&str]| -> Value {
        let out = folder.file(out);
        let args = [&[&model[..], "--text", &text, "--out", &out, "--json", "--quiet"], more].concat();
        let (status, json, err) = convert(&args);
        assert_eq!((status, err.as_str()), (0, ""));
        serde_json::from_str(&json).unwrap()
    };
    let partial = record("partial", &["--until", "partial_rope", "--stages", "merged", "--fold", "search"]);
    let names: Vec<&str> =
        partial["stages"].as_array().unwrap().iter().map(|s| s["stage"].as_str().unwrap()).collect();
    assert_eq!(names, ["merged", "partial_rope"]);
    let tried = partial["fold_search"].as_array().unwrap();
    assert!(tried.len() >= 2 && tried[0][0] == json!(1));
    let best = tried.iter().min_by(|a, b| a[1].as_f64().unwrap().total_cmp(&b[1].as_f64().unwrap())).unwrap();
    assert_eq!(partial["params"]["fold"], best[0]);
    let published = record("published", &["--recipe", "published", "--rank", "8", "--stages", "low_rank"]);
    assert_eq!(
        (&published["params"]["rotate"], &published["params"]["pca"]),
        (&json!("real"), &json!("activation"))
    );
    assert_eq!(published["recalibrated"], json!(true));
    let ours = record("ours", &["--rank", "8", "--set", "balance=0.5", "--stages", "low_rank"]);
    assert_eq!((&ours["params"]["rotate"], &ours["params"]["balance"]), (&json!("complex"), &json!(0.5)));
    assert_eq!(ours["stages"].as_array().map(Vec::len), Some(1));
    assert!(ours["stages"][0]["kept_energy"].as_f64() >= published["stages"][0]["kept_energy"].as_f64());
}

#[test]
fn the_smallest_rank_within_a_divergence_is_chosen() {
    let folder = Folder::new("max-kl");
    let (model, text) = (folder.model("llama", 1), folder.text(400));
    let run = |out: &str, most: &str| -> (i32, Value) {
        let out = folder.file(out);
        let (status, json, err) =
            convert(&[&model, "--text", &text, "--out", &out, "--json", "--max-kl", most]);
        assert!(status < 2, "{err}");
        (status, serde_json::from_str(&json).unwrap())
    };
    let (loose, tight) = (run("loose", "100").1, run("tight", "2.5").1);
    for (record, most) in [(&loose, 100.0), (&tight, 2.5)] {
        let tried = record["rank_search"].as_array().unwrap();
        let within = tried.iter().filter(|t| t[1].as_f64().unwrap() <= most).map(|t| t[0].as_u64().unwrap());
        assert_eq!(record["params"]["rank"].as_u64(), within.min(), "{tried:?}");
        // A quarter of the 300 tokens chooses the rank.
        assert_eq!(record["calibration_tokens"], json!(225));
    }
    assert_eq!(loose["params"]["rank"], json!(1));
    let (status, record) = run("checked", "2.2");
    let kl = record["written"]["kl_mean"].as_f64().unwrap();
    let ratio =
        record["written"]["ppl_after"].as_f64().unwrap() / record["written"]["ppl_before"].as_f64().unwrap();
    assert_eq!(status, i32::from(kl > 2.2 || ratio > 1.5), "{kl} {ratio}");
}

#[test]
fn what_cannot_be_done_is_said_and_nothing_is_written() {
    let folder = Folder::new("refused");
    let (model, text, out) = (folder.model("llama", 1), folder.text(400), folder.file("out"));
    let refused = |args: &[&str], word: &str| {
        let (status, output, err) = convert(args);
        assert_eq!((status, output.as_str()), (2, ""), "{err}");
        assert!(err.starts_with("error: ") && err.contains(word), "{word}: {err}");
        assert_eq!(err.lines().count(), 2, "an error and what to do next: {err}");
        assert!(!folder.0.join("out").exists() && !left(&folder));
    };
    let with = |more: &[&'static str]| -> Vec<String> {
        let fixed = [&model[..], "--text", &text, "--out", &out].map(str::to_owned);
        fixed.into_iter().chain(more.iter().map(|s| (*s).to_owned())).collect()
    };
    let check = |more: &[&'static str], word: &str| {
        let args = with(more);
        refused(&args.iter().map(String::as_str).collect::<Vec<_>>(), word);
    };
    check(&["--rank", "25"], "at most 24");
    check(&["--rope-dim", "16"], "an even divisor of 8");
    check(&["--rope-dim", "3"], "an even divisor of 8");
    check(&["--rank-q", "17"], "at most 16");
    check(&["--fold", "3"], "fold");
    check(&["--fold", "many"], "fold");
    check(&["--keep", "20%"], "--keep");
    check(&["--keep", "120%"], "at most 100%");
    check(&["--max-kl", "1e-12"], "--max-kl");
    check(&["--set", "rank"], "parameter=value");
    check(&["--set", "ranks=3"], "ranks");
    check(&["--set", "pca=best"], "functional");
    check(&["--dtype", "q8"], "q8 for --out FILE.gguf");
    check(&["--tokens", "400"], "16 or more after them");
    check(&["--tokens", "20"], "32 tokens or more");
    check(&["--until", "rotated"], "--until: expected partial_rope or a later stage");
    // This tokeniser is no byte-level BPE.
    refused(&[&model, "--text", &text, "--out", &folder.file("out.gguf")], "--out without .gguf");
    let short = folder.text(10);
    refused(&[&model, "--text", &short, "--out", &out], "--check-text");
    refused(&[&model, "--text", &folder.file("none.txt"), "--out", &out], "none.txt");
    refused(&[&folder.file("none.gguf"), "--text", &text, "--out", &out], "none.gguf");
    let qwen3 = folder.model("qwen3", 1);
    refused(&[&qwen3, "--text", &text, "--out", &out], "norms of query and key heads");
    refused(&[&minilm().display().to_string(), "--text", &text, "--out", &out], "an encoder");
    refused(&[&model, "--text", &text, "--out", &folder.file("no/such/place")], "no/such");
    // Existing files stay.
    std::fs::create_dir(folder.0.join("taken")).unwrap();
    std::fs::write(folder.0.join("taken/mine"), "1").unwrap();
    refused(&[&model, "--text", &text, "--out", &folder.file("taken")], "exists already");
    refused(&[&model, "--text", &text, "--out", &text], "exists already");
    assert_eq!(std::fs::read(folder.0.join("taken/mine")).unwrap(), b"1");
}

#[test]
fn smollm2_becomes_a_folder_that_predicts_as_its_record_says() {
    let folder = Folder::new("smollm2");
    let (model, text, out) = (model(), alice(), folder.file("out"));
    let args = [
        &model[..],
        "--text",
        &text,
        "--out",
        &out,
        "--rank",
        "192",
        "--tokens",
        "400",
        "--check-tokens",
        "128",
        "--context",
        "64",
        "--stages",
        "merged",
        "--json",
        "--quiet",
    ];
    let (status, json_text, err) = convert(&args);
    assert_eq!(status, 0, "{err}");
    let record: Value = serde_json::from_str(&json_text).unwrap();
    let number = |path: &str| record.pointer(path).and_then(Value::as_f64).unwrap();
    // 30 layers: 2 · 3 · 64 numbers each before; a latent of 192, its constant and 64 rotated numbers after.
    assert_eq!((number("/cache_bytes_before"), number("/cache_bytes_after")), (46_080.0, 30_840.0));
    assert!(number("/stages/0/max_logit_diff") < 2e-2, "merged: {}", number("/stages/0/max_logit_diff"));
    assert!(number("/stages/0/kl_mean") < 1e-5);
    let (before, after) = (number("/written/ppl_before"), number("/written/ppl_after"));
    assert!(after > before && after < 4.0 * before, "{before} {after}");
    // The source has quantised blocks, which a folder cannot store.
    assert_eq!(record["dtype"], json!("f16"));
    assert!(number("/written_diff") < 1e-2 && number("/rounding_diff") > number("/written_diff"));
    // The same text through `perplexity`.
    let rest = folder.file("rest.txt");
    let opened = attlas_model::Model::open(&folder.0.join("out")).unwrap();
    let whole = std::fs::read_to_string(&text).unwrap();
    let tokens = opened.tokenizer.encode(&whole, false).unwrap();
    std::fs::write(&rest, opened.tokenizer.decode(&tokens[400..528], false).unwrap()).unwrap();
    let measured = support::json(&[
        "perplexity",
        &out,
        "--text",
        &rest,
        "--protocol",
        "windows",
        "--context",
        "64",
        "--json",
    ]);
    assert_eq!(measured["tokens"], json!(128));
    assert!((measured["ppl"].as_f64().unwrap() / after - 1.0).abs() < 1e-4);
}

#[test]
fn one_pipeline_runs_every_conversion_of_the_registry() {
    let folder = Folder::new("registry");
    // tucker keeps 36 of its blocks by default, two a layer.
    let (llama, letters) = (folder.model("llama", 18), folder.text(400));
    let (minilm, alice) = (minilm().display().to_string(), alice());
    let (compress, convert): (&[&str], &[&str]) =
        (&["compress", "--repeats", "0", "--with"], &["convert", "--to"]);
    for conversion in registry::CONVERSIONS {
        let (id, out) = (conversion.id, folder.file(conversion.id));
        let run = |command: &[&str], model: &str, text: &str| {
            let rest = ["--rank", "2", "--text", text, "--tokens", "40", "--out", &out, "--json"];
            attlas(&[command, &[id, model], &rest].concat())
        };
        let (own, other) = match conversion.run {
            Run::Matrices(_) => (compress, convert),
            Run::Latents => (convert, compress),
        };
        let (status, _, err) = run(other, &llama, &letters);
        let named = format!("attlas {} {} {id}", own[0], own[own.len() - 1]);
        assert!(status == 2 && err.contains(&named), "{err}");
        let mut done = run(own, &llama, &letters);
        // Conversions that refuse rotated heads run on the encoder.
        if done.2.contains("rotary positions") {
            done = run(own, &minilm, &alice);
        }
        assert!(done.0 < 2, "{}", done.2);
        assert_eq!(serde_json::from_str::<Value>(&done.1).unwrap()["conversion"], json!(id));
        assert!(attlas_model::Model::open(out.as_ref()).is_ok(), "{id}");
    }
}

/// Returns true if an unfinished folder is left.
fn left(folder: &Folder) -> bool {
    let names = std::fs::read_dir(&folder.0).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
    names.into_iter().any(|n| n.contains(".part"))
}
