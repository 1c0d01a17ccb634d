// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Errors of saving and restoring a VM.

use carom_api::ConfigError;
use devices::state::StateError;
use thiserror::Error;

use crate::kvm::KvmError;
use crate::memory;

/// Why a VM could not be saved or restored.
#[derive(Debug, Error)]
pub enum VmStateError {
    /// The destination has a file of a snapshot in it.
    #[error("{0}: is there already: a snapshot goes to a directory that has none, or does not exist")]
    Exists(String),
    /// A file or directory.
    #[error("{path}: {source}")]
    File {
        /// Which.
        path: String,
        /// Error of the kernel.
        source: std::io::Error,
    },
    /// A file is not of its form.
    #[error("{path}: {rule}")]
    Form {
        /// Which.
        path: String,
        /// What is wrong.
        rule: String,
    },
    /// RAM could not be made.
    #[error(transparent)]
    Memory(#[from] memory::MemoryError),
    /// It cannot be what the client wants.
    #[error(transparent)]
    Config(Box<ConfigError>),
    /// The part of the kernel.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// A state cannot be saved, or is refused.
    #[error(transparent)]
    State(#[from] StateError),
}

impl From<ConfigError> for VmStateError {
    fn from(error: ConfigError) -> Self {
        Self::Config(Box::new(error))
    }
}

impl VmStateError {
    /// True if the user can mend it.
    pub fn is_user_error(&self) -> bool {
        match self {
            Self::Exists(_) | Self::File { .. } | Self::Form { .. } | Self::State(_) | Self::Config(_) => true,
            Self::Memory(error) => error.is_user_error(),
            // KVM does not take a value that a file has.
            Self::Kvm(KvmError::Call { source, .. }) if source.raw_os_error() == Some(libc::EINVAL) => true,
            Self::Kvm(error) => error.is_user_error(),
        }
    }
}
