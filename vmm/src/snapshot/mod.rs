// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Snapshot of a VM on disk: a directory of three files, as in Cloud Hypervisor.
//!
//! | file | contents |
//! | --- | --- |
//! | `config.json` | the configuration, in the form that `vm.create` accepts |
//! | `memory-ranges` | the bytes of RAM and of bounce windows, with holes for pages of zeros |
//! | `state.json` | [`VmState`] |
//!
//! `state.json` receives its final name last, when everything else is on the disk. A directory without `state.json` is not a snapshot. When
//! the client receives the answer to `vm.snapshot`, the snapshot can already survive a power loss. If the client created the directory, the
//! client must flush the directory's name.
//!
//! A snapshot is validated like an API request, because it may come from an untrusted source.

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
