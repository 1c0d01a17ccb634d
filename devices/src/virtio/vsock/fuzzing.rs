// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Fuzzing of the device, with a driver whose rings, descriptors and packets contain the fuzzer's bytes. Tests use the same code to replay
//! findings.

use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::counters::Counts;
use super::hub::Ends;
use super::traffic::{QUEUES, Traffic};
use super::unix::Listener;
use crate::virtio::byte_driver::{ByteDriver, Layout, split_choice};
use crate::virtio::queue_table::TableTask;
use crate::worker::Task;

/// Host port that a host program serves.
const SERVED: u32 = 1;

/// Writes `bytes` to the guest's rings, descriptors and packets piece by piece. After each piece, the device serves the queues. The first
/// byte selects the options of the device and the driver. A host client stays connected during the run.
///
/// # Panics
/// The device keeps more state than allowed.
pub fn run(bytes: &[u8]) {
    let (first, bytes) = split_choice(bytes);
    let is = |bit: u8| first & 1 << bit != 0;
    let dir = Directory::new();
    let listener = Listener::bind(&dir.0.join("s")).expect("the directory is new");
    let server = UnixListener::bind(dir.0.join(format!("s_{SERVED}"))).expect("the directory is new");
    server.set_nonblocking(true).expect("the socket is open");
    let mut client = UnixStream::connect(dir.0.join("s")).expect("the device listens");
    // The client connects to a small guest port, because random packets of the guest are likely to name a small port.
    std::io::Write::write_all(&mut client, b"CONNECT 2\nhello").expect("the socket has room");
    let guest = ByteDriver::new(Layout::queues(0x2_0000, 0x3000));
    let ends = Ends { cid: 3, listener, connections: 8, counts: Counts::default() };
    let traffic = Traffic::new(Arc::new(ends), is(0)).expect("a file descriptor is free");
    let mut traffic = TableTask::new(traffic, guest.driver(0), QUEUES);
    guest.start_queues(&mut traffic, QUEUES, is(1));
    let mut accepted = Vec::new();
    guest.feed(bytes, |_, orders| {
        traffic.run(orders);
        accepted.extend(server.accept());
        if is(2) {
            accepted.clear();
        }
    });
    assert!(traffic.service.hub.is_bounded());
}

/// Directory that is removed when the value is dropped.
struct Directory(std::path::PathBuf);

impl Directory {
    fn new() -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("carom-vsock-{}-{number}", std::process::id()));
        std::fs::create_dir(&path).expect("the directory for temporary files is writable");
        Self(path)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        // If the removal fails, the directory stays with the other temporary files.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
