// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Storage layer between the qcow2 crate and the image's file. The layer delays writes to the L1 table until the image is flushed.
//!
//! The crate caches L2 tables and refcounts in memory. The crate writes the L2 tables and refcounts in an order that keeps the image
//! consistent, even if the process is killed. But the crate writes each L1 entry immediately. The entry names an L2 table whose refcount
//! may still be only in memory. If the process is killed before the refcount is written, the refcounts in the file do not include the L2
//! table. The cluster of the L2 table can then be allocated a second time.

use std::fmt::{self, Display, Formatter};
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use imago::file::File;
use imago::io_buffers::{IoVector, IoVectorMut};
use imago::storage::PreallocateMode;
use imago::storage::drivers::CommonStorageHelper;
use imago::{Storage, StorageExt};

use crate::sync::lock;

/// Position of the L1 table, and the part of the table that must still be written to the file.
#[derive(Debug, Default)]
pub(super) struct L1Table {
    /// Byte range of the table in the file.
    place: Range<u64>,
    /// Content of the table. `None` until the crate writes to the table.
    bytes: Option<Vec<u8>>,
    /// Range of `bytes` that must still be written to the file.
    waiting: Range<usize>,
}

impl L1Table {
    /// Creates a table at the byte range `place`, with nothing waiting to be written.
    pub(super) fn at(place: Range<u64>) -> Self {
        Self { place, ..Self::default() }
    }

    /// Returns the overlap of the table with the `len` bytes that start at `offset`. The first range is relative to the start of the table.
    /// The second range is relative to `offset`.
    fn part(&self, offset: u64, len: usize) -> Option<(Range<usize>, Range<usize>)> {
        let end = offset.checked_add(len as u64)?;
        let (from, to) = (offset.max(self.place.start), end.min(self.place.end));
        let within = |start: u64| Some(usize::try_from(from - start).ok()?..usize::try_from(to - start).ok()?);
        (from < to).then(|| Some((within(self.place.start)?, within(offset)?)))?
    }
}

/// File of the image, with delayed writes to its L1 table.
#[derive(Debug)]
pub(super) struct Ordered {
    file: File,
    l1: Arc<Mutex<L1Table>>,
}

impl Ordered {
    pub(super) fn new(file: File, l1: Arc<Mutex<L1Table>>) -> Self {
        Self { file, l1 }
    }
}

impl Display for Ordered {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        self.file.fmt(f)
    }
}

impl Storage for Ordered {
    fn mem_align(&self) -> usize {
        self.file.mem_align()
    }

    fn req_align(&self) -> usize {
        self.file.req_align()
    }

    fn zero_align(&self) -> usize {
        self.file.zero_align()
    }

    fn discard_align(&self) -> usize {
        self.file.discard_align()
    }

    fn size(&self) -> io::Result<u64> {
        self.file.size()
    }

    unsafe fn pure_readv(&self, mut bufv: IoVectorMut<'_>, offset: u64) -> io::Result<()> {
        let len = usize::try_from(bufv.len()).map_err(io::Error::other)?;
        {
            let l1 = lock(&self.l1);
            if let (Some(table), Some((within, here))) = (&l1.bytes, l1.part(offset, len)) {
                let mut bytes = vec![0; len];
                self.file.read(&mut bytes, offset)?;
                bytes[here].copy_from_slice(&table[within]);
                bufv.copy_from_slice(&bytes);
                return Ok(());
            }
        }
        // SAFETY: The caller guarantees what `pure_readv` requires.
        unsafe { self.file.pure_readv(bufv, offset) }
    }

    unsafe fn pure_writev(&self, bufv: IoVector<'_>, offset: u64) -> io::Result<()> {
        let len = usize::try_from(bufv.len()).map_err(io::Error::other)?;
        {
            let mut l1 = lock(&self.l1);
            if let Some((within, here)) = l1.part(offset, len) {
                let mut bytes = vec![0; len];
                bufv.copy_into_slice(&mut bytes);
                if l1.bytes.is_none() {
                    let mut table = vec![0; usize::try_from(l1.place.end - l1.place.start).map_err(io::Error::other)?];
                    self.file.read(&mut table, l1.place.start)?;
                    l1.bytes = Some(table);
                }
                if let Some(table) = &mut l1.bytes {
                    table[within.clone()].copy_from_slice(&bytes[here.clone()]);
                }
                let none = l1.waiting.is_empty();
                let (start, end) = (l1.waiting.start.min(within.start), l1.waiting.end.max(within.end));
                l1.waiting = if none { within } else { start..end };
                drop(l1);
                // Write the bytes before and after the table. With direct I/O, a write consists of whole blocks, and one block can contain
                // the table's end and other data.
                for beside in [0..here.start, here.end..len] {
                    if !beside.is_empty() {
                        self.file.write(&bytes[beside.clone()], offset + beside.start as u64)?;
                    }
                }
                return Ok(());
            }
        }
        // SAFETY: The caller guarantees what `pure_writev` requires.
        unsafe { self.file.pure_writev(bufv, offset) }
    }

    unsafe fn pure_write_zeroes(&self, offset: u64, length: u64) -> io::Result<()> {
        // SAFETY: The caller guarantees what `pure_write_zeroes` requires.
        unsafe { self.file.pure_write_zeroes(offset, length) }
    }

    unsafe fn pure_write_allocated_zeroes(&self, offset: u64, length: u64) -> io::Result<()> {
        // SAFETY: The caller guarantees what `pure_write_allocated_zeroes` requires.
        unsafe { self.file.pure_write_allocated_zeroes(offset, length) }
    }

    unsafe fn pure_discard(&self, offset: u64, length: u64) -> io::Result<()> {
        // SAFETY: The caller guarantees what `pure_discard` requires.
        unsafe { self.file.pure_discard(offset, length) }
    }

    /// Writes the waiting L1 entries. The crate calls this function after it has written the other tables. The function syncs these tables
    /// first. So an L1 entry on the host's disk never refers to a table that is not on the disk yet.
    fn flush(&self) -> io::Result<()> {
        let mut l1 = lock(&self.l1);
        let waiting = l1.waiting.clone();
        if let Some(table) = l1.bytes.as_ref().filter(|_| !waiting.is_empty()) {
            self.file.sync()?;
            self.file.write(&table[waiting.clone()], l1.place.start + waiting.start as u64)?;
            l1.waiting = 0..0;
        }
        drop(l1);
        self.file.flush()
    }

    fn sync(&self) -> io::Result<()> {
        self.file.sync()
    }

    unsafe fn invalidate_cache(&self) -> io::Result<()> {
        // SAFETY: The caller guarantees what `invalidate_cache` requires.
        unsafe { self.file.invalidate_cache() }
    }

    fn get_storage_helper(&self) -> &CommonStorageHelper {
        self.file.get_storage_helper()
    }

    fn resize(&self, new_size: u64, prealloc_mode: PreallocateMode) -> io::Result<()> {
        self.file.resize(new_size, prealloc_mode)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn l1_table_write_is_read_at_once_and_in_file_after_flush() {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&[1; 4096], 0).unwrap();
        let l1 = Arc::new(Mutex::new(L1Table::at(1024..2048)));
        let ordered = Ordered::new(File::try_from(file.try_clone().unwrap()).unwrap(), l1);
        let in_file = || {
            let mut bytes = [0; 4096];
            file.read_exact_at(&mut bytes, 0).unwrap();
            bytes
        };
        // The writes are before the table, across its start, across its end, and within the table.
        for (offset, len, value) in [(0, 100, 2), (1000, 100, 3), (2000, 100, 4), (1500, 8, 5)] {
            ordered.write(&vec![value; len], offset).unwrap();
        }
        let mut expected = [1; 4096];
        expected[..100].fill(2);
        expected[1000..1024].fill(3);
        expected[2048..2100].fill(4);
        assert!(in_file() == expected);
        expected[1024..1100].fill(3);
        expected[2000..2048].fill(4);
        expected[1500..1508].fill(5);
        let mut read = vec![0; 4096];
        ordered.read(&mut read, 0).unwrap();
        assert!(read == expected);
        ordered.flush().unwrap();
        assert!(in_file() == expected);
        ordered.read(&mut read[..8], 1500).unwrap();
        assert_eq!(read[..8], [5; 8]);
    }
}
