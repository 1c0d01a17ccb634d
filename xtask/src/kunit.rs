// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The names of the guest patch's KUnit tests, as its files have them.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::files::read;

/// The file with the names of a kernel's suites and cases, a line each, which is beside kernels that have a part of the series.
pub const CASES: &str = "kunit-cases";

/// Names of the cases in a file.
pub fn cases(source: &str) -> impl Iterator<Item = &str> {
    between(source, "KUNIT_CASE(", ")")
}

/// Names of the suites in a file.
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

/// The names in all files of a directory that have tests of the patch, in lines.
///
/// # Errors
/// The directory or a file cannot be read.
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
