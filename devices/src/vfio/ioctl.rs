// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! VFIO requests that `vfio-ioctls` does not offer in the form that Carom needs.

use std::io;
use std::os::fd::AsRawFd;

use iommu_bounce::Permissions;
use vfio_bindings::bindings::vfio::{
    VFIO_BASE, VFIO_DEVICE_FLAGS_RESET, VFIO_DMA_MAP_FLAG_READ, VFIO_DMA_MAP_FLAG_WRITE, VFIO_DMA_UNMAP_FLAG_ALL,
    VFIO_IRQ_SET_ACTION_TRIGGER, VFIO_IRQ_SET_ACTION_UNMASK, VFIO_IRQ_SET_DATA_EVENTFD, VFIO_IRQ_SET_DATA_NONE,
    VFIO_TYPE, vfio_device_info, vfio_iommu_type1_dma_map, vfio_iommu_type1_dma_unmap, vfio_iommu_type1_info,
};
use vm_memory::VolatileSlice;
use vmm_sys_util::eventfd::EventFd;
use vmm_sys_util::ioctl::{ioctl, ioctl_with_mut_ptr, ioctl_with_mut_ref, ioctl_with_ptr, ioctl_with_ref};
use vmm_sys_util::ioctl_io_nr;

ioctl_io_nr!(VFIO_DEVICE_GET_INFO, VFIO_TYPE.into(), VFIO_BASE + 7);
ioctl_io_nr!(VFIO_DEVICE_SET_IRQS, VFIO_TYPE.into(), VFIO_BASE + 10);
ioctl_io_nr!(VFIO_DEVICE_RESET, VFIO_TYPE.into(), VFIO_BASE + 11);
ioctl_io_nr!(VFIO_IOMMU_GET_INFO, VFIO_TYPE.into(), VFIO_BASE + 12);
ioctl_io_nr!(VFIO_IOMMU_MAP_DMA, VFIO_TYPE.into(), VFIO_BASE + 13);
ioctl_io_nr!(VFIO_IOMMU_UNMAP_DMA, VFIO_TYPE.into(), VFIO_BASE + 14);

/// Returns the size of the request structure `T`, for its `argsz` field.
const fn argsz<T>() -> u32 {
    let size = size_of::<T>();
    assert!(size <= 4096);
    #[expect(clippy::cast_possible_truncation, reason = "checked above")]
    let size = size as u32;
    size
}

fn outcome(result: i32) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Maps `memory` at `iova` for the devices of `container`, and pins the memory.
pub(in crate::vfio) fn map_dma(
    container: &impl AsRawFd,
    iova: u64,
    memory: &VolatileSlice<'_>,
    permissions: Permissions,
) -> io::Result<()> {
    let mut flags = 0;
    if permissions.contains(Permissions::READ) {
        flags |= VFIO_DMA_MAP_FLAG_READ;
    }
    if permissions.contains(Permissions::WRITE) {
        flags |= VFIO_DMA_MAP_FLAG_WRITE;
    }
    let request = vfio_iommu_type1_dma_map {
        argsz: argsz::<vfio_iommu_type1_dma_map>(),
        flags,
        // Only the kernel uses the address, to pin the pages at this address.
        vaddr: memory.ptr_guard_mut().as_ptr() as u64,
        iova,
        size: memory.len() as u64,
    };
    // SAFETY: The kernel reads the structure, whose size is in `argsz`, and writes nothing. From now on the device may write the memory.
    // The memory is behind a `VolatileSlice`, so nothing in this process relies on its contents. The pages of the memory stay pinned until
    // they are unmapped, so the kernel cannot give these pages to another user.
    outcome(unsafe { ioctl_with_ref(container, VFIO_IOMMU_MAP_DMA(), &request) })
}

/// Unmaps `[iova, iova + size)` in `container`. Returns the number of bytes that were mapped in this range.
pub(in crate::vfio) fn unmap_dma(container: &impl AsRawFd, iova: u64, size: u64) -> io::Result<u64> {
    unmap(container, vfio_iommu_type1_dma_unmap { iova, size, ..Default::default() })
}

/// Unmaps everything in `container`. Returns the number of bytes that were mapped. Needs Linux 5.12.
pub(in crate::vfio) fn unmap_all(container: &impl AsRawFd) -> io::Result<u64> {
    unmap(container, vfio_iommu_type1_dma_unmap { flags: VFIO_DMA_UNMAP_FLAG_ALL, ..Default::default() })
}

fn unmap(container: &impl AsRawFd, mut request: vfio_iommu_type1_dma_unmap) -> io::Result<u64> {
    request.argsz = argsz::<vfio_iommu_type1_dma_unmap>();
    // SAFETY: The kernel reads and writes the structure, whose size is in `argsz`. No flag requests data after the structure.
    outcome(unsafe { ioctl_with_mut_ref(container, VFIO_IOMMU_UNMAP_DMA(), &mut request) })?;
    Ok(request.size)
}

/// Returns `vfio_iommu_type1_info` of the IOMMU of `container`, with its capabilities, as bytes.
pub(in crate::vfio) fn iommu_info(container: &impl AsRawFd) -> io::Result<Vec<u8>> {
    /// Maximum size that this function accepts from the kernel, in bytes.
    const LARGEST: u32 = 1 << 20;
    let mut size = argsz::<vfio_iommu_type1_info>();
    loop {
        // Allocate words, so that the structure is aligned.
        let mut words = vec![0u64; (size as usize).div_ceil(8)];
        words[0] = u64::from(size);
        // SAFETY: The kernel writes at most `size` bytes to the buffer. The buffer has at least `size` bytes, and is aligned.
        outcome(unsafe { ioctl_with_mut_ptr(container, VFIO_IOMMU_GET_INFO(), words.as_mut_ptr()) })?;
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let needed = u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        if needed <= size {
            return Ok(bytes);
        }
        if needed > LARGEST {
            return Err(io::Error::other(format!(
                "VFIO_IOMMU_GET_INFO needs a buffer of {needed} bytes, but Carom allocates at most {LARGEST}"
            )));
        }
        size = needed;
    }
}

/// True if the device can be reset.
pub(in crate::vfio) fn has_reset(device: &impl AsRawFd) -> io::Result<bool> {
    let mut info = vfio_device_info { argsz: argsz::<vfio_device_info>(), ..Default::default() };
    // SAFETY: The kernel writes at most `argsz` bytes, which is the size of the structure.
    outcome(unsafe { ioctl_with_mut_ref(device, VFIO_DEVICE_GET_INFO(), &mut info) })?;
    Ok(info.flags & VFIO_DEVICE_FLAGS_RESET != 0)
}

/// Resets the device.
pub(in crate::vfio) fn reset(device: &impl AsRawFd) -> io::Result<()> {
    // SAFETY: The request takes no argument.
    outcome(unsafe { ioctl(device, VFIO_DEVICE_RESET()) })
}

/// Purpose of the eventfds that are set for an interrupt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::vfio) enum IrqAction {
    /// The kernel writes the eventfds when the device interrupts. Without eventfds, the interrupts are disabled.
    Trigger,
    /// A write to an eventfd unmasks the interrupt, so that the device can interrupt again.
    Unmask,
}

/// Sets the eventfds of the interrupts of kind `index` (`VFIO_PCI_*_IRQ_INDEX`), starting at interrupt 0.
///
/// # Errors
/// The kernel's errors, and `ENOSPC` if the host has fewer interrupts available than `events` has entries. In this case no interrupt is
/// enabled.
pub(in crate::vfio) fn set_irqs(
    device: &impl AsRawFd,
    index: u32,
    action: IrqAction,
    events: &[&EventFd],
) -> io::Result<()> {
    let request = irq_set(index, action, events)?;
    // SAFETY: The kernel reads the structure and the descriptors after it. `request` holds as many descriptors as its count field
    // says.
    let result = unsafe { ioctl_with_ptr(device, VFIO_DEVICE_SET_IRQS(), request.as_ptr()) };
    outcome(result)?;
    // A positive result is the number of interrupts available (`vfio_msi_enable()` of
    // drivers/vfio/pci/vfio_pci_intrs.c).
    if result > 0 { Err(io::Error::from_raw_os_error(libc::ENOSPC)) } else { Ok(()) }
}

/// Returns `vfio_irq_set`, followed by its descriptors, as 32-bit words. All fields of the structure are 32-bit
/// words.
fn irq_set(index: u32, action: IrqAction, events: &[&EventFd]) -> io::Result<Vec<u32>> {
    let count = u32::try_from(events.len()).map_err(io::Error::other)?;
    let action = match action {
        IrqAction::Trigger => VFIO_IRQ_SET_ACTION_TRIGGER,
        IrqAction::Unmask => VFIO_IRQ_SET_ACTION_UNMASK,
    };
    let data = if events.is_empty() { VFIO_IRQ_SET_DATA_NONE } else { VFIO_IRQ_SET_DATA_EVENTFD };
    let mut words = vec![0, action | data, index, 0, count];
    words.extend(events.iter().map(|event| event.as_raw_fd().cast_unsigned()));
    words[0] = u32::try_from(size_of_val(words.as_slice())).map_err(io::Error::other)?;
    Ok(words)
}

#[cfg(test)]
mod tests {
    use vfio_bindings::bindings::vfio::vfio_irq_set;
    use vmm_sys_util::eventfd::EFD_NONBLOCK;

    use super::*;

    #[test]
    fn irq_set_request_matches_the_kernel_field_layout() {
        let events = [EventFd::new(EFD_NONBLOCK).unwrap(), EventFd::new(EFD_NONBLOCK).unwrap()];
        let words = irq_set(2, IrqAction::Trigger, &[&events[0], &events[1]]).unwrap();
        assert_eq!(words[..5], [28, VFIO_IRQ_SET_ACTION_TRIGGER | VFIO_IRQ_SET_DATA_EVENTFD, 2, 0, 2]);
        assert_eq!(words[5..], [events[0].as_raw_fd().cast_unsigned(), events[1].as_raw_fd().cast_unsigned()]);
        assert_eq!(size_of::<vfio_irq_set>(), 5 * size_of::<u32>());
        let none = irq_set(1, IrqAction::Trigger, &[]).unwrap();
        assert_eq!(none, [20, VFIO_IRQ_SET_ACTION_TRIGGER | VFIO_IRQ_SET_DATA_NONE, 1, 0, 0]);
    }
}
