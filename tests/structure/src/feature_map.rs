// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Checks the table of features in `tests/README.md`: each path in the table exists, and each test program is in the table.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Path of the page in the workspace.
pub(crate) const DOCUMENT: &str = "tests/README.md";
/// Heading of the page's table.
const HEADING: &str = "## Features";
/// Folder of the guest tests. The table names a guest test only by its file name.
const GUESTS: &str = "tests/integration/tests/guest";
/// Files of that folder that contain no tests.
const WITHOUT_TESTS: [&str; 2] = ["main.rs", "support.rs"];

/// Returns the complaints about the page: paths that do not exist below `root`, and tests of `targets` that no row names.
pub(crate) fn complaints(document: &str, root: &Path, targets: &[PathBuf]) -> Vec<String> {
    let rows = document.lines().skip_while(|line| *line != HEADING).filter(|line| line.starts_with('|')).skip(2);
    let quoted = rows.flat_map(|row| row.split('`').skip(1).step_by(2));
    let named: BTreeSet<PathBuf> = quoted
        .map(|name| if name.contains('/') { PathBuf::from(name) } else { Path::new(GUESTS).join(name) })
        .collect();
    let missing = named.iter().filter(|path| !root.join(path).exists()).map(|path| (path, "does not exist"));
    let tests = tests(root, targets);
    let unnamed = tests.iter().filter(|test| !named.contains(*test)).map(|test| (test, "is in no row of the table"));
    missing.chain(unnamed).map(|(path, what)| format!("{DOCUMENT}: {} {what}", path.display())).collect()
}

/// Returns the test programs and the files of guest tests. For a program with its own folder, returns the path of the folder.
fn tests(root: &Path, targets: &[PathBuf]) -> BTreeSet<PathBuf> {
    let mut tests = BTreeSet::new();
    for target in targets {
        let Ok(path) = target.strip_prefix(root) else { continue };
        let folder = path.parent().unwrap_or(Path::new(""));
        let name = path.file_name().unwrap_or_default();
        if folder == Path::new(GUESTS) {
            let files = std::fs::read_dir(root.join(folder)).into_iter().flatten().flatten();
            let names = files.map(|file| file.file_name()).filter(|name| {
                let name = name.to_string_lossy();
                name.ends_with(".rs") && !WITHOUT_TESTS.contains(&&*name)
            });
            tests.extend(names.map(|name| folder.join(name)));
        } else if folder.ends_with("tests") {
            tests.insert(path.to_path_buf());
        } else if name == "main.rs" && folder.parent().is_some_and(|parent| parent.ends_with("tests")) {
            tests.insert(folder.to_path_buf());
        }
    }
    tests
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// Returns the complaints about a table with this row, in a workspace of two test programs and a guest test.
    fn found(row: &str) -> Vec<String> {
        let root = tempfile::tempdir().unwrap();
        let files = ["a/tests/b.rs", "a/tests/c/main.rs", "a/src/lib.rs"].map(PathBuf::from);
        let guests = ["main.rs", "support.rs", "disk.rs"].map(|name| Path::new(GUESTS).join(name));
        for file in files.iter().chain(&guests) {
            let path = root.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
        let targets = files.iter().chain(&guests[..1]).map(|file| root.path().join(file));
        let document = format!("# T\n{HEADING}\n| feature | tests |\n| --- | --- |\n| it | {row} |\n");
        complaints(&document, root.path(), &targets.collect::<Vec<_>>())
    }

    #[test]
    fn table_with_all_tests_has_no_complaints() {
        assert!(found("`a/src`, `a/tests/b.rs`, `a/tests/c`, `disk.rs`").is_empty());
    }

    #[test]
    fn missing_file_and_unnamed_test_are_reported() {
        let expected = [
            "tests/README.md: a/gone.rs does not exist",
            "tests/README.md: a/tests/b.rs is in no row of the table",
            "tests/README.md: tests/integration/tests/guest/disk.rs is in no row of the table",
        ];
        assert_eq!(found("`a/gone.rs`, `a/tests/c`"), expected);
    }
}
