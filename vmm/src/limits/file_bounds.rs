// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Files that `--landlock` on the command line allows, for every VM of the process.
//!
//! VMs that are restored from a snapshot or configured by an API client may name no other files. The kernel enforces the same limits,
//! except for sockets of servers, because Landlock does not restrict connecting to a socket. So this module compares a VM's file names with
//! the allowed names before the VMM opens the files.

use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::{Path, PathBuf};

use carom_api::Field;
use carom_api::config::{FileAccess, LandlockConfig};
use devices::sandbox;
use landlock::{AccessFs, BitFlags, PathFd, PathFdError, make_bitflags};

use crate::error::VmError;

/// Rights to a file or directory.
pub type Access = BitFlags<AccessFs>;

/// Rights to read an existing file or directory.
pub const READ: Access = make_bitflags!(AccessFs::{ReadFile | ReadDir | IoctlDev});

/// Files that VMs of this process may name.
#[derive(Clone, Debug, Default)]
pub enum FileBounds {
    /// All files: the command line has no `--landlock`.
    #[default]
    All,
    /// The files of the command line's VM, which is the first VM.
    OfFirstVm,
    /// These files, and directories with everything below them.
    These(Vec<(PathBuf, Access)>),
}

impl FileBounds {
    /// Returns the bounds of `--landlock-rules`, for a command line without a VM.
    ///
    /// # Errors
    /// A file is missing, or the host's kernel does not support Landlock.
    pub fn of_rules(rules: &[LandlockConfig]) -> Result<Self, VmError> {
        let known = rules.iter().map(|LandlockConfig { path, access }| {
            let (_, real) = open(path).map_err(VmError::of_file(LandlockConfig::PATH, path))?;
            Ok((real, rule_access(*access)))
        });
        Ok(Self::These(known.collect::<Result<_, VmError>>()?))
    }

    /// True if a VM may use the file at `real` with the rights in `access`. `real` is a path without links.
    pub fn allow(&self, real: &Path, access: Access) -> bool {
        let Self::These(allowed) = self else { return true };
        // Rights of several rules add up, as in the kernel.
        let granted = allowed.iter().filter(|(path, _)| real.starts_with(path));
        granted.fold(Access::EMPTY, |all, (_, access)| all | *access).contains(access)
    }

    /// True if a VM may create the file at `path` and use it with the rights in `access`. A dangling link counts as an existing file,
    /// because a file created through the link could be in a directory that is not allowed.
    pub fn allow_missing(&self, path: &Path, access: Access) -> bool {
        if !self.are_known() {
            return true;
        }
        if fs::symlink_metadata(path).is_ok() {
            return false;
        }
        let (Some(parent), Some(name)) = (parent(path), path.file_name()) else { return false };
        open(parent).is_ok_and(|(_, real)| self.allow(&real.join(name), access))
    }

    /// True if only some files are allowed, and the list of these files exists already.
    pub fn are_known(&self) -> bool {
        matches!(self, Self::These(_))
    }

    /// Returns the allowed files, or no files if their list does not exist.
    pub fn files(&self) -> &[(PathBuf, Access)] {
        if let Self::These(files) = self { files } else { &[] }
    }
}

/// Returns the rights that a rule of the configuration grants.
pub fn rule_access(access: FileAccess) -> Access {
    let read = if access.read { READ } else { Access::EMPTY };
    // All rights except reading and execution.
    let write = if access.write { sandbox::known_accesses() & !READ & !AccessFs::Execute } else { Access::EMPTY };
    read | write | AccessFs::IoctlDev
}

/// Returns the error for a file that `field` names and the command line does not allow.
pub fn beyond(field: Field, path: &Path, access: Access) -> VmError {
    let writes = access.contains(AccessFs::WriteFile) || access.contains(AccessFs::MakeSock);
    let needed = match (access.contains(AccessFs::ReadFile), writes) {
        (true, true) => "rw",
        (true, false) => "r",
        (false, _) => "w",
    };
    let text = format!(
        "--landlock on the command line does not allow this file; remove the file from the configuration, or start carom with \
         --landlock-rules path=FILE,access={needed}"
    );
    VmError::of_file(field, path)(io::Error::other(text))
}

/// Opens a file or directory for a rule. Returns the opened file, and the file's path without links.
pub fn open(path: &Path) -> io::Result<(PathFd, PathBuf)> {
    let opened = PathFd::new(path).map_err(|error| match error {
        PathFdError::OpenCall { source, .. } => source,
        error => io::Error::other(error),
    })?;
    let real = real_path(opened.as_fd())?;
    Ok((opened, real))
}

/// Returns the path of an opened file, without symbolic links.
pub fn real_path(file: BorrowedFd<'_>) -> io::Result<PathBuf> {
    fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// Returns the directory of a file.
pub fn parent(path: &Path) -> Option<&Path> {
    path.parent().map(|parent| if parent.as_os_str().is_empty() { Path::new(".") } else { parent })
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn names_are_compared_without_links_and_by_whole_parts() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        for name in ["in", "in/sub", "inner"] {
            fs::create_dir(at(name)).unwrap();
        }
        for name in ["in/sub/file", "inner/file"] {
            File::create(at(name)).unwrap();
        }
        symlink(at("inner/file"), at("in/out")).unwrap();
        symlink(at("in"), at("link")).unwrap();
        symlink(at("inner/none"), at("in/dangling")).unwrap();
        let rule = |access: &str| LandlockConfig { path: at("link"), access: access.parse().unwrap() };
        let bounds = FileBounds::of_rules(&[rule("r")]).unwrap();
        let may = |name: &str, access: AccessFs| {
            open(&at(name)).map_or_else(
                |_| bounds.allow_missing(&at(name), access.into()),
                |(_, real)| bounds.allow(&real, access.into()),
            )
        };
        let read = AccessFs::ReadFile;
        assert!(may("in/sub/file", read) && may("link/sub/file", read) && may("in/new", read));
        assert!(may("in/sub/../sub/file", read) && !may("in/sub/../../inner/file", read));
        for name in ["inner/file", "in/out", "inner/new", "in/../inner/new", "in/none/new", "in/..", "in/dangling"] {
            assert!(!may(name, read), "{name}");
        }
        assert!(!may("in/sub/file", AccessFs::WriteFile) && !bounds.allow_missing(Path::new("/"), read.into()));
        // Rights of two rules for a file add up.
        let bounds = FileBounds::of_rules(&[rule("r"), rule("w")]).unwrap();
        let (_, real) = open(&at("in/sub/file")).unwrap();
        assert!(bounds.allow(&real, read | AccessFs::WriteFile) && !bounds.allow(&real, AccessFs::Execute.into()));
    }

    #[test]
    fn without_bounds_each_file_is_allowed() {
        for bounds in [FileBounds::All, FileBounds::OfFirstVm] {
            assert!(bounds.allow(Path::new("/x"), AccessFs::WriteFile.into()));
            assert!(bounds.allow_missing(Path::new("/no/such"), AccessFs::WriteFile.into()));
            assert_eq!(bounds.files(), []);
        }
    }

    #[test]
    fn rule_for_a_missing_file_is_refused_by_name() {
        let rule = LandlockConfig { path: "/no/such".into(), access: "r".parse().unwrap() };
        let error = FileBounds::of_rules(&[rule]).unwrap_err().to_string();
        assert!(error.starts_with("--landlock-rules /no/such: No such file"), "{error}");
    }
}
