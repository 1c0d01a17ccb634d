// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Signals to the VMM: SIGTERM, SIGINT and SIGHUP end it in order, SIGUSR1 has the counters reported, SIGWINCH tells that its terminal
//! has another size, or that guest memory is lost ([`devices::host_memory`]). SIGTERM or SIGINT again, a second or more later, ends it at once, whatever the control thread waits for.

use std::io;
use std::time::{Duration, Instant};

use devices::{host_memory, sandbox};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGWINCH};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;

use super::channel::{ControlHandle, Message};
use super::lost_memory;
use crate::console::terminal;
use crate::event_monitor::EventMonitor;
use crate::thread_roles::SIGNALS;

/// Signals within this time are one wish: some senders send one to the process and to its group, or SIGHUP after SIGTERM.
const ONE_WISH: Duration = Duration::from_secs(1);

/// What signals ask for, told from when they come.
#[derive(Default)]
struct Wishes {
    /// When the program was first told to end.
    since: Option<Instant>,
}

impl Wishes {
    /// Whether `signal`, which comes now, ends the program at once.
    fn end_at_once(&mut self, signal: i32, now: Instant) -> bool {
        let since = *self.since.get_or_insert(now);
        signal != SIGHUP && now.duration_since(since) >= ONE_WISH
    }
}

/// Starts the thread that turns signals into messages.
pub(super) fn watch(control: ControlHandle, monitor: EventMonitor) -> io::Result<()> {
    let mut signals = Signals::new([SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGWINCH])?;
    let forward = move || {
        sandbox::give_up_files();
        let mut wishes = Wishes::default();
        for signal in signals.forever() {
            host_memory::take_notes().for_each(|note| lost_memory::stop(&control, &monitor, note));
            if signal == SIGWINCH {
                terminal::tell_size();
                continue;
            }
            if signal != SIGUSR1 && wishes.end_at_once(signal, Instant::now()) {
                // As by a signal that nobody waits for. It returns for none of these.
                let _ = emulate_default_handler(signal);
            }
            let message = if signal == SIGUSR1 { Message::ReportCounters } else { Message::Terminate(signal) };
            // Where nobody takes messages any more, the program is about to end, or does not: signals still may end it.
            let _ = control.send(message);
        }
    };
    sandbox::start(SIGNALS, "signals".into(), forward)?;
    // A signal that nobody else waits for, and that does no harm if it comes for nothing.
    host_memory::watch(SIGWINCH)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn second_wish_ends_at_once_and_signals_that_come_together_are_one() {
        let (mut wishes, start) = (Wishes::default(), Instant::now());
        let after = |millis| start + Duration::from_millis(millis);
        assert!(!wishes.end_at_once(SIGTERM, after(0)));
        assert!(!wishes.end_at_once(SIGTERM, after(1)));
        assert!(!wishes.end_at_once(SIGHUP, after(5000)));
        assert!(wishes.end_at_once(SIGTERM, after(1000)));
        assert!(wishes.end_at_once(SIGINT, after(1001)));
    }
}
