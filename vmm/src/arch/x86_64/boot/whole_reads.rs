// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Complete reads of a file. On a network file system, 9p or FUSE, a single read may return fewer bytes than requested.

use std::io::{Read, Result, Seek, SeekFrom};

use vm_memory::bitmap::BitmapSlice;
use vm_memory::{ReadVolatile, VolatileMemoryError, VolatileSlice};

/// File whose reads into guest memory continue until the memory is full or the file ends.
pub(super) struct WholeReads<R>(pub(super) R);

impl<R: ReadVolatile> ReadVolatile for WholeReads<R> {
    fn read_volatile<B: BitmapSlice>(
        &mut self,
        memory: &mut VolatileSlice<'_, B>,
    ) -> std::result::Result<usize, VolatileMemoryError> {
        let mut done = 0;
        while done < memory.len() {
            match self.0.read_volatile(&mut memory.offset(done)?)? {
                0 => break,
                more => done += more,
            }
        }
        Ok(done)
    }
}

impl<R: Read> Read for WholeReads<R> {
    fn read(&mut self, data: &mut [u8]) -> Result<usize> {
        self.0.read(data)
    }
}

impl<R: Seek> Seek for WholeReads<R> {
    fn seek(&mut self, place: SeekFrom) -> Result<u64> {
        self.0.seek(place)
    }
}

#[cfg(test)]
mod tests {
    use vm_memory::{Bytes, GuestAddress};

    use super::*;
    use crate::memory;
    use carom_api::config::MemoryConfig;

    /// Source that returns three bytes at a time.
    struct Slow(u8, usize);

    impl ReadVolatile for Slow {
        fn read_volatile<B: BitmapSlice>(
            &mut self,
            memory: &mut VolatileSlice<'_, B>,
        ) -> std::result::Result<usize, VolatileMemoryError> {
            let count = memory.len().min(3).min(self.1);
            for place in 0..count {
                self.0 = self.0.wrapping_add(1);
                memory.write_obj(self.0, place)?;
            }
            self.1 -= count;
            Ok(count)
        }
    }

    #[test]
    fn file_with_short_reads_is_read_completely() {
        let memory = memory::create(&MemoryConfig::with_size(64 << 20)).unwrap();
        let at = GuestAddress(0x1000);
        memory.read_exact_volatile_from(at, &mut Slow(0, 100), 100).unwrap_err();
        memory.read_exact_volatile_from(at, &mut WholeReads(Slow(0, 100)), 100).unwrap();
        let mut bytes = [0; 100];
        memory.read_slice(&mut bytes, at).unwrap();
        assert!(bytes.iter().zip(1..).all(|(byte, expected)| *byte == expected), "{bytes:?}");
        // The read fails, because the file is shorter than the requested length.
        memory.read_exact_volatile_from(at, &mut WholeReads(Slow(0, 99)), 100).unwrap_err();
    }
}
