// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Files that this process creates and writes for its user: the log, events, and console output.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use devices::inherited::{self, Access};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::process::geteuid;

/// Opens the file at `path`, or creates it with access for this user only. `flags` are further flags of open(2). If `path` names an
/// inherited descriptor of a file or pipe, returns a duplicate of the descriptor, and ignores `options` and `flags`.
///
/// A symbolic link is followed only if this user or root owns the link. (Root owns `/dev/stdout`, for example.) Another user's link could
/// lead to a file that this user can write, but the link's owner cannot. (The kernel has the same rule for directories like `/tmp`:
/// `fs.protected_symlinks`.)
///
/// Opening does not wait for a FIFO's reader or a terminal's carrier. A terminal does not become the controlling terminal of this process.
/// Later writes to the file may block, unless `flags` has `O_NONBLOCK`.
///
/// # Errors
/// Another user owns the link, a FIFO has no reader, or the file cannot be opened.
pub fn open(options: &mut OpenOptions, flags: i32, path: &Path) -> io::Result<File> {
    if let Some(inherited) = inherited::file(path, Access::Append) {
        return inherited;
    }
    let file = open_at_once(options, flags | libc::O_NONBLOCK | libc::O_NOCTTY, path).map_err(|error| {
        let is_fifo = || path.metadata().is_ok_and(|metadata| metadata.file_type().is_fifo());
        if error.raw_os_error() == Some(libc::ENXIO) && is_fifo() {
            return io::Error::other("the FIFO has no reader; start the reader first");
        }
        error
    })?;
    if flags & libc::O_NONBLOCK == 0 {
        fcntl_setfl(&file, fcntl_getfl(&file)? - OFlags::NONBLOCK)?;
    }
    Ok(file)
}

fn open_at_once(options: &mut OpenOptions, flags: i32, path: &Path) -> io::Result<File> {
    options.create(true).mode(0o600);
    match options.custom_flags(flags | libc::O_NOFOLLOW).open(path) {
        Err(error) if error.raw_os_error() == Some(libc::ELOOP) => {
            let owner = fs::symlink_metadata(path)?.uid();
            if owner != 0 && owner != geteuid().as_raw() {
                return Err(io::Error::other(format!(
                    "the symbolic link belongs to another user (ID {owner}): give the path of the file itself"
                )));
            }
            options.custom_flags(flags).open(path)
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::{PermissionsExt, lchown, symlink};

    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    fn append(path: &Path) -> io::Result<File> {
        open(File::options().append(true), 0, path)
    }

    #[test]
    fn new_file_is_owner_only_and_an_existing_one_is_appended_to() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        append(&path).unwrap().write_all(b"one").unwrap();
        let mode = || fs::metadata(&path).unwrap().permissions().mode() & 0o7777;
        assert_eq!(mode(), 0o600);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        append(&path).unwrap().write_all(b"two").unwrap();
        assert_eq!((mode(), fs::read(&path).unwrap().as_slice()), (0o640, b"onetwo".as_slice()));
    }

    #[test]
    fn fifo_needs_a_reader_and_is_written_with_waiting() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("fifo");
        mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        let error = append(&path).unwrap_err();
        assert_eq!(error.to_string(), "the FIFO has no reader; start the reader first");
        let _reader = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(&path).unwrap();
        for (flags, waits) in [(0, true), (libc::O_NONBLOCK, false)] {
            let file = open(File::options().append(true), flags, &path).unwrap();
            assert_eq!(fcntl_getfl(&file).unwrap().contains(OFlags::NONBLOCK), !waits);
        }
    }

    #[test]
    fn link_is_followed_if_it_is_this_users_or_roots() {
        let dir = tempfile::tempdir().unwrap();
        let (target, link) = (dir.path().join("target"), dir.path().join("link"));
        symlink(&target, &link).unwrap();
        append(&link).unwrap().write_all(b"x").unwrap();
        assert_eq!(fs::read(&target).unwrap(), b"x");
        assert!(append(Path::new("/dev/stderr")).is_ok());
        if !geteuid().is_root() {
            eprintln!("not tested: only root can give a link to another user");
            return;
        }
        lchown(&link, Some(65534), None).unwrap();
        let error = append(&link).unwrap_err().to_string();
        assert_eq!(error, "the symbolic link belongs to another user (ID 65534): give the path of the file itself");
        assert_eq!(fs::read(&target).unwrap(), b"x");
    }
}
