// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Time limit for the answers of a server.
//!
//! The calls of the `vhost` crate wait as long as the socket is open. After a timeout of the socket, the crate retries the call. So a
//! separate thread shuts the socket down when the time limit is over, and the call fails.

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
    /// Deadline of the current call.
    until: Option<Instant>,
    /// True if a call took too long.
    over: bool,
    ended: bool,
}

struct Shared {
    socket: UnixStream,
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    /// Enforces deadlines until the [`TimeLimit`] is dropped.
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
        // The shutdown fails if the server has closed the connection already.
        let _ = self.socket.shutdown(Shutdown::Both);
    }
}

/// Thread that limits the duration of calls on one socket. Dropping the value ends the thread and leaves the socket open.
pub(super) struct TimeLimit {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl TimeLimit {
    /// Starts the thread, called `name`, for calls on `socket`.
    pub(super) fn new(name: String, socket: UnixStream) -> io::Result<Self> {
        let shared = Arc::new(Shared { socket, state: Mutex::default(), changed: Condvar::new() });
        let of_thread = shared.clone();
        let thread = sandbox::start(ROLE, name, move || of_thread.watch())?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Runs `call`. If `call` takes longer than `time`, the socket is shut down, so that `call` fails. Only one call may run at a time.
    pub(super) fn during<R>(&self, time: Duration, call: impl FnOnce() -> R) -> R {
        lock(&self.shared.state).until = Some(Instant::now() + time);
        self.shared.changed.notify_all();
        let result = call();
        lock(&self.shared.state).until = None;
        result
    }

    /// True if a call took too long.
    pub(super) fn is_over(&self) -> bool {
        lock(&self.shared.state).over
    }

    /// Closes the connection.
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
            log::error!("the thread that limits the response time of a vhost-user server panicked");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn slow_call_fails_and_fast_call_succeeds() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let limit = TimeLimit::new("test".into(), ours.try_clone().unwrap()).unwrap();
        limit.during(Duration::from_secs(60), || {});
        assert!(!limit.is_over());
        let read = limit.during(Duration::from_millis(20), || (&ours).read(&mut [0; 1]));
        assert_eq!((read.unwrap(), limit.is_over()), (0, true));
        drop((limit, theirs));
    }
}
