// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Configuration space of a function that this process emulates, with its state at power-on for
//! resets.

use std::sync::Mutex;

use super::{Bar, ConfigSpace, ConfigState};
use crate::state::StateError;
use crate::sync::lock;

/// Current configuration space of a function, and its state at power-on.
pub struct FunctionConfig {
    current: Mutex<ConfigSpace>,
    /// State at power-on, with the addresses that the VMM assigned.
    power_on: Mutex<ConfigSpace>,
}

impl FunctionConfig {
    /// Creates a configuration space whose state at power-on is `config`.
    pub fn new(config: ConfigSpace) -> Self {
        Self { current: Mutex::new(config.clone()), power_on: Mutex::new(config) }
    }

    pub(super) fn bars(&self) -> Vec<Bar> {
        lock(&self.current).bars().to_vec()
    }

    pub(super) fn assign_bar(&self, index: u8, address: u64) {
        lock(&self.power_on).assign_bar(index, address);
        lock(&self.current).assign_bar(index, address);
    }

    pub(super) fn bar_address(&self, index: u8) -> Option<u64> {
        lock(&self.current).bar_address(index)
    }

    /// Reads configuration space as the guest does.
    pub fn read(&self, offset: u16, data: &mut [u8]) {
        lock(&self.current).read(offset, data);
    }

    /// Writes configuration space as the guest does.
    pub fn write(&self, offset: u16, data: &[u8]) {
        lock(&self.current).write(offset, data);
    }

    /// Resets all registers to their values at power-on.
    pub fn reset(&self) {
        let power_on = lock(&self.power_on).clone();
        *lock(&self.current) = power_on;
    }

    /// Returns the registers that the guest can change.
    pub fn state(&self) -> ConfigState {
        lock(&self.current).state()
    }

    /// Restores the registers that the guest can change.
    ///
    /// # Errors
    /// The state belongs to a function with other registers. In this case nothing has changed.
    pub fn restore(&self, state: &ConfigState) -> Result<(), StateError> {
        lock(&self.current).restore(state)
    }
}
