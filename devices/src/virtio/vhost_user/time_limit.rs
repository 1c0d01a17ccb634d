// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A bound on how long a server may take.
//!
//! The calls of the `vhost` crate wait for as long as the socket is open: a timeout of the socket only has them try again. So a thread
//! shuts the socket down when the time is over, and the call fails.

use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::ROLE;
use crate::sandbox;
use crate::sync::lock;

#[derive(Default)]
struct State {
    /// When the call at hand must have ended.
    until: Option<Instant>,
    /// One took too long.
    over: bool,
    ended: bool,
}

struct Shared {
    socket: UnixStream,
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    /// Until the limit is dropped.
    fn watch(&self) {
        let mut state = lock(&self.state);
        while !state.ended {
            let Some(until) = state.until else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                (state.over, state.until) = (true, None);
                self.close();
            } else {
                state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
            }
        }
    }

    fn close(&self) {
        // It fails where the server has done so.
        let _ = self.socket.shutdown(Shutdown::Both);
    }
}

/// The thread that watches the time of calls on one socket. Dropping it ends the thread and leaves the socket as it is.
pub(super) struct TimeLimit {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl TimeLimit {
    /// For calls on `socket`. The thread is called `name`.
    pub(super) fn new(name: String, socket: UnixStream) -> io::Result<Self> {
        let shared = Arc::new(Shared { socket, state: Mutex::default(), changed: Condvar::new() });
        let of_thread = shared.clone();
        let thread = sandbox::start(ROLE, name, move || of_thread.watch())?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Does `call`, which fails if it takes longer than `time`. There is one call at a time.
    pub(super) fn during<R>(&self, time: Duration, call: impl FnOnce() -> R) -> R {
        lock(&self.shared.state).until = Some(Instant::now() + time);
        self.shared.changed.notify_all();
        let result = call();
        lock(&self.shared.state).until = None;
        result
    }

    /// Whether a call took too long.
    pub(super) fn is_over(&self) -> bool {
        lock(&self.shared.state).over
    }

    /// Ends the connection.
    pub(super) fn close(&self) {
        self.shared.close();
    }
}

impl Drop for TimeLimit {
    fn drop(&mut self) {
        lock(&self.shared.state).ended = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("a thread that watches the time of a vhost-user server panicked");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn call_that_takes_too_long_fails_and_one_in_time_does_not() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let limit = TimeLimit::new("test".into(), ours.try_clone().unwrap()).unwrap();
        limit.during(Duration::from_secs(60), || {});
        assert!(!limit.is_over());
        let read = limit.during(Duration::from_millis(20), || (&ours).read(&mut [0; 1]));
        assert_eq!((read.unwrap(), limit.is_over()), (0, true));
        drop((limit, theirs));
    }
}
