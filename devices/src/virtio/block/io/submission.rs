// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Handing operations to io_uring, whose kernel may take none for a while.

use std::io;

/// The kernel's side of a ring.
pub(super) trait Kernel {
    /// Hands over what is in the submission queue, and waits for `wanted` ends. Returns how many operations the kernel took.
    ///
    /// # Errors
    /// The kernel took none.
    fn enter(&mut self, wanted: usize) -> io::Result<usize>;
    /// True if the end of an operation can be read.
    fn has_ended(&mut self) -> bool;
    /// Reads the ends of operations, which makes room in the completion queue; `false` if there were none.
    fn reap(&mut self) -> bool;
    /// Sleeps for a moment.
    fn rest(&mut self);
}

/// The kernel is short of memory, or has no room for the ends of more operations.
fn is_for_later(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EBUSY))
}

/// Hands over what is in the submission queue, and waits for `wanted` ends. Operations that the kernel does not take now stay in the queue.
/// A caller that waits asks again, so it sleeps for a moment then.
///
/// # Errors
/// The kernel takes nothing any more.
pub(super) fn submit(kernel: &mut impl Kernel, wanted: usize) -> io::Result<()> {
    loop {
        let wait = if kernel.has_ended() { 0 } else { wanted };
        match kernel.enter(wait) {
            Ok(_) => return Ok(()),
            Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
            Err(error) if is_for_later(&error) => {
                if wait != 0 && !kernel.has_ended() {
                    kernel.rest();
                }
                return Ok(());
            }
            Err(error) => return Err(error),
        }
    }
}

/// Empties a submission queue that is full, by one operation at least. While the kernel takes nothing, this reads the ends of operations,
/// as the kernel may need room for others, or sleeps.
pub(super) fn make_room(kernel: &mut impl Kernel) {
    loop {
        match kernel.enter(0) {
            Ok(taken) if taken != 0 => return,
            Err(error) if error.raw_os_error() == Some(libc::EINTR) => continue,
            Err(error) if !is_for_later(&error) => log::error!("io_uring takes no operations: {error}"),
            _ => {}
        }
        if !kernel.reap() {
            kernel.rest();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Answers [`Kernel::enter`] with these errors in turn, then takes one operation.
    #[derive(Default)]
    struct Fake {
        errors: Vec<i32>,
        /// Ends in the completion queue. While there are any, the kernel has no room.
        ended: usize,
        calls: usize,
        reaped: usize,
        rests: usize,
        waits: Vec<usize>,
    }

    impl Kernel for Fake {
        fn enter(&mut self, wanted: usize) -> io::Result<usize> {
            self.calls += 1;
            assert!(self.calls < 100, "it spins");
            self.waits.push(wanted);
            match self.errors.pop() {
                Some(error) => Err(io::Error::from_raw_os_error(error)),
                None if self.ended != 0 => Err(io::Error::from_raw_os_error(libc::EBUSY)),
                None => Ok(1),
            }
        }
        fn has_ended(&mut self) -> bool {
            self.ended != 0
        }
        fn reap(&mut self) -> bool {
            let any = self.ended != 0;
            self.reaped += std::mem::take(&mut self.ended);
            any
        }
        fn rest(&mut self) {
            self.rests += 1;
        }
    }

    #[test]
    fn full_completion_queue_is_emptied_to_make_room() {
        let mut kernel = Fake { ended: 3, ..Fake::default() };
        make_room(&mut kernel);
        assert_eq!((kernel.calls, kernel.reaped, kernel.rests), (2, 3, 0));
    }

    #[test]
    fn kernel_short_of_memory_is_asked_again_after_a_rest() {
        let mut kernel = Fake { errors: vec![libc::EAGAIN; 5], ..Fake::default() };
        make_room(&mut kernel);
        assert_eq!((kernel.calls, kernel.rests), (6, 5));
        // Whatever the kernel says.
        let mut kernel = Fake { errors: vec![libc::EINTR, libc::EBADF, libc::EINTR], ..Fake::default() };
        make_room(&mut kernel);
        assert_eq!((kernel.calls, kernel.rests), (4, 1));
    }

    #[test]
    fn caller_that_waits_rests_where_the_kernel_takes_nothing() {
        let mut kernel = Fake { errors: vec![libc::EAGAIN, libc::EINTR], ..Fake::default() };
        submit(&mut kernel, 1).unwrap();
        assert_eq!((kernel.waits, kernel.rests), (vec![1, 1], 1));
        // One that does not wait has something else to do.
        let mut kernel = Fake { errors: vec![libc::EBUSY], ..Fake::default() };
        submit(&mut kernel, 0).unwrap();
        assert_eq!((kernel.calls, kernel.rests), (1, 0));
        // One that finds an end does not wait for another.
        let mut kernel = Fake { ended: 1, ..Fake::default() };
        submit(&mut kernel, 1).unwrap();
        assert_eq!((kernel.waits, kernel.rests), (vec![0], 0));
        let mut kernel = Fake { errors: vec![libc::EBADF], ..Fake::default() };
        assert_eq!(submit(&mut kernel, 1).unwrap_err().raw_os_error(), Some(libc::EBADF));
    }
}
