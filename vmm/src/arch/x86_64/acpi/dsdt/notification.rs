// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! AML that notifies a device.

use acpi_tables::aml::{And, If, Local, Notify, Path, ZERO};
use acpi_tables::{Aml, AmlSink};

/// Notification: a device was added (ACPI 6.5, section 5.6.6, "device check").
pub(super) const DEVICE_CHECK: u8 = 1;
/// Notification: the guest is asked to release a device ("eject request").
pub(super) const EJECT_REQUEST: u8 = 3;

/// AML that notifies a device if its bit is set in a local variable.
pub(super) struct NotifyIfSet {
    pub(super) path: String,
    /// Number of the local variable.
    pub(super) local: u8,
    /// Number of the bit.
    pub(super) bit: u8,
    pub(super) event: u8,
}

impl Aml for NotifyIfSet {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        let (local, bit) = (Local(self.local), 1u32 << self.bit);
        let set = And::new(&ZERO, &local, &bit);
        If::new(&set, vec![&Notify::new(&Path::new(&self.path), &self.event)]).to_aml_bytes(sink);
    }
}
