// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Devices of a PC at fixed I/O ports. Devices that ACPI defines belong in [`acpi`](crate::acpi).

pub mod cmos;
pub mod control_port;
pub mod keyboard_reset;
pub mod serial;
