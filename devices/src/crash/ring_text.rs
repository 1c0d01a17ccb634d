// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Writes recorded requests as text for the crash report. Allocates nothing.

use std::fmt::{self, Write};

use virtio_bindings::virtio_blk;
use virtio_bindings::virtio_ids::{VIRTIO_ID_BLOCK, VIRTIO_ID_NET, VIRTIO_ID_PMEM, VIRTIO_ID_VSOCK};

/// Region number for configuration space. Every other region number is the number of a BAR.
pub(crate) const CONFIG_SPACE: u16 = 0xff;
/// Code of a read access.
pub(crate) const READ: u8 = 0;
/// Code of a write access.
pub(crate) const WRITE: u8 = 1;

/// Kind of the requests in a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RingKind {
    /// Descriptor chains of a virtqueue.
    Queue {
        /// Type of the device (virtio 1.3, section 5).
        device: u16,
        /// Index of the queue.
        index: u16,
    },
    /// Guest accesses to a host device that exit to Carom. Accesses through memory slots cause no exit, so they are not recorded.
    Accesses,
    /// Messages to a vfio-user server.
    Messages,
}

impl RingKind {
    const ACCESSES: u64 = 1 << 32;
    const MESSAGES: u64 = 1 << 33;

    pub(super) fn encode(self) -> u64 {
        match self {
            Self::Queue { device, index } => u64::from(device) << 16 | u64::from(index),
            Self::Accesses => Self::ACCESSES,
            Self::Messages => Self::MESSAGES,
        }
    }

    pub(super) fn decode(word: u64) -> Self {
        let [low, high] = [word & 0xffff, word >> 16 & 0xffff].map(|half| u16::try_from(half).unwrap_or(u16::MAX));
        match word {
            Self::ACCESSES => Self::Accesses,
            Self::MESSAGES => Self::Messages,
            _ => Self::Queue { device: high, index: low },
        }
    }
}

/// Recorded request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Kept {
    pub(super) number: u64,
    pub(super) head: u16,
    pub(super) readable: u32,
    pub(super) writable: u32,
    /// Code and value that the device noted about the request, if any.
    pub(super) note: Option<(u8, u64)>,
    /// Number of bytes that the device wrote to the request's buffers. `None` if the device has not returned the request.
    pub(super) used: Option<u32>,
    pub(super) status: Option<u8>,
}

/// Writes the heading line above the requests of a ring.
pub(super) fn head(to: &mut impl Write, name: &str, kind: RingKind) -> fmt::Result {
    match kind {
        RingKind::Queue { device, index } => {
            writeln!(to, "last requests to {name} (virtio device {device}), queue {index}, oldest first:")
        }
        RingKind::Accesses => writeln!(to, "last accesses to {name}, oldest first:"),
        RingKind::Messages => writeln!(to, "last messages to the vfio-user server of {name}, oldest first:"),
    }
}

/// Writes one line about a request.
pub(super) fn line(to: &mut impl Write, kind: RingKind, kept: &Kept) -> fmt::Result {
    let Kept { number, head, readable, writable, note, used, status } = *kept;
    match kind {
        RingKind::Queue { device, .. } => {
            write!(to, "{number} head={head} readable={readable} writable={writable}")?;
            if let Some((code, value)) = note {
                request(to, device.into(), code, value)?;
            }
            if let Some(status) = status {
                write!(to, " status={status}")?;
            }
            match used {
                Some(used) => writeln!(to, " used={used}"),
                None => writeln!(to, " not given back"),
            }
        }
        RingKind::Accesses => {
            let (code, offset) = note.unwrap_or_default();
            write!(to, "{number} {} ", if code == READ { "read" } else { "write" })?;
            if head == CONFIG_SPACE {
                write!(to, "config")?;
            } else {
                write!(to, "BAR {head}")?;
            }
            write!(to, " offset={offset:#x} bytes={readable}")?;
            writeln!(to, "{}", if used.is_some() { "" } else { " not done" })
        }
        RingKind::Messages => {
            let command = note.unwrap_or_default().0;
            write!(to, "{number} id={head} command={command} bytes={readable}")?;
            match (used, status) {
                (None, _) => writeln!(to, " not answered"),
                (Some(_), Some(error)) => writeln!(to, " refused={error}"),
                (Some(answer), None) => writeln!(to, " answer={answer}"),
            }
        }
    }
}

/// Writes the device's note about a request. The device defines the meaning of `code` and `value`.
fn request(to: &mut impl Write, device: u32, code: u8, value: u64) -> fmt::Result {
    match device {
        VIRTIO_ID_BLOCK => match u32::from(code) {
            virtio_blk::VIRTIO_BLK_T_IN => write!(to, " IN sector={value}"),
            virtio_blk::VIRTIO_BLK_T_OUT => write!(to, " OUT sector={value}"),
            virtio_blk::VIRTIO_BLK_T_FLUSH => write!(to, " FLUSH"),
            virtio_blk::VIRTIO_BLK_T_GET_ID => write!(to, " GET_ID"),
            virtio_blk::VIRTIO_BLK_T_DISCARD => write!(to, " DISCARD"),
            virtio_blk::VIRTIO_BLK_T_WRITE_ZEROES => write!(to, " WRITE_ZEROES"),
            // The type does not fit into the byte `code`, so `value` holds the type.
            255 => write!(to, " type={value:#x}"),
            kind => write!(to, " type={kind:#x} sector={value}"),
        },
        VIRTIO_ID_NET => write!(to, " class={code} command={value}"),
        VIRTIO_ID_PMEM => write!(to, " type={value:#x}"),
        VIRTIO_ID_VSOCK => write!(to, " op={code} from={} to={}", value >> 32, value & u64::from(u32::MAX)),
        _ => write!(to, " code={code} value={value:#x}"),
    }
}
