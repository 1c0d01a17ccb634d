// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

use std::io::Write;

use rustix::fs::{CWD, FileType, Mode, mknodat};

use super::*;
use crate::arch::layout::MIB;
use crate::memory;

fn payload(content: &[u8]) -> (tempfile::NamedTempFile, PayloadConfig) {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(content).unwrap();
    let config = PayloadConfig { kernel: file.path().into(), ..Default::default() };
    (file, config)
}

fn refused(content: &[u8]) -> String {
    let (_file, config) = payload(content);
    let error = match Payload::open(&config) {
        Ok(payload) => payload.check(64 * MIB).unwrap_err(),
        Err(error) => error,
    };
    assert!(error.is_user_error());
    error.to_string()
}

/// A bzImage with one set-up sector and `code` bytes of code.
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

#[test]
fn file_that_is_no_kernel_is_refused() {
    for content in [&b"#!/bin/sh\n"[..], &[0; 4096][..]] {
        assert!(refused(content).contains("neither the bzImage nor the ELF magic number"));
    }
}

#[test]
fn empty_file_and_directory_are_refused() {
    assert!(refused(b"").contains("empty"));
    let config = PayloadConfig { kernel: "/".into(), ..Default::default() };
    assert!(Payload::open(&config).err().unwrap().to_string().contains("not a regular file"));
}

#[test]
fn pipe_that_nobody_writes_to_is_refused_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let pipe = dir.path().join("pipe");
    mknodat(CWD, &pipe, FileType::Fifo, Mode::RWXU, 0).unwrap();
    let config = PayloadConfig { kernel: pipe.clone(), ..Default::default() };
    assert!(Payload::open(&config).err().unwrap().to_string().contains("not a regular file"));
    let (_kernel, config) = payload(&bzimage(0x20c, 4096));
    let config = PayloadConfig { initramfs: Some(pipe), ..config };
    let refused = Payload::open(&config).and_then(|payload| payload.check(64 * MIB)).err().unwrap().to_string();
    assert!(refused.contains("not a regular file"), "{refused}");
}

#[test]
fn missing_file_names_its_option() {
    let config = PayloadConfig { kernel: "/nonexistent/kernel".into(), ..Default::default() };
    let text = Payload::open(&config).err().unwrap().to_string();
    assert!(text.starts_with("--kernel /nonexistent/kernel: No such file"), "{text}");
}

#[test]
fn truncated_elf_is_refused() {
    assert!(refused(b"\x7fELF\x02\x01\x01").starts_with("--kernel"));
}

#[test]
fn bzimage_without_64bit_entry_is_refused() {
    assert!(refused(&bzimage(0x20b, 4096)).contains("no 64-bit entry point (boot protocol 2.11)"));
}

#[test]
fn bzimage_is_entered_0x200_behind_its_start() {
    let (_file, config) = payload(&bzimage(0x20f, 4096));
    let memory = memory::create(&MemoryConfig::with_size(64 * MIB)).unwrap();
    let entry = Payload::open(&config).unwrap().load(&memory, 64 * MIB, 0xe0000).unwrap();
    assert_eq!(entry, Entry::Linux64(0x10_0200));
}

#[test]
fn initramfs_goes_to_the_top_of_low_memory() {
    let (_kernel, mut config) = payload(&bzimage(0x20f, 4096));
    let mut initramfs = tempfile::NamedTempFile::new().unwrap();
    initramfs.write_all(&[0x5a; 5000]).unwrap();
    config.initramfs = Some(initramfs.path().into());
    let memory = memory::create(&MemoryConfig::with_size(64 * MIB)).unwrap();
    let payload = Payload::open(&config).unwrap();
    // Twice, as a reboot does.
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
