// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Messages about lost guest memory.

use std::fs::File;

use rustix::fs::{SeekFrom, fstat, seek};

use super::probe::populate_page;
use super::regions::{self, Origin, Region, Supply};

/// Reason why a page is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The host cannot supply the page.
    Missing,
    /// The page has an uncorrectable memory error.
    Poisoned,
}

/// Lost page of guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loss {
    /// Address of the page in this process, if known.
    pub address: Option<usize>,
    /// Guest-physical address of the page, if known.
    pub gpa: Option<u64>,
    /// Reason why the page is lost.
    pub cause: Cause,
}

impl Loss {
    /// Returns a one-line message for the user. The message names the region and its file.
    pub fn explain(&self) -> String {
        let what = match self.cause {
            Cause::Missing => "the host cannot supply guest memory",
            Cause::Poisoned => "the host reports an uncorrectable memory error in guest memory",
        };
        match self.address.and_then(|address| Some((regions::find(address)?, address))) {
            Some((region, address)) => format!("{what}: {}", self.at(&region, address)),
            None => format!("{what}: {}", self.without_address()),
        }
    }

    fn at(&self, Region { origin, range, .. }: &Region, address: usize) -> String {
        let offset = (address - range.address) as u64;
        let gpa = self.gpa.or(origin.gpa.map(|gpa| gpa + offset));
        let gpa = gpa.map(|gpa| format!(" (guest-physical {gpa:#x})")).unwrap_or_default();
        let hint = self.hint(origin);
        format!("{}, offset {:#x}{gpa}{hint}", origin.name, origin.offset + offset)
    }

    fn hint(&self, origin: &Origin) -> &'static str {
        match (self.cause, origin.supply) {
            (Cause::Poisoned, _) => "; replace the memory module that the host's log names",
            (_, Supply::File) => {
                "; make sure that the file has its full size and is readable, and that its file system has free space"
            }
            (_, Supply::HugePages) => "; no huge page is free: reserve more, see /sys/kernel/mm/hugepages",
            (_, Supply::Memory) => "; make sure that the host has free memory and can read its swap space",
        }
    }

    /// Returns the names of the regions that lack a page now. If no region lacks a page, returns the names of all regions.
    fn without_address(&self) -> String {
        let gpa = self.gpa.map(|gpa| format!("guest-physical {gpa:#x}, ")).unwrap_or_default();
        let names = regions::with_all(|all| {
            let suspects: Vec<String> =
                all.iter().filter(|region| lacks_a_page(region)).map(|of| self.name(of)).collect();
            if suspects.is_empty() { all.iter().map(|of| of.origin.name.clone()).collect() } else { suspects }
        });
        match names.as_slice() {
            [] => format!("{gpa}in a device's memory"),
            names => format!("{gpa}in {}", names.join(" or ")),
        }
    }

    fn name(&self, region: &Region) -> String {
        format!("{}{}", region.origin.name, self.hint(&region.origin))
    }
}

/// Returns a one-line message for the user if a region of guest memory lacks a page now. The missing page may be the reason why KVM failed.
pub fn missing_memory() -> Option<String> {
    let lacking = regions::with_all(|all| all.iter().any(lacks_a_page));
    lacking.then(|| Loss { address: None, gpa: None, cause: Cause::Missing }.explain())
}

/// Returns a one-line message for the user if the file of a region was truncated, because guest data is then lost. A hole in a file that is
/// not truncated does not count, even if the host cannot fill the hole now.
pub fn truncated_memory() -> Option<String> {
    let truncated =
        regions::with_all(|all| all.iter().any(|region| lacks_its_last_page(region) && has_short_file(region)));
    truncated.then(|| Loss { address: None, gpa: None, cause: Cause::Missing }.explain())
}

fn is_missing(address: usize, for_writing: bool) -> bool {
    populate_page(address, for_writing).is_err_and(|error| error.raw_os_error() == Some(libc::EFAULT))
}

/// True if the last page of a region cannot be read, for example because the region's file was truncated.
fn lacks_its_last_page(Region { range, origin, .. }: &Region) -> bool {
    range.len > 0 && origin.supply != Supply::Memory && is_missing(range.address + (range.len - 1), false)
}

/// True if the file of a region is too short for the region, or if the size is unknown because this process has not opened the file.
fn has_short_file(Region { range, origin, .. }: &Region) -> bool {
    let end = origin.offset.saturating_add(range.len as u64);
    let is_short = |file| fstat(file).is_ok_and(|stat| u64::try_from(stat.st_size).is_ok_and(|size| size < end));
    origin.file.as_ref().is_none_or(is_short)
}

/// True if the last page of a region cannot be read, or the first hole of the region's file cannot be filled.
fn lacks_a_page(region: &Region) -> bool {
    let Region { range, origin, .. } = region;
    if range.len == 0 || origin.supply == Supply::Memory {
        return false;
    }
    if lacks_its_last_page(region) {
        return true;
    }
    let hole = origin.file.as_ref().and_then(|file| first_hole(file, origin.offset));
    let hole = hole.and_then(|hole| usize::try_from(hole).ok()).filter(|hole| *hole < range.len);
    match hole {
        Some(hole) => is_missing(range.address + hole, true),
        // Hugetlbfs does not report holes, so compare the number of blocks with the length of the file.
        None => origin.supply == Supply::HugePages && origin.file.as_ref().is_some_and(|file| has_fewer_blocks(file)),
    }
}

/// Returns the offset of the first hole at or after `start`, relative to `start`.
fn first_hole(file: &File, start: u64) -> Option<u64> {
    seek(file, SeekFrom::Hole(start)).ok()?.checked_sub(start)
}

/// True if the file has fewer blocks of 512 bytes than its length needs. `File::metadata` would use `statx`, which the system call filters
/// of most threads forbid.
fn has_fewer_blocks(file: &File) -> bool {
    fstat(file).is_ok_and(|stat| stat.st_blocks.saturating_mul(512) < stat.st_size)
}
