// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Checks that the tests named in the conformance tables exist.

use std::fs;
use std::path::{Path, PathBuf};

/// Collects all source text below `dir`.
fn sources(dir: &Path, text: &mut String) {
    for entry in fs::read_dir(dir).unwrap_or_else(|error| panic!("{}: {error}", dir.display())) {
        let path = entry.expect("it can be listed").path();
        if path.is_dir() {
            sources(&path, text);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            text.push_str(&fs::read_to_string(&path).expect("sources are text"));
        }
    }
}

/// Returns the source text of all crates that have conformance tests.
fn all_sources() -> String {
    let mut text = String::new();
    for dir in ["iommu_bounce/src", "iommu_bounce/tests", "devices/src", "devices/tests"] {
        sources(&root().join(dir), &mut text);
    }
    text
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Checks the last column of each table of a page: every test that the column names must exist. Returns the number of names.
/// `needs_test` selects the rows that must name a test.
fn check(page: &str, needs_test: impl Fn(&str) -> bool) -> usize {
    let table = fs::read_to_string(root().join(page)).unwrap_or_else(|error| panic!("{page}: {error}"));
    let text = all_sources();
    let mut count = 0;
    for line in table.lines().filter(|line| line.starts_with('|')) {
        let tests = line.trim_end_matches('|').rsplit(" | ").next().unwrap_or_default();
        // Text in backquotes is the name of a test if it has at least two underscores and no slash.
        for name in
            tests.split('`').skip(1).step_by(2).filter(|name| name.matches('_').count() >= 2 && !name.contains('/'))
        {
            assert!(text.contains(&format!("fn {name}(")), "{page}: test {name} does not exist: {line}");
            count += 1;
        }
        assert!(!needs_test(line) || tests.contains('`'), "{page}: the row names no test: {line}");
    }
    count
}

#[test]
fn table_names_tests_that_exist() {
    let count = check("docs/virtio-iommu-conformance.md", |line| line.contains("| MUST |"));
    assert!(count > 50, "only {count} names");
}

#[test]
fn table_of_broken_rules_has_a_test_in_each_row() {
    let head = |line: &str| line.starts_with("| section |") || line.starts_with("| --- |");
    let count = check("docs/virtio-conformance.md", |line| !head(line));
    assert!(count > 100, "only {count} names");
}
