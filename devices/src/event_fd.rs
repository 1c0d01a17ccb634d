// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Events as descriptors, also of those that another process has too.
//!
//! Whether a file blocks is a flag of the open file, which all who have it share. So who got an event can have reads and writes of
//! it block, at any time. What is here never does.

use std::io::IoSliceMut;
use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, ReadWriteFlags, preadv2};
use vmm_sys_util::eventfd::EventFd;

/// Instead of a place in the file: where it is.
const HERE: u64 = u64::MAX;

/// The event's descriptor.
pub fn borrow(event: &EventFd) -> BorrowedFd<'_> {
    // SAFETY: The event owns its descriptor, which stays open as long as the event is borrowed.
    unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) }
}

/// Whether somebody wrote the event since it was last read. It stays as it is.
pub fn has_fired(event: &EventFd) -> bool {
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    loop {
        match poll(&mut [PollFd::from_borrowed_fd(borrow(event), PollFlags::IN)], Some(&at_once)) {
            Err(Errno::INTR) => {}
            outcome => return outcome.is_ok_and(|ready| ready == 1),
        }
    }
}

/// Forgets what was written to the event.
pub fn forget(event: &EventFd) {
    let mut count = [0; 8];
    // It is not read where the kernel cannot promise not to wait; nothing to read is what is wanted.
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
        let (tell, told) = mpsc::channel();
        thread::spawn(move || {
            let mut seen = vec![has_fired(&event)];
            forget(&event);
            event.write(u64::MAX - 1).unwrap();
            // Nothing can be added to it.
            seen.push(has_fired(&event));
            seen.push(has_fired(&event));
            forget(&event);
            seen.push(has_fired(&event));
            tell.send(seen).unwrap();
        });
        assert_eq!(told.recv_timeout(Duration::from_secs(10)).unwrap(), [false, true, true, false]);
    }
}
