// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Checks the table of promises in `docs/security.md`: the sources contain all tests that the table names.

use std::collections::BTreeMap;

/// Path of the document in the workspace.
pub(crate) const DOCUMENT: &str = "docs/security.md";
/// Heading of the document's table.
const HEADING: &str = "## Promises, and the tests that hold them";
/// Text that a row must contain if its tests run only on request.
const ON_DEMAND: &str = "`--all`";

/// Text of each source file, by its path in the workspace.
pub(crate) type Sources = BTreeMap<String, String>;

/// Returns the complaints about the tests that the document's table names.
pub(crate) fn complaints(document: &str, sources: &Sources) -> Vec<String> {
    let section = document.lines().skip_while(|line| *line != HEADING).skip(1);
    let table = section.take_while(|line| !line.starts_with("## "));
    // The first two lines are the head of the table.
    let rows = table.filter(|line| line.starts_with('|')).skip(2);
    let mut complaints = Vec::new();
    let mut is_empty = true;
    for row in rows {
        is_empty = false;
        let (promise, tests) = row.trim_matches(['|', ' ']).rsplit_once(" | ").unwrap_or((row, ""));
        complaints.extend(wrong(tests, sources).into_iter().map(|what| format!("{DOCUMENT}: '{promise}': {what}")));
    }
    if is_empty {
        complaints.push(format!("{DOCUMENT}: the section '{HEADING}' has no table"));
    }
    complaints
}

/// Returns the complaints about the tests of one row.
fn wrong(tests: &str, sources: &Sources) -> Vec<String> {
    let quoted: Vec<&str> = tests.split('`').skip(1).step_by(2).collect();
    let (paths, others): (Vec<&str>, Vec<&str>) = quoted.iter().partition(|text| is_path(text));
    let (names, commands): (Vec<&str>, Vec<&str>) = others.iter().partition(|text| is_test(text));
    let mut wrong = Vec::new();
    if paths.is_empty() && names.is_empty() {
        wrong.push("the row names no test".into());
    }
    for path in &paths {
        if !sources.keys().any(|file| is_below(file, path)) {
            wrong.push(format!("source file {path} does not exist"));
        }
    }
    for name in names {
        // If the row names files, the test must be in one of these files.
        let has_it = |(file, text): (&String, &String)| {
            (paths.is_empty() || paths.iter().any(|path| is_below(file, path))) && text.contains(&format!("fn {name}("))
        };
        if !sources.iter().any(has_it) {
            wrong.push(format!("no source file of the row contains test {name}"));
        }
    }
    for name in commands.iter().flat_map(|command| command.split_whitespace()).filter(|word| is_test(word)) {
        if !sources.values().any(|text| text.contains(&format!("fn {name}"))) {
            wrong.push(format!("no test name starts with {name}"));
        }
    }
    let is_slow = |file: &&str| sources.get(*file).is_some_and(|text| is_on_demand(text));
    if let Some(file) = paths.iter().find(|file| is_slow(file) && !tests.contains(ON_DEMAND)) {
        wrong.push(format!("the tests of {file} run only with {ON_DEMAND}, but the row does not say so"));
    }
    wrong
}

/// True if the text is a path. A text with spaces is a command.
fn is_path(text: &str) -> bool {
    text.contains('/') && !text.contains(' ')
}

/// True if the text looks like the name of a test: at least three words that are joined by `_`.
fn is_test(text: &str) -> bool {
    text.matches('_').count() >= 2 && text.chars().all(|c| c == '_' || c.is_ascii_lowercase() || c.is_ascii_digit())
}

/// True if `file` is `path`, or is in the folder `path`.
fn is_below(file: &str, path: &str) -> bool {
    file.strip_prefix(path).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// True if a file has guest tests and all of them are slow.
fn is_on_demand(text: &str) -> bool {
    let tests = text.matches("#[guest_test").count();
    tests > 0 && text.matches("slow = \"").count() >= tests
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the complaints about a row with these tests.
    fn reported(tests: &str) -> Vec<String> {
        let sources = [
            ("a/src/b.rs", "fn one_two_three() {}"),
            ("a/tests/c/main.rs", "#[test] fn four_five_six() {}"),
            ("a/tests/slow.rs", "#[guest_test(slow = \"why\")] fn seven_eight_nine(_: &Guest) {}"),
            ("a/tests/some.rs", "#[guest_test(slow = \"why\")] fn x() {} #[guest_test] fn y() {}"),
        ];
        let sources = sources.map(|(file, text)| (file.to_string(), text.to_string())).into();
        complaints(&format!("# S\n{HEADING}\n| promise | test |\n| --- | --- |\n| it is so | {tests} |\n"), &sources)
    }

    #[test]
    fn existing_files_folders_tests_and_commands_draw_no_complaint() {
        for tests in [
            "`a/src/b.rs`, `one_two_three`",
            "`a/tests/c`, `four_five_six`, see below",
            "`a/src/b.rs`, `a/tests/c`, `four_five_six`",
            "`four_five_six`, for longer: `CAROM_X=1 scripts/test --filter seven_eight integration`",
            "`a/tests/slow.rs`, with `--all`",
            "`a/tests/some.rs`",
        ] {
            assert!(reported(tests).is_empty(), "{tests}: {:?}", reported(tests));
        }
    }

    #[test]
    fn wrong_name_is_reported_with_its_promise() {
        for (tests, expected) in [
            ("`a/src/gone.rs`", "source file a/src/gone.rs does not exist"),
            ("`a/src/b`", "source file a/src/b does not exist"),
            ("`one_two_thre`", "no source file of the row contains test one_two_thre"),
            ("`a/src/b.rs`, `four_five_six`", "no source file of the row contains test four_five_six"),
            ("`a/src/b.rs`, `run --filter nine_eight_seven x`", "no test name starts with nine_eight_seven"),
            ("we looked", "the row names no test"),
            ("`a/tests/slow.rs`", "the tests of a/tests/slow.rs run only with `--all`, but the row does not say so"),
        ] {
            assert_eq!(reported(tests), [format!("docs/security.md: 'it is so': {expected}")], "{tests}");
        }
    }

    #[test]
    fn document_without_the_table_is_reported() {
        assert!(complaints("# Security\n", &Sources::new())[0].contains("has no table"));
    }
}
