// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Fuzz targets for the state in a snapshot and for bodies of API requests. Tests replay the inputs that a fuzzer found.

use std::sync::Arc;

use carom_api::config::MemoryConfig;
use carom_api::operations::{self, Action};
use carom_api::types::IommuBounceChange;
use carom_api::{Call, Explain, Terms, VmConfig};

use crate::control::{Control, ControlError, Options, Reply};
use crate::error::VmError;
use crate::machine::Machine;
use crate::mailbox::Mailbox;
use crate::process::event_monitor::EventMonitor;
use crate::snapshot;
use crate::vm_state::{StateSink, StateSource, VmState};

/// Reads the state of a snapshot from `bytes`, for a VM with one vCPU and 64 MiB of RAM. Checks that accepted state is unchanged after it
/// is written and read back.
///
/// # Panics
/// Accepted state changes when it is written and read back.
pub fn snapshot_state(bytes: &[u8]) {
    let Ok(state) = snapshot::parse::<VmState>(bytes) else { return };
    if state.check(&(1..=1), &MemoryConfig::with_size(64 << 20), 80 << 20).is_ok() {
        let text = serde_json::to_vec(&state).expect("a parsed state can be written");
        let again: VmState = snapshot::parse(&text).expect("a written state can be parsed");
        assert_eq!(serde_json::to_vec(&again).expect("a parsed state can be written"), text);
        assert!(state.ram.iter().all(|range| range.offset + range.len <= 80 << 20));
    }
}

/// VM that is never booted.
enum Unbootable {}

impl Machine for Unbootable {
    fn build(_: &VmConfig, _: Arc<Mailbox>, _: &EventMonitor) -> Result<Self, VmError> {
        Err(VmError::Guest("is never booted".into()))
    }
    fn restore(_: &dyn StateSource, _: bool, _: Arc<Mailbox>, _: &EventMonitor) -> Result<Self, VmError> {
        Err(VmError::Guest("is never restored".into()))
    }
    fn save(&mut self, _: &VmConfig, _: &mut dyn StateSink) -> Result<(), VmError> {
        match *self {}
    }
    fn start(&mut self, _: bool) -> Result<(), VmError> {
        match *self {}
    }
    fn pause(&mut self) -> Result<(), VmError> {
        match *self {}
    }
    fn resume(&mut self) -> Result<(), VmError> {
        match *self {}
    }
    fn press_power_button(&self) -> Result<(), VmError> {
        match *self {}
    }
    fn raise_nmi(&self) -> Result<(), VmError> {
        match *self {}
    }
    fn reset(&mut self) -> Result<(), VmError> {
        match *self {}
    }
}

/// Returns a control thread with a created VM, which has windows and one removable device.
fn created() -> Control<Unbootable> {
    let mut control = Control::new(EventMonitor::none(), Options::default());
    let config = r#"{"payload": {"kernel": "/k"}, "devices": [{"path": "/d", "iommu": true, "id": "d"}],
        "iommu_bounce": {"size": 8388608, "max": 67108864}}"#;
    let config: VmConfig = serde_json::from_str(config).expect("the configuration is valid JSON");
    let config = config.check().expect("the configuration is valid");
    control.create(config).unwrap_or_else(|error| unreachable!("{error}"));
    control
}

/// Sends the body to every operation that has a body, once without a VM and once with a created VM.
///
/// # Panics
/// One of these rules is broken. Each error message must be one line. An accepted body must not change when it is written and read back.
/// After each operation, the configuration of the VM must be valid.
pub fn body(data: &[u8]) {
    for operation in operations::all() {
        if !matches!(operation.action, Action::WithBody(_) | Action::AddDevice(_)) {
            continue;
        }
        for mut control in [Control::new(EventMonitor::none(), Options::default()), created()] {
            let refused = match operation.action.read(data) {
                Ok(call) => {
                    check_call(&call);
                    control.serve_call(call).map(drop).map_err(|error| error.explain(Terms::Json))
                }
                Err(error) => Err(error.message),
            };
            if let Err(message) = refused {
                assert!(!message.is_empty() && !message.contains(char::is_control), "{}: {message:?}", operation.name);
            }
            check_config(&mut control);
        }
    }
}

/// Checks that an accepted body is unchanged after it is written and read again.
fn check_call(call: &Call) {
    match call {
        Call::Create(config) => {
            let again: VmConfig = reread(&***config);
            assert_eq!(again, ***config);
        }
        Call::AddDevice(device) => {
            let text = serde_json::to_vec(device).expect("a device can be written");
            assert_eq!(device.kind().read(&text).as_ref(), Ok(device));
        }
        Call::TuneBounce(change) => assert_eq!(reread::<IommuBounceChange>(change), *change),
        _ => {}
    }
}

fn reread<T: serde::Serialize + serde::de::DeserializeOwned>(value: &T) -> T {
    let text = serde_json::to_vec(value).expect("an accepted body can be written");
    serde_json::from_slice(&text).expect("a written body can be read")
}

/// Checks that a created VM's configuration is valid.
fn check_config(control: &mut Control<Unbootable>) {
    match control.serve_call(Call::Info) {
        Ok(Reply::Info(info)) => drop(info.config.check_again().expect("an accepted configuration is valid")),
        Ok(other) => panic!("{other:?}"),
        Err(error) => assert!(matches!(error, ControlError::NotCreated), "{error}"),
    }
}

#[cfg(test)]
mod tests {
    use carom_api::config::MemoryConfig;
    use iommu_bounce::test_utils::replay;

    #[test]
    fn stored_bodies_break_no_promise() {
        replay(concat!(env!("CARGO_MANIFEST_DIR"), "/fuzz/corpus/body"), 20, super::body);
    }

    #[test]
    fn stored_states_break_no_promise() {
        replay(concat!(env!("CARGO_MANIFEST_DIR"), "/fuzz/corpus/snapshot"), 2, super::snapshot_state);
    }

    #[test]
    fn state_of_a_real_guest_is_read() {
        let text = include_bytes!("../fuzz/corpus/snapshot/booting");
        let state: super::VmState = crate::snapshot::parse(text).unwrap();
        state.check(&(1..=1), &MemoryConfig::with_size(64 << 20), 64 << 20).unwrap();
    }
}
