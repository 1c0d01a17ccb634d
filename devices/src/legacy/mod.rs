// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Devices of the PC that are no PCI functions.

pub mod cmos;
pub mod control_port;
pub mod cpu_hotplug;
pub mod generation_notice;
pub mod keyboard_reset;
pub mod memory_devices;
pub mod pm_timer;
pub mod power;
pub mod serial;
