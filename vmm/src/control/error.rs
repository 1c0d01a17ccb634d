// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Why a call could not be done.

use carom_api::{ConfigError, Explain, Terms};
use thiserror::Error;

use crate::error::VmError;

use super::State;

/// Why a call could not be done; one line for whoever called.
#[derive(Debug, Error)]
pub enum ControlError {
    /// There is no VM.
    #[error("no VM is created: create one first (vm.create)")]
    NotCreated,
    /// There is one already.
    #[error("a VM is created already: delete it first (vm.delete)")]
    AlreadyCreated,
    /// The VM is in a state in which the call means nothing.
    #[error("the VM is {state}: {call} needs it {needed}")]
    WrongState {
        /// What was called.
        call: &'static str,
        /// What the VM is.
        state: State,
        /// What it must be.
        needed: &'static str,
    },
    /// The configuration breaks a rule.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The VM could not be built, or not do it.
    #[error(transparent)]
    Vm(#[from] VmError),
    /// The VM has no such part.
    #[error("{0}")]
    NoSuchPart(String),
    /// Too many calls wait.
    #[error("too many calls wait already: try again later")]
    TooManyCalls,
    /// The VMM ends.
    #[error("the VMM is about to end")]
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
