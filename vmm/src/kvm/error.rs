// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Errors of KVM.

use std::io;

use devices::state::StateError;
use thiserror::Error;

/// Error of KVM.
#[derive(Debug, Error)]
pub enum KvmError {
    /// `/dev/kvm` cannot be opened.
    #[error("/dev/kvm: {source}; {advice}")]
    Open {
        /// Error from the kernel.
        source: io::Error,
        /// Remedy for the user.
        advice: &'static str,
    },
    /// The host kernel's KVM lacks a required capability.
    #[error("/dev/kvm: this kernel's KVM has no {0}; use a newer kernel")]
    Missing(&'static str),
    /// A saved state is invalid.
    #[error(transparent)]
    State(#[from] StateError),
    /// An operation of KVM failed.
    #[error("cannot {what}: {source}")]
    Call {
        /// Operation that failed, as a verb: "create vCPU 3".
        what: String,
        /// Reason, usually the error from the kernel.
        source: io::Error,
    },
}

impl KvmError {
    /// True if the user can fix the cause.
    pub fn is_user_error(&self) -> bool {
        matches!(self, Self::Open { .. } | Self::State(_))
    }

    /// Adds the number of a vCPU to the error.
    pub(crate) fn of_vcpu(self, number: u32) -> Self {
        match self {
            Self::State(error) => Self::State(StateError::of(&format!("vCPU {number}"))(error)),
            Self::Call { what, source } => Self::Call { what: format!("{what} (vCPU {number})"), source },
            other => other,
        }
    }

    /// Returns the error of an operation that failed without an error from the kernel.
    pub(crate) fn other(what: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Call { what: what.into(), source: io::Error::other(reason.into()) }
    }

    pub(crate) fn call(what: impl Into<String>) -> impl FnOnce(kvm_ioctls::Error) -> Self {
        let what = what.into();
        move |error| Self::Call { what, source: error.into() }
    }
}
