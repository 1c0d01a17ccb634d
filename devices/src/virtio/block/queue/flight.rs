// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A request under way: its remaining work and its result.

use vm_memory::GuestAddress;

use super::ranges::{Fate, Ranges};
use super::transfer::{Failure, Transfer};
use crate::counters::count;
use crate::dma::DeviceMemory;
use crate::host_memory::report_io;
use crate::virtio::block::counters::Counts;
use crate::virtio::block::image::op::Op;
use crate::virtio::block::spec::status;

/// Maximum number of retries per request, after the host kernel ended an operation with `EINTR` or `EAGAIN`.
const MOST_RETRIES: u32 = 16;

/// Work of a request, before the final sync.
pub(super) enum Work {
    Read(Transfer),
    Write(Transfer),
    Ranges(Fate, Ranges),
    /// No work: a flush only syncs.
    None,
}

/// State of the sync at the end of a request.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Sync {
    /// No sync is needed, or the sync is done.
    None,
    Wanted,
    UnderWay,
}

/// Request under way. The request, and the memory that its operations use, must not move until the kernel has finished the operations.
pub(super) struct Flight {
    head: u16,
    status: GuestAddress,
    /// Number of bytes that the request reads or writes if the request succeeds.
    bytes: usize,
    work: Work,
    sync: Sync,
    /// Number of the request's I/O. When the guest memory is unmapped, `Owner` uses this number to cancel the I/O.
    number: Option<u64>,
    /// True if the request was cancelled.
    cancelled: bool,
    retries: u32,
}

/// Answer to a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Answer {
    pub(super) head: u16,
    /// Address of the status byte.
    pub(super) place: GuestAddress,
    pub(super) status: u8,
    /// Number of bytes that the device wrote to the driver's buffers, including the status byte.
    pub(super) used: u32,
}

impl Flight {
    /// Creates a request. If `syncs` is true, the request ends only when its writes are durable.
    pub(super) fn new(head: u16, status: GuestAddress, bytes: usize, work: Work, syncs: bool) -> Self {
        let sync = if syncs { Sync::Wanted } else { Sync::None };
        Self { head, status, bytes, work, sync, number: None, cancelled: false, retries: 0 }
    }

    /// Sets the number of the request's I/O. The number identifies the request when the I/O must be cancelled.
    pub(super) fn numbered(self, number: Option<u64>) -> Self {
        Self { number, ..self }
    }

    /// Returns true if `number` is the number of this request's I/O.
    pub(super) fn is(&self, number: u64) -> bool {
        self.number == Some(number)
    }

    /// Returns true if the request writes data of the driver to the image.
    pub(super) fn is_write(&self) -> bool {
        matches!(self.work, Work::Write(_))
    }

    /// Cancels the request. The request fails after its current operation.
    pub(super) fn cancel(&mut self) {
        self.cancelled = true;
    }

    /// Returns the next operation. `None` means that the request is complete.
    pub(super) fn next(&mut self, memory: &DeviceMemory) -> Result<Option<Op>, Failure> {
        if self.cancelled {
            return Err(Failure::Memory);
        }
        let op = match &mut self.work {
            Work::Read(transfer) | Work::Write(transfer) => transfer.next(memory)?,
            Work::Ranges(_, ranges) => ranges.next(),
            Work::None => None,
        };
        if op.is_none() && self.sync == Sync::Wanted {
            self.sync = Sync::UnderWay;
            return Ok(Some(Op::Sync));
        }
        Ok(op)
    }

    /// Records that the operation has ended with `result`: a number of bytes, or a negative error number.
    pub(super) fn ended(&mut self, result: i32, memory: &DeviceMemory) -> Result<(), Failure> {
        if [-libc::EINTR, -libc::EAGAIN].contains(&result) && self.retries < MOST_RETRIES {
            self.retries += 1;
            if self.sync == Sync::UnderWay {
                self.sync = Sync::Wanted;
            }
            return Ok(());
        }
        if self.sync == Sync::UnderWay {
            self.sync = Sync::None;
            return if result < 0 { Err(Failure::Host(-result)) } else { Ok(()) };
        }
        match (&mut self.work, usize::try_from(result)) {
            (Work::Ranges(_, ranges), _) => ranges.ended(result),
            (_, Err(_)) => Err(Failure::Host(-result)),
            // The operation transferred no bytes, because the file has become shorter than the disk.
            (_, Ok(0)) => Err(Failure::Host(libc::EIO)),
            (Work::Read(transfer) | Work::Write(transfer), Ok(bytes)) => transfer.ended(bytes, memory),
            (Work::None, _) => Ok(()),
        }
    }

    /// Reports that the kernel's access to the request's guest memory failed with `errno`. If the host has lost this memory, the report
    /// stops the VM.
    pub(super) fn report(&self, errno: i32) {
        if let Work::Read(transfer) | Work::Write(transfer) = &self.work {
            report_io(errno, transfer.lent().iter().copied(), !self.is_write());
        }
    }

    /// Returns the answer for `outcome`, and updates the counters.
    pub(super) fn answer(&self, outcome: Result<(), Failure>, counts: &Counts) -> Answer {
        let (status, used) = match outcome {
            Err(failure) => {
                count(&counts.errors, 1);
                if matches!(failure, Failure::Host(_)) {
                    count(&counts.host_errors, 1);
                }
                (status::IOERR, 1)
            }
            Ok(()) => {
                let add = |ops, bytes| {
                    count(ops, 1);
                    count(bytes, self.bytes as u64);
                };
                match self.work {
                    Work::Read(_) => add(&counts.read_ops, &counts.read_bytes),
                    Work::Write(_) => add(&counts.write_ops, &counts.write_bytes),
                    Work::Ranges(Fate::Discarded, _) => count(&counts.discards, 1),
                    Work::Ranges(Fate::Zeroed { .. }, _) => count(&counts.write_zeroes, 1),
                    Work::None => count(&counts.flushes, 1),
                }
                let data = if matches!(self.work, Work::Read(_)) { self.bytes } else { 0 };
                (status::OK, u32::try_from(data).unwrap_or(u32::MAX).saturating_add(1))
            }
        };
        Answer { head: self.head, place: self.status, status, used }
    }
}
