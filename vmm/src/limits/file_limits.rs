// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The host files that a VM uses, and the restriction of the program to these files (Landlock).

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use carom_api::config::{ConsoleMode, ConsoleTarget, LandlockConfig, MemoryZoneConfig, PayloadConfig, PlatformConfig};
use carom_api::kinds::HostFile;
use carom_api::{
    ConfigError, DeviceConfig, DiskConfig, Field, NetConfig, PartConfig, PmemConfig, RestoreConfig, RngConfig,
    VmConfig, VsockConfig,
};
use devices::vfio::{HostFunctionPath, VfioPciError};
use devices::{inherited, sandbox};
use landlock::{
    AccessFs, AddRuleError, AddRulesError, PathBeneath, PathFd, RulesetCreated, RulesetCreatedAttr, RulesetError,
    make_bitflags,
};

use crate::error::VmError;
use crate::kvm;
use crate::limits::file_bounds::{Access, FileBounds, READ, beyond, open, parent, real_path, rule_access};
use crate::process::output_file;
use crate::snapshot::Snapshot;
use crate::tap;

/// Rights to write to an existing file.
const WRITE: Access = make_bitflags!(AccessFs::{WriteFile | Truncate | IoctlDev});
/// Rights to create a socket and its lock file in a directory (`devices::listening_socket`), and to remove both files.
const SOCKETS: Access = make_bitflags!(AccessFs::{MakeSock | MakeReg | WriteFile | RemoveFile});

/// Files that every VM uses: KVM, the files for a panic's backtrace, and the time zone for times in the log.
const OF_EACH: &[(&str, Access)] = &[
    ("/dev/kvm", make_bitflags!(AccessFs::{ReadFile | WriteFile | IoctlDev})),
    ("/proc/self", READ),
    ("/proc/self/exe", READ),
    ("/etc/localtime", READ),
    ("/usr/share/zoneinfo", READ),
];

/// Checks that the host's kernel supports Landlock, if `config` enables it.
///
/// # Errors
/// The kernel does not support Landlock.
pub fn check(config: &VmConfig) -> Result<(), VmError> {
    if config.landlock_enable { rules().map(drop) } else { Ok(()) }
}

/// Checks that the host's kernel supports Landlock, for `--landlock` without a VM.
///
/// # Errors
/// The kernel does not support Landlock.
pub fn check_host() -> Result<(), VmError> {
    rules().map(drop)
}

/// If the configuration or the command line (`bounds`) enables Landlock, restricts this thread to the files of the VM of `config`. Threads
/// that this thread starts later have the same restriction. `removed` are files that the process removes at its end. `read` is a directory
/// that the process reads.
///
/// The restriction is permanent. The kernel accepts no rule for a missing file, so the file stays inaccessible even if it is created later.
/// Therefore missing files are reported before the restriction.
///
/// # Errors
/// - The VM names a file beyond the bounds.
/// - A file is missing that the rules name or that the VM requires.
/// - The host's kernel rejects the restriction.
///
/// After an error, nothing is restricted.
pub fn apply(
    config: &VmConfig,
    removed: &[PathBuf],
    read: Option<&Path>,
    bounds: &mut FileBounds,
) -> Result<(), VmError> {
    if !config.landlock_enable && !bounds.are_known() {
        return Ok(());
    }
    let mut limits = Limits::new(bounds)?;
    for (path, access) in OF_EACH {
        limits.add_if_there(Path::new(path), *access)?;
    }
    for path in removed {
        limits.add_if_there(directory(path), AccessFs::RemoveFile.into())?;
    }
    if let Some(directory) = read {
        limits.add_if_there(directory, READ)?;
    }
    limits.allow_vm(config)?;
    let Limits { mut rules, named, .. } = limits;
    for (path, access) in bounds.files() {
        // The VM may use other files within the bounds later, so every existing file within the bounds gets a rule.
        let Ok((opened, _)) = open(path) else { continue };
        add_rule(&mut rules, opened, *access).map_err(no_rule)?;
    }
    // Report a missing KVM module before the restriction. After the restriction, /dev/kvm would stay inaccessible even if the user loads
    // the module.
    kvm::open()?;
    // If this process was restricted for an earlier VM, the bounds are already enforced.
    if config.landlock_enable || !sandbox::files_are_limited() {
        sandbox::limit_files(rules)
            .map_err(|source| VmError::Device { what: "restrict this program to its files (Landlock)", source })?;
    }
    if matches!(bounds, FileBounds::OfFirstVm) {
        *bounds = FileBounds::These(named);
    }
    Ok(())
}

/// Checks that a device that is hot-plugged to a booted VM names no file beyond the bounds. Landlock also rejects files beyond the bounds,
/// except the sockets of servers.
///
/// # Errors
/// The device names a file beyond the bounds, or a file is missing.
pub fn check_added(part: &PartConfig, iommufd: bool, bounds: &FileBounds) -> Result<(), VmError> {
    if bounds.are_known() { Limits::new(bounds)?.allow_part(part, iommufd) } else { Ok(()) }
}

/// Checks that the RAM file of a snapshot lies in the snapshot's directory or within the bounds. Without this check, the RAM file could be
/// a link to another file, and the guest could read all bytes of the linked file.
///
/// # Errors
/// The file lies elsewhere.
pub fn check_snapshot(snapshot: &Snapshot, bounds: &FileBounds) -> Result<(), VmError> {
    if !bounds.are_known() {
        return Ok(());
    }
    let (field, path) = (RestoreConfig::SOURCE_URL, snapshot.memory_path());
    let real = real_path(snapshot.memory.as_fd()).map_err(VmError::of_file(field, path))?;
    let (_, own) = open(directory(path)).map_err(VmError::of_file(field, path))?;
    if real.starts_with(own) || bounds.allow(&real, READ) { Ok(()) } else { Err(beyond(field, path, READ)) }
}

/// If `error` is a permission error, adds that the restriction of files may be the cause.
pub fn blame(error: VmError) -> VmError {
    let refused = || error.to_string().contains(&io::Error::from_raw_os_error(libc::EACCES).to_string());
    if !sandbox::files_are_limited() || matches!(error, VmError::BeyondLimits(_)) || !refused() {
        return error;
    }
    VmError::BeyondLimits(Box::new(error))
}

fn rules() -> Result<RulesetCreated, VmError> {
    sandbox::no_files().map_err(|error| {
        let rule = "the host's kernel has no Landlock: use Linux 5.13 or later, built with CONFIG_SECURITY_LANDLOCK and with \
                    landlock in the list of security modules (kernel parameter lsm=)";
        log::debug!("{error}");
        ConfigError::new(LandlockConfig::ENABLE, rule).into()
    })
}

/// Adds a rule for a file or directory. For a file, the kernel uses only the rights that apply to files.
fn add_rule(rules: &mut RulesetCreated, opened: PathFd, access: Access) -> io::Result<()> {
    match rules.add_rule(PathBeneath::new(opened, access)) {
        // A pipe, a socket or a memfd is not in a directory. The kernel rejects rules for such files, but allows access to them anyway.
        Err(RulesetError::AddRules(AddRulesError::Fs(AddRuleError::AddRuleCall { source, .. })))
            if source.raw_os_error() == Some(libc::EBADFD) =>
        {
            Ok(())
        }
        added => added.map(drop).map_err(|error| io::Error::other(format!("cannot add a Landlock rule: {error}"))),
    }
}

/// Returns the error for a rule whose file is not named by a field of the configuration.
fn no_rule(source: io::Error) -> VmError {
    VmError::Device { what: "restrict this program to its files (Landlock)", source }
}

struct Limits<'b> {
    rules: RulesetCreated,
    /// Files that the VM may name.
    bounds: &'b FileBounds,
    /// Files that the VM names, as paths without links, each with the rights that the VM needs.
    named: Vec<(PathBuf, Access)>,
}

impl<'b> Limits<'b> {
    /// Creates limits that allow nothing yet.
    fn new(bounds: &'b FileBounds) -> Result<Self, VmError> {
        Ok(Self { rules: rules()?, bounds, named: Vec::new() })
    }

    /// Adds a rule for a file or directory that the program itself uses, if the file or directory exists.
    fn add_if_there(&mut self, path: &Path, access: Access) -> Result<(), VmError> {
        let Ok((opened, _)) = open(path) else { return Ok(()) };
        add_rule(&mut self.rules, opened, access).map_err(no_rule)
    }

    /// Allows all files that the VM of `config` uses.
    fn allow_vm(&mut self, config: &VmConfig) -> Result<(), VmError> {
        let payload = &config.payload;
        for (field, file) in [
            (PayloadConfig::FIRMWARE, &payload.firmware),
            (PayloadConfig::KERNEL, &payload.kernel),
            (PayloadConfig::INITRAMFS, &payload.initramfs),
        ] {
            file.as_deref().map_or(Ok(()), |file| self.allow_file(file, READ, field))?;
        }
        for zone in &config.memory.zones {
            let access = if zone.shared { READ | WRITE } else { READ };
            // If the path is a directory, the zone uses an unnamed file that is created in this directory.
            let made =
                if zone.file.as_deref().is_some_and(Path::is_dir) { WRITE | AccessFs::MakeReg } else { Access::EMPTY };
            let file = zone.file.as_deref();
            file.map_or(Ok(()), |file| self.allow_file(file, access | made, MemoryZoneConfig::FILE))?;
        }
        config.parts().try_for_each(|part| self.allow_part(&part.to_part(), config.platform.iommufd))?;
        // Missing console files are created here, after the files of the payload, the zones and the devices were checked.
        self.allow_console(&config.serial.target())?;
        config.console.as_ref().map_or(Ok(()), |console| self.allow_console(&console.target()))?;
        for LandlockConfig { path, access } in &config.landlock_rules {
            self.allow_file(path, rule_access(*access), LandlockConfig::PATH)?;
        }
        Ok(())
    }

    /// Allows the file or directory at `path`, with everything below it. `field` names the path in errors. If the path is missing, returns
    /// the result of `missing`.
    ///
    /// An inherited file is already open, so it can be used without a rule. A rule is added anyway, because a disk reopens its image for a
    /// lock that the parent process does not share.
    fn allow_or(
        &mut self,
        path: &Path,
        access: Access,
        field: Field,
        missing: impl FnOnce(io::Error) -> Result<(), VmError>,
    ) -> Result<(), VmError> {
        if inherited::is_kept(path) {
            if let Ok((opened, _)) = open(path)
                && let Err(error) = add_rule(&mut self.rules, opened, access)
            {
                log::debug!("{}: {error}", path.display());
            }
            return Ok(());
        }
        let (opened, real) = match open(path) {
            Ok(opened) => opened,
            // The path may be the socket of a server that starts later. Landlock does not restrict connecting to a socket, so Carom checks
            // the path itself.
            Err(_) if !self.bounds.allow_missing(path, access) => return Err(beyond(field, path, access)),
            Err(error) => {
                self.named.extend(real_of_missing(path).map(|real| (real, access)));
                return missing(error);
            }
        };
        if !self.bounds.allow(&real, access) {
            return Err(beyond(field, path, access));
        }
        add_rule(&mut self.rules, opened, access).map_err(VmError::of_file(field, path))?;
        self.named.push((real, access));
        Ok(())
    }

    /// Allows a file or directory if it exists.
    fn allow_if_there(&mut self, path: &Path, access: Access, field: Field) -> Result<(), VmError> {
        self.allow_or(path, access, field, |_| Ok(()))
    }

    /// Allows a file that must exist.
    fn allow_file(&mut self, path: &Path, access: Access, field: Field) -> Result<(), VmError> {
        self.allow_or(path, access, field, |source| Err(VmError::of_file(field, path)(source)))
    }

    /// Allows creating a socket at `path`, which `field` names, together with its lock file.
    fn allow_socket(&mut self, path: &Path, field: Field) -> Result<(), VmError> {
        if inherited::is_kept(path) {
            return Ok(());
        }
        if open(directory(path)).is_ok_and(|(_, real)| !self.bounds.allow(&real, SOCKETS)) {
            return Err(beyond(field, path, SOCKETS));
        }
        self.allow_or(directory(path), SOCKETS, field, |source| Err(VmError::of_file(field, path)(source)))
    }

    fn allow_console(&mut self, console: &ConsoleTarget<'_>) -> Result<(), VmError> {
        match (console.mode, console.file, console.socket) {
            // A pseudoterminal is always allowed. The program creates both ends of the pseudoterminal, so no other process is affected.
            (ConsoleMode::Pty, ..) => {
                let maker = Path::new("/dev/ptmx");
                open(maker).map_err(|source| VmError::Device { what: "open /dev/ptmx for a console", source })?;
                self.add_if_there(maker, READ | WRITE)?;
                self.add_if_there(Path::new("/dev/pts"), READ | WRITE)
            }
            (ConsoleMode::File, Some(file), _) => {
                let field = console.file_field();
                // The file is created now, because a rule needs an existing file.
                if fs::metadata(file).is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
                    if !self.bounds.allow_missing(file, WRITE | AccessFs::MakeReg) {
                        return Err(beyond(field, file, WRITE));
                    }
                    output_file::open(fs::File::options().append(true), 0, file)
                        .map_err(VmError::of_file(field, file))?;
                }
                self.allow_file(file, WRITE, field)
            }
            (ConsoleMode::Socket, _, Some(socket)) => self.allow_socket(socket, console.socket_field()),
            _ => Ok(()),
        }
    }

    fn allow_part(&mut self, part: &PartConfig, iommufd: bool) -> Result<(), VmError> {
        let of_kind = part.exclusive().unwrap_or(part.kind().field);
        for file in part.files() {
            match (file, named_by(part)) {
                (HostFile::Read(path), Some(field)) => self.allow_file(path, READ, field),
                (HostFile::ReadWrite(path), Some(field)) => self.allow_file(path, READ | WRITE, field),
                (HostFile::Read(path), None) => self.allow_if_there(path, READ, of_kind),
                (HostFile::ReadWrite(path), None) => self.allow_if_there(path, READ | WRITE, of_kind),
                (HostFile::Socket(path), field) => self.allow_socket(path, field.unwrap_or(of_kind)),
                (HostFile::Interface(name), _) => self.allow_interface(name),
                (HostFile::Function(path), _) => self.allow_function(path, iommufd),
            }?;
        }
        Ok(())
    }

    fn allow_interface(&mut self, name: Option<&str>) -> Result<(), VmError> {
        let shown = Path::new(name.unwrap_or("tap interface"));
        let missing = |source| Err(VmError::of_file(NetConfig::TAP, shown)(source));
        let Some((name, node)) = name.and_then(|name| Some((name, tap::character_device(name)?))) else {
            return self.allow_or(Path::new("/dev/net/tun"), READ | WRITE, NetConfig::TAP, missing);
        };
        self.allow_if_there(&Path::new("/sys/class/net").join(name), READ, NetConfig::TAP)?;
        self.allow_or(&node, READ | WRITE, NetConfig::TAP, |error| {
            missing(io::Error::new(error.kind(), format!("{}: {error}", node.display())))
        })
    }

    /// Allows a host function: its directory in sysfs, its group, and its VFIO files.
    fn allow_function(&mut self, path: &Path, iommufd: bool) -> Result<(), VmError> {
        let fail = |source| {
            let path = Some(path.display().to_string());
            VmError::Vfio { field: DeviceConfig::PATH, path, source: Box::new(source) }
        };
        let field = DeviceConfig::PATH;
        // This step fails for a path beyond the bounds, so the later steps read no directory beyond the bounds.
        self.allow_if_there(path, READ, field)?;
        // This step fails if the function has no VFIO driver, because such a function has no VFIO files.
        let function = HostFunctionPath::inspect(path).map_err(fail)?;
        self.allow_if_there(&path.join("iommu_group"), READ, field)?;
        let without = |file: &Path, source| Err(fail(device_file_error(file, source)));
        if !iommufd {
            let container = Path::new("/dev/vfio/vfio");
            self.allow_or(container, READ | WRITE, field, |source| without(container, source))?;
            let group = Path::new("/dev/vfio").join(function.group().to_string());
            return self.allow_or(&group, READ | WRITE, field, |source| without(&group, source));
        }
        // Inherited descriptors may replace the following files. In this case, a file that cannot be opened is no error.
        let by_path = !is_anything_inherited();
        self.allow_or(Path::new("/dev/iommu"), READ | WRITE, field, |error| match error.kind() {
            io::ErrorKind::NotFound if by_path => {
                let source = Box::new(VfioPciError::NoIommufd);
                Err(VmError::Vfio { field: PlatformConfig::IOMMUFD, path: None, source })
            }
            _ => Ok(()),
        })?;
        let names = match fs::read_dir(path.join("vfio-dev")) {
            Err(error) if by_path && error.kind() == io::ErrorKind::NotFound => {
                return Err(fail(VfioPciError::NoCdev { name: function.name().to_string() }));
            }
            names => names.into_iter().flatten().flatten().map(|entry| entry.file_name()),
        };
        for name in names {
            let file = Path::new("/dev/vfio/devices").join(name);
            self.allow_or(&file, READ | WRITE, field, |source| if by_path { without(&file, source) } else { Ok(()) })?;
        }
        Ok(())
    }
}

/// Returns the field of `part` that names a file which must exist. Returns `None` for a device of another process, whose file is a socket.
/// The other process may create the socket while the VM waits, and Landlock does not restrict connecting.
fn named_by(part: &PartConfig) -> Option<Field> {
    match part {
        PartConfig::Disk(disk) => disk.vhost_socket.is_none().then_some(DiskConfig::PATH),
        PartConfig::Pmem(_) => Some(PmemConfig::FILE),
        PartConfig::Rng(_) => Some(RngConfig::SRC),
        PartConfig::Vsock(_) => Some(VsockConfig::SOCKET),
        _ => None,
    }
}

/// Returns the error for a VFIO file that cannot be opened.
fn device_file_error(file: &Path, source: io::Error) -> VfioPciError {
    match source.kind() {
        io::ErrorKind::NotFound => VfioPciError::NoVfio { path: file.into() },
        io::ErrorKind::PermissionDenied => VfioPciError::NoAccess { path: file.into(), source },
        _ => VfioPciError::Host { what: format!("cannot open {}", file.display()), source },
    }
}

/// True if the program inherited a descriptor that replaces a file.
fn is_anything_inherited() -> bool {
    let descriptors = fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    descriptors.into_iter().any(|entry| inherited::is_kept(&entry.path()))
}

/// Returns the directory of a file.
fn directory(path: &Path) -> &Path {
    parent(path).unwrap_or(Path::new("."))
}

/// Returns the path of a missing file in an existing directory. The directory's part of the path has no links.
fn real_of_missing(path: &Path) -> Option<PathBuf> {
    let (_, directory) = open(directory(path)).ok()?;
    Some(directory.join(path.file_name()?))
}
