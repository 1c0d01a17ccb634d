// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Interfaces of the host that a client opened.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// Open files of one tap interface, one for each pair of queues. They came with a request: no text can say them, and a configuration
/// that is written loses them.
#[derive(Clone, Debug, Default)]
pub struct TapFiles(Arc<Vec<OwnedFd>>);

impl TapFiles {
    /// Those that came with a request.
    pub fn new(files: Vec<OwnedFd>) -> Self {
        Self(Arc::new(files))
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none: the interface is opened by its name.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The files, in the order in which they came.
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
