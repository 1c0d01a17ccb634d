// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A discard or write-zeroes request under way, processed range by range.

use super::transfer::{Failure, IoBuffer, list};
use crate::virtio::block::image::buffer::zeroes;
use crate::virtio::block::image::op::Op;

/// Effect that the driver requests for the ranges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// The content of the ranges is no longer needed.
    Discarded,
    /// The ranges read as zero afterwards.
    Zeroed {
        /// True if the ranges may be deallocated.
        unmap: bool,
    },
}

/// Maximum number of buffers in one write of zeroes.
const BUFFERS: usize = 16;

/// Progress of a discard or write-zeroes request.
pub(super) struct Ranges {
    fate: Fate,
    /// Offset and length of each remaining range, in reverse order: the device processes the last element next.
    left: Vec<(u64, u64)>,
    /// Buffers of the next write of zeroes. `Some` if the host cannot zero a range with `fallocate`, so that the device must write the
    /// zeroes.
    writes: Option<Vec<IoBuffer>>,
}

impl Ranges {
    /// Creates the progress of a new request. `ranges` contains the offset and length of each range, in bytes.
    pub(super) fn new(fate: Fate, mut ranges: Vec<(u64, u64)>) -> Self {
        ranges.retain(|(_, len)| *len != 0);
        ranges.reverse();
        Self { fate, left: ranges, writes: None }
    }

    /// Returns the next operation. `None` means that all ranges are done.
    pub(super) fn next(&mut self) -> Option<Op> {
        let (offset, len) = *self.left.last()?;
        if let Some(buffers) = &mut self.writes {
            let (address, most) = zeroes();
            let mut left = usize::try_from(len).unwrap_or(usize::MAX).min(BUFFERS * most);
            buffers.clear();
            while left != 0 {
                let part = left.min(most);
                buffers.push(IoBuffer::new(address.cast_mut(), part));
                left -= part;
            }
            return Some(Op::Write { buffers: list(buffers), offset });
        }
        let how = match self.fate {
            Fate::Discarded | Fate::Zeroed { unmap: true } => libc::FALLOC_FL_PUNCH_HOLE,
            Fate::Zeroed { unmap: false } => libc::FALLOC_FL_ZERO_RANGE,
        };
        Some(Op::Allocate { mode: how | libc::FALLOC_FL_KEEP_SIZE, offset, len })
    }

    /// Records that the operation has ended with `result`.
    pub(super) fn ended(&mut self, result: i32) -> Result<(), Failure> {
        let Some((offset, len)) = self.left.last_mut() else { return Ok(()) };
        match (&self.writes, result) {
            (Some(_), 1..) => {
                let bytes = u64::from(result.unsigned_abs()).min(*len);
                (*offset, *len) = (*offset + bytes, *len - bytes);
                if *len == 0 {
                    self.left.pop();
                }
            }
            (Some(_), 0) => return Err(Failure::Host(libc::ENOSPC)),
            (None, 0..) => drop(self.left.pop()),
            (None, error) if [-libc::EOPNOTSUPP, -libc::ENOSYS].contains(&error) => match self.fate {
                // A discard is only a hint, so the request succeeds.
                Fate::Discarded => drop(self.left.pop()),
                Fate::Zeroed { .. } => self.writes = Some(Vec::with_capacity(BUFFERS)),
            },
            (_, error) => return Err(Failure::Host(-error)),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range_of(op: Option<Op>) -> Option<(i32, u64, u64)> {
        match op {
            Some(Op::Allocate { mode, offset, len }) => Some((mode & !libc::FALLOC_FL_KEEP_SIZE, offset, len)),
            _ => None,
        }
    }

    #[test]
    fn ranges_run_in_order_without_empty_ones() {
        let mut ranges = Ranges::new(Fate::Discarded, vec![(0, 512), (4096, 0), (1024, 1024)]);
        assert_eq!(range_of(ranges.next()), Some((libc::FALLOC_FL_PUNCH_HOLE, 0, 512)));
        ranges.ended(0).unwrap();
        assert_eq!(range_of(ranges.next()), Some((libc::FALLOC_FL_PUNCH_HOLE, 1024, 1024)));
        ranges.ended(-libc::EOPNOTSUPP).unwrap();
        assert!(ranges.next().is_none());
    }

    #[test]
    fn zeroes_are_written_if_fallocate_is_unsupported() {
        let mut ranges = Ranges::new(Fate::Zeroed { unmap: false }, vec![(512, 3 << 20)]);
        assert_eq!(range_of(ranges.next()), Some((libc::FALLOC_FL_ZERO_RANGE, 512, 3 << 20)));
        ranges.ended(-libc::EOPNOTSUPP).unwrap();
        let mut merged = Vec::new();
        // In the second write, the host writes 512 bytes less than requested.
        for bytes in [1 << 20, (1 << 20) - 512, 1 << 20, 512] {
            let Some(Op::Write { offset, buffers }) = ranges.next() else {
                panic!("the operation is not a write of zeroes")
            };
            merged.push((offset, buffers.count));
            ranges.ended(bytes).unwrap();
        }
        assert_eq!(merged, [(512, 16), ((1 << 20) + 512, 16), (2 << 20, 16), (3 << 20, 1)]);
        assert!(ranges.next().is_none());
    }

    #[test]
    fn host_error_fails_the_request() {
        let mut ranges = Ranges::new(Fate::Zeroed { unmap: true }, vec![(0, 512)]);
        assert_eq!(ranges.ended(-libc::EIO), Err(Failure::Host(libc::EIO)));
        ranges.ended(-libc::ENOSYS).unwrap();
        assert!(matches!(ranges.next(), Some(Op::Write { .. })));
        assert_eq!(ranges.ended(0), Err(Failure::Host(libc::ENOSPC)));
    }
}
