// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Virtio over PCI, with only the modern interface (virtio 1.3, section 4.1).

mod bus_gate;
mod common;
mod doorbells;
mod interrupts;
mod layout;
mod lifecycle;
mod pci;
mod state;

#[cfg(test)]
mod tests;

pub use pci::{TransportError, VirtioPciDevice, VirtioPciParams};
