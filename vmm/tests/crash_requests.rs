// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What the report of a crash says of the requests that a guest had sent to a disk.
//!
//! The guest is the writes of a driver, one after the other. Where there is no `/dev/kvm` that this process may use, this test does nothing.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod http;
mod program;
mod tiny_guest;

use std::fs::{self, File};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use program::{call, put, start, wait_until};
use tiny_guest::elf;

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
const SECTOR: u32 = 512;

/// Configuration space of the disk, in slot 2, and where its registers are to be.
const CONFIG: u32 = 0xf800_0000 + (2 << 15);
const REGISTERS: u32 = 0xf000_0000;

const SECRET: &[u8] = b"a secret of the guest's";

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

/// A driver that reads sector 3 and writes sector 5.
fn driver() -> Vec<u8> {
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
    // IN and OUT.
    for (request, kind, sector) in [(0u16, 0u32, 3u32), (1, 1, 5)] {
        let number = u32::from(request);
        put(HEADERS + 16 * number, &kind.to_le_bytes());
        put(HEADERS + 16 * number + 8, &sector.to_le_bytes());
        // NEXT is 1, WRITE is 2.
        let buffer = (BUFFERS + SECTOR * number, SECTOR, if kind == 0 { 3u16 } else { 1 });
        let buffers = [(HEADERS + 16 * number, 16, 1), buffer, (STATUSES + number, 1, 2)];
        for (index, (place, len, flags)) in (3 * request..).zip(buffers) {
            let at = DESCRIPTORS + 16 * u32::from(index);
            put(at, &(IMAGE + place).to_le_bytes());
            put(at + 8, &len.to_le_bytes());
            put(at + 12, &flags.to_le_bytes());
            put(at + 14, &(index + 1).to_le_bytes());
        }
        put(AVAILABLE + 4 + 2 * number, &(3 * request).to_le_bytes());
    }
    put(AVAILABLE + 2, &2u16.to_le_bytes());
    put(BUFFERS + SECTOR, SECRET);
    image
}

#[test]
fn report_of_a_crash_has_the_last_requests_to_a_disk_and_nothing_of_what_they_carried() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let report = dir.join("crashes");
    let Some(mut carom) = start(dir, &["--crash-report", report.to_str().unwrap()]) else { return };
    fs::write(dir.join("kernel"), elf(&driver())).unwrap();
    let image = dir.join("image");
    File::create(&image).unwrap().set_len(1 << 20).unwrap();
    let disk = json!({"path": image, "id": "victim", "pci_device_id": 2});
    let body = json!({"payload": {"kernel": dir.join("kernel")}, "memory": {"size": 64 << 20}, "disks": [disk],
        "serial": {"mode": "Null"}});
    put(dir, "vm.create", Some(&body));
    put(dir, "vm.boot", None);
    wait_until("both are served", || {
        let counters = &call(dir, "GET", "vm.counters", None).1["victim"];
        counters["read_ops"] == 1 && counters["write_ops"] == 1
    });
    // What was counted is given back then too.
    put(dir, "vm.pause", None);
    assert!(fs::read(&image).unwrap()[5 * SECTOR as usize..].starts_with(SECRET));

    kill_process(Pid::from_child(&carom.0), Signal::ABORT).unwrap();
    carom.0.wait().unwrap();
    let report = fs::read(report).unwrap();
    assert!(!report.windows(6).any(|bytes| bytes == b"secret"));
    let expected = "\nlast requests to victim (virtio device 2), queue 0, oldest first:\n\
                    1 head=0 readable=16 writable=513 IN sector=3 status=0 used=513\n\
                    2 head=3 readable=528 writable=1 OUT sector=5 status=0 used=1\n\
                    end of the report\n";
    let report = String::from_utf8(report).unwrap();
    assert!(report.ends_with(expected), "{report}");
}
