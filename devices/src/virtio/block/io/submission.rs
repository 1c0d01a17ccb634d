// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Submission of operations to io_uring. The kernel may temporarily accept no operations.

use std::io;

/// Interface to the kernel side of a ring. Tests implement this trait without a kernel.
pub(super) trait Kernel {
    /// Submits the entries of the submission queue, and waits for `wanted` completions. Returns the number of operations that the kernel
    /// accepted.
    ///
    /// # Errors
    /// The kernel accepted no operations.
    fn enter(&mut self, wanted: usize) -> io::Result<usize>;
    /// Returns true if a completion can be read.
    fn has_ended(&mut self) -> bool;
    /// Reads the completions, which makes room in the completion queue. Returns false if there were no completions.
    fn reap(&mut self) -> bool;
    /// Sleeps for a moment.
    fn rest(&mut self);
}

/// Returns true if `error` is temporary: the kernel is short of memory, or has no room for more completions.
fn is_for_later(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EBUSY))
}

/// Submits the entries of the submission queue, and waits for `wanted` completions. Operations that the kernel does not accept now stay in
/// the submission queue. If the kernel accepts no operations and the caller waits for completions, this function sleeps for a moment.
/// Without the sleep, such a caller would call this function again and again.
///
/// # Errors
/// The kernel rejects operations, and the reason is not temporary.
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

/// Makes room for at least one operation in a full submission queue. While the kernel accepts no operations, this function reads
/// completions, because the kernel may need room for more completions. If there are no completions to read, the function sleeps.
pub(super) fn make_room(kernel: &mut impl Kernel) {
    loop {
        match kernel.enter(0) {
            Ok(taken) if taken != 0 => return,
            Err(error) if error.raw_os_error() == Some(libc::EINTR) => continue,
            Err(error) if !is_for_later(&error) => {
                log::error!("the host kernel accepts no I/O of a disk queue (io_uring): {error}; Carom retries");
            }
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

    /// Kernel whose [`Kernel::enter`] fails with each of `errors`, from the last to the first. Later calls accept one operation each.
    #[derive(Default)]
    struct Fake {
        errors: Vec<i32>,
        /// Number of completions in the completion queue. While this number is not 0, the kernel accepts no operations.
        ended: usize,
        calls: usize,
        reaped: usize,
        rests: usize,
        waits: Vec<usize>,
    }

    impl Kernel for Fake {
        fn enter(&mut self, wanted: usize) -> io::Result<usize> {
            self.calls += 1;
            assert!(self.calls < 100, "the caller calls the kernel without end");
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
    fn kernel_without_memory_is_retried_after_a_sleep() {
        let mut kernel = Fake { errors: vec![libc::EAGAIN; 5], ..Fake::default() };
        make_room(&mut kernel);
        assert_eq!((kernel.calls, kernel.rests), (6, 5));
        // After other errors, `make_room` also sleeps before the retry. Only a call that a signal interrupted (`EINTR`) is retried without
        // a sleep.
        let mut kernel = Fake { errors: vec![libc::EINTR, libc::EBADF, libc::EINTR], ..Fake::default() };
        make_room(&mut kernel);
        assert_eq!((kernel.calls, kernel.rests), (4, 1));
    }

    #[test]
    fn waiting_caller_sleeps_if_kernel_accepts_nothing() {
        let mut kernel = Fake { errors: vec![libc::EAGAIN, libc::EINTR], ..Fake::default() };
        submit(&mut kernel, 1).unwrap();
        assert_eq!((kernel.waits, kernel.rests), (vec![1, 1], 1));
        // If the caller does not wait for completions, the function does not sleep, because the caller may have other work to do.
        let mut kernel = Fake { errors: vec![libc::EBUSY], ..Fake::default() };
        submit(&mut kernel, 0).unwrap();
        assert_eq!((kernel.calls, kernel.rests), (1, 0));
        // If a completion is already available, the function does not wait for another completion.
        let mut kernel = Fake { ended: 1, ..Fake::default() };
        submit(&mut kernel, 1).unwrap();
        assert_eq!((kernel.waits, kernel.rests), (vec![0], 0));
        let mut kernel = Fake { errors: vec![libc::EBADF], ..Fake::default() };
        assert_eq!(submit(&mut kernel, 1).unwrap_err().raw_os_error(), Some(libc::EBADF));
    }
}
