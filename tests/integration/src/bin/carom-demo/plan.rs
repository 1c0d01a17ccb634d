// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Which guests the demo runs, and their figures in its plain form.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use carom_integration::workload::{self, PRINT_VERSIONS, WAIT_FOR_NVME};
use carom_integration::{Guest, Outcome, Site, Vmm};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::results::{Machine, Results};
use crate::samples::{Measured, Sample, Samples};

/// RAM of each guest. The goal for pinned memory is stated for this size.
const GUEST_RAM_MIB: u32 = 2048;

/// Budget of the windows in the configuration that has them.
const BOUNCE: &str = "size=64M";

/// Bytes written and verified under bounce, in MiB.
const VERIFY_MIB: u32 = 48;

/// One configuration of VMM and guest kernel.
pub(crate) struct Plan {
    pub(crate) name: &'static str,
    vmm: Vmm,
    iommu: bool,
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
    two_jobs: bool,
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

/// Runs the configurations, or only those named, and collects their figures.
pub(crate) fn run(options: Options<'_>) -> Result<Results> {
    let site = Site::from_env()?;
    let mut samples = Samples::open(options.samples)?;
    let steps = steps(&site, &options)?;
    run_steps(&steps, &mut samples, |step| step.measure(&site, options.quick))?;
    let machine = machine(&site, options.host)?;
    Ok(Results::new(machine, versions(&site)?, options.quick, options.rounds, &samples.all))
}

/// Measures each guest but those that an earlier call has noted in `samples`, and notes it there.
pub(crate) fn run_steps<M: Clone + Serialize + DeserializeOwned>(
    steps: &[Step],
    samples: &mut Samples<M>,
    measure: impl Fn(&Step) -> Result<M>,
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

/// Fails if one of `names` is no configuration.
pub(crate) fn check_names(names: &[String]) -> Result<()> {
    for name in names {
        if !PLANS.iter().any(|plan| plan.name == name) {
            bail!(
                "--only {name}: no such configuration; there are {}",
                PLANS.each_ref().map(|plan| plan.name).join(", ")
            );
        }
    }
    Ok(())
}

/// One guest of each configuration of these names, `rounds` times. The rounds are interleaved, so that each configuration meets
/// the machine's good and bad minutes.
pub(crate) fn single_steps(names: &[&str], rounds: u32) -> Vec<Step> {
    let plans = || PLANS.iter().filter(|plan| names.contains(&plan.name));
    (0..rounds).flat_map(|round| plans().map(move |plan| Step { plan, round, two_jobs: false })).collect()
}

/// All steps, round by round. Cloud Hypervisor is left out where the site has none, unless it is asked for.
fn steps(site: &Site, options: &Options<'_>) -> Result<Vec<Step>> {
    let Options { quick, rounds, only, .. } = *options;
    check_names(only)?;
    let wanted = |plan: &&Plan| {
        let here = plan.vmm != Vmm::CloudHypervisor || site.cloud_hypervisor.is_some();
        if only.is_empty() { here } else { only.iter().any(|name| name == plan.name) }
    };
    Ok((0..rounds)
        .flat_map(|round| {
            let single = PLANS.iter().filter(wanted).map(move |plan| Step { plan, round, two_jobs: false });
            let double = PLANS.iter().filter(wanted).filter(move |plan| plan.two_jobs && !quick);
            single.chain(double.map(move |plan| Step { plan, round, two_jobs: true }))
        })
        .collect())
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
            .cmdline(cmdline)
            .time_limit(Duration::from_secs(180));
        guest = if iommu { guest.iommu_device(&site.nvme[0]) } else { guest.device(&site.nvme[0]) };
        if bounce { guest.bounce(BOUNCE) } else { guest }
    }

    fn measure(&self, site: &Site, quick: bool) -> Result<Measured> {
        let seconds = if quick { 2 } else { 3 };
        let plan = self.plan;
        let mut job = format!(
            "{WAIT_FOR_NVME}{PRINT_VERSIONS}{}",
            workload::fio_reads(seconds, if self.two_jobs { 2 } else { 1 })
        );
        if !self.two_jobs {
            job += "echo CAROM-MARK reads\nsleep 0.5\n";
            if plan.bounce {
                job += &workload::fio_verify(VERIFY_MIB, 64);
            }
            job += &workload::dma_map_benchmark(if quick { 1 } else { 3 });
        }
        let outcome = self.guest(site).job(&job).run(site)?;
        ensure!(
            outcome.job_status == 0,
            "the job ended with status {}; console:\n{}",
            outcome.job_status,
            outcome.console
        );
        let requests = outcome.counters.first().map(|counters| counters.requests);
        ensure!(
            requests.is_some() == (plan.iommu && plan.vmm == Vmm::Carom),
            "the VMM's events hold counters where there is no virtio-iommu, or none where there is one"
        );
        Ok(Measured {
            vmm: plan.vmm.name().into(),
            versions: workload::guest_versions(&outcome)?,
            fio: workload::fio_results(&outcome)?,
            dma_map: if self.two_jobs { None } else { Some(workload::dma_map_result(&outcome)?) },
            requests,
            pinned_bytes: outcome.peak_pinned_bytes,
            verified_bytes: if plan.bounce && !self.two_jobs { Some(verified(&outcome)?) } else { None },
            retries: outcome.retries,
        })
    }
}

fn verified(outcome: &Outcome) -> Result<u64> {
    workload::check_verified(outcome, 1)?;
    let result = outcome.value("CAROM-VERIFY")?;
    result.split(' ').next_back().unwrap_or_default().parse().with_context(|| format!("verification: {result:?}"))
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
