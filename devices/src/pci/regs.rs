// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Registers of PCI configuration space (PCI Local Bus 3.0 section 6, PCI Express Base section 7).

/// Size of a function's extended configuration space in bytes.
pub const CONFIG_SIZE: u16 = 4096;
/// Vendor ID, 16 bits.
pub const VENDOR_ID: u16 = 0x00;
/// Device ID, 16 bits.
pub const DEVICE_ID: u16 = 0x02;
/// Command register, 16 bits.
pub const COMMAND: u16 = 0x04;
/// Status register, 16 bits.
pub const STATUS: u16 = 0x06;
/// Revision, programming interface, subclass, class: 8 bits each.
pub const REVISION: u16 = 0x08;
/// Header type, 8 bits.
pub const HEADER_TYPE: u16 = 0x0e;
/// First of the six base address registers, 32 bits each.
pub const BAR0: u16 = 0x10;
/// CardBus CIS pointer, 32 bits.
pub const CARDBUS_CIS: u16 = 0x28;
/// Subsystem vendor ID, 16 bits.
pub const SUBSYSTEM_VENDOR_ID: u16 = 0x2c;
/// Subsystem ID, 16 bits.
pub const SUBSYSTEM_ID: u16 = 0x2e;
/// Expansion ROM base address register, 32 bits.
pub const ROM_BAR: u16 = 0x30;
/// Offset of the first capability, 8 bits.
pub const CAPABILITIES: u16 = 0x34;
/// Interrupt line, 8 bits.
pub const INTERRUPT_LINE: u16 = 0x3c;
/// Interrupt pin, 8 bits; 0 for none.
pub const INTERRUPT_PIN: u16 = 0x3d;
/// First byte after the standard header, where capabilities may start.
pub const HEADER_END: u16 = 0x40;
/// First byte of extended configuration space.
pub const EXTENDED: u16 = 0x100;

/// Command bit: the function answers in I/O port space.
pub const COMMAND_IO: u16 = 1 << 0;
/// Command bit: the function answers in memory space.
pub const COMMAND_MEMORY: u16 = 1 << 1;
/// Command bit: the function may be a bus master, which DMA and MSI require.
pub const COMMAND_BUS_MASTER: u16 = 1 << 2;
/// Command bit: INTx is disabled.
pub const COMMAND_INTX_DISABLE: u16 = 1 << 10;
/// Status bit: the function has a list of capabilities.
pub const STATUS_CAPABILITIES: u16 = 1 << 4;

/// Capability ID of power management.
pub const CAP_PM: u8 = 0x01;
/// Control and status register of the power management capability, relative to the capability.
pub const PM_CONTROL: u16 = 4;
/// Power management control bits: the power state, 0 for D0 and 3 for D3hot.
pub const PM_CONTROL_STATE: u16 = 3;
/// Capability ID of MSI.
pub const CAP_MSI: u8 = 0x05;
/// Capability ID of vendor-specific capabilities, such as the capabilities of virtio.
pub const CAP_VENDOR: u8 = 0x09;
/// Capability ID of PCI Express.
pub const CAP_EXPRESS: u8 = 0x10;
/// Capability ID of MSI-X.
pub const CAP_MSIX: u8 = 0x11;

/// MSI message control bit: MSI is on.
pub const MSI_ENABLE: u16 = 1 << 0;
/// MSI message control bits: binary logarithm of the number of vectors in use.
pub const MSI_MULTIPLE_ENABLE: u16 = 0b111 << 4;
/// MSI message control bit: the address has 64 bits.
pub const MSI_WIDE: u16 = 1 << 7;
/// MSI message control bit: the capability has mask bits.
pub const MSI_MASKABLE: u16 = 1 << 8;
/// MSI-X message control bits: number of vectors, minus one.
pub const MSIX_TABLE_SIZE: u16 = 0x7ff;
