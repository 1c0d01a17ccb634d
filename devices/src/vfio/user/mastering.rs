// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Bus mastering: a server may ask for memory only while the guest's driver lets the device do DMA.

use std::sync::{Arc, RwLock};

use log::warn;

use super::connection::DmaTarget;
use crate::dma::DmaTable;
use crate::pci::regs;
use crate::sync::{read_lock, write_lock};
use crate::throttle::Throttle;

/// What a server reaches by messages, while the device is a bus master.
pub(super) struct Mastering {
    table: Arc<DmaTable>,
    is_on: RwLock<bool>,
    throttle: Throttle,
}

impl Mastering {
    /// It is off, as at power-on.
    pub(super) fn new(table: Arc<DmaTable>) -> Self {
        Self { table, is_on: RwLock::new(false), throttle: Throttle::default() }
    }

    /// The guest, or a reset, is about to write `data` at `offset` of configuration space. When it returns, and the write turns bus
    /// mastering off, no access of the server's is under way, and none can begin.
    pub(super) fn follow(&self, offset: u16, data: &[u8]) {
        let low = regs::COMMAND.checked_sub(offset).and_then(|at| data.get(usize::from(at)));
        if let Some(low) = low {
            *write_lock(&self.is_on) = u16::from(*low) & regs::COMMAND_BUS_MASTER != 0;
        }
    }

    fn access(&self, access: impl FnOnce(&DmaTable) -> bool) -> bool {
        let is_on = read_lock(&self.is_on);
        if !*is_on && self.throttle.pass() {
            warn!("{}: the vfio-user server asks for memory, and the device is no bus master", self.table.name());
        }
        *is_on && access(&self.table)
    }
}

impl DmaTarget for Mastering {
    fn read(&self, iova: u64, data: &mut [u8]) -> bool {
        self.access(|table| table.read(iova, data))
    }

    fn write(&self, iova: u64, data: &[u8]) -> bool {
        self.access(|table| table.write(iova, data))
    }
}
