// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Default values of fields that are missing or null.

use serde::{Deserialize, Deserializer};

/// Returns true, as the default of a boolean field.
pub(crate) fn yes() -> bool {
    true
}

/// Returns `N`, as the default of a numeric field.
pub(crate) fn number<const N: u16, T: From<u16>>() -> T {
    N.into()
}

/// Reads a value, or its default for null. Clients of Cloud Hypervisor may send null for an empty value.
pub(crate) fn or_default<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(value: D) -> Result<T, D::Error> {
    Option::deserialize(value).map(Option::unwrap_or_default)
}
