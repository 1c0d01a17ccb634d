// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! qcow2 images, with those behind them. The format itself is the crate `imago`'s; here is what may be opened, and what becomes of errors.
//!
//! An operation runs to its end in the thread that begins it. Threads of several queues run theirs side by side, but for discards and new
//! sizes: what others find in the tables must not change under them.

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

/// Most images, one behind the other.
const MOST_IMAGES: usize = 64;

/// What of an image is to be opened.
#[derive(Clone, Copy, Debug)]
pub(super) struct ChainOptions {
    pub(super) writable: bool,
    /// There may be others behind it.
    pub(super) backing_files: bool,
    pub(super) direct: bool,
}

/// An image that is open, with all behind it.
#[derive(Debug)]
pub(in crate::virtio::block) struct Qcow2Image {
    /// `None` after the crate has failed an assertion: nothing is told of the image's tables then, and nothing is written to it.
    access: RwLock<Option<Access>>,
    file: File,
    l1: Arc<Mutex<L1Table>>,
    /// It has an image behind it.
    backed: bool,
    /// Bytes of a cluster.
    cluster: u32,
    throttle: Throttle,
    /// Of the images behind it. Dropped after all that these are read by.
    _locks: Vec<ImageLock>,
}

impl Qcow2Image {
    /// Opens the image in `file`, which is locked, and those behind it, which get locked: their paths are relative to `path`.
    ///
    /// # Errors
    /// Why it cannot be used.
    pub(super) fn open(file: &File, path: &Path, options: ChainOptions) -> Result<Self, ImageError> {
        let Header { cluster, l1 } = qcow2_header::check(file, options.writable)?;
        let l1 = Arc::new(Mutex::new(L1Table::at(l1)));
        host_file::set_flags(file, options.direct)?;
        let mut locks = Vec::new();
        let open = || open_chain(file, l1.clone(), path, options, &mut Vec::new(), &mut locks);
        let opened = catch_unwind(AssertUnwindSafe(open));
        let (access, backed) = opened.map_err(|_| ImageError::Malformed("its tables are not sound".into()))??;
        let (access, file) = (RwLock::new(Some(access)), file.try_clone()?);
        Ok(Self { access, file, l1, backed, cluster, throttle: Throttle::default(), _locks: locks })
    }

    /// Bytes of the disk.
    pub(super) fn size(&self) -> u64 {
        self.with(|access| Ok(access.size())).unwrap_or(0)
    }

    /// Bytes of a cluster, the least that a discard gives back.
    pub(super) fn cluster(&self) -> u32 {
        self.cluster
    }

    /// Gives the disk another size.
    ///
    /// # Errors
    /// The host cannot do it, or the image is too old for it.
    pub(super) fn resize(&self, bytes: u64) -> io::Result<()> {
        // What is behind it may be longer, and must not come to light.
        let fill = if self.backed { PreallocateMode::Zero } else { PreallocateMode::None };
        self.alone(|access| {
            access.flush()?;
            access.resize(bytes, fill)?;
            access.flush()?;
            access.sync()?;
            // It may have grown, and moved.
            let header = qcow2_header::check(&self.file, true).map_err(io::Error::other)?;
            *lock(&self.l1) = L1Table::at(header.l1);
            Ok(())
        })
    }

    /// Writes to the file what of its tables is in this process only.
    ///
    /// # Errors
    /// The host cannot do it.
    pub(super) fn flush(&self) -> io::Result<()> {
        self.with(Access::flush)
    }

    /// Runs an operation: bytes, or a negative error number.
    ///
    /// # Safety
    /// The buffers are there, and nobody else accesses them meanwhile.
    pub(in crate::virtio::block) unsafe fn run(&self, op: &Op) -> i32 {
        let result = match *op {
            Op::Read { buffers, offset } => self.with(|access| {
                // SAFETY: The caller's promise is what is asked for.
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

    /// What the guest's request fails with.
    fn number(&self, error: &io::Error) -> i32 {
        let number = error.raw_os_error().unwrap_or(match error.kind() {
            io::ErrorKind::Unsupported => libc::EOPNOTSUPP,
            io::ErrorKind::StorageFull => libc::ENOSPC,
            _ => libc::EIO,
        });
        if number != libc::EOPNOTSUPP && self.throttle.pass() {
            warn!("a qcow2 image: {error}{}", file_size::hint(error));
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

    /// From here on the image stays as it is.
    fn give_up(&self) -> io::Error {
        if let Some(access) = self.access.write().unwrap_or_else(PoisonError::into_inner).take() {
            error!("a qcow2 image has tables that are not sound: it is neither read nor written any more");
            // Dropped, it would write what it has of them.
            std::mem::forget(access);
        }
        given_up()
    }
}

fn given_up() -> io::Error {
    io::Error::other("its tables are not sound")
}

fn bytes_of(buffers: Buffers) -> usize {
    // SAFETY: Of a list that is there only the lengths are read.
    let list = unsafe { std::slice::from_raw_parts(buffers.first, buffers.count) };
    list.iter().map(|buffer| buffer.iov_len).sum()
}

/// # Safety
/// The buffers are there while the result is, and nobody else accesses them.
unsafe fn writable<'b>(buffers: Buffers) -> IoVectorMut<'b> {
    let mut vector = IoVectorMut::with_capacity(buffers.count);
    // SAFETY: The caller's promise is what is asked for.
    for buffer in unsafe { std::slice::from_raw_parts(buffers.first, buffers.count) } {
        if buffer.iov_len != 0 {
            // SAFETY: As above.
            vector.push(unsafe { std::slice::from_raw_parts_mut(buffer.iov_base.cast::<u8>(), buffer.iov_len) });
        }
    }
    vector
}

/// # Safety
/// The buffers are there while the result is, and nobody writes to them.
unsafe fn readable<'b>(buffers: Buffers) -> IoVector<'b> {
    let mut vector = IoVector::with_capacity(buffers.count);
    // SAFETY: The caller's promise is what is asked for.
    for buffer in unsafe { std::slice::from_raw_parts(buffers.first, buffers.count) } {
        if buffer.iov_len != 0 {
            // SAFETY: As above.
            vector.push(unsafe { std::slice::from_raw_parts(buffer.iov_base.cast::<u8>(), buffer.iov_len) });
        }
    }
    vector
}

/// Opens the image in `file`, whose header is sound, and its backing images: [`MOST_IMAGES`] in all. `chain` has the identities of the images
/// before it. Adds the locks of backing images to `locks`. True if there is a backing image.
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
        return Err(ImageError::Malformed("its data is in another file, which is not supported".into()));
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
        return Err(ImageError::Malformed(format!("there are more than {MOST_IMAGES} images, one behind the other")));
    }
    let Backing { file, is_qcow2, lock } = backing::open(path, format, options.direct)?;
    if chain.contains(&identity(&file)?) {
        return Err(ImageError::Malformed("the image is behind itself".into()));
    }
    locks.push(lock);
    if is_qcow2 {
        let options = ChainOptions { writable: false, ..options };
        return open_chain(&file, Arc::default(), path, options, chain, locks).map(|(access, _)| access);
    }
    let raw = Raw::open_image(Ordered::new(Storage::try_from(file)?, Arc::default()), false)?;
    Ok(Access::new(raw))
}
