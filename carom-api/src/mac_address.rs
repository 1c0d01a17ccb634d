// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! MAC addresses of network devices.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::text_form::text_form;

/// Unicast MAC address, written as `02:00:00:00:00:01`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct MacAddress([u8; 6]);

impl MacAddress {
    /// Generates a random, locally administered address.
    pub fn random() -> Self {
        let mut bytes = [0; 6];
        // If the host has no random bytes yet, this call blocks. The error is ignored, because the call fails only if a signal arrives
        // while the call blocks.
        let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
        bytes[0] = bytes[0] & !1 | 2;
        Self(bytes)
    }

    /// Returns the bytes in transmission order.
    pub fn bytes(self) -> [u8; 6] {
        self.0
    }
}

impl FromStr for MacAddress {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const FORM: &str = "is not an address of the form 02:00:00:00:00:01";
        let (mut bytes, mut count) = ([0; 6], 0);
        for part in text.split(':') {
            let byte = bytes.get_mut(count).ok_or(FORM)?;
            if part.len() != 2 || !part.bytes().all(|digit| digit.is_ascii_hexdigit()) {
                return Err(FORM);
            }
            *byte = u8::from_str_radix(part, 16).map_err(|_| FORM)?;
            count += 1;
        }
        if count < bytes.len() {
            return Err(FORM);
        }
        // The same check as in Linux (`is_valid_ether_addr()`).
        if bytes[0] & 1 != 0 || bytes == [0; 6] {
            return Err("is not a unicast address: the first byte must be even, and the bytes must not all be 0");
        }
        Ok(Self(bytes))
    }
}

text_form!(MacAddress);

impl fmt::Display for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_text_is_parsed_and_printed() {
        let address: MacAddress = "02:0a:ff:00:00:01".parse().unwrap();
        assert_eq!((address.bytes(), address.to_string().as_str()), ([2, 10, 255, 0, 0, 1], "02:0a:ff:00:00:01"));
        assert_eq!("02:0A:FF:00:00:01".parse(), Ok(address));
        for wrong in [
            "",
            "02:0a:ff:00:00",
            "02:0a:ff:00:00:01:02",
            "02-0a-ff-00-00-01",
            "2:a:ff:0:0:1",
            "02:0a:ff:00:00:+1",
            "02:0a:ff:00:00:1é",
        ] {
            assert!(wrong.parse::<MacAddress>().unwrap_err().starts_with("is not an address"), "{wrong}");
        }
        for group in ["01:00:5e:00:00:01", "ff:ff:ff:ff:ff:ff", "00:00:00:00:00:00"] {
            assert!(group.parse::<MacAddress>().unwrap_err().contains("unicast"), "{group}");
        }
    }

    #[test]
    fn random_mac_addresses_differ_and_are_local_unicast() {
        let (one, other) = (MacAddress::random(), MacAddress::random());
        assert_ne!(one, other);
        assert_eq!(one.bytes()[0] & 3, 2);
        assert_eq!(one.to_string().parse(), Ok(one));
    }
}
