// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Driver that fills its rings, descriptors and buffers with the fuzzer's bytes, for fuzzing and for replaying fuzzer findings.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, memfd_create};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::counters::Counts;
use super::disk::Disk;
use super::image::buffer::Buffer;
use super::image::disk_image::{Image, ImageFormat, ImageOptions};
use super::image::op::Op;
use super::io::engine::IoMode;
use super::io::plain::Plain;
use super::queue::requests::Requests;
use super::queue::transfer::{IoBuffer, list as list_of};
use super::spec::ID_BYTES;
use crate::rate_limit::{BucketParams, RateLimiter, RateLimits};
use crate::virtio::byte_driver::{ByteDriver, Layout, split_choice};
use crate::worker::Task;

/// Size of the disk image in bytes.
const IMAGE: u64 = 64 << 10;

/// Writes `bytes` to the guest's rings, descriptors and buffers piece by piece. After each piece, the disk serves the requests. The first
/// byte selects the I/O mode, the image's properties, the driver's features and the rate limit.
pub fn run(bytes: &[u8]) {
    let (first, bytes) = split_choice(bytes);
    let is = |bit: u8| first & 1 << bit != 0;
    let file = File::from(memfd_create(c"image", MemfdFlags::CLOEXEC).expect("a file descriptor is free"));
    file.set_len(IMAGE).expect("there is enough memory");
    let content = file.try_clone().expect("a file descriptor is free");
    let mode = if is(1) { IoMode::Async } else { IoMode::Plain };
    let image = Image::made_up(file, IMAGE, if is(2) { 512 } else { 1 }, is(3));
    // The rate limiter's bucket is small and refills soon, so requests may wait, but only for a short time.
    let bucket = BucketParams { size: 4096, one_time_burst: 0, refill_time: Duration::from_millis(1) };
    let limits = RateLimits { bandwidth: Some(bucket), ops: None };
    let disk = Disk {
        id: "disk".into(),
        image: Arc::new(image),
        serial: [b'x'; ID_BYTES],
        counts: Counts::default(),
        mode,
        limiter: is(5).then(|| Arc::new(RateLimiter::new(limits, Instant::now()))),
        affinity: BTreeMap::new(),
    };
    let guest = ByteDriver::new(Layout::ONE_QUEUE);
    let driver = guest.driver(if is(4) { u64::MAX } else { 0 });
    let queue = guest.queue(0, is(0));
    let doorbell = EventFd::new(EFD_NONBLOCK).expect("a file descriptor is free");
    let mut requests = Requests::new(0, queue, driver, Arc::new(disk), &doorbell).expect("a file descriptor is free");
    requests.begin();
    guest.feed(bytes, |_, orders| _ = requests.run(orders));
    requests.settle();
    assert_eq!(content.metadata().expect("the file is open").len(), IMAGE, "no request changes the image's size");
}

/// Opens a qcow2 image made from `bytes`, and runs operations on the image. Carom must either reject the image or complete every operation.
///
/// The first byte of `bytes` is the number of bytes that encode operations. If the first byte is odd, the image is opened read-only. The
/// encoded operations follow. Each operation takes 4 bytes: position (2 bytes), kind (1 byte) and length (1 byte). The bytes after the
/// operations are the image.
pub fn image(bytes: &[u8]) {
    opens(bytes);
}

/// Does the same as [`image`], and returns true if the image was accepted.
pub(super) fn opens(bytes: &[u8]) -> bool {
    let Some((count, bytes)) = bytes.split_first() else { return false };
    let (steps, content) = bytes.split_at(usize::from(*count).min(bytes.len()));
    let file = File::from(memfd_create(c"image", MemfdFlags::CLOEXEC).expect("a file descriptor is free"));
    file.write_all_at(content, 0).expect("there is enough memory");
    let read_only = count & 1 != 0;
    let options = ImageOptions { read_only, format: ImageFormat::Qcow2, ..ImageOptions::default() };
    let Ok(image) = Image::of_file(file, false, Path::new("image"), options) else { return false };
    let size = image.bytes();
    let mut plain = Plain::new(Arc::new(image));
    let mut buffer = Buffer::new(1 << 16);
    for step in steps.chunks_exact(4) {
        let place =
            u64::from(u16::from_le_bytes([step[0], step[1]])) * (size / 512 / 65536).max(1) % (size / 512) * 512;
        let len = ((usize::from(step[3]) + 1) * 256) & !511;
        let len = len.max(512).min(usize::try_from(size - place).unwrap_or(usize::MAX));
        let list = [IoBuffer::new(buffer.address(), len)];
        let (buffers, bytes) = (list_of(&list), len as u64);
        let op = match step[2] % 6 {
            0 => Op::Read { buffers, offset: place },
            1 | 2 if !read_only => Op::Write { buffers, offset: place },
            3 if !read_only => Op::Allocate { mode: libc::FALLOC_FL_PUNCH_HOLE, offset: place, len: bytes },
            4 if !read_only => Op::Allocate { mode: libc::FALLOC_FL_ZERO_RANGE, offset: place, len: bytes },
            _ => Op::Sync,
        };
        // SAFETY: The buffer stays allocated during the call, and nothing else accesses it.
        unsafe { plain.run(0, &op) };
        assert!(plain.next_ended().is_some(), "a plain operation has ended when `run` returns");
    }
    true
}
