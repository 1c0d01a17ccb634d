// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Why a function could not be put on the root bus.

use std::ops::RangeInclusive;

use thiserror::Error;

use super::{Bar, PciAddress};

/// Why the root bus could not be set up or a function not be added to it.
#[derive(Debug, Error)]
pub enum PciError {
    /// A window for BARs cannot be managed.
    #[error("{what} window {window:#x?} for PCI BARs is empty or wraps")]
    Window {
        /// Which window.
        what: &'static str,
        /// Its addresses.
        window: RangeInclusive<u64>,
    },
    /// The place is not function 0 of a device on the root bus of a segment.
    #[error("no function can be put at {0}: a segment that is there has device 0 to 31, function 0, of bus 00")]
    NoSuchPlace(PciAddress),
    /// Another function sits there.
    #[error("PCI address {address} is taken by {by}")]
    Occupied {
        /// The place.
        address: PciAddress,
        /// Name of the function that sits there.
        by: String,
    },
    /// A BAR fits in none of the windows that it may lie in.
    #[error("no room for BAR {} ({:#x} bytes) of {device} in the windows for PCI BARs", bar.index, bar.size)]
    NoSpace {
        /// Name of the function.
        device: String,
        /// The BAR.
        bar: Bar,
    },
}
