// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Device models of Carom: PCI, the virtio transport and virtio devices, VFIO passthrough, devices of a PC, ACPI registers.
//!
//! This crate neither calls KVM nor parses command lines. The traits in [`platform`] describe what a device needs from the machine.
//! The VMM implements these traits.

pub mod acpi;
pub mod counters;
pub mod crash;
pub mod descriptors;
pub mod dma;
#[cfg(test)]
mod drop_reporter;
pub mod event_fd;
pub mod file_size;
mod first_error;
pub mod guest_visible;
pub mod handshake;
pub mod host_memory;
pub mod host_range;
pub mod inherited;
pub mod listening_socket;
mod local_socket;
pub mod pc;
pub mod pci;
pub mod peer_timeouts;
pub mod platform;
pub mod pvpanic;
pub mod ram;
pub mod rate_limit;
pub mod reclaim;
pub mod sandbox;
mod scheduling;
pub mod state;
mod sync;
mod throttle;
pub mod vfio;
pub mod virtio;
pub mod watchdog;
pub mod windows;
pub mod worker;
