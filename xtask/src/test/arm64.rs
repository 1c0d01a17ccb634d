// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Stage that builds the guest patch for arm64 and runs its KUnit tests under emulation.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::kernel::GuestKernel;
use crate::key::files_below;
use crate::kunit;
use crate::tools::Tools;

/// Maximum number of seconds that an emulated kernel takes to boot, run the tests and end on a busy machine.
const TIMEOUT: &str = "600";

/// The suites run during boot. Then the kernel finds no root file system, panics and ends.
const CMDLINE: &str = "console=ttyAMA0 panic=-1 kunit.enable=1 kunit.autorun=1 kunit.filter_glob=dma-bounce*";

impl Tools<'_> {
    pub(super) fn test_arm64(&self, out: &Path) -> Result<()> {
        let emulator = self.need_command("qemu-system-aarch64", "qemu-system-arm", "emulating arm64")?;
        for series in ["6.12", "7.3"] {
            let kernel = GuestKernel { series: Some(series.into()), arm64: true, ..GuestKernel::default() };
            let image = self.guest_kernel(&kernel)?.join("Image");
            self.progress.show(&format!("KUnit tests of {series} for arm64"));
            let console = out.join(format!("arm64-{series}.log"));
            let mut emulate = Command::new("timeout");
            emulate.args(["--kill-after=10", TIMEOUT]).arg(&emulator);
            emulate.args(["-machine", "virt,gic-version=3", "-cpu", "cortex-a57", "-smp", "2", "-m", "1G"]);
            emulate.args(["-display", "none", "-monitor", "none", "-no-reboot", "-serial", "stdio"]);
            emulate.arg("-kernel").arg(image).args(["-append", CMDLINE]);
            self.run_quietly(&mut emulate, &console)
                .with_context(|| format!("kernel {series} for arm64 failed, or did not end within {TIMEOUT} s"))?;
            let said = fs::read(&console).with_context(|| format!("cannot read {}", console.display()))?;
            let cases = cases_of(&self.checkout.join("guest/src"), series)?;
            let summary = checked(&String::from_utf8_lossy(&said), &cases)
                .with_context(|| format!("KUnit tests of {series} for arm64"))?;
            self.print(&format!("{series} for arm64: {summary}\n"));
        }
        Ok(())
    }
}

/// Returns the cases in the patch's files. Cases for whole requests need a kernel whose block layer maps a request as a whole, so 6.12
/// lacks these cases.
fn cases_of(source: &Path, series: &str) -> Result<Vec<String>> {
    let mut cases = Vec::new();
    for (file, _) in files_below(source)? {
        let name = file.to_string_lossy();
        if !name.contains("kunit") || !name.ends_with(".c") || (series == "6.12" && name.contains("kunit-request")) {
            continue;
        }
        let text = fs::read_to_string(source.join(&file)).with_context(|| format!("cannot read {name}"))?;
        cases.extend(kunit::cases(&text).map(String::from));
    }
    ensure!(!cases.is_empty(), "there are no KUnit tests in {}", source.display());
    Ok(cases)
}

/// Checks in the kernel's `console` that each of `cases` passed or was skipped. Returns a text with the number of passed cases and the
/// number of skipped cases.
fn checked(console: &str, cases: &[String]) -> Result<String> {
    let (mut passed, mut skipped, mut wrong) = (0, 0, Vec::new());
    for case in cases {
        let verdict = console.lines().find_map(|line| {
            let (before, after) = line.split_once(&format!(" {case}"))?;
            let is_whole = after.trim().is_empty() || after.trim_start().starts_with('#');
            let (is_ok, is_not) = (before.contains(" ok "), before.contains("not ok "));
            ((is_ok || is_not) && is_whole).then_some((is_not, after.contains("# SKIP")))
        });
        match verdict {
            Some((false, false)) => passed += 1,
            Some((false, true)) => skipped += 1,
            Some((true, _)) => wrong.push(format!("{case} failed")),
            None => wrong.push(format!("{case} did not run")),
        }
    }
    let warnings = console.lines().filter(|line| ["WARNING:", "BUG:", "Oops"].iter().any(|word| line.contains(word)));
    wrong.extend(warnings.map(String::from));
    ensure!(wrong.is_empty(), "{}; console:\n{console}", wrong.join(", "));
    Ok(format!("{passed} KUnit tests passed, {skipped} had nothing to test"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONSOLE: &str = "[    1.2]     # Subtest: dma-bounce\n[    1.3]     ok 1 sync_test\n[    1.4]     not ok 2 sync_direction_test\n\
                           [    1.5]     ok 3 elision_test # SKIP never elided\n[    1.6] not ok 1 dma-bounce\n";

    fn result_of(console: &str, cases: &[&str]) -> Result<String, String> {
        let cases: Vec<String> = cases.iter().map(|case| (*case).into()).collect();
        checked(console, &cases).map_err(|error| error.to_string())
    }

    #[test]
    fn all_cases_must_have_passed() {
        let passed = result_of(CONSOLE, &["sync_test", "elision_test"]).unwrap();
        assert_eq!(passed, "1 KUnit tests passed, 1 had nothing to test");
        assert!(
            result_of(CONSOLE, &["sync_test", "sync_direction_test"])
                .unwrap_err()
                .contains("sync_direction_test failed")
        );
        assert!(result_of(CONSOLE, &["direction_test"]).unwrap_err().contains("direction_test did not run"));
        let warned = format!("{CONSOLE}[    2.0] WARNING: CPU: 0 PID: 1 at mm/a.c:1\n");
        assert!(result_of(&warned, &["sync_test"]).unwrap_err().contains("WARNING: CPU: 0"));
    }

    #[test]
    fn only_newer_kernels_have_the_request_cases() {
        let source = crate::checkout().join("guest/src");
        let older = cases_of(&source, "6.12").unwrap();
        let newer = cases_of(&source, "7.3").unwrap();
        assert!(older.contains(&"sync_test".into()) && !older.contains(&"request_test".into()));
        assert!(newer.contains(&"request_test".into()));
    }
}
