// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Disk images: their files, locks and formats, and the operations on them.
//!
//! This module handles only the content of a disk. `io` hands operations to the host kernel, and `queue` handles the guest's requests.

mod backing;
pub(super) mod buffer;
pub(super) mod disk_image;
pub(super) mod error;
pub(super) mod host_file;
mod lock;
pub(super) mod op;
mod qcow2;
mod qcow2_header;
mod qcow2_storage;
mod vhd;
