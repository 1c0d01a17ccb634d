// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Images: host files and block devices that contain a disk. A raw image contains the bytes of the disk unchanged. Files in other formats
//! also contain metadata.

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

/// Physical block size of an image in a file: the usual block size of file systems.
const FILE_BLOCK: u32 = 4096;

/// Format of an image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ImageFormat {
    /// The format is not specified. Carom treats the file's bytes as the disk's bytes, and rejects a file that starts like an image of
    /// another format.
    #[default]
    Unknown,
    /// The file's bytes are the disk's bytes, even if they look like another format.
    Raw,
    /// A qcow2 image.
    Qcow2,
    /// A VHD image of fixed size: a raw image with a footer.
    FixedVhd,
}

/// Options for opening an image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ImageOptions {
    /// True if the device only reads the image. Other read-only users can then share the image.
    pub read_only: bool,
    /// True to bypass the host's page cache (`O_DIRECT`).
    pub direct: bool,
    /// Format of the image.
    pub format: ImageFormat,
    /// True to allow backing files.
    pub backing_files: bool,
    /// True to lock all bytes that the image can ever have. False to lock only the image's present bytes.
    pub lock_all: bool,
    /// True to reserve disk space for the whole raw image. Guest discards then return no space to the host.
    pub allocated: bool,
}

/// Opened and locked image.
#[derive(Debug)]
pub struct Image {
    file: File,
    /// qcow2 content of the file. `None` if the file's bytes are the disk's bytes.
    qcow2: Option<Qcow2Image>,
    bytes: AtomicU64,
    /// Reason why Carom cannot change the size of the image. `None` if Carom can change the size.
    kept: Option<&'static str>,
    device: bool,
    /// True if all bytes that the image can ever have are locked.
    lock_all: bool,
    /// True if the image keeps its space on the host's disk even when the guest discards data.
    allocated: bool,
    /// Block size in bytes. The offset and length of each request must be multiples of the block size.
    block: u32,
    /// Physical block size in bytes. The offset and length of each request should be multiples of this size.
    physical: u32,
    /// Alignment that a buffer's address must have, so that the kernel can use the buffer directly.
    memory: usize,
    /// True if the file is in the host's memory (tmpfs).
    in_memory: bool,
    read_only: bool,
    /// Lock of the image. The lock is the last field, so that the fields that read and write the image are dropped first. `None` for an
    /// image from `made_up`.
    lock: Option<ImageLock>,
}

impl Image {
    /// Opens an image and locks it. A read-only image shares its lock with other readers.
    ///
    /// # Errors
    /// The image cannot be used. The [`ImageError`] states the reason.
    pub fn open(path: &Path, options: ImageOptions) -> Result<Self, ImageError> {
        let (file, device) = host_file::open(path, options.read_only)?;
        Self::of_file(file, device, path, options)
    }

    /// Creates the image from `file`. `device` is true for a block device. Relative paths of backing files start at the directory of
    /// `path`.
    ///
    /// # Errors
    /// The image cannot be used. The [`ImageError`] states the reason.
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
        // A qcow2 image file grows when the guest writes to the disk.
        let grows = options.format == ImageFormat::Qcow2;
        let len_locked = (!options.lock_all && !grows).then_some(len);
        let mut lock = ImageLock::take(&file, options.read_only, len_locked)?;
        let (mut block, mut physical, mut bytes) = (512, FILE_BLOCK, len);
        if device {
            block = ioctl_blksszget(&file).map_err(io::Error::from)?;
            physical = ioctl_blkpbszget(&file).map_err(io::Error::from)?;
            bytes = size_of_device(&file)?;
        }
        let (mut qcow2, mut kept) =
            (None, device.then_some("the image is a block device, so its size must be changed on the host first"));
        match options.format {
            ImageFormat::Unknown => other_format(&file)?.map_or(Ok(()), |name| Err(ImageError::Format(name)))?,
            ImageFormat::Raw => {}
            ImageFormat::FixedVhd => {
                bytes = vhd::size(&file, bytes)?;
                kept =
                    Some("a fixed VHD image cannot be resized; convert the image to raw or qcow2 while the VM is off");
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
                "{}: the guest does not see the last {} bytes, because they do not fill a block of {block} bytes: enlarge the image to a multiple of the block size",
                path.display(),
                bytes - whole
            );
        }
        // The mark makes the next user of the image wait for io_uring requests, which can outlive this process. A qcow2 image needs no
        // mark, because its operations do not use io_uring.
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

    /// Returns the image's file.
    pub(in crate::virtio::block) fn file(&self) -> &File {
        &self.file
    }

    /// Returns the qcow2 content of the file. `None` if the file's bytes are the disk's bytes.
    pub(in crate::virtio::block) fn qcow2(&self) -> Option<&Qcow2Image> {
        self.qcow2.as_ref()
    }

    /// Writes cached image state to the file, so that another process that opens the file reads the current content.
    ///
    /// # Errors
    /// The host cannot write the file.
    pub(in crate::virtio::block) fn settle(&self) -> io::Result<()> {
        self.qcow2.as_ref().filter(|_| !self.read_only).map_or(Ok(()), Qcow2Image::flush)
    }

    /// Returns the size of the disk in bytes, a multiple of the block size.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Returns the number of sectors of the disk.
    pub(in crate::virtio::block) fn sectors(&self) -> u64 {
        self.bytes() / SECTOR
    }

    /// Changes the size of the disk and its file. If another program has already given the image the new size, this function changes only
    /// the size of the disk. Carom itself cannot change the size of a block device, a read-only image or a fixed VHD image. No write may be
    /// under way, because a write beyond the new end would make the file grow again.
    ///
    /// # Errors
    /// The size stays unchanged. The [`ResizeError`] states the reason.
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
        let read =
            self.read_only.then_some("the image is read-only, so its size must be changed outside this VM first");
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

    /// Returns the block size in bytes. The offset and length of each request must be multiples of the block size.
    pub fn block(&self) -> u32 {
        self.block
    }

    /// Returns the physical block size in bytes. The host writes a physical block as a whole, so requests should consist of whole physical
    /// blocks.
    pub(in crate::virtio::block) fn physical_block(&self) -> u32 {
        self.physical
    }

    /// Returns the discard granularity in bytes. Discards should be multiples of this granularity.
    pub(in crate::virtio::block) fn discard_block(&self) -> u32 {
        self.qcow2.as_ref().map_or(self.block, Qcow2Image::cluster).max(self.block)
    }

    /// Returns true if the kernel can use a buffer with this address and length directly.
    pub(in crate::virtio::block) fn takes(&self, address: usize, len: usize) -> bool {
        // During an operation of the qcow2 code, the content of its buffers must not change. The guest can change guest memory, so the
        // qcow2 code never uses guest memory directly.
        self.qcow2.is_none()
            && (self.memory == 1
                || address.is_multiple_of(self.memory) && (len as u64).is_multiple_of(self.block.into()))
    }

    /// Returns true if writes copy data to the host's page cache.
    pub(in crate::virtio::block) fn is_cached(&self) -> bool {
        !self.device && self.memory == 1
    }

    /// Returns true if the image is in the host's memory, so that reads only copy data. io_uring would hand such reads to a kernel thread.
    pub(in crate::virtio::block) fn is_in_memory(&self) -> bool {
        self.in_memory && self.memory == 1
    }

    /// Returns true if guest discards return no space to the host.
    pub(in crate::virtio::block) fn is_allocated(&self) -> bool {
        self.allocated
    }

    /// Returns true if the image cannot be written.
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// Creates an image from any file. `bytes`, `memory` and `read_only` replace the properties that the host reports for the file.
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

/// Returns the name of the format whose magic bytes the image starts with. Carom uses this name only to reject the image. Carom never
/// guesses a format, because a guest could write the magic bytes to its disk and make Carom read other files of the host.
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
        assert_eq!(refused, "has 511 bytes, less than one block of 512 bytes: enlarge the image");
    }

    #[test]
    fn writable_image_lock_excludes_and_read_only_shares() {
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
        // A second open also fails if all possible bytes of the image are locked.
        let all = ImageOptions { lock_all: true, ..WRITTEN };
        let _one = Image::open(file.path(), all).unwrap();
        assert!(matches!(Image::open(file.path(), WRITTEN), Err(ImageError::Used { .. })));
        assert!(matches!(Image::open(file.path(), all), Err(ImageError::Used { .. })));
    }

    /// The test uses a loop device. Only root can create a loop device, so the test is skipped for other users.
    #[test]
    fn read_only_block_device_needs_a_read_only_disk() {
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
    fn other_formats_are_rejected_unless_declared_raw() {
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
            assert_eq!(
                refused,
                format!(
                    "the new size is {bytes} bytes, but must be a positive multiple of the disk's block size, 512 bytes"
                )
            );
        }
        // This size is larger than the maximum size of a file.
        assert!(matches!(disk.resize(u64::MAX - 511), Err(ResizeError::Host(_))));
        assert_eq!((disk.bytes(), len()), (512, 512));
        // Simulate that another process makes the file longer.
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
        assert_eq!(room(), 0, "no space is reserved for a read-only or sparse image");
        let disk = Image::open(file.path(), ImageOptions { allocated: true, ..WRITTEN }).unwrap();
        assert!(room() >= 1 << 20 && disk.is_allocated());
        disk.resize(2 << 20).unwrap();
        assert!(room() >= 2 << 20 && file.as_file().metadata().unwrap().len() == 2 << 20);
        // No file system has this much free space.
        assert!(matches!(disk.resize(1 << 60), Err(ResizeError::Host(_))));
        assert_eq!((disk.bytes(), file.as_file().metadata().unwrap().len()), (2 << 20, 2 << 20));
    }

    #[test]
    fn read_only_image_follows_its_files_size() {
        let file = image(&[1; 1024]);
        let disk = Image::open(file.path(), READ).unwrap();
        let refused = disk.resize(2048).unwrap_err().to_string();
        assert!(
            refused.starts_with("cannot change the size from 1024 to 2048 bytes: the image is read-only"),
            "{refused}"
        );
        file.as_file().set_len(2048 + 100).unwrap();
        disk.resize(2048).unwrap();
        assert_eq!((disk.bytes(), file.as_file().metadata().unwrap().len()), (2048, 2148));
    }

    #[test]
    fn resize_locks_the_added_bytes() {
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
    fn direct_image_accepts_only_aligned_buffers() {
        let file = image(&[0; 8192]);
        match Image::open(file.path(), ImageOptions { direct: true, ..WRITTEN }) {
            Ok(image) => {
                assert!(image.takes(PAGE, PAGE) && !image.takes(PAGE + 1, PAGE) && !image.takes(PAGE, 511));
                assert!(image.block().is_power_of_two());
            }
            // Some file systems of test hosts do not support direct I/O.
            Err(error) => assert!(matches!(error, ImageError::Direct(_)), "{error}"),
        }
        assert!(Image::open(file.path(), WRITTEN).unwrap().takes(1, 3));
    }

    #[test]
    fn parents_descriptor_holds_no_lock() {
        let file = image(&[1; 1024]);
        let parents = file.reopen().unwrap();
        let own = parents.try_clone().unwrap();
        // The descriptor stays open, so that another test cannot open a file with the same descriptor number.
        let number = own.as_raw_fd();
        crate::inherited::keep(number, own.into()).unwrap();
        let disk = Image::open(Path::new(&format!("/dev/fd/{number}")), WRITTEN).unwrap();
        assert!(matches!(Image::open(file.path(), WRITTEN), Err(ImageError::Used { .. })));
        let take = || set(parents.as_fd(), libc::F_WRLCK, 0, 0);
        take().expect_err("the parent's descriptor does not share the disk's lock");
        drop(disk);
        take().unwrap();
    }
}
