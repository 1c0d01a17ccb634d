// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The rig: runs a command in an emulated machine that has KVM, an IOMMU and devices to pass through, see `docs/rig.md`.
//!
//! [`Options`] describe the machine and the command. [`run`] prepares kernel, initramfs and emulator (`carom_tools::rig`), writes
//! the machine's script ([`job`], [`places`]), starts the machine ([`qemu`]) and watches it until its end ([`machine`]).

mod job;
mod machine;
mod options;
mod places;
mod qemu;
mod terminal;

pub use machine::{End, run};
pub use options::{Accelerator, Kernel, Options};

/// Help text of `scripts/rig`.
pub const HELP: &str = include_str!("help.txt");
