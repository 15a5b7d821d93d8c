//! The built binary in a scratch folder: outputs, errors and exit statuses.
//!
//! Output that depends on the registry is compared with the registry: a new method needs no edit here.

use attlas::registry;
use serde_json::Value;
use std::path::PathBuf;
use std::process::Command;

/// Separate folder for each test, removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("attlas-cli-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

struct Ran {
    status: i32,
    out: String,
    err: String,
}

impl Ran {
    fn json(&self) -> Value {
        assert_eq!(self.status, 0, "{}", self.err);
        serde_json::from_str(&self.out).unwrap()
    }
}

fn attlas_in(folder: &Folder, args: &[&str]) -> Ran {
    let output =
        Command::new(env!("CARGO_BIN_EXE_attlas")).args(args).current_dir(&folder.0).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    Ran { status: output.status.code().unwrap_or(-1), out: text(output.stdout), err: text(output.stderr) }
}

fn attlas(args: &[&str]) -> Ran {
    attlas_in(&Folder::new(&args.join("_").replace(|c: char| !c.is_alphanumeric(), "-")), args)
}

const SMALL: &str = "synthetic:clustered,n=96,d=8,heads=2,kv_heads=1";

#[test]
fn methods_lists_the_whole_registry() {
    let text = attlas(&["methods"]);
    assert_eq!(text.status, 0);
    // Complete in a pipe, cut to the width of a terminal.
    assert!(!text.out.contains('…') && registry::METHODS.iter().all(|m| text.out.contains(m.title)));
    let narrow =
        Command::new(env!("CARGO_BIN_EXE_attlas")).arg("methods").env("COLUMNS", "80").output().unwrap();
    let narrow = String::from_utf8(narrow.stdout).unwrap();
    assert!(narrow.lines().all(|l| l.chars().count() <= 80), "{narrow}");
    assert!(narrow.contains("title") && registry::METHODS.iter().all(|m| narrow.contains(m.id)), "{narrow}");
    let json = attlas(&["methods", "--json"]).json();
    let ids: Vec<&str> =
        json["methods"].as_array().unwrap().iter().map(|m| m["id"].as_str().unwrap()).collect();
    assert_eq!(ids, registry::METHODS.iter().map(|m| m.id).collect::<Vec<_>>());
    assert_eq!(json["layers"].as_array().unwrap().len(), registry::LAYERS.len());
    assert_eq!(json["conversions"].as_array().unwrap().len(), registry::CONVERSIONS.len());
    for m in registry::METHODS {
        assert!(text.out.contains(m.id), "{}", m.id);
    }
    let caches = &json["cache_sizes"];
    assert_eq!(caches.as_array().map(Vec::len), Some(6));
    assert_eq!(
        caches[4]["numbers"],
        serde_json::json!([["Llama-2-7B", 576], ["Llama-3-8B", 576], ["SmolLM2-135M", 192]])
    );
    assert!(text.out.contains("MLA    r + d_R"));
    let csv = attlas(&["methods", "--csv"]);
    assert_eq!(csv.out.lines().count(), 1 + registry::METHODS.len());
    let family = attlas(&["methods", "--family", "exact", "--json"]).json();
    assert!(family["methods"].as_array().unwrap().iter().all(|m| m["family"] == "exact"));
    assert!(attlas(&["methods", "--markdown"]).out.starts_with("# Methods\n"));
}

#[test]
fn one_method_is_shown_whole() {
    let ran = attlas(&["methods", "top_k"]);
    let wanted = "\
top_k: Exact attention over the largest logits (yardstick)
  family                 exact
  reference              gupta2021
  approximates softmax   yes
  causal                 yes
  decodes token by token no
  has a gradient         no
  needs                  nothing
  time grows as          N^2
  random                 no
  weights sum to one     yes
  normaliser unbiased    no
  gives log-sum-exp      yes
  on several processes   no
  exact bit for bit at   keys = at least the number of keys
  not on several processes: a row chooses among all of its keys, and one
    process ranks its own alone

parameters
  keys = 64 (a whole number from 1 to 1073741824)
      Keys kept for each query, at most all visible ones.
";
    assert_eq!((ran.status, ran.out.as_str()), (0, wanted));
    let json = attlas(&["methods", "top_k", "--json"]).json();
    assert_eq!(json["params"][0]["name"], "keys");
}

#[test]
fn unknown_names_list_what_is_accepted_and_exit_2() {
    let known: Vec<&str> = registry::METHODS.iter().map(|m| m.id).collect();
    let known = known.join(", ");
    for args in
        [&["methods", "topk"][..], &["compare", "--methods", "topk"], &["compare", "--set", "topk.keys=2"]]
    {
        let ran = attlas(args);
        let wanted = "error: there is no method topk; did you mean top_k?\n\
                      run `attlas methods` to see what each one is\n";
        assert_eq!((ran.status, ran.out.as_str(), ran.err.as_str()), (2, "", wanted), "{args:?}");
    }
    let ran = attlas(&["methods", "nonsense"]);
    let wanted = format!(
        "error: there is no method nonsense; known are {known}\nrun `attlas methods` to see what each one is\n"
    );
    assert_eq!((ran.status, ran.out.as_str(), ran.err), (2, "", wanted));
    let ran = attlas(&["compare", SMALL, "--set", "sink_window.sink=2"]);
    let wanted = "error: there is no parameter sink of sink_window; did you mean sinks?\n\
                  run `attlas methods ID` to see every parameter with its range\n";
    assert_eq!((ran.status, ran.err.as_str()), (2, wanted));
    let ran = attlas(&["compare", SMALL, "--set", "sink_window.colour=2"]);
    assert!(ran.status == 2 && ran.err.contains("accepted are sinks, window, precision"), "{}", ran.err);
    for (source, meant) in
        [("demmo", "demo"), ("synthetic:needel", "needle"), ("gausian", "synthetic:gaussian")]
    {
        let ran = attlas(&["compare", source]);
        assert!(ran.status == 2 && ran.err.contains(&format!("did you mean {meant}?")), "{}", ran.err);
    }
    let ran = attlas(&["compare", SMALL, "--set", "top_k.keys=0"]);
    let wanted = "error: parameter top_k.keys = 0 is not accepted; expected a whole number from 1 to 1073741824\n\
                  run `attlas methods ID` to see every parameter with its range\n";
    assert_eq!((ran.status, ran.err.as_str()), (2, wanted));
    for args in [
        &["bench", "--methods", "exact", "--n", "100000000000"][..],
        &["compare", "synthetic:gaussian,n=100000000000", "--methods", "top_k"],
    ] {
        let ran = attlas(args);
        assert!(ran.status == 2 && ran.err.contains("more than this machine has"), "{args:?}: {}", ran.err);
    }
    assert_eq!(attlas(&["methods", "--family", "dense"]).status, 2);
    assert_eq!(attlas(&["nonsense"]).status, 2);
    assert_eq!(attlas(&["compare", "synthetic:noise"]).status, 2);
}

#[test]
fn bad_files_say_what_is_wrong() {
    let folder = Folder::new("files");
    let missing = attlas_in(&folder, &["compare", "none.safetensors"]);
    assert_eq!(missing.status, 2);
    assert!(missing.err.starts_with("error: none.safetensors: reading failed"), "{}", missing.err);
    std::fs::write(folder.0.join("cut.safetensors"), [9, 0, 0, 0, 0, 0, 0, 0, b'{']).unwrap();
    let cut = attlas_in(&folder, &["compare", "cut.safetensors"]);
    assert!(cut.status == 2 && cut.err.contains("not a complete safetensors file"), "{}", cut.err);
    let other = attlas_in(&folder, &["compare", "notes.txt"]);
    assert!(other.status == 2 && other.err.contains(".safetensors, .npz or .npy"), "{}", other.err);
    let peer = attlas_in(&folder, &["bench", "--peer-json", "cut.safetensors", "--n", "64"]);
    assert!(peer.status == 2 && peer.err.contains("\"figures\""), "{}", peer.err);
}

#[test]
fn compare_measures_and_keeps_its_shape() {
    let args =
        ["compare", SMALL, "--methods", "top_k,sink_window", "--set", "top_k.keys=8", "--causal", "--json"];
    let json = attlas(&args).json();
    assert_eq!(json["source"], "synthetic:clustered,n=96,d=8,heads=2,kv_heads=1,seed=0");
    assert_eq!(json["mask"], "causal");
    let rows = json["rows"].as_array().unwrap();
    let names: Vec<(&str, u64)> =
        rows.iter().map(|r| (r["method"].as_str().unwrap(), r["head"].as_u64().unwrap())).collect();
    let wanted =
        [("mean_v", 0), ("mean_v", 1), ("sink_window", 0), ("sink_window", 1), ("top_k", 0), ("top_k", 1)];
    assert_eq!(names, wanted);
    for row in rows {
        for field in
            ["params", "layer", "setup_seconds", "run_seconds", "speedup", "peak_bytes", "keys_visited"]
        {
            assert!(row.get(field).is_some(), "{field}");
        }
        for end in ["mean", "lo", "hi"] {
            assert!(row["rel_fro"][end].is_number(), "{row}");
        }
    }
    assert_eq!(rows[4]["params"]["keys"], 8);
    assert_eq!(rows[2]["status"], "exact");
    assert_eq!(rows[2]["rel_fro"]["mean"], 0.0);
    assert!(json["exact"]["run_seconds"].as_f64().unwrap() > 0.0);
    // Another number of threads changes nothing but times and memory.
    let again = attlas(&[&args[..], &["--threads", "2"]].concat()).json();
    for (a, b) in rows.iter().zip(again["rows"].as_array().unwrap()) {
        for field in ["rel_fro", "errors", "keys_visited", "status", "params"] {
            assert_eq!(a[field], b[field], "{field}");
        }
    }
}

#[test]
fn tables_fit_80_columns_and_stdout_holds_results_alone() {
    let ran = attlas(&["compare", SMALL]);
    assert_eq!(ran.status, 0, "{}", ran.err);
    assert!(ran.out.lines().all(|l| l.chars().count() <= 80), "{}", ran.out);
    assert!(ran.out.contains("mean_v") && ran.err.contains("mean_v: the mean"));
    let quiet = attlas(&["compare", SMALL, "--quiet", "--each-head"]);
    assert!(quiet.err.is_empty(), "{}", quiet.err);
    assert!(quiet.out.lines().all(|l| l.chars().count() <= 80), "{}", quiet.out);
    let lines = attlas(&["compare", SMALL, "--methods", "top_k", "--progress"]);
    assert!(lines.err.contains("2/2 top_k"), "{}", lines.err);
    let csv = attlas(&["compare", SMALL, "--csv", "--methods", "top_k"]);
    assert_eq!(csv.out.lines().count(), 1 + 2 * 2);
    assert!(csv.out.starts_with("method,family,params,layer,head,seeds,rel_fro,"));
    assert!(attlas(&["compare", SMALL, "--md", "--methods", "top_k"]).out.contains("| method | error |"));
    assert_eq!(attlas(&["compare", SMALL, "--json", "--csv"]).status, 2);
}

#[test]
fn a_budget_decides_the_exit_status() {
    let with = |budget: &str| {
        attlas(&["compare", SMALL, "--methods", "top_k", "--set", "top_k.keys=4", "--budget", budget])
    };
    assert_eq!(with("5").status, 0);
    let over = with("1e-9");
    assert!(over.status == 1 && over.err.contains("over budget"), "{}", over.err);
    assert_eq!(with("-1").status, 2);
}

#[test]
fn a_page_is_written_whole() {
    let folder = Folder::new("page");
    let ran = attlas_in(&folder, &["compare", SMALL, "--methods", "top_k", "--html", "page.html"]);
    assert_eq!(ran.status, 0, "{}", ran.err);
    let page = std::fs::read_to_string(folder.0.join("page.html")).unwrap();
    assert!(page.ends_with("</html>\n"));
    assert_eq!(std::fs::read_dir(&folder.0).unwrap().count(), 1);
    let refused =
        attlas_in(&folder, &["compare", SMALL, "--methods", "top_k", "--html", "no/such/page.html"]);
    assert!(refused.status == 2 && refused.err.contains("writing failed"), "{}", refused.err);
}

#[test]
fn bench_prints_the_machine_first_and_every_share() {
    let args = ["bench", "--methods", "sink_window", "--n", "64,128", "--d", "8,16", "--runs", "5"];
    let ran = attlas(&args);
    assert_eq!(ran.status, 0, "{}", ran.err);
    let lines: Vec<&str> = ran.out.lines().collect();
    assert!(lines[0].contains("threads") && lines[1].starts_with("ceiling: "), "{}", ran.out);
    assert!(lines.iter().skip(1).all(|l| l.chars().count() <= 80), "{}", ran.out);
    assert_eq!(lines.iter().filter(|l| l.starts_with("sink_window ")).count(), 4 + 2);
    let json = attlas(&[&args[..], &["--json"]].concat()).json();
    // A measured peak gives shares; without one a note says that it is missing.
    let peak = json["machine"]["fma_gflops"].as_f64();
    let missing = json["notes"]
        .as_array()
        .unwrap()
        .iter()
        .any(|n| n.as_str().unwrap().contains("could not be measured"));
    assert_eq!(peak.is_none(), missing);
    let rows = json["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 8);
    assert!(
        rows.iter().all(|r| r["flop_share"].is_number() == peak.is_some() && r["run_seconds"]["runs"] == 5)
    );
    assert_eq!(json["summary"][1]["method"], "sink_window");
    let decode = attlas(&["bench", "--methods", "exact", "--n", "1k", "--d", "8", "--decode", "--csv"]);
    assert_eq!(decode.out.lines().count(), 2, "{}", decode.out);
    assert_eq!(attlas(&["bench", "--n", "12x"]).status, 2);
    assert_eq!(attlas(&["bench", "--heads", "3", "--kv-heads", "2"]).status, 2);
}

#[test]
fn help_has_examples_for_every_command() {
    for command in ["methods", "inspect", "compare", "report", "bench", "tune"] {
        let ran = attlas(&["help", command]);
        assert!(ran.status == 0 && ran.out.contains("Examples:\n  attlas "), "{command}");
    }
    assert!(attlas(&["--help"]).out.contains("Exit status"));
}

#[test]
fn examples_can_be_pasted_from_80_columns_and_global_flags_stand_together() {
    let commands = [
        "",
        "methods",
        "inspect",
        "compare",
        "report",
        "bench",
        "simulate",
        "extract",
        "tune",
        "compress",
        "convert",
        "perplexity",
        "generate",
        "completions",
        "man",
    ];
    for command in commands {
        let words: Vec<&str> = command.split(' ').filter(|w| !w.is_empty()).chain(["--help"]).collect();
        let output =
            Command::new(env!("CARGO_BIN_EXE_attlas")).args(&words).env("COLUMNS", "80").output().unwrap();
        let out = String::from_utf8(output.stdout).unwrap();
        let examples = out.split("Examples:\n").nth(1).unwrap_or_else(|| panic!("{out}"));
        let examples = examples.split("\n\n").next().unwrap();
        let mut open = false;
        for line in examples.lines() {
            assert!(line.chars().count() <= 80, "{line}");
            // Every line begins or continues a command.
            assert!(open || line.starts_with("  attlas"), "{line}");
            open = line.ends_with('\\');
        }
        assert!(!open, "{examples}");
        let group = out.split("Options of every command:\n").nth(1).unwrap_or_else(|| panic!("{out}"));
        for flag in ["--json", "--csv", "--md", "--threads", "--seed", "--quiet", "--progress"] {
            assert!(group.contains(flag), "{command}: {flag}");
        }
    }
}

#[test]
fn completions_and_manual_pages_name_every_command() {
    for shell in ["bash", "zsh", "fish"] {
        let ran = attlas(&["completions", shell]);
        assert!(ran.status == 0 && ran.out.contains("perplexity") && ran.out.contains("max-ppl-increase"));
    }
    let page = attlas(&["man"]);
    assert!(page.status == 0 && page.out.contains(".TH") && page.out.contains("perplexity"), "{}", page.out);
    let one = attlas(&["man", "compare"]);
    assert!(one.out.contains("seeds") && one.out.contains("attlas"), "{}", one.out);
    assert_eq!(attlas(&["man", "nothing"]).status, 2);
}

#[test]
fn absurd_numbers_of_threads_are_lowered_and_said() {
    let ran = attlas(&["compare", SMALL, "--methods", "top_k", "--threads", "100000", "--json"]);
    let used = ran.json()["threads"].as_u64().unwrap();
    assert!(
        used < 100_000 && ran.err.contains("100000 threads on") && ran.err.contains("are used"),
        "{}",
        ran.err
    );
}

#[test]
fn what_could_drive_a_terminal_is_shown_as_a_code() {
    let ran = attlas(&["methods", "\u{1b}[31mred"]);
    assert!(
        ran.status == 2 && !ran.err.contains('\u{1b}') && ran.err.contains("\\u{1b}[31mred"),
        "{:?}",
        ran.err
    );
    let ran = attlas(&["compare", "a\u{1b}[2J.safetensors"]);
    assert!(ran.status == 2 && !ran.err.contains('\u{1b}'), "{:?}", ran.err);
}

#[test]
fn methods_are_compared_on_the_same_heads_and_what_was_left_is_named_once() {
    // Far too little time for all heads of all methods.
    let source = "synthetic:gaussian,n=512,d=64,heads=64";
    let ran = attlas(&["compare", source, "--time-limit", "1.5", "--json"]);
    let json = ran.json();
    let heads = json["exact"]["heads"].as_array().unwrap().len() as u64;
    assert!(heads < json["heads"].as_u64().unwrap(), "{heads}");
    for s in json["summary"].as_array().unwrap() {
        assert_eq!(s["heads"], heads, "{s}");
    }
    let sum: f64 =
        json["exact"]["heads"].as_array().unwrap().iter().map(|h| h["run_seconds"].as_f64().unwrap()).sum();
    assert!((sum / json["exact"]["run_seconds"].as_f64().unwrap() - 1.0).abs() < 1e-9);
    let text = attlas(&["compare", source, "--time-limit", "1.5"]);
    assert!(text.err.contains("of 64 heads: all methods shown finished these"), "{}", text.err);
    for line in text.err.lines().filter(|l| l.starts_with("not measured")) {
        let ids: Vec<&str> = line.split(": ").nth(1).unwrap().split(", ").collect();
        assert!(ids.iter().all(|id| ids.iter().filter(|o| o == &id).count() == 1), "{line}");
    }
}

#[test]
fn a_method_that_fell_back_to_exact_attention_is_named_and_a_verdict_is_given() {
    let ran = attlas(&["compare", SMALL, "--methods", "hyper,top_k", "--set", "top_k.keys=4"]);
    assert!(ran.out.contains("Exact at this length: hyper (n_min = 4096)."), "{}", ran.out);
    assert!(ran.out.contains(" at 96 tokens."), "{}", ran.out);
    let json = attlas(&["compare", SMALL, "--methods", "hyper", "--json"]).json();
    assert!(json["verdict"].as_str().unwrap().starts_with("Nothing is faster"), "{}", json["verdict"]);
    assert_eq!(
        (&json["summary"][1]["status"], &json["summary"][1]["front"]),
        (&"exact".into(), &false.into())
    );
}

#[cfg(unix)]
#[test]
fn an_interrupt_prints_what_is_finished() {
    use std::io::{BufRead, BufReader, Read};
    use std::process::Stdio;
    let source = "synthetic:gaussian,n=256,d=16,heads=400";
    let mut child = Command::new(env!("CARGO_BIN_EXE_attlas"))
        .args(["compare", source, "--methods", "top_k", "--progress", "--json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut notes = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    while !line.starts_with("3/") {
        line.clear();
        assert!(notes.read_line(&mut line).unwrap() > 0, "it ended before it was interrupted");
    }
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let (mut rest, mut out) = (String::new(), String::new());
    child.stdout.take().unwrap().read_to_string(&mut out).unwrap();
    notes.read_to_string(&mut rest).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(rest.ends_with("interrupted: what was finished is printed\n"), "{rest}");
    let json: Value = serde_json::from_str(&out).unwrap();
    let rows = json["rows"].as_array().unwrap().len();
    assert!(json["interrupted"] == true && (2..800).contains(&rows), "{rows} rows");
}

#[test]
fn layers_and_conversions_are_shown_whole() {
    let layer = attlas(&["methods", "third_order"]);
    assert!(layer.status == 0 && layer.out.contains("degree = 4"), "{}", layer.out);
    let both = attlas(&["methods", "collaborative"]);
    assert!(
        both.out.contains("temperature") && both.out.contains("conversion collaborative"),
        "{}",
        both.out
    );
    assert_eq!(attlas(&["methods", "trawl", "--json"]).json()["to"], "grouped_query");
    assert_eq!(attlas(&["methods", "nonsense"]).status, 2);
}

#[test]
fn simulate_particles_finds_clusters_and_draws_them() {
    let folder = Folder::new("particles");
    let args = ["simulate", "particles", "--json", "--seed", "3", "--svg", "p.svg", "--t-end", "2"];
    let first = attlas_in(&folder, &args);
    let json = first.json();
    assert_eq!(json["cluster"].as_array().unwrap().len(), 20);
    assert!(json["hull"].as_array().unwrap().len() > 10 && json["energy"].is_null());
    let svg = std::fs::read_to_string(folder.0.join("p.svg")).unwrap();
    assert!(svg.starts_with("<svg") && svg.contains("clusters"));
    assert_eq!(attlas_in(&folder, &args).out, first.out, "the same seed gives the same run");
    let other = attlas(&["simulate", "particles", "--json", "--seed", "4", "--t-end", "2"]);
    assert!(other.out != first.out);
    let text = attlas(&["simulate", "particles", "--model", "sphere", "--n", "8", "--causal"]);
    assert!(text.status == 0 && text.out.contains("energy") && text.out.contains("8"), "{}", text.out);
    assert_eq!(attlas(&["simulate", "particles", "--dt", "0"]).status, 2);
}

#[test]
fn simulate_match3_shows_what_pairs_cannot_do() {
    let json = attlas(&["simulate", "match3", "--count", "20", "--json"]).json();
    assert_eq!((&json["third_order"]["errors"], &json["labels"]), (&Value::from(0), &Value::from(320)));
    assert!(json["pairwise"]["accuracy"].as_f64().unwrap() < 0.8);
    let two =
        attlas(&["simulate", "match3", "--task", "match2", "--modulus", "16", "--count", "20", "--json"])
            .json();
    assert_eq!(two["pairwise"]["errors"], 0);
    let text = attlas(&["simulate", "match3", "--n", "8", "--count", "5", "--single"]);
    assert!(
        text.status == 0 && text.out.contains("third order") && text.out.contains("100.00 %"),
        "{}",
        text.out
    );
    assert_eq!(attlas(&["simulate", "match3", "--modulus", "1"]).status, 2);
}

#[test]
fn what_was_learnt_is_saved_used_again_and_refused_for_other_shapes() {
    let folder = Folder::new("calibration");
    let compare = |source: &str, more: &[&str]| {
        let args = ["compare", source, "--methods", "loki", "--set", "loki.min_len=0", "--json", "--quiet"];
        attlas_in(&folder, &[&args[..], more].concat())
    };
    let source = "synthetic:clustered,n=200,d=8,heads=2,kv_heads=2";
    let first = compare(source, &["--save-calibration", "learnt.json"]).json();
    let file: Value =
        serde_json::from_str(&std::fs::read_to_string(folder.0.join("learnt.json")).unwrap()).unwrap();
    let heads: Vec<u64> =
        file["entries"].as_array().unwrap().iter().map(|e| e["kv_head"].as_u64().unwrap()).collect();
    assert_eq!(heads, [0, 1]);
    let again = compare(source, &["--calibration", "learnt.json"]).json();
    let errors = |x: &Value| -> Vec<Value> {
        x["rows"].as_array().unwrap().iter().map(|r| r["rel_fro"]["mean"].clone()).collect()
    };
    assert_eq!(errors(&first), errors(&again));
    for other in [
        "synthetic:clustered,n=200,d=9,heads=2,kv_heads=2",
        "synthetic:clustered,n=200,d=8,heads=6,kv_heads=3",
    ] {
        let refused = compare(other, &["--calibration", "learnt.json"]);
        assert_eq!(refused.status, 2, "{}", refused.err);
        assert!(refused.err.contains("calibration for loki"), "{}", refused.err);
    }
    assert_eq!(compare(source, &["--calibration", "missing.json"]).status, 2);
}

#[test]
fn inspect_shows_every_head_in_every_form() {
    let folder = Folder::new("inspect");
    let source = "synthetic:low_rank,n=90,d=8,heads=3";
    let ran = attlas_in(&folder, &["inspect", source, "--svg", "h.svg", "--html", "h.html"]);
    assert_eq!(ran.status, 0, "{}", ran.err);
    assert!(ran.out.lines().all(|l| l.chars().count() <= 80), "{}", ran.out);
    assert!(ran.err.contains("entropy: of rows"), "{}", ran.err);
    let read = |name: &str| std::fs::read_to_string(folder.0.join(name)).unwrap();
    assert!(read("h.svg").starts_with("<svg") && read("h.html").ends_with("</html>\n"));
    assert_eq!(std::fs::read_dir(&folder.0).unwrap().count(), 2, "no temporary file is left");
    let json = attlas(&["inspect", source, "--heads", "1-2", "--json"]).json();
    let heads = json["heads"].as_array().unwrap();
    assert_eq!(heads.iter().map(|h| h["head"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 2]);
    for h in heads {
        for name in ["q", "k", "v", "qk", "scores", "weights"] {
            let s = &h["spectra"][name];
            assert!(s["values"][0].as_f64().unwrap() > 0.0 && s["variance_rank"]["value"].is_u64(), "{name}");
            assert!(s["stable_rank"].as_f64().unwrap() >= 1.0 - 1e-9, "{name}");
        }
        assert_eq!(h["weights"]["map"]["data"].as_array().unwrap().len(), 64 * 64);
        assert!(h["weights"]["entropy"]["mean"].as_f64().unwrap() > 0.0);
    }
    assert_eq!(heads[0]["spectra"]["weights"]["complete"], true);
    let free = attlas(&["inspect", source, "--heads", "1", "--max-n", "50", "--rank", "9", "--json"]).json();
    assert_eq!(free["heads"][0]["spectra"]["weights"]["values"].as_array().unwrap().len(), 9);
    assert_eq!(attlas(&["inspect", source, "--csv"]).out.lines().count(), 4);
    let beyond = attlas(&["inspect", source, "--heads", "3"]);
    assert!(beyond.status == 2 && beyond.err.contains("0 to 2"), "{}", beyond.err);
    assert_eq!(attlas(&["inspect", "none.npz"]).status, 2);
}

#[test]
fn a_head_with_nan_is_named_and_left_out() {
    let folder = Folder::new("nan");
    let write = |name: &str, shape: &str, numbers: &[f32]| {
        std::fs::write(folder.0.join(name), npy(shape, numbers.iter().copied())).unwrap();
    };
    let shape = "(2, 20, 4)";
    let mut q: Vec<f32> = (0..160).map(|i| (i as f32 * 0.7).sin()).collect();
    for name in ["k", "v"] {
        write(&format!("{name}.npy"), shape, &q);
    }
    q[100] = f32::NAN;
    write("q.npy", shape, &q);
    let ran = attlas_in(&folder, &["inspect", "q.npy,k.npy,v.npy", "--json", "--quiet"]);
    let json = ran.json();
    assert_eq!((json["heads"].as_array().unwrap().len(), &json["skipped"][0]["head"]), (1, &Value::from(1)));
    assert!(ran.err.contains("head 1 left out: ") && ran.err.contains("queries"), "{}", ran.err);
    let compared = attlas_in(&folder, &["compare", "q.npy,k.npy,v.npy"]);
    assert!(compared.status == 2 && compared.err.contains("expected finite numbers"), "{}", compared.err);
    write("q.npy", shape, &[f32::NAN; 160]);
    assert_eq!(attlas_in(&folder, &["inspect", "q.npy,k.npy,v.npy"]).status, 2, "nothing is left");
    // Values of other lengths than their keys.
    write("q.npy", shape, &[0.5; 160]);
    write("v.npy", "(2, 10, 4)", &[0.5; 80]);
    for command in ["inspect", "compare"] {
        let ran = attlas_in(&folder, &[command, "q.npy,k.npy,v.npy"]);
        assert!(ran.status == 2 && ran.err.contains("20") && ran.err.contains("10"), "{}", ran.err);
    }
}

#[test]
fn a_report_is_one_page_that_says_how_to_make_it_again() {
    let folder = Folder::new("report");
    std::fs::write(
        folder.0.join("r.toml"),
        "version = 1\n[[rule]]\nlayers = \"1\"\nheads = \"0-1\"\nmethod = \"sink_window\"\n",
    )
    .unwrap();
    let args =
        ["report", SMALL, "--methods", "top_k,linear", "--recipe", "r.toml", "--out", "r.html", "--json"];
    let json = attlas_in(&folder, &args).json();
    assert_eq!((&json["out"], &json["heads"]), (&"r.html".into(), &2.into()));
    let page = std::fs::read_to_string(folder.0.join("r.html")).unwrap();
    assert_eq!(page.len() as u64, json["bytes"].as_u64().unwrap());
    assert!(page.contains(&format!("report {SMALL} --methods top_k,linear --recipe r.toml --out r.html")));
    assert!(page.contains("id=\"recipe\"") && page.contains("data-filter=\"kernel\""));
    let lost = attlas_in(&folder, &["report", SMALL, "--methods", "top_k", "--out", "no/such/r.html"]);
    assert!(lost.status == 2 && lost.err.contains("writing failed"), "{}", lost.err);
    assert_eq!(attlas(&["report", SMALL]).status, 2, "--out is needed");
}

#[test]
fn budgets_are_matched_and_the_front_is_marked() {
    let args =
        ["compare", "synthetic:clustered,n=256,d=8", "--methods", "sink_window,linear", "--match", "keys=32"];
    let json = attlas(&[&args[..], &["--json", "--causal"]].concat()).json();
    let matched = json["matched"]["methods"].as_array().unwrap();
    let window = matched.iter().find(|m| m["method"] == "sink_window").unwrap();
    let spent = window["spent"].as_f64().unwrap();
    assert!(window["within"] == true && spent <= 32.0 && spent > 24.0, "{window}");
    assert_eq!(json["rows"][1]["params"]["window"], window["value"], "{json}");
    let linear = matched.iter().find(|m| m["method"] == "linear").unwrap();
    assert!(linear["value"].is_null(), "it has no budget: {linear}");
    assert!(json["summary"].as_array().unwrap().iter().any(|s| s["front"] == true));
    let text = attlas(&args);
    assert!(text.out.contains("at most 32 scores a query") && text.out.contains("defaults"), "{}", text.out);
    let bad = attlas(&["compare", "--match", "keys=none"]);
    assert!(bad.status == 2 && bad.err.contains("keys=256"), "{}", bad.err);
}

#[test]
fn a_tensor_is_decomposed_and_its_factors_are_written() {
    let folder = Folder::new("decompose");
    // e₁e₁e₂ + e₁e₂e₁ + e₂e₁e₁ in single precision.
    let numbers = [0.0f32, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0];
    std::fs::write(folder.0.join("w.npy"), npy("(2, 2, 2)", numbers.into_iter())).unwrap();
    let tucker = ["decompose", "w.npy", "--with", "tucker", "--rank", "1", "--json"];
    let record = attlas_in(&folder, &[&tucker[..], &["--out", "f.npz", "--curve", "c.csv"]].concat()).json();
    assert!((record["rel_error"].as_f64().unwrap() - (5.0f64 / 9.0).sqrt()).abs() < 1e-5, "{record}");
    assert_eq!(record["parameters"], 7);
    assert!(folder.0.join("f.npz").exists());
    assert!(
        std::fs::read_to_string(folder.0.join("c.csv")).unwrap().starts_with("ranks,parameters,rel_error")
    );
    let core = ["decompose", "f.npz", "--tensor", "core", "--with", "hosvd", "--rank", "1", "--json"];
    assert_eq!(attlas_in(&folder, &core).json()["shape"], serde_json::json!([1, 1, 1]));
    let refused =
        attlas_in(&folder, &["decompose", "w.npy", "--with", "cp", "--rank", "1", "--out", "w.npy"]);
    assert_eq!(refused.status, 2, "an input is not replaced");
}

/// An array of single precision as NumPy writes it.
fn npy(shape: &str, values: impl Iterator<Item = f32>) -> Vec<u8> {
    let header = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}\n");
    let mut file = b"\x93NUMPY\x01\x00".to_vec();
    file.extend((header.len() as u16).to_le_bytes());
    file.extend(header.bytes());
    file.extend(values.flat_map(f32::to_le_bytes));
    file
}

#[test]
fn a_layer_takes_its_weights_from_a_file() {
    let folder = Folder::new("layer-weights");
    let x: Vec<f32> = (0..5 * 4).map(|i| (i as f32 * 0.7).sin()).collect();
    std::fs::write(folder.0.join("x.npy"), npy("(5, 4)", x.iter().copied())).unwrap();
    // Zero queries and keys weigh all tokens equally; values and outputs are the hidden states, shifted by a bias.
    let weights = |maps: &[(&str, f32)], wide: usize| {
        let (mut header, mut data) = (serde_json::Map::new(), Vec::<u8>::new());
        let mut put = |name: &str, shape: &[usize], values: Vec<f32>| {
            let start = data.len();
            data.extend(values.into_iter().flat_map(f32::to_le_bytes));
            let entry =
                serde_json::json!({"dtype": "F32", "shape": shape, "data_offsets": [start, data.len()]});
            header.insert(name.into(), entry);
        };
        for (name, size) in maps {
            let unit = |i: usize| if i / wide == i % wide { *size } else { 0.0 };
            put(name, &[4, wide], (0..4 * wide).map(unit).collect());
        }
        put("o.bias", &[4], vec![0.5; 4]);
        let header = serde_json::Value::from(header).to_string();
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header.bytes());
        file.extend(data);
        std::fs::write(folder.0.join("w.safetensors"), file).unwrap();
    };
    let maps = [("q", 0.0), ("k.weight", 0.0), ("v", 1.0), ("o.weight", 1.0)];
    weights(&maps, 4);
    let run = ["layer", "grouped_query", "--input", "x.npy", "--weights", "w.safetensors", "--heads", "1"];
    let record = attlas_in(&folder, &[&run[..], &["--out", "y.npy", "--json"]].concat()).json();
    assert_eq!((&record["parameters"], &record["mask"]), (&(4 * 16 + 4).into(), &"none".into()));
    let bytes = std::fs::read(folder.0.join("y.npy")).unwrap();
    let y: Vec<f32> = bytes[bytes.len() - 80..]
        .chunks_exact(4)
        .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
        .collect();
    let mean = |c: usize| (0..5).map(|i| x[i * 4 + c]).sum::<f32>() / 5.0 + 0.5;
    assert!(y.iter().enumerate().all(|(i, y)| (y - mean(i % 4)).abs() < 1e-6), "{y:?}");
    // Keys and values of another sequence give its mean.
    std::fs::write(folder.0.join("c.npy"), npy("(2, 4)", [1.0; 8].into_iter())).unwrap();
    let cross =
        [&run[..], &["--set", "rope=none", "--context", "c.npy", "--out", "z.npy", "--json"]].concat();
    assert_eq!(attlas_in(&folder, &cross).json()["context_tokens"], 2);
    let bytes = std::fs::read(folder.0.join("z.npy")).unwrap();
    assert!(bytes[bytes.len() - 80..].chunks_exact(4).all(|b| b == 1.5f32.to_le_bytes()));
    let refused = |words: &str| {
        let run = attlas_in(&folder, &run);
        assert!(run.status == 2 && run.err.contains(words), "{words}: {}", run.err);
    };
    weights(&maps[..3], 4);
    refused("o");
    weights(&maps, 3);
    refused("4");
    weights(&[&maps[..], &[("other", 1.0)]].concat(), 4);
    refused("other");
}

#[test]
fn a_layer_runs_on_hidden_states_from_a_file() {
    let folder = Folder::new("layer");
    let numbers = (0..4 * 6 * 64).map(|i| (i as f32 * 0.1).sin());
    std::fs::write(folder.0.join("x.npy"), npy("(4, 6, 64)", numbers)).unwrap();
    let axial = ["layer", "axial", "--input", "x.npy", "--random", "1", "--out", "y.npy", "--json"];
    let record = attlas_in(&folder, &axial).json();
    assert_eq!(record["shape"], serde_json::json!([4, 6, 64]));
    assert_eq!(record["parameters"], 2 * 4 * 64 * 64);
    assert!(folder.0.join("y.npy").exists());
    let y = attlas_in(&folder, &["layer", "axial", "--input", "y.npy", "--random", "1", "--json"]).json();
    assert_eq!(y["shape"], record["shape"], "what is written can be read again");
    let refused =
        attlas_in(&folder, &["layer", "axial", "--input", "x.npy", "--random", "1", "--heads", "5"]);
    assert!(refused.status == 2 && refused.err.contains("divides the width 64"), "{}", refused.err);
    let unknown = attlas_in(&folder, &["layer", "axal", "--input", "x.npy", "--random", "1"]);
    assert!(unknown.status == 2 && unknown.err.contains("did you mean axial?"), "{}", unknown.err);
}

#[test]
fn every_figure_can_be_a_pdf_file() {
    let folder = Folder::new("pdf");
    std::fs::write(folder.0.join("w.npy"), npy("(2, 2, 2)", (0..8).map(|i| (i as f32).sin()))).unwrap();
    let heads = "synthetic:clustered,n=48,d=8";
    for args in [
        &["methods", "--svg"][..],
        &["inspect", heads, "--svg"],
        &["inspect", heads, "--figure", "scores", "--svg"],
        &["inspect", heads, "--reorder", "hyper", "--svg"],
        &["compare", heads, "--methods", "top_k,linear", "--svg"],
        &["simulate", "particles", "--svg"],
        &["decompose", "w.npy", "--with", "cp", "--rank", "2", "--curve"],
    ] {
        let run = attlas_in(&folder, &[args, &["f.pdf", "--quiet"]].concat());
        assert_eq!(run.status, 0, "{args:?}: {}", run.err);
        let file = std::fs::read(folder.0.join("f.pdf")).unwrap();
        assert!(file.starts_with(b"%PDF-1.4") && file.ends_with(b"%%EOF\n"), "{args:?}");
    }
}
