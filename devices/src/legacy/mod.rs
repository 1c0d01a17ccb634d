// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Devices of the PC that are no PCI functions.

pub mod control_port;
pub mod cpu_hotplug;
pub mod memory_devices;
pub mod power;
pub mod serial;
