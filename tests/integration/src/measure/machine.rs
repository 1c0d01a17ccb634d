// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Description of the machine that measures, and versions of the programs.

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

use crate::Site;

/// Machine of a measurement.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// Physical machine.
    pub host: String,
    /// Accelerator of the rig (`tcg` or `kvm`), `direct` for guests outside the rig, or `native` for measurements without
    /// guests.
    pub rig: String,
    /// Name, release and version of the kernel that runs the VMM.
    pub kernel: String,
    /// RAM of each guest.
    pub guest_ram_bytes: u64,
}

impl Machine {
    /// Describes this machine. `host` describes the physical machine.
    ///
    /// # Errors
    /// Fails if the kernel's release cannot be queried.
    pub fn here(site: &Site, host: String, guest_ram_bytes: u64) -> Result<Self> {
        let kernel = first_line(Command::new("uname").args(["-s", "-r", "-v"]))?;
        Ok(Self { host, rig: site.rig.clone(), kernel, guest_ram_bytes })
    }
}

/// Returns the version of Carom's program, with the commit if `CAROM_COMMIT` is set.
///
/// # Errors
/// Fails if the program does not print its version.
pub fn carom(program: &Path) -> Result<String> {
    let version = first_line(Command::new(program).arg("--version"))?;
    Ok(match env::var("CAROM_COMMIT") {
        Ok(commit) => format!("{version} ({commit})"),
        Err(_) => version,
    })
}

/// Returns the versions of all programs, by name.
///
/// # Errors
/// Fails if a program does not print its version.
pub fn versions(site: &Site) -> Result<BTreeMap<String, String>> {
    let carom = carom(&site.carom)?;
    let qemu = first_line(Command::new(site.qemu()).arg("--version"))?;
    let machine = fs::read_to_string("/proc/sys/kernel/osrelease").context("cannot read the kernel's release")?;
    let mut versions = vec![("carom", carom), ("qemu", qemu), ("host_kernel", machine.trim().to_owned())];
    if let Ok(emulator) = env::var("CAROM_EMULATOR") {
        versions.push(("rig_emulator", emulator));
    }
    if let Some(program) = &site.iperf {
        versions.push(("iperf3", first_line(Command::new(program).arg("--version"))?));
    }
    if let Some(program) = &site.cloud_hypervisor {
        versions.push(("cloud-hypervisor", first_line(Command::new(program).arg("--version"))?));
    }
    if let Some(program) = &site.base_vmm {
        versions.push(("base", first_line(Command::new(program).arg("--version"))?));
    }
    if let Some(other) = &site.other_vmm {
        // Not all programs have `--version`. A script may even ignore the option and start a guest, so limit the time.
        let version = first_line(Command::new("timeout").args(["-k", "1", "5"]).arg(&other.program).arg("--version"));
        let version = version.unwrap_or_else(|_| other.program.display().to_string());
        versions.push(("other", format!("{}: {version}", other.name)));
    }
    Ok(versions.into_iter().map(|(name, version)| (name.to_owned(), version)).collect())
}

fn first_line(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("cannot start {}", command.get_program().display()))?;
    ensure!(output.status.success(), "{} failed: {}", command.get_program().display(), output.status);
    Ok(String::from_utf8_lossy(&output.stdout).lines().next().unwrap_or_default().to_owned())
}
