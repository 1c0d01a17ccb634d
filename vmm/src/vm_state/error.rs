// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Errors of saving and restoring a VM.

use carom_api::ConfigError;
use devices::state::StateError;
use thiserror::Error;

use crate::kvm::KvmError;
use crate::memory;

/// Error of saving or restoring a VM.
#[derive(Debug, Error)]
pub enum VmStateError {
    /// The destination already contains a snapshot file.
    #[error("{0}: already exists: save to an empty or new directory")]
    Exists(String),
    /// A file or directory cannot be used.
    #[error("{path}: {source}")]
    File {
        /// Path of the file or directory.
        path: String,
        /// Error from the kernel.
        source: std::io::Error,
    },
    /// A file has the wrong format.
    #[error("{path}: {rule}")]
    Form {
        /// Path of the file.
        path: String,
        /// Violated rule.
        rule: String,
    },
    /// RAM could not be created.
    #[error(transparent)]
    Memory(#[from] memory::MemoryError),
    /// The client's changes make the configuration invalid.
    #[error(transparent)]
    Config(Box<ConfigError>),
    /// A KVM call failed.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// A state cannot be saved, or a saved state is invalid.
    #[error(transparent)]
    State(#[from] StateError),
}

impl From<ConfigError> for VmStateError {
    fn from(error: ConfigError) -> Self {
        Self::Config(Box::new(error))
    }
}

impl VmStateError {
    /// True if the user can fix the cause.
    pub fn is_user_error(&self) -> bool {
        match self {
            Self::Exists(_) | Self::File { .. } | Self::Form { .. } | Self::State(_) | Self::Config(_) => true,
            Self::Memory(error) => error.is_user_error(),
            // EINVAL means that KVM rejects a value of the saved state.
            Self::Kvm(KvmError::Call { source, .. }) if source.raw_os_error() == Some(libc::EINVAL) => true,
            Self::Kvm(error) => error.is_user_error(),
        }
    }
}
