// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Code for one processor architecture. The rest of the VMM uses this code only through this module, and contains no name of an
//! architecture.
//!
//! An architecture provides:
//!
//! - its address map ([`layout`])
//! - the boot contents of the guest ([`boot`], [`acpi`], [`smbios`])
//! - the state of its vCPUs ([`registers`], [`cpuid`]) and interrupt controllers ([`irqchip`])
//! - the devices that are not on a bus ([`board`])

#[cfg(not(target_arch = "x86_64"))]
compile_error!("Carom runs on x86-64 only");

mod x86_64;

pub use x86_64::*;
