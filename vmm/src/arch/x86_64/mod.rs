// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Code for x86-64.

pub mod acpi;
pub mod board;
pub mod boot;
pub mod clock;
pub mod cpuid;
pub mod generation_id;
mod ioctl;
pub mod irqchip;
mod kvm_bytes;
pub mod layout;
mod msr;
pub mod registers;
pub mod saved;
mod saved_cpuid;
pub mod segments;
pub mod smbios;
mod tsc;
pub mod vcpu_state;
