//! Checks that `docs/survey.md` names ids, files and tests that exist.

use attlas::registry;
use std::collections::BTreeSet;
use std::path::Path;

fn quoted(cell: &str) -> impl Iterator<Item = &str> {
    cell.split('`').skip(1).step_by(2)
}

#[test]
fn every_id_file_and_test_of_the_page_exists_and_every_id_is_named() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let page = std::fs::read_to_string(root.join("docs/survey.md")).unwrap();
    let ids: BTreeSet<&str> = (registry::METHODS.iter().map(|m| m.id))
        .chain(registry::LAYERS.iter().map(|l| l.id))
        .chain(registry::CONVERSIONS.iter().map(|c| c.id))
        .collect();
    let mut named: BTreeSet<&str> = BTreeSet::new();
    for row in page.lines().filter(|l| l.starts_with("| ") && !l.starts_with("| survey")) {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let [_, _, here, file, test, _] = cells[..] else { panic!("a row of four cells: {row}") };
        for word in quoted(here).filter(|w| w.chars().all(|c| c.is_ascii_lowercase() || c == '_')) {
            if ids.contains(word) {
                named.insert(word);
            }
        }
        for file in quoted(file) {
            let text = std::fs::read_to_string(root.join(file)).unwrap_or_else(|e| panic!("{file}: {e}"));
            for test in quoted(test) {
                assert!(text.contains(&format!("fn {test}(")), "{file} has no test {test}");
            }
        }
    }
    // Baselines and methods beyond the survey have pages of their own.
    let beyond = ["sink_window", "top_k", "sampled_columns", "block_sparse", "quest", "snap", "h2o"];
    let missing: Vec<&&str> = ids.iter().filter(|id| !named.contains(*id) && !beyond.contains(id)).collect();
    assert!(missing.is_empty(), "docs/survey.md names no row for {missing:?}");
}
