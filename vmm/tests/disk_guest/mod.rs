// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Guest that sends two requests to the disk in slot 2.

use crate::guest_code::Code;

/// Address of the guest's image, and offset of its data.
const IMAGE: u32 = 0x20_0000;
const DATA: u32 = 0x1000;
/// Offsets in the image.
const DESCRIPTORS: u32 = DATA;
const AVAILABLE: u32 = DATA + 0x200;
const USED: u32 = DATA + 0x400;
const HEADERS: u32 = DATA + 0x600;
const STATUSES: u32 = DATA + 0x700;
const BUFFERS: u32 = DATA + 0x800;
pub(crate) const SECTOR: u32 = 512;

/// Kinds of requests.
pub(crate) const IN: u32 = 0;
pub(crate) const OUT: u32 = 1;

/// Returns the image of the guest, which sends both `requests` with one notification. Each request is a kind and a sector.
/// Requests of kind [`OUT`] write `written`.
pub(crate) fn driver(requests: [(u32, u32); 2], written: &[u8]) -> Vec<u8> {
    let rings = [DESCRIPTORS, AVAILABLE, USED].map(|ring| IMAGE + ring);
    let code = Code::default().set_up_disk(rings).notify_disk().halt();
    let mut image = vec![0; (BUFFERS + 2 * SECTOR) as usize];
    image[..code.len()].copy_from_slice(&code);
    let mut put = |place: u32, bytes: &[u8]| image[place as usize..][..bytes.len()].copy_from_slice(bytes);
    for (request, (kind, sector)) in (0u16..).zip(requests) {
        let number = u32::from(request);
        put(HEADERS + 16 * number, &kind.to_le_bytes());
        put(HEADERS + 16 * number + 8, &sector.to_le_bytes());
        // Flags of a descriptor: NEXT is 1, WRITE is 2.
        let buffer = (BUFFERS + SECTOR * number, SECTOR, if kind == IN { 3u16 } else { 1 });
        let buffers = [(HEADERS + 16 * number, 16, 1), buffer, (STATUSES + number, 1, 2)];
        for (index, (place, len, flags)) in (3 * request..).zip(buffers) {
            let at = DESCRIPTORS + 16 * u32::from(index);
            put(at, &(IMAGE + place).to_le_bytes());
            put(at + 8, &len.to_le_bytes());
            put(at + 12, &flags.to_le_bytes());
            put(at + 14, &(index + 1).to_le_bytes());
        }
        put(AVAILABLE + 4 + 2 * number, &(3 * request).to_le_bytes());
        if kind == OUT {
            put(BUFFERS + SECTOR * number, written);
        }
    }
    put(AVAILABLE + 2, &2u16.to_le_bytes());
    image
}
