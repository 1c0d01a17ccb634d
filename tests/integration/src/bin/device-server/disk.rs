// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Disk: serves the requests in the queues by reading and writing a file (virtio 1.4, section 5.2).

use std::fs::File;
use std::os::unix::fs::FileExt;

use anyhow::{Context, Result};

use crate::iotlb;
use crate::memory::{Fault, Memory};
use crate::ring::{Chain, Ring};

/// `VIRTIO_BLK_F_SEG_MAX`, `VIRTIO_BLK_F_FLUSH`, `VIRTIO_BLK_F_MQ`.
pub(crate) const FEATURES: u64 = 1 << 2 | 1 << 9 | 1 << 12;
/// `VHOST_USER_PROTOCOL_F_CONFIG`.
pub(crate) const PROTOCOL_FEATURES: u64 = 1 << 9;

/// Length of the device configuration, in bytes.
const CONFIG: usize = 60;
/// Maximum number of data buffers of a request.
const SEGMENTS: u32 = 126;
const SECTOR: u64 = 512;
/// Length of a request's header before the data, in bytes.
const HEADER: usize = 16;
/// Maximum length of a request's data, in bytes.
const MOST: usize = 8 << 20;
/// Maximum number of requests that one call serves for a queue. After the call, the server handles messages of the front end.
const AT_ONCE: usize = 64;

/// Request types, and status values of answers.
const READ: u32 = 0;
const WRITE: u32 = 1;
const FLUSH: u32 = 4;
const OK: u8 = 0;
const FAILED: u8 = 1;
const UNSUPPORTED: u8 = 2;

/// Returns the configuration of a disk with this image and number of queues.
pub(crate) fn config(image: &File, queues: usize) -> Result<Vec<u8>> {
    let sectors = image.metadata().context("cannot get the size of the image")?.len() / SECTOR;
    let mut bytes = vec![0; CONFIG];
    bytes[..8].copy_from_slice(&sectors.to_le_bytes());
    bytes[12..16].copy_from_slice(&SEGMENTS.to_le_bytes());
    bytes[34..36].copy_from_slice(&u16::try_from(queues)?.to_le_bytes());
    Ok(bytes)
}

/// Serves the requests of a queue.
pub(crate) fn serve(image: &File, ring: &mut Ring, memory: &Memory) -> Result<(), Fault> {
    for _ in 0..AT_ONCE {
        let Some(chain) = ring.runs().then(|| ring.chain(memory)).transpose()?.flatten() else { return Ok(()) };
        // If the translation of an address is missing, this function returns early. When the translation has arrived, the whole
        // request is served again.
        let written = request(image, memory, &chain)?;
        ring.put_used(memory, &chain, written)?;
    }
    // Serve the remaining requests after the server has handled messages of the front end.
    ring.kick_again();
    Ok(())
}

/// Serves a request. Returns the number of bytes written to the request's buffers.
fn request(image: &File, memory: &Memory, chain: &Chain) -> Result<u32, Fault> {
    // A missing translation makes the server serve the request again. So look for missing translations before copying: the server
    // would otherwise copy the start of a request once for each of the request's pages.
    for part in &chain.parts {
        memory.check(part.address, part.len as usize, if part.is_writable { iotlb::WRITE } else { iotlb::READ })?;
    }
    let of = |is_writable: bool| chain.parts.iter().filter(move |part| part.is_writable == is_writable);
    let mut given = Vec::new();
    for part in of(false) {
        let from = given.len();
        given.resize((from + part.len as usize).min(HEADER + MOST), 0);
        memory.read(part.address, &mut given[from..])?;
    }
    // The last writable byte is for the status.
    let room = of(true).map(|part| part.len as usize).sum::<usize>().saturating_sub(1).min(MOST);
    let Some((&header, data)) = given.split_first_chunk::<HEADER>() else { return Ok(0) };
    let [a, b, c, d, _, _, _, _, sector @ ..] = header;
    let place = u64::from_le_bytes(sector).saturating_mul(SECTOR);
    let mut answer = vec![0; room];
    let done = match u32::from_le_bytes([a, b, c, d]) {
        READ => Some(image.read_exact_at(&mut answer, place)),
        WRITE => Some(image.write_all_at(data, place)),
        FLUSH => Some(image.sync_data()),
        _ => None,
    };
    answer.push(match done {
        Some(Ok(())) => OK,
        Some(Err(_)) => FAILED,
        None => UNSUPPORTED,
    });
    give(memory, chain, &answer)
}

/// Writes the answer to a request into the request's writable buffers. Returns the number of written bytes.
fn give(memory: &Memory, chain: &Chain, answer: &[u8]) -> Result<u32, Fault> {
    let mut done = 0;
    for part in chain.parts.iter().filter(|part| part.is_writable) {
        let len = (answer.len() - done).min(part.len as usize);
        memory.write(part.address, &answer[done..done + len])?;
        done += len;
    }
    Ok(u32::try_from(done).unwrap_or(u32::MAX))
}
