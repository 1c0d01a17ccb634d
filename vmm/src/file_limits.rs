// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The files of the host that a VM is made of, and the program's limits to them (Landlock).

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use carom_api::config::{ConsoleMode, ConsoleTarget, LandlockConfig};
use carom_api::error::FileError;
use carom_api::kinds::HostFile;
use carom_api::{ConfigError, VmConfig};
use devices::{inherited, sandbox};
use landlock::{
    AccessFs, BitFlags, PathBeneath, PathFd, PathFdError, RulesetCreated, RulesetCreatedAttr, make_bitflags,
};

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
/// # Errors
/// A file that the rules name is not there, or the host's kernel refuses.
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
    for file in [&payload.kernel, &payload.firmware, &payload.initramfs].into_iter().flatten() {
        limits.allow_if_there(file, READ)?;
    }
    for zone in &config.memory.zones {
        let access = if zone.shared { READ | WRITE } else { READ };
        // A file without a name comes to be in a directory.
        let made =
            if zone.file.as_deref().is_some_and(Path::is_dir) { WRITE | AccessFs::MakeReg } else { Access::EMPTY };
        zone.file.as_deref().map_or(Ok(()), |file| limits.allow_if_there(file, access | made))?;
    }
    limits.allow_console(&config.serial.target())?;
    config.console.as_ref().map_or(Ok(()), |console| limits.allow_console(&console.target()))?;
    for file in config.parts().flat_map(|part| part.files()) {
        limits.allow_file(file, config.platform.iommufd)?;
    }
    for LandlockConfig { path, access } in &config.landlock_rules {
        let read = if access.read { READ } else { Access::EMPTY };
        // All but running a file.
        let write = if access.write { sandbox::known_accesses() & !READ & !AccessFs::Execute } else { Access::EMPTY };
        limits.allow(path, read | write | AccessFs::IoctlDev).map_err(|source| {
            let path = path.display().to_string();
            VmError::File(FileError { field: LandlockConfig::PATH, path, source })
        })?;
    }
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

    /// The same; what is not there is nothing to be reached, as whoever opens it finds, and what was inherited is open.
    fn allow_if_there(&mut self, path: &Path, access: Access) -> Result<(), VmError> {
        if inherited::is_kept(path) {
            return Ok(());
        }
        match self.allow(path, access) {
            Err(error) if matches!(error.kind(), io::ErrorKind::Other) => {
                Err(VmError::Device { what: "making a rule for Landlock", source: error })
            }
            _ => Ok(()),
        }
    }

    /// A socket is to be made at `path`, with what stands beside it.
    fn allow_socket(&mut self, path: &Path) -> Result<(), VmError> {
        if inherited::is_kept(path) { Ok(()) } else { self.allow_if_there(parent(path), SOCKETS) }
    }

    fn allow_console(&mut self, console: &ConsoleTarget<'_>) -> Result<(), VmError> {
        match (console.mode, console.file, console.socket) {
            (ConsoleMode::Pty, ..) => {
                self.allow_if_there(Path::new("/dev/ptmx"), READ | WRITE)?;
                self.allow_if_there(Path::new("/dev/pts"), READ | WRITE)
            }
            (ConsoleMode::File, Some(file), _) => {
                // It is made now, as a rule for a file needs one.
                if fs::symlink_metadata(file).is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
                    let made = output_file::open(fs::File::options().append(true), 0, file);
                    made.map_err(|source| FileError {
                        field: console.file_field(),
                        path: file.display().to_string(),
                        source,
                    })?;
                }
                self.allow_if_there(file, WRITE)
            }
            (ConsoleMode::Socket, _, Some(socket)) => self.allow_socket(socket),
            _ => Ok(()),
        }
    }

    fn allow_file(&mut self, file: HostFile<'_>, iommufd: bool) -> Result<(), VmError> {
        match file {
            HostFile::Read(path) => self.allow_if_there(path, READ),
            HostFile::ReadWrite(path) => self.allow_if_there(path, READ | WRITE),
            HostFile::Socket(path) => self.allow_socket(path),
            HostFile::Interface(name) => {
                if let Some((name, node)) = name.and_then(|name| Some((name, tap::character_device(name)?))) {
                    self.allow_if_there(&Path::new("/sys/class/net").join(name), READ)?;
                    return self.allow_if_there(&node, READ | WRITE);
                }
                self.allow_if_there(Path::new("/dev/net/tun"), READ | WRITE)
            }
            HostFile::Function(path) => self.allow_function(path, iommufd),
        }
    }

    /// A function of the host's: its directory in sysfs, its group, and VFIO's files for it.
    fn allow_function(&mut self, path: &Path, iommufd: bool) -> Result<(), VmError> {
        self.allow_if_there(path, READ)?;
        let group = path.join("iommu_group");
        self.allow_if_there(&group, READ)?;
        let mut files: Vec<PathBuf> = Vec::new();
        if iommufd {
            files.push("/dev/iommu".into());
            let names = fs::read_dir(path.join("vfio-dev")).into_iter().flatten().flatten();
            files.extend(names.map(|entry| Path::new("/dev/vfio/devices").join(entry.file_name())));
        } else {
            files.push("/dev/vfio/vfio".into());
            let number = fs::read_link(&group).ok();
            files.extend(number.as_deref().and_then(Path::file_name).map(|number| Path::new("/dev/vfio").join(number)));
        }
        files.iter().try_for_each(|file| self.allow_if_there(file, READ | WRITE))
    }
}

/// The directory that a file is in.
fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}
