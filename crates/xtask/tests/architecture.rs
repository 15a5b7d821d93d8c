//! Checks that modules use each other only as `docs/architecture.md` allows.
//!
//! The page lists the modules of a crate line by line under "Modules, from the ground up"; a module may use those in
//! the lines above its own. Names joined by `+` form one group and may use each other.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Returns the line and the group of every module of a crate, from the page.
fn listed(page: &str, krate: &str) -> BTreeMap<String, (usize, usize)> {
    let start =
        page.find(&format!("```text modules {krate}\n")).unwrap_or_else(|| panic!("no list of {krate}"));
    let lines = page[start..].lines().skip(1).take_while(|l| *l != "```");
    let mut modules = BTreeMap::new();
    let mut room = 0;
    for (line, names) in lines.enumerate() {
        for names in names.split_whitespace() {
            room += 1;
            for name in names.split('+') {
                assert!(modules.insert(name.to_owned(), (line, room)).is_none(), "{name} is listed twice");
            }
        }
    }
    modules
}

/// Returns code without comments and without the tests at the end of a file.
fn code(path: &Path) -> String {
    let text = std::fs::read_to_string(path).unwrap();
    let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    text.lines().map(|l| l.split("//").next().unwrap_or_default()).collect::<Vec<_>>().join("\n")
}

/// Returns the modules named after `crate::` in some code.
fn used(code: &str) -> BTreeSet<String> {
    let word = |text: &str| text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect::<String>();
    let mut found = BTreeSet::new();
    for (at, _) in code.match_indices("crate::") {
        let rest = &code[at + "crate::".len()..];
        match rest.strip_prefix('{') {
            None => drop(found.insert(word(rest))),
            Some(list) => {
                let (mut depth, mut start) = (0, true);
                for (i, c) in list.char_indices() {
                    match c {
                        '{' => depth += 1,
                        '}' if depth == 0 => break,
                        '}' => depth -= 1,
                        ',' if depth == 0 => start = true,
                        c if depth == 0 && start && !c.is_whitespace() => {
                            found.insert(word(&list[i..]));
                            start = false;
                        }
                        _ => {}
                    }
                }
            }
        }
    }
    found
}

fn files(folder: &Path, out: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() {
            files(&path, out);
        } else if name.ends_with(".rs") && name != "tests.rs" && name != "testing.rs" {
            out.push(path);
        }
    }
}

/// Returns every dependency that the page does not allow, and every module that it does not name.
fn violations(krate: &str) -> Vec<String> {
    let modules = listed(&std::fs::read_to_string(root().join("docs/architecture.md")).unwrap(), krate);
    let source = root().join("crates").join(krate).join("src");
    let mut paths = Vec::new();
    files(&source, &mut paths);
    let mut wrong = BTreeSet::new();
    for path in paths {
        let relative = path.strip_prefix(&source).unwrap();
        let first = relative.components().next().unwrap().as_os_str().to_string_lossy().into_owned();
        let module = first.trim_end_matches(".rs");
        if ["lib", "main"].contains(&module) {
            continue;
        }
        let Some(&(line, room)) = modules.get(module) else {
            wrong.insert(format!("{module} is not listed"));
            continue;
        };
        for other in used(&code(&path)) {
            if let Some(&(other_line, other_room)) = modules.get(&other)
                && other_room != room
                && other_line >= line
            {
                wrong.insert(format!("{} uses {other}, which is not above it", relative.display()));
            }
        }
    }
    wrong.into_iter().collect()
}

#[test]
fn modules_use_those_above_them() {
    for krate in ["attlas", "attlas-lab"] {
        assert_eq!(violations(krate), Vec::<String>::new(), "{krate}");
    }
}

#[test]
fn arrows_are_found_in_every_form_of_use() {
    let names = used("use crate::a::B;\nuse crate::{\n    c::{D, E}, f, G,\n};\nfn x() { crate::h::i() }");
    assert_eq!(names.into_iter().collect::<Vec<_>>(), ["G", "a", "c", "f", "h"]);
    let page = "x\n```text modules m\na b+c\nd\n```\n";
    assert_eq!(listed(page, "m")["c"], listed(page, "m")["b"]);
    assert_ne!(listed(page, "m")["a"], listed(page, "m")["b"]);
    assert_eq!(listed(page, "m")["d"].0, 1);
}
