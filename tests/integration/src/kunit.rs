// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guest patch's KUnit tests, which the kernel runs while it boots, and what it says of them.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};

use crate::Outcome;

/// Kernel parameters with which the tests run.
pub const CMDLINE: &str = "kunit.enable=1 kunit.autorun=1 kunit.filter_glob=dma-bounce*";

/// Lines of a job that print the results, which [`check`] reads.
pub const JOB: &str = "dmesg | sed -n 's/^ *\\(ok\\|not ok\\) /CAROM-KUNIT \\1 /p'\n";

/// The files that have the cases: what is in them must have run.
static SOURCES: [&str; 2] = [
    include_str!("../../../guest/src/drivers/iommu/dma-bounce-kunit.c"),
    include_str!("../../../guest/src/drivers/iommu/dma-bounce-kunit-pool.c"),
];

/// What the kernel says of one case or suite.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Passed,
    Skipped,
    Failed,
}

/// Checks that each suite and each case of the patch passed, but for the cases `skipped`, which must have been skipped because
/// the kernel's configuration leaves nothing to test.
///
/// # Errors
/// Names what failed, was skipped or is missing.
pub fn check(outcome: &Outcome, skipped: &[&str]) -> Result<()> {
    let lines: Vec<&str> = outcome.values("CAROM-KUNIT").collect();
    let wrong = wrong(&lines, skipped);
    ensure!(wrong.is_empty(), "KUnit: {}; all results: {lines:?}; console:\n{}", wrong.join(", "), outcome.console);
    Ok(())
}

/// What is wrong with the results in `lines`.
fn wrong(lines: &[&str], skipped: &[&str]) -> Vec<String> {
    let verdicts: BTreeMap<&str, Verdict> = lines.iter().filter_map(|line| verdict(line)).collect();
    let mut wrong: Vec<String> = Vec::new();
    for (name, verdict) in &verdicts {
        if *verdict == Verdict::Failed {
            wrong.push(format!("{name} failed"));
        }
    }
    for name in expected() {
        let wanted = if skipped.contains(&name) { Verdict::Skipped } else { Verdict::Passed };
        match verdicts.get(name) {
            None => wrong.push(format!("{name} did not run")),
            Some(Verdict::Failed) => {}
            Some(verdict) if *verdict != wanted => wrong.push(format!("{name} is {verdict:?} and not {wanted:?}")),
            Some(_) => {}
        }
    }
    wrong
}

/// Name and verdict of a line such as `ok 3 sync_test`, `ok 5 sync_elision_test # SKIP reason` or `not ok 1 dma-bounce`.
fn verdict(line: &str) -> Option<(&str, Verdict)> {
    let (line, failed) = match line.strip_prefix("not ") {
        Some(line) => (line, true),
        None => (line, false),
    };
    let (_number, rest) = line.strip_prefix("ok ")?.split_once(' ')?;
    let (name, directive) = rest.split_once(" # ").unwrap_or((rest, ""));
    let verdict = match (failed, directive.starts_with("SKIP")) {
        (true, _) => Verdict::Failed,
        (false, true) => Verdict::Skipped,
        (false, false) => Verdict::Passed,
    };
    Some((name.trim(), verdict))
}

/// Names of all suites and cases, as the sources have them.
fn expected() -> impl Iterator<Item = &'static str> {
    let between = |start: &'static str, end: &'static str| {
        SOURCES
            .iter()
            .flat_map(move |source| source.split(start).skip(1).filter_map(move |rest| rest.split(end).next()))
    };
    between("KUNIT_CASE(", ")").chain(between(".name\t\t= \"", "\""))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn passed() -> Vec<String> {
        expected().enumerate().map(|(number, name)| format!("ok {} {name}", number + 1)).collect()
    }

    fn wrong_of(lines: &[String], skipped: &[&str]) -> Vec<String> {
        wrong(&lines.iter().map(String::as_str).collect::<Vec<_>>(), skipped)
    }

    #[test]
    fn sources_name_both_suites_and_their_cases() {
        let names: Vec<&str> = expected().collect();
        assert!(names.contains(&"dma-bounce") && names.contains(&"dma-bounce-pool"), "{names:?}");
        assert!(names.len() > 20 && names.contains(&"stuck_test") && names.contains(&"attack_test"), "{names:?}");
    }

    #[test]
    fn all_must_have_passed() {
        let mut lines = passed();
        assert!(wrong_of(&lines, &[]).is_empty());
        lines.retain(|line| !line.contains("stuck_test"));
        assert_eq!(wrong_of(&lines, &[]), ["stuck_test did not run"]);
        lines.push("not ok 4 stuck_test".into());
        assert_eq!(wrong_of(&lines, &[]), ["stuck_test failed"]);
    }

    #[test]
    fn skipped_case_is_no_passed_one() {
        let mut lines = passed();
        for line in lines.iter_mut().filter(|line| line.ends_with(" sync_elision_test")) {
            *line += " # SKIP DMA API debugging never elides them";
        }
        assert_eq!(wrong_of(&lines, &[]), ["sync_elision_test is Skipped and not Passed"]);
        assert!(wrong_of(&lines, &["sync_elision_test"]).is_empty());
        assert_eq!(wrong_of(&passed(), &["sync_elision_test"]), ["sync_elision_test is Passed and not Skipped"]);
    }
}
