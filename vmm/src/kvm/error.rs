// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Why the kernel's side of a VM fails.

use std::io;

use devices::state::StateError;
use thiserror::Error;

/// Why the VM could not be set up in the kernel.
#[derive(Debug, Error)]
pub enum KvmError {
    /// `/dev/kvm` cannot be opened.
    #[error("/dev/kvm: {source}: {advice}")]
    Open {
        /// What the kernel said.
        source: io::Error,
        /// How to mend it.
        advice: &'static str,
    },
    /// The kernel's KVM lacks something.
    #[error("/dev/kvm: this kernel's KVM has no {0}")]
    Missing(&'static str),
    /// A saved state is refused.
    #[error(transparent)]
    State(#[from] StateError),
    /// A call failed.
    #[error("cannot {what}: {source}")]
    Call {
        /// What was being done.
        what: String,
        /// What the kernel said.
        source: io::Error,
    },
}

impl KvmError {
    /// Whether the user can mend it.
    pub fn is_user_error(&self) -> bool {
        matches!(self, Self::Open { .. } | Self::State(_))
    }

    pub(crate) fn call(what: impl Into<String>) -> impl FnOnce(kvm_ioctls::Error) -> Self {
        let what = what.into();
        move |error| Self::Call { what, source: error.into() }
    }
}
