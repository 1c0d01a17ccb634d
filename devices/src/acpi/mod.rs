// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Registers of the ACPI platform. A machine can place each register at an I/O port or in memory. Devices that exist only on a PC are in
//! [`pc`](crate::pc).

pub mod cpu_hotplug;
pub mod generation_notice;
pub mod memory_devices;
pub mod pm_timer;
pub mod power;
