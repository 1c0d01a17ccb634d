// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Fuzzing of a queue, with a driver whose rings, descriptors and buffers contain the fuzzer's bytes. Tests use the same code to replay
//! findings.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16};
use std::time::{Duration, Instant};

use super::carrier::{Carrier, Offloads};
use super::control::Control;
use super::counters::Counts;
use super::link::Link;
use super::pair::Pair;
use super::spec::MRG_RXBUF;
use crate::rate_limit::{BucketParams, RateLimiter, RateLimits};
use crate::virtio::byte_driver::{ByteDriver, Layout};
use crate::worker::{Orders, Task};

/// Socket in place of a host interface.
struct Socket(File);

impl Carrier for Socket {
    fn file(&self, _: u16) -> &File {
        &self.0
    }
    fn set_offloads(&self, _: Offloads) -> io::Result<()> {
        Ok(())
    }
    fn set_pairs(&self, _: u16) -> io::Result<()> {
        Ok(())
    }
}

/// Writes `bytes` to the guest's rings, descriptors and buffers piece by piece. After each piece, the device serves the queue. Each piece
/// is also sent to the device as a packet. The first byte selects the queue and the options.
pub fn run(bytes: &[u8]) {
    let Some((first, bytes)) = bytes.split_first() else { return };
    let guest = ByteDriver::new(Layout::ONE_QUEUE);
    let queue = guest.queue(0, first & 1 != 0);
    let (ours, host) = UnixDatagram::pair().expect("two file descriptors are free");
    for socket in [&ours, &host] {
        socket.set_nonblocking(true).expect("the socket is open");
    }
    let carrier = Box::new(Socket(File::from(OwnedFd::from(ours))));
    // The budget is small and is refilled soon, so packets wait only for a short time.
    let bucket = BucketParams { size: 512, one_time_burst: 0, refill_time: Duration::from_millis(1) };
    let limits = RateLimits { bandwidth: Some(bucket), ops: None };
    let limiter = || (first & 16 != 0).then(|| RateLimiter::new(limits, Instant::now()));
    let (receive_limiter, transmit_limiter) = (limiter(), limiter());
    let link = Link {
        id: "net".into(),
        carrier,
        counts: Counts::default(),
        receive_limiter,
        transmit_limiter,
        gone: AtomicBool::default(),
    };
    let link = Arc::new(link);
    let driver = guest.driver(if first & 2 != 0 { MRG_RXBUF } else { 0 });
    let mut task: Box<dyn FnMut(&Orders)> = match first >> 2 & 3 {
        0 => {
            let mut control = Control::new(2, queue, driver, link, 2, Arc::new(AtomicU16::new(1)));
            Box::new(move |orders| _ = control.run(orders))
        }
        kind => {
            let mut pair = Pair::new(driver, link);
            pair.put(u16::from(kind == 1), queue);
            Box::new(move |orders| _ = pair.run(orders))
        }
    };
    let mut sent = [0; 2048];
    guest.feed(bytes, |piece, orders| {
        // Ignore packets that cannot be sent.
        let _ = host.send(&piece[..piece.len().min(0x400)]);
        task(orders);
        while host.recv(&mut sent).is_ok() {}
    });
}
