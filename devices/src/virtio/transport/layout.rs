// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Layout of the transport's structures in the BARs, and the capabilities that describe this layout (virtio 1.3, section 4.1.4).

use crate::pci::regs::{CAP_MSIX, CAP_PM, CAP_VENDOR, PM_CONTROL_STATE};
use crate::pci::{Bar, BarKind, Capability, ConfigSpace, Identity};
use crate::virtio::SharedRegion;

/// BAR with the structures and the MSI-X table.
pub(super) const STRUCTURES_BAR: u8 = 0;
/// I/O port BAR for notifications. Notifications by a port write are faster: the VM exit of a port write gives the hypervisor the address
/// and the value. After a write to memory, the hypervisor must first walk page tables and decode the instruction.
pub(super) const NOTIFY_BAR: u8 = 1;
/// 64-bit BAR with only the shared memory region. A 64-bit BAR also uses the next BAR register (3).
pub(super) const SHARED_BAR: u8 = 2;
/// Size of [`STRUCTURES_BAR`]: eight pages. Each structure has its own page, so that a hypervisor can trap the structures separately.
pub(super) const STRUCTURES_SIZE: u64 = 0x8000;

/// Offset of the common configuration in the BAR.
pub(super) const COMMON: u64 = 0x0000;
/// Size of the common configuration in bytes. The structure ends before `queue_notify_data`, because the device does not offer the feature
/// for this field.
pub(super) const COMMON_SIZE: usize = 56;
/// Offset of the ISR status in the BAR. The status is 1 byte.
pub(super) const ISR: u64 = 0x1000;
/// Offset of the device configuration in the BAR.
pub(super) const DEVICE: u64 = 0x2000;
/// Offset of the notification page in the BAR, for drivers that cannot use [`NOTIFY_BAR`].
pub(super) const NOTIFY: u64 = 0x3000;
/// Distance in bytes between the notification addresses of two consecutive queues.
pub(super) const NOTIFY_MULTIPLIER: u32 = 4;
/// Offset of the MSI-X table in the BAR.
pub(super) const MSIX_TABLE: u64 = 0x4000;
/// Offset of the MSI-X pending bits in the BAR.
pub(super) const MSIX_PENDING: u64 = 0x5000;
/// Maximum size of each structure in bytes.
pub(super) const PAGE: u64 = 0x1000;

/// Maximum number of queues of a device. The MSI-X table's page has room for 256 vectors: one for each queue, and one for configuration
/// changes.
pub(super) const MAX_QUEUES: usize = 255;

/// Vendor ID of virtio devices (virtio 1.3, section 4.1.2).
const VENDOR: u16 = 0x1af4;
/// PCI device ID of virtio device type 0 (virtio 1.3, section 4.1.2).
const FIRST_DEVICE: u16 = 0x1040;

/// `cfg_type` of the capabilities (virtio 1.3, section 4.1.4).
const CFG_COMMON: u8 = 1;
const CFG_NOTIFY: u8 = 2;
const CFG_ISR: u8 = 3;
const CFG_DEVICE: u8 = 4;
const CFG_PCI: u8 = 5;
const CFG_SHARED_MEMORY: u8 = 8;

/// Offsets of fields from the start of the PCI configuration access capability.
pub(super) mod access {
    /// BAR to access (u8).
    pub(in super::super) const BAR: u16 = 4;
    /// Offset in the BAR (le32).
    pub(in super::super) const OFFSET: u16 = 8;
    /// Width of the access in bytes (le32).
    pub(in super::super) const LENGTH: u16 = 12;
    /// Data to write, or data that was read (u8\[4]).
    pub(in super::super) const DATA: u16 = 16;
}

/// Properties of the device that determine its configuration space.
pub(super) struct Shape {
    /// Virtio device type.
    pub(super) device_type: u16,
    /// PCI class.
    pub(super) class: u32,
    /// Number of queues.
    pub(super) queues: u16,
    /// Size of the device configuration in bytes.
    pub(super) config_len: u32,
    /// Shared memory region.
    pub(super) shared: Option<SharedRegion>,
}

/// Configuration space, and the offsets of the capabilities whose registers have side effects.
pub(super) struct Space {
    /// Contents of the configuration space.
    pub(super) config: ConfigSpace,
    /// Offset of the MSI-X capability.
    pub(super) msix: u16,
    /// Offset of the power management capability.
    pub(super) power: u16,
    /// Offset of the PCI configuration access capability.
    pub(super) access: u16,
}

/// Builds the configuration space.
pub(super) fn build(shape: &Shape) -> Space {
    let device = FIRST_DEVICE + shape.device_type;
    let mut config = ConfigSpace::new(Identity {
        vendor: VENDOR,
        device,
        subsystem_vendor: VENDOR,
        subsystem: device,
        class: shape.class,
        revision: 1,
    });
    let kind = BarKind::Memory32 { prefetchable: false };
    config.add_bar(Bar { index: STRUCTURES_BAR, kind, size: STRUCTURES_SIZE });
    let notify_len = u32::from(shape.queues) * NOTIFY_MULTIPLIER;
    let notify_size = u64::from(notify_len).next_power_of_two().max(4);
    config.add_bar(Bar { index: NOTIFY_BAR, kind: BarKind::Io, size: notify_size });
    if let Some(shared) = shape.shared {
        let kind = BarKind::Memory64 { prefetchable: true };
        config.add_bar(Bar { index: SHARED_BAR, kind, size: shared.size.next_power_of_two() });
    }
    add(&mut config, &structure(CFG_COMMON, STRUCTURES_BAR, COMMON, low(COMMON_SIZE as u64)), &[]);
    add(&mut config, &structure(CFG_ISR, STRUCTURES_BAR, ISR, 1), &[]);
    if shape.config_len != 0 {
        add(&mut config, &structure(CFG_DEVICE, STRUCTURES_BAR, DEVICE, shape.config_len), &[]);
    }
    // A driver uses the first notification capability that it supports (virtio 1.3, section 4.1.4.1). So the I/O port BAR comes first.
    for (bar, offset) in [(NOTIFY_BAR, 0), (STRUCTURES_BAR, NOTIFY)] {
        let mut notify = structure(CFG_NOTIFY, bar, offset, notify_len);
        notify.extend(NOTIFY_MULTIPLIER.to_le_bytes());
        add(&mut config, &notify, &[]);
    }
    if let Some(shared) = shape.shared {
        add(&mut config, &shared_memory(shared), &[]);
    }
    let msix = add_msix(&mut config, shape.queues + 1);
    let power = add_power_management(&mut config);
    let access = add_access(&mut config);
    Space { config, msix, power, access }
}

/// Converts an offset or size in a BAR to 32 bits.
fn low(value: u64) -> u32 {
    u32::try_from(value).expect("offsets and sizes within the BAR are below 4 GiB")
}

/// Returns the body of a virtio capability of type `kind` that points into BAR `bar`.
fn structure(kind: u8, bar: u8, offset: u64, len: u32) -> Vec<u8> {
    let mut body = vec![0, kind, bar, 0, 0, 0];
    body.extend(low(offset).to_le_bytes());
    body.extend(len.to_le_bytes());
    body
}

/// Returns the body of a shared memory capability. Unlike other virtio capabilities, this capability also contains the high halves of the
/// offset and the length.
fn shared_memory(shared: SharedRegion) -> Vec<u8> {
    let mut body = vec![0, CFG_SHARED_MEMORY, SHARED_BAR, shared.id, 0, 0];
    let len = shared.size.to_le_bytes();
    body.extend([0; 4]);
    body.extend(&len[..4]);
    body.extend([0; 4]);
    body.extend(&len[4..]);
    body
}

/// Adds a virtio capability. Sets the first byte of its body to the length of the capability.
fn add(config: &mut ConfigSpace, body: &[u8], writable: &[u8]) -> u16 {
    let mut body = body.to_vec();
    body[0] = u8::try_from(body.len() + 2).expect("a virtio capability has at most 24 bytes");
    config.add_capability(Capability { id: CAP_VENDOR, body: &body, writable })
}

fn add_msix(config: &mut ConfigSpace, vectors: u16) -> u16 {
    let mut body = (vectors - 1).to_le_bytes().to_vec();
    body.extend((low(MSIX_TABLE) | u32::from(STRUCTURES_BAR)).to_le_bytes());
    body.extend((low(MSIX_PENDING) | u32::from(STRUCTURES_BAR)).to_le_bytes());
    config.add_capability(Capability { id: CAP_MSIX, body: &body, writable: &[0, 0xc0] })
}

/// Adds the power management capability, so that the device keeps its state while the guest sleeps.
///
/// Without this capability, or without `No_Soft_Reset`, Linux resets the device at wake-up. The reset would delete the mappings of a
/// virtio-iommu.
fn add_power_management(config: &mut ConfigSpace) -> u16 {
    const VERSION: u8 = 3;
    const NO_SOFT_RESET: u8 = 8;
    // The guest can write only the power state. Outside D0, DMA and interrupts stop, but the guest can still access the registers.
    let body = [VERSION, 0, NO_SOFT_RESET, 0, 0, 0];
    let state = PM_CONTROL_STATE.to_le_bytes();
    config.add_capability(Capability { id: CAP_PM, body: &body, writable: &[0, 0, state[0], state[1]] })
}

fn add_access(config: &mut ConfigSpace) -> u16 {
    let mut body = structure(CFG_PCI, STRUCTURES_BAR, 0, 0);
    body.extend([0; 4]);
    // `writable` begins at offset 2 of the capability. The driver can write `bar` (`writable[2]`), and `offset`, `length` and `data`
    // (`writable[6..18]`).
    let writable = [0, 0, 0xff, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff];
    add(config, &body, &writable)
}
