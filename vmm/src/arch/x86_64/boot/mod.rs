// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Loads a kernel or firmware, and writes the data that the boot protocol passes to the loaded image.

mod elf;
mod linux;
mod memory_map;
mod pvh;
mod reset_vector;
mod whole_reads;

use std::fs::File;
use std::io::{self, Read, Seek};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use carom_api::config::{MemoryConfig, PayloadConfig};
use carom_api::error::FileError;
use carom_api::{ConfigError, Explain, Field, Terms};
use devices::inherited::{self, Access};
use devices::ram::Ram;
use linux_loader::loader::bootparam::setup_header;
use linux_loader::loader::elf::PvhBootCapability;
use linux_loader::loader::{BzImage, Elf, KernelLoader};
use rustix::fs::{Mode, OFlags, open};
use thiserror::Error;
use vm_memory::{Bytes, GuestAddress};

use self::whole_reads::WholeReads;
use crate::arch::layout::{CMDLINE, HIGH_RAM_START, LOW_MEMORY_END, PAGE_SIZE};
use crate::arch::registers::{self, Entry};

/// Remedies in the errors for a kernel or firmware that Carom cannot boot.
const KERNELS: &str = "use a bzImage, or an ELF image (vmlinux) built with CONFIG_PVH";
const FIRMWARES: &str = "use an ELF image with a PVH entry point, such as EDK2's CLOUDHV.fd";

/// Error of loading the guest's boot files.
#[derive(Debug, Error)]
pub enum BootError {
    /// A file cannot be opened or read.
    #[error(transparent)]
    File(#[from] FileError),
    /// The file is not a kernel or firmware that Carom can boot.
    #[error("{}", no_image(*field, path, reason, Terms::Options))]
    NoImage {
        /// Option that names the file.
        field: Field,
        /// Path of the file.
        path: PathBuf,
        /// Reason.
        reason: String,
    },
    /// The image or the initramfs does not fit into RAM.
    #[error(transparent)]
    NoRoom(ConfigError),
    /// Guest memory could not be written.
    #[error("cannot write {what} to guest memory: {message}")]
    Write {
        /// Name of the data that could not be written.
        what: &'static str,
        /// Error from vm-memory.
        message: String,
    },
}

impl BootError {
    /// True if the user can fix the cause.
    pub fn is_user_error(&self) -> bool {
        !matches!(self, Self::Write { .. })
    }
}

impl Explain for BootError {
    fn explain(&self, terms: Terms) -> String {
        match self {
            Self::File(error) => error.explain(terms),
            Self::NoImage { field, path, reason } => no_image(*field, path, reason, terms),
            Self::NoRoom(error) => error.explain(terms),
            Self::Write { .. } => self.to_string(),
        }
    }
}

fn no_image(field: Field, path: &Path, reason: &str, terms: Terms) -> String {
    let wanted = if field == PayloadConfig::FIRMWARE { FIRMWARES } else { KERNELS };
    format!("{}: {reason}; {wanted}", field.with_value(&path.display().to_string(), terms))
}

fn file_error(field: Field, path: &Path) -> impl Fn(io::Error) -> BootError {
    move |source| BootError::File(FileError { field, path: path.display().to_string(), source })
}

/// Returns the error for an image that does not fit into RAM below `limit`, the end of the allowed addresses. `what` names the image. The
/// error names the size of RAM as the cause only if more RAM would help.
fn no_room(ram_size: u64, limit: u64, field: Field, what: &str, needed: u64) -> BootError {
    BootError::NoRoom(if needed <= limit {
        ConfigError::new(
            MemoryConfig::SIZE,
            format!("{ram_size} bytes are too few for this {what}: use at least {needed} bytes"),
        )
    } else {
        let rule = format!(
            "{needed} bytes of RAM below {limit:#x} are needed for this {what}, and more RAM does not help: use a smaller {what}"
        );
        ConfigError::new(field, rule)
    })
}

fn write_error(what: &'static str) -> impl Fn(vm_memory::GuestMemoryError) -> BootError {
    move |error| BootError::Write { what, message: error.to_string() }
}

/// Opened kernel and initramfs, or firmware. The files stay open, so that a reboot loads the same contents.
pub struct Payload {
    config: PayloadConfig,
    /// Option that names the image: kernel or firmware.
    field: Field,
    path: PathBuf,
    file: File,
    image: Image,
    initramfs: Option<File>,
    initramfs_len: u64,
    /// True if no guest has used the RAM that the payload is loaded into.
    ram_is_fresh: AtomicBool,
}

/// Format of a kernel or firmware image. Firmware is always [`Self::Elf`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Image {
    BzImage,
    Elf,
}

impl Payload {
    /// Opens the files and checks the magic numbers of the kernel or firmware.
    pub fn open(config: &PayloadConfig) -> Result<Self, BootError> {
        let (field, path) = match (&config.firmware, &config.kernel) {
            (Some(firmware), _) => (PayloadConfig::FIRMWARE, firmware.clone()),
            (None, kernel) => (PayloadConfig::KERNEL, kernel.clone().unwrap_or_default()),
        };
        let (mut file, len) = open_file(field, &path)?;
        let mut head = vec![0; 0x206.min(usize::try_from(len).unwrap_or(usize::MAX))];
        file.read_exact(&mut head).map_err(file_error(field, &path))?;
        let of_kernel = field == PayloadConfig::KERNEL;
        let image = identify(&head).filter(|image| of_kernel || *image == Image::Elf).ok_or_else(|| {
            let reason = match of_kernel {
                true => "the file has neither the bzImage nor the ELF magic number",
                false => "the file does not have the ELF magic number",
            };
            BootError::NoImage { field, path: path.clone(), reason: reason.into() }
        })?;
        let initramfs =
            config.initramfs.as_deref().map(|path| open_file(PayloadConfig::INITRAMFS, path)).transpose()?;
        let (initramfs, initramfs_len) = initramfs.map_or((None, 0), |(file, len)| (Some(file), len));
        let ram_is_fresh = AtomicBool::new(true);
        Ok(Self { config: config.clone(), field, path, file, image, initramfs, initramfs_len, ram_is_fresh })
    }

    /// Records that a guest has used the RAM, so that the next [`load`](Self::load) clears the RAM of segments for which the file has no
    /// bytes. Must be called after a restore, which fills the RAM from a snapshot without calling `load`.
    pub fn ram_was_used(&self) {
        self.ram_is_fresh.store(false, Ordering::Relaxed);
    }

    /// Loads the image and the initramfs into RAM of `ram_size` bytes, and writes the boot data. The ACPI root pointer is at `rsdp`.
    /// Returns the entry point of the boot processor.
    pub fn load(&self, memory: &Ram, ram_size: u64, rsdp: u64) -> Result<Entry, BootError> {
        let loaded = self.load_image(memory, ram_size)?;
        let initramfs = self.load_initramfs(memory, ram_size, &loaded)?;
        let cmdline = self.config.cmdline.as_bytes();
        memory.write_slice(cmdline, GuestAddress(CMDLINE)).map_err(write_error("the command line"))?;
        memory.write_obj(0u8, GuestAddress(CMDLINE + cmdline.len() as u64)).map_err(write_error("the command line"))?;
        registers::write_tables(memory).map_err(write_error("boot page tables"))?;
        reset_vector::write(memory).map_err(write_error("the code at the reset vector"))?;
        let map = memory_map::build(ram_size);
        match loaded.header {
            Some(header) => {
                linux::write_zero_page(memory, header, cmdline.len(), initramfs, &map, rsdp)?;
                // The 64-bit entry is 0x200 bytes after the start of the loaded image (Linux boot protocol).
                Ok(Entry::Linux64(loaded.entry + 0x200))
            }
            None => {
                pvh::write_start_info(memory, initramfs, &map, rsdp)?;
                Ok(Entry::Pvh(loaded.entry))
            }
        }
    }

    fn load_image(&self, memory: &Ram, ram_size: u64) -> Result<Loaded, BootError> {
        let reason = |reason: String| BootError::NoImage { field: self.field, path: self.path.clone(), reason };
        let start = Some(GuestAddress(HIGH_RAM_START));
        let mut file = WholeReads(self.file.try_clone().map_err(|e| reason(e.to_string()))?);
        match self.image {
            Image::BzImage => {
                let result = BzImage::load(memory, None, &mut file, start).map_err(|e| reason(e.to_string()))?;
                let header = result.setup_header.ok_or_else(|| reason("the image has no set-up header".into()))?;
                linux::check_header(&header).map_err(reason)?;
                let end = linux::end_of_kernel(&header).max(result.kernel_end);
                Ok(Loaded { entry: result.kernel_load.0, end, header: Some(header) })
            }
            Image::Elf => {
                let headers = elf::segments(&mut file);
                let segments =
                    headers.map_err(|error| reason(format!("cannot read the ELF program headers: {error}")))?;
                // Clear memory before the file's bytes are loaded, because bytes of one segment may lie in the BSS of another.
                self.zero(memory, ram_size, &segments)?;
                let result = Elf::load(memory, None, &mut file, start).map_err(|e| reason(e.to_string()))?;
                match result.pvh_boot_cap {
                    PvhBootCapability::PvhEntryPresent(entry) => {
                        let end = segments.iter().map(|segment| segment.end).max().unwrap_or_default();
                        Ok(Loaded { entry: entry.0, end, header: None })
                    }
                    _ => Err(reason("the image has no PVH entry point".into())),
                }
            }
        }
    }

    /// Clears the parts of segments that have no bytes in the file.
    fn zero(&self, memory: &Ram, ram_size: u64, segments: &[elf::Segment]) -> Result<(), BootError> {
        let low_end = ram_size.min(LOW_MEMORY_END);
        // Clearing many overlapping segments could take much longer than clearing all RAM, so their total length is limited. `fits` checks
        // only the zeros: if bytes of the file lie beyond RAM, linux-loader fails later.
        let total = segments.iter().fold(0u64, |total, segment| total.saturating_add(segment.len));
        let fits = |segment: &elf::Segment| segment.zeros.is_empty() || segment.zeros.end <= low_end;
        if total > low_end || !segments.iter().all(fits) {
            let end = segments.iter().map(|segment| segment.end).max().unwrap_or_default();
            return Err(no_room(ram_size, LOW_MEMORY_END, self.field, self.kind(), end.max(total)));
        }
        let fresh = self.ram_is_fresh.swap(false, Ordering::Relaxed);
        let zero = |segment: &elf::Segment| elf::zero(memory, &segment.zeros, fresh);
        segments.iter().try_for_each(zero).map_err(write_error("zeros"))
    }

    /// Returns the name of the image's kind.
    fn kind(&self) -> &'static str {
        if self.field == PayloadConfig::FIRMWARE { "firmware" } else { "kernel" }
    }

    /// Loads the initramfs as high in low memory as the kernel allows. Returns its address and size.
    fn load_initramfs(&self, memory: &Ram, ram_size: u64, kernel: &Loaded) -> Result<Option<(u64, u64)>, BootError> {
        let low_end = ram_size.min(LOW_MEMORY_END);
        let most = kernel.header.map_or(LOW_MEMORY_END, |header| u64::from(header.initrd_addr_max) + 1);
        let most = most.min(LOW_MEMORY_END);
        let limit = most.min(low_end);
        if kernel.end > limit {
            return Err(no_room(ram_size, most, self.field, self.kind(), kernel.end));
        }
        let needed = kernel.end.saturating_add(self.initramfs_len).next_multiple_of(PAGE_SIZE);
        let no_room = |what| no_room(ram_size, most, PayloadConfig::INITRAMFS, what, needed);
        let Some(file) = &self.initramfs else { return Ok(None) };
        let address = limit.checked_sub(self.initramfs_len).ok_or_else(|| no_room("initramfs"))? & !(PAGE_SIZE - 1);
        if address < kernel.end {
            return Err(no_room("kernel and initramfs"));
        }
        let path = self.config.initramfs.as_deref().unwrap_or(Path::new(""));
        let read = file_error(PayloadConfig::INITRAMFS, path);
        let mut file = file.try_clone().map_err(&read)?;
        file.rewind().map_err(&read)?;
        let len = usize::try_from(self.initramfs_len).map_err(|_| no_room("initramfs"))?;
        memory
            .read_exact_volatile_from(GuestAddress(address), &mut WholeReads(file), len)
            .map_err(|error| read(io::Error::other(error)))?;
        Ok(Some((address, self.initramfs_len)))
    }
}

/// Kernel or firmware in guest memory.
struct Loaded {
    entry: u64,
    /// First address after the memory that the image needs while it starts.
    end: u64,
    /// Set-up header of a bzImage.
    header: Option<setup_header>,
}

fn open_file(field: Field, path: &Path) -> Result<(File, u64), BootError> {
    let fail = file_error(field, path);
    let file = match inherited::file(path, Access::Read) {
        Some(inherited) => {
            let mut file = inherited.map_err(&fail)?;
            // An earlier boot may have read the file to its end.
            file.rewind().map_err(&fail)?;
            file
        }
        None => {
            // Without O_NONBLOCK, opening a pipe without a writer would block this thread, and so all API clients.
            let flags = OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
            open(path, OFlags::RDONLY | flags, Mode::empty()).map(File::from).map_err(|error| fail(error.into()))?
        }
    };
    let metadata = file.metadata().map_err(&fail)?;
    if !metadata.is_file() {
        return Err(fail(io::Error::other("is not a regular file")));
    }
    if metadata.len() == 0 {
        return Err(fail(io::Error::other("the file is empty")));
    }
    Ok((file, metadata.len()))
}

fn identify(head: &[u8]) -> Option<Image> {
    if head.starts_with(b"\x7fELF") {
        Some(Image::Elf)
    } else if head.get(0x202..0x206) == Some(b"HdrS") {
        Some(Image::BzImage)
    } else {
        None
    }
}

#[cfg(test)]
mod tests;
