// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Locks of images: they end with the process, or with the device, and not a moment later.
//!
//! A lock of an open file description (an OFD lock) ends when nothing refers to the description any more. io_uring refers to the one that a
//! request uses until the request has ended, which may be after the process has. So the lock is on a description of its own, which no
//! request uses: it is free as soon as the process has ended, or the disk was removed.
//!
//! Requests of a process that was killed may still write to the image then. The description that requests use has a *mark*, a lock
//! on a byte that no image has. The next user takes the lock, and waits until the mark of the last writer is gone. A user that gives its lock
//! back waits for the end of its own mark first: the kernel has closed the file then, and its file system can be unmounted.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicI64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use log::warn;
use rustix::fs::{Mode, OFlags, open};

use super::error::ImageError;

/// First byte that is locked as a mark. Bytes before it are those of the image.
const MARKS: i64 = 1 << 62;
/// How long requests of a process that has ended may keep the next user of the image waiting.
const LAST_WRITES: Duration = Duration::from_secs(10);
/// How long the kernel may take to close a file after the last request to it has ended.
const LAST_CLOSE: Duration = Duration::from_secs(1);
/// Time between two looks at a mark.
const LOOK_AGAIN: Duration = Duration::from_micros(500);

/// Number of images that were opened to be read.
static READERS: AtomicI64 = AtomicI64::new(0);

/// A lock, until it is dropped. Drop it after the file that it is of.
#[derive(Debug)]
pub(super) struct ImageLock {
    file: File,
    read_only: bool,
    /// No request uses the description of `file`.
    is_own: bool,
    /// Byte that is locked by the description which requests use, if there is one.
    mark: Option<i64>,
}

impl ImageLock {
    /// Locks the first `len` bytes of `image`, or all that it may ever have if that is `None`.
    ///
    /// # Errors
    /// Another process uses the image, or the host refuses.
    pub(super) fn take(image: &File, read_only: bool, len: Option<u64>) -> Result<Self, ImageError> {
        let own = reopen(image.as_fd(), read_only);
        let is_own = own.is_ok();
        let file = own.or_else(|_| image.try_clone())?;
        Self { file, read_only, is_own, mark: None }.taken(len, LAST_WRITES)
    }

    /// This, once it covers `len` bytes and the last writes of another user have ended.
    fn taken(self, len: Option<u64>, patience: Duration) -> Result<Self, ImageError> {
        self.cover(len)?;
        if self.is_free_within(MARKS, patience) { Ok(self) } else { Err(ImageError::Writing) }
    }

    /// Locks the first `len` bytes, or all that there may ever be: more than before.
    ///
    /// # Errors
    /// Another process uses these, or the host refuses.
    pub(super) fn cover(&self, len: Option<u64>) -> Result<(), ImageError> {
        let kind = if self.read_only { libc::F_RDLCK } else { libc::F_WRLCK };
        let len = len.and_then(|len| i64::try_from(len).ok()).filter(|len| (1..MARKS).contains(len)).unwrap_or(MARKS);
        match set(self.file.as_fd(), kind, 0, len) {
            Ok(()) => Ok(()),
            Err(error) => match error.raw_os_error() {
                Some(libc::EAGAIN | libc::EACCES) if is_locked_here(&self.file) => {
                    Err(ImageError::Used { read_only: self.read_only })
                }
                Some(libc::EAGAIN | libc::EACCES) => Err(ImageError::Locked { read_only: self.read_only }),
                Some(libc::ENOLCK | libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL) => {
                    warn!("an image cannot be locked, so that nothing keeps others from using it: {error}");
                    Ok(())
                }
                _ => Err(error.into()),
            },
        }
    }

    /// Marks the description of `image`, which requests use that may outlive the process. A file system without such locks has no marks.
    pub(super) fn mark(&mut self, image: &File) {
        // The lock itself lasts as long as requests do.
        if !self.is_own {
            return;
        }
        let byte = if self.read_only { reader_mark() } else { MARKS };
        self.mark = set(image.as_fd(), libc::F_RDLCK, byte, 1).is_ok().then_some(byte);
    }

    /// Waits until the kernel has closed the file of the image; `false` if it has not after `patience`.
    fn is_closed_within(&self, patience: Duration) -> bool {
        self.mark.is_none_or(|byte| self.is_free_within(byte, patience))
    }

    /// Waits until no other description has this byte locked; `false` if one has after `patience`.
    fn is_free_within(&self, byte: i64, patience: Duration) -> bool {
        let start = Instant::now();
        loop {
            // Before the look: this thread may have had no CPU for longer than `patience`.
            let is_over = start.elapsed() >= patience;
            if !is_locked(self.file.as_fd(), byte) {
                return true;
            }
            if is_over {
                return false;
            }
            thread::sleep(LOOK_AGAIN);
        }
    }
}

impl Drop for ImageLock {
    fn drop(&mut self) {
        if !self.is_closed_within(LAST_CLOSE) {
            log::debug!("an image is open still after its last request has ended");
        }
        // The parent process may have the same description, which keeps locks until they are given back.
        if let Err(error) = set(self.file.as_fd(), libc::F_UNLCK, 0, 0) {
            log::debug!("giving the lock of an image back: {error}");
        }
    }
}

/// The same file by another open file description.
///
/// # Errors
/// The process may not open the file, which it was given by its descriptor, or there is no `/proc`.
pub(super) fn reopen(file: BorrowedFd<'_>, read_only: bool) -> io::Result<File> {
    let access = if read_only { OFlags::RDONLY } else { OFlags::RDWR };
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok(open(path, access | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC, Mode::empty()).map(File::from)?)
}

/// A byte that no other reader has as its mark, unless it is in another PID namespace.
fn reader_mark() -> i64 {
    let number = READERS.fetch_add(1, Ordering::Relaxed) & 0xff_ffff;
    MARKS + 1 + (i64::from(std::process::id()) << 24 | number)
}

/// A lock of `len` bytes from `start` on, to the end of all if that is 0.
fn range(kind: i32, start: i64, len: i64) -> libc::flock {
    // SAFETY: All of its fields are numbers.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = i16::try_from(kind).expect("a small number");
    lock.l_whence = i16::try_from(libc::SEEK_SET).expect("a small number");
    (lock.l_start, lock.l_len) = (start, len);
    lock
}

/// Sets or gives back a lock of `len` bytes from `start` on. It fails where another description has one in its way.
pub(super) fn set(file: BorrowedFd<'_>, kind: i32, start: i64, len: i64) -> io::Result<()> {
    let lock = range(kind, start, len);
    // SAFETY: The descriptor is open, and the kernel reads the structure that the pointer leads to.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// True if another description has locked this byte in any way.
fn is_locked(file: BorrowedFd<'_>, byte: i64) -> bool {
    let mut lock = range(libc::F_WRLCK, byte, 1);
    // SAFETY: The descriptor is open, and the kernel writes to the structure that the pointer leads to.
    let asked = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) };
    asked == 0 && i32::from(lock.l_type) != libc::F_UNLCK
}

/// True if this process has the file open by another description too, and has locked it by that one.
fn is_locked_here(file: &File) -> bool {
    let Ok(wanted) = identity(file) else { return false };
    let Ok(numbers) = fs::read_dir("/proc/self/fd") else { return false };
    numbers.flatten().any(|number| {
        let is_same = fs::metadata(number.path()).is_ok_and(|found| (found.dev(), found.ino()) == wanted);
        let information = || fs::read_to_string(Path::new("/proc/self/fdinfo").join(number.file_name()));
        is_same && information().is_ok_and(|text| text.lines().any(|line| line.starts_with("lock:")))
    })
}

/// Device and inode, which links to one file have in common.
///
/// # Errors
/// The host refuses.
pub(super) fn identity(file: &File) -> io::Result<(u64, u64)> {
    file.metadata().map(|metadata| (metadata.dev(), metadata.ino()))
}

#[cfg(test)]
mod tests {
    use std::mem::forget;
    use std::os::fd::{FromRawFd, OwnedFd};
    use std::process::{Command, Stdio};
    use std::sync::mpsc::channel;

    use super::*;

    /// Ends a test that hangs.
    const HUNG: Duration = Duration::from_secs(600);

    fn open_again(path: &Path) -> File {
        File::options().read(true).write(true).open(path).unwrap()
    }

    fn image() -> tempfile::NamedTempFile {
        let image = tempfile::NamedTempFile::new().unwrap();
        image.as_file().set_len(4096).unwrap();
        image
    }

    /// Takes the lock of an image and marks it. Then its user is killed, and only `requests` are left.
    fn killed(path: &Path, read_only: bool) -> File {
        let requests = open_again(path);
        let mut lock = ImageLock::take(&requests, read_only, Some(4096)).unwrap();
        lock.mark(&requests);
        assert!(matches!(ImageLock::take(&open_again(path), false, None), Err(ImageError::Used { .. })));
        let own = lock.file.as_raw_fd();
        forget(lock);
        // SAFETY: The descriptor is open, and its owner is gone.
        drop(unsafe { OwnedFd::from_raw_fd(own) });
        requests
    }

    fn take(path: &Path, patience: Duration) -> Result<ImageLock, ImageError> {
        let lock = ImageLock { file: open_again(path), read_only: false, is_own: true, mark: None };
        lock.taken(Some(4096), patience)
    }

    #[test]
    fn killed_users_image_stays_locked_until_its_writes_end() {
        let image = image();
        let requests = killed(image.path(), false);
        let early = take(image.path(), Duration::ZERO).unwrap_err();
        assert!(matches!(early, ImageError::Writing), "{early}");
        let (tell, told) = channel();
        let path = image.path().to_path_buf();
        let next = thread::spawn(move || {
            tell.send(()).unwrap();
            take(&path, HUNG).map(drop)
        });
        told.recv().unwrap();
        drop(requests);
        next.join().unwrap().unwrap();
    }

    #[test]
    fn reads_of_a_killed_user_keep_nobody_waiting() {
        let image = image();
        let _requests = killed(image.path(), true);
        take(image.path(), Duration::ZERO).unwrap();
    }

    #[test]
    fn readers_do_not_wait_for_each_other() {
        let image = image();
        let readers = [0, 1].map(|_| {
            let file = open_again(image.path());
            let mut lock = ImageLock::take(&file, true, None).unwrap();
            lock.mark(&file);
            (file, lock)
        });
        let [(first, lock), _second] = readers;
        drop(first);
        assert!(lock.is_free_within(lock.mark.unwrap(), Duration::ZERO));
    }

    #[test]
    fn lock_is_given_back_when_its_file_is_closed_for_good() {
        let image = image();
        let file = open_again(image.path());
        let mut lock = ImageLock::take(&file, false, Some(4096)).unwrap();
        lock.mark(&file);
        assert!(!lock.is_closed_within(Duration::ZERO));
        let request = file.try_clone().unwrap();
        drop(file);
        assert!(!lock.is_closed_within(Duration::ZERO));
        let ending = thread::spawn(move || drop(request));
        assert!(lock.is_closed_within(HUNG));
        ending.join().unwrap();
        drop(lock);
        set(open_again(image.path()).as_fd(), libc::F_WRLCK, 0, 0).unwrap();
    }

    /// As where the process may not open the file.
    #[test]
    fn lock_on_a_shared_description_is_given_back_too() {
        let image = image();
        let parents = open_again(image.path());
        let lock = ImageLock { file: parents.try_clone().unwrap(), read_only: false, is_own: false, mark: None };
        let mut lock = lock.taken(None, Duration::ZERO).unwrap();
        lock.mark(&parents);
        assert_eq!(lock.mark, None);
        assert!(matches!(take(image.path(), Duration::ZERO), Err(ImageError::Used { .. })));
        drop(lock);
        take(image.path(), Duration::ZERO).unwrap();
    }

    #[test]
    fn image_of_this_process_is_known_by_any_link() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        fs::write(&path, [0; 512]).unwrap();
        let (link, hard_link) = (dir.path().join("link"), dir.path().join("hard"));
        std::os::unix::fs::symlink(&path, &link).unwrap();
        fs::hard_link(&path, &hard_link).unwrap();
        let first = ImageLock::take(&open_again(&path), false, None).unwrap();
        for path in [&path, &link, &hard_link] {
            for read_only in [false, true] {
                let error = ImageLock::take(&open_again(path), read_only, None).unwrap_err();
                assert!(matches!(error, ImageError::Used { .. }), "{}: {error}", path.display());
                assert!(error.to_string().starts_with("is already used by this VM"), "{error}");
            }
        }
        drop(first);
        ImageLock::take(&open_again(&hard_link), false, None).unwrap();
    }

    #[test]
    fn lock_of_another_process_is_told_as_such() {
        let image = image();
        let first = open_again(image.path());
        set(first.as_fd(), libc::F_WRLCK, 0, 0).unwrap();
        // The description with the lock is the child's alone once this process has started it.
        let mut other = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::from(first)).spawn().unwrap();
        let error = ImageLock::take(&open_again(image.path()), false, None).unwrap_err();
        drop(other.stdin.take());
        other.wait().unwrap();
        assert!(matches!(error, ImageError::Locked { .. }), "{error}");
    }
}
