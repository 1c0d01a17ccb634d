// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Locks of images. A lock ends immediately when its process ends or its disk is removed.
//!
//! A lock of an open file description (an OFD lock) ends when nothing refers to the description any more. io_uring refers to a request's
//! description until the request has ended, and a request can outlive its process. Therefore the lock is on a separate description that no
//! request uses. The kernel then releases the lock as soon as the process ends or the disk is removed.
//!
//! After a process has been killed, its requests may still write to the image. Therefore the description that requests use has a *mark*: a
//! lock on a byte beyond the end of any image. The next user takes the lock, then waits until the previous writer's mark is released.
//! Before a user releases its lock, the user waits until its own mark is released. A released mark means that the kernel has closed the
//! file, so the host can unmount the file system.

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

/// First byte that is locked as a mark. The bytes before this byte belong to the image.
const MARKS: i64 = 1 << 62;
/// Maximum time that the next user waits for the requests of a process that has ended.
const LAST_WRITES: Duration = Duration::from_secs(10);
/// Maximum time that the kernel may take to close a file after the last request has ended.
const LAST_CLOSE: Duration = Duration::from_secs(1);
/// Time between two checks of a mark.
const LOOK_AGAIN: Duration = Duration::from_micros(500);

/// Number of read-only images that this process has marked.
static READERS: AtomicI64 = AtomicI64::new(0);

/// Lock of an image. Dropping the value releases the lock. Drop the value after the image's file.
#[derive(Debug)]
pub(super) struct ImageLock {
    file: File,
    read_only: bool,
    /// True if `file` has its own open file description, which no request uses.
    is_own: bool,
    /// Byte that is locked as the mark. `None` if the image has no mark.
    mark: Option<i64>,
}

impl ImageLock {
    /// Locks the first `len` bytes of `image`. `None` locks all bytes that the image can ever have.
    ///
    /// # Errors
    /// Another user has locked the image or still writes to it, or the host rejects the lock.
    pub(super) fn take(image: &File, read_only: bool, len: Option<u64>) -> Result<Self, ImageError> {
        let own = reopen(image.as_fd(), read_only);
        let is_own = own.is_ok();
        let file = own.or_else(|_| image.try_clone())?;
        Self { file, read_only, is_own, mark: None }.taken(len, LAST_WRITES)
    }

    /// Extends this lock to the first `len` bytes, and waits until the last writes of another user have ended. Returns the lock. Fails if
    /// the writes have not ended after `timeout`.
    fn taken(self, len: Option<u64>, timeout: Duration) -> Result<Self, ImageError> {
        self.cover(len)?;
        if self.is_free_within(MARKS, timeout) { Ok(self) } else { Err(ImageError::Writing) }
    }

    /// Extends the lock to the first `len` bytes. `None` means all bytes that the image can ever have.
    ///
    /// # Errors
    /// Another user has locked these bytes, or the host rejects the lock.
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
                    warn!(
                        "the file system of a disk image rejects locks: {error}; make sure that no other process uses the image"
                    );
                    Ok(())
                }
                _ => Err(error.into()),
            },
        }
    }

    /// Sets the mark on the description of `image`. Requests use this description and may outlive the process. If the file system does not
    /// support OFD locks, the image has no mark.
    pub(super) fn mark(&mut self, image: &File) {
        // Without a separate description, the lock itself lasts until the requests have ended, so a mark is not needed.
        if !self.is_own {
            return;
        }
        let byte = if self.read_only { reader_mark() } else { MARKS };
        self.mark = set(image.as_fd(), libc::F_RDLCK, byte, 1).is_ok().then_some(byte);
    }

    /// Waits until the kernel has closed the file of the image. Returns false if the file is still open after `timeout`.
    fn is_closed_within(&self, timeout: Duration) -> bool {
        self.mark.is_none_or(|byte| self.is_free_within(byte, timeout))
    }

    /// Waits until no other description locks `byte`. Returns false if another description still locks `byte` after `timeout`.
    fn is_free_within(&self, byte: i64, timeout: Duration) -> bool {
        let start = Instant::now();
        loop {
            // Read the clock before the check. The thread then checks the byte once more, even if the thread had no CPU until the timeout.
            let is_over = start.elapsed() >= timeout;
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
            log::debug!("the kernel still has an image open after the image's last request has ended");
        }
        // Release the lock explicitly. If the parent process shares the description, a close would not release the lock.
        if let Err(error) = set(self.file.as_fd(), libc::F_UNLCK, 0, 0) {
            log::debug!("cannot release the lock of an image: {error}");
        }
    }
}

/// Opens the same file with a new open file description.
///
/// # Errors
/// `/proc` is not mounted, or the process has no permission to open the file, although the process has a descriptor of the file.
pub(super) fn reopen(file: BorrowedFd<'_>, read_only: bool) -> io::Result<File> {
    let access = if read_only { OFlags::RDONLY } else { OFlags::RDWR };
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok(open(path, access | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC, Mode::empty()).map(File::from)?)
}

/// Returns a byte that no other reader in this PID namespace uses as its mark. A reader in another PID namespace may use the same byte.
/// Then the first of the two readers that releases its lock waits for the mark of the other reader, but at most for [`LAST_CLOSE`].
fn reader_mark() -> i64 {
    let number = READERS.fetch_add(1, Ordering::Relaxed) & 0xff_ffff;
    MARKS + 1 + (i64::from(std::process::id()) << 24 | number)
}

/// Returns the `flock` structure for a lock of `len` bytes from `start` on. A `len` of 0 means up to the maximum file offset.
fn range(kind: i32, start: i64, len: i64) -> libc::flock {
    // SAFETY: All fields of `flock` are integers, so all-zero bytes are a valid `flock`.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = i16::try_from(kind).expect("the constant is small");
    lock.l_whence = i16::try_from(libc::SEEK_SET).expect("the constant is small");
    (lock.l_start, lock.l_len) = (start, len);
    lock
}

/// Sets or releases a lock of `len` bytes from `start` on. Fails if another description has a conflicting lock.
pub(super) fn set(file: BorrowedFd<'_>, kind: i32, start: i64, len: i64) -> io::Result<()> {
    let lock = range(kind, start, len);
    // SAFETY: The descriptor is open, and the kernel only reads the structure that the pointer points to.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Returns true if another description has any lock on this byte.
fn is_locked(file: BorrowedFd<'_>, byte: i64) -> bool {
    let mut lock = range(libc::F_WRLCK, byte, 1);
    // SAFETY: The descriptor is open, and the kernel only reads and writes the structure that the pointer points to.
    let asked = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) };
    asked == 0 && i32::from(lock.l_type) != libc::F_UNLCK
}

/// Returns true if this process has locked the file through another open file description.
fn is_locked_here(file: &File) -> bool {
    let Ok(wanted) = identity(file) else { return false };
    let Ok(numbers) = fs::read_dir("/proc/self/fd") else { return false };
    numbers.flatten().any(|number| {
        let is_same = fs::metadata(number.path()).is_ok_and(|found| (found.dev(), found.ino()) == wanted);
        let information = || fs::read_to_string(Path::new("/proc/self/fdinfo").join(number.file_name()));
        is_same && information().is_ok_and(|text| text.lines().any(|line| line.starts_with("lock:")))
    })
}

/// Returns the device number and the inode number of a file. All links to the file have the same numbers.
///
/// # Errors
/// The host rejects the operation.
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

    /// Timeout that ends a test that hangs.
    const HUNG: Duration = Duration::from_secs(600);

    fn open_again(path: &Path) -> File {
        File::options().read(true).write(true).open(path).unwrap()
    }

    fn image() -> tempfile::NamedTempFile {
        let image = tempfile::NamedTempFile::new().unwrap();
        image.as_file().set_len(4096).unwrap();
        image
    }

    /// Takes the lock of an image and marks the image. Then simulates that the user of the image is killed: only the description that
    /// requests use stays open. Returns this description.
    fn killed(path: &Path, read_only: bool) -> File {
        let requests = open_again(path);
        let mut lock = ImageLock::take(&requests, read_only, Some(4096)).unwrap();
        lock.mark(&requests);
        assert!(matches!(ImageLock::take(&open_again(path), false, None), Err(ImageError::Used { .. })));
        let own = lock.file.as_raw_fd();
        forget(lock);
        // SAFETY: The descriptor is open, and `forget` has prevented the lock that owned the descriptor from closing it.
        drop(unsafe { OwnedFd::from_raw_fd(own) });
        requests
    }

    fn take(path: &Path, timeout: Duration) -> Result<ImageLock, ImageError> {
        let lock = ImageLock { file: open_again(path), read_only: false, is_own: true, mark: None };
        lock.taken(Some(4096), timeout)
    }

    #[test]
    fn killed_users_image_stays_locked_until_its_writes_end() {
        let image = image();
        let requests = killed(image.path(), false);
        let early = take(image.path(), Duration::ZERO).unwrap_err();
        assert!(matches!(early, ImageError::Writing), "{early}");
        let (sender, receiver) = channel();
        let path = image.path().to_path_buf();
        let next = thread::spawn(move || {
            sender.send(()).unwrap();
            take(&path, HUNG).map(drop)
        });
        receiver.recv().unwrap();
        drop(requests);
        next.join().unwrap().unwrap();
    }

    #[test]
    fn reads_of_a_killed_user_do_not_delay_the_next_user() {
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
    fn lock_is_released_when_its_last_request_ends() {
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

    /// Tests the lock of a process that cannot open the file again.
    #[test]
    fn lock_on_a_shared_description_is_released() {
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
    fn locked_image_is_recognised_by_any_link() {
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
    fn lock_of_another_process_is_reported() {
        let image = image();
        let first = open_again(image.path());
        set(first.as_fd(), libc::F_WRLCK, 0, 0).unwrap();
        // After the child process has started, only the child process has the description that holds the lock.
        let mut other = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::from(first)).spawn().unwrap();
        let error = ImageLock::take(&open_again(image.path()), false, None).unwrap_err();
        drop(other.stdin.take());
        other.wait().unwrap();
        assert!(matches!(error, ImageError::Locked { .. }), "{error}");
    }
}
