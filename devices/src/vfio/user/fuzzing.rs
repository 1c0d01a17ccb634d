// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Server that sends arbitrary bytes, for a fuzzer and for replaying the fuzzer's findings.

use std::sync::Arc;
use std::time::Instant;

use iommu_bounce::Permissions;
use vm_memory::{Bytes, GuestAddress};

use super::connection::{Calls, take_message};
use super::version;
use super::wire::{self, ACCESS, Command, HEADER, Header, Kind};
use crate::dma::{Backing, DmaTable, fault_relay};
use crate::ram::Ram;

/// Requests that wait for answers. The requests have the numbers 0, 1 and so on.
const QUESTIONS: [Command; 8] = [
    Command::Version,
    Command::DeviceInfo,
    Command::RegionInfo,
    Command::IrqInfo,
    Command::RegionRead,
    Command::RegionWrite,
    Command::DmaMap,
    Command::Reset,
];
const PAGE: u64 = 0x1000;
/// IOVAs of the RAM pages that the server may read and write, only read, and only write.
const READ_WRITE: u64 = 0x10_0000;
const READ: u64 = 0x10_1000;
const WRITE: u64 = 0x20_0000;
/// Fill byte of each page of RAM.
const FILL: [u8; 4] = [0xa0, 0xa1, 0xa2, 0xa3];

/// Receives messages of a server (answers and requests), and checks that these messages have no forbidden effect.
///
/// # Panics
/// If a message has a forbidden effect, such as a write to read-only RAM.
pub fn server(mut data: &[u8]) {
    let ram = Arc::new(Ram::from_ranges(&[(GuestAddress(0), 0x4000)]).expect("there is memory"));
    for (page, byte) in (0u64..).zip(FILL) {
        ram.write_slice(&[byte; 0x1000], GuestAddress(page * PAGE)).expect("it is RAM");
    }
    let (sender, _relay) = fault_relay();
    let table = DmaTable::new("fuzzed", ram.clone(), Some((1, sender)));
    let both = Permissions::READ | Permissions::WRITE;
    for (iova, gpa, permissions) in
        [(READ_WRITE, PAGE, both), (READ, 2 * PAGE, Permissions::READ), (WRITE, 3 * PAGE, Permissions::WRITE)]
    {
        assert!(table.insert(iova, PAGE, Backing::Ram(gpa), permissions));
    }
    let calls = Calls::default();
    let ids = QUESTIONS.map(|command| calls.expect(command, 4096).expect("the server is not gone"));
    let mut send = |answer: &[u8]| {
        check_answer(answer);
        Ok(())
    };
    while take_message(&mut data, &calls, &table, &mut send).is_ok() {}
    for (id, command) in ids.into_iter().zip(QUESTIONS) {
        if let Some(Ok(answer)) = calls.wait(id, Instant::now()) {
            decode(command, &answer);
        }
    }
    let mut page = [0; 0x1000];
    for untouched in [0, 2] {
        ram.read_slice(&mut page, GuestAddress(untouched * PAGE)).expect("it is RAM");
        let byte = FILL[usize::try_from(untouched).expect("it is small")];
        assert!(page.iter().all(|found| *found == byte), "read-only RAM was written");
    }
}

/// Checks that an answer is complete and holds no byte of RAM that the server must not read.
fn check_answer(answer: &[u8]) {
    let header = Header::decode(answer.first_chunk().expect("an answer has a header")).expect("its header is valid");
    assert_eq!(answer.len(), HEADER + header.payload);
    let Kind::Reply { refused } = header.kind else { panic!("{header:?} is not an answer") };
    if refused.is_none() && header.command == Command::DmaRead.number() {
        let (iova, len) = wire::parse_dma_access(&answer[HEADER..]).expect("it has address and length");
        let end = iova.checked_add(len as u64).expect("a mapping does not wrap");
        assert!(len == 0 || (READ_WRITE..READ + PAGE).contains(&iova) && end <= READ + PAGE);
        assert_eq!(answer.len(), HEADER + ACCESS + len);
    }
}

fn decode(command: Command, answer: &[u8]) {
    match command {
        Command::Version => {
            if let Ok(abilities) = version::parse(answer) {
                assert!(abilities.granule.is_power_of_two() && abilities.descriptors > 0);
            }
        }
        Command::DeviceInfo => drop(wire::parse_device_info(answer)),
        Command::RegionInfo => drop(wire::parse_region_info(answer, 0)),
        Command::IrqInfo => drop(wire::parse_irq_info(answer, 1)),
        _ => {
            if let Some(data) = wire::parse_region_access(answer, 0, 0, 4) {
                assert!(data.len() <= answer.len());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use iommu_bounce::test_utils::replay;

    #[test]
    fn stored_inputs_have_no_forbidden_effect() {
        replay(concat!(env!("CARGO_MANIFEST_DIR"), "/fuzz/corpus/vfio_user"), 20, super::server);
    }

    mod any {
        use proptest::prelude::*;

        use super::super::*;

        fn message() -> impl Strategy<Value = Vec<u8>> {
            let iova = prop_oneof![any::<u64>(), 0xf_f000u64..0x10_3000, 0x1f_f000u64..0x20_2000];
            let bytes = prop::collection::vec(any::<u8>(), 0..64);
            (0u16..10, 0u16..20, 0u32..64, iova, 0u64..0x1800, bytes).prop_map(
                |(id, command, flags, iova, len, more)| {
                    let mut payload = Vec::new();
                    if command >= 9 {
                        payload.extend(iova.to_ne_bytes());
                        payload.extend(len.to_ne_bytes());
                    }
                    if command == Command::DmaWrite.number() {
                        payload.resize(ACCESS + usize::try_from(len).unwrap(), 0x5a);
                    } else if command != Command::DmaRead.number() {
                        payload.extend(more);
                    }
                    let mut message =
                        Header { id, command, kind: Kind::Reply { refused: None }, payload: payload.len() }.encode();
                    // Bits 1 to 3 would make the type invalid.
                    message[8..12].copy_from_slice(&(flags & 0x31).to_ne_bytes());
                    [&message[..], &payload].concat()
                },
            )
        }

        proptest! {
            #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

            #[test]
            fn messages_in_any_order_have_no_forbidden_effect(messages in prop::collection::vec(message(), 0..20)) {
                server(&messages.concat());
            }

            #[test]
            fn random_bytes_have_no_forbidden_effect(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
                server(&bytes);
            }
        }
    }
}
