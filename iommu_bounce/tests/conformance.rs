// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The conformance table names tests that exist.

use std::fs;
use std::path::Path;

/// All source text below `dir`.
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

#[test]
fn table_names_tests_that_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let table = fs::read_to_string(root.join("docs/virtio-iommu-conformance.md")).expect("the table is there");
    let mut text = String::new();
    for dir in ["iommu_bounce/src", "iommu_bounce/tests", "devices/src", "devices/tests"] {
        sources(&root.join(dir), &mut text);
    }
    let mut count = 0;
    for line in table.lines().filter(|line| line.starts_with('|')) {
        let tests = line.trim_end_matches('|').rsplit(" | ").next().unwrap_or_default();
        // What is in quotes and looks like a test: no path, no field.
        for name in
            tests.split('`').skip(1).step_by(2).filter(|name| name.matches('_').count() >= 2 && !name.contains('/'))
        {
            assert!(text.contains(&format!("fn {name}(")), "no test is called {name}: {line}");
            count += 1;
        }
        let musts = line.contains("| MUST |");
        assert!(!musts || tests.contains('`'), "no test is named: {line}");
    }
    assert!(count > 50, "only {count} names");
}
