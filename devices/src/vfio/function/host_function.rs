// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The host's side of a passed-through function: a trait for VFIO, vfio-user and tests.

use std::io;
use std::sync::Weak;

use vmm_sys_util::eventfd::EventFd;

use super::bar_mapping::BarMapping;
use crate::vfio::space::Attachable;

/// Configuration space as the host gives access to it.
pub(crate) trait ConfigAccess: Send + Sync {
    /// Bytes of configuration space: 256, or 4096 with extended configuration space.
    fn config_size(&self) -> u64;
    /// Reads bytes; on failure they are left as they are.
    fn read_config(&self, offset: u16, data: &mut [u8]);
    /// Writes bytes.
    fn write_config(&self, offset: u16, data: &[u8]);
}

/// A BAR as the host gives access to it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Region {
    /// Size in bytes; 0: there is no such BAR.
    pub(crate) size: u64,
    /// It can be read.
    pub(crate) readable: bool,
    /// It can be written.
    pub(crate) writable: bool,
    /// The areas that can be mapped, as offset and size, in no order and unchecked.
    pub(crate) mappable: Vec<(u64, u64)>,
}

/// Which kind of interrupt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IrqKind {
    /// INTx. The host masks it each time that it comes ([`HostFunction::unmask_intx_by`]).
    Intx,
    /// MSI.
    Msi,
    /// MSI-X.
    Msix,
    /// A notice of the host's: the device had an uncorrectable error. PCI Express only.
    Error,
    /// A notice of the host's: it asks for the device.
    Request,
}

/// A function of the host.
pub(crate) trait HostFunction: ConfigAccess {
    /// BAR `bar`, 0 to 5.
    fn region(&self, bar: u8) -> Region;
    /// Reads in a BAR; on failure the bytes are left as they are.
    fn read_region(&self, bar: u8, offset: u64, data: &mut [u8]);
    /// Writes in a BAR.
    fn write_region(&self, bar: u8, offset: u64, data: &[u8]);
    /// Maps a part of a BAR into this process.
    fn map_region(&self, bar: u8, offset: u64, len: usize, read_only: bool) -> io::Result<BarMapping>;
    /// How many vectors of a kind it has.
    fn irq_count(&self, kind: IrqKind) -> u32;
    /// Turns interrupts of a kind on: vector n writes event n.
    fn enable_irqs(&self, kind: IrqKind, events: Vec<&EventFd>) -> io::Result<()>;
    /// Has the host unmask INTx, which is on, each time that `event` is written: it comes again then if the device still asks.
    fn unmask_intx_by(&self, event: &EventFd) -> io::Result<()>;
    /// Turns interrupts of a kind off.
    fn disable_irqs(&self, kind: IrqKind) -> io::Result<()>;
    /// Resets it; `false` if the host knows no way to. There may be nothing to do the first time after it was opened. Fails with
    /// `WouldBlock` while the host holds it, as when it takes it from its driver.
    fn reset(&self) -> io::Result<bool>;
    /// Attaches it to another address space, as long as it is open.
    fn attachable(&self) -> Weak<dyn Attachable>;
}
