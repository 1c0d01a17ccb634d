// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Checks the number of mainline lines that the hooks change, and the number of code lines in the core.
//!
//! The hooks begin with the first patch that adds files of `guest/src`. Earlier patches are independent of bouncing. A later patch is
//! independent, too, if it neither adds nor changes files of `guest/src` and changes no line that names bouncing.

use std::fs;

use anyhow::{Context, Result, ensure};

use super::tree::CheckTree;
use crate::mails::{Step, earlier_forms, steps};

const MAX_LINES: usize = 150;

/// Last patch of the core. The core begins with the first patch that adds files of `guest/src`.
const CORE: &str = "-iommu-dma-Bounce-small-DMA-through-memory-that-stays.patch";
/// Limit on code lines in the core. The core must have fewer lines.
const CORE_LIMIT: usize = 2100;
/// Limit on code lines in the core of 6.12. In this series, the core's files also contain the code for whole requests. In 7.3, a later
/// patch adds that code.
const CORE_LIMIT_WITH_REQUESTS: usize = CORE_LIMIT + 50;
const REQUESTS: &str = "-nvme-pci-Bounce-requests-as-a-whole.patch";

impl CheckTree<'_> {
    pub(super) fn check_lines(&self) -> Result<String> {
        let steps = steps(&self.patches)?;
        let first = steps.iter().position(Step::brings_files).unwrap_or(steps.len());
        let (mut count, mut patches, mut alone) = (0, 0, 0);
        for (place, step) in steps.iter().enumerate() {
            let file = self.patches.join(&step.patch);
            let text = fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
            if place < first || !(step.changes_files() || names_bouncing(&text)) {
                patches += 1;
                alone += changed_lines(&text);
            } else {
                count += changed_lines(&text);
            }
        }
        ensure!(count <= MAX_LINES, "the hooks change {count} lines of mainline files, more than {MAX_LINES}");
        let core = self.core_lines(&steps, first)?;
        Ok(format!(
            "the hooks change {count} lines of mainline files; {patches} independent patches change {alone}; the core has {core}"
        ))
    }

    /// Counts the code lines of the files that the core adds. Counts the lines as they are after the core's last patch. Returns a text with
    /// the count and its limit.
    fn core_lines(&self, steps: &[Step], first: usize) -> Result<String> {
        let end = steps
            .iter()
            .position(|step| step.patch.ends_with(CORE))
            .context("the series lacks the patch that ends the core")?
            + 1;
        let tmp = tempfile::tempdir().context("cannot create a temporary directory for the core's files")?;
        let files = earlier_forms(self.tools, &self.tools.checkout.join("guest/src"), &steps[end..], tmp.path())?;
        let mut count = 0;
        for file in files.iter().filter(|file| steps[first..end].iter().any(|step| step.brings(file))) {
            let file = tmp.path().join(file);
            count += code_lines(&fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?);
        }
        let brings_requests = !steps[end..].iter().any(|step| step.patch.ends_with(REQUESTS));
        let limit = if brings_requests { CORE_LIMIT_WITH_REQUESTS } else { CORE_LIMIT };
        ensure!(count < limit, "the core has {count} lines of code; it must have fewer than {limit}");
        let among = if brings_requests { ", among them some for requests as a whole" } else { "" };
        Ok(format!("{count} lines of code, fewer than {limit}{among}"))
    }
}

/// Counts the lines of C that contain more than comments.
fn code_lines(text: &str) -> usize {
    let mut is_comment = false;
    text.lines().filter(|line| has_code(line, &mut is_comment)).count()
}

/// True if a line contains more than comments. `is_comment` is true while a block comment continues from the previous line.
fn has_code(line: &str, is_comment: &mut bool) -> bool {
    let (mut rest, mut found) = (line, false);
    loop {
        if *is_comment {
            let Some((_, behind)) = rest.split_once("*/") else { return found };
            (rest, *is_comment) = (behind, false);
        }
        let line_comment = rest.find("//");
        let block = rest.find("/*").filter(|start| line_comment.is_none_or(|other| *start < other));
        let code = &rest[..block.or(line_comment).unwrap_or(rest.len())];
        found |= !code.trim().is_empty();
        let Some(start) = block else { return found };
        (rest, *is_comment) = (&rest[start + 2..], true);
    }
}

/// True if a line that the patch adds or removes contains the word that all hooks have in common ("bounc").
fn names_bouncing(patch: &str) -> bool {
    let changed = patch.lines().skip_while(|line| !line.starts_with("--- a/"));
    changed.filter(|line| line.starts_with(['+', '-'])).any(|line| line.to_lowercase().contains("bounc"))
}

/// Counts added and removed lines, without documentation. For each run of changed lines, counts either the added or the removed lines,
/// whichever are more.
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
    fn lines_of_code_are_those_with_more_than_comments() {
        let text = "// SPDX\n/*\n * What it is\n */\n\n#include <x.h>\n\nint a; /* one\n * and more */\n/* first */ int b; // second\n\
                    \t/* alone */\n\t// alone /* too\nint c; /* x */ /* y\nz */ }\n/* x */ /* y */\n";
        assert_eq!(code_lines(text), 5);
        assert_eq!(code_lines(""), 0);
    }

    #[test]
    fn patch_names_bouncing_only_in_lines_that_it_changes() {
        let patch =
            |line: &str| format!("Subject: bounce\n---\n--- a/one.c\n+++ b/one.c\n@@ -1 +1,2 @@\n bounce\n{line}\n");
        assert!(!names_bouncing(&patch("+int a;")));
        for line in ["+dma_bounce();", "-CONFIG_IOMMU_DMA_BOUNCE", "+/* It bounces. */"] {
            assert!(names_bouncing(&patch(line)), "{line}");
        }
    }

    #[test]
    fn changed_run_counts_its_longer_side_but_no_documentation() {
        let patch = "Subject: x\n--- a/one.c\n+++ b/one.c\n@@ -1,3 +1,4 @@\n a\n-b\n-\n+c\n+d\n+e\n f\n-g\n\
                     --- a/Documentation/x.rst\n+++ b/Documentation/x.rst\n@@ -1 +1,2 @@\n a\n+b\n-- \n\
                     --- a/MAINTAINERS\n+++ b/MAINTAINERS\n@@ -1 +1,2 @@\n a\n+b\n\
                     --- a/two.c\n+++ b/two.c\n@@ -1 +1,2 @@\n a\n+b\n-- \n2.39\n";
        assert_eq!(changed_lines(patch), 3 + 1 + 1);
        assert_eq!(changed_lines(""), 0);
    }
}
