// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What differs between processor architectures. The rest of the VMM names this module, and no architecture.
//!
//! An architecture brings its address map ([`layout`]), what is loaded for the guest ([`boot`], [`acpi`], [`smbios`]), the state of its
//! vCPUs ([`registers`], [`cpuid`]) and interrupt controllers ([`irqchip`]), and the devices that sit on no bus
//! ([`board`]).

#[cfg(not(target_arch = "x86_64"))]
compile_error!("Carom runs on x86-64 only");

mod x86_64;

pub use x86_64::*;
