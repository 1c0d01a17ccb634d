// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Images: files and block devices of the host, whose bytes are those of the disk, or which hold them in a form of their own.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use log::warn;
use rustix::fs::{ioctl_blkpbszget, ioctl_blksszget};

use super::error::{ImageError, ResizeError};
use super::host_file::{self, direct_alignment, size_of_device};
use super::lock::ImageLock;
use super::qcow2::{ChainOptions, Qcow2Image};
use super::vhd;
use crate::file_size;
use crate::virtio::block::spec::SECTOR;

/// Physical blocks of a file, as file systems have them.
const FILE_BLOCK: u32 = 4096;

/// The form of an image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ImageFormat {
    /// Nothing was said: its bytes are those of the disk, but one that looks like an image of another form is refused.
    #[default]
    Unknown,
    /// Its bytes are those of the disk, whatever they look like.
    Raw,
    /// A qcow2 image.
    Qcow2,
    /// A VHD image of fixed size: raw, with a footer.
    FixedVhd,
}

/// How an image is to be opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ImageOptions {
    /// Nothing is written to it. Others may read it meanwhile.
    pub read_only: bool,
    /// The host's page cache is passed by (`O_DIRECT`).
    pub direct: bool,
    /// Its form.
    pub format: ImageFormat,
    /// It may have others behind it.
    pub backing_files: bool,
    /// All bytes that it may ever have are locked, not only those that it has.
    pub lock_all: bool,
    /// The host's file system has room for all of a raw image, and what the guest discards is not given back.
    pub allocated: bool,
}

/// An image that is open and locked.
#[derive(Debug)]
pub struct Image {
    file: File,
    /// What is in it, if that is not the disk's bytes.
    qcow2: Option<Qcow2Image>,
    bytes: AtomicU64,
    /// Why it keeps its size, if it does.
    kept: Option<&'static str>,
    device: bool,
    /// All bytes that it may ever have are locked.
    lock_all: bool,
    /// It has its room for good.
    allocated: bool,
    /// What requests are multiples of.
    block: u32,
    /// What they had better be multiples of.
    physical: u32,
    /// What addresses of buffers are multiples of for the kernel to use them directly.
    memory: usize,
    /// Its bytes are in the host's memory.
    in_memory: bool,
    read_only: bool,
    /// Dropped after all that the image is read and written by. `None` for an image that was made up.
    lock: Option<ImageLock>,
}

impl Image {
    /// Opens an image and locks it: for itself, or beside other readers if it is read-only.
    ///
    /// # Errors
    /// Why it cannot be used.
    pub fn open(path: &Path, options: ImageOptions) -> Result<Self, ImageError> {
        let (file, device) = host_file::open(path, options.read_only)?;
        Self::of_file(file, device, path, options)
    }

    /// The image in `file`, a block device or not. Paths of images behind it are relative to `path`.
    ///
    /// # Errors
    /// Why it cannot be used.
    pub(in crate::virtio::block) fn of_file(
        file: File,
        device: bool,
        path: &Path,
        options: ImageOptions,
    ) -> Result<Self, ImageError> {
        if device && !options.read_only && host_file::is_read_only_device(&file)? {
            return Err(ImageError::ReadOnly);
        }
        let len = file.metadata()?.len();
        // An image that has tables grows with what is written to it.
        let grows = options.format == ImageFormat::Qcow2;
        let len_locked = (!options.lock_all && !grows).then_some(len);
        let mut lock = ImageLock::take(&file, options.read_only, len_locked)?;
        let (mut block, mut physical, mut bytes) = (512, FILE_BLOCK, len);
        if device {
            block = ioctl_blksszget(&file).map_err(io::Error::from)?;
            physical = ioctl_blkpbszget(&file).map_err(io::Error::from)?;
            bytes = size_of_device(&file)?;
        }
        let (mut qcow2, mut kept) = (None, device.then_some("a block device gets its size from the host"));
        match options.format {
            ImageFormat::Unknown => other_format(&file)?.map_or(Ok(()), |name| Err(ImageError::Format(name)))?,
            ImageFormat::Raw => {}
            ImageFormat::FixedVhd => {
                bytes = vhd::size(&file, bytes)?;
                kept = Some("a fixed VHD keeps its size");
            }
            ImageFormat::Qcow2 => {
                let ImageOptions { read_only, backing_files, direct, .. } = options;
                let chain = ChainOptions { writable: !read_only, backing_files, direct };
                let image = Qcow2Image::open(&file, path, chain)?;
                (block, bytes, kept) = (512, image.size(), None);
                qcow2 = Some(image);
            }
        }
        host_file::set_flags(&file, options.direct)?;
        let mut memory = 1;
        if options.direct && qcow2.is_none() {
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
        // Only requests by io_uring may outlive the process.
        if qcow2.is_none() {
            lock.mark(&file);
        }
        let allocated = options.allocated && !options.read_only;
        if allocated && !device && qcow2.is_none() {
            host_file::allocate(&file, 0, whole).map_err(|error| ImageError::Allocate(file_size::explain(error)))?;
        }
        Ok(Self {
            in_memory: !device && host_file::is_in_memory(&file),
            file,
            qcow2,
            bytes: AtomicU64::new(whole),
            kept,
            device,
            lock_all: options.lock_all || grows,
            allocated,
            block,
            physical: physical.max(block),
            memory,
            read_only: options.read_only,
            lock: Some(lock),
        })
    }

    /// The file.
    pub(in crate::virtio::block) fn file(&self) -> &File {
        &self.file
    }

    /// What is in the file, if that is not the disk's bytes.
    pub(in crate::virtio::block) fn qcow2(&self) -> Option<&Qcow2Image> {
        self.qcow2.as_ref()
    }

    /// Writes to the file what of the image is in this process only: another one reads the same then.
    ///
    /// # Errors
    /// The host cannot do it.
    pub(in crate::virtio::block) fn settle(&self) -> io::Result<()> {
        self.qcow2.as_ref().filter(|_| !self.read_only).map_or(Ok(()), Qcow2Image::flush)
    }

    /// Bytes of the disk, a multiple of its blocks.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// The same in sectors.
    pub(in crate::virtio::block) fn sectors(&self) -> u64 {
        self.bytes() / SECTOR
    }

    /// Gives the disk another size, and its file. Of a block device, and of an image that is only read, others have changed the size
    /// before. Nobody writes to it meanwhile, as a write beyond the end would have the file grow again.
    ///
    /// # Errors
    /// Why the disk keeps its size.
    pub(in crate::virtio::block) fn resize(&self, bytes: u64) -> Result<(), ResizeError> {
        let block = self.block;
        if bytes == 0 || !bytes.is_multiple_of(block.into()) {
            return Err(ResizeError::Blocks { bytes, block });
        }
        let has = match &self.qcow2 {
            Some(image) => image.size(),
            None if self.kept.is_some() && !self.device => self.bytes(),
            None if self.device => size_of_device(&self.file)?,
            None => self.file.metadata()?.len(),
        };
        let has = has - has % u64::from(block);
        let read = self.read_only.then_some("it is read-only, and gets its size from others");
        if bytes != has
            && let Some(why) = self.kept.or(read)
        {
            return Err(ResizeError::Fixed { bytes, has, why });
        }
        if bytes > self.bytes()
            && !self.lock_all
            && let Some(lock) = &self.lock
        {
            lock.cover(Some(bytes)).map_err(|error| match error {
                ImageError::Host(error) => ResizeError::Host(error),
                _ => ResizeError::Locked,
            })?;
        }
        match &self.qcow2 {
            Some(image) if bytes != has => image.resize(bytes).map_err(file_size::explain)?,
            None if bytes != has => {
                if self.allocated && bytes > has {
                    host_file::allocate(&self.file, has, bytes - has).map_err(file_size::explain)?;
                }
                self.file.set_len(bytes).map_err(file_size::explain)?;
            }
            _ => {}
        }
        self.bytes.store(bytes, Ordering::Relaxed);
        Ok(())
    }

    /// Bytes of a block, which requests are multiples of.
    pub fn block(&self) -> u32 {
        self.block
    }

    /// Bytes of what the host writes at once, which requests had better be multiples of.
    pub(in crate::virtio::block) fn physical_block(&self) -> u32 {
        self.physical
    }

    /// Bytes that a discard gives back at once, which it had better be a multiple of.
    pub(in crate::virtio::block) fn discard_block(&self) -> u32 {
        self.qcow2.as_ref().map_or(self.block, Qcow2Image::cluster).max(self.block)
    }

    /// Whether the kernel can use a buffer at this address and of this length as it is.
    pub(in crate::virtio::block) fn takes(&self, address: usize, len: usize) -> bool {
        // What has tables is read and written by code that must not see a buffer change under its hands.
        self.qcow2.is_none()
            && (self.memory == 1
                || address.is_multiple_of(self.memory) && (len as u64).is_multiple_of(self.block.into()))
    }

    /// Whether what is written comes to the host's page cache, by a copy.
    pub(in crate::virtio::block) fn is_cached(&self) -> bool {
        !self.device && self.memory == 1
    }

    /// Whether a read is a copy from the host's memory, and io_uring hands it to a thread all the same.
    pub(in crate::virtio::block) fn is_in_memory(&self) -> bool {
        self.in_memory && self.memory == 1
    }

    /// Whether what the guest discards is not given back to the host.
    pub(in crate::virtio::block) fn is_allocated(&self) -> bool {
        self.allocated
    }

    /// Whether nothing can be written.
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// An image of any file, with what the host would say of it made up.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(in crate::virtio::block) fn made_up(file: File, bytes: u64, memory: usize, read_only: bool) -> Self {
        let bytes = AtomicU64::new(bytes);
        Self {
            qcow2: None,
            bytes,
            kept: None,
            device: false,
            lock_all: false,
            allocated: false,
            block: 512,
            physical: FILE_BLOCK,
            memory,
            in_memory: host_file::is_in_memory(&file),
            file,
            read_only,
            lock: None,
        }
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

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::{AsFd, AsRawFd};

    use rustix::fs::Mode;

    use super::super::buffer::PAGE;
    use super::super::lock::set;
    use super::*;

    fn image(bytes: &[u8]) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(bytes).unwrap();
        file
    }

    const WRITTEN: ImageOptions = ImageOptions {
        read_only: false,
        direct: false,
        format: ImageFormat::Unknown,
        backing_files: false,
        lock_all: false,
        allocated: false,
    };
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
    fn written_image_is_locked_alone_and_read_image_is_shared() {
        let file = image(&[0; 512]);
        let first = Image::open(file.path(), WRITTEN).unwrap();
        for options in [WRITTEN, READ] {
            let refused = Image::open(file.path(), options).unwrap_err();
            assert!(matches!(refused, ImageError::Used { .. }), "{refused}");
        }
        drop(first);
        let readers = [Image::open(file.path(), READ).unwrap(), Image::open(file.path(), READ).unwrap()];
        assert!(matches!(Image::open(file.path(), WRITTEN), Err(ImageError::Used { read_only: false })));
        drop(readers);
        // Whatever is locked of it.
        let all = ImageOptions { lock_all: true, ..WRITTEN };
        let _one = Image::open(file.path(), all).unwrap();
        assert!(matches!(Image::open(file.path(), WRITTEN), Err(ImageError::Used { .. })));
        assert!(matches!(Image::open(file.path(), all), Err(ImageError::Used { .. })));
    }

    /// Only root can make such a device.
    #[test]
    fn read_only_block_device_is_refused_unless_it_is_only_read() {
        let file = image(&[0; 1 << 20]);
        let losetup = |arguments: &[&std::ffi::OsStr]| std::process::Command::new("losetup").args(arguments).output();
        let made = losetup(&["-f".as_ref(), "--show".as_ref(), "-r".as_ref(), file.path().as_os_str()]);
        let device = made.map(|made| String::from_utf8_lossy(&made.stdout).trim().to_string()).unwrap_or_default();
        if !device.starts_with("/dev/loop") {
            return eprintln!("not tested: no loop device can be made");
        }
        let outcomes =
            [WRITTEN, READ].map(|options| Image::open(Path::new(&device), options).map(|image| image.bytes()));
        losetup(&["-d".as_ref(), device.as_ref()]).unwrap();
        assert!(matches!(outcomes, [Err(ImageError::ReadOnly), Ok(0x10_0000)]), "{outcomes:?}");
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
            Image::open(file.path(), ImageOptions { format: ImageFormat::Raw, ..READ }).unwrap();
        }
    }

    #[test]
    fn path_of_another_file_type_is_refused_without_waiting() {
        let directory = tempfile::tempdir().unwrap();
        assert!(matches!(Image::open(directory.path(), READ), Err(ImageError::Kind)));
        assert!(matches!(Image::open(Path::new("/dev/null"), WRITTEN), Err(ImageError::Kind)));
        let pipe = directory.path().join("pipe");
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, Mode::RWXU, 0).unwrap();
        assert!(matches!(Image::open(&pipe, READ), Err(ImageError::Kind)));
        assert!(matches!(Image::open(&directory.path().join("none"), READ), Err(ImageError::Host(_))));
    }

    #[test]
    fn resize_changes_the_file_and_invalid_size_changes_nothing() {
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
    fn allocated_image_reserves_space_for_its_size_and_growth() {
        use std::os::unix::fs::MetadataExt;

        let file = tempfile::NamedTempFile::new().unwrap();
        let room = || file.as_file().metadata().unwrap().blocks() * 512;
        file.as_file().set_len(1 << 20).unwrap();
        Image::open(file.path(), ImageOptions { allocated: true, ..READ }).unwrap();
        Image::open(file.path(), WRITTEN).unwrap();
        assert_eq!(room(), 0, "of an image that is read, or that may have holes, nothing is asked");
        let disk = Image::open(file.path(), ImageOptions { allocated: true, ..WRITTEN }).unwrap();
        assert!(room() >= 1 << 20 && disk.is_allocated());
        disk.resize(2 << 20).unwrap();
        assert!(room() >= 2 << 20 && file.as_file().metadata().unwrap().len() == 2 << 20);
        // No file system has so much.
        assert!(matches!(disk.resize(1 << 60), Err(ResizeError::Host(_))));
        assert_eq!((disk.bytes(), file.as_file().metadata().unwrap().len()), (2 << 20, 2 << 20));
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
        let take = |other: &File| set(other.as_fd(), libc::F_WRLCK, 1024, 512);
        let other = file.reopen().unwrap();
        take(&other).unwrap();
        assert!(matches!(disk.resize(2048), Err(ResizeError::Locked)));
        assert_eq!((disk.bytes(), file.as_file().metadata().unwrap().len()), (1024, 1024));
        drop(other);
        disk.resize(2048).unwrap();
        take(&file.reopen().unwrap()).unwrap_err();
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

    #[test]
    fn descriptor_of_the_parent_has_no_lock() {
        let file = image(&[1; 1024]);
        let parents = file.reopen().unwrap();
        let own = parents.try_clone().unwrap();
        // Its own number, which no other test's file gets while it is kept.
        let number = own.as_raw_fd();
        crate::inherited::keep(number, own.into()).unwrap();
        let disk = Image::open(Path::new(&format!("/dev/fd/{number}")), WRITTEN).unwrap();
        assert!(matches!(Image::open(file.path(), WRITTEN), Err(ImageError::Used { .. })));
        let take = || set(parents.as_fd(), libc::F_WRLCK, 0, 0);
        take().expect_err("the lock would be left to the parent of a process that is killed");
        drop(disk);
        take().unwrap();
    }
}
