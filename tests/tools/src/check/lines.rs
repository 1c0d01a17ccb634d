// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How many lines of mainline files the hooks change: the patches from the first on that brings files of ours. Those before it stand
//! alone.

use std::fs;

use anyhow::{Context, Result, ensure};

use super::tree::CheckTree;
use crate::series::{Step, steps};

const MAX_LINES: usize = 150;

impl CheckTree<'_> {
    pub(super) fn check_lines(&self) -> Result<String> {
        let steps = steps(&self.patches)?;
        let first = steps.iter().position(Step::brings_files).unwrap_or(steps.len());
        let (alone, bouncing) = steps.split_at(first);
        let (alone, count) = (self.lines_of(alone)?, self.lines_of(bouncing)?);
        ensure!(count <= MAX_LINES, "the hooks change {count} lines of mainline files, more than {MAX_LINES}");
        Ok(format!(
            "the hooks change {count} lines of mainline files, and the {first} patches before them, which do without, {alone}"
        ))
    }

    fn lines_of(&self, steps: &[Step]) -> Result<usize> {
        let mut count = 0;
        for step in steps {
            let file = self.patches.join(&step.patch);
            count += changed_lines(&fs::read_to_string(&file).with_context(|| format!("reading {}", file.display()))?);
        }
        Ok(count)
    }
}

/// Lines added, a changed line being one, and lines taken away, without documentation: of a run of changed lines the longer side
/// counts.
fn changed_lines(patch: &str) -> usize {
    let (mut total, mut added, mut removed, mut documentation) = (0, 0, 0, false);
    for line in patch.lines().chain([""]) {
        let is_new_file = line.starts_with("--- ");
        if is_new_file {
            documentation = line.starts_with("--- a/Documentation/") || line == "--- a/MAINTAINERS";
        } else if line.starts_with("+++ b/") || (documentation && !line.is_empty()) {
            continue;
        } else if line == "-" || (line.starts_with('-') && !line.starts_with("--")) {
            removed += 1;
            continue;
        } else if line.starts_with('+') {
            added += 1;
            continue;
        }
        total += std::cmp::max(added, removed);
        (added, removed) = (0, 0);
    }
    total
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_changed_run_the_longer_side_counts_and_documentation_does_not() {
        let patch = "Subject: x\n--- a/one.c\n+++ b/one.c\n@@ -1,3 +1,4 @@\n a\n-b\n-\n+c\n+d\n+e\n f\n-g\n\
                     --- a/Documentation/x.rst\n+++ b/Documentation/x.rst\n@@ -1 +1,2 @@\n a\n+b\n-- \n\
                     --- a/MAINTAINERS\n+++ b/MAINTAINERS\n@@ -1 +1,2 @@\n a\n+b\n\
                     --- a/two.c\n+++ b/two.c\n@@ -1 +1,2 @@\n a\n+b\n-- \n2.39\n";
        assert_eq!(changed_lines(patch), 3 + 1 + 1);
        assert_eq!(changed_lines(""), 0);
    }
}
