// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The VMM: command line, API server, and the life cycle, memory, vCPUs, boot and devices of a VM.
//!
//! [`carom_api`] defines the user's configuration. [`control`] decides what happens to the VM, through the trait in [`machine`]. [`vm`]
//! builds and runs the VM, with devices from [`parts`]. These modules use [`memory`] (the guest's RAM), [`arch`] (code for the processor
//! architecture) and [`kvm`] (the kernel's interface).

pub mod address_space;
pub mod api;
pub mod arch;
pub mod console;
pub mod control;
pub mod error;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod kvm;
pub mod limits;
pub mod machine;
pub mod mailbox;
pub mod memory;
pub mod parts;
pub mod process;
pub mod snapshot;
pub mod tap;
pub mod vcpu;
pub mod vm;
pub mod vm_state;
