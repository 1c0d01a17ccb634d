// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! File descriptors of tap interfaces, passed by a client.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// File descriptors of one tap interface, one for each pair of queues. A client passed the descriptors with a request. Serialization omits
/// them, because a descriptor has no text form.
#[derive(Clone, Debug, Default)]
pub struct TapFiles(Arc<Vec<OwnedFd>>);

impl TapFiles {
    /// Wraps the descriptors that a client passed with a request.
    pub fn new(files: Vec<OwnedFd>) -> Self {
        Self(Arc::new(files))
    }

    /// Number of descriptors.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// True if there are no descriptors. The VMM then opens the interface by its name.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the descriptors in the order in which the client passed them.
    pub fn iter(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.0.iter().map(AsFd::as_fd)
    }
}

impl PartialEq for TapFiles {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || self.is_empty() && other.is_empty()
    }
}

impl Eq for TapFiles {}
