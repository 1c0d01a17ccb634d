// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Command lines of the VMMs that guests run on.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use carom_tools::peers::Placeholder;

use crate::Site;

/// The VMM a guest runs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Vmm {
    /// The VMM under test.
    Carom,
    /// Another build of it, which it is compared with, where there is one.
    Base,
    /// QEMU, the peer that guests are compared with.
    Qemu,
    /// QEMU with an emulated Intel IOMMU instead of a virtio-iommu.
    QemuIntel,
    /// Cloud Hypervisor, the peer that is compared with where there is one.
    CloudHypervisor,
    /// The one of the site's template, where there is one.
    Other,
}

impl Vmm {
    /// Its name in results.
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

    /// True for this build of Carom and another one: both have its options, events and counters.
    #[must_use]
    pub fn is_carom(self) -> bool {
        matches!(self, Self::Carom | Self::Base)
    }

    /// Whether the site has it. QEMU is always there, as the rig is made of it.
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

/// The kernel a guest boots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kernel {
    /// The patched kernel as a bzImage.
    Patched,
    /// The patched kernel as a PVH ELF file.
    PatchedElf,
    /// Another patched kernel, which it is compared with, as a bzImage.
    Base,
    /// The patched kernel with the function profiler, as a bzImage.
    Profile,
    /// The patched kernel of the newer series, as a bzImage.
    Newer,
    /// The same with the function profiler.
    NewerProfile,
    /// The patched kernel with modules, as a bzImage.
    Modular,
    /// The same without the patch.
    ModularStock,
    /// Debian's kernel as packaged, with its modules in the initramfs.
    Stock,
}

impl Kernel {
    /// Kernel image and base initramfs.
    pub(crate) fn files(self, site: &Site) -> Result<(&Path, &Path)> {
        let missing = "CAROM_STOCK_KERNEL and CAROM_STOCK_INITRAMFS are not set";
        Ok(match self {
            Self::Patched => (&site.kernel, &site.initramfs),
            Self::PatchedElf => (&site.kernel_elf, &site.initramfs),
            Self::Base => (site.base_kernel.as_deref().context("CAROM_BASE_KERNEL is not set")?, &site.initramfs),
            Self::Profile => {
                (site.profile_kernel.as_deref().context("CAROM_PROFILE_KERNEL is not set")?, &site.initramfs)
            }
            Self::Newer => (site.newer_kernel.as_deref().context("CAROM_NEWER_KERNEL is not set")?, &site.initramfs),
            Self::NewerProfile => {
                let kernel = site.newer_profile_kernel.as_deref().context("CAROM_NEWER_PROFILE_KERNEL is not set")?;
                (kernel, &site.initramfs)
            }
            Self::Modular => (site.modular.as_deref().context("CAROM_MODULAR_KERNEL is not set")?, &site.initramfs),
            Self::ModularStock => {
                let kernel = site.modular_stock.as_deref().context("CAROM_MODULAR_STOCK_KERNEL is not set")?;
                (kernel, &site.initramfs)
            }
            Self::Stock => {
                (site.stock_kernel.as_deref().context(missing)?, site.stock_initramfs.as_deref().context(missing)?)
            }
        })
    }
}

/// A host device given to the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Device {
    /// PCI address on the host.
    pub(crate) address: String,
    /// Whether it sits behind the guest's IOMMU.
    pub(crate) iommu: bool,
}

/// An NVMe drive that QEMU emulates.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Drive {
    /// The file with its content.
    pub(crate) image: PathBuf,
    /// Whether each block has 8 bytes of metadata, with protection information (type 1).
    pub(crate) metadata: bool,
}

/// A virtio device that the VMM emulates: a disk on a raw image, or a network card on a tap interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Emulated {
    Disk { image: PathBuf, iommu: bool },
    Card { tap: String, iommu: bool },
}

/// What a VMM is told about a guest.
#[derive(Debug, Clone, Default)]
pub(crate) struct Machine {
    pub(crate) kernel: PathBuf,
    pub(crate) initramfs: PathBuf,
    pub(crate) cmdline: String,
    pub(crate) cpus: u8,
    pub(crate) memory_mib: u32,
    /// Whether it is shared with other processes.
    pub(crate) shared_memory: bool,
    pub(crate) devices: Vec<Device>,
    /// Emulated NVMe drives, which are one IOMMU group.
    pub(crate) drives: Vec<Drive>,
    /// What each VMM has.
    pub(crate) emulated: Vec<Emulated>,
    /// Values of Carom's `--user-device`.
    pub(crate) user_devices: Vec<String>,
    /// Values of Carom's `--disk`.
    pub(crate) disks: Vec<String>,
    /// Values of Carom's `--net`.
    pub(crate) cards: Vec<String>,
    /// The values of `--rate-limit-group`.
    pub(crate) rate_limit_groups: Vec<String>,
    /// Value of Carom's `--rng`.
    pub(crate) rng: Option<String>,
    pub(crate) bounce: Option<String>,
    /// Value of Carom's `--balloon`.
    pub(crate) balloon: Option<String>,
    /// Further arguments of Carom and Cloud Hypervisor.
    pub(crate) arguments: Vec<String>,
    /// Directory of the control group in which the VMM runs.
    pub(crate) group: Option<PathBuf>,
    pub(crate) events: PathBuf,
    /// Socket for the API (Carom only).
    pub(crate) api: PathBuf,
    /// Most memory that the VMM may lock, in bytes, whoever runs it (Carom only).
    pub(crate) locked_memory: Option<u64>,
    /// The user that the VMM runs as, with that group and no rights of root's (Carom only).
    pub(crate) user: Option<u32>,
    /// Whether the VMM reaches only the files that it is given (Carom only).
    pub(crate) landlock: bool,
    /// Whether system calls are filtered.
    pub(crate) seccomp: bool,
    /// A copy of the VMM that the user may run.
    pub(crate) program: Option<PathBuf>,
    /// File that is read as the guest's console, to which the VMM's stdout goes.
    pub(crate) console: PathBuf,
}

/// The command that boots a system from a raw image of a disk on `vmm`, with one vCPU, nothing else, and the guest's serial console on
/// stdout. Kernel and initramfs first.
///
/// # Errors
/// As [`command`].
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
        // Without the events and the API that tests look at.
        Vmm::Carom => Ok(cloud_hypervisor(&site.carom, &machine)),
        Vmm::Base | Vmm::Qemu | Vmm::QemuIntel | Vmm::CloudHypervisor | Vmm::Other => command(site, vmm, &machine),
    }
}

/// The command that runs `machine` on `vmm`, with the guest's serial console on stdout or in its file.
///
/// # Errors
/// The site has no such VMM.
pub(crate) fn command(site: &Site, vmm: Vmm, machine: &Machine) -> Result<Command> {
    let command = match vmm {
        Vmm::Carom => carom(site, machine.program.as_ref().unwrap_or(&site.carom), machine),
        Vmm::Base => carom(site, site.base_vmm.as_deref().context("CAROM_BASE_VMM is not set")?, machine),
        // This one does not know DMA by the address of a bridge: the guest cannot attach the devices behind it.
        Vmm::Qemu => qemu(site, machine, "virtio-iommu-pci", Group::Functions),
        // Without its caching mode, VFIO would not learn of new mappings.
        Vmm::QemuIntel => qemu(site, machine, "intel-iommu,caching-mode=on,intremap=off", Group::Bridge),
        // Where the site names none, one that the shell finds.
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

/// What Carom and Cloud Hypervisor are told alike.
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

/// The same command with a limit on locked memory and without the right to go beyond it, and as a user with that group and without
/// any right beyond those of users.
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

/// The command of the site's template.
fn other(site: &Site, machine: &Machine) -> Result<Command> {
    let vmm = site.other_vmm.as_ref().context("CAROM_OTHER_VMM is not set")?;
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
        // What it says itself would be written over the console.
        command = Command::new("sh");
        command.args(["-c", r#"exec "$0" "$@" >&2"#]).arg(&vmm.program);
    }
    command.args(words);
    Ok(command)
}

/// The same command in a control group, from its first page of memory on.
fn grouped(command: &Command, group: &Path) -> Command {
    let mut grouped = Command::new("sh");
    grouped.args(["-c", r#"echo $$ >"$0" && exec "$@""#]).arg(group.join("cgroup.procs"));
    grouped.arg(command.get_program()).args(command.get_args());
    grouped
}

/// How emulated drives come to be one IOMMU group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Group {
    /// As functions of one device, which does not say that it keeps them apart.
    Functions,
    /// Behind a conventional PCI bridge, whose address the DMA of all of them has.
    Bridge,
}

/// QEMU has one switch for the whole machine: the IOMMU is there, and all devices are behind it, if one asks for it.
fn qemu(site: &Site, machine: &Machine, iommu: &str, group: Group) -> Command {
    let mut command = Command::new(site.qemu());
    command
        // The machine's own AHCI controller has no drive, which the guest's driver would look for while the guest starts.
        .args(["-accel", "kvm", "-cpu", "host", "-machine", "q35,sata=off", "-nodefaults", "-no-user-config"])
        .args(["-display", "none", "-serial", "stdio", "-no-reboot"])
        .args(["-smp", &machine.cpus.to_string(), "-m", &format!("{}M", machine.memory_mib)])
        .arg("-kernel")
        .arg(&machine.kernel)
        .arg("-initrd")
        .arg(&machine.initramfs)
        .args(["-append", &machine.cmdline]);
    // Before the devices: those that are made earlier are not behind it.
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

    /// QEMU's arguments: a disk has a thread of its own and io_uring, as Carom's has, and a card has no vhost-net, as nobody else has it.
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

    /// Program and arguments.
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
    fn template_is_filled_with_what_the_guest_has() {
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
    fn other_vmm_that_nobody_named_is_an_error() {
        let error = command(&Site::default(), Vmm::Other, &machine()).unwrap_err().to_string();
        assert_eq!(error, "CAROM_OTHER_VMM is not set");
    }
}
