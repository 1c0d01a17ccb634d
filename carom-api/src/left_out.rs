// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Values of fields that are left out or null.

use serde::{Deserialize, Deserializer};

/// The value of a field that is on unless it is turned off.
pub(crate) fn yes() -> bool {
    true
}

/// The value `N`.
pub(crate) fn number<const N: u16, T: From<u16>>() -> T {
    N.into()
}

/// Reads a value. Clients of Cloud Hypervisor may send null for an empty one.
pub(crate) fn or_default<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(value: D) -> Result<T, D::Error> {
    Option::deserialize(value).map(Option::unwrap_or_default)
}
