// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Which guests the demo runs, and their figures.

use std::collections::BTreeMap;
use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use carom_integration::workload::{self, Fio, WAIT_FOR_NVME};
use carom_integration::{Guest, Outcome, Site, Vmm};

use crate::results::{Config, Machine, Results};

/// RAM of each guest. The goal for pinned memory is stated for this size.
const GUEST_RAM_MIB: u32 = 2048;

/// Budget of the windows in the configuration that has them.
const BOUNCE: &str = "size=64M";

/// Bytes written and verified under bounce, in MiB.
const VERIFY_MIB: u32 = 48;

/// One configuration of VMM and guest kernel.
struct Plan {
    name: &'static str,
    vmm: Vmm,
    iommu: bool,
    bounce: bool,
    cmdline: &'static str,
    /// Whether the full run also measures it with two jobs on two vCPUs.
    two_jobs: bool,
}

const PLANS: [Plan; 6] = [
    Plan { name: "no-viommu", vmm: Vmm::Carom, iommu: false, bounce: false, cmdline: "", two_jobs: false },
    Plan { name: "strict", vmm: Vmm::Carom, iommu: true, bounce: false, cmdline: "iommu.strict=1", two_jobs: true },
    Plan { name: "lazy", vmm: Vmm::Carom, iommu: true, bounce: false, cmdline: "iommu.strict=0", two_jobs: false },
    Plan { name: "bounce", vmm: Vmm::Carom, iommu: true, bounce: true, cmdline: "iommu.strict=1", two_jobs: true },
    Plan {
        name: "qemu-strict",
        vmm: Vmm::Qemu,
        iommu: true,
        bounce: false,
        cmdline: "iommu.strict=1",
        two_jobs: false,
    },
    Plan { name: "qemu-lazy", vmm: Vmm::Qemu, iommu: true, bounce: false, cmdline: "iommu.strict=0", two_jobs: false },
];

/// Runs the configurations, or only those named, and collects their figures.
pub(crate) fn run(quick: bool, only: &[String], host: String) -> Result<Results> {
    for name in only {
        if !PLANS.iter().any(|plan| plan.name == name) {
            bail!("--only {name}: no such configuration; there are {}", PLANS.map(|plan| plan.name).join(", "));
        }
    }
    let site = Site::from_env()?;
    let mut results = Results {
        machine: Machine {
            host,
            rig: site.rig.clone(),
            kernel: first_line(Command::new("uname").args(["-s", "-r", "-v"]))?,
            guest_ram_bytes: u64::from(GUEST_RAM_MIB) << 20,
        },
        versions: versions(&site)?,
        quick,
        configs: Vec::new(),
        failures: Vec::new(),
    };
    let plans: Vec<&Plan> =
        PLANS.iter().filter(|plan| only.is_empty() || only.iter().any(|name| name == plan.name)).collect();
    let start = Instant::now();
    for (index, plan) in plans.iter().enumerate() {
        eprintln!("[{:3} s] guest {}/{}: {}", start.elapsed().as_secs(), index + 1, plans.len(), plan.name);
        match plan.measure(&site, quick, &mut results.versions) {
            Ok(config) => results.configs.push(config),
            Err(error) => {
                eprintln!("{}: {error:#}", plan.name);
                results
                    .failures
                    .push(format!("{}: {:#}", plan.name, error).lines().next().unwrap_or_default().to_owned());
            }
        }
    }
    eprintln!("[{:3} s] all guests ended", start.elapsed().as_secs());
    Ok(results)
}

impl Plan {
    fn guest(&self, site: &Site, suffix: &str) -> Guest {
        let mut guest = Guest::new(&format!("demo-{}{suffix}", self.name))
            .vmm(self.vmm)
            .memory_mib(GUEST_RAM_MIB)
            .cmdline(self.cmdline)
            .time_limit(Duration::from_secs(180));
        guest = if self.iommu { guest.iommu_device(&site.nvme[0]) } else { guest.device(&site.nvme[0]) };
        if self.bounce { guest.bounce(BOUNCE) } else { guest }
    }

    fn measure(&self, site: &Site, quick: bool, versions: &mut BTreeMap<String, String>) -> Result<Config> {
        let seconds = if quick { 2 } else { 5 };
        let mut job = format!(
            "{WAIT_FOR_NVME}\necho \"CAROM-KERNEL $(uname -r)\"\necho \"CAROM-FIO-VERSION $(fio --version)\"\n{}\
             echo CAROM-MARK reads\nsleep 0.5\n",
            workload::fio_reads(seconds, 1)
        );
        if self.bounce {
            job += &workload::fio_verify(VERIFY_MIB, 64);
        }
        job += &workload::dma_map_benchmark(if quick { 1 } else { 3 });
        let outcome = self.guest(site, "").job(&job).run(site)?;
        ended_well(&outcome)?;
        versions.insert("guest_kernel".into(), outcome.value("CAROM-KERNEL")?.into());
        versions.insert("fio".into(), outcome.value("CAROM-FIO-VERSION")?.into());
        let verified_bytes = if self.bounce { Some(verified(&outcome)?) } else { None };
        let requests = outcome.counters.first().map(|counters| counters.requests);
        ensure!(
            requests.is_some() == (self.iommu && self.vmm == Vmm::Carom),
            "the VMM's events hold counters where there is no virtio-iommu, or none where there is one"
        );
        let (fio_2_jobs, more_retries) = if self.two_jobs && !quick {
            let (fio, retries) = self.measure_two_jobs(site, seconds)?;
            (Some(fio), retries)
        } else {
            (None, 0)
        };
        Ok(Config {
            name: self.name.into(),
            vmm: if self.vmm == Vmm::Carom { "carom" } else { "qemu" }.into(),
            fio: workload::fio_results(&outcome)?,
            fio_2_jobs,
            dma_map: workload::dma_map_result(&outcome)?,
            requests,
            pinned_bytes: outcome.peak_pinned_bytes,
            verified_bytes,
            retries: outcome.retries + more_retries,
        })
    }

    fn measure_two_jobs(&self, site: &Site, seconds: u32) -> Result<(BTreeMap<String, Fio>, u32)> {
        let job = format!("{WAIT_FOR_NVME}{}", workload::fio_reads(seconds, 2));
        let outcome = self.guest(site, "-2").cpus(2).job(&job).run(site)?;
        ended_well(&outcome)?;
        Ok((workload::fio_results(&outcome)?, outcome.retries))
    }
}

fn ended_well(outcome: &Outcome) -> Result<()> {
    ensure!(outcome.job_status == 0, "the job ended with status {}; console:\n{}", outcome.job_status, outcome.console);
    Ok(())
}

fn verified(outcome: &Outcome) -> Result<u64> {
    workload::check_verified(outcome, 1)?;
    let result = outcome.value("CAROM-VERIFY")?;
    result.split(' ').next_back().unwrap_or_default().parse().with_context(|| format!("verification: {result:?}"))
}

fn versions(site: &Site) -> Result<BTreeMap<String, String>> {
    let mut carom = first_line(Command::new(&site.carom).arg("--version"))?;
    if let Ok(commit) = std::env::var("CAROM_COMMIT") {
        carom = format!("{carom} ({commit})");
    }
    let qemu = first_line(Command::new("qemu-system-x86_64").arg("--version"))?;
    let machine = fs::read_to_string("/proc/sys/kernel/osrelease").context("reading the kernel's release")?;
    Ok([("carom", carom), ("qemu", qemu), ("host_kernel", machine.trim().to_owned())]
        .map(|(name, version)| (name.to_owned(), version))
        .into())
}

fn first_line(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("starting {}", command.get_program().display()))?;
    ensure!(output.status.success(), "{} failed: {}", command.get_program().display(), output.status);
    Ok(String::from_utf8_lossy(&output.stdout).lines().next().unwrap_or_default().to_owned())
}
