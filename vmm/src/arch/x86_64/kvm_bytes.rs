// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! KVM's structures as hexadecimal text in saved state. The text contains the bytes of the structure, as the kernel's interface defines
//! them. Text whose length does not match the structure is an error.

use std::fmt;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// KVM structure that is saved as hexadecimal text.
#[derive(Clone, Copy, Default)]
pub(super) struct KvmBytes<T>(pub(super) T);

impl<T: IntoBytes + Immutable> fmt::Debug for KvmBytes<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0.as_bytes()))
    }
}

impl<T: IntoBytes + Immutable> Serialize for KvmBytes<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&hex::encode(self.0.as_bytes()))
    }
}

impl<'de, T: FromBytes> Deserialize<'de> for KvmBytes<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let bytes = bytes::deserialize(deserializer)?;
        let wanted = size_of::<T>();
        let value = T::read_from_bytes(&bytes);
        value.map(Self).map_err(|_| {
            D::Error::custom(format!("a saved KVM structure has {} bytes instead of {wanted}", bytes.len()))
        })
    }
}

/// Converts any number of bytes to hexadecimal text and back.
pub(super) mod bytes {
    use serde::de::Error as _;
    use serde::{Deserialize, Deserializer, Serializer};

    /// Writes bytes as text, for `#[serde(with = …)]`.
    pub(in super::super) fn serialize<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&hex::encode(bytes))
    }

    /// Reads bytes from text, for `#[serde(with = …)]`.
    pub(in super::super) fn deserialize<'de, S: Deserializer<'de>>(deserializer: S) -> Result<Vec<u8>, S::Error> {
        hex::decode(String::deserialize(deserializer)?).map_err(S::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use kvm_bindings::kvm_regs;

    use super::*;

    #[test]
    fn kvm_structure_round_trips_and_malformed_hex_is_refused() {
        let regs = kvm_regs { rip: 0x1234, rflags: 2, ..Default::default() };
        let text = serde_json::to_string(&KvmBytes(regs)).unwrap();
        let read: KvmBytes<kvm_regs> = serde_json::from_str(&text).unwrap();
        assert_eq!(read.0, regs);
        for wrong in [
            r#""""#.to_string(),
            text.replacen("00", "", 1),
            text.replacen("00", "0000", 1),
            text.replacen("00", "0g", 1),
        ] {
            assert!(serde_json::from_str::<KvmBytes<kvm_regs>>(&wrong).is_err(), "{wrong}");
        }
    }
}
