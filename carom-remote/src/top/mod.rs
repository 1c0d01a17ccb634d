// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Live view of a VM: rates of requests to the virtio-iommu, mapped memory, and bounce windows of each device.

mod look;
mod view;

use std::time::{Duration, Instant};

use carom_api::types::{VmCounters, VmInfo, VmState};
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::crossterm::terminal::{disable_raw_mode, enable_raw_mode};

use crate::RemoteError;
use crate::client::{CallError, Client};
use look::{History, Look};

/// Maximum time between the two samples of `--once`. The rates are computed from these samples.
const FIRST: Duration = Duration::from_millis(500);

/// Shows the view until the user presses `q`, Escape or Ctrl-C. If `once` is set, prints the view once as text instead.
pub(crate) fn run(client: &Client, interval: Duration, once: bool) -> Result<(), RemoteError> {
    let mut history = History::default();
    history.add(look(client)?);
    if once {
        std::thread::sleep(interval.min(FIRST));
        history.add(look(client)?);
        return crate::show(view::text(&history).as_bytes());
    }
    // Try raw mode first, so that the program reports an error and does not panic if the terminal cannot be set up.
    enable_raw_mode()
        .and_then(|()| disable_raw_mode())
        .map_err(RemoteError::io("top needs a terminal (without a terminal, use --once)"))?;
    let mut terminal = ratatui::try_init().map_err(RemoteError::io("cannot set up the terminal"))?;
    let result = watch(client, interval, &mut history, &mut terminal);
    // Ignore errors: if the terminal was closed, nothing needs to be restored, and no error message could be shown.
    let _ = ratatui::try_restore();
    result
}

fn watch(
    client: &Client,
    interval: Duration,
    history: &mut History,
    terminal: &mut ratatui::DefaultTerminal,
) -> Result<(), RemoteError> {
    loop {
        terminal.draw(|frame| view::draw(frame, history)).map_err(RemoteError::io("cannot draw the view"))?;
        let next = Instant::now() + interval;
        while let Some(left) = next.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
            if event::poll(left).map_err(RemoteError::io("cannot read keys"))?
                && is_end(&event::read().map_err(RemoteError::io("cannot read keys"))?)
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

/// Takes a sample, even if no VM exists.
fn look(client: &Client) -> Result<Look, CallError> {
    let found = info(client)?;
    if !is_booted(found.as_ref()) {
        return Ok(Look::new(Instant::now(), found, VmCounters::default()));
    }
    match unless_refused(client.get_as("vm.counters"), 404) {
        // The VM may have shut down since the first request. Report the error only if the VM is still booted.
        Err(error @ CallError::Refused { status: 500, .. }) => {
            let found = info(client)?;
            if is_booted(found.as_ref()) {
                return Err(error);
            }
            Ok(Look::new(Instant::now(), found, VmCounters::default()))
        }
        counters => Ok(Look::new(Instant::now(), found, counters?.unwrap_or_default())),
    }
}

fn info(client: &Client) -> Result<Option<VmInfo>, CallError> {
    unless_refused(client.get_as("vm.info"), 404)
}

/// True if the VM is booted. Only a booted VM has counters.
fn is_booted(info: Option<&VmInfo>) -> bool {
    info.is_some_and(|info| matches!(info.state, VmState::Running | VmState::Paused))
}

fn unless_refused<T>(result: Result<T, CallError>, with: u16) -> Result<Option<T>, CallError> {
    match result {
        Err(CallError::Refused { status, .. }) if status == with => Ok(None),
        other => other.map(Some),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::io::{self, BufRead, BufReader, Write};
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::thread;

    use carom_api::VmConfig;
    use ratatui::crossterm::event::KeyEvent;

    use super::*;

    #[test]
    fn view_ends_only_on_q_escape_or_ctrl_c() {
        let key = |code, modifiers| is_end(&Event::Key(KeyEvent::new(code, modifiers)));
        assert!(key(KeyCode::Char('q'), KeyModifiers::NONE));
        assert!(key(KeyCode::Esc, KeyModifiers::NONE));
        assert!(key(KeyCode::Char('c'), KeyModifiers::CONTROL));
        assert!(!key(KeyCode::Char('c'), KeyModifiers::NONE));
        assert!(!is_end(&Event::FocusGained));
    }

    #[test]
    fn only_the_expected_refusal_is_not_an_error() {
        let refused = |status| Err::<(), _>(CallError::Refused { message: String::new(), status });
        assert!(unless_refused(refused(404), 404).unwrap().is_none());
        assert!(unless_refused(refused(500), 404).is_err());
        let io = io::Error::other("x");
        assert!(unless_refused(Err::<(), _>(CallError::Connect { path: "/s".into(), source: io }), 404).is_err());
    }

    const NO_VM: (u16, &str) = (404, "[\"no VM\"]");
    const FAILED: (u16, &str) = (500, "[\"failed\"]");
    const COUNTERS: (u16, &str) = (200, r#"{"_iommu": {"requests_map": 7}}"#);

    /// Returns the answer of `vm.info` for a VM in this state.
    fn answer(state: VmState) -> String {
        let config = VmConfig::default();
        let device_tree = BTreeMap::new();
        let info = VmInfo { config, state, memory_actual_size: 0, iommu_bounce: None, device_tree, failure: None };
        serde_json::to_string(&info).unwrap()
    }

    /// Takes a sample from a server that sends the next of `answers` for each request. The sample must make as many requests as there are
    /// answers.
    fn look_at(answers: &[(u16, &str)]) -> Result<Look, CallError> {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("socket");
        let listener = UnixListener::bind(&socket).unwrap();
        thread::scope(|scope| {
            let server = scope.spawn(move || {
                for (status, body) in answers {
                    let (mut client, _) = listener.accept().unwrap();
                    let request = BufReader::new(&client).lines().map(Result::unwrap);
                    assert!(request.take_while(|line| !line.is_empty()).count() > 1);
                    let head = format!("HTTP/1.1 {status} \r\ncontent-length: {}\r\n\r\n", body.len());
                    client.write_all((head + body).as_bytes()).unwrap();
                }
            });
            let look = look(&Client::new(&socket).unwrap());
            // If the sample made too few requests, the server still waits for a client. This connection sends no request, so the server
            // panics and the test fails.
            drop(UnixStream::connect(&socket));
            server.join().unwrap();
            look
        })
    }

    #[test]
    fn vm_that_is_not_booted_is_not_asked_for_counters() {
        assert!(look_at(&[NO_VM]).unwrap().info.is_none());
        let look = look_at(&[(200, &answer(VmState::Created))]).unwrap();
        assert_eq!(look.info.unwrap().state, VmState::Created);
    }

    #[test]
    fn vm_that_runs_or_is_paused_has_counters() {
        for state in [VmState::Running, VmState::Paused] {
            assert_eq!(look_at(&[(200, &answer(state)), COUNTERS]).unwrap().counter("requests_map"), 7);
        }
    }

    #[test]
    fn vm_that_ends_during_a_sample_is_shown_in_its_new_state() {
        let running = answer(VmState::Running);
        let look = look_at(&[(200, &running), FAILED, (200, &answer(VmState::Created))]).unwrap();
        assert_eq!(look.info.unwrap().state, VmState::Created);
        assert!(look_at(&[(200, &running), FAILED, NO_VM]).unwrap().info.is_none());
        assert_eq!(look_at(&[(200, &running), NO_VM]).unwrap().counter("requests_map"), 0);
    }

    #[test]
    fn failure_of_a_running_vm_is_reported() {
        let running = answer(VmState::Running);
        let error = look_at(&[(200, &running), FAILED, (200, &running)]).err().unwrap();
        assert_eq!(error.to_string(), "failed (status 500)");
    }
}
