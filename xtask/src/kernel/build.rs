// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Configures and compiles a kernel.

use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::available_parallelism;

use anyhow::{Context, Result, ensure};

use super::Inputs;
use crate::files::{read, write};
use crate::kunit;
use crate::tools::Tools;

/// Target architecture of a kernel.
#[derive(Debug)]
pub(super) struct Architecture {
    /// Variables for make.
    variables: &'static [&'static str],
    /// Make target of the kernel image, and the directory of the image.
    image: &'static str,
    directory: &'static str,
    /// True if the ELF file is wanted, too.
    elf: bool,
    /// Additional Debian packages for the build.
    pub(super) packages: &'static [&'static str],
}

/// This machine's architecture.
pub(super) const X86_64: Architecture =
    Architecture { variables: &[], image: "bzImage", directory: "arch/x86/boot", elf: true, packages: &[] };

/// arm64, which runs under emulation.
pub(super) const ARM64: Architecture = Architecture {
    variables: &["ARCH=arm64", "CROSS_COMPILE=aarch64-linux-gnu-"],
    image: "Image",
    directory: "arch/arm64/boot",
    elf: false,
    packages: &["gcc-aarch64-linux-gnu"],
};

impl Tools<'_> {
    /// Builds `tree` in `out` and copies the wanted files to `dir`.
    pub(super) fn build_kernel(&self, tree: &Path, out: &Path, inputs: &Inputs, dir: &Path) -> Result<()> {
        let Architecture { image, directory, elf, .. } = inputs.architecture;
        fs::create_dir_all(out).with_context(|| format!("cannot create {}", out.display()))?;
        self.configure(tree, out, inputs)?;
        self.compile(tree, out, inputs)?;
        if let Some(modules) = &inputs.modules {
            self.build_modules(tree, out, modules, dir)?;
        }
        copy(&out.join(directory).join(image), &dir.join(image))?;
        copy(&out.join(".config"), &dir.join("config"))?;
        if inputs.part.is_some() {
            write(&dir.join(kunit::CASES), &kunit::names_in(&tree.join("drivers/iommu"))?)?;
        }
        // System.map resolves the addresses of a guest's oops.
        copy(&out.join("System.map"), &dir.join("System.map"))?;
        let mut names = vec![*image, "config", "System.map"];
        if *elf {
            self.run(Command::new("strip").args(["-s", "-o"]).arg(dir.join("vmlinux")).arg(out.join("vmlinux")))?;
            names.push("vmlinux");
        }
        for name in names {
            fs::set_permissions(dir.join(name), Permissions::from_mode(0o644))
                .context("cannot set the permissions of the kernel's files")?;
        }
        Ok(())
    }

    /// Configures a kernel with only the options of the base configuration and the fragments. Fails if Kconfig rejects an option of a
    /// fragment.
    pub(super) fn configure(&self, tree: &Path, out: &Path, inputs: &Inputs) -> Result<()> {
        let mut wanted = String::new();
        for fragment in &inputs.fragments {
            wanted += &read(fragment)?;
        }
        if inputs.part.is_some() {
            let options = read(&tree.join("drivers/iommu/Kconfig"))?;
            wanted = wanted
                .lines()
                .filter(|line| !is_of_a_later_part(line, &options))
                .flat_map(|line| [line, "\n"])
                .collect();
        }
        let file = beside(out, ".fragment");
        let base = inputs.base.as_deref().unwrap_or_default();
        fs::write(&file, [base, &wanted].concat()).with_context(|| format!("cannot write {}", file.display()))?;
        let mut all = "KCONFIG_ALLCONFIG=".to_owned();
        all += &file.to_string_lossy();
        self.run(self.make(tree, out, inputs.architecture).args(["-s", &all, "allnoconfig"]))?;
        let config = fs::read_to_string(out.join(".config")).context("cannot read the kernel's configuration")?;
        let refused = refused(&wanted, &config);
        ensure!(
            refused.is_empty(),
            "Kconfig rejects these options: {}; enable their dependencies, or remove the options",
            refused.join(" ")
        );
        Ok(())
    }

    fn compile(&self, tree: &Path, out: &Path, inputs: &Inputs) -> Result<()> {
        let mut make = self.make(tree, out, inputs.architecture);
        make.arg(inputs.architecture.image);
        self.run_make(&mut make, out, if inputs.base.is_some() { 3700 } else { 2200 })
    }

    /// Runs make and shows its progress. It prints about `expected` lines.
    pub(super) fn run_make(&self, make: &mut Command, out: &Path, expected: u32) -> Result<()> {
        let log = beside(out, ".log");
        make.arg(format!("-j{}", available_parallelism().map_or(1, usize::from)));
        make.envs([
            ("KBUILD_BUILD_TIMESTAMP", "1970-01-01"),
            ("KBUILD_BUILD_USER", "carom"),
            ("KBUILD_BUILD_HOST", "carom"),
        ]);
        let mut count = 0;
        let made = self.run_watched(make, &log, |_| {
            count += 1;
            if count % 20 == 0 {
                self.progress.show(&format!("compiling the guest kernel: {}", step(count, expected)));
            }
        });
        self.progress.end();
        made.with_context(|| format!("cannot build the guest kernel; the whole log is in {}", log.display()))
    }

    /// Builds the modules in the source directory `modules` and copies them to `dir`.
    fn build_modules(&self, tree: &Path, out: &Path, modules: &Path, dir: &Path) -> Result<()> {
        let work =
            tempfile::tempdir_in(dir).with_context(|| format!("cannot create a directory in {}", dir.display()))?;
        let source = work.path().join("source");
        self.run(Command::new("cp").arg("-r").arg(modules).arg(&source))?;
        self.run_quietly(self.make(tree, out, &X86_64).arg("modules_prepare"), &work.path().join("log"))?;
        let mut make = self.make(tree, out, &X86_64);
        // The kernel was built without Module.symvers, which only `make modules` creates. KBUILD_MODPOST_WARN turns the missing
        // symbols into warnings.
        make.arg(format!("M={}", source.display())).args([
            "W=1",
            "KCFLAGS=-Werror",
            "KBUILD_MODPOST_WARN=1",
            "modules",
        ]);
        self.run_quietly(&mut make, &work.path().join("log"))?;
        for entry in fs::read_dir(&source).with_context(|| format!("cannot read {}", source.display()))?.flatten() {
            if entry.path().extension().is_some_and(|extension| extension == "ko") {
                self.run(Command::new("strip").arg("-g").arg("-o").arg(dir.join(entry.file_name())).arg(entry.path()))?;
            }
        }
        Ok(())
    }

    pub(super) fn make(&self, tree: &Path, out: &Path, architecture: &Architecture) -> Command {
        let mut make = Command::new("nice");
        make.args(["-n", "5", "make", "-C"]).arg(tree).arg(format!("O={}", out.display()));
        make.args(architecture.variables);
        make
    }
}

/// True if a configuration line sets an option of the guest patch that is missing in `options`, the text of drivers/iommu/Kconfig.
fn is_of_a_later_part(line: &str, options: &str) -> bool {
    let name = line.strip_prefix("CONFIG_").and_then(|line| line.split_once('=')).map(|(name, _)| name);
    name.is_some_and(|name| {
        let wanted = format!("config {name}");
        name.starts_with("IOMMU_DMA_BOUNCE") && !options.lines().any(|line| line == wanted)
    })
}

/// Returns the lines of `wanted` that are missing in `config`. Only the last line of an option counts. An option that is off need
/// not be in `config`.
fn refused<'wanted>(wanted: &'wanted str, config: &str) -> Vec<&'wanted str> {
    let is_option = |line: &&str| line.starts_with("CONFIG_") && line.contains('=');
    let options: BTreeMap<&str, &str> =
        wanted.lines().filter(is_option).filter_map(|line| line.split_once('=')).collect();
    let lines = wanted.lines().filter(is_option);
    let last = lines.filter(|line| line.split_once('=').is_some_and(|(name, value)| options.get(name) == Some(&value)));
    let mut refused: Vec<&str> =
        last.filter(|line| !line.ends_with("=n") && !config.lines().any(|known| known == *line)).collect();
    refused.sort_unstable();
    refused.dedup();
    refused
}

/// Returns the progress text for step `count` of about `expected`. Past `expected`, the text contains only the step.
fn step(count: u32, expected: u32) -> String {
    if count <= expected { format!("step {count} of about {expected}") } else { format!("step {count}") }
}

/// Returns the path of `directory` with `end` appended to its name.
fn beside(directory: &Path, end: &str) -> PathBuf {
    let mut path = directory.as_os_str().to_owned();
    path.push(end);
    path.into()
}

fn copy(source: &Path, target: &Path) -> Result<()> {
    fs::copy(source, target).map(|_| ()).with_context(|| format!("cannot copy {}", source.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn step_past_the_expected_number_names_no_end() {
        assert_eq!(step(2000, 2000), "step 2000 of about 2000");
        assert_eq!(step(2020, 2000), "step 2020");
    }

    #[test]
    fn option_that_a_part_does_not_have_yet_is_left_out() {
        let kconfig = "config IOMMU_DMA\n\tbool\nconfig IOMMU_DMA_BOUNCE\n\tbool \"x\"\n";
        assert!(is_of_a_later_part("CONFIG_IOMMU_DMA_BOUNCE_TEST=y", kconfig));
        for line in ["CONFIG_IOMMU_DMA_BOUNCE=y", "CONFIG_NUMA=y", "# CONFIG_IOMMU_DMA_BOUNCE_TEST", ""] {
            assert!(!is_of_a_later_part(line, kconfig), "{line}");
        }
    }

    #[test]
    fn option_is_refused_if_its_last_value_is_missing() {
        let wanted =
            "# a comment\nCONFIG_A=y\nCONFIG_B=y\nCONFIG_C=n\nCONFIG_D=\"x\"\nCONFIG_A=n\nCONFIG_E=y\nCONFIG_E=m\n";
        assert_eq!(refused(wanted, "CONFIG_B=y\nCONFIG_E=m\n"), ["CONFIG_D=\"x\""]);
        assert_eq!(refused(wanted, "CONFIG_D=\"x\"\nCONFIG_E=y\n"), ["CONFIG_B=y", "CONFIG_E=m"]);
        assert!(refused(wanted, "CONFIG_B=y\nCONFIG_D=\"x\"\nCONFIG_E=m\n").is_empty());
    }
}
