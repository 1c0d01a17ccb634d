// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Host side of a passed-through function: traits that VFIO, vfio-user and tests implement.

use std::io;
use std::sync::Weak;

use vmm_sys_util::eventfd::EventFd;

use super::bar_mapping::BarMapping;
use crate::vfio::space::Attachable;

/// Access to configuration space through the host.
pub(crate) trait ConfigAccess: Send + Sync {
    /// Returns the size of configuration space in bytes: 256, or 4096 with extended configuration space.
    fn config_size(&self) -> u64;
    /// Reads configuration space from `offset` on. On failure `data` stays unchanged.
    fn read_config(&self, offset: u16, data: &mut [u8]);
    /// Writes configuration space from `offset` on.
    fn write_config(&self, offset: u16, data: &[u8]);
}

/// BAR, with the accesses that the host allows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Region {
    /// Size in bytes. 0 means that the BAR does not exist.
    pub(crate) size: u64,
    /// True if the BAR can be read.
    pub(crate) readable: bool,
    /// True if the BAR can be written.
    pub(crate) writable: bool,
    /// Mappable areas as (offset, size), neither sorted nor checked.
    pub(crate) mappable: Vec<(u64, u64)>,
}

/// Kind of interrupt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IrqKind {
    /// INTx. The host masks INTx at each interrupt, until the event of [`HostFunction::unmask_intx_by`] unmasks it.
    Intx,
    /// MSI.
    Msi,
    /// MSI-X.
    Msix,
    /// Notice of the host: the device had an uncorrectable error. Only PCI Express devices have this notice.
    Error,
    /// Notice of the host: the host asks this process to close the device.
    Request,
}

/// PCI function outside this process.
pub(crate) trait HostFunction: ConfigAccess {
    /// Returns BAR `bar`, 0 to 5.
    fn region(&self, bar: u8) -> Region;
    /// Reads from a BAR. On failure `data` stays unchanged.
    fn read_region(&self, bar: u8, offset: u64, data: &mut [u8]);
    /// Writes to a BAR.
    fn write_region(&self, bar: u8, offset: u64, data: &[u8]);
    /// Maps a part of a BAR into this process.
    fn map_region(&self, bar: u8, offset: u64, len: usize, read_only: bool) -> io::Result<BarMapping>;
    /// Returns the number of vectors of a kind.
    fn irq_count(&self, kind: IrqKind) -> u32;
    /// Enables interrupts of a kind. When vector n occurs, the host writes event n.
    fn enable_irqs(&self, kind: IrqKind, events: Vec<&EventFd>) -> io::Result<()>;
    /// Makes the host unmask INTx on each write to `event`. INTx must be enabled. If the device still asserts INTx when it is unmasked, the
    /// device interrupts again.
    fn unmask_intx_by(&self, event: &EventFd) -> io::Result<()>;
    /// Disables interrupts of a kind.
    fn disable_irqs(&self, kind: IrqKind) -> io::Result<()>;
    /// Resets the function. Returns `false` if the host cannot reset the function. The first call may do nothing if opening the function
    /// has reset it already. Fails with `WouldBlock` while the host holds the function, for example while the host unbinds the function
    /// from its host driver.
    fn reset(&self) -> io::Result<bool>;
    /// Returns a handle that attaches the function to another address space, as long as the function is open.
    fn attachable(&self) -> Weak<dyn Attachable>;
}
