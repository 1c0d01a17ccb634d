// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Validation of a request's type, range and buffers, and choice of its operations (virtio 1.4, section 5.2.6.2). `request` has already
//! checked the descriptor chain.

use std::sync::Arc;

use super::flight::{Flight, Work};
use super::ranges::{Fate, Ranges};
use super::request::{Parts, Request};
use super::transfer::Transfer;
use crate::dma::DeviceMemory;
use crate::virtio::block::config_space::{
    MAX_DISCARD_RANGES, MAX_DISCARD_SECTORS, MAX_ZEROES_RANGES, MAX_ZEROES_SECTORS, gives_back,
};
use crate::virtio::block::disk::{Disk, Owner};
use crate::virtio::block::image::disk_image::Image;
use crate::virtio::block::spec::{ID_BYTES, RANGE_BYTES, SECTOR, UNMAP, request, status};

/// Maximum size of a request in bytes. By default, drivers do not make larger requests. The limit bounds the time of a pause, because a
/// pause waits for the whole request.
const MOST_BYTES: usize = 256 << 20;

/// Result of preparing a request.
pub(super) enum Prepared {
    /// The request is complete or was rejected.
    Answered { status: u8, used: u32 },
    /// The request has operations to run.
    UnderWay(Flight),
}

/// Validates `request` and chooses its operations. If `durable` is true, the request ends only when its writes are durable.
pub(super) fn prepare(
    request: Request,
    disk: &Disk,
    memory: &DeviceMemory,
    owner: &Arc<Owner>,
    durable: bool,
) -> Prepared {
    let prepared = match request.kind {
        request::IN | request::OUT => transfer(request, disk, memory, owner, durable),
        request::FLUSH => Ok(Flight::new(request.head, request.status, 0, Work::None, true)),
        request::GET_ID => return answer_id(&request.writable, disk, memory),
        request::DISCARD if gives_back(&disk.image) => ranges(&request, &disk.image, memory, durable),
        request::WRITE_ZEROES if !disk.image.is_read_only() => ranges(&request, &disk.image, memory, durable),
        _ => Err(status::UNSUPP),
    };
    match prepared {
        Ok(flight) => Prepared::UnderWay(flight),
        Err(status) => Prepared::Answered { status, used: 1 },
    }
}

/// Returns the offset of `sector` in the image. Fails if the `len` bytes from this sector on exceed the disk, or do not consist of whole
/// blocks.
fn place(image: &Image, sector: u64, len: u64) -> Result<u64, u8> {
    let offset = sector.checked_mul(SECTOR).ok_or(status::IOERR)?;
    let end = offset.checked_add(len).ok_or(status::IOERR)?;
    let block = u64::from(image.block());
    let fits = end <= image.bytes() && offset.is_multiple_of(block) && len.is_multiple_of(block);
    fits.then_some(offset).ok_or(status::IOERR)
}

fn transfer(
    request: Request,
    disk: &Disk,
    memory: &DeviceMemory,
    owner: &Arc<Owner>,
    durable: bool,
) -> Result<Flight, u8> {
    let writes = request.kind == request::OUT;
    if writes && disk.image.is_read_only() {
        return Err(status::IOERR);
    }
    let parts = if writes { request.readable } else { request.writable };
    let len = parts.len;
    if len > MOST_BYTES {
        return Err(status::IOERR);
    }
    let offset = place(&disk.image, request.sector, len as u64)?;
    let transfer = Transfer::new(writes, offset, parts, memory, &disk.image, owner);
    let (transfer, number) = transfer.map_err(|_| status::IOERR)?;
    let work = if writes { Work::Write(transfer) } else { Work::Read(transfer) };
    Ok(Flight::new(request.head, request.status, len, work, writes && durable).numbered(number))
}

/// Writes the disk's serial number to the driver's buffers. If the buffers are too short, the device truncates the number.
fn answer_id(room: &Parts, disk: &Disk, memory: &DeviceMemory) -> Prepared {
    if room.write(&memory.view(), 0, &disk.serial).is_err() {
        return Prepared::Answered { status: status::IOERR, used: 1 };
    }
    Prepared::Answered { status: status::OK, used: u32::try_from(ID_BYTES.min(room.len)).unwrap_or(0) + 1 }
}

/// Prepares a discard or write-zeroes request.
fn ranges(request: &Request, image: &Image, memory: &DeviceMemory, durable: bool) -> Result<Flight, u8> {
    let discards = request.kind == request::DISCARD;
    let (most, most_sectors) =
        if discards { (MAX_DISCARD_RANGES, MAX_DISCARD_SECTORS) } else { (MAX_ZEROES_RANGES, MAX_ZEROES_SECTORS) };
    let count = request.readable.len / RANGE_BYTES;
    if count == 0 || !request.readable.len.is_multiple_of(RANGE_BYTES) || count > most as usize {
        return Err(status::IOERR);
    }
    let mut bytes = vec![0; request.readable.len];
    request.readable.read(&memory.view(), 0, &mut bytes).map_err(|_| status::IOERR)?;
    let word = |entry: &[u8], at: usize| u32::from_le_bytes([entry[at], entry[at + 1], entry[at + 2], entry[at + 3]]);
    let (mut list, mut unmaps) = (Vec::with_capacity(count), false);
    for entry in bytes.chunks_exact(RANGE_BYTES) {
        let sector = u64::from(word(entry, 4)) << 32 | u64::from(word(entry, 0));
        let (sectors, flags) = (word(entry, 8), word(entry, 12));
        if flags & !UNMAP != 0 || discards && flags != 0 {
            return Err(status::UNSUPP);
        }
        if sectors > most_sectors {
            return Err(status::IOERR);
        }
        let len = u64::from(sectors) * SECTOR;
        list.push((place(image, sector, len)?, len));
        unmaps = flags & UNMAP != 0 && gives_back(image);
    }
    // A write-zeroes request has a single range, so `unmaps` is the flag of that range.
    let fate = if discards { Fate::Discarded } else { Fate::Zeroed { unmap: unmaps } };
    let work = Work::Ranges(fate, Ranges::new(fate, list));
    Ok(Flight::new(request.head, request.status, 0, work, durable))
}
