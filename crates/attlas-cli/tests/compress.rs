//! `compress` on real models: output, written files, errors.

mod support;

use support::{Folder, alice, attlas, json, minilm, model};

#[test]
fn a_model_is_written_measured_and_runs_from_what_was_written() {
    let folder = Folder::new("svd");
    let (model, text, out) = (model(), alice(), folder.file("smaller"));
    let common = ["--text", &text, "--tokens", "130", "--context", "64", "--repeats", "0"];
    let args = [
        &["compress", &model, "--with", "svd", "--rank", "64", "--layers", "3", "--matrices", "k,v"][..],
        &common,
    ]
    .concat();
    let record = json(&[&args[..], &["--out", &out, "--json"]].concat());
    assert_eq!((record["conversion"].as_str(), record["params"]["rank"].as_u64()), (Some("svd"), Some(64)));
    // The model is stored in blocks of 4 bits.
    assert_eq!(record["dtype"], "q8");
    let losses = record["losses"].as_array().unwrap();
    assert_eq!((losses.len(), losses[0]["what"].as_str()), (2, Some("layer 3 k")));
    let figure = |side: &str, name: &str| record[side][name].as_u64().unwrap();
    let removed = 2 * (192 * 576 - 64 * (192 + 576));
    assert_eq!(figure("before", "parameters") - figure("after", "parameters"), removed);
    assert_eq!(figure("before", "flops_per_token") - figure("after", "flops_per_token"), 2 * removed);
    let quality = &record["quality"];
    assert_eq!(quality["scored"], 126);
    assert!(quality["kl_mean"].as_f64().unwrap() > 0.0);
    let after = quality["ppl_after"].as_f64().unwrap();
    assert!(record["after"]["prefill_seconds"].is_null());

    // The written folder alone gives the same figure and continues texts.
    let again = json(&[
        "perplexity",
        &out,
        "--text",
        &text,
        "--tokens",
        "130",
        "--context",
        "64",
        "--protocol",
        "windows",
        "--json",
    ]);
    assert!((again["ppl"].as_f64().unwrap() / after - 1.0).abs() < 1e-6, "{again}");
    let said = json(&["generate", &out, "--prompt", "The capital of France is", "-n", "3", "--json"]);
    assert_eq!(
        said["prompt_ids"],
        serde_json::json!([504, 3575, 282, 4649, 314]),
        "the tokeniser came along"
    );
    assert_eq!(said["ids"].as_array().unwrap().len(), 3);

    // Nothing is overwritten.
    let (status, shown, err) = attlas(&[&args[..], &["--out", &out]].concat());
    assert_eq!((status, shown.as_str()), (2, ""), "{err}");
    assert!(err.contains("exists already"), "{err}");
}

#[test]
fn factors_are_fitted_to_what_follows_the_tokens_that_are_measured() {
    let folder = Folder::new("fitted");
    let (model, text) = (model(), alice());
    let run = |name: &str, more: &[&str]| {
        let out = folder.file(name);
        let common = ["--text", &text, "--tokens", "130", "--context", "64", "--repeats", "0", "--json"];
        let what = ["compress", &model, "--with", "svd", "--layers", "3", "--matrices", "q,o", "--out", &out];
        json(&[&what[..], &common, more].concat())
    };
    let kl = |record: &serde_json::Value| record["quality"]["kl_mean"].as_f64().unwrap();
    let plain = run("plain", &["--rank", "200"]);
    assert!(plain["calibration"].is_null() && plain["losses"][0]["seen_error"].is_null());
    let read = ["--calibrate", &text, "--calibrate-tokens", "1024"];
    let fitted = run("fitted", &[&["--rank", "200"], &read[..]].concat());
    assert_eq!(fitted["calibration"]["tokens"], 1024);
    assert!(fitted["calibration"]["sensitivity"].is_null());
    let seen = fitted["losses"][0]["seen_error"].as_f64().unwrap();
    assert!(seen > 0.0 && seen < plain["losses"][0]["rel_error"].as_f64().unwrap());
    assert!(kl(&fitted) < kl(&plain), "{} and {}", kl(&fitted), kl(&plain));

    // One budget for both matrices, in numbers stored.
    let spread = run("spread", &[&["--keep", "70%", "--probe-tokens", "64"], &read[..]].concat());
    let after: u64 = spread["losses"].as_array().unwrap().iter().map(|l| l["after"].as_u64().unwrap()).sum();
    assert!(after as f64 <= 0.7 * 2.0 * 576.0 * 576.0, "{after}");
    assert_eq!(spread["calibration"]["sensitivity"].as_array().unwrap().len(), 2);
    assert!(spread["calibration"]["predicted_kl"].as_f64().unwrap() > 0.0);
}

#[test]
fn people_get_tables_and_a_word_about_speed() {
    let folder = Folder::new("people");
    let (model, text, out) = (model(), alice(), folder.file("smaller"));
    let (status, shown, err) = attlas(&[
        "compress",
        &model,
        "--with",
        "tensor_product",
        "--rank",
        "2",
        "--layers",
        "0",
        "--text",
        &text,
        "--tokens",
        "40",
        "--context",
        "40",
        "--repeats",
        "1",
        "--max-ppl-increase",
        "1000",
        "--out",
        &out,
    ]);
    assert_eq!(status, 0, "{err}");
    for words in [
        "perplexity",
        "parameters",
        "bytes",
        "flops a token",
        "cache a token",
        "prefill",
        "decode",
        "layer 0 k",
    ] {
        assert!(shown.contains(words), "{words} in {shown}");
    }
    // The heading may be longer: it names files with their paths.
    assert!(shown.lines().skip(1).all(|l| l.chars().count() <= 100), "{shown}");
    assert!(err.contains("wrote"), "{err}");
}

#[test]
fn an_encoder_is_compared_by_its_embeddings() {
    let folder = Folder::new("encoder");
    let (model, text, out) = (minilm().display().to_string(), alice(), folder.file("smaller"));
    let record = json(&[
        "compress",
        &model,
        "--with",
        "collaborative",
        "--rank",
        "384",
        "--dtype",
        "f32",
        "--text",
        &text,
        "--tokens",
        "4",
        "--repeats",
        "0",
        "--out",
        &out,
        "--json",
    ]);
    assert!(record["embeddings"]["cosine_min"].as_f64().unwrap() > 1.0 - 1e-5, "{record}");
    assert!(record["quality"].is_null());
}

#[test]
fn requests_that_make_no_sense_are_refused_in_two_lines_and_leave_nothing() {
    let folder = Folder::new("refused");
    let (model, text, out) = (model(), alice(), folder.file("smaller"));
    let refused = |more: &[&str], expected: &str| {
        let args = [&["compress", &model, "--text", &text, "--out", &out], more].concat();
        let (status, shown, err) = attlas(&args);
        assert_eq!((status, shown.as_str()), (2, ""), "{err}");
        assert!(err.starts_with("error: ") && err.contains(expected), "{err}");
        assert_eq!(err.lines().count(), 2, "an error and what to do next: {err}");
        assert_eq!(std::fs::read_dir(&folder.0).unwrap().count(), 0);
    };
    refused(&["--with", "nonsense"], "shared_factor");
    refused(&["--with", "mla"], "one of");
    refused(&["--with", "collaborative"], "rotary positions");
    refused(&["--with", "svd", "--set", "ranks=3"], "rank");
    refused(&["--with", "tensor_product", "--keep", "0.5"], "keep");
    refused(&["--with", "svd", "--set", "rank"], "parameter=value");
    refused(&["--with", "svd", "--matrices", "w"], "attention, ffn or all");
    refused(&["--with", "svd", "--layers", "30"], "0 to 29");
    refused(&["--with", "trawl", "--max-weight-error", "0.1"], "rel_error");
}

#[test]
fn changes_that_cost_something_on_text_set_aside_are_not_kept() {
    let folder = Folder::new("accept");
    let (model, text, out) = (folder.model("llama", 3), folder.text(400), folder.file("smaller"));
    let args = [
        &["compress", &model, "--with", "trawl", "--rank", "2,8", "--accept", "--accept-tokens", "200"][..],
        &["--text", &text, "--tokens", "100", "--context", "50", "--repeats", "0", "--dtype", "f32"],
    ]
    .concat();
    let record = json(&[&args[..], &["--out", &out, "--json"]].concat());
    let chosen = &record["acceptance"];
    assert_eq!(chosen["scored"], 196);
    let trials = chosen["trials"].as_array().unwrap();
    let order: Vec<(u64, u64)> =
        trials.iter().map(|t| (t["layer"].as_u64().unwrap(), t["rank"].as_u64().unwrap())).collect();
    assert_eq!(order, [(2, 2), (2, 8), (1, 2), (1, 8), (0, 2), (0, 8)]);
    let number = |t: &serde_json::Value, name: &str| t[name].as_f64().unwrap();
    for t in trials.iter().filter(|t| t["accepted"] == true) {
        assert!(number(t, "nll_after") <= number(t, "nll_before"), "{t}");
    }
    assert!(number(chosen, "ppl_after") <= number(chosen, "ppl_before"));
    // One stack of three matrices for each layer that was kept, and none for the others.
    let kept = trials.iter().filter(|t| t["accepted"] == true).count();
    assert_eq!(record["losses"].as_array().unwrap().len(), kept);
    assert!(record["params"]["rank"].is_null(), "two were tried");

    // The written folder reads the held-out text.
    let rest = folder.file("rest.txt");
    std::fs::write(&rest, &std::fs::read_to_string(&text).unwrap()[100..300]).unwrap();
    let again =
        json(&["perplexity", &out, "--text", &rest, "--context", "50", "--protocol", "windows", "--json"]);
    assert!((number(&again, "ppl") / number(chosen, "ppl_after") - 1.0).abs() < 1e-5, "{again}");

    let (status, shown, err) = attlas(&[&args[..], &["--out", &folder.file("shown"), "--progress"]].concat());
    assert_eq!(status, 0, "{err}");
    assert!(shown.contains("nll before") && shown.contains("set aside"), "{shown}");
    assert!(err.contains("trying layer 0"), "{err}");

    let refused = |more: &[&str], expected: &str| {
        let out = folder.file("refused");
        let args = [&["compress", &model, "--text", &text, "--out", &out, "--with", "trawl"], more].concat();
        let (status, _, err) = attlas(&args);
        assert_eq!(status, 2, "{err}");
        assert!(err.contains(expected), "{expected}: {err}");
        assert!(!folder.0.join("refused").exists());
    };
    refused(&["--rank", "2,8"], "--accept to try several");
    refused(&["--accept", "--tokens", "400"], "after those that are measured on");
    refused(&["--accept", "--tokens", "100", "--layers", "3"], "0 to 2");
    refused(&["--accept-tokens", "100"], "--accept");
}
