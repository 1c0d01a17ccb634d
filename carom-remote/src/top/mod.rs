// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The live view: rates of requests, mapped memory, and windows by device.

mod look;
mod view;

use std::time::{Duration, Instant};

use carom_api::types::{VmCounters, VmInfo};
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::crossterm::terminal::{disable_raw_mode, enable_raw_mode};

use crate::RemoteError;
use crate::client::{CallError, Client};
use look::{History, Look};

/// How long the first look of `--once` takes, so that there are rates.
const FIRST: Duration = Duration::from_millis(500);

/// Watches until `q`, Escape or Ctrl-C; with `once`, prints one look.
pub(crate) fn run(client: &Client, interval: Duration, once: bool) -> Result<(), RemoteError> {
    let mut history = History::default();
    history.add(look(client)?);
    if once {
        std::thread::sleep(interval.min(FIRST));
        history.add(look(client)?);
        return crate::show(view::text(&history).as_bytes());
    }
    // A terminal that cannot be set up is a mistake to tell of, not a reason to panic.
    enable_raw_mode().and_then(|()| disable_raw_mode()).map_err(RemoteError::io("top needs a terminal, or --once"))?;
    let mut terminal = ratatui::try_init().map_err(RemoteError::io("setting the terminal up"))?;
    let result = watch(client, interval, &mut history, &mut terminal);
    ratatui::restore();
    result
}

fn watch(
    client: &Client,
    interval: Duration,
    history: &mut History,
    terminal: &mut ratatui::DefaultTerminal,
) -> Result<(), RemoteError> {
    loop {
        terminal.draw(|frame| view::draw(frame, history)).map_err(RemoteError::io("drawing"))?;
        let next = Instant::now() + interval;
        while let Some(left) = next.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
            if event::poll(left).map_err(RemoteError::io("reading keys"))?
                && is_end(&event::read().map_err(RemoteError::io("reading keys"))?)
            {
                return Ok(());
            }
        }
        history.add(look(client)?);
    }
}

fn is_end(event: &Event) -> bool {
    let Event::Key(key) = event else { return false };
    key.kind == KeyEventKind::Press
        && (matches!(key.code, KeyCode::Char('q') | KeyCode::Esc)
            || (key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL)))
}

/// Looks at the VM, which need not be there.
fn look(client: &Client) -> Result<Look, CallError> {
    let info: Option<VmInfo> = unless_refused(client.get_as("vm.info"), 404)?;
    // The VM may have ended since.
    let counters: Option<VmCounters> = match unless_refused(client.get_as("vm.counters"), 404) {
        Err(CallError::Refused { status: 500, .. }) => None,
        other => other?,
    };
    Ok(Look::new(Instant::now(), info, counters.unwrap_or_default()))
}

fn unless_refused<T>(result: Result<T, CallError>, with: u16) -> Result<Option<T>, CallError> {
    match result {
        Err(CallError::Refused { status, .. }) if status == with => Ok(None),
        other => other.map(Some),
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use ratatui::crossterm::event::KeyEvent;

    use super::*;

    #[test]
    fn view_ends_by_q_escape_and_interrupt_only() {
        let key = |code, modifiers| is_end(&Event::Key(KeyEvent::new(code, modifiers)));
        assert!(key(KeyCode::Char('q'), KeyModifiers::NONE));
        assert!(key(KeyCode::Esc, KeyModifiers::NONE));
        assert!(key(KeyCode::Char('c'), KeyModifiers::CONTROL));
        assert!(!key(KeyCode::Char('c'), KeyModifiers::NONE));
        assert!(!is_end(&Event::FocusGained));
    }

    #[test]
    fn only_the_expected_refusal_is_no_error() {
        let refused = |status| Err::<(), _>(CallError::Refused { message: String::new(), status });
        assert!(unless_refused(refused(404), 404).unwrap().is_none());
        assert!(unless_refused(refused(500), 404).is_err());
        let io = io::Error::other("x");
        assert!(unless_refused(Err::<(), _>(CallError::Connect { path: "/s".into(), source: io }), 404).is_err());
    }
}
