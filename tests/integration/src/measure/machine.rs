// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The machine that figures are of, and the versions of what ran there.

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

use crate::Site;

/// Where it ran.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// The physical machine.
    pub host: String,
    /// `tcg` or `kvm`: how the rig's machine was run; `direct`: no rig.
    pub rig: String,
    /// Kernel that KVM and VFIO are of.
    pub kernel: String,
    /// RAM of each guest.
    pub guest_ram_bytes: u64,
}

impl Machine {
    /// The one that this runs on; `host` is what to say of the physical machine.
    ///
    /// # Errors
    /// It cannot be asked.
    pub fn here(site: &Site, host: String, guest_ram_bytes: u64) -> Result<Self> {
        let kernel = first_line(Command::new("uname").args(["-s", "-r", "-v"]))?;
        Ok(Self { host, rig: site.rig.clone(), kernel, guest_ram_bytes })
    }
}

/// Versions of what runs here, by name.
///
/// # Errors
/// A program does not say its own.
pub fn versions(site: &Site) -> Result<BTreeMap<String, String>> {
    let mut carom = first_line(Command::new(&site.carom).arg("--version"))?;
    if let Ok(commit) = env::var("CAROM_COMMIT") {
        carom = format!("{carom} ({commit})");
    }
    let qemu = first_line(Command::new("qemu-system-x86_64").arg("--version"))?;
    let machine = fs::read_to_string("/proc/sys/kernel/osrelease").context("reading the kernel's release")?;
    let mut versions = vec![("carom", carom), ("qemu", qemu), ("host_kernel", machine.trim().to_owned())];
    if let Some(program) = &site.cloud_hypervisor {
        versions.push(("cloud-hypervisor", first_line(Command::new(program).arg("--version"))?));
    }
    Ok(versions.into_iter().map(|(name, version)| (name.to_owned(), version)).collect())
}

fn first_line(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("starting {}", command.get_program().display()))?;
    ensure!(output.status.success(), "{} failed: {}", command.get_program().display(), output.status);
    Ok(String::from_utf8_lossy(&output.stdout).lines().next().unwrap_or_default().to_owned())
}
