// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Virtio over PCI, modern interface only (virtio 1.3, section 4.1).

mod common;
mod interrupts;
mod layout;
mod pci;

#[cfg(test)]
mod tests;

pub use pci::{TransportError, VirtioPciDevice};
