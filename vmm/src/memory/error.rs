// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Errors of creating the guest's RAM.

use std::io;

use carom_api::error::FileError;
use carom_api::{ConfigError, Explain, Terms};
use thiserror::Error;

use crate::arch::layout::MIB;

/// Error of creating the guest's RAM.
#[derive(Debug, Error)]
pub enum MemoryError {
    /// The memfd of a zone could not be created, or its reserved huge pages could not be allocated.
    #[error("cannot allocate {size} bytes of guest RAM for zone '{zone}': {source}{}", hint(*huge_page))]
    Create {
        /// Requested bytes.
        size: u64,
        /// ID of the zone.
        zone: String,
        /// Size of the reserved huge pages that were requested, if any.
        huge_page: Option<u64>,
        /// Error from the kernel.
        source: io::Error,
    },
    /// The host could not allocate all pages in advance (`prefault`).
    #[error(
        "cannot prefault {size} bytes of guest RAM: {source}; prefault=on needs Linux 5.14 or later and this much free host memory"
    )]
    Prefault {
        /// Requested bytes.
        size: u64,
        /// Error from the kernel.
        source: io::Error,
    },
    /// The memory could not be mapped into this process.
    #[error("cannot map {size} bytes of guest RAM: {message}")]
    Map {
        /// Requested bytes.
        size: u64,
        /// Error from vm-memory.
        message: String,
    },
    /// The host could not reserve memory for the RAM (`reserve`).
    #[error(
        "cannot reserve {size} bytes of guest RAM: {source}; reserve=on needs this much free host memory (for a zone with a file: this much free space in the file system)"
    )]
    Reserve {
        /// Requested bytes.
        size: u64,
        /// Error from the kernel.
        source: io::Error,
    },
    /// The memory could not be bound to a NUMA node of the host.
    #[error("cannot bind guest RAM to NUMA node {node} of the host: {source}")]
    Node {
        /// Number of the node.
        node: u32,
        /// Error from the kernel.
        source: io::Error,
    },
    /// The file of a zone cannot be used.
    #[error(transparent)]
    File(Box<FileError>),
    /// The configuration does not fit this host.
    #[error(transparent)]
    Config(Box<ConfigError>),
    /// KVM rejected the memory slot.
    #[error("cannot register RAM at {gpa:#x} with KVM: {source}")]
    Slot {
        /// Guest-physical address of the RAM.
        gpa: u64,
        /// Error from KVM.
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
    /// True if the user can fix the cause.
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
    format!("; hugepages=on needs enough free huge pages of {} MiB: see /sys/kernel/mm/hugepages", bytes / MIB)
}
