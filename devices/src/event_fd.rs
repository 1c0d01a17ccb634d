// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Operations on eventfds that never block, even if another process shares the eventfd.
//!
//! The flag `O_NONBLOCK` belongs to the open file, which all processes with a descriptor of the file share. So a process that has received
//! an eventfd can clear the flag at any time. After that, Carom would block in ordinary reads and writes of the eventfd.

use std::io::IoSliceMut;
use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, ReadWriteFlags, preadv2};
use vmm_sys_util::eventfd::EventFd;

/// Offset that makes `preadv2` read from the current position.
const HERE: u64 = u64::MAX;

/// Returns the eventfd's descriptor.
pub fn borrow(event: &EventFd) -> BorrowedFd<'_> {
    // SAFETY: The event owns its descriptor, which stays open as long as the event is borrowed.
    unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) }
}

/// True if the eventfd was written since the last read. Does not change the counter.
pub fn has_fired(event: &EventFd) -> bool {
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    loop {
        match poll(&mut [PollFd::from_borrowed_fd(borrow(event), PollFlags::IN)], Some(&at_once)) {
            Err(Errno::INTR) => {}
            outcome => return outcome.is_ok_and(|ready| ready == 1),
        }
    }
}

/// Resets the counter of the eventfd to 0.
pub fn forget(event: &EventFd) {
    let mut count = [0; 8];
    // With `NOWAIT`, the read fails instead of blocking if the counter is 0. Ignore this failure, because the counter is then reset
    // already.
    while let Err(Errno::INTR) =
        preadv2(borrow(event), &mut [IoSliceMut::new(&mut count)], HERE, ReadWriteFlags::NOWAIT)
    {}
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    use rustix::fs::{OFlags, fcntl_setfl};
    use vmm_sys_util::eventfd::EFD_NONBLOCK;

    use super::*;

    #[test]
    fn blocking_event_fd_is_polled_and_drained_without_blocking() {
        let event = EventFd::new(EFD_NONBLOCK).unwrap();
        fcntl_setfl(borrow(&event), OFlags::empty()).unwrap();
        let (sender, receiver) = mpsc::channel();
        thread::spawn(move || {
            let mut seen = vec![has_fired(&event)];
            forget(&event);
            event.write(u64::MAX - 1).unwrap();
            // The counter is at its maximum, so a write would block.
            seen.push(has_fired(&event));
            seen.push(has_fired(&event));
            forget(&event);
            seen.push(has_fired(&event));
            sender.send(seen).unwrap();
        });
        assert_eq!(receiver.recv_timeout(Duration::from_secs(10)).unwrap(), [false, true, true, false]);
    }
}
