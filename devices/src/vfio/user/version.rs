// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! VERSION, the first message: both sides report their version of the protocol and their limits.

use serde::{Deserialize, Serialize};

use super::wire::{self, MOST_DATA};

/// Version of the protocol that Carom speaks.
const MAJOR: u16 = 0;
const MINOR: u16 = 1;
/// Size in bytes of the smallest page that Carom maps, even if the server supports smaller pages.
const PAGE: u64 = 4096;
/// Widest access of a vCPU, in bytes.
const WIDEST_ACCESS: u64 = 8;

/// Limits that one side reports, as far as Carom uses them. A missing field has the specification's default.
#[derive(Serialize, Deserialize)]
#[serde(default)]
struct Capabilities {
    max_msg_fds: u64,
    max_data_xfer_size: u64,
    max_dma_maps: u64,
    pgsizes: u64,
}

impl Default for Capabilities {
    fn default() -> Self {
        Self { max_msg_fds: 1, max_data_xfer_size: MOST_DATA as u64, max_dma_maps: 65535, pgsizes: PAGE }
    }
}

#[derive(Default, Serialize, Deserialize)]
#[serde(default)]
struct Data {
    capabilities: Capabilities,
}

/// Capabilities of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Abilities {
    /// Maximum number of descriptors that the server accepts in one message, at least 1.
    pub(super) descriptors: u32,
    /// Maximum number of mappings that the server accepts.
    pub(super) mappings: u32,
    /// Size of the server's smallest page in bytes, a power of two, at least 4096.
    pub(super) granule: u64,
}

/// Returns the VERSION request, with Carom's version and limits.
pub(super) fn proposal() -> Vec<u8> {
    // None of the fields can fail to be serialized.
    let data = serde_json::to_string(&Data::default()).unwrap_or_default();
    wire::version(MAJOR, MINOR, &data)
}

/// Parses the answer to VERSION, with the server's version and limits. The error describes the fault.
pub(super) fn parse(answer: &[u8]) -> Result<Abilities, String> {
    let (major, minor, text) =
        wire::parse_version(answer).ok_or("sent an invalid answer to VERSION: update the server")?;
    if major != MAJOR || minor > MINOR {
        return Err(format!(
            "speaks version {major}.{minor} of the protocol instead of {MAJOR}.{MINOR}: use another version of the server"
        ));
    }
    let data: Data = match text.trim() {
        "" => Data::default(),
        text => serde_json::from_str(text)
            .map_err(|error| format!("sent capabilities that Carom cannot parse: {error}; update the server"))?,
    };
    let Capabilities { max_msg_fds, max_data_xfer_size, max_dma_maps, pgsizes } = data.capabilities;
    if max_msg_fds == 0 {
        return Err(
            "accepts no file descriptors (max_msg_fds is 0), but interrupts need them: use a server that accepts them"
                .into(),
        );
    }
    if max_data_xfer_size < WIDEST_ACCESS {
        return Err(format!(
            "accepts accesses of at most {max_data_xfer_size} bytes (max_data_xfer_size), but Carom needs accesses of {WIDEST_ACCESS} bytes: use a server that accepts them"
        ));
    }
    // Any multiple of the smallest page can be mapped. The server uses larger pages where it can.
    let smallest = pgsizes & pgsizes.wrapping_neg();
    if smallest == 0 {
        return Err("supports no page size (pgsizes is 0): update the server".into());
    }
    Ok(Abilities {
        descriptors: u32::try_from(max_msg_fds).unwrap_or(u32::MAX),
        mappings: u32::try_from(max_dma_maps).unwrap_or(u32::MAX),
        granule: smallest.max(PAGE),
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn answer(minor: u16, data: &str) -> Result<Abilities, String> {
        parse(&wire::version(MAJOR, minor, data))
    }

    #[test]
    fn defaults_are_those_of_the_specification() {
        let default = Abilities { descriptors: 1, mappings: 65535, granule: 4096 };
        for data in ["", "{}", r#"{"capabilities":{}}"#, r#"{"capabilities":{"twin_socket":{"supported":true}},"x":1}"#]
        {
            assert_eq!(answer(1, data), Ok(default), "{data}");
        }
        assert_eq!(answer(0, ""), Ok(default));
        assert_eq!(parse(&proposal()), Ok(default));
    }

    #[test]
    fn limits_of_the_server_are_used() {
        let data =
            r#"{"capabilities":{"max_msg_fds":8,"max_dma_maps":9999999999,"pgsizes":2162688,"max_data_xfer_size":64}}"#;
        assert_eq!(answer(1, data), Ok(Abilities { descriptors: 8, mappings: u32::MAX, granule: 1 << 16 }));
        assert_eq!(answer(1, r#"{"capabilities":{"pgsizes":513}}"#).unwrap().granule, 4096);
    }

    #[test]
    fn servers_with_useless_limits_are_refused_with_a_reason() {
        for (data, part) in [
            (r#"{"capabilities":{"max_msg_fds":0}}"#, "max_msg_fds"),
            (r#"{"capabilities":{"max_data_xfer_size":4}}"#, "max_data_xfer_size"),
            (r#"{"capabilities":{"pgsizes":0}}"#, "pgsizes"),
            (r#"{"capabilities":{"pgsizes":-1}}"#, "cannot parse"),
            (r#"{"capabilities":7}"#, "cannot parse"),
            ("{", "cannot parse"),
        ] {
            let error = answer(1, data).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
        assert!(answer(2, "").unwrap_err().contains("version 0.2"));
        assert!(parse(&wire::version(1, 0, "")).unwrap_err().contains("version 1.0"));
        assert!(parse(&[0]).is_err());
    }

    proptest! {
        #[test]
        fn any_answer_is_survived(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut answer = wire::version(MAJOR, MINOR, "");
            answer.splice(4.., bytes);
            if let Ok(abilities) = parse(&answer) {
                prop_assert!(abilities.granule.is_power_of_two() && abilities.descriptors > 0);
            }
        }
    }
}
