// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What the root bus asks of a PCI function.

use std::io;

use super::{Bar, FunctionConfig};
use crate::state::{DeviceState, StateError};

/// A PCI function.
///
/// All calls but [`PciDevice::bars`] may come from any vCPU at any time, so implementations lock what they must. The
/// root bus assigns the registers before the guest runs, watches writes to configuration space, and after each one
/// compares [`PciDevice::bar_address`] with what it has claimed in the guest's address space: a device need not tell
/// it that a BAR moved.
pub trait PciDevice: Send + Sync {
    /// Name for logs and the API, such as `_iommu` or `vfio0`.
    fn id(&self) -> &str;
    /// Configuration space of a function that this process emulates. `None` if the function overrides all methods that use this one.
    fn config(&self) -> Option<&FunctionConfig> {
        None
    }
    /// Reads `data.len()` (1, 2 or 4) bytes of configuration space; `offset + data.len()` is at most 4096.
    fn read_config(&self, offset: u16, data: &mut [u8]) {
        self.config().into_iter().for_each(|config| config.read(offset, data));
    }
    /// Writes `data` (1, 2 or 4 bytes) to configuration space; `offset + data.len()` is at most 4096.
    fn write_config(&self, offset: u16, data: &[u8]) {
        self.config().into_iter().for_each(|config| config.write(offset, data));
    }
    /// The base address registers, fixed over the device's life.
    fn bars(&self) -> Vec<Bar> {
        self.config().map_or_else(Vec::new, FunctionConfig::bars)
    }
    /// Sets BAR `index` to `address` before the guest runs, as firmware would.
    fn assign_bar(&self, index: u8, address: u64) {
        self.config().into_iter().for_each(|config| config.assign_bar(index, address));
    }
    /// Where BAR `index` is decoded; `None` while the command register has decoding off for its space.
    fn bar_address(&self, index: u8) -> Option<u64> {
        self.config()?.bar_address(index)
    }
    /// Called after BAR `index` came to be decoded at `address`, a place that holds nothing else of the VM; a device
    /// that shows memory to the guest (re)makes its slots. Called with the same address again after decoding was off,
    /// which is no move.
    fn bar_moved(&self, _index: u8, _address: u64) -> io::Result<()> {
        Ok(())
    }
    /// Called when BAR `index`, whose decoding is off, loses the place of its last [`PciDevice::bar_moved`] to another
    /// BAR, and when the function is taken off the bus; a device that shows memory to the guest there takes its slots away.
    fn bar_released(&self, _index: u8) -> io::Result<()> {
        Ok(())
    }
    /// Reads at `offset` in BAR `index`; `offset + data.len()` is at most the BAR's size. A function without BARs does nothing.
    fn read_bar(&self, _index: u8, _offset: u64, _data: &mut [u8]) {}
    /// Writes at `offset` in BAR `index`; `offset + data.len()` is at most the BAR's size. A function without BARs does nothing.
    fn write_bar(&self, _index: u8, _offset: u64, _data: &[u8]) {}
    /// True if BAR `index` is ordinary memory of this process, with nothing that answers accesses in its place.
    fn is_memory(&self, index: u8) -> bool {
        let _ = index;
        false
    }
    /// Puts the device back to its state at power-on, DMA and interrupts off; its BARs keep the addresses that
    /// [`PciDevice::assign_bar`] gave. Called with all vCPUs stopped.
    fn reset(&self) -> io::Result<()>;
    /// Stops what the device does on threads of its own. When it returns, the device touches no guest memory and its state
    /// does not change before [`PciDevice::resume`]. Called with all vCPUs stopped. A device of the host goes on.
    fn pause(&self) {}
    /// Lets the device go on. Called before the vCPUs run.
    fn resume(&self) {}
    /// What the device is. Called with all vCPUs stopped and the device paused.
    ///
    /// # Errors
    /// The device has state that cannot be saved.
    fn save(&self) -> Result<DeviceState, StateError> {
        Err(StateError::Unsupported("devices of the host and of other processes keep it to themselves"))
    }
    /// Makes a device that was just built or reset what `state` says, paused. BARs of `state` that are decoded are claimed by
    /// whoever calls. Called with all vCPUs stopped.
    ///
    /// # Errors
    /// What of the state is refused. The device is good for [`PciDevice::reset`] only then.
    fn restore(&self, state: &DeviceState) -> Result<(), StateError> {
        let _ = state;
        Err(StateError::Unsupported("devices of the host and of other processes keep it to themselves"))
    }
}
