// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The command line of `carom`.

mod inherit;
#[cfg(test)]
mod option_page;
mod part_arguments;
mod program;
mod refused_options;
mod seccomp;
mod sockets;
pub mod streams;

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{ArgAction, CommandFactory, FromArgMatches, Parser};

use crate::config::{
    ConsoleMode, CpusConfig, LandlockConfig, MemoryConfig, MemoryZoneConfig, NumaConfig, PayloadConfig,
    PciSegmentConfig, PlatformConfig, RateLimitGroupConfig, SerialConfig,
};
use crate::defaults::VmDefaults;
use crate::error::ConfigError;
use crate::kinds::{ConsoleConfig, IommuBounceConfig, PartConfig};
use crate::snapshot::RestoreConfig;
use crate::vm_config::{CheckedConfig, VmConfig};
use part_arguments::PartArguments;
use refused_options::RefusedOptions;

pub use inherit::InheritedFd;
pub use program::Program;
pub use seccomp::Seccomp;
pub use sockets::{ApiSocketOption, CrashReportOption, EventMonitorOption, FileOrFd, MetricsAddress, OptionName};

/// Argument group of the boot payload: a kernel or firmware.
const PAYLOAD: &str = "payload";

/// A virtual machine monitor for device passthrough behind a virtual IOMMU.
#[derive(Debug, Parser)]
#[command(name = "carom", version, max_term_width = 110)]
pub struct Cli {
    /// Kernel to boot: a bzImage, or an ELF image with a PVH entry point. If none of --kernel, --firmware and --restore is given, an API
    /// client creates the VM
    #[arg(long, value_name = "FILE", group = PAYLOAD, required_unless_present_any = ["api_socket", "restore", "firmware"])]
    kernel: Option<PathBuf>,
    /// Firmware that boots the guest from a disk, instead of a kernel: an ELF image with a PVH entry point, such as EDK2's CLOUDHV.fd
    #[arg(long, value_name = "FILE", group = PAYLOAD)]
    firmware: Option<PathBuf>,
    /// Initial RAM file system
    #[arg(long, value_name = "FILE", requires = PAYLOAD, conflicts_with = "firmware")]
    initramfs: Option<PathBuf>,
    /// Kernel command line
    #[arg(long, value_name = "TEXT", default_value = "", requires = PAYLOAD, conflicts_with = "firmware")]
    cmdline: String,
    /// CPUs: boot=N[,max=N][,topology=THREADS:CORES:DIES:PACKAGES] [,max_phys_bits=46][,nested=on|off]
    /// [,affinity=[VCPU@[CPU,CPU-CPU],…]]. affinity names the host CPUs that each vCPU may run on [default: boot=1]
    #[arg(long, value_name = "boot=N", requires = PAYLOAD)]
    cpus: Option<CpusConfig>,
    /// RAM: size=SIZE[,shared=on|off][,thp=on|off][,hugepages=on|off] [,hugepage_size=2M|1G][,prefault=on|off]
    /// [,reserve=on|off][,mergeable=on|off][,hotplug_size=SIZE] [default: size=512M]
    #[arg(long, value_name = "size=SIZE,…", requires = PAYLOAD)]
    memory: Option<MemoryConfig>,
    /// Memory zone: id=NAME,size=SIZE[,file=PATH][,shared=on|off][,hugepages=on|off] [,hugepage_size=2M|1G][,host_numa_node=N]
    /// [,prefault=on|off][,reserve=on|off][,mergeable=on|off]. With this option, all RAM consists of zones, and --memory must have size=0.
    /// Can be given several times
    #[arg(long, value_name = "id=NAME,size=SIZE,…", num_args = 1.., action = ArgAction::Append, requires = PAYLOAD)]
    memory_zone: Vec<MemoryZoneConfig>,
    /// NUMA node of the guest, made of memory zones: guest_numa_id=N[,cpus=LIST][,memory_zones=LIST] [,distances=[NODE@DISTANCE,…]]
    /// [,pci_segments=LIST]. Can be given several times
    #[arg(long, value_name = "guest_numa_id=N,…", num_args = 1.., action = ArgAction::Append, requires = PAYLOAD)]
    numa: Vec<NumaConfig>,
    #[command(flatten)]
    parts: PartArguments,
    /// Platform: [iommufd=on|off][,iommu_poll=auto|on|off][,num_pci_segments=N] [,iommu_segments=LIST][,iommu_address_width=BITS]
    /// [,vmgenid=on|off][,system_serial_number=TEXT][,system_uuid=UUID] [,oem_strings=[TEXT,TEXT]] and other SMBIOS strings.
    /// iommufd selects IOMMUFD instead of VFIO containers. iommu_poll lets a thread poll for virtio-iommu requests while their
    /// rate is high. iommu_address_width limits the addresses that the virtio-iommu translates. vmgenid adds a VM Generation ID
    /// [default: iommufd=off,iommu_poll=auto]
    #[arg(long, value_name = "iommufd=on|off,…", requires = PAYLOAD)]
    platform: Option<PlatformConfig>,
    /// Share of the BAR address space for one PCI segment (see --platform num_pci_segments):
    /// pci_segment=N[,mmio32_aperture_weight=N] [,mmio64_aperture_weight=N]. Can be given several times
    #[arg(long, value_name = "pci_segment=N,…", num_args = 1.., action = ArgAction::Append, requires = PAYLOAD)]
    pci_segment: Vec<PciSegmentConfig>,
    /// Rate limit group, whose disks share one limit: id=NAME[,bw_size=BYTES,bw_refill_time=MS]
    /// [,bw_one_time_burst=BYTES][,ops_size=N,ops_refill_time=MS] [,ops_one_time_burst=N]. Can be given several times
    #[arg(long, value_name = "id=NAME,…", num_args = 1.., action = ArgAction::Append, requires = PAYLOAD)]
    rate_limit_group: Vec<RateLimitGroupConfig>,
    /// First serial port: off, null, tty, pty, file=PATH or socket=PATH [default: tty, or null if the program is called cloud-hypervisor]
    #[arg(long, value_name = "MODE", requires = PAYLOAD)]
    serial: Option<SerialConfig>,
    /// Add a pvpanic device, which reports a panic of the guest kernel (event guest:panic)
    #[arg(long, requires = PAYLOAD)]
    pvpanic: bool,
    /// Add a watchdog (i6300esb), which resets the guest if the guest stops reloading the watchdog's timer (event watchdog:expired)
    #[arg(long, requires = PAYLOAD)]
    watchdog: bool,
    /// Snapshot to restore a VM from: source_url=file:///PATH[,prefault=on|off][,resume=on|off]. The VM is paused unless resume is on
    #[arg(long, value_name = "source_url=file:///PATH,…",
        // List each option, not only PAYLOAD: if --restore conflicted only with PAYLOAD, clap would not enforce `requires = PAYLOAD`.
        conflicts_with_all = [PAYLOAD, "initramfs", "cmdline", "cpus", "memory", "memory_zone", "numa", "platform", "pci_segment", "rate_limit_group", "serial", "pvpanic", "watchdog"]
    )]
    restore: Option<RestoreConfig>,
    /// Socket of the REST API: path=FILE or fd=NUMBER. FILE alone is a path
    #[arg(long, value_name = "path=FILE|fd=N")]
    api_socket: Option<FileOrFd<ApiSocketOption>>,
    /// Put every passed-through device behind the virtio-iommu, even if the API client does not request this. Needs --iommu-bounce, which
    /// then sets the default for VMs whose client configures no bounce windows [env: CAROM_ALL_BEHIND_IOMMU=on, CAROM_IOMMU_BOUNCE=VALUE]
    #[arg(long, requires = "api_socket")]
    all_behind_iommu: bool,
    /// TCP address of the metrics server, which has no access control: tcp=ADDRESS:PORT
    #[arg(long, value_name = "tcp=ADDRESS:PORT")]
    metrics: Option<MetricsAddress>,
    /// Keep running after the guest has ended, so that an API client can boot the VM again
    #[arg(long, requires = "api_socket")]
    no_shutdown: bool,
    /// Destination of events as JSON, one event per line: path=FILE or fd=NUMBER
    #[arg(long, value_name = "path=FILE|fd=N")]
    event_monitor: Option<FileOrFd<EventMonitorOption>>,
    /// Log more: -v, -vv or -vvv
    #[arg(short, action = ArgAction::Count)]
    verbosity: u8,
    /// File for the log, instead of standard error
    #[arg(long, value_name = "FILE")]
    log_file: Option<PathBuf>,
    /// File for crash reports: path=FILE or fd=NUMBER. FILE alone is a path. Reports are appended. An empty file is removed at exit
    #[arg(long, value_name = "path=FILE|fd=N")]
    crash_report: Option<FileOrFd<CrashReportOption>>,
    /// Inherited descriptor to use instead of opening its file: fd=N. The file is /dev/kvm, /dev/iommu, a VFIO device
    /// (/dev/vfio/devices/vfioN), or the image of a disk whose path is /dev/fd/N. Can be given several times
    #[arg(long, value_name = "fd=N", num_args = 1.., action = ArgAction::Append)]
    inherit: Vec<InheritedFd>,
    /// Action if the seccomp filter of a thread does not allow a system call: end the program (true), log the call (log), or fail the call
    /// (errno). With false, no system calls are filtered
    #[arg(long, value_name = "true|false|log|errno", default_value = "true")]
    seccomp: Seccomp,
    /// Restrict the program with Landlock to the files of the VM. With --restore, or if API clients create VMs, the VMs may use only
    /// the files of --landlock-rules
    #[arg(long)]
    landlock: bool,
    /// Files and directories to allow in addition to the VM's own files: path=PATH,access=r|w|rw. Can be given several times
    #[arg(long, value_name = "path=PATH,access=r|w|rw", num_args = 1.., action = ArgAction::Append, requires = "landlock")]
    landlock_rules: Vec<LandlockConfig>,
    #[command(flatten)]
    refused: RefusedOptions,
}

/// Parsed command line.
#[derive(Debug)]
pub struct Invocation {
    /// Name under which the program was started.
    pub program: Program,
    /// VM to run. `None` if an API client creates it, or a snapshot is restored.
    pub vm: Option<CheckedConfig>,
    /// Snapshot to restore the VM from.
    pub restore: Option<RestoreConfig>,
    /// Socket that serves the API.
    pub api_socket: Option<FileOrFd<ApiSocketOption>>,
    /// Defaults for VMs that API clients create.
    pub defaults: VmDefaults,
    /// Address of the metrics server.
    pub metrics: Option<MetricsAddress>,
    /// True if the VMM keeps running after the guest has ended.
    pub no_shutdown: bool,
    /// Action for system calls that a thread's seccomp filter does not allow.
    pub seccomp: Seccomp,
    /// Destination of events.
    pub event_monitor: Option<FileOrFd<EventMonitorOption>>,
    /// Log verbosity, from 0 (only warnings and errors) to 3 (all messages).
    pub verbosity: u8,
    /// File for the log, instead of standard error.
    pub log_file: Option<PathBuf>,
    /// Destination of crash reports.
    pub crash_report: Option<FileOrFd<CrashReportOption>>,
    /// Inherited descriptors to use instead of opening files.
    pub inherit: Vec<InheritedFd>,
    /// Landlock rules: files and directories that VMs may use in addition to the files of `vm`. `None` disables Landlock.
    pub landlock: Option<Vec<LandlockConfig>>,
}

/// Outcome of a command line that runs no VMM: a text to print, or an error.
#[derive(Debug)]
pub enum CliOutcome {
    /// Text for standard output: help or version.
    Information(String),
    /// One line that says what is wrong and how to correct it.
    Mistake(String),
}

/// Parses and validates the command line, whose first argument is the program's name. Environment variables fill in defaults.
pub fn parse<I, T>(arguments: I) -> Result<Invocation, CliOutcome>
where
    I: IntoIterator<Item = T>,
    T: Into<OsString> + Clone,
{
    parse_in(arguments, |name| std::env::var(name).ok())
}

/// Implementation of [`parse`]. `variable` returns the value of an environment variable.
fn parse_in<I, T>(arguments: I, variable: impl Fn(&str) -> Option<String>) -> Result<Invocation, CliOutcome>
where
    I: IntoIterator<Item = T>,
    T: Into<OsString> + Clone,
{
    let arguments: Vec<OsString> = arguments.into_iter().map(Into::into).collect();
    let program = arguments.first().map_or_else(Program::default, |path| Program::of(path));
    let cli = read(program, arguments).map_err(|error| {
        if error.use_stderr() {
            CliOutcome::Mistake(one_line(&error, program.name()))
        } else {
            CliOutcome::Information(error.to_string())
        }
    })?;
    let mistake = |error: ConfigError| CliOutcome::Mistake(error.to_string());
    if cli.restore.is_some() && !cli.parts.0.is_empty() {
        let rule = "cannot be combined with options of devices (such as --disk or --iommu-bounce): leave these options out, because the VM gets its saved devices";
        return Err(mistake(ConfigError::new(RestoreConfig::OPTION, rule)));
    }
    let has_vm = cli.kernel.is_some() || cli.firmware.is_some() || cli.restore.is_some();
    if let Some(part) = cli.parts.0.iter().find(|part| !part.kind().default_for_clients && !has_vm) {
        return Err(mistake(ConfigError::new(part.kind().field, "needs a VM: add --kernel or --firmware")));
    }
    let mut defaults = VmDefaults { iommu_bounce: None, all_behind_iommu: cli.all_behind_iommu };
    for part in &cli.parts.0 {
        if let PartConfig::Iommu(bounce) = part {
            defaults.iommu_bounce = Some(bounce.clone());
        }
    }
    if cli.api_socket.is_some() {
        defaults.complete(variable).map_err(mistake)?;
    }
    let vm = match (cli.kernel, cli.firmware) {
        (None, None) => None,
        (kernel, firmware) => {
            let mut vm = VmConfig {
                payload: PayloadConfig { kernel, firmware, initramfs: cli.initramfs, cmdline: cli.cmdline },
                cpus: cli.cpus.unwrap_or_default(),
                memory: MemoryConfig { zones: cli.memory_zone, ..cli.memory.unwrap_or_default() },
                numa: cli.numa,
                platform: cli.platform.unwrap_or_default(),
                pci_segments: cli.pci_segment,
                rate_limit_groups: cli.rate_limit_group,
                serial: cli.serial.unwrap_or_else(|| default_serial(program)),
                pvpanic: cli.pvpanic,
                landlock_enable: cli.landlock,
                landlock_rules: cli.landlock_rules.clone(),
                watchdog: cli.watchdog,
                ..VmConfig::default()
            };
            let added = cli.parts.0.into_iter().try_for_each(|part| vm.push(part));
            vm.console.get_or_insert_with(|| default_console(program));
            Some(added.and_then(|()| vm.check()).map_err(mistake)?)
        }
    };
    if cli.api_socket.is_none()
        && vm.as_ref().is_some_and(|vm| vm.iommu_bounce.is_some() && !vm.has_device_behind_iommu())
    {
        let rule =
            "needs a device behind the virtio-iommu (--device path=…,iommu=on), or --api-socket to add one later";
        return Err(mistake(ConfigError::new(IommuBounceConfig::OPTION, rule)));
    }
    if cli.api_socket.is_none() && cli.restore.as_ref().is_some_and(|restore| !restore.resume) {
        let rule = "the VM would stay paused: add resume=on, or --api-socket to resume it later";
        return Err(mistake(ConfigError::new(RestoreConfig::OPTION, rule)));
    }
    Ok(Invocation {
        program,
        vm,
        restore: cli.restore,
        api_socket: cli.api_socket,
        defaults,
        metrics: cli.metrics,
        no_shutdown: cli.no_shutdown,
        seccomp: cli.seccomp,
        event_monitor: cli.event_monitor,
        verbosity: cli.verbosity.min(3),
        log_file: cli.log_file,
        inherit: cli.inherit,
        landlock: cli.landlock.then_some(cli.landlock_rules),
        crash_report: cli.crash_report,
    })
}

/// Parses the command line. Help, version and errors use the name of `program`.
fn read(program: Program, arguments: Vec<OsString>) -> Result<Cli, clap::Error> {
    let command = Cli::command().name(program.name()).version(program.printed_version());
    let mut command = command.bin_name(program.name());
    let matches =
        command.try_get_matches_from_mut(&arguments).map_err(|error| match refused_options::find(&arguments) {
            // If an unsupported option is given, report it instead of other mistakes.
            Some(refused) if error.use_stderr() => refused,
            _ => error,
        })?;
    Cli::from_arg_matches(&matches).map_err(|error| error.format(&mut command))
}

/// Returns the default serial port. A user who starts `carom` by hand wants to see the guest's output on the terminal.
fn default_serial(program: Program) -> SerialConfig {
    match program {
        Program::Carom => SerialConfig::of(ConsoleMode::Tty),
        Program::CloudHypervisor => SerialConfig::default(),
    }
}

/// Returns the default paravirtual console.
fn default_console(program: Program) -> ConsoleConfig {
    ConsoleConfig::of(match program {
        Program::Carom => ConsoleMode::Off,
        Program::CloudHypervisor => ConsoleMode::Tty,
    })
}

/// Converts an error of clap to one line: the first paragraph without the prefix `error:`, followed by a tip or a reference to `--help`. A
/// [`ConfigError`] is returned unchanged, because its text already names the option.
pub fn one_line(error: &clap::Error, program: &str) -> String {
    if let Some(error) = std::error::Error::source(error).and_then(|source| source.downcast_ref::<ConfigError>()) {
        return error.to_string();
    }
    let text = error.to_string();
    let paragraph = text.split("\n\n").next().unwrap_or_default();
    let line = paragraph.lines().map(str::trim).collect::<Vec<_>>().join(" ");
    let tip = text.lines().map(str::trim).find_map(|line| line.strip_prefix("tip: "));
    let message = line.strip_prefix("error: ").unwrap_or(&line);
    tip.map_or_else(|| format!("{message}; see '{program} --help'"), |tip| format!("{message}; {tip}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mistake(arguments: &[&str]) -> String {
        let all = ["carom"].iter().chain(arguments);
        match parse(all).unwrap_err() {
            CliOutcome::Mistake(text) => text,
            CliOutcome::Information(text) => panic!("information: {text}"),
        }
    }

    #[test]
    fn full_command_line_parses() {
        let all = "carom --kernel k --initramfs i --cmdline console=ttyS0 --cpus boot=2 --memory size=2G \
                   --device path=/d,iommu=on --user-device socket=/u,iommu=on,id=u \
                   --platform iommufd=on --iommu-bounce size=64M --serial tty --console off \
                   --pvpanic --watchdog --event-monitor path=/e -v";
        let invocation = parse(all.split_whitespace()).unwrap();
        let vm = invocation.vm.unwrap();
        assert_eq!(vm.cpus.boot_vcpus, 2);
        assert!(vm.has_iommu());
        assert!(vm.platform.iommufd && vm.pvpanic && vm.watchdog);
        assert_eq!(vm.user_devices[0].id.as_deref(), Some("u"));
        assert_eq!(invocation.event_monitor, Some(FileOrFd::Path("/e".into())));
        assert_eq!(invocation.verbosity, 1);
    }

    #[test]
    fn bare_iommu_bounce_takes_its_defaults() {
        let all = ["carom", "--iommu-bounce", "--kernel", "k", "--device", "path=/d,iommu=on"];
        assert_eq!(parse(all).unwrap().vm.unwrap().iommu_bounce.as_ref().unwrap().size, 64 << 20);
    }

    #[test]
    fn bounce_windows_need_no_device_if_the_api_can_add_one() {
        let all = ["carom", "--kernel", "k", "--iommu-bounce", "--api-socket", "path=/s"];
        assert!(parse(all).unwrap().vm.unwrap().has_iommu());
    }

    #[test]
    fn mistakes_are_one_line_that_names_the_option() {
        for (arguments, part) in [
            (&["--kernl", "k"][..], "--kernl"),
            (&[][..], "--kernel"),
            (&["--kernel", "k", "--memory", "size=1"][..], "--memory size: 1 bytes"),
            (&["--kernel", "k", "--memory", "sze=1"][..], "--memory: unknown key 'sze'"),
            (&["--kernel", "k", "--platform", "iommufd=yes"][..], "--platform iommufd: 'yes'"),
            (&["--kernel", "k", "--platform", "iommu_poll=1"][..], "--platform iommu_poll: '1' is not one of"),
            (&["--kernel", "k", "--iommu-bounce"][..], "iommu=on"),
            (&["--kernel", "k", "--iommu-bounce", "--rng"][..], "iommu=on"),
            (&["--kernel", "k", "--user-device", "/s"][..], "--user-device: '/s' is not key=value"),
            (&["--kernel", "k", "--user-device", "socket=/s"][..], "--user-device iommu: is off"),
            (&["--kernel", "k", "--console", "vga"][..], "--console: 'vga' is neither key=value nor one of"),
            (&["--kernel", "k", "--event-monitor", "fd=1"][..], "--event-monitor fd"),
            (
                &["--kernel", "k", "--event-monitor", "/e"][..],
                "--event-monitor: '/e' must have exactly one of path=FILE and fd=NUMBER",
            ),
            (&["--kernel", "k", "--api-socket", ""][..], "--api-socket"),
            (
                &["--kernel", "k", "--api-socket", "file=/s"][..],
                "--api-socket: unknown key 'file'; known keys: path, fd",
            ),
            (&["--kernel", "k", "--api-socket", "fd=x"][..], "--api-socket fd"),
            (&["--kernel", "k", "--no-shutdown"][..], "--api-socket"),
            (
                &["--kernel", "k", "--metrics", "127.0.0.1:9100"][..],
                "--metrics: '127.0.0.1:9100' is not tcp=ADDRESS:PORT",
            ),
            (
                &["--kernel", "k", "--metrics", "tcp=localhost:9100"][..],
                "--metrics tcp: 'localhost:9100' is not an IP address",
            ),
            (&["--kernel", "k", "--metrics", "tcp=127.0.0.1"][..], "with a port"),
            (&["--kernel", "k", "--metrics", "tcp=127.0.0.1:65536"][..], "--metrics tcp"),
            (&["--api-socket", "path=/s", "--initramfs", "i"][..], "--kernel"),
            (&["--api-socket", "path=/s", "--device", "path=/d"][..], "--kernel"),
            (&["--api-socket", "path=/s", "--memory", "size=1G"][..], "--kernel"),
            (&["--api-socket", "path=/s", "--pvpanic"][..], "--kernel"),
            (&["--kernel", "k", "--cpus", "boot=2,max=1"][..], "--cpus max: 1 is not between 2 (the vCPUs at boot)"),
            (&["--kernel", "k", "extra"][..], "extra"),
            (&["--kernel", "k", "--disk", "path=/d,queue_size=3"][..], "--disk queue_size: 3 is not a power of two"),
            (&["--kernel", "k", "--disk", "path=/d", "path=/d"][..], "--disk path: /d is given twice"),
            (&["--kernel", "k", "--net", "tap=t,mac=x"][..], "--net mac: is not an address of the form"),
            (&["--kernel", "k", "--net", "tap=t", "tap=t"][..], "--net tap: t is given twice"),
            (&["--kernel", "k", "--vdpa", "path="][..], "--vdpa is not supported"),
            (&["--tpm", "socket=/x"][..], "--tpm is not supported: Carom emulates no TPM"),
            (&["--tpm=socket=/x"][..], "--tpm is not supported: Carom emulates no TPM"),
            (
                &["--kernl", "k", "--memory", "sze=1", "--tpm", "socket=/x"][..],
                "--tpm is not supported: Carom emulates no TPM",
            ),
            (&["--debug-console", "off", "--rtc"][..], "--rtc is not supported: the guest has the KVM clock"),
            (
                &["--tpm", "socket=/x", "--gdb", "path=/g"][..],
                "Carom has no GDB server; --tpm is not supported: Carom emulates no TPM",
            ),
            (&["--debug-console", "off"][..], "--kernel"),
            (&["--cmdline=--tpm"][..], "--kernel"),
            (&["--kernel", "k", "--landlock-rules", "path=/p,access=r"][..], "--landlock"),
            (
                &["--kernel", "k", "--landlock", "--landlock-rules", "path=/p,access=x"][..],
                "--landlock-rules access: 'x' is not one of r, w, rw",
            ),
            (&["--api-socket", "path=/s", "--landlock-rules", "path=/p,access=r"][..], "--landlock"),
            (&["--kernel", "k", "--rtc"][..], "--rtc is not supported"),
            (&["--kernel", "k", "--debug-console", "tty"][..], "--debug-console is not supported"),
            (&["--kernel", "k", "--inherit", "7"][..], "--inherit: '7' is not fd=NUMBER"),
            (
                &["--kernel", "k", "--inherit", "fd=7", "fd=2"][..],
                "--inherit fd: '2' is not a descriptor number above 2",
            ),
            (&["--kernel", "k", "--seccomp", "on"][..], "--seccomp: 'on' is not one of true, false, log, errno"),
            (&["--kernel", "k", "--log-format", "{msg}"][..], "--log-format is not supported: a log line always has"),
            (&["--firmware", "f", "--kernel", "k"][..], "'--firmware <FILE>' cannot be used with '--kernel <FILE>'"),
            (&["--firmware", "f", "--cmdline", "c"][..], "--firmware"),
            (&["--firmware", "f", "--initramfs", "i"][..], "--firmware"),
            (
                &["--firmware", "f", "--platform", "num_pci_segments=2"][..],
                "--platform num_pci_segments: 2 segments cannot be combined with --firmware",
            ),
            (&["--restore", "source_url=file:///s,resume=on", "--firmware", "f"][..], "--firmware"),
            (&["--restore", "source_url=file:///s"][..], "--restore: the VM would stay paused"),
            (&["--restore", "source_url=s,resume=on"][..], "--restore source_url: 's' must be file:///PATH"),
            (&["--restore", "source_url=file:///s,resume=on", "--kernel", "k"][..], "--kernel"),
            (&["--restore", "source_url=file:///s,resume=on", "--memory", "size=1G"][..], "--memory"),
            (
                &["--restore", "source_url=file:///s,resume=on", "--device", "path=/d"][..],
                "--restore: cannot be combined with options of devices",
            ),
        ] {
            let text = mistake(arguments);
            assert!(text.contains(part), "{text}");
            assert_eq!(text.lines().count(), 1, "{text}");
        }
    }

    #[test]
    fn unsupported_option_is_named_before_a_missing_kernel() {
        for option in refused_options::names() {
            let text = mistake(&["--kernl", "k", &format!("--{option}"), "x"]);
            assert!(text.starts_with(&format!("--{option} is not supported: ")), "{text}");
        }
        assert!(matches!(parse(["carom", "--help", "--tpm", "socket=/x"]), Err(CliOutcome::Information(_))));
    }

    #[test]
    fn firmware_replaces_a_kernel() {
        let invocation = parse(["carom", "--firmware", "f", "--memory", "size=1G", "--disk", "path=/d"]).unwrap();
        let vm = invocation.vm.unwrap();
        assert_eq!(vm.payload, PayloadConfig::of_firmware("f"));
        assert_eq!((vm.memory.size, vm.disks.len()), (1 << 30, 1));
    }

    #[test]
    fn vm_is_not_created_without_a_kernel_or_firmware() {
        let invocation = parse(["carom", "--api-socket", "fd=7", "--no-shutdown"]).unwrap();
        assert!(invocation.vm.is_none() && invocation.no_shutdown);
        assert_eq!(invocation.api_socket.unwrap().fd(), Some(7));
        let invocation = parse(["carom", "--api-socket", "/run/vm.sock"]).unwrap();
        assert_eq!(invocation.api_socket, Some(FileOrFd::Path("/run/vm.sock".into())));
    }

    #[test]
    fn iommu_bounce_without_a_kernel_is_the_default_of_clients() {
        let parse = |arguments: &[&str]| parse_in([&["carom"], arguments].concat(), |_| None);
        let invocation = parse(&["--api-socket", "/s", "--iommu-bounce", "size=32M", "--all-behind-iommu"]).unwrap();
        assert!(invocation.vm.is_none() && invocation.defaults.all_behind_iommu);
        assert_eq!(invocation.defaults.iommu_bounce.unwrap().max, 32 << 20);
        for (arguments, part) in [
            (&["--iommu-bounce"][..], "--kernel"),
            (&["--iommu-bounce", "--kernel", "k", "--all-behind-iommu"][..], "--api-socket"),
            (&["--api-socket", "/s", "--all-behind-iommu"][..], "--all-behind-iommu: needs --iommu-bounce"),
            (&["--api-socket", "/s", "--iommu-bounce", "size=3M"][..], "--iommu-bounce size: "),
        ] {
            let Err(CliOutcome::Mistake(text)) = parse(arguments) else { panic!("{arguments:?}") };
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn environment_defaults_apply_only_to_vms_of_api_clients() {
        let on = |name: &str| Some(if name == VmDefaults::BOUNCE_VARIABLE { "size=32M" } else { "on" }.to_string());
        let invocation = parse_in(["carom", "--api-socket", "/s"], on).unwrap();
        assert!(invocation.defaults.all_behind_iommu && invocation.defaults.iommu_bounce.is_some());
        let invocation = parse_in(["carom", "--kernel", "k"], on).unwrap();
        assert_eq!((invocation.vm.unwrap().has_iommu(), invocation.defaults), (false, VmDefaults::default()));
        let wrong = parse_in(["carom", "--api-socket", "/s"], |_| Some("x".into()));
        assert!(matches!(wrong, Err(CliOutcome::Mistake(_))));
    }

    #[test]
    fn restore_replaces_a_kernel() {
        let invocation = parse(["carom", "--restore", "source_url=file:///s,resume=on"]).unwrap();
        assert!(invocation.vm.is_none() && invocation.restore.unwrap().resume);
        let invocation = parse(["carom", "--restore", "source_url=file:///s", "--api-socket", "/a"]).unwrap();
        assert!(!invocation.restore.unwrap().resume && invocation.landlock.is_none());
        let rules = ["--landlock", "--landlock-rules", "path=/p,access=r"];
        let started: [&[&str]; 2] =
            [&["carom", "--restore", "source_url=file:///s,resume=on"], &["carom", "--api-socket", "/a"]];
        for started in started {
            let landlock = parse(started.iter().chain(&rules)).unwrap().landlock.unwrap();
            assert_eq!(landlock, ["path=/p,access=r".parse().unwrap()]);
        }
    }

    #[test]
    fn metrics_take_an_address_of_either_family() {
        for address in ["127.0.0.1:9100", "[::]:0"] {
            let invocation = parse(["carom", "--kernel", "k", "--metrics", &format!("tcp={address}")]).unwrap();
            assert_eq!(invocation.metrics, Some(MetricsAddress(address.parse().unwrap())));
        }
    }

    #[test]
    fn several_values_may_follow_one_flag() {
        let all = "carom --kernel k --device path=/a,iommu=on path=/b,iommu=on --user-device socket=/u,iommu=on --device path=/c";
        let vm = parse(all.split_whitespace()).unwrap().vm.unwrap();
        let paths: Vec<_> = vm.devices.iter().map(|device| device.path.to_str().unwrap()).collect();
        assert_eq!((paths.as_slice(), vm.user_devices.len()), (&["/a", "/b", "/c"][..], 1));
    }

    #[test]
    fn neutral_values_of_unsupported_options_are_accepted() {
        let all = "carom --kernel k --debug-console off,iobase=0xe9 --console off";
        assert!(parse(all.split_whitespace()).is_ok());
    }

    #[test]
    fn seccomp_filters_are_on_by_default() {
        let seccomp = |more: &[&str]| parse(["carom", "--kernel", "k"].iter().chain(more)).unwrap().seccomp;
        assert_eq!(seccomp(&[]), Seccomp::True);
        assert_eq!(seccomp(&["--seccomp", "true"]), Seccomp::True);
        assert_eq!(seccomp(&["--seccomp", "false"]), Seccomp::False);
        assert_eq!(seccomp(&["--seccomp=log"]), Seccomp::Log);
        assert_eq!(seccomp(&["--seccomp", "errno"]), Seccomp::Errno);
    }

    #[test]
    fn descriptors_are_inherited_in_one_option_or_in_several() {
        let invocation = parse("carom --kernel k --inherit fd=7 fd=8 --inherit fd=9".split_whitespace()).unwrap();
        assert_eq!(invocation.inherit, [7, 8, 9].map(InheritedFd));
    }

    #[test]
    fn program_name_selects_version_and_default_consoles() {
        let consoles = |program: &str| {
            let vm = parse([program, "--kernel", "k"]).unwrap().vm.unwrap();
            (vm.serial.mode, vm.console.as_ref().unwrap().mode)
        };
        assert_eq!(consoles("carom"), (ConsoleMode::Tty, ConsoleMode::Off));
        assert_eq!(consoles("/usr/bin/cloud-hypervisor"), (ConsoleMode::Null, ConsoleMode::Tty));
        let version = |program: &str| match parse([program, "--version"]).unwrap_err() {
            CliOutcome::Information(text) => text,
            CliOutcome::Mistake(text) => panic!("mistake: {text}"),
        };
        assert_eq!(version("/x/cloud-hypervisor"), "cloud-hypervisor v53.0\n");
        assert_eq!(version("carom"), concat!("carom ", env!("CARGO_PKG_VERSION"), "\n"));
        let Err(CliOutcome::Mistake(text)) = parse(["cloud-hypervisor", "--vdpa", "path=/d", "--kernel", "k"]) else {
            panic!()
        };
        assert!(text.ends_with("see 'cloud-hypervisor --help'"), "{text}");
    }

    #[test]
    fn help_and_version_are_no_mistakes() {
        for flag in ["--help", "--version"] {
            assert!(matches!(parse(["carom", flag]), Err(CliOutcome::Information(_))));
        }
    }
}
