// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tests with real guests, real KVM and real VFIO devices. `scripts/test` runs them in the rig. `docs/rig.md` explains how to run
//! them on another host.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::process::ExitCode;

use carom_integration::harness;

mod ahci;
mod api;
mod balloon;
mod boot;
mod bypass;
mod command_line;
mod console;
mod descriptors;
mod device_error;
mod disk;
mod disk_errors;
mod distribution;
mod drive_errors;
mod drive_metadata;
mod failing_allocations;
mod firmware;
mod hostile_guest;
mod hotplug;
mod inherited;
mod interrupts;
mod intx;
mod isolation;
mod kata;
mod kata_runtime;
mod kernel_package;
mod kexec;
mod killed;
mod lent;
mod lifecycle;
mod map_lists;
mod mapped;
mod memory_error;
mod memory_hotplug;
mod memory_limit;
mod net;
mod net_gone;
mod network;
mod numa;
mod patch;
mod pmem;
mod polling;
mod port_io;
mod printing;
mod qcow2;
mod rate_limit;
mod rng;
mod scraping;
mod segments;
mod service;
mod shared_cpu;
mod short_of_memory;
mod smbios;
mod snapshot;
mod soak;
mod stock;
mod support;
mod taken_back;
mod terminal;
mod unprivileged;
mod usb;
mod user_device;
mod vcpus;
mod vhost_user;
mod vhost_user_net;
mod vsock;
mod watchdog;
mod windows;

fn main() -> ExitCode {
    harness::main()
}
