// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The files of the host that a VM is made of, and the program's limits to them (Landlock).

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

/// To write a file that is there.
const WRITE: Access = make_bitflags!(AccessFs::{WriteFile | Truncate | IoctlDev});
/// Rights to create a socket and its lock in a directory (`devices::listening_socket`), and to remove both.
const SOCKETS: Access = make_bitflags!(AccessFs::{MakeSock | MakeReg | WriteFile | RemoveFile});

/// What each VM takes: KVM, and what a trace of a panic and times in the log are read from.
const OF_EACH: &[(&str, Access)] = &[
    ("/dev/kvm", make_bitflags!(AccessFs::{ReadFile | WriteFile | IoctlDev})),
    ("/proc/self", READ),
    ("/proc/self/exe", READ),
    ("/etc/localtime", READ),
    ("/usr/share/zoneinfo", READ),
];

/// Checks that the host's kernel can limit files, where `config` wants it to.
///
/// # Errors
/// It cannot.
pub fn check(config: &VmConfig) -> Result<(), VmError> {
    if config.landlock_enable { rules().map(drop) } else { Ok(()) }
}

/// Checks that the host's kernel can limit files, for `--landlock` without a VM.
///
/// # Errors
/// It cannot.
pub fn check_host() -> Result<(), VmError> {
    rules().map(drop)
}

/// Limits this thread and all that are started from now on to what the VM of `config` is made of, where that or the command line
/// (`bounds`) wants it. `removed` are files that the process removes at last, `read` is a directory that it reads.
///
/// There is no way back: what is missing has no rule, and stays out of reach when it comes. So it is looked for before.
///
/// # Errors
/// The VM names a file beyond the bounds. A file that the rules name or that the VM cannot be built without is not there, or the host's
/// kernel refuses. Nothing is limited then.
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
        // The VM may be given more of these later. One that is gone has no rule.
        let Ok((opened, _)) = open(path) else { continue };
        add_rule(&mut rules, opened, *access).map_err(no_rule)?;
    }
    // Whoever has to load its module first is told so.
    kvm::open()?;
    // Limits of an earlier VM have the same bounds.
    if config.landlock_enable || !sandbox::files_are_limited() {
        sandbox::limit_files(rules).map_err(|source| VmError::Device { what: "restrict files (Landlock)", source })?;
    }
    if matches!(bounds, FileBounds::OfFirstVm) {
        *bounds = FileBounds::These(named);
    }
    Ok(())
}

/// Checks that a device that comes to a VM which has been booted names no file beyond the bounds. The kernel refuses files, but not the
/// sockets of servers.
///
/// # Errors
/// It names such a file, or the file is missing.
pub fn check_added(part: &PartConfig, iommufd: bool, bounds: &FileBounds) -> Result<(), VmError> {
    if bounds.are_known() { Limits::new(bounds)?.allow_part(part, iommufd) } else { Ok(()) }
}

/// Checks that the RAM of a snapshot lies in the snapshot's own directory or within the bounds. The guest gets all bytes of a file that a
/// link leads to.
///
/// # Errors
/// It lies elsewhere.
pub fn check_snapshot(snapshot: &Snapshot, bounds: &FileBounds) -> Result<(), VmError> {
    if !bounds.are_known() {
        return Ok(());
    }
    let (field, path) = (RestoreConfig::SOURCE_URL, snapshot.memory_path());
    let real = real_path(snapshot.memory.as_fd()).map_err(VmError::of_file(field, path))?;
    let (_, own) = open(directory(path)).map_err(VmError::of_file(field, path))?;
    if real.starts_with(own) || bounds.allow(&real, READ) { Ok(()) } else { Err(beyond(field, path, READ)) }
}

/// Says of an error that the limits may be why.
pub fn blame(error: VmError) -> VmError {
    let refused = || error.to_string().contains(&io::Error::from_raw_os_error(libc::EACCES).to_string());
    if !sandbox::files_are_limited() || matches!(error, VmError::BeyondLimits(_)) || !refused() {
        return error;
    }
    VmError::BeyondLimits(Box::new(error))
}

fn rules() -> Result<RulesetCreated, VmError> {
    sandbox::no_files().map_err(|error| {
        let rule = "the host's kernel has no Landlock: it takes Linux 5.13 built with CONFIG_SECURITY_LANDLOCK, and \
                    landlock in its parameter lsm=";
        log::debug!("{error}");
        ConfigError::new(LandlockConfig::ENABLE, rule).into()
    })
}

/// Adds a rule for a file or directory. Of a file, `access` means as much as files have.
fn add_rule(rules: &mut RulesetCreated, opened: PathFd, access: Access) -> io::Result<()> {
    match rules.add_rule(PathBeneath::new(opened, access)) {
        // A pipe or socket, or a file in memory, is in no directory. The kernel takes no rule for it, and limits none of them.
        Err(RulesetError::AddRules(AddRulesError::Fs(AddRuleError::AddRuleCall { source, .. })))
            if source.raw_os_error() == Some(libc::EBADFD) =>
        {
            Ok(())
        }
        added => added.map(drop).map_err(|error| io::Error::other(format!("cannot make a rule for Landlock: {error}"))),
    }
}

/// The error for a rule that no field names.
fn no_rule(source: io::Error) -> VmError {
    VmError::Device { what: "restrict files", source }
}

struct Limits<'b> {
    rules: RulesetCreated,
    /// Files that the VM may name.
    bounds: &'b FileBounds,
    /// Files that the VM names, without links.
    named: Vec<(PathBuf, Access)>,
}

impl<'b> Limits<'b> {
    /// Limits that allow nothing yet.
    fn new(bounds: &'b FileBounds) -> Result<Self, VmError> {
        Ok(Self { rules: rules()?, bounds, named: Vec::new() })
    }

    /// Adds a rule for a file or directory of the program's own, if it is there.
    fn add_if_there(&mut self, path: &Path, access: Access) -> Result<(), VmError> {
        let Ok((opened, _)) = open(path) else { return Ok(()) };
        add_rule(&mut self.rules, opened, access).map_err(no_rule)
    }

    /// Allows all that the VM of `config` is made of.
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
            // A file without a name comes to be in a directory.
            let made =
                if zone.file.as_deref().is_some_and(Path::is_dir) { WRITE | AccessFs::MakeReg } else { Access::EMPTY };
            let file = zone.file.as_deref();
            file.map_or(Ok(()), |file| self.allow_file(file, access | made, MemoryZoneConfig::FILE))?;
        }
        config.parts().try_for_each(|part| self.allow_part(&part.to_part(), config.platform.iommufd))?;
        // Their files are made: not before all else that may be missing.
        self.allow_console(&config.serial.target())?;
        config.console.as_ref().map_or(Ok(()), |console| self.allow_console(&console.target()))?;
        for LandlockConfig { path, access } in &config.landlock_rules {
            self.allow_file(path, rule_access(*access), LandlockConfig::PATH)?;
        }
        Ok(())
    }

    /// Allows this file or directory, and what is below it, for `field`. If it is not there, `missing` makes an error of that. An
    /// inherited file is open, and needs no rule. With a rule a disk can open it anew, for a lock that the parent process does not share.
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
            // A server's socket may come later. The kernel lets any process connect to it.
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

    /// The same; what is not there is nothing to be reached.
    fn allow_if_there(&mut self, path: &Path, access: Access, field: Field) -> Result<(), VmError> {
        self.allow_or(path, access, field, |_| Ok(()))
    }

    /// The same of a file that has to be there.
    fn allow_file(&mut self, path: &Path, access: Access, field: Field) -> Result<(), VmError> {
        self.allow_or(path, access, field, |source| Err(VmError::of_file(field, path)(source)))
    }

    /// A socket is to be made at `path`, which `field` names, with what stands beside it.
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
            // The program makes both ends, so that no other process has them, whatever the command line allows.
            (ConsoleMode::Pty, ..) => {
                let maker = Path::new("/dev/ptmx");
                open(maker).map_err(|source| VmError::Device { what: "set up a console", source })?;
                self.add_if_there(maker, READ | WRITE)?;
                self.add_if_there(Path::new("/dev/pts"), READ | WRITE)
            }
            (ConsoleMode::File, Some(file), _) => {
                let field = console.file_field();
                // It is made now, as a rule for a file needs one.
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
        let shown = Path::new(name.unwrap_or("the interface"));
        let missing = |source| Err(VmError::of_file(NetConfig::TAP, shown)(source));
        let Some((name, node)) = name.and_then(|name| Some((name, tap::character_device(name)?))) else {
            return self.allow_or(Path::new("/dev/net/tun"), READ | WRITE, NetConfig::TAP, missing);
        };
        self.allow_if_there(&Path::new("/sys/class/net").join(name), READ, NetConfig::TAP)?;
        self.allow_or(&node, READ | WRITE, NetConfig::TAP, |error| {
            missing(io::Error::new(error.kind(), format!("{}: {error}", node.display())))
        })
    }

    /// A function of the host's: its directory in sysfs, its group, and VFIO's files for it.
    fn allow_function(&mut self, path: &Path, iommufd: bool) -> Result<(), VmError> {
        let fail = |source| {
            let path = Some(path.display().to_string());
            VmError::Vfio { field: DeviceConfig::PATH, path, source: Box::new(source) }
        };
        let field = DeviceConfig::PATH;
        // Nothing is read in a directory beyond the bounds.
        self.allow_if_there(path, READ, field)?;
        // One that VFIO does not have yet has no files of it either.
        let function = HostFunctionPath::inspect(path).map_err(fail)?;
        self.allow_if_there(&path.join("iommu_group"), READ, field)?;
        let without = |file: &Path, source| Err(fail(device_file_error(file, source)));
        if !iommufd {
            let container = Path::new("/dev/vfio/vfio");
            self.allow_or(container, READ | WRITE, field, |source| without(container, source))?;
            let group = Path::new("/dev/vfio").join(function.group().to_string());
            return self.allow_or(&group, READ | WRITE, field, |source| without(&group, source));
        }
        // Descriptors may be there in place of these files.
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

/// The field that names the file which a device cannot be made without. That of a device of another process is its socket: the process
/// may come while it is waited for, and Landlock does not ask who connects.
fn named_by(part: &PartConfig) -> Option<Field> {
    match part {
        PartConfig::Disk(disk) => disk.vhost_socket.is_none().then_some(DiskConfig::PATH),
        PartConfig::Pmem(_) => Some(PmemConfig::FILE),
        PartConfig::Rng(_) => Some(RngConfig::SRC),
        PartConfig::Vsock(_) => Some(VsockConfig::SOCKET),
        _ => None,
    }
}

/// What is said of a file of VFIO's.
fn device_file_error(file: &Path, source: io::Error) -> VfioPciError {
    match source.kind() {
        io::ErrorKind::NotFound => VfioPciError::NoVfio { path: file.into() },
        io::ErrorKind::PermissionDenied => VfioPciError::NoAccess { path: file.into(), source },
        _ => VfioPciError::Host { what: format!("opening {}", file.display()), source },
    }
}

/// Whether the program was started with a descriptor that is used in the place of a file.
fn is_anything_inherited() -> bool {
    let descriptors = fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    descriptors.into_iter().any(|entry| inherited::is_kept(&entry.path()))
}

/// The directory that a file is in.
fn directory(path: &Path) -> &Path {
    parent(path).unwrap_or(Path::new("."))
}

/// The path without links of a file that is not there, in a directory that is.
fn real_of_missing(path: &Path) -> Option<PathBuf> {
    let (_, directory) = open(directory(path)).ok()?;
    Some(directory.join(path.file_name()?))
}
