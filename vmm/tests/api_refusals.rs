// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests the API's answers if a host operation fails, and if too many calls wait. The server and the control thread are real. The VM has no
//! guest, and its operations fail or last as long as a test wants.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod http;

use std::io::{self, BufReader};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::thread::{self, JoinHandle};

use carom_api::VmConfig;
use carom_api::cli::Program;
use serde_json::{Value, json};
use vmm::api::{ApiServer, SharedApi};
use vmm::control::{Control, Options};
use vmm::error::VmError;
use vmm::machine::Machine;
use vmm::mailbox::Mailbox;
use vmm::process::event_monitor::EventMonitor;
use vmm::vm_state::{StateSink, StateSource};

use http::{LIMIT, connect, receive, send};

/// Maximum number of API calls that wait for the control thread (docs/api.md).
const MAX_CALLS: usize = 128;

/// State of the power button. The first `vm.power-button` call presses the button, and the test releases the button.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Button {
    Untouched,
    Down,
    LetGo,
}

static BUTTON: Mutex<Button> = Mutex::new(Button::Untouched);
static BUTTON_MOVED: Condvar = Condvar::new();

/// Waits until the button has the wanted state.
fn await_button(wanted: Button) {
    let (_guard, timeout) =
        BUTTON_MOVED.wait_timeout_while(BUTTON.lock().unwrap(), LIMIT, |button| *button != wanted).unwrap();
    assert!(!timeout.timed_out(), "the button is not {wanted:?} in time");
}

fn move_button(to: Button) {
    *BUTTON.lock().unwrap() = to;
    BUTTON_MOVED.notify_all();
}

/// VM without a guest. It cannot be reset, and its power button stays down until the test releases the button.
struct Null;

impl Machine for Null {
    fn build(_: &VmConfig, _: Arc<Mailbox>, _: &EventMonitor) -> Result<Self, VmError> {
        Ok(Self)
    }

    fn restore(_: &dyn StateSource, _: bool, _: Arc<Mailbox>, _: &EventMonitor) -> Result<Self, VmError> {
        Ok(Self)
    }

    fn save(&mut self, _: &VmConfig, _: &mut dyn StateSink) -> Result<(), VmError> {
        Ok(())
    }
    fn start(&mut self, _: bool) -> Result<(), VmError> {
        Ok(())
    }
    fn pause(&mut self) -> Result<(), VmError> {
        Ok(())
    }
    fn resume(&mut self) -> Result<(), VmError> {
        Ok(())
    }
    fn raise_nmi(&self) -> Result<(), VmError> {
        Ok(())
    }
    fn reset(&mut self) -> Result<(), VmError> {
        let source = io::Error::from_raw_os_error(libc::EIO);
        Err(VmError::Device { what: "reset the devices", source })
    }

    fn press_power_button(&self) -> Result<(), VmError> {
        if *BUTTON.lock().unwrap() == Button::Untouched {
            move_button(Button::Down);
        }
        await_button(Button::LetGo);
        Ok(())
    }
}

/// Server and control thread with a booted VM.
struct Vmm {
    socket: PathBuf,
    control: JoinHandle<()>,
    _dir: tempfile::TempDir,
}

impl Vmm {
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("api.sock");
        let api = devices::listening_socket::ListeningSocket::bind(&socket).unwrap();
        let control = thread::spawn(move || {
            let control = Control::<Null>::new(
                EventMonitor::none(),
                Options { no_shutdown: true, has_api: true, ..Options::default() },
            );
            let _server =
                ApiServer::start(Some(api), None, SharedApi::new(control.handle(), Program::default())).unwrap();
            control.run().unwrap();
        });
        let vmm = Self { socket, control, _dir: dir };
        assert_eq!(vmm.request("PUT", "vm.create", Some(&json!({"payload": {"kernel": "/k"}}))).0, 204);
        assert_eq!(vmm.request("PUT", "vm.boot", None).0, 204);
        vmm
    }

    fn request(&self, method: &str, name: &str, body: Option<&Value>) -> (u16, Value) {
        let mut stream = connect(&self.socket);
        send(&mut stream, method, name, body);
        let (status, body) = receive(&mut BufReader::new(stream));
        (status, if body.is_empty() { Value::Null } else { serde_json::from_slice(&body).unwrap() })
    }

    fn end(self) {
        assert_eq!(self.request("PUT", "vmm.shutdown", None).0, 204);
        self.control.join().unwrap();
    }
}

#[test]
fn host_failure_is_answered_with_500_and_serving_continues() {
    let vmm = Vmm::start();
    let (status, error) = vmm.request("PUT", "vm.reboot", None);
    assert_eq!((status, error), (500, json!(["cannot reset the devices: Input/output error (os error 5)"])));
    // A VM that cannot be reset is shut down, and can be booted again.
    let (status, info) = vmm.request("GET", "vm.info", None);
    assert_eq!((status, &info["state"]), (200, &json!("Created")));
    assert_eq!(vmm.request("PUT", "vm.boot", None).0, 204);
    vmm.end();
}

#[test]
fn calls_beyond_the_waiting_limit_get_429_until_others_end() {
    const BEYOND: usize = 13;
    let vmm = Vmm::start();
    let (sender, answers) = mpsc::channel();
    thread::scope(|scope| {
        let call = || {
            let (sender, vmm) = (sender.clone(), &vmm);
            scope.spawn(move || sender.send(vmm.request("PUT", "vm.power-button", None)).unwrap());
        };
        call();
        await_button(Button::Down);
        // One call is in progress. The following calls fill the queue, and `BEYOND` calls exceed its maximum. The test cannot know which of
        // these calls are rejected.
        (1..MAX_CALLS + BEYOND).for_each(|_| call());
        let answer = || answers.recv_timeout(LIMIT).unwrap();
        for _ in 0..BEYOND {
            assert_eq!(answer(), (429, json!(["too many calls are waiting: try again later"])));
        }
        // Requests that need no control thread are still answered.
        assert_eq!(vmm.request("GET", "vmm.ping", None).0, 200);
        assert_eq!(vmm.request("PUT", "vm.pause", None).0, 429);
        move_button(Button::LetGo);
        for _ in 0..MAX_CALLS {
            assert_eq!(answer(), (204, Value::Null));
        }
    });
    assert_eq!(vmm.request("PUT", "vm.power-button", None).0, 204);
    vmm.end();
}
