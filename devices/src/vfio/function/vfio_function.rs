// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Access to a host function through VFIO: configuration space, BARs, interrupts and resets.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use vfio_bindings::bindings::vfio::{
    VFIO_PCI_CONFIG_REGION_INDEX, VFIO_PCI_ERR_IRQ_INDEX, VFIO_PCI_INTX_IRQ_INDEX, VFIO_PCI_MSI_IRQ_INDEX,
    VFIO_PCI_MSIX_IRQ_INDEX, VFIO_PCI_REQ_IRQ_INDEX, VFIO_REGION_INFO_FLAG_MMAP, VFIO_REGION_INFO_FLAG_READ,
    VFIO_REGION_INFO_FLAG_WRITE,
};
use vfio_ioctls::VfioRegionInfoCap;
use vmm_sys_util::eventfd::EventFd;

use super::bar_mapping::BarMapping;
use super::host_function::{ConfigAccess, HostFunction, IrqKind, Region};
use super::open_device::OpenDevice;
use super::sysfs::HostFunctionPath;
use crate::vfio::error::VfioPciError;
use crate::vfio::ioctl::{self, IrqAction};
use crate::vfio::space::{Attachable, DmaSpace};

/// Host function accessed through VFIO.
pub(crate) struct VfioFunction {
    device: Arc<OpenDevice>,
    has_reset: bool,
    /// True until the first call of `reset`, if opening the function has reset it.
    is_new: AtomicBool,
}

impl VfioFunction {
    pub(crate) fn open(function: &HostFunctionPath, space: &DmaSpace) -> Result<Self, VfioPciError> {
        let device = OpenDevice::open(function, space)?;
        let has_reset = ioctl::has_reset(&*device).map_err(|source| VfioPciError::Host {
            what: format!("cannot ask VFIO whether {} can be reset", function.name()),
            source,
        })?;
        let is_new = function.is_reset_when_opened().into();
        Ok(Self { device: Arc::new(device), has_reset, is_new })
    }
}

impl ConfigAccess for VfioFunction {
    fn config_size(&self) -> u64 {
        self.device.get_region_size(VFIO_PCI_CONFIG_REGION_INDEX)
    }
    fn read_config(&self, offset: u16, data: &mut [u8]) {
        self.device.region_read(VFIO_PCI_CONFIG_REGION_INDEX, data, offset.into());
    }
    fn write_config(&self, offset: u16, data: &[u8]) {
        self.device.region_write(VFIO_PCI_CONFIG_REGION_INDEX, data, offset.into());
    }
}

impl HostFunction for VfioFunction {
    fn region(&self, bar: u8) -> Region {
        let index = u32::from(bar);
        let flags = self.device.get_region_flags(index);
        let size = self.device.get_region_size(index);
        let mut mappable = Vec::new();
        if flags & VFIO_REGION_INFO_FLAG_MMAP != 0 {
            let areas = self.device.get_region_caps(index).into_iter().find_map(|cap| match cap {
                VfioRegionInfoCap::SparseMmap(sparse) => Some(sparse.areas),
                _ => None,
            });
            mappable = areas
                .map_or_else(|| vec![(0, size)], |areas| areas.iter().map(|area| (area.offset, area.size)).collect());
        }
        Region {
            size,
            readable: flags & VFIO_REGION_INFO_FLAG_READ != 0,
            writable: flags & VFIO_REGION_INFO_FLAG_WRITE != 0,
            mappable,
        }
    }

    fn read_region(&self, bar: u8, offset: u64, data: &mut [u8]) {
        self.device.region_read(bar.into(), data, offset);
    }

    fn write_region(&self, bar: u8, offset: u64, data: &[u8]) {
        self.device.region_write(bar.into(), data, offset);
    }

    fn map_region(&self, bar: u8, offset: u64, len: usize, read_only: bool) -> io::Result<BarMapping> {
        let start = self.device.get_region_offset(bar.into());
        let offset =
            start.checked_add(offset).ok_or_else(|| io::Error::other("the offset in the device's file overflows"))?;
        BarMapping::new(&**self.device, offset, len, read_only)
    }

    fn irq_count(&self, kind: IrqKind) -> u32 {
        self.device.get_irq_info(irq_index(kind)).map_or(0, |irq| irq.count)
    }

    fn enable_irqs(&self, kind: IrqKind, events: Vec<&EventFd>) -> io::Result<()> {
        ioctl::set_irqs(&**self.device, irq_index(kind), IrqAction::Trigger, &events)
    }

    fn unmask_intx_by(&self, event: &EventFd) -> io::Result<()> {
        ioctl::set_irqs(&**self.device, VFIO_PCI_INTX_IRQ_INDEX, IrqAction::Unmask, &[event])
    }

    fn disable_irqs(&self, kind: IrqKind) -> io::Result<()> {
        ioctl::set_irqs(&**self.device, irq_index(kind), IrqAction::Trigger, &[])
    }

    fn reset(&self) -> io::Result<bool> {
        // Do not reset a new function again, because a function-level reset takes 100 ms or more (PCI Express Base, section 6.6.2).
        if self.has_reset && !self.is_new.swap(false, Ordering::Relaxed) {
            ioctl::reset(&**self.device)?;
        }
        Ok(self.has_reset)
    }

    fn attachable(&self) -> Weak<dyn Attachable> {
        let device: Arc<dyn Attachable> = self.device.clone();
        Arc::downgrade(&device)
    }
}

fn irq_index(kind: IrqKind) -> u32 {
    match kind {
        IrqKind::Intx => VFIO_PCI_INTX_IRQ_INDEX,
        IrqKind::Msi => VFIO_PCI_MSI_IRQ_INDEX,
        IrqKind::Msix => VFIO_PCI_MSIX_IRQ_INDEX,
        IrqKind::Error => VFIO_PCI_ERR_IRQ_INDEX,
        IrqKind::Request => VFIO_PCI_REQ_IRQ_INDEX,
    }
}
