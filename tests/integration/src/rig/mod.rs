// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Runs a command in an emulated machine that has KVM, an IOMMU and devices to pass through: the rig, see `docs/rig.md`.
//!
//! [`Options`] say what is wanted; [`run`] gets kernel, initramfs and emulator ready ([`assets`]), writes what the machine is to do
//! ([`job`], [`places`]), starts it ([`qemu`]) and watches it to its end ([`machine`]).

mod assets;
mod job;
mod machine;
mod options;
mod places;
mod qemu;
mod tree;
mod work_dir;

use std::env;
use std::path::{Path, PathBuf};

pub use machine::{End, run};
pub use options::{Accelerator, Kernel, Options};
pub use tree::run_command;

/// The help of `scripts/rig`.
pub const HELP: &str = include_str!("help.txt");

/// Top of the checkout: `CAROM_ROOT`, which the scripts set, else where this was built.
#[must_use]
pub fn checkout() -> PathBuf {
    env::var_os("CAROM_ROOT").map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../.."), PathBuf::from)
}
