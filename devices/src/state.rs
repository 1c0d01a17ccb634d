// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Saved state of devices, in a form that can be kept in a file.
//!
//! A state names its kind and version; the payload is the device's own. It comes from a file or a network, so whoever
//! restores it checks all of it as a guest's request is checked.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use thiserror::Error;

/// What a device was at one moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceState {
    /// The kind of device, such as `rng`.
    pub kind: String,
    /// Version of the payload's form, from 1.
    pub version: u32,
    /// The device's own.
    pub payload: Value,
}

/// Why a state could not be saved or restored.
#[derive(Debug, Error)]
pub enum StateError {
    /// The state is one of another kind of device.
    #[error("the state is that of kind '{found}', not '{wanted}'")]
    Kind {
        /// What was to be restored.
        wanted: &'static str,
        /// What the state says.
        found: String,
    },
    /// The state was written in a form that this program does not read.
    #[error("the state of '{kind}' has version {found}; this program reads version {wanted}")]
    Version {
        /// The kind of device.
        kind: &'static str,
        /// What this program reads.
        wanted: u32,
        /// What the state says.
        found: u32,
    },
    /// The payload is not of its form.
    #[error("the state of '{kind}': {source}")]
    Payload {
        /// The kind of device.
        kind: &'static str,
        /// What is wrong with it, and where.
        source: serde_json::Error,
    },
    /// A field breaks a rule.
    #[error("{field}: {rule}")]
    Rule {
        /// The field.
        field: String,
        /// The rule.
        rule: String,
    },
    /// The device keeps state that cannot be saved, such as that of a device of the host.
    #[error("its state cannot be saved: {0}")]
    Unsupported(&'static str),
    /// What is wrong concerns one device.
    #[error("{id}: {source}")]
    Device {
        /// Its name.
        id: String,
        /// What is wrong.
        source: Box<StateError>,
    },
    /// The host refused something.
    #[error("{what}: {source}")]
    Host {
        /// What was being done.
        what: String,
        /// What the host said.
        source: std::io::Error,
    },
}

impl StateError {
    /// A field that breaks a rule.
    pub fn rule(field: impl Into<String>, rule: impl Into<String>) -> Self {
        Self::Rule { field: field.into(), rule: rule.into() }
    }

    /// The same of the device of this name.
    pub fn of(id: &str) -> impl FnOnce(Self) -> Self + '_ {
        move |source| Self::Device { id: id.into(), source: Box::new(source) }
    }
}

impl DeviceState {
    /// A state of this kind and version.
    ///
    /// # Errors
    /// The payload has no form in JSON.
    pub fn new<T: Serialize>(kind: &'static str, version: u32, payload: &T) -> Result<Self, StateError> {
        let payload = serde_json::to_value(payload).map_err(|source| StateError::Payload { kind, source })?;
        Ok(Self { kind: kind.into(), version, payload })
    }

    /// The payload, if the state is of this kind and version. Fields are still to be checked.
    ///
    /// # Errors
    /// It is of another kind, version or form.
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
    fn state_gives_back_what_was_saved() {
        let state = DeviceState::new("register", 3, &Register { value: 7 }).unwrap();
        let text = serde_json::to_string(&state).unwrap();
        let read: DeviceState = serde_json::from_str(&text).unwrap();
        assert_eq!(read.payload::<Register>("register", 3).unwrap(), Register { value: 7 });
    }

    #[test]
    fn state_of_another_kind_version_or_form_is_refused() {
        let state = DeviceState::new("register", 3, &Register { value: 7 }).unwrap();
        let refused = |kind, version| state.payload::<Register>(kind, version).unwrap_err().to_string();
        assert_eq!(refused("timer", 3), "the state is that of kind 'register', not 'timer'");
        assert_eq!(refused("register", 4), "the state of 'register' has version 3; this program reads version 4");
        let state = DeviceState::new("register", 3, &[1, 2]).unwrap();
        assert!(
            state.payload::<Register>("register", 3).unwrap_err().to_string().starts_with("the state of 'register': ")
        );
    }
}
