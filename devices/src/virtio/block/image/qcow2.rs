// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! qcow2 images and their backing files. The crate `imago` implements the format. This module decides which images may be opened, and turns
//! the crate's errors into error numbers.
//!
//! Each operation runs to its end in the thread that starts the operation. Threads of several queues can run operations at the same time.
//! Discards and resizes run alone, because they change tables that other operations use.

use std::fs::File;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use imago::FormatAccess;
use imago::file::File as Storage;
use imago::format::PreallocateMode;
use imago::io_buffers::{IoVector, IoVectorMut};
use imago::qcow2::Qcow2;
use imago::raw::Raw;
use log::{error, warn};

use super::backing::{self, Backing};
use super::error::ImageError;
use super::host_file;
use super::lock::{ImageLock, identity};
use super::op::{Buffers, Op};
use super::qcow2_header::{self, Header};
use super::qcow2_storage::{L1Table, Ordered};
use crate::file_size;
use crate::sync::lock;
use crate::throttle::Throttle;

type Access = FormatAccess<Ordered>;

/// Maximum number of images in a chain. A chain consists of an image and all its backing files.
const MOST_IMAGES: usize = 64;

/// Options for opening an image and its backing files.
#[derive(Clone, Copy, Debug)]
pub(super) struct ChainOptions {
    pub(super) writable: bool,
    /// True to allow backing files.
    pub(super) backing_files: bool,
    pub(super) direct: bool,
}

/// Opened image and its opened backing files.
#[derive(Debug)]
pub(in crate::virtio::block) struct Qcow2Image {
    /// `None` after the crate `imago` has panicked. All operations then fail, and nothing is written to the image.
    access: RwLock<Option<Access>>,
    file: File,
    l1: Arc<Mutex<L1Table>>,
    /// True if the image has a backing file.
    backed: bool,
    /// Size of a cluster in bytes.
    cluster: u32,
    throttle: Throttle,
    /// Locks of the backing files. Dropped after the fields that read these files.
    _locks: Vec<ImageLock>,
}

impl Qcow2Image {
    /// Opens the image in `file`, which is already locked. Opens and locks the backing files of the image. Relative paths of backing files
    /// start at the directory of `path`.
    ///
    /// # Errors
    /// The image cannot be used. The [`ImageError`] states the reason.
    pub(super) fn open(file: &File, path: &Path, options: ChainOptions) -> Result<Self, ImageError> {
        let Header { cluster, l1 } = qcow2_header::check(file, options.writable)?;
        let l1 = Arc::new(Mutex::new(L1Table::at(l1)));
        host_file::set_flags(file, options.direct)?;
        let mut locks = Vec::new();
        let open = || open_chain(file, l1.clone(), path, options, &mut Vec::new(), &mut locks);
        let opened = catch_unwind(AssertUnwindSafe(open));
        let (access, backed) = opened.map_err(|_| {
            ImageError::Malformed("the image's tables are inconsistent; check the image with qemu-img check".into())
        })??;
        let (access, file) = (RwLock::new(Some(access)), file.try_clone()?);
        Ok(Self { access, file, l1, backed, cluster, throttle: Throttle::default(), _locks: locks })
    }

    /// Returns the size of the disk in bytes.
    pub(super) fn size(&self) -> u64 {
        self.with(|access| Ok(access.size())).unwrap_or(0)
    }

    /// Returns the size of a cluster in bytes. A cluster is the smallest unit that a discard deallocates.
    pub(super) fn cluster(&self) -> u32 {
        self.cluster
    }

    /// Changes the size of the disk.
    ///
    /// # Errors
    /// The host cannot resize the image, or the image's version does not support a resize.
    pub(super) fn resize(&self, bytes: u64) -> io::Result<()> {
        // The backing file may be longer than the disk. Fill the added range with zeroes, so that the guest does not see old bytes of the
        // backing file there.
        let fill = if self.backed { PreallocateMode::Zero } else { PreallocateMode::None };
        self.alone(|access| {
            access.flush()?;
            access.resize(bytes, fill)?;
            access.flush()?;
            access.sync()?;
            // The resize may have enlarged and moved the L1 table, so read its position again.
            let header = qcow2_header::check(&self.file, true).map_err(io::Error::other)?;
            *lock(&self.l1) = L1Table::at(header.l1);
            Ok(())
        })
    }

    /// Writes cached tables to the file.
    ///
    /// # Errors
    /// The host cannot write the file.
    pub(super) fn flush(&self) -> io::Result<()> {
        self.with(Access::flush)
    }

    /// Runs an operation. Returns the number of bytes that were read or written, or a negative error number.
    ///
    /// # Safety
    /// The buffers are valid, and nothing else accesses them until this function returns.
    pub(in crate::virtio::block) unsafe fn run(&self, op: &Op) -> i32 {
        let result = match *op {
            Op::Read { buffers, offset } => self.with(|access| {
                // SAFETY: The caller guarantees what `writable` requires.
                access.readv(unsafe { writable(buffers) }, offset).map(|()| bytes_of(buffers))
            }),
            Op::Write { buffers, offset } => self.with(|access| {
                // SAFETY: As above.
                access.writev(unsafe { readable(buffers) }, offset).map(|()| bytes_of(buffers))
            }),
            Op::Allocate { mode, offset, len } if mode & libc::FALLOC_FL_PUNCH_HOLE != 0 => {
                self.alone(|access| access.discard_to_zero(offset, len).map(|()| 0))
            }
            Op::Allocate { offset, len, .. } => self.with(|access| access.write_zeroes(offset, len).map(|()| 0)),
            Op::Sync => self.with(|access| access.flush().and_then(|()| access.sync()).map(|()| 0)),
        };
        result.map_or_else(|error| -self.number(&error), |bytes| i32::try_from(bytes).unwrap_or(i32::MAX))
    }

    /// Returns the error number for `error`. Logs the error, unless the operation is unsupported.
    fn number(&self, error: &io::Error) -> i32 {
        let number = error.raw_os_error().unwrap_or(match error.kind() {
            io::ErrorKind::Unsupported => libc::EOPNOTSUPP,
            io::ErrorKind::StorageFull => libc::ENOSPC,
            _ => libc::EIO,
        });
        if number != libc::EOPNOTSUPP && self.throttle.pass() {
            warn!("a request to the qcow2 image of a disk failed: {error}{}", file_size::hint(error));
        }
        number
    }

    fn with<R>(&self, work: impl FnOnce(&Access) -> io::Result<R>) -> io::Result<R> {
        let done = {
            let access = self.access.read().unwrap_or_else(PoisonError::into_inner);
            let access = access.as_ref().ok_or_else(given_up)?;
            catch_unwind(AssertUnwindSafe(|| work(access)))
        };
        done.unwrap_or_else(|_| Err(self.give_up()))
    }

    fn alone<R>(&self, work: impl FnOnce(&mut Access) -> io::Result<R>) -> io::Result<R> {
        let done = {
            let mut access = self.access.write().unwrap_or_else(PoisonError::into_inner);
            let access = access.as_mut().ok_or_else(given_up)?;
            catch_unwind(AssertUnwindSafe(|| work(access)))
        };
        done.unwrap_or_else(|_| Err(self.give_up()))
    }

    /// Stops using the image. Cached tables are not written, so the file does not change any more.
    fn give_up(&self) -> io::Error {
        if let Some(access) = self.access.write().unwrap_or_else(PoisonError::into_inner).take() {
            error!(
                "the qcow2 image of a disk has inconsistent tables: all further requests to the disk fail; check the image with qemu-img check"
            );
            // Dropping `access` would write its cached tables.
            std::mem::forget(access);
        }
        given_up()
    }
}

fn given_up() -> io::Error {
    io::Error::other("the image's tables are inconsistent; check the image with qemu-img check")
}

fn bytes_of(buffers: Buffers) -> usize {
    // SAFETY: The list is valid, and only its lengths are read.
    let list = unsafe { std::slice::from_raw_parts(buffers.first, buffers.count) };
    list.iter().map(|buffer| buffer.iov_len).sum()
}

/// # Safety
/// The buffers are valid while the result lives, and nothing else accesses them.
unsafe fn writable<'b>(buffers: Buffers) -> IoVectorMut<'b> {
    let mut vector = IoVectorMut::with_capacity(buffers.count);
    // SAFETY: The caller guarantees that the list is valid.
    for buffer in unsafe { std::slice::from_raw_parts(buffers.first, buffers.count) } {
        if buffer.iov_len != 0 {
            // SAFETY: As above.
            vector.push(unsafe { std::slice::from_raw_parts_mut(buffer.iov_base.cast::<u8>(), buffer.iov_len) });
        }
    }
    vector
}

/// # Safety
/// The buffers are valid while the result lives, and nothing writes to them.
unsafe fn readable<'b>(buffers: Buffers) -> IoVector<'b> {
    let mut vector = IoVector::with_capacity(buffers.count);
    // SAFETY: The caller guarantees that the list is valid.
    for buffer in unsafe { std::slice::from_raw_parts(buffers.first, buffers.count) } {
        if buffer.iov_len != 0 {
            // SAFETY: As above.
            vector.push(unsafe { std::slice::from_raw_parts(buffer.iov_base.cast::<u8>(), buffer.iov_len) });
        }
    }
    vector
}

/// Opens the image in `file` and its backing files. The caller must have checked the image's header. The chain may have at most
/// [`MOST_IMAGES`] images. `chain` contains the identities of the images that were opened before. Adds the locks of the backing files to
/// `locks`. Returns the access to the chain, and true if the image has a backing file.
fn open_chain(
    file: &File,
    l1: Arc<Mutex<L1Table>>,
    path: &Path,
    options: ChainOptions,
    chain: &mut Vec<(u64, u64)>,
    locks: &mut Vec<ImageLock>,
) -> Result<(Access, bool), ImageError> {
    chain.push(identity(file)?);
    let malformed = |error: io::Error| ImageError::Malformed(error.to_string());
    let storage = Ordered::new(Storage::try_from(file.try_clone()?)?, l1);
    let mut image: Qcow2<Ordered> = Qcow2::open_image(storage, options.writable).map_err(malformed)?;
    if image.requires_external_data_file() {
        return Err(ImageError::Malformed(
            "the image has an external data file, which is not supported; copy the image with qemu-img convert".into(),
        ));
    }
    image.set_data_file(None);
    let backing = match image.implicit_backing_file() {
        None => None,
        Some(name) if !options.backing_files => return Err(ImageError::BackingFile(name.clone())),
        Some(name) => {
            let format = image.implicit_backing_format().map(String::as_str);
            let behind = backing::path(path, name);
            let opened = open_backing(&behind, format, options, chain, locks);
            Some(opened.map_err(|error| ImageError::Behind { path: behind, error: Box::new(error) })?)
        }
    };
    let backed = backing.is_some();
    image.set_backing(backing);
    Ok((Access::new(image), backed))
}

fn open_backing(
    path: &Path,
    format: Option<&str>,
    options: ChainOptions,
    chain: &mut Vec<(u64, u64)>,
    locks: &mut Vec<ImageLock>,
) -> Result<Access, ImageError> {
    if chain.len() == MOST_IMAGES {
        return Err(ImageError::Malformed(format!(
            "the chain of backing files has more than {MOST_IMAGES} images; shorten it with qemu-img rebase"
        )));
    }
    let Backing { file, is_qcow2, lock } = backing::open(path, format, options.direct)?;
    if chain.contains(&identity(&file)?) {
        return Err(ImageError::Malformed(
            "the image is its own backing file; correct the image with qemu-img rebase -u".into(),
        ));
    }
    locks.push(lock);
    if is_qcow2 {
        let options = ChainOptions { writable: false, ..options };
        return open_chain(&file, Arc::default(), path, options, chain, locks).map(|(access, _)| access);
    }
    let raw = Raw::open_image(Ordered::new(Storage::try_from(file)?, Arc::default()), false)?;
    Ok(Access::new(raw))
}
