// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What all connections share: the way to the control thread, and what is being read of it.

use carom_api::cli::Program;

use super::page::Page;
use super::reading::Readings;
use crate::control::ControlHandle;

/// What all connections share.
pub struct SharedApi {
    /// The way to the control thread.
    pub(super) control: ControlHandle,
    /// What is being read of it.
    pub(super) readings: Readings<Page>,
    /// What clients see the VMM as.
    pub(super) program: Program,
}

impl SharedApi {
    /// With this way to the control thread, of a VMM that clients see as `program`.
    pub fn new(control: ControlHandle, program: Program) -> Self {
        Self { control, readings: Readings::default(), program }
    }
}
