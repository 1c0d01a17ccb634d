// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Clears the parts of an ELF image's memory for which the file has no bytes, such as BSS. The System V ABI ("Program Header") requires
//! zeros in these parts. linux-loader writes only the file's bytes. Writing only these bytes is enough for fresh RAM, but not for the RAM
//! of a guest that was reset.

use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;

use devices::ram::{Ram, RamRegion};
use rustix::fs::{self, SeekFrom as Find};
use rustix::io::Errno;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryError, GuestMemoryRegion};

use crate::arch::layout::{HIGH_RAM_START, LOW_RAM_END, PAGE_SIZE};

/// Length of the ELF header in bytes.
const HEADER_LEN: usize = 64;
/// Length of a program header in bytes.
const PROGRAM_HEADER_LEN: usize = 56;
/// Maximum number of program headers. Kernels and firmware have only a few.
const MAX_PROGRAM_HEADERS: u16 = 256;
/// Type of a loadable segment.
const PT_LOAD: u32 = 1;
/// Bytes of a page. RAM is cleared page by page.
const PAGE: usize = 4096;

/// Loadable segment with guest-physical addresses. An address that would overflow 64 bits is replaced by `u64::MAX`, where no RAM can be.
pub(super) struct Segment {
    /// Length in bytes in the file or in memory, whichever is larger.
    pub(super) len: u64,
    /// Part of the segment for which the file has no bytes.
    pub(super) zeros: Range<u64>,
    /// First address after the segment.
    pub(super) end: u64,
}

/// Returns the loadable segments of `image`. If the program headers have an unexpected length, returns an empty list, because linux-loader
/// rejects such an image later.
///
/// # Errors
/// The file cannot be read or ends too early, or has too many headers.
pub(super) fn segments(image: &mut (impl Read + Seek)) -> io::Result<Vec<Segment>> {
    let mut header = [0; HEADER_LEN];
    image.rewind()?;
    image.read_exact(&mut header)?;
    let [header_len, count] = [54, 56].map(|at| u16::from_le_bytes(bytes(&header, at)));
    if usize::from(header_len) != PROGRAM_HEADER_LEN {
        return Ok(Vec::new());
    }
    if count > MAX_PROGRAM_HEADERS {
        return Err(io::Error::other(format!(
            "the image has {count} headers, but the maximum is {MAX_PROGRAM_HEADERS}"
        )));
    }
    image.seek(SeekFrom::Start(u64::from_le_bytes(bytes(&header, 32))))?;
    let mut headers = vec![0; usize::from(count) * PROGRAM_HEADER_LEN];
    image.read_exact(&mut headers)?;
    let to_load = |header: &&[u8]| u32::from_le_bytes(bytes(header, 0)) == PT_LOAD;
    Ok(headers.chunks_exact(PROGRAM_HEADER_LEN).filter(to_load).map(segment).collect())
}

fn segment(header: &[u8]) -> Segment {
    let [address, file_len, len] = [24, 32, 40].map(|at| u64::from_le_bytes(bytes(header, at)));
    let len = len.max(file_len);
    let end = address.saturating_add(len);
    Segment { len, zeros: address.saturating_add(file_len)..end, end }
}

/// Returns `N` bytes of a header, from offset `at` on. The header must be long enough.
fn bytes<const N: usize>(header: &[u8], at: usize) -> [u8; N] {
    std::array::from_fn(|place| header[at + place])
}

/// Clears a range of RAM. Skips the addresses between `LOW_RAM_END` and `HIGH_RAM_START`, because these addresses already contain tables.
///
/// Pages that are already zero are not written, because a write would make the host allocate or unshare these pages. Reading may also
/// allocate a page. So this function does not even read `fresh` RAM, which no guest of this VMM has used. Fresh RAM is still cleared if a
/// file with data backs part of the range, because that file may have been another VM's RAM.
pub(super) fn zero(memory: &Ram, range: &Range<u64>, fresh: bool) -> Result<(), GuestMemoryError> {
    for range in [range.start..range.end.min(LOW_RAM_END), range.start.max(HIGH_RAM_START)..range.end] {
        if !range.is_empty() && (!fresh || memory.iter().any(|region| may_have_data(region, &range))) {
            zero_pages(memory, range)?;
        }
    }
    Ok(())
}

/// True if a region that no guest of this VMM has used may contain non-zero bytes in `range`.
fn may_have_data(region: &RamRegion, range: &Range<u64>) -> bool {
    let Some(file) = region.file_offset() else { return false };
    let first = region.start_addr().0;
    let (start, end) = (range.start.max(first), range.end.min(first.saturating_add(region.len())));
    let place = |address: u64| file.start() + (address - first);
    start < end
        && match fs::seek(file.file(), Find::Data(place(start))) {
            Ok(data) => data < place(end),
            // NXIO: the file has no data from this offset to the end of the file. On other errors, the region may have data.
            Err(error) => error != Errno::NXIO,
        }
}

fn zero_pages(memory: &Ram, range: Range<u64>) -> Result<(), GuestMemoryError> {
    let mut block = [0; PAGE];
    let mut at = range.start;
    while at < range.end {
        let len = (PAGE_SIZE - at % PAGE_SIZE).min(range.end - at);
        let part = ..usize::try_from(len).unwrap_or(PAGE);
        let (block, zeros) = (&mut block[part], &[0; PAGE][part]);
        memory.read_slice(block, GuestAddress(at))?;
        if block != zeros {
            memory.write_slice(zeros, GuestAddress(at))?;
        }
        at += len;
    }
    Ok(())
}
