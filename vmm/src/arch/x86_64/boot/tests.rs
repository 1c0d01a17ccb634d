// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

use std::io::Write;

use rustix::fs::{CWD, FileType, Mode, mknodat};
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};

use super::*;
use crate::arch::layout::MIB;
use crate::memory;

impl Payload {
    /// Loads the payload into memory that is dropped afterwards.
    fn check(&self, ram_size: u64) -> Result<(), BootError> {
        let memory = memory::create(&MemoryConfig::with_size(ram_size)).unwrap();
        self.load(memory.as_ref(), ram_size, 0).map(|_| ())
    }
}

fn payload(content: &[u8]) -> (tempfile::NamedTempFile, PayloadConfig) {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(content).unwrap();
    let config = PayloadConfig::of_kernel(file.path());
    (file, config)
}

fn refused(content: &[u8]) -> String {
    let (_file, config) = payload(content);
    error(&config).to_string()
}

/// Returns the error of loading the payload of `config`. The error must be a user error.
fn error(config: &PayloadConfig) -> BootError {
    let error = match Payload::open(config) {
        Ok(payload) => payload.check(64 * MIB).unwrap_err(),
        Err(error) => error,
    };
    assert!(error.is_user_error());
    error
}

/// Returns a bzImage with one set-up sector and `code` bytes of code.
fn bzimage(version: u16, code: usize) -> Vec<u8> {
    let mut image = vec![0u8; 1024 + code];
    image[0x1f1] = 1;
    image[0x202..0x206].copy_from_slice(b"HdrS");
    image[0x206..0x208].copy_from_slice(&version.to_le_bytes());
    image[0x211] = 1;
    image[0x214..0x218].copy_from_slice(&0x10_0000u32.to_le_bytes());
    image[0x22c..0x230].copy_from_slice(&0x7fff_ffffu32.to_le_bytes());
    image[0x236] = 1;
    image[0x258..0x260].copy_from_slice(&0x100_0000u64.to_le_bytes());
    image[0x260..0x264].copy_from_slice(&0x10_0000u32.to_le_bytes());
    image
}

/// Returns an ELF image like EDK2's: a 64-bit image for a 32-bit machine. The image has one segment of `size` bytes from 1 MiB on. Its note
/// of type `note` contains the entry point.
fn elf(size: u64, note: u32, entry: u32) -> Vec<u8> {
    elf_of(size, note, entry, &[Segment { offset: 0, address: HIGH_RAM_START, file_len: size, len: size }])
}

/// Loadable segment.
#[derive(Clone, Copy)]
struct Segment {
    offset: u64,
    address: u64,
    file_len: u64,
    len: u64,
}

/// Returns an image like that of [`elf`], but with `segments`. The file has at least `size` bytes.
fn elf_of(size: u64, note: u32, entry: u32, segments: &[Segment]) -> Vec<u8> {
    let headers = u16::try_from(segments.len() + 1).unwrap();
    let note_at = 64 + 56 * u64::from(headers);
    let mut image = Vec::new();
    // ELF header: class, byte order and version; type EXEC and machine 80386; entry; program headers of 56 bytes each, from offset 64 on.
    image.extend(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0");
    image.extend([2u16.to_le_bytes(), 3u16.to_le_bytes()].concat());
    image.extend(1u32.to_le_bytes());
    image.extend([u64::from(entry), 64, 0].map(u64::to_le_bytes).concat());
    image.extend(0u32.to_le_bytes());
    image.extend([64u16, 56, headers, 0, 0, 0].map(u16::to_le_bytes).concat());
    let of_note = Segment { offset: note_at, address: HIGH_RAM_START + note_at, file_len: 0x14, len: 0x14 };
    let kinds = segments.iter().map(|segment| (1u32, segment)).chain([(4, &of_note)]);
    for (kind, Segment { offset, address, file_len, len }) in kinds {
        image.extend([kind, 7].map(u32::to_le_bytes).concat());
        image.extend([*offset, *address, *address, *file_len, *len, 4].map(u64::to_le_bytes).concat());
    }
    image.extend([4, 4, note].map(u32::to_le_bytes).concat());
    image.extend(b"Xen\0");
    image.extend(entry.to_le_bytes());
    image.resize(usize::try_from(size).unwrap().max(image.len()), 0xc3);
    image
}

/// XEN_ELFNOTE_PHYS32_ENTRY (Xen's `xen/include/public/elfnote.h`).
const PVH_NOTE: u32 = 18;

fn firmware(content: &[u8]) -> (tempfile::NamedTempFile, PayloadConfig) {
    let (file, _) = payload(content);
    let config = PayloadConfig::of_firmware(file.path());
    (file, config)
}

fn firmware_refused(content: &[u8]) -> String {
    let (_file, config) = firmware(content);
    let error = error(&config);
    assert!(error.explain(Terms::Json).starts_with("payload.firmware"), "{error}");
    error.to_string()
}

#[test]
fn firmware_is_entered_by_pvh_with_memory_map_and_tables() {
    let (_file, config) = firmware(&elf(0x4000, PVH_NOTE, 0x10_3ff0));
    let memory = memory::create(&MemoryConfig::with_size(64 * MIB)).unwrap();
    let payload = Payload::open(&config).unwrap();
    // The payload is loaded twice, as on a reboot. The second load restores bytes that the firmware has overwritten.
    for _ in 0..2 {
        memory.write_slice(&[0; 0x4000], GuestAddress(HIGH_RAM_START)).unwrap();
        let entry = payload.load(&memory, 64 * MIB, 0xe0000).unwrap();
        assert_eq!(entry, Entry::Pvh(0x10_3ff0));
        assert_eq!(memory.read_obj::<u8>(GuestAddress(0x10_3fff)).unwrap(), 0xc3);
    }
    let long = |address| memory.read_obj::<u64>(GuestAddress(address)).unwrap();
    let start = crate::arch::layout::PVH_START_INFO;
    // The start information contains no modules and an empty command line.
    assert_eq!((long(start + 8) >> 32, long(start + 16)), (0, 0));
    assert_eq!(memory.read_obj::<u8>(GuestAddress(long(start + 24))).unwrap(), 0);
    assert_eq!((long(start + 32), long(start + 40)), (0xe0000, crate::arch::layout::PVH_MEMORY_MAP));
}

#[test]
fn non_firmware_file_is_refused() {
    assert!(firmware_refused(&[0; 4096]).contains("ELF magic number; use an ELF image with a PVH"));
    assert!(firmware_refused(&bzimage(0x20f, 4096)).contains("the file does not have the ELF magic number"));
    assert!(firmware_refused(&elf(0x4000, PVH_NOTE + 1, 0x10_3ff0)).contains("the image has no PVH entry point"));
    let error = Payload::open(&PayloadConfig::of_firmware("/nonexistent/f")).err().unwrap().to_string();
    assert!(error.starts_with("--firmware /nonexistent/f: No such file"), "{error}");
}

#[test]
fn malformed_firmware_is_refused_wherever_it_is_cut_or_damaged() {
    let whole = elf(0x4000, PVH_NOTE, 0x10_3ff0);
    for len in [4, 16, 63, 64, 119, 175, 0x3fff] {
        firmware_refused(&whole[..len]);
    }
    let with = |at: usize, bytes: &[u8]| {
        let mut image = whole.clone();
        image[at..at + bytes.len()].copy_from_slice(bytes);
        firmware_refused(&image)
    };
    // The first damaged image is big-endian. The second has program headers beyond the file. In the next three, the segment exceeds the
    // address space, RAM and the file, respectively.
    with(5, &[2]);
    with(32, &u64::MAX.to_le_bytes());
    with(64 + 24, &(u64::MAX - 0xfff).to_le_bytes());
    with(64 + 24, &(64 * MIB - 0x1000).to_le_bytes());
    with(64 + 8, &0x1_0000u64.to_le_bytes());
    // In the last image, the notes exceed the file.
    with(0xb0, &u32::MAX.to_le_bytes());
}

#[test]
fn firmware_larger_than_ram_is_refused() {
    let (_file, config) = firmware(&elf(2 * MIB, PVH_NOTE, 0x10_3ff0));
    let error = Payload::open(&config).unwrap().check(2 * MIB).unwrap_err();
    assert!(error.is_user_error() && error.to_string().starts_with("--firmware"), "{error}");
}

/// Returns firmware of 16 KiB with BSS in three places: after the file's bytes, 2 MiB above the image, and below 1 MiB. The first BSS
/// contains bytes of another segment.
fn firmware_with_bss() -> Vec<u8> {
    let segments = [
        Segment { offset: 0x3ff0, address: HIGH_RAM_START + 0x6008, file_len: 0x10, len: 0x10 },
        Segment { offset: 0, address: HIGH_RAM_START, file_len: 0x3ff1, len: 0x9ff3 },
        Segment { offset: 0, address: HIGH_RAM_START + 2 * MIB, file_len: 0, len: 0x3000 },
        Segment { offset: 0, address: 0x9_f000, file_len: 0, len: 0x5_0000 },
    ];
    elf_of(0x4000, PVH_NOTE, 0x10_3ff0, &segments)
}

/// Overwrites all memory that this firmware uses, and the memory after its BSS.
fn use_ram(memory: &Ram) {
    memory.write_slice(&[0xff; 0x1000], GuestAddress(0x9_f000)).unwrap();
    memory.write_slice(&[0xee; 0x1_0000], GuestAddress(0xe_0000)).unwrap();
    memory.write_slice(&[0xff; 0x21_0000], GuestAddress(HIGH_RAM_START)).unwrap();
}

/// Checks that loading the firmware into used RAM has cleared the firmware's BSS, and has changed no memory outside of the firmware's
/// segments.
fn assert_bss_is_zeros(memory: &Ram) {
    let read = |address, len: usize| {
        let mut bytes = vec![0x11; len];
        memory.read_slice(&mut bytes, GuestAddress(address)).unwrap();
        bytes
    };
    let high = read(HIGH_RAM_START, 0x21_0000);
    let is = |range: std::ops::Range<usize>, value: u8| high[range].iter().all(|byte| *byte == value);
    assert!(is(0x3ff0..0x3ff1, 0xc3) && is(0x3ff1..0x6008, 0) && is(0x6008..0x6018, 0xc3) && is(0x6018..0x9ff3, 0));
    assert!(is(0x9ff3..0x20_0000, 0xff), "memory outside of segments is unchanged");
    assert!(is(0x20_0000..0x20_3000, 0) && is(0x20_3000..0x21_0000, 0xff));
    assert_eq!(read(0x9_f000, 0x1000), [0; 0x1000]);
    assert_eq!(read(0xe_0000, 0x1_0000), [0xee; 0x1_0000], "the tables are unchanged");
}

#[test]
fn bss_of_an_elf_image_is_zeros_again_after_a_reset() {
    let (_file, config) = firmware(&firmware_with_bss());
    for shared in [false, true] {
        let memory = memory::create(&MemoryConfig { shared, ..MemoryConfig::with_size(64 * MIB) }).unwrap();
        let payload = Payload::open(&config).unwrap();
        payload.load(&memory, 64 * MIB, 0xe0000).unwrap();
        for _ in 0..2 {
            use_ram(&memory);
            payload.load(&memory, 64 * MIB, 0xe0000).unwrap();
            assert_bss_is_zeros(&memory);
        }
    }
}

#[test]
fn bss_is_zeros_in_ram_used_before_the_first_load() {
    let (_file, config) = firmware(&firmware_with_bss());
    // Reset of a restored VM: its RAM came from a snapshot, and this process loads the payload for the first time.
    let memory = memory::create(&MemoryConfig::with_size(64 * MIB)).unwrap();
    use_ram(&memory);
    let payload = Payload::open(&config).unwrap();
    payload.ram_was_used();
    payload.load(&memory, 64 * MIB, 0xe0000).unwrap();
    assert_bss_is_zeros(&memory);
    // Boot of a VM whose RAM is a file that an earlier VM used.
    let ram = tempfile::NamedTempFile::new().unwrap();
    ram.as_file().set_len(64 * MIB).unwrap();
    let zone = format!("id=a,size=64M,shared=on,file={}", ram.path().display());
    let config_of_ram = MemoryConfig { size: 0, zones: vec![zone.parse().unwrap()], ..MemoryConfig::default() };
    use_ram(&memory::create(&config_of_ram).unwrap());
    let memory = memory::create(&config_of_ram).unwrap();
    Payload::open(&config).unwrap().load(&memory, 64 * MIB, 0xe0000).unwrap();
    assert_bss_is_zeros(&memory);
}

#[test]
fn bss_takes_no_pages_of_fresh_ram() {
    let bss = Segment { offset: 0, address: 8 * MIB, file_len: 0, len: 48 * MIB };
    let first = Segment { offset: 0, address: HIGH_RAM_START, file_len: 0x4000, len: 0x4000 };
    let (_file, config) = firmware(&elf_of(0x4000, PVH_NOTE, 0x10_3ff0, &[first, bss]));
    for shared in [false, true] {
        let memory = memory::create(&MemoryConfig { shared, ..MemoryConfig::with_size(64 * MIB) }).unwrap();
        let payload = Payload::open(&config).unwrap();
        payload.load(&memory, 64 * MIB, 0xe0000).unwrap();
        let region = memory.iter().next().unwrap();
        let resident = memory::tests::said_by_smaps(region, "Rss:");
        let resident: u64 = resident.trim_end_matches(" kB").parse().unwrap();
        // The resident RAM is far smaller than the BSS, even if the kernel uses huge pages for written pages.
        assert!(resident << 10 < 16 * MIB, "shared {shared}: {resident} KiB");
        if let Some(file) = region.file_offset() {
            let blocks = std::os::unix::fs::MetadataExt::blocks(&file.file().metadata().unwrap());
            assert!(blocks * 512 < 16 * MIB, "{blocks} blocks");
        }
    }
}

#[test]
fn elf_image_whose_bss_is_not_within_ram_is_refused() {
    let first = Segment { offset: 0, address: HIGH_RAM_START, file_len: 0x4000, len: 0x4000 };
    let of = |address, file_len, len| Segment { offset: 0, address, file_len, len };
    for bad in [
        of(63 * MIB, 0, MIB + 1),
        of(63 * MIB, 0x10, MIB + 1),
        of(64 * MIB, 0, 1),
        of(u64::MAX, 0, 1),
        of(u64::MAX - 0xfff, 0, 0x1000),
        of(2 * MIB, 0, u64::MAX),
        of(2 * MIB, 0x10, u64::MAX - 2 * MIB),
        of(u64::MAX, 0, u64::MAX),
    ] {
        for segments in [[first, bad], [bad, first]] {
            let (_file, config) = firmware(&elf_of(0x4000, PVH_NOTE, 0x10_3ff0, &segments));
            let payload = Payload::open(&config).unwrap();
            payload.ram_was_used();
            let error = payload.check(64 * MIB).unwrap_err();
            assert!(error.is_user_error(), "{error}");
            // More RAM does not help if the segment ends above low memory.
            let rule = match bad.address.saturating_add(bad.len) <= LOW_MEMORY_END {
                true => "--memory size: 67108864 bytes are too few for this firmware",
                false => "--firmware: ",
            };
            assert!(error.to_string().starts_with(rule), "{error}");
        }
    }
    let (_file, config) = firmware(&elf_of(0x4000, PVH_NOTE, 0x10_3ff0, &[first, of(63 * MIB, 0, MIB)]));
    Payload::open(&config).unwrap().check(64 * MIB).unwrap();
}

#[test]
fn elf_image_with_very_many_segments_is_refused_at_once() {
    let whole = Segment { offset: 0, address: HIGH_RAM_START, file_len: 0, len: 63 * MIB };
    let started = std::time::Instant::now();
    for (count, rule) in [
        (200, "--firmware: 13212057600 bytes of RAM below 0xc0000000 are needed for this firmware"),
        (0xfffe, "cannot read the ELF program headers: the image has 65535 headers, but the maximum is 256"),
    ] {
        let (_file, config) = firmware(&elf_of(0x4000, PVH_NOTE, 0x10_3ff0, &vec![whole; count]));
        let payload = Payload::open(&config).unwrap();
        payload.ram_was_used();
        let error = payload.check(64 * MIB).unwrap_err().to_string();
        assert!(error.contains(rule), "{error}");
    }
    // Clearing 4 TiB, the total length of the segments, would take longer.
    assert!(started.elapsed() < std::time::Duration::from_secs(60));
}

#[test]
fn non_kernel_file_is_refused() {
    for content in [&b"#!/bin/sh\n"[..], &[0; 4096][..]] {
        assert!(refused(content).contains("neither the bzImage nor the ELF magic number"));
    }
}

#[test]
fn empty_file_and_directory_are_refused() {
    assert!(refused(b"").contains("empty"));
    let config = PayloadConfig::of_kernel("/");
    assert!(Payload::open(&config).err().unwrap().to_string().contains("not a regular file"));
}

#[test]
fn pipe_without_a_writer_is_refused_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let pipe = dir.path().join("pipe");
    mknodat(CWD, &pipe, FileType::Fifo, Mode::RWXU, 0).unwrap();
    let config = PayloadConfig::of_kernel(&pipe);
    assert!(Payload::open(&config).err().unwrap().to_string().contains("not a regular file"));
    let (_kernel, config) = payload(&bzimage(0x20c, 4096));
    let config = PayloadConfig { initramfs: Some(pipe), ..config };
    let refused = Payload::open(&config).and_then(|payload| payload.check(64 * MIB)).err().unwrap().to_string();
    assert!(refused.contains("not a regular file"), "{refused}");
}

#[test]
fn missing_file_names_its_option() {
    let config = PayloadConfig::of_kernel("/nonexistent/kernel");
    let text = Payload::open(&config).err().unwrap().to_string();
    assert!(text.starts_with("--kernel /nonexistent/kernel: No such file"), "{text}");
}

#[test]
fn truncated_elf_is_refused() {
    assert!(refused(b"\x7fELF\x02\x01\x01").starts_with("--kernel"));
}

#[test]
fn bzimage_without_64bit_entry_is_refused() {
    assert!(
        refused(&bzimage(0x20b, 4096))
            .contains("no 64-bit entry point (its boot protocol is 2.11): it must be a 64-bit kernel")
    );
}

#[test]
fn bzimage_is_entered_0x200_behind_its_start() {
    let (_file, config) = payload(&bzimage(0x20f, 4096));
    let memory = memory::create(&MemoryConfig::with_size(64 * MIB)).unwrap();
    let entry = Payload::open(&config).unwrap().load(&memory, 64 * MIB, 0xe0000).unwrap();
    assert_eq!(entry, Entry::Linux64(0x10_0200));
}

#[test]
fn initramfs_beyond_the_limit_is_not_blamed_on_ram() {
    let (_file, config) = firmware(&elf(0x4000, PVH_NOTE, 0x10_3ff0));
    let initramfs = tempfile::NamedTempFile::new().unwrap();
    let config = PayloadConfig {
        firmware: None,
        kernel: config.firmware,
        initramfs: Some(initramfs.path().into()),
        ..PayloadConfig::default()
    };
    let refused = |len: u64, ram_size: u64| {
        initramfs.as_file().set_len(len).unwrap();
        Payload::open(&config).unwrap().check(ram_size).unwrap_err().to_string()
    };
    assert_eq!(
        refused(96 * MIB, 64 * MIB),
        "--memory size: 67108864 bytes are too few for this initramfs: use at least 101728256 bytes"
    );
    let rule = "bytes of RAM below 0xc0000000 are needed for this initramfs, and more RAM does not help: use a smaller initramfs";
    let reported = refused(3584 * MIB, 64 * MIB);
    assert!(reported.starts_with("--initramfs: 37") && reported.ends_with(rule), "{reported}");
}

#[test]
fn initramfs_goes_to_the_top_of_low_memory() {
    let (_kernel, mut config) = payload(&bzimage(0x20f, 4096));
    let mut initramfs = tempfile::NamedTempFile::new().unwrap();
    initramfs.write_all(&[0x5a; 5000]).unwrap();
    config.initramfs = Some(initramfs.path().into());
    let memory = memory::create(&MemoryConfig::with_size(64 * MIB)).unwrap();
    let payload = Payload::open(&config).unwrap();
    // The payload is loaded twice, as on a reboot.
    for _ in 0..2 {
        payload.load(&memory, 64 * MIB, 0xe0000).unwrap();
        let last: u8 = memory.read_obj(GuestAddress(64 * MIB - 8192 + 4999)).unwrap();
        assert_eq!(last, 0x5a);
    }
}

#[test]
fn payload_larger_than_ram_is_refused() {
    let (_kernel, mut config) = payload(&bzimage(0x20f, 4096));
    let initramfs = tempfile::NamedTempFile::new().unwrap();
    initramfs.as_file().set_len(128 * MIB).unwrap();
    config.initramfs = Some(initramfs.path().into());
    let error = Payload::open(&config).unwrap().check(64 * MIB).unwrap_err();
    assert!(error.to_string().starts_with("--memory size:"), "{error}");
}
