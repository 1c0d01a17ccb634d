// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A server's device as a host function. So the PCI front end for VFIO also serves this device.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Weak};

use log::warn;
use vmm_sys_util::eventfd::EventFd;

use super::client::{Client, Description};
use super::connection::CallError;
use super::mastering::Mastering;
use super::wire::{CONFIG_REGION, MSI_IRQS, MSIX_IRQS};
use crate::event_fd::borrow;
use crate::pci::regs;
use crate::throttle::Throttle;
use crate::vfio::function::BarMapping;
use crate::vfio::function::{ConfigAccess, HostFunction, IrqKind, Region};
use crate::vfio::space::Attachable;
use crate::vfio::space::DmaSpace;

/// Server's device, accessed through a [`Client`]. If the server rejects a read, the data is all ones. If the server rejects a write,
/// nothing happens. After the server is gone, all reads return ones and all writes do nothing. These accesses are not logged.
pub(super) struct UserFunction {
    client: Arc<Client>,
    description: Description,
    mastering: Arc<Mastering>,
    throttle: Throttle,
}

impl UserFunction {
    pub(super) fn new(client: Arc<Client>, description: Description, mastering: Arc<Mastering>) -> Self {
        Self { client, description, mastering, throttle: Throttle::default() }
    }

    fn note(&self, what: &str, outcome: Result<(), CallError>) {
        if let Err(error @ CallError::Refused(_)) = outcome
            && self.throttle.pass()
        {
            warn!("{}: cannot {what}: {error}", self.client.name());
        }
    }
}

/// Type without values, because a server's device is never attached to an address space of the host.
enum NeverAttached {}

impl Attachable for NeverAttached {
    fn attach(&self, _: &DmaSpace) -> io::Result<()> {
        match *self {}
    }
}

impl ConfigAccess for UserFunction {
    fn config_size(&self) -> u64 {
        self.description.config.size.min(regs::CONFIG_SIZE.into())
    }
    fn read_config(&self, offset: u16, data: &mut [u8]) {
        let outcome = self.client.read_region(CONFIG_REGION, offset.into(), data);
        self.note("read configuration space", outcome);
    }
    fn write_config(&self, offset: u16, data: &[u8]) {
        // Update bus mastering before the server sees the write. A server may do DMA before its answer arrives, and
        // must not do DMA once bus mastering is off.
        self.mastering.follow(offset, data);
        let outcome = self.client.write_region(CONFIG_REGION, offset.into(), data);
        self.note("write configuration space", outcome);
    }
}

impl HostFunction for UserFunction {
    /// Returns a region without mappable areas, because a server could truncate a mapped file. The guest's next access would then end
    /// the VM.
    fn region(&self, bar: u8) -> Region {
        let region = self.description.bars.get(usize::from(bar)).copied().unwrap_or_default();
        Region { size: region.size, readable: region.readable, writable: region.writable, mappable: Vec::new() }
    }

    fn read_region(&self, bar: u8, offset: u64, data: &mut [u8]) {
        if self.region(bar).readable {
            let outcome = self.client.read_region(bar.into(), offset, data);
            self.note("read a BAR", outcome);
        }
    }

    fn write_region(&self, bar: u8, offset: u64, data: &[u8]) {
        if self.region(bar).writable {
            let outcome = self.client.write_region(bar.into(), offset, data);
            self.note("write a BAR", outcome);
        }
    }

    fn map_region(&self, _: u8, _: u64, _: usize, _: bool) -> io::Result<BarMapping> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn irq_count(&self, kind: IrqKind) -> u32 {
        match kind {
            IrqKind::Msi => self.description.irqs.0,
            IrqKind::Msix => self.description.irqs.1,
            // libvfio-user, the usual library of servers, signals INTx as an edge and cannot mask INTx. A level-triggered line needs a
            // source that can be masked.
            IrqKind::Intx => 0,
            // A server sends no notices. To remove its device, a server ends the connection. A notice could stop the VM, and a server must
            // not be able to stop the VM.
            IrqKind::Error | IrqKind::Request => 0,
        }
    }

    fn enable_irqs(&self, kind: IrqKind, events: Vec<&EventFd>) -> io::Result<()> {
        let index = irq_index(kind)?;
        let events: Vec<BorrowedFd<'_>> = events.into_iter().map(borrow).collect();
        let outcome = self.client.enable_irqs(index, &events);
        if let Err(CallError::Refused(_)) = outcome {
            // Disable all interrupts of this kind, because the server may have enabled some of them.
            self.note("disable interrupts", self.client.disable_irqs(index));
        }
        unless_gone(outcome)
    }

    fn unmask_intx_by(&self, _: &EventFd) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn disable_irqs(&self, kind: IrqKind) -> io::Result<()> {
        unless_gone(self.client.disable_irqs(irq_index(kind)?))
    }

    /// If the server rejects the reset, ends the connection. Otherwise the guest would get the device in its old state after a reboot.
    fn reset(&self) -> io::Result<bool> {
        if !self.description.resets {
            return Ok(false);
        }
        if let Err(error @ CallError::Refused(_)) = self.client.reset() {
            self.client.give_up(&format!("did not reset the device ({error})"));
        }
        Ok(true)
    }

    fn attachable(&self) -> Weak<dyn Attachable> {
        Weak::<NeverAttached>::new()
    }
}

/// Ignores the failure of a request if the server is gone, because the loss of the server was reported already.
fn unless_gone(outcome: Result<(), CallError>) -> io::Result<()> {
    match outcome {
        Ok(()) | Err(CallError::Gone) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn irq_index(kind: IrqKind) -> io::Result<u32> {
    match kind {
        IrqKind::Msi => Ok(MSI_IRQS),
        IrqKind::Msix => Ok(MSIX_IRQS),
        IrqKind::Intx | IrqKind::Error | IrqKind::Request => Err(io::ErrorKind::Unsupported.into()),
    }
}
