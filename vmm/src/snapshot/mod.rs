// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A VM on disk: a directory of three files, as Cloud Hypervisor has them.
//!
//! | file | what |
//! | --- | --- |
//! | `config.json` | the configuration, as `vm.create` takes it |
//! | `memory-ranges` | the bytes of RAM and of bounce windows, with holes where all is zero |
//! | `state.json` | [`VmState`] |
//!
//! `state.json` comes last, under its name only once all else is on the disk: a directory without it is no snapshot. One that was
//! answered outlives a loss of power; where the client made the directory, the client sees to the name of that. What is read is checked
//! as a request is: it may come from anybody.

mod directory;
mod older;
mod ram_file;
#[cfg(test)]
pub(crate) mod tests;

#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use directory::parse;
pub use directory::{NewSnapshot, Snapshot};
#[cfg(test)]
pub(crate) use older::fill_in_window_aperture;
pub use ram_file::{RamFile, RamFileWriter};

#[cfg(doc)]
use crate::vm_state::VmState;
