// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Saved state of devices, in a form that can be stored in a file.
//!
//! A state names its kind and version, and has a payload that the device defines. The state comes from a file or a network, so the device
//! validates the whole state like a guest's request.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use thiserror::Error;

/// State of a device at one moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceState {
    /// Kind of device, such as `rng`.
    pub kind: String,
    /// Version of the payload's format, from 1.
    pub version: u32,
    /// Data that the device defines.
    pub payload: Value,
}

/// Reason why a state cannot be saved or restored.
#[derive(Debug, Error)]
pub enum StateError {
    /// The state belongs to another kind of device.
    #[error(
        "the saved state is of kind '{found}', but the device needs kind '{wanted}': restore with the configuration that was saved"
    )]
    Kind {
        /// Kind of the device that should restore the state.
        wanted: &'static str,
        /// Kind of the state.
        found: String,
    },
    /// The state has a format that this program does not read.
    #[error(
        "the state of '{kind}' has version {found}, but this program reads only version {wanted}: restore the VM with the Carom release that saved the VM"
    )]
    Version {
        /// Kind of the device.
        kind: &'static str,
        /// Version that this program reads.
        wanted: u32,
        /// Version of the state.
        found: u32,
    },
    /// The payload does not have the device's format.
    #[error("the state of '{kind}' is invalid: {source}; restore from an unmodified snapshot")]
    Payload {
        /// Kind of the device.
        kind: &'static str,
        /// Error of the JSON parser, with its position.
        source: serde_json::Error,
    },
    /// A field breaks a rule.
    #[error("{field}: {rule}")]
    Rule {
        /// Name of the field.
        field: String,
        /// Rule that the field breaks.
        rule: String,
    },
    /// The device has state that cannot be saved, such as the state of a host device.
    #[error("{0}")]
    Unsupported(&'static str),
    /// The error concerns one device.
    #[error("{id}: {source}")]
    Device {
        /// Name of the device.
        id: String,
        /// The error.
        source: Box<StateError>,
    },
    /// The host refused an operation.
    #[error("{what}: {source}")]
    Host {
        /// Operation that failed.
        what: String,
        /// Error of the host.
        source: std::io::Error,
    },
}

impl StateError {
    /// Creates an error for a field that breaks a rule.
    pub fn rule(field: impl Into<String>, rule: impl Into<String>) -> Self {
        Self::Rule { field: field.into(), rule: rule.into() }
    }

    /// Returns a function that adds the device's name to an error.
    pub fn of(id: &str) -> impl FnOnce(Self) -> Self + '_ {
        move |source| Self::Device { id: id.into(), source: Box::new(source) }
    }
}

impl DeviceState {
    /// Creates a state of this kind and version.
    ///
    /// # Errors
    /// The payload cannot be represented in JSON.
    pub fn new<T: Serialize>(kind: &'static str, version: u32, payload: &T) -> Result<Self, StateError> {
        let payload = serde_json::to_value(payload).map_err(|source| StateError::Payload { kind, source })?;
        Ok(Self { kind: kind.into(), version, payload })
    }

    /// Returns the payload, if the state has this kind and version. The caller must still check the fields.
    ///
    /// # Errors
    /// The state has another kind, version or format.
    pub fn payload<T: DeserializeOwned>(&self, kind: &'static str, version: u32) -> Result<T, StateError> {
        if self.kind != kind {
            return Err(StateError::Kind { wanted: kind, found: self.kind.clone() });
        }
        if self.version != version {
            return Err(StateError::Version { kind, wanted: version, found: self.version });
        }
        T::deserialize(&self.payload).map_err(|source| StateError::Payload { kind, source })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Register {
        value: u32,
    }

    #[test]
    fn payload_returns_the_saved_state() {
        let state = DeviceState::new("register", 3, &Register { value: 7 }).unwrap();
        let text = serde_json::to_string(&state).unwrap();
        let read: DeviceState = serde_json::from_str(&text).unwrap();
        assert_eq!(read.payload::<Register>("register", 3).unwrap(), Register { value: 7 });
    }

    #[test]
    fn state_of_another_kind_version_or_form_is_refused() {
        let state = DeviceState::new("register", 3, &Register { value: 7 }).unwrap();
        let refused = |kind, version| state.payload::<Register>(kind, version).unwrap_err().to_string();
        assert_eq!(
            refused("timer", 3),
            "the saved state is of kind 'register', but the device needs kind 'timer': restore with the configuration that was saved"
        );
        assert_eq!(
            refused("register", 4),
            "the state of 'register' has version 3, but this program reads only version 4: restore the VM with the Carom release that saved the VM"
        );
        let state = DeviceState::new("register", 3, &[1, 2]).unwrap();
        assert!(
            state
                .payload::<Register>("register", 3)
                .unwrap_err()
                .to_string()
                .starts_with("the state of 'register' is invalid: ")
        );
    }
}
