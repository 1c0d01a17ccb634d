// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A request under way: what is left to be done for it, and what becomes of it.

use vm_memory::GuestAddress;

use super::ranges::{Fate, Ranges};
use super::transfer::{Failure, Transfer};
use crate::counters::count;
use crate::dma::DeviceMemory;
use crate::host_memory::report_io;
use crate::virtio::block::counters::Counts;
use crate::virtio::block::image::op::Op;
use crate::virtio::block::spec::status;

/// How often an operation is begun again that the host's kernel interrupted.
const MOST_RETRIES: u32 = 16;

/// What is done for a request before a sync.
pub(super) enum Work {
    Read(Transfer),
    Write(Transfer),
    Ranges(Fate, Ranges),
    /// Nothing: a flush.
    None,
}

/// Whether the request ends with a sync.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Sync {
    /// No, or it is done.
    None,
    Wanted,
    UnderWay,
}

/// A request under way. Its place, and what its operations use, stay until the kernel is done.
pub(super) struct Flight {
    head: u16,
    status: GuestAddress,
    /// Bytes that the driver has read or written when all went well.
    bytes: usize,
    work: Work,
    sync: Sync,
    /// By which number the memory that it uses is named when that is to be taken away.
    number: Option<u64>,
    /// That was asked for.
    cancelled: bool,
    retries: u32,
}

/// What a request is answered with.
#[derive(Clone, Copy, Debug)]
pub(super) struct Answer {
    pub(super) head: u16,
    /// Where the status goes.
    pub(super) place: GuestAddress,
    pub(super) status: u8,
    /// Bytes that were written to the driver's buffers.
    pub(super) used: u32,
}

impl Flight {
    /// `syncs`: it ends when what it has written is durable.
    pub(super) fn new(head: u16, status: GuestAddress, bytes: usize, work: Work, syncs: bool) -> Self {
        let sync = if syncs { Sync::Wanted } else { Sync::None };
        Self { head, status, bytes, work, sync, number: None, cancelled: false, retries: 0 }
    }

    /// The same, for which memory may be taken away by this number.
    pub(super) fn numbered(self, number: Option<u64>) -> Self {
        Self { number, ..self }
    }

    /// Whether `number` names the memory that it uses.
    pub(super) fn is(&self, number: u64) -> bool {
        self.number == Some(number)
    }

    /// Whether it writes the driver's bytes.
    pub(super) fn is_write(&self) -> bool {
        matches!(self.work, Work::Write(_))
    }

    /// It is to end soon, whatever comes of it.
    pub(super) fn cancel(&mut self) {
        self.cancelled = true;
    }

    /// The next operation; `None` when all is done.
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

    /// The operation has ended with `result`: bytes, or a negative error number.
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
            // The file is shorter than it was.
            (_, Ok(0)) => Err(Failure::Host(libc::EIO)),
            (Work::Read(transfer) | Work::Write(transfer), Ok(bytes)) => transfer.ended(bytes, memory),
            (Work::None, _) => Ok(()),
        }
    }

    /// An operation failed with this error number. Reports guest memory that the kernel could not access.
    pub(super) fn report(&self, errno: i32) {
        if let Work::Read(transfer) | Work::Write(transfer) = &self.work {
            report_io(errno, transfer.lent().iter().copied(), !self.is_write());
        }
    }

    /// What it is answered with, and counts it.
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
