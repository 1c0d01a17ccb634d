// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Names of the guest patch's KUnit tests, read from its source.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::files::read;

/// File with the names of the suites and cases that a kernel contains, one per line. Only kernels that are built with a part of the series
/// have this file.
pub const CASES: &str = "kunit-cases";

/// Returns the names of the test cases in a source file.
pub fn cases(source: &str) -> impl Iterator<Item = &str> {
    between(source, "KUNIT_CASE(", ")")
}

/// Returns the names of the test suites in a source file.
pub fn suites(source: &str) -> impl Iterator<Item = &str> {
    between(source, ".name\t\t= \"", "\"")
}

fn between<'source>(
    source: &'source str,
    start: &'static str,
    end: &'static str,
) -> impl Iterator<Item = &'source str> {
    source.split(start).skip(1).filter_map(move |rest| rest.split(end).next())
}

/// Returns the names of all suites and cases in a directory's test files, one per line.
///
/// # Errors
/// Fails if the directory or a file cannot be read.
pub(crate) fn names_in(directory: &Path) -> Result<String> {
    let mut names = String::new();
    for entry in fs::read_dir(directory).with_context(|| format!("cannot read {}", directory.display()))?.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.contains("kunit") && name.ends_with(".c") {
            let source = read(&entry.path())?;
            names.extend(cases(&source).chain(suites(&source)).flat_map(|name| [name, "\n"]));
        }
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_suites_and_cases_are_those_of_the_files_with_tests() {
        let dir = tempfile::tempdir().unwrap();
        let text = "\tKUNIT_CASE(a_test),\n\tKUNIT_CASE(b_test),\n\t{}\n\t.name\t\t= \"dma-bounce\",\n";
        fs::write(dir.path().join("dma-bounce-kunit.c"), text).unwrap();
        fs::write(dir.path().join("dma-bounce-map.c"), text).unwrap();
        fs::write(dir.path().join("dma-bounce-kunit.h"), text).unwrap();
        assert_eq!(names_in(dir.path()).unwrap(), "a_test\nb_test\ndma-bounce\n");
    }
}
