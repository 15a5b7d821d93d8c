//! What the tests of commands on real models share.

// Each test program uses a part of it.
#![allow(dead_code, unreachable_pub)]

#[path = "../../../attlas-model/tests/common/mod.rs"]
mod models;

pub use models::{minilm, repository, smollm2};
use serde_json::Value;
use std::path::PathBuf;
use std::process::Command;

/// A folder of its own for each test, removed at the end.
pub struct Folder(pub PathBuf);

impl Folder {
    pub fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("attlas-cli-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub fn file(&self, name: &str) -> String {
        self.0.join(name).display().to_string()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Runs a command: status, standard output, standard error.
pub fn attlas(args: &[&str]) -> (i32, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_attlas")).args(args).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap_or(-1), text(output.stdout), text(output.stderr))
}

pub fn json(args: &[&str]) -> Value {
    let (status, out, err) = attlas(args);
    assert_eq!(status, 0, "{err}");
    serde_json::from_str(&out).unwrap()
}

pub fn model() -> String {
    smollm2().display().to_string()
}

pub fn alice() -> String {
    repository().join("data/alice29.txt").display().to_string()
}
