// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
// Long because each property of a guest has a short method of its own.
//! A guest: its description, its run, and its outcome.

use std::ffi::OsStr;
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::Site;
use crate::apart::Apart;
use crate::events::{self, Counters, Event};
use crate::initramfs::{self, Extra};
use crate::probe::{Probe, Prober};
use crate::process::{self, Ended, Finished, Limits};
use crate::tally;
use crate::vmm::{self, Device, Drive, Emulated, Kernel, Machine, Vmm};

/// Kernel parameters of every guest. They select the serial console, and make each panic, oops or unknown NMI end the guest.
const BASE_CMDLINE: &str = "console=ttyS0 quiet panic=-1 oops=panic unknown_nmi_panic";

/// Line that the guest's first program (`/init` of the base initramfs) prints at its start.
pub const INIT_BEGIN: &str = "CAROM-INIT-BEGIN";

/// Start of the line that `/init` prints when the job has ended. The job's exit status follows.
const JOB_EXIT: &str = "CAROM-JOB-EXIT ";

/// Description of a guest.
#[derive(Debug, Clone)]
pub struct Guest {
    name: String,
    vmm: Vmm,
    kernel: Kernel,
    /// Description for the VMM. It does not yet contain the paths of files that are created when the guest starts.
    machine: Machine,
    job: String,
    extras: Vec<Extra>,
    vcpus_apart: bool,
    poll: Duration,
    time_limit: Duration,
}

/// Outcome of a guest that ended.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Text of the serial console.
    pub console: String,
    /// stderr of the VMM.
    pub stderr: String,
    /// Exit status of the guest's last job.
    pub job_status: i32,
    /// Exit status of the VMM.
    pub vmm_status: i32,
    /// The VMM's events (Carom only).
    pub events: Vec<Event>,
    /// Reports of the virtio-iommu's counters (Carom only): one for each `CAROM-MARK` line on the console, and one at the end.
    pub counters: Vec<Counters>,
    /// Maximum memory that the VMM had pinned, in bytes.
    pub peak_pinned_bytes: u64,
    /// Probes, one for each line of the console that begins with [`crate::PROBE`].
    pub probes: Vec<Probe>,
    /// [`Probe::executed`] at the VMM's start.
    pub executed_at_start: Option<u64>,
    /// Time from the VMM's start until the console showed the start of the guest's first program. [`Guest::look_every`] sets
    /// the resolution.
    pub begun: Option<Duration>,
    /// Time from the VMM's start to its end.
    pub elapsed: Duration,
    /// Number of earlier attempts to run this guest, in which the guest hung or the rig's emulator ended it.
    pub retries: u32,
}

impl Guest {
    /// Returns a guest with 1 vCPU, 512 MiB, no device and the patched kernel, on Carom. `name` must be unique within one
    /// run of the tests or the demo, because it names the guest's console file.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self {
            name: name.into(),
            vmm: Vmm::Carom,
            kernel: Kernel::Patched,
            machine: Machine { cpus: 1, memory_mib: 512, seccomp: true, ..Machine::default() },
            job: String::new(),
            extras: Vec::new(),
            vcpus_apart: false,
            poll: process::POLL,
            time_limit: Duration::from_secs(90),
        }
    }

    fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    /// Chooses the VMM.
    #[must_use]
    pub fn vmm(self, vmm: Vmm) -> Self {
        self.with(|guest| guest.vmm = vmm)
    }

    /// Chooses the kernel.
    #[must_use]
    pub fn kernel(self, kernel: Kernel) -> Self {
        self.with(|guest| guest.kernel = kernel)
    }

    /// Adds kernel parameters.
    #[must_use]
    pub fn cmdline(mut self, parameters: &str) -> Self {
        self.machine.cmdline.push(' ');
        self.machine.cmdline.push_str(parameters);
        self
    }

    /// Sets the number of vCPUs.
    #[must_use]
    pub fn cpus(self, cpus: u8) -> Self {
        self.with(|guest| guest.machine.cpus = cpus)
    }

    /// Sets the size of the guest's memory.
    #[must_use]
    pub fn memory_mib(self, mib: u32) -> Self {
        self.with(|guest| guest.machine.memory_mib = mib)
    }

    /// Passes through a host device without a virtual IOMMU.
    #[must_use]
    pub fn device(self, address: &str) -> Self {
        self.with(|guest| guest.machine.devices.push(Device { address: address.into(), iommu: false }))
    }

    /// Passes through a host device behind the virtual IOMMU.
    #[must_use]
    pub fn iommu_device(self, address: &str) -> Self {
        self.with(|guest| guest.machine.devices.push(Device { address: address.into(), iommu: true }))
    }

    /// Adds an NVMe drive that QEMU emulates, with the contents of `image`, behind the virtual IOMMU. All such drives of a guest
    /// are in one IOMMU group: on [`Vmm::Qemu`] as functions of one device, on [`Vmm::QemuIntel`] behind a conventional PCI
    /// bridge.
    #[must_use]
    pub fn group_drive(self, image: &Path) -> Self {
        self.with(|guest| guest.machine.drives.push(Drive { image: image.into(), metadata: false }))
    }

    /// Like [`Guest::group_drive`], with a drive that has 8 bytes of protection metadata per block. The drive and the kernel
    /// check the metadata.
    #[must_use]
    pub fn metadata_drive(self, image: &Path) -> Self {
        self.with(|guest| guest.machine.drives.push(Drive { image: image.into(), metadata: true }))
    }

    /// Adds a virtio disk with a raw image, for any VMM. With `iommu`, the disk is behind the virtual IOMMU.
    #[must_use]
    pub fn virtio_disk(self, image: &Path, iommu: bool) -> Self {
        self.with(|guest| guest.machine.emulated.push(Emulated::Disk { image: image.into(), iommu }))
    }

    /// Adds a virtio network card with an existing tap interface, for any VMM. With `iommu`, the card is behind the virtual
    /// IOMMU.
    #[must_use]
    pub fn virtio_net(self, tap: &str, iommu: bool) -> Self {
        self.with(|guest| guest.machine.emulated.push(Emulated::Card { tap: tap.into(), iommu }))
    }

    /// Adds a device of a vfio-user server (Carom only). `value` is the value of `--user-device`.
    #[must_use]
    pub fn user_device(self, value: &str) -> Self {
        self.with(|guest| guest.machine.user_devices.push(value.into()))
    }

    /// Adds a disk (Carom only). `value` is the value of `--disk`.
    #[must_use]
    pub fn disk(self, value: &str) -> Self {
        self.with(|guest| guest.machine.disks.push(value.into()))
    }

    /// Adds a rate limit that disks share (Carom only). `value` is the value of `--rate-limit-group`.
    #[must_use]
    pub fn rate_limit_group(self, value: &str) -> Self {
        self.with(|guest| guest.machine.rate_limit_groups.push(value.into()))
    }

    /// Adds a network device (Carom only). `value` is the value of `--net`.
    #[must_use]
    pub fn net(self, value: &str) -> Self {
        self.with(|guest| guest.machine.cards.push(value.into()))
    }

    /// Adds a source of random bytes (Carom only). `value` is the value of `--rng`.
    #[must_use]
    pub fn rng(self, value: &str) -> Self {
        self.with(|guest| guest.machine.rng = Some(value.into()))
    }

    /// Shares the guest's memory with other processes.
    #[must_use]
    pub fn shared_memory(self) -> Self {
        self.with(|guest| guest.machine.shared_memory = true)
    }

    /// Offers bounce windows. `value` is the value of `--iommu-bounce`, such as `size=64M`.
    #[must_use]
    pub fn bounce(self, value: &str) -> Self {
        self.with(|guest| guest.machine.bounce = Some(value.into()))
    }

    /// Adds arguments that Carom and Cloud Hypervisor have in common.
    #[must_use]
    pub fn arguments(self, arguments: &[String]) -> Self {
        self.with(|guest| guest.machine.arguments.extend_from_slice(arguments))
    }

    /// Adds a balloon (Carom only). `value` is the value of `--balloon`, such as `size=0,free_page_reporting=on`.
    #[must_use]
    pub fn balloon(self, value: &str) -> Self {
        self.with(|guest| guest.machine.balloon = Some(value.into()))
    }

    /// Runs the VMM in the control group with this directory.
    #[must_use]
    pub fn group(self, dir: &Path) -> Self {
        self.with(|guest| guest.machine.group = Some(dir.into()))
    }

    /// Sets the shell script that the guest runs as root. The guest powers off afterwards.
    #[must_use]
    pub fn job(self, script: &str) -> Self {
        self.with(|guest| guest.job = script.into())
    }

    /// Adds a program `/bin/NAME`.
    #[must_use]
    pub fn program(self, name: &str, bytes: Vec<u8>) -> Self {
        self.with(|guest| guest.extras.push(Extra { path: format!("bin/{name}"), bytes }))
    }

    /// Limits the memory that the VMM may lock, in bytes (Carom only).
    #[must_use]
    pub fn locked_memory(self, bytes: u64) -> Self {
        self.with(|guest| guest.machine.locked_memory = Some(bytes))
    }

    /// Runs the VMM as this user and group ID, without capabilities (Carom only).
    #[must_use]
    pub fn user(self, id: u32) -> Self {
        self.with(|guest| guest.machine.user = Some(id))
    }

    /// Restricts the VMM by Landlock to the files in its arguments (Carom only).
    #[must_use]
    pub fn landlock(self) -> Self {
        self.with(|guest| guest.machine.landlock = true)
    }

    /// Enables or disables the VMM's seccomp filters (Carom only). They are enabled by default.
    #[must_use]
    pub fn seccomp(self, filtered: bool) -> Self {
        self.with(|guest| guest.machine.seccomp = filtered)
    }

    /// Keeps the vCPU threads on the last CPUs. In the rig, also keeps the interrupts of the guest's devices on the first CPU.
    /// Measurements of the guest's kernel use this, so that other work does not affect the result.
    #[must_use]
    pub fn vcpus_apart(self) -> Self {
        self.with(|guest| guest.vcpus_apart = true)
    }

    /// Sets the interval between checks of the VMM and the console. The default is 50 ms.
    #[must_use]
    pub fn look_every(self, poll: Duration) -> Self {
        self.with(|guest| guest.poll = poll)
    }

    /// Sets the maximum run time of the guest. The default is 90 s.
    #[must_use]
    pub fn time_limit(self, limit: Duration) -> Self {
        self.with(|guest| guest.time_limit = limit)
    }

    /// Runs the guest to its end.
    ///
    /// On an emulated machine, the guest is started once more if it hangs or if the emulated CPU ends it. The outcome and the
    /// run's last line count such restarts, and stderr contains the reason. On hardware, this function fails instead.
    ///
    /// # Errors
    /// Fails if the VMM cannot be started or fails, or if the guest panics, hangs, is reset by a triple fault, or ends without
    /// its job's status. The error contains the end of the console.
    pub fn run(&self, site: &Site) -> Result<Outcome> {
        ensure!(!self.job.is_empty(), "guest {} has no job", self.name);
        let qemu = matches!(self.vmm, Vmm::Qemu | Vmm::QemuIntel);
        ensure!(qemu || self.machine.drives.is_empty(), "guest {} has drives that only QEMU emulates", self.name);
        tally::note_started(&site.out, &self.name)?;
        let mut retries = 0;
        let (mut finished, mut seen) = self.run_once(site, retries)?;
        if let Some(why) = self.second_chance(site, &finished) {
            tally::note_again(&site.out, &self.name, &why)?;
            eprintln!("guest {} {why} and is started again", self.name);
            if let Some(stuck) = &finished.stuck {
                eprintln!("{stuck}{}", tail(&finished));
            }
            retries = 1;
            (finished, seen) = self.run_once(site, retries)?;
        }
        match finished.ended {
            Ended::TimedOut => {
                let stuck = finished.stuck.as_deref().unwrap_or_default();
                let times = if retries == 0 { "" } else { " once more" };
                bail!("guest {} hung{times}; {stuck}{}", self.name, tail(&finished))
            }
            Ended::GuestPanicked => bail!("the kernel of guest {} panicked{}", self.name, tail(&finished)),
            Ended::Exited(_) if self.fell_over(&finished) => {
                bail!("a triple fault reset guest {}{}", self.name, tail(&finished))
            }
            Ended::Exited(status) => self.outcome(finished, status, seen, retries),
        }
    }

    /// Returns the reason to start the guest again, if there is one. Only an emulated machine gives a guest this second chance,
    /// because only emulated CPUs sometimes hang or end a guest.
    fn second_chance(&self, site: &Site, finished: &Finished) -> Option<String> {
        let is_silent = matches!(self.vmm, Vmm::Qemu | Vmm::QemuIntel | Vmm::Other);
        let reset = || if is_silent { reset_without_a_word(finished) } else { self.fell_over(finished) };
        if site.rig != "tcg" {
            None
        } else if finished.ended == Ended::TimedOut {
            Some(format!("hung for {} s", self.time_limit.as_secs()))
        } else if emulator_failed(&finished.stdout) {
            Some("was ended by the emulated CPU".into())
        } else {
            reset().then(|| "was reset by the emulated CPU".into())
        }
    }

    /// Writes the guest's files to `dir`, together with a shell script that starts the VMM. Returns the script's path. Use this
    /// in tests that examine the VMM's environment instead of the guest.
    ///
    /// # Errors
    /// Fails if a file cannot be written.
    pub fn write_command(&self, site: &Site, dir: &Path) -> Result<PathBuf> {
        let (command, _) = self.prepare(site, dir, &dir.join("console"))?;
        let quoted = |word: &OsStr| format!("'{}'", word.to_string_lossy().replace('\'', r"'\''"));
        let words: Vec<String> = std::iter::once(command.get_program()).chain(command.get_args()).map(quoted).collect();
        let script = dir.join("vmm");
        fs::write(&script, format!("#!/bin/sh\nexec {}\n", words.join(" ")))
            .context("cannot write the VMM's command")?;
        fs::set_permissions(&script, Permissions::from_mode(0o755))
            .context("cannot make the VMM's command executable")?;
        Ok(script)
    }

    /// Records that the guest is started, and creates the guest's files in `dir`. Returns the VMM's command, the console file,
    /// and the API socket if the VMM is Carom.
    pub(crate) fn command(&self, site: &Site, dir: &Path) -> Result<(Command, PathBuf, Option<PathBuf>)> {
        tally::note_started(&site.out, &self.name)?;
        let console = self.console(site, 0)?;
        let (command, machine) = self.prepare(site, dir, &console)?;
        Ok((command, console, self.vmm.is_carom().then_some(machine.api)))
    }

    fn console(&self, site: &Site, round: u32) -> Result<PathBuf> {
        let dir = site.out.join("guests");
        fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
        Ok(dir.join(format!("{}-{round}.console", self.name)))
    }

    fn run_once(&self, site: &Site, round: u32) -> Result<(Finished, Seen)> {
        let console = self.console(site, round)?;
        let scratch = tempfile::tempdir().context("cannot create a directory for the guest's files")?;
        let (mut command, machine) = self.prepare(site, scratch.path(), &console)?;
        let limits = Limits { time: self.time_limit, stop_on_panic: true };
        let api = self.vmm.is_carom().then_some(machine.api.as_path());
        let mut apart = self.vcpus_apart.then(|| Apart::new(site.rig != "direct")).transpose()?;
        let (start, mut begun, mut prober) = (Instant::now(), None, Prober::new(api, site.instructions.as_deref()));
        let look = |pid, text: &str| {
            apart.as_mut().into_iter().for_each(|apart| apart.place(pid));
            begun = begun.or_else(|| text.contains(INIT_BEGIN).then(|| start.elapsed()));
            prober.look(pid, text);
        };
        let finished = process::run_watched(&mut command, &console, limits, api, self.poll, look)?;
        let Prober { executed_at_start, probes, .. } = prober;
        Ok((finished, Seen { events: events::read(&machine.events)?, probes, executed_at_start, begun }))
    }

    /// True if Carom reset the guest after a triple fault, unless the guest's kernel restarts by triple faults (`reboot=t`).
    fn fell_over(&self, finished: &Finished) -> bool {
        finished.stderr.contains("triple fault; the guest is reset") && !self.machine.cmdline.contains("reboot=t")
    }

    /// Writes the guest's files, except the console, to `dir`. Returns the VMM's command and the complete description for the
    /// VMM.
    fn prepare(&self, site: &Site, dir: &Path, console: &Path) -> Result<(Command, Machine)> {
        let (kernel, base) = self.kernel.files(site)?;
        let mitigations = if has_mitigations(kernel) { " mitigations=off" } else { "" };
        let initramfs = dir.join("initramfs");
        let mut extras = self.extras.clone();
        extras.push(Extra { path: "job".into(), bytes: self.job.clone().into_bytes() });
        initramfs::append(base, &extras, &initramfs)?;
        let (mut kernel, mut program) = (kernel.to_path_buf(), None);
        if let Some(id) = self.machine.user {
            // The VMM's user may lack access to the original files, so copy them.
            let copies = [(&mut kernel, dir.join("kernel")), (program.insert(site.carom.clone()), dir.join("carom"))];
            for (file, copy) in copies {
                fs::copy(&*file, &copy)
                    .with_context(|| format!("cannot copy {} for the VMM's user", file.display()))?;
                *file = copy;
            }
            for path in [dir, &initramfs] {
                chown(path, Some(id), Some(id))
                    .with_context(|| format!("cannot change the owner of {} to the VMM's user", path.display()))?;
            }
        }
        let machine = Machine {
            kernel,
            initramfs,
            cmdline: format!("{BASE_CMDLINE}{mitigations}{}", self.machine.cmdline),
            events: dir.join("events"),
            api: dir.join("api"),
            program,
            console: console.into(),
            ..self.machine.clone()
        };
        Ok((vmm::command(site, self.vmm, &machine)?, machine))
    }

    fn outcome(&self, finished: Finished, status: ExitStatus, seen: Seen, retries: u32) -> Result<Outcome> {
        let vmm_status =
            status.code().with_context(|| format!("the VMM of guest {} was killed: {status}", self.name))?;
        ensure!(vmm_status == 0, "the VMM of guest {} failed with status {vmm_status}{}", self.name, tail(&finished));
        let job_status = job_status(&finished.stdout)
            .with_context(|| format!("guest {} ended without its job's status{}", self.name, tail(&finished)))?;
        Ok(Outcome {
            counters: events::counters(&seen.events)?,
            events: seen.events,
            probes: seen.probes,
            executed_at_start: seen.executed_at_start,
            begun: seen.begun,
            console: finished.stdout,
            stderr: finished.stderr,
            job_status,
            vmm_status,
            peak_pinned_bytes: finished.peak_pinned_bytes,
            elapsed: finished.elapsed,
            retries,
        })
    }
}

/// True if a kernel supports `mitigations=off`. Other kernels would print a warning, which causes hundreds of VM exits. The
/// kernel's directory contains its configuration if this project built the kernel. Otherwise, the result is true.
fn has_mitigations(kernel: &Path) -> bool {
    let config = fs::read_to_string(kernel.with_file_name("config"));
    config.map_or(true, |config| config.lines().any(|line| line == "CONFIG_CPU_MITIGATIONS=y"))
}

/// Observations of a guest's run, in addition to the result of the VMM's process.
struct Seen {
    events: Vec<Event>,
    probes: Vec<Probe>,
    executed_at_start: Option<u64>,
    begun: Option<Duration>,
}

impl Outcome {
    /// Returns the values of the console's lines `KEY VALUE`, in order.
    pub fn values<'console>(&'console self, key: &'console str) -> impl Iterator<Item = &'console str> {
        self.console.lines().filter_map(move |line| line.trim().strip_prefix(key)?.strip_prefix(' ')).map(str::trim)
    }

    /// Returns the value of the last line `KEY VALUE` of the console.
    ///
    /// # Errors
    /// Fails if there is no such line.
    pub fn value<'console>(&'console self, key: &'console str) -> Result<&'console str> {
        self.values(key).last().with_context(|| format!("no line {key:?} on the console:\n{}", self.console))
    }
}

/// True if the rig's emulator ended the guest's kernel with an interrupt that no real CPU delivers. Without this project's fixes
/// (`xtask/src/emulator.rs`), QEMU's emulation of nested guests sometimes delivers an interrupt while interrupts are off. The
/// interrupt then arrives at the first instruction of the kernel's entry for system calls or interrupts.
///
/// A fault at the entry for interrupts counts only if the CPU used the entry stack. If a task's own stack overflows, a fault
/// occurs at the same entry, but the overflow is an error of the guest's kernel.
fn emulator_failed(console: &str) -> bool {
    let interrupt = || console.contains("<ENTRY_TRAMPOLINE>") && console.contains("RIP: 0010:irq_entries_start+0x");
    console.contains("PANIC: double fault") && (console.contains("RIP: 0010:entry_SYSCALL_64+0x0/") || interrupt())
}

/// True if the VMM ended with status 0 before the job reported its status. A VMM such as QEMU also ends when a triple fault
/// resets the guest. The cause is the same as for [`emulator_failed`], but here the guest's kernel could not even handle the
/// double fault.
fn reset_without_a_word(finished: &Finished) -> bool {
    matches!(finished.ended, Ended::Exited(status) if status.success()) && job_status(&finished.stdout).is_none()
}

/// Returns the exit status that the job reported.
fn job_status(console: &str) -> Option<i32> {
    let status = console.lines().filter_map(|line| line.trim().strip_prefix(JOB_EXIT)).next_back()?;
    status.trim().parse().ok()
}

/// Returns the last lines of the console and of stderr, as a part of an error text.
fn tail(finished: &Finished) -> String {
    let last = |text: &str, count: usize| -> String {
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(count)..].iter().map(|line| format!("\n  | {line}")).collect()
    };
    format!("; end of the console:{}\nend of stderr:{}", last(&finished.stdout, 30), last(&finished.stderr, 10))
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use carom_tools::peers::OtherVmm;

    use super::*;

    #[test]
    fn kernel_has_mitigations_unless_its_config_disables_them() {
        let dir = tempfile::tempdir().unwrap();
        let kernel = dir.path().join("bzImage");
        assert!(has_mitigations(&kernel));
        fs::write(dir.path().join("config"), "CONFIG_A=y\nCONFIG_CPU_MITIGATIONS=y\n").unwrap();
        assert!(has_mitigations(&kernel));
        let without = "# CONFIG_CPU_MITIGATIONS is not set\nCONFIG_ARCH_CONFIGURES_CPU_MITIGATIONS=y\n";
        fs::write(dir.path().join("config"), without).unwrap();
        assert!(!has_mitigations(&kernel));
    }

    #[test]
    fn only_a_fault_at_kernel_entry_is_blamed_on_the_emulator() {
        const FAULT: &str = "traps: PANIC: double fault, error_code: 0x0\nRIP: 0010:exc_page_fault+0x18/0x690\n";
        const SYSTEM_CALL: &str = "RIP: 0010:entry_SYSCALL_64+0x0/0x7e\n";
        const INTERRUPT: &str = "RIP: 0010:irq_entries_start+0x20/0x660\n";
        for entry in [SYSTEM_CALL.into(), format!(" <ENTRY_TRAMPOLINE>\n{INTERRUPT}")] {
            assert!(emulator_failed(&format!("{FAULT}{entry}")), "{entry}");
            assert!(!emulator_failed(&entry), "{entry}");
        }
        for other in ["", "RIP: 0010:entry_SYSCALL_64+0x1/0x7e\n", " <TASK>\n", " <ENTRY_TRAMPOLINE>\n", INTERRUPT] {
            assert!(!emulator_failed(&format!("{FAULT}{other}")), "{other}");
        }
    }

    fn finished(ended: Ended, console: &str, stderr: &str) -> Finished {
        let (stdout, stderr) = (console.into(), stderr.into());
        Finished { ended, stdout, stderr, peak_pinned_bytes: 0, elapsed: Duration::ZERO, stuck: None }
    }

    fn exited(status: i32) -> Ended {
        Ended::Exited(ExitStatus::from_raw(status << 8))
    }

    #[test]
    fn only_an_end_without_the_jobs_status_is_a_reset() {
        let reset = |ended, console| reset_without_a_word(&finished(ended, console, ""));
        assert!(reset(exited(0), "CAROM-JOB-BEGIN\n"));
        assert!(!reset(exited(0), "CAROM-JOB-EXIT 1\n"));
        assert!(!reset(exited(1), "CAROM-JOB-BEGIN\n"));
        assert!(!reset(Ended::TimedOut, "CAROM-JOB-BEGIN\n"));
        assert!(!reset(Ended::GuestPanicked, "CAROM-JOB-BEGIN\n"));
    }

    /// Returns a site that sets only `rig`.
    fn site(rig: &str) -> Site {
        Site { rig: rig.into(), ..Site::default() }
    }

    #[test]
    fn guest_failure_is_retried_only_on_an_emulated_machine() {
        let guest = Guest::new("any");
        let fell = finished(exited(0), "", "vCPU 0: triple fault; the guest is reset\n");
        let hung = finished(Ended::TimedOut, "", "");
        for (ended, why) in [(&fell, "was reset by the emulated CPU"), (&hung, "hung for 90 s")] {
            assert_eq!(guest.second_chance(&site("tcg"), ended).as_deref(), Some(why));
            for hardware in ["kvm", "direct"] {
                assert_eq!(guest.second_chance(&site(hardware), ended), None, "{hardware}");
            }
        }
        let fine = finished(exited(0), "CAROM-JOB-EXIT 0\n", "");
        let panicked = finished(Ended::GuestPanicked, "Kernel panic - not syncing: x\n", "");
        for ended in [fine, panicked] {
            assert_eq!(guest.second_chance(&site("tcg"), &ended), None, "{ended:?}");
        }
    }

    #[test]
    fn other_vmm_console_is_its_stdout_or_the_given_file() {
        let dir = tempfile::tempdir().unwrap();
        let initramfs = dir.path().join("initramfs");
        fs::write(&initramfs, "base").unwrap();
        let rest = "{kernel} {initramfs} {cmdline} {memory_mib} {cpus}";
        for (number, (template, console, stderr)) in [
            (format!("x /bin/sh -c 'echo said; echo CAROM-JOB-EXIT 7' sh {rest}"), "said\nCAROM-JOB-EXIT 7\n", ""),
            (
                format!("x /bin/sh -c 'echo said; echo CAROM-JOB-EXIT 7 >\"$1\"' sh {{console}} {rest}"),
                "CAROM-JOB-EXIT 7\n",
                "said\n",
            ),
        ]
        .into_iter()
        .enumerate()
        {
            let (initramfs, out) = (initramfs.clone(), dir.path().into());
            let site = Site { initramfs, out, other_vmm: Some(OtherVmm::parse(&template).unwrap()), ..site("direct") };
            let outcome = Guest::new(&format!("other-{number}")).vmm(Vmm::Other).job("true").run(&site).unwrap();
            assert_eq!((outcome.console.as_str(), outcome.stderr.as_str(), outcome.job_status), (console, stderr, 7));
        }
    }

    #[test]
    fn triple_fault_is_a_failure_unless_it_is_the_reboot_method() {
        let reset = finished(exited(0), "", "vCPU 0: triple fault; the guest is reset\n");
        assert!(Guest::new("plain").fell_over(&reset));
        assert!(!Guest::new("told").cmdline("reboot=t").fell_over(&reset));
        assert!(!Guest::new("plain").fell_over(&finished(exited(0), "", "")));
    }
}
