// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Bus mastering of a server's device. The server may access memory only while the guest's driver has enabled bus mastering.

use std::sync::{Arc, RwLock};

use log::warn;

use super::connection::DmaTarget;
use crate::dma::DmaTable;
use crate::pci::regs;
use crate::sync::{read_lock, write_lock};
use crate::throttle::Throttle;

/// Memory that a server may access by messages while the device is a bus master.
pub(super) struct Mastering {
    table: Arc<DmaTable>,
    is_on: RwLock<bool>,
    throttle: Throttle,
}

impl Mastering {
    /// Creates access to the memory of `table`, with bus mastering off as at power-on.
    pub(super) fn new(table: Arc<DmaTable>) -> Self {
        Self { table, is_on: RwLock::new(false), throttle: Throttle::default() }
    }

    /// Updates bus mastering before the guest, or a reset, writes `data` at `offset` of configuration space. If the write turns bus
    /// mastering off, no access of the server is in progress when this function returns, and no access can begin.
    pub(super) fn follow(&self, offset: u16, data: &[u8]) {
        let low = regs::COMMAND.checked_sub(offset).and_then(|at| data.get(usize::from(at)));
        if let Some(low) = low {
            *write_lock(&self.is_on) = u16::from(*low) & regs::COMMAND_BUS_MASTER != 0;
        }
    }

    fn access(&self, access: impl FnOnce(&DmaTable) -> bool) -> bool {
        let is_on = read_lock(&self.is_on);
        if !*is_on && self.throttle.pass() {
            warn!(
                "{}: rejected a memory access of the vfio-user server, because the guest has not enabled bus mastering for the device",
                self.table.name()
            );
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
