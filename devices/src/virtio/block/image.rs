// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Raw images: files and block devices of the host whose bytes are those of the disk.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use log::warn;
use rustix::fs::{
    AtFlags, Mode, OFlags, StatxFlags, fcntl_getfl, fcntl_setfl, ioctl_blkpbszget, ioctl_blksszget, open, statx,
};
use rustix::ioctl::{Getter, ioctl, opcode};
use thiserror::Error;

use super::buffer::{Buffer, PAGE};
use super::spec::SECTOR;

/// Physical blocks of a file, as file systems have them.
const FILE_BLOCK: u32 = 4096;

/// How an image is to be opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ImageOptions {
    /// Nothing is written to it. Others may read it meanwhile.
    pub read_only: bool,
    /// The host's page cache is passed by (`O_DIRECT`).
    pub direct: bool,
    /// It is a raw image, whatever its first bytes look like.
    pub raw: bool,
    /// All bytes that it may ever have are locked, not only those that it has.
    pub lock_all: bool,
}

/// Why an image cannot be used.
#[derive(Debug, Error)]
pub enum ImageError {
    /// It cannot be opened or examined.
    #[error("{0}")]
    Host(#[from] io::Error),
    /// It is neither a file nor a block device.
    #[error("is neither a file nor a block device")]
    Kind,
    /// Another process has it.
    #[error("is in use: another process has locked it; {}", if *.read_only { "it must be read-only for all to be shared" } else { "a disk that is written to has one user" })]
    Locked {
        /// Whether it was to be read only.
        read_only: bool,
    },
    /// There is not one block in it.
    #[error("has {bytes} bytes, less than a block of {block}")]
    Empty {
        /// Bytes of the image.
        bytes: u64,
        /// Bytes of a block.
        block: u32,
    },
    /// It begins as an image of another format does.
    #[error(
        "looks like an image in {0} format, which is not supported; say that the image is raw to give the guest its bytes as they are"
    )]
    Format(&'static str),
    /// The file system knows no direct I/O.
    #[error("cannot be read directly, past the host's page cache: {0}")]
    Direct(#[source] io::Error),
}

/// Why a disk keeps its size.
#[derive(Debug, Error)]
pub enum ResizeError {
    /// It would not be whole blocks, or none.
    #[error("{bytes} bytes are no positive multiple of the disk's blocks of {block}")]
    Blocks {
        /// Bytes that were wanted.
        bytes: u64,
        /// Bytes of a block.
        block: u32,
    },
    /// Others give the image its size.
    #[error("{bytes} bytes are not the {has} that the image has: {why}")]
    Fixed {
        /// Bytes that were wanted.
        bytes: u64,
        /// Bytes that there are.
        has: u64,
        /// Why they stay.
        why: &'static str,
    },
    /// Another process has what would belong to the disk.
    #[error("another process has locked bytes that are to come")]
    Locked,
    /// The host cannot do it.
    #[error("{0}")]
    Host(#[from] io::Error),
}

/// An image that is open and locked.
#[derive(Debug)]
pub struct Image {
    file: File,
    bytes: AtomicU64,
    /// It is a block device, whose size others change.
    device: bool,
    /// All bytes that it may ever have are locked.
    lock_all: bool,
    /// What requests are multiples of.
    block: u32,
    /// What they had better be multiples of.
    physical: u32,
    /// What addresses of buffers are multiples of for the kernel to use them directly.
    memory: usize,
    read_only: bool,
}

impl Image {
    /// Opens an image and locks it: for itself, or beside other readers if it is read-only.
    ///
    /// # Errors
    /// Why it cannot be used.
    pub fn open(path: &Path, options: ImageOptions) -> Result<Self, ImageError> {
        let access = if options.read_only { OFlags::RDONLY } else { OFlags::RDWR };
        // What opens a pipe would wait for its other end.
        let flags = access | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let file = File::from(open(path, flags, Mode::empty()).map_err(io::Error::from)?);
        let kind = file.metadata()?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(ImageError::Kind);
        }
        let len = file.metadata()?.len();
        lock(&file, options.read_only, if options.lock_all { 0 } else { len })?;
        if !options.raw
            && let Some(format) = other_format(&file)?
        {
            return Err(ImageError::Format(format));
        }
        // Reads and writes that cannot be done at once are to wait, not to fail.
        let mut flags = (fcntl_getfl(&file).map_err(io::Error::from)?) & !OFlags::NONBLOCK;
        if options.direct {
            flags |= OFlags::DIRECT;
        }
        fcntl_setfl(&file, flags).map_err(|error| {
            if options.direct { ImageError::Direct(error.into()) } else { ImageError::Host(error.into()) }
        })?;
        let (mut block, mut physical) = (512, FILE_BLOCK);
        let mut bytes = len;
        if kind.is_block_device() {
            block = ioctl_blksszget(&file).map_err(io::Error::from)?;
            physical = ioctl_blkpbszget(&file).map_err(io::Error::from)?;
            bytes = size_of_device(&file)?;
        }
        let mut memory = 1;
        if options.direct {
            let alignment = direct_alignment(&file)?;
            memory = alignment.memory;
            block = block.max(alignment.offset);
        }
        let whole = bytes - bytes % u64::from(block);
        if whole == 0 {
            return Err(ImageError::Empty { bytes, block });
        }
        if whole != bytes {
            warn!(
                "{}: the last {} bytes are less than a block of {block}, and are not shown to the guest",
                path.display(),
                bytes - whole
            );
        }
        Ok(Self {
            file,
            bytes: AtomicU64::new(whole),
            device: kind.is_block_device(),
            lock_all: options.lock_all,
            block,
            physical: physical.max(block),
            memory,
            read_only: options.read_only,
        })
    }

    /// The file.
    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Bytes of the disk, a multiple of its blocks.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// The same in sectors.
    pub(super) fn sectors(&self) -> u64 {
        self.bytes() / SECTOR
    }

    /// Gives the disk another size, and its file. Of a block device, and of an image that is only read, others have changed the size
    /// before. Nobody writes to it meanwhile, as a write beyond the end would have the file grow again.
    ///
    /// # Errors
    /// Why the disk keeps its size.
    pub(super) fn resize(&self, bytes: u64) -> Result<(), ResizeError> {
        let block = self.block;
        if bytes == 0 || !bytes.is_multiple_of(block.into()) {
            return Err(ResizeError::Blocks { bytes, block });
        }
        let len = if self.device { size_of_device(&self.file)? } else { self.file.metadata()?.len() };
        let has = len - len % u64::from(block);
        if bytes != has && (self.device || self.read_only) {
            let why = if self.device {
                "a block device gets its size from the host"
            } else {
                "it is read-only, and gets its size from others"
            };
            return Err(ResizeError::Fixed { bytes, has, why });
        }
        if bytes > self.bytes() && !self.lock_all {
            lock(&self.file, self.read_only, bytes).map_err(|error| match error {
                ImageError::Host(error) => ResizeError::Host(error),
                _ => ResizeError::Locked,
            })?;
        }
        if bytes != has {
            self.file.set_len(bytes)?;
        }
        self.bytes.store(bytes, Ordering::Relaxed);
        Ok(())
    }

    /// Bytes of a block, which requests are multiples of.
    pub fn block(&self) -> u32 {
        self.block
    }

    /// Bytes of what the host writes at once, which requests had better be multiples of.
    pub(super) fn physical_block(&self) -> u32 {
        self.physical
    }

    /// Whether the kernel can use a buffer at this address and of this length as it is.
    pub(super) fn takes(&self, address: usize, len: usize) -> bool {
        self.memory == 1 || address.is_multiple_of(self.memory) && (len as u64).is_multiple_of(self.block.into())
    }

    /// Whether nothing can be written.
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// An image of any file, with what the host would say of it made up.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(super) fn made_up(file: File, bytes: u64, memory: usize, read_only: bool) -> Self {
        let bytes = AtomicU64::new(bytes);
        Self { file, bytes, device: false, lock_all: false, block: 512, physical: FILE_BLOCK, memory, read_only }
    }
}

/// Locks the first `len` bytes, or all that there may ever be if it is 0, for this open file description, so that the lock ends with
/// it and not with another descriptor of this process (an OFD lock).
fn lock(file: &File, read_only: bool, len: u64) -> Result<(), ImageError> {
    let kind = if read_only { libc::F_RDLCK } else { libc::F_WRLCK };
    // SAFETY: All of its fields are numbers.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = i16::try_from(kind).expect("a small number");
    lock.l_whence = i16::try_from(libc::SEEK_SET).expect("a small number");
    lock.l_len = i64::try_from(len).unwrap_or(0);
    // SAFETY: The descriptor is open, and the kernel reads the structure that the pointer leads to.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) } == 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EAGAIN | libc::EACCES) => Err(ImageError::Locked { read_only }),
        // A file system without locks.
        Some(libc::ENOLCK | libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL) => {
            warn!("an image cannot be locked, so that nothing keeps others from using it: {error}");
            Ok(())
        }
        _ => Err(error.into()),
    }
}

/// Which other format an image begins as one of. The format is never guessed: a guest could write such a beginning to its disk,
/// and have other files of the host read by it.
fn other_format(file: &File) -> io::Result<Option<&'static str>> {
    const BEGINNINGS: [(&[u8], &str); 4] =
        [(b"QFI\xfb", "qcow2"), (b"vhdxfile", "VHDX"), (b"conectix", "VHD"), (b"KDMV", "VMDK")];
    let mut start = [0; 8];
    let len = file.read_at(&mut start, 0)?;
    Ok(BEGINNINGS.iter().find(|(bytes, _)| start[..len].starts_with(bytes)).map(|(_, name)| *name))
}

/// Bytes of a block device (`BLKGETSIZE64`).
fn size_of_device(device: &File) -> io::Result<u64> {
    const BLKGETSIZE64: u32 = opcode::read::<usize>(0x12, 114);
    // SAFETY: The kernel writes a u64 for this operation.
    let get = unsafe { Getter::<BLKGETSIZE64, u64>::new() };
    // SAFETY: It reads the size of what the descriptor is of, or fails.
    Ok(unsafe { ioctl(device, get) }?)
}

/// What direct I/O must be aligned to.
struct Alignment {
    /// Addresses of buffers.
    memory: usize,
    /// Places in the file, and lengths.
    offset: u32,
}

fn direct_alignment(file: &File) -> Result<Alignment, ImageError> {
    if let Ok(told) = statx(file.as_fd(), c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN)
        && told.stx_mask & StatxFlags::DIOALIGN.bits() != 0
    {
        let memory = usize::try_from(told.stx_dio_mem_align).unwrap_or(0);
        if memory == 0 || memory > PAGE || told.stx_dio_offset_align == 0 {
            return Err(ImageError::Direct(io::ErrorKind::Unsupported.into()));
        }
        return Ok(Alignment { memory: memory.max(2), offset: told.stx_dio_offset_align.max(512) });
    }
    // Before Linux 6.1 one has to try.
    let mut buffer = Buffer::new(PAGE);
    let mut refused = io::ErrorKind::Unsupported.into();
    for offset in [512u32, 4096] {
        match file.read_at(&mut buffer.bytes_mut()[..offset as usize], 0) {
            Ok(_) => return Ok(Alignment { memory: offset as usize, offset }),
            Err(error) => refused = error,
        }
    }
    Err(ImageError::Direct(refused))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn image(bytes: &[u8]) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(bytes).unwrap();
        file
    }

    const WRITTEN: ImageOptions = ImageOptions { read_only: false, direct: false, raw: false, lock_all: false };
    const READ: ImageOptions = ImageOptions { read_only: true, ..WRITTEN };

    #[test]
    fn size_is_rounded_down_to_whole_blocks() {
        let file = image(&[0; 1535]);
        let opened = Image::open(file.path(), WRITTEN).unwrap();
        assert_eq!((opened.bytes(), opened.sectors(), opened.block()), (1024, 2, 512));
        let small = image(&[0; 511]);
        let refused = Image::open(small.path(), WRITTEN).unwrap_err().to_string();
        assert_eq!(refused, "has 511 bytes, less than a block of 512");
    }

    #[test]
    fn image_that_is_written_is_locked_for_itself_and_one_that_is_read_for_readers() {
        let file = image(&[0; 512]);
        let first = Image::open(file.path(), WRITTEN).unwrap();
        for options in [WRITTEN, READ] {
            let refused = Image::open(file.path(), options).unwrap_err();
            assert!(matches!(refused, ImageError::Locked { .. }), "{refused}");
        }
        drop(first);
        let readers = [Image::open(file.path(), READ).unwrap(), Image::open(file.path(), READ).unwrap()];
        assert!(matches!(Image::open(file.path(), WRITTEN), Err(ImageError::Locked { read_only: false })));
        drop(readers);
        // Whatever is locked of it.
        let all = ImageOptions { lock_all: true, ..WRITTEN };
        let _one = Image::open(file.path(), all).unwrap();
        assert!(matches!(Image::open(file.path(), WRITTEN), Err(ImageError::Locked { .. })));
        assert!(matches!(Image::open(file.path(), all), Err(ImageError::Locked { .. })));
    }

    #[test]
    fn other_formats_are_known_unless_the_image_is_said_to_be_raw() {
        for (beginning, name) in
            [(&b"QFI\xfb"[..], "qcow2"), (b"vhdxfile", "VHDX"), (b"conectix", "VHD"), (b"KDMV", "VMDK")]
        {
            let mut bytes = beginning.to_vec();
            bytes.resize(1024, 0);
            let file = image(&bytes);
            let refused = Image::open(file.path(), READ).unwrap_err().to_string();
            assert!(refused.contains(name), "{refused}");
            Image::open(file.path(), ImageOptions { raw: true, ..READ }).unwrap();
        }
    }

    #[test]
    fn what_is_no_file_and_no_block_device_is_refused_without_waiting() {
        let directory = tempfile::tempdir().unwrap();
        assert!(matches!(Image::open(directory.path(), READ), Err(ImageError::Kind)));
        assert!(matches!(Image::open(Path::new("/dev/null"), WRITTEN), Err(ImageError::Kind)));
        let pipe = directory.path().join("pipe");
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, Mode::RWXU, 0).unwrap();
        assert!(matches!(Image::open(&pipe, READ), Err(ImageError::Kind)));
        assert!(matches!(Image::open(&directory.path().join("none"), READ), Err(ImageError::Host(_))));
    }

    #[test]
    fn size_changes_with_the_file_and_what_breaks_a_rule_changes_nothing() {
        let file = image(&[1; 1024]);
        let disk = Image::open(file.path(), WRITTEN).unwrap();
        let len = || file.as_file().metadata().unwrap().len();
        disk.resize(4096).unwrap();
        assert_eq!((disk.bytes(), disk.sectors(), len()), (4096, 8, 4096));
        disk.resize(512).unwrap();
        assert_eq!((disk.bytes(), len()), (512, 512));
        for bytes in [0, 511, 513] {
            let refused = disk.resize(bytes).unwrap_err().to_string();
            assert_eq!(refused, format!("{bytes} bytes are no positive multiple of the disk's blocks of 512"));
        }
        // More than files can have.
        assert!(matches!(disk.resize(u64::MAX - 511), Err(ResizeError::Host(_))));
        assert_eq!((disk.bytes(), len()), (512, 512));
        // Others have made it longer.
        file.as_file().set_len(2048).unwrap();
        disk.resize(2048).unwrap();
        assert_eq!((disk.bytes(), len()), (2048, 2048));
    }

    #[test]
    fn image_that_is_read_follows_its_file_only() {
        let file = image(&[1; 1024]);
        let disk = Image::open(file.path(), READ).unwrap();
        let refused = disk.resize(2048).unwrap_err().to_string();
        assert!(refused.starts_with("2048 bytes are not the 1024 that the image has: it is read-only"), "{refused}");
        file.as_file().set_len(2048 + 100).unwrap();
        disk.resize(2048).unwrap();
        assert_eq!((disk.bytes(), file.as_file().metadata().unwrap().len()), (2048, 2148));
    }

    #[test]
    fn bytes_that_come_are_locked_too() {
        let file = image(&[1; 1024]);
        let disk = Image::open(file.path(), WRITTEN).unwrap();
        let other = File::options().read(true).write(true).open(file.path()).unwrap();
        // SAFETY: All of its fields are numbers.
        let mut tail: libc::flock = unsafe { std::mem::zeroed() };
        (tail.l_type, tail.l_start, tail.l_len) = (i16::try_from(libc::F_WRLCK).unwrap(), 1024, 512);
        // SAFETY: The descriptor is open, and the kernel reads the structure that the pointer leads to.
        let take = || unsafe { libc::fcntl(other.as_raw_fd(), libc::F_OFD_SETLK, &raw const tail) };
        assert_eq!(take(), 0);
        assert!(matches!(disk.resize(2048), Err(ResizeError::Locked)));
        assert_eq!((disk.bytes(), file.as_file().metadata().unwrap().len()), (1024, 1024));
        drop(other);
        disk.resize(2048).unwrap();
        let other = File::options().read(true).write(true).open(file.path()).unwrap();
        // SAFETY: As above.
        assert_eq!(unsafe { libc::fcntl(other.as_raw_fd(), libc::F_OFD_SETLK, &raw const tail) }, -1);
    }

    #[test]
    fn direct_image_says_what_its_buffers_must_be() {
        let file = image(&[0; 8192]);
        match Image::open(file.path(), ImageOptions { direct: true, ..WRITTEN }) {
            Ok(image) => {
                assert!(image.takes(PAGE, PAGE) && !image.takes(PAGE + 1, PAGE) && !image.takes(PAGE, 511));
                assert!(image.block().is_power_of_two());
            }
            // Some file systems of those that tests run on have none.
            Err(error) => assert!(matches!(error, ImageError::Direct(_)), "{error}"),
        }
        assert!(Image::open(file.path(), WRITTEN).unwrap().takes(1, 3));
    }
}
