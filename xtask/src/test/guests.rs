// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Stages with real guests: builds what the guests need and runs `guest-tests`.

use std::path::Path;
use std::process::Command;
use std::thread;

use anyhow::{Result, anyhow, ensure};

use super::Options;
use crate::assets::{Variables, direct_variables};
use crate::cargo::TestProgram;
use crate::kernel::GuestKernel;
use crate::mails::Part;
use crate::package;
use crate::tools::Tools;

/// Tests of the guest patch that also run with Debian's configuration. Each text selects the tests whose names contain this text.
const OF_DEBIAN_CONFIG: [&str; 5] = ["kunit", "windows::", "lent::", "patch::", "drive_metadata"];

/// Tests of each part of the series. Each text selects the tests whose names contain this text. These tests need nothing from later parts
/// of the series.
const OF_PARTS: [(Part, &[&str]); 4] = [
    (Part::A, &["without_windows_only_live_mappings", "guest_above_the_limit"]),
    (Part::B, &["without_windows_only_live_mappings", "fail_through_swiotlb"]),
    (Part::C, &["kunit_passes", "drives_of_a_group"]),
    (Part::D, &["kunit_passes", "two_vcpus_with", "windows::exhausted_budget", "domain_leaves_the_old"]),
];

/// Test program of `vmm` with a malicious guest.
const HOSTILE_GUEST: &str = "hostile_guest";

impl Tools<'_> {
    /// Builds what the tests need, and returns the command that runs them.
    pub(super) fn prepare_integration(&self, options: &Options, out: &Path) -> Result<Command> {
        self.need_guest_packages()?;
        self.need_packages("checking images of disks, and making disks that fail", &["qemu-utils", "dmsetup"])?;
        self.need_packages("running the package's unit", &["systemd"])?;
        let targets = ["--bin", "carom-remote", "--test", "guest", "--test", "vfio_hardware", "--test", HOSTILE_GUEST];
        // Build carom and the tests at the same time: one can link while the other compiles.
        let (carom, tests) = thread::scope(|scope| {
            let carom = scope.spawn(|| self.carom());
            let tests = self.guest_tests("integration", &targets, out, options.filter.as_deref());
            (carom.join(), tests)
        });
        let mut tests = tests?;
        let mut variables: Variables = carom.map_err(|_| anyhow!("the thread that builds carom panicked"))??;
        variables.push(("CAROM_REMOTE", self.target_dir()?.join("debug/carom-remote").into()));
        variables.extend(self.guest(&GuestKernel::default())?);
        variables.extend(self.newer_guest()?);
        variables.extend(self.stock_guest()?);
        variables.extend(self.guest_programs()?);
        variables.extend(self.distribution_for(options)?);
        variables.extend(self.kernel_packages_for(options)?);
        variables.extend(self.firmware_for(options)?);
        variables.extend(self.traced_guests_for(options)?);
        for (wanted, option) in [(options.all, "--all"), (options.iommufd, "--iommufd")] {
            if wanted {
                tests.arg(option);
            }
        }
        if let Some(address) = &options.direct {
            variables.extend(direct_variables(address, out));
            tests.arg("--direct");
        }
        tests.envs(variables);
        Ok(tests)
    }

    /// Builds what the tests of the distribution need, if these tests run. Building takes minutes.
    fn distribution_for(&self, options: &Options) -> Result<Variables> {
        if !named(options, "distribution") {
            return Ok(Vec::new());
        }
        self.need_packages("serving a Debian guest", &["dnsmasq-base", "iproute2", "gpg", "gpg-agent", "dpkg"])?;
        let package = self.package(&package::Options::default())?;
        // Services need more options than the small guests have.
        let config = vec![self.checkout.join("guest/config/distribution.config")];
        let kernel = self.guest_kernel(&GuestKernel { config, ..GuestKernel::default() })?;
        Ok(vec![
            ("CAROM_DISTRIBUTION", self.distribution()?.into()),
            ("CAROM_DISTRIBUTION_KERNEL", kernel.join("vmlinux").into()),
            ("CAROM_PACKAGE", package.into()),
        ])
    }

    /// Builds what the test of the kernel's packages needs, if this test runs. Building takes long.
    fn kernel_packages_for(&self, options: &Options) -> Result<Variables> {
        if !named(options, "kernel_package") {
            return Ok(Vec::new());
        }
        self.need_packages(
            "installing a kernel in a Debian guest, and building a module for it",
            &["dnsmasq-base", "iproute2", "gpg", "gpg-agent", "dpkg", "e2fsprogs", "gcc", "make"],
        )?;
        let kernel = self.guest_kernel(&GuestKernel { deb: true, ..GuestKernel::default() })?;
        Ok(vec![("CAROM_DISTRIBUTION", self.distribution()?.into()), ("CAROM_KERNEL_PACKAGES", kernel.into())])
    }

    /// Builds the kernels for the tests that measure time in interrupts, if these tests run.
    fn traced_guests_for(&self, options: &Options) -> Result<Variables> {
        if named(options, "interrupts") { self.traced_guests() } else { Ok(Vec::new()) }
    }

    /// Builds what the tests of firmware need, if these tests run.
    fn firmware_for(&self, options: &Options) -> Result<Variables> {
        if !named(options, "firmware") {
            return Ok(Vec::new());
        }
        Ok(vec![("CAROM_FIRMWARE", self.firmware()?.into())])
    }

    pub(super) fn test_debug(&self, options: &Options, out: &Path) -> Result<()> {
        ensure!(options.direct.is_none(), "the debug stage runs in the rig only: leave out --direct");
        self.need_guest_packages()?;
        let mut tests = self.guest_tests("debug", &["--test", "debug"], out, options.filter.as_deref())?;
        let kernel = GuestKernel { series: Some(options.series.clone()), debug: true, ..GuestKernel::default() };
        let variables = [self.carom()?, self.guest(&kernel)?].concat();
        self.run_shown(tests.envs(variables))
    }

    /// Runs tests of the guest patch with Debian's kernel configuration.
    pub(super) fn test_debian_config(&self, out: &Path) -> Result<()> {
        self.need_guest_packages()?;
        let kernel = GuestKernel { debian: true, ..GuestKernel::default() };
        let mut variables = self.carom()?;
        variables.extend(self.guest(&kernel)?);
        variables.extend(self.newer_guest()?);
        variables.extend(self.stock_guest()?);
        variables.extend(self.guest_programs()?);
        for filter in OF_DEBIAN_CONFIG {
            let mut tests = self.guest_tests("integration", &["--test", "guest"], out, Some(filter))?;
            self.run_shown(tests.envs(variables.clone()))?;
        }
        Ok(())
    }

    /// Runs the tests of each part with kernels of both series. These kernels contain the series up to that part.
    pub(super) fn test_parts(&self, options: &Options, out: &Path) -> Result<()> {
        ensure!(options.direct.is_none(), "the parts are tested in the rig only: leave out --direct");
        self.need_guest_packages()?;
        let programs = [self.carom()?, self.guest_programs()?].concat();
        let mut failed = Vec::new();
        for series in ["6.12", "7.3"] {
            for (part, filters) in OF_PARTS {
                let kernel = GuestKernel { series: Some(series.into()), part: Some(part), ..GuestKernel::default() };
                let variables = [programs.clone(), self.guest(&kernel)?].concat();
                for filter in filters {
                    let name = format!("part {part:?} of {series}: {filter}");
                    self.print(&format!("{name}\n"));
                    let mut tests = self.guest_tests("integration", &["--test", "guest"], out, Some(filter))?;
                    // Skip the tests for the newer kernel: they would repeat the other tests with the same kernel.
                    tests.args(["--skip", "newer_kernel"]);
                    let passed = self.run_shown(tests.envs(variables.clone())).is_ok();
                    self.go_on()?;
                    if !passed {
                        failed.push(name);
                    }
                }
            }
        }
        ensure!(failed.is_empty(), "failed: {}", failed.join("; "));
        Ok(())
    }

    /// Builds the tests and returns the command that runs them. With `filter`, the command runs only tests whose name contains
    /// this text.
    fn guest_tests(&self, stage: &str, targets: &[&str], out: &Path, filter: Option<&str>) -> Result<Command> {
        let programs = self.build_tests("the tests with guests", &[&["--bin", "guest-tests"], targets].concat())?;
        let mut command = Command::new(self.target_dir()?.join("debug/guest-tests"));
        command.arg(stage).arg("--out").arg(out);
        if let Some(filter) = filter {
            command.args(["--filter", filter]);
        }
        for TestProgram { name, directory, executable } in programs {
            if name == HOSTILE_GUEST {
                // A test that uses devices of the host starts this program itself. So `guest-tests` must not run the program as a test.
                command.env("CAROM_HOSTILE_GUEST", executable);
                continue;
            }
            command.arg("--program").arg(name).arg(directory).arg(executable);
        }
        Ok(command)
    }
}

/// True if tests with this name run: with `--all`, or if the filter contains the name.
fn named(options: &Options, name: &str) -> bool {
    options.all || options.filter.as_ref().is_some_and(|filter| filter.contains(name))
}
