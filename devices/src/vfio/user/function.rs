// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A server's device as a function of the host, so that the PCI front end for VFIO serves it, too.

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

/// The device behind a client. A read that the server refuses gives all ones; a write that it refuses does nothing.
/// Once the server is gone, all accesses end so, without another line in the log.
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
            warn!("{}: {what}: {error}", self.client.name());
        }
    }
}

/// A server's device is never attached to an address space of the host.
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
        self.note("reading configuration space", outcome);
    }
    fn write_config(&self, offset: u16, data: &[u8]) {
        // Before the server knows: it may use it before its answer arrives, and must not afterwards.
        self.mastering.follow(offset, data);
        let outcome = self.client.write_region(CONFIG_REGION, offset.into(), data);
        self.note("writing configuration space", outcome);
    }
}

impl HostFunction for UserFunction {
    /// Nothing is mappable: a server could cut its file short, and the guest's next access would end the VM.
    fn region(&self, bar: u8) -> Region {
        let region = self.description.bars.get(usize::from(bar)).copied().unwrap_or_default();
        Region { size: region.size, readable: region.readable, writable: region.writable, mappable: Vec::new() }
    }

    fn read_region(&self, bar: u8, offset: u64, data: &mut [u8]) {
        if self.region(bar).readable {
            let outcome = self.client.read_region(bar.into(), offset, data);
            self.note("reading a BAR", outcome);
        }
    }

    fn write_region(&self, bar: u8, offset: u64, data: &[u8]) {
        if self.region(bar).writable {
            let outcome = self.client.write_region(bar.into(), offset, data);
            self.note("writing a BAR", outcome);
        }
    }

    fn map_region(&self, _: u8, _: u64, _: usize, _: bool) -> io::Result<BarMapping> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn irq_count(&self, kind: IrqKind) -> u32 {
        match kind {
            IrqKind::Msi => self.description.irqs.0,
            IrqKind::Msix => self.description.irqs.1,
            // What servers are made of (libvfio-user) signals it as an edge and cannot mask it, which makes no line.
            IrqKind::Intx => 0,
            // A server ends its connection to take a device away, and is not trusted to stop the VM.
            IrqKind::Error | IrqKind::Request => 0,
        }
    }

    fn enable_irqs(&self, kind: IrqKind, events: Vec<&EventFd>) -> io::Result<()> {
        let index = irq_index(kind)?;
        let events: Vec<BorrowedFd<'_>> = events.into_iter().map(borrow).collect();
        let outcome = self.client.enable_irqs(index, &events);
        if let Err(CallError::Refused(_)) = outcome {
            // Some of them may be on.
            self.note("turning interrupts off", self.client.disable_irqs(index));
        }
        unless_gone(outcome)
    }

    fn unmask_intx_by(&self, _: &EventFd) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn disable_irqs(&self, kind: IrqKind) -> io::Result<()> {
        unless_gone(self.client.disable_irqs(irq_index(kind)?))
    }

    /// If the server does not reset the device, its state would reach the next guest. So the connection ends.
    fn reset(&self) -> io::Result<bool> {
        if !self.description.resets {
            return Ok(false);
        }
        if let Err(error @ CallError::Refused(_)) = self.client.reset() {
            self.client.give_up(&format!("does not reset the device ({error})"));
        }
        Ok(true)
    }

    fn attachable(&self) -> Weak<dyn Attachable> {
        Weak::<NeverAttached>::new()
    }
}

/// A failure because the server is gone needs no report.
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
