// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Disk images: their files, locks and formats, and the operations that they take.
//!
//! Everything here is about the content of a disk. How operations reach the host's kernel belongs to `io`, and requests of the guest
//! belong to `queue`.

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
