//! Searches whose units several processes share: the result equals that of one process, and finished units survive when
//! a process dies.
#![cfg(feature = "mpi")]

#[path = "../../attlas-mpi/tests/common/mod.rs"]
mod mpi;
mod support;

use mpi::stderr;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use support::{Folder, json};

fn launch(processes: usize, args: &[&str]) -> Command {
    mpi::launch(env!("CARGO_BIN_EXE_attlas"), processes, args)
}

fn spread(processes: usize, args: &[&str]) -> Value {
    let done = mpi::mpirun(env!("CARGO_BIN_EXE_attlas"), processes, args);
    assert!(done.status.success(), "{args:?}: {}", stderr(&done));
    serde_json::from_slice(&done.stdout)
        .unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&done.stdout)))
}

/// Removes times and the names of machines from a record.
fn timeless(mut x: Value) -> Value {
    const OF_THE_CLOCK: [&str; 15] = [
        "seconds",
        "exact_seconds",
        "setup_seconds",
        "run_seconds",
        "calibrate_seconds",
        "run_range",
        "runs",
        "speedup",
        "gflops",
        "tokens_per_second",
        "front",
        "verdict",
        "peak_bytes",
        "node",
        "nodes",
    ];
    match &mut x {
        Value::Object(fields) => {
            fields.retain(|name, _| !OF_THE_CLOCK.contains(&name.as_str()));
            fields.values_mut().for_each(|v| *v = timeless(v.take()));
        }
        Value::Array(list) => list.iter_mut().for_each(|v| *v = timeless(v.take())),
        _ => {}
    }
    x
}

#[test]
fn windows_are_shared_out_and_add_up_to_the_same_bits() {
    let folder = Folder::new("windows");
    let (model, text) = (folder.model("qwen3", 2), folder.text(300));
    let base = [
        "perplexity",
        &model,
        "--text",
        &text,
        "--context",
        "32",
        "--stride",
        "16",
        "--threads",
        "1",
        "--json",
    ];
    for more in [&[][..], &["--method", "sink_window", "--set", "window=8"]] {
        let args = [&base[..], more].concat();
        let alone = timeless(json(&args));
        assert!(alone["windows"].as_u64().unwrap() > 10);
        for processes in [2, 3] {
            let found = spread(processes, &args);
            assert_eq!(found["nodes"].as_array().unwrap().len(), 1, "one machine: {found}");
            assert_eq!(timeless(found), alone);
        }
    }
}

#[test]
fn the_keys_of_a_long_window_are_shared_out() {
    let folder = Folder::new("keys");
    let (model, text) = (folder.model("qwen3", 2), folder.text(300));
    let base = ["perplexity", &model, "--text", &text, "--context", "4096", "--threads", "1", "--json"];
    for more in [&[][..], &["--method", "sink_window", "--set", "window=8"]] {
        let args = [&base[..], more].concat();
        let alone = json(&args);
        assert_eq!(alone["windows"], 1);
        for processes in [2, 3] {
            let found = spread(processes, &args);
            assert_eq!(found["spread_keys"]["processes"], processes, "{found}");
            assert_eq!(found["scored"], alone["scored"]);
            let [a, b] = [&found, &alone].map(|r| r["nll"].as_f64().unwrap());
            assert!((a - b).abs() < 1e-4, "{a} {b}");
            let windows = spread(processes, &[&args[..], &["--spread", "windows"]].concat());
            assert_eq!(timeless(windows), timeless(alone.clone()));
        }
    }
    let refused = launch(2, &[&base[..], &["--method", "top_k"]].concat()).output().unwrap();
    assert_eq!(refused.status.code(), Some(2), "{}", stderr(&refused));
    assert!(stderr(&refused).contains("no schedule"), "{}", stderr(&refused));
}

#[test]
fn key_heads_are_shared_out_and_methods_compare_as_before() {
    let source = "synthetic:clustered,n=96,d=8,heads=6,kv_heads=3";
    let base =
        ["compare", source, "--methods", "sink_window,top_k,hyper,loki", "--set", "sink_window.window=8"];
    let base = [&base[..], &["--seeds", "2", "--threads", "1", "--json"]].concat();
    for more in [&[][..], &["--match", "keys=24"], &["--curves"]] {
        let args = [&base[..], more].concat();
        let alone = timeless(json(&args));
        assert_eq!(alone["rows"].as_array().unwrap().len(), 5 * 6);
        for processes in [2, 3] {
            assert_eq!(timeless(spread(processes, &args)), alone, "{more:?}");
        }
    }
}

#[test]
fn what_was_learnt_and_what_is_drawn_is_written_once() {
    let folder = Folder::new("learnt");
    let source = "synthetic:clustered,n=96,d=8,heads=4,kv_heads=2";
    let learnt = |name: &str| {
        let (file, page) = (folder.file(&format!("{name}.json")), folder.file(&format!("{name}.html")));
        let args = ["compare", source, "--methods", "loki", "--threads", "1", "--json", "--save-calibration"];
        let args: Vec<String> = args
            .map(str::to_owned)
            .into_iter()
            .chain([file.clone(), "--html".into(), page.clone()])
            .collect();
        (args, file, page)
    };
    fn words(args: &[String]) -> Vec<&str> {
        args.iter().map(String::as_str).collect()
    }
    let (args, alone, _) = learnt("alone");
    json(&words(&args));
    let (args, spread_out, page) = learnt("spread");
    spread(3, &words(&args));
    assert_eq!(std::fs::read(alone).unwrap(), std::fs::read(spread_out).unwrap());
    assert!(std::fs::read_to_string(page).unwrap().contains("loki"));
    assert_eq!(std::fs::read_dir(&folder.0).unwrap().count(), 4, "nobody else wrote");
}

fn tune_args<'a>(model: &'a str, text: &'a str, out: &'a str, effort: &'a str) -> Vec<&'a str> {
    let mut args = vec!["tune", model, "--text", text, "--tokens", "64", "--check-tokens", "64"];
    args.extend(["--methods", "sink_window,top_k,hyper,quest", "--effort", effort]);
    args.extend(["--max-kl", "0.5", "--threads", "1", "--out", out, "--json"]);
    args
}

/// Errors and divergences by phase, layer, key head, method and settings.
fn measured(state: &str) -> BTreeMap<String, Value> {
    let text = std::fs::read_to_string(state).unwrap();
    let lines = text.lines().skip(1).map(|l| serde_json::from_str::<Value>(l).unwrap());
    let named = |m: Value| {
        let name = ["phase", "layer", "kv_head", "method", "params"].map(|k| m[k].to_string()).join(" ");
        (name, serde_json::json!([m["error"], m["exact"]]))
    };
    lines.filter(|m| m["phase"].is_string()).map(named).collect()
}

#[test]
fn a_search_over_processes_finds_what_one_finds_with_its_measurements() {
    let folder = Folder::new("search");
    let (model, text) = (folder.model("qwen3", 3), folder.text(400));
    let out = folder.file("alone.toml");
    json(&tune_args(&model, &text, &out, "quick"));
    let alone = measured(&folder.file("alone.toml.jsonl"));
    for processes in [2, 3] {
        let name = format!("spread{processes}.toml");
        let (out, state) = (folder.file(&name), folder.file(&format!("{name}.jsonl")));
        let args = tune_args(&model, &text, &out, "quick");
        let found = spread(processes, &args);
        assert!(Path::new(&out).exists());
        let lines = std::fs::read_to_string(&state).unwrap();
        assert!(
            lines.lines().skip(1).any(|l| l.contains("peak_gflops") && l.contains("\"node\"")),
            "{lines}"
        );
        let here = measured(&state);
        // The slow candidates depend on the clock; errors do not.
        let both: Vec<&String> = here.keys().filter(|k| alone.contains_key(*k)).collect();
        assert!(both.len() > 10, "{both:?}");
        both.iter().for_each(|k| assert_eq!(here[*k], alone[*k], "{k}"));
        // One process with the same measurements adds none and chooses the same.
        let again = json(&args);
        assert_eq!(again["measurements"], found["measurements"]);
        assert_eq!(again["picks"], found["picks"]);
        assert_eq!(again["rounds"], found["rounds"]);
    }
}

/// Waits until a file has at least `lines` lines.
fn wait_for(path: &str, lines: usize, run: &mut Child) {
    let begun = Instant::now();
    loop {
        let there = std::fs::read_to_string(path).map_or(0, |text| text.lines().count());
        if there >= lines {
            return;
        }
        assert!(run.try_wait().unwrap().is_none(), "it ended after {there} lines");
        assert!(begun.elapsed() < Duration::from_secs(120), "{there} lines after two minutes");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Returns the ids of a launcher's processes by rank.
fn ranks(launcher: u32) -> BTreeMap<usize, u32> {
    let children = std::fs::read_to_string(format!("/proc/{launcher}/task/{launcher}/children")).unwrap();
    let rank = |id: u32| -> Option<usize> {
        let words = std::fs::read(format!("/proc/{id}/environ")).ok()?;
        let word = words.split(|b| *b == 0).find_map(|w| w.strip_prefix(b"OMPI_COMM_WORLD_RANK="))?;
        String::from_utf8_lossy(word).parse().ok()
    };
    children
        .split_whitespace()
        .filter_map(|id| id.parse().ok())
        .filter_map(|id| Some((rank(id)?, id)))
        .collect()
}

/// Kills the process of a rank once the file has `lines` lines; all processes must then end.
fn killed(processes: usize, rank: usize, args: &[&str], state: &str, lines: usize) -> String {
    let mut run = launch(processes, args)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("mpirun is installed");
    wait_for(state, lines, &mut run);
    let ids = ranks(run.id());
    assert_eq!(ids.len(), processes);
    assert!(Command::new("kill").args(["-9", &ids[&rank].to_string()]).status().unwrap().success());
    let begun = Instant::now();
    let done = run.wait_with_output().unwrap();
    assert!(!done.status.success() && done.stdout.is_empty());
    assert!(begun.elapsed() < Duration::from_secs(60), "the others went on");
    assert!(stderr(&done).contains(&format!("rank {rank}")), "{}", stderr(&done));
    // The launcher does not wait until the others have ended.
    for id in ids.values() {
        let alive = || {
            let status = std::fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
            !status.is_empty() && !status.contains(") Z ") && !status.contains(") X ")
        };
        while alive() {
            assert!(begun.elapsed() < Duration::from_secs(60), "process {id} goes on");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    std::fs::read_to_string(state).unwrap()
}

#[test]
fn a_killed_process_ends_the_windows_and_any_number_goes_on() {
    let folder = Folder::new("killed-windows");
    let (model, text, state) = (folder.model("qwen3", 4), folder.text(1500), folder.file("windows.jsonl"));
    let base = ["perplexity", &model, "--text", &text, "--context", "64", "--stride", "1", "--threads", "1"];
    let base = [&base[..], &["--method", "sink_window", "--set", "window=8", "--json"]].concat();
    let args = [&base[..], &["--state", &state]].concat();
    let kept = killed(2, 1, &args, &state, 20).lines().count() - 1;
    let done = launch(3, &args).output().unwrap();
    assert!(done.status.success(), "{}", stderr(&done));
    let known: usize = stderr(&done).split_whitespace().next().unwrap().parse().unwrap();
    // The last line may have been cut off.
    assert!(
        (20 - 2..=kept).contains(&known) && stderr(&done).contains("units known from"),
        "{}",
        stderr(&done)
    );
    let found: Value = serde_json::from_slice(&done.stdout).unwrap();
    assert_eq!(timeless(found), timeless(json(&base)));
    let names: Vec<_> = std::fs::read_dir(&folder.0).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(names.iter().all(|n| !n.to_string_lossy().ends_with(".tmp")), "{names:?}");
    // Another window makes another run.
    let other = [&args[..], &["--bos"]].concat();
    let refused = Command::new(env!("CARGO_BIN_EXE_attlas")).args(other).output().unwrap();
    assert_eq!(refused.status.code(), Some(2), "{}", stderr(&refused));
}

#[test]
fn a_killed_process_ends_the_search_and_any_number_goes_on() {
    let folder = Folder::new("killed-search");
    let (model, text, out) = (folder.model("qwen3", 80), folder.text(400), folder.file("r.toml"));
    let state = folder.file("r.toml.jsonl");
    let args = tune_args(&model, &text, &out, "thorough");
    // The first process is killed, too: it has the file. The launcher takes a second to end the others, which continue
    // meanwhile.
    let mut before = 0;
    for (processes, rank) in [(2, 1), (3, 0)] {
        before = killed(processes, rank, &args, &state, before + 8).lines().count();
        assert!(!Path::new(&out).exists());
    }
    let done = launch(2, &args).output().unwrap();
    assert!(done.status.success(), "{}", stderr(&done));
    let known: usize = stderr(&done)
        .lines()
        .find_map(|l| l.split_once(" measurements are known")?.0.parse().ok())
        .unwrap_or_else(|| panic!("{}", stderr(&done)));
    assert!((10..before).contains(&known), "{known} of {before}");
    let found: Value = serde_json::from_slice(&done.stdout).unwrap();
    assert!(found["picks"].as_array().unwrap().len() == 160 && Path::new(&out).exists());
    assert_eq!(json(&args)["picks"], found["picks"]);
}
