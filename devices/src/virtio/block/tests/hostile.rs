// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests with drivers that break rules, and with failing operations of the host.

use std::fs::File;

use iommu_bounce::Permissions;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

use super::harness::*;
use crate::pci::PciDevice;
use crate::platform::DeviceEvent;
use crate::virtio::block::spec::{request, status};

const SECTORS: u64 = 64;
const BYTES: usize = 64 * 512;

fn disk(kind: Kind) -> Harness {
    Harness::new(kind, file(&pattern(BYTES, 0)))
}

#[test]
fn request_out_of_range_fails_and_changes_nothing() {
    for kind in kinds() {
        let mut disk = disk(kind);
        disk.fill(DATA, &[0xee; 8192]);
        let mut errors = 0;
        for (sector, len) in [
            (SECTORS, 512),
            (SECTORS - 1, 1024),
            (u64::MAX, 512),
            (1 << 55, 512),
            (u64::MAX / 512, 8192),
            (0, 511),
            (0, 513),
            (3, 1),
        ] {
            for of in [request::IN, request::OUT] {
                assert_eq!(disk.call(of, sector, &[(DATA, len)]), status::IOERR, "{of} {sector} {len}");
                assert_eq!(disk.last_len(0), 1);
                errors += 1;
            }
        }
        assert_eq!((disk.bytes(DATA, 8192), disk.image(0, BYTES)), (vec![0xee; 8192], pattern(BYTES, 0)));
        let counters = disk.device.counters();
        assert_eq!((counters.errors, counters.host_errors, counters.read_ops), (errors, 0, 0));
        // A request without data is valid, even at the end of the disk.
        assert_eq!(disk.call(request::IN, SECTORS, &[]), status::OK);
        assert_eq!(disk.call(request::OUT, 0, &[]), status::OK);
    }
}

#[test]
fn unknown_request_is_unsupported() {
    let mut disk = disk(RING);
    for of in [2, 3, 5, 10, 14, 15, 16, u32::MAX] {
        assert_eq!(disk.call(of, 0, &[(DATA, 512)]), status::UNSUPP, "{of}");
    }
    assert_eq!(disk.image(0, BYTES), pattern(BYTES, 0));
}

#[test]
fn read_only_disk_rejects_writes() {
    for kind in kinds() {
        let mut disk = disk(Kind { read_only: true, ..kind });
        assert_eq!(disk.call(request::OUT, 0, &[(DATA, 512)]), status::IOERR);
        assert_eq!(disk.call_ranges(request::WRITE_ZEROES, &[(0, 1, 0)]), status::UNSUPP);
        assert_eq!(disk.call_ranges(request::DISCARD, &[(0, 1, 0)]), status::UNSUPP);
        assert_eq!(disk.call(request::IN, 0, &[(DATA, 512)]), status::OK);
        assert_eq!(disk.call(request::FLUSH, 0, &[]), status::OK);
        assert_eq!(disk.image(0, BYTES), pattern(BYTES, 0));
    }
}

#[test]
fn invalid_ranges_are_rejected() {
    let mut disk = disk(RING);
    let past = [(0, 1, 0), (SECTORS, 1, 0)];
    for (of, ranges, code) in [
        (request::DISCARD, &past[..], status::IOERR),
        (request::DISCARD, &[(0, 1, 1)], status::UNSUPP),
        (request::DISCARD, &[(0, 1, 0), (0, 1, 2)], status::UNSUPP),
        (request::DISCARD, &[(u64::MAX, u32::MAX, 0)], status::IOERR),
        (request::DISCARD, &[(0, (1 << 23) + 1, 0)], status::IOERR),
        (request::DISCARD, &[(0, 1, 0); 17], status::IOERR),
        (request::DISCARD, &[], status::IOERR),
        (request::WRITE_ZEROES, &[(0, 1, 2)], status::UNSUPP),
        (request::WRITE_ZEROES, &[(0, 1, 0); 2], status::IOERR),
        (request::WRITE_ZEROES, &[(SECTORS - 1, 2, 0)], status::IOERR),
        (request::WRITE_ZEROES, &[(0, (1 << 17) + 1, 1)], status::IOERR),
    ] {
        assert_eq!(disk.call_ranges(of, ranges), code, "{of} {ranges:?}");
    }
    assert_eq!(disk.call(request::DISCARD, 0, &[(DATA, 17)]), status::IOERR);
    assert_eq!(disk.call(request::DISCARD, 0, &[(DATA, 1 << 31)]), status::IOERR);
    assert_eq!(disk.image(0, BYTES), pattern(BYTES, 0));
}

#[test]
fn buffer_outside_memory_fails_the_request() {
    for kind in kinds() {
        let mut disk = disk(kind);
        for address in [RAM as u64 - 256, 1 << 40, u64::MAX - OFFSET - 100] {
            for of in [request::IN, request::OUT, request::GET_ID] {
                let len = if of == request::GET_ID { 20 } else { 512 };
                let address = if of == request::GET_ID { address.max(RAM as u64) } else { address };
                assert_eq!(disk.call(of, 0, &[(address, len)]), status::IOERR, "{kind:?} {of} {address:#x}");
            }
            assert_eq!(disk.call(request::DISCARD, 0, &[(address.max(RAM as u64), 16)]), status::IOERR);
        }
        assert_eq!((disk.status(), disk.image(0, BYTES)), (15, pattern(BYTES, 0)));
    }
}

#[test]
fn disk_behind_the_iommu_respects_mapping_permissions() {
    for kind in kinds().filter(|kind| kind.translated) {
        let mut disk = disk(kind);
        disk.unmap(DATA, 0x2000);
        disk.map(DATA, 0x1000, Permissions::READ);
        disk.fill(DATA, &[0xee; 0x2000]);
        assert_eq!(disk.call(request::IN, 0, &[(DATA, 512)]), status::IOERR);
        assert_eq!(disk.call(request::OUT, 0, &[(DATA + 0xf00, 512)]), status::IOERR);
        assert_eq!(disk.call(request::OUT, 0, &[(DATA, 512)]), status::OK);
        assert_eq!((disk.bytes(DATA, 0x2000), disk.image(0, 512)), (vec![0xee; 0x2000], vec![0xee; 512]));
        let (faults, _) = disk.relay.take();
        assert_eq!((faults[0].iova, faults[0].access), (DATA + OFFSET, Permissions::WRITE));
        assert_eq!((faults[1].iova, faults[1].access), (DATA + OFFSET + 0x1000, Permissions::READ));
    }
}

#[test]
fn malformed_chain_fails_the_device_until_reset() {
    let header = |disk: &Harness| {
        disk.fill(DATA, &[0; 16]);
        DATA + disk.offset()
    };
    type Chain = fn(u64) -> Vec<(u64, u32, u16)>;
    let chains: [Chain; 9] = [
        // No status.
        |at| vec![(at, 16, 0)],
        // No header.
        |at| vec![(at, 16, WRITE)],
        // Incomplete header.
        |at| vec![(at, 15, NEXT), (at + 0x1000, 513, WRITE)],
        // Header outside memory.
        |_| vec![(1 << 40, 16, NEXT), (1 << 40, 1, WRITE)],
        // Status outside memory.
        |at| vec![(at, 16, NEXT), (1 << 40, 1, WRITE)],
        // Empty status buffer.
        |at| vec![(at, 16, NEXT), (at, 0, WRITE)],
        // Status buffer that wraps around the end of the address space.
        |at| vec![(at, 16, NEXT), (u64::MAX, 2, WRITE)],
        // Readable buffer after a writable buffer.
        |at| vec![(at, 16, NEXT), (at + 0x1000, 512, NEXT | WRITE), (at, 16, NEXT), (at + 0x2000, 1, WRITE)],
        // Long chain without a status.
        |at| (0..64).map(|_| (at, 1, NEXT)).collect(),
    ];
    for kind in kinds() {
        for (number, chain) in chains.iter().enumerate() {
            let mut disk = disk(kind);
            let chain = chain(header(&disk));
            disk.chain(0, &chain);
            disk.ring(0);
            disk.broken();
            assert_eq!(disk.used(0), 0, "{kind:?} {number}");
            disk.write(20, &[0]);
            assert_eq!(disk.status(), 0);
            assert_eq!(disk.recorder.take(), [DeviceEvent::Activated, DeviceEvent::Failed, DeviceEvent::Reset]);
            assert_eq!(disk.image(0, BYTES), pattern(BYTES, 0));
        }
    }
}

#[test]
fn available_ring_with_unmapped_elements_fails_the_device() {
    for kind in [PLAIN, RING] {
        let mut disk = Harness::silent(Kind { translated: true, ..kind }, file(&pattern(BYTES, 0)), BYTES as u64);
        // The flags and the index of the available ring are at the end of a page. The ring's elements are on the next page.
        let available = 0x6ffc;
        for page in (0..DATA).step_by(0x1000) {
            disk.map(page, 0x1000, Permissions::READ | Permissions::WRITE);
        }
        disk.begin_with([0x1000, available, 0x3000]);
        disk.unmap(0x7000, 0x1000);
        disk.fill(available + 2, &[1, 0]);
        disk.ring(0);
        disk.broken();
    }
}

#[test]
fn write_to_unwritable_image_fails_and_disk_keeps_working() {
    for kind in kinds() {
        let file = File::from(memfd_create(c"image", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap());
        file.set_len(BYTES as u64).unwrap();
        fcntl_add_seals(&file, SealFlags::WRITE).unwrap();
        let mut disk = Harness::new(kind, file);
        assert_eq!(disk.call(request::OUT, 0, &[(DATA, 512)]), status::IOERR, "{kind:?}");
        assert_eq!(disk.call_ranges(request::WRITE_ZEROES, &[(0, 1, 0)]), status::IOERR);
        assert_eq!(disk.call_ranges(request::DISCARD, &[(0, 8, 0)]), status::IOERR);
        assert_eq!(disk.call(request::IN, 0, &[(DATA, 512)]), status::OK);
        let counters = disk.device.counters();
        assert_eq!((counters.errors, counters.host_errors, disk.status()), (3, 3, 15));
    }
}

#[test]
fn read_beyond_truncated_image_writes_only_the_status() {
    for kind in kinds() {
        let mut disk = disk(kind);
        disk.content.set_len(1024).unwrap();
        disk.fill(DATA, &[0xee; 4096]);
        assert_eq!(disk.call(request::IN, 8, &[(DATA, 4096)]), status::IOERR, "{kind:?}");
        assert_eq!((disk.last_len(0), disk.bytes(DATA, 4096)), (1, vec![0xee; 4096]));
        assert_eq!(disk.call(request::IN, 0, &[(DATA, 1024)]), status::OK);
    }
}

#[test]
fn device_can_be_reset_with_requests_under_way() {
    for kind in kinds() {
        let mut disk = disk(kind);
        for _ in 0..8 {
            disk.add(0, request::OUT, 0, &[(DATA, 8192)]);
        }
        disk.ring(0);
        disk.function.reset().unwrap();
        assert_eq!(disk.status(), 0);
    }
}
