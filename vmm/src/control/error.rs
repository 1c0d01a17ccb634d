// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Errors of calls to the control thread.

use carom_api::{ConfigError, Explain, Terms};
use thiserror::Error;

use crate::error::VmError;

use super::State;

/// Error of a call, as one line for the client.
#[derive(Debug, Error)]
pub enum ControlError {
    /// No VM is created.
    #[error("no VM is created: create one first (vm.create)")]
    NotCreated,
    /// A VM is already created.
    #[error("a VM is already created: delete it first (vm.delete)")]
    AlreadyCreated,
    /// The call is not allowed in the VM's state.
    #[error("the VM is {state}: {call} needs a VM that is {needed}")]
    WrongState {
        /// Name of the call.
        call: &'static str,
        /// Current state.
        state: State,
        /// Required state.
        needed: &'static str,
    },
    /// The configuration breaks a rule.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The VM could not be built, or the operation failed.
    #[error(transparent)]
    Vm(#[from] VmError),
    /// The VM has no such device.
    #[error("{0}")]
    NoSuchPart(String),
    /// Too many calls are in the queue.
    #[error("too many calls are waiting: try again later")]
    TooManyCalls,
    /// The VMM is ending.
    #[error("the VMM is ending")]
    Ending,
}

impl Explain for ControlError {
    fn explain(&self, terms: Terms) -> String {
        match self {
            Self::Config(error) => error.explain(terms),
            Self::Vm(error) => error.explain(terms),
            Self::NotCreated
            | Self::AlreadyCreated
            | Self::WrongState { .. }
            | Self::NoSuchPart(_)
            | Self::TooManyCalls
            | Self::Ending => self.to_string(),
        }
    }
}
