// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The files of the host that a VM is made of, and the program's limits to them (Landlock).

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use carom_api::config::{ConsoleMode, ConsoleTarget, LandlockConfig, MemoryZoneConfig, PayloadConfig, PlatformConfig};
use carom_api::error::FileError;
use carom_api::kinds::HostFile;
use carom_api::{
    ConfigError, DeviceConfig, DiskConfig, Field, NetConfig, PartConfig, PmemConfig, RngConfig, VmConfig, VsockConfig,
};
use devices::vfio::{HostFunctionPath, VfioPciError};
use devices::{inherited, sandbox};
use landlock::{
    AccessFs, BitFlags, PathBeneath, PathFd, PathFdError, RulesetCreated, RulesetCreatedAttr, make_bitflags,
};

use crate::kvm;
use crate::machine::VmError;
use crate::output_file;
use crate::tap;

type Access = BitFlags<AccessFs>;

const READ: Access = make_bitflags!(AccessFs::{ReadFile | ReadDir | IoctlDev});
/// To write a file that is there.
const WRITE: Access = make_bitflags!(AccessFs::{WriteFile | Truncate | IoctlDev});
/// To make a socket in a directory, with the lock beside it (`listening_socket.rs`), and to remove both.
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

/// Limits this thread and all that are started from now on to what the VM of `config` is made of, where that wants it. `removed` are
/// files that the process removes at last, `read` is a directory that it reads.
///
/// There is no way back: what is missing has no rule, and stays out of reach when it comes. So it is looked for before.
///
/// # Errors
/// A file that the rules name or that the VM cannot be built without is not there, or the host's kernel refuses. Nothing is limited then.
pub fn apply(config: &VmConfig, removed: &[PathBuf], read: Option<&Path>) -> Result<(), VmError> {
    if !config.landlock_enable {
        return Ok(());
    }
    let mut limits = Limits(rules()?);
    for (path, access) in OF_EACH {
        limits.allow_if_there(Path::new(path), *access)?;
    }
    for path in removed {
        limits.allow_if_there(parent(path), AccessFs::RemoveFile.into())?;
    }
    if let Some(directory) = read {
        limits.allow_if_there(directory, READ)?;
    }
    let payload = &config.payload;
    for (field, file) in [
        (PayloadConfig::FIRMWARE, &payload.firmware),
        (PayloadConfig::KERNEL, &payload.kernel),
        (PayloadConfig::INITRAMFS, &payload.initramfs),
    ] {
        file.as_deref().map_or(Ok(()), |file| limits.allow_file(file, READ, field))?;
    }
    for zone in &config.memory.zones {
        let access = if zone.shared { READ | WRITE } else { READ };
        // A file without a name comes to be in a directory.
        let made =
            if zone.file.as_deref().is_some_and(Path::is_dir) { WRITE | AccessFs::MakeReg } else { Access::EMPTY };
        let file = zone.file.as_deref();
        file.map_or(Ok(()), |file| limits.allow_file(file, access | made, MemoryZoneConfig::FILE))?;
    }
    config.parts().try_for_each(|part| limits.allow_part(&part.to_part(), config.platform.iommufd))?;
    // Their files are made: not before all else that may be missing.
    limits.allow_console(&config.serial.target())?;
    config.console.as_ref().map_or(Ok(()), |console| limits.allow_console(&console.target()))?;
    for LandlockConfig { path, access } in &config.landlock_rules {
        let read = if access.read { READ } else { Access::EMPTY };
        // All but running a file.
        let write = if access.write { sandbox::known_accesses() & !READ & !AccessFs::Execute } else { Access::EMPTY };
        limits.allow(path, read | write | AccessFs::IoctlDev).map_err(file_error(LandlockConfig::PATH, path))?;
    }
    // Whoever has to load its module first is told so.
    kvm::open()?;
    sandbox::limit_files(limits.0).map_err(|source| VmError::Device { what: "limiting files (Landlock)", source })
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

struct Limits(RulesetCreated);

impl Limits {
    /// Allows this file or directory, and what is below it.
    fn allow(&mut self, path: &Path, access: Access) -> io::Result<()> {
        let opened = PathFd::new(path).map_err(|error| match error {
            PathFdError::OpenCall { source, .. } => source,
            error => io::Error::other(error),
        })?;
        // Of a file, that means as much of it as files have.
        (&mut self.0).add_rule(PathBeneath::new(opened, access)).map(drop).map_err(io::Error::other)
    }

    /// The same; of what is not there `missing` makes an error. What was inherited is open, and needs no rule.
    fn allow_or(
        &mut self,
        path: &Path,
        access: Access,
        missing: impl FnOnce(io::Error) -> Result<(), VmError>,
    ) -> Result<(), VmError> {
        if inherited::is_kept(path) {
            return Ok(());
        }
        match self.allow(path, access) {
            Err(error) if matches!(error.kind(), io::ErrorKind::Other) => {
                Err(VmError::Device { what: "making a rule for Landlock", source: error })
            }
            Err(error) => missing(error),
            Ok(()) => Ok(()),
        }
    }

    /// The same; what is not there is nothing to be reached.
    fn allow_if_there(&mut self, path: &Path, access: Access) -> Result<(), VmError> {
        self.allow_or(path, access, |_| Ok(()))
    }

    /// The same of a file that has to be there, which `field` names.
    fn allow_file(&mut self, path: &Path, access: Access, field: Field) -> Result<(), VmError> {
        self.allow_or(path, access, |source| Err(file_error(field, path)(source)))
    }

    /// A socket is to be made at `path`, which `field` names, with what stands beside it.
    fn allow_socket(&mut self, path: &Path, field: Field) -> Result<(), VmError> {
        if inherited::is_kept(path) {
            return Ok(());
        }
        self.allow_or(parent(path), SOCKETS, |source| Err(file_error(field, path)(source)))
    }

    fn allow_console(&mut self, console: &ConsoleTarget<'_>) -> Result<(), VmError> {
        match (console.mode, console.file, console.socket) {
            (ConsoleMode::Pty, ..) => {
                let missing = |source| Err(VmError::Device { what: "setting a console up", source });
                self.allow_or(Path::new("/dev/ptmx"), READ | WRITE, missing)?;
                self.allow_if_there(Path::new("/dev/pts"), READ | WRITE)
            }
            (ConsoleMode::File, Some(file), _) => {
                let field = console.file_field();
                // It is made now, as a rule for a file needs one.
                if fs::metadata(file).is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
                    output_file::open(fs::File::options().append(true), 0, file).map_err(file_error(field, file))?;
                }
                self.allow_file(file, WRITE, field)
            }
            (ConsoleMode::Socket, _, Some(socket)) => self.allow_socket(socket, console.socket_field()),
            _ => Ok(()),
        }
    }

    fn allow_part(&mut self, part: &PartConfig, iommufd: bool) -> Result<(), VmError> {
        for file in part.files() {
            match (file, named_by(part)) {
                (HostFile::Read(path), Some(field)) => self.allow_file(path, READ, field),
                (HostFile::ReadWrite(path), Some(field)) => self.allow_file(path, READ | WRITE, field),
                (HostFile::Read(path), None) => self.allow_if_there(path, READ),
                (HostFile::ReadWrite(path), None) => self.allow_if_there(path, READ | WRITE),
                (HostFile::Socket(path), field) => self.allow_socket(path, field.unwrap_or(part.kind().field)),
                (HostFile::Interface(name), _) => self.allow_interface(name),
                (HostFile::Function(path), _) => self.allow_function(path, iommufd),
            }?;
        }
        Ok(())
    }

    fn allow_interface(&mut self, name: Option<&str>) -> Result<(), VmError> {
        let shown = Path::new(name.unwrap_or("the interface"));
        let missing = |source| Err(file_error(NetConfig::TAP, shown)(source));
        let Some((name, node)) = name.and_then(|name| Some((name, tap::character_device(name)?))) else {
            return self.allow_or(Path::new("/dev/net/tun"), READ | WRITE, missing);
        };
        self.allow_if_there(&Path::new("/sys/class/net").join(name), READ)?;
        self.allow_or(&node, READ | WRITE, |error| {
            missing(io::Error::new(error.kind(), format!("{}: {error}", node.display())))
        })
    }

    /// A function of the host's: its directory in sysfs, its group, and VFIO's files for it.
    fn allow_function(&mut self, path: &Path, iommufd: bool) -> Result<(), VmError> {
        let fail = |source| {
            let path = Some(path.display().to_string());
            VmError::Vfio { field: DeviceConfig::PATH, path, source: Box::new(source) }
        };
        // One that VFIO does not have yet has no files of it either.
        let function = HostFunctionPath::inspect(path).map_err(fail)?;
        self.allow_if_there(path, READ)?;
        self.allow_if_there(&path.join("iommu_group"), READ)?;
        let without = |file: &Path, source| Err(fail(device_file_error(file, source)));
        if !iommufd {
            let container = Path::new("/dev/vfio/vfio");
            self.allow_or(container, READ | WRITE, |source| without(container, source))?;
            let group = Path::new("/dev/vfio").join(function.group().to_string());
            return self.allow_or(&group, READ | WRITE, |source| without(&group, source));
        }
        // Descriptors may be there in place of these files.
        let by_path = !is_anything_inherited();
        self.allow_or(Path::new("/dev/iommu"), READ | WRITE, |error| match error.kind() {
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
            self.allow_or(&file, READ | WRITE, |source| if by_path { without(&file, source) } else { Ok(()) })?;
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

/// What is said of a file that `field` names and that is not there.
fn file_error(field: Field, path: &Path) -> impl Fn(io::Error) -> VmError {
    move |source| FileError { field, path: path.display().to_string(), source }.into()
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
fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}
