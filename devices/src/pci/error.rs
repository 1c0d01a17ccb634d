// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Errors of the root bus.

use std::ops::RangeInclusive;

use thiserror::Error;

use super::{Bar, PciAddress};

/// Reason why the root bus cannot be created, or a function cannot be added to it.
#[derive(Debug, Error)]
pub enum PciError {
    /// A window for BARs is empty, or wraps around the end of the address space.
    #[error("{what} window {window:#x?} for PCI BARs is empty, or wraps around the end of the address space")]
    Window {
        /// Kind of window.
        what: &'static str,
        /// Addresses of the window.
        window: RangeInclusive<u64>,
    },
    /// The address is not function 0 of a device on the root bus of an existing segment.
    #[error("PCI address {0} is unusable: use an existing segment, bus 00, device 0 to 31 and function 0")]
    NoSuchPlace(PciAddress),
    /// Another function has the address.
    #[error("PCI address {address} is already used by {by}: choose another address")]
    Occupied {
        /// Address that both functions request.
        address: PciAddress,
        /// Name of the function that has the address.
        by: String,
    },
    /// No window for BARs has room for a BAR.
    #[error("the address windows for PCI BARs have no room for BAR {} ({:#x} bytes) of {device}: use fewer devices on this PCI segment", bar.index, bar.size)]
    NoSpace {
        /// Name of the function.
        device: String,
        /// The BAR.
        bar: Bar,
    },
}
