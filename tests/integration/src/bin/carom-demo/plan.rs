// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Which guests the demo runs.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use carom_integration::{Guest, Site, Vmm};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::config::Machine;
use crate::samples::{Measured, Sample, Samples};

/// RAM of each guest. The goal for pinned memory is stated for this size.
const GUEST_RAM_MIB: u32 = 2048;

/// Budget of the windows in the configuration that has them.
const BOUNCE: &str = "size=64M";

/// One configuration of VMM and guest kernel.
pub(crate) struct Plan {
    pub(crate) name: &'static str,
    pub(crate) vmm: Vmm,
    pub(crate) iommu: bool,
    pub(crate) bounce: bool,
    cmdline: &'static str,
    /// Whether the full run also measures it with two jobs on two vCPUs.
    two_jobs: bool,
}

/// Those that are compared with each other are neighbours, as the machine's speed drifts.
static PLANS: [Plan; 8] = [
    Plan { name: "no-viommu", vmm: Vmm::Carom, iommu: false, bounce: false, cmdline: "", two_jobs: false },
    Plan { name: "bounce", vmm: Vmm::Carom, iommu: true, bounce: true, cmdline: "iommu.strict=1", two_jobs: true },
    Plan { name: "strict", vmm: Vmm::Carom, iommu: true, bounce: false, cmdline: "iommu.strict=1", two_jobs: true },
    peer("qemu-strict", Vmm::Qemu, "iommu.strict=1"),
    peer("ch-strict", Vmm::CloudHypervisor, "iommu.strict=1"),
    Plan { name: "lazy", vmm: Vmm::Carom, iommu: true, bounce: false, cmdline: "iommu.strict=0", two_jobs: false },
    peer("qemu-lazy", Vmm::Qemu, "iommu.strict=0"),
    peer("ch-lazy", Vmm::CloudHypervisor, "iommu.strict=0"),
];

const fn peer(name: &'static str, vmm: Vmm, cmdline: &'static str) -> Plan {
    Plan { name, vmm, iommu: true, bounce: false, cmdline, two_jobs: false }
}

/// One guest to be measured.
pub(crate) struct Step {
    pub(crate) plan: &'static Plan,
    pub(crate) round: u32,
    pub(crate) two_jobs: bool,
}

/// What the command line says of a run.
#[derive(Debug)]
pub(crate) struct Options<'text> {
    /// Shorter measurements.
    pub(crate) quick: bool,
    /// How often each configuration is measured.
    pub(crate) rounds: u32,
    /// Names of the only configurations that are wanted; empty for all.
    pub(crate) only: &'text [String],
    /// What to say of the machine.
    pub(crate) host: String,
    /// File of the samples.
    pub(crate) samples: &'text Path,
}

/// Measures each guest but those that an earlier call has noted in `samples`, and notes it there.
pub(crate) fn run_steps<F: Clone + Serialize + DeserializeOwned>(
    steps: &[Step],
    samples: &mut Samples<F>,
    measure: impl Fn(&Step) -> Result<Measured<F>>,
) -> Result<()> {
    let start = Instant::now();
    for (index, step) in steps.iter().enumerate() {
        let name = step.plan.name;
        if samples.has(name, step.round, step.two_jobs) {
            continue;
        }
        eprintln!(
            "[{:3} s] guest {}/{}: {name}{}",
            start.elapsed().as_secs(),
            index + 1,
            steps.len(),
            if step.two_jobs { ", 2 jobs on 2 vCPUs" } else { "" }
        );
        samples.begin(name, step.round, step.two_jobs)?;
        let measured = measure(step).map_err(|error| {
            eprintln!("{name}: {error:#}");
            format!("{error:#}").lines().next().unwrap_or_default().to_owned()
        });
        samples.end(Sample { name: name.into(), round: step.round, two_jobs: step.two_jobs, measured })?;
    }
    eprintln!("[{:3} s] all guests ended", start.elapsed().as_secs());
    Ok(())
}

/// The machine that this runs on.
pub(crate) fn machine(site: &Site, host: String) -> Result<Machine> {
    Ok(Machine {
        host,
        rig: site.rig.clone(),
        kernel: first_line(Command::new("uname").args(["-s", "-r", "-v"]))?,
        guest_ram_bytes: u64::from(GUEST_RAM_MIB) << 20,
    })
}

/// One guest of each configuration that is asked for, or else of each that is `usual`, in each round; with `two_jobs`, in a
/// full run also one with two jobs where the configuration has that. The rounds are interleaved, so that each configuration
/// meets the machine's good and bad minutes.
pub(crate) fn steps(options: &Options<'_>, usual: impl Fn(&Plan) -> bool, two_jobs: bool) -> Vec<Step> {
    let Options { quick, rounds, only, .. } = *options;
    let wanted = |plan: &&Plan| if only.is_empty() { usual(plan) } else { only.iter().any(|name| name == plan.name) };
    let plans: Vec<&'static Plan> = PLANS.iter().filter(wanted).collect();
    (0..rounds)
        .flat_map(|round| {
            let single = plans.iter().map(move |plan| Step { plan, round, two_jobs: false });
            let double = plans.iter().filter(move |plan| two_jobs && plan.two_jobs && !quick);
            single.chain(double.map(move |plan| Step { plan, round, two_jobs: true }))
        })
        .collect()
}

impl Step {
    /// The guest, without a job.
    pub(crate) fn guest(&self, site: &Site) -> Guest {
        let Plan { name, vmm, iommu, bounce, cmdline, .. } = *self.plan;
        let suffix = if self.two_jobs { "-2" } else { "" };
        let mut guest = Guest::new(&format!("demo-{name}{suffix}-{}", self.round))
            .vmm(vmm)
            .memory_mib(GUEST_RAM_MIB)
            .cpus(if self.two_jobs { 2 } else { 1 })
            .cmdline(cmdline);
        guest = if iommu { guest.iommu_device(&site.nvme[0]) } else { guest.device(&site.nvme[0]) };
        if bounce { guest.bounce(BOUNCE) } else { guest }
    }
}

/// Versions of what runs here.
pub(crate) fn versions(site: &Site) -> Result<BTreeMap<String, String>> {
    let mut carom = first_line(Command::new(&site.carom).arg("--version"))?;
    if let Ok(commit) = std::env::var("CAROM_COMMIT") {
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use carom_tools::demo::CONFIGURATIONS;

    use super::*;

    #[test]
    fn configurations_that_can_be_asked_for_are_those_that_there_are() {
        let planned: BTreeSet<&str> = PLANS.iter().map(|plan| plan.name).collect();
        assert_eq!(planned, BTreeSet::from(CONFIGURATIONS));
    }
}
