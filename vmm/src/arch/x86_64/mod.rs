// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! x86-64.

pub mod acpi;
pub mod boot;
pub mod cpuid;
pub mod irqchip;
pub mod layout;
pub mod platform;
pub mod registers;
