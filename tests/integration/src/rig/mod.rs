// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Runs a command in an emulated machine that has KVM, an IOMMU and devices to pass through: the rig, see `docs/rig.md`.
//!
//! [`Options`] say what is wanted; [`run`] gets kernel, initramfs and emulator ready (`carom_tools::rig`), writes what the machine is to do
//! ([`job`], [`places`]), starts it ([`qemu`]) and watches it to its end ([`machine`]).

mod job;
mod machine;
mod options;
mod places;
mod qemu;
mod terminal;

pub use machine::{End, run};
pub use options::{Accelerator, Kernel, Options};

/// The help of `scripts/rig`.
pub const HELP: &str = include_str!("help.txt");
