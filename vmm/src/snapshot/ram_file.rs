// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! `memory-ranges`: the bytes of RAM and of bounce windows, one range after the other. Pages that are all zero are holes.

use std::fs::File;
use std::io;
use std::iter;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;

use rustix::fs::{SeekFrom, seek};
use vm_memory::VolatileSlice;
use vm_memory::bitmap::BitmapSlice;

use crate::arch::layout::PAGE_SIZE;

/// Page of zeros. The writer compares whole pages with this page, because comparing byte by byte takes ten times as long.
const ZEROS: [u8; 4096] = [0; 4096];
const _: () = assert!(ZEROS.len() as u64 == PAGE_SIZE);

/// Number of bytes that are copied in one step.
const BLOCK: usize = 1 << 20;

/// Writer of the file `memory-ranges`.
#[derive(Debug)]
pub struct RamFileWriter {
    file: File,
    block: Vec<u8>,
    /// Offset of the next range.
    next: u64,
}

impl RamFileWriter {
    /// Creates a writer for `file`, which must be empty.
    pub fn new(file: File) -> Self {
        Self { file, block: vec![0; BLOCK], next: 0 }
    }

    /// Appends the bytes of `memory`, whose length is a multiple of the page size. Returns the offset of these bytes in the file.
    ///
    /// # Errors
    /// The kernel rejects the write, for example because the disk is full.
    pub fn append<B: BitmapSlice>(&mut self, memory: &VolatileSlice<'_, B>) -> io::Result<u64> {
        self.append_blocks(memory.len(), |done, block| {
            memory.subslice(done, block.len()).map_err(io::Error::other)?.copy_to(block);
            Ok(())
        })
    }

    /// Appends `len` bytes of the file `memory` from `offset` on. `len` is a multiple of the page size. Returns the offset of these bytes
    /// in `memory-ranges`. `memory` is shared memory: reading its file keeps the holes, whereas reading a mapping would allocate pages.
    ///
    /// # Errors
    /// The kernel rejects the write, for example because the disk is full.
    pub fn append_file(&mut self, memory: &File, offset: u64, len: usize) -> io::Result<u64> {
        self.append_blocks(len, |done, block| memory.read_exact_at(block, offset + done as u64))
    }

    /// Appends `len` bytes in blocks. `fill` writes the contents of each block. Its first argument is the number of bytes before this
    /// block.
    fn append_blocks(
        &mut self,
        len: usize,
        mut fill: impl FnMut(usize, &mut [u8]) -> io::Result<()>,
    ) -> io::Result<u64> {
        let start = self.next;
        let mut done = 0;
        while done < len {
            let block = &mut self.block[..BLOCK.min(len - done)];
            fill(done, block)?;
            write_pages(&self.file, block, start + done as u64)?;
            done += block.len();
        }
        self.next = start + len as u64;
        // Without this call, a hole at the end would not be part of the file.
        self.file.set_len(self.next)?;
        Ok(start)
    }

    /// Flushes the file to the disk.
    ///
    /// # Errors
    /// The disk failed.
    pub fn sync(&self) -> io::Result<()> {
        self.file.sync_all()
    }
}

/// Writes `block` at `offset` of the file, except pages that are all zero. Adjacent pages are written with one call.
fn write_pages(file: &File, block: &[u8], offset: u64) -> io::Result<()> {
    let is_zero = |page: &&[u8]| **page == ZEROS[..page.len()];
    let mut pages = block.chunks(ZEROS.len()).peekable();
    let mut place = 0;
    while pages.peek().is_some() {
        let zeros: usize = iter::from_fn(|| pages.next_if(is_zero)).map(<[u8]>::len).sum();
        let data: usize = iter::from_fn(|| pages.next_if(|page| !is_zero(page))).map(<[u8]>::len).sum();
        place += zeros;
        file.write_all_at(&block[place..place + data], offset + place as u64)?;
        place += data;
    }
    Ok(())
}

/// Reader of the file `memory-ranges`.
#[derive(Debug)]
pub struct RamFile(File);

impl AsFd for RamFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl RamFile {
    pub(super) fn new(file: File) -> Self {
        Self(file)
    }

    /// Returns the size of the file in bytes.
    ///
    /// # Errors
    /// The kernel rejects the call.
    pub fn size(&self) -> io::Result<u64> {
        Ok(self.0.metadata()?.len())
    }

    /// Copies the bytes from `offset` on into `memory`, which must be all zero, because holes are skipped.
    ///
    /// # Errors
    /// The kernel rejects the read, or the file is too short.
    pub fn read<B: BitmapSlice>(&self, offset: u64, memory: &VolatileSlice<'_, B>) -> io::Result<()> {
        let end = offset.checked_add(memory.len() as u64).ok_or(io::ErrorKind::InvalidInput)?;
        if end > self.size()? {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let mut block = vec![0; BLOCK];
        let mut at = offset;
        while at < end {
            let Some(data) = self.find(SeekFrom::Data(at))?.filter(|data| *data < end) else { break };
            // On a file system with blocks smaller than a page, a hole may begin within a page. So the length of the data need not be a
            // multiple of the page size.
            let hole = self.find(SeekFrom::Hole(data))?.unwrap_or(end).min(end);
            at = data;
            while at < hole {
                let len = BLOCK.min(usize::try_from(hole - at).unwrap_or(BLOCK));
                self.0.read_exact_at(&mut block[..len], at)?;
                let place = usize::try_from(at - offset).map_err(io::Error::other)?;
                memory.subslice(place, len).map_err(io::Error::other)?.copy_from(&block[..len]);
                at += len as u64;
            }
        }
        Ok(())
    }

    /// Returns the offset of the next data or hole, as `from` asks. Returns `None` if no such data or hole follows before the end of the
    /// file.
    fn find(&self, from: SeekFrom) -> io::Result<Option<u64>> {
        match seek(&self.0, from) {
            Ok(place) => Ok(Some(place)),
            Err(rustix::io::Errno::NXIO) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    const LEN: usize = 3 << 20;

    fn slice(bytes: &mut [u8]) -> VolatileSlice<'_> {
        VolatileSlice::from(bytes)
    }

    #[test]
    fn memory_reads_back_as_it_was_and_zero_pages_take_no_room() {
        let mut memory = vec![0; LEN];
        memory[4095] = 1;
        memory[(1 << 20) - 1..(1 << 20) + 1].fill(2);
        memory[LEN - 1] = 3;
        let mut small = vec![7; 8192];
        let file = tempfile::tempfile().unwrap();
        let mut writer = RamFileWriter::new(file.try_clone().unwrap());
        assert_eq!(writer.append(&slice(&mut memory)).unwrap(), 0);
        assert_eq!(writer.append(&slice(&mut vec![0; LEN])).unwrap(), LEN as u64);
        assert_eq!(writer.append(&slice(&mut small)).unwrap(), 2 * LEN as u64);
        writer.sync().unwrap();
        let metadata = file.metadata().unwrap();
        assert_eq!(metadata.len(), 2 * LEN as u64 + 8192);
        assert!(metadata.blocks() * 512 < 1 << 20, "{} blocks", metadata.blocks());
        let file = RamFile::new(file);
        let mut read = vec![0; LEN];
        file.read(0, &slice(&mut read)).unwrap();
        assert_eq!(read, memory);
        let mut read = vec![0; LEN];
        file.read(LEN as u64, &slice(&mut read)).unwrap();
        assert!(read.iter().all(|byte| *byte == 0));
        let mut read = vec![0; 8192];
        file.read(2 * LEN as u64, &slice(&mut read)).unwrap();
        assert_eq!(read, small);
    }

    #[test]
    fn file_that_ends_too_early_is_refused() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        let file = RamFile::new(file);
        let mut bytes = vec![0; 8192];
        assert_eq!(file.read(0, &slice(&mut bytes)).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        assert!(file.read(u64::MAX - 1, &slice(&mut bytes)).is_err());
    }
}
