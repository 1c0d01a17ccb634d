// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Interface of the root bus to a PCI function.

use std::io;

use super::{Bar, FunctionConfig};
use crate::state::{DeviceState, StateError};

/// A PCI function.
///
/// Any vCPU may call any method at any time, except [`PciDevice::bars`]. So implementations must lock shared state. The root bus assigns
/// the BARs before the guest runs. After each write to configuration space, the root bus compares [`PciDevice::bar_address`] with its
/// claims in the guest's address space. So a device need not report that a BAR moved.
pub trait PciDevice: Send + Sync {
    /// Name for logs and the API, such as `_iommu` or `vfio0`.
    fn id(&self) -> &str;
    /// Returns the configuration space of a function that this process emulates. A device that returns `None` must override all methods of
    /// this trait that call `config`.
    fn config(&self) -> Option<&FunctionConfig> {
        None
    }
    /// Reads `data.len()` (1, 2 or 4) bytes of configuration space. `offset + data.len()` is at most 4096.
    fn read_config(&self, offset: u16, data: &mut [u8]) {
        self.config().into_iter().for_each(|config| config.read(offset, data));
    }
    /// Writes `data` (1, 2 or 4 bytes) to configuration space. `offset + data.len()` is at most 4096.
    fn write_config(&self, offset: u16, data: &[u8]) {
        self.config().into_iter().for_each(|config| config.write(offset, data));
    }
    /// Returns the base address registers, which never change.
    fn bars(&self) -> Vec<Bar> {
        self.config().map_or_else(Vec::new, FunctionConfig::bars)
    }
    /// Sets BAR `index` to `address` before the guest runs, as firmware would.
    fn assign_bar(&self, index: u8, address: u64) {
        self.config().into_iter().for_each(|config| config.assign_bar(index, address));
    }
    /// Returns the address where BAR `index` is decoded. Returns `None` while the command register disables decoding of its address
    /// space.
    fn bar_address(&self, index: u8) -> Option<u64> {
        self.config()?.bar_address(index)
    }
    /// Called after BAR `index` is decoded at `address`. No other device or memory of the VM is in this range. If the device maps the BAR
    /// into the guest, this function creates or moves the memory slots. When the guest turns decoding off and on again, the bus repeats the
    /// call with the same address.
    fn bar_moved(&self, _index: u8, _address: u64) -> io::Result<()> {
        Ok(())
    }
    /// Called when BAR `index` loses the address of its last [`PciDevice::bar_moved`]. This happens if another BAR takes the address, or
    /// the function is removed from the bus. If the device maps the BAR into the guest, this function removes the memory slots.
    fn bar_released(&self, _index: u8) -> io::Result<()> {
        Ok(())
    }
    /// Reads `data.len()` bytes at `offset` in BAR `index`. `offset + data.len()` is at most the BAR's size. The default is for functions
    /// without BARs.
    fn read_bar(&self, _index: u8, _offset: u64, _data: &mut [u8]) {}
    /// Writes `data` at `offset` in BAR `index`. `offset + data.len()` is at most the BAR's size. The default is for functions without
    /// BARs.
    fn write_bar(&self, _index: u8, _offset: u64, _data: &[u8]) {}
    /// True if BAR `index` is ordinary memory of this process, which the guest accesses through a memory slot. [`Self::read_bar`] and
    /// [`Self::write_bar`] are called only where no memory slot backs the BAR.
    fn is_memory(&self, index: u8) -> bool {
        let _ = index;
        false
    }
    /// Resets the device to its state at power-on, with DMA and interrupts off. The BARs keep the addresses that [`PciDevice::assign_bar`]
    /// set. Called with all vCPUs stopped.
    fn reset(&self) -> io::Result<()>;
    /// Stops the device's work on its own threads. After this function returns, the device accesses no guest memory, and its state does not
    /// change before [`PciDevice::resume`]. Called with all vCPUs stopped. A passed-through host device is not stopped.
    fn pause(&self) {}
    /// Lets the device continue. Called before the vCPUs run.
    fn resume(&self) {}
    /// Returns the state of the device. Called with all vCPUs stopped and the device paused.
    ///
    /// # Errors
    /// The device has state that cannot be saved.
    fn save(&self) -> Result<DeviceState, StateError> {
        Err(StateError::Unsupported(
            "the state of host devices and of devices of other processes cannot be saved; remove the device first",
        ))
    }
    /// Restores `state` into a device that was just created or reset. After the call, the device is paused. The caller must claim the
    /// addresses of decoded BARs. Called with all vCPUs stopped.
    ///
    /// # Errors
    /// The saved state is invalid, or does not match the device. The device can then only be [reset](PciDevice::reset).
    fn restore(&self, state: &DeviceState) -> Result<(), StateError> {
        let _ = state;
        Err(StateError::Unsupported(
            "the state of host devices and of devices of other processes cannot be restored: restore from an unmodified snapshot",
        ))
    }
}
