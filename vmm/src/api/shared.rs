// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! State that all connections share.

use carom_api::cli::Program;

use super::page::Page;
use super::reading::Readings;
use crate::control::ControlHandle;

/// State that all connections share.
pub struct SharedApi {
    /// Handle of the control thread.
    pub(super) control: ControlHandle,
    /// Readings of the VM's state that are in progress. Clients share the answers.
    pub(super) readings: Readings<Page>,
    /// Program name that the VMM reports to clients.
    pub(super) program: Program,
}

impl SharedApi {
    /// Creates the state for a VMM that reports `program` to clients.
    pub fn new(control: ControlHandle, program: Program) -> Self {
        Self { control, readings: Readings::default(), program }
    }
}
