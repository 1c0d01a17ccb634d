// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The wire format: decodes requests, and encodes replies.
//!
//! Everything that comes in was written by the guest. A request is decoded only when it is as long as its type needs.

use crate::spec::{NO_SHM_OFFSET, Status, TAIL_SIZE, WINDOW_ADD_REPLY, property, readable, request};
use crate::{DomainId, EndpointId};

/// What kind a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Attach,
    Detach,
    Map,
    Unmap,
    Probe,
    WindowAdd,
    WindowDel,
}

/// The field for requests of a kind in a structure that has one for each.
macro_rules! by_kind {
    ($all:expr, $kind:expr) => {
        match $kind {
            Kind::Attach => &mut $all.attach,
            Kind::Detach => &mut $all.detach,
            Kind::Map => &mut $all.map,
            Kind::Unmap => &mut $all.unmap,
            Kind::Probe => &mut $all.probe,
            Kind::WindowAdd => &mut $all.window_add,
            Kind::WindowDel => &mut $all.window_del,
        }
    };
}
pub(crate) use by_kind;

impl Kind {
    /// The kind of a request's bytes; `None` if it is unknown.
    pub(crate) fn of(bytes: &[u8]) -> Option<Self> {
        Some(match *bytes.first()? {
            request::ATTACH => Self::Attach,
            request::DETACH => Self::Detach,
            request::MAP => Self::Map,
            request::UNMAP => Self::Unmap,
            request::PROBE => Self::Probe,
            request::WINDOW_ADD => Self::WindowAdd,
            request::WINDOW_DEL => Self::WindowDel,
            _ => return None,
        })
    }

    /// Bytes of the readable part.
    fn readable_size(self) -> usize {
        match self {
            Self::Attach => readable::ATTACH,
            Self::Detach => readable::DETACH,
            Self::Map => readable::MAP,
            Self::Unmap => readable::UNMAP,
            Self::Probe => readable::PROBE,
            Self::WindowAdd => readable::WINDOW_ADD,
            Self::WindowDel => readable::WINDOW_DEL,
        }
    }

    /// Bytes of the writable part.
    pub(crate) fn writable_size(self, probe_size: u32) -> usize {
        match self {
            Self::Probe => probe_size as usize + TAIL_SIZE,
            Self::WindowAdd => WINDOW_ADD_REPLY,
            _ => TAIL_SIZE,
        }
    }

    /// What stands before the tail when the request fails.
    fn filler(self) -> u8 {
        match self {
            Self::WindowAdd => NO_SHM_OFFSET.to_le_bytes()[0],
            _ => 0,
        }
    }
}

/// A decoded request. Its fields are the guest's and unchecked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Request {
    Attach(Attach),
    Detach(Detach),
    Map(Map),
    Unmap(Unmap),
    Probe(Probe),
    WindowAdd(WindowAdd),
    WindowDel(WindowDel),
}

impl Request {
    /// The domain that the request names.
    pub(crate) fn domain(&self) -> Option<DomainId> {
        match self {
            Self::Attach(request) => Some(request.domain),
            Self::Detach(request) => Some(request.domain),
            Self::Map(request) => Some(request.domain),
            Self::Unmap(request) => Some(request.domain),
            Self::Probe(_) => None,
            Self::WindowAdd(request) => Some(request.domain),
            Self::WindowDel(request) => Some(request.domain),
        }
    }

    /// The endpoint that the request names.
    pub(crate) fn endpoint(&self) -> Option<EndpointId> {
        match self {
            Self::Attach(request) => Some(request.endpoint),
            Self::Detach(request) => Some(request.endpoint),
            Self::Probe(request) => Some(request.endpoint),
            _ => None,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Attach {
    pub(crate) domain: DomainId,
    pub(crate) endpoint: EndpointId,
    pub(crate) flags: u32,
    pub(crate) reserved: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Detach {
    pub(crate) domain: DomainId,
    pub(crate) endpoint: EndpointId,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Map {
    pub(crate) domain: DomainId,
    /// First IOVA.
    pub(crate) start: u64,
    /// Last IOVA.
    pub(crate) last: u64,
    pub(crate) gpa: u64,
    pub(crate) flags: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Unmap {
    pub(crate) domain: DomainId,
    /// First IOVA.
    pub(crate) start: u64,
    /// Last IOVA.
    pub(crate) last: u64,
    pub(crate) reserved: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Probe {
    pub(crate) endpoint: EndpointId,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WindowAdd {
    pub(crate) domain: DomainId,
    pub(crate) flags: u32,
    pub(crate) iova: u64,
    pub(crate) reserved: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WindowDel {
    pub(crate) domain: DomainId,
    pub(crate) reserved: u32,
    pub(crate) iova: u64,
    pub(crate) reserved2: u64,
}

/// Takes fields off the front of a request.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (field, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*field)
    }

    fn le32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn le64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }
}

/// Decodes the readable part of a request; `None` if it is too short for its kind. Bytes beyond are ignored, and so are
/// the reserved ones of the head, as the specification asks (section 5.13.6.1).
pub(crate) fn decode(kind: Kind, bytes: &[u8]) -> Option<Request> {
    if bytes.len() < kind.readable_size() {
        return None;
    }
    let mut fields = Fields(bytes);
    fields.le32()?;
    Some(match kind {
        Kind::Attach => Request::Attach(Attach {
            domain: fields.le32()?,
            endpoint: fields.le32()?,
            flags: fields.le32()?,
            reserved: fields.le32()?,
        }),
        Kind::Detach => Request::Detach(Detach { domain: fields.le32()?, endpoint: fields.le32()? }),
        Kind::Map => Request::Map(Map {
            domain: fields.le32()?,
            start: fields.le64()?,
            last: fields.le64()?,
            gpa: fields.le64()?,
            flags: fields.le32()?,
        }),
        Kind::Unmap => Request::Unmap(Unmap {
            domain: fields.le32()?,
            start: fields.le64()?,
            last: fields.le64()?,
            reserved: fields.le32()?,
        }),
        Kind::Probe => Request::Probe(Probe { endpoint: fields.le32()? }),
        Kind::WindowAdd => Request::WindowAdd(WindowAdd {
            domain: fields.le32()?,
            flags: fields.le32()?,
            iova: fields.le64()?,
            reserved: fields.le64()?,
        }),
        Kind::WindowDel => Request::WindowDel(WindowDel {
            domain: fields.le32()?,
            reserved: fields.le32()?,
            iova: fields.le64()?,
            reserved2: fields.le64()?,
        }),
    })
}

/// Writes a tail at the end of `reply` and `filler` before it. Returns the bytes written: all, or none if a tail has no
/// room.
fn fill(reply: &mut [u8], filler: u8, status: Status) -> usize {
    let len = reply.len();
    let Some((body, tail)) = reply.split_last_chunk_mut::<TAIL_SIZE>() else {
        return 0;
    };
    body.fill(filler);
    *tail = self::tail(status);
    len
}

/// The tail of a reply.
pub(crate) fn tail(status: Status) -> [u8; TAIL_SIZE] {
    [status as u8, 0, 0, 0]
}

/// Answers a request that failed, in a writable part of the right size or shorter.
pub(crate) fn fail(kind: Kind, reply: &mut [u8], status: Status) -> usize {
    fill(reply, kind.filler(), status)
}

/// Answers a request that says nothing but that it succeeded.
pub(crate) fn done(reply: &mut [u8]) -> usize {
    fill(reply, 0, Status::Ok)
}

/// Answers WINDOW_ADD with the place of the chunk in the shared region.
pub(crate) fn window_added(reply: &mut [u8], shm_offset: u64) -> usize {
    let len = fill(reply, 0, Status::Ok);
    if let Some(field) = reply.first_chunk_mut() {
        *field = shm_offset.to_le_bytes();
    }
    len
}

/// A RESV_MEM property: IOVAs that the driver cannot map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReservedMemory {
    /// First IOVA.
    pub(crate) start: u64,
    /// Last IOVA.
    pub(crate) last: u64,
    /// Whether writes there are interrupts.
    pub(crate) msi: bool,
}

/// Answers PROBE with the properties that fit.
pub(crate) fn probed(reply: &mut [u8], properties: &[ReservedMemory]) -> usize {
    let len = fill(reply, 0, Status::Ok);
    let room = len.saturating_sub(TAIL_SIZE);
    let places = reply[..room].chunks_exact_mut(property::RESV_MEM_SIZE);
    for (place, memory) in places.zip(properties) {
        let subtype = if memory.msi { property::MSI } else { property::RESERVED };
        place[0..2].copy_from_slice(&property::RESV_MEM.to_le_bytes());
        place[2..4].copy_from_slice(&property::RESV_MEM_LENGTH.to_le_bytes());
        place[4] = subtype;
        place[8..16].copy_from_slice(&memory.start.to_le_bytes());
        place[16..24].copy_from_slice(&memory.last.to_le_bytes());
    }
    len
}
