// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Why the guest has no RAM.

use std::io;

use carom_api::error::FileError;
use carom_api::{ConfigError, Explain, Terms};
use thiserror::Error;

use crate::arch::layout::MIB;

/// Why the guest has no RAM.
#[derive(Debug, Error)]
pub enum MemoryError {
    /// The memfd could not be made.
    #[error("cannot make {size} bytes of guest RAM for zone '{zone}': {source}{}", hint(*huge_page))]
    Create {
        /// Bytes asked for.
        size: u64,
        /// ID of the zone.
        zone: String,
        /// Bytes of the reserved huge pages that they were to be made of.
        huge_page: Option<u64>,
        /// What the kernel said.
        source: io::Error,
    },
    /// The host did not give all of it at once.
    #[error("prefaulting {size} bytes of guest RAM: {source}")]
    Prefault {
        /// Bytes asked for.
        size: u64,
        /// What the kernel said.
        source: io::Error,
    },
    /// It could not be mapped into this process.
    #[error("mapping {size} bytes of guest RAM: {message}")]
    Map {
        /// Bytes asked for.
        size: u64,
        /// What vm-memory said.
        message: String,
    },
    /// The host does not keep memory for it.
    #[error("reserving {size} bytes of guest RAM: {source}")]
    Reserve {
        /// Bytes asked for.
        size: u64,
        /// What the kernel said.
        source: io::Error,
    },
    /// It could not be held to a node of the host.
    #[error("holding guest RAM to node {node} of the host: {source}")]
    Node {
        /// The node.
        node: u32,
        /// What the kernel said.
        source: io::Error,
    },
    /// The file that is to hold a zone cannot be used.
    #[error(transparent)]
    File(Box<FileError>),
    /// What the user asked for is not to be had on this host.
    #[error(transparent)]
    Config(Box<ConfigError>),
    /// KVM did not take it.
    #[error("showing RAM at {gpa:#x} to the guest: {source}")]
    Slot {
        /// Guest-physical address.
        gpa: u64,
        /// What KVM said.
        source: io::Error,
    },
}

impl From<FileError> for MemoryError {
    fn from(error: FileError) -> Self {
        Self::File(Box::new(error))
    }
}

impl From<ConfigError> for MemoryError {
    fn from(error: ConfigError) -> Self {
        Self::Config(Box::new(error))
    }
}

impl MemoryError {
    /// Whether the user can mend it.
    pub fn is_user_error(&self) -> bool {
        matches!(self, Self::File(_) | Self::Config(_))
    }
}

impl Explain for MemoryError {
    fn explain(&self, terms: Terms) -> String {
        match self {
            Self::File(error) => error.explain(terms),
            Self::Config(error) => error.explain(terms),
            other => other.to_string(),
        }
    }
}

fn hint(huge_page: Option<u64>) -> String {
    let Some(bytes) = huge_page else { return String::new() };
    format!(" (memory of hugepages needs as many free huge pages of {} MiB, see /sys/kernel/mm/hugepages)", bytes / MIB)
}
