//! Output files of commands: written whole, never over an input or a special file, and with every write error reported.

mod support;

use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};
use support::{Folder, attlas, json};

const SMALL: &str = "synthetic:clustered,n=64,d=8";

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_attlas"));
    command.args(args);
    command
}

#[test]
#[cfg(target_os = "linux")]
fn a_result_that_cannot_be_printed_is_an_error_and_a_closed_pipe_is_none() {
    let small = &["compare", SMALL, "--methods", "top_k", "--csv"][..];
    for args in [&["methods", "--json"][..], &["methods"], small, &["--version"], &["compare", "--help"]] {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let output = command(args).stdout(full).stderr(Stdio::piped()).output().unwrap();
        let err = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{args:?}: {err}");
        assert!(err.contains("error: standard output: writing failed"), "{err}");
    }
    let mut child =
        command(&["methods", "--json"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn notes_that_cannot_be_printed_lose_no_result() {
    let folder = Folder::new("unheard");
    let page = folder.file("page.html");
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let args = ["compare", SMALL, "--methods", "top_k", "--progress", "--html", &page];
    let output = command(&args).stdout(Stdio::piped()).stderr(full).output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert!(!output.stdout.is_empty() && std::fs::metadata(&page).is_ok_and(|m| m.len() > 0));
}

#[test]
fn outputs_are_checked_before_the_work() {
    let folder = Folder::new("checked");
    let nowhere = folder.file("none/x");
    let taken = folder.0.display().to_string();
    for bad in [&nowhere, &taken] {
        for args in [
            &["compare", SMALL, "--html", bad][..],
            &["compare", SMALL, "--svg", bad],
            &["compare", SMALL, "--save-calibration", bad],
            &["inspect", SMALL, "--html", bad],
            &["inspect", SMALL, "--svg", bad],
            &["report", SMALL, "--out", bad],
            &["simulate", "particles", "--svg", bad],
        ] {
            let (status, out, err) = attlas(args);
            assert_eq!((status, out.as_str()), (2, ""), "{args:?}: {err}");
        }
    }
    // An impossible output is reported before a missing model.
    let trace = folder.file("none/t.safetensors");
    let (status, _, err) = attlas(&["extract", "no.gguf", "--text", "no.txt", "--out", &trace]);
    assert!(status == 2 && err.contains("none/t.safetensors"), "{err}");
    let both = folder.file("both");
    let (status, _, err) = attlas(&["compare", SMALL, "--html", &both, "--svg", &both]);
    assert!(status == 2 && err.contains("twice"), "{err}");
}

#[test]
#[cfg(unix)]
fn inputs_links_and_files_of_the_users_own_survive() {
    let folder = Folder::new("survive");
    let trace = folder.file("t.safetensors");
    let (model, text) = (folder.model("qwen3", 1), folder.text(40));
    json(&["extract", &model, "--text", &text, "--out", &trace, "--json"]);
    let before = std::fs::read(&trace).unwrap();
    let (status, _, err) = attlas(&["report", &trace, "--out", &trace, "--methods", "top_k"]);
    assert!(status == 2 && err.contains("a file that is not an input"), "{err}");
    let (status, ..) =
        attlas(&["extract", &model, "--text", &text, "--out", &format!("{model}/model.safetensors")]);
    assert_eq!(status, 2);
    assert_eq!(std::fs::read(&trace).unwrap(), before);
    std::fs::write(folder.file("page.html.tmp"), "precious").unwrap();
    std::os::unix::fs::symlink("target.html", folder.file("page.html")).unwrap();
    let page = folder.file("page.html");
    let (status, _, err) = attlas(&["compare", SMALL, "--methods", "top_k", "--html", &page]);
    assert_eq!(status, 0, "{err}");
    assert_eq!(std::fs::read_to_string(folder.file("page.html.tmp")).unwrap(), "precious");
    assert!(std::fs::symlink_metadata(&page).unwrap().is_symlink());
    assert!(std::fs::read_to_string(folder.file("target.html")).unwrap().ends_with("</html>\n"));
    let (status, _, err) = attlas(&["compare", SMALL, "--methods", "top_k", "--html", "/dev/null"]);
    assert!(status == 2 && err.contains("a regular file or a new name"), "{err}");
}

#[test]
#[cfg(unix)]
fn a_request_to_terminate_keeps_what_is_finished() {
    let source = "synthetic:gaussian,n=256,d=16,heads=400";
    let mut child = command(&["compare", source, "--methods", "top_k", "--progress", "--json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut notes = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    while !line.starts_with("3/") {
        line.clear();
        assert!(notes.read_line(&mut line).unwrap() > 0, "it ended before it was to terminate");
    }
    let sent = Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap();
    assert!(sent.success());
    let (mut rest, mut out) = (String::new(), String::new());
    child.stdout.take().unwrap().read_to_string(&mut out).unwrap();
    notes.read_to_string(&mut rest).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{rest}");
    let found: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(found["interrupted"], true);
}

#[test]
fn a_leftover_of_a_killed_run_is_cleaned_and_a_state_in_use_is_refused() {
    let folder = Folder::new("left");
    let (model, text) = (folder.model("qwen3", 1), folder.text(120));
    let part = folder.0.join("out.part-0123456789abcdef");
    std::fs::create_dir(&part).unwrap();
    std::fs::write(part.join(".lock"), "").unwrap();
    let out = folder.file("out");
    let args = ["compress", &model, "--with", "svd", "--rank", "8", "--text", &text, "--out", &out];
    let (status, _, err) = attlas(&[&args[..], &["--repeats", "0", "--context", "32"]].concat());
    assert!(status <= 1, "{err}");
    assert!(!part.exists() && std::path::Path::new(&out).is_dir());
    let state = folder.file("state.jsonl");
    let held = std::fs::File::create(&state).unwrap();
    held.lock().unwrap();
    let recipe = folder.file("r.toml");
    let (status, _, err) = attlas(&[
        "tune",
        &model,
        "--text",
        &text,
        "--max-error",
        "0.5",
        "--effort",
        "quick",
        "--methods",
        "sink_window",
        "--out",
        &recipe,
        "--state",
        &state,
    ]);
    assert!(status == 2 && err.contains("being written") && err.contains("--state"), "{err}");
}
