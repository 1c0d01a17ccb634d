// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A guest that is the writes of a disk's driver, one after the other.

/// Where the guest's image is, and from where on it has data.
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

/// Configuration space of the disk, in slot 2, and where its registers are to be.
const CONFIG: u32 = 0xf800_0000 + (2 << 15);
const REGISTERS: u32 = 0xf000_0000;

/// `mov [address], value`, of so many bytes.
fn write(code: &mut Vec<u8>, address: u32, bytes: usize, value: u32) {
    let opcode: &[u8] = match bytes {
        1 => &[0xc6, 0x05],
        2 => &[0x66, 0xc7, 0x05],
        _ => &[0xc7, 0x05],
    };
    code.extend(opcode);
    code.extend(address.to_le_bytes());
    code.extend(&value.to_le_bytes()[..bytes]);
}

/// Kinds of requests.
pub(crate) const IN: u32 = 0;
pub(crate) const OUT: u32 = 1;

/// Code and data of a driver of the disk in slot 2. It sends two `requests`, each of a kind and a sector, at once. `written` is what
/// they write.
pub(crate) fn driver(requests: [(u32, u32); 2], written: &[u8]) -> Vec<u8> {
    let mut code = Vec::new();
    // Command register, BAR 0.
    for (offset, value) in [(4, 0), (0x10, REGISTERS), (4, 6)] {
        write(&mut code, CONFIG + offset, 4, value);
    }
    let mut set = |offset, bytes, value| write(&mut code, REGISTERS + offset, bytes, value);
    // ACKNOWLEDGE and DRIVER, VERSION_1, FEATURES_OK.
    for (offset, bytes, value) in [(20, 1, 1), (20, 1, 3), (8, 4, 1), (12, 4, 1), (20, 1, 11)] {
        set(offset, bytes, value);
    }
    set(24, 2, 8);
    for (offset, ring) in [(32, DESCRIPTORS), (40, AVAILABLE), (48, USED)] {
        set(offset, 4, IMAGE + ring);
        set(offset + 4, 4, 0);
    }
    // The queue, DRIVER_OK, and a notification.
    for (offset, bytes, value) in [(28, 2, 1), (20, 1, 15), (0x3000, 2, 0)] {
        set(offset, bytes, value);
    }
    // `again: hlt; jmp again`
    code.extend([0xf4, 0xeb, 0xfd]);

    let mut image = vec![0; (BUFFERS + 2 * SECTOR) as usize];
    image[..code.len()].copy_from_slice(&code);
    let mut put = |place: u32, bytes: &[u8]| image[place as usize..][..bytes.len()].copy_from_slice(bytes);
    for (request, (kind, sector)) in (0u16..).zip(requests) {
        let number = u32::from(request);
        put(HEADERS + 16 * number, &kind.to_le_bytes());
        put(HEADERS + 16 * number + 8, &sector.to_le_bytes());
        // NEXT is 1, WRITE is 2.
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
