// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Wire format: decoding of requests and encoding of replies.
//!
//! All input comes from the guest. A request is decoded only if it is long enough for its type.

use crate::spec::{MAP_RANGE_SIZE, NO_SHM_OFFSET, Status, TAIL_SIZE, WINDOW_ADD_REPLY, property, readable, request};
use crate::{DomainId, EndpointId};

/// Kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Attach,
    Detach,
    Map,
    Unmap,
    Probe,
    WindowAdd,
    WindowDel,
    MapList,
}

/// Selects the field for a kind of request, in a structure with one field for each kind.
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
            Kind::MapList => &mut $all.map_list,
        }
    };
}
pub(crate) use by_kind;

impl Kind {
    /// Returns the kind of a request from its bytes, or `None` if the type is unknown.
    pub(crate) fn of(bytes: &[u8]) -> Option<Self> {
        Some(match *bytes.first()? {
            request::ATTACH => Self::Attach,
            request::DETACH => Self::Detach,
            request::MAP => Self::Map,
            request::UNMAP => Self::Unmap,
            request::PROBE => Self::Probe,
            request::WINDOW_ADD => Self::WindowAdd,
            request::WINDOW_DEL => Self::WindowDel,
            request::MAP_LIST => Self::MapList,
            _ => return None,
        })
    }

    /// Returns the size of the readable part in bytes, for MAP_LIST without its ranges.
    fn readable_size(self) -> usize {
        match self {
            Self::Attach => readable::ATTACH,
            Self::Detach => readable::DETACH,
            Self::Map => readable::MAP,
            Self::Unmap => readable::UNMAP,
            Self::Probe => readable::PROBE,
            Self::WindowAdd => readable::WINDOW_ADD,
            Self::WindowDel => readable::WINDOW_DEL,
            Self::MapList => readable::MAP_LIST,
        }
    }

    /// Returns the size of the writable part in bytes.
    pub(crate) fn writable_size(self, probe_size: u32) -> usize {
        match self {
            Self::Probe => probe_size as usize + TAIL_SIZE,
            Self::WindowAdd => WINDOW_ADD_REPLY,
            _ => TAIL_SIZE,
        }
    }

    /// Returns the byte that fills the reply before the tail if the request fails.
    fn filler(self) -> u8 {
        match self {
            Self::WindowAdd => NO_SHM_OFFSET.to_le_bytes()[0],
            _ => 0,
        }
    }
}

/// Decoded request. Its fields come from the guest and are not validated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Request<'a> {
    Attach(Attach),
    Detach(Detach),
    Map(Map),
    Unmap(Unmap),
    Probe(Probe),
    WindowAdd(WindowAdd),
    WindowDel(WindowDel),
    MapList(MapList<'a>),
}

impl Request<'_> {
    /// Returns the domain that the request names.
    pub(crate) fn domain(&self) -> Option<DomainId> {
        match self {
            Self::Attach(request) => Some(request.domain),
            Self::Detach(request) => Some(request.domain),
            Self::Map(request) => Some(request.domain),
            Self::Unmap(request) => Some(request.domain),
            Self::Probe(_) => None,
            Self::WindowAdd(request) => Some(request.domain),
            Self::WindowDel(request) => Some(request.domain),
            Self::MapList(request) => Some(request.domain),
        }
    }

    /// Returns the endpoint that the request names.
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
    pub(crate) iova: u64,
    pub(crate) flags: u32,
    pub(crate) reserved: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WindowDel {
    pub(crate) domain: DomainId,
    pub(crate) iova: u64,
    /// The reserved fields, which must be 0.
    pub(crate) reserved: [u32; 3],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MapList<'a> {
    pub(crate) domain: DomainId,
    /// First IOVA.
    pub(crate) start: u64,
    pub(crate) flags: u32,
    ranges: &'a [[u8; MAP_RANGE_SIZE]],
}

impl MapList<'_> {
    /// Returns the number of ranges.
    pub(crate) fn len(&self) -> usize {
        self.ranges.len()
    }

    /// Returns the guest-physical address and the length in bytes of each range.
    pub(crate) fn ranges(&self) -> impl Iterator<Item = (u64, u64)> {
        let le64 = |range: &[u8; MAP_RANGE_SIZE], field: usize| u64::from_le_bytes(range.as_chunks().0[field]);
        self.ranges.iter().map(move |range| (le64(range, 0), le64(range, 1)))
    }
}

/// Version of the bounce window extension that the driver accepted. It decides the layout of WINDOW_ADD and WINDOW_DEL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WindowVersion {
    /// Version 2, for kernels of earlier releases.
    V2,
    /// Version 3.
    V3,
}

/// Reader that takes fields from the front of a request.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
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

    fn ranges(&self, count: u32) -> Option<&'a [[u8; MAP_RANGE_SIZE]]> {
        self.0.as_chunks().0.get(..usize::try_from(count).ok()?)
    }
}

/// Decodes the readable part of a request. `version` applies to WINDOW_ADD and WINDOW_DEL. Returns `None` if the readable part is too
/// short for the request's kind. Extra bytes and the reserved bytes of the head are ignored, as the specification requires (section
/// 5.13.6.1).
pub(crate) fn decode(kind: Kind, bytes: &[u8], version: WindowVersion) -> Option<Request<'_>> {
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
        Kind::WindowAdd => {
            let domain = fields.le32()?;
            let (iova, flags) = match version {
                WindowVersion::V3 => (fields.le64()?, fields.le32()?),
                WindowVersion::V2 => {
                    let flags = fields.le32()?;
                    (fields.le64()?, flags)
                }
            };
            Request::WindowAdd(WindowAdd { domain, iova, flags, reserved: fields.le64()? })
        }
        Kind::WindowDel => {
            let domain = fields.le32()?;
            let (iova, first) = match version {
                WindowVersion::V3 => (fields.le64()?, fields.le32()?),
                WindowVersion::V2 => {
                    let first = fields.le32()?;
                    (fields.le64()?, first)
                }
            };
            Request::WindowDel(WindowDel { domain, iova, reserved: [first, fields.le32()?, fields.le32()?] })
        }
        Kind::MapList => {
            let (domain, start, flags) = (fields.le32()?, fields.le64()?, fields.le32()?);
            let count = fields.le32()?;
            Request::MapList(MapList { domain, start, flags, ranges: fields.ranges(count)? })
        }
    })
}

/// Writes a tail at the end of `reply`, and `filler` before the tail. Returns the number of bytes written: the length of `reply`, or 0 if
/// `reply` has no room for a tail.
fn fill(reply: &mut [u8], filler: u8, status: Status) -> usize {
    let len = reply.len();
    let Some((body, tail)) = reply.split_last_chunk_mut::<TAIL_SIZE>() else {
        return 0;
    };
    body.fill(filler);
    *tail = self::tail(status);
    len
}

/// Returns the tail of a reply.
pub(crate) fn tail(status: Status) -> [u8; TAIL_SIZE] {
    [status as u8, 0, 0, 0]
}

/// Writes the reply to a failed request. The writable part may be shorter than required.
pub(crate) fn fail(kind: Kind, reply: &mut [u8], status: Status) -> usize {
    fill(reply, kind.filler(), status)
}

/// Writes the reply to a successful request whose reply contains only the status.
pub(crate) fn done(reply: &mut [u8]) -> usize {
    fill(reply, 0, Status::Ok)
}

/// Writes the reply to WINDOW_ADD, with the offset of the chunk in the shared region.
pub(crate) fn window_added(reply: &mut [u8], shm_offset: u64) -> usize {
    let len = fill(reply, 0, Status::Ok);
    if let Some(field) = reply.first_chunk_mut() {
        *field = shm_offset.to_le_bytes();
    }
    len
}

/// RESV_MEM property: IOVAs that the driver cannot map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReservedMemory {
    /// First IOVA.
    pub(crate) start: u64,
    /// Last IOVA.
    pub(crate) last: u64,
    /// True if writes to the range are interrupts.
    pub(crate) msi: bool,
}

/// Writes the reply to PROBE, with the properties that fit.
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
