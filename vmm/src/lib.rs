// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Carom: command line, VM life cycle, memory, vCPUs, boot and wiring.
//!
//! [`carom_api`] says what the user wants, [`control`] decides what becomes of the VM, [`vm`] builds and runs it, its
//! devices by [`parts`]. [`machine`] is
//! the ground that these stand on, [`kvm`] the kernel's side, [`arch`] what differs between processor architectures.

pub mod address_space;
pub mod affinity;
pub mod api;
pub mod arch;
pub mod console;
pub mod control;
pub mod crash_file;
pub mod event_monitor;
pub mod file_bounds;
pub mod file_limits;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod inherited;
pub mod kvm;
pub mod log_flood;
pub mod log_lines;
pub mod log_stream;
pub mod machine;
pub mod memory;
pub mod output_file;
pub mod parts;
pub mod queued_writer;
pub mod signal_actions;
pub mod snapshot;
pub mod tap;
pub mod thread_roles;
pub mod time_slice;
pub mod vcpu;
pub mod vm;
