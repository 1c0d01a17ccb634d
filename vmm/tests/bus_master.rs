// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests bus mastering of an emulated device, in a real `carom` process with a special guest (`bus_master/guest.c`).
//!
//! Without access to `/dev/kvm` or without a compiler, this test does nothing.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod c_guest;
mod http;
#[expect(dead_code, reason = "shared by tests that end the program by a signal")]
mod program;
mod tiny_guest;

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::Duration;

use rustix::fs::{CWD, FileType, Mode, mknodat};

use program::{call, put, wait_until};

/// Time after which a device that ignores the bus-master bit would have served the request.
const SOON: Duration = Duration::from_millis(50);

/// Maximum time of a read. A test that hangs fails after this time.
const LONG: Duration = Duration::from_secs(120);

/// Serial port of the guest.
struct Guest(UnixStream);

impl Guest {
    fn connect(path: &Path) -> Self {
        let mut stream = None;
        wait_until("the serial port listens", || {
            stream = UnixStream::connect(path).ok();
            stream.is_some()
        });
        let stream = stream.unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        Self(stream)
    }

    fn said(&mut self) -> char {
        let mut byte = [0];
        self.0.read_exact(&mut byte).unwrap();
        byte[0].into()
    }

    fn go_on(&mut self) {
        self.0.write_all(b"\n").unwrap();
    }
}

/// Returns the number of requests that the device has served.
fn served(dir: &Path) -> u64 {
    call(dir, "GET", "vm.counters", None).1["_rng"]["requests"].as_u64().unwrap()
}

#[test]
fn device_writes_no_memory_while_its_bus_mastering_is_off() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    let Some(kernel) = c_guest::build("bus_master", &[], dir.path()) else { return };
    let source = dir.path().join("source");
    mknodat(CWD, &source, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    // The test opens both ends of the FIFO. So a read of the source waits for bytes, and does not return the end of the file.
    let mut source = File::options().read(true).write(true).open(source).unwrap();
    let kernel = kernel.display().to_string();
    let (rng, serial) = (format!("src={}", path("source")), format!("socket={}", path("serial")));
    let options = ["--kernel", &kernel, "--memory", "size=64M", "--rng", &rng, "--serial", &serial, "--console", "off"];
    let Some(_carom) = program::start(dir.path(), &options) else { return };
    let mut guest = Guest::connect(&dir.path().join("serial"));
    assert_eq!(guest.said(), 'Q', "the buffer is in the queue");
    guest.go_on();
    assert_eq!(guest.said(), '-', "the source has no bytes yet");
    source.write_all(&[0xa5; 16]).unwrap();
    // Pause and resume do not make the device serve the request, because its bus mastering is off.
    put(dir.path(), "vm.pause", None);
    put(dir.path(), "vm.resume", None);
    thread::sleep(SOON);
    assert_eq!(served(dir.path()), 0, "bus mastering is off");
    guest.go_on();
    assert_eq!(guest.said(), '-', "bus mastering is off");
    assert_eq!(guest.said(), '+', "bus mastering is on again");
    wait_until("the request is counted", || served(dir.path()) == 1);
}
