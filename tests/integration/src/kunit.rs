// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Results of the guest patch's KUnit tests, which the kernel runs at boot.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use carom_tools::kunit::{CASES, cases, suites};

use crate::{Guest, Kernel, Outcome, Site};

/// Kernel parameters that run the tests.
const CMDLINE: &str = "kunit.enable=1 kunit.autorun=1 kunit.filter_glob=dma-bounce*";

/// Lines of a job that print the results and the kernel's release, for [`check`]. Some kernels print the time at the start of
/// each line of the log. The job removes these times.
pub const JOB: &str = "dmesg | sed 's/^\\[[^]]*\\] //' | sed -n 's/^ *\\(ok\\|not ok\\) /CAROM-KUNIT \\1 /p'\necho \"CAROM-RELEASE $(uname -r)\"\n";

/// Configures a guest to run the tests on two NUMA nodes with `mib` MiB each (Carom only). One node has both CPUs, because the
/// guest sees them in one package, and a package belongs to one node.
#[must_use]
pub fn on_two_nodes(guest: Guest, mib: u32) -> Guest {
    let zone = |id: u8| format!("id=zone{id},size={mib}M");
    let [near, far] = ["guest_numa_id=0,cpus=[0-1],memory_zones=zone0", "guest_numa_id=1,memory_zones=zone1"];
    let arguments = ["--memory-zone".into(), zone(0), zone(1), "--numa".into(), near.into(), far.into()];
    guest.cmdline(CMDLINE).cpus(2).memory_mib(0).arguments(&arguments)
}

/// Source files with the test cases. All their cases must have run, except for the cases of the last file on Linux 6.12. Linux
/// 6.12 lacks these cases, because its block layer maps each request by a scatter-gather list.
static SOURCES: [&str; 9] = [
    include_str!("../../../guest/src/drivers/iommu/dma-bounce-kunit.c"),
    include_str!("../../../guest/src/drivers/iommu/dma-bounce-kunit-grow.c"),
    include_str!("../../../guest/src/drivers/iommu/dma-bounce-kunit-lend.c"),
    include_str!("../../../guest/src/drivers/iommu/dma-bounce-kunit-list.c"),
    include_str!("../../../guest/src/drivers/iommu/dma-bounce-kunit-place.c"),
    include_str!("../../../guest/src/drivers/iommu/dma-bounce-kunit-pool.c"),
    include_str!("../../../guest/src/drivers/iommu/dma-bounce-kunit-share.c"),
    include_str!("../../../guest/src/drivers/iommu/virtio-iommu-window-kunit.c"),
    include_str!("../../../guest/src/drivers/iommu/dma-bounce-kunit-request.c"),
];

/// Result of one case or suite.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Passed,
    Skipped,
    Failed,
}

/// Checks that each suite and each case of the patch passed in a guest with this kernel. The cases in `skipped` must have been
/// skipped, because the kernel's configuration leaves nothing to test.
///
/// # Errors
/// Fails if a suite or case failed, was skipped or is missing. The error names all such suites and cases.
pub fn check(outcome: &Outcome, site: &Site, kernel: Kernel, skipped: &[&str]) -> Result<()> {
    let lines: Vec<&str> = outcome.values("CAROM-KUNIT").collect();
    let (image, _) = kernel.files(site)?;
    let expected = expected(&image.with_file_name(CASES), outcome.value("CAROM-RELEASE")?)?;
    ensure!(!expected.is_empty(), "no KUnit tests are known for the kernel {}", image.display());
    let wrong = wrong(&lines, &expected, skipped);
    ensure!(wrong.is_empty(), "KUnit: {}; all results: {lines:?}; console:\n{}", wrong.join(", "), outcome.console);
    Ok(())
}

/// Returns the names of all suites and cases that a kernel has. If `list` exists, the kernel has only a part of the patch,
/// and `list` contains these names. Otherwise the names depend on the kernel's release.
fn expected(list: &Path, release: &str) -> Result<Vec<String>> {
    if list.exists() {
        let names = fs::read_to_string(list).with_context(|| format!("cannot read {}", list.display()))?;
        return Ok(names.lines().map(String::from).collect());
    }
    let sources = if release.starts_with("6.12.") { &SOURCES[..SOURCES.len() - 1] } else { &SOURCES };
    Ok(sources.iter().flat_map(|source| cases(source).chain(suites(source))).map(String::from).collect())
}

/// Returns the differences between the results in `lines` and the `expected` names.
fn wrong(lines: &[&str], expected: &[String], skipped: &[&str]) -> Vec<String> {
    let verdicts: BTreeMap<&str, Verdict> = lines.iter().filter_map(|line| verdict(line)).collect();
    let mut wrong: Vec<String> = Vec::new();
    for (name, verdict) in &verdicts {
        if *verdict == Verdict::Failed {
            wrong.push(format!("{name} failed"));
        }
    }
    for name in expected.iter().map(String::as_str) {
        let wanted = if skipped.contains(&name) { Verdict::Skipped } else { Verdict::Passed };
        match verdicts.get(name) {
            None => wrong.push(format!("{name} did not run")),
            Some(Verdict::Failed) => {}
            Some(verdict) if *verdict != wanted => wrong.push(format!("{name}: {verdict:?} instead of {wanted:?}")),
            Some(_) => {}
        }
    }
    wrong
}

/// Parses name and verdict of a line such as `ok 3 sync_test`, `ok 5 sync_elision_test # SKIP reason` or `not ok 1 dma-bounce`.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn whole() -> Vec<String> {
        expected(Path::new("/nonexistent/list"), "7.3.2-carom").unwrap()
    }

    fn passed() -> Vec<String> {
        whole().iter().enumerate().map(|(number, name)| format!("ok {} {name}", number + 1)).collect()
    }

    fn wrong_of(lines: &[String], skipped: &[&str]) -> Vec<String> {
        wrong(&lines.iter().map(String::as_str).collect::<Vec<_>>(), &whole(), skipped)
    }

    #[test]
    fn sources_name_the_suites_of_each_kernel_and_their_cases() {
        for (release, requests) in [("6.12.95", false), ("7.3.2-carom", true)] {
            let names = expected(Path::new("/nonexistent/list"), release).unwrap();
            let has = |name: &str| names.iter().any(|known| known == name);
            for name in
                ["dma-bounce", "dma-bounce-pool", "dma-bounce-window", "stuck_test", "attack_test", "surplus_test"]
            {
                assert!(has(name), "{name}: {names:?}");
            }
            assert_eq!(has("dma-bounce-request"), requests, "{names:?}");
            assert_eq!(has("request_memory_test"), requests, "{names:?}");
        }
    }

    #[test]
    fn kernel_with_a_part_runs_the_tests_of_that_part() {
        let dir = tempfile::tempdir().unwrap();
        let list = dir.path().join(CASES);
        fs::write(&list, "a_test\ndma-bounce\n").unwrap();
        let expected = expected(&list, "7.3.2-carom").unwrap();
        assert_eq!(expected, ["a_test", "dma-bounce"]);
        assert_eq!(wrong(&["ok 1 a_test"], &expected, &[]), ["dma-bounce did not run"]);
    }

    #[test]
    fn missing_or_failed_case_is_reported() {
        let mut lines = passed();
        assert!(wrong_of(&lines, &[]).is_empty());
        lines.retain(|line| !line.contains("stuck_test"));
        assert_eq!(wrong_of(&lines, &[]), ["stuck_test did not run"]);
        lines.push("not ok 4 stuck_test".into());
        assert_eq!(wrong_of(&lines, &[]), ["stuck_test failed"]);
    }

    #[test]
    fn skipped_case_does_not_count_as_passed() {
        let mut lines = passed();
        for line in lines.iter_mut().filter(|line| line.ends_with(" sync_elision_test")) {
            *line += " # SKIP DMA API debugging never elides them";
        }
        assert_eq!(wrong_of(&lines, &[]), ["sync_elision_test: Skipped instead of Passed"]);
        assert!(wrong_of(&lines, &["sync_elision_test"]).is_empty());
        assert_eq!(wrong_of(&passed(), &["sync_elision_test"]), ["sync_elision_test: Passed instead of Skipped"]);
    }
}
