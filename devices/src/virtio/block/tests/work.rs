// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of a disk whose driver follows the rules.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::harness::*;
use crate::pci::PciDevice;
use crate::virtio::block::image::disk_image::{Image, ImageOptions};
use crate::virtio::block::spec::{DEVICE_TYPE, feature, request, status};

const IMAGE: usize = 1 << 20;

#[test]
fn reads_and_writes_reach_the_image_in_all_modes() {
    for kind in kinds() {
        let mut disk = Harness::new(kind, file(&pattern(IMAGE, 0)));
        assert_eq!(disk.call(request::IN, 8, &[(DATA, 8192)]), status::OK, "{kind:?}");
        assert_eq!(disk.last_len(0), 8193);
        assert_eq!(disk.bytes(DATA, 8192), &pattern(IMAGE, 0)[4096..12288]);
        let written = pattern(3 * 4096, 0x55);
        disk.fill(DATA + 0x8000, &written);
        assert_eq!(disk.call(request::OUT, 3, &[(DATA + 0x8000, 3 * 4096)]), status::OK, "{kind:?}");
        assert_eq!(disk.last_len(0), 1);
        assert_eq!(disk.image(3 * 512, 3 * 4096), written);
        assert_eq!(disk.image(0, 3 * 512), &pattern(IMAGE, 0)[..3 * 512]);
        assert_eq!(disk.call(request::FLUSH, 0, &[]), status::OK);
        let counters = disk.device.counters();
        assert_eq!((counters.read_ops, counters.read_bytes), (1, 8192));
        assert_eq!((counters.write_ops, counters.write_bytes), (1, 3 * 4096));
        assert_eq!((counters.flushes, counters.errors), (1, 0));
    }
}

#[test]
fn request_may_be_split_into_any_buffers() {
    for kind in kinds() {
        let mut disk = Harness::new(kind, file(&pattern(IMAGE, 0)));
        let offset = disk.offset();
        let at = |address: u64| address + offset;
        // The request is a write. The header and the data are split into buffers of odd lengths. One buffer contains the end of the header
        // and the start of the data.
        let mut all = Vec::new();
        all.extend(request::OUT.to_le_bytes());
        all.extend([0; 4]);
        all.extend(2u64.to_le_bytes());
        let data = pattern(1024, 0x99);
        all.extend(&data);
        disk.fill(DATA + 3, &all[..7]);
        disk.fill(DATA + 0x1ffb, &all[7..23]);
        disk.fill(DATA + 0x4001, &all[23..]);
        let rest = u32::try_from(all.len() - 23).unwrap();
        disk.fill(DATA + 0x7000, &[0xff]);
        let chain = [
            (at(DATA + 3), 7, NEXT),
            (at(DATA + 0x1ffb), 16, NEXT),
            (at(DATA), 0, NEXT),
            (at(DATA + 0x4001), rest, NEXT),
            (at(DATA + 0x7000), 1, WRITE),
        ];
        disk.chain(0, &chain);
        disk.ring(0);
        disk.served(0);
        assert_eq!((disk.byte(DATA + 0x7000), disk.image(1024, 1024)), (status::OK, data.clone()), "{kind:?}");
        // The request is a read into buffers of odd lengths. The last buffer also contains the status byte.
        disk.fill(DATA + 0x8000, &[request::IN.to_le_bytes().as_slice(), &[0; 4], &2u64.to_le_bytes()].concat());
        let chain = [
            (at(DATA + 0x8000), 16, NEXT),
            (at(DATA + 0x9ff1), 100, NEXT | WRITE),
            (at(DATA + 0xb003), 900, NEXT | WRITE),
            (at(DATA + 0xc000), 25, WRITE),
        ];
        disk.chain(0, &chain);
        disk.ring(0);
        disk.served(0);
        assert_eq!(disk.last_len(0), 1025);
        let read = [disk.bytes(DATA + 0x9ff1, 100), disk.bytes(DATA + 0xb003, 900), disk.bytes(DATA + 0xc000, 25)];
        assert_eq!(read.concat(), [data.as_slice(), &[status::OK]].concat(), "{kind:?}");
    }
}

#[test]
fn configuration_describes_the_disk() {
    let kind = Kind { queues: 3, ..RING };
    let disk = Harness::new(kind, file(&[0; 12 << 10]));
    let mut id = [0; 4];
    disk.function.read_config(0, &mut id);
    assert_eq!(u32::from_le_bytes(id), (u32::from(DEVICE_TYPE) + 0x1040) << 16 | 0x1af4);
    assert_eq!(u64::from_le_bytes(disk.config(0)), 24);
    assert_eq!(u32::from_le_bytes(disk.config(12)), u32::from(QUEUE_SIZE) - 2);
    assert_eq!(u32::from_le_bytes(disk.config(20)), 512);
    assert_eq!((disk.config(24), u16::from_le_bytes(disk.config(26))), ([3], 8));
    assert_eq!(u16::from_le_bytes(disk.config(34)), 3);
    let both = feature::DISCARD | feature::WRITE_ZEROES;
    assert_eq!(disk.features() & (both | feature::RO | feature::MQ), both | feature::MQ);
    let reader = Harness::new(Kind { read_only: true, ..RING }, file(&[0; 512]));
    assert_eq!(reader.features() & (both | feature::RO | feature::MQ), feature::RO);
    assert_eq!(u32::from_le_bytes(reader.config(36)), 0);
}

#[test]
fn serial_number_is_truncated_to_the_buffer() {
    for kind in kinds() {
        let mut disk = Harness::new(kind, file(&[0; 512]));
        disk.fill(DATA, &[0xee; 64]);
        assert_eq!(disk.call(request::GET_ID, 0, &[(DATA, 20)]), status::OK);
        assert_eq!(
            (disk.last_len(0), disk.bytes(DATA, 21)),
            (21, [b"a-serial".as_slice(), &[0; 12], &[0xee]].concat())
        );
        assert_eq!(disk.call(request::GET_ID, 0, &[(DATA + 64, 4)]), status::OK);
        assert_eq!(disk.bytes(DATA + 64, 5), b"a-se\0");
    }
}

#[test]
fn concurrent_reads_each_get_their_own_data() {
    for kind in kinds() {
        let whole = pattern(IMAGE, 0);
        let mut disk = Harness::new(Kind { queues: 2, ..kind }, file(&whole));
        for round in 0..4u64 {
            let mut places = Vec::new();
            for number in 0..16u64 {
                for queue in [0, 1] {
                    let address = DATA + (number * 2 + u64::from(queue)) * 0x4000 + 8 * number;
                    let sector = round * 37 + number * 11 + u64::from(queue) * 500;
                    places.push((address, sector, disk.add(queue, request::IN, sector, &[(address, 0x2000)])));
                }
            }
            disk.ring(0);
            disk.ring(1);
            disk.served(0);
            disk.served(1);
            for (address, sector, code) in places {
                let start = usize::try_from(sector * 512).unwrap();
                assert_eq!(disk.byte(code), status::OK);
                assert_eq!(disk.bytes(address, 0x2000), &whole[start..start + 0x2000], "{kind:?}");
            }
        }
    }
}

#[test]
fn write_zeroes_clears_and_discard_frees_only_its_range() {
    for kind in kinds() {
        let mut disk = Harness::new(kind, file(&pattern(IMAGE, 0)));
        assert_eq!(disk.call_ranges(request::WRITE_ZEROES, &[(8, 9, 0)]), status::OK, "{kind:?}");
        assert_eq!(disk.image(8 * 512, 9 * 512), [0; 9 * 512]);
        assert_eq!(disk.call_ranges(request::WRITE_ZEROES, &[(32, 1, 1)]), status::OK);
        assert_eq!(disk.image(32 * 512, 512), [0; 512]);
        let whole = pattern(IMAGE, 0);
        assert_eq!(disk.image(0, 8 * 512), &whole[..8 * 512]);
        assert_eq!(disk.image(17 * 512, 15 * 512), &whole[17 * 512..32 * 512]);
        assert_eq!(disk.image(33 * 512, 512), &whole[33 * 512..34 * 512]);
        let before = disk.content.metadata().unwrap().blocks();
        assert_eq!(disk.call_ranges(request::DISCARD, &[(64, 512, 0), (1024, 0, 0), (1024, 256, 0)]), status::OK);
        assert!(disk.content.metadata().unwrap().blocks() <= before - 700, "{kind:?}");
        assert_eq!(disk.image(1280 * 512, 512), &whole[1280 * 512..1281 * 512]);
        assert_eq!(disk.content.metadata().unwrap().len(), IMAGE as u64);
        let counters = disk.device.counters();
        assert_eq!((counters.write_zeroes, counters.discards, counters.errors), (2, 1, 0));
    }
}

#[test]
fn preallocated_disk_offers_no_discard_and_frees_no_blocks() {
    for kind in kinds() {
        let content = file(&pattern(IMAGE, 0));
        let image = content.try_clone().unwrap();
        let options = ImageOptions { allocated: true, ..ImageOptions::default() };
        let image = Image::of_file(image, false, Path::new("image"), options).unwrap();
        let mut disk = Harness::of_image(kind, image, content);
        disk.start();
        assert_eq!(disk.features() & (feature::DISCARD | feature::WRITE_ZEROES), feature::WRITE_ZEROES, "{kind:?}");
        assert_eq!((disk.config::<4>(36), disk.config::<1>(56)), ([0; 4], [0]), "no discards and no unmapping");
        let room = disk.content.metadata().unwrap().blocks();
        assert_eq!(disk.call_ranges(request::DISCARD, &[(64, 512, 0)]), status::UNSUPP);
        assert_eq!(disk.call_ranges(request::WRITE_ZEROES, &[(64, 512, 1)]), status::OK);
        assert_eq!(disk.image(64 * 512, 512 * 512), [0; 512 * 512]);
        assert_eq!(disk.content.metadata().unwrap().blocks(), room);
    }
}

#[test]
fn driver_without_flush_feature_is_served() {
    for kind in kinds() {
        let mut disk = Harness::new(Kind { without: NO_FLUSH, ..kind }, file(&[0; 4096]));
        disk.fill(DATA, &pattern(512, 1));
        assert_eq!(disk.call(request::OUT, 1, &[(DATA, 512)]), status::OK);
        assert_eq!(disk.image(512, 512), pattern(512, 1));
        assert_eq!(disk.call_ranges(request::WRITE_ZEROES, &[(1, 1, 0)]), status::OK);
        assert_eq!(disk.image(512, 512), [0; 512]);
    }
}

#[test]
fn large_read_into_many_unaligned_buffers_is_complete() {
    // The buffers have odd addresses and cross page boundaries. Behind the IOMMU, each page is a separate mapping. The read is larger than
    // 256 KiB, so a disk that copies data needs several copies.
    for kind in kinds() {
        let mut disk = Harness::silent(kind, file(&pattern(IMAGE, 0)), IMAGE as u64);
        disk.start();
        let pieces: Vec<(u64, u32)> = (0..50).map(|piece| (DATA + 0x3000 * piece + 7, 0x2800)).collect();
        assert_eq!(disk.call(request::IN, 1, &pieces), status::OK);
        let read: Vec<u8> = pieces.iter().flat_map(|(address, len)| disk.bytes(*address, *len as usize)).collect();
        assert_eq!(read, &pattern(IMAGE, 0)[512..512 + 50 * 0x2800]);
    }
}
