// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Command lines of the VMMs that run guests.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use carom_tools::peers::Placeholder;

use crate::Site;

/// VMM of a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Vmm {
    /// The VMM under test.
    Carom,
    /// Another build of Carom, for comparison.
    Base,
    /// QEMU, for comparison.
    Qemu,
    /// QEMU with an emulated Intel IOMMU instead of a virtio-iommu.
    QemuIntel,
    /// Cloud Hypervisor, for comparison.
    CloudHypervisor,
    /// VMM of the site's template, for comparison.
    Other,
}

impl Vmm {
    /// Returns the VMM's name in results.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Carom => "carom",
            Self::Base => "base",
            Self::Qemu | Self::QemuIntel => "qemu",
            Self::CloudHypervisor => "cloud-hypervisor",
            Self::Other => "other",
        }
    }

    /// True for both builds of Carom, which have the same options, events and counters.
    #[must_use]
    pub fn is_carom(self) -> bool {
        matches!(self, Self::Carom | Self::Base)
    }

    /// True if the site has the VMM. The function assumes that every host has QEMU, because the rig needs it.
    #[must_use]
    pub fn is_at(self, site: &Site) -> bool {
        match self {
            Self::Carom | Self::Qemu | Self::QemuIntel => true,
            Self::Base => site.base_vmm.is_some(),
            Self::CloudHypervisor => site.cloud_hypervisor.is_some(),
            Self::Other => site.other_vmm.is_some(),
        }
    }
}

/// Kernel of a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kernel {
    /// The patched kernel as a bzImage.
    Patched,
    /// The patched kernel as a PVH ELF file.
    PatchedElf,
    /// Another patched kernel for comparison, as a bzImage.
    Base,
    /// The patched kernel with the function profiler, as a bzImage.
    Profile,
    /// The patched kernel of the newer series, as a bzImage.
    Newer,
    /// The patched kernel of the newer series with the function profiler, as a bzImage.
    NewerProfile,
    /// The patched kernel with module support, as a bzImage.
    Modular,
    /// The modular kernel without the patch, as a bzImage.
    ModularStock,
    /// Debian's packaged kernel. Its modules are in the initramfs.
    Stock,
}

impl Kernel {
    /// Returns the paths of the kernel image and of the base initramfs.
    pub(crate) fn files(self, site: &Site) -> Result<(&Path, &Path)> {
        let missing = "CAROM_STOCK_KERNEL and CAROM_STOCK_INITRAMFS are not set; run scripts/test, which sets them";
        Ok(match self {
            Self::Patched => (&site.kernel, &site.initramfs),
            Self::PatchedElf => (&site.kernel_elf, &site.initramfs),
            Self::Base => (
                site.base_kernel
                    .as_deref()
                    .context("CAROM_BASE_KERNEL is not set; set it to the bzImage of another guest kernel")?,
                &site.initramfs,
            ),
            Self::Profile => (
                site.profile_kernel.as_deref().context(
                    "CAROM_PROFILE_KERNEL is not set; run scripts/test --filter interrupts integration, which sets it",
                )?,
                &site.initramfs,
            ),
            Self::Newer => (
                site.newer_kernel
                    .as_deref()
                    .context("CAROM_NEWER_KERNEL is not set; run scripts/test, which sets it")?,
                &site.initramfs,
            ),
            Self::NewerProfile => {
                let kernel = site.newer_profile_kernel.as_deref().context(
                    "CAROM_NEWER_PROFILE_KERNEL is not set; run scripts/test --filter interrupts integration, which sets it",
                )?;
                (kernel, &site.initramfs)
            }
            Self::Modular => (
                site.modular.as_deref().context("CAROM_MODULAR_KERNEL is not set; run scripts/bench, which sets it")?,
                &site.initramfs,
            ),
            Self::ModularStock => {
                let kernel = site
                    .modular_stock
                    .as_deref()
                    .context("CAROM_MODULAR_STOCK_KERNEL is not set; run scripts/bench, which sets it")?;
                (kernel, &site.initramfs)
            }
            Self::Stock => {
                (site.stock_kernel.as_deref().context(missing)?, site.stock_initramfs.as_deref().context(missing)?)
            }
        })
    }
}

/// Host device of a guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Device {
    /// PCI address on the host.
    pub(crate) address: String,
    /// True if the device is behind the guest's IOMMU.
    pub(crate) iommu: bool,
}

/// NVMe drive that QEMU emulates.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Drive {
    /// File with the drive's contents.
    pub(crate) image: PathBuf,
    /// True if each block has 8 bytes of metadata, with protection information (type 1).
    pub(crate) metadata: bool,
}

/// Virtio device that the VMM emulates: a disk on a raw image, or a network card on a tap interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Emulated {
    Disk { image: PathBuf, iommu: bool },
    Card { tap: String, iommu: bool },
}

/// Description of a guest, from which the command line of each VMM is made.
#[derive(Debug, Clone, Default)]
pub(crate) struct Machine {
    pub(crate) kernel: PathBuf,
    pub(crate) initramfs: PathBuf,
    pub(crate) cmdline: String,
    pub(crate) cpus: u8,
    pub(crate) memory_mib: u32,
    /// True if the memory is shared with other processes.
    pub(crate) shared_memory: bool,
    pub(crate) devices: Vec<Device>,
    /// Emulated NVMe drives. All are in one IOMMU group.
    pub(crate) drives: Vec<Drive>,
    /// Emulated devices that all VMMs support.
    pub(crate) emulated: Vec<Emulated>,
    /// Values of Carom's `--user-device`.
    pub(crate) user_devices: Vec<String>,
    /// Values of Carom's `--disk`.
    pub(crate) disks: Vec<String>,
    /// Values of Carom's `--net`.
    pub(crate) cards: Vec<String>,
    /// Values of `--rate-limit-group`.
    pub(crate) rate_limit_groups: Vec<String>,
    /// Value of Carom's `--rng`.
    pub(crate) rng: Option<String>,
    pub(crate) bounce: Option<String>,
    /// Value of Carom's `--balloon`.
    pub(crate) balloon: Option<String>,
    /// Additional arguments for Carom and Cloud Hypervisor.
    pub(crate) arguments: Vec<String>,
    /// Directory of the VMM's control group.
    pub(crate) group: Option<PathBuf>,
    pub(crate) events: PathBuf,
    /// Socket for the API (Carom only).
    pub(crate) api: PathBuf,
    /// Maximum memory that the VMM may lock, in bytes, even if root runs it (Carom only).
    pub(crate) locked_memory: Option<u64>,
    /// ID of the VMM's user and of its group (Carom only). If an ID is set, the VMM has no capabilities.
    pub(crate) user: Option<u32>,
    /// True if Landlock restricts the VMM to the files in its arguments (Carom only).
    pub(crate) landlock: bool,
    /// True if seccomp filters are on.
    pub(crate) seccomp: bool,
    /// Copy of the VMM's program, if the VMM's user needs one.
    pub(crate) program: Option<PathBuf>,
    /// File that is read as the guest's console. The VMM's stdout is also this file.
    pub(crate) console: PathBuf,
}

/// Returns a command that boots a system from a raw disk image on `vmm`, with one vCPU and no other device. The guest's serial
/// console is on stdout. The array contains the paths of the kernel and of the initramfs.
///
/// # Errors
/// Fails like [`command`].
pub fn boot_command(
    site: &Site,
    vmm: Vmm,
    [kernel, initramfs]: [&Path; 2],
    cmdline: &str,
    disk: &Path,
    memory_mib: u32,
) -> Result<Command> {
    let machine = Machine {
        kernel: kernel.into(),
        initramfs: initramfs.into(),
        cmdline: cmdline.into(),
        cpus: 1,
        memory_mib,
        emulated: vec![Emulated::Disk { image: disk.into(), iommu: false }],
        seccomp: true,
        ..Machine::default()
    };
    match vmm {
        // Boot without the event monitor and the API that tests use.
        Vmm::Carom => Ok(cloud_hypervisor(&site.carom, &machine)),
        Vmm::Base | Vmm::Qemu | Vmm::QemuIntel | Vmm::CloudHypervisor | Vmm::Other => command(site, vmm, &machine),
    }
}

/// Returns a command that runs `machine` on `vmm`. The guest's serial console is the command's stdout or the file
/// `machine.console`.
///
/// # Errors
/// Fails if the site lacks this VMM.
pub(crate) fn command(site: &Site, vmm: Vmm, machine: &Machine) -> Result<Command> {
    let command = match vmm {
        Vmm::Carom => carom(site, machine.program.as_ref().unwrap_or(&site.carom), machine),
        Vmm::Base => carom(
            site,
            site.base_vmm
                .as_deref()
                .context("CAROM_BASE_VMM is not set; set it to the path of another build of Carom")?,
            machine,
        ),
        // Use functions instead of a bridge. Behind a bridge from PCI Express to PCI, DMA carries the bridge's address. QEMU's
        // virtio-iommu does not expect this address, so the guest could not attach devices behind the bridge.
        Vmm::Qemu => qemu(site, machine, "virtio-iommu-pci", Group::Functions),
        // Without caching mode, QEMU would not notify VFIO of the guest's new mappings.
        Vmm::QemuIntel => qemu(site, machine, "intel-iommu,caching-mode=on,intremap=off", Group::Bridge),
        // If the site names no program, use `cloud-hypervisor` from the PATH.
        Vmm::CloudHypervisor => {
            cloud_hypervisor(site.cloud_hypervisor.as_deref().unwrap_or(Path::new("cloud-hypervisor")), machine)
        }
        Vmm::Other => other(site, machine)?,
    };
    Ok(match &machine.group {
        None => command,
        Some(group) => grouped(&command, group),
    })
}

/// Returns a command with the arguments that Carom and Cloud Hypervisor have in common.
fn cloud_hypervisor(program: &Path, machine: &Machine) -> Command {
    let mut command = Command::new(program);
    command
        .arg("--kernel")
        .arg(&machine.kernel)
        .arg("--initramfs")
        .arg(&machine.initramfs)
        .args(["--cmdline", &machine.cmdline])
        .args(["--cpus", &format!("boot={}", machine.cpus)])
        .args([
            "--memory",
            &format!("size={}M{}", machine.memory_mib, if machine.shared_memory { ",shared=on" } else { "" }),
        ])
        .args(["--serial", "tty"])
        .args(&machine.arguments);
    if !machine.arguments.iter().any(|argument| argument == "--console") {
        command.args(["--console", "off"]);
    }
    let behind = |iommu: bool| if iommu { ",iommu=on" } else { "" };
    for device in &machine.devices {
        let iommu = behind(device.iommu);
        command.arg("--device").arg(format!("path={}{iommu}", Site::sysfs(&device.address).display()));
    }
    for device in &machine.emulated {
        match device {
            Emulated::Disk { image, iommu } => {
                let value = format!("path={},image_type=raw{}", image.display(), behind(*iommu));
                command.args(["--disk", &value])
            }
            Emulated::Card { tap, iommu } => command.args(["--net", &format!("tap={tap}{}", behind(*iommu))]),
        };
    }
    command
}

fn carom(site: &Site, program: &Path, machine: &Machine) -> Command {
    let mut command = cloud_hypervisor(program, machine);
    command.arg("--event-monitor").arg(format!("path={}", machine.events.display()));
    command.arg("--api-socket").arg(format!("path={}", machine.api.display()));
    if site.iommufd {
        command.args(["--platform", "iommufd=on"]);
    }
    for device in &machine.user_devices {
        command.args(["--user-device", device]);
    }
    for group in &machine.rate_limit_groups {
        command.args(["--rate-limit-group", group]);
    }
    for disk in &machine.disks {
        command.args(["--disk", disk]);
    }
    for card in &machine.cards {
        command.args(["--net", card]);
    }
    if let Some(rng) = &machine.rng {
        command.args(["--rng", rng]);
    }
    if let Some(bounce) = &machine.bounce {
        command.args(["--iommu-bounce", bounce]);
    }
    if let Some(balloon) = &machine.balloon {
        command.args(["--balloon", balloon]);
    }
    if machine.landlock {
        command.arg("--landlock");
    }
    if !machine.seccomp {
        command.args(["--seccomp", "false"]);
    }
    match (machine.locked_memory, machine.user) {
        (None, None) => command,
        (bytes, user) => limited(&command, bytes, user),
    }
}

/// Returns `command` with a limit on locked memory, and without the capability to exceed this limit. If `user` is set, the
/// command runs as this user and group without capabilities.
fn limited(command: &Command, bytes: Option<u64>, user: Option<u32>) -> Command {
    let mut limited = Command::new("prlimit");
    limited.args(bytes.map(|bytes| format!("--memlock={bytes}"))).arg("setpriv");
    match user {
        None => limited.args(["--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock"]),
        Some(id) => limited.args([format!("--reuid={id}"), format!("--regid={id}")]).args([
            "--clear-groups",
            "--bounding-set=-all",
            "--inh-caps=-all",
        ]),
    };
    limited.arg(command.get_program()).args(command.get_args());
    limited
}

/// Returns the command that the site's template for another VMM describes.
fn other(site: &Site, machine: &Machine) -> Result<Command> {
    let vmm = site
        .other_vmm
        .as_ref()
        .context("CAROM_OTHER_VMM is not set; set it to 'NAME PROGRAM ARGUMENTS…' (docs/benchmarks.md)")?;
    let drive = machine.devices.first().map(|device| &device.address);
    let words = vmm.arguments(|placeholder| match placeholder {
        Placeholder::Kernel => Some(machine.kernel.clone().into()),
        Placeholder::Vmlinux => Some(site.kernel_elf.clone().into()),
        Placeholder::Initramfs => Some(machine.initramfs.clone().into()),
        Placeholder::Cmdline => Some(machine.cmdline.clone().into()),
        Placeholder::MemoryMib => Some(machine.memory_mib.to_string().into()),
        Placeholder::Cpus => Some(machine.cpus.to_string().into()),
        Placeholder::Console => Some(machine.console.clone().into()),
        Placeholder::Device => drive.map(|address| Site::sysfs(address).into()),
        Placeholder::Address => drive.map(Into::into),
    });
    let mut command = Command::new(&vmm.program);
    if vmm.has(Placeholder::Console) {
        // Redirect the VMM's stdout to stderr, because its own messages on stdout would overwrite the console's file.
        command = Command::new("sh");
        command.args(["-c", r#"exec "$0" "$@" >&2"#]).arg(&vmm.program);
    }
    command.args(words);
    Ok(command)
}

/// Returns `command` in a control group, to which all its memory is charged.
fn grouped(command: &Command, group: &Path) -> Command {
    let mut grouped = Command::new("sh");
    grouped.args(["-c", r#"echo $$ >"$0" && exec "$@""#]).arg(group.join("cgroup.procs"));
    grouped.arg(command.get_program()).args(command.get_args());
    grouped
}

/// Method by which QEMU puts all emulated drives into one IOMMU group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Group {
    /// The drives are functions of one device. The device does not report isolation between its functions (ACS).
    Functions,
    /// The drives are behind a conventional PCI bridge, so the DMA of all drives carries the bridge's address.
    Bridge,
}

/// Returns QEMU's command. QEMU has one IOMMU for the whole machine. So if one device needs an IOMMU, all devices are behind
/// the IOMMU.
fn qemu(site: &Site, machine: &Machine, iommu: &str, group: Group) -> Command {
    let mut command = Command::new(site.qemu());
    command
        // sata=off: the machine's built-in AHCI controller has no drive, but at boot the guest's driver would search for one.
        .args(["-accel", "kvm", "-cpu", "host", "-machine", "q35,sata=off", "-nodefaults", "-no-user-config"])
        .args(["-display", "none", "-serial", "stdio", "-no-reboot"])
        .args(["-smp", &machine.cpus.to_string(), "-m", &format!("{}M", machine.memory_mib)])
        .arg("-kernel")
        .arg(&machine.kernel)
        .arg("-initrd")
        .arg(&machine.initramfs)
        .args(["-append", &machine.cmdline]);
    // QEMU must create the IOMMU before the devices, because devices that it creates earlier are not behind the IOMMU.
    let emulated = machine.emulated.iter().any(Emulated::is_behind_the_iommu);
    if emulated || machine.devices.iter().any(|device| device.iommu) || !machine.drives.is_empty() {
        command.args(["-device", iommu]);
    }
    for device in &machine.devices {
        command.args(["-device", &format!("vfio-pci,host={}", device.address)]);
    }
    for (number, device) in machine.emulated.iter().enumerate() {
        command.args(device.qemu(number));
    }
    if group == Group::Bridge && !machine.drives.is_empty() {
        command.args(["-device", "pcie-pci-bridge,id=bridge"]);
    }
    for (number, Drive { image, metadata }) in machine.drives.iter().enumerate() {
        let place = match group {
            Group::Functions => format!("addr=0x10.{number},multifunction=on"),
            Group::Bridge => format!("bus=bridge,addr={}", number + 1),
        };
        command.args(["-drive", &format!("if=none,id=drive{number},format=raw,file={}", image.display())]);
        if *metadata {
            command
                .args(["-device", &format!("nvme,id=nvme{number},serial={number},{place}")])
                .args(["-device", &format!("nvme-ns,drive=drive{number},bus=nvme{number},ms=8,pi=1")]);
        } else {
            command.args(["-device", &format!("nvme,drive=drive{number},serial={number},{place}")]);
        }
    }
    command
}

impl Emulated {
    fn is_behind_the_iommu(&self) -> bool {
        let (Self::Disk { iommu, .. } | Self::Card { iommu, .. }) = self;
        *iommu
    }

    /// Returns QEMU's arguments. A disk has its own thread and uses io_uring, like Carom's disks. A card does not use
    /// vhost-net, because the other VMMs do not use vhost-net either.
    fn qemu(&self, number: usize) -> Vec<String> {
        let platform = if self.is_behind_the_iommu() { "on" } else { "off" };
        let driver = format!("disable-legacy=on,iommu_platform={platform}");
        let words = match self {
            Self::Disk { image, .. } => [
                ("-object", format!("iothread,id=thread{number}")),
                ("-drive", format!("if=none,id=image{number},format=raw,aio=io_uring,file={}", image.display())),
                ("-device", format!("virtio-blk-pci,drive=image{number},iothread=thread{number},{driver}")),
            ]
            .to_vec(),
            Self::Card { tap, .. } => [
                ("-netdev", format!("tap,id=net{number},ifname={tap},script=no,downscript=no,vhost=off")),
                ("-device", format!("virtio-net-pci,netdev=net{number},{driver}")),
            ]
            .to_vec(),
        };
        words.into_iter().flat_map(|(option, value)| [option.into(), value]).collect()
    }
}

#[cfg(test)]
mod tests {
    use carom_tools::peers::OtherVmm;

    use super::*;

    /// Returns the program and its arguments.
    fn words(command: &Command) -> Vec<String> {
        let words = std::iter::once(command.get_program()).chain(command.get_args());
        words.map(|word| word.to_string_lossy().into_owned()).collect()
    }

    fn template(more: &str) -> Site {
        let text = format!("x /bin/true run {{vmlinux}} {{initramfs}} {{cmdline}} {{memory_mib}} {{cpus}} {more}");
        Site { kernel_elf: "/k/vmlinux".into(), other_vmm: Some(OtherVmm::parse(&text).unwrap()), ..Site::default() }
    }

    fn machine() -> Machine {
        Machine {
            kernel: "/k/bzImage".into(),
            initramfs: "/g/initramfs".into(),
            cmdline: "console=ttyS0 quiet".into(),
            cpus: 2,
            memory_mib: 512,
            console: "/o/console".into(),
            ..Machine::default()
        }
    }

    const COMMON: [&str; 7] = ["/bin/true", "run", "/k/vmlinux", "/g/initramfs", "console=ttyS0 quiet", "512", "2"];

    #[test]
    fn template_is_filled_with_properties_of_the_guest() {
        let (site, mut machine) = (template("--vfio {device} -a {address}"), machine());
        assert_eq!(words(&command(&site, Vmm::Other, &machine).unwrap()), COMMON);
        machine.devices.push(Device { address: "0000:00:05.0".into(), iommu: false });
        let drive = ["--vfio", "/sys/bus/pci/devices/0000:00:05.0", "-a", "0000:00:05.0"];
        assert_eq!(words(&command(&site, Vmm::Other, &machine).unwrap()), [&COMMON[..], &drive].concat());
    }

    #[test]
    fn vmm_with_a_console_file_has_its_stdout_sent_to_stderr() {
        let command = command(&template("path={console}"), Vmm::Other, &machine()).unwrap();
        let shell = ["sh", "-c", r#"exec "$0" "$@" >&2"#];
        assert_eq!(words(&command), [&shell[..], &COMMON, &["path=/o/console"]].concat());
    }

    #[test]
    fn qemu_of_the_path_is_started_unless_another_is_named() {
        let mut site = Site::default();
        let program = |site: &Site| words(&command(site, Vmm::Qemu, &machine()).unwrap()).remove(0);
        assert_eq!(program(&site), "qemu-system-x86_64");
        site.qemu = Some("/opt/qemu/bin/qemu".into());
        assert_eq!(program(&site), "/opt/qemu/bin/qemu");
    }

    #[test]
    fn unnamed_other_vmm_is_an_error() {
        let error = command(&Site::default(), Vmm::Other, &machine()).unwrap_err().to_string();
        assert_eq!(error, "CAROM_OTHER_VMM is not set; set it to 'NAME PROGRAM ARGUMENTS…' (docs/benchmarks.md)");
    }
}
