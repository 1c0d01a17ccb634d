// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Signals to the VMM. SIGUSR1 makes the VMM report its counters. The signals of [`ENDING`] end the VMM cleanly. SIGWINCH reports a new
//! size of the terminal, or lost guest memory ([`devices::host_memory`]). A SIGTERM or SIGINT that arrives 1 s or more after the first
//! ending signal ends the VMM immediately. This works even if the control thread is blocked.

use std::io;
use std::time::{Duration, Instant};

use devices::{host_memory, sandbox};
use signal_hook::consts::{SIGALRM, SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGWINCH, SIGXCPU};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;

use super::channel::{ControlHandle, Message};
use super::lost_memory;
use crate::console::terminal;
use crate::process::event_monitor::EventMonitor;
use crate::process::signal_actions;
use crate::process::thread_roles::SIGNALS;

/// Signals that end the VMM cleanly.
const ENDING: [i32; 6] = [SIGHUP, SIGINT, SIGTERM, SIGALRM, SIGXCPU, libc::SIGPWR];

/// Signals within this time count as one request: some senders signal both the process and its group, or send SIGHUP after SIGTERM.
const ONE_REQUEST: Duration = Duration::from_secs(1);

/// State that decides whether a signal ends the program immediately.
#[derive(Default)]
struct EndRequest {
    /// Time of the first signal that asked the VMM to end.
    since: Option<Instant>,
}

impl EndRequest {
    /// True if `signal`, received at `now`, ends the program immediately.
    fn end_at_once(&mut self, signal: i32, now: Instant) -> bool {
        let since = *self.since.get_or_insert(now);
        // SIGXCPU does not count, because the kernel repeats it every second until the hard limit.
        matches!(signal, SIGTERM | SIGINT) && now.duration_since(since) >= ONE_REQUEST
    }
}

/// Logs that `signal` ends the VMM. Adds the cause of the signal if the user probably does not know the cause.
pub(super) fn log_end(signal: i32) {
    let cause = match signal {
        SIGXCPU => "SIGXCPU: the process reached a limit on CPU time (RLIMIT_CPU or RLIMIT_RTTIME)",
        SIGALRM => "SIGALRM: a timer that was set before the start of carom has expired",
        libc::SIGPWR => "SIGPWR: power is failing",
        _ => return log::info!("signal {signal} ends the VMM"),
    };
    log::warn!("signal {signal} ends the VMM ({cause})");
}

/// Starts the thread that turns signals into messages.
pub(super) fn watch(control: ControlHandle, monitor: EventMonitor) -> io::Result<()> {
    // Under `nohup`, SIGHUP stays ignored, because the program must outlive its terminal.
    let ending = ENDING.into_iter().filter(|signal| *signal != SIGHUP || !signal_actions::is_ignored(SIGHUP));
    let mut signals = Signals::new(ending.chain([SIGUSR1, SIGWINCH]))?;
    let forward = move || {
        sandbox::give_up_files();
        let mut end_request = EndRequest::default();
        for signal in signals.forever() {
            host_memory::take_notes().for_each(|note| lost_memory::stop(&control, &monitor, note));
            if signal == SIGWINCH {
                terminal::announce_size();
                continue;
            }
            if signal != SIGUSR1 && end_request.end_at_once(signal, Instant::now()) {
                terminal::restore();
                // Ends the program as if the signal had no handler. For SIGTERM and SIGINT, the call does not return.
                let _ = emulate_default_handler(signal);
            }
            let message = if signal == SIGUSR1 { Message::ReportCounters } else { Message::Terminate(signal) };
            // `send` fails only if the control thread has ended. In this case the program ends soon. If the program does not end, a later
            // SIGTERM or SIGINT ends it.
            let _ = control.send(message);
        }
    };
    sandbox::start(SIGNALS, "signals".into(), forward)?;
    // SIGWINCH also reports lost memory, because no other thread waits for SIGWINCH, and an unneeded SIGWINCH does no harm.
    host_memory::watch(SIGWINCH)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_termination_signal_ends_the_process_at_once() {
        let (mut end_request, start) = (EndRequest::default(), Instant::now());
        let after = |millis| start + Duration::from_millis(millis);
        assert!(!end_request.end_at_once(SIGTERM, after(0)));
        assert!(!end_request.end_at_once(SIGTERM, after(1)));
        assert!(!end_request.end_at_once(SIGHUP, after(5000)));
        assert!(end_request.end_at_once(SIGTERM, after(1000)));
        assert!(end_request.end_at_once(SIGINT, after(1001)));
        assert!(!end_request.end_at_once(SIGXCPU, after(2000)));
    }
}
